"""Chain: a view and what was made from it go back together, each to what was live before the same
moment."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from precompute.jobs.ops.chain import made_from
from precompute.store.disk import crashpoint
from tests import REPOSITORY
from tests.fixtures import MakeProject
from tests.scene import Scene

Captured = pytest.CaptureFixture[str]
KEYS = (1, 2, 3)


def of(view: str | None) -> dict[str, Any]:
    """A view that doubles the doubles of another; of none, what is in the file."""
    file = "SELECT * FROM read_parquet('${data}/data.parquet')"
    return {
        "entity": ["id"],
        "source": {"sql": f"SELECT id, double AS x FROM live.{view}" if view else file},
        "model": {"use": "tests.models:Doubler"},
        "features": {"double": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": 4}},
        "ttl": "1h",
    }


def make(make_project: MakeProject, factor: float) -> Scene:
    return make_project(
        [(key, key * factor) for key in KEYS],
        views={"doubled": of("numbers"), "again": of("doubled"), "alone": of(None)},
    )


ORDER = ("numbers", "doubled", "again", "alone")


@pytest.fixture
def nights(make_project: MakeProject) -> Scene:
    """Two nights of all views; and a third of the last one alone."""
    for factor in (1.0, 10.0):
        project = make(make_project, factor)
        project.publish_all(*ORDER)
    return project


def live(project: Scene) -> list[tuple[int, float | None, bool]]:
    """Of each view (snapshot, double of key 1, whether it is held)."""
    found = []
    for name in ORDER:
        number, (double,) = project.served([1], name)
        found.append((number, double, project.live(name).held is not None))
    return found


FIRST = [(1, 2.0, True), (1, 4.0, True), (1, 8.0, True), (2, 20.0, False)]
SECOND = [(2, 20.0, False), (2, 40.0, False), (2, 80.0, False), (2, 20.0, False)]


def test_all_that_was_made_from_a_view_goes_back_with_it(nights: Scene, capsys: Captured) -> None:
    assert made_from(nights, "numbers") == ["again", "doubled", "numbers"]
    assert made_from(nights, "alone") == ["alone"]
    assert live(nights) == SECOND
    assert nights.cli("rollback", "numbers+", "--to", "1") == 2
    capsys.readouterr()
    assert nights.cli("rollback", "numbers+", "--json") == 0
    found = json.loads(capsys.readouterr().out)["views"]
    assert [(link["view"], link["status"], link["snapshot"]) for link in found] == [
        ("again", "published", 1),
        ("doubled", "published", 1),
        ("numbers", "published", 1),
    ]
    assert all(link["held"].startswith("held since ") for link in found)
    assert live(nights) == FIRST
    assert nights.cli("rollback", "numbers+") == 1  # there is nothing before
    assert live(nights) == FIRST


def test_what_was_live_before_the_moment_stays(nights: Scene, capsys: Captured) -> None:
    """A view that did not run since is where it is to be."""
    nights.run("numbers", full=True)
    capsys.readouterr()
    assert nights.cli("rollback", "numbers+", "--no-hold") == 0
    assert "current" in capsys.readouterr().out
    assert live(nights) == SECOND


def test_nothing_moves_where_one_cannot_go_back(nights: Scene, capsys: Captured) -> None:
    again = nights.offline.view("again")
    again.part_paths(again.snapshot(1))[0].unlink()
    again.mark_bad(1, "damaged: …", rows=False)
    assert nights.cli("rollback", "numbers+") == 1
    assert "view 'again' has no good snapshot before 2 to go back to" in capsys.readouterr().err
    assert live(nights) == SECOND


def test_what_fails_half_way_is_told_and_finished_by_the_same_command(
    nights: Scene, capsys: Captured
) -> None:
    crashpoint.arm("log.write", 2, "eio")
    capsys.readouterr()
    assert nights.cli("rollback", "numbers+") == 1
    crashpoint.disarm()
    said = capsys.readouterr().out
    assert "to finish it: precompute rollback numbers+" in said
    assert "not begun, since doubled is not" in said
    assert live(nights) == [*SECOND[:2], FIRST[2], SECOND[3]]
    assert nights.store.log.bad() == {}
    assert nights.cli("rollback", "numbers+") == 0
    assert live(nights) == FIRST


@pytest.mark.parametrize(("point", "nth"), [("log.link", 2), ("online.flip", 2), ("log.link", 3)])
def test_what_was_killed_half_way_is_finished_by_the_same_command(
    nights: Scene, point: str, nth: int
) -> None:
    """Also where the pointer moved and readers were not told, of one made from it or of itself."""
    killed = (
        "import sys; from precompute.store.disk import crashpoint; from precompute.jobs.cli import"
        f" main; crashpoint.arm({point!r}, {nth}, 'kill'); main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", killed, "-c", str(nights.folder), "rollback", "numbers+"]
    assert subprocess.run(command, cwd=REPOSITORY, check=False).returncode == -9
    assert live(nights) != FIRST
    assert nights.cli("rollback", "numbers+") == 0
    assert live(nights) == FIRST
    assert [nights.faults(name) for name in ORDER] == [[]] * 4
