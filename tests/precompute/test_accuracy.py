"""Accuracy: figures known by hand, and what must hold for any features."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from precompute.techniques.accuracy import (
    EASIER,
    Accuracy,
    FeatureAccuracy,
    compare,
    judged_rows,
    least,
    neighbour_recall,
    neighbour_recalls,
    rank_correlation,
    row_cosines,
)
from precompute.techniques.row_errors import (
    MOST,
    Limits,
    RowFigures,
    ordered_overlap,
    row_errors,
    share_between,
)

LIMITS = Limits(0.999, 0.985)
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
    vectors: list[list[float]],
    scores: list[Any],
    tops: list[Any],
    labels: list[Any],
    weights: list[Any] | None = None,
) -> pa.RecordBatch:
    columns = {
        "vector": vectors,
        "score": scores,
        "top": tops,
        "label": labels,
        "weights": weights or [[]] * len(labels),
    }
    return pa.RecordBatch.from_pydict(columns, schema=VIEW.feature_schema())


def vectors(values: npt.NDArray[np.float32], view: FeatureView) -> pa.RecordBatch:
    flat = pa.array(values.reshape(-1))
    return pa.record_batch(
        [pa.FixedSizeListArray.from_arrays(flat, values.shape[1])], schema=view.feature_schema()
    )


def random(rows: int, dim: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, dim), np.float32)


def test_every_kind_of_feature_by_hand() -> None:
    reference = batch(
        [[1, 0], [0, 2], [3, 4]],
        [1.0, 2.0, 3.0],
        [[1, 2, 3], [4], []],
        ["a", "b", None],
        [[3, 4], [], None],
    )
    other = batch(
        [[1, 0], [2, 0], [4, 3]],
        [1.5, 3.0, 2.0],
        [[3, 2, 9], [5], None],
        ["a", "c", None],
        [[3], [], []],
    )
    # cosines 1, 0, 24/25; ranks 1 2 3 against 1 3 2: 1 − 6·(0 + 1 + 1)/(3·8); overlaps 2/3, 0, 1;
    # labels 2 of 3 scores are off by 0.5, 1 and -1, and from the median by 1, 0 and 1 as their
    # quartiles are from each other; weights by 4, of 3 and 4; vectors by nothing, √8 of 2 and √2 of
    # 5; lists have 0, 1 and 2 of the first 1, 2 and 3
    assert compare(reference, other, VIEW, LIMITS).to_json() == {
        "rows": 3,
        "features": {
            "vector": {
                "mean_cosine": pytest.approx(1.96 / 3),
                "min_cosine": 0.0,
                "median_error": pytest.approx(2**0.5 / 5),
                "beyond": 2,
                "worst_error": pytest.approx(2**0.5),
            },
            "score": {
                "rank_correlation": pytest.approx(0.5),
                "max_abs_error": 1.0,
                "median_error": pytest.approx(1.0),
                "beyond": 3,
                "worst_error": pytest.approx(1.0),
            },
            "top": {
                "overlap": pytest.approx(5 / 9),
                "median_error": pytest.approx(1 - (0 + 1 / 2 + 2 / 3) / 3),
                "beyond": 2,
                "worst_error": 1.0,
            },
            "label": {"overlap": pytest.approx(2 / 3)},
            "weights": {"median_error": 0.0, "beyond": 1, "worst_error": pytest.approx(0.8)},
        },
    }


def shortfalls(figures: Accuracy, cosine: float, recall_at_10: float) -> list[str]:
    return [
        figure.shortfall
        for figure in figures.judged(Limits(cosine, recall_at_10), VIEW)
        if figure.room < 0
    ]


def test_shortfalls_name_the_figure_and_the_limit() -> None:
    figures = Accuracy(
        20,
        {
            "vector": FeatureAccuracy(mean_cosine=0.9912, min_cosine=0.5, recall_at_10=0.875),
            "score": FeatureAccuracy(
                rank_correlation=0.98,
                max_abs_error=7.0,
                median_error=0.15,
                beyond=0,
                worst_error=0.3,
            ),
            "top": FeatureAccuracy(overlap=0.75),
            "label": FeatureAccuracy(overlap=0.96),
            "weights": FeatureAccuracy(median_error=0.04, beyond=1, worst_error=0.6),
        },
    )
    assert shortfalls(figures, 0.995, 0.95) == [
        "vector: mean cosine 0.9912 is below 0.995",
        "vector: recall@10 0.875 is below 0.95",
        "score: rank correlation 0.98 is below 0.995",
        "score: median row error 0.15 is above 0.1",
        "top: overlap 0.75 is below 0.95",
        "weights: share of rows off by more than 0.2: 0.05 is above 0.001",
        "weights: worst row error 0.6 is above 0.5",
    ]
    # √(2 - 2 · 0.98) is 0.2; of 20 rows one is too much, if 1 in 1,000 may be
    assert shortfalls(figures, 0.98, 0.75) == [
        "weights: share of rows off by more than 0.4: 0.05 is above 0.001"
    ]


def test_vectors_of_another_length_and_few_broken_rows_fall_short() -> None:
    view = FeatureView("v", ("id",), (Feature("vector", "float32", dim=8),), 60, 0)
    right = random(1000, 8)
    broken = right.copy()
    broken[::200] *= -1
    for made, reasons in (
        (
            right * 0.16,
            [
                "median row error 0.84 is above 0.04472",
                "share of rows off by more than 0.0894: 1 is above 0.001",
                "worst row error 0.84 is above 0.2236",
            ],
        ),
        (
            broken,
            [
                "share of rows off by more than 0.0894: 0.005 is above 0.001",
                "worst row error 2 is above 0.2236",
            ],
        ),
        (right * 1.01, []),
    ):
        found = compare(vectors(right, view), vectors(made, view), view, LIMITS).judged(
            LIMITS, view
        )
        said = [figure.shortfall for figure in found if figure.room < 0 and "row" in figure.figure]
        assert said == [f"vector: {reason}" for reason in reasons]


def test_rows_that_were_not_drawn_count_for_the_worst_alone() -> None:
    view = FeatureView("v", ("id",), (Feature("score", "float64"),), 60, 0)
    reference, other = ([1e6, *range(100)], [1.3e6, *range(100)])
    rows = [
        pa.RecordBatch.from_pydict({"score": values}, schema=view.feature_schema())
        for values in (reference, other)
    ]
    found = compare(rows[0], rows[1], view, LIMITS, ends=1)
    approx: Any = lambda value: pytest.approx(value, rel=1e-3)  # noqa: E731
    assert found == Accuracy(
        100,
        {
            "score": FeatureAccuracy(
                rank_correlation=approx(1.0),
                max_abs_error=0.0,
                median_error=0.0,
                beyond=0,
                worst_error=approx(0.3),
            )
        },
    )
    assert [f.figure for f in found.judged(LIMITS, view) if f.room < 0] == [
        "score: worst row error"
    ]
    one, two = (pa.array([1e6, 0, 1, 2, 3, last]) for last in (4.0, 4.5))
    assert row_errors(view.features[0], one, two, ends=1)[-1] == 0.25
    # of one feature
    assert [
        f
        for f in found.judged(Limits(0.999, 0.985, {}, {"score": {"worst": 0.31}}), view)
        if f.room < 0
    ] == []


def test_a_score_is_off_by_the_spread_and_by_its_distance_from_the_median() -> None:
    score = Feature("score", "float64")

    def errors(reference: list[Any], other: list[Any]) -> list[float]:
        found = row_errors(score, pa.array(reference, pa.float64()), pa.array(other, pa.float64()))
        return [round(float(error), 6) for error in found]

    kelvin = [280.0, 290.0, 300.0, 310.0, 320.0]  # quartiles 20 apart
    assert errors(kelvin, [281.0, 290.0, 300.0, 310.0, 320.0]) == [0.05, 0, 0, 0, 0]
    assert errors([0.0, 0.0, 0.0, 1000.0], [0.0, 0.0, 0.0, 1010.0]) == [0, 0, 0, 0.01]
    assert errors([5.0, 5.0], [5.5, 5.0]) == [0.1, 0.0]  # all one value
    assert errors([0.0], [1e-9]) == [MOST]
    nan = float("nan")
    assert errors([nan, 1.0, None, 2.0], [nan, nan, 3.0, 2.0]) == [0, MOST, MOST, 0]


def test_one_row_of_few_is_no_evidence_of_many() -> None:
    """Beyond the bound: its share is above the limit, and what many rows' share may be is not."""
    allowed = Limits(0.999, 0.985, {}, {"score": {"share": 0.03}}).of(VIEW.feature("score"))
    judged = {
        beyond: judged_rows("score", RowFigures(20, 0.0, beyond, 0.0), allowed)[1]
        for beyond in (0, 1, 2, 5)
    }
    assert {beyond: (round(one.measured, 2), one.room >= 0) for beyond, one in judged.items()} == {
        0: (0.0, True),
        1: (0.05, True),
        2: (0.1, True),
        5: (0.25, False),
    }


@pytest.mark.parametrize(("seen", "rows"), [(0, 1), (0, 5000), (1, 512), (7, 90), (20, 20)])
def test_bounds_of_a_share_are_those_of_the_binomial_distribution(seen: int, rows: int) -> None:
    low, high = share_between(seen, rows)

    def tail(share: float, counts: range) -> float:
        return sum(math.comb(rows, k) * share**k * (1 - share) ** (rows - k) for k in counts)

    assert tail(low, range(seen, rows + 1)) == pytest.approx(0.05, rel=1e-6) if seen else low == 0
    assert (
        tail(high, range(seen + 1)) == pytest.approx(0.05, rel=1e-6) if seen < rows else high == 1
    )


@pytest.mark.parametrize(("rows", "known"), [(11, False), (12, True)])
def test_few_rows_say_nothing_of_recall(rows: int, known: bool) -> None:
    view = FeatureView("v", ("id",), (Feature("vector", "float32", dim=8),), 60, 0)
    figures = compare(
        vectors(random(rows, 8), view), vectors(random(rows, 8, 1), view), view, LIMITS
    ).features["vector"]
    assert (figures.recall_at_10 is not None) is known


@pytest.mark.parametrize("metric", ["cosine", "l2", "dot"])
def test_recall_is_what_a_plain_loop_finds(metric: str) -> None:
    a, b = random(1100, 6), random(1100, 6) + 0.5 * random(1100, 6, 1)  # more than one block
    view = FeatureView(
        "v",
        ("id",),
        (Feature("vector", "float32", dim=6),),
        60,
        0,
        index=IndexSpec("vector", metric),
    )

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
    found = (
        compare(vectors(a, view), vectors(b, view), view, LIMITS).features["vector"].recall_at_10
    )
    assert 0.2 < expected < 0.9
    assert found == pytest.approx(expected, abs=2e-4)


def test_what_more_rows_will_hardly_be_below() -> None:
    view = FeatureView(
        "docs", ("id",), (Feature("vector", "float32", dim=8),), ttl_s=60, stale_for_s=0
    )

    def batch(vectors: npt.NDArray[np.float32]) -> pa.RecordBatch:
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 8)
        return pa.RecordBatch.from_arrays([column], names=["vector"])

    rng = np.random.default_rng(0)
    right = rng.standard_normal((128, 8), np.float32)
    same = least(batch(right), batch(right), view, LIMITS)
    assert same is not None
    assert [*same.to_json()["features"]["vector"].values()] == pytest.approx(
        [1.0, 1.0, 1.0 - EASIER, 0.0, 0, 0.0]
    )

    off = right + 0.05 * rng.standard_normal((128, 8), np.float32)
    bounds = least(batch(right), batch(off), view, LIMITS)
    found = compare(batch(right), batch(off), view, LIMITS).features["vector"]
    assert bounds is not None
    assert found.recall_at_10 == pytest.approx(neighbour_recalls(right, off).mean())
    spread = neighbour_recalls(right, off).std(ddof=1) / 128**0.5
    assert bounds.features["vector"].recall_at_10 == pytest.approx(
        found.recall_at_10 - 3 * spread - EASIER
    )
    assert bounds.features["vector"].min_cosine == found.min_cosine
    # of many draws of as many rows, nearly none is below
    every = rng.standard_normal((20_000, 8), np.float32)
    cosines = row_cosines(every, every + 0.05 * rng.standard_normal((20_000, 8), np.float32))
    low = np.array(
        [
            values.mean() - 3 * values.std(ddof=1) / 128**0.5
            for values in cosines[: 156 * 128].reshape(156, 128)
        ]
    )
    assert (low > cosines.mean()).sum() <= 2

    # other features, or few rows, have no such bound
    assert least(batch(right[:11]), batch(off[:11]), view, LIMITS) is None
    assert least(batch(right), batch(off), VIEW, LIMITS) is None


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
    assert row_cosines(values, broken).tolist() == [
        0.0 if row in (3, 4) else pytest.approx(1.0) for row in range(30)
    ]
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
    assert rank_correlation(np.array([1.0, 2, 2, 3]), np.array([5.0, 5, 6, 9])) == pytest.approx(
        3.75 / 4.5
    )
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([7.0, 7, 7])) == 0.0
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([1.0, 2, np.nan])) == pytest.approx(
        -0.5
    )
    assert rank_correlation(
        np.array([-1.0, -2, -3]), np.array([-1.0, -2, np.nan])
    ) == pytest.approx(1.0)


def test_the_overlap_of_two_lists_is_a_mean_over_depths() -> None:
    chance = Random(7)
    for _ in range(300):
        a, b = ([chance.choice("abcdef") for _ in range(chance.randrange(9))] for _ in range(2))
        depth = max(len(a), len(b))
        shares = [len({*a[:d]} & {*b[:d]}) / d for d in range(1, depth + 1)]
        assert ordered_overlap(a, b) == (1.0 if a == b else sum(shares) / depth)
