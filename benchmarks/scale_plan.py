"""What `precompute plan` says of 10⁷ rows after runs of 10⁶ and 3·10⁶, and what 10⁷ rows then take:
full runs and deltas of 1 %, computed and published, each in a process of its own; of a score that
costs next to nothing, and of 64 floats. And what measuring a run's usage takes of it.

    python -m benchmarks.scale_plan [cheap | floats] [rows predicted]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import child, report, run
from benchmarks.store_plan import items
from precompute.jobs.config.project import Project
from precompute.jobs.run.report import OverlappingCpu, UsageMeter
from precompute.plugins.capacity.plan import plan
from precompute.store.disk.record import plain
from precompute.store.offline.runs import Report

FITTED_TO, PREDICTED = (1_000_000, 3_000_000), {"cheap": 10_000_000, "floats": 10_000_000}
CHANGED = 0.01
FOR = 1_000_000_000


def written(folder: Path, rows: int, step: int, case: str) -> Project:
    """The project over so many rows, whose number may change at will."""
    items(folder, rows, CHANGED, case, step)
    path = folder / "views" / "items.yaml"
    view = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(view | {"gates": {"rows": None}}))
    return Project(folder)


def one_run(folder: str, kind: str) -> None:
    """A run and its publishing, as JSON of its report."""
    print(json.dumps(plain(run(Project(folder), "items", full=kind == "full"))))


def runs(folder: Path, rows: int, case: str) -> dict[str, dict[str, Any]]:
    """A full run, and a delta over it."""
    found = {}
    for step, kind in ((1, "full"), (2, "delta")):
        written(folder, rows, step, case)
        found[kind] = child("scale_plan", "--run", folder, kind)
        assert found[kind]["usage"]["kind"] == kind, found[kind]
    return found


def cpu_of(done: dict[str, Any]) -> float:
    """CPU seconds of a run."""
    of_stages: dict[str, float] = done["usage"]["cpu_s"]
    return sum(of_stages.values())


def figures_of(predicted: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
    """What was said of a run beside what came."""
    usage = done["usage"]
    came = {
        "cpu_s": cpu_of(done),
        "seconds": done["seconds"],
        "root_bytes": usage["written_bytes"],
        "online_bytes": usage["loaded_bytes"],
        "memory_bytes": usage["peak_bytes"],
    }
    stages = {line["stage"]: line["value"] for line in predicted["stages"]}
    return {
        "said": {name: predicted[name]["value"] for name in came},
        "error": {name: predicted[name]["error"] for name in came},
        "came": came,
        "ratio": {name: came[name] / predicted[name]["value"] for name in came},
        "stages": {name: (stages.get(name, 0.0), s) for name, s in usage["cpu_s"].items()},
        "idle": usage["idle"],
    }


def measured(case: str, rows: int) -> dict[str, Any]:
    """One case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fitted_to = {n: runs(folder, n, case) for n in FITTED_TO}
        said = plan(Project(folder), "items", rows=rows)
        came = runs(folder, rows, case)
        return {
            "rows": rows,
            "fitted_to": {
                n: {kind: (cpu_of(done), done["usage"]["idle"]) for kind, done in of.items()}
                for n, of in fitted_to.items()
            },
            **{kind: figures_of(said[kind], came[kind]) for kind in ("full", "delta")},
            "billion": plan(Project(folder), "items", rows=FOR, workers=16, price=0.8),
        }


def usage_us() -> float:
    """Microseconds that measuring adds to a run: two looks at the machine, twenty stages of two
    clocks each, and the stages that overlap."""

    def once() -> float:
        began = time.perf_counter()
        done, meter = Report("", "", ""), UsageMeter()
        for number in range(20):
            before = time.process_time()
            done.add_cpu(str(number), time.process_time() - before)
        OverlappingCpu(done).end(0.0)
        meter.fill(done)
        return time.perf_counter() - began

    return 1e6 * statistics.median(once() for _ in range(201))


def main() -> None:
    """Measure and report."""
    given = sys.argv[1:]
    cases = {given[0]: int(given[1]) if given[1:] else PREDICTED[given[0]]} if given else PREDICTED
    lines, found = list[str](), dict[str, Any]()
    for case, rows in cases.items():
        found[case] = of = measured(case, rows)
        for kind in ("full", "delta"):
            figures = of[kind]
            said, came, ratio = figures["said"], figures["came"], figures["ratio"]
            lines.append(
                f"{case}, {rows:,} rows, {kind}: {said['cpu_s']:.1f} ±"
                f" {figures['error']['cpu_s']:.1f} CPU s were said, {came['cpu_s']:.1f} came:"
                f" {ratio['cpu_s']:.2f} ×; elapsed {said['seconds']:.1f} s said,"
                f" {came['seconds']:.1f} came, the machine {figures['idle'] or 0:.0%} idle; root"
                f" {ratio['root_bytes']:.2f} ×, online {ratio['online_bytes']:.2f} ×,"
                f" memory {ratio['memory_bytes']:.2f} ×"
            )
    found["usage_us"] = usage_us()
    lines.append(f"measuring takes {found['usage_us']:.0f} µs of a run")
    report("scale_plan", lines, found)


if __name__ == "__main__":
    one_run(*sys.argv[2:4]) if sys.argv[1:2] == ["--run"] else main()
