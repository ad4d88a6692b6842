"""Batching: every row once, every batch within its budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precompute.batching import batches_by_cost


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 2**40), max_size=200), st.integers(1, 2**41))
def test_every_row_once_and_the_budget_kept_except_by_single_rows(costs: list[int], max_cost: int) -> None:
    array = np.array(costs, np.int64)
    batches = [rows.tolist() for rows in batches_by_cost(array, max_cost)]
    assert sorted(row for batch in batches for row in batch) == list(range(len(costs)))
    for batch in batches:
        assert batch
        assert len(batch) == 1 or len(batch) * max(costs[row] for row in batch) <= max_cost


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 200))
def test_dearest_first_and_no_batch_could_take_the_next_row(costs: list[int], max_cost: int) -> None:
    batches = [rows.tolist() for rows in batches_by_cost(np.array(costs, np.int64), max_cost)]
    assert [costs[r] for b in batches for r in b] == sorted(costs, reverse=True)
    for batch in batches[:-1]:
        assert (len(batch) + 1) * costs[batch[0]] > max_cost


@pytest.mark.parametrize(
    ("costs", "max_cost", "batches"),
    [
        ([], 10, []),
        ([3], 2, [[0]]),
        ([1, 1, 1, 1, 1], 2, [[0, 1], [2, 3], [4]]),
        ([2, 9, 4, 4, 1], 8, [[1], [2, 3], [0, 4]]),
        ([5, 5, 5], 15, [[0, 1, 2]]),
        ([5, 5, 5], 14, [[0, 1], [2]]),
    ],
)
def test_examples(costs: list[int], max_cost: int, batches: list[list[int]]) -> None:
    assert [rows.tolist() for rows in batches_by_cost(np.array(costs, np.int64), max_cost)] == batches
