"""A server at half its capacity through flips to other models, rollbacks and killed workers: no
answer fails, none mixes two models, how long they take, and what memory.

    python -m tests.faults.serve_soak [--seconds 600] [--out FOLDER]

Every ten seconds something is published by another model or rolled back, every half minute a worker
is killed, but never the first one, whose memory tells. Requests are mixed: single rows, lookups as
JSON and Arrow, of several views, searches, misses among them. Writes soak.csv, a line a second, and
soak.svg; prints one line of JSON, and ends with 1 and what is wrong where anything is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.store.wire import arrow
from tests.faults.soak_picture import write_csv, write_svg
from tests.models import Doubler
from tests.server import Server, make_folder, write_numbers

STORED, KNOWN = 2_000, 4_000
"""Entities that are published, and those that the source knows: the others are misses."""
FLIP_S, KILL_S = 10.0, 30.0
KEYS = 20
MISSES = 0.02
"""Share of requests with a key that is no hit."""
CONNECTION_REQUESTS = 2_000
"""Of one connection, so that every worker has some."""
FIRST_CLIENT = "client 0"
"""Name of its thread."""
STEP = 1e6
KINDS = {"row": 0.70, "json": 0.20, "arrow": 0.05, "several": 0.03, "search": 0.02}
"""Of the requests."""
GROWN_MB = 40.0
"""By more than this: allocators round, what was published last is mapped beside what is live, and
what misses leave in cycles is looked for seldom (measured: up to 15 MB, then no more)."""
CUT_BY_ONE = 8
"""Connections that a killed worker may have had, of as many clients."""
MOST_PRINTED = 20


class Versioned(Doubler):
    """``double`` = 2x + a million times the version, so that a row tells its model."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        values = super().compute(batch)
        return values | {"double": values["double"] + STEP * self.version}


@dataclass
class Second:
    """What was seen in one second."""

    times_ms: list[float] = field(default_factory=list)
    misses_ms: list[float] = field(default_factory=list)
    failed: int = 0
    cut: int = 0
    mixed: int = 0
    computed: int = 0
    resident_mb: dict[str, float] = field(default_factory=dict)
    """Of each process that there is."""


class Connection:
    """One connection, and what came on it."""

    def __init__(self, server: Server) -> None:
        self._socket = server.connect()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(
        self, method: str, path: str, body: bytes = b"", accept: str = "application/json"
    ) -> tuple[int, bytes]:
        """Status and body; a connection that was cut off is an OSError."""
        lines = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n"
        if body:
            lines += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._socket.sendall(lines.encode() + b"\r\n" + body)
        data = self._more(b"")
        while (end := data.find(b"\r\n\r\n")) < 0:
            data = self._more(data)
        head = data[:end].lower()
        size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        while len(data) < end + 4 + size:
            data = self._more(data)
        return int(head[9:12]), data[end + 4 :]

    def _more(self, data: bytes) -> bytes:
        came = self._socket.recv(1 << 16)
        if not came:
            raise ConnectionError
        return data + came


class Soak:
    """One server, its publisher, its killer, and clients."""

    warm_s = 30.0
    """From then on a worker's memory must not grow."""

    @property
    def misses(self) -> float:
        """Share of requests with a key that is no hit."""
        return MISSES

    def __init__(self, folder: Path, module: str = __spec__.name) -> None:
        self.folder = folder
        self.offsets: dict[int, float] = {}
        """Snapshot → what its model adds."""
        self.seconds: dict[int, Second] = defaultdict(Second)
        self.events: list[tuple[float, str]] = []
        self.wrong: list[str] = []
        """What must not be."""
        self.stop = threading.Event()
        self.lock = threading.Lock()
        # a process of its own: who publishes would hold up who measures
        command = [sys.executable, "-m", module, "--publish", str(folder)]
        self.publisher: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.publish(1)

    def publish(self, version: int) -> None:
        """Have all rows computed and published by another model, or gone back to those before by
        version 0."""
        if version:
            # known before a reader can see the snapshot
            self.offsets[max(self.offsets, default=0) + 1] = STEP * version
        self.publisher.stdin.write(f"{version}\n")
        self.publisher.stdin.flush()
        if self.publisher.stdout.readline() != "done\n":
            raise AssertionError("the publisher failed: its words are above")

    def disturb(self, server: Server, began: float, seconds: float) -> None:
        """Flips, rollbacks and killed workers, until the time is over; and what memory the
        processes have, every second."""
        version, flip_at, kill_at, look_at = 1, FLIP_S, KILL_S, 0.0
        first = workers_of(server)[0]
        while (now := time.monotonic() - began) < seconds:
            if now >= look_at:
                look_at += 1.0
                resident_mb = {name: resident(pid) for pid, name in processes_of(server, first)}
                with self.lock:
                    self.seconds[int(now)].resident_mb = resident_mb
            if now >= flip_at:
                flip_at += FLIP_S
                version += 1
                if version % 4 == 0:
                    self.publish(0)
                    self.events.append((time.monotonic() - began, "rollback"))
                else:
                    self.publish(version)
                    self.events.append((time.monotonic() - began, "flip"))
            if now >= kill_at:
                kill_at += KILL_S
                for worker in [pid for pid in workers_of(server) if pid != first][:1]:
                    os.kill(worker, signal.SIGKILL)
                    self.events.append((now, "kill"))
            time.sleep(0.1)

    def client(self, server: Server, began: float, per_s: float) -> None:
        """Ask so many times a second, each answer looked through."""
        rng, next_at = random.Random(), time.monotonic()
        while not self.stop.is_set():
            with contextlib.suppress(OSError), Connection(server) as connection:
                for _ in range(CONNECTION_REQUESTS):
                    if self.stop.is_set():
                        return
                    # as if others asked, too: who waits is not waited for
                    next_at = (
                        max(next_at + 1 / per_s, time.monotonic() - 1.0)
                        if per_s
                        else time.monotonic()
                    )
                    time.sleep(max(0.0, next_at - time.monotonic()))
                    try:
                        self.ask(connection, began, rng)
                    except (
                        AssertionError,
                        ArithmeticError,
                        LookupError,
                        TypeError,
                        ValueError,
                    ) as exc:
                        self.found(began, "failed", f"an answer that cannot be read: {exc!r}")
                continue
            with self.lock:
                self.seconds[int(time.monotonic() - began)].cut += 1

    def found(self, began: float, kind: str, detail: str) -> None:
        """Something that must not be."""
        with self.lock:
            second = self.seconds[int(time.monotonic() - began)]
            setattr(second, kind, getattr(second, kind) + 1)
            self.wrong.append(f"{time.monotonic() - began:.2f} s: {kind}: {detail}")
            if len(self.wrong) <= MOST_PRINTED:
                print(self.wrong[-1], file=sys.stderr, flush=True)

    def ask(self, connection: Connection, began: float, rng: random.Random) -> None:
        """One request of some kind."""
        kind = rng.choices([*KINDS], [*KINDS.values()])[0]
        keys = rng.sample(range(STORED), KEYS)
        missing = rng.random() < self.misses and kind != "search"
        if missing:
            keys[0] = rng.randrange(STORED, KNOWN)
        path, body, accept = f"/v1/views/numbers/rows/{keys[0]}", b"", "application/json"
        if kind in ("json", "arrow"):
            path, body = "/v1/views/numbers/lookup", json.dumps({"keys": keys}).encode()
            accept = accept if kind == "json" else "application/vnd.apache.arrow.stream"
        elif kind == "several":
            requests = [{"view": "numbers", "keys": some} for some in (keys[:10], keys[10:])]
            path, body = "/v1/lookup", json.dumps({"requests": requests}).encode()
        elif kind == "search":
            path, body = (
                "/v1/views/numbers/search",
                json.dumps({"key": keys[0], "k": 5, "features": ["double"]}).encode(),
            )
        started = time.perf_counter()
        status, answer = connection.ask("POST" if body else "GET", path, body, accept)
        taken_ms = (time.perf_counter() - started) * 1e3
        with self.lock:
            second = self.seconds[int(time.monotonic() - began)]
            (second.misses_ms if missing else second.times_ms).append(taken_ms)
        if status == 200:
            for rows in rows_of(kind, answer):
                self.look_through(began, kind, rows)
        elif self.status_is_wrong(kind, keys[0], status):
            self.found(began, "failed", f"{kind}: {status} {answer[:300]!r}")
        elif status != 404:
            with self.lock:
                self.seconds[int(time.monotonic() - began)].failed += 1

    def status_is_wrong(self, kind: str, key: int, status: int) -> bool:
        """Whether no answer of that kind may be so; the source may not know a miss while it is
        replaced."""
        return not (kind == "row" and key >= STORED and status == 404)

    def look_through(self, began: float, kind: str, rows: Sequence[dict[str, Any]]) -> None:
        """Rows that were answered as one: all of one snapshot, each as that one's model makes
        it."""
        bad = [row for row in rows if row.get("reason") not in (None, "unknown_entity")]
        if bad:
            self.found(began, "failed", f"{kind}: {bad[0]}")
        with self.lock:
            self.seconds[int(time.monotonic() - began)].computed += sum(
                row["status"] == "computed" for row in rows
            )
        offset = self.offsets.get(rows[0]["snapshot"], 0.0)
        # a miss that the source does not know while it is replaced has no features
        there = [
            (
                row["double"] if "double" in row else (row["features"] or {}).get("double"),
                row["key"],
            )
            for row in rows
        ]
        right = all(double is None or double == 2.0 * int(key) + offset for double, key in there)
        if len({(row["snapshot"], row["model"]) for row in rows}) > 1 or not right:
            self.found(began, "mixed", f"{kind}: {rows}"[:600])


def publish(folder: Path) -> None:
    """For each number that is read: rows computed and published by that version of the model, or,
    by 0, a rollback. Misses are known to the source all the while."""
    for version in map(int, sys.stdin):
        view = {
            "model": {"use": f"{__spec__.name}:Versioned", "args": {"version": version}},
            "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
            "gates": {"rows": None},
        }
        if version:
            project = make_folder(folder, {"numbers": view}, serve={"workers": 2})
            write_numbers(folder, list(range(STORED)))
            project.publish_all()
            write_numbers(folder, list(range(KNOWN)))
        else:
            make_folder(folder, {}).rollback("numbers", hold=False)
        print("done", flush=True)


def rows_of(kind: str, answer: bytes) -> Iterable[Sequence[dict[str, Any]]]:
    """The rows of an answer, those together that must be of one snapshot."""
    if kind == "arrow":
        yield arrow.decode_arrow(answer).to_pylist()
        return
    body = json.loads(answer)
    if kind == "row":
        yield [body]
        return
    for one in body["responses"] if kind == "several" else [body]:
        if "problem" in one:
            yield [
                {
                    "key": "0",
                    "reason": one["problem"]["type"],
                    "features": None,
                    "snapshot": None,
                    "model": None,
                    "status": "missing",
                }
            ]
            continue
        assert {row["snapshot"] for row in one["rows"]} <= {one["snapshot"]}
        yield one["rows"]


def processes_of(server: Server, first: int) -> list[tuple[int, str]]:
    """Number and name of each: the supervisor, the worker that is never killed, the other, the
    models."""
    named = [(server.process.pid, "supervisor")]
    for pid in map(
        int,
        Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split(),
    ):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"lookup_worker" in line:
                named.append((pid, "worker" if pid == first else "other worker"))
            elif b"model_server" in line:
                named.append((pid, f"model {pid}"))
    return named


def workers_of(server: Server) -> list[int]:
    """Numbers of its lookup workers."""
    return [pid for pid, name in processes_of(server, 0) if name == "other worker"]


def resident(pid: int) -> float:
    """Resident memory in MB; 0 of a process that is no more."""
    with contextlib.suppress(OSError, IndexError):
        return (
            int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 2**20
        )
    return 0.0


def run(
    soak: Soak, server: Server, seconds: float, clients: int, per_s: float, *, disturbed: bool
) -> float:
    """Load for so long; returns the requests per second that were answered."""
    soak.seconds.clear()
    soak.stop.clear()
    began = time.monotonic()
    threads = [
        threading.Thread(
            target=soak.client, args=(server, began, per_s / clients), name=f"client {number}"
        )
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    try:
        if disturbed:
            soak.disturb(server, began, seconds)
        else:
            time.sleep(seconds)
    finally:
        soak.stop.set()
        for thread in threads:
            thread.join()
    return sum(len(second.times_ms) for second in soak.seconds.values()) / seconds


def memory(seconds: dict[int, Second], warm_s: float) -> dict[str, list[float]]:
    """Name of a process → its resident MB at first, once it was warm, and at last; of those that
    come and go, all together at most."""
    looked = [
        (at, second.resident_mb) for at, second in sorted(seconds.items()) if second.resident_mb
    ]
    warm = min(warm_s, looked[-1][0] / 2)
    resident_mb = {}
    for name in ("supervisor", "worker"):
        of_it = [(at, mb[name]) for at, mb in looked if name in mb]
        resident_mb[name] = [of_it[0][1], next(mb for at, mb in of_it if at >= warm), of_it[-1][1]]
    for name in ("other worker", "model"):
        resident_mb[f"{name}, at most"] = [
            max(
                max((mb for whose, mb in found.items() if whose.startswith(name)), default=0.0)
                for _, found in looked
            )
        ]
    return {name: [round(mb, 1) for mb in figures] for name, figures in resident_mb.items()}


def report(soak: Soak, name: str, out: Path, seconds: float, capacity: float, rate: float) -> None:
    """Write down and draw what was seen, print its sums, and end with 1 where anything is wrong."""
    total = list(soak.seconds.values())
    figures = {
        kind: sum(getattr(second, kind) for second in total)
        for kind in ("failed", "mixed", "cut", "computed")
    }
    events = Counter(what for _, what in soak.events)
    resident_mb = memory(soak.seconds, soak.warm_s)
    _, warm_mb, last_mb = resident_mb["worker"]
    if last_mb > warm_mb + GROWN_MB:
        soak.wrong.append(f"a worker's memory grew from {warm_mb} to {last_mb} MB")
    if figures["cut"] > CUT_BY_ONE * events["kill"]:
        soak.wrong.append(f"{figures['cut']} connections were cut by {events['kill']} kills")
    write_csv(soak.seconds, out / f"{name}.csv")
    write_svg(soak.seconds, soak.events, out / f"{name}.svg", seconds)
    times, misses = (
        [ms for second in total for ms in getattr(second, of)] for of in ("times_ms", "misses_ms")
    )
    p50, p99 = np.percentile(times, [50, 99]).round(3)
    sums = {
        "hits": len(times),
        "capacity_per_s": round(capacity),
        "hits_per_s": round(rate),
        "p50_ms": p50,
        "p99_ms": p99,
    }
    sums |= {"misses": len(misses), "miss_p50_ms": np.percentile(misses or [0.0], 50).round(3)}
    print(json.dumps({**sums, **figures, **events, "resident_mb": resident_mb}))
    if soak.wrong:
        sys.exit(f"WRONG, {len(soak.wrong)} times:\n" + "\n".join(soak.wrong[:MOST_PRINTED]))


def main(argv: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--publish", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.publish is not None:
        publish(arguments.publish)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(Path(name))
        with soak.publisher, Server(Path(name)) as server:
            capacity = run(soak, server, 3.0, arguments.clients, 0.0, disturbed=False)
            rate = run(
                soak, server, arguments.seconds, arguments.clients, capacity / 2, disturbed=True
            )
    report(soak, "soak", arguments.out, arguments.seconds, capacity, rate)


if __name__ == "__main__":
    main()
