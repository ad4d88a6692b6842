"""The status page as a server answers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.store.http.app import create_app
from tests.server import Server, make_folder
from tests.world import World


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("api")
    pairs = "SELECT * FROM (VALUES ('a/b', 'c', 2.0)) AS t(shop, item, x)"
    views: dict[str, dict[str, Any]] = {
        "numbers": {},
        "stale": {"ttl": 0, "fallback": None},
        "expired": {"ttl": 0, "stale_for": 0, "fallback": None},
        "broken": {"index": None},
        "pairs": {"entity": ["shop", "item"], "source": {"sql": pairs}},
    }
    make_folder(folder, views).publish_all()
    with Server(folder) as server:
        yield server


def test_the_page_shows_each_view(api: Server) -> None:
    page = api.get("/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"].startswith(
        "default-src 'none'; style-src 'sha256-"
    )
    text = page.body.decode()
    for shown in (
        "<code>numbers</code>",
        "shop, item",
        "double: float64, vector: float32[4]",
        "<dd>exact</dd>",
        ">fresh<",
        ">stale<",
        ">expired<",
        " run <span>published</span>, snapshot 1: 3 rows written, 0 rejected, ",
    ):
        assert shown in text


@pytest.mark.parametrize(
    ("question", "status", "answer"),
    [
        ("view=numbers&q=2", 200, "fresh from store</span>"),
        ("view=numbers&q=2", 200, "<dt>vector</dt><dd>[2, 3, 4, 5]</dd>"),
        ("view=pairs&q=a%252Fb/c", 200, "<dt>double</dt>"),
        ("view=numbers&q=77", 200, "missing: unknown_entity</span>"),
        ("view=numbers&q=2&do=near", 200, '<a href="?view=numbers&amp;q=1&amp;do=lookup">1</a>'),
        ("view=nothing&q=2", 404, "no view &#39;nothing&#39; is live"),
        ("view=broken&q=2&do=near", 400, "has no vector index"),
        ("view=numbers&q=2&do=text", 400, "a text needs a view with one text input column"),
        ("view=numbers&q=%00", 200, "missing: bad_key</span>"),
    ],
)
def test_the_page_answers_the_question_in_its_box(
    api: Server, question: str, status: int, answer: str
) -> None:
    page = api.get(f"/?{question}")
    assert (page.status, page.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert answer in page.body.decode()


@pytest.mark.parametrize(
    ("loaded", "shown"),
    [(True, "the model answers misses"), (False, "no model answers misses now")],
)
def test_it_says_whether_the_model_is_loaded(tmp_path: Path, loaded: bool, shown: str) -> None:
    world = World(tmp_path, {"new": 1.0})
    world.app = create_app(world.lookup, fallback_ready=lambda pointer: loaded)
    assert shown.encode() in world.get("/").body


def test_a_post_is_refused_with_what_is_allowed(api: Server) -> None:
    reply = api.post("/", {})
    reply.check_problem(405, "method_not_allowed")
    assert reply.headers["allow"] == "GET, HEAD"
