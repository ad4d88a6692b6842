"""Vector index: an opened index, base and changed rows: the nearest rows of a vector feature, by
comparing with each, or by scanning codes and comparing the best until no other row can be nearer.
Built from a snapshot, immutable, found through the live pointer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.errors import RequestError, VectorIndexError
from precompute.store.vectors.index_files import (
    CODES,
    GONE,
    NAME,
    VECTORS,
    Bits,
    Codes,
    Floats,
    IndexFigures,
    RowNumbers,
    check_files,
    mapped_vectors,
    on_gpu,
    open_codes,
    open_flat,
    read_index_record,
    scan_codes,
    search_flat,
    widened,
)
from precompute.store.vectors.index_rows import IndexRows, RowFilter, read_table

FEW_ROWS = 4096
"""Admitted rows up to which they are compared with one by one, whatever the index."""
_FEW_EXCLUDED = 16
"""Up to so many excluded rows a search looks for that many more, and drops them; more are left out
by a bitmap."""
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

    bits: Bits | None
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

    def stored(self, rows: RowNumbers) -> npt.NDArray[Any]:
        """The vectors of some rows as they are stored, [n, dim]."""
        vectors: npt.NDArray[Any] = self._vectors[rows]
        return vectors

    def nearest(
        self, query: Floats, k: int, admitted: Admitted, excluded: RowNumbers
    ) -> tuple[Floats, RowNumbers]:
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

    def among(self, query: Floats, rows: RowNumbers, k: int) -> tuple[Floats, RowNumbers]:
        """The ``k`` nearest of some rows, by comparing with each."""
        if not len(rows):
            return np.zeros(0, np.float32), rows
        return self._best(self._scores(query, rows), rows, k)

    def search(self, query: Floats, k: int, admitted: Admitted) -> tuple[Floats, RowNumbers, float]:
        """The ``k`` nearest that are admitted, and the cost, as a number of rows gathered and
        compared.

        By code the best few are found, and compared again; those rows that come next by code are
        like the last ones that were compared. While these are not ``margin`` standard deviations
        worse than the k-th best, one beyond may be better than it, and four times as many are
        compared. That depends neither on which rows are admitted nor on where the query lies. It is
        bounded: where it would cost more than comparing with all that is admitted, it does that.
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

    def _is_sure(self, scores: Floats, k: int, margin: float) -> bool:
        """Whether the last quarter of the rows, by code, is at least ``margin`` standard deviations
        worse, in the mean, than the k-th best, the tenth for a smaller k."""
        near = -scores if self._l2 else scores
        count = max(k, _LEAST_NEIGHBOURS)
        if len(near) <= count:
            return False
        kth, late = np.partition(near, -count)[-count], near[-max(_LEAST_LATE, len(near) // 4) :]
        # equal vectors are as near, but for the last digit
        return bool(kth - late.mean() >= margin * late.std() - 1e-6 * abs(kth))

    def _scores(self, query: Floats, rows: RowNumbers) -> Floats:
        vectors = widened(self.stored(rows))
        # vecdot and not @, for which BLAS takes threads of its own: 25 ms for 2,000 rows on busy
        # cores, and this 0.1
        scores: Floats = (
            np.square(vectors - query).sum(axis=1) if self._l2 else np.vecdot(vectors, query)
        )
        return scores

    def _best(self, scores: Floats, rows: RowNumbers, k: int) -> tuple[Floats, RowNumbers]:
        best = np.argsort(scores if self._l2 else -scores, kind="stable")[:k]
        return scores[best], rows[best]


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Which rows a search may answer with: not those of ``exclude``, only those of ``only`` where
    it is given, and of these what meets ``where``."""

    exclude: Collection[str] = ()
    only: Collection[str] | None = None
    where: RowFilter | None = None


class IndexLayer:
    """One layer of an index, a base or the rows that changed since, mapped; opening it compares
    every file with its checksum.

    Args:
        folder: of either.

    Raises:
        VectorIndexError: it is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.mark = _mark(folder)
            self.record, _ = read_index_record(folder)
            check_files(folder, self.record)
            self.rows = IndexRows(folder)
            flat: Any = open_flat(folder / VECTORS)
            vectors = mapped_vectors(folder / VECTORS, self.record.dim, self.record.dtype)
            codes = self.record.figures.codes
            coded = None if codes is None else open_codes(folder / CODES)
            self.gone: RowNumbers | None = (
                None
                if self.record.base is None
                else read_table(folder / GONE).column("row").to_numpy()
            )
            shape = (flat.d, flat.ntotal, len(self.rows))
            if shape != (self.record.dim, self.record.rows, self.record.rows):
                raise ValueError("meta.json does not fit the index")
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as exc:
            raise VectorIndexError(
                f"the vector index {folder} cannot be opened ({exc}): `precompute publish <view>"
                " --reload` builds it again"
            ) from exc
        self._nearest = NearestRows(
            flat, vectors, l2=self.record.metric == "l2", coded=coded, codes=codes
        )
        self._gone: Bits | None = None
        self._left: Bits | None = None
        """A bit for each row, lowest first, set where it counts still; None: all of them.
        Made once: of 10 M rows a mask takes 10 ms."""
        self.living = len(self.rows)

    def without(self, gone: RowNumbers) -> IndexLayer:
        """The same layer, opened once, without some of its rows.

        Raises:
            VectorIndexError: one of them is not a row of this layer.
        """
        if len(gone) and not 0 <= int(gone.min()) <= int(gone.max()) < len(self.rows):
            raise VectorIndexError(
                "the changed rows of a vector index name rows that its base has not: publish with"
                " --reload"
            )
        left = object.__new__(IndexLayer)
        left.__dict__ |= self.__dict__
        mask = np.zeros(len(self.rows), np.bool_)
        mask[gone] = True
        left._gone, left._left = (
            np.packbits(mask, bitorder="little"),
            np.packbits(~mask, bitorder="little"),
        )
        left.living = len(self.rows) - len(gone)
        return left

    def alive(self, rows: RowNumbers) -> RowNumbers:
        """Those of ``rows`` that count still."""
        if self._gone is None or not len(rows):
            return rows
        left: RowNumbers = rows[(self._gone[rows >> 3] >> (rows & 7) & 1) == 0]
        return left

    def named(
        self, rows: RowNumbers, *, filtered: bool = False
    ) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[Any]]:
        """The key texts of some rows, when they were computed (µs since 1970), and their vectors as
        they are stored, [n, dim].

        Args:
            rows: which.
            filtered: whether they were found by their scalars.

        Raises:
            VectorIndexError: one is damaged since the index was opened: its key, its time, its
                vector, or, where it was found by them, its scalars.
        """
        vectors = self._nearest.stored(rows)
        return *self.rows.named(rows, vectors, filtered=filtered), vectors

    def nearest(self, query: Floats, k: int, limits: SearchLimits) -> tuple[Floats, RowNumbers]:
        """Scores and rows of the ``k`` nearest rows that ``limits`` admits, best first.

        Args:
            query: float32 [dim], of length 1 for cosine.
            k: how many, at least 1.
            limits: which rows count.
        """
        excluded = self.rows.find(limits.exclude)
        if limits.only is not None:
            rows = np.setdiff1d(self.alive(self.rows.find(limits.only)), excluded)
            if limits.where is not None:
                rows = rows[limits.where.admits(self.rows.table.take(pa.array(rows)))]
            return self._nearest.among(query, rows, k)
        admitted = (
            Admitted(self._left, self.living)
            if limits.where is None
            else self._filtered(limits.where)
        )
        return self._nearest.nearest(query, k, admitted, excluded)

    def _filtered(self, where: RowFilter) -> Admitted:
        bits = np.packbits(where.admits(self.rows.table), bitorder="little")
        if self._left is not None:
            bits &= self._left
        return Admitted(bits, int(np.bitwise_count(bits).sum()))


class Neighbours(NamedTuple):
    """What a search found, best first: key texts, for each the cosine or dot product (larger is
    nearer) or the squared L2 distance (smaller is nearer), and when the row was computed, µs since
    1970."""

    keys: list[str]
    scores: list[float]
    computed_at_us: list[int]


class Found(NamedTuple):
    """A row of the index by its key: its vector, float32 [dim], of length 1 for cosine; and when it
    was computed, µs since 1970."""

    vector: Floats
    computed_at_us: int


class VectorIndex:
    """Nearest neighbours over one snapshot's vectors; safe to search from several threads.

        <root>/<view>/index/<name>/   vectors.faiss · codes.faiss where that pays ·
                                      rows.arrow · hashes.arrow · meta.json; a base's: parts.arrow;
                                      of changed rows: gone.arrow

    Which kind it is and what it was measured to find stands in its figures. Everything is mapped
    but the codes and the offsets of text scalars; every file's checksum is compared once, here.

    Args:
        folder: what :func:`precompute.store.vectors.index_build.build_index` wrote.
        changed: what :func:`precompute.store.vectors.index_build.build_changed` wrote over it, or
            None.
        opened: an index already open; its base is used again where it is the very same.

    Raises:
        VectorIndexError: missing, damaged, or changed rows of another base.
    """

    def __init__(
        self, folder: Path, changed: Path | None = None, *, opened: VectorIndex | None = None
    ) -> None:
        base = (
            IndexLayer(folder)
            if opened is None or opened.base.mark != _mark(folder)
            else opened.base
        )
        if base.record.base is not None:
            raise VectorIndexError(
                f"the vector index {folder} is of changed rows, and nothing by itself"
            )
        self.base: IndexLayer = base
        self._layers = [base]
        if changed is not None:
            over = IndexLayer(changed)
            if over.record.base != folder.name or over.gone is None:
                raise VectorIndexError(
                    f"the vector index {changed} lies over another base than {folder}: publish with"
                    " --reload"
                )
            self._layers = [base.without(over.gone), over]
        self.metric: str = base.record.metric
        self.dim: int = base.record.dim
        self.dtype: str = base.record.dtype
        self.model: str = base.record.model
        self.figures: IndexFigures = base.record.figures

    def __len__(self) -> int:
        return sum(layer.living for layer in self._layers)

    def find(self, key: str) -> Found | None:
        """The row of a key; None when it is not here, or its vector is null.

        Raises:
            VectorIndexError: it is damaged.
        """
        for layer in reversed(self._layers):
            rows = layer.alive(layer.rows.find([key]))
            if len(rows):
                _, times, vectors = layer.named(rows)
                return Found(widened(vectors)[0], int(times[0]))
        return None

    def there(self, keys: Collection[str]) -> set[str]:
        """Those of some keys that have a row here.

        Raises:
            VectorIndexError: one is damaged.
        """
        return {
            key
            for layer in self._layers
            for key in layer.named(layer.alive(layer.rows.find(keys)))[0]
        }

    def search(
        self,
        vector: npt.ArrayLike,
        k: int,
        *,
        exclude: Collection[str] = (),
        only: Collection[str] | None = None,
        where: RowFilter | None = None,
    ) -> Neighbours:
        """The ``k`` nearest rows.

        Args:
            vector: [dim] numbers.
            k: how many; fewer come back where fewer are admitted.
            exclude: keys left out of the answer.
            only: the only keys that may be in it; all by default.
            where: what rows must be like.

        Raises:
            RequestError: no list of ``dim`` finite numbers, or all zeros for cosine.
            VectorIndexError: a row that was found is damaged.
        """
        query = self._checked(vector)
        limits = SearchLimits(exclude, only, where)
        found = [
            (layer, *layer.nearest(query, k, limits)) for layer in self._layers if layer.living
        ]
        if not found:
            return Neighbours([], [], [])
        if len(found) == 1:
            layer, scores, rows = found[0]
            keys, times, _ = layer.named(rows, filtered=where is not None)
            return Neighbours(keys, scores.tolist(), times.tolist())
        named = [layer.named(rows, filtered=where is not None) for layer, _, rows in found]
        keys = [key for texts, _, _ in named for key in texts]
        every = np.concatenate([scores for _, scores, _ in found])
        times = np.concatenate([computed_at_us for _, computed_at_us, _ in named])
        best = np.argsort(every if self.metric == "l2" else -every, kind="stable")[:k]
        return Neighbours(
            [keys[i] for i in best.tolist()], every[best].tolist(), times[best].tolist()
        )

    def _checked(self, vector: npt.ArrayLike) -> Floats:
        """A query as float32 [dim], of length 1 for cosine.

        Raises:
            RequestError: it cannot be one.
        """
        try:
            wide = np.asarray(vector, np.float64)
        except (ValueError, TypeError) as exc:
            raise RequestError("the vector is not a list of numbers", code="bad_vector") from exc
        if isinstance(vector, str) or wide.ndim != 1:
            raise RequestError("the vector is not a list of numbers", code="bad_vector")
        if len(wide) != self.dim:
            raise RequestError(
                f"the vector has {len(wide)} numbers, this index takes {self.dim}",
                code="bad_vector",
            )
        largest = np.abs(wide).max(initial=0.0)
        # NaN is not, either.
        if not largest <= np.finfo(np.float32).max:
            raise RequestError(
                "the vector has a number that is not a finite float32", code="bad_vector"
            )
        if self.metric == "cosine":
            if largest == 0:
                raise RequestError(
                    "the vector is all zeros, which has no direction for cosine", code="bad_vector"
                )
            # So that squares neither overflow nor vanish.
            wide = wide / largest
            wide /= np.linalg.norm(wide)
        return wide.astype(np.float32)


def is_there(folder: Path) -> bool:
    """Whether an index's files are there, each of its size; opening it shows whether they are
    whole."""
    return _mark(folder) is not None


def _mark(folder: Path) -> tuple[str, int, int] | None:
    """The mark of its record, and that file's inode and time of change (ns), which are others of
    one that was built again; None where it is not there."""
    try:
        stat = (folder / NAME).stat()
        return read_index_record(folder)[1], stat.st_ino, stat.st_mtime_ns
    except (OSError, ValueError):
        return None
