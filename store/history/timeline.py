"""Timeline: which snapshot of a view answers for which time: the one that was served then, or the
best known values for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from precompute.store.errors import RequestError, SnapshotError
from precompute.store.offline.publishings import Publishing
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing, keeps_live
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition, Sighting, as_us, microseconds

Values = Literal["served", "best_known"]
"""Which values count at a time: those that a lookup then was ``served`` from the store; or those
that are ``best_known`` of it now, whenever they were computed and whether or not they were
published."""


class Period(NamedTuple):
    """A period of history: from ``since_us`` (µs since 1970) until the next one ``snapshot``
    answers; None where nothing that is retained does, and ``why`` says what there was.

    Ages count from ``published_us`` at the latest, and from ``renewed_us`` at the earliest, as
    :class:`precompute.store.times.Sighting` has it; a row older than ``longest_s`` answers no
    more (None: whatever its age).
    """

    since_us: int
    snapshot: Snapshot | None
    published_us: int
    renewed_us: int
    longest_s: float | None
    why: str = ""

    def answers(self, computed_us: npt.NDArray[np.int64], now_us: int) -> npt.NDArray[np.bool_]:
        """Which rows still answer, by the times that they were computed at (int64 [rows], µs since
        1970)."""
        if self.longest_s is None:
            return np.ones(len(computed_us), np.bool_)
        ages_us = Sighting(self.published_us, self.renewed_us, 0).ages_us(computed_us, now_us)
        young: npt.NDArray[np.bool_] = ages_us / 1e6 <= self.longest_s
        return young

    def ends_us(self, computed_us: int, until_us: int | None) -> int | None:
        """The time until which a row computed then answers, in a period that lasts until
        ``until_us``; None: as long as the period."""
        if self.longest_s is None:
            return until_us
        expires_us = (
            max(min(computed_us, self.published_us), self.renewed_us)
            + int(self.longest_s * 1e6)
            + 1
        )
        return expires_us if until_us is None else min(expires_us, until_us)


def timeline(store: ViewStore, manifests: Mapping[int, Snapshot], values: Values) -> list[Period]:
    """The periods of a view, in their order; the first begins with the first snapshot that can be
    read.

    Args:
        store: of the view.
        manifests: all that are retained, by number.
        values: which count.

    Raises:
        SnapshotError: no snapshot that is retained counts, or the log of publishings is damaged.
        RequestError: there are no such values.
    """
    if values == "best_known":
        return _best_known(store, manifests)
    if values != "served":
        raise RequestError(f"values are 'served' or 'best_known', not {values!r}")
    periods = served_periods(store, manifests)
    if not periods:
        why = (
            "none of the snapshots that were published is retained"
            if store.refs.publishings()
            else "it was never published"
        )
        raise SnapshotError(
            f"view {store.name!r} has nothing that was served under {store.offline.root}: {why};"
            " see its name, run it, or ask for values='best_known'"
        )
    return periods


def served_periods(store: ViewStore, manifests: Mapping[int, Snapshot]) -> list[Period]:
    """As :func:`timeline` of what was served; empty where that was nothing, or nothing of it is
    retained.

    Raises:
        SnapshotError: the log of publishings is damaged.
    """
    publishings = store.refs.publishings()
    retained = [
        manifests[entry.snapshot]
        for entry in publishings
        if entry.snapshot is not None and entry.snapshot in manifests
    ]
    periods: list[Period] = []
    for entry in publishings if retained else ():
        period = _period(entry, manifests, retained[-1].view.entity)
        # Epochs say what came after what, whatever the clocks said.
        since_us = max(period.since_us, periods[-1].since_us if periods else period.since_us)
        if periods and periods[-1].since_us == since_us:
            periods.pop()
        if periods or period.snapshot is not None:
            periods.append(period._replace(since_us=since_us))
    return periods


def newest(periods: Sequence[Period]) -> Snapshot:
    """The snapshot of the last period that has one: its view names key and features of all."""
    return next(period.snapshot for period in reversed(periods) if period.snapshot is not None)


def _period(
    entry: Publishing, manifests: Mapping[int, Snapshot], entity: tuple[str, ...]
) -> Period:
    since_us, published_us = microseconds(entry.since), microseconds(entry.published_at)
    assert since_us is not None
    assert published_us is not None
    snapshot = manifests.get(entry.snapshot or 0)
    if snapshot is None or snapshot.view.entity != entity:
        why = f"snapshot {entry.snapshot}, which was live from {entry.since} on, is not retained"
        if entry.snapshot is None:
            why = f"it was dropped at {entry.since}"
        elif snapshot is not None:
            why = (
                f"snapshot {snapshot.number}, which was live from {entry.since} on, had another"
                f" key: {', '.join(snapshot.view.entity)}"
            )
        return Period(since_us, None, 0, 0, None, why)
    renewed_us = max(snapshot.renewed_at or 0, entry.renewed_at or 0)
    return Period(
        since_us,
        snapshot,
        published_us,
        renewed_us,
        snapshot.view.ttl_s + snapshot.view.stale_for_s,
    )


def _best_known(store: ViewStore, manifests: Mapping[int, Snapshot]) -> list[Period]:
    snapshots = [manifests[number] for number in sorted(manifests)]
    standing = Standing(store, manifests)
    # what is served of several partitions holds nothing that these have not
    good = [
        snapshot
        for snapshot in snapshots
        if not snapshot.members and standing.why_void(snapshot) is None
    ]
    if not good:
        raise SnapshotError(
            f"view {store.name!r} has no snapshot under {store.offline.root} that counts"
            + (
                f": all {len(snapshots)} were rolled back from or refused by a gate"
                if snapshots
                else "; see its name, or run it"
            )
        )
    last = good[-1]
    good = [
        s
        for s in good
        if (s.partition is None) == (last.partition is None) and s.view.entity == last.view.entity
    ]
    if last.partition is not None:
        good = [s for _, s in sorted({s.partition or "": s for s in good}.items())]
        # As in publishing: a day without rows takes the place of nothing.
        good = [s for s in good if not keeps_live(s)] or good
    periods: list[Period] = []
    for snapshot in good:
        begins_us = _begins_us(snapshot)
        if periods and begins_us <= periods[-1].since_us:
            begins_us = periods.pop().since_us
        # of a partition all values are as old as its end
        renewed_us = 0 if snapshot.partition is None else begins_us
        periods.append(Period(begins_us, snapshot, begins_us, renewed_us, None))
    return periods


def _begins_us(snapshot: Snapshot) -> int:
    """The time from which its values count: its partition's end, or its commit; µs since 1970."""
    if snapshot.partition is not None:
        return as_us(Partition.parse(snapshot.partition).end)
    committed_us = microseconds(snapshot.created_at)
    assert committed_us is not None
    return committed_us
