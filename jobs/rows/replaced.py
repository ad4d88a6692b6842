"""Replaced: the rows of a snapshot that are no rows of the one that comes after it, counted by
position, and some of them, read once however many ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from precompute.store.feature_view import FeatureView
from precompute.store.offline.row_figures import RowCounter, RowFigures, count
from precompute.store.offline.selection import Selection, rows_beside, seed_of
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.record import replace

DRAWN_ROWS = 8192
"""Their row groups are what costs, and are as many for 2,048: see
:data:`precompute.store.offline.selection.CLUSTERS`."""


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

    def __init__(
        self, store: ViewStore, old: Snapshot, new: Snapshot, columns: Sequence[str]
    ) -> None:
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


def figures_of(
    store: ViewStore,
    snapshot: Snapshot,
    of_parts: Mapping[str, RowFigures],
    replaced: Replaced | None,
) -> RowFigures:
    """Of every row of a snapshot that is not committed yet: its parent's and those of its parts,
    less the rows that are no rows of it.

    Args:
        store: of the view.
        snapshot: full, or a delta.
        of_parts: path of a part → figures of all its rows; a part of no rows has none.
        replaced: of a delta, the rows of its parent that are no rows of it.

    Raises:
        SnapshotError: a file is missing or damaged.
    """
    view, figures = snapshot.view, RowFigures()
    for part in snapshot.parts:
        figures = figures.plus(of_parts.get(part.path, RowFigures()))
    if snapshot.own_deletes:
        alone = replace(snapshot, parent=None, deletes=None, own_deletes=0)
        figures = _without(figures, Replaced(store, alone, snapshot, view.feature_names), view)
    if replaced is not None:
        of_parent = replaced.old.figures or count(
            store.batches(replaced.old, view.feature_names), view
        )
        figures = figures.plus(_without(of_parent, replaced, view))
    return figures


def _without(figures: RowFigures, gone: Replaced, view: FeatureView) -> RowFigures:
    """Figures without the rows that are gone. Those without a value, not finite, or zeros are
    counted one by one, since a gate may allow none of them; for all others what the drawn ones show
    is taken off: their share of all is small, and the error is a small share of it.
    """
    total = gone.rows.count
    if not total:
        return figures
    drawn, rare = (
        gone.drawn,
        figures.not_finite or figures.valueless or any(v.zero for v in figures.vectors.values()),
    )
    if not rare or drawn.num_rows == total:
        return figures.less(count(drawn.to_batches(), view), total)
    counter = RowCounter(view)
    for batch in drawn.to_batches():
        counter.add(batch)
    plain = drawn.take(pa.array(np.setdiff1d(np.arange(drawn.num_rows), counter.rare())))
    one_by_one = gone.rows.rare() if plain.num_rows else gone.rows
    figures = figures.less(count(one_by_one.batches(view.feature_names), view), one_by_one.count)
    return figures.less(count(plain.to_batches(), view), total - one_by_one.count)
