"""Optimize: students of what a view published, judged on rows they never saw; nothing goes live."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.plugins.students import optimize as optimize_module
from precompute.plugins.students import student as student_module
from precompute.plugins.students.columns_student import Fitted
from precompute.plugins.students.judge import (
    as_published,
    published_rows,
)
from precompute.plugins.students.optimize import LEAST_ROWS, optimize
from precompute.plugins.students.static_table import StaticTable
from precompute.plugins.students.student import (
    USES,
    Agreement,
    agreement,
    comparable,
    grouped_by,
    read_student,
    shortfalls,
    student_bytes,
)
from precompute.plugins.students.tests.near import USE, Straight
from precompute.plugins.students.training import Lesson, Made, Recipe
from precompute.store.disk.record import replace as changed
from precompute.store.errors import ConfigError, ConflictError, SnapshotError
from precompute.store.feature_view import Feature, FeatureView
from tests.fixtures import MakeProject
from tests.precompute.sentence_models import WORDS, sentence_model
from tests.scene import UNJUDGED, Scene

ROWS = [(i, float(i % 590)) for i in range(600)]
"""Ten inputs come twice."""


@pytest.fixture(autouse=True)
def _rates_are_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for each model of each table would be most of these tests."""
    monkeypatch.setattr(student_module, "ROUND_S", 0.0)


@pytest.fixture(autouse=True)
def _students_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records may name the model of tests, too."""
    monkeypatch.setitem(USES, USE, ("path", ("needs",)))


def scene_of(make_project: MakeProject, rows: object = ROWS, **view: object) -> Scene:
    scene = make_project(rows, view=view)
    scene.run()
    return scene


def quickly(monkeypatch: pytest.MonkeyPatch, *chosen: Recipe) -> None:
    monkeypatch.setattr(optimize_module, "recipes", lambda by, purpose: list(chosen))


def refusals(scene: Scene) -> list[str]:
    """Of each student, why it was not made; an empty text of one that was."""
    return [line["refused"] or "" for line in optimize(scene, "numbers")["students"][1:]]


def test_a_student_is_made_judged_and_not_live(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(make_project)
    live = scene.offline.view("numbers").log.live()
    quickly(monkeypatch, Straight())
    found = optimize(scene, "numbers")
    teacher, near = found["students"]
    assert (teacher["name"], teacher["refused"]) == ("teacher, fp32-eager", None)
    assert found["learned_rows"] + found["held_out_rows"] == 600
    assert found["held_out_rows"] >= 150
    student = read_student(scene.home / "students" / "numbers-near-1")
    snapshot = scene.offline.view("numbers").snapshot(1)
    assert (student.approximates, student.snapshot, student.by) == (snapshot.model, 1, "distil")
    assert student.learned_rows == found["learned_rows"]
    assert min(one.value for one in student.agreement.values()) > 0.9
    assert near["path"] == "students/numbers-near-1"
    assert near["agreement"] == {name: one.value for name, one in student.agreement.items()}
    written = json.loads((scene.folder / "tuning" / "numbers.json").read_text())
    assert [line["name"] for line in written["optimized"]["models"]] == [
        "teacher, fp32-eager",
        "near",
    ]
    assert (written["precision"], written["backend"]) == ("fp32", "eager")
    assert "students/numbers-near-1" in (scene.home / near["path"] / "README.md").read_text()
    assert scene.offline.view("numbers").log.live() == live


def test_a_student_there_is_judged_again_and_not_made(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(make_project)
    quickly(monkeypatch, Straight())
    first = optimize(scene, "numbers")["students"][1]
    monkeypatch.setattr(Straight, "make", None)
    said: list[str] = []
    again = optimize(scene, "numbers", announce=said.append)["students"][1]
    assert again["agreement"] == first["agreement"]
    assert again["make_s"] == first["make_s"]
    folder = scene.home / "students" / "numbers-near-1"
    assert said[1] == (
        f"near: is there already, made in {first['make_s']:,.0f} s, and judged again: remove"
        f" {folder} to make it for longer"
    )


def test_a_students_weights_that_were_changed_are_refused(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(make_project)
    quickly(monkeypatch, Straight())
    optimize(scene, "numbers")
    folder = scene.home / "students" / "numbers-near-1"
    weights = folder / "model" / "near.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    assert "was changed since it was made" in optimize(scene, "numbers")["students"][1]["refused"]
    record = folder / "student.json"
    record.write_bytes(record.read_bytes().replace(b'"distil"', b'"prune"'))
    (why,) = refusals(scene)
    assert re.search(r"student\.json is damaged .* make the student again", why)
    record.unlink()
    (why,) = refusals(scene)
    assert "is no student's folder: it has no student.json" in why


def test_a_student_of_other_rows_is_said_to_be_one(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(make_project)
    quickly(monkeypatch, Straight())
    optimize(scene, "numbers")
    record = scene.home / "students" / "numbers-near-1" / "student.json"
    before = record.read_bytes()
    with as_published(scene, "numbers") as (opened, snapshot):
        learned = published_rows(scene, opened, snapshot, 10_000, LEAST_ROWS).learned["id"]
    make_project([(i, -1.0 if i == learned[0].as_py() else x) for i, x in ROWS])
    quickly(monkeypatch, Straight(), Straight(name="other"))
    first, other = refusals(scene)
    assert "is a student of other rows" in first
    assert "publish again (`precompute run numbers`)" in first
    assert (other, record.read_bytes()) == ("", before)
    scene.run()
    assert refusals(scene) == ["", ""]


BUG = ZeroDivisionError("by zero")


def test_a_record_runs_and_reads_nothing_but_a_student(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene = scene_of(make_project)
    quickly(monkeypatch, Straight())
    optimize(scene, "numbers")
    folder = scene.home / "students" / "numbers-near-1"
    record, canary, weights = read_student(folder), tmp_path / "canary", tmp_path / "w.safetensors"
    shutil.copy(folder / "model" / "near.safetensors", weights)
    touch = {"args": ["touch", str(canary)]}
    leads_out = "w.safetensors leads out of the folder"
    far = f"./model/{'../' * 20}{weights.relative_to('/')}"
    within = "and a student's files are in ./model"

    def refused(**changes: object) -> str:
        (folder / "student.json").write_bytes(student_bytes(changed(record, **changes)))
        (why,) = refusals(scene)
        with pytest.raises(ConfigError) as found:
            read_student(folder)
        assert why == str(found.value)
        assert not canary.exists()
        return why.partition("wrote: ")[2].removesuffix(
            "; make the student again, or remove its folder"
        )

    assert refused(use="subprocess:run", args=touch).startswith("it computes by 'subprocess:run',")
    assert refused(use="text_encoder", args={"path": "./model", "token_cache": "../x"}) == (
        "text_encoder has an argument 'token_cache', which no student has"
    )
    for outside in (str(weights), "model/near.safetensors", "../../w.safetensors", "./README.md"):
        assert refused(args=record.args | {"path": outside}).endswith(within)
    assert refused(args=record.args | {"path": far}).endswith(leads_out)
    (folder / "model" / "near.safetensors").unlink()
    (folder / "model" / "near.safetensors").symlink_to(weights)
    assert refused().endswith("near.safetensors leads out of the folder")
    (folder / "model" / "near.safetensors").unlink()
    (folder / "model" / "near.safetensors").symlink_to("near.safetensors")
    assert "near.safetensors is a link to itself" in refused()
    (folder / "model").rename(tmp_path / "model")
    (folder / "model").symlink_to(tmp_path / "model")
    assert refused().endswith("leads out of the folder")


def test_whatever_a_recipe_raises_costs_it_alone(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = scene_of(make_project)

    @dataclass(frozen=True)
    class Raises(Straight):
        error: Exception = BUG
        early: bool = False

        def refuses(self, lesson: Lesson) -> str:
            if self.early:
                raise self.error
            return ""

        def make(self, lesson: Lesson, folder: Path) -> Made:
            raise self.error

    quickly(
        monkeypatch,
        Raises(),
        Raises(early=True),
        Raises(error=ConfigError("what to write")),
        Straight(),
    )
    by_zero = "ZeroDivisionError: by zero"
    assert refusals(scene) == [by_zero, by_zero, "what to write", ""]
    assert caplog.text.count("student near cannot be made") == 2
    quickly(monkeypatch, Raises(name="full", error=SnapshotError("no space")), Straight())
    with pytest.raises(SnapshotError, match="no space"):
        optimize(scene, "numbers")


def one_column(kind: pa.DataType, values: Callable[[int], object]) -> pa.Table:
    return pa.table(
        {
            "id": range(600),
            "x": [float(i) for i in range(600)],
            "y": pa.array([values(i) for i in range(600)], kind),
        }
    )


FLOATS = pa.list_(pa.float32())


@pytest.mark.parametrize(
    ("feature", "kind", "why"),
    [
        ({"dtype": "float64"}, pa.uint64(), ""),
        ({"dtype": "float64"}, pa.bool_(), ""),
        ({"dtype": "float64"}, pa.string(), "column y is string, and any learns from columns of"),
        ({"dtype": "float64"}, FLOATS, "column y is list<item: float>, and any learns from"),
        ({"dtype": "int64"}, pa.uint64(), "feature double holds int64, and floats can be"),
        ({"dtype": "float32", "dim": 2}, pa.uint64(), "any gives one score, and the view has"),
    ],
)
def test_one_score_is_learned_from_numbers(
    feature: dict[str, Any], kind: pa.DataType, why: str
) -> None:
    rows = pa.table(
        {"id": [1], "x": [1.0], "y": pa.nulls(1, kind), "double": pa.nulls(1, pa.float64())}
    )
    view = FeatureView("numbers", ("id",), (Feature("double", **feature),), 1.0, 1.0)
    lesson: Any = SimpleNamespace(view=view, model=object(), rows=rows)
    assert Fitted("any").refuses(lesson).startswith(why)
    assert (Fitted("any").refuses(lesson) == "") == (why == "")


def test_few_rows_are_no_lesson(make_project: MakeProject) -> None:
    scene = scene_of(make_project, ROWS[:50])
    with pytest.raises(ConfigError, match=r"50 rows of snapshot 1 .* a student needs 500"):
        optimize(scene, "numbers")


# of 90, 60 are learned from, and 30 are too few to judge by
@pytest.mark.parametrize("inputs", [3, 90])
def test_rows_of_few_inputs_are_no_lesson(make_project: MakeProject, inputs: int) -> None:
    scene = scene_of(
        make_project,
        [(i, float(i % inputs)) for i in range(600)],
        gates=UNJUDGED,
    )
    with pytest.raises(ConfigError, match="its 600 rows have so few different inputs that"):
        optimize(scene, "numbers")


def test_what_was_never_published_teaches_nothing(make_project: MakeProject) -> None:
    scene = make_project(ROWS)
    with pytest.raises(SnapshotError, match="was never published: there is nothing to learn from"):
        optimize(scene, "numbers")


def test_what_is_cheap_teaches_nothing(make_project: MakeProject) -> None:
    sql = "SELECT id, x AS double FROM read_parquet('${data}/data.parquet')"
    view = {
        "model": {"use": "columns"},
        "source": {"sql": sql},
        "features": {"double": {"dtype": "float64"}},
    }
    with pytest.raises(ConfigError, match="SQL alone computes this view"):
        optimize(scene_of(make_project, **view), "numbers")


def test_rows_that_changed_since_are_no_lesson(make_project: MakeProject) -> None:
    scene = scene_of(make_project)
    make_project([(i, x + (i < 30)) for i, x in ROWS if i < 590])
    with as_published(scene, "numbers") as (opened, snapshot):
        found = published_rows(scene, opened, snapshot, 10_000, LEAST_ROWS)
    rows = pa.concat_tables([found.learned, found.held_out])
    assert sorted(rows["id"].to_pylist()) == list(range(30, 590))
    assert all(
        double == 2 * x
        for x, double in zip(rows["x"].to_pylist(), rows["double"].to_pylist(), strict=True)
    )


def test_a_model_that_was_replaced_teaches_nothing(make_project: MakeProject) -> None:
    scene = scene_of(make_project, model={"use": "tests.models:Doubler"})
    view = scene.offline.view("numbers")
    manifest = view.manifest_path(1)
    snapshot = view.snapshot(1)
    other = type(snapshot)(
        **{**{f: getattr(snapshot, f) for f in snapshot.__struct_fields__}, "model": "ab" * 32}
    )
    manifest.write_bytes(other.to_bytes())
    with pytest.raises(ConfigError, match=r"the model on disk has fingerprint .* live snapshot 1"):
        optimize(scene.reread(), "numbers")


class Reading:
    """A model of one of its columns."""

    def fingerprint(self) -> str:
        return "reading"

    def reads(self) -> list[str]:
        return ["x"]

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        return {"double": np.asarray(batch.column("x")) * 2}


def test_rows_that_look_alike_to_the_teacher_are_on_one_side(make_project: MakeProject) -> None:
    x = np.random.default_rng(0).permutation(np.repeat(np.arange(300.0), 2))
    scene = scene_of(
        make_project,
        pa.table({"id": range(600), "x": x, "updated_at": range(600)}),
        model={"use": f"{__name__}:Reading"},
        source={"sql": "SELECT id, x, updated_at FROM read_parquet('${data}/data.parquet')"},
        features={"double": {"dtype": "float64"}},
    )
    with as_published(scene, "numbers") as (opened, snapshot):
        found = published_rows(scene, opened, snapshot, 10_000, LEAST_ROWS)
        names = opened.source.schema.names
        assert found.grouped_by == grouped_by(opened.model, opened.view, names) == ["x"]
    learned, held_out = (set(part["x"].to_pylist()) for part in (found.learned, found.held_out))
    assert not learned & held_out
    assert learned | held_out == set(x)
    assert len(held_out) > 50


def test_students_of_a_view_are_made_by_one_at_a_time(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(make_project)

    class Meanwhile(Straight):
        def make(self, lesson: Lesson, folder: Path) -> Made:
            with pytest.raises(ConflictError, match="'numbers': its students are being made"):
                optimize(scene, "numbers")
            return super().make(lesson, folder)

    quickly(monkeypatch, Meanwhile())
    assert optimize(scene, "numbers")["students"][1]["refused"] is None
    assert optimize(scene, "numbers")["students"][1]["refused"] is None


def test_making_goes_on_after_it_was_stopped(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(make_project)

    class Stopped(Straight):
        def make(self, lesson: Lesson, folder: Path) -> Made:
            (lesson.checkpoints / "half").write_text("way")
            raise KeyboardInterrupt

    class GoesOn(Straight):
        def make(self, lesson: Lesson, folder: Path) -> Made:
            assert (lesson.checkpoints / "half").read_text() == "way"
            return super().make(lesson, folder)

    quickly(monkeypatch, Stopped())
    with pytest.raises(KeyboardInterrupt):
        optimize(scene, "numbers")
    assert not (scene.home / "students").exists()
    quickly(monkeypatch, GoesOn())
    assert optimize(scene, "numbers")["students"][1]["refused"] is None
    assert not list((scene.offline.view("numbers").compiled / "students").iterdir())


def test_what_is_cut_short_leaves_nothing_beside_the_students(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(make_project)

    class Left(Straight):
        def make(self, lesson: Lesson, folder: Path) -> Made:
            made = super().make(lesson, folder)
            # as a process that was killed while it wrote leaves it
            (folder / "model" / ".near.safetensors.4242.tmp").write_bytes(b"half")
            return made

    quickly(monkeypatch, Left())
    with monkeypatch.context() as patched:
        patched.setattr("precompute.plugins.students.optimize.replace_durably", full)
        with pytest.raises(SnapshotError, match="no space left"):
            optimize(scene, "numbers")
    assert list((scene.home / "students").iterdir()) == []
    assert refusals(scene) == [""]
    there = (scene.home / "students").rglob("*")
    assert sorted(path.name for path in there if path.is_file()) == [
        "README.md",
        "near.safetensors",
        "student.json",
    ]


def full(path: Path, data: bytes) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


TUNING = {"version": 1, "model": None, "precision": "fp32", "backend": "eager"}


@pytest.mark.parametrize(
    "tuning",
    [
        "{",
        json.dumps(TUNING | {"optimized": {"snapshot": 1, "models": [None]}}),
        json.dumps(TUNING | {"measured": [{}]}),
    ],
)
def test_a_damaged_tuning_file_is_found_before_anything_is_made(
    make_project: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    tuning: str,
) -> None:
    scene = scene_of(make_project)
    quickly(monkeypatch, Straight())
    path = scene.folder / "tuning" / "numbers.json"
    path.parent.mkdir()
    path.write_text(tuning.replace("null", json.dumps(scene.model_as_written("numbers")), 1))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="run `precompute tune numbers` again, or remove it"):
        optimize(scene, "numbers")
    assert not (scene.home / "students").exists()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("promised", "picked"),
    [
        ((0.9, 0.6), "first"),
        ((0.5, 0.6), "second"),
        ((0.5, 0.49), None),
        ((-0.1, 0.0), None),
    ],
)
def test_behind_misses_is_none_that_is_mostly_wrong(
    promised: tuple[float, float], picked: str | None
) -> None:
    def line(name: str, p50: float, least: float) -> dict[str, Any]:
        figures = {"miss_ms": {"p50": p50}, "promised": {"vector": 0.99, "score": least}}
        return {"name": name, "refused": None, "beyond": "far off", "speed": 9.0} | figures

    lines = [
        line("teacher", 1.0, 1.0),
        line("first", 0.5, promised[0]),
        line("second", 0.1, promised[1]),
        line("slow", 0.6, 0.99),
    ]
    assert optimize_module._picked(lines) == {"picked": None, "behind_misses": picked}


def text_scene(
    make_project: MakeProject, folder: Path, texts: pa.Array, **changes: object
) -> Scene:
    """Published vectors of texts, by a tiny encoder."""
    sentence_model(folder / "teacher", limit=20)
    view: dict[str, object] = {
        "model": {"use": "text_encoder", "args": {"path": str(folder / "teacher" / "saved")}},
        "features": {"embedding": {"dtype": "float16", "dim": 16}},
        "index": {"on": "embedding", "metric": "cosine"},
    }
    scene = make_project(
        pa.table({"id": range(len(texts)), "text": texts}), view=view | dict(changes)
    )
    scene.run()
    return scene


def some_texts() -> list[str]:
    chance = np.random.default_rng(0)
    return [" ".join(chance.choice(WORDS, chance.integers(1, 12))) for _ in range(600)]


def test_a_text_encoder_has_a_static_student(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene = text_scene(make_project, tmp_path, pa.array(some_texts()))
    quickly(monkeypatch, StaticTable(pieces=600, steps=60), Straight())
    found = optimize(scene, "numbers")
    _, static, near = found["students"]
    figures = static["accuracy"]["embedding"]
    # before it learns, its vectors have the mean 0, and the teacher's are much alike
    assert figures["mean_cosine"] > 0.85
    assert {"tail_cosine", "own_index", "into_index"} <= figures.keys()
    assert found["behind_misses"] in (None, "static")
    assert near["refused"] == "there is no x"


def test_rows_that_a_student_rejects_are_left_out_and_counted(
    make_project: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = one_column(FLOATS, lambda i: None if i % 20 == 3 else [i])
    scene = scene_of(make_project, table, max_rejected=0.1)
    quickly(monkeypatch, Straight(needs="y"))
    with as_published(scene, "numbers") as (opened, snapshot):
        held_out = published_rows(scene, opened, snapshot, 10_000, LEAST_ROWS).held_out["y"]
    rejected, rows = held_out.null_count, len(held_out) - held_out.null_count
    assert scene.cli("optimize", "numbers") == 0
    said = f"near: rejects {rejected} of the judged rows; no figure counts them"
    assert said in capsys.readouterr().out
    record = read_student(scene.home / "students" / "numbers-near-1")
    assert record.rejected_rows == rejected > 3
    # rows that were out of step would have nothing in common
    assert {name: (one.value > 0.9, one.rows) for name, one in record.agreement.items()} == {
        "double": (True, rows),
        "vector": (True, rows),
    }
    assert min(record.figures["vector"].values()) > 0.9
    scene = make_project(table, view={"max_rejected": 0.001})
    shutil.rmtree(scene.home / "students")
    (why,) = refusals(scene)
    assert why == (
        f"it rejects {rejected} of {len(held_out)} rows that its teacher computes, and the view's"
        " max_rejected is 0.001; the first: y is null"
    )
    assert not (scene.home / "students").exists()


def test_the_command_shows_a_table(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = scene_of(make_project)
    quickly(monkeypatch, Straight(), StaticTable())
    assert scene.cli("optimize", "numbers", "--within", "1m") == 0
    shown = capsys.readouterr().out
    assert "numbers, snapshot 1: " in shown
    assert "teacher, fp32-eager" in shown
    assert "static: not made: the teacher is no text_encoder (tests.models:Doubler)" in shown
    assert scene.cli("optimize", "numbers", "--json") == 0
    assert json.loads(capsys.readouterr().out)["view"] == "numbers"
    assert scene.cli("optimize", "numbers", "--within", "soon") == 2
    assert "--within: 'soon'" in capsys.readouterr().err
    assert scene.cli("optimize", "numbers", "--within", "9s") == 2
    assert (
        "--within: 9 s: students learn next to nothing in less than 10 s" in capsys.readouterr().err
    )


def test_what_fits_nothing_says_what_does(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_project(ROWS).cli("optimize", "numbers", "--by", "prune", "--for", "fallback") == 2
    assert "no student is made by prune for fallback: --for fallback goes with --by distil" in (
        capsys.readouterr().err
    )


def test_an_agreement_promises_less_than_it_measured(make_project: MakeProject) -> None:
    view = scene_of(make_project, ROWS[:3]).view("numbers").feature_view()
    chance = np.random.default_rng(0)
    vectors = chance.normal(size=(400, 4)).astype(np.float32)

    def rows(vectors: np.ndarray, scores: np.ndarray) -> pa.RecordBatch:
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 4)
        return pa.record_batch({"double": pa.array(scores), "vector": column})

    scores = np.arange(400.0)
    teacher = rows(vectors, scores)
    same = agreement(view, teacher, teacher)
    assert {name: one.value for name, one in same.items()} == {"double": 1.0, "vector": 1.0}
    assert all(one.promised < one.value for one in same.values())
    off = rows(vectors + chance.normal(size=(400, 4)) * 0.2, chance.permutation(scores))
    other = agreement(view, teacher, off)
    assert 0.3 < other["vector"].value < 0.95
    assert abs(other["double"].value) < 0.2
    assert not shortfalls(same, same)
    # of fewer rows chance makes more
    promise = Agreement("recall_at_10", 0.9, 0.8, rows=400)
    assert [promise.least_of(rows) for rows in (1600, 400, 100, 1)] == pytest.approx(
        [0.8, 0.8, 0.7, 0]
    )
    fewer = agreement(view, teacher, off.slice(0, 80))
    assert {name: (one.rows, one.among) for name, one in fewer.items()} == {
        "double": (80, 0),
        "vector": (80, 400),
    }
    assert set(comparable(same, fewer)) == {"double", "vector"}
    assert set(comparable(same, agreement(view, teacher.slice(0, 399), off))) == {"double"}
    # a row that the teacher gave no value says nothing
    column = pa.array(scores, mask=np.arange(400) % 2 == 0)
    nulls = pa.record_batch({"double": column, "vector": teacher["vector"]})
    found = agreement(view, nulls, teacher)["double"]
    assert (found.value, found.rows) == (1.0, 200)
    assert [line.partition(" is ")[0] for line in shortfalls(same, other)] == [
        f"double: rank correlation {other['double'].value:.3f}",
        f"vector: recall@10 {other['vector'].value:.3f}",
    ]
