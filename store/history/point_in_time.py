"""Point in time: what each row of a training set would have been answered at its time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.errors import RequestError
from precompute.store.feature_view import FeatureView
from precompute.store.history.as_of import manifests_of
from precompute.store.history.part_rows import reading, rows_at
from precompute.store.history.timeline import Values, newest, timeline
from precompute.store.history.versions import Versions, key_names
from precompute.store.offline.view_store import OfflineStore, ViewStore


def get_historical_features(
    offline: OfflineStore,
    entity_table: pa.Table,
    views: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    timestamp: str = "event_timestamp",
    max_age_s: float | None = None,
    values: Values = "served",
    memory_mb: int = 1024,
) -> pa.Table:
    """The point-in-time join: for each row the features that a lookup at its time would have been answered from the store.

    Args:
        offline: the offline store.
        entity_table: has the entity's columns of every view (text or integers) and the timestamp column, aware, of any unit.
        views: names, for all features; or name → features.
        timestamp: name of the timestamp column.
        max_age_s: values older than this at the row's time are null, by the age that a lookup would have told; of ``best_known`` ones it counts from
            ``computed_at``, of a partitioned view from the partition's end.
        values: ``served``, or ``best_known``: of a partitioned view the value of the latest partition that was over by then, whenever it was computed (today's model for
            yesterday's rows); of others that of the newest snapshot committed by then; of good snapshots only, published or not, and rows of any age.
        memory_mb: DuckDB's memory for the join, which handles keys and times only; features are read file by file, matched rows alone.

    Returns:
        the rows of ``entity_table`` in their order, each with ``<view>__<feature>`` of the type the view declares and
        ``<view>__computed_at``. Null where a lookup would have answered ``missing``: there was no such row, it had expired, or the view was not published; where
        the snapshot that was live then is not kept any more; and a feature that a snapshot did not have, or had with another type, is null too.

    Raises:
        RequestError: a column is missing or of a type that cannot be used, a feature is unknown, or there are no such values.
        SnapshotError: a view has no snapshot that counts, or a file is missing or damaged.
    """
    chosen = views if isinstance(views, Mapping) else dict.fromkeys([views] if isinstance(views, str) else views)
    if max_age_s is not None and not 0 <= max_age_s < math.inf:
        raise RequestError(f"max_age_s is a number of seconds, got {max_age_s}")
    asked_us = _timestamps_us(entity_table, timestamp)
    result = entity_table
    for name, features in chosen.items():
        found = _features_at(offline.view(name), features, entity_table, asked_us, max_age_s, values, memory_mb)
        for column in found.column_names:
            if f"{name}__{column}" in result.column_names:
                raise RequestError(f"the entity table has a column {name}__{column} already: rename it")
            result = result.append_column(f"{name}__{column}", found.column(column))
    return result


def _features_at(
    store: ViewStore,
    features: Sequence[str] | None,
    entity_table: pa.Table,
    asked_us: npt.NDArray[np.int64],
    max_age_s: float | None,
    values: Values,
    memory_mb: int,
) -> pa.Table:
    name = store.name
    manifests = manifests_of(store)
    periods = timeline(store, manifests, values)
    order = list({period.snapshot.number: period.snapshot for period in periods if period.snapshot is not None}.values())
    order.sort(key=lambda snapshot: snapshot.number)
    view = newest(periods).view
    schema = _wanted(view, features)
    keys = [_key_values(entity_table, column, name) for column in view.entity]
    asked = pa.table([*keys, pa.array(asked_us), pa.array(np.arange(len(asked_us)))], names=[*key_names(view.entity), "us", "i"])
    with reading(name), Versions(store, order, manifests, asked, memory_mb) as versions:
        matched = versions.known_at(periods, max_age_s)
        file = np.asarray(matched.column("f").fill_null(-1))
        row = np.asarray(matched.column("r").fill_null(-1))
        return rows_at(versions.paths, file, row, schema)


def _wanted(view: FeatureView, features: Sequence[str] | None) -> pa.Schema:
    names = view.feature_names if features is None else tuple(features)
    for name in names:
        if name not in view.feature_names:
            raise RequestError(
                f"view {view.name!r} has no feature {name!r} (it has: {', '.join(view.feature_names)})", code="unknown_feature"
            )
    return pa.schema([(name, view.feature(name).arrow_type) for name in names] + [("computed_at", pa.timestamp("us", "UTC"))])


def _key_values(table: pa.Table, column: str, view: str) -> pa.ChunkedArray:
    if column not in table.column_names:
        raise RequestError(f"the entity table has no column {column!r}, a key column of view {view!r}")
    values = table.column(column)
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise RequestError(f"column {column!r} of the entity table is {kind}: a key is text or an integer, so cast it")
    return values if kind == values.type else pc.cast(values, kind)


def _timestamps_us(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    """The column in µs since 1970, finer ones rounded down: so that what was known at ``t`` is what was known at the µs before it."""
    if column not in table.column_names:
        raise RequestError(f"the entity table has no timestamp column {column!r} (it has: {', '.join(table.column_names)})")
    values = table.column(column)
    if not pa.types.is_timestamp(values.type) or values.type.tz is None:
        raise RequestError(
            f"column {column!r} of the entity table is {values.type}: it must be a timestamp with a time zone (pyarrow.compute.assume_timezone)"
        )
    if values.null_count:
        raise RequestError(f"{values.null_count} rows of the entity table have no {column!r}: drop them, or give them a time")
    try:
        if values.type.unit != "ns":
            return np.asarray(values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64()))
    except pa.ArrowInvalid as exc:
        raise RequestError(f"column {column!r} of the entity table has a time no timestamp in µs can hold: {exc}") from exc
    return np.asarray(values.cast(pa.int64())) // 1000
