"""docs/python.md is true: its Python prints what is printed there, in its order, over the README's
project; and its service's tests pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.test_readme import assert_alike, books, read

__all__ = ["books"]

PAGE = "docs/python.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def named(text: str) -> tuple[str, str] | None:
    """File name and content of a block whose first line names a file."""
    found = re.match(r"# ((?:books|shop)/[\w./]+)\n", text)
    return None if found is None else (found[1], text[found.end() :])


@pytest.fixture
def folder(books: Path) -> Path:
    """The README's project, with the files of the page beside its own."""
    for _, text in BLOCK.findall(read(PAGE)):
        file = named(text)
        if file is not None:
            path = books / file[0]
            path.parent.mkdir(exist_ok=True)
            path.write_text(file[1])
    return books


def run(command: list[str], folder: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECOMPUTE_")} | {
        "PYTHONPATH": str(REPOSITORY)
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_what_the_page_says_is_printed_is_printed(folder: Path) -> None:
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
    printed = run([sys.executable, "-c", code], folder).splitlines()
    assert len(printed) == len(expected) > 15, "\n".join(printed)
    for ours, theirs in zip(printed, expected, strict=True):
        assert_alike(spaced(ours.replace(str(folder), "…")), spaced(theirs))


def spaced(line: str) -> str:
    """A line of a table, however wide its columns and however old its rows are."""
    return re.sub(r" +", " ", re.sub(r"\b\d+ s\b", "0 s", line)).strip()


def test_the_tests_of_its_service_pass(folder: Path) -> None:
    pytest.importorskip("fastapi")
    (folder / "shop" / "pytest.ini").write_text("[pytest]\naddopts =\n")
    printed = run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "."], folder / "shop"
    )
    assert "3 passed" in printed, printed
