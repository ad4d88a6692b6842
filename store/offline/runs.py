"""Runs: the report of each run, and the journal of one that is not finished: a line for each chunk,
which the next run of the same recipe and partition takes over.

A line of ``<root>/<view>/data/<run>/journal.jsonl`` is written after the chunk's files are durable;
one torn by a crash is a chunk that was not finished.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from precompute.store.disk.durable_file import disk_message
from precompute.store.disk.record import Record, content_of, field, read_record, record_of, sealed
from precompute.store.disk.storage import Item, no_answer, storage_of
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import LibraryCheck
from precompute.store.offline.segment import Part
from precompute.store.offline.snapshot import Verdict
from precompute.store.offline.stored_file import check_file
from precompute.store.times import AHEAD_US

log = logging.getLogger(__name__)

NAME = "journal.jsonl"

_OF_SHARDS = re.compile(r"-(s\d{5}-\d+|shards)$")


def run_of_folder(name: str) -> str:
    """The run whose files are in a folder of a view's data: of an attempt at a shard the run that
    the shard is of, as of what that run hands to its workers."""
    return _OF_SHARDS.sub("", name)


class Finished(Record, frozen=True):
    """A chunk an unfinished run had finished: its part, its rejected rows, or both; never
    neither."""

    part: Part | None
    rejected: Part | None

    @property
    def files(self) -> list[Part]:
        """Its files: part, rejected rows."""
        return [part for part in (self.part, self.rejected) if part is not None]


class Journals:
    """The journals of one view's runs that never committed.

    Args:
        folder: the view's.
        committed: returns which runs committed, and the paths of the files that manifests name.
    """

    def __init__(
        self, folder: Path, committed: Callable[[], tuple[frozenset[str], frozenset[str]]]
    ) -> None:
        self._folder, self._committed = folder, committed
        self._storage = storage_of(folder)

    def _path(self, run: str) -> Path:
        return self._folder / "data" / run / NAME

    def begin(self, run: str, recipe: str, partition: str | None, *, full: bool = False) -> None:
        """Open a run's journal: the chunks it will finish are of this recipe and partition;
        ``full`` if it is to compute every row. It is durable by the first chunk: its part syncs the
        folder, its line the file.

        Raises:
            SnapshotError: the file system failed.
        """
        path = self._path(run)
        try:
            line = sealed({"recipe": recipe, "partition": partition, "full": full})
            self._storage.append(path, line + b"\n", first=True)
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    def add(self, run: str, chunk: Finished) -> None:
        """Note a finished chunk, durably; its files are so by now. A line torn by a crash is a
        chunk that was not finished.

        Raises:
            SnapshotError: the file system failed.
        """
        path = self._path(run)
        try:
            self._storage.append(path, sealed(chunk) + b"\n")
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    def end(self, run: str) -> None:
        """Remove a run's journal: its manifest names its parts now. A journal that stays by
        accident does no harm."""
        with contextlib.suppress(OSError):
            self._storage.end_log(self._path(run))

    def runs(self) -> list[str]:
        """Ids of the runs that have a journal, in their order."""
        return [item.path.parent.name for item in self._items()]

    def chunks(self, run: str, recipe: str, partition: str | None) -> list[Finished]:
        """Chunks of one run, whose files may be damaged or gone (:meth:`whole`)."""
        return list(self._chunks(self._path(run), recipe, partition, full=False))

    def partitions(self) -> dict[Item, str | None]:
        """Journals of runs that never committed → their partition. One whose first line is torn
        holds nothing and counts for none."""
        return {item: self._partition(item.path) for item in self._items()}

    def unfinished(
        self, recipe: str, partition: str | None, *, full: bool = False
    ) -> list[Finished]:
        """Chunks of runs that never committed, of this recipe and partition, whose files are there
        with the size noted; the oldest first. With ``full`` only those of runs that computed every
        row.

        The caller holds the partition's lease, so that none of these runs goes on.
        """
        paths = [item.path for item in self._items()]
        runs, files = self._committed() if paths else (frozenset(), frozenset())
        chunks = []
        for path in paths:
            # of a run of shards the journals are its workers'
            if run_of_folder(path.parent.name) in runs:
                continue
            for chunk in self._chunks(path, recipe, partition, full):
                # A part that a manifest names is that snapshot's: the run that took it over may not
                # do it twice, since its kills of the part's other rows would hide them from the
                # snapshot that it builds on.
                if chunk.part is not None and chunk.part.path in files:
                    continue
                chunks.append(chunk)
        return self.here(chunks)

    def here(self, chunks: Sequence[Finished]) -> list[Finished]:
        """Those of the chunks whose files are here with the size noted; fetched where they lie
        elsewhere."""
        away = [part for chunk in chunks for part in chunk.files if not self._is_there(part)]
        if not away:
            return list(chunks)
        missing = [part.in_folder(self._folder) for part in away]
        # what is gone, or damaged there, is computed again
        with contextlib.suppress(FileNotFoundError, SnapshotError):
            self._storage.fetch(missing)
        return [chunk for chunk in chunks if all(self._is_there(part) for part in chunk.files)]

    def whole(self, chunks: Sequence[Finished]) -> list[Finished]:
        """Those of the chunks whose files have the SHA-256 that their journal notes; the others are
        reported in the log. Reads them all."""
        return [chunk for chunk in chunks if all(self._is_whole(part) for part in chunk.files)]

    def _is_there(self, part: Part) -> bool:
        try:
            # A Path costs three times as much, 10,000 times.
            return os.stat(f"{self._folder}/{part.path}").st_size == part.size_bytes
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as exc:
            raise no_answer(self._folder / part.path, exc) from exc

    def _is_whole(self, part: Part) -> bool:
        try:
            check_file(part.in_folder(self._folder))
            return True
        except SnapshotError as exc:
            log.warning(
                "%s: an interrupted run finished it, and its rows are computed once more", exc
            )
            return False

    def _items(self) -> list[Item]:
        return self._storage.logs(self._folder / "data", NAME)

    def _partition(self, path: Path) -> str | None:
        """The partition its run was for; None of a view that has none, and of a journal whose first
        line is torn, or that was removed meanwhile."""
        try:
            line, _, _ = self._storage.appended(path, first=True).partition(b"\n")
            partition: str | None = content_of(line, path)["partition"]
            return partition
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _chunks(
        self, path: Path, recipe: str, partition: str | None, full: bool
    ) -> Iterator[Finished]:
        """Its chunks, if it is of this recipe and partition, and of a run of every row where
        ``full`` is wanted."""
        try:
            lines = self._storage.appended(path).split(b"\n")
        except FileNotFoundError:
            return
        for number, line in enumerate(lines):
            try:
                entry = content_of(line, path)
                if number == 0:
                    if (entry["recipe"], entry["partition"]) != (recipe, partition) or (
                        full and not entry["full"]
                    ):
                        return
                    continue
                yield record_of(Finished, entry)
            except (ValueError, KeyError, TypeError):
                # Torn: neither this line nor what follows it was finished.
                return


# ---- Runs: what was done to a view, a report each: the ledger that planning, scheduling and
# people read.


FINISHED = ("published", "committed", "current")
"""Statuses of runs that did what they were for."""

AHEAD_S = 86400.0
"""Seconds ahead of the clock that a noted time may lie: a clock set back by hours runs nothing
twice. Beyond that the clock was wrong when it was noted."""

_STAMP = "%Y%m%dT%H%M%S.%fZ"


class Usage(Record):
    """What a run took of its machine. What cannot be known here is 0, or None of shares."""

    kind: str | None = None
    """What rows it computed: ``full`` (every row), ``delta``, or ``compacting`` (a delta whose
    parent's rows were copied); None of a run that computed nothing."""
    cores: int = 0
    """CPUs that it could use."""
    device: str = "cpu"
    """What the model computed on: ``cpu`` or ``cuda``."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Stage → CPU seconds of the run's own process, in all its threads. Stages are those of
    :attr:`Report.stages_s`, but of those that overlap ``read`` is the thread that reads the source,
    ``write`` the one that writes parts, and ``model`` all else that computes meanwhile; ``other``
    is what no stage took."""
    workers_cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds of the stages in worker processes."""
    workers: int = 0
    """Worker processes that computed rows; 0: the run's own process did."""
    gpu_s: float = 0.0
    """Seconds that the model's stage was busy with a GPU, of all GPUs together."""
    peak_bytes: int = 0
    """The most memory that the process ever held, pages of mapped files among it."""
    worker_peak_bytes: int = 0
    """The same, of the worker that took most."""
    source_bytes: int = 0
    """What DuckDB held of the source's rows, when those to compute were computed; 0 of a run of an
    instant."""
    spilled_bytes: int = 0
    """Bytes of these that were on disk, since they did not fit in memory."""
    read_bytes: int = 0
    """Bytes that were read by system calls, of files in the system's cache, too, and of messages of
    workers."""
    written_bytes: int = 0
    """Size of the files of its snapshot in the root, and of the vector index that it built
    there."""
    loaded_rows: int = 0
    """Rows and tombstones that were loaded into the online store."""
    loaded_bytes: int = 0
    """Size of the table files that were loaded; elsewhere, of keys and packed rows."""
    upper_only: bool = False
    """Whether all of these were loaded over a segment that was there."""
    idle: float | None = None
    """Share of the machine's CPU time that no process used while the run lasted."""
    steal: float | None = None
    """Share of it that the machine's own host took."""


class Report(Record):
    """One run; times in seconds.

    ``status``: running · published · committed (not published) · current (nothing to do) · refused
    (by a gate) · rejected (too many rows) · failed · cancelled (interrupted) · killed.
    """

    run: str
    view: str
    command: str
    status: str = "running"
    started_at: str = ""
    finished_at: str = ""
    seconds: float = 0.0
    snapshot: int | None = None
    epoch: int | None = None
    model: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    rows_per_s: float | None = None
    stages_s: dict[str, float] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    """What computing took, stage by stage, as the engine's meter has it."""
    index: dict[str, Any] = field(default_factory=dict)
    """What was measured of the vector index, where one was built: see
    :class:`precompute.store.vectors.index_files.IndexFigures`."""
    inputs: dict[str, int] = field(default_factory=dict)
    gates: list[Verdict] = field(default_factory=list)
    announced: str = ""
    """Why some of these warn that would refuse, and who announced it; empty of an ordinary run."""
    resumed: int = 0
    """Rows an interrupted run had computed."""
    plan: str | None = None
    """Which rows were computed, and why."""
    partition: str | None = None
    backfill: str | None = None
    """Id of the backfill it was a part of."""
    due: str | None = None
    """The schedule's time it ran for, ISO 8601 in UTC."""
    ahead: bool = False
    """Whether that time lay ahead of the clock, which was wrong when the run was made: it counts
    for no time."""
    untold: bool = False
    """Whether the scheduler has yet to call the operator's command with it."""
    config: str | None = None
    """Stamp of the project's files, where these could not be used: the time is run for once they
    have another."""
    parents: dict[str, int] = field(default_factory=dict)
    """Views it is scheduled after → the epoch of their live pointer when it began."""
    pid: int = 0
    read_at_us: int = 0
    """When the source was read, µs since 1970."""
    source_at: str | None = None
    """When the source itself was last modified, ISO 8601 in UTC; None where it is not known."""
    looked_at: list[str] = field(default_factory=list)
    """Other partitions, whose source was read again after the run."""
    late: list[str] = field(default_factory=list)
    """Those of them whose source yields other rows than they were computed from."""
    error: str | None = None
    files: dict[str, Part] = field(default_factory=dict)
    """Its files that no other record may name: ``rejected``, the rows that it rejected, and
    ``frame``, those that it was given."""
    attention: list[str] = field(default_factory=list)
    """What an operator should look at though the run went well."""
    held: str | None = None
    """That its view is held, since when and by whom, and what waits; None where it is not."""
    library: LibraryCheck | None = None
    """How the view's model compares with its own library; None of one that has none."""
    versions: dict[str, str] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)

    @property
    def finished(self) -> bool:
        """Whether it did what it was for."""
        return self.status in FINISHED

    @contextlib.contextmanager
    def stage(self, name: str, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
        """Add the time spent inside to a stage, and the CPU seconds by ``clock``: those of the
        whole process, or by ``time.thread_time`` of this thread alone, where others work for other
        stages meanwhile."""
        started, computed_s = time.monotonic(), clock()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)
            self.add_cpu(name, clock() - computed_s)

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to a stage."""
        self.stages_s[name] = self.stages_s.get(name, 0.0) + seconds

    def add_cpu(self, name: str, seconds: float, *, workers: bool = False) -> None:
        """Add CPU seconds to a stage: of the run's own process, or of its ``workers``."""
        of = self.usage.workers_cpu_s if workers else self.usage.cpu_s
        of[name] = of.get(name, 0.0) + seconds


class Runs:
    """The runs of one view.

    Args:
        folder: of their reports; made by the first.
        running: folder of the markers.
        view: the view's name, for messages.
    """

    def __init__(self, folder: Path, running: Path, view: str) -> None:
        self.folder, self._running, self._view = folder, running, view
        self._storage = storage_of(folder)

    def stamp(self) -> str:
        """The time that the id of a run begins with that begins now. Ids sort in the order of the
        runs, whatever the clocks say: where an earlier run's time lies ahead, since its clock was
        wrong, this one's is a microsecond later."""
        now = datetime.now(UTC)
        for name in self._names():
            try:
                last = datetime.strptime(name[:23], _STAMP).replace(tzinfo=UTC)
            except ValueError:
                # Not one of ours.
                continue
            if last >= now:
                if last - now > timedelta(microseconds=AHEAD_US):
                    log.warning(
                        "view %r: run %s is dated %d s ahead of this clock, which jumped, or that"
                        " one's was wrong",
                        self._view,
                        name.removesuffix(".json"),
                        (last - now).total_seconds(),
                    )
                now = last + timedelta(microseconds=1)
            break
        return now.strftime(_STAMP)

    def path(self, run: str) -> Path:
        """Where a run's report is."""
        return self.folder / f"{run}.json"

    def write(self, report: Report, state: str = "only the run's report is missing") -> None:
        """Write a run's report, whole or not at all; a second report of the same run replaces the
        first.

        Raises:
            SnapshotError: it cannot be written; ``state`` says what else is lost.
        """
        path, marker, goes_on = (
            self.path(report.run),
            self._running / report.run,
            report.status == "running",
        )
        try:
            if goes_on:
                # before the report: so that unended ones are found without reading all
                self._storage.write(marker, b"")
            self._storage.write(path, sealed(report, indent=1))
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc, state)) from exc
        if not goes_on:
            with contextlib.suppress(OSError):
                self._storage.delete(marker)

    def withdraw(self, report: Report) -> None:
        """Remove the report of a command that was refused and changed nothing."""
        for path in (self.path(report.run), self._running / report.run):
            with contextlib.suppress(OSError):
                self._storage.delete(path)

    def unended(self) -> list[Report]:
        """Reports of the runs that did not write their end: they go on, or died."""
        unended = []
        for name in sorted(self._storage.names(self._running), reverse=True):
            if name.startswith("."):
                continue
            marker = self._running / name
            try:
                path = self.path(name)
                report = read_record(Report, self._storage.read(path), path)
            except FileNotFoundError:
                # About to be written, or never was.
                continue
            except ValueError as exc:
                log.warning("the report of run %s cannot be read (%s)", name, exc)
                continue
            if report.status == "running":
                unended.append(report)
            else:
                # It ended, and was killed before it could remove its marker.
                with contextlib.suppress(OSError):
                    self._storage.delete(marker)
        return unended

    def reports(self, limit: int = 100, since: str = "") -> list[Report]:
        """Reports of the newest runs, the newest first; run ids sort in the order of the runs
        (:meth:`stamp`). One that cannot be read is skipped, and reported in the log.

        Args:
            limit: how many at most.
            since: none of a run whose id is below.
        """
        return list(islice(self.each(since), limit))

    def each(self, since: str = "") -> Iterator[Report]:
        """As :meth:`reports`, one after the other."""
        for name in self._names():
            if name < since:
                break
            try:
                path = self.folder / name
                yield read_record(Report, self._storage.read(path), path)
            except FileNotFoundError:
                # Removed meanwhile.
                continue
            except ValueError as exc:
                log.warning(
                    "the run's report %s cannot be read (%s); remove the file",
                    self.folder / name,
                    exc,
                )

    def read(self, run: str) -> Report:
        """One run's report.

        Raises:
            SnapshotError: there is none, or it is damaged.
            UnreadableError: it cannot be read now.
        """
        try:
            return read_record(Report, self._storage.read(self.path(run)), self.path(run))
        except (FileNotFoundError, ValueError) as exc:
            raise SnapshotError(
                f"the report of run {run!r} of view {self._view!r} cannot be read: {exc}"
            ) from exc

    def last(self) -> Report | None:
        """The newest run's report."""
        return next(iter(self.reports(1)), None)

    def _names(self) -> list[str]:
        """File names of the reports, the newest first; a Path for each would cost as much as all
        the rest."""
        names = self._storage.names(self.folder)
        return sorted(
            (name for name in names if name.endswith(".json") and not name.startswith(".")),
            reverse=True,
        )

    def ids(self) -> list[str]:
        """Ids of all runs that have a report, the newest first."""
        return [name.removesuffix(".json") for name in self._names()]
