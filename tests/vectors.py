"""Vectors for the tests of the index: rows as a snapshot has them, hard ones among them, and the
truth by comparing with every row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.feature_view import Feature, FeatureView, IndexSpec

Vectors = npt.NDArray[Any]


def view_of(
    dim: int, metric: str, *, recall: float = 0.95, scalars: Sequence[Feature] = ()
) -> FeatureView:
    vector = Feature("vector", "float32", dim)
    return FeatureView(
        "things", ("id",), (vector, *scalars), 60.0, 60.0, IndexSpec("vector", metric, recall)
    )


def column(vectors: Vectors, gone: Collection[int] = ()) -> pa.Array:
    """[n, dim] numbers as a FixedSizeList column, some rows null."""
    mask = pa.array([i in gone for i in range(len(vectors))])
    kind = pa.list_(pa.from_numpy_dtype(vectors.dtype), vectors.shape[1])
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=kind, mask=mask)


def rows_of(
    keys: Sequence[str],
    vectors: Vectors,
    gone: Collection[int] = (),
    scalars: Mapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Rows as a snapshot has them; row n was computed n µs after 1970."""
    times = pa.array(range(len(keys)), pa.int64())
    columns = {
        "id": pa.array(keys, pa.string()),
        "vector": column(vectors, gone),
        "computed_at": times,
    }
    return pa.record_batch(columns | dict(scalars or {}))


def overlapping(rows: int, dim: int = 32, *, noise: float = 2.0, seed: int = 0) -> Vectors:
    """Clusters that overlap: the same centres of length √dim every time, and ``noise`` times as
    much around each."""
    centres, rng = np.random.default_rng(99).standard_normal((50, dim)), np.random.default_rng(seed)
    return (centres[rng.integers(50, size=rows)] + noise * rng.standard_normal((rows, dim))).astype(
        np.float32
    )


def nearest(vectors: Vectors, query: Vectors, metric: str) -> list[int]:
    """Every row, the nearest first, in double precision."""
    rows, point = vectors.astype(np.float64), np.asarray(query, np.float64)
    scores = -((rows - point) ** 2).sum(axis=1) if metric == "l2" else rows @ point
    if metric == "cosine":
        scores = scores / np.linalg.norm(rows, axis=1)
    return [int(row) for row in np.argsort(-scores, kind="stable")]
