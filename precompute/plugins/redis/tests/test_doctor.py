"""Validate, doctor and preflight over Redis: what it says of itself, and what is left of trying."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import pytest
import redis

from precompute.jobs.setup.validate import validate
from precompute.store.errors import OnlineStoreError
from tests.fixtures import MakeProject
from tests.jobs.test_preflight import COUNTED, refused
from tests.scene import Scene

Captured = pytest.CaptureFixture[str]
ROWS = [(i, float(i)) for i in range(20)]
DOWN = "redis://:secret@127.0.0.1:1/0"


def lines(project: Scene, capsys: Captured) -> dict[str, dict[str, str]]:
    """What the doctor says, by what was looked at."""
    project.cli("doctor", "--json")
    return {line["check"]: line for line in json.loads(capsys.readouterr().out)["checks"]}


@contextlib.contextmanager
def reader(url: str) -> Iterator[str]:
    """The URL for a user who may read and no more."""
    with redis.Redis.from_url(url) as client:
        client.acl_setuser(
            "reader",
            enabled=True,
            nopass=True,
            keys=["*"],
            commands=["+@read", "+hello", "+info", "+ping"],
        )
        try:
            yield url.replace("redis://", "redis://reader:x@")
        finally:
            client.acl_deluser("reader")


def test_what_the_server_says_of_itself_is_shown_and_nothing_written(
    make_project: MakeProject, capsys: Captured, redis_url: str
) -> None:
    project = make_project(ROWS, project={"online": redis_url})
    found = lines(project, capsys)
    assert [line for line in found.values() if line["status"] == "bad"] == []
    where = redis_url.partition("//")[2]
    assert re.fullmatch(
        rf"redis://{re.escape(where)}: [0-9.]+, master, uses [0-9.]+ GB of what the machine has,"
        " maxmemory-policy noeviction",
        found["Redis"]["found"],
    )
    assert found["clock of Redis"]["found"].startswith("agrees with the one at ")
    assert (
        found["online store"]["found"]
        == f"{redis_url}: there, with all rights that publishing and reading need"
    )
    with project.online_store() as store:
        store.check_writable("numbers", "me")
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys() == []


def test_a_server_that_is_down_or_gives_no_right(
    make_project: MakeProject, redis_url: str, capsys: Captured
) -> None:
    down = lines(make_project(ROWS, project={"online": DOWN}), capsys)["online store"]
    assert (down["status"], "is it running" in down["found"]) == ("bad", True)
    assert "docs/redis.md" in down["remedy"]
    with reader(redis_url) as url:
        line = lines(make_project(project={"online": url}), capsys)["online store"]
    assert line["status"] == "bad"
    assert "reader" not in line["found"] or "NOPERM" in line["found"]


def test_validate_finds_a_server_that_is_down(make_project: MakeProject, capsys: Captured) -> None:
    project = make_project(ROWS, project={"online": DOWN})
    (found,) = (check for check in validate(project) if not check.ok)
    assert (found.check, "is it running" in found.found) == ("online store", True)
    assert project.cli("validate", "numbers", "--json") == 1
    out = capsys.readouterr().out
    assert "secret" not in out
    assert [c["check"] for c in json.loads(out)["checks"] if not c["ok"]] == ["online store"]


def test_nothing_is_computed_for_a_server_that_is_down_or_gives_no_right(
    make_project: MakeProject, redis_url: str
) -> None:
    down = make_project(ROWS, view=COUNTED, project={"online": DOWN})
    refused(
        down,
        OnlineStoreError,
        "does not answer, could not look whether 'numbers' can be published: is it running",
    )
    with reader(redis_url) as url:
        refused(
            make_project(view=COUNTED, project={"online": url}),
            OnlineStoreError,
            "may not|no right|NOPERM|permission",
        )
    assert down.numbers() == []
