"""Judging: how near a student comes to its teacher on rows it never saw, and how fast it is."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from precompute.engine.rows import Outcome
from precompute.engine.runner import Runner
from precompute.model import Model
from precompute.store.errors import ModelError
from precompute.store.feature_view import FeatureView
from precompute.techniques.accuracy import (
    NEIGHBOURS,
    metric_of,
    neighbour_recalls,
    neighbour_similarities,
    row_cosines,
)

TAIL = 0.05
"""Share of the rows whose cosine to the teacher's is below ``tail_cosine``: the worst ones."""

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""Of rows that a cascade answers by the student."""

ROUND_S = 0.2
"""That each model computes for, at least, in a round: what takes 1.5 ms is measured by chance."""

MISSES = 64
"""Rows that are computed one at a time, as a miss is."""


class Cascade(NamedTuple):
    """A cascade's ``share`` of rows by the student, those whose confidence is at least
    ``threshold``; and ``recall``, of all rows, the teacher's counted as right."""

    share: float
    threshold: float
    recall: float


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


def cascade_recalls(
    view: FeatureView, teacher: pa.RecordBatch, student: pa.RecordBatch, queries: int
) -> list[Cascade]:
    """What a cascade would come to, which answers by the student where that is confident, and else
    by the teacher: for each of :data:`SHARES`. Empty for a view without vectors.

    Confidence is the mean similarity of the student's vector to its ten nearest in the teacher's
    index: of docstrings by a static table, its correlation with the cosine to the teacher's vector
    is 0.98; what a regression says by the vector alone, 0.54.

    Args:
        view: the feature on which its index is, or else its first vector, counts.
        teacher, student, queries: as of :func:`index_recalls`.
    """
    vectors = [feature.name for feature in view.features if feature.dim is not None]
    if not vectors or teacher.num_rows <= NEIGHBOURS:
        return []
    name, metric = (
        (view.index.on, view.index.metric) if view.index is not None else (vectors[0], "cosine")
    )
    a, b = (
        np.asarray(batch.column(name).flatten()).reshape(batch.num_rows, -1)
        for batch in (teacher, student)
    )
    recalls = neighbour_recalls(a, b, metric, into=True, queries=queries)
    confidence = neighbour_similarities(a, b[:queries], metric)
    order = np.argsort(-confidence, kind="stable")
    found = []
    for share in SHARES:
        count = max(1, round(share * len(order)))
        lost = float((1 - recalls[order[:count]]).sum())
        found.append(Cascade(share, float(confidence[order[count - 1]]), 1 - lost / len(order)))
    return found


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
