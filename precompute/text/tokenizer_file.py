"""Tokenizer file: a folder's tokenizer.json as the tokenizers library reads it, and the keys of the
files beside it, by which transformers makes a tokenizer of it."""

from __future__ import annotations

from collections.abc import Iterator
from json import loads
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from precompute.foreign_file import KnownKeys, read_json
from precompute.registry import described
from precompute.store.errors import ConfigError, ModelError

TOKENIZER = KnownKeys(
    "tokenizer.json",
    used=(
        "version",
        "truncation",
        "padding",
        "added_tokens",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "model",
    ),
    harmless={
        "*.add_prefix_space": "the older name of prepend_scheme, which the tokenizers library reads"
        " and writes by its newer one",
        "*.str_rep": "the replacement once more, which the tokenizers library derives from it",
    },
    # at random, of each text anew
    fixed={"model.dropout": (None, 0.0, 0)},
)
"""Keys; below them, what the tokenizers library read is what it writes again, and a key that it
does not is none that is known."""

_KEPT = (
    "tokenizer_class",
    "backend",
    "model_max_length",
    "model_input_names",
    "added_tokens_decoder",
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
    "*_token",
    "split_special_tokens",
    "truncation_side",
    "do_lower_case",
    "strip_accents",
    "tokenize_chinese_chars",
    "never_split",
    "add_prefix_space",
    "add_bos_token",
    "add_eos_token",
    "add_dummy_prefix",
    "trim_offsets",
    "legacy",
    "keep_accents",
    "remove_space",
    "do_split",
    "split_by_punct",
    "vocab_type",
    "unk_id",
    "sp_model_kwargs",
    "fix_mistral_regex",
    "pad_token_id",
    "word_tokenizer_type",
    "subword_tokenizer_type",
)
_NOT_OF_VALUES = {
    "padding_side": "batches are padded at the end, and padding is masked",
    "pad_to_multiple_of": "batches are padded to their longest text, and padding is masked",
    "pad_token_type_id": "padding is masked",
    "padding": "batches are padded to their longest text, and padding is masked",
    "max_length": "the longest input is model_max_length, or the module's own",
    "max_len": "the longest input is model_max_length, or the module's own",
    "model_max_len": "the longest input is model_max_length, or the module's own",
    "stride": "a text is cut once, at its end",
    "truncation": "a text is cut at its end",
    "truncation_strategy": "a text is cut at its end",
    "do_basic_tokenize": "of a tokenizer in Python; tokenizer.json has the rules",
    "clean_up_tokenization_spaces": "of texts made from tokens",
    "spaces_between_special_tokens": "of texts made from tokens",
    "errors": "of texts made from tokens",
    "chat_template": "texts are no messages",
    "use_default_system_prompt": "texts are no messages",
    "response_schema": "texts are no messages",
    "processor_class": "what transformers calls a tokenizer beside a picture's processor",
    "special_tokens_map_file": "a path of the machine that it was saved on",
    "tokenizer_file": "a path of the machine that it was saved on",
    "vocab_file": "a path of the machine that it was saved on; tokenizer.json has the vocabulary",
    "merges_file": "a path of the machine that it was saved on; tokenizer.json has the merges",
    "name_or_path": "where it came from",
    "is_local": "where it came from",
    "local_files_only": "where it came from",
    "from_slow": "how it was made",
    "use_fast": "a tokenizer.json is read in any case",
    "tokenizer_type": "what it is called",
    "language": "what it is called",
    "device_map": "of weights",
    "trust_remote_code": "a folder's own code is never run",
    "*_token_type_id": "padding is masked",
}

TOKENIZER_CONFIG = KnownKeys(
    "tokenizer_config.json",
    used=_KEPT,
    harmless=_NOT_OF_VALUES,
    refused={
        "auto_map": "the tokenizer's own code, which is never run: save the tokenizer as"
        " transformers' own class, or remove auto_map where that is meant"
    },
)
"""Keys of which transformers' own tokenizers take notice, and those of which no value depends."""

SPECIAL_TOKENS = KnownKeys(
    "special_tokens_map.json",
    used=("*_token", "additional_special_tokens", "extra_special_tokens"),
)

MAKE_TOKENIZER = (
    "python -c \"from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('{folder}')"
    ".save_pretrained('{folder}')\""
)
"""The command that writes a tokenizer.json, of a folder that has only its vocabulary."""


def read_tokenizer(file: Path, use: str) -> Tokenizer:
    """A ``tokenizer.json``, of which each key was understood.

    Raises:
        ConfigError: it has a key that is not known, or a setting that is not followed.
        ModelError: it is damaged.
    """
    content = read_json(file, use, dict)
    try:
        tokenizer = Tokenizer.from_file(str(file))
        written = loads(tokenizer.to_str())
    except BaseException as exc:
        # a bare Exception is all that the library raises, and a panic of its Rust is not even that
        if isinstance(exc, Exception) or type(exc).__name__ == "PanicException":
            raise ModelError(f"{use}: {file} is damaged: {described(exc)}") from exc
        raise
    model = content.get("model")
    dropout = {"model.dropout": model["dropout"]} if "dropout" in (model or {}) else {}
    TOKENIZER.check(content | dropout | dict(_lost(content, written)), file, use)
    return tokenizer


def _lost(given: Any, written: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Keys below the first ones, with their values, that the library did not write again."""
    if isinstance(given, dict) and isinstance(written, dict):
        for key, value in given.items():
            if at and key not in written:
                yield at + key, value
            # millions of tokens, which the library reads one by one
            elif at + key not in ("model.vocab", "model.merges"):
                yield from _lost(value, written.get(key), f"{at}{key}.")
    elif isinstance(given, list) and isinstance(written, list):
        for number, (value, again) in enumerate(zip(given, written, strict=False)):
            yield from _lost(value, again, f"{at}{number}.")


def check_tokenizer_settings(folder: Path, tokenizer: Tokenizer, use: str) -> None:
    """Refuse what is not known in the files beside a ``tokenizer.json``, and a side to cut at that
    is not followed.

    Args:
        tokenizer: what :func:`read_tokenizer` made of it.

    Raises:
        ConfigError: names the file, the key and the remedy.
        ModelError: a file is damaged.
    """
    side, where = None, ""
    for name, known in (
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("special_tokens_map.json", SPECIAL_TOKENS),
    ):
        file = folder / name
        if file.is_file():
            content = read_json(file, use, dict)
            known.check(content, file, use)
            longest = content.get("model_max_length")
            # 1e30 for none
            if type(longest) not in (int, type(None)) and longest != 1e30:
                raise ModelError(
                    f"{use}: {file} is damaged: model_max_length is {str(longest)[:80]!r}, not an"
                    " int"
                )
            if "truncation_side" in content:
                side, where = content["truncation_side"], f"{file}: truncation_side"
    # transformers takes that of tokenizer.json where its own file names none
    if not where and tokenizer.truncation is not None:
        side = tokenizer.truncation["direction"].lower()
        where = f"{folder / 'tokenizer.json'}: truncation.direction"
    if side not in (None, "right"):
        raise ConfigError(
            f"{use}: {where} is {side}; only right is understood: set it to right where texts that"
            " are too long may lose their end"
        )
