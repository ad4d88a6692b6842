"""Feast 0.67 by its own SDK beside us: the Parquet of one committed snapshot into the online store,
and 100 keys out of it. Feast over Redis and SQLite, we over Redis and table files; a fresh server,
and a process of its own, for each loading. The answers must be equal bit by bit.

    python -m benchmarks.online_feast [rows] [rounds]

Feast's dependencies are not ours: it runs by the interpreter that FEAST_PYTHON names, or else in
.venv-feast, which is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from benchmarks.common import DIM, numbers, report, run, settle
from benchmarks.store_plan import items
from precompute.jobs.config.project import Project
from precompute.plugins.redis.tests.processes import RedisProcess, newest_redis
from precompute.store.answers.lookup import Lookup

ROWS = 50_000
ROUNDS = 3
REQUESTS, KEYS = 100, 100
FEATURES = ("vector", "a", "b", "c")
STORES = {"Redis": "Redis", "table files": "SQLite"}
"""Ours → Feast's."""

REPOSITORY = Path(__file__).parent.parent
PEER = REPOSITORY / "benchmarks" / "peers" / "feast_online.py"


class Columns:
    """``x``, ``price`` → a vector of :data:`DIM` float32 and three numbers."""

    def fingerprint(self) -> str:
        """See :class:`precompute.model.Model`."""
        return "columns"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """See :class:`precompute.model.Model`."""
        x = np.asarray(batch.column("x"), np.float32) + np.asarray(
            batch.column("price"), np.float32
        )
        return {
            "vector": np.sin(x[:, None] * np.arange(1, DIM + 1, dtype=np.float32)),
            "a": x,
            "b": -x,
            "c": x / 2,
        }


def feast_python() -> str:
    """An interpreter that has Feast."""
    if named := os.environ.get("FEAST_PYTHON"):
        return named
    python = REPOSITORY / ".venv-feast" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "feast[redis]==0.67.0"], check=True
        )
    return str(python)


def committed(folder: Path, rows: int) -> Path:
    """The folder of the snapshot's parts; published nowhere yet."""
    items(folder, rows, 0.0)
    path = folder / "views" / "items.yaml"
    features = {"vector": {"dtype": "float32", "dim": DIM}} | {
        name: {"dtype": "float32"} for name in FEATURES[1:]
    }
    model = {"use": "benchmarks.online_feast:Columns"}
    path.write_text(
        yaml.safe_dump(yaml.safe_load(path.read_text()) | {"model": model, "features": features})
    )
    run(Project(folder), "items", "materialize")
    (parts,) = (folder / "var" / "items" / "data").iterdir()
    return parts


def child(folder: Path) -> None:
    """Our side: publish, read, and print the figures, as the peer does."""
    project = Project(folder)
    # pyarrow imports pandas, where there is one, with the first array it is given (0.6 s of CPU);
    # Feast has imported it long since
    pa.array(np.zeros(1))
    started, used = time.perf_counter(), time.process_time()
    run(project, "items", "publish")
    figures = {"load_s": time.perf_counter() - started, "load_cpu_s": time.process_time() - used}
    requests = np.load(folder / "requests.npy").tolist()
    lookup = Lookup.open(project.online)
    answers = pa.concat_tables([lookup.get("items", keys) for keys in requests])
    with (
        pa.OSFile(str(folder / "ours.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, answers.schema) as writer,
    ):
        writer.write_table(answers)
    seconds: dict[str, list[float]] = {"get": [], "get_cpu": []}
    for keys in requests:
        started, used = time.perf_counter(), time.process_time()
        lookup.get("items", keys)
        seconds["get"].append(time.perf_counter() - started)
        seconds["get_cpu"].append(time.process_time() - used)
    lookup.close()
    print(
        json.dumps(
            figures
            | {f"{kind}_us": statistics.median(times) * 1e6 for kind, times in seconds.items()}
        )
    )


def figures_of(command: list[str]) -> dict[str, float]:
    """What a child printed last."""
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def loaded(origin: Path, parts: Path, kind: str, python: str) -> dict[str, dict[str, float]]:
    """Both sides' figures of one round, each over a store of its own."""
    figures = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as servers:
        folder = Path(shutil.copytree(origin, Path(name) / "project"))
        for side in ("feast", "ours"):
            server = (
                servers.enter_context(RedisProcess(newest_redis(), Path(name)))
                if kind == "Redis"
                else None
            )
            url = "table:./var/online" if server is None else server.url()
            if side == "ours":
                settle(folder, online=url)
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.online_feast",
                    "--publish",
                    str(folder),
                ]
            else:
                address = url.removeprefix("redis://").partition("/")[0]
                redis = {"type": "redis", "connection_string": address, "skip_dedup": True}
                online = (
                    redis
                    if kind == "Redis"
                    else {"type": "sqlite", "path": str(folder / "online.db")}
                )
                command = [python, str(PEER), str(folder), str(parts), json.dumps(online)]
            figures[side] = figures_of(command)
        check_equal(folder)
    return figures


def check_equal(folder: Path) -> None:
    """Every value that was read, bit by bit."""
    feast, ours = (
        pa.ipc.open_file(folder / f"{side}.arrow").read_all() for side in ("feast", "ours")
    )
    for name in FEATURES:
        values = [
            pa.compute.list_flatten(table[name]) if name == "vector" else table[name]
            for table in (feast, ours)
        ]
        theirs, mine = (np.asarray(column.to_numpy(), np.float32) for column in values)
        assert len(mine) == REQUESTS * KEYS * (DIM if name == "vector" else 1)
        np.testing.assert_array_equal(theirs.view(np.uint32), mine.view(np.uint32))


def main() -> None:
    """Measure and report."""
    rows, rounds = numbers(ROWS, ROUNDS)
    python = feast_python()
    found: dict[str, list[dict[str, dict[str, float]]]] = {kind: [] for kind in STORES}
    with tempfile.TemporaryDirectory() as name:
        origin = Path(name)
        parts = committed(origin, rows)
        np.save(
            origin / "requests.npy", np.random.default_rng(1).integers(0, rows, (REQUESTS, KEYS))
        )
        for _ in range(rounds):  # side by side, so that a noisy neighbour hits all of them
            for kind in STORES:
                found[kind].append(loaded(origin, parts, kind, python))
    lines, ratios = (
        [
            f"{rows:,} rows of {DIM} float32 and 3 more; medians of {rounds} rounds, and the"
            " ratios' range"
        ],
        {},
    )
    for kind, theirs in STORES.items():
        us = {
            (side, what): statistics.median(figures[side][what] for figures in found[kind])
            for side in ("feast", "ours")
            for what in found[kind][0][side]
        }
        for what in ("load_s", "load_cpu_s", "get_us", "get_cpu_us"):
            each = [figures["feast"][what] / figures["ours"][what] for figures in found[kind]]
            ratios[f"{kind} {what}"] = {
                "median": statistics.median(each),
                "min": min(each),
                "max": max(each),
            }
        told = {
            what: "{median:.1f} × [{min:.1f} to {max:.1f}]".format(**ratio)
            for what, ratio in ratios.items()
        }
        lines += [
            (
                f"{kind}: publish {rows / us['ours', 'load_s']:,.0f} rows/s, Feast's materialize"
                f" into {theirs} {rows / us['feast', 'load_s']:,.0f}; {told[f'{kind} load_s']}, in"
                f" CPU of the process {told[f'{kind} load_cpu_s']}"
            ),
            (
                f"  {KEYS} keys: Lookup.get {us['ours', 'get_us']:,.0f} µs, Feast's"
                f" get_online_features().to_dict() {us['feast', 'get_us']:,.0f} (to_arrow()"
                f" {us['feast', 'to_arrow_us']:,.0f}); {told[f'{kind} get_us']}, in CPU"
                f" {told[f'{kind} get_cpu_us']}"
            ),
        ]
    report("online_feast", lines, {"rows": rows, "rounds": found, "ratios": ratios})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--publish"]:
        child(Path(sys.argv[2]))
    else:
        main()
