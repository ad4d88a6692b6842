"""CLIP folders that were changed: each is refused by name, or has the values of its own library."""

from __future__ import annotations

import io
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from precompute.plugins.images.tests import test_image_encoder
from precompute.registry import load_model
from precompute.store.errors import ConfigError
from tests.precompute import test_foreign_models as foreign
from tests.precompute.test_foreign_models import (
    WEIGHTS,
    Change,
    Kind,
    cast,
    flipped,
    keys,
    tensors,
)

with warnings.catch_warnings():
    # it says that torchvision would be quicker
    warnings.simplefilter("ignore")
    from transformers import CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

PICTURES = [test_image_encoder.encoded(test_image_encoder.picture(n, 40 + n, 33)) for n in range(3)]


def _features(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
        processor = CLIPImageProcessorPil.from_pretrained(folder)
    pictures: list[Image.Image] = [Image.open(io.BytesIO(content)) for content in PICTURES]
    return test_image_encoder.expected(model, processor, pictures)


CLIP = Kind(
    "image_encoder",
    test_image_encoder.saved,
    _features,
    WEIGHTS,
    "vision_model.encoder.layers.1.mlp.fc1.weight",
    ("config.json", "preprocessor_config.json"),
    {"image": PICTURES},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clip")
    CLIP.make(made)
    return made


def test_a_folder_as_it_was_saved_has_its_librarys_values(folder: Path) -> None:
    foreign.check_equal(CLIP, folder)


def test_what_is_not_understood_is_refused(folder: Path, tmp_path: Path, subtests: Any) -> None:
    foreign.check_refused(CLIP, lambda to: shutil.copytree(folder, tmp_path / to), subtests)


REFUSED: list[tuple[str, Change, str]] = [
    (
        "patches",
        keys("preprocessor_config.json", image_processor_type="Siglip2ImageProcessor"),
        "image_processor_type",
    ),
    ("a tower's key", keys("config.json", vision_config__odd=1), "has odd, which is not"),
    ("quantized", keys("config.json", quantization_config={"a": 1}), "are quantized"),
    (
        "padded",
        keys("preprocessor_config.json", do_pad=True),
        "only False or None is computed",
    ),
    (
        "edges",
        keys("preprocessor_config.json", size={"shortest_edge": 32, "longest_edge": 64}),
        "its size is",
    ),
]


@pytest.mark.parametrize(("what", "change", "said"), REFUSED, ids=[what for what, *_ in REFUSED])
def test_what_would_be_another_value_is_refused_by_name(
    what: str, change: Change, said: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "folder")
    change(tmp_path / "folder")
    foreign.check_named(CLIP, tmp_path / "folder", said)


EQUAL: list[Change] = [
    *(cast(CLIP.tensor, dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16)),
    keys("preprocessor_config.json", image_mean=[0.1, 0.2, 0.3], rescale_factor=0.01),
    keys("preprocessor_config.json", resample=2, do_convert_rgb=False),
    keys("config.json", vision_config__hidden_act="relu"),
    keys("config.json", vision_config__layer_norm_eps=1e-2),
    keys("config.json", vision_config_dict={"num_attention_heads": 4}),
    tensors(lambda found: found.pop("text_projection.weight")),
    *(flipped(file, seed) for file in (CLIP.weights, *CLIP.files) for seed in range(2)),
]


def test_what_is_taken_has_its_librarys_values(folder: Path, tmp_path: Path, subtests: Any) -> None:
    """A changed setting, and a bit that is another: refused, or the same value."""
    cases = [("clip", CLIP, change) for change in EQUAL]
    copied = lambda name, to: shutil.copytree(folder, tmp_path / to)  # noqa: E731
    assert foreign.check_taken(cases, copied, subtests) > 5


@pytest.mark.parametrize("use", ["text_encoder", "text_classifier"])
def test_a_folder_of_pictures_says_what_reads_it(use: str, folder: Path) -> None:
    said = r"embeds pictures \(CLIP or SigLIP\), .*: set model\.use to image_encoder"
    with pytest.raises(ConfigError, match=said):
        load_model(use, {"path": str(folder), "device": "cpu"})


def test_a_folder_of_texts_says_what_reads_it(tmp_path: Path) -> None:
    foreign.KINDS["qwen3"].make(tmp_path)
    with pytest.raises(ConfigError, match=r"set model\.use to text_encoder"):
        load_model("image_encoder", {"path": str(tmp_path), "device": "cpu"})
