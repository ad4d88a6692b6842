"""A model of angles, and a student that is wrong by some degrees: pure arithmetic, so that a test
can say how well the one agrees with the other."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa

from precompute.model import digest


class Exact:
    """``x`` degrees → ``vector`` = (cos x, sin x), and ``score`` = x: the teacher.

    Args:
        path: a file that must be there.
        version: part of the fingerprint.
    """

    made = 0
    computed = 0

    def __init__(self, path: str, version: int = 1) -> None:
        Path(path).read_text()
        Exact.made += 1
        self._version, self._error = version, 0.0

    def fingerprint(self) -> str:
        return f"exact {self._version}"

    def unusable(self, batch: pa.RecordBatch) -> dict[int, str]:
        return unusable(batch)

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        Exact.computed += batch.num_rows
        return angles(np.asarray(batch.column("x")), 0.0)


class Rough:
    """As :class:`Exact`, each angle wrong by up to as many degrees as a file says; cannot take what
    lies above ``most``."""

    def __init__(self, path: str, dim: int = 2, most: float = math.inf) -> None:
        self._path, self._dim, self._most = path, dim, most
        self._error = float(Path(path).read_text())

    def fingerprint(self) -> str:
        return digest(self._path, dim=self._dim, most=self._most)

    def unusable(self, batch: pa.RecordBatch) -> dict[int, str]:
        return unusable(batch)

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        x = np.asarray(batch.column("x"))
        if (x > self._most).any():
            raise ValueError("too large")
        made = angles(x, self._error)
        return made | {"vector": np.resize(made["vector"], (len(x), self._dim))}


def unusable(batch: pa.RecordBatch) -> dict[int, str]:
    """Rows without an x."""
    nulls = batch.column("x").is_null().to_pylist()
    return {row: "x is null" for row, null in enumerate(nulls) if null}


def angles(x: np.ndarray, error: float) -> dict[str, np.ndarray]:
    x = x + error * np.sin(37 * x)
    radians = np.radians(x)
    vectors = np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)
    return {"vector": vectors, "score": x}
