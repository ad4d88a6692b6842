"""What a run costs besides its rows, after 1,000 snapshots against after 2; and the manifests a
partition's run reads after 4,000 partitions."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import report, run, write_project
from precompute.jobs.config.project import Project
from precompute.store.disk.record import replace, sealed
from precompute.store.offline.segment import Segment
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition, containing, utc_now

VIEW = "numbers"
ROWS = 200
FEW, MANY, PARTITIONS = 2, 1_000, 4_000
ROUNDS = 9
FIRST_DAY = datetime(2010, 1, 1, tzinfo=UTC)
OF_ROWS = ("source", "model", "write", "load", "verify")
"""Stages whose time is that of the rows."""


class Double:
    """``x`` → 2x."""

    def fingerprint(self) -> str:
        """Never another one."""
        return "double"

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        """Twice the input."""
        return {"double": 2.0 * np.asarray(batch.column("x"))}


def project(folder: Path, partitioned: bool) -> Project:
    """A view of :data:`ROWS` rows."""
    folder.mkdir()
    day = " WHERE $start < $end" if partitioned else ""
    view = {
        "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')" + day},
        "model": {"use": "benchmarks.store_history:Double"},
        "features": {"double": {"dtype": "float64"}},
        "ttl": "1h",
        **({"partition": {"by": "day", "start": f"{FIRST_DAY:%Y-%m-%d}"}} if partitioned else {}),
    }
    write(folder, 0)
    retention = {"keep": 3, "grace": "1d"}
    return write_project(folder, {VIEW: view}, retention=retention)


def write(folder: Path, changed: int) -> None:
    """The source, with one row as it never was before."""
    x = np.arange(ROWS, dtype=np.float64)
    x[0] = changed
    pq.write_table(pa.table({"id": np.arange(ROWS), "x": x}), folder / "data.parquet")


def add_past(store: ViewStore, snapshot: Snapshot, count: int, partitions: bool) -> None:
    """Commit the snapshot so many times more, each time with files of its own and a report."""
    last = store.runs.last()
    assert last is not None
    for number in range(count):
        name = f"2010{snapshot.number + number:011d}.000000Z-abcdef"
        folder = store.data / name
        folder.mkdir()
        number_of = snapshot.number + 1 + number
        (whole,) = snapshot.segments
        parts = tuple(
            replace(part, path=f"data/{name}/{Path(part.path).name}") for part in whole.parts
        )
        for old, new in zip(whole.parts, parts, strict=True):
            os.link(store.folder / old.path, store.folder / new.path)
        segment, record = replace(whole, run=name, parts=parts).numbered(number_of)
        day = str(containing("day", FIRST_DAY + timedelta(days=number))) if partitions else None
        made = replace(
            snapshot,
            number=number_of,
            run=name,
            segments=(segment,),
            partition=day,
            created_at=utc_now(),
        )
        # Not by store.commit: thousands of fsyncs would take minutes.
        (store.folder / segment.record.path).write_bytes(record)
        store.manifest_path(made.number).write_bytes(made.to_bytes())
        store.runs.path(name).write_bytes(sealed(replace(last, run=name, partition=day)))


def bookkeeping_s(project: Project, changed: int) -> float:
    """Of one run, whose delta is one row."""
    write(project.folder, changed)
    started = time.perf_counter()
    done = run(project, VIEW)
    seconds = time.perf_counter() - started
    return seconds - sum(done.stages_s.get(stage, 0.0) for stage in OF_ROWS)


def of_a_run() -> tuple[float, float]:
    """Median bookkeeping after :data:`FEW` and after :data:`MANY` snapshots, the runs taken in
    turn."""
    with tempfile.TemporaryDirectory() as folder:
        projects = []
        for count in (FEW, MANY):
            made = project(Path(folder) / str(count), partitioned=False)
            store = made.offline.view(VIEW)
            first = run(made, VIEW).snapshot
            assert first is not None
            add_past(store, store.snapshot(first), count - 1, partitions=False)
            bookkeeping_s(made, 1)  # the newest is its own again, and what is derived is there
            projects.append(made)
        times = [
            [bookkeeping_s(made, 2 + changed) for made in projects] for changed in range(ROUNDS)
        ]
    few, many = (statistics.median(t[i] for t in times) for i in (0, 1))
    return few, many


def of_a_partition() -> tuple[int, float]:
    """Manifests that the run of one more partition reads after :data:`PARTITIONS` others, and its
    bookkeeping in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        made = project(Path(folder) / "days", partitioned=True)
        store = made.offline.view(VIEW)
        first = run(made, VIEW).snapshot
        assert first is not None
        add_past(store, store.snapshot(first), PARTITIONS, partitions=True)
        parsed = Snapshot.from_bytes
        seen: list[str] = []

        def counted(data: bytes, where: str, segment_of: Callable[..., Segment]) -> Snapshot:
            seen.append(where)
            return parsed(data, where, segment_of)

        with patch.object(Snapshot, "from_bytes", counted):
            for day in (0, 1):
                seen.clear()
                started = time.perf_counter()
                at = FIRST_DAY + timedelta(days=PARTITIONS + day)
                partition = Partition.parse(str(containing("day", at)))
                done = run(made, VIEW, "materialize", partition=partition)
                seconds = (
                    time.perf_counter()
                    - started
                    - sum(done.stages_s.get(stage, 0.0) for stage in OF_ROWS)
                )
    return len(seen), seconds


def main() -> None:
    """Measure and report."""
    few, many = of_a_run()
    manifests, seconds = of_a_partition()
    report(
        "store_history",
        [
            (
                f"a run besides its rows: after {FEW} snapshots {few * 1e3:.1f} ms, after {MANY:,}"
                f" {many * 1e3:.1f} ms; ratio {many / few:.2f}"
            ),
            (
                f"one more partition after {PARTITIONS:,}: reads {manifests:,} manifests,"
                f" {seconds * 1e3:.1f} ms besides its rows"
            ),
        ],
        {
            "few_s": few,
            "many_s": many,
            "ratio": many / few,
            "manifests_read": manifests,
            "partition_s": seconds,
        },
    )


if __name__ == "__main__":
    main()
