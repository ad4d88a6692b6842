"""The demo's own model, as a user would write one: how well each label's name fits an item, by the
cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute import digest
from precompute.models.text_encoder import TextEncoder


class LabelScores:
    """Zero-shot label scores.

    Args:
        path: folder of the text encoder that made the items' embeddings.
        labels: names of the labels, which are the names of the features too.
        column: the source's embedding column.
    """

    def __init__(self, path: str, labels: Sequence[str], column: str = "embedding") -> None:
        encoder = TextEncoder(path)
        texts = pa.record_batch({"text": [f"a {label.replace('_', ' ')} film" for label in labels]})
        self._labels = list(labels)
        self._column = column
        self._vectors: npt.NDArray[np.float32] = encoder.compute(texts)[
            "embedding"
        ]  # [L, D], norm 1
        self._encoder = encoder.fingerprint()

    def fingerprint(self) -> str:
        """The encoder and the labels."""
        return digest(code=1, encoder=self._encoder, labels=self._labels)

    def compute(self, batch: pa.RecordBatch) -> dict[str, npt.NDArray[np.float32]]:
        """Label → cosine, float32 [rows]."""
        vectors = (
            np.asarray(batch.column(self._column).flatten())
            .astype(np.float32)
            .reshape(batch.num_rows, -1)
        )
        scores = vectors @ self._vectors.T / np.linalg.norm(vectors, axis=1, keepdims=True)
        return dict(zip(self._labels, scores.T, strict=True))
