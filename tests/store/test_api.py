"""The HTTP API as its callers meet it, over a real server: what it promises, and what it makes of
those who mean it harm."""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from precompute.store.answers.lookup import MAX_KEYS
from precompute.store.errors import RequestError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.online.codec import RowCodec
from precompute.store.wire import bodies
from tests.asgi import Samples, samples
from tests.server import Reply, Server, damage_row, make_folder, read_reply, slow, write_numbers

PAIRS = [
    ("a/b", "c"),
    ("a", "b/c"),
    ("50%", "%2F"),
    ("é€😀", "x y"),
    ("..", "."),
    ("?", "#&=+"),
    ("%25", "%"),
]
TEXTS = [
    "a/b",
    "/a",
    "a/",
    "a//b",
    "50%",
    "%2F",
    "%252F",
    "é€😀",
    "a b",
    "..",
    "../x",
    "?#&=+",
    "\t\x7f",
    "x" * 511,
]


def _values(columns: str, rows: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """A source of these rows, with x = 1, 2, 3, …"""
    texts = (", ".join(f"'{part}'" for part in row) + f", {i}.0" for i, row in enumerate(rows, 1))
    return {
        "sql": f"SELECT * FROM (VALUES {', '.join(f'({text})' for text in texts)}) AS t({columns}, x)"
    }


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Views of rows 1, 2, 3; since they were published, 9, 13 and 14 came into the source, and row
    2 of the spoilt ones was damaged."""
    folder = tmp_path_factory.mktemp("api")
    views: dict[str, dict[str, Any]] = {
        "numbers": {},
        "stale": {"ttl": 0, "fallback": None},
        "expired": {"ttl": 0, "stale_for": 0, "fallback": None},
        "renewed": {"ttl": 0, "stale_for": 0},
        "cosine": {"index": {"on": "vector", "metric": "cosine"}, "fallback": None},
        "broken": {**slow(0, fail_on=13, nan_on=14), "index": None},
        "pairs": {"entity": ["shop", "item"], "source": _values("shop, item", PAIRS)},
        "texts": {"source": _values("id", [(text,) for text in TEXTS])},
        "spoilt": {"fallback": None},
        "spoilt_backed": {},
        "twins": {"source": {"sql": "SELECT * FROM (VALUES (1, 5.0), (2, 5.0)) AS t(id, x)"}},
    }
    project = make_folder(
        folder, views, serve={"bind": "127.0.0.1:0", "hosts": ["features.internal"]}
    )
    project.publish_all()
    for view in ("spoilt", "spoilt_backed"):
        damage_row(project, view, 2.0)
    write_numbers(folder, [1, 2, 3, 9, 13, 14])
    with Server(folder) as server:
        yield server


@pytest.fixture
def healthy(api: Server) -> Iterator[Server]:
    """The server; afterwards it must answer as if nothing had happened."""
    yield api
    assert api.process.poll() is None
    assert api.get("/v1/views/numbers/rows/1").json["features"] == {
        "double": 2.0,
        "vector": [1.0, 2.0, 3.0, 4.0],
    }


def arrow(keys: Any, name: str = "key", **options: Any) -> bytes:
    """An Arrow IPC stream of one column."""
    array = keys if isinstance(keys, (pa.Array, pa.ChunkedArray)) else pa.array(keys, pa.string())
    return arrow_table(pa.table({name: array}), **options)


def arrow_table(table: pa.Table, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def arrow_batches(batch: pa.RecordBatch, times: int) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(times):
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def arrow_compressed_as_of_old(keys: list[str], codec: str) -> bytes:
    """A compressed stream as Arrow 0.15 wrote it and every later version still reads: metadata
    version 4, whose batch names its codec in the message's own metadata instead of the record
    batch's ``compression`` field."""
    sink, batch = pa.BufferOutputStream(), pa.record_batch({"key": pa.array(keys)})
    with pa.ipc.new_stream(
        sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
    ) as writer:
        writer.write_batch(batch, custom_metadata={"ARROW:experimental_compression": codec})
    body = bytearray(sink.getvalue())

    def number(kind: str, at: int) -> int:
        return int(struct.unpack_from(kind, body, at)[0])

    def slot(
        table: int, field: int
    ) -> int:  # of a flatbuffer's table: where its vtable says the field is
        return table - number("<i", table) + 4 + 2 * field

    prefix = 8  # of each message: a marker and the length of its metadata
    start = prefix + number("<i", 4) + prefix
    message = start + number("<I", start)
    header = message + number("<H", slot(message, 2))
    struct.pack_into("<h", body, message + number("<H", slot(message, 0)), 3)
    struct.pack_into("<H", body, slot(header + number("<I", header), 3), 0)
    return bytes(body)


VIEWS = [
    "broken",
    "cosine",
    "expired",
    "numbers",
    "pairs",
    "renewed",
    "spoilt",
    "spoilt_backed",
    "stale",
    "texts",
    "twins",
]
LOOKUP, SEARCH = "/v1/views/numbers/lookup", "/v1/views/numbers/search"
_FILTERS: list[Any] = [[], {"double": [None]}, {"double": [2] * 1001}]
_INPUTS: list[Any] = [[], {"x": "text"}, {"x": None}, {"x": 1e308}]

# ---- rows


@pytest.mark.parametrize("key", [13, 14], ids=["the model fails", "its answer is none"])
def test_a_row_that_the_model_fails_on_is_a_problem(api: Server, key: int) -> None:
    reply = api.get(f"/v1/views/broken/rows/{key}")
    reply.check_problem(502, "model_error")
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["cache-status"].startswith("precompute; fwd=")
    (row,) = api.lookup("broken", [key])
    assert (row["status"], row["reason"], row["features"]) == ("missing", "model_error", None)


@pytest.mark.parametrize("form", ["{0}", '{0}, "x"', '"x", W/"y",{0}', "strong", "*"])
def test_a_row_the_caller_has_already_is_304_without_a_body(api: Server, form: str) -> None:
    first = api.get("/v1/views/numbers/rows/1")
    etag = first.headers["etag"]
    # the comparison is weak
    again = api.get(
        "/v1/views/numbers/rows/1",
        if_none_match=etag[2:] if form == "strong" else form.format(etag),
    )
    assert (again.status, again.body) == (304, b"")
    assert again.headers["etag"] == etag
    # the row is older by what lies between the two requests
    directive = re.compile(r"([a-z-]+)=(\d+)")
    then, now = (dict(directive.findall(r.headers["cache-control"])) for r in (first, again))
    assert now.keys() == then.keys() == {"max-age", "stale-while-revalidate", "stale-if-error"}
    assert all(abs(int(now[name]) - int(then[name])) < 20 for name in now)


def test_an_etag_is_the_snapshot_the_rows_own_checksum_its_status_and_form(api: Server) -> None:
    """Of key, time, snapshot and values: rows of equal values have two, and every replica the same
    one for the same row."""
    features = (Feature("double", "float64"), Feature("vector", "float32", dim=4))
    tag = RowCodec(FeatureView("twins", ("id",), features, ttl_s=1, stale_for_s=1)).schema_tag
    etags = set()
    for key in (b"1", b"2"):
        for accept in (bodies.JSON, bodies.ARROW):
            etag = api.get(f"/v1/views/twins/rows/{key.decode()}", accept=accept).headers["etag"]
            row = api.get(f"/v1/views/twins/rows/{key.decode()}").json
            at = datetime.fromisoformat(row["computed_at"])
            at_us = round(at.timestamp() * 1e6)
            behind = struct.pack("<qIIBd4f", at_us, 1, tag, 0, 10.0, 5.0, 6.0, 7.0, 8.0)
            checksum = xxhash.xxh3_64_intdigest(behind) ^ xxhash.xxh3_64_intdigest(key)
            form = {bodies.JSON: "j", bodies.ARROW: "a"}[accept]
            assert (
                etag
                == f'W/"1-{round(row["ttl_s"] * 1e6)}-{checksum.to_bytes(8, "little").hex()}-f{form}"'
            )
            etags.add(etag)
    assert len(etags) == 4


def test_bodies_that_differ_have_etags_that_differ(api: Server) -> None:
    asked = [
        ("numbers", query, accept)
        for query in ("", "?features=vector", "?features=")
        for accept in (bodies.JSON, bodies.ARROW)
    ]
    heads = [
        api.get(f"/v1/views/{view}/rows/1{query}", accept=accept).headers
        for view, query, accept in asked
    ]
    etags = [head["etag"] for head in heads]
    assert len(set(etags)) == len(asked)
    assert {head["vary"] for head in heads} == {"Accept"}
    for etag, (view, query, accept) in zip(etags, asked, strict=True):
        statuses = [
            api.get(f"/v1/views/{view}/rows/1{query}", accept=accept, if_none_match=one).status
            for one in etags
        ]
        assert statuses == [304 if one == etag else 200 for one in etags]


def test_a_damaged_row_is_a_problem_of_its_own_and_no_others(api: Server) -> None:
    before = _metrics(api)
    alone = api.get("/v1/views/spoilt/rows/2")
    alone.check_problem(500, "damaged")
    assert (alone.headers["cache-control"], "etag" in alone.headers, "age" in alone.headers) == (
        "no-store",
        False,
        False,
    )
    api.get("/v1/views/spoilt/rows/2", if_none_match="*").check_problem(500, "damaged")
    assert [row.get("reason") for row in api.lookup("spoilt", [1, 2, 3, 77])] == [
        None,
        "damaged",
        None,
        "unknown_entity",
    ]
    grown = {key: value - before.get(key, 0) for key, value in _metrics(api).items()}
    assert grown["precompute_damaged_rows_total", (("view", "spoilt"),)] == 3
    assert grown["precompute_problems_total", (("code", "damaged"),)] == 2
    assert grown["precompute_damaged_rows_total", (("view", "numbers"),)] == 0


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("safe", ["", "/"])
def test_any_text_is_a_key_decoded_exactly_once_from_the_url(
    api: Server, text: str, safe: str
) -> None:
    row = api.get(f"/v1/views/texts/rows/{quote(text, safe=safe)}").json
    assert (row["key"], row["features"]["double"]) == (text, 2.0 * (TEXTS.index(text) + 1))
    assert api.lookup("texts", [text]) == [
        _row(row) | {"age_s": pytest.approx(row["age_s"], abs=60)}
    ]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of ``GET …/rows/{key}`` as a lookup gives it."""
    return {name: value for name, value in row.items() if name != "view"}


# ---- lookups


ARROW_KEYS = [
    pa.array(["1", "77", "1", "é"]),
    pa.array(["1", "77", "1", "é"], pa.large_string()),
    pa.array(["1", "77", "1", "é"], pa.string_view()),
    pa.array(["0", "1", "77", "1", "é"], pa.string_view()).slice(1),
    pa.array(["1", "77", "1", "é"]).dictionary_encode(),
    pa.array(["1", "77", "1", "é"], pa.large_string()).dictionary_encode(),
    # those that nobody asks for, and a null among them
    pa.DictionaryArray.from_arrays(
        pa.array([50_001, 50_003, 50_001, 50_002]), [*map(str, range(50_000)), None, "1", "é", "77"]
    ),
    pa.DictionaryArray.from_arrays(
        [0, 2, 0, 1], pa.array(["1", "é", "77", None], pa.string_view())
    ),
    pa.DictionaryArray.from_arrays(
        pa.array([3, 1, 3, 2], pa.int8()), pa.array([None, "77", "é", "1"])
    ),
]


@pytest.mark.parametrize("keys", ARROW_KEYS, ids=[str(keys.type) for keys in ARROW_KEYS])
def test_keys_come_as_any_kind_of_text(api: Server, keys: pa.Array) -> None:
    reply = api.post(LOOKUP + "?fallback=false", arrow(keys), content_type=bodies.ARROW)
    assert (reply.status, [row["key"] for row in reply.json["rows"]]) == (
        200,
        ["1", "77", "1", "é"],
    )


def test_inputs_of_the_request_compute_an_entity_the_source_does_not_know(api: Server) -> None:
    rows = api.lookup("numbers", [500, 1, 501], inputs={"500": {"x": 10}, "1": {"x": 99}})
    assert [(r["status"], r["features"] and r["features"]["double"]) for r in rows] == [
        ("computed", 20.0),
        ("fresh", 2.0),
        ("missing", None),
    ]
    assert api.lookup("numbers", [500])[0]["reason"] == "unknown_entity"
    pair = api.lookup("pairs", [["new", "a/b"]], inputs={"new/a%2Fb": {"x": 4}})[0]
    assert (pair["key"], pair["features"]["double"]) == ("new/a%2Fb", 8.0)


@pytest.mark.parametrize("x", ["text", None, [1, 2], {"a": 1}, True, 1e308, 10**30])
def test_inputs_that_do_not_fit_are_a_model_error_of_their_row_alone(
    healthy: Server, x: Any
) -> None:
    rows = healthy.lookup("numbers", [500, 9], inputs={"500": {"x": x}})
    assert (rows[1]["status"], rows[1]["features"]["double"]) == ("computed", 18.0)
    assert (rows[0]["status"], rows[0].get("reason")) in {
        ("missing", "model_error"),
        ("computed", None),
    }
    if rows[0]["status"] == "computed":
        assert rows[0]["features"]["double"] == 2.0 * x


def test_arrow_requests_and_answers_say_what_json_says(api: Server) -> None:
    keys = ["3", "77", "1", "9"]
    one = api.get(
        "/v1/views/numbers/rows/1", accept=f"{bodies.ARROW}, application/json;q=0.5"
    ).arrow
    assert one["double"].to_pylist() == [2.0]
    # that one is missing is a problem, whatever is accepted
    api.get("/v1/views/numbers/rows/77", accept=bodies.ARROW).check_problem(404, "unknown_entity")
    options = f"{LOOKUP}?features=double&fallback=false&max_age_s=3600&deadline_ms=10"
    table = api.post(options, arrow(keys), content_type=bodies.ARROW, accept=bodies.ARROW).arrow
    assert (table.column_names[9:], table["status"].to_pylist()) == (
        ["double"],
        ["fresh", "missing", "fresh", "missing"],
    )


def test_several_views_are_answered_in_one_call(api: Server) -> None:
    requests = [
        {"view": "numbers", "keys": [1, 9], "features": ["double"]},
        {"view": "expired", "keys": [1]},
        {"view": "pairs", "keys": [["a", "b/c"]], "features": []},
    ]
    reply = api.post("/v1/lookup", {"requests": requests})
    assert reply.status == 200, reply
    answers = reply.json["responses"]
    assert [
        (a["view"], a["snapshot"], [(r["key"], r["status"], r["features"]) for r in a["rows"]])
        for a in answers
    ] == [
        ("numbers", 1, [("1", "fresh", {"double": 2.0}), ("9", "computed", {"double": 18.0})]),
        ("expired", 1, [("1", "missing", None)]),
        ("pairs", 1, [("a/b%2Fc", "fresh", {})]),
    ]


UNKNOWN_VIEWS = ["nothing", "../numbers", "..", "", "\0", "a" * 10_000, "Numbers", "numbers\n", "é"]


@pytest.mark.parametrize("view", UNKNOWN_VIEWS, ids=[ascii(view[:12]) for view in UNKNOWN_VIEWS])
def test_one_view_with_a_problem_never_fails_the_others(healthy: Server, view: str) -> None:
    requests: list[dict[str, Any]] = [
        {"view": "numbers", "keys": [1], "features": ["double"]},
        {"view": view, "keys": [1]},
        {"view": "numbers", "keys": [1], "features": ["nope"]},
        {"view": "numbers", "keys": []},
        {"view": "numbers", "keys": list(range(MAX_KEYS + 1))},
        {"view": "pairs", "keys": [["a/b", "c"]], "features": ["double"]},
    ]
    reply = healthy.post("/v1/lookup", {"requests": requests})
    assert reply.status == 200
    told: list[Any] = [
        a["rows"][0]["features"] if "rows" in a else (a["problem"]["status"], a["problem"]["type"])
        for a in reply.json["responses"]
    ]
    kinds = ["unknown_view", "unknown_feature", "no_keys", "too_many_keys"]
    problems = list(
        zip((404, 400, 400, 413), (f"urn:precompute:problem:{kind}" for kind in kinds), strict=True)
    )
    assert told == [{"double": 2.0}, *problems, {"double": 2.0}]
    assert [answer["view"] for answer in reply.json["responses"]] == [
        request["view"] for request in requests
    ]


# ---- search


# ---- views, health, metrics, documents


def test_it_is_alive_and_ready_and_says_which_snapshots(api: Server) -> None:
    assert api.get("/livez").status == 200
    ready = api.get("/readyz")
    fallbacks = dict.fromkeys(
        ["broken", "numbers", "pairs", "renewed", "spoilt_backed", "texts", "twins"], "ready"
    )
    views = dict.fromkeys(VIEWS, 1)
    # of rows that are spoilt on purpose it is told once somebody looked
    said = ready.json
    why = said.pop("why", "")
    assert all(view.startswith("spoilt") for view in re.findall(r"not whole of (\w+):", why)), why
    told = {"status": "degraded" if why else "ready", "views": views, "fallback": fallbacks}
    assert (ready.status, said) == (200, told)


def _metrics(api: Server) -> Samples:
    reply = api.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return samples(reply.body)


def test_metrics_count_rows_requests_and_refusals(api: Server) -> None:
    before = _metrics(api)
    api.lookup("numbers", [1, 2, 77, 9])
    api.post("/v1/lookup", {"requests": [{"view": "stale", "keys": [1]}]})
    api.get("/v1/views/expired/rows/1")
    api.post(SEARCH, {"key": 1})
    api.get("/v1/views/never-heard-of/rows/1")
    after = _metrics(api)
    grown = {
        key: value - before.get(key, 0)
        for key, value in after.items()
        if value != before.get(key, 0)
    }

    rows = {
        tuple(value for _, value in labels): n
        for (name, labels), n in grown.items()
        if name == "precompute_lookup_rows_total"
    }
    assert rows == {
        ("", "store", "fresh", "numbers"): 2,
        ("", "fallback", "computed", "numbers"): 1,
        ("unknown_entity", "", "missing", "numbers"): 1,
        ("", "store", "stale", "stale"): 1,
        ("expired", "", "missing", "expired"): 1,
    }
    for route in ("row", "lookup", "multi_lookup", "search"):
        assert grown["precompute_request_seconds_count", (("route", route),)] == 1
    assert grown["precompute_problems_total", (("code", "unknown_view"),)] == 1
    assert after["precompute_view_live_snapshot", (("view", "numbers"),)] == 1
    assert after["precompute_view_epoch", (("view", "numbers"),)] == 1
    assert after["precompute_view_ttl_seconds", (("view", "numbers"),)] == 3600
    assert (
        after["precompute_view_up", (("view", "numbers"),)] == after["precompute_store_up", ()] == 1
    )
    assert after["precompute_view_coverage", (("view", "numbers"),)] == 1
    assert 0 < after["precompute_view_oldest_row_age_seconds", (("view", "numbers"),)] < 3600
    assert "never-heard-of" not in api.get("/metrics").body.decode()


def test_what_a_body_holds_is_counted_before_it_is_decoded() -> None:
    text = rb'"\\\",[[[{{{,,,"'
    few = b'{"keys":["9"],"inputs":{"9":{"x":[' + b",".join([text] * 100_000) + b"]}}}"
    assert len(bodies.decode(bodies.decode_lookup, few).inputs["9"]["x"]) == 100_000
    most = bodies.MAX_VALUES - 3 * bodies.CONTAINER_VALUES - 1
    for count, refused in ((most, False), (most + 1, True)):
        # a text that ends in a backslash ends there
        body = rb'{"features":["\\"],"keys":[' + b"1," * count + b"1]}"
        with (
            pytest.raises(RequestError, match="at most 500,000 values")
            if refused
            else contextlib.nullcontext()
        ):
            assert len(bodies.decode(bodies.decode_lookup, body).keys) == count + 1


# ---- those who mean harm: a problem for each, and the next request is answered


def _json_refusals() -> Iterator[tuple[str, str, Any, int | None]]:
    """(name, path, body, status or None for any 4xx)"""
    for path in ("/v1/views/nothing/lookup", "/v1/views/nothing/search"):
        yield "unknown view", path, {"keys": [1]} if path.endswith("lookup") else {"key": 1}, 404
    for unit in (b"1", b"[]", b'{"":[]}', b'"\\\\",["\\"",""]'):
        units = b",".join([unit] * (4 * 10**6 // (len(unit) + 1)))
        yield f"{unit.decode()} for a body", LOOKUP, b'{"keys":[%b]}' % units, 413
    yield "no requests", "/v1/lookup", {"requests": []}, 400
    yield (
        "too many requests",
        "/v1/lookup",
        {"requests": [{"view": "numbers", "keys": [1]}] * 33},
        413,
    )
    yield "request without a view", "/v1/lookup", {"requests": [{"keys": [1]}]}, 422
    for body in (
        b"",
        b" ",
        b"{",
        b"nul",
        b'{"keys":[1]',
        b'{"keys":[1,]}',
        b'{"keys":[1]}x',
        b'{"keys":[1]}{}',
        b"\xff\xfe{",
        b"\x00",
    ):
        yield f"broken {body!r}", LOOKUP, body, 400
    for body in (
        ("\ufeff" + '{"keys":[1]}').encode(),
        '{"keys":[1]}'.encode("utf-16"),
        b'{"keys":["\xff"]}',
        b'{"keys":["\xed\xa0\x80"]}',
    ):
        yield f"no UTF-8 {body[:10]!r}", LOOKUP, body, 400
    yield "lone surrogate in exclude", SEARCH, rb'{"key":1,"exclude":["\ud83d"]}', 400
    for depth in (100, 900, 40_000):
        deep = b"[" * depth + b"]" * depth
        if depth == 40_000:
            yield f"keys {depth} deep", LOOKUP, b'{"keys":[%s]}' % deep, 400
        yield f"key {depth} deep", SEARCH, b'{"key":%s}' % deep, 400
        yield f"exclude {depth} deep", SEARCH, b'{"key":1,"exclude":[%s]}' % deep, 400
        yield f"only {depth} deep", SEARCH, b'{"key":1,"only":[%s]}' % deep, 400
        yield f"filter {depth} deep", SEARCH, b'{"key":1,"filter":{"double":%s}}' % deep, None
        yield f"inputs {depth} deep", SEARCH, b'{"inputs":{"x":%s}}' % deep, None
        yield (
            f"objects {depth} deep",
            LOOKUP,
            b'{"keys":[500],"inputs":%s1%s}' % (b'{"a":' * depth, b"}" * depth),
            None,
        )
    wrongs = rb'[] 1 "x" null {} {"keys":"1"} {"keys":{"a":1}} {"keys":1} {"keys":null}'
    for wrong in wrongs.split():
        yield f"wrong {wrong!r}", LOOKUP, wrong, 422
    for option in ('features={"double":1}', 'fallback="no"', "kyes=[1]", "max_age_s=true"):
        name, _, value = option.partition("=")
        yield option, LOOKUP, f'{{"keys":[9],"{name}":{value}}}'.encode(), 422
    yield "vector of a million", SEARCH, b'{"vector":[' + b"1," * 999_999 + b"1]}", 413
    searches: list[dict[str, Any]] = [
        *({"key": 1, "k": k} for k in (1.5, "1", None, True, 2**70)),
        *({"key": 1, "filter": wrong} for wrong in _FILTERS),
        *({"key": 1, "features": names} for names in ("double", [1], None)),
        *({"inputs": inputs} for inputs in _INPUTS),
        {"inputs": {"x": 1}, "deadline_ms": []},
        {"vector": ["1", 2, 3, 4]},
    ]
    for search in searches:
        yield f"search {str(search)[:40]}", SEARCH, search, None
    yield "neighbours of a row that is not there", SEARCH, {"key": 77}, 404
    yield (
        "unknown feature and no neighbours",
        SEARCH,
        {"key": 1, "features": ["nope"], "exclude": [2, 3]},
        400,
    )
    yield "search without an index", "/v1/views/broken/search", {"key": 1}, 400
    yield "search of inputs without a fallback", "/v1/views/stale/search", {"inputs": {"x": 1}}, 400


def check_refused(reply: Reply, status: int | None = None) -> None:
    """A 4xx problem, which no cache keeps."""
    assert 400 <= reply.status < 500, reply
    assert reply.headers["cache-control"] == "no-store"
    reply.check_problem(status or reply.status)


@pytest.mark.parametrize(
    ("path", "body", "status"), [pytest.param(*r, id=name) for name, *r in _json_refusals()]
)
def test_a_bad_json_body_is_refused(
    healthy: Server, path: str, body: Any, status: int | None
) -> None:
    check_refused(healthy.post(path, body), status)


@pytest.mark.parametrize("vector", [[1e38] * 4, [3e38, 0, 0, 0]])
def test_a_finite_vector_whose_norm_overflows_is_searched_like_any_other(
    healthy: Server, vector: list[float]
) -> None:
    path = "/v1/views/cosine/search"
    small = healthy.post(path, {"vector": [v / 1e38 for v in vector]}).json["rows"]
    large = healthy.post(path, {"vector": vector}).json["rows"]
    assert [(r["key"], r["score"]) for r in large] == [
        (r["key"], pytest.approx(r["score"])) for r in small
    ]


def test_a_vector_without_a_direction_is_refused_where_it_counts(healthy: Server) -> None:
    assert healthy.post(SEARCH, {"vector": [0, 0, 0, 0]}).status == 200
    check_refused(healthy.post("/v1/views/cosine/search", {"vector": [0, 0, 0, 0]}), 400)


def _arrow_refusals() -> Iterator[tuple[str, bytes, int]]:
    yield "empty", b"", 400
    yield "JSON", b'{"keys":[1]}', 400
    yield "no keys", arrow([]), 400
    yield "no columns", arrow_table(pa.table({})), 400
    yield "another column", arrow(["1"], "keys"), 400
    yield "an extra column", arrow_table(pa.table({"key": ["1"], "x": [1.0]})), 400
    yield (
        "the column twice",
        arrow_table(pa.Table.from_arrays([pa.array(["1"])] * 2, ["key", "key"])),
        400,
    )
    arrays = [
        pa.array([1.0]),
        pa.array([True]),
        pa.array([b"1"]),
        pa.nulls(1),
        pa.array([["1"]]),
        pa.array([{"a": "1"}]),
        pa.array([1.5]).dictionary_encode(),
        pa.array([datetime(2026, 1, 1)]),
        pa.array([b"x" * 16], pa.binary(16)).cast(pa.binary(16)),
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16], pa.binary(16))),
        pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array(["1"])),
    ]
    for array in arrays:
        yield f"type {array.type}", arrow(array), 400
    yield "too many keys", arrow([str(i) for i in range(MAX_KEYS + 1)]), 413
    yield "too many keys in many batches", arrow(pa.chunked_array([["1"] * 300] * 4)), 413
    yield "a hundred thousand keys", arrow(pa.array(range(100_000))), 413
    # each batch would have all of it looked through
    dictionary = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), ["1"] * 100_000)
    yield (
        "a dictionary in many batches",
        arrow_batches(pa.record_batch({"key": dictionary}), 20),
        400,
    )
    yield (
        "many batches without a row",
        arrow_batches(pa.record_batch({"key": pa.array([], pa.string())}), 20_000),
        400,
    )
    yield "a key that is not UTF-8", arrow(["@@"]).replace(b"@@", b"\xff\xfe"), 400
    offsets = np.array([0, 2, 3], np.int32).tobytes()
    for wrong in ([0, 2**30, 3], [0, -1, 3], [0, 3, 2]):
        yield (
            f"offsets {wrong}",
            arrow(["ab", "c"]).replace(offsets, np.array(wrong, np.int32).tobytes()),
            400,
        )
    # a text of a megabyte, a thousand times
    for many in (
        pa.DictionaryArray.from_arrays([0] * 1000, ["x" * 2**20]),
        pa.Array.from_buffers(
            pa.string_view(),
            1000,
            [
                None,
                pa.py_buffer(struct.pack("<i4sii", 2**20, b"xxxx", 0, 0) * 1000),
                pa.py_buffer(b"x" * 2**20),
            ],
        ),
    ):
        yield f"many times one {many.type}", arrow(many), 413
    for codec in ("lz4", "zstd"):
        yield (
            f"a dictionary compressed by {codec}",
            arrow(pa.array(["1" * 100] * 9).dictionary_encode(), compression=codec),
            400,
        )
        yield f"compressed by {codec}", arrow(["1" * 100] * 9, compression=codec), 400
        yield (
            f"compressed by {codec} as of old",
            arrow_compressed_as_of_old(["1" * 100] * 9, codec),
            400,
        )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("key", pa.string())])) as writer:
        writer.write_table(pa.table({"key": ["1"]}))
    yield "a file, not a stream", bytes(sink.getvalue()), 400


@pytest.mark.parametrize(
    ("body", "status"), [pytest.param(*r, id=name) for name, *r in _arrow_refusals()]
)
def test_a_bad_arrow_body_is_refused(healthy: Server, body: bytes, status: int) -> None:
    check_refused(healthy.post(LOOKUP, body, content_type=bodies.ARROW), status)


def test_options_of_an_arrow_request_are_checked_too(healthy: Server) -> None:
    for query in ("features=nope", "deadline_ms=nan", "max_age_s=-1"):
        check_refused(
            healthy.post(f"{LOOKUP}?{query}", arrow(["1"]), content_type=bodies.ARROW), 400
        )


@pytest.fixture
def send_arrow(healthy: Server) -> Iterator[Callable[[bytes], int]]:
    """Sends an Arrow body over one kept connection and returns the status, which it checks to be
    200 or a refusal."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = healthy.connect()

    def send(body: bytes) -> int:
        connection.request("POST", LOOKUP + "?fallback=false", body, {"content-type": bodies.ARROW})
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        reply = Reply(response.status, headers, response.read())
        if reply.status != 200:
            check_refused(reply)
        return reply.status

    with contextlib.closing(connection):
        yield send


@pytest.mark.parametrize("keys", [pa.array(["1", "2", "a longer key"]), pa.array([1, 2, 3])])
def test_an_arrow_body_cut_anywhere_is_refused(
    send_arrow: Callable[[bytes], int], keys: pa.Array
) -> None:
    whole = arrow(keys)
    end_of_stream = 8
    assert send_arrow(whole) == 200
    for length in range(len(whole) - end_of_stream):
        assert send_arrow(whole[:length]) == 400, length
    for length in range(len(whole) - end_of_stream, len(whole)):
        send_arrow(whole[:length])


def test_an_arrow_body_with_flipped_bytes_is_never_an_error(
    send_arrow: Callable[[bytes], int],
) -> None:
    statuses = []
    long = ["1", "2", "a key of more than twelve bytes"]
    for whole in (
        arrow(pa.array(long, pa.string_view())),
        arrow(pa.array(long).dictionary_encode()),
    ):
        for position in range(len(whole)):
            flipped = bytearray(whole)
            flipped[position] ^= 0xFF
            statuses.append(send_arrow(bytes(flipped)))
    whole = arrow(["1", "2", "a longer key"])
    for mask in (0x01, 0x80, 0xFF):
        for position in range(len(whole)):
            flipped = bytearray(whole)
            flipped[position] ^= mask
            statuses.append(send_arrow(bytes(flipped)))
    chance = random.Random(7)
    for _ in range(500):
        flipped = bytearray(whole)
        for _ in range(chance.randint(2, 8)):
            flipped[chance.randrange(len(whole))] = chance.randrange(256)
        statuses.append(send_arrow(bytes(flipped)))
    assert {200, 400} <= set(statuses) <= {200, 400, 413}


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonx",
        "",
        bodies.ARROW + ".x",
        "x" * 9000,
    ],
)
@pytest.mark.parametrize("path", [LOOKUP, SEARCH, "/v1/lookup"])
def test_another_content_type_is_refused(healthy: Server, path: str, kind: str) -> None:
    check_refused(healthy.post(path, {"keys": [1]}, content_type=kind), 415)


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "x" * 9000])
def test_a_compressed_body_is_refused(healthy: Server, encoding: str) -> None:
    check_refused(healthy.post(LOOKUP, {"keys": [1]}, content_encoding=encoding), 415)


@pytest.mark.parametrize("path", [LOOKUP, SEARCH, "/v1/lookup"])
@pytest.mark.parametrize("how", ["told", "chunked"])
def test_a_body_over_four_mebibytes_is_refused_before_it_is_read(
    healthy: Server, path: str, how: str
) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with healthy.connect() as connection:
        if how == "told":
            connection.sendall(
                f"{head}Content-Length: {bodies.MAX_BODY_BYTES + 1}\r\n\r\n{{".encode()
            )
        else:
            chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
            connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            for _ in range(bodies.MAX_BODY_BYTES // 65536 + 1):
                connection.sendall(chunk)
        read_reply(connection).check_problem(413, "body_too_large")


def test_a_body_of_four_mebibytes_is_read(healthy: Server) -> None:
    body = b'{"keys":[1]}'
    assert healthy.post(LOOKUP, body + b" " * (bodies.MAX_BODY_BYTES - len(body))).status == 200


BAD_URLS = {
    400: [
        *["numbers/rows/", "numbers/rows/%00", "numbers/rows/a%00b", "numbers/rows/%ff%fe"],
        *["numbers/rows/%ed%a0%80", "pairs/rows/a/%ff", "pairs/rows/a/b/c", "pairs/rows/a"],
        f"numbers/rows/{'x' * 4096}",
        f"numbers/rows/{'%C3%A9' * 256}",
        *(f"numbers/rows/1?features={names}" for names in ("nope", "double,double", "%ff")),
        *(f"numbers/rows/9?fallback={value}" for value in ("0", "maybe")),
        *(f"numbers/rows/9?deadline_ms={ms}" for ms in ("nan", "inf", "-1", "x", "", "1e999")),
    ],
    404: [
        *["numbers/rows/a/b", "numbers/rows/%2e", "numbers/rows/%2e%2e%2f", "numbers/rows/.."],
        *[
            "numbers/rows/../../../readyz",
            "numbers/rows/%",
            "numbers/rows/%zz",
            "numbers/rows/1%20",
        ],
        *["numbers/rows/+1", "numbers/rows", "numbers", "numbers/rows%2F1", "numbers%2Frows%2F1"],
        *[
            "numbers%2Frows%2Fa/rows/1",
            "nothing/rows/1",
            "..%2Fx/rows/1",
            "../rows/1",
            "%2e%2e/rows/1",
        ],
        *["%00/rows/1", "NUMBERS/rows/1", "%ff/rows/1", "numbers%0A/rows/1", "/rows/1", "*/rows/1"],
        f"{'a' * 8_000}/rows/1",
    ],
    414: ["a" * 10_000],
    None: ["pairs/rows//"],
}


@pytest.mark.parametrize(
    ("path", "status"),
    [(path, status) for status, paths in BAD_URLS.items() for path in paths],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_url_is_refused(healthy: Server, path: str, status: int | None) -> None:
    check_refused(
        healthy.raw(f"GET /v1/views/{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()), status
    )


def test_a_page_that_had_its_own_name_lead_here_reads_nothing(healthy: Server) -> None:
    for path in ("/v1/views/numbers/rows/1", "/v1/views", "/", "/metrics", "/livez", "/nothing"):
        healthy.get(path, host="evil.example:8080").check_problem(421, "wrong_host")
        assert healthy.get(path, host="features.internal:80").status == healthy.get(path).status
    healthy.post(LOOKUP, {"keys": [1]}, host="evil.example").check_problem(421, "wrong_host")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/views/numbers/rows/1", "GET"),
        ("DELETE", "/v1/views/numbers/rows/1", "GET"),
        ("POST", "/v1/views/numbers/rows/1", "GET"),
        ("GET", LOOKUP, "POST"),
        ("DELETE", SEARCH, "POST"),
        ("GET", "/v1/lookup", "POST"),
        ("POST", "/livez", "GET"),
        ("PATCH", "/v1/views", "GET"),
        ("OPTIONS", "/", "GET"),
    ],
)
def test_a_method_that_is_not_allowed_is_refused_with_those_that_are(
    healthy: Server, method: str, path: str, allowed: str
) -> None:
    reply = healthy.request(method, path)
    check_refused(reply, 405)
    assert allowed in reply.headers["allow"]


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/v1",
        "/v1/views/numbers/nothing",
        "/%00",
        "//livez",
        "/v1/../livez",
        "/metrics.php",
    ],
)
def test_an_unknown_route_is_a_problem_too(healthy: Server, path: str) -> None:
    check_refused(healthy.get(path), 404)
