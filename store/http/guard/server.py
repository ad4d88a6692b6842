"""Server: uvicorn's server with an acceptor of our own, so that every connection is counted and
limited from the first byte."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from precompute.store.errors import ConfigError
from precompute.store.http.guard.connections import (
    HEADROOM,
    PAUSE_S,
    SECURITY_HEADERS,
    Connections,
    Tls,
)
from precompute.store.http.guard.limits import Limits
from precompute.store.http.guard.protocol import LimitedProtocol
from precompute.store.http.messages import client_of
from precompute.store.http.telemetry.instruments import Meter

log = logging.getLogger(__name__)

Protocols = Callable[[str], LimitedProtocol]
"""A client's address → the protocol of its connection."""


class Acceptor:
    """Accepts the connections of a listening socket, as many as there may be; what is more waits in
    the kernel's queue.

    Args:
        connections: those of the worker.
        listening: the socket.
        protocols: makes a connection's protocol.
        tls: None for plain HTTP.
    """

    def __init__(
        self,
        connections: Connections,
        listening: socket.socket,
        protocols: Protocols,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._connections = connections
        self._listening = listening
        self._protocols = protocols
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._again: asyncio.TimerHandle | None = None
        self._reported = False
        listening.setblocking(False)
        self._begin()

    def _begin(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listening)
        self._again = self._loop.call_later(PAUSE_S, self._begin)

    def _accept(self) -> None:
        for _ in range(HEADROOM):
            if (
                not self._connections.has_room
                and not self._drop_handshake()
                and not self._connections.make_room()
            ):
                self._pause()
                return
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if not self._reported:
                    log.error(
                        "no connection can be accepted (%s): lower serve.limits.connections, or"
                        " raise `ulimit -n`",
                        exc,
                    )
                    self._reported = True
                self._connections.make_room()
                self._pause()
                return
            accepted.setblocking(False)
            client = client_of({"client": address} if isinstance(address, tuple) else {})
            self._connections.accepted(client)
            task = self._loop.create_task(self._connect(accepted, client))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _connect(self, accepted: socket.socket, client: str) -> None:
        protocol = self._protocols(client)
        times: dict[str, Any] = (
            {}
            if self._tls is None
            else {
                "ssl_handshake_timeout": self._connections.limits.header_s,
                "ssl_shutdown_timeout": 2.0,
            }
        )
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, accepted, ssl=self._tls, **times
            )
        except (OSError, ssl.SSLError, asyncio.CancelledError):
            # no handshake: another protocol, no certificate, silence, or it had to make room
            if not protocol.made:
                self._connections.closed("handshake")
                self._connections.lost(client)
            accepted.close()

    def _drop_handshake(self) -> bool:
        if self._tls is None or not self._handshakes:
            return False
        oldest = next(iter(self._handshakes))
        del self._handshakes[oldest]
        return oldest.cancel()

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listening)
        if self._again is not None:
            self._again.cancel()
        for task in list(self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """As the loop's servers have it: nothing is left to wait for."""


GRACE_S = 5.0
"""How long a store, a search, the rest of a request or a client that reads its answer may take, for
which nothing is said, once the server is ordered to end."""

ANSWER_S = 1.0
"""Seconds from a request's deadline until its answer is on its way."""

_OTHER_FILES = 256
"""Files that a worker has open beside its connections: mapped stores and indexes, links to models
and to online stores, logs."""


class GuardedServer(uvicorn.Server):
    """Serves an application on listening sockets.

    Args:
        app: ASGI 3. Where it has an ``at_once``, and a ``posted_at_once``, as
            :class:`precompute.store.http.app.Front` has, these are queried first: what they
            answer needs no task, and goes out in one piece.
        limits: of its connections; fewer connections where this process may not have as many files
            open.
        meter: counts them.
        tls: what TCP connections are wrapped in; None for plain HTTP. Unix sockets are always
            plain.
        drain_s: how long the requests at hand may take at most, once it is ordered to end.
        waits_until: queried again and again then: when the last of them that waits for a model will
            have an answer by its own deadline (:func:`time.monotonic`).
        on_overdue: called then, in the loop, where some are not answered in time: what they wait
            for hangs. By default they are cancelled.

    Raises:
        ConfigError: this process may have hardly any file open.
    """

    def __init__(
        self,
        app: Any,
        limits: Limits,
        meter: Meter,
        tls: Tls | None = None,
        drain_s: float = 10.0,
        waits_until: Callable[[], float] = lambda: -math.inf,
        on_overdue: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                headers=[(name.decode(), value.decode()) for name, value in SECURITY_HEADERS],
            )
        )
        self._drain_s, self._waits_until, self._on_overdue = drain_s, waits_until, on_overdue
        self.connections = Connections(limits, meter, files_for(limits.connections))
        self.connections.at_once = getattr(app, "at_once", None)
        self.connections.posted_at_once = getattr(app, "posted_at_once", None)
        self._tls = tls
        if tls is not None:
            self.connections.on_tick.append(tls.refresh)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        assert sockets
        await self.lifespan.startup()
        held: Any = self.server_state.connections
        self.connections.start(held)

        def protocol(client: str) -> LimitedProtocol:
            return LimitedProtocol(
                self.connections, client, self.config, self.server_state, self.lifespan.state
            )

        def tls(listening: socket.socket) -> ssl.SSLContext | None:
            return (
                None
                if self._tls is None or listening.family == socket.AF_UNIX
                else self._tls.context
            )

        acceptors: Any = [
            Acceptor(self.connections, listening, protocol, tls(listening)) for listening in sockets
        ]
        # what uvicorn closes when it ends
        self.servers = acceptors
        self.started = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ordered to end: :meth:`run` returns once all is answered. uvicorn's would raise the
        signal again then, and what is to be closed never were."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and finish what is at hand: each request has its own time, and what has
        none :data:`GRACE_S`."""
        connections, waits_s = self.connections, self._waits_until() + ANSWER_S - time.monotonic()
        message = (
            "ordered to end: %d requests are in hand, and waited for %.3g s at most, a client %g s"
        )
        log.info(message, connections.answering, min(max(GRACE_S, waits_s), self._drain_s), GRACE_S)
        connections.end_within(GRACE_S)
        patience = asyncio.ensure_future(self._patience())
        await super().shutdown(sockets)
        patience.cancel()
        connections.stop()
        late, unread = connections.left_off["body_time"], connections.left_off["slow_reader"]
        if late or unread:
            # clients' doing, and no request that was there is without an answer
            log.warning(
                "%d requests did not arrive whole, and %d answers were not taken: their connections"
                " were closed",
                late,
                unread,
            )

    async def _patience(self) -> None:
        now = time.monotonic()
        until, most = now + GRACE_S, now + self._drain_s
        while (now := time.monotonic()) < min(until, most):
            await asyncio.sleep(0.05)
            # what is computed by then has to be sent
            until = max(until, self._waits_until() + ANSWER_S, now + self.connections.left_s())
        if unanswered := self.connections.answering:
            log.error(
                "%d requests were not answered in time: their connections are cut", unanswered
            )
            self._on_overdue()
        self.connections.cut_all()
        # ends the waiting
        self.force_exit = True


def files_for(connections: int) -> int:
    """How many of ``connections`` this process may have files open for; its own limit is raised as
    far as it may be.

    Raises:
        ConfigError: for next to none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    beside = HEADROOM + _OTHER_FILES
    wanted = connections + beside
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fit = connections if soft == resource.RLIM_INFINITY else min(connections, soft - beside)
    if fit < min(connections, 16):
        raise ConfigError(
            f"a server needs {beside + 16} open files, and may have {soft}: raise `ulimit -n`"
        )
    if fit < connections:
        log.warning(
            "serve.limits.connections: %d fit the %d files that may be open, not %d: raise"
            " `ulimit -n`",
            fit,
            soft,
            connections,
        )
    return fit
