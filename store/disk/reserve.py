"""Reserve: space set aside on the root's file system, so that freeing space and going back still work once the disk is full.

    <root>/.reserve      1 MiB of noise: what commands that free space or go back may write their few small files into

Their leases, marks, pointers and reports take some tens of kilobytes. Noise, since a file system that compresses must set it aside too.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from store.disk.durable_file import relieved, replace_durably

log = logging.getLogger(__name__)

SIZE_BYTES = 2**20
_SPARE = 4
"""Times its size that must be free before it is set aside: it is not to be what fills the disk."""


def keep_reserve(root: Path) -> None:
    """Set it aside, if it is not and there is room; that it cannot be is no error.

    Args:
        root: the offline store's; nothing is done while there is none.
    """
    path = _path(root)
    with contextlib.suppress(OSError):
        if root.is_dir() and not _is_whole(path) and _free_bytes(root) >= _SPARE * SIZE_BYTES:
            replace_durably(path, os.urandom(SIZE_BYTES))


@contextlib.contextmanager
def spending_reserve(root: Path) -> Iterator[None]:
    """Within, the reserve is given up if the disk is full, now or at a write that finds no space; at the end it is set aside again if there is room."""
    with contextlib.suppress(OSError):
        if _free_bytes(root) < SIZE_BYTES:
            _give_up(root)
    try:
        with relieved(lambda: _give_up(root)):
            yield
    finally:
        keep_reserve(root)


def _give_up(root: Path) -> bool:
    """Whether there was something to give up."""
    try:
        _path(root).unlink()
    except OSError:
        return False
    log.warning("no space left on the disk of %s: its reserve is given up for this command", root)
    return True


def _path(root: Path) -> Path:
    return root / ".reserve"


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == SIZE_BYTES


def _free_bytes(root: Path) -> int:
    stat = os.statvfs(root)
    return stat.f_bavail * stat.f_frsize
