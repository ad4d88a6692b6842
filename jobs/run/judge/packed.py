"""The gate ``packed``: how near vectors are to themselves as the online store packs them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from precompute.jobs.run.judge.feature_figures import matrix_of
from precompute.jobs.run.judge.verdicts import Verdicts
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.online.codec import RowCodec
from precompute.techniques.accuracy import FeatureAccuracy, compare


def judge_packed(feature: Feature, sample: pa.Table, view: FeatureView, verdicts: Verdicts) -> None:
    """The gate ``packed``, on some rows: how far a vector is from itself after the online store.
    Nothing of a feature without ``packed``."""
    if feature.packed is None:
        return
    column = sample.column(feature.name).drop_null()
    # What is not finite comes back as NaN, and is the gate ``finite``'s.
    column = column.filter(pa.array(np.isfinite(matrix_of(column)).all(axis=1)))
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
