"""10⁷ scores by a model that costs next to nothing, or as many as the argument says, read from
Parquet and materialized: the time of DuckDB, writing the same columns to Parquet, over ours.

Both in this process, in turns, with as many threads. DuckDB reads the same file, computes the same
score and a hash, and compresses by zstd; it has no keys to check, no gates, no digests, and syncs
nothing. Ours is all of ``materialize``: opening, the diff, the gates and the commit. By the clock,
and by the processor's time, which other work on the machine changes less. Then the command in a
process of its own, imports included, against DuckDB in one.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb

from benchmarks.common import cpu_s, numbers, report, run, stages
from benchmarks.gates_cost import ROWS, scores
from precompute.store.offline.runs import Report

ROUNDS = 5
_PEER = "--peer"

COPY = """
COPY (SELECT id, tanh(x)::FLOAT AS score, now() AS computed_at, (hash(x, signbit(x))::HUGEINT
- 9223372036854775808::HUGEINT)::BIGINT AS input_hash FROM read_parquet('{folder}/items.parquet'))
TO '{folder}/peer.parquet' (COMPRESSION zstd)
"""


def peer(folder: Path) -> None:
    """DuckDB's way."""
    with duckdb.connect() as connection:
        connection.execute(COPY.format(folder=folder))


def children_s() -> float:
    """Seconds that the child processes which ended have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(work: Callable[[], object], clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds, and those of the processor."""
    began, computed = time.perf_counter(), clock()
    work()
    return time.perf_counter() - began, clock() - computed


def main() -> None:
    """Measure and report."""
    if sys.argv[1:2] == [_PEER]:
        peer(Path(sys.argv[2]))
        return
    (rows,) = numbers(ROWS)
    last = list[Report]()
    with tempfile.TemporaryDirectory() as name:
        project = scores(Path(name), rows)
        own = [sys.executable, "-m", "benchmarks.run_rows", _PEER, name]
        command = [sys.executable, "-m", "precompute.jobs.cli", "-c", name, "materialize"]
        sides: dict[str, tuple[Callable[[], object], Callable[[], float]]] = {
            "DuckDB": (lambda: peer(Path(name)), cpu_s),
            "materialize": (
                lambda: last.append(run(project, "scores", "materialize", full=True)),
                cpu_s,
            ),
            "DuckDB, a process": (lambda: _run(own), children_s),
            "materialize, a process": (lambda: _run([*command, "scores", "--full"]), children_s),
        }
        for work, clock in list(sides.values())[:2]:
            timed(work, clock)
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for _ in range(ROUNDS):
            for side, (work, clock) in sides.items():
                found[side].append(timed(work, clock))
        (snapshot,) = (project.offline.view("scores").snapshot(last[-1].snapshot or 0),)
        sizes = [part.size_bytes for part in snapshot.parts]
        size_bytes = {"ours": sum(sizes), "DuckDB": (Path(name) / "peer.parquet").stat().st_size}
    ratios = {
        f"{side}, {what}": sorted(
            peers[at] / ours[at]
            for peers, ours in zip(found[f"DuckDB{own}"], found[f"materialize{own}"], strict=True)
        )
        for side, own in (("in one process", ""), ("by the command", ", a process"))
        for at, what in enumerate(("by the clock", "by CPU"))
    }
    middle = {
        side: [statistics.median(of) for of in zip(*times, strict=True)]
        for side, times in found.items()
    }
    lines = [
        f"{rows:,} scores; medians of {ROUNDS}, seconds (CPU): "
        + ", ".join(f"{side} {wall:.2f} ({cpu:.2f})" for side, (wall, cpu) in middle.items()),
        "DuckDB's time / ours: "
        + "; ".join(
            f"{side} {statistics.median(each):.2f} [{each[0]:.2f}–{each[-1]:.2f}]"
            for side, each in ratios.items()
        ),
        f"bytes a row: {size_bytes['ours'] / rows:.1f}, DuckDB {size_bytes['DuckDB'] / rows:.1f};"
        f" seconds: {stages(last[-1].stages_s)}",
    ]
    report("run_rows", lines, {"rows": rows, "seconds": found, "ratios": ratios} | size_bytes)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main()
