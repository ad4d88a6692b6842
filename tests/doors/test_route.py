"""Routes and the stand-in by their doors: ours where the power is not here, and others' routes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from precompute.store import doors
from precompute.store.doors import KNOWN, NAMES
from precompute.store.http.openapi import openapi_document
from precompute.store.wire import bodies
from tests import REPOSITORY
from tests.doors.conftest import Install, called, names_of, without_each_of
from tests.server import make_folder

ASKS = """
import json, sys
from pathlib import Path
from precompute.store.http.guard.access import AccessControl
from precompute.store.http.telemetry.access_log import route_of
from precompute.store.http.telemetry.instruments import Meter
from tests.world import World
world = World(Path(sys.argv[1]), {"new": 1.0})
access = AccessControl(Meter(), None, ("127.0.0.1", 9090))
for path in sys.argv[2:]:
    reply, asked = world.get(path), {"raw_path": path.encode(), "headers": []}
    name, view = route_of(asked)
    refusal = access(asked | {"server": ("127.0.0.1", 80)})
    print(json.dumps({
        "status": reply.status,
        "type": reply.headers["content-type"],
        "body": reply.body.decode(),
        "name": name,
        "view": view,
        "elsewhere": 200 if refusal is None else refusal.status,
    }))
"""
"""Status, type and body of each path, its name and view in logs, and the status on an address that
is not the admin's where there is one."""


def answered(first: Path, folder: Path, *paths: str) -> list[dict[str, Any]]:
    """What :data:`ASKS` says, with ``first`` before all else on Python's path."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASKS, str(folder), *paths],
        env=os.environ | {"PYTHONPATH": f"{first}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@without_each_of("route")
def test_its_routes_say_in_a_line_what_they_lack(
    house: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, copy = house
    absent = names_of(without, "route")
    row, document, *others = answered(
        copy, tmp_path, "/v1/views/things/rows/new", "/openapi.json", *absent
    )
    assert (row["status"], '"double":2.0' in row["body"]) == (200, True)
    monkeypatch.setattr(doors, "FOLDER", copy / "precompute" / "plugins")
    assert json.loads(document["body"]) == json.loads(bodies.encode(openapi_document()))
    for path, reply in zip(absent, others, strict=True):
        assert (reply["status"], reply["type"]) == (404, "text/plain; charset=utf-8")
        (line,) = reply["body"].splitlines()
        assert f"route '{path}' comes with the plug-in {KNOWN['route'][path].power}," in line
        assert reply["name"] == path


STANDS_IN = """
from precompute.testing import StandIn
with StandIn() as stand_in, stand_in.client() as client:
    stand_in.view("items", {1: {"double": 2.0}})
    print(client.get("items", [1])["double"].to_pylist())
"""


@without_each_of("name", "route")
def test_a_stand_in_answers_or_says_in_a_line_that_it_is_not_here(
    house: tuple[str, Path], tmp_path: Path
) -> None:
    without, copy = house
    done = subprocess.run(
        [sys.executable, "-P", "-c", STANDS_IN],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{copy}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    name = "precompute.testing.StandIn"
    if name in names_of(without, "name") or not NAMES.is_here(name):
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            "precompute.store.errors.ConfigError: name 'precompute.testing.StandIn' comes with the"
            " plug-in stand_in, which is not installed here (no folder precompute/plugins/stand_in):"
            " install precompute-store again, which has it, or do without 'precompute.testing.StandIn'"
        )
    else:
        assert (done.stdout, done.returncode) == ("[2.0]\n", 0), done.stderr


# ---- another package's


ROUTES = """
from precompute.store.errors import RequestError
from precompute.store.http.messages import json_reply
from precompute.store.http.routes import Route, Who

def nearby(parts):
    async def answer(scope, receive, view, key):
        if parts.serving.lookup.online.live(view) is None:
            raise RequestError(f"no view {view!r}", status=404, code="unknown_view")
        return json_reply({"view": view, "near": key.decode()})
    return answer

def about(parts):
    async def answer(scope, receive):
        return json_reply({"views": len(parts.serving.views.read().pointers)})
    return answer

OPERATION = {
    "summary": "What lies near",
    "responses": {"200": {"description": "answered"}, "404": {"description": "no such view"}},
}
NEARBY = Route("/v1/views/{view}/nearby/{key}", "GET", nearby, operation=OPERATION)
ABOUT = Route("/about", "GET", about, Who.OPERATORS)
TAKEN = Route("/livez", "GET", about, Who.ANYONE)
"""


@pytest.fixture
def package(install: Install) -> Path:
    return install(
        {"others_routes.py": ROUTES},
        "route.nearby = others_routes:NEARBY\nroute.about = others_routes:ABOUT\n",
    )


def test_another_packages_route_is_one_like_ours(package: Path, tmp_path: Path) -> None:
    near, missing, about, nothing, document = answered(
        package,
        tmp_path,
        "/v1/views/things/nearby/a/b",
        "/v1/views/nothing/nearby/1",
        "/about",
        "/v1/about",
        "/openapi.json",
    )
    assert json.loads(near["body"]) == {"view": "things", "near": "a/b"}
    template = "/v1/views/{view}/nearby/{key}"
    assert (near["name"], near["view"], near["elsewhere"]) == (template, "things", 200)
    assert (missing["status"], missing["type"]) == (404, "application/problem+json")
    assert "no view 'nothing'" in missing["body"]
    # it is for operators
    assert json.loads(about["body"]) == {"views": 1}
    assert (about["name"], about["elsewhere"]) == ("/about", 404)
    assert (nothing["status"], nothing["name"]) == (404, "other")
    told = json.loads(document["body"])["paths"][template]["get"]
    assert (told["summary"], "401" in told["responses"]) == ("What lies near", True)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (
            "others_routes:TAKEN",
            "route GET /livez is there already, as /livez: give it another path",
        ),
        (
            "others_routes:OPERATION",
            "route 'about' leads to no Route, but to a dict: mend that package, or take it out",
        ),
        (
            "others_routes:gone",
            "route 'about' of others_routes:gone cannot be loaded: AttributeError: module"
            " 'others_routes' has no attribute 'gone'; mend that package, or take it out",
        ),
    ],
)
def test_a_route_that_cannot_be_used_ends_serve_in_a_line(
    package: Path, tmp_path: Path, target: str, why: str
) -> None:
    path = package / "others-1.0.dist-info/entry_points.txt"
    path.write_text(path.read_text().replace("others_routes:ABOUT", target))
    make_folder(tmp_path, {"numbers": {}})
    done = called(package, "serve", folder=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"precompute: {why}\n")
