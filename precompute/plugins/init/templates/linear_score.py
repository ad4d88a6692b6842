"""Linear score: columns of numbers → one number between 0 and 1, as a logistic regression does. A
place for your own model."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from precompute import digest


class LinearScore:
    """``score`` = 1 / (1 + exp(-(bias + Σ weight · column))).

    Args:
        weights: column → weight.
        bias: added to their sum.
    """

    def __init__(self, weights: dict[str, float], bias: float = 0.0) -> None:
        self.weights, self.bias = weights, bias

    def fingerprint(self) -> str:
        """Must change whenever any score may: raise ``version`` when you change the code.
        ``digest(self.file, …)`` takes a file, too."""
        return digest(weights=self.weights, bias=self.bias, version=1)

    def reads(self) -> list[str]:
        """The columns of the source that count."""
        return list(self.weights)

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        """Feature → [rows]. A null becomes NaN, and a row whose score is NaN is set aside,
        alone."""
        total = np.full(batch.num_rows, float(self.bias))
        for column, weight in self.weights.items():
            total += weight * np.asarray(batch.column(column).cast(pa.float64()))
        return {"score": 1 / (1 + np.exp(-total))}
