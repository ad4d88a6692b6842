"""Window: rows sorted and computed together, on their way through the engine's stages; and their
outcome, features or rejections."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.model import Prepared

Rows = npt.NDArray[np.int64]
"""Row numbers, or positions."""


MISFIT = "misfit"
"""The stage of a row for which the model's answer is not what the view declares: another shape or
type, or none."""


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """Why a row has no features: its number in the batch, the stage (``input``,
    ``prepare``, ``model``, :data:`MISFIT`, ``output`` for values that are not finite, or ``worker``
    when it ended its process) and the error."""

    row: int
    stage: str
    error: str


@dataclass(slots=True)
class Outcome:
    """What became of a window's rows: the features of those that could be computed, and why others
    have none.

    ``rows`` are the numbers of the computed ones in the batch given, ascending; ``features`` has
    one row for each. Of a stream, ``window`` counts the batches given from 0, and ``last`` tells
    whether this is the last that comes of it.
    """

    rows: Rows
    features: pa.RecordBatch
    rejections: list[RejectedRow] = field(default_factory=list)
    window: int = 0
    last: bool = True

    @property
    def done(self) -> int:
        """Rows that were computed or rejected."""
        return len(self.rows) + len(self.rejections)


@dataclass(slots=True)
class Window:
    """Rows sorted together; or, once computed, a piece of them."""

    batch: pa.RecordBatch
    """As it was given; all of it, where the window is a part."""
    shown: pa.RecordBatch
    """What the model sees of the window's rows."""
    number: int = 0
    """Number of ``batch``, counted from 0."""
    first: int = 0
    """Row of ``batch`` where the window begins."""
    last: bool = True
    """Whether nothing of ``batch`` follows."""
    rejections: dict[int, RejectedRow] = field(default_factory=dict)
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    """Row of the window at each position of what was prepared."""
    prepared: Prepared | None = None
    costs: Rows | None = None
    """Cost of each position, at least 1; None of a model that names none."""
    pieces: list[tuple[Rows, pa.RecordBatch]] = field(default_factory=list)
    """Row numbers of each batch, and the features that the model made of them: whether they are
    finite was not yet looked at."""
    handed_on: float | None = None
    """When the last piece was, or the first batch begun."""

    def at(self, positions: Rows) -> pa.RecordBatch:
        """What the model sees of the rows at these positions."""
        return taken(self.shown, self.rows[positions])

    def cost(self, positions: Rows) -> tuple[int, int]:
        """Two costs of these positions: without padding, and in one batch, where each costs as much
        as the dearest."""
        if self.costs is None:
            return len(positions), len(positions)
        costs = self.costs[positions]
        if len(costs) == 1:
            return int(costs[0]), int(costs[0])
        return int(costs.sum()), len(costs) * int(costs.max())

    def reject(self, row: int, stage: str, error: str) -> None:
        """Row ``row`` of the window has no features."""
        self.rejections[row] = RejectedRow(row, stage, error)

    def piece(self) -> Window:
        """What was made so far; this window goes on without it."""
        made = replace(self, last=False, prepared=None, costs=None)
        self.pieces, self.rejections = [], {}
        return made

    def prepared_bytes(self) -> int:
        """Bytes held before it is computed: what was made of the rows is of their size, more or
        less, unless the model says so."""
        made = 0 if self.prepared is None else self.prepared.size_bytes
        return int(self.shown.nbytes) + max(made, int(self.shown.nbytes))

    def computed_bytes(self) -> int:
        """Bytes held after it was computed."""
        made = sum(int(features.nbytes) for _, features in self.pieces)
        return int(self.shown.nbytes) + made


class Later:
    """Stands in place of a batch's inputs that could not be made: the model's stage makes them once
    more, and bisects."""


@dataclass(slots=True)
class Batch:
    """Rows computed together; ``positions`` None marks the end of a window."""

    window: Window
    positions: Rows | None
    budget: int = 0
    inputs: Any = None

    def input_bytes(self) -> int:
        """Bytes held by the inputs, as far as they have a size."""
        inputs = self.inputs if isinstance(self.inputs, (tuple, list)) else [self.inputs]
        return sum(int(getattr(part, "nbytes", 0)) for part in inputs)


def side_by_side(rows: Rows) -> slice | None:
    """The slice of some rows, at least one, where each follows the one before; else None."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1 and (count == 1 or (rows[1:] - rows[:-1] == 1).all()):
        return slice(first, first + count)
    return None


def taken(batch: pa.RecordBatch, rows: Rows) -> pa.RecordBatch:
    """Some rows of a batch, without a copy where they lie side by side."""
    where = side_by_side(rows) if len(rows) else None
    return batch.take(pa.array(rows)) if where is None else batch.slice(where.start, len(rows))
