"""Micro-batcher: single requests for a model, computed together by one long-lived thread: all that
wait for one group are a batch, with one flight per key.

Owners take turns, a row each (start-time fair queueing), and an owner's rows go by deadline: a
thousand requests of one owner delay another's single one by one batch at most, and batches are
short while others may come. What cannot be done by its deadline at the measured pace, or was
cancelled, is not begun.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, NamedTuple, TypeVar

log = logging.getLogger(__name__)

Payload = TypeVar("Payload")
Result = TypeVar("Result")

Refusal = Literal["shed", "deadline"]

REMEMBERED_S = 10.0
"""How long the time of a batch counts, so that a group that was slow for a while is tried again;
and for how long an owner counts as one who may send more requests."""

MOST_REMEMBERED = 32
"""How many of a group's latest batches count."""

LONE_SHARE = 2.0
"""A batch with several rows of one owner may take so many times as long as a row alone, while other
owners may send requests: such a request then waits as long as its own row takes, on average. MiniLM
on two cores takes 7.5 ms for one text and 3.0 for each of 64: at 2 it has 0.79 of its rate, at 1
0.4."""

PATIENCE_SHARE = 0.5
"""Share of a view's deadline that a batch takes at most, unless two rows take longer: a request
that comes while it runs is answered in time."""

GROW_BY = 8
"""A batch may have so many times the rows of the largest one that was measured lately."""

SLOWER = 10
"""A row may take so many times as long as the one that was computed when its view was opened:
inputs differ, and the machine may be busy."""

LONGEST_BATCH_S = 10.0
"""How long a batch may take, unless a view's deadline is longer or the model slower: a hang delays
all other misses by as much."""

UNKNOWN_BATCH_S = 30.0
"""The same for a model that has not been measured yet."""

LEAST_SLOWER = 2
"""How many times its pace a batch of such a model may take."""


class Wanted(NamedTuple, Generic[Payload]):
    """One requested result. Requests of one ``group`` can be computed together, those of one group
    and ``key`` share a flight; ``run`` gets ``payload``."""

    group: Hashable
    key: Hashable
    payload: Payload


class _Place(NamedTuple):
    """A flight's place in an owner's queue, which is sorted by it: the earliest deadline of that
    owner's requests, and a number that no other has."""

    deadline: float
    number: int


@dataclass(slots=True, eq=False)
class _Flight(Generic[Payload, Result]):
    group: Hashable
    key: Hashable
    payload: Payload
    patience_s: float
    first: float
    """The earliest deadline of those who wait for it, and the latest."""
    last: float
    owner_of: dict[Future[Result], Hashable] = field(default_factory=dict)
    """Request that waits for it → its owner."""
    places: dict[Hashable, _Place] = field(default_factory=dict)
    """Owner → its place in that owner's queue."""
    begun: bool = False


@dataclass(slots=True, eq=False)
class _Queue(Generic[Payload, Result]):
    """An owner's flights that wait, by group, each in the order of their deadlines; and in which
    round the next of them is due."""

    turn: int
    of_group: dict[Hashable, list[_Place]] = field(default_factory=dict)
    flights: dict[int, _Flight[Payload, Result]] = field(default_factory=dict)
    """Number of a place → its flight."""

    def head(self) -> tuple[_Place, Hashable]:
        """The first place, and its group."""
        return min((places[0], group) for group, places in self.of_group.items())

    def until(self, deadline: float) -> int:
        """How many of them have this deadline or an earlier one."""
        return sum(
            bisect_right(places, deadline, key=lambda place: place.deadline)
            for places in self.of_group.values()
        )

    def add(self, flight: _Flight[Payload, Result], place: _Place) -> None:
        insort(self.of_group.setdefault(flight.group, []), place)
        self.flights[place.number] = flight

    def remove(self, flight: _Flight[Payload, Result], place: _Place) -> None:
        places = self.of_group[flight.group]
        del places[bisect_left(places, place)], self.flights[place.number]
        if not places:
            del self.of_group[flight.group]


class _Took(NamedTuple):
    """A batch: when it ended (monotonic), its rows and its seconds."""

    at: float
    rows: int
    seconds: float


class _Pace:
    """The time of a group's batches: a line through the latest ones, ``start_s`` + rows ×
    ``row_s``; both 0 where nothing is known."""

    def __init__(self, took: Sequence[_Took] = ()) -> None:
        self.took = took
        self.most_rows = max((one.rows for one in took), default=0)
        self.start_s = self.row_s = self.least_s = 0.0
        # one alone may have opened what it needed first
        if len(took) > 1:
            self._fit(took)

    def _fit(self, took: Sequence[_Took]) -> None:
        rows = sum(one.rows for one in took) / len(took)
        seconds = sum(one.seconds for one in took) / len(took)
        spread = sum((one.rows - rows) ** 2 for one in took)
        # batches that were all alike do not show it; a small one does
        slope = (
            sum((one.rows - rows) * (one.seconds - seconds) for one in took) / spread
            if spread
            else seconds / rows
        )
        self.row_s = min(max(slope, 0.0), seconds / rows)
        self.start_s = seconds - self.row_s * rows
        self.least_s = min(self.seconds(1), *(one.seconds for one in took))
        """The least time of a row alone."""

    def seconds(self, rows: int) -> float:
        """The time of so many rows."""
        return self.start_s + rows * self.row_s

    def rows_in(self, seconds: float) -> int:
        """How many rows a batch of so many seconds may have; at least one."""
        if self.row_s <= 0.0:
            return 2**31 if self.start_s <= seconds else 1
        return max(1, int((seconds - self.start_s) / self.row_s * (1 + 1e-9)))


_UNKNOWN = _Pace()


class MicroBatcher(Generic[Payload, Result]):
    """Runs ``run(group, payloads)`` in its own thread, for payloads of a group that wait.

    Args:
        run: returns one result or exception per payload, in order; if it raises, all of its callers
            get that.
        refuse: makes the exception for a request that was shed or missed its deadline.
        max_queue: most waiting requests of one owner.
        max_batch: most payloads in one call.
        clock: monotonic seconds; tests pass their own.
    """

    def __init__(
        self,
        run: Callable[[Hashable, Sequence[Payload]], Sequence[Result | Exception]],
        refuse: Callable[[Refusal], Exception],
        *,
        max_queue: int = 1024,
        max_batch: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._refuse, self._clock = run, refuse, clock
        self._max_queue, self._max_batch = max_queue, max_batch
        self._queues: dict[Hashable, _Queue[Payload, Result]] = {}
        """Owner that waits for something → its queue."""
        self._round = 0
        self._turns: dict[Hashable, int] = {}
        """Owner → the round of its next turn, while that is in the future: an owner that sends one
        more request just as its last one is begun gains no turn by it."""
        self._seen: dict[Hashable, float] = {}
        """When each owner last sent a request."""
        self._numbers = itertools.count()
        self._paces: dict[Hashable, _Pace] = {}
        """Group → the pace of its latest batches."""
        self._busy_until = 0.0
        """When the batch that runs is done, as far as is known."""
        self._flights: dict[tuple[Hashable, Hashable], _Flight[Payload, Result]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="microbatch", daemon=True)
        self._thread.start()

    def submit(
        self,
        group: Hashable,
        key: Hashable,
        payload: Payload,
        deadline: float,
        owner: Hashable = None,
        patience_s: float = math.inf,
    ) -> Future[Result]:
        """As :meth:`submit_all`, one request."""
        return self.submit_all([Wanted(group, key, payload)], deadline, owner, patience_s)[0]

    def submit_all(
        self,
        wanted: Sequence[Wanted[Payload]],
        deadline: float,
        owner: Hashable = None,
        patience_s: float = math.inf,
    ) -> list[Future[Result]]:
        """Request results, a future each. A flight whose futures are all cancelled is not begun.

        What cannot be done by the deadline, at the measured pace and beside the other requests, is
        refused at once: as ``deadline`` where it could not even be done alone, else as ``shed``.

        Args:
            wanted: in the order of the futures.
            deadline: of the clock (:func:`time.monotonic`): the results are of no use after it.
            owner: the client that they are for.
            patience_s: the usual deadline of such requests, for those that may come.
        """
        futures: list[Future[Result]] = [Future() for _ in wanted]
        joined: list[tuple[_Flight[Payload, Result], Future[Result]]] = []
        refused: list[tuple[Future[Result], Refusal]] = []
        with self._changed:
            now, room = self._clock(), dict[Hashable, int]()
            if owner:
                self._seen[owner] = now
            for (group, key, payload), future in zip(wanted, futures, strict=True):
                flight = self._flights.get((group, key))
                if flight is None:
                    if group not in room:
                        room[group] = self._room(group, deadline, owner, now)
                    if room[group] <= 0:
                        refused.append((future, "deadline" if room[group] < 0 else "shed"))
                        continue
                    room[group] -= 1
                    flight = self._flights[group, key] = _Flight(
                        group, key, payload, patience_s, deadline, deadline
                    )
                self._join(flight, future, deadline, owner)
                joined.append((flight, future))
            self._changed.notify()
        for future, why in refused:
            future.set_exception(self._refuse(why))
        for flight, future in joined:
            future.add_done_callback(partial(self._left, flight))
        return futures

    def close(self) -> None:
        """Refuse what waits, let the running batch end, stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # ---- the queues; the lock is held

    def _room(self, group: Hashable, deadline: float, owner: Hashable, now: float) -> int:
        """How many more requests of an owner can be done by their deadline; below 0, none could
        even if nothing else waited."""
        own = self._queues.get(owner)
        free = 0 if self._closed else self._max_queue - (0 if own is None else len(own.flights))
        pace = self._pace(group, now)
        if deadline < now + pace.least_s:
            return -1
        # rows that were all alone do not show what they take together
        rows = (
            self._max_batch
            if pace.most_rows == 1
            else min(self._max_batch, self._most_of_one(pace, now))
        )
        row_s = pace.seconds(1 if pace.most_rows == 1 else rows) / rows
        if row_s <= 0.0:
            return free
        can_be_done = (deadline - max(now, self._busy_until)) / row_s
        others = [len(queue.flights) for other, queue in self._queues.items() if other != owner]
        # between two rows of this owner each other owner has a turn
        own_share = bisect_right(
            range(1, self._max_queue + 1),
            can_be_done,
            key=lambda mine: mine + sum(min(mine, n) for n in others),
        )
        before = 0 if own is None else own.until(deadline)
        return max(0, min(free, own_share - before))

    def _join(
        self,
        flight: _Flight[Payload, Result],
        future: Future[Result],
        deadline: float,
        owner: Hashable,
    ) -> None:
        flight.first, flight.last = min(flight.first, deadline), max(flight.last, deadline)
        flight.owner_of[future] = owner
        place = flight.places.get(owner)
        if flight.begun or (place is not None and place.deadline <= deadline):
            return
        if place is not None:
            self._remove(flight, owner)
        queue = self._queues.get(owner)
        if queue is None:
            queue = self._queues[owner] = _Queue(max(self._round, self._turns.get(owner, 0)))
        flight.places[owner] = place = _Place(deadline, next(self._numbers))
        queue.add(flight, place)

    def _remove(self, flight: _Flight[Payload, Result], owner: Hashable) -> None:
        queue = self._queues[owner]
        queue.remove(flight, flight.places.pop(owner))
        if not queue.flights:
            del self._queues[owner]

    def _take(self, flight: _Flight[Payload, Result]) -> None:
        flight.begun = True
        for owner in list(flight.places):
            self._remove(flight, owner)

    def _left(self, flight: _Flight[Payload, Result], future: Future[Result]) -> None:
        if not future.cancelled():
            return
        with self._changed:
            owner = flight.owner_of.pop(future, None)
            if flight.begun:
                return
            if not flight.owner_of:
                self._take(flight)
                del self._flights[flight.group, flight.key]
            elif owner not in flight.owner_of.values():
                self._remove(flight, owner)

    # ---- the next batch; the lock is held

    def _next_batch(self) -> list[_Flight[Payload, Result]]:
        """The most urgent flight of the owner whose turn it is, with others of its group."""
        now = self._clock()
        _, _, group = min((queue.turn, *queue.head()) for queue in self._queues.values())
        pace = self._pace(group, now)
        due, late = self._due(group, pace, now)
        batch = due[: self._cut([flight for flight, _, _ in due], pace, now)]
        for flight, owner, turn in batch:
            self._round = max(self._round, turn)
            self._turns[owner] = turn + 1
            if owner in self._queues:
                self._queues[owner].turn = turn + 1
            self._take(flight)
        self._turns = {owner: turn for owner, turn in self._turns.items() if turn > self._round}
        self._busy_until = now + (pace.seconds(len(batch)) if batch else 0.0)
        for flight in late:
            self._take(flight)
        for flight in late:
            # an owner that gets an answer may send the next request at once
            self._land(flight, self._refuse("deadline"))
        return [flight for flight, _, _ in batch]

    def _due(
        self, group: Hashable, pace: _Pace, now: float
    ) -> tuple[
        list[tuple[_Flight[Payload, Result], Hashable, int]], list[_Flight[Payload, Result]]
    ]:
        """The next flights of a group, at most ``max_batch``, each with the owner whose turn it is
        and the round; and those that are too late."""
        heap = [
            (queue.turn, queue.of_group[group][0], owner, 0)
            for owner, queue in self._queues.items()
            if group in queue.of_group
        ]
        heapq.heapify(heap)
        due: dict[_Flight[Payload, Result], tuple[Hashable, int]] = {}
        late: dict[_Flight[Payload, Result], None] = {}
        more_of_one = self._most_of_one(pace, now)
        most = min(self._max_batch, GROW_BY * max(1, pace.most_rows))
        had = set[Hashable]()
        while heap and len(due) < most:
            turn, place, owner, i = heapq.heappop(heap)
            flight = self._queues[owner].flights[place.number]
            if flight.last < now + pace.least_s:
                late[flight] = None
            elif flight not in due:
                if owner in had and len(due) >= more_of_one:
                    continue
                due[flight] = owner, turn
                had.add(owner)
                turn += 1
            places = self._queues[owner].of_group[group]
            if i + 1 < len(places):
                heapq.heappush(heap, (turn, places[i + 1], owner, i + 1))
        return [(flight, *whose) for flight, whose in due.items()], list(late)

    def _most_of_one(self, pace: _Pace, now: float) -> int:
        """How many rows a batch may have at most for that to have several of one owner."""
        if len(self._seen) > 1:
            self._seen = {owner: at for owner, at in self._seen.items() if now - at < REMEMBERED_S}
        return (
            self._max_batch if len(self._seen) <= 1 else pace.rows_in(LONE_SHARE * pace.seconds(1))
        )

    def _cut(self, due: Sequence[_Flight[Payload, Result]], pace: _Pace, now: float) -> int:
        """How many of these are begun together, so that their deadlines are met, and that of the
        next one."""
        alone_s, next_by = pace.seconds(1), math.inf
        begun = set(due)
        for queue in self._queues.values():
            for places in queue.of_group.values():
                left = next(
                    (place for place in places if queue.flights[place.number] not in begun), None
                )
                if left is not None and left.deadline >= now + 2 * alone_s:
                    next_by = min(next_by, left.deadline)
        retained: list[float] = []
        for flight in due:
            done_by = flight.first if flight.first >= now + alone_s else flight.last
            others_s = max(PATIENCE_SHARE * flight.patience_s, LONE_SHARE * alone_s)
            retained.append(min(done_by, now + others_s, *retained[-1:]))
        for rows in range(len(due), 1, -1):
            done_at = now + pace.seconds(rows)
            if done_at <= retained[rows - 1] and done_at + alone_s <= next_by:
                return rows
            if (first := due[rows - 1].first) >= now + 2 * alone_s:
                next_by = min(next_by, first)
        return min(1, len(due))

    def _pace(self, group: Hashable, now: float) -> _Pace:
        pace = self._paces.get(group, _UNKNOWN)
        return pace if pace is _UNKNOWN or now - pace.took[-1].at < REMEMBERED_S else _UNKNOWN

    # ---- the thread

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._queues and not self._closed:
                    self._changed.wait()
                if self._closed:
                    for flight in [
                        flight
                        for queue in self._queues.values()
                        for flight in queue.flights.values()
                    ]:
                        self._take(flight)
                        self._land(flight, self._refuse("shed"))
                    return
                batch = self._next_batch()
            if batch:
                self._compute(batch)

    def _compute(self, batch: list[_Flight[Payload, Result]]) -> None:
        results: Sequence[Result | Exception]
        began = self._clock()
        try:
            results = self._run(batch[0].group, [flight.payload for flight in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(results)} results for {len(batch)} requests")
        except BaseException as exc:
            # the thread must outlive any model, sys.exit() included; its callers get the error
            log.exception("fallback: a batch of %d failed", len(batch))
            results = [
                exc if isinstance(exc, Exception) else RuntimeError(f"{type(exc).__name__}: {exc}")
            ] * len(batch)
        with self._changed:
            self._busy_until = self._clock()
            for flight, result in zip(batch, results, strict=True):
                self._land(flight, result)
            self._note(batch[0].group, len(batch), began)

    def _note(self, group: Hashable, rows: int, began: float) -> None:
        now = self._busy_until
        self._paces = {
            other: pace
            for other, pace in self._paces.items()
            if now - pace.took[-1].at < REMEMBERED_S
        }
        took = [one for one in self._paces.get(group, _UNKNOWN).took if now - one.at < REMEMBERED_S]
        self._paces[group] = _Pace([*took[1 - MOST_REMEMBERED :], _Took(now, rows, now - began)])

    def _land(self, flight: _Flight[Payload, Result], result: Result | Exception) -> None:
        self._flights.pop((flight.group, flight.key), None)
        futures, flight.owner_of = list(flight.owner_of), {}
        for future in futures:
            # cancelled just now
            with contextlib.suppress(InvalidStateError):
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)


def longest_s(deadlines_s: Sequence[float], row_s: float | None) -> float:
    """How long a batch may take, by the views' deadlines and the model's own pace. Deadlines of
    requests do not count: they must not let a hang last longer, or end a model that does not hang.

    Args:
        deadlines_s: ``fallback.deadline`` of each row's view.
        row_s: what the model took for a row as it was opened; None where there was none to compute.
    """
    if row_s is None:
        return max(*deadlines_s, UNKNOWN_BATCH_S)
    at_pace_s = len(deadlines_s) * row_s
    enough_s = max(sum(deadlines_s), SLOWER * at_pace_s)
    return max(*deadlines_s, min(enough_s, LONGEST_BATCH_S), LEAST_SLOWER * at_pace_s)
