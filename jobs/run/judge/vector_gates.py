"""Vector gates: the gates on vectors: alone, as the online store packs them, beside the figures of
what is live, and beside the live rows of the same keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.jobs.run.judge.value_gates import QUANTILES, Moves, Verdicts
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.row_figures import RowFigures, VectorFigures
from precompute.store.online.codec import RowCodec
from precompute.techniques.accuracy import FeatureAccuracy, compare, row_cosines


def judge_lengths(
    feature: Feature,
    figures: RowFigures,
    before: RowFigures | None,
    verdicts: Verdicts,
) -> None:
    """The gates ``zero``, on all rows, and ``norm``, on those of the snapshot's sample.

    Args:
        feature: a vector.
        figures: of the snapshot's rows.
        before: of what is live; None without any.
        verdicts: gets figures and verdicts.
    """
    gates, now = verdicts.gates, figures.vectors.get(feature.name, VectorFigures())
    zero, rows = figures.zeros.get(feature.name, 0), figures.rows - figures.valueless
    if not rows:
        return
    verdicts.at_most(
        "zero", zero / rows, gates.zero, f"{zero:,} of {rows:,} {feature.name} are all zeros"
    )
    if not now.rows:
        return
    for name, value in zip(QUANTILES, now.norm_quantiles(list(QUANTILES.values())), strict=True):
        verdicts.quality[f"{feature.name}.norm.{name}"] = value
    then = None if before is None else before.vectors.get(feature.name)
    if then is not None and then.mean_norm > 0:
        change = now.mean_norm / then.mean_norm - 1
        message = (
            f"mean norm of {feature.name} {now.mean_norm:.4g}, {change:+.1%} against"
            f" {then.mean_norm:.4g}"
        )
        verdicts.add(
            "norm",
            change,
            gates.norm,
            gates.norm is None or abs(change) <= gates.norm,
            message,
        )


def judge_duplicates(feature: Feature, sample: pa.Table, verdicts: Verdicts) -> None:
    """The gate ``duplicates``, on some rows."""
    column = sample.column(feature.name).drop_null()
    if not len(column):
        return
    vectors = _matrix(column)
    doubled = 1 - len(np.unique(vectors, axis=0)) / len(vectors)
    message = f"{doubled:.1%} of sampled {feature.name} repeat another one"
    verdicts.at_most("duplicates", doubled, verdicts.gates.duplicates, message)


def judge_packed(feature: Feature, sample: pa.Table, view: FeatureView, verdicts: Verdicts) -> None:
    """The gate ``packed``, on some rows: how far a vector is from itself after the online store.
    Nothing of a feature without ``packed``."""
    if feature.packed is None:
        return
    column = sample.column(feature.name).drop_null()
    # What is not finite comes back as NaN, and is the gate ``finite``'s.
    if len(column):
        column = column.filter(pa.array(np.isfinite(_matrix(column)).all(axis=1)))
    if not len(column):
        return
    full = pa.RecordBatch.from_arrays([column.combine_chunks()], [feature.name])
    gates, now = verdicts.gates, _as_packed(feature, full, view)
    for name, value in (
        ("mean_cosine", now.mean_cosine),
        ("min_cosine", now.min_cosine),
        ("recall_at_10", now.recall_at_10),
    ):
        if value is not None:
            verdicts.quality[f"{feature.name}.packed.{name}"] = value
    if now.recall_at_10 is None:
        return
    message = (
        f"packed as {feature.packed}, sampled {feature.name} keep {now.recall_at_10:.1%} of their"
        " 10 nearest"
    )
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
    return compare(full, pa.RecordBatch.from_arrays(columns, [feature.name]), alone).features[
        feature.name
    ]


def judge_moves(feature: Feature, moves: Moves, verdicts: Verdicts) -> None:
    """The gates ``drift`` and ``moved``; nothing where the live snapshot has no such feature."""
    gates, compared = verdicts.gates, moves.of(feature)
    if compared is None or not compared[2]:
        return
    *columns, common = compared
    cosines = np.ones(1)
    weights, further = np.array([float(moves.same)]), np.zeros(1)
    if len(columns[0]):
        now, then = map(_matrix, columns)
        longer = np.maximum(np.linalg.norm(now, axis=1), np.linalg.norm(then, axis=1))
        each = (common - moves.same) / len(now)
        cosines = np.append(cosines, row_cosines(now, then))
        further = np.append(further, np.linalg.norm(now - then, axis=1) > gates.moved_by * longer)
        weights = np.append(weights, np.full(len(now), each))
    weights /= weights.sum()
    drift, moved = 1 - float(weights @ (1 - cosines)), float(weights @ further)
    order = np.argsort(cosines, kind="stable")
    indices = np.searchsorted(np.cumsum(weights[order]), list(QUANTILES.values()))
    for name, value in zip(
        QUANTILES, cosines[order][indices.clip(max=len(order) - 1)].tolist(), strict=True
    ):
        verdicts.quality[f"{feature.name}.drift.{name}"] = value
    message = (
        f"mean cosine of {feature.name} to the live snapshot {drift:.4f}, on {common:,} common keys"
    )
    verdicts.at_least("drift", drift, gates.drift, message)
    message = (
        f"{moved:.1%} of {feature.name} lie further than {gates.moved_by:g} of their length from"
        f" the live ones, on {common:,} common keys"
    )
    verdicts.at_most("moved", moved, gates.moved, message)


def _matrix(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """[rows, dim] of vectors without nulls, of a row at least."""
    values = column.combine_chunks().flatten()
    return np.asarray(values).astype(np.float64).reshape(len(column), -1)
