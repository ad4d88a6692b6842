"""ONNX input: one tensor of a graph, and the columns that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.store.errors import ModelError
from precompute.tabular.columns import listed, numbers, unfit, value_type

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
    """An input of the graph: [rows] (``width`` 1) or [rows, width], of these columns side by side;
    ``width`` None is any. ``nan`` lets a null number be NaN."""

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
        """The tensor of a batch; rows that have no place in it are added to ``bad``, and hold
        whatever they may.

        Raises:
            ModelError: the columns' types do not tell how many values a row has, or tell another
                number than the graph takes.
        """
        sizes = self._sizes(batch.schema)
        parts = [
            self._part(name, batch.column(name), size, bad)
            for name, size in zip(self.columns, sizes, strict=True)
        ]
        made = parts[0] if len(parts) == 1 else np.concatenate(parts, 1)
        return made[:, 0] if self.ndim == 1 else made

    def _sizes(self, schema: pa.Schema) -> list[int]:
        """How many values of a row each column holds: by the types, so that no row's neighbours
        decide."""
        kinds = [value_type(schema.field(name).type) for name in self.columns]
        sizes = [
            getattr(kind, "list_size", None if hasattr(kind, "value_type") else 1) for kind in kinds
        ]
        known, lists = sum(size or 0 for size in sizes), sizes.count(None)
        if lists > (self.width is not None):
            name, item = (
                self.columns[sizes.index(None)],
                "VARCHAR" if self.is_text else "BIGINT" if self.is_whole else "DOUBLE",
            )
            raise ModelError(
                f"onnx: how many values of column {name!r} the graph's input {self.name!r} takes is"
                f" not known: CAST({name} AS {item}[n]) in the source"
            )
        rest = (self.width or 0) - known
        if self.width is not None and (rest < 1 if lists else rest):
            raise ModelError(
                f"onnx: the graph's input {self.name!r} takes {self.width} numbers a row, and"
                f" {listed(self.columns)} are {known}{' and a list' * lists}: name them in"
                " `inputs`, or a column of vectors"
            )
        return [rest if size is None else size for size in sizes]

    def _part(
        self, name: str, column: pa.Array, size: int, bad: dict[int, str]
    ) -> npt.NDArray[Any]:
        """[rows, size]; 1 of a scalar."""
        if isinstance(column.type, pa.DictionaryType):
            column = column.cast(column.type.value_type)
        if not hasattr(column.type, "value_type"):
            return self._values(name, column, bad)[:, None]
        lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(lengths != size).tolist():
            bad[row] = (
                f"{name} is null"
                if lengths[row] < 0
                else f"{name} has {lengths[row]} values, not {size}"
            )
        good = np.flatnonzero(lengths == size)
        inner: dict[int, str] = {}
        values = self._values(name, column.take(pa.array(good)).flatten(), inner)
        bad |= {int(good[place // size]): reason for place, reason in inner.items()}
        made = (
            np.zeros((len(column), size), values.dtype)
            if not self.is_text
            else np.full((len(column), size), "", object)
        )
        made[good] = values.reshape(len(good), size)
        return made

    def _values(self, name: str, column: pa.Array, bad: dict[int, str]) -> npt.NDArray[Any]:
        """[values] of a flat column."""
        kind = NUMBERS[self.kind]
        if column.null_count and (self.is_text or self.is_whole or not self.nan):
            bad |= dict.fromkeys(
                pc.indices_nonzero(column.is_null()).to_pylist(), f"{name} is null"
            )
        if self.is_text:
            texts: npt.NDArray[Any] = np.array(
                pc.fill_null(column.cast(pa.string()), "").to_pylist(), object
            )
            return texts
        if self.is_whole:
            # as it is: of those that int64 has not, a cast would make others
            column = column if pa.types.is_uint64(column.type) else column.cast(pa.int64())
            whole = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
            if np.dtype(kind).kind != "b":
                limits = np.iinfo(kind)
                for row in np.flatnonzero((whole < limits.min) | (whole > limits.max)).tolist():
                    bad[row] = (
                        f"{name} is {whole[row]}, and the graph's input {self.name!r} takes"
                        f" {limits.min} to {limits.max}"
                    )
            made: npt.NDArray[Any] = whole.astype(kind)
            return made
        floats = numbers(column)
        bad |= unfit([name], floats[:, None], kind)
        with np.errstate(over="ignore"):
            return floats.astype(kind)
