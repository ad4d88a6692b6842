"""What figures and gates take of a run: 10⁷ scores by a model that costs next to nothing, computed
again over a live version and published, with all of them and without any.

python -m benchmarks.gates_cost [rows]
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import cpu_s, numbers, report, run, stages, write_project
from precompute.jobs.config.project import Project
from precompute.jobs.run.judge.audit import Sample
from precompute.jobs.run.judge.gates import Judge
from precompute.jobs.run.judge.golden import Golden
from precompute.jobs.run.rows import chunks
from precompute.model import digest

ROWS, ROUNDS = 10_000_000, 5


class Score:
    """``x`` float32 [rows] → ``score`` float32 [rows]."""

    def fingerprint(self) -> str:
        """See :class:`precompute.model.Model`."""
        return digest(version=1)

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        """See :class:`precompute.model.Model`."""
        return {"score": np.tanh(np.asarray(batch.column("x")))}


def scores(folder: Path, rows: int) -> Project:
    """One view over a Parquet file of ids and numbers."""
    view: dict[str, Any] = {
        "source": {"sql": "SELECT id, x FROM read_parquet('${data}/items.parquet')"},
        "model": {"use": "benchmarks.gates_cost:Score"},
        "features": {"score": {"dtype": "float32"}},
    }
    project = write_project(folder, {"scores": view})
    write_items(folder, rows, 0)
    return project


def write_items(folder: Path, rows: int, day: int) -> None:
    """The same items with numbers that drifted a little."""
    x = np.random.default_rng(0).standard_normal(rows) + 0.05 * np.random.default_rng(
        100 + day
    ).standard_normal(rows)
    pq.write_table(
        pa.table({"id": np.arange(rows), "x": x.astype(np.float32)}), folder / "items.parquet"
    )


@contextlib.contextmanager
def without_any() -> Iterator[None]:
    """No row is counted, drawn, judged, or looked for to be computed again."""
    with (
        mock.patch.object(
            chunks,
            "write_rows",
            lambda store, run, name, table, *_: store.write_part(run, name, table),
        ),
        mock.patch.object(Sample, "draw", return_value=None),
        mock.patch.object(Golden, "_draw", return_value=None),
        mock.patch.object(Judge, "judge", lambda _judge, snapshot, *_: snapshot),
    ):
        yield


def timed(project: Project) -> dict[str, Any]:
    """CPU seconds of computing every row and of publishing them, the stages' seconds, and the gates
    that judged."""
    begun = cpu_s()
    done = run(project, "scores", "materialize", full=True)
    computed = cpu_s()
    run(project, "scores", "publish")
    figures: dict[str, Any] = {"computed_s": computed - begun, "published_s": cpu_s() - computed}
    return figures | {
        "stages_s": dict(done.stages_s),
        "gates": sorted({verdict.gate for verdict in done.gates}),
    }


def main() -> None:
    """Measure and report."""
    (rows,) = numbers(ROWS)
    judged, plain = [], []
    with tempfile.TemporaryDirectory() as name:
        project = scores(Path(name), rows)
        timed(project)
        for day in range(1, ROUNDS + 1):
            write_items(Path(name), rows, day)
            with without_any():
                plain.append(timed(project))
            write_items(Path(name), rows, 50 + day)
            # of what has no figures there is nothing to compare with
            timed(project)
            write_items(Path(name), rows, 75 + day)
            judged.append(timed(project))
    # what else the machine does only adds to them
    with_all, without = (min(of["computed_s"] for of in runs) for runs in (judged, plain))
    whole = with_all + min(of["published_s"] for of in judged)
    share = (with_all - without) / whole
    lines = [
        (
            f"{rows:,} scores, computed and published: {whole:.2f} CPU s, of which figures and"
            f" gates {with_all - without:.2f}, {share:.1%} (computed {with_all:.2f}, without any"
            f" {without:.2f}; least of {ROUNDS})"
        ),
        f"gates: {', '.join(judged[-1]['gates'])}; seconds: {stages(judged[-1]['stages_s'])}",
    ]
    report("gates_cost", lines, {"rows": rows, "share": share, "judged": judged, "without": plain})


if __name__ == "__main__":
    main()
