"""Table files: writing one from Parquet, against decoding the same Parquet alone and against an
LMDB file of the same rows; reading keys from it, and from the store over it to an Arrow table,
against bare LMDB gets. Bytes a row of both. Where lmdb is not installed, it says so and measures
table files alone.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import DIM, VIEW, cpu_s, fill, median_us, report
from precompute.store.answers.lookup import Lookup
from precompute.store.online import kernels
from precompute.store.online.codec import RowCodec
from precompute.store.online.kernels import RowBatch
from precompute.store.online.table_file import TableFile, TableWriter
from precompute.store.online.table_store import TableStore

HAS_LMDB = find_spec("lmdb") is not None
ROWS = 150_000
"""As many as LMDB takes in one sorted chunk: of more, pages are split, and its reads slow down by a
half."""

PART_ROWS = 50_000
ROUNDS = 5
MEMORY_BYTES = 2**30
SORT_BYTES = 256 * 2**20
"""Rows sorted at once before they go into LMDB, which fills its pages by that."""

CODEC = RowCodec(VIEW)


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines, figures = writing(folder)
        more_lines, more_figures = reading(folder)
    if not HAS_LMDB:
        lines.append("skipped: lmdb is not installed")
    report("online_table", lines + more_lines, figures | more_figures)


# ---- writing


def writing(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Rows/s, side by side; leaves rows.table and rows.mdb."""
    parts = [write_part(folder / f"part-{at}.parquet", at) for at in range(0, ROWS, PART_ROWS)]
    works: dict[str, Callable[[], None]] = {
        "decode": lambda: decode_alone(parts),
        "table": lambda: to_table(parts, folder / "rows.table"),
    }
    if HAS_LMDB:
        works["lmdb"] = lambda: to_lmdb(parts, folder / "rows.mdb")
    seconds: dict[str, list[float]] = {kind: [] for kind in works}
    computed: dict[str, list[float]] = {kind: [] for kind in works}
    for _ in range(ROUNDS):
        for kind, work in works.items():
            started, used = time.perf_counter(), cpu_s()
            work()
            seconds[kind].append(time.perf_counter() - started)
            computed[kind].append(cpu_s() - used)
    wall = {kind: statistics.median(values) for kind, values in seconds.items()}
    cpu = {kind: statistics.median(values) for kind, values in computed.items()}
    sizes = {file.suffix[1:]: file.stat().st_size / ROWS for file in folder.glob("rows.*")}
    lines = [
        (
            f"Parquet → table file: {ROWS / wall['table']:,.0f} rows/s of {DIM} float32"
            f" ({1e6 * cpu['table'] / ROWS:.1f} µs CPU a row); decoding alone"
            f" {ROWS / wall['decode']:,.0f} ({1e6 * cpu['decode'] / ROWS:.1f}), ratio"
            f" {wall['decode'] / wall['table']:.2f}"
        ),
        f"bytes a row: table file {sizes['table']:,.0f}",
    ]
    figures: dict[str, Any] = {
        "rows": ROWS,
        "write_s": wall,
        "write_cpu_s": cpu,
        "to_decoding": wall["decode"] / wall["table"],
        "row_bytes": sizes,
    }
    if "lmdb" in wall:
        figures["to_lmdb"] = wall["lmdb"] / wall["table"]
        lines[0] += (
            f"; → LMDB {ROWS / wall['lmdb']:,.0f} ({1e6 * cpu['lmdb'] / ROWS:.1f}), ratio"
            f" {figures['to_lmdb']:.2f}"
        )
        lines[1] += f", LMDB {sizes['mdb']:,.0f}"
    return lines, figures


def write_part(path: Path, start: int) -> Path:
    """A part as a run writes it, but for the compression of vectors, which random ones have no use
    for."""
    rng = np.random.default_rng(start)
    flat = pa.array(rng.random(PART_ROWS * DIM, dtype=np.float32))
    columns = {
        "id": pa.array(np.arange(start, start + PART_ROWS)),
        "vector": pa.FixedSizeListArray.from_arrays(flat, DIM),
        "computed_at": pa.array(
            np.full(PART_ROWS, time.time_ns() // 1000), pa.timestamp("us", tz="UTC")
        ),
    }
    pq.write_table(
        pa.table(columns),
        path,
        row_group_size=2**21 // (4 * DIM),
        compression="none",
        use_dictionary=False,
    )
    return path


def decoded(parts: list[Path]) -> Iterator[pa.RecordBatch]:
    """The parts' rows, as the offline store hands them out."""
    for path in parts:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(8192)


def packed(parts: list[Path]) -> Iterator[RowBatch]:
    """The same, as an online store takes them."""
    return (CODEC.row_batch(batch, VIEW.entity, 1) for batch in decoded(parts))


def decode_alone(parts: list[Path]) -> None:
    """The limit."""
    for _ in decoded(parts):
        pass


def to_table(parts: list[Path], path: Path) -> None:
    """As the table store loads a segment."""
    path.unlink(missing_ok=True)
    with TableWriter(path, {}, MEMORY_BYTES) as writer:
        for batch in packed(parts):
            writer.add(batch)
        writer.finish()


def to_lmdb(parts: list[Path], path: Path) -> None:
    """Sorted in chunks and appended, which is the fastest way into LMDB, and synced once."""
    import lmdb

    path.unlink(missing_ok=True)
    with contextlib.closing(
        lmdb.open(str(path), subdir=False, map_size=2**38, sync=False, metasync=False, lock=False)
    ) as env:
        chunk: list[tuple[bytes, memoryview]] = []
        for batch in packed(parts):
            chunk += zip(map(bytes, batch.keys.strings()), batch.rows.strings(), strict=True)
            if len(chunk) * batch.rows.size_bytes > SORT_BYTES * len(batch):
                put(env, chunk)
                chunk = []
        put(env, chunk)
        env.sync(True)


def put(env: Any, rows: list[tuple[bytes, memoryview]]) -> None:
    """One sorted chunk; the first one is appended."""
    rows.sort(key=itemgetter(0))
    with env.begin(write=True) as txn:
        txn.cursor().putmulti(rows, append=not env.stat()["entries"])


# ---- reading


def reading(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """µs of a request of 1, 100 and 500 keys."""
    works: dict[str, Callable[[list[str]], Any]] = {}
    if HAS_LMDB:
        works["bare LMDB gets"] = bare_gets(folder / "rows.mdb")
    for kind, native in {"plain Python": None, "C": kernels.native}.items():
        if kind != "C" or native is not None:
            works[f"table file, {kind}"] = partial_read(folder / "rows.table", native)
            store = TableStore(folder / kind)
            fill(store, ROWS)
            works[f"Lookup.get, {kind}"] = with_kernels(native, Lookup(store))
    rng = np.random.default_rng(1)
    lines, figures = [], {}
    for count in (1, 100, 500):
        requests = [[str(i) for i in rng.integers(0, ROWS, count)] for _ in range(200)]
        times: dict[str, list[float]] = {kind: [] for kind in works}
        for _ in range(ROUNDS):  # side by side, so that a noisy neighbour hits all of them
            for kind, work in works.items():
                times[kind].append(median_us(work, requests))
        best = {kind: min(values) for kind, values in times.items()}
        (first, limit), *_ = best.items()
        told = "; ".join(f"{kind} {us:.1f} µs ({us / limit:.2f})" for kind, us in best.items())
        lines.append(f"{count} keys × {DIM} float32, µs (times {first}): {told}")
        figures[f"read_{count}_us"] = best
    return lines, figures


def bare_gets(path: Path) -> Callable[[list[str]], Any]:
    """Rows in one buffer, by LMDB alone."""
    import lmdb

    env = lmdb.open(str(path), subdir=False, readonly=True, lock=False, readahead=False)

    def bare(keys: list[str]) -> Any:
        with env.begin(buffers=True) as txn:
            return np.frombuffer(b"".join([txn.get(key.encode(), b"") for key in keys]), np.uint8)

    return bare


def partial_read(path: Path, native: Any) -> Callable[[list[str]], Any]:
    """Verified rows in one buffer."""
    before, kernels.native = kernels.native, native
    file = TableFile(path)
    kernels.native = before

    def read(keys: list[str]) -> Any:
        before, kernels.native = kernels.native, native
        packed_keys, hashed = kernels.pack([key.encode() for key in keys])
        rows, _ = file.records.read(packed_keys, hashed)
        states, _ = kernels.verified(
            rows, hashed, CODEC.schema_tag, [1], CODEC.fixed_bytes, exact=True
        )
        assert (states == kernels.FOUND).all()
        kernels.native = before
        return rows

    return read


def with_kernels(native: Any, lookup: Lookup) -> Callable[[list[str]], Any]:
    """Answers in an Arrow table."""

    def get(keys: list[str]) -> Any:
        before, kernels.native = kernels.native, native
        table = lookup.get(VIEW.name, keys)
        kernels.native = before
        return table

    return get


if __name__ == "__main__":
    main()
