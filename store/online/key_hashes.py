"""Key hashes: which keys the upper segments of a list have, so that a reader asks each key of one
segment alone, and takes no older row for one that was lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from precompute.store.online.kernels import U1, U8, hash_of

_CHECK_BYTES = 8


def packed(hashes: Iterable[U8]) -> bytes:
    """xxh3_64 of keys, uint64 [n] each, as the store keeps them: a checksum, then all of them in
    their order, 8 bytes each, little-endian."""
    body = np.sort(np.concatenate([np.empty(0, np.uint64), *hashes])).astype("<u8").tobytes()
    return hash_of(body).to_bytes(_CHECK_BYTES, "little") + body


def unpacked(data: bytes) -> U8:
    """What :func:`packed` was given, in order, uint64 [n].

    Raises:
        ValueError: its bytes are not those that were written.
    """
    body = memoryview(data)[_CHECK_BYTES:]
    if len(data) < _CHECK_BYTES or hash_of(body) != int.from_bytes(data[:_CHECK_BYTES], "little"):
        raise ValueError("its bytes are not those that were written")
    return np.frombuffer(body, "<u8")


@dataclass(frozen=True, slots=True)
class KeyHashes:
    """The keys of the upper segments of a list: ``hashes`` uint64 [n] in order, each once, and the
    highest segment that has each, ``highest`` uint8 [n], 1 being the lowest but one of the list.
    Two keys of one hash are taken for one once in 2⁶⁴ pairs."""

    hashes: U8
    highest: U1

    @classmethod
    def of(cls, uppers: Sequence[U8]) -> KeyHashes:
        """Of upper segments, the lowest first: the hashes of each in order."""
        every = np.concatenate([np.empty(0, np.uint64), *uppers[::-1]])
        numbers = np.arange(len(uppers), 0, -1, dtype=np.uint8)
        highest = np.repeat(numbers, [len(one) for one in uppers[::-1]])
        # of equal ones the highest segment's comes first
        order = np.argsort(every, kind="stable")
        every, highest = every[order], highest[order]
        first = np.append(np.ones(min(1, len(every)), np.bool_), every[1:] != every[:-1])
        return cls(every[first], highest[first])

    def segments(self, hashes: U8) -> U1:
        """The segment of the list that each key is to be looked for in, by its hash, uint8 [n]; 0
        is the lowest. 500 keys among 40,000 in 20 µs."""
        if not len(self.hashes):
            return np.zeros(len(hashes), np.uint8)
        at = np.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)
        found: U1 = np.where(self.hashes[at] == hashes, self.highest[at], 0).astype(np.uint8)
        return found

    def segment(self, key_hash: int) -> int:
        """As :meth:`segments`, of one key: 2 µs."""
        wanted = np.uint64(key_hash)
        at = int(self.hashes.searchsorted(wanted))
        there = at < len(self.hashes) and self.hashes[at] == wanted
        return int(self.highest[at]) if there else 0
