"""Frame: rows that a program gives to a run, as a DataFrame or Arrow, stored as a Parquet file that
the view's SQL reads as any other. So they are hashed, compared, resumed and read again by the model
behind misses like the rows of a file."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.sources.database import quoted
from precompute.sources.frame_types import check_type, check_values, column_of
from precompute.sources.sized_batches import cut, joined
from precompute.store.disk.sql import parquet_sql
from precompute.store.errors import SourceError

_TABLE = re.compile(r' FROM frame\."\w+"\Z')
"""What the SQL of a view reads in the file's stead: where that lies is no part of the view's
definition, so that a root may be moved."""

GROUP_ROWS, GROUP_BYTES = 1 << 16, 16 * 2**20
"""Rows up to which small batches are put together to a row group of the file, and its bytes, at
most: so many are held beside the frame."""


def frame_sql(columns: Sequence[str], view: str) -> str:
    """SQL of these columns of the frame that a run of the view was given: no other view's, whose
    frame is another."""
    return f"SELECT {', '.join(map(quoted, columns))} FROM frame.{quoted(view)}"


def of_file(sql: str, frame: Callable[[], Path | None]) -> str:
    """SQL of :func:`frame_sql` as DuckDB can run it, reading the file that ``frame`` names; other
    SQL as it is.

    Raises:
        SourceError: no frame was given yet.
    """
    table = _TABLE.search(sql)
    if table is None:
        return sql
    path = frame()
    if path is None:
        raise SourceError(
            "it takes its rows from a DataFrame, and none was given yet:"
            " precompute.open(…).run(view, frame=df), in Python"
        )
    return f"{sql[: table.start()]} FROM {parquet_sql([path.absolute()])}"


def write_frame(frame: Any, columns: Sequence[str], entity: Sequence[str], path: Path) -> int:
    """Write the columns of a frame to a Parquet file, durably, in batches; the caller renames it.

    Args:
        frame: of pandas, polars or pyarrow, or whatever has ``__arrow_c_stream__``; a list of rows,
            or a mapping of columns.
        columns: the columns wanted, of any order there; others are left out.
        entity: those of them that are keys: text or integers.
        path: the file.

    Returns:
        the rows written.

    Raises:
        SourceError: that is no frame, it lacks a column, or one holds what would be changed.
        OSError: the file cannot be written.
    """
    with _translated(), _reader(frame, columns) as reader:
        names = reader.schema.names
        _check_columns(reader.schema, columns, entity)
        wanted = [names.index(column) for column in columns]
        rows = 0
        schema = pa.schema([(names[i], _plain_type(reader.schema.field(i).type)) for i in wanted])
        with path.open("wb") as file:
            with pq.ParquetWriter(file, schema) as writer:
                plain = (
                    pa.record_batch(list(map(_plain, schema.names, piece.columns)), schema=schema)
                    for batch in reader
                    for piece in cut(batch.select(wanted), GROUP_BYTES, _plain_bytes)
                )
                for group in joined(plain, GROUP_ROWS, GROUP_BYTES):
                    writer.write_batch(group, row_group_size=max(1, group.num_rows))
                    rows += group.num_rows
            file.flush()
            os.fsync(file.fileno())
    return rows


def _reader(frame: Any, columns: Sequence[str]) -> pa.RecordBatchReader:
    if isinstance(frame, (list, tuple)) and all(isinstance(row, Mapping) for row in frame):
        names = dict.fromkeys(itertools.chain.from_iterable(frame))
        frame = {name: [row.get(name) for row in frame] for name in names}
    if isinstance(frame, Mapping):
        wanted = columns if columns and all(name in frame for name in columns) else frame
        frame = pa.table({name: _column(name, frame[name]) for name in wanted})
    if not hasattr(frame, "__arrow_c_stream__"):
        lazy = ": collect() it first" if hasattr(frame, "collect") else ""
        raise SourceError(
            "a frame is a DataFrame of pandas or polars, a pyarrow.Table, or what else has"
            f" __arrow_c_stream__; got {type(frame).__name__}{lazy}"
        )
    if hasattr(frame, "reset_index") and any(name in columns for name in frame.index.names):
        # pandas leaves an index out
        frame = frame.reset_index()
    if (
        columns
        and not isinstance(frame, (pa.Table, pa.RecordBatch))
        and all(name in getattr(frame, "columns", ()) for name in columns)
    ):
        # what is not wanted need not be anything that Arrow knows
        frame = frame[list(columns)]
    for at, (name, kind) in enumerate(
        zip(getattr(frame, "columns", ()), getattr(frame, "dtypes", ()), strict=False)
    ):
        if str(kind) == "Object":
            # polars gives their addresses away for what they are
            raise SourceError(
                f"column {name!r} of the frame holds Python objects: make it text or numbers"
            )
        if str(kind) in ("Int128", "UInt128"):
            raise SourceError(
                f"column {name!r} of the frame is {kind}, for which Arrow has no type: make it"
                " text, or a Decimal"
            )
        if str(kind) == "object":
            check_values(name, frame.iloc[:, at])
        elif str(kind) == "category":
            check_values(name, frame.iloc[:, at].cat.categories)
    return pa.RecordBatchReader.from_stream(frame)


def _column(name: str, values: Any) -> Any:
    """A column of a mapping; of what has a type of its own, itself."""
    untyped = isinstance(values, (list, tuple)) or str(getattr(values, "dtype", "")) == "object"
    return column_of(name, values) if untyped else values


def arrow_table(frame: Any) -> pa.Table:
    """A frame, as of :func:`write_frame`, with all of its columns.

    Raises:
        SourceError: that is no frame, or holds what Arrow has no type for.
    """
    with _translated(), _reader(frame, ()) as reader:
        return reader.read_all()


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that a column is stored in: of categories their own, text that polars calls
    string_view as any, and times of DuckDB's range."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_date64(kind):
        return pa.date32()
    if pa.types.is_timestamp(kind) and kind.unit in ("s", "ms"):
        return pa.timestamp("us", kind.tz)
    return pa.large_string() if pa.types.is_string_view(kind) else kind


def _plain_bytes(rows: pa.RecordBatch) -> int:
    """Bytes of some rows as they are stored: of a category each row has its text."""
    size_bytes = 0
    for column in rows.columns:
        if not pa.types.is_dictionary(column.type):
            size_bytes += column.nbytes
        elif pa.types.is_primitive(kind := _plain_type(column.type)):
            size_bytes += len(column) * kind.bit_width // 8
        else:
            sizes = pc.binary_length(column.dictionary.cast(kind)).take(column.indices)
            size_bytes += pc.sum(sizes).as_py() or 0
    return size_bytes


def _plain(name: str, column: pa.Array) -> pa.Array:
    try:
        if not pa.types.is_dictionary(column.type):
            return column.cast(_plain_type(column.type))
        return column.dictionary.cast(_plain_type(column.type)).take(column.indices)
    except pa.ArrowException as exc:
        raise SourceError(
            f"column {name!r} of the frame: {exc}: correct the value, or make the column text"
        ) from exc


def _check_columns(schema: pa.Schema, columns: Sequence[str], entity: Sequence[str]) -> None:
    for column in columns:
        count = schema.names.count(column)
        if count != 1:
            have = ", ".join(schema.names) or "none"
            what = "has no column" if not count else f"has {count} columns called"
            raise SourceError(
                f"the frame {what} {column!r}, which source.frame names (it has: {have})"
            )
        check_type(column, schema.field(column).type)
    for column in entity:
        kind = _plain_type(schema.field(column).type)
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not text and (not pa.types.is_integer(kind) or kind == pa.uint64()):
            gaps = (
                " (pandas makes floats of integers where one is missing: dropna, then"
                f" astype({{{column!r}: 'int64'}}))"
            )
            hint = gaps if pa.types.is_floating(kind) else ""
            raise SourceError(
                f"key column {column!r} of the frame is {kind}: a key is text, or an integer of up"
                f" to 64 bits, signed{hint}"
            )


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
        # half of a character, say, would break the report as well
        text = "; ".join(map(str, exc.args)).encode(errors="replace").decode()
        raise SourceError(
            f"the frame cannot be read as Arrow: {' '.join(text.split())[:300]}"
        ) from exc
