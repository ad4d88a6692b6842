"""Rows of part files by their positions, and what is told when a file of history cannot be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.errors import SnapshotError


def rows_at(paths: Sequence[Path], file: npt.NDArray[np.int32], row: npt.NDArray[np.int64], schema: pa.Schema) -> pa.Table:
    """The rows ``row`` of ``paths[file]``, null where ``file`` is -1; each is read once, and memory holds one row group beside them."""
    order = np.lexsort((row, file))
    order = order[file[order] >= 0]
    files, rows = file[order], row[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (np.diff(files) != 0) | (np.diff(rows) != 0)
    place = np.full(len(file), -1, np.int64)
    place[order] = np.cumsum(new) - 1
    files, rows = files[new], rows[new]
    pieces = [schema.empty_table()]
    for number in np.unique(files).tolist():
        first, last = np.searchsorted(files, (number, number + 1))
        pieces += _rows_of(paths[number], rows[first:last], schema)
    return pa.concat_tables(pieces).take(pa.array(place, mask=place < 0))


def _rows_of(path: Path, rows: npt.NDArray[np.int64], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows (ascending) of one file, with the columns of ``schema``: null where the file has none of that name and type."""
    with pq.ParquetFile(path) as parquet:
        have = [
            f.name for f in schema if f.name in parquet.schema_arrow.names and parquet.schema_arrow.field(f.name).type == f.type
        ]
        first = 0
        for group in range(parquet.metadata.num_row_groups):
            last = first + parquet.metadata.row_group(group).num_rows
            here = rows[np.searchsorted(rows, first) : np.searchsorted(rows, last)] - first
            if len(here):
                table = parquet.read_row_group(group, columns=have).take(pa.array(here))
                columns = [table.column(f.name).cast(f.type) if f.name in have else pa.nulls(len(here), f.type) for f in schema]
                yield pa.Table.from_arrays(columns, schema=schema)
            first = last


@contextlib.contextmanager
def reading(view: str) -> Iterator[None]:
    """What goes wrong while a view's history is read, as a :class:`precompute.store.errors.SnapshotError`."""
    try:
        yield
    except duckdb.OutOfMemoryException as exc:
        raise SnapshotError(f"the history of view {view!r} does not fit into DuckDB's memory: raise memory_mb ({exc})") from exc
    except (duckdb.Error, pa.ArrowException, OSError) as exc:
        raise SnapshotError(f"the history of view {view!r} cannot be read: {str(exc).strip()[:300]}") from exc
