"""Kernels: the few steps of a bulk load and of a batch read that run over many packed rows at once,
by numpy or by the C extension beside this file where it was built. ``PRECOMPUTE_KERNELS=python``
has the first run all the same; both give equal results.
"""

from __future__ import annotations

import importlib
import mmap
import os
import resource
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from precompute.store.online.packed import I8, U1, U8, Buffer, Packed

_VERSION = 6
"""Of what this file and the extension say to each other; _kernels.c has it too."""


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
"""Bytes that a record has room to tell the size of."""

ABSENT, FOUND, DAMAGED = 0, 1, 2
"""What reading a key came to."""

ROW_HEADER = np.dtype(
    [("checksum", "<u8"), ("computed_at", "<i8"), ("snapshot", "<u4"), ("tag", "<u4")]
)
"""The first bytes of every packed row; a tombstone has no others."""

CHECKSUM_BYTES = 8
"""Of the header: ``hashes(rows, CHECKSUM_BYTES) ^ hashes(keys)``, so that a row under another key
does not pass."""

_PADDING = tuple(bytes(-size % 8) for size in range(8))

hash_of = xxhash.xxh3_64_intdigest
"""xxh3_64 (seed 0) of one string."""


def hashes(packed: Packed, skip: int = 0) -> U8:
    """xxh3_64 (seed 0) of each string without its first ``skip`` bytes, uint64 [n]; of a shorter
    string, that of nothing."""
    if native is not None:
        found = np.empty(len(packed), np.uint64)
        native.hashes(packed.data, packed.offsets, skip, found)
        return found
    count, first, end = len(packed), int(packed.offsets[0]), int(packed.offsets[-1])
    size = (end - first) // max(1, count)
    if size > skip and (packed.sizes == size).all():
        # all of one size: 0.10 µs a row of 1,561 bytes, where slices of a memoryview take 0.16
        return np.fromiter(
            map(hash_of, packed.data[first:end].reshape(count, size)[:, skip:]), np.uint64, count
        )
    view = memoryview(packed.data.data)
    starts, ends = (packed.offsets[:-1] + skip).tolist(), packed.offsets[1:].tolist()
    return np.fromiter(
        [hash_of(view[a:b]) for a, b in zip(starts, ends, strict=True)], np.uint64, count
    )


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
    """What packed rows are worth, uint8 [n], and when those that are whole were computed, int64 [n]
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
    if native is not None:
        states, computed_at = np.empty(len(rows), np.uint8), np.empty(len(rows), np.int64)
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
    count, sizes, first = len(rows), rows.sizes, int(rows.offsets[0])
    alike = exact and rows.size_bytes == fixed_bytes * count and bool((sizes == fixed_bytes).all())
    header: npt.NDArray[Any]
    if alike:
        header = rows.data[first : first + fixed_bytes * count].reshape(count, fixed_bytes)[
            :, : ROW_HEADER.itemsize
        ]
        header = header.view(ROW_HEADER)[:, 0]
    else:
        header, long = np.zeros(count, ROW_HEADER), np.flatnonzero(sizes >= ROW_HEADER.itemsize)
        header[long] = _headers(rows.data)[rows.offsets[long]]
    whole = (header["checksum"] ^ hashes(rows, CHECKSUM_BYTES)) == key_hashes
    known = np.zeros(count, np.bool_)
    for snapshot in snapshots:
        known |= header["snapshot"] == snapshot
    whole &= known
    whole &= header["tag"] == tag
    if alike and whole.all():
        return np.full(count, FOUND, np.uint8), np.ascontiguousarray(header["computed_at"])
    whole &= sizes >= ROW_HEADER.itemsize
    fits = whole & ((sizes == fixed_bytes) if exact else (sizes >= fixed_bytes))
    states = np.where(fits, np.uint8(FOUND), np.uint8(DAMAGED))
    states[(sizes == 0) | whole & (sizes == ROW_HEADER.itemsize)] = ABSENT
    return states, np.where(states == FOUND, header["computed_at"], 0)


def _headers(data: U1) -> npt.NDArray[Any]:
    """The row header that would begin at each byte, without a copy."""
    return np.ndarray(
        (max(0, len(data) - ROW_HEADER.itemsize + 1),), ROW_HEADER, data.data, strides=(1,)
    )


def lay_out(keys: Packed, rows: Packed) -> tuple[U1, I8]:
    """The records of a table file: (bytes, where in them each record starts). A record is 8-byte
    aligned:

    row size uint32 · key size uint16 · 0 uint16 · key · row, the last two with zeros to a multiple
    of 8 bytes.

    Raises:
        ValueError: a key or row is larger than a record can tell.
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
    now on; nobody waits, and nothing is promised. What is left for an fsync takes a third of the
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

_FEW = 12
"""Keys that are found faster one after the other than by numpy all at once."""

_PROBED = 4
"""Keys whose pages are touched to learn whether the others' are in memory."""


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
    """Where the records and the index of a table file lie, in bytes from its start; anyone who
    opens the file has made sure that it is so long."""

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
        damage. 3.5 µs, by the extension 0.3."""
        self._view = memoryview(mapping)
        self._words: U8 = np.frombuffer(mapping, "<u8", len(mapping) // 8)
        index = self._words[layout.index_start // 8 :][: layout.lines * 8]
        self._lines = index.reshape(layout.lines, 8)

    def _find(self, key: bytes) -> bytes | None:
        state, start, size = self._search(key, hash_of(key))
        if state == FOUND:
            return self._mapping[start : start + size]
        return None if state == ABSENT else b""

    def read(
        self, keys: Packed, key_hashes: U8, below: Sequence[Records] = ()
    ) -> tuple[Packed, U1]:
        """The keys' packed rows, copied into one buffer, and of each key uint8 [n]: :data:`ABSENT`,
        :data:`FOUND` or :data:`DAMAGED`.

        A key without a row has an empty one. A row that was found is under its key; whether it is
        whole its own checksum tells (:func:`verified`).

        Args:
            keys: any number, repeated ones too.
            key_hashes: ``hashes(keys)``.
            below: queried in turn for what this has nothing of.
        """
        if self.native is not None:
            states, offsets = np.empty(len(keys), np.uint8), np.empty(len(keys) + 1, np.int64)
            natives = tuple(other.native for other in below)
            data = self.native.read(natives, keys.data, keys.offsets, key_hashes, offsets, states)
            return Packed(np.frombuffer(data, np.uint8), offsets), states
        starts, sizes, states = self._places(keys, key_hashes)
        owners = np.zeros(len(keys), np.intp)
        for number, other in enumerate(below, 1):
            absent = states == ABSENT
            if not absent.any():
                break
            other_starts, other_sizes, other_states = other._places(keys, key_hashes)
            np.copyto(starts, other_starts, where=absent)
            np.copyto(sizes, other_sizes, where=absent)
            np.copyto(states, other_states, where=absent)
            owners[absent] = number
        return _gathered([self, *below], owners, starts, sizes), states

    # ---- one key

    def _search(self, key: bytes, key_hash: int) -> tuple[int, int, int]:
        """(state, where its row starts, bytes of the row); the last two 0 without a row."""
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
                return ABSENT, 0, 0
        # a line was damaged, or none had room: the last one always has
        return DAMAGED, 0, 0

    def _compared(self, at: int, key: bytes, tag: int) -> tuple[int, int, int] | None:
        """What the record at ``at`` says of the key; None: it is another key's."""
        layout = self._layout
        if not layout.records_start <= at <= layout.records_end - 8:
            return DAMAGED, 0, 0
        row_size, key_size = _HEAD.unpack_from(self._view, at)
        start = at + 8 + (key_size + 7 & -8)
        if not row_size or start + row_size > layout.records_end:
            return DAMAGED, 0, 0
        stored = self._view[at + 8 : at + 8 + key_size]
        if stored == key:
            return FOUND, start, row_size
        stored_hash, row = hash_of(stored), self._view[start : start + row_size]
        if (
            row_size < ROW_HEADER.itemsize
            or int.from_bytes(row[:CHECKSUM_BYTES], "little")
            != hash_of(row[CHECKSUM_BYTES:]) ^ stored_hash
            or stored_hash & _TAG != tag
        ):
            return DAMAGED, 0, 0
        return None

    # ---- many keys

    def _places(self, keys: Packed, key_hashes: U8) -> tuple[I8, I8, U1]:
        """Where each key's row starts, its bytes, and its state; the first two 0 without a row."""
        starts, sizes, states = (
            np.zeros(len(keys), np.int64),
            np.zeros(len(keys), np.int64),
            np.zeros(len(keys), np.uint8),
        )
        left: Iterable[int] = range(len(keys))
        if len(keys) > _FEW:
            left = self._locate(keys, key_hashes, starts, sizes, states)
        for i in left:
            key = keys.data[keys.offsets[i] : keys.offsets[i + 1]].tobytes()
            states[i], starts[i], sizes[i] = self._search(key, int(key_hashes[i]))
        return starts, sizes, states

    def _locate(self, keys: Packed, key_hashes: U8, starts: I8, sizes: I8, state: U1) -> list[int]:
        """Find what the home line tells, into ``starts``, ``sizes`` and ``state``; the others'
        numbers, to be searched for one by one."""
        layout = self._layout
        numbers = homes(key_hashes, layout.home_lines)
        line_numbers = numbers.astype(np.int64)
        self._awaited(layout.index_start + LINE_BYTES * line_numbers, LINE_BYTES)
        lines = self._lines.take(line_numbers, 0)
        slots = lines[:, :LINE_SLOTS]
        tags, forty = key_hashes & np.uint64(_TAG), np.uint64(40)
        # an empty slot has the tag 0 too, and points outside of the records
        chosen = slots[np.arange(len(keys)), (slots >> forty == tags[:, None]).argmax(1)]
        matched = chosen >> forty == tags
        at = (chosen & np.uint64(_POSITION)).astype(np.int64)
        inside = matched & (at >= layout.records_start // 8) & (at < layout.records_end // 8)
        at[~inside] = layout.records_start // 8
        self._awaited(at[inside] * 8, layout.record_bytes)
        heads = self._words[at]
        key_words = (heads >> 32 & LARGEST_KEY).astype(np.int64)
        same = inside & (key_words == keys.sizes)
        key_words = key_words + 7 >> 3
        row_sizes = (heads & LARGEST_ROW).astype(np.int64)
        row_starts = (at + 1 + key_words) * 8
        same &= (row_sizes != 0) & (row_starts + row_sizes <= layout.records_end)
        self._compare_keys(keys, at + 1, same)
        np.copyto(starts, row_starts, where=same)
        np.copyto(sizes, row_sizes, where=same)
        state[:] = same
        left = np.flatnonzero(~same)
        if len(left) > _FEW:
            # that there is no row the line has to vouch for
            none = ~matched[left] & (slots[left] == 0).any(1)
            none &= line_checks(slots[left], numbers[left]) == lines[left, LINE_SLOTS]
            left = left[~none]
        return list(left.tolist())

    def _compare_keys(self, keys: Packed, at: I8, same: npt.NDArray[np.bool_]) -> None:
        """Clear ``same`` where the words from ``at`` on are not those of the key."""
        padded = np.concatenate(
            (keys.data[keys.offsets[0] : keys.offsets[-1]], np.zeros(8, np.uint8))
        )
        anywhere: U8 = np.ndarray((len(padded) - 7,), "<u8", padded.data, strides=(1,))
        requested, bits = keys.offsets[:-1] - keys.offsets[0], 8 * keys.sizes * same
        for word in range(-(-int(bits.max()) // 64)):
            some: slice | npt.NDArray[np.intp] = (
                np.flatnonzero(bits > 64 * word) if word else slice(None)
            )
            # of the last word only the bytes that are the key's: what is shifted by 64 is 0
            beyond = np.maximum(0, 64 * (word + 1) - bits[some]).astype(np.uint64)
            same[some] &= (
                self._words[at[some] + word] ^ anywhere[requested[some] + 8 * word]
            ) << beyond == 0

    def _awaited(self, positions: I8, size_bytes: int) -> None:
        """Have what lies at ``positions`` read all at once if it is not in memory: 100 rows one
        page fault after the other took 73 ms, so 11."""
        before = _disk_faults()
        for position in positions[:_PROBED].tolist():
            self._view[position]
        if _disk_faults() == before:
            return
        for position in positions[_PROBED:].tolist():
            start = position - position % mmap.PAGESIZE
            self._mapping.madvise(
                mmap.MADV_WILLNEED, start, min(position + size_bytes, len(self._mapping)) - start
            )

    def windows(self, size: int) -> npt.NDArray[np.void]:
        """``size`` bytes from each word on, without a copy: choosing one copies a whole row."""
        return np.ndarray(
            ((len(self._view) - size) // 8 + 1,), f"V{size}", self._view, strides=(8,)
        )

    def row(self, start: int, size: int) -> memoryview:
        """Some bytes, without a copy."""
        return self._view[start : start + size]


def _gathered(
    tables: Sequence[Records], owners: npt.NDArray[np.intp], starts: I8, sizes: I8
) -> Packed:
    """Rows, each of one of the tables, one after the other."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    chosen = np.flatnonzero(sizes)
    if not len(chosen):
        return Packed(np.empty(0, np.uint8), offsets)
    size = int(sizes[chosen[0]])
    if (sizes[chosen] == size).all():
        if not owners.any():
            return Packed(tables[0].windows(size)[starts[chosen] >> 3].view(np.uint8), offsets)
        rows = np.empty(len(chosen), f"V{size}")
        for number, table in enumerate(tables):
            own = np.flatnonzero(owners[chosen] == number)
            rows[own] = table.windows(size)[starts[chosen[own]] >> 3]
        return Packed(rows.view(np.uint8), offsets)
    places = zip(owners.tolist(), starts.tolist(), sizes.tolist(), strict=True)
    return Packed(
        np.frombuffer(
            b"".join([tables[owner].row(start, n) for owner, start, n in places]), np.uint8
        ),
        offsets,
    )


def _disk_faults() -> int:
    """Pages that this thread had to wait for the disk for, so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
