"""Pictures as people have them: a CLIP of transformers, and what is wrong of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.people import ROWS, Made


def image_encoder(folder: Path) -> Made:
    """Pictures in the table, one of them cut."""
    from precompute.plugins.images.tests.test_image_encoder import encoded, expected, picture, saved

    model, processor = saved(folder / "clip")
    images = [picture(row % 10, 40 + row, 50) for row in range(ROWS)]
    contents = [encoded(image) for image in images]
    contents[4] = contents[4][:200]
    table = pa.table({"id": range(ROWS), "image": pa.array(contents)})
    args = {"path": "./clip", "device": "cpu"}
    features = {"embedding": {"dtype": "float32", "dim": 8}}
    values = {"embedding": expected(model, processor, images)}
    bad = {4: "image is a broken picture: OSError: image file is truncated"}
    return Made(
        args,
        features,
        table,
        values,
        bad,
        "clip/model.safetensors",
        [{"normalize": False}],
        library="transformers",
    )


CASES: dict[str, Callable[[Path], Made]] = {"image_encoder": image_encoder}


def photo_vector(folder: Path) -> str:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    from precompute.plugins.images.tests.test_image_encoder import VISION, encoded, picture, saved

    saved(folder / "clip-vit-base-patch32")
    for name in ("config.json", "model.safetensors"):
        (folder / "clip-vit-base-patch32" / name).unlink()
    # the size that the view has
    tower = CLIPVisionModelWithProjection(CLIPVisionConfig(**VISION, projection_dim=512))
    tower.save_pretrained(folder / "clip-vit-base-patch32")
    (folder / "photos").mkdir()
    for row in range(8):
        (folder / "photos" / f"p{row}.jpg").write_bytes(encoded(picture(row), "JPEG"))
    return "p3"


DOCUMENTED = {"photo_vector": photo_vector}
"""View of docs/models.md → what makes its model and its source, and returns a key."""


def other_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = import_module("precompute.plugins.images.image_encoder")

    read = module.read_recipe
    monkeypatch.setattr(
        module,
        "read_recipe",
        lambda *given: dataclasses.replace(read(*given), mean=(0.5, 0.5, 0.5)),
    )


WRONG: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "pixels": ("image_encoder", other_mean, {}),
}
"""What is wrong → the model that is made so, and its other arguments: its own library tells."""
