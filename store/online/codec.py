"""Row codec: a view's features as one packed little-endian row per key, vectorised both ways."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.disk.record import FORMAT
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.keys import key_column
from precompute.store.online import kernels
from precompute.store.online.kernels import I8, U1, U8, Buffer, Packed, RowBatch
from precompute.store.online.row_values import (
    LONG_BYTES,
    NUMPY_TYPES,
    STRUCT_TYPES,
    assembled,
    damaged_row,
    fixed_array,
    fixed_values,
    is_string_list,
    is_variable,
    list_offsets,
    one_value,
    packed_strings,
    packed_vectors,
    put_pieces,
    scattered,
    stored_layout,
    strings,
    take_pieces,
    unpacked_vectors,
    variable_parts,
)

HEADER_BYTES = kernels.HEADER_BYTES
CHECKSUM_BYTES = kernels.CHECKSUM_BYTES

_INT64 = struct.Struct("<q")
_NARROW = {"float16": np.float16, "float32": np.float32}
_NO_STARTS: I8 = np.empty(0, np.int64)


class State(IntEnum):
    """What a store has for a key."""

    ABSENT = kernels.ABSENT
    """Nothing, or a tombstone."""
    WHOLE = kernels.FOUND
    DAMAGED = kernels.DAMAGED


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """What :meth:`RowCodec.decode` read, an entry for each row: missing ones are null or zero."""

    computed_at_us: I8
    columns: list[pa.Array]


def schema_tag(view: FeatureView) -> int:
    """CRC-32 of format and features: it distinguishes rows of one schema from another's."""
    return zlib.crc32(repr([FORMAT, [_layout_of(f) for f in view.features]]).encode())


class RowCodec:
    """Packs and unpacks the rows of one view.

        row           = header · null bits · fixed part · variable part
        header        = checksum uint64 · computed_at int64 (µs since 1970, UTC) · snapshot uint32
                        · schema tag uint32, 24 bytes
        null bits     = one bit a feature, lowest first, rounded up to bytes
        fixed part    = scalars and vectors in declared order, a vector that is ``packed`` as its
                        scale (float32) and its int8 or bits; of a string or list its bytes, uint32
        variable part = the bytes of strings and lists, in declared order; a list of strings is its
                        lengths, then its text

    A row vouches for itself: the checksum is xxh3_64 of all behind it, XOR xxh3_64 of its key, so
    that a flipped bit and another key's row are seen. A row written for another schema
    (:func:`schema_tag`) is refused instead of read as noise. A **tombstone** is a header alone.

    No padding: a row of 384 float32 has 24 + 1 + 1,536 bytes. 24 bytes of header keep a vector of
    64, 128, 384, 768 or 1,024 numbers inside the jemalloc size class in Redis that 16 would take
    (of 768 bytes: 896).

    Build it once per view and snapshot; it is immutable and safe to share between threads.
    """

    def __init__(self, view: FeatureView) -> None:
        self.features = view.features
        self.schema_tag = schema_tag(view)
        self.arrow_types = [f.arrow_type for f in self.features]
        """The Arrow type of each feature; making one takes 2 µs."""
        self._null_bytes = (len(self.features) + 7) // 8
        fields: list[tuple[str, str] | tuple[str, str, tuple[int]]] = [
            ("checksum", "<u8"),
            ("computed_at", "<i8"),
            ("snapshot", "<u4"),
            ("tag", "<u4"),
            ("nulls", "u1", (self._null_bytes,)),
        ]
        fmt = f"<QqII{self._null_bytes}s"
        self._slots: list[tuple[int, str]] = []
        """(Feature, field holding the byte size), in the order of the variable part."""
        self._positions: list[int] = []
        """Per feature: where it stands in the unpacked tuple, a vector as its bytes."""
        position = 5
        for i, f in enumerate(self.features):
            self._positions.append(position)
            if is_variable(f):
                names = [f"{i}:lengths", f"{i}"] if is_string_list(f) else [f"{i}"]
                for name in names:
                    fields.append((name, "<u4"))
                    self._slots.append((i, name))
                fmt += "I" * len(names)
                position += len(names)
            elif f.packed is not None:
                kind, width = stored_layout(f)
                fields += [(f"{i}:scale", "<f4"), (f"{i}", kind, (width,))]
                fmt += f"f{width}s"
                position += 2
            elif f.dim is not None:
                fields.append((f"{i}", NUMPY_TYPES[f.dtype], (f.dim,)))
                fmt += f"{np.dtype(NUMPY_TYPES[f.dtype]).itemsize * f.dim}s"
                position += 1
            else:
                fields.append((f"{i}", NUMPY_TYPES[f.dtype]))
                fmt += STRUCT_TYPES[f.dtype]
                position += 1
        self.record_type = np.dtype(fields)
        """The fixed part of a row, header and all: ``nulls``; by its number each scalar, vector or
        size in bytes; ``3:scale`` of a packed vector 3."""
        self._struct = struct.Struct(fmt)
        self.fixed_bytes = self.record_type.itemsize

    @property
    def exact(self) -> bool:
        """Whether all rows are of one size, ``fixed_bytes``: no feature is a string or a list."""
        return not self._slots

    # ---- Arrow → bytes

    def row_batch(self, batch: pa.RecordBatch, entity: Sequence[str], snapshot: int) -> RowBatch:
        """Rows of a snapshot on their way into an online store.

        Args:
            batch: with the columns of the entity, the features and ``computed_at``.
            entity: names of the key columns.
            snapshot: number of the snapshot.
        """
        keys = packed_strings(key_column(batch, entity))
        hashed = kernels.hashes(keys)
        computed_at = np.asarray(batch.column("computed_at").cast(pa.int64()))
        return RowBatch(keys, self.encode(batch, hashed, computed_at, snapshot), hashed)

    def encode(
        self, batch: pa.RecordBatch, key_hashes: U8, computed_at_us: I8, snapshot: int | I8
    ) -> Packed:
        """Packed rows of ``batch``'s feature columns.

        Args:
            batch: holds a column per feature, in any order, other columns beside them; may be a
                slice.
            key_hashes: xxh3_64 of each row's key, uint64 [rows].
            computed_at_us: int64 [rows], µs since 1970 in UTC.
            snapshot: number of the snapshot, at most 2³² − 1; of each row, where they differ.
        """
        rows = batch.num_rows
        if not rows:
            return Packed.of([])
        nulls = np.zeros((rows, self._null_bytes), np.uint8)
        columns: list[npt.NDArray[Any]] = [nulls]
        blobs: list[tuple[U1, I8]] = []
        for i, f in enumerate(self.features):
            column = batch.column(f.name)
            if column.null_count:
                nulls[:, i // 8] |= np.asarray(column.is_null()).astype(np.uint8) << (i % 8)
            if is_variable(f):
                parts = variable_parts(f, column)
                blobs.extend(parts)
                columns += [sizes.astype("<u4") for _, sizes in parts]
            elif f.packed is not None:
                columns += packed_vectors(f, fixed_values(f, column))
            else:
                columns.append(fixed_values(f, column))
        fixed = assembled(
            columns, key_hashes, computed_at_us, np.full(rows, snapshot, np.uint32), self.schema_tag
        )
        return fixed if not blobs else self._lengthened(fixed, blobs, key_hashes)

    def tombstones(self, keys: pa.Array, removed_at_us: int, snapshot: int) -> RowBatch:
        """A tombstone for each key text that left: what an upper segment has in place of a
        row."""
        packed_keys = packed_strings(keys)
        key_hashes = kernels.hashes(packed_keys)
        header = np.zeros(len(key_hashes), kernels.ROW_HEADER)
        header["computed_at"], header["snapshot"], header["tag"] = (
            removed_at_us,
            snapshot,
            self.schema_tag,
        )
        packed = Packed(header.view(np.uint8), np.arange(len(header) + 1) * HEADER_BYTES)
        header["checksum"] = kernels.hashes(packed, CHECKSUM_BYTES) ^ key_hashes
        return RowBatch(packed_keys, packed, key_hashes)

    def _lengthened(self, fixed: Packed, blobs: list[tuple[U1, I8]], key_hashes: U8) -> Packed:
        """Rows with their variable part, from those without it."""
        rows, width = len(fixed), self.fixed_bytes
        sizes = np.full(rows, width, np.int64)
        for _, lengths in blobs:
            sizes += lengths
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        data = np.empty(int(offsets[-1]), np.uint8)
        starts = offsets[:-1]
        if width < LONG_BYTES:
            data[(starts[:, None] + np.arange(width)).reshape(-1)] = fixed.data
        else:
            put_pieces(data, starts, fixed.data, np.full(rows, width, np.int64))
        position = starts + width
        for blob, lengths in blobs:
            put_pieces(data, position, blob, lengths)
            position = position + lengths
        packed = Packed(data, offsets)
        checksums = kernels.hashes(packed, CHECKSUM_BYTES) ^ key_hashes
        data[starts[:, None] + np.arange(CHECKSUM_BYTES)] = (
            checksums.astype("<u8").view(np.uint8).reshape(rows, CHECKSUM_BYTES)
        )
        return packed

    # ---- bytes → Arrow

    def decode(
        self,
        packed: Packed,
        present: npt.NDArray[np.bool_] | None = None,
        features: Sequence[str] | None = None,
    ) -> DecodedRows:
        """Arrow columns of packed rows that were found whole.

        Args:
            packed: the rows.
            present: bool [n], those that are looked at; the others become null. All by default.
            features: which features, in which order; all of them by default.

        Raises:
            OnlineStoreError: a row does not have the size its own fields say.
        """
        count = len(packed)
        shown = np.ones(count, np.bool_) if present is None else present
        data, starts, record = self._records(packed, present)
        wanted = (
            range(len(self.features))
            if features is None
            else [self.number_of(name) for name in features]
        )
        computed_at = np.ascontiguousarray(scattered(record["computed_at"], shown))
        return DecodedRows(
            computed_at, [self._column(i, data, starts, record, shown) for i in wanted]
        )

    def _records(
        self, packed: Packed, present: npt.NDArray[np.bool_] | None
    ) -> tuple[U1, I8, npt.NDArray[Any]]:
        """All bytes, where the rows that are looked at start among them, and the fixed part of
        each."""
        width, data = self.fixed_bytes, packed.data
        starts, sizes = packed.offsets[:-1], packed.sizes
        if present is not None:
            starts, sizes = starts[present], sizes[present]
        if not self._slots and present is None and packed.size_bytes == width * len(sizes):
            if sizes.tobytes() != _INT64.pack(width) * len(sizes):
                raise damaged_row("does not have the size of its view's rows")
            first = int(packed.offsets[0])
            record = data[first : first + width * len(sizes)].view(self.record_type)
            return data, _NO_STARTS, record
        if len(sizes) and (sizes.min() < width or (not self._slots and sizes.max() > width)):
            raise damaged_row("does not have the size of its view's rows")
        record = (
            _windows(data, width, starts).view(self.record_type).reshape(-1)
            if len(sizes)
            else np.empty(0, self.record_type)
        )
        expected = np.full(len(sizes), width, np.int64)
        for _, name in self._slots:
            expected += record[name]
        if not np.array_equal(expected, sizes):
            raise damaged_row("does not have the size its own fields say")
        return data, starts, record

    def _column(
        self, i: int, data: U1, starts: I8, record: npt.NDArray[Any], present: npt.NDArray[np.bool_]
    ) -> pa.Array:
        f = self.features[i]
        null_byte = record["nulls"][:, i // 8]
        complete = len(record) == len(present) and not null_byte.any()
        valid = None if complete else scattered((null_byte >> (i % 8)) & 1 == 0, present)
        if is_variable(f):
            return self._variable_column(i, data, starts, record, present, valid)
        values = (
            record[f"{i}"]
            if f.packed is None
            else unpacked_vectors(f, record[f"{i}:scale"], record[f"{i}"])
        )
        return fixed_array(
            f, self.arrow_types[i], values if valid is None else scattered(values, present), valid
        )

    def _variable_column(
        self,
        i: int,
        data: U1,
        starts: I8,
        record: npt.NDArray[Any],
        present: npt.NDArray[np.bool_],
        valid: npt.NDArray[np.bool_] | None,
    ) -> pa.Array:
        f = self.features[i]
        parts: list[tuple[U1, I8]] = []
        position = starts + self.fixed_bytes
        for feature, name in self._slots:
            lengths = record[name].astype(np.int64)
            if feature == i:
                parts.append((take_pieces(data, position, lengths), scattered(lengths, present)))
            position = position + lengths
        blob, sizes = parts[-1]
        mask = None if valid is None else pa.array(~valid)
        if f.max_items is None:
            return strings(blob, sizes, mask)
        if is_string_list(f):
            lengths_blob, lengths_sizes = parts[0]
            if (lengths_sizes % 4).any():
                raise damaged_row("has a list that is no whole number of items")
            lengths, counts = lengths_blob.view("<u4").astype(np.int64), lengths_sizes // 4
            ends = np.concatenate(([0], np.cumsum(lengths)))
            if not np.array_equal(np.diff(ends[np.concatenate(([0], np.cumsum(counts)))]), sizes):
                raise damaged_row("has a list whose items do not add up")
            items = strings(blob, lengths, None)
        else:
            itemsize = np.dtype(NUMPY_TYPES[f.dtype]).itemsize
            if (sizes % itemsize).any():
                raise damaged_row("has a list that is no whole number of items")
            items, counts = pa.array(blob.view(NUMPY_TYPES[f.dtype])), sizes // itemsize
        return pa.ListArray.from_arrays(
            pa.array(list_offsets(counts)), items, type=self.arrow_types[i], mask=mask
        )

    # ---- bytes → Python, one row

    def decode_one(
        self, value: Buffer, features: Sequence[str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """One row as plain Python: (computed_at in µs, feature name → value).

        Raises:
            OnlineStoreError: as :meth:`decode`.
        """
        computed_at_us, row = self.arrays_one(value, features)
        for name, found in row.items():
            if isinstance(found, np.ndarray):
                row[name] = tuple(found.tolist())
            elif isinstance(found, np.generic):
                row[name] = found.item()
        return computed_at_us, row

    def arrays_one(
        self, value: Buffer, features: Sequence[str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """As :meth:`decode_one`, a vector as an array of its own and a float narrower than Python's
        as a numpy scalar, which is written with the digits of its own type. 2 µs for 384
        float32; as a tuple 10, by Arrow 30.

        Raises:
            OnlineStoreError: as :meth:`decode`.
        """
        size = len(value)
        if size < self.fixed_bytes or (size != self.fixed_bytes and not self._slots):
            raise damaged_row("does not have the size of its view's rows")
        unpacked = self._struct.unpack_from(value)
        variable = self._variable_values(value, unpacked) if self._slots else {}
        nulls = unpacked[4]
        row: dict[str, Any] = {}
        for i in (
            range(len(self.features))
            if features is None
            else [self.number_of(name) for name in features]
        ):
            f = self.features[i]
            at = self._positions[i]
            if nulls[i >> 3] >> (i & 7) & 1:
                row[f.name] = None
            elif i in variable:
                row[f.name] = variable[i]
            elif f.packed is not None:
                stored = np.frombuffer(unpacked[at + 1], stored_layout(f)[0])
                row[f.name] = unpacked_vectors(
                    f, np.array([unpacked[at]], np.float32), stored[None]
                )[0]
            elif f.dim is not None:
                row[f.name] = np.frombuffer(unpacked[at], NUMPY_TYPES[f.dtype])
            else:
                narrow = _NARROW.get(f.dtype)
                row[f.name] = unpacked[at] if narrow is None else narrow(unpacked[at])
        return unpacked[1], row

    def _variable_values(self, value: Buffer, unpacked: tuple[Any, ...]) -> dict[int, Any]:
        values: dict[int, Any] = {}
        position = self.fixed_bytes
        data = bytes(value)
        for i, f in enumerate(self.features):
            if not is_variable(f):
                continue
            at = self._positions[i]
            sizes = unpacked[at : at + (2 if is_string_list(f) else 1)]
            end = position + sum(sizes)
            if end > len(data):
                raise damaged_row("does not have the size its own fields say")
            try:
                values[i] = one_value(f, data[position:end], sizes)
            except (UnicodeDecodeError, struct.error) as exc:
                raise damaged_row(f"has a {f.name} that cannot be read ({exc})") from exc
            position = end
        if position != len(data):
            raise damaged_row("does not have the size its own fields say")
        return values

    def number_of(self, name: str) -> int:
        """Number of a feature.

        Raises:
            KeyError: there is none of this name.
        """
        for i, f in enumerate(self.features):
            if f.name == name:
                return i
        raise KeyError(name)


def rekeyed(row: bytes, key: str, other: str) -> bytes:
    """A packed row of one key as that of another; what was not whole is not whole then."""
    checksum = (
        int.from_bytes(row[:CHECKSUM_BYTES], "little")
        ^ kernels.hash_of(key.encode())
        ^ kernels.hash_of(other.encode())
    )
    return checksum.to_bytes(CHECKSUM_BYTES, "little") + row[CHECKSUM_BYTES:]


def _layout_of(f: Feature) -> tuple[Any, ...]:
    """What a feature's values are laid out by."""
    layout = (f.name, f.dtype, f.dim, f.max_items)
    return layout if f.packed is None else (*layout, f.packed)


def _windows(data: U1, width: int, starts: I8) -> U1:
    """``width`` bytes from each start, uint8 [n, width], copied: whole rows at once, where an index
    of every byte costs 3 ns a byte."""
    if len(starts) == 0:
        return np.empty((0, width), np.uint8)
    return np.lib.stride_tricks.as_strided(
        data, (len(data) - width + 1, width), (1, 1), writeable=False
    )[starts]
