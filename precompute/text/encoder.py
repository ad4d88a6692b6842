"""Encoder: a BERT (:mod:`precompute.text.bert`) in bfloat16 by the C++ extension beside this file,
without padding. Where the extension was not built, or the transformer is another, torch computes
it."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from precompute.store.errors import ConfigError
from precompute.text.bert import Bert

_VERSION = 2
"""Version of the interface between this file and the extension; _encoder.cpp has it too."""

PANEL = 32
"""Columns of a weight that lie together: a head's size and the inner layer's are multiples of it.
_encoder_vectors.h has it too."""

_EMBEDDINGS = (
    "word_embeddings.weight",
    "position_embeddings.weight",
    "token_type_embeddings.weight",
    "LayerNorm.weight",
    "LayerNorm.bias",
)
_PRODUCTS = (
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    ("attention.output.dense",),
    ("intermediate.dense",),
    ("output.dense",),
)
"""Products of a layer, in the order that the extension has them; those of one line are one
product."""
_VECTORS = (
    *(f"{name}.bias" for name in (*_PRODUCTS[0], *_PRODUCTS[1])),
    *(f"attention.output.LayerNorm.{name}" for name in ("weight", "bias")),
    *(f"{name}.bias" for name in (*_PRODUCTS[2], *_PRODUCTS[3])),
    *(f"output.LayerNorm.{name}" for name in ("weight", "bias")),
)


def _extension() -> ModuleType | None:
    try:
        built = importlib.import_module("precompute.text._encoder")
    except ImportError:
        # it is built where a C++ compiler is; without it only time is lost
        return None
    # one that was built before the sources changed is as good as none: `make setup` builds it again
    return built if getattr(built, "VERSION", 0) == _VERSION else None


def kernel() -> str | None:
    """The quickest way this CPU has, ``amx`` or ``avx512``, None where there is none;
    ``ONEDNN_MAX_CPU_ISA`` lets a newer CPU compute as an older one."""
    native = _extension()
    if native is None:
        return None
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    unlimited = isa in ("", "ALL", "DEFAULT")
    for name in native.kernels():
        if name == "amx" and (unlimited or "AMX" in isa):
            return "amx"
        if name == "avx512" and (
            unlimited
            or "AMX" in isa
            or isa in ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512")
        ):
            return "avx512"
    return None


def not_understood(transformer: Any) -> str:
    """Why a transformer is not computed here, in words; an empty text where it is."""
    if not isinstance(transformer, Bert):
        return f"the transformer is no plain BERT ({type(transformer).__name__})"
    config = transformer.config
    sizes = (config.hidden_size, config.head_dim, config.intermediate_size)
    if any(size % PANEL for size in sizes):
        return (
            "a width of {}, heads of {} and an inner layer of {} numbers: only multiples of"
            f" {PANEL} are understood".format(*sizes)
        )
    return ""


class UnpaddedBert:
    """A transformer's last hidden state, of texts padded at the end; any number of threads may call
    it at once.

    Values are those of bfloat16 products added up in float32, everything else in float32. A text's
    do not depend on what else is computed, in what order, or by how many threads: they are equal to
    the last bit.

    Args:
        transformer: a :class:`~precompute.text.bert.Bert` in float32, on the CPU; its word
            embeddings are shared with it.
        kernel: ``amx``, ``avx512``, or ``plain``, which any CPU has, some hundred times slower.

    Raises:
        ConfigError: see :func:`not_understood`, or there is no such kernel here.
    """

    def __init__(self, transformer: Any, kernel: str) -> None:
        native, reason = _extension(), not_understood(transformer)
        if reason:
            raise ConfigError(reason)
        if native is None or kernel not in native.kernels():
            raise ConfigError(f"the C++ extension was not built, or this CPU has no {kernel}")
        self._native, self._kernel = native, kernel
        config = transformer.config
        weights = {name: tensor.detach() for name, tensor in transformer.state_dict().items()}
        self._shape = (
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
            config.intermediate_size,
        )
        self._epsilon = float(config.layer_norm_eps)
        self._padding = None if config.model_type == "bert" else int(config.pad_token_id)
        embeddings = [weights[f"embeddings.{name}"] for name in _EMBEDDINGS]
        layers = [f"encoder.layer.{layer}." for layer in range(config.num_hidden_layers)]
        products = [
            torch.cat([weights[f"{at}{name}.weight"] for name in names])
            for at in layers
            for names in _PRODUCTS
        ]
        self._words = embeddings[0].contiguous().numpy()
        # one text is one segment: its type is a part of every place
        self._places = (embeddings[1] + embeddings[2][0]).numpy()
        self._vectors = torch.cat(
            [*embeddings[3:], *(weights[at + name] for at in layers for name in _VECTORS)]
        ).numpy()
        self._panels = (
            torch.cat([_panels(product) for product in products]).view(torch.int16).numpy()
        )

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``ids`` and ``mask`` (0 where there is padding, which is at the end) int64 [B, T] →
        float32 [B, T, width], 0 where there is padding.

        Raises:
            ValueError: an id, or a text's length, is beyond the model's tables.
            MemoryError: there is none for a few megabytes, more with the longest text.
        """
        texts = np.ascontiguousarray(ids.numpy())
        lengths = np.count_nonzero(mask.numpy(), axis=1).astype(np.int64)
        hidden = np.zeros((*texts.shape, self._shape[1]), np.float32)
        self._native.encode(
            self._kernel,
            torch.get_num_threads(),
            self._shape,
            self._epsilon,
            self._words,
            self._places,
            self._vectors,
            self._panels,
            texts,
            self._positions(texts),
            lengths,
            hidden,
        )
        return torch.from_numpy(hidden)

    def _positions(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Row of the table of places, int64 [B, T]; RoBERTa counts tokens that are no padding (as
        :mod:`precompute.text.bert` does)."""
        if self._padding is None:
            return np.tile(np.arange(ids.shape[1], dtype=np.int64), (len(ids), 1))
        counted = ids != self._padding
        return np.where(counted, np.cumsum(counted, axis=1), 0) + self._padding


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] → bfloat16 of [out / 32][in / 2][32][2], flat: a pair of inputs for each of 32
    outputs is what one instruction takes."""
    columns, depth = weight.shape
    return (
        weight.to(torch.bfloat16)
        .view(columns // PANEL, PANEL, depth // 2, 2)
        .transpose(1, 2)
        .reshape(-1)
    )
