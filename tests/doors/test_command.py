"""Commands by their door: ours where the power is not here, and another package's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from precompute.store.doors import KNOWN
from tests.doors.conftest import Install, called, names_of, without_each_of


@without_each_of("command")
def test_its_commands_say_in_a_line_what_they_lack(house: tuple[str, Path], tmp_path: Path) -> None:
    without, copy = house
    listed = called(copy, "--help", folder=tmp_path).stdout
    for name in names_of(without, "command"):
        done = called(copy, name, "numbers", folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert f"command '{name}' comes with the plug-in {KNOWN['command'][name].power}" in line
        assert f"\n    {name} " not in listed


# ---- another package's


GREETS = """
def add(commands):
    commands.add("greet", call, "say a friendly word").option("whom", "WHOM", "who is greeted")

def call(arguments):
    print("hello,", arguments.whom)
    return 0

def broken(commands):
    raise RuntimeError("not today")

def another(commands):
    commands.add("welcome", call, "say a friendly word")

nothing = None
"""


@pytest.fixture
def package(install: Install) -> Path:
    return install(
        {"others.py": GREETS},
        "command.greet = others:add\ncommand.gone = others:nothing_of_this_name\n"
        "command.broken = others:broken\ncommand.hello = others:another\n"
        "command.nothing = others:nothing\n",
    )


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


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", "command 'broken' of others cannot be used: RuntimeError: not today"),
        ("hello", "command 'hello' of others cannot be used: it adds no command of that name"),
        ("nothing", "command 'nothing' leads to others:nothing, which is none: it has no __call__"),
    ],
)
def test_one_that_cannot_be_used_says_so_and_no_other_is_lost(
    package: Path, tmp_path: Path, name: str, why: str
) -> None:
    done = called(package, name, folder=tmp_path)
    told = f"precompute: {why}; mend that package, or take it out\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
    completed = called(package, "completion", "bash", "--", "gre", folder=tmp_path)
    assert (completed.stdout, completed.stderr) == ("greet\n", "")
