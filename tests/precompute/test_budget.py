"""Budget: it finds the best size by itself, halves when memory runs out, grows back, and never
exceeds what memory allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.engine.budget import FILLED, GROW_AFTER, TRIES, Budget


def search(budget: Budget, rate: Callable[[int], float], size_bytes: int = 0) -> int:
    """Let it measure batches filled to the brim, until it has chosen."""
    for _ in range(1000):
        if budget.settled:
            return budget.cost
        asked = budget.next()
        budget.done(asked, asked, asked / rate(asked), size_bytes * asked)
    raise AssertionError("it never settles")


@pytest.mark.parametrize(
    ("rate", "chosen"),
    [
        (lambda cost: 1000.0, 512),  # all alike: the smallest takes least memory
        (lambda cost: float(cost), 4096),  # large ones win
        (lambda cost: 1e6 / cost, 512),  # small ones win
        (lambda cost: 1000.0 if cost >= 1024 else 900.0, 1024),
        (lambda cost: 1000.0 if cost >= 1024 else 980.0, 512),  # within 3 %
    ],
)
def test_the_smallest_within_3_percent_of_the_best_is_chosen(
    rate: Callable[[int], float], chosen: int
) -> None:
    assert search(Budget(1024, reach=4), rate) == chosen


def test_candidates_take_turns() -> None:
    budget = Budget(100, reach=2)
    assert [budget.next() for _ in range(6)] == [100, 200, 50, 100, 200, 50]


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


def test_what_somebody_fixed_is_not_searched() -> None:
    budget = Budget(77, fixed=True)
    assert (budget.settled, budget.next()) == (True, 77)
    budget.done(77, 77, 1.0)
    assert budget.next() == 77


def test_batches_that_are_nearly_empty_tell_nothing_and_end_the_search() -> None:
    budget = Budget(100, reach=1)
    for _ in range(2 * TRIES - 2):
        budget.done(budget.next(), 3, 1.0)
    assert not budget.settled
    budget.done(budget.next(), 3, 1.0)
    budget.done(budget.next(), 3, 1.0)
    assert (budget.settled, budget.next()) == (True, 100)


def test_larger_ones_are_tried_as_long_as_they_are_better_and_filled() -> None:
    assert search(Budget(1024, reach=64), lambda cost: float(cost)) == 65_536
    assert search(Budget(1024, reach=64), lambda cost: float(min(cost, 5000))) == 8192
    budget = Budget(1024, reach=64)
    while not budget.settled:
        asked = budget.next()
        cost = min(asked, 5000)  # all the rows there are
        budget.done(asked, cost, 1.0)
    assert budget.cost == 8192
    assert budget.cost * FILLED <= 5000


def test_no_candidate_is_tried_that_memory_does_not_allow() -> None:
    budget = Budget(1000, reach=64, free_bytes=lambda: 10_000_000)
    asked = []
    for _ in range(1000):
        if budget.settled:
            break
        asked.append(budget.next())
        budget.done(
            asked[-1], asked[-1], 1e-9, 4000 * asked[-1]
        )  # 4 kB a unit: 2,000 units are 80 % of what is free
    assert budget.cost == 2000
    assert max(asked[8:]) <= 2000  # the first turn knew nothing yet


def test_out_of_memory_halves_and_is_remembered() -> None:
    budget = Budget(4096, fixed=True)
    budget.out_of_memory(4000)
    assert (budget.next(), budget.ceiling, budget.failures) == (2000, 4000, 1)
    budget.out_of_memory(2000)
    assert (budget.next(), budget.ceiling) == (1000, 2000)


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


@given(st.integers(1, 10**6), st.lists(st.one_of(st.none(), st.integers(1, 10**6)), max_size=60))
def test_it_is_always_at_least_1_and_never_more_than_asked(
    start: int, events: list[int | None]
) -> None:
    budget = Budget(start, reach=4)
    for event in events:
        asked = budget.next()
        assert 1 <= asked <= 4 * start
        if event is None:
            budget.done(asked, asked, 0.001)
        else:
            budget.out_of_memory(event)
            assert budget.cost <= max(1, event // 2)
    assert budget.cost >= 1
