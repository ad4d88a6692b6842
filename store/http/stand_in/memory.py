"""Memory store: the contract of an online store in the fewest lines, dictionaries; for tests that
need a store and none in particular."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.feature_view import FeatureView
from precompute.store.online.found_rows import FoundRows, overlaid
from precompute.store.online.online_store import (
    Generation,
    OnlineStore,
    Pointer,
    check_epoch,
    check_loaded,
    check_not_live,
    check_taken,
)
from precompute.store.online.packed import Buffer, Rows
from precompute.store.vectors.index_rows import RowFilter, filterable
from precompute.store.vectors.vector_index import Found, Neighbours, VectorIndex


class MemoryStore(OnlineStore):
    """Dictionaries under one lock. Lives and dies with its process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generations: dict[str, dict[int, tuple[Generation, dict[bytes, Buffer]]]] = {}
        self._pointers: dict[str, Pointer] = {}

    def load(self, view: str, generation: Generation, rows: Rows, rows_done: int = 0) -> int:
        check_not_live(self.live(view), view, generation.number)
        table: dict[bytes, Buffer] = {}
        for batch in rows:
            table.update(
                zip(map(bytes, batch.keys.strings()), map(bytes, batch.rows.strings()), strict=True)
            )
        with self._lock:
            self._generations.setdefault(view, {})[generation.number] = generation, table
        return len(table)

    def flip(self, pointer: Pointer) -> None:
        with self._lock:
            check_loaded(pointer, list(self._generations.get(pointer.view.name, ())))
            check_taken(self._pointers.get(pointer.view.name), pointer)
            check_epoch(self._pointers.get(pointer.view.name), pointer)
            self._pointers[pointer.view.name] = pointer

    def live(self, view: str) -> Pointer | None:
        return self._pointers.get(view)

    def known(self, view: str) -> Pointer | None:
        return self._pointers.get(view)

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, FoundRows] | None:
        with self._lock:
            pointer = self._pointers.get(view)
            if pointer is None:
                return None
            tables = [self._generations[view][number][1] for number in pointer.generations]
        return pointer, reduce(
            overlaid, [FoundRows(keys, [table.get(key) for key in keys]) for table in tables]
        )

    def read_generation(self, view: str, number: int, keys: Sequence[bytes]) -> FoundRows:
        _, table = self._generations.get(view, {}).get(number, (None, {}))
        return FoundRows(keys, [table.get(key) for key in keys])

    def generations(self, view: str) -> list[Generation]:
        return [
            generation for _, (generation, _) in sorted(self._generations.get(view, {}).items())
        ]

    def drop(self, view: str, number: int) -> None:
        with self._lock:
            check_not_live(self._pointers.get(view), view, number)
            self._generations.get(view, {}).pop(number, None)

    def forget(self, view: str) -> None:
        with self._lock:
            self._pointers.pop(view, None)
            self._generations.pop(view, None)

    def views(self) -> list[str]:
        return sorted(self._pointers)

    def close(self) -> None:
        pass


# ---- Memory index: the nearest rows among a few, each compared; in place of the vector index
# on disk.


class MemoryIndex(VectorIndex):
    """Answers as :class:`VectorIndex` does, of rows as they are now.

    Args:
        view: has an index.
        model: fingerprint of who made the vectors.
        rows: key → features.
        computed_at_us: key → µs since 1970.
    """

    def __init__(
        self,
        view: FeatureView,
        model: str,
        rows: Mapping[str, Mapping[str, Any]],
        computed_at_us: Mapping[str, int],
    ) -> None:
        assert view.index is not None
        feature = view.feature(view.index.on)
        assert feature.dim is not None
        self.metric, self.dim, self.dtype, self.model = (
            view.index.metric,
            feature.dim,
            feature.dtype,
            model,
        )
        # one that is null is in no index
        self._keys = [key for key, features in rows.items() if features[feature.name] is not None]
        self._times = [computed_at_us[key] for key in self._keys]
        self._row = {key: i for i, key in enumerate(self._keys)}
        held = pa.array([rows[key][feature.name] for key in self._keys], feature.arrow_type)
        vectors = np.asarray(held.flatten(), np.float32).reshape(-1, feature.dim)
        if self.metric == "cosine":
            vectors = vectors / np.maximum(
                np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny
            )
        self._vectors = vectors
        scalars = {
            name: pa.array([rows[key][name] for key in self._keys], kind)
            for name, kind in filterable(view).items()
        }
        self._scalars = pa.table(scalars) if scalars else None

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> Found | None:
        """As :meth:`VectorIndex.find`."""
        row = self._row.get(key)
        return None if row is None else Found(self._vectors[row], self._times[row])

    def search(
        self,
        vector: npt.ArrayLike,
        k: int,
        *,
        exclude: Collection[str] = (),
        only: Collection[str] | None = None,
        where: RowFilter | None = None,
    ) -> Neighbours:
        """As :meth:`VectorIndex.search`, exact."""
        query = self._checked(vector)
        wanted = np.array(
            [key not in exclude and (only is None or key in only) for key in self._keys], np.bool_
        )
        if where is not None and self._scalars is not None:
            wanted &= where.admits(self._scalars)
        near = self.metric == "l2"
        scores = np.square(self._vectors - query).sum(axis=1) if near else self._vectors @ query
        order = np.argsort(scores if near else -scores, kind="stable")
        best = [int(i) for i in order if wanted[i]][:k]
        return Neighbours(
            [self._keys[i] for i in best],
            [float(scores[i]) for i in best],
            [self._times[i] for i in best],
        )
