"""Part file: one immutable Parquet file, written whole, hashed on the way, and durable when its
name appears. Layers: the files and dead rows of a snapshot, and which segments are merged."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import make_folder, sync_folder
from precompute.store.errors import SnapshotError
from precompute.store.offline.segment import Numbers, Part
from precompute.store.offline.stored_file import parsing

ROW_GROUP_BYTES = 2 * 2**20
"""Bytes in memory of a row group, about: what is read for a row that is drawn or looked up. DuckDB
reads smaller ones more slowly."""
MOST_GROUP_BYTES = 8 * 2**20
"""Bytes in memory of a row group of fewer than 1,024 rows, at most; of one row that is larger, its
own."""
_HASH = "input_hash"
_FIELD_ID = "PARQUET:field_id"
"""By which pyarrow reads and writes the id of a column."""


def write_part_file(
    path: Path, table: pa.Table, notes: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write a table under a temporary name, fsync it, rename it and fsync its folder; nothing is
    left of a failure.

    Args:
        path: the file to be; its folder is created.
        table: the rows.
        notes: what its footer is to have, by name.

    Returns:
        size in bytes and SHA-256 (hex).

    Raises:
        OSError: the file system failed.
    """
    # Copied rows come with that of the file they were read from.
    table = table.replace_schema_metadata()
    folder = path.parent
    temporary = folder / f".{path.name}.tmp"
    try:
        make_folder(folder)
        with temporary.open("wb") as raw:
            sink = _HashingFile(raw)
            with pq.ParquetWriter(
                pa.PythonFile(sink, "w"),
                table.schema,
                compression=_codecs(table.schema),
                compression_level={
                    path: 1 for path, codec in _codecs(table.schema).items() if codec == "zstd"
                },
                use_dictionary=_dictionary_columns(table.schema),
                column_encoding=_encodings(table.schema),
            ) as writer:
                writer.write_table(table, row_group_size=_row_group_rows(table))
                if notes:
                    writer.add_key_value_metadata(dict(notes))
            raw.flush()
            crashpoint("part.write", temporary)
            os.fsync(raw.fileno())
        crashpoint("part.fsync", temporary)
        os.replace(temporary, path)
        crashpoint("part.rename", path)
        sync_folder(folder)
        crashpoint("dir.fsync", path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return sink.size_bytes, sink.digest.hexdigest()


def numbered(columns: pa.Schema) -> pa.Schema:
    """The columns with field ids, and those of what lists have in them, by which readers of Iceberg
    find them. An id follows from name and type, so that it is the same in every part of a view."""
    taken = {0}
    return pa.schema([_numbered(field, field.name, taken) for field in columns])


def _numbered(field: pa.Field, path: str, taken: set[int]) -> pa.Field:
    kind = field.type
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _numbered(kind.value_field, f"{path}.element", taken)
        kind = pa.list_(inner, getattr(kind, "list_size", -1))
    text = f"{path} {kind.value_type} each" if kind is not field.type else f"{path} {kind}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 2
    # two columns of a thousand have the same one in 1 of 2,000 tables
    number = next(one for one in itertools.count(number) if one not in taken)
    taken.add(number)
    return pa.field(field.name, kind, field.nullable, {_FIELD_ID: str(number)})


def _row_group_rows(table: pa.Table) -> int:
    row_bytes: int = max(1, table.nbytes // max(1, table.num_rows))
    return max(min(1024, MOST_GROUP_BYTES // row_bytes), ROW_GROUP_BYTES // row_bytes, 1)


def row_bytes(metadata: pq.FileMetaData) -> int:
    """Bytes in memory of a row of a part, at most, about: what a text that is the same in all rows
    takes is no figure of the footer, but of how many rows its row groups were given."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    stored = int(sum(group.total_byte_size for group in groups) // max(1, metadata.num_rows))
    columns = map(metadata.schema.column, range(metadata.num_columns))
    if len(groups) < 2 or not any(one.physical_type == "BYTE_ARRAY" for one in columns):
        return max(1, stored)
    largest: int = max(group.num_rows for group in groups)
    of_group = MOST_GROUP_BYTES if largest <= 1024 else ROW_GROUP_BYTES
    return max(1, stored, of_group // max(1, largest))


class _HashingFile(io.RawIOBase):
    """A write-only file object that hashes and counts what passes through, so that no part is read
    twice."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.digest = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size_bytes += len(data)
        self._raw.write(data)
        return len(data)

    def tell(self) -> int:
        return self.size_bytes

    def writable(self) -> bool:
        return True


def _dictionary_columns(schema: pa.Schema) -> list[str]:
    """Dictionaries only for text: on float vectors they triple the write time (151 against 43 ms
    for 8,192 × 384) and shrink nothing."""
    return [f.name for f in schema if pa.types.is_string(f.type)]


def _encodings(schema: pa.Schema) -> dict[str, str]:
    """Differences of integers, such as keys, in as many bits as they need; not of hashes, which are
    random. Of ids one after the other a part of id, score and hash took 45 ns a row to write and 18
    to read with zstd, and takes 29 and 10, ids in random order 53 and 20, now 37 and 11 (AMD Zen
    5); such of 63 bits, which do not shrink, 39 and now 45, and 12 to read."""
    return {
        f.name: "DELTA_BINARY_PACKED"
        for f in schema
        if pa.types.is_integer(f.type) and f.name != _HASH
    }


def _codecs(schema: pa.Schema) -> dict[str, str]:
    """Column, as Parquet names it → its compression. LZ4 for vectors: of 384 float32 zstd takes 8 %
    off, and twice the time to read (2.7 µs a row instead of 1.3 on AMD Zen 5), which is the ceiling
    of publishing; nothing at all would read no faster than LZ4. None for integers, whose encoding
    shrinks them (:func:`_encodings`), and for hashes, which nothing does.
    """
    codecs = {}
    for f in schema:
        vector = pa.types.is_fixed_size_list(f.type)
        codec = "none" if pa.types.is_integer(f.type) else "lz4" if vector else "zstd"
        codecs[f"{f.name}.list.element" if pa.types.is_nested(f.type) else f.name] = codec
    return codecs


def layers_that_stay(weights: Sequence[int], new: int, most: int) -> int:
    """How many of the segments over the lowest one stay as they are when one is added; the others
    are merged with it. Nothing is, until there are ``most``; then the highest are, and each under
    them that is no heavier than those together: so that a row is copied about as often as it takes
    its segment to double.

    Args:
        weights: of each segment over the lowest, the lowest of them first.
        new: of the one that is added.
        most: segments over the lowest.
    """
    stay = len(weights)
    if stay >= most:
        while stay and (stay >= most or weights[stay - 1] <= new):
            stay -= 1
            new += weights[stay]
    return stay


@dataclass(frozen=True, slots=True)
class Layers:
    """All Parquet files of a snapshot, those of its lowest segment first, and the rows of them that
    are no rows of it.

    ``rows`` are those of each file in ``paths``, the dead ones too; ``dead`` maps a file's position
    there to the numbers of its dead rows, ascending int64.
    """

    paths: list[Path]
    rows: list[int]
    dead: Mapping[int, Numbers]


def living(batches: Iterator[pa.RecordBatch], dead: Numbers | None) -> Iterator[pa.RecordBatch]:
    """``batches`` of one part without its dead rows."""
    if dead is None:
        yield from batches
        return
    first = 0
    for batch in batches:
        start, stop = np.searchsorted(dead, (first, first + batch.num_rows))
        if stop == start:
            yield batch
        elif stop - start < batch.num_rows:
            keep = np.ones(batch.num_rows, np.bool_)
            keep[dead[start:stop] - first] = False
            yield batch.filter(pa.array(keep))
        first += batch.num_rows


# ---- whether a file is what its manifest says


def check_rows(path: Path, part: Part) -> None:
    """Raises:
    SnapshotError: the file cannot be read back, or has another number of rows.
    UnreadableError: it cannot be read now.
    """
    with parsing(path):
        rows = pq.read_metadata(path).num_rows
    if rows != part.rows:
        raise SnapshotError(
            f"{path} holds {rows} rows, its manifest says {part.rows}; publish another snapshot"
        )
