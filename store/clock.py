"""Clock: times as they are written and read, ISO 8601 in UTC. Partitions are intervals of data
time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache


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
