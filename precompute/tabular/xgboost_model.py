"""XGBoost: a model that ``save_model('….json')`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from precompute.store.errors import ConfigError, ModelError
from precompute.tabular.columns import Matrix, unfit
from precompute.tabular.host import installed
from precompute.tabular.tree_model import TreeModel, Trees
from precompute.tabular.xgboost_json import read_json

MIDDLES = {"binary:logistic": 0.5, "reg:logistic": 0.5, "binary:hinge": 0.5, "binary:logitraw": 0.0}
"""Objective of two classes → above which number a score is the second's; the trees' sum is that
above 0."""


class XgBoost(TreeModel):
    """Scores rows as ``Booster.predict`` does, to the bit; of a model that was stopped early, by
    the rounds up to the best, as scikit-learn's classes do. Categories are the values in the file;
    without those a categorical feature takes its codes as they are. The arguments are those of
    :class:`TreeModel`.
    """

    name = "xgboost"

    def loaded(self, path: Path) -> Trees:
        """Raises:
        ConfigError: ``label`` of an objective that gives no score for each class.
        ModelError: the file is damaged, or no JSON that XGBoost wrote.
        """
        with installed("xgboost"):
            import xgboost

        try:
            known = read_json(path.read_bytes())
            # a lane each computes, and one thread in each; it has no other way to say with how many
            self._booster = xgboost.Booster(params={"nthread": 1, "verbosity": 0})
            self._booster.load_model(bytearray(known.written))
        except (OSError, ValueError, xgboost.core.XGBoostError) as exc:
            reason = str(exc).strip().splitlines()[0]
            raise ModelError(f"xgboost: {path} is damaged or no XGBoost model: {reason}") from exc
        if self._label is not None and known.objective == "multi:softmax" and not self._raw:
            raise ConfigError(
                "xgboost: the objective multi:softmax gives a class's number and no score for each:"
                " train with multi:softprob, or set raw"
            )
        self._rounds = (0, known.rounds or 0)
        width = known.groups if self._raw or known.objective != "multi:softmax" else 1
        several = known.objective.startswith("multi:")
        middle = MIDDLES.get(known.objective) if known.groups == 1 else 0.5 if several else None
        return Trees(
            known.features,
            known.categories,
            width,
            known.objective,
            0.0 if middle and self._raw else middle,
        )

    def unfit(self, matrix: Matrix) -> dict[int, str]:
        """Rows with a number that float32 has none for, which is what XGBoost computes in."""
        return unfit(self._columns.names, matrix, np.float32)

    def scores(self, matrix: Matrix, threads: int) -> npt.NDArray[Any]:
        """What the objective makes of the trees' sum: float32."""
        kind = "margin" if self._raw else "value"
        scores: npt.NDArray[Any] = self._booster.inplace_predict(
            matrix.astype(np.float32),
            iteration_range=self._rounds,
            predict_type=kind,
            validate_features=False,
        )
        return scores
