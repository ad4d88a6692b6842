"""Which index a view's vectors get: the fastest of the candidates that keeps the promised recall on rows that nothing was chosen by, or the exact one.

Measured first, and left out (docs/decisions.md): HNSW, whose graph takes ten times as long to build for the same recall and time, and loses most neighbours
of clusters that overlap; IVF with 8 bits a number, 8 times as slow as codes at the same recall.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from store.vectors.faiss_index import FLOAT, ROWS, refined, search_codes, search_flat, trained_codes
from store.vectors.index_record import Codes
from store.vectors.recall import NEIGHBOURS, Queries, Recall, lower_bound

_TUNING_QUERIES, _HELD_OUT_QUERIES, _LOOKS = 512, 1024, 3
_TIMED_EXACT = 8
_RESCORED = tuple(round(10 * 2 ** (power / 2)) for power in range(17))
"""10 to 2,560 rows are compared again for 10 neighbours."""
_WORTH = 0.8
"""A candidate with more to it must take less than this share of the time of one with less."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an index may cost.

    ``memory_mb`` bounds the codes, which lie in memory in every process that searches; the vectors are mapped. ``build_s`` is when no further candidate is
    begun. Below ``small_rows`` nothing is measured and the index is exact: 8,192 × 384 take 0.2 ms. Lists are a candidate from ``lists_rows`` on: at
    126,000 docstrings they gained nothing over scanning all codes, at equal recall.
    """

    memory_mb: int = 1024
    build_s: float = 120.0
    small_rows: int = 8192
    lists_rows: int = 300_000


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and what was measured of it.

    ``coded`` is FAISS's index of the codes, None without. ``recall`` and ``bound`` are those of the ``queries`` held out.
    """

    kind: str
    dtype: str
    recall: float
    bound: float
    queries: int
    query_us: float | None
    exact_us: float | None
    why: str
    codes: Codes | None = None
    coded: Any = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    kind: str
    query_us: float
    codes: Codes | None = None
    coded: Any = None


class Chooser:
    """Measures candidates over one set of vectors.

    Args:
        vectors: float32 [n, dim], mapped; cosine's have length 1.
        flat: the exact index of them.
        halved: makes the index of the same vectors in float16, when it is asked for.
        promised: least recall.
        l2: whether nearness is the L2 distance.
        limits: what it may cost.
    """

    def __init__(
        self, vectors: npt.NDArray[Any], flat: Any, halved: Callable[[], Any], promised: float, *, l2: bool, limits: Limits
    ) -> None:
        self._vectors, self._flat, self._halved, self._promised, self._l2, self._limits = (
            vectors,
            flat,
            halved,
            promised,
            l2,
            limits,
        )
        self._began = time.monotonic()

    def choose(self) -> Choice:
        """The fastest candidate that keeps the promise; the exact index where none does, or none pays."""
        rows = len(self._vectors)
        reachable = lower_bound(1.0, _HELD_OUT_QUERIES)
        if rows < self._limits.small_rows:
            return _exact(f"{rows:,} rows: comparing with all of them costs less than it takes to do better")
        if self._promised > reachable:
            return _exact(
                f"a promise above {reachable:.4f} is kept by comparing with every row: {_HELD_OUT_QUERIES:,} queries cannot show more"
            )
        tuning_rows, *held_out = self._drawn(rows)
        tuning = self._queries(tuning_rows)
        exact_us = _median_us(
            [_timed(lambda q: search_flat(self._flat, q, NEIGHBOURS + 1), q)[0] for q in tuning.asked[:_TIMED_EXACT]]
        )
        half = self._halved()
        if not self._is_good(tuning.recall(_flat_found(half, tuning))):
            return replace(_exact("float16 loses neighbours of these vectors"), exact_us=exact_us)
        half_us = _median_us([_timed(lambda q: search_flat(half, q, NEIGHBOURS + 1), q)[0] for q in tuning.asked[:_TIMED_EXACT]])
        found = [_Candidate("float16", half_us), *self._coded(half, tuning, held_out)]
        best = found[0]
        for candidate in found[1:]:
            if candidate.query_us < _WORTH * best.query_us:
                best = candidate
        return self._kept(best, half, half_us, held_out, exact_us)

    def _drawn(self, rows: int) -> list[ROWS]:
        """Rows that ask: those to tune by, and those of every look at what came of it. None is in two of them."""
        share = min(1.0, rows / 2 / (_TUNING_QUERIES + _LOOKS * _HELD_OUT_QUERIES))
        sizes = [int(_TUNING_QUERIES * share), *[int(_HELD_OUT_QUERIES * share)] * _LOOKS]
        drawn = np.random.default_rng(1).permutation(rows)[: sum(sizes)]
        return np.split(drawn, np.cumsum(sizes)[:-1])

    def _queries(self, rows: ROWS) -> Queries:
        """The truth costs as much as the building: 1 s for 1,000 queries of 200,000 rows; so only for those that are looked at."""
        return Queries(self._vectors, rows, self._flat, l2=self._l2)

    def _coded(self, half: Any, tuning: Queries, held_out: list[ROWS]) -> Iterator[_Candidate]:
        """Candidates by code that are good enough on the queries to tune by, the simplest first."""
        asking = np.concatenate([tuning.rows, *held_out])
        spent_s = 0.0
        for codes in candidates(len(self._vectors), self._vectors.shape[1], self._limits):
            # those that follow take longer than those before
            if time.monotonic() - self._began + 2 * spent_s > self._limits.build_s:
                return
            began = time.monotonic()
            coded = trained_codes(self._vectors, asking, codes, l2=self._l2)
            tuned = self._tuned(coded, half, codes, tuning)
            spent_s = time.monotonic() - began
            if tuned is not None:
                yield tuned

    def _tuned(self, coded: Any, half: Any, codes: Codes, tuning: Queries) -> _Candidate | None:
        """The smallest search that is good enough, by bisection: what is rescored, of lists how many are probed, and then again what is rescored."""
        both = refined(coded, half)
        probes = [1] if codes.lists == 1 else [2**power for power in range(codes.lists.bit_length()) if 2**power <= codes.lists]

        def good(tried: Codes) -> bool:
            return self._is_good(_measured(both, tried, tuning)[0])

        tries = [replace_codes(codes, probed=probes[-1], rescored=rescored) for rescored in _RESCORED]
        enough = _first(tries, good)
        if enough is None:
            return None
        if len(probes) > 1:
            ample = replace_codes(enough, rescored=min(2 * enough.rescored, _RESCORED[-1]))
            probed = _first([replace_codes(ample, probed=count) for count in probes], good)
            assert probed is not None
            fewer = _first([replace_codes(probed, rescored=r) for r in _RESCORED if r <= ample.rescored], good)
            enough = fewer or probed
        return _Candidate("codes", _measured(both, enough, tuning)[1], enough, coded)

    def _kept(self, best: _Candidate, half: Any, half_us: float, held_out: list[ROWS], exact_us: float) -> Choice:
        """The candidate, if held-out queries agree; else it goes further, then float16, and at last the exact index. Each look has queries of its own."""
        said = []
        looks = map(self._queries, held_out)
        codes = best.codes
        for widened in (False, True):
            if codes is None or best.coded is None:
                break
            if widened:
                probed = min(2 * codes.probed, codes.lists)
                codes = replace_codes(codes, probed=probed, rescored=2 * codes.rescored)
            queries = next(looks)
            measured, query_us = _measured(refined(best.coded, half), codes, queries)
            recall = measured.mean
            bound = lower_bound(recall, len(queries))
            said.append(f"codes: {recall:.4f}, at least {bound:.4f}")
            if bound >= self._promised:
                told = "; ".join(said)
                return Choice("codes", "float16", recall, bound, len(queries), query_us, exact_us, told, codes, best.coded)
        queries = next(looks)
        recall = queries.recall(_flat_found(half, queries)).mean
        bound = lower_bound(recall, len(queries))
        said.append(f"float16: {recall:.4f}, at least {bound:.4f}")
        if bound >= self._promised:
            return Choice("float16", "float16", recall, bound, len(queries), half_us, exact_us, "; ".join(said))
        return replace(_exact(f"no candidate kept the promise ({'; '.join(said)})"), exact_us=exact_us)

    def _is_good(self, recall: Recall) -> bool:
        """Whether held-out queries may be expected to agree: they will find as much, less twice what chance makes of it."""
        return lower_bound(recall.mean - 2 * recall.error, _HELD_OUT_QUERIES) >= self._promised


def candidates(rows: int, dim: int, limits: Limits) -> list[Codes]:
    """The codes that are tried, the cheapest to build first: of 4 and of 2 numbers each, scanned whole, and of many rows dealt into lists as well."""
    widths = sorted({width for width in (4, 2) if dim % width == 0} or {1}, reverse=True)
    found = [Codes(1, dim // width) for width in widths]
    if rows >= limits.lists_rows:
        lists = 2 ** round(np.log2(2 * np.sqrt(rows)))
        found.append(Codes(lists, dim // widths[0]))
    return [codes for codes in found if rows * codes.bytes_a_row <= limits.memory_mb * 2**20]


def replace_codes(codes: Codes, *, probed: int | None = None, rescored: int | None = None) -> Codes:
    """The same codes, searched further or less far."""
    return Codes(codes.lists, codes.quantizers, probed or codes.probed, rescored or codes.rescored)


def _exact(why: str) -> Choice:
    return Choice("exact", "float32", 1.0, 1.0, 0, None, None, why)


def _flat_found(flat: Any, queries: Queries) -> list[ROWS]:
    _, found = flat.search(queries.asked, NEIGHBOURS + 1)
    return list(found)


def _measured(both: Any, codes: Codes, queries: Queries) -> tuple[Recall, float]:
    """Recall, and the median time of one search (µs), the queries one after the other, by one thread."""
    timed = [_timed(lambda q: search_codes(both, codes, q, NEIGHBOURS + 1), asked) for asked in queries.asked]
    return queries.recall([rows for _, rows in timed]), _median_us([seconds for seconds, _ in timed])


def _timed(search: Callable[[FLOAT], tuple[FLOAT, ROWS]], query: FLOAT) -> tuple[float, ROWS]:
    began = time.perf_counter()
    _, rows = search(query)
    return time.perf_counter() - began, rows


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
