"""Snapshots: the command that lists what a view has committed, and what of it can be gone back
to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from precompute.jobs.commands.operations import describe_snapshots
from precompute.jobs.ops.retention import list_snapshots
from tests.fixtures import MakeProject
from tests.scene import Scene

ROWS = 40


def run(make_project: MakeProject, rows: int, factor: float, **how: object) -> Scene:
    project = make_project(
        [(i, i * factor) for i in range(rows)],
    )
    project.run(**how)  # type: ignore[arg-type]
    return project


@pytest.fixture
def project(make_project: MakeProject) -> Scene:
    """1 pinned, 2 with a gate accepted, 3 of more rows and rolled back from, 4 committed only and
    built on 2; 2 is live."""
    run(make_project, ROWS, 1.0)
    run(make_project, ROWS, 100.0, accept=["shape", "computed"])
    project = run(make_project, ROWS + 4, 100.0)
    project.rollback()
    run(make_project, ROWS + 1, 100.0, command="materialize")
    project.store.pin(1, "by hand")
    return project


def test_every_snapshot_has_its_line_the_newest_first(project: Scene) -> None:
    store = project.store
    model = store.snapshot(1).model
    committed = {n: store.snapshot(n).created_at for n in (1, 2, 3, 4)}
    common: dict[str, Any] = {
        "partition": None,
        "model": model,
        "refused_by": [],
        "accepted": [],
        "library": None,
        "bad": None,
        "error": None,
    }
    marks = {"live": False, "previous": False, "pinned": False}
    assert list_snapshots(project, "numbers") == [
        {"snapshot": n, "created_at": committed[n]} | common | marks | facts
        for n, facts in (
            (4, {"kind": "delta", "parent": 2, "rows": ROWS + 1}),
            (
                3,
                {
                    "kind": "delta",
                    "parent": 2,
                    "rows": ROWS + 4,
                    "bad": "rolled back from",
                    "previous": True,
                },
            ),
            (
                2,
                {
                    "kind": "full",
                    "parent": 1,
                    "rows": ROWS,
                    "accepted": ["computed", "shape"],
                    "live": True,
                },
            ),
            (1, {"kind": "full", "parent": None, "rows": ROWS, "pinned": True}),
        )
    ]


def test_the_table_says_what_can_be_gone_back_to(
    project: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    found = list_snapshots(project, "numbers")
    assert project.cli("snapshots", "numbers", "--json") == 0
    assert json.loads(capsys.readouterr().out) == found
    assert project.cli("snapshots", "numbers") == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    when = {s["snapshot"]: f"{s['created_at'][:19]}Z" for s in found}
    model = found[0]["model"][:12]
    assert shown == [
        "snapshot created kind rows model gates",
        f"4 {when[4]} delta of 2 41 {model} passed",
        f"3 {when[3]} delta of 2 44 {model} passed previous, bad: rolled back from",
        f"2 {when[2]} full 40 {model} accepted computed, shape live",
        f"1 {when[1]} full 40 {model} passed pinned",
    ]


def test_what_builds_on_a_bad_one_says_so_and_a_damaged_one_hides_no_other(project: Scene) -> None:
    store = project.store
    store.mark_bad(2, "wrong prices")
    (project.root / "numbers" / "manifests" / f"{1:020d}.json").write_text("{torn")
    found = {s["snapshot"]: s for s in list_snapshots(project, "numbers")}
    assert [found[n]["bad"] for n in (4, 3, 2, 1)] == [
        "builds on 2: wrong prices",
        "rolled back from",
        "wrong prices",
        None,
    ]
    assert "is torn" in found[1]["error"]
    assert (found[1]["pinned"], found[1]["rows"]) == (True, None)
    assert describe_snapshots("numbers", list(found.values())).count("is torn") == 1


def test_a_view_without_one_says_what_to_do_and_an_unknown_one_is_refused(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make_project([(1, 1.0)])
    assert project.cli("snapshots", "numbers") == 0
    assert capsys.readouterr().out == "numbers: no snapshot yet; run `precompute run numbers`\n"
    assert project.cli("snapshots", "numbrs") == 2
    assert "did you mean 'numbers'" in capsys.readouterr().err
