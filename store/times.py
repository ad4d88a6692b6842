"""Times: ISO 8601 in UTC, written and read; partitions, which are intervals of data time; and how
old a row is under a TTL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    # a client over HTTP has no numpy
    import numpy as np
    import numpy.typing as npt


def clock_us() -> int:
    """Now, µs since 1970."""
    return time.time_ns() // 1000


def utc_now() -> str:
    """Now, ISO 8601 in UTC with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@lru_cache(4096)
def parsed_time(text: str | None) -> datetime | None:
    """A time that was written, in UTC; None where there is none, or none that can be read."""
    try:
        at = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


def shown_time(at: str | datetime | None) -> str:
    """A time as people read it everywhere: ISO 8601 in UTC to the second, with a ``Z``; a dash
    where there is none, or none that can be read."""
    when = at if isinstance(at, datetime) else parsed_time(at)
    return "–" if when is None else f"{when.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def doubled_s(first_s: float, doublings: int, longest_s: float) -> float:
    """What is waited before something is tried again: ``first_s``, twice as long each time, at most
    ``longest_s``, however often that was."""
    # 2 ** 1024 is no float any more: what fails every half minute comes there in nine hours
    return min(longest_s, first_s * 2.0 ** min(doublings, 64))


def duration(seconds: float | None) -> str:
    """``42 s``, ``7 min``, ``26 h``, ``7.5 d``; a dash for None."""
    if seconds is None:
        return "–"
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"


BY = ("hour", "day", "week", "month")
"""Lengths a partition can have; weeks start on Monday."""


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """``[start, end)``, both aware and in UTC."""

    start: datetime
    end: datetime

    def __str__(self) -> str:
        """``2026-01-01T00:00Z/2026-01-02T00:00Z``: texts sort as their partitions do."""
        return f"{_text(self.start)}/{_text(self.end)}"

    @property
    def name(self) -> str:
        """Short, for file names and people: ``20260101T0000``."""
        return f"{self.start:%Y%m%dT%H%M}"

    @classmethod
    def parse(cls, text: str) -> Partition:
        """What :meth:`__str__` wrote."""
        start, end = (
            datetime.strptime(part, "%Y-%m-%dT%H:%MZ").replace(tzinfo=UTC)
            for part in text.split("/")
        )
        return cls(start, end)


def containing(by: str, at: datetime) -> Partition:
    """The partition of length ``by`` that ``at`` (aware) lies in."""
    at = at.astimezone(UTC)
    if by == "hour":
        start = at.replace(minute=0, second=0, microsecond=0)
        return Partition(start, start + timedelta(hours=1))
    day = at.replace(hour=0, minute=0, second=0, microsecond=0)
    if by == "day":
        return Partition(day, day + timedelta(days=1))
    if by == "week":
        start = day - timedelta(days=day.weekday())
        return Partition(start, start + timedelta(days=7))
    start = day.replace(day=1)
    return Partition(start, (start + timedelta(days=32)).replace(day=1))


def partitions(by: str, first: datetime, end: datetime) -> Iterator[Partition]:
    """Every partition that begins at or after ``first`` (or contains it) and is over at ``end``."""
    current = containing(by, first)
    while current.end <= end.astimezone(UTC):
        yield current
        current = containing(by, current.end)


def _text(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%MZ}"


# ---- Status: what one row of an answer is, why it is missing, and where it came from. Words
# alone: the client imports them, and little else.


class _Word(StrEnum):
    """One of a few words, or one that a newer server knows: an older client takes it as it is,
    rather than fail on the whole answer."""

    @classmethod
    def _missing_(cls, value: object) -> _Word | None:
        if not isinstance(value, str):
            return None
        word = str.__new__(cls, value)
        word._name_ = word._value_ = value
        return word


class Status(_Word):
    """What one row of an answer is."""

    FRESH = "fresh"
    STALE = "stale"
    COMPUTED = "computed"
    MISSING = "missing"


class Reason(_Word):
    """Why a row is missing."""

    UNKNOWN_ENTITY = "unknown_entity"
    NOT_IN_STORE = "not_in_store"
    """The store drops rows by itself when it is full, or was seen to have lost some: an unknown
    entity cannot be told from a lost row."""
    DAMAGED = "damaged"
    """What the store holds for the key fails its checks."""
    EXPIRED = "expired"
    BAD_KEY = "bad_key"
    """No entity can have it: of another type or number of parts, empty, too long."""
    DEADLINE = "deadline"
    SHED = "shed"
    MODEL_ERROR = "model_error"
    # of all rows of a view that a service takes features of
    UNKNOWN_VIEW = "unknown_view"
    """No view of that name is live: it was never published, or has another name now."""
    OTHER_ENTITY = "other_entity"
    """Its key is not among the service's entity columns."""
    STORE_UNAVAILABLE = "store_unavailable"
    OTHER_FORMAT = "other_format"
    """What is live is of a format that this version does not read."""


class AnswerSource(_Word):
    """Where a row's features came from."""

    STORE = "store"
    CACHE = "cache"
    """Computed for a miss before, and stored."""
    FALLBACK = "fallback"
    DEFAULT = "default"
    """The view's default stands in for a missing row."""


# ---- Freshness: what an age means under a view's TTL. Ages never turn negative, and no clock
# that ran ahead makes a row younger than is known.


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

AHEAD_US = 60_000_000
"""A time that lies further ahead than this was written by a clock that is wrong, or is read by one:
two machines differ by less."""


def age_s(computed_at_us: int, now_us: int) -> float:
    """Seconds from ``computed_at_us`` to ``now_us``, at least 0: a writer's clock may run ahead of
    ours."""
    return max(0, now_us - computed_at_us) / 1e6


class Sighting(NamedTuple):
    """What is known about when a pointer's rows were computed, besides what their writer's clock
    said.

    None was computed after they were published, nor after this process saw them first.
    ``published_us`` (None: not known) and ``renewed_us`` (when all were last found to be what the
    model would answer; 0: never) are µs since 1970; ``elapsed_us`` (at least 0) is the time since
    this process first saw the pointer, by its monotonic clock, which never jumps. A renewal makes
    another pointer, and is seen again.

    Both the clock's difference and ``elapsed_us`` are lower bounds of the age, so the larger one is
    it, whichever way a clock was set meanwhile.
    """

    published_us: int | None
    renewed_us: int
    elapsed_us: int

    def age_us(self, computed_at_us: int, now_us: int) -> int:
        """Age in µs, at least 0, of a row that says it was computed at ``computed_at_us``; the
        later that is, the smaller."""
        since = (
            computed_at_us if self.published_us is None else min(computed_at_us, self.published_us)
        )
        return max(now_us - max(since, self.renewed_us), self.elapsed_us)

    def ages_us(self, computed_at_us: npt.NDArray[np.int64], now_us: int) -> npt.NDArray[np.int64]:
        """:meth:`age_us` of int64 [rows]."""
        import numpy as np

        # the same, with its bounds put together: three steps over the rows in place of five
        youngest_us = (
            self.elapsed_us
            if self.published_us is None
            else max(now_us - self.published_us, self.elapsed_us)
        )
        oldest_us = max(now_us - self.renewed_us, self.elapsed_us)
        ages: npt.NDArray[np.int64] = now_us - computed_at_us
        np.maximum(ages, youngest_us, out=ages)
        return np.minimum(ages, oldest_us, out=ages)


def microseconds(text: str) -> int | None:
    """An ISO 8601 time as µs since 1970; None for a text that is none."""
    at = parsed_time(text)
    return None if at is None else as_us(at)


def iso(at: datetime) -> str:
    """An aware time as people and programs see it everywhere: ISO 8601 in UTC, with a ``Z``."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def as_us(at: datetime) -> int:
    """An aware datetime as µs since 1970, exact."""
    return (at - EPOCH) // timedelta(microseconds=1)


def as_datetime(us: int) -> datetime:
    """µs since 1970 as an aware datetime in UTC, exact."""
    return EPOCH + timedelta(microseconds=us)
