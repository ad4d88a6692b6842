"""WordPiece: the tokenizer of a plain BERT folder, by the tokenizers library alone.

transformers builds a BERT's tokenizer again from ``tokenizer_config.json``, and takes little more
than the vocabulary from ``tokenizer.json``. Where both files say the same, the second is all there
is to read; where they do not, transformers decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_SPECIAL = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_WITHOUT_EFFECT = {
    "added_tokens_decoder",
    "clean_up_tokenization_spaces",
    "do_basic_tokenize",
    "is_local",
    "local_files_only",
    "max_length",
    "model_max_length",
    "name_or_path",
    "pad_to_multiple_of",
    "pad_token_type_id",
    "padding_side",
    "special_tokens_map_file",
    "stride",
    "tokenizer_file",
    "truncation_strategy",
}
"""Settings of ``tokenizer_config.json`` that change no id of a text that is cut at its end and
padded elsewhere."""

_UNLIMITED = 10**30


@dataclass(frozen=True, slots=True)
class WordPieceTokenizer:
    """What is read of transformers' own tokenizers, under the same names.

    Args:
        backend_tokenizer: texts → ids.
        all_special_ids: ids of the five special tokens.
        pad_token_id: the id of what fills a batch.
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
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        special = folder / "special_tokens_map.json"
        names = json.loads(special.read_text(encoding="utf-8")) if special.is_file() else {}
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        if not _is_plain(config, names, content):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
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
        and set(config) <= {*settings, *_SPECIAL, *_WITHOUT_EFFECT}
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
