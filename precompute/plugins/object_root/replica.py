"""Replica: sends what is live to a root in an object store, and has a host follow that root: fetch,
compare and flip, once, or in a thread (Follower); only where table files are the online store.

    <root>/.served.json                   the publishing of each view that was told of last
    <root>/<view>/notes/served.json       what readers follow: pointer and files; in the cache,
                                          those that were compared and are served
    <root>/<view>/online/<segment>.table  segments; indexes lie where they always do
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from precompute.store.account.account import Followed, read_followed, write_followed
from precompute.store.disk.durable_file import (
    disk_message,
    make_folder,
    replace_undurably,
    restore,
    sha256_of,
)
from precompute.store.disk.record import Record, read_record, sealed, whole_record
from precompute.store.disk.storage import File, known_identity, storage_of
from precompute.store.errors import (
    DamagedPointerError,
    OnlineStoreError,
    PrecomputeError,
    SnapshotError,
    UnreadableError,
)
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.online.online_store import (
    OnlineStore,
    Pointer,
    check_taken,
    is_segment,
    number_of,
)
from precompute.store.online.table_store import TableStore
from precompute.store.times import duration
from precompute.store.vectors.indexed_parts import is_index

log = logging.getLogger(__name__)

LIVE_FILES, TOLD = "served.json", ".served.json"

POLL_S = 0.5
"""How often a replica looks which views were published: one request."""
ALL_S = 60.0
"""How often it looks at the pointer of each view all the same: who published may have been killed
before it was told."""
AT_ONCE = 8
"""Views that are followed side by side."""
WARNED_S = 60.0
"""Seconds between two warnings that the root cannot be reached."""
NOTED_S = 5.0
"""Seconds between two writes of followed.json, which tells people and alerts that this host follows
the root."""


class _ServedFile(Record, frozen=True):
    """A file of what is live, by its path from the view's folder."""

    path: str
    size_bytes: int
    sha256: str


class _LiveFiles(Record, frozen=True):
    """What followers are to serve."""

    pointer: str
    files: tuple[_ServedFile, ...]


class _Told(Record, frozen=True):
    """View → epoch of the publishing that was told last, and a word that no other has."""

    views: dict[str, tuple[int, str]]


def _told(root: Path) -> dict[str, tuple[int, str]]:
    """What was told last of each view.

    Raises:
        UnreadableError: it cannot be read now.
    """
    with contextlib.suppress(FileNotFoundError):
        told = whole_record(_Told, storage_of(root).read(root / TOLD), root / TOLD)
        return {} if told is None else told.views
    return {}


class Replica:
    """One view's segments in the root and on this host, as
    :class:`precompute.store.account.followers.Followers`. Where the online store is not of table
    files, there is nothing to do.

    Args:
        store: of the view.
        online: where it is served from on this host.
    """

    def __init__(self, store: ViewStore, online: OnlineStore) -> None:
        self._store, self._online = store, online
        self._path = store.leases / LIVE_FILES
        self._lock = threading.Lock()
        self.is_one = isinstance(online, TableStore)

    @staticmethod
    def follower(
        offline: OfflineStore, online: Callable[[], OnlineStore], names: Sequence[str]
    ) -> Follower:
        """A :class:`Follower`, which runs from now on."""
        return Follower(offline, online, names)

    # ---- the publishing side

    def send(self, pointer: Pointer, loaded: Collection[str] = ()) -> list[_ServedFile]:
        """Send the files of what is about to be live, those that are not in the root yet, and those
        of the segments that were ``loaded``."""
        known: dict[str, _ServedFile] = {}
        # of a damaged one nothing is believed: all is sent
        with contextlib.suppress(ValueError):
            if (served := self._live_files()) is not None:
                known = {file.path: file for file in served.files if _of(file.path) not in loaded}
        files = {
            f"online/{Path(check.path).name}": Path(check.path)
            for check in self._online.file_checks(self._store.name, pointer.segments)
        }
        for folder in map(self._store.index_folder, pointer.indexes):
            files |= {f"index/{folder.name}/{path.name}": path for path in folder.iterdir()}
        sent = []
        for name, path in sorted(files.items()):
            if name not in known:
                size_bytes, sha256 = path.stat().st_size, sha256_of(path)
                sent_before = self._store.folder / name
                if _of(name) in loaded and sent_before.exists() and not sent_before.samefile(path):
                    sent_before.unlink()
                _linked(path, sent_before)
                self._store.storage.put([self._store.folder / name])
                known[name] = _ServedFile(name, size_bytes, sha256)
            sent.append(known[name])
        return sent

    def publish(self, pointer: Pointer, loaded: Collection[str] = ()) -> None:
        """Have all hosts serve what a pointer says, of segments that were ``loaded`` the new files.

        Raises:
            SnapshotError: the object store failed.
        """
        if not self.is_one:
            return

        def moved(data: bytes | None) -> bytes:
            # a damaged one gives way to what is published
            with contextlib.suppress(ValueError):
                if data is not None and _read(data, self._path)[0].epoch > pointer.epoch:
                    return data
            return new

        try:
            files = tuple(self.send(pointer, loaded))
            new = sealed(_LiveFiles(pointer.to_bytes().decode(), files))
            self._store.storage.update(self._path, moved)
        except OSError as exc:
            raise SnapshotError(disk_message(self._path, exc, "other hosts serve on")) from exc
        self._tell(pointer.epoch)

    def _tell(self, epoch: int | None) -> None:
        """Have followers look at the view at once; None: it has ended. That they cannot be told is
        no error: they look within a minute."""
        path = self._store.offline.root / TOLD

        def told(data: bytes | None) -> bytes:
            known = whole_record(_Told, data, path)
            views = {} if known is None else dict(known.views)
            views.pop(self._store.name, None)
            if epoch is not None:
                views[self._store.name] = epoch, uuid.uuid4().hex[:8]
            return sealed(_Told(views))

        try:
            self._store.storage.update(path, told)
        except (OSError, UnreadableError) as exc:
            log.warning("view %r: other hosts see it within a minute: %s", self._store.name, exc)

    def is_behind(self, epoch: int) -> bool:
        """Whether the root's pointer for followers is of an older publishing, damaged, not there,
        or not told of."""
        if not self.is_one:
            return False
        with contextlib.suppress(ValueError):
            served = self._live_files()
            told, _ = _told(self._store.offline.root).get(self._store.name, (0, ""))
            return (
                served is None or told < epoch or _read(sealed(served), self._path)[0].epoch < epoch
            )
        return True

    def end(self) -> None:
        """Have no host serve the view any more."""
        self._store.storage.delete(self._path)
        self._store.storage.delete_all(self._store.folder / "online")
        if self.is_one:
            self._tell(None)

    def drop_all_but(self, keep: set[str]) -> None:
        """Remove other segments and indexes from the root, but for later ones, of larger numbers:
        they are of a publishing by the lease's next holder."""
        storage, folder = self._store.storage, self._store.folder
        if not self.is_one:
            return

        try:
            for name in _removable(map(_stem, storage.names(folder / "online")), keep):
                storage.delete(folder / "online" / f"{name}.table")
            for name in _removable(storage.names(self._store.indexes), keep):
                storage.delete_all(self._store.indexes / name)
        except OSError as exc:
            log.warning("view %r: old segments stay for now: %s", self._store.name, exc)

    # ---- the reading side

    def follow(self, *, again: bool = False) -> bool:
        """Serve what the root says; whether something new was flipped.

        Args:
            again: compare every file that is served with its checksum, and restore what differs.

        Raises:
            SnapshotError: the root cannot be read, or a file of it is damaged or just gone.
            OnlineStoreError: nothing can be written here.
            ConflictError: another project's rows are served here.
        """
        if not self.is_one:
            return False
        with self._lock:
            try:
                return self._follow(again)
            except (SnapshotError, UnreadableError):
                # of the object store, which says where
                raise
            except FileNotFoundError as exc:
                raise SnapshotError(
                    f"{exc.filename}, which {LIVE_FILES} names, is not there: unless a newer"
                    f" publishing takes its place at once, precompute publish {self._store.name}"
                    " --reload"
                ) from exc
            except (OSError, ValueError) as exc:
                shown = self._store.storage.shown(self._path)
                raise SnapshotError(
                    f"{shown} cannot be followed: {exc}: precompute publish {self._store.name}"
                ) from exc

    @property
    def is_busy(self) -> bool:
        """Whether another thread follows the root now."""
        return self._lock.locked()

    def _follow(self, again: bool) -> bool:
        served, current = self._live_files(), self._current()
        if served is None:
            if current is not None and self._has_ended(current):
                self._online.forget(self._store.name)
                self._path.unlink(missing_ok=True)
            return False
        pointer, _ = _read(sealed(served), self._path)
        # before any file of another project's takes the place of one that is served
        check_taken(current, pointer)
        moves = current is None or (current.epoch, current.renewed_at_us) < (
            pointer.epoch,
            pointer.renewed_at_us,
        )
        if not moves and (not again or current is None or current.epoch != pointer.epoch):
            return False
        self._ensure_files(served, again)
        if moves:
            self._online.flip(pointer)
            make_folder(self._path.parent)
            replace_undurably(self._path, sealed(served))
            self._forget_all_but(pointer, current)
            log.info("view %r: snapshot %d is served", self._store.name, pointer.snapshot)
        return moves

    def _has_ended(self, current: Pointer) -> bool:
        """Whether the view that is served here was dropped; where another root's is served, or the
        first publishing was stopped before readers could know of it, it was not."""
        root = self._store.offline.root
        return current.owner == known_identity(root) and self._store.log.readable_live() is None

    def _ensure_files(self, served: _LiveFiles, again: bool) -> None:
        """Have the files here: fetch those that are missing or differ. Each is compared with its
        checksum now, or was when it was first served."""
        storage, compared = self._store.storage, set[_ServedFile]()
        with contextlib.suppress(OSError, ValueError):
            compared.update(
                () if again else read_record(_LiveFiles, self._path.read_bytes(), self._path).files
            )
        files = {
            File(self._store.folder / file.path, file.size_bytes, file.sha256): file in compared
            for file in served.files
        }
        wrong = [
            file
            for file, known in files.items()
            if file.path.is_file() and not known and sha256_of(file.path) != file.sha256
        ]
        try:
            storage.fetch(wrong, again=True)
            storage.fetch([*files])
        except OSError:
            raise
        except SnapshotError as exc:
            raise SnapshotError(
                f"{exc}: precompute publish {self._store.name} --reload sends it again"
            ) from exc
        restored = {file.path for file in wrong}
        assert isinstance(self._online, TableStore)
        for file, known in files.items():
            if file.path.suffix == ".table":
                own = self._online.folder / self._store.name / file.path.name
                if not _linked(file.path, own) and not known and sha256_of(own) != file.sha256:
                    # on another file system
                    restore(own, file.path)
                    restored.add(file.path)
        for path in sorted(restored):
            log.warning(
                "view %r: %s was damaged here, and fetched again",
                self._store.name,
                path.relative_to(self._store.folder),
            )

    def _live_files(self) -> _LiveFiles | None:
        try:
            return read_record(_LiveFiles, self._store.storage.read(self._path), self._path)
        except FileNotFoundError:
            return None

    def _current(self) -> Pointer | None:
        try:
            return self._online.live(self._store.name)
        except DamagedPointerError as exc:
            log.warning("%s; it is fetched again", exc)
            return None

    def _forget_all_but(self, pointer: Pointer, before: Pointer | None) -> None:
        """Remove what a request that began before the flip does not read either; what is of a later
        segment is on its way."""
        name, folder = self._store.name, self._store.folder / "online"
        each = [pointer] if before is None else [pointer, before]
        keep = {name for one in each for name in (*one.segments, *one.indexes)}
        for segment in _removable([s.name for s in self._online.segments(name)], keep):
            with contextlib.suppress(OnlineStoreError):
                self._online.drop(name, segment)
        for segment in _removable([path.stem for path in folder.glob("*.table")], keep):
            (folder / f"{segment}.table").unlink(missing_ok=True)
        indexes = [path.name for path in self._store.indexes.glob("*")]
        for index in _removable(filter(is_index, indexes), keep):
            shutil.rmtree(self._store.index_folder(index), ignore_errors=True)


def _read(data: bytes, path: Path) -> tuple[Pointer, _LiveFiles]:
    served = read_record(_LiveFiles, data, path)
    return Pointer.from_bytes(served.pointer.encode(), where=path), served


def _removable(names: Iterable[str], keep: Collection[str]) -> list[str]:
    """Those of some names that are none to be kept, of no later segment, and no index of another
    format, which is another version's."""
    newest = max(map(number_of, keep), default=0)
    return [
        name
        for name in names
        if name not in keep
        and not ((is_segment(name) or is_index(name)) and number_of(name) > newest)
        and not is_index(name, other=True)
    ]


def _of(path: str) -> str:
    """The segment that a file is of, by its path from the view's folder."""
    return _stem(path.split("/")[1])


def _stem(name: str) -> str:
    return name.removesuffix(".table")


def _linked(path: Path, other: Path) -> bool:
    """Link a file under another name too, or copy it where they lie on two file systems; False
    where there is one of that name and size, which may be another."""
    if other.exists() and other.stat().st_size == path.stat().st_size:
        return path.samefile(other)
    make_folder(other.parent)
    temporary = other.with_name(f".{other.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    temporary.replace(other)
    return True


class Follower:
    """Follows the root for all views, in a thread of its own, until :meth:`stop`, and notes for
    each that it does.

    Args:
        offline: the root.
        online: opens the online store.
        names: of the views.
    """

    def __init__(
        self, offline: OfflineStore, online: Callable[[], OnlineStore], names: Sequence[str]
    ) -> None:
        self._stop = threading.Event()
        self._offline, self._online = offline, online()
        self._views = {
            name: _Followed(replica, offline.view(name).leases)
            for name in names
            if (replica := Replica(offline.view(name), self._online)).is_one
        }
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    @property
    def restore_files(self) -> Callable[[str], None] | None:
        """Restores what a view serves here from the root, where it differs, as
        :meth:`Replica.follow` does; None where nothing is followed."""
        return self._restore_files if self._views else None

    def _restore_files(self, name: str) -> None:
        self._views[name].replica.follow(again=True)

    def stop(self) -> None:
        """End it; a file that is being fetched is fetched first."""
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        root, pool = self._offline.root, ThreadPoolExecutor(AT_ONCE)
        with contextlib.closing(self._online), pool:
            while self._views and not self._stop.is_set():
                try:
                    told = _told(root)
                except Exception as exc:
                    for view in self._views.values():
                        view.note(exc)
                else:
                    due = [view for view in self._views.values() if view.is_due(told)]
                    list(pool.map(_Followed.follow, due, repeat(told)))
                self._stop.wait(POLL_S)


class _Followed:
    """One view of a :class:`Follower`: what it was told of when it was followed last, and what is
    noted of that."""

    def __init__(self, replica: Replica, notes: Path) -> None:
        self.replica, self._notes, self._name = replica, notes, notes.parent.name
        self._known = read_followed(notes) or Followed(time.time_ns() // 1000)
        self._told: tuple[int, str] | None = None
        self._followed_s = self._noted_s = self._warned_s = -math.inf

    def is_due(self, told: Mapping[str, tuple[int, str]]) -> bool:
        """Whether to look at its pointer; else it is noted that nothing was published."""
        if self.replica.is_busy:
            return False
        due = (
            self._known.why != ""
            or told.get(self._name) != self._told
            or time.monotonic() > self._followed_s + ALL_S
        )
        if not due:
            self.note(None)
        return due

    def follow(self, told: Mapping[str, tuple[int, str]]) -> None:
        """Serve what the root says. That one view cannot be followed is no reason to leave the
        others behind."""
        try:
            self.replica.follow()
        except Exception as exc:
            self.note(exc)
        else:
            self._told, self._followed_s = told.get(self._name), time.monotonic()
            self.note(None)

    def note(self, exc: Exception | None) -> None:
        """Note that it is served as the root says, or why not."""
        before, now_us, now_s = self._known, time.time_ns() // 1000, time.monotonic()
        self._known = Followed(now_us) if exc is None else Followed(before.at_us, str(exc))
        if exc is not None:
            self._warn(exc)
        elif self._warned_s > -math.inf:
            self._warned_s = -math.inf
            log.info("view %r: the root answers again: what is live is served", self._name)
        if self._known.why != before.why or now_s > self._noted_s + NOTED_S:
            self._noted_s = now_s
            write_followed(self._notes, self._known)

    def _warn(self, exc: Exception) -> None:
        """Say so once in :data:`WARNED_S`; what is no error of ours comes with where it was raised,
        and does not end the thread either: it would not be seen that a replica stands still."""
        now_s = time.monotonic()
        if now_s < self._warned_s + WARNED_S:
            return
        self._warned_s = now_s
        log.warning(
            "view %r: behind the root for %s: %s. What was live then is served, each row with its"
            " own age",
            self._name,
            duration(max(0.0, time.time() - self._known.at_us / 1e6)),
            exc,
            exc_info=None if isinstance(exc, PrecomputeError) else exc,
        )
