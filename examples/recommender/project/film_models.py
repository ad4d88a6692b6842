"""Two models small enough to read: films as vectors of their genres, and for each user the films
nearest to what they liked."""

from __future__ import annotations

import zlib

import numpy as np
import pyarrow as pa

from precompute import digest


class GenreVector:
    """``text``, words apart → ``vector``, normalised: each word points where its checksum says."""

    def __init__(self, dim: int = 32) -> None:
        self.dim = dim

    def fingerprint(self) -> str:
        return digest(dim=self.dim, version=1)

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        return {
            "vector": np.stack([self._vector(text) for text in batch.column("text").to_pylist()])
        }

    def _vector(self, text: str) -> np.ndarray:
        whole = np.zeros(self.dim, np.float32)
        for word in text.lower().split():
            whole += (
                np.random.default_rng(zlib.crc32(word.encode()))
                .normal(size=self.dim)
                .astype(np.float32)
            )
        return whole / max(float(np.linalg.norm(whole)), 1e-6)


class Favourites:
    """``liked``, ids apart by blanks → the ``k`` films nearest to their mean, without themselves,
    and how near.

    Args:
        films: a table of ``film_id`` and ``vector``.
        k: how many.
    """

    def __init__(self, films: pa.Table, k: int = 10) -> None:
        self.films, self.k = films, k
        self.ids = films.column("film_id").to_numpy()
        vectors = films.column("vector").combine_chunks()
        self.vectors = vectors.flatten().to_numpy(zero_copy_only=False).reshape(len(self.ids), -1)

    def fingerprint(self) -> str:
        return digest(films=self.films, k=self.k, version=1)

    def compute(self, batch: pa.RecordBatch) -> dict[str, list[list[float]]]:
        films, scores = [], []
        for liked in batch.column("liked").to_pylist():
            known = np.isin(self.ids, [int(film) for film in str(liked).split()])
            near = (
                self.vectors @ self.vectors[known].mean(0)
                if known.any()
                else np.zeros(len(self.ids), np.float32)
            )
            best = [int(i) for i in np.argsort(-near, kind="stable") if not known[i]][: self.k]
            films.append([int(self.ids[i]) for i in best])
            scores.append([float(near[i]) for i in best])
        return {"films": films, "scores": scores}
