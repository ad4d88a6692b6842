"""Chain: a view and the views that were made from it, rolled back together, each to what was live
before the same moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from precompute.jobs.config.project import Project
from precompute.jobs.run.command_process import Progress
from precompute.jobs.run.rollback import first_of_run, plan_rollback, rollback, went_live
from precompute.jobs.run.run_view import check_online, naming_view_in_errors
from precompute.jobs.schedule.dependencies import Dependencies
from precompute.store.errors import PrecomputeError, SnapshotError
from precompute.store.offline.runs import Report


@dataclass(frozen=True, slots=True)
class Link:
    """One view of a chain. ``status``: published (it went back) · current (what is live was live
    before the moment already) · failed · waiting (it was not begun, since one before it failed).
    ``held`` says that it is held, if it is."""

    view: str
    status: str
    snapshot: int | None = None
    run: str | None = None
    held: str | None = None
    error: str | None = None


def made_from(project: Project, name: str) -> list[str]:
    """The views that read the live rows of a view, as they are configured or as what is live of
    them was computed, themselves or through others; each before those that it was made from, and
    the view itself last."""
    reads: dict[str, set[str]] = {}
    for other in project.names:
        reads[other] = set(project.views[other].inputs() if other in project.views else ())
        store = project.offline.view(other)
        # of one that is damaged the configuration knows
        with contextlib.suppress(SnapshotError):
            ref = store.log.live()
            reads[other].update(() if ref is None else store.snapshot(ref.snapshot).inputs)
    chosen, ahead = {name}, [name]
    while ahead:
        at = ahead.pop()
        found = [other for other, of in reads.items() if at in of and other not in chosen]
        chosen.update(found)
        ahead += found
    order = Dependencies(project).order
    return [other for other in reversed(order) if other in chosen and other != name] + [name]


def rollback_chain(
    project: Project,
    name: str,
    progress: Progress,
    *,
    before: datetime | None = None,
    hold: bool = True,
    finished: Callable[[Report], None] = lambda _: None,
) -> list[Link]:
    """Roll a view back, and what was made from it. All are checked before the first moves; the view
    itself goes last, so that after a failure the same command finishes what is left.

    Args:
        project: the configuration.
        name: of the view.
        progress: called with the rows done, where they must be loaded again.
        before: the moment, aware; by default when the command that published what is live of the
            view first published.
        hold: False lets their next good runs publish.
        finished: called with each report.

    Returns:
        a link for each view, in the order in which they went.

    Raises:
        SnapshotError, GateError: one of them cannot go back; nothing moved.
        OnlineStoreError, ConflictError: the online store cannot be reached or written, or a view is
            another project's; nothing moved.
        UnreadableError: something cannot be read now; nothing moved.
    """
    store = project.offline.view(name)
    ref = store.log.live()
    if ref is None:
        raise SnapshotError(f"view {name!r} was never published: there is nothing to go back from")
    publishings = store.log.publishings()
    moment = before or went_live(publishings[first_of_run(ref, publishings)])
    names = [
        other
        for other in made_from(project, name)
        if project.offline.view(other).log.live() is not None
    ]
    for other in names:
        with naming_view_in_errors(other):
            of = project.offline.view(other)
            # the view itself may lie where the last rollback was killed
            if other != name or before is not None:
                of.layers(of.snapshot(plan_rollback(of, before=moment).target))
            check_online(project, other)
    links: list[Link] = []
    for other in names:
        if links and links[-1].status in ("failed", "waiting"):
            links.append(Link(other, "waiting", error=f"not begun, since {links[-1].view} is not"))
            continue
        since = before if other == name else moment
        try:
            report = rollback(project, other, progress, before=since, hold=hold, finished=finished)
        except PrecomputeError as exc:
            links.append(Link(other, "failed", error=str(exc)))
        else:
            links.append(Link(other, report.status, report.snapshot, report.run, report.held))
    return links
