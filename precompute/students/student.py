"""Student: a cheaper model that approximates a view's own, its teacher; in a folder, with what it
was made from and how well it agrees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.disk.record import Record, field, read_record, sealed
from precompute.store.errors import ConfigError
from precompute.store.feature_view import Feature, FeatureView
from precompute.techniques.accuracy import neighbour_recalls, rank_correlation
from precompute.techniques.row_errors import is_measured, ordered_overlap

RECORD = "student.json"
CARD = "README.md"
MODEL = "model"
"""Names in a student's folder: its record, what people read of it, and its model's folder."""

VERSION = 1
COMPARED_ROWS = 512
"""Rows that an agreement is measured on at most. Neighbours are easier to find among fewer rows, so
two agreements are compared only where both were measured on as many."""
MIN_ROWS = 50
"""Fewer say nothing of recall among ten."""
SURE = 3.0
"""Standard errors that a promise lies below what was measured."""


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
        rows: how many.
    """

    figure: str
    value: float
    promised: float
    rows: int


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
        agreement: of each feature, on held-out rows.
        figures: of each feature, other figures on held-out rows, as ``optimize`` shows them.
        made_s: seconds that it took to make.
        made_at: when, ISO 8601 in UTC.
        versions: of the libraries that made it.
        technique: that it was made for, by its name; None for any.
        cascade: shares of rows that it may answer before its teacher, and the recall of all.
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
    agreement: dict[str, Agreement]
    figures: dict[str, dict[str, float]]
    made_s: float
    made_at: str
    versions: dict[str, str] = field(default_factory=dict)
    technique: str | None = None
    cascade: list[dict[str, float]] = field(default_factory=list)
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
        ConfigError: there is none, or it is damaged.
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
    return student


def student_bytes(student: Student) -> bytes:
    """What :func:`read_student` reads."""
    return sealed(student, indent=1)


def agreement(
    view: FeatureView, teacher: pa.RecordBatch, student: pa.RecordBatch
) -> dict[str, Agreement]:
    """How well a student agrees with its teacher, by feature.

    Args:
        view: whose features they are.
        teacher, student: the features of the same rows, in one order, drawn by chance; the first
            :data:`COMPARED_ROWS` count.
    """
    return {
        feature.name: _agreement(
            view,
            feature,
            teacher.column(feature.name).slice(0, COMPARED_ROWS),
            student.column(feature.name).slice(0, COMPARED_ROWS),
        )
        for feature in view.features
    }


def shortfalls(promised: Mapping[str, Agreement], found: Mapping[str, Agreement]) -> list[str]:
    """Why a student does not keep its promise, in words; of each feature that does not.

    Args:
        promised: when it was made.
        found: on rows of now.
    """
    return [
        f"{name}: {one.figure.replace('_at_', '@').replace('_', ' ')} {found[name].value:.3f} is"
        f" below {one.promised:.3f}, which the student promised"
        for name, one in promised.items()
        if name in found and found[name].value < one.promised
    ]


def _agreement(
    view: FeatureView, feature: Feature, teacher: pa.Array, student: pa.Array
) -> Agreement:
    rows = len(teacher)
    if feature.dim is not None:
        if rows < MIN_ROWS:
            return _mean("recall_at_10", np.zeros(rows))
        a, b = (np.asarray(column.flatten()).reshape(rows, -1) for column in (teacher, student))
        index = view.index
        metric = index.metric if index is not None and index.on == feature.name else "cosine"
        return _mean("recall_at_10", neighbour_recalls(a, b, metric, into=True))
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
        return Agreement("rank_correlation", value, math.tanh(z), rows)
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
