"""Due: which view is to run now, and for which of its times.

Computed from the schedule, the runs' reports and what is live: nothing is remembered that a crash
could lose. A run **for** a time counts for that time, however the clock moved since; but for one
whose time lay ahead of the clock, which was wrong then (``ahead``). The one thing stored is
``<root>/<view>/notes/schedule.json``: when a line was first seen, since a new line does not run for
the past.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

from precompute.jobs.config.project import Project, files_stamp
from precompute.jobs.config.schedule import Schedule, fire_times, last_fire
from precompute.jobs.run.report import COMPUTING
from precompute.store.disk.durable_file import disk_message
from precompute.store.disk.lease import holder, is_held
from precompute.store.disk.record import Record, read_record, sealed
from precompute.store.errors import SnapshotError
from precompute.store.offline.runs import FINISHED, Report
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import EPOCH, Partition, containing, parsed_time

log = logging.getLogger(__name__)

RETRIED = ("failed", "killed")
"""Statuses of runs that may do better the next time."""

LATE_S = 60.0
"""How late a run may begin under ``catch_up: none``. The scheduler looks every second, so only one
that was away, or busy with the run before, comes later; a minute is the finest step of a cron
line."""

AHEAD_S, OFTEN_AHEAD_S = 3 * 3600.0, 90.0
"""How far ahead of the clock the time of a run may lie, so that the run counts when that time
comes: a clock that was set back by less was set right, and a fixed hour comes once a day. Lines
with a ``*`` in minute or hour run by the clock as it is. Both are cron's own (Debian's)."""

JITTER = 0.2
"""Share by which a wait before a retry is longer or shorter, so that views that failed together do
not come back together."""

LEADER = "leader"
"""Name of the lease the acting scheduler holds in ``<root>/.scheduler``."""

REPORTS = 200
"""How many of a view's newest reports are looked at; those of backfills, and of a clock that was
wrong, are none of them."""

SETTLED_NS = 1_000_000_000
"""A second change within one step of a file system's clock does not show: what changed within so
long is looked at once more."""


class Attempt(NamedTuple):
    """What is wanted of a run's report: a few words of some 15 kB."""

    run: str
    command: str
    status: str
    due: datetime | None
    started: datetime | None
    ended: datetime | None
    partition: str | None
    parents: Mapping[str, int]
    ahead: bool
    untold: bool
    config: str | None
    error: str
    """Of one whose configuration could not be read."""

    @classmethod
    def of(cls, report: Report) -> Attempt | None:
        """That of a report; None of what is no run of the schedule or by hand."""
        if report.command not in COMPUTING or report.backfill:
            return None
        return cls(
            report.run,
            sys.intern(report.command),
            sys.intern(report.status),
            parsed_time(report.due),
            parsed_time(report.started_at),
            parsed_time(report.finished_at),
            report.partition,
            report.parents or _NO_PARENTS,
            report.ahead,
            report.untold,
            report.config,
            (report.error or "") if report.config else "",
        )

    @property
    def finished(self) -> bool:
        """Whether it did what it was for."""
        return self.status in FINISHED


_NO_PARENTS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Parent:
    """A view that another one runs after."""

    epoch: int
    """Epoch of its live pointer; 0 when it was never published."""
    at: datetime
    """When the live pointer was moved."""
    pending: bool
    """Whether it runs now, or will without anything else happening."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about a view. Attempts are the newest first, those of dead runs with the status
    ``killed``."""

    attempts: Sequence[Attempt] = ()
    running: bool = False
    since: datetime | None = None
    """When a scheduler first saw this schedule; None when none did."""
    config: str | None = None
    """Stamp of the project's files."""
    parents: Mapping[str, Parent] = field(default_factory=dict)


State = Literal["run", "retry", "refused", "running", "idle"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a view.

    ``state``: ``run`` now, for ``due`` · ``retry``: run again, not before ``at`` · ``refused``: run
    once the project's files are others, which could not be read · ``running`` · ``idle``.
    """

    state: State
    reason: str
    """Why this was decided, for people."""
    due: datetime | None = None
    """The time the run is for."""
    at: datetime | None = None
    """When it runs next; None when that is not a matter of time."""
    epochs: Mapping[str, int] = field(default_factory=dict)
    """The parents' live epochs."""
    ready: datetime | None = field(default=None, compare=False)
    """Since when a run could have begun."""


def decide(view: str, schedule: Schedule, facts: Facts, now: datetime) -> Decision:
    """What to do about a view at ``now`` (aware).

    A time is **settled** when it was run for, given up or skipped. Which of the unsettled ones are
    run for is the catch-up policy: ``latest`` the last one, ``all`` each in order, ``none`` the
    last one if it is not late. A run that failed or was killed is tried again; one whose
    configuration could not be read once that changed; one that was refused by a gate, had too many
    rows rejected or was cancelled is not: it would end in the same way.
    """
    return (
        _by_cron(view, schedule, facts, now)
        if schedule.cron is not None
        else _by_parents(view, schedule, facts, now)
    )


def retry_wait_s(view: str, schedule: Schedule, due: datetime, failures: int) -> float:
    """Seconds to wait after the ``failures``-th failure (from 1). The jitter follows from the
    arguments: a restart changes nothing."""
    digest = hashlib.sha256(f"{view} {due.isoformat()} {failures}".encode()).digest()
    share = int.from_bytes(digest[:4]) / 2**32
    return float(schedule.retry_after_s * 2 ** (failures - 1) * (1 - JITTER + 2 * JITTER * share))


def ahead_after(schedule: Schedule, now: datetime) -> datetime | None:
    """A run for a time later than this was made by a clock that was wrong; None of a view that runs
    after others, whose times are none of a clock's."""
    if schedule.cron is None:
        return None
    often = any("*" in part for part in schedule.cron.split()[:2])
    return now + timedelta(seconds=OFTEN_AHEAD_S if often else AHEAD_S)


def _by_cron(view: str, schedule: Schedule, facts: Facts, now: datetime) -> Decision:
    assert schedule.cron is not None
    attempts = [attempt for attempt in facts.attempts if not attempt.ahead]
    done = {attempt.due for attempt in attempts if attempt.finished}
    times = fire_times(schedule.cron, schedule.timezone, now)
    following = next((at for at in times if at not in done), None)
    if facts.running:
        return Decision("running", "runs now", at=following)
    gave_up = ""
    for fire in _to_settle(schedule, attempts, facts.since or now, now):
        own = [attempt for attempt in attempts if attempt.due == fire]
        state, at, why = _standing(view, schedule, fire, own, now, facts.config)
        if schedule.catch_up == "latest" and _ran_since(attempts, fire, now):
            state, why = "idle", ""
        if (
            state == "run"
            and not own
            and schedule.catch_up == "none"
            and now - fire > timedelta(seconds=LATE_S)
        ):
            state, why = "idle", "was missed"
        text = _local(fire, schedule)
        if state != "idle":
            reason = f"due since {text}" + (f", {why}" if why else "")
            when = following if at is None else max(at, now)
            return Decision(state, reason, fire, when, ready=at)
        gave_up = f"; {text} {why}" if why else ""
    reason = (
        "never again" if following is None else f"next at {_local(following, schedule)}{gave_up}"
    )
    return Decision("idle", reason, None, following)


def _to_settle(
    schedule: Schedule, attempts: Sequence[Attempt], since: datetime, now: datetime
) -> Iterator[datetime]:
    """The fire times in (since, now] to look at: by policy the last one, or each from the last one
    on that was run for."""
    assert schedule.cron is not None
    if schedule.catch_up != "all":
        last = last_fire(schedule.cron, schedule.timezone, since, now)
        yield from () if last is None else (last,)
        return
    tried = [a.due for a in attempts if a.due is not None and since < a.due <= now]
    if tried:
        since = max(tried)
        yield since
    yield from fire_times(schedule.cron, schedule.timezone, since, now)


def _by_parents(view: str, schedule: Schedule, facts: Facts, now: datetime) -> Decision:
    runs = [attempt for attempt in facts.attempts if attempt.command == "run"]
    # a run by hand of another partition is none for these
    finished = [a for a in runs if a.finished and (a.due or _is_latest(a, a.started))]
    epochs = {name: parent.epoch for name, parent in facts.parents.items()}

    def idle(reason: str) -> Decision:
        return Decision("idle", f"{schedule.when}: {reason}", epochs=epochs)

    if facts.running:
        return Decision("running", "runs now", epochs=epochs)
    unpublished = [name for name, epoch in epochs.items() if not epoch]
    if unpublished and (not finished or len(unpublished) == len(epochs)):
        return idle(f"waits for the first snapshot of {', '.join(unpublished)}")
    due = max(parent.at for parent in facts.parents.values() if parent.epoch)
    # The highest epoch it ever ran with, not that of its newest report: a clock set back makes an
    # older report look newer.
    seen = {name: max((a.parents.get(name, 0) for a in finished), default=0) for name in epochs}
    new = [name for name, epoch in epochs.items() if epoch > seen[name]]
    if not new or any(not a.parents and a.due == due for a in finished):
        return idle("nothing new")
    pending = [name for name, parent in facts.parents.items() if parent.pending]
    if pending:
        return idle(f"waits for {', '.join(pending)}")
    own = [a for a in runs if a.due and {name: a.parents.get(name, 0) for name in epochs} == epochs]
    state, at, why = _standing(view, schedule, due, own, now, facts.config)
    if state == "idle":
        again = f"runs again after the next snapshot of {' or '.join(epochs)}"
        return idle(f"{why or 'nothing new'}; {again}")
    text = f"new: {', '.join(new)}" + (f", {why}" if why else "")
    when = None if at is None else max(at, now)
    return Decision(state, text, due, when, epochs, ready=at)


def _standing(
    view: str,
    schedule: Schedule,
    due: datetime,
    attempts: Sequence[Attempt],
    now: datetime,
    config: str | None,
) -> tuple[State, datetime | None, str]:
    """The state of one time, by the runs there were for it: what to do, from when on, and why;
    ``idle`` where it is done, or given up for a reason."""
    if any(attempt.finished for attempt in attempts):
        return "idle", None, ""
    if attempts and attempts[0].config is not None:
        error = f"its configuration cannot be used: {attempts[0].error}"
        if attempts[0].config == config:
            return "refused", None, f"{error}; it runs once the project's files change"
        return "run", due, "since its configuration was changed"
    attempts = [attempt for attempt in attempts if attempt.config is None]
    for attempt in attempts:
        if attempt.status not in RETRIED:
            return "idle", None, f"was given up: {attempt.status}"
    failures = len(attempts)
    if not failures:
        return "run", due, ""
    if failures > schedule.retries:
        why = f"was given up: {attempts[0].status}"
        return "idle", None, why + (f" {failures} times" if failures > 1 else "")
    ended = max((end for a in attempts if (end := a.ended or a.started) is not None), default=None)
    # An end in the future was written before the clock was set back. How long ago it was is
    # not known; waiting for it could take a year.
    at = (
        now
        if ended is None or ended > now
        else ended + timedelta(seconds=retry_wait_s(view, schedule, due, failures))
    )
    why = f"retry {failures} of {schedule.retries}"
    return ("run", at, why) if at <= now else ("retry", at, f"{why} at {_local(at, schedule)}")


def _ran_since(attempts: Sequence[Attempt], fire: datetime, now: datetime) -> bool:
    """Whether a run that began after the fire time, by hand too, did its work already."""
    return any(
        attempt.finished
        and attempt.command == "run"
        and attempt.started is not None
        and fire <= attempt.started <= now
        and _is_latest(attempt, fire)
        for attempt in attempts
    )


def _is_latest(attempt: Attempt, at: datetime | None) -> bool:
    """Whether a run computed the whole view, or its latest partition that was over at a time, or a
    later one; True where the time is not known."""
    if attempt.partition is None or at is None:
        return True
    partition = Partition.parse(attempt.partition)
    length = partition.end - partition.start
    # months differ in length
    by_month = length > timedelta(days=7)
    following = containing("month", partition.end).end if by_month else partition.end + length
    return following > at


def _local(at: datetime, schedule: Schedule) -> str:
    return at.astimezone(ZoneInfo(schedule.timezone)).isoformat(" ", "minutes")


class _Line(Record, frozen=True):
    when: str
    timezone: str
    since: str


class Left(NamedTuple):
    """What a view's runs left to do for the scheduler that acts."""

    dead: Sequence[Attempt] = ()
    """Runs that say they go on, though they do not."""
    untold: Sequence[Attempt] = ()
    """Those that ended, and that nobody was told of; the oldest first."""
    ahead: Sequence[Attempt] = ()
    """Those that ended, and were made by a clock that was wrong."""


class _Seen:
    """A view between two looks: its reports in a few words, and what was decided."""

    def __init__(self, store: ViewStore) -> None:
        self.store, self._folder = store, store.runs.folder
        self.since: datetime | None = None
        self._reports: dict[str, tuple[int, Attempt | None]] = {}
        """Run → a stamp of its report, 0 where that was too new to have one; and what it said, None
        of what is no attempt."""
        self._of: int | None = None
        """When the folder was changed that these are of."""
        self.decided: tuple[object, datetime, Decision] | None = None
        """From what, when, and that nothing is to be done."""
        self.left = Left()

    def changed_ns(self) -> int | None:
        """When a report was written last; None while that is so new that another one may not
        show."""
        at = self.store.storage.changed_ns(self._folder) or 0
        return None if abs(time.time_ns() - at) < SETTLED_NS else at

    def look(self) -> tuple[list[Attempt], bool]:
        """The runs, the newest first, and whether one goes on.

        Raises:
            SnapshotError: a lease is damaged or cannot be read.
        """
        of = self.changed_ns()
        if of is None or of != self._of:
            self._read(of)
        if self._silent():
            # one that has ended since the reading wrote so before it released its lease
            self._read(of)
        dead = self._silent()
        attempts = [a._replace(status="killed") if a in dead else a for a in self._attempts()]
        self.left = Left(dead, [a for a in attempts if a.untold and a.status != "running"][::-1])
        return attempts, any(a.status == "running" for a in attempts) or self.store.running()

    def _attempts(self) -> list[Attempt]:
        return [attempt for _, attempt in self._reports.values() if attempt is not None]

    def _silent(self) -> list[Attempt]:
        """Runs whose reports say that they go on, though no process holds their lease."""
        return [
            attempt
            for attempt in self._attempts()
            if attempt.status == "running" and not self.store.running(attempt.partition)
        ]

    def _read(self, of: int | None) -> None:
        """Read the reports that are new, or were written again."""
        items = self.store.storage.items(self._folder)
        now_ns, before, left, self._reports = time.time_ns(), self._reports, REPORTS, {}
        for item in sorted(items, key=lambda item: item.name, reverse=True):
            run, suffix = item.name[:-5], item.name[-5:]
            if left and suffix == ".json" and not run.startswith("."):
                settled = abs(now_ns - item.modified_ns) > SETTLED_NS
                stamp = hash((item.size_bytes, item.modified_ns)) if settled else 0
                known = before.get(run)
                if known is None or known[0] != stamp or not stamp:
                    known = stamp, self._attempt(run)
                self._reports[run if known[1] is None else known[1].run] = known
                left -= known[1] is not None and not known[1].ahead
        self._of = of

    def _attempt(self, run: str) -> Attempt | None:
        try:
            return Attempt.of(self.store.runs.read(run))
        except SnapshotError as exc:
            log.warning("%s; remove the file", exc)
            return None


class Ledger:
    """What the store has of the views' runs. A decision that nothing is to be done stands until
    reports or what is live change, its time comes, or the clock goes back. Safe to use from several
    threads.

    Args:
        project: the configuration.
        offline: its offline store.
    """

    def __init__(self, project: Project, offline: OfflineStore) -> None:
        self._folder, self._offline, self._schedules = project.folder, offline, project.schedules()
        self._views: dict[str, _Seen] = {}
        self._lock = threading.RLock()

    def _seen(self, view: str) -> _Seen:
        if view not in self._views:
            seen = _Seen(self._offline.view(view))
            # first: what cannot be read now is read the next time, and not begun anew
            seen.since = self._since(view, seen.store)
            self._views[view] = seen
        return self._views[view]

    def decision(
        self,
        view: str,
        now: datetime,
        running: Collection[str] = (),
        decisions: dict[str, Decision] | None = None,
    ) -> Decision:
        """:func:`decide` for a view.

        Args:
            view: one that is scheduled.
            now: aware.
            running: views the caller knows to run, whatever the leases say.
            decisions: decisions made already at ``now``; gets those of this view and the ones it
                runs after.

        Raises:
            SnapshotError: a lease or live pointer is damaged, or cannot be read.
        """
        decisions = {} if decisions is None else decisions
        if view not in decisions:
            with self._lock:
                decisions[view] = self._decided(view, now, running, decisions)
        return decisions[view]

    def _decided(
        self, view: str, now: datetime, running: Collection[str], decisions: dict[str, Decision]
    ) -> Decision:
        schedule, seen = self._schedules[view], self._seen(view)
        parents = {name: self._parent(name, now, running, decisions) for name in schedule.parents}
        of = (seen.changed_ns(), parents)
        if seen.decided is not None and view not in running:
            known, at, decision = seen.decided
            if known == of and at <= now and (decision.at is None or now < decision.at):
                return decision
        attempts, goes_on = seen.look()
        limit = ahead_after(schedule, now)
        ahead = [a for a in attempts if a.due and limit and a.due > limit and not a.ahead]
        seen.left = seen.left._replace(ahead=[a for a in ahead if a.status != "running"])
        facts = Facts(
            attempts,
            view in running or goes_on,
            None if seen.since is None else min(seen.since, now),
            files_stamp(self._folder) if any(a.config for a in attempts) else None,
            parents,
        )
        decision = decide(view, schedule, facts, now)
        stands = decision.state == "idle" and of[0] is not None and not any(seen.left)
        seen.decided = (of, now, decision) if stands else None
        return decision

    def _parent(
        self, name: str, now: datetime, running: Collection[str], decisions: dict[str, Decision]
    ) -> Parent:
        self.decision(name, now, running, decisions)
        live = self._seen(name).store.log.live()
        at = None if live is None else parsed_time(live.at)
        return Parent(
            0 if live is None else live.epoch, at or EPOCH, self._pending(name, decisions)
        )

    def _pending(self, name: str, decisions: Mapping[str, Decision]) -> bool:
        """Whether it runs, or will: by itself, or after one that does."""
        return decisions[name].state in ("run", "retry", "running") or any(
            self._pending(parent, decisions) for parent in self._schedules[name].parents
        )

    def attempts(self, view: str) -> tuple[list[Attempt], bool]:
        """A view's newest runs, dead ones as ``killed``; and whether one goes on that is no part of
        a backfill.

        Raises:
            SnapshotError: a lease is damaged or cannot be read.
        """
        with self._lock:
            return self._seen(view).look()

    def left(self, view: str) -> Left:
        """What was left to do when it was looked at last."""
        return self._seen(view).left

    def seen(self, view: str, now: datetime) -> bool:
        """Whether a scheduler saw the view's present line of times, by a clock that was right."""
        since = self._seen(view).since
        return self._schedules[view].cron is None or (since is not None and since <= now)

    def _since(self, view: str, store: ViewStore) -> datetime | None:
        schedule, path = self._schedules[view], store.leases / "schedule.json"
        try:
            line = read_record(_Line, store.storage.read(path), path)
            if (line.when, line.timezone) == (schedule.when, schedule.timezone):
                return parsed_time(line.since)
        except FileNotFoundError:
            pass
        except ValueError as exc:
            log.warning("%s is damaged (%s); the schedule of %r begins again", path, exc, view)
        return None

    def see(self, view: str, since: datetime) -> None:
        """Write down that a view's line of times counts from ``since`` on.

        Raises:
            SnapshotError: the file system failed.
        """
        schedule, seen = self._schedules[view], self._seen(view)
        path = seen.store.leases / "schedule.json"
        line = _Line(schedule.when, schedule.timezone, since.isoformat())
        try:
            seen.store.storage.write(path, sealed(line))
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc, "nothing was started")) from exc
        with self._lock:
            seen.since, seen.decided = since, None


@dataclass(frozen=True, slots=True)
class Outlook:
    """When a view runs next, for people: ``due`` in UTC, None when it is not scheduled or that is
    not a matter of time; ``reason``; and ``trouble``, what keeps its schedule from being stored,
    None when nothing does."""

    due: datetime | None
    reason: str
    trouble: str | None = None


def outlook(project: Project, store: ViewStore, now: datetime) -> Outlook:
    """When a view runs next, and what is in the way of that.

    A scheduler that acts begins what is due within a second. So there is trouble when something has
    been due for more than :data:`LATE_S`; when its configuration could not be used; when the last
    scheduler that acted is gone; when none ever did, and a time of a cron line went by since the
    view's last run; and when the one that acts was started with another schedule.

    Raises:
        SnapshotError: a lease or live pointer is damaged, or cannot be read.
    """
    view, offline = store.name, store.offline
    schedule = project.schedules().get(view)
    if schedule is None:
        return Outlook(None, "not scheduled")
    ledger, leases = Ledger(project, offline), offline.root / ".scheduler"
    decision, up = ledger.decision(view, now), is_held(leases, LEADER)
    due = decision.due if decision.state == "run" else decision.at
    reason = decision.reason + ("" if up else "; no scheduler is up")
    overdue = (
        decision.state == "run"
        and decision.ready is not None
        and now - decision.ready > timedelta(seconds=LATE_S)
    )
    trouble = reason if decision.state == "refused" else None
    if overdue:
        assert decision.due is not None
        trouble = f"due since {_local(decision.due, schedule)} and not begun"
        trouble += "" if up else ": no scheduler is up"
    elif not up and holder(leases, LEADER) is not None:
        trouble = "scheduled, and no scheduler is up"
    elif not ledger.seen(view, now) and up:
        trouble = "the scheduler that is up does not know its schedule: restart it"
    elif not ledger.seen(view, now):
        missed = _missed(schedule, ledger.attempts(view)[0], now)
        if missed is not None:
            text = _local(missed, schedule)
            trouble = f"due since {text} and not begun: no scheduler was ever up"
    return Outlook(due, reason, trouble)


def _missed(schedule: Schedule, attempts: Sequence[Attempt], now: datetime) -> datetime | None:
    """The last fire time of a cron line since the view's last run, if that is more than
    :data:`LATE_S` ago."""
    assert schedule.cron is not None
    began = [a.started for a in attempts if a.started is not None and a.started <= now]
    first = (
        None
        if not began
        else next(fire_times(schedule.cron, schedule.timezone, max(began), now), None)
    )
    if first is None or now - first <= timedelta(seconds=LATE_S):
        return None
    return last_fire(schedule.cron, schedule.timezone, first, now) or first
