"""Power loss, played: a disk that keeps what was synced and, of the rest, only what it likes.

POSIX promises the bytes of a file after fsync(2) of that file, and the names in a folder after
fsync(2) of that folder; the rest may be there or not, in any order. :func:`recorded` notes what
each fsync makes safe while something runs, and just before each of them, and at the end, it takes
the tree that each of :data:`DISKS` would hold if the power failed then.

All syncing goes through :func:`os.fsync`: LMDB writes with ``sync=False``, FAISS and Arrow do not
sync, and what they wrote is synced by its name.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from types import FrameType

import pytest

from precompute.store.disk import crashpoint
from tests import REPOSITORY

NOBODY = 2**22 + 1
"""Number of no process, above what Linux gives out: whoever wrote an image is gone when it is
looked at."""

Tree = dict[str, bytes | None]
"""Path below the folder → bytes of a file, None for a folder."""


def _points(path: str) -> bool:
    """Whether a name is one that others are found by: manifests, marks, pointers, reports."""
    return path.endswith("/live.json") or not {"manifests", "log", "notes", "runs"}.isdisjoint(
        PurePosixPath(path).parts
    )


DISKS: dict[str, Callable[[str], bool]] = {
    "lazy": lambda path: False,
    "names": lambda path: True,
    "pointers": _points,
    "data": lambda path: not _points(path),
}
"""Which names are on the disk before anybody synced their folder: none; all; those that point, and
not what they point to; and the other way round. Unsynced bytes are missing with ``lazy``, zeros
with the others: a file then has its right size all the same."""


PROMISES = frozenset(
    {"manifest.link", "manifest.dirsync", "log.link", "log.dirsync", "online.flip"}
)
"""Crash points at which more is promised than before: images that differ in nothing else are looked
at once."""


@dataclass(frozen=True)
class Image:
    """What a disk holds if the power fails at one moment of a run.

    Args:
        disk: one of :data:`DISKS`, the first that holds just this.
        tree: what is there.
        passed: those of :data:`PROMISES` that were passed by then.
        chunks: lines of the journal whose sync had returned.
        done: whether it is of the time after the end.
    """

    disk: str = field(compare=False)
    tree: Tree
    passed: frozenset[str]
    chunks: int
    done: bool

    def restore(self, folder: Path) -> None:
        """Make this the content of ``folder``, which is gone if it was never synced into the one
        above."""
        shutil.rmtree(folder, ignore_errors=True)
        for path, data in self.tree.items():
            if data is None:
                (folder / path).mkdir(parents=True, exist_ok=True)
            else:
                (folder / path).write_bytes(data)


@dataclass(frozen=True)
class Site:
    """A call in the project's sources that syncs."""

    name: str
    file: str
    first_line: int
    last_line: int

    def is_on_the_stack(self) -> bool:
        """Whether it is being executed by this thread."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if (
                frame.f_code.co_filename == self.file
                and self.first_line <= frame.f_lineno <= self.last_line
            ):
                return True
            frame = frame.f_back
        return False


@cache
def sites() -> dict[str, Site]:
    """Every call that syncs a file or a folder of the stores, as ``store/offline/gc.py _remove
    sync_folder``, numbered where there are several."""
    found: dict[str, Site] = {}
    for room in ("store", "jobs"):
        for path in sorted((REPOSITORY / "precompute" / room).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            # every process that collects tests does this: 0.9 s of CPU for all files, 0.1 for these
            if not re.search(r"\b(?:fsync|fdatasync|sync_file|sync_folder)\(", text):
                continue
            module = ast.parse(text)
            for function in ast.walk(module):
                if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                for node in ast.walk(function):
                    if not isinstance(node, ast.Call):
                        continue
                    called = ast.unparse(node.func)
                    if called in ("os.fsync", "os.fdatasync", "sync_file", "sync_folder"):
                        name = f"{path.relative_to(REPOSITORY / 'precompute')} {function.name} {called}"
                        if name in found:
                            name += f" {sum(known.startswith(name) for known in found) + 1}"
                        found[name] = Site(
                            name, str(path), node.lineno, node.end_lineno or node.lineno
                        )
    return found


@dataclass
class _Disk:
    """What of the tree below ``folder`` is safe, by inode number: ``names`` of folders, ``data`` of
    files."""

    folder: Path
    forgets: Callable[[], bool]
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)
    chunks: int = 0
    images: list[Image] = field(default_factory=list)
    _held: list[int] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._hold(self.folder.parent)
        self.names[self.folder.parent.stat().st_ino] = (
            {self.folder.name: self.folder.stat().st_ino} if self.folder.exists() else {}
        )
        for path in [self.folder, *self.folder.rglob("*")] if self.folder.exists() else []:
            self._hold(path)
            self._keep(path.stat(), path)

    def _hold(self, path: Path) -> None:
        self._held.append(
            os.open(path, os.O_PATH)
        )  # so that its inode number is given to no other file

    def _keep(self, status: os.stat_result, path: Path) -> None:
        if stat.S_ISDIR(status.st_mode):
            self.names[status.st_ino] = {
                name: (path / name).lstat().st_ino for name in os.listdir(path)
            }
        else:
            self.data[status.st_ino] = path.read_bytes()

    def sync(self, descriptor: int, really: Callable[[int], None]) -> None:
        """fsync(2): first the power might fail."""
        with self._lock:
            self.take()
            really(descriptor)
            if not self.forgets():
                path = Path(f"/proc/self/fd/{descriptor}")
                self._hold(path)
                self._keep(os.fstat(descriptor), path.resolve() if path.is_dir() else path)
            self.chunks += sys._getframe(2).f_code.co_qualname == "LocalStorage.append"

    def take(self, *, done: bool = False) -> None:
        """Take what each disk holds now."""
        armed = crashpoint._armed
        passed = PROMISES & (set() if armed is None else armed.hits.keys())
        for disk, survives in DISKS.items():
            image = Image(
                disk, self._tree(survives, zeros=disk != "lazy"), passed, self.chunks, done
            )
            if image not in self.images:
                self.images.append(image)

    def _tree(self, survives: Callable[[str], bool], *, zeros: bool) -> Tree:
        there = {
            path.lstat().st_ino: path
            for path in [self.folder.parent, self.folder, *self.folder.rglob("*")]
            if path.exists()
        }
        tree: Tree = {}

        def folder(number: int, at: str) -> None:
            safe = self.names.get(number, {})
            now = (
                {path.name: path.lstat().st_ino for path in there[number].iterdir()}
                if number in there
                else {}
            )
            for name in sorted(safe | now):
                path = f"{at}/{name}".lstrip("/")
                child = (now if survives(path) else safe).get(name)
                if child is None or (number == top and name != self.folder.name):
                    continue
                if child in self.names or (child in there and there[child].is_dir()):
                    tree[path] = None
                    folder(child, path)
                else:
                    size = there[child].stat().st_size if child in there else 0
                    data = self.data.get(child, b"")
                    tree[path] = data.ljust(size, b"\0") if zeros else data

        top = self.folder.parent.stat().st_ino
        folder(top, "")
        return {path.partition("/")[2]: data for path, data in tree.items()}

    def close(self) -> None:
        """Let go of the inode numbers."""
        for descriptor in self._held:
            os.close(descriptor)


@contextlib.contextmanager
def recorded(folder: Path, forgets: Callable[[], bool] = lambda: False) -> Iterator[list[Image]]:
    """Play power loss for what this process does to ``folder`` meanwhile; all that is in it before
    counts as synced.

    Args:
        folder: of the stores.
        forgets: asked within each sync whether the disk, untruly, does nothing.

    Yields:
        the images, the oldest first; the last ones are of the time after the end.
    """
    disk, really = _Disk(folder, forgets), os.fsync
    crashpoint.arm("")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: disk.sync(descriptor, really))
            patch.setattr(os, "getpid", lambda: NOBODY)
            yield disk.images
            disk.take(done=True)
    finally:
        crashpoint.disarm()
        disk.close()
