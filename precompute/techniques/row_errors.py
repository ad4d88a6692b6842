"""Row errors: how far each row of a feature is from the reference's, the limits of that, and what a
sample says of all rows.

A mean hides what is done to few rows, and a cosine what is done to lengths; so each row has an
error of its own, relative to its size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.feature_view import Feature

MOST = 1e6
"""The error of a row that has no value where the reference has one, or one that is not finite: JSON
has no infinity."""
LEAST_SIZE = 0.01
"""Share of the median length: a vector that is shorter has the noise of the terms it is the sum of,
and is measured by this length."""
CONFIDENCE = 0.95
"""Confidence of a statement about all rows, one-sided."""
SHARE = 0.001
"""Share of the rows of floats that may be beyond their bound."""
WORST = 5
"""Times the median's limit that any row of floats may be off, 0.22 for a cosine of 0.999. The worst
of 1,500 docstrings by MiniLM is off by 0.013 in bfloat16, of 20,000 rows by MLPs of two and four
layers by 0.008 (vectors) and 0.063 (scores behind a ReLU)."""
DISORDERED = 0.5
"""Error beyond which a list or a label counts: half of the list, or another label."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What rows' errors may be: the ``median``; the ``share`` of rows beyond ``bound``; the
    ``worst`` of any row seen."""

    median: float
    bound: float
    share: float
    worst: float


@dataclass(frozen=True, slots=True)
class Limits:
    """A view's limits; without arguments those of a view that names none.

    Args:
        cosine: least mean cosine of a vector, and least rank correlation of a score.
        recall_at_10: least recall of a vector's neighbours, and least overlap of a list or of
            values that are equal or not.
        rows: what is written of :class:`RowLimits`, by its name; the rest goes by the feature's
            type.
        features: the same of one feature.
    """

    cosine: float = 0.999
    recall_at_10: float = 0.985
    rows: Mapping[str, float] = field(default_factory=dict)
    features: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, feature: Feature) -> RowLimits:
        """A feature's. Of floats they go by the cosine: two vectors of one length and this cosine
        are √(2 - 2 cosine) apart, 0.045 for 0.999."""
        own = dict(self.features.get(feature.name, {}))
        if not is_measured(feature):
            kind = {
                "median": DISORDERED,
                "bound": DISORDERED,
                "share": 1 - self.recall_at_10,
                "worst": 1.0,
            }
            return RowLimits(**(kind | own))
        size = math.sqrt(2 - 2 * self.cosine)
        kind = {"median": size, "bound": 2 * size, "share": SHARE, "worst": WORST * size}
        return RowLimits(**(kind | dict(self.rows) | own))


@dataclass(frozen=True, slots=True)
class RowFigures:
    """Figures of the errors of ``rows`` rows drawn by chance, ``beyond`` of them beyond the bound;
    ``worst`` of these and of others that were seen."""

    rows: int
    median: float
    beyond: int
    worst: float


def row_figures(errors: _Floats, limits: RowLimits, ends: int = 0) -> RowFigures:
    """The figures of errors, float64 [rows], the first ``ends`` of which were not drawn by chance;
    at least one was."""
    drawn = errors[ends:]
    return RowFigures(
        len(drawn), float(np.median(drawn)), int((drawn > limits.bound).sum()), float(errors.max())
    )


def is_measured(feature: Feature) -> bool:
    """Whether its values have sizes: else they are equal or not."""
    return feature.dim is not None or feature.dtype.startswith("float")


def row_errors(feature: Feature, reference: pa.Array, other: pa.Array, ends: int = 0) -> _Floats:
    """How far each row of ``other`` is from ``reference``, float64 [rows], 0 where they are equal
    and at most :data:`MOST`. The first ``ends`` rows, which were not drawn by chance, are no part
    of a median or a spread.

    - Vectors and lists of floats: |x - y| / |x|, the length of the difference in the reference's;
      that of one that is nearly 0 is :data:`LEAST_SIZE` of the median. Where a list is shorter it
      goes on with zeros.
    - Scores: |x - y| in the feature's spread, the distance of its quartiles, or in the score's own
      distance from the median, whichever is larger: a probability near 0 has a large relative error
      that nobody sees, and temperatures in Kelvin a small one that is all they tell.
    - Lists of anything else: 1 - their overlap at every depth, a mean, so that the first items
      count most (Webber et al. 2010 with p = 1).
    - All else: 0 or 1.
    """
    if feature.dim is not None:
        a, b = (
            np.asarray(column.flatten(), np.float64).reshape(-1, feature.dim)
            for column in (reference, other)
        )
        return _vector_errors(a, b, ends)
    if feature.max_items is not None and is_measured(feature):
        a, b = _padded(reference.to_pylist(), other.to_pylist())
        return _vector_errors(a, b, ends)
    if is_measured(feature):
        a, b = (
            np.asarray(pc.fill_null(column.cast(pa.float64()), np.nan))
            for column in (reference, other)
        )
        return _score_errors(a, b, ends)
    pairs = zip(reference.to_pylist(), other.to_pylist(), strict=True)
    if feature.max_items is not None:
        return np.array([1 - ordered_overlap(x or (), y or ()) for x, y in pairs], np.float64)
    return np.array([float(x != y) for x, y in pairs], np.float64)


def ordered_overlap(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Mean over the depths d of two lists of the share of the first d items that both have, from 0
    to 1; 1 of two empty ones."""
    if a == b:
        return 1.0
    depth = max(len(a), len(b))
    return sum(len({*a[:d]} & {*b[:d]}) / d for d in range(1, depth + 1)) / depth


def share_between(seen: int, rows: int) -> tuple[float, float]:
    """Bounds of a share of which ``seen`` of ``rows`` rows drawn by chance are, each of
    :data:`CONFIDENCE` (Clopper and Pearson 1934): where none is seen the upper is about 3 /
    rows."""
    lower = 0.0 if seen == 0 else _share_at(seen - 1, rows, math.log(CONFIDENCE))
    upper = 1.0 if seen == rows else _share_at(seen, rows, math.log(1 - CONFIDENCE))
    return lower, upper


def _share_at(seen: int, rows: int, level: float) -> float:
    """The share at which the log of the chance of ``seen`` or fewer of ``rows`` is ``level``; it
    falls as the share grows."""
    counts = np.arange(seen + 1)
    ways = np.array(
        [
            math.lgamma(rows + 1) - math.lgamma(k + 1) - math.lgamma(rows - k + 1)
            for k in counts.tolist()
        ]
    )
    low, high = 0.0, 1.0
    for _ in range(50):
        share = (low + high) / 2
        terms = ways + counts * math.log(share) + (rows - counts) * math.log1p(-share)
        likely = terms.max() + np.log(np.exp(terms - terms.max()).sum()) > level
        low, high = (share, high) if likely else (low, share)
    return (low + high) / 2


def _vector_errors(a: _Floats, b: _Floats, ends: int) -> _Floats:
    same = ((a == b) | (np.isnan(a) & np.isnan(b))).all(axis=1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        sizes, off = np.linalg.norm(a, axis=1), np.linalg.norm(a - b, axis=1)
        some = sizes[ends:][np.isfinite(sizes[ends:]) & (sizes[ends:] > 0)]
        return _errors(
            off, np.maximum(sizes, LEAST_SIZE * np.median(some)) if len(some) else sizes, same
        )


def _score_errors(a: _Floats, b: _Floats, ends: int) -> _Floats:
    same, finite = (a == b) | (np.isnan(a) & np.isnan(b)), a[ends:][np.isfinite(a[ends:])]
    if not len(finite):
        return _errors(np.full(len(a), np.inf), a, same)
    low, middle, high = np.quantile(finite, [0.25, 0.5, 0.75])
    # most of them one value; or all
    spread = high - low or finite.std() or abs(middle)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        return _errors(np.abs(a - b), np.maximum(np.abs(a - middle), spread), same)


def _errors(off: _Floats, sizes: _Floats, same: npt.NDArray[np.bool_]) -> _Floats:
    return np.where(same, 0.0, np.minimum(np.nan_to_num(off / sizes, nan=MOST, posinf=MOST), MOST))


def _padded(a: Sequence[Any], b: Sequence[Any]) -> tuple[_Floats, _Floats]:
    """Lists of floats as two matrices of one width, with zeros behind."""
    width = max((len(values) for values in itertools.chain(a, b) if values), default=0)
    wide = (
        np.array([[*(row or ()), *[0.0] * (width - len(row or ()))] for row in rows], np.float64)
        for rows in (a, b)
    )
    x, y = (matrix.reshape(len(a), width) for matrix in wide)
    return x, y
