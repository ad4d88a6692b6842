"""Accuracy: figures known by hand, and what must hold for any features."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.precision.accuracy import (
    EASIER,
    Accuracy,
    FeatureAccuracy,
    compare,
    least,
    mean_overlap,
    neighbour_recall,
    neighbour_recalls,
    rank_correlation,
    row_cosines,
)
from store.feature_view import Feature, FeatureView, IndexSpec

VIEW = FeatureView(
    name="docs",
    entity=("id",),
    features=(
        Feature("vector", "float32", dim=2),
        Feature("score", "float32"),
        Feature("top", "int64", max_items=3),
        Feature("label", "string"),
        Feature("weights", "float32", max_items=3),
    ),
    ttl_s=60,
    stale_for_s=0,
)


def batch(
    vectors: list[list[float]], scores: list[Any], tops: list[Any], labels: list[Any], weights: list[Any] | None = None
) -> pa.RecordBatch:
    columns = {"vector": vectors, "score": scores, "top": tops, "label": labels, "weights": weights or [[]] * len(labels)}
    return pa.RecordBatch.from_pydict(columns, schema=VIEW.feature_schema())


def vectors(values: npt.NDArray[np.float32], view: FeatureView) -> pa.RecordBatch:
    flat = pa.array(values.reshape(-1))
    return pa.record_batch([pa.FixedSizeListArray.from_arrays(flat, values.shape[1])], schema=view.feature_schema())


def random(rows: int, dim: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, dim), np.float32)


def test_every_kind_of_feature_by_hand() -> None:
    reference = batch([[1, 0], [0, 2], [3, 4]], [1.0, 2.0, 3.0], [[1, 2, 3], [4], []], ["a", "b", None], [[3, 4], [], None])
    other = batch([[1, 0], [2, 0], [4, 3]], [1.5, 3.0, 2.0], [[3, 2, 9], [5], None], ["a", "c", None], [[3], [], []])
    # cosines 1, 0, 24/25; ranks 1 2 3 against 1 3 2: 1 − 6·(0 + 1 + 1)/(3·8); overlaps 2/3, 0, 1; labels 2 of 3
    # scores are off by 0.5, 1 and -1, of 1, 2 and 3 or 1.5, 3 and 2; weights by 4, of 3 and 4
    assert compare(reference, other, VIEW).to_json() == {
        "rows": 3,
        "features": {
            "vector": {"mean_cosine": pytest.approx(1.96 / 3), "min_cosine": 0.0},
            "score": {
                "rank_correlation": pytest.approx(0.5),
                "max_abs_error": 1.0,
                "relative_error": pytest.approx((2.25 / 15.25) ** 0.5),
            },
            "top": {"overlap": pytest.approx(5 / 9)},
            "label": {"overlap": pytest.approx(2 / 3)},
            "weights": {"relative_error": pytest.approx(0.8)},
        },
    }


def test_the_same_features_are_without_fault() -> None:
    one = batch([[1, 0], [0, 0], [3, 4]], [1.0, None, 3.0], [[1, 2], [4], None], ["a", "b", None])
    figures = compare(one, one, VIEW)
    approx: Any = pytest.approx(1.0)
    assert figures.features == {
        "vector": FeatureAccuracy(mean_cosine=1.0, min_cosine=1.0),
        "score": FeatureAccuracy(rank_correlation=approx, max_abs_error=0.0, relative_error=0.0),
        "top": FeatureAccuracy(overlap=1.0),
        "label": FeatureAccuracy(overlap=1.0),
        "weights": FeatureAccuracy(relative_error=0.0),
    }
    assert shortfalls(figures, 0.999999, 0.999999) == []
    assert json.loads(json.dumps(figures.to_json())) == figures.to_json()


def shortfalls(figures: Accuracy, cosine: float, recall_at_10: float) -> list[str]:
    return [figure.shortfall for figure in figures.judged(cosine, recall_at_10) if figure.room < 0]


def test_shortfalls_name_the_figure_and_the_limit() -> None:
    figures = Accuracy(
        20,
        {
            "vector": FeatureAccuracy(mean_cosine=0.9912, min_cosine=0.5, recall_at_10=0.875),
            "score": FeatureAccuracy(rank_correlation=0.98, max_abs_error=7.0, relative_error=0.15),
            "top": FeatureAccuracy(overlap=0.75),
            "weights": FeatureAccuracy(relative_error=0.11),
        },
    )
    assert shortfalls(figures, 0.995, 0.95) == [
        "vector: mean cosine 0.9912 is below 0.995",
        "vector: recall@10 0.875 is below 0.95",
        "score: rank correlation 0.98 is below 0.995",
        "score: relative error 0.15 is above 0.1",
        "top: overlap 0.75 is below 0.95",
        "weights: relative error 0.11 is above 0.1",
    ]
    assert shortfalls(figures, 0.98, 0.75) == []  # √(2 - 2 · 0.98) is 0.2


def test_scores_that_keep_their_order_and_not_their_size_fall_short() -> None:
    scores = np.random.default_rng(0).normal(size=30)
    reference, other = (batch([[1, 0]] * 30, list(s), [[]] * 30, ["a"] * 30) for s in (scores, scores * 1.1))
    assert shortfalls(compare(reference, other, VIEW), 0.999, 0.985) == ["score: relative error 0.090909 is above 0.04472"]


def test_batches_of_different_rows_are_refused() -> None:
    one = batch([[1, 0]], [1.0], [[1]], ["a"])
    with pytest.raises(ValueError, match="1 rows against 0"):
        compare(one, one.slice(1), VIEW)
    with pytest.raises(ValueError, match="0 rows against 0"):
        compare(one.slice(1), one.slice(1), VIEW)


@pytest.mark.parametrize(("rows", "known"), [(11, False), (12, True)])
def test_recall_is_not_told_from_a_few_rows(rows: int, known: bool) -> None:
    view = FeatureView("v", ("id",), (Feature("vector", "float32", dim=8),), 60, 0)
    figures = compare(vectors(random(rows, 8), view), vectors(random(rows, 8, 1), view), view).features["vector"]
    assert (figures.recall_at_10 is not None) is known


@pytest.mark.parametrize("metric", ["cosine", "l2", "dot"])
def test_recall_is_what_a_plain_loop_finds(metric: str) -> None:
    a, b = random(1100, 6), random(1100, 6) + 0.5 * random(1100, 6, 1)  # more than one block
    view = FeatureView("v", ("id",), (Feature("vector", "float32", dim=6),), 60, 0, index=IndexSpec("vector", metric))

    def nearest(values: npt.NDArray[Any], row: int) -> set[int]:
        values = values.astype(np.float64)
        if metric == "l2":
            far = np.square(values - values[row]).sum(1)
        else:
            far = -(values @ values[row])
            if metric == "cosine":
                far /= np.linalg.norm(values, axis=1)
        far[row] = np.inf
        return set(np.argsort(far)[:10].tolist())

    expected = np.mean([len(nearest(a, row) & nearest(b, row)) / 10 for row in range(1100)])
    found = compare(vectors(a, view), vectors(b, view), view).features["vector"].recall_at_10
    assert 0.2 < expected < 0.9
    assert found == pytest.approx(expected, abs=2e-4)


def test_what_more_rows_will_hardly_be_below() -> None:
    view = FeatureView("docs", ("id",), (Feature("vector", "float32", dim=8),), ttl_s=60, stale_for_s=0)

    def batch(vectors: npt.NDArray[np.float32]) -> pa.RecordBatch:
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 8)
        return pa.RecordBatch.from_arrays([column], names=["vector"])

    rng = np.random.default_rng(0)
    right = rng.standard_normal((128, 8), np.float32)
    same = least(batch(right), batch(right), view)
    assert same is not None
    assert [*same.to_json()["features"]["vector"].values()] == pytest.approx([1.0, 1.0, 1.0 - EASIER])

    off = right + 0.05 * rng.standard_normal((128, 8), np.float32)
    told, found = least(batch(right), batch(off), view), compare(batch(right), batch(off), view).features["vector"]
    assert told is not None
    assert found.recall_at_10 == pytest.approx(neighbour_recalls(right, off).mean())
    spread = neighbour_recalls(right, off).std(ddof=1) / 128**0.5
    assert told.features["vector"].recall_at_10 == pytest.approx(found.recall_at_10 - 3 * spread - EASIER)
    assert told.features["vector"].min_cosine == found.min_cosine
    # of many draws of as many rows, nearly none is below
    every = rng.standard_normal((20_000, 8), np.float32)
    cosines = row_cosines(every, every + 0.05 * rng.standard_normal((20_000, 8), np.float32))
    low = np.array([values.mean() - 3 * values.std(ddof=1) / 128**0.5 for values in cosines[: 156 * 128].reshape(156, 128)])
    assert (low > cosines.mean()).sum() <= 2

    # other features, or few rows, have no such bound
    assert least(batch(right[:11]), batch(off[:11]), view) is None
    assert least(batch(right), batch(off), VIEW) is None


def test_recall_does_not_care_which_of_equal_neighbours_comes_first() -> None:
    values = np.repeat(random(4, 5), 20, axis=0)  # 19 equals for each row
    noise = 1e-7 * random(80, 5, 1)
    assert neighbour_recall(values, values + noise) == 1.0
    assert neighbour_recall(values, np.roll(values, 10, axis=0)) < 0.6


def test_a_row_that_is_not_finite_is_no_good_neighbour() -> None:
    values = random(30, 4)
    broken = values.copy()
    broken[3] = np.nan
    broken[4, 0] = np.inf
    assert row_cosines(values, broken).tolist() == [0.0 if row in (3, 4) else pytest.approx(1.0) for row in range(30)]
    assert neighbour_recall(values, broken) < neighbour_recall(values, values) == 1.0
    assert neighbour_recall(values, np.full_like(values, np.nan)) == 0.0


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=30), st.integers(0, 2**32 - 1))
def test_rank_correlation_sees_the_order_alone(values: list[int], seed: int) -> None:
    a = np.asarray(values, np.float64)
    b = np.random.default_rng(seed).permutation(a)
    found = rank_correlation(a, b)
    if len(set(values)) == 1:
        assert found is None
        return
    assert found is not None
    assert found == pytest.approx(rank_correlation(np.exp(a), b**3 + 7))
    assert found == pytest.approx(-rank_correlation(a, -b))  # type: ignore[operator]
    assert rank_correlation(a, a) == pytest.approx(1.0)


def test_rank_correlation_with_ties_by_hand() -> None:
    # ranks 1, 2.5, 2.5, 4 and 1.5, 1.5, 3, 4, less 2.5: −1.5·−1 + 0 + 0 + 1.5·1.5 over √(4.5 · 4.5)
    assert rank_correlation(np.array([1.0, 2, 2, 3]), np.array([5.0, 5, 6, 9])) == pytest.approx(3.75 / 4.5)
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([7.0, 7, 7])) == 0.0
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([1.0, 2, np.nan])) == pytest.approx(-0.5)


def test_overlap_of_lists() -> None:
    kind = pa.list_(pa.int64())
    assert mean_overlap(pa.array([[1, 2], [1, 2, 3, 4], [], None], kind), pa.array([[2, 1], [1], None, [1]], kind)) == (
        pytest.approx((1 + 0.25 + 1 + 0) / 4)
    )
