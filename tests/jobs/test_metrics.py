"""What a server tells at ``/metrics`` of itself, its workers and its models: all that alarms,
dashboards and the documents ask for is there, and filled by what it counts."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from precompute.store.doors import METRICS
from precompute.store.http.telemetry.instruments import INSTRUMENTS, Kind
from tests import REPOSITORY
from tests.jobs.test_model_processes import workers_of
from tests.jobs.test_serve_access import made_token
from tests.server import Reply, Server, damage_row, eventually, make_folder, write_numbers

Labels = tuple[tuple[str, str], ...]

CACHED = {"fallback": {"enabled": True, "deadline": "20s"}}
"""Misses are cached."""


class Admin(Server):
    """Requests carry a token of an operator's."""

    token = ""

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        return super().request(
            method, path, body, **({"authorization": f"Bearer {self.token}"} | headers)
        )

    def samples(self) -> dict[str, dict[Labels, float]]:
        """Name → labels → number."""
        told: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(self.get("/metrics").body.decode()):
            for one in family.samples:
                told.setdefault(one.name, {})[tuple(sorted(one.labels.items()))] = one.value
        return told

    def number(self, name: str, **labels: str) -> float:
        return self.samples().get(f"precompute_{name}", {}).get(tuple(sorted(labels.items())), 0.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    """Rows 1 to 3 are published, the second damaged; 9 to 12 came into the source since. Of the
    other view every row is stale."""
    folder = tmp_path_factory.mktemp("metrics")
    project = make_folder(
        folder, {"numbers": CACHED, "old": CACHED | {"ttl": 0}}, serve={"tokens": "./tokens"}
    )
    Admin.token = made_token(folder, "prometheus", "--scope", "admin")
    project.publish_all()
    damage_row(project, "numbers", 2.0)
    write_numbers(folder, [1, 2, 3, *range(9, 13)])
    server = Admin(folder)
    with server:
        yield server


def test_cached_rows_are_counted_when_written_and_when_found(server: Admin) -> None:
    assert [row["status"] for row in server.lookup("numbers", [1, 9, 10, 77])] == [
        "fresh",
        "computed",
        "computed",
        "missing",
    ]
    eventually(lambda: server.number("cache_rows_total", cache="miss_cache", outcome="stored") == 3)
    before = server.number("cache_rows_total", cache="miss_cache", outcome="miss")
    rows = server.lookup("numbers", [9, 10, 77, 11])
    assert [(row["status"], row["source"]) for row in rows] == [
        ("fresh", "cache"),
        ("fresh", "cache"),
        ("missing", None),
        ("computed", "fallback"),
    ]
    # that there is no such entity is found there, too
    assert server.number("cache_rows_total", cache="miss_cache", outcome="hit") == 3
    assert server.number("cache_rows_total", cache="miss_cache", outcome="miss") == before + 1 == 4


def test_batches_of_misses_are_timed_in_the_process_that_computes_them(server: Admin) -> None:
    before = server.number("model_seconds_count", view="numbers")
    seconds = server.number("model_seconds_sum", view="numbers")
    server.lookup("numbers", [12])
    assert server.number("model_seconds_count", view="numbers") == before + 1
    assert 0 < server.number("model_seconds_sum", view="numbers") - seconds < 20


def test_stale_rows_are_counted_as_they_are_computed_behind_their_answers(server: Admin) -> None:
    assert [row["status"] for row in server.lookup("old", [1, 2])] == ["stale", "stale"]
    eventually(lambda: server.number("refreshed_rows_total", view="old", outcome="computed") == 2)


def test_the_rows_that_a_worker_has_encoded_are_counted_with_their_bytes(server: Admin) -> None:
    for _ in range(3):
        assert server.get("/v1/views/numbers/rows/1").status == 200
    assert server.number("cache_rows_total", cache="l1", outcome="hit") == 2
    assert 100 < server.number("cache_bytes", cache="l1") < 10_000


def test_every_name_is_there_and_every_one_that_can_be_is_filled(server: Admin) -> None:
    """Those of powers are in their own tests. How long rows are kept for a store that fails is in
    others, since files do not; how far a server is behind is in those of replicas, and how
    another model agrees in those of students."""
    server.lookup("numbers", [1, 2, 9])
    server.get("/v1/views/numbers/rows/1")
    server.post("/v1/views/numbers/search", {"key": 1})
    server.get("/v1/views/nothing/rows/1").check_problem(404)
    assert server.get("/v1/views", authorization="Bearer nobody").status == 401
    assert server.raw(b"nonsense\r\n\r\n").status == 400
    (worker,) = workers_of(server)
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: server.number("process_restarts_total", process="worker", why="ended") == 1)
    eventually(lambda: server.number("process_resident_bytes", process="model-0") > 1e7)
    told = server.samples()
    processes = {dict(labels)["process"] for labels in told["precompute_process_resident_bytes"]}
    assert processes == {"worker-0", "model-0", "supervisor"}
    suffixes = {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_count"}
    empty = {
        instrument.name
        for instrument in INSTRUMENTS
        if instrument.name + suffixes.get(instrument.kind, "") not in told
    }
    assert empty == {
        "precompute_cache_serves_until_seconds",
        "precompute_view_behind_seconds",
        "precompute_fallback_agreement",
    }
    text = server.get("/metrics").body.decode()
    docs = [REPOSITORY / "docs" / f"{name}.md" for name in ("serving", "operations", "reference")]
    files = [*docs, *(REPOSITORY / "configs" / "monitoring").iterdir()]
    asked = {
        name
        for file in files
        for name in re.findall(r"\bprecompute_[a-z][a-z0-9_]*", file.read_text(encoding="utf-8"))
    }
    assert len(asked) > 30
    absent = [f"precompute_{power}_" for power in METRICS.known() if not METRICS.is_here(power)]
    for name in asked:
        if name.startswith(tuple(absent)):
            continue
        bare = re.sub("_(total|bucket|sum|count)$", "", name)
        assert re.search(rf"^# TYPE {bare}(_total)? ", text, re.MULTILINE), name


def test_what_may_never_be_is_told_as_0(server: Admin) -> None:
    """Of a counter that it sees first when it has counted, Prometheus takes that for no
    increase."""
    told = server.samples()
    assert told["precompute_future_rows_total"] == {
        (("view", "numbers"),): 0,
        (("view", "old"),): 0,
    }
    assert told["precompute_damaged_rows_total"][("view", "old"),] == 0
    assert told["precompute_process_restarts_total"][("process", "model"), ("why", "killed")] == 0
