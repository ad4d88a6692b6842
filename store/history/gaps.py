"""Gaps: the partitions that a view has no best known values of, since a gate refused them, they
were rolled back from, or nobody computed them; and the rows of a training set that ask for one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from precompute.store.history.versions import best_known_of_each
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing, keeps_live
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition, as_datetime, as_us, partitions

SHOWN = 3
"""Partitions of one kind that are named to people."""


class Gaps(NamedTuple):
    """The ``rows`` of a training set whose own partition, the latest that was over at their time,
    has no best known values: ``null`` of them have no value, the others that of an earlier
    partition which a lookup would still have answered with. ``partitions``: why → their starts."""

    rows: int
    null: int
    partitions: Mapping[str, list[str]]

    def to_json(self) -> dict[str, Any]:
        """The gaps as a JSON document."""
        return self._asdict()

    def __str__(self) -> str:
        """For people."""
        kinds = []
        for why, starts in self.partitions.items():
            more = "" if len(starts) <= SHOWN else f" and {len(starts) - SHOWN:,} more"
            kinds.append(f"{len(starts):,} {why} ({', '.join(starts[:SHOWN])}{more})")
        return (
            f"{self.rows:,} rows ask for partitions without good rows: {self.null:,} of them are"
            f" null, {self.rows - self.null:,} have those of an earlier partition, within ttl and"
            f" stale_for; {'; '.join(kinds)}"
        )


def gaps_of(
    store: ViewStore,
    manifests: Mapping[int, Snapshot],
    requested_us: npt.NDArray[np.int64],
    is_null: npt.NDArray[np.bool_],
) -> Gaps | None:
    """The gaps in the best known values of a view that rows ask for.

    Args:
        store: of the view.
        manifests: all of its that are retained, by number.
        requested_us: the rows' times, int64 [rows], µs since 1970.
        is_null: of each row, whether it has no value.

    Returns:
        None where there is no gap, and of a view without partitions.

    Raises:
        SnapshotError: the view has no snapshot that counts.
    """
    good = best_known_of_each(store, manifests)
    if not good or not len(requested_us):
        return None
    latest_us = max(0, min(int(requested_us.max()), as_us(datetime.now(UTC))))
    missing = _missing(store, manifests, list(good), as_datetime(latest_us))
    if not missing:
        return None
    # a day that is done and has no rows keeps what was there before it, as in publishing
    rest = [name for name, snapshot in good.items() if not keeps_live(snapshot)] or list(good)
    names = sorted([*missing, *rest], key=lambda name: Partition.parse(name).end)
    ends_us = np.array([as_us(Partition.parse(name).end) for name in names])
    own = np.searchsorted(ends_us, requested_us, side="right") - 1
    lacks = np.array([name in missing for name in names])
    in_gap = (own >= 0) & lacks[own]
    if not in_gap.any():
        return None
    found: dict[str, list[str]] = {}
    for name in (names[place] for place in np.unique(own[in_gap]).tolist()):
        found.setdefault(missing[name], []).append(_start(name))
    return Gaps(int(in_gap.sum()), int((in_gap & is_null).sum()), found)


def _missing(
    store: ViewStore, manifests: Mapping[int, Snapshot], good: list[str], latest: datetime
) -> dict[str, str]:
    """The partitions that are over at ``latest`` and have no good snapshot → why; before the first
    good one only those that were computed."""
    standing, missing = Standing(store), dict[str, str]()
    done = [Partition.parse(name) for name in good]
    for one, following in zip(done, [*(p.start for p in done[1:]), latest], strict=True):
        for partition in partitions(_by(one), one.end, following):
            missing[str(partition)] = "not computed"
    for _, snapshot in sorted(manifests.items()):
        name = snapshot.partition
        if name is not None and (name in missing or name < good[0]):
            missing[name] = standing.why_void(snapshot) or "of another key"
    return missing


def _by(partition: Partition) -> str:
    """The kind of a partition, by its length."""
    hours = round((partition.end - partition.start).total_seconds() / 3600)
    return {1: "hour", 24: "day", 168: "week"}.get(hours, "month")


def _start(partition: str) -> str:
    return partition.partition("/")[0].removesuffix("T00:00Z")
