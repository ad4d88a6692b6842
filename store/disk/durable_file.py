"""Durable file: files written whole or not at all, created at most once, replaced under a lock,
with the folder synced too; what a local root is made of (:mod:`precompute.store.disk.storage`)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.errors import ConflictError

NO_SPACE = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
"""A full disk, RLIMIT_FSIZE and a quota say the same thing with three numbers."""

LOCK_WAIT_S = 10.0
"""A lock file guards a few small reads and writes; a process that holds it longer is stopped
or stuck."""


_relief: Callable[[], bool] | None = None


@contextlib.contextmanager
def relieved(relief: Callable[[], bool]) -> Iterator[None]:
    """Within, a write of any thread of the process that finds no space calls ``relief``, and is
    tried again if that says that it freed some."""
    global _relief
    before, _relief = _relief, relief
    try:
        yield
    finally:
        _relief = before


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync ``path``; not atomic by itself, see :func:`replace_durably`."""
    try:
        _write(path, data)
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT) or _relief is None or not _relief():
            raise
        _write(path, data)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``: what the block writes there takes its place whole, and goes
    where the block raises."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replacing_durably(path: Path) -> Iterator[Path]:
    """As :func:`replacing`, of what the block has synced: its name, too, is there after a loss of
    power."""
    with replacing(path) as temporary:
        yield temporary
    sync_folder(path.parent)


def replace_durably(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: a reader sees the old or the new bytes, also after a crash or
    power loss.

    Args:
        path: the file.
        data: its new content.
    """
    with replacing_durably(path) as temporary:
        write_durably(temporary, data)


def replace_undurably(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``, whole or not at all for readers now; a power loss may lose or
    tear it. For what can be derived again."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def create_once(path: Path, data: bytes, temporary: Path, *, point: str | None = None) -> None:
    """Create ``path`` with ``data``, durably and exactly once.

    link(2) and not rename(2): rename overwrites silently, so two writers would both believe they
    won.

    Args:
        path: the file to be.
        data: its content.
        temporary: a name of the writer's own on the same file system.
        point: prefix of the crash points ``<point>.write``, ``.link`` and ``.dirsync``.

    Raises:
        FileExistsError: another process created it.
    """
    try:
        write_durably(temporary, data)
        if point is not None:
            crashpoint(f"{point}.write", temporary)
        os.link(temporary, path)
        if point is not None:
            crashpoint(f"{point}.link")
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    if point is not None:
        crashpoint(f"{point}.dirsync")


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it that are missing, each durable by its name in the one
    above; one that is there stays.

    Raises:
        OSError: the file system failed, or a file of that name is there.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def restore(path: Path, whole: Path) -> None:
    """Make a damaged file what ``whole`` is, in place: who has it mapped reads the right bytes from
    then on. What does not differ is not written; what a loss of power takes is damage as before."""
    with whole.open("rb") as source, path.open("rb+", buffering=0) as file:
        at = 0
        while block := source.read(1 << 20):
            file.seek(at)
            same = False
            # a sector that cannot be read may be written
            with contextlib.suppress(OSError):
                same = file.read(len(block)) == block
            if not same:
                file.seek(at)
                file.write(block)
            at += len(block)


def sync_folder(folder: Path) -> None:
    """fsync the folder: without it a rename or link may vanish at power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """fsync a file that another process wrote."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def allocate(file: int, size_bytes: int) -> None:
    """Give a file that is to be mapped all of its space now: what is written to a hole, on a disk
    that is full by then, ends the process (SIGBUS).

    Raises:
        OSError: there is no space.
    """
    if sys.platform == "linux":
        os.posix_fallocate(file, 0, size_bytes)
    else:
        os.ftruncate(file, size_bytes)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive flock(2) on ``path``, created when missing; the kernel lets go when the
    process dies, however it dies. A thread that holds it may take it again.

    Raises:
        ConflictError: another process held it for :data:`LOCK_WAIT_S`.
    """
    held: set[Path] = _locked.__dict__.setdefault("paths", set())
    if path in held:
        yield
        return
    limit = time.monotonic() + LOCK_WAIT_S
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() > limit:
                    raise ConflictError(
                        f"{path} has been locked for {LOCK_WAIT_S:.0f} s, by a process that is"
                        f" stopped or stuck: find it with `fuser {path}`, continue or kill it"
                    ) from exc
                time.sleep(0.005)
        held.add(path)
        try:
            yield
        finally:
            held.discard(path)


_locked = threading.local()
"""The lock files that each thread holds."""


def limit_of(exc: BaseException) -> str | None:
    """What this process is short of, or that the disk gives no answer, and what to do, where that
    is why a file could not be read now; None where the file is at fault."""
    if isinstance(exc, MemoryError):
        return _LIMITS[errno.ENOMEM]
    if isinstance(exc, RuntimeError) and "start new thread" in str(exc):
        return _LIMITS[errno.EAGAIN]
    number = (exc.errno or 0) if isinstance(exc, OSError) else 0
    if number in _NO_ANSWER:
        return (
            f"{os.strerror(number)}: the disk gives no answer; look at it (dmesg), and try again."
            " Where it stays so, put a copy of the file in its place, or move it away: then it"
            " counts as lost"
        )
    return _LIMITS.get(number)


_LIMITS = {
    errno.EACCES: "this user may not read it: give it the right to",
    errno.EPERM: "this user may not read it: give it the right to",
    errno.EMFILE: "this process has as many files open as it may: raise its limit (ulimit -n)",
    errno.ENFILE: (
        "this machine has as many files open as it may: raise fs.file-max, or end what holds them"
    ),
    errno.ENOMEM: (
        "this process has no memory left: give it more (ulimit -v, the container's limit), or lower"
        " memory_mb"
    ),
    errno.EAGAIN: (
        "this process may have no more threads or memory: raise its limits (ulimit -u, the"
        " container's pids)"
    ),
}

_NO_ANSWER = frozenset(
    {
        errno.EIO,
        errno.ENXIO,
        errno.ENODEV,
        errno.EBUSY,
        errno.EINTR,
        errno.EBADMSG,
        errno.ENOLCK,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    }
)
"""What a disk, or a file system on a network, that fails says of any file."""


def disk_message(path: Path, exc: OSError, state: str = "the live snapshot is untouched") -> str:
    """What happened to ``path`` and what state that leaves, for the operator."""
    if exc.errno in NO_SPACE:
        return (
            f"no space left while writing {path}{_free(path) if exc.errno == errno.ENOSPC else ''};"
            f" free some and run again ({state})"
        )
    return f"cannot write {path}: {exc.strerror or exc} ({state})"


def _free(path: Path) -> str:
    """What is left now where a file was to be; nothing where that cannot be known."""
    with contextlib.suppress(OSError):
        folder = next(folder for folder in path.absolute().parents if folder.is_dir())
        left = os.statvfs(folder)
        mount = next(above for above in (folder, *folder.parents) if os.path.ismount(above))
        # some file systems count no inodes
        inodes = f" and {left.f_favail:,} inodes" if left.f_files else ""
        return f": {left.f_bavail * left.f_frsize:,} bytes{inodes} are free by now on {mount}"
    return ""


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- Reserve: space set aside on the root's file system, so that freeing space and going back
# still work once the disk is full, of bytes or of names.


log = logging.getLogger(__name__)

SIZE_BYTES = 2**20
FILES = 32
"""Files of the reserve that hold nothing but their inodes."""
_NOISE = "noise"
_SPARE = 4
"""Times its size that must be free before it is set aside: it is not to be what fills the disk."""


def keep_reserve(root: Path) -> None:
    """Set it aside, if it is not and there is room; that it cannot be is no error.

    Args:
        root: the offline store's; nothing is done while there is none.
    """
    path = _path(root)
    with contextlib.suppress(OSError):
        if root.is_dir() and not _is_whole(path) and _has_room(root, _SPARE):
            make_folder(path)
            replace_durably(path / _NOISE, os.urandom(SIZE_BYTES))
            for number in range(FILES):
                (path / str(number)).touch()


@contextlib.contextmanager
def spending_reserve(root: Path) -> Iterator[None]:
    """Within, the reserve is given up if the disk is full, now or at a write that finds no space;
    at the end it is set aside again if there is room."""
    with contextlib.suppress(OSError):
        if not _has_room(root, 1):
            _give_up(root)
    try:
        with relieved(lambda: _give_up(root)):
            yield
    finally:
        keep_reserve(root)


def _give_up(root: Path) -> bool:
    """Whether there was something to give up."""
    path = _path(root)
    if not path.is_dir():
        return False
    shutil.rmtree(path, ignore_errors=True)
    log.warning("no space left on the disk of %s: its reserve is given up for this command", root)
    return True


def _path(root: Path) -> Path:
    return root / ".reserve"


def _is_whole(path: Path) -> bool:
    noise = path / _NOISE
    return (
        noise.is_file()
        and noise.stat().st_size == SIZE_BYTES
        and len(os.listdir(path)) == 1 + FILES
    )


def _has_room(root: Path, times: int) -> bool:
    """Whether so many reserves have room; a file system that gives inodes as they are wanted counts
    none."""
    stat = os.statvfs(root)
    names = stat.f_favail >= times * FILES or not stat.f_files
    return names and stat.f_bavail * stat.f_frsize >= times * SIZE_BYTES
