"""A server at half its capacity through flips to other models, rollbacks and killed workers: no answer fails, none mixes two models, and how long they take.

    python -m tests.faults.serve_soak [--seconds 600] [--out FOLDER]

Every ten seconds something is published by another model or rolled back, every half minute a worker is killed. Writes soak.csv, a line a second, and soak.svg; prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.arithmetic import Doubler
from tests.server import Server, make_folder, read_reply, write_numbers

STORED, KNOWN = 2_000, 4_000
"""Entities that are published, and those that the source knows: the others are misses."""
FLIP_S, KILL_S = 10.0, 30.0
KEYS = 20
MISSES = 0.02
"""Share of requests with a key that is no hit."""
STEP = 1e6


class Versioned(Doubler):
    """``double`` = 2x + a million times the version, so that a row tells its model."""

    def __init__(self, version: int) -> None:
        super().__init__(dim=0, version=version)

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        return {"double": super().compute(batch)["double"] + STEP * self.version}


@dataclass
class Second:
    """What was seen in one second."""

    times_ms: list[float] = field(default_factory=list)
    failed: int = 0
    cut: int = 0
    mixed: int = 0
    computed: int = 0


class Soak:
    """One server, its publisher, its killer, and clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: dict[int, int] = {}
        """Snapshot → version of its model."""
        self.seconds: dict[int, Second] = defaultdict(Second)
        self.events: list[tuple[float, str]] = []
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.publish(1)

    def publish(self, version: int) -> None:
        """Compute and publish all rows by another model; misses are known to the source all the while."""
        view = {
            "model": {"use": f"{__spec__.name}:Versioned", "args": {"version": version}},
            "features": {"double": {"dtype": "float64"}},
            "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
            "index": None,
            "gates": {"rows": None, "rolled_back": None},
        }
        project = make_folder(self.folder, {"numbers": view}, serve={"workers": 2})
        write_numbers(self.folder, list(range(STORED)))
        # known before a reader can see the snapshot
        self.versions[max(self.versions, default=0) + 1] = version
        project.publish_all()
        write_numbers(self.folder, list(range(KNOWN)))

    def disturb(self, server: Server, began: float, seconds: float) -> None:
        """Flips, rollbacks and killed workers, until the time is over."""
        version, flip_at, kill_at = 1, FLIP_S, KILL_S
        while (now := time.monotonic() - began) < seconds:
            if now >= flip_at:
                flip_at += FLIP_S
                version += 1
                if version % 4 == 0:
                    make_folder(self.folder, {}).rollback("numbers")
                    self.events.append((now, "rollback"))
                else:
                    self.publish(version)
                    self.events.append((now, "flip"))
            if now >= kill_at:
                kill_at += KILL_S
                os.kill(random.choice(workers_of(server)), signal.SIGKILL)
                self.events.append((now, "kill"))
            time.sleep(0.1)

    def client(self, server: Server, began: float, per_s: float) -> None:
        """Ask so many times a second, each answer looked through."""
        rng, next_at = random.Random(), time.monotonic()
        while not self.stop.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException), server.connect() as connection:
                while not self.stop.is_set():
                    # as if others asked, too: who waits is not waited for
                    next_at = max(next_at + 1 / per_s, time.monotonic() - 1.0) if per_s else time.monotonic()
                    time.sleep(max(0.0, next_at - time.monotonic()))
                    self.ask(connection, began, rng)
                return
            with self.lock:
                self.seconds[int(time.monotonic() - began)].cut += 1

    def ask(self, connection: Any, began: float, rng: random.Random) -> None:
        """One request of some keys."""
        keys = rng.sample(range(STORED), KEYS)
        if rng.random() < MISSES:
            keys[0] = rng.randrange(STORED, KNOWN)
        body = json.dumps({"keys": keys}).encode()
        head = f"POST /v1/views/numbers/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        started = time.perf_counter()
        connection.sendall(head.encode() + body)
        reply = read_reply(connection)
        taken_ms = (time.perf_counter() - started) * 1e3
        with self.lock:
            second = self.seconds[int(time.monotonic() - began)]
            second.times_ms.append(taken_ms)
            if reply.status != 200 or any(row.get("reason", "unknown_entity") != "unknown_entity" for row in reply.json["rows"]):
                second.failed += 1
                print(reply, file=sys.stderr)
                return
            answer = reply.json
            second.computed += sum(row["status"] == "computed" for row in answer["rows"])
            version = self.versions[answer["snapshot"]]
            alike = {(row["snapshot"], row["model"]) for row in answer["rows"]} == {(answer["snapshot"], answer["model"])}
            # a miss that the source does not know while it is replaced has no features
            there = [(row["features"]["double"], key) for row, key in zip(answer["rows"], keys, strict=True) if row["features"]]
            second.mixed += not alike or any(double != 2.0 * key + STEP * version for double, key in there)


def workers_of(server: Server) -> list[int]:
    """Numbers of its lookup workers."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"lookup_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def run(soak: Soak, server: Server, seconds: float, clients: int, per_s: float, *, disturbed: bool) -> float:
    """Load for so long; returns the requests per second that were answered."""
    soak.seconds.clear()
    soak.stop.clear()
    began = time.monotonic()
    threads = [threading.Thread(target=soak.client, args=(server, began, per_s / clients)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    if disturbed:
        soak.disturb(server, began, seconds)
    else:
        time.sleep(seconds)
    soak.stop.set()
    for thread in threads:
        thread.join()
    return sum(len(second.times_ms) for second in soak.seconds.values()) / seconds


def write_csv(soak: Soak, path: Path) -> None:
    """A line for each second."""
    lines = ["second,requests,p50_ms,p99_ms,computed,failed,cut,mixed"]
    for number, second in sorted(soak.seconds.items()):
        p50, p99 = np.percentile(second.times_ms, [50, 99]) if second.times_ms else (0.0, 0.0)
        lines.append(
            f"{number},{len(second.times_ms)},{p50:.2f},{p99:.2f},{second.computed},{second.failed},{second.cut},{second.mixed}"
        )
    path.write_text("\n".join(lines) + "\n")


def write_svg(soak: Soak, path: Path, seconds: float) -> None:
    """p50 and p99 over time on a logarithmic scale, and what happened meanwhile."""
    width, height, left, bottom = 960, 320, 56, 36
    low, high = 0.1, 10_000.0

    def x(at: float) -> float:
        return left + (width - left - 12) * at / seconds

    def y(ms: float) -> float:
        share = np.log(min(max(ms, low), high) / low) / np.log(high / low)
        return float(height - bottom - (height - bottom - 24) * share)

    def line(q: float, colour: str) -> str:
        points = [(n, float(np.percentile(s.times_ms, q))) for n, s in sorted(soak.seconds.items()) if s.times_ms]
        return f'<polyline fill="none" stroke="{colour}" points="{" ".join(f"{x(n):.1f},{y(ms):.1f}" for n, ms in points)}"/>'

    colours = {"flip": "#8ab4f8", "rollback": "#f6ae2d", "kill": "#d64550"}
    marks = [
        f'<path d="M{x(at):.1f} 24V{height - bottom}" stroke="{colours[what]}" stroke-dasharray="2 3"/>'
        for at, what in soak.events
    ]
    grid = [
        f'<path d="M{left} {y(ms):.1f}H{width - 12}" stroke="#ddd"/><text x="{left - 6}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms:g} ms</text>'
        for ms in (0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0)
    ]
    legend = "p50 dark, p99 light; dotted: " + ", ".join(f"{what} {sum(w == what for _, w in soak.events)}" for what in colours)
    total = soak.seconds.values()
    told = f"{sum(len(s.times_ms) for s in total):,} answers: {sum(s.failed for s in total)} failed, {sum(s.mixed for s in total)} mixed; {sum(s.cut for s in total)} connections cut"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="#fff"/><text x="{left}" y="16">{legend} · {told}</text>'
        f"{''.join(grid)}{''.join(marks)}{line(99, '#9ecae1')}{line(50, '#08519c')}"
        f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">seconds, 0 to {seconds:g}</text></svg>\n'
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(Path(name))
        with Server(Path(name)) as server:
            capacity = run(soak, server, 3.0, arguments.clients, 0.0, disturbed=False)
            rate = run(soak, server, arguments.seconds, arguments.clients, capacity / 2, disturbed=True)
        write_csv(soak, arguments.out / "soak.csv")
        write_svg(soak, arguments.out / "soak.svg", arguments.seconds)
    total = list(soak.seconds.values())
    figures = {kind: sum(getattr(second, kind) for second in total) for kind in ("failed", "mixed", "cut", "computed")}
    events = {what: sum(w == what for _, w in soak.events) for what in ("flip", "rollback", "kill")}
    times = [ms for second in total for ms in second.times_ms]
    p50, p99 = np.percentile(times, [50, 99])
    print(json.dumps({"capacity_per_s": capacity, "per_s": rate, "p50_ms": p50, "p99_ms": p99, **figures, **events}))
    sys.exit(1 if figures["failed"] or figures["mixed"] else 0)


if __name__ == "__main__":
    main()
