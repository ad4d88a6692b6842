"""Reserve: space set aside on the root's file system, so that freeing space and going back still
work once the disk is full, of bytes or of names.

    <root>/.reserve/     1 MiB of noise, and empty files: what commands that free space or go back
    may write their few small files into

Their leases, marks, pointers and reports take some tens of kilobytes and about a dozen inodes.
Noise, since a file system that compresses must set it aside too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from precompute.store.disk.durable_file import make_folder, relieved, replace_durably

log = logging.getLogger(__name__)

SIZE_BYTES = 2**20
FILES = 32
"""That hold nothing but their inodes."""
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
