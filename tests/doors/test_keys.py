"""Keys, hooks, launchers and traces by their doors: ours where a power is not here, and others'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from precompute.store.doors import KNOWN
from tests import REPOSITORY
from tests.doors.conftest import SERVES, Install, called, called_each, names_of, without_each_of
from tests.server import make_folder


@without_each_of("launcher")
def test_its_launchers_say_in_a_line_what_they_lack(
    house: tuple[str, Path], tmp_path: Path
) -> None:
    without, copy = house
    for name in names_of(without, "launcher"):
        make_folder(tmp_path, {"numbers": {}})
        where = write_key(tmp_path / "project.yaml", "engine.on", name)
        done = called(copy, "run", "numbers", folder=tmp_path)
        (line,) = done.stderr.splitlines()
        assert f"{where}launcher {name!r} comes with the plug-in" in line


KEYS = {"project key": "project.yaml", "view key": "views/numbers.yaml"}
"""Door → the file that its keys stand in."""


def write_key(path: Path, name: str, value: Any) -> str:
    """Have a file of the configuration say something under a name such as ``serve.tracing``; where
    that stands, as a message says it."""
    settings = yaml.safe_load(path.read_text())
    *sections, key = name.split(".")
    inner = settings
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    path.write_text(yaml.safe_dump(settings))
    lines = path.read_text().splitlines()
    line = next(
        n for n, line in enumerate(lines, 1) if line.strip().replace("'", "").startswith(f"{key}:")
    )
    return f"{path.name}:{line}: {name}: "


@without_each_of("project key", "view key")
def test_its_keys_say_in_a_line_what_they_lack(house: tuple[str, Path], tmp_path: Path) -> None:
    without, copy = house
    expected, commands = [], []
    for door, file in KEYS.items():
        for name in names_of(without, door):
            folder = tmp_path / name
            make_folder(folder, {"numbers": {}})
            where = write_key(folder / file, name, {})
            expected.append(
                f"{where}{door} {name!r} comes with the plug-in {KNOWN[door][name].power}"
            )
            commands.append(("-c", str(folder), "run", "numbers"))
    for said, done in zip(expected, called_each(copy, *commands, folder=tmp_path), strict=True):
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert said in line


@without_each_of("snapshots", "followers")
def test_status_tells_what_it_left(house: tuple[str, Path], tmp_path: Path) -> None:
    without, copy = house
    names = [*names_of(without, "snapshots"), *names_of(without, "followers")]
    for name in names:
        folder = make_folder(tmp_path, {"numbers": {}}).root / "numbers" / name
        folder.mkdir(parents=True)
        (folder / "file").touch()
    if names:
        (line,) = json.loads(called(copy, "status", "--json", folder=tmp_path).stdout)
        told = [text for text in line["attention"] if "comes with the plug-in" in text]
        assert [text.rpartition("): ")[2] for text in told] == [
            "install precompute-store again, which has it, or remove what it left,"
            f" {tmp_path}/var/numbers/{name}"
            for name in names
        ]


# ---- another package's


OTHERS_KEYS = """
from precompute.jobs.config.open_section import Keys, Mistake

class ArchiveKeys(Keys):
    '''Which views are archived.'''
    archive: list[str] = []
    '''views that are archived'''

    def check(self, names):
        unknown = [name for name in self.archive if name not in names]
        return Mistake(("archive",), f"no view {unknown[0]!r}") if unknown else None

    def mistake(self, view, names, views):
        if view.name in self.archive and "vector" in view.feature_names:
            return Mistake(("features", "vector"), "an archive has no vectors")
        return None

    def wants(self, view):
        return view in self.archive

class Archive:
    def _say(self, store, line):
        with (store.folder / "archive").open("a") as file:
            print(line, file=file)

    def committed(self, store, wanted):
        self._say(store, f"committed {wanted}")
        return ["the archive is nearly full"] if wanted else []

    def published(self, store):
        self._say(store, f"published {store.log.readable_live().snapshot}")

    def checks(self, store):
        return ()

    def going(self, store, numbers):
        raise RuntimeError("the archive is lost")

class GlossaryKeys(Keys):
    '''What words mean.'''
    glossary: dict[str, int] = {}
    '''word -> how often it is asked for'''

    def spec(self):
        return {"glossary": self.glossary}

    def columns(self):
        return ["double"] if "double" in self.glossary else []
"""


OTHERS_TRACES = """
from precompute.jobs.config.open_section import Keys

class DiaryKeys(Keys):
    '''A diary of requests.'''
    diary: str | None = None
    '''file that they are written to'''

    def spec(self):
        return {"serve.diary": self.diary}

class Diary:
    def __init__(self, spec, process):
        self._path, self._process = spec, process

    def traced(self, app):
        async def traced(scope, receive, send):
            await app(scope, receive, send)
            self.tell("", scope["path"], 0, 0, 1)
        return traced

    def tell(self, trace, name, began_ns, ended_ns, rows):
        with open(self._path, "a") as file:
            print(self._process, name, file=file)

    def close(self):
        self.tell("", "the end", 0, 0, 0)
"""


ENTRY_POINTS = """launcher.hosts = others:hosts
project-key.archive = others_keys:ArchiveKeys
project-key.serve.diary = others_traces:DiaryKeys
snapshots.archive = others_keys:Archive
traces.serve.diary = others_traces:Diary
view-key.glossary = others_keys:GlossaryKeys
"""


@pytest.fixture
def package(install: Install) -> Path:
    return install({"others_keys.py": OTHERS_KEYS, "others_traces.py": OTHERS_TRACES}, ENTRY_POINTS)


def test_another_packages_keys_are_keys_like_ours(package: Path, tmp_path: Path) -> None:
    taken = (
        "answers have a column 'double' of their own then; call the feature or key something else"
    )
    wrong: list[tuple[str, str, Any, str]] = [
        ("project.yaml", "archive", 5, "5: write a list, as in [a, b]"),
        ("project.yaml", "archive", ["nobody"], "no view 'nobody'"),
        ("project.yaml", "archiv", [], "unknown key; did you mean 'archive'?"),
        ("views/numbers.yaml", "glossary", 5, "5: write keys and values"),
        ("views/numbers.yaml", "glossary", {"double": 1}, taken),
        ("project.yaml", "engine.on", "host", "'host' is not one of local, elsewhere, "),
    ]
    expected, commands = [], []
    for number, (file, key, value, said) in enumerate(wrong):
        folder = tmp_path / str(number)
        make_folder(folder, {"numbers": {}})
        expected.append(f"{write_key(folder / file, key, value)}{said}")
        commands.append(("-c", str(folder), "run", "numbers"))
    lines = [done.stderr for done in called_each(package, *commands, folder=tmp_path)]
    *exact, near = zip(expected, lines, strict=True)
    assert all(line.endswith(f"{said}\n") and line.count("\n") == 1 for said, line in exact), lines
    assert near[0] in near[1]
    assert near[1].endswith("hosts; did you mean 'hosts'?\n")
    make_folder(tmp_path, {"numbers": {}})
    write_key(tmp_path / "project.yaml", "archive", ["numbers"])
    (line,) = called(package, "run", "numbers", folder=tmp_path).stderr.splitlines()
    assert "features.vector: an archive has no vectors" in line
    schemas = json.loads(called(package, "schema", "--json", folder=tmp_path).stdout)
    assert schemas["project"]["properties"]["archive"]["description"] == "views that are archived"
    assert "glossary" in schemas["view"]["properties"]
    assert "diary" in schemas["project"]["$defs"]["ServeConfig"]["properties"]
    assert "hosts" in schemas["project"]["$defs"]["EngineConfig"]["properties"]["on"]["enum"]


def test_another_packages_hook_hears_of_snapshots(package: Path, tmp_path: Path) -> None:
    view = {"features": {"double": {"dtype": "float64"}}, "index": None}
    scene = make_folder(tmp_path, {"numbers": view})
    write_key(tmp_path / "project.yaml", "archive", ["numbers"])
    write_key(tmp_path / "views" / "numbers.yaml", "glossary", {"a": 1})
    done = called(package, "run", "numbers", "--json", folder=tmp_path)
    report = json.loads(done.stdout)
    assert report["attention"] == ["the archive is nearly full"]
    said = (scene.root / "numbers" / "archive").read_text().splitlines()
    assert said == ["committed True", "published 1"]
    assert "snapshots 'archive' failed: RuntimeError: the archive is lost" in done.stderr
    assert scene.snapshot().view.powers == {"glossary": {"a": 1}}
    # the package is gone, and its keys with it; what it kept is told, and the rows are served
    make_folder(tmp_path, {"numbers": view})
    (line,) = json.loads(called(REPOSITORY, "status", "--json", folder=tmp_path).stdout)
    assert (
        "snapshot 1: view key 'glossary' comes with another package, which is not installed here:"
        " install that, or do without 'glossary'"
    ) in line["attention"]
    assert "double: 2" in called(REPOSITORY, "lookup", "numbers", "1", folder=tmp_path).stdout


def test_another_package_traces_what_a_server_does(package: Path, tmp_path: Path) -> None:
    make_folder(tmp_path, {"numbers": {}}).publish_all()
    write_key(tmp_path / "project.yaml", "serve.diary", str(tmp_path / "diary"))
    served = subprocess.run(
        [sys.executable, "-P", "-c", SERVES, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{package}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert served.returncode == 0, served.stderr
    lines = (tmp_path / "diary").read_text().splitlines()
    assert lines == ["worker-0 /v1/views/numbers/rows/1", "worker-0 the end"]
