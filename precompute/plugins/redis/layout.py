"""Layout: how a segment's rows lie in Redis, one key each or, if narrow, as fields of small
hashes; what memory they take; and the commands that write and read them, built in numpy by the
block."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precompute.plugins.redis.connection import Node, Refused, packed
from precompute.store.disk.record import Record
from precompute.store.online import kernels
from precompute.store.online.codec import HEADER_BYTES
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.kernels import I8, U1, U8, Buffer, Packed, RowBatch, hash_of

FIELDS = 64
"""Rows to a hash, on average. 32 take 6 % more memory and a tenth less of the server's time to
read, 100 take 3 % less and a fifth more; and they stay below 128, which is what other kinds of
small values are limited to."""
WIDEST_VALUE = 64
"""Bytes of a field: one that is wider makes a hash a large one (hash-max-listpack-value)."""
FEW = 8
"""Keys that are requested one by one: for more of them numpy is faster."""
FIELD_BYTES = 6
NAME_BYTES = 8
_FIELD_SEED = 1
OWN_BYTES, _LEFT_OUT = 14, slice(14, HEADER_BYTES)
"""Checksum and the lower six bytes of computed_at, which turn over every nine years, next in 2032;
its upper two, snapshot and tag."""
_WHOLE, _SHORT = b"\0", b"\1"
DAMAGED = b"\0"
"""What no row ever is, for a value that cannot be one."""
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_SHIFTS = np.arange(4 * (NAME_BYTES - 1), -1, -4, dtype=np.uint64)


class Buckets(Record, frozen=True):
    """The hashes of one segment.

        <prefix><hash of the key mod number, 8 hex digits>    a hash: field → value
        field = xxh3_64 of the key, seed 1, its lower 6 bytes
        value = 1 · row[:14] · row[24:]    of a row whose bytes 14 to 24 are ``common``
              | 0 · row                    of any other

    Snapshot, schema tag and the upper bytes of ``computed_at`` are the same in all rows of a load:
    they are stored once, here, and a row is handed out with them, whole. It vouches for itself as
    ever: its checksum covers what was left out, and the entity key by a hash (seed 0) that has
    nothing to do with the field's, so that another key's row in its field is damaged, and never its
    answer. Two keys of one bucket share a field once in 2⁴⁸ pairs: once in 10,000 loads of a
    billion rows.

    ``number`` of buckets; ``common`` in hex.
    """

    number: int
    common: str

    @classmethod
    def of(cls, number: int, rows: Packed) -> Buckets:
        """So many, for rows like the first of these."""
        common = (
            rows.at(0)[_LEFT_OUT]
            if len(rows) and rows.sizes[0] >= HEADER_BYTES
            else bytes(HEADER_BYTES - OWN_BYTES)
        )
        return cls(number, common.hex())

    def positions(self, hashes: U8) -> I8:
        """Which bucket each key lies in, by its hash (seed 0), int64 [n]."""
        return (hashes % np.uint64(self.number)).astype(np.int64)

    def narrowed(self, rows: Packed) -> Packed:
        """Rows as values of fields."""
        common, sizes = bytes.fromhex(self.common), rows.sizes
        size = int(sizes[0]) if len(sizes) else 0
        if size >= HEADER_BYTES and (sizes == size).all():
            first = int(rows.offsets[0])
            whole = rows.data[first : first + size * len(sizes)].reshape(-1, size)
            if (whole[:, _LEFT_OUT] == np.frombuffer(common, np.uint8)).all():
                short = np.concatenate([whole[:, :OWN_BYTES], whole[:, HEADER_BYTES:]], 1)
                marked = np.concatenate([np.full((len(short), 1), _SHORT[0], np.uint8), short], 1)
                return Packed(marked.reshape(-1), np.arange(len(sizes) + 1) * marked.shape[1])
        return Packed.of([_narrowed(bytes(row), common) for row in rows.strings()])

    def restored(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], hashes: U8 | None
    ) -> FoundRows:
        """What stands in the fields of keys as rows; what cannot be one becomes what is no row.
        0.05 µs a row where all are short and of one width, else 0.25."""
        common, present = (
            bytes.fromhex(self.common),
            [value for value in values if value is not None],
        )
        sizes = set(map(len, present))
        if len(keys) > FEW and len(sizes) == 1 and (size := sizes.pop()) > OWN_BYTES:
            short = np.frombuffer(b"".join(present), np.uint8).reshape(-1, size)
            if (short[:, 0] == _SHORT[0]).all():
                shared = np.broadcast_to(np.frombuffer(common, np.uint8), (len(short), len(common)))
                rows = np.concatenate(
                    [short[:, 1 : 1 + OWN_BYTES], shared, short[:, 1 + OWN_BYTES :]], 1
                )
                offsets = np.zeros(len(keys) + 1, np.int64)
                np.cumsum([value is not None for value in values], out=offsets[1:])
                return FoundRows(
                    keys, packed=Packed(rows.reshape(-1), offsets * rows.shape[1]), hashes=hashes
                )
        return FoundRows(
            keys,
            [None if value is None else _restored(value, common) for value in values],
            hashes=hashes,
        )


def _narrowed(row: bytes, common: bytes) -> bytes:
    return (
        _SHORT + row[:OWN_BYTES] + row[HEADER_BYTES:] if row[_LEFT_OUT] == common else _WHOLE + row
    )


def _restored(value: bytes, common: bytes) -> bytes:
    form = value[:1]
    if form == _SHORT:
        return value[1 : 1 + OWN_BYTES] + common + value[1 + OWN_BYTES :]
    return value[1:] or DAMAGED if form == _WHOLE else DAMAGED


def names(positions: I8) -> U1:
    """Names of buckets behind their prefix, uint8 [n, 8]: of one length, to be laid out in numpy,
    and legible in Redis."""
    named: U1 = _DIGITS[(positions.astype(np.uint64)[:, None] >> _SHIFTS) & np.uint64(15)]
    return named


def fields(keys: Iterable[Buffer], count: int) -> U1:
    """Names of fields of entity keys, uint8 [n, 6]. 0.15 µs a key."""
    hashes = np.fromiter((hash_of(key, _FIELD_SEED) for key in keys), np.uint64, count)
    return hashes.astype("<u8").view(np.uint8).reshape(count, 8)[:, :FIELD_BYTES]


def field_of(key: bytes) -> bytes:
    """The field of one key."""
    return hash_of(key, _FIELD_SEED).to_bytes(8, "little")[:FIELD_BYTES]


SLOTS = 16384


def slot_of(key: bytes | str) -> int:
    """A key's slot: CRC-16 (XMODEM, as ``binascii.crc_hqx``) of the text between its first braces,
    or of all of it where there is none there."""
    key = key.encode() if isinstance(key, str) else key
    opened = key.find(b"{")
    closed = key.find(b"}", opened + 1) if opened >= 0 else -1
    if closed > opened + 1:
        key = key[opened + 1 : closed]
    return crc_hqx(key, 0) % SLOTS


def row_slots(prefix: bytes, keys: Sequence[bytes] | Packed) -> I8:
    """Slots of rows' keys under a prefix that has empty braces: of all of each key. int64 [n]; 0.2
    µs a key.

    The checksum goes on from the prefix's, and stays in C: in numpy, byte by byte of all keys at
    once, it takes as long.
    """
    begun = crc_hqx(prefix, 0)
    strings = keys.strings() if isinstance(keys, Packed) else keys
    return np.fromiter((crc_hqx(key, begun) for key in strings), np.int64, len(keys)) % SLOTS


MSET_KEYS = 128
"""Keys per MSET: 100 to 256 cost the server 2.2 µs a key, single SETs 3.4."""
BLOCK_BYTES = 2**20
"""Bytes of a block that is sent at once, about: large enough that a block costs nothing, small
enough that several in flight are no memory."""
SLICE_ROWS = 8192
"""Rows that are laid out together, at most: what is done again after a kill is counted in them."""
BUCKETS_SLICE_ROWS = 131_072
"""The same for rows in buckets, as many as there are in 6 MB: of a million rows each of its buckets
gets 8 by one HSET. That costs the server 0.6 µs a row, one HSET for each row twice that."""
JOINED_BELOW = 32
"""Rows of one width under keys of one length that are fewer are joined with others: a matrix of its
own takes as long as 30 of them."""


@dataclass(frozen=True, slots=True)
class Block:
    """Commands ready to be sent. ``positions`` are those of their rows among ``keys`` and ``rows``,
    in the commands' order; command ``i`` has those from ``starts[i]`` to ``starts[i + 1]``, int64
    [commands + 1]."""

    data: memoryview | bytes
    positions: I8
    starts: I8
    keys: Packed
    rows: Packed
    node: Node | None = None
    """The server of a cluster that it is for."""

    @property
    def replies(self) -> int:
        """How many commands they are."""
        return len(self.starts) - 1

    def rows_of(self, command: int) -> I8:
        """Positions of one command's rows."""
        return self.positions[self.starts[command] : self.starts[command + 1]]


@dataclass(frozen=True)
class Layout:
    """How the rows of one segment lie in Redis: under keys that begin with ``prefix``, each
    under one of its own, or in ``buckets``."""

    prefix: bytes
    buckets: Buckets | None = None

    @property
    def slice_rows(self) -> int:
        """How many rows are laid out together, at most."""
        return SLICE_ROWS if self.buckets is None else BUCKETS_SLICE_ROWS

    def slots(self, keys: Sequence[bytes] | Packed, hashes: U8 | None = None) -> I8:
        """The slots that rows lie in, by their keys and these keys' hashes (seed 0), int64 [n]."""
        if self.buckets is None:
            return row_slots(self.prefix, keys)
        hashes = (
            hashes
            if hashes is not None
            else kernels.hashes(keys if isinstance(keys, Packed) else Packed.of(keys))
        )
        named = names(self.buckets.positions(hashes))
        return row_slots(
            self.prefix, Packed(named.reshape(-1), np.arange(len(named) + 1) * NAME_BYTES)
        )

    def gets(self, keys: Sequence[bytes], hashes: U8 | None = None) -> list[bytes]:
        """A command for each key that reads its row; replies are to be read by :meth:`found`."""
        prefix = self.prefix
        if self.buckets is None:
            return [
                b"*2\r\n$3\r\nGET\r\n$%d\r\n%b%b\r\n" % (len(prefix) + len(key), prefix, key)
                for key in keys
            ]
        head = b"*3\r\n$4\r\nHGET\r\n"
        if len(keys) > FEW:
            cells = self._in_buckets(head, keys, hashes)
            data, width = cells.tobytes(), cells.shape[1]
            return [data[at : at + width] for at in range(0, len(data), width)]
        number = self.buckets.number
        return [
            b"%b$%d\r\n%b%08x\r\n$%d\r\n%b\r\n"
            % (
                head,
                len(prefix) + NAME_BYTES,
                prefix,
                kernels.hash_of(key) % number,
                FIELD_BYTES,
                field_of(key),
            )
            for key in keys
        ]

    def gets_of(self, keys: Sequence[bytes], hashes: U8 | None = None) -> tuple[bytes, int]:
        """Commands that read rows of one server, and how many they are: it has one for many
        keys."""
        if self.buckets is None:
            return packed(("MGET", *[self.prefix + key for key in keys])), 1
        if len(keys) > FEW:
            return self._in_buckets(b"*3\r\n$4\r\nHGET\r\n", keys, hashes).tobytes(), len(keys)
        return b"".join(self.gets(keys)), len(keys)

    def puts(self, keys: Packed, rows: Packed, positions: I8) -> tuple[I8, list[bytes]]:
        """A command for each of some rows that stores it, and the slots it goes to."""
        meant = positions.tolist()
        few, values = [keys.at(i) for i in meant], [rows.at(i) for i in meant]
        hashes = kernels.hashes(Packed.of(few))
        if self.buckets is None:
            heads = [
                b"*3\r\n$3\r\nSET\r\n$%d\r\n%b%b\r\n"
                % (len(self.prefix) + len(key), self.prefix, key)
                for key in few
            ]
        else:
            values = [bytes(value) for value in self.buckets.narrowed(Packed.of(values)).strings()]
            heads = [
                cell.tobytes() for cell in self._in_buckets(b"*4\r\n$4\r\nHSET\r\n", few, hashes)
            ]
        commands = [
            b"%b$%d\r\n%b\r\n" % (head, len(value), value)
            for head, value in zip(heads, values, strict=True)
        ]
        return self.slots(few, hashes), commands

    def found(
        self, keys: Sequence[bytes], replies: Sequence[Any], hashes: U8 | None = None
    ) -> FoundRows:
        """Rows of the replies to :meth:`gets`; of another kind of value than ours, what is no
        row."""
        values = [DAMAGED if isinstance(reply, Refused) else reply for reply in replies]
        return (
            FoundRows(keys, values, hashes=hashes)
            if self.buckets is None
            else self.buckets.restored(keys, values, hashes)
        )

    def blocks(
        self, batch: RowBatch, positions: I8 | None = None, together: int = MSET_KEYS
    ) -> Iterator[Block]:
        """Rows as commands that store them, in no particular order: ``together`` to each where they
        have keys of their own, else all that go to one bucket."""
        if self.buckets is None:
            return blocks(batch.keys, batch.rows, self.prefix, positions, together)
        return _bucketed(
            batch,
            self.prefix,
            self.buckets,
            np.arange(len(batch)) if positions is None else positions,
        )

    def _in_buckets(self, head: bytes, keys: Sequence[bytes], hashes: U8 | None) -> U1:
        """The beginning of each key's command up to its field, uint8 [n, bytes]."""
        assert self.buckets is not None
        hashes = kernels.hashes(Packed.of(keys)) if hashes is None else hashes
        columns: tuple[bytes | U1, ...] = (
            head + b"$%d\r\n" % (len(self.prefix) + NAME_BYTES) + self.prefix,
            names(self.buckets.positions(hashes)),
            b"\r\n$%d\r\n" % FIELD_BYTES,
            fields(keys, len(keys)),
            b"\r\n",
        )
        return _beside(len(keys), columns)


def blocks(
    keys: Packed,
    rows: Packed,
    prefix: bytes,
    positions: I8 | None = None,
    together: int = MSET_KEYS,
) -> Iterator[Block]:
    """Rows as commands that store each under ``prefix`` and its key, in no particular order.

    Args:
        keys: of all rows.
        rows: equally many.
        prefix: before each key.
        positions: of those that are meant, ascending; all by default.
        together: rows per MSET; 1 for a SET each, which is what a cluster takes: its nodes refuse
            an MSET over several slots.
    """
    positions = np.arange(len(keys)) if positions is None else positions
    kinds = (keys.sizes << 32 | rows.sizes)[positions]
    if len(kinds) and (kinds == kinds[0]).all():
        groups = [positions]
    else:
        order = np.argsort(kinds, kind="stable")
        groups = np.split(positions[order], np.flatnonzero(np.diff(kinds[order])) + 1)
    rest = []
    for alike in groups:
        whole = len(alike) // together * together if len(alike) >= JOINED_BELOW else 0
        if whole:
            yield from _matrices(keys, rows, alike[:whole], prefix, together)
        rest.append(alike[whole:])
    left = np.concatenate(rest)
    if len(left):
        yield from _joined(keys, rows, left, prefix, together)


def _matrices(
    keys: Packed, rows: Packed, positions: I8, prefix: bytes, together: int
) -> Iterator[Block]:
    """Rows of one width under keys of one length, a whole number of commands of them: a matrix of
    bytes, whose columns are constant but for two."""
    key_bytes, row_bytes = int(keys.sizes[positions[0]]), int(rows.sizes[positions[0]])
    single = together == 1
    head = b"" if single else b"*%d\r\n$4\r\nMSET\r\n" % (2 * together + 1)
    before = (
        (b"*3\r\n$3\r\nSET\r\n" if single else b"")
        + b"$%d\r\n" % (len(prefix) + key_bytes)
        + prefix
    )
    between, after = b"\r\n$%d\r\n" % row_bytes, b"\r\n"
    width = len(before) + key_bytes + len(between) + row_bytes + len(after)
    command_bytes = len(head) + together * width
    commands = max(1, BLOCK_BYTES // command_bytes)
    for start in range(0, len(positions), commands * together):
        part = positions[start : start + commands * together]
        count = len(part) // together
        block = np.empty((count, command_bytes), np.uint8)
        block[:, : len(head)] = np.frombuffer(head, np.uint8)
        columns = (
            before,
            _gathered(keys, part, key_bytes),
            between,
            _gathered(rows, part, row_bytes),
            after,
        )
        _fill(block[:, len(head) :].reshape(count, together, width), columns)
        yield Block(
            memoryview(block.reshape(-1).data), part, np.arange(count + 1) * together, keys, rows
        )


def _gathered(strings: Packed, positions: I8, size: int) -> U1:
    """Strings of one size at ascending positions, uint8 [n, size]; without a copy where they lie
    one behind the other."""
    first, last = int(positions[0]), int(positions[-1])
    start, stop = int(strings.offsets[first]), int(strings.offsets[last + 1])
    if stop - start == len(positions) * size:
        return strings.data[start:stop].reshape(-1, size)
    return _picked(strings, positions, size)


def _picked(strings: Packed, positions: I8, size: int) -> U1:
    """As :func:`_gathered`, of positions in any order."""
    starts = strings.offsets[:-1][positions]
    windows = np.lib.stride_tricks.as_strided(
        strings.data, (max(1, len(strings.data) - size + 1), size), (1, 1), writeable=False
    )
    return windows[starts]


def _joined(
    keys: Packed, rows: Packed, positions: I8, prefix: bytes, together: int
) -> Iterator[Block]:
    """Rows of many widths: the pieces of their commands, joined. A µs a row."""
    key_at, row_at = keys.offsets.tolist(), rows.offsets.tolist()
    key_data, row_data = memoryview(keys.data.data), memoryview(rows.data.data)
    pieces: list[bytes | memoryview] = []
    size = first = 0
    for start in range(0, len(positions), together):
        part = positions[start : start + together].tolist()
        pieces.append(
            b"*3\r\n$3\r\nSET\r\n"
            if together == 1
            else b"*%d\r\n$4\r\nMSET\r\n" % (2 * len(part) + 1)
        )
        for i in part:
            key, row = key_data[key_at[i] : key_at[i + 1]], row_data[row_at[i] : row_at[i + 1]]
            pieces += (
                b"$%d\r\n" % (len(prefix) + len(key)),
                prefix,
                key,
                b"\r\n$%d\r\n" % len(row),
                row,
                b"\r\n",
            )
            size += len(row)
        stop = start + len(part)
        if size >= BLOCK_BYTES or stop == len(positions):
            meant = positions[first:stop]
            starts = np.append(np.arange(0, len(meant), together), len(meant))
            yield Block(b"".join(pieces), meant, starts, keys, rows)
            pieces, size, first = [], 0, stop


def _bucketed(batch: RowBatch, prefix: bytes, buckets: Buckets, positions: I8) -> Iterator[Block]:
    """An HSET for each bucket with all of its rows that there are: 0.5 µs a row."""
    at = buckets.positions(batch.hashes[positions])
    order = np.argsort(at, kind="stable")
    at, positions = at[order], positions[order]
    starts = np.append(np.flatnonzero(np.diff(at, prepend=-1)), len(at))
    pieces = _field_pieces(
        fields(batch.keys.strings(), len(batch))[positions], buckets.narrowed(batch.rows), positions
    )
    ends, data, named = (
        pieces.offsets[starts].tolist(),
        memoryview(pieces.data.data),
        names(at[starts[:-1]]).tobytes(),
    )
    sent: list[bytes | memoryview] = []
    size = first = 0
    commands = len(starts) - 1
    for i, count in enumerate(np.diff(starts).tolist()):
        name = named[i * NAME_BYTES : (i + 1) * NAME_BYTES]
        sent.append(
            b"*%d\r\n$4\r\nHSET\r\n$%d\r\n%b%b\r\n"
            % (2 + 2 * count, len(prefix) + NAME_BYTES, prefix, name)
        )
        sent.append(data[ends[i] : ends[i + 1]])
        size += ends[i + 1] - ends[i]
        if size >= BLOCK_BYTES or i + 1 == commands:
            of = starts[first : i + 2]
            yield Block(
                b"".join(sent), positions[of[0] : of[-1]], of - of[0], batch.keys, batch.rows
            )
            sent, size, first = [], 0, i + 1


def _field_pieces(within: U1, values: Packed, positions: I8) -> Packed:
    """Field and value of each row as they stand in an HSET, one behind the other in the order of
    ``positions``, to which ``within`` (uint8 [n, 6]) belongs."""
    size = int(values.sizes[positions[0]]) if len(positions) else 0
    before = b"$%d\r\n" % FIELD_BYTES
    if (values.sizes[positions] != size).any():
        strings = [values.at(i) for i in positions.tolist()]
        return Packed.of(
            [
                b"%b%b\r\n$%d\r\n%b\r\n" % (before, field.tobytes(), len(value), value)
                for field, value in zip(within, strings, strict=True)
            ]
        )
    cells = _beside(
        len(positions),
        (before, within, b"\r\n$%d\r\n" % size, _picked(values, positions, size), b"\r\n"),
    )
    return Packed(cells.reshape(-1), np.arange(len(cells) + 1) * cells.shape[1])


def _fill(cells: U1, columns: Sequence[bytes | U1]) -> None:
    """Write constants and uint8 [n, bytes], side by side, to n cells, uint8 [..., bytes]."""
    at = 0
    for column in columns:
        part = column if isinstance(column, np.ndarray) else np.frombuffer(column, np.uint8)
        if part.ndim not in (1, cells.ndim):
            part = part.reshape(*cells.shape[:-1], -1)
        cells[..., at : at + part.shape[-1]] = part
        at += part.shape[-1]


def _beside(count: int, columns: Sequence[bytes | U1]) -> U1:
    """Constants and uint8 [n, bytes], one beside the other."""
    width = sum(c.shape[1] if isinstance(c, np.ndarray) else len(c) for c in columns)
    cells = np.empty((count, width), np.uint8)
    _fill(cells, columns)
    return cells


def key_cost_bytes(key_bytes: float, row_bytes: float) -> int:
    """Bytes of a Redis server's memory for one row under a key of so many bytes (with its prefix).

    A table entry (24, for which 32 are given out) and its bucket (8), an object (16), and two
    strings with their headers and final zero, each rounded up to what the allocator gives out. By
    the source of Redis 7.0 (dict.h, object.c, sds.h) and jemalloc's size classes; within 2 % of
    what 7.0 was measured to take with 16,384 and 131,072 keys of 4 to 4,000 bytes, within 13 %
    where Redis is built without jemalloc.
    """
    # up to 44 bytes lie in their object
    value = (
        size_class(16 + 3 + row_bytes + 1)
        if row_bytes <= 44
        else 16 + size_class(row_bytes + (4 if row_bytes < 256 else 6))
    )
    return 32 + 8 + size_class(key_bytes + (2 if key_bytes < 32 else 4)) + value


def size_class(size_bytes: float) -> int:
    """What jemalloc gives out for so many bytes: steps of 16 up to 128, then four classes to each
    doubling."""
    size = max(1, int(size_bytes))
    step = 16 if size <= 128 else 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


def bucket_cost_bytes(prefix_bytes: int, row_bytes: float) -> float:
    """Bytes of a Redis server's memory for one row in a bucket: its field and value, each with two
    bytes of its own (three beyond 63), and its share of the bucket, which is rounded up to what the
    allocator gives out, and of the bucket's key. By the source of Redis 7.0 (listpack.c); within 5
    % of what 7.0 was measured to take, and 15 % of 6.2 without jemalloc.
    """
    value = 1 + OWN_BYTES + row_bytes - HEADER_BYTES
    entry = FIELD_BYTES + 2 + value + (2 if value < 64 else 3)
    # they are not all of the same size: two thirds have 56 to 72 rows
    counts = range(FIELDS - 16, FIELDS + 17)
    bucket = sum(size_class(7 + count * entry) for count in counts) / sum(counts)
    return bucket + (32 + 8 + 16 + size_class(prefix_bytes + NAME_BYTES + 4)) / FIELDS
