"""What looks at what was committed: history, diff, log and export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from precompute.jobs.ops.history import diff, history, off_by
from precompute.jobs.run.command_process import operator
from precompute.store.disk.record import replace
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import Feature
from precompute.store.history import changes
from precompute.store.offline import log
from precompute.store.offline.log import BadMark
from precompute.techniques.row_errors import MOST
from tests.fixtures import MakeProject
from tests.models import Doubler
from tests.scene import Scene

Captured = pytest.CaptureFixture[str]
OPEN = {"gates": {"first": None}}
"""The vectors have nearly one direction."""


def three_snapshots(make_project: MakeProject) -> Scene:
    """1: keys 0 to 39. 2, a delta of it: 3 by another value, 39 gone, 40 new. 3: all computed again
    by another model, to the same values."""
    first = [(key, float(key)) for key in range(40)]
    make_project(first, view=OPEN).run()
    second = [(key, 100.0 if key == 3 else x) for key, x in first if key < 39]
    make_project([*second, (40, 40.0)], view=OPEN).run()
    project = make_project(
        view=OPEN | {"model": {"use": "tests.models:Doubler", "args": {"version": 2}}}
    )
    project.run()
    return project


@pytest.fixture
def project(make_project: MakeProject, capsys: Captured) -> Scene:
    project = three_snapshots(make_project)
    capsys.readouterr()
    return project


@pytest.mark.parametrize("by_position", [False, True])
def test_a_difference_names_its_rows_and_figures(
    project: Scene, capsys: Captured, monkeypatch: pytest.MonkeyPatch, by_position: bool
) -> None:
    if by_position:
        # as if the rows were so wide that one or two are compared at a time
        monkeypatch.setattr(changes, "VECTOR_SHARE", 2**40)
        monkeypatch.setattr(changes, "WINDOW_BYTES", 200)
    for first, second, counts in (
        (2, 1, (38, 0, 1, 1, 1)),
        (1, 3, (38, 38, 1, 1, 1)),
        (2, 2, (40, 0, 0, 0, 0)),
    ):
        two = diff(project, "numbers", first, second)
        assert (two.alike, two.recomputed, two.changed, two.added, two.gone) == counts
        assert [row.key for row in two.worst] == (["3"] if two.changed else [])
    assert project.cli("diff", "numbers", "1", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == {"alike": 38, "recomputed": 0, "changed": 1, "added": 1, "gone": 1}
    before, now = [float(n) for n in (3, 4, 5, 6)], [float(n) for n in (100, 101, 102, 103)]
    (worst,) = found["worst"]
    off = np.linalg.norm(np.subtract(now, before)) / np.linalg.norm(before)
    assert worst == {
        "off": pytest.approx(off),
        "key": "3",
        "feature": "vector",
        "first": before,
        "second": now,
    }
    double = found["features"]["double"]
    # the four farthest at each end count as the next
    spread = np.clip([2.0 * key for key in range(40)], 8, 70).std()
    assert (double["changed"], double["most_off"]) == (1, pytest.approx(194 / spread))
    figures = {line["figure"]: (line["first"], line["second"]) for line in double["figures"]}
    assert figures["mean"] == (
        pytest.approx(39.0),
        pytest.approx((39 * 40 - 6 + 200 - 78 + 80) / 40),
    )
    assert (figures["zero"], figures["null"]) == ((0.025, 0.025), (0.0, 0.0))
    assert project.cli("diff", "numbers", "1", "2") == 0
    printed = capsys.readouterr().out
    for words in (
        "rows: 40 → 40: 1 changed, 1 added, 1 gone, 38 alike",
        "precompute explain numbers KEY",
        "changed rows",
        "share of zeros",
        "5th percentile of lengths",
    ):
        assert words in printed
    assert "share of nulls" not in printed
    # of the only view: what was live before the live one; what was named, beside the live one
    for given, beside in (((), "snapshot 2 "), (("numbers", "1"), "snapshot 1 ")):
        assert project.cli("diff", *given) == 0
        assert re.match(
            rf"numbers: {beside}\(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ\) beside 3 ",
            capsys.readouterr().out,
        )
    assert project.cli("diff", "numbers", "1", "9") == 1
    assert "has no snapshot 9" in (error := capsys.readouterr().err)
    assert error.endswith("; shown by: precompute history numbers\n")


def test_a_feature_of_another_type_is_compared_with_nothing(
    make_project: MakeProject, project: Scene
) -> None:
    wider = {"model": {"use": "tests.models:Doubler", "args": {"dim": 5}}}
    features = {"double": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": 5}}
    project = make_project(view=OPEN | wider | {"features": features})
    project.run(command="materialize")
    found = diff(project, "numbers", 3, 4)
    assert (found.only_first, found.only_second, [*found.features]) == (
        ["vector"],
        ["vector"],
        ["double"],
    )
    assert (found.alike, found.changed) == (40, 0)


@pytest.mark.parametrize(
    ("feature", "first", "second", "off"),
    [
        (
            Feature("f", "float32"),
            [1.0, None, None, 2.0, float("nan")],
            [1.0, None, 1.0, 4.0, float("nan")],
            [0, 0, MOST, 1, 0],
        ),
        (
            Feature("f", "float32", dim=2),
            [[3.0, 4.0], None, [0.0, 1.0]],
            [[3.0, 4.0], [1.0, 1.0], [0.0, 3.0]],
            [0, MOST, 2],
        ),
        (Feature("f", "string"), ["a", "b", None], ["a", "c", None], [0, 1, 0]),
        (
            Feature("f", "string", max_items=2),
            [["a", "b"], [], ["a"]],
            [["a", "b"], [], ["b"]],
            [0, 0, 1],
        ),
    ],
    ids=lambda value: value.dtype if isinstance(value, Feature) else "",
)
def test_how_far_a_value_is_off(
    feature: Feature, first: list[Any], second: list[Any], off: list[float]
) -> None:
    one, two = (pa.array(values, feature.arrow_type) for values in (first, second))
    assert off_by(feature, one, two, spread=2.0).tolist() == off


def test_history_has_snapshots_runs_and_moves(project: Scene, capsys: Captured) -> None:
    project.rollback()
    with pytest.raises(SnapshotError):
        project.run(snapshot=99, command="publish")
    stamp = project.store.runs.stamp()
    begun = replace(
        project.report(), run=f"{stamp}-f00000", status="running", command="run", seconds=0.0
    )
    project.store.runs.write(begun)
    assert project.cli("history", "numbers", "--json") == 0
    events = json.loads(capsys.readouterr().out)
    assert [event["at"] for event in events] == sorted(
        (event["at"] for event in events), reverse=True
    )
    of = {
        kind: [event for event in events if event["kind"] == kind]
        for kind in ("run", "snapshot", "pointer")
    }
    assert [(e["command"], e["status"]) for e in of["run"]] == [
        ("run", "killed"),
        ("rollback", "published"),
        *[("run", "published")] * 3,
    ]
    assert [(e["snapshot"], e["live"]) for e in of["snapshot"]] == [
        (3, False),
        (2, True),
        (1, False),
    ]
    assert [e["snapshot"] for e in of["pointer"]] == [2, 3, 2, 1]
    assert project.cli("history", "numbers", "--limit", "2") == 0
    printed = capsys.readouterr().out
    assert (
        "run killed, snapshot 2, –: the process died without reporting why" in printed,
        "--limit N for more" in printed,
    ) == (True, True)
    assert project.cli("drop", "numbers", "--yes") == 0
    capsys.readouterr()
    assert project.cli("history", "numbers") == 0
    assert "pointer   to nothing" in capsys.readouterr().out


def test_history_has_what_the_log_says_in_its_order(
    project: Scene, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a clock that falls, too."""
    view_log, by = project.store.log, operator()
    project.rollback()
    project.store.pin(1, "the audit")
    with monkeypatch.context() as patched:
        patched.setattr(log, "utc_now", lambda: "2020-01-01T00:00:00Z")
        view_log.unpin(1)
        view_log.accept(3, ["rows", "drift"], f"publish ({by})", "by --accept")
    view_log.mark_bad(1, BadMark("its manifest was damaged"))
    view_log.resume_live()
    view_log.unmark([1])
    said = [
        {name: value for name, value in event.items() if value and name not in ("at", "run")}
        for event in history(project, "numbers", 100)
        if event["kind"] in ("pointer", "event")
    ]
    one = {"kind": "event", "by": by}
    assert said[:-3] == [
        one | {"epoch": 10, "event": "accept", "unmarked": [1]},
        one | {"epoch": 9, "event": "resume"},
        one | {"epoch": 8, "event": "bad", "snapshot": 1, "reason": "its manifest was damaged"},
        one
        | {"epoch": 7, "event": "accept", "snapshot": 3, "reason": "by --accept"}
        | {"gates": ["drift", "rows"], "by": f"publish ({by})"},
        one | {"epoch": 6, "event": "unpin", "snapshot": 1},
        one | {"epoch": 5, "event": "pin", "snapshot": 1, "reason": "the audit"},
        {"kind": "pointer", "by": by, "epoch": 4, "snapshot": 2, "reason": "rollback from 3"}
        | {"held": "went back from 3", "marks": [3], "publishings": 1},
    ]
    assert project.cli("history", "numbers", "--limit", "7") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [re.split("  +", line, maxsplit=1)[1] for line in shown[1:8]] == [
        f"event    accept not bad any more: 1, by {by}",
        f"event    resume, by {by}",
        f"event    bad snapshot 1, by {by}: its manifest was damaged",
        f"event    accept snapshot 3 drift, rows, by publish ({by}): by --accept",
        f"event    unpin snapshot 1, by {by}",
        f"event    pin snapshot 1, by {by}: the audit",
        f"pointer  to 2, epoch 4, by rollback from 3 ({project.report().run}); held: went back from 3; bad: 3",
    ]


class Hostile(Doubler):
    """Raises with markup, and answers with it."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        x = np.asarray(batch.column("x"))
        if (x == 7).any():
            raise ValueError(EVIL)
        return {
            "text": [EVIL if one % 3 else "plain" for one in x],
            "vector": np.stack([x + 1, -x], axis=1).astype(np.float32),
        }


EVIL = "</title><script>document.title='ran'</script>'\""


def hostile_project(make_project: MakeProject) -> Scene:
    """Keys, values and errors that are markup; composite keys; rejected rows."""
    table = pa.table(
        {
            "id": [EVIL, *(f"{n}/{n}" for n in range(30))],
            "part": ["%"] * 31,
            "x": [float(n) for n in range(31)],
        }
    )
    view = {
        "entity": ["id", "part"],
        "model": {"use": "tests.jobs.test_review:Hostile"},
        "features": {"text": {"dtype": "string"}, "vector": {"dtype": "float32", "dim": 2}},
    }
    project = make_project(table, view=view)
    project.run()
    return project


def test_a_run_in_words(make_project: MakeProject, capsys: Captured) -> None:
    hostile = hostile_project(make_project)
    run = hostile.report().run
    for which in (run, run[:-3], "numbers"):
        assert hostile.cli("log", which) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{run}: run of numbers, published, snapshot 1\n")
        assert "1 × model: ValueError: </title>" in printed
    assert hostile.cli("log", run, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (
        printed["run"],
        printed["rejections"]["rows"],
        printed["rejections"]["first"][0]["stage"],
    ) == (
        run,
        1,
        "model",
    )
    for which in ("nope", "", "../numbers", "*"):
        assert hostile.cli("log", which) == 2
        assert "precompute history VIEW" in capsys.readouterr().err or which == ""


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_an_export_is_the_live_rows_in_one_file(
    project: Scene, tmp_path: Path, capsys: Captured, kind: str
) -> None:
    path = tmp_path / f"rows.{kind}"
    assert project.cli("export", "numbers", "--to", str(path), "--snapshot", "2", "--json") == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["rows"], line["snapshot"], line["size_bytes"]) == (40, 2, path.stat().st_size)
    table = pq.read_table(path) if kind == "parquet" else pa.csv.read_csv(path)
    assert table.column_names == ["id", "double", "vector", "computed_at", "input_hash"]
    read = {row["id"]: row for row in table.to_pylist()}
    for row in project.rows(2):
        vector = read[row["id"]]["vector"]
        assert (read[row["id"]]["double"], json.loads(vector) if kind == "csv" else vector) == (
            row["double"],
            row["vector"],
        )
    assert len(read) == 40
    assert project.cli("export", "numbers", "--to", str(path)) == 2
    assert "--replace" in capsys.readouterr().err
    assert project.cli("export", "numbers", "--to", str(path), "--replace") == 0
    assert project.cli("export", "numbers", "--to", str(tmp_path / "rows.xls")) == 2
    assert project.cli("export", "numbers", "--to", str(tmp_path / "no" / "rows.csv")) == 2
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == [path.name]
