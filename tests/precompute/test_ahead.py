"""Ahead: the items of an iterator, in order, made in a thread that stays within its bounds and ends
when it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from precompute.engine.ahead import Ahead, StageTime


def ahead(
    items: Iterator[int],
    *,
    size: int = 1,
    max_bytes: int = 3,
    before: Ahead[int] | None = None,
    max_items: int = 1000,
) -> Ahead[int]:
    return Ahead("test", items, StageTime(), lambda _: size, max_bytes, before, max_items)


def wait_until(true: object) -> None:
    assert callable(true)
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


@pytest.mark.parametrize("max_bytes", [1, 3, 10**9])
def test_items_come_in_order_and_end(max_bytes: int) -> None:
    made = ahead(iter(range(100)), max_bytes=max_bytes)
    assert list(made) == list(range(100))
    assert next(made, None) is None


def test_no_more_is_made_than_the_bytes_allow() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    stage = ahead(items(), size=10, max_bytes=30)
    wait_until(lambda: len(made) == 4)  # three ready, one that waits for room
    time.sleep(0.05)
    assert len(made) == 4
    assert next(stage) == 0
    wait_until(lambda: len(made) == 5)
    stage.close()


def test_the_number_of_items_is_bounded_too() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    stage = ahead(items(), max_bytes=10**9, max_items=1)
    wait_until(lambda: len(made) == 2)
    time.sleep(0.05)
    assert len(made) == 2
    stage.close()


def test_an_error_comes_after_the_items_made_before_it_and_once() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("gone")

    stage = ahead(items())
    assert [next(stage), next(stage)] == [1, 2]
    with pytest.raises(KeyError, match="gone"):
        next(stage)
    assert next(stage, None) is None


def test_close_ends_the_threads_of_all_stages() -> None:
    closed: list[str] = []

    def items() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.append(threading.current_thread().name)

    first = ahead(items())
    second = ahead(iter(first), before=first)
    assert next(second) == 0
    second.close()
    wait_until(lambda: closed == ["test"])
    assert [t for t in threading.enumerate() if t.name == "test"] == []
    assert next(second, None) is None


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
