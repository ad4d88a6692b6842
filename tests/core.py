"""The core's tests, run in a copy of the repository that has no plug-ins; with plug-ins, run what
is left: see ``make test``.

python -m tests.core var/core
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import REPOSITORY

PLUGINS = Path("precompute/plugins")
ASKS = re.compile(r"precompute\.store(\.| import )doors|\bis_here\b|_rig\b")
"""Files of tests that ask what is here test more with plug-ins: they run again there."""


def copy_core(folder: Path) -> None:
    """Copy all files that git knows or would add, and what was built, but for plug-ins."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    built = (
        path.relative_to(REPOSITORY)
        for room in ("precompute", "store")
        for path in (REPOSITORY / room).rglob("*.so")
    )
    shutil.rmtree(folder, ignore_errors=True)
    for name in (*map(Path, filter(None, listed.split("\0"))), *built):
        path = REPOSITORY / name
        if not name.is_relative_to(PLUGINS) and (path.is_symlink() or path.is_file()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, folder / name, follow_symlinks=False)


def name_in_record(node_id: str) -> str:
    """A test's class and name, as pytest writes both into a JUnit file."""
    path, bracket, case = node_id.partition("[")
    file, *names = path.split("::")
    *classes, name = names
    return "::".join(
        [".".join([file.removesuffix(".py").replace("/", "."), *classes]), name + bracket + case]
    )


def passed(recorded: Path) -> set[str]:
    """The tests that passed by a JUnit file: what was skipped is none of them."""
    return {
        f"{case.attrib['classname']}::{case.attrib['name']}"
        for case in ElementTree.parse(recorded).iter("testcase")
        if not len(case)
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-passed",
        metavar="XML",
        type=Path,
        help="leave out what passed by this JUnit file, unless it asks which plug-ins are here",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    recorded: Path | None = config.getoption("without_passed")
    if recorded is not None:
        done = passed(recorded)
        asks = {path for path in {item.path for item in items} if ASKS.search(path.read_text())}
        left = [
            item for item in items if item.path in asks or name_in_record(item.nodeid) not in done
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(left)])
        items[:] = left


if __name__ == "__main__":
    copy_core(Path(sys.argv[1]).absolute())
