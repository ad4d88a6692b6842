"""RESP: how a generation's rows lie in Redis, and the commands that put them there and ask for
them, laid out in numpy by the block, with no Python a row on their way in."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from precompute.store.online import kernels
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.packed import I8, U1, U8, Packed, RowBatch
from precompute.store.online.redis.buckets import (
    DAMAGED,
    FEW,
    FIELD_BYTES,
    NAME_BYTES,
    Buckets,
    field_of,
    fields,
    names,
)
from precompute.store.online.redis.link import packed
from precompute.store.online.redis.replies import Refused

SLOTS = 16384
Node = tuple[str, int]


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


@dataclass(frozen=True)
class SlotMap:
    """Which master has which slot: ``owners`` int16 [16384] are positions in ``masters``; -1 where
    nobody has it."""

    masters: tuple[Node, ...]
    owners: npt.NDArray[np.int16]

    @classmethod
    def of(cls, reply: Sequence[Any], answered_by: Node) -> SlotMap:
        """From the reply of CLUSTER SLOTS; a server that does not know its own name is the one that
        was requested."""
        masters: list[Node] = []
        owners = np.full(SLOTS, -1, np.int16)
        for first, last, master, *_ in reply:
            host = (master[0] or b"").decode()
            node = (answered_by[0] if host in ("", "?") else host, int(master[1]))
            if node not in masters:
                masters.append(node)
            owners[first : last + 1] = masters.index(node)
        return cls(tuple(masters), owners)

    def moved(self, slot: int, node: Node) -> SlotMap:
        """The map with a slot at another server."""
        masters = self.masters if node in self.masters else (*self.masters, node)
        owners = self.owners.copy()
        owners[slot] = masters.index(node)
        return SlotMap(masters, owners)

    @property
    def uncovered(self) -> int:
        """How many slots nobody has."""
        return int((self.owners < 0).sum())


def target(refused: Refused, answered_by: Node) -> Node:
    """Where a MOVED or ASK points to: ``MOVED 3999 127.0.0.1:6381``."""
    host, _, port = str(refused).split()[2].rpartition(":")
    return (answered_by[0] if host in ("", "?") else host), int(port)


MSET_KEYS = 128
"""Keys per MSET: 100 to 256 cost the server 2.2 µs a key, single SETs 3.4."""
BLOCK_BYTES = 2**20
"""Sent at once, about: large enough that a block costs nothing, small enough that several in flight
are no memory."""
SLICE_ROWS = 8192
"""Rows that are laid out together, at most: what is done again after a kill is counted in them."""
BUCKETS_SLICE_ROWS = 131_072
"""The same of rows in buckets, as many as there are in 6 MB: of a million rows each of its buckets
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

    @property
    def replies(self) -> int:
        """How many commands they are."""
        return len(self.starts) - 1

    def rows_of(self, command: int) -> I8:
        """Positions of one command's rows."""
        return self.positions[self.starts[command] : self.starts[command + 1]]


@dataclass(frozen=True)
class Layout:
    """How the rows of one generation lie in Redis: under keys that begin with ``prefix``, each
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
        """A command for each key that asks for its row; replies are to be read by :meth:`found`."""
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
        """Commands that ask one server for rows, and how many they are: it has one for many
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
        """For each key a command's beginning up to its field, uint8 [n, bytes]."""
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
        cells = block[:, len(head) :].reshape(count, together, width)
        at = 0
        for constant, strings, size in (
            (before, keys, key_bytes),
            (between, rows, row_bytes),
            (after, None, 0),
        ):
            cells[..., at : at + len(constant)] = np.frombuffer(constant, np.uint8)
            at += len(constant)
            if strings is not None:
                cells[..., at : at + size] = _gathered(strings, part, size).reshape(
                    count, together, size
                )
                at += size
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


def _beside(count: int, columns: Sequence[bytes | U1]) -> U1:
    """Constants and uint8 [n, bytes], one beside the other."""
    cells = np.empty(
        (count, sum(c.shape[1] if isinstance(c, np.ndarray) else len(c) for c in columns)), np.uint8
    )
    at = 0
    for column in columns:
        part = column if isinstance(column, np.ndarray) else np.frombuffer(column, np.uint8)
        cells[:, at : at + part.shape[-1]] = part
        at += part.shape[-1]
    return cells
