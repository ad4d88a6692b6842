"""Models by their door: ours where the power is not here, and another package's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from precompute.store.doors import COMMANDS, KNOWN, MODELS
from tests import REPOSITORY
from tests.doors.conftest import EVERY, Install, called, called_each, names_of, without_each_of
from tests.server import make_folder


@without_each_of("model")
def test_its_models_say_so_at_the_key_that_names_one(
    house: tuple[str, Path], tmp_path: Path
) -> None:
    """And ``init`` of a file that one of them would read, and of a template one would bring."""
    without, copy = house
    has_init = COMMANDS.is_here("init") and without not in (EVERY, KNOWN["command"]["init"].power)
    absent = names_of(without, "model")
    name, power = absent[0], KNOWN["model"][absent[0]].power
    make_folder(tmp_path, {"numbers": {"model": {"use": name, "args": {"path": "./file"}}}})
    (tmp_path / "rows.csv").write_text("id,x\n1,2\n")
    new = ("-c", str(tmp_path), "init", "new")
    initial = [
        (*new, "--from", "rows.csv", "--model", "rows.csv"),
        *[
            (*new, "--template", one)
            for one in (name, "model")
            if one == name or "lightgbm" in absent
        ],
    ]
    commands = [("-c", str(tmp_path), "validate", "numbers"), *(initial if has_init else ())]
    validated, *said = called_each(copy, *commands, folder=tmp_path)
    assert (validated.returncode, validated.stderr) == (2, "")
    (line,) = validated.stdout.splitlines()
    at_key = rf"numbers\.yaml:\d+: model\.use: model '{name}' comes with the plug-in {power}, which"
    assert re.search(at_key, line), line
    if not has_init:
        return
    assert {(done.returncode, done.stdout) for done in said} == {(2, "")}
    of_file, of_template, *of_model = (done.stderr for done in said)
    (line,) = of_file.splitlines()
    listed = [one for one in KNOWN["model"] if one in absent or not MODELS.is_here(one)]
    assert f"; {', '.join(listed)} have no plug-in here, and their files are not known" in line
    assert f"model '{name}' comes with the plug-in {power}, which is" in of_template
    if "lightgbm" in absent:
        (line,) = of_model[0].splitlines()
        assert "--template model: model 'lightgbm' comes with the plug-in trees, which" in line
        assert line.endswith("or give a model's file and rows for it (--model FILE --from FILE)")


def test_what_asks_all_models_about_a_file_imports_no_torch() -> None:
    code = "import sys; from precompute.store.doors import MODELS; found = dict(MODELS.all())\n"
    code += "assert 'image_encoder' not in found and 'torch' not in sys.modules, found"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=60)


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


COUNTS = """
from pathlib import Path
from precompute.model import ViewTemplate

class Counter:
    template = ViewTemplate(
        Path(__file__).with_name("counter.yaml"),
        "letters",
        "counted",
        lambda columns: {"names": ", ".join(columns)},
        ("spaces count as letters",),
    )

    def __init__(self, columns):
        self.columns = columns

    def fingerprint(self):
        return f"counter 1 {self.columns}"

    def reads(self):
        return self.columns

    def compute(self, batch):
        rows = zip(*(batch.column(name).to_pylist() for name in self.columns))
        return {"letters": [sum(map(len, row)) for row in rows]}
"""
COUNTER = """
# {{view}}: how long each {{noun}} is
{{columns}}
name: {{view}}
entity: [{{key}}]
source:
  sql: |
    {{sql}}
model: {use: counter, args: {columns: [{{names}}]}}
features: {letters: {dtype: int64}}
ttl: 1d
"""


@pytest.fixture
def package(install: Install) -> Path:
    return install(
        {"others.py": HALVES, "counting.py": COUNTS, "counter.yaml": COUNTER},
        "model.halver = others:Halver\nmodel.counter = counting:Counter\n"
        "model.gone = others:nothing_of_this_name\n",
    )


@pytest.mark.skipif(not COMMANDS.is_here("init"), reason="init is not installed here")
def test_another_packages_model_brings_a_template_like_ours(package: Path, tmp_path: Path) -> None:
    (tmp_path / "shirts.csv").write_text("id,name,about\n1,Red,long and wide\n2,Blue,short\n")
    folder = tmp_path / "new"
    folder.mkdir()
    given = ("--from", "../shirts.csv", "--template")
    here = ("-c", str(folder))
    done, ran, looked_up = called_each(
        package,
        (*here, "init", ".", *given, "counter"),
        (*here, "run", "shirt_letters"),
        (*here, "lookup", "shirt_letters", "2", "--json"),
        folder=folder,
    )
    assert done.returncode == 0, done.stderr
    assert "template counter\n" in done.stdout
    assert "  note: spaces count as letters\n" in done.stdout
    view = folder / "views" / "shirt_letters.yaml"
    assert "#   about  VARCHAR  counted\n" in view.read_text()
    assert yaml.safe_load(view.read_text())["model"] == {
        "use": "counter",
        "args": {"columns": ["name", "about"]},
    }
    assert ran.returncode == 0
    assert '"letters": 9' in looked_up.stdout
    points = package / "others-1.0.dist-info" / "entry_points.txt"
    points.write_text(points.read_text().replace("model.gone = others:nothing_of_this_name\n", ""))
    named = called(package, "new", "view", "x", *given, "cuonter", folder=folder)
    assert re.search(
        r"--template cuonter: is not one of .*, counter; did you mean 'counter'", named.stderr
    )


@pytest.mark.skipif(not COMMANDS.is_here("init"), reason="init is not installed here")
def test_another_packages_model_is_one_like_ours(package: Path, tmp_path: Path) -> None:
    """A built-in by its name: with the columns that it reads, its files for ``init``, and what is
    said of a name that is none."""
    (tmp_path / "size.half").write_text("Size")
    (tmp_path / "shirts.csv").write_text("id,Size\n1,3\n2,8\n")
    folder = tmp_path / "new"
    folder.mkdir()
    given = ("--from", "../shirts.csv", "--model", "../size.half")
    here = ("-c", str(folder))
    done, ran, looked_up = called_each(
        package,
        (*here, "init", ".", *given),
        (*here, "run", "shirt_score"),
        (*here, "lookup", "shirt_score", "2", "--json"),
        folder=folder,
    )
    assert done.returncode == 0, done.stderr
    (view,) = (folder / "views").iterdir()
    assert yaml.safe_load(view.read_text())["model"] == {
        "use": "halver",
        "args": {"path": "../size.half", "columns": {"Size": "size"}},
    }
    assert ran.returncode == 0
    assert '"half": 4.0' in looked_up.stdout
    wrong = {
        "halve": r"unknown model 'halve'.*; did you mean 'halver'",
        "gone": r"model 'gone' of others:nothing_of_this_name cannot be loaded",
    }
    for use in wrong:
        text = view.read_text().replace("use: halver", f"use: {use}")
        (folder / "views" / f"{use}.yaml").write_text(
            text.replace(f"name: {view.stem}", f"name: {use}")
        )
    each = called_each(package, *((*here, "validate", use) for use in wrong), folder=folder)
    for done, told in zip(each, wrong.values(), strict=True):
        assert done.returncode == 2
        assert re.search(told, done.stdout + done.stderr), done
    # of a package that is whole the files are known
    points = package / "others-1.0.dist-info" / "entry_points.txt"
    points.write_text("[precompute.plugins]\nmodel.halver = others:Halver\n")
    given = ("--from", "../shirts.csv", "--model", "../shirts.csv")
    named = called(package, "new", "view", "x", *given, folder=folder)
    assert "a file of halves (.half); pickles" in named.stderr
