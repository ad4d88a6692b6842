"""Which times ``due.decide`` runs for while the clock jumps: 8 days around both changes of daylight
saving time in four zones, 6 lines, 8 jumps, each left so or set right five hours later. Counted are
times that are missed, run for twice or failed falsely, against a plain reading of the rules; runs
take no time. The fixed hours of an undisturbed week come once a day, its quarter hours each.

    python -m benchmarks.schedule_clock
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

from benchmarks.common import report
from precompute.jobs.config.schedule import Schedule, fire_times
from precompute.jobs.schedule.due import REPORTS, Attempt, Facts, ahead_after, decide

CHANGES = {
    "Europe/Berlin": ("2026-03-29", "2026-10-25"),
    "America/New_York": ("2026-03-08", "2026-11-01"),
    "Australia/Lord_Howe": ("2026-04-05", "2026-10-04"),
    "America/Santiago": ("2026-04-05", "2026-09-06"),
}
LINES = ("0 2 * * *", "30 2 * * *", "0 0 * * *", "*/15 * * * *", "0 */2 * * *", "30 * * * *")
JUMPS = {
    "none": timedelta(),
    "-1 min": timedelta(minutes=-1),
    "-1 h": timedelta(hours=-1),
    "-23 h": timedelta(hours=-23),
    "-3 d": timedelta(days=-3),
    "+1 h": timedelta(hours=1),
    "+3 d": timedelta(days=3),
    "+1 y": timedelta(days=365),
}
LONG, RIGHT_AFTER = timedelta(days=8), timedelta(hours=5)


class Stretch(NamedTuple):
    """What a clock shows from a time on, for so long."""

    begins: datetime
    lasts: timedelta

    @property
    def ends(self) -> datetime:
        """The last that it shows; not included."""
        return self.begins + self.lasts


def schedule_of(line: str, zone: str) -> Schedule:
    """A cron line with the usual options."""
    return Schedule(line, line, zone, (), "latest", 3, 60.0, 3600.0)


def stretches(begins: datetime, at: timedelta, jump: timedelta, right: bool) -> list[Stretch]:
    """A week and a day whose clock jumps ``at`` a time, and is set right later where it is to."""
    lasts = [at, RIGHT_AFTER, LONG - at - RIGHT_AFTER]
    true = [begins, begins + at, begins + at + RIGHT_AFTER]
    moved = [timedelta(), jump, timedelta() if right else jump]
    return [Stretch(t + m, last) for t, m, last in zip(true, moved, lasts, strict=True)]


@dataclass
class Scheduler:
    """One that is always up, over runs that take no time and do well."""

    schedule: Schedule
    since: datetime
    attempts: list[Attempt] = field(default_factory=list)
    ran: list[tuple[datetime, datetime]] = field(default_factory=list)
    """For which time, and when by the clock."""
    false_failures: int = 0

    def run_through(self, stretch: Stretch) -> None:
        """Look at each time that matters, and begin what is due."""
        now = stretch.begins
        self.since = min(self.since, now)
        while now < stretch.ends:
            limit = ahead_after(self.schedule, now)
            assert limit is not None
            if any(one.due > limit for one in self.attempts if one.due and not one.ahead):
                self.attempts = [
                    one._replace(ahead=one.ahead or (one.due or now) > limit)
                    for one in self.attempts
                ]
            decision = decide("v", self.schedule, Facts(self._newest(), since=self.since), now)
            if decision.state == "run" and decision.due is not None:
                self._run(decision.due, now)
                continue
            if decision.at is None:
                return
            now = decision.at

    def _newest(self) -> list[Attempt]:
        """Those that a scheduler looks at."""
        counted = itertools.accumulate(not one.ahead for one in self.attempts)
        return [
            one
            for one, n in zip(self.attempts, counted, strict=True)
            if n - (not one.ahead) < REPORTS
        ]

    def _run(self, due: datetime, now: datetime) -> None:
        """As a run does: not for a time that is done already."""
        self.false_failures += any(one.due == due and not one.ahead for one in self.attempts)
        one = Attempt(
            str(len(self.ran)), "run", "published", due, now, now, None, {}, False, False, None, ""
        )
        self.attempts.insert(0, one)
        self.ran.append((due, now))


def expected(schedule: Schedule, path: Sequence[Stretch]) -> Iterator[tuple[datetime, datetime]]:
    """For which times runs are to begin, and when by the clock: each that the clock comes to, but
    what was run for; and where it jumps over some the last of them."""
    assert schedule.cron is not None
    done, since = set[datetime](), path[0].begins
    for stretch in path:
        limit, since = ahead_after(schedule, stretch.begins), min(since, stretch.begins)
        assert limit is not None
        done = {due for due in done if due <= limit}
        before = max(since, stretch.begins - timedelta(days=2))
        passed = list(fire_times(schedule.cron, schedule.timezone, before, stretch.begins))
        last = stretch.ends - timedelta(microseconds=1)
        to_come = fire_times(schedule.cron, schedule.timezone, stretch.begins, last)
        for due in itertools.chain(passed[-1:], to_come):
            if due not in done:
                done.add(due)
                yield due, max(due, stretch.begins)


def played(schedule: Schedule, path: Sequence[Stretch]) -> tuple[int, Scheduler]:
    """How many times were missed, doubled or failed falsely; and the scheduler."""
    scheduler = Scheduler(schedule, path[0].begins)
    for stretch in path:
        scheduler.run_through(stretch)
    ran, want = Counter(scheduler.ran), Counter(expected(schedule, path))
    return ((ran - want) + (want - ran)).total() + scheduler.false_failures, scheduler


def undisturbed(schedule: Schedule, scheduler: Scheduler) -> int:
    """Days on which a fixed hour did not come once; steps of quarter hours that are another."""
    zone, times = ZoneInfo(schedule.timezone), [now for _, now in scheduler.ran]
    if schedule.when.startswith("*/15"):
        return sum(b - a != timedelta(minutes=15) for a, b in itertools.pairwise(times))
    if "*" in schedule.when.split()[1]:
        return 0
    days = Counter(now.astimezone(zone).date() for now in times)
    first, last = min(days), max(days)
    whole = [first + timedelta(days=n) for n in range(1, (last - first).days)]
    return sum(days[day] != 1 for day in whole)


def wrong_times(
    zones: Sequence[str] = tuple(CHANGES),
    lines: Sequence[str] = LINES,
    jumps: Sequence[str] = tuple(JUMPS),
) -> tuple[int, int]:
    """How many weeks were played, and how many times were wrong in them."""
    weeks = wrong = 0
    for zone, line in itertools.product(zones, lines):
        schedule = schedule_of(line, zone)
        for day in CHANGES[zone]:
            noon = datetime.fromisoformat(day).replace(hour=12, tzinfo=ZoneInfo(zone))
            begins = noon.astimezone(UTC) - timedelta(days=4)
            for jump, right, hours in itertools.product(jumps, (False, True), (86, 110)):
                path = stretches(begins, timedelta(hours=hours, minutes=37), JUMPS[jump], right)
                found, scheduler = played(schedule, path)
                found += undisturbed(schedule, scheduler) if jump == "none" else 0
                weeks, wrong = weeks + 1, wrong + found
    return weeks, wrong


def main() -> None:
    """Play all, and report."""
    weeks, wrong = wrong_times()
    line = f"{wrong} times missed, doubled or falsely failed in {weeks:,} weeks"
    report("schedule_clock", [line], {"weeks": weeks, "wrong": wrong})


if __name__ == "__main__":
    main()
