"""The code of a user's model: what counts, what does not, and how a difference is told."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from precompute.model_code import code_changes, model_code
from precompute.registry import load_model
from precompute.store.errors import ModelError

MINE = """
import json
import numpy as np
import helpers
from parts import weights as w
from parts.inner import *

# a comment
class Mine:
    def fingerprint(self):
        import late
        return "mine"

    def compute(self, batch):
        return {}
"""
FILES = {
    "mine.py": MINE,
    "helpers.py": "import pyarrow\n",
    "late.py": "X = 1\n",
    "parts/__init__.py": "",
    "parts/weights.py": "from . import shared\nW = 2\n",
    "parts/inner.py": "from .shared import Y\n",
    "parts/shared.py": "Y = 3\n",
    "unrelated.py": "Z = 4\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def code_of(folder: Path, use: str = "mine:Mine") -> dict[str, str]:
    load_model(use, {}, folder)
    return model_code(use, folder)


def test_all_that_is_imported_counts_and_nothing_else(folder: Path) -> None:
    code = code_of(folder)
    assert {*code} == {*FILES} - {"unrelated.py"} | {"numpy", "pyarrow"}
    assert (code["numpy"], code["pyarrow"]) == (np.__version__, pa.__version__)
    assert all(len(code[name]) == 16 for name in code if "." in name)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("mine.py", MINE.replace("# a comment", "\n\n   # another one\n")),
        ("mine.py", MINE.replace("import json", "import json  # for nothing")),
        ("mine.py", MINE.replace("return {}", "return {}   ")),
        ("parts/__init__.py", "# nothing yet\n"),
        ("unrelated.py", "Z = 5\n"),
    ],
)
def test_comments_and_blank_lines_do_not_count(folder: Path, file: str, text: str) -> None:
    before = code_of(folder)
    (folder / file).write_text(text)
    assert code_of(folder) == before


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("mine.py", MINE.replace("return {}", "return {1: 2}"), "mine.py changed"),
        ("mine.py", MINE.replace('"mine"', '"mine # 2"'), "mine.py changed"),
        ("mine.py", MINE.replace('"mine"', '"""a\n\n# b"""'), "mine.py changed"),
        ("late.py", "X = 2\n", "late.py changed"),
        ("parts/shared.py", "Y = 4\n", "parts/shared.py changed"),
        ("parts/weights.py", "W = 2\n", "parts/weights.py changed"),
        ("helpers.py", "", "helpers.py changed, pyarrow is not imported any more"),
        ("late.py", "import unrelated\n", "late.py changed, unrelated.py is new"),
    ],
)
def test_all_else_counts(folder: Path, file: str, text: str, told: str) -> None:
    before = code_of(folder)
    (folder / file).write_text(text)
    assert code_changes(before, code_of(folder)) == told


def test_blank_lines_in_a_text_count(folder: Path) -> None:
    (folder / "late.py").write_text('X = """a\n\n# b\nc"""\n')
    before = code_of(folder)
    (folder / "late.py").write_text('X = """a\n# b\nc"""\n')
    assert code_changes(before, code_of(folder)) == "late.py changed"
    (folder / "late.py").write_text('X = """a\n\nc"""\n')
    assert code_changes(before, code_of(folder)) == "late.py changed"


def test_an_installed_models_neighbours_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One on the Python path, in a folder that is no project's."""
    monkeypatch.syspath_prepend(str(folder))
    project = tmp_path_factory.mktemp("project")
    try:
        assert {*code_of(project)} == {*FILES} - {"unrelated.py"} | {"numpy", "pyarrow"}
    finally:
        for name in ("mine", "helpers", "late", *[m for m in sys.modules if m.startswith("parts")]):
            sys.modules.pop(name, None)


def test_a_file_that_changed_while_it_was_loaded_is_told(folder: Path) -> None:
    load_model("mine:Mine", {}, folder)
    (folder / "mine.py").write_text(MINE + "\nmore = 1\n")
    with pytest.raises(ModelError, match=r"mine\.py was changed while the model was loaded"):
        model_code("mine:Mine", folder)


def test_what_is_built_in_has_its_version_in_its_fingerprint(folder: Path) -> None:
    assert model_code("columns", folder) == {}


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, {"a.py": "1"}, ""),
        ({"a.py": "1"}, {}, ""),
        ({"a.py": "1"}, {"a.py": "1"}, ""),
        ({"numpy": "2.4"}, {"numpy": "2.5"}, "numpy 2.4 → 2.5"),
        (
            {f"{n}.py": "1" for n in range(5)},
            {f"{n}.py": "2" for n in range(5)},
            "0.py changed, 1.py changed, 2.py changed, 2 more",
        ),
    ],
)
def test_differences_are_named(before: dict[str, str], now: dict[str, str], told: str) -> None:
    assert code_changes(before, now) == told
