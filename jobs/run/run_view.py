"""Run view: one run of a view, from preflight to publishing and the search for late rows, under the
lease of the view or of its partition, with one report.

preflight, what would keep it from publishing ─► materialize, or the snapshot that is named ─►
publish, under the publishing lease, and garbage collection ─► late rows: other partitions whose
source yields other rows than they were computed from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

from precompute.jobs.config.project import Project, RetentionConfig
from precompute.jobs.config.view import PartitionConfig, ViewConfig
from precompute.jobs.run.command_process import Progress, operator
from precompute.jobs.run.judge.contract import judge_contract
from precompute.jobs.run.judge.gates import accept, served_snapshot
from precompute.jobs.run.judge.verdicts import Verdicts
from precompute.jobs.run.materialize import dry_run, materialize
from precompute.jobs.run.publisher import Publisher
from precompute.jobs.run.report import (
    PUBLISHING,
    close_dead,
    is_told,
    notify,
    notifying,
    reporting_run,
)
from precompute.jobs.run.rows.merging import assembled
from precompute.jobs.run.rows.open_model import Load
from precompute.jobs.run.rows.open_view import open_source
from precompute.jobs.run.rows.plan import Plan, RunOptions
from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import keep_reserve
from precompute.store.disk.lease import Lease, is_held, take
from precompute.store.disk.storage import identity_of, known_identity
from precompute.store.errors import (
    ConfigError,
    ConflictError,
    GateError,
    OnlineStoreError,
    PrecomputeError,
    RequestError,
    SnapshotError,
    UnreadableError,
)
from precompute.store.offline import hooks
from precompute.store.offline.gc import SWEPT_FOLDERS, collect
from precompute.store.offline.log import DROP_LEASE, PUBLISH_LEASE, Hold, run_lease
from precompute.store.offline.runs import AHEAD_S, Report
from precompute.store.offline.snapshot import Snapshot, Verdict
from precompute.store.offline.standing import Bad, Refused, Standing, is_earlier, keeps_live
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.online.url import open_online_store
from precompute.store.times import Partition, parsed_time, utc_now

log = logging.getLogger(__name__)

BRIEFLY_S = 2.0
"""How long a command waits for a lease: garbage collection holds one for an instant."""
PATIENTLY_S = 600.0
"""How long a run that has computed its rows waits to publish them."""


def run_view(
    project: Project,
    name: str,
    progress: Progress,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
    *,
    finished: Callable[[Report], None] = lambda _: None,
    load: Load | None = None,
) -> Report:
    """Run one view.

    Args:
        project: the configuration.
        name: of the view.
        progress: called with how far it is.
        options: what is requested.
        finished: called with the report once it is complete, of a failed run too.
        load: makes the model, as :func:`precompute.jobs.run.rows.open_view.open_view` has it.

    Returns:
        the report, as written; if this time of the schedule was run already, the report of that
            run.

    Raises:
        ConflictError: another run of the view or of the partition is in progress, or the view is
            being dropped.
        GateError: a gate refused to publish; the snapshot is committed.
        PrecomputeError: as :func:`materialize` and publishing; the report has it too.
    """
    config, store = project.view(name), project.offline.view(name)
    computes = options.command not in ("publish", "resume")
    partition = partition_of(config, options.partition) if computes else None
    options = replace(options, partition=partition)
    # of a run that the scheduler began it tells itself, also when that was killed
    command = [] if options.due else project.settings.notify
    ended = notifying(command, project.home, finished)
    with contextlib.ExitStack() as stack:
        _check_root(project, options)
        lease = stack.enter_context(_run_lease(project, store, options)) if computes else None
        done = _done(store, options.due) if computes else None
        if done is not None:
            log.info("view %r: the run due at %s is done already", name, options.due)
            return done
        report = stack.enter_context(
            reporting_run(
                store,
                options.command,
                ended,
                partition=options.partition_text,
                due=options.due,
                untold=bool(options.due and project.settings.notify),
                backfill=options.backfill,
                parents=_parents(project, store),
            )
        )
        keep_reserve(project.root)
        stack.enter_context(naming_view_in_errors(name))
        stack.enter_context(_ended_by_kernel(options.deadline_s))
        stack.callback(progress.end)
        snapshot = None
        if computes:
            snapshot = _computed(project, store, options, report, progress, lease, load)
        elif options.command == "publish":
            snapshot = _snapshot_to_publish(config, store, options, report)
        if options.command != "materialize":
            _publish(project, config, store, options, lease, snapshot, report, progress)
        else:
            note_hold(store, report)
        if options.command == "run" and options.backfill is None and snapshot is not None:
            _note_late_rows(project, store, snapshot, report)
    return report


def _check_root(project: Project, options: RunOptions) -> None:
    """Compare the root with the one that the scheduler knows, where that began the run.

    Raises:
        ConflictError: it is another folder, such as the empty one below a disk that is not mounted.
    """
    known = known_identity(project.root)
    if options.root is not None and options.root != (known or None):
        raise ConflictError(
            f"{project.root} is not the root {options.root} that the scheduler began this run for;"
            " nothing was begun. Is its disk mounted?"
        )


def _computed(
    project: Project,
    store: ViewStore,
    options: RunOptions,
    report: Report,
    progress: Progress,
    lease: Lease | None,
    load: Load | None,
) -> Snapshot:
    """The snapshot that the run computed, or found unchanged, after a look at what would keep it
    from publishing that."""
    name, partition = store.name, report.partition
    # by which the scheduler knows the root
    identity_of(project.root)
    if options.command == "run":
        check_before(project, name, partition, accept=options.accept, take_over=options.take_over)
    snapshot = materialize(project, store, options, report, progress, lease, load)
    report.attention += hooks.committed(store, partial(project.wants, project.view(name)))
    return snapshot


def _note_late_rows(project: Project, store: ViewStore, made: Snapshot, report: Report) -> None:
    """Note which other partitions have late rows, of a view that has partitions."""
    partitions = project.view(store.name).partition
    if partitions is not None:
        with report.stage("late rows"):
            late = find_late_rows(project, partitions, store, made, report.stages_s)
        report.looked_at, report.late = list(late), [of for of in late if late[of]]


def _run_lease(project: Project, store: ViewStore, options: RunOptions) -> Lease:
    """The right to compute the partition; reports of dead runs of it are closed."""
    partition, name = options.partition_text, store.name
    whose = f"view {name!r}{'' if partition is None else f' and partition {partition}'}"
    busy = f"another run of {whose} is going on; wait for it, or look at `status`"
    lease = take(
        store.leases,
        run_lease(partition),
        options.command,
        ttl_s=project.settings.lease,
        busy=busy,
        wait_s=BRIEFLY_S,
    )
    try:
        if is_held(store.leases, DROP_LEASE):
            raise ConflictError(
                f"view {name!r} is being dropped; run it again if it is to be computed again"
            )
        close_dead(store, partition)
    except BaseException:
        lease.release()
        raise
    return lease


def plan_view(project: Project, name: str, options: RunOptions = RunOptions()) -> Plan:  # noqa: B008 - frozen
    """What :func:`run_view` would compute, and why; nothing is written.

    Raises:
        PrecomputeError: as :func:`precompute.jobs.run.materialize.materialize`.
    """
    with naming_view_in_errors(name):
        partition = partition_of(project.view(name), options.partition)
        options = replace(options, partition=partition)
        report = Report("", name, "plan", partition=options.partition_text)
        return dry_run(project, project.offline.view(name), options, report)


def partition_of(config: ViewConfig, partition: Partition | None) -> Partition | None:
    """The partition to compute: the one requested, or the latest that is over; None for a view that
    has none.

    Raises:
        ConfigError: the view has no partitions, not one is over yet, or the one requested is not
            over or before the first.
    """
    if config.partition is None and partition is not None:
        raise ConfigError(
            f"view {config.name!r} has no partitions: add partition: {{by: day, start: …}} to it,"
            " or leave the partition out"
        )
    now = datetime.now(UTC)
    if partition is None or config.partition is None:
        return config.partition_at(now)
    if partition.end <= config.partition.start or partition.end > now:
        when = (
            "is not over yet"
            if partition.end > now
            else f"lies before the view's start, {config.partition.start:%Y-%m-%dT%H:%MZ}"
        )
        raise ConfigError(f"view {config.name!r}: partition {partition} {when}")
    return partition


def _done(store: ViewStore, due: str | None) -> Report | None:
    """The report of a finished run for this time of the schedule: a scheduler that was killed may
    have started it before; None of a run that is for no such time."""
    if due is None:
        return None
    at = parsed_time(due)
    # a run begins after its time, unless the clock was set back
    since = "" if at is None else f"{at - timedelta(seconds=AHEAD_S):%Y%m%dT%H%M%S}"
    return next(
        (
            report
            for report in store.runs.each(since)
            if parsed_time(report.due) == at and report.finished and not report.ahead
        ),
        None,
    )


def _parents(project: Project, store: ViewStore) -> dict[str, int]:
    """Views that this one is scheduled after → the epoch of each one's live snapshot."""
    schedule = project.schedules().get(store.name)
    references = {
        parent: store.offline.view(parent).log.readable_live()
        for parent in (() if schedule is None else schedule.parents)
    }
    return {parent: ref.epoch for parent, ref in references.items() if ref is not None}


def _snapshot_to_publish(
    config: ViewConfig, store: ViewStore, options: RunOptions, report: Report
) -> Snapshot:
    """The snapshot to publish; what this run accepts of it is noted. Where it is named, that it was
    rolled back from stands no more: a person publishes it on purpose."""
    gates, standing = options.accept, Standing(store)
    number = options.snapshot or standing.newest_publishable(gates)
    if config.serves_all and gates and options.snapshot is None:
        for snapshot in standing.newest_of_each(gates).values():
            _accept(store, snapshot, gates, report)
    snapshot = store.snapshot(number)
    _accept(store, snapshot, gates, report)
    return snapshot


def _accept(store: ViewStore, snapshot: Snapshot, gates: Collection[str], report: Report) -> None:
    """Note what a run accepts of a snapshot, in its report, too."""
    names = accept(store, snapshot, gates, report.command)
    if names and report.plan is None:
        report.plan = f"{', '.join(names)} of snapshot {snapshot.number} accepted"


def _publish(
    project: Project,
    config: ViewConfig,
    store: ViewStore,
    options: RunOptions,
    run_lease: Lease | None,
    snapshot: Snapshot | None,
    report: Report,
    progress: Progress,
) -> None:
    """Make the snapshot live, unless what is live is to stay; then collect garbage. Without one it
    is what waits, of a view that is held; where nothing does, it is only let go."""
    settings, nothing_new = project.settings, report.status == "current"
    with take(
        store.leases,
        PUBLISH_LEASE,
        report.command,
        ttl_s=settings.lease,
        busy=f"view {store.name!r} is being published, rolled back or cleaned up; wait for it, or"
        " look at `status`",
        wait_s=BRIEFLY_S if run_lease is None else PATIENTLY_S,
    ) as lease:
        close_dead(store, None, commands=PUBLISHING, own=report.run)
        if run_lease is not None:
            # under the publishing lease no other run can publish a later snapshot
            run_lease.check()
        if options.snapshot is not None and snapshot is not None:
            _publish_on_purpose(store, snapshot, report)
        waits = snapshot is None
        snapshot = snapshot or _waiting(store)
        if snapshot is not None and config.serves_all and not snapshot.members:
            snapshot = _all_partitions(
                config, store, snapshot, options, lease, report, settings.memory_mb
            )
        if snapshot is None or (waits and _is_live(store, snapshot)):
            let_go(store, report)
            return
        with contextlib.closing(
            open_online_store(project.online, memory_mb=settings.load_mb)
        ) as online:
            publisher = Publisher(
                store,
                online,
                report,
                progress,
                lease,
                take_over=options.take_over,
                memory_mb=settings.memory_mb,
            )
            _go_live(store, options, snapshot, publisher, report)
            # not of a snapshot of all partitions: this run read one of them
            renews = nothing_new and config.renew_unchanged and not snapshot.members
            if renews and _is_live(store, snapshot):
                publisher.renew(report.read_at_us)
            note_hold(store, report)
        if options.due is None and is_told(report):
            notify(settings.notify, report, project.home)
        crashpoint("notify")
        with report.stage("gc"):
            leases = [lease] if run_lease is None else [lease, run_lease]
            _collect(store, settings.retention, leases, report)


def _publish_on_purpose(store: ViewStore, snapshot: Snapshot, report: Report) -> None:
    """Take the marks away that a rollback left on a snapshot: a person names it, and publishes it
    on purpose.

    Raises:
        GateError: it is damaged, or a gate refused it; then the marks stay.
    """
    standing = Standing(store)
    left = standing.rolled_back(snapshot)
    if left:
        for number in left:
            del standing.marks[number]
        standing.check_publishable(snapshot)
        store.log.unmark(left)
        numbers = " and ".join(map(str, left))
        report.attention.append(
            f"snapshot {numbers} was rolled back from; now that snapshot {snapshot.number} is"
            " published by its number, its mark is taken away"
        )


def _waiting(store: ViewStore) -> Snapshot | None:
    """The snapshot that waits of a view that is held; None where nothing does.

    Raises:
        SnapshotError: what is live is not known.
    """
    ref = store.log.live()
    return None if ref is None or ref.held is None else Standing(store).waiting(ref)


def _is_live(store: ViewStore, snapshot: Snapshot) -> bool:
    ref = store.log.readable_live()
    return ref is not None and ref.snapshot == snapshot.number


def let_go(store: ViewStore, report: Report) -> None:
    """End the hold of a view of which nothing newer waits.

    Raises:
        SnapshotError: the view was never published.
    """
    ref = store.log.live()
    why = "was not held" if ref is not None and ref.held is None else "nothing newer waited"
    ref = store.log.resume_live()
    report.snapshot, report.epoch, report.status = ref.snapshot, ref.epoch, "current"
    report.plan = f"{why}: snapshot {ref.snapshot} stays live, and runs publish again"


def note_hold(store: ViewStore, report: Report) -> None:
    """Note in the report that the view is held, and what waits, if it is."""
    held = Standing(store).held(store.log.readable_live())
    report.held = None if held is None else str(held)


def _all_partitions(
    config: ViewConfig,
    store: ViewStore,
    snapshot: Snapshot,
    options: RunOptions,
    lease: Lease,
    report: Report,
    memory_mb: int,
) -> Snapshot:
    """The snapshot of all partitions that is published in place of ``snapshot``, which is of one of
    them; ``snapshot`` itself where none has rows."""
    if not keeps_live(snapshot):
        Standing(store).check_publishable(snapshot, unchanged=report.status == "current")
    every = assembled(
        config,
        store,
        lease,
        report,
        forced="rows" in options.accept,
        live_before=options.live_before,
        expect=options.expect,
        memory_mb=memory_mb,
    )
    if every is None:
        return snapshot
    own = None if snapshot.partition is None else every.members.get(snapshot.partition)
    if options.snapshot == snapshot.number and options.backfill is None and own != snapshot.number:
        raise SnapshotError(
            f"view {store.name!r} serves all partitions, and of {snapshot.partition} snapshot"
            f" {own or 'none'}: publish without --snapshot, or go back with `rollback`"
        )
    _accept(store, every, options.accept, report)
    if options.snapshot is not None and every.number != options.snapshot:
        report.plan = (
            f"snapshot {every.number} is of all partitions, with snapshot {options.snapshot}"
            " among them"
        )
    return every


def _go_live(
    store: ViewStore,
    options: RunOptions,
    snapshot: Snapshot,
    publisher: Publisher,
    report: Report,
) -> None:
    """Make the snapshot live, or log why not."""
    standing = Standing(store)
    by_hand = options.command in ("publish", "resume") and options.backfill is None
    why_unpublished = None if by_hand else standing.why_unpublished(snapshot)
    if why_unpublished is None:
        held = _hold_of(store, options, snapshot) if by_hand else None
        again = standing.repeats(snapshot)
        if again is not None:
            standing.check_publishable(snapshot)
            store.log.unmark([again])
            report.attention.append(
                f"snapshot {snapshot.number} has the very rows of snapshot {again}, which was"
                " rolled back from; now that they are published again, its mark is taken away"
            )
        publisher.publish(
            snapshot.number,
            reason=options.command,
            held=held,
            reload=options.reload,
            run=options.backfill,
        )
        return
    # a hold is easily forgotten
    level = logging.INFO if store.log.held() is None else logging.WARNING
    log.log(
        level,
        "view %r: snapshot %d is not published: %s",
        store.name,
        snapshot.number,
        why_unpublished,
    )
    # A crash between the two pointers may have left readers with a snapshot that was rolled back
    # from. But a run that publishes nothing needs no online store.
    try:
        publisher.repair_pointer()
    except OnlineStoreError as exc:
        log.warning("view %r: whether readers see what is live is not known: %s", store.name, exc)
    found = standing.verdict(snapshot)
    if isinstance(found, Refused):
        standing.check_publishable(snapshot, unchanged=report.status == "current")
    if isinstance(found, Bad):
        report.attention.append(
            f"snapshot {snapshot.number} builds on snapshot {found.number}, which was marked bad"
            f" meanwhile ({found.reason}): the next run builds on another one"
        )
    elif report.status == "running":
        report.snapshot, report.status = snapshot.number, "current"


def _hold_of(store: ViewStore, options: RunOptions, snapshot: Snapshot) -> Hold | None:
    """The hold with which a person publishes an earlier state than what is live: the next run would
    undo it. What is live already stays as it is held."""
    ref = store.log.readable_live()
    if ref is None or ref.snapshot == snapshot.number:
        return None if ref is None else ref.held
    if options.snapshot is None:
        return None
    try:
        earlier = is_earlier(snapshot, store.snapshot(ref.snapshot))
    except SnapshotError:
        # what is live is lost, and only its number is known
        earlier = snapshot.number < ref.snapshot
    if not earlier:
        return None
    reason = f"snapshot {snapshot.number} is earlier than {ref.snapshot}, which was live"
    return Hold(utc_now(), f"publish ({operator()})", reason)


def _collect(
    store: ViewStore, retention: RetentionConfig, leases: list[Lease], report: Report
) -> None:
    try:
        collect(
            store,
            keep=retention.keep,
            grace_s=retention.grace,
            leases=leases,
            swept=SWEPT_FOLDERS,
            report=report.attention.append,
        )
    except (SnapshotError, UnreadableError) as exc:
        # what was published stays published; the next run collects again
        log.warning("%s", exc)


LATE_ROWS_SHARE = 0.05
"""Share of the run's time that reading other partitions' sources may take."""
LATE_ROWS_LEAST_S = 0.1
"""Seconds that it may take at least: enough for some five small partitions."""


def find_late_rows(
    project: Project,
    partitions: PartitionConfig,
    store: ViewStore,
    made: Snapshot,
    stages_s: Mapping[str, float],
) -> dict[str, bool]:
    """Read the sources of a view's other partitions again, the newest first, while there is time.
    Partitions of another model or source are left out, since they have to be computed anyway; and
    those whose source cannot be read or yields nothing, unless empty partitions are published: data
    that were removed are not late.

    Args:
        project: the configuration.
        partitions: of the view.
        store: of the view.
        made: the snapshot that the run made.
        stages_s: seconds its stages took.

    Returns:
        each partition that was read → whether it has late rows.
    """
    started, found = time.monotonic(), dict[str, bool]()
    budget_s = max(LATE_ROWS_LEAST_S, LATE_ROWS_SHARE * sum(stages_s.values()))
    # the first will take about as long as the run's own
    slowest_s = stages_s.get("source", 0.0)
    try:
        for snapshot in _others(store, made):
            begun = time.monotonic()
            if begun - started + slowest_s > budget_s:
                break
            late = _is_late(project, partitions, store.offline, snapshot)
            if late is not None:
                found[str(snapshot.partition)] = late
            slowest_s = max(slowest_s, time.monotonic() - begun)
    except (SnapshotError, UnreadableError) as exc:
        name = store.name
        log.info("view %r: whether its other partitions have late rows is not known: %s", name, exc)
    return found


def _others(store: ViewStore, made: Snapshot) -> Iterator[Snapshot]:
    """The newest snapshot of each other partition that was computed as this one was; the newest
    partition first."""
    view, newest = made.view, dict[str, int]()
    for entry in store.catalog().entries.values():
        if entry.partition is not None and entry.partition != made.partition:
            newest[entry.partition] = entry.number
    made_by = made.made_by, view.definition.source, view.entity
    for _, number in sorted(newest.items(), reverse=True):
        snapshot = store.snapshot(number)
        if (snapshot.made_by, snapshot.view.definition.source, snapshot.view.entity) == made_by:
            yield snapshot


def _is_late(
    project: Project, partitions: PartitionConfig, offline: OfflineStore, snapshot: Snapshot
) -> bool | None:
    """Whether the source of a partition yields other rows than its snapshot was computed from; None
    where that is not known."""
    partition = Partition.parse(str(snapshot.partition))
    try:
        source, _ = open_source(
            snapshot.view,
            offline,
            project.home,
            pinned=snapshot.inputs,
            partition=partition,
            memory_mb=project.settings.source_mb,
            load_mb=project.settings.memory_mb,
        )
        with contextlib.closing(source):
            if not source.load(partitions.column) and partitions.empty != "publish":
                return None
            return source.content() != snapshot.content.partition(":")[2]
    except PrecomputeError as exc:
        log.info(
            "view %r: whether partition %s has late rows is not known: %s",
            snapshot.view.name,
            partition,
            exc,
        )
        return None


# ---- Preflight: it takes milliseconds, and the model hours.


def check_before(
    project: Project,
    name: str,
    partition: str | None = None,
    *,
    accept: Collection[str] = (),
    take_over: bool = False,
) -> None:
    """Check what a run of a view needs to publish. A run that will publish nothing, since the view
    is held or a newer partition is live, is not checked: it needs no online store.

    Args:
        project: the configuration.
        name: of the view.
        partition: that is to be computed, as manifests name it.
        accept: gates whose refusal is accepted.
        take_over: whether the view may be another project's.

    Raises:
        ConfigError: the index, or what a power makes, cannot be built here.
        GateError: the gate ``contract`` would refuse any result.
        OnlineStoreError, ConflictError: the online store cannot be reached or written, or the view
            is another project's.
    """
    config, store = project.view(name), project.offline.view(name)
    if Standing(store).why_stays(None if config.serves_all else partition) is not None:
        return
    check_index(config)
    for keys in (*project.settings.powers, *config.powers):
        keys.preflight(config.feature_view())
    if "contract" not in accept:
        verdict = contract_verdict(config, store)
        if verdict is not None and not verdict.passed:
            raise GateError(
                f"view {name!r}: nothing was computed, the live snapshot stays. contract:"
                f" {verdict.message}. If this is as it should be: {config.accepting('contract')}"
            )
    check_online(project, name, take_over=take_over)


def check_index(config: ViewConfig) -> None:
    """Check that an index can be built here.

    Raises:
        ConfigError: the view has an index, and what builds it is not installed.
    """
    if config.index is not None and importlib.util.find_spec("faiss") is None:
        raise ConfigError(
            f"view {config.name!r}: index: FAISS, which builds it, is not installed: pip install"
            " 'precompute-store[cpu]', or leave `index` out"
        )


def contract_verdict(config: ViewConfig, store: ViewStore) -> Verdict | None:
    """The verdict of the gate ``contract`` on the view's configuration against what is live; None
    where nothing is live, or the gate is off."""
    served = served_snapshot(store)
    if served is None or not config.gates.contract:
        return None
    verdicts = Verdicts(config.gates)
    judge_contract(config.feature_view(), served.view, verdicts)
    return verdicts.all[0]


def check_online(project: Project, name: str, *, take_over: bool = False) -> None:
    """Check that the online store can be written for this view.

    Raises:
        OnlineStoreError, ConflictError: the online store cannot be reached or written, or the view
            is another project's.
    """
    with contextlib.closing(
        open_online_store(project.online, memory_mb=project.settings.load_mb)
    ) as online:
        # a root without an identity has published nothing there yet
        online.check_writable(
            name, "" if take_over else known_identity(project.root) or "without a name yet"
        )


# ---- The process of a run.


@contextlib.contextmanager
def _ended_by_kernel(deadline_s: float | None) -> Iterator[None]:
    """Have SIGALRM end the process at the deadline, whatever it hangs in: a thread of a hung
    interpreter could not."""
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
def naming_view_in_errors(view: str) -> Iterator[None]:
    """Add the view's name to every error: in a mail from cron nothing else says which view it
    was."""
    try:
        yield
    except PrecomputeError as exc:
        if re.search(rf"\b{re.escape(view)}\b", str(exc)) or isinstance(exc, RequestError):
            raise
        raise type(exc)(f"view {view!r}: {exc}") from exc
