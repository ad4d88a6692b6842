"""Odd rows: those of a view that are counted one by one, of all rows, since a gate may allow none
of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.feature_view import Feature, FeatureView

Numbers = npt.NDArray[np.int64]
_NONE: Numbers = np.empty(0, np.int64)

NOT_FINITE, VALUELESS = "not_finite", "valueless"
"""Kinds of odd rows: with a number that is NaN or infinite; of which every feature is null."""


def odd_rows(rows: pa.RecordBatch | pa.Table, view: FeatureView) -> dict[str, Numbers]:
    """Kind → numbers of the odd rows, int64, from 0 and ascending; kinds that there are none of are
    left out.

    Args:
        rows: with a column of each feature, of the type that the view declares.
        view: declares the features.
    """
    found: dict[str, list[Numbers]] = {}
    first = 0
    for batch in rows.to_batches() if isinstance(rows, pa.Table) else (rows,):
        for kind, numbers in _odd(batch, view):
            if len(numbers):
                found.setdefault(kind, []).append(numbers + first)
        first += batch.num_rows
    return {kind: np.unique(np.concatenate(numbers)) for kind, numbers in found.items()}


def _odd(rows: pa.RecordBatch, view: FeatureView) -> Iterator[tuple[str, Numbers]]:
    for feature in view.features:
        if feature.dtype.startswith("float"):
            of_kind = _infinite if feature.dim is None else _infinite_vectors
            yield NOT_FINITE, of_kind(rows.column(feature.name), feature)
    yield VALUELESS, _valueless(rows, view)


def _infinite_vectors(column: pa.Array, feature: Feature) -> Numbers:
    """Numbers of the rows with a vector that is not finite."""
    matrix: npt.NDArray[np.floating[Any]] = np.asarray(column.drop_null().flatten())
    # of float16 squares would be slow, and most of them infinite
    matrix = matrix.astype(np.promote_types(matrix.dtype, np.float32), copy=False)
    matrix = matrix.reshape(-1, feature.dim or 1)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # a fifth of the time of looking at each number
        squares = np.einsum("ij,ij->i", matrix, matrix)
    # infinite, or so long that its square is
    beyond = np.flatnonzero(~np.isfinite(squares))
    bad: Numbers = beyond[~np.isfinite(matrix[beyond]).all(axis=1)]
    return _valid(column)[bad]


def _infinite(column: pa.Array, feature: Feature) -> Numbers:
    """Numbers of the rows with a scalar, or an item of a list, that is not finite."""
    lists = feature.max_items is not None
    values = np.asarray(
        column.flatten() if lists else column.drop_null() if column.null_count else column
    )
    if np.isfinite(values).all():
        return _NONE
    bad = np.flatnonzero(~np.isfinite(values))
    if lists:
        return np.asarray(column.value_parent_indices())[bad]
    return _valid(column)[bad]


def _valid(column: pa.Array) -> Numbers:
    """Numbers of the rows that are not null."""
    return np.flatnonzero(np.asarray(column.is_valid()))


def _valueless(rows: pa.RecordBatch, view: FeatureView) -> Numbers:
    """Numbers of the rows of which every feature is null. No model may return a null vector, so
    that where there is a vector feature it decides alone."""
    vector = next((f.name for f in view.features if f.dim is not None), None)
    names = view.feature_names if vector is None else (vector,)
    if not all(rows.column(name).null_count for name in names):
        return _NONE
    every = np.ones(rows.num_rows, np.bool_)
    for name in names:
        every &= np.asarray(rows.column(name).is_null())
    return np.flatnonzero(every)
