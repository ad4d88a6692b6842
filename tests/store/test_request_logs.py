"""What is written down of requests: lines of JSON, and spans; never a key, a query or a token."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.store.http.telemetry.access_log import AccessLog, route_of
from precompute.store.http.telemetry.tracing import MOST_BY_CALLERS_S, Spans, Tracing
from tests import REPOSITORY
from tests.collector import collecting
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


@pytest.fixture
def collector() -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    with collecting() as found:
        yield found


def test_a_request_is_a_span_under_its_callers_with_its_stages_below(
    collector: tuple[str, Callable[[], list[Any]]],
) -> None:
    address, spans = collector
    made = Spans(address, 0.0, "worker-0")
    tracing = Tracing(answering, made)
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
    row = "/v1/views/numbers/rows/alice@example.com"
    ask(
        tracing,
        scope(row, traceparent=caller + "01"),
        scope(f"{row}/refused", traceparent=caller + "01"),
    )
    # not sampled: by its caller, by us, by what is no traceparent
    ask(
        tracing,
        scope(row, traceparent=caller + "00"),
        scope(row),
        scope(row, traceparent="nonsense"),
    )
    made.close()
    got = spans()
    named = {span.name: span for span in got}
    assert (
        sorted(span.name for span in got)
        == ["GET /v1/views/{view}/rows/{key}"] * 2 + ["encode"] * 2 + ["read"] * 2
    )
    for span in got:
        assert span.trace_id.hex() == caller[3:35]
    whole = [span for span in got if span.name.startswith("GET")]
    assert {span.parent_span_id.hex() for span in whole} == {caller[36:52]}
    assert {span.parent_span_id for span in got} - {bytes.fromhex(caller[36:52])} == {
        span.span_id for span in whole
    }
    assert (
        named["read"].end_time_unix_nano - named["read"].start_time_unix_nano
    ) / 1e9 == pytest.approx(0.002)
    assert named["encode"].start_time_unix_nano == named["read"].end_time_unix_nano
    told = [
        {a.key: a.value.string_value or a.value.int_value for a in span.attributes}
        for span in whole
    ]
    assert sorted(
        (t["http.response.status_code"], t["precompute.view"], t["http.route"]) for t in told
    ) == [
        (200, "numbers", "/v1/views/{view}/rows/{key}"),
        (503, "numbers", "/v1/views/{view}/rows/{key}"),
    ]
    assert sorted(span.status.code for span in whole) == [0, 2]
    assert not [
        secret
        for secret in SECRETS
        if secret.encode() in b"".join(span.SerializeToString() for span in got)
    ]


def test_every_request_is_traced_where_the_share_is_one(
    collector: tuple[str, Callable[[], list[Any]]],
) -> None:
    address, spans = collector
    made = Spans(address + "/", 1.0, "worker-0")
    tracing = Tracing(answering, made)
    ask(tracing, *[scope("/v1/lookup", "POST")] * 3)
    made.close()
    assert len({span.trace_id for span in spans()}) == 3


def test_no_caller_has_all_of_its_requests_traced(
    collector: tuple[str, Callable[[], list[Any]]],
) -> None:
    address, spans = collector
    made = Spans(address, 0.0, "worker-0")
    tracing = Tracing(answering, made)
    began = time.monotonic()
    asked = scope(
        "/v1/lookup", "POST", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    )
    ask(tracing, *[asked] * 500)
    seconds = time.monotonic() - began
    made.close()
    # a second's worth, and what came since
    traced = sum(span.name.startswith("POST") for span in spans())
    assert MOST_BY_CALLERS_S <= traced <= MOST_BY_CALLERS_S * (1 + seconds)


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
import precompute.jobs.cli, precompute.jobs.serve.lookup_worker, precompute.jobs.serve.model_server, precompute.store.answers.lookup
"""


def test_without_opentelemetry_all_else_is_there() -> None:
    """It is an extra of its own."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
