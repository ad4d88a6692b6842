"""The doors: what a name leads to, of ours and of other packages; and a house without a power, or
without any, which starts and says of each name in one line what it lacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.store import doors
from precompute.store.doors import KNOWN, Door
from precompute.store.errors import ConfigError
from precompute.store.http.openapi import openapi_document
from precompute.store.wire import bodies
from tests import REPOSITORY
from tests.server import make_folder

POWERS = sorted(path.parent.name for path in doors.FOLDER.glob("*/__init__.py"))
EVERY = "every one"
"""Of the powers, at once."""


# ---- the table


def test_every_name_leads_somewhere_and_every_power_has_a_name() -> None:
    for door, ways in KNOWN.items():
        for name, way in ways.items():
            if way.power in POWERS:
                assert Door[Any](door).open(name) is not None
    assert {way.power for ways in KNOWN.values() for way in ways.values()} >= set(POWERS)


def test_a_name_that_no_door_has_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^no command 'plam'; did you mean 'plan'\?$"):
        Door[Any]("command").open("plam")


# ---- without a power


@pytest.fixture(scope="module", params=[*POWERS, EVERY])
def house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A copy of the package without a power, or without any."""
    without: str = request.param
    copy = tmp_path_factory.mktemp("house")
    absent = doors.FOLDER if without == EVERY else doors.FOLDER / without
    shutil.copytree(
        REPOSITORY / "precompute",
        copy / "precompute",
        copy_function=os.symlink,
        ignore=lambda folder, names: {
            name for name in names if name == "__pycache__" or Path(folder, name) == absent
        },
    )
    yield without, copy
    shutil.rmtree(copy)


def called(house: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``precompute`` of that copy, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "precompute.jobs.cli", "-c", str(folder), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{house}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


WEEK = """
import sys, threading, time
from pathlib import Path
from precompute.jobs.cli import main
import precompute
assert precompute.__path__[0].startswith(sys.argv[2]), precompute.__path__
folder = sys.argv[1]
for command in (["--help"], ["validate"], ["run", "numbers"], ["lookup", "numbers", "1"], ["status"]):
    try:
        status = main(["-c", folder, *command])
    except SystemExit as exc:
        status = exc.code
    assert status in (0, None), (command, status)
"""
SERVES = """
import os, signal, sys, threading, time, urllib.request
from precompute.jobs.cli import main
def ask():
    for _ in range(300):
        time.sleep(0.1)
        try:
            line = open(sys.argv[1] + "/said").read()
            url = line.partition("serving on ")[2].split()[0]
            said = urllib.request.urlopen(url + "/v1/views/numbers/rows/1").read()
            open(sys.argv[1] + "/answer", "wb").write(said)
            break
        except (OSError, IndexError):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=ask, daemon=True).start()
sys.stdout = open(sys.argv[1] + "/said", "w", buffering=1)
sys.exit(main(["-c", sys.argv[1], "serve"]))
"""


def test_a_house_without_it_starts(house: tuple[str, Path], tmp_path: Path) -> None:
    _, copy = house
    make_folder(tmp_path, {"numbers": {}})
    environment = os.environ | {
        "PYTHONPATH": f"{copy}:{REPOSITORY}",
        "PRECOMPUTE_SERVE__BIND": "127.0.0.1:0",
    }
    for code in (WEEK, SERVES):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(tmp_path), str(copy)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    assert b'"double":2.0' in (tmp_path / "answer").read_bytes()


def names_of(without: str, door: str) -> list[str]:
    return [name for name, way in KNOWN[door].items() if without in (way.power, EVERY)]


def test_its_commands_say_in_a_line_what_they_lack(house: tuple[str, Path], tmp_path: Path) -> None:
    without, copy = house
    listed = called(copy, "--help", folder=tmp_path).stdout
    for name in names_of(without, "command"):
        done = called(copy, name, "numbers", folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert f"command '{name}' comes with the plug-in {KNOWN['command'][name].power}" in line
        assert f"\n    {name} " not in listed


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


def test_its_routes_say_in_a_line_what_they_lack(house: tuple[str, Path], tmp_path: Path) -> None:
    without, copy = house
    absent = names_of(without, "route")
    row, document, *others = answered(
        copy, tmp_path, "/v1/views/things/rows/new", "/openapi.json", *absent
    )
    assert (row["status"], '"double":2.0' in row["body"]) == (200, True)
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
    if names_of(without, "testing"):
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            "precompute.store.errors.ConfigError: testing 'StandIn' comes with the plug-in stand_in,"
            " which is not installed here (no folder precompute/plugins/stand_in): install"
            " precompute-store with it, or do without 'StandIn'"
        )
    else:
        assert (done.stdout, done.returncode) == ("[2.0]\n", 0), done.stderr


# ---- another package's

PACKAGE = {
    "others.py": """
def add(commands):
    commands.add("greet", call, "say a friendly word").option("whom", "WHOM", "who is greeted")

def call(arguments):
    print("hello,", arguments.whom)
    return 0

def broken(commands):
    raise RuntimeError("not today")
""",
    "others_routes.py": """
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
""",
    "others-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: others\nVersion: 1.0\n",
    "others-1.0.dist-info/entry_points.txt": """
[precompute.plugins]
command.greet = others:add
command.gone = others:nothing_of_this_name
route.nearby = others_routes:NEARBY
route.about = others_routes:ABOUT
""",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Installed, as pip would: a module, and what says what is in it."""
    for name, text in PACKAGE.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "site"


def test_another_packages_command_is_one_like_ours(package: Path, tmp_path: Path) -> None:
    def greet(*arguments: str) -> subprocess.CompletedProcess[str]:
        return called(package, *arguments, folder=tmp_path)

    assert greet("greet", "you").stdout == "hello, you\n"
    assert "greet" in greet("--help").stdout
    assert "say a friendly word" in greet("greet", "--help").stdout
    assert greet("completion", "bash", "--", "gre").stdout == "greet\n"
    assert "no option '--loud'" in greet("greet", "you", "--loud").stderr
    assert "did you mean 'greet'?" in greet("gree").stderr
    gone = greet("gone")
    assert (gone.returncode, gone.stderr) == (
        2,
        "precompute: command 'gone' of others:nothing_of_this_name cannot be loaded: AttributeError:"
        " module 'others' has no attribute 'nothing_of_this_name'; mend that package, or take it"
        " out\n",
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
