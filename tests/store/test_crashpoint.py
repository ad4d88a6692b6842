"""Crash points: nothing unless armed; then exactly the passing that was requested fails in
that mode."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from precompute.store.disk.crashpoint import POINTS, InjectedError, arm, crashpoint, disarm
from tests import REPOSITORY


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    disarm()
    yield
    disarm()


def test_nothing_happens_unless_armed(tmp_path: Path) -> None:
    for name in POINTS:
        crashpoint(name, tmp_path / "not there")
    crashpoint("no such point")  # not even looked at: a point must cost nothing
    assert disarm() == {}


def test_the_nth_passing_fails_and_no_other() -> None:
    arm("manifest.link", 2, "raise")
    crashpoint("manifest.write")
    crashpoint("manifest.link")
    with pytest.raises(InjectedError, match=r"^injected at manifest.link$"):
        crashpoint("manifest.link")
    crashpoint("manifest.link")
    assert disarm() == {"manifest.write": 1, "manifest.link": 3}
    crashpoint("manifest.link")
    assert disarm() == {}


def test_without_a_name_passings_are_only_counted() -> None:
    arm("")
    for name in (*POINTS, "verify"):
        crashpoint(name)
    assert disarm() == dict.fromkeys(POINTS, 1) | {"verify": 2}


@pytest.mark.parametrize(("mode", "number"), [("eio", errno.EIO), ("enospc", errno.ENOSPC)])
def test_an_error_of_the_file_system_is_one_like_the_kernels(
    tmp_path: Path, mode: str, number: int
) -> None:
    path = tmp_path / "file"
    arm("part.write", 1, mode)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        crashpoint("part.write", path)
    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    arm("part.write", 1, mode)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        crashpoint("part.write")
    assert (caught.value.errno, caught.value.filename) == (number, None)


@pytest.mark.parametrize(
    ("name", "nth", "mode"),
    [
        ("nope", 1, "kill"),
        ("verify", 0, "kill"),
        ("verify", 1, "nope"),
    ],
)
def test_what_cannot_be_armed_is_refused_with_what_can(name: str, nth: int, mode: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"crash point {name}:{nth}:{mode}: points are part.write, ")
    ):
        arm(name, nth, mode)
    for point in POINTS:
        crashpoint(point)
    assert disarm() == {}


PASS = """
import sys
from pathlib import Path
from precompute.store.disk.crashpoint import crashpoint
path = Path(sys.argv[1])
for n in range(3):
    path.write_bytes(b"0123456789")
    crashpoint("part.write", path)
    print(n, flush=True)
"""


def passing(path: Path, armed: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PRECOMPUTE_CRASH": armed}
    command = [sys.executable, "-c", PASS, str(path)]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("armed", "lines", "code", "left"),
    [
        ("verify", 3, 0, b"0123456789"),
        ("part.write", 0, -signal.SIGKILL, b"0123456789"),
        ("part.write:3:kill", 2, -signal.SIGKILL, b"0123456789"),
        ("part.write:2:torn", 1, -signal.SIGKILL, b"01234"),
        ("part.write:1:raise", 0, 1, b"0123456789"),
    ],
)
def test_a_process_is_armed_by_its_environment(
    tmp_path: Path, armed: str, lines: int, code: int, left: bytes
) -> None:
    path = tmp_path / "file"
    process = passing(path, armed)
    out, err = process.communicate(timeout=30)
    assert (out.split(), process.returncode) == ([str(n) for n in range(lines)], code), err
    assert path.read_bytes() == left
    assert ("InjectedError: injected at part.write" in err) == armed.endswith("raise")


def test_a_stopped_process_goes_on_where_it_was(tmp_path: Path) -> None:
    process = passing(tmp_path / "file", "part.write:2:stop")
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=30)[0] == "1\n2\n"
    assert process.returncode == 0


def test_a_process_armed_wrongly_does_not_start(tmp_path: Path) -> None:
    for armed in ("nope", "part.write:0"):
        process = passing(tmp_path / "file", armed)
        out, err = process.communicate(timeout=30)
        assert (out, process.returncode) == ("", 1)
        assert "ValueError: crash point" in err
    assert not (tmp_path / "file").exists()


def test_every_declared_point_stands_in_the_code_and_vice_versa() -> None:
    """A prefix that is passed on, as ``point="live"``, stands for the steps of that function of
    :mod:`precompute.store.disk.durable_file`."""
    text = "\n".join(
        path.read_text()
        for room in ("store", "precompute", "jobs")
        for path in (REPOSITORY / room).rglob("*.py")
    )
    created = ("write", "link", "dirsync")
    steps = {"segment": created, "manifest": created, "log": created}
    assert set(re.findall(r'point="(\w+)"', text)) == steps.keys()
    assert set(re.findall(r'crashpoint\(f"\{point\}\.(\w+)"', text)) == {
        step for names in steps.values() for step in names
    }
    found = set(re.findall(r'crashpoint\("([a-z.]+)"', text)) | {
        f"{name}.{step}" for name in steps for step in steps[name]
    }
    assert found == set(POINTS)
    assert len(POINTS) == len(set(POINTS))
