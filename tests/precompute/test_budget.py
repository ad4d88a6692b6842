"""Budget: batches become smaller near the end, halve when memory runs out, and grow back; and Pace:
how large they may be for their time. What a search finds: test_overlap.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.engine.batches import GROW_AFTER, LONG_S, TRIES, Budget, Pace


def search(budget: Budget, rate: Callable[[int], float]) -> int:
    """Let it measure batches filled to the brim, until it has chosen."""
    for _ in range(1000):
        if budget.settled:
            return budget.cost
        cost = budget.next()
        budget.done(cost, cost, cost / rate(cost))
    raise AssertionError("it never settles")


def test_near_the_end_batches_become_smaller_so_that_all_end_together() -> None:
    budget = Budget(1024, reach=2)
    assert [budget.next(share) for share in (5000, 5000, 2000, 1024, 1000, 600, 300, 0)] == [
        1024,
        2048,
        512,
        1024,
        1000,
        600,
        512,
        512,
    ]
    assert Budget(1024, fixed=True).next(100) == 1024  # what somebody chose
    assert Budget(1024, search=False).settled
    assert Budget(1024, search=False).next(100) == 512  # a CPU's, which is not searched
    short = Budget(1024, reach=1)
    short.done(0, 1024, 0.03)
    assert short.next(600) == 600
    short.done(0, 1024, 0.01)
    assert {short.next(100), short.next(100)} == {512, 1024}  # the next window's follow at once

    def ends(lanes: int, cost: int, budget: Budget) -> list[int]:
        """When each lane has nothing to do any more, in rows; each takes as long, and the lane that
        is free first takes the next batch."""
        at, left = [0] * lanes, cost
        while left:
            batch = min(budget.next(left // (2 * lanes)), left)
            at[at.index(min(at))] += batch
            left -= batch
        return at

    for cost in (9_000, 26_000, 105_000):
        found = Budget(1024, reach=8)
        search(found, lambda cost: float(cost))
        assert found.cost == 8192
        at = ends(2, cost, found)
        assert max(at) - min(at) <= 512
        assert max(ends(2, cost, Budget(8192, fixed=True))) > max(at)


def test_batches_that_are_nearly_empty_do_not_count_and_end_the_search() -> None:
    budget = Budget(100, reach=1)
    for _ in range(2 * TRIES - 2):
        budget.done(budget.next(), 3, 1.0)
    assert not budget.settled
    budget.done(budget.next(), 3, 1.0)
    budget.done(budget.next(), 3, 1.0)
    assert (budget.settled, budget.next()) == (True, 100)


def test_it_grows_back_in_small_steps_and_not_to_where_it_failed_at_once() -> None:
    budget = Budget(4096, fixed=True)
    budget.out_of_memory(4096)
    seen = [budget.next()]
    for _ in range(3 * GROW_AFTER):
        budget.done(budget.next(), budget.next(), 1.0)
        seen.append(budget.next())
    assert seen[0] == seen[GROW_AFTER - 1] == 2048
    assert seen[GROW_AFTER] == 2561
    assert max(seen) < 0.9 * 4096 + 1
    for _ in range(
        40 * GROW_AFTER
    ):  # in the end it tries again: it may have been another process that took the memory
        budget.done(budget.next(), budget.next(), 1.0)
    assert budget.next() == 4096
    # a larger batch that was made before fails after a smaller one
    late = Budget(4096, fixed=True)
    for cost in (2000, 4096):
        late.out_of_memory(cost)
    for _ in range(6 * GROW_AFTER):
        late.done(late.next(), late.next(), 1.0)
    assert late.next() == 0.9 * 2000


@given(st.integers(1, 10**6), st.lists(st.one_of(st.none(), st.integers(1, 10**6)), max_size=60))
def test_it_is_always_at_least_1_and_never_beyond_its_reach(
    start: int, events: list[int | None]
) -> None:
    budget = Budget(start, reach=4)
    for event in events:
        cost = budget.next()
        assert 1 <= cost <= 4 * start
        if event is None:
            budget.done(cost, cost, 0.001)
        else:
            budget.out_of_memory(event)
            assert budget.cost <= max(1, event // 2)
    assert budget.cost >= 1


# ---- Pace

GOAL_S = 1.0


def paced(
    seconds_of: Callable[[int], float],
    start: int | None,
    rows: int = 4096,
    times: int = 60,
    ahead: int = 8,
) -> list[int]:
    """The rows of each batch, made as many ahead of the clock as the engine makes them."""
    pace = Pace(start, GOAL_S)
    made: list[int] = []
    for _ in range(times):
        made.append(min(rows, pace.limit))
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
