"""Students of columns: what a model of the door learns of them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from precompute.model import FittedKind
from precompute.plugins.students.columns_student import Fitted, fitted
from precompute.plugins.students.optimize import optimize
from precompute.plugins.students.student import read_student
from precompute.plugins.students.tests.test_optimize import one_column, quickly, scene_of
from precompute.store.doors import MODELS
from precompute.store.errors import ConfigError
from tests.fixtures import MakeProject

LEARN = [use for use, kind in MODELS.all() if isinstance(kind, FittedKind)]
"""Models of powers that are here."""


def test_each_that_learns_is_proposed() -> None:
    assert list(fitted()) == [Fitted(use) for use in LEARN]


@pytest.mark.parametrize("use", LEARN)
def test_columns_of_any_name_are_learned_from(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    pytest.importorskip(use)
    names = ["id", "x", 'é "[,]" = x']
    scene = scene_of(
        make_project,
        # whole numbers that no float has
        one_column(pa.uint64(), lambda i: 2**64 - 1 - i).rename_columns(names),
        model={"use": "tests.models:Doubler", "args": {"dim": 0}},
        features={"double": {"dtype": "float64"}},
    )
    quickly(monkeypatch, Fitted(use))
    student = optimize(scene, "numbers")["students"][1]
    assert student["refused"] is None
    assert student["agreement"]["double"] > 0.99
    folder = scene.home / "students" / f"numbers-{use}-1"
    assert list(read_student(folder).args["columns"].values()) == names[1:]
    # the record stays, and says what it lacks
    monkeypatch.setattr(MODELS, "is_here", lambda name: False)
    with pytest.raises(ConfigError, match=rf"student\.json: model '{use}' comes with the plug-in"):
        read_student(folder)
