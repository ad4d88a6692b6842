"""Sample: rows drawn from all batches of a run, with what was computed of them; for the audit.

A run of shards draws a part of its sample in each of them, where the rows are computed.
"""

from __future__ import annotations

import bisect
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.window import Outcome
from precompute.jobs.run.judge.accuracy import END_ROWS
from precompute.store.feature_view import Feature, FeatureView

HELD_BYTES = 64 * 2**20
"""Bytes of the sample at most; of larger rows fewer are drawn."""
TOGETHER_BYTES = 64 * 2**20
"""Windows are sampled together, up to so many bytes: beside threads that compute, the CPU's caches
hold nothing of it, and a window of 8,192 scores alone took 0.5 ms in place of 0.06."""

SEED = 0
"""Fixed, so that the same run draws the same rows."""


class Sample:
    """Rows drawn at random, and those with extreme values.

    Args:
        view: of the features.
        rows: to be computed.
        wanted: how many of them to draw.
        ends: whether rows with extreme values are wanted, too.
    """

    def __init__(self, view: FeatureView, rows: int, wanted: int, *, ends: bool) -> None:
        drawn = np.random.default_rng(SEED).choice(
            rows, min(rows, wanted), replace=False, shuffle=False
        )
        self._view = view
        self._places: list[int] = np.sort(drawn).tolist()
        self._inputs: list[pa.RecordBatch] = []
        self._made: list[pa.RecordBatch] = []
        self._ends = _Ends(view) if ends else None
        self._pending: list[tuple[int, pa.RecordBatch, Outcome]] = []
        self._bytes = self._pending_bytes = 0
        self.rows = 0
        """How many were drawn from."""
        self.spent_s = 0.0
        """Seconds that drawing took."""

    def draw(self, batch: pa.RecordBatch, done: Outcome) -> None:
        """Draw from rows that the model computed.

        Args:
            batch: as it was given to the engine, with a column ``input_hash``.
            done: the outcome of its rows, or of some.
        """
        start = self.rows
        self.rows += len(done.rows)
        if self._ends is None and not self._drawn(start, len(done.rows)):
            return
        self._pending.append((start, batch, done))
        self._pending_bytes += batch.nbytes + done.features.nbytes
        # without float32 to compare with, a few windows are sampled as they come, and not held
        if self._ends is None or self._pending_bytes > TOGETHER_BYTES:
            self._look()

    def rows_drawn(self) -> tuple[pa.RecordBatch, pa.RecordBatch] | None:
        """Their inputs, and the features that were computed of them; None without any."""
        self._look()
        if not self._made:
            return None
        return pa.concat_batches(self._inputs), pa.concat_batches(self._made)

    def rows_at_ends(self) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """The same for the rows with extreme values."""
        assert self._ends is not None
        self._look()
        return self._ends.rows()

    # ---- a part of it, drawn elsewhere

    def write(self, path: Path) -> bool:
        """Write it to a file for :meth:`add`; returns whether there was anything to write.

        Raises:
            OSError: the file system failed.
        """
        drawn = self.rows_drawn()
        pairs = [] if drawn is None else [(*drawn, False)]
        if self._ends is not None and self._ends.found:
            pairs.append((*self._ends.rows(), True))
        batches = [
            pa.RecordBatch.from_arrays(
                [shown.to_struct_array(), made.to_struct_array(), pa.repeat(at_end, len(made))],
                names=["shown", "made", "at_end"],
            )
            for shown, made, at_end in pairs
        ]
        if not batches:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as out:
            for batch in batches:
                out.write_batch(batch)
        return True

    def add(self, path: Path, rows: int) -> None:
        """Add what :meth:`write` wrote, drawn from ``rows`` rows.

        Raises:
            OSError: the file cannot be read.
        """
        self.rows += rows
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as batches:
            for batch in batches:
                shown = pa.RecordBatch.from_struct_array(batch.column("shown"))
                made = pa.RecordBatch.from_struct_array(batch.column("made"))
                made = made.cast(self._view.feature_schema())
                if not batch.column("at_end")[0].as_py():
                    self._inputs.append(shown)
                    self._made.append(made)
                    self._bytes += shown.nbytes + made.nbytes
                    if self._bytes > HELD_BYTES:
                        self._halve(self.rows)
                elif self._ends is not None:
                    self._ends.add(shown, made)

    # ---- drawing

    def _look(self) -> None:
        """Draw rows of the pending windows."""
        # CPU time of this thread: other time is the model's
        began = time.thread_time()
        for start, batch, done in self._pending:
            if not len(done.rows):
                continue
            if chosen := self._drawn(start, len(done.rows)):
                self._keep(batch, done, np.array(chosen) - start)
                if self._bytes > HELD_BYTES:
                    self._halve(start + len(done.rows))
            if self._ends is not None:
                self._ends.look_at(batch, done)
        self._pending, self._pending_bytes = [], 0
        self.spent_s += time.thread_time() - began

    def _drawn(self, start: int, rows: int) -> list[int]:
        """The drawn places among ``rows`` rows from ``start``."""
        first = bisect.bisect_left(self._places, start)
        return self._places[first : bisect.bisect_left(self._places, start + rows, first)]

    def _keep(self, batch: pa.RecordBatch, done: Outcome, chosen: npt.NDArray[np.int64]) -> None:
        self._inputs.append(_shown(batch).take(pa.array(done.rows[chosen])))
        self._made.append(done.features.take(pa.array(chosen)))
        self._bytes += self._inputs[-1].nbytes + self._made[-1].nbytes

    def _halve(self, end: int) -> None:
        """Drop every other row of the sample, and of the places still to be drawn, from ``end``
        on."""
        self._inputs, self._made = (
            [pa.concat_batches(held).take(pa.array(np.arange(0, sum(map(len, held)), 2)))]
            for held in (self._inputs, self._made)
        )
        self._bytes = self._inputs[0].nbytes + self._made[0].nbytes
        self._places = [
            place for number, place in enumerate(self._places) if place < end or number % 2
        ]


class _Ends:
    """The rows of a run with the largest and the smallest values, or lengths of vectors, of each
    feature of floats."""

    def __init__(self, view: FeatureView) -> None:
        self._features = [
            f for f in view.features if f.dtype.startswith("float") and f.max_items is None
        ]
        self._found: dict[tuple[str, int], list[tuple[float, pa.RecordBatch, pa.RecordBatch]]] = {}
        self._none = pa.RecordBatch.from_pylist([], view.feature_schema())
        self._shown: pa.Schema | None = None

    def look_at(self, batch: pa.RecordBatch, done: Outcome) -> None:
        """Look at a window, or a piece of one: its row with the largest and with the smallest
        value."""
        if self._shown is None:
            self._shown = _shown(batch).schema
        for feature in self._features:
            sizes = _sizes(feature, done.features.column(feature.name))
            for sign in (1, -1):
                place = int(np.argmax(sizes)) if sign > 0 else int(np.argmin(sizes))
                held = self._found.get((feature.name, sign), [])
                if len(held) < END_ROWS or sign * float(sizes[place]) > held[-1][0]:
                    shown = _shown(batch).take(pa.array([done.rows[place]]))
                    made = done.features.take(pa.array([place]))
                    self._take(feature, sign, float(sizes[place]), shown, made)

    def _take(
        self, feature: Feature, sign: int, size: float, shown: pa.RecordBatch, made: pa.RecordBatch
    ) -> None:
        """Take a row, if it is farther out than one that is held."""
        held = self._found.setdefault((feature.name, sign), [])
        held.append((sign * size, shown, made))
        held.sort(key=lambda row: -row[0])
        del held[END_ROWS:]

    def add(self, shown: pa.RecordBatch, made: pa.RecordBatch) -> None:
        """Add rows that were found elsewhere: their inputs, and the features computed of them."""
        if self._shown is None:
            self._shown = shown.schema
        for feature in self._features:
            sizes = _sizes(feature, made.column(feature.name))
            for row, size in enumerate(sizes.tolist()):
                for sign in (1, -1):
                    self._take(feature, sign, size, shown.slice(row, 1), made.slice(row, 1))

    @property
    def found(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def rows(self) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Their inputs, and the features that the run computed."""
        assert self._shown is not None
        rows = [row for held in self._found.values() for row in held]
        shown = pa.concat_batches(
            [pa.RecordBatch.from_pylist([], self._shown), *(row[1] for row in rows)]
        )
        return shown, pa.concat_batches([self._none, *(row[2] for row in rows)])


def _shown(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns that the model gets."""
    return batch.drop_columns(["input_hash"])


def _sizes(feature: Feature, column: pa.Array) -> npt.NDArray[Any]:
    if feature.dim is None:
        return np.asarray(column)
    values = np.asarray(column.flatten()).reshape(-1, feature.dim).astype(np.float32, copy=False)
    squares: npt.NDArray[np.float32] = np.asarray(np.einsum("ij,ij->i", values, values))
    return squares
