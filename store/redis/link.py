"""Link: one Redis server, reached by a few connections that are kept; each call has one budget for connecting, trying again and reading."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from store.errors import ConfigError, OnlineStoreError
from store.redis.breaker import Breaker
from store.redis.options import FORMS, RedisOptions
from store.redis.replies import PASSING, Lost, Refused, no_answer, refusal, words

RECEIVE_BYTES = 512 * 1024
"""Read at once: 500 rows of 1,561 bytes in two calls instead of the 12 that the client library's 64 kB take."""
IDLE_CONNECTIONS = 64
"""Kept, at most: as many as a service has threads."""
TRIES = 3
"""Of a call whose connection is refused or cut, or that the server is too busy for."""

Command = Sequence[bytes | str | int]


def packed(*commands: Command) -> bytes:
    """Commands as they are sent, one behind the other."""
    # its types know tuples of one item only
    pack: Any = hiredis.pack_command
    return b"".join([pack(tuple(command)) for command in commands])


class _Raw(Protocol):
    """What is used of redis-py's connections: connecting with TLS, AUTH and SELECT, by the URL's rules."""

    socket_timeout: float
    socket_connect_timeout: float

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def _get_socket(self) -> socket.socket: ...


class Connection:
    """One connection; bytes out, replies in, each within a deadline. Not safe to share between threads."""

    def __init__(self, raw: _Raw) -> None:
        self._raw, self._timeout_s = raw, 0.0
        self._socket: socket.socket
        self._reader: Any = None
        self._buffer = memoryview(b"")
        self.used = False

    def open(self, deadline: float) -> None:
        """Connect, with AUTH, TLS and SELECT as the URL says.

        Raises:
            Lost, Refused.
        """
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise Lost("no time left to connect", late=True)
        raw = self._raw
        raw.socket_timeout = raw.socket_connect_timeout = self._timeout_s = left_s
        try:
            raw.connect()
        except redis.AuthenticationError as exc:
            raise Refused(f"WRONGPASS {exc}") from exc
        except redis.TimeoutError as exc:
            raise Lost(words(exc), late=True) from exc
        except redis.exceptions.NoPermissionError as exc:
            raise Refused(f"NOPERM {exc}") from exc
        except (redis.ConnectionError, OSError) as exc:
            raise Lost(words(exc)) from exc
        except redis.RedisError as exc:
            raise Refused(f"ERR {exc}") from exc
        self._socket = raw._get_socket()
        self._reader = hiredis.Reader(protocolError=Lost, replyError=Refused, notEnoughData=_PART)
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))

    def send(self, data: bytes | memoryview, deadline: float) -> None:
        """Send bytes whole.

        Raises:
            Lost: and the connection is closed.
        """
        self._allow(deadline)
        try:
            self._socket.sendall(data)
        except OSError as exc:
            raise self._lost(exc) from exc

    def receive(self, count: int, deadline: float) -> list[Any]:
        """The next ``count`` replies, errors among them as :class:`Refused`.

        Raises:
            Lost: and the connection is closed.
        """
        reader, replies = self._reader, []
        try:
            while True:
                while (reply := reader.gets(False)) is not _PART:
                    replies.append(reply)
                    if len(replies) == count:
                        return replies
                self._allow(deadline)
                size = self._socket.recv_into(self._buffer)
                if not size:
                    raise Lost("the server closed the connection")
                reader.feed(self._buffer[:size])
        except Lost:
            self.close()
            raise
        except OSError as exc:
            raise self._lost(exc) from exc

    def _allow(self, deadline: float) -> None:
        """Let the socket wait no longer than is left. It is told so only when that is much less than it was told last: each time costs a system call,
        and a call may take a quarter of its budget more."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            self.close()
            raise Lost("no answer in time", late=True)
        if not left_s <= self._timeout_s <= 1.25 * left_s:
            self._timeout_s = left_s
            self._socket.settimeout(left_s)

    def _lost(self, exc: OSError) -> Lost:
        self.close()
        return Lost("no answer in time" if isinstance(exc, TimeoutError) else words(exc), late=isinstance(exc, TimeoutError))

    def close(self) -> None:
        """Close it; once is enough."""
        self._raw.disconnect()


_PART: Any = object()


class Link:
    """One server. Safe to share between threads, and to be carried over a fork.

    Args:
        connections: makes a connection that is not open yet.
        where: the server, for messages.
        budget_s: of a call that does not name another one.
        node: (host, port), where it is not the URL's own.
    """

    def __init__(
        self,
        connections: Callable[[tuple[str, int] | None], Connection],
        where: str,
        budget_s: float,
        node: tuple[str, int] | None = None,
    ) -> None:
        self._connections, self.where, self.budget_s, self.node = connections, where, budget_s, node
        self._idle: list[Connection] = []
        self._process = os.getpid()
        self.breaker = Breaker()

    def ask(self, commands: bytes, count: int, doing: str, budget_s: float | None = None) -> list[Any]:
        """Send packed commands and wait for their replies, in one round trip.

        Args:
            commands: as :func:`packed` made them; they may be sent again when a reply is lost.
            count: how many they are.
            doing: what for, as an infinitive: for messages.
            budget_s: for work that is no read: it has its own, and does not look at the breaker.

        Raises:
            OnlineStoreError: no answer in time, or one of the replies is an error.
        """
        replies = self.replies(commands, count, doing, budget_s)
        for reply in replies:
            if isinstance(reply, Refused):
                raise refusal(self.where, doing, reply)
        return replies

    def replies(self, commands: bytes, count: int, doing: str, budget_s: float | None = None) -> list[Any]:
        """As :meth:`ask`, with errors among the replies as :class:`Refused`; only one that goes by is waited for."""
        breaker = self.breaker if budget_s is None else None
        if breaker is not None and (opened := breaker.opened()) is not None:
            raise no_answer(self.where, doing, opened)
        deadline = time.monotonic() + (self.budget_s if budget_s is None else budget_s)
        tried = 0
        while True:
            try:
                with self.connection(deadline) as connection:
                    connection.send(commands, deadline)
                    replies = connection.receive(count, deadline)
            except Refused as refused:
                raise refusal(self.where, doing, refused) from refused
            except Lost as lost:
                if _again(tried := tried + 1, deadline) and not lost.late:
                    continue
                if breaker is not None:
                    breaker.failed(str(lost))
                raise no_answer(self.where, doing, str(lost)) from lost
            passing = any(isinstance(reply, Refused) and reply.code in PASSING for reply in replies)
            if passing and _again(tried := tried + 1, deadline):
                continue
            self.breaker.succeeded()
            return replies

    @contextmanager
    def connection(self, deadline: float) -> Iterator[Connection]:
        """A connection that is open. It is closed when what is done with it fails.

        Raises:
            Lost, Refused: it could not be made; Lost too when one that was kept turned out to be cut, and then the others are not kept either.
        """
        if self._process != os.getpid():
            # the parent's: whatever is read from them is lost to it
            self._idle, self._process = [], os.getpid()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.connect(deadline)
        try:
            yield connection
        except BaseException:
            connection.close()
            if connection.used:
                self.close()
            raise
        connection.used = True
        if len(self._idle) < IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()

    def connect(self, deadline: float) -> Connection:
        """A connection that the caller keeps, and closes.

        Raises:
            Lost, Refused: it could not be made.
        """
        connection = self._connections(self.node)
        try:
            connection.open(deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close the connections that nobody uses now; the link can be used again."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _again(tried: int, deadline: float) -> bool:
    """Whether to try once more, after a pause."""
    pause_s = 0.02 * 4 ** (tried - 1)
    if tried >= TRIES or time.monotonic() + pause_s >= deadline:
        return False
    time.sleep(pause_s)
    return True


def opener(options: RedisOptions) -> Callable[[tuple[str, int] | None], Connection]:
    """What makes connections by the rules of a URL: to its own server, or to another (host, port) with the same user and TLS.

    Raises:
        ConfigError: the URL cannot be read.
    """
    try:
        # RESP 2: no HELLO, and no CLIENT SETINFO either, which are two round trips and need rights
        settings = redis.ConnectionPool.from_url(options.url, protocol=2, driver_info=None, retry=Retry(NoBackoff(), 0))
        kind, arguments = (
            settings.connection_class,
            {k: v for k, v in settings.connection_kwargs.items() if k != "retry_on_error"},
        )

        def connection(node: tuple[str, int] | None = None) -> Connection:
            return Connection(kind(**arguments | ({} if node is None else {"host": node[0], "port": node[1]})))

        connection()
    except (ValueError, TypeError, redis.RedisError, OnlineStoreError) as exc:
        # not the library's words: they may hold a part of the password
        raise ConfigError(f"online: {options.where} is not a Redis URL; {FORMS}") from exc
    return connection
