"""Stored file: a file of ours whose size and SHA-256 a record names, compared before it is parsed,
once in a process; and what goes wrong while one is parsed, as damage of that file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from precompute.store.disk.durable_file import limit_of, sha256_of
from precompute.store.disk.storage import File, no_answer, storage_of
from precompute.store.errors import PrecomputeError, SnapshotError, UnreadableError

MOST_KNOWN = 100_000
"""Files that are remembered at most; beyond, all are compared again."""
BROKEN = (
    pa.ArrowException,
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    OverflowError,
    MemoryError,
    RuntimeError,
)
"""What pyarrow and numpy raise of a file that is not what it should be, and of a process that is
short of something: :func:`limit_of` tells which."""

_Stamp = tuple[int, int, int]
"""Size in bytes, time of the last change (ns since 1970), inode."""

_known: dict[Path, tuple[File, _Stamp | None]] = {}
"""What records say of a file, and its stamp when it was last compared, None where it was not."""


def check_file(file: File, *, again: bool = False) -> None:
    """Compare a file with the size and SHA-256 that its record names; once in a process, as long as
    it is not changed. Where it lies elsewhere, it is fetched first, and once more if it differs.

    Args:
        file: its absolute path, size and SHA-256.
        again: read it whatever was compared before: what a disk loses changes no stamp.

    Raises:
        SnapshotError: it is missing, has another size, or differs.
        UnreadableError: it cannot be read now.
    """
    path, storage = file.path, storage_of(file.path)
    try:
        storage.fetch([file])
        stamp = _stamp(path)
        if not again and _known.get(path) == (file, stamp):
            return
        if stamp[0] != file.size_bytes:
            raise SnapshotError(f"{path} has {stamp[0]} bytes instead of {file.size_bytes}")
        digest = sha256_of(path)
        if digest != file.sha256 and storage.fetch([file], again=True):
            digest, stamp = sha256_of(path), _stamp(path)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise SnapshotError(f"{path} is missing") from exc
    except UnreadableError:
        raise
    except OSError as exc:
        raise no_answer(path, exc) from exc
    if digest != file.sha256:
        raise SnapshotError(
            f"{path} differs from its checksum in the manifest: the file was damaged or changed"
        )
    _remember(file, stamp)


def note_file(file: File) -> None:
    """Remember what a record says of a file that is parsed before it was compared: a part, of
    which a few rows are wanted. Where that fails, it is compared."""
    if file.path not in _known or _known[file.path][0] != file:
        _remember(file, None)


def broken(path: Path, exc: BaseException, way_out: str) -> PrecomputeError:
    """The error for a file that could not be parsed: it is damaged, and differs from its checksum
    where that is known; or this process is short of something.

    Args:
        path: of the file.
        exc: what was raised.
        way_out: what to do where it is damaged, as the end of a sentence.
    """
    limit, known = limit_of(exc), _known.get(path)
    # a damaged length may ask for more memory than there is
    if known is not None and (limit is None or isinstance(exc, MemoryError)):
        try:
            check_file(known[0], again=True)
        except SnapshotError as damage:
            return SnapshotError(f"{damage}; {way_out}")
        except UnreadableError as unreadable:
            return unreadable
    if limit is not None:
        return UnreadableError(f"{path} cannot be read ({exc}): {limit}")
    kind = "" if isinstance(exc, (pa.ArrowException, OSError)) else f"{type(exc).__name__}: "
    return SnapshotError(f"{path} cannot be read ({kind}{exc}); {way_out}")


@contextlib.contextmanager
def parsing(path: Path, way_out: str = "publish another snapshot") -> Iterator[None]:
    """Within, a file is parsed; what that raises is translated by :func:`broken`.

    Raises:
        SnapshotError: it is damaged.
        UnreadableError: it cannot be read now.
    """
    try:
        yield
    except PrecomputeError:
        raise
    except BROKEN as exc:
        raise broken(path, exc, way_out) from exc


def _stamp(path: Path) -> _Stamp:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _remember(file: File, stamp: _Stamp | None) -> None:
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known[file.path] = file, stamp
