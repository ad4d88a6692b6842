"""LMDB online store: one immutable file per generation, one small pointer file per view. The embedded default."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb

from store.disk.durable_file import disk_message, locked, make_folder, replace_durably, sync_file, sync_folder
from store.errors import DamagedPointerError, OnlineStoreError
from store.feature_view import NAME
from store.online.codec import Buffer
from store.online.online_store import OnlineStore, Pointer, Rows, check_epoch, check_loaded, check_not_live

SORT_BYTES = 256 * 2**20
"""Rows sorted at once before insertion; a generation that fits is appended in perfect order."""

_PAGE_BYTES = 4096

FIRST_MAP_BYTES = 64 * 2**20


class _Generation:
    """An open generation file. Closed by the garbage collector, after the last request that reads it let go."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        if size < 2 * _PAGE_BYTES:
            raise lmdb.CorruptedError(f"{size} bytes: cut short")
        self.env = lmdb.open(str(path), subdir=False, readonly=True, lock=False, readahead=False, max_spare_txns=8)
        # A page that its meta page counts but the file does not have would end the process with SIGBUS when it is read.
        if size < (self.env.info()["last_pgno"] + 1) * self.env.stat()["psize"]:
            self.env.close()
            raise lmdb.CorruptedError(f"{size} bytes: cut short")


_open: weakref.WeakValueDictionary[tuple[int, int], _Generation] = weakref.WeakValueDictionary()
# LMDB forbids opening a file twice in one process, so all stores of a process share them.
_open_lock = threading.Lock()


def _generation(path: Path) -> _Generation:
    with _open_lock:
        status = path.stat()
        identity = (status.st_dev, status.st_ino)
        generation = _open.get(identity)
        if generation is None:
            generation = _open[identity] = _Generation(path)
        return generation


@dataclass(frozen=True, slots=True)
class _Live:
    identity: tuple[int, int]
    pointer: Pointer
    generation: _Generation


class LmdbStore(OnlineStore):
    """The online store of one machine, in LMDB.

        <folder>/<view>/<generation:020d>.mdb     built aside, fsynced, renamed; read without locks, since nothing writes it again
        <folder>/<view>/live.json                 the pointer, replaced atomically

    A reader looks at the pointer file's inode and mtime once per request (1.5 µs) and opens the new generation when they changed.
    Rows are appended sorted by key: rows of 1,553 bytes take 2.06 kB each, put in any other way 3.8 to 4.1 kB, since pages split in half.

    Args:
        folder: created on the first load.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._live: dict[str, _Live] = {}

    # ---- reading

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, list[Buffer | None]] | None:
        live = self._current(view)
        if live is None:
            return None
        try:
            with live.generation.env.begin() as txn:
                get = txn.get
                return live.pointer, [get(key) for key in keys]
        except lmdb.Error as exc:
            raise OnlineStoreError(f"cannot read {self._path(view, live.pointer.generation)}: {exc}") from exc

    def live(self, view: str) -> Pointer | None:
        # the generation itself is not opened, so a publish can mend one that is gone
        if not NAME.match(view):
            return None
        seen = self._live.get(view)
        if seen is not None and seen.identity == self._identity(view):
            return seen.pointer
        return self._pointer(view)

    def _current(self, view: str) -> _Live | None:
        seen = self._live.get(view)
        if seen is None and not NAME.match(view):
            return None
        for attempt in (1, 2):
            identity = self._identity(view)
            if identity is None:
                # The view was ended: its file goes with the last request that reads it.
                self._live.pop(view, None)
                return None
            if seen is not None and seen.identity == identity:
                return seen
            pointer = self._pointer(view)
            if pointer is None:
                return None
            try:
                generation = _generation(self._path(view, pointer.generation))
            except (OSError, lmdb.Error) as exc:
                # The pointer moved twice between the two reads and the old generation is gone.
                if attempt == 1:
                    continue
                raise OnlineStoreError(
                    f"cannot open the live generation {self._path(view, pointer.generation)}: {exc}; publish the view again"
                ) from exc
            seen = self._live[view] = _Live(identity, pointer, generation)
            return seen
        return None

    def _identity(self, view: str) -> tuple[int, int] | None:
        """What changes whenever the pointer file is replaced; None when there is none."""
        path = f"{self.folder}/{view}/live.json"
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise OnlineStoreError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        return status.st_ino, status.st_mtime_ns

    def _pointer(self, view: str) -> Pointer | None:
        path = self.folder / view / "live.json"
        try:
            return Pointer.from_bytes(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise OnlineStoreError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise DamagedPointerError(f"{path} is damaged ({exc}); publish the view again") from exc

    def _readable(self, view: str) -> Pointer | None:
        """The pointer, or None when there is none or it is damaged: what a writer needs, who will replace it."""
        try:
            return self._pointer(view)
        except DamagedPointerError:
            return None

    def read_generation(self, view: str, generation: int, keys: Sequence[bytes]) -> list[Buffer | None]:
        path = self._path(view, generation)
        try:
            opened = _generation(path)
            with opened.env.begin() as txn:
                return [txn.get(key) for key in keys]
        except FileNotFoundError:
            return [None] * len(keys)
        except (OSError, lmdb.Error) as exc:
            raise OnlineStoreError(f"cannot read {path}: {exc}; publish the view again") from exc

    def generations(self, view: str) -> list[int]:
        return sorted(int(p.stem) for p in (self.folder / view).glob("*.mdb") if p.stem.isdigit())

    def views(self) -> list[str]:
        return sorted(p.parent.name for p in self.folder.glob("*/live.json"))

    # ---- writing

    def load(self, view: str, generation: int, rows: Rows) -> int:
        check_not_live(self._readable(view), view, generation)
        path = self._path(view, generation)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            make_folder(path.parent)
            # By processes that were killed while loading: only one loads at a time.
            for left in path.parent.glob(".*.mdb.*.tmp"):
                left.unlink(missing_ok=True)
            env = lmdb.open(str(temporary), subdir=False, map_size=FIRST_MAP_BYTES, sync=False, metasync=False, lock=False)
            try:
                for number, items in enumerate(_sorted(rows)):
                    _insert(env, items, append=number == 0)
                count = int(env.stat()["entries"])
            finally:
                env.close()
            sync_file(temporary)
            os.replace(temporary, path)
            sync_folder(path.parent)
            return count
        except OSError as exc:
            raise OnlineStoreError(disk_message(path, exc)) from exc
        except lmdb.Error as exc:
            # LMDB gives words, and no number; and a write that was cut short, as on a full disk, is an input/output error to it.
            full = any(words in str(exc) for words in ("No space left", "File too large", "Disk quota"))
            cause = f"cannot write {path}: {exc}"
            if full or "Input/output error" in str(exc):
                fails = "" if full else ", or the disk fails,"
                cause = f"no space left{fails} while writing {path} ({exc}); free some and run again"
            raise OnlineStoreError(f"{cause} (the live generation is untouched)") from exc
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def flip(self, pointer: Pointer) -> None:
        folder = self.folder / pointer.view.name
        check_loaded(pointer, self.generations(pointer.view.name))
        try:
            with locked(folder / ".lock"):
                check_epoch(self._readable(pointer.view.name), pointer)
                replace_durably(folder / "live.json", pointer.to_bytes())
                # Of processes that died: whoever lives and writes one holds the lock.
                for left in folder.glob(".live.json.*.tmp"):
                    left.unlink(missing_ok=True)
        except OSError as exc:
            raise OnlineStoreError(disk_message(folder / "live.json", exc)) from exc

    def drop(self, view: str, generation: int) -> None:
        check_not_live(self._readable(view), view, generation)
        try:
            self._path(view, generation).unlink(missing_ok=True)
        except OSError as exc:
            raise OnlineStoreError(f"cannot remove {self._path(view, generation)}: {exc}") from exc

    def forget(self, view: str) -> None:
        folder = self.folder / view
        if not NAME.match(view) or not folder.is_dir():
            return
        try:
            with locked(folder / ".lock"):
                (folder / "live.json").unlink(missing_ok=True)
                sync_folder(folder)
            shutil.rmtree(folder)
        except OSError as exc:
            raise OnlineStoreError(f"cannot remove {folder}: {exc.strerror or exc}; do it once more") from exc
        self._live.pop(view, None)

    def close(self) -> None:
        self._live.clear()

    def _path(self, view: str, generation: int) -> Path:
        return self.folder / view / f"{generation:020d}.mdb"


def _sorted(rows: Rows) -> Iterator[list[tuple[bytes, Buffer]]]:
    """The rows in chunks of about :data:`SORT_BYTES`, each sorted by key, the last row of a key standing."""
    chunk: dict[bytes, Buffer] = {}
    size = 0
    for keys, values in rows:
        chunk.update(zip(keys, values, strict=True))
        size += sum(map(len, values))
        if size >= SORT_BYTES:
            yield sorted(chunk.items(), key=_key)
            chunk, size = {}, 0
    if chunk:
        yield sorted(chunk.items(), key=_key)


def _key(item: tuple[bytes, Buffer]) -> bytes:
    return item[0]


def _insert(env: lmdb.Environment, items: list[tuple[bytes, Buffer]], *, append: bool) -> None:
    """Insert sorted items in one transaction, with a map as large as that takes; ``append`` fills each page instead of splitting it."""
    while True:
        try:
            with env.begin(write=True) as txn:
                txn.cursor().putmulti(items, append=append)
            return
        except lmdb.MapFullError:
            env.set_mapsize(env.info()["map_size"] * 2)
