"""Transport: one request to an endpoint and its answer, by asyncio and httptools, over pooled
connections.

httptools reads what the engine's server reads requests with; it takes 50 µs a request where
httpcore2's pool took 400, of the 780 there are at 64 in flight and 50 ms.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

CONNECT_S = 10.0
"""A connection is there by then, or there is no server."""
IDLE_S = 30.0
"""A connection that was idle for longer is not used again: what lies between may have forgotten it
without a word."""
MOST_ANSWER_BYTES = 64 * 2**20
"""Size of one answer at most: 16 embeddings of 4,096 numbers take 2 MB as text."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class LostError(Exception):
    """No answer: refused, lost on the way, or not in time. ``sent`` is whether the request may have
    been read, and so may be billed."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class _Connection(asyncio.Protocol):
    """One connection, and the answer that is being read from it."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.open = True
        self._transport: asyncio.Transport
        self._waiting: asyncio.Future[Reply] | None = None

    async def exchange(self, request: bytes) -> Reply:
        """Raises:
        LostError: the connection ended before the answer did, or brought no HTTP.
        """
        self._waiting = asyncio.get_running_loop().create_future()
        self._begin()
        self._transport.write(request)
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def close(self) -> None:
        """It is not used again."""
        self.open = False
        self._transport.abort()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._body = dict[str, str](), bytearray()
        self._has_head = False

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's, where a server made it the process's, inherits nothing of asyncio's
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():
            # no request is open for it: whatever comes next would be another one's too
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._lose(f"it is no HTTP: {exc}")
            return
        if len(self._body) > MOST_ANSWER_BYTES:
            self._lose(f"an answer of more than {MOST_ANSWER_BYTES >> 20} MB")

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._waiting is not None and not self._waiting.done():
            if (
                exc is None
                and self._has_head
                and not {"content-length", "transfer-encoding"} & set(self._headers)
            ):
                # without a length it lasts as long as the connection
                self._end()
            else:
                self._lose(str(exc or "the connection was closed before the end of the answer"))

    def _lose(self, reason: str) -> None:
        self.close()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(LostError(reason, sent=True))

    def _end(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(
                Reply(self._parser.get_status_code(), self._headers, bytes(self._body))
            )

    # ---- what httptools calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            # more is to come
            self._headers, self._has_head = {}, False
            return
        self.open = self.open and self._parser.should_keep_alive()
        self._end()


class Transport:
    """Sends in one event loop."""

    def __init__(self, url: str, headers: Sequence[tuple[str, str]]) -> None:
        parts = urlsplit(url)
        self._host, self._path = parts.hostname or "", parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        always = [
            ("Host", parts.netloc),
            ("Content-Type", "application/json"),
            ("Accept", "application/json"),
            # a proxy may compress by itself what nothing is said of
            ("Accept-Encoding", "identity, gzip;q=0.5, deflate;q=0.5"),
            *headers,
        ]
        self._head = "".join(f"{name}: {value}\r\n" for name, value in always)
        self._idle = list[_Connection]()

    async def post(self, path: str, body: bytes, timeout_s: float) -> Reply:
        """One request; as many at once as there are callers.

        Raises:
            LostError: no whole answer within the time.
        """
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        )
        connection = await self._connected()
        try:
            async with asyncio.timeout(timeout_s):
                reply = await connection.exchange(head.encode("latin-1") + body)
        except TimeoutError as exc:
            connection.open = False
            raise LostError(f"no answer within {timeout_s:g} s", sent=True) from exc
        except BaseException:
            connection.open = False
            raise
        finally:
            self._give_back(connection)
        return reply

    async def _connected(self) -> _Connection:
        oldest = asyncio.get_running_loop().time() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.open and connection.idle_since > oldest:
                return connection
            connection.close()
        named = None if self._tls is None else self._host
        try:
            async with asyncio.timeout(CONNECT_S):
                _, made = await asyncio.get_running_loop().create_connection(
                    _Connection, self._host, self._port, ssl=self._tls, server_hostname=named
                )
        except TimeoutError as exc:
            raise LostError(f"no connection within {CONNECT_S:g} s", sent=False) from exc
        except (OSError, UnicodeError) as exc:
            raise LostError(str(exc) or type(exc).__name__, sent=False) from exc
        return made

    def _give_back(self, connection: _Connection) -> None:
        if not connection.open:
            connection.close()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    async def aclose(self) -> None:
        """Close the connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        # the loop calls connection_lost
        await asyncio.sleep(0)
