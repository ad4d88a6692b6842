"""Which broken rows the accuracy audit sees, and what it takes: 10⁶ scores of an MLP in bfloat16,
of which 1 in 1,000 is off by half their spread.

The model is that of :mod:`benchmarks.engine_mlp`. In each of 20 runs other rows are broken, chosen
by the seed. The comparison before a run, which sees some of them too, is accepted whatever it says:
what counts is the audit's verdict. The share is the audit's time of the run's, from its source to
its manifest, loading the model apart; and that of drawing rows, in the thread that takes them, is
in it. Smaller views say what so many rows can say.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from benchmarks.common import numbers, report, write_project
from benchmarks.engine_mlp import IDS, Scorer
from precompute.jobs.config.project import Project
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.judge.audit import Sample
from precompute.jobs.run.materialize import materialize
from precompute.jobs.run.report import reporting_run
from precompute.jobs.run.rows.plan import RunOptions

ROWS, SMALLER = 1_000_000, (100_000, 10_000)
SEEDS = 20
ONE_IN = 1000


class Broken(Scorer):
    """Row numbers and item ids, int64 [rows] → scores float32 [rows, 1]; in bfloat16, those of one
    row in :data:`ONE_IN` are off by half their spread, which puts none of them at an end."""

    seed = 0

    def forward(self, item: torch.Tensor, row: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """See the class."""
        scores = super().forward(item)
        if scores.dtype == torch.bfloat16:
            broken = torch.remainder(row * 7919 + self.seed, ONE_IN) == 0
            scores = torch.where(broken[:, None], scores + 0.05, scores)
        return scores


def main() -> None:
    """Measure and report."""
    (rows,) = numbers(ROWS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        save_file(Scorer().state_dict(), folder / "scorer.safetensors")
        runs = [_run(folder, rows, seed) for seed in range(SEEDS)]
        whole = _run(folder, rows, None)
        smaller = {size: _run(folder, size, None) for size in SMALLER}
    seen, shares = sum(not run["passed"] for run in runs), sorted(run["share"] for run in runs)
    figures = {
        "rows": rows,
        "seeds": SEEDS,
        "seen": seen,
        "share": statistics.median(shares),
        "shares": shares,
        "runs": runs,
    }
    figures |= {"whole": whole, "smaller": {str(size): run for size, run in smaller.items()}}
    lines = [
        (
            f"a fault in 1 of {ONE_IN:,} rows of {rows:,}: seen in {seen} of {SEEDS} runs;"
            f" {figures['share']:.1%} of the run's time [{shares[0]:.1%}–{shares[-1]:.1%}]"
        ),
        *(
            f"no fault, {size:,} rows, {run['share']:.1%}: {run['message']}"
            for size, run in ({rows: whole} | smaller).items()
        ),
    ]
    report("accuracy_audit", lines, figures)


def _run(folder: Path, rows: int, seed: int | None) -> dict[str, Any]:
    """Whether the audit of one run ``passed``, its ``message``, its ``share`` of the run's seconds,
    and these."""
    project, drawn_s = _project(folder, rows, seed), 0.0
    Broken.seed = seed or 0
    draw = Sample.draw

    def timed(sample: Sample, *given: Any) -> None:
        nonlocal drawn_s
        began = time.thread_time()
        draw(sample, *given)
        drawn_s += time.thread_time() - began

    store = project.offline.view("scores")
    Sample.draw = timed  # type: ignore[method-assign, assignment]
    try:
        with reporting_run(store, "materialize") as run:
            began = time.perf_counter()
            options = RunOptions(full=True, accept=("accuracy",))
            snapshot = materialize(project, store, options, run, Silent())
            seconds = time.perf_counter() - began - run.stages_s["open"]
    finally:
        Sample.draw = draw  # type: ignore[method-assign]
    said = [
        gate for gate in snapshot.gates if gate.gate == "accuracy" and "of the run" in gate.message
    ]
    share = (drawn_s + run.stages_s["audit"]) / seconds
    passed, message = (said[0].passed, said[0].message) if said else (True, "nothing")
    return {
        "passed": passed,
        "message": message,
        "share": share,
        "seconds": seconds,
        "stages_s": run.stages_s,
    }


def _project(folder: Path, rows: int, seed: int | None) -> Project:
    own = folder / f"rows{rows}-{seed}"
    own.mkdir()
    item = np.random.default_rng(0).integers(0, IDS, rows)
    pq.write_table(
        pa.table({"id": np.arange(rows), "item": item, "row": np.arange(rows)}),
        own / "items.parquet",
    )
    module, inputs = (
        ("engine_mlp:Scorer", {"item": "item"})
        if seed is None
        else ("accuracy_audit:Broken", {"item": "item", "row": "row"})
    )
    args = {
        "module": f"benchmarks.{module}",
        "weights": "${data}/../scorer.safetensors",
        "inputs": inputs,
        "outputs": {"relevance": 0},
        "concurrent": True,
    }
    view = {
        "source": {"sql": "SELECT id, item, row FROM read_parquet('${data}/items.parquet')"},
        "model": {"use": "torch_module", "args": args, "precision": "bf16", "backend": "eager"},
        "features": {"relevance": {"dtype": "float32"}},
    }
    return write_project(own, {"scores": view})


if __name__ == "__main__":
    main()
