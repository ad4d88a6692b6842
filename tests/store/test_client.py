"""The client, and that in process, over JSON and over Arrow the answers are equal."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.store.answers.lookup import Lookup
from precompute.store.answers.plan import ANSWER_FIELDS
from precompute.store.client import Client, ViewLookupRequest, calls
from precompute.store.client.tables import arrays
from precompute.store.disk.record import plain
from precompute.store.errors import (
    MissingRowError,
    NoAnswerError,
    OnlineStoreError,
    PrecomputeError,
    RequestError,
)
from tests import REPOSITORY
from tests.clients import opened
from tests.hostile import Hostile
from tests.scene import Scene
from tests.server import Server, free_port, make_folder, slow, write_numbers
from tests.store.test_every_way import flat


def packed_features(packed: str) -> dict[str, Any]:
    vector = {"dtype": "float32", "dim": 4}
    return {"double": {"dtype": "float64"}, "vector": vector | {"packed": packed}}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Rows 1, 2, 3 are published; then 9 and 13 came into the source. The model fails on 13."""
    folder = tmp_path_factory.mktemp("client")
    pairs = {
        "sql": "SELECT * FROM (VALUES ('a/b', '50%', 1.0), ('é', '../x y', 2.0)) AS t(shop, item, x)"
    }
    views: dict[str, dict[str, Any]] = {
        "numbers": slow(0, fail_on=13),
        "stale": {"ttl": 0, "fallback": None},
        "renewed": {"ttl": 0, "stale_for": 0},
        "pairs": {"entity": ["shop", "item"], "source": pairs},
        **{packed: {"features": packed_features(packed)} for packed in ("int8", "binary")},
    }
    project = make_folder(folder, views)
    project.publish_all()
    write_numbers(folder, [1, 2, 3, 9, 13])
    return project


@pytest.fixture(scope="module")
def server(project: Scene) -> Iterator[Server]:
    with Server(project.folder, "unix:./api.sock") as server:
        yield server


@pytest.fixture(scope="module", params=["blocking", "async"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    with opened(request.param, server.url) as client:
        yield client


@pytest.fixture(scope="module")
def lookup(project: Scene) -> Iterator[Lookup]:
    """The same views and the same models in this process."""
    with project.answering() as lookup:
        yield lookup


# ---- three paths, one answer


def ageless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An answer's rows without what a clock decides: every age, and when a row was computed just
    now."""
    clock = {"age_s": None}
    return [
        row | clock | ({"computed_at": None} if row["status"] == "computed" else {}) for row in rows
    ]


@pytest.mark.parametrize(
    ("view", "keys", "options"),
    [
        ("numbers", ["3", 77, 1, "9", 13, 3, 9], {}),
        ("numbers", [3, 9, 1], {"features": ["vector"], "fallback": False}),
        ("numbers", [9, 1], {"deadline_ms": 0}),
        ("numbers", [500, 1, "501"], {"inputs": {"500": {"x": 7}, "501": {"x": "?"}}}),
        ("numbers", list(range(1000)), {"fallback": False}),
        ("renewed", [1, 77], {}),
        ("pairs", ["a%2Fb/50%25", ["a", "b/50%"], ("é", "../x y")], {"features": ["double"]}),
        ("int8", [1, 9, 3, 77], {}),
        ("binary", [2, 9, 77], {"features": ["vector"]}),
    ],
)
def test_in_process_over_json_and_over_arrow_the_answers_are_equal(
    lookup: Lookup, client: Client, view: str, keys: list[Any], options: dict[str, Any]
) -> None:
    before = lookup.get(view, keys, **options)
    arrow = client.get(view, keys, **options)
    json_answer = client.rows(view, keys, **options)
    after = lookup.get(view, keys, **options)
    assert arrow.schema == before.schema
    over_json = flat(json_answer.rows, arrow.column_names[len(ANSWER_FIELDS) :])
    assert ageless(arrow.to_pylist()) == ageless(before.to_pylist()) == ageless(over_json)
    ages = zip(
        *(table["age_s"].to_pylist() for table in (before, arrow, after)),
        (row["age_s"] for row in over_json),
        strict=True,
    )
    for status, (first, by_arrow, last, by_json) in zip(
        arrow["status"].to_pylist(), ages, strict=True
    ):
        if status in ("fresh", "stale"):
            assert first <= by_arrow <= by_json <= last


@pytest.mark.parametrize(
    ("view", "keys", "options"),
    [
        ("nothing", [1], {}),
        ("../numbers", [1], {}),
        ("", [1], {}),
        ("numbers", [], {}),
        ("numbers", list(range(1001)), {}),
        ("numbers", [1], {"features": ["nope"]}),
        ("numbers", [1], {"features": ["double", "double"]}),
        ("numbers", [500], {"inputs": {"500": {"nope": 1}}}),
        ("numbers", [500], {"inputs": {"500": {}}}),
        ("numbers", [500], {"deadline_ms": -1}),
        ("numbers", [500], {"max_age_s": -1}),
        ("numbers", [500], {"deadline_ms": math.inf}),
        ("numbers", [500], {"max_age_s": math.nan}),
        *(
            ("numbers", None, search)
            for search in (
                {},
                {"key": 77},
                {"key": 1, "k": 0},
                {"key": 1, "k": 2.5},
                {"vector": [1.0]},
                {"inputs": {"nope": 1}},
                {"key": 1, "features": ["nope"]},
                {"key": 1, "filter": {"nope": 1}},
            )
        ),
    ],
)
def test_the_client_refuses_in_the_same_words_as_in_process(
    lookup: Lookup, client: Client, view: str, keys: list[Any] | None, options: dict[str, Any]
) -> None:
    refusals = []
    for path in (lookup, client):
        with pytest.raises(RequestError) as caught:
            path.search(view, **options) if keys is None else path.get(view, keys, **options)
        refusals.append((caught.value.status, caught.value.code, str(caught.value)))
    assert refusals[0] == refusals[1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"key": 1},
        {"key": 2, "k": 1, "features": ["double"]},
        {"vector": [3, 4, 5, 6], "exclude": [3]},
        {"inputs": {"x": 0}, "exclude": ["1", 2], "k": 5},
        {"vector": [3, 4, 5, 6], "only": [1, 2], "filter": {"double": {"gte": 2}}},
    ],
)
def test_a_search_finds_the_same_in_process_and_from_the_client(
    lookup: Lookup, client: Client, arguments: dict[str, Any]
) -> None:
    answers = []
    for path in (lookup, client):
        found = plain(path.search("numbers", **arguments))
        for row in found["rows"]:
            row.pop("age_s")
        answers.append(
            json.loads(json.dumps(found, default=lambda at: at.isoformat().replace("+00:00", "Z")))
        )
    assert answers[0]["rows"]
    assert answers[0] == answers[1]


def test_views_are_the_same_in_process_and_from_the_client(lookup: Lookup, client: Client) -> None:
    clock = {"age_s": None}
    assert [view | clock for view in client.views()] == [view | clock for view in lookup.views()]


def test_inputs_that_json_cannot_carry_are_refused(client: Client) -> None:
    # half of a surrogate pair goes another way, and a NaN beside it no further
    for columns in ({"x": object()}, {"x": "\ud800", "y": math.nan}):
        with pytest.raises(RequestError, match="not something JSON can carry"):
            client.rows("numbers", [1], inputs={"1": columns})


def test_an_answer_becomes_numpy_and_pandas(client: Client) -> None:
    table = client.get("numbers", [2, 77, 1], fallback=False)
    columns = arrays(table)
    assert columns["key"].tolist() == ["2", "77", "1"]
    np.testing.assert_array_equal(columns["double"], [4.0, np.nan, 2.0])
    np.testing.assert_array_equal(
        columns["vector"], np.array([[2, 3, 4, 5], [np.nan] * 4, [1, 2, 3, 4]], np.float32)
    )
    assert (str(columns["vector"].dtype), columns["computed_at"].dtype.kind) == ("float32", "M")
    assert columns["reason"].tolist() == [None, "unknown_entity", None]
    whole = arrays(client.get("numbers", [1, 2, 3]))
    assert (whole["vector"].shape, whole["snapshot"].tolist()) == ((3, 4), [1, 1, 1])
    assert table.to_pandas()["double"].tolist()[0] == 4.0
    lists = arrays(
        pa.table({"items": pa.array([[1, 2], None], pa.list_(pa.int64())), "flag": [True, None]})
    )
    assert [lists["items"][1], lists["flag"].tolist()] == [None, [True, None]]


WITHOUT_PANDAS = """
import sys
import pyarrow as pa
from precompute.store.client.tables import arrays
arrays(pa.ipc.open_stream(sys.stdin.buffer.read()).read_all())
print("pandas" in sys.modules)
"""


def test_numpy_arrays_load_no_pandas_which_takes_longer_than_anybody_waits(client: Client) -> None:
    table, sink = client.get("numbers", [1, 2]), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    command = [sys.executable, "-c", WITHOUT_PANDAS]
    done = subprocess.run(
        command, input=sink.getvalue().to_pybytes(), capture_output=True, cwd=REPOSITORY, timeout=60
    )
    assert (done.stdout.decode(), done.stderr.decode()) == ("False\n", "")


def test_numpy_has_every_kind_of_column_within_a_buffer_too() -> None:
    table = pa.table(
        {
            "text": ["a", "b", "c"],
            "time": pa.array([1, None, 3], pa.timestamp("us", "UTC")),
            "half": pa.array([1.5, None, 2.5], pa.float16()),
            "small": pa.array([1, 2, 3], pa.int8()),
            "flag": [True, False, True],
            "vector": pa.FixedSizeListArray.from_arrays(
                pa.array(np.arange(6, dtype=np.float16)), 2
            ),
            "items": pa.array([[1, 2], [], [3]], pa.list_(pa.int64())),
            "names": [["a"], ["b", "c"], []],
        }
    )
    for part in (table, table.slice(1), pa.concat_tables([table, table]).slice(1, 4)):
        columns = arrays(part)
        assert {name: str(column.dtype) for name, column in columns.items()} == {
            "text": "object",
            "time": "datetime64[us]",
            "half": "float16",
            "small": "int8",
            "flag": "bool",
            "vector": "float16",
            "items": "object",
            "names": "object",
        }
        for name in ("text", "small", "flag"):
            assert columns[name].tolist() == part[name].to_pylist()
        for name in ("items", "names"):
            assert [one.tolist() for one in columns[name]] == part[name].to_pylist()
        np.testing.assert_array_equal(
            columns["vector"], np.array(part["vector"].to_pylist(), np.float16)
        )
        np.testing.assert_array_equal(
            columns["half"], np.array(part["half"].to_pylist(), np.float16)
        )
        assert columns["time"].astype(object).tolist() == [
            t and t.replace(tzinfo=None) for t in part["time"].to_pylist()
        ]


@pytest.mark.parametrize(
    ("words", "statuses"),
    [
        ({}, ["fresh", "missing"]),
        ({"min_fresh_s": 1e6}, ["missing", "missing"]),
        ({"min_fresh_s": 0.5}, ["fresh", "missing"]),
        ({"max_stale_s": 0}, ["fresh", "missing"]),
        ({"only_if_cached": True, "no_cache": True}, ["missing", "missing"]),
    ],
)
def test_how_fresh_rows_must_be_is_sent_as_cache_control(
    client: Client, words: Any, statuses: list[str]
) -> None:
    # in whole seconds, to the strict side
    limits = calls.rows("pairs", ["1"], {"min_fresh_s": 1.5, "max_stale_s": 1.5}).headers
    assert limits == [(b"Cache-Control", b"min-fresh=2, max-stale=1")]
    keys = [["a/b", "50%"], ["x", "y"]]
    assert [
        row.status for row in client.rows("pairs", keys, **({"fallback": False} | words)).rows
    ] == statuses
    # the words hold for each of several views
    twice = [ViewLookupRequest(view="pairs", keys=keys, fallback=False)] * 2
    answers = client.several(twice, **words)
    assert [[row.status for row in answer.rows or ()] for answer in answers] == [statuses] * 2


def test_a_row_can_be_computed_again_and_never(client: Client) -> None:
    assert client.row("numbers", 1).status == "fresh"
    assert client.row("numbers", 1, no_cache=True).status == "computed"
    with pytest.raises(MissingRowError) as caught:
        client.row("numbers", 9, only_if_cached=True)
    assert caught.value.status == 504
    with pytest.raises(MissingRowError):
        client.row("stale", 1, max_stale_s=0)
    with pytest.raises(RequestError, match="min_fresh_s is a number from 0"):
        client.row("numbers", 1, min_fresh_s=-1)
    one = [ViewLookupRequest(view="numbers", keys=[1])]
    (anew,) = client.several(one, no_cache=True)
    assert [row.status for row in anew.rows or ()] == ["computed"]
    with pytest.raises(RequestError, match="max_stale_s is a number from 0"):
        client.several(one, max_stale_s=math.nan)
    with pytest.raises(TypeError, match="takes no max_age_s: each of its requests may"):
        client.several(one, max_age_s=1.0)  # type: ignore[call-arg]  # what a caller without types may write


def test_a_word_of_a_newer_server_is_taken_as_it_is() -> None:
    row = {
        "key": "1",
        "status": "guessed",
        "source": "moon",
        "computed_at": None,
        "age_s": 1,
        "ttl_s": 2,
        "snapshot": 3,
        "model": "m",
    }
    answer = {
        "view": "numbers",
        "snapshot": 3,
        "model": "m",
        "rows": [row | {"features": {}, "luck": 1}],
    }
    with (
        Hostile(lambda visit: visit.answer(200, json.dumps(answer).encode())) as server,
        Client(server.url) as client,
    ):
        (told,) = client.rows("numbers", [1]).rows
    assert (told.status, told.source) == ("guessed", "moon")


# ---- connections


def test_threads_share_a_client_and_each_gets_its_own_answer(client: Client) -> None:
    def ask(i: int) -> bool:
        key = i % 3 + 1
        return client.get("numbers", [key] * (i + 1))["double"].to_pylist() == [2.0 * key] * (i + 1)

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(ask, range(200)))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ntoo short",
        b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nno arrow",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 5\r\n\r\n<html",
        b'HTTP/1.1 503 x\r\nContent-Length: 20\r\n\r\n{"detail":"no type"}',
        b"HTTP/1.1 500 x\r\nContent-Length: 4\r\n\r\nnull",
        b"HTTP/1.1 307 x\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_whatever_answers_instead_of_the_server_is_an_error_of_ours(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_all() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if b"stop" in connection.recv(65536):
                        return
                    connection.sendall(answer)

        thread = threading.Thread(target=answer_all)
        thread.start()
        host, port = listener.getsockname()
        try:
            with (
                Client(f"http://{host}:{port}", timeout_s=10) as client,
                pytest.raises(PrecomputeError),
            ):
                client.get("numbers", [1])
        finally:
            with socket.create_connection((host, port)) as connection:
                connection.sendall(b"stop")
            thread.join()


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_limits_arrive_as_they_were_said(kind: str) -> None:
    """Fewer digits would let rows pass that are older; JSON would make a NaN null, which is no
    limit."""
    with (
        Hostile(lambda visit: visit.answer(404, b"{}")) as server,
        opened(kind, server.url) as client,
    ):
        with pytest.raises(NoAnswerError):
            client.row("numbers", 1, max_age_s=1_234_567, deadline_ms=40.25)
        for age_s in (math.nan, math.inf, -1.0):
            with pytest.raises(RequestError, match="max_age_s is a number from 0"):
                client.several([ViewLookupRequest(view="numbers", keys=[1], max_age_s=age_s)])
    (asked,) = server.requests
    assert asked.startswith(
        b"GET /v1/views/numbers/rows/1?deadline_ms=40.25&max_age_s=1234567.0&encoding_format=base64 HTTP/1.1\r\n"
    )


def test_the_host_header_is_the_name_in_the_url() -> None:
    for family, address, written in (
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "[::1]"),
    ):
        with socket.create_server((address, 0), family=family) as listener:
            port, heads = listener.getsockname()[1], list[bytes]()

            def answer(listener: socket.socket = listener, heads: list[bytes] = heads) -> None:
                connection, _ = listener.accept()
                with connection:
                    heads.append(connection.recv(65536))
                    connection.sendall(
                        b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"views": []}'
                    )

            thread = threading.Thread(target=answer)
            thread.start()
            with Client(f"http://{written}:{port}") as client:
                assert client.views() == []
            thread.join()
        assert f"host: {written}:{port}\r\n".encode() in heads[0].lower()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}",
        "unix:{folder}/none.sock",
        "unix:{folder}/{long}",
        "http://no-such-host.invalid",
    ],
)
def test_no_server_there_is_an_error_that_names_the_address(tmp_path: Path, url: str) -> None:
    url = url.format(port=free_port(), folder=tmp_path, long="long" * 40)
    with Client(url) as client, pytest.raises(OnlineStoreError) as caught:
        client.views()
    assert url in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8080",
        "http://user:word@127.0.0.1",
        "http://127.0.0.1?x=1",
        "redis://x",
        "unix:",
        "http://",
        "http://x:99999",
        "http://x:port",
        "http://[::1",
    ],
)
def test_what_is_no_servers_address_is_refused(url: str) -> None:
    with pytest.raises(RequestError):
        Client(url)
