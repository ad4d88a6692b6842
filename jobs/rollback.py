"""Rollback: back to a snapshot that was good, at once. One pointer move when the online store still holds it, which works when Redis is full."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from jobs.config import Project
from jobs.notify import notify
from jobs.progress import Progress
from jobs.publish import check_publishable, keeps_live, mend, publish
from jobs.report import PUBLISHING, Report, close_dead, recorded
from jobs.run import named
from store.errors import GateError, SnapshotError
from store.lease import take
from store.offline_store import PUBLISH_LEASE, LiveRef, OfflineStore
from store.online_url import open_online_store
from store.reserve import spending_reserve

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
    """Make an earlier snapshot live and mark the one that was live bad: neither it nor the same rows again are ever published.

    A publishing that is going on is fenced: the rollback wins.

    Args:
        project: the configuration.
        name: of the view.
        progress: told of the rows, if they must be loaded again.
        to: which snapshot; by default the one that was live before, or the newest good one below.
        hold: scheduled runs compute but publish nothing until ``publish`` or ``resume``.
        finished: given the report.

    Raises:
        SnapshotError: there is none to go back to, or not the one asked for; names those there are.
        GateError: the one asked for is marked bad itself.
        OnlineStoreError: the online store does not answer.
    """
    store = OfflineStore(project.root)
    project.named(name, store.views())

    def ended(report: Report) -> None:
        if report.error is not None:
            notify(project.settings.notify, report, project.home)
        finished(report)

    with (
        named(name),
        spending_reserve(store.root),
        take(store.lease_folder(name), PUBLISH_LEASE, "rollback", ttl_s=project.settings.lease, force=True) as lease,
        recorded(store, name, "rollback", ended) as report,
        contextlib.ExitStack() as held,
    ):
        ref = store.live(name)
        if ref is None:
            raise SnapshotError(f"view {name!r} was never published: there is nothing to go back from")
        close_dead(store, name, None, commands=PUBLISHING, own=report.run)
        online = held.enter_context(contextlib.closing(open_online_store(project.online)))
        if mend(name, store, online) and ref.reason.startswith("rollback") and to in (None, ref.snapshot):
            report.snapshot, report.epoch, report.status = ref.snapshot, ref.epoch, "published"  # the last one, killed half-way
            notify(project.settings.notify, report, project.home)
            return report
        target = _target(store, name, ref) if to is None else to
        snapshot = store.snapshot(name, target)
        if target == ref.snapshot:
            raise SnapshotError(
                f"snapshot {target} of view {name!r} is live already; name another one (there are: {_numbers(store, name)}; `precompute snapshots {name}` tells more)"
            )
        check_publishable(snapshot, store)  # before anything is marked
        store.mark_bad(name, ref.snapshot, "rolled back from", back_to=target)
        reason = f"rollback from {ref.snapshot}"
        publish(
            name,
            store,
            online,
            report,
            progress,
            number=target,
            reason=reason,
            held=f"{reason}, with --hold" if hold else None,
            lease=lease,
        )
        notify(project.settings.notify, report, project.home)
    return report


def _target(store: OfflineStore, name: str, ref: LiveRef) -> int:
    """What was live before, if it is still there and good, or the newest good snapshot below the live one."""
    entries = store.catalog(name).entries
    live = entries[ref.snapshot].partition if ref.snapshot in entries else None
    before = [
        entry
        for entry in entries.values()
        if entry.number != ref.snapshot
        and (entry.number < ref.snapshot or entry.number == ref.previous)
        and (live is None or (entry.partition or "") <= live)
    ]
    for entry in sorted(before, key=lambda e: (e.number == ref.previous, e.partition or "", e.number), reverse=True):
        try:
            snapshot = store.snapshot(name, entry.number)
            check_publishable(snapshot, store)
            if not keeps_live(snapshot) or entry.number == ref.previous:
                return entry.number
        except (SnapshotError, GateError) as exc:
            log.warning("%s", exc)
    raise SnapshotError(
        f"view {name!r} has no good snapshot before {ref.snapshot} to go back to (there are: {_numbers(store, name)})"
    )


def _numbers(store: OfflineStore, name: str) -> str:
    bad = store.bad(name)
    return ", ".join(f"{n} (bad)" if n in bad else str(n) for n in store.numbers(name)) or "none"
