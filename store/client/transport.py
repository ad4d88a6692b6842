"""Transport: one request over a pool of connections, within one deadline for all of it."""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Any

import httpcore2

from precompute.store.client.attempts import Address, Failure, Outcome
from precompute.store.client.calls import Call, Reply
from precompute.store.errors import DeadlineError, NoAnswerError, RequestError


class AnswerEnd:
    """Follows the bytes of one connection, answer by answer, through HTTP/1.1's framing (RFC 9112
    §6): httpcore2 leaves what it read beyond an answer to the next one, silently. 2 µs an
    answer."""

    def __init__(self) -> None:
        self._unread = b""
        self._reader: Generator[None] | None = None

    def begin(self) -> None:
        """A request is sent; its answer is next."""
        self._reader = self._answer()
        next(self._reader)

    def feed(self, data: bytes) -> None:
        """What was read."""
        self._unread += data
        if self._reader is not None:
            try:
                self._reader.send(None)
            except StopIteration:
                self._reader = None
            except (ValueError, IndexError):
                # no HTTP, which httpcore2 refuses: it has no end
                self._reader = self._skip(2**62)
                next(self._reader)

    @property
    def reusable(self) -> bool:
        """Whether the last answer has come to its end, and nothing came behind it."""
        return self._reader is None and not self._unread

    def _answer(self) -> Generator[None]:
        yield
        status = 100
        while 100 <= status < 200:
            lines = (yield from self._until(b"\r\n\r\n")).split(b"\r\n")
            status = int(lines[0].split(b" ", 2)[1])
        fields = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in lines[1:])
        }
        if status in (204, 304):
            return
        if b"chunked" in fields.get(b"transfer-encoding", b""):
            while size := int((yield from self._until(b"\r\n")).partition(b";")[0], 16):
                yield from self._skip(size + 2)
            while (yield from self._until(b"\r\n")):
                pass
        else:
            # without a length it lasts as long as the connection
            yield from self._skip(int(fields.get(b"content-length", 2**62)))

    def _until(self, end: bytes) -> Generator[None, None, bytes]:
        while (at := self._unread.find(end)) < 0:
            yield
        found, self._unread = self._unread[:at], self._unread[at + len(end) :]
        return found

    def _skip(self, size: int) -> Generator[None]:
        while size > len(self._unread):
            size -= len(self._unread)
            self._unread = b""
            yield
        self._unread = self._unread[size:]


IDLE_S = 30.0
"""A connection that was idle for longer is not used again: what lies between may have forgotten it
without a word."""

MOST_ANSWER_BYTES = 256 * 2**20
"""Size of one answer at most: a larger one is none of this API."""


MUCH_BYTES = 64 * 1024
"""Size from which a request is sent in pieces."""


class Exchange:
    """One request on its way: when it must be over.

    It travels through httpcore2 in place of a timeout, which would count again for each read: a
    server that sends a byte now and then could hold a caller for ever.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def left_s(self) -> float:
        """Seconds until the deadline, by ``time.monotonic``.

        Raises:
            httpcore2.TimeoutException: none.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise httpcore2.TimeoutException("the time is over")
        return left

    def on(self, connection: socket.socket) -> float:
        """Use this connection now, for at most so many seconds."""
        left = self.left_s()
        connection.settimeout(left)
        return left


class _Stream(httpcore2.NetworkStream):
    """A connected socket; every ``timeout`` is an :class:`Exchange`.

    What is written waits until it is much or something is read: httpcore2 hands over head and body
    apart, and the server would be woken for each.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unsent = bytearray()
        self._end = AnswerEnd()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def read(self, max_bytes: int, timeout: Any = None) -> bytes:
        self._flush(timeout)
        try:
            timeout.on(self._socket)
            data = self._socket.recv(max_bytes)
            self._end.feed(data)
            return data
        except TimeoutError as exc:
            raise httpcore2.ReadTimeout("while waiting for the answer") from exc
        except OSError as exc:
            raise httpcore2.ReadError(str(exc)) from exc

    def write(self, buffer: bytes, timeout: Any = None) -> None:
        self._unsent += buffer
        if len(self._unsent) > MUCH_BYTES:
            self._flush(timeout)

    def _flush(self, timeout: Any) -> None:
        unsent, self._unsent = memoryview(bytes(self._unsent)), bytearray()
        if unsent:
            self._end.begin()
        try:
            while unsent:
                timeout.on(self._socket)
                unsent = unsent[self._socket.send(unsent) :]
        except TimeoutError as exc:
            raise httpcore2.WriteTimeout("while sending the request") from exc
        except OSError as exc:
            raise httpcore2.WriteError(str(exc)) from exc

    def close(self) -> None:
        self._socket.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: Any = None
    ) -> _Stream:
        try:
            # it takes the socket over; the handshake has one timeout as a whole
            self._socket = over = ssl_context.wrap_socket(
                self._socket, server_hostname=server_hostname, do_handshake_on_connect=False
            )
            timeout.on(over)
            over.do_handshake()
            return _Stream(over)
        except BaseException as exc:
            self._socket.close()
            if isinstance(exc, TimeoutError):
                raise httpcore2.ConnectTimeout("during the TLS handshake") from exc
            if isinstance(exc, (OSError, ValueError)):
                raise httpcore2.ConnectError(str(exc)) from exc
            raise

    def get_extra_info(self, info: str) -> Any:
        if info == "ssl_object":
            return self._socket if isinstance(self._socket, ssl.SSLSocket) else None
        if info == "is_readable":
            # of an idle connection: it was closed by the other side, or sent bytes of no answer
            if self._socket.fileno() < 0 or not self._end.reusable or self._poll.poll(0):
                return True
            return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0
        return None


class _Network(httpcore2.NetworkBackend):
    """Connects within an :class:`Exchange`, finding the host's address included, which has no
    timeout of its own."""

    def __init__(self) -> None:
        self._resolving: dict[tuple[str, int], Future[list[Any]]] = {}
        self._lock = threading.Lock()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: Any = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> _Stream:
        addresses = self._addresses(host, port, timeout)
        for i, (family, address) in enumerate(addresses):
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                # one that never answers leaves the others their share of the time
                connection.settimeout(timeout.on(connection) / (len(addresses) - i))
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return _Stream(connection)
            except BaseException as exc:
                connection.close()
                if not isinstance(exc, OSError):
                    raise
                if i + 1 == len(addresses):
                    raise httpcore2.ConnectError(str(exc) or "timed out") from exc
        raise httpcore2.ConnectError(f"{host} has no address")

    def connect_unix_socket(
        self, path: str, timeout: Any = None, socket_options: Iterable[Any] | None = None
    ) -> _Stream:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            timeout.on(connection)
            connection.connect(path)
        except BaseException as exc:
            connection.close()
            if isinstance(exc, OSError):
                raise httpcore2.ConnectError(str(exc) or "timed out") from exc
            raise
        return _Stream(connection)

    def _addresses(
        self, host: str, port: int, exchange: Exchange
    ) -> list[tuple[socket.AddressFamily, Any]]:
        """Where a host listens. Resolved in a thread of its own, one for all who want to know: the
        system's resolver cannot be given a deadline."""
        with self._lock:
            lookup = self._resolving.get((host, port))
            if lookup is None:
                lookup = Future()
                thread = threading.Thread(
                    target=self._resolve,
                    args=(host, port, lookup),
                    daemon=True,
                    name="precompute-resolve",
                )
                try:
                    thread.start()
                except RuntimeError as exc:
                    # the system has no room for a thread
                    raise httpcore2.ConnectError(str(exc)) from exc
                # once it runs: what nobody resolves would be waited for by all calls from now on
                self._resolving[host, port] = lookup
        try:
            found = lookup.result(exchange.left_s())
        except TimeoutError as exc:
            raise httpcore2.ConnectTimeout(f"while looking up {host}") from exc
        except OSError as exc:
            raise httpcore2.ConnectError(str(exc)) from exc
        return [(family, address) for family, _, _, _, address in found]

    def _resolve(self, host: str, port: int, lookup: Future[list[Any]]) -> None:
        try:
            lookup.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except BaseException as exc:
            lookup.set_exception(exc)
        finally:
            with self._lock:
                del self._resolving[host, port]


def _bearer(token: str) -> bytes:
    """What shows a token, without the white space around it, such as the last newline of the file
    it was read from.

    Raises:
        RequestError: not of visible ASCII characters; nothing of the token is in the message,
            since messages are logged.
    """
    shown = token.strip() if isinstance(token, str) else ""
    if not shown or not shown.isascii() or not shown.isprintable():
        raise RequestError(
            "a token is one line of visible ASCII characters, and the one given is not (it is not"
            " shown here)"
        )
    return b"Bearer " + shown.encode()


class Pooled:
    """What the blocking transport and the async one have in common: how a request is written, and
    what an error means."""

    def __init__(
        self, address: Address, token: str | Callable[[], str] | None, connections: int
    ) -> None:
        self._address, self._connections = address, connections
        self._token = _bearer(token) if isinstance(token, str) else token

    def request(self, call: Call[Any]) -> tuple[bytes, httpcore2.URL, list[tuple[bytes, bytes]]]:
        to = self._address
        url = httpcore2.URL(
            scheme=to.scheme, host=to.host, port=to.port, target=to.prefix + call.path
        )
        headers = [(b"Host", to.host_header), (b"Accept", call.accept.encode()), *call.headers]
        if self._token is not None:
            bearer = self._token if isinstance(self._token, bytes) else _bearer(self._token())
            headers.append((b"Authorization", bearer))
        if call.body is not None:
            headers.append((b"Content-Type", b"application/json"))
        return call.method, url, headers

    def failure(self, exc: Exception) -> Failure:
        where = self._address.text
        reason = str(exc) or (
            "the time is over" if isinstance(exc, TimeoutError) else type(exc).__name__
        )
        if isinstance(exc, httpcore2.PoolTimeout):
            reason = f"all {self._connections} connections were busy"
        if isinstance(exc, (httpcore2.TimeoutException, TimeoutError)):
            return Failure(
                DeadlineError(f"no answer from {where} in time: timed out ({reason})"), final=True
            )
        error = NoAnswerError(f"no answer from {where}: {reason}; is `precompute serve` running?")
        return Failure(
            error,
            lost=isinstance(
                exc, (httpcore2.RemoteProtocolError, httpcore2.ReadError, httpcore2.WriteError)
            ),
        )

    def too_large(self) -> Failure:
        return Failure(
            NoAnswerError(f"{self._address.text} answered more than {MOST_ANSWER_BYTES} bytes"),
            final=True,
        )


ERRORS = (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError)
"""What :meth:`Pooled.failure` describes."""


class BlockingTransport(Pooled):
    """Sends from any thread; what a process forked with it opens are connections of its own."""

    def __init__(
        self,
        address: Address,
        token: str | Callable[[], str] | None,
        connections: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(address, token, connections)
        self._tls = tls
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._pool = httpcore2.ConnectionPool(
            ssl_context=self._tls,
            max_connections=self._connections,
            keepalive_expiry=IDLE_S,
            uds=self._address.socket_path,
            network_backend=_Network(),
        )
        # last: a thread that finds this process's number finds its pool
        self._pid = os.getpid()

    def send(self, call: Call[Any], exchange: Exchange) -> Outcome:
        """One request; what goes wrong is the outcome, and nothing is raised."""
        if self._pid != os.getpid():
            # two processes on one connection would read each other's answers
            with self._lock:
                if self._pid != os.getpid():
                    self._open()
        method, url, headers = self.request(call)
        try:
            timeout = {
                "pool": exchange.left_s(),
                "connect": exchange,
                "read": exchange,
                "write": exchange,
            }
            with self._pool.stream(
                method, url, headers=headers, content=call.body, extensions={"timeout": timeout}
            ) as response:
                content, size = list[bytes](), 0
                for part in response.iter_stream():
                    content.append(part)
                    size += len(part)
                    if size > MOST_ANSWER_BYTES:
                        return self.too_large()
                reply, wrong = call.checked(
                    Reply(response.status, response.headers, b"".join(content))
                )
                if wrong is not None:
                    # whatever it brings next would be another one's too
                    response.extensions["network_stream"].close()
                    return Failure(wrong, lost=True)
                return reply
        except ERRORS as exc:
            return self.failure(exc)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()
