"""A service of three views, 100 entities, in process: ours against Feast 0.67's by its SDK, over
the rows of the same committed snapshots. Both over one Redis, then Feast over SQLite and we over
table files. The two take turns, request by request, each in a process of its own; every value must
be equal bit by bit.

    python -m benchmarks.service_feast [rows] [requests]

Feast runs by the interpreter that :mod:`benchmarks.online_feast` names.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import numbers, report, run, settle
from benchmarks.online_feast import REPOSITORY, STORES, feast_python
from benchmarks.serve_service import KEYS, SERVICE, VIEWS, published
from precompute.plugins.redis.tests.processes import RedisProcess, newest_redis
from precompute.store.answers.lookup import Lookup

ROWS, REQUESTS = 20_000, 200
PEER = REPOSITORY / "benchmarks" / "peers" / "feast_service.py"
THREE = {name: shapes for name, shapes in VIEWS.items() if name != "picks"}


def feast_of(folder: Path, kind: str, redis: str, python: str) -> subprocess.Popen[str]:
    """Feast's process, which materializes first."""
    views = {}
    for name, shapes in THREE.items():
        (parts,) = (folder / "var" / name / "data").iterdir()
        views[name] = {
            "parts": str(parts),
            "features": {feature: shape.get("dim", 0) for feature, shape in shapes.items()},
        }
    online: dict[str, Any] = {"type": "sqlite", "path": str(folder / "feast.db")}
    if kind == "Redis":
        online = {
            "type": "redis",
            "connection_string": redis.removeprefix("redis://").partition("/")[0],
            "skip_dedup": True,
        }
    command = [python, str(PEER), str(folder), json.dumps(views), json.dumps(online)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def said(process: subprocess.Popen[str]) -> Any:
    """The next line of JSON that a process prints."""
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            return json.loads(line)
    sys.exit("Feast's process ended without an answer")


def measured(
    folder: Path, kind: str, redis: str, python: str, keys: list[list[int]]
) -> dict[str, list[float]]:
    """Side → seconds of each request, and of CPU."""
    project = settle(folder, online=redis if kind == "Redis" else "table:./var/online")
    for name in THREE:
        run(project, name, "publish", reload=True)
    seconds: dict[str, list[float]] = {"feast": [], "ours": [], "feast CPU": [], "ours CPU": []}
    lookup = Lookup.open(project.online, project.root)
    service = project.service(SERVICE)
    feast = feast_of(folder, kind, redis, python)
    assert feast.stdin is not None
    with contextlib.closing(lookup), feast:
        theirs, ours = said(feast), lookup.service(service, {"id": keys[0]})
        for view, shapes in THREE.items():
            for name in shapes:
                mine = np.array(ours[f"{view}__{name}"].to_pylist(), np.float32)
                np.testing.assert_array_equal(
                    np.array(theirs[f"{view}__{name}"], np.float32).view(np.uint32),
                    mine.view(np.uint32),
                )
        for number, some in enumerate(keys):
            print(number, file=feast.stdin, flush=True)
            took_s, cpu_s = said(feast)
            started, used = time.perf_counter(), time.process_time()
            lookup.service(service, {"id": some})
            ours_s, ours_cpu_s = time.perf_counter() - started, time.process_time() - used
            for side, value in zip(seconds, (took_s, ours_s, cpu_s, ours_cpu_s), strict=True):
                seconds[side].append(value)
        feast.stdin.close()
    return seconds


def main() -> None:
    """Measure and report."""
    rows, requests = numbers(ROWS, REQUESTS)
    python, found = feast_python(), dict[str, Any]()
    keys = np.random.default_rng(1).integers(0, rows, (requests, KEYS))
    lines = [
        f"{KEYS} of {rows:,} entities, three views of 384 and 64 float32 and 8 numbers; medians of"
        f" {requests} requests, in turn"
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        published(folder, rows, THREE)
        np.save(folder / "requests.npy", keys)
        for kind, peer in STORES.items():
            with RedisProcess(newest_redis(), folder) as redis:
                seconds = measured(folder, kind, redis.url(), python, keys.tolist())
            ms = {side: statistics.median(times) * 1e3 for side, times in seconds.items()}
            found[kind] = {
                "ms": ms,
                "ratio": ms["feast"] / ms["ours"],
                "cpu_ratio": ms["feast CPU"] / ms["ours CPU"],
            }
            lines.append(
                f"{kind}: Lookup.service {ms['ours']:.3f} ms, Feast's"
                f" get_online_features().to_dict() over {peer} {ms['feast']:.1f}:"
                f" {found[kind]['ratio']:.1f} ×, by CPU of the process"
                f" {found[kind]['cpu_ratio']:.1f} × ({ms['feast CPU']:.2f} against"
                f" {ms['ours CPU']:.3f})"
            )
    report("service_feast", lines, {"rows": rows, "requests": requests, "stores": found})


if __name__ == "__main__":
    main()
