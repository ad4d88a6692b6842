"""What is written down of requests, lines of JSON; never a key, a query or a token."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from precompute.store.http.telemetry.access_log import AccessLog, route_of
from tests.scene import files_of_at_most

SECRETS = ["alice@example.com", "deadline_ms", "pct_secret"]


def scope(path: str, method: str = "GET", **headers: str) -> dict[str, Any]:
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": "http",
        "method": method,
        "raw_path": path.encode(),
        "path": path,
        "query_string": b"deadline_ms=5",
        "headers": [*lines, (b"authorization", b"Bearer pct_secret")],
        "client": ("192.0.2.7", 5000),
    }


async def answering(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["raw_path"].endswith(b"/gone"):
        return
    if scope["raw_path"].endswith(b"/broken"):
        raise RuntimeError
    scope["token"], scope["stages"] = "ranker", {"read": 0.002, "encode": 0.001}
    status = 503 if scope["raw_path"].endswith(b"/refused") else 200
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"12345", "more_body": True})
    await send({"type": "http.response.body", "body": b"678"})


def ask(app: Any, *scopes: dict[str, Any]) -> None:
    async def unheard(message: dict[str, Any]) -> None:
        pass

    for one in scopes:
        try:
            asyncio.run(app(one, None, unheard))
        except RuntimeError:
            assert one["raw_path"].endswith(b"/broken")


@pytest.mark.parametrize(
    ("path", "route", "view"),
    [
        ("/v1/views/numbers/rows/alice@example.com", "/v1/views/{view}/rows/{key}", "numbers"),
        ("/v1/views/numbers/rows/", "/v1/views/{view}/rows/{key}", "numbers"),
        ("/v1/views/%6eumbers/lookup", "/v1/views/{view}/lookup", "numbers"),
        ("/v1/views/" + "a" * 100 + "/search", "/v1/views/{view}/search", "a" * 63),
        ("/v1/views/%ff/rows/1", "/v1/views/{view}/rows/{key}", "\ufffd"),
        ("/v1/lookup", "/v1/lookup", None),
        ("/", "/", None),
        ("/v1/services/ranking", "/v1/services/{service}", "ranking"),
        ("/v1/services/ranking/alice@example.com", "other", None),
        ("/v1/services", "/v1/services", None),
        ("/v1/views/numbers/alice@example.com", "other", None),
        ("/alice@example.com", "other", None),
        ("*", "other", None),
    ],
)
def test_a_route_is_named_as_it_is_documented(path: str, route: str, view: str | None) -> None:
    assert route_of(scope(path)) == (route, view)


def test_a_request_is_a_line_without_its_key_query_or_token(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(answering, path, "worker-0")
    row = "/v1/views/numbers/rows/alice@example.com"
    ask(
        log,
        scope(row),
        scope("/v1/views/numbers/lookup", "POST"),
        scope(f"{row}/refused"),
        scope(f"{row}/gone"),
        scope(f"{row}/broken"),
    )
    assert path.read_text() == ""
    log.flush()
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [
        (line["method"], line["route"], line["view"], line["status"], line["bytes"])
        for line in lines
    ] == [
        ("GET", "/v1/views/{view}/rows/{key}", "numbers", 200, 8),
        ("POST", "/v1/views/{view}/lookup", "numbers", 200, 8),
        ("GET", "/v1/views/{view}/rows/{key}", "numbers", 503, 8),
        ("GET", "/v1/views/{view}/rows/{key}", "numbers", 0, 0),
        ("GET", "/v1/views/{view}/rows/{key}", "numbers", 0, 0),
    ]
    first = lines[0]
    assert 0 <= first.pop("seconds") < 10
    assert first.pop("at").endswith("Z")
    assert {name: first[name] for name in ("client", "token", "worker")} == {
        "client": "192.0.2.7",
        "token": "ranker",
        "worker": "worker-0",
    }
    assert not [secret for secret in SECRETS if secret in text]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_log_moved_away_is_begun_again_and_two_processes_share_one(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    logs = [AccessLog(answering, path, f"worker-{i}") for i in range(2)]
    for round_ in ("first", "second"):
        for log in logs:
            ask(log, scope("/livez"), scope("/readyz"))
            log.flush()
        assert [json.loads(line)["worker"] for line in path.read_text().splitlines()] == [
            "worker-0"
        ] * 2 + ["worker-1"] * 2
        os.replace(path, tmp_path / round_)
    assert (tmp_path / "first").read_text() != (tmp_path / "second").read_text()


def test_a_log_that_cannot_be_written_stops_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "access.log"
    path.parent.mkdir()
    log = AccessLog(answering, path, "worker-0")
    path.unlink()
    path.parent.rmdir()
    for _ in range(3):
        ask(log, scope("/livez"))
        log.flush()
    assert [message[:35] for message in caplog.messages] == ["the access log cannot be written: ["]
    path.parent.mkdir()
    ask(log, scope("/livez"))
    log.flush()
    caplog.clear()
    # a disk that is full takes a part of what is written
    ask(log, scope("/readyz"), scope("/metrics"))
    with files_of_at_most(path.stat().st_size + 300):
        log.flush()
    assert [message[:33] for message in caplog.messages] == ["the access log cannot be written:"]
    ask(log, scope("/"))
    log.flush()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["route"] for line in (*lines[:2], lines[3])] == [
        "/livez",
        "/readyz",
        "/",
    ]
    assert lines[2].startswith('{"at":')
    assert len(lines) == 4
