"""Clients: the two clients: ``Client``, for threads and scripts, and ``AsyncClient``, for services
on asyncio or uvloop, over one core."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import httpcore2

from precompute.store.client import calls
from precompute.store.client.attempts import (
    Address,
    Attempts,
    Failure,
    Outcome,
    Tls,
    address_of,
)
from precompute.store.client.calls import (
    Call,
    Reply,
    check_timeout,
)
from precompute.store.client.transport import (
    ERRORS,
    IDLE_S,
    MOST_ANSWER_BYTES,
    MUCH_BYTES,
    AnswerEnd,
    BlockingTransport,
    Exchange,
    Pooled,
)
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import (
    FreshnessWords,
    LookupWords,
    RowWords,
    SearchWords,
    ServiceWords,
)

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class _Core:
    """What both clients share: where the server is, and what to do for a call until its answer is
    there. The arguments are those of :class:`Client`."""

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
    ) -> None:
        self._url, self._timeout_s, self._connections = url, check_timeout(timeout_s), connections
        address = address_of(url)
        context = (tls or Tls()).context() if address.scheme == "https" else None
        self._pool = address, token, connections, context
        """What a transport is opened with."""
        self._attempts = Attempts(retries, retry_share)
        self._open()

    def _open(self) -> None:
        raise NotImplementedError

    def _steps(self, call: Call[T], deadline: float) -> Generator[float, Outcome | None, T]:
        """How long to wait before the request is sent, to which the outcome is sent back; at last
        what the caller gets.

        Raises:
            PrecomputeError: there was no answer, or a refusal.
        """
        outcome = yield from self._attempts.steps(deadline)
        if isinstance(outcome, Failure):
            raise outcome.error
        return call.answer(outcome, self._url)


class Client(_Core):
    """Talks to one server; share it between threads, close it at the end. A process that is forked
    opens connections of its own.

    Every call has one time limit for all of it: finding the host, waiting for a connection,
    sending, the answer's last byte, and retries. All calls only read, so they may be retried: at
    once where a connection was lost, after a pause, at random, where the server refuses for now or
    cannot be reached, never before ``Retry-After``, never past the limit, and all calls together no
    more often than ``retry_share`` allows.

    Args:
        url: ``http://127.0.0.1:8080``, ``https://host`` or ``unix:./api.sock``.
        timeout_s: of a call that names none.
        token: shown to the server, without the white space around it (a file's last newline); a
            function is called before each request, for a token that changes.
        tls: whom to trust with ``https``, and who one is; the system's authorities by default.
        connections: open at once, at most; further calls wait their turn, within their time.
        retries: of one call, at most.
        retry_share: how much retries may add to all requests, as a share of the calls.

    Raises:
        RequestError: the URL is none of these, ``timeout_s`` no time limit, or the token none that
            a header can carry.
        ConfigError: a file of ``tls``.
    """

    def _open(self) -> None:
        self._transport = BlockingTransport(*self._pool)

    def get(self, view: str, keys: Iterable[Any], **words: Unpack[LookupWords]) -> pa.Table:
        """As :meth:`precompute.store.answers.lookup.Lookup.get`, over HTTP and Arrow; ``keys`` may
        be of numpy, pandas or pyarrow.

        ``.to_pandas()`` makes a DataFrame of it, and :func:`precompute.store.client.tables.arrays`
        numpy arrays.

        Raises:
            RequestError: the server refused, with its status and code.
            NoAnswerError: no answer, or none that can be read; of it DeadlineError: none in time,
                and OverloadedError: not now.
            OnlineStoreError: the server's store does not answer.
        """
        return self._call(calls.table(view, keys, words))

    def rows(
        self, view: str, keys: Iterable[Any], **words: Unpack[LookupWords]
    ) -> bodies.LookupAnswer:
        """As :meth:`get`, as typed rows in the order of the keys, without Arrow."""
        return self._call(calls.rows(view, keys, words))

    def row(self, view: str, key: Any, **words: Unpack[RowWords]) -> bodies.ViewRow:
        """One row.

        Raises:
            MissingRowError: there is none; ``code`` is the reason.
            PrecomputeError: as :meth:`get`.
        """
        return self._call(calls.row(view, key, words))

    def several(
        self,
        requests: Sequence[bodies.ViewLookupRequest],
        timeout_s: float | None = None,
        **words: Unpack[FreshnessWords],
    ) -> list[bodies.ViewAnswer]:
        """Lookups of several views in one call, answered in their order: each has its ``rows``, or
        the ``problem`` that this view has; ``words`` hold for all of them."""
        return self._call(calls.several(requests, timeout_s, words))

    def service(self, service: str, entities: Any, **words: Unpack[ServiceWords]) -> pa.Table:
        """As :meth:`precompute.store.answers.lookup.Lookup.service`, over HTTP and Arrow;
        ``entities`` are columns, as a mapping or a table has them, all of which are sent.

        Raises:
            PrecomputeError: as :meth:`get`.
        """
        return self._call(calls.service_table(service, entities, words))

    def service_rows(
        self, service: str, entities: Any, **words: Unpack[ServiceWords]
    ) -> bodies.ServiceAnswer:
        """As :meth:`service`, as typed rows in the order of the entities, without Arrow."""
        return self._call(calls.service_rows(service, entities, words))

    def search(self, view: str, **words: Unpack[SearchWords]) -> bodies.SearchAnswer:
        """As :meth:`precompute.store.answers.lookup.Lookup.search`."""
        return self._call(calls.search(view, words))

    def views(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """As :meth:`precompute.store.answers.lookup.Lookup.views`."""
        return self._call(calls.views(timeout_s))

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, call: Call[T]) -> T:
        deadline, outcome = call.deadline(self._timeout_s), None
        with contextlib.closing(self._steps(call, deadline)) as steps:
            while True:
                try:
                    pause_s = steps.send(outcome)
                except StopIteration as done:
                    return cast(T, done.value)
                if pause_s:
                    time.sleep(pause_s)
                outcome = self._transport.send(call, Exchange(deadline))


# ---- Async client: for services on asyncio or uvloop.


class _Stream(httpcore2.AsyncNetworkStream):
    """A connection of anyio's, but for two things: head and body of a request are one write, and a
    TLS handshake that is cancelled closes it."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream = stream
        self._unsent = bytearray()
        self._end = AnswerEnd()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        await self._flush()
        try:
            data = await self._stream.read(max_bytes)
            self._end.feed(data)
            return data
        except ssl.SSLError as exc:
            # such as an alert about the client's certificate, which TLS 1.3 sends after the
            # handshake
            raise httpcore2.ReadError(str(exc)) from exc

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._unsent += buffer
        if len(self._unsent) > MUCH_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        unsent, self._unsent = bytes(self._unsent), bytearray()
        if unsent:
            self._end.begin()
            try:
                await self._stream.write(unsent)
            except ssl.SSLError as exc:
                raise httpcore2.WriteError(str(exc)) from exc

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> _Stream:
        try:
            return _Stream(await self._stream.start_tls(ssl_context, server_hostname))
        except BaseException:
            await self._stream.aclose()
            raise

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable" and (not self._end.reusable or self._has_decrypted()):
            return True
        return self._stream.get_extra_info(info)

    def _has_decrypted(self) -> bool:
        """Whether TLS holds something that the socket does not show any more, or its end; what it
        was is lost, with the connection."""
        tls = self._stream.get_extra_info("ssl_object")
        try:
            return tls is not None and tls.read(1) is not None
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError:
            return True


class _Network(httpcore2.AnyIOBackend):
    async def connect_tcp(self, *args: Any, **options: Any) -> _Stream:
        return _Stream(await super().connect_tcp(*args, **options))

    async def connect_unix_socket(self, *args: Any, **options: Any) -> _Stream:
        return _Stream(await super().connect_unix_socket(*args, **options))


class AsyncTransport(Pooled):
    """Sends in one event loop."""

    def __init__(
        self,
        address: Address,
        token: str | Callable[[], str] | None,
        connections: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(address, token, connections)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=connections,
            keepalive_expiry=IDLE_S,
            uds=address.socket_path,
            network_backend=_Network(),
        )

    async def send(self, call: Call[Any], deadline: float) -> Outcome:
        """As :meth:`BlockingTransport.send`; a task that is cancelled meanwhile gives its
        connection back."""
        method, url, headers = self.request(call)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                async with self._pool.stream(
                    method, url, headers=headers, content=call.body
                ) as response:
                    content, size = list[bytes](), 0
                    async for part in response.aiter_stream():
                        content.append(part)
                        size += len(part)
                        if size > MOST_ANSWER_BYTES:
                            return self.too_large()
                    reply, wrong = call.checked(
                        Reply(response.status, response.headers, b"".join(content))
                    )
                    if wrong is not None:
                        await response.extensions["network_stream"].aclose()
                        return Failure(wrong, lost=True)
                    return reply
        except (*ERRORS, TimeoutError) as exc:
            return self.failure(exc)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()


class AsyncClient(_Core):
    """As :class:`precompute.store.client.Client`, for one event loop: the same arguments, calls,
    answers and errors, each call awaited.

    A task that is cancelled while it waits gives its connection back, and whatever it had begun
    ends with it.
    """

    def _open(self) -> None:
        self._transport = AsyncTransport(*self._pool)

    async def get(self, view: str, keys: Iterable[Any], **words: Unpack[LookupWords]) -> pa.Table:
        """As :meth:`precompute.store.client.Client.get`."""
        return await self._call(calls.table(view, keys, words))

    async def rows(
        self, view: str, keys: Iterable[Any], **words: Unpack[LookupWords]
    ) -> bodies.LookupAnswer:
        """As :meth:`precompute.store.client.Client.rows`."""
        return await self._call(calls.rows(view, keys, words))

    async def row(self, view: str, key: Any, **words: Unpack[RowWords]) -> bodies.ViewRow:
        """As :meth:`precompute.store.client.Client.row`."""
        return await self._call(calls.row(view, key, words))

    async def several(
        self,
        requests: Sequence[bodies.ViewLookupRequest],
        timeout_s: float | None = None,
        **words: Unpack[FreshnessWords],
    ) -> list[bodies.ViewAnswer]:
        """As :meth:`precompute.store.client.Client.several`."""
        return await self._call(calls.several(requests, timeout_s, words))

    async def service(self, service: str, entities: Any, **words: Unpack[ServiceWords]) -> pa.Table:
        """As :meth:`precompute.store.client.Client.service`."""
        return await self._call(calls.service_table(service, entities, words))

    async def service_rows(
        self, service: str, entities: Any, **words: Unpack[ServiceWords]
    ) -> bodies.ServiceAnswer:
        """As :meth:`precompute.store.client.Client.service_rows`."""
        return await self._call(calls.service_rows(service, entities, words))

    async def search(self, view: str, **words: Unpack[SearchWords]) -> bodies.SearchAnswer:
        """As :meth:`precompute.store.client.Client.search`."""
        return await self._call(calls.search(view, words))

    async def views(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """As :meth:`precompute.store.client.Client.views`."""
        return await self._call(calls.views(timeout_s))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _call(self, call: Call[T]) -> T:
        deadline, outcome = call.deadline(self._timeout_s), None
        with contextlib.closing(self._steps(call, deadline)) as steps:
            while True:
                try:
                    pause_s = steps.send(outcome)
                except StopIteration as done:
                    return cast(T, done.value)
                if pause_s:
                    await asyncio.sleep(pause_s)
                outcome = await self._transport.send(call, deadline)
