"""Found rows: what an online store returned for the keys of one read, verified, and as Arrow
columns in one pass over the rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.feature_view import Feature
from precompute.store.online import kernels
from precompute.store.online.codec import RowCodec, State
from precompute.store.online.kernels import (
    DAMAGED,
    FOUND,
    I8,
    LINE_BYTES,
    U1,
    U8,
    Buffer,
    Packed,
    Records,
)
from precompute.store.online.row_values import (
    NUMPY_TYPES,
    fixed_array,
    stored_layout,
    unpacked_vectors,
)


class PackedKeys(Sequence[bytes]):
    """Keys of one read, all of them such as an entity can have: ``packed`` with their ``hashes``
    (xxh3_64, uint64 [n]); as bytes one by one on first use.

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
    """The values of n rows as columns: each row's :class:`State`,
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


class FoundRows:
    """A packed row or none for each key, in the keys' order. As a list for few keys, in one buffer
    for many: made the one from the other on first use.

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
        """``packed`` and ``damaged``, made on first use."""
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

    def columns(self, reader: ColumnReader) -> WholeColumns:
        """The rows' values as columns, of those rows that are whole: in one step, where nothing
        else of them is wanted."""
        return reader.of_rows(self.packed, self.hashes, self.damaged)

    def verified(
        self, codec: RowCodec, snapshots: Collection[int]
    ) -> tuple[npt.NDArray[np.uint8], I8]:
        """Each row's :class:`State`, uint8 [n], and when it was computed, int64 [n] µs, 0 where it
        is not whole.

        Args:
            codec: of the view.
            snapshots: numbers of those whose rows are read; a row of another one is damaged.
        """
        states, computed_at = kernels.verified(
            self.packed,
            self.hashes,
            codec.schema_tag,
            snapshots,
            codec.fixed_bytes,
            exact=codec.exact,
        )
        if self.damaged is not None:
            states[self.damaged], computed_at[self.damaged] = State.DAMAGED, 0
        return states, computed_at

    def verified_one(self, codec: RowCodec, snapshots: Collection[int]) -> tuple[State, int]:
        """As :meth:`verified` for a read of one key: 2 µs where many at once take 30."""
        row = self.values[0]
        if self.damaged is not None and self.damaged[0]:
            return State.DAMAGED, 0
        if row is None:
            return State.ABSENT, 0
        state, computed_at = kernels.verified_one(
            row,
            kernels.hash_of(self.keys[0]),
            codec.schema_tag,
            snapshots,
            codec.fixed_bytes,
            codec.exact,
        )
        return _STATES[state], computed_at


_STATES = (State.ABSENT, State.WHOLE, State.DAMAGED)


class ColumnReader:
    """Reads some features of a view whose rows are all of one size: what :meth:`FoundRows.columns`
    is given. Strings and lists go by the codec.

    Build it once per snapshot and features; it is immutable and safe to share between threads.

    Args:
        codec: of the view, without strings and lists (``codec.exact``).
        snapshots: numbers of those whose rows are read; a row of another one is damaged.
        features: which, in which order; all by default.
    """

    def __init__(
        self, codec: RowCodec, snapshots: Collection[int], features: Sequence[str] | None = None
    ) -> None:
        assert codec.exact
        names = [f.name for f in codec.features] if features is None else features
        self._features = [codec.number_of(name) for name in names]
        self._codec, self._snapshots = codec, np.fromiter(snapshots, np.uint32, len(snapshots))
        kinds = [_stored_as(codec.features[i]) for i in self._features]
        firsts = [
            str(i) if codec.features[i].packed is None else f"{i}:scale" for i in self._features
        ]
        self._kinds = dict(zip(self._features, kinds, strict=True))
        fields = codec.record_type.fields
        assert fields is not None
        # the null bits, and each feature's value: where in a row it begins, and its bytes
        ends = [fields[str(i)][1] + codec.record_type[str(i)].itemsize for i in self._features]
        self._places = [(fields["nulls"][1], codec.record_type["nulls"].itemsize)]
        self._places += [
            (fields[first][1], end - fields[first][1])
            for first, end in zip(firsts, ends, strict=True)
        ]
        self._fields = np.array(self._places, np.uint64)

    # ---- rows → columns

    def of_rows(
        self, rows: Packed, key_hashes: U8, damaged: npt.NDArray[np.bool_] | None = None
    ) -> WholeColumns:
        """The values of packed rows.

        Args:
            rows: as a store returned them, an empty string for a missing one.
            key_hashes: ``hashes`` of the keys that they were requested by, uint64 [n].
            damaged: bool [n], where the store itself could not tell.
        """
        if kernels.native is None:
            columns = self._by_numpy(rows, key_hashes)
        else:
            room = _Room(len(rows), self._places)
            whole = kernels.native.columns(
                rows.data, rows.offsets, key_hashes, *self._expected(), *room.buffers
            )
            columns = room.columns(whole)
        if damaged is not None and damaged.any():
            columns.states[damaged], columns.computed_at_us[damaged] = DAMAGED, 0
            columns = WholeColumns(
                columns.states,
                columns.computed_at_us,
                int((columns.states == FOUND).sum()),
                columns.values,
            )
        return columns

    def of_tables(self, tables: Sequence[Records], keys: Packed, key_hashes: U8) -> WholeColumns:
        """The values of the keys' rows, each of the first table that has something of the key."""
        first, *below = tables
        if first.native is None:
            rows, states = first.read(keys, key_hashes, below)
            return self.of_rows(rows, key_hashes, states == DAMAGED)
        room = _Room(len(keys), self._places)
        natives = tuple(table.native for table in below)
        return room.columns(
            first.native.columns(
                natives, keys.data, keys.offsets, key_hashes, *self._expected(), *room.buffers
            )
        )

    def _expected(self) -> tuple[int, npt.NDArray[np.uint32], int, npt.NDArray[np.uint64]]:
        return self._codec.schema_tag, self._snapshots, self._codec.fixed_bytes, self._fields

    def _by_numpy(self, rows: Packed, key_hashes: U8) -> WholeColumns:
        size = self._codec.fixed_bytes
        states, computed_at = kernels.verified(
            rows, key_hashes, self._codec.schema_tag, self._snapshots.tolist(), size, exact=True
        )
        there = np.flatnonzero(states == FOUND)
        if len(there) == len(rows):
            first = int(rows.offsets[0])
            whole = rows.data[first : first + size * len(rows)].reshape(-1, size)
        else:
            whole = np.zeros((len(rows), size), np.uint8)
            for i, start in zip(there.tolist(), rows.offsets[there].tolist(), strict=True):
                whole[i] = rows.data[start : start + size]
        values = [whole[:, at : at + width].reshape(-1) for at, width in self._places]
        return WholeColumns(states, computed_at, len(there), values)

    # ---- columns → Arrow

    def arrays(
        self, columns: WholeColumns, present: npt.NDArray[np.bool_] | None = None
    ) -> list[pa.Array]:
        """An Arrow column a feature; null where the value is, and where ``present``, bool [n],
        which only whole rows may be, is not. All are by default."""
        nulls, *values = columns.values
        count = len(columns.states)
        null_bytes = nulls.reshape(count, -1)
        some_null = bool(nulls.any())
        arrays = []
        for i, bytes_of in zip(self._features, values, strict=True):
            valid = present
            if some_null:
                values_there = (null_bytes[:, i // 8] >> (i % 8)) & 1 == 0
                if not values_there.all():
                    valid = values_there if present is None else values_there & present
            arrays.append(self._array(i, bytes_of, count, present, valid))
        return arrays

    def _array(
        self,
        i: int,
        data: U1,
        count: int,
        present: npt.NDArray[np.bool_] | None,
        valid: npt.NDArray[np.bool_] | None,
    ) -> pa.Array:
        f, kind = self._codec.features[i], self._kinds[i]
        if f.packed is not None:
            stored = data.view(kind)
            values = unpacked_vectors(f, stored["scale"], stored["values"])
        else:
            values = data.view(kind) if f.dim is None else data.view(kind).reshape(count, f.dim)
        if present is not None:
            # an expired row's values are not shown
            values = np.where(
                present if f.dim is None else present[:, None], values, values.dtype.type(0)
            )
        return fixed_array(f, self._codec.arrow_types[i], values, valid)


class _Room:
    """Memory for the columns of so many rows, each column from a line of 64 bytes on."""

    def __init__(self, rows: int, places: Sequence[tuple[int, int]]) -> None:
        self._sizes = [width * rows for _, width in places]
        self._data = np.empty(sum(_lines(size) for size in self._sizes), np.uint8)
        self._states, self._computed_at = np.empty(rows, np.uint8), np.empty(rows, np.int64)
        self.buffers = self._data, self._states, self._computed_at

    def columns(self, whole: int) -> WholeColumns:
        values, start = [], 0
        for size in self._sizes:
            values.append(self._data[start : start + size])
            start += _lines(size)
        return WholeColumns(self._states, self._computed_at, whole, values)


def _lines(size: int) -> int:
    return -(-size // LINE_BYTES) * LINE_BYTES


def _stored_as(f: Feature) -> np.dtype[Any]:
    """What numpy reads a scalar, or a number of a vector, as; a packed vector as ``scale`` and
    ``values``."""
    if f.packed is None:
        return np.dtype(NUMPY_TYPES[f.dtype])
    return np.dtype([("scale", "<f4"), ("values", *stored_layout(f))])
