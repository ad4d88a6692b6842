"""HTTP lookups from LMDB, server on one core and client on another, against the same server answering a constant of the same size.

One connection gives latency; sixteen, kept open, give the rate. The client writes prepared requests to raw sockets, so that the
server is what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common import ROWS, VIEW, fill, report

SECONDS = 4.0


def serve(folder: str) -> None:
    """The server process: the API, and beside it a route that answers a constant."""
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from store.api.app import create_app
    from store.lookup import Lookup
    from store.online.table_store import TableStore

    bodies = {size: b"x" * size for size in (200, 4000, 160_000)}

    async def constant(request: Request) -> Response:
        return Response(bodies[int(request.path_params["size"])], media_type="application/json")

    app: Any = create_app(Lookup(TableStore(folder)))
    app.starlette.router.routes.insert(0, Route("/constant/{size}", constant))
    os.sched_setaffinity(0, {0})
    sock = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(app, loop="uvloop", http="httptools", lifespan="off", access_log=False, log_config=None)
    print(sock.getsockname()[1], flush=True)
    uvicorn.Server(config).run(sockets=[sock])


class _Caller(asyncio.Protocol):
    """Sends the next request when the last answer is complete."""

    def __init__(self, requests: list[bytes], offset: int, until: float, times: list[float]) -> None:
        self.requests, self.n, self.until, self.times = requests, offset, until, times
        self.buffer, self.missing = bytearray(), -1
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
            length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            self.missing = end + 4 + length - len(self.buffer)
            self.buffer.clear()
        else:
            self.missing -= len(data)
        if self.missing == 0:
            self.missing = -1
            now = time.perf_counter()
            self.times.append(now - self.started)
            if now < self.until:
                self.send()
            elif not self.done.done():
                self.done.set_result(None)
                self.transport.close()


async def _load(port: int, requests: list[bytes], connections: int, seconds: float) -> list[float]:
    times: list[float] = []
    loop, until = asyncio.get_running_loop(), time.perf_counter() + seconds
    callers = [
        (await loop.create_connection(partial(_Caller, requests, i * 37, until, times), "127.0.0.1", port))[1]
        for i in range(connections)
    ]
    await asyncio.gather(*(c.done for c in callers))
    return times


def measure(port: int, requests: list[bytes]) -> tuple[float, float]:
    """(p50 in ms at one connection, requests/s at sixteen)."""
    import uvloop

    single = uvloop.run(_load(port, requests, 1, SECONDS / 2))
    many = uvloop.run(_load(port, requests, 16, SECONDS))
    return statistics.median(single) * 1e3, len(many) / SECONDS


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def _post(path: str, body: bytes, accept: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def main() -> None:
    """Measure and report."""
    from store.online.table_store import TableStore

    rng = np.random.default_rng(1)
    arrow = "application/vnd.apache.arrow.stream"
    with tempfile.TemporaryDirectory() as folder:
        fill(TableStore(folder))
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.lookup_http", folder], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            os.sched_setaffinity(0, {1 % (os.cpu_count() or 1)})
            view = f"/v1/views/{VIEW.name}"
            keys = [[str(i) for i in rng.integers(0, ROWS, 100)] for _ in range(200)]
            cases = {
                "constant, 200 B": [_get("/constant/200")],
                "constant, 4 kB": [_get("/constant/4000")],
                "one key, JSON, 384 float32": [_get(f"{view}/rows/{i}") for i in rng.integers(0, ROWS, 1000)],
                "constant, 160 kB": [_get("/constant/160000")],
                "100 keys, Arrow, 384 float32": [_post(f"{view}/lookup", json.dumps({"keys": k}).encode(), arrow) for k in keys],
                "100 keys, JSON, 384 float32": [
                    _post(f"{view}/lookup", json.dumps({"keys": k}).encode(), "application/json") for k in keys
                ],
            }
            figures = {
                name: dict(zip(("p50_ms", "requests_per_s"), measure(port, requests), strict=True))
                for name, requests in cases.items()
            }
        finally:
            process.terminate()
            process.wait()
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    lines = [
        f"{name:<30} p50 {f['p50_ms']:.3f} ms at 1 connection, {f['requests_per_s']:>8,.0f} requests/s at 16"
        for name, f in figures.items()
    ]
    ratio = figures["one key, JSON, 384 float32"]["requests_per_s"] / figures["constant, 4 kB"]["requests_per_s"]
    batch = figures["100 keys, Arrow, 384 float32"]["requests_per_s"] / figures["constant, 160 kB"]["requests_per_s"]
    lines.append(f"of the constant's rate: one key {ratio:.2f}, 100 keys as Arrow {batch:.2f}")
    report("lookup_http", lines, {"cases": figures, "one_key_ratio": ratio, "arrow_ratio": batch})


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) > 1 else main()
