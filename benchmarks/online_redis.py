"""Redis: loading from Parquet against what the server takes from redis-benchmark and from a
redis-py pipeline; reading keys against a bare MGET; both with a cluster; narrow rows in buckets
against a key each. Fresh servers each round.

    python -m benchmarks.online_redis [rows]
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis

from benchmarks.common import DIM, SEGMENT, VIEW, cpu_s, report
from benchmarks.online_table import CODEC, PART_ROWS, decoded, packed, write_part
from precompute.engine.ahead import Ahead, StageTime
from precompute.jobs.run.loader import AHEAD_BYTES
from precompute.plugins.redis.store import RedisStore
from precompute.plugins.redis.tests.processes import RedisCluster, RedisProcess
from precompute.store.answers.lookup import Lookup
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.online import kernels
from precompute.store.online.codec import RowCodec
from precompute.store.online.kernels import Packed, RowBatch
from precompute.store.online.online_store import Pointer

ROWS = 300_000
NARROW_ROWS, READS = 163_840, 200
ROUNDS = 5
PIPELINE = 500
"""SETs per round trip of the redis-py pipeline: more or fewer were slower."""
OPTIONS = ("--appendonly", "no")


def main() -> None:
    """Measure and report."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    binary = shutil.which("redis-server")
    assert binary is not None, "no redis-server on the PATH"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = [write_part(folder / f"part-{at}.parquet", at) for at in range(0, rows, PART_ROWS)]
        sections = [
            loading(binary, folder, parts, rows),
            reading(binary, folder, parts, rows),
            clustered(binary, folder, parts, rows),
            narrow(binary, folder),
        ]
        sections.append(compressions(folder))
    report(
        "online_redis",
        [line for lines, _ in sections for line in lines],
        {k: v for _, of in sections for k, v in of.items()},
    )


# ---- loading


def loading(
    binary: str, folder: Path, parts: list[Path], rows: int
) -> tuple[list[str], dict[str, Any]]:
    """Rows/s, side by side."""
    counts = {"store": rows, "benchmark": rows, "pipeline": PART_ROWS}
    taken: dict[str, list[Taken]] = {kind: [] for kind in counts}
    for number in range(ROUNDS):
        for kind, count in counts.items():
            with _server(binary, folder / f"{kind}-{number}") as process:
                before, own, started = _server_cpu_s(process), cpu_s(), time.perf_counter()
                if kind == "store":
                    with contextlib.closing(RedisStore(process.url())) as store:
                        assert store.load(VIEW.name, SEGMENT, ahead(parts)) == rows
                elif kind == "benchmark":
                    limit(process, rows)
                else:
                    pipelined(process, parts[:1])
                row_s = (time.perf_counter() - started) / count
                client_us, server_us = (
                    1e6 * (cpu_s() - own) / count,
                    1e6 * (_server_cpu_s(process) - before) / count,
                )
                taken[kind].append(Taken(row_s, client_us, server_us))
    rate = {
        kind: 1 / statistics.median(of.row_s for of in rounds) for kind, rounds in taken.items()
    }
    ratios = {
        kind: [
            theirs.row_s / ours.row_s
            for theirs, ours in zip(taken[kind], taken["store"], strict=True)
        ]
        for kind in ("benchmark", "pipeline")
    }
    server = {
        kind: statistics.median(of.server_us for of in rounds) for kind, rounds in taken.items()
    }
    client = {
        kind: statistics.median(of.client_us for of in rounds) for kind, rounds in taken.items()
    }
    pace_us = max(server["store"], client["store"])
    lines = [
        (
            f"Parquet → Redis, {rows:,} rows of {DIM} float32: {rate['store']:,.0f} rows/s;"
            f" redis-benchmark SET -P 100 -c 50, as many and as large: {rate['benchmark']:,.0f};"
            f" ratio {_range(ratios['benchmark'])}"
        ),
        (
            f"redis-py pipeline of {PIPELINE} SETs, from the same Parquet: {rate['pipeline']:,.0f}"
            f" rows/s; ratio {_range(ratios['pipeline'])}"
        ),
        (
            f"CPU a row, which neighbours do not change: the server's {server['store']:.1f} µs and"
            f" the client's {client['store']:.1f}; under redis-benchmark the server's"
            f" {server['benchmark']:.1f}; under the pipeline {server['pipeline']:.1f} and"
            f" {client['pipeline']:.1f}, one after the other. With a core for each:"
            f" {server['benchmark'] / pace_us:.2f} of redis-benchmark,"
            f" {(server['pipeline'] + client['pipeline']) / pace_us:.1f} × the pipeline"
        ),
    ]
    return lines, {
        "rows": rows,
        "rows_s": rate,
        "ratios": ratios,
        "server_us": server,
        "client_us": client,
    }


@dataclass(frozen=True)
class Taken:
    """What a row of a load took: seconds, and µs of CPU."""

    row_s: float
    client_us: float
    server_us: float


def ahead(parts: list[Path]) -> Iterator[RowBatch]:
    """Rows as a publishing hands them out: decoded and encoded in a thread."""
    stage = Ahead(
        "publish",
        iter(packed(parts)),
        StageTime(),
        lambda batch: batch.rows.size_bytes,
        AHEAD_BYTES,
    )
    with contextlib.closing(stage):
        yield from stage


def limit(server: RedisProcess, rows: int) -> None:
    """What a server takes: distinct keys, values as large as rows."""
    command = [
        "redis-benchmark",
        "-p",
        str(server.port),
        "-t",
        "set",
        "-P",
        "100",
        "-c",
        "50",
        "-n",
        str(rows),
        "-r",
        "1000000000",
    ]
    subprocess.run([*command, "-d", str(CODEC.fixed_bytes), "-q"], check=True, capture_output=True)


def pipelined(server: RedisProcess, parts: list[Path]) -> None:
    """The way a program would go that knows the client library."""
    with server.client() as client:
        for batch in packed(parts):
            keys, rows = (
                list(map(bytes, batch.keys.strings())),
                list(map(bytes, batch.rows.strings())),
            )
            for start in range(0, len(keys), PIPELINE):
                pipe = client.pipeline(transaction=False)
                for key, row in zip(
                    keys[start : start + PIPELINE], rows[start : start + PIPELINE], strict=True
                ):
                    pipe.set(b"rows:" + key, row)
                pipe.execute()


# ---- reading


def reading(
    binary: str, folder: Path, parts: list[Path], rows: int
) -> tuple[list[str], dict[str, Any]]:
    """µs of a request of 1, 100 and 500 keys."""
    with (
        _server(binary, folder / "reading") as server,
        contextlib.closing(RedisStore(server.url())) as store,
    ):
        publish(store, parts, rows)
        with server.client() as client:
            prefix = f"precompute:{{}}{VIEW.name}:1:"
            return read(
                store, rows, "MGET", lambda keys: client.mget([prefix + key for key in keys])
            )


def read(
    store: RedisStore, rows: int, peer: str, bare: Callable[[list[str]], Any]
) -> tuple[list[str], dict[str, Any]]:
    """Requests, each to the store, to the lookup over it and to the peer one after the other, so
    that a noisy neighbour hits all of them."""
    lookup = Lookup(store)
    works: dict[str, Callable[[list[str]], Any]] = {
        peer: bare,
        "store": lambda keys: store.read(VIEW.name, [key.encode() for key in keys]),
        "lookup": lambda keys: lookup.get(VIEW.name, keys),
    }
    rng = np.random.default_rng(1)
    lines, figures = [], {}
    for count in (1, 100, 500):
        times: dict[str, list[float]] = {kind: [] for kind in works}
        for number in range(600):
            keys = [str(i) for i in rng.integers(0, rows, count)]
            for kind, work in works.items():
                started = time.perf_counter()
                work(keys)
                if number >= 20:
                    times[kind].append(time.perf_counter() - started)
        median = {kind: 1e6 * statistics.median(values) for kind, values in times.items()}
        worst = {kind: 1e6 * float(np.quantile(values, 0.99)) for kind, values in times.items()}
        told = "; ".join(
            f"{kind} {median[kind]:.0f} (p99 {worst[kind]:.0f})"
            + (
                ""
                if kind == peer
                else (
                    f", ratio {median[peer] / median[kind]:.2f} (p99"
                    f" {worst[kind] / worst[peer]:.2f} ×)"
                )
            )
            for kind in works
        )
        lines.append(f"{count} keys × {DIM} float32, µs: {told}")
        figures[f"{peer}_{count}_us"] = {"median": median, "p99": worst}
    return lines, figures


def publish(store: RedisStore, parts: list[Path], rows: int) -> None:
    """Load, and make live."""
    assert store.load(VIEW.name, SEGMENT, ahead(parts)) == rows
    store.flip(
        Pointer(
            VIEW,
            1,
            1,
            "0" * 64,
            rows,
            rows,
            "now",
            time.time_ns() // 1000,
            segments=(SEGMENT.name,),
        )
    )


# ---- narrow rows


def narrow(binary: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Rows of one to three numbers, in buckets and with a key each: memory, loading and reading,
    each round on fresh servers of both kinds."""
    lines, figures = [], {}
    for columns in (1, 2, 3):
        view = FeatureView(
            "numbers", ("id",), tuple(Feature(f"f{i}", "float64") for i in range(columns)), 60, 0
        )
        codec = RowCodec(view)
        batches = [_numbers(codec, at) for at in range(0, NARROW_ROWS, 8192)]
        rows = sum(map(len, batches))
        taken: dict[str, list[list[float]]] = {"a key each": [], "buckets": []}
        for number in range(ROUNDS):
            for kind, measured in taken.items():
                row_bytes = codec.fixed_bytes if kind == "buckets" else None
                with (
                    _server(binary, folder / f"{kind}-{columns}-{number}") as server,
                    contextlib.closing(RedisStore(server.url())) as store,
                ):
                    store.prepare("numbers", SEGMENT, rows, rows * 60, "", row_bytes)
                    before, used, started = (
                        _server_cpu_s(server),
                        _used_bytes(server),
                        time.perf_counter(),
                    )
                    assert store.load("numbers", SEGMENT, iter(batches)) == rows
                    load_us = 1e6 * (time.perf_counter() - started) / rows
                    measured.append(
                        [
                            (_used_bytes(server) - used) / rows,
                            load_us,
                            1e6 * (_server_cpu_s(server) - before) / rows,
                        ]
                    )
                    store.flip(
                        Pointer(view, 1, 1, "m", rows, rows, "now", None, segments=(SEGMENT.name,))
                    )
                    measured[-1] += [_read_us(store, count) for count in (1, 500, 100)]
                    before = _server_cpu_s(server)
                    _read_us(store, 100)
                    measured[-1].append(1e6 * (_server_cpu_s(server) - before) / (READS * 100))
        names = (
            "bytes",
            "load_us",
            "load_server_us",
            "read_1_us",
            "read_500_us",
            "read_100_us",
            "read_server_key_us",
        )
        of = {
            kind: dict(zip(names, map(statistics.median, zip(*rounds, strict=True)), strict=True))
            for kind, rounds in taken.items()
        }
        ratios = {
            name: statistics.median(
                a[i] / b[i] for a, b in zip(taken["buckets"], taken["a key each"], strict=True)
            )
            for i, name in enumerate(names)
        }
        told = "; ".join(
            f"{name} {of['buckets'][name]:.2f} against {of['a key each'][name]:.2f}"
            f" ({ratios[name]:.2f} ×)"
            for name in names
        )
        lines.append(
            f"rows of {columns} float64 ({codec.fixed_bytes} bytes), {rows:,} of them, in buckets"
            f" against a key each: {told}"
        )
        figures[f"narrow_{columns}"] = of | {"ratios": ratios}
    return lines, figures


def _numbers(codec: RowCodec, at: int) -> RowBatch:
    rng = np.random.default_rng(at)
    columns = {f.name: rng.random(8192) for f in codec.features}
    keys = Packed.of([b"%08d" % i for i in range(at, at + 8192)])
    hashes = kernels.hashes(keys)
    computed_at = np.full(8192, time.time_ns() // 1000)
    return RowBatch(keys, codec.encode(pa.record_batch(columns), hashes, computed_at, 1), hashes)


def _read_us(store: RedisStore, count: int) -> float:
    """Of the quicker half, whose neighbours left it alone."""
    rng, times = np.random.default_rng(count), []
    for _ in range(READS):
        keys = [b"%08d" % i for i in rng.integers(0, NARROW_ROWS, count)]
        started = time.perf_counter()
        store.read("numbers", keys)
        times.append(time.perf_counter() - started)
    return 1e6 * float(np.quantile(times, 0.25))


def _used_bytes(server: RedisProcess) -> int:
    with server.client() as client:
        return int(client.info("memory")["used_memory"])


# ---- a cluster


def clustered(
    binary: str, folder: Path, parts: list[Path], rows: int
) -> tuple[list[str], dict[str, Any]]:
    """Three masters on this machine."""
    (folder / "cluster").mkdir()
    with (
        RedisCluster(binary, folder / "cluster", replicas=False) as cluster,
        contextlib.closing(RedisStore(cluster.url())) as store,
    ):
        started, used = time.perf_counter(), cpu_s()
        publish(store, parts, rows)
        rate, row_us = rows / (time.perf_counter() - started), 1e6 * (cpu_s() - used) / rows
        with redis.RedisCluster("127.0.0.1", cluster.masters[0].port) as client:
            prefix = f"precompute:{{}}{VIEW.name}:1:"
            lines, figures = read(
                store,
                rows,
                "mget_nonatomic",
                lambda keys: client.mget_nonatomic([prefix + key for key in keys]),
            )
    head = f"cluster of 3 masters: {rate:,.0f} rows/s ({row_us:.1f} µs of the client's CPU a row)"
    return [head, *(f"cluster: {line}" for line in lines)], {
        "cluster_rows_s": rate,
        "cluster_row_cpu_us": row_us,
    } | figures


# ---- Parquet


def compressions(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Decoding vectors of embeddings by how they are compressed. Embeddings' numbers are all but
    random in their lower bits; so are these."""
    table = pq.read_table(write_part(folder / "vectors.parquet", 0))
    figures: dict[str, Any] = {}
    for kind in ("zstd", "lz4", "none"):
        path = folder / f"{kind}.parquet"
        pq.write_table(
            table,
            path,
            row_group_size=2**21 // (4 * DIM),
            compression=kind,
            compression_level=1 if kind == "zstd" else None,
            use_dictionary=False,
        )
        used = []
        for _ in range(ROUNDS):
            before = cpu_s()
            for _batch in decoded([path]):
                pass
            used.append(1e6 * (cpu_s() - before) / PART_ROWS)
        figures[kind] = {
            "decode_us": statistics.median(used),
            "row_bytes": path.stat().st_size / PART_ROWS,
        }
    told = "; ".join(
        f"{kind} {of['decode_us']:.1f} µs, {of['row_bytes']:,.0f} bytes"
        for kind, of in figures.items()
    )
    return [f"Parquet, CPU to decode a row of {DIM} float32: {told}"], {"parquet": figures}


# ---- servers


def _server(binary: str, folder: Path) -> RedisProcess:
    folder.mkdir()
    return RedisProcess(binary, folder, *OPTIONS)


def _server_cpu_s(server: RedisProcess) -> float:
    with server.client() as client:
        said = client.info("cpu")
    return float(said["used_cpu_user"] + said["used_cpu_sys"])


def _range(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}–{max(ratios):.2f}]"


if __name__ == "__main__":
    main()
