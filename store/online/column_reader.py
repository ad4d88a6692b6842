"""Column reader: the values of rows of one size, verified and put into Arrow's buffers in one pass
over the rows; strings and lists go by the codec."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.feature_view import Feature
from precompute.store.online import kernels
from precompute.store.online.codec import RowCodec
from precompute.store.online.found_rows import WholeColumns
from precompute.store.online.kernels import DAMAGED, FOUND, LINE_BYTES, Records
from precompute.store.online.packed import U1, U8, Packed
from precompute.store.online.row_values import (
    NUMPY_TYPES,
    fixed_array,
    stored_layout,
    unpacked_vectors,
)


class ColumnReader:
    """Reads some features of a view whose rows are all of one size: what :meth:`FoundRows.columns`
    is given.

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
            # what has expired is nobody's business
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
