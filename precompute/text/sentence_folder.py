"""Sentence folder: what the files of a sentence-transformers model say of how it computes: pooling,
layers, prompts.

``modules.json`` names the modules in their order; each has a folder with a ``config.json`` and,
where it has any, weights as safetensors. The layouts of sentence-transformers 2 to 6 are read
(6.2's source is the reference). Names in these files are looked up in a list here and never
imported; what is not in it is refused, for a vector that is nearly right is no use.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from precompute.foreign_file import KnownKeys, read_json
from precompute.safetensors_file import SCALES, read_tensors
from precompute.store.errors import ConfigError, ModelError

log = logging.getLogger(__name__)

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

MODULES = KnownKeys(
    "modules.json",
    used=("type", "path"),
    harmless={
        "idx": "the order of the list counts",
        "name": "what a module is called, once each",
    },
    fixed={"kwargs": ([],)},
)
"""Keys of each module."""

MODULE = re.compile(
    r"sentence_transformers\.(models|base\.modules|sentence_transformer\.modules)(?:\.(\w+))?\.\w+"
)
"""What a module's class was called by versions 2 to 6, with or without its file."""

POOLING = KnownKeys(
    "config.json of a Pooling module",
    used=("pooling_mode", *POOLING_MODES, "include_prompt"),
    harmless={
        "embedding_dimension": "the numbers of a token are the transformer's",
        "word_embedding_dimension": "the numbers of a token are the transformer's",
    },
)

_BETWEEN = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": ("sentence_embedding",),
}
DENSE = KnownKeys(
    "config.json of a Dense module",
    used=("in_features", "out_features", "bias", "activation_function", "use_residual"),
    fixed=_BETWEEN,
)
NORMALIZE = KnownKeys("config.json of a Normalize module", fixed=_BETWEEN)
DROPOUT = KnownKeys(
    "config.json of a Dropout module", harmless={"dropout": "of training alone"}, fixed=_BETWEEN
)
DENSE_TENSORS = KnownKeys(
    "the weights of a Dense module",
    used=("linear.weight", "linear.bias", "residual.weight"),
    refused=SCALES,
)

_OF_LOADING = "how weights are loaded; the values in float32 are the same"
TRANSFORMER = KnownKeys(
    "sentence_bert_config.json, the config of a Transformer module",
    used=(
        "max_seq_length",
        "do_lower_case",
        "transformer_task",
        "module_output_name",
        "modality_config",
        "processor_kwargs.model_max_length",
        "tokenizer_args.model_max_length",
    ),
    harmless={
        "unpad_inputs": "how a batch is laid out; the values are the same",
        **{
            f"{kind}.{name}": _OF_LOADING
            for kind in ("model_kwargs", "model_args")
            for name in (
                "attn_implementation",
                "dtype",
                "torch_dtype",
                "add_pooling_layer",
                "trust_remote_code",
            )
        },
        **{
            f"{kind}.{name}": "batches are padded at the end by a tokenizer.json"
            for kind in ("processor_kwargs", "tokenizer_args")
            for name in ("use_fast", "padding_side", "trust_remote_code")
        },
        **{
            f"{kind}.{name}": "nothing is generated, and a folder's own code is never run"
            for kind in ("config_kwargs", "config_args")
            for name in ("use_cache", "trust_remote_code")
        },
    },
)
"""Keys, and the arguments that a folder hands to transformers, by ``kind.name``."""

SETTINGS = KnownKeys(
    "config_sentence_transformers.json of a SentenceTransformer",
    used=("model_type", "prompts", "default_prompt_name", "truncate_dim"),
    harmless={
        "__version__": "what wrote it",
        "requirements": "of the libraries that it was written for",
        "similarity_fn_name": "how vectors are compared is the index's `metric`",
    },
)
CROSS_ENCODER = KnownKeys(
    "config_sentence_transformers.json of a CrossEncoder",
    used=("model_type", "prompts", "default_prompt_name", "activation_fn"),
    harmless={
        "__version__": "what wrote it",
        "requirements": "of the libraries that it was written for",
        "keep_in_fp32_modules": "how precise a layer is; of any precision the accuracy is measured",
    },
)

_LAST_HIDDEN_STATE = {"method": "forward", "method_output_name": "last_hidden_state"}
_LOGITS = {"method": "forward", "method_output_name": "logits"}


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
    use = "text_encoder"
    check_use(folder, use)
    if not has_modules(folder, use):
        return None
    modules = read_modules(folder, use)
    names = [name for name, _ in modules]
    for name in names:
        if name not in ("Transformer", "Pooling", "Dense", "Normalize", "Dropout"):
            raise ConfigError(
                f"{use}: {folder / 'modules.json'} names the module {name}; Transformer, Pooling,"
                " Dense, Normalize and Dropout are understood: write a model class of your own that"
                " runs it by sentence-transformers"
            )
    if names[:2] != ["Transformer", "Pooling"] or {"Transformer", "Pooling"} & set(names[2:]):
        raise ConfigError(
            f"{use}: {folder / 'modules.json'} lists {', '.join(names) or 'nothing'}; a"
            " Transformer, then one Pooling, then any Dense and Normalize are understood"
        )
    layers = [read_layer(name, path, use) for name, path in modules[2:]]
    max_tokens, lowercase = _transformer(modules[0][1], use, "feature-extraction")
    prompt, query_prompt, truncate_dim = _settings(folder)
    return SentenceFolder(
        modules[0][1],
        _pooling(modules[1][1]),
        tuple(layer for layer in layers if layer is not None),
        max_tokens,
        lowercase,
        prompt,
        query_prompt,
        truncate_dim,
    )


@dataclass(frozen=True, slots=True)
class CrossEncoderFolder:
    """What the folder of a cross-encoder says beside its transformer.

    Args:
        activation: dotted name of a class of ``torch.nn``; None where it names none.
        prompt: put before the first text of a pair.
        max_tokens: longest input that the folder names itself.
        lowercase: whether texts are lowercased before the tokenizer's own normalising.
    """

    activation: str | None = None
    prompt: str = ""
    max_tokens: int | None = None
    lowercase: bool = False


def read_cross_encoder(folder: Path) -> CrossEncoderFolder | None:
    """Read the folder of a cross-encoder that sentence-transformers 6 saved.

    Returns:
        None when it has no ``modules.json``: what older versions saved, or a plain transformers
        model.

    Raises:
        ConfigError: it names something that is not understood here.
        ModelError: a file is damaged.
    """
    use = "text_classifier"
    check_use(folder, use)
    if not has_modules(folder, use):
        return None
    modules, file = read_modules(folder, use), folder / SETTINGS_FILE
    if [name for name, _ in modules] != ["Transformer"] or modules[0][1] != folder:
        raise ConfigError(
            f"{use}: {folder / 'modules.json'} lists"
            f" {', '.join(name for name, _ in modules) or 'nothing'}; of cross-encoders one"
            " Transformer in the folder itself is understood: write a model class of your own"
        )
    config = read_json(file, use, dict) if file.is_file() else {}
    if config.get("model_type") != "CrossEncoder":
        raise ConfigError(
            f"{use}: {folder} is no cross-encoder: model_type in {SETTINGS_FILE} is"
            f" {config.get('model_type', 'SentenceTransformer')}, whose vectors `use: text_encoder`"
            " computes"
        )
    CROSS_ENCODER.check(_set(config), file, use)
    prompts, default = _prompts(config, file, use, {})
    max_tokens, lowercase = _transformer(folder, use, "sequence-classification")
    return CrossEncoderFolder(
        _value(config, "activation_fn", str, None, file, use),
        "" if default is None else prompts[default],
        max_tokens,
        lowercase,
    )


def check_use(folder: Path, use: str) -> None:
    """Refuse a folder that plainly is for another ``model.use``.

    Raises:
        ConfigError: names it.
        ModelError: a file that would say it is damaged.
    """
    fitting, why = _fitting_use(folder, use)
    if fitting not in (None, use):
        raise ConfigError(f"{use}: {folder} {why}: set model.use to {fitting}")


def _fitting_use(folder: Path, use: str) -> tuple[str | None, str]:
    """(``model.use`` of a folder, how it is known); (None, "") where that is not plain."""
    modules, settings, config = (
        read_json(folder / name, use) if (folder / name).is_file() else None
        for name in ("modules.json", SETTINGS_FILE, "config.json")
    )
    types = (
        [one.get("type") for one in modules or () if isinstance(one, dict)]
        if isinstance(modules, list)
        else []
    )
    first = str(types[0]).rpartition(".")[2] if types else ""
    kind = config.get("model_type") if isinstance(config, dict) else None
    if first == "StaticEmbedding" or kind == "model2vec":
        return "static_embedding", "is a static embedding, a table of vectors"
    if first == "CLIPModel" or kind in PICTURES or (folder / "open_clip_config.json").is_file():
        return "image_encoder", "embeds pictures (CLIP or SigLIP), and its texts are not computed"
    if isinstance(settings, dict) and settings.get("model_type") == "CrossEncoder":
        return "text_classifier", "is a cross-encoder"
    if first == "Transformer" and "Pooling" in (str(one).rpartition(".")[2] for one in types):
        return "text_encoder", "is a sentence-transformers model, whose vectors are computed"
    return None, ""


def has_modules(folder: Path, use: str) -> bool:
    """Whether a folder has a ``modules.json``.

    Raises:
        ConfigError: it has none, but files that only it makes count: sentence-transformers itself
            passes them over then, and takes the mean over all tokens.
    """
    if (folder / "modules.json").is_file():
        return True
    for name in (SETTINGS_FILE, "1_Pooling"):
        if (folder / name).exists():
            raise ConfigError(
                f"{use}: {folder} has {name} and no modules.json, without which"
                " sentence-transformers does not read it: fetch modules.json, too, or remove"
                f" {name} where a plain transformers model is meant"
            )
    return False


def read_modules(folder: Path, use: str) -> list[tuple[str, Path]]:
    """(class, folder) of each entry of ``modules.json``, in their order.

    Raises:
        ConfigError: an entry is not understood.
        ModelError: the file is damaged.
    """
    file = folder / "modules.json"
    entries = read_json(file, use, list)
    modules = [_module(folder, entry, use) for entry in entries]
    names = [entry.get("name", at) for at, entry in enumerate(entries)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ModelError(f"{use}: {file} is damaged: two modules have the name {twice[0]!r}")
    return modules


def _module(folder: Path, entry: Any, use: str) -> tuple[str, Path]:
    """(class, folder) of one entry of ``modules.json``."""
    file = folder / "modules.json"
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("type"), str)
        or not isinstance(entry.get("path"), str)
    ):
        raise ModelError(
            f"{use}: {file} is damaged: a module has a type and a path, found {str(entry)[:80]}"
        )
    kind, path = entry["type"], PurePosixPath(entry["path"])
    name = kind.rpartition(".")[2]
    known = MODULE.fullmatch(kind)
    if known is None or (known[2] or name).replace("_", "").lower() != name.lower():
        raise ConfigError(
            f"{use}: {file} names {kind}, code that comes with the model and is not run here: write"
            " a model class of your own that runs it"
        )
    MODULES.check(_set(entry), file, use)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"{use}: {file}: module {name} lies at {str(path)!r}, outside the folder")
    return name, folder / path


def _pooling(folder: Path) -> Pooling:
    file, use = folder / "config.json", "text_encoder"
    config = _set(_config(file, use))
    flags = [name for name in POOLING_MODES if name in config]
    modes = config.get(
        "pooling_mode", [POOLING_MODES[name] for name in flags if config[name]] or "mean"
    )
    if isinstance(modes, str):
        modes = [modes]
    POOLING.check(config, file, use)
    unknown = (
        [m for m in modes if m not in POOLING_MODES.values()]
        if isinstance(modes, list)
        else [modes]
    )
    if unknown or not modes:
        raise ConfigError(
            f"{use}: {file}: pooling mode {unknown[0] if unknown else modes!r} is not known;"
            f" {', '.join(POOLING_MODES.values())} are"
        )
    for name in flags:
        _value(config, name, bool, False, file, use)
    return Pooling(tuple(modes), _value(config, "include_prompt", bool, True, file, use))


def read_layer(name: str, folder: Path, use: str) -> Dense | Normalize | None:
    """What comes after the pooling; None of a Dropout, which does nothing but in training."""
    if name == "Dense":
        return _dense(folder)
    file = folder / "config.json"
    # an empty folder, which git does not keep
    config = read_json(file, use, dict) if file.is_file() else {}
    (NORMALIZE if name == "Normalize" else DROPOUT).check(_set(config), file, use)
    return Normalize() if name == "Normalize" else None


def _dense(folder: Path) -> Dense:
    file, weights, use = folder / "config.json", folder / "model.safetensors", "text_encoder"
    config = _set(_config(file, use))
    DENSE.check(config, file, use)
    dotted = _value(
        config, "activation_function", str, "torch.nn.modules.activation.Tanh", file, use
    )
    name = activation_class(dotted)
    if name is None:
        raise ConfigError(
            f"{use}: {file}: activation_function {dotted!r} is not known;"
            f" {', '.join(ACTIVATIONS)} of torch.nn are"
        )
    sizes = [_value(config, key, int, 0, file, use) for key in ("in_features", "out_features")]
    if min(sizes) < 1:
        raise ModelError(
            f"{use}: {file} is damaged: in_features and out_features are {sizes[0]} and {sizes[1]}"
        )
    if not weights.is_file():
        raise ConfigError(
            f"{use}: {folder} has no model.safetensors; save the model again with safetensors"
        )
    bias = _value(config, "bias", bool, True, file, use)
    residual = _value(config, "use_residual", bool, False, file, use)
    return Dense(weights, sizes[0], sizes[1], bias, name, residual)


def activation_class(dotted: str) -> str | None:
    """The name in :data:`ACTIVATIONS` of what a folder names by a dotted path; None of all else."""
    name = dotted.rpartition(".")[2]
    known = name in ACTIVATIONS and dotted in (ACTIVATIONS[name] + name, f"torch.nn.{name}")
    return name if known else None


def no_settings(folder: Path, use: str) -> None:
    """Refuse what ``config_sentence_transformers.json`` may say of how vectors are made.

    Raises:
        ConfigError: it has a prompt, or cuts vectors.
        ModelError: it is damaged.
    """
    file = folder / SETTINGS_FILE
    if not file.is_file():
        return
    config = _set(read_json(file, use, dict))
    SETTINGS.check(config, file, use)
    prompts, _ = _prompts(config, file, use, {})
    said = {**{f"prompts.{name}": text for name, text in prompts.items()}, **config}
    for name in (*(f"prompts.{name}" for name in prompts), "truncate_dim"):
        if said.get(name):
            raise ConfigError(
                f"{use}: {file}: {name} is {said[name]!r}, which is not computed here: have the"
                " source put prompts before its texts, and save shorter tables"
            )


def _transformer(folder: Path, use: str, task: str) -> tuple[int | None, bool]:
    """(longest input, whether to lowercase), as the Transformer module's own config says.

    Args:
        task: ``transformer_task`` of what it is read for.
    """
    file = next((folder / name for name in TRANSFORMER_CONFIGS if (folder / name).is_file()), None)
    if file is None:
        return None, False
    config = _set(read_json(file, use, dict))
    limit = _value(config, "max_seq_length", int, None, file, use)
    lowercase = _value(config, "do_lower_case", bool, False, file, use)
    flat: dict[str, Any] = {}
    for key, value in config.items():
        nested = key.endswith(("_kwargs", "_args")) and isinstance(value, dict)
        flat |= {f"{key}.{name}": one for name, one in value.items()} if nested else {key: value}
    for key in ("processor_kwargs.model_max_length", "tokenizer_args.model_max_length"):
        limit = _value(flat, key, int, limit, file, use)
    classifies = task == "sequence-classification"
    expected = {
        "transformer_task": task,
        "module_output_name": "scores" if classifies else "token_embeddings",
    }
    for key, value in expected.items():
        # what is not set is that of an encoder
        if config.get(key, None if not classifies else "") not in (None, value):
            raise ConfigError(
                f"{use}: {file}: {key} is {config.get(key)!r}; only {value} is understood"
            )
    output = _LOGITS if classifies else _LAST_HIDDEN_STATE
    modalities = config.get("modality_config") or {"text": output}
    if modalities != {"text": output}:
        how = (
            "renders texts by a chat template"
            if "message" in modalities
            else f"is more than the {'logits' if classifies else 'last hidden state'} of a text"
        )
        raise ConfigError(
            f"{use}: {file}: modality_config {how}; only text → forward →"
            f" {output['method_output_name']} is understood"
        )
    TRANSFORMER.check(flat, file, use)
    return limit, lowercase


SETTINGS_FILE = "config_sentence_transformers.json"

PICTURES = ("clip", "clip_vision_model", "siglip", "siglip_vision_model")
"""``model_type`` of models that embed pictures."""

DOCUMENTS = ("document", "passage", "corpus")
"""Names of a document's prompt."""


def _settings(folder: Path) -> tuple[str, str, int | None]:
    """(document's prompt, query's prompt, ``truncate_dim``) of
    ``config_sentence_transformers.json``."""
    file, use = folder / SETTINGS_FILE, "text_encoder"
    if not file.is_file():
        return "", "", None
    config = read_json(file, use, dict)
    kind = config.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise ConfigError(
            f"{use}: {file}: model_type is {kind}; only SentenceTransformer makes one vector of a"
            " text"
        )
    SETTINGS.check(_set(config), file, use)
    document, query = sides(config, file, use)
    truncate_dim = _value(config, "truncate_dim", int, None, file, use)
    if truncate_dim is not None and truncate_dim < 1:
        raise ConfigError(f"{use}: {file}: truncate_dim is {truncate_dim}; it is at least 1")
    return document, query, truncate_dim


def sides(config: Mapping[str, Any], file: Path, use: str) -> tuple[str, str]:
    """(what is put before a document, what before a query).

    A side's own prompt is that of ``encode_document()`` and ``encode_query()``. They look for no
    default, but ``encode()`` does, which most models were published with: so where a side has no
    text of its own, it has the default one, unless that is the other side's by its name.

    Raises:
        ConfigError: the default is the name of no prompt.
        ModelError: the prompts are no texts.
    """
    prompts, default = _prompts(config, file, use, {"query": "", "document": ""})
    text = "" if default is None else prompts[default]
    # encode_document() would take "passage" or "corpus" where there is no "document", but the
    # library puts an empty one in every model that it loads
    document = prompts["document"] or ("" if default == "query" else text)
    query = prompts["query"] or ("" if default in DOCUMENTS else text)
    if default is not None and text != prompts["document"]:
        log.warning(
            "%s: %s: by default_prompt_name sentence-transformers' encode() puts %r before a text,"
            " and encode_document() %r; rows have %r, and queries %r: set `prompt` and"
            " `query_prompt` where others are meant",
            *(use, file, text, prompts["document"], document, query),
        )
    return document, query


def _prompts(
    config: Mapping[str, Any], file: Path, use: str, given: Mapping[str, str]
) -> tuple[dict[str, str], str | None]:
    """(prompts by name, the default one's name), with those that the library itself has."""
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        raise ModelError(
            f"{use}: {file} is damaged: prompts are texts by name, found {str(prompts)[:80]}"
        )
    texts = {**given, **{name: text or "" for name, text in prompts.items()}}
    default = _value(config, "default_prompt_name", str, None, file, use)
    if default is not None and default not in texts:
        raise ConfigError(
            f"{use}: {file}: default_prompt_name is {default!r}, and there is no such prompt"
        )
    return texts, default


def _set(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is set: null and an empty object mean nothing."""
    return {key: value for key, value in config.items() if value not in (None, {})}


def _config(file: Path, use: str) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"{use}: there is no {file}; modules.json names it")
    config: dict[str, Any] = read_json(file, use, dict)
    return config


def _value(
    config: Mapping[str, Any], key: str, kind: type, default: Any, file: Path, use: str
) -> Any:
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        raise ModelError(
            f"{use}: {file} is damaged: {key} is {str(value)[:80]!r}, not a {kind.__name__}"
        )
    return value


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
        tensors = read_tensors(layer.weights, DENSE_TENSORS, "text_encoder")
        try:
            self.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        except RuntimeError as exc:
            raise ModelError(f"text_encoder: {layer.weights} does not load: {exc}") from exc

    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out: torch.Tensor = self.activation(self.linear(x.to(dtype)).float())
        if not self.adds_input:
            return out
        return out + (x if self.residual is None else self.residual(x.to(dtype)).float())
