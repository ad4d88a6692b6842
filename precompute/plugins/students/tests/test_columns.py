"""Trees as a student: fitted to what a model of columns says."""

from __future__ import annotations

import pyarrow as pa
import pytest

from precompute.jobs.ops.optimize import optimize
from precompute.students.columns_student import Fitted
from tests.fixtures import MakeProject
from tests.jobs.test_optimize import one_column, quickly, scene_of


def test_trees_read_columns_of_any_name(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["id", "x", 'é "[,]" = x']
    scene = scene_of(
        make_project,
        # whole numbers that no float has
        one_column(pa.uint64(), lambda i: 2**64 - 1 - i).rename_columns(names),
        model={"use": "tests.models:Doubler", "args": {"dim": 0}},
        features={"double": {"dtype": "float64"}},
    )
    quickly(monkeypatch, Fitted("lightgbm"))
    trees = optimize(scene, "numbers")["students"][1]
    assert trees["refused"] is None
    assert trees["agreement"]["double"] > 0.99
