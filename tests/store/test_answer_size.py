"""Answers of many bytes: known before they are made, sent in pieces, and bounded together; and what
a search answers: the rows that a lookup answers, number by number."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.store.answers.lookup import Lookup
from precompute.store.errors import RequestError
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from precompute.store.http.app import Front, create_app
from precompute.store.http.encoding.answer_bodies import LARGE_BYTES, Measure, answer_bytes
from precompute.store.online.codec import RowCodec
from precompute.store.online.online_store import Pointer
from precompute.store.vectors.index_build import build_index
from precompute.store.wire import bodies
from tests.asgi import call, exchange, scope_of
from tests.memory_store import MemoryStore
from tests.online import named, segment

ROWS = 1000
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "bool")
FEATURES = {
    "vectors": (Feature("vector", "float32", dim=384),),
    "int8s": (Feature("vector", "float32", dim=384, packed="int8"),),
    "texts": (
        Feature("title", "string"),
        Feature("tags", "string", max_items=50),
        Feature("top", "int64", max_items=50),
    ),
    **{
        dtype: (Feature("one", dtype), Feature("many", dtype, dim=64))
        for dtype in DTYPES
        if dtype != "bool"
    },
}


def _column(feature: Feature, rng: np.random.Generator) -> pa.Array:
    count = ROWS * (feature.dim or 1)
    if feature.max_items is not None:
        item = ["a tag"] * 30 if feature.dtype == "string" else list(range(10**9, 10**9 + 30))
        return pa.array([item] * ROWS, feature.arrow_type)
    if feature.dtype == "string":
        return pa.array(["a title of some length"] * ROWS)
    dtype = np.dtype(feature.dtype)
    if dtype.kind == "f":
        values = rng.normal(size=count).astype(dtype)
    else:
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max, count, dtype)
    return (
        pa.array(values)
        if feature.dim is None
        else pa.FixedSizeListArray.from_arrays(pa.array(values), feature.dim)
    )


@pytest.fixture(scope="module")
def lookup() -> Lookup:
    online, rng = MemoryStore(), np.random.default_rng(0)
    for name, features in FEATURES.items():
        view = FeatureView(name, ("id",), features, ttl_s=1e6, stale_for_s=1)
        columns = {feature.name: _column(feature, rng) for feature in features}
        columns |= {
            "id": pa.array(range(ROWS)),
            "computed_at": pa.array([time.time_ns() // 1000] * ROWS, pa.int64()),
        }
        online.load(
            name,
            segment(1),
            iter([RowCodec(view).row_batch(pa.record_batch(columns), ("id",), 1)]),
        )
        online.flip(Pointer(view, 1, 1, "m" * 64, ROWS, ROWS, "now", 0, segments=(named(1),)))
    return Lookup(online)


@pytest.fixture(scope="module")
def app(lookup: Lookup) -> Front:
    return create_app(lookup)


@pytest.mark.parametrize("as_arrow", [False, True])
@pytest.mark.parametrize("view", FEATURES)
def test_how_large_an_answer_will_be_is_known_about(
    lookup: Lookup, app: Front, view: str, as_arrow: bool
) -> None:
    keys = [str(i) for i in range(300)]
    told: list[int] = []
    lookup.begin(
        view, keys, admit=lambda plan, found: told.append(answer_bytes(plan, found, as_arrow))
    )
    reply = call(
        app,
        "POST",
        f"/v1/views/{view}/lookup",
        {"keys": keys},
        accept=bodies.ARROW if as_arrow else bodies.JSON,
    )
    assert 0.75 < told[0] / len(reply.body) < 2


@pytest.mark.parametrize("accept", [bodies.JSON, bodies.ARROW])
def test_a_large_answer_comes_in_pieces_and_says_what_a_small_one_says(
    lookup: Lookup, app: Front, accept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "precompute.store.http.encoding.answer_bodies.LARGE_ARROW_BYTES", LARGE_BYTES
    )
    for view in ("vectors", "texts"):
        keys = [str(i) for i in range(-20, 980)]
        reply = call(app, "POST", f"/v1/views/{view}/lookup", {"keys": keys}, accept=accept)
        assert (
            reply.status,
            "content-length" in reply.headers,
            int(reply.headers["pieces"]) > 3,
        ) == (200, False, True)
        expected = lookup.get(view, keys).drop_columns(["age_s"])
        if accept == bodies.ARROW:
            assert reply.arrow.drop_columns(["age_s"]).combine_chunks() == expected
        else:
            rows = [row | (row["features"] or {}) for row in reply.json["rows"]]
            for name in ("key", "status", "reason", *(f.name for f in FEATURES[view])):
                field = expected.schema.field(name)
                assert (
                    pa.array([row.get(name) for row in rows], field.type)
                    == expected[name].combine_chunks()
                )
        small = call(app, "POST", f"/v1/views/{view}/lookup", {"keys": keys[:1]}, accept=accept)
        assert (small.headers["pieces"], int(small.headers["content-length"])) == (
            "1",
            len(small.body),
        )


def test_several_views_come_in_pieces_too(app: Front) -> None:
    requests: list[dict[str, Any]] = [
        {"view": "vectors", "keys": list(range(100))},
        {"view": "nope", "keys": [1]},
        {"view": "int32", "keys": [1]},
    ]
    reply = call(app, "POST", "/v1/lookup", {"requests": requests})
    assert int(reply.headers["pieces"]) > 5
    assert [len(answer.get("rows", [])) for answer in reply.json["responses"]] == [100, 0, 1]
    assert len(reply.body) > LARGE_BYTES


def test_an_answer_that_would_be_too_large_is_refused_before_it_is_made(lookup: Lookup) -> None:
    small = create_app(lookup, answer_bytes=1_000_000)
    keys = list(range(ROWS))
    reply = call(small, "POST", "/v1/views/vectors/lookup", {"keys": keys})
    reply.check_problem(413, "answer_too_large")
    assert "about 5,3" in reply.json["detail"]
    # as fewer keys, or of fewer bytes
    assert call(small, "POST", "/v1/views/vectors/lookup", {"keys": keys[:100]}).status == 200
    assert (
        call(
            small, "POST", "/v1/views/vectors/lookup", {"keys": keys[:500]}, accept=bodies.ARROW
        ).status
        == 200
    )
    assert (
        call(small, "POST", "/v1/views/vectors/lookup", {"keys": keys, "features": []}).status
        == 200
    )
    # what there is room for is answered, the rest refused
    requests = [{"view": "vectors", "keys": keys[:100]}] * 3
    answers = call(small, "POST", "/v1/lookup", {"requests": requests}).json["responses"]
    assert [a["problem"]["status"] if "problem" in a else len(a["rows"]) for a in answers] == [
        100,
        413,
        413,
    ]


def test_the_model_is_not_run_for_an_answer_that_is_too_large(lookup: Lookup) -> None:
    with pytest.raises(RequestError) as caught:
        lookup.begin("vectors", ["nobody"] * ROWS, admit=Measure(1000).add)
    assert (caught.value.status, caught.value.code) == (413, "answer_too_large")


def test_answers_that_are_not_taken_are_so_many_and_no_more(lookup: Lookup) -> None:
    """Four of the largest at a time; the next is told to come again, and is answered when one of
    them is done or gone."""
    app = create_app(lookup, answer_bytes=1_200_000)
    scope, body = scope_of("POST", "/v1/views/vectors/lookup", {"keys": list(range(200))})

    async def held(taken: asyncio.Event) -> None:
        async def send(message: Any) -> None:
            taken.set()
            await asyncio.sleep(3600)

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        await app(scope, receive, send)

    async def scene() -> list[int]:
        tasks = []
        for _ in range(4):
            tasks.append(asyncio.create_task(held(taken := asyncio.Event())))
            await taken.wait()
        statuses = [(await exchange(app, scope, body)).status]
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        statuses += [
            (await exchange(app, scope, body)).status,
            (await exchange(app, scope, body)).status,
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return statuses

    assert asyncio.run(scene()) == [503, 200, 200]
    assert (
        json.loads(call(app, "POST", "/v1/views/vectors/lookup", {"keys": [1]}).body)["view"]
        == "vectors"
    )


# ---- what a search answers

NOW_S = 1_700_000_000.25
OF_EVERY_KIND = (
    Feature("vector", "float32", dim=3),
    Feature("share", "float32"),
    Feature("half", "float16"),
    Feature("whole", "int64"),
    Feature("exact", "float64"),
    Feature("some", "float32", max_items=4),
    Feature("title", "string"),
)
SEARCH = "/v1/views/things/search"


@pytest.fixture
def searchable(tmp_path: Path) -> Lookup:
    view = FeatureView(
        "things", ("id",), OF_EVERY_KIND, ttl_s=10, stale_for_s=5, index=IndexSpec("vector", "l2")
    )
    rows = pa.record_batch(
        {
            "id": pa.array(["a", "b"]),
            "vector": pa.FixedSizeListArray.from_arrays(
                pa.array([0.1, 1e-45, 3e18, 0.7, -0.0, 1 / 3], pa.float32()), 3
            ),
            "share": pa.array([0.1, None], pa.float32()),
            "half": pa.array(np.array([0.1, np.nan], np.float16)),
            "whole": pa.array([2**63 - 1, -(2**63)]),
            "exact": pa.array([0.1, float("inf")]),
            "some": pa.array([[0.1, 0.2], []], pa.list_(pa.float32())),
            "title": pa.array(['"é\u2028', None]),
            "computed_at": pa.array([1_700_000_000_000_001] * 2, pa.int64()),
        }
    )
    online = MemoryStore()
    online.load("things", segment(1), iter([RowCodec(view).row_batch(rows, ("id",), 1)]))
    build_index(tmp_path / "index", [rows], view, model="m")
    online.flip(
        Pointer(
            view,
            1,
            1,
            "m",
            2,
            2,
            "then",
            1_700_000_000_000_001,
            index="index",
            segments=(named(1),),
        )
    )
    return Lookup(online, tmp_path, clock=lambda: NOW_S, monotonic=lambda: 0.0)


def test_a_row_that_is_found_reads_as_one_that_is_looked_up(searchable: Lookup) -> None:
    app = create_app(searchable)
    names = [feature.name for feature in OF_EVERY_KIND]
    found = call(app, "POST", SEARCH, {"vector": [0.1, 0, 0], "k": 2, "features": names})
    assert (found.status, found.headers["content-type"]) == (200, "application/json")
    assert {name: found.json[name] for name in ("view", "snapshot", "model", "metric")} == {
        "view": "things",
        "snapshot": 1,
        "model": "m",
        "metric": "l2",
    }
    assert sorted(row["key"] for row in found.json["rows"]) == ["a", "b"]
    for row in found.json["rows"]:
        alone = call(app, "GET", f"/v1/views/things/rows/{row['key']}")
        # digit by digit: json.loads would read 0.1 and 0.10000000149011612 as two numbers, and as
        # one float32
        assert alone.body.partition(b'"features":')[2] in found.body
        del row["score"]
        assert row == {name: value for name, value in alone.json.items() if name != "view"}


def test_a_search_that_finds_too_many_bytes_is_refused_early(searchable: Lookup) -> None:
    app = create_app(searchable, answer_bytes=600)
    body = {"vector": [0.1, 0, 0], "k": 2}
    call(app, "POST", SEARCH, body | {"features": ["vector"]}).check_problem(
        413, "answer_too_large"
    )
    assert call(app, "POST", SEARCH, body).status == 200
