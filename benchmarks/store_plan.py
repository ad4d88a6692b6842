"""Planning a delta: 10 M source rows of which 1 % changed. Seconds and peak memory of the whole process that plans, and the share of the
time that is the source's own SQL; then what the delta costs the model, against the full run.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import yaml

from benchmarks.common import report
from jobs.config import Project
from jobs.progress import Silent
from jobs.run import plan_view, run_view

ROWS = 10_000_000
CHANGED = 0.01


class Half:
    """``x`` → ``half``: a model that costs next to nothing."""

    def fingerprint(self) -> str:
        """See :class:`precompute.model.Model`."""
        return "half"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """See :class:`precompute.model.Model`."""
        return {"half": np.asarray(batch.column("x"), np.float32) / 2}


def write_project(folder: Path, rows: int, changed: float) -> Project:
    """A project over ``rows`` generated rows, of which a share has another value than before."""
    (folder / "views").mkdir(exist_ok=True)
    view = {
        "name": "items",
        "entity": ["id"],
        "source": {"sql": "SELECT * FROM read_parquet('${data}/items.parquet')"},
        "model": {"use": "benchmarks.store_plan:Half"},
        "features": {"half": {"dtype": "float32"}},
        "ttl": "1d",
    }
    (folder / "views" / "items.yaml").write_text(yaml.safe_dump(view))
    project = {"root": "./var", "online": "lmdb:./var/online", "vars": {"data": "./"}}
    (folder / "project.yaml").write_text(yaml.safe_dump(project))
    bump = f"(i % {int(1 / changed)} = 1)::INT" if changed else "0"
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT i AS id, 'title of item ' || i AS title, i % 1000 + {bump} AS x, i / 7.0 AS price "
            f"FROM range({rows}) t(i)) TO '{folder}/items.parquet'"
        )
    return Project(folder)


def child(folder: str) -> None:
    """Plan, and print what it took; in a process of its own, for its peak memory."""
    started = time.perf_counter()
    plan = plan_view(Project(folder), "items")
    seconds = time.perf_counter() - started
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes, **plan.to_json()}))


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = write_project(folder, ROWS, 0.0)
        full = run_view(project, "items", Silent(), command="materialize")
        project = write_project(folder, ROWS, CHANGED)
        done = subprocess.run([sys.executable, "-m", "benchmarks.store_plan", name], capture_output=True, text=True, check=True)
        plan = json.loads(done.stdout)
        assert plan["changed"] == ROWS * CHANGED, plan
        delta = run_view(project, "items", Silent(), command="materialize")
    share = delta.stages_s["model"] / full.stages_s["model"]
    report(
        "store_plan",
        [
            f"planning over {ROWS:,} rows, {CHANGED:.0%} changed: {plan['seconds']:.1f} s, {plan['peak_bytes'] / 1e9:.2f} GB at its peak",
            f"the full run: {full.seconds:.1f} s; the delta: {delta.seconds:.1f} s; model time of the delta, of the full run's: {share:.2%}",
        ],
        {
            "plan_s": plan["seconds"],
            "peak_bytes": plan["peak_bytes"],
            "full_s": full.seconds,
            "delta_s": delta.seconds,
            "model_share": share,
            "delta_stages_s": delta.stages_s,
        },
    )


if __name__ == "__main__":
    child(sys.argv[1]) if len(sys.argv) > 1 else main()
