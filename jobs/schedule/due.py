"""Due: which view is to run now, and for which of its times.

Computed again every time, from the schedule, the runs' reports and the live pointers: nothing is
remembered that a crash could lose. The one thing stored is ``<root>/<view>/notes/schedule.json``:
up to when a line's times are settled, so that a new line does not run for the past.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

from precompute.jobs.config.project import Project
from precompute.jobs.config.schedule import Schedule, fire_times, last_fire
from precompute.jobs.run.report import PUBLISHING
from precompute.store.disk.durable_file import disk_message
from precompute.store.disk.lease import holder, is_held
from precompute.store.disk.record import Record, read_record, replace, sealed
from precompute.store.disk.storage import storage_of
from precompute.store.errors import SnapshotError
from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import Partition, containing, parsed_time

log = logging.getLogger(__name__)

RETRIED = ("failed", "killed")
"""Statuses of runs that may do better the next time."""

LATE_S = 60.0
"""How late a run may begin under ``catch_up: none``. The scheduler looks every second, so only one
that was away, or busy with the run before, comes later; a minute is the finest step of a cron
line."""

BACK_S = 90.0
"""A clock that is set back by no more passes at most a minute's time twice, which was run for a
minute ago; by more, its times come again and are run for again."""

JITTER = 0.2
"""Share by which a wait before a retry is longer or shorter, so that views that failed together do
not come back together."""

LEADER = "leader"
"""Name of the lease the acting scheduler holds in ``<root>/.scheduler``."""

REPORTS = 200
"""How many of a view's newest reports are looked at. Settled times are held apart, so a backfill of
more runs nothing twice."""


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
    """What is known about a view. Reports are the newest first, those of dead runs with the status
    ``killed``."""

    reports: Sequence[Report] = ()
    running: bool = False
    since: datetime | None = None
    """Its times up to here are settled; None when no scheduler saw this schedule before."""
    ignored: frozenset[str] = frozenset()
    """Runs, by their ids, for times that the clock was set back behind: these come again, and are
    run for again."""
    parents: Mapping[str, Parent] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a view.

    ``state``: ``run`` now, for ``due`` · ``retry``: run again, not before ``at`` · ``running`` ·
    ``idle``.
    """

    state: Literal["run", "retry", "running", "idle"]
    reason: str
    """Why this was decided, for people."""
    due: datetime | None = None
    """The time the run is for."""
    at: datetime | None = None
    """When it runs next; None when that is not a matter of time."""
    since: datetime | None = None
    """As in :class:`Facts`, to be stored."""
    ignored: frozenset[str] = frozenset()
    """Likewise."""
    epochs: Mapping[str, int] = field(default_factory=dict)
    """The parents' live epochs."""
    ready: datetime | None = field(default=None, compare=False)
    """Since when a run could have begun."""


def decide(view: str, schedule: Schedule, facts: Facts, now: datetime) -> Decision:
    """What to do about a view at ``now`` (aware).

    A time is **settled** when it was run for, given up or skipped. Which of the unsettled ones are
    run for is the catch-up policy: ``latest`` the last one, ``all`` each in order, ``none`` the
    last one if it is not late. A run that failed or was killed is tried again; one that was refused
    by a gate, had too many rows rejected or was cancelled is not: it would end in the same way.
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


def _by_cron(view: str, schedule: Schedule, facts: Facts, now: datetime) -> Decision:
    assert schedule.cron is not None
    since, ignored = facts.since, facts.ignored.intersection(r.run for r in facts.reports)
    if since is None:
        since = now
    elif since > now + timedelta(seconds=BACK_S):
        # what was run for the times to come was run before: a run too many is cheaper than a missed
        # night
        ignored |= {
            r.run for r in facts.reports if (due := parsed_time(r.due)) is not None and due > now
        }
        since = now
    facts = Facts([r for r in facts.reports if r.run not in ignored], facts.running, since, ignored)
    following = next(fire_times(schedule.cron, schedule.timezone, max(now, since)), None)
    if facts.running:
        return Decision("running", "runs now", at=following, since=since, ignored=facts.ignored)
    gave_up = ""
    while (fire := _unsettled(schedule, since, now)) is not None:
        state, at, why = _standing(view, schedule, fire, _attempts_for(facts, fire), now)
        if schedule.catch_up == "latest" and _ran_since(facts, fire, now):
            state, why = "done", ""
        if (
            state == "run"
            and not why
            and schedule.catch_up == "none"
            and now - fire > timedelta(seconds=LATE_S)
        ):
            state, why = "given up", "was missed"
        if state in ("run", "retry"):
            text = f"due since {_local(fire, schedule)}" + (f", {why}" if why else "")
            when = _not_past(at, now)
            return Decision(
                "run" if state == "run" else "retry",
                text,
                fire,
                when,
                since,
                facts.ignored,
                ready=at,
            )
        since, gave_up = fire, f"; {_local(fire, schedule)} {why}" if why else ""
    gave_up = gave_up or _last_failure(schedule, facts, since, now)
    reason = (
        "never again" if following is None else f"next at {_local(following, schedule)}{gave_up}"
    )
    return Decision("idle", reason, None, following, since, facts.ignored)


def _unsettled(schedule: Schedule, since: datetime, now: datetime) -> datetime | None:
    """The fire time to look at: by policy the first or the last one in (since, now]."""
    assert schedule.cron is not None
    first = next(fire_times(schedule.cron, schedule.timezone, since, now), None)
    if first is None or schedule.catch_up == "all":
        return first
    return last_fire(schedule.cron, schedule.timezone, first, now) or first


def _by_parents(view: str, schedule: Schedule, facts: Facts, now: datetime) -> Decision:
    runs = [r for r in facts.reports if r.command == "run" and not r.backfill]
    # a run by hand of another partition is none for these
    finished = [
        r for r in runs if r.finished and (r.due or _is_latest(r, parsed_time(r.started_at)))
    ]
    epochs = {name: parent.epoch for name, parent in facts.parents.items()}

    def idle(reason: str) -> Decision:
        return Decision("idle", f"{schedule.when}: {reason}", since=facts.since, epochs=epochs)

    if facts.running:
        return Decision("running", "runs now", since=facts.since, epochs=epochs)
    unpublished = [name for name, epoch in epochs.items() if not epoch]
    if unpublished and (not finished or len(unpublished) == len(epochs)):
        return idle(f"waits for the first snapshot of {', '.join(unpublished)}")
    due = max(parent.at for parent in facts.parents.values() if parent.epoch)
    # The highest epoch it ever ran with, not that of its newest report: a clock set back makes an
    # older report look newer.
    seen = {name: max((r.parents.get(name, 0) for r in finished), default=0) for name in epochs}
    new = [name for name, epoch in epochs.items() if epoch > seen[name]]
    if not new or any(not r.parents and parsed_time(r.due) == due for r in finished):
        return idle("nothing new")
    pending = [name for name, parent in facts.parents.items() if parent.pending]
    if pending:
        return idle(f"waits for {', '.join(pending)}")
    attempts = [
        r for r in runs if r.due and {name: r.parents.get(name, 0) for name in epochs} == epochs
    ]
    state, at, why = _standing(view, schedule, due, attempts, now)
    if facts.since == due:
        state, why = "given up", "was given up"
    if state not in ("run", "retry"):
        return idle(
            f"{why or 'nothing new'}; runs again after the next snapshot of {' or '.join(epochs)}"
        )
    text = f"new: {', '.join(new)}" + (f", {why}" if why else "")
    return Decision(
        "run" if state == "run" else "retry",
        text,
        due,
        _not_past(at, now),
        facts.since,
        epochs=epochs,
        ready=at,
    )


def _standing(
    view: str, schedule: Schedule, due: datetime, attempts: Sequence[Report], now: datetime
) -> tuple[Literal["run", "retry", "done", "given up"], datetime | None, str]:
    """The state of one time, by the runs there were for it: what to do, from when on, and why."""
    if any(r.finished for r in attempts):
        return "done", None, ""
    for report in attempts:
        if report.status not in RETRIED:
            return "given up", None, f"was given up: {report.status}"
    failures = len(attempts)
    if not failures:
        return "run", due, ""
    if failures > schedule.retries:
        return (
            "given up",
            None,
            f"was given up: {attempts[0].status}" + (f" {failures} times" if failures > 1 else ""),
        )
    ends = [
        end
        for r in attempts
        if (end := parsed_time(r.finished_at) or parsed_time(r.started_at)) is not None
    ]
    ended = max(ends, default=None)
    # An end in the future was written before the clock was set back. How long ago it was is
    # not known; waiting for it could take a year.
    at = (
        now
        if ended is None or ended > now
        else ended + timedelta(seconds=retry_wait_s(view, schedule, due, failures))
    )
    why = f"retry {failures} of {schedule.retries}"
    return ("run", at, why) if at <= now else ("retry", at, f"{why} at {_local(at, schedule)}")


def _not_past(at: datetime | None, now: datetime) -> datetime | None:
    return at if at is None else max(at, now)


def _attempts_for(facts: Facts, due: datetime) -> list[Report]:
    return [r for r in facts.reports if r.due and parsed_time(r.due) == due]


def _ran_since(facts: Facts, fire: datetime, now: datetime) -> bool:
    """Whether a run that began after the fire time, by hand too, did its work already."""
    for report in facts.reports:
        started = parsed_time(report.started_at)
        whole = report.command == "run" and not report.backfill and _is_latest(report, fire)
        if whole and report.finished and started is not None and fire <= started <= now:
            return True
    return False


def _is_latest(report: Report, at: datetime | None) -> bool:
    """Whether a run computed the whole view, or its latest partition that was over at a time, or a
    later one; True where the time is not known."""
    if report.partition is None or at is None:
        return True
    partition = Partition.parse(report.partition)
    length = partition.end - partition.start
    # months differ in length
    by_month = length > timedelta(days=7)
    following = containing("month", partition.end).end if by_month else partition.end + length
    return following > at


def _last_failure(schedule: Schedule, facts: Facts, since: datetime, now: datetime) -> str:
    """What to say about the last settled time when its run did not succeed."""
    times = [due for r in facts.reports if (due := parsed_time(r.due)) is not None]
    last = max((due for due in times if due <= since), default=None)
    attempts = [] if last is None else _attempts_for(facts, last)
    if last is None or any(r.finished for r in attempts) or _ran_since(facts, last, now):
        return ""
    count = f" {len(attempts)} times" if len(attempts) > 1 else ""
    return f"; {_local(last, schedule)} was given up: {attempts[0].status}{count}"


def _local(at: datetime, schedule: Schedule) -> str:
    return at.astimezone(ZoneInfo(schedule.timezone)).isoformat(" ", "minutes")


class _Settled(Record, frozen=True):
    when: str
    timezone: str
    since: str
    ignored: tuple[str, ...] = ()


class Ledger:
    """What the store has of the views' runs. Reports are read again only when some changed.

    Args:
        project: the configuration.
        offline: its offline store.
    """

    def __init__(self, project: Project, offline: OfflineStore) -> None:
        self._offline, self._schedules = offline, project.schedules()
        self._cached: dict[str, tuple[int, list[Report]]] = {}

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
            schedule = self._schedules[view]
            parents = {
                name: self._parent(name, now, running, decisions) for name in schedule.parents
            }
            reports, goes_on = self.reports(view)
            facts = Facts(reports, view in running or goes_on, *self._settled(view), parents)
            decisions[view] = decide(view, schedule, facts, now)
        return decisions[view]

    def _parent(
        self, name: str, now: datetime, running: Collection[str], decisions: dict[str, Decision]
    ) -> Parent:
        live = self._offline.view(name).log.live()
        self.decision(name, now, running, decisions)
        at = None if live is None else parsed_time(live.at)
        return Parent(
            0 if live is None else live.epoch,
            now if at is None else at,
            self._pending(name, decisions),
        )

    def _pending(self, name: str, decisions: Mapping[str, Decision]) -> bool:
        """Whether it runs, or will: by itself, or after one that does."""
        return decisions[name].state != "idle" or any(
            self._pending(parent, decisions) for parent in self._schedules[name].parents
        )

    def reports(self, view: str) -> tuple[list[Report], bool]:
        """A view's newest reports, dead runs' as ``killed``; and whether a run goes on that is no
        part of a backfill.

        Raises:
            SnapshotError: a lease is damaged or cannot be read.
        """
        reports, dead = self._look(view)
        reports = [replace(r, status="killed") if r.run in dead else r for r in reports]
        goes_on = any(
            r.status == "running" and r.command not in PUBLISHING and not r.backfill
            for r in reports
        )
        return reports, goes_on or self._offline.view(view).running()

    def dead(self, view: str) -> set[str | None]:
        """Partitions (None: of a view that has none) of the runs that say they go on, though they
        do not.

        Raises:
            SnapshotError: a lease is damaged or cannot be read.
        """
        reports, dead = self._look(view)
        return {r.partition for r in reports if r.run in dead}

    def _look(self, view: str) -> tuple[list[Report], set[str]]:
        reports = self._read(view)
        silent = self._silent(view, reports)
        # One that has ended since the reading wrote so before it released its lease.
        if silent:
            reports = self._read(view, fresh=True)
            silent &= self._silent(view, reports)
        return reports, silent

    def _silent(self, view: str, reports: Sequence[Report]) -> set[str]:
        """Runs whose reports say that they go on, though no process holds their lease. Publishing
        alone holds another one, and is left out."""
        return {
            r.run
            for r in reports
            if r.status == "running"
            and r.command not in PUBLISHING
            and not self._offline.view(view).running(r.partition)
        }

    def _read(self, view: str, fresh: bool = False) -> list[Report]:
        runs = self._offline.view(view).runs
        changed_ns = storage_of(runs.folder).changed_ns(runs.folder)
        if changed_ns is None:
            return []
        if fresh or view not in self._cached or self._cached[view][0] != changed_ns:
            reports = runs.reports(REPORTS)
            # A second change within one step of the file system's clock does not show: what is that
            # new is read once more.
            settled = time.time_ns() - changed_ns > 1_000_000_000
            self._cached[view] = (changed_ns if settled else -1, reports)
        return self._cached[view][1]

    def seen(self, view: str) -> bool:
        """Whether a scheduler saw the view's present schedule."""
        return self._settled(view)[0] is not None

    def _settled(self, view: str) -> tuple[datetime | None, frozenset[str]]:
        """Up to when a view's times are settled, and which runs for later ones count no more; None
        and none of a schedule that no scheduler saw before."""
        schedule = self._schedules[view]
        path = self._offline.view(view).leases / "schedule.json"
        try:
            settled = read_record(_Settled, storage_of(path).read(path), path)
            if (settled.when, settled.timezone) == (schedule.when, schedule.timezone):
                return parsed_time(settled.since), frozenset(settled.ignored)
        except FileNotFoundError:
            pass
        except ValueError as exc:
            log.warning("%s is damaged (%s); the schedule of %r begins again", path, exc, view)
        return None, frozenset()

    def settle(self, view: str, since: datetime, ignored: Collection[str] | None = None) -> None:
        """Write down that the times up to ``since`` are settled, and which runs count no more
        (None: as before); for a view that runs after others, that this one is settled.

        Raises:
            SnapshotError: the file system failed.
        """
        schedule = self._schedules[view]
        path = self._offline.view(view).leases / "schedule.json"
        settled = _Settled(
            schedule.when,
            schedule.timezone,
            since.isoformat(),
            tuple(sorted(self._settled(view)[1] if ignored is None else ignored)),
        )
        try:
            storage_of(path).write(path, sealed(settled))
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc, "nothing was started")) from exc


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
    been due for more than :data:`LATE_S`; when the last scheduler that acted is gone; when none
    ever did, and a time of a cron line went by since the view's last run; and when the one that
    acts was started with another schedule.

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
    if overdue:
        assert decision.due is not None
        return Outlook(
            due,
            reason,
            f"due since {_local(decision.due, schedule)} and not begun"
            + ("" if up else ": no scheduler is up"),
        )
    if not up and holder(leases, LEADER) is not None:
        return Outlook(due, reason, "scheduled, and no scheduler is up")
    if schedule.cron is not None and not ledger.seen(view):
        if up:
            return Outlook(
                due, reason, "the scheduler that is up does not know its schedule: restart it"
            )
        missed = _missed(schedule, ledger.reports(view)[0], now)
        if missed is not None:
            return Outlook(
                due,
                reason,
                f"due since {_local(missed, schedule)} and not begun: no scheduler was ever up",
            )
    return Outlook(due, reason)


def _missed(schedule: Schedule, reports: Sequence[Report], now: datetime) -> datetime | None:
    """The last fire time of a cron line since the view's last run, if that is more than
    :data:`LATE_S` ago."""
    assert schedule.cron is not None
    began = [at for r in reports if (at := parsed_time(r.started_at)) is not None and at <= now]
    first = (
        None
        if not began
        else next(fire_times(schedule.cron, schedule.timezone, max(began), now), None)
    )
    if first is None or now - first <= timedelta(seconds=LATE_S):
        return None
    return last_fire(schedule.cron, schedule.timezone, first, now) or first
