"""Row figures: every row counted, whatever its kind; lengths within 2 %."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from precompute.store.disk.record import read_record, replace, sealed
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.row_figures import (
    NOT_FINITE,
    VALUELESS,
    ZERO,
    RowFigures,
    VectorFigures,
    count,
    distance,
    odd_rows,
    quantiles,
)

SHARES = [0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0]
KINDS = FeatureView(
    "kinds",
    ("id",),
    (
        Feature("vector", "float32", dim=2),
        Feature("scores", "float32", max_items=3),
        Feature("number", "float64"),
        Feature("text", "string"),
        Feature("bytes", "int8", dim=2),
    ),
    1.0,
    1.0,
)


def vectors(values: np.ndarray) -> pa.RecordBatch:
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.record_batch({"vector": pa.FixedSizeListArray.from_arrays(flat, values.shape[1])})


def of(dtype: str, dim: int) -> FeatureView:
    return FeatureView("v", ("id",), (Feature("vector", dtype, dim=dim),), 1.0, 1.0)


def test_rows_of_every_kind_are_counted_with_what_is_wrong_with_them() -> None:
    inf, nan = np.inf, np.nan
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(
                [[3, 4], None, [nan, 1], [0, 0], [3e30, 4e30], [1e-30, 0], [1, -inf]],
                pa.list_(pa.float32(), 2),
            ),
            pa.array([[1], None, [inf, 1], [], [2], [3], [4]], pa.list_(pa.float32())),
            pa.array([1, None, nan, -inf, None, 1, 2], pa.float64()),
            pa.array(["a", None, "", "", "", "", ""]),
            pa.array(
                [[0, 0], None, [0, 0], [0, 0], [0, 0], [0, 0], [0, 0]], pa.list_(pa.int8(), 2)
            ),
        ],
        schema=KINDS.feature_schema(),
    )
    nulls = {"vector": 1, "scores": 1, "number": 2, "text": 1, "bytes": 1}
    pieces = pa.Table.from_batches([batch.slice(0, 3), batch.slice(3), batch.slice(0, 0), batch])
    odd = {kind: numbers.tolist() for kind, numbers in odd_rows(pieces, KINDS).items()}
    assert odd == {
        NOT_FINITE: [2, 3, 6, 9, 10, 13],
        VALUELESS: [1, 8],
        f"{ZERO}vector": [3, 10],
    }
    found = count([batch.slice(0, 3), batch.slice(3), batch.slice(0, 0)], KINDS)
    assert (found.rows, found.not_finite, found.valueless, found.nulls) == (7, 3, 1, nulls)
    vector = found.vectors["vector"]
    assert (list(found.vectors), vector.rows, found.zeros) == (["vector"], 4, {"vector": 1})
    assert vector.norm_sum == pytest.approx(5e30)
    assert sum(vector.norms.values()) == 4


def test_without_a_vector_a_row_is_valueless_when_all_of_it_is_null() -> None:
    view = FeatureView("v", ("id",), (Feature("a", "float32"), Feature("b", "string")), 1.0, 1.0)
    batch = pa.record_batch({"a": pa.array([1.0, None, None], pa.float32()), "b": ["x", "y", None]})
    figures = replace(count([batch], view), values={})
    assert figures == RowFigures(3, 0, 1, {}, 3, 1, {"a": 2, "b": 1})
    assert count([batch.slice(0, 2)], view).valueless == 0
    assert count([], view).rows == 0


@pytest.mark.parametrize(
    ("dtype", "dim"), [("float16", 8), ("float32", 1), ("float32", 4), ("float64", 64)]
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_lengths_are_those_of_all_rows(dtype: str, dim: int, scale: float) -> None:
    values = (np.random.default_rng(dim).standard_normal((5000, dim)) * scale).astype(dtype)
    norms = np.linalg.norm(values.astype(np.float64), axis=1)
    found = count([vectors(values[:3000]), vectors(values[3000:])], of(dtype, dim)).vectors[
        "vector"
    ]
    assert found.mean_norm == pytest.approx(norms.mean(), rel=1e-5)
    exact = np.quantile(norms, SHARES, method="inverted_cdf")
    assert found.norm_quantiles(SHARES) == pytest.approx(exact, rel=0.02)


def test_lengths_beyond_what_a_float_can_square() -> None:
    figures = count(
        [vectors(np.array([[1e300, 0.0], [1e-300, 0.0], [0.0, 0.0]]))], of("float64", 2)
    )
    vector = figures.vectors["vector"]
    assert (figures.not_finite, vector.rows, figures.zeros) == (0, 3, {"vector": 1})
    assert vector.mean_norm == pytest.approx(1e300 / 3)
    assert vector.norm_quantiles([0.5]) == [0.0]
    assert VectorFigures().norm_quantiles([0.1, 0.9]) == [0.0, 0.0]


def test_they_travel_as_json() -> None:
    figures = count([vectors(np.eye(3, dtype=np.float32))], of("float32", 3))
    assert read_record(RowFigures, sealed(figures), "figures") == figures


VALUES = FeatureView(
    "values",
    ("id",),
    (
        Feature("score", "float32"),
        Feature("label", "string"),
        Feature("items", "int64", max_items=5),
    ),
    1.0,
    1.0,
)


def values_of(
    scores: Sequence[float | None], labels: Sequence[str | None], items: Sequence[list[int] | None]
) -> pa.RecordBatch:
    columns = [
        pa.array(scores, pa.float32()),
        pa.array(labels, pa.string()),
        pa.array(items, pa.list_(pa.int64())),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=VALUES.feature_schema())


def test_every_kind_of_value_is_counted_by_its_type() -> None:
    inf, nan = np.inf, np.nan
    batch = values_of(
        [1.0, -2.0, 0.0, None, inf, -inf, nan],
        ["a", "", "a", None, "b", "a", None],
        [[1, 2], [1], [], None, [1, 9, 9], [2, 1], None],
    )
    found = count([batch.slice(0, 2), batch.slice(2)], VALUES).values
    score, label, items = (found[name] for name in ("score", "label", "items"))
    assert (score.rows, score.not_finite, score.zero, score.numbers) == (6, 3, 1, 3)
    assert score.mean == pytest.approx(-1 / 3)
    assert score.spread == pytest.approx(np.std([1.0, -2.0, 0.0]))
    assert score.quantiles([0.0, 0.5, 1.0]) == pytest.approx([-2.0, 0.0, 1.0], rel=0.01)
    assert (label.rows, label.empty, label.distinct, label.looked_at) == (5, 1, 3, 5)
    assert label.common == {"a": 3, "": 1, "b": 1}
    assert (items.rows, items.empty, items.items, items.distinct, items.common) == (
        5,
        1,
        8,
        3,
        {"1": 4, "2": 2, "9": 2},
    )
    assert quantiles(items.lengths, [0.0, 0.5, 1.0]) == pytest.approx([0.0, 2.0, 3.0], rel=0.01)


def test_of_many_values_the_commonest_are_there() -> None:
    labels = [f"{i:05d}" if i % 10 else "all" for i in range(1000)]
    found = count([values_of([None] * 1000, labels, [None] * 1000)], VALUES).values
    assert found["label"].common == {"all": 100, **{f"{i:05d}": 1 for i in range(71) if i % 10}}
    assert (found["label"].distinct, found["score"].common, found["items"].common) == (901, {}, {})
    scores: list[float | None] = [i / 7 for i in range(1000)]
    score = count([values_of(scores, labels, [None] * 1000)], VALUES).values["score"]
    assert (score.common, score.distinct) == ({"0.0": 1}, 1000)
    assert distance(score.buckets, score.buckets) == 0
    assert distance(score.buckets, {bucket + 64: n for bucket, n in score.buckets.items()}) > 0.1
