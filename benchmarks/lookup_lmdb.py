"""In-process lookups from LMDB: 100 keys × 384 float32 to an Arrow table, against the bare LMDB reads of the same keys."""

from __future__ import annotations

import tempfile
from typing import Any

import lmdb
import numpy as np

from benchmarks.common import ROWS, VIEW, fill, median_us, report
from store.lookup import Lookup
from store.online.lmdb_store import LmdbStore


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as folder:
        store = LmdbStore(folder)
        fill(store)
        lookup = Lookup(store)
        rng = np.random.default_rng(1)
        requests = [[str(i) for i in rng.integers(0, ROWS, 100)] for _ in range(500)]
        env = store._live[VIEW.name].generation.env if VIEW.name in store._live or lookup.get(VIEW.name, ["0"]) else None
        assert isinstance(env, lmdb.Environment)

        def bare(keys: list[str]) -> Any:
            with env.begin(buffers=True) as txn:
                return np.frombuffer(b"".join([txn.get(k.encode(), b"") for k in keys]), np.uint8)

        limit, table, one_row, one_table = [], [], [], []
        for _ in range(5):  # side by side, so that a noisy neighbour hits all of them
            limit.append(median_us(bare, requests))
            table.append(median_us(lambda keys: lookup.get(VIEW.name, keys), requests))
            one_row.append(median_us(lambda keys: lookup.row(VIEW.name, keys[0]), requests))
            one_table.append(median_us(lambda keys: lookup.get(VIEW.name, keys[:1]), requests))
        lookup.close()
    bare_us, t, r, o = (min(v) for v in (limit, table, one_row, one_table))
    report(
        "lookup_lmdb",
        [
            f"100 keys × 384 float32 → Arrow table: {t:.0f} µs = {100 / t * 1e6:,.0f} keys/s",
            f"the bare reads, joined into one matrix:  {bare_us:.0f} µs = {100 / bare_us * 1e6:,.0f} keys/s; ratio {bare_us / t:.2f}",
            f"one key → dict with its freshness: {r:.1f} µs; → Arrow table: {o:.1f} µs",
        ],
        {
            "table_100_us": t,
            "bare_100_us": bare_us,
            "ratio": bare_us / t,
            "keys_per_s": 100 / t * 1e6,
            "row_us": r,
            "table_1_us": o,
        },
    )


if __name__ == "__main__":
    main()
