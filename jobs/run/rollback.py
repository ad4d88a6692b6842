"""Rollback: makes an earlier snapshot live again; and reconcile, which repairs what is live: rows
that the online store lost, or a pointer that a crash left behind.

A rollback is one move of the pointer where the online store still holds the snapshot, which works
when that is full.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from precompute.jobs.config.project import Project
from precompute.jobs.run.command_process import Progress
from precompute.jobs.run.publisher import Publisher
from precompute.jobs.run.report import PUBLISHING, close_dead, notify, reporting_run
from precompute.jobs.run.run_view import naming_view_in_errors
from precompute.store.account.account import ROWS, Act, State
from precompute.store.account.checker import check_live
from precompute.store.disk.durable_file import spending_reserve
from precompute.store.disk.lease import is_held, take
from precompute.store.errors import ConflictError, PrecomputeError, SnapshotError
from precompute.store.offline.refs import PUBLISH_LEASE, BadMark, LiveRef
from precompute.store.offline.runs import Report
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.url import open_online_store

log = logging.getLogger(__name__)


def rollback(
    project: Project,
    name: str,
    progress: Progress,
    *,
    to: int | None = None,
    hold: bool = False,
    finished: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Make an earlier snapshot live and mark the one that was live bad: neither it, nor more of
    the same rows than ``gates.rolled_back`` allows, is published again.

    A publishing in progress is fenced: the rollback wins.

    Args:
        project: the configuration.
        name: of the view.
        progress: called with the rows done, if they must be loaded again.
        to: which snapshot; by default the one that was live before, or the newest good one below.
        hold: scheduled runs compute but publish nothing until ``publish`` or ``resume``; a view
            that is held stays so without it.
        finished: called with the report.

    Raises:
        SnapshotError: there is none to go back to, or not the one requested; names those there are.
        GateError: the one requested is marked bad itself.
        OnlineStoreError: the online store does not answer.
    """
    store = project.stored(name)

    def ended(report: Report) -> None:
        if report.error is not None:
            notify(project.settings.notify, report, project.home)
        finished(report)

    with (
        naming_view_in_errors(name),
        spending_reserve(project.root),
        take(
            store.leases, PUBLISH_LEASE, "rollback", ttl_s=project.settings.lease, force=True
        ) as lease,
        reporting_run(store, "rollback", ended) as report,
        contextlib.ExitStack() as resources,
    ):
        ref = store.refs.live()
        if ref is None:
            raise SnapshotError(
                f"view {name!r} was never published: there is nothing to go back from"
            )
        close_dead(store, None, commands=PUBLISHING, own=report.run)
        settings = project.settings
        online = resources.enter_context(
            contextlib.closing(open_online_store(project.online, memory_mb=settings.load_mb))
        )
        publisher = Publisher(store, online, report, progress, lease, memory_mb=settings.memory_mb)
        if (
            publisher.repair_pointer()
            and ref.reason.startswith("rollback")
            and to in (None, ref.snapshot)
        ):
            # the last rollback was killed half-way, and is finished now
            report.snapshot, report.epoch, report.status = ref.snapshot, ref.epoch, "published"
        else:
            _go_back(store, publisher, report, ref, to, hold=hold)
        notify(project.settings.notify, report, project.home)
    return report


def _go_back(
    store: ViewStore,
    publisher: Publisher,
    report: Report,
    ref: LiveRef,
    to: int | None,
    *,
    hold: bool,
) -> None:
    target, marks = _target(store, ref, to)
    report.snapshot, reason = target, f"rollback from {ref.snapshot}"
    publisher.publish(
        target,
        reason=reason,
        suspended=f"{reason}, with --hold" if hold else ref.held,
        moving=lambda: _marking(store, ref, marks),
    )


def _marks_of(store: ViewStore, number: int, target: int) -> dict[int, BadMark]:
    """The marks of the snapshot that is rolled back from. For one of all partitions, also those of
    the snapshots of its partitions that differ from the target's, so that the next one is not made
    of them."""
    entries = store.catalog().entries

    def members(of: int) -> dict[str | None, int]:
        # the catalog has them, too, if the manifest is damaged
        return {
            entries[n].partition: n
            for n in (entries[of].members if of in entries else ())
            if n in entries
        }

    left, back = members(number), members(target)
    at_fault = {
        partition: back.get(partition)
        for partition, n in left.items()
        if back and back.get(partition) != n
    }
    marks = {
        entry.number: store.bad_mark(
            entry.number,
            f"rolled back from, in snapshot {number}",
            back_to=at_fault[entry.partition],
        )
        for entry in entries.values()
        if entry.partition in at_fault and (at_fault[entry.partition] or 0) < entry.number <= number
    }
    marks[number] = store.bad_mark(number, "rolled back from", rows=not at_fault, back_to=target)
    return marks


@contextlib.contextmanager
def _marking(store: ViewStore, ref: LiveRef, marks: Mapping[int, BadMark]) -> Iterator[None]:
    """Mark what is rolled back from just before the pointer moves; where it does not move, the
    marks are as they were: what is live is good to build on."""
    refs = store.refs
    before = {number: refs.read_mark(number) for number in marks}
    try:
        for number, mark in marks.items():
            refs.mark_bad(number, mark)
        yield
    except BaseException:
        # what cannot be read now, or written, stays marked: a rollback that is done again ends that
        with contextlib.suppress(PrecomputeError):
            now = refs.readable_live()
            if now is None or now.snapshot == ref.snapshot:
                for number, mark_before in before.items():
                    refs.restore_mark(number, mark_before)
        raise


def _target(store: ViewStore, ref: LiveRef, to: int | None) -> tuple[int, dict[int, BadMark]]:
    """Number of the snapshot to go back to, after a check that it may be published, and the marks
    that this gives."""
    standing, name = Standing(store), store.name
    target = standing.before(ref) if to is None else to
    snapshot = store.snapshot(target)
    if target == ref.snapshot:
        raise SnapshotError(
            f"snapshot {target} of view {name!r} is live already; name another one (there are:"
            f" {standing.numbers_text()}; `precompute snapshots {name}` shows more)"
        )
    marks = _marks_of(store, ref.snapshot, target)
    # nor what builds on what is left
    standing.marks.update({n: mark for n, mark in marks.items() if n not in standing.marks})
    standing.check_publishable(snapshot)
    return target, marks


def reconcile(
    project: Project,
    name: str,
    progress: Progress,
    *,
    finished: Callable[[Report], None] = lambda _: None,
) -> Report | None:
    """Repair what is live: load again what is not whole, or move the online pointer where a crash
    left it behind; and remove what killed loads left in the online store. Until it is loaded,
    missing rows are answered as ``not_in_store``.

    Returns:
        the report; None when there is nothing that it can repair:
            :func:`precompute.store.account.account.read_account` has what it cannot.

    Raises:
        SnapshotError: what is live cannot be read.
        OnlineStoreError: the store does not answer, or does not take the rows.
        ConflictError: another run is publishing, or the view is another project's.
    """
    store = project.stored(name)
    with contextlib.closing(
        open_online_store(project.online, memory_mb=project.settings.load_mb)
    ) as online:
        with naming_view_in_errors(name):
            account = check_live(store, online)
            foreign = next(
                (finding for finding in account.findings if finding.state is State.FOREIGN), None
            )
            if foreign is not None:
                raise ConflictError(foreign.found)
            # what is under way is none of its business
            left = not is_held(store.leases, PUBLISH_LEASE) and online.unfinished(name)
            if account.act is Act.NOTHING and not left:
                return None
        busy = f"view {name!r} is being published, rolled back or cleaned up"
        with (
            naming_view_in_errors(name),
            take(
                store.leases, PUBLISH_LEASE, "reconcile", ttl_s=project.settings.lease, busy=busy
            ) as lease,
            reporting_run(store, "reconcile", finished) as report,
        ):
            close_dead(store, None, commands=PUBLISHING, own=report.run)
            ref = store.refs.readable_live()
            publisher = Publisher(
                store, online, report, progress, lease, memory_mb=project.settings.memory_mb
            )
            # what differs here from what the root has is fetched
            publisher.follow(again=True)
            records = [finding for finding in account.findings if finding.act is Act.REMOVE]
            for finding in records:
                store.storage.delete(Path(finding.what))
            # the view may have been published or dropped before the lease was taken
            account = check_live(store, online, publishing=True)
            publisher.sweep()
            report.attention += [*account.trouble, *(finding.found for finding in records)]
            if account.act is Act.NOTHING:
                report.status = "current"
                return report
            if ref is None:
                # the snapshot that was live, by the log of publishings; a hold is lost
                publisher.publish(account.snapshot, reason="reconcile", reload=True)
            elif publisher.repair_pointer():
                report.snapshot, report.epoch, report.status = ref.snapshot, ref.epoch, "published"
            else:
                if any(finding.what == ROWS for finding in account.findings):
                    publisher.degrade()
                load = account.act is Act.LOAD
                publisher.publish(ref.snapshot, reason="reconcile", suspended=ref.held, reload=load)
            check_live(store, online, publishing=True)
        notify(project.settings.notify, report, project.home)
    return report
