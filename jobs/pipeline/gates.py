"""Gates: what a snapshot must look like before it may be published. A green job with half the rows, or with vectors of nothing, is
stopped here, and the old version stays live. The figures and verdicts go into the manifest, whatever they are.

A row that ``bad_rows: null`` left without features has no value for coverage, and no vector for any other gate.
"""

from __future__ import annotations

import logging

import pyarrow as pa

from precompute.jobs.config.view import ViewConfig
from precompute.jobs.pipeline.parity import judge_parity
from precompute.jobs.pipeline.rolled_back import judge_rolled_back
from precompute.jobs.pipeline.value_gates import WIDER, judge_contract, judge_shift, judge_value_moves, judge_values
from precompute.jobs.pipeline.vector_gates import (
    SAMPLE_ROWS,
    judge_duplicates,
    judge_lengths,
    judge_moves,
    judge_packed,
    moves_of,
)
from precompute.jobs.pipeline.verdicts import JUDGED_ROWS, Verdicts
from precompute.jobs.rows.open_view import OpenView
from precompute.jobs.rows.replaced import Replaced
from precompute.store.entity_key import key_column
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import FeatureView
from precompute.store.offline.row_figures import RowFigures, count
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.record import replace

log = logging.getLogger(__name__)


def judge(
    config: ViewConfig,
    opened: OpenView,
    store: ViewStore,
    snapshot: Snapshot,
    live: Snapshot | None,
    replaced: Replaced | None = None,
    served: Snapshot | None = None,
) -> Verdicts:
    """Measure a snapshot that is about to be committed.

    Args:
        config: its gates.
        opened: source and model, for the parity sample.
        store: where the parts are.
        snapshot: its parts are written; it has no number yet.
        live: what it would replace; None when nothing is live.
        replaced: of a delta, the rows of its parent that are no rows of it; ``new`` there is the delta before its rows were copied to stand alone, where that
            was done: it still shows what it shares with ``live``.
        served: what readers have now, where that is not ``live``: another partition.

    Raises:
        SnapshotError, SourceError, ModelError: something cannot be read or computed.
    """
    gates, figures = config.gates, _figures(store, snapshot)
    valued = snapshot.rows - (figures.valueless if snapshot.view.definition.bad_rows == "null" else 0)
    verdicts = Verdicts(valued)
    if snapshot.view.definition.bad_rows == "null":
        verdicts.quality["nulls"] = float(figures.valueless)
    _judge_counts(config, snapshot, live, valued, verdicts)
    finite = figures.not_finite / figures.rows if figures.rows else 0.0
    verdicts.at_most("finite", finite, gates.finite, f"{figures.not_finite:,} of {figures.rows:,} rows are not finite")
    sample = store.sample(snapshot, SAMPLE_ROWS)
    sample = sample.append_column("key", key_column(sample, snapshot.view.entity))
    served = served or live
    if served is not None:
        judge_contract(snapshot.view, served.view, bool(gates.contract), verdicts)
    _judge_features(config, store, snapshot, figures, sample, live, served, replaced, verdicts)
    judge_rolled_back(opened, store, snapshot, gates.rolled_back, verdicts)
    if snapshot.view.fallback and gates.parity is not None:
        judge_parity(opened, sample, gates.parity, verdicts)
    return verdicts


def _judge_features(
    config: ViewConfig,
    store: ViewStore,
    snapshot: Snapshot,
    figures: RowFigures,
    sample: pa.Table,
    live: Snapshot | None,
    served: Snapshot | None,
    replaced: Replaced | None,
    verdicts: Verdicts,
) -> None:
    """Each feature's values, by its kind: alone, and beside the live ones."""
    gates, view = config.gates, snapshot.view
    before = None if live is None else _live_figures(store, live)
    moves = None if live is None else moves_of(store, snapshot, live, replaced)
    same_model = live is not None and live.model == snapshot.model
    then, judged, wider = before, same_model, 1.0
    if live is None and served is not None and served.model == snapshot.model:
        # of a partition that has no earlier rows, what readers have now
        then, judged, wider = _live_figures(store, served), True, WIDER
    for feature in view.features:
        if feature.dim is None:
            judge_values(feature, _valued(figures, view), sample, gates, verdicts)
            if then is not None:
                judge_shift(feature, _valued(figures, view), _valued(then, view), gates, verdicts, judged=judged, wider=wider)
            if moves is not None:
                judge_value_moves(feature, moves, before, gates, verdicts, judged=same_model)
        elif feature.dtype.startswith("float"):
            judge_lengths(feature, figures, before or then, gates, verdicts)
            judge_duplicates(feature, sample, gates, verdicts)
            judge_packed(feature, sample, view, gates, verdicts)
            if moves is not None and same_model:
                judge_moves(feature, moves, gates, verdicts)


def _judge_counts(config: ViewConfig, snapshot: Snapshot, live: Snapshot | None, valued: int, verdicts: Verdicts) -> None:
    """How many rows there are, beside what is live; how many were rejected, and how many have a value, of those of the source."""
    gates, counts = config.gates, snapshot.counts
    if live is not None and live.rows:
        change = snapshot.rows / live.rows - 1
        limit = gates.rows if max(live.rows, snapshot.rows) >= JUDGED_ROWS else None
        message = f"{snapshot.rows:,} rows, {change:+.1%} against the {live.rows:,} of snapshot {live.number}"
        verdicts.add("rows", change, limit, limit is None or abs(change) <= limit, message)
    rejected = counts.rejected / counts.source if counts.source else 0.0
    limit = config.max_rejected if gates.rejected == "auto" else gates.rejected
    verdicts.at_most("rejected", rejected, limit, f"{counts.rejected:,} of {counts.source:,} rows rejected")
    coverage = valued / counts.source if counts.source else 0.0
    limit = 1 - config.max_rejected if gates.coverage == "auto" else gates.coverage
    message = f"{valued:,} of {counts.source:,} source rows have a value"
    verdicts.at_least("coverage", coverage, limit, message)


def _figures(store: ViewStore, snapshot: Snapshot) -> RowFigures:
    """Of all rows; counted now where the manifest has none, being older than they."""
    return snapshot.figures or count(store.batches(snapshot, snapshot.view.feature_names), snapshot.view)


def _valued(figures: RowFigures, view: FeatureView) -> RowFigures:
    """Of the rows that have a value: those without one are judged by ``coverage``, where they were written in place of rejected ones."""
    return replace(figures, rows=figures.rows - figures.valueless) if view.definition.bad_rows == "null" else figures


def _live_figures(store: ViewStore, live: Snapshot) -> RowFigures | None:
    """None where they cannot be read. Of all partitions those of the newest one: a day is judged beside a day, and its manifest has them."""
    try:
        return _figures(store, store.snapshot(live.members[max(live.members)]) if live.members else live)
    except SnapshotError as exc:
        # What is live is damaged: a reason to replace it, not to keep it.
        log.warning("%s", exc)
        return None
