"""Row map: a sample of a view's vectors in two dimensions, by principal components."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.entity_key import key_column
from precompute.store.feature_view import Feature
from precompute.store.freshness import as_us
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.page.run_page import Point, RowMap

ROWS, ROWS_BEFORE = 1500, 500
"""Drawn of the snapshot, and of the one it is compared with."""

_Floats = npt.NDArray[np.float64]


def row_map(
    store: ViewStore,
    snapshot: Snapshot,
    other: Snapshot | None,
    feature: Feature,
    began: datetime | None,
) -> RowMap | None:
    """A sample of one vector feature.

    Args:
        store: of the view.
        snapshot: whose rows are shown.
        other: the one it is compared with; its rows are shown too where the same model made them:
            those of another are in another space.
        feature: a vector.
        began: when the run began; rows computed since are its own.

    Returns:
        None where fewer than three rows have a finite vector.

    Raises:
        SnapshotError: a file is missing or damaged.
    """
    vectors, keys, computed_us = _sample(store, snapshot, feature, ROWS)
    if len(vectors) < 3:
        return None
    middle, axes, shares = principal_axes(vectors)
    places = (vectors - middle) @ axes
    began_us = None if began is None else as_us(began)
    kinds = [
        "new" if began_us is not None and at >= began_us else "unchanged"
        for at in computed_us.tolist()
    ]
    if other is not None and other.model == snapshot.model and feature in other.view.features:
        before, keys_before, _ = _sample(store, other, feature, ROWS_BEFORE)
        places = np.concatenate([(before - middle) @ axes, places])
        keys, kinds = keys_before + keys, ["before"] * len(before) + kinds
    low, high = places.min(axis=0), places.max(axis=0)
    # one scale for both directions: distances on the map are to each other as they are
    scale = float((high - low).max()) or 1.0
    placed = (places - (low + high) / 2) / scale + 0.5
    points = [
        Point(round(x, 4), round(y, 4), kind, key)
        for (x, y), kind, key in zip(placed.tolist(), kinds, keys, strict=True)
    ]
    return RowMap(feature.name, points, shares, len(points))


def _sample(
    store: ViewStore, snapshot: Snapshot, feature: Feature, rows: int
) -> tuple[_Floats, list[str], npt.NDArray[np.int64]]:
    """Finite vectors, float64 [rows, dim], their key texts, and when they were computed, µs since
    1970."""
    assert feature.dim is not None
    if not snapshot.rows:
        return np.empty((0, feature.dim)), [], np.empty(0, np.int64)
    table = store.sample(
        snapshot, rows, [*snapshot.view.entity, feature.name, "computed_at"]
    ).combine_chunks()
    table = table.filter(pc.is_valid(table.column(feature.name)))
    column = table.column(feature.name).combine_chunks()
    vectors = np.asarray(column.flatten(), np.float64).reshape(-1, feature.dim)
    finite = np.isfinite(vectors).all(axis=1)
    keys = key_column(table, snapshot.view.entity).filter(pa.array(finite)).to_pylist()
    computed_us = np.asarray(table.column("computed_at").cast(pa.int64()))
    return vectors[finite], keys, computed_us[finite]


def principal_axes(vectors: _Floats) -> tuple[_Floats, _Floats, tuple[float, float]]:
    """The mean [dim], the two directions in which the vectors differ most [dim, 2], and the shares
    of all variance that lie along them; zeros where there is none.

    Args:
        vectors: float64 [rows, dim], at least one row.
    """
    rows, dim = vectors.shape
    middle = vectors.mean(axis=0)
    centred = vectors - middle
    largest = float(np.abs(centred).max())
    # squares of what is far from 1 would be infinite, or nothing
    centred = centred / largest if largest > 0 else centred
    if dim <= rows:
        values, axes = np.linalg.eigh(centred.T @ centred)
    else:
        values, of_rows = np.linalg.eigh(centred @ centred.T)
        axes = centred.T @ of_rows
    chosen = np.argsort(-values, kind="stable")[:2]
    values, axes = np.maximum(values[chosen], 0.0), axes[:, chosen]
    lengths = np.linalg.norm(axes, axis=0)
    axes = np.divide(axes, lengths, out=np.zeros_like(axes), where=lengths > 0)
    # which way an axis points is chance: the largest part of it points up
    axes *= np.where(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])] < 0, -1.0, 1.0)
    if axes.shape[1] < 2:
        axes, values = np.hstack([axes, np.zeros((dim, 1))]), np.append(values, 0.0)
    total = float((centred**2).sum())
    first, second = (float(value) / total if total > 0 else 0.0 for value in values)
    return middle, axes, (first, second)
