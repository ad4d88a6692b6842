"""Rows over HTTP from table files, by a worker's server with its limits, against a constant of the
same size from a bare ASGI application under uvicorn; both on one core, the client on another.

One connection gives latency, sixteen the rate. The client writes prepared requests to raw sockets,
so that the server is what is measured; an answer and its constant take turns, so that what else the
machine does falls on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROWS, VIEW, fill, report

REQUESTS = int(os.environ.get("SERVE_ROWS_REQUESTS", "20000"))
"""Of each answer, at sixteen connections; a fifth of it at one."""
ROUNDS = 5
_UNTOLD = 2**62
_ONE = "one key, JSON"
_ARROW, _JSON = "application/vnd.apache.arrow.stream", "application/json"
_PATH = f"/v1/views/{VIEW.name}"


def serve(folder: str, cache_bytes: int) -> None:
    """The server process: the API, with so many bytes of encoded rows, as a worker of ``precompute
    serve`` has it."""
    from precompute.jobs.serve.lookup_worker import settle
    from precompute.store.answers.lookup import Lookup
    from precompute.store.http.app import create_app
    from precompute.store.http.guard.access import AccessControl, Hosts
    from precompute.store.http.guard.limits import Limits
    from precompute.store.http.guard.server import GuardedServer
    from precompute.store.http.telemetry.instruments import Meter
    from precompute.store.online.table_store import TableStore

    meter = Meter()
    access = AccessControl(meter, hosts=Hosts(()))
    app = create_app(
        Lookup(TableStore(folder)), access=access, meter=meter, cache_bytes=cache_bytes
    )
    server = GuardedServer(app, Limits(), meter)
    settle()
    server.run(sockets=[_listening()])


def serve_constant() -> None:
    """The other one: the path says how many bytes are wanted."""
    import uvicorn

    bodies: dict[bytes, bytes] = {}

    async def constant(scope: Any, receive: Any, send: Any) -> None:
        path = scope["raw_path"]
        body = bodies.setdefault(path, b"x" * int(path[len(b"/constant/") :]))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    config = uvicorn.Config(
        constant, loop="uvloop", http="httptools", lifespan="off", access_log=False, log_config=None
    )
    uvicorn.Server(config).run(sockets=[_listening()])


def _listening() -> socket.socket:
    """On the first core, on a port that is reported."""
    os.sched_setaffinity(0, {0})
    sock = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(sock.getsockname()[1], flush=True)
    return sock


class _Caller(asyncio.Protocol):
    """Sends the next request when the last answer is complete."""

    def __init__(self, requests: list[bytes], offset: int, count: int, times: list[float]) -> None:
        self.requests, self.n, self.left, self.times = requests, offset, count, times
        self.buffer, self.missing, self.size = bytearray(), -1, 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.send()

    def send(self) -> None:
        self.started = time.perf_counter()
        self.transport.write(self.requests[self.n % len(self.requests)])
        self.n += 1

    def data_received(self, data: bytes) -> None:
        if self.missing < 0:
            self.buffer += data
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self.buffer[:end]).lower()
            assert head.startswith(b"http/1.1 200"), head
            if b"content-length" in head:
                self.size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                self.missing = end + 4 + self.size - len(self.buffer)
            else:
                # in pieces, the last one empty
                self.size, self.missing = (
                    len(self.buffer),
                    0 if self.buffer.endswith(b"\r\n0\r\n\r\n") else _UNTOLD,
                )
            self.buffer.clear()
        elif self.missing == _UNTOLD:
            self.size += len(data)
            self.missing = 0 if data.endswith(b"0\r\n\r\n") else _UNTOLD
        else:
            self.missing -= len(data)
        if self.missing == 0:
            self.missing = -1
            self.times.append(time.perf_counter() - self.started)
            self.left -= 1
            if self.left > 0:
                self.send()
            elif not self.done.done():
                self.done.set_result(None)
                self.transport.close()


async def _load(
    port: int, requests: list[bytes], connections: int, count: int
) -> tuple[list[float], float, int]:
    """(time of each request in s, of all in s, bytes of a body)."""
    times: list[float] = []
    loop, started = asyncio.get_running_loop(), time.perf_counter()
    callers = [
        (
            await loop.create_connection(
                partial(_Caller, requests, i * 37, count // connections, times), "127.0.0.1", port
            )
        )[1]
        for i in range(connections)
    ]
    await asyncio.gather(*(c.done for c in callers))
    return times, time.perf_counter() - started, callers[0].size


@dataclass
class Figures:
    """Of one kind of request, over the rounds: times at one connection; at sixteen, requests per
    second, and how long the server computes for one."""

    times: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def take(self, server: Server, requests: list[bytes], count: int) -> None:
        import uvloop

        self.times += uvloop.run(_load(server.port, requests, 1, count // 5))[0]
        before = server.cpu_s()
        times, seconds, _ = uvloop.run(_load(server.port, requests, 16, count))
        self.rates.append(len(times) / seconds)
        self.cpu_us.append((server.cpu_s() - before) / len(times) * 1e6)

    def told(self) -> dict[str, float]:
        p50, p99 = np.percentile(self.times, [50, 99]) * 1e3
        rate, cpu_us = statistics.median(self.rates), statistics.median(self.cpu_us)
        return {
            "p50_ms": float(p50),
            "p99_ms": float(p99),
            "requests_per_s": rate,
            "cpu_us": cpu_us,
        }


@dataclass(frozen=True)
class Server:
    """The server process."""

    pid: int
    port: int

    def cpu_s(self) -> float:
        """Seconds that it has computed: what other processes take of the machine does not count."""
        used = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")


def compare(server: Server, bare: Server, requests: list[bytes], total: int) -> Mapping[str, Any]:
    """The answer's figures, those of a constant of its size, and what the first are of the
    second."""
    import uvloop

    _, _, size = uvloop.run(_load(server.port, requests, 1, len(requests)))
    constant, ours, theirs = [_get(f"/constant/{size}")], Figures(), Figures()
    for _ in range(ROUNDS):
        theirs.take(bare, constant, total // ROUNDS)
        ours.take(server, requests, total // ROUNDS)
    answer, floor = ours.told(), theirs.told()
    return {
        "bytes": size,
        "answer": answer,
        "constant": floor,
        "rate_ratio": statistics.median(
            a / b for a, b in zip(ours.rates, theirs.rates, strict=True)
        ),
        "cpu_ratio": floor["cpu_us"] / answer["cpu_us"],
        "p50_ratio": answer["p50_ms"] / floor["p50_ms"],
        "p99_ratio": answer["p99_ms"] / floor["p99_ms"],
    }


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def _post(path: str, body: bytes, accept: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\nContent-Type:"
        f" application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def cases() -> dict[str, tuple[list[bytes], int]]:
    """Name → prepared requests, and how many of them are sent."""
    rng = np.random.default_rng(1)

    def lookups(keys: int, accept: str, **options: str) -> list[bytes]:
        drawn = ([str(i) for i in rng.integers(0, ROWS, keys)] for _ in range(100))
        return [
            _post(f"{_PATH}/lookup", json.dumps({"keys": k, **options}).encode(), accept)
            for k in drawn
        ]

    rows = [_get(f"{_PATH}/rows/{i}") for i in rng.integers(0, ROWS, 1000)]
    return {
        _ONE: (rows, REQUESTS),
        "the same from L1": (rows, REQUESTS),
        "100 keys, Arrow": (lookups(100, _ARROW), REQUESTS),
        "500 keys, Arrow": (lookups(500, _ARROW), REQUESTS),
        "100 keys, JSON": (lookups(100, _JSON), REQUESTS // 10),
        "100 keys, JSON, base64": (lookups(100, _JSON, encoding_format="base64"), REQUESTS // 2),
    }


@contextlib.contextmanager
def _serving(*arguments: str) -> Iterator[Server]:
    """A server on the first core, while this process stays on the second: of a folder and so many
    bytes of encoded rows, or of constants."""
    command = [sys.executable, "-m", "benchmarks.serve_rows", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        server = Server(process.pid, int(process.stdout.readline()))
        os.sched_setaffinity(0, {1 % (os.cpu_count() or 1)})
        yield server
    finally:
        process.terminate()
        process.wait()
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def main() -> None:
    """Measure and report."""
    from precompute.store.http.encoding.caching import MAX_CACHE_BYTES
    from precompute.store.online.table_store import TableStore

    with tempfile.TemporaryDirectory() as folder:
        fill(TableStore(folder))
        figures = {}
        for cache_bytes in (0, MAX_CACHE_BYTES):
            with _serving(folder, str(cache_bytes)) as server, _serving("constant") as bare:
                for name, (requests, total) in cases().items():
                    if (name == _ONE) == (cache_bytes == 0):
                        figures[name] = compare(server, bare, requests, total)
    lines = [
        f"{name:<24} {f['bytes']:>8,} B  {f['answer']['requests_per_s']:>8,.0f}/s,"
        f" {f['rate_ratio']:.2f} of the constant's, by CPU {f['cpu_ratio']:.2f}; p50"
        f" {f['answer']['p50_ms']:.3f} ms, {f['p50_ratio']:.2f} × its; p99"
        f" {f['answer']['p99_ms']:.3f} ms, {f['p99_ratio']:.2f} ×"
        for name, f in figures.items()
    ]
    report("serve_rows", lines, {"requests": REQUESTS, "cases": figures})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        serve(sys.argv[1], int(sys.argv[2]))
    elif len(sys.argv) == 2:
        serve_constant()
    else:
        main()
