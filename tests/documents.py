"""Documents: their blocks and commands, how these are run, and whether what comes out is what is
printed there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.cli import main
from precompute.store.doors import COMMANDS
from tests import REPOSITORY

PRECOMPUTE = [str(Path(sys.executable).with_name("precompute"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def read(document: str) -> str:
    """A document, by its path in the repository."""
    return (REPOSITORY / document).read_text(encoding="utf-8")


def blocks(document: str, kind: str) -> list[str]:
    """Its blocks of a kind."""
    return [text for found, text in BLOCK.findall(read(document)) if found == kind]


def steps(text: str) -> list[tuple[str, list[str]]]:
    """(command, what is printed below it) of each line with a prompt."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


def commands(document: str) -> list[tuple[str, list[str]]]:
    """:func:`steps` of all its blocks of a console."""
    return steps("".join(blocks(document, "console")))


def command_of(words: Sequence[str]) -> str:
    """The command of the words after ``precompute``."""
    return words[2 if words[0] == "-c" else 0]


def is_here(command: str) -> bool:
    """Whether a command is of the rooms, or of a power that is here."""
    return COMMANDS.is_here(command) or not COMMANDS.has(command)


def unset_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable overrides a setting, and what a command adds to ``sys.path`` goes with the
    test."""
    for name in [name for name in os.environ if name.startswith("PRECOMPUTE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(sys, "path", [*sys.path])


def printed_by(
    command: Sequence[str],
    environment: dict[str, str] | None = None,
    timeout_s: float = 200,
    cwd: Path = REPOSITORY,
) -> str:
    """What a command prints that must succeed; ``environment`` is this process's by default."""
    done = subprocess.run(
        command,
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Running:
    """A command that runs until SIGTERM; ``first`` is its first line."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], cwd: Path = REPOSITORY
    ) -> None:
        self.process = subprocess.Popen(
            command, env=environment, cwd=cwd, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


def in_process(
    words: Sequence[str], environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """(exit status, what it printed, and to stderr) of a command line here: an interpreter and
    torch of its own would take it 3 s."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        status = main(words)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def check_printed(printed: str, expected: Sequence[str]) -> None:
    """Its first lines are those of a document."""
    assert expected
    found = printed.splitlines()
    assert len(found) >= len(expected), printed
    for ours, theirs in zip(found, expected, strict=False):
        assert_alike(ours, theirs)


def assert_alike(found: str, printed: str) -> None:
    """The same text, but for how long it took, how old it is, and the model's fingerprint; numbers
    with a point within 0.02."""

    def parts(line: str) -> list[str]:
        line = re.sub(
            r"\d+ (s|min|h) old", "… old", re.sub(r"[\d,.]+ rows/s, [\d.]+ (s|min)$", "…", line)
        )
        return re.split(r"(\d+\.\d+)", re.sub(r"model [0-9a-f]{12}", "model …", line))

    ours, theirs = parts(found), parts(printed)
    assert (ours[0::2], len(ours)) == (theirs[0::2], len(theirs)), (
        f"{found}\nis printed as\n{printed}"
    )
    assert [float(n) for n in ours[1::2]] == pytest.approx(
        [float(n) for n in theirs[1::2]], abs=0.02
    ), f"{found}\n{printed}"


def wait_until_ready(address: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{address}/readyz", timeout=10) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not get ready")


def curl(words: Sequence[str], address: str) -> dict[str, Any]:
    """What the curl command line asks for, asked without curl."""
    url = words[-1].replace("http://127.0.0.1:8080", address)
    body = words[words.index("-d") + 1].encode() if "-d" in words else None
    request = urllib.request.Request(
        url, body, {"Content-Type": "application/json"} if body else {}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
