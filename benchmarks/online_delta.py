"""Publishing: a delta of 1 % against the full publish before it, in time and bytes, to table files,
to Redis, and with a vector index; and what publishing 10 M rows of a score takes in memory. Each
publishing is a process of its own.

With ``chain`` or ``chain_redis``: the mean of 100 deltas of 1 %, and of 100 of 0.1 %, materialized
and published one after the other in one process, against a full run's.

    python -m benchmarks.online_delta [table | redis | index | scores] [rows]
    python -m benchmarks.online_delta [chain | chain_redis] [rows] [deltas]
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import redis
import yaml

from benchmarks import store_plan
from benchmarks.common import child, cpu_s, report, run, settle, stages
from benchmarks.store_plan import CHANGED
from precompute.jobs.config.project import Project
from precompute.plugins.redis.tests.processes import RedisProcess, newest_redis
from precompute.store.online.url import open_online_store

CASES = {
    "table": 5_000_000,
    "redis": 5_000_000,
    "index": 200_000,
    "scores": 10_000_000,
    "chain": 3_000_000,
    "chain_redis": 1_000_000,
}
CHAIN, SHARES = 100, (0.01, 0.001)


def configured(
    folder: Path, rows: int, changed: float, case: str, online: str, step: int = 1
) -> Project:
    """The project of a case, its source written."""
    store_plan.items(folder, rows, changed, "cheap" if case == "scores" else "floats", step)
    path = folder / "views" / "items.yaml"
    view = yaml.safe_load(path.read_text()) | {
        "gates": dict.fromkeys(("constant", "shape", "computed", "moved", "anchor"))
    }
    if case == "index":
        view["index"] = {"on": "vector"}
    path.write_text(yaml.safe_dump(view))
    return settle(folder, online=online)


def live_names(project: Project) -> tuple[str, ...]:
    """Names of the segments that are live."""
    store = project.offline.view("items")
    live = store.log.live()
    assert live is not None
    return store.snapshot(live.snapshot).names


def publish(folder: str) -> None:
    """Publish, and print what it took."""
    project = Project(folder)
    # what a process imports once is no part of a publishing: the store that the URL names; pandas,
    # where that is installed, which nothing of ours needs
    open_online_store(project.online).close()
    pa.array([1])
    before, started = cpu_s(), time.perf_counter()
    done = run(project, "items", "publish")
    figures = {
        "seconds": time.perf_counter() - started,
        "cpu_s": cpu_s() - before,
        "stages_s": done.stages_s,
    }
    upper = bool(live_names(project)[1:])
    # not getrusage's, which begins with what the parent had
    peak_kb = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    print(json.dumps(figures | {"peak_mb": peak_kb // 1024, "upper": upper}))


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
        redis_server = (
            stack.enter_context(RedisProcess(newest_redis(), folder)) if case == "redis" else None
        )
        online = "table:./var/online" if redis_server is None else redis_server.url()
        empty = held_bytes(folder, online)
        run(configured(folder, rows, 0.0, case, online), "items", "materialize")
        full = child("online_delta", "--publish", folder)
        full_bytes = held_bytes(folder, online) - empty
        figures: dict[str, Any] = {"rows": rows, "full": full, "full_bytes": full_bytes}
        if case != "scores":
            run(configured(folder, rows, CHANGED, case, online), "items", "materialize")
            delta = child("online_delta", "--publish", folder)
            assert delta["upper"]
            delta_bytes = held_bytes(folder, online) - empty - full_bytes
            figures |= {"delta": delta, "delta_bytes": delta_bytes}
            figures |= {
                "ratio": delta["seconds"] / full["seconds"],
                "cpu_ratio": delta["cpu_s"] / full["cpu_s"],
            }
            figures |= {"bytes_ratio": delta_bytes / full_bytes}
    return figures


def chained(case: str, rows: int, share: float, deltas: int) -> dict[str, Any]:
    """What so many deltas take, one after the other, against a full run's, in seconds and in
    seconds of CPU."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_server = (
            stack.enter_context(RedisProcess(newest_redis(), folder))
            if case == "chain_redis"
            else None
        )
        online = "table:./var/online" if redis_server is None else redis_server.url()
        took: list[tuple[float, float]] = []
        cpu: list[tuple[float, float]] = []
        upper, stages = 0, dict[str, float]()
        for step in range(deltas + 1):
            project = configured(folder, rows, share if step else 0.0, case, online, step)
            marks = [cpu_s()]
            parts = []
            for name in ("materialize", "publish"):
                parts.append(run(project, "items", name))
                marks.append(cpu_s())
            took.append((parts[0].seconds, parts[1].seconds))
            cpu.append((marks[1] - marks[0], marks[2] - marks[1]))
            upper = max(upper, len(live_names(project)[1:]))
            for part in parts if step else ():
                for name, seconds in part.stages_s.items():
                    stages[f"{part.command} {name}"] = (
                        stages.get(f"{part.command} {name}", 0.0) + seconds / deltas
                    )
    means, cpu_means = (
        [sum(each[i] for each in of[1:]) / deltas for i in (0, 1)] for of in (took, cpu)
    )
    ratios = {
        "materialize_ratio": means[0] / took[0][0],
        "publish_ratio": means[1] / took[0][1],
        "materialize_cpu_ratio": cpu_means[0] / cpu[0][0],
        "publish_cpu_ratio": cpu_means[1] / cpu[0][1],
    }
    return {
        "rows": rows,
        "share": share,
        "full": [*took[0]],
        "full_cpu": [*cpu[0]],
        "mean": means,
        "mean_cpu": cpu_means,
        "most_upper": upper,
        "stages_s": stages,
        "took_s": took,
        "took_cpu_s": cpu,
    } | ratios


def main_chain(case: str, rows: int, deltas: int = CHAIN) -> None:
    """Measure and report a chain."""
    found = [chained(case, rows, share, deltas) for share in SHARES]
    report(
        f"online_delta_{case}",
        [
            f"{case}, {m['rows']:,} rows, {deltas} deltas of {m['share']:.1%}: mean publish"
            f" {m['publish_ratio']:.3f} of a full one ({m['mean'][1]:.3f} of {m['full'][1]:.2f} s),"
            f" {m['publish_cpu_ratio']:.3f} of its CPU ({m['mean_cpu'][1]:.3f} of"
            f" {m['full_cpu'][1]:.2f} s),"
            f" materialize {m['materialize_ratio']:.2f} ({m['mean'][0]:.2f} of {m['full'][0]:.2f}"
            f" s), {m['materialize_cpu_ratio']:.2f} of its CPU; at most"
            f" {m['most_upper']} upper segments\n  " + stages(m["stages_s"], 3)
            for m in found
        ],
        {f"{m['share']:.1%}": m for m in found},
    )


def main() -> None:
    """Measure and report."""
    asked = sys.argv[1:]
    if asked and asked[0].startswith("chain"):
        numbers = [*map(int, asked[1:])] or [CASES[asked[0]]]
        main_chain(asked[0], *numbers)
        return
    cases = (
        {asked[0]: int(asked[1]) if len(asked) > 1 else CASES[asked[0]]}
        if asked
        else {case: n for case, n in CASES.items() if not case.startswith("chain")}
    )
    found = {case: measured(case, rows) for case, rows in cases.items()}
    lines = []
    for case, m in found.items():
        full = m["full"]
        lines.append(
            f"{case}, {m['rows']:,} rows: {full['seconds']:.1f} s, {full['cpu_s']:.1f} s of CPU,"
            f" {full['peak_mb']:,} MB at its peak, {m['full_bytes'] / m['rows']:.0f} bytes a row"
        )
        if "delta" in m:
            lines.append(
                f"  a delta of {CHANGED:.0%}: {m['ratio']:.3f} of its time"
                f" ({m['delta']['seconds']:.2f} s), {m['cpu_ratio']:.3f} of its CPU,"
                f" {m['bytes_ratio']:.3f} of its bytes"
            )
        lines += [
            f"  {what}: {stages(m[what]['stages_s'])}" for what in ("full", "delta") if what in m
        ]
    report("online_delta", lines, found)
    for case in () if asked else ("chain", "chain_redis"):
        main_chain(case, CASES[case])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--publish"]:
        publish(sys.argv[2])
    else:
        main()
