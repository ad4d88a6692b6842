"""Which index a view's vectors get, by their number and by measurement: codes where they keep the promised recall for every kind of query, else float16, else the
exact one. The same rows get the same index: no time that was measured decides.

Measured first, and left out (docs/decisions.md): HNSW, IVF with 8 bits a number, and rows dealt into lists, which a filter leads astray.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.vectors import nearest_rows
from precompute.store.vectors.faiss_index import ROWS, search_flat, trained_codes
from precompute.store.vectors.index_record import Codes, QueryRecall
from precompute.store.vectors.nearest_rows import Admitted, NearestRows
from precompute.store.vectors.query_kinds import QueryKinds
from precompute.store.vectors.recall import NEIGHBOURS, Queries, Recall, lower_bound

_ROUNDING_QUERIES, _TUNING_QUERIES, _HELD_OUT_QUERIES, _LOOKS = 512, 128, 512, 3
"""Rows that ask what float16 loses; those of them that codes are tuned by, one after the other; and those of each look at what came of it."""
_TIMED_EXACT = 8
_RESCORED = tuple(20 * 2**power for power in range(8))
"""20 to 2,560 rows are compared again at first for 10 neighbours."""
_MARGINS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0)
_WORTH = 0.5
"""Codes pay where a plain search costs no more than this share of comparing with all rows."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an index may cost.

    ``memory_mb`` bounds the codes, which lie in memory in every process that searches; the vectors are mapped. Below ``small_rows``, and below ``small_numbers``
    in all vectors together, nothing is measured and the index is exact: 8,192 × 384 take 0.2 ms, and a search by code takes 0.1.
    """

    memory_mb: int = 1024
    small_rows: int = 8192
    small_numbers: int = 2**20


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and what was measured of it.

    ``coded`` is FAISS's index of the codes, None without. ``by_query`` has what each kind of query found, of rows held out.
    """

    kind: str
    dtype: str
    why: str
    by_query: dict[str, QueryRecall] = dataclass_field(default_factory=dict)
    query_us: float | None = None
    exact_us: float | None = None
    codes: Codes | None = None
    coded: Any = None


class Chooser:
    """Measures candidates over one set of vectors.

    Args:
        vectors: float32 [n, dim], mapped; cosine's have length 1.
        flat: the exact index of them.
        halved: makes the index of the same vectors in float16, when it is wanted, and gives it and its vectors.
        scalars: the scalar features of the same rows.
        promised: least recall.
        metric: ``cosine``, ``dot`` or ``l2``.
        limits: what it may cost.
    """

    def __init__(
        self,
        vectors: npt.NDArray[Any],
        flat: Any,
        halved: Callable[[], tuple[Any, npt.NDArray[Any]]],
        scalars: pa.Table,
        promised: float,
        *,
        metric: str,
        limits: Limits,
    ) -> None:
        self._vectors, self._flat, self._halved, self._scalars = vectors, flat, halved, scalars
        self._promised, self._metric, self._l2, self._limits = promised, metric, metric == "l2", limits

    def choose(self) -> Choice:
        """The narrowest codes that keep the promise and pay; else float16, else the exact index."""
        rows, numbers = len(self._vectors), self._vectors.size
        reachable = lower_bound(1.0, _HELD_OUT_QUERIES)
        if rows < self._limits.small_rows or numbers < self._limits.small_numbers:
            return _exact(f"{rows:,} rows: comparing with all of them costs less than it takes to do better")
        if self._promised > reachable:
            return _exact(
                f"a promise above {reachable:.4f} is kept by comparing with every row: {_HELD_OUT_QUERIES:,} queries cannot show more"
            )
        rounding, *held_out = self._drawn(rows)
        kinds = QueryKinds(self._vectors, self._scalars, self._metric)
        tuning = dict(kinds.of(rounding[:_TUNING_QUERIES]))
        exact_us = self._flat_us(self._flat, tuning["plain"])
        flat, vectors = self._halved()
        rounded = _by_flat(flat, dict(kinds.of(rounding, filtered=False)))
        dtype = "float16" if all(self._is_good(recall) for recall, _ in rounded.values()) else "float32"
        if dtype == "float32":
            flat, vectors = self._flat, self._vectors
        looks, said = iter(held_out), list[str]()
        for codes, coded in self._coded(np.concatenate([rounding, *held_out])):

            def by(codes: Codes, coded: Any = coded) -> NearestRows:
                return NearestRows(flat, vectors, l2=self._l2, coded=coded, codes=codes)

            tuned = self._tuned(by, codes, tuning)
            if tuned is None:
                continue
            for further in (tuned, tuned._replace(rescored=2 * tuned.rescored, margin=tuned.margin + 1)):
                measured = self._measured(by(further), kinds, next(looks))
                said.append(_in_words("codes", measured))
                if self._holds(measured):
                    us = measured["plain"].query_us
                    return Choice("codes", dtype, "; ".join(said), measured, us, exact_us, further, coded)
            break
        if dtype == "float32":
            said.append("float16 loses neighbours of these vectors")
        else:
            found = _by_flat(flat, dict(kinds.of(next(looks), filtered=False)))
            measured = {name: _figures(recall, queries, None) for name, (recall, queries) in found.items()}
            said.append(_in_words("float16", measured))
            if self._holds(measured):
                return Choice("float16", "float16", "; ".join(said), measured, self._flat_us(flat, tuning["plain"]), exact_us)
        return replace(_exact(f"no candidate kept the promise ({'; '.join(said)})"), exact_us=exact_us)

    def _drawn(self, rows: int) -> list[ROWS]:
        """Rows that ask: those to tune by, and those of every look at what came of it. None is in two of them."""
        share = min(1.0, rows / 2 / (_ROUNDING_QUERIES + _LOOKS * _HELD_OUT_QUERIES))
        sizes = [int(_ROUNDING_QUERIES * share), *[int(_HELD_OUT_QUERIES * share)] * _LOOKS]
        drawn = np.random.default_rng(1).permutation(rows)[: sum(sizes)]
        return np.split(drawn, np.cumsum(sizes)[:-1])

    def _coded(self, asking: ROWS) -> Iterator[tuple[Codes, Any]]:
        for codes in candidates(len(self._vectors), self._vectors.shape[1], self._limits):
            yield codes, trained_codes(self._vectors, asking, codes, l2=self._l2)

    def _tuned(self, by: Callable[[Codes], NearestRows], codes: Codes, tuning: dict[str, Queries]) -> Codes | None:
        """How far a search goes: as many compared again at first as cost plain queries least, and the least margin that is good enough for every kind. None where
        none is, or where it does not pay."""
        plain, everything = tuning["plain"], Admitted(None, len(self._vectors))

        def cost(tried: Codes) -> float:
            return statistics.mean(by(tried).search(query, NEIGHBOURS + 1, everything)[2] for query in plain.asked)

        def good(tried: Codes) -> bool:
            return all(self._is_good(queries.recall(queries.searched(by(tried)))) for queries in reversed(tuning.values()))

        start = min((codes._replace(rescored=rescored) for rescored in _RESCORED), key=cost)
        tuned = _first([start._replace(margin=margin) for margin in _MARGINS], good)
        pays = tuned is not None and cost(tuned) <= _WORTH * nearest_rows.STREAMED * everything.total
        return tuned if pays else None

    def _measured(self, rows: NearestRows, kinds: QueryKinds, asking: ROWS) -> dict[str, QueryRecall]:
        """What every kind of query finds, the queries one after the other, by one thread."""
        measured = {}
        for name, queries in kinds.of(asking):
            began, found, seconds = time.perf_counter(), list[ROWS](), list[float]()
            for number in range(len(queries)):
                found.append(queries.search(rows, number))
                seconds.append(-began + (began := time.perf_counter()))
            measured[name] = _figures(queries.recall(found), queries, _median_us(seconds))
        return measured

    def _flat_us(self, flat: Any, queries: Queries) -> float:
        seconds = []
        for query in queries.asked[:_TIMED_EXACT]:
            began = time.perf_counter()
            search_flat(flat, query, NEIGHBOURS + 1)
            seconds.append(time.perf_counter() - began)
        return _median_us(seconds)

    def _is_good(self, recall: Recall) -> bool:
        """Whether held-out queries may be expected to agree: they will find as much, less twice what chance makes of it."""
        return lower_bound(recall.mean - 2 * recall.error, _HELD_OUT_QUERIES) >= self._promised

    def _holds(self, measured: dict[str, QueryRecall]) -> bool:
        return all(kind.recall_bound >= self._promised for kind in measured.values())


def candidates(rows: int, dim: int, limits: Limits) -> list[Codes]:
    """The codes that are tried, the narrowest first: of 4 and of 2 numbers each."""
    widths = sorted({width for width in (4, 2) if dim % width == 0} or {1}, reverse=True)
    found = [Codes(dim // width) for width in widths]
    return [codes for codes in found if rows * codes.bytes_a_row <= limits.memory_mb * 2**20]


def _exact(why: str) -> Choice:
    return Choice("exact", "float32", why)


def _by_flat(flat: Any, kinds: dict[str, Queries]) -> dict[str, tuple[Recall, Queries]]:
    """What comparing with every row of an index finds for queries that may find all but what they exclude: that loses by rounding alone, whatever is admitted."""
    told = {}
    for name, queries in kinds.items():
        most = max(len(excluded) for excluded in queries.excluded)
        _, found = flat.search(queries.asked, min(flat.ntotal, NEIGHBOURS + most))
        left = [rows[~np.isin(rows, excluded)] for rows, excluded in zip(found, queries.excluded, strict=True)]
        told[name] = (queries.recall(left), queries)
    return told


def _figures(recall: Recall, queries: Queries, query_us: float | None) -> QueryRecall:
    bound = lower_bound(recall.mean, len(queries))
    return QueryRecall(round(recall.mean, 6), round(bound, 6), len(queries), query_us, queries.by)


def _in_words(kind: str, measured: dict[str, QueryRecall]) -> str:
    name, least = min(measured.items(), key=lambda item: item[1].recall_bound)
    return f"{kind}: {least.recall_at_10:.4f}, at least {least.recall_bound:.4f}, of {name} queries"


def _median_us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


def _first(tries: list[Codes], good: Callable[[Codes], bool]) -> Codes | None:
    """The first of ``tries``, each of which goes further than the one before, that is good; found by bisection."""
    low, high = 0, len(tries)
    while low < high:
        middle = (low + high) // 2
        if good(tries[middle]):
            high = middle
        else:
            low = middle + 1
    return tries[low] if low < len(tries) else None
