"""Clients: the two clients over a stand-in's application, without connections, with faults that a
test configures: delays and errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import Any

from precompute.store.client.attempts import Failure, Outcome, address_of
from precompute.store.client.calls import Call
from precompute.store.client.client import AsyncClient, AsyncTransport, Client
from precompute.store.client.replies import Reply
from precompute.store.client.transport import ERRORS, BlockingTransport, Exchange
from precompute.store.errors import (
    ConfigError,
    DeadlineError,
    NoAnswerError,
    OnlineStoreError,
    OverloadedError,
    PrecomputeError,
    RequestError,
)
from precompute.store.wire import bodies


@dataclass(slots=True)
class Fault:
    """``error`` in place of the answer, or the answer so much later; the next ``times``, None for
    all; of requests of ``view``, None for all."""

    error: PrecomputeError | None = None
    delay_s: float = 0.0
    times: int | None = None
    view: str | None = None


class Faults:
    """The faults that are on order, the oldest first."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        """One more.

        Raises:
            ConfigError: no request can come to that.
        """
        if fault.error is not None:
            outcome_of(fault.error)
        if fault.times is not None and fault.times < 1:
            raise ConfigError(f"times: {fault.times}: at least 1, or None for all requests to come")
        if not fault.delay_s >= 0:
            raise ConfigError(f"a delay is a number of seconds from 0, got {fault.delay_s!r}")
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        with self._lock:
            self._faults.clear()

    def next(self, views: list[str]) -> tuple[float, PrecomputeError | None]:
        """What becomes of a request of these views: how much later its answer comes, all delays
        together, and the oldest error."""
        delay_s, error = 0.0, None
        with self._lock:
            for fault in list(self._faults):
                if (fault.view is not None and fault.view not in views) or (
                    fault.error is not None and error is not None
                ):
                    continue
                delay_s += fault.delay_s
                error = fault.error if error is None else error
                if fault.times is not None:
                    fault.times -= 1
                    if not fault.times:
                        self._faults.remove(fault)
        return delay_s, error


def outcome_of(error: PrecomputeError) -> Outcome:
    """What a request came to, for the client to raise this error: the server's refusal, or no
    answer.

    Raises:
        ConfigError: the client raises no such error.
    """
    if isinstance(error, OverloadedError):
        # as RFC 9110 has it, in whole seconds
        wait = (
            []
            if error.retry_after_s is None
            else [(b"retry-after", b"%d" % max(0, round(error.retry_after_s)))]
        )
        return _problem(503, "busy", str(error), wait)
    if isinstance(error, NoAnswerError):
        return Failure(error, final=isinstance(error, DeadlineError))
    if type(error) is OnlineStoreError:
        return _problem(503, "store_unavailable", str(error))
    if isinstance(error, RequestError):
        return _problem(error.status, error.code, str(error))
    raise ConfigError(
        f"{type(error).__name__}: the client never raises it; it raises OnlineStoreError,"
        " NoAnswerError, DeadlineError, OverloadedError, RequestError, DeniedError"
    )


def _problem(
    status: int, code: str, detail: str, headers: list[tuple[bytes, bytes]] | None = None
) -> Reply:
    body = bodies.Problem(bodies.PROBLEM_URN + code, code.replace("_", " "), status, detail)
    return Reply(
        status, [(b"content-type", bodies.PROBLEM.encode()), *(headers or [])], bodies.encode(body)
    )


# ---- Clients: the blocking one and the async one, with the stand-in's application where their
# connections would be; all else of them is as it is.


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
