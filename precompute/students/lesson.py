"""Lesson: what a student learns from, its teacher and rows with the teacher's features; and the
protocol of a recipe, which makes a student's model of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from precompute.model import Model
from precompute.store.feature_view import FeatureView

MAX_ROWS = 200_000
"""Rows of a lesson at most: they lie in memory, with their features."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a student learns from.

    Args:
        model: the teacher, loaded; it computes as its view says, and its module is float32.
        use, args: what made the teacher (``model`` of the view), its paths absolute.
        rows: the teacher's input columns and its features, by the view's names; only rows that the
            student will not be judged on, at most :data:`MAX_ROWS`.
        seed: of all that is drawn by chance.
        until: when training ends at the latest, by :func:`time.monotonic`.
        checkpoints: folder for what a recipe needs to continue after it was stopped.
    """

    view: FeatureView
    model: Model
    use: str
    args: Mapping[str, Any]
    rows: pa.Table
    seed: int
    until: float
    checkpoints: Path
    announce: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Made:
    """What makes a student's model: ``model.use`` and ``model.args`` of a view. A text among the
    arguments that begins with ``./`` is a path in the folder that the recipe wrote into.
    ``technique`` is the one that it was made for, by which it is judged; None of a student for
    any. ``earlier_s`` is what its training took in processes before this one, seconds."""

    use: str
    args: Mapping[str, Any]
    technique: str | None = None
    earlier_s: float = 0.0


class Recipe(Protocol):
    """A way of making a student; a row's recipe, which is a digest, is another thing."""

    @property
    def name(self) -> str:
        """Of the student, such as ``layers-3``."""

    @property
    def by(self) -> str:
        """``distil``, ``prune`` or ``qat``."""

    def refuses(self, lesson: Lesson) -> str:
        """Why no student can be made of this lesson, in words; an empty text where it can."""

    def make(self, lesson: Lesson, folder: Path) -> Made:
        """Make a student until ``lesson.until``, and write its model into the folder, which is
        empty or has what was left of an earlier try.

        Raises:
            ModelError: a checkpoint or the model cannot be written, for want of space.
        """
