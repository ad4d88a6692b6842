"""Changes: how a snapshot differs from one that it builds on: rows written since, and keys without
a row now. What an overlay is loaded from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.store.errors import SnapshotError
from precompute.store.keys import key_column
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore


class Changes:
    """The rows of ``snapshot`` that are not ``since``'s, and the keys of ``since`` that
    ``snapshot`` has not.

    Args:
        store: of the view.
        since: a snapshot of ``snapshot``'s chain.
        snapshot: the later one.

    Raises:
        SnapshotError: a file is missing or has another size.
    """

    def __init__(self, store: ViewStore, since: Snapshot, snapshot: Snapshot) -> None:
        self._store, self._snapshot = store, snapshot
        chain = store.chain(snapshot)
        position = [layer.number for layer in chain].index(since.number)
        self.layers: Sequence[Snapshot] = chain[position + 1 :]
        """The snapshots after ``since``, the oldest first."""
        self._first = len({part.path for layer in chain[: position + 1] for part in layer.parts})
        """Number of the first file that ``since`` has not, among those of the chain."""

    @cached_property
    def rows(self) -> int:
        """Rows written since that ``snapshot`` still has."""
        layers = self._store.layers(self._snapshot)
        return sum(layers.rows[self._first :]) - sum(
            len(dead) for file, dead in layers.dead.items() if file >= self._first
        )

    @cached_property
    def removed(self) -> pa.Array:
        """Key texts of the entities that had a row and have none any more, string [n]: they left
        since, or what they are now was rejected. Some may never have been in ``since``."""
        if all(layer.losses == 0 for layer in self.layers):
            # all that are dead were replaced: of 50,000 rows that is 20 ms of reading keys
            return pa.array([], pa.string())
        dead = [self._dead(layer) for layer in self.layers if layer.deletes is not None]
        keys = pc.unique(pa.concat_arrays([pa.array([], pa.string()), *dead]))
        if len(keys):
            entity = self._snapshot.view.entity
            for batch in self.batches(list(entity), 65536):
                keys = keys.filter(pc.invert(pc.is_in(keys, key_column(batch, entity))))
        return keys

    @cached_property
    def deletes(self) -> pa.Table | None:
        """Which rows of ``since`` are none of ``snapshot``: what ``deletes.parquet`` of a delta
        right over it has, with the keys; None where there are none."""
        inherited = pa.array(
            [
                part.path
                for layer in self._store.chain(self._snapshot)[: -len(self.layers)]
                for part in layer.parts
            ],
            pa.string(),
        )
        tables = [self._read(layer, None) for layer in self.layers if layer.deletes is not None]
        tables = [
            table.filter(pc.is_in(table.column("part").cast(pa.string()), inherited))
            for table in tables
        ]
        tables = [table.unify_dictionaries() for table in tables if table.num_rows]
        return pa.concat_tables(tables) if tables else None

    def batches(
        self, columns: Sequence[str] | None = None, batch_rows: int = 8192
    ) -> Iterator[pa.RecordBatch]:
        """The rows written since that ``snapshot`` still has, as :meth:`ViewStore.batches` gives
        them."""
        return self._store.batches(self._snapshot, columns, batch_rows, first=self._first)

    def check_parts(self) -> None:
        """As :meth:`ViewStore.check_parts`, of what came since alone."""
        self._store.check_parts(self._snapshot, self.layers)

    def _dead(self, layer: Snapshot) -> pa.Array:
        """Key texts of the rows of earlier snapshots that are none of this one any more; those
        replaced, too."""
        entity = layer.view.entity
        table = self._read(layer, ["part", *(f"key_{name}" for name in entity)])
        # those of its own parts an interrupted run had computed: what is there of such a key is
        # another row, an earlier snapshot's perhaps
        own = pc.is_in(
            table.column("part").cast(pa.string()),
            pa.array([part.path for part in layer.parts], pa.string()),
        )
        earlier = table.drop_columns("part").filter(pc.invert(own))
        return key_column(earlier.rename_columns(list(entity)), entity)

    def _read(self, layer: Snapshot, columns: list[str] | None) -> pa.Table:
        assert layer.deletes is not None
        path: Path = self._store.checked_path(layer, layer.deletes)
        try:
            with pq.ParquetFile(path) as file:
                return file.read(columns)
        except (pa.ArrowException, OSError) as exc:
            raise SnapshotError(f"{path} cannot be read ({exc}); publish another snapshot") from exc
