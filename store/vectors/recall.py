"""Recall: what an index finds of the nearest rows, and what that says of all queries."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from store.vectors.faiss_index import FLOAT, ROWS, nearest_of_all

NEIGHBOURS = 10
CONFIDENCE_Z = 2.326
"""Of a normal variable: 99 % lie below. Three are looked at at most for one promise, each by its own queries: 97 % hold for all of them together."""


def lower_bound(recall: float, queries: int, z: float = CONFIDENCE_Z) -> float:
    """What the recall of all queries is at least, by Wilson's score interval with each query as one trial (Wilson 1927).

    A query's recall is a share, not a coin: but nothing between 0 and 1 varies more than a coin with the same mean, so the bound holds whatever the ten
    neighbours of one query have in common. Ten times as many trials, one for every neighbour, would not: a query that falls between two lists loses
    several at once. A bootstrap over queries is tighter, and says 1.0 of a sample in which nothing was missed; this says 0.995 of 1,024.

    Args:
        recall: the mean over the queries.
        queries: how many.
        z: of the confidence, one-sided.
    """
    if queries == 0:
        return 0.0
    square = z * z / queries
    centre = recall + square / 2
    half = z * math.sqrt(max(0.0, recall * (1 - recall)) / queries + square / (4 * queries))
    return max(0.0, (centre - half) / (1 + square))


class Recall(NamedTuple):
    """The share of the nearest that was found: its mean over the queries, and the standard error of that."""

    mean: float
    error: float


class Queries:
    """Rows of an index as queries, and the truth about them: what the nearest others are by comparing with every row.

    Args:
        vectors: float32 [n, dim] of the index, perhaps mapped.
        rows: which of them ask.
        flat: the exact index of them.
        l2: whether nearness is the L2 distance.
    """

    def __init__(self, vectors: npt.NDArray[Any], rows: ROWS, flat: Any, *, l2: bool) -> None:
        self.rows, self._vectors, self._l2 = rows, vectors, l2
        self.asked: FLOAT = np.ascontiguousarray(vectors[rows])
        _, found = nearest_of_all(flat, self.asked, min(NEIGHBOURS + 1, len(vectors)))
        scores = [self._scores(number, self._others(number, row)) for number, row in enumerate(found)]
        self._worst = np.array([score[-1] if len(score) else np.inf for score in scores])
        self._possible = min(NEIGHBOURS, len(vectors) - 1)

    def __len__(self) -> int:
        return len(self.rows)

    def recall(self, found: list[ROWS]) -> Recall:
        """The share of the nearest that was found.

        A row counts when it is as near as the last of the true ones: of rows with the very same vector any will do.

        Args:
            found: for each query the rows that a search for one more than :data:`NEIGHBOURS` gave, itself perhaps among them.
        """
        shares = []
        for number, rows in enumerate(found):
            scores = self._scores(number, self._others(number, rows))
            limit = self._worst[number]
            shares.append(min(1.0, float((scores >= limit - 1e-6 * abs(limit)).sum()) / max(1, self._possible)))
        return Recall(float(np.mean(shares)), float(np.std(shares)) / math.sqrt(len(shares)))

    def _others(self, number: int, rows: ROWS) -> ROWS:
        found: ROWS = rows[(rows >= 0) & (rows != self.rows[number])]
        return found[:NEIGHBOURS]

    def _scores(self, number: int, rows: ROWS) -> FLOAT:
        """How near some rows are to a query, more is nearer, the best first."""
        vectors, asked = self._vectors[rows], self.asked[number]
        scores: FLOAT = -np.square(vectors - asked).sum(axis=1) if self._l2 else vectors @ asked
        return np.sort(scores)[::-1]
