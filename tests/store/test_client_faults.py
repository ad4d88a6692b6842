"""The client against servers that answer late, wrongly, not at all, or not now."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest import mock

import httpcore2
import pyarrow as pa
import pytest

from precompute.store.client import AsyncClient, Client, Tls, calls
from precompute.store.client.attempts import (
    FIRST_PAUSE_S,
    MOST_TOKENS,
    Attempts,
    Failure,
)
from precompute.store.client.calls import Reply, retry_after_s, strays
from precompute.store.client.transport import AnswerEnd, Exchange, _Network
from precompute.store.errors import (
    ConfigError,
    DeadlineError,
    DeniedError,
    NoAnswerError,
    OverloadedError,
    PrecomputeError,
    RequestError,
)
from precompute.store.wire.arrow import encode_arrow
from precompute.store.wire.bodies import ViewLookupRequest
from tests.clients import features_of, opened
from tests.hostile import Hostile, Visit
from tests.server import eventually
from tests.store.test_access import certificate

KINDS = pytest.mark.parametrize("kind", ["blocking", "async"])

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n"


ROW_OF_BASE64 = (
    b'{"view":"v","snapshot":1,"model":"m","base64":{"x":"float32"},"key":"a","status":"fresh",'
    b'"source":"store","computed_at":null,"age_s":1,"ttl_s":1,"features":{"x":"%b"}}'
)


def good(visit: Visit) -> None:
    visit.answer()


def held(visit: Visit) -> None:
    visit.hold()


def closed(visit: Visit) -> None:
    visit.close()


def refusing(visit: Visit) -> None:
    visit.answer(503, b"{}", b"Retry-After: 1")


def problem(status: int, code: str, **more: Any) -> bytes:
    fields = {
        "type": f"urn:precompute:problem:{code}",
        "title": code,
        "status": status,
        "detail": f"it is {code}",
    } | more
    return repr(fields).replace("'", '"').encode()


# ---- one deadline for all of it


@KINDS
@pytest.mark.parametrize(
    "behaviour",
    [
        held,
        lambda visit: visit.drip(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000, 0.01),
        lambda visit: visit.drip(ANSWER, 0) or visit.drip(b" " * 13, 0.1),
    ],
    ids=["silent", "head in drops", "body in drops"],
)
def test_the_deadline_is_of_the_whole_call(kind: str, behaviour: Callable[[Visit], None]) -> None:
    with Hostile(behaviour) as server, opened(kind, server.url) as client:
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=r"timed out"):
            client.views(timeout_s=0.3)
        assert time.monotonic() - began >= 0.3
        assert len(server.requests) == 1


@KINDS
def test_a_server_that_reads_nothing_is_given_up_at_the_deadline(kind: str) -> None:
    """Its listener's queue takes the connection, and buffers the request's beginning."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with opened(kind, url) as client, pytest.raises(DeadlineError):
            client.rows("numbers", ["k" * 100_000] * 200, timeout_s=0.3)


@KINDS
def test_a_pause_never_goes_past_the_deadline(kind: str) -> None:
    """Who must not come back before the deadline is told so at once."""
    with Hostile(refusing) as server, opened(kind, server.url) as client:
        with pytest.raises(OverloadedError) as caught:
            client.views(timeout_s=0.9)
        assert caught.value.retry_after_s == 1
        assert len(server.requests) == 1


@KINDS
def test_waiting_for_a_connection_counts_and_the_limit_holds(kind: str) -> None:
    with (
        Hostile(held) as server,
        opened(kind, server.url, connections=3) as client,
        ThreadPoolExecutor(12) as threads,
    ):
        holding = [threads.submit(client.views, timeout_s=1) for _ in range(3)]
        eventually(lambda: len(server.requests) == 3)
        waiting = [threads.submit(client.views, timeout_s=0.2) for _ in range(9)]
        for one in waiting:
            with pytest.raises(DeadlineError):
                one.result()
        assert not any(one.done() for one in holding)
        assert server.most_open == len(server.requests) == 3
        for one in holding:
            with pytest.raises(DeadlineError):
                one.result()


@pytest.mark.parametrize("behaviour", [held, closed, refusing, good])
def test_nothing_is_left_open(behaviour: Callable[[Visit], None]) -> None:
    """A ResourceWarning would be an error; the server sees every connection end."""
    for kind in ("blocking", "async"):
        with Hostile(behaviour) as server:
            with (
                opened(kind, server.url, connections=4) as client,
                ThreadPoolExecutor(8) as threads,
            ):
                for done in [threads.submit(client.views, timeout_s=0.2) for _ in range(24)]:
                    with contextlib.suppress(PrecomputeError):
                        done.result()
            limit = time.monotonic() + 10
            while server.open and behaviour is not held:
                assert time.monotonic() < limit
                time.sleep(0.01)


# ---- asking again


@KINDS
def test_a_connection_that_ends_is_replaced_at_once(kind: str) -> None:
    with Hostile(lambda visit: closed(visit) if visit.number == 0 else good(visit)) as server:
        with opened(kind, server.url, retries=0) as client:
            assert client.views() == []
        assert len(server.requests) == 2


@KINDS
@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_request_that_is_refused_for_now_is_retried(kind: str, status: int) -> None:
    with Hostile(
        lambda visit: visit.answer(status, b"busy") if visit.number < 2 else good(visit)
    ) as server:
        with opened(kind, server.url) as client:
            assert client.views() == []
        assert len(server.requests) == 3


@KINDS
def test_it_comes_back_not_before_retry_after(kind: str) -> None:
    at = list[float]()

    def behaviour(visit: Visit) -> None:
        at.append(time.monotonic())
        refusing(visit) if visit.number == 0 else good(visit)

    with Hostile(behaviour) as server, opened(kind, server.url) as client:
        assert client.views(timeout_s=20) == []
    assert at[1] - at[0] >= 1


@KINDS
@pytest.mark.parametrize(
    ("status", "body", "error", "code"),
    [
        (400, problem(400, "bad_request"), RequestError, "bad_request"),
        (401, problem(401, "no_token"), DeniedError, "no_token"),
        (403, b"<html>", DeniedError, "http_error"),
        (404, b"<html>", NoAnswerError, None),
        (400, b"", NoAnswerError, None),
        (413, b'{"type":"about:blank","title":"","status":413,"detail":""}', NoAnswerError, None),
        (
            404,
            problem(404, "unknown_entity", snapshot=1, model="m"),
            RequestError,
            "unknown_entity",
        ),
        (500, problem(500, "internal_error"), NoAnswerError, None),
        (504, problem(504, "deadline"), RequestError, "deadline"),
        (307, b"", NoAnswerError, None),
    ],
)
def test_what_would_be_refused_again_is_sent_once(
    kind: str, status: int, body: bytes, error: type[Exception], code: str | None
) -> None:
    headers = [b"Content-Type: application/problem+json", b"Location: /elsewhere"]
    with (
        Hostile(lambda visit: visit.answer(status, body, *headers)) as server,
        opened(kind, server.url) as client,
    ):
        with pytest.raises(error) as caught:
            client.views()
        assert getattr(caught.value, "code", None) == code
        assert len(server.requests) == 1


@KINDS
def test_a_server_that_refuses_all_gets_few_more_requests(kind: str) -> None:
    """The budget: what was saved up, and then a tenth; without it, 100 calls were 300 requests."""
    with (
        Hostile(lambda visit: visit.answer(503, b"{}")) as server,
        opened(kind, server.url) as client,
    ):
        for _ in range(100):
            with pytest.raises(OverloadedError):
                client.views()
        assert 100 < len(server.requests) <= 100 + MOST_TOKENS + 0.1 * 100


# ---- cancelling, forking, closing


def test_a_cancelled_task_gives_its_connection_back() -> None:
    async def scene(server: Hostile) -> None:
        async with AsyncClient(server.url, connections=2) as client:
            for after_s in (0.0, 0.001, 0.01, 0.05) * 6:
                tasks = [asyncio.create_task(client.views()) for _ in range(4)]
                await asyncio.sleep(after_s)
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(isinstance(end, asyncio.CancelledError) or end == [] for end in ended)
            answering.set()
            assert await asyncio.gather(*(client.views() for _ in range(20))) == [[]] * 20
        assert len(asyncio.all_tasks()) == 1

    answering = threading.Event()

    def behaviour(visit: Visit) -> None:
        good(visit) if answering.is_set() else held(visit)

    with Hostile(behaviour) as server:
        asyncio.run(scene(server))
        assert server.most_open < 4 * 24


def test_a_caller_that_gives_up_itself_gets_its_own_error() -> None:
    async def scene(server: Hostile) -> None:
        async with AsyncClient(server.url) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.views()

    with Hostile(held) as server:
        asyncio.run(scene(server))


def _ask_in_child(client: Client, told: Any) -> None:
    pools = list[httpcore2.ConnectionPool]()
    made = httpcore2.ConnectionPool

    def slowly(**options: Any) -> httpcore2.ConnectionPool:
        # the other threads come meanwhile
        time.sleep(0.2)
        pools.append(made(**options))
        return pools[-1]

    with mock.patch.object(httpcore2, "ConnectionPool", slowly), ThreadPoolExecutor(4) as threads:
        told.put((list(threads.map(lambda _: client.views(), range(20))), len(pools)))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_connections_of_its_own() -> None:
    """As servers do that load a service once and fork workers: two processes on one connection
    would read each other's answers. The first of its threads opens them for all."""
    fork, asked = multiprocessing.get_context("fork"), Counter[int]()

    def behaviour(visit: Visit) -> None:
        asked[visit.port] += 1
        good(visit)

    with Hostile(behaviour) as server, Client(server.url, connections=1) as client:
        assert client.views() == []
        told = fork.SimpleQueue()
        child = fork.Process(target=_ask_in_child, args=(client, told))
        child.start()
        assert told.get() == ([[]] * 20, 1)
        child.join()
        assert [client.views() for _ in range(20)] == [[]] * 20
        assert server.most_open == 2
        assert sorted(asked.values()) == [20, 21]


@KINDS
def test_the_token_is_shown_each_time_as_it_is_then(kind: str) -> None:
    tokens = iter(["first", "second"])
    with Hostile(good) as server:
        with opened(kind, server.url, token=lambda: next(tokens)) as client:
            assert client.views() == client.views() == []
        with opened(kind, server.url + "/below/", token="word") as client:
            assert client.views() == []
    shown = [
        next(line for line in request.split(b"\r\n") if line.startswith(b"Authorization"))
        for request in server.requests
    ]
    assert shown == [
        b"Authorization: Bearer first",
        b"Authorization: Bearer second",
        b"Authorization: Bearer word",
    ]
    assert server.requests[2].startswith(b"GET /below/v1/views HTTP/1.1\r\n")


@KINDS
def test_a_token_is_one_line_and_no_message_has_it(kind: str) -> None:
    with Hostile(good) as server:
        for token in ("s3cr3t\n", lambda: " s3cr3t\r\n"):
            with opened(kind, server.url, token=token) as client:
                assert client.views() == []
        assert all(
            b"\r\nAuthorization: Bearer s3cr3t\r\n" in request for request in server.requests
        )
        for wrong in ("s3cr3t\r\nX: y", "s3cr3t-\u00e9", "s3cr3t\0", " "):
            with pytest.raises(RequestError, match=r"visible ASCII") as caught:
                (Client if kind == "blocking" else AsyncClient)(server.url, token=wrong)
            with (
                opened(kind, server.url, token=lambda wrong=wrong: wrong) as client,
                pytest.raises(RequestError) as later,
            ):
                client.views()
            assert "s3cr3t" not in f"{caught.value!r}{later.value!r}"
        assert len(server.requests) == 2


@KINDS
@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), 1e7, "1"])
def test_a_time_limit_that_is_none_is_refused_at_once(kind: str, timeout_s: Any) -> None:
    told = rf"timeout_s is a number of seconds .* got {timeout_s!r}"
    with Hostile(good) as server, opened(kind, server.url, timeout_s=1_000_000) as client:
        for ask in (
            client.views,
            lambda timeout_s: client.rows("numbers", [1], timeout_s=timeout_s),
        ):
            with pytest.raises(RequestError, match=told):
                ask(timeout_s=timeout_s)
        with pytest.raises(RequestError, match=told):
            (Client if kind == "blocking" else AsyncClient)(server.url, timeout_s)
        assert client.views() == []
    assert len(server.requests) == 1


# ---- what it decides by, alone


def test_pauses_grow_and_are_at_random() -> None:
    bounds = list[tuple[float, float]]()

    def uniform(low: float, high: float) -> float:
        bounds.append((low, high))
        return high

    steps = Attempts(4, 1.0, uniform).steps(time.monotonic() + 1e6)
    unreachable = Failure(NoAnswerError("nobody"))
    assert steps.send(None) == 0
    pauses = [steps.send(unreachable) for _ in range(4)]
    with pytest.raises(StopIteration) as ended:
        steps.send(unreachable)
    assert ended.value.value is unreachable
    assert pauses == [FIRST_PAUSE_S * 2**i for i in range(4)]
    assert all(low == 0 for low, _ in bounds)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"7", 7.0),
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (b"soon", None),
        (b"-1", None),
        (b"\xb2", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: bytes, seconds: float | None) -> None:
    assert retry_after_s(Reply(503, [(b"Retry-After", text)], b"")) == seconds


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (calls.views(None), b"[" * 100_000),
        (calls.rows("v", ["a"], {}), b"[" * 100_000),
        (calls.row("v", "a", {}), ROW_OF_BASE64 % b"AAA="),
        (calls.row("v", "a", {}), ROW_OF_BASE64 % b"AAAA"),
        (calls.row("v", "a", {}), ROW_OF_BASE64.replace(b'"x":', b'"y":') % b"AAA="),
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error_of_ours(
    call: calls.Call[Any], content: bytes
) -> None:
    reply, wrong = call.checked(Reply(200, [], content))
    assert wrong is None
    with pytest.raises(NoAnswerError, match="something else than this API"):
        call.answer(reply, "http://server")


def test_a_host_that_no_thread_could_look_up_is_looked_up_again() -> None:
    network = _Network()
    full = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no more threads"))
    with full, pytest.raises(httpcore2.ConnectError, match="no more threads"):
        network.connect_tcp("localhost", 1, Exchange(time.monotonic() + 20))
    with pytest.raises(httpcore2.ConnectError, match="refused"):
        network.connect_tcp("localhost", 1, Exchange(time.monotonic() + 20))


# ---- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two certificates that vouch for themselves, ``server`` of 127.0.0.1 and
    ``client``, each ``.pem`` with its ``.key``."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client"):
        certificate(folder, name)
    return folder


def tls_server(certificates: Path, *, asks_who: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    if asks_who:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificates / "client.pem")
    return context


@KINDS
def test_over_tls_the_server_is_who_it_says(kind: str, certificates: Path) -> None:
    ca = certificates / "server.pem"
    with Hostile(good, tls_server(certificates)) as server:
        with opened(kind, server.url, tls=Tls(ca)) as client:
            assert [client.views() for _ in range(3)] == [[]] * 3
        for url, tls in (
            (server.url, Tls()),
            (server.url.replace("127.0.0.1", "localhost"), Tls(ca)),
        ):
            with (
                opened(kind, url, tls=tls, retries=0) as client,
                pytest.raises(NoAnswerError, match=r"(?i)certificate"),
            ):
                client.views()


@KINDS
def test_over_tls_the_client_shows_who_it_is(kind: str, certificates: Path) -> None:
    ca = certificates / "server.pem"
    own = Tls(ca, certificates / "client.pem", certificates / "client.key")
    with Hostile(good, tls_server(certificates, asks_who=True)) as server:
        with opened(kind, server.url, tls=own) as client:
            assert client.views() == []
        with (
            opened(kind, server.url, tls=Tls(ca), retries=0) as client,
            pytest.raises(NoAnswerError),
        ):
            client.views()


@KINDS
def test_a_handshake_has_the_deadline_too(kind: str, certificates: Path) -> None:
    """A server that says nothing, and one that drips the first record of a handshake."""
    for bites in (b"", b"\x16\x03\x03\x40\x00" + b"\0" * 100):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def drip(listener: socket.socket = listener, bites: bytes = bites) -> None:
                connection, _ = listener.accept()
                connection.settimeout(20)
                with connection, contextlib.suppress(OSError):
                    for byte in bites:
                        connection.sendall(bytes([byte]))
                        time.sleep(0.02)
                    while connection.recv(65536):
                        pass

            thread = threading.Thread(target=drip)
            thread.start()
            url = f"https://127.0.0.1:{listener.getsockname()[1]}"
            with (
                opened(kind, url, tls=Tls(certificates / "server.pem")) as client,
                pytest.raises(DeadlineError),
            ):
                client.views(timeout_s=0.3)
            thread.join()


@pytest.mark.parametrize(
    "tls",
    [
        Tls(ca="nothing.pem"),
        Tls(certificate="nothing.pem"),
        Tls(certificate=__file__),
        Tls(ca=__file__),
    ],
)
def test_files_of_tls_that_are_none_are_named(tls: Tls) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError, match=r"TLS of the client \((ca|certificate) "):
            kind("https://127.0.0.1", tls=tls)


# ---- whose answer it is


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", True),
        (b"HTTP/1.1 100 Go\r\n\r\nHTTP/1.1 204 Nothing\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1;x=y\r\nd\r\n0\r\nA: b\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\n\r\nas long as the connection", False),
        (b"HTTP/1.1 OK\r\n\r\n", False),
    ],
)  # fmt: skip
def test_a_connection_is_used_again_after_a_whole_answer(answer: bytes, ends: bool) -> None:
    end = AnswerEnd()
    end.begin()
    reusable = []
    for byte in answer:
        end.feed(bytes([byte]))
        reusable.append(end.reusable)
    assert reusable == [False] * (len(answer) - 1) + [ends]
    end.feed(b"H")
    assert not end.reusable


WAYS: dict[str, Callable[[Client, int], Any]] = {
    "row": lambda client, user: features_of(client.row("likes", user))["of"],
    "rows": lambda client, user: cast(Any, client.rows("likes", [user]).rows[0]).features["of"],
    "table": lambda client, user: client.get("likes", [user])["of"][0].as_py(),
    "several": lambda client, user: (
        cast(Any, client.several([ViewLookupRequest(view="likes", keys=[user])])[0])
        .rows[0]
        .features["of"]
    ),
    "search": lambda client, user: cast(
        Any, client.search("likes", vector=[user], features=["of"]).rows[0]
    ).features["of"],
}
"""Each way to one user's row, whose feature ``of`` says whose it is."""


def likes(request: bytes, view: str = "likes", more: int = 0) -> bytes:
    """What a server answers to a request of :data:`WAYS`, or would for another view, or with more
    rows."""
    head, _, body = request.partition(b"\r\n\r\n")
    line = head.partition(b"\r\n")[0]
    user = (
        int(line.split()[1].partition(b"?")[0].rpartition(b"/")[2])
        if line.startswith(b"GET")
        else int(re.findall(rb'"(?:keys|vector)":\[(\d+)', body)[0])
    )
    row: dict[str, Any] = {
        "key": str(user),
        "status": "fresh",
        "source": "store",
        "computed_at": None,
        "age_s": 1,
        "ttl_s": 2,
        "snapshot": 3,
        "model": "m",
    }
    row["features"] = {"of": user}
    answer: dict[str, Any] = {"view": view, "snapshot": 3, "model": "m", "rows": [row] * (1 + more)}
    if line.startswith(b"GET"):
        answer = row | {"view": view}
    elif b"/search " in line:
        answer |= {"metric": "l2", "rows": [row | {"score": 0.0}]}
    elif b" /v1/lookup " in line:
        answer = {"responses": [answer]}
    elif b"arrow" in head:
        table = pa.table(
            {"key": [str(user)] * (1 + more), "of": [user] * (1 + more)}
        ).replace_schema_metadata({"view": view})
        return bytes(encode_arrow(table))
    return json.dumps(answer).encode()


@pytest.fixture
def reached(
    request: pytest.FixtureRequest, tmp_path: Path, certificates: Path
) -> Callable[[Callable[[Visit], None]], Any]:
    """Starts a server; gives it and the client's arguments beside its address."""
    tls = request.param == "tls"
    path = str(tmp_path / "socket") if request.param == "unix" else None
    arguments = {"tls": Tls(certificates / "server.pem")} if tls else {}
    return lambda behaviour: (
        Hostile(behaviour, tls_server(certificates) if tls else None, path),
        arguments,
    )


@KINDS
@pytest.mark.parametrize(
    ("way", "reached"),
    [("row", "tcp"), ("rows", "tls"), ("table", "unix"), ("several", "tls"), ("search", "tcp")],
    indirect=["reached"],
)
def test_no_caller_is_given_anothers_answer(
    kind: str, way: str, reached: Callable[..., Any]
) -> None:
    """Something between client and server gives each answer twice, at once or later, or always the
    one before: each user is given the own row all the same, by a connection that is not the one
    which brought the other's."""
    before: dict[socket.socket, bytes] = {}

    def at_once(visit: Visit) -> None:
        answer = likes(visit.request)
        visit.send(2 * (b"HTTP/1.1 200 x\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer))

    def in_chunks(visit: Visit) -> None:
        answer = likes(visit.request)
        visit.send(
            2
            * (
                b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
                % (len(answer), answer)
            )
        )

    def later(visit: Visit) -> None:
        visit.answer(200, likes(visit.request))
        visit.answer(200, likes(visit.request))

    def the_one_before(visit: Visit) -> None:
        right = likes(visit.request)
        visit.answer(200, before.pop(visit.connection, right))
        before[visit.connection] = right

    # what a search found has no key that tells whose it is: an answer that comes later is taken
    for behaviour in (at_once, in_chunks, later, the_one_before)[: 2 if way == "search" else 4]:
        server, arguments = reached(behaviour)
        with server, opened(kind, server.url, retry_share=1, **arguments) as client:
            assert [WAYS[way](client, user) for user in range(1, 4)] == [1, 2, 3], (
                behaviour.__name__
            )
        before.clear()
        if server.url.startswith("unix:"):
            Path(server.url.removeprefix("unix:")).unlink()


@KINDS
@pytest.mark.parametrize("way", ["row", "rows", "table", "several"])
def test_an_answer_to_another_question_is_an_error(kind: str, way: str) -> None:
    def wrong(visit: Visit) -> None:
        visit.answer(200, likes(visit.request, **answers.pop()))

    answers: list[dict[str, Any]] = [{"view": "others"}] * 2 + [{"more": 1}] * 2
    with Hostile(wrong) as server, opened(kind, server.url, retries=0) as client:
        if way != "row":
            with pytest.raises(
                NoAnswerError, match="the answer to another request: 2 rows of likes, not 1"
            ):
                WAYS[way](client, 1)
        answers = answers[:2]
        with pytest.raises(
            NoAnswerError, match="the answer to another request: of others, not likes"
        ):
            WAYS[way](client, 1)


def test_keys_that_are_none_are_no_strays() -> None:
    """Only the server knows how many columns a key has, and what is none of them is shown in
    words."""
    keys = [1, "a/b", ["a", "b/c"], ["x"], None, 1.5, "\ud800", 2**70, [[1]]]
    texts = ["1", "a/b", "a/b%2Fc", "x", "null", "1.5", "?", str(2**70), "[[1]]"]
    assert strays([("v", keys)], [("v", texts)]) is None
    assert strays([("v", keys)], [("v", texts[::-1])]) is not None
