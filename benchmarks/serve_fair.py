"""Lone misses of polite clients beside one client that asks for a thousand keys at a time, under
``precompute serve``.

The model sleeps 10 ms a row: 100 rows/s, whatever else the machine does. The flood asks for 1,000
keys with inputs and a second's time, over two connections, again and again; from other addresses
come single misses, one after the other. Without shares the flood's rows stood before all others.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import report, run_by_command, write_project
from benchmarks.serve_misses import Served

ROW_S = 0.01
FLOOD_KEYS, FLOODS = 1000, 2
LONE, LONE_EVERY_S = 10, 0.5
DEADLINE_MS = 1000

MINE = f'''
import time

import numpy as np


class Slow:
    """Takes {ROW_S} s for a row."""

    def fingerprint(self):
        return "slow"

    def compute(self, batch):
        x = np.asarray(batch.column("x"))
        time.sleep({ROW_S} * len(x))
        return {{"double": 2.0 * x}}
'''


def make_project(folder: Path) -> None:
    """One view of that model; two rows are published."""
    (folder / "mine.py").write_text(MINE)
    view = {
        "source": {"sql": "SELECT id, x FROM read_parquet('${data}/data.parquet')"},
        "model": {"use": "mine:Slow"},
        "features": {"double": {"dtype": "float64"}},
        "fallback": {"enabled": True, "deadline": "1s"},
    }
    write_project(folder, {"slow": view}, serve={"bind": "127.0.0.1:0"})
    pq.write_table(pa.table({"id": [1, 2], "x": [1.0, 2.0]}), folder / "data.parquet")


class Client:
    """One address's connection, with keys that nobody else asks for."""

    def __init__(self, port: int, address: str, first: int) -> None:
        self._connection = http.client.HTTPConnection(
            "127.0.0.1", port, timeout=60, source_address=(address, 0)
        )
        self._next = first

    def ask(self, keys: int) -> Counter[str]:
        """What became of so many misses asked for at once: ``computed``, or why not."""
        some = range(self._next, self._next + keys)
        self._next += keys
        inputs = {str(key): {"x": float(key)} for key in some}
        body = json.dumps({"keys": list(inputs), "inputs": inputs, "deadline_ms": DEADLINE_MS})
        self._connection.request(
            "POST", "/v1/views/slow/lookup", body, {"Content-Type": "application/json"}
        )
        rows = json.loads(self._connection.getresponse().read())["rows"]
        for row in rows:
            if row["status"] == "computed" and row["features"]["double"] != 2.0 * float(row["key"]):
                raise AssertionError(f"a wrong row: {row}")
        return Counter(row.get("reason") or row["status"] for row in rows)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def measure(port: int) -> dict[str, Any]:
    """A flood alone, then with lone misses beside it."""
    over, flood, told = threading.Event(), Counter[str](), threading.Lock()

    def ask_for_many(number: int) -> None:
        with contextlib.closing(Client(port, "127.0.0.1", 10_000_000 * (number + 1))) as client:
            while not over.is_set():
                outcomes = client.ask(FLOOD_KEYS)
                with told:
                    flood.update(outcomes)

    floods = [threading.Thread(target=ask_for_many, args=(number,)) for number in range(FLOODS)]
    with contextlib.closing(Client(port, "127.0.0.2", 1000)) as client:
        idle = [_timed(client)[1] for _ in range(LONE)]
    for thread in floods:
        thread.start()
    time.sleep(3.0)
    began, before = time.monotonic(), flood["computed"]
    time.sleep(LONE * LONE_EVERY_S)
    alone = (flood["computed"] - before) / (time.monotonic() - began)
    lone, times = Counter[str](), []
    began, before = time.monotonic(), flood["computed"]
    with contextlib.closing(Client(port, "127.0.0.3", 5000)) as client:
        for _ in range(LONE):
            time.sleep(LONE_EVERY_S)
            outcomes, seconds = _timed(client)
            lone += outcomes
            times.append(seconds)
    rate = (flood["computed"] - before) / (time.monotonic() - began)
    over.set()
    for thread in floods:
        thread.join()
    return {
        "lone": dict(lone),
        "lone_ms": [round(seconds * 1e3, 1) for seconds in times],
        "lone_idle_ms": statistics.median(idle) * 1e3,
        "flood": dict(flood),
        "flood_per_s": rate,
        "flood_alone_per_s": alone,
        "flood_share": rate * ROW_S,
    }


def _timed(client: Client) -> tuple[Counter[str], float]:
    began = time.perf_counter()
    return client.ask(1), time.perf_counter() - began


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as name:
        make_project(Path(name))
        run_by_command(Path(name), "slow")
        with Served(Path(name), workers=2) as served:
            figures = measure(served.port)
    lines = [
        (
            f"beside a flood of {FLOOD_KEYS}-key requests {figures['lone'].get('computed', 0)} of"
            f" {LONE} lone misses are given within {DEADLINE_MS} ms (goal {LONE}), at the median in"
            f" {statistics.median(figures['lone_ms']):.0f} ms, {figures['lone_idle_ms']:.0f} ms"
            " where there is none"
        ),
        (
            f"the flood gets {figures['flood_per_s']:.0f} rows/s, {figures['flood_share']:.2f} of"
            f" the model's rate (goal 0.7), {figures['flood_alone_per_s']:.0f} alone:"
            f" {figures['flood']}"
        ),
    ]
    report("serve_fair", lines, figures)


if __name__ == "__main__":
    main()
