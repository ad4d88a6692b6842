"""docs/tutorial.md is true: from its CSV on every command is run, in its order, and prints what is
printed there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_readme import PRECOMPUTE, check_printed, curl, in_process, read, wait_until_ready
from tests.test_readme import Running as Started

DOC = "docs/tutorial.md"
OF_THE_SERVER = {
    "PRECOMPUTE_SERVE__BIND": "127.0.0.1:0",
    "PRECOMPUTE_VIEWS__WINE_EMBEDDING__FALLBACK__ENABLED": "false",
}
"""A port that is free; and no encoder behind misses, which takes ten seconds to load, and of which
the page asks nothing."""
VOLATILE = ("computed_at", "age_s", "model")


def parts() -> list[tuple[str, str]]:
    """(kind, text) of each block, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```", read(DOC), re.MULTILINE | re.DOTALL)


def steps(text: str) -> list[tuple[str, list[str]]]:
    """(command, what is printed below it)."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


def same(found: Any, printed: Any) -> bool:
    """Whether two answers are the same but for their times and the model's fingerprint."""
    if isinstance(printed, dict):
        return found.keys() == printed.keys() and all(
            name in VOLATILE or same(found[name], printed[name]) for name in printed
        )
    if isinstance(printed, list):
        return len(found) == len(printed) and all(map(same, found, printed))
    return bool(found == pytest.approx(printed, abs=0.001))


class Reader:
    """Does what the page says: ``at`` is the server's address, once it was started."""

    def __init__(self, capsys: pytest.CaptureFixture[str], chdir: Callable[[str], None]) -> None:
        self.capsys, self.chdir = capsys, chdir
        self.server: Started | None = None
        self.at = ""
        self.answer: Any = None
        self.printed = ""

    def command(self, line: str, expected: Sequence[str]) -> None:
        words = shlex.split(line)
        if words[0] == "cd":
            self.chdir(words[1])
        elif words[0] == "curl":
            self.answer = curl([*words[:1], *words[2:], words[2]], self.at)
        elif words == ["precompute", "serve"]:
            self.server = Started(
                [*PRECOMPUTE, "serve"], os.environ | OF_THE_SERVER, cwd=Path.cwd()
            )
            self.at = self.server.first.removeprefix("serving on ").strip()
            wait_until_ready(self.at)
        elif words[0] == "precompute":
            status, printed, told = in_process(words[1:], {}, self.capsys)
            assert status == (1 if ": missing (" in printed else 0), f"{line}\n{printed}{told}"
            check_printed(printed, expected or printed.splitlines()[:1])
        else:
            subprocess.run(["sh", "-c", line], check=True)

    def yaml(self, text: str) -> None:
        """Lays the settings over the file that has them."""
        path = Path("views/wine_score.yaml" if text.startswith("model:") else "project.yaml")
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | yaml.safe_load(text)))

    def python(self, text: str) -> None:
        self.capsys.readouterr()
        exec(compile(text.replace("http://127.0.0.1:8080", self.at), DOC, "exec"), {})
        self.printed = self.capsys.readouterr().out


@pytest.mark.timeout(300)
def test_the_tutorial_prints_what_is_printed_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PRECOMPUTE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    reader, seen = Reader(capsys, monkeypatch.chdir), list[str]()
    try:
        for kind, text in parts():
            seen.append(kind)
            if kind == "csv":
                Path("wines.csv").write_text(text, encoding="utf-8")
            elif kind == "console":
                for line, expected in steps(text):
                    reader.command(line, expected)
            elif kind == "json":
                assert same(reader.answer, json.loads(text)), reader.answer
            elif kind == "text":
                assert reader.printed == text
            else:
                {"yaml": reader.yaml, "python": reader.python}[kind](text)
    finally:
        if reader.server is not None:
            assert reader.server.end() == 0
    assert (seen.count("console"), seen.count("json"), seen.count("yaml")) == (11, 2, 2)
