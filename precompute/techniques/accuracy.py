"""Accuracy: how far the features of some rows, computed one way, are from the same computed another
way.

Cosine alone hides what matters to a search: 8-bit vectors with a mean cosine of 0.993 still lost an
eighth of their neighbours (MiniLM, 22,000 documents). So vectors are judged by their neighbours
too, and every row by its own error.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.feature_view import Feature, FeatureView
from precompute.techniques.row_errors import (
    Limits,
    RowFigures,
    RowLimits,
    is_measured,
    row_errors,
    row_figures,
    share_between,
)

NEIGHBOURS = 10
MIN_ROWS = 12
"""With fewer rows nearly every row is among the nearest."""
BLOCK_ROWS = 1024
"""Rows whose similarities to all others are in memory at once."""
SURE = 3.0
"""Standard errors between a mean of few rows and what that of all is hardly below: in one of 740,
were it normal."""
EASIER = 0.002
"""How much higher recall@10 is among 128 rows than among 512, where it is near its limits. Of 1,536
docstrings by MiniLM, means of 40 draws each: 0.9924 and 0.9922 (bf16-onednn), 0.9959 and 0.9953
(bf16-encoder), 0.9800 and 0.9781 (int8-weights)."""
DEFAULT = Limits()
TIE = 1e-6
"""Similarities this close, relative to the largest, are one: neighbours of equal texts may come in
any order."""


@dataclass(frozen=True, slots=True)
class FeatureAccuracy:
    """One feature's figures; those that do not apply to its kind, or cannot be known from these
    rows, are None.

    Vectors have ``mean_cosine``, ``min_cosine`` and ``recall_at_10``; scalar floats
    ``rank_correlation`` and ``max_abs_error``; lists of anything but floats ``overlap``, and other
    scalars ``overlap`` alone, the share of rows that are equal. The others have what their rows'
    errors (:func:`precompute.techniques.row_errors.row_errors`) come to: ``median_error``,
    ``beyond``, how many are beyond their bound, and ``worst_error``.
    """

    mean_cosine: float | None = None
    min_cosine: float | None = None
    recall_at_10: float | None = None
    rank_correlation: float | None = None
    max_abs_error: float | None = None
    overlap: float | None = None
    median_error: float | None = None
    beyond: int | None = None
    worst_error: float | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """A feature's figure, its limit, and how far it is within: less than 0 when it is beyond."""

    figure: str
    measured: float
    limit: float
    room: float

    @property
    def shortfall(self) -> str:
        """Why it does not pass, in words."""
        return (
            f"{self.figure} {self.measured:.5g} is"
            f" {'below' if self.measured < self.limit else 'above'} {self.limit:.4g}"
        )


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Figures of every feature of a view over ``rows`` random rows."""

    rows: int
    features: dict[str, FeatureAccuracy]

    def to_json(self) -> dict[str, Any]:
        """``{"rows": n, "features": {name: {figure: value}}}``, without the figures that are
        None."""
        figures = {
            name: {k: v for k, v in asdict(f).items() if v is not None}
            for name, f in self.features.items()
        }
        return {"rows": self.rows, "features": figures}

    def judged(self, limits: Limits, view: FeatureView) -> list[Judged]:
        """The figures that have a limit, with it."""
        judged = []
        for feature in view.features:
            name, f, of_rows = feature.name, self.features[feature.name], limits.of(feature)
            overlap = limits.recall_at_10 if feature.max_items is not None else 1 - of_rows.share
            figures = (
                ("mean cosine", f.mean_cosine, limits.cosine),
                ("recall@10", f.recall_at_10, limits.recall_at_10),
                ("rank correlation", f.rank_correlation, limits.cosine),
                ("overlap", f.overlap, overlap),
            )
            judged += [
                Judged(f"{name}: {what}", value, limit, value - limit)
                for what, value, limit in figures
                if value is not None
            ]
            if f.median_error is not None and f.beyond is not None and f.worst_error is not None:
                rows = RowFigures(self.rows, f.median_error, f.beyond, f.worst_error)
                judged += judged_rows(name, rows, of_rows)
        return judged


def judged_rows(name: str, figures: RowFigures, limits: RowLimits) -> list[Judged]:
    """A feature's row errors with their limits. Of the share beyond the bound the lower bound
    decides (:func:`share_between`): one row of few is no evidence of many."""
    share, (least_share, _) = (
        figures.beyond / figures.rows,
        share_between(figures.beyond, figures.rows),
    )
    # shares are small numbers: as far within as the whole of the limit where none is seen
    room = limits.share - least_share if least_share > limits.share else 1.0
    return [
        Judged(
            f"{name}: median row error",
            figures.median,
            limits.median,
            limits.median - figures.median,
        ),
        Judged(
            f"{name}: share of rows off by more than {limits.bound:.3g}:", share, limits.share, room
        ),
        Judged(
            f"{name}: worst row error", figures.worst, limits.worst, limits.worst - figures.worst
        ),
    ]


def compare(
    reference: pa.RecordBatch,
    other: pa.RecordBatch,
    view: FeatureView,
    limits: Limits = DEFAULT,
    ends: int = 0,
) -> Accuracy:
    """Figures of ``other`` against ``reference``: the features of a view, row by row of the same
    entities.

    Args:
        limits: the view's bounds of row errors.
        ends: how many of the rows, the first, were not drawn by chance: they count for the least
            cosine and the worst error alone.

    Raises:
        ValueError: the batches have different numbers of rows, or none that was drawn.
    """
    if reference.num_rows != other.num_rows or reference.num_rows <= ends:
        raise ValueError(
            f"{reference.num_rows} rows against {other.num_rows}: there is nothing to compare"
        )
    figures = {
        f.name: _figures(f, reference.column(f.name), other.column(f.name), view, limits, ends)
        for f in view.features
    }
    return Accuracy(reference.num_rows - ends, figures)


def least(
    reference: pa.RecordBatch,
    other: pa.RecordBatch,
    view: FeatureView,
    limits: Limits,
    ends: int = 0,
) -> Accuracy | None:
    """Lower bounds of the figures of more rows like these: the means less :data:`SURE` standard
    errors, and recall less what it is higher by among fewer rows (:data:`EASIER`). The least cosine
    and the row errors are those of these rows. Arguments as for :func:`compare`.

    Returns:
        None where other features than vectors are to be compared, or rows are few: their figures
            have no such bound.
    """
    rows = reference.num_rows - ends
    if rows < MIN_ROWS or any(feature.dim is None for feature in view.features):
        return None
    found, figures = compare(reference, other, view, limits, ends), {}
    for feature in view.features:
        assert feature.dim is not None
        a, b = (
            _matrix(table.column(feature.name), feature.dim)[ends:] for table in (reference, other)
        )
        cosines, recalls = row_cosines(a, b), neighbour_recalls(a, b, metric_of(feature, view))
        low = [
            float(values.mean() - SURE * values.std(ddof=1) / math.sqrt(rows))
            for values in (cosines, recalls)
        ]
        figures[feature.name] = replace(
            found.features[feature.name], mean_cosine=low[0], recall_at_10=low[1] - EASIER
        )
    return Accuracy(rows, figures)


def metric_of(feature: Feature, view: FeatureView) -> str:
    """The metric that a vector is searched by: its index's, or else the cosine."""
    return (
        view.index.metric if view.index is not None and view.index.on == feature.name else "cosine"
    )


def _figures(
    feature: Feature,
    reference: pa.Array,
    other: pa.Array,
    view: FeatureView,
    limits: Limits,
    ends: int,
) -> FeatureAccuracy:
    rows = row_figures(row_errors(feature, reference, other, ends), limits.of(feature), ends)
    found = FeatureAccuracy(median_error=rows.median, beyond=rows.beyond, worst_error=rows.worst)
    if feature.dim is not None:
        a, b = (_matrix(column, feature.dim) for column in (reference, other))
        cosines = row_cosines(a, b)
        recall = (
            neighbour_recall(a[ends:], b[ends:], metric_of(feature, view))
            if len(a) - ends >= MIN_ROWS
            else None
        )
        return replace(
            found,
            mean_cosine=float(cosines[ends:].mean()),
            min_cosine=float(cosines.min()),
            recall_at_10=recall,
        )
    reference, other = reference.slice(ends), other.slice(ends)
    if feature.max_items is not None:
        return (
            found
            if is_measured(feature)
            else replace(found, overlap=mean_overlap(reference, other))
        )
    if is_measured(feature):
        a, b = (_scalars(column) for column in (reference, other))
        both = np.isfinite(a) & np.isfinite(b)
        error = float(np.abs(a[both] - b[both]).max()) if both.any() else None
        return replace(found, rank_correlation=rank_correlation(a, b), max_abs_error=error)
    equal = [x == y for x, y in zip(reference.to_pylist(), other.to_pylist(), strict=True)]
    # of rows that are equal or not there is no more to say
    return FeatureAccuracy(overlap=sum(equal) / len(equal))


def row_cosines(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Cosine of each row of ``a`` with the same row of ``b``, both [rows, dim]: float64 [rows].

    Two zero vectors are equal, so 1; a zero vector against another has no direction, and one that
    is not finite no value: 0.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        dots = np.einsum("ij,ij->i", a, b)
        cosines = dots / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    cosines = np.where(np.isfinite(cosines), np.clip(cosines, -1, 1), 0)
    return np.where(~a.any(axis=1) & ~b.any(axis=1), 1.0, cosines)


def neighbour_recall(
    a: npt.NDArray[Any], b: npt.NDArray[Any], metric: str = "cosine", k: int = NEIGHBOURS
) -> float:
    """Mean of :func:`neighbour_recalls`."""
    return float(neighbour_recalls(a, b, metric, k).mean())


def neighbour_recalls(
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    metric: str = "cosine",
    k: int = NEIGHBOURS,
    *,
    into: bool = False,
    queries: int | None = None,
) -> npt.NDArray[np.float64]:
    """Recall@k of neighbours, float64 [rows]: each row's ``k`` nearest other rows by ``b`` that are
    among its nearest by ``a``, both [rows, dim].

    A neighbour counts where it is as near by ``a`` as the k-th one (ann-benchmarks' recall,
    Aumüller et al. 2020), so equal rows, whose order is chance, cost nothing.

    Args:
        a: the reference.
        b: what is judged; a row that is not finite is no row's neighbour.
        metric: ``cosine``, ``l2`` or ``dot``.
        k: fewer than the rows.
        into: the neighbours by ``b`` are looked for among the rows of ``a``, as in an index of the
            reference that is searched by what is judged.
        queries: how many rows, the first, are searched by; by default all.
    """
    a, b = _comparable(a, metric), _comparable(b, metric)
    recalls = np.empty(len(b) if queries is None else min(queries, len(b)))
    for start in range(0, len(recalls), BLOCK_ROWS):
        rows = np.arange(start, min(start + BLOCK_ROWS, len(recalls)))
        by_a = _similarities(a[rows], a, metric)
        by_b = _similarities(b[rows], a if into else b, metric)
        # before the row itself is left out
        scale = np.where(np.isfinite(by_a), np.abs(by_a), 0).max(axis=1)
        for similarities in (by_a, by_b):
            similarities[np.arange(len(rows)), rows] = -np.inf
        kth = np.partition(by_a, -k, axis=1)[:, -k]
        chosen = np.argpartition(by_b, -k, axis=1)[:, -k:]
        near = np.take_along_axis(by_a, chosen, axis=1) >= (kth - TIE * scale)[:, None]
        recalls[rows] = (near & np.isfinite(np.take_along_axis(by_b, chosen, axis=1))).sum(
            axis=1
        ) / k
    return recalls


def rank_correlation(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float | None:
    """Spearman's rank correlation of two [rows]: Pearson's of their ranks, ties having the mean of
    theirs (Spearman 1904; Kendall 1945 for ties). What is not finite ranks lowest.

    None where all of ``a`` is one value, so that there is no order to keep; 0 where only all of
    ``b`` is.
    """
    x, y = (_ranks(np.where(np.isfinite(v), v, -np.inf)) for v in (a, b))
    x, y = x - x.mean(), y - y.mean()
    if not x.any():
        return None
    if not y.any():
        return 0.0
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1, 1))


def mean_overlap(a: pa.Array, b: pa.Array) -> float:
    """Mean over rows of |A ∩ B| / max(|A|, |B|) for lists A and B, null and empty ones being
    equal."""
    shares = []
    for x, y in zip(a.to_pylist(), b.to_pylist(), strict=True):
        left, right = set(x or ()), set(y or ())
        shares.append(len(left & right) / max(len(left), len(right)) if left or right else 1.0)
    return sum(shares) / len(shares)


def _matrix(column: pa.Array, dim: int) -> npt.NDArray[Any]:
    return np.asarray(column.flatten()).reshape(-1, dim)


def _scalars(column: pa.Array) -> npt.NDArray[np.float64]:
    return np.asarray(pc.fill_null(column.cast(pa.float64()), np.nan))


def _ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: npt.NDArray[np.float64] = (last - (counts - 1) / 2)[place]
    return ranks


def _comparable(values: npt.NDArray[Any], metric: str) -> npt.NDArray[np.float32]:
    vectors = values.astype(np.float32)
    if metric == "cosine":
        with np.errstate(invalid="ignore", over="ignore"):
            vectors = vectors / np.maximum(
                np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny
            )
    return vectors


def _similarities(
    queries: npt.NDArray[np.float32], vectors: npt.NDArray[np.float32], metric: str
) -> npt.NDArray[np.float32]:
    """[queries, vectors]: larger is nearer; -inf where it is not finite. By l2, −½|x − y|² + ½|x|²,
    which orders a row's neighbours alike."""
    with np.errstate(invalid="ignore", over="ignore"):
        products: npt.NDArray[np.float32] = queries @ vectors.T
        if metric == "l2":
            products -= np.einsum("ij,ij->i", vectors, vectors) / 2
    products[~np.isfinite(products)] = -np.inf
    return products
