"""Columns student: students of models that make one score of columns of numbers, such as rankers:
what a model of the door learns from them, as trees do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.model import FittedKind, ReadingModel
from precompute.plugins.students.training import MODEL, Lesson, Made
from precompute.store.doors import MODELS
from precompute.store.errors import ModelError


@dataclass(frozen=True, slots=True)
class Fitted:
    """The recipe of a model of the door that is a :class:`precompute.model.FittedKind`.

    Args:
        name: the model's, in a view's ``model.use``.
    """

    name: str
    by: str = "distil"

    def refuses(self, lesson: Lesson) -> str:
        if len(lesson.view.features) != 1 or lesson.view.features[0].dim is not None:
            return f"{self.name} gives one score, and the view has other features"
        (feature,) = lesson.view.features
        if feature.max_items is not None or not feature.dtype.startswith("float"):
            what = "lists" if feature.max_items is not None else feature.dtype
            return f"feature {feature.name} holds {what}, and floats can be approximated"
        names = _columns(lesson)
        for name in names:
            kind = lesson.rows[name].type
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or kind == pa.bool_()):
                return f"column {name} is {kind}, and {self.name} learns from columns of numbers"
        return "" if names else "the teacher reads no column"

    def make(self, lesson: Lesson, folder: Path) -> Made:
        names, (feature,) = _columns(lesson), lesson.view.features
        kind: Any = MODELS.open(self.name)
        # a library takes few letters in names, and changes some
        columns = {f"column_{at}": name for at, name in enumerate(names)}
        matrix = np.column_stack([_numbers(lesson.rows[name]) for name in names])
        scores = np.asarray(lesson.rows[feature.name].combine_chunks(), np.float32)
        if not np.isfinite(scores).all():
            raise ModelError(f"feature {feature.name}: a value to learn from is not finite")
        place = folder / MODEL / self.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(kind.fitted(matrix, scores, list(columns), lesson.seed))
        args = {"path": f"./{MODEL}/{self.name}", "columns": columns, "output": feature.name}
        return Made(self.name, args)


def fitted() -> Iterator[Fitted]:
    """A recipe for each model that is here and learns."""
    yield from (Fitted(use) for use, kind in MODELS.all() if isinstance(kind, FittedKind))


def _columns(lesson: Lesson) -> list[str]:
    """Those that the teacher says it reads, or else all but the key."""
    if isinstance(lesson.model, ReadingModel):
        return list(lesson.model.reads())
    others = {*lesson.view.feature_names, *lesson.view.entity}
    return [name for name in lesson.rows.column_names if name not in others]


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    # whole numbers beyond 2^53 are rounded, as where the model computes
    numbers = column.combine_chunks().cast(pa.float64(), safe=False)
    return np.asarray(numbers.fill_null(float("nan")))
