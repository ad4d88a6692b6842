"""Async transport: as ``transport``, in an event loop; apart, since asyncio takes a third of the time that importing the client does."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any

import httpcore2

from precompute.store.client.address import Address
from precompute.store.client.answer_end import AnswerEnd
from precompute.store.client.attempts import Failure, Outcome
from precompute.store.client.calls import Call, Reply
from precompute.store.client.transport import ERRORS, IDLE_S, MOST_ANSWER_BYTES, MUCH_BYTES, Pooled


class _Stream(httpcore2.AsyncNetworkStream):
    """A connection of anyio's, but for two things: head and body of a request are one write, and a TLS handshake that is cancelled closes it."""

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
            # such as an alert about the client's certificate, which TLS 1.3 tells after the handshake
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
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
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
        """Whether TLS holds something that the socket does not show any more, or its end; what it was is lost, with the connection."""
        tls = self._stream.get_extra_info("ssl_object")
        try:
            return tls is not None and tls.read(1) is not None
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError:
            return True


class _Network(httpcore2.AnyIOBackend):
    """Connects as anyio does."""

    async def connect_tcp(self, *args: Any, **options: Any) -> _Stream:
        return _Stream(await super().connect_tcp(*args, **options))

    async def connect_unix_socket(self, *args: Any, **options: Any) -> _Stream:
        return _Stream(await super().connect_unix_socket(*args, **options))


class AsyncTransport(Pooled):
    """Sends in one event loop."""

    def __init__(
        self, address: Address, token: str | Callable[[], str] | None, connections: int, tls: ssl.SSLContext | None
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
        """As :meth:`BlockingTransport.send`; a task that is cancelled meanwhile gives its connection back."""
        method, url, headers = self.request(call)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                async with self._pool.stream(method, url, headers=headers, content=call.body) as response:
                    content, size = list[bytes](), 0
                    async for part in response.aiter_stream():
                        content.append(part)
                        size += len(part)
                        if size > MOST_ANSWER_BYTES:
                            return self.too_large()
                    reply, wrong = call.checked(Reply(response.status, response.headers, b"".join(content)))
                    if wrong is not None:
                        await response.extensions["network_stream"].aclose()
                        return Failure(wrong, lost=True)
                    return reply
        except (*ERRORS, TimeoutError) as exc:
            return self.failure(exc)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()
