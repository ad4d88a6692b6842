"""Default row: what stands in for a row that is missing, where the view says so."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from precompute.store.feature_view import FeatureView
from precompute.store.online.codec import RowCodec


def default_row(view: FeatureView, codec: RowCodec) -> bytes | None:
    """The view's default values, packed, of no key, time or snapshot; features that it does not name are null. None for a view without.

    Raises:
        ValueError, TypeError: a value is none of its feature's type.
    """
    if view.fallback_default is None:
        return None
    values = [pa.array([view.fallback_default.get(feature.name)], feature.arrow_type) for feature in view.features]
    batch = pa.RecordBatch.from_arrays(values, schema=view.feature_schema())
    return codec.encode(batch, np.zeros(1, np.uint64), np.zeros(1, np.int64), 0).at(0)
