"""The doors: what a name leads to, of ours and of other packages; and a house without a power, or
without any, which starts and says of each name in one line what it lacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from precompute.store import doors
from precompute.store.doors import KNOWN, Door
from precompute.store.errors import ConfigError
from tests import REPOSITORY
from tests.server import make_folder

POWERS = sorted(path.parent.name for path in doors.FOLDER.glob("*/__init__.py"))
EVERY = "every one"
"""Of the powers, at once."""


# ---- the table


def test_every_name_leads_somewhere_and_every_power_has_a_name() -> None:
    """Of the powers that are here."""
    for door, ways in KNOWN.items():
        for name, way in ways.items():
            assert way.power not in POWERS or Door[Any](door).open(name) is not None
    assert {way.power for ways in KNOWN.values() for way in ways.values()} >= set(POWERS)


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


def test_its_keys_say_in_a_line_what_they_lack(house: tuple[str, Path], tmp_path: Path) -> None:
    without, copy = house
    for door, file in KEYS.items():
        for name in names_of(without, door):
            make_folder(tmp_path, {"numbers": {}})
            where = write_key(tmp_path / file, name, {})
            done = called(copy, "run", "numbers", folder=tmp_path)
            assert (done.returncode, done.stdout) == (2, "")
            (line,) = done.stderr.splitlines()
            assert (
                f"{where}{door} {name!r} comes with the plug-in {KNOWN[door][name].power}" in line
            )


def test_status_tells_what_it_left(house: tuple[str, Path], tmp_path: Path) -> None:
    without, copy = house
    names = names_of(without, "snapshots")
    for name in names:
        folder = make_folder(tmp_path, {"numbers": {}}).root / "numbers" / name
        folder.mkdir(parents=True)
        (folder / "file").touch()
    if names:
        (line,) = json.loads(called(copy, "status", "--json", folder=tmp_path).stdout)
        told = [text for text in line["attention"] if "comes with the plug-in" in text]
        assert [
            text.endswith(f"/var/numbers/{name}") for text, name in zip(told, names, strict=True)
        ]


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
""",
    "others_keys.py": """
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
        self._say(store, f"published {store.refs.readable_live().snapshot}")

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
""",
    "others_traces.py": """
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
""",
    "others-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: others\nVersion: 1.0\n",
    "others-1.0.dist-info/entry_points.txt": """
[precompute.plugins]
command.greet = others:add
command.gone = others:nothing_of_this_name
launcher.hosts = others:hosts
project-key.archive = others_keys:ArchiveKeys
project-key.serve.diary = others_traces:DiaryKeys
snapshots.archive = others_keys:Archive
traces.serve.diary = others_traces:Diary
view-key.glossary = others_keys:GlossaryKeys
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


def test_another_packages_keys_are_keys_like_ours(package: Path, tmp_path: Path) -> None:
    def wrong(file: str, key: str, value: Any) -> str:
        make_folder(tmp_path, {"numbers": {}})
        where = write_key(tmp_path / file, key, value)
        done = called(package, "run", "numbers", folder=tmp_path)
        (line,) = done.stderr.splitlines()
        assert where in line
        return line.partition(where)[2]

    assert wrong("project.yaml", "archive", 5) == "5: write a list, as in [a, b]"
    assert wrong("project.yaml", "archive", ["nobody"]) == "no view 'nobody'"
    assert wrong("project.yaml", "archiv", []) == "unknown key; did you mean 'archive'?"
    assert wrong("views/numbers.yaml", "glossary", 5) == "5: write keys and values"
    taken = (
        "answers have a column 'double' of their own then; call the feature or key something else"
    )
    assert wrong("views/numbers.yaml", "glossary", {"double": 1}) == taken
    near = wrong("project.yaml", "engine.on", "host")
    assert near.startswith("'host' is not one of local, elsewhere, ")
    assert near.endswith("hosts; did you mean 'hosts'?")
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
