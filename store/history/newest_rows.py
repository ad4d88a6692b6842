"""Newest rows: the newest row of each key among the snapshots of several partitions, and how they
differ from rows that are served; in DuckDB."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.disk.sql import parquet_sql
from precompute.store.history.versions import Tables, key_kinds, key_names, reading, rows_at
from precompute.store.offline.snapshot import DELETES_SCHEMA, Part, Snapshot
from precompute.store.offline.view_store import ViewStore


@dataclass(frozen=True, slots=True)
class NewestRows:
    """How to change the rows that are served, so that each key has its newest row.

    ``rows`` is the result's number of rows; ``parts`` the files with new rows, by reference;
    ``gone`` served rows that are not in the result, of which ``removed`` keys have no row any more;
    ``own_dead`` rows of ``parts`` that are not in it. Both are tables of ``DELETES_SCHEMA`` and the
    key's columns. ``back`` are rows to be copied, since their files are served already.
    ``oldest_us`` and ``newest_us``: when rows of the result were computed, µs since 1970, None
    without any.
    """

    rows: int
    parts: tuple[Part, ...]
    gone: pa.Table
    own_dead: pa.Table
    removed: int
    back: pa.Table
    oldest_us: int | None
    newest_us: int | None


class _Files:
    """Parts of some snapshots of one view, numbered across all of them."""

    def __init__(self, store: ViewStore) -> None:
        self._store = store
        self.parts: dict[str, Part] = {}
        self._number: dict[str, int] = {}

    def of(self, snapshots: Iterable[Snapshot]) -> tuple[list[int], pa.Table]:
        """Numbers of the files of the snapshots' chains, and their dead rows as a table of ``f``
        and ``r``.

        Raises:
            SnapshotError: a file is missing or has another size.
        """
        numbers: list[int] = []
        files: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
        rows: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        for snapshot in snapshots:
            parts = {
                part.path: part for layer in self._store.chain(snapshot) for part in layer.parts
            }
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
            self._copied(back),
            oldest,
            newest,
        )

    def _copied(self, back: pa.Table) -> pa.Table:
        file, row = (np.asarray(back.column(name)) for name in ("f", "r"))
        if not len(file):
            return pa.table({})
        used, position = np.unique(file, return_inverse=True)
        paths = [self._files.path(int(number)) for number in used]
        return rows_at(paths, position.astype(np.int32), row, pq.read_schema(paths[-1]))

    def _table(self, sql: str) -> pa.Table:
        """As ``deletes.parquet`` has it."""
        found = self._query(sql)
        names = pa.array(self._files.names(), pa.string())
        part = pa.DictionaryArray.from_arrays(
            found.column("f").combine_chunks().cast(pa.int32()), names
        )
        columns = [part, *(found.column(name) for name in ("r", "removed", *self._keys))]
        return pa.Table.from_arrays(
            columns, names=[*DELETES_SCHEMA.names, *(f"key_{name}" for name in self._entity)]
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
