"""Pools: threads for what waits, each kind in a bounded pool of its own, so that none of it stands before another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

from store.errors import RequestError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Pool:
    """Threads for one kind of call.

    Args:
        name: of the kind, for people and programs.
        threads: that run at once.
        waiting: calls that may wait for one; what is beyond is refused at once.
    """

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self.name = name
        self._most, self._in_hand = threads + waiting, 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The call's result, or what it raised; a caller who gave up leaves its place when the thread is through.

        Raises:
            RequestError: 503, too many are waiting.
        """
        if self._in_hand >= self._most:
            raise RequestError(f"{self._most} {self.name} calls are in hand already; try again", status=503, code="busy")
        self._in_hand += 1
        loop = asyncio.get_running_loop()
        # which request it is for, where that is traced
        future = self._threads.submit(copy_context().run, partial(function, *args, **kwargs))

        def left(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._leave)

        future.add_done_callback(left)
        return await asyncio.wrap_future(future)

    def _leave(self) -> None:
        self._in_hand -= 1
