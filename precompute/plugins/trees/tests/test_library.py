"""Trees beside their own library, in the process of its own that it has in a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from precompute.plugins.trees.tests.people import lightgbm
from tests.fixtures import PROCESSES, MakeProject
from tests.people import view_of


@pytest.fixture
def libraries() -> None:
    """Models are compared with their own libraries."""


def test_lightgbm_in_a_process_of_its_own(
    make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: None
) -> None:
    """Which has what tests' processes do without, pandas among it."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != PROCESSES])
    (tmp_path / "project").mkdir()
    made = lightgbm(tmp_path / "project")
    found = make_project(made.table, view=view_of("lightgbm", made)).run().library
    assert found is not None
    assert (found.verdict, found.rows, found.worst) == ("equal", 8, 0.0)
