"""Hashed text: texts as vectors with no model file at all. Near is what shares words, or parts of
words; what means the same in other words needs an encoder."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from precompute import digest


class HashedText:
    """``text`` → ``embedding``, of length 1: every word and every three letters in a row add to one
    place of the vector.

    Args:
        dim: places; with fewer of them more words share one.
    """

    def __init__(self, dim: int = 256) -> None:
        self.dim = dim

    def fingerprint(self) -> str:
        """Must change whenever any vector may: raise ``version`` when you change the code."""
        return digest(dim=self.dim, version=1)

    def reads(self) -> list[str]:
        """The columns of the source that count."""
        return ["text"]

    def unusable(self, batch: pa.RecordBatch) -> dict[int, str]:
        """Rows that cannot be computed → why. They are set aside, and the others go on."""
        texts = batch.column("text").to_pylist()
        return {
            row: "the text has no word"
            for row, text in enumerate(texts)
            if not re.search(r"\w", text or "")
        }

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        """Feature → [rows] or [rows, dim]. A row must not depend on its neighbours."""
        vectors = np.zeros((batch.num_rows, self.dim), np.float32)
        for row, text in enumerate(batch.column("text").to_pylist()):
            for piece, weight in pieces(text or ""):
                hashed = zlib.crc32(piece.encode())
                vectors[row, hashed % self.dim] += weight if hashed >> 31 else -weight
        return {
            "embedding": vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
        }


def pieces(text: str) -> Iterator[tuple[str, float]]:
    """The words of a text and their parts, each with its weight."""
    for word in re.findall(r"\w+", text.lower()):
        yield word, 1.0
        for start in range(len(word) - 2):
            yield word[start : start + 3], 0.3
