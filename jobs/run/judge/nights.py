"""Nights: the figures that a view had, and how far tonight's may be from them.

A night is the newest snapshot of a day that was accepted, or a partition. Tonight's figure may be
off the median of the last 28 by k(n) standard deviations of theirs, the farthest left out. With
k(n) of 50 figures one is off by chance once in 200 nights (Monte Carlo of n + 1 normal values). n
is how many independent nights say as much. Where weekdays halve it, their own median is taken.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from datetime import date
from typing import NamedTuple

import numpy as np

from precompute.store.disk.durable_file import disk_message, make_folder, replace_durably
from precompute.store.disk.record import Record, field, read_record, replace, sealed
from precompute.store.errors import SnapshotError, UnreadableError
from precompute.store.offline.segment import Part
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing
from precompute.store.offline.stored_file import parsing
from precompute.store.offline.view_store import ViewStore

F8 = np.ndarray[tuple[int], np.dtype[np.float64]]
log = logging.getLogger(__name__)

ANCHOR_NIGHTS = 7
"""How many nights ago the rows are from that tonight's are compared with by key."""
NIGHTS = "nights.json"
"""File of the nights before a snapshot, in the folder of its run."""
MOST_NIGHTS = 28
FEWEST_NIGHTS = 7
"""Nights below which a view has no limits of its own."""
SURE_NIGHTS = 14
"""Nights up to which fixed bounds stay on beside the view's own limits."""
_K_NIGHTS = (7, 14, 21, 28)
_K = (17.2, 7.2, 6.1, 5.5)
_WEEKS = 3
"""Nights of a weekday from which on it is compared with its own: of two each is near the median."""
_FEWEST_INDEPENDENT = 10
"""Independent nights that n nights are at least, however alike each is the one before."""


class Night(Record, frozen=True):
    """The figures of an accepted snapshot."""

    number: int
    """Of the snapshot."""
    day: str
    """Its date, ISO 8601; of a partition the partition, as text."""
    figures: Mapping[str, float] = field(default_factory=dict)
    announced: str = ""
    """Why it is no history: what was announced of it. Empty of an ordinary one."""
    accepted: tuple[str, ...] = ()
    """Figures that a gate refused and somebody accepted: as far off as that is usual from then
    on."""
    rows: Part | None = None
    """Some of its rows, by which a little each night is seen; of the last :data:`ANCHOR_NIGHTS`."""


class Value(NamedTuple):
    """What a figure was on a day; whether a gate refused that, and it was accepted."""

    day: str
    value: float
    is_accepted: bool = False


Limits = tuple[float | None, float | None]
"""The least and the largest value of a figure that its gates let pass; None to a side where it may
be anything."""


class Usual(NamedTuple):
    """What a figure was in ``nights``: ``center``, and how far tonight's may be below and above."""

    center: float
    below: float
    above: float
    nights: int


def counted(nights: Sequence[Night], figure: str) -> list[Value]:
    """What a figure was in the nights that tell what is usual: the newest :data:`MOST_NIGHTS` that
    were not announced, oldest first."""
    found = [
        Value(night.day, night.figures[figure], figure in night.accepted)
        for night in nights
        if not night.announced and figure in night.figures
    ]
    return found[-MOST_NIGHTS:]


def usual(
    values: Sequence[Value], day: str, floor: float = 0.0, farthest: float = 1.0
) -> Usual | None:
    """What a figure usually is on a day, and how far from it tonight's may be: ``floor`` at least,
    and from :data:`SURE_NIGHTS` nights on ``farthest`` times as far as it was in any of them; None
    of fewer than :data:`FEWEST_NIGHTS`."""
    n = len(values)
    if n < FEWEST_NIGHTS:
        return None
    x = np.array([one.value for one in values])
    center = float(np.median(x))
    off, lost = x - center, 1
    weekdays = [weekday(one.day) for one in values]
    today = weekday(day)
    if today is not None and weekdays.count(today) >= _WEEKS:
        own = {w: np.median(x[[v == w for v in weekdays]]) for w in set(weekdays)}
        of_weekday = x - np.array([own[w] for w in weekdays])
        # each weekday's median takes one of what the residuals have to tell
        if _spread(of_weekday, len(own)) < _spread(off) / 2:
            center, off, lost = float(own[today]), of_weekday, len(own)
    k = float(np.interp(_independent(off), _K_NIGHTS, _K))
    reach = max(k * _spread(off, lost), floor)
    # what was, passes again: beside its own weekday where that is what is compared
    may = [farthest * by for by, one in zip(off, values, strict=True) if not one.is_accepted]
    may = may if n >= SURE_NIGHTS else []
    for one, of_day in zip(values, weekdays, strict=True):
        by = one.value - center
        # what somebody accepted may come again, about, and what that weekday was, half as far again
        if one.is_accepted:
            may.append(by + math.copysign(reach, by))
        elif of_day is not None and of_day == today:
            may.append(by + math.copysign(max(floor, abs(by) / 2), by))
    below, above = (max([reach, *(sign * one for one in may)]) for sign in (-1, 1))
    return Usual(center, below, above, n)


def last_alike(values: Sequence[Value], day: str) -> Value:
    """The last value of the same weekday; before there is one, of a weekend or none, as the day
    is."""
    same = [one for one in values if weekday(one.day) == weekday(day)]
    alike = [one for one in values if _is_weekend(one.day) == _is_weekend(day)]
    return (same or alike or values)[-1]


def _spread(off: F8, lost: int = 1) -> float:
    """Standard deviation without the farthest, of values that have ``lost`` less to tell."""
    n, kept = len(off), np.delete(off, np.abs(off).argmax())
    if len(kept) < 2:
        return 0.0
    return float(kept.std(ddof=1)) * math.sqrt((n - 1) / max(1, n - lost))


def _independent(off: F8) -> float:
    """How many independent nights say as much, where each is mostly the one before: n (1 - r) /
    (1 + r) of their correlation r with it (steps between independent values are twice their
    variance: J. von Neumann, Annals of Mathematical Statistics 1941)."""
    n, variance = len(off), float(off.var())
    if variance == 0:
        return n
    # 1 - r; of few independent nights chance makes less than 1, too
    rest = float(np.square(np.diff(off)).mean()) / (2 * variance)
    return n if rest > 0.5 else max(min(n, _FEWEST_INDEPENDENT), n * rest / (2 - rest))


def weekday(day: str) -> int | None:
    """0 (Monday) to 6; None of what is no date."""
    try:
        return date.fromisoformat(day[:10]).weekday()
    except ValueError:
        return None


def appended(nights: Sequence[Night], night: Night) -> tuple[Night, ...]:
    """Nights and one more, no more than are looked at, and no more that were announced; of one day
    the newest alone."""
    before = [one for one in nights if one.day != night.day]
    ordinary = [i for i, one in enumerate(before) if not one.announced]
    first = ordinary[-MOST_NIGHTS] if len(ordinary) >= MOST_NIGHTS else 0
    left_out = {*[i for i, one in enumerate(before) if one.announced][:-MOST_NIGHTS]}
    without = len(before) - ANCHOR_NIGHTS + 1
    before = [replace(one, rows=None) if i < without else one for i, one in enumerate(before)]
    return (*(one for i, one in enumerate(before) if i >= first and i not in left_out), night)


def anchors_of(nights: Sequence[Night]) -> tuple[Part, ...]:
    """Files of rows of the last nights, the oldest first."""
    return tuple(one.rows for one in nights[1 - ANCHOR_NIGHTS :] if one.rows is not None)


def anchor_of(nights: Sequence[Night], day: str) -> Night | None:
    """The night whose rows tonight's are compared with: of the last week the one of the same
    weekday, before there is one the oldest; None without rows, and of last night, which is compared
    with by itself."""
    week = [one for one in nights[-ANCHOR_NIGHTS:] if one.rows is not None and not one.announced]
    today = weekday(day)
    same = [one for one in week if weekday(one.day) == today]
    if not same and len(nights) < ANCHOR_NIGHTS:
        # a Saturday is none of the days before it
        same = [one for one in week if _is_weekend(one.day) == _is_weekend(day)]
    return same[0] if same and same[0] is not nights[-1] else None


def _is_weekend(day: str) -> bool:
    return (weekday(day) or 0) > 4


class _Nights(Record, frozen=True):
    """The file of them: what a snapshot was judged by."""

    nights: tuple[Night, ...] = ()
    limits: Mapping[str, Limits] = field(default_factory=dict)
    """Figure → limits of the snapshot beside which the file lies."""


def read_nights(store: ViewStore, snapshot: Snapshot) -> tuple[Night, ...]:
    """The nights before a snapshot, the oldest first. Where its file is gone or damaged, as the
    snapshots before it have them that are still there.

    Raises:
        UnreadableError: it cannot be read now.
    """
    return read_judged_by(store, snapshot)[0]


def read_judged_by(
    store: ViewStore, snapshot: Snapshot
) -> tuple[tuple[Night, ...], Mapping[str, Limits]]:
    """As :func:`read_nights`, and the limits that the snapshot's own figures were judged by; none
    where its file is gone or damaged.

    Raises:
        UnreadableError: they cannot be read now.
    """
    if (file := _read(store, snapshot)) is not None:
        return file.nights, file.limits
    after, nights = list[Snapshot](), tuple[Night, ...]()
    for one in Standing(store).nights_before(snapshot):
        after.append(one)
        if (file := _read(store, one)) is not None:
            nights = file.nights
            break
    for one in reversed(after):
        nights = appended(nights, night_of(store, one))
    return nights, {}


def _read(store: ViewStore, snapshot: Snapshot) -> _Nights | None:
    """The file beside a snapshot; None where it is gone or damaged."""
    if snapshot.nights is None:
        return _Nights()
    try:
        if (path := store.file(snapshot.nights)) is not None:
            with parsing(path):
                return read_record(_Nights, path.read_bytes(), path)
        damage: object = f"{snapshot.nights.path} is gone"
    except SnapshotError as exc:
        damage = exc
    log.warning("%s: what is usual is known from the snapshots before it", damage)
    return None


def with_whole_rows(store: ViewStore, nights: Sequence[Night]) -> tuple[Night, ...]:
    """Nights without those of their files of rows that are gone or damaged: no later snapshot names
    them."""
    return tuple(
        one if one.rows is None or _is_whole(store, one.rows) else replace(one, rows=None)
        for one in nights
    )


def _is_whole(store: ViewStore, rows: Part) -> bool:
    try:
        if store.file(rows) is not None:
            return True
        log.warning("%s is gone: nothing is compared with it", rows.path)
    except SnapshotError as exc:
        log.warning("%s: nothing is compared with it", exc)
    except UnreadableError:
        # whether it is whole is not known
        return True
    return False


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
        replace_durably(path, data)
        store.storage.put([path])
    except OSError as exc:
        raise SnapshotError(disk_message(path, exc)) from exc
    relative = str(path.relative_to(store.folder))
    return Part(relative, len(nights), len(data), hashlib.sha256(data).hexdigest())


def nights_after(store: ViewStore, snapshot: Snapshot) -> tuple[Night, ...]:
    """The nights before what comes after a snapshot: its own is one of them.

    Raises:
        UnreadableError: something cannot be read now.
    """
    return appended(read_nights(store, snapshot), night_of(store, snapshot))


def night_of(store: ViewStore, snapshot: Snapshot) -> Night:
    """A committed snapshot as a night.

    Raises:
        UnreadableError: what was accepted of it cannot be read now.
    """
    accepted = store.log.accepted(snapshot.number)
    refused = {figure for one in snapshot.failed if one.gate in accepted for figure in one.figures}
    return Night(
        snapshot.number,
        day_of(snapshot),
        snapshot.quality,
        snapshot.announced,
        tuple(sorted(refused)),
        snapshot.anchors[-1] if snapshot.anchors else None,
    )


def day_of(snapshot: Snapshot) -> str:
    """The night of a snapshot: its partition, else the date that it was made."""
    return snapshot.partition or snapshot.created_at[:10]
