"""docs/tutorial.md, docs/partitions.md and docs/python.md are true: what they show is run, in its
order, and prints what is printed there."""

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

from precompute.store.doors import COMMANDS, NAMES
from tests.documents import (
    BLOCK,
    PRECOMPUTE,
    Running,
    assert_alike,
    check_printed,
    curl,
    in_process,
    printed_by,
    read,
    steps,
    unset_settings,
    wait_until_ready,
)
from tests.test_readme import books

__all__ = ["books"]

# ---- docs/tutorial.md

DOC = "docs/tutorial.md"
OF_THE_SERVER = {
    "PRECOMPUTE_SERVE__BIND": "127.0.0.1:0",
    "PRECOMPUTE_VIEWS__WINE_EMBEDDING__FALLBACK__ENABLED": "false",
}
"""A port that is free; and no encoder behind misses, which takes ten seconds to load, and of which
the page asks nothing."""
VOLATILE = ("computed_at", "age_s", "model")


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
        self.server: Running | None = None
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
            self.server = Running([*PRECOMPUTE, "serve"], os.environ | OF_THE_SERVER, Path.cwd())
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
    if not COMMANDS.is_here("init"):
        pytest.skip("init is not installed here")
    unset_settings(monkeypatch)
    monkeypatch.chdir(tmp_path)
    reader, seen = Reader(capsys, monkeypatch.chdir), list[str]()
    try:
        for kind, text in BLOCK.findall(read(DOC)):
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


# ---- docs/partitions.md


@pytest.mark.timeout(300)
def test_the_worked_examples_print_what_is_printed_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unset_settings(monkeypatch)
    monkeypatch.chdir(tmp_path)
    ran = 0
    for kind, text in BLOCK.findall(read("docs/partitions.md")):
        file = re.match(r"# (?:\w+: )?(corpus/[\w./]+)\n", text)
        if file is not None:
            (tmp_path / file[1]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file[1]).write_text(text[file.end() :])
        for line, expected in steps(text) if kind == "console" else ():
            status, printed, told = in_process(shlex.split(line)[1:], {}, capsys)
            assert status == 0, f"{line}\n{printed}\n{told}"
            if expected:
                # how many a backfill commits is its own affair
                found, wanted = (
                    re.sub(r"snapshot \d+", "snapshot …", lines)
                    for lines in (printed, "\n".join(expected))
                )
                check_printed(found, wanted.strip().splitlines())
            ran += 1
    assert ran == 10


# ---- docs/python.md, over the README's project

PAGE = "docs/python.md"


def named(text: str) -> tuple[str, str] | None:
    """File name and content of a block whose first line names a file."""
    found = re.match(r"# ((?:books|shop)/[\w./]+)\n", text)
    return None if found is None else (found[1], text[found.end() :])


@pytest.fixture
def folder(books: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's project, with the files of the page beside its own."""
    unset_settings(monkeypatch)
    for _, text in BLOCK.findall(read(PAGE)):
        file = named(text)
        if file is not None:
            path = books / file[0]
            path.parent.mkdir(exist_ok=True)
            path.write_text(file[1])
    return books


@pytest.mark.timeout(300)
def test_what_the_page_says_is_printed_is_printed(folder: Path) -> None:
    if not NAMES.is_here("precompute.OpenProject"):
        pytest.skip("precompute.open is not installed here")
    # the page's view is not there yet when its first lines run
    late = folder / "books/views/loan_length.yaml"
    view = late.read_text()
    late.unlink()
    code, expected = "", list[str]()
    for kind, text in BLOCK.findall(read(PAGE)):
        file = named(text)
        if file is not None and file[0] == "books/views/loan_length.yaml":
            code += f"import pathlib; pathlib.Path('books/views/loan_length.yaml').write_text({view!r})\n"
        elif kind == "python" and file is None:
            code += text
        elif kind == "text":
            expected += text.splitlines()
    printed = printed_by([sys.executable, "-c", code], cwd=folder).splitlines()
    assert len(printed) == len(expected) > 15, "\n".join(printed)
    for ours, theirs in zip(printed, expected, strict=True):
        assert_alike(spaced(ours.replace(str(folder), "…")), spaced(theirs))


def spaced(line: str) -> str:
    """A line of a table, however wide its columns and however old its rows are."""
    return re.sub(r" +", " ", re.sub(r"\b\d+ s\b", "0 s", line)).strip()


def test_the_tests_of_its_service_pass(folder: Path) -> None:
    pytest.importorskip("fastapi")
    if not NAMES.is_here("precompute.testing.StandIn"):
        pytest.skip("the stand-in is not installed here")
    (folder / "shop" / "pytest.ini").write_text("[pytest]\naddopts =\n")
    printed = printed_by(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "."], cwd=folder / "shop"
    )
    assert "3 passed" in printed
