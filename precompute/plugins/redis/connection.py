"""Connection: bytes to a Redis server and replies from it, each within a deadline; and the options
of a Redis URL."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from precompute.store.errors import ConfigError, OnlineStoreError
from precompute.store.feature_view import NAME

BUDGET_S = 0.1
"""Budget of a read of rows, unless the URL says otherwise: what a caller waits for a server that
hangs, the first time."""
RECEIVE_BYTES = 512 * 1024
"""Bytes that are read at once: 500 rows of 1,561 bytes in two calls instead of the 12 that the
client library's 64 kB take."""

Command = Sequence[bytes | str | int]
Node = tuple[str, int]
"""Host and port."""

_IN_SCRIPT = re.compile(r": -([A-Z]+) ")
"""As Redis 6.2 has it; 7 has it as outside of scripts."""


class Refused(Exception):
    """An error reply. ``code`` is its first word, as in ``OOM command not allowed``."""

    @property
    def code(self) -> str:
        """The first word; within a script, that of the command that it ran."""
        said = str(self)
        inner = _IN_SCRIPT.search(said) if said.startswith("ERR Error running script") else None
        return inner[1] if inner else said.partition(" ")[0]


class Lost(Exception):
    """A connection that could not be made, was cut, or did not answer in time; ``late`` says which
    of these it was."""

    def __init__(self, words: str, *, late: bool = False) -> None:
        super().__init__(words)
        self.late = late


def words(error: BaseException) -> str:
    """What an error says, printable and short."""
    shown = "".join(c if c.isprintable() else "?" for c in str(error))
    return shown if len(shown) <= 200 else shown[:197] + "..."


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
    """Keeps projects apart in one database."""
    max_load_mb_s: float | None = None
    allow_eviction: bool = False
    """Load though the server may drop rows by itself."""
    budget_s: float = BUDGET_S
    """Budget of a read, in s: connecting, trying again and reading together."""
    buckets: bool = True

    @classmethod
    def of(cls, url: str) -> RedisOptions:
        """Read a URL.

        Args:
            url: ``redis://host:port/db``, ``rediss://…``, ``unix:///path?db=0`` or
                ``redis+cluster://host:port,host:port`` (``rediss+cluster://`` for TLS). Its query
                may have the options that docs/reference.md lists, and those of redis-py, such as
                ``ssl_ca_certs``.

        Raises:
            ConfigError: it cannot be read; says nothing of what may be a part of a password.
        """
        base, _, query = url.partition("?")
        own: dict[str, Any] = {"budget_s": BUDGET_S}
        others: list[str] = []
        for option in query.split("&") if query else []:
            name, _, value = option.partition("=")
            # an @ behind the ? may be the end of a password with a ? in it
            found = _own_option(name, unquote(value), "…" if "@" in query else unquote(value))
            own |= found
            if not found:
                others.append(option)
        scheme, separator, rest = base.partition("://")
        credentials, at, place = rest.rpartition("@")
        nodes: tuple[tuple[str, int], ...] = ()
        where = f"{scheme}{separator}{'…' if '@' in query else place}"
        if scheme in ("redis+cluster", "rediss+cluster"):
            nodes = _nodes(place.partition("/")[0], where)
            host, port = nodes[0]
            scheme = scheme.removesuffix("+cluster")
            place = f"{f'[{host}]' if ':' in host else host}:{port}/0"
        return cls(
            f"{scheme}{separator}{credentials}{at}{place}?{'&'.join(others)}".removesuffix("?"),
            where,
            nodes,
            **own,
        )


def _nodes(text: str, where: str) -> tuple[tuple[str, int], ...]:
    nodes = []
    for node in text.split(","):
        host, colon, port = ("", "", "") if node.endswith("]") else node.rpartition(":")
        host, port = (host, port) if colon else (node, "6379")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"online: {where} is no list of hosts and ports; write"
                " redis+cluster://host:6379,host:6379"
            )
        nodes.append((host, int(port)))
    return tuple(nodes)


def _own_option(name: str, value: str, shown: str) -> dict[str, Any]:
    """An option of ours, as a field of :class:`RedisOptions`; nothing of one that is redis-py's.
    ``shown``: the value as messages may have it."""
    if name == "prefix":
        if not NAME.match(value):
            raise ConfigError(
                f"online: {name} {shown!r} is not a name (lower-case letters, digits and _); write"
                f" ?{name}=movielens"
            )
        return {name: value}
    if name in ("allow_eviction", "buckets"):
        if value not in ("yes", "no"):
            raise ConfigError(f"online: {name} is yes or no, not {shown!r}")
        return {name: value == "yes"}
    if name in ("max_load_mb_s", "budget_ms"):
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < 1e9:
            raise ConfigError(
                f"online: {name} {shown!r} is not a number above 0; write ?{name}=100"
            )
        return {name: number} if name == "max_load_mb_s" else {"budget_s": number / 1000}
    return {}


def packed(*commands: Command) -> bytes:
    """Commands as they are sent, one behind the other."""
    # its types know tuples of one item only
    pack: Any = hiredis.pack_command
    return b"".join([pack(tuple(command)) for command in commands])


class Connection:
    """One connection; bytes out, replies in, each within a deadline. Not safe to share between
    threads.

    Args:
        raw: redis-py's, which connects with TLS, AUTH and SELECT by the URL's rules.
    """

    def __init__(self, raw: Any) -> None:
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


def opener(options: RedisOptions) -> Callable[[Node | None], Connection]:
    """What makes connections by the rules of a URL: to its own server, or to another (host, port)
    with the same user and TLS.

    Raises:
        ConfigError: the URL cannot be read.
    """
    try:
        settings = redis.ConnectionPool.from_url(options.url, retry=Retry(NoBackoff(), 0))
        # RESP 2 whatever the URL says: no HELLO, and no CLIENT SETINFO either, which are two round
        # trips and need rights
        kind = settings.connection_class
        arguments = settings.connection_kwargs | {"protocol": 2, "driver_info": None}
        arguments.pop("retry_on_error", None)

        def connection(node: Node | None = None) -> Connection:
            there = {} if node is None else {"host": node[0], "port": node[1]}
            return Connection(kind(**arguments | there))

        connection()
    except (ValueError, TypeError, redis.RedisError, OnlineStoreError) as exc:
        # not the library's words: they may hold a part of the password
        raise ConfigError(
            f"online: {options.where} is not a Redis URL; write redis://host:6379/0, rediss://…,"
            " unix:///path?db=0 or redis+cluster://host:6379,host:6379; a password's ? is %3F"
        ) from exc
    return connection
