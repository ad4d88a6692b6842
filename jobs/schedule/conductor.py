"""Conductor: carries a backfill out, each partition by a process of its own, the next one begun as soon as any ends; then it publishes.

Processes are looked at in one loop with what somebody else computes. What a process did is read from its run's report; what ended before its run began,
or was killed, is told by its last words. SIGINT and SIGTERM cancel the backfill."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jobs.config.project import Project
from jobs.process.job import RunOptions
from jobs.process.progress import Silent
from jobs.schedule.backfill_plan import REPORTS
from jobs.schedule.backfill_state import Backfill, Item, in_words, note_done, save_backfill
from precompute.workers.process import ChildProcess, end_all, installed_module
from store.clock import utc_now
from store.disk.lease import Lease
from store.errors import ConflictError, GateError, PrecomputeError, SnapshotError
from store.offline.runs import Report
from store.offline.standing import Standing
from store.offline.view_store import ViewStore

STOP_GRACE_S = 4.5
"""How long a run may take to end after SIGTERM before it is killed. Killing is safe: nothing is visible before its manifest."""

POLL_S = 0.05
"""How often is looked whether a run has ended."""

LOOK_AGAIN_S = 0.5
"""How often a partition that somebody else computes is looked at."""

ATTEMPTS = 3
"""How often a run is begun that finds its partition taken the moment before."""


@dataclass(frozen=True, slots=True)
class _PartitionRun:
    """The process that computes a partition; ``began`` by the monotonic clock, in s."""

    item: Item
    process: ChildProcess
    began: float


@dataclass(slots=True)
class Conductor:
    """Keeps the slots full until no partition is left."""

    project: Project
    store: ViewStore
    state: Backfill
    lease: Lease
    announce: Callable[[str], None]
    _active: dict[str, _PartitionRun] = field(default_factory=dict)
    _elsewhere: dict[str, Item] = field(default_factory=dict)
    """Partitions somebody else computes."""
    _survivors: set[str] = field(default_factory=set)
    """Those of them whose process is this backfill's own, from before it was killed: they fill slots."""
    _since: dict[str, str] = field(default_factory=dict)
    """Partition → run ids from here on count."""
    _attempts: Counter[str] = field(default_factory=Counter)
    _signal: int | None = None
    """The first one that came."""
    _began: float = field(default_factory=time.monotonic)
    _finished: int = 0

    def conduct(self) -> None:
        """Run everything, then publish."""
        state = self.state
        with self._signals():
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
        self._tell_end()

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
                self._start(todo.pop(0))
            if self._signal is not None:
                self._cancel(self._signal)
                return
            for run in [run for run in self._active.values() if run.process.ended()]:
                del self._active[run.item.partition]
                if self._judge(run):
                    todo.insert(0, run.item)
                save_backfill(self.store, self.state, self.lease)
            if self._elsewhere and time.monotonic() >= look_at:
                todo[:0] = self._look_elsewhere()
                look_at = time.monotonic() + LOOK_AGAIN_S
            time.sleep(POLL_S)

    def _start(self, item: Item) -> None:
        self._since[item.partition] = self.store.runs.stamp()
        if self.store.running(item.partition):
            self._wait_for(item)
            return
        command = [*installed_module("jobs.cli"), "-c", str(self.project.folder), "materialize", self.state.view, "--json"]
        command += ["--partition", item.label, "--backfill", self.state.id, *(["--full"] if self.state.options.full else [])]
        began = time.monotonic()
        item.started_at = utc_now()
        try:
            process = ChildProcess(command, output="kept")
        except OSError as exc:
            item.state, item.error = "failed", f"its process cannot be started: {exc.strerror or exc}"
            self._tell(item)
            return
        self._active[item.partition] = _PartitionRun(item, process, began)
        self._attempts[item.partition] += 1
        item.state = "running"
        save_backfill(self.store, self.state, self.lease)

    def _judge(self, run: _PartitionRun) -> bool:
        """Note how a process ended; returns whether the partition is to be tried again."""
        item, status, report = run.item, run.process.status, self._report_of(run)
        item.seconds = round(time.monotonic() - run.began, 3)
        if not self._did(run, report):
            # It failed before its run began: somebody else took the partition's lease, if only for a moment.
            if report is None and status == 1 and self._attempts[item.partition] < ATTEMPTS:
                item.state = "pending"
                if self.store.running(item.partition):
                    self._wait_for(item)
                    return False
                return not self._done_elsewhere(item)
            item.state = "refused" if status == 3 else "failed"
            item.run = None if report is None else report.run
            item.error = report.error if report is not None and report.error else _last_words(run.process)
        self._tell(item)
        return False

    def _report_of(self, run: _PartitionRun) -> Report | None:
        """What an ended process reported; None when it came to no run, or was killed before it could tell what became of it."""
        reports = self.store.runs.reports(REPORTS, since=self._since[run.item.partition])
        ours = (self.state.id, run.item.partition)
        own = next((r for r in reports if (r.backfill, r.partition) == ours), None)
        return None if own is None or own.status == "running" else own

    def _did(self, run: _PartitionRun, report: Report | None) -> bool:
        """Note what a process did that ended well; returns whether it did. Where its report cannot be read, the manifests tell."""
        if run.process.status != 0:
            return False
        if report is None and Standing(self.store).newest(run.item.partition) is None:
            return False
        note_done(run.item, self.store, report)
        return True

    # ---- partitions somebody else computes

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
        """Partitions that nobody computes any more and that are still to do."""
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
        """Whether the run that was waited for, or a later one, did the partition; otherwise it is pending."""
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
        self._tell(item)
        return True

    def _last_report(self, item: Item) -> Report | None:
        reports = self.store.runs.reports(REPORTS)
        return next((r for r in reports if r.partition == item.partition and r.command != "publish"), None)

    # ---- the end

    def _cancel(self, number: int) -> None:
        self.announce(f"{signal.Signals(number).name}: ending {in_words(len(self._active))} that run")
        self._end_all()
        for item in self.state.items:
            if item.state in ("pending", "running"):
                item.state = "cancelled"

    def _end_all(self) -> None:
        """End every process and what it started; what they did by then is noted."""
        end_all([run.process for run in self._active.values()], STOP_GRACE_S)
        while self._active:
            _, run = self._active.popitem()
            self._did(run, self._report_of(run))

    def _publish(self) -> None:
        """Make the newest publishable snapshot live, if that is a step forward."""
        state = self.state
        if not state.options.publish:
            state.not_published = "not asked to"
            return
        limit = time.monotonic() + self.project.settings.lease
        while True:
            try:
                number, state.not_published = self._newer_than_live()
                if number is not None:
                    from jobs.pipeline.run import run_view

                    run_view(self.project, state.view, Silent(), RunOptions(command="publish", number=number, backfill=state.id))
                    ref = self.store.refs.live()
                    live = None if ref is None else self.store.snapshot(ref.snapshot)
                    # by itself, or as one of all partitions
                    if live is None or number not in (live.number, *live.members.values()):
                        state.not_published = "something newer went live meanwhile"
                    else:
                        state.published = live.number
                return
            except ConflictError as exc:
                if time.monotonic() > limit:
                    state.status, state.not_published = "failed", str(exc)
                    return
                # somebody else publishes, perhaps something newer
                time.sleep(LOOK_AGAIN_S)
            except GateError as exc:
                state.not_published = str(exc)
                return
            except PrecomputeError as exc:
                state.status, state.not_published = "failed", str(exc)
                return

    def _newer_than_live(self) -> tuple[int | None, str | None]:
        """Number of the snapshot to publish; or None, and why."""
        standing, ref = Standing(self.store), self.store.refs.readable_live()
        if not self.store.numbers():
            return None, "there is no snapshot"
        try:
            number = standing.newest_publishable()
            newest = self.store.snapshot(number)
        except SnapshotError as exc:
            return None, str(exc)
        why = standing.why_unpublished(newest)
        if why is None and ref is not None and ref.snapshot == number and not newest.refused_by:
            why = f"snapshot {number} of {newest.partition} is live and the newest"
        return (number, None) if why is None else (None, why)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM are noted, so that none comes between the start of a process and its being known."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def noted(number: int, _: object) -> None:
            self._signal = self._signal or number

        before = {number: signal.signal(number, noted) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ---- words

    def _tell(self, item: Item) -> None:
        self._finished += 1
        total = self.state.count("pending", "running")
        elapsed = time.monotonic() - self._began
        left = f", {total} left, about {elapsed / self._finished * total:,.0f} s" if total else ""
        rows = "" if item.rows is None else f"  {item.rows:,} rows"
        seconds = "" if item.seconds is None else f"  {item.seconds:.1f} s"
        error = "" if item.error is None else f"  {item.error}"
        self.announce(
            f"{item.label}  {item.state}{rows}{seconds}  ({len(self.state.items) - total} of {len(self.state.items)}{left}){error}"
        )

    def _tell_end(self) -> None:
        state = self.state
        counted = Counter(item.state for item in state.items)
        kinds = ", ".join(f"{n} {what}" for what, n in counted.items()) or "nothing to do"
        self.announce(f"backfill {state.id} of {state.view}: {state.status} ({kinds}), {time.monotonic() - self._began:.1f} s")
        if state.published is not None:
            self.announce(f"published snapshot {state.published}")
        elif state.not_published is not None:
            self.announce(f"nothing was published: {state.not_published}")
        if state.status == "failed":
            for item in state.items:
                if item.state != "done":
                    self.announce(f"  {item.label}  {item.state}: {item.error}")
            if any(item.state != "done" and item.snapshot is None for item in state.items):
                self.announce(f"what failed is tried again by: precompute backfill {state.view} --resume {state.id}")


def _last_words(process: ChildProcess) -> str:
    assert process.status is not None
    if process.status < 0:
        return f"its process {process.how_it_ended()}"
    return f"exit status {process.status}: {process.last_words().removeprefix('precompute: ') or 'no word'}"
