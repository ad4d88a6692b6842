"""What a kill costs a run of a slow model: 20 rows a second, 1,200 rows, SIGKILL after 40 s of
computing. Seconds of work that the next run has to do again, in the run's own process and with a
worker. Before chunks ended by time it was all of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import report, write_project
from precompute.jobs.run.run_view import plan_view

ROWS = 1_200
ROW_S = 0.05
KILL_AFTER_S = 40.0


class Slow:
    """``x`` → ``half``, 50 ms a row; each row computed is a byte in a file."""

    def __init__(self, log: str) -> None:
        self._log = log

    def fingerprint(self) -> str:
        """See :class:`precompute.model.Model`."""
        return "slow"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """See :class:`precompute.model.Model`."""
        for _ in range(batch.num_rows):
            time.sleep(ROW_S)
            with open(self._log, "ab") as file:
                file.write(b".")
        return {"half": np.asarray(batch.column("x"), np.float32) / 2}


def lost_s(folder: Path, workers: int) -> float:
    """Seconds of a killed run's computing that the next one cannot take over."""
    folder.mkdir()
    pq.write_table(
        pa.table({"id": np.arange(ROWS), "x": np.arange(ROWS, dtype=np.float64)}),
        folder / "items.parquet",
    )
    log = folder / "computed"
    view = {
        "source": {"sql": f"SELECT * FROM read_parquet('{folder}/items.parquet')"},
        "model": {"use": "benchmarks.engine_kill:Slow", "args": {"log": str(log)}},
        "features": {"half": {"dtype": "float32"}},
    }
    engine = {"engine": {"workers": workers}} if workers else {}
    project = write_project(folder, {"items": view}, **engine)
    command = [
        sys.executable,
        "-m",
        "precompute.jobs.cli",
        "-c",
        str(folder),
        "materialize",
        "items",
        "--json",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while not log.exists():
        if process.poll() is not None:
            raise SystemExit(
                f"the run ended before its first row, with status {process.returncode}"
            )
        time.sleep(0.05)
    time.sleep(KILL_AFTER_S)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(1.0)  # a worker dies with its parent
    plan = plan_view(project, "items")
    return (log.stat().st_size - plan.diff.resumed) * ROW_S


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as name:
        found = {
            kind: lost_s(Path(name) / kind, workers)
            for kind, workers in (("own_process", 0), ("worker", 1))
        }
    report(
        "engine_kill",
        [
            f"killed after {KILL_AFTER_S:.0f} s at 20 rows/s, {kind.replace('_', ' ')}: {s:.1f} s"
            " of work lost"
            for kind, s in found.items()
        ],
        {"killed_after_s": KILL_AFTER_S, **{f"lost_s_{kind}": s for kind, s in found.items()}},
    )


if __name__ == "__main__":
    main()
