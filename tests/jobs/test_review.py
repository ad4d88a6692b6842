"""What looks at what was committed: history, diff, log, export and the page of a run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from precompute.jobs.ops.history import diff, off_by
from precompute.jobs.ops.run_figures import principal_axes
from precompute.store.disk.record import replace
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import Feature
from precompute.store.history import changes
from precompute.store.http.page.figures import REPORT, ViewFigures, graph, report_path
from precompute.techniques.row_errors import MOST
from tests.fixtures import MakeProject
from tests.models import Doubler
from tests.scene import Scene
from tests.store.test_page import DETAILS, Parsed, harmless, report

Captured = pytest.CaptureFixture[str]
OPEN = {"gates": dict.fromkeys(("rows", "moved", "norm", "drift", "shift", "rolled_back", "mass"))}


@pytest.fixture
def project(make_project: MakeProject, capsys: Captured) -> Scene:
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
    spread = float(np.std([2.0 * key for key in range(40)]))
    assert (double["changed"], double["most_off"]) == (1, pytest.approx(194 / spread))
    figures = {line["figure"]: (line["first"], line["second"]) for line in double["figures"]}
    assert figures["mean"] == (
        pytest.approx(39.0),
        pytest.approx((39 * 40 - 6 + 200 - 78 + 80) / 40),
    )
    assert figures["zero"] == (1, 1)
    assert project.cli("diff", "numbers", "1", "2") == 0
    printed = capsys.readouterr().out
    for words in (
        "rows: 40 → 40: 1 changed, 1 added, 1 gone, 38 alike",
        "precompute explain numbers KEY",
        "changed rows",
    ):
        assert words in printed
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


@pytest.fixture
def hostile(make_project: MakeProject) -> Scene:
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
        "gates": {"constant": None},
    }
    project = make_project(table, view=view)
    project.run()
    return project


def test_the_page_of_a_run_escapes_whatever_it_shows(hostile: Scene, capsys: Captured) -> None:
    assert hostile.cli("report", "numbers", "--json") == 0
    line = json.loads(capsys.readouterr().out)
    path = hostile.root / "numbers" / REPORT
    assert (line["path"], line["snapshot"], line["size_bytes"]) == (
        str(path),
        1,
        path.stat().st_size,
    )
    page = Parsed(path.read_text(encoding="utf-8"))
    harmless(page)
    policy = next(
        meta["content"]
        for meta in page.all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    )
    assert str(policy).startswith("default-src 'none'; style-src 'sha256-")
    assert len(page.all("circle")) >= 30
    for words in (
        "1 rows got no value",
        f"model: ValueError: {EVIL}",
        "30 written",
        f"commonest {EVIL} (",
    ):
        assert words in page.text, words
    assert any(EVIL[:40] in text for text in page.texts)
    assert any(
        str(svg.get("class")) == "then" or svg.get("height") == "90" for svg in page.all("svg")
    )
    assert report_path(hostile.root, "numbers") == path
    assert report_path(hostile.root, "others") is report_path(None, "numbers") is None


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium on the PATH")
def test_in_a_browser_nothing_of_a_hostile_row_runs(hostile: Scene, tmp_path: Path) -> None:
    """By its escaping alone, without the page's policy; a page with the script let in shows that it
    ran, lest the test see nothing."""
    assert hostile.cli("report", "numbers", "--to", str(tmp_path / "page.html")) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    (tmp_path / "open.html").write_text(page.replace("<main>", f"<main>{EVIL}"), encoding="utf-8")
    assert title_in_browser(tmp_path / "open.html") == "ran"
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    assert title_in_browser(tmp_path / "page.html").startswith("numbers: ")


def title_in_browser(path: Path) -> str:
    command = [
        "chromium",
        "--headless=old",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        f"file://{path}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None, done
    return title[1]


def test_a_run_in_words(hostile: Scene, capsys: Captured) -> None:
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


def test_a_failed_run_has_a_page_too(
    project: Scene, make_project: MakeProject, capsys: Captured, tmp_path: Path
) -> None:
    project = make_project(
        view=OPEN
        | {
            "model": {"use": "tests.models:Doubler", "args": {"nan_on": 5.0}},
            "max_rejected": 0.0,
        }
    )
    assert project.cli("run", "numbers") == 3
    capsys.readouterr()
    assert project.cli("report", "numbers", "--to", str(tmp_path / "page.html")) == 0
    # a view's own file is none to write a page into
    assert (
        project.cli("report", "numbers", "--to", str(project.folder / "views" / "numbers.yaml"))
        == 2
    )
    assert project.cli("report", "numbers", "--to", str(tmp_path / "page.html")) == 2
    page = Parsed((tmp_path / "page.html").read_text(encoding="utf-8"))
    harmless(page)
    assert "run rejected" in page.text
    assert not (project.root / "numbers" / REPORT).exists()
    # of a run that committed, beside what is live
    first = project.offline.view("numbers").runs.reports()[-1].run
    assert project.cli("report", "numbers", "--run", first) == 0
    page = Parsed((project.root / "numbers" / REPORT).read_text(encoding="utf-8"))
    assert "beside snapshot 3, which is live" in page.text


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


@pytest.mark.parametrize("shape", [(50, 3), (4, 1), (1, 2)], ids=str)
def test_principal_axes_are_those_of_the_variance(shape: tuple[int, int]) -> None:
    vectors = np.random.default_rng(1).normal(size=shape) * np.arange(1, shape[1] + 1) * 1e200
    middle, axes, shares = principal_axes(vectors)
    scaled = (vectors - middle) / 1e200
    values = np.linalg.svd(scaled, compute_uv=False) ** 2
    expected = (
        [*values[:2] / max(values.sum(), 1e-300), 0.0, 0.0][:2] if shape[0] > 1 else [0.0, 0.0]
    )
    assert shares == pytest.approx(tuple(expected))
    along = ((scaled @ axes) ** 2).sum(axis=0)
    assert along == pytest.approx([*values, 0.0, 0.0][:2] if shape[0] > 1 else [0.0, 0.0])


def test_the_page_draws_what_depends_on_what() -> None:
    def view(name: str, *inputs: str, after: str | None = None) -> ViewFigures:
        run = report(
            "published",
            19,
            inputs=dict.fromkeys(inputs, 1),
            parents={} if after is None else {after: 1},
        )
        return ViewFigures(DETAILS | {"view": name}, [report("failed", 20), run])

    drawn = graph(
        [
            view("top", "middle", "base"),
            view("base"),
            view("middle", "base", "gone"),
            view("late", after="base"),
        ]
    )
    assert drawn is not None
    places = {node.view: (node.x, node.y) for node in drawn.nodes}
    assert places["base"][0] < places["middle"][0] == places["late"][0] < places["top"][0]
    assert len(set(places.values())) == 4
    assert {(edge.words, edge.reads) for edge in drawn.edges} == {
        ("top reads middle", True),
        ("top reads base", True),
        ("middle reads base", True),
        ("late runs after base", False),
    }
    assert graph([view("a", "a"), view("b", "gone")]) is None
    assert graph([view("a", "b"), view("b", "a")]) is not None
