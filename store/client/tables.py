"""Tables: an answer's Arrow stream as a table, and a table's columns as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from store.api.arrow import decode_arrow


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
        column → array [rows], of a vector [rows, dim]. What a missing row lacks is NaN in floats and NaT in times; a column of integers, flags, texts or lists
        that lacks any is one of Python objects, with None there.
    """
    return {name: _array(table.column(name)) for name in table.column_names}


def _array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    kind = column.type
    if pa.types.is_fixed_size_list(kind) and (pa.types.is_floating(kind.value_type) or not column.null_count):
        values: npt.NDArray[Any] = column.combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, kind.list_size)
        if not column.null_count:
            return values
        whole = np.full((len(column), kind.list_size), np.nan, values.dtype)
        whole[column.is_valid().to_numpy()] = values
        return whole
    if column.null_count and not (pa.types.is_floating(kind) or pa.types.is_timestamp(kind)):
        objects = np.empty(len(column), object)
        objects[:] = column.to_pylist()
        return objects
    return np.asarray(column.to_numpy())
