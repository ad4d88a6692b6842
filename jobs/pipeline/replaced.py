"""Replaced: the rows of a snapshot that are no rows of the one that comes after it, counted by position, and some of them, read once however many ask."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import pyarrow as pa

from store.offline.selection import Selection, rows_beside, seed_of
from store.offline.snapshot import Snapshot
from store.offline.view_store import ViewStore

DRAWN_ROWS = 8192
"""Their row groups are what costs, and are as many for 2,048: see :data:`store.offline.selection.CLUSTERS`."""


class Replaced:
    """The rows of one snapshot that another has not, by position.

    Args:
        store: where the parts are.
        old: the snapshot whose rows are meant.
        new: what it is compared with, by position: committed or not, and not yet compacted.
        columns: of the old snapshot, to be read.

    Raises:
        SnapshotError: from every property: a file of either is missing or damaged.
    """

    def __init__(self, store: ViewStore, old: Snapshot, new: Snapshot, columns: Sequence[str]) -> None:
        self.old, self.new = old, new
        self._store, self._columns = store, columns

    @cached_property
    def rows(self) -> Selection:
        """All of them."""
        return rows_beside(self._store.layers(self.old), self._store.layers(self.new))

    @cached_property
    def drawn(self) -> pa.Table:
        """Up to :data:`DRAWN_ROWS`, drawn at random; the same every time."""
        seed = seed_of(self._store.layers(self.new))
        return self._store.table(self.old, self.rows.draw(DRAWN_ROWS, seed), self._columns)
