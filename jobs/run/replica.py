"""Replicas: with a root in an object store and table files online, publishing sends the generations
and indexes that are live to the root, and any host follows: it fetches, compares, and flips.

    <root>/<view>/refs/served.json        the pointer that readers follow, and the files it needs
    <root>/<view>/online/<number>.table   generations; indexes lie where they always do
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from precompute.store.disk.durable_file import disk_message, make_folder, sha256_of
from precompute.store.disk.record import Record, read_record, sealed
from precompute.store.disk.storage import LOCAL, File, storage_of
from precompute.store.errors import (
    DamagedPointerError,
    OnlineStoreError,
    PrecomputeError,
    SnapshotError,
)
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.online.online_store import OnlineStore, Pointer
from precompute.store.online.table_store import TableStore
from precompute.store.times import duration

log = logging.getLogger(__name__)

SERVED = "served.json"

POLL_S = 0.5
"""How often a replica looks at the pointer of each view: one request."""
WARNED_S = 60.0
"""Between two warnings that the root cannot be reached."""


class _Held(Record, frozen=True):
    """A file of what is live, by its path from the view's folder."""

    path: str
    size_bytes: int
    sha256: str


class _Served(Record, frozen=True):
    """What readers are to serve."""

    pointer: str
    files: tuple[_Held, ...]


class Replica:
    """One view's generations in the root and on this host. Where the root is a folder, or the
    online store is not of table files, there is nothing to do.

    Args:
        store: of the view.
        online: where it is served from on this host.
    """

    def __init__(self, store: ViewStore, online: OnlineStore) -> None:
        self._store, self._online = store, online
        self._path = store.refs.folder / SERVED
        self._followed = False
        self.is_one = store.storage is not LOCAL and isinstance(online, TableStore)

    # ---- the publishing side

    def send(self, pointer: Pointer) -> list[_Held]:
        """Send the files of what is about to be live, those that are not in the root yet."""
        served = self._served()
        known = {} if served is None else {held.path: held for held in served.files}
        files = {
            f"online/{Path(check.path).name}": Path(check.path)
            for check in self._online.file_checks(self._store.name, pointer.generations)
        }
        for folder in _indexes(self._store, pointer):
            files |= {f"index/{folder.name}/{path.name}": path for path in folder.iterdir()}
        held = []
        for name, path in sorted(files.items()):
            if name not in known:
                size_bytes, sha256 = path.stat().st_size, sha256_of(path)
                _linked(path, self._store.folder / name)
                self._store.storage.put([self._store.folder / name])
                known[name] = _Held(name, size_bytes, sha256)
            held.append(known[name])
        return held

    def publish(self, pointer: Pointer) -> None:
        """Have all hosts serve what a pointer says.

        Raises:
            SnapshotError: the object store failed.
        """
        if not self.is_one:
            return

        def moved(data: bytes | None) -> bytes:
            before = None if data is None else _read(data)
            if before is not None and before[0].epoch > pointer.epoch and data is not None:
                return data
            return new

        try:
            new = sealed(_Served(pointer.to_bytes().decode(), tuple(self.send(pointer))))
            self._store.storage.update(self._path, moved)
        except OSError as exc:
            raise SnapshotError(disk_message(self._path, exc, "other hosts serve on")) from exc

    def is_behind(self, epoch: int) -> bool:
        """Whether the root tells readers of an older publishing, or of none."""
        served = self._served() if self.is_one else None
        return self.is_one and (served is None or _read(sealed(served))[0].epoch < epoch)

    def end(self) -> None:
        """Have no host serve the view any more."""
        if self._store.storage is not LOCAL:
            self._store.storage.delete(self._path)
            self._store.storage.delete_all(self._store.folder / "online")

    def drop_all_but(self, keep: set[int]) -> None:
        """Remove the generations and indexes of other numbers from the root."""
        storage, folder = self._store.storage, self._store.folder
        if not self.is_one:
            return
        try:
            for name in storage.names(folder / "online"):
                if not name[:20].isdigit() or int(name[:20]) not in keep:
                    storage.delete(folder / "online" / name)
            for name in storage.names(self._store.indexes):
                if not name.isdigit() or int(name) not in keep:
                    storage.delete_all(self._store.indexes / name)
        except OSError as exc:
            log.warning("view %r: old generations stay for now: %s", self._store.name, exc)

    # ---- the reading side

    def follow(self) -> bool:
        """Serve what the root says; whether something new was flipped.

        Raises:
            SnapshotError: the root cannot be read, or a file of it is damaged or just gone.
            OnlineStoreError: nothing can be written here.
        """
        if not self.is_one:
            return False
        try:
            served, current = self._served(), self._current()
            if served is None:
                if self._followed:
                    # the view was ended
                    self._online.forget(self._store.name)
                self._followed = False
                return False
            self._followed = True
            pointer, _ = _read(sealed(served))
            if current is not None and (current.epoch, current.renewed_at_us) >= (
                pointer.epoch,
                pointer.renewed_at_us,
            ):
                return False
            files = [
                File(self._store.folder / held.path, held.size_bytes, held.sha256)
                for held in served.files
            ]
            self._store.storage.fetch(files)
            assert isinstance(self._online, TableStore)
            for file in files:
                if file.path.suffix == ".table":
                    _linked(file.path, self._online.folder / self._store.name / file.path.name)
        except (OSError, ValueError) as exc:
            raise SnapshotError(f"{self._path} cannot be followed: {exc}") from exc
        self._online.flip(pointer)
        self._forget_all_but(pointer, current)
        log.info("view %r: snapshot %d is served", self._store.name, pointer.snapshot)
        return True

    def _served(self) -> _Served | None:
        try:
            return read_record(_Served, self._store.storage.read(self._path))
        except FileNotFoundError:
            return None

    def _current(self) -> Pointer | None:
        try:
            return self._online.live(self._store.name)
        except DamagedPointerError as exc:
            log.warning("%s; it is fetched again", exc)
            return None

    def _forget_all_but(self, pointer: Pointer, before: Pointer | None) -> None:
        """Remove what a request that began before the flip does not read either."""
        keep = {*pointer.generations, *(() if before is None else before.generations)}
        for generation in self._online.generations(self._store.name):
            if generation.number not in keep:
                with contextlib.suppress(OnlineStoreError):
                    self._online.drop(self._store.name, generation.number)
        for path in (self._store.folder / "online").glob("*.table"):
            if int(path.stem) not in keep:
                path.unlink(missing_ok=True)
        for path in self._store.indexes.glob("*"):
            if path.name.isdigit() and int(path.name) not in keep:
                shutil.rmtree(path, ignore_errors=True)


def _read(data: bytes) -> tuple[Pointer, _Served]:
    served = read_record(_Served, data)
    return Pointer.from_bytes(served.pointer.encode()), served


def _indexes(store: ViewStore, pointer: Pointer) -> list[Path]:
    root = store.offline.root
    return [root / name for name in (pointer.index, pointer.overlay_index) if name is not None]


def _linked(path: Path, other: Path) -> None:
    """The same file under another name too; copied where they lie on two file systems."""
    if path == other or (other.exists() and other.stat().st_size == path.stat().st_size):
        return
    make_folder(other.parent)
    temporary = other.with_name(f".{other.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    temporary.replace(other)


class Follower:
    """Follows the root for all views, in a thread of its own, until :meth:`stop`.

    Args:
        offline: the root; nothing is done where it is a folder.
        online: opens the online store.
        names: of the views.
    """

    def __init__(
        self, offline: OfflineStore, online: Callable[[], OnlineStore], names: Sequence[str]
    ) -> None:
        self._offline, self._open, self._names = offline, online, names
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if storage_of(offline.root) is not LOCAL:
            self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End it; a file that is being fetched is fetched first."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        with contextlib.closing(self._open()) as online:
            replicas = {name: Replica(self._offline.view(name), online) for name in self._names}
            followed_s = dict.fromkeys(replicas, time.monotonic())
            warned_s = dict[str, float]()
            while not self._stop.is_set():
                for name, replica in replicas.items():
                    # one view that cannot be followed is no reason to leave the others behind
                    try:
                        replica.follow()
                    except Exception as exc:
                        self._warn(name, exc, followed_s[name], warned_s)
                        continue
                    followed_s[name] = time.monotonic()
                    if warned_s.pop(name, None) is not None:
                        log.info("view %r: the root answers again: what is live is served", name)
                self._stop.wait(POLL_S)

    @staticmethod
    def _warn(name: str, exc: Exception, followed_s: float, warned_s: dict[str, float]) -> None:
        """Say so once in :data:`WARNED_S`; what is no error of ours comes with where it was raised,
        and does not end the thread either: nobody would see that a replica stands still."""
        now_s = time.monotonic()
        if now_s < warned_s.get(name, -WARNED_S) + WARNED_S:
            return
        warned_s[name] = now_s
        log.warning(
            "view %r: cut off from the root for %s: %s. What was live then is served, with the age"
            " of each row",
            name,
            duration(now_s - followed_s),
            exc,
            exc_info=None if isinstance(exc, PrecomputeError) else exc,
        )
