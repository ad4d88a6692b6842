"""Writing Parquet parts durably, checksums included, against pyarrow's own ``ParquetWriter`` on the
same batches with the same settings."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import report
from benchmarks.store_chain import DIM, PART_ROWS, rows
from precompute.store.offline.view_store import OfflineStore, ViewStore

PARTS = 6
ROUNDS = 5


def main() -> None:
    """Measure and report."""
    rng = np.random.default_rng(0)
    tables = [rows(np.arange(i * PART_ROWS, (i + 1) * PART_ROWS), rng) for i in range(PARTS)]
    ours, peer, synced = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = OfflineStore(folder).view("vectors")
        for number in range(ROUNDS):
            peer.append(
                timed(lambda n=number: write_with_pyarrow(tables, folder / f"peer-{n}", sync=False))
            )
            ours.append(timed(lambda n=number: write_parts(store, tables, n)))
            synced.append(
                timed(
                    lambda n=number: write_with_pyarrow(tables, folder / f"synced-{n}", sync=True)
                )
            )
    mb = sum(t.nbytes for t in tables) / 1e6
    times = [statistics.median(t) for t in (ours, peer, synced)]
    report(
        "store_write",
        [
            f"parts of {PART_ROWS:,} × {DIM} float16, hashed and fsynced: {mb / times[0]:,.0f}"
            f" MB/s; ParquetWriter, neither: {mb / times[1]:,.0f} MB/s, with fsync:"
            f" {mb / times[2]:,.0f} MB/s; ratio {times[1] / times[0]:.2f}, with fsync"
            f" {times[2] / times[0]:.2f}"
        ],
        {
            "ours_s": times[0],
            "peer_s": times[1],
            "peer_synced_s": times[2],
            "ratio": times[1] / times[0],
        },
    )


def timed(work: object) -> float:
    """Seconds of one call."""
    assert callable(work)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def write_parts(store: ViewStore, tables: list[pa.Table], number: int) -> None:
    """As a run writes them."""
    for i, table in enumerate(tables):
        store.write_part(f"run{number}", f"part-{i:05d}.parquet", table)


def write_with_pyarrow(tables: list[pa.Table], folder: Path, *, sync: bool) -> None:
    """The same bytes, by pyarrow alone."""
    folder.mkdir()
    for i, table in enumerate(tables):
        path = folder / f"part-{i:05d}.parquet"
        with pq.ParquetWriter(
            path, table.schema, compression="zstd", compression_level=1, use_dictionary=[]
        ) as writer:
            writer.write_table(table)
        if sync:
            with path.open("rb+") as file:
                os.fsync(file.fileno())


if __name__ == "__main__":
    main()
