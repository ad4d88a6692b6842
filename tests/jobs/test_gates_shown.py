"""What gates judged by is shown: the figures of a snapshot with their limits and what they were in
the nights before."""

from __future__ import annotations

import json
from datetime import date, timedelta
from typing import Any

import numpy as np
import pytest

from precompute.jobs.commands.review import describe_gates
from precompute.jobs.ops.gate_history import gate_history
from precompute.jobs.run import materialize
from tests.fixtures import MakeProject
from tests.scene import Scene

Captured = pytest.CaptureFixture[str]
FIRST = date(2026, 11, 1)


def night(project: Scene, number: int, rows: dict[int, float]) -> None:
    """Run ``numbers`` on a day, over these rows."""


def nights(make_project: MakeProject, many: int, last: float = 1.0) -> Scene:
    """A view of 200 normal values that ran for so many nights, of which the last has them times
    ``last``."""
    random = np.random.default_rng(45)
    with pytest.MonkeyPatch.context() as patched:
        for n in range(many):
            at = f"{FIRST + timedelta(days=n)}T02:00:00Z"
            patched.setattr(materialize, "utc_now", lambda at=at: at)
            values = random.normal(10, 2, 200) * (last if n == many - 1 else 1.0)
            project = make_project([(i, round(float(x), 3)) for i, x in enumerate(values)], view={"gates": {"moved": None, "computed": None, "anchor": None, "first": None}})
            project.cli("run", "numbers")
    return project

def test_x(make_project, capsys):
    import time
    t=time.time()
    project = nights(make_project, 16, 1.6)
    print(time.time()-t)
    capsys.readouterr()
    project.cli("gates")
    print(capsys.readouterr())
    project.cli("gates", "--json")
    print(capsys.readouterr())
    project.cli("status", "--json")
    print(capsys.readouterr())
    project.cli("report")
    import shutil; shutil.copy(project.root/"numbers"/"report.html", "/tmp/g45show-report.html"); shutil.rmtree("/tmp/g45show-demo", True); shutil.copytree(project.folder, "/tmp/g45show-demo")
    assert 0
