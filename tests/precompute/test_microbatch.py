"""The micro-batcher: who shares a flight, who shares a batch, who is refused, and that its thread
outlives everything."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from precompute.engine.microbatch import REMEMBERED_S, MicroBatcher, Refusal, Wanted
from tests.server import eventually

WAIT_S = 20.0


class Refused(Exception):
    """What a refused request gets; says why."""


class Runs:
    """A ``run`` that notes its batches, and waits at a gate while that is closed. It answers each
    payload with ten times itself; a payload that is an exception is returned, one that is a
    callable is called."""

    def __init__(self) -> None:
        self.batches: list[tuple[Hashable, list[Any]]] = []
        self.gate, self.inside = threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def __call__(self, group: Hashable, payloads: Sequence[Any]) -> list[Any]:
        self.batches.append((group, list(payloads)))
        self.inside.release()
        assert self.gate.wait(WAIT_S)
        results = []
        for payload in payloads:
            if callable(payload):
                return payload()
            results.append(payload if isinstance(payload, Exception) else payload * 10)
        return results


Batcher = MicroBatcher[Any, Any]
Make = Callable[..., tuple[Batcher, Runs]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a batcher with its runs, and closes it."""
    made: list[tuple[Batcher, Runs]] = []

    def make_one(**limits: Any) -> tuple[Batcher, Runs]:
        runs = Runs()
        made.append((MicroBatcher(runs, _refused, **limits), runs))
        return made[-1]

    yield make_one
    for batcher, runs in made:
        runs.gate.set()
        batcher.close()


def _refused(kind: Refusal) -> Exception:
    return Refused(kind)


def later(seconds: float = WAIT_S) -> float:
    return time.monotonic() + seconds


def hold(batcher: Batcher, runs: Runs) -> Future[Any]:
    """Keep the thread inside a run of its own until the gate opens; what is requested meanwhile
    waits."""
    runs.gate.clear()
    future = batcher.submit("held", "held", 0, later())
    assert runs.inside.acquire(timeout=WAIT_S)
    return future


def outcome(future: Future[Any]) -> Any:
    """A future's result, or its exception."""
    error = future.exception(timeout=WAIT_S)
    return future.result() if error is None else error


def refusal(future: Future[Any]) -> str:
    """Why a future was refused."""
    error = outcome(future)
    assert isinstance(error, Refused), error
    return str(error)


# ---- flights and batches


def test_what_waits_for_the_same_group_is_one_batch_in_the_order_it_came(make: Make) -> None:
    batcher, runs = make()
    held = hold(batcher, runs)
    futures = {
        key: batcher.submit(key[0], key, int(key[1]), later())
        for key in ("b1", "a2", "b3", "a4", "b5")
    }
    runs.gate.set()
    assert {key: future.result(WAIT_S) for key, future in futures.items()} == {
        "b1": 10,
        "a2": 20,
        "b3": 30,
        "a4": 40,
        "b5": 50,
    }
    assert (held.result(WAIT_S), runs.batches) == (
        0,
        [("held", [0]), ("b", [1, 3, 5]), ("a", [2, 4])],
    )


def test_of_too_many_the_least_patient_come_first(make: Make) -> None:
    batcher, runs = make(max_batch=2)
    hold(batcher, runs)
    wanted = [("a", 1, 90.0), ("a", 2, 80.0), ("b", 3, 90.0), ("a", 4, 60.0), ("a", 5, 70.0)]
    futures = [
        batcher.submit(group, number, number, later(seconds)) for group, number, seconds in wanted
    ]
    runs.gate.set()
    assert [future.result(WAIT_S) for future in futures] == [10, 20, 30, 40, 50]
    assert runs.batches[1:] == [("a", [4, 5]), ("a", [2, 1]), ("b", [3])]


def test_who_is_refused_as_too_late_may_send_more(make: Make) -> None:
    batcher, runs = make()
    hold(batcher, runs)
    more: list[Future[Any]] = []
    late = [batcher.submit("a", number, number, later(-1)) for number in range(3)]
    for future in late:
        future.add_done_callback(
            lambda _: more.append(batcher.submit("a", len(more) + 3, len(more) + 3, later()))
        )
    runs.gate.set()
    assert [refusal(future) for future in late] == ["deadline"] * 3
    eventually(lambda: len(more) == 3)
    assert [future.result(WAIT_S) for future in more] == [30, 40, 50]


def test_requests_for_one_key_share_a_flight(make: Make) -> None:
    batcher, runs = make()
    held = hold(batcher, runs)
    waiting = [batcher.submit("a", "k", 1, later()) for _ in range(50)]
    running = batcher.submit("held", "held", 4, later())
    other = batcher.submit("b", "k", 2, later())
    runs.gate.set()
    assert [future.result(WAIT_S) for future in (held, running, *waiting, other)] == [
        0,
        0,
        *[10] * 50,
        20,
    ]
    assert batcher.submit("a", "k", 3, later()).result(WAIT_S) == 30
    assert runs.batches == [("held", [0]), ("a", [1]), ("b", [2]), ("a", [3])]


def test_many_threads_each_get_the_result_of_their_key(make: Make) -> None:
    batcher, runs = make(max_batch=4)

    def ask(i: int) -> bool:
        key = i % 7
        return batcher.submit(key % 2, key, key, later()).result(WAIT_S) == 10 * key

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(ask, range(2000)))
    assert all(
        len(payloads) <= 4 and {p % 2 for p in payloads} == {group}
        for group, payloads in runs.batches
    )
    assert all(len(set(payloads)) == len(payloads) for _, payloads in runs.batches)


# ---- refusals


def test_what_does_not_fit_is_shed_and_a_known_key_still_joins_its_flight(make: Make) -> None:
    batcher, runs = make(max_queue=2)
    hold(batcher, runs)
    first, second, third = (batcher.submit("a", i, i, later()) for i in range(3))
    assert (first.done(), second.done(), third.done()) == (False, False, True)
    assert refusal(third) == "shed"
    again = batcher.submit("a", 0, 5, later())
    runs.gate.set()
    assert (first.result(WAIT_S), second.result(WAIT_S), again.result(WAIT_S)) == (0, 10, 0)
    assert batcher.submit("a", 2, 2, later()).result(WAIT_S) == 20


def test_a_full_queue_of_one_owner_is_no_others(make: Make) -> None:
    batcher, runs = make(max_queue=2)
    hold(batcher, runs)
    futures = [
        batcher.submit("a", (owner, i), i, later(), owner) for owner in "xy" for i in (1, 2, 3)
    ]
    runs.gate.set()
    assert [refusal(future) for future in futures[2::3]] == ["shed", "shed"]
    assert [future.result(WAIT_S) for number, future in enumerate(futures) if number % 3 < 2] == [
        10,
        20,
        10,
        20,
    ]
    assert runs.batches[1:] == [("a", [1, 1, 2, 2])]
    assert batcher.submit("a", 4, 4, later(), "x").result(WAIT_S) == 40


def test_what_takes_longer_than_anybody_waits_is_not_begun(pace: MakePaced) -> None:
    batcher, paced = pace("x", row_s=0.8)
    wanted = [("a", 1, 0.6), ("a", 2, 9.0), ("b", 3, 0.6)]
    hasty, patient, other = (
        batcher.submit(group, key, key, paced.now + seconds) for group, key, seconds in wanted
    )
    assert (refusal(hasty), patient.result(WAIT_S), other.result(WAIT_S)) == ("deadline", 2, 3)
    # it may have been slow for a while only
    paced.now += REMEMBERED_S
    assert batcher.submit("a", 4, 4, paced.now + 0.6).result(WAIT_S) == 4


def test_a_flight_nobody_waits_for_any_more_is_not_begun(make: Make) -> None:
    batcher, runs = make()
    hold(batcher, runs)
    past, future = batcher.submit("a", 1, 1, later(-1)), batcher.submit("a", 2, 2, later())
    only_past = batcher.submit("b", 3, 3, later(-1))
    runs.gate.set()
    assert (refusal(past), refusal(only_past), future.result(WAIT_S)) == (
        "deadline",
        "deadline",
        20,
    )
    assert runs.batches == [("held", [0]), ("a", [2])]
    assert batcher.submit("a", 1, 1, later()).result(WAIT_S) == 10


@pytest.mark.parametrize("deadlines", [(1.0, 5.0), (5.0, 1.0)])
def test_a_flight_waits_as_long_as_the_most_patient_of_those_who_share_it(
    make: Make, deadlines: tuple[float, float]
) -> None:
    paced = Paced()
    batcher, runs = make(clock=paced.clock)
    hold(batcher, runs)
    futures = [batcher.submit("a", 1, 1, seconds) for seconds in deadlines]
    paced.now = 2.0
    runs.gate.set()
    assert [future.result(WAIT_S) for future in futures] == [10, 10]


# ---- failures


def test_an_exception_among_the_results_is_its_callers_alone(make: Make) -> None:
    batcher, runs = make()
    hold(batcher, runs)
    error = ValueError("2")
    good, bad = batcher.submit("a", 1, 1, later()), batcher.submit("a", 2, error, later())
    runs.gate.set()
    assert (good.result(WAIT_S), outcome(bad)) == (10, error)
    assert batcher.submit("a", 2, 2, later()).result(WAIT_S) == 20


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda: _raise(RuntimeError("whatever")), id="raises"),
        pytest.param(lambda: _raise(SystemExit(1)), id="exits"),
        pytest.param(list, id="no results"),
        pytest.param(lambda: [1], id="too few results"),
        pytest.param(lambda: None, id="None"),
    ],
)
def test_a_run_that_fails_fails_all_of_its_callers_and_no_others(
    make: Make, broken: Callable[[], Any]
) -> None:
    batcher, runs = make()
    hold(batcher, runs)
    futures = [batcher.submit("a", 1, 1, later()), batcher.submit("a", 2, broken, later())]
    other = batcher.submit("b", 3, 3, later())
    runs.gate.set()
    assert other.result(3) == 30
    assert all(isinstance(outcome(future), BaseException) for future in futures)
    assert [batcher.submit("a", key, key, later()).result(3) for key in (1, 2)] == [10, 20]


def test_what_all_of_its_callers_gave_up_is_not_begun_and_makes_room(make: Make) -> None:
    batcher, runs = make(max_queue=2)
    held = hold(batcher, runs)
    for _ in range(100):
        first, second = (batcher.submit("a", key, key, later()) for key in (1, 2))
        assert first.cancel()
        assert second.cancel()
    shared, stays, other = (batcher.submit("a", key, key, later()) for key in (3, 3, 4))
    assert refusal(batcher.submit("a", 5, 5, later())) == "shed"
    assert shared.cancel()
    # what has begun ends all the same, and is there for those who send meanwhile
    assert held.cancel()
    again = batcher.submit("held", "held", 7, later())
    runs.gate.set()
    assert [future.result(WAIT_S) for future in (stays, other, again)] == [30, 40, 0]
    assert runs.batches == [("held", [0]), ("a", [3, 4])]
    assert batcher.submit("a", 1, 1, later()).result(WAIT_S) == 10


# ---- whose turn it is


class Paced:
    """A ``run`` of a model that takes ``row_s`` a row, and ``start_s`` more a batch, by a clock
    that only it moves. It notes its batches; before one is done, ``meanwhile`` is called."""

    def __init__(self, row_s: float = 0.01, start_s: float = 0.0) -> None:
        self.now, self._row_s, self._start_s = 0.0, row_s, start_s
        self.batches: list[list[Any]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def clock(self) -> float:
        return self.now

    def __call__(self, group: Hashable, payloads: Sequence[Any]) -> list[Any]:
        self.batches.append(list(payloads))
        self.meanwhile()
        self.now += self._start_s + self._row_s * len(payloads)
        return list(payloads)


MakePaced = Callable[..., tuple[Batcher, Paced]]


@pytest.fixture
def pace() -> Iterator[MakePaced]:
    """Makes a batcher over a model whose pace it has seen: in batches of one and of two, requested
    by ``owners``; and closes it."""
    made: list[Batcher] = []

    def make_one(
        owners: str, row_s: float = 0.01, start_s: float = 0.0, **limits: int
    ) -> tuple[Batcher, Paced]:
        paced = Paced(row_s, start_s)
        batcher = MicroBatcher[Any, Any](paced, _refused, clock=paced.clock, **limits)
        made.append(batcher)
        for owner in owners:
            for rows in (1, 1, 2):
                ask_all(batcher, [f"{owner} learns {i}" for i in range(rows)], math.inf, owner)[
                    -1
                ].result(WAIT_S)
        paced.batches.clear()
        return batcher, paced

    yield make_one
    for batcher in made:
        batcher.close()


def ask_all(
    batcher: Batcher, keys: Sequence[Any], deadline: float, owner: str, patience_s: float = math.inf
) -> list[Future[Any]]:
    """Ask for these at once; what comes back for a key is itself."""
    return batcher.submit_all([Wanted("a", key, key) for key in keys], deadline, owner, patience_s)


def results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Each one's result, or why it was refused."""
    return [refusal(future) if future.exception(WAIT_S) else future.result() for future in futures]


def test_one_clients_thousand_delay_anothers_one_by_two_rows_time(pace: MakePaced) -> None:
    batcher, paced = pace("xy")
    lone: list[Future[Any]] = []
    asked_in: list[int] = []

    def meanwhile() -> None:
        if len(paced.batches) in (5, 30, 31):
            asked_in.append(len(paced.batches))
            lone.extend(ask_all(batcher, [f"lone {len(paced.batches)}"], paced.now + 0.05, "y"))

    paced.meanwhile = meanwhile
    flood = ask_all(batcher, range(300), 100.0, "x")
    assert results(flood) == list(range(300))
    assert results(lone) == [f"lone {number}" for number in (5, 30, 31)]
    assert [f"lone {number}" in paced.batches[number] for number in asked_in] == [True, True, True]
    assert max(map(len, paced.batches)) == 2


def test_alone_an_owner_has_batches_as_long_as_another_may_wait_for(pace: MakePaced) -> None:
    batcher, paced = pace("x")
    assert results(ask_all(batcher, range(200), 100.0, "x", patience_s=0.5)) == list(range(200))
    assert max(map(len, paced.batches)) == 25


def test_what_cannot_be_done_in_time_is_refused_at_once(pace: MakePaced) -> None:
    batcher, paced = pace("x")
    paced.meanwhile = lambda: None
    flood = ask_all(batcher, range(1000), paced.now + 1.0, "x")
    at_once = [future.done() and future.exception() is not None for future in flood]
    assert sum(at_once[:90]) == 0
    assert all(at_once[110:])
    given = [one for one in results(flood) if one not in ("shed", "deadline")]
    assert 95 <= len(given) <= 100
    assert results(ask_all(batcher, ["hasty"], paced.now + 0.005, "x")) == ["deadline"]


def test_a_batch_is_cut_so_that_its_rows_and_the_next_ones_are_in_time(pace: MakePaced) -> None:
    batcher, paced = pace("xy", start_s=0.05)
    held = threading.Event()

    def hold_on() -> None:
        assert held.wait(WAIT_S)

    paced.meanwhile = hold_on
    batcher.submit("held", "held", "held", math.inf)
    eventually(lambda: paced.batches == [["held"]])
    start = paced.now + 0.06
    soon = ask_all(batcher, ["soon"], start + 0.065, "x")
    many = ask_all(batcher, range(20), start + 10.0, "x")
    # of groups of their own; behind two rows of the first, it is the other's turn
    others = [
        batcher.submit(name[0], name, name, start + seconds, "y")
        for name, seconds in (("b1", 0.14), ("b2", 0.14), ("c", 0.275))
    ]
    held.set()
    assert results([*soon, *many, *others]) == ["soon", *range(20), "b1", "b2", "c"]
    # 0.06 s of 0.065; 0.07 s of 0.075; 0.08 s, since 0.06 s more are to be over by 0.275 s; and
    # then as many as may be
    assert paced.batches[1:6] == [["soon"], ["b1", "b2"], [0, 1, 2], ["c"], [*range(3, 10)]]


def test_a_flight_of_two_owners_goes_with_the_first_turn_and_once(pace: MakePaced) -> None:
    batcher, paced = pace("xy")
    wanted: list[Future[Any]] = []

    def meanwhile() -> None:
        if len(paced.batches) == 2:
            wanted.extend(ask_all(batcher, [90, 95, "gone"], 50.0, "y"))
            assert wanted.pop().cancel()
            # the other one still waits for it
            assert wanted.pop().cancel()

    paced.meanwhile = meanwhile
    assert results(ask_all(batcher, range(100), 100.0, "x")) == list(range(100))
    assert results(wanted) == [90]
    computed = [row for batch in paced.batches for row in batch]
    assert sorted(computed) == list(range(100))
    assert 90 in paced.batches[2]
    assert computed.index(95) > 90


def test_who_always_asks_for_one_more_gets_no_more_than_its_share(pace: MakePaced) -> None:
    batcher, paced = pace("xy", max_batch=1)

    def meanwhile() -> None:
        if len(paced.batches) < 100:
            ask_all(batcher, [f"y{len(paced.batches)}"], 100.0, "y")

    paced.meanwhile = meanwhile
    results(ask_all(batcher, range(100), 100.0, "x"))
    rows = [row for batch in paced.batches[:60] for row in batch]
    assert 0.4 < sum(isinstance(row, int) for row in rows) / len(rows) < 0.6


# ---- the end


def test_close_refuses_what_waits_lets_what_runs_end_and_stops_the_thread(make: Make) -> None:
    batcher, runs = make()
    held = hold(batcher, runs)
    waiting = [batcher.submit("a", i, i, later()) for i in range(3)]
    threads = {thread.name for thread in threading.enumerate()}
    closer = threading.Thread(target=batcher.close)
    closer.start()
    assert not held.done()
    runs.gate.set()
    closer.join(WAIT_S)
    assert (held.result(0), [refusal(future) for future in waiting]) == (0, ["shed"] * 3)
    assert "microbatch" in threads
    assert "microbatch" not in {thread.name for thread in threading.enumerate()}
    assert refusal(batcher.submit("a", 9, 9, later())) == "shed"
    batcher.close()
    assert runs.batches == [("held", [0])]
