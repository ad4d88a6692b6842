"""Table file: one segment's rows in one immutable file, mapped once and shared by all processes:
how it is written, opened and checked."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from precompute.store.disk.durable_file import disk_message, limit_of, sync_folder
from precompute.store.disk.record import FORMAT, other_format
from precompute.store.errors import OnlineStoreError
from precompute.store.online.kernels import (
    I8,
    LINE_BYTES,
    LINE_SLOTS,
    U8,
    Layout,
    Records,
    RowBatch,
    hash_of,
    homes,
    lay_out,
    line_checks,
    send,
    slots_of,
)

MAGIC = b"pretable"

BLOCK_BYTES = 2**20
"""Bytes of records or index that one checksum covers."""

_PAGE_BYTES = 4096

_HEAD = struct.Struct("<8sIIQQQQI")


_WARM_BYTES = 2**24
"""Bytes that one call reads ahead when a file is warmed."""


def header_of(
    meta: Mapping[str, Any], rows: int, records_bytes: int, home_lines: int, lines: int
) -> bytes:
    """The first pages of a file: magic · format uint32 · size of the header uint32 · rows uint64 ·
    bytes of records uint64 · home lines of the index uint64 · lines uint64 · size of the JSON
    uint32 · JSON · zeros · xxh3 of all that uint64.
    """
    text = json.dumps(meta, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    size = -(-(_HEAD.size + len(text) + 8) // _PAGE_BYTES) * _PAGE_BYTES
    page = _HEAD.pack(MAGIC, FORMAT, size, rows, records_bytes, home_lines, lines, len(text)) + text
    page = page.ljust(size - 8, b"\0")
    return page + hash_of(page).to_bytes(8, "little")


def index_start(records_end: int) -> int:
    """Where the index begins: on a line of its own."""
    return -(-records_end // LINE_BYTES) * LINE_BYTES


class TableFile:
    """An open table file, for reading. It is unmapped after its last reader is gone; its file may
    be removed before.

        header     header_of(…), whole pages
        records    lay_out(keys, rows), in the order they were added, zeros to a multiple of 64
        index      lines of 64 bytes: seven slots uint64 (slots_of), in use from the first on; a
                   check word (line_checks). A key's line is homes(hash), or the next with room;
                   the last line is always empty
        checksums  xxh3 of each MiB of records and index, uint64, the last one shorter
        footer     xxh3 of the checksums, uint64; all little-endian

    A file that the system cannot read back (a bad sector) ends the process with SIGBUS, as any
    mapped file does.

    Raises:
        FileNotFoundError: it is not there.
        OnlineStoreError: it cannot be read, is cut short, or damaged.
        OtherFormatError: it is of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as exc:
            # ValueError: it is empty
            raise OnlineStoreError(
                f"cannot read {path}: {exc}; {limit_of(exc) or 'publish the view again'}"
            ) from exc
        try:
            self._read_header(mapping)
        except (ValueError, RecursionError, struct.error) as exc:
            raise OnlineStoreError(f"cannot read {path}: {exc}; publish the view again") from exc
        self._mapping = mapping
        # each row lies on pages of its own: what would be read around it is of no use
        mapping.madvise(mmap.MADV_RANDOM)
        self.records = Records(mapping, self._layout)
        self.find = self.records.find

    def _read_header(self, mapping: mmap.mmap) -> None:
        if mapping[: len(MAGIC)] != MAGIC:
            raise ValueError("it is no table file")
        self.size_bytes = len(mapping)
        _, version, size, rows, records_bytes, home_lines, lines, text_size = _HEAD.unpack_from(
            mapping
        )
        if size % _PAGE_BYTES or not _HEAD.size + text_size + 8 <= size <= len(mapping):
            raise ValueError("its header is damaged")
        if hash_of(mapping[: size - 8]) != int.from_bytes(mapping[size - 8 : size], "little"):
            raise ValueError("its header is damaged")
        if version != FORMAT:
            raise other_format(self.path, version)
        start = index_start(size + records_bytes)
        self._layout = Layout(
            size, size + records_bytes, start, home_lines, lines, records_bytes // max(1, rows)
        )
        self._checks_start = start + LINE_BYTES * lines
        blocks = -(-(self._checks_start - size) // BLOCK_BYTES)
        if records_bytes % 8 or not 0 < home_lines < min(lines, 2**32) or rows > LINE_SLOTS * lines:
            raise ValueError("its header is not consistent")
        whole = self._checks_start + 8 * blocks + 8
        if whole != len(mapping):
            raise ValueError(f"it has {len(mapping):,} bytes, and should have {whole:,}")
        self.rows: int = rows
        meta = json.loads(mapping[_HEAD.size : _HEAD.size + text_size])
        if not isinstance(meta, dict):
            raise ValueError("its header is not consistent")
        self.meta: dict[str, Any] = meta

    def check(self) -> list[str]:
        """Read all of it, by its checksums: what is damaged, in words; nothing when it is whole.
        Takes as long as the disk does."""
        mapping, start, end = self._mapping, self._layout.records_start, self._checks_start
        view = memoryview(mapping)
        # read when it was opened, which may be long ago
        if hash_of(view[: start - 8]) != int.from_bytes(view[start - 8 : start], "little"):
            return [f"{self.path}: its header is damaged"]
        if hash_of(view[end:-8]) != int.from_bytes(view[-8:], "little"):
            return [f"{self.path}: its checksums are damaged"]
        stored: U8 = np.frombuffer(mapping, "<u8", offset=end)
        found = []
        for number, at in enumerate(range(start, end, BLOCK_BYTES)):
            if at % _WARM_BYTES < BLOCK_BYTES:
                self._advise(mmap.MADV_WILLNEED, at, at + _WARM_BYTES)
            stop = min(at + BLOCK_BYTES, end)
            if hash_of(view[at:stop]) != int(stored[number]):
                found.append(f"{self.path}: bytes {at:,} to {stop:,} are damaged")
        return found

    def warm(self, limit_bytes: int) -> int:
        """Have the index, and then the records, read into memory before the first request, up
        to ``limit_bytes``; returns how many bytes were."""
        layout, left = self._layout, limit_bytes
        for start, end in (
            (layout.index_start, self._checks_start),
            (layout.records_start, layout.records_end),
        ):
            end = min(end, start + left)
            left -= end - start
            for at in range(start, end, _WARM_BYTES):
                # not mapped as well: a publisher is no reader, and would be as large as the file
                self._advise(mmap.MADV_WILLNEED, at, min(at + _WARM_BYTES, end))
        return limit_bytes - left

    def _advise(self, advice: int, start: int, end: int) -> None:
        start -= start % mmap.PAGESIZE
        self._mapping.madvise(advice, start, min(end, self.size_bytes) - start)


HOME_ROWS = 3.5
"""Rows to a line of the index, of the seven it has room for: one key of a hundred is found in a
second line, and a row costs 18 bytes."""

_ENTRY_BYTES = 72
"""Memory for one row's hash and position: as they came, put together, their order, in order, and
some of numpy's own."""

PIECE_BYTES = 2**22
"""Rows laid out, checked and written at once, so that all of it is done in the cache."""

SENT_BYTES = 2**24
"""Bytes written after which they are sent on to the disk, so that little is left to wait for in the
end."""

_CHUNK_ROWS = 2**17
"""Rows whose lines are made at once."""

_BUCKETS = 2**12

_BUCKET_STARTS: U8 = np.arange(_BUCKETS, dtype=np.uint64) << np.uint64(52)
"""Where in the order of hashes each bucket begins."""


class TableWriter:
    """A table file on its way; used as a context manager, it leaves nothing behind when it is left
    without :meth:`finish`.

    Args:
        path: the file to be; until it is whole its name is ``.{name}.{pid}.tmp``, which a process
            that was killed leaves there.
        meta: JSON of the caller's own, stored in the header.
        memory_bytes: what hashes and positions may take; beyond, they lie in a file without a name
            beside ``path``.

    Raises, in every method: OnlineStoreError: the disk is full or failed, a key was added twice, or
        a key or row is too large.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any], memory_bytes: int) -> None:
        self._path = path
        self._meta = dict(meta)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._entries = _Entries(path.parent, max(1024, memory_bytes // _ENTRY_BYTES))
        self._checks = _BlockChecks()
        self._beside = ThreadPoolExecutor(1, "table-writer")
        self._writing: Future[None] | None = None
        self._sent = 0
        header = header_of(self._meta, 0, 0, 1, 2)
        self._start = self._end = len(header)
        with self._disk():
            self._file = self._temporary.open("wb+")
            try:
                self._file.write(header)
            except OSError:
                self.abort()
                raise

    def add(self, batch: RowBatch) -> None:
        """Write a batch's rows, in a thread beside: the next batch can be made meanwhile, and this
        one must not be changed any more."""
        self._settle()
        self._writing = self._beside.submit(self._write_rows, batch)

    def finish(self) -> int:
        """Write the index, make all of it durable, and give it its name; returns how many rows it
        has."""
        self._settle()
        rows, records_end = self._entries.rows, self._end
        lines = _Lines(max(1, -int(-rows // HOME_ROWS)))
        with self._disk():
            self._write(np.zeros(index_start(records_end) - records_end, np.uint8))
            self._file.flush()
            for hashes, positions in self._entries.in_order():
                self._refuse_repeated(hashes, positions)
                for at in range(0, len(hashes), _CHUNK_ROWS):
                    self._write(
                        lines.put(hashes[at : at + _CHUNK_ROWS], positions[at : at + _CHUNK_ROWS])
                    )
            self._write(lines.last())
            checks = self._checks.all()
            self._file.write(checks + hash_of(checks).to_bytes(8, "little"))
            self._file.seek(0)
            self._file.write(
                header_of(
                    self._meta, rows, records_end - self._start, lines.home_lines, lines.lines
                )
            )
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._temporary, self._path)
            self._file.close()
            sync_folder(self._path.parent)
        self.abort()
        return rows

    def abort(self) -> None:
        """Remove what is not finished; after :meth:`finish` there is nothing to do."""
        self._beside.shutdown()
        self._entries.close()
        if not self._file.closed:
            # what cannot be written out is not wanted either
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _settle(self) -> None:
        """Wait for the batch that is on its way, whose errors are raised here."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._disk():
                writing.result()

    def _write_rows(self, batch: RowBatch) -> None:
        step = max(1, PIECE_BYTES * len(batch) // max(1, batch.rows.size_bytes))
        for at in range(0, len(batch), step):
            stop = min(at + step, len(batch))
            try:
                records, starts = lay_out(batch.keys.slice(at, stop), batch.rows.slice(at, stop))
            except ValueError as exc:
                raise OnlineStoreError(f"{self._path}: {exc}") from exc
            self._entries.add(batch.hashes[at:stop], starts + self._end)
            self._write(records)

    def _write(self, data: npt.NDArray[Any]) -> None:
        view = memoryview(data.reshape(-1).view(np.uint8).data)
        self._file.write(view)
        self._checks.update(view)
        self._end += len(view)
        if self._end - self._sent > SENT_BYTES:
            self._file.flush()
            send(self._file.fileno(), self._sent, self._end)
            self._sent = self._end

    def _refuse_repeated(self, hashes: U8, positions: I8) -> None:
        """Equal hashes are equal keys but for once in 2**64 pairs."""
        for i in np.flatnonzero(hashes[1:] == hashes[:-1]).tolist():
            key = self._key(int(positions[i]))
            if key == self._key(int(positions[i + 1])):
                shown = key.decode(errors="backslashreplace")
                raise OnlineStoreError(
                    f"{self._path}: the key {shown!r} is there twice among the rows to load, once"
                    " is right"
                )

    def _key(self, position: int) -> bytes:
        file = self._file.fileno()
        return os.pread(
            file, int.from_bytes(os.pread(file, 2, position + 4), "little"), position + 8
        )

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise OnlineStoreError(
                disk_message(self._path, exc, "what is live is untouched")
            ) from exc


class _BlockChecks:
    """xxh3 of each MiB that is written."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._block = xxhash.xxh3_64()
        self._left = BLOCK_BYTES

    def update(self, data: memoryview) -> None:
        while len(data):
            part, data = data[: self._left], data[self._left :]
            self._block.update(part)
            self._left -= len(part)
            if not self._left:
                self._close()

    def all(self) -> bytes:
        """The blocks' checksums, uint64 each, the last block being what there is of it."""
        if self._left < BLOCK_BYTES:
            self._close()
        return np.array(self._found, "<u8").tobytes()

    def _close(self) -> None:
        self._found.append(self._block.intdigest())
        self._block.reset()
        self._left = BLOCK_BYTES


class _Run(NamedTuple):
    """Entries in order, in the spill file: hashes, then positions. ``bounds``: where each bucket
    begins, and the end, int64 [buckets + 1]."""

    offset: int
    bounds: I8


class _Entries:
    """Hashes and positions of all rows: taken in any order, given back by hash, no more than
    ``most_rows`` at once in memory.

    What does not fit goes in runs, each in order, to a file that has no name and is gone with the
    process. What all runs have of some neighbouring buckets fits again.
    """

    def __init__(self, folder: Path, most_rows: int) -> None:
        self.rows = 0
        self._folder = folder
        self._most_rows = most_rows
        self._held: list[tuple[U8, I8]] = []
        self._held_rows = 0
        self._runs: list[_Run] = []
        self._file: IO[bytes] | None = None

    def add(self, hashes: U8, positions: I8) -> None:
        self._held.append((hashes, positions))
        self._held_rows += len(hashes)
        self.rows += len(hashes)
        if self._held_rows > self._most_rows:
            self._spill()

    def in_order(self) -> Iterator[tuple[U8, I8]]:
        """All of them by ascending hash, equal ones together."""
        if not self._runs:
            yield self._sorted()
            return
        self._spill()
        sizes = np.sum([np.diff(run.bounds) for run in self._runs], axis=0)
        first = 0
        while first < _BUCKETS:
            # as many buckets as fit, at least one
            stop = first + max(
                1, int(np.searchsorted(np.cumsum(sizes[first:]), self._most_rows, side="right"))
            )
            self._held = [self._part(run, first, stop) for run in self._runs]
            yield self._sorted()
            first = stop

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _sorted(self) -> tuple[U8, I8]:
        hashes = np.concatenate([np.empty(0, np.uint64), *(h for h, _ in self._held)])
        positions = np.concatenate([np.empty(0, np.int64), *(p for _, p in self._held)])
        self._held, self._held_rows = [], 0
        order = np.argsort(hashes)
        return hashes[order], positions[order]

    def _spill(self) -> None:
        hashes, positions = self._sorted()
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # until close()
        bounds = np.append(np.searchsorted(hashes, _BUCKET_STARTS), len(hashes))
        self._runs.append(_Run(self._file.tell(), bounds))
        self._file.write(hashes.data.cast("B"))
        self._file.write(positions.data.cast("B"))
        self._file.flush()

    def _part(self, run: _Run, first: int, stop: int) -> tuple[U8, I8]:
        assert self._file is not None
        file = self._file.fileno()
        start, end = 8 * int(run.bounds[first]), 8 * int(run.bounds[stop])
        positions = run.offset + 8 * int(run.bounds[-1])
        return (
            np.frombuffer(_read(file, end - start, run.offset + start), np.uint64),
            np.frombuffer(_read(file, end - start, positions + start), np.int64),
        )


def _read(file: int, size: int, start: int) -> bytes:
    """Read so many bytes of the file, all of them: the system reads 2 GiB at once, at most."""
    parts = []
    while size and (part := os.pread(file, size, start)):
        parts.append(part)
        size, start = size - len(part), start + len(part)
    if size:
        raise OSError("what was put aside is cut short")
    return b"".join(parts)


class _Lines:
    """The lines of an index, made one after the other from entries in order: what a line has no
    room for stands in the next."""

    def __init__(self, home_lines: int) -> None:
        self.home_lines = home_lines
        self.lines = 0
        """Lines of the whole index, once :meth:`last` was called."""
        self._next_place = 0
        self._held: U8 = np.zeros(LINE_SLOTS, np.uint64)
        """Slots of the line that has room perhaps, ``_held_line``."""
        self._held_line = 0

    def put(self, hashes: U8, positions: I8) -> U8:
        """The lines that are complete with these entries, uint64 [m, 8]."""
        steps = np.arange(len(hashes))
        # the place of each is its home's first, or the one after its predecessor's
        free = homes(hashes, self.home_lines).astype(np.int64) * LINE_SLOTS - steps
        free[:1] = np.maximum(free[:1], self._next_place)
        places = np.maximum.accumulate(free) + steps
        last = int(places[-1]) // LINE_SLOTS
        lines = self._empty(last + 1)
        lines[places // LINE_SLOTS - self._held_line, places % LINE_SLOTS] = slots_of(
            hashes, positions
        )
        complete = self._checked(lines[:-1])
        self._next_place, self._held, self._held_line = (
            int(places[-1]) + 1,
            lines[-1, :LINE_SLOTS].copy(),
            last,
        )
        return complete

    def last(self) -> U8:
        """The lines that are left, and an empty one, at which every search ends."""
        self.lines = max(self.home_lines, self._held_line + 1) + 1
        return self._checked(self._empty(self.lines))

    def _empty(self, stop: int) -> U8:
        lines: U8 = np.zeros((stop - self._held_line, LINE_SLOTS + 1), np.uint64)
        lines[0, :LINE_SLOTS] = self._held
        return lines

    def _checked(self, lines: U8) -> U8:
        numbers = np.arange(self._held_line, self._held_line + len(lines), dtype=np.uint64)
        lines[:, LINE_SLOTS] = line_checks(lines[:, :LINE_SLOTS], numbers)
        return lines
