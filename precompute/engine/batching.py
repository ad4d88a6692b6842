"""Batching: which rows are computed together. Costs in, row numbers out; no tensors.

Sorted by cost within a window, neighbours need next to no padding; filled up to a cost budget, every batch takes about the same
memory. Measured with MiniLM on two cores: naive order 27 docs/s (79 % padding), sorted with a budget of 1,024 tokens 175 (0.2 %).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

WINDOW_ROWS = 8192
"""Rows sorted together: the largest number held in memory at once. 1,024 instead costs 12 % of the rate at a large budget."""


MIN_FILL = 0.5
"""Of the budget: a batch is not cut below it for the sake of less padding, since small batches are slow."""


def batches_by_cost(
    costs: npt.NDArray[np.int64], max_cost: int | Callable[[], int], max_padding: float = 1.0
) -> Iterator[npt.NDArray[np.int64]]:
    """Row numbers of each batch, dearest rows first, so that running out of memory shows at the start.

    The padded cost of a batch, rows times the dearest row, stays within ``max_cost``; a single row beyond it goes alone.

    Args:
        costs: int64 [rows], at least 1.
        max_cost: budget of one batch, or what tells it when the batch is made.
        max_padding: share of the padded cost that may be padding, where the batch stays at least half full without more.
    """
    order = np.argsort(-costs, kind="stable")
    sums = np.concatenate(([0], np.cumsum(costs[order])))
    start = 0
    while start < len(order):
        budget = max_cost() if callable(max_cost) else max_cost
        dearest = int(costs[order[start]])
        rows = max(1, min(budget // dearest, len(order) - start))
        if max_padding < 1 and costs[order[start + rows - 1]] < dearest:
            least = max(1, min(rows, int(np.ceil(MIN_FILL * budget / dearest))))
            number = np.arange(least, rows + 1)
            # grows with the rows, which are sorted
            padding = 1 - (sums[start + number] - sums[start]) / (number * dearest)
            rows = max(least, int(least - 1 + np.count_nonzero(padding <= max_padding)))
        yield order[start : start + rows]
        start += rows
