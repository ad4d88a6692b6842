"""Acceptor: takes the connections of a listening socket, as many as there may be; the others wait in the kernel's queue.

Our own, since a server of the loop's counts no connection before its handshake, and accepts whatever comes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from precompute.store.guard.connections import HEADROOM, PAUSE_S, Connections
from precompute.store.guard.protocol import LimitedProtocol

log = logging.getLogger(__name__)

Protocols = Callable[[str], LimitedProtocol]
"""A client's address → the protocol of its connection."""


class Acceptor:
    """Accepts the connections of a listening socket, as many as there may be; what is more waits in the kernel's queue.

    Args:
        connections: those of the worker.
        listening: the socket.
        protocols: makes a connection's protocol.
        tls: None for plain HTTP.
    """

    def __init__(
        self, connections: Connections, listening: socket.socket, protocols: Protocols, tls: ssl.SSLContext | None
    ) -> None:
        self._connections, self._listening, self._protocols, self._tls = connections, listening, protocols, tls
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._again: asyncio.TimerHandle | None = None
        self._told = False
        listening.setblocking(False)
        self._begin()

    def _begin(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listening)
        self._again = self._loop.call_later(PAUSE_S, self._begin)

    def _accept(self) -> None:
        for _ in range(HEADROOM):
            if not self._connections.has_room and not self._drop_handshake() and not self._connections.make_room():
                self._pause()
                return
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if not self._told:
                    log.error("no connection can be accepted (%s): lower serve.limits.connections, or raise `ulimit -n`", exc)
                    self._told = True
                self._connections.make_room()
                self._pause()
                return
            accepted.setblocking(False)
            client = address[0] if isinstance(address, tuple) else ""
            self._connections.accepted(client)
            task = self._loop.create_task(self._connect(accepted, client))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _connect(self, accepted: socket.socket, client: str) -> None:
        protocol = self._protocols(client)
        times: dict[str, Any] = (
            {} if self._tls is None else {"ssl_handshake_timeout": self._connections.limits.header_s, "ssl_shutdown_timeout": 2.0}
        )
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls, **times)
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
