"""A view that serves all of its partitions: a new day, computed and published over the 59 before
it, against computing and publishing all 60 at once.

python -m benchmarks.serve_all [rows of a day]
"""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.common import cpu_s, report
from precompute.jobs.config.project import Project
from precompute.jobs.run.job import RunOptions
from precompute.jobs.run.progress import Silent
from precompute.jobs.run.run_view import run_view
from precompute.store.times import containing

DAYS, ROWS, DIM = 60, 120_000, 64
TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
FIRST = TODAY - timedelta(days=DAYS)


def write_project(folder: Path, rows: int, partitioned: bool) -> Project:
    """Documents by day, each day's in a file of its own, and a model that costs next to nothing:
    the worst case for what is done besides."""
    (folder / "views").mkdir(parents=True)
    for day in range(DAYS):
        keys = np.arange(day * rows, (day + 1) * rows)
        at = pa.array(
            np.full(rows, (FIRST + timedelta(days=day)).timestamp() * 1e6, np.int64),
            pa.timestamp("us", "UTC"),
        )
        pq.write_table(
            pa.table({"id": keys, "x": np.random.default_rng(day).standard_normal(rows), "t": at}),
            folder / f"day-{day:02}.parquet",
        )
    sql = "SELECT id, x FROM read_parquet('${data}/day-*.parquet')"
    view: dict[str, Any] = {
        "name": "documents",
        "entity": ["id"],
        "source": {"sql": sql},
        "model": {"use": "tests.arithmetic:Doubler", "args": {"dim": DIM}},
        "features": {"double": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": DIM}},
        "ttl": "400d",
    }
    if partitioned:
        view["source"] = {"sql": f"{sql} WHERE t >= $start AND t < $end"}
        view["partition"] = {"by": "day", "start": FIRST.date().isoformat(), "serve": "all"}
    (folder / "views" / "documents.yaml").write_text(yaml.safe_dump(view))
    settings = {"root": "./var", "online": "table:./var/online", "vars": {"data": "./"}}
    (folder / "project.yaml").write_text(yaml.safe_dump(settings))
    return Project(folder)


def timed(project: Project, options: RunOptions) -> dict[str, Any]:
    """Seconds and CPU seconds of a run, and its stages."""
    before, started = cpu_s(), time.perf_counter()
    done = run_view(project, "documents", Silent(), options)
    assert done.status == "published", done.status
    figures: dict[str, Any] = {"seconds": time.perf_counter() - started, "cpu_s": cpu_s() - before}
    return figures | {"stages_s": {name: round(s, 3) for name, s in done.stages_s.items()}}


def measured(rows: int) -> dict[str, Any]:
    """A new day, and everything."""
    with tempfile.TemporaryDirectory() as folder:
        project = write_project(Path(folder) / "days", rows, True)
        for day in range(DAYS - 1):
            partition = containing("day", FIRST + timedelta(days=day))
            run_view(project, "documents", Silent(), RunOptions("materialize", partition=partition))
        first = timed(project, RunOptions("publish"))
        new = timed(project, RunOptions(partition=containing("day", TODAY - timedelta(days=1))))
        ref = project.offline.view("documents").refs.live()
        assert ref is not None
        assert ref.place.overlays
        assert project.offline.view("documents").snapshot(ref.snapshot).rows == DAYS * rows
        every = timed(write_project(Path(folder) / "all", rows, False), RunOptions())
    return {
        "days": DAYS,
        "rows": DAYS * rows,
        "publish_59": first,
        "new_day": new,
        "all": every,
        "ratio": new["seconds"] / every["seconds"],
        "cpu_ratio": new["cpu_s"] / every["cpu_s"],
    }


def main() -> None:
    """Measure and report."""
    found = measured(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
    lines = [
        (
            f"{found['rows']:,} rows of {DIM} floats and a number, in {DAYS} days: a new day, run"
            f" and published, {found['new_day']['seconds']:.2f} s ({found['new_day']['cpu_s']:.2f}"
            f" s of CPU); all of them at once {found['all']['seconds']:.2f} s"
            f" ({found['all']['cpu_s']:.2f})"
        ),
        f"ratio {found['ratio']:.3f}, by CPU {found['cpu_ratio']:.3f}",
    ]
    report("serve_all", lines, found)


if __name__ == "__main__":
    main()
