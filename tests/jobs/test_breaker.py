"""The breaker before a model: when it opens, what it lets through, and when it closes."""

from __future__ import annotations

import pytest

from precompute.jobs.serve.remote_fallback import LATEST_S, LEAST_CALLS, OPEN_S, PROBES, Breaker


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(LEAST_CALLS):
        breaker.count(True, at)
    return breaker


@pytest.mark.parametrize(
    ("calls", "is_open"),
    [
        ([True] * (LEAST_CALLS - 1), False),
        ([True] * LEAST_CALLS, True),
        ([False] * 5 + [True] * 5, True),
        ([False] * 6 + [True] * 5, False),
        ([True] * 5 + [False] * 5, False),
    ],
    ids=["few", "all", "half", "less than half", "it got better"],
)
def test_it_opens_at_a_share_of_broken_calls(calls: list[bool], is_open: bool) -> None:
    breaker = Breaker()
    for broken in calls:
        breaker.count(broken, 1.0)
    assert breaker.is_open == is_open
    assert breaker.admit(7, 1.0) == ((0, OPEN_S) if is_open else (7, 0.0))


def test_what_failed_long_ago_does_not_count() -> None:
    breaker = Breaker()
    for number in range(2 * LEAST_CALLS):
        breaker.count(True, number * (LATEST_S / (LEAST_CALLS - 1)) + number)
    assert not breaker.is_open


def test_it_closes_once_all_probes_were_good() -> None:
    breaker = opened()
    assert breaker.admit(1, OPEN_S - 10) == (0, 10)
    # what was under way when it opened says nothing
    breaker.count(False, 1.0)
    assert [breaker.admit(2, OPEN_S)[0] for _ in range(3)] == [2, PROBES - 2, 0]
    for _ in range(PROBES):
        assert breaker.is_open
        breaker.count(False, OPEN_S + 1)
    assert not breaker.is_open
    breaker.count(True, OPEN_S + 2)
    assert breaker.admit(5, OPEN_S + 2) == (5, 0.0)


def test_one_bad_probe_opens_it_again() -> None:
    breaker = opened()
    assert breaker.admit(9, OPEN_S)[0] == PROBES
    breaker.count(False, OPEN_S)
    breaker.count(True, OPEN_S + 1)
    assert breaker.admit(9, OPEN_S + 1) == (0, OPEN_S)
    assert breaker.admit(9, 2 * OPEN_S + 1)[0] == PROBES


def test_an_abandoned_call_says_nothing_an_abandoned_probe_is_repeated() -> None:
    breaker = Breaker()
    for _ in range(LEAST_CALLS):
        breaker.count(True, 1.0)
        breaker.count(None, 1.0)
    assert breaker.is_open
    for _ in range(2 * PROBES):
        assert breaker.admit(1, 1.0 + OPEN_S) == (1, 1.0)
        breaker.count(None, 2.0 + OPEN_S)
    assert breaker.is_open
    assert breaker.admit(9, 3.0 + OPEN_S)[0] == PROBES
