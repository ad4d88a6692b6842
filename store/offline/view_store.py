"""Offline store: versioned Parquet on a file system. The one source of truth; every online store is rebuilt from it.

    <root>/<view>/data/<run>/part-*.parquet      immutable, unique names
    <root>/<view>/data/<run>/journal.jsonl       what an unfinished run has finished: the next run takes it over
    <root>/<view>/manifests/<number:020d>.json   the commit: created exactly once by link(2), never overwritten
    <root>/<view>/refs/live.json                 {epoch, snapshot, generation, …}: moved by compare-and-swap only
    <root>/<view>/refs/bad/<number>.json         rolled back from: never published again
    <root>/<view>/refs/pins/<number>.json        kept, whatever its age
    <root>/<view>/refs/lease-*.json              who writes: see :mod:`store.disk.lease`
    <root>/<view>/refs/catalog.jsonl             what the manifests say, a line each, derived: see :mod:`store.offline.catalog`
    <root>/<view>/refs/running/<run>             runs whose report says that they go on: an empty file each
    <root>/<view>/runs/<run>.json                one report per run, failed ones too

A part is written under a temporary name, fsynced, renamed, and its folder fsynced, before the journal or a manifest names it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from store.disk.crashpoint import crashpoint
from store.disk.durable_file import create_once, disk_message, locked, make_folder, replace_durably, sync_folder
from store.disk.lease import Lease, is_held
from store.errors import ConflictError, SnapshotError
from store.feature_view import NAME, known_fields
from store.freshness import AHEAD_US
from store.offline import journal
from store.offline.catalog import Catalog, add_to_catalog, read_catalog
from store.offline.journal import Finished
from store.offline.layers import Layers, dead_rows, living
from store.offline.part_file import write_part_file
from store.offline.selection import Selection, all_rows, seed_of
from store.offline.snapshot import Part, Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveRef:
    """Which snapshot is live. ``epoch`` counts every move and fences late writers; 0 means never published.

    ``generation`` is where the online store holds it, ``previous`` and ``previous_generation`` what was live before.
    """

    epoch: int
    snapshot: int
    previous: int | None
    reason: str
    at: str
    generation: int = 0
    previous_generation: int | None = None
    renewed_at: int | None = None
    """When a later run found nothing changed, µs since 1970."""
    held: str | None = None
    """Why scheduled runs publish nothing for now; None when they do."""


@dataclass(frozen=True, slots=True)
class BadMark:
    """Why a snapshot is never to be published: it was rolled back from, or its files are damaged. ``rows`` tells whether its rows are at
    fault, and then ``content`` is their digest and ``back_to`` the snapshot that was gone back to, if it is known."""

    reason: str
    at: str = ""
    content: str = ""
    rows: bool = True
    back_to: int | None = None


class OfflineStore:
    """Snapshots of all views under one root folder.

    Args:
        root: folder; created on the first write.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._catalogs: dict[str, Catalog] = {}

    # ---- reading

    def views(self) -> list[str]:
        """Names of the views that have a folder here, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(p.name for p in self.root.iterdir() if NAME.match(p.name) and (p / "manifests").is_dir())

    def numbers(self, view: str) -> list[int]:
        """Numbers of the view's committed snapshots, ascending."""
        try:
            names = os.listdir(self.root / view / "manifests")
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())

    def catalog(self, view: str) -> Catalog:
        """What all manifests of the view say of themselves, in short; only those are read that were not before."""
        found = read_catalog(self.root / view / "manifests", self._catalog_path(view), self._catalogs.get(view))
        self._catalogs[view] = found
        return found

    def damage(self, view: str) -> dict[int, str]:
        """Numbers of the manifests that cannot be read → why. Reads them all."""
        found = {}
        for number in self.numbers(view):
            try:
                self.snapshot(view, number)
            except SnapshotError as exc:
                if self._manifest_path(view, number).exists():
                    found[number] = str(exc)
        return found

    def snapshot(self, view: str, number: int) -> Snapshot:
        """The manifest of one snapshot.

        Raises:
            SnapshotError: there is none of that number, or it is torn.
        """
        path = self._manifest_path(view, number)
        try:
            data = path.read_bytes()
        except FileNotFoundError as exc:
            have = ", ".join(map(str, self.numbers(view))) or "none"
            raise SnapshotError(f"view {view!r} has no snapshot {number} under {self.root} (it has: {have})") from exc
        except OSError as exc:
            raise SnapshotError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        return Snapshot.from_bytes(data, str(path))

    def live(self, view: str) -> LiveRef | None:
        """The live pointer, or None when the view was never published.

        Raises:
            SnapshotError: the pointer file is damaged.
        """
        path = self.root / view / "refs" / "live.json"
        try:
            return known_fields(LiveRef, json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise SnapshotError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        except (ValueError, TypeError) as exc:
            raise SnapshotError(f"{path} is damaged ({exc}); publish the view again to write it anew") from exc

    def readable_live(self, view: str) -> LiveRef | None:
        """As :meth:`live`, and None for a damaged pointer too: what a writer needs, who will replace it."""
        try:
            return self.live(view)
        except SnapshotError as exc:
            if isinstance(exc.__cause__, (ValueError, TypeError)):
                return None
            raise

    def bad(self, view: str) -> dict[int, BadMark]:
        """Numbers of the snapshots that are never to be published → why."""
        found = {}
        for number in self._marked(view, "bad"):
            try:
                found[number] = known_fields(BadMark, json.loads(self._mark_path(view, "bad", number).read_bytes()))
            except (OSError, ValueError, TypeError):
                found[number] = BadMark("its mark cannot be read")
        return found

    def chain(self, snapshot: Snapshot) -> list[Snapshot]:
        """The snapshot and all it builds on, the full one first.

        Raises:
            SnapshotError: an ancestor is missing or damaged.
        """
        layers = [snapshot]
        while layers[-1].parent is not None:
            layers.append(self.snapshot(snapshot.view.name, layers[-1].parent))
        return layers[::-1]

    def layers(self, snapshot: Snapshot) -> Layers:
        """Every file of the snapshot's chain with its dead rows; all checked to be there with the size the manifests tell.

        Raises:
            SnapshotError: a file is missing or has another size.
        """
        chain = self.chain(snapshot)
        parts = list(dict.fromkeys(part.path for layer in chain for part in layer.parts))
        deletes = [self.checked_path(layer, layer.deletes) for layer in chain if layer.deletes is not None]
        sizes = {part.path: (part, layer) for layer in chain for part in layer.parts}
        paths = [self.checked_path(layer, part) for part, layer in (sizes[path] for path in parts)]
        return Layers(paths, [sizes[path][0].rows for path in parts], dead_rows(parts, deletes))

    def part_paths(self, snapshot: Snapshot) -> list[Path]:
        """Absolute paths of all Parquet parts of a snapshot's chain, checked as :meth:`layers` does."""
        return self.layers(snapshot).paths

    def checked_path(self, snapshot: Snapshot, part: Part) -> Path:
        """Absolute path of one file of a snapshot.

        Raises:
            SnapshotError: it is missing or has another size than the manifest tells.
        """
        path = (self.root / snapshot.view.name / part.path).absolute()
        size = path.stat().st_size if path.is_file() else None
        if size != part.size_bytes:
            state = "is missing" if size is None else f"has {size} bytes instead of {part.size_bytes}"
            raise SnapshotError(
                f"{path} {state}: snapshot {snapshot.number} of {snapshot.view.name!r} cannot be used; publish another one"
            )
        return path

    def batches(
        self, snapshot: Snapshot, columns: Sequence[str] | None = None, batch_rows: int = 8192
    ) -> Iterator[pa.RecordBatch]:
        """A snapshot's rows, part by part, the oldest layer first, in the order they were written; memory holds one row group.

        Raises:
            SnapshotError: a part is missing or damaged.
        """
        layers = self.layers(snapshot)
        for number in range(len(layers.paths)):
            yield from self._file_batches(snapshot, layers, number, columns, batch_rows)

    def _file_batches(
        self, snapshot: Snapshot, layers: Layers, number: int, columns: Sequence[str] | None, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        path = layers.paths[number]
        try:
            with pq.ParquetFile(path) as file:
                batches = file.iter_batches(batch_rows, columns=None if columns is None else list(columns))
                yield from living(batches, layers.dead.get(number))
        except (pa.ArrowException, OSError) as exc:
            raise SnapshotError(
                f"{path} cannot be read ({exc}): snapshot {snapshot.number} is damaged; publish another one"
            ) from exc

    def sample(self, snapshot: Snapshot, rows: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Up to ``rows`` rows drawn at random from all over the snapshot, in its order; the same ones every time. Reads the row groups they lie in, and
        of a large snapshot not many of these: see :meth:`store.offline.selection.Selection.draw`.

        Raises:
            SnapshotError: a part is missing or damaged.
        """
        layers = self.layers(snapshot)
        drawn = all_rows(layers).draw(rows, seed_of(layers))
        return self.table(snapshot, drawn, columns)

    def table(self, snapshot: Snapshot, rows: Selection, columns: Sequence[str] | None = None) -> pa.Table:
        """Some of a snapshot's rows; they must fit in memory.

        Raises:
            SnapshotError: a part is missing or damaged.
        """
        taken = list(rows.batches(columns))
        return pa.Table.from_batches(taken) if taken else self._no_rows(snapshot, columns)

    def _no_rows(self, snapshot: Snapshot, columns: Sequence[str] | None) -> pa.Table:
        for path in self.part_paths(snapshot):
            table = pq.read_schema(path).empty_table()
            return table if columns is None else table.select(list(columns))
        raise SnapshotError(f"snapshot {snapshot.number} of {snapshot.view.name!r} has no part; publish another one")

    def check_parts(self, snapshot: Snapshot) -> None:
        """Re-read every file of the chain and compare its SHA-256 and row count with the manifests. A snapshot of the chain whose files
        differ is marked bad: the next run builds on the one before.

        Raises:
            SnapshotError: names the first file that differs.
        """
        for layer in self.chain(snapshot):
            for part in (*layer.parts, *((layer.deletes,) if layer.deletes else ())):
                wrong = self._damage(layer, part)
                if wrong is not None:
                    if layer.number:
                        self.mark_bad(layer.view.name, layer.number, f"damaged: {wrong}", rows=False)
                    raise SnapshotError(f"{wrong}; run the view again, it builds on what is whole")

    def _damage(self, layer: Snapshot, part: Part) -> str | None:
        """How a file differs from its manifest.

        Raises:
            SnapshotError: it cannot be read at all, for now.
        """
        try:
            path = self.checked_path(layer, part)
        except SnapshotError as exc:
            return str(exc)
        try:
            digest = _sha256(path)
        except OSError as exc:
            raise SnapshotError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        if digest != part.sha256:
            return f"{path} differs from its checksum in the manifest: the file was damaged or changed"
        try:
            self._check_rows(path, part)
        except SnapshotError as exc:
            return str(exc)
        return None

    def _check_rows(self, path: Path, part: Part) -> None:
        try:
            rows = pq.read_metadata(path).num_rows
        except (pa.ArrowException, OSError) as exc:
            raise SnapshotError(f"{path} cannot be read back ({exc}); publish another snapshot") from exc
        if rows != part.rows:
            raise SnapshotError(f"{path} holds {rows} rows, its manifest says {part.rows}; publish another snapshot")

    # ---- writing

    def write_part(self, view: str, run: str, name: str, table: pa.Table, rare: npt.NDArray[np.int64] | None = None) -> Part:
        """Write one immutable Parquet file of a run and make it durable.

        Args:
            view: name of the view.
            run: id of the run; its folder is created.
            name: file name, unique within the run.
            table: the rows.
            rare: numbers of those that a gate may allow none of, as :meth:`store.offline.row_figures.RowCounter.rare` tells them; None where nobody asks.

        Raises:
            SnapshotError: no space, or another failure of the file system.
        """
        try:
            return self._write_part(view, run, name, table, rare)
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise SnapshotError(disk_message(self.root / view / "data" / run / name, exc)) from exc
            # What an fsync that failed left on the disk nobody knows: the file is given up, and written once more under another name.
            log.warning("%s; writing it once more", disk_message(self.root / view / "data" / run / name, exc))
        try:
            return self._write_part(view, run, f"{name.removesuffix('.parquet')}-again.parquet", table, rare)
        except OSError as exc:
            raise SnapshotError(disk_message(self.root / view / "data" / run / name, exc)) from exc

    def _write_part(self, view: str, run: str, name: str, table: pa.Table, rare: npt.NDArray[np.int64] | None) -> Part:
        path = self.root / view / "data" / run / name
        size_bytes, sha256 = write_part_file(path, table, rare)
        return Part(str(path.relative_to(self.root / view)), table.num_rows, size_bytes, sha256)

    # ---- what an unfinished run leaves to the next

    def begin_journal(self, view: str, run: str, recipe: str, partition: str | None, *, full: bool = False) -> None:
        """Open a run's journal: the chunks it will finish are of this recipe and partition; ``full`` if it was asked to compute every row.

        Raises:
            SnapshotError: the file system failed.
        """
        path = self.root / view / "data" / run / journal.NAME
        try:
            journal.begin(path, recipe, partition, full=full)
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    def add_to_journal(self, view: str, run: str, chunk: Finished) -> None:
        """Note a finished chunk, whose files are durable by now. A line torn by a crash is a chunk that was not finished.

        Raises:
            SnapshotError: the file system failed.
        """
        path = self.root / view / "data" / run / journal.NAME
        try:
            journal.add(path, chunk)
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    def end_journal(self, view: str, run: str) -> None:
        """Remove a run's journal: its manifest names its parts now. A journal that stays by accident does no harm."""
        with contextlib.suppress(OSError):
            (self.root / view / "data" / run / journal.NAME).unlink(missing_ok=True)

    def journals(self, view: str) -> dict[Path, str | None]:
        """Folders of runs that never committed → their partition. A journal whose first line is torn holds nothing and counts for none."""
        return {path.parent: journal.partition_of(path) for path in self._journal_paths(view)}

    def unfinished(self, view: str, recipe: str, partition: str | None, *, full: bool = False) -> list[Finished]:
        """Chunks of runs that never committed, of this recipe and partition, whose files are there with the size noted; the oldest first.
        With ``full`` only those of runs that were asked to compute every row.

        The caller holds the partition's lease, so that none of these runs goes on.
        """
        journals = self._journal_paths(view)
        runs, parts = self._committed(view) if journals else (frozenset(), frozenset())
        chunks = []
        for path in journals:
            if path.parent.name in runs:
                continue
            for chunk in journal.read(path, recipe, partition, full):
                # A part that a manifest names is that snapshot's: whoever took it over may not do it twice, since his deletes of its other
                # rows would hide them from the snapshot he builds on.
                if chunk.part is not None and chunk.part.path in parts:
                    continue
                if all(self._is_there(view, part) for part in (chunk.part, chunk.rejected) if part is not None):
                    chunks.append(chunk)
        return chunks

    def whole_chunks(self, view: str, chunks: Sequence[Finished]) -> list[Finished]:
        """Those of the chunks whose files have the SHA-256 that their journal notes; the others are told in the log. Reads them all."""
        return [
            chunk
            for chunk in chunks
            if all(self._is_whole(view, part) for part in (chunk.part, chunk.rejected) if part is not None)
        ]

    def _is_whole(self, view: str, part: Part) -> bool:
        path = self.root / view / part.path
        try:
            if _sha256(path) == part.sha256:
                return True
            log.warning("%s, which an interrupted run finished, differs from its checksum: its rows are computed once more", path)
        except OSError as exc:
            log.warning("%s, which an interrupted run finished, cannot be read (%s): its rows are computed once more", path, exc)
        return False

    def _committed(self, view: str) -> tuple[frozenset[str], frozenset[str]]:
        """Runs that committed, and paths of the files that manifests name."""
        entries = self.catalog(view).entries.values()
        return frozenset(entry.run for entry in entries), frozenset(path for entry in entries for path in entry.files)

    def _journal_paths(self, view: str) -> list[Path]:
        folder = f"{self.root}/{view}/data"
        try:
            runs = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # A glob, with a Path for each of a thousand runs, takes ten times as long.
        return [Path(folder, run, journal.NAME) for run in sorted(runs) if os.path.exists(f"{folder}/{run}/{journal.NAME}")]

    def _is_there(self, view: str, part: Part) -> bool:
        try:
            return (
                os.stat(f"{self.root}/{view}/{part.path}").st_size == part.size_bytes
            )  # a Path costs three times as much, 10,000 times
        except OSError:
            return False

    # ---- the commit and the live pointer

    def commit(self, snapshot: Snapshot, lease: Lease | None = None) -> Snapshot:
        """Give the snapshot the next free number and create its manifest, exactly once.

        A writer that loses the race for a number takes the next one: no snapshot depends on the number of another but its parent's.

        Args:
            snapshot: counts, parts and deletes are checked against each other and against the files.
            lease: held by the writer; a writer that lost it commits nothing.

        Returns:
            the snapshot with its number.

        Raises:
            SnapshotError: the counting invariant does not hold, a part is not as described, or the file system failed.
            FencedError: the lease was lost.
        """
        view = snapshot.view.name
        self._check_counts(snapshot)
        for part in (*snapshot.parts, *((snapshot.deletes,) if snapshot.deletes else ())):
            self._check_rows(self.checked_path(snapshot, part), part)
        folder = self.root / view / "manifests"
        try:
            crashpoint("verify")
            make_folder(folder)
            while True:
                taken = {*self.numbers(view), *self._marked(view, "bad")}  # a bad one may be gone, its number stays taken
                number = max(taken, default=0) + 1
                numbered = replace(snapshot, number=number, fence=0 if lease is None else lease.record.fence)
                if lease is not None:
                    lease.check()
                try:
                    create_once(
                        self._manifest_path(view, number), numbered.to_bytes(), folder / f".{snapshot.run}.tmp", point="manifest"
                    )
                    add_to_catalog(folder, self._catalog_path(view), numbered)
                    return numbered
                except FileExistsError:
                    continue
        except OSError as exc:
            raise SnapshotError(disk_message(folder, exc)) from exc

    def _check_counts(self, snapshot: Snapshot) -> None:
        counts, name = snapshot.counts, snapshot.view.name
        counts.check()
        own = sum(p.rows for p in snapshot.parts) - snapshot.own_deletes
        expected = counts.rows if snapshot.kind == "full" else counts.written
        if own != expected:
            raise SnapshotError(
                f"the parts of {name!r} hold {own} rows other than the {expected} there should be; nothing was committed: this is a bug"
            )
        if snapshot.parent is not None:
            inherited = {part.path for layer in self.chain(snapshot)[:-1] for part in layer.parts}
            if inherited.intersection(part.path for part in snapshot.parts):
                raise SnapshotError(f"a part of {name!r} is its parent's too; nothing was committed: this is a bug")
            taken = (0 if snapshot.deletes is None else snapshot.deletes.rows) - snapshot.own_deletes
            left = self.snapshot(name, snapshot.parent).rows - taken
            if left != counts.unchanged:
                raise SnapshotError(
                    f"of {name!r}'s parent, snapshot {snapshot.parent}, {left} rows stay but {counts.unchanged} were counted as unchanged; "
                    "nothing was committed: this is a bug"
                )

    def claim_epoch(self, view: str, above: int) -> int:
        """An epoch nobody had or will have, larger than ``above``: the number of a publishing and of its online generation.

        Raises:
            SnapshotError: the file system failed.
        """
        folder = self.root / view / "refs"
        path = folder / "epoch.json"
        try:
            make_folder(folder)
            with locked(folder / ".lock"):
                try:
                    last = int(json.loads(path.read_bytes())["last"])
                except (FileNotFoundError, ValueError, KeyError, TypeError):
                    last = 0
                ref = self.readable_live(view)
                epoch = max(last, above, 0 if ref is None else ref.epoch) + 1
                replace_durably(path, json.dumps({"last": epoch}).encode())
                return epoch
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    def move_live(
        self,
        view: str,
        snapshot: int,
        *,
        expected_epoch: int,
        epoch: int,
        reason: str,
        generation: int | None = None,
        held: str | None = None,
        lease: Lease | None = None,
    ) -> LiveRef:
        """Move the live pointer by compare-and-swap.

        Args:
            view: name of the view.
            snapshot: number of a committed snapshot.
            expected_epoch: the epoch the caller saw, 0 for none.
            epoch: the new one, larger.
            reason: one phrase for the operator, kept in the pointer.
            generation: where the online store holds it; ``epoch`` by default.
            held: why scheduled runs are to publish nothing after this.
            lease: held by the writer.

        Raises:
            ConflictError: somebody moved the pointer since.
            FencedError: the lease was lost.
        """

        def moved(current: LiveRef | None) -> LiveRef:
            found = 0 if current is None else current.epoch
            if found != expected_epoch or epoch <= found:
                raise ConflictError(
                    f"the live pointer of {view!r} moved from epoch {expected_epoch} to {found} meanwhile; look at `status` and publish again if still wanted"
                )
            previous, before = (None, None) if current is None else (current.snapshot, current.generation)
            if (
                current is not None and current.snapshot == snapshot
            ):  # loaded anew: what was before it is still what to go back to
                previous, before = current.previous, current.previous_generation
            new = epoch if generation is None else generation
            return LiveRef(epoch, snapshot, previous, reason, utc_now(), new, before, held=held)

        return self._swap_live(view, moved, lease)

    def renew_live(self, view: str, expected: LiveRef, renewed_at: int, lease: Lease | None = None) -> LiveRef:
        """Note in the live pointer that a run found nothing changed, at ``renewed_at`` (µs since 1970).

        Raises:
            ConflictError: the pointer is not ``expected`` any more.
            FencedError: the lease was lost.
        """

        def renewed(current: LiveRef | None) -> LiveRef:
            if current != expected:
                raise ConflictError(f"the live pointer of {view!r} moved meanwhile; nothing was renewed")
            return replace(expected, renewed_at=renewed_at)

        return self._swap_live(view, renewed, lease)

    def resume_live(self, view: str) -> LiveRef:
        """Let scheduled runs publish again.

        Raises:
            SnapshotError: the view was never published.
        """

        def resumed(current: LiveRef | None) -> LiveRef:
            if current is None:
                raise SnapshotError(f"view {view!r} was never published: there is nothing to resume")
            return replace(current, held=None)

        return self._swap_live(view, resumed, None)

    def _swap_live(self, view: str, change: Callable[[LiveRef | None], LiveRef], lease: Lease | None) -> LiveRef:
        folder = self.root / view / "refs"
        try:
            make_folder(folder)
            with locked(folder / ".lock"):
                if lease is not None:
                    lease.check()
                new = change(self.readable_live(view))
                replace_durably(folder / "live.json", json.dumps(asdict(new)).encode(), point="live")
                return new
        except OSError as exc:
            raise SnapshotError(disk_message(folder / "live.json", exc)) from exc

    def end_live(self, view: str) -> None:
        """Remove the live pointer: the view is published no more, its snapshots stay. One that is not there is no error.

        Raises:
            SnapshotError: the file system failed.
        """
        folder = self.root / view / "refs"
        if not folder.is_dir():
            return
        try:
            with locked(folder / ".lock"):
                (folder / "live.json").unlink(missing_ok=True)
                sync_folder(folder)
        except OSError as exc:
            raise SnapshotError(disk_message(folder / "live.json", exc, "it was to be removed")) from exc

    def removed_folder(self, view: str) -> Path:
        """Where a view's files are while :meth:`remove` removes them; one that a crash left is there."""
        return self.root / f".removed-{view}"

    def remove(self, view: str) -> None:
        """Remove all there is of a view, for good: snapshots, reports, marks. It is out of sight at once; files that a crash leaves behind go
        the next time. One that is not there is no error.

        Raises:
            SnapshotError: the file system failed.
        """
        folder, aside = self.root / view, self.removed_folder(view)
        try:
            if aside.exists():
                shutil.rmtree(aside)
            if folder.exists():
                folder.rename(aside)
                sync_folder(self.root)
                shutil.rmtree(aside)
        except OSError as exc:
            raise SnapshotError(disk_message(aside, exc, "it was to be removed; do it once more")) from exc

    def mark_bad(self, view: str, number: int, reason: str, *, rows: bool = True, back_to: int | None = None) -> None:
        """Mark a snapshot bad, for good; marking it twice is no error.

        Args:
            view: name of the view.
            number: of the snapshot.
            reason: kept in the mark.
            rows: its rows are at fault, so that the same rows once more are bad too; not only its files.
            back_to: the snapshot that is gone back to: what both hold is not at fault.

        Raises:
            SnapshotError: the file system failed.
        """
        content = ""
        if rows:
            try:
                content = self.snapshot(view, number).content
            except SnapshotError as exc:  # damaged besides
                log.warning("%s", exc)
        self._mark(view, "bad", number, asdict(BadMark(reason, utc_now(), content, rows, back_to)))

    def pin(self, view: str, number: int, reason: str) -> None:
        """Keep a snapshot whatever its age; pinning it twice is no error.

        Raises:
            SnapshotError: there is no such snapshot, or the file system failed.
        """
        self.snapshot(view, number)
        self._mark(view, "pins", number, {"reason": reason, "at": utc_now()})

    def unpin(self, view: str, number: int) -> None:
        """Let go of a pin; one that is not there is no error.

        Raises:
            SnapshotError: the file system failed.
        """
        path = self.root / view / "refs" / "pins" / f"{number}.json"
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    def pins(self, view: str) -> set[int]:
        """Numbers of the pinned snapshots."""
        return set(self._marked(view, "pins"))

    def _marked(self, view: str, kind: str) -> list[int]:
        paths = (self.root / view / "refs" / kind).glob("*.json")
        return [int(path.stem) for path in paths if path.stem.isdigit()]

    def _mark_path(self, view: str, kind: str, number: int) -> Path:
        return self.root / view / "refs" / kind / f"{number}.json"

    def _mark(self, view: str, kind: str, number: int, note: Mapping[str, Any]) -> None:
        path = self._mark_path(view, kind, number)
        folder = path.parent
        try:
            make_folder(folder)
            with contextlib.suppress(FileExistsError):
                create_once(path, json.dumps(note).encode(), folder / f".{number}.{os.getpid()}.tmp")
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    # ---- runs

    def lease_folder(self, view: str) -> Path:
        """Where the view's leases are: see :mod:`store.disk.lease`."""
        return self.root / view / "refs"

    def running(self, view: str, partition: str | None = None) -> bool:
        """Whether a run of the partition (None: of a view that has none) goes on."""
        return is_held(self.lease_folder(view), run_lease(partition))

    def run_stamp(self, view: str) -> str:
        """The time that the id of a run begins with that begins now. Ids sort in the order of the runs, whatever the clocks say: where an earlier
        run's time lies ahead, since its clock was wrong, this one's is a microsecond later."""
        now = datetime.now(UTC)
        for name in self._report_names(view):
            try:
                last = datetime.strptime(name[:23], _STAMP).replace(tzinfo=UTC)
            except ValueError:  # not one of ours
                continue
            if last >= now:
                if last - now > timedelta(microseconds=AHEAD_US):
                    log.warning(
                        "view %r: run %s is dated %d s ahead of this clock, which jumped, or that one's was wrong",
                        view,
                        name.removesuffix(".json"),
                        (last - now).total_seconds(),
                    )
                now = last + timedelta(microseconds=1)
            break
        return now.strftime(_STAMP)

    def write_report(
        self, view: str, run: str, report: Mapping[str, Any], state: str = "only the run's report is missing"
    ) -> Path:
        """Write a run's report, whole or not at all; a second report of the same run replaces the first.

        Raises:
            SnapshotError: it cannot be written; ``state`` says what else is lost.
        """
        folder, marker = self.root / view / "runs", self._running_path(view) / run
        path = folder / f"{run}.json"
        try:
            make_folder(folder)
            if report.get("status") == "running":
                self._mark_running(view, marker)
            replace_durably(path, json.dumps(report, indent=1, default=str).encode())
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc, state)) from exc
        if report.get("status") != "running":
            with contextlib.suppress(OSError):
                marker.unlink(missing_ok=True)
        return path

    def _mark_running(self, view: str, marker: Path) -> None:
        """Before the report: so that who closes dead runs' reports finds each of them without reading all."""
        if not marker.parent.is_dir():
            for report in self.reports(view, limit=1000):  # of a version that kept no markers
                if report.get("status") == "running":
                    self._touch(marker.with_name(str(report["run"])))
        self._touch(marker)
        sync_folder(marker.parent)

    @staticmethod
    def _touch(path: Path) -> None:
        make_folder(path.parent)
        path.touch()

    def unended(self, view: str) -> list[dict[str, Any]]:
        """Reports of the runs that did not write their end: they go on, or died."""
        folder = self._running_path(view)
        if not folder.is_dir():
            return [report for report in self.reports(view, limit=1000) if report.get("status") == "running"]
        found = []
        for marker in sorted(folder.iterdir(), reverse=True):
            try:
                report = dict(json.loads((self.root / view / "runs" / f"{marker.name}.json").read_bytes()))
            except FileNotFoundError:
                continue  # about to be written, or never was
            except (OSError, ValueError, TypeError) as exc:
                log.warning("the report of run %s cannot be read (%s)", marker.name, exc)
                continue
            if report.get("status") == "running":
                found.append(report)
            else:  # it ended, and was killed before it could remove its marker
                with contextlib.suppress(OSError):
                    marker.unlink(missing_ok=True)
        return found

    def reports(self, view: str, limit: int = 100, since: str = "") -> list[dict[str, Any]]:
        """Reports of the newest runs, the newest first; run ids sort in the order of the runs (:meth:`run_stamp`). One
        that cannot be read is skipped, and told in the log.

        Args:
            view: name of the view.
            limit: how many at most.
            since: none of a run whose id is below.
        """
        folder = self.root / view / "runs"
        found: list[dict[str, Any]] = []
        for name in self._report_names(view):
            if len(found) == limit or name < since:
                break
            try:
                found.append(dict(json.loads((folder / name).read_bytes())))
            except (OSError, ValueError, TypeError) as exc:
                log.warning("the run's report %s cannot be read (%s); remove the file", folder / name, exc)
        return found

    def _report_names(self, view: str) -> list[str]:
        """File names of the reports, the newest first; a Path for each would cost as much as all the rest."""
        try:
            names = os.listdir(self.root / view / "runs")
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((name for name in names if name.endswith(".json") and not name.startswith(".")), reverse=True)

    def last_report(self, view: str) -> dict[str, Any] | None:
        """The newest run's report."""
        return next(iter(self.reports(view, 1)), None)

    def _running_path(self, view: str) -> Path:
        return self.root / view / "refs" / "running"

    def _catalog_path(self, view: str) -> Path:
        return self.root / view / "refs" / "catalog.jsonl"

    def _manifest_path(self, view: str, number: int) -> Path:
        return self.root / view / "manifests" / f"{number:020d}.json"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run_lease(partition: str | None) -> str:
    """Name of the lease that a run of the partition (None: of a view that has none) holds in :meth:`OfflineStore.lease_folder`."""
    return "run" if partition is None else "run-" + partition.partition("/")[0].replace(":", "")


_STAMP = "%Y%m%dT%H%M%S.%fZ"

PUBLISH_LEASE = "publish"
"""Name of the lease that publishing, rolling back and removing snapshots hold."""
DROP_LEASE = "drop"
"""Name of the lease that the end of a view holds, besides: no run begins meanwhile."""


def utc_now() -> str:
    """Now, ISO 8601 in UTC with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
