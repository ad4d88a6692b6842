"""Pools: bounded places for what waits, a pool for each kind: threads, and requests that wait for a
model."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from precompute.store.answers.answer import Answer
from precompute.store.answers.fallback import CLIENT, places
from precompute.store.errors import PrecomputeError, RequestError
from precompute.store.http.request import Disconnected, Receive, hung_up
from precompute.store.times import Reason

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Pool:
    """Threads for one kind of call.

    Args:
        name: of the kind, for people and programs.
        threads: that run at once.
        waiting: calls that may wait for one; further ones are refused at once.
    """

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self.name = name
        self._most, self._free, self._most_waiting = threads + waiting, threads, waiting
        self._turns: dict[asyncio.Future[None], None] = {}
        """Futures of those that wait, in the order in which they came. They wait here and not for
        the threads, which would hold whatever was given up meanwhile."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The call's result, or what it raised; a caller who gave up leaves its place at once, or
        when the thread is through.

        Raises:
            RequestError: 503, too many are waiting.
        """
        loop = asyncio.get_running_loop()
        if self._free:
            self._free -= 1
        elif len(self._turns) >= self._most_waiting:
            raise RequestError(
                f"{self._most} {self.name} calls are in hand already; try again",
                status=503,
                code="busy",
            )
        else:
            await self._turn(loop.create_future())
        try:
            # which request it is for, where that is traced
            future = self._threads.submit(copy_context().run, partial(function, *args, **kwargs))
        except RuntimeError:
            # the system has no room for a thread
            self._next()
            raise

        def left(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._next)

        future.add_done_callback(left)
        return await asyncio.wrap_future(future)

    async def _turn(self, turn: asyncio.Future[None]) -> None:
        self._turns[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            self._turns.pop(turn, None)
            if not turn.cancelled():
                # it came just now
                self._next()
            raise

    def _next(self) -> None:
        """Give a thread that is free to the next that waits."""
        while self._turns:
            turn = next(iter(self._turns))
            del self._turns[turn]
            # a task that is cancelled learns of it later
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1


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
