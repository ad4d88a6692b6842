"""Scheduler: begins the runs that are due, ends those that take too long, and tells how each ended.
The seam to APScheduler, which only runs what is begun: its pool, one job of a view, an orderly end.

What is due is computed each second (:mod:`precompute.jobs.schedule.due`): it makes no difference
which scheduler looks, or for how long none did; of several the holder of a lease acts. Each run is
a process of its own; it outlives a scheduler that is killed, and ends itself at its deadline. A
folder that is not the root, as below a disk that is not mounted, is never begun anew."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.date import DateTrigger

from precompute.jobs.config.project import Project, files_stamp
from precompute.jobs.config.schedule import Schedule
from precompute.jobs.run.command_process import STOP_GRACE_S, on_signals
from precompute.jobs.run.report import close_dead, is_told, notify
from precompute.jobs.schedule.due import LEADER, RETRIED, Decision, Ledger
from precompute.jobs.schedule.reconciler import POLL_S, Reconciler
from precompute.store.disk.lease import Lease, take
from precompute.store.disk.record import replace
from precompute.store.disk.storage import known_identity, storage_of
from precompute.store.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    PrecomputeError,
    SnapshotError,
)
from precompute.store.offline.runs import Report, Runs
from precompute.store.offline.view_store import OfflineStore
from precompute.store.times import EPOCH, duration, iso, parsed_time, utc_now
from precompute.workers.process import ChildProcess, end_all, installed_module

log = logging.getLogger(__name__)

TICK_S = 1.0
"""How often what is due is computed: cron lines have minutes, so a second is enough."""

BAD_CONFIGURATION = 2
"""Exit status of a run whose configuration cannot be used."""
STOPPED = "the scheduler was stopped"
DIED = "it died without reporting why: killed, out of memory, or the machine went down"


def run_command(project: Project, view: str, due: str) -> list[str]:
    """The command line that runs a view for a time of its schedule, ISO 8601 in UTC: it ends itself
    at the view's deadline, and wherever its root is not this one."""
    deadline_s = project.schedules()[view].deadline_s + STOP_GRACE_S
    command = [*installed_module("precompute.jobs.scheduled_run"), str(deadline_s)]
    command += ["-c", str(project.folder), "run", view, "--due", due]
    return [*command, "--root", known_identity(project.root)]


def utc_clock() -> datetime:
    """Now, aware, in UTC."""
    return datetime.now(UTC)


@dataclass(slots=True)
class Scheduler:
    """Looks for what is due until stopped.

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
    _schedules: Mapping[str, Schedule] = field(init=False)
    _jobs: BackgroundScheduler = field(init=False)
    _identity: str = ""
    """Of the root, once there was one."""
    _lease: Lease | None = None
    _running: dict[str, Decision] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _signalled: bool = False
    _reported: dict[str, str] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    """Runs that were told of, which could not be written down yet."""
    _not_before: dict[str, float] = field(default_factory=dict)
    """View → when it may start again, by the monotonic clock, after a failure that could not be
    written down."""

    def __post_init__(self) -> None:
        self._reconciler = Reconciler(self.project, self.announce)
        self._store = self.project.offline
        self._ledger = Ledger(self.project, self._store)
        self._schedules = self.project.schedules()
        # its memory job store: there is nothing to store, and every persistent one unpickles
        self._jobs = BackgroundScheduler(
            timezone=UTC,
            executors={"default": ThreadPoolExecutor(len(self.project.names) + 2)},
            # of two of a view, where the first is about to end, the second one does nothing
            job_defaults={"coalesce": True, "max_instances": 2, "misfire_grace_time": None},
        )

    def run(self) -> None:
        """Run until :meth:`stop` is called, or SIGTERM or SIGINT comes; then end the runs and
        release the lease."""
        for name in sorted(set(self.project.broken).intersection(self.project.schedules())):
            self._report(
                name,
                "its file is wrong; runs fail until it is mended, and the other views go on:"
                f" {self.project.broken[name]}",
            )
        with on_signals(self._on_signal):
            self._jobs.start()
            try:
                self._look_until_stopped()
            finally:
                self.stop()
                self._jobs.shutdown(wait=True)
                self._reconciler.wait()
                self._stand_by()

    def _look_until_stopped(self) -> None:
        look_at = time.monotonic() + self.project.settings.reconcile
        while not self._signalled:
            self.tick()
            if self._lease is not None and (
                time.monotonic() >= look_at or self._reconciler.sighted
            ):
                self._begin(" look", self._reconciler.check)
                look_at = time.monotonic() + self.project.settings.reconcile
            if self._stopping.wait(TICK_S):
                break

    def stop(self) -> None:
        """Make :meth:`run` return; safe to call from another thread."""
        self._stopping.set()
        self._reconciler.stop()

    def tick(self) -> None:
        """Begin what is due now, if this is the scheduler that acts."""
        first = self._lease is None
        try:
            if self._leads():
                self._begin_due(first)
        except FencedError as exc:
            self._stand_by()
            self._report("scheduler", f"standing by: {exc}")
        except PrecomputeError as exc:
            self._report("scheduler", str(exc))
        except Exception as exc:
            # out of memory, or of files: the next one may do better
            log.exception("a look at what is due failed: %s", exc)

    def _leads(self) -> bool:
        root = self.project.root
        if self._lease is None or storage_of(root).local:
            wrong = self._not_the_root()
            if wrong:
                self._stand_by()
                if self._reported.get("scheduler") != wrong:
                    alert = Report("", "", "schedule", "failed", utc_now(), error=wrong)
                    command = self._notify()
                    self._begin(" alert", notify, command, alert, self.project.home)
                self._report("scheduler", wrong)
                return False
        if self._lease is None:
            by, busy = f"the scheduler on {os.uname().nodename}", "standing by: another one acts"
            ttl_s = self.project.settings.lease
            try:
                self._lease = take(root / ".scheduler", LEADER, by, ttl_s=ttl_s, busy=busy)
            except ConflictError as exc:
                self._report("scheduler", str(exc))
                return False
            if self._reported.pop("scheduler", None) is not None:
                self.announce("scheduler: acting now")
        self._lease.check()
        return True

    def _not_the_root(self) -> str:
        """What is wrong with the folder where the root should be; empty where it is the root."""
        known, root = known_identity(self.project.root), self.project.root
        if not known:
            return (
                f"standing by: {root} is not the root, or nothing was ever run there: it has no"
                " .identity.json. Is its disk mounted? In a new project run the views once:"
                " `precompute run --all`"
            )
        if self._identity not in ("", known):
            return (
                f"standing by: {root} is another root ({known}) than before ({self._identity}). Is"
                " the right disk mounted? Where it was replaced on purpose, restart the scheduler"
            )
        self._identity = known
        return ""

    def _begin_due(self, first: bool) -> None:
        """Begin what is due of each view. ``first``: the first time that this scheduler acts."""
        now, decisions = self.clock(), dict[str, Decision]()
        running = set(self._running)
        for view in self._schedules:
            try:
                decision = self._ledger.decision(view, now, running, decisions)
                if first or decision.state in ("retry", "refused"):
                    self._report(view, decision.reason)
                if (
                    view not in running
                    and self._settled(view, now, decision)
                    and time.monotonic() >= self._not_before.get(view, 0.0)
                ):
                    self._check()
                    self._begin(view, self._run, view, decision)
            except FencedError:
                raise
            # the other views are not affected
            except PrecomputeError as exc:
                self._report(view, str(exc))

    def _settled(self, view: str, now: datetime, decision: Decision) -> bool:
        """Write down what a view's runs left to; returns whether something is to be begun now: its
        run, or to tell of others. What is due is decided again once runs were marked."""
        left, runs = self._ledger.left(view), self._runs(view)
        new = not self._ledger.seen(view, now)
        if new or any(left):
            self._check()
        if new:
            self._ledger.see(view, now)
        for attempt in left.dead:
            deadline_s = self._schedules[view].deadline_s
            late = attempt.started and now >= attempt.started + timedelta(seconds=deadline_s)
            why = _too_long(deadline_s) if late else DIED
            close_dead(self._store.view(view), attempt.partition, why)
        for attempt in left.ahead:
            runs.write(replace(runs.read(attempt.run), ahead=True))
        return bool(left.untold) or (decision.state == "run" and not left.ahead)

    def _check(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _begin(self, name: str, call: Callable[..., object], *args: object) -> None:
        """Have the pool call something at once: its date is long past, whatever the clock does."""
        self._jobs.add_job(call, DateTrigger(EPOCH), args, id=name, replace_existing=True)

    def _run(self, view: str, decision: Decision) -> None:
        """In the pool: run a view, if that is still due, since a pool or a system that has no
        thread left begins late; or only tell of its runs."""
        if self._running.setdefault(view, decision) is not decision:
            return
        try:
            others = self._running.keys() - {view}
            now = self._ledger.decision(view, self.clock(), others)
            if decision.state != "run":
                self._tell(view)
            # one that stands by meanwhile begins nothing
            elif (
                (now.state, now.due) == ("run", decision.due)
                and self._lease is not None
                and not self._stopping.is_set()
            ):
                self._check_root()
                self._check()
                self._attempt(view, now)
        except Exception as exc:
            if not isinstance(exc, PrecomputeError):
                log.exception("%s: the run failed", view)
            # a full disk: without a record it would else be tried at every tick
            wait_s = self._schedules[view].retry_after_s
            self._not_before[view] = time.monotonic() + max(wait_s, 10 * TICK_S)
            self._report(view, str(exc), always=True)
        finally:
            self._running.pop(view, None)

    def _attempt(self, view: str, decision: Decision) -> None:
        """One run, from its beginning until it was told of."""
        assert decision.due is not None
        deadline_s, began = self._schedules[view].deadline_s, time.monotonic()
        before = {attempt.run for attempt in self._ledger.attempts(view)[0]}
        config, why = files_stamp(self.project.folder), ""
        run = f"{self._runs(view).stamp()}-{secrets.token_hex(3)}"
        report = Report(run, view, "run", "failed", utc_now(), due=iso(decision.due))
        report.parents, report.untold = dict(decision.epochs), bool(self._notify())
        try:
            process = ChildProcess(self.command(self.project, view, iso(decision.due)))
        except OSError as exc:
            report.error = f"cannot be started: {exc}"
            self._report(view, report.error, always=True)
            self._close(report, before)
            return
        self._report(view, f"started ({decision.reason})", always=True)
        while not process.ended():
            if time.monotonic() >= began + deadline_s:
                why = _too_long(deadline_s)
            elif self._stopping.wait(POLL_S):
                why = STOPPED
                self.announce(f"{view}: stopping")
            if why:
                end_all([process], STOP_GRACE_S)
                # the log told of what cannot be killed, and that holds its lease
                break
        status, report.pid = process.status, process.pid
        why = _too_long(deadline_s) if status == -signal.SIGALRM else why
        report.seconds = round(time.monotonic() - began, 3)
        how = "was ended" if why and status is not None else process.how_it_ended()
        report.error = f"it {how}, and left no report; its output shows more"
        if why or (status is not None and status < 0):
            report.status, report.error = "killed", f"killed: {why or f'it {how}'}"
        elif status == BAD_CONFIGURATION and (wrong := self._mistake(view)):
            report.status, report.config, report.error = "refused", config, wrong
        self._close(report, before, why or f"it {how}")
        because = f" ({why})" if why and why != STOPPED else ""
        said = how if status is None else _OUTCOMES.get(status, how)
        self._report(view, f"{said}{because} after {report.seconds:.1f} s", always=True)

    def _close(self, report: Report, before: Collection[str], why: str = "") -> None:
        """Make sure that a run that has ended has its outcome in a report: ``report``, unless it
        left one of its own, or the time is done; then tell of it. ``before`` are the runs before
        it, and ``why`` is said of one that could not.

        Raises:
            PrecomputeError: it cannot be written down, or this is not the root any more.
        """
        view, runs, due = report.view, self._runs(report.view), parsed_time(report.due)
        self._check_root()
        self._ledger.attempts(view)
        for attempt in self._ledger.left(view).dead:
            close_dead(self._store.view(view), attempt.partition, why)
        attempts, goes_on = self._ledger.attempts(view)
        of_it = [attempt for attempt in attempts if attempt.due == due]
        own = [attempt for attempt in of_it if attempt.run not in before]
        for attempt in own:
            # a signal ended it, or its configuration, and its report does not know of that
            if attempt.status in RETRIED and report.status != "failed":
                known = runs.read(attempt.run)
                error = known.error if report.config else report.error
                known = replace(known, status=report.status, error=error, config=report.config)
                runs.write(known)
        # else another run was first, and has a report of its own
        if not own and not goes_on and not any(a.finished and not a.ahead for a in of_it):
            report.finished_at = utc_now()
            runs.write(report)
        self._tell(view)

    def _check_root(self) -> None:
        """Raises:
        SnapshotError: this is not the root, or not any more.
        """
        if wrong := self._not_the_root():
            raise SnapshotError(wrong)

    def _notify(self) -> list[str]:
        """The operator's command, as the project's file has it now: of a run that the scheduler
        began nobody else tells."""
        try:
            return Project(self.project.folder).settings.notify
        except ConfigError:
            return self.project.settings.notify

    def _mistake(self, view: str) -> str:
        """What is wrong with the project's files now; empty where nothing is: what else the
        configuration names, as a model's file, may be there again without a change of them."""
        try:
            Project(self.project.folder).view(view)
        except ConfigError as exc:
            return str(exc)
        return ""

    def _tell(self, view: str) -> None:
        """Call the operator's command with each run that ended and that it does not know of."""
        if self._lease is None:
            return
        self._ledger.attempts(view)
        for number, attempt in enumerate(self._ledger.left(view).untold):
            if number and self._stopping.is_set():
                # it stays untold: the next scheduler tells
                return
            report = self._runs(view).read(attempt.run)
            if attempt.run not in self._told and is_told(report):
                notify(self._notify(), report, self.project.home)
            self._told.add(attempt.run)
            # the command may have taken half a minute
            self._check_root()
            self._check()
            self._runs(view).write(replace(report, untold=False))
            self._told.discard(attempt.run)

    def _runs(self, view: str) -> Runs:
        return self._store.view(view).runs

    def _report(self, what: str, text: str, always: bool = False) -> None:
        """Announce a message, unless it is the same as the last one on its subject."""
        if always or self._reported.get(what) != text:
            self._reported[what] = text
            self.announce(text if what == "scheduler" else f"{what}: {text}")

    def _stand_by(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _on_signal(self, number: int, _: object) -> None:
        # no event is set: the signal may have come while this thread held that one's lock
        self._signalled = True


def _too_long(deadline_s: float) -> str:
    return f"its deadline of {duration(deadline_s)} passed"


_OUTCOMES = {
    0: "done",
    BAD_CONFIGURATION: "refused: bad configuration",
    3: "not published: rows were rejected, or a gate refused",
    130: "cancelled",
}
"""Exit status of a run → how it ended, for people."""
