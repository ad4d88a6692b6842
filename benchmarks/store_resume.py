"""How long a run takes until it computes its first row when 10,000 chunks of an interrupted one are
there to be taken over, against the same start with none.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from benchmarks.common import report, run
from benchmarks.store_plan import items
from precompute.jobs.config.project import Project
from precompute.jobs.run.materialize import dry_run
from precompute.jobs.run.rows.plan import RunOptions
from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import ViewStore

CHUNKS = 10_000
CHUNK_ROWS = 100


def start_s(project: Project) -> tuple[float, int]:
    """(seconds the plan takes beside reading the source, rows taken over)."""
    made = Report("", "items", "plan")
    started = time.perf_counter()
    plan = dry_run(project, project.offline.view("items"), RunOptions(), made)
    return (
        time.perf_counter() - started - made.stages_s["source"] - made.stages_s["open"],
        plan.diff.resumed,
    )


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as name:
        project = items(Path(name), CHUNKS * CHUNK_ROWS + 1, 0.0)
        without, _ = start_s(project)
        small = patch.multiple(
            "precompute.jobs.run.rows.chunks", PART_BYTES=1, WINDOW_ROWS=CHUNK_ROWS
        )
        with (
            small,
            patch.object(ViewStore, "commit", _interrupted),
            contextlib.suppress(KeyboardInterrupt),
        ):
            run(project, "items", "materialize")
        resumed, rows = start_s(project)
    assert rows == CHUNKS * CHUNK_ROWS + 1
    report(
        "store_resume",
        [
            f"planning with {CHUNKS:,} finished chunks ({rows:,} rows): {resumed:.2f} s; with none:"
            f" {without:.2f} s"
        ],
        {"resume_s": resumed, "without_s": without, "chunks": CHUNKS},
    )


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
