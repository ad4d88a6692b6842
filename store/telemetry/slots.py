"""Slots: float64 numbers of one process that other processes can read while it counts, and that outlive it.

Two files: ``<process>.keys``, a line of JSON for each run of slots, and ``<process>.values``, the numbers, mapped. A process that is started
anew under the same name goes on where the one before it stopped.
"""

from __future__ import annotations

import mmap
import os
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

from precompute.store.errors import PrecomputeError
from precompute.store.record import Record, read_record, sealed

MAX_SLOTS = 1 << 17
"""Of a process: a file of 1 MiB. A series of a counter takes one, of a histogram twenty: labels come from closed sets, and views are few."""

Key = tuple[str, tuple[str, ...]]
"""A series: its instrument's name, its labels' values."""


class _Run(Record, frozen=True):
    """A line of the keys' file: a series and how many slots it has, after those of the lines before."""

    name: str
    labels: tuple[str, ...]
    size: int


class Slots:
    """The numbers of this process.

    Args:
        folder: where the files are; None keeps the numbers in this process's own memory.
        process: names the files.

    ``values`` is what is counted in: float64, at the positions that :meth:`run` gave.

    Raises:
        PrecomputeError: the files cannot be made.
    """

    def __init__(self, folder: Path | None, process: str) -> None:
        self._first: dict[Key, int] = {}
        self._used = 0
        self._keys: int | None = None
        self._map: mmap.mmap | None = None
        if folder is None:
            self.values = memoryview(bytearray(8 * MAX_SLOTS)).cast("d")
            return
        try:
            values = os.open(folder / f"{process}.values", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _allocate(values)
                self._map = mmap.mmap(values, 8 * MAX_SLOTS)
            finally:
                os.close(values)
            self._keys = os.open(folder / f"{process}.keys", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            # what a kill cut short is no line
            whole = (folder / f"{process}.keys").read_bytes().rpartition(b"\n")[0]
            os.ftruncate(self._keys, len(whole) + bool(whole))
            for run in _runs(whole):
                self._first[run.name, run.labels] = self._used
                self._used += run.size
        except OSError as exc:
            raise PrecomputeError(f"metrics cannot be kept in {folder}: {exc}") from exc
        self.values = memoryview(self._map).cast("d")

    def run(self, key: Key, size: int) -> int:
        """Where the ``size`` slots of a series begin, zeros when it is new. Beyond :data:`MAX_SLOTS` all series share the last ones, which nobody reads."""
        first = self._first.get(key)
        if first is None:
            first = self._used
            if first + size > MAX_SLOTS - 64:
                return MAX_SLOTS - 64
            if self._keys is not None:
                os.write(self._keys, sealed(_Run(*key, size)) + b"\n")
            self._first[key] = first
            self._used += size
        return first

    def series(self) -> Iterator[tuple[Key, int]]:
        """Each series, and where its slots begin."""
        yield from list(self._first.items())

    def close(self) -> None:
        """Let go of the files; they stay."""
        self.values.release()
        if self._map is not None:
            self._map.close()
        if self._keys is not None:
            os.close(self._keys)
            self._keys = None


def _allocate(file: int) -> None:
    """All of it, now: what is written to a hole of a mapped file, on a disk that is full by then, ends the process."""
    if sys.platform == "linux":
        os.posix_fallocate(file, 0, 8 * MAX_SLOTS)
    else:
        os.ftruncate(file, 8 * MAX_SLOTS)


def read_slots(folder: Path) -> Iterator[tuple[str, Key, list[float]]]:
    """(process, series, numbers) of every process that counts, or counted, in the folder.

    Raises:
        OSError: a file cannot be read.
    """
    for path in sorted(folder.glob("*.keys")):
        runs = _runs(path.read_bytes().rpartition(b"\n")[0])
        size = sum(run.size for run in runs)
        values = array("d")
        with path.with_suffix(".values").open("rb") as file:
            values.frombytes(file.read(8 * size))
        first = 0
        for run in runs:
            yield path.stem, (run.name, run.labels), values[first : first + run.size].tolist()
            first += run.size


def _runs(lines: bytes) -> list[_Run]:
    return [read_record(_Run, line) for line in lines.split(b"\n") if line]
