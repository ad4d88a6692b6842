"""Row figures: what is counted of a view's rows by type, for gates and for people: of all rows what
a gate may allow none of, of a sample all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.disk.record import Record, field
from precompute.store.feature_view import Feature, FeatureView

SHIFT = 17
"""Bits of a float32 that a bucket does not look at: 64 buckets to each power of two, so that a
quantile is within 0.8 %."""
COMMON_VALUES = 64
"""The commonest values that the manifest has, at most."""
SHOWN_LETTERS = 60

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]
_NONE: Numbers = np.empty(0, np.int64)


class ValueFigures(Record, frozen=True):
    """What is counted of one feature: ``rows`` that have a value, not null, of which ``empty`` are
    an empty text or list, ``not_finite`` NaN or infinite, ``zero`` zero; ``total`` and ``squares``
    sum up the finite numbers and their squares. ``items`` are those of all lists.

    ``buckets``: bucket → numbers, of scalars; ``lengths``: bucket → rows, of texts (letters) and
    lists (items). ``common``: value, as text → times, of the :data:`COMMON_VALUES` commonest of
    ``looked_at`` values or items; ``distinct`` how many different ones there are among them.
    """

    rows: int = 0
    empty: int = 0
    not_finite: int = 0
    zero: int = 0
    total: float = 0.0
    squares: float = 0.0
    items: int = 0
    buckets: Mapping[int, int] = field(default_factory=dict)
    lengths: Mapping[int, int] = field(default_factory=dict)
    common: Mapping[str, int] = field(default_factory=dict)
    looked_at: int = 0
    distinct: int = 0

    @property
    def numbers(self) -> int:
        """Rows with a finite number."""
        return sum(self.buckets.values())

    @property
    def mean(self) -> float:
        """Mean of the finite numbers; 0 without any."""
        return self.total / self.numbers if self.buckets else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation of the finite numbers; 0 without any."""
        return (
            float(np.sqrt(max(0.0, self.squares / self.numbers - self.mean**2)))
            if self.buckets
            else 0.0
        )

    @property
    def common_share(self) -> float:
        """Share of the commonest value among all; 0 without any."""
        return max(self.common.values(), default=0) / self.looked_at if self.looked_at else 0.0

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """The numbers that these shares of all do not exceed, each within 0.8 %; zeros without
        any."""
        return quantiles(self.buckets, shares)


def quantiles(buckets: Mapping[int, int], shares: Sequence[float]) -> list[float]:
    """What these shares of the values in the buckets do not exceed, each within 0.8 %; zeros of
    none."""
    if not buckets:
        return [0.0] * len(shares)
    return [_middle(int(bucket)) for bucket in _buckets_at(buckets, shares)]


def _buckets_at(buckets: Mapping[int, int], shares: Sequence[float]) -> Numbers:
    """The bucket up to which each of these shares of all lie; ``buckets`` are not empty."""
    order = np.array(sorted(buckets), np.int64)
    filled = np.cumsum([buckets[bucket] for bucket in order.tolist()])
    places = np.searchsorted(filled, np.asarray(shares) * filled[-1])
    found: Numbers = order[places.clip(max=len(order) - 1)]
    return found


def distance(a: Mapping[int, int], b: Mapping[int, int]) -> float:
    """The Kolmogorov–Smirnov distance of two sets of values by their buckets, 0 to 1: the largest
    difference of the shares below any value. 0 where either is empty."""
    if not a or not b:
        return 0.0
    order = sorted({*a, *b})
    shares = [
        np.cumsum([of.get(bucket, 0) for bucket in order]) / sum(of.values()) for of in (a, b)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


def commonest(counts: Mapping[str, int]) -> dict[str, int]:
    """The :data:`COMMON_VALUES` of them that are counted most often."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return dict(ranked[:COMMON_VALUES])


def value_figures(column: pa.Array, feature: Feature) -> ValueFigures:
    """The figures of one feature that is no vector.

    Args:
        column: of the type that the view declares.
        feature: declares it.
    """
    values = column.drop_null()
    rows, lengths, numbers = len(values), None, np.empty(0)
    if feature.max_items is not None:
        lengths = np.asarray(pc.list_value_length(values))
        values = values.flatten().drop_null()
    elif feature.dtype == "string":
        lengths = np.asarray(pc.utf8_length(values))
    else:
        plain = values.cast(pa.int8()) if feature.dtype == "bool" else values
        numbers = np.asarray(plain).astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    with np.errstate(over="ignore"):
        total, squares = float(finite.sum()), float(np.square(finite).sum())
    counts = pc.value_counts(values)
    times = np.asarray(counts.field(1))
    # of equal ones in the order of the rows
    order = np.argsort(-times, kind="stable")[:COMMON_VALUES]
    if feature.dtype.startswith("float"):
        # of a million different numbers not one is common
        order = order[(times[order] > 1) | (np.arange(len(order)) == 0)]
    shown = map(_shown, counts.field(0).take(pa.array(order)).to_pylist())
    return ValueFigures(
        rows,
        0 if lengths is None else int((lengths == 0).sum()),
        len(numbers) - len(finite),
        int((finite == 0).sum()),
        total,
        squares,
        0 if feature.max_items is None or lengths is None else int(lengths.sum()),
        _filled(_counted(finite)),
        {} if lengths is None else _filled(_counted(lengths)),
        commonest(dict(zip(shown, times[order].tolist(), strict=True))),
        len(values),
        len(counts),
    )


def _counted(numbers: npt.NDArray[Any]) -> Numbers:
    """How many of the numbers, all finite, are in each bucket by the first bits of a float32; what
    is beyond one is in the last."""
    with np.errstate(over="ignore", under="ignore"):
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return np.bincount(bits >> SHIFT, minlength=1 << (32 - SHIFT))


def _filled(counts: Numbers) -> dict[int, int]:
    """Bucket → count, where there is any. Of negative numbers buckets are negative, so that they
    stand in the order of their numbers."""
    used = np.flatnonzero(counts)
    half = 1 << (31 - SHIFT)
    order = np.where(used < half, used, half - 1 - used)
    return dict(zip(order.tolist(), counts[used].tolist(), strict=True))


def _middle(bucket: int) -> float:
    """The number in the middle of a bucket."""
    size = bucket if bucket >= 0 else -1 - bucket
    if size == 0:
        return 0.0
    low, high = (
        np.array([size << SHIFT, min(size + 1, 0x7F800000 >> SHIFT) << SHIFT], np.uint32).view(
            np.float32
        )
    ).astype(np.float64)
    middle = low if not np.isfinite(high) else (low + high) / 2
    return float(middle if bucket >= 0 else -middle)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}…"


_SHIFT = 19
"""Bits of a float32 that a bucket does not look at: sign and exponent stay, and 4 bits of the
fraction."""
_LAST_BUCKET = int(np.array(np.finfo(np.float32).max).view(np.int32)) >> _SHIFT


class VectorFigures(Record, frozen=True):
    """What is counted of one vector feature: ``rows`` that have a finite vector, the sum of their
    Euclidean lengths (``norm_sum``), and ``norms``: bucket of the squared length → rows. A bucket
    is the first bits of a float32, 16 to each power of two, so that a quantile is within 2 % of the
    true one."""

    rows: int = 0
    norm_sum: float = 0.0
    norms: Mapping[int, int] = field(default_factory=dict)

    @property
    def mean_norm(self) -> float:
        """Mean length; 0 without rows."""
        return self.norm_sum / self.rows if self.rows else 0.0

    def norm_quantiles(self, shares: Sequence[float]) -> list[float]:
        """The lengths that these shares of the rows do not exceed, each within 2 %; zeros without
        rows.

        Args:
            shares: between 0 and 1.
        """
        if not self.norms:
            return [0.0] * len(shares)
        buckets = _buckets_at(self.norms, shares)
        low, high = (
            (buckets + step << _SHIFT).astype(np.int32).view(np.float32) for step in (0, 1)
        )
        with np.errstate(over="ignore", invalid="ignore"):
            middle = np.where(np.isfinite(high), (low.astype(np.float64) + high) / 2, low)
        return [float(value) for value in np.where(buckets == 0, 0.0, np.sqrt(middle))]


class RowFigures(Record, frozen=True):
    """What is counted of the rows of a view.

    Of all ``rows``: ``not_finite``, those with a NaN or an infinity, ``valueless``, those of which
    every feature is null, ``zeros``, those whose vector is all zeros, of each feature that has any.

    Of ``sampled`` rows, ``sampled_valueless`` of which have no value: ``nulls`` of each feature
    that has any, ``vectors``, the figures of each feature that is a vector of floats, ``values``,
    those of each that is no vector.
    """

    rows: int = 0
    not_finite: int = 0
    valueless: int = 0
    zeros: Mapping[str, int] = field(default_factory=dict)
    sampled: int = 0
    sampled_valueless: int = 0
    nulls: Mapping[str, int] = field(default_factory=dict)
    vectors: Mapping[str, VectorFigures] = field(default_factory=dict)
    values: Mapping[str, ValueFigures] = field(default_factory=dict)

    def nulls_of_all(self, feature: str) -> int:
        """How many of all rows are null in a feature: counted, or estimated by the sample."""
        return round(self.nulls.get(feature, 0) * self.rows / max(1, self.sampled))


NOT_FINITE, VALUELESS, ZERO = "not_finite", "valueless", "zero:"
"""Kinds of odd rows; of vectors of zeros with the feature's name after it."""


def odd_rows(rows: pa.RecordBatch | pa.Table, view: FeatureView) -> dict[str, Numbers]:
    """Kind → numbers of the rows that a gate may allow none of, from 0 and ascending: no value at
    all, a number that is not finite, a vector of zeros; kinds that there are none of are left out.

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
        if not feature.dtype.startswith("float"):
            continue
        column = rows.column(feature.name)
        if feature.dim is None:
            yield NOT_FINITE, _infinite(column, feature)
        else:
            bad, zero = _odd_vectors(_matrix(column.drop_null(), feature))
            if column.null_count and (len(bad) or len(zero)):
                valid = np.flatnonzero(np.asarray(column.is_valid()))
                bad, zero = valid[bad], valid[zero]
            yield NOT_FINITE, bad
            yield ZERO + feature.name, zero
    yield VALUELESS, _valueless(rows, view)


def _odd_vectors(matrix: Floats) -> tuple[Numbers, Numbers]:
    """Numbers of the rows that are not finite, and of those that are all zeros."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # a fifth of the time of looking at each number
        squares = np.einsum("ij,ij->i", matrix, matrix)
    # infinite, or so long that its square is
    beyond = np.flatnonzero(~np.isfinite(squares))
    small = np.flatnonzero(squares == 0)
    bad = beyond[~np.isfinite(matrix[beyond]).all(axis=1)]
    return bad, small[~matrix[small].any(axis=1)]


def _matrix(column: pa.Array, feature: Feature) -> Floats:
    """[rows, dim] of vectors without nulls; float32 of float16, whose squares overflow."""
    matrix: Floats = np.asarray(column.flatten()).reshape(-1, feature.dim or 1)
    return matrix.astype(np.float32) if matrix.dtype == np.float16 else matrix


def count(batches: Iterable[pa.RecordBatch], view: FeatureView) -> RowFigures:
    """Figures of some rows, all of which are looked at and must fit in memory.

    Args:
        batches: with a column of each feature, of the type that the view declares; other columns
            are not looked at.
        view: declares the features.
    """
    pieces = [batch.select(view.feature_names) for batch in batches]
    schema = view.feature_schema() if not pieces else None
    rows = pa.Table.from_batches(pieces, schema).combine_chunks()
    odd = odd_rows(rows, view)
    zeros = {f.name: len(odd[ZERO + f.name]) for f in view.features if ZERO + f.name in odd}
    bad, valueless = len(odd.get(NOT_FINITE, ())), len(odd.get(VALUELESS, ()))
    nulls, vectors, values = {}, {}, {}
    for feature in view.features:
        column = rows.column(feature.name)
        one = column.chunk(0) if column.num_chunks else pa.array([], column.type)
        if column.null_count:
            nulls[feature.name] = column.null_count
        if feature.dim is None:
            values[feature.name] = value_figures(one, feature)
        elif feature.dtype.startswith("float"):
            vectors[feature.name] = vector_figures(one, feature)
    n = rows.num_rows
    return RowFigures(n, bad, valueless, zeros, n, valueless, nulls, vectors, values)


def vector_figures(column: pa.Array, feature: Feature) -> VectorFigures:
    """The figures of one feature that is a vector of floats.

    Args:
        column: of the type that the view declares.
        feature: declares it.
    """
    matrix = _matrix(column.drop_null(), feature)
    slices = (matrix[at : at + 1024] for at in range(0, len(matrix), 1024))
    norms = np.concatenate([np.empty(0), *map(_norms, slices)])
    with np.errstate(over="ignore", under="ignore"):
        bits = np.square(norms).astype(np.float32).view(np.uint32)
    buckets, times = np.unique((bits >> _SHIFT).clip(max=_LAST_BUCKET), return_counts=True)
    histogram = dict(zip(buckets.tolist(), times.tolist(), strict=True))
    return VectorFigures(len(norms), float(norms.sum()), histogram)


def _norms(matrix: Floats) -> npt.NDArray[np.float64]:
    """Lengths of the rows that are finite."""
    matrix = matrix[np.isfinite(matrix).all(axis=1)].astype(np.float64)
    # of numbers whose square is none, too
    largest = np.abs(matrix).max(axis=1, initial=0.0)
    scaled = matrix / np.where(largest > 0, largest, 1.0)[:, None]
    # not einsum, which adds up in another order where a CPU's registers are longer
    norms: npt.NDArray[np.float64] = largest * np.sqrt(np.square(scaled).sum(axis=1))
    return norms


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
    return np.flatnonzero(np.asarray(column.is_valid()))[bad] if column.null_count else bad


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
