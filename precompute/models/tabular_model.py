"""Tabular model: what models over columns share that libraries other than torch compute: numbers of
columns, and the CPU as the device."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.resources import ResidentPeak, allowed, available_bytes, usable_threads
from precompute.model import (
    Features,
    Prepared,
    StagedModel,
)
from precompute.store.errors import ConfigError

Matrix = npt.NDArray[np.float64]


def numbers(column: pa.Array) -> Matrix:
    """Float64 [rows]; a null is NaN."""
    if column.type != pa.float64():
        column = column.cast(pa.float64(), safe=False)
    made: Matrix = column.to_numpy(zero_copy_only=False)
    return made


def unfit(names: Sequence[str], matrix: Matrix, kind: npt.DTypeLike) -> dict[int, str]:
    """Rows of [rows, names] with a number that ``kind``, a type of floats, has none for: position →
    reason."""
    rows, places = np.nonzero(np.abs(matrix) > np.finfo(kind).max)
    return {
        row: (
            f"{names[place]} is {matrix[row, place]:g}, which is not finite in"
            f" {np.dtype(kind).name}"
        )
        for row, place in zip(rows.tolist(), places.tolist(), strict=True)
    }


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of a dictionary's values; any other type itself."""
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type holds numbers; one of nothing but nulls may."""
    kinds = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_decimal,
        pa.types.is_null,
    )
    return any(check(kind) for check in kinds)


def listed(names: Sequence[str], most: int = 8) -> str:
    """Some names for a message, the first ones of many."""
    return ", ".join(map(repr, names[:most])) + (
        f" and {len(names) - most} more" if len(names) > most else ""
    )


# ---- The CPU


class Host:
    """A :class:`precompute.model.ComputeDevice`: launching means computing, with as many threads as
    the process may use, or fewer in a lane."""

    name = "cpu"
    depth = 0

    def __init__(self) -> None:
        self._resident = ResidentPeak()
        self._lane = threading.local()

    def free_bytes(self) -> int:
        return available_bytes()

    def peak_bytes(self, reset: bool = False) -> int:
        return self._resident.lap() if reset else self._resident.bytes()

    def release(self) -> None:
        """Nothing to free."""

    def threads(self) -> int:
        """Threads that the calling thread computes with: its lane's, or ``OMP_NUM_THREADS``, or one
        for each CPU."""
        said = os.environ.get("OMP_NUM_THREADS", "")
        return getattr(self._lane, "threads", None) or usable_threads(
            int(said) if said.isdigit() and int(said) else allowed()
        )

    def compute_with(self, threads: int) -> None:
        self._lane.threads = threads

    def peak_flops(self) -> float:
        """Unknown: what these models compute is no matrix product."""
        return 0.0


class HostModel:
    """Base of models that such a library computes: a row costs 1, and lanes compute at the same
    time."""

    cost_unit = "rows"
    max_cost: int | None = None
    concurrent = True

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """Unknown, or none: comparisons are no such operations."""
        return 0.0

    def compute(self: StagedModel, batch: pa.RecordBatch) -> Features:
        """All rows of a batch at once; one that cannot be used raises ValueError."""
        prepared = self.prepare(batch)
        for reason in prepared.bad.values():
            raise ValueError(reason)
        return self.land(self.launch(prepared.payload))


@contextlib.contextmanager
def installed(extra: str) -> Iterator[None]:
    """Translate the errors of importing a library of an extra.

    Raises:
        ConfigError: it is not installed, or does not load.
    """
    try:
        yield
    except ImportError as exc:
        raise ConfigError(f"{extra}: {exc}: pip install 'precompute-store[{extra}]'") from exc
    except OSError as exc:
        # of a library in C that it needs, such as OpenMP's
        raise ConfigError(f"{extra} is installed, and does not load: {exc}") from exc
