"""Nights: the figures that a view had, and how far tonight's may be from them.

A night is the newest snapshot of a day that was accepted, or a partition. Tonight's figure x is
compared with the median c of the last 28: it may be off by k(n) standard deviations s of theirs,
the farthest night left out. k(n) is such that of 50 figures one is off by chance once in 200 nights
(Monte Carlo of n + 1 normal values, two-sided). Where figures follow the weekday, which halves s,
c is that weekday's median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import NamedTuple

import numpy as np

from precompute.store.disk.record import Record, field

MOST_NIGHTS = 28
FEWEST_NIGHTS = 7
"""Nights below which a view has no limits of its own."""
SURE_NIGHTS = 14
"""Nights up to which fixed bounds stay on beside the view's own limits."""
_K_NIGHTS = (7, 14, 21, 28)
_K = (17.2, 7.2, 6.1, 5.5)


class Night(Record, frozen=True):
    """The figures of an accepted snapshot."""

    number: int
    """Of the snapshot."""
    day: str
    """Its date, ISO 8601; of a partition the partition, as text."""
    figures: Mapping[str, float] = field(default_factory=dict)
    announced: str = ""
    """Why it is no history: what was announced of it. Empty of an ordinary one."""
    begins: tuple[str, ...] = ()
    """Figures whose earlier nights count no more, since what refused them was accepted."""


class Usual(NamedTuple):
    """What a figure was in ``nights``: ``center``, and ``reach``, by which tonight's may be off."""

    center: float
    reach: float
    nights: int
    low: float
    high: float


def counted(nights: Sequence[Night], figure: str) -> list[tuple[str, float]]:
    """(day, value) of the nights that tell what is usual of a figure: the newest
    :data:`MOST_NIGHTS` that were not announced, oldest first."""
    found: list[tuple[str, float]] = []
    for night in reversed(nights):
        if not night.announced and figure in night.figures:
            found.append((night.day, night.figures[figure]))
        if figure in night.begins or len(found) == MOST_NIGHTS:
            break
    return found[::-1]


def usual(values: Sequence[tuple[str, float]], day: str) -> Usual | None:
    """What a figure usually is on a day; None of fewer than :data:`FEWEST_NIGHTS` nights."""
    n = len(values)
    if n < FEWEST_NIGHTS:
        return None
    x = np.array([value for _, value in values])
    center, spread = float(np.median(x)), _spread(x - np.median(x))
    weekdays = [weekday(one) for one, _ in values]
    today = weekday(day)
    if n >= SURE_NIGHTS and today is not None and weekdays.count(today) >= 2:
        own = {w: np.median(x[[v == w for v in weekdays]]) for w in set(weekdays)}
        of_weekday = _spread(x - np.array([own[w] for w in weekdays]))
        if of_weekday < spread / 2:
            center, spread = float(own[today]), of_weekday
    k = float(np.interp(n, _K_NIGHTS, _K))
    return Usual(center, k * spread, n, float(x.min()), float(x.max()))


def _spread(off: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Standard deviation without the farthest."""
    kept = np.delete(off, np.abs(off).argmax())
    return float(kept.std(ddof=1)) if len(kept) > 1 else 0.0


def weekday(day: str) -> int | None:
    """0 (Monday) to 6; None of what is no date."""
    try:
        return date.fromisoformat(day[:10]).weekday()
    except ValueError:
        return None


def appended(nights: Sequence[Night], night: Night) -> tuple[Night, ...]:
    """Nights and one more, no more than are looked at; of one day the newest alone."""
    before = [one for one in nights if one.day != night.day]
    ordinary = [i for i, one in enumerate(before) if not one.announced]
    first = ordinary[-MOST_NIGHTS] if len(ordinary) >= MOST_NIGHTS else 0
    return (*before[first:], night)
