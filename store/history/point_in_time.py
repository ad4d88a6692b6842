"""Point in time: the rows that lookups would have answered at given times: for a training set, each
row at its own time; for a view, as of one time."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.answers.plan import fits
from precompute.store.answers.service import Service, column_of
from precompute.store.errors import RequestError, SnapshotError, did_you_mean
from precompute.store.feature_view import FeatureView
from precompute.store.history.gaps import Gaps, gaps_of
from precompute.store.history.versions import (
    Period,
    Values,
    Versions,
    key_names,
    newest,
    reading,
    rows_at,
    timeline,
)
from precompute.store.keys import bad_keys, key_column
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import as_datetime, as_us, iso

log = logging.getLogger(__name__)


def snapshot_at(
    store: ViewStore, as_of: datetime | None = None, *, values: Values = "served"
) -> Snapshot:
    """The snapshot :func:`read` reads; ``store.batches`` of it streams the rows, those that had
    expired included.

    Raises:
        SnapshotError, RequestError: as :func:`read`.
    """
    if as_of is not None:
        return _answering(store, as_of, values)[1]
    ref = store.log.live()
    if ref is None:
        raise SnapshotError(
            f"view {store.name!r} was never published: run `precompute run {store.name}`, or name a"
            " time"
        )
    return store.snapshot(ref.snapshot)


def read(store: ViewStore, as_of: datetime | None = None, *, values: Values = "served") -> pa.Table:
    """All rows of a view as of a time, with ``computed_at`` and ``input_hash``; they must fit in
    memory.

    Args:
        store: of the view.
        as_of: aware; None for the snapshot that is live, whole.
        values: ``served``: the rows that a lookup at that time would have answered from the store:
            those of the snapshot that was live then, which may have been rolled back from since,
            without those that were past ``ttl`` and ``stale_for``. ``best_known``: of a partitioned
            view the newest snapshot of the latest partition that was over by then, whenever it was
            computed, and nothing once ``ttl`` and ``stale_for`` have passed since that partition's
            end; of others the newest that was committed by then, and rows of any age; of good ones
            only, published or not.

    Raises:
        SnapshotError: there was none (the oldest one retained is named), or a file is missing or
            damaged.
        RequestError: ``as_of`` has no time zone, or there are no such values.
    """
    period, snapshot = (
        (None, snapshot_at(store)) if as_of is None else _answering(store, as_of, values)
    )
    store.compare_parts(snapshot)
    rows = pa.Table.from_batches(store.batches(snapshot), store.schema(snapshot))
    if period is None or as_of is None or period.longest_s is None:
        return rows
    computed_us = np.asarray(rows.column("computed_at").cast(pa.int64()))
    return rows.filter(pa.array(period.answers(computed_us, as_us(as_of))))


def manifests_of(store: ViewStore) -> dict[int, Snapshot]:
    """All manifests of a view that are retained, by number."""
    manifests = {}
    for number in store.numbers():
        try:
            manifests[number] = store.snapshot(number)
        except SnapshotError:
            # else gc has removed it since
            if number in store.numbers():
                raise
    return manifests


def _answering(store: ViewStore, as_of: datetime, values: Values) -> tuple[Period, Snapshot]:
    if as_of.tzinfo is None:
        raise RequestError(f"as_of {as_of.isoformat()} has no time zone: give an aware datetime")
    periods = timeline(store, manifests_of(store), values)
    period = next((period for period in reversed(periods) if period.since_us <= as_us(as_of)), None)
    if period is not None and period.snapshot is not None:
        return period, period.snapshot
    oldest = periods[0].snapshot
    assert oldest is not None
    why = f"; {period.why}" if period is not None else ""
    where = "" if oldest.partition is None else f" of partition {oldest.partition},"
    raise SnapshotError(
        f"view {store.name!r} has nothing to read as of {as_of.isoformat()}{why}: the oldest"
        f" snapshot that can be read is {oldest.number},{where} which counts from"
        f" {iso(as_datetime(periods[0].since_us))} on"
    )


def get_historical_features(
    offline: OfflineStore,
    entity_table: pa.Table,
    views: Sequence[str] | Mapping[str, Sequence[str]] = (),
    *,
    service: Service | None = None,
    timestamp: str = "event_timestamp",
    max_age_s: float | None = None,
    values: Values = "served",
    memory_mb: int = 1024,
) -> pa.Table:
    """The point-in-time join: for each row the features that a lookup at its time would have been
    answered from the store.

    Args:
        offline: the offline store.
        entity_table: has the entity's columns of every view (text or integers) and the timestamp
            column, aware, of any unit.
        views: names, for all features; or name → features.
        service: the features of its views, in place of ``views``, under its limits of age and with
            its defaults: what it would have been answered.
        timestamp: name of the timestamp column.
        max_age_s: values older than this at the row's time are null, by the age that a lookup would
            have reported; of ``best_known`` ones it counts from ``computed_at``, of a partitioned
            view from the partition's end.
        values: ``served``, or ``best_known``: of a partitioned view the value of the latest
            partition that was over by then, whenever it was computed (today's model for yesterday's
            rows), until ``ttl`` and ``stale_for`` have passed since its end; of others that of the
            newest snapshot committed by then, of any age; of good snapshots only, published or not.
        memory_mb: DuckDB's memory for the join, which handles keys and times only; features are
            read file by file, matched rows alone.

    Returns:
        the rows of ``entity_table`` in their order, each with ``<view>__<feature>`` of the type the
        view declares and ``<view>__computed_at``. Null where a lookup would have answered
        ``missing``: there was no such row, it had expired, or the view was not published; where the
        snapshot that was live then is not retained any more; and a feature that a snapshot did not
        have, or had with another type, is null too. Of ``best_known`` rows that ask for partitions
        which were refused or never computed the log tells, and the schema's metadata (``gaps``,
        JSON: view → :class:`precompute.store.history.gaps.Gaps`).

    Raises:
        RequestError: a column is missing or of a type that cannot be used, a feature is unknown, or
            there are no such values.
        SnapshotError: a view has no snapshot that counts, or a file is missing or damaged.
    """
    if max_age_s is not None and not 0 <= max_age_s < math.inf:
        raise RequestError(f"max_age_s is a number of seconds, got {max_age_s}")
    if service is not None and views:
        raise RequestError(
            "features are those of views, or of a service: name the one or the other"
        )
    result, requested_us = entity_table, _timestamps_us(entity_table, timestamp)
    gaps: dict[str, Gaps | None] = {}
    for wanted in (
        _of_views(views, max_age_s) if service is None else _of_service(service, max_age_s)
    ):
        found, gaps[wanted.view] = _features_at(
            offline.view(wanted.view), wanted, entity_table, requested_us, values, memory_mb
        )
        for column in found.column_names:
            name = column_of(wanted.view, column)
            if name in result.column_names:
                raise RequestError(f"the entity table has a column {name} already: rename it")
            result = result.append_column(name, found.column(column))
    return _telling(result, service, gaps)


def _telling(table: pa.Table, service: Service | None, gaps: Mapping[str, Gaps | None]) -> pa.Table:
    """The table with what it is, and what it lacks, in its schema's metadata; of other views it
    may tell already."""
    told = dict(table.schema.metadata or {})
    if service is not None:
        told |= {b"service": service.name, b"version": service.fingerprint}
    lacks = json.loads(told.pop(b"gaps", b"{}"))
    for view, lacking in gaps.items():
        lacks.pop(view, None)
        if lacking is not None:
            log.warning("view %r: %s", view, lacking)
            lacks[view] = lacking.to_json()
    if lacks:
        told[b"gaps"] = json.dumps(lacks)
    return table.replace_schema_metadata(told or None)


class _Wanted(NamedTuple):
    """What is wanted of one view; ``features`` None for all, ``entity`` that of the service, if it
    is for one."""

    view: str
    features: Sequence[str] | None
    oldest_s: float | None
    entity: Sequence[str] | None = None
    defaults: Mapping[str, Any] = {}


def _of_views(
    views: Sequence[str] | Mapping[str, Sequence[str]], max_age_s: float | None
) -> list[_Wanted]:
    chosen = (
        views
        if isinstance(views, Mapping)
        else dict.fromkeys([views] if isinstance(views, str) else views)
    )
    return [_Wanted(name, features, max_age_s) for name, features in chosen.items()]


def _of_service(service: Service, max_age_s: float | None) -> list[_Wanted]:
    return [
        _Wanted(
            part.view,
            part.features,
            service.oldest_s(part, max_age_s),
            service.entity,
            part.defaults,
        )
        for part in service.parts
    ]


def _features_at(
    store: ViewStore,
    wanted: _Wanted,
    entity_table: pa.Table,
    requested_us: npt.NDArray[np.int64],
    values: Values,
    memory_mb: int,
) -> tuple[pa.Table, Gaps | None]:
    name = store.name
    manifests = manifests_of(store)
    periods = timeline(store, manifests, values)
    order = list(
        {
            period.snapshot.number: period.snapshot
            for period in periods
            if period.snapshot is not None
        }.values()
    )
    order.sort(key=lambda snapshot: snapshot.number)
    view = newest(periods).view
    if wanted.entity is not None and not set(view.entity) <= set(wanted.entity):
        raise RequestError(
            f"view {name!r} has the key {', '.join(view.entity)}, and the service the entity"
            f" {', '.join(wanted.entity)}: its features are served as missing",
            code="other_entity",
        )
    schema = _wanted(view, wanted.features)
    keys = [_key_values(entity_table, column, name) for column in view.entity]
    requested = pa.table(
        [*keys, pa.array(requested_us), pa.array(np.arange(len(requested_us)))],
        names=[*key_names(view.entity), "us", "i"],
    )
    with reading(name), Versions(store, order, requested, memory_mb) as versions:
        matched = versions.known_at(periods, wanted.oldest_s)
        file = np.asarray(matched.column("f").fill_null(-1))
        row = np.asarray(matched.column("r").fill_null(-1))
        found = rows_at(versions.paths, file, row, schema)
    lacking = None
    if values == "best_known":
        lacking = gaps_of(store, manifests, requested_us, file < 0)
    if not wanted.defaults:
        return found, lacking
    missing = file < 0
    # what is no key has no row that anything could stand in for
    missing[list(bad_keys(key_column(requested, key_names(view.entity))))] = False
    defaults = {n: value for n, value in wanted.defaults.items() if fits(view, n, value)}
    return _with_defaults(found, defaults, missing), lacking


def _with_defaults(
    table: pa.Table, defaults: Mapping[str, Any], missing: npt.NDArray[np.bool_]
) -> pa.Table:
    """The table with values that stand in where rows are missing, as a lookup has them."""
    places = pa.array(np.where(missing, len(missing), np.arange(len(missing))))
    for name, value in defaults.items():
        column = table.column(name)
        with_default = pa.chunked_array(
            [*column.chunks, pa.array([value], column.type)], column.type
        )
        table = table.set_column(table.column_names.index(name), name, with_default.take(places))
    return table


def _wanted(view: FeatureView, features: Sequence[str] | None) -> pa.Schema:
    names = view.feature_names if features is None else tuple(features)
    for name in names:
        if name not in view.feature_names:
            raise RequestError(
                f"view {view.name!r} has no feature {name!r} (it has:"
                f" {', '.join(view.feature_names)})"
                f"{did_you_mean(str(name)[:80], view.feature_names)}",
                code="unknown_feature",
            )
    return pa.schema(
        [(name, view.feature(name).arrow_type) for name in names]
        + [("computed_at", pa.timestamp("us", "UTC"))]
    )


def _key_values(table: pa.Table, column: str, view: str) -> pa.ChunkedArray:
    if (count := table.column_names.count(column)) != 1:
        found = f"{count} columns" if count else "no column"
        raise RequestError(
            f"the entity table has {found} {column!r}, a key column of view {view!r}"
        )
    values = table.column(column)
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not (
        pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
    ):
        raise RequestError(
            f"column {column!r} of the entity table is {kind}: a key is text or an integer, so"
            " cast it"
        )
    return values if kind == values.type else pc.cast(values, kind)


def _timestamps_us(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    """The column in µs since 1970, finer ones rounded down: so that what was known at ``t`` is what
    was known at the µs before it."""
    if (count := table.column_names.count(column)) != 1:
        found = f"{count} timestamp columns" if count else "no timestamp column"
        raise RequestError(
            f"the entity table has {found} {column!r} (it has: {', '.join(table.column_names)})"
        )
    values = table.column(column)
    if not pa.types.is_timestamp(values.type) or values.type.tz is None:
        raise RequestError(
            f"column {column!r} of the entity table is {values.type}: it must be a timestamp with a"
            " time zone (pyarrow.compute.assume_timezone)"
        )
    if values.null_count:
        raise RequestError(
            f"{values.null_count} rows of the entity table have no {column!r}: drop them, or give"
            " them a time"
        )
    try:
        if values.type.unit != "ns":
            return np.asarray(values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64()))
    except pa.ArrowInvalid as exc:
        raise RequestError(
            f"column {column!r} of the entity table has a time no timestamp in µs can hold: {exc}"
        ) from exc
    return np.asarray(values.cast(pa.int64())) // 1000
