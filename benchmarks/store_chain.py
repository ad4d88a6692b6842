"""Reading a live view of 1 M × 384 float16 through eight segments of 1 %, against the same rows in
one."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.common import report
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.segment import KILLS, Part, Segment, kills_table
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


def commit(
    store: ViewStore,
    run: str,
    parts: list[Part],
    counts: Counts,
    below: tuple[Segment, ...] = (),
    kills: Part | None = None,
) -> Snapshot:
    """A snapshot of written parts, over segments."""
    segments = (*below, Segment(0, run, "recipe", 0, tuple(parts), kills))
    return store.commit(Snapshot(VIEW, run, "model", counts, segments, None, utc_now(), 0, 0))


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
        removed = pa.repeat(False, len(ids))
        table = kills_table(names, pa.array(ids % PART_ROWS), removed, {"id": pa.array(ids)})
        kills = store.write_part(f"delta{number}", KILLS, table)
        counts = Counts(ROWS, DELTA_ROWS, unchanged=ROWS - DELTA_ROWS)
        last = commit(store, f"delta{number}", [part], counts, last.segments, kills)
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
