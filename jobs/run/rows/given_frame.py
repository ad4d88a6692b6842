"""Given frame: the rows that a program hands to a run, stored where the view's SQL reads them; a
run that is given none is refused."""

from __future__ import annotations

from precompute.jobs.run.job import Job
from precompute.sources.frame import write_frame
from precompute.store.disk.durable_file import disk_message, make_folder, replacing_durably
from precompute.store.errors import ConfigError, SnapshotError
from precompute.store.offline.view_store import FRAME


def take_frame(job: Job) -> None:
    """Store the frame of a run among its files; the caller holds the run's lease. Only a snapshot
    names it, so that what is live goes on with its own.

    Raises:
        ConfigError: the view takes a frame and none was given, or one was given and the view takes
            none.
        SourceError: it lacks a column, or cannot be read.
        SnapshotError: it cannot be written.
    """
    config, frame = job.config, job.options.frame
    path = job.store.data / job.report.run / FRAME
    name, columns = config.name, config.source.frame
    if columns is None and frame is None:
        return
    if columns is None:
        raise ConfigError(
            f"view {name!r} reads SQL, so it takes no frame: leave it out, or write source:"
            f" {{frame: [{', '.join(config.entity)}, …]}} in place of sql in"
            f" {job.project.folder / 'views' / name}.yaml"
        )
    if frame is None:
        raise ConfigError(
            f"view {name!r} takes its rows from a DataFrame, and this run was given none; only"
            f" Python gives one: precompute.open({str(job.project.folder)!r}).run({name!r},"
            " frame=df). What a schedule or the command line is to run reads source: {sql: …}"
        )
    try:
        make_folder(path.parent)
        with replacing_durably(path) as temporary:
            write_frame(frame, columns, config.entity, temporary)
    except OSError as exc:
        raise SnapshotError(disk_message(path, exc)) from exc
