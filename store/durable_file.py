"""Durable files: written whole or not at all, under a lock, with the folder synced too."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from store.errors import ConflictError

NO_SPACE = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
"""A full disk, RLIMIT_FSIZE and a quota say the same thing with three numbers."""


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync ``path``; not atomic by itself, see :func:`replace_durably`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: a reader sees the old or the new bytes, also after a crash or power loss."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_durably(temporary, data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """fsync the folder: without it a rename or link may vanish at power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """fsync a file somebody else wrote."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def locked(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Hold an exclusive flock(2) on ``path``; the kernel lets go when the process dies, however it dies.

    Args:
        path: the lock file, created when missing.
        busy: with a message, do not wait but raise it.

    Raises:
        ConflictError: ``busy`` is given and somebody holds the lock.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
        except BlockingIOError as exc:
            raise ConflictError(busy) from exc
        yield


def disk_message(path: Path, exc: OSError, state: str = "the live snapshot is untouched") -> str:
    """What happened to ``path`` and what state that leaves, for the operator."""
    if exc.errno in NO_SPACE:
        return f"no space left while writing {path}; free some and run again ({state})"
    return f"cannot write {path}: {exc.strerror or exc} ({state})"
