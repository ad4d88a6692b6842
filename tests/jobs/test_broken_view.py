"""A mistake in one view's file is that view's: it refuses, says so wherever one looks, and
everything else goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from precompute.jobs.cli import main
from tests.fixtures import MakeProject, Prepared
from tests.jobs.test_cli import INDEXED, ROWS, report_of
from tests.scene import Scene
from tests.server import Server

MESSAGE = "views/broken.yaml:11: ttl: 'soon': write a number with a unit"
BROKEN = {
    "entity": ["id"],
    "source": {"sql": "SELECT 1 AS id, 1.0 AS x"},
    "model": {"use": "tests.models:Doubler"},
    "features": {"double": {"dtype": "float64"}},
    "ttl": "1h",
}


def spoiled(make_project: MakeProject) -> Scene:
    """A project of two views, each with two snapshots, of which the file of ``broken`` was spoiled
    since."""
    for rows in (ROWS, [*ROWS, (4, 4.0)]):
        sql = f"SELECT {len(rows)} AS id, 1.0 AS x"
        project = make_project(
            rows, view=INDEXED, views={"broken": BROKEN | {"source": {"sql": sql}}}
        )
        assert [project.cli("run", view) for view in ("numbers", "broken")] == [0, 0]
    path = project.folder / "views" / "broken.yaml"
    path.write_text(path.read_text().replace("1h", "soon"))
    return project


@pytest.fixture
def folder(prepared: Prepared) -> Path:
    return prepared(spoiled).folder


def call(folder: Path, *command: str) -> int:
    return main(["-c", str(folder), *command])


def test_what_needs_the_definition_is_refused_with_the_mistake(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the other views run."""
    capsys.readouterr()
    days = ["--from", "2026-01-01", "--to", "2026-01-01"]
    for command in ("run", "materialize", "publish", "backfill", "profile"):
        assert call(folder, command, "broken", *(days if command == "backfill" else [])) == 2
        assert MESSAGE in capsys.readouterr().err
    assert call(folder, "run", "numbers", "--full") == 0


def test_status_shows_what_is_live_and_what_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert call(folder, "status", "--json") == 1
    broken, numbers = report_of(capsys)
    assert (broken["view"], broken["status"], broken["snapshot"]) == ("broken", "fresh", 2)
    assert [MESSAGE in said for said in broken["attention"]] == [True]
    assert (numbers["view"], numbers["attention"]) == ("numbers", [])


@pytest.mark.parametrize("lost", [False, True])
def test_what_reads_the_store_needs_no_view_file(
    folder: Path, capsys: pytest.CaptureFixture[str], lost: bool
) -> None:
    """Neither a right one, nor any; a view there never was is refused as ever."""
    if lost:
        (folder / "views" / "broken.yaml").unlink()
    capsys.readouterr()
    for command, more, shown in (
        ("lookup", ["4"], "4: fresh"),
        ("explain", ["4"], "live in snapshot 2"),
        ("verify", [], "ok "),
        ("snapshots", [], "live"),
        ("pin", [], "pinned: 2"),
        ("rollback", [], "snapshot 1"),
        ("resume", [], "runs publish again"),
        ("lookup", ["3"], "3: fresh"),
        ("drop", ["--yes"], "broken"),
    ):
        assert call(folder, command, "brokn", *more) == 2
        assert "no view 'brokn'" in capsys.readouterr().err
        assert call(folder, command, "broken", *more) == 0, command
        assert shown in capsys.readouterr().out
    assert call(folder, "gc") == 0
    assert call(folder, "search", "numbers", "--key", "1") == 0


def test_it_is_served(folder: Path) -> None:
    with Server(folder) as server:
        assert server.get("/v1/views/broken/rows/4").status == 200


def test_the_schedule_says_so_and_runs_the_others(folder: Path) -> None:
    settings = folder / "project.yaml"
    settings.write_text(
        settings.read_text() + '\nschedule: {numbers: "* * * * *", broken: "* * * * *"}\n'
    )
    with subprocess.Popen(
        [sys.executable, "-m", "precompute.jobs.cli", "-c", str(folder), "schedule"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
    assert "Z broken: its file is wrong" in line
    assert MESSAGE in line


def test_a_broken_view_may_be_read_by_others_and_reads_what_there_is(
    make_project: MakeProject,
) -> None:
    """Only what is not there at all is a mistake of the view that names it."""
    reads = {"source": {"sql": "SELECT id, double AS x FROM live.numbers"}}
    nothing = {"source": {"sql": "SELECT id, double AS x FROM live.nothing"}}
    views = {"good": BROKEN | reads, "bad": BROKEN | nothing}
    project = make_project(
        view={"ttl": "soon"}, views=views, project={"schedule": {"numbers": "* * * * *"}}
    )
    assert (sorted(project.views), sorted(project.broken)) == (["good"], ["bad", "numbers"])
    assert "live.nothing: no such view" in str(project.broken["bad"])


def test_a_broken_project_refuses_everything(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "project.yaml").write_text("root: 7")
    for command in (["status"], ["lookup", "numbers", "1"], ["gc"], ["run", "numbers"]):
        assert call(folder, *command) == 2
    assert "project.yaml:1: root" in capsys.readouterr().err


def test_a_hidden_file_is_no_view(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An editor's lock on the file it has open, and what macOS puts into archives."""
    (folder / "services").mkdir()
    for place in (folder / "views", folder / "services"):
        (place / ".#numbers.yaml").symlink_to("somebody@here.1")
        (place / "._numbers.yaml").write_bytes(b"\0\5\x16\7")
    capsys.readouterr()
    assert call(folder, "graph", "--json") == 0
    assert report_of(capsys)["order"] == ["broken", "numbers"]
    assert call(folder, "validate", "--json") == 2
    assert {line["view"] for line in report_of(capsys)["checks"]} == {"broken", "numbers"}
    assert call(folder, "completion", "bash", "--", "-c", str(folder), "run", "") == 0
    assert capsys.readouterr().out.split() == ["broken", "numbers"]


def test_an_override_that_spoils_a_view_is_that_views_mistake(folder: Path) -> None:
    project = Scene(folder, {"PRECOMPUTE_VIEWS__NUMBERS__TTL": "never"})
    assert sorted(project.broken) == ["broken", "numbers"]
    assert json.dumps(str(project.broken["numbers"])).startswith(
        '"environment PRECOMPUTE_VIEWS__NUMBERS__TTL: ttl'
    )


def test_its_mistake_is_kept_without_what_it_came_through(folder: Path) -> None:
    """Frames kept to the end of a process keep DuckDB's types, and it complains of that."""
    command = [sys.executable, "-P", "-m", "precompute.jobs.cli", "-c", str(folder)]
    done = subprocess.run(
        [*command, "drop", "numbers", "--yes"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
