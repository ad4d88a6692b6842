"""Pools: bounded places for what waits, a pool for each kind: threads, and requests that wait for a
model; and what all routes share."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from precompute.store.answers.answer import Answer
from precompute.store.answers.fallback import CLIENT, places
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import PrecomputeError, RequestError
from precompute.store.http.encoding.answer_bodies import MAX_ANSWER_BYTES, Measure, Room
from precompute.store.http.encoding.caching import Headers
from precompute.store.http.messages import (
    Disconnected,
    Receive,
    Reply,
    Stream,
    Timing,
    hung_up,
    log_failure,
    refusal,
)
from precompute.store.http.metrics import LiveViews, Metrics
from precompute.store.http.telemetry.instruments import Meter
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason

_P = ParamSpec("_P")
_T = TypeVar("_T")

_READERS, _WAITING = 40, 256
"""Threads that wait for a store over a network; and calls of a kind that wait for a thread: more
would not be answered in time."""
_SEARCHERS = 8
"""Threads for searches and the model behind them. Neither kind waits for the other."""

MOST_WAITING = 666
"""Default of how many requests may wait for models: two thirds of the connections that a server
allows, 500 of them of one client."""


class Pool:
    """Threads for one kind of call.

    Args:
        name: of the kind, for people and programs.
        threads: that run at once.
        waiting: calls that may wait for one; further ones are refused at once.
    """

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self.name = name
        self._most, self._waiting, self._most_waiting = threads + waiting, 0, waiting
        self._free = asyncio.Semaphore(threads)
        """Callers wait here and not for the threads, which would hold whatever was given up
        meanwhile."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The call's result, or what it raised; a caller who gave up leaves its place at once, or
        when the thread is through.

        Raises:
            RequestError: 503, too many are waiting, or the system has no thread.
        """
        if self._free.locked() and self._waiting >= self._most_waiting:
            raise RequestError(
                f"{self._most} {self.name} calls are in hand already; try again",
                status=503,
                code="busy",
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        loop = asyncio.get_running_loop()
        # which request it is for, where that is traced
        call = [partial(copy_context().run, partial(function, *args, **kwargs))]
        try:
            future = self._threads.submit(lambda: call.pop()())
        except RuntimeError as exc:
            # the system has no room for a thread; but it stands in their queue, to be run by the
            # next one that there is room for
            call.clear()
            self._free.release()
            log_failure(self.name, str(exc))
            raise RequestError(
                "no thread can be started now; try again", status=503, code="busy"
            ) from exc

        def left(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._free.release)

        future.add_done_callback(left)
        return await asyncio.wrap_future(future)


class Waits:
    """The requests of a worker that wait for models, ``most`` of them at once, each client with its
    share of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[asyncio.Future[bool], float] = {}
        """Request that waits → its deadline (monotonic)."""
        self._of_client: Counter[str] = Counter()

    def until(self) -> float:
        """When the last of them will have an answer (:func:`time.monotonic`); minus infinity where
        none waits."""
        return max(self._waiting.values(), default=-math.inf)

    async def landed(self, answer: Answer, receive: Receive) -> None:
        """Wait for an answer's rows in flight, at most until its deadline, without blocking the
        loop; what is not done then is missing. Where too many wait, it is so at once.

        Raises:
            Disconnected: the caller hung up, and the rows are given up.
        """
        if not answer.pending:
            return
        client = CLIENT.get()
        if not places(self._most - len(self._waiting), self._of_client[client]):
            give_up(answer)
            answer.settle(Reason.SHED)
            return
        began, loop = time.perf_counter(), asyncio.get_running_loop()
        over: asyncio.Future[bool] = loop.create_future()
        left = len(answer.pending)

        def end(is_there: bool) -> None:
            if not over.done():
                over.set_result(is_there)

        def one_done() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                end(True)

        def landed(_: Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(one_done)

        for future in answer.pending.values():
            future.add_done_callback(landed)
        patience = loop.call_later(max(0.0, answer.deadline - time.monotonic()), end, True)
        watch = loop.create_task(hung_up(receive))
        watch.add_done_callback(lambda _: end(False))
        self._waiting[over] = answer.deadline
        self._of_client[client] += 1
        try:
            is_there = await over
        finally:
            del self._waiting[over]
            self._of_client[client] -= 1
            if not self._of_client[client]:
                del self._of_client[client]
            patience.cancel()
            watch.cancel()
        if not is_there:
            give_up(answer)
            raise Disconnected
        answer.settle()
        answer.wait_s += time.perf_counter() - began

    async def all_landed(
        self,
        answers: Sequence[Answer | None],
        receive: Receive,
        failed: Callable[[int, PrecomputeError], None],
    ) -> None:
        """:meth:`landed` of each of the answers to one request, whose deadlines run side by side;
        ``failed`` is called with the number of one that fails.

        Raises:
            Disconnected: the caller hung up, and the rows of all are given up.
        """
        for number, answer in enumerate(answers):
            if answer is None:
                continue
            try:
                await self.landed(answer, receive)
            except PrecomputeError as exc:
                failed(number, exc)
            except Disconnected:
                for other in answers:
                    if other is not None:
                        give_up(other)
                raise


def give_up(answer: Answer) -> None:
    """Give up an answer's rows in flight."""
    for future in answer.pending.values():
        future.cancel()


class Serving:
    """What all routes of an application share.

    Args:
        lookup: answers everything.
        meter: what is counted with; by default one of this application's own.
        fallback_ready: whether a view's model answers its misses now.
        answer_bytes: of one answer at most.
        timing: where the times of answers are reported.
        waiting: requests that may wait for models at once; what others miss is shed: a hit finds a
            connection, however slow a model is.
    """

    def __init__(
        self,
        lookup: Lookup,
        meter: Meter | None = None,
        fallback_ready: Callable[[Pointer], bool] = lambda _: False,
        answer_bytes: int = MAX_ANSWER_BYTES,
        timing: Timing = Timing.UNREPORTED,
        waiting: int = MOST_WAITING,
    ) -> None:
        self.lookup, self.fallback_ready = lookup, fallback_ready
        self.answer_bytes, self.timing = answer_bytes, timing
        self.views = LiveViews(lookup)
        self.metrics = Metrics(lookup, meter, self.views, fallback_ready)
        self.readers = Pool("read", _READERS, _WAITING) if lookup.online.blocking else None
        """Threads for a store that is waited for; None where reading takes no longer than to hand
        it over."""
        self.searchers, self.waits = Pool("search", _SEARCHERS, _WAITING), Waits(waiting)
        self._room = Room(answer_bytes)

    async def read(self, function: Callable[[], _T]) -> _T:
        """The result of what reads the store, by a thread where that is waited for."""
        return function() if self.readers is None else await self.readers.run(function)

    def refused(self, exc: Exception, where: str) -> Reply:
        """An exception as a problem, which is counted; ``where`` is for the log."""
        reply, code = refusal(exc, where)
        self.metrics.refused(code)
        return reply

    def reply(self, headers: Headers, pieces: Iterator[bytes | memoryview], size: Measure) -> Reply:
        """An answer that is made of pieces: while it is sent, where it is large.

        Raises:
            RequestError: 503, other large answers take all the memory there is for them.
        """
        if not size.is_large:
            return Reply(200, headers, list(pieces))
        self._room.take(size.total)
        return Reply(200, headers, Stream(pieces, partial(self._room.give, size.total)))
