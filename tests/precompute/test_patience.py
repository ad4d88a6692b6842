"""Patience: rows that a worker was given up with are waited for as long as the run's own batches
took, and each of them at last with all patience."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import numpy as np
import pyarrow as pa
import pytest

from precompute.workers.worker import LOAD_S, HeldWindow, Patience, Task, WorkerProcess

BATCH = pa.record_batch({"x": [1.0, 2.0, 3.0]})


def task(rows: int, *, hung: bool = True, deaths: int = 0) -> Task:
    return Task(
        HeldWindow(0, BATCH, BATCH, 3, 24), np.arange(rows), suspect=True, hung=hung, deaths=deaths
    )


def measured(*seconds: float) -> Patience:
    patience = Patience(1.0, 60.0, 600.0, 2)
    for after_s in seconds:
        patience.progressed(after_s)
    return patience


@pytest.mark.parametrize(("hang_s", "limit_s"), [(1.0, LOAD_S), (2 * LOAD_S, 2 * LOAD_S)])
def test_a_model_that_is_being_loaded_is_not_waited_for_for_ever(
    hang_s: float, limit_s: float
) -> None:
    # it gives signs of life
    loading = SimpleNamespace(hung_up=False, ready=False, progress=0.0, heard=math.inf)
    given_up = [
        WorkerProcess.judged(cast(WorkerProcess, loading), now, Patience(1, 1, hang_s, 2), 0)
        for now in (limit_s, limit_s + 1)
    ]
    said = f"did not load its model within {limit_s:.3g} s (engine.hang gives it more)"
    assert given_up == [None, said]


@pytest.mark.parametrize(("seconds", "waited_s"), [((0.0,), 2.0), ((0.5, 10.0, 1.0), 42.0)])
def test_rows_that_hung_are_waited_for_by_what_was_measured(
    seconds: tuple[float, ...], waited_s: float
) -> None:
    assert measured(*seconds).for_task(task(3), 0) == waited_s


@pytest.mark.parametrize(
    ("patience", "given"),
    [
        (measured(), task(3)),
        (measured(0.5), task(3, hung=False)),
        (measured(0.5), task(1, deaths=1)),
    ],
    ids=["nothing was measured", "rows that did not hang", "a row's last try"],
)
def test_all_others_are_waited_for_as_long_as_is_configured(
    patience: Patience, given: Task
) -> None:
    assert patience.for_task(given, 0) == math.inf


def test_a_machine_that_became_slower_is_waited_for() -> None:
    """Twice as long for each worker that was lost with nothing finished in between; however
    many."""
    waited = [measured(0.5).for_task(task(3), fruitless) for fruitless in (-2, 0, 1, 3)]
    assert waited == [4.0, 4.0, 8.0, 32.0]
    assert 600.0 < measured(0.5).for_task(task(3), 5000) < math.inf
