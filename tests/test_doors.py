"""The doors: what a name leads to, of ours and of other packages; and a house without a power, or
without any, which starts and says of each name in one line what it lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from precompute.store import doors
from precompute.store.doors import KNOWN, Door
from precompute.store.errors import ConfigError
from precompute.students import columns_student
from precompute.students.columns_student import Trees
from precompute.techniques.table import words
from tests import REPOSITORY
from tests.server import make_folder

POWERS = sorted(path.parent.name for path in doors.FOLDER.glob("*/__init__.py"))
EVERY = "every one"
"""Of the powers, at once."""


# ---- the table


def test_every_name_leads_somewhere_and_every_power_has_a_name() -> None:
    for door, ways in KNOWN.items():
        for name, way in ways.items():
            assert way.power in POWERS, (door, name)
            assert Door[Any](door).open(name) is not None
    assert {way.power for ways in KNOWN.values() for way in ways.values()} == set(POWERS)


def test_a_name_that_no_door_has_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^no command 'plam'; did you mean 'plan'\?$"):
        Door[Any]("command").open("plam")


# ---- without a power


@pytest.fixture(scope="module", params=[*POWERS, EVERY])
def house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A copy of the package without a power, or without any."""
    without: str = request.param
    copy = tmp_path_factory.mktemp("house")
    absent = doors.FOLDER if without == EVERY else doors.FOLDER / without
    shutil.copytree(
        REPOSITORY / "precompute",
        copy / "precompute",
        copy_function=os.symlink,
        ignore=lambda folder, names: {
            name for name in names if name == "__pycache__" or Path(folder, name) == absent
        },
    )
    yield without, copy
    shutil.rmtree(copy)


def called(house: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``precompute`` of that copy, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "precompute.jobs.cli", "-c", str(folder), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{house}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


WEEK = """
import sys, threading, time
from pathlib import Path
from precompute.jobs.cli import main
import precompute
assert precompute.__path__[0].startswith(sys.argv[2]), precompute.__path__
folder = sys.argv[1]
for command in (["--help"], ["validate"], ["run", "numbers"], ["lookup", "numbers", "1"], ["status"]):
    try:
        status = main(["-c", folder, *command])
    except SystemExit as exc:
        status = exc.code
    assert status in (0, None), (command, status)
"""
SERVES = """
import os, signal, sys, threading, time, urllib.request
from precompute.jobs.cli import main
def ask():
    for _ in range(300):
        time.sleep(0.1)
        try:
            line = open(sys.argv[1] + "/said").read()
            url = line.partition("serving on ")[2].split()[0]
            said = urllib.request.urlopen(url + "/v1/views/numbers/rows/1").read()
            open(sys.argv[1] + "/answer", "wb").write(said)
            break
        except (OSError, IndexError):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=ask, daemon=True).start()
sys.stdout = open(sys.argv[1] + "/said", "w", buffering=1)
sys.exit(main(["-c", sys.argv[1], "serve"]))
"""


def test_a_house_without_it_starts(house: tuple[str, Path], tmp_path: Path) -> None:
    _, copy = house
    make_folder(tmp_path, {"numbers": {}})
    environment = os.environ | {
        "PYTHONPATH": f"{copy}:{REPOSITORY}",
        "PRECOMPUTE_SERVE__BIND": "127.0.0.1:0",
    }
    for code in (WEEK, SERVES):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(tmp_path), str(copy)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    assert b'"double":2.0' in (tmp_path / "answer").read_bytes()


def names_of(without: str, door: str) -> list[str]:
    return [name for name, way in KNOWN[door].items() if without in (way.power, EVERY)]


def test_its_commands_say_in_a_line_what_they_lack(house: tuple[str, Path], tmp_path: Path) -> None:
    without, copy = house
    listed = called(copy, "--help", folder=tmp_path).stdout
    for name in names_of(without, "command"):
        done = called(copy, name, "numbers", folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert f"command '{name}' comes with the plug-in {KNOWN['command'][name].power}" in line
        assert f"\n    {name} " not in listed


def test_its_techniques_say_so_at_the_key_that_names_one(
    house: tuple[str, Path], tmp_path: Path
) -> None:
    without, copy = house
    for name in names_of(without, "technique")[:1]:
        precision, backend = words(name)
        model = {"use": "tests.models:Doubler", "precision": precision, "backend": backend}
        make_folder(tmp_path, {"numbers": {"model": model}})
        done = called(copy, "validate", "numbers", folder=tmp_path)
        assert (done.returncode, done.stderr) == (2, "")
        (line,) = done.stdout.splitlines()
        assert re.search(
            rf"numbers\.yaml:\d+: model\.backend: '{backend}': technique '{name}'", line
        ), line
        assert f"the plug-in {KNOWN['technique'][name].power}, which is not installed here" in line


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


def test_trees_are_no_student_without_what_computes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    columns = SimpleNamespace(categories=[], inputs={"numbers": {}}, unread=[])
    monkeypatch.setattr(columns_student, "columns_of", lambda _: columns)
    monkeypatch.setattr(doors, "FOLDER", tmp_path)
    one = SimpleNamespace(dim=None, max_items=None, dtype="float32")
    lesson: Any = SimpleNamespace(view=SimpleNamespace(features=[one]))
    assert "the plug-in trees, which is not installed here" in Trees().refuses(lesson)


# ---- another package's

PACKAGE = {
    "others.py": """
def add(commands):
    commands.add("greet", call, "say a friendly word").option("whom", "WHOM", "who is greeted")

def call(arguments):
    print("hello,", arguments.whom)
    return 0

def broken(commands):
    raise RuntimeError("not today")

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
""",
    "others-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: others\nVersion: 1.0\n",
    "others-1.0.dist-info/entry_points.txt": """
[precompute.plugins]
command.greet = others:add
command.gone = others:nothing_of_this_name
model.halver = others:Halver
model.gone = others:nothing_of_this_name
""",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Installed, as pip would: a module, and what says what is in it."""
    for name, text in PACKAGE.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "site"


def test_another_packages_command_is_one_like_ours(package: Path, tmp_path: Path) -> None:
    def greet(*arguments: str) -> subprocess.CompletedProcess[str]:
        return called(package, *arguments, folder=tmp_path)

    assert greet("greet", "you").stdout == "hello, you\n"
    assert "greet" in greet("--help").stdout
    assert "say a friendly word" in greet("greet", "--help").stdout
    assert greet("completion", "bash", "--", "gre").stdout == "greet\n"
    assert "no option '--loud'" in greet("greet", "you", "--loud").stderr
    assert "did you mean 'greet'?" in greet("gree").stderr
    gone = greet("gone")
    assert (gone.returncode, gone.stderr) == (
        2,
        "precompute: command 'gone' of others:nothing_of_this_name cannot be loaded: AttributeError:"
        " module 'others' has no attribute 'nothing_of_this_name'; mend that package, or take it"
        " out\n",
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
    points.write_text(points.read_text().replace("model.gone", "command.gone_too"))
    given = ("--from", "../shirts.csv", "--model", "../shirts.csv")
    assert "or a file of halves (.half); pickles" in ask("new", "view", "x", *given).stderr
