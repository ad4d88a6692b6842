"""Table store: one immutable, mapped table file per segment, one small pointer file per view.
The embedded default."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from precompute.store.disk.durable_file import (
    disk_message,
    limit_of,
    locked,
    make_folder,
    replace_durably,
    sync_folder,
)
from precompute.store.disk.record import plain, record_of
from precompute.store.disk.storage import FileCheck
from precompute.store.errors import DamagedPointerError, OnlineStoreError, RowsLostError
from precompute.store.feature_view import NAME
from precompute.store.online import kernels
from precompute.store.online.found_rows import ColumnReader, FoundRows, PackedKeys, WholeColumns
from precompute.store.online.kernels import Packed, Rows
from precompute.store.online.online_store import (
    KeysOf,
    OnlineStore,
    Pointer,
    Segment,
    check_epoch,
    check_loaded,
    check_not_live,
    check_taken,
    is_segment,
    number_of,
)
from precompute.store.online.table_file import TableFile, TableWriter

WARM_BYTES = 2**30
"""Bytes of a segment that goes live that are read into memory before readers come, at most."""

_open: weakref.WeakValueDictionary[tuple[int, int], TableFile] = weakref.WeakValueDictionary()
# A file is mapped once in a process, whatever number of stores read it; it goes with the last
# request that reads it.
_open_lock = threading.Lock()
_loading: set[Path] = set()
"""Files that this process is loading."""


def _table(path: Path) -> TableFile:
    with _open_lock:
        status = path.stat()
        identity = (status.st_dev, status.st_ino)
        table = _open.get(identity)
        if table is None:
            table = TableFile(path)
            number, digest, view = map(table.meta.get, ("number", "digest", "view"))
            name = f"{number}-{str(digest)[:8]}"
            if (name, view) != (path.stem, path.parent.name):
                raise OnlineStoreError(
                    f"cannot read {path}: it is segment {name} of view {view!r}; publish the view"
                    " again"
                )
            _open[identity] = table
        return table


@dataclass(frozen=True, slots=True)
class _Live:
    identity: tuple[int, int]
    pointer: Pointer
    tables: tuple[TableFile, ...]
    """Those of the segments, the highest first."""
    file: mmap.mmap
    """The pointer's, held so that no other file gets its inode: ext4 gives two of them in turn, and
    two flips may fall into one tick of its clock (4 ms)."""


def _identity_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


class TableStore(OnlineStore):
    """The online store of one machine, in table files.

        <folder>/<view>/<segment>.table   built aside, fsynced, renamed; never written again
        <folder>/<view>/live.json         the pointer, replaced atomically

    A reader looks at the pointer file's inode and mtime once per request (1.5 µs) and maps the new
    segments when they changed: also those of the same names, where one was loaded again. Which keys
    a segment has, its own index vouches for.

    Args:
        folder: created on the first load.
        memory_bytes: what a load may hold of the index it builds.
    """

    def __init__(self, folder: str | Path, memory_bytes: int = 2**30) -> None:
        self.folder, self._memory_bytes = Path(folder), memory_bytes
        self._live: dict[str, _Live] = {}

    # ---- reading

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, FoundRows] | None:
        live = self._current(view)
        return None if live is None else (live.pointer, _found(live.tables, keys))

    def live(self, view: str) -> Pointer | None:
        # the segments themselves are not opened, so a publish can mend one that is gone
        if not NAME.match(view):
            return None
        seen = self._live.get(view)
        if seen is not None and seen.identity == self._identity(view):
            return seen.pointer
        opened = self._pointer(view)
        return None if opened is None else opened[1]

    def check_writable(self, view: str, owner: str) -> None:
        super().check_writable(view, owner)
        # none of them is of another format
        self.segments(view)
        own = self.folder / view
        there = next(folder for folder in (own, *own.absolute().parents) if folder.exists())
        try:
            # in a folder that is made by the first load if need be; a file without a name leaves
            # nothing behind
            tempfile.TemporaryFile(dir=there).close()
        except OSError as exc:
            raise OnlineStoreError(disk_message(own, exc)) from exc

    def known(self, view: str) -> Pointer | None:
        seen = self._live.get(view)
        return seen.pointer if seen is not None and seen.identity == self._identity(view) else None

    def is_read_in(self, pointer: Pointer, segment: str, key: bytes) -> bool:
        seen = self._live.get(pointer.view.name)
        if seen is not None and seen.pointer is pointer:
            for name, table in zip(reversed(pointer.segments), seen.tables, strict=True):
                if name == segment or table.find(key) is not None:
                    return name == segment
        return False

    def _current(self, view: str) -> _Live | None:
        seen = self._live.get(view)
        if seen is None and not NAME.match(view):
            return None
        for attempt in (1, 2):
            identity = self._identity(view)
            if identity is None:
                # The view was ended: its files go with the last request that reads them.
                self._live.pop(view, None)
                return None
            if seen is not None and seen.identity == identity:
                return seen
            opened = self._pointer(view)
            if opened is None:
                return None
            identity, pointer, file = opened
            tables, name = list[TableFile](), ""
            try:
                for name in reversed(pointer.segments):
                    tables.append(_table(self._path(view, name)))
            except (OSError, OnlineStoreError) as exc:
                # The pointer moved twice between the two reads and the old segment is gone.
                if attempt == 1:
                    continue
                raise RowsLostError(
                    f"cannot open what is live of view {view!r}: {exc}; publish the view again",
                    frozenset([name]),
                ) from exc
            seen = self._live[view] = _Live(identity, pointer, tuple(tables), file)
            return seen
        return None

    def _identity(self, view: str) -> tuple[int, int] | None:
        """What changes whenever the pointer file is replaced; None when there is none."""
        path = f"{self.folder}/{view}/live.json"
        try:
            return _identity_of(os.stat(path))
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise OnlineStoreError(f"{path} cannot be read: {exc.strerror or exc}") from exc

    def _pointer(self, view: str) -> tuple[tuple[int, int], Pointer, mmap.mmap] | None:
        """The pointer, its file, and what that is known by; None when there is none."""
        path = self.folder / view / "live.json"
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                return (
                    _identity_of(os.fstat(file.fileno())),
                    Pointer.from_bytes(mapped[:], view, path),
                    mapped,
                )
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise OnlineStoreError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise DamagedPointerError(f"{path} is damaged ({exc}); publish the view again") from exc

    def _readable(self, view: str) -> Pointer | None:
        """The pointer, or None when there is none or it is damaged: what a writer needs, who will
        replace it."""
        try:
            opened = self._pointer(view)
        except DamagedPointerError:
            return None
        return None if opened is None else opened[1]

    def read_segments(self, view: str, names: Sequence[str], keys: Sequence[bytes]) -> FoundRows:
        tables = []
        for name in reversed(names):
            path = self._path(view, name)
            try:
                tables.append(_table(path))
            except FileNotFoundError:
                pass
            except OnlineStoreError as exc:
                raise RowsLostError(str(exc), frozenset([name])) from exc
            except OSError as exc:
                raise OnlineStoreError(
                    f"cannot read {path}: {exc.strerror or exc};"
                    f" {limit_of(exc) or 'publish the view again'}"
                ) from exc
        return _found(tables, keys) if tables else FoundRows(keys, [None] * len(keys))

    def segments(self, view: str) -> list[Segment]:
        names = {path.stem for path in (self.folder / view).glob("*.table")}
        for name in names:
            if not is_segment(name):
                # none of ours; of another format's they may be named otherwise
                with contextlib.suppress(OSError, OnlineStoreError):
                    TableFile(self._path(view, name))
        return self.loaded(view, names)

    def loaded(self, view: str, names: Collection[str]) -> list[Segment]:
        # no others are opened: those that are read are open already
        there = [name for name in names if is_segment(name) and self._path(view, name).exists()]
        return [self._segment(view, name) for name in sorted(there, key=_in_order)]

    def _segment(self, view: str, name: str) -> Segment:
        """What a file says it is; of a damaged one no more than its name, so that it can be dropped
        and is never taken for what was loaded."""
        try:
            return record_of(Segment, _table(self._path(view, name)).meta)
        except (OSError, OnlineStoreError, ValueError):
            return Segment(number_of(name), name.partition("-")[2])

    def file_checks(self, view: str, names: Collection[str]) -> list[FileCheck]:
        checks = []
        for path in (self._path(view, name) for name in sorted(names, key=_in_order)):
            # another publishing may drop one meanwhile
            with contextlib.suppress(FileNotFoundError):
                size_bytes = path.stat().st_size
                checks.append(FileCheck(str(path), size_bytes, partial(_damage, path), path.stem))
        return checks

    def views(self) -> list[str]:
        return sorted(p.parent.name for p in self.folder.glob("*/live.json"))

    # ---- writing

    def load(self, view: str, segment: Segment, rows: Rows, rows_done: int = 0) -> int:
        path = self._path(view, segment.name)
        try:
            make_folder(path.parent)
        except OSError as exc:
            raise OnlineStoreError(disk_message(path, exc)) from exc
        self.sweep(view)
        _loading.add(path)
        try:
            with TableWriter(path, plain(segment) | {"view": view}, self._memory_bytes) as writer:
                for batch in rows:
                    writer.add(batch)
                return writer.finish()
        finally:
            _loading.discard(path)

    def unfinished(self, view: str) -> list[str]:
        return [f"{path} is left of a load that was killed" for path in self._left(view)]

    def sweep(self, view: str) -> None:
        try:
            for path in self._left(view):
                path.unlink(missing_ok=True)
        except OSError as exc:
            raise OnlineStoreError(disk_message(self.folder / view, exc)) from exc

    def _left(self, view: str) -> list[Path]:
        """Temporary files of processes that were killed. One that lives may be a rollback that took
        this one's lease, or its victim, which has the file removed as it ends."""
        if not NAME.match(view):
            return []
        return [path for path in (self.folder / view).glob(".*.table.*") if not _alive(path)]

    def flip(self, pointer: Pointer) -> None:
        view, folder = pointer.view.name, self.folder / pointer.view.name
        check_loaded(pointer, {segment.name for segment in self.segments(view)})
        try:
            warm = self._readable(view)
            for name in set(pointer.segments).difference(() if warm is None else warm.segments):
                _table(self._path(view, name)).warm(WARM_BYTES)
            with locked(folder / ".lock"):
                before = self._readable(view)
                check_taken(before, pointer)
                check_epoch(before, pointer)
                replace_durably(folder / "live.json", pointer.to_bytes())
                # Of processes that died: one that lives and writes one holds the lock.
                for left in folder.glob(".live.json.*.tmp"):
                    left.unlink(missing_ok=True)
        except OSError as exc:
            raise OnlineStoreError(disk_message(folder / "live.json", exc)) from exc

    def drop(self, view: str, name: str, keys: KeysOf | None = None) -> None:
        check_not_live(self._readable(view), view, name)
        path = self._path(view, name)
        # it may be damaged, and not of another format
        self._segment(view, name)
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            raise OnlineStoreError(f"cannot remove {path}: {exc.strerror or exc}") from exc

    def forget(self, view: str) -> None:
        folder = self.folder / view
        if not NAME.match(view) or not folder.is_dir():
            return
        # it may be damaged, and not of another format
        self._readable(view)
        self.segments(view)
        try:
            with locked(folder / ".lock"):
                (folder / "live.json").unlink(missing_ok=True)
                sync_folder(folder)
            shutil.rmtree(folder)
        except OSError as exc:
            raise OnlineStoreError(
                f"cannot remove {folder}: {exc.strerror or exc}; do it once more"
            ) from exc
        self._live.pop(view, None)

    def close(self) -> None:
        self._live.clear()

    def _path(self, view: str, name: str) -> Path:
        return self.folder / view / f"{name}.table"


def _in_order(name: str) -> tuple[int, str]:
    return number_of(name), name


def _found(tables: Sequence[TableFile], keys: Sequence[bytes]) -> FoundRows:
    """The rows of the first table that has each key."""
    if len(keys) == 1:
        row = next(
            (row for row in (table.find(keys[0]) for table in tables) if row is not None), None
        )
        return FoundRows(keys, [row])
    return _TableRows(tables, keys)


class _TableRows(FoundRows):
    """Rows that stay in the mapped files until they are read, as rows or as columns."""

    __slots__ = ("_packed_keys", "_records")

    def __init__(self, tables: Sequence[TableFile], keys: Sequence[bytes]) -> None:
        self._records = [table.records for table in tables]
        self._packed_keys, hashes = (
            (keys.packed, keys.hashes) if isinstance(keys, PackedKeys) else kernels.pack(keys)
        )
        super().__init__(keys, hashes=hashes)

    def columns(self, reader: ColumnReader) -> WholeColumns:
        return reader.of_tables(self._records, self._packed_keys, self.hashes)

    def _read(self) -> tuple[Packed, npt.NDArray[np.bool_] | None]:
        first, *below = self._records
        rows, states = first.read(self._packed_keys, self.hashes, below)
        damaged = states == kernels.DAMAGED
        return rows, damaged if damaged.any() else None


def _damage(path: Path) -> str | None:
    try:
        table, size_bytes = _table(path), path.stat().st_size
        if size_bytes != table.size_bytes:
            # it was opened when it was whole: to read past its end would end the process
            return f"{path}: it has {size_bytes:,} bytes, and should have {table.size_bytes:,}"
        return next(iter(table.check()), None)
    except FileNotFoundError:
        # another publishing dropped it meanwhile
        return None
    except (OSError, OnlineStoreError) as exc:
        return str(exc)


def _alive(left: Path) -> bool:
    """Whether a temporary file is that of a process that is at work:
    ``.<segment>.table.<pid>.tmp``. One of a process that was killed may have this one's number."""
    name, _, rest = left.name[1:].partition(".table.")
    pid = rest.partition(".")[0]
    if not pid.isdigit() or int(pid) == os.getpid():
        return left.with_name(f"{name}.table") in _loading
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        # it is another user's
        return True
    return True
