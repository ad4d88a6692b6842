"""Scheduler: starts the runs that are due, and ends those that take too long. The seam to
APScheduler, which only ticks. Each minute what is live is checked, and repaired.

What is due is computed again at each tick (:mod:`precompute.jobs.schedule.due`): it makes no
difference which scheduler ticks, or for how long none did. Of several on one root the holder of a
lease acts. Each run is a process of its own, one of a view at a time; it outlives a scheduler that
is killed, and the next scheduler watches it, with its deadline."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MISSED, JobExecutionEvent
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger

from precompute.jobs.config.project import Project
from precompute.jobs.run.report import close_dead
from precompute.jobs.schedule.due import LEADER, RETRIED, Decision, Ledger
from precompute.store.account.account import HEALING, Account, Act, has_sightings
from precompute.store.account.checker import LOOK_S, check_live, is_due, share_of
from precompute.store.disk.lease import Lease, holder, take
from precompute.store.disk.record import replace
from precompute.store.errors import ConflictError, FencedError, PrecomputeError
from precompute.store.offline.log import run_lease
from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import OfflineStore
from precompute.store.online.url import open_online_store
from precompute.store.times import doubled_s, duration, iso, parsed_time, utc_now
from precompute.workers.process import (
    AdoptedProcess,
    ChildProcess,
    ProcessGroup,
    end_all,
    installed_module,
)

POLL_S = 0.05
"""How often processes are checked for their end."""
STOP_GRACE_S = 10.0
"""How long a process may take to end after SIGTERM before it is killed. Killing is safe: nothing of
a run is visible before its manifest, and the next load resumes or drops what was loaded."""
LONGEST_WAIT_S = 3600.0
"""Longest wait between two attempts that failed."""
AT_ONCE = 2
"""Views that are repaired at the same time, so that a small one does not wait hours for a large
one; each may take ``memory_mb``."""


def reconcile_command(project: Project, view: str) -> list[str]:
    """The command line that repairs a view (``reconcile``)."""
    return [*installed_module("precompute.jobs.cli"), "-c", str(project.folder), "reconcile", view]


class Reconciler:
    """Checks and repairs all views of a project.

    Args:
        project: its views, and how often they are checked.
        announce: called with messages: what was lost, and how the repair ended.
        command: makes the command line of a repair; tests pass their own.
    """

    def __init__(
        self,
        project: Project,
        announce: Callable[[str], None],
        command: Callable[[Project, str], Sequence[str]] = reconcile_command,
    ) -> None:
        self._project, self._announce, self._command = project, announce, command
        self._stopping = threading.Event()
        self._reported: dict[str, str] = {}
        self._attempts: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._tried: dict[str, set[str]] = {}
        """View → what has been repaired since it was last whole."""
        self._mending: dict[str, threading.Thread] = {}
        self._turns = threading.Semaphore(AT_ONCE)

    def stop(self) -> None:
        """End the repairs in progress soon; safe to call from another thread."""
        self._stopping.set()

    def wait(self) -> None:
        """Wait for the repairs in progress; after :meth:`stop`, only for their processes to end."""
        for thread in list(self._mending.values()):
            thread.join()

    @property
    def sighted(self) -> bool:
        """Whether readers reported damage."""
        views = (self._project.offline.view(view) for view in self._project.names)
        try:
            return any(has_sightings(view.leases) and is_due(view) for view in views)
        except PrecomputeError:
            # reported by :meth:`check`
            return False

    def check(self) -> None:
        """Check every view that is not being repaired, and begin the repairs that are needed."""
        for view in self._project.names:
            if self._stopping.is_set():
                return
            if view in self._mending and self._mending[view].is_alive():
                continue
            try:
                account = self._account(view)
            except PrecomputeError as exc:
                self._report(
                    view, f"whether the online store serves what is live is not known: {exc}"
                )
                continue
            wrong = "; ".join(account.trouble)
            if account.act is Act.NOTHING:
                if wrong:
                    self._report(view, wrong)
                elif self._reported.pop(view, None) is not None:
                    self._announce(f"{view}: the online store serves what is live")
                self._attempts.pop(view, None)
                self._tried.pop(view, None)
                continue
            wanted = {finding.what for finding in account.findings if finding.act in HEALING}
            if not wanted <= self._tried.get(view, set()):
                # another fault than before: no wait
                self._attempts.pop(view, None)
            elif time.monotonic() < self._not_before.get(view, 0.0):
                continue
            self._report(view, f"{wrong}; it is brought back", always=True)
            thread = threading.Thread(
                target=self._bring_back, args=(view, wanted), name=f"reconcile-{view}"
            )
            try:
                thread.start()
            except RuntimeError as exc:
                # no thread is left; the next check tries again
                self._report(view, f"cannot be brought back now: {exc}", always=True)
                continue
            self._mending[view] = thread

    def _bring_back(self, view: str, wanted: set[str]) -> None:
        # here, since one without a thread was no attempt
        self._tried[view] = self._tried.get(view, set()) | wanted
        self._attempts[view] = self._attempts.get(view, 0) + 1
        while not self._turns.acquire(timeout=POLL_S):
            if self._stopping.is_set():
                return
        try:
            failure = self._mend(view)
        finally:
            self._turns.release()
        # a store that evicts rows may lose them again at once: each attempt waits
        # longer, until a check finds nothing lost
        doublings = self._attempts[view] - (2 if failure is None else 0)
        wait_s = doubled_s(self._project.settings.reconcile, doublings, LONGEST_WAIT_S)
        self._not_before[view] = time.monotonic() + wait_s
        if failure is not None:
            self._report(view, f"{failure}; once more in {duration(wait_s)}", always=True)

    def _account(self, view: str) -> Account:
        share = share_of(self._project.settings.reconcile)
        budget_s = LOOK_S / len(self._project.names)
        with contextlib.closing(open_online_store(self._project.online)) as online:
            return check_live(
                self._project.offline.view(view), online, share=share, budget_s=budget_s
            )

    def _mend(self, view: str) -> str | None:
        """Run the repair; returns why it failed, None when it did not."""
        deadline_s = self._project.settings.runs.deadline
        try:
            process = ChildProcess(self._command(self._project, view))
        except OSError as exc:
            return f"cannot be started: {exc}"
        began = time.monotonic()
        while not process.ended():
            if self._stopping.wait(POLL_S) or time.monotonic() >= began + deadline_s:
                end_all([process], STOP_GRACE_S)
        if not process.status:
            return None
        return f"it could not be brought back (exit status {process.status}); its output shows more"

    def _report(self, view: str, text: str, always: bool = False) -> None:
        """Announce a message, unless it is the same as the last one."""
        if always or self._reported.get(view) != text:
            self._reported[view] = text
            self._announce(f"{view}: {text}")


log = logging.getLogger(__name__)

TICK_S = 1.0
"""How often what is due is computed: cron lines have minutes, so a second is enough; it costs well
under a millisecond a view."""

STOPPED = "the scheduler was stopped"


def run_command(project: Project, view: str, due: str) -> list[str]:
    """The command line that runs a view for a time of its schedule, ISO 8601 in UTC."""
    command = [*installed_module("precompute.jobs.cli"), "-c", str(project.folder)]
    return [*command, "run", view, "--due", due]


def utc_clock() -> datetime:
    """Now, aware, in UTC."""
    return datetime.now(UTC)


@dataclass(slots=True)
class _ScheduledRun:
    """A run that this scheduler watches; ``process`` is None for one that could not be started."""

    view: str
    due: datetime
    epochs: Mapping[str, int]
    process: ProcessGroup | None
    began: float
    """When it began, by the monotonic clock, in s."""
    began_at: str
    earlier: set[str]
    """Ids of earlier runs for the same time."""
    end: threading.Event = field(default_factory=threading.Event)
    why: str = ""
    """Why this scheduler ended it."""

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs, and where it is not known, since another scheduler
        started it."""
        return None if self.process is None else self.process.status


@dataclass(slots=True)
class Scheduler:
    """Ticks until stopped.

    Args:
        project: its schedule section counts.
        command: makes the command line of a run from view and due time; tests pass their own.
        announce: called with messages: what is scheduled, begins and ends.
        clock: returns the time, with its zone.
    """

    project: Project
    command: Callable[[Project, str, str], Sequence[str]] = run_command
    announce: Callable[[str], None] = log.info
    clock: Callable[[], datetime] = utc_clock
    _reconciler: Reconciler = field(init=False)
    _store: OfflineStore = field(init=False)
    _ledger: Ledger = field(init=False)
    _lease: Lease | None = None
    _running: dict[str, _ScheduledRun] = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _signalled: bool = False
    _reported: dict[str, str] = field(default_factory=dict)
    _retained: dict[str, datetime] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    """View → when it may start again, by the monotonic clock, after a failure that could not be
    written down."""

    def __post_init__(self) -> None:
        self._reconciler = Reconciler(self.project, self.announce)
        self._store = self.project.offline
        self._ledger = Ledger(self.project, self._store)

    def run(self) -> None:
        """Run until :meth:`stop` is called, or SIGTERM or SIGINT comes; then end the runs and
        release the lease."""
        # the memory job store only: there is nothing to store, and every persistent job store
        # unpickles what it reads.
        ticker = BackgroundScheduler(
            timezone=UTC,
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )
        ticker.add_listener(_trouble, EVENT_JOB_ERROR | EVENT_JOB_MISSED)
        look_s = float(self.project.settings.reconcile)
        ticks = ticker.add_job(self.tick, _Every(TICK_S), next_run_time=utc_clock())
        looks = ticker.add_job(self._reconcile, _Every(look_s))
        previous = (
            {
                number: signal.signal(number, self._on_signal)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
            if threading.current_thread() is threading.main_thread()
            else {}
        )
        for name in sorted(set(self.project.broken).intersection(self.project.schedules())):
            self._report(
                name,
                "its file is wrong; runs fail until it is mended, and the other views go on:"
                f" {self.project.broken[name]}",
            )
        ticker.start()
        try:
            while not (self._signalled or self._stopping.wait(TICK_S)):
                if self._lease is not None and self._reconciler.sighted:
                    looks.modify(next_run_time=utc_clock())
                # APScheduler waits by the clock on the wall: set back by an hour, it would be
                # silent for that hour.
                now = utc_clock()
                for job, every_s in ((ticks, TICK_S), (looks, look_s)):
                    latest = now + timedelta(seconds=every_s + TICK_S)
                    if job.next_run_time is not None and job.next_run_time > latest:
                        job.modify(next_run_time=now)
        finally:
            self.stop()
            ticker.shutdown(wait=True)
            self._reconciler.wait()
            self._end_runs()
            self._stand_by()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Make :meth:`run` return; safe to call from another thread."""
        self._stopping.set()
        self._reconciler.stop()

    def _reconcile(self) -> None:
        if self._lease is not None:
            self._reconciler.check()

    def tick(self) -> None:
        """Start what is due now, if this is the scheduler that acts."""
        try:
            first = self._lease is None
            if not self._leads():
                return
            self._begin_due(first)
        except FencedError as exc:
            self._stand_by()
            self._report("scheduler", f"standing by: {exc}")
        except PrecomputeError as exc:
            self._report("scheduler", str(exc))

    def _leads(self) -> bool:
        if self._lease is None:
            try:
                by = f"the scheduler on {os.uname().nodename}"
                busy = "standing by: another one acts"
                self._lease = take(
                    self._store.root / ".scheduler",
                    LEADER,
                    by,
                    ttl_s=self.project.settings.lease,
                    busy=busy,
                )
            except ConflictError as exc:
                self._report("scheduler", str(exc))
                return False
            if self._reported.pop("scheduler", None) is not None:
                self.announce("scheduler: acting now")
        self._lease.check()
        return True

    def _begin_due(self, first: bool) -> None:
        """Start what is due of each view. ``first``: the first time that this scheduler acts."""
        now, decisions = self.clock(), dict[str, Decision]()
        with self._lock:
            running = set(self._running)
        for view in self.project.schedules():
            try:
                if view not in running:
                    for partition in self._ledger.dead(view):
                        close_dead(self._store.view(view), partition)
                decision = self._ledger.decision(view, now, running, decisions)
                if decision.since is not None and decision.since != self._retained.get(view):
                    self._check()
                    self._ledger.settle(view, decision.since, decision.ignored)
                    self._retained[view] = decision.since
                if first or decision.state == "retry":
                    self._report(view, decision.reason)
                if decision.state == "running" and view not in running:
                    self._adopt(view)
                if decision.state == "run" and time.monotonic() >= self._not_before.get(view, 0.0):
                    self._check()
                    self.start(view, decision)
            except FencedError:
                raise
            # the other views are not affected
            except PrecomputeError as exc:
                self._report(view, str(exc))

    def _check(self) -> None:
        assert self._lease is not None
        self._lease.check()

    def start(self, view: str, decision: Decision) -> bool:
        """Begin the run of ``view`` that is due, unless one is running; returns whether it
        began."""
        due = decision.due
        assert due is not None
        schedule = self.project.schedules()[view]
        earlier = {r.run for r in self._ledger.reports(view)[0]}
        with self._lock:
            if self._stopping.is_set() or view in self._running:
                return False
            run = _ScheduledRun(
                view, due, decision.epochs, None, time.monotonic(), utc_now(), earlier
            )
            try:
                run.process = ChildProcess(self.command(self.project, view, iso(due)))
                self._care_for(
                    run, run.process, schedule.deadline_s, f"started ({decision.reason})"
                )
                return True
            except (OSError, RuntimeError) as exc:
                failure = f"cannot be started: {exc}"
        self._report(view, failure, always=True)
        if run.process is None:
            self._noted(run, lambda: self._write_failure(run, "failed", failure))
        else:
            end_all([run.process], STOP_GRACE_S)
            # it may have written a report of its own by now
            run.why = failure
            self._noted(run, lambda: self._close(run, time.monotonic() - run.began))
        return False

    def _adopt(self, view: str) -> None:
        """Watch a run that an earlier scheduler started on this machine."""
        assert self._lease is not None
        schedule = self.project.schedules()[view]
        reports = self._ledger.reports(view)[0]
        for report in reports:
            due = parsed_time(report.due)
            if report.status != "running" or due is None or report.backfill:
                continue
            held = holder(self._store.view(view).leases, run_lease(report.partition))
            if held is None or held.host != self._lease.record.host or held.pid != report.pid:
                continue
            try:
                process = AdoptedProcess(held.pid)
            except ProcessLookupError:
                continue
            began = time.monotonic() - process.age_s()
            earlier = {r.run for r in reports if r is not report}
            run = _ScheduledRun(view, due, {}, process, began, report.started_at, earlier)
            with self._lock:
                if self._stopping.is_set() or view in self._running:
                    return
                text = f"goes on, started by another scheduler (process {held.pid})"
                try:
                    self._care_for(run, process, schedule.deadline_s, text)
                except RuntimeError as exc:
                    # tried again at the next tick
                    self._report(view, f"goes on, and cannot be watched: {exc}")
            return

    def _care_for(
        self, run: _ScheduledRun, process: ProcessGroup, deadline_s: float, text: str
    ) -> None:
        """Watch a run from now on, and announce it by ``text``; the caller holds the lock.

        Raises:
            RuntimeError: the system has no thread left for it.
        """
        thread = threading.Thread(
            target=self._watch, args=(run, process, deadline_s), name=f"run-{run.view}", daemon=True
        )
        thread.start()
        self._running[run.view] = run
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        self._report(run.view, text, always=True)

    def _watch(self, run: _ScheduledRun, process: ProcessGroup, deadline_s: float) -> None:
        """Wait for a run's end, or end it; then make sure that its report has the outcome."""
        while not process.ended():
            if run.end.wait(POLL_S) or time.monotonic() >= run.began + deadline_s:
                if not run.end.is_set():
                    run.why = f"its deadline of {duration(deadline_s)} passed"
                end_all([process], STOP_GRACE_S)
        seconds = time.monotonic() - run.began
        try:
            self._noted(run, lambda: self._close(run, seconds))
        finally:
            with self._lock:
                self._running.pop(run.view, None)
        outcome = "ended" if run.status is None else _outcome(run.status)
        because = f" ({run.why})" if run.why and run.why != STOPPED else ""
        self._report(run.view, f"{outcome}{because} after {seconds:.1f} s", always=True)

    def _close(self, run: _ScheduledRun, seconds: float) -> None:
        status = run.status
        killed = bool(run.why) or (status is not None and status < 0)
        why = run.why or ("" if status is None else _outcome(status))
        for partition in self._ledger.dead(run.view):
            close_dead(
                self._store.view(run.view), partition, why or "it died without reporting why"
            )
        reports, goes_on = self._ledger.reports(run.view)
        own = [r for r in reports if parsed_time(r.due) == run.due and r.run not in run.earlier]
        for report in own:
            # it was ended by a signal, and its report does not know why
            if run.why and report.status in RETRIED:
                self._store.view(run.view).runs.write(
                    replace(report, status="killed", error=f"killed: {run.why}")
                )
        # else another run was first, and has a report of its own
        if status is not None and not own and not goes_on:
            self._write_failure(
                run,
                "killed" if killed else "failed",
                f"{why}, and left no report; its output shows more",
                seconds,
            )
        if status == 2:
            # a refusal is not retried
            self._ledger.settle(run.view, run.due)

    def _write_failure(
        self, run: _ScheduledRun, status: str, error: str, seconds: float = 0.0
    ) -> None:
        """Write a report for a run that wrote none, so that it counts and is shown."""
        name = f"{self._store.view(run.view).runs.stamp()}-{secrets.token_hex(3)}"
        report = Report(
            name, run.view, "run", status, run.began_at, utc_now(), round(seconds, 3), error=error
        )
        report.pid = 0 if run.process is None else run.process.pid
        report.due, report.parents = iso(run.due), dict(run.epochs)
        self._store.view(run.view).runs.write(report)

    def _noted(self, run: _ScheduledRun, write: Callable[[], None]) -> None:
        """Write a run's record; if that fails, wait before its view starts again, which would else
        be at every tick."""
        try:
            write()
        except PrecomputeError as exc:
            wait_s = self.project.schedules()[run.view].retry_after_s
            self._not_before[run.view] = time.monotonic() + max(wait_s, 10 * TICK_S)
            self._report(run.view, str(exc), always=True)

    def _report(self, what: str, text: str, always: bool = False) -> None:
        """Announce a message, unless it is the same as the last one on its subject."""
        if always or self._reported.get(what) != text:
            self._reported[what] = text
            self.announce(text if what == "scheduler" else f"{what}: {text}")

    def _stand_by(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None
            self._retained.clear()

    def _end_runs(self) -> None:
        with self._lock:
            runs = list(self._running.values())
        for run in runs:
            self.announce(f"{run.view}: stopping")
            run.why = run.why or STOPPED
            run.end.set()
        limit = time.monotonic() + STOP_GRACE_S + 5.0
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))

    def _on_signal(self, number: int, _: object) -> None:
        # no event is set: the signal may have come while this thread held that one's lock
        self._signalled = True


class _Every(BaseTrigger):  # type: ignore[misc]
    """Always so many seconds from now: APScheduler's interval counts every second of a jump of the
    clock, and there may be millions."""

    def __init__(self, seconds: float) -> None:
        self._every = timedelta(seconds=seconds)

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        """When the next time is."""
        return now + self._every


def _outcome(status: int) -> str:
    if status == 0:
        return "done"
    if status < 0:
        return f"killed by signal {-status}"
    words = {
        2: "refused: bad configuration",
        3: "not published: rows were rejected, or a gate refused",
        130: "cancelled",
    }
    return words.get(
        status,
        f"ended on signal {status - 128}" if status > 128 else f"failed with status {status}",
    )


def _trouble(event: JobExecutionEvent) -> None:
    log.error("a tick was lost: %s", event.exception or "missed")
