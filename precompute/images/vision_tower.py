"""Vision tower: the part of a CLIP or SigLIP folder that embeds pictures, by transformers, whether
they or open_clip wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, CLIPVisionModelWithProjection, SiglipVisionModel
from transformers.utils import logging as transformers_logging

from precompute.images.image_file import Recipe, read_recipe
from precompute.images.open_clip_folder import CONFIG, PICKLE, WEIGHTS, read_open_clip
from precompute.project_module import described
from precompute.store.errors import ConfigError, ModelError

# a run has its own progress; this one ends up in logs
transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

KINDS: dict[str, Any] = {
    "clip": CLIPVisionModelWithProjection,
    "clip_vision_model": CLIPVisionModelWithProjection,
    "siglip": SiglipVisionModel,
    "siglip_vision_model": SiglipVisionModel,
}
"""``model_type`` → the class of its tower."""

PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")


class Tower(torch.nn.Module):
    """Pixels → vectors [B, D], float32.

    Args:
        tower: transformers' own.
        recipe: whose mean and deviation the pixels are normalised by.
        normalize: whether vectors have the norm 1.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, tower: Any, recipe: Recipe, normalize: bool) -> None:
        super().__init__()
        self.tower, self.normalize, self.scale = tower, normalize, recipe.scale
        for name, numbers in (("mean", recipe.mean), ("std", recipe.std)):
            self.register_buffer(name, torch.tensor(numbers).view(1, 3, 1, 1), persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """``pixels`` uint8 [B, 3, height, width]."""
        scaled = (pixels.to(self.mean.dtype) * self.scale - self.mean) / self.std
        out = self.tower(pixel_values=scaled)
        vectors: torch.Tensor = (
            out.image_embeds if hasattr(out, "image_embeds") else out.pooler_output
        ).float()
        return torch.nn.functional.normalize(vectors, dim=1) if self.normalize else vectors


def tower_files(folder: Path) -> dict[str, Path]:
    """Weights, configuration and what says how pictures are made ready, by name.

    Raises:
        ConfigError: one is missing.
    """
    names = [
        "config.json",
        "model.safetensors",
        next((n for n in PREPROCESSORS if (folder / n).is_file()), PREPROCESSORS[0]),
    ]
    # timm's own weights are a model.safetensors, too, and transformers' preprocessor is not beside
    # them
    if (folder / CONFIG).is_file() and not all((folder / name).is_file() for name in names):
        names = [CONFIG, WEIGHTS]
    for name in names:
        if name == WEIGHTS and not (folder / name).is_file() and (folder / PICKLE).is_file():
            raise ConfigError(
                f"image_encoder: {folder} has {PICKLE}, a pickle, which may run code when it is"
                f" read, and no {name}: write that once by"
                f" safetensors.torch.save_file(torch.load({PICKLE!r}, weights_only=True), {name!r})"
            )
        if not (folder / name).is_file():
            raise ConfigError(
                f"image_encoder: {folder} has no {name}; give the folder of a CLIP or SigLIP model"
                " saved with safetensors"
            )
    return {name: folder / name for name in names}


def load_tower(folder: Path, files: dict[str, Path]) -> tuple[Any, Recipe]:
    """(the tower in float32, what becomes of a picture before it).

    Raises:
        ConfigError: a model of another kind.
        ModelError: a file is damaged, or weights are missing.
    """
    try:
        tower, recipe, loading = (_of_open_clip if WEIGHTS in files else _of_transformers)(
            folder, files
        )
    except ConfigError:
        raise
    except Exception as exc:
        # safetensors and transformers raise whatever they like of a damaged file
        reason = f"{exc} is missing" if isinstance(exc, KeyError) else described(exc)
        raise ModelError(f"image_encoder: {folder} does not load: {reason}") from exc
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(f"image_encoder: {folder} has no weights for {', '.join(missing[:3])}")
    for name, shape, wanted in sorted(loading["mismatched_keys"]):
        raise ModelError(
            f"image_encoder: {folder} has {tuple(shape)} weights for {name}, and its configuration"
            f" {tuple(wanted)}"
        )
    if more := sorted(
        name
        for name in loading["unexpected_keys"]
        if "encoder.layers" in name and "text_model" not in name
    ):
        raise ModelError(
            f"image_encoder: {folder} has weights that its configuration has no place for:"
            f" {', '.join(more[:3])}"
        )
    if recipe.shape != (tower.config.image_size,) * 2:
        raise ModelError(
            f"image_encoder: {folder} makes pictures of {recipe.shape}, and its tower takes"
            f" {tower.config.image_size} pixels a side"
        )
    return tower, recipe


def _of_transformers(folder: Path, files: dict[str, Path]) -> tuple[Any, Recipe, Any]:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    of = json.loads(files[list(files)[-1]].read_text(encoding="utf-8"))
    recipe = read_recipe(of.get("image_processor", of))
    if (kind := config.model_type) not in KINDS:
        raise ConfigError(f"image_encoder: {folder} is a {kind}: {', '.join(KINDS)} are computed")
    own = getattr(config, "vision_config", config)
    if kind == "clip":
        # of both towers, which the pictures' own does not say
        own.projection_dim = config.projection_dim
    tower, loading = _quietly(KINDS[kind], folder, own)
    return tower, recipe, loading


def _of_open_clip(folder: Path, files: dict[str, Path]) -> tuple[Any, Recipe, Any]:
    kind, settings, weights, recipe = read_open_clip(files[CONFIG], files[WEIGHTS])
    tower, loading = _quietly(
        KINDS[kind], None, KINDS[kind].config_class(**settings), state_dict=weights
    )
    return tower, recipe, loading


def _quietly(kind: Any, folder: Path | None, config: Any, **given: Any) -> Any:
    """Without a report of the other tower's weights, which are not wanted."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        return kind.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            # said by name below, and not on a terminal
            ignore_mismatched_sizes=True,
            **given,
        )
    finally:
        transformers_logging.set_verbosity(before)
