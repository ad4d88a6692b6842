"""Part file: one immutable Parquet file, written whole, hashed on the way, and durable when its name appears."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import make_folder, sync_folder

ROW_GROUP_BYTES = 2 * 2**20
"""Of rows in memory, about: what is read for a row that is drawn or looked up. DuckDB reads smaller ones more slowly."""
RARE_ROWS = 10_000
"""Rare rows of a part that its footer names, at most: beyond that, 70 kB of them, they are not rare."""
_RARE = b"precompute.rare_rows"


def write_part_file(path: Path, table: pa.Table, rare: npt.NDArray[np.int64] | None = None) -> tuple[int, str]:
    """Write a table under a temporary name, fsync it, rename it and fsync its folder; nothing is left of a failure.

    Args:
        path: the file to be; its folder is created.
        table: the rows.
        rare: numbers of its rows that :func:`rare_rows` is to tell, ascending.

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
                compression_level={path: 1 for path, codec in _codecs(table.schema).items() if codec == "zstd"},
                use_dictionary=_dictionary_columns(table.schema),
            ) as writer:
                writer.write_table(table, row_group_size=_row_group_rows(table))
                if rare is not None and len(rare) <= RARE_ROWS:
                    writer.add_key_value_metadata({_RARE: json.dumps(rare.tolist(), separators=(",", ":"))})
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


def rare_rows(file: pq.ParquetFile) -> npt.NDArray[np.int64] | None:
    """Numbers of the rows that were named as rare when a part was written, ascending; None where that is not told: too many, or an older part.

    Raises:
        OSError: what is told is no list of numbers: the file is damaged.
    """
    told = (file.metadata.metadata or {}).get(_RARE)
    if told is None:
        return None
    try:
        return np.array(json.loads(told), np.int64)
    except (ValueError, TypeError, OverflowError) as exc:
        raise OSError(f"{_RARE.decode()} in its footer is no list of row numbers: {told[:40]!r}") from exc


def _row_group_rows(table: pa.Table) -> int:
    row_bytes: int = table.nbytes // max(1, table.num_rows)
    return max(1024, ROW_GROUP_BYTES // max(1, row_bytes))


class _HashingFile:
    """A write-only file object that hashes and counts what passes through, so that no part is read twice."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.digest = hashlib.sha256()
        self.size_bytes = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size_bytes += len(data)
        self._raw.write(data)
        return len(data)

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def _dictionary_columns(schema: pa.Schema) -> list[str]:
    """Dictionaries only for text: on float vectors they triple the write time (151 against 43 ms for 8,192 × 384) and shrink nothing."""
    return [f.name for f in schema if pa.types.is_string(f.type)]


def _codecs(schema: pa.Schema) -> dict[str, str]:
    """Column, as Parquet names it → its compression. LZ4 for vectors: of 384 float32 zstd takes 8 % off, and twice the time to read (2.7 µs a row instead of
    1.3 on AMD Zen 5), which is the ceiling of publishing; nothing at all would read no faster than LZ4."""
    vectors = {f.name for f in schema if pa.types.is_fixed_size_list(f.type)}
    return {
        f"{f.name}.list.element" if pa.types.is_nested(f.type) else f.name: "lz4" if f.name in vectors else "zstd" for f in schema
    }
