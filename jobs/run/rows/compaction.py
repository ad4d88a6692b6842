"""Compaction: rows of earlier snapshots, copied into parts of one; which rows a run replaces or
removes, and the figures without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precompute.jobs.run.rows import chunks
from precompute.jobs.run.rows.chunks import stored_key
from precompute.jobs.run.rows.open_view import OpenView
from precompute.jobs.run.rows.plan import Plan
from precompute.sources.diff import find_deletes
from precompute.store.disk.record import replace
from precompute.store.feature_view import FeatureView
from precompute.store.history.changes import Changes
from precompute.store.offline.row_figures import RowCounter, RowFigures, count
from precompute.store.offline.selection import Selection, rows_beside, seed_of
from precompute.store.offline.snapshot import DELETES_SCHEMA, Part, Snapshot
from precompute.store.offline.view_store import ViewStore

DRAWN_ROWS = 8192
"""Rows that are drawn at most. Reading costs by row groups, of which 2,048 rows need as many: see
:data:`precompute.store.offline.selection.CLUSTERS`."""


class Replaced:
    """The rows of one snapshot that another does not have, by position.

    Args:
        store: where the parts are.
        old: the snapshot with the rows.
        new: the one without them, committed or not, before it is compacted.
        columns: of the old snapshot, to read.

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
        """All of the rows, by position."""
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
    """Figures of all rows of a snapshot that is not committed yet: its parent's and those of its
    parts, less the rows that it replaced or removed.

    Args:
        store: of the view.
        snapshot: full, or a delta.
        of_parts: path of a part → figures of all its rows; a part of no rows has none.
        replaced: of a delta, the rows of its parent that it replaced or removed.

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
        assert replaced.old.figures is not None
        figures = figures.plus(_without(replaced.old.figures, replaced, view))
    return figures


def _without(figures: RowFigures, gone: Replaced, view: FeatureView) -> RowFigures:
    """Figures without the rows that are gone. Rows without a value, not finite, or zeros are
    counted exactly, since a gate may allow none; the others are estimated from a sample: they are a
    small share of all, and the error is a small share of that."""
    total = gone.rows.count
    if not total:
        return figures
    drawn = gone.drawn
    rare = figures.not_finite or figures.valueless or any(v.zero for v in figures.vectors.values())
    if not rare or drawn.num_rows == total:
        return figures.less(count(drawn.to_batches(), view), total)
    counter = RowCounter(view)
    for batch in drawn.to_batches():
        counter.add(batch)
    plain = drawn.take(pa.array(np.setdiff1d(np.arange(drawn.num_rows), counter.rare())))
    one_by_one = gone.rows.rare() if plain.num_rows else gone.rows
    figures = figures.less(count(one_by_one.batches(view.feature_names), view), one_by_one.count)
    return figures.less(count(plain.to_batches(), view), total - one_by_one.count)


# ---- Compaction: the rows of a chain, or of its last deltas, copied into parts of one
# snapshot; nothing is computed.


def compacted(store: ViewStore, opened: OpenView, delta: Snapshot) -> Snapshot:
    """The same rows as a delta that is not committed yet, as a full snapshot.

    Raises:
        SnapshotError: a file of the chain is missing or damaged, or the file system failed.
    """
    copies = _Copies(store, delta)
    for batch in store.batches(delta):
        copies.add(batch)
    copies.write()
    # without rows there is one empty part, which shows the columns
    if not copies.parts:
        copies.parts.append(
            store.write_part(delta.run, "compact-00000.parquet", chunks.no_rows(opened))
        )
    bases = _bases(store.chain(delta)[:-1])
    alone = replace(
        delta,
        kind="full",
        parent=None,
        bases=bases,
        parts=tuple(copies.parts),
        deletes=None,
        own_deletes=0,
    )
    return replace(alone, figures=copies.figures)


def merged(store: ViewStore, delta: Snapshot, since: int) -> Snapshot:
    """The same rows as a delta that is not committed yet, as a delta over an earlier snapshot of
    its chain, in place of the deltas between.

    Raises:
        SnapshotError: a file of these is missing or damaged, or the file system failed.
    """
    below = next(layer for layer in store.chain(delta) if layer.number == since)
    changes = Changes(store, below, delta)
    changes.check_parts()
    copies = _Copies(store, delta)
    for batch in changes.batches():
        copies.add(batch)
    copies.write()
    deletes = changes.deletes
    part = (
        None if deletes is None else store.write_part(delta.run, "compact-deletes.parquet", deletes)
    )
    between = changes.layers[:-1]
    losses = [layer.losses for layer in between]
    return replace(
        delta,
        parent=since,
        bases=_bases(between),
        base_losses=None if None in losses else sum(filter(None, losses)),
        parts=tuple(copies.parts),
        deletes=part,
        own_deletes=0,
    )


def _bases(copied: Sequence[Snapshot]) -> tuple[int, ...]:
    return tuple(
        sorted(
            {layer.number for layer in copied}
            | {number for layer in copied for number in layer.bases}
        )
    )


class _Copies:
    """Rows gathered to parts of about :data:`precompute.jobs.run.rows.chunks.PART_BYTES`."""

    def __init__(self, store: ViewStore, snapshot: Snapshot) -> None:
        self._store, self._snapshot = store, snapshot
        self.parts: list[Part] = []
        self.figures = RowFigures()
        self._gathered: list[pa.RecordBatch] = []
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self._gathered.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= chunks.PART_BYTES:
            self.write()

    def write(self) -> None:
        if not self._gathered:
            return
        counter, name = RowCounter(self._snapshot.view), f"compact-{len(self.parts):05d}.parquet"
        for batch in self._gathered:
            counter.add(batch)
        self.figures = self.figures.plus(counter.figures())
        table = pa.Table.from_batches(self._gathered)
        self.parts.append(self._store.write_part(self._snapshot.run, name, table, counter.rare()))
        self._gathered, self._bytes = [], 0


@dataclass(frozen=True, slots=True)
class Deletes:
    """The rows that a run replaces or removes: ``part`` is the file that names them, ``own`` how
    many of them are in chunks taken over, ``parts`` the run's parts that still have a live row."""

    parts: tuple[Part, ...]
    part: Part | None = None
    own: int = 0


def write_deletes(
    store: ViewStore, run: str, opened: OpenView, plan: Plan, parts: Sequence[Part]
) -> Deletes:
    """Write ``deletes.parquet``, if there is anything to delete.

    Args:
        store: of the view.
        run: its id.
        opened: the view; its source knows the rows that are replaced.
        plan: of the run.
        parts: of the run, with those taken over.

    Raises:
        SnapshotError: the file system failed.
    """
    parts = tuple(parts)
    if plan.parent is None and not plan.diff.resumed:
        return Deletes(parts)
    dead = find_deletes(opened.source)
    if not plan.diff.resumed:
        dead = dead.filter(pc.invert(dead.column("finished")))
    if not dead.num_rows:
        return Deletes(parts)
    inherited = [] if plan.parent is None else _relative(store, plan.parent)
    taken_over = [chunk.part for chunk in plan.finished if chunk.part is not None]
    finished = np.asarray(dead.column("finished"))
    number = np.asarray(dead.column("file")) + np.where(finished, len(inherited), 0)
    counts = np.bincount(number, minlength=len(inherited) + len(taken_over))[len(inherited) :]
    useless = {
        len(inherited) + i: part.path
        for i, (part, rows) in enumerate(zip(taken_over, counts.tolist(), strict=True))
        if rows == part.rows
    }
    if useless:
        parts = tuple(part for part in parts if part.path not in useless.values())
        keep = ~np.isin(number, list(useless))
        dead, number = dead.filter(pa.array(keep)), number[keep]
        if not dead.num_rows:
            return Deletes(parts)
    paths = pa.array([*inherited, *(part.path for part in taken_over)], pa.string())
    files = pa.DictionaryArray.from_arrays(pa.array(number, pa.int32()), paths)
    keys = {
        f"key_{name}": stored_key(dead.column(f"key_{name}").combine_chunks())
        for name in opened.view.entity
    }
    columns = [files, dead.column("row"), dead.column("removed"), *keys.values()]
    table = pa.Table.from_arrays(columns, names=[*DELETES_SCHEMA.names, *keys])
    own = int(pc.sum(dead.column("finished")).as_py() or 0)
    return Deletes(parts, store.write_part(run, "deletes.parquet", table), own)


def _relative(store: ViewStore, snapshot: Snapshot) -> list[str]:
    """Paths of a snapshot's parts, as manifests name them."""
    folder = store.folder.absolute()
    return [str(path.relative_to(folder)) for path in store.part_paths(snapshot)]
