"""What it costs to read all of a CSV, or of lines of JSON, for the types of its columns, beside one
read of it into a table; and to compare the footers of many Parquet files.

python -m benchmarks.source_types [rows of the CSV] [of JSON] [files of Parquet]
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb

from benchmarks.common import cpu_s, numbers, report
from precompute.sources.source import Source

ROUNDS = 3
MEMORY_MB = 2048
COLUMNS = """
    i AS id, (i * 7919) % 100000 AS count, round(hash(i) % 10000000 / 100, 2) AS price,
    ((hash(i + 7) % 9007199254740992) / 9007199254740992.0)::DOUBLE AS score,
    'item ' || substr(md5(i::VARCHAR), 1, 12) AS name, 'c' || (i % 100) AS category,
    DATE '2020-01-01' + (i % 1500)::INTEGER AS day,
    TIMESTAMP '2020-01-01' + to_seconds(i * 7) AS at, i % 3 = 0 AS sold
"""


def least(work: Callable[[], Any]) -> float:
    """CPU seconds of a call, the least of several."""
    times = []
    for _ in range(ROUNDS):
        before = cpu_s()
        work()
        times.append(cpu_s() - before)
    return min(times)


def read(file: Path) -> None:
    """One read of a file into a table, by DuckDB's own types."""
    connection = duckdb.connect(config={"threads": 2})
    connection.execute(f"CREATE TABLE rows AS SELECT * FROM '{file}'")
    connection.close()


def opened(file: Path, load: bool = False) -> None:
    """A source of a file, opened; and loaded."""
    sql = f"SELECT * FROM '{file}'"
    with Source(sql, ("id",), {}, folder=file.parent, memory_mb=MEMORY_MB, threads=2) as source:
        if load:
            source.load()


def typing(file: Path) -> tuple[str, dict[str, float]]:
    """A file's line and figures."""
    size = file.stat().st_size / 1e6
    once, types = least(lambda: read(file)), least(lambda: opened(file))
    line = (
        f"{file.suffix[1:]}, {size:,.0f} MB, 9 columns: types {types:.2f} s of CPU, one read"
        f" {once:.2f}; ratio {types / once:.2f}, with a typed read {types / once + 1:.2f}"
    )
    return line, {"read_s": once, "types_s": types, "ratio": types / once, "mb": size}


def footers(folder: Path, files: int) -> tuple[str, dict[str, float]]:
    """Line and figures of many small Parquet files."""
    first = folder / "0.parquet"
    duckdb.sql(f"COPY (SELECT {COLUMNS} FROM range(1000) r(i)) TO '{first}'")
    for number in range(1, files):
        shutil.copy(first, folder / f"{number}.parquet")
    began = time.perf_counter()
    compared = least(lambda: opened(folder / "*.parquet"))
    clock = (time.perf_counter() - began) / ROUNDS
    line = (
        f"parquet, {files:,} files: compared in {compared:.2f} s of CPU, {clock:.2f} by the clock"
    )
    return line, {"files": files, "compared_s": compared, "clock_s": clock}


def main() -> None:
    """Measure and report."""
    csv_rows, json_rows, files = numbers(3_000_000, 1_000_000, 1000)
    lines, figures = list[str](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ending, rows in (("csv", csv_rows), ("jsonl", json_rows)):
            file = folder / f"rows.{ending}"
            kind = "csv" if ending == "csv" else "json"
            duckdb.sql(
                f"COPY (SELECT {COLUMNS} FROM range({rows}) r(i)) TO '{file}' (FORMAT {kind})"
            )
            line, figures[kind] = typing(file)
            lines.append(line)
            file.unlink()
        line, figures["parquet"] = footers(folder, files)
        lines.append(line)
    report("source_types", lines, figures)


if __name__ == "__main__":
    main()
