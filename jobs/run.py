"""Run: materialize, then publish, under the view's lock and with one report. What cron calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jobs.config import Project
from jobs.materialize import materialize
from jobs.progress import Progress
from jobs.publish import publish
from jobs.report import Report, recorded
from store.errors import PrecomputeError, RequestError
from store.offline_store import OfflineStore
from store.online_url import open_online_store


def run_view(
    project: Project,
    name: str,
    progress: Progress,
    *,
    command: str = "run",
    number: int | None = None,
    finished: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Run one view.

    Args:
        project: the configuration.
        name: of the view.
        progress: told how far it is.
        command: ``run``, or only its first half ``materialize``, or only its second half ``publish``.
        number: which snapshot to publish; the newest by default.
        finished: given the report once it is complete, of a failed run too.

    Returns:
        the report, as written.

    Raises:
        ConflictError: another run of the view is going on.
        PrecomputeError: what :func:`materialize` and :func:`publish` raise; the report says it too.
    """
    config = project.view(name)
    store = OfflineStore(project.root)
    with store.run_lock(name), recorded(store, name, command, finished) as report, named(name):
        try:
            if command != "publish":
                snapshot = materialize(config, store, report, progress, memory_mb=project.settings.memory_mb)
                number = snapshot.number
            if command != "materialize":
                online = open_online_store(project.online)
                try:
                    publish(name, store, online, report, progress, number=number, reason=command)
                finally:
                    online.close()
        finally:
            progress.end()
    return report


@contextlib.contextmanager
def named(view: str) -> Iterator[None]:
    """Every error names the view: in a cron mail there is nothing else to tell it by."""
    try:
        yield
    except PrecomputeError as exc:
        if view in str(exc) or isinstance(exc, RequestError):
            raise
        raise type(exc)(f"view {view!r}: {exc}") from exc
