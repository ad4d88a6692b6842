"""Reading a live view of 1 M × 384 float16 through a chain of eight deltas of 1 %, against the same
rows compacted."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import report
from precompute.store.disk.record import replace
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.segment import Part
from precompute.store.offline.snapshot import Counts, Snapshot
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import utc_now

ROWS = 1_000_000
DIM = 384
PART_ROWS = 80_000
DELTAS = 8
DELTA_ROWS = ROWS // 100
ROUNDS = 3

VIEW = FeatureView(
    "vectors", ("id",), (Feature("vector", "float16", DIM),), ttl_s=86400, stale_for_s=86400
)


def rows(ids: np.ndarray, rng: np.random.Generator) -> pa.Table:
    """Random vectors of these keys, as :mod:`precompute.jobs.run.materialize` writes them."""
    flat = pa.array(rng.standard_normal(len(ids) * DIM, dtype=np.float32).astype(np.float16))
    columns = {
        "id": pa.array(ids),
        "vector": pa.FixedSizeListArray.from_arrays(flat, DIM),
        "computed_at": pa.repeat(pa.scalar(0, pa.timestamp("us", "UTC")), len(ids)),
        "input_hash": pa.array(rng.integers(0, 2**62, len(ids))),
    }
    return pa.table(columns)


def commit(store: ViewStore, run: str, parts: list[Part], **known: Any) -> Snapshot:
    """A snapshot of written parts."""
    snapshot = Snapshot(VIEW, run, "model", Counts(ROWS, 0), tuple(parts), None, utc_now(), 0, 0)
    return store.commit(replace(snapshot, **known))


def chained(store: ViewStore, rng: np.random.Generator) -> Snapshot:
    """A full snapshot, and deltas each of which replaces 1 % of its rows, all over it."""
    at = np.arange(ROWS)
    parts = [
        store.write_part("base", f"part-{i:05d}.parquet", rows(at[start : start + PART_ROWS], rng))
        for i, start in enumerate(range(0, ROWS, PART_ROWS))
    ]
    last = commit(store, "base", parts, counts=Counts(ROWS, ROWS))
    for number in range(DELTAS):
        ids = at[number :: ROWS // DELTA_ROWS][:DELTA_ROWS]
        part = store.write_part(f"delta{number}", "part-00000.parquet", rows(ids, rng))
        names = pa.DictionaryArray.from_arrays(
            pa.array(ids // PART_ROWS, pa.int32()), pa.array([p.path for p in parts])
        )
        table = pa.Table.from_arrays(
            [names, pa.array(ids % PART_ROWS), pa.repeat(False, len(ids)), pa.array(ids)],
            names=[*DELETES_SCHEMA.names, "key_id"],
        )
        deletes = store.write_part(f"delta{number}", "deletes.parquet", table)
        counts = Counts(ROWS, DELTA_ROWS, unchanged=ROWS - DELTA_ROWS)
        last = commit(
            store,
            f"delta{number}",
            [part],
            counts=counts,
            kind="delta",
            parent=last.number,
            deletes=deletes,
        )
    return last


def compacted(store: ViewStore, chain: Snapshot) -> Snapshot:
    """The same rows in parts of their own."""

    def tables() -> Iterator[pa.Table]:
        gathered: list[pa.RecordBatch] = []
        for batch in store.batches(chain):
            gathered.append(batch)
            if sum(b.num_rows for b in gathered) >= PART_ROWS:
                yield pa.Table.from_batches(gathered)
                gathered = []
        if gathered:
            yield pa.Table.from_batches(gathered)

    parts = [
        store.write_part("compact", f"part-{i:05d}.parquet", table)
        for i, table in enumerate(tables())
    ]
    return commit(store, "compact", parts, counts=Counts(ROWS, ROWS))


def read_s(store: ViewStore, snapshot: Snapshot) -> float:
    """Seconds to read every row."""
    started = time.perf_counter()
    assert sum(batch.num_rows for batch in store.batches(snapshot)) == ROWS
    return time.perf_counter() - started


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as folder:
        store = OfflineStore(Path(folder)).view("vectors")
        chain = chained(store, np.random.default_rng(0))
        whole = compacted(store, chain)
        times = [(read_s(store, chain), read_s(store, whole)) for _ in range(ROUNDS)]
    through, alone = (statistics.median(t[i] for t in times) for i in (0, 1))
    report(
        "store_chain",
        [
            f"{ROWS:,} × {DIM} float16 through {DELTAS} deltas: {ROWS / through:,.0f} rows/s;"
            f" compacted: {ROWS / alone:,.0f} rows/s; ratio {alone / through:.2f}"
        ],
        {"chain_s": through, "compacted_s": alone, "ratio": alone / through},
    )


if __name__ == "__main__":
    main()
