"""Image encoder: a picture → embedding, by the vision tower of a CLIP or SigLIP folder. Pictures
are decoded and resized in the prepare stage, by several threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import AutoConfig, CLIPVisionModelWithProjection, SiglipVisionModel
from transformers.utils import logging as transformers_logging

from precompute.engine.resources import allowed, usable_threads
from precompute.foreign_file import KnownKeys, read_json
from precompute.model import Features, OwnLibrary, Prepared, Verbatim, digest, resolve_path
from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.plugins.images.image_file import (
    PREPROCESSOR,
    PROCESSOR,
    Recipe,
    UnusableImage,
    check_installed,
    pixels,
    read_recipe,
    upright,
)
from precompute.registry import described
from precompute.safetensors_file import SCALES, check_floats, read_tensors
from precompute.store.errors import ConfigError, ModelError, PrecomputeError
from precompute.text.config_file import check_config
from precompute.text.sentence_folder import check_use
from precompute.text.transformer import weight_names

_USE = "image_encoder"

CODE_VERSION = 1
"""Raised with each change of the values that this code computes; part of the fingerprint."""

START_IMAGES = {"cpu": 8, "cuda": 64}

MOST_FILE_BYTES = 256 * 2**20


class ImageEncoder(TorchModel):
    """Embeds one column of pictures: their bytes, or names of files.

    Args:
        path: the folder: ``config.json``, ``model.safetensors``, ``preprocessor_config.json``;
            ``package:name/folder`` inside a package.
        column: the source's column: binary, or text with names of files.
        output: name of the feature.
        files: the folder that file names start from, and lie in. A changed file under the same name
            is not seen as changed: give the bytes (DuckDB's ``read_blob``), or a column besides
            that changes with it.
        normalize: whether vectors have the norm 1.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one.

    Raises:
        ConfigError: no such folder or file, a model of another kind, or Pillow is not installed.
        ModelError: the weights do not load.
    """

    cost_unit = "images"
    concurrent = True
    prepared_rows = 256
    """Rows of one window at most: a picture's pixels are thousands of times its row."""

    def __init__(
        self,
        path: str,
        column: str = "image",
        output: str = "embedding",
        files: str | None = None,
        normalize: bool = True,
        device: str | None = None,
    ) -> None:
        check_installed()
        if not isinstance(normalize, bool):
            raise ConfigError(f"image_encoder: normalize is true or false, got {normalize!r}")
        folder = resolve_path(path)
        self._files, self._path = tower_files(folder), str(folder)
        self._named_root = files
        self._root = None if files is None else resolve_path(files).resolve()
        tower, self._recipe = load_tower(folder, self._files)
        self._column, self._output, self._normalize = column, output, normalize
        self._flops: float = (
            2.0 * _weights(tower) * int(tower.config.image_size // tower.config.patch_size) ** 2
        )
        self._pool = ThreadPoolExecutor(usable_threads(allowed()), "decode")
        super().__init__(Tower(tower, self._recipe, normalize), Device(device))
        self.start_cost = START_IMAGES[self.device.torch.type]

    def fingerprint(self) -> str:
        """Weights, config, how pictures are made ready, the folder they are named in, normalising
        and code version."""
        facts = {
            "column": self._column,
            "normalize": self._normalize,
            "root": Verbatim(self._named_root),
        }
        return digest(code=CODE_VERSION, files=self._files, **facts)

    def own_library(self) -> OwnLibrary:
        name = "open_clip" if WEIGHTS in self._files else "transformers"
        given = {
            "path": self._path,
            "column": self._column,
            "output": self._output,
            "files": None if self._root is None else str(self._root),
            "normalize": self._normalize,
        }
        return OwnLibrary(
            {"open_clip": "open_clip_torch"}.get(name, name),
            f"precompute.plugins.images.image_encoder:by_{name}",
            given,
            tuple(self._files.values()),
            (name,),
        )

    def reads(self) -> tuple[str]:
        return (self._column,)

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Pixels uint8 [rows, 3, height, width]; a row costs 1. Bad are pictures that are null,
        broken, too large, animated, or of other colours.

        Raises:
            ModelError: the column holds something else.
        """
        column = self._checked(batch)
        made = np.zeros((batch.num_rows, 3, *self._recipe.shape), np.uint8)
        bad: dict[int, str] = {}

        def decode(row: int, value: Any) -> None:
            try:
                made[row] = pixels(
                    value if isinstance(value, bytes) else self._read(value), self._recipe
                )
            except UnusableImage as exc:
                bad[row] = f"{self._column} {exc}"

        values = column.to_pylist()
        bad |= dict.fromkeys(
            pc.indices_nonzero(column.is_null()).to_pylist(), f"{self._column} is null"
        )
        list(
            self._pool.map(
                lambda row: decode(row, values[row]),
                [row for row in range(len(values)) if row not in bad],
            )
        )
        return Prepared(np.ones(batch.num_rows, np.int64), made, bad, made.nbytes)

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        return (torch.from_numpy(prepared.payload[rows]),)

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        return {self._output: outputs[0]}

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """2 for each weight of a linear layer, for each patch of a picture; attention is not
        counted."""
        return self._flops * len(rows)

    def _checked(self, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        kind = column.type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_null(kind):
            return column
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ModelError(
                f"image_encoder: column {self._column!r} is {kind}, neither bytes nor names of"
                " files"
            )
        if self._root is None:
            raise ModelError(
                f"image_encoder: column {self._column!r} has names of files: set `files` to the"
                " folder that they lie in"
            )
        return column

    def _read(self, name: str) -> bytes:
        """A file in the folder: a request may bring any name.

        Raises:
            UnusableImage: it is not there, cannot be read, or lies elsewhere.
        """
        assert self._root is not None
        try:
            file = (self._root / name).resolve()
            if not file.is_relative_to(self._root):
                raise UnusableImage(f"{name!r:.200} lies outside {self._root.name}/")
            if not file.is_file():
                raise UnusableImage(f"{name!r:.200}: no such file in {self._root.name}/")
            if file.stat().st_size > MOST_FILE_BYTES:
                raise UnusableImage(f"{name!r:.200} has more than {MOST_FILE_BYTES // 2**20} MiB")
            return file.read_bytes()
        except (OSError, ValueError) as exc:
            # a NUL in the name
            raise UnusableImage(f"{name!r:.200} cannot be read: {exc}") from exc


def _weights(tower: Any) -> int:
    return sum(
        module.weight.numel() for module in tower.modules() if isinstance(module, torch.nn.Linear)
    )


# ---- Vision tower: the part of the folder that embeds pictures, by transformers, from their format
# or open_clip's.


CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"
PICKLE = "open_clip_pytorch_model.bin"

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""open_clip's, where a folder names none."""

OPEN_CLIP = KnownKeys("open_clip_config.json", used=("model_cfg", "preprocess_cfg"))
OPEN_CLIP_MODEL = KnownKeys(
    "model_cfg in open_clip_config.json",
    used=("embed_dim", "quick_gelu", "vision_cfg"),
    harmless={
        "text_cfg": "of the tower for texts",
        "custom_text": "of the tower for texts",
        "init_logit_scale": "of training alone",
        "init_logit_bias": "of training alone",
        "nonscalar_logit_scale": "of training alone",
    },
)
OPEN_CLIP_VISION = KnownKeys(
    "vision_cfg in open_clip_config.json, of a ViT of CLIP",
    used=("image_size", "layers", "width", "head_width", "mlp_ratio", "patch_size"),
    harmless={
        "patch_dropout": "of training alone",
        "output_tokens": "what else is given out; the values are the same",
    },
    fixed={"pool_type": ("tok",)},
)
OPEN_CLIP_TIMM = KnownKeys(
    "vision_cfg in open_clip_config.json, of timm's ViT of SigLIP",
    used=("image_size", "timm_model_name", "timm_pool", "timm_proj"),
    harmless={
        "timm_model_pretrained": "where training began",
        "timm_drop": "of training alone",
        "timm_drop_path": "of training alone",
        "patch_dropout": "of training alone",
    },
)
OPEN_CLIP_PREPROCESS = KnownKeys(
    "preprocess_cfg in open_clip_config.json",
    used=("mean", "std", "interpolation", "resize_mode"),
    harmless={
        "size": "the tower's image_size counts",
        "fill_color": "of pictures that are padded, which none is",
    },
    fixed={"mode": ("RGB",)},
)
OPEN_CLIP_TENSORS = KnownKeys(
    "open_clip_model.safetensors",
    used=("visual.*",),
    harmless={
        "text.*": "of the tower for texts",
        "transformer.*": "of the tower for texts",
        "token_embedding.weight": "of the tower for texts",
        "positional_embedding": "of the tower for texts",
        "ln_final.*": "of the tower for texts",
        "text_projection*": "of the tower for texts",
        "attn_mask": "of the tower for texts",
        "logit_scale": "of training alone",
        "logit_bias": "of training alone",
    },
    refused=SCALES,
)
TOWER_TENSORS = KnownKeys(
    "the weights of CLIP and SigLIP of transformers (model.safetensors)",
    used=("(each tensor of the vision tower's class in transformers)",),
    harmless={
        "text_model.*": "of the tower for texts",
        "text_projection.*": "of the tower for texts",
        "logit_scale": "of training alone",
        "logit_bias": "of training alone",
        "*position_ids": "the numbers 0, 1, 2, …, which are counted here",
    },
    refused=SCALES,
)

SIGLIP = re.compile(r"vit_(base|large|so400m|giantopt)_patch(14|16|32)_siglip_\d+")
TANH = ("vit_base_patch32", "vit_large_patch16_siglip_512", "vit_so400m_patch16", "vit_giantopt")
"""timm's towers of SigLIP, and those whose GELU is approximated; the others' is exact, which
transformers' own SigLIP is not."""

NAMES = (
    ("transformer.resblocks.", "encoder.layers."),
    ("blocks.", "encoder.layers."),
    (".ln_1.", ".layer_norm1."),
    (".ln_2.", ".layer_norm2."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    (".attn.out_proj.", ".self_attn.out_proj."),
    (".attn.proj.", ".self_attn.out_proj."),
    (".c_fc.", ".fc1."),
    (".c_proj.", ".fc2."),
    ("patch_embed.proj.", "embeddings.patch_embedding."),
    ("conv1.", "embeddings.patch_embedding."),
    ("class_embedding", "embeddings.class_embedding"),
    ("positional_embedding", "embeddings.position_embedding.weight"),
    ("pos_embed", "embeddings.position_embedding.weight"),
    ("ln_pre.", "pre_layrnorm."),
    ("ln_post.", "post_layernorm."),
    ("attn_pool.latent", "head.probe"),
    ("attn_pool.proj.", "head.attention.out_proj."),
    ("attn_pool.norm.", "head.layernorm."),
    ("attn_pool.mlp.", "head.mlp."),
)
"""Parts of open_clip's and timm's names → transformers'."""

Weights = dict[str, torch.Tensor]


def read_open_clip(config: Path, weights: Path) -> tuple[str, dict[str, Any], Weights, Recipe]:
    """(transformers' ``model_type``, its configuration, the vision tower's weights by transformers'
    names, what becomes of a picture before it).

    Raises:
        ConfigError: a tower that is no plain ViT of CLIP or SigLIP.
        ValueError, KeyError, TypeError, OSError, SafetensorError: a file is damaged.
    """
    of = read_json(config, _USE, dict)
    OPEN_CLIP.check(of, config, _USE)
    model = of["model_cfg"]
    OPEN_CLIP_MODEL.check({k: v for k, v in model.items() if v is not None}, config, _USE)
    vision = {
        name: value
        for name, value in model["vision_cfg"].items()
        if value is not None and value is not False
    }
    found = _siglip(config, vision) if "timm_model_name" in vision else _clip(config, model, vision)
    given = {
        name.removeprefix("visual."): tensor
        for name, tensor in read_tensors(weights, OPEN_CLIP_TENSORS, _USE).items()
    }
    kind, settings = found
    pictures = {k: v for k, v in (of.get("preprocess_cfg") or {}).items() if v is not None}
    OPEN_CLIP_PREPROCESS.check(pictures, config, _USE)
    recipe = _recipe(pictures, settings["image_size"])
    if kind == "clip_vision_model":
        return kind, settings, _clip_weights(given), recipe
    made = _siglip_weights({name.removeprefix("trunk."): value for name, value in given.items()})
    width, _, patch, _ = made["embeddings.patch_embedding.weight"].shape
    settings |= {
        "hidden_size": width,
        "patch_size": patch,
        "intermediate_size": len(made["encoder.layers.0.mlp.fc1.bias"]),
        "num_hidden_layers": sum(name.endswith(".fc1.bias") for name in made) - 1,
    }
    return kind, settings, made, recipe


def _refused(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"image_encoder: {folder} has {what}: of open_clip's towers the plain ViTs of CLIP and"
        " SigLIP are computed"
    )


def _clip(
    file: Path, model: Mapping[str, Any], vision: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    folder = file.parent
    if not isinstance(vision.get("layers", 12), int):
        raise _refused(folder, "a ResNet for a vision tower")
    OPEN_CLIP_VISION.check(vision, file, _USE)
    width = int(vision.get("width", 768))
    return "clip_vision_model", {
        "hidden_size": width,
        "intermediate_size": int(width * vision.get("mlp_ratio", 4.0)),
        "num_hidden_layers": vision.get("layers", 12),
        "num_attention_heads": width // int(vision.get("head_width", 64)),
        "image_size": _side(folder, vision),
        "patch_size": vision.get("patch_size", 16),
        "projection_dim": model["embed_dim"],
        "hidden_act": "quick_gelu" if model.get("quick_gelu") else "gelu",
    }


def _siglip(file: Path, vision: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    folder = file.parent
    name = str(vision["timm_model_name"])
    known = SIGLIP.fullmatch(name)
    if (
        known is None
        or vision.get("timm_pool") != "map"
        or vision.get("timm_proj", "none") not in ("", "none")
    ):
        raise _refused(folder, f"timm's {name} for a vision tower")
    OPEN_CLIP_TIMM.check(vision, file, _USE)
    return "siglip_vision_model", {
        "num_attention_heads": 12 if known[1] == "base" else 16,
        "image_size": _side(folder, vision),
        "hidden_act": "gelu_pytorch_tanh" if name.startswith(TANH) else "gelu",
    }


def _side(folder: Path, vision: Mapping[str, Any]) -> int:
    size = vision.get("image_size", 224)
    if not isinstance(size, int):
        raise _refused(folder, f"pictures of {size!r}")
    return size


def _recipe(of: Mapping[str, Any], size: int) -> Recipe:
    mode, interpolation = of.get("resize_mode") or "shortest", of.get("interpolation") or "bicubic"
    if mode not in ("shortest", "squash") or interpolation not in ("bicubic", "bilinear", "random"):
        raise ValueError(
            f"it resizes by {mode}, {interpolation}: shortest and squash, bicubic and bilinear are"
            " done"
        )
    mean, std = (of.get(name) or default for name, default in (("mean", MEAN), ("std", STD)))
    square = {"height": size, "width": size}
    recipe = read_recipe(
        {
            "size": square if mode == "squash" else {"shortest_edge": size},
            "crop_size": square,
            "do_center_crop": mode == "shortest",
            "resample": 2 if interpolation == "bilinear" else 3,
            "image_mean": mean if isinstance(mean, list | tuple) else [mean] * 3,
            "image_std": std if isinstance(std, list | tuple) else [std] * 3,
        }
    )
    return replace(recipe, to_even=True)


def _renamed(name: str) -> str:
    for theirs, ours in NAMES:
        name = name.replace(theirs, ours)
    return name


def _split(name: str, value: torch.Tensor) -> Weights:
    """Queries, keys and values, which stand in one."""
    if len(value) % 3:
        raise ValueError(f"visual.{name} has the shape {tuple(value.shape)}")
    layer, _, kind = name.replace("in_proj_", "qkv.").partition(".attn.qkv.")
    parts = zip("qkv", value.chunk(3), strict=True)
    return {f"{_renamed(f'{layer}.')}self_attn.{part}_proj.{kind}": chunk for part, chunk in parts}


def _clip_weights(given: Weights) -> Weights:
    made: Weights = {"visual_projection.weight": given.pop("proj").T.contiguous()}
    for name, value in given.items():
        new = _split(name, value) if ".in_proj_" in name else {_renamed(name): value}
        made |= {f"vision_model.{part}": tensor for part, tensor in new.items()}
    return made


def _siglip_weights(given: Weights) -> Weights:
    made: Weights = {}
    for kind in ("weight", "bias"):
        # the pool's query has weights of its own
        parts = [given.pop(f"attn_pool.{part}.{kind}") for part in ("q", "kv")]
        made[f"head.attention.in_proj_{kind}"] = torch.cat(parts)
    made |= {f"post_layernorm.{kind}": given.pop(f"norm.{kind}") for kind in ("weight", "bias")}
    given["pos_embed"] = given["pos_embed"][0]
    for name, value in given.items():
        made |= _split(name, value) if ".qkv." in name else {_renamed(name): value}
    return made


# ---- the tower


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
    """Pixels, normalised by the recipe's mean and deviation → vectors [B, D], float32, of the norm
    1 if ``normalize``."""

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
        ConfigError: one is missing, or the folder is none of pictures.
    """
    check_use(folder, _USE)
    names = ["config.json", *weight_names(folder, _USE), _preprocessor(folder)]
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


def _preprocessor(folder: Path) -> str:
    """The file that says how pictures are made ready: transformers takes the second where that has
    it."""
    first, second = PREPROCESSORS
    if (folder / second).is_file() and "image_processor" in read_json(folder / second, _USE, dict):
        return second
    return first


def load_tower(folder: Path, files: dict[str, Path]) -> tuple[Any, Recipe]:
    """(the tower in float32, what becomes of a picture before it).

    Raises:
        ConfigError: a model of another kind, or something in it is not known.
        ModelError: a file is damaged, or weights are missing.
    """
    try:
        tower, recipe, loading = (_of_open_clip if WEIGHTS in files else _of_transformers)(
            folder, files
        )
    except PrecomputeError:
        raise
    except Exception as exc:
        # transformers raises many errors for a damaged file
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
        name for name in loading["unexpected_keys"] if TOWER_TENSORS.why_harmless(name) is None
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
    read = read_json(files["config.json"], _USE, dict)
    if (kind := read.get("model_type")) not in KINDS:
        raise ConfigError(f"image_encoder: {folder} is a {kind}: {', '.join(KINDS)} are computed")
    check_config(read, files["config.json"], _USE)
    for part in ("vision_config", "vision_config_dict"):
        if isinstance(read.get(part), dict):
            inner = {**read[part], "model_type": f"{kind}_vision_model"}
            check_config(inner, files["config.json"], _USE)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    about = files[list(files)[-1]]
    of = read_json(about, _USE, dict)
    if "image_processor" in of:
        PROCESSOR.check(of, about, _USE)
        of = of["image_processor"]
    PREPROCESSOR.check({k: v for k, v in of.items() if v is not None}, about, _USE)
    recipe = read_recipe(of)
    for name, file in files.items():
        if name.endswith(".safetensors"):
            check_floats(file, TOWER_TENSORS, _USE)
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
    """Within the block transformers does not report the other tower's weights, which are not
    used."""
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


# ---- the same by the library itself


def by_transformers(
    path: str, column: str, output: str, files: str | None, normalize: bool
) -> Callable[[pa.RecordBatch], Features]:
    """Vectors as transformers has them, on the CPU in float32: its own image processor, by Pillow,
    and the whole model's image features, or the tower that the folder is of."""
    from transformers import AutoImageProcessor, AutoModel

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    whole = config.model_type in ("clip", "siglip")
    kind: Any = AutoModel if whole else KINDS[config.model_type]
    model: Any = kind.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()
    processors: Any = AutoImageProcessor
    processor = processors.from_pretrained(path, local_files_only=True, backend="pil")

    @torch.inference_mode()
    def vectors(images: Sequence[Any]) -> torch.Tensor:
        pixel_values = processor(images=list(images), return_tensors="pt")["pixel_values"]
        found = (model.get_image_features if whole else model)(pixel_values=pixel_values)
        if isinstance(found, torch.Tensor):
            return found
        embeds = getattr(found, "image_embeds", None)
        made: torch.Tensor = found.pooler_output if embeds is None else embeds
        return made

    return _by_pictures(vectors, column, output, files, normalize)


def by_open_clip(
    path: str, column: str, output: str, files: str | None, normalize: bool
) -> Callable[[pa.RecordBatch], Features]:
    """Vectors as open_clip has them, on the CPU in float32."""
    import open_clip

    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{path}", device="cpu")
    model.eval()

    @torch.inference_mode()
    def vectors(images: Sequence[Any]) -> torch.Tensor:
        found = model.encode_image(torch.stack([preprocess(one) for one in images]))
        # with `output_tokens` what else is given out follows
        made: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return made

    return _by_pictures(vectors, column, output, files, normalize)


def _by_pictures(
    vectors: Callable[[Sequence[Any]], torch.Tensor],
    column: str,
    output: str,
    files: str | None,
    normalize: bool,
) -> Callable[[pa.RecordBatch], Features]:
    def predict(batch: pa.RecordBatch) -> Features:
        images = [
            upright(value if isinstance(value, bytes) else Path(str(files), value).read_bytes())
            for value in batch.column(column).to_pylist()
        ]
        found = vectors(images).float()
        found = torch.nn.functional.normalize(found, dim=1) if normalize else found
        return {output: found.numpy()}

    return predict
