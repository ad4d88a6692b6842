"""What a backfill of small partitions takes: 60 of 100 rows, by a model that doubles a number; in
all, and beside one run of each by a process of its own, as a cron line would."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import report

MODEL = """
import numpy as np

class Double:
    def fingerprint(self):
        return "double"

    def compute(self, batch):
        return {"double": 2.0 * np.asarray(batch.column("x"))}
"""
VIEW = """
name: daily
entity: [id]
source: {{sql: "SELECT range AS id, range::DOUBLE + epoch($start)::DOUBLE AS x FROM range({rows}) WHERE $end > $start"}}
model: {{use: "own_models:Double"}}
features: {{double: {{dtype: float64}}}}
ttl: 90d
partition: {{by: day, start: 2024-01-01}}
gates: {{shape: null, moved: null, computed: null}}
"""  # noqa: E501


def main() -> None:
    """Print both, and their ratio."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--partitions", type=int, default=60)
    arguments.add_argument("--rows", type=int, default=100)
    arguments.add_argument(
        "--alone",
        type=int,
        default=5,
        help="partitions that are run by a process of their own, to compare",
    )
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "views").mkdir()
        (folder / "own_models.py").write_text(MODEL)
        (folder / "views" / "daily.yaml").write_text(VIEW.format(rows=asked.rows))
        (folder / "project.yaml").write_text("root: ./var\nonline: table:./var/online\n")
        command = [sys.executable, "-P", "-m", "precompute.jobs.cli", "-c", str(folder)]
        first, last = (
            "2024-01-01",
            time.strftime("%Y-%m-%d", time.gmtime(1704067200 + (asked.partitions - 1) * 86400)),
        )
        before, began = os.times(), time.monotonic()
        subprocess.run(
            [*command, "backfill", "daily", "--from", first, "--to", last, "--json"],
            check=True,
            capture_output=True,
        )
        seconds, after = time.monotonic() - began, os.times()
        cpu_s = (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
        began = time.monotonic()
        for day in range(asked.alone):
            subprocess.run(
                [
                    *command,
                    "materialize",
                    "daily",
                    "--full",
                    "--partition",
                    f"2024-01-{day + 1:02d}",
                ],
                check=True,
                capture_output=True,
            )
        alone_s = (time.monotonic() - began) / asked.alone
    ratio = seconds / (alone_s * asked.partitions)
    report(
        "backfill",
        [
            (
                f"{asked.partitions} partitions of {asked.rows} rows: {seconds:.1f} s,"
                f" {cpu_s / asked.partitions:.3f} CPU s each"
            ),
            (
                f"a process for each: {alone_s:.2f} s; the backfill takes {ratio:.3f} of"
                f" {asked.partitions} of them"
            ),
        ],
        {
            "seconds": seconds,
            "cpu_s_each": cpu_s / asked.partitions,
            "alone_s": alone_s,
            "ratio": ratio,
        },
    )


if __name__ == "__main__":
    main()
