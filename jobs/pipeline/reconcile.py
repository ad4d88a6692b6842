"""Reconcile: look at what is live, and heal what the root can heal: rows that were evicted, flushed, damaged or gone with a failover, pointers, vector indexes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from precompute.jobs.config.project import Project
from precompute.jobs.pipeline.run import named
from precompute.jobs.process.notify import notify
from precompute.jobs.process.progress import Progress
from precompute.jobs.process.report import PUBLISHING, close_dead, recorded
from precompute.jobs.publish.publisher import Publisher
from precompute.store.account.account import ROWS, Act, State
from precompute.store.account.checker import look
from precompute.store.disk.lease import take
from precompute.store.errors import ConflictError
from precompute.store.offline.refs import PUBLISH_LEASE
from precompute.store.offline.runs import Report
from precompute.store.online_url import open_online_store


def reconcile(
    project: Project, name: str, progress: Progress, *, finished: Callable[[Report], None] = lambda _: None
) -> Report | None:
    """Load again what is not whole of what is live, or move the online pointer where that was left behind. Until it is loaded, answers
    for rows that are not there say ``not_in_store``.

    Returns:
        the report; None when there is nothing that it can heal: :func:`precompute.store.account.account.read_account` has what it cannot.

    Raises:
        SnapshotError: what is live cannot be read.
        OnlineStoreError: the store does not answer, or does not take the rows.
        ConflictError: somebody else publishes, or another project the view.
    """
    store = project.stored(name)
    with contextlib.closing(open_online_store(project.online, memory_mb=project.settings.load_mb)) as online:
        with named(name):
            account = look(store, online)
            foreign = next((finding for finding in account.findings if finding.state is State.FOREIGN), None)
            if foreign is not None:
                raise ConflictError(foreign.found)
            if account.act is Act.NOTHING:
                return None
        busy = f"view {name!r} is being published, rolled back or cleaned up"
        with (
            named(name),
            take(store.leases, PUBLISH_LEASE, "reconcile", ttl_s=project.settings.lease, busy=busy) as lease,
            recorded(store, "reconcile", finished) as report,
        ):
            close_dead(store, None, commands=PUBLISHING, own=report.run)
            ref = store.refs.readable_live()
            publisher = Publisher(store, online, report, progress, lease, memory_mb=project.settings.memory_mb)
            records = [finding for finding in account.findings if finding.act is Act.REMOVE]
            for finding in records:
                Path(finding.what).unlink(missing_ok=True)
            # somebody may have published, or ended the view, before the lease was taken
            account = look(store, online, publishing=True)
            report.attention += [*account.trouble, *(finding.found for finding in records)]
            if account.act is Act.NOTHING:
                report.status = "current"
                return report
            if ref is None:
                # what was live, by the log of publishings; a hold went with the pointer
                publisher.publish(account.snapshot, reason="reconcile", reload=True)
            elif publisher.mend():
                report.snapshot, report.epoch, report.status = ref.snapshot, ref.epoch, "published"
            else:
                if any(finding.what == ROWS for finding in account.findings):
                    publisher.degrade()
                publisher.publish(ref.snapshot, reason="reconcile", held=ref.held, reload=account.act is Act.LOAD)
            look(store, online, publishing=True)
        notify(project.settings.notify, report, project.home)
    return report
