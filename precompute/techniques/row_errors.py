"""Row errors: how far each row of a feature is from the reference's, the limits of that, and what a
sample says of all rows; and whether two computations of a row by the same model, one by the batch
job and one by the fallback, have the same values.

A mean hides what is done to few rows, and a cosine what is done to lengths; so each row has an
error of its own, relative to its size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.feature_view import Feature, FeatureView

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

_END = object()
"""Stands where a list has ended."""

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
    # each depth from the one before: sets of their own take 1.2 s for two lists of 5,000 items
    in_a, in_b, both, total = set[Any](), set[Any](), 0, 0.0
    for depth, pair in enumerate(itertools.zip_longest(a, b, fillvalue=_END), 1):
        for item, own, other in zip(pair, (in_a, in_b), (in_b, in_a), strict=True):
            if item is not _END and item not in own:
                own.add(item)
                both += item in other
        total += both / depth
    return total / max(len(a), len(b))


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


# ---- The same value: integers, texts and truth values are equal or not. Floats are not: kernels
# for batches of another size add in another order, every layer rounds what comes out of it, and
# storing rounds once more. How much that is depends on the precision that computed, and was
# measured (NOISE); what is farther off is another value.


NOISE: Mapping[str, float] = {
    "float64": 2.5e-7,
    "fp32": 5e-6,
    "fp16": 1.5e-3,
    "bf16": 1e-2,
    "int8": 2.5e-2,
    "int8-dynamic": 2.5e-2,
    "int8-weights": 1.2e-2,
    "tf32": 1.5e-3,
    "fp8": 4e-2,
}
"""The relative error (:func:`relative_errors`) that is known between a row computed alone and in
batches of other sizes.

The largest measured over MiniLM (6 layers, 384 numbers), 24 documents alone and among up to 127
others, on AVX512_BF16: 1.1e-6 in fp32 (eager and oneDNN; 5e-7 by ONNX Runtime), 1.2e-3 in fp16,
9.2e-3 in bf16, and in others of 12 to 24 among 72, 2.2e-2 with a scale each row (a last bit of
float32 moves numbers to their next step, layer by layer; 7.4e-3 with one for 32 numbers of it),
2.4e-2 in int8 (static, by OpenVINO), 7.6e-3 and 9.8e-3 with weights alone in 8 and 4 bits. Keys are
a technique's precision, or its first word. tf32's mantissa is fp16's, and fp8's steps are wider
than int8's: both are guesses until a GPU is at hand. What is given is more: in fp32 since scores
may be exponentials of what was measured. float64 is for models of one's own, of which parts may
compute in float32."""
MARGIN = 4
"""Times the noise for models other than the measured one: roundings add up like a random walk, so
it is that of 16 times the layers, 96."""
MOST_APART = 5e-2
"""Limit of the two together: a vector that was not normalised is farther off."""
ROUNDING: Mapping[str, float] = {"float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
"""What storing adds: two numbers, however near, may be rounded apart by a unit in the last
place."""
IN_ORDER = 0.75
"""Least share of the rows clearly above or below a score that must stay so; of another row's score
it is about half."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative errors between two computations of one value: up to ``known`` they are the same; up
    to ``limit``, if the row is not taken for another one; beyond, they are not."""

    known: float
    limit: float


def tolerance(precision: str | None, dtype: str) -> Tolerance:
    """What may lie between two computations of one value.

    A vector that is off by e has a cosine of √(1 - e²) or more to the stored one: 0.9992 in bf16,
    0.999999998 in fp32.

    Args:
        precision: a variant's name (``bf16-onednn``); None for a model of one's own, taken to
            compute in float64 what is stored in float64, and else in float32.
        dtype: what it is stored in.
    """
    noise = noise_of(
        precision if precision is not None else "float64" if dtype == "float64" else "fp32"
    )
    return Tolerance(noise + ROUNDING[dtype], min(MARGIN * noise, MOST_APART) + ROUNDING[dtype])


def noise_of(name: str) -> float:
    """The noise of a technique, by its name, or of a precision alone."""
    return next(
        NOISE[key]
        for key in (name, name.rpartition("-")[0], name.partition("-")[0])
        if key in NOISE
    )


def first_of(differs: Mapping[str, str]) -> str:
    """The end of a message on rows that are not the same values: the first of key → what differs;
    empty of none."""
    return "; the first, {!r}: {}".format(*next(iter(differs.items()))) if differs else ""


def differing(
    stored: pa.Table, computed: pa.Table, view: FeatureView, precision: str | None
) -> dict[int, str]:
    """Rows whose features are not the same values.

    - A vector, or a list of floats, is off by :func:`relative_errors`. One that is off by more than
      is known must not be nearer to what is stored of another row.
    - A score is off relative to itself or to the median of the rows that are not 0, whichever is
      larger: one near 0 has the noise of the terms it is the sum of. Where all are 0, nothing shows
      how large these are, and only 0 is the same. One that is off by more than is known must keep
      its order among the rows.
    - Items in a list beside a list of their scores may change places, or be the last, where their
      scores are the same.
    - All else is equal or not.

    Args:
        stored, computed: the same rows in the same order, tables or record batches, with a column
            for each feature of the view.
        precision: as for :func:`tolerance`.

    Returns:
        row number → what differs, in words; empty when nothing does.

    Raises:
        ValueError: other numbers of rows.
    """
    if stored.num_rows != computed.num_rows:
        raise ValueError(
            f"{stored.num_rows} rows against {computed.num_rows}: there is nothing to compare"
        )
    reasons: dict[int, str] = {}
    for feature in view.features:
        x, y = (table.column(feature.name).to_pylist() for table in (stored, computed))
        scores = _scores_of(feature, view)
        if feature.dtype in ROUNDING:
            off = _floats_off(feature, x, y, tolerance(precision, feature.dtype))
        elif scores is not None:
            limit = tolerance(precision, scores.dtype).limit
            beside = (table.column(scores.name).to_pylist() for table in (stored, computed))
            off = _items_off(x, y, *beside, limit=limit)
        else:
            off = (
                (row, f"is {b!r:.40}, not {a!r:.40}")
                for row, (a, b) in enumerate(zip(x, y, strict=True))
                if a != b
            )
        for row, what in off:
            reasons.setdefault(row, f"{feature.name} {what}")
    return reasons


def largest_error(stored: pa.Table, computed: pa.Table, view: FeatureView) -> float:
    """The largest error of a float that both have, by which :func:`differing` judges; 0 where
    nothing is a float, or all are equal to the bit."""
    largest = 0.0
    for feature in view.features:
        if feature.dtype not in ROUNDING:
            continue
        x, y = (table.column(feature.name).to_pylist() for table in (stored, computed))
        pairs = [
            (a, b)
            for a, b in zip(x, y, strict=True)
            if a is not None and b is not None and np.shape(a) == np.shape(b)
        ]
        largest = max(largest, *_float_errors(feature, pairs, 0.0)[0].tolist(), 0.0)
    return largest


def relative_errors(stored: npt.ArrayLike, computed: npt.ArrayLike) -> _Floats:
    """How far each row of ``computed`` is from the same row of ``stored``, both [rows, dim]:
    float64 [rows], 0 where they are equal.

    |computed - stored| / |stored| in Euclidean lengths, which shows a vector that is turned or
    stretched, or in largest numbers, which shows one wrong number among many; the larger of both.
    What is not finite is infinitely far from all but itself, and all but zeros from zeros.
    """
    x, y = np.asarray(stored, np.float64), np.asarray(computed, np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    others = ~finite & (x != y) & ~(np.isnan(x) & np.isnan(y))
    off, x = np.subtract(y, x, out=np.zeros_like(x), where=finite), np.where(finite, x, 0)
    errors = np.where(others.any(axis=1), np.inf, 0.0)
    for order in (2, np.inf):
        far, size = np.linalg.norm(off, order, axis=1), np.linalg.norm(x, order, axis=1)
        errors = np.maximum(
            errors, np.divide(far, size, out=np.where(far == 0, 0.0, np.inf), where=size > 0)
        )
    return errors


def _floats_off(
    feature: Feature, stored: list[Any], computed: list[Any], allowed: Tolerance
) -> Iterator[tuple[int, str]]:
    rows = []
    for row, (x, y) in enumerate(zip(stored, computed, strict=True)):
        if x is None or y is None:
            if x is not y:
                yield (
                    row,
                    (
                        f"is {'null' if y is None else 'a value'}, not"
                        f" {'null' if x is None else 'a value'}"
                    ),
                )
        elif feature.dim is not None or feature.max_items is not None:
            if len(x) == len(y):
                rows.append(row)
            else:
                yield row, f"has {len(y)} numbers, not {len(x)}"
        else:
            rows.append(row)
    pairs = [(stored[row], computed[row]) for row in rows]
    errors, another = _float_errors(feature, pairs, allowed.known)
    for row, error, taken in zip(rows, errors, another, strict=True):
        if error == np.inf:
            yield row, f"is {computed[row]!r:.40}, not {stored[row]!r:.40}"
        elif error > allowed.limit:
            yield row, f"is off by {error:.2g} of its size, more than {allowed.limit:.2g}"
        elif error > allowed.known and taken:
            yield row, f"is off by {error:.2g} of its size, and stands where another row was"


def _float_errors(
    feature: Feature, pairs: Sequence[tuple[Any, Any]], known: float
) -> tuple[_Floats, npt.NDArray[np.bool_]]:
    """Each row's error, and whether it is taken for another row; of pairs of numbers, or of lists
    of one length."""
    before, now = ([np.asarray(pair[n], np.float64) for pair in pairs] for n in (0, 1))
    if feature.dim is None and feature.max_items is None:
        return _scores_off(np.array(before), np.array(now), known)
    return _vectors_off(before, now)


def _vectors_off(
    stored: Sequence[_Floats], computed: Sequence[_Floats]
) -> tuple[_Floats, npt.NDArray[np.bool_]]:
    """Each row's error, and whether another row's vector is twice as near as its own: a tie of two
    that are alike is none."""
    errors = np.array(
        [relative_errors(a[None], b[None])[0] for a, b in zip(stored, computed, strict=True)]
    )
    another = np.zeros(len(errors), np.bool_)
    for row, now in enumerate(computed):
        if 0 < errors[row] < np.inf:
            far = [np.linalg.norm(now - a) if len(a) == len(now) else np.inf for a in stored]
            another[row] = 2 * min(far) < far[row]
    return errors, another


def _scores_off(
    stored: _Floats, computed: _Floats, known: float
) -> tuple[_Floats, npt.NDArray[np.bool_]]:
    """Each row's error, and whether it changed its place among the rows that are clearly above or
    below it."""
    others = np.abs(stored[np.isfinite(stored) & (stored != 0)])
    # half of each, since the median of two is their sum's half, which may be more than a float has
    usual = 2 * np.median(others / 2) if len(others) else 0
    sizes = np.maximum(np.abs(stored), usual)
    same = (stored == computed) | (np.isnan(stored) & np.isnan(computed))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        errors = np.where(
            same, 0, np.nan_to_num(np.abs(computed - stored) / sizes, nan=np.inf, posinf=np.inf)
        )
        apart, now = stored[:, None] - stored, computed[:, None] - computed
        clear = np.abs(apart) > 2 * known * np.maximum(sizes[:, None], sizes)
        in_order = (clear & (np.sign(apart) == np.sign(now))).sum(axis=1)
    return errors, in_order < IN_ORDER * clear.sum(axis=1)


def _scores_of(items: Feature, view: FeatureView) -> Feature | None:
    """The list of scores beside a list of items: the only list of floats of its length."""
    beside = [
        f
        for f in view.features
        if f.max_items is not None and f.max_items == items.max_items and f.dtype in ROUNDING
    ]
    return beside[0] if len(beside) == 1 and items.dtype not in ROUNDING else None


def _items_off(
    stored: list[Any],
    computed: list[Any],
    scores_stored: list[Any],
    scores_computed: list[Any],
    *,
    limit: float,
) -> Iterator[tuple[int, str]]:
    for row, (x, y, p, q) in enumerate(
        zip(stored, computed, scores_stored, scores_computed, strict=True)
    ):
        if x == y:
            continue
        if not x or not y or not p or not q or not len(x) == len(y) == len(p) == len(q):
            yield row, f"is {y!r:.40}, not {x!r:.40}"
            continue
        allowed = limit * max(abs(score) for score in p)
        before, now = dict(zip(x, p, strict=True)), dict(zip(y, q, strict=True))
        # an item that is in one of the lists only was, in the other, just behind the last
        moved = [
            item
            for item in {*x, *y}
            if not abs(before.get(item, p[-1]) - now.get(item, q[-1])) <= allowed
        ]
        if moved or len(before) != len(now):
            yield row, f"has {len(moved)} of {len(x)} items with other scores"
