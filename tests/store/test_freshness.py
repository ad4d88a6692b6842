"""What an age means: fresh up to the TTL, stale for a while, then missing; and no clock makes an
age negative."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest

from precompute.store.times import (
    AnswerSource,
    Reason,
    Sighting,
    Status,
    as_datetime,
    microseconds,
)


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
        "other_format",
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
