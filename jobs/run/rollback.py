"""Rollback: makes an earlier snapshot live again, and holds the view; resume, which lets go of it;
and reconcile, which repairs what is live: rows that the online store lost, or a pointer that a
crash left behind.

A rollback is one move of the pointer where the online store still holds the snapshot, which works
when that is full.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from precompute.jobs.config.project import Project
from precompute.jobs.run.command_process import Progress, operator
from precompute.jobs.run.publisher import Publisher
from precompute.jobs.run.report import PUBLISHING, close_dead, notify, notifying, reporting_run
from precompute.jobs.run.rows.plan import RunOptions
from precompute.jobs.run.run_view import let_go, naming_view_in_errors, note_hold, run_view
from precompute.store.account.account import ROWS, Account, Act, State
from precompute.store.account.checker import check_live
from precompute.store.disk.durable_file import spending_reserve
from precompute.store.disk.lease import is_held, take
from precompute.store.errors import ConflictError, SnapshotError
from precompute.store.offline import hooks
from precompute.store.offline.log import PUBLISH_LEASE, BadMark, Hold, LiveRef, Publishing
from precompute.store.offline.runs import Report
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.online_store import OnlineStore
from precompute.store.online.url import open_online_store
from precompute.store.times import parsed_time, utc_now

log = logging.getLogger(__name__)


def rollback(
    project: Project,
    name: str,
    progress: Progress,
    *,
    to: int | None = None,
    before: datetime | None = None,
    hold: bool = True,
    finished: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Make an earlier snapshot live, mark what was live since bad, and hold the view: runs are
    computed and judged, and publish nothing until ``resume``.

    A publishing in progress is fenced: the rollback wins.

    Args:
        project: the configuration.
        name: of the view.
        progress: called with the rows done, if they must be loaded again.
        to: which snapshot; by default the one that was live before the command that published the
            live one (a backfill publishes many), or the newest good one below.
        before: the one that was live before this time, aware; where it is live still, nothing
            moves.
        hold: False lets the next good run publish.
        finished: called with the report.

    Raises:
        SnapshotError: there is none to go back to, or not the one requested; names those there are.
        GateError: the one requested is marked bad itself.
        UnreadableError: something cannot be read now; nothing moved.
        OnlineStoreError: the online store does not answer.
    """
    store = project.stored(name)
    ended = notifying(project.settings.notify, project.home, finished)
    with (
        naming_view_in_errors(name),
        spending_reserve(project.root),
        take(
            store.leases, PUBLISH_LEASE, "rollback", ttl_s=project.settings.lease, force=True
        ) as lease,
        reporting_run(store, "rollback", ended) as report,
        contextlib.ExitStack() as resources,
    ):
        _live(store)
        close_dead(store, None, commands=PUBLISHING, own=report.run)
        settings = project.settings
        online = resources.enter_context(
            contextlib.closing(open_online_store(project.online, memory_mb=settings.load_mb))
        )
        publisher = Publisher(store, online, report, progress, lease, memory_mb=settings.memory_mb)
        _go_back(store, publisher, report, to, before, hold=hold)
        note_hold(store, report)
        notify(project.settings.notify, report, project.home)
    return report


def _go_back(
    store: ViewStore,
    publisher: Publisher,
    report: Report,
    to: int | None,
    before: datetime | None,
    *,
    hold: bool,
) -> None:
    ref = _live(store)
    repaired = publisher.repair_pointer() and ref.reason.startswith("rollback")
    finishes = repaired and before is None and to in (None, ref.snapshot)
    plan = None if finishes else plan_rollback(store, to, before)
    if plan is None or plan.target == ref.snapshot:
        # the last rollback was killed half-way, and is finished now; or there is nothing to do
        report.snapshot, report.epoch = ref.snapshot, ref.epoch
        report.status = "published" if repaired else "current"
        return
    reason, report.snapshot = f"rollback from {ref.snapshot}", plan.target
    held = Hold(utc_now(), f"rollback ({operator()})", f"went back from {ref.snapshot}")
    publisher.publish(plan.target, reason=reason, held=held if hold else None, marks=plan.marks)


def _live(store: ViewStore) -> LiveRef:
    ref = store.log.live()
    if ref is None:
        raise SnapshotError(
            f"view {store.name!r} was never published: there is nothing to go back from"
        )
    return ref


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """Where a rollback goes, and what it marks; ``target`` is the live snapshot where nothing is to
    move."""

    target: int
    marks: Mapping[int, BadMark]


def plan_rollback(
    store: ViewStore, to: int | None = None, before: datetime | None = None
) -> RollbackPlan:
    """Where a rollback of a view would go, after a check that it may; nothing moves.

    Args:
        store: of the view.
        to: which snapshot.
        before: the one that was live before this time, aware. Without both it is the one before
            the command that published the live one.

    Raises:
        SnapshotError, GateError, UnreadableError: as :func:`rollback`.
    """
    ref, name = _live(store), store.name
    publishings, standing = store.log.publishings(), Standing(store)
    if to is None:
        earlier = publishings[: first_of_run(ref, publishings)]
        if before is not None:
            earlier = [entry for entry in publishings if went_live(entry) < before]
        if earlier and earlier[-1].unknown:
            raise SnapshotError(
                f"what was live of view {name!r} then is not known, since {earlier[-1].unknown}:"
                f" restore it, or name a snapshot with --to (there are: {standing.numbers_text()})"
            )
        target = standing.before(ref, earlier, only=before is not None)
        if target == ref.snapshot:
            return RollbackPlan(target, {})
    else:
        target = to
    snapshot = store.snapshot(target)
    if target == ref.snapshot:
        raise SnapshotError(
            f"snapshot {target} of view {name!r} is live already; name another one (there are:"
            f" {standing.numbers_text()}; `precompute snapshots {name}` shows more)"
        )
    marks = _marks_of(store, ref.snapshot, target, publishings)
    # nor what builds on what is left
    Standing(store, left=marks).check_publishable(snapshot)
    return RollbackPlan(target, marks)


def first_of_run(ref: LiveRef, publishings: Sequence[Publishing]) -> int:
    """Position of the first publishing of the command that published what is live: a backfill
    publishes many times."""
    position = len(publishings)
    for entry in reversed(publishings):
        if entry.epoch != ref.epoch and (entry.run != ref.run or not ref.run):
            break
        position -= 1
    return position


def went_live(publishing: Publishing) -> datetime:
    """When the live pointer moved for it."""
    at = parsed_time(publishing.published_at)
    assert at is not None
    return at


def _marks_of(
    store: ViewStore, live: int, target: int, publishings: Sequence[Publishing]
) -> dict[int, BadMark]:
    """The marks of what is rolled back from: all that was live since the target was. For snapshots
    of all partitions, also those of their partitions' snapshots that differ from the target's, so
    that the next one is not made of them."""
    entries = store.catalog().entries
    last = max((i for i, entry in enumerate(publishings) if entry.snapshot == target), default=-1)
    since = {entry.snapshot for entry in publishings[last + 1 :] if entry.snapshot is not None}
    numbers = {live, *(number for number in since if number > target)}

    def members(of: int) -> dict[str | None, int]:
        # the catalog has them, too, if the manifest is damaged
        return {
            entries[n].partition: n
            for n in (entries[of].members if of in entries else ())
            if n in entries
        }

    back = members(target)
    newest = dict[str | None, int]()
    for number in sorted(numbers) if back else ():
        newest |= members(number)
    of_members = dict[int, int | None]()
    for entry in entries.values():
        if entry.partition in newest:
            first = back.get(entry.partition) or 0
            if first < entry.number <= newest[entry.partition]:
                of_members[entry.number] = back.get(entry.partition)
    reason = "rolled back from"
    marks = {number: store.bad_mark(number, reason, back_to=target) for number in numbers}
    marks |= {n: store.bad_mark(n, reason, back_to=first) for n, first in of_members.items()}
    return dict(sorted(marks.items()))


def resume(
    project: Project,
    name: str,
    progress: Progress,
    *,
    finished: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Let go of a view that is held, and publish the newest good snapshot that waits; where nothing
    newer does, it is only let go. So is one whose file is wrong, or gone.

    Raises:
        SnapshotError: the view was never published, or the snapshot is damaged.
        OnlineStoreError, ConflictError: as publishing; the view stays held.
    """
    if name in project.views:
        options = RunOptions(command="resume")
        return run_view(project, name, progress, options, finished=finished)
    store = project.stored(name)
    with (
        naming_view_in_errors(name),
        take(store.leases, PUBLISH_LEASE, "resume", ttl_s=project.settings.lease),
        reporting_run(store, "resume", finished) as report,
    ):
        let_go(store, report)
    return report


def _to_repair(store: ViewStore, online: OnlineStore) -> Account | None:
    """The account of a view of which something can be repaired, or removed; None where nothing can.

    Raises:
        ConflictError: it is another project's.
    """
    account = check_live(store, online)
    for finding in account.findings:
        if finding.state is State.FOREIGN:
            raise ConflictError(finding.found)
    # what is under way is none of its business
    left = not is_held(store.leases, PUBLISH_LEASE) and online.unfinished(store.name)
    return None if account.act is Act.NOTHING and not left else account


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
            account = _to_repair(store, online)
            if account is None:
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
            ref = store.log.readable_live()
            publisher = Publisher(
                store, online, report, progress, lease, memory_mb=project.settings.memory_mb
            )
            # what differs here from what the root has is fetched
            publisher.follow(again=True)
            records = [finding for finding in account.findings if finding.act is Act.REMOVE]
            for path in map(Path, (finding.what for finding in records)):
                of = path.stem.removeprefix("lease-")
                # who holds a lease, or takes it next, writes its record again
                if of == path.stem or (store.storage.local and not is_held(path.parent, of)):
                    store.storage.delete(path)
            if records:
                # what is derived is made again
                hooks.published(store)
            # the view may have been published or dropped before the lease was taken
            account = check_live(store, online, publishing=True)
            publisher.sweep()
            report.attention += [*account.trouble, *(finding.found for finding in records)]
            if account.act is Act.NOTHING:
                report.status = "current"
                return report
            if ref is None:
                # what readers are served
                held = store.log.held()
                publisher.publish(account.snapshot, reason="reconcile", held=held, found=account)
            elif publisher.repair_pointer():
                report.snapshot, report.epoch, report.status = ref.snapshot, ref.epoch, "published"
            else:
                if any(finding.what == ROWS for finding in account.findings):
                    publisher.degrade()
                publisher.publish(ref.snapshot, reason="reconcile", held=ref.held, found=account)
            check_live(store, online, publishing=True)
        notify(project.settings.notify, report, project.home)
    return report
