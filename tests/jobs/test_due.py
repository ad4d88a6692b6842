"""What is due, from plain facts; and over any history of stops, failures and jumps of the clock,
against a plain reading of the rules."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import precompute.jobs.schedule.due as due_module
from benchmarks.schedule_clock import wrong_times
from precompute.jobs.config.schedule import CatchUp, Schedule, fire_times
from precompute.jobs.schedule.due import (
    JITTER,
    REPORTS,
    Attempt,
    Decision,
    Facts,
    Ledger,
    Parent,
    ahead_after,
    decide,
    retry_wait_s,
)
from precompute.store.disk.lease import take
from precompute.store.disk.record import replace as replace_record
from precompute.store.offline.log import run_lease
from precompute.store.offline.runs import Report, Runs
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import containing
from tests.fixtures import MakeProject

DAILY = Schedule("0 2 * * *", "0 2 * * *", "UTC", (), "latest", 3, 60.0, 3600.0)
AFTER = Schedule("after a, b", None, "UTC", ("a", "b"), "latest", 3, 60.0, 3600.0)


def at(day: int, hour: int = 2, minute: int = 0, second: float = 0.0) -> datetime:
    """A time in January 2026."""
    return datetime(2026, 1, 1, hour, minute, tzinfo=UTC) + timedelta(days=day - 1, seconds=second)


def report(
    status: str, due: datetime | None = None, began: datetime | None = None, **more: Any
) -> Report:
    """A run that took ten seconds, begun at its due time by default."""
    began = began or due
    assert began is not None
    ended, text = began + timedelta(seconds=10), None if due is None else due.isoformat()
    times = began.isoformat(), ended.isoformat()
    made = Report(f"{began:%Y%m%dT%H%M%S}", "v", "run", status, *times, due=text)
    return replace_record(made, **more)


def known(*reports: Report, **facts: Any) -> Facts:
    """What a scheduler knows of these runs, the newest first."""
    return Facts([one for one in map(Attempt.of, reports) if one is not None], **facts)


def decided(
    schedule: Schedule, now: datetime, *reports: Report, **facts: Any
) -> tuple[str, datetime | None]:
    decision = decide("v", schedule, known(*reports, **facts), now)
    return decision.state, decision.due


@dataclass
class World:
    """A scheduler that may be down, whose clock may jump, over runs that may fail."""

    schedule: Schedule
    now: datetime = field(default_factory=lambda: at(1, 0, 0, 30))
    since: datetime | None = None
    reports: list[Report] = field(default_factory=list)
    ran: list[datetime] = field(default_factory=list)
    """Times that were run for with success, in order."""

    def tick(self, fails: bool) -> None:
        """One look, and the run it starts, which takes no time."""
        if self.since is None or self.since > self.now:
            self.since = self.now
        limit = ahead_after(self.schedule, self.now)
        assert limit is not None
        self.reports = [
            replace_record(one, ahead=one.ahead or datetime.fromisoformat(one.due or "") > limit)
            for one in self.reports
        ]
        facts = known(*self.reports[:50], since=self.since)
        decision = decide("v", self.schedule, facts, self.now)
        assert (
            decision.at is None
            or decision.state != "retry"
            or decision.at <= self.now + timedelta(seconds=1000)
        )
        if decision.state == "run":
            assert decision.due is not None
            assert decision.due <= self.now
            status, ended = "failed" if fails else "published", self.now.isoformat()
            more = {"run": f"{len(self.reports)}", "finished_at": ended}
            self.reports.insert(0, report(status, decision.due, self.now, **more))
            if not fails:
                self.ran.append(decision.due)


# ---- by the clock


ALL, NONE = replace(DAILY, catch_up="all"), replace(DAILY, catch_up="none")
FAILED = report("failed", at(6))
SINCE = at(5, 12)
YESTERDAY, LAST_YEAR, DECEMBER = (
    str(containing(by, when)) for by, when in (("day", at(5)), ("day", at(-5)), ("month", at(-5)))
)


def test_a_new_line_does_not_run_for_the_past_but_from_now_on() -> None:
    decision = decide("v", DAILY, Facts(), SINCE)
    assert decision == Decision("idle", "next at 2026-01-06 02:00+00:00", None, at(6))
    assert decided(DAILY, at(6, 1, 59, 59), since=SINCE) == ("idle", None)
    assert decided(DAILY, at(6), since=SINCE) == ("run", at(6))


@pytest.mark.parametrize(
    ("catch_up", "due"), [("latest", [at(9)]), ("all", [at(6), at(7), at(8), at(9)]), ("none", [])]
)
def test_missed_times_are_caught_up_on_by_policy(catch_up: CatchUp, due: list[datetime]) -> None:
    world = World(replace(DAILY, catch_up=catch_up), at(9, 12), SINCE)
    for _ in range(5):
        world.tick(fails=False)
        world.now += timedelta(minutes=1)
    assert world.ran == due


@pytest.mark.parametrize(
    ("late_s", "reports", "state"),
    [(0, [], "run"), (60, [], "run"), (61, [], "idle"), (300, [FAILED], "run")],
)
def test_without_catching_up_a_run_begins_within_a_minute_or_not_at_all(
    late_s: float, reports: list[Report], state: str
) -> None:
    decision = decide("v", NONE, known(*reports, since=SINCE), at(6, second=late_s))
    assert (decision.state, "was missed" in decision.reason) == (state, state == "idle")


@pytest.mark.parametrize(
    ("status", "ends"),
    [
        *((status, "") for status in ("published", "committed", "current")),
        *(
            (status, f"; 2026-01-06 02:00+00:00 was given up: {status}")
            for status in ("refused", "rejected", "cancelled")
        ),
    ],
)
def test_a_time_that_was_run_for_or_would_end_in_the_same_way_is_settled(
    status: str, ends: str
) -> None:
    for schedule in (DAILY, ALL, NONE):
        decision = decide("v", schedule, known(report(status, at(6)), since=SINCE), at(6, 3))
        reason = f"next at 2026-01-07 02:00+00:00{ends}"
        assert decision == Decision("idle", reason, None, at(7))


@pytest.mark.parametrize(
    ("by_hand", "state"),
    [
        (report("published", began=at(6, 2, 30)), "idle"),
        (report("current", began=at(6)), "idle"),
        (report("published", began=at(6, 2, 30), partition=YESTERDAY), "idle"),
        (report("published", began=at(6, 2, 30), partition=LAST_YEAR), "run"),  # not the latest
        (report("published", began=at(6, 2, 30), partition=DECEMBER), "idle"),
        (report("published", began=at(6, 1, 59)), "run"),  # it read the source before
        (report("failed", began=at(6, 2, 30)), "run"),
        (report("committed", began=at(6, 2, 30), command="materialize"), "run"),
        (report("published", began=at(6, 2, 30), backfill="b"), "run"),
        (report("published", began=at(6, 4)), "run"),  # from the future: the clock was wrong then
    ],
)
def test_a_run_by_hand_after_the_time_does_for_the_latest(by_hand: Report, state: str) -> None:
    assert decided(DAILY, at(6, 3), by_hand, since=SINCE)[0] == state
    assert decided(DAILY, at(6, 3), by_hand, FAILED, since=SINCE)[0] == state
    assert decided(ALL, at(6, 3), by_hand, since=SINCE) == ("run", at(6))


def test_a_run_that_fails_is_tried_again_ever_later_and_then_given_up() -> None:
    reports, began, waits = list[Report](), at(6), list[float]()
    for failures in (1, 2, 3):
        reports.insert(0, report("killed" if failures == 2 else "failed", at(6), began=began))
        ended = began + timedelta(seconds=10)
        waiting = decide("v", DAILY, known(*reports, since=SINCE), ended)
        assert (waiting.state, waiting.due) == ("retry", at(6))
        assert waiting.at is not None
        assert f"retry {failures} of 3 at" in waiting.reason
        just_before = waiting.at - timedelta(milliseconds=1)
        assert decided(DAILY, just_before, *reports, since=SINCE) == ("retry", at(6))
        assert decided(DAILY, waiting.at, *reports, since=SINCE) == ("run", at(6))
        waits.append((waiting.at - ended).total_seconds())
        began = waiting.at
    for wait, plain in zip(waits, (60, 120, 240), strict=True):
        assert plain * (1 - JITTER) <= wait <= plain * (1 + JITTER)
    assert len({retry_wait_s(f"v{n}", DAILY, at(6), 1) for n in range(100)}) == 100
    reports.insert(0, report("failed", at(6), began=began))
    gave_up = "2026-01-06 02:00+00:00 was given up: failed 4 times"
    for now in (began, at(6, 23)):
        decision = decide("v", DAILY, known(*reports, since=SINCE), now)
        reason = f"next at 2026-01-07 02:00+00:00; {gave_up}"
        assert decision == Decision("idle", reason, None, at(7))
    assert decided(DAILY, at(7), *reports, since=SINCE) == ("run", at(7))


def test_a_newer_time_takes_the_place_of_a_retry_unless_all_are_wanted() -> None:
    failed, now, since = report("failed", at(6, 23, 59)), at(7, 0, 0, 30), at(6, 23, 58)
    schedule = replace(DAILY, when="* * * * *", cron="* * * * *", retry_after_s=3600.0)
    assert decided(schedule, now, failed, since=since) == ("run", at(7, 0))
    every = replace(schedule, catch_up="all")
    assert decided(every, now, failed, since=since) == ("retry", at(6, 23, 59))


def test_while_a_view_runs_nothing_is_decided() -> None:
    decision = decide("v", DAILY, Facts(running=True, since=SINCE), at(6, 3))
    assert decision == Decision("running", "runs now", None, at(7))


def test_a_run_counts_for_its_time_unless_a_wrong_clock_made_it() -> None:
    """Set back by an hour, a fixed hour comes once; by a day its times come again."""
    ran = report("published", at(6))
    idle = Decision("idle", "next at 2026-01-07 02:00+00:00", None, at(7))
    for now in (at(6, 1), at(6), at(6, 3)):
        assert decide("v", DAILY, known(ran, since=SINCE), now) == idle
    wrong = replace_record(ran, ahead=True)
    assert decided(DAILY, at(6), wrong, since=SINCE) == ("run", at(6))
    often = replace(DAILY, when="*/5 * * * *", cron="*/5 * * * *")
    for line, ahead in ((DAILY, timedelta(hours=3)), (often, timedelta(seconds=90))):
        assert ahead_after(line, at(6)) == at(6) + ahead
    assert ahead_after(AFTER, at(6)) is None


def refused(config: str, due: datetime | None = None, **more: Any) -> Report:
    return report("refused", due or at(6), config=config, error="project.yaml:3: torn", **more)


def test_what_could_not_be_read_is_run_for_once_the_files_are_others() -> None:
    why = "due since 2026-01-06 02:00+00:00, its configuration cannot be used: project.yaml:3: torn"
    for line in (DAILY, ALL, NONE):
        facts = known(refused("a"), since=SINCE, config="a")
        waits = Decision("refused", f"{why}; it runs once the project's files change", at(6), at(7))
        assert decide("v", line, facts, at(6, 5)) == waits
        assert decided(line, at(6, 5), refused("a"), since=SINCE, config="b") == ("run", at(6))
        # it fails then, for another reason
        tried = report("failed", at(6), at(6, 5)), refused("a")
        assert decided(line, at(6, 5, 0, 20), *tried, since=SINCE, config="b") == ("retry", at(6))
        later = decided(line, at(7), refused("a"), since=SINCE, config="a")
        assert later == (("refused", at(6)) if line is ALL else ("run", at(7)))
    told = ran_with("refused", 3, 5, at(6), began=at(6))
    told = replace_record(told, config="a", error="views/a.yaml: torn")
    for config, state in (("a", "refused"), ("b", "run")):
        assert decided(AFTER, at(9), told, OLD, parents=parents(3, 5), config=config) == (
            state,
            at(6),
        )


def test_a_run_that_ended_in_the_future_or_at_no_time_is_not_waited_for() -> None:
    for one in (report("failed", at(6), at(6, 9)), report("failed", at(6), finished_at="")):
        assert decided(DAILY, at(6, 3), one, since=SINCE) == ("run", at(6))


# ---- any history


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["up", "up", "up", "down", "jump"]),
        st.integers(-60, 60),  # minutes of a jump
        st.integers(1, 200),  # minutes of the rest
        st.booleans(),  # the first run fails
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("catch_up", ["latest", "all"])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(line=st.sampled_from(["*/7 * * * *", "30 * * * *", "15 */3 * * *"]), steps=STEPS)
def test_each_time_is_run_for_as_often_as_the_clock_passes_it(
    catch_up: CatchUp, line: str, steps: list[tuple[str, int, int, bool]]
) -> None:
    """``all``: every time since the line was first seen. ``latest``: the last one, and none more
    often than it was passed; a fixed hour that was passed again within three hours is not run for
    again."""
    world = World(
        replace(DAILY, when=line, cron=line, catch_up=catch_up, retries=20, retry_after_s=0.5)
    )
    world.tick(fails=False)
    seen, passed, reached = world.now, Counter[datetime](), world.now
    for what, jump, minutes, fails in [*steps, ("up", 0, 61, False), ("up", 0, 61, False)]:
        before = world.now
        if what == "jump":
            world.now += timedelta(minutes=jump)
            # what a jump forward passes was passed before, where one back came first
            passed.update(fire_times(line, "UTC", before, world.now))
        for minute in range(minutes):
            if what != "down":
                for attempt in range(40):  # each tick of the minute that could matter
                    before_runs = len(world.reports)
                    world.tick(fails=fails and attempt == 0 and minute == 0)
                    if len(world.reports) == before_runs:
                        break
                reached = max(reached, world.now)
            passed.update(fire_times(line, "UTC", world.now, world.now + timedelta(minutes=1)))
            world.now += timedelta(minutes=1)
    expected = list(fire_times(line, "UTC", seen, reached))
    assert not Counter(world.ran) - passed, "no time was run for more often than it was passed"
    assert set(world.ran) <= set(passed)
    if catch_up == "all":
        assert set(world.ran) >= set(expected)
    elif expected and world.now > reached:
        assert max(world.ran) >= expected[-1]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Santiago"])
def test_no_time_is_missed_doubled_or_failed_by_a_clock_that_jumps(zone: str) -> None:
    jumps = ["none", "-1 min", "-1 h", "-23 h", "+3 d"]
    assert wrong_times([zone], ["30 2 * * *", "0 0 * * *", "0 */2 * * *"], jumps) == (120, 0)


# ---- after others


def parents(
    a: int = 1, b: int = 1, *, moved: datetime | None = None, pending: str = ""
) -> dict[str, Parent]:
    return {"a": Parent(a, moved or at(6), "a" in pending), "b": Parent(b, at(5), "b" in pending)}


def ran_with(
    status: str, a: int, b: int, due: datetime | None = None, began: datetime | None = None
) -> Report:
    return report(status, due, began=began or due or at(4), parents={"a": a, "b": b})


OLD = ran_with("published", 2, 5)


@pytest.mark.parametrize(
    ("reports", "facts", "due"),
    [
        # first when all are live, then when one has another live snapshot
        ([], {"parents": parents(1, 0)}, None),
        ([], {"parents": parents(1, 1)}, at(6)),
        ([OLD], {"parents": parents(2, 5)}, None),
        ([OLD], {"parents": parents(2, 6)}, at(6)),
        ([OLD], {"parents": parents(2, 0)}, None),
        ([OLD], {"parents": parents(3, 0)}, at(6)),
        # by the highest epoch it ran with, whatever the clock said
        ([OLD, ran_with("current", 3, 6)], {"parents": parents(3, 6)}, None),
        # only a whole run of the view counts
        *(
            (
                [OLD, replace_record(ran_with("published", 3, 5), **more)],
                {"parents": parents(3, 5)},
                at(6),
            )
            for more in (
                {"command": "publish"},
                {"command": "materialize"},
                {"backfill": "x"},
                {"status": "failed"},
                {"partition": LAST_YEAR},
            )
        ),
        # what would end in the same way is not tried again, with the next snapshot it is
        *(
            ([ran_with(status, 3, 5, at(6))], {"parents": parents(a, 5)}, due)
            for status in ("refused", "rejected", "cancelled")
            for a, due in ((3, None), (4, at(6)))
        ),
        # a run by hand that failed is no attempt of the schedule
        ([ran_with("failed", 3, 5)] * 9, {"parents": parents(3, 5)}, at(6)),
    ],
)
def test_what_is_due_after_others(
    reports: list[Report], facts: dict[str, Any], due: datetime | None
) -> None:
    decision = decide("v", AFTER, known(*reports, **facts), at(9))
    assert (decision.state, decision.due) == ("idle" if due is None else "run", due)
    assert decision.epochs == {name: parent.epoch for name, parent in facts["parents"].items()}


def test_a_parent_that_will_come_soon_and_a_run_are_waited_for() -> None:
    for pending, running, decision in (
        ("b", False, ("idle", "after a, b: waits for b")),
        ("ab", False, ("idle", "after a, b: waits for a, b")),
        ("", True, ("running", "runs now")),
    ):
        above = parents(3, 5, pending=pending)
        found = decide("v", AFTER, known(OLD, running=running, parents=above), at(6, 3))
        assert (found.state, found.reason) == decision


def test_a_view_after_others_is_retried_until_given_up_or_a_parent_moves() -> None:
    failures = [ran_with("failed", 3, 5, at(6), began=at(6, 2, n)) for n in range(4)][::-1]
    for n in (1, 2, 3):
        reports = [*failures[-n:], OLD]
        waiting = decide("v", AFTER, known(*reports, parents=parents(3, 5)), at(6, 2, n - 1, 10))
        assert waiting.state == "retry"
        assert waiting.at is not None
        assert decided(AFTER, waiting.at, *reports, parents=parents(3, 5)) == ("run", at(6))
    done = decide("v", AFTER, known(*failures, OLD, parents=parents(3, 5)), at(9))
    gave_up = "was given up: failed 4 times; runs again after the next snapshot of a or b"
    assert (done.state, done.at, done.reason) == ("idle", None, f"after a, b: {gave_up}")
    for above, due in ((parents(3, 6), at(6)), (parents(4, 5, moved=at(9)), at(9))):
        assert decided(AFTER, at(9), *failures, OLD, parents=above) == ("run", due)


# ---- what the store tells


OTHER: dict[str, Any] = {
    "entity": ["id"],
    "source": {"sql": "SELECT 1 AS id, 1.0 AS x"},
    "model": {"use": "tests.models:Doubler"},
    "features": {"double": {"dtype": "float64"}},
    "ttl": "1h",
}


def test_a_view_waits_for_what_its_parents_wait_for(make_project: MakeProject) -> None:
    schedule = {"numbers": "0 2 * * *", "b": "after numbers", "c": "0 0 1 1 *", "d": "after b, c"}
    project = make_project(
        [(1, 1.0)], project={"schedule": schedule}, views=dict.fromkeys("bcd", OTHER)
    )
    now = at(6, 12)
    for view in schedule:
        project.run(view)
    project.run("c", full=True)
    ledger = Ledger(project, project.offline)
    assert ledger.decision("d", now).state == "run"
    assert ledger.decision("d", now, {"numbers"}).reason == "after b, c: waits for b"
    assert ledger.decision("d", now, {"d"}).state == "running"


def test_when_a_line_was_seen_first_is_of_the_line_and_its_zone(
    make_project: MakeProject,
) -> None:
    def project(line: str, timezone: str = "UTC") -> Ledger:
        made = make_project(
            [(1, 1.0)], project={"schedule": {"numbers": line}, "timezone": timezone}
        )
        return Ledger(made, OfflineStore(made.root))

    ledger = project("0 2 * * *")
    ledger.see("numbers", at(5, 12))
    assert project("0 2 * * *").decision("numbers", at(6, 3)).due == at(6)
    for other in (project("0 1 * * *"), project("0 2 * * *", "Europe/Berlin")):
        assert other.decision("numbers", at(6, 3)).state == "idle"
    path = make_project().root / "numbers" / "notes" / "schedule.json"
    for text in (
        "",
        "{torn",
        "[]",
        "{}",
        '"x"',
        json.dumps({"when": "0 2 * * *", "timezone": "UTC", "since": "?"}),
    ):
        path.write_text(text)
        assert project("0 2 * * *").decision("numbers", at(6, 3)).state == "idle", text


@pytest.fixture
def ledger(make_project: MakeProject) -> Ledger:
    """Of a project with the daily line."""
    project = make_project([(1, 1.0)], project={"schedule": {"numbers": DAILY.when}})
    made = Ledger(project, project.offline)
    made.see("numbers", SINCE)
    return made


def test_a_run_whose_lease_nobody_holds_is_a_killed_one_and_counts_as_that(
    ledger: Ledger, make_project: MakeProject
) -> None:
    store = make_project().store
    with take(store.leases, run_lease(None), "one that has no report yet"):
        assert ledger.decision("numbers", at(6)).state == "running"
    store.runs.write(report("running", at(6), run="1", finished_at=""))
    with take(store.leases, run_lease(None), "a test"):
        assert ledger.decision("numbers", at(6)).state == "running"
        assert not any(ledger.left("numbers"))
    assert ledger.decision("numbers", at(6)).state == "retry"
    assert ledger.decision("numbers", at(6, 3)).state == "run"
    assert [one.run for one in ledger.left("numbers").dead] == ["1"]


def test_a_run_that_ends_between_two_looks_is_no_killed_one(
    ledger: Ledger, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_project().store
    store.runs.write(report("running", at(6), run="1"))

    def ended(self: ViewStore, partition: str | None = None) -> bool:
        store.runs.write(report("published", at(6), run="1"))
        return False

    monkeypatch.setattr(ViewStore, "running", ended)
    idle = Decision("idle", "next at 2026-01-07 02:00+00:00", None, at(7))
    assert ledger.decision("numbers", at(6)) == idle


def test_a_backfill_or_publish_holds_no_run_up_and_a_partitions_run_does(
    ledger: Ledger, make_project: MakeProject
) -> None:
    store = make_project().store
    part = "2026-01-01T00:00Z/2026-01-02T00:00Z"
    running = report("running", began=at(6), run="1", partition=part)
    with take(store.leases, run_lease(part), "a test"):
        for more, state in (
            ({"backfill": "b"}, "run"),
            ({"command": "publish", "partition": None}, "run"),
            ({}, "running"),
        ):
            store.runs.write(replace_record(running, **more))
            assert ledger.decision("numbers", at(6, 3)).state == state
            assert not any(ledger.left("numbers"))


def test_a_report_is_read_again_only_when_it_is_another(
    ledger: Ledger, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reads, read = make_project().store, list[str](), Runs.read

    def counted(self: Runs, run: str) -> Report:
        reads.append(run)
        return read(self, run)

    def runs() -> list[tuple[str, datetime | None]]:
        attempts, running = ledger.attempts("numbers")
        assert not running
        return [(one.run, one.due) for one in attempts]

    monkeypatch.setattr(Runs, "read", counted)
    first, second = (report("failed", at(day), run="1") for day in (6, 7))
    store.runs.write(first)
    assert runs() == [("1", at(6))]
    path, folder = store.runs.path("1"), store.runs.folder
    same_ns = path.stat().st_mtime_ns, folder.stat().st_mtime_ns
    store.runs.write(second)
    for file, ns in zip((path, folder), same_ns, strict=True):
        os.utime(file, ns=(ns, ns))  # within the same step of its clock
    assert runs() == [("1", at(7))]
    for file in (path, folder):
        os.utime(file, (1e9, 1e9))
    reads.clear()
    assert [runs() for _ in range(3)] == [[("1", at(7))]] * 3
    assert len(reads) == 1
    store.runs.write(replace_record(first, run="2"))
    assert runs() == [("2", at(6)), ("1", at(7))]
    assert reads == ["1", "2"]


def test_a_backfill_hides_no_run_of_the_schedule(ledger: Ledger, make_project: MakeProject) -> None:
    store = make_project().store
    store.runs.write(report("published", at(6), run="1"))
    for number in range(REPORTS + 5):
        store.runs.write(report("committed", began=at(6, 3), run=f"2-{number:03d}", backfill="b"))
    assert ledger.decision("numbers", at(6, 4)).state == "idle"


def test_a_decision_stands_until_a_report_its_time_or_the_clock_ends_it(
    ledger: Ledger, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, decided_at = make_project().store, list[datetime]()

    def counted(view: str, schedule: Schedule, facts: Facts, now: datetime) -> Decision:
        decided_at.append(now)
        return decide(view, schedule, facts, now)

    monkeypatch.setattr(due_module, "decide", counted)

    def decisions(*times: datetime) -> list[datetime]:
        decided_at.clear()
        for now in times:
            ledger.decision("numbers", now)
        return decided_at

    store.runs.write(report("published", at(6), run="1"))
    os.utime(store.runs.folder, (1e9, 1e9))
    assert decisions(at(6, 3), at(6, 4), at(7, 1)) == [at(6, 3)]
    assert decisions(at(7), at(7)) == [at(7)] * 2  # what is due is looked at until it has begun
    store.runs.write(report("published", at(7), run="2"))
    os.utime(store.runs.folder, (2e9, 2e9))
    assert decisions(at(7, 3), at(7, 4), at(6, 3), at(6, 4)) == [at(7, 3), at(6, 3), at(6, 4)]
    # until the scheduler that acts has marked that one
    assert [one.run for one in ledger.left("numbers").ahead] == ["2"]
