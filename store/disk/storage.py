"""Storage: where the records and files of a root lie, the few things that are done to them, and the
identity of a root.

A path names each of them, elsewhere too: a folder that is **mounted** is the local cache of a root
there, laid out alike. What is done to a path is done by the storage that it lies in.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import (
    create_once,
    disk_message,
    limit_of,
    locked,
    make_folder,
    replace_durably,
    replace_undurably,
)
from precompute.store.disk.record import Record, read_record, sealed
from precompute.store.errors import SnapshotError, UnreadableError

log = logging.getLogger(__name__)

_R = TypeVar("_R")

OBJECT_STORES = ("s3", "gs", "az")
"""Schemes of the URLs of sources in object stores."""

LOCK = ".lock"
"""The file in a folder by which a local update of a record there excludes others."""


class Item(NamedTuple):
    """One file of a listing; ``modified_ns`` is when it last changed, ns since 1970 by the clock of
    the storage. The path is made where it is needed: of thousands that takes longer than listing
    them."""

    folder: Path
    name: str
    size_bytes: int
    modified_ns: int

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.folder / self.name


class File(NamedTuple):
    """An immutable file that a manifest names: its size and SHA-256 (hex)."""

    path: Path
    size_bytes: int
    sha256: str


class FileCheck(NamedTuple):
    """A file by its path, of so many bytes; ``damage`` reads it and says what differs from its
    checksums, None where nothing does. ``segment`` is the name of the one whose rows it has."""

    path: str
    size_bytes: int
    damage: Callable[[], str | None]
    segment: str | None = None


class StorageError(UnreadableError, OSError):
    """What a root lies in does not give a file or a listing now, or gave no answer to a write:
    nothing is known of it. ``strerror`` is the message."""

    def __str__(self) -> str:
        return self.strerror or str(self.args[0])


def no_answer(path: Path, exc: OSError) -> StorageError:
    """The error for what a file system refuses to read, or to list, of a path that may be there."""
    why = limit_of(exc) or exc.strerror or exc
    return StorageError(exc.errno or errno.EIO, f"{path} cannot be read: {why}", str(path))


class Storage(Protocol):
    """What a root needs of the file system, or whatever else, that it lies in. What reads or lists
    raises :class:`StorageError` where no answer came; what writes may raise an OSError whose
    ``strerror`` says what failed. Folders come into being by what is written there."""

    @property
    def local(self) -> bool:
        """Whether all lies where its path says, on this host: a look takes no request, a file has
        not to be sent or fetched, and a lock ends with the process that held it."""

    def read(self, path: Path, *, immutable: bool = False) -> bytes:
        """A record, whole; ``immutable`` where it is created once and never changed.

        Raises:
            FileNotFoundError: there is none.
        """

    def read_ahead(self, folder: Path) -> None:
        """Have the immutable records of a folder at hand, most of which are about to be read:
        requested side by side."""

    def afresh(self, folder: Path) -> None:
        """Have what is read next of a view's folder be what lies there now, also within a look."""

    def look(
        self, root: Path, folders: Collection[Path] | None = None
    ) -> AbstractContextManager[None]:
        """While it lasts, what lies in the root's folder and in these folders of views, all by
        default, is read by this thread as it was at its beginning, but for their data: by few
        requests, however many records there are. What it writes meanwhile is seen."""
        ...

    def create(self, path: Path, data: bytes, *, point: str | None = None) -> None:
        """Create a record, durably and exactly once.

        Args:
            path: of the record.
            data: its bytes; where two writers' might be equal, neither minds who wrote them.
            point: prefix of the crash points ``<point>.write``, ``.link`` and ``.dirsync``.

        Raises:
            FileExistsError: another process created it.
        """

    def update(
        self,
        path: Path,
        change: Callable[[bytes | None], bytes],
        *,
        durably: bool = True,
    ) -> None:
        """Compare and swap: what ``change`` makes of a record takes its place, unless another
        writer changed that meanwhile; then ``change`` is called again, with what is there now.

        Args:
            path: of the record.
            change: given its bytes, None where there is none; returns those to be. What it raises
                leaves the record as it was.
            durably: False lets a loss of power lose the change.
        """

    def write(self, path: Path, data: bytes) -> None:
        """Replace a record that has one writer, durably: readers see the old or the new bytes."""

    def delete(self, path: Path) -> None:
        """Remove a record or file; one that is not there is no error."""

    def delete_all(self, folder: Path) -> None:
        """Remove a folder with all that is in it; one that is not there is no error."""

    def names(self, folder: Path) -> list[str]:
        """Names of the files and folders in a folder, in no order; none where there is no
        folder."""

    def items(self, folder: Path) -> list[Item]:
        """The files in a folder, not those in folders below it."""

    def stat(self, path: Path) -> Item | None:
        """What is known of a file; None where there is none."""

    def changed_ns(self, folder: Path) -> int | None:
        """When a file in a folder was last created, replaced or removed, ns since 1970; None where
        there is no folder."""

    def now_s(self, folder: Path) -> float:
        """Seconds since 1970 by the clock that ``modified_ns`` of the files there is by, which may
        be another host's.

        Raises:
            OSError: nothing can be written there, by which it is learnt.
        """
        ...

    def size_bytes(self, folder: Path) -> int:
        """What the files in a folder, and below it, take."""

    def shown(self, path: Path) -> str:
        """Where it lies, for people."""

    def check_writable(self, root: Path) -> None:
        """Raises:
        PrecomputeError: no root can be written there.
        OSError: likewise.
        """

    def put(self, paths: Sequence[Path]) -> None:
        """Make files that were written here, under names of their own, there for all."""

    def fetch(self, files: Iterable[File], *, again: bool = False) -> bool:
        """Have files here that may lie elsewhere, each compared with its checksum.

        Args:
            files: that are wanted, those only that are missing here or have another size.
            again: though they are here: their bytes were found to differ. One that is here is
                restored in place, so that who has it open reads the right ones.

        Returns:
            whether they may lie elsewhere at all.
        """

    def append(self, path: Path, line: bytes, *, first: bool = False) -> None:
        """Add a line to a log that has one writer; durably, but for the ``first``."""

    def appended(self, path: Path, *, first: bool = False) -> bytes:
        """The lines of a log, or the ``first`` alone; the last may be torn.

        Raises:
            FileNotFoundError: there is none.
        """

    def logs(self, folder: Path, name: str) -> list[Item]:
        """The logs of a name in the folders of a folder, by path."""

    def end_log(self, path: Path) -> None:
        """Remove a log."""


class LocalStorage:
    """A file system: flock(2), link(2), rename(2) and fsync(2)."""

    local = True

    def read(self, path: Path, *, immutable: bool = False) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise no_answer(path, exc) from exc

    def read_ahead(self, folder: Path) -> None:
        """They are here."""

    def afresh(self, folder: Path) -> None:
        """It always is."""

    def look(
        self, root: Path, folders: Collection[Path] | None = None
    ) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def create(self, path: Path, data: bytes, *, point: str | None = None) -> None:
        try:
            make_folder(path.parent)
        except FileExistsError as exc:
            # a file is in the way of the folder, and the record was not created
            raise NotADirectoryError(exc.errno, exc.strerror, exc.filename) from exc
        temporary = path.with_name(f".{path.stem}.{os.getpid()}-{threading.get_ident()}.tmp")
        create_once(path, data, temporary, point=point)

    def update(
        self,
        path: Path,
        change: Callable[[bytes | None], bytes],
        *,
        durably: bool = True,
    ) -> None:
        make_folder(path.parent)
        with locked(path.parent / LOCK):
            try:
                before = path.read_bytes()
            except FileNotFoundError:
                before = None
            data = change(before)
            if data != before:
                if durably:
                    replace_durably(path, data)
                elif before and data.startswith(before):
                    # what was durable stays so: a loss of power takes no more than what is new
                    with path.open("ab") as file:
                        file.write(data[len(before) :])
                else:
                    replace_undurably(path, data)

    def write(self, path: Path, data: bytes) -> None:
        make_folder(path.parent)
        replace_durably(path, data)

    def delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def delete_all(self, folder: Path) -> None:
        if folder.is_dir():
            shutil.rmtree(folder)

    def names(self, folder: Path) -> list[str]:
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as exc:
            raise no_answer(folder, exc) from exc

    def items(self, folder: Path) -> list[Item]:
        found = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        if entry.is_file():
                            stat = entry.stat()
                            found.append(Item(folder, entry.name, stat.st_size, stat.st_mtime_ns))
                    except FileNotFoundError:
                        # removed meanwhile
                        continue
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as exc:
            raise no_answer(folder, exc) from exc
        return found

    def stat(self, path: Path) -> Item | None:
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            raise no_answer(path, exc) from exc
        return Item(path.parent, path.name, stat.st_size, stat.st_mtime_ns)

    def changed_ns(self, folder: Path) -> int | None:
        try:
            return folder.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise no_answer(folder, exc) from exc

    def now_s(self, folder: Path) -> float:
        import tempfile

        there = next(folder for folder in (folder, *folder.parents) if folder.exists())
        # a file without a name leaves nothing behind
        with tempfile.TemporaryFile(dir=there) as file:
            return os.fstat(file.fileno()).st_mtime

    def size_bytes(self, folder: Path) -> int:
        total = 0
        for below, _, names in os.walk(folder):
            for name in names:
                # else removed meanwhile
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(f"{below}/{name}").st_size
        return total

    def shown(self, path: Path) -> str:
        return str(path)

    def check_writable(self, root: Path) -> None:
        self.now_s(root)

    def put(self, paths: Sequence[Path]) -> None:
        """They are there."""

    def fetch(self, files: Iterable[File], *, again: bool = False) -> bool:
        return False

    def append(self, path: Path, line: bytes, *, first: bool = False) -> None:
        if first:
            make_folder(path.parent)
        with path.open("ab") as file:
            file.write(line)
            if not first:
                file.flush()
                crashpoint("journal.append", path)
                os.fsync(file.fileno())

    def appended(self, path: Path, *, first: bool = False) -> bytes:
        return self.read(path)

    def logs(self, folder: Path, name: str) -> list[Item]:
        # a glob, with a Path for each of a thousand folders, takes ten times as long
        found = []
        for below in sorted(self.names(folder)):
            try:
                stat = os.stat(f"{folder}/{below}/{name}")
                found.append(Item(folder / below, name, stat.st_size, stat.st_mtime_ns))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as exc:
                raise no_answer(folder / below / name, exc) from exc
        return found

    def end_log(self, path: Path) -> None:
        path.unlink(missing_ok=True)


LOCAL = LocalStorage()

_mounted: dict[Path, Storage] = {}


def mount(folder: Path, storage: Storage) -> None:
    """Have what lies in a folder, an absolute one, be a storage's from now on."""
    _mounted[folder] = storage


def unmount_all() -> None:
    """End each :func:`mount`."""
    _mounted.clear()


def is_mounted(folder: Path) -> bool:
    """Whether :func:`mount` was given a folder."""
    return folder in _mounted


def storage_of(path: Path) -> Storage:
    """The storage that a path lies in."""
    for folder, storage in _mounted.items():
        if path.is_relative_to(folder):
            return storage
    return LOCAL


def read_record_file(kind: type[_R], path: Path, remedy: str) -> _R | None:
    """The record in a file; None when there is no file.

    Args:
        kind: of the record.
        path: of the file.
        remedy: what to do where it is damaged, as the end of a sentence.

    Raises:
        SnapshotError: it is damaged.
        UnreadableError: it cannot be read now, or is of another format.
    """
    try:
        return read_record(kind, storage_of(path).read(path), path)
    except FileNotFoundError:
        return None
    except ValueError as exc:
        raise SnapshotError(f"{path} is damaged ({exc}); {remedy}") from exc


# ---- Identity: the random name of a folder of ours, such as a root, which stays when it is moved.


IDENTITIES = (".identity.json", ".identity-copy.json")
"""Two, so that one bit takes no folder's name: without it, all that it publishes would be somebody
else's."""
_REMEDY = "remove it to give the store a new one, and publish each view once with --take-over"


class _Identity(Record, frozen=True):
    id: str


def known_identity(folder: Path) -> str:
    """As :func:`identity_of`; empty where none was given yet. Writes nothing.

    Raises:
        SnapshotError: it is damaged.
        UnreadableError: it cannot be read now.
    """
    damage: SnapshotError | None = None
    for name in IDENTITIES:
        try:
            known = read_record_file(_Identity, folder / name, _REMEDY)
        except SnapshotError as exc:
            log.warning("%s", exc)
            damage = exc
        else:
            if known is not None:
                return known.id
    if damage is not None:
        raise damage
    return ""


def identity_of(folder: Path) -> str:
    """The folder's name of its own, 12 hex digits; made on first use.

    Raises:
        SnapshotError: it is damaged, or the file system failed.
    """
    known, storage = known_identity(folder), storage_of(folder)
    for name in IDENTITIES:
        if not known or storage.stat(folder / name) is None:
            try:
                with contextlib.suppress(FileExistsError):
                    storage.create(folder / name, sealed(_Identity(known or uuid.uuid4().hex[:12])))
            except OSError as exc:
                raise SnapshotError(disk_message(folder / name, exc)) from exc
            known = known_identity(folder)
    return known
