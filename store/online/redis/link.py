"""Link: one Redis server, reached by a few pooled connections; each call has one budget for
connecting, trying again and reading. And what a Redis URL may say."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from precompute.store.errors import ConfigError, OnlineStoreError
from precompute.store.feature_view import NAME
from precompute.store.online.redis.replies import PASSING, Lost, Refused, no_answer, refusal, words

BUDGET_S = 0.1
"""Of a read of rows, unless the URL says otherwise: what a caller waits for a server that hangs,
the first time."""
FORMS = (
    "write redis://host:6379/0, rediss://…, unix:///path?db=0 or"
    " redis+cluster://host:6379,host:6379"
)


@dataclass(frozen=True)
class RedisOptions:
    """A Redis URL, read.

    ``url`` is without the options below; ``where`` is for messages, without user, password and
    query; ``nodes`` are the (host, port) that a cluster is queried at first, empty where there is
    none.
    """

    url: str
    where: str
    nodes: tuple[tuple[str, int], ...] = ()
    prefix: str = "precompute"
    max_load_mb_s: float | None = None
    allow_eviction: bool = False
    budget_s: float = BUDGET_S
    buckets: bool = True

    @classmethod
    def of(cls, url: str) -> RedisOptions:
        """Read a URL.

        Args:
            url: ``redis://host:port/db``, ``rediss://…``, ``unix:///path?db=0`` or
                ``redis+cluster://host:port,host:port`` (``rediss+cluster://`` for TLS). In its
                query: ``prefix`` (a name; keeps projects apart in one database; default
                ``precompute``), ``max_load_mb_s`` (a load sends no more than that),
                ``allow_eviction=yes`` (load though the server may drop rows by itself),
                ``budget_ms`` (for connecting, trying again and reading together, of rows, default
                100), ``buckets=no`` (narrow rows under keys of their own: three to four times the
                memory, half the time to read many), and what redis-py takes, such as
                ``ssl_ca_certs``.

        Raises:
            ConfigError: it cannot be read; says nothing of what may be a part of a password.
        """
        base, _, query = url.partition("?")
        own: dict[str, Any] = {"budget_s": BUDGET_S}
        others: list[str] = []
        for option in query.split("&") if query else []:
            name, _, value = option.partition("=")
            if name in _READERS:
                field, read = _READERS[name]
                own[field] = read(name, unquote(value))
            else:
                others.append(option)
        scheme, separator, rest = base.partition("://")
        credentials, at, place = rest.rpartition("@")
        nodes: tuple[tuple[str, int], ...] = ()
        if scheme in ("redis+cluster", "rediss+cluster"):
            nodes = _nodes(place.partition("/")[0])
            host, port = nodes[0]
            scheme, place = (
                scheme.removesuffix("+cluster"),
                f"{f'[{host}]' if ':' in host else host}:{port}/0",
            )
        whole = f"{scheme}{separator}{credentials}{at}{place}" + (
            f"?{'&'.join(others)}" if others else ""
        )
        shown = base.partition("://")
        return cls(whole, f"{shown[0]}{shown[1]}{shown[2].rpartition('@')[2]}", nodes, **own)


def _nodes(text: str) -> tuple[tuple[str, int], ...]:
    nodes = []
    for node in text.split(","):
        host, colon, port = node.rpartition(":") if not node.endswith("]") else (node, "", "")
        host, port = (host, port) if colon else (node, "6379")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"online: {node!r} is no host and port; write redis+cluster://host:6379,host:6379"
            )
        nodes.append((host, int(port)))
    return tuple(nodes)


def _name(option: str, value: str) -> str:
    if not NAME.match(value):
        raise ConfigError(
            f"online: {option} {value!r} is not a name (lower-case letters, digits and _); write"
            f" ?{option}=movielens"
        )
    return value


def _positive(option: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigError(
            f"online: {option} {value!r} is not a number above 0; write ?{option}=100"
        )
    return number


def _seconds(option: str, value: str) -> float:
    return _positive(option, value) / 1000


def _yes(option: str, value: str) -> bool:
    if value not in ("yes", "no"):
        raise ConfigError(f"online: {option} is yes or no, not {value!r}")
    return value == "yes"


_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "prefix": ("prefix", _name),
    "max_load_mb_s": ("max_load_mb_s", _positive),
    "allow_eviction": ("allow_eviction", _yes),
    "budget_ms": ("budget_s", _seconds),
    "buckets": ("buckets", _yes),
}


RECEIVE_BYTES = 512 * 1024
"""Read at once: 500 rows of 1,561 bytes in two calls instead of the 12 that the client library's 64
kB take."""
IDLE_CONNECTIONS = 64
"""Retained, at most: as many as a service has threads."""
TRIES = 3
"""Of a call whose connection is refused or cut, or that the server is too busy for."""

PROBE_S = 0.01
"""A call waits for a server that was silent: it is not what its caller has to wait a whole budget
for."""

Command = Sequence[bytes | str | int]
T = TypeVar("T")


def packed(*commands: Command) -> bytes:
    """Commands as they are sent, one behind the other."""
    # its types know tuples of one item only
    pack: Any = hiredis.pack_command
    return b"".join([pack(tuple(command)) for command in commands])


class _Raw(Protocol):
    """What is used of redis-py's connections: connecting with TLS, AUTH and SELECT, by the URL's
    rules."""

    socket_timeout: float
    socket_connect_timeout: float

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def _get_socket(self) -> socket.socket: ...


class Connection:
    """One connection; bytes out, replies in, each within a deadline. Not safe to share between
    threads."""

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
        """Let the socket wait no longer than is left. It is set only when that is much less than
        was set last: each time costs a system call, and a call may take a quarter of its budget
        more."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            self.close()
            raise Lost("no answer in time", late=True)
        if not left_s <= self._timeout_s <= 1.25 * left_s:
            self._timeout_s = left_s
            self._socket.settimeout(left_s)

    def _lost(self, exc: OSError) -> Lost:
        self.close()
        return Lost(
            "no answer in time" if isinstance(exc, TimeoutError) else words(exc),
            late=isinstance(exc, TimeoutError),
        )

    def close(self) -> None:
        """Close it; once is enough."""
        self._raw.disconnect()


_PART: Any = object()


class Breaker:
    """Opens when a call spent its whole budget without an answer; lets one call through after a
    pause that grows from ``first_s`` to ``most_s``, which :meth:`probed` makes.

    Safe to share between threads.
    """

    def __init__(
        self, first_s: float = 0.1, most_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s, self._most_s, self._clock = first_s, most_s, clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until_s = self._failed_s = 0.0
        self.words: str | None = None
        """What the server's last silence looked like; None while it answers."""

    def opened(self) -> str | None:
        """None when the call may be made; else why not, in words. Anyone who got None while the
        breaker is open is the probe: it must tell :meth:`failed` or :meth:`succeeded`, and the
        others wait for another pause if it does neither.
        """
        if self.words is None:
            return None
        with self._lock:
            now_s, said = self._clock(), self.words
            if now_s < self._until_s:
                return f"{said}; queried again in {self._until_s - now_s:.1f} s"
            self._until_s = now_s + self._pause_s
            return None

    def probed(self, call: Callable[[], T], late: Callable[[str], Exception]) -> T:
        """What a call comes to, where it is the probe; its caller waits no longer than
        :data:`PROBE_S`, while it goes on behind it and tells what became of it.

        Raises:
            Exception: what the call raises, or ``late`` makes of words where it takes longer.
        """
        if (words := self.words) is None:
            return call()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as exc:
                future.set_exception(exc)

        threading.Thread(target=run, name="redis-probe", daemon=True).start()
        try:
            return future.result(PROBE_S)
        except TimeoutError:
            raise late(f"{words}; it is being queried again") from None

    def failed(self, words: str) -> None:
        """The server did not answer."""
        with self._lock:
            now_s = self._clock()
            if self.words is None:
                self._pause_s = self._first_s
            elif now_s < self._failed_s + self._pause_s:
                # one of many that were on their way when the first one failed
                return
            else:
                self._pause_s = min(self._most_s, 2 * self._pause_s)
            self._failed_s, self._until_s, self.words = now_s, now_s + self._pause_s, words

    def succeeded(self) -> None:
        """The server answered, be it with a refusal."""
        if self.words is not None:
            with self._lock:
                self.words = None


@dataclass(frozen=True)
class Budget:
    """What is left of the time of something that may take several calls. ``guarded``: behind the
    breaker, as a read is; what publishes asks a server that was silent, too."""

    deadline: float
    guarded: bool = False

    @classmethod
    def of(cls, budget: Budget | float | None, read_s: float) -> Budget:
        """A call's: seconds of its own; or, where it does not name any, those of a read."""
        if isinstance(budget, Budget):
            return budget
        return cls(time.monotonic() + (read_s if budget is None else budget), budget is None)

    @property
    def left_s(self) -> float:
        """Seconds; a little where nothing is left."""
        return max(0.01, self.deadline - time.monotonic())


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

    def ask(
        self, commands: bytes, count: int, doing: str, budget: Budget | float | None = None
    ) -> list[Any]:
        """Send packed commands and wait for their replies, in one round trip.

        Args:
            commands: as :func:`packed` made them; they may be sent again when a reply is lost.
            count: how many they are.
            doing: what for, as an infinitive: for messages.
            budget: for work that is no read: it has its own, in seconds, and does not look at the
                breaker; or what is left of one.

        Raises:
            OnlineStoreError: no answer in time, or one of the replies is an error.
        """
        replies = self.replies(commands, count, doing, budget)
        for reply in replies:
            if isinstance(reply, Refused):
                raise refusal(self.where, doing, reply)
        return replies

    def replies(
        self, commands: bytes, count: int, doing: str, budget: Budget | float | None = None
    ) -> list[Any]:
        """As :meth:`ask`, with errors among the replies as :class:`Refused`; only one that goes by
        is waited for."""
        budget = Budget.of(budget, self.budget_s)
        if not budget.guarded:
            return self._tried(commands, count, doing, budget.deadline, None)
        if (opened := self.breaker.opened()) is not None:
            raise no_answer(self.where, doing, opened)
        call = partial(self._tried, commands, count, doing, budget.deadline, self.breaker)
        return self.breaker.probed(call, partial(no_answer, self.where, doing))

    def _tried(
        self, commands: bytes, count: int, doing: str, deadline: float, breaker: Breaker | None
    ) -> list[Any]:
        """Replies, by as many tries as there is time for; ``breaker`` learns of silence."""
        tried = 0
        while True:
            try:
                replies = self._once(commands, count, deadline)
            except Refused as refused:
                # as it connects: it answers, and the next one learns of it, and not of the silence
                # before
                self.breaker.succeeded()
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

    def _once(self, commands: bytes, count: int, deadline: float) -> list[Any]:
        connection = self.take(deadline)
        try:
            connection.send(commands, deadline)
            replies = connection.receive(count, deadline)
        except BaseException:
            self.drop(connection)
            raise
        self.give(connection)
        return replies

    def take(self, deadline: float) -> Connection:
        """A connection that is open, for :meth:`give` or :meth:`drop` when done.

        Raises:
            Lost, Refused: it could not be made.
        """
        if self._process != os.getpid():
            # the parent's: whatever is read from them is lost to it
            self._idle, self._process = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return self.connect(deadline)

    def warm(self, connections: int, deadline: float) -> None:
        """Open so many, to be there when they are wanted.

        Raises:
            Lost, Refused: one could not be made.
        """
        opened: list[Connection] = []
        try:
            while len(opened) < connections:
                opened.append(self.take(deadline))
        finally:
            for connection in opened:
                self.give(connection)

    def give(self, connection: Connection) -> None:
        """Back, with nothing on its way, to be used again."""
        connection.used = True
        if len(self._idle) < IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()

    def drop(self, connection: Connection) -> None:
        """Close one that failed; where it came from the pool, the other pooled ones are closed too:
        the server was restarted, most likely."""
        connection.close()
        if connection.used:
            self.close()

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
    """What makes connections by the rules of a URL: to its own server, or to another (host, port)
    with the same user and TLS.

    Raises:
        ConfigError: the URL cannot be read.
    """
    try:
        settings = redis.ConnectionPool.from_url(options.url, retry=Retry(NoBackoff(), 0))
        # RESP 2 whatever the URL says: no HELLO, and no CLIENT SETINFO either, which are two round
        # trips and need rights
        kind, arguments = (
            settings.connection_class,
            settings.connection_kwargs | {"protocol": 2, "driver_info": None},
        )
        arguments.pop("retry_on_error", None)

        def connection(node: tuple[str, int] | None = None) -> Connection:
            return Connection(
                kind(**arguments | ({} if node is None else {"host": node[0], "port": node[1]}))
            )

        connection()
    except (ValueError, TypeError, redis.RedisError, OnlineStoreError) as exc:
        # not the library's words: they may hold a part of the password
        raise ConfigError(f"online: {options.where} is not a Redis URL; {FORMS}") from exc
    return connection
