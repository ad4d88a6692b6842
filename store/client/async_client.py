"""Async client: for services on asyncio or uvloop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from precompute.store.api import wire
from precompute.store.client import calls
from precompute.store.client.address import Tls, address_of
from precompute.store.client.async_transport import AsyncTransport
from precompute.store.client.attempts import Attempts, Failure, Outcome, Pause, passing
from precompute.store.client.calls import Call, FreshnessWords, LookupWords, RowWords, SearchWords, check_timeout

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class AsyncClient:
    """As :class:`precompute.store.client.Client`, for one event loop: the same arguments, calls, answers and errors, each call awaited.

    A task that is cancelled while it waits gives its connection back, and whatever it had begun ends with it.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        timeout_s: float = 10.0,
        *,
        token: str | Callable[[], str] | None = None,
        tls: Tls | None = None,
        connections: int = 64,
        retries: int = 2,
        retry_share: float = 0.1,
        hedge_share: float = 0.0,
    ) -> None:
        address = address_of(url)
        self._url, self._timeout_s = url, check_timeout(timeout_s)
        self._transport = AsyncTransport(
            address, token, connections, (tls or Tls()).context() if address.scheme == "https" else None
        )
        self._attempts = Attempts(retries, retry_share, hedge_share)

    async def get(self, view: str, keys: Iterable[Any], **words: Unpack[LookupWords]) -> pa.Table:
        """As :meth:`precompute.store.client.Client.get`."""
        return await self._ask(calls.table(view, keys, words))

    async def rows(self, view: str, keys: Iterable[Any], **words: Unpack[LookupWords]) -> wire.LookupAnswer:
        """As :meth:`precompute.store.client.Client.rows`."""
        return await self._ask(calls.rows(view, keys, words))

    async def row(self, view: str, key: Any, **words: Unpack[RowWords]) -> wire.ViewRow:
        """As :meth:`precompute.store.client.Client.row`."""
        return await self._ask(calls.row(view, key, words))

    async def several(
        self, requests: Sequence[wire.ViewLookupRequest], timeout_s: float | None = None, **words: Unpack[FreshnessWords]
    ) -> list[wire.ViewAnswer]:
        """As :meth:`precompute.store.client.Client.several`."""
        return await self._ask(calls.several(requests, timeout_s, words))

    async def search(self, view: str, **words: Unpack[SearchWords]) -> wire.SearchAnswer:
        """As :meth:`precompute.store.client.Client.search`."""
        return await self._ask(calls.search(view, words))

    async def views(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """As :meth:`precompute.store.client.Client.views`."""
        return await self._ask(calls.views(timeout_s))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _ask(self, call: Call[T]) -> T:
        deadline = call.deadline(self._timeout_s)
        with contextlib.closing(self._attempts.ask(call.kind, deadline)) as steps:
            outcome: Outcome | None = None
            while True:
                try:
                    step = steps.send(outcome)
                except StopIteration as done:
                    outcome = done.value
                    break
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    outcome = None
                elif step.hedge_after_s is None:
                    outcome = await self._transport.send(call, deadline)
                else:
                    outcome = await self._hedged(call, deadline, step.hedge_after_s)
        if isinstance(outcome, Failure):
            raise outcome.error
        assert outcome is not None
        return call.answer(outcome, self._url)

    async def _hedged(self, call: Call[T], deadline: float, after_s: float) -> Outcome:
        """The first good outcome of a request and, where that takes long, of a second one; the other is ended."""
        tasks = [asyncio.create_task(self._transport.send(call, deadline))]
        try:
            _, waiting = await asyncio.wait(tasks, timeout=after_s)
            if waiting and self._attempts.may_hedge():
                tasks.append(asyncio.create_task(self._transport.send(call, deadline)))
            outcomes, waiting = list[Outcome](), set(tasks)
            while waiting and all(map(passing, outcomes)):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                outcomes += [one.result() for one in done]
        finally:
            for task in tasks:
                task.cancel()
            # none of them outlives the call
            await asyncio.gather(*tasks, return_exceptions=True)
        return next((outcome for outcome in outcomes if not passing(outcome)), outcomes[0])
