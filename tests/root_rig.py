"""Root rig: what tests of the core run over: a root in a folder, and one of each power that is here
and has roots elsewhere: its fixture ``<power>_url`` is the URL of one with nothing in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from precompute.store.doors import FOLDER, KNOWN, ROOTS

KINDS = [
    "folder",
    *(
        power
        for power in dict.fromkeys(way.power for way in KNOWN["root"].values())
        if (FOLDER / power / "tests" / "fixtures.py").is_file()
    ),
]
"""Parameters of tests that run over every root that is here."""


def root_of(request: pytest.FixtureRequest, kind: str) -> str:
    """The value of ``root`` of one of :data:`KINDS`."""
    return "./var" if kind == "folder" else str(request.getfixturevalue(f"{kind}_url"))


def opened(root: str, home: Path) -> Path:
    """The folder of a root of a project in ``home``."""
    scheme, found, _ = root.partition("://")
    return ROOTS.open(scheme)(root, home, ()) if found else home / root
