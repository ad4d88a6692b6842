"""Near: a student of :class:`tests.models.Doubler` in a few lines, and the recipe that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors.numpy import load_file, save_file

from precompute.model import digest
from precompute.plugins.students.training import MODEL, Lesson, Made


class Near:
    """``x`` → ``double`` = factor · x, and a vector as the teacher's is.

    Args:
        path: a file of the factor.
        needs: a column without which a row cannot be computed.
    """

    def __init__(self, path: str, needs: str | None = None) -> None:
        self._path, self._needs = Path(path), needs
        self._factor = load_file(path)["factor"]

    def fingerprint(self) -> str:
        return digest(self._path, needs=self._needs)

    def unusable(self, batch: pa.RecordBatch) -> dict[int, str]:
        if self._needs is None:
            return {}
        nulls = batch.column(self._needs).is_null().to_pylist()
        return {row: f"{self._needs} is null" for row, null in enumerate(nulls) if null}

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        x = np.asarray(batch.column("x"))
        vector = (x[:, None] + np.arange(4)).astype(np.float32)
        return {"double": x * self._factor[0], "vector": vector}


@dataclass(frozen=True)
class Straight:
    """The recipe of one whose factor is learned by least squares."""

    name: str = "near"
    by: str = "distil"
    needs: str | None = None

    def refuses(self, lesson: Lesson) -> str:
        return "" if "x" in lesson.rows.column_names else "there is no x"

    def make(self, lesson: Lesson, folder: Path) -> Made:
        x, double = (np.asarray(lesson.rows[name]) for name in ("x", "double"))
        (folder / MODEL).mkdir(exist_ok=True)
        factor = np.array([(x @ double) / (x @ x)])
        save_file({"factor": factor}, folder / MODEL / "near.safetensors")
        args = {"path": f"./{MODEL}/near.safetensors"}
        return Made(USE, args if self.needs is None else args | {"needs": self.needs})


USE = f"{__name__}:{Near.__name__}"
