"""Accuracy: how far a view's precision is from float32 on a sample of its rows, cached for ``tune``
and the run after it; and the gate, measured in a thread beside the run's first batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from precompute.engine.rows import Outcome
from precompute.engine.runner import Runner
from precompute.jobs.config.gates import AccuracyConfig
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.report import versions
from precompute.jobs.run.rows.chunks import compute_in_worker
from precompute.jobs.run.rows.open_view import OpenView
from precompute.model import digest, table_digest
from precompute.store.disk.durable_file import make_folder, replace_durably
from precompute.store.disk.record import Record, read_record, sealed
from precompute.store.errors import SourceError
from precompute.store.feature_view import FeatureView
from precompute.store.offline.snapshot import Verdict
from precompute.techniques.accuracy import Accuracy, Judged, compare, least
from precompute.techniques.row_errors import Limits, share_between
from precompute.techniques.table import REFERENCE, words

if TYPE_CHECKING:
    from precompute.models.torch_model import TorchModel

log = logging.getLogger(__name__)

CODE_VERSION = 4
"""To be raised with every change of how figures are computed."""

SHORT = {
    "mean_cosine": "cosine",
    "min_cosine": "min",
    "recall_at_10": "recall@10",
    "rank_correlation": "rank",
    "max_abs_error": "max error",
    "overlap": "overlap",
    "median_error": "row error",
    "worst_error": "worst",
}


class TechniqueComparison(Record, frozen=True):
    """Figures of a sample's rows by one technique against the reference; ``accuracy`` is None where
    no row was computed by both, ``lost`` counts those that the reference alone computed."""

    rows: int
    lost: int
    accuracy: Accuracy | None
    least: Accuracy | None = None
    """As of :func:`precompute.techniques.accuracy.least`."""

    def clear(self, budget: AccuracyConfig, view: FeatureView) -> bool:
        """Whether more rows would hardly change the verdict: both techniques computed all of these,
        none is beyond its bound, and all means pass by three standard errors."""
        if self.least is None or self.lost:
            return False
        figures, features = self.least.judged(limits_of(budget), view), self.least.features.values()
        worst = min(feature.min_cosine or 0.0 for feature in features)
        return (
            worst >= budget.cosine
            and not any(f.beyond for f in features)
            and all(f.room >= 0 for f in figures)
        )

    def judged(self, budget: AccuracyConfig, view: FeatureView) -> list[Judged]:
        """Every figure with its limit, the worst first, and the number of lost rows."""
        if self.accuracy is None:
            return [Judged("rows computed by both:", 0, 1, -1)]
        figures = self.accuracy.judged(limits_of(budget), view)
        if self.lost:
            figures.append(Judged("rows rejected that float32 computes:", self.lost, 0, -self.lost))
        return sorted(figures, key=lambda figure: figure.room)

    def verdict(self, budget: AccuracyConfig, view: FeatureView, technique: str) -> Verdict:
        """The verdict, with the figure that is farthest beyond its limit, or else nearest to it;
        its ``message`` has all figures."""
        figures = self.judged(budget, view)
        reasons = [figure.shortfall for figure in figures if figure.room < 0]
        features = {} if self.accuracy is None else self.accuracy.to_json()["features"]
        message = f"{technique} against float32 on {self.rows:,} rows: {figures_text(features)}"
        beyond = (
            []
            if self.accuracy is None
            else [f.beyond for f in self.accuracy.features.values() if f.beyond is not None]
        )
        if self.accuracy is not None and beyond:
            most = share_between(max(beyond), self.accuracy.rows)[1]
            message += f"; of all rows at most {most:.2%} are off by more than their bound (95 %)"
        if reasons:
            message += f": {'; '.join(reasons)}"
        return Verdict("accuracy", not reasons, figures[0].measured, figures[0].limit, message)


def limits_of(budget: AccuracyConfig) -> Limits:
    """A view's ``accuracy`` as :mod:`precompute.techniques` takes it."""
    rows, features = budget.rows.model_dump(exclude_none=True), budget.features
    return Limits(
        budget.cosine,
        budget.recall_at_10,
        rows,
        {name: own.model_dump(exclude_none=True) for name, own in features.items()},
    )


def compare_outcomes(
    view: FeatureView,
    budget: AccuracyConfig,
    reference: Outcome,
    other: Outcome,
    rows: int,
    extremes: int = 0,
) -> TechniqueComparison:
    """Two outcomes of one sample, compared.

    Args:
        view: of the features.
        budget: the view's ``accuracy``, with the bounds of a row's error.
        reference: in float32.
        other: by another technique.
        rows: how many of the sample's first rows count.
        extremes: how many of them, at the beginning, have extreme inputs and are no random sample.
    """
    by_reference = set(reference.rows[reference.rows < rows].tolist())
    both = sorted(by_reference & set(other.rows.tolist()))
    at_extremes = sum(row < extremes for row in both)
    if len(both) == at_extremes:
        return TechniqueComparison(rows - extremes, len(by_reference), None)
    expected, made = (_features(done, both) for done in (reference, other))
    limits, lost = limits_of(budget), len(by_reference) - len(both)
    found, low = (
        figures(expected, made, view, limits, at_extremes) for figures in (compare, least)
    )
    return TechniqueComparison(rows - extremes, lost, found, low)


def _features(done: Outcome, rows: list[int]) -> pa.RecordBatch:
    position = {row: i for i, row in enumerate(done.rows.tolist())}
    return done.features.take(pa.array([position[row] for row in rows], pa.int64()))


def figures_text(features: Mapping[str, Mapping[str, float]]) -> str:
    """The accuracy's figures, in words."""
    lines = []
    for name, figures in features.items():
        # more than two digits of a row's error depend on its batch
        digits = {"median_error": 2, "worst_error": 2}
        shown = (f"{SHORT[k]} {v:.{digits.get(k, 6)}g}" for k, v in figures.items() if k in SHORT)
        lines.append(f"{name}: " * (len(features) > 1) + " · ".join(shown))
    return "; ".join(lines) or "–"


class CachedComparison:
    """The file of one comparison: of a model by one technique, on these rows, by this machine's
    instructions and libraries.

    Args:
        opened: the view; its model is of torch.
        technique: a name.
        sample: the rows.
        budget: the view's accuracy.
    """

    def __init__(
        self, opened: OpenView, technique: str, sample: pa.RecordBatch, budget: AccuracyConfig
    ) -> None:
        # imports torch, as the model did
        from precompute.techniques.machine import instructions

        view = opened.view
        facts = digest(
            code=CODE_VERSION,
            model=opened.fingerprint_by(technique),
            features=[
                [f.name, f.dtype, f.dim, f.max_items, limits_of(budget).of(f).bound]
                for f in view.features
            ],
            index=None if view.index is None else [view.index.on, view.index.metric],
            rows=table_digest(pa.Table.from_batches([sample])),
            device=opened.gpu,
            machine=instructions(),
            versions=dict(versions()),
        )
        self._path = opened.compiled / f"accuracy-{technique}-{facts[:16]}.json"

    def read(self) -> TechniqueComparison | None:
        """None where there is none, or none that can be read."""
        try:
            return read_record(TechniqueComparison, self._path.read_bytes(), self._path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            log.warning("%s cannot be read (%s): measured again", self._path, exc)
            return None

    def write(self, comparison: TechniqueComparison) -> None:
        """Store it; where that fails, it is measured again the next time."""
        try:
            make_folder(self._path.parent)
            replace_durably(self._path, sealed(comparison))
        except OSError as exc:
            log.warning(
                "%s cannot be written (%s): what was measured is not stored",
                self._path,
                exc.strerror,
            )


# ---- The gate. Where several threads may compute with the model, it is measured beside the run's
# first batches, of which nothing is written before it has passed.


CHECKED_ROWS = 512
"""The sample's size: 10 neighbours among 512 rows tell a recall of 0.985 from 0.97."""
FIRST_ROWS = 128
"""The first of these rows, for a view of vectors alone: enough, if their verdict is clear
(:meth:`TechniqueComparison.clear`)."""
EXTREME_ROWS = 4
"""Rows at each end of each input: the longest and shortest texts, the largest and smallest numbers
and vectors."""
THREADS_PER_LANE = 4
"""Compute threads for each lane that measures beside a run; two lanes at least, where there are two
threads. With one of two it took longer than the batches beside it."""


class _Stopped(Exception):
    """The check was closed."""


class AccuracyCheck:
    """The comparison of a view's precision with float32, measured in a thread; to be closed
    (:meth:`close`).

    Args:
        config: the view's, with the limits.
        opened: the view, its model converted to another precision than float32. Its source is read
            only by the constructor.

    Raises:
        SourceError, ModelError: as a run would.
    """

    def __init__(self, config: ViewConfig, opened: OpenView) -> None:
        self._config, self._opened = config, opened
        sample, self._extremes = sample_of(opened, CHECKED_ROWS)
        self._parts = [
            sample.slice(0, rows) for rows in steps(opened.view, sample.num_rows, self._extremes)
        ]
        self._found = self._known()
        self._error: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None
        if self._found is not None:
            return
        if opened.gpu is not None:
            self._keep(
                sample,
                *(
                    compute_in_worker(opened, sample, technique)
                    for technique in (opened.variant, REFERENCE)
                ),
            )
            return
        # torch takes a second to import, and a model of pure Python needs none
        from precompute.models.torch_model import TorchModel

        model = opened.model
        assert isinstance(model, TorchModel), "no other model has another precision"
        if model.concurrent:
            self._thread = threading.Thread(
                target=self._measure_aside, args=(model,), name="accuracy", daemon=True
            )
            self._thread.start()
        else:
            self._measure(model)

    @property
    def known(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._thread is None

    def verdict(self) -> Verdict:
        """Wait for the measurement.

        Raises:
            ModelError: measuring failed.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found.verdict(self._config.accuracy, self._opened.view, self._opened.variant)

    def close(self) -> None:
        """End the measurement after the current batch."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _known(self) -> TechniqueComparison | None:
        """The cached comparison of all rows, or of the first ones if that is clear."""
        for rows in reversed(self._parts):
            found = CachedComparison(
                self._opened, self._opened.variant, rows, self._config.accuracy
            ).read()
            if found is not None and (
                rows is self._parts[-1] or found.clear(self._config.accuracy, self._opened.view)
            ):
                return found
        return None

    def _measure_aside(self, model: TorchModel) -> None:
        try:
            self._measure(model)
        except _Stopped:
            pass
        except BaseException as exc:
            self._error = exc

    def _measure(self, model: TorchModel) -> None:
        from precompute.techniques.machine import check_float32

        check_float32(model.device)
        done = reference = None
        for rows in self._parts:
            start = 0 if done is None else self._parts[0].num_rows
            more = rows.slice(start)
            done = joined(done, self._compute(model, more), start)
            reference = joined(reference, self._reference(model, more), start)
            if self._keep(rows, done, reference).clear(self._config.accuracy, self._opened.view):
                return

    def _reference(self, model: TorchModel, sample: pa.RecordBatch) -> Outcome:
        """The sample in float32, by a faster technique than the module itself where that computes
        the same on a few rows, and is not the one that is judged."""
        from precompute.techniques.conversion import QUICK, is_proven, proof_rows, quick_reference

        exact = model.in_float32()
        # a technique in float32 is compared with the module itself
        is_float32 = words(self._opened.variant)[0] == words(REFERENCE)[0]
        quick = None if is_float32 else quick_reference(model)
        if quick is not None:
            made = self._compute(quick, sample)
            rows = proof_rows(made)
            if is_proven(
                made, self._compute(exact, sample.take(pa.array(rows))), rows, self._opened.view
            ):
                return made
            log.warning(
                "view %r: %s computes something else than %s here, which takes its place",
                self._opened.view.name,
                QUICK,
                REFERENCE,
            )
        return self._compute(exact, sample)

    def _compute(self, model: TorchModel, rows: pa.RecordBatch) -> Outcome:
        threads = model.device.threads()
        lanes = max(min(2, threads), threads // THREADS_PER_LANE) if model.concurrent else 1
        return Runner(model, self._opened.view, search=False).compute(
            rows, lanes=lanes, go_on=self._go_on
        )

    def _go_on(self) -> None:
        if self._stopped:
            raise _Stopped

    def _keep(self, rows: pa.RecordBatch, done: Outcome, reference: Outcome) -> TechniqueComparison:
        budget = self._config.accuracy
        self._found = compare_outcomes(
            self._opened.view, budget, reference, done, rows.num_rows, self._extremes
        )
        CachedComparison(self._opened, self._opened.variant, rows, budget).write(self._found)
        return self._found


def joined(first: Outcome | None, more: Outcome, rows: int) -> Outcome:
    """Outcomes of a sample's first ``rows`` rows and of those that follow, as one."""
    if first is None:
        return more
    features = pa.concat_batches([first.features, more.features])
    rejections = [
        *first.rejections,
        *(replace(rejection, row=rows + rejection.row) for rejection in more.rejections),
    ]
    return Outcome(np.concatenate([first.rows, rows + more.rows]), features, rejections)


def steps(view: FeatureView, rows: int, extremes: int) -> list[int]:
    """How many of the first rows of a sample are compared, and then how many if the verdict is not
    clear; the sample begins with ``extremes`` rows of extreme inputs."""
    most = min(rows - extremes, CHECKED_ROWS)
    few = all(feature.dim is not None for feature in view.features) and most > FIRST_ROWS
    return [extremes + FIRST_ROWS, extremes + most] if few else [extremes + most]


def cache_comparisons(
    opened: OpenView,
    sample: pa.RecordBatch,
    extremes: int,
    budget: AccuracyConfig,
    comparisons: dict[str, list[TechniqueComparison]],
) -> None:
    """Store the comparisons of several techniques on the first rows of a sample, as many as of
    :func:`steps`, for the check of a run."""
    for technique, found in comparisons.items():
        for comparison in found if technique != REFERENCE else ():
            CachedComparison(
                opened, technique, sample.slice(0, extremes + comparison.rows), budget
            ).write(comparison)


def sample_of(opened: OpenView, rows: int) -> tuple[pa.RecordBatch, int]:
    """Rows of the source: those with extreme inputs
    (:meth:`precompute.sources.source.Source.extremes`), then ``rows`` drawn at random; and how
    many are extreme.

    Raises:
        SourceError: there are no rows.
    """
    drawn = opened.source.sample(rows).combine_chunks()
    if drawn.num_rows == 0:
        raise SourceError(
            f"view {opened.view.name!r}: the source yielded no rows: nothing to compare"
            " precisions on"
        )
    extremes = opened.source.extremes(EXTREME_ROWS)
    (batch,) = pa.concat_tables([extremes, drawn]).combine_chunks().to_batches()
    return batch, extremes.num_rows
