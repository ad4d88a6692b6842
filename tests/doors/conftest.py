"""Houses: copies of the package without a power, or without any; and packages of others, installed
as pip would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from precompute.store import doors
from precompute.store.doors import KNOWN
from tests import REPOSITORY

POWERS = sorted(path.parent.name for path in doors.FOLDER.glob("*/__init__.py"))
EVERY = "every one"
"""Of the powers, at once."""


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


EACH = """
import contextlib, io, json, sys
from precompute.jobs.cli import main
said = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(command)
    said.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(said))
"""


class Said(NamedTuple):
    """What a command answered."""

    returncode: int
    stdout: str
    stderr: str


def called_each(house: Path, *commands: Sequence[str], folder: Path) -> Iterator[Said]:
    """``precompute`` of that copy with some commands, one after the other in one process of its
    own: most of what a command takes is to begin."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", EACH, json.dumps(commands)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{house}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return (Said(*said) for said in json.loads(done.stdout))


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


def weeks(first: Path, house: Path, folder: Path) -> None:
    """A week, and a service, of the project in ``folder``, with ``first`` before all else on the
    path; ``house`` is where ``precompute`` is found."""
    _ended_well(WEEK, first, house, folder)
    _ended_well(SERVES, first, house, folder)
    assert b'"double":2.0' in (folder / "answer").read_bytes()


def _ended_well(code: str, first: Path, house: Path, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(folder), str(house)],
        env=os.environ
        | {"PYTHONPATH": f"{first}:{REPOSITORY}", "PRECOMPUTE_SERVE__BIND": "127.0.0.1:0"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def without_each_of(*opened: str) -> pytest.MarkDecorator:
    """Run a test in the houses without a power that these doors lead to, each alone, and without
    any at all."""
    powers = {way.power for door in opened for way in KNOWN[door].values()} & set(POWERS)
    return pytest.mark.parametrize("house", [*sorted(powers), EVERY], indirect=True)


def names_of(without: str, door: str) -> list[str]:
    return [name for name, way in KNOWN[door].items() if without in (way.power, EVERY)]


Install = Callable[[Mapping[str, str], str], Path]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Install a package ``others`` of some modules, by their files' names, with these entry points,
    a line each; returns the folder that Python finds it in."""

    def installed(modules: Mapping[str, str], entry_points: str) -> Path:
        files = {
            "METADATA": "Metadata-Version: 2.1\nName: others\nVersion: 1.0\n",
            "entry_points.txt": f"[precompute.plugins]\n{entry_points}",
        }
        said = {f"others-1.0.dist-info/{name}": text for name, text in files.items()}
        for name, text in {**modules, **said}.items():
            path = tmp_path / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "site"

    return installed
