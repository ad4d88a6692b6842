"""Runner: rows → batches → model → checked features. A bad row is one bad row: it is found, rejected with a reason, and the rest go on.

    read ─► prepare (tokenise, encode) ─► batch (rows of like cost) ─► model (copy in, forward, copy out) ─► check ─► write

The batch job takes :meth:`Runner.stream`, whose stages overlap in threads (the last two share that of whoever takes the windows, and
writes them); the fallback takes :meth:`Runner.compute`, the same stages one after the
other. So a fallback's values are the batch job's values.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.engine.ahead import Ahead
from precompute.engine.batching import batches_by_cost
from precompute.engine.budget import Budget
from precompute.engine.memory import ResidentPeak, is_out_of_memory
from precompute.engine.meter import Meter
from precompute.engine.native import keep_freed_memory, release_threads
from precompute.engine.pace import Pace
from precompute.model import CheckingModel, Features, Model, Prepared, SizedModel, StagedModel, told
from store.errors import ModelError
from store.feature_view import SCALAR_TYPES, Feature, FeatureView

MAX_BATCH_ROWS = 4096
"""Rows given at once to a model that names no costs: 1–8 k rows is the right size for MLPs on CPUs."""

AHEAD_WINDOWS = 2
"""Windows, or pieces of them, that may be computed and not yet taken: one ready, one that the model is at. A killed run loses them, beside its
chunk."""

HAND_ON_S = 1.0
"""A window that takes longer is handed on in pieces, about this often: what is done is soon safe, and a progress bar moves."""

BATCH_S = 1.0
"""What a batch should take at most, so that there are pieces to hand on; see :class:`precompute.engine.pace.Pace`."""
START_ROWS = 8
"""Of the first batches of a model that names no costs: it may take milliseconds for 4,096 rows, or a second for each."""

PREPARE_S = 5.0
"""What preparing a window should take at most, or it is cut in smaller ones. Long, since rows are best sorted in large windows."""
START_WINDOW_ROWS = 64
"""Of the first window that is prepared."""

AHEAD_BATCHES = 8
"""Batches ready for the model: a GPU never waits for one to be put together, and a budget that was cut takes effect soon."""

SEARCHED_UP_TO = 64
"""Multiples of the first budget that are tried on a device that computes while others are launched; 2 on a CPU, whose cache is small."""

MAX_PADDING = 0.01
"""Share of a batch that may be padding, as long as the batch is not cut below half its budget for it. Measured over 5,268 texts at 2,048 tokens:
1.28 % without, 0.78 % with."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why one row has no features: its number in the batch given, the stage (``input``, ``prepare``, ``model``, ``output``, or ``worker`` when
    it ended its process) and the error."""

    row: int
    stage: str
    error: str


@dataclass(slots=True)
class Computed:
    """Features of the rows that could be computed.

    ``rows`` are their numbers in the batch given, ascending; ``features`` has one row for each. Of a stream, ``window`` counts the batches
    given from 0, and ``last`` tells whether this is the last that comes of it.
    """

    rows: npt.NDArray[np.int64]
    features: pa.RecordBatch
    rejections: list[Rejection] = field(default_factory=list)
    window: int = 0
    last: bool = True

    @property
    def done(self) -> int:
        """Rows that were computed or rejected."""
        return len(self.rows) + len(self.rejections)


def compute(model: Model, view: FeatureView, batch: pa.RecordBatch) -> Computed:
    """Run the model over one window of rows: :meth:`Runner.compute` of a runner made for it, which searches no budget.

    Raises:
        ModelError: see :class:`Runner`.
    """
    budget = None
    if isinstance(model, StagedModel) and model.max_cost is None:
        budget = Budget(model.start_cost, fixed=True)
    return Runner(model, view, budget=budget).compute(batch)


def with_null_rows(view: FeatureView, done: Computed) -> Computed:
    """What becomes of a window's rows under ``bad_rows: null``: those the model declared unusable have every feature null. The batch job, the
    parity gate and the fallback ask here alike. Under another policy, ``done`` as it is."""
    if view.definition.bad_rows != "null":
        return done
    unusable = [r.row for r in done.rejections if r.stage == "input"]
    if not unusable:
        return done
    schema = view.feature_schema()
    nulls = pa.RecordBatch.from_arrays([pa.nulls(len(unusable), f.type) for f in schema], schema=schema)
    rows = np.concatenate([done.rows, np.array(unusable, np.int64)])
    order = np.argsort(rows)
    features = pa.concat_batches([done.features, nulls]).take(pa.array(order))
    return replace(done, rows=rows[order], features=features, rejections=[r for r in done.rejections if r.stage != "input"])


@dataclass(slots=True)
class _Window:
    """Rows sorted together, on their way through the stages; or, once computed, a piece of them."""

    batch: pa.RecordBatch
    """As it was given; all of it, where the window is a part."""
    given: pa.RecordBatch
    """What the model sees of the window's rows."""
    number: int = 0
    """Of ``batch``, counted from 0."""
    first: int = 0
    """Row of ``batch`` where the window begins."""
    last: bool = True
    """Whether nothing of ``batch`` follows."""
    rejections: dict[int, Rejection] = field(default_factory=dict)
    rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Row of the window at each position of what was prepared."""
    prepared: Prepared | None = None
    costs: npt.NDArray[np.int64] | None = None
    pieces: list[tuple[npt.NDArray[np.int64], Features]] = field(default_factory=list)
    """Row numbers of each batch, and what the model made of them: not yet looked at."""
    handed_on: float | None = None
    """When the last piece was, or the first batch begun."""

    def piece(self) -> _Window:
        """What was made so far; this window goes on without it."""
        made = replace(self, last=False, prepared=None, costs=None)
        self.pieces, self.rejections = [], {}
        return made

    def reject(self, row: int, stage: str, error: str) -> None:
        self.rejections[row] = Rejection(row, stage, error)


@dataclass(slots=True)
class _Batch:
    """Rows computed together; ``positions`` None marks the end of a window."""

    window: _Window
    positions: npt.NDArray[np.int64] | None
    budget: int = 0
    cost: int = 0
    inputs: Any = None


class Runner:
    """Runs one model for one view.

    Args:
        model: the loaded model.
        view: declares names, types and shapes of the features.
        meter: told what every stage took; kept by the caller to report it.
        budget: what a batch may cost; by default it finds itself. Given, it is shared with an earlier runner of the same model.

    Raises:
        ModelError: (from every method) the model returns something other than the view declares: a missing feature, another length or
            type. That is a mistake in model or view, not in a row, so the run fails.
    """

    def __init__(self, model: Model, view: FeatureView, meter: Meter | None = None, budget: Budget | None = None) -> None:
        self.meter = Meter() if meter is None else meter
        self._model, self._view = model, view
        self._staged = model if isinstance(model, StagedModel) else None
        self.budget = budget or self._first_budget()
        self._peak = ResidentPeak()
        self._depth = 0 if self._staged is None else self._staged.device.depth
        self._pace: Pace | None = None
        self._hand_on_s = float("inf")

    def _first_budget(self) -> Budget:
        if self._staged is None:
            return Budget(self._model.max_cost if isinstance(self._model, SizedModel) else MAX_BATCH_ROWS, fixed=True)
        if self._staged.max_cost is not None:
            return Budget(self._staged.max_cost, fixed=True)
        device = self._staged.device
        reach = SEARCHED_UP_TO if device.depth else 2
        return Budget(self._staged.start_cost, reach=reach, free_bytes=device.free_bytes)

    def compute(self, batch: pa.RecordBatch) -> Computed:
        """Run the model over one window of rows; memory for their features must be at hand."""
        self._pace, self._hand_on_s = None, float("inf")
        for window in self._landed(self._batches(self._prepared(iter([(batch, batch)])))):
            return self._checked(window)
        raise AssertionError("a window went in and none came out")

    def stream(
        self, windows: Iterable[pa.RecordBatch], *, hidden: Iterable[str] = (), memory_mb: int = 512
    ) -> Generator[tuple[pa.RecordBatch, Computed]]:
        """Run the model over many windows, the stages overlapping; windows come out in the order they went in.

        A window that takes longer than :data:`HAND_ON_S` comes in several pieces, each row in one of them; so does one that takes long to
        prepare. The rows of a piece are in order, and so are those of a window whose model names no costs.

        Args:
            windows: rows, at most a few thousand at a time; advanced in a thread.
            hidden: columns of them that the model is not shown.
            memory_mb: bound of what lies between the stages, a window in each apart.

        Yields:
            each window as it came, and its features, or those of some of its rows.

        Raises:
            ModelError: see :class:`Runner`; and whatever ``windows`` raises.
        """
        stages: list[Ahead[Any]] = []
        left_out = set(hidden)
        share = max(1, memory_mb * 2**20 // 3)
        plain = self._staged is None and not isinstance(self._model, SizedModel)
        self._pace, self._hand_on_s = Pace(START_ROWS if plain else None, BATCH_S), HAND_ON_S
        keep_freed_memory()
        release_threads()  # of whoever loaded the model here: from now on the model's stage computes
        try:
            read = Ahead("read", _shown(windows, left_out), self.meter.stage("read"), lambda w: int(w[0].nbytes), share)
            stages.append(read)
            prepared = Ahead(
                "prepare", self._prepared(read, in_time=True), self.meter.stage("prepare"), _window_bytes, share, read
            )
            stages.append(prepared)
            batches = Ahead(
                "batch", self._batches(prepared), self.meter.stage("batch"), _batch_bytes, share, prepared, AHEAD_BATCHES
            )
            stages.append(batches)
            done = Ahead("model", self._landed(batches), self.meter.stage("model"), _piece_bytes, share, batches, 1)
            stages.append(done)
            check, last = self.meter.stage("check"), self.meter.stage("write")
            for window in done:
                last.starved_s = done.waited_s
                started = time.monotonic()
                computed = self._checked(window)
                ready = time.monotonic()
                check.busy_s += ready - started
                self.meter.rows += computed.done
                yield window.batch, computed
                last.busy_s += time.monotonic() - ready
        finally:
            if stages:
                stages[-1].close()

    def figures(self, seconds: float) -> dict[str, Any]:
        """What the run's report says of the engine, plain figures only.

        ``mfu`` is the model's FLOP/s while it computed as a share of what a large matrix product reaches on the same device, measured now
        (model FLOPs utilisation, Chowdhery et al. 2022, appendix B, with a measured instead of a data sheet's peak).

        Args:
            seconds: how long the run took.
        """
        found = self.meter.to_json(seconds) | self.state_figures()
        found |= self.device_figures(peak=self.meter.flops > 0)
        if "peak_flops" in found:
            found["mfu"] = self.meter.mfu(found["peak_flops"])
        return found

    def state_figures(self) -> dict[str, Any]:
        """What a batch may cost by now, and the memory taken at most."""
        found = {"budget": self.budget.cost, "peak_memory_bytes": self._peak.bytes()}
        return found if self._staged is None else found | {"device_peak_memory_bytes": self._staged.device.peak_bytes()}

    def device_figures(self, *, peak: bool = True) -> dict[str, Any]:
        """Where the model computes, in what its costs count, and the FLOP/s that a large matrix product reaches there now if ``peak``."""
        if self._staged is None:
            return {"device": "cpu", "cost_unit": "rows"}
        device = self._staged.device
        found: dict[str, Any] = {"device": device.name, "cost_unit": self._staged.cost_unit}
        if peak:
            try:
                found["peak_flops"] = round(device.peak_flops())
            except (Exception, SystemExit) as exc:  # the model may have taken all there is: no reason to fail a run for a figure
                if not is_out_of_memory(exc):
                    raise
            device.release()
            device.peak_bytes(reset=True)  # the product's memory is not the model's
        return found

    # ---- prepare

    def _prepared(self, windows: Iterator[tuple[pa.RecordBatch, pa.RecordBatch]], *, in_time: bool = False) -> Iterator[_Window]:
        asked = self._staged is not None or isinstance(self._model, SizedModel | CheckingModel)
        pace = Pace(START_WINDOW_ROWS if in_time and asked else None, PREPARE_S)
        for number, (batch, given) in enumerate(windows):
            first = 0
            while True:
                part = given.slice(first, pace.limit)
                window = _Window(batch, part, number, first, first + part.num_rows >= batch.num_rows)
                started = time.monotonic()
                self._prepare(window)
                if part.num_rows and in_time:
                    pace.done(part.num_rows, time.monotonic() - started)
                yield window
                first += part.num_rows
                if window.last:
                    break

    def _batches(self, windows: Iterator[_Window]) -> Iterator[_Batch]:
        """The batches of each window, dearest rows first, and its end."""
        for window in windows:
            for positions in self._plan(window):
                budget = self._asked_for
                inputs = self._inputs(window, positions)
                yield _Batch(window, positions, budget, self._cost(window, positions), inputs)
            yield _Batch(window, None)

    def _prepare(self, window: _Window) -> None:
        model, batch = self._model, window.given
        if isinstance(model, CheckingModel):
            for row, reason in _asked(self._view, "unusable()", model.unusable, batch).items():
                window.reject(row, "input", reason)
        window.rows = np.arange(batch.num_rows)
        if window.rejections:
            window.rows = np.setdiff1d(window.rows, np.fromiter(window.rejections, np.int64))
        if not len(window.rows):
            return
        if self._staged is not None:
            try:
                window.prepared = self._staged.prepare(taken(batch, window.rows))
            except ModelError:
                raise
            except (Exception, SystemExit):  # which row did it is what counts
                self._find_unpreparable(window, window.rows)
                window.rows = np.array([row for row in window.rows.tolist() if row not in window.rejections], np.int64)
                try:
                    window.prepared = self._staged.prepare(taken(batch, window.rows)) if len(window.rows) else None
                except ModelError:
                    raise
                except (Exception, SystemExit) as exc:
                    what = f"prepare() of {len(window.rows):,} rows raised {told(exc)}, though it took the same rows in smaller numbers"
                    raise ModelError(f"the model of view {self._view.name!r}: {what}") from exc
            if window.prepared is None:
                return
            for position, reason in window.prepared.bad.items():
                window.reject(int(window.rows[position]), "input", reason)
            window.costs = window.prepared.costs
        elif isinstance(model, SizedModel):
            window.costs = np.asarray(_asked(self._view, "costs()", model.costs, taken(batch, window.rows)))
        if window.costs is not None:
            costs = window.costs
            if costs.shape != (len(window.rows),) or costs.dtype.kind not in "iu":
                raise ModelError(
                    f"the model of view {self._view.name!r}: its costs are {costs.dtype} {list(costs.shape)}, not an integer for each of "
                    f"{len(window.rows)} rows"
                )
            window.costs = np.maximum(costs, 1).astype(np.int64)

    def _find_unpreparable(self, window: _Window, rows: npt.NDArray[np.int64]) -> None:
        assert self._staged is not None
        try:
            self._staged.prepare(taken(window.given, rows))
        except ModelError:
            raise
        except (Exception, SystemExit) as exc:
            if len(rows) == 1:
                window.reject(int(rows[0]), "prepare", told(exc))
                return
            self._find_unpreparable(window, rows[: len(rows) // 2])
            self._find_unpreparable(window, rows[len(rows) // 2 :])

    def _plan(self, window: _Window) -> Iterator[npt.NDArray[np.int64]]:
        """Positions of each batch."""
        positions = np.arange(len(window.rows))
        if window.prepared is not None and window.prepared.bad:
            positions = np.setdiff1d(positions, np.fromiter(window.prepared.bad, np.int64))
        if window.costs is None:
            start = 0
            while start < len(positions):
                self._asked_for = min(self._next_budget(), MAX_BATCH_ROWS)
                yield positions[start : start + self._asked_for]
                start += self._asked_for
            return

        def asked() -> int:
            self._asked_for = self._next_budget()
            return self._asked_for

        padding = 1.0 if self._staged is None else MAX_PADDING
        for chosen in batches_by_cost(window.costs[positions], asked, padding):
            yield positions[chosen]

    _asked_for = 0
    """The budget of the batch being made."""

    def _next_budget(self) -> int:
        return self.budget.next() if self._pace is None else min(self.budget.next(), self._pace.limit)

    def _inputs(self, window: _Window, positions: npt.NDArray[np.int64]) -> Any:
        """What the model takes."""
        if self._staged is None or window.prepared is None:
            return taken(window.given, window.rows[positions])
        try:
            return self._staged.inputs(window.prepared, positions)
        except ModelError:
            raise
        except (Exception, SystemExit):
            return _Later()  # the model's stage makes them once more, and bisects

    def _cost(self, window: _Window, positions: npt.NDArray[np.int64]) -> int:
        return len(positions) if window.costs is None else int(window.costs[positions].sum())

    # ---- model

    def _landed(self, batches: Iterator[_Batch]) -> Iterator[_Window]:
        """Windows whose every row was computed or rejected, or pieces of them. On a GPU, later batches are launched before the first is waited
        for."""
        under_way: deque[tuple[_Batch, Any, float, int]] = deque()
        for batch in batches:
            if batch.positions is None:
                under_way.append((batch, None, 0.0, 0))
            else:
                under_way.append(self._launch(batch))
            while len(under_way) > (self._depth if self.budget.settled else 0):
                yield from self._land(*under_way.popleft())
        while under_way:
            yield from self._land(*under_way.popleft())

    def _launch(self, batch: _Batch) -> tuple[_Batch, Any, float, int]:
        """Begin a batch; a failure is kept for :meth:`_land`, in whose turn it is dealt with."""
        started = time.monotonic()
        before = self._memory_before()
        try:
            if isinstance(batch.inputs, _Later):
                raise _Retry
            launched = self._model.compute(batch.inputs) if self._staged is None else self._staged.launch(batch.inputs)
        except (Exception, SystemExit) as exc:
            launched = _Failed(exc)
        batch.inputs = None
        self.meter.forward_s += time.monotonic() - started
        return batch, launched, started, before

    def _memory_before(self) -> int:
        """Bytes in use, when it is worth knowing what a batch takes."""
        if self._staged is None or self.budget.settled:
            return 0
        self._staged.device.peak_bytes(reset=True)  # what was held before this batch is not its own
        return self._staged.device.peak_bytes(reset=True)

    def _land(self, batch: _Batch, launched: Any, started: float, before: int) -> Iterator[_Window]:
        window, positions = batch.window, batch.positions
        if positions is None:
            window.prepared = window.costs = None  # nothing asks for them any more, while the window waits to be written
            yield window
            return
        try:
            if isinstance(launched, _Failed):
                raise launched.error
            waiting = time.monotonic()
            features = launched if self._staged is None else self._staged.land(launched)
            self.meter.landing_s += time.monotonic() - waiting
        except ModelError:  # the model's own word that view and source do not fit it: no row's fault
            raise
        except (Exception, SystemExit) as exc:  # a model may raise anything; which row did it is what counts
            self._retried(window, positions, exc)
        else:
            self._keep(window, positions, features)
            seconds = time.monotonic() - started
            size = 0 if not before or self._staged is None else max(0, self._staged.device.peak_bytes(reset=True) - before)
            self.budget.done(batch.budget, batch.cost, seconds, size)
            if self._pace is not None:
                self._pace.done(batch.cost, seconds)
            self._count(window, positions)
        now = time.monotonic()
        if window.handed_on is None:
            window.handed_on = started
        if now - window.handed_on >= self._hand_on_s:
            window.handed_on = now
            yield window.piece()

    def _count(self, window: _Window, positions: npt.NDArray[np.int64]) -> None:
        meter = self.meter
        meter.batches += 1
        if window.costs is None:
            return
        costs = window.costs[positions]
        meter.cost += int(costs.sum())
        meter.padded_cost += len(costs) * int(costs.max())
        if self._staged is not None and window.prepared is not None:
            meter.flops += self._staged.flops(window.prepared, positions)

    def _retried(self, window: _Window, positions: npt.NDArray[np.int64], exc: BaseException) -> None:
        """Compute the rows of a batch that failed in smaller ones: until the row that fails stands alone, or until they fit in memory."""
        full = is_out_of_memory(exc)
        if full:  # one halving for each batch: a row that never fits must not shrink the batches of all others to nothing
            self.meter.out_of_memory += 1
            self.budget.out_of_memory(self._padded(window, positions))
        if self._halved(window, positions, exc) and full:
            self.budget.was_one_row()

    def _halved(self, window: _Window, positions: npt.NDArray[np.int64], exc: BaseException) -> bool:
        """Whether a single row did not fit in memory."""
        self.meter.retries += 1
        one_row = False
        if is_out_of_memory(exc):
            exc = exc.with_traceback(None)  # its frames hold the tensors that did not fit
            if self._staged is not None:
                self._staged.device.release()
        elif len(positions) == 1 and not isinstance(exc, _Retry):
            window.reject(int(window.rows[positions[0]]), "model", told(exc))
            return False
        middle = max(1, len(positions) // 2)
        for part in (positions[:middle], positions[middle:]):
            if not len(part):
                continue
            try:
                features = self._computed(window, part)
            except ModelError:
                raise
            except (Exception, SystemExit) as failed:
                if len(part) == 1:  # with out of memory, that was its second try, alone and with the caches empty
                    window.reject(int(window.rows[part[0]]), "model", told(failed))
                    one_row |= is_out_of_memory(failed)
                else:
                    one_row |= self._halved(window, part, failed)
                continue
            self._keep(window, part, features)
            self._count(window, part)
        return one_row

    def _computed(self, window: _Window, positions: npt.NDArray[np.int64]) -> Features:
        if self._staged is None:
            return self._model.compute(taken(window.given, window.rows[positions]))
        assert window.prepared is not None
        return self._staged.land(self._staged.launch(self._staged.inputs(window.prepared, positions)))

    def _padded(self, window: _Window, positions: npt.NDArray[np.int64]) -> int:
        return len(positions) * (1 if window.costs is None else int(window.costs[positions].max()))

    def _keep(self, window: _Window, positions: npt.NDArray[np.int64], features: Features) -> None:
        # a model that does not fit its view is told after the first batch, not after its window
        if not self._fits or not isinstance(features, Mapping):
            _checked(self._view, features, len(positions))
            self._fits = True
        # Copied in the model's thread: a model may use its memory again. And one that outlives its batch lies between the activations of the next ones,
        # for which malloc then takes new memory each time: 1.2 GB over 2 M rows of a small MLP, and 4.2 to 5.7 s instead of 3.5.
        made = {feature.name: _copied(features[feature.name]) for feature in self._view.features if feature.name in features}
        window.pieces.append((window.rows[positions], made))

    _fits = False
    """Whether a batch of this model was seen to fit the view."""

    # ---- check

    def _checked(self, window: _Window) -> Computed:
        """What the model made of a window, or of a piece, as features in the rows' order; the model computes the next one meanwhile."""
        pieces = []
        while window.pieces:
            rows, features = window.pieces.pop(0)
            checked = _checked(self._view, features, len(rows))
            keep, bad = _finite(self._view, checked)
            for position, error in bad.items():
                window.reject(int(rows[position]), "output", error)
            pieces.append((rows[keep], checked.filter(pa.array(keep))) if bad else (rows, checked))
        rejections = [window.rejections[row] for row in sorted(window.rejections)]
        if window.first:
            rejections = [replace(rejection, row=window.first + rejection.row) for rejection in rejections]
        rows, features = in_order(self._view, pieces)
        return Computed(window.first + rows, features, rejections, window.number, window.last)


def _copied(values: Any) -> Any:
    """What a model returned of a feature, in memory of its own: of what holds the rows, and of an array or a list for each."""
    if isinstance(values, np.ndarray):
        return _copied_rows(values) if values.dtype == object and values.ndim else np.array(values)
    if isinstance(values, (list, tuple)):
        return [_copied_row(row) for row in values]
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()  # copies one chunk too
    return pa.concat_arrays([values]) if isinstance(values, pa.Array) else values  # pa.array(buffer) is the buffer itself


def _copied_row(row: Any) -> Any:
    if isinstance(row, np.ndarray):
        return np.array(row)
    return list(row) if isinstance(row, list) else row


_copied_rows = np.frompyfunc(_copied_row, 1, 1)
"""Of an object array, each."""


class _Later:
    """Inputs that could not be made."""


class _Retry(Exception):
    """A batch without inputs: it is cut in pieces like one that failed."""


@dataclass(slots=True)
class _Failed:
    error: BaseException


def _shown(windows: Iterable[pa.RecordBatch], hidden: set[str]) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Each window as it came, and what the model sees of it."""
    try:
        for window in windows:
            yield window, window.select([n for n in window.schema.names if n not in hidden]) if hidden else window
    finally:
        if isinstance(windows, Generator):
            windows.close()


def taken(batch: pa.RecordBatch, rows: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Some rows of a batch, without a copy where they lie side by side."""
    if len(rows) == batch.num_rows and np.array_equal(rows, np.arange(len(rows))):
        return batch
    if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and (np.diff(rows) == 1).all():
        return batch.slice(int(rows[0]), len(rows))
    return batch.take(pa.array(rows))


def _window_bytes(window: _Window) -> int:
    return 2 * int(window.given.nbytes)  # what was made of the rows is of their size, more or less


def _batch_bytes(batch: _Batch) -> int:
    inputs = batch.inputs
    if isinstance(inputs, (tuple, list)):
        inputs = [i for i in inputs if hasattr(i, "nbytes")]
        return sum(int(i.nbytes) for i in inputs)
    return int(getattr(inputs, "nbytes", 0))


def _piece_bytes(window: _Window) -> int:
    made = sum(int(getattr(values, "nbytes", 0)) for _, features in window.pieces for values in features.values())
    return int(window.given.nbytes) + made


def _asked(view: FeatureView, what: str, method: Callable[[pa.RecordBatch], Any], batch: pa.RecordBatch) -> Any:
    """Raises:
    ModelError: the method raised; without its answer no row can be planned.
    """
    try:
        return method(batch)
    except ModelError:
        raise
    except Exception as exc:
        raise ModelError(f"the model of view {view.name!r}: {what} raised {told(exc)}") from exc


def _checked(view: FeatureView, features: Features, rows: int) -> pa.RecordBatch:
    """The model's output as Arrow columns of exactly the declared types.

    Raises:
        ModelError: see :func:`compute`.
    """
    if not isinstance(features, Mapping):
        raise ModelError(f"the model of view {view.name!r} returned {type(features).__name__}, not a dict of features")
    columns = []
    for feature in view.features:
        if feature.name not in features:
            raise ModelError(
                f"the model of view {view.name!r} returned no {feature.name!r} (it returned: {', '.join(features) or 'nothing'})"
            )
        columns.append(_column(view, feature, features[feature.name], rows))
    return pa.RecordBatch.from_arrays(columns, schema=view.feature_schema())


def _column(view: FeatureView, feature: Feature, values: Any, rows: int) -> pa.Array:
    where = f"feature {feature.name!r} of view {view.name!r}"
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not hasattr(values, "__len__") or (isinstance(values, np.ndarray) and values.ndim == 0):
        raise ModelError(f"{where}: the model returned {type(values).__name__}, not one value for each of {rows} rows")
    if len(values) != rows:
        raise ModelError(f"{where}: the model returned {len(values)} values for {rows} rows")
    try:
        if feature.dim is not None and not isinstance(values, pa.Array):
            values = np.asarray(values)
            if values.ndim != 2 or values.shape[1] != feature.dim:
                raise ModelError(
                    f"{where}: declared as a vector of {feature.dim}, but the model returned shape {list(values.shape)}; correct `dim` or the model"
                )
            if feature.dtype.startswith("float") and values.dtype.kind in "fiu":
                with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is rejected as such
                    values = values.astype(feature.dtype, copy=False)
            flat = pa.array(np.ascontiguousarray(values).reshape(-1)).cast(SCALAR_TYPES[feature.dtype])
            return pa.FixedSizeListArray.from_arrays(flat, type=feature.arrow_type)
        if feature.max_items is not None and not isinstance(values, pa.Array):
            values = _lists(values)
        elif not isinstance(values, pa.Array):
            values = np.asarray(values)
            if values.ndim != 1:
                raise ModelError(
                    f"{where}: declared as one value a row, but the model returned shape {list(values.shape)}; declare `dim` (or `max_items`, of a "
                    "list) or correct the model"
                )
            values = pa.array(values)
        column = values.cast(feature.arrow_type)
        column.validate(full=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as exc:
        raise ModelError(
            f"{where}: the model returned {getattr(values, 'type', type(values).__name__)}, which does not fit {feature.arrow_type}: {exc}"
        ) from exc
    if feature.max_items is not None:
        longest = pc.max(pc.list_value_length(column)).as_py() or 0
        if longest > feature.max_items:
            raise ModelError(
                f"{where}: a list of {longest} items, declared at most {feature.max_items}; correct `max_items` or the model"
            )
    if feature.dim is not None and column.null_count:
        raise ModelError(f"{where}: the model returned a null vector; raise for such a row, or name it in unusable()")
    if (feature.dim is not None or feature.max_items is not None) and column.flatten().null_count:
        raise ModelError(f"{where}: a vector or list holds a null; leave it out")
    return column


def _lists(values: Any) -> pa.Array:
    """A list for each row, from a matrix, or from a list or object array of lists, tuples and arrays; None is a null."""
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype != object:
        offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(values.shape[1])
        return pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(values).reshape(-1)))
    return pa.array([row.tolist() if isinstance(row, np.ndarray) else row for row in values])


def _finite(view: FeatureView, features: pa.RecordBatch) -> tuple[npt.NDArray[np.bool_], Mapping[int, str]]:
    """(rows to keep, row → error) by looking for NaN, infinities and, in an indexed cosine vector, zero norm."""
    keep = np.ones(features.num_rows, np.bool_)
    bad: dict[int, str] = {}
    for feature in view.features:
        if not feature.dtype.startswith("float"):
            continue
        column = features.column(feature.name)
        if feature.dim is None and feature.max_items is None:
            if column.null_count:
                column = pc.fill_null(column, pa.scalar(0.0).cast(column.type))
            infinite = np.flatnonzero(~np.isfinite(np.asarray(column)))
        elif feature.dim is not None:
            matrix = np.asarray(column.flatten()).reshape(-1, feature.dim)
            infinite = np.flatnonzero(~np.isfinite(matrix).all(axis=1))
            if view.index is not None and view.index.on == feature.name and view.index.metric == "cosine":
                for row in np.flatnonzero(~matrix.any(axis=1)).tolist():
                    bad.setdefault(row, f"{feature.name} is all zeros, which has no direction for cosine")
        else:
            items = np.asarray(column.flatten())
            infinite = np.unique(np.asarray(pc.list_parent_indices(column))[~np.isfinite(items)])
        for row in infinite.tolist():
            bad.setdefault(row, f"{feature.name} is not finite")
    keep[list(bad)] = False
    return keep, bad


def in_order(
    view: FeatureView, pieces: list[tuple[npt.NDArray[np.int64], pa.RecordBatch]]
) -> tuple[npt.NDArray[np.int64], pa.RecordBatch]:
    """All pieces, row numbers and features each, as one batch in the order the rows came in."""
    if not pieces:
        return np.empty(0, np.int64), _empty(view)
    rows = np.concatenate([r for r, _ in pieces])
    merged = pa.concat_batches([f for _, f in pieces])
    if (rows[1:] > rows[:-1]).all():
        return rows, merged
    order = np.argsort(rows, kind="stable")
    return rows[order], merged.take(pa.array(order))


def _empty(view: FeatureView) -> pa.RecordBatch:
    schema = view.feature_schema()
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
