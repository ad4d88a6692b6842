"""The core's tests, run in a copy of the repository that has no plug-ins; with plug-ins, run what
is left: see ``make test``.

python -m tests.core var/core
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import REPOSITORY

PLUGINS = Path("precompute/plugins")
LEFT = shutil.ignore_patterns(
    *(".git", ".venv*", "var", "dist", "build", "results", "tuning", "students"),
    *("__pycache__", ".*_cache", ".hypothesis", "*.egg-info"),
)
ASKS = re.compile(r"precompute\.store(\.| import )doors|\bis_here\b|_rig\b")
"""Files of tests that ask what is here test more with plug-ins: they run again there."""


def copy_core(folder: Path) -> None:
    """Copy the repository, with what was built in it, but for plug-ins and what tools leave."""

    def left_out(within: str, names: list[str]) -> set[str]:
        plugins = {name for name in names if Path(within, name) == REPOSITORY / PLUGINS}
        return plugins | LEFT(within, names)

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(REPOSITORY, folder, symlinks=True, ignore=left_out)


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
