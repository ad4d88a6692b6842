"""Feature figures: numbers that say what a feature's values are like, alone and beside the rows of
the same keys before. Gates compare them, the manifest keeps them.

A figure is named ``<feature>.<figure>``. Shares are of the rows that are given; a figure of values
that are not there (of no number, no list) is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.feature_view import Feature, FeatureView
from precompute.store.online.kernels import Packed, hashes
from precompute.store.online.row_values import packed_strings

Figures = dict[str, float]
F8 = npt.NDArray[np.float64]

NUMBER, FLAG, TEXT, LIST, NUMBERS, VECTOR = "number", "flag", "text", "list", "numbers", "vector"
"""Kinds of features: one number, true or false, a label or text, a list of items, a list of floats,
a vector."""

QUANTILES = {
    "p01": 0.01,
    "p05": 0.05,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p95": 0.95,
    "p99": 0.99,
}
MISSING_WORDS = ("", "n/a", "na", "nan", "none", "null", "unknown", "undefined", "-")
"""Texts that stand for no value, in small letters."""
HUGE = 1e15
"""A float beyond is an overflow, and no score."""
LARGEST_FLOAT16 = 65504.0
LARGEST_TOLD = 1e150
"""What a float beyond counts as in quantiles, spread and distances."""
LARGEST_COORDINATE = 1e70
"""The same of a vector's numbers, of whose squares sums are multiplied."""
MOST_ITEMS = 1_000_000
"""Items of lists that are looked at together: what is made of them takes 8 bytes for each, several
times."""
PAIRED_TEXTS = 512
"""Texts whose words are compared with those before."""
LEAST_OVERLAP = 0.1
"""Rank overlap of a list with the one before of its key up to which nothing is left of it."""
LABEL_ROWS = 20
"""Rows of a label before, from which on the share that kept it is a figure."""
RBO_P = 0.9
"""How much less each place of a list counts than the one before (rank-biased overlap: W. Webber, A.
Moffat, J. Zobel, TOIS 2010); of 10 items the first half has 7/10 of the weight."""


def kind_of(feature: Feature) -> str:
    """Which figures a feature has."""
    if feature.dim is not None:
        return VECTOR
    if feature.max_items is not None:
        return NUMBERS if feature.dtype.startswith("float") else LIST
    return {"string": TEXT, "bool": FLAG}.get(feature.dtype, NUMBER)


# ---- rows alone


def figures_of(rows: pa.Table, view: FeatureView) -> Figures:
    """Figures of each feature of some rows; of no rows none, nor of a feature that they lack, or
    have of another type."""
    found: Figures = {}
    for feature in view.features if rows.num_rows else ():
        if not has_feature(rows, feature):
            continue
        column = rows.column(feature.name)
        values = column.drop_null()
        found[f"{feature.name}.null"] = 1 - len(values) / len(column)
        if len(values):
            for name, value in _ALONE[kind_of(feature)](values):
                found[f"{feature.name}.{name}"] = float(value)
    return found


def _of_number(values: pa.ChunkedArray) -> Iterator[tuple[str, float]]:
    numbers = numbers_of(values)
    finite = numbers[np.isfinite(numbers)]
    yield "not_finite", 1 - len(finite) / len(numbers)
    if not len(finite):
        return
    yield "zero", (finite == 0).mean()
    yield "negative", (finite < 0).mean()
    if pa.types.is_floating(values.type):
        # not of integers, such as hashes and times
        over = (np.abs(finite) > HUGE) | (np.abs(finite) == LARGEST_FLOAT16)
        yield "huge", over.mean()
    yield from _common(values)
    yield from _levels(finite)


def _levels(finite: F8) -> Iterator[tuple[str, float]]:
    """Mean, spread and quantiles."""
    finite = _bounded(finite)
    yield "mean", float(finite.mean())
    yield "spread", spread_of(finite)
    yield from zip(QUANTILES, np.quantile(finite, [*QUANTILES.values()]).tolist(), strict=True)


def _bounded(numbers: F8, most: float = LARGEST_TOLD) -> F8:
    """No further than the differences and squares of numbers can be told."""
    return np.clip(numbers, -most, most)


def _of_flag(values: pa.ChunkedArray) -> Iterator[tuple[str, float]]:
    yield "true", (pc.sum(values).as_py() or 0) / len(values)


def _of_text(values: pa.ChunkedArray) -> Iterator[tuple[str, float]]:
    values = values.cast(pa.string())
    lengths = np.asarray(pc.utf8_length(values))
    yield "empty", (lengths == 0).mean()
    yield "length", float(np.median(lengths))
    missing = pc.is_in(pc.utf8_lower(values), pa.array(MISSING_WORDS))
    yield "missing", (pc.sum(missing).as_py() or 0) / len(values)
    yield "prefix", _counts(pc.utf8_slice_codeunits(values, 0, 3)).max() / len(values)
    yield from _common(values)


def _common(values: pa.ChunkedArray) -> Iterator[tuple[str, float]]:
    """The share of the commonest value, and of different ones."""
    counts = _counts(values)
    yield "common", counts.max() / len(values)
    yield "distinct", len(counts) / len(values)


def _counts(values: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """How often each different value is there."""
    return np.asarray(pc.value_counts(values.combine_chunks()).field(1))


def _of_list(values: pa.ChunkedArray) -> Iterator[tuple[str, float]]:
    (values,) = _looked_at(values)
    of_list, items = np.asarray(pc.list_parent_indices(values.combine_chunks())), _codes(values)
    yield from _lists(values, items)
    most = items.max(initial=0) + 1
    each = np.sort(of_list * most + items)
    twice = each[1:][each[1:] == each[:-1]] // most
    yield "doubled", len(np.unique(twice)) / len(values)
    if len(items):
        counts = np.bincount(items)
        yield "coverage", len(counts)
        yield "item", counts.max() / len(items)
        firsts = items[np.flatnonzero(np.diff(of_list, prepend=-1))]
        yield "first", np.bincount(firsts).max() / len(firsts)


def _looked_at(*columns: pa.ChunkedArray) -> list[pa.ChunkedArray]:
    """As many rows of columns of lists as have :data:`MOST_ITEMS` items together, one at least."""
    items = sum(np.asarray(pc.list_value_length(one)).astype(np.int64) for one in columns)
    most = int(np.searchsorted(np.cumsum(items), MOST_ITEMS, "right"))
    return [one.slice(0, max(1, most)) for one in columns]


def _lists(
    values: pa.ChunkedArray, items: npt.NDArray[np.int64] | F8
) -> Iterator[tuple[str, float]]:
    """Figures of lists of whatever, from their flat items of eight bytes each."""
    lengths = np.asarray(pc.list_value_length(values)).astype(np.int64)
    yield "empty", (lengths == 0).mean()
    yield "length", float(lengths.mean())
    yield "common", _times(items, np.append(0, lengths.cumsum())).max() / len(lengths)


def _codes(*values: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """A number for each item of some columns of lists, one after the other: equal ones have the
    same, from 0 on."""
    items = pa.chunked_array([one.combine_chunks().flatten() for one in values])
    return np.asarray(items.combine_chunks().dictionary_encode().indices).astype(np.int64)


def _times(numbers: npt.NDArray[np.generic], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How often each different run of numbers is there, by the hash of its bytes.

    Args:
        numbers: of a row each, or of eight bytes each, all runs one after the other.
        ends: the number's place where the first run begins, and where each ends.
    """
    data = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1)
    return np.unique(hashes(Packed(data, ends * numbers.itemsize)), return_counts=True)[1]


def _of_numbers(values: pa.ChunkedArray) -> Iterator[tuple[str, float]]:
    (values,) = _looked_at(values)
    numbers = numbers_of(pa.chunked_array([values.combine_chunks().flatten()]))
    yield from _lists(values, numbers)
    finite = numbers[np.isfinite(numbers)]
    if len(finite):
        yield "zero", (finite == 0).mean()
        yield from _levels(finite)


def _of_vector(values: pa.ChunkedArray) -> Iterator[tuple[str, float]]:
    vectors = matrix_of(values)
    finite = np.isfinite(vectors).all(axis=1)
    yield "not_finite", 1 - finite.mean()
    vectors = _bounded(vectors[finite], LARGEST_COORDINATE)
    if not len(vectors):
        return
    norms = np.linalg.norm(vectors, axis=1)
    yield "zero", (norms == 0).mean()
    quantiles = np.quantile(norms, [*QUANTILES.values()]).tolist()
    yield from zip((f"norm.{name}" for name in QUANTILES), quantiles, strict=True)
    times = _times(vectors, vectors.shape[1] * np.arange(len(vectors) + 1))
    yield "common", times.max() / len(vectors)
    yield "repeated", 1 - len(times) / len(vectors)
    if len(times) > 2:
        spread = vectors.std(axis=0)
        yield "dead", (spread <= 1e-6 * max(float(spread.max()), 1e-30)).mean()
    unit = vectors[norms > 0] / norms[norms > 0, None]
    if len(unit) > 1:
        n = len(unit)
        # of all pairs of rows, but those of a row with itself
        yield "cosine", (float(np.square(unit.sum(axis=0)).sum()) - n) / (n * (n - 1))


_ALONE = {
    NUMBER: _of_number,
    FLAG: _of_flag,
    TEXT: _of_text,
    LIST: _of_list,
    NUMBERS: _of_numbers,
    VECTOR: _of_vector,
}


# ---- beside the rows of the same keys before


def moves_of(
    now: pa.Table, then: pa.Table, view: FeatureView, changed: float, before: Figures
) -> Figures:
    """How far the rows of some keys moved.

    Args:
        now: rows of keys that both have and whose rows are others.
        then: the rows of the same keys before, row by row; a feature that it lacks, or has of
            another type, has no figures.
        view: of ``now``.
        changed: share of all common keys whose rows are others; the figures are of all.
        before: figures of the rows before: of numbers the spread.
    """
    found: Figures = {}
    for feature in view.features:
        name = feature.name
        if not has_feature(then, feature):
            continue
        here = len(now)
        both = pc.and_(now.column(name).is_valid(), then.column(name).is_valid())
        a, b = (table.column(name).filter(both) for table in (now, then))
        share = changed * (len(a) / here) if here else 0.0
        for figure, value in _MOVED[kind_of(feature)](a, b, share, before.get(f"{name}.spread", 0)):
            found[f"{name}.moved.{figure}"] = float(value)
    return found


def _number_moves(
    now: pa.ChunkedArray, then: pa.ChunkedArray, share: float, spread: float
) -> Iterator[tuple[str, float]]:
    a, b = numbers_of(now), numbers_of(then)
    finite = np.isfinite(a) & np.isfinite(b)
    yield from _distances(a[finite], b[finite], share, spread)


def _distances(a: F8, b: F8, share: float, spread: float) -> Iterator[tuple[str, float]]:
    if not len(a):
        yield from (("quarter", 0.0), ("one", 0.0), ("four", 0.0), ("rank", 1.0))
        return
    a, b = _bounded(a), _bounded(b)
    spread = spread or spread_of(b)
    by = np.abs(a - b)
    with np.errstate(over="ignore"):
        by = np.minimum(by / spread if spread else np.where(by > 0, np.inf, 0.0), LARGEST_TOLD)
    for figure, spreads in (("quarter", 0.25), ("one", 1.0), ("four", 4.0)):
        # not at once: of whole numbers many move by the same, and the spread is another each night
        yield figure, share * np.clip(2 / spreads * by - 1.5, 0, 1).mean()
    correlation = rank_correlation(a, b)
    if correlation is not None:
        yield "rank", 1 - share * (1 - correlation)


def _label_moves(
    now: pa.ChunkedArray, then: pa.ChunkedArray, share: float, _: float
) -> Iterator[tuple[str, float]]:
    if not len(now):
        yield from (("changed", 0.0), ("unseen", 0.0), ("transition", 0.0))
        return
    # by their hashes: as an array of texts each would take four times the letters of the longest
    texts = [chunk.cast(pa.string()) for chunk in (*now.chunks, *then.chunks) if len(chunk)]
    hashed = np.concatenate([hashes(packed_strings(text)) for text in texts])
    labels, codes = np.unique(hashed, return_inverse=True)
    a, b = codes.reshape(2, -1)
    others = a != b
    yield "changed", share * others.mean()
    yield "unseen", share * (~np.isin(a, b)).mean()
    pairs = Counter((a[others] * len(labels) + b[others]).tolist())
    yield "transition", share * max(pairs.values(), default=0) / len(a)
    times = np.bincount(b, minlength=len(labels))
    kept = np.bincount(b[~others], minlength=len(labels))
    frequent = times >= LABEL_ROWS
    if frequent.any():
        least = float((kept[frequent] / times[frequent]).min())
        yield "kept", 1 - share * (1 - least)


def _text_moves(
    now: pa.ChunkedArray, then: pa.ChunkedArray, share: float, _: float
) -> Iterator[tuple[str, float]]:
    yield from _label_moves(now, then, share, _)
    if not len(now):
        yield "tokens", 1.0
        return
    alike = []
    spaced = np.unique(np.linspace(0, len(now) - 1, min(len(now), PAIRED_TEXTS)).astype(np.int64))
    for one, other in zip(
        *(of.take(pa.array(spaced)).to_pylist() for of in (now, then)), strict=True
    ):
        words, before = set(one.split()), set(other.split())
        alike.append(len(words & before) / len(words | before) if words | before else 1.0)
    yield "tokens", 1 - share * (1 - float(np.mean(alike)))


def _list_moves(
    now: pa.ChunkedArray, then: pa.ChunkedArray, share: float, _: float
) -> Iterator[tuple[str, float]]:
    if not len(now):
        yield from (("overlap", 1.0), ("lost", 0.0), ("order", 1.0))
        return
    now, then = _looked_at(now, then)
    pair, here, there = _shared(now, then)
    lengths = [np.asarray(pc.list_value_length(of)) for of in (now, then)]
    overlaps = _rank_overlaps(pair, np.maximum(here, there), np.maximum(*lengths))
    yield "overlap", 1 - share * (1 - float(overlaps.mean()))
    yield "lost", share * (overlaps <= LEAST_OVERLAP).mean()
    n = np.bincount(pair, minlength=len(now))
    pairs = n > 2
    if pairs.any():
        # Spearman's, of ranks among the shared ones, no two of which are equal
        off = _places(pair, here) - _places(pair, there)
        squares = np.bincount(pair, off * off, len(now))[pairs]
        n = n[pairs]
        yield "order", 1 - share * float((6 * squares / (n * (n * n - 1.0))).mean())


def _shared(
    now: pa.ChunkedArray, then: pa.ChunkedArray
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The items that both lists of a pair have: number of the pair, its place here and there."""
    codes, lists, places = _codes(now, then), [], []
    for of in (now, then):
        lengths = np.asarray(pc.list_value_length(of)).astype(np.int64)
        lists.append(np.repeat(np.arange(len(of)), lengths))
        places.append(np.arange(len(lists[-1])) - np.repeat(lengths.cumsum() - lengths, lengths))
    most = codes.max(initial=0) + 1
    of_now, of_then = np.split(np.concatenate(lists) * most + codes, [len(lists[0])])
    # of an item that a list has twice the first place
    (ours, at), (theirs, was) = (np.unique(of, return_index=True) for of in (of_now, of_then))
    both, a, b = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
    return both // most, places[0][at[a]], places[1][was[b]]


def _rank_overlaps(
    pair: npt.NDArray[np.int64], place: npt.NDArray[np.int64], depths: npt.NDArray[np.integer[Any]]
) -> F8:
    """Rank-biased overlap of pairs of lists, 0 to 1 [pairs], by their agreement at each depth up to
    the longer's length (truncated, and scaled so that equal lists have 1); 1 of two empty ones.

    Args:
        pair: of each item that both lists have, the pair's number.
        place: from which depth on both have it, less 1.
        depths: the longer's length of each pair.
    """
    # no power, which CPUs round differently
    weights = np.append(1.0, np.full(int(depths.max(initial=0)), RBO_P)).cumprod()[:-1]
    # what an item adds that both have from the first place on, up to each depth
    adds = np.append(0.0, (weights / np.arange(1, len(weights) + 1)).cumsum())
    total = np.append(0.0, weights.cumsum())[depths]
    found = np.bincount(pair, adds[depths[pair]] - adds[place], len(depths))
    return np.where(depths > 0, found / np.where(depths > 0, total, 1.0), 1.0)


def _places(pair: npt.NDArray[np.int64], place: npt.NDArray[np.int64]) -> F8:
    """The rank of each item among those of its pair, by its place."""
    order = np.lexsort((place, pair))
    found = np.empty(len(pair))
    found[order] = np.arange(len(pair)) - np.searchsorted(pair[order], pair[order])
    return found


def _numbers_moves(
    now: pa.ChunkedArray, then: pa.ChunkedArray, share: float, spread: float
) -> Iterator[tuple[str, float]]:
    """Of lists of floats: of those that are as long as before, place by place."""
    same = pc.equal(pc.list_value_length(now), pc.list_value_length(then))
    a, b = (
        numbers_of(pa.chunked_array([of.filter(same).combine_chunks().flatten()]))
        for of in (now, then)
    )
    finite = np.isfinite(a) & np.isfinite(b)
    yield from _distances(a[finite], b[finite], share, spread)


def _vector_moves(
    now: pa.ChunkedArray, then: pa.ChunkedArray, share: float, _: float
) -> Iterator[tuple[str, float]]:
    if not len(now):
        yield from (("cosine05", 1.0), ("cosine50", 1.0), ("turned", 0.0))
        return
    a, b = matrix_of(now), matrix_of(then)
    finite = np.isfinite(a).all(axis=1) & np.isfinite(b).all(axis=1)
    a, b = (_bounded(of[finite], LARGEST_COORDINATE) for of in (a, b))
    if not len(a):
        return
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    # of two zero vectors the one is as the other
    same = np.where((a == b).all(axis=1), 1.0, 0.0)
    cosines = np.where(lengths > 0, (a * b).sum(axis=1) / np.where(lengths > 0, lengths, 1), same)
    order = np.sort(cosines)
    for figure, at in (("cosine05", 0.05), ("cosine50", 0.5)):
        # of all common keys: those whose row is the same have 1
        place = int(at / share * len(order)) if share > 0 else len(order)
        cosine = float(order[place]) if place < len(order) else 1.0
        yield figure, cosine
    # by the angle, since the cosine of a small one says next to nothing
    yield "turned", math.acos(min(1.0, max(-1.0, cosine))) / (math.pi / 2)
    if len(a) >= LABEL_ROWS:
        x, y = a - a.mean(axis=0), b - b.mean(axis=0)
        scale = np.sqrt(np.square(x).sum(axis=0) * np.square(y).sum(axis=0))
        spread = scale > 0
        if spread.any():
            least = float(((x * y).sum(axis=0)[spread] / scale[spread]).min())
            yield "dimension", 1 - share * (1 - least)


_MOVED = {
    NUMBER: _number_moves,
    FLAG: _label_moves,
    TEXT: _text_moves,
    LIST: _list_moves,
    NUMBERS: _numbers_moves,
    VECTOR: _vector_moves,
}


# ---- arithmetic


def spread_of(numbers: F8) -> float:
    """How far numbers lie from each other, robust against few outliers: their standard deviation
    with what is beyond the 1st or 99th percentile, and the four farthest at each end, moved to what
    is next to them; else of all. A distance of two percentiles would jump where the share of a
    value crosses one."""
    few = min(0.25, max(0.01, 4 / max(1, len(numbers) - 1)))
    low, high = np.quantile(numbers, [few, 1 - few])
    return float(np.clip(numbers, low, high).std() or numbers.std())


def rank_correlation(a: F8, b: F8) -> float | None:
    """Spearman's, equal values sharing their ranks; None where the second says nothing, being all
    the same."""
    if len(a) < 3 or len(np.unique(b)) < 3:
        return None
    x, y = (_ranks(values) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    # no dot product, which CPUs sum up in another order
    scale = float(np.sqrt(np.square(x).sum() * np.square(y).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def _ranks(values: F8) -> F8:
    _, where, times = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(times)
    return (ends - (times - 1) / 2)[where.reshape(-1)]


def has_feature(rows: pa.Table, feature: Feature) -> bool:
    """Whether rows have a feature, of its type."""
    return feature.name in rows.column_names and (
        rows.schema.field(feature.name).type.equals(feature.arrow_type)
    )


def has_values(rows: pa.Table, view: FeatureView) -> pa.ChunkedArray:
    """Which rows have a value of any feature, bool [rows]."""
    found = rows.column(view.features[0].name).is_valid()
    for feature in view.features[1:]:
        found = pc.or_(found, rows.column(feature.name).is_valid())
    return found


def unit_mean(column: pa.ChunkedArray) -> F8 | None:
    """The mean of vectors, each of length 1; None without any."""
    vectors = matrix_of(column.drop_null())
    vectors = _bounded(vectors[np.isfinite(vectors).all(axis=1)], LARGEST_COORDINATE)
    norms = np.linalg.norm(vectors, axis=1)
    kept = norms > 0
    mean: F8 | None = (vectors[kept] / norms[kept, None]).mean(axis=0) if kept.any() else None
    return mean


def numbers_of(values: pa.ChunkedArray) -> F8:
    """As float64, no zero of which is negative: equal numbers have equal bytes."""
    return np.asarray(values.combine_chunks()).astype(np.float64) + 0.0


def matrix_of(column: pa.ChunkedArray) -> F8:
    """Vectors without nulls as float64 [rows, dim], no zero of which is negative."""
    flat = pa.chunked_array([column.combine_chunks().flatten()])
    return numbers_of(flat).reshape(-1, column.type.list_size)
