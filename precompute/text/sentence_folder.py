"""Sentence folder: what the files of a sentence-transformers model say of how it computes: pooling,
layers, prompts.

``modules.json`` names the modules in their order; each has a folder with a ``config.json`` and,
where it has any, weights as safetensors. The layouts of sentence-transformers 2 to 6 are read
(6.2's source is the reference). Names in these files are looked up in a list here and never
imported; what is not in it is refused, for a vector that is nearly right is no use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from precompute.store.errors import ConfigError, ModelError

POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""What each mode was called while it was a flag of its own (until version 5), in the order in which
several are laid side by side."""

ACTIVATIONS = {
    "Identity": "torch.nn.modules.linear.",
    **dict.fromkeys(
        (
            "ELU",
            "GELU",
            "Hardswish",
            "LeakyReLU",
            "LogSigmoid",
            "Mish",
            "ReLU",
            "ReLU6",
            "SELU",
            "SiLU",
            "Sigmoid",
            "Softplus",
            "Tanh",
        ),
        "torch.nn.modules.activation.",
    ),
}
"""Class of ``torch.nn`` that a Dense module may end in → the module it lies in. They are made
without arguments, as sentence-transformers does."""

TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""What the Transformer module's own config was called over time; the first that is there counts."""

_HARMLESS = {
    "model": {
        "attn_implementation",
        "dtype",
        "torch_dtype",
        "add_pooling_layer",
        "trust_remote_code",
    },
    "processor": {"model_max_length", "use_fast", "padding_side", "trust_remote_code"},
    "config": {"use_cache", "trust_remote_code"},
}
"""Arguments that a folder may hand to transformers without other values coming out in float32."""

_LAST_HIDDEN_STATE = {"method": "forward", "method_output_name": "last_hidden_state"}


@dataclass(frozen=True, slots=True)
class Pooling:
    """Token vectors → one; several modes are laid side by side. Without ``include_prompt`` the
    prompt's tokens are left out."""

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer and an activation; ``residual`` adds the input, through a second layer where
    the sizes differ."""

    weights: Path
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Tanh"
    residual: bool = False


@dataclass(frozen=True, slots=True)
class Normalize:
    """x / |x|."""


@dataclass(frozen=True, slots=True)
class SentenceFolder:
    """How a folder's model goes from a text to its vector.

    Args:
        transformer: folder of the transformer and its tokenizer.
        pooling: of its last hidden state.
        layers: what comes after, in their order.
        max_tokens: longest input that the folder names itself.
        lowercase: whether texts are lowercased before the tokenizer's own normalising.
        prompt: put before a document's text.
        query_prompt: put before a query's text.
        truncate_dim: numbers retained of each vector; what is left is not normalised again.
    """

    transformer: Path
    pooling: Pooling = Pooling()
    layers: tuple[Dense | Normalize, ...] = (Normalize(),)
    max_tokens: int | None = None
    lowercase: bool = False
    prompt: str = ""
    query_prompt: str = ""
    truncate_dim: int | None = None

    def facts(self) -> Mapping[str, Any]:
        """What decides values after the transformer, for :func:`precompute.model.digest`: a path
        stands for its file's content."""
        layers = {
            str(i): {"kind": type(layer).__name__, **asdict(layer)}
            for i, layer in enumerate(self.layers)
        }
        return {"pooling": asdict(self.pooling), "layers": layers, "lowercase": self.lowercase}


def read_sentence_folder(folder: Path) -> SentenceFolder | None:
    """Read the folder of a sentence-transformers model.

    Returns:
        None when it has no ``modules.json``: a plain transformers model.

    Raises:
        ConfigError: it names something that is not understood here; the message says what and
            where.
        ModelError: a file is damaged.
    """
    if not (folder / "modules.json").is_file():
        return None
    modules = [_module(folder, entry) for entry in _json(folder / "modules.json", list)]
    names = [name for name, _ in modules]
    if names[:2] != ["Transformer", "Pooling"] or {"Transformer", "Pooling"} & set(names[2:]):
        raise ConfigError(
            f"text_encoder: {folder / 'modules.json'} lists {', '.join(names) or 'nothing'}; a"
            " Transformer, then one Pooling, then any Dense and Normalize are understood"
        )
    layers = [
        _dense(path) if name == "Dense" else _normalize(path)
        for name, path in modules[2:]
        if name != "Dropout"
    ]
    max_tokens, lowercase = _transformer(modules[0][1])
    prompt, query_prompt, truncate_dim = _settings(folder / "config_sentence_transformers.json")
    return SentenceFolder(
        modules[0][1],
        _pooling(modules[1][1]),
        tuple(layers),
        max_tokens,
        lowercase,
        prompt,
        query_prompt,
        truncate_dim,
    )


def _module(folder: Path, entry: Any) -> tuple[str, Path]:
    """(class, folder) of one entry of ``modules.json``."""
    file = folder / "modules.json"
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("type"), str)
        or not isinstance(entry.get("path"), str)
    ):
        raise ModelError(
            f"text_encoder: {file} is damaged: a module has a type and a path, found"
            f" {str(entry)[:80]}"
        )
    kind, path = entry["type"], PurePosixPath(entry["path"])
    name = kind.rpartition(".")[2]
    if not kind.startswith("sentence_transformers."):
        raise ConfigError(
            f"text_encoder: {file} names {kind}, code that comes with the model and is not run"
            " here: write a model class of your own that runs it"
        )
    if name not in ("Transformer", "Pooling", "Dense", "Normalize", "Dropout"):
        raise ConfigError(
            f"text_encoder: {file} names the module {name} ({kind}); Transformer, Pooling, Dense,"
            " Normalize and Dropout are understood: write a model class of your own that runs it"
            " by sentence-transformers"
        )
    if entry.get("kwargs"):
        raise ConfigError(
            f"text_encoder: {file}: module {name} takes arguments with every call"
            f" ({entry['kwargs']}); none are understood"
        )
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"text_encoder: {file}: module {name} lies at {str(path)!r}, outside the folder"
        )
    return name, folder / path


def _pooling(folder: Path) -> Pooling:
    file = folder / "config.json"
    config = _json(file, dict)
    flags = [name for name in POOLING_MODES if name in config]
    modes = config.get(
        "pooling_mode", [POOLING_MODES[name] for name in flags if config[name]] or "mean"
    )
    if isinstance(modes, str):
        modes = [modes]
    _only(
        config,
        {
            *POOLING_MODES,
            "pooling_mode",
            "include_prompt",
            "embedding_dimension",
            "word_embedding_dimension",
        },
        file,
    )
    unknown = (
        [m for m in modes if m not in POOLING_MODES.values()]
        if isinstance(modes, list)
        else [modes]
    )
    if unknown or not modes:
        raise ConfigError(
            f"text_encoder: {file}: pooling mode {unknown[0] if unknown else modes!r} is not known;"
            f" {', '.join(POOLING_MODES.values())} are"
        )
    return Pooling(tuple(modes), _value(config, "include_prompt", bool, True, file))


def _dense(folder: Path) -> Dense:
    file, weights = folder / "config.json", folder / "model.safetensors"
    config = _json(file, dict)
    understood = {
        "in_features",
        "out_features",
        "bias",
        "activation_function",
        "use_residual",
        *_SENTENCE_EMBEDDING,
    }
    _only(config, understood, file)
    _on_sentence_embedding(config, file)
    dotted = _value(config, "activation_function", str, "torch.nn.modules.activation.Tanh", file)
    name = dotted.rpartition(".")[2]
    if ACTIVATIONS.get(name) is None or dotted not in (
        ACTIVATIONS[name] + name,
        f"torch.nn.{name}",
    ):
        raise ConfigError(
            f"text_encoder: {file}: activation_function {dotted!r} is not known;"
            f" {', '.join(ACTIVATIONS)} of torch.nn are"
        )
    sizes = [_value(config, key, int, 0, file) for key in ("in_features", "out_features")]
    if min(sizes) < 1:
        raise ModelError(
            f"text_encoder: {file} is damaged: in_features and out_features are {sizes[0]} and"
            f" {sizes[1]}"
        )
    if not weights.is_file():
        raise ConfigError(
            f"text_encoder: {folder} has no model.safetensors; save the model again with"
            " safetensors"
        )
    bias = _value(config, "bias", bool, True, file)
    residual = _value(config, "use_residual", bool, False, file)
    return Dense(weights, sizes[0], sizes[1], bias, name, residual)


def _normalize(folder: Path) -> Normalize:
    file = folder / "config.json"
    config = _json(file, dict) if file.is_file() else {}
    _only(config, set(_SENTENCE_EMBEDDING), file)
    _on_sentence_embedding(config, file)
    return Normalize()


_SENTENCE_EMBEDDING = ("module_input_name", "module_output_name")


def _on_sentence_embedding(config: Mapping[str, Any], file: Path) -> None:
    for key in _SENTENCE_EMBEDDING:
        if config.get(key) not in (None, "sentence_embedding"):
            raise ConfigError(
                f"text_encoder: {file}: {key} is {config[key]!r}; only sentence_embedding is"
                " understood"
            )


def _transformer(folder: Path) -> tuple[int | None, bool]:
    """(longest input, whether to lowercase), as the Transformer module's own config says."""
    file = next((folder / name for name in TRANSFORMER_CONFIGS if (folder / name).is_file()), None)
    if file is None:
        return None, False
    config = dict(_json(file, dict))
    limit = _value(config, "max_seq_length", int, None, file)
    lowercase = _value(config, "do_lower_case", bool, False, file)
    for kind, harmless in _HARMLESS.items():
        for key in (
            f"{kind}_kwargs",
            f"{kind}_args",
            "tokenizer_args" if kind == "processor" else f"{kind}_args",
        ):
            arguments = config.pop(key, None) or {}
            _only(arguments, harmless, file, f"{key}.")
            if "model_max_length" in arguments:
                limit = _value(arguments, "model_max_length", int, limit, file)
    expected = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
    for key, value in expected.items():
        if config.get(key) not in (None, value):
            raise ConfigError(
                f"text_encoder: {file}: {key} is {config[key]!r}; only {value} is understood"
            )
    modalities = config.get("modality_config") or {"text": _LAST_HIDDEN_STATE}
    if modalities != {"text": _LAST_HIDDEN_STATE}:
        how = (
            "renders texts by a chat template"
            if "message" in modalities
            else "is more than the last hidden state of a text"
        )
        raise ConfigError(
            f"text_encoder: {file}: modality_config {how}; only text → forward → last_hidden_state"
            " is understood"
        )
    _only(
        # what is not set means nothing
        {key: value for key, value in config.items() if value not in (None, {})},
        {"max_seq_length", "do_lower_case", "modality_config", "unpad_inputs", *expected},
        file,
    )
    return limit, lowercase


def _settings(file: Path) -> tuple[str, str, int | None]:
    """(document's prompt, query's prompt, ``truncate_dim``) of
    ``config_sentence_transformers.json``."""
    if not file.is_file():
        return "", "", None
    config = _json(file, dict)
    kind = config.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise ConfigError(
            f"text_encoder: {file}: model_type is {kind}; only SentenceTransformer makes one vector"
            " of a text"
        )
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        raise ModelError(
            f"text_encoder: {file} is damaged: prompts are texts by name, found {str(prompts)[:80]}"
        )
    default = _value(config, "default_prompt_name", str, None, file)
    if default is not None and default not in {*prompts, "query", "document"}:
        raise ConfigError(
            f"text_encoder: {file}: default_prompt_name is {default!r}, and there is no such prompt"
        )
    # encode_document() would take "passage" or "corpus" where there is no "document", but the
    # library puts an empty one in every model that it loads
    document, query = prompts.get("document") or "", prompts.get("query") or ""
    # a model that knows no two sides is one for encode()
    if not document and not query and default is not None:
        document = query = prompts.get(default) or ""
    truncate_dim = _value(config, "truncate_dim", int, None, file)
    if truncate_dim is not None and truncate_dim < 1:
        raise ConfigError(f"text_encoder: {file}: truncate_dim is {truncate_dim}; it is at least 1")
    return document, query, truncate_dim


def _json(file: Path, kind: type) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(
            f"text_encoder: {file} cannot be read: {exc.strerror}; modules.json names it"
        ) from exc
    except ValueError as exc:
        # not JSON, or not UTF-8
        raise ModelError(f"text_encoder: {file} is damaged: {exc}") from exc
    if not isinstance(content, kind):
        raise ModelError(
            f"text_encoder: {file} is damaged: it holds a {type(content).__name__}, not a"
            f" {kind.__name__}"
        )
    return content


def _value(config: Mapping[str, Any], key: str, kind: type, default: Any, file: Path) -> Any:
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        raise ModelError(
            f"text_encoder: {file} is damaged: {key} is {str(value)[:80]!r}, not a {kind.__name__}"
        )
    return value


def _only(
    config: Mapping[str, Any] | Sequence[str], understood: set[str], file: Path, prefix: str = ""
) -> None:
    unknown = [key for key in config if key not in understood]
    if unknown:
        raise ConfigError(
            f"text_encoder: {file} sets {prefix}{unknown[0]}, which is not understood; values could"
            " differ"
        )


# ---- Head: from a transformer's last hidden state to one vector for each text.


class Head(torch.nn.Module):
    """Hidden states → embeddings [B, ``dim``], float32, as sentence-transformers computes them; all
    but the products in float32, whatever the transformer's precision.

    Args:
        truncate_dim: numbers retained of each vector; all by default. What is left is not
            normalised again.

    Raises:
        ConfigError: a layer takes another number than the one before gives.
        ModelError: weights are missing, damaged, or of another shape.
    """

    def __init__(
        self,
        hidden_size: int,
        pooling: Pooling = Pooling(),
        layers: Sequence[Dense | Normalize] = (Normalize(),),
        truncate_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.modes, self.leaves_out_prompt = pooling.modes, not pooling.include_prompt
        self.dim = hidden_size * len(self.modes)
        self.layers = torch.nn.ModuleList()
        for layer in layers:
            if isinstance(layer, Normalize):
                self.layers.append(_Normalize())
                continue
            if layer.in_features != self.dim:
                raise ConfigError(
                    f"text_encoder: {layer.weights.parent} takes {layer.in_features} numbers, and"
                    f" what comes before it gives {self.dim}"
                )
            self.layers.append(_Dense(layer))
            self.dim = layer.out_features
        self.dim = self.dim if truncate_dim is None else min(truncate_dim, self.dim)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, T, D]; ``mask`` int64 [B, T]: 1 for a token, 2 for one of a prompt that is
        left out, 0 for padding, which is at the end."""
        if self.leaves_out_prompt:
            mask = (mask == 1).long()
        tokens = hidden.float()
        vectors = torch.cat([_pooled(mode, tokens, mask) for mode in self.modes], dim=1)
        for layer in self.layers:
            vectors = layer(vectors, hidden.dtype)
        return vectors[:, : self.dim]


def _pooled(mode: str, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, D] of ``tokens`` [B, T, D]: ``sentence_transformers…Pooling`` 6.2, ``_forward_padded``,
    for padding at the end."""
    # the first and the last that counts
    if mode in ("cls", "lasttoken"):
        place = torch.arange(mask.shape[1], device=mask.device).unsqueeze(0)
        counted = mask.amax(1) > 0
        if mode == "cls":
            chosen = torch.where(counted, torch.where(mask > 0, place, mask.shape[1]).amin(1), 0)
        else:
            chosen = (place * mask).amax(1)
        vectors = tokens.gather(1, chosen.view(-1, 1, 1).expand(-1, 1, tokens.shape[2])).squeeze(1)
        return vectors if mode == "cls" else vectors * counted.unsqueeze(1)
    if mode == "max":
        return tokens.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(1)
    weights = mask.unsqueeze(-1).to(tokens.dtype)
    # Muennighoff 2022: a token's weight is its position, from 1
    if mode == "weightedmean":
        weights = weights * torch.arange(
            1, mask.shape[1] + 1, device=mask.device, dtype=tokens.dtype
        ).view(1, -1, 1)
    total = weights.sum(1).clamp(min=1e-9)
    return (tokens * weights).sum(1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


class _Normalize(torch.nn.Module):
    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.nn.functional.normalize(x, dim=1)


class _Dense(torch.nn.Module):
    """The product in ``dtype``, which is that of the transformer and of the weights."""

    def __init__(self, layer: Dense) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias)
        self.activation: torch.nn.Module = getattr(torch.nn, layer.activation)()
        self.adds_input = layer.residual
        self.residual: torch.nn.Module | None = None
        if layer.residual and layer.in_features != layer.out_features:
            self.residual = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        try:
            self.load_state_dict(
                {name: tensor.float() for name, tensor in load_file(layer.weights).items()}
            )
        except (SafetensorError, OSError, RuntimeError) as exc:
            raise ModelError(f"text_encoder: {layer.weights} does not load: {exc}") from exc

    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out: torch.Tensor = self.activation(self.linear(x.to(dtype)).float())
        if not self.adds_input:
            return out
        return out + (x if self.residual is None else self.residual(x.to(dtype)).float())
