"""Runner: rows → batches → model → checked features. A bad row is one bad row: it is found, rejected with a reason, and the rest go on.

The batch job and the fallback both come through :func:`compute`, so a fallback's values are the batch job's values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.batching import batches_by_cost
from precompute.model import CheckingModel, Features, Model, SizedModel
from store.errors import ModelError
from store.feature_view import SCALAR_TYPES, Feature, FeatureView

MAX_BATCH_ROWS = 4096
"""Rows given at once to a model that names no costs: 1–8 k rows is the right size for MLPs on CPUs."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why one row has no features: its number in the batch given, the stage (``input``, ``model``, ``output``) and the error."""

    row: int
    stage: str
    error: str


@dataclass(slots=True)
class Computed:
    """Features of the rows that could be computed.

    ``rows`` are their numbers in the batch given, ascending; ``features`` has one row for each.
    """

    rows: npt.NDArray[np.int64]
    features: pa.RecordBatch
    rejections: list[Rejection] = field(default_factory=list)
    model_s: float = 0.0


def compute(model: Model, view: FeatureView, batch: pa.RecordBatch) -> Computed:
    """Run the model over one window of rows.

    Args:
        model: the loaded model.
        view: declares names, types and shapes of the features.
        batch: source rows; memory for their features must be at hand.

    Raises:
        ModelError: the model returns something other than the view declares: a missing feature, another length or type. That is a
            mistake in model or view, not in a row, so the run fails.
    """
    rejections: dict[int, Rejection] = {}
    if isinstance(model, CheckingModel):
        for row, reason in _asked(view, "unusable()", model.unusable, batch).items():
            rejections[row] = Rejection(row, "input", reason)
    usable = np.array([row for row in range(batch.num_rows) if row not in rejections], np.int64)
    started = time.monotonic()
    pieces: list[tuple[npt.NDArray[np.int64], pa.RecordBatch]] = []
    for rows in _plan(model, view, batch, usable):
        for done, features in _attempt(model, view, batch, rows, rejections):
            keep, bad = _finite(view, features)
            for position, error in bad.items():
                rejections[int(done[position])] = Rejection(int(done[position]), "output", error)
            pieces.append((done[keep], features.filter(pa.array(keep)) if bad else features))
    model_s = time.monotonic() - started
    rows, features = _in_order(view, pieces)
    return Computed(rows, features, [rejections[row] for row in sorted(rejections)], model_s)


def _plan(
    model: Model, view: FeatureView, batch: pa.RecordBatch, usable: npt.NDArray[np.int64]
) -> Iterator[npt.NDArray[np.int64]]:
    if not len(usable):
        return
    if isinstance(model, SizedModel):
        subset = batch if len(usable) == batch.num_rows else batch.take(pa.array(usable))
        costs = np.asarray(_asked(view, "costs()", model.costs, subset))
        if costs.shape != (len(usable),) or costs.dtype.kind not in "iu":
            raise ModelError(
                f"the model of view {view.name!r}: costs() returned {costs.dtype} {list(costs.shape)}, not an integer for each of {len(usable)} rows"
            )
        for rows in batches_by_cost(np.maximum(costs, 1).astype(np.int64), model.max_cost):
            yield usable[rows]
    else:
        for start in range(0, len(usable), MAX_BATCH_ROWS):
            yield usable[start : start + MAX_BATCH_ROWS]


def _asked(view: FeatureView, what: str, method: Callable[[pa.RecordBatch], Any], batch: pa.RecordBatch) -> Any:
    """Raises:
    ModelError: the method raised; without its answer no row can be planned.
    """
    try:
        return method(batch)
    except ModelError:
        raise
    except Exception as exc:
        raise ModelError(f"the model of view {view.name!r}: {what} raised {type(exc).__name__}: {exc}") from exc


def _attempt(
    model: Model,
    view: FeatureView,
    batch: pa.RecordBatch,
    rows: npt.NDArray[np.int64],
    rejections: dict[int, Rejection],
) -> Iterator[tuple[npt.NDArray[np.int64], pa.RecordBatch]]:
    """Compute ``rows``; when the model raises, halve them until the row that makes it raise stands alone."""
    whole = len(rows) == batch.num_rows and np.array_equal(rows, np.arange(len(rows)))
    try:
        features = model.compute(batch if whole else batch.take(pa.array(rows)))
    except ModelError:  # the model's own word that view and source do not fit it: no row's fault
        raise
    except (Exception, SystemExit) as exc:  # a model may raise anything; which row did it is what counts
        if len(rows) == 1:
            rejections[int(rows[0])] = Rejection(int(rows[0]), "model", f"{type(exc).__name__}: {exc}"[:500])
            return
        middle = len(rows) // 2
        yield from _attempt(model, view, batch, rows[:middle], rejections)
        yield from _attempt(model, view, batch, rows[middle:], rejections)
        return
    yield rows, _checked(view, features, len(rows))


def _checked(view: FeatureView, features: Features, rows: int) -> pa.RecordBatch:
    """The model's output as Arrow columns of exactly the declared types.

    Raises:
        ModelError: see :func:`compute`.
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
                with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is rejected as such
                    values = values.astype(feature.dtype, copy=False)
            flat = pa.array(np.ascontiguousarray(values).reshape(-1)).cast(SCALAR_TYPES[feature.dtype])
            return pa.FixedSizeListArray.from_arrays(flat, type=feature.arrow_type)
        if not isinstance(values, pa.Array):
            values = np.asarray(values)
            if values.ndim != 1:
                raise ModelError(
                    f"{where}: declared as one value a row, but the model returned shape {list(values.shape)}; declare `dim` or correct the model"
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


def _finite(view: FeatureView, features: pa.RecordBatch) -> tuple[npt.NDArray[np.bool_], Mapping[int, str]]:
    """(rows to keep, row → error) by looking for NaN, infinities and, in an indexed cosine vector, zero norm."""
    keep = np.ones(features.num_rows, np.bool_)
    bad: dict[int, str] = {}
    for feature in view.features:
        if not feature.dtype.startswith("float"):
            continue
        column = features.column(feature.name)
        if feature.dim is None and feature.max_items is None:
            infinite = np.flatnonzero(~np.isfinite(np.asarray(pc.fill_null(column, pa.scalar(0.0).cast(column.type)))))
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


def _in_order(
    view: FeatureView, pieces: list[tuple[npt.NDArray[np.int64], pa.RecordBatch]]
) -> tuple[npt.NDArray[np.int64], pa.RecordBatch]:
    """All pieces as one batch, back in the order the rows came in."""
    if not pieces:
        return np.empty(0, np.int64), _empty(view)
    rows = np.concatenate([r for r, _ in pieces])
    merged = pa.concat_batches([f for _, f in pieces])
    order = np.argsort(rows, kind="stable")
    if np.array_equal(order, np.arange(len(order))):
        return rows, merged
    return rows[order], merged.take(pa.array(order))


def _empty(view: FeatureView) -> pa.RecordBatch:
    schema = view.feature_schema()
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
