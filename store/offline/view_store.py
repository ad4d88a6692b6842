"""Offline store: versioned Parquet on a file system, a folder for each view. The one source of
truth; every online store is rebuilt from it.

All that is read and committed of a view goes through its handle, ``OfflineStore(root).view(name)``.
docs/architecture.md draws the files. A part is written under a temporary name, fsynced, renamed,
and its folder fsynced, before the journal or a manifest names it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import disk_message, limit_of, sync_folder
from precompute.store.disk.lease import Lease, is_held
from precompute.store.disk.record import replace
from precompute.store.disk.storage import LOCAL, File, storage_of
from precompute.store.errors import SnapshotError, UnreadableError
from precompute.store.feature_view import NAME
from precompute.store.offline.part_file import (
    Deletes,
    Layers,
    Numbers,
    check_rows,
    dead_rows,
    how_damaged,
    living,
    read_deletes,
    row_bytes,
    write_part_file,
)
from precompute.store.offline.refs import BadMark, Refs, run_lease
from precompute.store.offline.runs import Journals, Runs
from precompute.store.offline.selection import CLUSTERS, Selection, all_rows, seed_of
from precompute.store.offline.snapshot import Catalog, Part, Snapshot, add_to_catalog, read_catalog
from precompute.store.times import utc_now

log = logging.getLogger(__name__)

BATCH_BYTES = 16 * 2**20
"""Bytes of a batch that is read of a part, about: fewer rows come of larger ones."""

FRAME = "frame.parquet"
"""Among a run's files: the rows that a program handed to it."""


class OfflineStore:
    """Snapshots of all views under one root folder.

    Args:
        root: folder; created on the first write.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._views: dict[str, ViewStore] = {}

    def view(self, name: str) -> ViewStore:
        """The handle of one view, there or not yet; the same one every time."""
        return self._views.setdefault(name, ViewStore(self, name))

    def views(self) -> list[str]:
        """Names of the views that have a folder here, sorted."""
        storage = storage_of(self.root)
        return sorted(
            name
            for name in storage.names(self.root)
            if NAME.match(name) and "manifests" in storage.names(self.root / name)
        )


class ViewStore:
    """One view's folder; made by :meth:`OfflineStore.view`. ``snapshot`` arguments are of this
    view.

    ``refs`` are the live pointer and the marks, ``runs`` the reports, ``journals`` what unfinished
    runs leave to the next.
    """

    def __init__(self, offline: OfflineStore, name: str) -> None:
        self.offline, self.name, self.folder = offline, name, offline.root / name
        self.storage = storage_of(self.folder)
        self.refs = Refs(self.folder / "refs", name)
        self.runs = Runs(self.folder / "runs", self.folder / "refs" / "running", name)
        self.journals = Journals(self.folder, self._committed)
        self._catalog: Catalog | None = None
        self._dead: dict[
            tuple[tuple[str, ...], tuple[tuple[Path, int], ...]], Mapping[int, Numbers]
        ] = {}
        """Dead rows of the last two chains: a run needs those of its parent and of its result a
        dozen times, and they may be half of all rows."""
        self._deletes: dict[tuple[Path, int], Deletes] = {}
        """What was read of the files that the last two chains have, by path and time of change
        (ns): of a chain of 60 deltas of 3 M rows each reading took 25 ms."""

    # ---- where its files are

    @property
    def data(self) -> Path:
        """Folder of the runs' parts."""
        return self.folder / "data"

    @property
    def indexes(self) -> Path:
        """Folder of the vector indexes, each under its generation's number."""
        return self.folder / "index"

    @property
    def compiled(self) -> Path:
        """Folder of converted models, so that each is made once."""
        return self.folder / "compiled"

    @property
    def leases(self) -> Path:
        """Folder of the leases: see :mod:`precompute.store.disk.lease`."""
        return self.refs.folder

    @property
    def _catalog_path(self) -> Path:
        return self.refs.folder / "catalog.jsonl"

    def manifest_path(self, number: int) -> Path:
        """The file that is the commit of a snapshot."""
        return self.folder / "manifests" / f"{number:020d}.json"

    def index_folder(self, generation: int) -> Path:
        """Folder of the vector index of one generation."""
        return self.indexes / f"{generation:020d}"

    # ---- reading

    def numbers(self) -> list[int]:
        """Numbers of the view's committed snapshots, ascending."""
        names = self.storage.names(self.folder / "manifests")
        return sorted(
            int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()
        )

    def catalog(self) -> Catalog:
        """The catalog of all manifests of the view; only those are read that were not before."""
        self._catalog = read_catalog(self.folder / "manifests", self._catalog_path, self._catalog)
        return self._catalog

    def damage(self) -> dict[int, str]:
        """Numbers of the manifests that cannot be read → why. Reads them all."""
        damage = {}
        for number in self.numbers():
            try:
                self.snapshot(number)
            except SnapshotError as exc:
                if self.storage.stat(self.manifest_path(number)) is not None:
                    damage[number] = str(exc)
        return damage

    def snapshot(self, number: int) -> Snapshot:
        """The manifest of one snapshot.

        Raises:
            SnapshotError: there is none of that number, or it is torn.
        """
        path = self.manifest_path(number)
        try:
            data = self.storage.read(path, immutable=True)
        except FileNotFoundError as exc:
            have = ", ".join(map(str, self.numbers())) or "none"
            raise SnapshotError(
                f"view {self.name!r} has no snapshot {number} under {self.offline.root} (it has:"
                f" {have})"
            ) from exc
        except SnapshotError:
            # of an object store, which says where
            raise
        except OSError as exc:
            raise SnapshotError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        return Snapshot.from_bytes(data, str(path))

    def frame(self, number: int | None = None) -> Path | None:
        """The file of the rows that the run of a snapshot was given, of a view that reads none by
        itself; by default of those given last, whatever became of that run.

        Raises:
            SnapshotError: there is no such snapshot, or its manifest is torn.
        """
        if number is None:
            runs = (self.data / name / FRAME for name in self.storage.names(self.data))
            path = max((path for path in runs if self.storage.stat(path)), default=None)
        else:
            given = self.snapshot(number).frame
            path = None if given is None else self.folder / given
        if path is not None:
            self.is_here(path)
        return path

    def is_here(self, path: Path) -> bool:
        """Whether a file is there; it is fetched where it lies elsewhere. It is checked by its name
        alone: one that has a checksum is read by :meth:`file`."""
        item = None if self.storage is LOCAL or path.is_file() else self.storage.stat(path)
        if item is not None:
            self.storage.fetch([File(path, item.size_bytes, "")])
        return path.is_file()

    def chain(self, snapshot: Snapshot) -> list[Snapshot]:
        """The snapshot and all it builds on, the full one first.

        Raises:
            SnapshotError: an ancestor is missing or damaged.
        """
        layers = [snapshot]
        while layers[-1].parent is not None:
            layers.append(self.snapshot(layers[-1].parent))
        return layers[::-1]

    def layers(self, snapshot: Snapshot) -> Layers:
        """Every file of the snapshot's chain with its dead rows; all checked to be there with the
        size that the manifests have.

        Raises:
            SnapshotError: a file is missing or has another size.
        """
        chain = self.chain(snapshot)
        self._fetch(chain)
        parts = list(dict.fromkeys(part.path for layer in chain for part in layer.parts))
        deletes = [
            self.checked_path(layer, layer.deletes) for layer in chain if layer.deletes is not None
        ]
        sizes = {part.path: (part, layer) for layer in chain for part in layer.parts}
        paths = [self.checked_path(layer, part) for part, layer in (sizes[path] for path in parts)]
        rows = [sizes[path][0].rows for path in parts]
        files = tuple((path, path.stat().st_mtime_ns) for path in deletes)
        dead = self._dead.get((tuple(parts), files))
        if dead is None:
            dead = self._dead_rows(parts, files)
        return Layers(paths, rows, dead)

    def _dead_rows(
        self, parts: list[str], files: tuple[tuple[Path, int], ...]
    ) -> Mapping[int, Numbers]:
        """Position of a part → its dead rows, by ``files`` of deletes, each given with the time of
        its last change."""
        before = [*self._dead][-1:]
        wanted = {*files, *(file for _, of_chain in before for file in of_chain)}
        known = {file: read for file, read in self._deletes.items() if file in wanted}
        known |= {file: read_deletes(file[0]) for file in files if file not in known}
        times = dict(files)
        dead = dead_rows(parts, [*times], lambda path: known[path, times[path]])
        self._deletes = known
        self._dead = {chain: self._dead[chain] for chain in before} | {(tuple(parts), files): dead}
        return dead

    def part_paths(self, snapshot: Snapshot) -> list[Path]:
        """Absolute paths of all Parquet parts of a snapshot's chain, checked as :meth:`layers`
        does."""
        return self.layers(snapshot).paths

    def _fetch(self, chain: Sequence[Snapshot]) -> None:
        """Have all files of a chain here, where they may lie elsewhere; those that cannot be had
        are an error when they are read."""
        if self.storage is not LOCAL:
            parts = [part for layer in chain for part in (*layer.parts, layer.deletes) if part]
            files = [File(self.folder / p.path, p.size_bytes, p.sha256) for p in parts]
            with contextlib.suppress(FileNotFoundError):
                self.storage.fetch(files)

    def file(self, part: Part) -> Path:
        """A file that a manifest or journal names, if it is there; fetched where it lies elsewhere.

        Raises:
            OSError: it cannot be fetched, or differs from its checksum.
        """
        path = self.folder / part.path
        with contextlib.suppress(FileNotFoundError):
            self.storage.fetch([File(path, part.size_bytes, part.sha256)])
        return path

    def checked_path(self, snapshot: Snapshot, part: Part) -> Path:
        """Absolute path of one file of a snapshot.

        Raises:
            SnapshotError: it is missing or has another size than in the manifest.
        """
        path = (self.folder / part.path).absolute()
        try:
            self.file(part)
            size = path.stat().st_size if path.is_file() else None
        except OSError as exc:
            raise UnreadableError(
                f"{path} cannot be read: {limit_of(exc) or exc.strerror or exc}"
            ) from exc
        if size != part.size_bytes:
            state = (
                "is missing" if size is None else f"has {size} bytes instead of {part.size_bytes}"
            )
            raise SnapshotError(
                f"{path} {state}: snapshot {snapshot.number} of {self.name!r} cannot be used;"
                " publish another one"
            )
        return path

    def batches(
        self,
        snapshot: Snapshot,
        columns: Sequence[str] | None = None,
        batch_rows: int = 8192,
        *,
        first: int = 0,
    ) -> Iterator[pa.RecordBatch]:
        """A snapshot's rows, part by part from the file numbered ``first``, in the order they were
        written, at most ``batch_rows`` and about :data:`BATCH_BYTES` of them at a time; memory
        holds one row group.

        Raises:
            SnapshotError: a part is missing or damaged.
        """
        layers = self.layers(snapshot)
        for number in range(first, len(layers.paths)):
            yield from self._file_batches(snapshot, layers, number, columns, batch_rows)

    def _file_batches(
        self,
        snapshot: Snapshot,
        layers: Layers,
        number: int,
        columns: Sequence[str] | None,
        batch_rows: int,
    ) -> Iterator[pa.RecordBatch]:
        path = layers.paths[number]
        try:
            with pq.ParquetFile(path) as file:
                if lacks := set(columns or ()).difference(file.schema_arrow.names):
                    raise pa.ArrowKeyError(f"no column {min(lacks)!r}")
                names = None if columns is None else list(columns)
                rows = max(1, min(batch_rows, BATCH_BYTES // row_bytes(file.metadata)))
                batches = file.iter_batches(rows, columns=names)
                yield from living(batches, layers.dead.get(number))
        except (pa.ArrowException, OSError) as exc:
            remedy = limit_of(exc) or f"snapshot {snapshot.number} is damaged; publish another one"
            raise SnapshotError(f"{path} cannot be read ({exc}): {remedy}") from exc

    def sample(
        self,
        snapshot: Snapshot,
        rows: int,
        columns: Sequence[str] | None = None,
        places: int = CLUSTERS,
        turn: int = 0,
    ) -> pa.Table:
        """Up to ``rows`` rows drawn at random from all over the snapshot, in its order; the same
        ones every time of a ``turn``. Reads the row groups they lie in, and of a large snapshot not
        many of these (``places``): see :meth:`precompute.store.offline.selection.Selection.draw`.

        Raises:
            SnapshotError: a part is missing or damaged.
        """
        layers = self.layers(snapshot)
        drawn = all_rows(layers).draw(rows, seed_of(layers) + turn, places)
        return self.table(snapshot, drawn, columns)

    def table(
        self, snapshot: Snapshot, rows: Selection, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Some of a snapshot's rows; they must fit in memory.

        Raises:
            SnapshotError: a part is missing or damaged.
        """
        taken = list(rows.batches(columns))
        try:
            return pa.Table.from_batches(taken) if taken else self._no_rows(snapshot, columns)
        except pa.ArrowException as exc:
            # a bit of a file's footer is enough for another name
            raise SnapshotError(
                f"the files of snapshot {snapshot.number} of {self.name!r} have not the same"
                f" columns ({exc}): it is damaged; publish another one"
            ) from exc

    def _no_rows(self, snapshot: Snapshot, columns: Sequence[str] | None) -> pa.Table:
        for path in self.part_paths(snapshot):
            table = pq.read_schema(path).empty_table()
            return table if columns is None else table.select(list(columns))
        raise SnapshotError(
            f"snapshot {snapshot.number} of {self.name!r} has no part; publish another one"
        )

    def check_parts(self, snapshot: Snapshot, layers: Sequence[Snapshot] | None = None) -> None:
        """Re-read every file of the chain, or of those ``layers`` of it, and compare its SHA-256
        and row count with the manifests. A snapshot of the chain whose files differ is marked bad:
        the next run builds on the one before.

        Raises:
            SnapshotError: names the first file that differs.
        """
        for layer in self.chain(snapshot) if layers is None else layers:
            for part in (*layer.parts, *((layer.deletes,) if layer.deletes else ())):
                self.check_part(layer, part)

    def check_part(self, layer: Snapshot, part: Part) -> None:
        """As :meth:`check_parts`, of one file.

        Raises:
            SnapshotError: it differs, or cannot be read.
        """
        wrong = self._damage(layer, part)
        if wrong is not None:
            if layer.number:
                self.mark_bad(layer.number, f"damaged: {wrong}", rows=False)
            for number in layer.members.values():
                self._mark_writer(number, part, f"damaged: {wrong}")
            raise SnapshotError(f"{wrong}; run the view again, it builds on what is whole")

    def _mark_writer(self, member: int, part: Part, why: str) -> None:
        """Mark those of the snapshots that a member of an assembled one builds on bad that name the
        part as their own."""
        try:
            for layer in self.chain(self.snapshot(member)):
                if any(part.path == own.path for own in layer.parts):
                    self.mark_bad(layer.number, why, rows=False)
        except SnapshotError as exc:
            log.warning("%s", exc)

    def _damage(self, layer: Snapshot, part: Part) -> str | None:
        """How a file differs from its manifest.

        Raises:
            SnapshotError: it cannot be read at all, for now.
        """
        try:
            path = self.checked_path(layer, part)
        except UnreadableError:
            raise
        except SnapshotError as exc:
            return str(exc)
        return how_damaged(path, part)

    # ---- writing

    def write_part(
        self, run: str, name: str, table: pa.Table, rare: npt.NDArray[np.int64] | None = None
    ) -> Part:
        """Write one immutable Parquet file of a run and make it durable.

        Args:
            run: id of the run; its folder is created.
            name: file name, unique within the run.
            table: the rows.
            rare: numbers of those that a gate may allow none of, as
                :meth:`precompute.store.offline.row_figures.RowCounter.rare` returns them; None
                where they do not matter.

        Raises:
            SnapshotError: no space, or another failure of the file system.
        """
        try:
            return self._write_part(run, name, table, rare)
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise SnapshotError(disk_message(self.folder / "data" / run / name, exc)) from exc
            # It is not known what a failed fsync left on the disk: the file is given up, and
            # written once more under another name.
            log.warning(
                "%s; writing it once more", disk_message(self.folder / "data" / run / name, exc)
            )
        try:
            return self._write_part(
                run, f"{name.removesuffix('.parquet')}-again.parquet", table, rare
            )
        except OSError as exc:
            raise SnapshotError(disk_message(self.folder / "data" / run / name, exc)) from exc

    def _write_part(
        self, run: str, name: str, table: pa.Table, rare: npt.NDArray[np.int64] | None
    ) -> Part:
        path = self.folder / "data" / run / name
        size_bytes, sha256 = write_part_file(path, table, rare)
        self.storage.put([path])
        return Part(str(path.relative_to(self.folder)), table.num_rows, size_bytes, sha256)

    def commit(self, snapshot: Snapshot, lease: Lease | None = None) -> Snapshot:
        """Give the snapshot the next free number and create its manifest, exactly once.

        A writer that loses the race for a number takes the next one: no snapshot depends on the
        number of another but its parent's.

        Args:
            snapshot: counts, parts and deletes are checked against each other and against the
                files.
            lease: held by the writer; a writer that lost it commits nothing.

        Returns:
            the snapshot with its number.

        Raises:
            SnapshotError: the counting invariant does not hold, a part is not as described, or the
                file system failed.
            FencedError: the lease was lost.
        """
        snapshot.check_counts(self.chain(snapshot)[:-1])
        for part in (*snapshot.parts, *((snapshot.deletes,) if snapshot.deletes else ())):
            check_rows(self.checked_path(snapshot, part), part)
        folder = self.folder / "manifests"
        try:
            crashpoint("verify")
            while True:
                # A bad one may be gone, its number stays taken.
                taken = {*self.numbers(), *self.refs.marked("bad")}
                number = max(taken, default=0) + 1
                numbered = replace(
                    snapshot, number=number, fence=0 if lease is None else lease.record.fence
                )
                if lease is not None:
                    lease.check()
                try:
                    self.storage.create(
                        self.manifest_path(number), numbered.to_bytes(), point="manifest"
                    )
                    add_to_catalog(folder, self._catalog_path, numbered)
                    return numbered
                except FileExistsError:
                    continue
        except OSError as exc:
            raise SnapshotError(disk_message(folder, exc)) from exc

    def mark_bad(
        self, number: int, reason: str, *, rows: bool = True, back_to: int | None = None
    ) -> None:
        """Mark a snapshot bad, for good: see :meth:`Refs.mark_bad`.

        Args:
            number: of the snapshot.
            reason: stored in the mark.
            rows: its rows are at fault, so that the same rows once more are bad too; not only its
                files.
            back_to: the snapshot that is gone back to: what both hold is not at fault.

        Raises:
            SnapshotError: the file system failed.
        """
        content = ""
        if rows:
            try:
                content = self.snapshot(number).content
            except SnapshotError as exc:
                # Damaged besides.
                log.warning("%s", exc)
        self.refs.mark_bad(number, BadMark(reason, utc_now(), content, rows, back_to))

    def pin(self, number: int, reason: str) -> None:
        """Keep a snapshot whatever its age; pinning it twice is no error.

        Raises:
            SnapshotError: there is no such snapshot, or the file system failed.
        """
        self.snapshot(number)
        self.refs.pin(number, reason)

    @property
    def removed_folder(self) -> Path:
        """Where the files are while :meth:`remove` removes them; one that a crash left is there."""
        return self.offline.root / f".removed-{self.name}"

    def remove(self) -> None:
        """Remove all there is of the view, for good: snapshots, reports, marks. It is out of sight
        at once; files that a crash leaves behind go the next time. One that is not there is no
        error.

        Raises:
            SnapshotError: the file system failed.
        """
        folder, aside = self.folder, self.removed_folder
        try:
            LOCAL.delete_all(aside)
            if self.storage is not LOCAL:
                # first what makes a view of it
                self.storage.delete_all(folder / "manifests")
                self.storage.delete_all(folder)
            if folder.exists():
                folder.rename(aside)
                sync_folder(self.offline.root)
                LOCAL.delete_all(aside)
        except OSError as exc:
            raise SnapshotError(
                disk_message(aside, exc, "it was to be removed; do it once more")
            ) from exc

    # ---- runs

    def running(self, partition: str | None = None) -> bool:
        """Whether a run of the partition (None: of a view that has none) goes on."""
        return is_held(self.leases, run_lease(partition))

    def _committed(self) -> tuple[frozenset[str], frozenset[str]]:
        """Runs that committed, and paths of the files that manifests name."""
        entries = self.catalog().entries.values()
        return frozenset(entry.run for entry in entries), frozenset(
            path for entry in entries for path in entry.files
        )
