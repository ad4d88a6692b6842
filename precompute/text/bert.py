"""BERT: the encoder that most embedding models are (Devlin et al. 2018), of texts padded or laid
end to end: by torch alone, or in bfloat16 by the C++ extension beside this file.

Torch's values are those of transformers' own class to the last bit (a test compares them); without
it a process starts 2.3 CPU seconds sooner (transformers 5.23).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from precompute.foreign_file import KnownKeys
from precompute.safetensors_file import SCALES
from precompute.store.errors import ConfigError
from precompute.text.unpadded import unpadded_attention

KINDS = ("bert", "camembert", "roberta", "xlm-roberta")
"""``model_type`` of the transformers that are a BERT and nothing more; all but the first count
positions from behind the padding's."""

_HEAD = "a head of another task, behind the last hidden state, which is what is read"
HEADS: Mapping[str, str] = dict.fromkeys(
    (
        "cls.*",
        "lm_head.*",
        "qa_outputs.*",
        "classifier.*",
        "pre_classifier.*",
        "sop_classifier.*",
        "seq_relationship.*",
        "score.*",
        "predictions.*",
        "lm_predictions.*",
        "mask_predictions.*",
        "discriminator_predictions.*",
        "generator_predictions.*",
        "generator_lm_head.*",
        "vocab_transform.*",
        "vocab_layer_norm.*",
        "vocab_projector.*",
    ),
    _HEAD,
)
"""Tensors that checkpoints have beside an encoder, from what they were trained for."""

BERT_TENSORS = KnownKeys(
    "the weights of a BERT (bert, camembert, roberta, xlm-roberta)",
    used=(
        "*embeddings.word_embeddings.weight",
        "*embeddings.position_embeddings.weight",
        "*embeddings.token_type_embeddings.weight",
        "*embeddings.LayerNorm.*",
        "*encoder.layer.*",
    ),
    harmless={
        "*embeddings.position_ids": "the numbers 0, 1, 2, …, which are counted here",
        "*embeddings.token_type_ids": "zeros: one text is one segment",
        "*pooler.*": "it comes after the last hidden state, which is what is read",
        **HEADS,
    },
    refused=SCALES,
)
"""Below them, each has to have its place in what ``config.json`` describes."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
_NUMBERS = (*_SIZES, "type_vocab_size", "pad_token_id", "layer_norm_eps")
_SETTINGS: Mapping[str, Any] = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
}


class BertConfig(NamedTuple):
    """The settings of a ``config.json`` that decide values; names and units are transformers'."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    pad_token_id: int
    layer_norm_eps: float

    @property
    def head_dim(self) -> int:
        """Numbers of a head; all heads together have those of a token."""
        return self.hidden_size // self.num_attention_heads


def bert_config(config: Mapping[str, Any]) -> BertConfig | None:
    """The settings of a plain BERT; None where another activation, a decoder, relative positions or
    a missing number ask for transformers itself."""
    plain = all(config.get(name, value) == value for name, value in _SETTINGS.items())
    numbers: list[Any] = [config.get(name) for name in _NUMBERS]
    if (
        config.get("model_type") not in KINDS
        or not plain
        or not all(type(n) in (int, float) and n >= 0 for n in numbers)
    ):
        return None
    made = BertConfig(config["model_type"], *numbers)
    heads, width = made.num_attention_heads, made.hidden_size
    size = width // heads if heads and width % heads == 0 else 0
    if type(size) is not int or size < 1:
        return None
    return made


class Output(NamedTuple):
    """What transformers calls the output of a model: ``last_hidden_state`` float [B, T, width]."""

    last_hidden_state: torch.Tensor


class Bert(nn.Module):
    """Token ids → the last hidden state. Its weights have transformers' names, and no pooler.

    Args:
        device: where its weights are made, at random.
    """

    def __init__(self, config: BertConfig, device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.embeddings, self.encoder = _Embeddings(config, device), _Layers(config, device)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        longest: int = 0,
    ) -> Output:
        """Texts padded at the end, or laid end to end.

        Args:
            input_ids: int64 [B, T].
            attention_mask: int64 [B, T], not 0 where there is a token; all of them by default.
            position_ids: int64 [1, T], of texts laid end to end: each token's place in its text;
                of padded ones they are counted.
            starts: int32 [texts + 1] of texts laid end to end in one row: text ``i`` is tokens
                ``starts[i]`` to ``starts[i + 1]``.
            longest: tokens of the longest of those texts.
        """
        hidden = self.embeddings(input_ids, position_ids)
        mask = None if starts is not None or attention_mask is None else _mask(attention_mask)
        return Output(self.encoder(hidden, mask, starts, longest))


def _mask(tokens: torch.Tensor) -> torch.Tensor | None:
    """Bool [B, 1, 1, T]; None where nothing is masked, if that can be seen without making a GPU
    wait or a tracer choose."""
    mask = tokens > 0
    if not mask.is_cuda and not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)


class _Embeddings(nn.Module):
    def __init__(self, config: BertConfig, device: str) -> None:
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = _table(config.vocab_size, width, device)
        self.position_embeddings = _table(config.max_position_embeddings, width, device)
        self.token_type_embeddings = _table(config.type_vocab_size, width, device)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps, device=device)
        self.padding_idx = None if config.model_type == "bert" else config.pad_token_id

    def forward(self, ids: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        positions = self._positions(ids, places)
        # one text is one segment: its type is the first
        words = self.word_embeddings(ids) + self.token_type_embeddings.weight[0]
        normal: torch.Tensor = self.LayerNorm(words + self.position_embeddings(positions))
        return normal

    def _positions(self, ids: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        if self.padding_idx is None:
            return torch.arange(ids.shape[1], device=ids.device)[None] if places is None else places
        # as RoBERTa counts: tokens that are no padding
        counted = ids.ne(self.padding_idx).int()
        count = torch.cumsum(counted, dim=1)
        if places is not None:
            # but not those of the texts before
            first = torch.arange(ids.shape[1], device=ids.device) - places
            count = count - (count - counted).gather(1, first)
        return (count * counted).long() + self.padding_idx


class _Layers(nn.Module):
    def __init__(self, config: BertConfig, device: str) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer(config, device) for _ in range(config.num_hidden_layers))

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, starts: torch.Tensor | None, longest: int
    ) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x, mask, starts, longest)
        return x


class _Layer(nn.Module):
    def __init__(self, config: BertConfig, device: str) -> None:
        super().__init__()
        width, inner, epsilon = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.heads = config.num_attention_heads
        self.attention = nn.Module()
        self.attention.self = nn.Module()
        self.intermediate = nn.Module()
        for name in ("query", "key", "value"):
            self.attention.self.register_module(name, nn.Linear(width, width, device=device))
        self.attention.output = _normalised(width, width, epsilon, device)
        self.output = _normalised(inner, width, epsilon, device)
        self.intermediate.dense = nn.Linear(width, inner, device=device)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, starts: torch.Tensor | None, longest: int
    ) -> torch.Tensor:
        part: Any = self.attention.self
        query, key, value = (
            linear(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for linear in (part.query, part.key, part.value)
        )
        if starts is None:
            context = nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask
            ).transpose(1, 2)
        else:
            context = unpadded_attention(query, key, value, starts, longest)
        out: Any = self.attention.output
        x = out.LayerNorm(out.dense(context.flatten(2)) + x)
        up: Any = self.intermediate
        inner = nn.functional.gelu(up.dense(x))
        last: Any = self.output
        result: torch.Tensor = last.LayerNorm(last.dense(inner) + x)
        return result


def _table(rows: int, width: int, device: str) -> nn.Embedding:
    # normal numbers, which torch would draw, make it import its compiler where there is no memory
    # behind them: 0.9 s
    return nn.Embedding(
        rows, width, _weight=torch.empty(rows, width, device=device).uniform_(-1, 1)
    )


def _normalised(inputs: int, outputs: int, epsilon: float, device: str) -> nn.Module:
    module = nn.Module()
    module.dense = nn.Linear(inputs, outputs, device=device)
    module.LayerNorm = nn.LayerNorm(outputs, eps=epsilon, device=device)
    return module


def load_bert(config: BertConfig, weights: Mapping[str, torch.Tensor]) -> tuple[Bert, list[str]]:
    """(model in float32, names of the weights that are missing).

    Args:
        weights: by transformers' names, also below a head (``bert.…``) and as TensorFlow called a
            LayerNorm's (``gamma``, ``beta``); those that are harmless are left out.

    Raises:
        RuntimeError: a weight is of another shape.
        ValueError: a weight has no place, or stands there twice.
    """
    base = {"xlm-roberta": "roberta", "camembert": "roberta"}.get(
        config.model_type, config.model_type
    )
    named: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if BERT_TENSORS.why_harmless(name) is None:
            plain = (
                name.removeprefix(f"{base}.")
                .replace("LayerNorm.gamma", "LayerNorm.weight")
                .replace("LayerNorm.beta", "LayerNorm.bias")
            )
            if plain in named:
                raise ValueError(f"the weights have {plain} twice")
            named[plain] = tensor
    # without memory until it has what is loaded, and without random numbers
    bert = Bert(config, "meta")
    own = set(bert.state_dict())
    if spare := sorted(set(named) - own):
        raise ValueError(f"the weights have {spare[0]}, which config.json has no place for")
    missing = sorted(own - set(named))
    if not missing:
        # copies: a file that is written over would change the values of a process that maps it
        bert.load_state_dict(
            {name: named[name].to(torch.float32, copy=True) for name in own}, assign=True
        )
    return bert.eval(), missing


# ---- By the C++ extension: bfloat16 products, no padding.

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
