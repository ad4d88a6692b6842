"""Ahead: the items of an iterator, in order, made in a thread that stays within its bounds and ends
when it is closed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from precompute.engine.ahead import Ahead, StageTime


def ahead(items: Iterator[int], max_bytes: int = 3, max_items: int = 1000) -> Ahead[int]:
    return Ahead("test", items, StageTime(), lambda _: 1, max_bytes, None, max_items)


def wait_until(true: object) -> None:
    assert callable(true)
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


@pytest.mark.parametrize(("max_bytes", "max_items", "most"), [(10**9, 1, 2), (3, 1000, 4)])
def test_bytes_and_items_are_bounded_and_what_is_taken_makes_room(
    max_bytes: int, max_items: int, most: int
) -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    stage = ahead(items(), max_bytes, max_items)
    for taken in (0, 10):
        assert [next(stage) for _ in range(taken)] == list(range(taken))
        wait_until(lambda there=taken + most: len(made) == there)
        time.sleep(0.05)
        assert len(made) == taken + most
    stage.close()


def test_an_error_while_closing_is_not_swallowed() -> None:
    def items() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise ValueError("while closing")

    stage = ahead(items())
    assert [next(stage), next(stage)] == [1, 2]
    with pytest.raises(ValueError, match="while closing"):
        next(stage)


def test_the_slow_stage_is_busy_and_the_others_wait_for_it() -> None:
    def slow(items: Iterator[int]) -> Iterator[int]:
        for item in items:
            time.sleep(0.02)
            yield item

    times = [StageTime(), StageTime()]
    first = Ahead("first", iter(range(20)), times[0], lambda _: 1, 1)
    second = Ahead("second", slow(first), times[1], lambda _: 1, 1, first)
    assert list(second) == list(range(20))
    assert times[1].busy_s > 0.3
    assert times[0].blocked_s > times[0].busy_s
    assert second.waited_s > 0.3
    assert times[1].starved_s < times[1].busy_s
