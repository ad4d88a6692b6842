"""Image file: the bytes of a picture → pixels as a vision tower takes them, by Pillow; an error for
those that cannot be read is one line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from precompute.foreign_file import KnownKeys
from precompute.store.errors import ConfigError

with contextlib.suppress(ImportError):
    from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read: of all that Pillow knows, those that are pictures alone."""

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX")
"""Pixels that are grey or red, green and blue, of eight bits."""

PREPROCESSOR = KnownKeys(
    "preprocessor_config.json of CLIP and SigLIP",
    used=(
        "do_resize",
        "do_rescale",
        "do_normalize",
        "do_center_crop",
        "size",
        "crop_size",
        "resample",
        "image_mean",
        "image_std",
        "rescale_factor",
    ),
    harmless={
        "feature_extractor_type": "an older name of the class",
        "processor_class": "what stands beside it for texts",
        "do_convert_rgb": "pictures are RGB here in any case",
        "data_format": "how pixels lie in memory",
        "input_data_format": "how pixels lie in memory",
        "return_tensors": "how pixels lie in memory",
        "device": "where pixels are made",
        "disable_grouping": "how many pictures are made at a time",
        "default_to_square": "size says it by its names",
        "_valid_processor_keys": "names of the arguments of a call",
        "_processor_class": "what stands beside it for texts",
    },
    fixed={
        "image_processor_type": (
            *(
                f"{name}ImageProcessor{kind}"
                for name in ("CLIP", "Siglip")
                for kind in ("", "Fast", "Pil")
            ),
            # an older name of the class
            "CLIPFeatureExtractor",
        ),
        "do_pad": (False, None),
        "pad_size": (None,),
        "image_seq_length": (None,),
    },
)
PROCESSOR = KnownKeys(
    "processor_config.json",
    used=("image_processor",),
    harmless={
        "processor_class": "what stands beside it for texts",
        "tokenizer*": "of texts",
        "image_seq_length": "of texts",
    },
)

MOST_PIXELS = 50_000_000
"""Pixels of a picture at most, before it is decoded, or on its way to the tower's size."""


class UnusableImage(Exception):
    """Why a picture has no pixels; the message is the row's reason."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What becomes of a picture: resized to ``size`` (height, width), or so that its shorter edge
    is ``shortest``; the middle of ``crop`` (height, width) cut out; and of each colour, from 0 to
    1, the ``mean`` subtracted and the rest divided by ``std``. Half a pixel beside the middle is
    rounded down, or ``to_even``, as torchvision does."""

    size: tuple[int, int] | None
    shortest: int | None
    crop: tuple[int, int] | None
    resample: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float
    to_even: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the result."""
        if self.crop is not None:
            return self.crop
        assert self.size is not None
        return self.size


def check_installed() -> None:
    """Raises:
    ConfigError: Pillow is not there.
    """
    if "Image" not in globals():
        raise ConfigError("image_encoder needs Pillow: pip install 'precompute-store[images]'")


def pixels(content: bytes, recipe: Recipe) -> npt.NDArray[np.uint8]:
    """uint8 [3, height, width].

    Raises:
        UnusableImage: the picture is broken, too large, animated, or in colours that depend on a
            profile.
    """
    try:
        return _fitted(upright(content), recipe)
    except (UnusableImage, MemoryError):
        # without memory it is the machine that is at fault, and not the picture: the engine tries
        # fewer rows at once
        raise
    except UnidentifiedImageError as exc:
        raise UnusableImage(f"is no picture in {', '.join(FORMATS)}") from exc
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        raise UnusableImage(f"has too many pixels: {exc}") from exc
    except Exception as exc:
        # a damaged picture may end in any of Pillow's, struct's and zlib's errors
        raise UnusableImage(f"is a broken picture: {type(exc).__name__}: {exc}"[:300]) from exc


def upright(content: bytes) -> Any:
    """Pillow's image of a file, in RGB, as the camera's note says that it was held.

    Raises:
        UnusableImage: it is too large, animated, or in colours that depend on a profile.
        Exception: whatever Pillow raises for a broken one.
    """
    image = Image.open(io.BytesIO(content), formats=FORMATS)
    _check(image)
    return _upright(image).convert("RGB")


def _check(image: Any) -> None:
    """Check what stands in the head, before a pixel is decoded."""
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise UnusableImage(f"has {width:,} × {height:,} pixels, more than {MOST_PIXELS:,}")
    # a second frame of a photo (MPO) is its preview
    frames = getattr(image, "n_frames", 1) if image.format != "MPO" else 1
    if frames > 1:
        raise UnusableImage(f"is animated, or has several pages ({frames}): take one of them")
    if image.mode not in MODES:
        raise UnusableImage(
            f"has colours of mode {image.mode}, which depend on a profile or have more than 8 bits:"
            " convert it to RGB"
        )


def _upright(image: Any) -> Any:
    """As the camera's note says that it was held; without one that can be read, as it is."""
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        # as it lies it would be another picture, unnoticed
        raise
    except Exception:
        # a note of a camera may be broken in as many ways as a picture
        return image


def _fitted(image: Any, recipe: Recipe) -> npt.NDArray[np.uint8]:
    width, height = image.size
    if recipe.size is not None:
        height, width = recipe.size
    elif recipe.shortest is not None:
        short, long = sorted(image.size)
        rest = int(recipe.shortest * long / short)
        height, width = (rest, recipe.shortest) if width <= height else (recipe.shortest, rest)
    if width * height > MOST_PIXELS:
        raise UnusableImage(
            f"has {image.size[0]:,} × {image.size[1]:,} pixels: too narrow to resize"
        )
    made: npt.NDArray[np.uint8] = np.asarray(
        image.resize((width, height), resample=recipe.resample)
    )
    if recipe.crop is not None:
        rows, columns = recipe.crop
        whole = round if recipe.to_even else int
        top, left = whole((height - rows) / 2), whole((width - columns) / 2)
        made = made[top : top + rows, left : left + columns]
    return np.ascontiguousarray(made.transpose(2, 0, 1))


def read_recipe(of: Mapping[str, Any]) -> Recipe:
    """What a folder's ``preprocessor_config.json`` says.

    Raises:
        ValueError: it says what is not done here.
    """
    if not all(of.get(step, True) for step in ("do_resize", "do_rescale", "do_normalize")):
        raise ValueError("it leaves out resizing, rescaling or normalising")
    size = of.get("size", {})
    size = {"shortest_edge": size} if isinstance(size, int) else size
    if set(size) not in ({"height", "width"}, {"shortest_edge"}):
        raise ValueError(f"its size is {size}: height and width, or shortest_edge, are understood")
    both = (int(size["height"]), int(size["width"])) if "height" in size else None
    shortest = int(size["shortest_edge"]) if both is None else None
    crop = of.get("crop_size") if of.get("do_center_crop", "crop_size" in of) else None
    cut = (
        (crop, crop)
        if isinstance(crop, int)
        else None
        if crop is None
        else (int(crop["height"]), int(crop["width"]))
    )
    edges = both if both is not None else (shortest or 0, shortest or 0)
    if cut is None and both is None:
        raise ValueError(
            "its pictures have several sizes: it neither crops them nor names height and width"
        )
    if (
        min(edges) < 1
        or max(edges) > 4096
        or (cut is not None and not all(1 <= a <= b for a, b in zip(cut, edges, strict=True)))
    ):
        raise ValueError(f"it resizes to {size} and crops to {crop}")
    mean, std = (
        tuple(float(number) for number in of[name]) for name in ("image_mean", "image_std")
    )
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError("its image_mean or image_std are not three numbers")
    resample = int(of.get("resample", 3))
    if resample not in range(6):
        raise ValueError(f"resample {resample} is none")
    return Recipe(
        both, shortest, cut, resample, mean, std, float(of.get("rescale_factor", 1 / 255))
    )
