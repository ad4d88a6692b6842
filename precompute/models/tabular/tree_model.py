"""Tree model: gradient-boosted trees between columns of numbers and a score, in the stages that the
engine overlaps; what the models of LightGBM, XGBoost and CatBoost share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.rows import side_by_side
from precompute.model import Features, Prepared, Verbatim, digest, resolve_path
from precompute.models.tabular.columns import Columns, Host, HostModel, Matrix
from precompute.store.errors import ConfigError

CODE_VERSION = 2
"""Raised with each change of the values that this code computes; part of the fingerprint."""


@dataclass(frozen=True, slots=True)
class Trees:
    """A model file as it was loaded: its features in their order, the categories of those that have
    some, how many numbers a row's score has (1: a scalar), the objective, above which number one
    score is of the second of two classes (of a score for each class any number; None where scores
    are no classes'), the classes' names where the file knows them, and the features that the
    library takes as texts."""

    features: Sequence[str]
    categories: Mapping[str, Sequence[Any]]
    width: int
    objective: str
    middle: float | None
    classes: Sequence[Any] | None = None
    texts: Sequence[str] = ()


class TreeModel(HostModel, ABC):
    """Scores rows by trees; a :class:`precompute.model.StagedModel`.

    Args:
        path: the model's file.
        output: name of the feature: a number, or a vector of as many as there are classes.
        columns: a column for each of the model's features, in its order, or feature → column; by
            default the columns of the same names.
        raw: the trees' sum, before the objective makes a probability of it.
        unknown: what becomes of a category that the model does not know: ``bad``, or ``missing`` to
            take it for a null.
        label: name of a second feature: the class with the highest score.
        classes: its names, in the model's order; by default those in the file.

    Raises:
        ConfigError: no such file, the library is not installed, or an argument does not fit the
            model.
        ModelError: the file is damaged, or of another kind.
    """

    name: str
    """The built-in's, in a view's ``model.use``."""
    start_cost = 2048

    def __init__(
        self,
        path: str,
        output: str = "score",
        columns: Sequence[str] | Mapping[str, str] | None = None,
        raw: bool = False,
        unknown: str = "bad",
        label: str | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._path, self._output, self._raw, self._label = resolve_path(path), output, raw, label
        self.device = Host()
        if not isinstance(raw, bool):
            raise ConfigError(f"{self.name}: raw is true or false, got {raw!r}")
        if not self._path.is_file():
            raise ConfigError(f"{self.name}: path {str(path)!r} is a folder: name the model's file")
        trees = self.loaded(self._path)
        self._columns = Columns(
            self.name, trees.features, columns, trees.categories, unknown, trees.texts
        )
        self._classes, self._middle = self._named_classes(trees, classes), trees.middle
        self._facts = {
            "columns": Verbatim(list(self._columns.names)),
            "raw": raw,
            "unknown": unknown,
        }
        if label is not None:
            self._facts |= {"label": Verbatim([label, self._classes.to_pylist()])}

    def _named_classes(self, trees: Trees, classes: Sequence[str] | None) -> pa.Array:
        if self._label is None:
            if classes is not None:
                raise ConfigError(
                    f"{self.name}: classes names what `label` is made of: set `label` to that"
                    " feature's name, or leave out `classes`"
                )
            return pa.array([], pa.string())
        if self._label == self._output:
            raise ConfigError(
                f"{self.name}: label and output are both {self._output!r}: give them two names"
            )
        if trees.middle is None:
            raise ConfigError(
                f"{self.name}: label is a row's class, and the objective {trees.objective!r} gives"
                " no score from which one follows: leave out `label`"
            )
        named = classes if classes is not None else trees.classes
        count = max(2, trees.width)
        if named is None or isinstance(named, str) or len(named) != count:
            raise ConfigError(
                f"{self.name}: label needs `classes`, the names of the model's {count} classes in"
                f" its order; got {named!r}"
            )
        return pa.array([str(name) for name in named], pa.string())

    @abstractmethod
    def loaded(self, path: Path) -> Trees:
        """Load the file, to be computed by :meth:`scores`."""

    @abstractmethod
    def scores(self, matrix: Matrix, threads: int) -> npt.NDArray[Any]:
        """The scores, [rows] or [rows, classes], of a matrix [rows, features] with NaN for what is
        missing."""

    def unfit(self, matrix: Matrix) -> dict[int, str]:
        """Rows whose numbers the library does not take: position → reason."""
        return {}

    def fingerprint(self) -> str:
        return digest(code=CODE_VERSION, file=self._path, **self._facts)

    def reads(self) -> list[str]:
        return list(dict.fromkeys(self._columns.names))

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """The matrix of all rows; each costs 1. Bad are those with a category that the model does
        not know.

        Raises:
            ModelError: a column is of a type that the model's feature is not.
        """
        matrix, bad = self._columns.matrix(batch)
        return Prepared(np.ones(batch.num_rows, np.int64), matrix, self.unfit(matrix) | bad)

    def inputs(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Matrix:
        matrix: Matrix = prepared.payload
        where = side_by_side(rows)
        return matrix[rows if where is None else where]

    def launch(self, inputs: Matrix) -> npt.NDArray[Any]:
        return self.scores(inputs, self.device.threads())

    def land(self, launched: npt.NDArray[Any]) -> Features:
        """``output`` → the scores, float32 or float64 [rows] or [rows, classes]; and the label's
        name, a text for each row."""
        if self._label is None:
            return {self._output: launched}
        best = (
            launched.argmax(1) if launched.ndim == 2 else (launched > self._middle).astype(np.int64)
        )
        return {self._output: launched, self._label: self._classes.take(pa.array(best))}
