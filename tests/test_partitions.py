"""docs/partitions.md is true: its examples run, one after the other, and print what is printed
there."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.test_readme import check_printed, in_process

BLOCK = re.compile(
    r"^```(\w+)\n(?:# (?:\w+: )?(corpus/[\w./]+)\n)?(.*?)^```", re.MULTILINE | re.DOTALL
)


@pytest.mark.timeout(300)
def test_the_worked_examples_print_what_is_printed_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PRECOMPUTE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    ran = 0
    for kind, file, text in BLOCK.findall(
        (REPOSITORY / "docs/partitions.md").read_text(encoding="utf-8")
    ):
        if file:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
        for step in text.split("$ ")[1:] if kind == "console" else ():
            command, *expected = step.splitlines()
            status, printed, told = in_process(shlex.split(command)[1:], {}, capsys)
            assert status == 0, f"{command}\n{printed}\n{told}"
            if expected:
                # how many a backfill commits is its own affair
                found, wanted = (
                    re.sub(r"snapshot \d+", "snapshot …", lines)
                    for lines in (printed, "\n".join(expected))
                )
                check_printed(found, wanted.strip().splitlines())
            ran += 1
    assert ran == 10
