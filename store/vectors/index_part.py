"""One folder of a vector index, opened: its vectors, its codes where it has some, its rows, and which of them count."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.store.errors import VectorIndexError
from precompute.store.vectors.faiss_index import BITS, FLOAT, ROWS, mapped_vectors, open_codes, open_flat
from precompute.store.vectors.index_record import CODES, REPLACED, VECTORS, check_files, read_index_record
from precompute.store.vectors.index_rows import IndexRows
from precompute.store.vectors.nearest_rows import Admitted, NearestRows
from precompute.store.vectors.row_filter import RowFilter


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
            flat: Any = open_flat(folder / VECTORS)
            vectors = mapped_vectors(folder / VECTORS, self.record.dim, self.record.dtype)
            codes = self.record.figures.codes
            coded = None if codes is None else open_codes(folder / CODES)
            self.replaced: ROWS | None = None if self.record.base is None else _read_replaced(folder)
            shape = (flat.d, flat.ntotal, len(self.rows))
            if shape != (self.record.dim, self.record.rows, self.record.rows):
                raise ValueError("meta.json does not fit the index")
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as exc:
            raise VectorIndexError(
                f"the vector index {folder} cannot be opened ({exc}): `precompute publish <view> --reload` builds it again"
            ) from exc
        self._nearest = NearestRows(flat, vectors, l2=self.record.metric == "l2", coded=coded, codes=codes)
        self._gone: BITS | None = None
        self._left: BITS | None = None
        """A bit for each row, lowest first, set where no overlay replaced it; None: all of them. Made once: of 10 M rows a mask takes 10 ms."""
        self.living = len(self.rows)

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
        return self._nearest.vectors(rows)

    def nearest(self, query: FLOAT, k: int, wanted: Wanted) -> tuple[FLOAT, ROWS]:
        """Scores and rows of the ``k`` nearest that are wanted, best first.

        Args:
            query: float32 [dim], of length 1 for cosine.
            k: how many, at least 1.
            wanted: which rows count.
        """
        excluded = self.rows.find(wanted.exclude)
        if wanted.only is not None:
            rows = np.setdiff1d(self.alive(self.rows.find(wanted.only)), excluded)
            if wanted.where is not None:
                rows = rows[wanted.where.admits(self.rows.table.take(pa.array(rows)))]
            return self._nearest.among(query, rows, k)
        admitted = Admitted(self._left, self.living) if wanted.where is None else self._filtered(wanted.where)
        return self._nearest.nearest(query, k, admitted, excluded)

    def _filtered(self, where: RowFilter) -> Admitted:
        bits = np.packbits(where.admits(self.rows.table), bitorder="little")
        if self._left is not None:
            bits &= self._left
        return Admitted(bits, int(np.bitwise_count(bits).sum()))


def _read_replaced(folder: Path) -> ROWS:
    with pa.ipc.open_file(pa.memory_map(str(folder / REPLACED))) as reader:
        found: ROWS = reader.read_all().column("row").to_numpy()
        return found
