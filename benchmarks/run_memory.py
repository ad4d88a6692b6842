"""What a run and its publishing take in memory, by `memory_mb`: of 10⁵ and of 10⁷ scores, each in a
process of its own, looked at every 10 ms.

python -m benchmarks.run_memory [memory_mb]
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path

from benchmarks.common import child, numbers, report, run
from benchmarks.gates_cost import scores
from precompute.jobs.config.project import Project

SIZES = (100_000, 10_000_000)
LOOK_S = 0.01
_CHILD = "--child"


def resident_mb() -> tuple[int, int]:
    """What this process has in memory now: its own, and pages of files, which the system takes back
    when it wants to."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, files = (int(status[name].split()[0]) // 1024 for name in ("RssAnon", "RssFile"))
    return own, files


def measured(folder: Path, memory_mb: int) -> None:
    """Run and publish; prints what it took as a line of JSON."""
    first, looks, over = resident_mb(), list[tuple[int, int]](), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            looks.append(resident_mb())

    thread = threading.Thread(target=look)
    thread.start()
    project = Project(folder, {"PRECOMPUTE_MEMORY_MB": str(memory_mb)})
    run(project, "scores")
    over.set()
    thread.join()
    print(
        json.dumps(
            {
                "first_mb": first,
                "own_mb": max(own for own, _ in looks),
                "files_mb": max(files for _, files in looks),
            }
        )
    )


def main() -> None:
    """Measure and report."""
    if sys.argv[1:2] == [_CHILD]:
        measured(Path(sys.argv[2]), int(sys.argv[3]))
        return
    (memory_mb,) = numbers(256)
    lines, figures = [], {}
    for rows in SIZES:
        with tempfile.TemporaryDirectory() as name:
            scores(Path(name), rows)
            figures[rows] = found = child("run_memory", _CHILD, name, memory_mb)
        lines.append(
            f"{rows:,} scores at memory_mb {memory_mb}: {found['own_mb']} MB of its own at most,"
            f" {found['own_mb'] - memory_mb:+} MB ({sum(found['first_mb'])} MB with imports before"
            f" the first row); pages of files besides: {found['files_mb']} MB"
        )
    report(
        "run_memory",
        lines,
        {"memory_mb": memory_mb, "rows": {str(rows): found for rows, found in figures.items()}},
    )


if __name__ == "__main__":
    main()
