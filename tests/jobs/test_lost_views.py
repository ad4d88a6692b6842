"""Lost views: one whose pointer vanished from the online store is reported as lost, and answered
from what a worker holds; unknown is what nobody published, or what was dropped."""

from __future__ import annotations

from typing import Any

import pytest

from precompute.jobs.ops.retention import drop
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.rollback import reconcile
from precompute.store.errors import RequestError, RowsLostError
from precompute.store.http.app import create_app
from tests.asgi import call
from tests.fixtures import MakeProject
from tests.online_rig import rigged
from tests.scene import Scene

ROWS = [(i, float(i)) for i in range(8)]


def lose_pointer(project: Scene) -> None:
    """As by FLUSHALL, or a failover to an empty replica."""
    if project.online.startswith("table"):
        (project.folder / "online" / "numbers" / "live.json").unlink()
    else:
        rigged(project.online).restore(project.online, None)


@pytest.fixture
def project(make_project: MakeProject, online: str) -> Scene:
    project = make_project(
        ROWS, project={"online": online}, view={"index": {"on": "vector", "metric": "l2"}}
    )
    project.run()
    return project


def test_a_view_that_was_there_is_never_unknown(project: Scene) -> None:
    ways: list[tuple[str, str, Any]] = [
        ("GET", "/v1/views/numbers/rows/2", None),
        ("POST", "/v1/views/numbers/lookup", {"keys": [1, 2]}),
        ("POST", "/v1/lookup", {"requests": [{"view": "numbers", "keys": [1]}]}),
        ("POST", "/v1/views/numbers/search", {"key": 1, "k": 2}),
    ]
    with project.lookup() as lookup:
        app = create_app(lookup)
        assert call(app, "GET", "/v1/views/numbers/rows/1").json["status"] == "fresh"
        lose_pointer(project)
        for method, path, body in ways:
            reply = call(app, method, path, body)
            if path == "/v1/lookup":
                # one view that is lost fails no other
                assert (
                    reply.json["responses"][0]["problem"]["type"]
                    == "urn:precompute:problem:store_unavailable"
                )
                continue
            reply.check_problem(503, "store_unavailable")
            assert reply.headers["retry-after"] == "1", path
        # what the worker holds is served, as in any failure of the store
        kept = call(app, "GET", "/v1/views/numbers/rows/1")
        assert kept.status == 200
        assert kept.json["status"] == "stale"
        assert kept.json["features"]["double"] == 2.0
        assert call(app, "GET", "/v1/views/nothing/rows/1").status == 404
        ready = call(app, "GET", "/readyz")
        assert (ready.status, ready.json["status"]) == (200, "degraded")
        with pytest.raises(RowsLostError, match="precompute reconcile numbers"):
            lookup.get("numbers", [3])
        assert reconcile(project, "numbers", Silent()) is not None
        assert lookup.row("numbers", 3)["features"]["double"] == 6.0
        assert call(app, "GET", "/readyz").json["status"] == "ready"


def test_a_view_that_was_dropped_is_unknown(project: Scene) -> None:
    with project.lookup() as lookup:
        assert lookup.row("numbers", 3)["features"]["double"] == 6.0
        drop(project, "numbers")
        with pytest.raises(RequestError, match="no view 'numbers' is live") as caught:
            lookup.row("numbers", 3)
        assert caught.value.status == 404
