"""What the benchmarks share: a store of random vectors, medians, and the report."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.store.feature_view import Feature, FeatureView
from precompute.store.online.codec import RowCodec
from precompute.store.online.online_store import Generation, OnlineStore, Pointer
from precompute.store.online.packed import Rows

RESULTS = Path(__file__).parent / "results"
ROWS = 100_000
DIM = 384

VIEW = FeatureView(
    "vectors", ("id",), (Feature("vector", "float32", DIM),), ttl_s=86400, stale_for_s=86400
)


def fill(store: OnlineStore, rows: int = ROWS) -> None:
    """Load ``rows`` random vectors under the keys 0, 1, … and make them live."""
    codec, now_us, rng = RowCodec(VIEW), time.time_ns() // 1000, np.random.default_rng(0)

    def batches() -> Rows:
        for start in range(0, rows, 10_000):
            n = min(10_000, rows - start)
            flat = pa.array(rng.random(n * DIM, dtype=np.float32))
            columns = {
                "id": pa.array(np.arange(start, start + n)),
                "vector": pa.FixedSizeListArray.from_arrays(flat, DIM),
                "computed_at": pa.array(np.full(n, now_us), pa.timestamp("us", tz="UTC")),
            }
            yield codec.row_batch(pa.record_batch(columns), VIEW.entity, 1)

    store.load(VIEW.name, Generation(1, 1), batches())
    store.flip(Pointer(VIEW, 1, 1, "0" * 64, rows, rows, "now", now_us))


def median_us(function: Callable[[Any], Any], arguments: Sequence[Any]) -> float:
    """Median time of one call, µs, after one round to warm up."""
    for argument in arguments:
        function(argument)
    times = []
    for argument in arguments:
        started = time.perf_counter()
        function(argument)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


LIMITS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
"""What lets a CPU compute as an older one, or by fewer bits."""


def cpu() -> str:
    """The capability that torch uses here, what else the CPU has that decides a figure, and what
    keeps it from being used."""
    import torch

    info = Path("/proc/cpuinfo")
    known = (
        set(info.read_text().partition("flags")[2].partition("\n")[0].split())
        if info.is_file()
        else set()
    )
    names = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
    flags = " ".join(name for name in names if name in known)
    limits = " ".join(f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ)
    only = f", of which no more is used than {limits} allows" if limits else ""
    return (
        f"{torch.backends.cpu.get_cpu_capability()}; {flags or 'flags unknown'}{only};"
        f" {os.cpu_count()} cores"
    )


def cpu_s() -> float:
    """Seconds that this process has computed, in all its threads: what other processes take of the
    machine does not count."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def report(name: str, lines: Sequence[str], figures: dict[str, Any]) -> None:
    """Print the lines and write the figures."""
    print(f"\n{name}")
    for line in lines:
        print(f"  {line}")
    print(f"  CPU: {cpu()}")
    RESULTS.mkdir(exist_ok=True)
    figures |= {
        "machine": platform.processor() or platform.machine(),
        "cpu": cpu(),
        "python": platform.python_version(),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(figures, indent=1))
