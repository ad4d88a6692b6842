"""One folder of a vector index, opened: its vectors, its codes where it has some, its rows, and which of them count."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from store.errors import VectorIndexError
from store.vectors.faiss_index import (
    BITS,
    FLOAT,
    ROWS,
    mapped_vectors,
    on_gpu,
    open_codes,
    open_flat,
    refined,
    search_codes,
    search_flat,
)
from store.vectors.index_record import CODES, REPLACED, VECTORS, Codes, check_files, read_index_record
from store.vectors.index_rows import IndexRows
from store.vectors.row_filter import RowFilter

FEW_ROWS = 4096
"""So many admitted rows, or fewer, are compared with one by one, whatever the index."""
_FEW_EXCLUDED = 16
"""So many excluded rows are asked for besides, and dropped; more are marked in a bitmap."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows a search may answer with: not those of ``exclude``, only those of ``only`` where it is given, and of these what meets ``where``."""

    exclude: Collection[str] = ()
    only: Collection[str] | None = None
    where: RowFilter | None = None


class IndexPart:
    """An index folder, mapped; every file is compared with its checksum, once, here.

    Args:
        folder: of a base or of an overlay.

    Raises:
        VectorIndexError: it is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.record, self.mark = read_index_record(folder)
            check_files(folder, self.record)
            self.rows = IndexRows(folder)
            self._flat: Any = open_flat(folder / VECTORS)
            self._vectors = mapped_vectors(folder / VECTORS, self.record.dim, self.record.dtype)
            self._codes: Codes | None = self.record.figures.codes
            self._both: Any = None if self._codes is None else refined(open_codes(folder / CODES), self._flat)
            self.replaced: ROWS | None = None if self.record.base is None else _read_replaced(folder)
            shape = (self._flat.d, self._flat.ntotal, len(self.rows))
            if shape != (self.record.dim, self.record.rows, self.record.rows):
                raise ValueError("meta.json does not fit the index")
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as exc:
            raise VectorIndexError(
                f"the vector index {folder} cannot be opened ({exc}): `precompute publish <view> --reload` builds it again"
            ) from exc
        self._whole: Any = on_gpu(self._flat) if self._codes is None else self._flat
        self._gone: BITS | None = None
        self._left: BITS | None = None
        """A bit for each row, lowest first, set where no overlay replaced it; None: all of them. Made once: of 10 M rows a mask takes 10 ms."""
        self.living = len(self.rows)
        self._l2 = self.record.metric == "l2"

    def without(self, gone: ROWS) -> IndexPart:
        """The same part, opened once, without some of its rows.

        Raises:
            VectorIndexError: they are none of its rows.
        """
        if len(gone) and not 0 <= int(gone.min()) <= int(gone.max()) < len(self.rows):
            raise VectorIndexError("the overlay of a vector index names rows that its base has not: publish with --reload")
        left = object.__new__(IndexPart)
        left.__dict__ |= self.__dict__
        mask = np.zeros(len(self.rows), np.bool_)
        mask[gone] = True
        left._gone, left._left = np.packbits(mask, bitorder="little"), np.packbits(~mask, bitorder="little")
        left.living = len(self.rows) - len(gone)
        return left

    def alive(self, rows: ROWS) -> ROWS:
        """Those of ``rows`` that an overlay has not replaced."""
        if self._gone is None or not len(rows):
            return rows
        left: ROWS = rows[(self._gone[rows >> 3] >> (rows & 7) & 1) == 0]
        return left

    def vectors(self, rows: ROWS) -> FLOAT:
        """The vectors of some rows, float32 [n, dim]."""
        found: FLOAT = self._vectors[rows].astype(np.float32)
        return found

    def nearest(self, query: FLOAT, k: int, wanted: Wanted) -> tuple[FLOAT, ROWS]:
        """Scores and rows of the ``k`` nearest that are wanted, best first.

        Args:
            query: float32 [dim], of length 1 for cosine.
            k: how many, at least 1.
            wanted: which rows count.
        """
        if wanted.only is not None:
            rows = np.setdiff1d(self.alive(self.rows.find(wanted.only)), self.rows.find(wanted.exclude))
            if wanted.where is not None:
                rows = rows[wanted.where.admits(self.rows.table.take(pa.array(rows)))]
            return self._among(query, rows, k)
        excluded = self.rows.find(wanted.exclude)
        few_left = self._left is not None and self.living <= FEW_ROWS
        if wanted.where is None and not few_left and len(excluded) <= _FEW_EXCLUDED:
            share = self.living / max(1, len(self.rows))
            scores, rows = self._search(query, min(k + len(excluded), self.living), self._left, share)
            for row in excluded.tolist():
                # 2 µs each, where isin takes 50
                kept = rows != row
                scores, rows = scores[kept], rows[kept]
            return scores[:k], rows[:k]
        bits = self._admitted(wanted.where, excluded)
        count = int(np.bitwise_count(bits).sum())
        if count <= FEW_ROWS:
            return self._among(query, np.flatnonzero(np.unpackbits(bits, count=len(self.rows), bitorder="little")), k)
        return self._search(query, min(k, count), bits, count / len(self.rows))

    def _admitted(self, where: RowFilter | None, excluded: ROWS) -> BITS:
        """A bit for each row, lowest first, set where it may be an answer."""
        if where is None and self._left is not None:
            bits = self._left.copy()
        else:
            mask = np.ones(len(self.rows), np.bool_) if where is None else where.admits(self.rows.table)
            bits = np.packbits(mask, bitorder="little")
            if self._left is not None:
                bits &= self._left
        np.bitwise_and.at(bits, excluded >> 3, ~(1 << (excluded & 7)).astype(np.uint8))
        return bits

    def _search(self, query: FLOAT, k: int, bits: BITS | None, share: float) -> tuple[FLOAT, ROWS]:
        """By code where there are codes. Where only a share of the rows is admitted, the nearest of them lie further away: so many more lists are probed,
        and all of them where too few came back."""
        codes = self._codes
        if codes is None:
            return search_flat(self._whole if bits is None else self._flat, query, k, bits)
        wide = codes._replace(probed=min(codes.lists, int(np.ceil(codes.probed / share))))
        scores, rows = search_codes(self._both, wide, query, k, bits)
        if len(rows) < k and wide.probed < codes.lists:
            scores, rows = search_codes(self._both, codes._replace(probed=codes.lists), query, k, bits)
        return scores, rows

    def _among(self, query: FLOAT, rows: ROWS, k: int) -> tuple[FLOAT, ROWS]:
        """By comparing with each of some rows."""
        if not len(rows):
            return np.zeros(0, np.float32), rows
        vectors = self.vectors(rows)
        # vecdot and not @, for which BLAS takes threads of its own: 25 ms for 2,000 rows on busy cores, and this 0.1
        scores: FLOAT = np.square(vectors - query).sum(axis=1) if self._l2 else np.vecdot(vectors, query)
        best = np.argsort(scores if self._l2 else -scores, kind="stable")[:k]
        return scores[best], rows[best]


def _read_replaced(folder: Path) -> ROWS:
    with pa.ipc.open_file(pa.memory_map(str(folder / REPLACED))) as reader:
        found: ROWS = reader.read_all().column("row").to_numpy()
        return found
