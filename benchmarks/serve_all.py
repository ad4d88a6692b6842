"""A view that serves all of its partitions: a new day, computed and published over the 59 before
it, against computing and publishing all 60 at once.

python -m benchmarks.serve_all [rows of a day]
"""

from __future__ import annotations

import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import cpu_s, numbers, report, run, write_project
from precompute.jobs.config.project import Project
from precompute.store.times import containing

DAYS, ROWS, DIM = 60, 120_000, 64
TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
FIRST = TODAY - timedelta(days=DAYS)


def documents(folder: Path, rows: int, partitioned: bool) -> Project:
    """Documents by day, each day's in a file of its own, and a model that costs next to nothing:
    the worst case for what is done besides."""
    folder.mkdir()
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
        "source": {"sql": sql},
        "model": {"use": "tests.models:Doubler", "args": {"dim": DIM}},
        "features": {"double": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": DIM}},
        "ttl": "400d",
    }
    if partitioned:
        view["source"] = {"sql": f"{sql} WHERE t >= $start AND t < $end"}
        view["partition"] = {"by": "day", "start": FIRST.date().isoformat(), "serve": "all"}
    return write_project(folder, {"documents": view})


def timed(project: Project, command: str = "run", **options: Any) -> dict[str, Any]:
    """Seconds and CPU seconds of a run, and its stages."""
    before, started = cpu_s(), time.perf_counter()
    done = run(project, "documents", command, **options)
    figures: dict[str, Any] = {"seconds": time.perf_counter() - started, "cpu_s": cpu_s() - before}
    return figures | {"stages_s": {name: round(s, 3) for name, s in done.stages_s.items()}}


def measured(rows: int) -> dict[str, Any]:
    """A new day, and everything."""
    with tempfile.TemporaryDirectory() as folder:
        project = documents(Path(folder) / "days", rows, True)
        for day in range(DAYS - 1):
            partition = containing("day", FIRST + timedelta(days=day))
            run(project, "documents", "materialize", partition=partition)
        first = timed(project, "publish")
        new = timed(project, partition=containing("day", TODAY - timedelta(days=1)))
        store = project.offline.view("documents")
        ref = store.log.live()
        assert ref is not None
        assert store.snapshot(ref.snapshot).names[1:]
        assert store.snapshot(ref.snapshot).rows == DAYS * rows
        every = timed(documents(Path(folder) / "all", rows, False))
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
    found = measured(*numbers(ROWS))
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
