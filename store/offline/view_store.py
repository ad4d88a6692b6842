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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import disk_message, sync_folder
from precompute.store.disk.lease import Lease, is_held
from precompute.store.disk.record import replace
from precompute.store.disk.storage import LOCAL, File, no_answer, storage_of
from precompute.store.errors import SnapshotError, UnreadableError
from precompute.store.feature_view import NAME
from precompute.store.offline.log import BadMark, Log, run_lease
from precompute.store.offline.part_file import (
    Layers,
    check_rows,
    living,
    numbered,
    row_bytes,
    write_part_file,
)
from precompute.store.offline.runs import Journals, Runs
from precompute.store.offline.segment import (
    Kills,
    Numbers,
    Part,
    Segment,
    dead_rows,
    read_kills,
    record_path,
    removed_keys,
)
from precompute.store.offline.selection import CLUSTERS, Selection, all_rows, seed_of
from precompute.store.offline.snapshot import Catalog, Snapshot, add_to_catalog, read_catalog
from precompute.store.offline.stored_file import check_file, note_file, parsing
from precompute.store.times import utc_now

log = logging.getLogger(__name__)

MOST_SEGMENTS = 1000
"""Records of segments that a process remembers of a view, at most."""
AT_ONCE = 4
"""Files that are compared side by side: one core hashes 1.7 GB/s."""
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
        return self._views.get(name) or self._views.setdefault(name, ViewStore(self, name))

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

    ``log`` says what is live and marked, ``runs`` the reports, ``journals`` what
    unfinished runs leave to the next.
    """

    def __init__(self, offline: OfflineStore, name: str) -> None:
        self.offline, self.name, self.folder = offline, name, offline.root / name
        self.storage = storage_of(self.folder)
        self.log = Log(self.folder / "log", name)
        self.runs = Runs(self.folder / "runs", self.folder / "notes" / "running", name)
        self.journals = Journals(self.folder, self._committed)
        self._catalog: Catalog | None = None
        self._segments: dict[str, Segment] = {}
        """Records that were read, by their SHA-256: most snapshots have most of them in common."""
        self._dead: dict[
            tuple[tuple[Part, ...], tuple[tuple[Path, int], ...]], Mapping[int, Numbers]
        ] = {}
        """Dead rows of the last two snapshots: a run needs those of its parent and of its result a
        dozen times, and they may be half of all rows."""
        self._kills: dict[tuple[Path, int], Kills] = {}
        """What was read of the files of kills that the last two have, by path and time of change
        (ns)."""

    # ---- where its files are

    @property
    def data(self) -> Path:
        """Folder of the runs' parts."""
        return self.folder / "data"

    @property
    def indexes(self) -> Path:
        """Folder of the vector indexes, each under its own name."""
        return self.folder / "index"

    @property
    def compiled(self) -> Path:
        """Folder of converted models, so that each is made once."""
        return self.folder / "compiled"

    @property
    def leases(self) -> Path:
        """Folder of the leases (:mod:`precompute.store.disk.lease`), and of what processes note
        beside the log."""
        return self.folder / "notes"

    @property
    def _catalog_path(self) -> Path:
        return self.leases / "catalog.jsonl"

    def manifest_path(self, number: int) -> Path:
        """The file that is the commit of a snapshot."""
        return self.folder / "manifests" / f"{number:020d}.json"

    def index_folder(self, name: str) -> Path:
        """Folder of a vector index, by its name as the log has it."""
        return self.indexes / name

    # ---- reading

    def numbers(self) -> list[int]:
        """Numbers of the view's committed snapshots, ascending."""
        names = self.storage.names(self.folder / "manifests")
        return sorted(
            int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()
        )

    def catalog(self) -> Catalog:
        """The catalog of all manifests of the view; only those are read that were not before."""
        manifests = self.folder / "manifests"
        self._catalog = read_catalog(manifests, self._catalog_path, self.segment, self._catalog)
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
        """One snapshot: its manifest, and the records of its segments.

        Raises:
            SnapshotError: there is none of that number, or it, or a record, is missing or damaged.
            UnreadableError: it cannot be read now.
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
        snapshot = Snapshot.from_bytes(data, str(path), self.segment)
        if snapshot.number != number:
            raise SnapshotError(
                f"{path} is the manifest of snapshot {snapshot.number}; run the view again or go"
                " back to an older snapshot"
            )
        return snapshot

    def segment(self, name: str, sha256: str) -> Segment:
        """The record of a segment, as a manifest names it.

        Raises:
            SnapshotError: it is missing or damaged.
            UnreadableError: it cannot be read now.
        """
        if sha256 not in self._segments:
            path = self.folder / record_path(name)
            try:
                data = self.storage.read(path, immutable=True)
            except FileNotFoundError as exc:
                raise SnapshotError(
                    f"{path} is missing, which has the parts of a segment; run the view again"
                    f" (precompute run {self.name}), it builds on what is whole, or go back:"
                    f" precompute rollback {self.name}"
                ) from exc
            segment = Segment.from_bytes(data, str(path), sha256)
            if len(self._segments) >= MOST_SEGMENTS:
                self._segments.clear()
            self._segments[sha256] = segment
        return self._segments[sha256]

    def frame(self, number: int | None = None) -> Path | None:
        """The file of the rows that the run of a snapshot was given, of a view that reads none by
        itself; by default of those given last, whatever became of that run.

        Raises:
            SnapshotError: there is no such snapshot, or its manifest is torn, or the file is
                damaged.
            UnreadableError: something cannot be read now.
        """
        if number is None:
            runs = (self.data / name / FRAME for name in self.storage.names(self.data))
            path = max((path for path in runs if self.storage.stat(path)), default=None)
            part = None if path is None else self._frame_of(path.parent.name)
        else:
            snapshot = self.snapshot(number)
            path = None if snapshot.frame is None else self.folder / snapshot.frame
            part = snapshot.frame_file
        if path is not None and self.is_here(path) and part is not None:
            try:
                self.file(part)
            except SnapshotError as exc:
                raise SnapshotError(
                    f"{exc}: it has the rows that a run of {self.name!r} was given; give them"
                    " again: precompute.open(…).run(view, frame=df), in Python"
                ) from exc
        return path

    def _frame_of(self, run: str) -> Part | None:
        """The file of the rows that a run was given, by its report; None of one that goes on, or
        did not write its end."""
        try:
            return self.runs.read(run).files.get("frame")
        except SnapshotError as exc:
            log.warning("%s", exc)
            return None

    def is_here(self, path: Path) -> bool:
        """Whether a file is there; it is fetched where it lies elsewhere. It is checked by its name
        alone: one that has a checksum is read by :meth:`file`."""
        item = None if path.is_file() else self.storage.stat(path)
        if item is not None:
            self.storage.fetch([File(path, item.size_bytes, "")])
        return path.is_file()

    def layers(self, snapshot: Snapshot) -> Layers:
        """Every file of the snapshot with its dead rows. Those of kills were compared with their
        checksums; the parts are there with the size that the records have, and are compared by
        :meth:`compare_parts` where their rows are copied or handed out.

        Raises:
            SnapshotError: a file is missing or damaged, or a part has another size.
            UnreadableError: one cannot be read now.
        """
        with contextlib.suppress(FileNotFoundError):
            # those that cannot be had are an error when they are read
            self.storage.fetch(part.in_folder(self.folder) for part in snapshot.files)
        kills = [self.whole_path(snapshot, part) for part in snapshot.kills]
        parts = snapshot.parts
        paths = [self.checked_path(snapshot, part) for part in parts]
        files = tuple((path, path.stat().st_mtime_ns) for path in kills)
        dead = self._dead.get((parts, files))
        if dead is None:
            dead = self._dead_rows(parts, files)
        return Layers(paths, [part.rows for part in parts], dead)

    def _dead_rows(
        self, parts: tuple[Part, ...], files: tuple[tuple[Path, int], ...]
    ) -> Mapping[int, Numbers]:
        """Position of a part → its dead rows, by ``files`` of kills, each given with the time of
        its last change."""
        before = [*self._dead][-1:]
        wanted = {*files, *(file for _, of_list in before for file in of_list)}
        known = {file: read for file, read in self._kills.items() if file in wanted}
        known |= {file: read_kills(file[0]) for file in files if file not in known}
        times = dict(files)
        dead = dead_rows(parts, [*times], lambda path: known[path, times[path]])
        self._kills = known
        self._dead = {of_list: self._dead[of_list] for of_list in before} | {(parts, files): dead}
        return dead

    def part_paths(self, snapshot: Snapshot) -> list[Path]:
        """Absolute paths of all Parquet parts of a snapshot, checked as :meth:`layers` does."""
        return self.layers(snapshot).paths

    def file(self, part: Part) -> Path | None:
        """A file beside the parts that a manifest or journal names, such as the rejected rows,
        compared with its checksum; None where it is gone.

        Raises:
            SnapshotError: it is damaged.
            UnreadableError: it cannot be read now.
        """
        file = part.in_folder(self.folder)
        with contextlib.suppress(FileNotFoundError):
            self.storage.fetch([file])
        if not file.path.is_file():
            return None
        check_file(file)
        return file.path

    def checked_path(self, snapshot: Snapshot, part: Part) -> Path:
        """Absolute path of one file of a snapshot, which is there with the size that the manifest
        has. A file beside the parts is never parsed by it: see :meth:`whole_path`.

        Raises:
            SnapshotError: it is missing or has another size than in the manifest.
            UnreadableError: it cannot be read now.
        """
        file = part.in_folder(self.folder)
        path = file.path
        try:
            with contextlib.suppress(FileNotFoundError):
                self.storage.fetch([file])
            size = path.stat().st_size if path.is_file() else None
        except UnreadableError:
            raise
        except OSError as exc:
            raise no_answer(path, exc) from exc
        if size != part.size_bytes:
            state = (
                "is missing" if size is None else f"has {size} bytes instead of {part.size_bytes}"
            )
            raise SnapshotError(f"{path} {state}: {self._way_out(snapshot)}")
        note_file(file)
        return path

    def whole_path(self, snapshot: Snapshot, part: Part) -> Path:
        """Absolute path of one file of a snapshot, compared with its checksum, once in a process.

        Raises:
            SnapshotError: it is missing or damaged.
            UnreadableError: it cannot be read now.
        """
        file = part.in_folder(self.folder)
        try:
            check_file(file)
        except SnapshotError as exc:
            raise SnapshotError(f"{exc}: {self._way_out(snapshot)}") from exc
        return file.path

    def compare_parts(self, *snapshots: Snapshot) -> None:
        """Compare parts and kills of the snapshots with their checksums, once in a process, before
        rows are copied from them, handed out, or computed from.

        Raises:
            SnapshotError: one is missing or damaged; it is marked by :meth:`check_parts` alone.
            UnreadableError: one cannot be read now.
        """
        named = {part.path: (one, part) for one in snapshots for part in one.files}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(self.whole_path, *one) for one in named.values()]:
                done.result()

    def _way_out(self, snapshot: Snapshot) -> str:
        name = self.name
        which = f"snapshot {snapshot.number}" if snapshot.number else "what this run writes"
        return (
            f"{which} of {name!r} cannot be used; publish another one: {self._run_again(snapshot)},"
            f" it builds on what is whole, or go back: precompute rollback {name}"
        )

    def _run_again(self, snapshot: Snapshot) -> str:
        if snapshot.partition is None:
            return f"run the view again (precompute run {self.name})"
        start = snapshot.partition.partition("/")[0]
        return f"run its partition again (precompute run {self.name} --partition {start})"

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

    def segment_batches(
        self,
        snapshot: Snapshot,
        segment: Segment,
        columns: Sequence[str] | None = None,
        batch_rows: int = 8192,
    ) -> Iterator[pa.RecordBatch]:
        """As :meth:`batches`, the rows of one segment of a snapshot as they were when it was made:
        but for its own kills, whatever lies over it.

        Raises:
            SnapshotError: a file is missing or damaged.
        """
        own = {part.path for part in segment.parts}
        kills = [] if segment.kills is None else [self.whole_path(snapshot, segment.kills)]

        def own_kills(path: Path) -> Kills:
            return {name: rows for name, rows in read_kills(path).items() if name in own}

        paths = [self.checked_path(snapshot, part) for part in segment.parts]
        dead = dead_rows(segment.parts, kills, own_kills)
        layers = Layers(paths, [part.rows for part in segment.parts], dead)
        for number in range(len(paths)):
            yield from self._file_batches(snapshot, layers, number, columns, batch_rows)

    def removed_keys(self, snapshot: Snapshot, segment: Segment) -> pa.Array:
        """Key texts of the entities that one segment of a snapshot removes, string [n], in the
        order of its kills.

        Raises:
            SnapshotError: the file is missing or damaged.
        """
        if segment.kills is None or not segment.removed:
            return pa.array([], pa.string())
        return removed_keys(self.whole_path(snapshot, segment.kills), snapshot.view.entity)

    def _file_batches(
        self,
        snapshot: Snapshot,
        layers: Layers,
        number: int,
        columns: Sequence[str] | None,
        batch_rows: int,
    ) -> Iterator[pa.RecordBatch]:
        path = layers.paths[number]
        with parsing(path, self._way_out(snapshot)), pq.ParquetFile(path) as file:
            if lacks := set(columns or ()).difference(file.schema_arrow.names):
                raise pa.ArrowKeyError(f"no column {min(lacks)!r}")
            names = None if columns is None else list(columns)
            rows = max(1, min(batch_rows, BATCH_BYTES // row_bytes(file.metadata)))
            batches = file.iter_batches(rows, columns=names)
            yield from living(batches, layers.dead.get(number))

    def schema(self, snapshot: Snapshot) -> pa.Schema:
        """The columns of a snapshot's first part.

        Raises:
            SnapshotError: there is none, or it is missing or damaged.
            UnreadableError: it cannot be read now.
        """
        for path in self.part_paths(snapshot):
            with parsing(path, self._way_out(snapshot)):
                return pq.read_schema(path)
        raise SnapshotError(
            f"snapshot {snapshot.number} of {self.name!r} has no part; publish another one"
        )

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
        table = self.schema(snapshot).empty_table()
        return table if columns is None else table.select(list(columns))

    def check_parts(self, snapshot: Snapshot, segments: Sequence[Segment] | None = None) -> None:
        """Re-read every file of the snapshot, or of those ``segments`` of it, and compare its
        SHA-256 and row count with the records. A segment whose files differ is marked bad: the next
        run builds on what is whole.

        Raises:
            SnapshotError: names the first file that differs.
        """
        for segment in snapshot.segments if segments is None else segments:
            for part in (segment.record, *segment.files) if segment.sha256 else segment.files:
                self.check_part(snapshot, segment, part)

    def check_part(self, snapshot: Snapshot, segment: Segment, part: Part) -> None:
        """As :meth:`check_parts`, of one file of a segment, or its record.

        Raises:
            SnapshotError: it differs, or cannot be read.
        """
        wrong = self._damage(part)
        if wrong is not None:
            if segment.number:
                mark = BadMark(f"damaged: {wrong}", utc_now(), rows=False, segments=(segment.name,))
                self.log.mark_bad(segment.number, mark)
            for number in segment.members.values():
                self._mark_writer(number, part, f"damaged: {wrong}")
            raise SnapshotError(f"{wrong}; {self._run_again(snapshot)}, it builds on what is whole")

    def check_beside(self, part: Part) -> None:
        """Compare a file that the next run reads beside the parts, read again: the rejected rows,
        or those that a run was given. Nothing is marked: the rows of the snapshot are whole.

        Raises:
            SnapshotError: it is missing or damaged.
            UnreadableError: it cannot be read now.
        """
        try:
            check_file(part.in_folder(self.folder), again=True)
        except SnapshotError as exc:
            remedy = f"the next run of {self.name!r} tries these rows again"
            if part.path.endswith(f"/{FRAME}"):
                remedy = (
                    "give a run its rows again: precompute.open(…).run(view, frame=df), in Python"
                )
            elif Path(part.path).name.startswith(("nights", "anchor")):
                remedy = (
                    f"the next run of {self.name!r} does without it, and its gates know what is"
                    " usual from the snapshots that are there"
                )
            raise SnapshotError(f"{exc}: {remedy}") from exc

    def _mark_writer(self, member: int, part: Part, why: str) -> None:
        """Mark the segment of a member of an assembled snapshot bad that has the part as its
        own."""
        try:
            for segment in self.snapshot(member).segments:
                if part in segment.files:
                    mark = BadMark(why, utc_now(), rows=False, segments=(segment.name,))
                    self.log.mark_bad(segment.number, mark)
        except SnapshotError as exc:
            log.warning("%s", exc)

    def _damage(self, part: Part) -> str | None:
        """How a file differs from its record, read again; None where it is whole.

        Raises:
            UnreadableError: it cannot be read now.
        """
        file = part.in_folder(self.folder)
        try:
            check_file(file, again=True)
            if file.path.suffix == ".parquet":
                check_rows(file.path, part)
        except SnapshotError as exc:
            return str(exc)
        return None

    # ---- writing

    def write_part(
        self, run: str, name: str, table: pa.Table, notes: Mapping[str, str] | None = None
    ) -> Part:
        """Write one immutable Parquet file of a run and make it durable.

        Args:
            run: id of the run; its folder is created.
            name: file name, unique within the run.
            table: the rows.
            notes: what its footer is to have, by name.

        Raises:
            SnapshotError: no space, or another failure of the file system.
        """
        try:
            return self._write_part(run, name, table, notes)
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
                run, f"{name.removesuffix('.parquet')}-again.parquet", table, notes
            )
        except OSError as exc:
            raise SnapshotError(disk_message(self.folder / "data" / run / name, exc)) from exc

    def _write_part(
        self, run: str, name: str, table: pa.Table, notes: Mapping[str, str] | None
    ) -> Part:
        path = self.folder / "data" / run / name
        table = pa.Table.from_arrays(table.columns, schema=numbered(table.schema))
        size_bytes, sha256 = write_part_file(path, table, notes)
        self.storage.put([path])
        return Part(str(path.relative_to(self.folder)), table.num_rows, size_bytes, sha256)

    def commit(self, snapshot: Snapshot, lease: Lease | None = None) -> Snapshot:
        """Give the snapshot the next free number, write the record of its own segment, and create
        its manifest, exactly once.

        A writer that loses the race for a number takes the next one: no snapshot depends on the
        number of another.

        Args:
            snapshot: counts and segments are checked against each other and against the files.
            lease: held by the writer; a writer that lost it commits nothing.

        Returns:
            the snapshot with its number.

        Raises:
            SnapshotError: the counting invariant does not hold, a part is not as described, or the
                file system failed.
            FencedError: the lease was lost.
        """
        snapshot.check_counts(sum(map(len, self.layers(snapshot).dead.values())))
        for segment in snapshot.segments:
            for part in segment.needed if not segment.sha256 else ():
                check_rows(self.checked_path(snapshot, part), part)
        folder = self.folder / "manifests"
        try:
            crashpoint("verify")
            while True:
                # A bad one may be gone, its number stays taken.
                taken = {*self.numbers(), *self.log.bad()}
                number = max(taken, default=0) + 1
                if lease is not None:
                    lease.check()
                fence = 0 if lease is None else lease.record.fence
                numbered = replace(
                    snapshot,
                    number=number,
                    fence=fence,
                    segments=tuple(self._recorded(one, number) for one in snapshot.segments),
                )
                try:
                    self.storage.create(
                        self.manifest_path(number), numbered.to_bytes(), point="manifest"
                    )
                    add_to_catalog(folder, self._catalog_path, numbered)
                    return numbered
                except FileExistsError:
                    # the record of that number is swept with what killed runs left
                    continue
        except OSError as exc:
            raise SnapshotError(disk_message(folder, exc)) from exc

    def _recorded(self, segment: Segment, number: int) -> Segment:
        """The segment with its record; one that has none gets it under the number."""
        if segment.sha256:
            return segment
        segment, data = segment.numbered(number)
        # a killed run may have written the very same one
        with contextlib.suppress(FileExistsError):
            self.storage.create(self.folder / record_path(segment.name), data, point="segment")
        return segment

    def mark_bad(
        self, number: int, reason: str, *, rows: bool = True, back_to: int | None = None
    ) -> None:
        """Mark a snapshot bad: see :meth:`Log.mark_bad`, and :meth:`bad_mark`.

        Raises:
            SnapshotError: the file system failed.
        """
        self.log.mark_bad(number, self.bad_mark(number, reason, rows=rows, back_to=back_to))

    def bad_mark(
        self, number: int, reason: str, *, rows: bool = True, back_to: int | None = None
    ) -> BadMark:
        """The mark of a bad snapshot.

        Args:
            number: of the snapshot.
            reason: stored in the mark.
            rows: its rows are at fault, not only its files.
            back_to: the snapshot that is gone back to: segments that it has not are at fault, and
                the one that was made for the bad one; that alone by default.
        """
        content, segments = "", None
        try:
            bad = self.snapshot(number)
            content = bad.content if rows else ""
            if back_to is not None:
                good = set(self.snapshot(back_to).names)
                good -= set() if bad.own is None else {bad.own.name}
                segments = tuple(name for name in bad.names if name not in good)
        except SnapshotError as exc:
            # Damaged besides.
            log.warning("%s", exc)
        return BadMark(reason, utc_now(), content, rows, segments)

    def pin(self, number: int, reason: str) -> None:
        """Keep a snapshot whatever its age; pinning it twice is no error.

        Raises:
            SnapshotError: there is no such snapshot, or the file system failed.
        """
        self.snapshot(number)
        self.log.pin(number, reason)

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
            if not self.storage.local:
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
        catalog = self.catalog()
        entries = catalog.entries.values()
        return frozenset(entry.run for entry in entries), frozenset(catalog.files(entries))
