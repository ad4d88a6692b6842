"""Found rows: what an online store holds for the keys of one read, before anybody verified it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from store.online import kernels
from store.online.packed import U8, Buffer, Packed


class FoundRows:
    """A packed row or none for each key, in the keys' order. As a list for few keys, in one buffer for many: made the one from the other when asked for.

    Args:
        keys: what was looked for.
        values: the rows, None for a missing one; or
        packed: the rows, an empty string for a missing one.
        hashes: xxh3_64 of the keys, where the store had use for them.
        damaged: bool [n], where the store itself saw that it cannot tell.
    """

    __slots__ = ("_hashes", "_packed", "_values", "damaged", "keys")

    def __init__(
        self,
        keys: Sequence[bytes],
        values: list[Buffer | None] | None = None,
        packed: Packed | None = None,
        hashes: U8 | None = None,
        damaged: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self.keys, self._values, self._packed, self._hashes, self.damaged = keys, values, packed, hashes, damaged

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def values(self) -> list[Buffer | None]:
        """The rows, None for a missing one."""
        if self._values is None:
            assert self._packed is not None
            self._values = [string if len(string) else None for string in self._packed.strings()]
        return self._values

    @property
    def packed(self) -> Packed:
        """The rows in one buffer, an empty string for a missing one."""
        if self._packed is None:
            assert self._values is not None
            # An empty row is none that was ever loaded: one byte instead, which is no row either, and is not taken for a missing one.
            self._packed = Packed.of([b"" if value is None else value or b"\0" for value in self._values])
        return self._packed

    @property
    def hashes(self) -> U8:
        """xxh3_64 of the keys, uint64 [n]."""
        if self._hashes is None:
            self._hashes = kernels.hashes(Packed.of(self.keys))
        return self._hashes


def overlaid(base: FoundRows, overlay: FoundRows) -> FoundRows:
    """What stands for the same keys: the overlay's row, a tombstone too, and the base's where the overlay has none."""
    values = [under if over is None else over for under, over in zip(base.values, overlay.values, strict=True)]
    damaged = base.damaged
    if damaged is not None:
        damaged = damaged & np.fromiter((over is None for over in overlay.values), np.bool_, len(values))
    if overlay.damaged is not None:
        damaged = overlay.damaged if damaged is None else damaged | overlay.damaged
    return FoundRows(base.keys, values, damaged=damaged)
