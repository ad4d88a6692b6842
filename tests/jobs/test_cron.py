"""Cron lines have crontab(5)'s meaning: held against a plain reading of that page, minute by
minute."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precompute.jobs.config import schedule
from precompute.jobs.config.schedule import check_cron, last_fire

START = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]


def fire_times(line: str, timezone: str = "UTC", start: datetime = START) -> Iterator[datetime]:
    """When the line fires after ``start``, without end."""
    return schedule.fire_times(line, timezone, start)


def _values(field: str, low: int, high: int, names: list[str], first_name: int) -> set[int]:
    """The numbers a field of crontab(5) stands for: lists of ``*``, ``a`` or ``a-b``, each perhaps
    with ``/step``."""
    found: set[int] = set()
    for part in field.lower().split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        numbers = [
            names.index(text) + first_name if text in names else int(text)
            for text in (first, last)
            if text not in ("", "*")
        ]
        start, end = (
            (low, high) if first == "*" else (numbers[0], numbers[-1] if last or not step else high)
        )
        found.update(range(start, end + 1, int(step or 1)))
    return found


def reference(line: str, days: int) -> Iterator[datetime]:
    """When a line fires in UTC, for some days from :data:`START`: the two day fields count together
    unless neither starts with ``*``."""
    minute, hour, day, month, weekday = line.split()
    minutes, hours = sorted(_values(minute, 0, 59, [], 0)), sorted(_values(hour, 0, 23, [], 0))
    months, in_month = _values(month, 1, 12, MONTHS, 1), _values(day, 1, 31, [], 0)
    in_week = {n % 7 for n in _values(weekday, 0, 6, DAYS, 0)}
    for offset in range(days):
        on = date(START.year, START.month, START.day) + timedelta(offset)
        by_month, by_week = on.day in in_month, on.isoweekday() % 7 in in_week
        either = not day.startswith("*") and not weekday.startswith("*")
        if on.month in months and (by_month or by_week if either else by_month and by_week):
            times = (
                datetime(on.year, on.month, on.day, h, m, tzinfo=UTC)
                for h in hours
                for m in minutes
            )
            yield from (at for at in times if at > START)


LINES = [
    "5/20 3 * * *",
    "0 0 31 * *",
    "0 0 29 2 *",
    "0 0 * jan-MAR,Dec *",
    "0 0 1 feb-Nov/4 *",
    "0 0 1 feb-9/3 *",
    "10-10/5 2 * * *",
    "*/70 2 * * *",
    "0 0 * * 0",
    "0 0 * * 7",
    "0 0 * * 5-7",
    "0 0 * * 0-7",
    "0 0 * * 1/2",
    "0 0 * * MON-Fri",
    "0 0 * * sun-tue",
    "0 0 * * sun,wed-fri,6",
    "0 0 * * mon-5",
    "0 0 1 * sun",
    "0 0 1,15 6 mon,7",
    "30 4 31 1,4 2",
    "0 0 */2 * 1",
    "0 0 1 * */2",
    "0 0 *,1 * 1",
]
"""What crontab(5) has beside numbers, spans and steps; those are in any line."""


def test_a_line_fires_when_cron_would() -> None:
    for line in LINES:
        expected = list(islice(reference(line, 1000), 20))
        assert list(islice(fire_times(line), len(expected))) == expected, line


@pytest.mark.parametrize(
    ("line", "same"),
    [("fri-sun", "5-7"), ("5-0/2", "5,7"), ("sun-sun", "0"), ("7-0", "7"), ("0/3", "0,3,6")],
)
def test_a_week_of_eight_days_begins_and_ends_with_sunday(line: str, same: str) -> None:
    times = [list(islice(fire_times(f"0 0 * * {days}"), 20)) for days in (line, same)]
    assert times[0] == times[1]


def _field(low: int, high: int) -> st.SearchStrategy[str]:
    """A field's text: a star, or a list of numbers, ranges and steps."""
    number = st.integers(low, high)
    span = st.tuples(number, number).map(lambda pair: f"{min(pair)}-{max(pair)}")
    stepped = st.tuples(st.integers(low, high - 2), st.integers(1, 2)).map(
        lambda pair: f"{pair[0]}-{high}/{pair[1]}"
    )
    steps = st.integers(1, high - low).map(lambda step: f"*/{step}")
    return st.one_of(
        st.just("*"),
        st.lists(st.one_of(number.map(str), span, stepped, steps), min_size=1, max_size=3).map(
            ",".join
        ),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    line=st.tuples(_field(0, 59), _field(0, 23), _field(1, 28), _field(1, 12), _field(0, 7)).map(
        " ".join
    )
)
def test_any_line_fires_when_cron_would(line: str) -> None:
    expected = list(islice(reference(line, 400), 8))
    assert list(islice(fire_times(line), len(expected))) == expected


NO_LINES = [
    "0 2 * *",
    "@daily",
    "0 2 * * * user",
    "60 * * * *",
    "-1 * * * *",
    "* * 0 * *",
    "* * * 13 *",
    "* * * * 8",
    "20-10 * * * *",
    "* * * * */0",
    "* * * * 1/x",
    "* * * * 1-",
    "* * * * 1,,2",
    "a * * * *",
    "* * * january *",
    "* * * * monday",
    "* * * * mon-",
    "1.5 * * * *",
    "* * * * ²",
    "0 0 L * *",
    "0 0 last * *",
    "0 0 * * 5#2",
    "0 0 ? * *",
    "0 0 30 2 *",
    "0 0 31 4,6 *",
]
"""Nor is an empty text."""


def test_what_is_no_line_or_never_fires_is_refused_with_a_reason() -> None:
    for line in ("", *NO_LINES):
        with pytest.raises(ValueError, match=r"\w"):
            check_cron(line, "UTC")
    for timezone in ("", "../etc/passwd", "/etc/localtime", "UTC\0", "europe"):
        with pytest.raises(ValueError, match="time zone"):
            check_cron("0 2 * * *", timezone)


CHANGES = {
    "Europe/Berlin": (date(2026, 3, 29), date(2026, 10, 25)),  # 2:00 → 3:00, 3:00 → 2:00
    "America/New_York": (date(2026, 3, 8), date(2026, 11, 1)),  # 2:00 → 3:00, 2:00 → 1:00
    "Australia/Lord_Howe": (date(2026, 10, 4), date(2026, 4, 5)),  # 2:00 → 2:30, 2:00 → 1:30
    "Africa/Casablanca": (date(2026, 3, 22), date(2026, 2, 15)),  # 2:00 → 3:00, 3:00 → 2:00
    "America/Santiago": (date(2026, 9, 6), date(2026, 4, 4)),  # at midnight
}
"""Time zone → the days on which its clocks are set forward and back."""


DAILY = "30 2 * * *; 45 1 * * *; 0 0 * * *"


@pytest.mark.parametrize("timezone", CHANGES)
@pytest.mark.parametrize("line", DAILY.split("; "))
def test_a_daily_line_fires_once_on_every_day_of_the_year(line: str, timezone: str) -> None:
    start, zone = datetime(2026, 1, 1, 12, tzinfo=UTC), ZoneInfo(timezone)
    days = [at.astimezone(zone).date() for at in islice(fire_times(line, timezone, start), 360)]
    first = days[0]
    assert days == [first + timedelta(n) for n in range(360)]
    assert {change for change in CHANGES[timezone] if change > first} <= set(days)


@pytest.mark.parametrize(
    ("timezone", "line", "day", "clock"),
    [
        ("Europe/Berlin", "30 2 * * *", date(2026, 3, 29), ["03:00+0200"]),  # there is no 2:30
        ("Europe/Berlin", "0,30 2,3 * * *", date(2026, 3, 29), ["03:00+0200", "03:30+0200"]),
        ("Europe/Berlin", "30 2 30 * *", date(2026, 3, 29), []),
        ("Europe/Berlin", "30 2 * * sun", date(2026, 3, 29), ["03:00+0200"]),
        ("Europe/Berlin", "30 2 * * *", date(2026, 10, 25), ["02:30+0200"]),  # there are two
        (
            "Europe/Berlin",
            "0,30 2,3 * * *",
            date(2026, 10, 25),
            ["02:00+0200", "02:30+0200", "03:00+0100", "03:30+0100"],
        ),
        ("America/New_York", "30 1 * * *", date(2026, 11, 1), ["01:30-0400"]),
        ("Australia/Lord_Howe", "15 2 * * *", date(2026, 10, 4), ["02:30+1100"]),
        ("Australia/Lord_Howe", "45 1 * * *", date(2026, 4, 5), ["01:45+1100"]),
        ("America/Santiago", "30 0 * * *", date(2026, 9, 6), ["01:00-0300"]),
        ("America/Santiago", "30 23 * * *", date(2026, 4, 4), ["23:30-0300"]),
        ("Pacific/Apia", "30 2 * * *", date(2011, 12, 30), []),  # a day that never was
    ],
)
def test_a_fixed_time_where_the_clocks_change(
    timezone: str, line: str, day: date, clock: list[str]
) -> None:
    assert shown(line, timezone, day) == clock


def shown(line: str, timezone: str, day: date) -> list[str]:
    """What clocks on the wall show when the line fires on a day, with the UTC offset."""
    zone = ZoneInfo(timezone)
    noon = datetime(day.year, day.month, day.day, 12, tzinfo=UTC)
    times = [
        at.astimezone(zone)
        for at in schedule.fire_times(
            line, timezone, noon - timedelta(days=2), noon + timedelta(days=2)
        )
    ]
    return [f"{at:%H:%M%z}" for at in times if at.date() == day]


@pytest.mark.parametrize("timezone", CHANGES)
def test_a_line_for_every_so_many_minutes_fires_every_so_many_minutes(timezone: str) -> None:
    line, step = "*/5 * * * *", timedelta(minutes=5)
    for change in CHANGES[timezone]:
        start = datetime(change.year, change.month, change.day, tzinfo=UTC) - timedelta(days=1)
        times = list(schedule.fire_times(line, timezone, start, start + timedelta(days=3)))
        assert times == [start + n * step for n in range(1, timedelta(days=3) // step + 1)]


@pytest.mark.parametrize(
    ("timezone", "day", "clock"),
    [
        ("Europe/Berlin", date(2026, 3, 29), ["00:30+0100", "01:30+0100", "03:30+0200"]),
        (
            "Europe/Berlin",
            date(2026, 10, 25),
            ["00:30+0200", "01:30+0200", "02:30+0200", "02:30+0100"],
        ),
        (
            "America/New_York",
            date(2026, 11, 1),
            ["00:30-0400", "01:30-0400", "01:30-0500", "02:30-0500"],
        ),
    ],
)
def test_an_hourly_line_fires_whenever_a_clock_shows_its_minute(
    timezone: str, day: date, clock: list[str]
) -> None:
    assert shown("30 * * * *", timezone, day)[: len(clock)] == clock


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    line=st.sampled_from(
        ["*/10 * * * *", "30 2 * * *", "0 1-4 * * *", "15 */2 * * *", "0 3 1 * 0"]
    ),
    timezone=st.sampled_from(["UTC", *CHANGES]),
    day=st.integers(0, 364),
    cuts=st.lists(st.integers(0, 6 * 24 * 3600), min_size=2, max_size=6).map(sorted),
)
def test_times_in_pieces_are_the_times_of_the_whole(
    line: str, timezone: str, day: int, cuts: list[int]
) -> None:
    points = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=day, seconds=cut) for cut in cuts]
    whole = list(schedule.fire_times(line, timezone, points[0], points[-1]))
    assert [
        at for a, b in pairwise(points) for at in schedule.fire_times(line, timezone, a, b)
    ] == whole
    assert last_fire(line, timezone, points[0], points[-1]) == (whole[-1] if whole else None)
    if whole:
        assert list(schedule.fire_times(line, timezone, whole[0], whole[-1])) == whole[1:]
        assert last_fire(line, timezone, whole[-1], whole[-1]) is None
        assert last_fire(line, timezone, points[-1], points[0]) is None


def test_the_last_time_of_years_is_found_in_any_zone() -> None:
    start, end = datetime(2016, 1, 1, tzinfo=UTC), datetime(2026, 7, 1, 12, 34, 56, tzinfo=UTC)
    assert last_fire("* * * * *", "Europe/Berlin", start, end) == datetime(
        2026, 7, 1, 12, 34, tzinfo=UTC
    )
    assert last_fire("0 0 29 2 *", "Europe/Berlin", start, end) == datetime(
        2024, 2, 28, 23, tzinfo=UTC
    )
    assert last_fire("0 0 29 2 *", "Europe/Berlin", datetime(2024, 3, 1, tzinfo=UTC), end) is None
    assert last_fire(
        "0 12 * * *", "Asia/Tokyo", start.astimezone(ZoneInfo("Asia/Tokyo")), end
    ) == datetime(2026, 7, 1, 3, tzinfo=UTC)
