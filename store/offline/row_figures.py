"""Row figures: what is counted of every row while it is written, so that a gate judges all rows and
reads none of them. Figures of two sets of rows add up, and those of rows that left can be taken
off: a delta's are its parent's, less the rows it replaced, plus the rows it computed. Of values by
type, too.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
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
LONG_TEXT = 256
"""Characters beyond which a text is counted by its beginning and its hash."""
MOST_DISTINCT = 65_536
"""Values counted one by one; others are counted together."""
COMMON_VALUES = 64
"""The commonest values that the manifest has, at most."""
SAMPLED_VALUES = 1024
"""Values that are drawn of floats counted together, to find the commonest: to sort all of them took
three times as long as all else here."""
SHOWN_LETTERS = 60

I8 = npt.NDArray[np.int64]


class ValueFigures(Record, frozen=True):
    """What is counted of one feature: ``rows`` that have a value, not null, of which ``empty`` are
    an empty text or list, ``not_finite`` NaN or infinite, ``zero`` zero; ``total`` and ``squares``
    sum up the finite numbers and their squares. ``items`` are those of all lists.

    ``buckets``: bucket → numbers, of scalars; ``lengths``: bucket → rows, of texts (letters) and
    lists (items). ``common``: value, as text → times, of the :data:`COMMON_VALUES` commonest of
    ``looked_at`` values or items; ``distinct`` how many different ones there are, of more than
    :data:`MOST_DISTINCT` at least so many.
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

    def with_others(self, other: ValueFigures, sign: int, times: float) -> ValueFigures:
        """These figures with ``times`` as much as ``other`` has added (``sign`` 1) or taken off
        (-1)."""
        count, counts = _sums(sign, times)
        return ValueFigures(
            count(self.rows, other.rows),
            count(self.empty, other.empty),
            count(self.not_finite, other.not_finite),
            count(self.zero, other.zero),
            self.total + sign * times * other.total,
            max(0.0, self.squares + sign * times * other.squares),
            count(self.items, other.items),
            counts(self.buckets, other.buckets),
            counts(self.lengths, other.lengths),
            commonest(counts(self.common, other.common)),
            count(self.looked_at, other.looked_at),
            max(self.distinct, other.distinct) if sign > 0 else self.distinct,
        )

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """The numbers that these shares of all do not exceed, each within 0.8 %; zeros without
        any."""
        return quantiles(self.buckets, shares)


def _sums(
    sign: int, times: float
) -> tuple[
    Callable[[int, int], int], Callable[[Mapping[Any, int], Mapping[Any, int]], dict[Any, int]]
]:
    """How a count, and counts by name, are added up: ``times`` as much of the second added
    (``sign`` 1) or taken off (-1)."""

    def count(a: int, b: int) -> int:
        return max(0, a + sign * round(b * times))

    def counts(a: Mapping[Any, int], b: Mapping[Any, int]) -> dict[Any, int]:
        sums = {name: count(a.get(name, 0), b.get(name, 0)) for name in sorted({*a, *b})}
        return {name: n for name, n in sums.items() if n}

    return count, counts


def quantiles(buckets: Mapping[int, int], shares: Sequence[float]) -> list[float]:
    """What these shares of the values in the buckets do not exceed, each within 0.8 %; zeros of
    none."""
    if not buckets:
        return [0.0] * len(shares)
    return [_middle(int(bucket)) for bucket in _buckets_at(buckets, shares)]


def _buckets_at(buckets: Mapping[int, int], shares: Sequence[float]) -> I8:
    """The bucket up to which each of these shares of all lie; ``buckets`` are not empty."""
    order = np.array(sorted(buckets), np.int64)
    filled = np.cumsum([buckets[bucket] for bucket in order.tolist()])
    places = np.searchsorted(filled, np.asarray(shares) * filled[-1])
    found: I8 = order[places.clip(max=len(order) - 1)]
    return found


def _short(value: Any) -> Any:
    """A value to be counted: of a long text its beginning, and a hash of all of it."""
    if not isinstance(value, str) or len(value) <= LONG_TEXT:
        return value
    digest = hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{value[:64]}… {digest}"


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


class ValueCounter:
    """Counts the values of one feature as they come.

    Args:
        feature: no vector.
    """

    def __init__(self, feature: Feature) -> None:
        self._feature = feature
        self._rows = self._empty = self._not_finite = self._zero = self._items = self._looked_at = 0
        self._total = self._squares = 0.0
        self._buckets = np.zeros(1 << (32 - SHIFT), np.int64)
        self._lengths = np.zeros(1 << (32 - SHIFT), np.int64)
        self._common: dict[Any, int] = {}
        self._sampled: list[npt.NDArray[Any]] = []
        self._most_distinct = self._windows = 0

    def add(self, column: pa.Array) -> None:
        """Count some rows' values, of the type that the view declares."""
        values = column.drop_null() if column.null_count else column
        self._rows += len(values)
        if not len(values):
            return
        if self._feature.max_items is not None:
            lengths = np.asarray(pc.list_value_length(values))
            self._empty += int((lengths == 0).sum())
            self._items += int(lengths.sum())
            self._lengths += _counted(lengths)
            values = values.flatten()
            values = values.drop_null() if values.null_count else values
            self._count_values(values)
        elif self._feature.dtype == "string":
            lengths = np.asarray(pc.utf8_length(values))
            self._empty += int((lengths == 0).sum())
            self._lengths += _counted(lengths)
            self._count_values(values)
        else:
            self._add_numbers(
                np.asarray(values.cast(pa.int8()) if self._feature.dtype == "bool" else values)
            )
            self._count_values(values)

    def _add_numbers(self, numbers: npt.NDArray[Any]) -> None:
        numbers = numbers.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            # a sum that is finite tells that all are, at a fifth of the time of looking at each
            total = float(numbers.sum())
            if not np.isfinite(total):
                finite = np.isfinite(numbers)
                self._not_finite += int((~finite).sum())
                numbers = numbers[finite]
                total = float(numbers.sum())
            self._zero += int((numbers == 0).sum())
            self._total += total
            # not @, for which BLAS takes threads of its own, which wait for more on both cores: 2 s
            # of CPU for 10⁷ rows
            self._squares += float(np.einsum("i,i->", numbers, numbers))
        self._buckets += _counted(numbers)

    def _count_values(self, values: pa.Array) -> None:
        if not len(values):
            return
        self._windows += 1
        if not pa.types.is_floating(values.type):
            self._count_distinct(values)
            return
        # a window's own place each time, lest what repeats in every window is always or never met
        step = -(-len(values) // SAMPLED_VALUES)
        self._sampled.append(np.asarray(values)[self._windows % step :: step].copy())

    def _count_distinct(self, values: pa.Array) -> None:
        found = pc.value_counts(values)
        self._looked_at += len(values)
        if len(self._common) >= MOST_DISTINCT:
            # what was met once makes room for what may come often from here on
            self._most_distinct = max(self._most_distinct, len(self._common))
            self._common = {value: times for value, times in self._common.items() if times > 1}
        known, full = self._common, len(self._common) >= MOST_DISTINCT
        for given, times in zip(
            found.field(0).to_pylist(), found.field(1).to_pylist(), strict=True
        ):
            value = _short(given)
            if value in known:
                known[value] += times
            elif not full:
                known[value] = times

    def figures(self) -> ValueFigures:
        """The figures of all rows so far."""
        if self._sampled:
            # once, and not with each window: dictionaries took most of what counting takes
            self._count_distinct(pa.array(np.concatenate(self._sampled)))
            self._sampled = []
        ranked = heapq.nlargest(COMMON_VALUES, self._common.items(), key=lambda item: item[1])
        if self._feature.dtype.startswith("float"):
            # of a million different numbers not one is common
            ranked = ranked[:1] + [item for item in ranked[1:] if item[1] > 1]
        return ValueFigures(
            self._rows,
            self._empty,
            self._not_finite,
            self._zero,
            self._total,
            self._squares,
            self._items,
            _filled(self._buckets),
            _filled(self._lengths),
            commonest({_shown(value): times for value, times in ranked}),
            self._looked_at,
            max(self._most_distinct, len(self._common)),
        )


def _counted(numbers: npt.NDArray[Any]) -> I8:
    """How many of the numbers, all finite, are in each bucket by the first bits of a float32; what
    is beyond one is in the last."""
    with np.errstate(over="ignore", under="ignore"):
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return np.bincount(bits >> SHIFT, minlength=1 << (32 - SHIFT))


def _filled(counts: I8) -> dict[int, int]:
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
_NONE: npt.NDArray[np.int64] = np.empty(0, np.int64)
_LAST_BUCKET = int(np.array(np.finfo(np.float32).max).view(np.int32)) >> _SHIFT


class VectorFigures(Record, frozen=True):
    """What is counted of one vector feature: ``rows`` that have a finite vector, how many of these
    are ``zero``, the sum of their Euclidean lengths (``norm_sum``), and ``norms``: bucket of the
    squared length → rows. A bucket is the first bits of a float32, 16 to each power of two, so that
    a quantile is within 2 % of the true one."""

    rows: int = 0
    zero: int = 0
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
    """What is counted of some rows of a view.

    ``rows`` counts them, ``not_finite`` those with a NaN or an infinity, ``valueless`` those of
    which every feature is null, ``nulls`` the nulls of each feature that has any, ``vectors`` the
    figures of each feature that is a vector of floats, ``values`` those of each that is no vector.
    """

    rows: int = 0
    not_finite: int = 0
    valueless: int = 0
    nulls: Mapping[str, int] = field(default_factory=dict)
    vectors: Mapping[str, VectorFigures] = field(default_factory=dict)
    values: Mapping[str, ValueFigures] = field(default_factory=dict)

    def plus(self, other: RowFigures) -> RowFigures:
        """The figures of these rows and of others."""
        return self._with(other, 1, 1.0)

    def less(self, counted: RowFigures, rows: int) -> RowFigures:
        """The figures of these rows without ``rows`` of them.

        Args:
            counted: figures of the rows that leave: exact where they are of all of them; where they
                are of a random sample, so is what is taken off.
            rows: how many leave.
        """
        return (
            self if not rows or not counted.rows else self._with(counted, -1, rows / counted.rows)
        )

    def _with(self, other: RowFigures, sign: int, times: float) -> RowFigures:
        count, counts = _sums(sign, times)
        vectors = {}
        for name in dict.fromkeys((*self.vectors, *other.vectors)):
            a, b = (figures.vectors.get(name, VectorFigures()) for figures in (self, other))
            rows, total = count(a.rows, b.rows), a.norm_sum + sign * b.norm_sum * times
            vectors[name] = VectorFigures(
                rows,
                count(a.zero, b.zero),
                max(0.0, total) if rows else 0.0,
                counts(a.norms, b.norms),
            )
        return RowFigures(
            count(self.rows, other.rows),
            count(self.not_finite, other.not_finite),
            count(self.valueless, other.valueless),
            counts(self.nulls, other.nulls),
            vectors,
            {
                name: (
                    self.values.get(name, ValueFigures()).with_others(
                        other.values.get(name, ValueFigures()), sign, times
                    )
                )
                for name in dict.fromkeys((*self.values, *other.values))
            },
        )


TOGETHER_BYTES = 2**18
"""Windows are counted together up to so many: 65,536 scores, since beside threads that compute
nothing is in a cache, and one of 8,192 alone took 58 ns a row."""


class RowCounter:
    """Counts rows as they come, from their feature columns: 9 ns a row with a vector of 16 float32,
    13 with 64, 640 with 384 float16 (one thread of an AMD Zen 5, windows of 8,192 rows).

    Args:
        view: declares the features.
    """

    def __init__(self, view: FeatureView) -> None:
        self._view = view
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._together: int | None = None
        self._rows = self._not_finite = self._valueless = 0
        self._rare: list[npt.NDArray[np.int64]] = []
        self._nulls: dict[str, int] = {}
        self._vectors = {
            f.name: _VectorCounter()
            for f in view.features
            if f.dim is not None and f.dtype.startswith("float")
        }
        self._values = {f.name: ValueCounter(f) for f in view.features if f.dim is None}

    def add(self, rows: pa.RecordBatch) -> None:
        """Count some rows.

        Args:
            rows: with a column of each feature, of the type that the view declares; other columns
                are not looked at.
        """
        if not rows.num_rows:
            return
        self._pending.append(rows)
        self._pending_rows += rows.num_rows
        if self._together is None:
            # of one window, where all are as wide: to look at each is an eighth of all that
            # counting takes
            alike = all(f.max_items is None and f.dtype != "string" for f in self._view.features)
            self._together = TOGETHER_BYTES * rows.num_rows // max(1, rows.nbytes) if alike else 0
        if self._pending_rows >= self._together:
            self._count()

    def _count(self) -> None:
        """Count what came since."""
        if not self._pending:
            return
        names = self._view.feature_names
        rows = (
            self._pending[0]
            if len(self._pending) == 1
            else pa.concat_batches([rows.select(names) for rows in self._pending])
        )
        self._pending, self._pending_rows = [], 0
        bad: list[npt.NDArray[np.int64]] = []
        zero: list[npt.NDArray[np.int64]] = []
        nulls: dict[str, int] = {}
        for feature in self._view.features:
            column = rows.column(feature.name)
            if column.null_count:
                nulls[feature.name] = column.null_count
            if feature.dim is None:
                self._values[feature.name].add(column)
            if not feature.dtype.startswith("float"):
                continue
            if feature.dim is None:
                bad.append(_infinite(column, feature))
            else:
                infinite, zeros = self._vectors[feature.name].add(column, feature.dim)
                bad.append(infinite)
                zero.append(zeros)
        valueless = _valueless(rows, self._view, nulls)
        if any(len(numbers) for numbers in (*bad, *zero, valueless)):
            self._rare.append(self._rows + np.unique(np.concatenate([*bad, *zero, valueless])))
            self._not_finite += len(np.unique(np.concatenate([_NONE, *bad])))
            self._valueless += len(valueless)
        self._rows += rows.num_rows
        for name, n in nulls.items():
            self._nulls[name] = self._nulls.get(name, 0) + n

    def figures(self) -> RowFigures:
        """The figures of all rows so far."""
        self._count()
        vectors = {name: counter.figures() for name, counter in self._vectors.items()}
        values = {name: counter.figures() for name, counter in self._values.items()}
        return RowFigures(
            self._rows, self._not_finite, self._valueless, dict(self._nulls), vectors, values
        )

    def rare(self) -> npt.NDArray[np.int64]:
        """Numbers of the rows so far, from 0 and ascending, that have no value, are not finite, or
        have a vector of zeros."""
        self._count()
        return np.concatenate([_NONE, *self._rare])


def count(batches: Iterable[pa.RecordBatch], view: FeatureView) -> RowFigures:
    """Figures of all rows of some batches, as :class:`RowCounter` takes them."""
    counter = RowCounter(view)
    for batch in batches:
        counter.add(batch)
    return counter.figures()


class _VectorCounter:
    def __init__(self) -> None:
        self._rows = self._zero = 0
        self._norm_sum = 0.0
        self._norms = np.zeros(_LAST_BUCKET + 1, np.int64)

    def add(
        self, column: pa.FixedSizeListArray, dim: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Numbers of the rows that are not finite, and are no part of the figures, and of those
        that are all zeros."""
        matrix = np.asarray(column.flatten()).reshape(-1, dim)
        if matrix.dtype == np.float16:
            matrix = matrix.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            squares = np.einsum("ij,ij->i", matrix, matrix)
            buckets = squares.astype(np.float32, copy=False).view(np.uint32) >> _SHIFT
        # Not longer than 2**13.
        filled = np.bincount(buckets)
        bad, zero = _NONE, _NONE
        # Infinite, or so long that its square is.
        if len(filled) > len(self._norms):
            beyond = np.flatnonzero(buckets > _LAST_BUCKET)
            finite = np.isfinite(matrix[beyond]).all(axis=1)
            bad, squares[beyond] = beyond[~finite], 0.0
            self._norms[_LAST_BUCKET] += finite.sum()
            long = matrix[beyond[finite]].astype(np.float64)
            largest = np.abs(long).max(axis=1, initial=0.0)
            self._norm_sum += float(
                (largest * np.linalg.norm(long / largest[:, None], axis=1)).sum()
            )
            filled = filled[: len(self._norms)]
        if len(filled) and filled[0]:
            small = np.flatnonzero(buckets == 0)
            zero = small[~matrix[small].any(axis=1)]
        self._norms[: len(filled)] += filled
        self._rows += len(matrix) - len(bad)
        self._zero += len(zero)
        self._norm_sum += float(np.sqrt(squares).sum(dtype=np.float64))
        if column.null_count and (len(bad) or len(zero)):
            valid = np.flatnonzero(np.asarray(column.is_valid()))
            bad, zero = valid[bad], valid[zero]
        return bad, zero

    def figures(self) -> VectorFigures:
        used = np.flatnonzero(self._norms)
        histogram = dict(zip(used.tolist(), self._norms[used].tolist(), strict=True))
        return VectorFigures(self._rows, self._zero, self._norm_sum, histogram)


def _infinite(column: pa.Array, feature: Feature) -> npt.NDArray[np.int64]:
    """Numbers of the rows with a scalar, or an item of a list, that is not finite."""
    lists = feature.max_items is not None
    values = np.asarray(
        column.flatten() if lists else column.drop_null() if column.null_count else column
    )
    if np.isfinite(values).all():
        return _NONE
    bad = np.flatnonzero(~np.isfinite(values))
    if lists:
        return np.unique(np.asarray(column.value_parent_indices())[bad])
    return np.flatnonzero(np.asarray(column.is_valid()))[bad] if column.null_count else bad


def _valueless(
    rows: pa.RecordBatch, view: FeatureView, nulls: Mapping[str, int]
) -> npt.NDArray[np.int64]:
    """Numbers of the rows of which every feature is null. No model may return a null vector, so
    that where there is a vector feature it decides alone."""
    vector = next((f.name for f in view.features if f.dim is not None), None)
    names = view.feature_names if vector is None else (vector,)
    if not all(name in nulls for name in names):
        return _NONE
    every = np.ones(rows.num_rows, np.bool_)
    for name in names:
        every &= np.asarray(rows.column(name).is_null())
    return np.flatnonzero(every)
