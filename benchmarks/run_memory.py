"""What a run and its publishing take in memory, by `memory_mb`: of 10⁵ and of 10⁷ scores, and of
large rows, each in a process of its own, looked at every 10 ms; or that it is refused, and with
what figure.

python -m benchmarks.run_memory [memory_mb]
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq

from benchmarks.common import child, numbers, report, run, write_project
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
LIST: dict[str, Any] = {"dtype": "int64", "max_items": 5000}
ITEMS = "list_transform(range(5000), lambda j: (i * 7919 + j * 104729) % 1000003)"
SHAPES: dict[str, tuple[int, int, dict[str, tuple[str, dict[str, Any]]], int]] = {
    "texts of 1.1 kB": (1024, 130_000, {"a": (_text(1100), TEXT)}, 0),
    "texts of 1.5 kB": (512, 130_000, {"a": (_text(1500), TEXT)}, 0),
    "texts of 4 kB": (512, 130_000, {"a": (_text(4000), TEXT)}, 0),
    "two texts of 256 B": (
        256,
        3_000_000,
        {"a": (_text(256), TEXT), "b": (_text(256, "b"), TEXT)},
        0,
    ),
    "texts of 1 MB": (256, 300, {"a": (_text(1_000_000), TEXT)}, 0),
    "texts of 1 MB in row groups of 10": (256, 300, {"a": (_text(1_000_000), TEXT)}, 10),
    "lists of 5,000": (512, 2000, {"a": (ITEMS, LIST)}, 0),
}
"""``memory_mb``, rows, the features of a view as SQL and how they are declared, and the rows of a
row group; DuckDB's own choice where that is 0."""
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
    project, refused = Project(folder, {"PRECOMPUTE_MEMORY_MB": str(memory_mb)}), ""
    try:
        run(project, *project.names)
    except OverMemoryError as exc:
        refused = str(exc)
    over.set()
    thread.join()
    print(
        json.dumps(
            {
                "refused": refused,
                "first_mb": first,
                "own_mb": max(own for own, _ in looks),
                "files_mb": max(files for _, files in looks),
            }
        )
    )


def large(folder: Path, shape: str) -> None:
    """One view that stores the columns of a file of one of :data:`SHAPES`."""
    _, rows, columns, group_rows = SHAPES[shape]
    view: dict[str, Any] = {
        "source": {
            "sql": f"SELECT id, {', '.join(columns)} FROM read_parquet('${{data}}/x.parquet')"
        },
        "model": {"use": "columns"},
        "features": {name: feature for name, (_, feature) in columns.items()},
    }
    write_project(folder, {"large": view})
    made = ", ".join(f"{sql} AS {name}" for name, (sql, _) in columns.items())
    path = folder / "x.parquet"
    with duckdb.connect(config={"memory_limit": "3GB", "threads": 2}) as connection:
        connection.execute(f"COPY (SELECT i AS id, {made} FROM range({rows}) t(i)) TO '{path}'")
    if group_rows:
        pq.write_table(pq.read_table(path), path, row_group_size=group_rows)


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
    of_shapes = {}
    for shape, (shape_mb, rows, _, _) in SHAPES.items():
        with tempfile.TemporaryDirectory() as name:
            large(Path(name), shape)
            of_shapes[shape] = found = child("run_memory", _CHILD, name, shape_mb)
        wanted = re.search(r"set memory_mb: (\d+)", found["refused"])
        did = f"refused: {wanted[0]}" if wanted else "published"
        lines.append(
            f"{rows:,} {shape} at memory_mb {shape_mb}: {found['own_mb']} MB of its own at most,"
            f" {shape_mb + BESIDE_MB} granted; {did}"
        )
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
