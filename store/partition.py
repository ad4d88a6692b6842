"""Partition: an interval of data time, UTC, start included and end excluded. Logical time, not the time of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

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
        start, end = (datetime.strptime(part, "%Y-%m-%dT%H:%MZ").replace(tzinfo=UTC) for part in text.split("/"))
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
