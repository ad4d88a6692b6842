"""Reconcile: see that the online store serves what is live, and bring back what it lost: rows that were evicted, flushed, damaged, or gone with a failover."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from jobs.config.project import Project
from jobs.pipeline.run import named
from jobs.process.notify import notify
from jobs.process.progress import Progress
from jobs.process.report import PUBLISHING, close_dead, recorded
from jobs.publish.publisher import Publisher
from jobs.publish.served import HEALED, lost, lost_now
from store.disk.lease import take
from store.offline.refs import PUBLISH_LEASE
from store.offline.runs import Report
from store.online_url import open_online_store


def reconcile(
    project: Project, name: str, progress: Progress, *, finished: Callable[[Report], None] = lambda _: None
) -> Report | None:
    """Load again what the online store lost of what is live, or move its pointer where that was left behind. Until it is loaded, answers
    for rows that are not there say ``not_in_store``.

    Returns:
        the report; None when nothing was lost.

    Raises:
        SnapshotError: what is live cannot be read.
        OnlineStoreError: the store does not answer, or does not take the rows.
        ConflictError: somebody else publishes.
    """
    store = project.stored(name)
    with contextlib.closing(open_online_store(project.online, memory_mb=project.settings.memory_mb)) as online:
        with named(name):
            if lost(store, online) is None:
                return None
        busy = f"view {name!r} is being published, rolled back or cleaned up"
        with (
            named(name),
            take(store.leases, PUBLISH_LEASE, "reconcile", ttl_s=project.settings.lease, busy=busy) as lease,
            recorded(store, "reconcile", finished) as report,
        ):
            close_dead(store, None, commands=PUBLISHING, own=report.run)
            ref = store.refs.live()
            publisher = Publisher(store, online, report, progress, lease, memory_mb=project.settings.memory_mb)
            # somebody may have published, or ended the view, before the lease was taken
            wrong = lost_now(store, online)
            if ref is None or wrong is None:
                report.status = "current"
                return report
            report.attention.append(wrong)
            if publisher.mend():
                report.snapshot, report.epoch, report.status = ref.snapshot, ref.epoch, "published"
            else:
                publisher.degrade()
                publisher.publish(ref.snapshot, reason="reconcile", held=ref.held, reload=wrong != HEALED)
        notify(project.settings.notify, report, project.home)
    return report
