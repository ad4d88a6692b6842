"""Student: a cheaper model that approximates a view's own, its teacher; in a folder, with what it
was made from and how well it agrees; and every way to make one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.model import Model, ReadingModel
from precompute.store.disk.record import Record, field, read_record, replace, sealed
from precompute.store.errors import ConfigError
from precompute.store.feature_view import Feature, FeatureView
from precompute.students.lesson import Recipe
from precompute.techniques.accuracy import metric_of, neighbour_recalls, rank_correlation
from precompute.techniques.row_errors import is_measured, ordered_overlap

FOLDER = "students"
"""Folder of the students, in the project's."""
RECORD = "student.json"
CARD = "README.md"
MODEL = "model"
"""Names in a student's folder: its record, what people read of it, and its model's folder."""

VERSION = 1
COMPARED_ROWS = 512
"""Rows that an agreement is measured on at most, and that neighbours are looked for among: they are
easier to find among fewer, so two recalls are compared only where both were among as many."""
MIN_ROWS = 50
"""Fewer say nothing of recall among ten."""
SURE = 3.0
"""Standard errors that a promise lies below what was measured."""

MLP = "precompute.students.mlp:Mlp"
MODULES = frozenset({MLP})
"""What a student's ``torch_module`` may be."""
_OF_TEXT = ("column", "output")
_OF_ENCODER = ("device", "max_tokens", "too_long", "prompt", "query_prompt", "truncate_dim")
USES: dict[str, tuple[str, Collection[str]]] = {
    "text_encoder": ("path", (*_OF_TEXT, *_OF_ENCODER)),
    "static_embedding": ("path", _OF_TEXT),
    "lightgbm": ("path", ("columns", "output")),
    "torch_module": ("weights", ("module", "args", "inputs", "outputs", "concurrent")),
}
"""What computes a student: built-in model → the argument that is a path in its folder, and the
others that recipes write. Whatever else a record names would run or write files, and a seal is no
signature: anybody can make one."""


class Agreement(Record, frozen=True):
    """How well a student agrees with its teacher on some rows, by one feature.

    Args:
        figure: ``recall_at_10`` of vectors: the share of the ten rows nearest to the student's
            vector, in the teacher's index of these rows, that are nearest to the teacher's own;
            ``rank_correlation`` of scores (Spearman); ``overlap`` of lists, in their order, and of
            anything else, the share of rows that are equal.
        value: of these rows, from 0 to 1 (a correlation from -1).
        promised: below ``value`` by :data:`SURE` standard errors: what other rows like these will
            reach.
        rows: how many, none of which the student learned from.
        among: how many rows, these and others, neighbours were looked for among; 0 of another
            figure.
    """

    figure: str
    value: float
    promised: float
    rows: int
    among: int = 0

    def least_of(self, rows: int) -> float:
        """What fewer rows must reach: their chance is greater by the root of how many fewer."""
        fewer = math.sqrt(max(1.0, self.rows / max(1, rows)))
        return max(0.0, self.value - (self.value - self.promised) * fewer)


class Student(Record, frozen=True):
    """The record of a student's folder.

    Args:
        view: whose model it approximates.
        name: of the student, such as ``static`` or ``layers-3``.
        by: how it was made: ``distil``, ``prune`` or ``qat``.
        use, args: what makes its model (``model`` of a view). A text among the arguments that
            begins with ``./`` is a path in the student's folder.
        fingerprint: of its model.
        approximates: the fingerprint of the snapshot's rows, which its teacher computed.
        snapshot: the number of that snapshot.
        data: a digest of the rows that it learned from.
        seed: of all that was drawn by chance.
        learned_rows, held_out_rows: how many rows it learned from, and how many it never saw, on
            which it was judged.
        grouped_by, held_out_share: the columns by which rows were held out together, and the share
            of them that were at random (:func:`is_held_out`).
        agreement: of each feature, on held-out rows.
        figures: of each feature, other figures on held-out rows, as ``optimize`` shows them.
        made_s: seconds that it took to make.
        made_at: when, ISO 8601 in UTC.
        versions: of the libraries that made it.
        technique: that it was made for, by its name; None for any.
        cascade: shares of rows that it may answer before its teacher, and the recall of all.
        rejected_rows: of those that it was judged on, how many it rejects and its teacher does not;
            they are left out of all figures.
    """

    view: str
    name: str
    by: str
    use: str
    args: dict[str, Any]
    fingerprint: str
    approximates: str
    snapshot: int
    data: str
    seed: int
    learned_rows: int
    held_out_rows: int
    grouped_by: list[str]
    held_out_share: float
    agreement: dict[str, Agreement]
    figures: dict[str, dict[str, float]]
    made_s: float
    made_at: str
    versions: dict[str, str] = field(default_factory=dict)
    technique: str | None = None
    cascade: list[dict[str, float]] = field(default_factory=list)
    rejected_rows: int = 0
    version: int = VERSION

    def arguments(self, folder: Path) -> dict[str, Any]:
        """``args`` with the folder's paths absolute."""
        return {
            name: str(folder / value) if isinstance(value, str) and value[:2] == "./" else value
            for name, value in self.args.items()
        }


def read_student(folder: Path) -> Student:
    """The record of a student's folder.

    Raises:
        ConfigError: there is none, or it is damaged; or it names what no student is made of, or a
            file outside its folder.
    """
    path = folder / RECORD
    try:
        student = read_record(Student, path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ConfigError(
            f"{folder} is no student's folder: it has no {RECORD}; `precompute optimize VIEW` makes"
            " one"
        ) from exc
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{path} is damaged ({exc}): make the student again with `precompute optimize`"
        ) from exc
    if student.version != VERSION:
        raise ConfigError(
            f"{path} is of version {student.version}, and {VERSION} is read here: make the student"
            " again with `precompute optimize`"
        )
    if strange := _strange(student, folder):
        raise ConfigError(
            f"{path} is no record that `precompute optimize` wrote: {strange}; make the student"
            " again, or remove its folder"
        )
    return student


def _strange(student: Student, folder: Path) -> str:
    """What a record, or a link in its folder, names that no recipe makes; an empty text where there
    is nothing."""
    if student.use not in USES:
        return f"it computes by {student.use!r}, and students by {', '.join(USES)}"
    place, others = USES[student.use]
    if unknown := sorted(set(student.args) - {place, *others}):
        return f"{student.use} has an argument {unknown[0]!r}, which no student has"
    if student.use == "torch_module" and student.args.get("module") not in MODULES:
        return f"its module is {student.args.get('module')!r}, and a student's is {MLP!r}"
    named, home = student.args.get(place), folder.resolve()
    if not isinstance(named, str) or not f"{named}/".startswith(f"./{MODEL}/"):
        return f"{place} is {named!r}, and a student's files are in ./{MODEL}"
    for file in (folder / MODEL, folder / named, *(folder / MODEL).rglob("*")):
        try:
            inside = file.resolve().is_relative_to(home)
        except (OSError, RuntimeError) as exc:
            return f"{file} is a link to itself ({exc})"
        if not inside:
            return f"{file} leads out of the folder"
    return ""


def student_bytes(student: Student) -> bytes:
    """What :func:`read_student` reads."""
    return sealed(student, indent=1)


def agreement(
    view: FeatureView, teacher: pa.RecordBatch, student: pa.RecordBatch
) -> dict[str, Agreement]:
    """How well a student agrees with its teacher, by feature; of rows to which the teacher gave a
    value of it.

    Args:
        teacher: the features of some rows; the first :data:`COMPARED_ROWS` count.
        student: those of the first of these, which it never learned from, in the same order; the
            others are there to be found as neighbours.
    """
    teacher = teacher.slice(0, COMPARED_ROWS)
    student = student.slice(0, teacher.num_rows)
    found = {}
    for feature in view.features:
        index, own = teacher.column(feature.name), student.column(feature.name)
        there = index.is_valid()
        own = own.filter(there.slice(0, len(own)))
        found[feature.name] = _agreement(view, feature, index.filter(there), own)
    return found


def comparable(
    promised: Mapping[str, Agreement], found: Mapping[str, Agreement]
) -> dict[str, Agreement]:
    """Those of ``found`` that say something of a promise: of enough rows, among as many others."""
    return {
        name: one
        for name, one in found.items()
        if one.rows >= MIN_ROWS and one.among >= promised[name].among
    }


def shortfalls(promised: Mapping[str, Agreement], found: Mapping[str, Agreement]) -> list[str]:
    """Why a student does not keep its promise, in words; of each feature that does not."""
    return [
        f"{name}: {one.figure.replace('_at_', '@').replace('_', ' ')} {found[name].value:.3f} is"
        f" below {one.least_of(found[name].rows):.3f}, which the student promised"
        for name, one in promised.items()
        if name in found and found[name].value < one.least_of(found[name].rows)
    ]


def _agreement(
    view: FeatureView, feature: Feature, teacher: pa.Array, student: pa.Array
) -> Agreement:
    rows = len(student)
    if feature.dim is not None:
        if len(teacher) < MIN_ROWS:
            return _mean("recall_at_10", np.zeros(rows))
        a, b = (_vectors(column, feature.dim) for column in (teacher, student))
        b = np.concatenate([b, a[rows:]])
        recalls = neighbour_recalls(a, b, metric_of(feature, view), into=True, queries=rows)
        recall = _mean("recall_at_10", recalls)
        return replace(recall, among=len(teacher))
    teacher = teacher.slice(0, rows)
    if feature.max_items is not None:
        pairs = zip(teacher.to_pylist(), student.to_pylist(), strict=True)
        return _mean("overlap", np.array([ordered_overlap(a or [], b or []) for a, b in pairs]))
    if is_measured(feature):
        a, b = (
            np.asarray(column.cast(pa.float64()).fill_null(np.nan)) for column in (teacher, student)
        )
        # all of one value: whatever is not that value is wrong
        found = rank_correlation(a, b)
        value = float(np.mean(a == b)) if found is None else found
        # of Fisher's z (1915), whose standard error is 1 / sqrt(n - 3)
        z = math.atanh(min(max(value, 1e-9 - 1), 1 - 1e-9)) - SURE / math.sqrt(max(rows - 3, 1))
        # a promise below 0 could not be broken
        return Agreement("rank_correlation", value, max(0.0, math.tanh(z)), rows)
    equal = [a == b for a, b in zip(teacher.to_pylist(), student.to_pylist(), strict=True)]
    return _mean("overlap", np.array(equal, np.float64))


def _mean(figure: str, values: npt.NDArray[np.float64]) -> Agreement:
    rows = len(values)
    if not rows:
        return Agreement(figure, 0.0, 0.0, 0)
    # where all are alike the error of a share of nearly 1 is that of one row
    error = max(float(values.std()), 1 / math.sqrt(rows)) / math.sqrt(rows)
    value = float(values.mean())
    return Agreement(figure, value, max(0.0, value - SURE * error), rows)


def _vectors(column: pa.Array, dim: int) -> npt.NDArray[np.float64]:
    """[rows, dim]; a row without a value is nothing's neighbour."""
    vectors = np.full((len(column), dim), np.nan)
    there = np.asarray(column.is_valid())
    vectors[there] = np.asarray(column.drop_null().flatten()).reshape(-1, dim)
    return vectors


# ---- Held out: which rows a student never learns from, so that it can be judged on them; rows that
# are equal in what its teacher reads are on one side.


def grouped_by(model: Model, view: FeatureView, columns: Sequence[str]) -> list[str]:
    """The columns by which rows are on one side: those that the teacher reads, or all but the key
    of one that does not say; of chunks, which overlap, those of the text's key."""
    if view.definition.chunk is not None:
        return list(view.entity[:-1])
    named = set(model.reads()) if isinstance(model, ReadingModel) else set()
    inputs = [name for name in columns if name not in view.entity]
    return [name for name in columns if name in named] or inputs or list(view.entity)


def is_held_out(groups: npt.NDArray[np.uint64], share: float) -> npt.NDArray[np.bool_]:
    """Which rows are held out, bool [rows]: the same ones every time.

    Args:
        groups: of each row a number that is equal for the rows that are on one side, evenly
            distributed (:meth:`precompute.sources.source.Source.rows`).
        share: of the groups, 0 to 1.
    """
    found: npt.NDArray[np.bool_] = groups <= np.uint64(min(int(share * 2**64), 2**64 - 1))
    return found


# ---- Every way to make a student, by what it is for


BY = ("distil", "prune", "qat", "cascade")
"""Ways of making a student."""


def recipes(by: str | None, purpose: str | None) -> list[Recipe]:
    """The recipes to try, the quickest first.

    Args:
        by: one of :data:`BY`; None, or ``cascade``, for all: each may be first in a cascade.
        purpose: ``batch`` for what may compute a view's rows, ``fallback`` for what answers misses
            in a fraction of the teacher's time; None for both.
    """
    # torch takes a second to import
    from precompute.students.columns_student import SmallMlp, Trees
    from precompute.students.static_table import StaticTable
    from precompute.students.text_student import RECIPES

    behind_misses: list[Recipe] = [StaticTable(), SmallMlp(), Trees()]
    in_batches = list(RECIPES)
    found = {None: behind_misses + in_batches, "fallback": behind_misses, "batch": in_batches}
    return [one for one in found[purpose] if by in (None, "cascade", one.by)]
