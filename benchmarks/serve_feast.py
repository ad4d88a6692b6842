"""Feast 0.67's own server beside ours: the rows of one committed snapshot, asked for over HTTP, 1,
100 and 500 keys at a time. Both over one Redis, then Feast over SQLite and we over table files.
Feast has JSON only; we are asked for JSON, and for Arrow where it is many keys. Every value of the
answers must be equal bit by bit.

    python -m benchmarks.serve_feast [rows] [rounds]

Each server has one worker and a core of its own, the client and Redis the other one. One
connection, one request at a time; the sides take turns. Rows that we keep encoded are off
(``cache_mb: 0``), since Feast keeps none. Feast runs by the interpreter that
:mod:`benchmarks.online_feast` names.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.common import DIM, numbers, report, run, settle
from benchmarks.online_feast import FEATURES, PEER, STORES, committed, feast_python, figures_of
from precompute.plugins.redis.tests.processes import (
    DIES_WITH_US,
    RedisProcess,
    newest_redis,
)
from tests.server import free_port

ROWS = 20_000
ROUNDS = 3
REQUESTS = {1: 300, 100: 30, 500: 8}
"""Keys of a request → how many of these in a round."""
CHECKED = 3
"""Of them, answers whose values are compared."""
START_S = 60.0
ARROW, JSON = "application/vnd.apache.arrow.stream", "application/json"

Values = npt.NDArray[np.float32]


class Connection:
    """One that is kept alive, and asks for one thing after the other."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=START_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> bytes:
        """The body of its answer."""
        self._socket.sendall(request)
        data = self._socket.recv(1 << 18)
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._socket.recv(1 << 18)
        head, data = data[:end].lower(), data[end + 4 :]
        assert head.startswith(b"http/1.1 200"), data[:500]
        _, told, rest = head.partition(b"content-length: ")
        pieces, left = [data], (int(rest.partition(b"\r\n")[0]) if told else 1 << 62) - len(data)
        # in pieces, the last one empty
        while left > 0 and (told or not pieces[-1].endswith(b"0\r\n\r\n")):
            pieces.append(self._socket.recv(1 << 18))
            left -= len(pieces[-1])
        body = b"".join(pieces)
        return body if told else _joined(body)

    def close(self) -> None:
        """No more."""
        self._socket.close()


def _joined(body: bytes) -> bytes:
    """What was sent in pieces (RFC 9112 §7.1)."""
    pieces: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(pieces)
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size


def _post(path: str, body: dict[str, Any], accept: str = JSON) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\nContent-Type:"
        f" {JSON}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {JSON}\r\n\r\n".encode()


def requests_of(side: str, keys: list[list[int]]) -> list[bytes]:
    """What is asked of a side: ``feast``, ``json`` or ``arrow``."""
    if side == "feast":
        names = [f"items:{name}" for name in FEATURES]
        return [
            _post("/get-online-features", {"features": names, "entities": {"id": some}})
            for some in keys
        ]
    if side == "json" and len(keys[0]) == 1:
        return [_get(f"/v1/views/items/rows/{key}") for (key,) in keys]
    accept = ARROW if side == "arrow" else JSON
    return [
        _post("/v1/views/items/lookup", {"keys": list(map(str, some))}, accept) for some in keys
    ]


def values_of(side: str, body: bytes) -> Values:
    """float32 [rows, DIM + 3]: the vector and the numbers."""
    if side == "arrow":
        table = pa.ipc.open_stream(pa.py_buffer(body)).read_all()
        columns = [
            np.asarray(table[name].combine_chunks().flatten() if name == "vector" else table[name])
            for name in FEATURES
        ]
    elif side == "json":
        told = json.loads(body)
        rows = [row["features"] for row in told.get("rows", [told])]
        columns = [np.array([row[name] for row in rows], np.float32) for name in FEATURES]
    else:
        told = json.loads(body)
        found = dict(zip(told["metadata"]["feature_names"], told["results"], strict=True))
        assert all(status == "PRESENT" for name in FEATURES for status in found[name]["statuses"])
        columns = [np.array(found[name]["values"], np.float32) for name in FEATURES]
    return np.hstack(
        [
            column.reshape(-1, DIM if name == "vector" else 1)
            for name, column in zip(FEATURES, columns, strict=True)
        ]
    )


@contextlib.contextmanager
def _running(command: list[str], port: int, log: Path) -> Iterator[int]:
    """A server on the first core, once it listens; this process stays on the second."""
    cores = range(os.cpu_count() or 1)
    os.sched_setaffinity(0, {0})
    with log.open("wb") as told:
        process = subprocess.Popen([*DIES_WITH_US, *command], stdout=told, stderr=told)
    os.sched_setaffinity(0, {1 % len(cores)})
    try:
        limit = time.monotonic() + START_S
        while True:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=1),
            ):
                break
            if process.poll() is not None or time.monotonic() > limit:
                sys.exit(f"{command} does not listen: {log.read_text()}")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(START_S)
        os.sched_setaffinity(0, cores)


def feast_server(folder: Path, python: str) -> contextlib.AbstractContextManager[int]:
    """``feast serve`` as it comes, without its access log, and without the new process that it
    starts every 1,000 requests."""
    port = free_port()
    options = [
        "--port",
        str(port),
        "--workers",
        "1",
        "--no-access-log",
        "--max-requests",
        "0",
        "--registry_ttl_sec",
        "300",
    ]
    return _running(
        [str(Path(python).with_name("feast")), "--chdir", str(folder), "serve", *options],
        port,
        folder / "feast.log",
    )


def our_server(folder: Path) -> contextlib.AbstractContextManager[int]:
    """``precompute serve``."""
    port = free_port()
    settle(folder, serve={"bind": f"127.0.0.1:{port}", "workers": 1, "cache_mb": 0})
    return _running(
        [sys.executable, "-m", "precompute.jobs.cli", "--config", str(folder), "serve"],
        port,
        folder / "ours.log",
    )


def loaded(folder: Path, parts: Path, kind: str, redis: str, python: str) -> None:
    """Both sides' stores have the rows."""
    address = redis.removeprefix("redis://").partition("/")[0]
    online = {"type": "redis", "connection_string": address, "skip_dedup": True}
    if kind != "Redis":
        online = {"type": "sqlite", "path": str(folder / "online.db")}
    figures_of([python, str(PEER), str(folder), str(parts), json.dumps(online), "served"])
    url = redis if kind == "Redis" else "table:./var/online"
    run(settle(folder, online=url), "items", "publish")


def timed(connection: Connection, requests: list[bytes]) -> list[float]:
    """Seconds of each."""
    seconds = []
    for request in requests:
        started = time.perf_counter()
        connection.ask(request)
        seconds.append(time.perf_counter() - started)
    return seconds


def compare(feast: int, ours: int, rows: int, rounds: int) -> dict[str, Any]:
    """Keys → side → times in ms and requests a second, and Feast's p50 as a multiple of ours in
    each round; the answers' values are equal."""
    rng, figures = np.random.default_rng(2), {}
    connections = {"feast": Connection(feast), "json": Connection(ours), "arrow": Connection(ours)}
    for count, asked in REQUESTS.items():
        keys = rng.integers(0, rows, (asked, count)).tolist()
        requests = {
            side: requests_of(side, keys) for side in connections if (side, count) != ("arrow", 1)
        }
        for number in range(min(CHECKED, asked)):
            answers = [
                values_of(side, connections[side].ask(some[number]))
                for side, some in requests.items()
            ]
            assert answers[0].shape == (count, DIM + len(FEATURES) - 1)
            for answer in answers[1:]:
                np.testing.assert_array_equal(answer.view(np.uint32), answers[0].view(np.uint32))
        times: dict[str, list[list[float]]] = {side: [] for side in requests}
        for _ in range(rounds):
            for side, some in requests.items():
                times[side].append(timed(connections[side], some))
        figures[str(count)] = {side: told(each, times["feast"]) for side, each in times.items()}
    for connection in connections.values():
        connection.close()
    return figures


def told(rounds: list[list[float]], feast: list[list[float]]) -> dict[str, Any]:
    """Of all rounds p50 and p99 in ms; the median of their requests a second; what Feast's p50 is
    of theirs, round by round."""
    p50_ms, p99_ms = np.percentile(np.concatenate(rounds), [50, 99]) * 1e3
    ratios = [
        statistics.median(theirs) / statistics.median(mine)
        for mine, theirs in zip(rounds, feast, strict=True)
    ]
    per_s = statistics.median(len(one) / sum(one) for one in rounds)
    return {"p50_ms": float(p50_ms), "p99_ms": float(p99_ms), "per_s": per_s, "ratios": ratios}


def main() -> None:
    """Measure and report."""
    rows, rounds = numbers(ROWS, ROUNDS)
    python, found = feast_python(), {}
    with tempfile.TemporaryDirectory() as name:
        origin = Path(name) / "origin"
        origin.mkdir()
        parts = committed(origin, rows)
        for kind in STORES:
            folder = Path(shutil.copytree(origin, Path(name) / f"over {kind}"))
            with RedisProcess(newest_redis(), Path(name)) as redis:
                loaded(folder, parts, kind, redis.url(), python)
                with feast_server(folder, python) as feast, our_server(folder) as ours:
                    found[kind] = compare(feast, ours, rows, rounds)
    lines = [
        f"{rows:,} rows of {DIM} float32 and 3 more, one connection; p50 / p99 ms, requests/s;"
        f" Feast's p50 as a multiple of ours, median of {rounds} rounds [range]"
    ]
    for kind, figures in found.items():
        for count, sides in figures.items():
            lines.append(
                f"{count} key{'s' * (count != '1')}: Feast over {STORES[kind]} "
                + _times(sides["feast"])
            )
            for side, of in sides.items():
                if side == "feast":
                    continue
                shown = (
                    f"{statistics.median(of['ratios']):.1f} × [{min(of['ratios']):.1f} to"
                    f" {max(of['ratios']):.1f}]"
                )
                lines.append(
                    f"  we over {kind}, {'Arrow' if side == 'arrow' else 'JSON'} {_times(of)}:"
                    f" {shown}"
                )
    report("serve_feast", lines, {"rows": rows, "rounds": rounds, "stores": found})


def _times(of: dict[str, Any]) -> str:
    return f"{of['p50_ms']:.2f} / {of['p99_ms']:.2f} ms, {of['per_s']:,.0f}/s"


if __name__ == "__main__":
    main()
