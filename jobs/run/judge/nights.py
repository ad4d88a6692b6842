"""Nights: the figures that a view had, and how far tonight's may be from them.

A night is the newest snapshot of a day that was accepted, or a partition. Tonight's figure x is
compared with the median c of the last 28: it may be off by k(n) standard deviations s of theirs,
the farthest night left out. k(n) is such that of 50 figures one is off by chance once in 200 nights
(Monte Carlo of n + 1 normal values, two-sided). Where figures follow the weekday, which halves s,
c is that weekday's median.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from datetime import date
from typing import NamedTuple

import numpy as np

from precompute.store.disk.durable_file import disk_message, make_folder
from precompute.store.disk.record import Record, field, read_record, sealed
from precompute.store.errors import SnapshotError
from precompute.store.offline.segment import Part
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore

log = logging.getLogger(__name__)

NIGHTS = "nights.json"
"""File of the nights before a snapshot, in the folder of its run."""

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


Limits = tuple[float | None, float | None]
"""The least and the largest value of a figure that its gates let pass; None to a side where it may
be anything."""


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


class _Nights(Record, frozen=True):
    """The file of them: what a snapshot was judged by."""

    nights: tuple[Night, ...] = ()
    limits: Mapping[str, Limits] = field(default_factory=dict)
    """Figure → limits of the snapshot beside which the file lies."""


def read_nights(store: ViewStore, snapshot: Snapshot) -> tuple[Night, ...]:
    """The nights before a snapshot, the oldest first; none where its file is gone or damaged, so
    that what is lost is learned again.

    Raises:
        UnreadableError: it cannot be read now.
    """
    return read_judged_by(store, snapshot)[0]


def read_judged_by(
    store: ViewStore, snapshot: Snapshot
) -> tuple[tuple[Night, ...], Mapping[str, Limits]]:
    """As :func:`read_nights`, and the limits that the snapshot's own figures were judged by.

    Raises:
        UnreadableError: they cannot be read now.
    """
    if snapshot.nights is None:
        return (), {}
    try:
        path = store.file(snapshot.nights)
        if path is None:
            log.warning("%s is gone: what is usual is learned again", snapshot.nights.path)
            return (), {}
        found = read_record(_Nights, path.read_bytes(), path)
        return found.nights, found.limits
    except SnapshotError as exc:
        log.warning("%s: what is usual is learned again", exc)
        return (), {}


def write_nights(
    store: ViewStore, run: str, nights: Sequence[Night], limits: Mapping[str, Limits]
) -> Part | None:
    """Write the nights before the snapshot of a run, and the limits that it was judged by; None
    without any.

    Raises:
        SnapshotError: the file system failed.
    """
    if not nights and not limits:
        return None
    path, data = store.data / run / NIGHTS, sealed(_Nights(tuple(nights), limits))
    try:
        make_folder(path.parent)
        store.storage.write(path, data)
    except OSError as exc:
        raise SnapshotError(disk_message(path, exc)) from exc
    relative = str(path.relative_to(store.folder))
    return Part(relative, len(nights), len(data), hashlib.sha256(data).hexdigest())


def nights_after(store: ViewStore, snapshot: Snapshot) -> tuple[Night, ...]:
    """The nights before what comes after a snapshot: its own is one of them.

    Raises:
        UnreadableError: something cannot be read now.
    """
    accepted = store.log.accepted(snapshot.number)
    begins = {figure for one in snapshot.failed if one.gate in accepted for figure in one.figures}
    own = Night(
        snapshot.number,
        day_of(snapshot),
        snapshot.quality,
        snapshot.announced,
        tuple(sorted(begins)),
    )
    return appended(read_nights(store, snapshot), own)


def day_of(snapshot: Snapshot) -> str:
    """The night of a snapshot: its partition, else the date that it was made."""
    return snapshot.partition or snapshot.created_at[:10]
