"""Found rows: what an online store holds for the keys of one read, before anybody verified it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

from precompute.store.online import kernels
from precompute.store.online.packed import I8, U1, U8, Buffer, Packed


class PackedKeys(Sequence[bytes]):
    """Keys of one read, all of them such as an entity can have: ``packed`` with their ``hashes``
    (xxh3_64, uint64 [n]); as bytes one by one when requested.

    Args:
        texts: the keys.
        packed: their UTF-8.
        hashes: of that.
    """

    __slots__ = ("_strings", "_texts", "hashes", "packed")

    def __init__(self, texts: Sequence[str], packed: Packed, hashes: U8) -> None:
        self._texts, self.packed, self.hashes = texts, packed, hashes
        self._strings: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return self._all()[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._all())

    def _all(self) -> list[bytes]:
        if self._strings is None:
            self._strings = list(map(str.encode, self._texts))
        return self._strings


@dataclass(frozen=True, slots=True)
class WholeColumns:
    """The values of n rows as columns: each row's :class:`precompute.store.online.codec.State`,
    uint8 [n]; when it was computed, int64 [n] µs, 0 where it is not whole; how many are ``whole``;
    and the bytes of each field's values, zeros where the row is not whole.
    """

    states: U1
    computed_at_us: I8
    whole: int
    values: list[U1]

    def has_no_nulls(self) -> bool:
        """Whether all values are there; the first field are the rows' null bits."""
        null_bits = self.values[0].tobytes()
        return null_bits.count(0) == len(null_bits)


class Reader(Protocol):
    """What makes columns of rows: :class:`precompute.store.online.column_reader.ColumnReader`."""

    def of_rows(
        self, rows: Packed, key_hashes: U8, damaged: npt.NDArray[np.bool_] | None = None
    ) -> WholeColumns:
        """Of packed rows."""

    def of_tables(
        self, tables: Sequence[kernels.Records], keys: Packed, key_hashes: U8
    ) -> WholeColumns:
        """Of rows that lie in mapped files."""


class FoundRows:
    """A packed row or none for each key, in the keys' order. As a list for few keys, in one buffer
    for many: made the one from the other when requested.

    Args:
        keys: what was looked for.
        values: the rows, None for a missing one; or
        packed: the rows, an empty string for a missing one; or neither, where :meth:`_read` brings
            them.
        hashes: xxh3_64 of the keys, where the store had use for them.
        damaged: bool [n], where the store itself saw that it cannot tell.
    """

    __slots__ = ("_damaged", "_hashes", "_packed", "_values", "keys")

    def __init__(
        self,
        keys: Sequence[bytes],
        values: list[Buffer | None] | None = None,
        packed: Packed | None = None,
        hashes: U8 | None = None,
        damaged: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self.keys, self._values, self._packed, self._hashes, self._damaged = (
            keys,
            values,
            packed,
            hashes,
            damaged,
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def values(self) -> list[Buffer | None]:
        """The rows, None for a missing one."""
        if self._values is None:
            self._values = [string if len(string) else None for string in self.packed.strings()]
        return self._values

    @property
    def packed(self) -> Packed:
        """The rows in one buffer, an empty string for a missing one."""
        if self._packed is None:
            self._packed, self._damaged = self._read()
        return self._packed

    @property
    def damaged(self) -> npt.NDArray[np.bool_] | None:
        """Where the store itself saw that it cannot tell, bool [n]; None: nowhere."""
        if self._packed is None and self._values is None:
            self._packed, self._damaged = self._read()
        return self._damaged

    def _read(self) -> tuple[Packed, npt.NDArray[np.bool_] | None]:
        """``packed`` and ``damaged``, when they are first requested."""
        assert self._values is not None
        # An empty row is none that was ever loaded: one byte instead, which is no row either, and
        # is not taken for a missing one.
        return (
            Packed.of([b"" if value is None else value or b"\0" for value in self._values]),
            self._damaged,
        )

    @property
    def hashes(self) -> U8:
        """xxh3_64 of the keys, uint64 [n]."""
        if self._hashes is None:
            self._hashes = (
                self.keys.hashes
                if isinstance(self.keys, PackedKeys)
                else kernels.hashes(Packed.of(self.keys))
            )
        return self._hashes

    def columns(self, reader: Reader) -> WholeColumns:
        """The rows' values as columns, of those rows that are whole: in one step, for who wants
        nothing else of them."""
        return reader.of_rows(self.packed, self.hashes, self.damaged)


def overlaid(base: FoundRows, overlay: FoundRows) -> FoundRows:
    """What stands for the same keys: the overlay's row, a tombstone too, and the base's where the
    overlay has none."""
    values = [
        under if over is None else over
        for under, over in zip(base.values, overlay.values, strict=True)
    ]
    damaged = base.damaged
    if damaged is not None:
        damaged = damaged & np.fromiter(
            (over is None for over in overlay.values), np.bool_, len(values)
        )
    if overlay.damaged is not None:
        damaged = overlay.damaged if damaged is None else damaged | overlay.damaged
    return FoundRows(base.keys, values, hashes=base._hashes, damaged=damaged)
