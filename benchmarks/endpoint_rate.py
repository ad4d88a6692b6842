"""An endpoint that takes 50 ms, 64 requests in flight: share of the ideal rate, 64 / 50 ms, that a
view's rows get, a bare loop of requests beside it in turns.

The stand-in has a process of its own, the rows go through the engine: prompts, requests, schema,
cache and features. On a machine that others use, too, the bare loop shows what can be had.

python -m benchmarks.endpoint_rate [rows] [turns]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import pyarrow as pa

from benchmarks.common import cpu_s, report
from precompute.engine.runner import Runner
from precompute.plugins.endpoints.chat import ChatEndpoint
from precompute.plugins.endpoints.transport import Transport
from precompute.store.feature_view import Feature, FeatureView

IN_FLIGHT, DELAY_S = 64, 0.05
ROWS, TURNS = 20_000, 3
VIEW = FeatureView(
    "labels",
    ("id",),
    (Feature("label", "string"), Feature("score", "float32")),
    ttl_s=86400,
    stale_for_s=0,
)
SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["long", "short"]}, "score": {"type": "number"}},
    "required": ["label", "score"],
}


@contextlib.contextmanager
def _stand_in() -> Iterator[str]:
    """Its base URL."""
    command = [sys.executable, "-m", "precompute.plugins.endpoints.tests.stand_in", str(DELAY_S)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        process.stdin.close()


def _view_rate(url: str, rows: int) -> tuple[float, float]:
    """Rows a second through the engine, and CPU microseconds for each."""
    with tempfile.TemporaryDirectory() as cache:
        model = ChatEndpoint(
            url,
            "small",
            "Label: {text}",
            schema=SCHEMA,
            cache=cache,
            limits={"in_flight": IN_FLIGHT},
        )
        windows = [pa.record_batch({"text": [f"document number {i}" for i in range(rows)]})]
        started, cpu = time.perf_counter(), cpu_s()
        done = sum(outcome.done for _, outcome in Runner(model, VIEW).stream(windows))
        seconds, cpu = time.perf_counter() - started, cpu_s() - cpu
        assert done == model.figures()["requests"] == rows
        return rows / seconds, 1e6 * cpu / rows


async def _bare_rate(url: str, rows: int) -> float:
    """Requests a second of a loop that does nothing else."""
    transport, left = Transport(url, []), rows
    body = json.dumps(
        {"model": "small", "messages": [{"role": "user", "content": "Label: document number 1"}]}
    ).encode()

    async def one() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            assert (await transport.post("/chat/completions", body, 60)).status == 200

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(IN_FLIGHT)))
    seconds = time.perf_counter() - started
    await transport.aclose()
    return rows / seconds


def main() -> None:
    """Measure and report."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else TURNS
    ideal, view, bare, cpu = IN_FLIGHT / DELAY_S, list[float](), list[float](), list[float]()
    with _stand_in() as url:
        for _ in range(turns):
            bare.append(asyncio.run(_bare_rate(url, rows)))
            rate, cpu_us = _view_rate(url, rows)
            view.append(rate)
            cpu.append(cpu_us)
    of_ideal, bare_of_ideal = statistics.median(view) / ideal, statistics.median(bare) / ideal
    of_bare = statistics.median(a / b for a, b in zip(view, bare, strict=True))
    lines = [
        (
            f"{rows:,} rows, {IN_FLIGHT} in flight, {DELAY_S * 1000:g} ms: {of_ideal:.3f} of the"
            f" ideal {ideal:,.0f} a second (goal ≥ 0.95), best {max(view) / ideal:.3f};"
            f" {statistics.median(cpu):.0f} µs of CPU a row"
        ),
        (
            f"a bare loop of requests: {bare_of_ideal:.3f} of the ideal; the view {of_bare:.3f} of"
            " that"
        ),
    ]
    report(
        "endpoint_rate",
        lines,
        {
            "rows": rows,
            "of_ideal": of_ideal,
            "of_bare": of_bare,
            "view": view,
            "bare": bare,
            "cpu_us": cpu,
        },
    )


if __name__ == "__main__":
    main()
