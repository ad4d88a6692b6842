"""Image encoders: the vectors of transformers' CLIP and SigLIP, from bytes and from files; every
picture that cannot be taken is one bad row."""

from __future__ import annotations

import io
import json
import re
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image, ImageOps

from precompute.plugins.images.image_file import Recipe, pixels
from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError

with warnings.catch_warnings():
    # it says that torchvision would be quicker
    warnings.simplefilter("ignore")
    from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50,
}


def saved(folder: Path, kind: str = "clip") -> tuple[Any, Any]:
    """(model, processor) of random weights, saved in the folder."""
    torch.manual_seed(0)
    if kind == "clip":
        # read wherever the size is named by its shorter edge
        model: Any = CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8))
        processor: Any = CLIPImageProcessorPil(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        )
    else:
        model = SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION))
        processor = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def picture(seed: int, width: int = 50, height: int = 40, mode: str = "RGB") -> Image.Image:
    """Soft stripes of any mode."""
    at = np.linspace(0, 6, width * height * 3).reshape(height, width, 3)
    return Image.fromarray((127 + 120 * np.sin(at * (seed + 1) + seed)).astype(np.uint8)).convert(
        mode
    )


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def loaded(folder: Path, **args: Any) -> Any:
    return load_model("image_encoder", {"path": str(folder), "device": "cpu", **args})


@torch.inference_mode()
def expected(model: Any, processor: Any, images: list[Image.Image]) -> Any:
    """As transformers has them, of norm 1."""
    made = [
        model.get_image_features(**processor(images=image, return_tensors="pt")).pooler_output
        for image in images
    ]
    return torch.nn.functional.normalize(torch.cat(made), dim=1).numpy()


PICTURES = {
    "rgb": (picture(0), "PNG", {}),
    "wide": (picture(1, 97, 33), "BMP", {}),
    "tall": (picture(2, 33, 64), "WEBP", {"lossless": True}),
    "grey": (picture(3, mode="L"), "PNG", {}),
    "alpha": (picture(4, mode="RGBA"), "PNG", {}),
    "palette": (picture(5, mode="P"), "GIF", {}),
    "bits": (picture(6, mode="1"), "TIFF", {}),
    "one pixel": (picture(7, 1, 1), "PNG", {}),
}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_vectors_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model, processor = saved(tmp_path / "model", kind)
    files = {
        name: encoded(image, form, **options) for name, (image, form, options) in PICTURES.items()
    }
    wanted = expected(
        model, processor, [Image.open(io.BytesIO(content)) for content in files.values()]
    )
    encoder = loaded(tmp_path / "model")
    by_bytes = encoder.compute(pa.record_batch({"image": list(files.values())}))["embedding"]
    np.testing.assert_allclose(by_bytes, wanted, atol=2e-5)
    (tmp_path / "pictures").mkdir()
    for name, content in files.items():
        (tmp_path / "pictures" / name).write_bytes(content)
    by_name = loaded(tmp_path / "model", files=str(tmp_path / "pictures")).compute(
        pa.record_batch({"image": list(files)})
    )
    assert np.array_equal(by_name["embedding"], by_bytes)


def test_a_photo_is_held_as_the_camera_says(tmp_path: Path) -> None:
    saved(tmp_path)
    encoder, image = loaded(tmp_path), picture(1)
    note = Image.Exif()
    # turned by 90° clockwise to be upright
    note[0x0112] = 6
    turned = encoded(image, "JPEG", exif=note, quality=95)
    upright = encoded(image.rotate(-90, expand=True))
    made = encoder.compute(pa.record_batch({"image": [turned, upright, encoded(image)]}))[
        "embedding"
    ]
    assert made[0] @ made[1] > 0.99 > made[0] @ made[2]


def bomb(width: int, height: int) -> bytes:
    """A PNG of some hundred bytes that says it has so many pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + body))
        return struct.pack(">I", len(body)) + name + body + crc

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


PNG = encoded(picture(0))
BAD = {
    "null": (None, "image is null"),
    "empty": (b"", "image is no picture in PNG, JPEG"),
    "text": (b"<svg/>", "image is no picture in PNG, JPEG"),
    "script": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "image is no picture in PNG, JPEG",
    ),
    "cut": (PNG[: len(PNG) // 2], "image is a broken picture: OSError"),
    "cut JPEG": (encoded(picture(0), "JPEG")[:700], "image is a broken picture: OSError"),
    "flipped": (PNG[:60] + bytes([PNG[60] ^ 255]) + PNG[61:], "image is a broken picture: "),
    "large": (bomb(9000, 9000), "image has 9,000 × 9,000 pixels, more than 50,000,000"),
    "bomb": (
        bomb(60_000, 60_000),
        "image has too many pixels: Image size (3600000000 pixels) exceeds limit",
    ),
    "narrow": (encoded(picture(0, 1, 60_000)), "image has 1 × 60,000 pixels: too narrow to resize"),
    "print": (
        encoded(picture(0, mode="CMYK"), "JPEG"),
        "image has colours of mode CMYK, which depend on a profile or have more than 8 bits: convert it to RGB",
    ),
    "deep": (encoded(picture(0, mode="I"), "TIFF"), "image has colours of mode I, which"),
    "moving": (
        encoded(picture(0), "GIF", save_all=True, append_images=[picture(1), picture(2)]),
        "image is animated, or has several pages (3): take one of them",
    ),
    "pages": (
        encoded(picture(0), "TIFF", save_all=True, append_images=[picture(1)]),
        "image is animated, or has several pages (2)",
    ),
}


def test_a_picture_that_cannot_be_taken_is_one_bad_row(tmp_path: Path) -> None:
    saved(tmp_path)
    rows = pa.record_batch(
        {"image": pa.array([PNG, *(content for content, _ in BAD.values()), PNG], pa.binary())}
    )
    encoder = loaded(tmp_path)
    prepared = encoder.prepare(rows)
    for place, (name, (_, reason)) in enumerate(BAD.items()):
        assert prepared.bad.get(place + 1, "").startswith(reason), (
            name,
            prepared.bad.get(place + 1),
        )
    assert len(prepared.bad) == len(BAD)
    assert prepared.size_bytes == rows.num_rows * 3 * 32 * 32
    made = encoder.land(encoder.launch(encoder.inputs(prepared, np.array([0, rows.num_rows - 1]))))[
        "embedding"
    ]
    np.testing.assert_allclose(made[0], made[1], atol=1e-6)


@pytest.mark.parametrize("step", ["open", "exif_transpose"])
def test_a_machine_without_memory_is_no_bad_picture(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It was rejected as broken, or embedded as it lay instead of as it was held."""

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "PNG")
    monkeypatch.setattr(Image if step == "open" else ImageOps, step, full)
    with pytest.raises(MemoryError):
        pixels(content.getvalue(), Recipe((8, 8), None, None, 3, (0.5,) * 3, (0.5,) * 3, 1 / 255))


def test_of_files_only_those_in_the_folder_are_read(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "pictures" / "link.png").symlink_to(tmp_path / "secret.png")
    names = [
        "a.png",
        "../secret.png",
        str(tmp_path / "secret.png"),
        "link.png",
        "b.png",
        "a\0.png",
        ".",
    ]
    bad = (
        loaded(tmp_path / "model", files=str(tmp_path / "pictures"))
        .prepare(pa.record_batch({"image": names}))
        .bad
    )
    reasons = ["lies outside pictures/"] * 3 + [
        "no such file in pictures/",
        "cannot be read",
        "no such file in pictures/",
    ]
    assert sorted(bad) == [1, 2, 3, 4, 5, 6]
    for row, reason in enumerate(reasons, 1):
        assert reason in bad[row], bad[row]
    # other pictures of the same names, in another folder
    roots = [None, str(tmp_path / "pictures"), str(tmp_path / "model")]
    assert len({loaded(tmp_path / "model", files=root).fingerprint() for root in roots}) == 3
    with pytest.raises(
        ModelError, match="column 'image' has names of files: set `files` to the folder"
    ):
        loaded(tmp_path / "model").prepare(pa.record_batch({"image": names}))
    with pytest.raises(ModelError, match="column 'image' is int64, neither bytes nor names"):
        loaded(tmp_path / "model").prepare(pa.record_batch({"image": [1]}))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"do_normalize": False}, ModelError, "it leaves out resizing, rescaling or normalising"),
        ({"do_center_crop": False}, ModelError, "its pictures have several sizes"),
        (
            {"crop_size": {"height": 16, "width": 16}},
            ModelError,
            "makes pictures of (16, 16), and its tower takes 32",
        ),
        ({"crop_size": {"height": 99, "width": 99}}, ModelError, "it resizes to"),
        ({"image_std": [0, 1, 1]}, ModelError, "are not three numbers"),
        ({"resample": 9}, ModelError, "resample 9 is none"),
        (
            None,
            ConfigError,
            "has no preprocessor_config.json; give the folder of a CLIP or SigLIP model",
        ),
    ],
)
def test_a_folder_that_is_not_understood_is_named(
    tmp_path: Path, change: Any, kind: type[Exception], message: str
) -> None:
    saved(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    if change is None:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(kind, match=re.escape(message)):
        loaded(tmp_path)
