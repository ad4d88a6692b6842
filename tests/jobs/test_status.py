"""Status: what is live, how old it is against its TTL, and how the last run ended."""

from __future__ import annotations

import shutil
import time
from typing import Any

import pytest

from jobs.config import Project
from jobs.progress import Silent
from jobs.run import run_view
from jobs.status import project_status, view_status
from store.errors import PrecomputeError, SnapshotError
from store.offline_store import OfflineStore
from store.online_url import open_online_store
from tests.conftest import MakeProject

OTHER = {
    "entity": ["id"],
    "source": {"sql": "SELECT id, double AS x FROM live.numbers"},
    "model": {"use": "tests.arithmetic:Doubler"},
    "features": {"double": {"dtype": "float64"}},
    "ttl": "2h",
}


def status(project: Project) -> dict[str, Any]:
    return view_status(project, "numbers", OfflineStore(project.root), open_online_store(project.online))


def test_a_view_that_was_never_run(make_project: MakeProject) -> None:
    assert status(make_project([(1, 1.0)])) == {
        "view": "numbers",
        "status": "unpublished",
        "snapshot": None,
        "rows": None,
        "age_s": None,
        "ttl_s": 3600.0,
        "coverage": None,
        "rejected": None,
        "online": None,
        "last_run": None,
        "schedule": None,
    }


def test_a_view_that_was_computed_but_not_published(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)])
    run_view(project, "numbers", Silent(), command="materialize")
    line = status(project)
    assert (line["status"], line["snapshot"], line["online"]) == ("unpublished", None, None)
    assert (line["last_run"]["command"], line["last_run"]["status"]) == ("materialize", "committed")


def test_a_view_that_is_live(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0), (2, 2.0), (3, 3.0), (4, None)], project={"schedule": {"numbers": "0 2 * * *"}})
    before = time.time()
    run = run_view(project, "numbers", Silent())
    line = status(project)
    assert 0 <= line.pop("age_s") <= time.time() - before
    assert line == {
        "view": "numbers",
        "status": "fresh",
        "snapshot": 1,
        "rows": 3,
        "ttl_s": 3600.0,
        "coverage": 0.75,
        "rejected": 1,
        "online": True,
        "last_run": {
            "run": run.run,
            "command": "run",
            "status": "published",
            "started_at": run.started_at,
            "seconds": round(run.seconds, 3),
            "error": None,
        },
        "schedule": "0 2 * * *",
    }


@pytest.mark.parametrize(
    ("ttl", "stale_for", "status_"),
    [("1h", "1h", "fresh"), ("0s", "1h", "stale"), ("0s", "0s", "expired"), ("1h", "0s", "fresh")],
)
def test_the_age_is_judged_by_the_ttl_that_is_served(make_project: MakeProject, ttl: str, stale_for: str, status_: str) -> None:
    """Which is the published one: an edited TTL takes effect with the next run, here as in every lookup."""
    run_view(make_project([(1, 1.0)], view={"ttl": ttl, "stale_for": stale_for}), "numbers", Silent())
    assert status(make_project())["status"] == status_


def test_a_failed_run_shows_beside_what_is_still_live(make_project: MakeProject) -> None:
    run_view(make_project([(1, 1.0)]), "numbers", Silent())
    project = make_project([(1, 1.0), (1, 2.0)])
    with pytest.raises(PrecomputeError):
        run_view(project, "numbers", Silent())
    line = status(project)
    assert (line["status"], line["snapshot"], line["rows"], line["online"]) == ("fresh", 1, 1, True)
    assert line["last_run"]["status"] == "failed"
    assert "unique" in line["last_run"]["error"]


def test_an_online_store_that_serves_something_else_shows(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)])
    run_view(project, "numbers", Silent())
    shutil.rmtree(project.root / "online")
    line = status(project)
    assert (line["status"], line["online"]) == ("fresh", False)
    run_view(project, "numbers", Silent(), command="publish")
    assert status(project)["online"] is True


def test_every_view_has_its_line(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)], views={"another": OTHER})
    run_view(project, "numbers", Silent())
    lines = project_status(project)
    assert [(line["view"], line["status"], line["ttl_s"]) for line in lines] == [
        ("another", "unpublished", 7200.0),
        ("numbers", "fresh", 3600.0),
    ]


@pytest.mark.parametrize("file", ["refs/live.json", f"manifests/{1:020d}.json", "runs/99999999T000000.000000Z-ffffff.json"])
def test_a_damaged_file_is_an_error_in_words(make_project: MakeProject, file: str) -> None:
    project = make_project([(1, 1.0)])
    run_view(project, "numbers", Silent())
    (project.root / "numbers" / file).write_text("{torn")
    with pytest.raises(SnapshotError, match=file.rpartition("/")[2]):
        status(project)


def test_a_live_snapshot_whose_manifest_is_gone_is_an_error_in_words(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0)])
    run_view(project, "numbers", Silent())
    shutil.rmtree(project.root / "numbers" / "manifests")
    with pytest.raises(SnapshotError, match="no snapshot 1"):
        status(project)
