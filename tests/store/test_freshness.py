"""What an age means: fresh up to the TTL, stale for a while, then missing; and no clock makes an
age negative."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.store.feature_view import Feature, FeatureView, status_of
from precompute.store.times import (
    AnswerSource,
    Reason,
    Sighting,
    Status,
    age_s,
    as_datetime,
    microseconds,
)

VIEW = FeatureView("things", ("id",), (Feature("x", "float64"),), ttl_s=10, stale_for_s=5)
FRESH, STALE, MISSING = Status.FRESH, Status.STALE, Status.MISSING


@pytest.mark.parametrize(
    ("limits", "max_age", "ages"),
    [
        # a limit belongs to the better side
        ({}, None, {10: FRESH, 10.000001: STALE, 15: STALE, 15.000001: MISSING, 1e12: MISSING}),
        ({}, 1e13, {0: FRESH, 10: FRESH, 10.000001: STALE, 15: STALE, 15.000001: MISSING}),
        # the caller's own only ever takes away
        ({}, 3, {3: FRESH, 3.000001: MISSING}),
        ({}, 0, {0: FRESH, 0.000001: MISSING}),
        ({}, 12, {10: FRESH, 12: STALE, 12.000001: MISSING}),
        ({}, 15.1, {15.000001: MISSING}),
        ({}, -1, {0: MISSING}),
        ({"stale_for_s": 0}, None, {0: FRESH, 10: FRESH, 10.000001: MISSING}),
        ({"ttl_s": 0}, None, {0: FRESH, 0.000001: STALE, 5: STALE, 5.000001: MISSING}),
    ],
)
def test_the_status_of_a_row_of_an_age(
    limits: dict[str, Any], max_age: float | None, ages: dict[float, Status]
) -> None:
    view = dataclasses.replace(VIEW, **limits)
    assert {age: status_of(view, age, max_age) for age in ages} == ages


@pytest.mark.parametrize(
    ("computed_at", "now", "age"),
    [
        (0, 0, 0.0),
        (0, 1, 0.000001),
        (5, 2_500_005, 2.5),
        (1, 0, 0.0),
        (10**18, 0, 0.0),
        (-2_000_000, 0, 2.0),
    ],
)
def test_an_age_is_in_seconds_and_never_negative(computed_at: int, now: int, age: float) -> None:
    assert age_s(computed_at, now) == age


@pytest.mark.parametrize(
    ("us", "at"),
    [
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (-1, datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)),
        (1_763_700_000_123_457, datetime(2025, 11, 21, 4, 40, 0, 123457, tzinfo=UTC)),
        (253_402_300_799_999_999, datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)),
    ],
)
def test_microseconds_become_an_exact_time_in_utc(us: int, at: datetime) -> None:
    assert as_datetime(us) == at
    assert as_datetime(us).utcoffset() is not None


def test_the_words_of_an_answer_are_the_contracts() -> None:
    assert [str(s) for s in Status] == ["fresh", "stale", "computed", "missing"]
    assert [str(r) for r in Reason] == [
        "unknown_entity",
        "not_in_store",
        "damaged",
        "expired",
        "bad_key",
        "deadline",
        "shed",
        "model_error",
        "unknown_view",
        "other_entity",
        "store_unavailable",
    ]
    assert {"store", "fallback"} <= {str(s) for s in AnswerSource}


@pytest.mark.parametrize(
    ("published", "renewed", "computed_at", "now", "age"),
    [
        (100, 0, 90, 150, 60),
        (100, 0, 101, 150, 50),  # its clock ran ahead of the publisher's
        (100, 0, 10**15, 150, 50),
        (100, 120, 90, 150, 30),
        (100, 120, 10**15, 150, 30),
        (None, 0, 90, 150, 60),
        (None, 0, 130, 150, 20),
        (None, 0, 143, 150, 7),
        (None, 0, 144, 150, 7),  # later than it was seen: it is as old as that is ago
        (None, 0, 10**15, 150, 7),
        (10**15, 0, 10**15, 150, 7),
        (
            10**15,
            0,
            10**15,
            2 * 10**15,
            10**15,
        ),  # the reader's clock was slow when it saw them first, and set right
        (10**15, 0, 90, 150, 60),
        (100, 10**15, 90, 150, 7),
        (100, 0, 90, 50, 7),  # the reader's clock was set back
        (100, 0, 90, 96, 7),
    ],
)
def test_no_row_is_younger_than_its_publishing_or_than_it_was_first_seen(
    published: int | None, renewed: int, computed_at: int, now: int, age: int
) -> None:
    """First seen 7 µs ago by the clock that never jumps."""
    sighting = Sighting(published, renewed, 7)
    assert sighting.age_us(computed_at, now) == age
    assert sighting.ages_us(np.array([computed_at, computed_at], np.int64), now).tolist() == [
        age,
        age,
    ]


TIMES = st.integers(-(10**6), 10**6) | st.integers(-(2**61), 2**61)


@given(
    published=st.none() | TIMES,
    renewed=st.just(0) | TIMES,
    elapsed=st.integers(0, 10**6) | st.integers(0, 2**61),
    computed_at=st.lists(TIMES, min_size=1),
    now=TIMES,
)
def test_no_clock_takes_an_age_below_what_is_known(
    published: int | None, renewed: int, elapsed: int, computed_at: list[int], now: int
) -> None:
    """Neither below the time since it was first seen nor, where the row's clock was right, below
    the difference; and a row that was computed later is never the older one, which is what an
    answer relies on that judges all its rows by the oldest."""
    sighting = Sighting(published, renewed, elapsed)
    ages = [sighting.age_us(at, now) for at in sorted(computed_at)]
    assert sighting.ages_us(np.array(sorted(computed_at), np.int64), now).tolist() == ages
    assert ages == sorted(ages, reverse=True)
    assert all(
        age >= max(0, elapsed, now - max(at, renewed))
        for age, at in zip(ages, sorted(computed_at), strict=True)
    )


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000),
        ("1970-01-01T01:00:00.000001+01:00", 1),
        ("1970-01-01T00:00:00", 0),
        ("now", None),
        ("", None),
    ],
)
def test_a_time_in_iso_8601_becomes_microseconds(text: str, us: int | None) -> None:
    assert microseconds(text) == us
