"""Serving over Redis: views read at once, and what is answered while it is away."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pytest

from precompute.plugins.redis.tests.fixtures import redis_binary
from precompute.plugins.redis.tests.processes import RedisProcess
from precompute.store.answers.service import Service, ServicePart
from precompute.store.http.app import create_app
from precompute.store.wire import bodies
from tests.asgi import call
from tests.server import OPERATORS, eventually, free_port, make_folder
from tests.store.test_service import PAIRS, PLAIN, of_rows, of_table


def test_without_redis_all_is_503_and_with_it_back_all_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    project = make_folder(
        tmp_path, {"numbers": {"fallback": None}}, online=f"redis://127.0.0.1:{port}/0"
    )
    with contextlib.ExitStack() as stack:
        with RedisProcess(redis_binary(), tmp_path, port=port):
            project.publish_all()
            app = create_app(stack.enter_context(project.lookup()))
            get, post = partial(call, app, "GET"), partial(call, app, "POST")
            for path in ("/readyz", "/v1/views/numbers/rows/1"):
                assert get(path).status == 200
        # cached in the worker's memory, and served in the store's stead
        eventually(lambda: get("/v1/views/numbers/rows/1").json["status"] == "stale")
        get("/v1/views/numbers/rows/1", cache_control="no-cache").check_problem(
            503, "store_unavailable"
        )
        for reply in (
            get("/v1/views/numbers/rows/2"),
            get("/v1/views/numbers/rows/a/b"),
            post("/v1/views/numbers/lookup", {"keys": [1]}),
            post("/v1/views/numbers/search", {"key": 1}),
        ):
            reply.check_problem(503, "store_unavailable")
            assert int(reply.headers["retry-after"]) > 0
            assert str(port) not in reply.body.decode()
        (one,) = post("/v1/lookup", {"requests": [{"view": "numbers", "keys": [1]}]}).json[
            "responses"
        ]
        assert (one["view"], one["problem"]["status"]) == ("numbers", 503)
        views = get("/v1/views").json
        assert ([view["view"] for view in views["views"]], views["unreadable"]) == (
            ["numbers"],
            ["numbers"],
        )
        # whatever worker answers, and whichever has the row
        ready = get("/readyz")
        assert (ready.status, ready.json["status"], ready.json["views"]) == (
            200,
            "degraded",
            {"numbers": 1},
        )
        assert ready.json["why"].startswith("the online store does not answer")
        assert {get(path).status for path in ("/livez", *OPERATORS)} == {200}
        shown = get("/metrics").body.decode()
        assert "precompute_store_up 0.0" in shown
        assert 'precompute_view_live_snapshot{view="numbers"} 1.0' in shown
        for path in ("/readyz", *OPERATORS):
            assert str(port) not in get(path).body.decode()
        assert f":{port}" in caplog.text
        with RedisProcess(redis_binary(), tmp_path, port=port):
            # the store asks a server that was gone only once in a while
            eventually(lambda: "was lost" in get("/v1/views/numbers/rows/2").json["detail"])
            project.publish_all()
            assert get("/v1/views/numbers/rows/1").json["features"]["double"] == 2.0


def test_over_redis_views_are_read_at_once_and_it_is_the_same(
    tmp_path: Path, redis_url: str
) -> None:
    views = {f"v{i}": PLAIN for i in range(6)} | {
        "pairs": PLAIN | {"entity": ["id", "item"], "source": PAIRS}
    }
    scene = make_folder(tmp_path, views, online=redis_url)
    scene.publish_all()
    parts = tuple(ServicePart(name, ("double",)) for name in (*views, "unpublished"))
    with scene.lookup(services=[Service("wide", ("id", "item"), parts)]) as lookup:
        entities = {"id": [1, 2, None], "item": ["50%", "x", "y"]}
        table = lookup.service("wide", entities)
        assert table["v5__double"].to_pylist() == [2.0, 4.0, None]
        assert table["pairs__double"].to_pylist() == [2.0, None, None]
        app = create_app(lookup)
        for accept in (bodies.ARROW, bodies.JSON):
            reply = call(app, "POST", "/v1/services/wide", {"entities": entities}, accept=accept)
            assert reply.status == 200
            alike = (
                of_table(reply.arrow)
                if accept == bodies.ARROW
                else of_rows(reply.json, lookup.services["wide"])
            )
            assert alike == of_table(table)
