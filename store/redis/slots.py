"""Slots: which of a cluster's 16,384 slots a key lies in, and which server has it."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from precompute.store.online.packed import I8, Packed
from precompute.store.redis.replies import Refused

SLOTS = 16384
Node = tuple[str, int]


def slot_of(key: bytes | str) -> int:
    """A key's slot: CRC-16 (XMODEM, as ``binascii.crc_hqx``) of the text between its first braces, or of all of it where there is none there."""
    key = key.encode() if isinstance(key, str) else key
    opened = key.find(b"{")
    closed = key.find(b"}", opened + 1) if opened >= 0 else -1
    if closed > opened + 1:
        key = key[opened + 1 : closed]
    return crc_hqx(key, 0) % SLOTS


def row_slots(prefix: bytes, keys: Sequence[bytes] | Packed) -> I8:
    """Slots of rows' keys under a prefix that has empty braces: of all of each key. int64 [n]; 0.2 µs a key.

    The checksum goes on from the prefix's, and stays in C: in numpy, byte by byte of all keys at once, it takes as long."""
    begun = crc_hqx(prefix, 0)
    strings = keys.strings() if isinstance(keys, Packed) else keys
    return np.fromiter((crc_hqx(key, begun) for key in strings), np.int64, len(keys)) % SLOTS


@dataclass(frozen=True)
class SlotMap:
    """Which master has which slot: ``owners`` int16 [16384] are positions in ``masters``; -1 where nobody has it."""

    masters: tuple[Node, ...]
    owners: npt.NDArray[np.int16]

    @classmethod
    def of(cls, reply: Sequence[Any], asked: Node) -> SlotMap:
        """From the reply of CLUSTER SLOTS; a server that does not know its own name is the one that was asked."""
        masters: list[Node] = []
        owners = np.full(SLOTS, -1, np.int16)
        for first, last, master, *_ in reply:
            host = (master[0] or b"").decode()
            node = (asked[0] if host in ("", "?") else host, int(master[1]))
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


def target(refused: Refused, asked: Node) -> Node:
    """Where a MOVED or ASK points to: ``MOVED 3999 127.0.0.1:6381``."""
    host, _, port = str(refused).split()[2].rpartition(":")
    return (asked[0] if host in ("", "?") else host), int(port)
