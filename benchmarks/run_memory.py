"""What a run and its publishing take in memory, by `memory_mb`: of 10⁵ and of 10⁷ scores, and of
large rows in every way in and out, each in a process of its own, looked at with its children every
10 ms; or that it is refused, and with what figure.

python -m benchmarks.run_memory [memory_mb] [share of the rows, in %] [part of a shape's name]
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import child, report, run, settle, write_project
from benchmarks.gates_cost import scores
from precompute.jobs.config.project import Project
from precompute.store.errors import OverMemoryError

SIZES = (100_000, 10_000_000)
BESIDE_MB = 300
"""MB of its own that docs/reference.md grants a process beside ``memory_mb``."""


def _text(size: int, salt: str = "") -> str:
    """SQL of a text of so many characters that does not compress."""
    parts = f"list_transform(range({-(-size // 32)}), lambda j: md5(concat(i, '{salt}', j)))"
    return f"substr(array_to_string({parts}, ''), 1, {size})"


TEXT: dict[str, Any] = {"dtype": "string"}
TEXT_A = {"a": (_text(1100), TEXT)}
TEXTS_OF_1_MB = {"a": (_text(1_000_000), TEXT)}
TEXTS = {"a": (_text(256), TEXT), "b": (_text(256, "b"), TEXT)}
LISTS = {
    "a": (
        "list_transform(range(5000), lambda j: (i * 7919 + j * 104729) % 1000003)",
        {"dtype": "int64", "max_items": 5000},
    )
}
VECTORS = {
    "a": (
        "list_transform(range(1024), lambda j: sin(i * 7919 + j)::FLOAT)::FLOAT[1024]",
        {"dtype": "float32", "dim": 1024},
    )
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows, and what is done with them.

    Attributes:
        memory_mb: the setting.
        rows: how many.
        columns: the features of the view: SQL, and how each is declared.
        does: what is measured, of :data:`STEPS`.
        before: what is done first in another process, of :data:`STEPS`; nothing where empty.
        kind: of the source's file.
        group_rows: rows of a row group; DuckDB's own choice where that is 0.
        view: more keys of the view.
        settings: more keys of the project.
        at: where the rows or the results lie: ``files``, ``redis``, or ``bucket`` for the source.
    """

    memory_mb: int
    rows: int
    columns: Mapping[str, tuple[str, dict[str, Any]]]
    does: str = "run"
    before: str = ""
    kind: str = "parquet"
    group_rows: int = 0
    view: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None
    at: str = "files"


INDEX = {"index": {"on": "a", "metric": "cosine", "recall_at_10": 0.95}}
WORKERS = {"engine": {"workers": 2}}
SHAPES: dict[str, Shape] = {
    "texts of 1.1 kB": Shape(1024, 130_000, TEXT_A),
    "texts of 1.5 kB": Shape(512, 130_000, {"a": (_text(1500), TEXT)}),
    "texts of 4 kB": Shape(512, 130_000, {"a": (_text(4000), TEXT)}),
    "two texts of 256 B": Shape(256, 3_000_000, TEXTS),
    "two texts of 256 B, as CSV": Shape(256, 3_000_000, TEXTS, kind="csv"),
    "texts of 1 MB": Shape(256, 300, TEXTS_OF_1_MB),
    "texts of 1 MB in row groups of 10": Shape(256, 300, TEXTS_OF_1_MB, group_rows=10),
    "lists of 5,000": Shape(512, 2000, LISTS),
    "texts of 1 MB, into Redis": Shape(256, 300, TEXTS_OF_1_MB, group_rows=10, at="redis"),
    "lists of 5,000, into Redis": Shape(512, 2000, LISTS, at="redis"),
    "texts of 1.1 kB from a bucket": Shape(512, 130_000, TEXT_A, at="bucket"),
    "texts of 1 MB by two workers": Shape(512, 300, TEXTS_OF_1_MB, group_rows=10, settings=WORKERS),
    "texts of 1 MB, every sixth changed": Shape(
        256, 300, TEXTS_OF_1_MB, "delta", "run", group_rows=10
    ),
    "lists of 5,000, every sixth changed": Shape(512, 2000, LISTS, "delta", "run"),
    "texts of 1 MB, two snapshots compared": Shape(
        256, 300, TEXTS_OF_1_MB, "compare", "two runs", group_rows=10
    ),
    "lists of 5,000, two snapshots compared": Shape(512, 2000, LISTS, "compare", "two runs"),
    "texts of 1 MB, 100 of them as of a time": Shape(
        256, 300, TEXTS_OF_1_MB, "as of", "run", group_rows=10
    ),
    "lists of 5,000, 100 of them as of a time": Shape(512, 2000, LISTS, "as of", "run"),
    "texts of 1 MB exported": Shape(256, 300, TEXTS_OF_1_MB, "export", "run", group_rows=10),
    "texts of 1 MB as a frame": Shape(256, 300, TEXTS_OF_1_MB, "frame", group_rows=10),
    "lists of 5,000 as a frame": Shape(512, 2000, LISTS, "frame"),
    "vectors of 1,024, indexed": Shape(
        256, 30_000, VECTORS, "publish", "materialize", group_rows=10_000, view=INDEX
    ),
}
CHANGED = 6
"""Of the rows of a source that is changed, one in so many is."""
AS_OF = 100
"""Rows of a training set."""
LOOK_S = 0.01
_CHILD = "--child"


def resident_mb() -> tuple[int, int]:
    """What this process and its children have in memory now: their own, and pages of files, which
    the system takes back when it wants to."""
    own = files = 0
    for pid in _with_children(os.getpid()):
        # a child may end meanwhile
        with contextlib.suppress(OSError, KeyError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines)
            own += int(status["RssAnon"].split()[0]) // 1024
            files += int(status["RssFile"].split()[0]) // 1024
    return own, files


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for number in task.read_text().split():
                yield from _with_children(int(number))


def _run(project: Project) -> None:
    (view,) = project.names
    run(project, view)


def _materialize(project: Project) -> None:
    (view,) = project.names
    run(project, view, "materialize")


def _publish(project: Project) -> None:
    (view,) = project.names
    run(project, view, "publish")


def _delta(project: Project) -> None:
    _change(project.folder)
    _run(project)


def _two_runs(project: Project) -> None:
    _run(project)
    _change(project.folder)
    # computed again, so that no row is the same row of the same file
    (view,) = project.names
    run(project, view, full=True)


def _compare(project: Project) -> None:
    from precompute.jobs.ops.history import diff

    (view,) = project.names
    found = diff(project, view)
    assert found.changed, found


def _as_of(project: Project) -> None:
    from precompute.store.history.point_in_time import get_historical_features

    (view,) = project.names
    at = pa.array([datetime.now(UTC) + timedelta(seconds=1)] * AS_OF, pa.timestamp("us", "UTC"))
    wanted = pa.table({"id": pa.array(range(AS_OF), pa.int64()), "event_timestamp": at})
    found = get_historical_features(
        project.offline, wanted, [view], memory_mb=project.settings.memory_mb
    )
    assert found.column(f"{view}__a").null_count == 0


def _export(project: Project) -> None:
    from precompute.jobs.ops.history import export

    (view,) = project.names
    export(project, view, project.folder / "exported.parquet")


def _frame(project: Project) -> None:
    (view,) = project.names
    file = pq.ParquetFile(next(project.folder.glob("x.*")))
    # not iter_batches, which holds the whole file at its end
    groups = map(file.read_row_group, range(file.num_row_groups))
    batches = (batch for group in groups for batch in group.to_batches())
    reader = pa.RecordBatchReader.from_batches(file.schema_arrow, batches)
    run(project, view, frame=reader)


STEPS: dict[str, Callable[[Project], None]] = {
    "run": _run,
    "materialize": _materialize,
    "publish": _publish,
    "delta": _delta,
    "two runs": _two_runs,
    "compare": _compare,
    "as of": _as_of,
    "export": _export,
    "frame": _frame,
}
"""What is measured, or done before it, by name."""


def _change(folder: Path) -> None:
    """Put the changed source in the place of the first."""
    os.replace(folder / "changed.parquet", folder / "x.parquet")


def measured(folder: Path, memory_mb: int, step: str) -> None:
    """Do one of :data:`STEPS`; prints what it took as a line of JSON."""
    first, looks, over = resident_mb(), list[tuple[int, int]](), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            looks.append(resident_mb())

    thread = threading.Thread(target=look)
    thread.start()
    os.environ["PRECOMPUTE_MEMORY_MB"] = str(memory_mb)
    project, refused = Project(folder), ""
    try:
        STEPS[step](project)
    except OverMemoryError as exc:
        refused = str(exc)
    finally:
        over.set()
        thread.join()
    print(
        json.dumps(
            {
                "refused": refused,
                "first_mb": first,
                "own_mb": max([own for own, _ in looks] or [first[0]]),
                "files_mb": max([files for _, files in looks] or [first[1]]),
            }
        )
    )


def large(folder: Path, shape: Shape, rows: int, source: str = "${data}/x") -> None:
    """One view that stores the columns of a file, and that file."""
    names = ", ".join(shape.columns)
    reads = f"SELECT id, {names} FROM read_{shape.kind}('{source}.{shape.kind}')"
    frame = shape.does == "frame"
    view: dict[str, Any] = {
        "source": {"frame": ["id", *shape.columns]} if frame else {"sql": reads},
        "model": {"use": "columns"},
        "features": {name: feature for name, (_, feature) in shape.columns.items()},
    }
    gates = {"gates": {"shape": None}}
    write_project(folder, {"large": view | gates | dict(shape.view or {})})
    if shape.settings:
        settle(folder, **shape.settings)
    made = ", ".join(f"{sql} AS {name}" for name, (sql, _) in shape.columns.items())
    _write(f"SELECT i AS id, {made} FROM range({rows}) t(i)", folder / f"x.{shape.kind}", shape)
    if shape.does in ("delta", "compare"):
        other = f"SELECT * REPLACE (CASE WHEN id % {CHANGED} = 0 THEN _ ELSE a END AS a)"
        kind = " || 'x'" if shape.columns["a"][1]["dtype"] == "string" else "[2:]"
        sql = f"{other.replace('_', 'a' + kind)} FROM '{folder / 'x.parquet'}'"
        _write(sql, folder / "changed.parquet", shape)


def _write(sql: str, path: Path, shape: Shape) -> None:
    with duckdb.connect(config={"memory_limit": "3GB", "threads": 2}) as connection:
        connection.execute(f"COPY ({sql}) TO '{path}'")
    if shape.group_rows:
        pq.write_table(pq.read_table(path), path, row_group_size=shape.group_rows)


def measured_shape(name: str, share: float) -> dict[str, Any]:
    """What a shape took, in a process of its own."""
    shape = SHAPES[name]
    rows = max(AS_OF, int(shape.rows * share)) if share < 1 else shape.rows
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = "${data}/x"
        if shape.at == "bucket":
            from tests.object_store import object_store

            stack.enter_context(object_store())
            source = "s3://bucket/x"
        large(folder, shape, rows, source)
        if shape.at == "bucket":
            from precompute.store.disk.bucket import open_store

            open_store("s3://bucket", 10.0, 10.0).put("x.parquet", folder / "x.parquet")
        if shape.at == "redis":
            from precompute.plugins.redis.tests.processes import RedisProcess, newest_redis

            server = stack.enter_context(RedisProcess(newest_redis(), folder))
            settle(folder, online=server.url())
        if shape.before:
            child("run_memory", _CHILD, folder, 2048, shape.before)
        found = child("run_memory", _CHILD, folder, shape.memory_mb, shape.does)
    return dict(found) | {"memory_mb": shape.memory_mb, "rows": rows}


def line_of(name: str, found: Mapping[str, Any]) -> str:
    """What a shape took, in words."""
    wanted = re.search(r"set memory_mb: (\d+)", found["refused"])
    did = f"refused: {wanted[0]}" if wanted else "done"
    return (
        f"{found['rows']:,} {name} at memory_mb {found['memory_mb']}: {found['own_mb']} MB of its"
        f" own at most, {found['memory_mb'] + BESIDE_MB} granted; {did}"
    )


def main() -> None:
    """Measure and report."""
    if sys.argv[1:2] == [_CHILD]:
        measured(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        return
    given = [*sys.argv[1:], *("256", "100", "")[len(sys.argv) - 1 :]]
    memory_mb, share, part = int(given[0]), int(given[1]) / 100, given[2]
    lines, figures = list[str](), {}
    for rows in () if part else SIZES:
        with tempfile.TemporaryDirectory() as name:
            scores(Path(name), rows)
            figures[rows] = found = child("run_memory", _CHILD, name, memory_mb, "run")
        lines.append(
            f"{rows:,} scores at memory_mb {memory_mb}: {found['own_mb']} MB of its own at most,"
            f" {found['own_mb'] - memory_mb:+} MB ({sum(found['first_mb'])} MB with imports before"
            f" the first row); pages of files besides: {found['files_mb']} MB"
        )
    of_shapes = {}
    for shape in SHAPES:
        if part in shape:
            of_shapes[shape] = found = measured_shape(shape, share)
            lines.append(line_of(shape, found))
            print(lines[-1], flush=True)
    report(
        "run_memory",
        lines,
        {
            "memory_mb": memory_mb,
            "rows": {str(rows): found for rows, found in figures.items()},
            "shapes": of_shapes,
        },
    )


if __name__ == "__main__":
    main()
