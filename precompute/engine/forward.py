"""Forward: the stage that computes batches. Batches are launched and landed, on a CPU several at
once where that is quicker; of one that fails, the rows are tried in smaller ones until the bad row
stands alone, or until they fit in memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from precompute.engine.ahead import Meter
from precompute.engine.batches import Budget, Pace
from precompute.engine.resources import (
    DeviceLostError,
    Lanes,
    first_line,
    is_device_lost,
    is_out_of_memory,
    release_threads,
    without_locals,
)
from precompute.engine.rows import (
    MISFIT,
    UNANSWERED,
    Batch,
    Declared,
    Later,
    Misfit,
    Rows,
    Window,
)
from precompute.model import Features, KeepingModel, Model, StagedModel, Unanswered
from precompute.registry import described
from precompute.store.errors import ModelError
from precompute.store.feature_view import FeatureView


class _Retry(Exception):
    """A batch without inputs: it is cut in pieces like one that failed."""


@dataclass(slots=True)
class _Launched:
    """A batch on its way: what :meth:`StagedModel.land` waits for, or a lane's future, or the
    features, or the error, until its turn comes."""

    batch: Batch
    result: Any = None
    error: BaseException | None = None
    in_lane: bool = False
    started: float = 0.0
    ended: float = 0.0
    """When it ended; known of a batch in a lane."""
    size_bytes: int = 0
    """Memory that it took beyond what was in use; 0 when not measured."""


class Forward:
    """Runs the model over the batches of one stream.

    Args:
        staged: the model, where it is one.
        hand_on_s: a window that takes longer is handed on in pieces, about this often.
        lanes: how many batches are computed at once, sharing ``threads`` compute threads.
    """

    def __init__(
        self,
        model: Model,
        staged: StagedModel | None,
        view: FeatureView,
        meter: Meter,
        budget: Budget,
        pace: Pace | None = None,
        hand_on_s: float = float("inf"),
        lanes: int = 1,
        threads: int = 1,
    ) -> None:
        self._model, self._staged, self._meter, self._budget = model, staged, meter, budget
        self._pace, self._hand_on_s = pace, hand_on_s
        self._depth = 0 if staged is None else staged.device.depth
        self._lane_count, self._threads = lanes, threads
        self._lanes: Lanes | None = None
        self._computed_until = 0.0
        """When the last of the batches that lanes computed ended."""
        self._landed_at = 0.0
        """When the last batch landed."""
        once_more = model.once_more if isinstance(model, KeepingModel) else ""
        self._made = Declared(view, once_more).columns
        """A copy of what the model returned for so many rows, in the types that the view declares;
        raises Misfit for what does not fit, whose rows are found as those of a batch that
        raises."""

    def windows(
        self, batches: Iterator[Batch], ready: Callable[[], bool] = lambda: True
    ) -> Iterator[Window]:
        """Windows whose every row was computed or rejected, or pieces of them. On a GPU, later
        batches are launched before the first is waited for, if they are ``ready``."""
        under_way: deque[_Launched] = deque()
        self._begin_lanes()
        try:
            while True:
                # What is not there yet is not waited for: the producer may be waiting for what is
                # under way, and it is timed by when it is done.
                while under_way and (len(under_way) > self._depth or not ready()):
                    if done := self._land(under_way.popleft()):
                        yield done
                batch = next(batches, None)
                if batch is None:
                    break
                under_way.append(self._launch(batch))
            while under_way:
                if done := self._land(under_way.popleft()):
                    yield done
        finally:
            if self._lanes is not None:
                self._lanes.close()
                self._lanes = None

    def _begin_lanes(self) -> None:
        count = self._lane_count
        if count > 1 and self._staged is not None:
            # this thread's team would be in the way of theirs
            release_threads()
            self._lanes = Lanes(
                count,
                max(1, self._threads // count),
                self._threads,
                self._staged.device.compute_with,
            )
            # one more for each lane, so that none waits for the one whose turn it is to be landed
            self._depth = 2 * count

    def _launch(self, batch: Batch) -> _Launched:
        launched = _Launched(batch)
        if batch.positions is None:
            return launched
        if self._lanes is not None:
            launched.in_lane = True
            launched.result = self._lanes.put(partial(self._launch_in_lane, launched))
            return launched
        launched.started = time.monotonic()
        bytes_before = self._bytes_before()
        try:
            if isinstance(batch.inputs, Later):
                raise _Retry
            launched.result = (
                self._model.compute(batch.inputs)
                if self._staged is None
                else self._staged.launch(batch.inputs)
            )
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            launched.error = without_locals(exc)
        else:
            if bytes_before and self._staged is not None:
                # memory is given out when a batch is launched, whenever it computes
                launched.size_bytes = max(
                    0, self._staged.device.peak_bytes(reset=True) - bytes_before
                )
        batch.inputs = None
        self._meter.forward_s += time.monotonic() - launched.started
        return launched

    def _launch_in_lane(self, launched: _Launched) -> pa.RecordBatch:
        batch, launched.started = launched.batch, time.monotonic()
        assert self._staged is not None
        assert batch.positions is not None
        try:
            if isinstance(batch.inputs, Later):
                raise _Retry
            return self._made(
                self._staged.land(self._staged.launch(batch.inputs)), len(batch.positions)
            )
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            without_locals(exc)
            raise
        finally:
            batch.inputs = None
            launched.ended = time.monotonic()

    def _bytes_before(self) -> int:
        """Bytes in use, when it is worth knowing what a batch takes."""
        if self._staged is None or self._budget.settled:
            return 0
        # what was held before this batch is not its own
        self._staged.device.peak_bytes(reset=True)
        return self._staged.device.peak_bytes(reset=True)

    def _land(self, launched: _Launched) -> Window | None:
        """Land a batch; returns what is to be handed on now: the window, when this was its end, or
        a piece of it."""
        window, positions = launched.batch.window, launched.batch.positions
        if positions is None:
            # nothing refers to them any more, while the window waits to be written
            window.prepared = window.costs = None
            return window
        try:
            if launched.error is not None:
                raise launched.error
            features = self._landed(launched, len(positions))
        except (ModelError, KeyboardInterrupt):
            # the model's own word that view and source do not fit it: no row's fault
            raise
        except BaseException as exc:
            # a model may raise anything; which row did it is what counts
            _check_device(exc)
            self._retry(window, positions, without_locals(exc))
        else:
            window.pieces.append((window.rows[positions], features))
            self._tell(launched, *self._count(window, positions))
        now = time.monotonic()
        self._landed_at = now
        if window.handed_on is None:
            window.handed_on = launched.started
        if now - window.handed_on < self._hand_on_s:
            return None
        window.handed_on = now
        return window.piece()

    def _landed(self, launched: _Launched, rows: int) -> pa.RecordBatch:
        if launched.in_lane:
            features: pa.RecordBatch = launched.result.result()
            # what several lanes computed meanwhile counts once
            self._meter.forward_s += max(
                0.0, launched.ended - max(launched.started, self._computed_until)
            )
            self._computed_until = max(launched.ended, self._computed_until)
            return features
        waiting = time.monotonic()
        made: Features = (
            launched.result if self._staged is None else self._staged.land(launched.result)
        )
        self._meter.landing_s += time.monotonic() - waiting
        return self._made(made, rows)

    def _tell(self, launched: _Launched, cost: int, padded_cost: int) -> None:
        """Report a batch that went well to budget and pace: what it took since it was launched, or
        since the one before it landed; or in its lane, beside the others."""
        if launched.in_lane:
            seconds = launched.ended - launched.started
        else:
            seconds = time.monotonic() - max(launched.started, self._landed_at)
        self._meter.batch_took(seconds)
        self._budget.done(launched.batch.budget, cost, seconds, launched.size_bytes, padded_cost)
        if self._pace is not None:
            self._pace.done(cost, seconds)

    def _count(self, window: Window, positions: Rows) -> tuple[int, int]:
        """Count the cost of some rows, without padding and with it."""
        cost, padded_cost = window.cost(positions)
        self._meter.batches += 1
        if window.costs is not None:
            self._meter.cost += cost
            self._meter.padded_cost += padded_cost
            if self._staged is not None and window.prepared is not None:
                self._meter.flops += self._staged.flops(window.prepared, positions)
        return cost, padded_cost

    def _retry(self, window: Window, positions: Rows, exc: BaseException) -> None:
        """Compute the rows of a batch that failed in smaller ones: until the row that fails stands
        alone, or until they fit in memory."""
        full = is_out_of_memory(exc)
        # one halving for each batch: a row that never fits must not shrink the batches of all
        # others to nothing
        if full:
            self._meter.out_of_memory += 1
            self._budget.out_of_memory(window.cost(positions)[1])
        if self._halve(window, positions, exc) and full:
            self._budget.was_one_row()

    def _halve(self, window: Window, positions: Rows, exc: BaseException) -> bool:
        """Whether a single row did not fit in memory."""
        self._meter.retries += 1
        one_row = False
        if is_out_of_memory(exc):
            if self._lanes is not None:
                # it has its second try without them
                self._lanes.wait()
            if self._staged is not None:
                self._staged.device.release()
        elif len(positions) == 1 and not isinstance(exc, _Retry):
            _reject(window, int(window.rows[positions[0]]), exc)
            return False
        middle = max(1, len(positions) // 2)
        for part in (positions[:middle], positions[middle:]):
            if not len(part):
                continue
            try:
                features = self._computed(window, part)
            except (ModelError, KeyboardInterrupt):
                raise
            except BaseException as failed:
                without_locals(failed)
                _check_device(failed)
                # with out of memory, that was its second try, alone and with the caches empty
                if len(part) == 1:
                    _reject(window, int(window.rows[part[0]]), failed)
                    one_row |= is_out_of_memory(failed)
                else:
                    one_row |= self._halve(window, part, failed)
                continue
            window.pieces.append((window.rows[part], features))
            self._count(window, part)
        return one_row

    def _computed(self, window: Window, positions: Rows) -> pa.RecordBatch:
        if self._staged is None:
            return self._made(self._model.compute(window.at(positions)), len(positions))
        assert window.prepared is not None
        inputs = self._staged.inputs(window.prepared, positions)
        if self._lanes is not None:
            in_lane: pa.RecordBatch = self._lanes.put(
                partial(self._launch_in_lane, _Launched(Batch(window, positions, inputs=inputs)))
            ).result()
            return in_lane
        return self._made(self._staged.land(self._staged.launch(inputs)), len(positions))


def _reject(window: Window, row: int, exc: BaseException) -> None:
    if isinstance(exc, Misfit):
        window.reject(row, MISFIT, str(exc))
    else:
        stage = UNANSWERED if isinstance(exc, Unanswered) else "model"
        window.reject(row, stage, described(exc))


def _check_device(exc: BaseException) -> None:
    """Raises:
    DeviceLostError: it is lost; no smaller batch would help.
    """
    if is_device_lost(exc):
        raise DeviceLostError(
            f"the GPU is lost to this process: {first_line(exc)}"
        ) from without_locals(exc)
