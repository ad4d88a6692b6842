"""Scan memory: what reading Parquet files takes of DuckDB's memory, told by their footers before a
row is read.

DuckDB decodes a row group column by column, page by page, in buffers that are powers of two, one
set of them a thread. Its own writer makes row groups of 122,880 rows and pages of up to 100 MB, so
that texts of 1 kB take 256 MiB a thread; others' pages are of 1 MiB. A page is held as long as a
vector has rows of it, and while it is decoded what it was decoded from.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.sources.file_names import is_remote
from precompute.store.disk.sql import REMOTE, VECTOR_ROWS, RemoteReader

MOST_FILES, MOST_REMOTE_FILES, MOST_GROUPS = 32, 8, 8
"""Files whose footers are looked at, those in an object store, where each is a request or two, and
row groups of each: the largest ones."""

_DUCKDBS_PAGE_BYTES, _PAGE_BYTES = 100_000_000, 2**20
"""Bytes of a page, decompressed, at most: as DuckDB writes them, and as others do."""

_ITEM_BYTES = {"INT32": 4, "FLOAT": 4, "BOOLEAN": 1, "INT64": 8, "DOUBLE": 8}
"""Bytes of a list's item, by its physical type; 16 of the others."""


@dataclass(frozen=True, slots=True)
class ScanMemory:
    """What reading some files takes: ``pages_bytes`` of one thread, ``chunk_bytes`` more of it
    where column chunks are fetched as a whole, and ``rows_bytes`` for a vector of rows; ``file``
    and ``column`` are those that take most of it."""

    pages_bytes: int = 0
    chunk_bytes: int = 0
    rows_bytes: int = 0
    file: str = ""
    column: str = ""


def scan_memory(
    files: Sequence[str], columns: Collection[str], remote: RemoteReader | None = None
) -> ScanMemory:
    """What reading takes, at most of the files.

    Args:
        files: names of files and patterns; those that are no Parquet are passed over, and so is
            what cannot be read, which says so when it is.
        columns: names of the columns that are read.
        remote: reads those in object stores; without it they are passed over.
    """
    wanted = {name.lower() for name in columns}
    here = [file for file in files if not is_remote(file)]
    there = [file for file in files if file.startswith(REMOTE)]
    needs = [need for file in _largest(here) for need in _of_file(file, file, wanted)]
    if remote is not None:
        for file in _largest_remote(there, remote):
            with contextlib.suppress(OSError):
                needs += _of_file(file, pa.PythonFile(remote.open(file), "r"), wanted)
    return max(needs, key=lambda need: need.pages_bytes, default=ScanMemory())


def read_columns(plan: Any) -> set[str]:
    """Names of the columns that the scans of a plan read; ``plan`` is what DuckDB's ``EXPLAIN
    (FORMAT json)`` gives, parsed."""
    names: set[str] = set()
    todo = [*plan] if isinstance(plan, list) else [plan]
    while todo:
        node = todo.pop()
        if not isinstance(node, Mapping):
            continue
        read = node.get("extra_info", {}).get("Projections", [])
        names.update([read] if isinstance(read, str) else read)
        todo += node.get("children", [])
    return names


def _largest(files: Sequence[str]) -> list[str]:
    sizes: dict[str, int] = {}
    for pattern in files:
        for name in [pattern] if os.path.isfile(pattern) else glob.iglob(pattern, recursive=True):
            try:
                sizes[name] = Path(name).stat().st_size
            except OSError:
                # gone meanwhile
                continue
    return sorted(sizes, key=lambda name: -sizes[name])[:MOST_FILES]


def _largest_remote(patterns: Sequence[str], remote: RemoteReader) -> list[str]:
    sizes: dict[str, int] = {}
    for pattern in patterns:
        # who reads it is told what is wrong with it
        with contextlib.suppress(OSError):
            sizes |= {name: remote.size(name) for name in remote.glob(pattern)}
    return sorted(sizes, key=lambda name: -sizes[name])[:MOST_REMOTE_FILES]


def _of_file(file: str, opened: Any, wanted: set[str]) -> Iterable[ScanMemory]:
    try:
        metadata = pq.read_metadata(opened)
    except (pa.ArrowException, OSError):
        return
    page_bytes = (
        _DUCKDBS_PAGE_BYTES if str(metadata.created_by).startswith("DuckDB") else _PAGE_BYTES
    )
    names = [metadata.schema.column(at).path for at in range(metadata.num_columns)]
    chosen = [at for at, name in enumerate(names) if name.partition(".")[0].lower() in wanted]
    groups = sorted(
        map(metadata.row_group, range(metadata.num_row_groups)), key=lambda g: -g.total_byte_size
    )
    for group in groups[:MOST_GROUPS]:
        pages = chunks = rows = packed = most = 0
        largest = ""
        for at in chosen:
            chunk, repeated = group.column(at), metadata.schema.column(at).max_repetition_level > 0
            of_column = _of_chunk(chunk, group.num_rows, page_bytes, repeated)
            pages, rows = pages + of_column[0], rows + of_column[1]
            packed = max(packed, of_column[2])
            chunks += chunk.total_compressed_size
            if of_column[0] > most:
                most, largest = of_column[0], names[at].partition(".")[0]
        yield ScanMemory(pages + packed, chunks, rows, file, largest)


def _of_chunk(chunk: Any, rows: int, page_bytes: int, repeated: bool) -> tuple[int, int, int]:
    """Bytes of a column chunk's pages that are held at once, of a vector of its rows, and of what a
    page is decompressed from."""
    plain, share = max(1, chunk.total_uncompressed_size), min(1.0, VECTOR_ROWS / max(1, rows))
    page = min(plain, max(page_bytes, plain // max(1, rows)))
    whole, rest = divmod(plain, page)
    of_vector = int(plain * share)
    held = 1 + -(-of_vector // page)
    if repeated:
        # the items of a vector's lists are one buffer
        of_vector = int(chunk.num_values * share * _ITEM_BYTES.get(chunk.physical_type, 16))
    ratio = chunk.total_compressed_size / plain * (chunk.compression != "UNCOMPRESSED")
    packed = _power_of_2(page * ratio)
    # while the last whole page is decoded, or what is left behind it
    at_whole = _power_of_2(page) * min(whole, held)
    at_rest = _power_of_2(page) * min(whole, held - 1) + _power_of_2(rest)
    buffered = max(at_whole, at_rest + _power_of_2(rest * ratio) - packed)
    return buffered + (_power_of_2(of_vector) if repeated else 0), of_vector, packed


def _power_of_2(size: float) -> int:
    return 1 << (int(size) - 1).bit_length() if size >= 1 else 0
