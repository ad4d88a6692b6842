"""Requests that many views and partitions take of a root in an object store (moto here), and what
becomes of a run while the store is busy: ``status`` of 20 views, on the host that published and on
another; a new day of 48 partitions; looks of a replica; a run beside SlowDown of 5 s and 60 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import report, write_project
from precompute.plugins.object_root.replica import Follower
from precompute.store.disk.storage import unmount_all
from precompute.store.online.url import open_online_store
from tests.object_store import ObjectStore, Request, object_store

VIEWS, PARTITIONS = 20, 48
SQL = "SELECT id, x FROM read_parquet('${data}/data.parquet')"
VIEW: dict[str, Any] = {
    "source": {"sql": SQL},
    "model": {"use": "tests.models:Doubler"},
    "features": {"double": {"dtype": "float64"}},
}


def command(store: ObjectStore, project: Path, *words: str) -> tuple[int, list[Request], str]:
    """Exit status of a command, its requests, and the last line that it said."""
    before = len(store.requests)
    done = subprocess.run(
        [sys.executable, "-m", "precompute.jobs.cli", "-c", str(project), *words],
        cwd=Path(__file__).parents[1],
        env=os.environ | store.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stderr.strip().rpartition("\n")[2]
    return done.returncode, store.requests[before:], said


def project_in(
    store: ObjectStore, folder: Path, views: dict[str, Any], table: pa.Table, prefix: str
) -> Path:
    """A project with its root in the bucket; written again, with another table."""
    store.prefix = prefix
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "data.parquet")
    write_project(folder, views, root=store.root, online="table:./online")
    return folder


def table(changed: int, rows: int = 1000) -> pa.Table:
    return pa.table({"id": range(rows), "x": [float(n + changed) for n in range(rows)]})


def of_status(store: ObjectStore, folder: Path) -> dict[str, Any]:
    """Requests of ``status``, and of a replica's looks within ten seconds."""
    views = {f"v{number:02d}": VIEW for number in range(VIEWS)}
    found: dict[str, Any] = {}
    for changed in (0, 1):
        project = project_in(store, folder / "many", views, table(changed), "many")
        runs = [len(command(store, project, "run", name)[1]) for name in views]
        found["a run beside the others"] = runs[-1]
        for turn in ("just published", "again"):
            found[turn] = len(command(store, project, "status")[1])
    other = project_in(store, folder / "other", views, table(1), "many")
    found["another host"] = len(command(store, other, "status")[1])
    from precompute.jobs.config.project import Project

    scene = Project(other)
    follower = Follower(scene.offline, lambda: open_online_store(scene.online), [*views])
    try:
        time.sleep(5)
        before = len(store.requests)
        time.sleep(10)
        found["a replica's looks, 10 s"] = len(store.requests) - before
    finally:
        follower.stop()
        unmount_all()
    return found


def of_partitions(store: ObjectStore, folder: Path) -> dict[str, Any]:
    """Requests of a new day, and how many of them read manifests."""
    first = date(2026, 1, 1)
    days = [first + timedelta(days=number) for number in range(PARTITIONS + 1)]
    at = [datetime(day.year, day.month, day.day, 1) for day in days for _ in range(5)]
    rows = pa.table({"id": [*range(5)] * len(days), "x": [*map(float, range(len(at)))], "t": at})
    view = VIEW | {
        "source": {"sql": f"{SQL} WHERE t >= $start AND t < $end"},
        "partition": {"by": "day", "start": str(first), "serve": "all"},
        "ttl": "900d",
        "gates": {"first": None, "computed": None, "rows": None, "moved": None},
    }
    project = project_in(store, folder / "days", {"days": view}, rows, "days")
    command(store, project, "backfill", "days", "--from", str(first), "--to", str(days[-2]))
    status, requests, _ = command(store, project, "run", "days", "--partition", str(days[-1]))
    manifests = [one for one in requests if one.method == "GET" and "/manifests/0" in one.path]
    return {"exit status": status, "requests": len(requests), "manifests": len(manifests)}


def of_busy(store: ObjectStore, folder: Path) -> dict[str, Any]:
    """Exit status, seconds and last words of a run while the store says SlowDown."""

    def busy(seconds: float, number: int, of: Callable[[Request], bool]) -> None:
        meant, since_s = 0, 0.0

        def fault(request: Request) -> str | None:
            nonlocal meant, since_s
            meant += of(request)
            since_s = since_s or (time.monotonic() if meant >= number else 0.0)
            on = since_s and time.monotonic() < since_s + seconds
            return "refuse" if on and of(request) else None

        store.fault = fault

    def is_file(request: Request) -> bool:
        return request.method == "PUT" and request.path.endswith((".parquet", ".table"))

    cases: dict[str, tuple[float, int, Callable[[Request], bool]]] = {
        "not busy": (0.0, 1, is_file),
        "5 s of all, at once": (5.0, 1, lambda _: True),
        "5 s of all, later": (5.0, 40, lambda _: True),
        "60 s of files": (60.0, 1, is_file),
        "60 s of all, later": (60.0, 40, lambda _: True),
    }
    found = {}
    for changed, (name, case) in enumerate(cases.items()):
        store.fault = lambda _: None
        project = project_in(store, folder / "busy", {"v": VIEW}, table(changed), "busy")
        busy(*case)
        began = time.monotonic()
        status, _, said = command(store, project, "run", "v")
        found[name] = [status, round(time.monotonic() - began, 1), said if status else ""]
    store.fault = lambda _: None
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name, object_store() as store:
        folder = Path(name)
        results = {
            "status": of_status(store, folder),
            "partitions": of_partitions(store, folder),
            "busy": of_busy(store, folder),
        }
    lines = [f"{part}, {name}: {what}" for part in results for name, what in results[part].items()]
    report("scale_requests", lines, results)


if __name__ == "__main__":
    main()
