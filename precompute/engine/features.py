"""Features: what a model returned, checked against what its view declares, as Arrow columns in the order of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precompute.engine.window import Outcome, Rows
from precompute.model import Features
from store.errors import ModelError
from store.feature_view import SCALAR_TYPES, Feature, FeatureView


def copied(values: Any) -> Any:
    """What a model returned of a feature, in memory of its own: of what holds the rows, and of an array or a list for each."""
    if isinstance(values, np.ndarray):
        return _copied_rows(values) if values.dtype == object and values.ndim else np.array(values)
    if isinstance(values, (list, tuple)):
        return [_copied_row(row) for row in values]
    if isinstance(values, pa.ChunkedArray):
        # copies one chunk too
        return values.combine_chunks()
    # pa.array(buffer) is the buffer itself
    return pa.concat_arrays([values]) if isinstance(values, pa.Array) else values


def _copied_row(row: Any) -> Any:
    if isinstance(row, np.ndarray):
        return np.array(row)
    return list(row) if isinstance(row, list) else row


_copied_rows = np.frompyfunc(_copied_row, 1, 1)
"""Of an object array, each."""


class Declared:
    """What a view declares of its features, to hold what a model returns against it; made once, since that takes as long as a small model does.

    Args:
        view: its features, and which of them is searched by cosine.
    """

    def __init__(self, view: FeatureView) -> None:
        self._view, self._schema = view, view.feature_schema()
        index = view.index
        self._directed = index.on if index is not None and index.metric == "cosine" else None
        self._types = self._schema.types

    def checked(self, features: Features, rows: int) -> tuple[pa.RecordBatch, Mapping[int, str]]:
        """The model's output as Arrow columns of exactly the declared types; and row → error of those with NaN, infinities and, in an indexed cosine vector,
        zero norm.

        Raises:
            ModelError: it returns something other than the view declares: a missing feature, another length or type.
        """
        view = self._view
        if not isinstance(features, (dict, Mapping)):
            raise ModelError(f"the model of view {view.name!r} returned {type(features).__name__}, not a dict of features")
        columns = []
        bad: dict[int, str] = {}
        for feature, kind in zip(view.features, self._types, strict=True):
            if feature.name not in features:
                raise ModelError(
                    f"the model of view {view.name!r} returned no {feature.name!r} (it returned: {', '.join(features) or 'nothing'})"
                )
            try:
                column, numbers = _column(feature, kind, features[feature.name], rows)
            except _Misfit as exc:
                raise ModelError(f"feature {feature.name!r} of view {view.name!r}: {exc}") from exc.__cause__
            columns.append(column)
            if feature.dtype.startswith("float"):
                _find_bad(feature, column, numbers, feature.name == self._directed, bad)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema), bad


def _find_bad(feature: Feature, column: pa.Array, numbers: Any, directed: bool, bad: dict[int, str]) -> None:
    """Put row → error into ``bad``. ``numbers`` are the column's, where they are at hand as an array."""
    if numbers is None:
        scalar = feature.dim is None and feature.max_items is None
        if scalar and column.null_count:
            column = pc.fill_null(column, pa.scalar(0.0).cast(column.type))
        numbers = np.asarray(column if scalar else column.flatten())
    if directed:
        for row in np.flatnonzero(~numbers.reshape(-1, feature.dim).any(axis=1)).tolist():
            bad.setdefault(row, f"{feature.name} is all zeros, which has no direction for cosine")
    is_finite = np.isfinite(numbers)
    # as good as always
    if is_finite.all():
        return
    rows = np.flatnonzero(~is_finite)
    if feature.dim is not None:
        rows = np.unique(rows // feature.dim)
    elif feature.max_items is not None:
        rows = np.unique(np.asarray(pc.list_parent_indices(column))[rows])
    for row in rows.tolist():
        bad.setdefault(row, f"{feature.name} is not finite")


class _Misfit(Exception):
    """What is wrong with a feature's values."""


def _column(feature: Feature, kind: pa.DataType, values: Any, rows: int) -> tuple[pa.Array, Any]:
    """Of the type ``kind``, and the array whose memory it shares, if there is one."""
    numbers = None
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not hasattr(values, "__len__") or (isinstance(values, np.ndarray) and values.ndim == 0):
        raise _Misfit(f"the model returned {type(values).__name__}, not one value for each of {rows} rows")
    if len(values) != rows:
        raise _Misfit(f"the model returned {len(values)} values for {rows} rows")
    try:
        if feature.dim is not None and not isinstance(values, pa.Array):
            values = np.asarray(values)
            if values.ndim != 2 or values.shape[1] != feature.dim:
                raise _Misfit(
                    f"declared as a vector of {feature.dim}, but the model returned shape {list(values.shape)}; correct `dim` or the model"
                )
            if feature.dtype.startswith("float") and values.dtype.kind in "fiu" and values.dtype != feature.dtype:
                # what does not fit becomes infinite, and is rejected as such
                with np.errstate(over="ignore"):
                    values = values.astype(feature.dtype, copy=False)
            numbers = np.ascontiguousarray(values).reshape(-1)
            flat = _as(SCALAR_TYPES[feature.dtype], pa.array(numbers))
            return pa.FixedSizeListArray.from_arrays(flat, type=kind), numbers if numbers.dtype == feature.dtype else None
        if feature.max_items is not None and not isinstance(values, pa.Array):
            values = _lists(values)
        elif not isinstance(values, pa.Array):
            values = np.asarray(values)
            if values.ndim != 1:
                raise _Misfit(
                    f"declared as one value a row, but the model returned shape {list(values.shape)}; declare `dim` (or `max_items`, of a "
                    "list) or correct the model"
                )
            if feature.dtype.startswith("float") and values.dtype == feature.dtype:
                numbers = values
            values = pa.array(values)
        column = _as(kind, values)
        column.validate(full=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as exc:
        raise _Misfit(
            f"the model returned {getattr(values, 'type', type(values).__name__)}, which does not fit {kind}: {exc}"
        ) from exc
    if feature.max_items is not None:
        longest = pc.max(pc.list_value_length(column)).as_py() or 0
        if longest > feature.max_items:
            raise _Misfit(f"a list of {longest} items, declared at most {feature.max_items}; correct `max_items` or the model")
    if feature.dim is not None and column.null_count:
        raise _Misfit("the model returned a null vector; raise for such a row, or name it in unusable()")
    if (feature.dim is not None or feature.max_items is not None) and column.flatten().null_count:
        raise _Misfit("a vector or list holds a null; leave it out")
    return column, numbers


def _as(kind: pa.DataType, column: pa.Array) -> pa.Array:
    # even a cast to its own type takes 2 µs
    return column if column.type == kind else column.cast(kind)


def _lists(values: Any) -> pa.Array:
    """A list for each row, from a matrix, or from a list or object array of lists, tuples and arrays; None is a null."""
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype != object:
        offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(values.shape[1])
        return pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(values).reshape(-1)))
    return pa.array([row.tolist() if isinstance(row, np.ndarray) else row for row in values])


def in_order(view: FeatureView, pieces: list[tuple[Rows, pa.RecordBatch]]) -> tuple[Rows, pa.RecordBatch]:
    """All pieces, row numbers and features each, as one batch in the order the rows came in."""
    if not pieces:
        return np.empty(0, np.int64), pa.RecordBatch.from_pylist([], schema=view.feature_schema())
    rows, merged = pieces[0]
    if len(pieces) > 1:
        rows = np.concatenate([rows for rows, _ in pieces])
        merged = pa.concat_batches([features for _, features in pieces])
    if len(rows) == 1 or (rows[1:] > rows[:-1]).all():
        return rows, merged
    order = np.argsort(rows, kind="stable")
    return rows[order], merged.take(pa.array(order))


def with_null_rows(view: FeatureView, outcome: Outcome) -> Outcome:
    """What becomes of a window's rows under ``bad_rows: null``: those the model declared unusable have every feature null. The batch job, the
    parity gate and the fallback ask here alike. Under another policy, ``outcome`` as it is."""
    if view.definition.bad_rows != "null":
        return outcome
    unusable = [rejected.row for rejected in outcome.rejections if rejected.stage == "input"]
    if not unusable:
        return outcome
    schema = view.feature_schema()
    nulls = pa.RecordBatch.from_arrays([pa.nulls(len(unusable), f.type) for f in schema], schema=schema)
    rows = np.concatenate([outcome.rows, np.array(unusable, np.int64)])
    order = np.argsort(rows)
    features = pa.concat_batches([outcome.features, nulls]).take(pa.array(order))
    rejections = [rejected for rejected in outcome.rejections if rejected.stage != "input"]
    return replace(outcome, rows=rows[order], features=features, rejections=rejections)
