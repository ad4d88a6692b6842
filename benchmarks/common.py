"""What the benchmarks share: projects and runs, a store of random vectors, figures of a process,
and the report."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import yaml

from precompute.store.feature_view import Feature, FeatureView
from precompute.store.online.codec import RowCodec
from precompute.store.online.kernels import Rows
from precompute.store.online.online_store import OnlineStore, Pointer, Segment

if TYPE_CHECKING:
    from precompute.jobs.config.project import Project
    from precompute.store.offline.runs import Report

RESULTS = Path(__file__).parent / "results"
ROWS = 100_000
DIM = 384

SEGMENT = Segment(1, "0" * 64)
VIEW = FeatureView(
    "vectors", ("id",), (Feature("vector", "float32", DIM),), ttl_s=86400, stale_for_s=86400
)


def write_project(folder: Path, views: Mapping[str, Mapping[str, Any]], **settings: Any) -> Project:
    """A project: its views by name, with the key ``id`` and a TTL of a day where they say nothing
    else; root, table files and ``${data}`` in its folder where ``settings`` say nothing else."""
    from precompute.jobs.config.project import Project

    (folder / "views").mkdir(parents=True, exist_ok=True)
    base = {"root": "./var", "online": "table:./var/online", "vars": {"data": "./"}}
    (folder / "project.yaml").write_text(yaml.safe_dump(base | settings))
    for name, view in views.items():
        whole = {"name": name, "entity": ["id"], "ttl": "1d"} | dict(view)
        (folder / "views" / f"{name}.yaml").write_text(yaml.safe_dump(whole))
    return Project(folder)


def settle(folder: Path, **settings: Any) -> Project:
    """The project of a folder, with these settings in place of its own."""
    from precompute.jobs.config.project import Project

    path = folder / "project.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | settings))
    return Project(folder)


def run(project: Project, view: str, command: str = "run", **options: Any) -> Report:
    """A run of a view, which must come to its end; ``options`` as of
    :class:`precompute.jobs.run.rows.plan.RunOptions`."""
    from precompute.jobs.run.command_process import Silent
    from precompute.jobs.run.rows.plan import RunOptions
    from precompute.jobs.run.run_view import run_view

    done = run_view(project, view, Silent(), RunOptions(command, **options))
    assert done.status == ("committed" if command == "materialize" else "published"), done
    return done


def run_by_command(folder: Path, *views: str) -> None:
    """Run views by the command line, in processes of their own."""
    for view in views:
        command = [sys.executable, "-m", "precompute.jobs.cli", "-c", str(folder), "run", view]
        subprocess.run(command, check=True, capture_output=True)


def child(module: str, *arguments: object) -> Any:
    """The JSON of the last line that a benchmark prints as a process of its own."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def numbers(*defaults: int) -> tuple[int, ...]:
    """The command line's whole numbers, and these for those that it leaves out."""
    given = [int(argument) for argument in sys.argv[1:]]
    return (*given, *defaults[len(given) :])


def stages(seconds: Mapping[str, float], digits: int = 2) -> str:
    """Seconds of each stage, as a line."""
    return ", ".join(f"{stage} {s:.{digits}f}" for stage, s in seconds.items())


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

    store.load(VIEW.name, SEGMENT, batches())
    store.flip(Pointer(VIEW, 1, 1, "0" * 64, rows, rows, "now", now_us, segments=(SEGMENT.name,)))


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
