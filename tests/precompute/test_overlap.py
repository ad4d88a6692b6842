"""A device that computes while others are launched stays busy: the search for a batch's size
ends, whatever the rows cost, and holds nothing up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from precompute.engine.batches import DEVICE_WINDOW_ROWS
from precompute.engine.runner import Runner
from precompute.sources.sized_batches import joined
from tests.precompute.simulated_device import (
    VIEW,
    SimulatedDevice,
    SimulatedModel,
    Speed,
    simulated,
)

DOCSTRINGS = [
    3, 7, 9, 9, 10, 11, 12, 13, 13, 14, 15, 16, 18, 19, 22, 24, 27, 30, 33, 36, 40, 43, 48, 54,
    62, 71, 80, 91, 110,
]  # fmt: skip
DOCSTRINGS += [136, 181, 256, 256]
"""Quantiles, each of 1/32, of the tokens (MiniLM's, at most 256) of the standard library's 5,268
docstrings."""
TITLES = [
    4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 8, 8, 8, 8, 8, 9, 9, 9, 10, 10, 11, 11,
    12, 14, 16, 27,
]  # fmt: skip
"""Of the 1,682 titles of MovieLens-100k, with their genres."""

ROWS = {
    "docstrings": (DOCSTRINGS, 16_384, Speed()),
    "titles": (TITLES, 16_384, Speed()),
    # a row is 1: an MLP over users, and top_k over 60,000 items
    "mlp": ([1, 1], 2048, Speed(200e-6, 100e-6, 1 / 50e6, 20_000)),
    "top_k": ([1, 1], 4096, Speed(200e-6, 500e-6, 1 / 200e3, 1_000_000)),
    # a device that is full with little, and one that larger batches do not help
    "little memory": (DOCSTRINGS, 16_384, Speed(memory_bytes=2 * 10**9)),
    "small is best": (DOCSTRINGS, 16_384, Speed(20e-6, 0.0)),
    "long launches": (TITLES, 16_384, Speed(20e-3, 1e-3)),
}


def drawn(quantiles: list[int], rows: int) -> npt.NDArray[np.int64]:
    at = np.random.default_rng(0).uniform(0, len(quantiles) - 1, rows)
    return np.interp(at, np.arange(len(quantiles)), quantiles).astype(np.int64)


def rate(speed: Speed, cost: int) -> float:
    """Of batches of this cost, one after the other."""
    return cost / max(speed.batch_s + cost * speed.cost_s, speed.launch_s)


def share_of_best(runner: Runner, start: int, speed: Speed) -> float:
    allowed = [
        start * 2**n // 2
        for n in range(8)
        if start * 2**n // 2 * speed.cost_bytes < 0.8 * speed.memory_bytes
    ]
    return rate(speed, runner.budget.cost) / max(rate(speed, cost) for cost in allowed)


@pytest.mark.parametrize("name", list(ROWS))
def test_nearly_all_batches_overlap_and_the_search_ends(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantiles, start, speed = ROWS[name]
    costs = drawn(quantiles, 600_000 if quantiles is DOCSTRINGS else 2_000_000)
    device = SimulatedDevice(speed)
    runner = simulated(monkeypatch, device, costs, start)
    later = device.overlapped[32:]
    assert (runner.meter.rows, runner.meter.out_of_memory) == (len(costs), 0)
    assert sum(later) >= 0.98 * len(later)
    assert runner.budget.settled
    assert share_of_best(runner, start, speed) >= 0.94
    # computing all of it without padding, at the best rate there is
    assert costs.sum() / device.now >= 0.78 * rate(speed, 64 * start)


@pytest.mark.parametrize("prepare_s", [5e-3, 50e-3])
def test_a_device_that_waits_for_rows_settles_as_one_that_does_not(
    prepare_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = Speed()
    runner = simulated(
        monkeypatch, SimulatedDevice(speed), drawn(DOCSTRINGS, 200_000), 16_384, prepare_s
    )
    assert runner.budget.settled
    assert share_of_best(runner, 16_384, speed) >= 0.94


def test_few_rows_end_without_a_search_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(Speed())
    runner = simulated(monkeypatch, device, drawn(DOCSTRINGS, 5268), 16_384)
    assert runner.meter.rows == 5268
    assert sum(device.overlapped) >= len(device.overlapped) - 1


def test_windows_are_as_large_as_a_device_wants_and_memory_allows() -> None:
    batches = [pa.record_batch({"x": np.zeros(8192)}) for _ in range(20)]
    model = SimulatedModel(SimulatedDevice(Speed()), 1)
    assert Runner(model, VIEW).window_rows == DEVICE_WINDOW_ROWS
    assert [b.num_rows for b in joined(iter(batches), DEVICE_WINDOW_ROWS)] == [
        131_072,
        20 * 8192 - 131_072,
    ]
    assert [b.num_rows for b in joined(iter(batches), 131_072, 3 * 8 * 8192)] == [3 * 8192] * 6 + [
        2 * 8192
    ]
    # one that is larger alone, and all of a model that computes only when it is called
    assert [b.num_rows for b in joined(iter(batches), 131_072, 1)] == [8192] * 20
    model.device.depth = 0
    assert all(
        a is b
        for a, b in zip(
            batches, joined(iter(batches), Runner(model, VIEW).window_rows), strict=True
        )
    )
