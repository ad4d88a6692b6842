"""Accuracy gate: how far a view's precision is from float32 on rows of its own, before a run computes in it, and in tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from jobs.config.view import AccuracyConfig, ViewConfig
from jobs.rows.engine import computed
from jobs.rows.open_view import OpenView
from precompute.engine.runner import Runner
from precompute.engine.window import Outcome
from precompute.precision.accuracy import Accuracy, Judged, compare
from precompute.techniques.table import REFERENCE
from store.errors import SourceError
from store.feature_view import FeatureView
from store.offline.snapshot import Verdict

CHECKED_ROWS = 512
"""Of the source, before a run computes in another precision: 10 neighbours among 512 tell 0.985 from 0.97 with room to spare."""

if TYPE_CHECKING:
    from precompute.models.torch_model import TorchModel

SHORT = {
    "mean_cosine": "cosine",
    "min_cosine": "min",
    "recall_at_10": "recall@10",
    "rank_correlation": "rank",
    "max_abs_error": "max error",
    "relative_error": "relative",
    "overlap": "overlap",
}


def check_accuracy(config: ViewConfig, opened: OpenView) -> Verdict | None:
    """Compare a view's precision with float32 on a sample of its own rows, before a run computes in it.

    Returns:
        the verdict, whose figure is the one farthest beyond its limit, or else the nearest to it, and whose ``message`` has all of them; None
        for float32 itself.
    """
    if opened.variant == REFERENCE:
        return None
    # Torch takes a second to import, and a model of pure Python needs none.
    from precompute.models.torch_model import TorchModel

    model = opened.model
    assert isinstance(model, TorchModel), "no other model has another precision"
    sample = sample_of(opened, CHECKED_ROWS)
    if opened.wanted is not None:
        done, reference = (computed(opened, sample, variant) for variant in (opened.variant, REFERENCE))
    else:
        done, reference = _both(opened, model, sample)
    accuracy = compared(opened.view, reference, done)
    figures = sorted(judged(config.accuracy, accuracy, reference, done), key=lambda figure: figure.room)
    reasons = [figure.shortfall for figure in figures if figure.room < 0]
    message = f"{opened.variant} against float32 on {sample.num_rows:,} rows: {figures_text({} if accuracy is None else accuracy.to_json()['features'])}"
    if reasons:
        message += f": {'; '.join(reasons)}"
    return Verdict("accuracy", not reasons, figures[0].measured, figures[0].limit, message)


def _both(opened: OpenView, model: TorchModel, sample: pa.RecordBatch) -> tuple[Outcome, Outcome]:
    """By the technique that the model computes by, and in float32."""
    done = Runner(model, opened.view).compute(sample)
    restore = model.restorer()
    model.use(model.module)
    try:
        return done, Runner(model, opened.view).compute(sample)
    finally:
        restore()


def sample_of(opened: OpenView, rows: int) -> pa.RecordBatch:
    """Raises:
    SourceError: there are no rows.
    """
    table = opened.source.sample(rows).combine_chunks()
    if table.num_rows == 0:
        raise SourceError(f"view {opened.view.name!r}: the source yielded no rows: nothing to compare precisions on")
    batch: pa.RecordBatch = table.to_batches()[0]
    return batch


def compared(view: FeatureView, reference: Outcome, other: Outcome) -> Accuracy | None:
    """On the rows that both computed; None when there are none."""
    both = sorted(set(reference.rows.tolist()) & set(other.rows.tolist()))
    if not both:
        return None
    chosen = []
    for done in (reference, other):
        position = {row: i for i, row in enumerate(done.rows.tolist())}
        chosen.append(done.features.take(pa.array([position[row] for row in both], pa.int64())))
    return compare(chosen[0], chosen[1], view)


def judged(budget: AccuracyConfig, accuracy: Accuracy | None, reference: Outcome, other: Outcome) -> list[Judged]:
    """Every figure with its limit; rows that are lost have one too."""
    if accuracy is None:
        return [Judged("rows that both compute:", 0, 1, -1)]
    lost = len(set(reference.rows.tolist()) - set(other.rows.tolist()))
    figures = accuracy.judged(budget.cosine, budget.recall_at_10)
    return [*figures, Judged("rows rejected that float32 computes:", lost, 0, -lost)] if lost else figures


def figures_text(features: Mapping[str, Mapping[str, float]]) -> str:
    """The accuracy's figures, in words."""
    told = []
    for name, figures in features.items():
        told.append(f"{name}: " * (len(features) > 1) + " · ".join(f"{SHORT[k]} {v:.6g}" for k, v in figures.items()))
    return "; ".join(told) or "–"
