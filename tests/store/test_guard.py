"""What one client may take of a server: every limit is kept, is told where somebody may read it,
and costs nobody else."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from precompute.store.http.guard.connections import Connections
from precompute.store.http.guard.limits import Limits
from precompute.store.http.guard.protocol import LimitedProtocol
from precompute.store.http.guard.server import Acceptor, GuardedServer
from precompute.store.http.telemetry.instruments import CONNECTIONS_CLOSED, Meter
from tests.server import Reply, eventually, read_reply

MIB = 2**20


class Guarded:
    """A guarded server in a thread, over an application that answers by path."""

    def __init__(self, limits: Limits, **options: Any) -> None:
        self.meter = Meter()
        self.begun: list[str] = []
        self.seen: list[str] = []
        self.go_on = threading.Event()
        self.server = GuardedServer(self._app, limits, self.meter, **options)
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
        # the kernel would take megabytes, and know nothing of who reads them
        self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        self.address = self.listening.getsockname()
        self._thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.listening]}
        )

    def __enter__(self) -> Guarded:
        self._thread.start()
        eventually(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        assert self.server.connections.open == 0

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.begun.append(path)
        body = b""
        if path != "/unread":
            more = True
            while more:
                event = await receive()
                if event["type"] == "http.disconnect":
                    self.seen.append(f"{path} disconnected")
                    return
                body += event["body"]
                more = event["more_body"]
        if path == "/wait":
            while not self.go_on.is_set():
                await asyncio.sleep(0.01)
        if path.startswith("/pieces/"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(int(path.removeprefix("/pieces/"))):
                await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            self.seen.append(path)
            return
        if path == "/names":
            body = b" ".join(name for name, _ in scope["headers"])
        answer = (
            body
            if path == "/names"
            else bytes(int(path.removeprefix("/bytes/")))
            if path.startswith("/bytes/")
            else path.encode() + b" %d" % len(body)
        )
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})
        self.seen.append(path)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(20)
        connection.connect(self.address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def raw(self, data: bytes) -> Reply:
        with self.connect() as connection:
            connection.sendall(data)
            return read_reply(connection)

    def get(self, path: str = "/") -> Reply:
        return self.raw(request(path))

    def closed(self, why: str) -> int:
        return int(self.meter.counter(CONNECTIONS_CLOSED, why).value)


def request(path: str = "/", *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.contextmanager
def guarded(**limits: Any) -> Iterator[Guarded]:
    """A server that answers as before, afterwards."""
    with Guarded(Limits(**limits)) as server:
        yield server
        assert server.get("/after").body == b"/after 0"


class Stream:
    """Reads answers that follow each other: http.client's reads ahead, and forgets it."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def makefile(self, mode: str) -> Any:
        return self

    def replies(self, number: int) -> list[Reply]:
        connection: Any = self
        return [read_reply(connection) for _ in range(number)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        """The file stays open."""


def replies(connection: socket.socket, number: int) -> list[Reply]:
    """The next answers."""
    return Stream(connection).replies(number)


def bodies(connection: socket.socket, number: int) -> list[bytes]:
    return [reply.body for reply in replies(connection, number)]


def check_closed(connection: socket.socket) -> None:
    """Its server has closed it."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass


# ---- clients that send no more


def test_a_client_that_sends_no_more_has_all_its_answers() -> None:
    with guarded() as server, server.connect() as connection:
        connection.sendall(request("/wait") + request("/bytes/3"))
        eventually(lambda: server.begun == ["/wait"])
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
        server.go_on.set()
        first, last = Stream(connection).replies(2)
        assert (first.body, first.headers.get("connection")) == (b"/wait 0", None)
        assert (last.body, last.headers["connection"]) == (bytes(3), "close")
        assert connection.recv(1) == b""


def test_no_place_is_held_for_a_client_that_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.store.http.guard.connections.LAST_S", 0.05)
    with guarded(header_s=0.4) as server:
        with server.connect() as connection, server.connect(4096) as slow:
            connection.sendall(request("/wait"))
            slow.sendall(request("/pieces/64"))
            eventually(lambda: set(server.begun) == {"/wait", "/pieces/64"})
            for one in (connection, slow):
                one.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            eventually(lambda: server.server.connections.open == 1)
            time.sleep(0.2)
            assert len(read_reply(slow).body) == 64 * 65536
        server.go_on.set()


# ---- sizes


@pytest.fixture(scope="module")
def small() -> Iterator[Guarded]:
    with guarded(headers_bytes=1000, url_bytes=200, body_bytes=5000, pipelined=4) as server:
        yield server


@pytest.mark.parametrize("pieces", [1, 2, 50])
@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (request("/", "X: " + "x" * 900), 200, None),
        (request("/", "X: " + "x" * 1000), 431, "headers_too_large"),
        (request("/", *(f"X{i}: {'x' * 30}" for i in range(30))), 431, "headers_too_large"),
        # a header that never ends
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000, 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"x" * 100_000, 431, "headers_too_large"),
        (request("/" + "u" * 199), 200, None),
        (request("/" + "u" * 200), 414, "url_too_long"),
        (request("/?" + "u" * 200), 414, "url_too_long"),
        (b"GET /" + b"u" * 100_000, 414, "url_too_long"),
        (request("/", method="POST", body=b"b" * 5000), 200, None),
        (request("/", method="POST", body=b"b" * 5001), 413, "body_too_large"),
        (request("/", method="POST", body=b"b" * 400_000), 413, "body_too_large"),
        (
            request("/", "Transfer-Encoding: chunked", method="POST")
            + b"".join([b"3e8\r\n" + b"b" * 1000 + b"\r\n"] * 6),
            413,
            "body_too_large",
        ),
        (
            request("/", "Transfer-Encoding: chunked", method="POST")
            + b"1\r\nb\r\n" * 2000
            + b"0\r\n\r\n",
            200,
            None,
        ),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_held(
    small: Guarded, data: bytes, status: int, code: str | None, pieces: int
) -> None:
    with small.connect() as connection:
        size = -(-len(data) // pieces)
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(data), size):
                connection.sendall(data[at : at + size])
                time.sleep(0.001)
        reply = read_reply(connection)
        if code is None:
            assert reply.status == status
        else:
            reply.check_problem(status, code)
            assert (reply.headers["connection"], reply.headers["x-content-type-options"]) == (
                "close",
                "nosniff",
            )
            check_closed(connection)


def test_a_body_refused_midway_reaches_its_route_as_a_disconnect(small: Guarded) -> None:
    path = f"/midway{time.monotonic_ns()}"
    with small.connect() as connection:
        connection.sendall(
            request(path, "Transfer-Encoding: chunked", method="POST") + b"1\r\nb\r\n"
        )
        eventually(lambda: path in small.begun)
        connection.sendall(b"2000\r\n" + b"b" * 0x2000)
        read_reply(connection).check_problem(413, "body_too_large")
        eventually(lambda: f"{path} disconnected" in small.seen)


def test_an_unwanted_body_is_read_for_a_while_and_no_longer(small: Guarded) -> None:
    with small.connect() as connection:
        connection.sendall(request("/unread", "Content-Length: 1000000000", method="POST"))
        reply = read_reply(connection)
        assert (reply.status, reply.body) == (200, b"/unread 0")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 200 * MIB:
                connection.sendall(bytes(MIB))
                sent += MIB
        assert 10 * MIB < sent < 60 * MIB


def test_pipelined_requests_are_answered_in_order_and_bounded(small: Guarded) -> None:
    with small.connect() as connection:
        connection.sendall(b"".join(request(f"/{i}") for i in range(4)))
        assert bodies(connection, 4) == [f"/{i} 0".encode() for i in range(4)]
        connection.sendall(b"".join(request(f"/{i}") for i in range(1000)))
        *answered, last = replies(connection, 6)
        assert [reply.body for reply in answered] == [f"/{i} 0".encode() for i in range(5)]
        last.check_problem(429, "too_many_pipelined")
        check_closed(connection)


def test_a_bad_request_behind_good_ones_is_refused_after_their_answers(small: Guarded) -> None:
    post = request("/post", method="POST", body=b"b" * 5001)
    for bad, status in ((b"\x00\x01\r\n\r\n", 400), (request("/" + "u" * 200), 414), (post, 413)):
        with small.connect() as connection:
            connection.sendall(request("/first") + request("/second") + bad + request("/never"))
            first, second, last = replies(connection, 3)
            assert (first.body, second.body) == (b"/first 0", b"/second 0")
            last.check_problem(status)
            check_closed(connection)
    assert "/never" not in small.begun


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n" * 10 + b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(small: Guarded, data: bytes) -> None:
    with small.connect() as connection:
        connection.sendall(data)
        read_reply(connection).check_problem(400, "bad_http")
        check_closed(connection)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET / HTTP/1.1", "Host: x"], 200),
        (["GET / HTTP/1.1", "host: [::1]:8080"], 200),
        (["GET / HTTP/1.1", "Host:"], 200),
        (["GET / HTTP/1.1", "X: y"], 400),
        (["GET / HTTP/1.1", "Host: x", "Host: x"], 400),
        (["GET / HTTP/1.1", "Host: x y"], 400),
        (["GET / HTTP/1.1", "Host: user@x"], 400),
        (["GET / HTTP/1.1", "Host: x:8o"], 400),
        (["GET / HTTP/1.0"], 200),
        (["GET / HTTP/1.0", "Host: x", "Host: y"], 400),
    ],
)
def test_a_request_names_one_host(small: Guarded, lines: list[str], status: int) -> None:
    reply = small.raw("\r\n".join([*lines, "", ""]).encode())
    assert reply.status == status
    if status != 200:
        reply.check_problem(400, "bad_host")


def test_another_protocol_is_not_taken_up(small: Guarded) -> None:
    for upgrade in ("websocket", "h2c"):
        with small.connect() as connection:
            connection.sendall(
                request("/up", "Connection: Upgrade", f"Upgrade: {upgrade}") + b"\x81\x00" * 100
            )
            reply = read_reply(connection)
            assert (reply.status, reply.body, reply.headers["connection"]) == (
                200,
                b"/up 0",
                "close",
            )
            check_closed(connection)


def test_all_bodies_together_are_bounded_and_released() -> None:
    with guarded(body_bytes=MIB, bodies_bytes=2 * MIB) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(server.connect()) for _ in range(2)]
        for connection in held:
            connection.sendall(
                request("/held", f"Content-Length: {MIB}", method="POST") + bytes(MIB - 1)
            )
        eventually(lambda: server.server.connections.bodies == 2 * MIB - 2)
        refused = server.raw(request("/", method="POST", body=b"more"))
        refused.check_problem(503, "busy")
        assert server.get("/none").body == b"/none 0"
        held[0].close()
        eventually(lambda: server.server.connections.bodies == MIB - 1)
        held[1].sendall(b"x")
        assert read_reply(held[1]).body == b"/held %d" % MIB
        assert server.raw(request("/", method="POST", body=bytes(MIB))).body == b"/ %d" % MIB
        eventually(lambda: server.server.connections.bodies == 0)


def test_a_refused_client_that_lingers_makes_room_for_others() -> None:
    with guarded(connections=3) as server, contextlib.ExitStack() as stack:
        for _ in range(50):
            connection = stack.enter_context(server.connect())
            connection.sendall(b"nonsense\r\n\r\n")
            read_reply(connection).check_problem(400)
            assert server.get("/honest").body == b"/honest 0"


def test_a_client_that_goes_midway_leaves_no_error_behind(caplog: pytest.LogCaptureFixture) -> None:
    with guarded() as server:
        for pipelined in (1, 3):
            for path in ("/wait", f"/bytes/{8 * MIB}"):
                server.go_on.clear()
                with server.connect() as connection:
                    connection.sendall(request(path) * pipelined)
                    eventually(lambda: path in server.begun)  # noqa: B023
                server.go_on.set()
                eventually(lambda: server.server.connections.open == 0)
                server.begun.clear()
        assert server.get().status == 200
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


# ---- times


@pytest.fixture(scope="module")
def hasty() -> Iterator[Guarded]:
    with guarded(
        header_s=0.4, body_s=0.4, idle_s=0.4, write_s=0.4, unsent_bytes=64 * MIB
    ) as server:
        yield server


def test_a_silent_connection_is_closed(hasty: Guarded) -> None:
    before = hasty.closed("header_time")
    with hasty.connect() as connection:
        started = time.monotonic()
        assert connection.recv(1) == b""
        assert time.monotonic() - started > 0.2
    assert hasty.closed("header_time") == before + 1


@pytest.mark.parametrize(
    ("begun", "why"),
    [
        (b"GET / HTTP/1.1\r\nX", "header_time"),
        (request("/first") + b"GET / HTTP/1.1\r\nX", "header_time"),
        (request("/", "Content-Length: 4000", method="POST"), "body_time"),
        (request("/", "Transfer-Encoding: chunked", method="POST") + b"fff\r\n", "body_time"),
    ],
)
def test_one_byte_at_a_time_gains_no_time(hasty: Guarded, begun: bytes, why: str) -> None:
    before = hasty.closed(why)
    with hasty.connect() as connection:
        connection.sendall(begun)
        if b"/first" in begun:
            assert read_reply(connection).body == b"/first 0"
        started, sent = time.monotonic(), 0
        connection.settimeout(0.05)
        first = b""
        while not first:
            assert time.monotonic() - started < 10
            connection.sendall(b"x")
            sent += 1
            with contextlib.suppress(TimeoutError):
                first = connection.recv(1, socket.MSG_PEEK)
        connection.settimeout(20)
        read_reply(connection).check_problem(408, "too_slow")
        assert sent > 2
    assert hasty.closed(why) == before + 1


def test_an_idle_connection_is_closed_and_one_that_is_used_is_not(hasty: Guarded) -> None:
    before = hasty.closed("idle")
    with hasty.connect() as connection:
        for _ in range(8):
            connection.sendall(request("/used"))
            assert read_reply(connection).body == b"/used 0"
            time.sleep(0.1)
        assert hasty.closed("idle") == before
        assert connection.recv(1) == b""
    assert hasty.closed("idle") == before + 1


def test_a_client_that_waits_for_the_server_loses_no_time(hasty: Guarded) -> None:
    hasty.go_on.clear()
    with hasty.connect() as connection:
        connection.sendall(request("/wait") + request("/large", method="POST", body=bytes(300_000)))
        time.sleep(0.6)  # longer than any of its limits
        hasty.go_on.set()
        assert bodies(connection, 2) == [b"/wait 0", b"/large 300000"]


def test_a_client_that_does_not_take_its_answer_is_cut_off(hasty: Guarded) -> None:
    before = hasty.closed("slow_reader")
    with hasty.connect(receive_buffer=4096) as connection:
        connection.sendall(request(f"/bytes/{MIB}"))
        eventually(lambda: hasty.closed("slow_reader") == before + 1)


def test_a_client_that_takes_it_steadily_is_not(hasty: Guarded) -> None:
    with hasty.connect(receive_buffer=65536) as connection:
        connection.sendall(request(f"/bytes/{2 * MIB}"))
        taken = 0
        while taken < 2 * MIB:
            taken += len(connection.recv(60_000))
            time.sleep(0.015)


def test_of_too_many_bytes_that_wait_the_most_go(hasty: Guarded) -> None:
    before = hasty.closed("slow_reader")
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(hasty.connect(receive_buffer=4096)) for _ in range(4)]
        for connection, mib in zip(connections, (10, 40, 10, 10), strict=True):
            connection.sendall(request(f"/bytes/{mib * MIB}"))
        check_closed(connections[1])
        assert hasty.closed("slow_reader") == before + 1
        for i in (0, 2, 3):
            assert len(read_reply(connections[i]).body) == 10 * MIB


# ---- numbers


def test_eleven_hundred_silent_connections_shut_none_out() -> None:
    with guarded(connections=200) as server, contextlib.ExitStack() as stack:
        used = stack.enter_context(server.connect())
        used.sendall(request("/used"))
        assert read_reply(used).body == b"/used 0"
        silent: list[socket.socket] = []
        for i in range(1100):
            silent.append(stack.enter_context(server.connect()))
            if i % 100 == 99:
                assert server.get("/other").body == b"/other 0"
        assert server.server.connections.open <= 200 + 64
        assert server.closed("evicted") >= 800
        # those that never asked anything went first
        used.sendall(request("/used"))
        assert read_reply(used).body == b"/used 0"
        check_closed(silent[0])


def test_where_all_are_at_work_the_next_is_refused_for_now() -> None:
    with guarded(connections=3) as server, contextlib.ExitStack() as stack:
        working = [stack.enter_context(server.connect()) for _ in range(3)]
        for connection in working:
            connection.sendall(request("/wait"))
        eventually(lambda: server.begun.count("/wait") == 3)
        reply = server.get()
        reply.check_problem(503, "too_many_connections")
        assert reply.headers["retry-after"] == "1"
        server.go_on.set()
        assert [read_reply(connection).body for connection in working] == [b"/wait 0"] * 3


def test_beyond_those_that_are_refused_the_rest_waits_to_be_accepted() -> None:
    with guarded(connections=2) as server, contextlib.ExitStack() as stack:
        working = [stack.enter_context(server.connect()) for _ in range(2)]
        for connection in working:
            connection.sendall(request("/wait"))
        eventually(lambda: server.begun.count("/wait") == 2)
        more = [stack.enter_context(server.connect()) for _ in range(200)]
        time.sleep(0.2)
        assert server.server.connections.open <= 2 + 64
        server.go_on.set()
        assert [read_reply(connection).body for connection in working] == [b"/wait 0"] * 2
        for connection in working + more[:100]:
            connection.close()
        more[-1].sendall(request("/late"))
        assert read_reply(more[-1]).status in (200, 503)


def test_a_tick_that_fails_stops_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as a file of tokens that cannot be read, beside the deadlines of all connections."""
    done: list[int] = []

    def fail() -> None:
        raise RuntimeError("no such file")

    with guarded(header_s=0.2) as server:
        server.server.connections.on_tick += [fail, lambda: done.append(1)]
        eventually(lambda: len(done) > 2)
    assert "RuntimeError: no such file" in caplog.text


def test_one_client_has_as_many_as_it_may() -> None:
    with guarded(connections_per_client=2) as server, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(server.connect()) for _ in range(2))
        for connection in (first, second):
            connection.sendall(request())
            assert read_reply(connection).status == 200
        server.get().check_problem(503, "too_many_connections")
        first.close()
        eventually(lambda: server.server.connections.open == 1)


def test_a_client_of_ipv6_is_all_of_its_network() -> None:
    """One host may have 2⁶⁴ addresses, each good for as many connections as it may have."""
    addresses: list[Any] = [("2001:db8::1", 5, 0, 0), ("2001:db8::2", 5, 0, 0), ("192.0.2.1", 5)]
    expected, clients = ["2001:db8::", "2001:db8::", "192.0.2.1", ""], list[str]()
    ends: list[tuple[socket.socket, socket.socket]] = []

    class Listening(socket.socket):
        def accept(self) -> Any:
            if len(ends) > len(addresses):
                raise BlockingIOError
            ends.append(socket.socketpair())
            return ends[-1][0], [*addresses, ""][len(ends) - 1]

    class Closing(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.abort()

    def protocol(client: str) -> Any:
        clients.append(client)
        return Closing()

    async def scene() -> None:
        connections = Connections(Limits(), Meter(), 10)
        connections.start(())
        with Listening(socket.AF_UNIX) as listening:
            acceptor = Acceptor(connections, listening, protocol, None)
            acceptor._accept()
            await asyncio.gather(*acceptor._handshakes)
            # the transports' turn to close
            await asyncio.sleep(0)
            acceptor.close()
        connections.stop()

    asyncio.run(scene())
    for end in ends:
        end[1].close()
    assert clients == expected


def test_as_many_connections_as_files_fit(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (400, {hard}));"
        "from precompute.store.http.guard.server import files_for; print(files_for(1000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    told = []
    for hard in (4096, 500, 330):
        lines = [sys.executable, "-c", code.format(hard=hard).replace("400", str(min(400, hard)))]
        done = subprocess.run(lines, capture_output=True, text=True, timeout=60)
        told.append(done.stdout.split() if done.returncode == 0 else done.stderr.splitlines()[-1])
    assert told[:2] == [["1000", "1320"], ["180", "500"]]
    assert "raise `ulimit -n`" in told[2]


def test_ordered_to_end_it_answers_what_is_there_and_closes_the_idle() -> None:
    with Guarded(Limits()) as server, server.connect() as idle, server.connect() as busy:
        busy.sendall(request("/wait"))
        eventually(lambda: "/wait" in server.begun)
        server.server.should_exit = True
        assert idle.recv(1) == b""
        server.go_on.set()
        assert read_reply(busy).body == b"/wait 0"


@pytest.mark.parametrize("waits_s", [0.0, 0.6])
def test_ordered_to_end_it_waits_no_longer_than_its_last_request(
    monkeypatch: pytest.MonkeyPatch, waits_s: float
) -> None:
    monkeypatch.setattr("precompute.store.http.guard.server.GRACE_S", 0.1)
    monkeypatch.setattr("precompute.store.http.guard.server.ANSWER_S", 0.1)
    overdue: list[float] = []
    until = math.inf

    def begun_to_end() -> float:
        nonlocal until
        until = min(until, time.monotonic() + waits_s)
        return until

    options = {
        "drain_s": 60.0,
        "waits_until": begun_to_end,
        "on_overdue": lambda: overdue.append(time.monotonic()),
    }
    with Guarded(Limits(), **options) as server, server.connect() as hangs:
        hangs.sendall(request("/wait"))
        eventually(lambda: "/wait" in server.begun)
        server.server.should_exit = True
        with contextlib.suppress(ConnectionResetError):
            assert hangs.recv(1) == b""
        assert (len(overdue), server.closed("overdue")) == (1, 1)
        assert overdue[0] >= until


def test_ordered_to_end_it_waits_for_no_client_longer_than_it_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("precompute.store.http.guard.server.GRACE_S", 0.3)
    # looked at often, and far beyond what the test may take
    with (
        Guarded(Limits(header_s=0.2), drain_s=60.0) as server,
        contextlib.ExitStack() as stack,
        caplog.at_level("INFO"),
    ):
        silent, slow, busy = (
            stack.enter_context(server.connect(size)) for size in (None, 4096, None)
        )
        silent.sendall(request("/never", "Content-Length: 1000", method="POST") + b"{")
        slow.sendall(request(f"/bytes/{8 * MIB}"))
        busy.sendall(request("/wait"))
        eventually(lambda: set(server.begun) == {"/never", f"/bytes/{8 * MIB}", "/wait"})
        time.sleep(0.1)
        began = time.monotonic()
        server.server.should_exit = True
        threading.Timer(0.1, server.go_on.set).start()
        assert read_reply(busy).body == b"/wait 0"
        assert read_reply(silent).status == 408
        check_closed(slow)
        assert time.monotonic() - began < 10
    told = [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "precompute.store.http.guard.server"
    ]
    assert told == [
        (
            "INFO",
            "ordered to end: 1 requests are in hand, and waited for 0.3 s at most, a client 0.3 s",
        ),
        (
            "WARNING",
            "1 requests did not arrive whole, and 1 answers were not taken: their connections were closed",
        ),
    ]


@pytest.mark.parametrize("piece", [b"x: " + b"y" * 900 + b"\r\n", b"y" * 900], ids=["many", "one"])
def test_what_follows_a_body_in_chunks_is_limited_like_a_head(piece: bytes) -> None:
    with guarded() as server, server.connect() as connection:
        connection.sendall(
            request("/x", "Transfer-Encoding: chunked", method="POST") + b"3\r\nabc\r\n0\r\nx: "
        )
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                connection.sendall(piece)
        read_reply(connection).check_problem(431, "headers_too_large")
        assert server.closed("too_large") == 1


def test_what_follows_a_body_in_chunks_is_no_header(small: Guarded) -> None:
    chunks = b"3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\nHost: y\r\n\r\n"
    with small.connect() as connection:
        connection.sendall(
            request("/names", "Transfer-Encoding: chunked", method="POST")
            + chunks
            + request("/next")
        )
        assert bodies(connection, 2) == [b"host transfer-encoding", b"/next 0"]


def test_an_answer_in_pieces_must_leave_as_fast_as_one_in_one() -> None:
    """One who takes a piece now and then holds what all who are sent much share."""
    with guarded(write_s=0.4) as server, server.connect(receive_buffer=4096) as connection:
        connection.sendall(request("/pieces/400"))
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while connection.recv(65536) and time.monotonic() - began < 8:
                time.sleep(0.02)
        assert server.closed("slow_reader") == 1


# ---- what it leans on

OF_THE_PROTOCOL = {
    "_start_asgi_task", "connections", "cycle", "expect_100_continue", "flow", "headers", "parser",
    "pipeline", "scheme", "scope", "server_state", "transport",
}  # fmt: skip
OF_THE_SERVER = {
    "config",
    "force_exit",
    "lifespan",
    "server_state",
    "servers",
    "should_exit",
    "started",
}
OF_A_CYCLE = {
    "disconnected",
    "keep_alive",
    "message_event",
    "response_complete",
    "response_started",
}
OF_THE_FLOW = {"read_paused", "resume_reading", "write_paused"}
OF_THE_STATE = {"connections", "default_headers", "total_requests"}


def _inherited(there: object, ours: type) -> set[str]:
    """Attributes of ``self`` that a class uses, and has from another."""
    nodes = ast.walk(ast.parse(inspect.getsource(ours)))
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return used & set(dir(there)) - set(vars(ours))


def test_each_part_of_uvicorn_that_is_used_is_named_and_there() -> None:
    state = ServerState()
    protocol = HttpToolsProtocol(uvicorn.Config(Mock(), loop="asyncio"), state, {}, Mock())
    flow, event = FlowControl(Mock()), asyncio.Event()
    scope: Any = {"type": "http"}
    logger = logging.getLogger("test")
    cycle = RequestResponseCycle(
        scope, Mock(), flow, logger, logger, False, [], event, False, True, lambda: None
    )
    server = uvicorn.Server(uvicorn.Config(Mock()))
    assert _inherited(protocol, LimitedProtocol) | {"_start_asgi_task"} == OF_THE_PROTOCOL
    assert _inherited(server, GuardedServer) | {"lifespan", "servers"} == OF_THE_SERVER
    for of, names in (
        (protocol, OF_THE_PROTOCOL),
        (server, OF_THE_SERVER - {"lifespan", "servers"}),
        (cycle, OF_A_CYCLE),
        (flow, OF_THE_FLOW),
        (state, OF_THE_STATE),
    ):
        assert names <= set(dir(of)), type(of)
