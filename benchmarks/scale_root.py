"""A root in an object store (moto here): requests of a commit and a publishing at several sizes,
bytes that a delta fetches on a host that has nothing, how soon a replica serves what was published,
and writers that race; and with ``--before FOLDER``, a checkout of an earlier version, what a folder
as root takes now against then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import cpu, report
from benchmarks.store_plan import items
from precompute.jobs.config.project import Project
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.rows.plan import RunOptions
from precompute.jobs.run.run_view import run_view
from precompute.plugins.object_root.replica import Follower
from precompute.plugins.object_root.storage import ObjectStorage
from precompute.store.disk.storage import unmount_all
from precompute.store.online.online_store import OnlineStore
from precompute.store.online.url import open_online_store
from tests.object_store import ObjectStore, object_store

SIZES = (1_000, 100_000, 1_000_000)
LOCAL_RUNS, LOCAL_ROWS = 12, 20_000
PAIRS = 5

WRITERS, RACES = 8, 30

LOCAL = f"""
import json, sys, time, tempfile
from pathlib import Path
from benchmarks.store_plan import items
from precompute.jobs.run.rows.plan import RunOptions
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.run_view import run_view
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as name:
    run_view(items(Path(name), {LOCAL_ROWS}, 0.1), "items", Silent(), RunOptions())
    began = time.process_time()
    for step in range(2, {LOCAL_RUNS} + 2):
        project = items(Path(name), {LOCAL_ROWS}, 0.1, step=step)
        run_view(project, "items", Silent(), RunOptions())
    print(json.dumps(time.process_time() - began))
"""


RACE = """
import contextlib, json, sys, time
from pathlib import Path
from precompute.plugins.object_root.storage import ObjectStorage
from precompute.store.disk.storage import mount
from precompute.store.errors import ConflictError
from precompute.store.offline.log import Log
url, folder, me, races = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
storage = ObjectStorage(url, folder)
mount(folder, storage)
view_log, created, moved = Log(folder / "log", "items"), [], []
began = float(sys.stdin.readline())
for race in range(races):
    time.sleep(max(0.0, began + race / 2 - time.time()))
    with contextlib.suppress(FileExistsError):
        storage.create(folder / f"{race}.json", me.encode())
        created.append(race)
    with contextlib.suppress(ConflictError):
        view_log.move_live(1, expected_epoch=race, reason=me)
        moved.append(race)
    storage.update(folder / "count", lambda data: b"%d" % (1 + int(data or b"0")))
print(json.dumps([created, moved]))
"""


def races(store: ObjectStore, folder: Path) -> dict[str, Any]:
    """Of so many processes that create one object, move one pointer and count, each as often: how
    many races had one winner, and what was counted."""
    url = "s3://bucket/races"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, url, str(folder / f"w{n}"), str(n), str(RACES)],
            cwd=Path(__file__).parents[1],
            env=os.environ | store.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(WRITERS)
    ]
    began = f"{time.time() + 5.0}\n"
    won = [json.loads(writer.communicate(began)[0]) for writer in writers]
    storage = ObjectStorage(url, folder / "seen")
    return {
        "created by one": sum(c == 1 for c in Counter(r for made, _ in won for r in made).values()),
        "moved by one": sum(c == 1 for c in Counter(r for _, moves in won for r in moves).values()),
        "counted": int(storage.read(folder / "seen" / "count")),
    }


def fetched_mb(store: ObjectStore, folder: Path, rows: int) -> dict[str, dict[str, float]]:
    """What a delta of 1 % of rows with 64 floats fetches on a host that has nothing, and the next
    one on the same host, by what it is."""
    root, taken = "s3://bucket/fetched", {}
    for step, name in ((1, "first"), (2, "other"), (3, "other")):
        host = folder / name
        host.mkdir(exist_ok=True)
        project = on(host, root, rows, step, "floats")
        before = len(store.requests)
        run_view(project, "items", Silent(), RunOptions())
        found = Counter[str]()
        for request in store.requests[before:]:
            kinds = {"/data/": "parts", "/online/": "table files"}
            kind = next((kinds[k] for k in kinds if k in request.path), "records")
            found[kind] += request.reply_bytes if request.method == "GET" else 0
        taken[f"{name}, step {step}"] = {kind: n / 1e6 for kind, n in found.items()}
        unmount_all()
    return taken


def local_s(source: Path) -> float:
    """CPU seconds of some small runs with a checkout."""
    done = subprocess.run(
        [sys.executable, "-c", LOCAL, "/dev/shm" if Path("/dev/shm").is_dir() else "/tmp"],
        cwd=source,
        env=os.environ | {"PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds: float = json.loads(done.stdout)
    return seconds


def on(folder: Path, root: str, rows: int, step: int = 1, case: str = "cheap") -> Project:
    """The benchmark's project with another root."""
    items(folder, rows, 0.01, case, step)
    text = (folder / "project.yaml").read_text().replace("root: ./var\n", f"root: {root}\n")
    (folder / "project.yaml").write_text(text)
    return Project(folder)


def requests(store: ObjectStore, folder: Path, rows: int) -> dict[str, dict[str, int]]:
    """Of a full run's and a delta's commit and publishing, by command and kind."""
    taken = {}
    root = f"s3://bucket/rows{rows}"
    for step, kind in ((1, "full"), (2, "delta")):
        project = on(folder, root, rows, step)
        for command in ("materialize", "publish"):
            before = len(store.requests)
            run_view(project, "items", Silent(), RunOptions(command=command))
            made = Counter(request.method for request in store.requests[before:])
            taken[f"{kind}, {command}"] = {**made, "all": made.total()}
    return taken


def flip_s(folder: Path, rows: int) -> list[float]:
    """How long after a publishing a second host serves it."""
    root, taken = "s3://bucket/replica", []
    here, there = folder / "here", folder / "there"
    here.mkdir()
    there.mkdir()
    project = on(here, root, rows)
    run_view(project, "items", Silent(), RunOptions())
    replica = on(there, root, rows)
    online, own = open_online_store(replica.online), open_online_store(project.online)
    follower = Follower(replica.offline, lambda: open_online_store(replica.online), ["items"])
    try:
        for step in range(2, 7):
            seen = dict[OnlineStore, float]()

            def watch(step: int = step, seen: dict[OnlineStore, float] = seen) -> None:
                while len(seen) < 2:
                    for store in {own, online} - seen.keys():
                        if (live := store.live("items")) is not None and live.snapshot == step:
                            seen[store] = time.monotonic()
                    time.sleep(0.005)

            watcher = threading.Thread(target=watch)
            watcher.start()
            run_view(on(here, root, rows, step), "items", Silent(), RunOptions())
            watcher.join(60)
            taken.append(seen[online] - seen[own])
    finally:
        follower.stop()
        online.close()
        own.close()
    return taken


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path)
    before, here = parser.parse_args().before, Path(__file__).parents[1]
    lines, figures = [cpu()], dict[str, Any]()
    if before is not None:
        pairs = [(local_s(here), local_s(before)) for _ in range(PAIRS)]
        ratio = min(now for now, _ in pairs) / min(then for _, then in pairs)
        figures["local"] = {"pairs": pairs, "ratio": ratio}
        lines.append(
            f"a folder as root: {LOCAL_RUNS} deltas of {LOCAL_ROWS:,} rows, CPU s (now, before)"
            f" {pairs}: {ratio:.3f} times the least"
        )
    with object_store() as store, tempfile.TemporaryDirectory() as name:
        for rows in SIZES:
            folder = Path(name) / str(rows)
            folder.mkdir()
            taken = requests(store, folder, rows)
            figures[f"{rows} rows"] = taken
            lines.append(f"{rows:,} rows: requests {taken}")
            unmount_all()
        figures["fetched_mb"] = fetched = fetched_mb(store, Path(name), 100_000)
        lines.append(f"runs of 100,000 rows, MB fetched: {fetched}")
        figures["races"] = raced = races(store, Path(name))
        lines.append(f"{WRITERS} processes, {RACES} races: {raced}")
        seconds = flip_s(Path(name), 100_000)
        figures["flip_s"] = seconds
        lines.append(
            f"a replica serves a delta of 1,000 of 100,000 rows {statistics.median(seconds):.2f} s"
            f" after the publishing host, {max(seconds):.2f} s at most of {len(seconds)}"
        )
    report("scale_root", lines, figures)


if __name__ == "__main__":
    main()
