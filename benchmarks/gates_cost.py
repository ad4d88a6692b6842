"""What figures and gates take of a run: 10⁷ scores by a model that costs next to nothing, computed anew over a live version and published, with all of them and without any.

python -m benchmarks.gates_cost [rows]
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.common import cpu_s, report
from jobs.config.project import Project
from jobs.pipeline import materialize
from jobs.pipeline.audit import Audit
from jobs.pipeline.run import run_view
from jobs.process.job import RunOptions
from jobs.process.progress import Silent
from precompute.model import digest
from store.offline.row_figures import RowCounter

ROWS, ROUNDS = 10_000_000, 3


class Score:
    """``x`` float32 [rows] → ``score`` float32 [rows]."""

    def fingerprint(self) -> str:
        """See :class:`precompute.model.Model`."""
        return digest(version=1)

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        """See :class:`precompute.model.Model`."""
        return {"score": np.tanh(np.asarray(batch.column("x")))}


def write_project(folder: Path, rows: int) -> Project:
    """One view over a Parquet file of ids and numbers."""
    (folder / "views").mkdir()
    view: dict[str, Any] = {
        "name": "scores",
        "entity": ["id"],
        "source": {"sql": "SELECT id, x FROM read_parquet('${data}/items.parquet')"},
        "model": {"use": "benchmarks.gates_cost:Score"},
        "features": {"score": {"dtype": "float32"}},
        "ttl": "1d",
    }
    (folder / "views" / "scores.yaml").write_text(yaml.safe_dump(view))
    (folder / "project.yaml").write_text(
        yaml.safe_dump({"root": "./var", "online": "table:./var/online", "vars": {"data": "./"}})
    )
    write_items(folder, rows, 0)
    return Project(folder)


def write_items(folder: Path, rows: int, day: int) -> None:
    """The same items with numbers that drifted a little."""
    x = np.random.default_rng(0).standard_normal(rows) + 0.05 * np.random.default_rng(100 + day).standard_normal(rows)
    pq.write_table(pa.table({"id": np.arange(rows), "x": x.astype(np.float32)}), folder / "items.parquet")


@contextlib.contextmanager
def without_any() -> Iterator[None]:
    """No row is counted, drawn or judged."""
    with (
        mock.patch.object(RowCounter, "add", return_value=None),
        mock.patch.object(Audit, "draw", return_value=None),
        mock.patch.object(materialize, "judged", lambda _job, _opened, snapshot, *_: snapshot),
    ):
        yield


def timed(project: Project) -> tuple[float, dict[str, float], list[str]]:
    """CPU seconds of a run of every row, its stages, and the gates that judged."""
    before = cpu_s()
    done = run_view(project, "scores", Silent(), RunOptions(full=True))
    assert done.status == "published", done.status
    return cpu_s() - before, dict(done.stages_s), sorted({verdict.gate for verdict in done.gates})


def main() -> None:
    """Measure and report."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    judged, plain = [], []
    with tempfile.TemporaryDirectory() as name:
        project = write_project(Path(name), rows)
        timed(project)
        for day in range(1, ROUNDS + 1):
            write_items(Path(name), rows, day)
            with without_any():
                plain.append(timed(project))
            # of what has no figures there is nothing to compare with
            timed(project)
            write_items(Path(name), rows, -day)
            judged.append(timed(project))
    with_all, without = (statistics.median(run[0] for run in runs) for runs in (judged, plain))
    share = (with_all - without) / with_all
    lines = [
        f"{rows:,} scores, computed and published: {with_all:.2f} CPU s, of which figures and gates {share:.1%} "
        f"(without any {without:.2f} s; medians of {ROUNDS})",
        f"gates: {', '.join(judged[-1][2])}; seconds: "
        + " · ".join(f"{stage} {seconds:.2f}" for stage, seconds in judged[-1][1].items()),
    ]
    report("gates_cost", lines, {"rows": rows, "share": share, "judged": judged, "without": plain})


if __name__ == "__main__":
    main()
