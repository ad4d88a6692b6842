"""Text column: a source's texts, and which of them a model cannot take."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.errors import ModelError


def texts(column: pa.Array) -> list[str]:
    """As Python has them, of a column that was checked."""
    return [value.decode() if isinstance(value, bytes) else value for value in column.to_pylist()]


def unusable_texts(column: pa.Array, name: str, use: str) -> dict[int, str]:
    """Null, empty and not UTF-8 texts: position → reason.

    Raises:
        ModelError: the column holds something else.
    """
    bad: dict[int, str] = {}
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        for row, value in enumerate(column.to_pylist()):
            if value is not None:
                try:
                    if not value.decode().strip():
                        bad[row] = f"{name} is empty"
                except UnicodeDecodeError as exc:
                    bad[row] = f"{name} is not UTF-8: {exc.reason} at byte {exc.start}"
    elif not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise ModelError(
            f"{use}: column {name!r} is {column.type}, not text: CAST it AS VARCHAR in the source"
        )
    # Of one text that begins with a letter, that is seen in a sixtieth of the time that the rest
    # takes.
    elif all(text and "!" <= text[0] <= "~" for text in column.to_pylist()):
        return bad
    else:
        blank = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(column)), 0)
        for row in pc.indices_nonzero(pc.fill_null(blank, False)).to_pylist():
            bad[row] = f"{name} is empty"
    for row in pc.indices_nonzero(column.is_null()).to_pylist():
        bad[row] = f"{name} is null"
    return bad
