"""Vector gates: how long the vectors of a snapshot are, which repeat another one, how far they moved from the live ones, and what packing leaves of them.

Lengths and zeros are counted of all rows while they are written; repetitions and moves are told by rows drawn at random.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.jobs.config.view import GatesConfig
from precompute.jobs.pipeline.verdicts import Verdicts
from precompute.jobs.rows.replaced import Replaced
from precompute.precision.accuracy import FeatureAccuracy, compare, row_cosines
from precompute.store.entity_key import key_column
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.row_figures import RowFigures, VectorFigures
from precompute.store.offline.selection import all_rows, rows_beside, seed_of
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.codec import RowCodec

log = logging.getLogger(__name__)

SAMPLE_ROWS = 2048
READ_GROUPS = 256
"""Row groups read at most for the values that drawn keys have now: a full run in another order has each of them in one of its own."""

QUANTILES = {"p01": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
"""Of lengths and of cosines to the live vectors, in the manifest's ``quality`` as ``<feature>.norm.p01`` and ``<feature>.drift.p01``."""


@dataclass(frozen=True, slots=True)
class Moves:
    """The live snapshot's rows whose keys come again, against what they are now: ``same`` rows are the very same, ``changed`` were written anew. ``now``
    and ``then`` hold those of the latter that were looked at, row by row of one key."""

    same: int
    changed: int
    now: pa.Table
    then: pa.Table


def judge_lengths(
    feature: Feature,
    figures: RowFigures,
    before: RowFigures | None,
    gates: GatesConfig,
    verdicts: Verdicts,
) -> None:
    """The gates ``zero`` and ``norm``, on all rows.

    Args:
        feature: a vector.
        figures: of the snapshot's rows.
        before: of what is live; None without any.
        gates: the limits.
        verdicts: gets figures and verdicts.
    """
    now = figures.vectors.get(feature.name, VectorFigures())
    if not now.rows:
        return
    zero = now.zero / now.rows
    verdicts.at_most("zero", zero, gates.zero, f"{now.zero:,} of {now.rows:,} {feature.name} are all zeros")
    for name, value in zip(QUANTILES, now.norm_quantiles(list(QUANTILES.values())), strict=True):
        verdicts.quality[f"{feature.name}.norm.{name}"] = value
    then = None if before is None else before.vectors.get(feature.name)
    if then is not None and then.mean_norm > 0:
        change = now.mean_norm / then.mean_norm - 1
        message = f"mean norm of {feature.name} {now.mean_norm:.4g}, {change:+.1%} against {then.mean_norm:.4g}"
        verdicts.add("norm", change, gates.norm, gates.norm is None or abs(change) <= gates.norm, message)


def judge_duplicates(feature: Feature, sample: pa.Table, gates: GatesConfig, verdicts: Verdicts) -> None:
    """The gate ``duplicates``, on some rows."""
    sample = sample.filter(sample.column(feature.name).is_valid())
    if not sample.num_rows:
        return
    vectors = _matrix(sample, feature)
    doubled = 1 - len(np.unique(vectors, axis=0)) / len(vectors)
    message = f"{doubled:.1%} of sampled {feature.name} repeat another one"
    verdicts.at_most("duplicates", doubled, gates.duplicates, message)


def judge_packed(feature: Feature, sample: pa.Table, view: FeatureView, gates: GatesConfig, verdicts: Verdicts) -> None:
    """The gate ``packed``, on some rows: how far a vector is from itself once the online store kept it. Nothing of a feature without ``packed``."""
    if feature.packed is None:
        return
    rows = sample.select([feature.name]).filter(sample.column(feature.name).is_valid())
    # What is not finite comes back as NaN, and is the gate ``finite``'s.
    rows = rows.filter(pa.array(np.isfinite(_matrix(rows, feature)).all(axis=1))) if rows.num_rows else rows
    if not rows.num_rows:
        return
    full = rows.combine_chunks().to_batches()[0]
    now = _as_packed(feature, full, view)
    for name, value in (("mean_cosine", now.mean_cosine), ("min_cosine", now.min_cosine), ("recall_at_10", now.recall_at_10)):
        if value is not None:
            verdicts.quality[f"{feature.name}.packed.{name}"] = value
    if now.recall_at_10 is None:
        return
    message = f"packed as {feature.packed}, sampled {feature.name} keep {now.recall_at_10:.1%} of their 10 nearest"
    message += f", mean cosine {now.mean_cosine:.4f}"
    if gates.packed is not None and now.recall_at_10 < gates.packed and feature.packed == "binary":
        finer = _as_packed(replace(feature, packed="int8"), full, view)
        message += f"; as int8 they would keep {finer.recall_at_10:.1%}"
    verdicts.at_least("packed", now.recall_at_10, gates.packed, message)


def _as_packed(feature: Feature, full: pa.RecordBatch, view: FeatureView) -> FeatureAccuracy:
    """Figures of what the codec gives back against what it was given."""
    alone = replace(view, features=(feature,))
    codec, none = RowCodec(alone), np.zeros(full.num_rows, np.int64)
    columns = codec.decode(codec.encode(full, none.astype(np.uint64), none, 0)).columns
    return compare(full, pa.RecordBatch.from_arrays(columns, [feature.name]), alone).features[feature.name]


def judge_moves(feature: Feature, moves: Moves, gates: GatesConfig, verdicts: Verdicts) -> None:
    """The gates ``drift`` and ``moved``; nothing where the live snapshot has no such feature."""
    if feature.name not in moves.then.schema.names or moves.then.schema.field(feature.name).type != feature.arrow_type:
        return
    both = pc.and_(moves.now.column(feature.name).is_valid(), moves.then.column(feature.name).is_valid())
    pairs = [table.filter(both) for table in (moves.now, moves.then)]
    common = moves.same + round(moves.changed * (pairs[0].num_rows / max(1, moves.now.num_rows)))
    if not common:
        return
    cosines = np.ones(1)
    weights, further = np.array([float(moves.same)]), np.zeros(1)
    if pairs[0].num_rows:
        now, then = (_matrix(table, feature) for table in pairs)
        longer = np.maximum(np.linalg.norm(now, axis=1), np.linalg.norm(then, axis=1))
        each = (common - moves.same) / len(now)
        cosines = np.append(cosines, row_cosines(now, then))
        further = np.append(further, np.linalg.norm(now - then, axis=1) > gates.moved_by * longer)
        weights = np.append(weights, np.full(len(now), each))
    weights /= weights.sum()
    drift, moved = 1 - float(weights @ (1 - cosines)), float(weights @ further)
    order = np.argsort(cosines, kind="stable")
    places = np.searchsorted(np.cumsum(weights[order]), list(QUANTILES.values()))
    for name, value in zip(QUANTILES, cosines[order][places.clip(max=len(order) - 1)].tolist(), strict=True):
        verdicts.quality[f"{feature.name}.drift.{name}"] = value
    message = f"mean cosine of {feature.name} to the live snapshot {drift:.4f}, on {common:,} common keys"
    verdicts.at_least("drift", drift, gates.drift, message)
    message = f"{moved:.1%} of {feature.name} lie further than {gates.moved_by:g} of their length from the live ones, on {common:,} common keys"
    verdicts.at_most("moved", moved, gates.moved, message)


def moves_of(store: ViewStore, snapshot: Snapshot, live: Snapshot, replaced: Replaced | None) -> Moves | None:
    """None where nothing can be compared: nothing but another model's space, another entity, or a live snapshot that is damaged."""
    same_space = live.model == snapshot.model
    features = [f.name for f in snapshot.view.features if (f.dim is None or same_space) and f.name in live.view.feature_names]
    entity = snapshot.view.entity
    if not features or live.view.entity != entity:
        return None
    if replaced is not None:
        snapshot = replaced.new
    if replaced is None or replaced.old.number != live.number:
        replaced = Replaced(store, live, snapshot, [*entity, *features])
    layers = store.layers(snapshot)
    try:
        before, gone = store.layers(live), replaced.rows
        then = _some(replaced.drawn, seed_of(layers))
    except SnapshotError as exc:
        # What is live is damaged: a reason to replace it, not to keep it.
        log.warning("%s", exc)
        return None
    keys = key_column(then, entity)
    # Those of the drawn keys that left the source, or were rejected, are found nowhere: so are as many of all that are not the same any more.
    still_there, again, found = rows_beside(layers, before).find(keys, entity, groups=READ_GROUPS, seed=seed_of(layers))
    now, place = store.table(snapshot, again, features), pc.index_in(found, keys)
    changed = round(gone.count * still_there / max(1, then.num_rows))
    return Moves(all_rows(before).count - gone.count, changed, now, then.take(place))


def _some(table: pa.Table, seed: int) -> pa.Table:
    """Up to :data:`SAMPLE_ROWS` of its rows, drawn at random, in its order."""
    if table.num_rows <= SAMPLE_ROWS:
        return table
    return table.take(pa.array(np.sort(np.random.default_rng(seed).choice(table.num_rows, SAMPLE_ROWS, replace=False))))


def _matrix(table: pa.Table, feature: Feature) -> npt.NDArray[np.float64]:
    """[rows, dim] of a vector column without nulls and with at least a row."""
    column = table.column(feature.name).combine_chunks()
    return np.asarray(column.flatten()).astype(np.float64).reshape(len(column), -1)
