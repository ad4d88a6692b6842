"""The engine, attacked: whatever fails wherever, every other row comes out once, in its place, and
equal to the arithmetic."""

from __future__ import annotations

import errno
import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, RuntimeException

from precompute.engine import batches, runner
from precompute.engine.ahead import Meter
from precompute.engine.batches import GROW_AFTER, Pace
from precompute.engine.resources import (
    ResidentPeak,
    available_bytes,
    is_device_lost,
    is_out_of_memory,
    resident_bytes,
)
from precompute.engine.rows import Outcome
from precompute.engine.runner import AHEAD_BATCHES, Runner
from precompute.model import Prepared
from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ModelError, SourceError
from precompute.store.feature_view import Feature, FeatureView
from tests.models import REFUSED_AT, Doubler, raised_at
from tests.precompute.dying_models import Poisoned

ASSERTED = Poisoned.ASSERTED

VIEW = FeatureView(
    "numbers",
    ("id",),
    (Feature("double", "float64"), Feature("vector", "float32", dim=4)),
    60.0,
    60.0,
)
SINGLE = FeatureView("numbers", ("id",), (Feature("double", "float32"),), 60.0, 60.0)


def window(xs: Sequence[float], first: int = 0) -> pa.RecordBatch:
    ids = pa.array(range(first, first + len(xs)), pa.int64())
    return pa.record_batch(
        {"id": ids, "x": pa.array(xs, pa.float64()), "secret": pa.array(xs, pa.float64())}
    )


def windows(xs: Sequence[float], rows: int) -> list[pa.RecordBatch]:
    return [window(xs[start : start + rows], start) for start in range(0, len(xs), rows)]


def features(xs: Sequence[float]) -> list[dict[str, Any]]:
    return [{"double": 2 * x, "vector": [x, x + 1, x + 2, x + 3]} for x in xs]


def gathered(
    results: Iterator[tuple[pa.RecordBatch, Outcome]],
) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """(id → features, id → error) of all windows; an id that comes twice fails."""
    values: dict[int, dict[str, Any]] = {}
    errors: dict[int, str] = {}
    for batch, done in results:
        ids = batch.column("id").to_pylist()
        assert done.rows.tolist() == sorted(done.rows.tolist())
        for row, value in zip(done.rows.tolist(), done.features.to_pylist(), strict=True):
            assert ids[row] not in values
            values[ids[row]] = value
        for rejection in done.rejections:
            assert ids[rejection.row] not in errors
            errors[ids[rejection.row]] = f"{rejection.stage}: {rejection.error}"
    return values, errors


class Faulty(Doubler):
    """Raises at the n-th batch, or whenever ``fails`` says so of the batch's size."""

    def __init__(
        self,
        raise_at: int = 0,
        error: type[BaseException] = ValueError,
        most: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.raise_at, self.error, self.most = raise_at, error, most
        self.sizes: list[int] = []

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        assert "secret" not in batch.schema.names
        self.sizes.append(batch.num_rows)
        if self.most and batch.num_rows > self.most:
            raise MemoryError(f"{batch.num_rows} rows")
        if len(self.sizes) == self.raise_at:
            raise self.error("injected")
        return super().compute(batch)


class Times(torch.nn.Module):
    """2x, on tensors; raises torch's out-of-memory beyond so many rows."""

    def __init__(self, most: int = 0, oom_at: Sequence[int] = ()) -> None:
        super().__init__()
        self.most, self.oom_at, self.calls = most, set(oom_at), 0
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        if (self.most and len(x) > self.most) or self.calls in self.oom_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return 2 * x


class Staged(TorchModel):
    """x → double, in stages; row x costs x where ``by_cost``; ``bad_input`` makes an input that
    cannot be made."""

    start_cost = 8

    def __init__(
        self,
        module: Times | None = None,
        *,
        by_cost: bool = False,
        unpreparable: float = -99.0,
        bad_input: float = -99.0,
    ) -> None:
        super().__init__(module or Times(), Device("cpu"))
        self.by_cost, self.unpreparable, self.bad_input = by_cost, unpreparable, bad_input

    def fingerprint(self) -> str:
        return "staged"

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        x = np.asarray(batch.column("x")).astype(np.float32)
        if self.unpreparable in x:
            raise UnicodeError("cannot prepare it")
        costs = np.maximum(x.astype(np.int64), 1) if self.by_cost else np.ones(len(x), np.int64)
        return Prepared(costs, x, dict.fromkeys(np.flatnonzero(x < 0).tolist(), "x is negative"))

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        x: npt.NDArray[np.float32] = prepared.payload[rows]
        if self.bad_input in x:
            raise IndexError("cannot make an input of it")
        return (torch.from_numpy(x),)

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
        return {"double": outputs[0]}

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        return float(len(rows))


# ---- the stream is the plain computation


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 100])
def test_the_stream_is_what_compute_makes_whatever_the_windows(rows: int) -> None:
    xs = [float(i % 13) for i in range(50)]
    values, errors = gathered(Runner(Faulty(), VIEW).stream(windows(xs, rows), hidden=("secret",)))
    assert list(values.values()) == features(xs)
    assert errors == {}


def test_streams_take_turns_though_the_first_was_closed_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(Staged):
        inside = most = 0

        def prepare(self, batch: pa.RecordBatch) -> Prepared:
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.1)
            self.inside -= 1
            return super().prepare(batch)

    monkeypatch.setattr("precompute.engine.ahead.JOIN_S", 0.001)
    model = Slow()
    runner = Runner(model, SINGLE)
    first = runner.stream(windows([1.0] * 20, 4))
    next(first)
    first.close()
    assert list(gathered(runner.stream(windows([1.0] * 4, 4)))[0].values()) == [{"double": 2.0}] * 4
    assert model.most == 1


@pytest.mark.parametrize(
    ("model", "batch_rows"), [(Faulty(fail_on=5.0), 3), (Staged(Times(), by_cost=True), 16)]
)
def test_a_window_that_takes_long_is_handed_on_as_it_is_computed(
    model: Any, batch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch for batch, were no time long enough; each row in one piece, and the rows of a model
    without costs in their order."""
    monkeypatch.setattr(runner, "HAND_ON_S", 0.0)
    monkeypatch.setattr(runner, "START_ROWS", 3)
    # whatever they take, batches stay as they are
    monkeypatch.setattr(Pace, "done", lambda *_: None)
    monkeypatch.setattr(batches, "START_WINDOW_ROWS", 7)
    xs = [float(1 + i % 13) for i in range(40)]
    view, hidden = (SINGLE, ()) if isinstance(model, Staged) else (VIEW, ("secret",))
    given = list(windows(xs, 20))
    pieces = list(Runner(model, view).stream(given, hidden=hidden))
    assert [batch for batch, _ in pieces] == [given[done.window] for _, done in pieces]
    assert [done.window for _, done in pieces] == sorted(done.window for _, done in pieces)
    assert [done.last for _, done in pieces].count(True) == 2
    assert pieces[-1][1].last
    assert max(done.done for _, done in pieces) <= batch_rows
    assert len(pieces) >= 40 / batch_rows
    values, errors = gathered(iter(pieces))
    assert errors == (
        {}
        if view is SINGLE
        else {
            i: f"model: ValueError: cannot take 5.0{REFUSED_AT}" for i, x in enumerate(xs) if x == 5
        }
    )
    assert {i: v["double"] for i, v in values.items()} == {
        i: 2 * x for i, x in enumerate(xs) if i not in errors
    }
    if view is VIEW:
        assert list(values) == sorted(values)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-2, 40), max_size=60), st.integers(1, 20), st.booleans())
def test_a_staged_model_computes_or_rejects_each_row_once(
    xs: list[int], rows: int, by_cost: bool
) -> None:
    model = Staged(by_cost=by_cost)
    values, errors = gathered(Runner(model, SINGLE).stream(windows(xs, rows)))
    assert values == {i: {"double": 2.0 * x} for i, x in enumerate(xs) if x >= 0}
    assert errors == {i: "input: x is negative" for i, x in enumerate(xs) if x < 0}


# ---- failures


@pytest.mark.parametrize(
    ("at", "error"), [(1, ValueError), (4, MemoryError), (5, RuntimeError), (8, SystemExit)]
)
def test_a_batch_that_raises_once_is_tried_again_in_halves(
    at: int, error: type[BaseException]
) -> None:
    xs = [float(i) for i in range(60)]
    values, errors = gathered(
        Runner(Faulty(at, error), VIEW).stream(windows(xs, 8), hidden=("secret",))
    )
    assert list(values.values()) == features(xs)
    assert errors == {}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**32))
def test_out_of_memory_at_random_batches_loses_and_doubles_nothing(
    count: int, rows: int, seed: int
) -> None:
    chosen = random.Random(seed)
    module = Times(oom_at=[n for n in range(1, 40) if chosen.random() < 0.3])
    xs = [float(i) for i in range(count)]
    values, errors = gathered(Runner(Staged(module), SINGLE).stream(windows(xs, rows)))
    assert {**values, **errors}.keys() == set(range(count))
    assert values == {i: {"double": 2.0 * i} for i in values}
    for error in errors.values():  # alone, and out of memory twice in a row
        assert error.startswith("model: OutOfMemoryError: CUDA out of memory")


def test_memory_that_holds_only_so_many_rows_is_found_and_respected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = itertools.count()
    monkeypatch.setattr(Device, "release", lambda _: next(released))
    module = Times(most=5)
    model = Staged(module)
    model.max_cost = 64
    runner = Runner(model, SINGLE)
    xs = [float(i) for i in range(2000)]
    values, errors = gathered(runner.stream(windows(xs, 100)))
    assert values == {i: {"double": 2.0 * i} for i in range(2000)}
    assert errors == {}
    assert runner.budget.ceiling is not None
    failed = runner.meter.out_of_memory
    assert next(released) >= failed
    # how many more were ready when one did not fit depends on the threads, but there are no more
    # than may be ahead, and the next larger one comes after so many that went well
    walls = 1 + (len(module.sizes) - failed) // GROW_AFTER
    assert 0 < failed <= walls * (AHEAD_BATCHES + 3)


def test_memory_that_holds_so_many_rows_is_not_run_into_again_and_again() -> None:
    module = Times(most=5)
    model = Staged(module)
    model.max_cost = 64
    runner = Runner(model, SINGLE)
    for window in windows([float(i) for i in range(2000)], 100):
        assert runner.compute(window).done == 100
    late = module.sizes[len(module.sizes) // 2 :]
    # nothing is ahead here: one larger batch after each 32 that went well
    assert 0 < sum(size > 5 for size in late) <= 1 + len(late) // GROW_AFTER


def test_a_row_that_never_fits_is_rejected_and_shrinks_no_other_batch() -> None:
    class Hungry(Doubler):
        def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
            sizes.append(batch.num_rows)
            if 7.0 in batch.column("x").to_pylist():
                raise MemoryError("too large")
            return super().compute(batch)

    sizes: list[int] = []
    xs = [float(i) for i in range(3000)]
    values, errors = gathered(Runner(Hungry(), VIEW).stream(windows(xs, 1000)))
    assert errors == {7: "model: MemoryError: too large" + raised_at(__file__, 'MemoryError("too')}
    assert list(values.values()) == features([x for x in xs if x != 7])
    assert sizes[-1] >= 400


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (Staged(unpreparable=11.0), "prepare: UnicodeError: cannot prepare it"),
        (Staged(bad_input=11.0), "model: IndexError: cannot make an input of it"),
    ],
)
def test_a_row_that_cannot_be_made_ready_is_rejected_alone(model: Staged, error: str) -> None:
    xs = [float(i) for i in range(20)]
    values, errors = gathered(Runner(model, SINGLE).stream(windows(xs, 8)))
    raised = error.split(": ", 1)[1].replace(": ", '("')
    assert errors == {11: error + raised_at(__file__, raised)}
    assert values == {i: {"double": 2.0 * i} for i in range(20) if i != 11}


def test_a_source_is_closed_with_the_stream_that_failed() -> None:
    closed = threading.Event()

    def source() -> Iterator[pa.RecordBatch]:
        try:
            yield from windows([1.0, 2.0, 3.0], 1)
        finally:
            closed.set()

    class Wrong(Doubler):
        def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
            raise ModelError("no such source")

    given = source()  # held, so that nothing but the stream closes it
    with pytest.raises(ModelError, match="no such source"):
        list(Runner(Wrong(), VIEW).stream(given))
    assert closed.wait(5)


def test_what_was_prepared_is_let_go_when_its_window_is_computed() -> None:
    alive: weakref.WeakSet[pa.RecordBatch] = weakref.WeakSet()

    class Remembered(Staged):
        def prepare(self, batch: pa.RecordBatch) -> Prepared:
            made = super().prepare(batch)
            alive.add(made)
            return made

    for window_at_hand, _ in Runner(Remembered(), SINGLE).stream(windows([1.0, 2.0, 3.0], 3)):
        gc.collect()
        assert (window_at_hand.num_rows, len(alive)) == (3, 0)


def test_a_device_without_room_for_a_measurement_fails_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Staged()
    runner = Runner(model, SINGLE)
    list(runner.stream(windows([1.0, 2.0], 2)))

    def full(_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(model.device), "peak_flops", full)
    figures = runner.figures(1.0)
    assert (figures["rows"], "peak_flops" in figures, "mfu" in figures) == (2, False, False)


def test_a_peak_is_reported_by_all_that_look_at_it() -> None:
    one, other = ResidentPeak(), ResidentPeak()
    taken = np.ones(2**24)  # 128 MiB
    held = resident_bytes()
    del taken
    one.lap()
    one.lap()
    assert min(one.bytes(), other.bytes()) > held - 2**24  # the system counts in steps


def test_an_error_of_the_source_comes_through_after_what_was_read() -> None:
    def source() -> Iterator[pa.RecordBatch]:
        yield window([1.0, 2.0])
        raise SourceError("the disk is gone")

    stream = Runner(Doubler(), VIEW).stream(source())
    assert next(stream)[1].features.to_pylist() == features([1.0, 2.0])
    with pytest.raises(SourceError, match="the disk is gone"):
        next(stream)


def test_a_stream_that_is_closed_leaves_no_thread_and_reads_no_further() -> None:
    read: list[int] = []

    def source() -> Iterator[pa.RecordBatch]:
        for number in range(10_000):
            read.append(number)
            yield window([float(number)], number)

    stream = Runner(Doubler(), VIEW).stream(source(), memory_mb=1)
    next(stream)
    stream.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"read", "prepare", "batch", "model"}
    count = len(read)
    time.sleep(0.05)
    assert len(read) == count


def test_what_lies_between_the_stages_is_bounded() -> None:
    read: list[int] = []

    def source() -> Iterator[pa.RecordBatch]:
        for number in range(200):
            read.append(number)
            yield window([float(number)] * 5000, number * 5000)  # 120 kB

    stream = Runner(Doubler(), VIEW).stream(source(), memory_mb=1)
    next(stream)
    time.sleep(0.3)
    assert len(read) < 20
    stream.close()


# ---- what it reports


def test_the_meter_counts_rows_costs_and_padding() -> None:
    meter = Meter()
    model = Staged(by_cost=True)
    model.max_cost = 8
    runner = Runner(model, SINGLE, meter)
    gathered(runner.stream(windows([4.0, 4.0, 3.0, 2.0, 1.0], 5)))  # batches: 4 4 · 3 2 · 1
    assert (meter.rows, meter.batches, meter.cost, meter.padded_cost, meter.flops) == (
        5,
        3,
        14,
        8 + 6 + 1,
        5.0,
    )
    figures = runner.figures(2.0)
    assert figures["padding"] == round(1 / 15, 4)
    assert (figures["rows_per_s"], figures["cost_per_s"], figures["flops_per_s"]) == (2.5, 7.0, 2)
    assert figures["device"] == "cpu"
    assert figures["peak_memory_bytes"] >= resident_bytes() // 2
    assert figures["peak_flops"] > 1e6
    assert set(figures["stages"]) == {"read", "prepare", "batch", "model", "check", "write"}


FULL = (
    "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried …",
    "CUDA error: out of memory\nCUDA kernel errors might be …",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "Triton Error [CUDA]: out of memory",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseSpMM( …`",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.",
)
LOST = (
    ASSERTED,
    "CUDA error: unspecified launch failure\nSearch for it, or for 'invalid argument', in …",
    "CUDA error: misaligned address",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( …`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "Triton Error [CUDA]: an illegal memory access was encountered",
)
NEITHER = (
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: invalid configuration argument\nCUDA kernel errors might be …",
    "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( …`",
    "shape mismatch",
)
"""What torch's errors say, and what they mean."""


@pytest.mark.parametrize(
    ("error", "full", "lost"),
    [
        *((RuntimeError(text), True, False) for text in FULL),
        *((RuntimeError(text), False, True) for text in LOST),
        *((RuntimeError(text), False, False) for text in NEITHER),
        (MemoryError(), True, False),
        (pa.ArrowMemoryError("malloc of size 99 failed"), True, False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True, False),
        (torch.AcceleratorError("CUDA error: out of memory"), True, False),
        (torch.AcceleratorError(ASSERTED), False, True),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), False, True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True, False),
        (OSError(errno.ENOENT, "No such file or directory"), False, False),
        (RuntimeException("… Failed to allocate memory for requested buffer"), True, False),
        (RuntimeException("… memory of 5 is smaller than requested bytes of 9"), True, False),
        (Fail("FAIL : CUDA failure 2: out of memory ; GPU=0"), True, False),
        (Fail("FAIL : CUDA failure 700: an illegal memory access"), False, True),
        (ValueError("out of memory"), False, False),
        (ValueError(ASSERTED), False, False),
    ],
)
def test_what_an_error_says_of_memory_and_of_the_gpu(
    error: BaseException, full: bool, lost: bool
) -> None:
    assert (is_out_of_memory(error), is_device_lost(error)) == (full, lost)


def test_a_real_allocation_that_fails_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert available_bytes() > 2**20
