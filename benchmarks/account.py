"""What looking at all that is live costs: looks a minute apart for an hour, of a view of 10⁷
scores.

python -m benchmarks.account [rows] [online]
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from benchmarks.common import cpu_s, report, run
from benchmarks.gates_cost import scores
from precompute.jobs.config.project import Project
from precompute.store.account import checker
from precompute.store.account.checker import LOOK_S, check_live, share_of
from precompute.store.online.url import open_online_store

ROWS, HOURS, EVERY_S = 10_000_000, 2, 60.0


def main() -> None:
    """Measure and report."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scores(folder, rows)
        project = Project(folder, {"PRECOMPUTE_ONLINE": sys.argv[2]} if len(sys.argv) > 2 else {})
        run(project, "scores")
        store, began_s, seconds, told = project.offline.view("scores"), time.time(), [], []
        with contextlib.closing(open_online_store(project.online)) as online:
            for minute in range(int(HOURS * 3600 / EVERY_S)):
                now_us = int((began_s + EVERY_S * minute) * 1e6)
                with mock.patch.object(checker, "clock_us", lambda now_us=now_us: now_us):
                    at = cpu_s()
                    account = check_live(store, online, share=share_of(EVERY_S), budget_s=LOOK_S)
                    seconds.append(cpu_s() - at)
                    told.append(account.looked_at(now_us))
                    assert not account.trouble, account.trouble
    share = sum(seconds) / (EVERY_S * len(seconds))
    lines = [
        (
            f"{rows:,} rows, {account.files_bytes / 1e6:,.0f} MB in {len(account.files)} files,"
            f" {HOURS} hours of looks each {EVERY_S:g} s: {share:.2%} of a core; a look"
            f" {sum(seconds) / len(seconds):.2f} CPU s, the longest {max(seconds):.2f}"
        ),
        f"after half an hour: {told[len(told) // (2 * HOURS)]}; at last: {told[-1]}",
    ]
    report("account", lines, {"rows": rows, "share": share, "seconds": seconds, "told": told[-1]})


if __name__ == "__main__":
    main()
