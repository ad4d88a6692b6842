"""Python in the project's folder: imported under a name of its own, with its neighbours, again when
it has changed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

import precompute
from precompute import registry
from precompute.model import digest, plain_name
from precompute.registry import import_module, load_model, module_exists
from precompute.store.errors import ConfigError, ModelError
from tests.fixtures import MakeProject
from tests.scene import Scene

MODEL = """
import numpy as np
{imports}

class Times:
    def fingerprint(self):
        return f"times {{{factor}}}"

    def compute(self, batch):
        return {{"double": np.asarray(batch.column("x")) * {factor}}}
"""

BATCH = pa.RecordBatch.from_pydict({"x": [1.0, 2.0]})


def write(folder: Path, name: str, imports: str = "", factor: str = "2.0") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MODEL.format(imports=imports, factor=factor))


def values(folder: Path, use: str) -> list[float]:
    found: Any = load_model(use, {}, folder).compute(BATCH)
    return np.asarray(found["double"]).tolist()


@pytest.mark.parametrize(("name", "workers"), [("store", 1), ("precompute", 0), ("json", 0)])
def test_a_module_may_be_called_anything(
    make_project: MakeProject, name: str, workers: int
) -> None:
    """Also what a package of ours, of the standard library or of the path is called."""
    project = make_project([(1, 1.0)])
    write(project.folder, f"{name}.py")
    view = {"model": {"use": f"{name}:Times"}, "features": {"double": {"dtype": "float64"}}}
    project = make_project(view=view, project={"engine": {"workers": workers}})
    report = project.run()
    assert report.counts["written"] == 1
    assert sys.modules["precompute"] is precompute
    assert str(project.folder) not in sys.path
    fingerprint = project.store.snapshot(1).model
    assert fingerprint == report.model


IMPORTS = {
    "import neighbour as other": "other.factor",
    "from . import neighbour": "neighbour.factor",
    "from .neighbour import factor": "factor",
    "from package.inner import factor": "factor",
    "import package.inner": "package.inner.factor",
    "import package.inner as other": "other.factor",
    "import os, neighbour, sys": "neighbour.factor",
    "from package import inner": "inner.factor",
    "from bare.inner import factor": "factor",
    "from store import factor": "factor",
    "def factor_of():\n    from neighbour import factor\n    return factor": "factor_of()",
}


@pytest.mark.parametrize("statement", IMPORTS)
def test_a_module_imports_its_neighbours(tmp_path: Path, statement: str) -> None:
    for name in (
        "neighbour.py",
        "package/__init__.py",
        "package/inner.py",
        "bare/inner.py",
        "store.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("factor = 7.0\n")
    write(tmp_path, "mine.py", statement, IMPORTS[statement])
    write(tmp_path, "package/models.py", "from ..neighbour import factor", "factor")
    before = set(sys.modules)
    assert values(tmp_path, "mine:Times") == [7.0, 14.0]
    assert values(tmp_path, "package.models:Times") == [7.0, 14.0]
    assert {name for name in set(sys.modules) - before if not name.startswith("_project_")} == set()


def test_a_changed_module_or_neighbour_is_read_again_and_the_old_goes_on(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("factor = 2.0\n")
    write(tmp_path, "mine.py", "from neighbour import factor", "factor")
    first = load_model("mine:Times", {}, tmp_path)
    assert load_model("mine:Times", {}, tmp_path).__class__ is first.__class__
    for factor in ("3.0", "4.0", "5.0"):  # in one second, and of one size
        (tmp_path / "neighbour.py").write_text(f"factor = {factor}\n")
        assert values(tmp_path, "mine:Times") == [float(factor), 2 * float(factor)]
    assert np.asarray(first.compute(BATCH)["double"]).tolist() == [2.0, 4.0]
    (tmp_path / "neighbour.py").unlink()
    with pytest.raises(ConfigError, match="No module named 'neighbour'"):
        load_model("mine:Times", {}, tmp_path)


LATE = """
from neighbour import factor

class Times:
    def fingerprint(self):
        return "times"

    def compute(self, batch):
        from neighbour import factor as late
        import neighbour as whole
        return {"double": [factor, late, whole.factor]}
"""


def test_a_model_goes_on_under_the_code_it_was_made_of_whenever_it_imports(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LATE)
    models = []
    for factor in (2.0, 3.0, 4.0):
        (tmp_path / "neighbour.py").write_text(f"factor = {factor}\n")
        models.append(load_model("mine:Times", {}, tmp_path))
    assert [model.compute(BATCH)["double"] for model in models] == [[2.0] * 3, [3.0] * 3, [4.0] * 3]
    assert {plain_name(str(type(model))) for model in models} == {"<class 'mine.Times'>"}


def test_a_model_may_import_while_another_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server's does, in the thread that computes."""
    (tmp_path / "mine.py").write_text(
        LATE.replace("from neighbour import factor\n", "factor = 1.0\n", 1)
    )
    (tmp_path / "neighbour.py").write_text("factor = 2.0\n")
    model, found = load_model("mine:Times", {}, tmp_path), list[Any]()
    digest_of = registry._digest

    def while_files_are_looked_at(path: Path) -> str | None:
        if not found:
            computing = threading.Thread(
                target=lambda: found.append(model.compute(BATCH)["double"])
            )
            computing.start()
            computing.join(timeout=20)
        return digest_of(path)

    monkeypatch.setattr(registry, "_digest", while_files_are_looked_at)
    assert load_model("mine:Times", {}, tmp_path).compute(BATCH)["double"] == [1.0, 2.0, 2.0]
    assert found == [[1.0, 2.0, 2.0]]


def test_two_projects_have_modules_of_one_name(tmp_path: Path) -> None:
    for name, factor in (("a", "2.0"), ("b", "3.0")):
        write(tmp_path / name, "mine.py", factor=factor)
    assert [values(tmp_path / name, "mine:Times") for name in ("a", "b", "a")] == [
        [2.0, 4.0],
        [3.0, 6.0],
        [2.0, 4.0],
    ]


def test_a_folder_of_data_hides_no_module(tmp_path: Path) -> None:
    """``numpy/`` with files that are no Python, beside the views."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "x.npy").write_bytes(b"")
    assert import_module("numpy", tmp_path) is np
    assert (module_exists("numpy", tmp_path), module_exists("nowhere_at_all", tmp_path)) == (
        True,
        False,
    )


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("mine.x:A", "unknown model 'mine.x:A': there is no module 'mine.x' on the Python path "),
        ("package.a.b:A", "unknown model 'package.a.b:A': there is no module 'package.a.b' on the Python path "),
        ("package.broken.b:A", "model 'package.broken.b:A' cannot be imported: No module named 'package.absent'"),
        ("package.broken:A", "model 'package.broken:A' cannot be imported: ModuleNotFoundError: No module named 'package.absent' (broken.py:1)"),
        ("mine:A", "model 'mine:A' failed to load: ValueError: no <class 'mine.A'> here (mine.py:3)"),
    ],
)  # fmt: skip
def test_messages_have_the_names_the_user_gave(tmp_path: Path, use: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(
        "class A:\n    def __init__(self):\n        raise ValueError(f'no {A} here')\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "broken.py").write_text("from package.absent import b\n")
    with pytest.raises((ConfigError, ModelError)) as caught:
        load_model(use, {}, tmp_path)
    assert str(caught.value).startswith(message)


def test_messages_of_torch_module_have_them_too(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        raise ValueError(Net)\n"
    )
    with pytest.raises(
        ModelError, match=r"nets:Net failed to load: ValueError: <class 'nets.Net'> \(nets\.py:4\)$"
    ):
        load_model(
            "torch_module",
            {"module": "nets:Net", "inputs": {"x": ["x"]}, "outputs": {"y": 0}},
            tmp_path,
        )


RANKER = """
import torch
from layers import scale

class Ranker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.linear(x) * scale
"""


def test_torch_module_takes_a_class_beside_the_views(
    make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {
        "module": "store:Ranker",
        "weights": "./ranker.safetensors",
        "inputs": {"x": ["x"]},
        "outputs": {"double": 0},
    }
    view = {
        "model": {"use": "torch_module", "args": args},
        "features": {"double": {"dtype": "float32"}},
    }
    project = make_project([(1, 1.0), (2, 3.0)], view=view)
    (project.folder / "store.py").write_text(RANKER)
    (project.folder / "layers.py").write_text("scale = 10.0\n")
    weights = {"linear.weight": torch.tensor([[2.0]]), "linear.bias": torch.tensor([1.0])}
    save_file(weights, project.folder / "ranker.safetensors")
    monkeypatch.chdir(tmp_path)
    first = project.run()
    assert [row["double"] for row in project.rows(1)] == [30.0, 70.0]
    project.folder.rename(tmp_path / "moved")
    moved = Scene(tmp_path / "moved", {})
    assert moved.run().status == "current"
    save_file({n: w + 1 for n, w in weights.items()}, moved.folder / "ranker.safetensors")
    assert moved.run().model != first.model


def test_classes_are_the_same_facts_wherever_the_project_lies(tmp_path: Path) -> None:
    code = "from precompute.model import digest\nclass Kind: ...\nfound = digest(kind=Kind, kinds=[Kind], name=Kind.__module__ + '.Kind')\n"
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(code)
    here, there = (import_module("mine", tmp_path / name) for name in ("here", "there"))
    assert here.Kind.__module__ != there.Kind.__module__
    assert (
        here.found
        == there.found
        == digest(kind="<class 'mine.Kind'>", kinds=["<class 'mine.Kind'>"], name="mine.Kind")
    )
