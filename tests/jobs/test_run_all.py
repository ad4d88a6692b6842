"""Several views at once: which are chosen, in which order they run, what a failure stops, and the
one report of all; the graph of what depends on what."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from precompute.jobs.ops.run_all import Outcome, Output, Selection, selected, worst
from precompute.jobs.ops.status import WAITING, never_began, project_status
from precompute.jobs.run.report import reporting_run
from precompute.jobs.schedule.dependencies import Dependencies
from precompute.store.disk.lease import take
from precompute.store.offline.log import run_lease
from precompute.store.times import shown_time
from precompute.workers.process import ChildProcess
from tests.fixtures import MakeProject
from tests.scene import Scene

ROWS = [(1, 1.0), (2, 2.0), (3, 3.0)]
Captured = pytest.CaptureFixture[str]


def view(parent: str | None = None, **args: Any) -> dict[str, Any]:
    """A view over the live rows of another one, or over the file."""
    sql = (
        "SELECT id, x FROM read_parquet('${data}/data.parquet')"
        if parent is None
        else f"SELECT id, double AS x FROM live.{parent}"
    )
    model = {"use": "tests.models:Doubler", "args": {"dim": 0} | args}
    return {
        "entity": ["id"],
        "source": {"sql": sql},
        "model": model,
        "features": {"double": {"dtype": "float64"}},
        "ttl": "1h",
    }


def make(make_project: MakeProject, **of_middle: Any) -> Scene:
    """numbers ← middle ← leaf, and beside: numbers before late, by the schedule alone."""
    views = {
        "middle": view("numbers", **of_middle),
        "leaf": view("middle"),
        "late": view(),
        "alone": view(),
    }
    schedule = {"numbers": "0 2 * * *", "late": "after numbers", "leaf": "after numbers"}
    return make_project(ROWS, views=views, project={"schedule": schedule})


@pytest.mark.parametrize(
    ("selectors", "chosen"),
    [
        (["middle"], ["middle"]),
        (["middle+"], ["middle", "leaf"]),
        (["+middle"], ["numbers", "middle"]),
        (["+leaf"], ["numbers", "middle", "leaf"]),
        (["+middle+"], ["numbers", "middle", "leaf"]),
        (["numbers+"], ["numbers", "late", "middle", "leaf"]),
        (["leaf", "alone", "middle"], ["alone", "middle", "leaf"]),
        ([], ["alone", "numbers", "late", "middle", "leaf"]),
    ],
)
def test_selectors_name_views_in_the_order_they_run(
    make_project: MakeProject, selectors: list[str], chosen: list[str]
) -> None:
    assert selected(make(make_project), Selection(selectors)) == chosen


def test_the_graph_is_a_tree_and_a_flowchart(make_project: MakeProject, capsys: Captured) -> None:
    project = make(make_project)
    assert project.cli("graph") == 0
    assert capsys.readouterr().out.splitlines() == [
        "alone  (not scheduled)",
        "numbers  (0 2 * * *)",
        "├─ late  (after)",
        "├─ middle  (reads, not scheduled)",
        "│  └─ leaf  (reads, after numbers)",
        "└─ leaf  (after)",
    ]
    assert project.cli("graph", "middle+", "--mermaid") == 0
    assert capsys.readouterr().out.splitlines() == [
        "flowchart LR",
        '  v0["middle"]',
        '  v1["leaf<br>after numbers"]',
        "  v0 -->|reads| v1",
    ]
    assert project.cli("graph", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["order"] == ["alone", "numbers", "late", "middle", "leaf"]
    assert printed["views"]["leaf"] == {
        "schedule": "after numbers",
        "depends_on": {"middle": ["reads"], "numbers": ["after"]},
    }


def test_views_that_read_each_other_have_an_order_too(make_project: MakeProject) -> None:
    project = make_project(ROWS, views={"a": view("b"), "b": view("a"), "c": view("b")})
    dependencies = Dependencies(project)
    assert dependencies.order == ["numbers", "a", "b", "c"]
    assert dependencies.below("a") == {"b", "c"}
    assert dependencies.text(["a", "b", "c"]).count("c  (") == 1


def test_one_that_fails_stops_only_what_depends_on_it(
    make_project: MakeProject, capsys: Captured
) -> None:
    make(make_project, kill_on=4.0)
    project = make(make_project, kill_on=4.0)
    (project.folder / "views" / "alone.yaml").write_text("name: alone\nentity: nonsense\n")
    project = project.reread()
    assert project.cli("run", "--all", "--json") == 2
    report = json.loads(capsys.readouterr().out)
    ends = {
        line["view"]: (line["status"], line["exit_status"], line["rows"])
        for line in report["views"]
    }
    assert ends == {
        "alone": ("failed", 2, None),
        "numbers": ("published", 0, 3),
        "late": ("published", 0, 3),
        "middle": ("killed", 1, None),
        "leaf": ("skipped", None, None),
    }
    errors = {line["view"]: line["error"] for line in report["views"] if line["error"]}
    assert "alone.yaml: " in errors["alone"]
    assert (
        errors["middle"]
        == "its process was ended by signal 9 (SIGKILL), as by a system that is out of memory"
    )
    assert errors["leaf"] == "not run: middle was killed"
    assert (report["exit_status"], report["counts"]) == (
        2,
        {"failed": 1, "published": 2, "killed": 1, "skipped": 1},
    )

    # what failed, and what waited for it, without the rest
    assert selected(project, Selection(failed=True)) == ["alone", "middle", "leaf"]
    assert project.cli("run", "alone+", "+late") == 2
    # it has no report that tells that it failed
    assert "is run by: precompute run alone+\n" in capsys.readouterr().out
    project = make(make_project)
    assert project.cli("run", "--failed", "--json") == 0
    assert [
        (line["view"], line["status"]) for line in json.loads(capsys.readouterr().out)["views"]
    ] == [
        ("middle", "published"),
        ("leaf", "published"),
    ]
    assert project.rows(view="leaf")[0]["double"] == 8.0
    assert project.cli("run", "--failed") == 0
    assert capsys.readouterr().out == "nothing to run\n"
    # never published is not fresh, and neither is what another input was live for since
    assert selected(project, Selection(stale=True)) == ["alone"]
    assert selected(project, Selection(["numbers+"], stale=True)) == []
    make_project([*ROWS, (4, 4.0)])
    project.run("numbers")
    assert selected(project, Selection(["numbers+"], stale=True)) == ["middle", "leaf"]


def test_a_run_that_was_begun_elsewhere_is_not_taken_for_its_own(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """One that began while the process of this one started, and has the view's lease."""
    project = make_project(ROWS)

    def begun_elsewhere(command: list[str], output: Output) -> ChildProcess:
        held.enter_context(take(project.store.leases, run_lease(None), "run"))
        held.enter_context(reporting_run(project.store, "run"))
        return ChildProcess(command, output=output)

    monkeypatch.setattr("precompute.jobs.ops.run_all.ChildProcess", begun_elsewhere)
    with contextlib.ExitStack() as held:
        assert project.cli("run", "--all", "--json") == 1
    (line,) = json.loads(capsys.readouterr().out)["views"]
    assert (line["status"], line["run"]) == ("failed", None)
    assert line["error"].startswith("another run of view 'numbers' is going on")


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [((), 0), ((0, None), 0), ((0, 3), 3), ((3, 1), 1), ((1, 2, 3, 0), 2), ((0, 1, None), 1)],
)
def test_the_exit_status_is_the_worst(statuses: tuple[int | None, ...], expected: int) -> None:
    assert worst([Outcome("v", "", status) for status in statuses]) == expected


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            (),
            r"run what? Name a view (alone, late, leaf, middle, numbers), or say --all, --stale or --failed",
        ),
        (("--all", "numbers"), "--all and numbers: name views, or all of them"),
        (("numbers+", "--accept", "rows"), "--accept is of one view"),
        (("numbers", "late", "--partition", "2026-01-01"), "--partition is of one view"),
        (("--all", "--take-over"), "--take-over is of one view"),
        (("nubers",), "did you mean 'numbers'"),
    ],
)
def test_what_makes_no_sense_of_several_is_refused(
    make_project: MakeProject, capsys: Captured, command: tuple[str, ...], message: str
) -> None:
    assert make(make_project).cli("run", *command) == 2
    assert message in capsys.readouterr().err


def test_what_ends_it_ends_the_run_in_hand_and_names_the_rest(
    make_project: MakeProject, capsys: Captured
) -> None:
    project = make(make_project, sleep_s=60.0)
    command = [sys.executable, "-m", "precompute.jobs.cli", "-c", str(project.folder), "run"]
    with subprocess.Popen(
        [*command, "+leaf"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        runs = project.offline.view("middle").runs
        limit = time.monotonic() + 60
        while runs.last() is None and time.monotonic() < limit:
            time.sleep(0.05)
        assert never_began(project) == {}, "their turn comes"
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    report = runs.last()
    assert report is not None
    assert (process.returncode, report.status) == (143, "killed")
    assert project.offline.view("leaf").runs.last() is None

    project = make(make_project)
    (began,) = never_began(project).values()
    killed = f"the run of several views of {shown_time(began)} was killed before"
    lines = {line["view"]: line["attention"] for line in project_status(project)}
    assert f"{killed} this one began: precompute run leaf" in lines["leaf"]
    assert not any(killed in text for name in ("middle", "numbers") for text in lines[name])
    assert selected(project, Selection(failed=True)) == ["middle", "leaf"]
    assert project.cli("run", "+leaf") == 0
    assert f"{killed} these began: leaf\n" in capsys.readouterr().err
    assert never_began(project) == {}
    assert project.status("leaf")["attention"] == []
    (project.root / WAITING).write_text("{torn")
    assert [line["attention"] for line in project_status(project) if line["view"] == "leaf"] == [[]]
