"""Spans: what is sent of requests and of the work that they make; never a key, a query or a
token."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.config.project import Project
from precompute.jobs.serve.server import _observing
from precompute.plugins.traces.spans import MOST_BY_CALLERS_S, Spans, Tracing
from precompute.plugins.traces.tests.collector import collecting
from precompute.store.errors import ConfigError
from tests import REPOSITORY
from tests.server import Server, eventually, make_folder, write_numbers
from tests.store.test_request_logs import SECRETS, answering, ask, scope


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


def test_a_server_traces_what_took_how_long(tmp_path: Path) -> None:
    traces = [f"{number:032x}" for number in (1, 2, 3)]
    with collecting() as (address, spans):
        serve = {"tracing": {"endpoint": address, "sample": 0.0}}
        make_folder(tmp_path, {"numbers": {}}, serve=serve).publish_all()
        write_numbers(tmp_path, [1, 2, 3, 9, 10])
        with Server(tmp_path) as server:
            for trace, path, body in (
                (traces[0], "/v1/views/numbers/rows/2", None),
                (traces[1], "/v1/views/numbers/lookup", {"keys": [1, 9, 10, 77]}),
                (traces[2], "/v1/views/numbers/search", {"inputs": {"x": 2.0}}),
            ):
                caller = f"00-{trace}-b7ad6b7169203331-01"
                method = "POST" if body else "GET"
                assert server.request(method, path, body, traceparent=caller).status == 200
            # neither its caller nor we want that: no word of it goes to the model
            server.lookup("numbers", [9])
            eventually(lambda: sum(span.name == "model" for span in spans()) == 2)
        # what a worker has not sent is sent at its end
        of_trace = [
            {span.name: span for span in spans() if span.trace_id.hex() == trace}
            for trace in traces
        ]
        assert len(spans()) == sum(map(len, of_trace))
    hit, missed, searched = of_trace
    model = {"queue", "inputs", "model"}
    assert hit.keys() == {"GET /v1/views/{view}/rows/{key}", "read", "verify", "encode"}
    assert (
        missed.keys()
        == {"POST /v1/views/{view}/lookup", "read", "verify", "wait", "encode"} | model
    )
    assert searched.keys() == {"POST /v1/views/{view}/search", "search"} | model
    for root, named in (("lookup", missed), ("search", searched)):
        whole = named[f"POST /v1/views/{{view}}/{root}"]
        # one after the other, all within the request
        times = [time for name in ("queue", "inputs", "model") for time in _times(named[name])]
        assert [_times(whole)[0], *times, _times(whole)[1]] == sorted([*_times(whole), *times])
        assert {named[name].parent_span_id for name in model} == {whole.span_id}
    rows = {
        name: {a.key: a.value.int_value for a in missed[name].attributes}["precompute.rows"]
        for name in model
    }
    # of the key that the source does not know there is nothing to compute
    assert rows == {"queue": 3, "inputs": 3, "model": 2}


def _times(span: Any) -> tuple[int, int]:
    return span.start_time_unix_nano, span.end_time_unix_nano


def test_a_collector_is_named_by_its_url(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"project.yaml:\d+: serve.tracing.endpoint: 'collector:4318': write a URL, such as http://127.0.0.1:4318$",
    ):
        make_folder(tmp_path, {"numbers": {}}, serve={"tracing": {"endpoint": "collector:4318"}})


def test_without_opentelemetry_a_server_that_is_to_trace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = {"tracing": {"endpoint": "http://127.0.0.1:4318"}, "bind": "127.0.0.1:0"}
    project: Project = make_folder(tmp_path, {"numbers": {}}, serve=serve)
    monkeypatch.setattr("precompute.plugins.traces.keys.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^serve\.tracing: OpenTelemetry is not installed: pip"):
        _observing(project)
