"""Transport: one request to an endpoint and its answer, by httpcore2: a connection for each that is in flight, used again."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpcore2

CONNECT_S = 10.0
"""A connection is there by then, or nobody is."""
IDLE_S = 30.0
"""A connection that was idle for longer is not used again: what lies between may have forgotten it without a word."""
MOST_ANSWER_BYTES = 64 * 2**20
"""Of one answer: 16 embeddings of 4,096 numbers take 2 MB as text."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class LostError(Exception):
    """No answer: refused, lost on the way, or not in time. ``sent`` is whether the request may have been read, and so may be billed."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class _Stream(httpcore2.AsyncNetworkStream):
    """A connection of anyio's, but for one thing: head and body of a request are one write, for which the other side is woken once."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream, self._unsent = stream, bytearray()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._unsent:
            unsent, self._unsent = bytes(self._unsent), bytearray()
            await self._stream.write(unsent)
        return await self._stream.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._unsent += buffer

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> _Stream:
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Network(httpcore2.AnyIOBackend):
    async def connect_tcp(self, *args: Any, **options: Any) -> _Stream:
        return _Stream(await super().connect_tcp(*args, **options))


class Transport:
    """Sends in one event loop.

    Args:
        url: scheme, host and path before those of the API.
        headers: of every request.
    """

    def __init__(self, url: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._base = httpcore2.URL(url)
        host = self._base.host + (b"" if self._base.port is None else b":%d" % self._base.port)
        self._headers = [(b"Host", host), *headers, (b"Content-Type", b"application/json"), (b"Accept", b"application/json")]
        self._tls = ssl.create_default_context() if self._base.scheme == b"https" else None
        # one connection each: one pool for all looks at every connection for every request
        self._free = list[httpcore2.AsyncConnectionPool]()
        self._all = list[httpcore2.AsyncConnectionPool]()

    async def post(self, path: str, body: bytes, timeout_s: float) -> Reply:
        """One request; as many at once as there are callers.

        Raises:
            LostError: no whole answer within the time.
        """
        to = self._base
        url = httpcore2.URL(scheme=to.scheme, host=to.host, port=to.port, target=to.target.rstrip(b"/") + path.encode())
        pool = self._free.pop() if self._free else self._made()
        try:
            async with (
                asyncio.timeout(timeout_s),
                pool.stream(
                    "POST", url, headers=self._headers, content=body, extensions={"timeout": {"connect": CONNECT_S}}
                ) as response,
            ):
                content = bytearray()
                async for part in response.aiter_stream():
                    content += part
                    if len(content) > MOST_ANSWER_BYTES:
                        raise LostError(f"an answer of more than {MOST_ANSWER_BYTES >> 20} MB", sent=True)
                headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
                return Reply(response.status, headers, bytes(content))
        except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as exc:
            raise LostError(str(exc) or "connecting timed out", sent=False) from exc
        except TimeoutError as exc:
            raise LostError(f"no answer within {timeout_s:g} s", sent=True) from exc
        except (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError, ssl.SSLError) as exc:
            raise LostError(str(exc) or type(exc).__name__, sent=True) from exc
        finally:
            self._free.append(pool)

    def _made(self) -> httpcore2.AsyncConnectionPool:
        pool = httpcore2.AsyncConnectionPool(
            ssl_context=self._tls, max_connections=1, keepalive_expiry=IDLE_S, network_backend=_Network()
        )
        self._all.append(pool)
        return pool

    async def aclose(self) -> None:
        """Close the connections."""
        for pool in self._all:
            await pool.aclose()
