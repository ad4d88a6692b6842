"""The doors: what a name leads to, of ours and of other packages; and a house without a power, or
without any, which starts and says of each name in one line what it lacks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.store import doors
from precompute.store.doors import KNOWN, Door
from precompute.store.errors import ConfigError
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
            if way.power in POWERS:
                assert Door[Any](door).open(name) is not None
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
    weeks(copy, copy, tmp_path)


def weeks(first: Path, house: Path, folder: Path) -> None:
    """A week, and a service, of the project in ``folder``, with ``first`` before all else on the
    path; ``house`` is where ``precompute`` is found."""
    environment = os.environ | {
        "PYTHONPATH": f"{first}:{REPOSITORY}",
        "PRECOMPUTE_SERVE__BIND": "127.0.0.1:0",
    }
    for code in (WEEK, SERVES):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(folder), str(house)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    assert b'"double":2.0' in (folder / "answer").read_bytes()


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


def over(url: str, folder: Path) -> None:
    """A project over an online store that this process may not know."""
    make_folder(folder, {"numbers": {}})
    text = (folder / "project.yaml").read_text()
    (folder / "project.yaml").write_text(text.replace("table:./var/online", url))


LOOKS_UP = """
import sys
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import ConfigError
for url in sys.argv[1:]:
    try:
        Lookup.open(url)
    except ConfigError as exc:
        print(exc)
"""


def test_its_urls_are_told_in_a_line_with_file_and_line(
    house: tuple[str, Path], tmp_path: Path
) -> None:
    without, copy = house
    schemes = names_of(without, "online")
    urls = [f"{scheme}://:hunter2@host:6379/0" for scheme in schemes]
    absent = [
        f"online: '{scheme}://…@host:6379/0': online '{scheme}' comes with the plug-in"
        f" {KNOWN['online'][scheme].power}, which is not installed here (no folder"
        f" precompute/plugins/{KNOWN['online'][scheme].power}): install precompute-store with it,"
        f" or do without '{scheme}'"
        for scheme in schemes
    ]
    opened = subprocess.run(
        [sys.executable, "-P", "-c", LOOKS_UP, *urls],
        env=os.environ | {"PYTHONPATH": f"{copy}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (opened.stdout.splitlines(), opened.stderr) == (absent, "")
    for url, told in zip(urls[:1], absent, strict=False):
        over(url, tmp_path)
        (line,) = (
            number
            for number, text in enumerate((tmp_path / "project.yaml").read_text().splitlines(), 1)
            if text.startswith("online:")
        )
        done = called(copy, "status", folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"precompute: {tmp_path}/project.yaml:{line}: {told}\n"


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
    "others_online.py": """
import json
from functools import reduce
from pathlib import Path
from precompute.store.disk.record import plain
from precompute.store.online.found_rows import FoundRows, overlaid
from precompute.store.online.miss_cache import MissCacheFile
from precompute.store.online.online_store import (
    Generation, OnlineStore, Pointer, check_epoch, check_loaded, check_not_live, check_taken)

class JsonStore(OnlineStore):
    def __init__(self, path): self.path = path
    def whole(self): return json.loads(self.path.read_text()) if self.path.exists() else {}
    def of(self, view): return self.whole().get(view, {"pointer": None, "tables": {}})
    def put(self, view, of):
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.whole() | {view: of}))
        new.replace(self.path)
    def load(self, view, generation, rows, rows_done=0):
        check_not_live(self.live(view), view, generation.number)
        table, of = {}, self.of(view)
        for batch in rows:
            for key, row in zip(batch.keys.strings(), batch.rows.strings()):
                table[bytes(key).hex()] = bytes(row).hex()
        of["tables"][str(generation.number)] = [plain(generation), table]
        self.put(view, of)
        return len(table)
    def flip(self, pointer):
        of, live = self.of(pointer.view.name), self.live(pointer.view.name)
        check_loaded(pointer, list(map(int, of["tables"])))
        check_taken(live, pointer)
        check_epoch(live, pointer)
        self.put(pointer.view.name, of | {"pointer": pointer.to_bytes().decode()})
    def live(self, view):
        text = self.of(view)["pointer"]
        return None if text is None else Pointer.from_bytes(text.encode(), view)
    def read(self, view, keys):
        pointer = self.live(view)
        return pointer and (pointer, reduce(
            overlaid, [self.read_generation(view, number, keys) for number in pointer.generations]))
    def read_generation(self, view, number, keys):
        _, table = self.of(view)["tables"].get(str(number), [None, {}])
        rows = [table.get(bytes(key).hex()) for key in keys]
        return FoundRows(keys, [None if row is None else bytes.fromhex(row) for row in rows])
    def generations(self, view):
        found = [Generation(**record) for record, _ in self.of(view)["tables"].values()]
        return sorted(found, key=lambda generation: generation.number)
    def drop(self, view, number):
        check_not_live(self.live(view), view, number)
        of = self.of(view)
        of["tables"].pop(str(number), None)
        self.put(view, of)
    def forget(self, view): self.put(view, {"pointer": None, "tables": {}})
    def views(self): return sorted(view for view, of in self.whole().items() if of["pointer"])
    def close(self): pass

def open(url, base, memory_mb):
    return JsonStore((base or Path()) / url.partition(":")[2])

def miss_cache(url, limits, base):
    return MissCacheFile(((base or Path()) / url.partition(":")[2]).with_suffix(".misses"), limits)
""",
    "others-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: others\nVersion: 1.0\n",
    "others-1.0.dist-info/entry_points.txt": """
[precompute.plugins]
command.greet = others:add
command.gone = others:nothing_of_this_name
online.json = others_online
online.broken = others:no_store
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


def test_another_packages_online_store_is_one_like_ours(package: Path, tmp_path: Path) -> None:
    over(f"json:{tmp_path}/online.json", tmp_path)
    weeks(package, REPOSITORY, tmp_path)
    assert json.loads((tmp_path / "online.json").read_text())["numbers"]["tables"].keys() == {"1"}
    over("jsno:./online.json", tmp_path)
    told = called(package, "status", folder=tmp_path).stderr
    assert "'jsno:./online.json' names no online store: write table:./folder" in told
    assert told.endswith("did you mean 'json'?\n")
    over("broken:./online", tmp_path)
    (line,) = called(package, "run", "numbers", folder=tmp_path).stderr.splitlines()
    assert line == (
        "precompute: view 'numbers': online 'broken' of others:no_store cannot be loaded: AttributeError: module"
        " 'others' has no attribute 'no_store'; mend that package, or take it out"
    )
