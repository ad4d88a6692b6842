"""Transformer: the model and tokenizer of a folder, by transformers: which are known to come out right, and what is to be known of them.
And attention over texts laid end to end."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from precompute.project_module import described
from precompute.store.errors import ConfigError, ModelError

# a run has its own progress; this one ends up in logs
transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

ENCODERS = (
    "albert",
    "bert",
    "camembert",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "eurobert",
    "gte",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
    "xlm-roberta",
)
DECODERS = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the transformers whose values were compared with sentence-transformers' in batches padded at the end. What is padding is masked, or
comes after all that can see it, and a decoder's positions are relative: nothing changes, whatever side its tokenizer pads on."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt")


def model_files(folder: Path, use: str = "text_encoder") -> dict[str, Path]:
    """The transformer's and the tokenizer's files, by name.

    Raises:
        ConfigError: one is missing.
    """
    weights = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    # a large model's, in several files
    if index.is_file() and not (folder / weights[0]).is_file():
        try:
            weights = [index.name, *sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as exc:
            raise ModelError(f"{use}: {index} is damaged: {exc}") from exc
    needed = ["config.json", *weights, "tokenizer.json"]
    for name in needed:
        if not (folder / name).is_file():
            raise ConfigError(f"{use}: {folder} has no {name}; give the folder of a model saved with safetensors")
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{use}: {folder} is an adapter (adapter_config.json) on another model: merge the two and save the result"
        )
    return {name: folder / name for name in (*needed, *TOKENIZER_FILES) if (folder / name).is_file()}


def model_type(file: Path, use: str = "text_encoder") -> str:
    """The ``model_type`` of a ``config.json``.

    Raises:
        ConfigError: it is none that is known to come out right here.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = str(config["model_type"])
    except (ValueError, KeyError, TypeError) as exc:
        raise ModelError(f"{use}: {file} is damaged: it names no model_type ({exc})") from exc
    # transformers' own code for the same model_type may be another model
    if "AutoModel" in (config.get("auto_map") or {}):
        raise ConfigError(
            f"{use}: {file}: the model's own code (auto_map: {config['auto_map']['AutoModel']}) is never run: write a model class of your own, "
            f"or remove auto_map where transformers' own {kind!r} is meant"
        )
    if kind not in (*ENCODERS, *DECODERS):
        raise ConfigError(
            f"{use}: {file}: model_type {kind!r} is not known to come out right in batches; {', '.join((*ENCODERS, *DECODERS))} are: "
            "write a model class of your own"
        )
    return kind


def load_transformer(folder: Path) -> tuple[Any, Any]:
    """(transformer in float32, transformers' tokenizer).

    Raises:
        ConfigError: the tokenizer works in a way that is not followed here.
        ModelError: a file is damaged, or weights are missing.
    """
    # transformers makes up what is missing, at random; only the pooler is not used here
    return _loaded(folder, AutoModel, "text_encoder", "pooler.")


def load_classifier(folder: Path) -> tuple[Any, Any]:
    """:func:`load_transformer` of one with a head that gives a logit for each label."""
    return _loaded(folder, AutoModelForSequenceClassification, "text_classifier")


def _loaded(folder: Path, kind: Any, use: str, unused: str | None = None) -> tuple[Any, Any]:
    try:
        # transformers makes up one from other files when this is damaged
        Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        transformer, loading = kind.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as exc:
        # the tokenizers library raises a bare Exception, safetensors one of its own
        raise ModelError(f"{use}: {folder} does not load: {described(exc)}") from exc
    missing = sorted(name for name in loading["missing_keys"] if unused is None or not name.startswith(unused))
    if missing:
        raise ModelError(f"{use}: {folder} has no weights for {', '.join(missing[:3])}")
    if tokenizer.truncation_side != "right":
        raise ConfigError(
            f"{use}: {folder}/tokenizer_config.json: truncation_side is {tokenizer.truncation_side}; only right is understood"
        )
    if getattr(transformer.config, "use_cache", False):
        # nothing is generated
        transformer.config.use_cache = False
    return transformer, tokenizer


def longest_input(requested: int | None, folders: int | None, transformer: Any, tokenizer: Any, use: str = "text_encoder") -> int:
    """The longest input: as requested; else as the folder says; else as ``sentence_transformers…Transformer`` finds it.

    Raises:
        ConfigError: the model cannot take it, or nobody says.
    """
    config = transformer.config
    declared = getattr(config, "max_position_embeddings", -1)
    table = _positions(transformer)
    if requested is not None:
        most = table or max(declared, folders or 0)
        if not 2 < requested <= most:
            raise ConfigError(f"{use}: max_tokens is {requested}, this model takes 3 to {most}")
        return requested
    longest = folders
    if longest is None:
        longest = tokenizer.model_max_length if declared == -1 else min(tokenizer.model_max_length, declared)
    longest = min(longest, table or longest)
    # transformers writes 1e30 for none
    if not 2 < longest < 2**24:
        raise ConfigError(
            f"{use}: the folder names no longest input that can be used ({longest}): set max_tokens in the model's args"
        )
    return int(longest)


def _positions(transformer: Any) -> int | None:
    """Tokens that a learned table of positions has room for, of which RoBERTa's kind begins behind the padding's; None without a table."""
    for module in transformer.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding):
            padding = getattr(module, "padding_idx", None)
            return table.num_embeddings - (padding + 1 if isinstance(padding, int) else 0)
    return None


def transformer_flops(transformer: Any) -> tuple[float, float]:
    """Floating-point operations (per token, per pair of tokens), of the matrix products."""
    config = transformer.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    weights = sum(
        module.weight.numel()
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.startswith("pooler")
    )
    # ALBERT's layers are one
    shared = config.num_hidden_layers // getattr(config, "num_hidden_groups", config.num_hidden_layers)
    return 2.0 * weights * shared, 4.0 * config.num_hidden_layers * width


ATTENTION = "precompute_unpadded"
"""What a transformers model is given as its ``attn_implementation``."""

CAPABILITY = (8, 0)
"""Of the GPUs that FlashAttention 2 has kernels for: Ampere's and later ones."""
MOST_DIM = 256
"""Of a head, in its kernels; and a multiple of 8."""


def is_available(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether this GPU and this torch compute attention without padding, for heads of ``dim`` numbers; by trying it, too."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or dim > MOST_DIM or dim % 8:
        return False
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    starts = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    query, key, value = torch.linspace(-1, 1, 3 * 5 * 2 * dim, device=device).to(dtype).reshape(3, 1, 2, 5, dim)
    try:
        found, _ = unpadded_attention(torch.nn.Identity(), query, key, value, None, starts=starts, longest=3)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        # a build without it, or another signature: texts are padded
        return False
    return torch.allclose(found.float(), _text_by_text(query, key, value, starts, None).float(), atol=0.02)


def unpadded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    starts: torch.Tensor,
    longest: int,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax attention within each text (Vaswani et al. 2017; laid out as FlashAttention's ``varlen``, Dao 2023).

    Args:
        module: the layer; not used.
        query: [1, heads, tokens, dim]; ``key`` and ``value`` likewise.
        attention_mask: not used: there is no padding.
        starts: int32 [texts + 1]: text ``i`` is tokens ``starts[i]`` to ``starts[i + 1]``.
        longest: tokens of the longest text.
        scaling: of the products; 1/√dim by default.

    Returns:
        ([1, tokens, heads, dim], None).
    """
    if not query.is_cuda:
        return _text_by_text(query, key, value, starts, scaling), None
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # [tokens, heads, dim]
    out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling)
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0), None


def _text_by_text(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """[1, heads, tokens, dim] each → [1, tokens, heads, dim]."""
    texts = [
        torch.nn.functional.scaled_dot_product_attention(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scale=scaling)
        for a, b in itertools.pairwise(starts.tolist())
    ]
    return torch.cat(texts, dim=2).transpose(1, 2)


def _no_mask(*_: Any, **__: Any) -> None:
    """transformers makes no mask where there is no padding."""


AttentionInterface.register(ATTENTION, unpadded_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)
