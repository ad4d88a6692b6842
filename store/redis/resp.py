"""RESP by the block: rows on their way into Redis are laid out as its protocol in numpy, one copy a row and no Python a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from store.online.packed import I8, U1, Packed

MSET_KEYS = 128
"""Keys per MSET: 100 to 256 cost the server 2.2 µs a key, single SETs 3.4."""
BLOCK_BYTES = 2**20
"""Sent at once, about: large enough that a block costs nothing, small enough that several in flight are no memory."""
SLICE_ROWS = 8192
"""Rows that are laid out together, at most: what is done again after a kill is counted in them."""


JOINED_BELOW = 32
"""Rows of one width under keys of one length that are fewer are joined with others: a matrix of its own takes as long as 30 of them."""


@dataclass(frozen=True, slots=True)
class Block:
    """Commands ready to be sent, and how many they are. ``positions`` are those of their rows among ``keys`` and ``rows``, in the commands' order, ``together`` in
    each command (the last may have fewer)."""

    data: memoryview | bytes
    replies: int
    positions: I8
    together: int
    keys: Packed
    rows: Packed

    def rows_of(self, command: int) -> I8:
        """Positions of one command's rows."""
        return self.positions[command * self.together : (command + 1) * self.together]


def blocks(keys: Packed, rows: Packed, prefix: bytes, positions: I8 | None = None, together: int = MSET_KEYS) -> Iterator[Block]:
    """Rows as commands that store each under ``prefix`` and its key, in no particular order.

    Args:
        keys: of all rows.
        rows: equally many.
        prefix: before each key.
        positions: of those that are meant, ascending; all by default.
        together: rows per MSET; 1 for a SET each, which is what a cluster takes: its nodes refuse an MSET over several slots.
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


def _matrices(keys: Packed, rows: Packed, positions: I8, prefix: bytes, together: int) -> Iterator[Block]:
    """Rows of one width under keys of one length, a whole number of commands of them: a matrix of bytes, whose columns are constant but for two."""
    key_bytes, row_bytes = int(keys.sizes[positions[0]]), int(rows.sizes[positions[0]])
    single = together == 1
    head = b"" if single else b"*%d\r\n$4\r\nMSET\r\n" % (2 * together + 1)
    before = (b"*3\r\n$3\r\nSET\r\n" if single else b"") + b"$%d\r\n" % (len(prefix) + key_bytes) + prefix
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
        for constant, strings, size in ((before, keys, key_bytes), (between, rows, row_bytes), (after, None, 0)):
            cells[..., at : at + len(constant)] = np.frombuffer(constant, np.uint8)
            at += len(constant)
            if strings is not None:
                cells[..., at : at + size] = _gathered(strings, part, size).reshape(count, together, size)
                at += size
        yield Block(memoryview(block.reshape(-1).data), count, part, together, keys, rows)


def _gathered(strings: Packed, positions: I8, size: int) -> U1:
    """Strings of one size, uint8 [n, size]; without a copy where they lie one behind the other."""
    first, last = int(positions[0]), int(positions[-1])
    start, stop = int(strings.offsets[first]), int(strings.offsets[last + 1])
    if stop - start == len(positions) * size:
        return strings.data[start:stop].reshape(-1, size)
    starts = strings.offsets[:-1][positions]
    windows = np.lib.stride_tricks.as_strided(strings.data, (max(1, len(strings.data) - size + 1), size), (1, 1), writeable=False)
    return windows[starts]


def _joined(keys: Packed, rows: Packed, positions: I8, prefix: bytes, together: int) -> Iterator[Block]:
    """Rows of many widths: the pieces of their commands, joined. A µs a row."""
    key_at, row_at = keys.offsets.tolist(), rows.offsets.tolist()
    key_data, row_data = memoryview(keys.data.data), memoryview(rows.data.data)
    pieces: list[bytes | memoryview] = []
    size = first = 0
    for start in range(0, len(positions), together):
        part = positions[start : start + together].tolist()
        pieces.append(b"*3\r\n$3\r\nSET\r\n" if together == 1 else b"*%d\r\n$4\r\nMSET\r\n" % (2 * len(part) + 1))
        for i in part:
            key, row = key_data[key_at[i] : key_at[i + 1]], row_data[row_at[i] : row_at[i + 1]]
            pieces += (b"$%d\r\n" % (len(prefix) + len(key)), prefix, key, b"\r\n$%d\r\n" % len(row), row, b"\r\n")
            size += len(row)
        stop = start + len(part)
        if size >= BLOCK_BYTES or stop == len(positions):
            meant = positions[first:stop]
            yield Block(b"".join(pieces), -(-len(meant) // together), meant, together, keys, rows)
            pieces, size, first = [], 0, stop
