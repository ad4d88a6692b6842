"""Models that are pure arithmetic, so that a test can say what every row must be."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa


def raised_at(file: str, text: str) -> str:
    """`` (file:line)`` of the first line of a file that holds ``text``: what an error of a model's
    says after its own words."""
    line = next(n for n, line in enumerate(Path(file).read_text().splitlines(), 1) if text in line)
    return f" ({Path(file).name}:{line})"


class Doubler:
    """``x`` → ``double`` = 2x, and ``vector`` = [x, x + 1, … x + dim - 1].

    Args:
        dim: of the vector; 0 leaves it out.
        fail_on: raise when this value of x is in the batch.
        nan_on: return NaN for this value of x.
        kill_on: kill the process, as the kernel would, when this value of x is in the batch.
        sleep_s: take this long for each batch.
        version: part of the fingerprint.
    """

    def __init__(
        self,
        dim: int = 4,
        fail_on: float | None = None,
        nan_on: float | None = None,
        kill_on: float | None = None,
        sleep_s: float = 0.0,
        version: int = 1,
    ) -> None:
        self.dim, self.fail_on, self.nan_on, self.kill_on, self.sleep_s, self.version = (
            dim,
            fail_on,
            nan_on,
            kill_on,
            sleep_s,
            version,
        )
        self.calls = 0

    def fingerprint(self) -> str:
        return f"doubler {self.dim} {self.version}"

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        self.calls += 1
        if self.sleep_s:
            time.sleep(self.sleep_s)
        x = np.asarray(batch.column("x")).astype(np.float64)
        if self.kill_on is not None and (x == self.kill_on).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fail_on is not None and (x == self.fail_on).any():
            raise ValueError(f"cannot take {self.fail_on}")
        double = 2 * x
        if self.nan_on is not None:
            double[x == self.nan_on] = np.nan
        features = {"double": double}
        if self.dim:
            features["vector"] = (x[:, None] + np.arange(self.dim)).astype(np.float32)
        return features


class Counting(Doubler):
    """Writes a line for every batch it computes.

    Args:
        path: the file.
        sleep_s: then takes this long, for each batch with an x above 3, so that publishing and
            warming up cost no time.
    """

    def __init__(self, path: str, sleep_s: float = 0.0) -> None:
        super().__init__()
        self._path, self._sleep_s = path, sleep_s

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        x = batch.column("x").to_pylist()
        with open(self._path, "a") as file:
            file.write(f"{x}\n")
        if max(x) > 3:
            time.sleep(self._sleep_s)
        return super().compute(batch)


class Moody(Doubler):
    """Refuses to tell its fingerprint while a file is there."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def fingerprint(self) -> str:
        if os.path.exists(self._path):
            raise RuntimeError("not today")
        return super().fingerprint()


REFUSED_AT = raised_at(__file__, "{self.fail_on}")
"""Where a :class:`Doubler` raises that fails on a value."""
