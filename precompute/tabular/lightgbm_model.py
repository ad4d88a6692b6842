"""LightGBM: a model that ``Booster.save_model`` wrote, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from precompute.store.errors import ModelError
from precompute.tabular.columns import Matrix
from precompute.tabular.host import installed
from precompute.tabular.lightgbm_text import LightGbmText, read_text
from precompute.tabular.tree_model import TreeModel, Trees

PROBABILITIES = ("binary", "cross_entropy")
"""What objectives of one score give one; it is 0.5 where the trees' sum is 0."""


class LightGbm(TreeModel):
    """Scores rows as ``Booster.predict`` does, to the bit. Categories are pandas' values, as the
    file has them; without those a categorical feature takes its codes as they are. The arguments
    are those of :class:`TreeModel`."""

    name = "lightgbm"

    def loaded(self, path: Path) -> Trees:
        """Raises:
        ModelError: the file is damaged, or no text that LightGBM wrote.
        """
        with installed("lightgbm"):
            import lightgbm

        try:
            # what is no UTF-8 is damage, and stands for itself until it is found
            text = path.read_bytes().decode("utf-8", "surrogateescape")
            known = read_text(text)
            self._booster = lightgbm.Booster(model_str=known.text)
        except (OSError, ValueError, lightgbm.basic.LightGBMError) as exc:
            raise ModelError(f"lightgbm: {path} is damaged or no LightGBM model: {exc}") from exc
        middle = (
            (0.0 if self._raw else 0.5)
            if known.width > 1 or known.objective in PROBABILITIES
            else None
        )
        return Trees(known.features, _categories(path, known), known.width, known.objective, middle)

    def scores(self, matrix: Matrix, threads: int) -> npt.NDArray[Any]:
        """Probabilities, or what else the objective makes of the trees' sum: float64."""
        # for a miss or two, waking the others takes longer than the trees
        threads = min(threads, 1 + len(matrix) // 64)
        return np.asarray(self._booster.predict(matrix, raw_score=self._raw, num_threads=threads))


def _categories(path: Path, known: LightGbmText) -> dict[str, list[Any]]:
    if known.pandas is None:
        return {}
    if len(known.pandas) != len(known.categorical):
        raise ModelError(
            f"lightgbm: {path} has the values of {len(known.pandas)} categorical features, and"
            f" {len(known.categorical)} of them: train it with all of them as pandas' category, or"
            " all as numbers"
        )
    return {
        known.features[place]: values
        for place, values in zip(known.categorical, known.pandas, strict=True)
    }
