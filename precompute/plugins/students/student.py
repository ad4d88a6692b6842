"""Student: a cheaper model that approximates a view's own, its teacher; in a folder, with what it
was made from and how well it agrees; how near it comes and how fast it is, on rows it never saw;
and every way to make one."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.rows import Outcome
from precompute.engine.runner import Runner
from precompute.model import FittedKind, Model, ReadingModel
from precompute.store.disk.record import Record, field, read_record, replace, sealed
from precompute.store.doors import MODELS
from precompute.store.errors import ConfigError, ModelError
from precompute.store.feature_view import Feature, FeatureView
from precompute.techniques.accuracy import (
    NEIGHBOURS,
    metric_of,
    neighbour_recalls,
    rank_correlation,
    row_cosines,
)
from precompute.techniques.row_errors import is_measured, ordered_overlap

if TYPE_CHECKING:
    # imports torch, which takes a second
    from precompute.plugins.students.training import Recipe

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

_OF_TEXT = ("column", "output")
_OF_ENCODER = ("device", "max_tokens", "too_long", "prompt", "query_prompt", "truncate_dim")
USES: dict[str, tuple[str, Collection[str]]] = {
    "text_encoder": ("path", (*_OF_TEXT, *_OF_ENCODER)),
    "static_embedding": ("path", _OF_TEXT),
}
FITTED = ("path", ("columns", "output"))
"""What computes a student: built-in model → the argument that is a path in its folder, and the
others that recipes write; and the same of every model of the door that learns. Whatever else a
record names would run or write files, and a seal is no signature: anybody can make one."""


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
        student = read_record(Student, path.read_bytes(), path)
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
    if MODELS.has(student.use) and not MODELS.is_here(student.use):
        raise ConfigError(f"{path}: {MODELS.absence(student.use)}")
    if strange := _strange(student, folder):
        raise ConfigError(
            f"{path} is no record that `precompute optimize` wrote: {strange}; make the student"
            " again, or remove its folder"
        )
    return student


def _strange(student: Student, folder: Path) -> str:
    """What a record, or a link in its folder, names that no recipe makes; an empty text where there
    is nothing."""
    use = student.use
    if use in USES:
        place, others = USES[use]
    elif MODELS.has(use) and isinstance(MODELS.open(use), FittedKind):
        place, others = FITTED
    else:
        return f"it computes by {use!r}, and students by {', '.join(USES)} or a model that learns"
    if unknown := sorted(set(student.args) - {place, *others}):
        return f"{use} has an argument {unknown[0]!r}, which no student has"
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


BY = ("distil", "prune", "qat")
"""Ways of making a student."""


def recipes(by: str | None, purpose: str | None) -> list[Recipe]:
    """The recipes to try, the quickest first.

    Args:
        by: one of :data:`BY`; None for all.
        purpose: ``batch`` for what may compute a view's rows, ``fallback`` for what answers misses
            in a fraction of the teacher's time; None for both.
    """
    # torch takes a second to import
    from precompute.plugins.students.columns_student import fitted
    from precompute.plugins.students.static_table import StaticTable
    from precompute.plugins.students.text_student import RECIPES

    behind_misses: list[Recipe] = [StaticTable(), *fitted()]
    in_batches = list(RECIPES)
    found = {None: behind_misses + in_batches, "fallback": behind_misses, "batch": in_batches}
    return [one for one in found[purpose] if by in (None, one.by)]


# ---- Judged: how near a student comes to its teacher on rows it never saw, and how fast it is


TAIL = 0.05
"""Share of the rows whose cosine to the teacher's is below ``tail_cosine``: the worst ones."""

ROUND_S = 0.2
"""That each model computes for, at least, in a round: what takes 1.5 ms is measured by chance."""

MISSES = 64
"""Rows that are computed one at a time, as a miss is."""


def computed(
    model: Model, view: FeatureView, rows: pa.Table, judged: int, max_rejected: float
) -> Outcome:
    """The rows that a model computes.

    Args:
        rows: which its teacher computed.
        judged: how many of them, the first, it is judged by.
        max_rejected: share of these that it may reject, and never more than half.

    Raises:
        ModelError: it rejects more.
    """
    (batch,) = rows.combine_chunks().to_batches(rows.num_rows)
    done = Runner(model, view, search=False).compute(batch)
    rejected = [one for one in done.rejections if one.row < judged]
    if len(rejected) > min(max_rejected, 0.5) * judged:
        raise ModelError(
            f"it rejects {len(rejected):,} of {judged:,} rows that its teacher computes, and the"
            f" view's max_rejected is {max_rejected:g}; the first: {rejected[0].error}"
        )
    return done


def index_recalls(
    view: FeatureView,
    teacher: pa.RecordBatch,
    student: pa.RecordBatch,
    queries: int,
) -> dict[str, dict[str, float]]:
    """Of each vector feature: ``into_index``, recall@10 of the student's vectors as queries into an
    index of the teacher's, and ``own_index``, into one of its own; ``tail_cosine``, which all but
    :data:`TAIL` of the rows exceed.

    Args:
        teacher, student: the features of the same rows, in one order.
        queries: how many of them, the first, are searched by; each is left out of its own answer.
    """
    figures = {}
    for feature in view.features:
        if feature.dim is None or teacher.num_rows <= NEIGHBOURS:
            continue
        metric = metric_of(feature, view)
        a, b = (
            np.asarray(batch.column(feature.name).flatten()).reshape(batch.num_rows, -1)
            for batch in (teacher, student)
        )
        recalls = {
            name: neighbour_recalls(a, b, metric, into=into, queries=queries)
            for name, into in (("into_index", True), ("own_index", False))
        }
        figures[feature.name] = {
            "tail_cosine": float(np.quantile(row_cosines(a[:queries], b[:queries]), TAIL)),
            **{name: float(values.mean()) for name, values in recalls.items()},
        }
    return figures


def rates(
    models: Mapping[str, tuple[Model, Callable[[], object]]],
    view: FeatureView,
    rows: pa.Table,
    rounds: int,
    until: float,
) -> dict[str, tuple[float, dict[str, float]]]:
    """Of each model: rows a second, the median of rounds that take turns, and ``p50``, ``p95`` and
    ``p99`` of a batch's ms.

    Args:
        models: name → model, and what is called before it computes.
        rounds: at most, and one at least; in each, a model computes the rows as often as makes
            :data:`ROUND_S`.
        until: of :func:`time.monotonic`: no round is begun that would end later.
    """
    runners = {name: Runner(model, view) for name, (model, _) in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    (batch,) = rows.combine_chunks().to_batches(rows.num_rows)
    for _ in range(rounds):
        began = time.monotonic()
        for name, (_, restore) in models.items():
            restore()
            seconds[name].append(_seconds(runners[name], batch))
        now = time.monotonic()
        if now + (now - began) > until:
            break
    return {
        name: (rows.num_rows / statistics.median(times), runners[name].meter.batch_ms())
        for name, times in seconds.items()
    }


def _seconds(runner: Runner, batch: pa.RecordBatch) -> float:
    """That a batch takes, of as many in a row as take :data:`ROUND_S` or nearly so."""
    batches = 1
    while True:
        started = time.monotonic()
        for _ in runner.stream(itertools.repeat(batch, batches)):
            pass
        taken = time.monotonic() - started
        if taken > 0.8 * ROUND_S:
            return taken / batches
        batches = max(2 * batches, math.ceil(ROUND_S * batches / max(taken, 1e-3)))


def miss_ms(model: Model, view: FeatureView, rows: pa.Table) -> dict[str, float]:
    """``p50``, ``p95`` and ``p99`` of the milliseconds that one row takes, computed alone, after as
    many others: the first 80 by a static table take half as long again."""
    runner = Runner(model, view, search=False)
    singles = rows.slice(0, 2 * MISSES).combine_chunks().to_batches(1)
    for one in singles[MISSES:] or singles:
        runner.compute(one)
    taken = []
    for one in singles[:MISSES]:
        started = time.perf_counter()
        runner.compute(one)
        taken.append((time.perf_counter() - started) * 1000)
    points = np.quantile(taken, (0.5, 0.95, 0.99))
    return dict(zip(("p50", "p95", "p99"), map(float, points), strict=True))
