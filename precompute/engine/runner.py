"""Runner: rows → batches → model → checked features. A bad row is one bad row: it is found,
rejected with a reason, and the rest go on.

The batch job takes :meth:`Runner.stream`, whose stages overlap in threads; the fallback takes
:func:`compute`, the same stages one after the other. So a fallback's values are the batch job's
values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.engine.ahead import Ahead, Meter
from precompute.engine.batches import DEVICE_WINDOW_ROWS, Budget, Pace, Preparation
from precompute.engine.forward import Forward
from precompute.engine.resources import (
    ResidentPeak,
    is_out_of_memory,
    keep_freed_memory,
    release_threads,
    usable_threads,
)
from precompute.engine.rows import Batch, Declared, Outcome, Window, in_order
from precompute.model import CountingModel, KeepingModel, Model, SizedModel, StagedModel
from precompute.store.errors import ModelError
from precompute.store.feature_view import FeatureView

MAX_BATCH_ROWS = 4096
"""Rows given at once to a model that names no costs: 1–8 k rows is the right size for MLPs on
CPUs."""

AHEAD_WINDOWS = 2
"""Windows, or pieces of them, that may be computed and not yet taken: one ready, one that the model
is at. A killed run loses them, beside its chunk."""

HAND_ON_S = 1.0
"""Seconds after which a window is handed on in pieces, about this often: what is done is soon safe,
and a progress bar moves."""

BATCH_S = 1.0
"""Seconds that a batch should take at most, so that there are pieces to hand on."""
START_ROWS = 8
"""Rows of the first batches of a model that names no costs: it may take milliseconds for 4,096
rows, or a second for each."""

LANE_ROWS = 4
"""Rows of a lane at least: below, the compute threads of a lane each would take longer to begin
than those of one batch wait for one another."""

AHEAD_BATCHES = 8
"""Batches ready for the model: a GPU never waits for one to be put together, and a budget that was
cut takes effect soon."""

SEARCHED_UP_TO = 64
"""Multiples of the first budget that are tried on a device that computes while others are launched.
On a CPU the first one stays: on AMD's Zen 5 a search cost MiniLM more than it gained."""


def compute(model: Model, view: FeatureView, batch: pa.RecordBatch) -> Outcome:
    """Run the model over one window of rows: :meth:`Runner.compute` of a runner made for it, which
    searches no budget.

    Raises:
        ModelError: as of :class:`Runner`.
    """
    return Runner(model, view, search=False).compute(batch)


class Runner:
    """Runs one model for one view.

    Args:
        meter: called with what every stage took; stored by the caller to report it.
        budget: what a batch may cost; by default it finds itself. Given, it is shared with an
            earlier runner of the same model.
        search: whether a budget of its own looks for the best on a GPU; else it stays what the
            model begins with.
        lanes: how many batches a stream computes at once on a CPU, of a model that is
            ``concurrent``; by default one for each compute thread.
        in_run, again: of a model that keeps its values: whether it is for a run of the view, and
            whether those that the view did not accept are computed once more.

    Raises:
        ModelError: (from every method) the model raised one, to say that view and source do not fit
            it. Rows for which it returns something other than the view declares are found as those
            that it raises for, and rejected with the stage :data:`precompute.engine.rows.MISFIT`.
    """

    def __init__(
        self,
        model: Model,
        view: FeatureView,
        meter: Meter | None = None,
        budget: Budget | None = None,
        *,
        search: bool = True,
        lanes: int | None = None,
        in_run: bool = False,
        again: bool = False,
    ) -> None:
        self._declared = Declared(view)
        if isinstance(model, KeepingModel):
            self._declared = Declared(view, model.once_more)
            model = model.judged_by(self._declared.against, in_run=in_run, again=again)
        self.meter = Meter() if meter is None else meter
        self._model, self._view = model, view
        self._staged = model if isinstance(model, StagedModel) else None
        threads = self._lane_threads()
        self._lanes, self._threads = (lanes or threads) if threads else 1, max(1, threads)
        self.budget = budget or self._first_budget(search)
        self._peak = ResidentPeak()
        self._stages_before: list[Ahead[Any]] = []
        """Stages of the stream before."""
        # Made once: finding which protocols a model follows takes as long as a small model does.
        self._preparation = Preparation(model, self._staged, view, lambda _: self.budget.next())
        self._forward = Forward(model, self._staged, view, self.meter, self.budget)

    def _lane_threads(self) -> int:
        """Compute threads that lanes share; 0 of a model that computes one batch after the
        other."""
        staged = self._staged
        # a user's own model need not say that it is concurrent
        if staged is None or staged.device.depth or not getattr(staged, "concurrent", False):
            return 0
        return usable_threads(staged.device.threads())

    def _first_budget(self, search: bool) -> Budget:
        model = self._model if self._staged is None else self._staged
        most = model.max_cost if isinstance(model, (SizedModel, StagedModel)) else MAX_BATCH_ROWS
        if self._staged is None or most is not None:
            if not isinstance(most, (int, np.integer)):
                raise ModelError(
                    f"the model of view {self._view.name!r}: max_cost is {most!r:.80}, not a whole"
                    " number"
                )
            return Budget(int(most), fixed=True)
        device = self._staged.device
        return Budget(
            self._staged.start_cost,
            search=search and device.depth > 0,
            reach=SEARCHED_UP_TO,
            free_bytes=device.free_bytes,
        )

    def _next_budget(self, left: int) -> int:
        return (
            self.budget.next() if self._lanes == 1 else self.budget.next(left // (2 * self._lanes))
        )

    @property
    def window_rows(self) -> int:
        """Rows that a window of :meth:`stream` should have, as
        :func:`precompute.engine.batches.joined` takes it."""
        return DEVICE_WINDOW_ROWS if self._staged is not None and self._staged.device.depth else 1

    def lanes_for(self, rows: int) -> int:
        """How many lanes are best for a window of so few rows: one for each compute thread that has
        :data:`LANE_ROWS` of them, or one with all threads."""
        return self._threads if rows >= LANE_ROWS * self._threads else 1

    def compute(
        self, batch: pa.RecordBatch, *, lanes: int = 1, go_on: Callable[[], object] = lambda: None
    ) -> Outcome:
        """Run the model over one window of rows; memory for their features must be at hand.

        Args:
            lanes: how many batches are computed at once, by a compute thread each, of a model that
                is ``concurrent``; or one after the other, by all.
            go_on: called before each batch; may raise.
        """
        forward, preparation = self._forward, self._preparation
        if lanes > 1:
            forward = Forward(
                self._model,
                self._staged,
                self._view,
                self.meter,
                self.budget,
                lanes=lanes,
                threads=lanes,
            )
            shares: list[int] = []

            def next_budget(left: int) -> int:
                # of few rows, each lane has one batch
                shares.append(-(-left // lanes))
                return min(self.budget.next(), shares[0])

            preparation = Preparation(self._model, self._staged, self._view, next_budget)

        def batches() -> Iterator[Batch]:
            for one in preparation.batches([preparation.window(Window(batch, batch))]):
                go_on()
                yield one

        return self._outcome(next(forward.windows(batches())))

    def stream(
        self, windows: Iterable[pa.RecordBatch], *, hidden: Iterable[str] = (), memory_mb: int = 512
    ) -> Generator[tuple[pa.RecordBatch, Outcome]]:
        """Run the model over many windows, the stages overlapping; windows come out in the order
        they went in.

        A window that takes longer than :data:`HAND_ON_S` comes in several pieces, each row in one
        of them; so does one that takes long to prepare. The rows of a piece are in order, and so
        are those of a window whose model names no costs.

        Args:
            windows: rows, at most a few thousand at a time; advanced in a thread.
            hidden: columns of them that the model is not shown.
            memory_mb: bound of what lies between the stages, a window in each apart.

        Yields:
            each window as it came, and its features, or those of some of its rows.

        Raises:
            ModelError: as of the class; and whatever ``windows`` raises.
        """
        keep_freed_memory()
        # of the one who loaded the model here: from now on the model's stage computes
        release_threads()
        # when their stream was closed they may have been in the middle of something; the stage that
        # reads does not call the model
        for stage in self._stages_before[1:]:
            stage.join()
        stages = self._stages_before = []
        try:
            for stage in self._stages(_shown(windows, set(hidden)), max(1, memory_mb * 2**20 // 3)):
                stages.append(stage)
            done: Ahead[Window] = stages[-1]
            check, write = self.meter.stage("check"), self.meter.stage("write")
            for window in done:
                write.starved_s = done.waited_s
                started = time.monotonic()
                outcome = self._outcome(window)
                ready = time.monotonic()
                check.busy_s += ready - started
                self.meter.rows += outcome.done
                yield window.batch, outcome
                write.busy_s += time.monotonic() - ready
        finally:
            if stages:
                stages[-1].close()

    def _stages(
        self, windows: Iterator[tuple[pa.RecordBatch, pa.RecordBatch]], share: int
    ) -> Iterator[Ahead[Any]]:
        """The stages before the last, each in a thread of its own and at most ``share`` bytes
        ahead: read, prepare, batch, model."""
        plain = self._staged is None and not isinstance(self._model, SizedModel)
        pace = Pace(START_ROWS if plain else None, BATCH_S)
        preparation = Preparation(
            self._model,
            self._staged,
            self._view,
            lambda left: min(self._next_budget(left), pace.limit),
        )
        lanes = {"lanes": self._lanes, "threads": self._threads}
        forward = Forward(
            self._model, self._staged, self._view, self.meter, self.budget, pace, HAND_ON_S, **lanes
        )
        times = self.meter.stage
        read = Ahead("read", windows, times("read"), lambda window: int(window[0].nbytes), share)
        yield read
        prepared = Ahead(
            "prepare",
            preparation.windows(read),
            times("prepare"),
            Window.prepared_bytes,
            share,
            read,
        )
        yield prepared
        batches = Ahead(
            "batch",
            preparation.batches(prepared),
            times("batch"),
            Batch.input_bytes,
            share,
            prepared,
            AHEAD_BATCHES,
        )
        yield batches
        yield Ahead(
            "model",
            forward.windows(batches, batches.ready),
            times("model"),
            Window.computed_bytes,
            share,
            batches,
            AHEAD_WINDOWS - 1,
        )

    def figures(self, seconds: float) -> dict[str, Any]:
        """What the run's report says of the engine, plain figures only.

        ``mfu`` is the model's FLOP/s while it computed as a share of what matrix products of its
        shapes reach on the same device, measured here (model FLOPs utilisation, Chowdhery et al.
        2022, appendix B, with a measured instead of a data sheet's peak).
        """
        figures = (
            self.meter.to_json(seconds)
            | self.state_figures()
            | self.device_figures(peak=self.meter.flops > 0)
        )
        if "peak_flops" in figures:
            figures |= self.meter.peak_figures(figures["peak_flops"])
        return figures

    def state_figures(self) -> dict[str, Any]:
        """State of the engine: what a batch may cost by now, the memory taken at most, and how many
        batches are computed at once."""
        figures: dict[str, Any] = {
            "budget": self.budget.cost,
            "peak_memory_bytes": self._peak.bytes(),
        }
        if self._lanes > 1:
            figures["lanes"] = {
                "count": self._lanes,
                "threads": max(1, self._threads // self._lanes),
            }
        # of a forward that is played back where shapes repeat
        if counts := getattr(getattr(self._staged, "forward", None), "counts", None):
            figures["graphs"] = dict(counts)
        # of a model that computes elsewhere: what was sent, and what it cost
        if isinstance(self._staged, CountingModel):
            figures[self._staged.device.name] = self._staged.figures()
        return (
            figures
            if self._staged is None
            else figures | {"device_peak_memory_bytes": self._staged.device.peak_bytes()}
        )

    def device_figures(self, *, peak: bool = True) -> dict[str, Any]:
        """Where the model computes, in what its costs count, and the FLOP/s that a large matrix
        product reaches there now if ``peak``."""
        if self._staged is None:
            return {"device": "cpu", "cost_unit": "rows"}
        device = self._staged.device
        figures: dict[str, Any] = {"device": device.name, "cost_unit": self._staged.cost_unit}
        if peak:
            try:
                figures["peak_flops"] = round(device.peak_flops())
            except KeyboardInterrupt:
                raise
            except BaseException as exc:
                # the model may have taken all there is: no reason to fail a run for a figure
                if not is_out_of_memory(exc):
                    raise
            device.release()
            # the product's memory is not the model's
            device.peak_bytes(reset=True)
        return figures

    def _outcome(self, window: Window) -> Outcome:
        """What the model made of a window, or of a piece, as features in the rows' order; the model
        computes the next one meanwhile."""
        pieces = []
        while window.pieces:
            rows, columns = window.pieces.pop(0)
            bad = self._declared.bad(columns)
            for position, error in bad.items():
                window.reject(int(rows[position]), "output", error)
            if bad:
                keep = np.ones(len(rows), np.bool_)
                keep[list(bad)] = False
                rows, columns = rows[keep], columns.filter(pa.array(keep))
            pieces.append((rows, columns))
        rejections = [window.rejections[row] for row in sorted(window.rejections)]
        if window.first:
            rejections = [
                replace(rejection, row=window.first + rejection.row) for rejection in rejections
            ]
        rows, features = in_order(self._view, pieces)
        return Outcome(window.first + rows, features, rejections, window.number, window.last)


def _shown(
    windows: Iterable[pa.RecordBatch], hidden: set[str]
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Each window as it came, and what the model sees of it."""
    try:
        for window in windows:
            yield (
                window,
                (
                    window.select([n for n in window.schema.names if n not in hidden])
                    if hidden
                    else window
                ),
            )
    finally:
        if isinstance(windows, Generator):
            windows.close()
