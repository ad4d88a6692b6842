"""As of: which snapshots of a view count as its history, from when on each does, and the one that did at a time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq

from store.errors import RequestError, SnapshotError
from store.freshness import as_us, microseconds
from store.history.part_rows import reading
from store.offline.snapshot import Snapshot
from store.offline.standing import Standing
from store.offline.view_store import ViewStore
from store.partition import Partition


def snapshot_at(store: ViewStore, as_of: datetime | None = None) -> Snapshot:
    """The snapshot :func:`read` reads; ``store.batches`` of it streams the rows.

    Raises:
        SnapshotError, RequestError: as :func:`read`.
    """
    if as_of is None:
        ref = store.refs.live()
        if ref is None:
            raise SnapshotError(f"view {store.name!r} was never published: run `precompute run {store.name}`, or name a time")
        return store.snapshot(ref.snapshot)
    if as_of.tzinfo is None:
        raise RequestError(f"as_of {as_of.isoformat()} has no time zone: give an aware datetime")
    snapshots = counting(store, manifests_of(store))
    begun = [snapshot for snapshot in snapshots if begins_us(snapshot) <= as_us(as_of)]
    if not begun:
        raise SnapshotError(
            f"view {store.name!r} had no snapshot yet at {as_of.isoformat()}: the oldest one kept is {snapshots[0].number}, "
            f"{_begin_text(snapshots[0])}"
        )
    return begun[-1]


def read(store: ViewStore, as_of: datetime | None = None) -> pa.Table:
    """All rows of a view as of a time, with ``computed_at`` and ``input_hash``; they must fit in memory.

    Args:
        store: of the view.
        as_of: aware; None for what is live. Of a view without partitions it is commit time: the newest snapshot committed by then that counts.
            Of a partitioned view it is data time, as for :func:`get_historical_features`: the newest snapshot of the latest partition that was
            over by then, whenever it was computed.

    Raises:
        SnapshotError: there was none yet (the oldest one kept is named), or a file is missing or damaged.
        RequestError: ``as_of`` has no time zone.
    """
    snapshot = snapshot_at(store, as_of)
    with reading(store.name):
        schema = pq.read_schema(store.part_paths(snapshot)[0])
    return pa.Table.from_batches(store.batches(snapshot), schema)


def manifests_of(store: ViewStore) -> dict[int, Snapshot]:
    """All manifests of a view that are kept, by number."""
    manifests = {}
    for number in store.numbers():
        try:
            manifests[number] = store.snapshot(number)
        except SnapshotError:
            # else gc has removed it since
            if number in store.numbers():
                raise
    return manifests


def counting(store: ViewStore, manifests: Mapping[int, Snapshot]) -> list[Snapshot]:
    """The snapshots that count, in the order of their times; of each partition only the newest.

    Raises:
        SnapshotError: there is none.
    """
    snapshots = [manifests[number] for number in sorted(manifests)]
    standing = Standing(store, manifests)
    good = [snapshot for snapshot in snapshots if standing.why_void(snapshot) is None]
    if not good:
        raise SnapshotError(
            f"view {store.name!r} has no snapshot under {store.offline.root} that counts"
            + (f": all {len(snapshots)} were rolled back from or refused by a gate" if snapshots else "; see its name, or run it")
        )
    newest = good[-1]
    good = [s for s in good if (s.partition is None) == (newest.partition is None) and s.view.entity == newest.view.entity]
    if newest.partition is None:
        return good
    return [s for _, s in sorted({s.partition or "": s for s in good}.items())]


def begins_us(snapshot: Snapshot) -> int:
    """From when on it answers: its partition's end, or its commit; µs since 1970."""
    if snapshot.partition is not None:
        return as_us(Partition.parse(snapshot.partition).end)
    committed_us = microseconds(snapshot.created_at)
    assert committed_us is not None
    return committed_us


def _begin_text(snapshot: Snapshot) -> str:
    return f"committed {snapshot.created_at}" if snapshot.partition is None else f"of partition {snapshot.partition}"
