"""Entity keys: of whole columns, vectorised, to the texts that :mod:`precompute.store.key_text`
tells of."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.key_text import MAX_KEY_BYTES


def key_column(batch: pa.RecordBatch | pa.Table, entity: Sequence[str]) -> pa.Array:
    """The key text of every row, vectorised.

    Args:
        batch: rows with the entity's columns, each int64 or string.
        entity: names of the key columns.

    Returns:
        string array [rows]; null where any part is null.
    """
    parts = [pc.cast(_one_chunk(batch.column(name)), pa.string()) for name in entity]
    if len(parts) == 1:
        return parts[0]
    escaped = [pc.replace_substring(pc.replace_substring(p, "%", "%25"), "/", "%2F") for p in parts]
    return pc.binary_join_element_wise(*escaped, pa.scalar("/"))


def bad_keys(keys: pa.Array) -> dict[int, str]:
    """Row number → reason, for keys no store could hold: null, empty, too long or with a NUL
    byte."""
    reasons: dict[int, str] = {}
    length = pc.binary_length(keys)
    for reason, mask in (
        ("null key", pc.is_null(keys)),
        ("empty key", pc.equal(length, 0)),
        (f"key longer than {MAX_KEY_BYTES} bytes", pc.greater(length, MAX_KEY_BYTES)),
        ("key with a NUL byte", pc.match_substring(keys, "\0")),
    ):
        for row in pc.indices_nonzero(pc.fill_null(mask, False)).to_pylist():
            reasons.setdefault(row, reason)
    return reasons


def _one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
