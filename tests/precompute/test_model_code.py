"""The code of a user's model: what counts, what does not, and how a difference is told."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from precompute.model_code import code_changes, model_code
from precompute.registry import is_own, load_model
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
    return model_code(use, {}, folder)


@contextmanager
def forgotten(*modules: str) -> Iterator[None]:
    """Python forgets these modules, and those in them, at the end."""
    try:
        yield
    finally:
        for name in [m for m in sys.modules if m.partition(".")[0] in modules]:
            del sys.modules[name]


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
        ("late.py", '"""What it is."""\nX = 1\n'),
        ("late.py", '"""What\n\n# it is.\n"""\n\nX = 1\n'),
        ("mine.py", MINE.replace("class Mine:", "class Mine:\n    '''Mine.'''\n")),
        (
            "mine.py",
            MINE.replace("        import late", "        r'''A\\d\nname.'''\n        import late"),
        ),
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
        ("late.py", "'a text'; X = 1\n", "late.py changed"),
        ("late.py", "'a text'; X = 2\n", "late.py changed"),
        ("late.py", "X = 1\n'a text'\n", "late.py changed"),
        ("late.py", "f'{1}'\nX = 1\n", "late.py changed"),
        ("late.py", "'read'\nX = __doc__ or 1\n", "late.py changed"),
    ],
)
def test_all_else_counts(folder: Path, file: str, text: str, told: str) -> None:
    before = code_of(folder)
    (folder / file).write_text(text)
    assert code_changes(before, code_of(folder)) == told


@pytest.mark.parametrize(
    "code",
    [
        "class A(dict):\n    '{}'\n    x = 1\n",
        "class A(metaclass=type):\n    '{}'\n    x = 1\n",
        "@staticmethod\ndef f():\n    '{}'\n    return 1\n",
        "def f():\n    '{}'\n    return f.__doc__\n",
        "from inspect import getdoc\ndef f():\n    '{}'\n    return getdoc(f)\n",
        "def f(): '{}'\n",
    ],
)
def test_a_docstring_that_may_be_a_prompt_counts(folder: Path, code: str) -> None:
    (folder / "late.py").write_text(code.format("Answer in one word."))
    before = code_of(folder)
    (folder / "late.py").write_text(code.format("Answer in two words."))
    assert code_changes(before, code_of(folder)) == "late.py changed"


def test_what_lies_elsewhere_on_the_path_and_is_not_installed_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A folder of the company's on the path, and what was installed to be worked on in its place,
    whose version stays as it is."""
    shared = tmp_path_factory.mktemp("shared")
    files = {
        "company/__init__.py": "from .words import word\n",
        "company/words.py": "import numpy\nfrom company_data import table\nword = 1\n",
        "company_data.py": "table = 1\n",
        "spread/one.py": "X = 1\n",
        "company_other.py": "Y = 1\n",
    }
    for name, text in files.items():
        (shared / name).parent.mkdir(exist_ok=True)
        (shared / name).write_text(text)
    (folder / "late.py").write_text("from company import word\nimport spread.one\n")
    monkeypatch.syspath_prepend(str(shared))
    with forgotten("company", "company_data", "spread"):
        before = code_of(folder)
        assert {*before} - {*FILES, "numpy", "pyarrow"} == {*files} - {"company_other.py"}
        (shared / "company_data.py").write_text("table = 2\n")
        assert code_changes(before, code_of(folder)) == "company_data.py changed"
        # as `pip install --target` leaves it
        (shared / "company-1.0.dist-info").mkdir()
        assert {*code_of(folder)} & {*files} == set()


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
    with forgotten("mine", "helpers", "late", "parts"):
        assert {*code_of(project)} == {*FILES} - {"unrelated.py"} | {"numpy", "pyarrow"}


def test_a_file_that_changed_while_it_was_loaded_is_told(folder: Path) -> None:
    load_model("mine:Mine", {}, folder)
    (folder / "mine.py").write_text(MINE + "\nmore = 1\n")
    with pytest.raises(ModelError, match=r"mine\.py was changed while the model was loaded"):
        model_code("mine:Mine", {}, folder)


def test_what_is_built_in_has_its_version_in_its_fingerprint(folder: Path) -> None:
    assert model_code("columns", {}, folder) == {}


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


NEVER_IMPORTED = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from neighbour import Thing
    from . import nowhere
try:
    import neighbour
except Exception:
    pass
"""


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"def broken(:\n", id="no Python"),
        pytest.param("x = 'é'\n".encode("latin-1"), id="no UTF-8"),
        pytest.param(b"# coding: nothing\n", id="no such encoding"),
        pytest.param(b"x = 1\x00\n", id="a NUL"),
        pytest.param(b"x = " + b"(" * 500 + b")" * 500, id="nested too deep"),
        pytest.param(b"def f():\n    if x:\n  y\n", id="indented otherwise"),
        pytest.param(b'x = """\n', id="a text without an end"),
    ],
)
def test_a_neighbour_that_python_cannot_read_counts_as_it_is(folder: Path, content: bytes) -> None:
    """It never ran, so that the model is loaded; what it counts for is its bytes."""
    (folder / "mine.py").write_text(NEVER_IMPORTED + MINE)
    (folder / "neighbour.py").write_bytes(content)
    before = code_of(folder)
    assert {*before} == {*FILES} - {"unrelated.py"} | {"neighbour.py", "numpy", "pyarrow"}
    (folder / "neighbour.py").write_bytes(content + b"#")
    assert code_changes(before, code_of(folder)) == "neighbour.py changed"


@pytest.mark.parametrize(
    "sign", ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
)
def test_what_ends_a_line_of_unicode_ends_none_of_pythons(folder: Path, sign: str) -> None:
    text = f'X = "a{sign}b"  # one\n\n\x0c\nY = 1\n'
    (folder / "late.py").write_text(text, encoding="utf-8")
    before = code_of(folder)
    (folder / "late.py").write_text(text.replace("# one", "# two\r\n\n"), encoding="utf-8")
    assert code_of(folder) == before
    (folder / "late.py").write_text(text.replace("b", "c"), encoding="utf-8")
    assert code_changes(before, code_of(folder)) == "late.py changed"


def test_a_packages_own_names_are_not_those_of_compiled_modules(folder: Path) -> None:
    """``from . import *`` names no module; what is compiled counts where it is imported."""
    (folder / "parts/weights.py").write_text("from . import *\n")
    (folder / f"parts/other{EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF")
    assert f"parts/other{EXTENSION_SUFFIXES[0]}" not in code_of(folder)
    (folder / "late.py").write_text(
        "def f():\n    from parts import other\n    import parts.plain\n"
    )
    (folder / "parts/plain.so").write_bytes(b"\x7fELF")
    code = code_of(folder)
    assert {f"parts/other{EXTENSION_SUFFIXES[0]}", "parts/plain.so"} <= {*code}


def test_what_python_takes_in_place_of_a_source_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On the Python path a compiled module goes before its source; in a project's folder it does
    not."""
    compiled = f"late{EXTENSION_SUFFIXES[0]}"
    (folder / compiled).write_bytes(b"\x7fELF")
    assert "late.py" in code_of(folder)
    monkeypatch.syspath_prepend(str(folder))
    with forgotten("mine", "helpers", "parts"):
        code = code_of(tmp_path_factory.mktemp("project"))
    assert compiled in code
    assert "late.py" not in code


def test_a_package_in_several_places_and_a_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A package without ``__init__.py`` may have its modules in several folders of the path, with
    blanks and other letters than of ASCII in their names."""
    first, second = tmp_path / "erste Hälfte", tmp_path / "zweite Hälfte"
    for place, name, text in (
        (first, "one", "X = 1\n"),
        (second, "mine", MINE.replace("import helpers\nfrom parts import weights as w", "")),
    ):
        (place / "spread").mkdir(parents=True)
        (place / "spread" / f"{name}.py").write_text(text.replace("from parts.inner import *", ""))
        monkeypatch.syspath_prepend(str(place))
    (second / "real.py").write_text("Y = 1\n")
    (second / "late.py").symlink_to("real.py")
    monkeypatch.syspath_prepend(str(first))
    with forgotten("spread", "late"):
        code = code_of(tmp_path, "spread.mine:Mine")
    assert {*code} == {"spread/mine.py", "late.py", "numpy"}


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_of_what_is_installed_only_the_models_own_package_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Also in a user's, or a system's, folder of packages, where all libraries lie beside it."""
    installed = tmp_path / "elsewhere" / name
    for file in FILES:
        (installed / "acme" / file).parent.mkdir(parents=True, exist_ok=True)
    (installed / "acme/__init__.py").write_text("")
    (installed / "acme/near.py").write_text("")
    (installed / "helpers.py").write_text("")
    (installed / "acme/mine.py").write_text(
        MINE.replace(
            "from parts import weights as w\nfrom parts.inner import *", "import acme.near"
        )
    )
    monkeypatch.syspath_prepend(str(installed))
    with forgotten("acme", "helpers"):
        assert {*code_of(folder, "acme.mine:Mine")} == {
            "acme/__init__.py",
            "acme/mine.py",
            "acme/near.py",
            "numpy",
        }


def test_a_model_in_a_zip_archive_has_no_code_that_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "models.zip", "w") as archive:
        archive.writestr(
            "zipped.py",
            "class Mine:\n    def fingerprint(self):\n        return 'z'\n"
            "    def compute(self, batch):\n        return {}\n",
        )
    monkeypatch.syspath_prepend(str(tmp_path / "models.zip"))
    with forgotten("zipped"):
        assert code_of(tmp_path, "zipped:Mine") == {}


def test_modules_that_import_each_other_are_each_looked_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand imports of one module its file is looked for once."""
    for n in range(20):
        imports = "".join(f"    import ring{m}\n" for m in range(20))
        (folder / f"ring{n}.py").write_text(f"def f():\n{imports}    import json\n")
    (folder / "late.py").write_text("import ring0\n")
    load_model("mine:Mine", {}, folder)
    looked: list[str] = []

    def looked_for(name: str, of: Path | None) -> bool:
        looked.append(name)
        return is_own(name, of)

    monkeypatch.setattr("precompute.model_code.is_own", looked_for)
    code = model_code("mine:Mine", {}, folder)
    assert {f"ring{n}.py" for n in range(20)} <= {*code}
    assert looked.count("ring7") == 1


def test_a_torch_modules_class_is_the_users_code(tmp_path: Path) -> None:
    """Its file is in the fingerprint, and what it imports is not."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom steps import twice\n\n\nclass Net(torch.nn.Module):\n"
        "    def forward(self, x):\n        return twice(x)\n"
    )
    (tmp_path / "steps.py").write_text("def twice(x):\n    return 2 * x\n")
    args = {"module": "net:Net", "inputs": {"x": "x"}, "outputs": {"y": 0}, "device": "cpu"}
    before = load_model("torch_module", args, tmp_path).fingerprint()
    code = model_code("torch_module", args, tmp_path)
    assert {*code} == {"net.py", "steps.py", "torch"}
    (tmp_path / "steps.py").write_text("def twice(x):\n    return 3 * x\n")
    assert load_model("torch_module", args, tmp_path).fingerprint() == before
    told = code_changes(code, model_code("torch_module", args, tmp_path))
    assert told == "steps.py changed"
    assert model_code("torch_module", {**args, "module": "package:name/file.pt2"}, tmp_path) == {}
