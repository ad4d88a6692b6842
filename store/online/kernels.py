"""Kernels: many byte strings in one buffer, and the steps of a bulk load and of a batch read over
many packed rows at once, by the C extension beside this file, or without it by plain Python with
equal results."""

from __future__ import annotations

import importlib
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Buffer = bytes | memoryview

U1 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Packed:
    """Byte strings one after the other: string ``i`` is ``data[offsets[i]:offsets[i + 1]]``.
    ``data`` is uint8, ``offsets`` int64 [n + 1]; the first offset need not be 0."""

    data: U1
    offsets: I8

    @classmethod
    def of(cls, strings: Sequence[Buffer]) -> Packed:
        """The strings, copied into one buffer."""
        offsets = np.zeros(len(strings) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, strings), np.int64, len(strings)), out=offsets[1:])
        return cls(np.frombuffer(b"".join(strings), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> I8:
        """Bytes of each string, int64 [n]."""
        # a tenth of np.diff's time
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def size_bytes(self) -> int:
        """Bytes of all strings together."""
        return int(self.offsets[-1] - self.offsets[0])

    def strings(self) -> Iterator[memoryview]:
        """Each string's bytes, without a copy."""
        view = memoryview(self.data.data)
        return (view[a:b] for a, b in itertools.pairwise(self.offsets.tolist()))

    def at(self, i: int) -> bytes:
        """String ``i``, copied."""
        return self.data[self.offsets[i] : self.offsets[i + 1]].tobytes()

    def slice(self, start: int, stop: int) -> Packed:
        """Strings ``start`` to ``stop``, without a copy."""
        return Packed(self.data, self.offsets[start : stop + 1])


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows on their way into an online store: ``keys`` and packed ``rows``, equally many, and the
    keys' ``hashes`` (xxh3_64, uint64 [n])."""

    keys: Packed
    rows: Packed
    hashes: U8

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.rows) == len(self.hashes):
            raise ValueError(
                f"{len(self.keys)} keys, {len(self.rows)} rows and {len(self.hashes)} hashes are no"
                " batch"
            )

    def __len__(self) -> int:
        return len(self.keys)


Rows = Iterable[RowBatch]
"""What a segment is loaded from: every key once, in any order."""


_VERSION = 6
"""Version of the interface between this file and the extension; _kernels.c has it too."""


def _extension() -> ModuleType | None:
    if os.environ.get("PRECOMPUTE_KERNELS") == "python":
        return None
    try:
        built = importlib.import_module("precompute.store.online._kernels")
    except ImportError:
        # it is built where a compiler is; without it only time is lost
        return None
    # one that was built before the sources changed is as good as none: `make setup` builds it again
    return built if getattr(built, "VERSION", 0) == _VERSION else None


native = _extension()
"""The C extension, where it runs."""

COMPILED = native is not None
"""Whether the C extension runs."""

LARGEST_KEY, LARGEST_ROW = 2**16 - 1, 2**32 - 1
"""Bytes of a key and a row, at most: what the fields of a record for their sizes can hold."""

ABSENT, FOUND, DAMAGED = 0, 1, 2
"""What reading a key came to."""

ROW_HEADER = np.dtype(
    [("checksum", "<u8"), ("computed_at", "<i8"), ("snapshot", "<u4"), ("tag", "<u4")]
)
"""The first bytes of every packed row; a tombstone has no others."""
HEADER_BYTES = ROW_HEADER.itemsize
_HEADER = struct.Struct("<QqII")

CHECKSUM_BYTES = 8
"""Size of the checksum that begins a row's header: ``hashes(rows, CHECKSUM_BYTES) ^ hashes(keys)``,
so that a row under another key does not pass."""

_PADDING = tuple(bytes(-size % 8) for size in range(8))

hash_of = xxhash.xxh3_64_intdigest
"""xxh3_64 (seed 0) of one string."""


def hashes(packed: Packed, skip: int = 0) -> U8:
    """xxh3_64 (seed 0) of each string without its first ``skip`` bytes, uint64 [n]; of a shorter
    string, that of nothing."""
    if native is None:
        return np.fromiter((hash_of(s[skip:]) for s in packed.strings()), np.uint64, len(packed))
    found = np.empty(len(packed), np.uint64)
    native.hashes(packed.data, packed.offsets, skip, found)
    return found


def pack(strings: Sequence[bytes]) -> tuple[Packed, U8]:
    """The strings in one buffer, and their hashes, uint64 [n]."""
    if native is not None:
        data, offsets, found = native.pack(strings)
        return Packed(
            np.frombuffer(data, np.uint8), np.frombuffer(offsets, np.int64)
        ), np.frombuffer(found, np.uint64)
    return Packed.of(strings), np.fromiter(map(hash_of, strings), np.uint64, len(strings))


def pack_texts(texts: Sequence[str], largest: int) -> tuple[Packed, U8, bool]:
    """As :func:`pack`, of texts in UTF-8; and whether all are keys: of 1 to ``largest`` bytes, none
    of them 0.

    Raises:
        TypeError: one is no text.
        UnicodeEncodeError: one has half a character.
    """
    if native is not None:
        data, offsets, found, keys = native.pack_texts(texts, largest)
        return (
            Packed(np.frombuffer(data, np.uint8), np.frombuffer(offsets, np.int64)),
            np.frombuffer(found, np.uint64),
            keys,
        )
    packed, found = pack(list(map(str.encode, texts)))
    sizes = packed.sizes
    return (
        packed,
        found,
        not len(texts) or bool(sizes.min() and sizes.max() <= largest and packed.data.all()),
    )


def verified(
    rows: Packed,
    key_hashes: U8,
    tag: int,
    snapshots: Collection[int],
    fixed_bytes: int,
    exact: bool,
) -> tuple[U1, I8]:
    """The state of packed rows, uint8 [n], and when those that are whole were computed, int64 [n]
    µs, 0 for the others.

    :data:`FOUND`: it is whole and under its own key, by the checksum in its header, and of the tag,
    the snapshots and the size that are expected. :data:`ABSENT`: an empty row, or a tombstone that
    is whole. :data:`DAMAGED`: any other.

    Args:
        rows: as a store returned them.
        key_hashes: ``hashes`` of the keys that they were requested by, uint64 [n].
        tag: the schema's.
        snapshots: numbers of those whose rows are read.
        fixed_bytes: size of a row, or, of one with a variable part, the least.
        exact: whether it has none.
    """
    states, computed_at = np.empty(len(rows), np.uint8), np.empty(len(rows), np.int64)
    if native is not None:
        numbers = np.fromiter(snapshots, np.uint32, len(snapshots))
        native.verified(
            rows.data,
            rows.offsets,
            key_hashes,
            tag,
            numbers,
            fixed_bytes,
            exact,
            states,
            computed_at,
        )
        return states, computed_at
    for i, (row, key_hash) in enumerate(zip(rows.strings(), key_hashes.tolist(), strict=True)):
        states[i], computed_at[i] = (
            verified_one(row, key_hash, tag, snapshots, fixed_bytes, exact) if row else (ABSENT, 0)
        )
    return states, computed_at


def verified_one(
    row: Buffer, key_hash: int, tag: int, snapshots: Collection[int], fixed_bytes: int, exact: bool
) -> tuple[int, int]:
    """As :func:`verified`, of one row; an empty one is damaged. 2 µs."""
    size = len(row)
    if size < HEADER_BYTES:
        return DAMAGED, 0
    checksum, computed_at, snapshot, own_tag = _HEADER.unpack_from(row)
    whole = checksum == hash_of(memoryview(row)[CHECKSUM_BYTES:]) ^ key_hash
    if not whole or own_tag != tag or snapshot not in snapshots:
        return DAMAGED, 0
    if size == HEADER_BYTES:
        return ABSENT, 0
    fits = size == fixed_bytes if exact else size >= fixed_bytes
    return (FOUND, computed_at) if fits else (DAMAGED, 0)


def lay_out(keys: Packed, rows: Packed) -> tuple[U1, I8]:
    """The records of a table file: (bytes, where in them each record starts). A record is 8-byte
    aligned:

    row size uint32 · key size uint16 · 0 uint16 · key · row, the last two with zeros to a multiple
    of 8 bytes.

    Raises:
        ValueError: a key or row is larger than :data:`LARGEST_KEY`, :data:`LARGEST_ROW`.
    """
    key_sizes, row_sizes = keys.sizes, rows.sizes
    if len(keys) and (int(key_sizes.max()) > LARGEST_KEY or int(row_sizes.max()) > LARGEST_ROW):
        raise ValueError(
            f"keys of {int(key_sizes.max())} and rows of {int(row_sizes.max())} bytes; at most"
            f" {LARGEST_KEY} and {LARGEST_ROW}"
        )
    ends = np.cumsum(8 + (key_sizes + 7 & -8) + (row_sizes + 7 & -8))
    starts = np.concatenate(([0], ends[:-1])) if len(keys) else ends
    size_bytes = int(ends[-1]) if len(keys) else 0
    if native is not None:
        data = np.empty(size_bytes, np.uint8)
        native.lay_out(keys.data, keys.offsets, rows.data, rows.offsets, data)
        return data, starts
    heads = memoryview((row_sizes | key_sizes << 32).astype("<u8").tobytes())
    pieces: list[Buffer] = []
    for i, (key, row) in enumerate(zip(keys.strings(), rows.strings(), strict=True)):
        pieces += heads[8 * i : 8 * i + 8], key, _PADDING[len(key) & 7], row, _PADDING[len(row) & 7]
    return np.frombuffer(b"".join(pieces), np.uint8), starts


def send(file: int, start: int, end: int) -> None:
    """Have the system send what was written to a file from ``start`` to ``end`` to the disk, from
    now on, without waiting and without a promise. What is left for an fsync takes a third of the
    time then. Only by the extension, on Linux."""
    if native is not None:
        native.send(file, start, end - start)


LINE_BYTES, LINE_SLOTS = 64, 7
"""A line of the index is a cache line: seven slots and a check word."""

_TAG = 2**24 - 1
_POSITION = 2**40 - 1
_WORD = 2**64 - 1

_MIX = (
    0x6A09E667F3BCC909,
    0xBB67AE8584CAA73B,
    0x3C6EF372FE94F82B,
    0xA54FF53A5F1D36F1,
    0x510E527FADE682D1,
    0x9B05688C2B3E6C1F,
    0x1F83D9ABFB41BD6B,
    0x5BE0CD19137E2179,
)
"""Odd words without a pattern: the square roots of the first eight primes (as in FIPS 180-4,
5.3.5)."""

_SLOT_MIX = np.array(_MIX[:LINE_SLOTS], np.uint64)
_LINE = struct.Struct("<8Q")
_HEAD = struct.Struct("<IH")


def homes(key_hashes: U8, home_lines: int) -> U8:
    """The line of the index where each hash's search begins, in the order of the hashes, uint64
    [n]."""
    half = np.uint64(32)
    return (key_hashes >> half) * np.uint64(home_lines) >> half


def slots_of(key_hashes: U8, positions: I8) -> U8:
    """The slots of records at ``positions`` (bytes, multiples of 8, never 0): 24 low bits of the
    hash · position / 8. 0 is an empty slot."""
    return (key_hashes & np.uint64(_TAG)) << np.uint64(40) | positions.astype(
        np.uint64
    ) >> np.uint64(3)


def line_checks(slots: U8, numbers: U8) -> U8:
    """The check words of index lines, uint64 [n]: one that a flipped bit, a line of zeros or
    another's line does not have.

    Args:
        slots: uint64 [n, 7].
        numbers: which lines of the index they are, uint64 [n].
    """
    one, half = np.uint64(1), np.uint64(32)
    checks: U8 = (slots ^ slots >> half) @ _SLOT_MIX + (numbers + one) * np.uint64(_MIX[7])
    return checks


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the records and the index of a table file lie, in bytes from its start; opening
    the file has made sure that it is so long."""

    records_start: int
    records_end: int
    index_start: int
    home_lines: int
    lines: int
    record_bytes: int
    """What a record takes on average."""


class Records:
    """The records of a mapped table file, found by the index over them; with a :class:`Layout` that
    fits, nothing outside is ever read, whatever the bytes are. A slot of the index points to a
    record. A key's slot is in the line of its hash, or, when that was full, in the next with room;
    a record that has the tag and another key ends the search only if its checksum does not vouch
    for it.

    Safe to share between threads. The mapping lives as long as this does.
    """

    def __init__(self, mapping: mmap.mmap, layout: Layout) -> None:
        self._mapping = mapping
        self._layout = layout
        self.native: Any = None if native is None else native.Records(mapping, *astuple(layout))
        """The extension's table of these records; None where it does not run."""
        self.find: Callable[[bytes], bytes | None] = (
            self._find if self.native is None else self.native.find
        )
        """The key's packed row; None when it has none, and an empty one when it cannot be known for
        damage. By the extension 0.3 µs."""
        self._view = memoryview(mapping)

    def _find(self, key: bytes) -> bytes | None:
        state, row = self._search(key, hash_of(key))
        return None if state == ABSENT else bytes(row)

    def read(
        self, keys: Packed, key_hashes: U8, below: Sequence[Records] = ()
    ) -> tuple[Packed, U1]:
        """The keys' packed rows, copied into one buffer, and of each key uint8 [n]: :data:`ABSENT`,
        :data:`FOUND` or :data:`DAMAGED`.

        A key without a row has an empty one. A row that was found is under its key; whether it is
        whole is known by its own checksum (:func:`verified`).

        Args:
            keys: any number, repeated ones too.
            key_hashes: ``hashes(keys)``.
            below: queried in turn for what this has nothing of.
        """
        states = np.zeros(len(keys), np.uint8)
        if self.native is not None:
            offsets = np.empty(len(keys) + 1, np.int64)
            natives = tuple(other.native for other in below)
            data = self.native.read(natives, keys.data, keys.offsets, key_hashes, offsets, states)
            return Packed(np.frombuffer(data, np.uint8), offsets), states
        rows: list[Buffer] = []
        for i, (key, key_hash) in enumerate(zip(keys.strings(), key_hashes.tolist(), strict=True)):
            for table in (self, *below):
                states[i], row = table._search(key, key_hash)
                if states[i] != ABSENT:
                    break
            rows.append(row)
        return Packed.of(rows), states

    def _search(self, key: Buffer, key_hash: int) -> tuple[int, Buffer]:
        """The state of one key, and its row; an empty one where it is not :data:`FOUND`."""
        layout, tag = self._layout, key_hash & _TAG
        for number in range((key_hash >> 32) * layout.home_lines >> 32, layout.lines):
            *slots, check = _LINE.unpack_from(self._view, layout.index_start + LINE_BYTES * number)
            for slot in slots:
                if not slot or slot >> 40 != tag:
                    continue
                found = self._compared((slot & _POSITION) * 8, key, tag)
                if found is not None:
                    return found
            # a row that is found vouches for itself; that there is none the line has to vouch for
            mixed = sum((slot ^ slot >> 32) * mix for slot, mix in zip(slots, _MIX, strict=False))
            if mixed + (number + 1) * _MIX[7] & _WORD != check:
                break
            if 0 in slots:
                return ABSENT, b""
        # a line was damaged, or none had room: the last one always has
        return DAMAGED, b""

    def _compared(self, at: int, key: Buffer, tag: int) -> tuple[int, Buffer] | None:
        """What the record at ``at`` says of the key; None: it is another key's."""
        layout = self._layout
        if not layout.records_start <= at <= layout.records_end - 8:
            return DAMAGED, b""
        row_size, key_size = _HEAD.unpack_from(self._view, at)
        start = at + 8 + (key_size + 7 & -8)
        if not row_size or start + row_size > layout.records_end:
            return DAMAGED, b""
        stored, row = self._view[at + 8 : at + 8 + key_size], self._view[start : start + row_size]
        if stored == key:
            return FOUND, row
        stored_hash = hash_of(stored)
        is_whole = (
            row_size >= HEADER_BYTES
            and int.from_bytes(row[:CHECKSUM_BYTES], "little")
            == hash_of(row[CHECKSUM_BYTES:]) ^ stored_hash
        )
        return None if is_whole and stored_hash & _TAG == tag else (DAMAGED, b"")
