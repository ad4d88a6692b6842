"""Table files: one generation's rows in one immutable file, mapped once, shared by all processes; :class:`TableFile` opens and checks one."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from precompute.store.disk.durable_file import limit_of
from precompute.store.errors import OnlineStoreError
from precompute.store.online.kernels import LINE_BYTES, LINE_SLOTS, Layout, Records, hash_of
from precompute.store.online.packed import U1, U8, Packed

FORMAT_VERSION = 1

MAGIC = b"pretable"

BLOCK_BYTES = 2**20
"""Of records and index there is a checksum for so many bytes each."""

_PAGE_BYTES = 4096

_HEAD = struct.Struct("<8sIIQQQQI")


_WARM_BYTES = 2**24
"""Asked for at once when a file is warmed."""


def header_of(meta: Mapping[str, Any], rows: int, records_bytes: int, home_lines: int, lines: int) -> bytes:
    """The first pages of a file: magic · format uint32 · size of the header uint32 · rows uint64 · bytes of records uint64 · home lines of
    the index uint64 · lines uint64 · size of the JSON uint32 · JSON · zeros · xxh3 of all that uint64."""
    text = json.dumps(meta, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    size = -(-(_HEAD.size + len(text) + 8) // _PAGE_BYTES) * _PAGE_BYTES
    page = _HEAD.pack(MAGIC, FORMAT_VERSION, size, rows, records_bytes, home_lines, lines, len(text)) + text
    page = page.ljust(size - 8, b"\0")
    return page + hash_of(page).to_bytes(8, "little")


def index_start(records_end: int) -> int:
    """The index begins on a line of its own."""
    return -(-records_end // LINE_BYTES) * LINE_BYTES


class TableFile:
    """An open table file, for reading. It is unmapped after the last reader let go; its file may be removed before.

        header    header_of(…)                                                              whole pages
        records   lay_out(keys, rows), in the order they were added, zeros to a multiple of 64 bytes
        index     lines of 64 bytes: seven slots uint64 (slots_of), in use from the first on; a check word (line_checks). A key's line is
                  homes(hash), or the next with room; the last line is always empty
        checksums xxh3 of each MiB of records and index, uint64, the last one shorter
        footer    xxh3 of the checksums, uint64                                             all little-endian

    A file that the system cannot read back (a bad sector) ends the process with SIGBUS, as any mapped file does.

    Raises:
        FileNotFoundError: it is not there.
        OnlineStoreError: it cannot be read, is cut short, damaged, or of another version.
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
            raise OnlineStoreError(f"cannot read {path}: {exc}; {limit_of(exc) or 'publish the view again'}") from exc
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
        _, version, size, rows, records_bytes, home_lines, lines, text_size = _HEAD.unpack_from(mapping)
        if version != FORMAT_VERSION:
            raise ValueError(f"it is of format {version}, and this version reads {FORMAT_VERSION}")
        if size % _PAGE_BYTES or not _HEAD.size + text_size + 8 <= size <= len(mapping):
            raise ValueError("its header is damaged")
        if hash_of(mapping[: size - 8]) != int.from_bytes(mapping[size - 8 : size], "little"):
            raise ValueError("its header is damaged")
        start = index_start(size + records_bytes)
        self._layout = Layout(size, size + records_bytes, start, home_lines, lines, records_bytes // max(1, rows))
        self._checks_start = start + LINE_BYTES * lines
        blocks = -(-(self._checks_start - size) // BLOCK_BYTES)
        if records_bytes % 8 or not 0 < home_lines < min(lines, 2**32) or rows > LINE_SLOTS * lines:
            raise ValueError("its header tells what cannot be")
        whole = self._checks_start + 8 * blocks + 8
        if whole != len(mapping):
            raise ValueError(f"it has {len(mapping):,} bytes, and should have {whole:,}")
        self.rows: int = rows
        meta = json.loads(mapping[_HEAD.size : _HEAD.size + text_size])
        if not isinstance(meta, dict):
            raise ValueError("its header tells what cannot be")
        self.meta: dict[str, Any] = meta

    def read(self, keys: Packed, key_hashes: U8, below: Sequence[TableFile] = ()) -> tuple[Packed, U1]:
        """As :meth:`precompute.store.online.kernels.Records.read`: what this has nothing of is looked for in those ``below``, in turn."""
        return self.records.read(keys, key_hashes, [table.records for table in below])

    def check(self) -> list[str]:
        """Read all of it, by its checksums: what is damaged, in words; nothing when it is whole. Takes as long as the disk does."""
        mapping, start, end = self._mapping, self._layout.records_start, self._checks_start
        view = memoryview(mapping)
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
        """Have the index, and then the records, read into memory before the first request asks, up to ``limit_bytes``; how many bytes were."""
        layout, left = self._layout, limit_bytes
        for start, end in ((layout.index_start, self._checks_start), (layout.records_start, layout.records_end)):
            end = min(end, start + left)
            left -= end - start
            for at in range(start, end, _WARM_BYTES):
                # not mapped as well: who publishes is not who reads, and would be as large as the file
                self._advise(mmap.MADV_WILLNEED, at, min(at + _WARM_BYTES, end))
        return limit_bytes - left

    def _advise(self, advice: int, start: int, end: int) -> None:
        start -= start % mmap.PAGESIZE
        self._mapping.madvise(advice, start, min(end, self.size_bytes) - start)
