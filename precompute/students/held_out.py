"""Held out: which rows a student never learns from, so that it can be judged on them; rows that are
equal in what its teacher reads are on one side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from precompute.model import Model, ReadingModel
from precompute.store.feature_view import FeatureView


def grouped_by(model: Model, view: FeatureView, columns: Sequence[str]) -> list[str]:
    """The columns by which rows are on one side: those that the teacher reads, or all but the key
    of one that does not say; of chunks, which overlap, those of the text's key.

    Args:
        model: the teacher.
        view: whose rows they are.
        columns: of its source.
    """
    if view.definition.chunk is not None:
        return list(view.entity[:-1])
    named = set(model.reads()) if isinstance(model, ReadingModel) else set()
    inputs = [name for name in columns if name not in view.entity]
    return [name for name in columns if name in named] or inputs or list(view.entity)


def is_held_out(groups: npt.NDArray[np.uint64], share: float) -> npt.NDArray[np.bool_]:
    """Which rows are held out, bool [rows]: the same ones every time.

    Args:
        groups: of each row a number that is equal for the rows that are on one side, evenly
            distributed (:meth:`precompute.sources.source.Source.rows`).
        share: of the groups, 0 to 1.
    """
    found: npt.NDArray[np.bool_] = groups <= np.uint64(min(int(share * 2**64), 2**64 - 1))
    return found
