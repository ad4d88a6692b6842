"""Run: materialize, then publish, each under its lease and with one report. What cron calls."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime, timedelta

from jobs.config.project import Project
from jobs.config.view import ViewConfig
from jobs.pipeline.materialize import dry_run, materialize
from jobs.pipeline.plan import Plan
from jobs.pipeline.publish import accepted, publish, renew
from jobs.process.notify import notify
from jobs.process.progress import Progress
from jobs.process.report import PUBLISHING, close_dead, recorded
from store.clock import parsed_time
from store.disk.crashpoint import crashpoint
from store.disk.lease import Lease, is_held, take
from store.disk.reserve import keep_reserve
from store.errors import ConfigError, ConflictError, PrecomputeError, RequestError, SnapshotError
from store.offline.gc import SWEPT_FOLDERS, collect
from store.offline.refs import DROP_LEASE, PUBLISH_LEASE, run_lease
from store.offline.runs import AHEAD_S, Report
from store.offline.snapshot import Snapshot
from store.offline.standing import Standing
from store.offline.view_store import ViewStore
from store.online.online_url import open_online_store
from store.partition import Partition

log = logging.getLogger(__name__)

BRIEFLY_S = 2.0
"""How long a command waits for a lease: garbage collection holds one for an instant."""
PATIENTLY_S = 600.0
"""How long a run that has computed its rows waits to publish them."""


def run_view(
    project: Project,
    name: str,
    progress: Progress,
    *,
    command: str = "run",
    number: int | None = None,
    partition: Partition | None = None,
    full: bool = False,
    retry_rejected: bool = False,
    accept: Collection[str] = (),
    reload: bool = False,
    due: str | None = None,
    backfill: str | None = None,
    deadline_s: float | None = None,
    finished: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Run one view.

    Args:
        project: the configuration.
        name: of the view.
        progress: told how far it is.
        command: ``run``, or only its first half ``materialize``, or only its second half ``publish``.
        number: which snapshot to publish; the newest by default.
        partition: which one to compute; of a partitioned view the latest that is over by default.
        full: compute every row.
        retry_rejected: compute rows that were rejected with the same input, too.
        accept: gates whose refusal is accepted.
        reload: publish it again, though the online store seems to hold it.
        due: the schedule's time this run is for.
        backfill: id of the backfill this run is a part of.
        deadline_s: the kernel ends the process after this long, whatever it hangs in.
        finished: given the report once it is complete, of a failed run too.

    Returns:
        the report, as written.

    Raises:
        ConflictError: another run of the view, or of the partition, is going on, or the view is being dropped.
        GateError: a gate refused to publish; the snapshot is committed.
        PrecomputeError: what :func:`materialize` and :func:`publish` raise; the report says it too.
    """
    config, store = project.view(name), project.offline.view(name)
    part = None
    if command != "publish":
        partition = partition_of(config, partition)
        part = None if partition is None else str(partition)

    def ended(report: Report) -> None:
        if report.error is not None:
            notify(project.settings.notify, report, project.home)
        finished(report)

    with contextlib.ExitStack() as held:
        lease = None
        if command != "publish":
            busy = f"another run of view {name!r}{'' if part is None else f' and partition {part}'} is going on; wait for it, or look at `status`"
            lease = held.enter_context(
                take(store.leases, run_lease(part), command, ttl_s=project.settings.lease, busy=busy, wait_s=BRIEFLY_S)
            )
            if is_held(store.leases, DROP_LEASE):
                raise ConflictError(f"view {name!r} is being dropped; run it again if it is to be computed anew")
            close_dead(store, part)
            if due is not None and (done := _done(store, due)) is not None:
                log.info("view %r: the run due at %s is done already", name, due)
                return done
        known = {"partition": part, "due": due, "backfill": backfill, "parents": _parents(project, store)}
        report = held.enter_context(recorded(store, command, ended, **known))
        keep_reserve(project.root)
        held.enter_context(named(name))
        held.enter_context(_ended_by_kernel(deadline_s))
        held.callback(progress.end)
        if lease is None:
            snapshot = _asked(store, number, accept, report)
        else:
            snapshot = materialize(
                config,
                store,
                project.home,
                report,
                progress,
                partition=partition,
                full=full,
                retry_rejected=retry_rejected,
                accept=accept,
                lease=lease,
                memory_mb=project.settings.memory_mb,
                engine=project.settings.engine,
            )
        if command != "materialize":
            _publish(project, store, config, snapshot, report, progress, accept=accept, reload=reload, run=lease)
    return report


def plan_view(
    project: Project, name: str, *, partition: Partition | None = None, full: bool = False, retry_rejected: bool = False
) -> Plan:
    """What :func:`run_view` would compute, and why; nothing is written.

    Raises:
        PrecomputeError: as :func:`jobs.pipeline.materialize.materialize`.
    """
    config, store = project.view(name), project.offline.view(name)
    with named(name):
        return dry_run(
            config,
            store,
            project.home,
            Report("", name, "plan"),
            partition=partition_of(config, partition),
            full=full,
            retry_rejected=retry_rejected,
            memory_mb=project.settings.memory_mb,
        )


def partition_of(config: ViewConfig, partition: Partition | None) -> Partition | None:
    """The partition to compute: the one asked for, or the latest that is over; None for a view that has none.

    Raises:
        ConfigError: the view has no partitions, not one is over yet, or the one asked for is not over or before the first.
    """
    if config.partition is None and partition is not None:
        raise ConfigError(f"view {config.name!r} has no partitions: add partition: {{by: day, start: …}} to it, or ask for none")
    now = datetime.now(UTC)
    if partition is None or config.partition is None:
        return config.partition_at(now)
    if partition.end <= config.partition.start or partition.end > now:
        when = (
            "is not over yet" if partition.end > now else f"lies before the view's start, {config.partition.start:%Y-%m-%d %H:%M}"
        )
        raise ConfigError(f"view {config.name!r}: partition {partition} {when}")
    return partition


def _done(store: ViewStore, due: str) -> Report | None:
    """What became of the run for this time of the schedule: a scheduler that was killed may have started it before."""
    at = parsed_time(due)
    # A run begins after its time, but for a clock set back.
    since = "" if at is None else f"{at - timedelta(seconds=AHEAD_S):%Y%m%dT%H%M%S}"
    reports = store.runs.reports(200, since)
    return next((report for report in reports if parsed_time(report.due) == at and report.finished), None)


def _parents(project: Project, store: ViewStore) -> dict[str, int]:
    """Views this one is scheduled after → the epoch of what is live of them."""
    schedule = project.schedules().get(store.name)
    refs = {parent: store.offline.view(parent).refs.readable_live() for parent in (() if schedule is None else schedule.parents)}
    return {parent: ref.epoch for parent, ref in refs.items() if ref is not None}


def _asked(store: ViewStore, number: int | None, accept: Collection[str], report: Report) -> Snapshot:
    """The snapshot to publish, with the gates that were accepted now."""
    number = Standing(store).newest_publishable(accept) if number is None else number
    return accepted(store.snapshot(number), store, accept, report.run)


def _publish(
    project: Project,
    store: ViewStore,
    config: ViewConfig,
    snapshot: Snapshot,
    report: Report,
    progress: Progress,
    *,
    accept: Collection[str],
    reload: bool,
    run: Lease | None,
) -> None:
    name, nothing_new = config.name, report.status == "current"
    snapshot = accepted(snapshot, store, accept, report.run)
    wait_s = BRIEFLY_S if run is None else PATIENTLY_S
    busy = f"view {name!r} is being published, rolled back or cleaned up; wait for it, or look at `status`"
    with take(store.leases, PUBLISH_LEASE, report.command, ttl_s=project.settings.lease, busy=busy, wait_s=wait_s) as lease:
        close_dead(store, None, commands=PUBLISHING, own=report.run)
        if run is not None:
            run.check()  # once the publishing lease is held, nobody else can publish what a later run computed
        standing = Standing(store)
        asked = report.command == "publish" and report.backfill is None
        stays = None if asked else standing.why_unpublished(snapshot)
        goes_live = stays is None
        if stays is not None:
            ref = store.refs.readable_live()
            level = logging.WARNING if ref is not None and ref.held is not None else logging.INFO  # of a hold somebody is to know
            log.log(level, "view %r: snapshot %d is not published: %s", name, snapshot.number, stays)
        online = open_online_store(project.online)
        try:
            if goes_live:
                number, reason = snapshot.number, report.command
                publish(store, online, report, progress, number=number, reason=reason, reload=reload, lease=lease)
            elif snapshot.refused_by:  # it would not go live anyway, but nobody looks at a green run
                standing.check_publishable(snapshot)
            elif report.status == "running":
                report.snapshot, report.status = snapshot.number, "current"
            ref = store.refs.readable_live()
            if ref is not None and ref.snapshot == snapshot.number:
                if goes_live and ref.held is not None:  # it was live already, and an operator wants it published
                    store.refs.resume_live()
                if nothing_new and config.renew_unchanged:
                    renew(store, online, report.read_at_us, lease=lease)
        finally:
            online.close()
        if report.status == "published":
            notify(project.settings.notify, report, project.home)
        crashpoint("notify")
        settings = project.settings.retention
        with report.stage("gc"):
            leases = [lease] if run is None else [lease, run]
            try:
                collect(
                    store,
                    keep=settings.keep,
                    grace_s=settings.grace,
                    leases=leases,
                    swept=SWEPT_FOLDERS,
                    told=report.attention.append,
                )
            except SnapshotError as exc:  # what was published stays published; the next run removes it
                log.warning("%s", exc)


@contextlib.contextmanager
def _ended_by_kernel(deadline_s: float | None) -> Iterator[None]:
    """SIGALRM at the deadline, which ends the process whatever it hangs in: no thread of a hung interpreter could."""
    if deadline_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def named(view: str) -> Iterator[None]:
    """Every error names the view: in a cron mail there is nothing else to tell it by."""
    try:
        yield
    except PrecomputeError as exc:
        if view in str(exc) or isinstance(exc, RequestError):
            raise
        raise type(exc)(f"view {view!r}: {exc}") from exc
