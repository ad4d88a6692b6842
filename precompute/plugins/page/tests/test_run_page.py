"""The page of one run, and the command that writes it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.plugins.page.figures import REPORT, feature_words, report_path
from precompute.plugins.page.page import COMMONEST_VALUES, Bar, RunFigures, run_page
from precompute.plugins.page.run_figures import principal_axes, run_figures
from precompute.plugins.page.tests.test_page import Parsed, harmless, report
from precompute.store.feature_view import LibraryCheck
from tests.fixtures import MakeProject
from tests.jobs.test_review import EVIL, OPEN, hostile_project, three_snapshots
from tests.scene import Scene

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def hostile(make_project: MakeProject) -> Scene:
    return hostile_project(make_project)


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


def test_a_failed_run_has_a_page_too(
    make_project: MakeProject, capsys: Captured, tmp_path: Path
) -> None:
    three_snapshots(make_project)
    project = make_project(
        view=OPEN
        | {
            "model": {"use": "tests.models:Doubler", "args": {"nan_on": 5.0, "version": 9}},
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


def test_what_is_drawn_of_a_feature_is_of_its_rows(make_project: MakeProject) -> None:
    """The commonest labels, how numbers and lengths spread; nothing of what is damaged."""
    ids = range(100)
    columns = {
        "label": (["a"] * 50 + ["b" * 70] * 30 + ["c"] * 20, {"dtype": "string"}),
        "score": ([0.0, *map(float, range(1, 99)), 1e9], {"dtype": "float64"}),
        "top": ([[1, 2]] * 50 + [[1]] * 50, {"dtype": "int64", "max_items": 2}),
        "scores": ([[0.5] * (i % 3) for i in ids], {"dtype": "float32", "max_items": 2}),
        "vector": ([[float(i + 1), 0.0] for i in ids], {"dtype": "float32", "dim": 2}),
    }
    scene = make_project(
        pa.table({"id": ids} | {name: values for name, (values, _) in columns.items()}),
        view=OPEN
        | {
            "model": {"use": "columns"},
            "features": {name: kind for name, (_, kind) in columns.items()},
        },
    )
    done = scene.run()
    figures = run_figures(scene.store, done)
    drawn = {section.name: (section.of, section.bars) for section in figures.features}
    assert drawn["label"] == (
        COMMONEST_VALUES,
        [Bar("a", 0.0, 0.5), Bar("b" * 60 + "…", 0.0, 0.3), Bar("c", 0.0, 0.2)],
    )
    assert drawn["top"] == (COMMONEST_VALUES, [Bar("1", 0.0, 2 / 3), Bar("2", 0.0, 1 / 3)])
    for name, of in (("score", "value"), ("scores", "items"), ("vector", "length")):
        assert drawn[name][0] == of
        assert sum(bar.second for bar in drawn[name][1]) == pytest.approx(1.0)
    assert [one.feature for one in figures.maps] == ["vector"]
    (part,) = scene.snapshot().parts
    (scene.store.folder / part.path).unlink()
    figures = run_figures(scene.store, done)
    assert [(section.bars, bool(section.lines)) for section in figures.features] == [([], True)] * 5
    assert any(Path(part.path).name in note for note in figures.notes)
    assert figures.maps == []


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


def test_it_says_how_the_model_compares_with_its_library() -> None:
    said = "equal to transformers 5.14 in 8 rows (<1e-6>)"
    compared = report("published", 19, library=LibraryCheck("equal", "transformers", said))
    page = Parsed(run_page(RunFigures(compared)))
    assert f"library {said}" in page.text


def test_a_feature_is_told_with_how_it_is_packed() -> None:
    vector = {"name": "vector", "dtype": "float32", "dim": 4, "packed": "int8"}
    assert feature_words([vector]) == "vector: float32[4] as int8"


def measured(scene: Scene, **found: Any) -> str:
    """A tuning file of what ``tune`` and ``optimize`` measured."""
    model = scene.model_as_written("numbers")
    return json.dumps(
        {"version": 1, "model": model, "precision": "fp32", "backend": "eager"} | found
    )


def test_a_runs_page_has_speed_against_accuracy(make_project: MakeProject, tmp_path: Path) -> None:
    scene = make_project([(i, float(i)) for i in range(5)])
    scene.run()
    tuning, page = scene.folder / "tuning" / "numbers.json", tmp_path / "page.html"
    tuning.parent.mkdir()

    def drawn(found: str) -> str:
        tuning.write_text(found)
        assert scene.cli("report", "numbers", "--to", str(page), "--replace") == 0
        return page.read_text(encoding="utf-8")

    assert "Speed against accuracy" not in drawn(measured(scene))
    # a report is about a run, and leaves out what cannot be read
    assert "Speed against accuracy" not in drawn("{")
    assert "Speed against accuracy" not in drawn(measured(scene, measured=[{}]))
    teacher = {"name": "teacher, fp32-eager", "speed": 1.0}
    student = {"name": "static", "speed": 7.5, "accuracy": {"double": {"rank_correlation": 0.98}}}
    shown = drawn(measured(scene, optimized={"models": [teacher, student]}))
    assert "fp32-eager: 1 times float32" in shown
    assert "static: 7.5 times float32's rate, 0.980" in shown
