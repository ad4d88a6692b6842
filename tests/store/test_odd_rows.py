"""Odd rows: every one is found, whatever its kind, and where it is."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.odd_rows import NOT_FINITE, VALUELESS, odd_rows

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


def found(rows: pa.RecordBatch | pa.Table, view: FeatureView) -> dict[str, list[int]]:
    return {kind: numbers.tolist() for kind, numbers in odd_rows(rows, view).items()}


def test_rows_of_every_kind_with_what_is_wrong_with_them() -> None:
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
    pieces = pa.Table.from_batches([batch.slice(0, 3), batch.slice(3), batch.slice(0, 0), batch])
    assert found(pieces, KINDS) == {NOT_FINITE: [2, 3, 6, 9, 10, 13], VALUELESS: [1, 8]}
    assert found(batch.slice(4, 2), KINDS) == {}


def test_without_a_vector_a_row_is_valueless_when_all_of_it_is_null() -> None:
    view = FeatureView("v", ("id",), (Feature("a", "float32"), Feature("b", "string")), 1.0, 1.0)
    batch = pa.record_batch({"a": pa.array([1.0, None, None], pa.float32()), "b": ["x", "y", None]})
    assert found(batch, view) == {VALUELESS: [2]}
    assert found(batch.slice(0, 2), view) == {}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numbers_whose_square_is_none_are_finite(dtype: str) -> None:
    """And of a sum that is not finite none may be wrong."""
    largest = np.finfo(dtype).max
    values = np.array([[largest] * 4, [0] * 4, [np.nan, 0, 0, 0], [0, 0, 0, -np.inf]], dtype)
    view = FeatureView("v", ("id",), (Feature("vector", dtype, dim=4),), 1.0, 1.0)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 4)
    assert found(pa.record_batch({"vector": vectors}), view) == {NOT_FINITE: [2, 3]}
