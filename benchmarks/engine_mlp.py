"""Parquet → scores of an MLP → Parquet, 2 M rows or as many as its argument says: the engine
against the loop that people write, and against the bare forward, in float32 and, where the CPU
multiplies it, in bfloat16 by packed layers, each against the bare forward of the same precision.

The model looks an id up in an embedding table of 1 M × 64 float32, then 64 → 256 → 256 → 1 with
ReLU. All are measured after loading the model; ours includes reading and hashing the source,
planning, checking, gates and writing the snapshot durably. The loop is pandas and torch: the whole
file in a data frame, 1,024 rows at a time, one write each. The bare forward has its ids in memory
and keeps nothing. A first run is not counted: the accuracy check of a precision is kept for the
next. Beside times stands the processor's time a row, without opening too, and that of the bare
forward by one thread, each round's beside ours: threads that wait for one another spin, most of all
on crowded cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_model, save_file

from benchmarks.common import cpu_s, report, stages, write_project
from precompute.engine.resources import resident_bytes
from precompute.jobs.config.project import Project
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.materialize import materialize
from precompute.jobs.run.report import reporting_run
from precompute.jobs.run.rows.open_view import open_view
from precompute.jobs.run.rows.plan import RunOptions
from precompute.store.offline.runs import Report
from precompute.techniques.machine import has_bf16
from precompute.techniques.onednn import packed
from precompute.techniques.table import words
from precompute.techniques.technique import copied

ROWS = 2_000_000
IDS, DIM, HIDDEN = 1_000_000, 64, 256
ROUNDS = 3
NAIVE_BATCH = 1024
FORWARD_BATCHES = (1024, 2048, 4096, 8192, 16384)


class Scorer(torch.nn.Module):
    """Item ids int64 [rows] → scores float32 [rows, 1]."""

    def __init__(self, ids: int = IDS, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(ids, dim)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(dim, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, 1),
        )

    def forward(self, item: torch.Tensor) -> torch.Tensor:
        """See the class."""
        scores: torch.Tensor = self.mlp(self.embedding(item))
        return scores


def main() -> None:
    """Measure and report."""
    if (
        len(sys.argv) == 4 and sys.argv[1] == "--one"
    ):  # a process of its own, whose peak is what is requested
        _one(Path(sys.argv[2]), sys.argv[3])
        return
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    memory_rows = (rows // 20, rows // 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_items(folder, (rows, *memory_rows))
        sides = {
            variant: _rates(folder, rows, variant)
            for variant in ("fp32-eager", *(["bf16-onednn"] if has_bf16() else []))
        }
        figures: dict[str, Any] = {"rows": rows, "sides": sides}
        for size in memory_rows:
            for kind in ("ours", "opened"):
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.engine_mlp",
                    "--one",
                    str(folder / f"rows{size}"),
                    kind,
                ]
                peak = subprocess.run(
                    command, check=True, capture_output=True, text=True
                ).stdout.split()[-1]
                figures[f"peak_mib_{size}_{kind}"] = int(peak) / 2**20
    small, large = (figures[f"peak_mib_{size}_ours"] for size in memory_rows)
    figures["memory_ratio"] = large / small
    lines = [f"Parquet → scores → Parquet, {rows:,} rows"]
    for variant, side in sides.items():
        lines += [f"{variant}: {line}" for line in _lines(side)]
    opened = figures[f"peak_mib_{memory_rows[0]}_opened"]
    lines.append(
        f"peak memory: {large:,.0f} MiB for {memory_rows[1]:,} rows, {small:,.0f} MiB for"
        f" {memory_rows[0]:,}; ratio {figures['memory_ratio']:.2f} ({opened:,.0f} MiB before the"
        " first row)"
    )
    report("engine_mlp", lines, figures)


def _lines(side: dict[str, Any]) -> list[str]:
    naive, batch = side.get("naive_ratio"), side["forward_batch"]
    return [
        f"{side['rows_per_s']:,.0f} rows/s, {side['ours_cpu_ns']:,.0f} ns CPU a row",
        (
            "pandas and torch, 1,024 rows at a time: not measured"
            if naive is None
            else (
                f"pandas and torch, 1,024 rows at a time: {side['naive_rows_per_s']:,.0f} rows/s;"
                f" ratio {naive:.2f}"
            )
        ),
        (
            f"bare forward, {batch:,} rows at a time: {side['forward_rows_per_s']:,.0f} rows/s;"
            f" ratio {side['forward_ratio']:.2f}"
            f" [{side['forward_ratios'][0]:.2f}–{side['forward_ratios'][-1]:.2f}]; by one thread"
            f" {side['forward_cpu_ns']:,.0f} ns CPU a row; ratio"
            f" {statistics.median(side['cpu_ratios']):.2f}"
            f" [{side['cpu_ratios'][0]:.2f}–{side['cpu_ratios'][-1]:.2f}]"
        ),
        f"largest difference from the bare forward: {side['max_difference']:.1e}",
        f"seconds of each stage: {stages(side['stages_s'])}",
        f"engine: {json.dumps(side['engine'])}",
    ]


def _rates(folder: Path, rows: int, variant: str) -> dict[str, Any]:
    source = folder / f"rows{rows}" / "items.parquet"
    ids = torch.from_numpy(np.array(pq.read_table(source)["item"]))
    reference = Scorer().eval().requires_grad_(False)
    load_model(reference, folder / "scorer.safetensors")
    model = reference if variant == "fp32-eager" else packed(copied(reference, torch.bfloat16))
    naive = _pandas_loop(model, source, folder / "naive.parquet") if model is reference else None
    batch = min(
        FORWARD_BATCHES, key=lambda size: _seconds(lambda: bare(model, ids[: rows // 8], size))
    )
    project = project_of(folder / f"rows{rows}", variant)
    materialized(project)
    times: dict[str, list[float]] = {"ours": [], "naive": [], "forward": []}
    cpu: dict[str, list[float]] = {"ours": [], "forward": []}
    for _ in range(ROUNDS):
        times["forward"].append(_seconds(lambda: bare(model, ids, batch)))
        cpu["forward"].append(
            _cpu_seconds_of_one_thread(lambda: bare(model, ids[: rows // 4], batch)) * 4
        )
        if naive is not None:
            times["naive"].append(_seconds(naive))
        seconds, run, got = materialized(project)
        cpu["ours"].append(sum(run.usage.cpu_s.values()) - run.usage.cpu_s["open"])
        times["ours"].append(seconds)
    rates = {name: rows / statistics.median(seconds) for name, seconds in times.items() if seconds}
    expected = torch.cat([s[:, 0] for s in bare(model, ids, batch)]).float().numpy()
    ratios = sorted(f / o for f, o in zip(times["forward"], times["ours"], strict=True))
    cpu_ratios = sorted(f / o for f, o in zip(cpu["forward"], cpu["ours"], strict=True))
    figures: dict[str, Any] = {
        "rows_per_s": rates["ours"],
        "ours_cpu_ns": statistics.median(cpu["ours"]) / rows * 1e9,
        "forward_rows_per_s": rates["forward"],
        "forward_cpu_ns": statistics.median(cpu["forward"]) / rows * 1e9,
        "forward_batch": batch,
        "forward_ratio": statistics.median(ratios),
        "forward_ratios": ratios,
        "cpu_ratios": cpu_ratios,
        "seconds": times,
        "max_difference": float(np.abs(got - expected).max()),
        "stages_s": run.stages_s,
        "engine": run.engine,
    }
    if naive is not None:
        figures["naive_rows_per_s"] = rates["naive"]
        figures["naive_ratio"] = statistics.median(
            n / o for n, o in zip(times["naive"], times["ours"], strict=True)
        )
    return figures


def materialized(project: Project) -> tuple[float, Report, Any]:
    """(seconds without loading the model, the run, all scores in the source's order)."""
    store = project.offline.view("scores")
    with reporting_run(store, "materialize") as run:
        started = time.perf_counter()
        snapshot = materialize(project, store, RunOptions(full=True), run, Silent())
        seconds = time.perf_counter() - started - run.stages_s["open"]
    return (
        seconds,
        run,
        np.concatenate([np.asarray(b.column("relevance")) for b in store.batches(snapshot)]),
    )


def _open(project: Project) -> None:
    """What a run does before its first row, and what is not counted: loading the model and the hash
    of its weights."""
    open_view(project.view("scores").feature_view(), project.offline, project.home).source.close()


@torch.inference_mode()
def bare(model: torch.nn.Module, ids: torch.Tensor, rows: int) -> list[torch.Tensor]:
    return [model(part) for part in ids.split(rows)]  # type: ignore[no-untyped-call]


def _pandas_loop(model: torch.nn.Module, source: Path, target: Path) -> Callable[[], None] | None:
    """The loop that people write; None where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return None

    def loop() -> None:
        frame = pandas.read_parquet(source)
        writer = None
        with torch.no_grad():
            for start in range(0, len(frame), NAIVE_BATCH):
                part = frame.iloc[start : start + NAIVE_BATCH]
                scores = model(torch.tensor(part["item"].values)).squeeze(1).numpy()
                table = pa.Table.from_pandas(
                    pandas.DataFrame({"id": part["id"].values, "score": scores})
                )
                if writer is None:
                    writer = pq.ParquetWriter(target, table.schema)
                writer.write_table(table)
        assert writer is not None
        writer.close()

    return loop


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _cpu_seconds_of_one_thread(function: Callable[[], object]) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        began = cpu_s()
        function()
        return cpu_s() - began
    finally:
        torch.set_num_threads(threads)


def _one(folder: Path, kind: str) -> None:
    """One run over what lies in a folder, or none of it beyond opening; prints the peak memory in
    bytes."""
    peak, done = 0, threading.Event()

    # Sampled: ru_maxrss begins with the parent's, and the engine starts VmHWM again while it looks
    # for the best batch.
    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, resident_bytes())

    project = project_of(folder)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        if kind == "ours":
            materialized(project)
        else:
            _open(project)
    finally:
        done.set()
        watcher.join()
    print(peak)


def write_items(folder: Path, sizes: Sequence[int]) -> None:
    torch.manual_seed(0)
    save_file(Scorer().state_dict(), folder / "scorer.safetensors")
    for rows in sizes:
        (folder / f"rows{rows}").mkdir()
        item = np.random.default_rng(0).integers(0, IDS, rows)
        pq.write_table(
            pa.table({"id": np.arange(rows), "item": item}),
            folder / f"rows{rows}" / "items.parquet",
        )


def project_of(folder: Path, variant: str = "fp32-eager") -> Project:
    precision, backend = words(variant)
    view = {
        "source": {"sql": "SELECT id, item FROM read_parquet('${data}/items.parquet')"},
        "model": {
            "use": "torch_module",
            "args": {
                "module": "benchmarks.engine_mlp:Scorer",
                "weights": "${data}/../scorer.safetensors",
                "inputs": {"item": "item"},
                "outputs": {"relevance": 0},
                "concurrent": True,
            },
            "precision": precision,
            "backend": backend,
        },
        "features": {"relevance": {"dtype": "float32"}},
    }
    return write_project(folder, {"scores": view})


if __name__ == "__main__":
    main()
