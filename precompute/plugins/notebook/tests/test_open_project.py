"""A project from Python: run, looked up, searched; rows from DataFrames, and answers as
DataFrames."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import precompute as pc
from precompute.jobs.ops.run_all import Selection, selected
from precompute.plugins.notebook.open_project import OpenProject
from precompute.plugins.notebook.rows import Rows
from tests import REPOSITORY
from tests.fixtures import MakeProject
from tests.scene import Scene
from tests.test_packaging import ABSENT, declared

FRAME = {
    "source": {"frame": ["id", "x"]},
    "index": {"on": "vector", "metric": "l2"},
    "fallback": {"enabled": True, "deadline": "20s", "spare": False},
}
DATA = {"x": [1.0, 2.0, 3.0], "id": [1, 2, 3], "junk": ["a", None, "ü"]}


@pytest.fixture
def scene(make_project: MakeProject) -> Scene:
    return make_project(view=FRAME)


@pytest.fixture
def project(scene: Scene) -> Iterator[OpenProject]:
    with pc.open(scene.folder) as project:
        yield project


def of_polars(data: dict[str, Any]) -> Any:
    return pytest.importorskip("polars").DataFrame(data)


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "pandas": pd.DataFrame,
    "pandas, the key as its index": lambda data: pd.DataFrame(data).set_index("id"),
    "pandas, beside what Arrow has no type for": lambda data: pd.DataFrame(
        data | {"junk": [1, "a", object()]}
    ),
    "polars": of_polars,
    "Arrow": pa.table,
    "Arrow in batches": lambda data: pa.Table.from_batches(
        pa.table(data).to_batches(max_chunksize=1)
    ),
    "a stream": lambda data: pa.table(data).to_reader(),
    "rows": lambda data: pa.table(data).to_pylist(),
    "columns": dict,
}


def test_a_frame_is_a_source_like_any_other(project: OpenProject, scene: Scene) -> None:
    """Whatever it comes as, the same content is the same rows; what changed is computed, what is
    gone is removed."""
    first = project.run("numbers", frame=pd.DataFrame(DATA), progress=False)
    assert (first.status, first.counts["written"]) == ("published", 3)
    assert scene.doubles() == {1: 2.0, 2: 4.0, 3: 6.0}
    for name, form in FORMS.items():
        again = project.run("numbers", frame=form(DATA), progress=False)
        assert (again.status, again.snapshot) == ("current", 1), name
    changed = {"x": [1.0, 5.0, 4.0], "id": [1, 2, 4], "junk": [None, None, None]}
    delta = project.run("numbers", frame=changed, accept=["rows"], progress=False)
    assert delta.counts == {
        "source": 3,
        "written": 2,
        "unchanged": 1,
        "removed": 1,
        "rejected": 0,
        "duplicates": 0,
    }
    assert project.lookup("numbers", [1, 2, 3, 4])["double"].to_pylist() == [2.0, 10.0, None, 8.0]


def keys_of(kind: pa.DataType) -> pa.Array:
    keys = ["a b", "ü/%"]
    if not pa.types.is_dictionary(kind):
        return pa.array(keys, kind)
    return pa.DictionaryArray.from_arrays(
        pa.array([0, 1], kind.index_type), pa.array(keys, kind.value_type)
    )


def test_a_frame_of_every_type(make_project: MakeProject) -> None:
    """The model gets what was given; keys of text, in whatever Arrow calls it."""
    scene = make_project(view={"source": {"frame": ["id", "x"]}, "entity": ["id"]})
    of_text = [pa.dictionary(pa.int32(), text) for text in (pa.string(), pa.large_string())]
    for kind, number in zip(
        (pa.string(), pa.large_string(), pa.string_view(), *of_text),
        (pa.float16(), pa.float32(), pa.int8(), pa.uint64(), pa.int16()),
        strict=True,
    ):
        x = pa.array(np.array([1, 2], number.to_pandas_dtype()), number)
        table = pa.table({"id": keys_of(kind), "x": x})
        with pc.open(scene.folder / "project.yaml") as project:
            project.run("numbers", frame=table, progress=False)
            assert project.lookup("numbers", ["ü/%", "a b"])["double"].to_pylist() == [4.0, 2.0]


def test_a_folder_above_the_root_is_no_column_of_a_frame(make_project: MakeProject) -> None:
    """``x=9`` is a partition's name to DuckDB."""
    scene = make_project(view={"source": {"frame": ["id", "x"]}}, project={"root": "./x=9/var"})
    with pc.open(scene.folder / "project.yaml") as project:
        project.run("numbers", frame=DATA, progress=False)
        assert project.lookup("numbers", [1, 2, 3])["double"].to_pylist() == [2.0, 4.0, 6.0]


def test_what_is_no_frame_of_the_view_is_refused(project: OpenProject, scene: Scene) -> None:
    project.run("numbers", frame=DATA, progress=False)
    lazy = type("LazyFrame", (), {"collect": lambda self: None})()
    twice = pd.DataFrame([[1, 1.0, 2.0]], columns=["id", "x", "x"])
    cases: list[tuple[Any, str]] = [
        (
            pd.DataFrame({"id": [1]}),
            r"the frame has no column 'x', which source\.frame names \(it has: id\)",
        ),
        (
            {"id": [1.0, None], "x": [1, 2]},
            r"key column 'id' of the frame is double: .*pandas makes floats of integers.*dropna",
        ),
        (twice, "the frame cannot be read as Arrow: Duplicate column names"),
        (lazy, r"got LazyFrame: collect\(\) it first"),
        (7, r"a frame is a DataFrame of pandas or polars.*got int"),
        (
            {"id": [1, 1], "x": [1.0, 2.0]},
            r"keys with more than one row and different values, for example 1 \(2 rows\)",
        ),
        (pd.DataFrame(DATA).iloc[:0], "yielded no rows"),
    ]
    for frame, message in cases:
        with pytest.raises(pc.SourceError, match=message):
            project.run("numbers", frame=frame, progress=False)
        assert scene.report().status == "failed"
    assert project.lookup("numbers", 3)["double"].to_pylist() == [6.0]
    objects = pytest.importorskip("polars").Series([object(), object()])
    with pytest.raises(pc.SourceError, match="column 'x' of the frame holds Python objects"):
        project.run("numbers", frame=of_polars({"id": [1, 2], "x": objects}), progress=False)
    assert not list(scene.offline.view("numbers").folder.glob(".*.tmp"))


def test_a_run_without_a_frame_is_refused(
    project: OpenProject,
    scene: Scene,
    make_project: MakeProject,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the command line and a schedule, too: what is live stays as old as it is, and does not
    pass for looked at."""
    project.run("numbers", frame=DATA, progress=False)
    live = scene.live()
    why = "view 'numbers' takes its rows from a DataFrame, and this run was given none; only Python gives one: precompute.open"
    with pytest.raises(pc.ConfigError, match=why):
        project.run("numbers")
    due = ["run", "numbers", "--due", "2026-01-01T00:00:00Z"]
    for command in (["run", "numbers"], due, ["materialize", "numbers", "--dry-run"]):
        assert scene.cli(*command) == 2
        assert why in capsys.readouterr().err
    assert (scene.report().status, scene.live()) == ("failed", live)
    assert why in (scene.report().error or "")
    make_project(
        [(1, 1.0)],
        view={
            "source": {"sql": "SELECT * FROM read_parquet('data.parquet')"},
            "gates": {"contract": False},
        },
    )
    with pytest.raises(
        pc.ConfigError,
        match=r"view 'numbers' reads SQL.*source: \{frame: \[id, …\]\}.*numbers\.yaml",
    ):
        project.run("numbers", frame=DATA)


def test_what_samples_a_view_reads_the_frame_given_last(
    project: OpenProject, scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scene.cli("profile", "numbers") == 1
    assert "none was given yet: precompute.open(…).run(view, frame=df)" in capsys.readouterr().err
    project.run("numbers", frame=DATA, progress=False)
    assert scene.cli("profile", "numbers") == 0
    assert "numbers: 3 rows" in capsys.readouterr().out


def test_a_frames_run_that_ended_goes_on(
    project: OpenProject, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given once more, what was computed of it is taken over; what was changed meanwhile is not."""
    with monkeypatch.context() as patch:
        patch.setattr("precompute.jobs.run.materialize._judge_draft", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            project.run("numbers", frame=DATA, progress=False)
    ran = project.run("numbers", frame=pd.DataFrame(DATA).assign(x=[1.0, 2.0, 9.0]), progress=False)
    assert (ran.report.resumed, ran.counts["written"]) == (2, 3)
    assert scene.doubles() == {1: 2.0, 2: 4.0, 3: 18.0}


def test_a_refused_frame_changes_nothing_of_what_is_live(
    project: OpenProject, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model behind misses reads the frame of what is live, and the next run builds on what is
    nearest to its own, whatever became of runs between."""

    def behind(key: int) -> float:
        # as another process, which opens the view now
        project.close()
        found: float = project.lookup("numbers", key, max_age_s=0, fallback=True)[0]["double"]
        return found

    good = {"id": [*range(200)], "x": [i / 2 for i in range(200)]}
    bad = {"id": good["id"], "x": [x * 1000 + 5 for x in good["x"]]}
    project.run("numbers", frame=good, progress=False)
    mend = "mend the frame or the model, and run again"
    for written, said in ((200, f"{mend}$"), (0, f"{mend}, by full=True where")):
        with pytest.raises(pc.GateError, match=f"snapshot 2 is not published.*: {said}"):
            project.run("numbers", frame=bad, progress=False)
        assert scene.report().counts["written"] == written
    with pytest.raises(pc.SourceError, match="more than one row"):
        project.run("numbers", frame={"id": [1, 1], "x": [1.0, 2.0]}, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr("precompute.jobs.run.materialize.Planner", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            project.run("numbers", frame=bad, progress=False)
    assert behind(3) == 3.0
    one_more = {"id": [*good["id"], 200], "x": [*good["x"], 0.5]}
    delta = project.run("numbers", frame=one_more, progress=False)
    assert (delta.report.plan or "").endswith(
        "1 of 201 rows to compute (1 new), 200 unchanged; builds on snapshot 1"
    )
    assert (delta.snapshot, behind(200)) == (3, 1.0)
    assert scene.cli("rollback", "numbers") == 0
    assert behind(3) == 3.0
    assert project.lookup("numbers", 200, fallback=True)["reason"].to_pylist() == ["unknown_entity"]
    assert scene.cli("gc") == 0
    assert behind(3) == 3.0


def test_the_model_behind_misses_reads_the_frame(project: OpenProject, scene: Scene) -> None:
    project.run("numbers", frame=DATA, progress=False)
    computed = project.lookup("numbers", [3, 9], max_age_s=0, fallback=True)
    assert computed["status"].to_pylist() == ["computed", "missing"]
    assert computed["double"].to_pylist() == [6.0, None]
    for fallback in (None, True):
        assert (
            project.lookup("numbers", 9, inputs={9: {"x": 2.5}}, fallback=fallback)[0]["double"]
            == 5.0
        )
    assert (
        project.lookup("numbers", 9, inputs={9: {"x": 2.5}}, fallback=False)[0]["reason"]
        == "unknown_entity"
    )
    # as a service of another process has it, wherever the root lies
    moved = scene.folder.rename(scene.folder.with_name("elsewhere"))
    with pc.open(moved) as elsewhere:
        assert elsewhere.lookup("numbers", 3, max_age_s=0, fallback=True)["double"].to_pylist() == [
            6.0
        ]
        assert elsewhere.run("numbers", frame=DATA, progress=False).status == "current"


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ({"source": {"frame": ["x"]}}, "source.frame: lacks 'id', which the entity names"),
        ({"source": {"frame": ["id", "x", "x"]}}, "source.frame: a column is named twice"),
        ({"source": {"frame": ["id"], "sql": "SELECT 1 AS id"}}, "and not both"),
        ({"source": {"frame": ["id", ""]}}, "source.frame: a column has no name"),
        (
            {"source": {"frame": ["id", "x"]}, "partition": {"by": "day", "start": "2026-01-01"}},
            "partition: a frame has none",
        ),
    ],
)
def test_a_mistake_in_a_frame_is_told(
    make_project: MakeProject, view: dict[str, Any], message: str
) -> None:
    scene = make_project(view=view)
    with pytest.raises(pc.ConfigError, match=message), pc.open(scene.folder) as project:
        project.run("numbers", frame=DATA)


# ---- answers


@pytest.fixture
def filled(project: OpenProject) -> OpenProject:
    project.run("numbers", frame=DATA, progress=False)
    project.run(
        "numbers", frame=DATA | {"x": [1.0, 2.0, 7.0]}, accept=["shape", "moved"], progress=False
    )
    return project


def test_answers_are_those_of_a_lookup(filled: OpenProject, scene: Scene) -> None:
    wanted = [3, 1, 77]
    with scene.lookup() as lookup:
        expected = lookup.get("numbers", wanted)
        near = lookup.search("numbers", key=1, k=2, features=["double"])
    timeless = [name for name in expected.column_names if name != "age_s"]
    frame = pd.DataFrame({"x": [0, 0, 0], "id": wanted})
    for keys in (
        wanted,
        np.array(wanted),
        pd.Series(wanted),
        pa.array(wanted),
        iter(wanted),
        frame,
        pa.Table.from_pandas(frame),
    ):
        assert (
            filled.lookup("numbers", keys).table.select(timeless).equals(expected.select(timeless))
        )
    found = filled.search("numbers", key=1, k=2)
    assert found["key"].to_pylist() == [row["key"] for row in near["rows"]] == ["2", "3"]
    assert found["score"].to_pylist() == [row["score"] for row in near["rows"]]
    assert found["double"].to_pylist() == [4.0, 14.0]
    vectors = filled.search("numbers", inputs={"x": 6.9}, k=1, features=["vector"])
    assert vectors.to_pylist()[0]["vector"] == [7.0, 8.0, 9.0, 10.0]
    assert vectors["vector"].type == pa.list_(pa.float32(), 4)
    nothing = filled.lookup("numbers", [], features=["double"]).table
    assert (nothing.num_rows, nothing.schema) == (0, expected.drop_columns(["vector"]).schema)
    # more than one request takes
    many = filled.lookup("numbers", range(2500))
    assert len(many) == 2500
    assert sum(row["status"] == "fresh" for row in many) == 3
    assert many[-1]["key"] == "2499"


def test_keys_are_those_columns_of_a_table_that_the_entity_has(make_project: MakeProject) -> None:
    table = pa.table({"a": [1, 1], "b": ["x/y", "50%"], "x": [1.0, 2.0]})
    scene = make_project(table, view={"entity": ["a", "b"]})
    scene.run()
    with pc.open(scene.folder) as opened:
        keys = table.select(["b", "a"])
        assert opened.lookup("numbers", keys)["double"].to_pylist() == [2.0, 4.0]


def test_a_feature_called_score_stands_beside_the_searchs_own(make_project: MakeProject) -> None:
    view: dict[str, Any] = {
        "model": {"use": "tests.jobs.test_cli:Scored"},
        "features": {"score": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": 4}},
        "index": {"on": "vector", "metric": "l2"},
    }
    scene = make_project([(1, 1.0), (2, 2.0), (3, 30.0)], view=view)
    scene.run()
    with pc.open(scene.folder) as opened:
        near = opened.search("numbers", key=1, k=2)
    assert [(row["key"], row["score"], row["features.score"]) for row in near] == [
        ("2", 4.0, 4.0),
        ("3", 3364.0, 60.0),
    ]


def test_a_service_is_a_row_for_each_entity(make_project: MakeProject) -> None:
    scene = make_project([(1, 1.0), (2, 2.0)])
    (scene.folder / "services").mkdir()
    (scene.folder / "services" / "ranking.yaml").write_text(
        "name: ranking\nentity: [id]\nviews: {numbers: [double]}\n"
    )
    scene.run()
    with pc.open(scene.folder) as project:
        rows = project.service("ranking", {"id": [2, 99]}).to_pylist()
    assert [(row["id"], row["numbers__double"], row["numbers__status"]) for row in rows] == [
        ("2", 4.0, "fresh"),
        ("99", None, "missing"),
    ]


def test_history_and_training_sets(filled: OpenProject) -> None:
    snapshots = filled.history("numbers")
    assert [(row["snapshot"], row["kind"], row["live"]) for row in snapshots] == [
        (2, "delta", True),
        (1, "full", False),
    ]
    versions = filled.history("numbers", 3)
    assert [(row["snapshot"], row["state"], row["double"]) for row in versions] == [
        (2, "live", 14.0),
        (1, "replaced", 6.0),
    ]
    between = versions[1]["served_until"]
    assert between == versions[0]["served_from"]
    before = filled.history("numbers", at=versions[1]["served_from"])
    assert sorted(before["double"].to_pylist()) == [2.0, 4.0, 6.0]
    times = pd.to_datetime([versions[1]["served_from"], datetime.now(UTC)])
    rows = pd.DataFrame({"id": [3, 3], "event_timestamp": times})
    service = pc.Service("ranking", ("id",), (pc.ServicePart("numbers", ("double",)),))
    for training in (
        filled.get_historical_features(rows, "numbers"),
        filled.get_historical_features(rows, service=service),
    ):
        assert training["numbers__double"].to_pylist() == [6.0, 14.0]


def test_answers_are_dataframes_of_any_library(filled: OpenProject) -> None:
    rows = filled.lookup("numbers", [1, 9])
    assert rows.to_arrow() is rows.table
    assert pa.table(rows).equals(rows.table)
    assert list(rows) == rows.to_pylist() == rows.table.to_pylist()
    assert (rows[0]["key"], rows[-1]["status"], rows.columns) == (
        "1",
        "missing",
        rows.table.column_names,
    )
    assert rows.to_pandas()["double"].tolist()[:1] == [2.0]
    polars = pytest.importorskip("polars")
    assert polars.DataFrame(rows).equals(rows.to_polars())
    assert rows.to_polars()["double"].to_list() == [2.0, None]
    with pytest.raises(IndexError):
        rows[2]


def test_a_library_that_is_missing_is_named(
    filled: OpenProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(
        pc.ConfigError, match=r"polars is not installed: pip install polars, or take \.to_arrow\(\)"
    ):
        filled.lookup("numbers", 1).to_polars()


def test_what_a_notebook_shows(filled: OpenProject, scene: Scene) -> None:
    """What one needs, as text and as HTML: short, and whatever stands in it, no markup of its
    own."""
    (scene.folder / "views" / "broken.yaml").write_text("name: broken\nentity: <b>\n")
    (scene.folder / "views" / "new.yaml").write_text(
        (scene.folder / "views" / "numbers.yaml").read_text().replace("name: numbers", "name: new")
    )
    text, html = repr(filled), filled._repr_html_()
    assert text.splitlines()[0] == f"Precompute project project ({scene.folder}): 3 views"
    assert [line.split("  ")[0] for line in text.splitlines()[2:5]] == ["broken", "new", "numbers"]
    for shown in (
        "its file is wrong",
        "not published",
        "vector float32[4]",
        "fresh",
        "broken.yaml:2: entity",
    ):
        assert shown in text
        assert shown in html
    assert "<b>'" not in html
    assert "&lt;b&gt;" in html
    rows = filled.lookup("numbers", range(40))
    assert "numbers: 40 rows, 37 of them missing" in repr(rows)
    assert "unknown_entity" in repr(rows)
    assert "reason" not in repr(filled.lookup("numbers", [1, 2]))
    assert "[7, 8, 9, 10]" in rows._repr_html_()
    assert repr(rows).splitlines()[-2:] == [
        "… 20 more",
        "whether 0 was rejected, or removed: history('numbers', '0')",
    ]
    assert rows._repr_html_().count("<tr>") == 21
    odd = Rows.of(
        [{"a": "<script>", "b": [1.5] * 9, "c": {"d": 1}}, {"a": 7, "b": None, "c": None}], "<odd>"
    )
    assert "<script>" not in odd._repr_html_()
    assert "<odd>" not in odd._repr_html_()
    assert odd._repr_html_().endswith("</table>")
    assert "[1.5, 1.5, 1.5, 1.5, …] (9)" in repr(odd)
    ran = filled.run("numbers", frame=DATA | {"x": [1.0, 2.0, 7.0]}, progress=False)
    assert repr(ran).startswith("numbers: current, snapshot 2, 3 of 3 rows (3 unchanged)")
    status = filled.status()
    assert {row["view"]: row["status"] for row in status} == {
        "broken": "unpublished",
        "new": "unpublished",
        "numbers": "fresh",
    }
    assert "broken.yaml" in repr(status)


def test_a_project_shows_what_it_can(filled: OpenProject, monkeypatch: pytest.MonkeyPatch) -> None:
    def views(_: object) -> None:
        raise pc.OnlineStoreError("the online store does not answer")

    monkeypatch.setattr("precompute.store.answers.lookup.Lookup.views", views)
    assert "vector" in repr(filled)
    assert "unknown" in repr(filled)
    assert repr(filled).endswith("\nthe online store does not answer")


def test_a_project_that_is_gone_is_still_shown(filled: OpenProject, scene: Scene) -> None:
    filled.close()
    (scene.folder / "project.yaml").write_text("root: [")
    assert "not valid YAML" in repr(filled)
    (scene.folder / "project.yaml").unlink()
    assert "no such file" in filled._repr_html_()


def test_mistakes_are_told(filled: OpenProject, scene: Scene, tmp_path: Path) -> None:
    view = scene.folder / "views" / "numbers.yaml"
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: pc.open(tmp_path / "nowhere"), pc.ConfigError, "no folder"),
        (
            lambda: pc.open(view),
            pc.ConfigError,
            r"numbers\.yaml: a project is a folder with project\.yaml",
        ),
        (
            lambda: filled.lookup("numers", 1),
            pc.ConfigError,
            "no view 'numers'.*did you mean 'numbers'",
        ),
        (
            lambda: filled.lookup("numbers", [], features=["no"]),
            pc.RequestError,
            "has no feature 'no'",
        ),
        (
            lambda: filled.lookup("numbers", pd.DataFrame({"x": [1]})),
            pc.RequestError,
            r"without the column 'id'.*it has: x\)",
        ),
        (lambda: filled.lookup("numbers", 1.5), pc.RequestError, "a list of keys"),
        (
            lambda: filled.search("numbers", text="a"),
            pc.RequestError,
            r"one text input column.*inputs=\{column: value\} \(columns: ",
        ),
        (
            lambda: filled.history("numbers", 1, at="2026-01-01"),
            pc.RequestError,
            "a key, or a time",
        ),
        (
            lambda: filled.history("numbers", at="yesterday"),
            pc.RequestError,
            "'yesterday': write a date or time",
        ),
        (
            lambda: filled.run("numbers", frame=DATA, accept="shpae"),
            pc.ConfigError,
            "accept shpae: there is no such gate",
        ),
        (
            lambda: filled.run("numbers", frame=DATA, partition="2026-01-01"),
            pc.ConfigError,
            "partition: view 'numbers' has none",
        ),
        (
            lambda: filled.get_historical_features({"id": [1]}, "numbers"),
            pc.RequestError,
            "no timestamp column",
        ),
        (
            lambda: filled.get_historical_features(
                {"id": [1], "event_timestamp": [datetime.now(UTC)]}
            ),
            pc.RequestError,
            "no features",
        ),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
    view.rename(view.with_name("other.yaml")).write_text(
        view.with_name("other.yaml").read_text().replace("name: numbers", "name: other")
    )
    with pytest.raises(pc.OnlineStoreError, match="view 'other' is not published yet"):
        filled.lookup("other", 1)


def test_it_is_opened_again_after_it_was_closed(filled: OpenProject) -> None:
    filled.lookup("numbers", 1, fallback=True)
    filled.close()
    assert filled.lookup("numbers", 1)[0]["double"] == 2.0
    assert filled.lookup("numbers", 1, fallback=True, max_age_s=0)[0]["status"] == "computed"


def test_without_the_engine_it_says_what_to_install() -> None:
    code = f"{ABSENT}\nimport precompute\ntry:\n    precompute.open('.')\nexcept precompute.ConfigError as exc:\n    print(exc)"
    command = [sys.executable, "-c", code, " ".join(declared("client"))]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert (
        "is not installed: a project is opened with pip install 'precompute-store[cpu]'"
        in done.stdout
    ), done.stderr


def test_a_project_that_is_not_closed_ends_in_silence(make_project: MakeProject) -> None:
    scene = make_project([(1, 1.0)], view={"fallback": {"enabled": True}})
    scene.run()
    code = f"import precompute as pc; p = pc.open({str(scene.folder)!r}); print(p.lookup('numbers', [1, 99], fallback=True).to_pylist()[1]['status'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("missing\n", "")


def test_all_views_are_those_that_need_no_frame(scene: Scene) -> None:
    """What only Python can run is no failed run of `run --all`; by name it is refused as ever."""
    views = scene.folder / "views"
    (views / "plain.yaml").write_text(
        "name: plain\nentity: [id]\nsource: {sql: SELECT 1 AS id, 2.0 AS x}\nmodel: {use: 'tests.models:Doubler'}\n"
        "features: {double: {dtype: float64}}\nttl: 1h\n"
    )
    assert selected(scene.reread(), Selection()) == ["plain"]
    assert selected(scene.reread(), Selection(("numbers",))) == ["numbers"]
