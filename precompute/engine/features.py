"""Features: what a model returned, checked against what its view declares, as Arrow columns in the order of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
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


def checked(view: FeatureView, features: Features, rows: int) -> pa.RecordBatch:
    """The model's output as Arrow columns of exactly the declared types.

    Raises:
        ModelError: it returns something other than the view declares: a missing feature, another length or type.
    """
    if not isinstance(features, Mapping):
        raise ModelError(f"the model of view {view.name!r} returned {type(features).__name__}, not a dict of features")
    columns = []
    for feature in view.features:
        if feature.name not in features:
            raise ModelError(
                f"the model of view {view.name!r} returned no {feature.name!r} (it returned: {', '.join(features) or 'nothing'})"
            )
        columns.append(_column(view, feature, features[feature.name], rows))
    return pa.RecordBatch.from_arrays(columns, schema=view.feature_schema())


def _column(view: FeatureView, feature: Feature, values: Any, rows: int) -> pa.Array:
    where = f"feature {feature.name!r} of view {view.name!r}"
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not hasattr(values, "__len__") or (isinstance(values, np.ndarray) and values.ndim == 0):
        raise ModelError(f"{where}: the model returned {type(values).__name__}, not one value for each of {rows} rows")
    if len(values) != rows:
        raise ModelError(f"{where}: the model returned {len(values)} values for {rows} rows")
    try:
        if feature.dim is not None and not isinstance(values, pa.Array):
            values = np.asarray(values)
            if values.ndim != 2 or values.shape[1] != feature.dim:
                raise ModelError(
                    f"{where}: declared as a vector of {feature.dim}, but the model returned shape {list(values.shape)}; correct `dim` or the model"
                )
            if feature.dtype.startswith("float") and values.dtype.kind in "fiu":
                # what does not fit becomes infinite, and is rejected as such
                with np.errstate(over="ignore"):
                    values = values.astype(feature.dtype, copy=False)
            flat = pa.array(np.ascontiguousarray(values).reshape(-1)).cast(SCALAR_TYPES[feature.dtype])
            return pa.FixedSizeListArray.from_arrays(flat, type=feature.arrow_type)
        if feature.max_items is not None and not isinstance(values, pa.Array):
            values = _lists(values)
        elif not isinstance(values, pa.Array):
            values = np.asarray(values)
            if values.ndim != 1:
                raise ModelError(
                    f"{where}: declared as one value a row, but the model returned shape {list(values.shape)}; declare `dim` (or `max_items`, of a "
                    "list) or correct the model"
                )
            values = pa.array(values)
        column = values.cast(feature.arrow_type)
        column.validate(full=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as exc:
        raise ModelError(
            f"{where}: the model returned {getattr(values, 'type', type(values).__name__)}, which does not fit {feature.arrow_type}: {exc}"
        ) from exc
    if feature.max_items is not None:
        longest = pc.max(pc.list_value_length(column)).as_py() or 0
        if longest > feature.max_items:
            raise ModelError(
                f"{where}: a list of {longest} items, declared at most {feature.max_items}; correct `max_items` or the model"
            )
    if feature.dim is not None and column.null_count:
        raise ModelError(f"{where}: the model returned a null vector; raise for such a row, or name it in unusable()")
    if (feature.dim is not None or feature.max_items is not None) and column.flatten().null_count:
        raise ModelError(f"{where}: a vector or list holds a null; leave it out")
    return column


def _lists(values: Any) -> pa.Array:
    """A list for each row, from a matrix, or from a list or object array of lists, tuples and arrays; None is a null."""
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype != object:
        offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(values.shape[1])
        return pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(values).reshape(-1)))
    return pa.array([row.tolist() if isinstance(row, np.ndarray) else row for row in values])


def finite(view: FeatureView, features: pa.RecordBatch) -> tuple[npt.NDArray[np.bool_], Mapping[int, str]]:
    """(rows to keep, row → error) by looking for NaN, infinities and, in an indexed cosine vector, zero norm."""
    keep = np.ones(features.num_rows, np.bool_)
    bad: dict[int, str] = {}
    for feature in view.features:
        if not feature.dtype.startswith("float"):
            continue
        column = features.column(feature.name)
        if feature.dim is None and feature.max_items is None:
            if column.null_count:
                column = pc.fill_null(column, pa.scalar(0.0).cast(column.type))
            infinite = np.flatnonzero(~np.isfinite(np.asarray(column)))
        elif feature.dim is not None:
            matrix = np.asarray(column.flatten()).reshape(-1, feature.dim)
            infinite = np.flatnonzero(~np.isfinite(matrix).all(axis=1))
            if view.index is not None and view.index.on == feature.name and view.index.metric == "cosine":
                for row in np.flatnonzero(~matrix.any(axis=1)).tolist():
                    bad.setdefault(row, f"{feature.name} is all zeros, which has no direction for cosine")
        else:
            items = np.asarray(column.flatten())
            infinite = np.unique(np.asarray(pc.list_parent_indices(column))[~np.isfinite(items)])
        for row in infinite.tolist():
            bad.setdefault(row, f"{feature.name} is not finite")
    keep[list(bad)] = False
    return keep, bad


def in_order(view: FeatureView, pieces: list[tuple[Rows, pa.RecordBatch]]) -> tuple[Rows, pa.RecordBatch]:
    """All pieces, row numbers and features each, as one batch in the order the rows came in."""
    if not pieces:
        return np.empty(0, np.int64), pa.RecordBatch.from_pylist([], schema=view.feature_schema())
    rows = np.concatenate([rows for rows, _ in pieces])
    merged = pa.concat_batches([features for _, features in pieces])
    if (rows[1:] > rows[:-1]).all():
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
