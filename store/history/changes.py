"""Changes: how a snapshot differs from another one, row by row; how the newest rows of several
partitions differ from those that are served; and any two snapshots compared, rows by key in DuckDB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.disk.sql import VECTOR_ROWS, SpillFolder, open_duckdb, parquet_sql
from precompute.store.feature_view import Feature
from precompute.store.history.versions import Tables, key_kinds, key_names, reading, tables_at
from precompute.store.keys import key_column
from precompute.store.offline.segment import (
    KILLS_SCHEMA,
    Part,
    Segment,
    removed_keys,
)
from precompute.store.offline.selection import (
    Selection,
    file_row_bytes,
    reading_file,
    rows_beside,
)
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore


class Changes:
    """The rows of ``snapshot`` that are not ``since``'s, and the keys of ``since`` that
    ``snapshot`` has not.

    Rows of segments that both have are the same rows, whatever lies over them; others count as
    changed, copies among them.

    Args:
        store: of the view.
        since: a snapshot.
        snapshot: another one, of one entity; its list of segments continues that of ``since`` as a
            rule.

    Raises:
        SnapshotError: a file is missing or has another size.
    """

    def __init__(self, store: ViewStore, since: Snapshot, snapshot: Snapshot) -> None:
        self._store, self._since, self._snapshot = store, since, snapshot
        self._shared = shared_segments(since, snapshot)
        self.segments: Sequence[Segment] = snapshot.segments[self._shared :]
        """Those of ``snapshot`` that ``since`` has not, the lowest first."""

    @cached_property
    def _selection(self) -> Selection:
        return rows_beside(self._store.layers(self._snapshot), self._store.layers(self._since))

    @property
    def rows(self) -> int:
        """How many rows of ``snapshot`` are not ``since``'s."""
        return self._selection.count

    @cached_property
    def removed(self) -> pa.Array:
        """Key texts of the entities that had a row and have none any more, string [n]: they left
        since, or what they are now was rejected. Some may never have been in ``since``."""
        entity = self._snapshot.view.entity
        keys = [pa.array([], pa.string())]
        if self._shared == len(self._since.segments):
            # so no key is read of the rows that were only replaced
            for segment in self.segments:
                if segment.kills is not None and segment.removed:
                    path = self._store.whole_path(self._snapshot, segment.kills)
                    keys.append(removed_keys(path, entity))
        else:
            layers = (self._store.layers(self._since), self._store.layers(self._snapshot))
            gone = rows_beside(*layers).batches(list(entity))
            keys += [key_column(batch, entity) for batch in gone]
        left = pc.unique(pa.concat_arrays([column.cast(pa.string()) for column in keys]))
        if len(left):
            for batch in self.batches(list(entity), 65536):
                left = left.filter(pc.invert(pc.is_in(left, key_column(batch, entity))))
        return left

    def batches(
        self, columns: Sequence[str] | None = None, batch_rows: int = 8192
    ) -> Iterator[pa.RecordBatch]:
        """The rows of ``snapshot`` that are not ``since``'s, in its order, at most ``batch_rows``
        at a time; memory holds two row groups."""
        for batch in self._selection.batches(columns):
            for first in range(0, batch.num_rows, batch_rows):
                yield batch.slice(first, batch_rows)

    def check_parts(self) -> None:
        """As :meth:`ViewStore.check_parts`, of the segments alone that ``since`` has not."""
        self._store.check_parts(self._snapshot, self.segments)


def shared_segments(one: Snapshot, other: Snapshot) -> int:
    """How many segments two snapshots have in common, from the lowest on."""
    pairs = zip(one.segments, other.segments, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].name == pair[1].name, pairs))


# ---- Newest rows: the newest row of each key among the snapshots of several partitions, beside the
# rows that are served; in DuckDB.


@dataclass(frozen=True, slots=True)
class Back:
    """Rows of some files: ``row[i]`` of ``paths[file[i]]`` (int64 and int32, ascending)."""

    paths: Sequence[Path]
    file: npt.NDArray[np.int32]
    row: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as the last file has them, those of one row group at a time.

        Raises:
            SnapshotError: a file is damaged.
        """
        if not len(self):
            return
        with reading_file(self.paths[-1]) as opened:
            schema = opened.schema_arrow
        for table in tables_at(self.paths, self.file, self.row, schema):
            yield from table.to_batches()


@dataclass(frozen=True, slots=True)
class NewestRows:
    """How to change the rows that are served, so that each key has its newest row.

    ``rows`` is the result's number of rows; ``parts`` the files with new rows, by reference;
    ``gone`` served rows that are not in the result, of which ``removed`` keys have no row any more;
    ``own_dead`` rows of ``parts`` that are not in it. Both are tables of ``KILLS_SCHEMA`` and the
    key's columns. ``back`` are rows to be copied, since their files are served already: they are
    read as they are copied.
    ``oldest_us`` and ``newest_us``: when rows of the result were computed, µs since 1970, None
    without any.
    """

    rows: int
    parts: tuple[Part, ...]
    gone: pa.Table
    own_dead: pa.Table
    removed: int
    back: Back
    oldest_us: int | None
    newest_us: int | None


class _Files:
    """Parts of some snapshots of one view, numbered across all of them."""

    def __init__(self, store: ViewStore) -> None:
        self._store = store
        self.parts: dict[str, Part] = {}
        self._number: dict[str, int] = {}

    def of(self, snapshots: Iterable[Snapshot]) -> tuple[list[int], pa.Table]:
        """Numbers of the snapshots' files, and their dead rows as a table of ``f`` and ``r``.

        Raises:
            SnapshotError: a file is missing or has another size.
        """
        numbers: list[int] = []
        files: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
        rows: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        for snapshot in snapshots:
            parts = {part.path: part for part in snapshot.parts}
            own = [self._number.setdefault(path, len(self._number)) for path in parts]
            self.parts |= parts
            numbers += own
            for position, dead in self._store.layers(snapshot).dead.items():
                files.append(np.full(len(dead), own[position], np.int32))
                rows.append(np.asarray(dead, np.int64))
        return numbers, pa.table({"f": np.concatenate(files), "r": np.concatenate(rows)})

    def names(self) -> list[str]:
        """Their paths as manifests name them, by number."""
        return list(self._number)

    def path(self, number: int) -> Path:
        """Absolute path of one."""
        return (self._store.folder / self.names()[number]).absolute()


def newest_rows(
    store: ViewStore,
    members: Mapping[str, Snapshot],
    served: Snapshot | None = None,
    before: Mapping[str, Snapshot] | None = None,
    *,
    memory_mb: int,
) -> NewestRows:
    """The newest partition's row of each key, compared with what is served.

    Args:
        store: of the view.
        members: partition → its snapshot, all of one entity.
        served: an assembled snapshot; None to begin from nothing.
        before: its members, of which only the keys of those that are others now are compared.
        memory_mb: DuckDB's memory limit; it spills to a temporary folder beyond.

    Raises:
        SnapshotError: a file is missing or damaged.
    """
    ordered = [members[partition] for partition in sorted(members)]
    entity = ordered[-1].view.entity
    # a key that is another decides which partition's row is served, and rows are copied
    store.compare_parts(*ordered, *(before or {}).values(), *([] if served is None else [served]))
    with reading(store.name), _Rows(store, ordered, served, entity, memory_mb) as rows:
        if served is not None and before is not None:
            changed = {
                p
                for p in (*members, *before)
                if p not in members or p not in before or members[p].number != before[p].number
            }
            rows.narrow([of[p] for p in sorted(changed) for of in (before, members) if p in of])
        return rows.compared()


class _Rows(Tables):
    """The comparison: table ``winner`` has the newest rows of the keys,
    ``held`` those that are served, ``come`` those that are not."""

    def __init__(
        self,
        store: ViewStore,
        ordered: Sequence[Snapshot],
        served: Snapshot | None,
        entity: Sequence[str],
        memory_mb: int,
    ) -> None:
        self._store, self._ordered, self._served, self._entity = store, ordered, served, entity
        self._files, self._keys = _Files(store), key_names(entity)
        self._listed = ", ".join(self._keys)
        self._semi = ""
        super().__init__(memory_mb)

    def narrow(self, snapshots: Sequence[Snapshot]) -> None:
        """Compare only keys of these snapshots."""
        files, _ = self._files.of(snapshots)
        # rows that are dead in one of them, too: they live in another one that has the same file
        self._connection.execute(
            f"CREATE TEMP TABLE affected AS SELECT DISTINCT {self._listed} FROM"
            f" ({self._scan(files, None)})"
        )
        self._semi = f" SEMI JOIN affected USING ({self._listed})"

    def compared(self) -> NewestRows:
        """Compare what the members hold with what is served."""
        run, keys = self._connection.execute, self._listed
        held, dead = self._files.of([] if self._served is None else [self._served])
        self._register("dead_held", dead)
        ranks: dict[int, int] = {}
        for rank, member in enumerate(self._ordered):
            ranks |= dict.fromkeys(self._files.of([member])[0], rank)
        files, dead = self._files.of(self._ordered)
        self._register("dead_member", dead)
        self._register(
            "rank",
            pa.table(
                {
                    "f": pa.array(ranks.keys(), pa.int32()),
                    "rank": pa.array(ranks.values(), pa.int32()),
                }
            ),
        )
        run(
            f"CREATE TEMP TABLE winner AS SELECT {keys}, unnest(arg_max({{'f': f, 'r': r, 'us': us,"
            " 'hash': hash}, rank)) FROM (SELECT * FROM"
            f" ({self._scan(files, 'dead_member')}){self._semi}) JOIN rank USING (f) GROUP BY"
            f" {keys}"
        )
        run(
            f"CREATE TEMP TABLE held AS SELECT * FROM ({self._scan(held, 'dead_held')}){self._semi}"
        )
        run(
            f"CREATE TEMP TABLE come AS SELECT * FROM winner ANTI JOIN held USING ({keys}, us,"
            " hash)"
        )
        run(
            f"CREATE TEMP TABLE gone AS SELECT * FROM held ANTI JOIN winner USING ({keys}, us,"
            " hash)"
        )
        old = set(held)
        new = [
            f for (f,) in run("SELECT DISTINCT f FROM come ORDER BY f").fetchall() if f not in old
        ]
        return self._result(held, new)

    def _result(self, held: list[int], new: list[int]) -> NewestRows:
        run, keys = self._connection.execute, self._listed
        gone = self._table(
            f"SELECT f, r, w.f0 IS NULL AS removed, {keys} FROM gone LEFT JOIN (SELECT {keys}, f AS"
            f" f0 FROM winner) w USING ({keys}) ORDER BY f, r"
        )
        own_dead = self._table(
            f"SELECT f, r, false AS removed, {keys} FROM ({self._scan(new, None)}) ANTI JOIN come"
            " USING (f, r) ORDER BY f, r"
        )
        self._register("held_file", pa.table({"f": pa.array(held, pa.int32())}))
        back = self._query("SELECT f, r FROM come SEMI JOIN held_file USING (f) ORDER BY f, r")
        stay = f"SELECT us FROM ({self._scan(held, 'dead_held')}) ANTI JOIN gone USING (f, r)"
        oldest, newest = run(
            f"SELECT min(us), max(us) FROM ({stay} UNION ALL SELECT us FROM come)"
        ).fetchall()[0]
        (come,) = run("SELECT count(*) FROM come").fetchall()[0]
        rows = come + (0 if self._served is None else self._served.rows) - gone.num_rows
        parts, names = self._files.parts, self._files.names()
        removed = int(np.asarray(gone.column("removed")).sum())
        return NewestRows(
            rows,
            tuple(parts[names[f]] for f in new),
            gone,
            own_dead,
            removed,
            self._back(back),
            oldest,
            newest,
        )

    def _back(self, places: pa.Table) -> Back:
        file, row = (np.asarray(places.column(name)) for name in ("f", "r"))
        used, position = np.unique(file, return_inverse=True)
        paths = [self._files.path(int(number)) for number in used]
        return Back(paths, position.astype(np.int32), row)

    def _table(self, sql: str) -> pa.Table:
        """As a file of kills has it, in the order of the query."""
        found = self._query(sql)
        names = pa.array(self._files.names(), pa.string())
        part = pa.DictionaryArray.from_arrays(
            found.column("f").combine_chunks().cast(pa.int32()), names
        )
        columns = [part, *(found.column(name) for name in ("r", "removed", *self._keys))]
        return pa.Table.from_arrays(
            columns, names=[*KILLS_SCHEMA.names, *(f"key_{name}" for name in self._entity)]
        )

    def _scan(self, files: Sequence[int], dead: str | None) -> str:
        """SQL of file, row, key, ``computed_at`` (µs) and input hash of the rows of some files but
        for those in a table of dead ones."""
        if not files:
            part = self._store.part_paths(self._ordered[-1])[0]
            kinds = key_kinds(part, self._entity)
            nothing = ", ".join(f"NULL::BIGINT AS {name}" for name in ("r", "us", "hash"))
            typed = ", ".join(
                f"NULL::{kind} AS {key}" for key, kind in zip(self._keys, kinds, strict=True)
            )
            return f"SELECT NULL::INTEGER AS f, {typed}, {nothing} WHERE false"
        numbers = ", ".join(map(str, files))
        columns = ", ".join(
            f'"{column}" AS {key}' for column, key in zip(self._entity, self._keys, strict=True)
        )
        read = (
            f"SELECT ([{numbers}])[file_index::BIGINT + 1]::INTEGER AS f, file_row_number AS r,"
            f" {columns}, epoch_us(computed_at) AS us, input_hash AS hash FROM"
            f" {parquet_sql([self._files.path(f) for f in files])}"
        )
        return read if dead is None else f"SELECT * FROM ({read}) ANTI JOIN {dead} USING (f, r)"


# ---- Compared: the rows of two snapshots side by side.


WINDOW_ROWS, WINDOW_BYTES = 16_384, 16 * 2**20
"""Rows of both sides that are compared at a time, at most, and their bytes, about; one row of each
may have more."""
VECTOR_SHARE = 8
"""Rows are joined with their features as long as a vector of DuckDB's takes no more than this part
of its memory. Of larger ones the keys are joined, and the features read by position: which reads
the row groups of the second side again and again where its rows come in another order."""


class Joined(NamedTuple):
    """Some keys: their texts, string [rows]; whether each has a row in the first and in the second
    snapshot, bool [rows]; and its features there, null where it has none. Numbers of 16 bits come
    as float32."""

    keys: pa.Array
    in_first: pa.Array
    in_second: pa.Array
    first: pa.RecordBatch
    second: pa.RecordBatch


def joined_rows(
    store: ViewStore, first: Snapshot, second: Snapshot, features: Sequence[Feature], memory_mb: int
) -> Iterator[Joined]:
    """The rows of two snapshots of one entity, but for those that both have from the same place of
    the same file.

    Args:
        store: of their view.
        first: a snapshot.
        second: another.
        features: that both have, of one type.
        memory_mb: DuckDB's memory limit.

    Raises:
        SnapshotError: a file is missing or damaged.
    """
    store.compare_parts(first, second)
    layers = [store.layers(snapshot) for snapshot in (first, second)]
    sides = (
        _Side(rows_beside(layers[0], layers[1]), first.view.entity, features),
        _Side(rows_beside(layers[1], layers[0]), second.view.entity, features),
    )
    row_bytes = sum(side.most_row_bytes for side in sides)
    whole = VECTOR_ROWS * row_bytes <= memory_mb * 2**20 // VECTOR_SHARE
    # a vector is the least that DuckDB hands on
    rows = max(VECTOR_ROWS, min(WINDOW_ROWS, WINDOW_BYTES // row_bytes))
    with (
        reading(store.name),
        closing(SpillFolder()) as spill,
        closing(open_duckdb(spill, memory_mb)) as connection,
    ):
        for name, side in zip("ab", sides, strict=True):
            connection.register(name, side.reader(with_features=whole))
        columns = [f"{side}.f{n} AS {side}{n}" for side in "ab" for n in range(len(features))]
        # read as it comes where it has the features: neither side is sorted
        query = (
            "SELECT coalesce(a.k, b.k) AS k, a.k IS NOT NULL AS in_a, b.k IS NOT NULL AS in_b,"
            f" {', '.join(columns if whole else ['a.n AS a', 'b.n AS b'])}"
            " FROM a FULL OUTER JOIN b ON a.k = b.k"
            + ("" if whole else " ORDER BY coalesce(a.n, b.n), b.n")
        )
        names = [feature.name for feature in features]
        for batch in connection.sql(query).to_arrow_reader(rows):
            if not whole:
                yield from _by_position(batch, sides)
                continue
            of = [batch.columns[3 + at * len(names) : 3 + (at + 1) * len(names)] for at in (0, 1)]
            first_rows, second_rows = (
                pa.RecordBatch.from_arrays(columns, names=names) for columns in of
            )
            keys, in_first, in_second = batch.columns[:3]
            yield Joined(keys, in_first, in_second, first_rows, second_rows)


def _by_position(batch: pa.RecordBatch, sides: tuple[_Side, _Side]) -> Iterator[Joined]:
    """The rows of some keys, of which ``a`` and ``b`` say where each side has them, a window after
    the other."""
    places = [np.asarray(batch.column(side).fill_null(-1)) for side in "ab"]
    ends = np.cumsum(sum(side.bytes_at(of) for side, of in zip(sides, places, strict=True)))
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        most = int(np.searchsorted(ends, before + WINDOW_BYTES, side="right"))
        stop = max(start + 1, most)
        first, second = (
            side.rows_at(of[start:stop]) for side, of in zip(sides, places, strict=True)
        )
        keys, in_first, in_second = batch.slice(start, stop - start).columns[:3]
        yield Joined(keys, in_first, in_second, first, second)
        start = stop


class _Side:
    """The rows of one of two snapshots that are compared, in their order, with the features in
    types that DuckDB has."""

    def __init__(self, rows: Selection, entity: Sequence[str], features: Sequence[Feature]) -> None:
        self._rows, self._entity = rows, entity
        self._kinds = {feature.name: readable(feature.arrow_type) for feature in features}
        self._ends = np.cumsum([0, *(file.count for file in rows.files)])
        # of a file without such rows nothing is looked at
        self._row_bytes = np.array(
            [1, *(file_row_bytes(file.path) if file.count else 1 for file in rows.files)]
        )
        self.most_row_bytes = int(self._row_bytes.max())
        """Bytes of a row of the file that has the largest ones, about."""

    def bytes_at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Bytes of the rows at some places, about; -1: there is none."""
        sizes = self._row_bytes[np.searchsorted(self._ends, places, side="right")]
        return np.where(places < 0, 0, sizes)

    def reader(self, *, with_features: bool) -> pa.RecordBatchReader:
        """Key texts ``k``, places ``n``, and the features as ``f0``, ``f1``, …"""
        kinds = self._kinds if with_features else {}
        schema = pa.schema(
            [
                *(("k", pa.string()), ("n", pa.int64())),
                *((f"f{n}", kind) for n, kind in enumerate(kinds.values())),
            ]
        )

        def batches() -> Iterator[pa.RecordBatch]:
            first = 0
            for batch in self._rows.batches([*self._entity, *kinds]):
                places = pa.array(np.arange(first, first + batch.num_rows))
                columns = [pc.cast(batch.column(name), kind) for name, kind in kinds.items()]
                yield pa.RecordBatch.from_arrays(
                    [key_column(batch, self._entity), places, *columns], schema=schema
                )
                first += batch.num_rows

        return pa.RecordBatchReader.from_batches(schema, batches())

    def rows_at(self, places: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """The features of the rows at some places, null at -1."""
        schema = pa.schema(self._kinds)
        wanted, index = np.unique(places[places >= 0], return_inverse=True)
        found = pa.Table.from_batches(
            (
                pa.record_batch(
                    [pc.cast(batch.column(name), kind) for name, kind in self._kinds.items()],
                    schema=schema,
                )
                for batch in self._rows.at(wanted).batches([*self._kinds])
            ),
            schema,
        )
        into = np.full(len(places), -1, np.int64)
        into[places >= 0] = index
        taken = found.take(pa.array(into, mask=into < 0)).combine_chunks()
        return pa.RecordBatch.from_arrays(
            [_one_array(column) for column in taken.columns], schema=schema
        )


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def readable(kind: pa.DataType) -> pa.DataType:
    """The type in which DuckDB reads values: it has no numbers of 16 bits with a point."""
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(readable(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(readable(kind.value_type))
    return pa.float32() if pa.types.is_float16(kind) else kind
