"""Tasks: the rows that a worker is given, and the windows they are of."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.features import in_order
from precompute.engine.window import Outcome, RejectedRow, Rows
from precompute.store.feature_view import FeatureView


@dataclass(slots=True)
class HeldWindow:
    """Rows that were read and are not yet handed on, all of them."""

    number: int
    batch: pa.RecordBatch
    shown: pa.RecordBatch
    """What the workers see of it."""
    open_rows: int
    """Without features or a rejection so far."""
    size_bytes: int
    pieces: list[tuple[Rows, pa.RecordBatch]] = field(default_factory=list)
    """Row numbers and features of each part that was computed, and not handed on."""
    rejections: list[RejectedRow] = field(default_factory=list)
    waits_since: float | None = None
    """When the first of them came."""
    pieces_bytes: int = 0

    def add(self, done: int, rejections: list[RejectedRow], rows: Rows, features: pa.RecordBatch | None) -> None:
        """So many rows are done: those rejected, and ``rows`` with their features."""
        if features is not None and len(rows):
            self.pieces.append((rows, features))
            self.pieces_bytes += int(features.nbytes)
        self.rejections += rejections
        self.open_rows -= done
        if done and self.waits_since is None:
            self.waits_since = time.monotonic()

    def outcome(self, view: FeatureView) -> Outcome:
        """What was not handed on, which is from now on."""
        self.rejections.sort(key=lambda rejection: rejection.row)
        rows, features = in_order(view, self.pieces)
        made = Outcome(rows, features, self.rejections, self.number, not self.open_rows)
        self.pieces, self.rejections, self.waits_since, self.pieces_bytes = [], [], None, 0
        return made


@dataclass(slots=True)
class Task:
    """Rows of one window that one worker is given."""

    window: HeldWindow
    rows: Rows
    """Row numbers of the window, ascending."""
    left: npt.NDArray[np.bool_]
    """Which of them have neither features nor a rejection."""
    suspect: bool = False
    """It was with a worker that died: it is tried alone."""
    hung: bool = False
    """It was with one that was given up, too, for being silent or finishing no batch."""
    deaths: int = 0
    """Of workers that had nothing else."""

    @classmethod
    def of(cls, window: HeldWindow, rows: Rows, *, suspect: bool = False, hung: bool = False, deaths: int = 0) -> Task:
        """All of these rows, of which none is done."""
        return cls(window, rows, np.ones(len(rows), np.bool_), suspect, hung, deaths)
