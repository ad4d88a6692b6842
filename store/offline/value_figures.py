"""Value figures: what is counted of a feature that is no vector, over all rows, by its type. They add up, and rows that left can be taken off.

Numbers, and the lengths of texts and lists, are counted in buckets of their first bits, as sketches with a relative error have them (DDSketch: C. Masson, J. E. Rim,
H. K. Lee, VLDB 2019): merged and taken off exactly, where a KLL or HLL sketch can only grow. The commonest values are counted exactly up to
:data:`MOST_DISTINCT` of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.feature_view import Feature
from precompute.store.record import Record, field

SHIFT = 17
"""Bits of a float32 that a bucket does not look at: 64 buckets to each power of two, so that a quantile is within 0.8 %."""
MOST_DISTINCT = 65_536
"""Values counted one by one; others are counted together."""
KEPT_VALUES = 64
"""Of the commonest values, in the manifest."""
SAMPLED_VALUES = 1024
"""Of floats that are counted together, whose commonest are looked for: to sort all of them took three times as long as all else here."""
SHOWN_LETTERS = 60

I8 = npt.NDArray[np.int64]


class ValueFigures(Record, frozen=True):
    """Of one feature: ``rows`` that have a value, not null, of which ``empty`` are an empty text or list, ``not_finite`` NaN or infinite, ``zero`` zero; ``total``
    and ``squares`` sum up the finite numbers and their squares. ``items`` are those of all lists.

    ``buckets``: bucket → numbers, of scalars; ``lengths``: bucket → rows, of texts (letters) and lists (items). ``common``: value, as text → times, of the
    :data:`KEPT_VALUES` commonest of ``looked_at`` values or items; ``distinct`` how many different ones there are, of more than :data:`MOST_DISTINCT` at least so many.
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
        """Of the finite numbers; 0 without any."""
        return self.total / self.numbers if self.buckets else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation of the finite numbers; 0 without any."""
        return float(np.sqrt(max(0.0, self.squares / self.numbers - self.mean**2))) if self.buckets else 0.0

    @property
    def common_share(self) -> float:
        """Share of the commonest value among all; 0 without any."""
        return max(self.common.values(), default=0) / self.looked_at if self.looked_at else 0.0

    def with_others(self, other: ValueFigures, sign: int, times: float) -> ValueFigures:
        """With ``times`` as much as ``other`` has added (``sign`` 1) or taken off (-1)."""

        def count(a: int, b: int) -> int:
            return max(0, a + sign * round(b * times))

        def counts(a: Mapping[Any, int], b: Mapping[Any, int]) -> dict[Any, int]:
            sums = {name: count(a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys((*a, *b))}
            return {name: n for name, n in sums.items() if n}

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
        """The numbers that these shares of all do not exceed, each within 0.8 %; zeros without any."""
        return quantiles(self.buckets, shares)


def quantiles(buckets: Mapping[int, int], shares: Sequence[float]) -> list[float]:
    """What these shares of the values in the buckets do not exceed, each within 0.8 %; zeros of none."""
    order = np.array(sorted(buckets), np.int64)
    if not len(order):
        return [0.0] * len(shares)
    filled = np.cumsum([buckets[bucket] for bucket in order.tolist()])
    places = np.searchsorted(filled, np.asarray(shares) * filled[-1]).clip(max=len(order) - 1)
    return [_middle(int(bucket)) for bucket in order[places]]


def distance(a: Mapping[int, int], b: Mapping[int, int]) -> float:
    """The Kolmogorov–Smirnov distance of two sets of values by their buckets, 0 to 1: the largest difference of the shares below any value. 0 where either is empty."""
    if not a or not b:
        return 0.0
    order = sorted({*a, *b})
    shares = [np.cumsum([of.get(bucket, 0) for bucket in order]) / sum(of.values()) for of in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def commonest(counts: Mapping[str, int]) -> dict[str, int]:
    """The :data:`KEPT_VALUES` of them that are counted most often."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return dict(ranked[:KEPT_VALUES])


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
            self._add_numbers(np.asarray(values.cast(pa.int8()) if self._feature.dtype == "bool" else values))
            self._count_values(values)

    def _add_numbers(self, numbers: npt.NDArray[Any]) -> None:
        numbers = numbers.astype(np.float64)
        # a sum that is finite tells that all are, at a fifth of the time of looking at each
        total = float(numbers.sum())
        if not np.isfinite(total):
            finite = np.isfinite(numbers)
            self._not_finite += int((~finite).sum())
            numbers = numbers[finite]
            total = float(numbers.sum())
        self._zero += int((numbers == 0).sum())
        with np.errstate(over="ignore"):
            self._total += total
            # not @, for which BLAS takes threads of its own, which wait for more on both cores: 2 s of CPU for 10⁷ rows
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
        for value, times in zip(found.field(0).to_pylist(), found.field(1).to_pylist(), strict=True):
            if value in known:
                known[value] += times
            elif not full:
                known[value] = times

    def figures(self) -> ValueFigures:
        """Of all rows so far."""
        if self._sampled:
            # once, and not with each window: dictionaries took most of what counting takes
            self._count_distinct(pa.array(np.concatenate(self._sampled)))
            self._sampled = []
        ranked = heapq.nlargest(KEPT_VALUES, self._common.items(), key=lambda item: item[1])
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
    """How many of the numbers, all finite, are in each bucket by the first bits of a float32; what is beyond one is in the last."""
    with np.errstate(over="ignore", under="ignore"):
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return np.bincount(bits >> SHIFT, minlength=1 << (32 - SHIFT))


def _filled(counts: I8) -> dict[int, int]:
    """Bucket → count, where there is any. Of negative numbers buckets are negative, so that they stand in the order of their numbers."""
    used = np.flatnonzero(counts)
    half = 1 << (31 - SHIFT)
    order = np.where(used < half, used, half - 1 - used)
    return dict(zip(order.tolist(), counts[used].tolist(), strict=True))


def _middle(bucket: int) -> float:
    """The number in the middle of a bucket."""
    size = bucket if bucket >= 0 else -1 - bucket
    if size == 0:
        return 0.0
    low, high = (np.array([size << SHIFT, min(size + 1, 0x7F800000 >> SHIFT) << SHIFT], np.uint32).view(np.float32)).astype(
        np.float64
    )
    middle = low if not np.isfinite(high) else (low + high) / 2
    return float(middle if bucket >= 0 else -middle)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}…"
