"""Tables: an answer's Arrow stream as a table, and a table's columns as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.wire.arrow import decode_arrow


def read_table(content: bytes) -> pa.Table:
    """The table of an answer.

    Raises:
        ValueError: no Arrow IPC stream.
    """
    try:
        return decode_arrow(content)
    except (pa.ArrowException, OSError) as exc:
        raise ValueError(str(exc)[:200]) from exc


def arrays(table: pa.Table) -> dict[str, npt.NDArray[Any]]:
    """The columns of an answer as numpy has them.

    Returns:
        column → array [rows], of a vector [rows, dim]. What a missing row lacks is NaN in floats
        and NaT in times; a column of integers, flags, texts or lists that lacks any is one of
        Python objects, with None there.
    """
    return {name: _array(table.column(name)) for name in table.column_names}


def _array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    kind, lacks = column.type, bool(column.null_count)
    if pa.types.is_fixed_size_list(kind) and (pa.types.is_floating(kind.value_type) or not lacks):
        values = _flat(column.combine_chunks().flatten()).reshape(-1, kind.list_size)
        if not lacks:
            return values
        whole = np.full((len(column), kind.list_size), np.nan, values.dtype)
        whole[np.array(column.is_valid().to_pylist(), bool)] = values
        return whole
    if lacks and not (pa.types.is_floating(kind) or pa.types.is_timestamp(kind)):
        objects = np.empty(len(column), object)
        objects[:] = column.to_pylist()
        return objects
    return _flat(column.combine_chunks())


def _flat(array: pa.Array) -> npt.NDArray[Any]:
    """Not by pyarrow's ``to_numpy``, which loads pandas where that is installed: a second of a
    service's first answer, whatever its deadline."""
    kind = array.type
    if pa.types.is_timestamp(kind):
        numbers = array.view(pa.int64())
        numbers = numbers.fill_null(np.iinfo(np.int64).min) if array.null_count else numbers
        return np.from_dlpack(numbers).view(f"datetime64[{kind.unit}]")
    if pa.types.is_floating(kind):
        return np.from_dlpack(array.fill_null(np.nan) if array.null_count else array)
    if pa.types.is_integer(kind):
        return np.from_dlpack(array)
    if pa.types.is_list(kind):
        values: npt.NDArray[Any] = np.empty(len(array), object)
        flat, ends = _flat(array.flatten()), _flat(array.offsets)
        values[:] = [
            flat[start:end]
            for start, end in zip(ends[:-1] - ends[0], ends[1:] - ends[0], strict=True)
        ]
        return values
    values = np.empty(len(array), bool if pa.types.is_boolean(kind) else object)
    values[:] = array.to_pylist()
    return values
