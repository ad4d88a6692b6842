"""Batching: every row once, every batch within its budget."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precompute.engine.batches import batches_by_cost, window_rows


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 200))
def test_dearest_first_and_no_batch_could_take_the_next_row(
    costs: list[int], max_cost: int
) -> None:
    batches = [rows.tolist() for rows in batches_by_cost(np.array(costs, np.int64), max_cost)]
    assert [costs[r] for b in batches for r in b] == sorted(costs, reverse=True)
    assert all(len(b) == 1 or len(b) * costs[b[0]] <= max_cost for b in batches)
    for batch in batches[:-1]:
        assert (len(batch) + 1) * costs[batch[0]] > max_cost


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=400),
    st.integers(1, 2000),
    st.sampled_from([0.0, 0.01, 0.1]),
)
def test_padding_is_low_without_losing_rows_or_half_empty_batches(
    costs: list[int], max_cost: int, max_padding: float
) -> None:
    array = np.array(costs, np.int64)
    batches = list(batches_by_cost(array, max_cost, max_padding))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(costs)))
    for batch in batches[:-1]:
        dearest = int(array[batch].max())
        padded = len(batch) * dearest
        assert len(batch) == 1 or padded <= max_cost
        most = max(1, max_cost // dearest)
        if len(batch) < most:  # cut short: for the padding's sake, and then at least half full
            assert len(batch) >= min(most, -(-max_cost // (2 * dearest)))
    plain = sum(len(b) * int(array[b].max()) for b in batches_by_cost(array, max_cost))
    assert sum(len(b) * int(array[b].max()) for b in batches) <= plain * 1.5


def test_a_budget_that_changes_is_read_for_each_batch() -> None:
    budgets, left = iter([4, 2, 10]), list[int]()

    def next_budget(cost: int) -> int:
        left.append(cost)
        return next(budgets)

    found = [rows.tolist() for rows in batches_by_cost(np.ones(9, np.int64), next_budget)]
    assert (found, left) == ([[0, 1, 2, 3], [4, 5], [6, 7, 8]], [9, 5, 3])


def test_lengths_that_jump_are_cut_where_they_jump() -> None:
    costs = np.array([10] * 6 + [2] * 20, np.int64)
    assert [len(rows) for rows in batches_by_cost(costs, 100)] == [10, 16]
    assert [len(rows) for rows in batches_by_cost(costs, 100, 0.01)] == [6, 20]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.integers(1, 50), st.integers(1, 400))
def test_rows_that_cost_alike_are_computed_in_the_order_of_the_source(
    rows: int, cost: int, max_cost: int
) -> None:
    batches = list(batches_by_cost(np.full(rows, cost, np.int64), max_cost, 0.01))
    most = max(1, max_cost // cost)
    assert [batch.tolist() for batch in batches] == [
        list(range(start, min(start + most, rows))) for start in range(0, rows, most)
    ]


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ({"id": pa.int64(), "x": pa.float32()}, 65_536),
        ({"id": pa.int64(), "on": pa.bool_(), "at": pa.timestamp("us")}, 65_536),
        ({f"x{i}": pa.float64() for i in range(16)}, 16_384),
        ({"id": pa.int64(), "v": pa.list_(pa.float32(), 384)}, 8192),
        ({"id": pa.int64(), "text": pa.string()}, 8192),
        ({"id": pa.int64(), "seen": pa.list_(pa.int64())}, 8192),
    ],
)
def test_windows_of_narrow_rows_are_larger(columns: dict[str, pa.DataType], rows: int) -> None:
    assert window_rows(pa.schema(columns)) == rows
