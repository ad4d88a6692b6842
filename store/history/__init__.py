"""History: what a view held at any time (:func:`read`), what a training set may know
(:func:`get_historical_features`), and how one row came to be (:func:`explain`), as far back as its
snapshots are retained. What counts as history, and from when on: docs/architecture.md.
"""

from precompute.store.history.explanation import Explanation, Rejection, Version, explain
from precompute.store.history.point_in_time import get_historical_features, read, snapshot_at

__all__ = [
    "Explanation",
    "Rejection",
    "Version",
    "explain",
    "get_historical_features",
    "read",
    "snapshot_at",
]
