"""Students on a GPU: they learn where their teacher is. With ``PRECOMPUTE_GPU_TESTS=cpu`` the same
on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from precompute.models.device import gpu_count
from precompute.models.text_encoder import TextEncoder
from precompute.plugins.students.tests.test_students import (
    WITH_VNNI,
    cosine,
    lesson_of,
    vectors_of,
)
from precompute.plugins.students.text_student import FewerLayers, Int8Aware, Pruned
from precompute.plugins.students.training import Recipe
from tests.precompute.sentence_models import sentence_model

DEVICE = os.environ.get("PRECOMPUTE_GPU_TESTS", "cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(DEVICE == "cuda" and not gpu_count(), reason="no GPU"),
]


@pytest.mark.parametrize(
    ("recipe", "least"),
    [
        (FewerLayers(1, steps=40), 0.82),
        (Pruned(50, steps=40), 0.9),
        pytest.param(Int8Aware(steps=40), 0.99, marks=WITH_VNNI),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_students_learn_where_their_teacher_is(
    tmp_path: Path, recipe: Recipe, least: float
) -> None:
    sentence_model(tmp_path, limit=20)
    teacher = TextEncoder(str(tmp_path / "saved"), device=DEVICE)
    made = recipe.make(lesson_of(teacher, tmp_path), tmp_path / "student")
    student = TextEncoder(str(tmp_path / "student" / "model"), max_tokens=20, device=DEVICE)
    assert made.use == "text_encoder"
    assert cosine(vectors_of(student), vectors_of(teacher)) > least
