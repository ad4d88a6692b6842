"""Comparison: what a precision comes to beside float32 on one sample of a view's rows, kept so that the same is not measured twice: ``tune`` and the run
that follows do it once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pyarrow as pa

from jobs.config.view import AccuracyConfig
from jobs.process.report import versions
from jobs.rows.open_view import OpenView
from precompute.engine.window import Outcome
from precompute.model import digest, table_digest
from precompute.precision.accuracy import Accuracy, Judged, compare, least
from store.disk.durable_file import make_folder, replace_durably
from store.feature_view import FeatureView
from store.offline.snapshot import Verdict
from store.record import Record, read_record, sealed

log = logging.getLogger(__name__)

CODE_VERSION = 3
"""Raised by whoever changes how figures are computed."""

SHORT = {
    "mean_cosine": "cosine",
    "min_cosine": "min",
    "recall_at_10": "recall@10",
    "rank_correlation": "rank",
    "max_abs_error": "max error",
    "relative_error": "relative",
    "overlap": "overlap",
}


class Comparison(Record, frozen=True):
    """Figures of a sample's rows by one technique against the reference; ``accuracy`` is None where no row was computed by both, ``lost`` counts
    those that the reference alone computed."""

    rows: int
    lost: int
    accuracy: Accuracy | None
    least: Accuracy | None = None
    """As of :func:`precompute.precision.accuracy.least`."""

    def clear(self, budget: AccuracyConfig) -> bool:
        """Whether more rows would hardly come to another verdict: all these are computed by both, none is an exception, and all means pass for sure."""
        if self.least is None or self.lost:
            return False
        figures = self.least.judged(budget.cosine, budget.recall_at_10)
        worst = min(feature.min_cosine or 0.0 for feature in self.least.features.values())
        return worst >= budget.cosine and all(figure.room >= 0 for figure in figures)

    def judged(self, budget: AccuracyConfig) -> list[Judged]:
        """Every figure with its limit, the worst first; rows that are lost have one too."""
        if self.accuracy is None:
            return [Judged("rows that both compute:", 0, 1, -1)]
        figures = self.accuracy.judged(budget.cosine, budget.recall_at_10)
        if self.lost:
            figures.append(Judged("rows rejected that float32 computes:", self.lost, 0, -self.lost))
        return sorted(figures, key=lambda figure: figure.room)

    def verdict(self, budget: AccuracyConfig, technique: str) -> Verdict:
        """Whose figure is the one farthest beyond its limit, or else the nearest to it, and whose ``message`` has all of them."""
        figures = self.judged(budget)
        reasons = [figure.shortfall for figure in figures if figure.room < 0]
        features = {} if self.accuracy is None else self.accuracy.to_json()["features"]
        message = f"{technique} against float32 on {self.rows:,} rows: {figures_text(features)}"
        if reasons:
            message += f": {'; '.join(reasons)}"
        return Verdict("accuracy", not reasons, figures[0].measured, figures[0].limit, message)


def compared(view: FeatureView, reference: Outcome, other: Outcome, rows: int) -> Comparison:
    """Two outcomes of one sample.

    Args:
        view: whose features they are.
        reference: in float32.
        other: by another technique.
        rows: of the sample, from its first, that count.
    """
    wanted = set(reference.rows[reference.rows < rows].tolist())
    both = sorted(wanted & set(other.rows.tolist()))
    if not both:
        return Comparison(rows, len(wanted), None)
    wants, made = (_features(done, both) for done in (reference, other))
    return Comparison(rows, len(wanted) - len(both), compare(wants, made, view), least(wants, made, view))


def _features(done: Outcome, rows: list[int]) -> pa.RecordBatch:
    position = {row: i for i, row in enumerate(done.rows.tolist())}
    return done.features.take(pa.array([position[row] for row in rows], pa.int64()))


def figures_text(features: Mapping[str, Mapping[str, float]]) -> str:
    """The accuracy's figures, in words."""
    told = []
    for name, figures in features.items():
        told.append(f"{name}: " * (len(features) > 1) + " · ".join(f"{SHORT[k]} {v:.6g}" for k, v in figures.items()))
    return "; ".join(told) or "–"


class KeptComparison:
    """The file of one comparison: of a model by one technique, on these rows, by this machine's instructions and libraries.

    Args:
        opened: the view; its model is of torch.
        technique: a name.
        sample: the rows.
    """

    def __init__(self, opened: OpenView, technique: str, sample: pa.RecordBatch) -> None:
        # imports torch, as the model did
        from precompute.techniques.machine import instructions

        view = opened.view
        facts = digest(
            code=CODE_VERSION,
            model=opened.fingerprint_by(technique),
            features=[[f.name, f.dtype, f.dim, f.max_items] for f in view.features],
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
            log.warning("%s cannot be written (%s): what was measured is not kept", self._path, exc.strerror)
