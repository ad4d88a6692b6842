"""Versions: which snapshot of a view answers for which time, the one that was served then or the
best known; and each version of each row once, with the snapshots that it is in, in DuckDB."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Self

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.disk.durable_file import limit_of
from precompute.store.disk.sql import SpillFolder, open_duckdb, parquet_sql
from precompute.store.errors import (
    PrecomputeError,
    RequestError,
    SnapshotError,
    UnreadableError,
)
from precompute.store.offline.log import Publishing
from precompute.store.offline.segment import Part
from precompute.store.offline.selection import reading_file
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing, keeps_live
from precompute.store.offline.stored_file import BROKEN, parsing
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition, Sighting, as_us, microseconds

Values = Literal["served", "best_known"]
"""Which values count at a time: those that a lookup then was ``served`` from the store; or those
that are ``best_known`` of it now, whenever they were computed and whether or not they were
published."""


class Period(NamedTuple):
    """A period of history: from ``since_us`` (µs since 1970) until the next one ``snapshot``
    answers; None where nothing that is retained does, and ``why`` says what there was.

    Ages count from ``published_us`` at the latest, and from ``renewed_us`` at the earliest, as
    :class:`precompute.store.times.Sighting` has it; a row older than ``longest_s`` answers no
    more (None: whatever its age).
    """

    since_us: int
    snapshot: Snapshot | None
    published_us: int
    renewed_us: int
    longest_s: float | None
    why: str = ""

    def answers(self, computed_us: npt.NDArray[np.int64], now_us: int) -> npt.NDArray[np.bool_]:
        """Which rows still answer, by the times that they were computed at (int64 [rows], µs since
        1970)."""
        if self.longest_s is None:
            return np.ones(len(computed_us), np.bool_)
        ages_us = Sighting(self.published_us, self.renewed_us, 0).ages_us(computed_us, now_us)
        young: npt.NDArray[np.bool_] = ages_us / 1e6 <= self.longest_s
        return young

    def ends_us(self, computed_us: int, until_us: int | None) -> int | None:
        """The time until which a row computed then answers, in a period that lasts until
        ``until_us``; None: as long as the period."""
        if self.longest_s is None:
            return until_us
        expires_us = (
            max(min(computed_us, self.published_us), self.renewed_us)
            + int(self.longest_s * 1e6)
            + 1
        )
        return expires_us if until_us is None else min(expires_us, until_us)


def timeline(store: ViewStore, manifests: Mapping[int, Snapshot], values: Values) -> list[Period]:
    """The periods of a view, in their order; the first begins with the first snapshot that can be
    read.

    Args:
        store: of the view.
        manifests: all that are retained, by number.
        values: which count.

    Raises:
        SnapshotError: no snapshot that is retained counts.
        RequestError: there are no such values.
    """
    if values == "best_known":
        return _best_known(store, manifests)
    if values != "served":
        raise RequestError(f"values are 'served' or 'best_known', not {values!r}")
    periods = served_periods(store, manifests)
    if not periods:
        why = (
            "none of the snapshots that were published is retained"
            if store.log.publishings()
            else "it was never published"
        )
        raise SnapshotError(
            f"view {store.name!r} has nothing that was served under {store.offline.root}: {why};"
            " see its name, run it, or read values='best_known'"
        )
    return periods


def served_periods(store: ViewStore, manifests: Mapping[int, Snapshot]) -> list[Period]:
    """As :func:`timeline` of what was served; empty where that was nothing, or nothing of it is
    retained. What the log does not say is a period that nothing answers, and a warning.
    """
    publishings = store.log.publishings()
    retained = [
        manifests[entry.snapshot]
        for entry in publishings
        if entry.snapshot is not None and entry.snapshot in manifests
    ]
    periods: list[Period] = []
    for entry in publishings if retained else ():
        period = _period(entry, manifests, retained[-1].view.entity)
        # Their order says what came after what, whatever the clocks said.
        since_us = max(period.since_us, periods[-1].since_us if periods else period.since_us)
        if periods and periods[-1].since_us == since_us:
            periods.pop()
        if periods or period.snapshot is not None:
            periods.append(period._replace(since_us=since_us))
    return periods


def newest(periods: Sequence[Period]) -> Snapshot:
    """The snapshot of the last period that has one: its view names key and features of all."""
    return next(period.snapshot for period in reversed(periods) if period.snapshot is not None)


def _period(
    entry: Publishing, manifests: Mapping[int, Snapshot], entity: tuple[str, ...]
) -> Period:
    since_us, published_us = microseconds(entry.since), microseconds(entry.published_at)
    assert since_us is not None
    assert published_us is not None
    snapshot = manifests.get(entry.snapshot or 0)
    if snapshot is None or snapshot.view.entity != entity:
        why = f"snapshot {entry.snapshot}, which was live from {entry.since} on, is not retained"
        if entry.snapshot is None:
            why = f"it was dropped at {entry.since}"
            if entry.unknown:
                why = f"what was live from {entry.since} on is not known: {entry.unknown}"
        elif snapshot is not None:
            why = (
                f"snapshot {snapshot.number}, which was live from {entry.since} on, had another"
                f" key: {', '.join(snapshot.view.entity)}"
            )
        return Period(since_us, None, 0, 0, None, why)
    renewed_us = max(snapshot.renewed_at or 0, entry.renewed_at or 0)
    return Period(
        since_us,
        snapshot,
        published_us,
        renewed_us,
        snapshot.view.ttl_s + snapshot.view.stale_for_s,
    )


def _good(store: ViewStore, manifests: Mapping[int, Snapshot]) -> list[Snapshot]:
    """The snapshots that are best known of their time, by number: all with partitions, or none."""
    snapshots = [manifests[number] for number in sorted(manifests)]
    standing = Standing(store)
    # what is served of several partitions holds nothing that these have not
    good = [
        snapshot
        for snapshot in snapshots
        if not snapshot.members and standing.why_void(snapshot) is None
    ]
    if not good:
        raise SnapshotError(
            f"view {store.name!r} has no snapshot under {store.offline.root} that counts"
            + (
                f": all {len(snapshots)} were rolled back from or refused by a gate"
                if snapshots
                else "; see its name, or run it"
            )
        )
    last = good[-1]
    return [
        s
        for s in good
        if (s.partition is None) == (last.partition is None) and s.view.entity == last.view.entity
    ]


def best_known_of_each(store: ViewStore, manifests: Mapping[int, Snapshot]) -> dict[str, Snapshot]:
    """Partition → its newest snapshot that is good, in the order of the partitions; empty of a view
    that has none.

    Raises:
        SnapshotError: the view has no snapshot that counts.
    """
    good = _good(store, manifests)
    return dict(sorted({s.partition: s for s in good if s.partition is not None}.items()))


def _best_known(store: ViewStore, manifests: Mapping[int, Snapshot]) -> list[Period]:
    good = _good(store, manifests)
    last, longest_s = good[-1], None
    if last.partition is not None:
        good = list(best_known_of_each(store, manifests).values())
        # As in publishing: a day without rows takes the place of nothing.
        good = [s for s in good if not keeps_live(s)] or good
        # and as in lookups: rows that have expired are missing, whatever partition is refused,
        # was never computed or has no rows
        longest_s = last.view.ttl_s + last.view.stale_for_s
    periods: list[Period] = []
    for snapshot in good:
        begins_us = _begins_us(snapshot)
        if periods and begins_us <= periods[-1].since_us:
            begins_us = periods.pop().since_us
        # of a partition all values are as old as its end
        renewed_us = 0 if snapshot.partition is None else begins_us
        periods.append(Period(begins_us, snapshot, begins_us, renewed_us, longest_s))
    return periods


def _begins_us(snapshot: Snapshot) -> int:
    """The time from which its values count: its partition's end, or its commit; µs since 1970."""
    if snapshot.partition is not None:
        return as_us(Partition.parse(snapshot.partition).end)
    committed_us = microseconds(snapshot.created_at)
    assert committed_us is not None
    return committed_us


def key_names(entity: Sequence[str]) -> list[str]:
    """What the key's columns are called inside DuckDB, where their own names could be anything."""
    return [f"k{number}" for number in range(len(entity))]


@dataclass(frozen=True, slots=True)
class _Held:
    """A file, the first snapshot that holds it, and the positions of all that do."""

    part: Part
    first: Snapshot
    positions: set[int] = field(default_factory=set)


class Span(NamedTuple):
    """A row of a file, and an unbroken run of snapshots, ``order[first]`` to ``order[end - 1]``,
    that it lives in."""

    file: int
    row: int
    computed_us: int
    input_hash: int
    first: int
    end: int


class Tables:
    """Tables in a DuckDB of its own, which are gone when it is closed.

    Args:
        memory_mb: its memory limit; it spills to a temporary folder beyond.
    """

    def __init__(self, memory_mb: int) -> None:
        self._spill = SpillFolder()
        self._connection = open_duckdb(self._spill, memory_mb)

    def _register(self, name: str, table: pa.Table, columns: str = "*") -> None:
        self._connection.register("registered", table)
        self._connection.execute(f"CREATE TEMP TABLE {name} AS SELECT {columns} FROM registered")
        self._connection.unregister("registered")

    def _query(self, sql: str) -> pa.Table:
        return self._connection.sql(sql).to_arrow_table()

    def close(self) -> None:
        """Drop all tables and what was spilled of them."""
        self._connection.close()
        self._spill.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Versions(Tables):
    """The rows of some keys in all files of some snapshots, in DuckDB: ``span`` has one line for
    each unbroken run of snapshots, ``order[a]`` to ``order[b - 1]``, that a row lives in. Every
    file is read once, however many snapshots share it.

    Args:
        store: of the view.
        order: snapshots of one view with the same entity.
        requested: the entity's columns, named by :func:`key_names`; for :meth:`known_at` also
            ``us`` (time, µs since 1970) and ``i`` (position).
        memory_mb: as of :class:`Tables`.
    """

    def __init__(
        self,
        store: ViewStore,
        order: Sequence[Snapshot],
        requested: pa.Table,
        memory_mb: int,
    ) -> None:
        self._order = order
        self.entity = order[0].view.entity
        parts, kills = _held(order)
        # a key that is another is a row that is not found, or found in its stead
        store.compare_parts(*order)
        checked = {path: store.checked_path(held.first, held.part) for path, held in parts.items()}
        kinds = {path: key_kinds(file, self.entity) for path, file in checked.items()}
        names = sorted(parts, key=lambda path: kinds[path])
        self.paths = [checked[path] for path in names]
        self.first_holders = [parts[path].first for path in names]
        self._kinds = [kinds[path] for path in names]
        self._lives = [parts[path].positions for path in names]
        self._deaths = [held.positions for held in kills.values()]
        self._keys = key_names(self.entity)
        self._listed = ", ".join(self._keys)
        kill_paths = [store.whole_path(held.first, held.part) for held in kills.values()]
        super().__init__(memory_mb)
        try:
            self._load_rows(requested)
            self._load_spans(names, kill_paths)
        except BaseException:
            self.close()
            raise

    def _load_rows(self, requested: pa.Table) -> None:
        """Table ``found``: file, row, key, ``computed_at`` (µs) and input hash of every row of the
        requested keys."""
        # Numbers are compared as numbers where all files and the question have them as such, and
        # else all as the text they are written as.
        whole = [
            pa.types.is_integer(requested.schema.field(key).type)
            and all(kind[number] == "BIGINT" for kind in self._kinds)
            for number, key in enumerate(self._keys)
        ]
        casts = [
            f"AS {'BIGINT' if is_whole else 'VARCHAR'}) AS {key}"
            for is_whole, key in zip(whole, self._keys, strict=True)
        ]
        rest = [name for name in requested.column_names if name not in self._keys]
        compared = [f"TRY_CAST({key} {cast}" for key, cast in zip(self._keys, casts, strict=True)]
        self._register("request", requested, ", ".join(compared + rest))
        compared = [
            f'TRY_CAST("{column}" {cast}' for column, cast in zip(self.entity, casts, strict=True)
        ]
        scans = []
        # a column that is a number in one file and text in another is read in two scans
        for kind in dict.fromkeys(self._kinds):
            first, count = self._kinds.index(kind), self._kinds.count(kind)
            scans.append(
                f"SELECT (file_index + {first})::INTEGER AS f, file_row_number AS r,"
                f" {', '.join(compared)}, epoch_us(computed_at) AS us, input_hash AS hash FROM"
                f" {parquet_sql(self.paths[first : first + count])}"
            )
        if not scans:
            scans.append(
                f"SELECT 0::INTEGER AS f, 0::BIGINT AS r, {self._listed}, 0 AS us, 0 AS hash FROM"
                " request WHERE false"
            )
        self._connection.execute(
            f"CREATE TEMP TABLE found AS SELECT * FROM ({' UNION ALL '.join(scans)}) SEMI JOIN"
            f" request USING ({self._listed})"
        )

    def _load_spans(self, names: Sequence[str], kills: Sequence[Path]) -> None:
        """Table ``span``: the rows of ``found`` with each unbroken run of snapshots they live
        in."""
        self._register(
            "part",
            pa.table(
                {"part": pa.array(names, pa.string()), "f": pa.array(range(len(names)), pa.int32())}
            ),
        )
        dead = f'SELECT part, "row" AS r, file_index::INTEGER AS d FROM {parquet_sql(kills)}'
        if not kills:
            dead = "SELECT part, 0::BIGINT AS r, 0::INTEGER AS d FROM part WHERE false"
        self._connection.execute(
            "CREATE TEMP TABLE gone AS SELECT f, r, list(DISTINCT d ORDER BY d) AS ds FROM (SELECT"
            f" part.f, dead.r, dead.d FROM ({dead}) dead JOIN part USING (part)) SEMI JOIN found"
            " USING (f, r) GROUP BY f, r"
        )
        # Few files of kills name one row, so the rows of a file have few fates between them.
        fates = self._query("SELECT DISTINCT f, ds FROM gone").to_pylist()
        life = [(f, 0, *run) for f, alive in enumerate(self._lives) for run in _runs(alive)]
        for fate, row in enumerate(fates, start=1):
            alive = self._lives[row["f"]].difference(*(self._deaths[d] for d in row["ds"]))
            life += [(row["f"], fate, *run) for run in _runs(alive)]
        ends = pa.schema(
            [("f", pa.int32()), ("fate", pa.int32()), ("a", pa.int32()), ("b", pa.int32())]
        )
        self._register(
            "life",
            pa.Table.from_pylist([dict(zip(ends.names, line, strict=True)) for line in life], ends),
        )
        fated = [row | {"fate": fate} for fate, row in enumerate(fates, start=1)]
        schema = pa.schema([("f", pa.int32()), ("ds", pa.list_(pa.int32())), ("fate", pa.int32())])
        self._register("fate", pa.Table.from_pylist(fated, schema))
        self._connection.execute(
            f"CREATE TEMP TABLE span AS SELECT found.f, found.r, {self._listed}, us, hash, a, b"
            " FROM found LEFT JOIN (SELECT f, r, fate FROM gone JOIN fate USING (f, ds)) died"
            " USING (f, r) JOIN life ON life.f = found.f AND life.fate = coalesce(died.fate, 0)"
        )

    def known_at(self, periods: Sequence[Period], max_age_s: float | None) -> pa.Table:
        """The file ``f`` and row ``r`` of the value that answered each requested row at its time,
        in their order; null for none.

        Args:
            periods: of snapshots of ``order``.
            max_age_s: an older value is none.
        """
        position = {snapshot.number: number for number, snapshot in enumerate(self._order)}
        limits = [limit for limit in (max_age_s,) if limit is not None]
        places = [
            {
                "since": period.since_us,
                "s": None if period.snapshot is None else position[period.snapshot.number],
                "published": period.published_us,
                "renewed": period.renewed_us,
                "longest": min(
                    [*limits, *(() if period.longest_s is None else (period.longest_s,))],
                    default=None,
                ),
            }
            for period in periods
        ]
        whole = dict.fromkeys(("since", "published", "renewed"), pa.int64())
        kinds = pa.schema({**whole, "s": pa.int32(), "longest": pa.float64()})
        self._register("place", pa.Table.from_pylist(places, kinds))
        same_key = " AND ".join(f"at_time.{key} = span.{key}" for key in self._keys)
        # A key has one row in a snapshot: of its runs of snapshots the last that begins by then is
        # the only one that may last until then. And of floats, as lookups compare: no row is a
        # microsecond older here than it was there.
        answers = (
            "s < b AND (longest IS NULL OR greatest(0, at_us - greatest(least(span.us, published),"
            " renewed))::DOUBLE / 1e6 <= longest)"
        )
        return self._query(
            f"SELECT CASE WHEN {answers} THEN f END AS f, CASE WHEN {answers} THEN r END AS r FROM"
            " (SELECT request.* EXCLUDE (us), request.us AS at_us, place.* FROM request ASOF LEFT"
            " JOIN place ON request.us >= place.since) at_time ASOF LEFT JOIN span ON"
            f" {same_key} AND at_time.s >= span.a ORDER BY i"
        )

    def spans(self) -> list[Span]:
        """Every span, the earliest first."""
        return [
            Span(*line.values())
            for line in self._query("SELECT f, r, us, hash, a, b FROM span ORDER BY a").to_pylist()
        ]


def _held(order: Sequence[Snapshot]) -> tuple[dict[str, _Held], dict[str, _Held]]:
    """The parts, and the files of kills, that any of the snapshots holds, by their names in the
    records."""
    parts: dict[str, _Held] = {}
    kills: dict[str, _Held] = {}
    for position, snapshot in enumerate(order):
        for found, files in ((parts, snapshot.parts), (kills, snapshot.kills)):
            for part in files:
                found.setdefault(part.path, _Held(part, snapshot)).positions.add(position)
    return parts, kills


def key_kinds(path: Path, entity: Sequence[str]) -> tuple[str, ...]:
    """The types of the key's columns in a file, as DuckDB names them."""
    with parsing(path):
        schema = pq.read_schema(path)
    return tuple(
        "BIGINT" if pa.types.is_integer(schema.field(column).type) else "VARCHAR"
        for column in entity
    )


def _runs(positions: set[int]) -> Iterator[tuple[int, int]]:
    """The unbroken runs ``[a, b)`` of the positions."""
    for a in sorted(p for p in positions if p - 1 not in positions):
        b = a + 1
        while b in positions:
            b += 1
        yield a, b


def rows_at(
    paths: Sequence[Path],
    file: npt.NDArray[np.int32],
    row: npt.NDArray[np.int64],
    schema: pa.Schema,
) -> pa.Table:
    """The rows ``row`` of ``paths[file]``, null where ``file`` is -1; each is read once, and memory
    holds one row group beside them."""
    order = np.lexsort((row, file))
    order = order[file[order] >= 0]
    files, rows = file[order], row[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (np.diff(files) != 0) | (np.diff(rows) != 0)
    place = np.full(len(file), -1, np.int64)
    place[order] = np.cumsum(new) - 1
    files, rows = files[new], rows[new]
    found = pa.concat_tables([schema.empty_table(), *tables_at(paths, files, rows, schema)])
    return found.take(pa.array(place, mask=place < 0))


def tables_at(
    paths: Sequence[Path],
    file: npt.NDArray[np.int32],
    row: npt.NDArray[np.int64],
    schema: pa.Schema,
) -> Iterator[pa.Table]:
    """As :func:`rows_at`, those of one row group at a time; both ascend, ``file`` first."""
    for number in np.unique(file).tolist():
        first, last = np.searchsorted(file, (number, number + 1))
        yield from _rows_of(paths[number], row[first:last], schema)


def _rows_of(path: Path, rows: npt.NDArray[np.int64], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows (ascending) of one file, with the columns of ``schema``: null where the file has
    none of that name and type."""
    with reading_file(path) as parquet:
        have = [
            f.name
            for f in schema
            if f.name in parquet.schema_arrow.names
            and parquet.schema_arrow.field(f.name).type == f.type
        ]
        first = 0
        for group in range(parquet.metadata.num_row_groups):
            last = first + parquet.metadata.row_group(group).num_rows
            here = rows[np.searchsorted(rows, first) : np.searchsorted(rows, last)] - first
            if len(here):
                table = parquet.read_row_group(group, columns=have).take(pa.array(here))
                columns = [
                    (
                        table.column(f.name).cast(f.type)
                        if f.name in have
                        else pa.nulls(len(here), f.type)
                    )
                    for f in schema
                ]
                yield pa.Table.from_arrays(columns, schema=schema)
            first = last


@contextlib.contextmanager
def reading(view: str) -> Iterator[None]:
    """What goes wrong while a view's history is read, as a
    :class:`precompute.store.errors.SnapshotError`, or an
    :class:`precompute.store.errors.UnreadableError` where this process is short of something."""
    try:
        yield
    except PrecomputeError:
        raise
    except duckdb.OutOfMemoryException as exc:
        raise SnapshotError(
            f"the history of view {view!r} does not fit into DuckDB's memory: raise memory_mb"
            f" ({exc})"
        ) from exc
    except (duckdb.Error, *BROKEN) as exc:
        limit = limit_of(exc)
        if limit is not None:
            raise UnreadableError(
                f"the history of view {view!r} cannot be read ({exc}): {limit}"
            ) from exc
        raise SnapshotError(
            f"the history of view {view!r} cannot be read: {str(exc).strip()[:300]}"
        ) from exc
