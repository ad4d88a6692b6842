"""Times: partitions tile time without gap or overlap, whatever the calendar does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.store.times import BY, Partition, containing, doubled_s, partitions

BYS = st.sampled_from(BY)
ZONES = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
TIMES = st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=ZONES)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("by", "when", "start", "end"),
    [
        ("hour", "2026-01-01T05:59:59.999999", "2026-01-01T05:00", "2026-01-01T06:00"),
        ("hour", "2026-01-01T06:00", "2026-01-01T06:00", "2026-01-01T07:00"),
        ("day", "2026-12-31T23:59", "2026-12-31", "2027-01-01"),
        ("day", "2024-02-29T12:00", "2024-02-29", "2024-03-01"),
        (
            "week",
            "2026-01-01",
            "2025-12-29",
            "2026-01-05",
        ),  # a Thursday; its week began on Monday, last year
        ("week", "2026-01-04T23:59", "2025-12-29", "2026-01-05"),
        ("week", "2026-01-05", "2026-01-05", "2026-01-12"),
        ("month", "2024-02-29", "2024-02-01", "2024-03-01"),
        ("month", "2023-02-28T23:59", "2023-02-01", "2023-03-01"),
        ("month", "2100-02-28", "2100-02-01", "2100-03-01"),  # no leap year
        ("month", "2026-12-31", "2026-12-01", "2027-01-01"),
        ("month", "2026-01-31", "2026-01-01", "2026-02-01"),
    ],
)
def test_the_partition_a_time_lies_in(by: str, when: str, start: str, end: str) -> None:
    assert containing(by, at(when)) == Partition(at(start), at(end))


def test_a_time_of_another_zone_lies_where_it_does_in_utc() -> None:
    tokyo = datetime(2026, 1, 1, 8, 30, tzinfo=timezone(timedelta(hours=9)))
    assert containing("day", tokyo) == Partition(at("2025-12-31"), at("2026-01-01"))
    assert containing("day", tokyo).start.tzinfo is UTC


@given(BYS, TIMES)
def test_every_time_lies_in_one_partition_and_both_its_ends_know_it(
    by: str, when: datetime
) -> None:
    found = containing(by, when)
    assert found.start <= when < found.end
    assert (
        containing(by, found.start)
        == found
        == containing(by, found.end - timedelta(microseconds=1))
    )
    assert containing(by, found.end).start == found.end
    assert containing(by, found.start - timedelta(microseconds=1)).end == found.start


@given(BYS, TIMES, st.timedeltas(timedelta(0), timedelta(days=40)))
def test_a_range_is_tiled_without_gap_or_overlap(
    by: str, first: datetime, length: timedelta
) -> None:
    end = first + length
    found = list(partitions(by, first, end))
    for one, next_one in pairwise(found):
        assert one.end == next_one.start
    if found:
        assert found[0] == containing(by, first)
        assert found[-1].end <= end < containing(by, found[-1].end).end
    else:
        assert containing(by, first).end > end


def test_the_one_that_is_not_over_is_left_out() -> None:
    assert list(partitions("day", at("2026-01-01"), at("2026-01-02T23:59"))) == [
        Partition(at("2026-01-01"), at("2026-01-02"))
    ]
    assert list(partitions("day", at("2026-01-03"), at("2026-01-02"))) == []


@given(BYS, TIMES, TIMES)
def test_texts_and_names_sort_as_the_partitions_do(by: str, one: datetime, other: datetime) -> None:
    a, b = containing(by, one), containing(by, other)
    assert (a < b) == (str(a) < str(b)) == (a.name < b.name)


@pytest.mark.parametrize(
    "text", ["", "2026-01-01", "2026-01-01T00:00Z", "2026-01-01T00:00Z/2026-01-32T00:00Z", "a/b/c"]
)
def test_what_is_no_partition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"match format|unpack"):
        Partition.parse(text)


@pytest.mark.parametrize(
    ("doublings", "expected"), [(-1, 0.05), (0, 0.1), (8, 25.6), (9, 30.0), (1100, 30.0)]
)
def test_a_pause_doubles_up_to_the_longest(doublings: int, expected: float) -> None:
    assert doubled_s(0.1, doublings, 30.0) == expected
