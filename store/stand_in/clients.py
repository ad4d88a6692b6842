"""Clients: the blocking one and the async one, with the stand-in's application where their
connections would be; all else of them is as it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from precompute.store.client.async_client import AsyncClient, AsyncTransport
from precompute.store.client.attempts import Failure, Outcome, address_of
from precompute.store.client.blocking_client import Client
from precompute.store.client.calls import Call, Reply
from precompute.store.client.transport import ERRORS, BlockingTransport, Exchange

URL = "http://stand-in.test"

Serve = Callable[[Call[Any], list[tuple[bytes, bytes]]], "Future[Outcome]"]
"""Begins to answer a request with these headers."""
App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]],
    Awaitable[None],
]

_LOOK_S = 0.02
"""How often it is looked whether a request was given up."""


class StandInClient(Client):
    """A :class:`precompute.Client` that a stand-in answers; ``options`` are those of the client."""

    def __init__(self, serve: Serve, timeout_s: float = 10.0, **options: Any) -> None:
        super().__init__(URL, timeout_s, **options)
        self._transport.close()
        self._transport = _Blocking(serve, options.get("token"))


class StandInAsyncClient(AsyncClient):
    """A :class:`precompute.AsyncClient` that a stand-in answers; ``options`` are those of the
    client."""

    def __init__(self, serve: Serve, timeout_s: float = 10.0, **options: Any) -> None:
        super().__init__(URL, timeout_s, **options)
        self._transport = _Async(serve, options.get("token"))


class _Blocking(BlockingTransport):
    def __init__(self, serve: Serve, token: Any) -> None:
        super().__init__(address_of(URL), token, 1, None)
        self._serve = serve

    def send(self, call: Call[Any], exchange: Exchange) -> Outcome:
        answer = self._serve(call, self.request(call)[2])
        try:
            while True:
                left_s = exchange.left_s()
                try:
                    return _checked(call, answer.result(min(left_s, _LOOK_S)))
                except NotYet:
                    continue
        except ERRORS as exc:
            return self.failure(exc)
        finally:
            answer.cancel()


class _Async(AsyncTransport):
    def __init__(self, serve: Serve, token: Any) -> None:
        super().__init__(address_of(URL), token, 1, None)
        self._serve = serve

    async def send(self, call: Call[Any], deadline: float) -> Outcome:
        answer = self._serve(call, self.request(call)[2])
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return _checked(call, await asyncio.wrap_future(answer))
        except TimeoutError as exc:
            return self.failure(exc)


def _checked(call: Call[Any], outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failure):
        return outcome
    reply, wrong = call.checked(outcome)
    return reply if wrong is None else Failure(wrong, lost=True)


async def exchanged(app: App, call: Call[Any], headers: list[tuple[bytes, bytes]]) -> Reply:
    """One request of an ASGI application, as a server hands it over."""
    path, _, query = call.path.partition("?")
    scope: dict[str, Any] = {
        "type": "http",
        "method": call.method.decode(),
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.lower(), value) for name, value in headers],
    }
    unread = [{"type": "http.request", "body": call.body or b"", "more_body": False}]
    messages = list[Any]()

    async def receive() -> Any:
        if unread:
            return unread.pop()
        # it never hangs up; a task that waits for it is cancelled
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        messages.append(message)

    await app(scope, receive, send)
    start, *parts = messages
    return Reply(
        start["status"], start["headers"], b"".join(bytes(part.get("body", b"")) for part in parts)
    )
