"""Publishing: a delta of 1 % against the full publish before it, in time and bytes, to table files, to Redis, and with a vector index; and what publishing 10 M
rows of a score takes in memory. Each publishing is a process of its own.

    python -m benchmarks.online_delta [table | redis | index | scores] [rows]
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import redis
import yaml

from benchmarks.common import cpu_s, report
from benchmarks.store_plan import CHANGED, write_project
from jobs.config.project import Project
from jobs.pipeline.run import run_view
from jobs.process.job import RunOptions
from jobs.process.progress import Silent
from store.online_url import open_online_store
from tests.redis_process import RedisProcess, newest_redis

CASES = {"table": 5_000_000, "redis": 5_000_000, "index": 200_000, "scores": 10_000_000}


def configured(folder: Path, rows: int, changed: float, case: str, online: str) -> Project:
    """The project of a case, its source written."""
    write_project(folder, rows, changed, "cheap" if case == "scores" else "floats")
    settings = yaml.safe_load((folder / "project.yaml").read_text()) | {"online": online}
    (folder / "project.yaml").write_text(yaml.safe_dump(settings))
    path = folder / "views" / "items.yaml"
    view = yaml.safe_load(path.read_text()) | {"gates": {"moved": None, "duplicates": None, "drift": None}}
    if case == "index":
        view["index"] = {"on": "vector"}
    path.write_text(yaml.safe_dump(view))
    return Project(folder)


def child(folder: str) -> None:
    """Publish, and print what it took."""
    project = Project(folder)
    # what a process imports once is no part of a publishing: the store that the URL names; pandas, where that is installed, which nothing of ours needs
    open_online_store(project.online).close()
    pa.array([1])
    before, started = cpu_s(), time.perf_counter()
    done = run_view(project, "items", Silent(), RunOptions(command="publish"))
    figures = {"seconds": time.perf_counter() - started, "cpu_s": cpu_s() - before, "stages_s": done.stages_s}
    place = project.offline.view("items").refs.live()
    assert place is not None
    overlay = place.place.overlay is not None
    # not getrusage's, which begins with what the parent had
    peak_kb = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    print(json.dumps(figures | {"peak_mb": peak_kb // 1024, "overlay": overlay}))


def published(folder: Path) -> dict[str, Any]:
    """What one publishing took."""
    command = [sys.executable, "-m", "benchmarks.online_delta", "--publish", str(folder)]
    figures: dict[str, Any] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )
    return figures


def held_bytes(folder: Path, online: str) -> int:
    """Bytes in the online store and the indexes."""
    index = sum(path.stat().st_size for path in folder.rglob("var/items/index/*/*"))
    if online.startswith("table:"):
        return index + sum(path.stat().st_size for path in folder.rglob("var/online/items/*.table"))
    client = redis.Redis.from_url(online)
    used = client.info("memory")["used_memory"]
    client.close()
    return index + int(used)


def measured(case: str, rows: int) -> dict[str, Any]:
    """The full publishing of a case, and the delta's."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_server = stack.enter_context(RedisProcess(newest_redis(), folder)) if case == "redis" else None
        online = "table:./var/online" if redis_server is None else redis_server.url()
        empty = held_bytes(folder, online)
        run_view(configured(folder, rows, 0.0, case, online), "items", Silent(), RunOptions(command="materialize"))
        full = published(folder)
        full_bytes = held_bytes(folder, online) - empty
        figures: dict[str, Any] = {"rows": rows, "full": full, "full_bytes": full_bytes}
        if case != "scores":
            run_view(configured(folder, rows, CHANGED, case, online), "items", Silent(), RunOptions(command="materialize"))
            delta = published(folder)
            assert delta["overlay"]
            delta_bytes = held_bytes(folder, online) - empty - full_bytes
            figures |= {"delta": delta, "delta_bytes": delta_bytes}
            figures |= {"ratio": delta["seconds"] / full["seconds"], "cpu_ratio": delta["cpu_s"] / full["cpu_s"]}
            figures |= {"bytes_ratio": delta_bytes / full_bytes}
    return figures


def main() -> None:
    """Measure and report."""
    asked = sys.argv[1:]
    cases = {asked[0]: int(asked[1]) if len(asked) > 1 else CASES[asked[0]]} if asked else CASES
    found = {case: measured(case, rows) for case, rows in cases.items()}
    lines = []
    for case, m in found.items():
        full = m["full"]
        lines.append(
            f"{case}, {m['rows']:,} rows: {full['seconds']:.1f} s, {full['cpu_s']:.1f} s of CPU, {full['peak_mb']:,} MB at its peak, {m['full_bytes'] / m['rows']:.0f} bytes a row"
        )
        if "delta" in m:
            lines.append(
                f"  a delta of {CHANGED:.0%}: {m['ratio']:.3f} of its time ({m['delta']['seconds']:.2f} s), {m['cpu_ratio']:.3f} of its CPU, {m['bytes_ratio']:.3f} of its bytes"
            )
        lines += [
            f"  {what}: " + ", ".join(f"{k} {v:.2f}" for k, v in m[what]["stages_s"].items())
            for what in ("full", "delta")
            if what in m
        ]
    report("online_delta", lines, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--publish"]:
        child(sys.argv[2])
    else:
        main()
