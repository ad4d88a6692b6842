"""Prepare: the stage before the model: windows are prepared, and cut in batches of like cost. A row
that cannot be prepared is one bad row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.budget import Pace
from precompute.engine.window import Batch, Later, Rows, Window, taken
from precompute.model import CheckingModel, Model, SizedModel, StagedModel
from precompute.project_module import described
from precompute.store.errors import ModelError
from precompute.store.feature_view import FeatureView

WINDOW_ROWS = 65_536
"""Rows of a window, at most."""
WIDE_ROWS = 8192
"""Rows of a window of rows that are not narrow (:func:`window_rows`): so many texts are sorted
together. 1,024 instead costs 12 % of the rate at a large budget."""
WINDOW_BYTES = 2**21
"""Bytes of a window of narrow rows, at most."""

DEVICE_WINDOW_ROWS = 131_072
"""Rows of a window for a device that computes large batches: 64 times the first one of rows, and of
titles of 10 tokens, too."""
MOST_JOINED_BYTES = 32 * 2**20
"""Bytes of a window that is put together, at most: several lie between the stages."""


def window_rows(schema: pa.Schema) -> int:
    """How many rows of these columns to read as one window: more of narrow ones, since each window
    costs the stages some 0.3 ms. Of 10⁷ rows of an id and a number a run took 167 ns of CPU a row
    by 8,192, and takes 134 by 65,536 (AMD Zen 5)."""
    try:
        row_bytes = max(1, sum(int(field.type.bit_width) for field in schema) // 8)
    except ValueError:
        # of a text or a list there is none
        return WIDE_ROWS
    return min(WINDOW_ROWS, max(WIDE_ROWS, WINDOW_BYTES // row_bytes))


def joined(
    batches: Iterator[pa.RecordBatch], most_rows: int, most_bytes: int = MOST_JOINED_BYTES
) -> Iterator[pa.RecordBatch]:
    """Batches put together, one after the other, as far as they stay within both; what is larger
    alone is as it was.

    Args:
        batches: of one schema.
        most_rows: rows of one that is put together; 1 leaves all as they are.
        most_bytes: bytes of one.
    """
    together: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        if together and (
            rows + batch.num_rows > most_rows or size_bytes + batch.nbytes > most_bytes
        ):
            yield _one(together)
            together, rows, size_bytes = [], 0, 0
        together.append(batch)
        rows, size_bytes = rows + batch.num_rows, size_bytes + int(batch.nbytes)
    if together:
        yield _one(together)


def _one(together: list[pa.RecordBatch]) -> pa.RecordBatch:
    return together[0] if len(together) == 1 else pa.concat_batches(together)


MIN_FILL = 0.5
"""Share of the budget below which a batch is not cut for the sake of less padding, since small
batches are slow."""


def batches_by_cost(
    costs: npt.NDArray[np.int64], max_cost: int | Callable[[int], int], max_padding: float = 1.0
) -> Iterator[npt.NDArray[np.int64]]:
    """Row numbers of each batch, dearest rows first, so that running out of memory shows at the
    start.

    The padded cost of a batch, rows times the dearest row, stays within ``max_cost``; a single row
    beyond it goes alone.

    Args:
        costs: int64 [rows], at least 1.
        max_cost: budget of one batch, or what returns it when the batch is made, given the cost of
            all rows that are left.
        max_padding: share of the padded cost that may be padding, where the batch stays at least
            half full without more.
    """
    if len(costs) and costs.min() == costs.max():
        yield from _alike(len(costs), int(costs[0]), max_cost)
        return
    order = np.argsort(-costs, kind="stable")
    sums = np.concatenate(([0], np.cumsum(costs[order])))
    start = 0
    while start < len(order):
        budget = max_cost(int(sums[-1] - sums[start])) if callable(max_cost) else max_cost
        dearest = int(costs[order[start]])
        rows = max(1, min(budget // dearest, len(order) - start))
        if max_padding < 1 and costs[order[start + rows - 1]] < dearest:
            least = max(1, min(rows, int(np.ceil(MIN_FILL * budget / dearest))))
            number = np.arange(least, rows + 1)
            # grows with the rows, which are sorted
            padding = 1 - (sums[start + number] - sums[start]) / (number * dearest)
            rows = max(least, int(least - 1 + np.count_nonzero(padding <= max_padding)))
        yield order[start : start + rows]
        start += rows


def _alike(
    rows: int, cost: int, max_cost: int | Callable[[int], int]
) -> Iterator[npt.NDArray[np.int64]]:
    positions = np.arange(rows)
    start = 0
    while start < rows:
        end = start + max(
            1, (max_cost((rows - start) * cost) if callable(max_cost) else max_cost) // cost
        )
        yield positions[start:end]
        start = end


PREPARE_S = 5.0
"""What preparing a window should take at most, or it is cut in smaller ones. Long, since rows are
best sorted in large windows."""
START_WINDOW_ROWS = 64
"""Rows of the first window that is prepared."""

MAX_PADDING = 0.01
"""Share of a batch that may be padding, as long as the batch is not cut below half its budget for
it. Measured over 5,268 texts at 2,048 tokens: 1.28 % without, 0.78 % with."""


class Preparation:
    """Makes windows and batches for one model.

    Args:
        staged: the model, where it is one.
        next_budget: returns what the batch made now may cost, given the cost of what is left of its
            window.
    """

    def __init__(
        self,
        model: Model,
        staged: StagedModel | None,
        view: FeatureView,
        next_budget: Callable[[int], int],
    ) -> None:
        self._staged, self._view, self._next_budget = staged, view, next_budget
        self._checking = model if isinstance(model, CheckingModel) else None
        self._sized = model if staged is None and isinstance(model, SizedModel) else None

    def windows(self, batches: Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]) -> Iterator[Window]:
        """Prepared windows of batches, each as it came and as the model sees it; several of one
        that takes longer than :data:`PREPARE_S`."""
        paced = (self._staged or self._sized or self._checking) is not None
        pace = Pace(START_WINDOW_ROWS if paced else None, PREPARE_S)
        # a model whose rows become large, such as pictures, declares how many it takes at once
        most = getattr(self._staged, "prepared_rows", None)
        for number, (batch, shown) in enumerate(batches):
            first = 0
            while True:
                part = shown.slice(first, pace.limit if most is None else min(most, pace.limit))
                started = time.monotonic()
                window = self.window(
                    Window(batch, part, number, first, first + part.num_rows >= batch.num_rows)
                )
                if part.num_rows:
                    pace.done(part.num_rows, time.monotonic() - started)
                yield window
                first += part.num_rows
                if window.last:
                    break

    def batches(self, windows: Iterable[Window]) -> Iterator[Batch]:
        """The batches of each window, dearest rows first, and its end."""
        for window in windows:
            for positions, budget in self._planned(window):
                yield Batch(window, positions, budget, self._inputs(window, positions))
            yield Batch(window, None)

    def window(self, window: Window) -> Window:
        """A window, prepared."""
        if self._checking is not None:
            for row, reason in self._unusable(self._checking, window):
                window.reject(row, "input", reason)
        window.rows = np.arange(window.shown.num_rows)
        if window.rejections:
            window.rows = np.setdiff1d(window.rows, np.fromiter(window.rejections, np.int64))
        if not len(window.rows):
            return window
        if self._staged is not None:
            self._prepare_staged(self._staged, window)
        elif self._sized is not None:
            window.costs = self._costs(
                self._called("costs()", self._sized.costs, taken(window.shown, window.rows)), window
            )
        return window

    def _prepare_staged(self, model: StagedModel, window: Window) -> None:
        try:
            prepared = model.prepare(
                taken(window.shown, window.rows) if window.rejections else window.shown
            )
        except ModelError:
            raise
        except (Exception, SystemExit):
            # which row did it is what counts
            self._find_unpreparable(model, window, window.rows)
            window.rows = np.array(
                [row for row in window.rows.tolist() if row not in window.rejections], np.int64
            )
            if not len(window.rows):
                return
            try:
                prepared = model.prepare(taken(window.shown, window.rows))
            except ModelError:
                raise
            except (Exception, SystemExit) as exc:
                what = (
                    f"prepare() of {len(window.rows):,} rows raised {described(exc)}, though it"
                    " took the same rows in smaller numbers"
                )
                raise ModelError(f"the model of view {self._view.name!r}: {what}") from exc
        for position, reason in prepared.bad.items():
            window.reject(int(window.rows[position]), "input", reason)
        window.prepared, window.costs = prepared, self._costs(prepared.costs, window)

    def _find_unpreparable(self, model: StagedModel, window: Window, rows: Rows) -> None:
        try:
            model.prepare(taken(window.shown, rows))
        except ModelError:
            raise
        except (Exception, SystemExit) as exc:
            if len(rows) == 1:
                window.reject(int(rows[0]), "prepare", described(exc))
                return
            self._find_unpreparable(model, window, rows[: len(rows) // 2])
            self._find_unpreparable(model, window, rows[len(rows) // 2 :])

    def _called(
        self, what: str, method: Callable[[pa.RecordBatch], Any], batch: pa.RecordBatch
    ) -> Any:
        try:
            return method(batch)
        except ModelError:
            raise
        except Exception as exc:
            # a user's model may raise anything
            raise ModelError(
                f"the model of view {self._view.name!r}: {what} raised {described(exc)}"
            ) from exc

    def _unusable(self, model: CheckingModel, window: Window) -> list[tuple[int, str]]:
        """The rows that the model takes none of, with its reasons.

        Raises:
            ModelError: it names them otherwise than by their position.
        """
        named = self._called("unusable()", model.unusable, window.shown)
        if not isinstance(named, Mapping) or not all(
            isinstance(row, (int, np.integer)) and 0 <= row < window.shown.num_rows for row in named
        ):
            raise ModelError(
                f"the model of view {self._view.name!r}: unusable() is to return {{position of a"
                f" row, from 0: reason}} of {window.shown.num_rows} rows, and returned"
                f" {str(named)[:80]}"
            )
        return [(int(row), str(reason)) for row, reason in named.items()]

    def _costs(self, named: npt.ArrayLike, window: Window) -> Rows:
        """What the model named, at least 1 each.

        Raises:
            ModelError: no integer for each row.
        """
        costs = np.asarray(named)
        if costs.shape != (len(window.rows),) or costs.dtype.kind not in "iu":
            raise ModelError(
                f"the model of view {self._view.name!r}: its costs are {costs.dtype}"
                f" {list(costs.shape)}, not an integer for each of {len(window.rows)} rows"
            )
        at_least_1: Rows = np.maximum(costs, 1, dtype=np.int64, casting="unsafe")
        return at_least_1

    def _planned(self, window: Window) -> Iterator[tuple[Rows, int]]:
        """Positions of each batch, and the budget it was made under."""
        positions = np.arange(len(window.rows))
        if window.prepared is not None and window.prepared.bad:
            positions = np.setdiff1d(positions, np.fromiter(window.prepared.bad, np.int64))
        if window.costs is None or len(positions) < 2:
            start = 0
            while start < len(positions):
                budget = self._next_budget(len(positions) - start)
                yield positions[start : start + budget], budget
                start += budget
            return
        budget = 0

        def next_budget(left: int) -> int:
            nonlocal budget
            budget = self._next_budget(left)
            return budget

        padding = 1.0 if self._staged is None else MAX_PADDING
        for chosen in batches_by_cost(window.costs[positions], next_budget, padding):
            yield positions[chosen], budget

    def _inputs(self, window: Window, positions: Rows) -> Any:
        if self._staged is None or window.prepared is None:
            return window.at(positions)
        try:
            return self._staged.inputs(window.prepared, positions)
        except ModelError:
            raise
        except (Exception, SystemExit):
            return Later()
