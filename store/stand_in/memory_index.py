"""Memory index: the nearest rows among a few, each compared; in place of the vector index on
disk."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.feature_view import FeatureView
from precompute.store.vectors.index_rows import filterable
from precompute.store.vectors.row_filter import RowFilter
from precompute.store.vectors.vector_index import Found, Neighbours, VectorIndex


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
