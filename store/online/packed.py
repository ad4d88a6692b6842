"""Packed: many byte strings in one buffer: keys and rows to and from an online store."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
"""What a generation is loaded from: every key once, in any order."""
