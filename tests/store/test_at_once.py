"""Answers that need no waiting go out without a task: the same bytes as by the whole way, in the
order they were asked for, under the same limits."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from precompute.store.http.guard.limits import Limits
from precompute.store.http.guard.server import GuardedServer
from precompute.store.http.messages import problem
from precompute.store.http.telemetry.instruments import CONNECTIONS_CLOSED, Meter
from tests.memory_store import MemoryStore
from tests.server import eventually
from tests.store.test_guard import replies
from tests.store.test_row_cache import House

ROW = "/v1/views/things/rows/"


class WholeWay:
    """The same application, which cannot be asked at once."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


class Counted(WholeWay):
    """Tells how many were answered at once."""

    answered = 0

    def at_once(self, scope: Any) -> Any:
        reply = self._app.at_once(scope)
        self.answered += reply is not None
        return reply

    def posted_at_once(self, scope: Any, body: bytes) -> Any:
        reply = self._app.posted_at_once(scope, body)
        self.answered += reply is not None
        return reply


@contextlib.contextmanager
def served(app: Any, **limits: Any) -> Iterator[tuple[tuple[str, int], Meter]]:
    """The address of a server in a thread."""
    meter = Meter()
    server = GuardedServer(app, Limits(**limits), meter)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        eventually(lambda: server.started)
        yield listening.getsockname(), meter
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
    assert not thread.is_alive()


def house(**options: Any) -> House:
    made = House(MemoryStore(), **options)
    made.publish(
        1,
        {
            "a": (1.5, 2.0),
            "é/b": (float("nan"), 0.25),
            "old": (2.0, 20.0),
            "ahead": (3.0, -1000.0),
            "stale": (1.0, 12.0),
        },
    )
    return made


def sent(address: tuple[str, int], data: bytes) -> bytes:
    """All that is answered, up to the answer of a last request, after which the connection is
    closed, if it was not before."""
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(data + b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return re.sub(rb"date: [^\r]*", b"date: now", answer)


def get(path: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join(
        [f"{method} {ROW}{path} HTTP/{version}", "Host: x", *headers, "", ""]
    ).encode()


ARROW = "application/vnd.apache.arrow.stream"


def post(
    body: bytes,
    *headers: str,
    path: str = "/v1/views/things/lookup",
    kind: str = "application/json",
    size: int | None = None,
) -> bytes:
    length = len(body) if size is None else size
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Content-Type: {kind}",
        f"Content-Length: {length}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


def keys(*wanted: str) -> bytes:
    return json.dumps({"keys": wanted}).encode()


def arrow_keys(*wanted: str) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"key": list(wanted)})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


LOOKUPS = [
    post(keys("a", "é/b", "old", "nobody", "ahead", "stale")),
    post(keys("a", "a"), f"Accept: {ARROW}"),
    post(keys("a", "nobody"), f"Accept: {ARROW}"),
    post(arrow_keys("a", "é/b"), kind=ARROW),
    post(keys("a"), "Connection: close"),
    post(keys("a")).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    post(keys("a"), "Cache-Control: max-age=1"),
    post(keys(*map(str, range(900)))),
    post(keys("a"), path="/v1/views/things/lookup?features=x&max_age_s=1"),
    # refused
    post(keys("a"), path="/v1/views/nothing/lookup"),
    post(keys("a"), path="/v1/views/things/lookup?nothing=1"),
    post(keys("a"), "Content-Encoding: gzip"),
    post(b"{}", kind="text/plain"),
    post(keys()),
    post(b""),
    post(b'{"keys": "a"}'),
    post(keys("a"), path="/v1/views/things/rows/a"),
    post(keys("a"), path="/v1/views/things"),
    # whose body others read, or nobody
    post(b'{"requests": []}', path="/v1/lookup"),
    post(b'{"key": "a"}', path="/v1/views/things/search"),
    post(keys("a"), path="/livez"),
    # several, of which one is answered at once, among rows
    b"".join(
        [get("a"), post(keys("a")), get("é"), post(keys("stale", "b")), post(keys("a")), get("a")]
    ),
]


REQUESTS = [
    get("a"),
    get("a?features=t,x"),
    get("%C3%A9%2Fb"),
    get("a", method="HEAD"),
    get("a", version="1.0"),
    get("a", "Connection: close"),
    get("a", "If-None-Match: *"),
    get("a", "If-None-Match: *", method="HEAD"),
    get("a", "Connection: Upgrade", "Upgrade: h2c"),
    get("a", "Content-Length: 5") + b"hello",
    get("a", "Transfer-Encoding: chunked") + b"5\r\nhello\r\n0\r\n\r\n",
    get("a", "Accept: application/vnd.apache.arrow.stream"),
    get("a", "Cache-Control: max-age=1"),
    get("a", "Cache-Control: max-age=x"),
    get("a?nothing=1"),
    get("a?features=nothing"),
    *map(get, ("nobody", "old", "ahead", "stale", "%00", "%FF", "a/b")),
    get("a").replace(b"things", b"nothing"),
    get("a", method="PUT"),
    b"".join(map(get, ("a", "nobody", "a", "a", "stale"))),
    get("a") + b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" + get("a"),
]


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_the_short_way_answers_as_the_whole_way_byte_by_byte(cache_bytes: int) -> None:
    at_once, whole = (
        Counted(house(cache_bytes=cache_bytes).app),
        WholeWay(house(cache_bytes=cache_bytes).app),
    )
    with served(at_once) as (here, _), served(whole) as (there, _):
        for data in REQUESTS + LOOKUPS:
            for _ in range(2):
                answer = sent(here, data)
                assert answer.startswith(b"HTTP/1.1 ")
                assert answer == sent(there, data), data
    # of rows and lookups, not all the rest
    assert 30 + 2 * 15 < at_once.answered < 2 * len(REQUESTS + LOOKUPS) + 8


def test_a_posted_body_in_pieces_is_answered_the_same() -> None:
    at_once = Counted(house().app)
    with (
        served(at_once, body_bytes=64) as (address, meter),
        socket.create_connection(address, timeout=20) as connection,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        whole = post(keys("a", "stale"))
        connection.sendall(whole)
        (reply,) = replies(connection, 1)
        assert at_once.answered == 1
        head = whole.index(b"\r\n\r\n") + 4
        for cut in (5, head, head + 3, len(whole) - 1):
            connection.sendall(whole[:cut])
            time.sleep(0.03)
            connection.sendall(whole[cut:])
            (again,) = replies(connection, 1)
            assert (again.status, again.json["rows"][0]["features"]) == (
                200,
                reply.json["rows"][0]["features"],
            )
        # its head alone came first, or it did not
        assert at_once.answered == 2
        # of those that come together one, so that others have their turn
        connection.sendall(whole * 3)
        assert [reply.status for reply in replies(connection, 3)] == [200] * 3
        assert at_once.answered == 3
        connection.sendall(post(keys("a"), "Expect: 100-continue"))
        assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert [reply.status for reply in replies(connection, 1)] == [200]
        assert at_once.answered == 3
        connection.sendall(post(keys("x" * 60)))
        assert [reply.status for reply in replies(connection, 1)] == [413]
        assert meter.counter(CONNECTIONS_CLOSED, "too_large").value == 1
    with (
        served(house().app, bodies_bytes=8) as (address, _),
        socket.create_connection(address, timeout=20) as connection,
    ):
        # with what stands before it as many bytes as the whole, which is not there yet
        connection.sendall(get("a", "X: " + "y" * 99) + whole[:-5])
        assert [reply.status for reply in replies(connection, 2)] == [200, 503]


def test_access_is_checked_before_it_and_once() -> None:
    asked: list[str] = []

    def access(scope: Any) -> Any:
        asked.append(scope["raw_path"].rpartition(b"/")[2].decode())
        return problem(401, "no_token", "send one") if asked[-1] == "old" else None

    with served(house(access=access).app) as (address, _):
        for key, status in (("a", 200), ("old", 401), ("nobody", 404)):
            assert sent(address, get(key)).split(b" ")[1] == b"%d" % status
    assert asked == ["a", "livez", "old", "livez", "nobody", "livez"]


def test_many_at_once_are_answered_in_order_and_not_without_end() -> None:
    with (
        served(house().app, pipelined=4) as (address, meter),
        socket.create_connection(address, timeout=20) as connection,
    ):
        connection.sendall(get("a") * 6)
        assert [reply.status for reply in replies(connection, 6)] == [200] * 6
        connection.sendall(get("a") * 40)
        # one at once, one that is answered by a task, four that wait for it
        assert [reply.status for reply in replies(connection, 7)] == [200] * 6 + [429]
        assert meter.counter(CONNECTIONS_CLOSED, "too_large").value == 1


def test_a_single_request_does_not_wait_for_all_of_anothers() -> None:
    asked: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def access(scope: Any) -> None:
        asked.append(scope["raw_path"].rpartition(b"/")[2].decode())
        if asked[-1] == "hold":
            begun.set()
            go_on.wait(20)

    with served(house(access=access).app) as (address, _), contextlib.ExitStack() as stack:
        many, one, hold = (
            stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(3)
        )
        for connection in (many, one):
            connection.sendall(get("a"))
            replies(connection, 1)
        asked.clear()
        hold.sendall(get("hold"))
        # while nobody is answered, both come
        begun.wait(20)
        many.sendall(get("a") * 17)
        one.sendall(get("old"))
        time.sleep(0.05)
        go_on.set()
        assert len(replies(one, 1)) == 1
        assert len(replies(many, 17)) == 17
    assert asked.index("old") <= 3, asked


def test_a_client_that_does_not_take_these_answers_is_cut_off_too() -> None:
    made = House(MemoryStore())
    made.publish(1, {str(i): (float(i), 0.0) for i in range(10)})
    with (
        served(made.app, write_s=0.2, pipelined=100_000) as (address, meter),
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(address)
        with contextlib.suppress(OSError):
            for _ in range(2000):
                connection.sendall(get("1") * 4)
        eventually(lambda: meter.counter(CONNECTIONS_CLOSED, "slow_reader").value == 1)
