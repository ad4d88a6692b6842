"""Row values: strings, lists and vectors of Arrow as the bytes of packed rows, and back: the
codec's part for each type. Vectors are packed as int8 or signs with a scale, and back."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.errors import OnlineStoreError, RowsLostError
from precompute.store.feature_view import Feature
from precompute.store.online import kernels
from precompute.store.online.kernels import I8, U1, U8, Packed

NUMPY_TYPES = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int8": "i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "bool": "?",
}
"""Scalar type → how numpy writes it."""
STRUCT_TYPES = {
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "bool": "?",
}
"""Scalar type → how struct writes it."""


def one_value(f: Feature, data: bytes, sizes: Sequence[int]) -> Any:
    """One string or list from its bytes; a list of numbers as an array."""
    if f.max_items is None:
        return data.decode()
    if not is_string_list(f):
        if len(data) % np.dtype(NUMPY_TYPES[f.dtype]).itemsize:
            raise damaged_row("has a list that is no whole number of items")
        return np.frombuffer(data, NUMPY_TYPES[f.dtype])
    lengths = struct.unpack(f"<{sizes[0] // 4}I", data[: sizes[0]])
    if sum(lengths) != sizes[1]:
        raise damaged_row("has a list whose items do not add up")
    items, start = [], sizes[0]
    for length in lengths:
        items.append(data[start : start + length].decode())
        start += length
    return items


def damaged_row(what: str) -> OnlineStoreError:
    """The error of a row that vouches for itself and yet cannot be read: what wrote it was
    wrong."""
    return RowsLostError(f"a packed row {what}; publish the view again")


def is_variable(f: Feature) -> bool:
    """Whether a feature's values, strings or lists, lie in the variable part of a row."""
    return f.max_items is not None or f.dtype == "string"


def is_string_list(f: Feature) -> bool:
    """Whether a feature is a list of strings, which has two sizes in a row: that of its lengths and
    that of its text."""
    return f.max_items is not None and f.dtype == "string"


def fixed_values(f: Feature, column: pa.Array) -> npt.NDArray[Any]:
    """[rows] or [rows, dim] values of a scalar or vector column; nulls become zeros."""
    if f.dim is None:
        filled = (
            pc.fill_null(column, pa.scalar(0, pa.int8()).cast(column.type))
            if column.null_count
            else column
        )
        return np.asarray(filled)
    if column.null_count:
        values = np.zeros((len(column), f.dim), NUMPY_TYPES[f.dtype])
        values[np.asarray(column.is_valid())] = np.asarray(column.flatten()).reshape(-1, f.dim)
        return values
    return np.asarray(column.flatten()).reshape(-1, f.dim)


def fixed_array(
    f: Feature, kind: pa.DataType, values: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None
) -> pa.Array:
    """A scalar or vector column of the Arrow type ``kind`` from [rows] or [rows, dim] values,
    without a copy where these are contiguous; null where ``valid``, bool [rows], is not."""
    rows, validity = len(values), None if valid is None else pa.array(valid).buffers()[1]
    flat = np.ascontiguousarray(values).reshape(-1)
    # a byte each, which Arrow has a bit for
    numbers = pa.array(flat).buffers()[1] if f.dtype == "bool" else pa.py_buffer(flat)
    if f.dim is None:
        return pa.Array.from_buffers(kind, rows, [validity, numbers])
    # half the time of from_arrays
    items = pa.Array.from_buffers(kind.value_type, len(flat), [None, numbers])
    return pa.Array.from_buffers(kind, rows, [validity], children=[items])


def assembled(
    columns: Sequence[npt.NDArray[Any]],
    key_hashes: U8,
    computed_at_us: I8,
    snapshots: npt.NDArray[np.uint32],
    tag: int,
) -> Packed:
    """Rows of one size that vouch for themselves.

    Args:
        columns: what follows the header: [rows] or [rows, n] values of each field, in the row's
            order.
        key_hashes: xxh3_64 of each row's key, uint64 [rows].
        computed_at_us: int64 [rows].
        snapshots: number of each row's snapshot, uint32 [rows].
        tag: the schema's.
    """
    count, header_bytes = len(key_hashes), kernels.ROW_HEADER.itemsize
    whole = [np.ascontiguousarray(column).reshape(count, -1).view(np.uint8) for column in columns]
    widths = [column.shape[1] for column in whole]
    size = header_bytes + sum(widths)
    rows, offsets = np.empty((count, size), np.uint8), np.arange(count + 1) * size
    packed = Packed(rows.reshape(-1), offsets)
    if kernels.native is not None:
        kernels.native.assemble(
            tuple(whole),
            np.array(widths, np.uint64),
            key_hashes,
            np.ascontiguousarray(computed_at_us),
            snapshots,
            tag,
            rows,
        )
        return packed
    header = rows[:, :header_bytes].view(kernels.ROW_HEADER)[:, 0]
    header["computed_at"], header["snapshot"], header["tag"] = computed_at_us, snapshots, tag
    start = header_bytes
    for column, width in zip(whole, widths, strict=True):
        rows[:, start : start + width] = column
        start += width
    header["checksum"] = kernels.hashes(packed, kernels.CHECKSUM_BYTES) ^ key_hashes
    return packed


def variable_parts(f: Feature, column: pa.Array) -> list[tuple[U1, I8]]:
    """(bytes of all rows in a row, bytes per row) for each slot of a string or list column."""
    if f.max_items is None:
        return [_string_bytes(pc.fill_null(column, ""))]
    counts = np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    items = column.flatten()
    if f.dtype != "string":
        values = np.ascontiguousarray(np.asarray(items).astype(NUMPY_TYPES[f.dtype]))
        return [(values.view(np.uint8), counts * values.itemsize)]
    text, lengths = _string_bytes(items)
    ends = np.concatenate(([0], np.cumsum(lengths)))
    row_ends = np.concatenate(([0], np.cumsum(counts)))
    return [(lengths.astype("<u4").view(np.uint8), counts * 4), (text, np.diff(ends[row_ends]))]


def _string_bytes(column: pa.Array) -> tuple[U1, I8]:
    """(UTF-8 of all strings in a row, bytes per string) of a string column without nulls."""
    packed = packed_strings(column)
    return packed.data[packed.offsets[0] : packed.offsets[-1]], packed.sizes


def packed_strings(column: pa.Array) -> Packed:
    """A string column without nulls, its text as it lies there."""
    _, offsets_buffer, data_buffer = column.buffers()
    if len(column) == 0:
        return Packed.of([])
    offsets = np.frombuffer(offsets_buffer, np.int32, len(column) + 1, column.offset * 4).astype(
        np.int64
    )
    return Packed(
        np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8),
        offsets,
    )


def strings(blob: U1, lengths: I8, mask: pa.Array | None) -> pa.Array:
    """A string array [n] of the UTF-8 of all strings in a row and the bytes of each; null where
    ``mask`` is true.

    Raises:
        OnlineStoreError: it is no UTF-8.
    """
    validity = None if mask is None else pc.invert(mask).buffers()[1]
    column = pa.Array.from_buffers(
        pa.string(),
        len(lengths),
        [validity, pa.py_buffer(list_offsets(lengths)), pa.py_buffer(np.ascontiguousarray(blob))],
    )
    try:
        # UTF-8 and all: Arrow takes on trust what is built from buffers
        column.validate(full=True)
    except pa.ArrowInvalid as exc:
        raise damaged_row(f"has text that cannot be read ({exc})") from exc
    return column


def list_offsets(lengths: I8) -> npt.NDArray[np.int32]:
    """Where each of n lists or strings starts and the last one ends, int32 [n + 1], from how long
    each is."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def ragged(starts: I8, lengths: I8) -> I8:
    """Indices of the bytes [starts[i], starts[i] + lengths[i]) for all i, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


BLOCK_BYTES = 2**20
"""Bytes that are copied by their indices at once, which are eight times as large."""
LONG_BYTES = 64
"""Mean bytes of pieces from which on each is copied by itself, which is quicker, too."""


def put_pieces(data: U1, starts: I8, pieces: U1, lengths: I8) -> None:
    """Copy pieces, which lie one after the other, to where each starts in ``data``."""
    for into, taken in _spans(starts, lengths):
        data[into] = pieces[taken]


def take_pieces(data: U1, starts: I8, lengths: I8) -> U1:
    """The bytes ``data[starts[i]:starts[i] + lengths[i]]`` for all i, one after the other."""
    pieces = np.empty(int(lengths.sum()), np.uint8)
    for where, into in _spans(starts, lengths):
        pieces[into] = data[where]
    return pieces


def _spans(starts: I8, lengths: I8) -> Iterator[tuple[slice | I8, slice]]:
    """Where pieces lie that start anywhere, and where they lie one after the other: some at a time,
    by indices, or one of the long ones."""
    count, ends = len(lengths), np.cumsum(lengths)
    total = int(ends[-1]) if count else 0
    if total < LONG_BYTES * count and total <= BLOCK_BYTES:
        yield ragged(starts, lengths), slice(0, total)
        return
    if total >= LONG_BYTES * count:
        end = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            yield slice(start, start + length), slice(end, end := end + length)
        return
    at = end = 0
    while end < total:
        begin = end
        stop = max(at + 1, int(np.searchsorted(ends, begin + BLOCK_BYTES, side="right")))
        end = int(ends[stop - 1])
        one = slice(int(starts[at]), int(starts[at]) + end - begin)
        where = one if stop == at + 1 else ragged(starts[at:stop], lengths[at:stop])
        yield where, slice(begin, end)
        at = stop


def scattered(values: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """``values`` at the rows where ``present`` is true, zeros elsewhere."""
    if len(values) == len(present):
        return values
    full = np.zeros((len(present), *values.shape[1:]), values.dtype)
    full[present] = values
    return full


F4 = npt.NDArray[np.float32]

INT8_STEPS = 127
"""Symmetric: −127 to 127, so that 0 is 0 and a vector's negative is packed as its own negative."""

_SMALLEST = np.finfo(np.float32).tiny
"""Least scale: below it are subnormal numbers, which some threads of some CPUs take for 0."""
_LARGEST = np.nextafter(np.float32(np.finfo(np.float32).max / INT8_STEPS), np.float32(0))
"""Largest scale: times 127 it is still a number."""


def stored_layout(feature: Feature) -> tuple[str, int]:
    """Type and number of what a packed vector is stored as beside its scale: a byte a number, or a
    bit a number, the lowest first."""
    assert feature.dim is not None
    return ("i1", feature.dim) if feature.packed == "int8" else ("u1", (feature.dim + 7) // 8)


def packed_vectors(feature: Feature, vectors: npt.NDArray[Any]) -> tuple[F4, npt.NDArray[Any]]:
    """(scales, stored) of vectors as the feature's ``packed`` says.

    - ``int8``: scale max|x| / 127, numbers x / scale rounded: each is off by half a scale at most.
    - ``binary``: scale mean|x|, a set bit for a number below 0; of all scales the nearest to the
      vector by L2 (Rastegari et al. 2016, XNOR-Net, §3.1).

    A vector with a NaN or infinity has the scale NaN, and comes back as NaN throughout: what cannot
    be stored is not made up.

    Args:
        feature: a vector of float16 or float32 with ``packed``.
        vectors: [rows, dim].

    Returns:
        float32 [rows]; int8 [rows, dim], or uint8 [rows, dim / 8 rounded up].
    """
    vectors = vectors.astype(np.float32, copy=False)
    if feature.packed == "int8":
        largest = np.abs(vectors).max(axis=1)
        scales = np.where(
            np.isfinite(largest), np.clip(largest / INT8_STEPS, _SMALLEST, _LARGEST), np.nan
        )
        scales = scales.astype(np.float32)
        steps = vectors / scales[:, None]
        np.rint(steps, out=steps)
        steps[np.isnan(scales)] = 0
        return scales, steps.astype(np.int8)
    # float64 first: where numpy converts on the way, its buffer cuts the sum of a row (seen at
    # 9,000 numbers), and how is no promise of numpy's
    means = np.abs(vectors.astype(np.float64)).mean(axis=1)
    means[means < _SMALLEST] = 0
    scales = np.where(np.isfinite(means), means, np.nan).astype(np.float32)
    return scales, np.packbits(vectors < 0, axis=1, bitorder="little")


def unpacked_vectors(feature: Feature, scales: F4, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The vectors that a reader gets for what :func:`packed_vectors` made, in the feature's own
    dtype: [rows, dim]."""
    dtype = np.dtype(feature.dtype)
    if feature.packed == "int8":
        values = stored.astype(np.float32)
        values *= scales[:, None]
        return values.astype(dtype, copy=False)
    # the scale's own bits with the sign's: a tenth of the time of choosing between two numbers
    whole = np.dtype(f"u{dtype.itemsize}")
    signs = np.unpackbits(stored, axis=1, count=feature.dim, bitorder="little").astype(
        whole
    ) << whole.type(8 * dtype.itemsize - 1)
    numbers: npt.NDArray[Any] = (scales.astype(dtype).view(whole)[:, None] ^ signs).view(dtype)
    return numbers
