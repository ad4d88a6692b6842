"""Pace: batches of any model take about as long as they should, found by a clock that the test
turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from precompute.engine.budget import LONG_S, Pace

GOAL_S = 1.0


def paced(
    seconds_of: Callable[[int], float],
    start: int | None,
    asked: int = 4096,
    times: int = 60,
    ahead: int = 8,
) -> list[int]:
    """The rows of each batch, made as many ahead of the clock as the engine makes them."""
    pace = Pace(start, GOAL_S)
    made: list[int] = []
    for _ in range(times):
        made.append(min(asked, pace.limit))
        if len(made) > ahead:
            pace.done(made[-ahead - 1], seconds_of(made[-ahead - 1]))
    return made


@pytest.mark.parametrize("start", [8, None])
@pytest.mark.parametrize("row_s", [1e-7, 1e-5, 1e-4, 1e-3, 0.05, 0.3, 1.0, 3.0])
def test_batches_of_a_slow_model_are_as_large_as_its_time_allows(
    row_s: float, start: int | None
) -> None:
    made = paced(lambda rows: rows * row_s, start)
    best = min(4096, max(1, int(GOAL_S / row_s)))
    assert best / 4 <= made[-1] <= 2 * best
    if start is not None:
        assert all(rows <= max(start, 4 * best) for rows in made)


@pytest.mark.parametrize("start", [8, None])
@pytest.mark.parametrize("call_s", [0.01, 0.4, 0.9, 1.9, 4.5, 6.0, 9.9, 12.0, 300.0])
def test_a_model_that_takes_as_long_for_one_row_as_for_many_is_given_many(
    call_s: float, start: int | None
) -> None:
    assert paced(lambda rows: call_s + rows * 1e-5, start, times=200)[-1] >= 512


def test_one_pause_of_the_machine_is_soon_forgotten() -> None:
    pace = Pace(None, GOAL_S)
    for _ in range(5):
        pace.done(4096, 0.01)
    pace.done(4096, 60.0)
    assert pace.limit < 100
    for _ in range(3):
        pace.done(pace.limit, pace.limit * 0.01 / 4096)
    assert pace.limit > 4096


def test_nothing_takes_longer_than_it_may_whatever_the_bargain() -> None:
    made = paced(lambda rows: 9.0 + rows * 0.01, 8, times=200)
    assert all(9.0 + rows * 0.01 <= 2 * LONG_S for rows in made[50:])
