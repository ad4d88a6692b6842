"""A device that computes while others are launched, in simulated time: a batch takes a while for
itself and some for each unit of cost, padding counted, and some memory. Nothing sleeps, and every
run is the same."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from precompute.engine import batches as batches_file
from precompute.engine import forward
from precompute.engine.batches import WIDE_ROWS, Pace, Preparation
from precompute.engine.forward import Forward
from precompute.engine.rows import Batch
from precompute.engine.runner import AHEAD_BATCHES, BATCH_S, HAND_ON_S, Runner
from precompute.model import Prepared
from precompute.models.device import LAUNCHED_AHEAD
from precompute.sources.sized_batches import joined
from precompute.store.feature_view import Feature, FeatureView

VIEW = FeatureView("simulated", ("id",), (Feature("y", "float32"),), 60.0, 60.0)


@dataclass(frozen=True)
class Speed:
    """``launch_s`` is the host's part of a batch; a batch then takes ``batch_s``, and ``cost_s``
    and ``cost_bytes`` for each unit."""

    launch_s: float = 200e-6
    batch_s: float = 1e-3
    cost_s: float = 1 / 2e6
    cost_bytes: int = 50_000
    memory_bytes: int = 40 * 10**9


@dataclass
class SimulatedDevice:
    """Its own clock, and what became of every batch."""

    speed: Speed
    name: str = "cuda"
    depth: int = LAUNCHED_AHEAD
    now: float = 0.0
    free_at: float = 0.0
    busy_s: float = 0.0
    under_way: int = 0
    in_use: int = 0
    overlapped: list[bool] = field(default_factory=list)
    """Of each batch that landed: whether another one was under way when it was waited for."""
    sizes: list[int] = field(default_factory=list)

    def free_bytes(self) -> int:
        return self.speed.memory_bytes

    def peak_bytes(self, reset: bool = False) -> int:
        # as CUDA's: counted when a batch is launched
        peak = self.in_use + 1
        if reset:
            self.in_use = 0
        return peak

    def release(self) -> None: ...

    def threads(self) -> int:
        return 1

    def compute_with(self, threads: int) -> None: ...

    def peak_flops(self) -> float:
        return 1.0


class SimulatedModel:
    """Column ``cost`` → y, on such a device."""

    cost_unit = "tokens"
    max_cost: int | None = None

    def __init__(self, device: SimulatedDevice, start_cost: int) -> None:
        self.device, self.start_cost = device, start_cost

    def fingerprint(self) -> str:
        return "simulated"

    def compute(self, batch: pa.RecordBatch) -> Mapping[str, npt.NDArray[Any]]:
        raise NotImplementedError

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        costs = np.asarray(batch.column("cost")).astype(np.int64)
        return Prepared(costs, costs)

    def inputs(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Any:
        costs = prepared.payload[rows]
        return len(rows), len(rows) * int(costs.max())

    def launch(self, inputs: tuple[int, int]) -> tuple[int, float]:
        device, speed, (rows, padded) = self.device, self.device.speed, inputs
        size_bytes = padded * speed.cost_bytes
        if size_bytes > speed.memory_bytes:
            raise MemoryError(f"{size_bytes} bytes")
        device.in_use = max(device.in_use, size_bytes)
        device.now += speed.launch_s
        seconds = speed.batch_s + padded * speed.cost_s
        device.free_at = max(device.free_at, device.now) + seconds
        device.busy_s += seconds
        device.under_way += 1
        device.sizes.append(padded)
        return rows, device.free_at

    def land(self, launched: tuple[int, float]) -> Mapping[str, npt.NDArray[Any]]:
        rows, done_at = launched
        device = self.device
        device.under_way -= 1
        device.overlapped.append(device.under_way > 0)
        device.now = max(device.now, done_at)
        return {"y": np.zeros(rows, np.float32)}

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        return 0.0


def simulated(
    monkeypatch: pytest.MonkeyPatch,
    device: SimulatedDevice,
    costs: npt.NDArray[np.int64],
    start_cost: int,
    prepare_s: float = 0.0,
) -> Runner:
    """Compute rows of these costs as a run does, the stages one after the other; ``prepare_s`` is
    what the stages before need for a batch."""
    clock = SimpleNamespace(monotonic=lambda: device.now)
    monkeypatch.setattr(forward, "time", clock)
    monkeypatch.setattr(batches_file, "time", clock)
    model = SimulatedModel(device, start_cost)
    runner = Runner(model, VIEW)
    pace = Pace(None, BATCH_S)
    preparation = Preparation(model, model, VIEW, lambda _: min(runner.budget.next(), pace.limit))
    stage = Forward(model, model, VIEW, runner.meter, runner.budget, pace, HAND_ON_S)
    whole = pa.table({"cost": pa.array(costs, pa.int64())}).to_batches(WIDE_ROWS)
    windows = ((batch, batch) for batch in joined(iter(whole), runner.window_rows))
    batches = _Made(preparation.batches(preparation.windows(windows)), device, prepare_s)
    for window in stage.windows(batches, batches.ready):
        for _, features in window.pieces:
            runner.meter.rows += len(features["y"])
        window.pieces.clear()
    monkeypatch.setattr(forward, "time", time)
    monkeypatch.setattr(batches_file, "time", time)
    return runner


class _Made(Iterator[Batch]):
    """Batches made ahead by the stages before, each in so many seconds."""

    def __init__(self, batches: Iterator[Batch], device: SimulatedDevice, seconds: float) -> None:
        self._batches, self._device, self._seconds = batches, device, seconds
        self._made: deque[tuple[Batch | None, float]] = deque()
        self._at = 0.0

    def _make(self) -> None:
        while len(self._made) <= AHEAD_BATCHES:
            # one that was full begins when there is room
            self._at = (
                max(self._at, self._device.now) if len(self._made) == AHEAD_BATCHES else self._at
            ) + self._seconds
            self._made.append((next(self._batches, None), self._at))

    def ready(self) -> bool:
        self._make()
        return self._made[0][1] <= self._device.now

    def __next__(self) -> Batch:
        self._make()
        batch, at = self._made.popleft()
        self._device.now = max(self._device.now, at)
        if batch is None:
            raise StopIteration
        return batch
