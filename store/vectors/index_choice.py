"""Index choice: which index a view's vectors get, by their number and by measured recall: codes if
they reach the promised recall for every kind of query, else float16, else the exact one. The same
rows get the same index: no time that was measured decides. Recall is measured for ten kinds of
queries.

Measured first, and left out (docs/decisions.md): HNSW, IVF with 8 bits a number, and rows dealt
into lists, which a filter leads astray.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.vectors import vector_index
from precompute.store.vectors.index_files import (
    Codes,
    Floats,
    QueryRecall,
    RowNumbers,
    batches_of,
    nearest_of_some,
    search_flat,
    trained_codes,
)
from precompute.store.vectors.vector_index import Admitted, NearestRows

NEIGHBOURS = 10
CONFIDENCE_Z = 2.326
"""Of a normal variable: 99 % lie below. At most three candidates are tried, each with its own
queries: together 97 %."""


def lower_bound(recall: float, queries: int, z: float = CONFIDENCE_Z) -> float:
    """What the recall of all queries is at least, by Wilson's score interval with each query as one
    trial (Wilson 1927).

    A query's recall is a share, not a coin: but nothing between 0 and 1 varies more than a coin
    with the same mean, so the bound holds whatever the ten neighbours of one query have in common.
    Ten times as many trials, one for every neighbour, would not: a query whose neighbours are coded
    badly loses several at once. A bootstrap over queries is tighter, and says 1.0 of a sample in
    which nothing was missed; this says 0.995 of 1,024.

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
    """The share of the nearest that was found: its mean over the queries, and the standard error of
    that."""

    mean: float
    error: float


class Queries:
    """Queries of one kind, and the truth about them: the nearest rows that each may find, by
    comparing with every one.

    Args:
        vectors: float32 [n, dim] of the index, perhaps mapped.
        queries: the queries, float32 [queries, dim].
        admitted: for each query which rows it may find.
        excluded: for each query which of these it may not, most often the query's own row.
        nearest: for each query the true nearest rows of those left, at least :data:`NEIGHBOURS` or
            all.
        l2: whether nearness is the L2 distance.
        by: the feature that is filtered by.
    """

    def __init__(
        self,
        vectors: npt.NDArray[Any],
        queries: Floats,
        admitted: Sequence[Admitted],
        excluded: Sequence[RowNumbers],
        nearest: Sequence[RowNumbers],
        *,
        l2: bool,
        by: str | None = None,
    ) -> None:
        self.vectors, self.admitted, self.excluded, self.by = queries, admitted, excluded, by
        self._vectors, self._l2 = vectors, l2
        true = [self._scores(number, rows[:NEIGHBOURS]) for number, rows in enumerate(nearest)]
        self._worst = np.array([scores[-1] if len(scores) else np.inf for scores in true])
        self._possible = np.array([max(1, len(scores)) for scores in true])

    def __len__(self) -> int:
        return len(self.vectors)

    def search(self, rows: NearestRows, number: int) -> RowNumbers:
        """What one of the queries finds."""
        return rows.nearest(
            self.vectors[number], NEIGHBOURS, self.admitted[number], self.excluded[number]
        )[1]

    def searched(self, rows: NearestRows) -> list[RowNumbers]:
        """What each of the queries finds, one after the other, by one thread."""
        return [self.search(rows, number) for number in range(len(self))]

    def recall(self, found: Sequence[RowNumbers]) -> Recall:
        """The share of the nearest that was found.

        A row counts when it is as near as the last of the true ones: of rows with the very same
        vector any will do.

        Args:
            found: what a search gave for each query, without what is excluded; the first
                :data:`NEIGHBOURS` count.
        """
        shares = []
        for number, rows in enumerate(found):
            scores, limit = self._scores(number, rows[rows >= 0][:NEIGHBOURS]), self._worst[number]
            shares.append(
                min(
                    1.0,
                    float((scores >= limit - 1e-6 * abs(limit)).sum())
                    / float(self._possible[number]),
                )
            )
        return Recall(float(np.mean(shares)), float(np.std(shares)) / math.sqrt(len(shares)))

    def _scores(self, number: int, rows: RowNumbers) -> Floats:
        """How near some rows are to a query, more is nearer, the best first."""
        vectors, query = self._vectors[rows], self.vectors[number]
        scores: Floats = -np.square(vectors - query).sum(axis=1) if self._l2 else vectors @ query
        return np.sort(scores)[::-1]


SHARES = {"filter_50": 0.5, "filter_20": 0.2, "filter_5": 0.05, "filter_1": 0.01}
"""Kinds whose filter admits about this share of the rows, by a scalar feature of the view where one
does, else drawn at random."""
EXCLUSIONS = {"exclude_10": 10, "exclude_100": 100}
"""Kinds that leave out this many of a query's own nearest rows: "like this, but not what I have
seen"."""
UNFILTERED = ("plain", *EXCLUSIONS, "noisy", "far")
"""Kinds that may find every row but what they exclude. ``plain`` are rows, without themselves;
``noisy`` are rows with half of the query rows' spread added as noise; ``far``
has nothing of a row but the mean and the spread of all."""
KINDS = (*UNFILTERED, *SHARES, "elsewhere")
"""All kinds. ``elsewhere`` admits about half of the rows, those in regions where the query does not
lie, such as texts in another language."""

_REGIONS = 64
_SAMPLED_VALUES = 65_536
_NEAR_ENOUGH = 1.5


class QueryKinds:
    """Makes the queries of every kind, and the truth about them, from the query rows.

    Args:
        vectors: float32 [n, dim], perhaps mapped; cosine's have length 1.
        scalars: the scalar features of the same rows, in their order, by which a search can filter.
        metric: ``cosine``, ``dot`` or ``l2``.
    """

    def __init__(self, vectors: npt.NDArray[Any], scalars: pa.Table, metric: str) -> None:
        self._vectors, self._metric, self._l2 = vectors, metric, metric == "l2"
        self._all = Admitted(None, len(vectors))
        rng = np.random.default_rng(2)
        self._filters = {name: _predicate(scalars, share, rng) for name, share in SHARES.items()}
        self._halves = self._regions(rng)

    def of(self, query_rows: RowNumbers, *, filtered: bool = True) -> Iterator[tuple[str, Queries]]:
        """Each kind and its queries, one after the other.

        Args:
            query_rows: the rows whose vectors are queries; the queries of every kind are as many.
            filtered: whether the kinds that may not find every row are made, too.
        """
        queries = np.ascontiguousarray(self._vectors[query_rows])
        yield from self._excluding(queries, query_rows)
        rng = np.random.default_rng(3)
        mean, spread = queries.mean(axis=0), queries.std(axis=0)
        noise = spread * rng.standard_normal(queries.shape, dtype=np.float32)
        yield "noisy", self._plain(self._of_length_1(queries + noise / 2))
        yield "far", self._plain(self._of_length_1(mean + noise))
        if not filtered:
            return
        for name, (mask, by) in self._filters.items():
            yield name, self._filtered(queries, query_rows, [mask] * len(query_rows), by)
        # by the half of the query: the other one
        masks = [self._halves, ~self._halves]
        yield (
            "elsewhere",
            self._filtered(
                queries, query_rows, [masks[int(self._halves[row])] for row in query_rows], None
            ),
        )

    def _excluding(self, queries: Floats, query_rows: RowNumbers) -> Iterator[tuple[str, Queries]]:
        """The kinds ``plain`` and :data:`EXCLUSIONS`: each query leaves out its own row, the latter
        also that many of its nearest, all from one search."""
        most = min(len(self._vectors), max(EXCLUSIONS.values()) + NEIGHBOURS + 1)
        order = nearest_of_some(self._vectors, None, queries, most, l2=self._l2)
        others = [found[found != row] for found, row in zip(order, query_rows, strict=True)]
        for name, left_out in {"plain": 0, **EXCLUSIONS}.items():
            excluded = [
                np.append(found[:left_out], row)
                for found, row in zip(others, query_rows, strict=True)
            ]
            nearest = [found[left_out:] for found in others]
            yield (
                name,
                Queries(
                    self._vectors,
                    queries,
                    [self._all] * len(queries),
                    excluded,
                    nearest,
                    l2=self._l2,
                ),
            )

    def _plain(self, queries: Floats) -> Queries:
        nearest = nearest_of_some(
            self._vectors, None, queries, min(NEIGHBOURS, len(self._vectors)), l2=self._l2
        )
        nothing = [np.zeros(0, np.int64)] * len(queries)
        return Queries(
            self._vectors, queries, [self._all] * len(queries), nothing, list(nearest), l2=self._l2
        )

    def _filtered(
        self,
        queries: Floats,
        query_rows: RowNumbers,
        masks: list[npt.NDArray[np.bool_]],
        by: str | None,
    ) -> Queries:
        """The queries, each with a mask of its own, of which only a few are different ones."""
        admitted: list[Admitted] = [self._all] * len(query_rows)
        nearest: list[RowNumbers] = [np.zeros(0, np.int64)] * len(query_rows)
        for mask in {id(mask): mask for mask in masks}.values():
            rows = np.flatnonzero(mask)
            whose = [number for number, own in enumerate(masks) if own is mask]
            one = Admitted(np.packbits(mask, bitorder="little"), len(rows))
            found = nearest_of_some(
                self._vectors, rows, queries[whose], min(NEIGHBOURS + 1, len(rows)), l2=self._l2
            )
            for number, order in zip(whose, found, strict=True):
                admitted[number], nearest[number] = one, order[order != query_rows[number]]
        excluded = [np.array([row]) for row in query_rows]
        return Queries(self._vectors, queries, admitted, excluded, nearest, l2=self._l2, by=by)

    def _of_length_1(self, queries: Floats) -> Floats:
        if self._metric != "cosine":
            return queries
        lengths = np.linalg.norm(queries, axis=1, keepdims=True)
        return np.asarray(queries / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)

    def _regions(self, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
        """Which half each row belongs to: that of the nearest of some rows drawn at random, which
        are halved. By distance, whatever the metric: of dot products the longest would have them
        all."""
        rows = len(self._vectors)
        centres = np.ascontiguousarray(
            self._vectors[np.sort(rng.choice(rows, min(_REGIONS, rows), replace=False))]
        )
        halves = np.arange(len(centres)) % 2 == 0
        nearest = [
            nearest_of_some(centres, None, np.ascontiguousarray(part), 1, l2=True)[:, 0]
            for part in batches_of(self._vectors)
        ]
        found: npt.NDArray[np.bool_] = halves[np.concatenate(nearest)]
        return found


def _predicate(
    scalars: pa.Table, share: float, rng: np.random.Generator
) -> tuple[npt.NDArray[np.bool_], str | None]:
    """A mask of the rows that a filter by one feature admits, about ``share`` of them, and the
    feature's name; where several come near enough, one of them drawn at random; where none does,
    rows drawn at random, and None."""
    rows, found = scalars.num_rows, list[tuple[npt.NDArray[np.bool_], str]]()
    for name in scalars.column_names:
        mask = _admitting(scalars.column(name), share)
        if mask is not None and share / _NEAR_ENOUGH <= mask.mean() <= share * _NEAR_ENOUGH:
            found.append((mask, name))
    if found:
        return found[int(rng.integers(len(found)))]
    return rng.random(rows) < share, None


def _admitting(column: pa.ChunkedArray, share: float) -> npt.NDArray[np.bool_] | None:
    """Rows up to the quantile of a number; those that have the value whose share is nearest, of
    anything else; None where nothing has a value."""
    kind = column.type
    if column.null_count == len(column):
        return None
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        sample = column.slice(0, _SAMPLED_VALUES).drop_null()
        if not len(sample):
            return None
        limit = pc.quantile(sample, q=share, interpolation="lower")[0]
        return _mask(pc.less_equal(column, limit.cast(kind)))
    counts = pc.value_counts(column.slice(0, _SAMPLED_VALUES).drop_null())
    if not len(counts):
        return None
    of_value = counts.field("counts").to_numpy()
    nearest = int(np.argmin(np.abs(np.log(of_value / (share * min(len(column), _SAMPLED_VALUES))))))
    return _mask(pc.equal(column, counts.field("values")[nearest]))


def _mask(admits: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.asarray(pc.fill_null(admits, False), np.bool_)
    return found


_ROUNDING_QUERIES, _TUNING_QUERIES, _HELD_OUT_QUERIES, _TRIALS = 512, 128, 512, 3
"""How many query rows measure what float16 loses; how many of these tune codes; how many each trial
takes, held out; and how many trials there are."""
_TIMED_EXACT = 8
_RESCORED = tuple(20 * 2**power for power in range(8))
"""20 to 2,560 rows are compared again at first for 10 neighbours."""
_MARGINS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0)
_WORTH = 0.5
"""Codes pay where a plain search costs no more than this share of comparing with all rows."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an index may cost.

    ``memory_mb`` bounds the codes, which lie in memory in every process that searches; the vectors
    are mapped. With fewer rows than ``small_rows``, or fewer numbers in all vectors together than
    ``small_numbers``, nothing is measured and the index is exact: 8,192 × 384 take 0.2 ms, and a
    search by code takes 0.1.
    """

    memory_mb: int = 1024
    small_rows: int = 8192
    small_numbers: int = 2**20


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and what was measured of it.

    ``coded`` is FAISS's index of the codes, None without. ``by_query`` has what each kind of query
    found, of rows held out.
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
        halved: makes the index of the same vectors in float16, when it is wanted, and gives it and
            its vectors.
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
        self._promised, self._metric, self._l2, self._limits = (
            promised,
            metric,
            metric == "l2",
            limits,
        )

    def choose(self) -> Choice:
        """The narrowest codes that can be tuned, if held-out queries confirm them; else float16, if
        they confirm that; else the exact index."""
        rows, numbers = len(self._vectors), self._vectors.size
        reachable = lower_bound(1.0, _HELD_OUT_QUERIES)
        if rows < self._limits.small_rows or numbers < self._limits.small_numbers:
            return _exact(
                f"{rows:,} rows: comparing with all of them costs less than it takes to do better"
            )
        if self._promised > reachable:
            return _exact(
                f"a promise above {reachable:.4f} is met by comparing with every row:"
                f" {_HELD_OUT_QUERIES:,} queries cannot show more"
            )
        rounding, *held_out = self._drawn(rows)
        kinds = QueryKinds(self._vectors, self._scalars, self._metric)
        tuning = dict(kinds.of(rounding[:_TUNING_QUERIES]))
        exact_us = self._flat_us(self._flat, tuning["plain"])
        flat, vectors = self._halved()
        rounded = _by_flat(flat, dict(kinds.of(rounding, filtered=False)))
        dtype = (
            "float16" if all(self._is_good(recall) for recall, _ in rounded.values()) else "float32"
        )
        if dtype == "float32":
            flat, vectors = self._flat, self._vectors
        trials, said = iter(held_out), list[str]()
        for codes, coded in self._coded(np.concatenate([rounding, *held_out])):

            def by(codes: Codes, coded: Any = coded) -> NearestRows:
                return NearestRows(flat, vectors, l2=self._l2, coded=coded, codes=codes)

            tuned = self._tuned(by, codes, tuning)
            if tuned is None:
                continue
            for further in (
                tuned,
                tuned._replace(rescored=2 * tuned.rescored, margin=tuned.margin + 1),
            ):
                measured = self._measured(by(further), kinds, next(trials))
                said.append(_in_words("codes", measured))
                if self._holds(measured):
                    us = measured["plain"].query_us
                    return Choice(
                        "codes", dtype, "; ".join(said), measured, us, exact_us, further, coded
                    )
            break
        if dtype == "float32":
            said.append("float16 loses neighbours of these vectors")
        else:
            found = _by_flat(flat, dict(kinds.of(next(trials), filtered=False)))
            measured = {
                name: _figures(recall, queries, None) for name, (recall, queries) in found.items()
            }
            said.append(_in_words("float16", measured))
            if self._holds(measured):
                return Choice(
                    "float16",
                    "float16",
                    "; ".join(said),
                    measured,
                    self._flat_us(flat, tuning["plain"]),
                    exact_us,
                )
        return replace(
            _exact(f"no candidate met the promise ({'; '.join(said)})"), exact_us=exact_us
        )

    def _drawn(self, rows: int) -> list[RowNumbers]:
        """Query rows: those to measure rounding and to tune by, and those of every held-out trial.
        None is in two of them."""
        share = min(1.0, rows / 2 / (_ROUNDING_QUERIES + _TRIALS * _HELD_OUT_QUERIES))
        sizes = [int(_ROUNDING_QUERIES * share), *[int(_HELD_OUT_QUERIES * share)] * _TRIALS]
        drawn = np.random.default_rng(1).permutation(rows)[: sum(sizes)]
        return np.split(drawn, np.cumsum(sizes)[:-1])

    def _coded(self, query_rows: RowNumbers) -> Iterator[tuple[Codes, Any]]:
        for codes in candidates(len(self._vectors), self._vectors.shape[1], self._limits):
            yield codes, trained_codes(self._vectors, query_rows, codes, l2=self._l2)

    def _tuned(
        self, by: Callable[[Codes], NearestRows], codes: Codes, tuning: dict[str, Queries]
    ) -> Codes | None:
        """The codes with their search tuned: first how many rows are compared again, as few as make
        plain queries cheapest, then the least margin that is good for every kind. None where no
        margin is, or where it does not pay."""
        plain, everything = tuning["plain"], Admitted(None, len(self._vectors))

        def cost(tried: Codes) -> float:
            return statistics.mean(
                by(tried).search(query, NEIGHBOURS + 1, everything)[2] for query in plain.vectors
            )

        def good(tried: Codes) -> bool:
            return all(
                self._is_good(queries.recall(queries.searched(by(tried))))
                for queries in reversed(tuning.values())
            )

        start = min((codes._replace(rescored=rescored) for rescored in _RESCORED), key=cost)
        tuned = _first([start._replace(margin=margin) for margin in _MARGINS], good)
        pays = (
            tuned is not None and cost(tuned) <= _WORTH * vector_index.STREAMED * everything.total
        )
        return tuned if pays else None

    def _measured(
        self, rows: NearestRows, kinds: QueryKinds, query_rows: RowNumbers
    ) -> dict[str, QueryRecall]:
        """What every kind of query finds, the queries one after the other, by one thread."""
        measured = {}
        for name, queries in kinds.of(query_rows):
            began, found, seconds = time.perf_counter(), list[RowNumbers](), list[float]()
            for number in range(len(queries)):
                found.append(queries.search(rows, number))
                seconds.append(-began + (began := time.perf_counter()))
            measured[name] = _figures(queries.recall(found), queries, _median_us(seconds))
        return measured

    def _flat_us(self, flat: Any, queries: Queries) -> float:
        seconds = []
        for query in queries.vectors[:_TIMED_EXACT]:
            began = time.perf_counter()
            search_flat(flat, query, NEIGHBOURS + 1)
            seconds.append(time.perf_counter() - began)
        return _median_us(seconds)

    def _is_good(self, recall: Recall) -> bool:
        """Whether held-out queries may be expected to keep the promise, were they to find two
        standard errors less."""
        return lower_bound(recall.mean - 2 * recall.error, _HELD_OUT_QUERIES) >= self._promised

    def _holds(self, measured: dict[str, QueryRecall]) -> bool:
        return all(kind.recall_bound >= self._promised for kind in measured.values())


def candidates(rows: int, dim: int, limits: Limits) -> list[Codes]:
    """The codes that are tried, the narrowest first: of 4 and of 2 numbers each, or of 1 where the
    dimension is odd; none beyond the memory."""
    widths = sorted({width for width in (4, 2) if dim % width == 0} or {1}, reverse=True)
    found = [Codes(dim // width) for width in widths]
    return [codes for codes in found if rows * codes.bytes_a_row <= limits.memory_mb * 2**20]


def _exact(why: str) -> Choice:
    return Choice("exact", "float32", why)


def _by_flat(flat: Any, kinds: dict[str, Queries]) -> dict[str, tuple[Recall, Queries]]:
    """Recall of a search that compares with every row, for each kind of query without a filter: it
    loses by rounding alone, so filters need no trial of their own."""
    recalls = {}
    for name, queries in kinds.items():
        most = max(len(excluded) for excluded in queries.excluded)
        _, found = flat.search(queries.vectors, min(flat.ntotal, NEIGHBOURS + most))
        left = [
            rows[~np.isin(rows, excluded)]
            for rows, excluded in zip(found, queries.excluded, strict=True)
        ]
        recalls[name] = (queries.recall(left), queries)
    return recalls


def _figures(recall: Recall, queries: Queries, query_us: float | None) -> QueryRecall:
    bound = lower_bound(recall.mean, len(queries))
    return QueryRecall(round(recall.mean, 6), round(bound, 6), len(queries), query_us, queries.by)


def _in_words(kind: str, measured: dict[str, QueryRecall]) -> str:
    name, least = min(measured.items(), key=lambda item: item[1].recall_bound)
    return f"{kind}: {least.recall_at_10:.4f}, at least {least.recall_bound:.4f}, of {name} queries"


def _median_us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


def _first(tries: list[Codes], good: Callable[[Codes], bool]) -> Codes | None:
    """The first of ``tries``, each of which goes further than the one before, that is good; found
    by bisection."""
    low, high = 0, len(tries)
    while low < high:
        middle = (low + high) // 2
        if good(tries[middle]):
            high = middle
        else:
            low = middle + 1
    return tries[low] if low < len(tries) else None
