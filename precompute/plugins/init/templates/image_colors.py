"""Image colors: pictures as vectors with no model file at all. Near is what has the same colours;
what shows the same needs CLIP or SigLIP."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
from PIL import Image

from precompute import digest

SHADES = 4
"""Of each of red, green and blue: so the vector has 64 places."""


class ImageColors:
    """``image``, the bytes of a picture → ``embedding``: the share of each colour, and where it
    lies counts not."""

    def fingerprint(self) -> str:
        """Must change whenever any vector may: raise ``version`` when you change the code."""
        return digest(shades=SHADES, version=1)

    def reads(self) -> list[str]:
        """The columns of the source that count."""
        return ["image"]

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        """Feature → [rows, dim]. A picture that cannot be read raises, and is set aside, alone."""
        return {
            "embedding": np.stack([shares(image) for image in batch.column("image").to_pylist()])
        }


def shares(content: bytes) -> np.ndarray:
    """Of a picture: float32 [64]."""
    with Image.open(io.BytesIO(content)) as picture:
        small = np.asarray(picture.convert("RGB").resize((32, 32)), np.int64) * SHADES // 256
    colors = (small[..., 0] * SHADES + small[..., 1]) * SHADES + small[..., 2]
    return np.sqrt(np.bincount(colors.reshape(-1), minlength=SHADES**3) / colors.size).astype(
        np.float32
    )
