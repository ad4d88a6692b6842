"""The example service: with what it asks for it answers from the lookup service, and without it,
too, within its budget."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.recommender import service
from precompute.store.errors import DeadlineError
from tests import REPOSITORY
from tests.documents import printed_by
from tests.hostile import Hostile
from tests.scene import Scene
from tests.server import Server

EXAMPLE = REPOSITORY / "examples" / "recommender"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """The example's project, published; mia came since. Its models have the time that a busy
    machine may need."""
    folder = tmp_path_factory.mktemp("recommender") / "project"
    shutil.copytree(
        EXAMPLE / "project", folder, ignore=shutil.ignore_patterns("var", "__pycache__")
    )
    for view in (folder / "views").iterdir():
        text = view.read_text()
        assert text.count("deadline: 50ms") == 1
        view.write_text(text.replace("deadline: 50ms", "deadline: 20s"))
    scene = Scene(folder, {})
    scene.publish_all("film_vector", "user_favourites")
    with (folder / "users.csv").open("a") as users:
        users.write("mia,8 40\n")
    return scene


@pytest.fixture(scope="module")
def server(project: Scene) -> Iterator[Server]:
    with Server(project.folder, "unix:./api.sock") as server:
        yield server


@asynccontextmanager
async def running(url: str, data: Path) -> AsyncIterator[service.App]:
    """The application between its start and its end, as an ASGI server runs it."""
    app, received, sent = (
        service.App(url, data),
        asyncio.Queue[dict[str, Any]](),
        asyncio.Queue[Any](),
    )
    life = asyncio.create_task(app({"type": "lifespan"}, received.get, sent.put))
    await received.put({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    yield app
    await received.put({"type": "lifespan.shutdown"})
    assert (await sent.get())["type"] == "lifespan.shutdown.complete"
    await life


async def get(
    app: service.App, path: str, query: str = "", method: str = "GET"
) -> tuple[int, dict[str, Any]]:
    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "raw_path": path.encode(),
        "query_string": query.encode(),
    }
    await app(scope, asyncio.Queue[Any]().get, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def asked(url: str, project: Scene, *requests: tuple[str, str]) -> list[dict[str, Any]]:
    """The answers to requests, one after another."""

    async def scene() -> list[dict[str, Any]]:
        async with running(url, project.folder) as app:
            answers = [await get(app, path, query) for path, query in requests]
        assert [status for status, _ in answers] == [200] * len(requests)
        return [body for _, body in answers]

    return asyncio.run(scene())


def films(answer: dict[str, Any]) -> list[int]:
    return [film["film_id"] for film in answer["films"]]


def test_who_is_known_gets_their_own_list_and_how_old_it_is(
    server: Server, project: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "BUDGET_S", 20.0)
    monkeypatch.setattr(service, "MODEL_MS", 20_000)
    known, again, computed, near, nobody = asked(
        server.url,
        project,
        ("/recommendations/ada", "n=5"),
        ("/recommendations/ada", "n=10&recent=40"),
        ("/recommendations/mia", ""),
        ("/recommendations/who%20is%20this", "n=4&recent=8"),
        ("/recommendations/nobody", "n=3"),
    )
    assert (known["source"], known["status"], len(known["films"])) == ("personal", "fresh", 5)
    assert 0 <= known["age_s"] < 3600
    assert all(film["title"] for film in known["films"])
    # of the same films, the nearest to the one watched last come first
    with project.lookup() as lookup:
        whole = list(lookup.row("user_favourites", "ada")["features"]["films"])
        vectors = {
            row["key"]: row["vector"] for row in lookup.get("film_vector", [40, *whole]).to_pylist()
        }
    assert films(known) == whole[:5]

    def near_to_40(film: int) -> float:
        return float(sum(a * b for a, b in zip(vectors["40"], vectors[str(film)], strict=True)))

    assert films(again) == sorted(whole, key=near_to_40, reverse=True)
    assert (computed["source"], computed["status"]) == ("personal", "computed")
    assert (near["source"], near["why"], len(near["films"])) == ("similar", "unknown_entity", 4)
    assert near["user"] == "who is this"
    assert (nobody["source"], nobody["why"], len(nobody["films"])) == (
        "popular",
        "unknown_entity",
        3,
    )


def test_a_service_that_is_not_there_leaves_what_is_popular(project: Scene, tmp_path: Path) -> None:
    (answer,) = asked(
        f"unix:{tmp_path}/nothing.sock", project, ("/recommendations/ada", "n=3&recent=8")
    )
    assert (answer["source"], answer["why"]) == ("popular", "NoAnswerError")


def test_a_service_that_hangs_costs_the_budget_and_no_more(project: Scene) -> None:
    with Hostile(lambda visit: visit.hold()) as hung:
        began = time.monotonic()
        (answer,) = asked(hung.url, project, ("/recommendations/ada", "recent=8"))
        assert (answer["source"], answer["why"]) == ("popular", DeadlineError.__name__)
        assert time.monotonic() - began >= service.BUDGET_S


def test_a_service_that_refuses_is_not_waited_for(project: Scene) -> None:
    with Hostile(lambda visit: visit.answer(503, b"{}", b"Retry-After: 30")) as busy:
        (answer,) = asked(busy.url, project, ("/recommendations/ada", "n=2"))
        assert (answer["source"], answer["why"], len(busy.requests)) == (
            "popular",
            "OverloadedError",
            1,
        )


def test_what_it_does_not_understand_is_refused(server: Server, project: Scene) -> None:
    async def scene() -> list[int]:
        async with running(server.url, project.folder) as app:
            wrong = [
                ("/", ""),
                ("/recommendations/", ""),
                ("/other/ada", ""),
                ("/recommendations/ada", "n=0"),
            ]
            wrong += [("/recommendations/ada", "n=x"), ("/recommendations/ada", "recent=-1")]
            wrong += [
                ("/recommendations/ada", f"{name}=0001{'0' * 5000}") for name in ("n", "recent")
            ]
            refused = [(await get(app, path, query))[0] for path, query in wrong]
            return [*refused, (await get(app, "/recommendations/ada", method="POST"))[0]]

    assert asyncio.run(scene()) == [404, 404, 404, *[400] * 5, 404]


def test_the_python_of_the_guide_runs_and_prints_what_is_printed_there(server: Server) -> None:
    """Its blocks, one after another, as they stand but for the address and a time that a busy
    machine may need."""
    text = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code = "".join(block if kind == "python" else "print('--')\n" for kind, block in blocks)
    code = (
        code.replace("http://127.0.0.1:8080", server.url)
        .replace("timeout_s=0.1", "timeout_s=20")
        .replace("timeout_s=5.0", "timeout_s=20")
        .replace("deadline_ms=60", "deadline_ms=20_000")
        .replace("deadline_ms=50", "deadline_ms=20_000")
    )
    first, second, rest = printed_by([sys.executable, "-c", code]).split("--\n")
    assert re.sub(r"[\d.]+$", "", first.strip()) == "[37, 34, 7] fresh store "
    assert second.splitlines()[-1] == "fresh unknown_entity"
    assert "{'key': 'nobody', 'status': 'missing', 'reason': 'unknown_entity'}" in second
    assert rest.splitlines()[-1] == "['fresh', 'fresh']"
