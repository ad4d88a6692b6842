"""Connections: the sockets that a server's workers accept on, bound before they run; TLS; and all
connections of a worker: which are accepted, which are closed to make room, which took too long."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import IntEnum
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from precompute.store.errors import ConfigError
from precompute.store.http.guard.access import Tokens, version_of
from precompute.store.http.guard.limits import Limits
from precompute.store.http.messages import Reply
from precompute.store.http.openapi import Credentials
from precompute.store.http.telemetry.instruments import CONNECTIONS, CONNECTIONS_CLOSED, Meter

log = logging.getLogger(__name__)

HEADROOM = 64
"""Connections beyond the limit that are open for as long as it takes to refuse them; with these
too, the rest waits in the kernel's queue."""

PAUSE_S = 0.05
"""Seconds before room is looked for again, where there was none."""

LAST_S = 0.5
"""Seconds for the answer to a client that sends no more: longer than reads of a store and most
misses take; a place is held no longer for a client that is gone."""

SECURITY_HEADERS = [(b"x-content-type-options", b"nosniff")]
"""Headers of every answer."""


class Wait(IntEnum):
    """What a connection waits for; those from :attr:`ENDED` on take no more requests."""

    HEAD = 0
    BODY = 1
    ANSWER = 2
    NEXT = 3
    LAST_ANSWER = 4
    ENDED = 5
    """To be closed."""
    GONE = 6


class Connection(Protocol):
    """What a connection must be able to do
    (:class:`precompute.store.http.guard.protocol.LimitedProtocol`)."""

    deadline: float
    write_deadline: float
    since: float
    answered: int
    client_address: str
    made_room: bool

    @property
    def idle(self) -> bool: ...
    @property
    def answering(self) -> bool: ...
    @property
    def unsent(self) -> int: ...
    def overdue(self) -> None: ...
    def make_room(self) -> None: ...
    def cut(self, why: str) -> None: ...


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as they are sent (RFC 9112 §5): all of them are ours, and none has a line's end in
    it."""
    return b"".join([part for name, value in headers for part in (name, b": ", value, b"\r\n")])


def last_words(refusal: Reply) -> bytes:
    """A whole HTTP/1.1 answer, after which the connection is closed."""
    assert isinstance(refusal.body, bytes)
    phrase = HTTPStatus(refusal.status).phrase.encode()
    headers = [
        *refusal.headers,
        (b"content-length", b"%d" % len(refusal.body)),
        *SECURITY_HEADERS,
        (b"connection", b"close"),
    ]
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (
        refusal.status,
        phrase,
        header_lines(headers),
        refusal.body,
    )


class Connections:
    """The connections of one worker.

    Args:
        limits: what they may take.
        meter: counts them.
        most: how many there may be, of those that :class:`Limits` allows.

    ``now`` is the loop's clock as of the last look at the times, at most :attr:`Limits.tick_s` ago.
    """

    def __init__(self, limits: Limits, meter: Meter, most: int) -> None:
        self.limits, self._meter, self._most = limits, meter, most
        self.now = 0.0
        self.open = 0
        """Connections that are accepted and not closed; those still shaking hands, too."""
        self.seconds = (limits.header_s, limits.body_s, math.inf, limits.idle_s, LAST_S)
        """How long a connection may wait, by :class:`Wait`; one that has ended has its own time."""
        self.at_once: Callable[[dict[str, Any]], Reply | None] | None = None
        """Answers a request that need not wait, by its scope; None where nothing
        does."""
        self.posted_at_once: Callable[[dict[str, Any], bytes], Reply | None] | None = None
        """Likewise, by its scope and its body, once that is there."""
        self._lines: tuple[Any, bytes] = None, b""
        self.bodies = 0
        """Bytes of bodies that no route has answered yet."""
        self.on_tick: list[Callable[[], None]] = [meter.process_figures]
        """What else is looked at now and then; must be quick."""
        self._clients: Counter[str] = Counter()
        self._held: Collection[Connection] = ()
        self._slow: set[Connection] = set()
        self._room: list[Connection] = []
        self._look_for_room_at = 0.0
        self.ends_at, self.most_s = -math.inf, math.inf
        """When the server was ordered to end, by the loop's clock, and how long, from then on, it
        waits for a client."""
        self.left_off: Counter[str] = Counter()
        """Reason → connections closed since for it."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, held: Collection[Connection]) -> None:
        """Look at the times from now on, in the running loop; ``held`` are the connections that
        were made."""
        self._held, self._loop = held, asyncio.get_running_loop()
        self._tick()

    def stop(self) -> None:
        """Look at the times no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self.limits.tick_s, self._tick)
        self.now = now = self._loop.time()
        due = [connection.overdue for connection in self._held if connection.deadline < now]
        due += [
            partial(connection.cut, "slow_reader")
            for connection in self._slow
            if connection.write_deadline < now
        ]
        self._meter.gauge(CONNECTIONS).set(self.open)
        for look in (*due, *self.on_tick):
            try:
                look()
            except Exception:
                # the others' deadlines do not wait for it
                log.exception("what is done now and then failed")

    def head(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Headers of every answer as they are sent: another list each second, which has the
        date."""
        of, lines = self._lines
        if of is not headers:
            lines = header_lines(headers)
            self._lines = headers, lines
        return lines

    # ---- coming and going

    @property
    def has_room(self) -> bool:
        """Whether there is room for those that are refused, too."""
        return self.most_s == math.inf and self.open < self._most + HEADROOM

    def accepted(self, client: str) -> None:
        """A connection was accepted."""
        self.now = self._loop.time()
        self.open += 1
        self._clients[client] += 1

    def lost(self, client: str) -> None:
        """A connection that was accepted is closed."""
        self.open -= 1
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]

    def let_in(self, connection: Connection) -> bool:
        """Whether one that was accepted may stay; an idle one may have to go for it."""
        most = self.limits.connections_per_client
        if (
            most is not None
            and connection.client_address
            and self._clients[connection.client_address] > most
        ):
            return False
        if self.open <= self._most:
            return True
        return self.make_room(but=connection)

    def make_room(self, but: Connection | None = None) -> bool:
        """Close the connection that was silent longest, of those that never sent a request
        where these are many; False where all are at work."""
        while self._room or self._look_for_room():
            connection = self._room.pop()
            if connection.idle and connection is not but:
                # it is gone as soon as the loop comes to it: no other need be closed for its place
                self.lost(connection.client_address)
                connection.make_room()
                return True
        return False

    def _look_for_room(self) -> bool:
        """Whether there are connections that may have to go; looked for again only after a while
        where there were none, or they went by themselves."""
        if self._loop.time() < self._look_for_room_at:
            return False
        idle = [connection for connection in self._held if connection.idle]
        silent = [connection for connection in idle if not connection.answered]
        # few may be clients that are about to send a request
        many = len(silent) >= max(8, self._most // 20)
        # popped from its end
        self._room = sorted(silent if many else idle, key=lambda connection: -connection.since)
        if len(self._room) <= 1:
            # which may be the one that is let in now
            self._look_for_room_at = self._loop.time() + PAUSE_S
        return bool(self._room)

    def end_within(self, seconds: float) -> None:
        """Order the end: what is still to arrive of a request, and an answer that its client does
        not take, have so long at most from now on."""
        self.ends_at, self.most_s = self._loop.time(), seconds
        for one in self._held:
            # infinity is no client's time
            one.deadline, one.write_deadline = (
                time if time == math.inf else min(time, self.ends_at + seconds)
                for time in (one.deadline, one.write_deadline)
            )

    def left_s(self) -> float:
        """Seconds until the last of those that are read from, or that take their answers, is
        through, or was closed; minus infinity where there is none."""
        times = [
            time
            for one in self._held
            for time in (math.inf if one.idle else one.deadline, one.write_deadline)
        ]
        return (
            max((time for time in times if time < math.inf), default=-math.inf)
            + 2 * self.limits.tick_s
            - self._loop.time()
        )

    @property
    def answering(self) -> int:
        """How many requests are there whose answer is still being made."""
        return sum(one.answering for one in self._held)

    def cut_all(self) -> None:
        """Close all of them at once."""
        for connection in list(self._held):
            connection.cut("slow_reader" if connection.unsent else "overdue")

    def gone(self, connection: Connection) -> None:
        """Note that a connection that was made is closed."""
        self._slow.discard(connection)
        if not connection.made_room:
            self.lost(connection.client_address)

    def closed(self, why: str) -> None:
        """Count one that we close."""
        self._meter.counter(CONNECTIONS_CLOSED, why).add()
        if self.most_s < math.inf:
            self.left_off[why] += 1

    # ---- answers that are not taken

    def slow(self, connection: Connection) -> None:
        """Note a connection whose client does not take its answer; of too many bytes together,
        those with the most are closed."""
        self._slow.add(connection)
        unsent = {one: one.unsent for one in self._slow}
        total = sum(unsent.values())
        while total > self.limits.unsent_bytes:
            most = max(unsent, key=unsent.__getitem__)
            total -= unsent.pop(most)
            self._slow.discard(most)
            most.cut("slow_reader")

    def fast(self, connection: Connection) -> None:
        """Note a connection whose client took its answer."""
        self._slow.discard(connection)


class Listener:
    """A listening socket.

    Args:
        key: the setting that says where, for messages: ``serve.bind``.
        address: its value: host:port, or unix:path.
        folder: what a relative path starts from.
        guarded: whether the caller must show a token or a certificate; else only this machine may
            reach it.
        tls: whether it is served over TLS.

    ``shown`` is the address for people.

    Raises:
        ConfigError: it cannot be bound; or strangers could reach it, and nothing keeps them out.
    """

    def __init__(self, key: str, address: str, folder: Path, *, guarded: bool, tls: bool) -> None:
        if not guarded and not _is_local(address):
            raise ConfigError(
                f"{key}: {address!r} is reached from other machines, and nothing keeps strangers"
                " out: write under `serve` either `tokens: ./tokens`, with a token made by"
                " `precompute token NAME`, or `tls: {cert: …, key: …, client_ca: …}`; or bind"
                " 127.0.0.1 or unix:./api.sock"
            )
        self._path: Path | None = None
        try:
            if address.startswith("unix:"):
                self.socket, self._path = _unix(folder / address.removeprefix("unix:"))
                self.shown = f"unix:{self._path}"
            else:
                host, _, port = address.rpartition(":")
                host = host.strip("[]")
                self.socket = _tcp(host, int(port))
                shown = f"[{host}]" if ":" in host else host
                self.shown = f"http{'s' if tls else ''}://{shown}:{self.socket.getsockname()[1]}"
        except (OSError, OverflowError) as exc:
            variable = f"PRECOMPUTE_{key.replace('.', '__').upper()}"
            raise ConfigError(
                f"{key}: {address!r} cannot be bound ({exc}): is another server running there? Set"
                f" {variable} to another address"
            ) from exc

    def close(self) -> None:
        """Listen no more, and leave no file."""
        self.socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _is_local(address: str) -> bool:
    """Whether only this machine reaches an address: a Unix socket, or loopback."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unix(path: Path) -> tuple[socket.socket, Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_dead_socket(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        os.chmod(path, 0o660)
        bound.listen(2048)
    except OSError:
        bound.close()
        raise
    return bound, path


def _tcp(host: str, port: int) -> socket.socket:
    bound = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
    )
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _remove_dead_socket(path: Path) -> None:
    """Remove a socket file that no process listens on; one that is in use stays, and bind() then
    refuses."""
    if path.is_socket():
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()


# ---- TLS: from files in PEM; a new certificate is taken up without a restart, for the
# connections that come after it.


class Tls:
    """What connections are wrapped in.

    Args:
        cert: the server's certificate and those between it and its root.
        key: its private key.
        client_ca: certificates that sign clients'; None: clients need none. Read once.

    Raises:
        ConfigError: a file cannot be read, or they do not belong together.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert, self._key = cert, key
        self._seen = version_of(cert), version_of(key)
        self.context = self._loaded()
        self.context.set_alpn_protocols(["http/1.1"])
        if client_ca is not None:
            try:
                self.context.load_verify_locations(client_ca)
            except (OSError, ssl.SSLError) as exc:
                raise ConfigError(
                    f"serve.tls.client_ca: {client_ca} cannot be read: {exc}"
                ) from exc
            self.context.verify_mode = ssl.CERT_REQUIRED

    def refresh(self) -> None:
        """Take up the files if they changed; those that cannot be used are reported in the log,
        once, and the ones before stay."""
        seen = version_of(self._cert), version_of(self._key)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            # in a context of its own first: half of a pair must not come into use
            self._loaded()
            self.context.load_cert_chain(self._cert, self._key, password=_no_password)
            log.info("%s: a new certificate", self._cert)
        except ConfigError as exc:
            log.error("%s; the certificate of before stays", exc)

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(
                f"serve.tls: {self._cert} and {self._key} cannot be used: {exc}"
            ) from exc
        return context


def _no_password() -> str:
    """Where it is not given, OpenSSL would ask a person."""
    return ""


def tokens_of(spec: Mapping[str, Any]) -> Tokens | None:
    """The tokens of the file that ``spec["tokens"]`` names; None where it names none.

    Raises:
        ConfigError: it cannot be used.
    """
    return None if spec["tokens"] is None else Tokens(Path(spec["tokens"]))


def tls_of(spec: Mapping[str, Any]) -> Tls | None:
    """TLS by the files that ``spec["tls"]`` names as ``cert``, ``key`` and, maybe, ``client_ca``;
    None where there is none.

    Raises:
        ConfigError: one cannot be used.
    """
    files: Mapping[str, str] | None = spec["tls"]
    return None if files is None else Tls(**{name: Path(path) for name, path in files.items()})


def credentials_of(spec: Mapping[str, Any]) -> Credentials:
    """The credentials that callers need, by the same."""
    token = Credentials.NOTHING if spec["tokens"] is None else Credentials.TOKEN
    return token | (
        Credentials.CERTIFICATE if (spec["tls"] or {}).get("client_ca") else Credentials.NOTHING
    )
