"""A delta of 1 %: 10 M cheap rows, and 3 M rows whose feature is a vector of 64 floats. What
planning takes (seconds, peak memory of its process), and what the whole delta takes as a share of
the full run, by the clock and by the CPU.

    python -m benchmarks.store_plan [cheap | floats] [rows]
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks.common import child, cpu_s, report, run, stages, write_project
from precompute.jobs.config.project import Project
from precompute.jobs.run.run_view import plan_view
from precompute.store.offline.runs import Report

CASES = {"cheap": 10_000_000, "floats": 3_000_000}
CHANGED = 0.01
DIM = 64


class Half:
    """``x`` → ``half``: a model that costs next to nothing."""

    def fingerprint(self) -> str:
        """See :class:`precompute.model.Model`."""
        return "half"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """See :class:`precompute.model.Model`."""
        return {"half": np.asarray(batch.column("x"), np.float32) / 2}


class Spread:
    """``x`` → ``vector``, :data:`DIM` float32: a model that costs little more than the memory it
    fills."""

    def fingerprint(self) -> str:
        """See :class:`precompute.model.Model`."""
        return "spread"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """See :class:`precompute.model.Model`."""
        x = np.asarray(batch.column("x"), np.float32) + np.asarray(
            batch.column("price"), np.float32
        )
        return {"vector": np.sin(x[:, None] * np.arange(1, DIM + 1, dtype=np.float32))}


def items(folder: Path, rows: int, changed: float, case: str = "cheap", step: int = 1) -> Project:
    """A project over ``rows`` generated rows, of which a share has another value than at the step
    before; at each step others, until all had their turn."""
    view = {
        "source": {"sql": "SELECT * FROM read_parquet('${data}/items.parquet')"},
        "model": {"use": f"benchmarks.store_plan:{'Half' if case == 'cheap' else 'Spread'}"},
        "features": (
            {"half": {"dtype": "float32"}}
            if case == "cheap"
            else {"vector": {"dtype": "float32", "dim": DIM}}
        ),
    }
    turns = int(1 / changed) if changed else 1
    bump = f"greatest(0, ({step - 1} - i % {turns} + {turns}) // {turns})" if changed else "0"
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT i AS id, 'title of item ' || i AS title, i % 1000 + {bump} AS x, i / 7.0"
            f" AS price FROM range({rows}) t(i)) TO '{folder}/items.parquet'"
        )
    return write_project(folder, {"items": view})


def planned(folder: str) -> None:
    """Plan, and print what it took; in a process of its own, for its peak memory."""
    started = time.perf_counter()
    plan = plan_view(Project(folder), "items")
    seconds = time.perf_counter() - started
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes, **plan.to_json()}))


def ran(project: Project) -> tuple[Report, float]:
    """(the run, its CPU seconds)."""
    before = cpu_s()
    return run(project, "items", "materialize"), cpu_s() - before


def measured(case: str, rows: int) -> dict[str, Any]:
    """The full run and the delta of one case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        full, full_cpu_s = ran(items(folder, rows, 0.0, case))
        project = items(folder, rows, CHANGED, case)
        plan = child("store_plan", "--plan", name)
        assert plan["changed"] == rows * CHANGED, plan
        delta, delta_cpu_s = ran(project)
    return {
        "rows": rows,
        "plan_s": plan["seconds"],
        "peak_bytes": plan["peak_bytes"],
        "full_s": full.seconds,
        "delta_s": delta.seconds,
        "ratio": delta.seconds / full.seconds,
        "full_cpu_s": full_cpu_s,
        "delta_cpu_s": delta_cpu_s,
        "cpu_ratio": delta_cpu_s / full_cpu_s,
        "full_stages_s": full.stages_s,
        "delta_stages_s": delta.stages_s,
    }


def main() -> None:
    """Measure and report."""
    asked = sys.argv[1:]
    cases = {asked[0]: int(asked[1]) if len(asked) > 1 else CASES[asked[0]]} if asked else CASES
    found = {case: measured(case, rows) for case, rows in cases.items()}
    lines = []
    for case, m in found.items():
        lines += [
            (
                f"{case}, {m['rows']:,} rows, {CHANGED:.0%} changed: the delta takes"
                f" {m['ratio']:.2f} of the full run ({m['delta_s']:.1f} s of {m['full_s']:.1f}),"
                f" {m['cpu_ratio']:.2f} of its CPU ({m['delta_cpu_s']:.1f} s of"
                f" {m['full_cpu_s']:.1f})"
            ),
            f"  planning alone: {m['plan_s']:.1f} s, {m['peak_bytes'] / 1e9:.2f} GB at its peak",
            f"  full: {stages(m['full_stages_s'])}",
            f"  delta: {stages(m['delta_stages_s'])}",
        ]
    report("store_plan", lines, found)


if __name__ == "__main__":
    planned(sys.argv[2]) if sys.argv[1:2] == ["--plan"] else main()
