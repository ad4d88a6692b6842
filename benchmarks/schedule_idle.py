"""``precompute schedule`` over 300 views of a fixed hour with 200 reports each: CPU seconds a
minute while nothing is due, without its looks at the online store, and its memory; and both while
a run ends each second.

    python -m benchmarks.schedule_idle [views] [reports] [seconds]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.common import numbers, report, write_project
from precompute.jobs.config.project import Project
from precompute.store.disk.storage import identity_of
from precompute.store.offline.runs import Report
from precompute.store.times import iso

VIEW = {
    "source": {"sql": "SELECT 1 AS id, 1.0 AS x"},
    "model": {"use": "precompute.models.two_tower:Score", "args": {}},
    "features": {"score": {"dtype": "float32"}},
}
BEGAN = datetime(2026, 1, 1, 2, tzinfo=UTC)


def write_reports(project: Project, view: str, nights: range) -> None:
    """Reports of nightly runs, of the size that they have with gates and an engine's figures."""
    runs = project.offline.view(view).runs
    for number in nights:
        at = BEGAN + timedelta(days=number)
        one = Report(f"{at:%Y%m%dT%H%M%S}.000000Z-{number:06d}", view, "run", "published", iso(at))
        one.finished_at, one.due = iso(at + timedelta(minutes=3)), iso(at)
        one.engine = {f"stage {n}": {f"figure {m}": m / 7 for m in range(20)} for n in range(20)}
        runs.write(one)


def cpu_and_memory(pid: int) -> tuple[float, float]:
    """CPU seconds of a process so far, and the MB that are resident."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), pages * 4096 / 1e6


def main() -> None:
    """Measure, and report."""
    views, reports, seconds = numbers(300, 200, 60)
    with tempfile.TemporaryDirectory() as folder:
        names = [f"view_{number:03d}" for number in range(views)]
        project = write_project(
            Path(folder),
            dict.fromkeys(names, VIEW),
            schedule=dict.fromkeys(names, "0 2 * * *"),
            reconcile="1d",
        )
        identity_of(project.root)
        for name in names:
            write_reports(project, name, range(reports))
        command = [sys.executable, "-m", "precompute.jobs.cli", "-c", folder, "schedule"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as schedule:
            assert schedule.stdout is not None
            for _ in names:
                schedule.stdout.readline()
            time.sleep(3)
            figures, lines = dict[str, float](), list[str]()
            for what, ends in (("nothing is due", 0), ("a run ends each second", 1)):
                before_s = cpu_and_memory(schedule.pid)[0]
                for second in range(seconds):
                    new = range(reports + second, reports + second + ends)
                    write_reports(project, names[second % views], new)
                    time.sleep(1)
                now_s, memory_mb = cpu_and_memory(schedule.pid)
                a_minute_s = (now_s - before_s) * 60 / seconds
                figures |= {f"{what}, CPU s a minute": a_minute_s, f"{what}, MB": memory_mb}
                lines.append(
                    f"{what}: {a_minute_s:.2f} CPU s a minute, {memory_mb:.0f} MB resident"
                )
            schedule.terminate()
            schedule.communicate()
    lines.insert(0, f"{views} views, {reports} reports each")
    report("schedule_idle", lines, figures)


if __name__ == "__main__":
    main()
