"""open_clip folders: the vectors of towers in open_clip's and timm's names, computed here by hand;
what is missing, of other shapes, or another tower is named."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import (
    conv2d,
    gelu,
    layer_norm,
    linear,
    normalize,
    scaled_dot_product_attention,
)

from precompute.plugins.images.tests.test_image_encoder import encoded, picture
from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError

Weights = dict[str, torch.Tensor]
CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
CLIP: dict[str, Any] = {
    "image_size": 32,
    "layers": 2,
    "width": 32,
    "head_width": 16,
    "patch_size": 8,
    "mlp_ratio": 1.5,
}
SIGLIP = {
    "image_size": 32,
    "timm_model_name": "vit_base_patch16_siglip_224",
    "timm_pool": "map",
    "timm_proj": "none",
}
SQUASHED = {
    "resize_mode": "squash",
    "interpolation": "bilinear",
    "mean": [0.5, 0.4, 0.3],
    "std": [0.5, 0.6, 0.7],
}


def drawn(shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Of norms around 1, of all others around 0."""
    torch.manual_seed(0)
    return {
        f"visual.{name}": torch.randn(shape) * 0.3
        + ("ln_" in name or "norm" in name) * name.endswith("weight")
        for name, shape in shapes.items()
    }


def block(
    name: str, attention: str, norms: str, mlp: tuple[str, str], width: int, hidden: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer; ``attention`` is how its queries, keys and values are named, and what
    follows them."""
    joined, out = attention.split()
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.attn.{joined}weight": (3 * width, width),
        f"{name}.attn.{joined}bias": (3 * width,),
    }
    shapes |= {f"{name}.attn.{out}.weight": (width, width), f"{name}.attn.{out}.bias": (width,)}
    shapes |= {f"{name}.{norms}{n}.{kind}": (width,) for n in (1, 2) for kind in ("weight", "bias")}
    shapes |= {
        f"{name}.mlp.{mlp[0]}.weight": (hidden, width),
        f"{name}.mlp.{mlp[0]}.bias": (hidden,),
    }
    return shapes | {
        f"{name}.mlp.{mlp[1]}.weight": (width, hidden),
        f"{name}.mlp.{mlp[1]}.bias": (width,),
    }


def clip_weights() -> Weights:
    shapes: dict[str, tuple[int, ...]] = {
        "conv1.weight": (32, 3, 8, 8),
        "class_embedding": (32,),
        "positional_embedding": (17, 32),
    }
    shapes |= {
        f"ln_{name}.{kind}": (32,) for name in ("pre", "post") for kind in ("weight", "bias")
    } | {"proj": (32, 8)}
    for layer in range(2):
        shapes |= block(
            f"transformer.resblocks.{layer}", "in_proj_ out_proj", "ln_", ("c_fc", "c_proj"), 32, 48
        )
    return drawn(shapes)


def siglip_weights() -> Weights:
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (24, 3, 16, 16),
        "patch_embed.proj.bias": (24,),
        "pos_embed": (1, 4, 24),
    }
    for layer in range(2):
        shapes |= block(f"blocks.{layer}", "qkv. proj", "norm", ("fc1", "fc2"), 24, 40)
    pool = block("x", "kv. proj", "norm", ("fc1", "fc2"), 24, 40)
    pool |= {
        "x.attn.kv.weight": (48, 24),
        "x.attn.kv.bias": (48,),
        "x.attn.q.weight": (24, 24),
        "x.attn.q.bias": (24,),
    }
    pool |= {"x.attn.latent": (1, 1, 24), "x.attn.norm.weight": (24,), "x.attn.norm.bias": (24,)}
    shapes |= {
        name.replace("x.", "attn_pool.").replace(".attn.", "."): shape
        for name, shape in pool.items()
        if "norm1" not in name and "norm2" not in name
    }
    shapes |= {"norm.weight": (24,), "norm.bias": (24,)}
    return drawn({f"trunk.{name}": shape for name, shape in shapes.items()})


def attended(heads: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    split = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in (q, k, v))
    return scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)


def by_hand_clip(
    w: Weights, pixels: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """As open_clip's VisionTransformer computes."""
    w = {name.removeprefix("visual."): value for name, value in w.items()}
    norm = lambda x, name: layer_norm(x, (32,), w[f"{name}.weight"], w[f"{name}.bias"])  # noqa: E731
    x = conv2d(pixels, w["conv1.weight"], stride=8).flatten(2).transpose(1, 2)
    x = torch.cat([w["class_embedding"].expand(len(x), 1, -1), x], 1) + w["positional_embedding"]
    x = norm(x, "ln_pre")
    for layer in range(2):
        at = f"transformer.resblocks.{layer}"
        qkv = linear(
            norm(x, f"{at}.ln_1"), w[f"{at}.attn.in_proj_weight"], w[f"{at}.attn.in_proj_bias"]
        ).chunk(3, 2)
        x = x + linear(
            attended(2, *qkv), w[f"{at}.attn.out_proj.weight"], w[f"{at}.attn.out_proj.bias"]
        )
        hidden = act(
            linear(norm(x, f"{at}.ln_2"), w[f"{at}.mlp.c_fc.weight"], w[f"{at}.mlp.c_fc.bias"])
        )
        x = x + linear(hidden, w[f"{at}.mlp.c_proj.weight"], w[f"{at}.mlp.c_proj.bias"])
    return norm(x, "ln_post")[:, 0] @ w["proj"]


def by_hand_siglip(
    w: Weights, pixels: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """As timm's VisionTransformer with a pool by attention computes."""
    w = {name.removeprefix("visual.trunk."): value for name, value in w.items()}
    norm = lambda x, name: layer_norm(x, (24,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)  # noqa: E731
    by = lambda x, name: linear(x, w[f"{name}.weight"], w[f"{name}.bias"])  # noqa: E731
    mlp = lambda x, at: by(act(by(x, f"{at}.mlp.fc1")), f"{at}.mlp.fc2")  # noqa: E731
    x = (
        conv2d(pixels, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=16)
        .flatten(2)
        .transpose(1, 2)
    )
    x = x + w["pos_embed"]
    for at in ("blocks.0", "blocks.1"):
        x = x + by(
            attended(12, *by(norm(x, f"{at}.norm1"), f"{at}.attn.qkv").chunk(3, 2)),
            f"{at}.attn.proj",
        )
        x = x + mlp(norm(x, f"{at}.norm2"), at)
    k, v = by(norm(x, "norm"), "attn_pool.kv").chunk(2, 2)
    x = by(
        attended(12, by(w["attn_pool.latent"].expand(len(x), -1, -1), "attn_pool.q"), k, v),
        "attn_pool.proj",
    )
    return (x + mlp(norm(x, "attn_pool.norm"), "attn_pool"))[:, 0]


def fitted(image: Image.Image, squash: bool) -> torch.Tensor:
    """Pixels as torchvision's Resize, CenterCrop and Normalize make them."""
    if squash:
        made = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR))
        mean, std = SQUASHED["mean"], SQUASHED["std"]
    else:
        width, height = (32 * side // min(image.size) for side in image.size)
        made = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
        top, left = round((height - 32) / 2), round((width - 32) / 2)
        made = made[top : top + 32, left : left + 32]
        mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return ((torch.tensor(made) / 255 - torch.tensor(mean)) / torch.tensor(std)).permute(2, 0, 1)[
        None
    ]


def saved(
    folder: Path, weights: Weights, vision: dict[str, Any], preprocess: Any = None, **model: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {
        "model_cfg": {"embed_dim": 8, "vision_cfg": vision, "text_cfg": {}, **model},
        "preprocess_cfg": preprocess,
    }
    (folder / CONFIG).write_text(json.dumps(settings))
    save_file({**weights, "token_embedding.weight": torch.zeros(3, 3)}, folder / WEIGHTS)
    return folder


def loaded(folder: Path) -> Any:
    return load_model("image_encoder", {"path": str(folder), "device": "cpu"})


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("kind", ["clip", "clip with quick_gelu", "siglip", "siglip with tanh"])
def test_vectors_are_those_of_the_tower_by_hand(tmp_path: Path, kind: str) -> None:
    # 35 × 32: the middle is cut out as torchvision does, half a pixel beside it to the even side
    images = [picture(0), picture(1, 35, 32), picture(2, 33, 64), picture(3, 39, 32)]
    quick, squash = "quick" in kind, kind != "clip"
    if kind.startswith("clip"):
        weights, act = clip_weights(), quick_gelu if quick else gelu
        saved(tmp_path, weights, CLIP, SQUASHED if squash else None, quick_gelu=quick)
        forward = by_hand_clip
    else:
        weights, act = siglip_weights(), tanh_gelu if "tanh" in kind else gelu
        name = SIGLIP["timm_model_name"] if act is gelu else "vit_base_patch32_siglip_256"
        saved(tmp_path, weights, {**SIGLIP, "timm_model_name": name}, SQUASHED, custom_text=True)
        forward = by_hand_siglip
        # timm's own beside open_clip's
        (tmp_path / "config.json").write_text('{"architecture": "vit_base_patch16_siglip_224"}')
        save_file({"norm.bias": torch.zeros(24)}, tmp_path / "model.safetensors")
    expected = normalize(
        torch.cat([forward(weights, fitted(image, squash), act) for image in images]), dim=1
    )
    made = loaded(tmp_path).compute(
        pa.record_batch({"image": [encoded(image) for image in images]})
    )["embedding"]
    np.testing.assert_allclose(made, expected.numpy(), atol=1e-5)
    assert (expected @ expected.T).min() < 0.99


def without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save_file(
            {
                key: value
                for key, value in load_file(folder / WEIGHTS).items()
                if key != f"visual.{name}"
            },
            folder / WEIGHTS,
        )

    return change


def with_vision(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        of = json.loads((folder / CONFIG).read_text())
        of["model_cfg"]["vision_cfg"] |= changes
        (folder / CONFIG).write_text(json.dumps(of))

    return change


FLAWS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), ConfigError, f"has no {WEIGHTS}"),
    "a pickle": (
        lambda folder: (folder / WEIGHTS).rename(folder / "open_clip_pytorch_model.bin"),
        ConfigError,
        "has open_clip_pytorch_model.bin, a pickle, which may run code when it is read, and no open_clip_model.safetensors: write that once by",
    ),
    "no model": (
        lambda folder: (folder / CONFIG).write_text("{}"),
        ModelError,
        "does not load: 'model_cfg' is missing",
    ),
    "cut": (
        lambda folder: (folder / WEIGHTS).write_bytes(b"\1" * 99),
        ModelError,
        "does not load: SafetensorError",
    ),
    "a tensor": (
        without("ln_post.bias"),
        ModelError,
        "has no weights for vision_model.post_layernorm.bias",
    ),
    "no proj": (without("proj"), ModelError, "does not load: 'proj' is missing"),
    "wider": (
        with_vision(width=48),
        ModelError,
        "has (32,) weights for vision_model.embeddings.class_embedding, and its configuration (48,)",
    ),
    "larger": (
        with_vision(image_size=64),
        ModelError,
        "has (17, 32) weights for vision_model.embeddings.position_embedding.weight",
    ),
    "deeper": (
        with_vision(layers=3),
        ModelError,
        "has no weights for vision_model.encoder.layers.2.",
    ),
    "flatter": (
        with_vision(layers=1),
        ModelError,
        "has weights that its configuration has no place for: vision_model.encoder.layers.1.",
    ),
    "a ResNet": (
        with_vision(layers=[3, 4, 6, 3]),
        ConfigError,
        "has a ResNet for a vision tower: of open_clip's towers the plain ViTs",
    ),
    "layer scale": (
        with_vision(ls_init_value=1e-5),
        ConfigError,
        "has ls_init_value, which is not known of vision_cfg in open_clip_config.json",
    ),
    "timm's": (
        with_vision(timm_model_name="convnext_base"),
        ConfigError,
        "has timm's convnext_base for a vision tower",
    ),
    "a list": (with_vision(image_size=[32, 16]), ConfigError, "has pictures of [32, 16]"),
    "longest": (
        lambda folder: saved(folder, clip_weights(), CLIP, {"resize_mode": "longest"}),
        ModelError,
        "it resizes by longest, bicubic: shortest and squash",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_folder_that_is_not_understood_is_named(tmp_path: Path, flaw: str) -> None:
    change, kind, message = FLAWS[flaw]
    change(saved(tmp_path / "model", clip_weights(), CLIP))
    with pytest.raises(kind, match=re.escape(message)):
        loaded(tmp_path / "model")
