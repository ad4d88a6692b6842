"""Serve: the HTTP API over a project's online store, with its models behind the misses."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn

from jobs.config.project import Project
from jobs.service.fallback import REFUSED_S, ViewFallback
from store.api.app import create_app
from store.errors import ConfigError, PrecomputeError
from store.lookup import Lookup
from store.online.online_store import Pointer
from store.online_url import open_online_store

log = logging.getLogger(__name__)

WARM_EVERY_S = 5.0
"""How often new snapshots are looked for, so that their models and indexes are open before the first miss or search."""


class Warmer:
    """Keeps a lookup's fallbacks and indexes open for what is live, in a thread of its own.

    ``warming`` is true until the first round is through.
    """

    def __init__(self, lookup: Lookup, fallback: ViewFallback) -> None:
        self._lookup, self._fallback = lookup, fallback
        self._stop = threading.Event()
        self._seen: dict[str, tuple[tuple[int, str], float]] = {}
        """View → its publishing that was opened last, and when to try again: a monotonic time, infinite once all of it is open."""
        self.warming = True
        self._thread = threading.Thread(target=self._loop, name="warmer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the round in progress."""
        self._stop.set()
        self._thread.join(timeout=30)

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                self._round()
            except PrecomputeError as exc:
                log.warning("cannot look for new snapshots: %s", exc)
            self.warming = False
            self._stop.wait(WARM_EVERY_S)

    def _round(self) -> None:
        for name in self._lookup.online.views():
            pointer = self._lookup.online.live(name)
            if pointer is None:
                continue
            publishing, again_at = self._seen.get(name, (None, 0.0))
            if publishing == pointer.publishing and time.monotonic() < again_at:
                continue
            is_open = self._open(name, pointer)
            # weights that are not there yet may come; nobody's miss need wait for them then
            self._seen[name] = pointer.publishing, math.inf if is_open else time.monotonic() + REFUSED_S
            if publishing != pointer.publishing:
                log.info("view %r: snapshot %d is live, %d rows", name, pointer.snapshot, pointer.rows)

    def _open(self, name: str, pointer: Pointer) -> bool:
        """Whether all is open by now; what is not was logged."""
        try:
            self._lookup.warm(pointer)
            is_open = True
        except PrecomputeError as exc:
            log.error("view %r is not searchable: %s", name, exc)
            is_open = False
        if pointer.view.fallback and not self._stop.is_set():
            self._fallback.warm(pointer)
            is_open = is_open and self._fallback.ready(pointer)
        return is_open


def serve(project: Project, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests at hand.

    Args:
        project: the configuration.
        announce: told the address once it is bound.

    Raises:
        ConfigError: the address cannot be bound.
    """
    store = project.offline
    fallback = ViewFallback(store, project.home, memory_mb=max(64, project.settings.memory_mb // 4))
    lookup = Lookup(open_online_store(project.online), project.root, fallback)
    bound, address, path = _bind(project)
    warmer = Warmer(lookup, fallback)
    try:
        app = create_app(lookup, lambda: warmer.warming, fallback.ready)
        config = uvicorn.Config(
            app, loop="uvloop", http="httptools", lifespan="off", access_log=False, log_config=None, timeout_graceful_shutdown=10
        )
        server = uvicorn.Server(config)

        def stop(*_: object) -> None:
            server.should_exit = True

        # Signals before uvicorn has its own handlers count too; and after it shut down, uvicorn raises the signal again under the handlers
        # it found, which must not end the process before it has cleaned up.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        announce(address)
        server.run(sockets=[bound])
    finally:
        warmer.stop()
        fallback.close()
        lookup.close()
        bound.close()
        if path is not None:
            path.unlink(missing_ok=True)


def _bind(project: Project) -> tuple[socket.socket, str, Path | None]:
    """(listening socket, address for people, socket file to remove)."""
    bind = project.settings.serve.bind
    try:
        if bind.startswith("unix:"):
            path = (project.folder / bind.removeprefix("unix:")).absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_dead_socket(path)
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bound.bind(str(path))
            os.chmod(path, 0o660)
            bound.listen(2048)
            return bound, f"unix:{path}", path
        host, _, port = bind.rpartition(":")
        host = host.strip("[]")
        bound = socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bound, f"http://{'[' + host + ']' if ':' in host else host}:{bound.getsockname()[1]}", None
    except (OSError, OverflowError) as exc:
        raise ConfigError(
            f"serve.bind: {bind!r} cannot be bound ({exc}): is another server running there? Set PRECOMPUTE_SERVE__BIND to another address"
        ) from exc


def _remove_dead_socket(path: Path) -> None:
    """Remove a socket file nobody listens on; one that is in use stays, and bind() then refuses."""
    if path.is_socket():
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()
