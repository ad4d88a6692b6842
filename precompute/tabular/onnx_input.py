"""ONNX input: one tensor of a graph, and the columns that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

NUMBERS: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
    "tensor(string)": object,
}
"""ONNX Runtime's name of a type → numpy's."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the graph: [rows] or [rows, width], of these columns side by side; ``width`` None is any. ``nan`` lets a null number be NaN."""

    name: str
    columns: tuple[str, ...]
    kind: str
    ndim: int
    width: int | None
    nan: bool

    @property
    def is_text(self) -> bool:
        return self.kind == "tensor(string)"

    @property
    def is_whole(self) -> bool:
        return np.dtype(NUMBERS[self.kind]).kind in "iub"

    def array(self, batch: pa.RecordBatch, bad: dict[int, str]) -> npt.NDArray[Any]:
        """The tensor of a batch; rows that have no place in it are added to ``bad``, and hold whatever they may."""
        parts = [self._part(name, batch.column(name), bad) for name in self.columns]
        made = parts[0] if len(parts) == 1 else np.concatenate(parts, 1)
        if self.width is not None and made.shape[1] != self.width:
            for row in range(len(made)):
                bad.setdefault(
                    row,
                    f"{', '.join(self.columns)} are {made.shape[1]} values, and the graph's input {self.name!r} takes {self.width}",
                )
            return np.zeros((len(made), self.width), made.dtype)
        return made[:, 0] if self.ndim == 1 else made

    def _part(self, name: str, column: pa.Array, bad: dict[int, str]) -> npt.NDArray[Any]:
        """[rows, 1] of a scalar, [rows, length] of a vector."""
        if isinstance(column.type, pa.DictionaryType):
            column = column.cast(column.type.value_type)
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)):
            return self._values(name, column, bad)[:, None]
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        rest = self.width if len(self.columns) == 1 else None
        length = rest if rest is not None else int(np.bincount(lengths).argmax()) if len(lengths) else 0
        for row in np.flatnonzero(lengths != length).tolist():
            bad[row] = f"{name} is null" if not column[row].is_valid else f"{name} has {lengths[row]} values, not {length}"
        good = np.flatnonzero(lengths == length)
        inner: dict[int, str] = {}
        values = self._values(name, column.take(pa.array(good)).flatten(), inner)
        if length:
            bad |= {int(good[place // length]): reason for place, reason in inner.items()}
        made = np.zeros((len(column), length), values.dtype) if not self.is_text else np.full((len(column), length), "", object)
        made[good] = values.reshape(len(good), length)
        return made

    def _values(self, name: str, column: pa.Array, bad: dict[int, str]) -> npt.NDArray[Any]:
        """[values] of a flat column."""
        kind = NUMBERS[self.kind]
        if column.null_count and (self.is_text or self.is_whole or not self.nan):
            bad |= dict.fromkeys(pc.indices_nonzero(column.is_null()).to_pylist(), f"{name} is null")
        if self.is_text:
            texts: npt.NDArray[Any] = np.array(pc.fill_null(column.cast(pa.string()), "").to_pylist(), object)
            return texts
        if self.is_whole:
            whole = pc.fill_null(column.cast(pa.int64(), safe=False), 0).to_numpy(zero_copy_only=False)
            if np.dtype(kind).kind != "b":
                limits = np.iinfo(kind)
                for row in np.flatnonzero((whole < limits.min) | (whole > limits.max)).tolist():
                    bad[row] = f"{name} is {whole[row]}, and the graph's input {self.name!r} takes {limits.min} to {limits.max}"
            made: npt.NDArray[Any] = whole.astype(kind)
            return made
        with np.errstate(over="ignore"):
            made = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(kind)
        return made
