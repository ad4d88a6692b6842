"""Row codec: a view's features as one packed little-endian row per key, vectorised both ways."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from store.errors import OnlineStoreError
from store.feature_view import Feature, FeatureView

FORMAT_VERSION = 1
HEADER_BYTES = 16
MAX_SNAPSHOT = 2**32 - 1

Buffer = bytes | memoryview
_U1 = npt.NDArray[np.uint8]
_I8 = npt.NDArray[np.int64]

_NUMPY = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int8": "i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "bool": "?",
}
_STRUCT = {
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "bool": "?",
}


_NO_STARTS: _I8 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Packed rows in one buffer: row ``i`` is ``data[offsets[i]:offsets[i + 1]]``."""

    data: _U1
    offsets: _I8

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows(self) -> Iterator[memoryview]:
        """Each row's bytes, without a copy."""
        view = memoryview(self.data.data)
        bounds = self.offsets.tolist()
        return (view[a:b] for a, b in itertools.pairwise(bounds))


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """What :meth:`RowCodec.decode` read: one entry per value asked for, missing ones null or zero."""

    present: npt.NDArray[np.bool_]
    all_present: bool
    computed_at_us: _I8
    columns: list[pa.Array]


class RowCodec:
    """Packs and unpacks the rows of one view.

        row    = header · null bits · fixed part · variable part
        header = computed_at int64 (µs since 1970, UTC) · snapshot uint32 · schema tag uint32              16 bytes
        null bits  = one bit a feature, lowest first, rounded up to bytes
        fixed part = scalars and vectors in declared order; for a string or list its size in bytes as uint32
        variable part = the bytes of strings and lists, in declared order; a list of strings is its lengths, then its text

    No padding: a row of 384 float32 has 16 + 1 + 1,536 bytes. 16 bytes of header instead of 24 keep a row of 768 bytes of vector inside
    the same jemalloc size class (896) in Redis. The schema tag is the CRC-32 of format version and features, so that a row written
    for another schema is refused instead of read as noise.

    Build it once per view and snapshot; it is immutable and safe to share between threads.
    """

    def __init__(self, view: FeatureView) -> None:
        self.features = view.features
        self.schema_tag = zlib.crc32(
            repr([FORMAT_VERSION, [(f.name, f.dtype, f.dim, f.max_items) for f in self.features]]).encode()
        )
        self._arrow_types = [f.arrow_type for f in self.features]
        self._null_bytes = (len(self.features) + 7) // 8
        fields: list[tuple[str, str] | tuple[str, str, tuple[int]]] = [
            ("computed_at", "<i8"),
            ("snapshot", "<u4"),
            ("tag", "<u4"),
            ("nulls", "u1", (self._null_bytes,)),
        ]
        fmt = f"<qII{self._null_bytes}s"
        self._slots: list[tuple[int, str]] = []
        """(Feature, field holding the byte size), in the order of the variable part."""
        self._positions: list[int] = []
        """Per feature: where its first value stands in the unpacked tuple."""
        position = 4
        for i, f in enumerate(self.features):
            self._positions.append(position)
            if _is_variable(f):
                names = [f"{i}:lengths", f"{i}"] if _is_string_list(f) else [f"{i}"]
                for name in names:
                    fields.append((name, "<u4"))
                    self._slots.append((i, name))
                fmt += "I" * len(names)
                position += len(names)
            elif f.dim is not None:
                fields.append((f"{i}", _NUMPY[f.dtype], (f.dim,)))
                fmt += f"{f.dim}{_STRUCT[f.dtype]}"
                position += f.dim
            else:
                fields.append((f"{i}", _NUMPY[f.dtype]))
                fmt += _STRUCT[f.dtype]
                position += 1
        self._dtype = np.dtype(fields)
        self._struct = struct.Struct(fmt)
        self.fixed_bytes = self._dtype.itemsize

    # ---- Arrow → bytes

    def encode(self, batch: pa.RecordBatch, computed_at_us: _I8, snapshot: int) -> PackedRows:
        """Packed rows of ``batch``'s feature columns.

        Args:
            batch: columns named and typed as the view's features; other columns are ignored.
            computed_at_us: int64 [rows], µs since 1970 UTC.
            snapshot: number of the snapshot the rows belong to, below 2**32.
        """
        rows = batch.num_rows
        record = np.zeros(rows, self._dtype)
        record["computed_at"] = computed_at_us
        record["snapshot"] = snapshot
        record["tag"] = self.schema_tag
        blobs: list[tuple[_U1, _I8]] = []
        for i, f in enumerate(self.features):
            column = batch.column(f.name)
            if column.null_count:
                bits = np.asarray(column.is_null()).astype(np.uint8) << (i % 8)
                record["nulls"][:, i // 8] |= bits
            if _is_variable(f):
                parts = _variable_parts(f, column)
                blobs.extend(parts)
                for name, (_, sizes) in zip(self._slot_names(i), parts, strict=True):
                    record[name] = sizes
            else:
                record[f"{i}"] = _fixed_values(f, column)
        return self._assemble(record, blobs)

    def _slot_names(self, feature: int) -> list[str]:
        return [name for i, name in self._slots if i == feature]

    def _assemble(self, record: npt.NDArray[Any], blobs: list[tuple[_U1, _I8]]) -> PackedRows:
        rows, width = len(record), self.fixed_bytes
        fixed = record.view(np.uint8).reshape(rows, width)
        sizes = np.full(rows, width, np.int64)
        for _, lengths in blobs:
            sizes += lengths
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        if not blobs:
            return PackedRows(fixed.reshape(-1), offsets)
        data = np.empty(int(offsets[-1]), np.uint8)
        starts = offsets[:-1]
        data[(starts[:, None] + np.arange(width)).reshape(-1)] = fixed.reshape(-1)
        position = starts + width
        for blob, lengths in blobs:
            data[_ragged(position, lengths)] = blob
            position = position + lengths
        return PackedRows(data, offsets)

    # ---- bytes → Arrow

    def decode(self, values: Sequence[Buffer | None], features: Sequence[str] | None = None) -> DecodedRows:
        """Arrow columns of ``values``, one row each; None becomes a null row.

        Args:
            values: packed rows as a store returned them, in any mix of bytes and memoryview.
            features: which features, in which order; all of them by default.

        Raises:
            OnlineStoreError: a row is cut short or was written for another schema.
        """
        rows = len(values)
        packed = [v for v in values if v is not None]
        complete = len(packed) == rows
        present = np.ones(rows, np.bool_) if complete else np.array([v is not None for v in values], np.bool_)
        data, starts, record = self._records(packed)
        wanted = range(len(self.features)) if features is None else [self._index(name) for name in features]
        computed_at = np.ascontiguousarray(record["computed_at"] if complete else _scatter(record["computed_at"], present))
        columns = [self._column(i, data, starts, record, present) for i in wanted]
        return DecodedRows(present, complete, computed_at, columns)

    def _records(self, packed: Sequence[Buffer]) -> tuple[_U1, _I8, npt.NDArray[Any]]:
        width = self.fixed_bytes
        if not self._slots:
            if set(map(len, packed)) - {width}:
                raise _damaged("does not have the size of its view's rows")
            data = np.frombuffer(b"".join(packed), np.uint8)
            # only the variable part asks for them
            starts = _NO_STARTS
            record = data.view(self._dtype) if packed else np.empty(0, self._dtype)
        else:
            sizes = np.fromiter(map(len, packed), np.int64, len(packed))
            if len(sizes) and sizes.min() < width:
                raise _damaged("is cut short")
            data = np.frombuffer(b"".join(packed), np.uint8)
            starts = np.cumsum(sizes) - sizes
            record = np.empty(0, self._dtype)
            if packed:
                record = data[(starts[:, None] + np.arange(width)).reshape(-1)].view(self._dtype)
            expected = np.full(len(packed), width, np.int64)
            for _, name in self._slots:
                expected += record[name]
            if not np.array_equal(expected, sizes):
                raise _damaged("does not have the size its own fields tell")
        if len(record) and not (record["tag"] == self.schema_tag).all():
            raise _damaged("was written for another schema than the live snapshot's")
        return data, starts, record

    def _column(self, i: int, data: _U1, starts: _I8, record: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> pa.Array:
        f = self.features[i]
        kind = self._arrow_types[i]
        null_byte = record["nulls"][:, i // 8]
        complete = len(record) == len(present) and not null_byte.any()
        valid = None if complete else _scatter((null_byte >> (i % 8)) & 1 == 0, present)
        if _is_variable(f):
            return self._variable_column(i, data, starts, record, present, valid)
        values = record[f"{i}"] if valid is None else _scatter(record[f"{i}"], present)
        if f.dim is None:
            return pa.array(np.ascontiguousarray(values), kind, mask=None if valid is None else ~valid)
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=None if valid is None else pa.array(~valid))

    def _variable_column(
        self,
        i: int,
        data: _U1,
        starts: _I8,
        record: npt.NDArray[Any],
        present: npt.NDArray[np.bool_],
        valid: npt.NDArray[np.bool_] | None,
    ) -> pa.Array:
        f = self.features[i]
        parts: list[tuple[_U1, _I8]] = []
        position = starts + self.fixed_bytes
        for feature, name in self._slots:
            lengths = record[name].astype(np.int64)
            if feature == i:
                parts.append((data[_ragged(position, lengths)], _scatter(lengths, present)))
            position = position + lengths
        blob, sizes = parts[-1]
        mask = None if valid is None else pa.array(~valid)
        if f.max_items is None:
            return _strings(blob, sizes, mask)
        if _is_string_list(f):
            lengths_blob, lengths_sizes = parts[0]
            if (lengths_sizes % 4).any():
                raise _damaged("has a list that is no whole number of items")
            lengths, counts = lengths_blob.view("<u4").astype(np.int64), lengths_sizes // 4
            ends = np.concatenate(([0], np.cumsum(lengths)))
            if not np.array_equal(np.diff(ends[np.concatenate(([0], np.cumsum(counts)))]), sizes):
                raise _damaged("has a list whose items do not add up")
            items = _strings(blob, lengths, None)
        else:
            itemsize = np.dtype(_NUMPY[f.dtype]).itemsize
            if (sizes % itemsize).any():
                raise _damaged("has a list that is no whole number of items")
            items, counts = pa.array(blob.view(_NUMPY[f.dtype])), sizes // itemsize
        return pa.ListArray.from_arrays(pa.array(_offsets(counts)), items, type=self._arrow_types[i], mask=mask)

    # ---- bytes → Python, one row

    def decode_one(self, value: Buffer, features: Sequence[str] | None = None) -> tuple[int, dict[str, Any]]:
        """One row as plain Python: (computed_at in µs, feature name → value). 8 µs for 384 float32; Arrow costs 30.

        Raises:
            OnlineStoreError: as :meth:`decode`.
        """
        size = len(value)
        if size < self.fixed_bytes or (size != self.fixed_bytes and not self._slots):
            raise _damaged("does not have the size of its view's rows")
        unpacked = self._struct.unpack_from(value)
        if unpacked[2] != self.schema_tag:
            raise _damaged("was written for another schema than the live snapshot's")
        variable = self._variable_values(value, unpacked) if self._slots else {}
        nulls = unpacked[3]
        row: dict[str, Any] = {}
        for i in range(len(self.features)) if features is None else [self._index(name) for name in features]:
            f = self.features[i]
            at = self._positions[i]
            if nulls[i >> 3] >> (i & 7) & 1:
                row[f.name] = None
            elif i in variable:
                row[f.name] = variable[i]
            else:
                row[f.name] = unpacked[at] if f.dim is None else unpacked[at : at + f.dim]
        return unpacked[0], row

    def _variable_values(self, value: Buffer, unpacked: tuple[Any, ...]) -> dict[int, Any]:
        values: dict[int, Any] = {}
        position = self.fixed_bytes
        data = bytes(value)
        for i, f in enumerate(self.features):
            if not _is_variable(f):
                continue
            at = self._positions[i]
            sizes = unpacked[at : at + (2 if _is_string_list(f) else 1)]
            end = position + sum(sizes)
            if end > len(data):
                raise _damaged("does not have the size its own fields tell")
            try:
                values[i] = _one_value(f, data[position:end], sizes)
            except (UnicodeDecodeError, struct.error) as exc:
                raise _damaged(f"has a {f.name} that cannot be read ({exc})") from exc
            position = end
        if position != len(data):
            raise _damaged("does not have the size its own fields tell")
        return values

    def _index(self, name: str) -> int:
        for i, f in enumerate(self.features):
            if f.name == name:
                return i
        raise KeyError(name)


def _one_value(f: Feature, data: bytes, sizes: Sequence[int]) -> Any:
    """One string or list from its bytes."""
    if f.max_items is None:
        return data.decode()
    if not _is_string_list(f):
        count, rest = divmod(len(data), np.dtype(_NUMPY[f.dtype]).itemsize)
        if rest:
            raise _damaged("has a list that is no whole number of items")
        return struct.unpack(f"<{count}{_STRUCT[f.dtype]}", data)
    lengths = struct.unpack(f"<{sizes[0] // 4}I", data[: sizes[0]])
    if sum(lengths) != sizes[1]:
        raise _damaged("has a list whose items do not add up")
    items, start = [], sizes[0]
    for length in lengths:
        items.append(data[start : start + length].decode())
        start += length
    return items


def _damaged(what: str) -> OnlineStoreError:
    return OnlineStoreError(f"a packed row {what}; publish the view again")


def _is_variable(f: Feature) -> bool:
    return f.max_items is not None or f.dtype == "string"


def _is_string_list(f: Feature) -> bool:
    return f.max_items is not None and f.dtype == "string"


def _fixed_values(f: Feature, column: pa.Array) -> npt.NDArray[Any]:
    """[rows] or [rows, dim] values of a scalar or vector column; nulls become zeros."""
    if f.dim is None:
        filled = pc.fill_null(column, pa.scalar(0, pa.int8()).cast(column.type)) if column.null_count else column
        return np.asarray(filled)
    if column.null_count:
        values = np.zeros((len(column), f.dim), _NUMPY[f.dtype])
        values[np.asarray(column.is_valid())] = np.asarray(column.flatten()).reshape(-1, f.dim)
        return values
    return np.asarray(column.flatten()).reshape(-1, f.dim)


def _variable_parts(f: Feature, column: pa.Array) -> list[tuple[_U1, _I8]]:
    """(bytes of all rows in a row, bytes per row) for each slot of a string or list column."""
    if f.max_items is None:
        return [_string_bytes(pc.fill_null(column, ""))]
    counts = np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    items = column.flatten()
    if f.dtype != "string":
        values = np.ascontiguousarray(np.asarray(items).astype(_NUMPY[f.dtype]))
        return [(values.view(np.uint8), counts * values.itemsize)]
    text, lengths = _string_bytes(items)
    ends = np.concatenate(([0], np.cumsum(lengths)))
    row_ends = np.concatenate(([0], np.cumsum(counts)))
    return [(lengths.astype("<u4").view(np.uint8), counts * 4), (text, np.diff(ends[row_ends]))]


def _string_bytes(column: pa.Array) -> tuple[_U1, _I8]:
    """(UTF-8 of all strings in a row, bytes per string) of a string column without nulls."""
    _, offsets_buffer, data_buffer = column.buffers()
    if len(column) == 0:
        return np.empty(0, np.uint8), np.empty(0, np.int64)
    offsets = np.frombuffer(offsets_buffer, np.int32, len(column) + 1, column.offset * 4).astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    return data[offsets[0] : offsets[-1]], np.diff(offsets)


def _strings(blob: _U1, lengths: _I8, mask: pa.Array | None) -> pa.Array:
    validity = None if mask is None else pc.invert(mask).buffers()[1]
    strings = pa.Array.from_buffers(
        pa.string(), len(lengths), [validity, pa.py_buffer(_offsets(lengths)), pa.py_buffer(np.ascontiguousarray(blob))]
    )
    try:
        # UTF-8 and all: Arrow takes on trust what is built from buffers
        strings.validate(full=True)
    except pa.ArrowInvalid as exc:
        raise _damaged(f"has text that cannot be read ({exc})") from exc
    return strings


def _offsets(lengths: _I8) -> npt.NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _ragged(starts: _I8, lengths: _I8) -> _I8:
    """Indices of the bytes [starts[i], starts[i] + lengths[i]) for all i, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def _scatter(values: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """``values`` at the rows where ``present`` is true, zeros elsewhere."""
    if len(values) == len(present):
        return values
    full = np.zeros((len(present), *values.shape[1:]), values.dtype)
    full[present] = values
    return full
