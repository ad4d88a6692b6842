"""The kinds of query that a promised recall is measured for: every one that a search can be, plain and with what the API offers to leave rows out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.vectors.faiss_index import FLOAT, ROWS, nearest_of_some
from precompute.store.vectors.nearest_rows import Admitted
from precompute.store.vectors.recall import NEIGHBOURS, Queries

SHARES = {"filter_50": 0.5, "filter_20": 0.2, "filter_5": 0.05, "filter_1": 0.01}
"""Kinds whose filter admits about so many of the rows, by a scalar feature of the view where one does, else drawn at random."""
EXCLUSIONS = {"exclude_10": 10, "exclude_100": 100}
"""Kinds that leave out so many of a query's own nearest rows: "like this, but not what I have seen"."""
UNFILTERED = ("plain", *EXCLUSIONS, "noisy", "far")
"""Kinds that may find every row but what they exclude. ``plain`` are rows, without themselves; ``noisy`` are rows with half of their spread added as noise; ``far``
has nothing of a row but the mean and the spread of all."""
KINDS = (*UNFILTERED, *SHARES, "elsewhere")
"""All. ``elsewhere`` admits about half of the rows, and of the regions that rows lie in: those that the query does not lie in, as of texts those in another language."""

_REGIONS = 64
_SAMPLED_VALUES = 65_536
_NEAR_ENOUGH = 1.5


class QueryKinds:
    """Makes the queries of every kind, and the truth about them, from some rows that ask.

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
        self._colours = self._regions(rng)

    def of(self, asking: ROWS, *, filtered: bool = True) -> Iterator[tuple[str, Queries]]:
        """Each kind and its queries, one after the other.

        Args:
            asking: the rows that ask; the queries of every kind are as many.
            filtered: whether those that may not find every row are wanted, too.
        """
        asked = np.ascontiguousarray(self._vectors[asking])
        yield from self._excluding(asked, asking)
        rng = np.random.default_rng(3)
        mean, spread = asked.mean(axis=0), asked.std(axis=0)
        noise = spread * rng.standard_normal(asked.shape, dtype=np.float32)
        yield "noisy", self._plain(self._of_length_1(asked + noise / 2))
        yield "far", self._plain(self._of_length_1(mean + noise))
        if not filtered:
            return
        for name, (mask, by) in self._filters.items():
            yield name, self._filtered(asked, asking, [mask] * len(asking), by)
        masks = [~self._colours, self._colours]
        yield "elsewhere", self._filtered(asked, asking, [masks[int(self._colours[row])] for row in asking], None)

    def _excluding(self, asked: FLOAT, asking: ROWS) -> Iterator[tuple[str, Queries]]:
        """Without the row that asks alone, and without its nearest besides: of one list of the nearest."""
        most = min(len(self._vectors), max(EXCLUSIONS.values()) + NEIGHBOURS + 1)
        order = nearest_of_some(self._vectors, None, asked, most, l2=self._l2)
        others = [found[found != row] for found, row in zip(order, asking, strict=True)]
        for name, left_out in {"plain": 0, **EXCLUSIONS}.items():
            excluded = [np.append(found[:left_out], row) for found, row in zip(others, asking, strict=True)]
            nearest = [found[left_out:] for found in others]
            yield name, Queries(self._vectors, asked, [self._all] * len(asked), excluded, nearest, l2=self._l2)

    def _plain(self, asked: FLOAT) -> Queries:
        nearest = nearest_of_some(self._vectors, None, asked, min(NEIGHBOURS, len(self._vectors)), l2=self._l2)
        nobody = [np.zeros(0, np.int64)] * len(asked)
        return Queries(self._vectors, asked, [self._all] * len(asked), nobody, list(nearest), l2=self._l2)

    def _filtered(self, asked: FLOAT, asking: ROWS, masks: list[npt.NDArray[np.bool_]], by: str | None) -> Queries:
        """Each query with a mask of its own, of which only a few are different ones."""
        admitted: list[Admitted] = [self._all] * len(asking)
        nearest: list[ROWS] = [np.zeros(0, np.int64)] * len(asking)
        for mask in {id(mask): mask for mask in masks}.values():
            rows = np.flatnonzero(mask)
            whose = [number for number, own in enumerate(masks) if own is mask]
            one = Admitted(np.packbits(mask, bitorder="little"), len(rows))
            found = nearest_of_some(self._vectors, rows, asked[whose], min(NEIGHBOURS + 1, len(rows)), l2=self._l2)
            for number, order in zip(whose, found, strict=True):
                admitted[number], nearest[number] = one, order[order != asking[number]]
        excluded = [np.array([row]) for row in asking]
        return Queries(self._vectors, asked, admitted, excluded, nearest, l2=self._l2, by=by)

    def _of_length_1(self, asked: FLOAT) -> FLOAT:
        if self._metric != "cosine":
            return asked
        lengths = np.linalg.norm(asked, axis=1, keepdims=True)
        return np.asarray(asked / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)

    def _regions(self, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
        """Rows by the nearest of some of them: half of these are of one colour, and each row has that of its own. By distance, whatever the metric: of dot
        products the longest would have them all."""
        rows = len(self._vectors)
        centres = np.ascontiguousarray(self._vectors[np.sort(rng.choice(rows, min(_REGIONS, rows), replace=False))])
        colours = np.arange(len(centres)) % 2 == 0
        nearest = [
            nearest_of_some(centres, None, np.ascontiguousarray(self._vectors[start : start + 65536]), 1, l2=True)[:, 0]
            for start in range(0, rows, 65536)
        ]
        found: npt.NDArray[np.bool_] = colours[np.concatenate(nearest)]
        return found


def _predicate(scalars: pa.Table, share: float, rng: np.random.Generator) -> tuple[npt.NDArray[np.bool_], str | None]:
    """Rows that a filter by one feature admits, about so many of them, and the feature; of those that come nearly as near to ``share`` each kind has its turn. Where none does, rows
    drawn at random."""
    rows, found = scalars.num_rows, list[tuple[npt.NDArray[np.bool_], str]]()
    for name in scalars.column_names:
        mask = _admitting(scalars.column(name), share)
        if mask is not None and share / _NEAR_ENOUGH <= mask.mean() <= share * _NEAR_ENOUGH:
            found.append((mask, name))
    if found:
        return found[int(rng.integers(len(found)))]
    return rng.random(rows) < share, None


def _admitting(column: pa.ChunkedArray, share: float) -> npt.NDArray[np.bool_] | None:
    """Rows up to the quantile of a number; those that have the value whose share is nearest, of anything else; None where nothing has a value."""
    kind = column.type
    if column.null_count == len(column):
        return None
    if (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and column.null_count < len(column):
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
