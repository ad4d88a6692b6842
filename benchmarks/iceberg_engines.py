"""Which engines read a view's Iceberg table as we read its snapshots: four of them, in fourteen
states, every version and what is live.

python -m benchmarks.iceberg_engines [folder of packages]...

Engines are those of the installed packages and of the folders (``pip install --target``):
pyiceberg, polars, daft, and DuckDB 1.5.5 with its extensions avro and iceberg.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import report, run, write_project
from tests.scene import UNJUDGED

VIEW, ROWS = "numbers", 400
TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
FEATURES: dict[str, dict[str, Any]] = {
    "score": {"dtype": "float64"},
    "vector": {"dtype": "float32", "dim": 4},
    "numbers": {"dtype": "int32", "max_items": 3},
    "names": {"dtype": "string", "max_items": 3},
    "label": {"dtype": "string"},
    "small": {"dtype": "int8"},
    "flag": {"dtype": "bool"},
    "whole": {"dtype": "int64"},
}


class Spread:
    """``x`` → a column of each type.

    Args:
        of: names of :data:`FEATURES`.
        version: part of the fingerprint.
    """

    def __init__(self, of: list[str], version: int = 1) -> None:
        self.of, self.version = of, version

    def fingerprint(self) -> str:
        """By which it is another model."""
        return f"spread {self.of} {self.version}"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """The columns."""
        x = np.asarray(batch.column("x")).astype(np.float64)
        whole = x.astype(np.int64)
        columns: dict[str, Any] = {
            "score": 2 * x,
            "vector": (x[:, None] + np.arange(4)).astype(np.float32),
            "numbers": pa.array([[*range(n % 4)] for n in whole], pa.list_(pa.int32())),
            "names": pa.array([[f"é{i}" for i in range(n % 4)] for n in whole]),
            "label": pa.array([f"l{n % 5}" if n % 7 else None for n in whole]),
            "small": (whole % 100).astype(np.int8),
            "flag": whole % 2 == 0,
            "whole": whole * 2**40,
        }
        return {name: columns[name] for name in self.of}


class Table:
    """A project of one view with a table."""

    def __init__(self, folder: Path, *features: str, **view: Any) -> None:
        self.folder, self._of = folder, list(features)
        self._view = view

    def write(self, keys: Any, x: Any, **columns: Any) -> Any:
        """The project with these rows in its source."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / "rows.parquet"
        pq.write_table(pa.table({"id": keys, "x": pa.array(x, pa.float64())} | columns), path)
        view = {
            "source": {"sql": "SELECT * FROM read_parquet('${data}/rows.parquet')"},
            "model": {"use": f"{__name__}:Spread", "args": {"of": self._of}},
            "features": {name: FEATURES[name] for name in self._of},
            "ttl": "400d",
            "gates": UNJUDGED | {"rows": None, "contract": None},
        } | self._view
        return write_project(self.folder, {VIEW: view}, iceberg=[VIEW])

    def run(self, keys: Any, x: Any, command: str = "run", **options: Any) -> Any:
        """A run over these rows."""
        project = self.write(keys, x, **options.pop("columns", {}))
        run(project, VIEW, command, **options)
        return project


def full(folder: Path, *features: str) -> Any:
    """One run."""
    return Table(folder, *(features or ("score",))).run(range(ROWS), range(ROWS))


def delta(folder: Path) -> Any:
    """Rows that changed and came."""
    full(folder)
    x = [n + 0.5 if n % 40 == 0 else n for n in range(ROWS + 5)]
    return Table(folder, "score").run(range(ROWS + 5), x)


def removal(folder: Path) -> Any:
    """Keys that left, and nothing else."""
    full(folder)
    return Table(folder, "score").run(range(10, ROWS), range(10, ROWS))


def merged(folder: Path) -> Any:
    """Deltas upon deltas, some of them merged."""
    table = Table(folder, "score", "vector")
    for step in range(9):
        keys = [n for n in range(ROWS) if n % 50 != step]
        project = table.run(keys, [n + (n % 40 <= step) / 2 for n in keys])
    return project


def partitioned(folder: Path) -> Any:
    """Three days served together, with keys that a later day has anew."""
    from precompute.store.times import containing

    first = TODAY - timedelta(days=3)
    sql = "SELECT * FROM read_parquet('${data}/rows.parquet') WHERE t >= $start AND t < $end"
    by = {"by": "day", "start": first.date().isoformat(), "serve": "all"}
    table = Table(folder, "score", partition=by, source={"sql": sql})
    for day in range(3):
        keys = range(day * 100, day * 100 + 200)
        t = pa.array([first + timedelta(days=day)] * 200, pa.timestamp("us", "UTC"))
        partition = containing("day", first + timedelta(days=day))
        project = table.run(keys, [n + day for n in keys], columns={"t": t}, partition=partition)
    return project


def rolled_back(folder: Path) -> Any:
    """Live is the version before the newest."""
    from precompute.jobs.run.command_process import Silent
    from precompute.jobs.run.rollback import rollback

    project = delta(folder)
    rollback(project, VIEW, Silent())
    return project


def committed(folder: Path) -> Any:
    """The newest version is not live."""
    full(folder)
    return Table(folder, "score").run(range(9), range(9), "materialize")


def columns_change(folder: Path) -> Any:
    """A column came, and went."""
    full(folder, "score")
    full(folder, "score", "label")
    return full(folder, "label")


def type_changes(folder: Path) -> Any:
    """The key and a column have other types than before."""
    full(folder, "small")
    table = Table(folder, "small", features={"small": {"dtype": "float64"}})
    return table.run([f"k{n}" for n in range(50)], range(50))


def two_keys(folder: Path) -> Any:
    """A key of two columns."""
    table = Table(folder, "score", "label", entity=["id", "lang"])
    langs = pa.array(["de", "fr"] * (ROWS // 2))
    table.run(range(ROWS), range(ROWS), columns={"lang": langs})
    x = [n + (n < 5) for n in range(ROWS)]
    return table.run(range(ROWS), x, columns={"lang": langs})


STATES: Mapping[str, Callable[[Path], Any]] = {
    "full": full,
    "delta": delta,
    "removal": removal,
    "merged": merged,
    "partitioned": partitioned,
    "rolled back": rolled_back,
    "committed": committed,
    "columns change": columns_change,
    "type changes": type_changes,
    "two keys": two_keys,
    "vectors": lambda folder: full(folder, "vector"),
    "lists": lambda folder: full(folder, "numbers"),
    "lists of texts": lambda folder: full(folder, "names", "label"),
    "small numbers": lambda folder: full(folder, "small", "flag", "whole"),
}


# ---- engines


def by_pyiceberg(metadata: str, number: int | None) -> list[dict[str, Any]]:
    """pyiceberg's own scan."""
    from pyiceberg.table import StaticTable

    table = StaticTable.from_metadata(metadata)
    return list(table.scan(snapshot_id=number).to_arrow().to_pylist())


def by_polars(metadata: str, number: int | None) -> list[dict[str, Any]]:
    """polars' own reader."""
    import polars

    scanned = polars.scan_iceberg(metadata, snapshot_id=number, reader_override="native")
    return list(scanned.collect().to_dicts())


def by_polars_through_pyiceberg(metadata: str, number: int | None) -> list[dict[str, Any]]:
    """polars over pyiceberg's scan."""
    import polars

    scanned = polars.scan_iceberg(metadata, snapshot_id=number, reader_override="pyiceberg")
    return list(scanned.collect().to_dicts())


def by_daft(metadata: str, number: int | None) -> list[dict[str, Any]]:
    """daft's reader."""
    from pyiceberg.table import StaticTable

    # which is no dependency of ours
    daft = import_module("daft")

    table = StaticTable.from_metadata(metadata)
    return list(daft.read_iceberg(table, snapshot_id=number).to_pylist())


def by_duckdb(metadata: str, number: int | None) -> list[dict[str, Any]]:
    """DuckDB's extension."""
    import duckdb

    if not duckdb.__version__.startswith("1.5"):
        raise ImportError(f"DuckDB {duckdb.__version__} has no extensions as packages")
    folder, at = str(Path(metadata).parents[1]), ""
    if number is not None:
        at = f", snapshot_from_id = {number}::UBIGINT"
    with duckdb.connect() as connection:
        for name in ("avro", "iceberg"):
            connection.install_extension(_extension(name))
            connection.load_extension(name)
        found = connection.sql(f"SELECT * FROM iceberg_scan('{folder}'{at})")
        return list(found.to_arrow_table().to_pylist())


def _extension(name: str) -> str:
    from importlib.util import find_spec

    package = find_spec(f"duckdb_extension_{name}")
    assert package is not None
    assert package.submodule_search_locations
    (path,) = Path(package.submodule_search_locations[0]).rglob("*.duckdb_extension")
    return str(path)


ENGINES: Mapping[str, Callable[[str, int | None], list[dict[str, Any]]]] = {
    "pyiceberg": by_pyiceberg,
    "duckdb": by_duckdb,
    "daft": by_daft,
    "polars": by_polars,
    "polars through pyiceberg": by_polars_through_pyiceberg,
}


def wanted(project: Any) -> dict[str, Any]:
    """Where the table is, and the rows of each version and of what is live, as text."""
    store = project.offline.view(VIEW)
    metadata = store.folder.absolute() / "iceberg" / "metadata"
    newest = (metadata / "version-hint.text").read_text()
    ref = store.log.live()
    rows = {
        str(number): _as_text(
            [row for batch in store.batches(store.snapshot(number)) for row in batch.to_pylist()]
        )
        for number in store.numbers()
    }
    return {
        "metadata": str(metadata / f"v{newest}.metadata.json"),
        "versions": rows,
        "live": str(ref.snapshot),
    }


def _as_text(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(
        str(sorted({**row, "computed_at": str(row["computed_at"].astimezone(UTC))}.items()))
        for row in rows
    )


def read(engine: str, path: Path) -> dict[str, str]:
    """State → what is wrong of it, read by an engine."""
    found: dict[str, str] = {}
    for state, of in json.loads(path.read_text()).items():
        for number in (None, *of["versions"]):
            try:
                rows = ENGINES[engine](of["metadata"], None if number is None else int(number))
                right = of["versions"][of["live"] if number is None else number]
                said = "" if _as_text(rows) == right else f"{len(rows)} rows, not those of ours"
            except ImportError as exc:
                return {"": str(exc)}
            except BaseException as exc:
                if os.environ.get("SAY"):
                    traceback.print_exc()
                said = f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"
            if said:
                found[state] = f"version {number or 'live'}: {said}"
                break
    return found


def main() -> None:
    """Make the tables, read and report."""
    if len(sys.argv) > 2 and sys.argv[1] in ENGINES:
        print(json.dumps(read(sys.argv[1], Path(sys.argv[2]))))
        return
    with tempfile.TemporaryDirectory() as name:
        made = {
            state: wanted(make(Path(name, str(at))))
            for at, (state, make) in enumerate(STATES.items())
        }
        path = Path(name, "wanted.json")
        path.write_text(json.dumps(made))
        lines, figures = [], {}
        for engine in ENGINES:
            folders = os.pathsep.join([*sys.argv[1:], os.environ.get("PYTHONPATH", "")])
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.iceberg_engines", engine, str(path)],
                env=os.environ | {"PYTHONPATH": folders},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            wrong = json.loads(done.stdout.splitlines()[-1])
            right = 0 if "" in wrong else len(STATES) - len(wrong)
            figures[engine] = {"right": right, "wrong": wrong}
            said = "; ".join(f"{state} {why}".strip() for state, why in wrong.items())
            lines.append(
                f"{engine}: {right} of {len(STATES)} states" + (f": {said}" if said else "")
            )
    report("iceberg_engines", lines, figures)


if __name__ == "__main__":
    main()
