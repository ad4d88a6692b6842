"""Rows: windows and batches of them on their way through the engine's stages; what a model
returned, checked against what its view declares; and a window's outcome, features or rejections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.model import Features, Prepared
from precompute.store.errors import did_you_mean
from precompute.store.feature_view import SCALAR_TYPES, Feature, FeatureView, find_bad

Rows = npt.NDArray[np.int64]
"""Row numbers, or positions."""


MISFIT = "misfit"
"""The stage of a row for which the model's answer is not what the view declares: another shape or
type, or none."""
UNANSWERED = "unanswered"
"""The stage of a row that the service behind the model answered nothing to."""


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """Why a row has no features: its number in the batch, the stage (``input``, ``prepare``,
    ``model``, :data:`UNANSWERED`, :data:`MISFIT`, ``output`` for values that are not finite, or
    ``worker`` when it ended its process) and the error."""

    row: int
    stage: str
    error: str


@dataclass(slots=True)
class Outcome:
    """What became of a window's rows: the features of those that could be computed, and why others
    have none.

    ``rows`` are the numbers of the computed ones in the batch given, ascending; ``features`` has
    one row for each. Of a stream, ``window`` counts the batches given from 0, and ``last`` says
    whether this is the last that comes of it.
    """

    rows: Rows
    features: pa.RecordBatch
    rejections: list[RejectedRow] = field(default_factory=list)
    window: int = 0
    last: bool = True

    @property
    def done(self) -> int:
        """Rows that were computed or rejected."""
        return len(self.rows) + len(self.rejections)


@dataclass(slots=True)
class Window:
    """Rows sorted together; or, once computed, a piece of them."""

    batch: pa.RecordBatch
    """As it was given; all of it, where the window is a part."""
    shown: pa.RecordBatch
    """What the model sees of the window's rows."""
    number: int = 0
    """Number of ``batch``, counted from 0."""
    first: int = 0
    """Row of ``batch`` where the window begins."""
    last: bool = True
    """Whether nothing of ``batch`` follows."""
    rejections: dict[int, RejectedRow] = field(default_factory=dict)
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    """Row of the window at each position of what was prepared."""
    prepared: Prepared | None = None
    costs: Rows | None = None
    """Cost of each position, at least 1; None of a model that names none."""
    pieces: list[tuple[Rows, pa.RecordBatch]] = field(default_factory=list)
    """Row numbers of each batch, and the features that the model made of them: whether they are
    finite was not yet looked at."""
    handed_on: float | None = None
    """When the last piece was, or the first batch begun."""

    def at(self, positions: Rows) -> pa.RecordBatch:
        """What the model sees of the rows at these positions."""
        return taken(self.shown, self.rows[positions])

    def cost(self, positions: Rows) -> tuple[int, int]:
        """Two costs of these positions: without padding, and in one batch, where each costs as much
        as the dearest."""
        if self.costs is None:
            return len(positions), len(positions)
        costs = self.costs[positions]
        if len(costs) == 1:
            return int(costs[0]), int(costs[0])
        return int(costs.sum()), len(costs) * int(costs.max())

    def reject(self, row: int, stage: str, error: str) -> None:
        """Row ``row`` of the window has no features; of the error, which may quote the row, half a
        surrogate pair is escaped, since no file takes it."""
        text = error.encode(errors="backslashreplace").decode()
        self.rejections[row] = RejectedRow(row, stage, text)

    def piece(self) -> Window:
        """What was made so far; this window goes on without it."""
        made = replace(self, last=False, prepared=None, costs=None)
        self.pieces, self.rejections = [], {}
        return made

    def prepared_bytes(self) -> int:
        """Bytes held before it is computed: what was made of the rows is of their size, more or
        less, unless the model says so."""
        made = 0 if self.prepared is None else self.prepared.size_bytes
        return int(self.shown.nbytes) + max(made, int(self.shown.nbytes))

    def computed_bytes(self) -> int:
        """Bytes held after it was computed."""
        made = sum(int(features.nbytes) for _, features in self.pieces)
        return int(self.shown.nbytes) + made


class Later:
    """Stands in place of a batch's inputs that could not be made: the model's stage makes them once
    more, and bisects."""


@dataclass(slots=True)
class Batch:
    """Rows computed together; ``positions`` None marks the end of a window."""

    window: Window
    positions: Rows | None
    budget: int = 0
    inputs: Any = None

    def input_bytes(self) -> int:
        """Bytes held by the inputs, as far as they have a size."""
        inputs = self.inputs if isinstance(self.inputs, (tuple, list)) else [self.inputs]
        return sum(int(getattr(part, "nbytes", 0)) for part in inputs)


def side_by_side(rows: Rows) -> slice | None:
    """The slice of some rows, at least one, where each follows the one before; else None."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1 and (count == 1 or (rows[1:] - rows[:-1] == 1).all()):
        return slice(first, first + count)
    return None


def taken(batch: pa.RecordBatch, rows: Rows) -> pa.RecordBatch:
    """Some rows of a batch, without a copy where they lie side by side."""
    where = side_by_side(rows) if len(rows) else None
    return batch.take(pa.array(rows)) if where is None else batch.slice(where.start, len(rows))


# ---- Features: what a model returned, as Arrow columns of the types that its view declares.


def copied(values: Any) -> Any:
    """A copy of what a model returned of a feature: of what holds the rows, and of an array or a
    list for each."""
    if isinstance(values, np.ma.MaskedArray):
        # np.array() would forget what is masked
        return values.copy()
    if isinstance(values, np.ndarray):
        return _copied_rows(values) if values.dtype == object and values.ndim else np.array(values)
    if isinstance(values, (list, tuple)):
        return [_copied_row(row) for row in values]
    if isinstance(values, pa.ChunkedArray):
        # copies one chunk too
        return values.combine_chunks()
    if isinstance(values, pa.Array):
        # pa.array(buffer) is the buffer itself
        return pa.concat_arrays([values])
    # a tensor's or a series' memory may be used again as well
    return np.asarray(values).copy() if hasattr(values, "__array__") else values


def _copied_row(row: Any) -> Any:
    if isinstance(row, np.ndarray):
        return row.copy()
    if isinstance(row, list):
        return list(row)
    # a tensor; a number of numpy's has no length
    return np.asarray(row).copy() if hasattr(row, "__array__") and hasattr(row, "__len__") else row


_copied_rows = np.frompyfunc(_copied_row, 1, 1)
"""Copies each row of an object array."""


class Misfit(Exception):
    """What a model returned is not what its view declares: a missing feature, another number of
    rows, another shape or type."""


class Declared:
    """What a view declares of its features, to check what a model returns against; made once,
    since that takes as long as a small model does.

    Args:
        once_more: how a row is computed once more whose value does not fit, as of
            :class:`precompute.model.KeepingModel`; empty of other models.
    """

    def __init__(self, view: FeatureView, once_more: str = "") -> None:
        self._once_more = f" ({once_more})" if once_more else ""
        self._view, self._schema = view, view.feature_schema()
        self._types = self._schema.types

    def columns(self, features: Features, rows: int) -> pa.RecordBatch:
        """A copy of the model's output as Arrow columns of exactly the declared types.

        Raises:
            Misfit: it returns something other than the view declares, for one of the rows or for
                all.
        """
        try:
            return self._columns(features, rows)
        except Misfit as exc:
            raise Misfit(f"{exc}{self._once_more}") from exc.__cause__

    def _columns(self, features: Features, rows: int) -> pa.RecordBatch:
        view = self._view
        if not isinstance(features, (dict, Mapping)):
            raise Misfit(
                f"the model of view {view.name!r} returned {type(features).__name__}, not a dict of"
                " features"
            )
        columns = []
        for feature, kind in zip(view.features, self._types, strict=True):
            if feature.name not in features:
                names = [str(name) for name in features]
                near = did_you_mean(feature.name, names)
                raise Misfit(
                    f"the model of view {view.name!r} returned no {feature.name!r} (it returned:"
                    f" {', '.join(names) or 'nothing'}){near}"
                )
            try:
                # Copied in the thread that computed: a model may use its memory again. And one that
                # outlives its batch lies between the activations of the next ones, for which malloc
                # then takes new memory each time: 1.2 GB over 2 M rows of a small MLP, and 4.2 to
                # 5.7 s instead of 3.5.
                columns.append(_column(feature, kind, _own(features[feature.name]), rows))
            except Misfit as exc:
                raise Misfit(
                    f"feature {feature.name!r} of view {view.name!r}: {exc}"
                ) from exc.__cause__
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def against(self, features: Features, rows: int) -> str | None:
        """What is wrong with one of so many rows that a model made; None where all fit."""
        try:
            return next(iter(self.bad(self.columns(features, rows)).values()), None)
        except Misfit as exc:
            return str(exc)

    def bad(self, columns: pa.RecordBatch) -> Mapping[int, str]:
        """Row → error of those with NaN, infinities and, in an indexed cosine vector, zero norm."""
        bad: dict[int, str] = {}
        for feature, column in zip(self._view.features, columns.columns, strict=True):
            find_bad(self._view, feature, column, bad)
        return {row: f"{error}{self._once_more}" for row, error in bad.items()}


def _own(values: Any) -> Any:
    try:
        return copied(values)
    except (RuntimeError, TypeError, ValueError) as exc:
        # a tensor that needs its gradient, or lies on a GPU
        raise Misfit(
            f"the model returned {type(values).__name__}, which is no array: {exc}"
        ) from exc


def _column(feature: Feature, kind: pa.DataType, values: Any, rows: int) -> pa.Array:
    if not hasattr(values, "__len__") or (isinstance(values, np.ndarray) and values.ndim == 0):
        raise Misfit(
            f"the model returned {type(values).__name__}, not one value for each of {rows} rows"
        )
    if len(values) != rows:
        raise Misfit(f"the model returned {len(values)} values for {rows} rows")
    try:
        if isinstance(values, pa.Array):
            column = _as(kind, values)
        elif feature.dim is not None:
            return _vectors(feature, kind, values)
        else:
            column = _as(
                kind, _lists(values) if feature.max_items is not None else _scalars(feature, values)
            )
        column.validate(full=True)
    except (Misfit, MemoryError):
        raise
    except Exception as exc:
        # whatever a model returns, and whatever numpy or Arrow says of it
        raise Misfit(
            f"the model returned {getattr(values, 'type', type(values).__name__)}, which does not"
            f" fit {kind}: {exc}"
        ) from exc
    if feature.max_items is not None:
        longest = pc.max(pc.list_value_length(column)).as_py() or 0
        if longest > feature.max_items:
            raise Misfit(
                f"a list of {longest} items, declared at most {feature.max_items}; correct"
                " `max_items` or the model"
            )
    if feature.dim is not None and column.null_count:
        raise Misfit(
            "the model returned a null vector; raise for such a row, or name it in unusable()"
        )
    if (feature.dim is not None or feature.max_items is not None) and column.flatten().null_count:
        raise Misfit("a vector or list holds a null; leave it out")
    return column


def _vectors(feature: Feature, kind: pa.DataType, values: Any) -> pa.Array:
    rows = values if isinstance(values, list) or values.dtype == object else ()
    if np.ma.is_masked(values) or any(
        np.ma.is_masked(row) for row in rows if isinstance(row, np.ma.MaskedArray)
    ):
        raise Misfit(
            "a vector holds a masked number; raise for such a row, or name it in unusable()"
        )
    values = np.asarray(values)
    if values.ndim != 2 or values.shape[1] != feature.dim:
        raise Misfit(
            f"declared as a vector of {feature.dim}, but the model returned shape"
            f" {list(values.shape)}; correct `dim` or the model"
        )
    if (
        feature.dtype.startswith("float")
        and values.dtype.kind == "f"
        and values.dtype != feature.dtype
    ):
        # what does not fit becomes infinite, and is rejected as such
        with np.errstate(over="ignore"):
            values = values.astype(feature.dtype, copy=False)
    flat = _as(SCALAR_TYPES[feature.dtype], pa.array(np.ascontiguousarray(values).reshape(-1)))
    if flat.null_count:
        raise Misfit("a vector holds a null; raise for such a row, or name it in unusable()")
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)


def _scalars(feature: Feature, values: Any) -> pa.Array:
    if np.ma.isMaskedArray(values):
        array, mask = np.asarray(values), np.ma.getmaskarray(values)
    else:
        array, mask = np.asarray(values), None
    if array.ndim != 1:
        raise Misfit(
            f"declared as one value a row, but the model returned shape {list(array.shape)};"
            " declare `dim` (or `max_items`, of a list) or correct the model"
        )
    if array.dtype.kind == "U" and isinstance(values, list):
        # numpy makes texts of the numbers beside a text, and other ones of a number alone
        return pa.array(values)
    return pa.array(array, mask=mask)


def _as(kind: pa.DataType, column: pa.Array) -> pa.Array:
    # even a cast to its own type takes 2 µs
    if column.type == kind:
        return column
    of, item = _item(column.type), _item(kind)
    if pa.types.is_null(of):
        return column.cast(kind)
    if _is_text(column.type) != _is_text(kind) or pa.types.is_temporal(of):
        # Arrow would read the number in a text, write a number as one, and count a time's units
        # a text is of its row; of others every row has the same error, which are counted together
        value = f" ({_first(column)})" if _is_text(column.type) else ""
        raise Misfit(
            f"the model returned {column.type}{value}, declared {kind}; correct `dtype` or the"
            " model"
        )
    cast = column.cast(kind)
    # what Arrow does not look at: 2 is true to it, 2049 as float16 is 2048, and a whole number of
    # more digits than a double has is rounded where it is a decimal
    unlike = (
        pa.types.is_boolean(item)
        or (pa.types.is_float16(item) and pa.types.is_integer(of))
        or (pa.types.is_floating(item) and pa.types.is_decimal(of) and of.scale <= 0)
    )
    if unlike and not (back := cast.cast(column.type, safe=False)).equals(column):
        raise Misfit(
            f"the model returned {column.type} with values that are none of {kind}"
            f" ({_first(column, back)}); correct `dtype` or the model"
        )
    return cast


def _first(column: pa.Array, other: pa.Array | None = None) -> str:
    """The first value of a column, that differs from another's, as messages quote it."""
    values: Any = zip(column, column if other is None else other, strict=True)
    found = (str(one) for one, two in values if one.is_valid and (other is None or one != two))
    return next(found, "nothing")[:60]


def _item(kind: pa.DataType) -> pa.DataType:
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return kind


def _is_text(kind: pa.DataType) -> bool:
    item = _item(kind)
    return any(
        is_kind(item)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
        )
    )


def _lists(values: Any) -> pa.Array:
    """A list for each row, from a matrix, or from a list or object array of lists, tuples, arrays
    and tensors; None is a null."""
    if np.ma.isMaskedArray(values):
        values = values.tolist()
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype != object:
        offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(values.shape[1])
        return pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(values).reshape(-1)))
    return pa.array([row.tolist() if hasattr(row, "tolist") else row for row in values])


def in_order(
    view: FeatureView, pieces: list[tuple[Rows, pa.RecordBatch]]
) -> tuple[Rows, pa.RecordBatch]:
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
    """What becomes of a window's rows under ``bad_rows: null``: those the model declared unusable
    have every feature null. The batch job, the parity gate and the fallback all call this. Under
    another policy, ``outcome`` as it is."""
    if view.definition.bad_rows != "null":
        return outcome
    unusable = [rejected.row for rejected in outcome.rejections if rejected.stage == "input"]
    if not unusable:
        return outcome
    schema = view.feature_schema()
    nulls = pa.RecordBatch.from_arrays(
        [pa.nulls(len(unusable), f.type) for f in schema], schema=schema
    )
    rows = np.concatenate([outcome.rows, np.array(unusable, np.int64)])
    order = np.argsort(rows)
    features = pa.concat_batches([outcome.features, nulls]).take(pa.array(order))
    rejections = [rejected for rejected in outcome.rejections if rejected.stage != "input"]
    return replace(outcome, rows=rows[order], features=features, rejections=rejections)
