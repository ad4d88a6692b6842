"""Models by their door: ours where the power is not here, and another package's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from precompute.store.doors import KNOWN
from tests.doors.conftest import Install, called, names_of, without_each_of
from tests.server import make_folder


@without_each_of("model")
def test_its_models_say_so_at_the_key_that_names_one(
    house: tuple[str, Path], tmp_path: Path
) -> None:
    """And ``init`` of a file that one of them would read."""
    without, copy = house
    absent = names_of(without, "model")
    for name in absent[:1]:
        make_folder(tmp_path, {"numbers": {"model": {"use": name, "args": {"path": "./file"}}}})
        done = called(copy, "validate", "numbers", folder=tmp_path)
        assert (done.returncode, done.stderr) == (2, "")
        (line,) = done.stdout.splitlines()
        power = KNOWN["model"][name].power
        said = (
            rf"numbers\.yaml:\d+: model\.use: model '{name}' comes with the plug-in {power}, which"
        )
        assert re.search(said, line), line
        (tmp_path / "rows.csv").write_text("id,x\n1,2\n")
        given = ("--from", "rows.csv", "--model", "rows.csv")
        done = called(copy, "init", "new", *given, folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert f"; {', '.join(absent)} have no plug-in here, and their files are not known" in line


# ---- another package's


HALVES = """
class Halver:
    saved = "a file of halves (.half)"

    def __init__(self, path, columns=None, output="half"):
        with open(path) as file:
            self.named, self.output = file.read(), output
        self.column = (columns or {}).get(self.named, self.named)

    @staticmethod
    def is_its_file(name, head):
        return name.endswith(".half")

    def fingerprint(self):
        return f"halver 1 {self.column}"

    def reads(self):
        return [self.column]

    def compute(self, batch):
        import numpy as np
        return {self.output: np.asarray(batch.column(self.column)) / 2}
"""


@pytest.fixture
def package(install: Install) -> Path:
    return install(
        {"others.py": HALVES},
        "model.halver = others:Halver\nmodel.gone = others:nothing_of_this_name\n",
    )


def test_another_packages_model_is_one_like_ours(package: Path, tmp_path: Path) -> None:
    """A built-in by its name: with the columns that it reads, its files for ``init``, and what is
    said of a name that is none."""
    (tmp_path / "size.half").write_text("Size")
    (tmp_path / "shirts.csv").write_text("id,Size\n1,3\n2,8\n")

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return called(package, *arguments, folder=tmp_path / "new")

    (tmp_path / "new").mkdir()
    given = ("--from", "../shirts.csv", "--model", "../size.half")
    done = ask("init", ".", *given)
    assert done.returncode == 0, done.stderr
    (view,) = (tmp_path / "new" / "views").iterdir()
    assert yaml.safe_load(view.read_text())["model"] == {
        "use": "halver",
        "args": {"path": "../size.half", "columns": {"Size": "size"}},
    }
    assert ask("run", view.stem).returncode == 0
    assert '"half": 4.0' in ask("lookup", view.stem, "2", "--json").stdout
    for use, said in (
        ("halve", r"unknown model 'halve'.*; did you mean 'halver'"),
        ("gone", r"model 'gone' of others:nothing_of_this_name cannot be loaded"),
    ):
        text = view.read_text().replace("use: halver", f"use: {use}")
        (tmp_path / "new" / "views" / "second.yaml").write_text(
            text.replace(f"name: {view.stem}", "name: second")
        )
        done = ask("validate", "second")
        assert done.returncode == 2
        assert re.search(said, done.stdout + done.stderr), done
    # of a package that is whole the files are known
    points = package / "others-1.0.dist-info" / "entry_points.txt"
    points.write_text("[precompute.plugins]\nmodel.halver = others:Halver\n")
    given = ("--from", "../shirts.csv", "--model", "../shirts.csv")
    assert "a file of halves (.half); pickles" in ask("new", "view", "x", *given).stderr
