"""Reference: float32, for others to be compared with, by a quicker way than the module itself, once it is seen to compute the same."""

from __future__ import annotations

import logging

import numpy as np
import pyarrow as pa

from precompute.engine.window import Outcome, Rows
from precompute.models.torch_model import TorchModel
from precompute.precision.same_value import differing
from precompute.project_module import told
from precompute.store.feature_view import FeatureView
from precompute.techniques.table import REFERENCE
from precompute.techniques.technique import technique

log = logging.getLogger(__name__)

QUICK = "fp32-onednn"
"""Float32 by the most library there is besides torch's own products: MiniLM 2.7 times as fast on AVX512, 1.2 times on AVX2."""
PROOF_ROWS = 16
"""That both compute: any of them, in batches of other sizes. They take as long as three times as many by :data:`QUICK`."""


def quick_reference(model: TorchModel) -> TorchModel | None:
    """The same model by :data:`QUICK`, whatever it computes by; None where that gains nothing, or cannot be made."""
    quick = technique(QUICK)
    if quick.missing(model.device) or quick.gain(model.device, model) <= 1:
        return None
    other = model.in_float32()
    try:
        other.use(quick.converted(other, (), None), quick.dtype)
    except Exception as exc:
        # a module of somebody's own may be anything; then the reference computes itself
        log.info("%s cannot compute this model, and %s takes its place: %s", QUICK, REFERENCE, told(exc))
        return None
    return other


def proof_rows(quick: Outcome) -> Rows:
    """Which rows the module itself should compute, to see that ``quick`` is what it would have made: some of those there, and all that were rejected."""
    rejected = np.array([rejection.row for rejection in quick.rejections], np.int64)
    return np.union1d(quick.rows[:PROOF_ROWS], rejected)


def is_proven(quick: Outcome, proof: Outcome, rows: Rows, view: FeatureView) -> bool:
    """Whether values of :data:`QUICK` are those of float32, and rows without any have none there either: a fault that its packed layers share with
    those of another precision would not be seen by comparing the two.

    Args:
        quick: of a sample, by :func:`quick_reference`.
        proof: of its rows ``rows``, by the module itself.
        rows: as of :func:`proof_rows`.
        view: whose features they are.
    """
    wanted = np.intersect1d(quick.rows, rows)
    if not len(wanted) or not np.array_equal(rows[proof.rows], wanted):
        return False
    made = quick.features.take(pa.array(np.searchsorted(quick.rows, wanted)))
    return not differing(pa.Table.from_batches([proof.features]), pa.Table.from_batches([made]), view, QUICK)
