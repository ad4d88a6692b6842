"""Tree model: the base of gradient-boosted trees (LightGBM, XGBoost, CatBoost), in the stages that
the engine overlaps: which column is which feature, a row's scores and its class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.engine.rows import side_by_side
from precompute.foreign_file import what_it_is
from precompute.model import (
    Features,
    OwnLibrary,
    Prepared,
    Verbatim,
    digest,
    resolve_path,
)
from precompute.models.tabular_model import (
    Host,
    HostModel,
    Matrix,
    is_number,
    is_text,
    listed,
    numbers,
    value_type,
)
from precompute.store.errors import ConfigError, ModelError, did_you_mean

CODE_VERSION = 2
"""Raised with each change of the values that this code computes; part of the fingerprint."""

NAMED_CATEGORIES = 5
"""Categories that a rejection lists of those the model knows."""


class Columns:
    """Which column is which feature of a model, and the numbers of its categories.

    Args:
        model: the built-in's name, for messages.
        features: the model's, in its order.
        columns: a column for each feature, in that order, or feature → column; a feature that is
            not named there is the column of its own name.
        categories: feature → its categories, of which the first has the code 0. Its column holds
            these values; all other columns hold numbers.
        unknown: what becomes of a category that the model does not know: ``bad``, or ``missing`` to
            take it for a null, as the libraries do.
        texts: features that a library takes as texts: their columns hold texts or whole numbers,
            and :meth:`matrix` leaves them out.

    Raises:
        ConfigError: ``columns`` does not fit the features, or ``unknown`` is another word.
        ModelError: categories are no list of texts or of numbers.
    """

    def __init__(
        self,
        model: str,
        features: Sequence[str],
        columns: Any,
        categories: Mapping[str, Sequence[Any]],
        unknown: str = "bad",
        texts: Collection[str] = (),
    ) -> None:
        if unknown not in ("bad", "missing"):
            raise ConfigError(f"{model}: unknown is bad or missing, got {unknown!r}")
        self._model, self._features, self._missing = model, tuple(features), unknown == "missing"
        self.names = self._named(columns)
        """The source's columns, one for each feature."""
        self.texts = tuple(
            name for feature, name in zip(features, self.names, strict=True) if feature in texts
        )
        self._numbers = [
            (feature, name)
            for feature, name in zip(features, self.names, strict=True)
            if feature not in texts
        ]
        self._categories = {
            feature: self._known(feature, values) for feature, values in categories.items()
        }
        self._checked: pa.Schema | None = None

    def _named(self, columns: Any) -> tuple[str, ...]:
        features = self._features
        many = f"the model has {len(self._features)} features ({listed(self._features)})"
        if columns is None:
            return features
        if isinstance(columns, Mapping):
            strange = [name for name in columns if name not in features]
            if strange:
                raise ConfigError(
                    f"{self._model}: columns names {strange[0]!r};"
                    f" {many}{did_you_mean(str(strange[0]), features)}"
                )
            return tuple(str(columns.get(name, name)) for name in features)
        if not isinstance(columns, (list, tuple)) or not all(
            isinstance(name, str) for name in columns
        ):
            raise ConfigError(
                f"{self._model}: columns is a list of columns, or a mapping of features to columns;"
                f" got {columns!r}"
            )
        if len(columns) != len(features):
            raise ConfigError(f"{self._model}: columns has {len(columns)} names, {many}")
        return tuple(columns)

    def _known(self, feature: str, values: Sequence[Any]) -> pa.Array:
        try:
            known = pa.array(list(values))
            # of whole numbers those that float64 has
            return known if pa.types.is_string(known.type) else known.cast(pa.float64())
        except (pa.ArrowException, OverflowError) as exc:
            raise ModelError(
                f"{self._model}: the categories of {feature!r} are neither texts nor numbers that"
                f" float64 has: {exc}"
            ) from exc

    def check(self, schema: pa.Schema) -> None:
        """Raises:
        ModelError: a column is of a type that the model's feature is not.
        """
        if self._checked is not None and schema.equals(self._checked):
            return
        for name in self.texts:
            kind = value_type(schema.field(name).type)
            if not (is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)):
                raise ModelError(
                    f"{self._model}: column {name!r} is {kind}, and the model's feature a category:"
                    " texts or whole numbers"
                )
        for feature, name in self._numbers:
            kind = value_type(schema.field(name).type)
            known = self._categories.get(feature)
            if known is not None and pa.types.is_string(known.type):
                if not (is_text(kind) or pa.types.is_null(kind)):
                    raise ModelError(
                        f"{self._model}: column {name!r} is {kind}, and the model's feature"
                        f" {feature!r} has categories that are texts ({shown(known)}): CAST it AS"
                        " VARCHAR in the source"
                    )
            elif not is_number(kind):
                what = (
                    "a number" if known is None else f"categories that are numbers ({shown(known)})"
                )
                raise ModelError(
                    f"{self._model}: column {name!r} is {kind}, and the model's feature {feature!r}"
                    f" is {what}"
                )
        self._checked = schema

    def matrix(self, batch: pa.RecordBatch) -> tuple[Matrix, dict[int, str]]:
        """Float64 [rows, features], a null as NaN and a category as its code; and the rows that
        have a category which the model does not know."""
        self.check(batch.schema)
        made = np.empty((batch.num_rows, len(self._numbers)))
        bad: dict[int, str] = {}
        for place, (feature, name) in enumerate(self._numbers):
            column = batch.column(name)
            if isinstance(column.type, pa.DictionaryType):
                column = column.cast(column.type.value_type)
            known = self._categories.get(feature)
            made[:, place] = (
                numbers(column) if known is None else self._codes(name, column, known, bad)
            )
        return made, bad

    def _codes(self, name: str, column: pa.Array, known: pa.Array, bad: dict[int, str]) -> Matrix:
        # a number too large for float64 to have each is none of the categories, which all are
        codes = pc.index_in(column.cast(known.type, safe=False), known)
        if not self._missing and codes.null_count > column.null_count:
            for row in pc.indices_nonzero(pc.and_(codes.is_null(), column.is_valid())).to_pylist():
                value = column[row].as_py()
                # how a number that is missing is written in data frames
                if value == value:
                    bad[row] = (
                        f"{name} is {value!r:.80}, which is none of the categories that the model"
                        f" knows ({shown(known)})"
                    )
        return numbers(codes)


def shown(known: pa.Array) -> str:
    """The first categories, for a message."""
    more = ", …" if len(known) > NAMED_CATEGORIES else ""
    texts = [
        f"{value:g}" if isinstance(value, float) else f"{value:.40}"
        for value in known[:NAMED_CATEGORIES].to_pylist()
    ]
    return ", ".join(texts) + more


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
    saving: str
    """The library's call that writes a file as it is read here."""
    saved: str
    """The same in a list of such files."""
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
        if is_a := what_it_is(self._path):
            raise ModelError(f"{self.name}: {self._path} is {is_a}; {self.saving} writes one")
        trees = self.loaded(self._path)
        self._columns = Columns(
            self.name, trees.features, columns, trees.categories, unknown, trees.texts
        )
        self._features, self._categorical = tuple(trees.features), tuple(trees.categories)
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

    @staticmethod
    @abstractmethod
    def is_its_file(name: str, head: bytes) -> bool:
        """As of :class:`precompute.model.FileKind`."""

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
        return labelled(launched, self._output, self._label, self._classes, self._middle)

    def own_library(self) -> OwnLibrary:
        asked = Asked(
            path=str(self._path),
            columns=dict(zip(self._features, self._columns.names, strict=True)),
            categorical=[*self._categorical, *self._columns.texts],
            output=self._output,
            raw=self._raw,
            label=self._label,
            classes=self._classes.to_pylist(),
            middle=self._middle,
        )
        by = f"{type(self).__module__}:by_the_library"
        return OwnLibrary(self.name, by, asdict(asked), (self._path,), (self.name, "pandas"))


def labelled(
    scores: npt.NDArray[Any],
    output: str,
    label: str | None,
    classes: pa.Array,
    middle: float | None,
) -> Features:
    """Scores as the features of :class:`TreeModel`."""
    if label is None:
        return {output: scores}
    best = scores.argmax(1) if scores.ndim == 2 else (scores > middle).astype(np.int64)
    return {output: scores, label: classes.take(pa.array(best))}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a library is asked of a model by, as JSON can hold it.

    Args:
        path: of the file.
        columns: feature → its column, in the model's order.
        categorical: features, or columns, that are categories.
        output, raw, label: as of :class:`TreeModel`.
        classes: what the label may be.
        middle: the score beyond which the second class is the label.
    """

    path: str
    columns: dict[str, str]
    categorical: list[str]
    output: str
    raw: bool
    label: str | None
    classes: list[str]
    middle: float | None

    def is_category(self, feature: str) -> bool:
        return feature in self.categorical or self.columns[feature] in self.categorical

    def frame(self, batch: pa.RecordBatch, *, categories: bool = True) -> Any:
        """The source's rows as a user has them: a pandas data frame of the model's features.

        Args:
            categories: whether pandas has those that are as categories.
        """
        import pandas

        frame = pandas.DataFrame()
        for feature, name in self.columns.items():
            column = batch.column(name)
            if isinstance(column.type, pa.DictionaryType):
                column = column.cast(column.type.value_type)
            of_category = categories and self.is_category(feature)
            # pandas has objects of decimals, and of truth values with a null among them
            if not of_category and not (pa.types.is_integer(column.type) or is_text(column.type)):
                column = column.cast(pa.float64())
            values = column.to_pandas()
            frame[feature] = values.astype("category") if of_category else values
        return frame

    def features(self, scores: npt.NDArray[Any]) -> Features:
        """Scores of the library as the model's features."""
        classes = pa.array(self.classes, pa.string())
        return labelled(scores, self.output, self.label, classes, self.middle)
