"""Async transport: as ``transport``, in an event loop; apart, since asyncio takes a third of the time that importing the client does."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any

import httpcore2

from store.client.address import Address
from store.client.attempts import Outcome
from store.client.calls import Call, Reply
from store.client.transport import ERRORS, IDLE_S, MOST_ANSWER_BYTES, Pooled


class AsyncTransport(Pooled):
    """Sends in one event loop."""

    def __init__(
        self, address: Address, token: str | Callable[[], str] | None, connections: int, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(address, token, connections)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=tls, max_connections=connections, keepalive_expiry=IDLE_S, uds=address.socket_path
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
                return Reply(response.status, response.headers, b"".join(content))
        except (*ERRORS, TimeoutError) as exc:
            return self.failure(exc)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()
