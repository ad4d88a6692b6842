"""Transformer: the model and tokenizer of a folder, for the architectures whose values are known to
be right. A plain BERT is read by :mod:`precompute.text.bert`, and its tokenizer by the tokenizers
library alone; what is anything else, by transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from precompute.foreign_file import KnownKeys, read_json
from precompute.registry import described
from precompute.safetensors_file import SCALES, check_floats, read_tensors, tensor_names
from precompute.store.errors import ConfigError, ModelError, PrecomputeError
from precompute.text.bert import BERT_TENSORS, HEADS, KINDS, bert_config, load_bert
from precompute.text.config_file import check_config
from precompute.text.tokenizer_file import (
    MAKE_TOKENIZER,
    TOKENIZER_CONFIG,
    check_tokenizer_settings,
    read_tokenizer,
)

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
"""``model_type`` of the transformers whose values were compared with sentence-transformers' in
batches padded at the end. What is padding is masked, or comes after all that can see it, and a
decoder's positions are relative: nothing changes, whatever side its tokenizer pads on."""

START_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens of the first batches: on a CPU a small one stays in its cache; a GPU wants large ones, and
the engine searches on from here. MiniLM in bfloat16 took 2 % less of an AMD Zen 5's time than with
1,024."""

WEIGHTS = "model.safetensors"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
)


SHARDS = KnownKeys(
    "model.safetensors.index.json",
    used=("weight_map",),
    harmless={"metadata": "sizes, and what wrote it"},
)
TRANSFORMER_TENSORS = KnownKeys(
    "the weights of any other transformer",
    used=("(each tensor of the architecture's class in transformers)",),
    harmless={
        "*position_ids": "the numbers 0, 1, 2, …, which are counted here",
        "*token_type_ids": "zeros: one text is one segment",
    },
    refused=SCALES,
)
SPARE_TENSORS = KnownKeys(
    "the weights of any other transformer, which its class has no place for",
    harmless={
        **TRANSFORMER_TENSORS.harmless,
        "*pooler.*": "it comes after the last hidden state, which is what is read",
        **HEADS,
        "head.*": "ModernBERT's, before it predicts tokens",
        "decoder.*": "ModernBERT's, which predicts tokens",
    },
    refused=SCALES,
)

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def model_files(folder: Path, use: str = "text_encoder") -> dict[str, Path]:
    """The transformer's and the tokenizer's files, by name.

    Raises:
        ConfigError: one is missing, or there are two models.
        ModelError: the list of the weights' files is damaged.
    """
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if (folder / name).is_file():
            raise ConfigError(
                f"{use}: {folder} is an adapter, or has one ({name}), on another model: merge the"
                " two and save the result"
            )
    needed = ["config.json", *weight_names(folder, use), "tokenizer.json"]
    for name in needed:
        if not (folder / name).is_file():
            raise ConfigError(f"{use}: {folder} has no {name}; {_remedy(folder, name)}")
    return {
        name: folder / name for name in (*needed, *TOKENIZER_FILES) if (folder / name).is_file()
    }


def _remedy(folder: Path, name: str) -> str:
    if name == "tokenizer.json" and (folder / "tokenizer_config.json").is_file():
        return f"write it once by: {MAKE_TOKENIZER.format(folder=folder)}"
    if name == "tokenizer.json" and (folder / "vocab.txt").is_file():
        return f"write it once by: {MAKE_TOKENIZER.format(folder=folder)}"
    if name == WEIGHTS and any((folder / pickle).is_file() for pickle in PICKLES):
        return (
            f"it has {PICKLES[0]}, a pickle, which runs code when it is read: load the model once"
            " where you trust it, and save it with safetensors (save_pretrained does)"
        )
    if name == "config.json" and (found := sorted(folder.glob("snapshots/*/config.json"))):
        return f"it is a hub's cache: give the folder of one version in it, {found[-1].parent}"
    return "give the folder of a model saved with safetensors"


def weight_names(folder: Path, use: str) -> list[str]:
    """Names of the files that the weights are read from, the list of them first where there is
    one: a large model's lie in several.

    Raises:
        ConfigError: there are two models.
        ModelError: the list is damaged.
    """
    index = folder / f"{WEIGHTS}.index.json"
    if not index.is_file():
        return [WEIGHTS]
    files = _weight_map(index, use)
    names = sorted(set(files.values()))
    if (folder / WEIGHTS).is_file() and names != [WEIGHTS]:
        raise ConfigError(
            f"{use}: {folder} has two models: {WEIGHTS}, and the files that {index.name} names:"
            " remove those that are not meant"
        )
    return [index.name, *names]


def _weight_map(index: Path, use: str) -> dict[str, str]:
    """Tensor → file of it."""
    content = read_json(index, use, dict)
    SHARDS.check(content, index, use)
    files = content.get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(name, str) and name == Path(name).name for name in files.values()
    ):
        raise ModelError(f"{use}: {index} is damaged: its weight_map names no files of this folder")
    return files


def _check_shards(folder: Path, files: Mapping[Path, list[str]], use: str) -> None:
    """Each tensor is in one file, and in the one that the list names.

    Args:
        files: file → names of its tensors.
    """
    index = folder / f"{WEIGHTS}.index.json"
    if not index.is_file():
        return
    listed = set(_weight_map(index, use).items())
    found = {(name, file.name) for file, names in files.items() for name in names}
    if listed != found:
        name, file = min(listed ^ found)
        raise ModelError(
            f"{use}: {index} and the files beside it are not of one model: {name} is"
            f" {'not in' if (name, file) in listed else 'in'} {file}: fetch all of them again"
        )


def model_type(file: Path, use: str = "text_encoder") -> str:
    """The ``model_type`` of a ``config.json``, each key of which is known.

    Raises:
        ConfigError: it is none that is known to come out right here, or has a key that is not
            known.
        ModelError: it is damaged.
    """
    config = read_json(file, use, dict)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f"{use}: {file} is damaged: it names no model_type")
    # transformers' own code for the same model_type may be another model
    own = config.get("auto_map") or {}
    if not isinstance(own, dict) or {"AutoModel", "AutoModelForSequenceClassification"} & set(own):
        raise ConfigError(
            f"{use}: {file}: the model's own code (auto_map: {str(own)[:200]}) is never run: write"
            " a model class of your own, or remove auto_map, and save the model with transformers,"
            f" where its own {kind!r} is meant"
        )
    if kind not in (*ENCODERS, *DECODERS):
        raise ConfigError(
            f"{use}: {file}: model_type {kind!r} is not known to come out right in batches;"
            f" {', '.join((*ENCODERS, *DECODERS))} are: write a model class of your own"
        )
    check_config(config, file, use, plain=kind in KINDS)
    return kind


def load_transformer(folder: Path) -> tuple[Any, Any]:
    """(transformer in float32, its tokenizer by transformers' names).

    Raises:
        ConfigError: something in it is not known, or works in a way that is not followed here.
        ModelError: a file is damaged, or weights are missing.
    """
    return _loaded(folder, "text_encoder", _encoder)


def load_classifier(folder: Path) -> tuple[Any, Any]:
    """:func:`load_transformer` of one with a head that gives a logit for each label."""
    return _loaded(folder, "text_classifier", _classifier)


def _loaded(
    folder: Path, use: str, load: Callable[[Path], tuple[Any, Any, list[str]]]
) -> tuple[Any, Any]:
    # transformers makes up one from other files when this is damaged
    written = read_tokenizer(folder / "tokenizer.json", use)
    check_tokenizer_settings(folder, written, use)
    try:
        tokenizer, transformer, missing = load(folder)
    except PrecomputeError:
        raise
    except Exception as exc:
        # transformers raises many errors for a damaged file, and the tokenizers library a bare one
        raise ModelError(f"{use}: {folder} does not load: {described(exc)}") from exc
    if missing:
        raise ModelError(f"{use}: {folder} has no weights for {', '.join(missing[:3])}")
    if (tokenizer.pad_token_id or 0) >= transformer.config.vocab_size:
        raise ModelError(
            f"{use}: {folder} is of two models: its tokenizer pads with token"
            f" {tokenizer.pad_token_id}, and the model has {transformer.config.vocab_size}"
        )
    return transformer, tokenizer


def _encoder(folder: Path) -> tuple[Any, Any, list[str]]:
    """(tokenizer, transformer, names of the weights that are missing)."""
    use = "text_encoder"
    tokenizer = read_wordpiece(folder) or _automatic_tokenizer(folder)
    config = bert_config(read_json(folder / "config.json", use, dict))
    if config is not None:
        tensors = {
            file: read_tensors(file, BERT_TENSORS, use) for file in _weight_files(folder, use)
        }
        names = {file: tensor_names(file, use) for file in tensors}
        _check_shards(folder, names, use)
        weights = {name: w for part in tensors.values() for name, w in part.items()}
        return tokenizer, *load_bert(config, weights)
    from transformers import AutoModel

    transformer, missing = _automatic_model(folder, AutoModel, use)
    # transformers makes up what is missing, at random; only the pooler is not used here
    return tokenizer, transformer, [name for name in missing if not name.startswith("pooler.")]


def _classifier(folder: Path) -> tuple[Any, Any, list[str]]:
    from transformers import AutoModelForSequenceClassification

    return _automatic_tokenizer(folder), *_automatic_model(
        folder, AutoModelForSequenceClassification, "text_classifier"
    )


def _weight_files(folder: Path, use: str) -> list[Path]:
    return [folder / name for name in weight_names(folder, use) if not name.endswith(".json")]


def _automatic_tokenizer(folder: Path) -> Any:
    # 2.3 CPU seconds that a plain BERT does without
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _automatic_model(folder: Path, kind: Any, use: str) -> tuple[Any, list[str]]:
    """(transformers' own model in float32, names of the weights that are missing)."""
    from transformers.utils import logging

    files = _weight_files(folder, use)
    for file in files:
        check_floats(file, TRANSFORMER_TENSORS, use)
    _check_shards(folder, {file: tensor_names(file, use) for file in files}, use)
    # a run has its own progress; this one ends up in logs
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformer, loading = kind.from_pretrained(
        folder,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
        output_loading_info=True,
    )
    SPARE_TENSORS.check(sorted(loading["unexpected_keys"]), folder / WEIGHTS, use)
    if getattr(transformer.config, "use_cache", False):
        # nothing is generated
        transformer.config.use_cache = False
    return transformer, sorted(loading["missing_keys"])


def longest_input(
    requested: int | None,
    folders: int | None,
    transformer: Any,
    tokenizer: Any,
    use: str = "text_encoder",
) -> int:
    """The longest input: as requested; else as the folder says; else as
    ``sentence_transformers…Transformer`` finds it.

    Raises:
        ConfigError: the model cannot take it, or neither the folder nor the caller says it.
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
        longest = (
            tokenizer.model_max_length
            if declared == -1
            else min(tokenizer.model_max_length, declared)
        )
    longest = min(longest, table or longest)
    # transformers writes 1e30 for none
    if not 2 < longest < 2**24:
        raise ConfigError(
            f"{use}: the folder names no longest input that can be used ({longest}): set max_tokens"
            " in the model's args"
        )
    return int(longest)


def _positions(transformer: Any) -> int | None:
    """Tokens that a learned table of positions has room for, of which RoBERTa's kind begins behind
    the padding's; None without a table."""
    for module in transformer.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding):
            padding = getattr(module, "padding_idx", None)
            return table.num_embeddings - (padding + 1 if isinstance(padding, int) else 0)
    return None


def transformer_flops(transformer: Any) -> Callable[[npt.NDArray[np.int64]], float]:
    """Floating-point operations of texts of these lengths, of the matrix products: per token 2 for
    each weight of a linear layer, and 4 · length · width of attention in each layer (Kaplan et al.
    2020, table 1, forward only; a decoder's and a window's unseen half is counted)."""
    config = transformer.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    weights = sum(
        module.weight.numel()
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.startswith("pooler")
    )
    # ALBERT's layers are one
    shared = config.num_hidden_layers // getattr(
        config, "num_hidden_groups", config.num_hidden_layers
    )
    per_token, per_pair = 2.0 * weights * shared, 4.0 * config.num_hidden_layers * width
    return lambda lengths: float(per_token * int(lengths.sum()) + per_pair * int(lengths @ lengths))


# ---- WordPiece: the tokenizer of a plain BERT folder. transformers builds it again from
# tokenizer_config.json, and takes little more than the vocabulary from tokenizer.json. Where both
# say the same, the second is all there is to read; where they do not, transformers decides.

_SPECIAL = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_UNLIMITED = 10**30


@dataclass(frozen=True, slots=True)
class WordPieceTokenizer:
    """What is read of transformers' own tokenizers, under the same names.

    Args:
        model_max_length: longest input in tokens, 10³⁰ where the folder names none.
    """

    backend_tokenizer: Tokenizer
    all_special_ids: list[int]
    pad_token_id: int
    model_max_length: int
    truncation_side: str = "right"


def read_wordpiece(folder: Path) -> WordPieceTokenizer | None:
    """Read the tokenizer of a folder whose ``tokenizer.json`` is whole.

    Returns:
        None where transformers might make another one of the folder.
    """
    try:
        config, content = (
            read_json(folder / name, "text_encoder", dict)
            for name in ("tokenizer_config.json", "tokenizer.json")
        )
        special = folder / "special_tokens_map.json"
        names = read_json(special, "text_encoder", dict) if special.is_file() else {}
        if not _is_plain(config, names, content):
            return None
    except (ModelError, KeyError, TypeError, AttributeError):
        # transformers says what is wrong
        return None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    return WordPieceTokenizer(
        tokenizer,
        sorted(ids.values()),
        ids["[PAD]"],
        int(config.get("model_max_length", _UNLIMITED)),
    )


def _is_plain(
    config: Mapping[str, Any], names: Mapping[str, Any], content: Mapping[str, Any]
) -> bool:
    """Whether transformers would build what ``tokenizer.json`` says."""
    settings = {
        "backend": "tokenizers",
        "do_lower_case": True,
        "never_split": None,
        "strip_accents": None,
        "tokenize_chinese_chars": True,
        "tokenizer_class": "",
        "truncation_side": "right",
    }
    own = {**settings, **{key: value for key, value in config.items() if key in settings}}
    tokens = [
        (key, _text(value))
        for source in (config, names)
        for key, value in source.items()
        if key in _SPECIAL
    ]
    model = {key: value for key, value in content["model"].items() if key != "vocab"}
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    return (
        own["tokenizer_class"] in ("BertTokenizer", "BertTokenizerFast")
        and all(_SPECIAL[key] == token for key, token in tokens)
        and set(names) <= set(_SPECIAL)
        and all(
            key in (*settings, *_SPECIAL, "added_tokens_decoder", "model_max_length")
            or TOKENIZER_CONFIG.why_harmless(key)
            for key in config
        )
        and all(own[key] == settings[key] for key in ("backend", "never_split", "truncation_side"))
        and model
        == {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        }
        and content["normalizer"]
        == {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": own["tokenize_chinese_chars"],
            "strip_accents": own["strip_accents"],
            "lowercase": own["do_lower_case"],
        }
        and content["pre_tokenizer"] == {"type": "BertPreTokenizer"}
        and set(ids) == set(_SPECIAL.values())
        and all(content["model"]["vocab"].get(token) == at for token, at in ids.items())
        and all(
            _is_special(token)
            for token in (
                *content["added_tokens"],
                *config.get("added_tokens_decoder", {}).values(),
            )
        )
        and {int(at) for at in config.get("added_tokens_decoder", {})} <= set(ids.values())
        and _single(content["post_processor"])
        == [("[CLS]", [ids["[CLS]"]]), "A", ("[SEP]", [ids["[SEP]"]])]
        and (content.get("truncation") or {}).get("direction", "Right") == "Right"
    )


def _text(token: Any) -> str:
    """A special token's text, which is written alone or with its flags."""
    return str(
        token["content"]
        if isinstance(token, dict) and _is_special({"special": True, **token})
        else token
    )


def _is_special(token: Mapping[str, Any]) -> bool:
    return token["special"] is True and not any(
        token[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized")
    )


def _single(processor: Mapping[str, Any]) -> list[Any]:
    """What is put around one text: (special token, its ids), and the text's own name."""
    if processor["type"] != "TemplateProcessing":
        return []
    given = processor["special_tokens"]
    return [
        (
            (part["SpecialToken"]["id"], given[part["SpecialToken"]["id"]]["ids"])
            if "SpecialToken" in part
            else part["Sequence"]["id"]
        )
        for part in processor["single"]
    ]
