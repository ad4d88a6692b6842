"""Comparison: what a precision comes to beside float32 on one sample of a view's rows, stored so
that the same is not measured twice: ``tune`` and the run that follows do it once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pyarrow as pa

from precompute.engine.window import Outcome
from precompute.jobs.config.view import AccuracyConfig
from precompute.jobs.process.report import versions
from precompute.jobs.rows.open_view import OpenView
from precompute.model import digest, table_digest
from precompute.precision.accuracy import Accuracy, Judged, compare, least
from precompute.precision.row_errors import Limits, share_between
from precompute.store.disk.durable_file import make_folder, replace_durably
from precompute.store.feature_view import FeatureView
from precompute.store.offline.snapshot import Verdict
from precompute.store.record import Record, read_record, sealed

log = logging.getLogger(__name__)

CODE_VERSION = 4
"""Raised by anyone who changes how figures are computed."""

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


class Comparison(Record, frozen=True):
    """Figures of a sample's rows by one technique against the reference; ``accuracy`` is None where
    no row was computed by both, ``lost`` counts those that the reference alone computed."""

    rows: int
    lost: int
    accuracy: Accuracy | None
    least: Accuracy | None = None
    """As of :func:`precompute.precision.accuracy.least`."""

    def clear(self, budget: AccuracyConfig, view: FeatureView) -> bool:
        """Whether more rows would hardly come to another verdict: all these are computed by both,
        none is an exception, and all means pass for sure."""
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
        """Every figure with its limit, the worst first; rows that are lost have one too."""
        if self.accuracy is None:
            return [Judged("rows that both compute:", 0, 1, -1)]
        figures = self.accuracy.judged(limits_of(budget), view)
        if self.lost:
            figures.append(Judged("rows rejected that float32 computes:", self.lost, 0, -self.lost))
        return sorted(figures, key=lambda figure: figure.room)

    def verdict(self, budget: AccuracyConfig, view: FeatureView, technique: str) -> Verdict:
        """Whose figure is the one farthest beyond its limit, or else the nearest to it, and whose
        ``message`` has all of them."""
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
    """A view's ``accuracy`` as :mod:`precompute.precision` takes it."""
    rows, features = budget.rows.model_dump(exclude_none=True), budget.features
    return Limits(
        budget.cosine,
        budget.recall_at_10,
        rows,
        {name: own.model_dump(exclude_none=True) for name, own in features.items()},
    )


def compared(
    view: FeatureView,
    budget: AccuracyConfig,
    reference: Outcome,
    other: Outcome,
    rows: int,
    ends: int = 0,
) -> Comparison:
    """Two outcomes of one sample.

    Args:
        view: whose features they are.
        budget: the view's accuracy: rows count as beyond by its bounds.
        reference: in float32.
        other: by another technique.
        rows: of the sample, from its first, that count.
        ends: how many of them, the first, were not drawn by chance.
    """
    wanted = set(reference.rows[reference.rows < rows].tolist())
    both = sorted(wanted & set(other.rows.tolist()))
    at_ends = sum(row < ends for row in both)
    if len(both) == at_ends:
        return Comparison(rows - ends, len(wanted), None)
    wants, made = (_features(done, both) for done in (reference, other))
    limits, lost = limits_of(budget), len(wanted) - len(both)
    found, low = (figures(wants, made, view, limits, at_ends) for figures in (compare, least))
    return Comparison(rows - ends, lost, found, low)


def _features(done: Outcome, rows: list[int]) -> pa.RecordBatch:
    position = {row: i for i, row in enumerate(done.rows.tolist())}
    return done.features.take(pa.array([position[row] for row in rows], pa.int64()))


def figures_text(features: Mapping[str, Mapping[str, float]]) -> str:
    """The accuracy's figures, in words."""
    lines = []
    for name, figures in features.items():
        # of a row's error two digits are the same in whatever batch
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
            device=opened.wanted,
            machine=instructions(),
            versions=dict(versions()),
        )
        self._path = opened.compiled / f"accuracy-{technique}-{facts[:16]}.json"

    def read(self) -> Comparison | None:
        """None where there is none, or none that can be read."""
        try:
            return read_record(Comparison, self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            log.warning("%s cannot be read (%s): measured again", self._path, exc)
            return None

    def write(self, comparison: Comparison) -> None:
        """Keep it; where that fails, it is measured again the next time."""
        try:
            make_folder(self._path.parent)
            replace_durably(self._path, sealed(comparison))
        except OSError as exc:
            log.warning(
                "%s cannot be written (%s): what was measured is not stored",
                self._path,
                exc.strerror,
            )
