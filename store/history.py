"""History: what a view held at any time, as far back as its snapshots are kept.

Three questions: the whole view at a time (:func:`read`), the values a training set may know (:func:`get_historical_features`), and how one
row came to be (:func:`explain`).

**What counts.** Snapshots that were rolled back from (and later ones of the very same content), or that a gate refused, are no history; only
:func:`explain` tells of them. A view that has partitions now has a history of partitions only, and one whose entity changed only of those
snapshots that have today's key.

**From when on a value counts.** Of a view without partitions: from its ``computed_at``. A key that is not in a snapshot has no value from
that snapshot's commit on. A value that came back, older than what was between, counts from the commit of the snapshot it came back in.
So nothing that was computed after a time is ever known at that time.

Of a partitioned view: from the **end of its partition**, in data time, whatever the day it was computed, and until the end of the next
partition that was computed; within a partition the newest snapshot counts. That is what makes backfilled history usable. It is free
of leakage only as far as the source's SQL is: SQL that reads today's tables whole, and not only what lies before ``$end``, carries the present
into the past, and so does a model that was trained on later data. ``computed_at`` may then be later than the time asked for.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store.disk.spill_folder import SpillFolder
from store.entity_key import key_text
from store.errors import RequestError, SnapshotError
from store.feature_view import FeatureView
from store.freshness import iso
from store.offline.snapshot import Part, Snapshot
from store.offline.standing import Standing
from store.offline.view_store import OfflineStore, ViewStore
from store.partition import Partition
from store.sql import open_duckdb, parquet_sql

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INT64 = re.compile("0|-?[1-9][0-9]{0,17}")
"""Whole numbers that fit; a longer one is compared as text, which is as good."""


# ---- the whole view


def snapshot_at(store: ViewStore, as_of: datetime | None = None) -> Snapshot:
    """The snapshot :func:`read` reads; ``store.batches`` of it streams the rows.

    Raises:
        SnapshotError, RequestError: as :func:`read`.
    """
    if as_of is None:
        ref = store.refs.live()
        if ref is None:
            raise SnapshotError(f"view {store.name!r} was never published: run `precompute run {store.name}`, or name a time")
        return store.snapshot(ref.snapshot)
    if as_of.tzinfo is None:
        raise RequestError(f"as_of {as_of.isoformat()} has no time zone: give an aware datetime")
    counting = _counting(store, _manifests(store))
    at_us = _us(as_of)
    found = [snapshot for snapshot in counting if _begins_us(snapshot) <= at_us]
    if not found:
        raise SnapshotError(
            f"view {store.name!r} had no snapshot yet at {as_of.isoformat()}: the oldest one kept is {counting[0].number}, "
            f"{_begin_text(counting[0])}"
        )
    return found[-1]


def read(store: ViewStore, as_of: datetime | None = None) -> pa.Table:
    """All rows of a view as of a time, with ``computed_at`` and ``input_hash``; they must fit in memory.

    Args:
        store: of the view.
        as_of: aware; None for what is live. Of a view without partitions it is commit time: the newest snapshot committed by then that counts.
            Of a partitioned view it is data time, as for :func:`get_historical_features`: the newest snapshot of the latest partition that was
            over by then, whenever it was computed.

    Raises:
        SnapshotError: there was none yet (the oldest one kept is named), or a file is missing or damaged.
        RequestError: ``as_of`` has no time zone.
    """
    snapshot = snapshot_at(store, as_of)
    with _translated(store.name):
        schema = pq.read_schema(store.part_paths(snapshot)[0])
    return pa.Table.from_batches(store.batches(snapshot), schema)


# ---- training sets


def get_historical_features(
    offline: OfflineStore,
    entity_table: pa.Table,
    views: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    timestamp: str = "event_timestamp",
    max_age_s: float | None = None,
    memory_mb: int = 1024,
) -> pa.Table:
    """The point-in-time join: for each row the features as they were known at its time, and never a later one.

    Args:
        offline: the offline store.
        entity_table: has the entity's columns of every view (text or integers) and the timestamp column, aware, of any unit.
        views: names, for all features; or name → features.
        timestamp: name of the timestamp column.
        max_age_s: values older than this at the row's time are null. The age counts from ``computed_at`` (that a later run found the input
            unchanged renews nothing here: not every such run leaves a snapshot), of a partitioned view from the partition's end.
        memory_mb: DuckDB's memory for the join, which handles keys and times only; features are read file by file, matched rows alone.

    Returns:
        the rows of ``entity_table`` in their order, each with ``<view>__<feature>`` of the type the view declares and
        ``<view>__computed_at``. Null where the key had no value by then, or had left the source; a feature that a snapshot did not
        have, or had with another type, is null too.

    Raises:
        RequestError: a column is missing or of a type that cannot be used, or a feature is unknown.
        SnapshotError: a view has no snapshot that counts, or a file is missing or damaged.
    """
    chosen = views if isinstance(views, Mapping) else dict.fromkeys([views] if isinstance(views, str) else views)
    if max_age_s is not None and not 0 <= max_age_s < math.inf:
        raise RequestError(f"max_age_s is a number of seconds, got {max_age_s}")
    asked_us = _timestamps_us(entity_table, timestamp)
    result = entity_table
    for name, features in chosen.items():
        found = _features_at(offline.view(name), features, entity_table, asked_us, max_age_s, memory_mb)
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
    memory_mb: int,
) -> pa.Table:
    name = store.name
    manifests = _manifests(store)
    order = _counting(store, manifests)
    view = order[-1].view
    schema = _wanted(view, features)
    keys = [_key_values(entity_table, column, name) for column in view.entity]
    asked = pa.table([*keys, pa.array(asked_us), pa.array(np.arange(len(asked_us)))], names=[*_key_names(view.entity), "us", "i"])
    with _translated(name), _Versions(store, order, manifests, asked, memory_mb) as versions:
        matched = versions.known_at(order, max_age_s)
        file = np.asarray(matched.column("f").fill_null(-1))
        row = np.asarray(matched.column("r").fill_null(-1))
        return _gather(versions.paths, file, row, schema)


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


# ---- one row


@dataclass(frozen=True, slots=True)
class Version:
    """One value of a key.

    ``snapshot`` is the oldest one kept that holds it. ``run`` computed it; None when neither manifest nor report of that run is kept.
    ``before`` has the features that differ in the version before this one, with their values there; None for the first.
    ``removed_in`` and ``removed_at`` tell of the snapshot in which the key was no more. ``void`` says why no snapshot with this value counts:
    rolled back from, or refused by a gate; None when one does.
    """

    snapshot: int
    run: str | None
    model: str
    partition: str | None
    computed_at: datetime
    input_hash: int
    features: Mapping[str, Any]
    before: Mapping[str, Any] | None
    removed_in: int | None
    removed_at: str | None
    live: bool
    void: str | None


@dataclass(frozen=True, slots=True)
class Rejection:
    """A row of a ``rejected.parquet``: the run that refused the key, its snapshot (None when nothing was committed), stage and error."""

    run: str
    snapshot: int | None
    partition: str | None
    stage: str
    error: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a row came to be: its versions and rejections, the newest first; ``live`` is the snapshot that is live, None for none."""

    view: str
    key: str
    live: int | None
    versions: list[Version] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For programs; times are ISO 8601 in UTC."""
        body = asdict(self)
        for version in body["versions"]:
            version["computed_at"] = iso(version["computed_at"])
        return body


def explain(store: ViewStore, key: Any, *, memory_mb: int = 1024) -> Explanation:
    """Which run, snapshot, input and model made the values of a key, and what they were before.

    Args:
        store: of the view.
        key: as :func:`store.entity_key.key_text` takes it.
        memory_mb: DuckDB's memory.

    Raises:
        RequestError: no snapshot that is kept ever had the key, and no run rejected it; or it is no key of this view.
        SnapshotError: there is no snapshot, or a file is missing or damaged.
    """
    view, manifests = store.name, _manifests(store)
    if not manifests:
        raise SnapshotError(f"view {view!r} has no snapshot under {store.offline.root}: run `precompute run {view}`")
    ref, entity = store.refs.readable_live(), manifests[max(manifests)].view.entity
    live = None if ref is None else ref.snapshot
    text = key_text(key, entity)
    order = sorted((s for s in manifests.values() if s.view.entity == entity), key=lambda s: (s.partition or "", s.number))
    versions: list[Version] = []
    parts = _key_parts(text, entity)
    if parts is not None:
        asked = pa.table([pa.array([part]) for part in parts], names=_key_names(entity))
        with _translated(view), _Versions(store, order, manifests, asked, memory_mb) as found:
            versions = _explained(store, manifests, order, found, live)
    rejections = list(_rejections(store, manifests, live, text))
    if not versions and not rejections:
        raise RequestError(
            f"view {view!r} has no history of key {text!r}: none of its {len(manifests)} snapshots has it, and no run rejected it",
            status=404,
            code="unknown_entity",
        )
    return Explanation(view, text, live, versions, rejections)


def _explained(
    store: ViewStore, manifests: Mapping[int, Snapshot], order: Sequence[Snapshot], found: _Versions, live: int | None
) -> list[Version]:
    standing = Standing(store, manifests)
    void = [standing.why_void(snapshot) for snapshot in order]
    spans = found.spans()
    held: dict[tuple[Any, ...], list[dict[str, Any]]] = {}  # the spans of each version: copies keep both time and input
    present: set[int] = set()
    for span in spans:
        at = order[span["a"]]
        held.setdefault((at.partition, span["us"], span["hash"], at.recipe), []).append(span)
        present.update(range(span["a"], span["b"]))
    versions: list[Version] = []
    for group in held.values():
        first = group[0]
        positions = [p for span in group for p in range(span["a"], span["b"])]
        oldest = order[positions[0]]
        one = _gather(found.paths, np.array([first["f"]]), np.array([first["r"]]), oldest.view.feature_schema())
        features = one.to_pylist()[0]
        previous = versions[-1].features if versions else None
        gone = next(
            (p for p in range(positions[-1] + 1, len(order)) if order[p].partition == oldest.partition and void[p] is None), None
        )
        removed = None if gone is None or gone in present else order[gone]
        versions.append(
            Version(
                snapshot=oldest.number,
                run=_run_of(store, found.paths[first["f"]], found.writers[first["f"]], first["us"]),
                model=oldest.model,
                partition=oldest.partition,
                computed_at=_EPOCH + timedelta(microseconds=first["us"]),
                input_hash=first["hash"],
                features=features,
                before=None if previous is None else {n: previous.get(n) for n, v in features.items() if previous.get(n) != v},
                removed_in=None if removed is None else removed.number,
                removed_at=None if removed is None else removed.created_at,
                live=any(order[p].number == live for p in positions),
                void=None if any(void[p] is None for p in positions) else void[positions[0]],
            )
        )
    return versions[::-1]


def _run_of(store: ViewStore, path: Path, writer: Snapshot, computed_us: int) -> str | None:
    """The run that computed a row: the one whose folder its file is in, unless that run only copied rows together."""
    if writer.kind == "delta" or not writer.counts.unchanged:
        return path.parent.name
    for report in store.runs.reports(limit=1000):
        if report.command in ("publish", "rollback") or report.partition != writer.partition:
            continue
        began, ended = report.started_at, report.finished_at
        if began and ended and _us(_time(began)) <= computed_us <= _us(_time(ended)):
            return report.run
    return None


def _rejections(store: ViewStore, manifests: Mapping[int, Snapshot], live: int | None, text: str) -> Iterator[Rejection]:
    """Where the newest failed run, the newest snapshot and the live one rejected the key."""
    newest = manifests[max(manifests)]
    found: dict[str, tuple[str, int | None, str | None]] = {}
    for report in store.runs.reports():
        if report.status == "rejected" and report.finished_at > newest.created_at:
            found[f"data/{report.run}/rejected.parquet"] = (report.run, None, report.partition)
            break
    for snapshot in (newest, manifests.get(live or 0)):
        if snapshot is not None and snapshot.rejected is not None:
            found.setdefault(snapshot.rejected.path, (snapshot.run, snapshot.number, snapshot.partition))
    for relative, (run, number, partition) in found.items():
        path = store.folder / relative
        if path.is_file():
            with _translated(store.name):
                rows = pq.read_table(path, columns=["key", "stage", "error"], filters=[("key", "=", text)]).to_pylist()
            yield from (Rejection(run, number, partition, row["stage"], row["error"]) for row in rows)


def _key_parts(text: str, entity: Sequence[str]) -> list[str | int] | None:
    """The key's columns from its text, whole numbers as such; None when it has another number of parts."""
    texts = [text] if len(entity) == 1 else [p.replace("%2F", "/").replace("%25", "%") for p in text.split("/")]
    if len(texts) != len(entity):
        return None
    return [int(t) if _INT64.fullmatch(t) else t for t in texts]


def _key_names(entity: Sequence[str]) -> list[str]:
    """What the key's columns are called inside DuckDB, where their own names could be anything."""
    return [f"k{number}" for number in range(len(entity))]


# ---- which snapshots, and from when on


def _manifests(store: ViewStore) -> dict[int, Snapshot]:
    found = {}
    for number in store.numbers():
        try:
            found[number] = store.snapshot(number)
        except SnapshotError:
            if number in store.numbers():  # and not removed by gc since
                raise
    return found


def _counting(store: ViewStore, manifests: Mapping[int, Snapshot]) -> list[Snapshot]:
    """The snapshots that count, in the order of their times; of each partition only the newest.

    Raises:
        SnapshotError: there is none.
    """
    snapshots = [manifests[number] for number in sorted(manifests)]
    standing = Standing(store, manifests)
    good = [snapshot for snapshot in snapshots if standing.why_void(snapshot) is None]
    if not good:
        raise SnapshotError(
            f"view {store.name!r} has no snapshot under {store.offline.root} that counts"
            + (f": all {len(snapshots)} were rolled back from or refused by a gate" if snapshots else "; see its name, or run it")
        )
    newest = good[-1]
    good = [s for s in good if (s.partition is None) == (newest.partition is None) and s.view.entity == newest.view.entity]
    if newest.partition is None:
        return good
    return [s for _, s in sorted({s.partition or "": s for s in good}.items())]


def _begins_us(snapshot: Snapshot) -> int:
    """From when on it answers: its partition's end, or its commit; µs since 1970."""
    if snapshot.partition is not None:
        return _us(Partition.parse(snapshot.partition).end)
    return _us(_time(snapshot.created_at))


def _begin_text(snapshot: Snapshot) -> str:
    return f"committed {snapshot.created_at}" if snapshot.partition is None else f"of partition {snapshot.partition}"


def _us(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)


def _time(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at


# ---- versions: each row of each file once, and in which snapshots it lives


class _Versions:
    """The rows of some keys in all files of some snapshots, in DuckDB: ``span`` has one line for each unbroken run of snapshots, ``order[a]``
    to ``order[b - 1]``, that a row lives in. Every file is read once, however many snapshots share it.

    Args:
        store: the offline store.
        order: snapshots of one view with the same entity.
        manifests: all of the view's.
        asked: the entity's columns, named by :func:`_key_names`; for :meth:`known_at` also ``us`` (time, µs since 1970) and ``i`` (position).
        memory_mb: DuckDB's memory limit; it spills to a temporary folder beyond.
    """

    def __init__(
        self,
        store: ViewStore,
        order: Sequence[Snapshot],
        manifests: Mapping[int, Snapshot],
        asked: pa.Table,
        memory_mb: int,
    ) -> None:
        self.view = order[0].view
        self.entity = self.view.entity
        self.partitioned = order[0].partition is not None
        parts: dict[str, tuple[Part, Snapshot]] = {}
        part_at: dict[str, list[int]] = {}
        deletes: dict[str, tuple[Part, Snapshot]] = {}
        deletes_at: dict[str, list[int]] = {}
        for position, snapshot in enumerate(order):
            for layer in _chain(store, manifests, snapshot):
                for part in layer.parts:
                    parts.setdefault(part.path, (part, layer))
                    if not part_at.setdefault(part.path, []) or part_at[part.path][-1] != position:
                        part_at[part.path].append(position)
                if layer.deletes is not None:
                    deletes.setdefault(layer.deletes.path, (layer.deletes, layer))
                    deletes_at.setdefault(layer.deletes.path, []).append(position)
        checked = {path: store.checked_path(layer, part) for path, (part, layer) in parts.items()}
        kinds = {path: _key_kinds(file, self.entity) for path, file in checked.items()}
        names = sorted(parts, key=lambda path: kinds[path])
        self.paths = [checked[path] for path in names]
        self.writers = [parts[path][1] for path in names]
        self._kinds = [kinds[path] for path in names]
        self._lives = [set(part_at[path]) for path in names]
        self._deaths = [set(at) for at in deletes_at.values()]
        self._keys = _key_names(self.entity)
        self._listed = ", ".join(self._keys)
        gone = [store.checked_path(layer, part) for part, layer in deletes.values()]
        self._spill = SpillFolder()
        self._connection = open_duckdb(self._spill, memory_mb)
        try:
            self._load_rows(asked)
            self._load_spans(names, gone)
        except BaseException:
            self.close()
            raise

    def _load_rows(self, asked: pa.Table) -> None:
        """Table ``found``: file, row, key, ``computed_at`` (µs) and input hash of every row of the keys asked for."""
        # Numbers are compared as numbers where all files and the question have them as such, and else all as the text they are written as.
        whole = [
            pa.types.is_integer(asked.schema.field(key).type) and all(kind[number] == "BIGINT" for kind in self._kinds)
            for number, key in enumerate(self._keys)
        ]
        casts = [f"AS {'BIGINT' if is_whole else 'VARCHAR'}) AS {key}" for is_whole, key in zip(whole, self._keys, strict=True)]
        rest = [name for name in asked.column_names if name not in self._keys]
        compared = [f"TRY_CAST({key} {cast}" for key, cast in zip(self._keys, casts, strict=True)]
        self._register("asked", asked, ", ".join(compared + rest))
        compared = [f'TRY_CAST("{column}" {cast}' for column, cast in zip(self.entity, casts, strict=True)]
        scans = []
        for kind in dict.fromkeys(self._kinds):  # a column that is a number in one file and text in another is read in two scans
            first, count = self._kinds.index(kind), self._kinds.count(kind)
            scans.append(
                f"SELECT (file_index + {first})::INTEGER AS f, file_row_number AS r, {', '.join(compared)}, epoch_us(computed_at) AS us, "
                f"input_hash AS hash FROM {parquet_sql(self.paths[first : first + count])}"
            )
        if not scans:
            scans.append(f"SELECT 0::INTEGER AS f, 0::BIGINT AS r, {self._listed}, 0 AS us, 0 AS hash FROM asked WHERE false")
        self._connection.execute(
            f"CREATE TEMP TABLE found AS SELECT * FROM ({' UNION ALL '.join(scans)}) SEMI JOIN asked USING ({self._listed})"
        )

    def _load_spans(self, names: Sequence[str], deletes: Sequence[Path]) -> None:
        """Table ``span``: the rows of ``found`` with each unbroken run of snapshots they live in."""
        self._register("part", pa.table({"part": pa.array(names, pa.string()), "f": pa.array(range(len(names)), pa.int32())}))
        dead = f'SELECT part, "row" AS r, file_index::INTEGER AS d FROM {parquet_sql(deletes)}'
        if not deletes:
            dead = "SELECT part, 0::BIGINT AS r, 0::INTEGER AS d FROM part WHERE false"
        self._connection.execute(
            f"CREATE TEMP TABLE gone AS SELECT f, r, list(DISTINCT d ORDER BY d) AS ds FROM (SELECT part.f, dead.r, dead.d FROM ({dead}) dead "
            "JOIN part USING (part)) SEMI JOIN found USING (f, r) GROUP BY f, r"
        )
        # Few deletes name one row, so the rows of a file have few fates between them.
        fates = self._query("SELECT DISTINCT f, ds FROM gone").to_pylist()
        life = [(f, 0, *run) for f, alive in enumerate(self._lives) for run in _runs(alive)]
        for fate, row in enumerate(fates, start=1):
            alive = self._lives[row["f"]].difference(*(self._deaths[d] for d in row["ds"]))
            life += [(row["f"], fate, *run) for run in _runs(alive)]
        ends = pa.schema([("f", pa.int32()), ("fate", pa.int32()), ("a", pa.int32()), ("b", pa.int32())])
        self._register("life", pa.Table.from_pylist([dict(zip(ends.names, line, strict=True)) for line in life], ends))
        fated = [row | {"fate": fate} for fate, row in enumerate(fates, start=1)]
        schema = pa.schema([("f", pa.int32()), ("ds", pa.list_(pa.int32())), ("fate", pa.int32())])
        self._register("fate", pa.Table.from_pylist(fated, schema))
        self._connection.execute(
            f"CREATE TEMP TABLE span AS SELECT found.f, found.r, {self._listed}, us, hash, a, b FROM found "
            "LEFT JOIN (SELECT f, r, fate FROM gone JOIN fate USING (f, ds)) died USING (f, r) "
            "JOIN life ON life.f = found.f AND life.fate = coalesce(died.fate, 0)"
        )

    def known_at(self, order: Sequence[Snapshot], max_age_s: float | None) -> pa.Table:
        """For each row asked for, in its order, the file ``f`` and row ``r`` of the value known at its time; null for none."""
        begins = [_begins_us(snapshot) for snapshot in order]
        places = {"s": pa.array(range(len(order)), pa.int32()), "begins": pa.array(begins, pa.int64())}
        self._register("place", pa.table(places))
        keys, by_key = self._listed, f"PARTITION BY {self._listed}"
        # One event for each value, and one for each end of a value that no other follows at once. An event that would lie before an earlier
        # one is a value that came back: it begins with its snapshot. So events stand in the order of their snapshots, whatever the clocks said.
        self._connection.execute(
            f"""
            CREATE TEMP TABLE event AS
            WITH step AS (
                SELECT *, lead(a) OVER ({by_key} ORDER BY a) AS follows, lag({{'b': b, 'us': us, 'hash': hash}}) OVER ({by_key} ORDER BY a)
                    IS NOT DISTINCT FROM {{'b': a, 'us': us, 'hash': hash}} AS copied FROM span
            ),
            happened AS (
                SELECT {keys}, f, r, a AS s, {"begins" if self.partitioned else "us"} AS born, begins FROM step JOIN place ON s = a
                WHERE NOT copied
                UNION ALL
                SELECT {keys}, NULL, NULL, b, begins, begins FROM step JOIN place ON s = b WHERE follows IS DISTINCT FROM b
            ),
            after AS (
                SELECT *, max(born) OVER ({by_key} ORDER BY s ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS latest FROM happened
            ),
            placed AS (
                SELECT *, max(CASE WHEN latest IS NULL OR born > latest THEN born ELSE greatest(begins, latest) END)
                    OVER ({by_key} ORDER BY s ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS known FROM after
            )
            SELECT {keys}, f, r, born, known FROM placed QUALIFY lead(known) OVER ({by_key} ORDER BY s) IS DISTINCT FROM known
            """
        )
        young = "true" if max_age_s is None else f"asked.us - event.born <= {int(max_age_s * 1e6)}"
        same_key = " AND ".join(f"asked.{key} = event.{key}" for key in self._keys)
        return self._query(
            f"SELECT CASE WHEN {young} THEN event.f END AS f, CASE WHEN {young} THEN event.r END AS r FROM asked ASOF LEFT JOIN event "
            f"ON {same_key} AND asked.us >= event.known ORDER BY asked.i"
        )

    def spans(self) -> list[dict[str, Any]]:
        """``f``, ``r``, ``us``, ``hash``, ``a``, ``b`` of every span, the earliest first."""
        found: list[dict[str, Any]] = self._query("SELECT f, r, us, hash, a, b FROM span ORDER BY a").to_pylist()
        return found

    def _register(self, name: str, table: pa.Table, columns: str = "*") -> None:
        self._connection.register("given", table)
        self._connection.execute(f"CREATE TEMP TABLE {name} AS SELECT {columns} FROM given")
        self._connection.unregister("given")

    def _query(self, sql: str) -> pa.Table:
        return self._connection.sql(sql).to_arrow_table()

    def close(self) -> None:
        """Drop all tables and what was spilled of them."""
        self._connection.close()
        self._spill.close()

    def __enter__(self) -> _Versions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _chain(store: ViewStore, manifests: Mapping[int, Snapshot], snapshot: Snapshot) -> list[Snapshot]:
    layers = [snapshot]
    while (parent := layers[-1].parent) is not None:
        layers.append(manifests[parent] if parent in manifests else store.snapshot(parent))
    return layers[::-1]


def _key_kinds(path: Path, entity: Sequence[str]) -> tuple[str, ...]:
    schema = pq.read_schema(path)
    return tuple("BIGINT" if pa.types.is_integer(schema.field(column).type) else "VARCHAR" for column in entity)


def _runs(positions: set[int]) -> Iterator[tuple[int, int]]:
    """The unbroken runs ``[a, b)`` of the positions."""
    for a in sorted(p for p in positions if p - 1 not in positions):
        b = a + 1
        while b in positions:
            b += 1
        yield a, b


# ---- features, of the rows that matched


def _gather(paths: Sequence[Path], file: npt.NDArray[np.int32], row: npt.NDArray[np.int64], schema: pa.Schema) -> pa.Table:
    """The rows ``row`` of ``paths[file]``, null where ``file`` is -1; each is read once, and memory holds one row group beside them."""
    order = np.lexsort((row, file))
    order = order[file[order] >= 0]
    files, rows = file[order], row[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (np.diff(files) != 0) | (np.diff(rows) != 0)
    place = np.full(len(file), -1, np.int64)
    place[order] = np.cumsum(new) - 1
    files, rows = files[new], rows[new]
    pieces = [schema.empty_table()]
    for number in np.unique(files).tolist():
        first, last = np.searchsorted(files, (number, number + 1))
        pieces += _rows_of(paths[number], rows[first:last], schema)
    return pa.concat_tables(pieces).take(pa.array(place, mask=place < 0))


def _rows_of(path: Path, rows: npt.NDArray[np.int64], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows (ascending) of one file, with the columns of ``schema``: null where the file has none of that name and type."""
    with pq.ParquetFile(path) as parquet:
        have = [
            f.name for f in schema if f.name in parquet.schema_arrow.names and parquet.schema_arrow.field(f.name).type == f.type
        ]
        first = 0
        for group in range(parquet.metadata.num_row_groups):
            last = first + parquet.metadata.row_group(group).num_rows
            here = rows[np.searchsorted(rows, first) : np.searchsorted(rows, last)] - first
            if len(here):
                table = parquet.read_row_group(group, columns=have).take(pa.array(here))
                columns = [table.column(f.name).cast(f.type) if f.name in have else pa.nulls(len(here), f.type) for f in schema]
                yield pa.Table.from_arrays(columns, schema=schema)
            first = last


@contextlib.contextmanager
def _translated(view: str) -> Iterator[None]:
    try:
        yield
    except duckdb.OutOfMemoryException as exc:
        raise SnapshotError(f"the history of view {view!r} does not fit into DuckDB's memory: raise memory_mb ({exc})") from exc
    except (duckdb.Error, pa.ArrowException, OSError) as exc:
        raise SnapshotError(f"the history of view {view!r} cannot be read: {str(exc).strip()[:300]}") from exc
