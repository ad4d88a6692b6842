"""Nearest rows: the search among the rows that a filter admits: by comparing with each, or by
scanning codes and comparing the best until no other row can be nearer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from precompute.store.vectors.faiss_index import (
    BITS,
    FLOAT,
    ROWS,
    on_gpu,
    scan_codes,
    search_flat,
    widened,
)
from precompute.store.vectors.index_record import Codes

FEW_ROWS = 4096
"""Admitted rows up to which they are compared with one by one, whatever the index."""
_FEW_EXCLUDED = 16
"""Excluded rows up to which they are searched for besides, and dropped; more are marked in a
bitmap."""
_GROWTH = 4
SCANNED, STREAMED = 1 / 100, 1 / 16
"""The cost of reading one row's code, and of comparing one row in a scan of all, as shares of
gathering a row and comparing it (0.06 µs at 64 numbers, 0.12 at 384; Zen 5, 200,000 rows)."""
_LEAST_NEIGHBOURS, _LEAST_LATE = 10, 10
"""How many neighbours, and how many of the last rows, :meth:`NearestRows._is_sure` judges by at
least."""


class Admitted(NamedTuple):
    """Which rows may be found: a bit for each, lowest first, None for all; and how many they
    are."""

    bits: BITS | None
    total: int


class NearestRows:
    """Searches one set of vectors; safe to use from several threads.

    Args:
        flat: FAISS's index of them.
        vectors: the same ones, [n, dim], mapped.
        l2: whether nearness is the L2 distance, and not the inner product.
        coded: FAISS's index of their codes, None without.
        codes: how far a search by them goes.
    """

    def __init__(
        self,
        flat: Any,
        vectors: npt.NDArray[Any],
        *,
        l2: bool,
        coded: Any = None,
        codes: Codes | None = None,
    ) -> None:
        self._flat, self._vectors, self._l2, self._coded, self._codes = (
            flat,
            vectors,
            l2,
            coded,
            codes,
        )
        self._whole: Any = on_gpu(flat) if codes is None else flat

    def vectors(self, rows: ROWS) -> FLOAT:
        """The vectors of some rows, float32 [n, dim]."""
        return widened(self._vectors[rows])

    def nearest(
        self, query: FLOAT, k: int, admitted: Admitted, excluded: ROWS
    ) -> tuple[FLOAT, ROWS]:
        """Scores and rows of the ``k`` nearest, best first.

        Args:
            query: float32 [dim], of length 1 for cosine.
            k: how many, at least 1; fewer come back where fewer are admitted.
            admitted: which rows count, at least one.
            excluded: which of them do not.
        """
        few = admitted.bits is not None and admitted.total <= FEW_ROWS
        if not few and len(excluded) <= _FEW_EXCLUDED:
            scores, rows, _ = self.search(query, min(k + len(excluded), admitted.total), admitted)
            for row in excluded.tolist():
                # 2 µs each, where isin takes 50
                left = rows != row
                scores, rows = scores[left], rows[left]
            return scores[:k], rows[:k]
        total = len(self._vectors)
        bits = (
            np.packbits(np.ones(total, np.bool_), bitorder="little")
            if admitted.bits is None
            else admitted.bits.copy()
        )
        np.bitwise_and.at(bits, excluded >> 3, ~(1 << (excluded & 7)).astype(np.uint8))
        count = int(np.bitwise_count(bits).sum())
        if count <= FEW_ROWS:
            return self.among(
                query, np.flatnonzero(np.unpackbits(bits, count=total, bitorder="little")), k
            )
        scores, rows, _ = self.search(query, min(k, count), Admitted(bits, count))
        return scores, rows

    def among(self, query: FLOAT, rows: ROWS, k: int) -> tuple[FLOAT, ROWS]:
        """The ``k`` nearest of some rows, by comparing with each."""
        if not len(rows):
            return np.zeros(0, np.float32), rows
        return self._best(self._scores(query, rows), rows, k)

    def search(self, query: FLOAT, k: int, admitted: Admitted) -> tuple[FLOAT, ROWS, float]:
        """The ``k`` nearest that are admitted, and the cost, as a number of rows gathered and
        compared.

        By code the best few are found, and compared again; those rows that come next by code are
        like the last ones that were compared. While these are not ``margin`` standard deviations
        worse than the k-th best, one beyond may be better than it, and four times as many are
        compared. That depends neither on which rows are admitted nor on where the query lies. It is
        bounded: before it costs more than comparing with all that is admitted, that is done.
        """
        codes, bits, cost = self._codes, admitted.bits, 0.0
        take = codes.to_rescore(k) if codes is not None else admitted.total
        while codes is not None and take <= admitted.total * STREAMED:
            rows = scan_codes(self._coded, query, take, bits)
            scores = self._scores(query, rows)
            cost += len(rows) + len(self._vectors) * SCANNED
            if self._is_sure(scores, k, codes.margin):
                return *self._best(scores, rows, k), cost
            take *= _GROWTH
        scores, rows = search_flat(self._whole if bits is None else self._flat, query, k, bits)
        return scores, rows, cost + len(self._vectors) * STREAMED

    def _is_sure(self, scores: FLOAT, k: int, margin: float) -> bool:
        """Whether the last quarter of the rows, by code, is at least ``margin`` standard deviations
        worse than the k-th best."""
        near = -scores if self._l2 else scores
        count = max(k, _LEAST_NEIGHBOURS)
        if len(near) <= count:
            return False
        kth, late = np.partition(near, -count)[-count], near[-max(_LEAST_LATE, len(near) // 4) :]
        # equal vectors are as near, but for the last digit
        return bool(kth - late.mean() >= margin * late.std() - 1e-6 * abs(kth))

    def _scores(self, query: FLOAT, rows: ROWS) -> FLOAT:
        vectors = self.vectors(rows)
        # vecdot and not @, for which BLAS takes threads of its own: 25 ms for 2,000 rows on busy
        # cores, and this 0.1
        scores: FLOAT = (
            np.square(vectors - query).sum(axis=1) if self._l2 else np.vecdot(vectors, query)
        )
        return scores

    def _best(self, scores: FLOAT, rows: ROWS, k: int) -> tuple[FLOAT, ROWS]:
        best = np.argsort(scores if self._l2 else -scores, kind="stable")[:k]
        return scores[best], rows[best]
