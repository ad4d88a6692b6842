"""Backfill: computes the partitions of a view over a range of data time, in at most ``max_active``
processes at once.

What is to be done is planned from the manifests and the runs' reports, and the state is believed
only as far as they agree. One that was killed or cancelled goes on by ``--resume``, and waits for
its processes that still run. The live pointer moves now and then and at the end, only forward.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median

from precompute.jobs.config.project import Project
from precompute.jobs.run.command_process import STOP_GRACE_S, Silent, on_signals
from precompute.jobs.run.judge.gates import compare_again, served_snapshot
from precompute.jobs.run.rows.plan import RunOptions
from precompute.jobs.run.run_view import check_before
from precompute.jobs.schedule.backfill_plan import (
    NOT_DONE,
    REPORTS,
    REPROCESS,
    Backfill,
    Item,
    Options,
    PartitionPlan,
    Past,
    Recipes,
    check_overlap,
    in_words,
    judging_again,
    note_done,
    note_standing,
    one_begins,
    plan_backfill,
    range_of,
    read_backfill,
    save_backfill,
    take_backfill,
    why_partition,
)
from precompute.store.disk.lease import Lease, take
from precompute.store.disk.record import replace
from precompute.store.errors import ConflictError, GateError, PrecomputeError, SnapshotError
from precompute.store.offline.log import run_lease
from precompute.store.offline.runs import Report
from precompute.store.offline.standing import Refused, Standing, Usable
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition, utc_now
from precompute.workers.process import ChildProcess, end_all, installed_module

POLL_S = 0.05
"""How often processes are checked for their end."""

LOOK_AGAIN_S = 0.5
"""How often a partition that another process computes is looked at."""

LEASE_WAIT_S = 60.0
"""How long a partition's verdicts wait for another run of it."""

ATTEMPTS = 3
"""How often a run is begun again that finds its partition taken the moment before."""

GROUP_S = 30.0
"""Seconds that one process computes partitions, about, one after the other, with the model loaded
once: a process takes 1.3 s of CPU to begin."""

FIRST_GROUP, MOST_IN_GROUP = 8, 200
"""Partitions of a process at most: before it is known how long one takes, and after."""

PUBLISH_EVERY_S = 5.0
"""How often what is done goes live before the end, at most; and no more than a tenth of the time is
spent on it."""


OVER = ("done", "failed", "refused", "cancelled")
"""States of a partition that has its verdicts, or gets none."""


@dataclass(slots=True)
class _Group:
    """A process, and the partitions it was given that are not known to be over, in their order;
    ``began`` by the monotonic clock, in s. ``in_order``: those before each are there when it is
    judged."""

    items: list[Item]
    process: ChildProcess
    began: float
    in_order: bool


@dataclass(slots=True)
class Conductor:
    """Keeps the slots full until no partition is left."""

    project: Project
    store: ViewStore
    state: Backfill
    lease: Lease
    announce: Callable[[str], None]
    _active: list[_Group] = field(default_factory=list)
    _elsewhere: dict[str, Item] = field(default_factory=dict)
    """Partitions that another process computes."""
    _survivors: set[str] = field(default_factory=set)
    """Those of them whose process is this backfill's own, from before it was killed: they fill
    slots."""
    _since: dict[str, str] = field(default_factory=dict)
    """Partition → the run id from which on runs count."""
    _attempts: Counter[str] = field(default_factory=Counter)
    _signal: int | None = None
    """The first signal that came."""
    _began: float = field(default_factory=time.monotonic)
    _finished: int = 0
    _seconds: list[float] = field(default_factory=list)
    """Seconds that each partition took."""
    _publish_at: float = field(default_factory=lambda: time.monotonic() + PUBLISH_EVERY_S)
    """When what is done goes live next, by the monotonic clock."""
    _unpublished: bool = False
    """Whether a partition was done since."""

    def conduct(self) -> None:
        """Run everything, then publish."""
        state = self.state

        def noted(number: int, _: object) -> None:
            self._signal = self._signal or number

        # none comes between the start of a process and its being known
        with on_signals(noted):
            try:
                self._run()
            except BaseException:
                self._end_all()
                raise
        # it may have come after the last process had ended
        state.signal = self._signal
        try:
            if state.signal is None:
                state.status = "done" if state.count("done") == len(state.items) else "failed"
                self._publish()
        except BaseException as exc:
            # interrupted
            if not isinstance(exc, Exception):
                self._close("cancelled")
            raise
        self._close(state.status if state.signal is None else "cancelled")
        self._report_end()

    def _close(self, status: str) -> None:
        self.state.status, self.state.finished_at = status, utc_now()
        save_backfill(self.store, self.state, self.lease)

    def _run(self) -> None:
        todo = sorted(
            (item for item in self.state.items if item.state == "pending"),
            key=lambda i: i.partition,
            reverse=self.state.options.backwards,
        )
        look_at = 0.0
        while todo or self._active or self._elsewhere:
            while todo and len(self._active) + len(self._survivors) < self.state.options.max_active:
                self._start(todo)
            if self._signal is not None:
                self._cancel(self._signal)
                return
            looks = time.monotonic() >= look_at
            for group in list(self._active):
                ended = group.process.ended()
                if ended:
                    self._active.remove(group)
                if (ended or looks) and (over := self._note_reports(group)) + ended:
                    todo[:0] = self._note_end(group) if ended else []
                    save_backfill(self.store, self.state, self.lease)
                    self._unpublished |= over > 0 and self.state.options.publish
            if looks:
                self._compare()
            if self._unpublished and time.monotonic() >= self._publish_at:
                self._publish_early()
            if looks:
                todo[:0] = self._look_elsewhere()
                look_at = time.monotonic() + LOOK_AGAIN_S
            time.sleep(POLL_S)
        self._compare()

    def _start(self, todo: list[Item]) -> None:
        """Begin a process for the next partitions, which are taken off the list."""
        group, size = list[Item](), self._group_size(len(todo))
        # every second one, where two processes begin, so that time goes on in its order
        free = max(1, self.state.options.max_active - len(self._active) - len(self._survivors))
        for item in todo[::free][:size]:
            todo.remove(item)
            self._since[item.partition] = self.store.runs.stamp()
            if self.store.running(item.partition):
                self._wait_for(item)
            else:
                group.append(item)
        if not group:
            return
        command = [*installed_module("precompute.jobs.cli"), "-c", str(self.project.folder)]
        command += ["materialize", self.state.view, "--json", "--backfill", self.state.id]
        command += ["--partitions", ",".join(item.label for item in group)]
        command += ["--full"] if self.state.options.full else []
        in_order = self._is_in_order(group)
        command += ["--in-order"] if in_order else []
        command += [word for gate in self.state.options.accept for word in ("--accept", gate)]
        command += [word for gate in self.state.options.expect for word in ("--expect", gate)]
        if self.state.live_before is not None:
            command += ["--live-before", str(self.state.live_before)]
        try:
            process = ChildProcess(command, output="captured")
        except OSError as exc:
            for item in group:
                item.state = "failed"
                item.error = f"its process cannot be started: {exc.strerror or exc}"
                self._report(item)
            return
        self._active.append(_Group(group, process, time.monotonic(), in_order))
        for item in group:
            self._attempts[item.partition] += 1
        group[0].state, group[0].started_at = "running", utc_now()
        save_backfill(self.store, self.state, self.lease)

    def _is_in_order(self, group: Sequence[Item]) -> bool:
        """Whether all partitions before those of a group, each in its turn, are there by then."""
        names = [item.partition for item in group]
        open_ = sorted(item.partition for item in self.state.items if item.state not in OVER)
        return names == open_[: len(names)]

    def _group_size(self, left: int) -> int:
        share = math.ceil(left / self.state.options.max_active)
        if not self._seconds:
            # of several slots none waits for another's first one
            return min(FIRST_GROUP, share) if self.state.options.max_active == 1 else 1
        return max(1, min(share, MOST_IN_GROUP, int(GROUP_S / max(0.001, median(self._seconds)))))

    def _note_reports(self, group: _Group, *, cancelled: bool = False) -> int:
        """Note the partitions of a process that are over by their reports, of one that was
        ``cancelled`` those that are done; how many."""
        since = min((self._since[item.partition] for item in group.items), default="")
        reports = self.store.runs.reports(REPORTS, since=since) if group.items else []
        own = {
            report.partition: report
            for report in reversed(reports)
            if report.backfill == self.state.id
        }
        over = 0
        for item in list(group.items):
            report = own.get(item.partition)
            if report is None or report.run < self._since[item.partition]:
                break
            if cancelled and report.error is not None:
                break
            if report.status == "running":
                item.state, item.run = "running", report.run
                break
            group.items.remove(item)
            over += 1
            item.seconds, item.started_at = report.seconds, report.started_at
            self._seconds.append(report.seconds)
            if report.error is None and report.snapshot is not None:
                note_done(item, self.store, report)
                if item.refused_by and not group.in_order:
                    # it was refused before, and is compared again
                    item.state, item.error, item.refused_by = "computed", None, []
            else:
                item.state = "refused" if report.status in ("refused", "rejected") else "failed"
                item.run, item.error = report.run, report.error
            self._report(item)
        return over

    def _note_end(self, group: _Group) -> list[Item]:
        """Note what an ended process leaves, and return the partitions that are to be tried again:
        what it had in hand is to blame for its end, and the rest never began. Where its report
        cannot be read, the manifests decide."""
        again: list[Item] = []
        status = group.process.status
        for item in group.items:
            if status == 0 and Standing(self.store).newest(item.partition) is not None:
                note_done(item, self.store)
            elif (
                item.run is None
                and status != 2
                and (again or self._attempts[item.partition] < ATTEMPTS)
                and not (status is not None and status < 0 and item is group.items[0])
            ):
                # it never began, or failed before its run did: another process took the partition's
                # lease, if only for a moment
                item.state = "pending"
                if self.store.running(item.partition):
                    self._wait_for(item)
                elif not self._done_elsewhere(item):
                    again.append(item)
                continue
            else:
                item.state = "refused" if status == 3 else "failed"
                item.seconds = round(time.monotonic() - group.began, 3)
                item.error = f"its process {group.process.how_it_ended()}"
            self._report(item)
        group.items.clear()
        return again

    # ---- verdicts

    def _compare(self) -> None:
        """Have the partitions that were computed before those before them were there judged by
        what compares, in the order of data time, as far as nothing before them is still to come:
        so the verdicts do not depend on what was computed first."""
        for item in sorted(self.state.items, key=lambda item: item.partition):
            if self._signal is not None or item.state not in (*OVER, "computed"):
                break
            if item.state == "computed":
                self._compare_one(item)
                self._report(item)
                save_backfill(self.store, self.state, self.lease)
                self._unpublished |= self.state.options.publish

    def _compare_one(self, item: Item) -> None:
        store, config = self.store, self.project.view(self.state.view)
        try:
            with take(
                store.leases,
                run_lease(item.partition),
                "backfill",
                ttl_s=self.project.settings.lease,
                wait_s=LEASE_WAIT_S,
            ) as lease:
                snapshot = Standing(store).newest(item.partition)
                if snapshot is None:
                    raise SnapshotError(f"partition {item.partition} has no good snapshot any more")
                if isinstance(Standing(store).verdict(snapshot), Refused):
                    options = self.state.options
                    snapshot = compare_again(
                        config, store, snapshot, options.accept, lease, options.expect
                    )
        except PrecomputeError as exc:
            item.state, item.error = "failed", str(exc)
            return
        note_standing(item, store, snapshot)

    # ---- partitions that another process computes

    def _wait_for(self, item: Item) -> None:
        item.state = "running"
        self._elsewhere[item.partition] = item
        last = self._last_report(item)
        if last is not None and last.status == "running":
            self._since[item.partition] = last.run
            if last.backfill == self.state.id:
                self._survivors.add(item.partition)
        self.announce(f"{item.label}  waits for a run of it that is going on")

    def _look_elsewhere(self) -> list[Item]:
        """Partitions that no process computes any more and that are still to do."""
        again = []
        for partition, item in list(self._elsewhere.items()):
            if not self.store.running(partition):
                del self._elsewhere[partition]
                self._survivors.discard(partition)
                if not self._done_elsewhere(item):
                    again.append(item)
                save_backfill(self.store, self.state, self.lease)
        return again

    def _done_elsewhere(self, item: Item) -> bool:
        """Whether the run that was waited for, or a later one, did the partition; otherwise it is
        pending."""
        last = self._last_report(item)
        item.state = "pending"
        if last is None or last.run < self._since[item.partition]:
            return False
        if self.state.options.full and last.backfill != self.state.id:
            return False
        newest = Standing(self.store).newest(item.partition)
        if not last.finished and (newest is None or newest.run != last.run):
            return False
        note_done(item, self.store, last)
        self._report(item)
        return True

    def _last_report(self, item: Item) -> Report | None:
        reports = self.store.runs.reports(REPORTS)
        return next(
            (r for r in reports if r.partition == item.partition and r.command != "publish"), None
        )

    # ---- the end

    def _cancel(self, number: int) -> None:
        self.announce(
            f"{signal.Signals(number).name}: ending {in_words(len(self._active))} that run"
        )
        self._end_all()
        for item in self.state.items:
            if item.state in ("pending", "running"):
                item.state = "cancelled"

    def _end_all(self) -> None:
        """End every process and what it started; what they did by then is noted."""
        end_all([group.process for group in self._active], STOP_GRACE_S)
        while self._active:
            group = self._active.pop()
            self._note_reports(group, cancelled=True)

    def _publish_early(self) -> None:
        """Make what is done so far live; what stands in the way is reported at the end."""
        began, self._unpublished = time.monotonic(), False
        with contextlib.suppress(PrecomputeError):
            self._publish_newest()
        now = time.monotonic()
        self._publish_at = now + max(PUBLISH_EVERY_S, 10 * (now - began))

    def _publish_newest(self) -> None:
        """Make the newest publishable snapshot live, if that is a step forward; else the state says
        why not.

        Raises:
            PrecomputeError: as publishing does.
        """
        from precompute.jobs.run.run_view import run_view

        state = self.state
        number, state.not_published = self._newer_than_live()
        if number is None:
            return
        run_view(
            self.project,
            state.view,
            Silent(),
            RunOptions(
                command="publish",
                snapshot=number,
                backfill=state.id,
                live_before=state.live_before,
                expect=state.options.expect,
            ),
        )
        ref = self.store.log.live()
        live = None if ref is None else self.store.snapshot(ref.snapshot)
        # by itself, or as one of all partitions
        if live is None or number not in (live.number, *live.members.values()):
            state.not_published = "something newer went live meanwhile"
        else:
            state.published = live.number

    def _publish(self) -> None:
        """Make the newest publishable snapshot live, if that is a step forward."""
        state = self.state
        if not state.options.publish:
            state.not_published = "--no-publish"
            return
        limit = time.monotonic() + self.project.settings.lease
        while True:
            try:
                self._publish_newest()
                return
            except ConflictError as exc:
                if time.monotonic() > limit:
                    state.status, state.not_published = "failed", str(exc)
                    return
                # another process publishes, perhaps something newer
                time.sleep(LOOK_AGAIN_S)
            except GateError as exc:
                state.not_published = str(exc)
                return
            except PrecomputeError as exc:
                state.status, state.not_published = "failed", str(exc)
                return

    def _newer_than_live(self) -> tuple[int | None, str | None]:
        """Number of the snapshot to publish; or None, and why."""
        standing, ref = Standing(self.store), self.store.log.readable_live()
        if not self.store.numbers():
            return None, "there is no snapshot"
        try:
            number = standing.newest_publishable()
            newest = self.store.snapshot(number)
        except SnapshotError as exc:
            return None, str(exc)
        why = standing.why_unpublished(newest)
        usable = isinstance(standing.verdict(newest), Usable)
        if why is None and ref is not None and ref.snapshot == number and usable:
            why = f"snapshot {number} of {newest.partition} is live and the newest"
        return (number, None) if why is None else (None, why)

    # ---- words

    def _report(self, item: Item) -> None:
        if item.state == "computed":
            return
        self._finished += 1
        total = self.state.count("pending", "running", "computed")
        elapsed = time.monotonic() - self._began
        left = f", {total} left, about {elapsed / self._finished * total:,.0f} s" if total else ""
        rows = "" if item.rows is None else f"  {item.rows:,} rows"
        seconds = "" if item.seconds is None else f"  {item.seconds:.1f} s"
        # what gates say of it stands at the end, above what to type
        is_told = item.error is None or bool(item.refused_by)
        error = "" if is_told else f"  {item.error}"
        state = item.state_in_words if item.refused_by else item.state
        self.announce(
            f"{item.label}  {state}{rows}{seconds}  ({len(self.state.items) - total} of"
            f" {len(self.state.items)}{left}){error}"
        )

    def _report_end(self) -> None:
        state = self.state
        counted = Counter(item.state_in_words for item in state.items)
        kinds = ", ".join(f"{n} {what}" for what, n in counted.items()) or "nothing to do"
        ended = "not all done" if state.only_refused else state.status
        self.announce(
            f"backfill {state.id} of {state.view}: {ended} ({kinds}),"
            f" {time.monotonic() - self._began:.1f} s"
        )
        if state.published is not None:
            self.announce(
                f"published snapshot {state.published}; shown by: precompute history {state.view}"
            )
        elif state.not_published is not None:
            self.announce(f"nothing was published: {state.not_published}")
        if state.status == "failed":
            for item in state.items:
                if item.state != "done":
                    self.announce(f"  {item.label}  {item.state}: {item.error}")
            self._report_way_out()

    def _report_way_out(self) -> None:
        """What to type next, in whole commands."""
        state = self.state
        refused = [item.partition for item in state.items if item.refused_by]
        if refused:
            gates = sorted({gate for item in state.items for gate in item.refused_by})
            self.announce(
                f"what a gate refused is judged again, once source, model or limits are mended, by:"
                f" {judging_again(state.view, refused, gates)}"
            )
        if any(item.state in ("failed", "refused") and not item.refused_by for item in state.items):
            self.announce(
                "what failed, or had too many rows rejected, is tried again, once that is mended,"
                f" by: precompute backfill {state.view} --resume {state.id}"
            )


def run_backfill(
    project: Project,
    name: str,
    options: Options,
    *,
    announce: Callable[[str], None] = lambda _: None,
) -> Backfill:
    """Plan a backfill and carry it out; SIGINT and SIGTERM cancel it.

    Args:
        project: the configuration.
        name: of a view with a partition.
        options: what to do.
        announce: called with how it goes, a line at a time.

    Returns:
        the backfill at its end: done, failed or cancelled.

    Raises:
        ConfigError, PrecomputeError: as :func:`plan_backfill`.
        ConflictError: another backfill of the view is at some of the partitions.
        SnapshotError: the file system failed; what was begun can be resumed.
    """
    store = project.offline.view(name)
    first, last = range_of(options.first, options.last)
    plans = plan_backfill(
        project,
        name,
        first,
        last,
        reprocess=options.reprocess,
        check_inputs=options.check_inputs,
    )
    items = [item for plan in plans if (item := _item_of(plan, store)) is not None]
    todo = [item.partition for item in items if item.state == "pending"]
    if options.publish and todo:
        check_before(project, name, max(todo), accept=options.accept)
    id = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    served = served_snapshot(store)
    live_before = None if served is None else served.number
    state = Backfill(id, name, options, items, live_before=live_before)
    with contextlib.ExitStack() as held:
        with one_begins(store):
            lease = held.enter_context(take_backfill(store, state, project.settings.lease))
            check_overlap(store, todo, state.id)
            save_backfill(store, state, lease)
        skipped = Counter(plan.why for plan in plans if plan.action == "skip")
        kinds = ", ".join(f"{n} {why}" for why, n in skipped.items())
        announce(
            f"backfill {id} of {name}: {in_words(len(todo))}, {options.max_active} at once"
            + (f"; skipped: {kinds}" if kinds else "")
        )
        Conductor(project, store, state, lease, announce).conduct()
    return state


def _item_of(plan: PartitionPlan, store: ViewStore) -> Item | None:
    """What a backfill notes of a partition; None of one that is done, as far as it was asked."""
    if plan.action != "skip":
        return Item(str(plan.partition), plan.why)
    if plan.why not in NOT_DONE:
        return None
    state = "failed" if plan.why == "failed" else "refused"
    item = Item(str(plan.partition), plan.why, state, snapshot=plan.snapshot, error=plan.reason)
    if plan.why == "refused" and plan.snapshot is not None:
        note_standing(item, store, store.snapshot(plan.snapshot))
    return item


def resume_backfill(
    project: Project,
    name: str,
    id: str,
    *,
    max_active: int | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> Backfill:
    """Go on with a backfill that was killed or cancelled, or try again what failed in it.

    What manifests and reports say is done is not done again; its processes that are still at
    work are waited for.

    Raises:
        ConfigError: there is no such backfill.
        ConflictError: it is going on, or another one is at some of its partitions.
        SnapshotError: the file system failed.
    """
    store = project.offline.view(name)
    state = read_backfill(store, id)
    with contextlib.ExitStack() as held:
        with one_begins(store):
            lease = held.enter_context(take_backfill(store, state, project.settings.lease))
            state = read_backfill(store, id)
            check_overlap(
                store, [item.partition for item in state.items if item.state != "done"], id
            )
            state.status, state.finished_at, state.signal = "running", None, None
            if max_active is not None:
                state.options = replace(state.options, max_active=max_active)
            save_backfill(store, state, lease)
        _settle(project, store, state)
        save_backfill(store, state, lease)
        left = in_words(state.count("pending"))
        announce(
            f"backfill {id} of {name} resumed: {state.count('done')} done, {left} left,"
            f" {state.options.max_active} at once"
        )
        Conductor(project, store, state, lease, announce).conduct()
    return state


def _settle(project: Project, store: ViewStore, state: Backfill) -> None:
    """Tell of each partition, by manifests and reports, whether it is done or still to do."""
    config, options = project.view(state.view), state.options
    todo = [item for item in state.items if item.state != "done"]
    running = {item.partition for item in todo if store.running(item.partition)}
    # read after: what does not run any more had written its report by then
    past = Past(store)
    recipes = Recipes(project, config)
    for item in todo:
        item.state, item.error, item.refused_by = "pending", None, []
        if item.partition in running:
            continue
        report = past.done_by(state.id, item.partition)
        if report is not None:
            note_done(item, store, report)
        elif options.reprocess != "all" and not options.full:
            why, _ = why_partition(
                Partition.parse(item.partition), config, past, recipes, options.check_inputs
            )
            # by another process, meanwhile
            if why == "done":
                note_done(item, store)
            elif why == "refused" and why not in REPROCESS[options.reprocess]:
                note_standing(item, store, past.newest[item.partition])
