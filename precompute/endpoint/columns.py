"""Columns: a row's values as the texts that an endpoint is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa


def text_of(value: Any) -> str:
    """A value as text: bytes hold UTF-8."""
    return value.decode() if isinstance(value, bytes) else str(value)


def check_columns(batch: pa.RecordBatch, columns: Sequence[str]) -> Mapping[int, str]:
    """Row → reason, of those with a null in one of the columns, with bytes that are no UTF-8, or
    with white space alone in all of them."""
    bad, blank = dict[int, str](), [True] * batch.num_rows
    for name in columns:
        for row, value in enumerate(batch.column(name).to_pylist()):
            if value is None or value != value:
                bad.setdefault(row, f"{name} is {'null' if value is None else 'NaN'}")
                continue
            try:
                blank[row] &= not text_of(value).strip()
            except UnicodeDecodeError as exc:
                bad.setdefault(row, f"{name} is not UTF-8: {exc.reason} at byte {exc.start}")
    for row, is_blank in enumerate(blank):
        if is_blank:
            bad.setdefault(
                row, f"{' and '.join(columns)} {'is' if len(columns) == 1 else 'are'} empty"
            )
    return bad
