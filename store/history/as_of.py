"""As of: what a view held at a time."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.errors import RequestError, SnapshotError
from precompute.store.freshness import as_datetime, as_us, iso
from precompute.store.history.part_rows import reading
from precompute.store.history.timeline import Period, Values, timeline
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore


def snapshot_at(store: ViewStore, as_of: datetime | None = None, *, values: Values = "served") -> Snapshot:
    """The snapshot :func:`read` reads; ``store.batches`` of it streams the rows, those that had expired included.

    Raises:
        SnapshotError, RequestError: as :func:`read`.
    """
    if as_of is not None:
        return _answering(store, as_of, values)[1]
    ref = store.refs.live()
    if ref is None:
        raise SnapshotError(f"view {store.name!r} was never published: run `precompute run {store.name}`, or name a time")
    return store.snapshot(ref.snapshot)


def read(store: ViewStore, as_of: datetime | None = None, *, values: Values = "served") -> pa.Table:
    """All rows of a view as of a time, with ``computed_at`` and ``input_hash``; they must fit in memory.

    Args:
        store: of the view.
        as_of: aware; None for the snapshot that is live, whole.
        values: ``served``: the rows that a lookup at that time would have answered from the store: those of the snapshot that was live then, which may have been rolled back from
            since, without those that were past ``ttl`` and ``stale_for``. ``best_known``: of a partitioned view the newest snapshot of the latest partition that was over by
            then, whenever it was computed; of others the newest that was committed by then; of good ones only, published or not, and rows of any age.

    Raises:
        SnapshotError: there was none (the oldest one kept is named), or a file is missing or damaged.
        RequestError: ``as_of`` has no time zone, or there are no such values.
    """
    period, snapshot = (None, snapshot_at(store)) if as_of is None else _answering(store, as_of, values)
    with reading(store.name):
        schema = pq.read_schema(store.part_paths(snapshot)[0])
    rows = pa.Table.from_batches(store.batches(snapshot), schema)
    if period is None or as_of is None or period.longest_s is None:
        return rows
    computed_us = np.asarray(rows.column("computed_at").cast(pa.int64()))
    return rows.filter(pa.array(period.answers(computed_us, as_us(as_of))))


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


def _answering(store: ViewStore, as_of: datetime, values: Values) -> tuple[Period, Snapshot]:
    if as_of.tzinfo is None:
        raise RequestError(f"as_of {as_of.isoformat()} has no time zone: give an aware datetime")
    periods = timeline(store, manifests_of(store), values)
    period = next((period for period in reversed(periods) if period.since_us <= as_us(as_of)), None)
    if period is not None and period.snapshot is not None:
        return period, period.snapshot
    oldest = periods[0].snapshot
    assert oldest is not None
    why = f"; {period.why}" if period is not None else ""
    where = "" if oldest.partition is None else f" of partition {oldest.partition},"
    raise SnapshotError(
        f"view {store.name!r} has nothing to read as of {as_of.isoformat()}{why}: the oldest snapshot that can be read is {oldest.number},{where} which counts from "
        f"{iso(as_datetime(periods[0].since_us))} on"
    )
