"""Columns: a source's columns as the features of their names, for views that SQL alone computes."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from precompute.model import Features, digest

CODE_VERSION = 1
"""Raised with each change of the values that this code computes; part of the fingerprint."""


class Columns:
    """Each feature of the view is the source's column of its name, in the type that the view
    declares; what would lose digits or does not fit is a bad row.

    Numbers, texts, booleans, lists and vectors are handed on; dates, times and timestamps are texts
    (ISO 8601, with a Z of those that have a time zone).
    """

    def fingerprint(self) -> str:
        return digest(code=CODE_VERSION)

    def compute(self, batch: pa.RecordBatch) -> Features:
        return {
            name: _plain(column)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }


def _plain(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            return pc.strftime(column, format="%Y-%m-%dT%H:%M:%S")
        return pc.strftime(column.cast(pa.timestamp(kind.unit, "UTC")), format="%Y-%m-%dT%H:%M:%SZ")
    return column.cast(pa.string()) if pa.types.is_date(kind) or pa.types.is_time(kind) else column
