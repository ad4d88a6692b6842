"""Index publisher: finds what a snapshot's vectors are searched by, or builds it: a base, and the
rows that changed since, where that is of another list of segments."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.record import plain
from precompute.store.errors import OtherFormatError, SnapshotError, VectorIndexError
from precompute.store.offline.log import LiveRef
from precompute.store.offline.part_file import Layers
from precompute.store.offline.runs import Report
from precompute.store.offline.segment import COPIED
from precompute.store.offline.selection import Selection, rows_beside
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.vectors.index_build import build_changed, build_index, without_copies
from precompute.store.vectors.index_choice import Limits
from precompute.store.vectors.index_files import (
    PARTS,
    IndexFigures,
    ListedSegment,
    RowNumbers,
    check_files,
    mark_of,
    read_index_record,
)
from precompute.store.vectors.index_rows import index_columns
from precompute.store.vectors.indexed_parts import (
    IndexedList,
    IndexedPart,
    base_name,
    changed_name,
    index_rows,
    is_base,
    read_parts,
    space_of,
)
from precompute.store.vectors.vector_index import VectorIndex, is_there

log = logging.getLogger(__name__)

MOST_CHANGED = 0.1
"""Share of a snapshot's rows that a base may lack: a search compares with each of them."""
MOST_GONE = 0.5
"""Share of a base's rows that may count no more: a search passes over each of them."""
BATCH_ROWS = 8192
"""Rows that are read from Parquet at a time, at most."""


class _Over(NamedTuple):
    """What a list of segments has over a base."""

    base: str
    """Name of its folder."""
    rows: int
    """How many it has."""
    changed: Selection
    """Rows of the list that the base has not."""
    gone: RowNumbers
    """Numbers of its rows that are none of the list."""

    @property
    def distance(self) -> tuple[int, int, str]:
        """The smaller, the less is searched in vain."""
        return self.changed.count, len(self.gone), self.base

    def lacks_little(self, rows: int, copies: int = 0) -> bool:
        """Whether it may be searched for a list of so many rows, where so many of the changed ones
        may be copies of those that are gone, or have no vector."""
        return (
            self.changed.count - copies <= MOST_CHANGED * rows
            and len(self.gone) - copies <= MOST_GONE * self.rows
        )

    def copies(self, parts: Iterable[IndexedPart]) -> int:
        """How many rows may be copies, at most, where its base has these ``parts``."""
        changed = sum(file.count for file in self.changed.files if _is_copied(file.path.name))
        return changed + sum(part.living for part in parts if _is_copied(Path(part.path).name))


class IndexPublisher:
    """The vector indexes of one view; the caller holds its publishing lease.

    Args:
        store: of the view; the snapshots are there.
        report: stage times and figures are added to it.
        memory_mb: what building one may keep in memory.
    """

    def __init__(self, store: ViewStore, report: Report, memory_mb: int) -> None:
        self._store, self._report = store, report
        self._limits = Limits(memory_mb=memory_mb)

    def are_there(self, names: Collection[str]) -> bool:
        """Whether the folders are there, each file of its size."""
        for name in names:
            if not is_there(self._store.index_folder(name)):
                log.warning(
                    "view %r: the vector index %s is gone; it is built again",
                    self._store.name,
                    name,
                )
                return False
        return True

    def ready(
        self, snapshot: Snapshot, ref: LiveRef | None, *, doubted: bool = False, again: bool = False
    ) -> tuple[tuple[str, ...], frozenset[str]]:
        """What a snapshot is searched by; what is not there is built: beside what is live, or,
        where a folder is lost or damaged, under its name.

        Args:
            snapshot: about to be live.
            ref: what is live, and was before.
            doubted: all files are compared with their checksums, those of what is live, too.
            again: build the base, whatever is there.

        Returns:
            names of the folders, the base's first, and which of them were built; none of a view
                without an index.

        Raises:
            SnapshotError: a file of the snapshot is damaged, or the disk refuses.
            OtherFormatError: a folder of the name is another version's.
        """
        if snapshot.view.index is None:
            return (), frozenset()
        named = () if ref is None or again else _named(snapshot, ref)
        if named and self._opens(named):
            return named, frozenset()
        live = () if ref is None or doubted else ref.indexes
        with self._report.stage("index"):
            self._sweep()
            listed = self._listed(snapshot)
            over = None if again else self._nearest(snapshot, listed, live)
            if over is None:
                names = [base_name(listed)]
                built = frozenset(names)
                self._build_base(snapshot, listed, names[0])
            else:
                names, built = [over.base], frozenset()
            if over is not None and (over.changed.count or len(over.gone)):
                names.append(changed_name(listed, over.base))
                if not self._is_whole(names[1]):
                    self._build_changed(snapshot, listed, over, names[1])
                    built = frozenset(names[1:])
            crashpoint("index.build")
        return tuple(names), built

    def drop_all_but(self, keep: Collection[str]) -> None:
        """Remove the folders of other names; one of another format is another version's, and
        stays."""
        for path in self._folders():
            if path.name not in keep:
                try:
                    is_there(path)
                except OtherFormatError:
                    continue
                shutil.rmtree(path, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return sorted(self._store.indexes.iterdir()) if self._store.indexes.is_dir() else []

    def _sweep(self) -> None:
        """Remove what a killed build left."""
        for path in self._folders():
            if path.name.endswith(".tmp"):
                shutil.rmtree(path, ignore_errors=True)

    def _opens(self, names: tuple[str, ...]) -> bool:
        try:
            VectorIndex(*map(self._store.index_folder, names))
        except VectorIndexError as exc:
            log.warning("%s; it is built again", exc)
            return False
        return True

    def _is_whole(self, name: str) -> bool:
        folder = self._store.index_folder(name)
        try:
            check_files(folder, read_index_record(folder)[0])
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as exc:
            log.warning("the vector index %s is damaged (%s)", folder, exc)
            return False
        return True

    # ---- which one

    def _listed(self, snapshot: Snapshot) -> IndexedList:
        dead = self._store.layers(snapshot).dead
        none = np.empty(0, np.int64)
        return IndexedList(
            space_of(snapshot.view, snapshot.model),
            tuple(ListedSegment(one.name, one.sha256) for one in snapshot.segments),
            [
                IndexedPart(part.path, part.sha256, part.rows, dead.get(number, none))
                for number, part in enumerate(snapshot.parts)
            ],
        )

    def _nearest(
        self, snapshot: Snapshot, listed: IndexedList, trusted: Collection[str]
    ) -> _Over | None:
        """Of the bases that are there and whole the one that lacks the fewest rows; None where each
        lacks too many. Of those that are ``trusted`` only the sizes are looked at."""
        near, far = list[_Over](), list[_Over]()
        for path in self._folders():
            parts = self._parts_of(path, listed) if is_base(path.name) else None
            over = None if parts is None else self._over(path.name, parts, listed)
            if over is not None and over.lacks_little(snapshot.rows):
                near.append(over)
            elif over is not None and over.lacks_little(snapshot.rows, over.copies(parts or ())):
                far.append(over)
        for over in sorted(near, key=lambda over: over.distance):
            if over.base in trusted or self._is_whole(over.base):
                return over
        # to read what may be copied takes a hundredth of building a base
        closer = [self._without_copies(snapshot, over) for over in far if self._is_whole(over.base)]
        few = [over for over in closer if over.lacks_little(snapshot.rows)]
        return min(few, key=lambda over: over.distance, default=None)

    def _without_copies(self, snapshot: Snapshot, over: _Over) -> _Over:
        """The same without the rows that were copied, as they are, from one file to another."""
        self._compare(snapshot, over.changed)
        view = snapshot.view
        rows = over.changed.batches(index_columns(view))
        folder = self._store.index_folder(over.base)
        others, gone = without_copies(folder, _in_batches(rows), over.gone, view)
        return over._replace(changed=over.changed.at(others), gone=gone)

    def _parts_of(self, folder: Path, listed: IndexedList) -> list[IndexedPart] | None:
        """The parts of a base that may be searched for the list; None of others."""
        try:
            record, _ = read_index_record(folder)
            if record.space != listed.space or record.base is not None:
                return None
            if mark_of(folder / PARTS) != record.files[PARTS]:
                raise ValueError(f"{PARTS} differs from its checksum")
            return read_parts(folder / PARTS)
        except (OSError, ValueError, KeyError, OtherFormatError) as exc:
            log.warning("the vector index %s cannot be built on: %s", folder, exc)
            return None

    def _over(self, base: str, parts: list[IndexedPart], listed: IndexedList) -> _Over:
        """By the names of files and the rows that are dead in either: no key is looked up."""
        folder, same = self._store.folder, {(part.path, part.sha256) for part in listed.parts}
        has = _layers(listed.parts, [folder / part.path for part in listed.parts])
        had = _layers(
            parts,
            # one of the same name and other bytes is another file
            [
                folder / (part.path if (part.path, part.sha256) in same else part.sha256)
                for part in parts
            ],
        )
        gone = {
            number: file.within(0, file.rows)
            for number, file in enumerate(rows_beside(had, has).files)
            if file.count
        }
        rows = sum(part.living - len(part.null) for part in parts)
        return _Over(base, rows, rows_beside(has, had), index_rows(parts, gone))

    # ---- building

    def _build_base(self, snapshot: Snapshot, listed: IndexedList, name: str) -> None:
        store, view = self._store, snapshot.view
        folder = store.index_folder(name)
        # one of another format is refused, and not replaced
        is_there(folder)
        self._compare(snapshot)
        rows = store.batches(snapshot, index_columns(view), BATCH_ROWS)
        self._note(
            build_index(
                folder, rows, view, model=snapshot.model, limits=self._limits, listed=listed
            )
        )

    def _build_changed(
        self, snapshot: Snapshot, listed: IndexedList, over: _Over, name: str
    ) -> None:
        store, view = self._store, snapshot.view
        self._compare(snapshot, over.changed)
        self._note(
            build_changed(
                store.index_folder(name),
                store.index_folder(over.base),
                _in_batches(over.changed.batches(index_columns(view))),
                over.gone,
                view,
                model=snapshot.model,
                listed=listed,
            )
        )

    def _compare(self, snapshot: Snapshot, rows: Selection | None = None) -> None:
        """Compare the files of a snapshot, or those that some rows are read of, with their
        checksums; what is damaged is marked, so that the next run builds on what is whole."""
        store = self._store
        try:
            if rows is None:
                store.compare_parts(snapshot)
                return
            read = {file.path for file in rows.files if file.count}
            for part in snapshot.parts:
                if part.in_folder(store.folder).path in read:
                    store.whole_path(snapshot, part)
        except SnapshotError:
            store.check_parts(snapshot)
            raise

    def _note(self, figures: IndexFigures) -> None:
        self._report.index = plain(figures)
        self._report.usage.written_bytes += figures.size_bytes


def _named(snapshot: Snapshot, ref: LiveRef) -> tuple[str, ...]:
    """What the log says that a snapshot is searched by, where it is live or was before."""
    if snapshot.number == ref.snapshot:
        return ref.indexes
    return ref.previous_indexes if snapshot.number == ref.previous else ()


def _layers(parts: Sequence[IndexedPart], paths: Sequence[Path]) -> Layers:
    return Layers(
        [path.absolute() for path in paths],
        [part.rows for part in parts],
        {number: part.dead for number, part in enumerate(parts)},
    )


def _is_copied(name: str) -> bool:
    return name.startswith(COPIED)


def _in_batches(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        for first in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(first, BATCH_ROWS)
