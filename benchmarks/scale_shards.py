"""Shards: what a run of workers takes against one run here, in CPU seconds and by the clock; with
``--ray`` also what actors of Ray take beyond plain processes.

All of a run's processes count: the run, its workers, and of Ray its nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import cpu, report

ROWS, VECTORS, BUSY, BUSY_S = 10_000_000, 8_000_000, 600, 0.1
"""Cheap rows, vectors of 64 floats, and rows of a tenth of a second each."""
TURNS = 3
TICKS = os.sysconf("SC_CLK_TCK")


class Cheap:
    """One product a row."""

    def fingerprint(self) -> str:
        return "cheap"

    def compute(self, batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
        return {"double": 2 * np.asarray(batch.column("x"))}


class Wide(Cheap):
    """64 floats a row."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
        x = np.asarray(batch.column("x")).astype(np.float32)
        return {"vector": x[:, None] + np.arange(64, dtype=np.float32)}


class Busy(Cheap):
    """A tenth of a second of computing a row."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
        until = time.process_time() + BUSY_S * batch.num_rows
        while time.process_time() < until:
            sum(range(10_000))
        return super().compute(batch)


def project(folder: Path, model: str, rows: int, features: dict[str, Any]) -> None:
    """A project of one view over so many rows."""
    (folder / "views").mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(0).normal(size=rows)
    pq.write_table(pa.table({"id": np.arange(rows), "x": x}), folder / "data.parquet")
    view = {
        "name": "rows",
        "entity": ["id"],
        "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
        "model": {"use": f"benchmarks.scale_shards:{model}"},
        "features": features,
        "ttl": "1d",
    }
    (folder / "views" / "rows.yaml").write_text(json.dumps(view))


def run(folder: Path, command: str, engine: str = "", shards: int = 0) -> tuple[float, float]:
    """CPU and wall seconds of a full run, its workers included."""
    path = folder / "views" / "rows.yaml"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shards": shards or None}))
    (folder / "project.yaml").write_text(
        f"root: ./var\nonline: table:./online\nvars: {{data: ./}}\nengine: {engine}\n"
    )
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "precompute.jobs.cli", "-c", str(folder), command, "rows", "--full"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, time.monotonic() - began


def in_turns(folder: Path, command: str, ways: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """Medians of CPU and wall seconds by each way."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, (engine, shards) in ways.items():
            taken[name].append(run(folder, command, engine, shards))
    medians = {name: np.median(np.array(times), axis=0) for name, times in taken.items()}
    return {
        name: {"cpu_s": round(float(cpu_s), 2), "seconds": round(float(s), 2)}
        for name, (cpu_s, s) in medians.items()
    }


def on_ray(folder: Path) -> dict[str, Any]:
    """A minute's job by two plain processes and by two actors, with what Ray's own
    processes took meanwhile."""
    # read when it is imported
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    from ray.cluster_utils import Cluster

    quiet: dict[str, Any] = {
        "num_cpus": 1,
        "include_dashboard": False,
        "object_store_memory": 80 * 2**20,
    }
    plain = run(folder, "materialize", "{workers: 2}", 4)
    cluster: Any = Cluster(initialize_head=True, head_node_args=quiet)
    cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        pids = [
            process.process.pid
            for node in cluster.list_all_nodes()
            for processes in node.all_processes.values()
            for process in processes
        ]
        with seen_s(pids) as ticks:
            coordinator_s, seconds = run(folder, "materialize", "{on: ray, workers: 2}", 4)
        whole_s = coordinator_s + sum(last - first for first, last in ticks.values()) / TICKS
    finally:
        cluster.shutdown()
    return {
        "plain": {"cpu_s": round(plain[0], 2), "seconds": round(plain[1], 2)},
        "ray": {"cpu_s": round(whole_s, 2), "seconds": round(seconds, 2)},
    }


@contextmanager
def seen_s(pids: list[int]) -> Iterator[dict[int, tuple[int, int]]]:
    """Clock ticks of processes and all below them, at the beginning and when last seen; looked at
    often, since who reaps whom is Ray's."""
    ticks: dict[int, tuple[int, int]] = {}
    over = threading.Event()

    def look(begins: bool) -> None:
        stats = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            # it may end in between
            with suppress(OSError):
                stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
        wanted = set(pids)
        while more := {pid for pid, stat in stats.items() if int(stat[1]) in wanted} - wanted:
            wanted |= more
        for pid in wanted & stats.keys():
            own = int(stats[pid][11]) + int(stats[pid][12])
            ticks[pid] = ticks.get(pid, (own if begins else 0, 0))[0], own

    def watch() -> None:
        while not over.wait(0.2):
            look(False)

    look(True)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield ticks
    finally:
        over.set()
        watcher.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ray", action="store_true", help="only what Ray adds (a minute)")
    parser.add_argument("--rows", type=int, default=ROWS)
    arguments = parser.parse_args()
    # nodes of Ray find the models of this file, too
    os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)
    figures: dict[str, Any] = {"cpu": cpu(), "rows": arguments.rows}
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.ray:
            project(folder, "Busy", BUSY, {"double": {"dtype": "float64"}})
            figures["ray"] = on_ray(folder)
            taken = figures["ray"]
            lines.append(
                f"by Ray {taken['ray']['cpu_s']} CPU s, by plain processes"
                f" {taken['plain']['cpu_s']}: {taken['ray']['cpu_s'] / taken['plain']['cpu_s']:.3f}"
            )
        else:
            ways = {"alone": ("{workers: 0}", 0), "one worker": ("{workers: 1}", 8)}
            ways["two workers"] = ("{workers: 2}", 8)
            for what, model, rows, features in (
                ("cheap", "Cheap", arguments.rows, {"double": {"dtype": "float64"}}),
                ("wide", "Wide", VECTORS, {"vector": {"dtype": "float32", "dim": 64}}),
            ):
                project(folder / what, model, rows, features)
                command = "run" if what == "cheap" else "materialize"
                taken = figures[what] = in_turns(folder / what, command, ways)
                alone = taken["alone"]
                for way in ("one worker", "two workers"):
                    lines.append(
                        f"{what}, {rows:,} rows, {way}: {taken[way]['cpu_s']} CPU s against"
                        f" {alone['cpu_s']} ({taken[way]['cpu_s'] / alone['cpu_s']:.2f} ×),"
                        f" {taken[way]['seconds']} s against {alone['seconds']}"
                        f" ({alone['seconds'] / taken[way]['seconds']:.2f} × as fast)"
                    )
    report("scale_shards", lines, figures)


if __name__ == "__main__":
    main()
