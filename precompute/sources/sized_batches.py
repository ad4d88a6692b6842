"""Sized batches: rows cut, and put together, by the bytes that they have, whatever one row has: of
numbers 65,536 are 1 MB, and of texts of 1 MB sixteen are 16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

MOST_JOINED_BYTES = 32 * 2**20
"""Bytes of a batch that is put together, at most: several lie between the stages of a run."""


def joined(
    batches: Iterator[pa.RecordBatch], most_rows: int, most_bytes: int = MOST_JOINED_BYTES
) -> Iterator[pa.RecordBatch]:
    """Batches put together, one after the other, as far as they stay within both; what is larger
    alone is as it was.

    Args:
        batches: of one schema.
        most_rows: rows of one that is put together; 1 leaves all as they are.
        most_bytes: bytes of one.
    """
    together: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        if together and (
            rows + batch.num_rows > most_rows or size_bytes + batch.nbytes > most_bytes
        ):
            yield _one(together)
            together, rows, size_bytes = [], 0, 0
        together.append(batch)
        rows, size_bytes = rows + batch.num_rows, size_bytes + int(batch.nbytes)
    if together:
        yield _one(together)


def _one(together: list[pa.RecordBatch]) -> pa.RecordBatch:
    return together[0] if len(together) == 1 else pa.concat_batches(together)


def _bytes_of(rows: pa.RecordBatch) -> int:
    return int(rows.nbytes)


def cut(
    rows: pa.RecordBatch,
    most_bytes: int,
    size_of: Callable[[pa.RecordBatch], int] = _bytes_of,
) -> Iterator[pa.RecordBatch]:
    """A batch in pieces of at most so many bytes, in their order and without a copy; a row that has
    more alone. Each half is measured by itself, so that a few large rows among many small ones are
    found.

    Args:
        rows: the batch; one without rows is one piece.
        most_bytes: of a piece.
        size_of: bytes of a piece as it is going to be, where that is not what Arrow says of it.
    """
    if rows.num_rows <= 1 or size_of(rows) <= most_bytes:
        yield rows
        return
    half = rows.num_rows // 2
    yield from cut(rows.slice(0, half), most_bytes, size_of)
    yield from cut(rows.slice(half), most_bytes, size_of)
