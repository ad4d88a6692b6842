"""Recall: what an index finds of the nearest rows, and what that says of all queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from precompute.store.vectors.faiss_index import FLOAT, ROWS
from precompute.store.vectors.nearest_rows import Admitted, NearestRows

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
    """Queries of one kind, and the truth about them: the nearest rows that each may find, by comparing with every one.

    Args:
        vectors: float32 [n, dim] of the index, perhaps mapped.
        vectors_of: the queries, float32 [queries, dim].
        admitted: for each query which rows it may find.
        excluded: for each query which of these it may not, most often the row that asks.
        nearest: for each query the true nearest rows of those left, at least :data:`NEIGHBOURS` or all.
        l2: whether nearness is the L2 distance.
        by: the feature that is filtered by.
    """

    def __init__(
        self,
        vectors: npt.NDArray[Any],
        vectors_of: FLOAT,
        admitted: Sequence[Admitted],
        excluded: Sequence[ROWS],
        nearest: Sequence[ROWS],
        *,
        l2: bool,
        by: str | None = None,
    ) -> None:
        self.asked, self.admitted, self.excluded, self.by = vectors_of, admitted, excluded, by
        self._vectors, self._l2 = vectors, l2
        true = [self._scores(number, rows[:NEIGHBOURS]) for number, rows in enumerate(nearest)]
        self._worst = np.array([scores[-1] if len(scores) else np.inf for scores in true])
        self._possible = np.array([max(1, len(scores)) for scores in true])

    def __len__(self) -> int:
        return len(self.asked)

    def search(self, rows: NearestRows, number: int) -> ROWS:
        """What one of them finds."""
        return rows.nearest(self.asked[number], NEIGHBOURS, self.admitted[number], self.excluded[number])[1]

    def searched(self, rows: NearestRows) -> list[ROWS]:
        """What each of them finds, one after the other, by one thread."""
        return [self.search(rows, number) for number in range(len(self))]

    def recall(self, found: Sequence[ROWS]) -> Recall:
        """The share of the nearest that was found.

        A row counts when it is as near as the last of the true ones: of rows with the very same vector any will do.

        Args:
            found: what a search gave for each query, without what is excluded; the first :data:`NEIGHBOURS` count.
        """
        shares = []
        for number, rows in enumerate(found):
            scores, limit = self._scores(number, rows[rows >= 0][:NEIGHBOURS]), self._worst[number]
            shares.append(min(1.0, float((scores >= limit - 1e-6 * abs(limit)).sum()) / float(self._possible[number])))
        return Recall(float(np.mean(shares)), float(np.std(shares)) / math.sqrt(len(shares)))

    def _scores(self, number: int, rows: ROWS) -> FLOAT:
        """How near some rows are to a query, more is nearer, the best first."""
        vectors, asked = self._vectors[rows], self.asked[number]
        scores: FLOAT = -np.square(vectors - asked).sum(axis=1) if self._l2 else vectors @ asked
        return np.sort(scores)[::-1]
