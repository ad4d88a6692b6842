"""Tiny sentence-transformers models of many shapes, with random weights, made and saved by
sentence-transformers itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, PreTrainedTokenizerFast

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports deprecates parts of itself
    from sentence_transformers import CrossEncoder as CrossEncoder
    from sentence_transformers import SentenceTransformer as SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as modules
from transformers import AutoConfig

WORDS = [
    "a",
    "heist",
    "in",
    "the",
    "snow",
    "film",
    "query",
    "passage",
    "document",
    ":",
    "read",
    "file",
    "line",
    "by",
    "it",
    "is",
    "and",
    "of",
    "over",
    "under",
    "cold",
    "warm",
]
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}
GROUPED = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "roberta": {**SMALL, "pad_token_id": 1},
    "xlm-roberta": {**SMALL, "pad_token_id": 1},
    "camembert": {**SMALL, "pad_token_id": 1},
    "mpnet": {**SMALL, "pad_token_id": 1},
    "distilbert": {
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 24,
        "max_position_embeddings": 40,
    },
    "modernbert": {
        **SMALL,
        "num_hidden_layers": 3,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
        "pad_token_id": 1,
    },
    "ernie": SMALL,
    "eurobert": GROUPED,
    "gte": SMALL,
    "nomic_bert": SMALL,
    "electra": {**SMALL, "embedding_size": 8},
    "albert": {**SMALL, "embedding_size": 8},
    "deberta-v2": {
        **SMALL,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    },
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 8},
    "gemma3_text": {**GROUPED, "use_bidirectional_attention": True, "sliding_window": 8},
}
"""``model_type`` → config, of every transformer that ``text_encoder`` takes."""

DECODERS = ("qwen2", "qwen3", "llama", "mistral")


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the kind's sort: special tokens, padding id and side, end of text."""
    if kind in (*DECODERS, "modernbert", "roberta"):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        vocabulary = {token: i for i, token in enumerate([*special, *alphabet, "he", "in", "Ġthe"])}
        made = Tokenizer(models.BPE(vocabulary, [("h", "e"), ("i", "n")]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    elif kind in ("xlm-roberta", "camembert", "gemma3_text"):
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        pieces = [
            *((s, 0.0) for s in special),
            *(("▁" + w, -2.0) for w in WORDS),
            ("▁", -3.0),
            *((c, -5.0) for c in "abcdefghijklmnopqrstuvwxyz"),
        ]
        made = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        special = (
            ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
            if kind == "mpnet"
            else ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
        )
        letters = [p + c for c in "abcdefghijklmnopqrstuvwxyz0123456789" for p in ("", "##")]
        vocabulary = {token: i for i, token in enumerate([*special, *WORDS, *letters])}
        made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=kind != "distilbert")
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first, pad, last = ("<s>", "<pad>", "</s>") if "<s>" in special else ("[CLS]", "[PAD]", "[SEP]")
    single = f"$A {last}" if kind in DECODERS else f"{first} $A {last}"
    # one more between two texts, as RoBERTa's kind has it, or segments as BERT's
    pair = (
        f"{first} $A {last} {last} $B {last}"
        if "<s>" in special
        else f"{first} $A {last} $B:1 {last}:1"
    )
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(t, made.token_to_id(t)) for t in (first, last)]
    )
    side = "left" if kind in DECODERS else "right"
    names = {"unk_token": special[3], "mask_token": special[4], "pad_token": pad, "eos_token": last}
    if single.split()[0] != "$A":
        names["cls_token"] = first
    return PreTrainedTokenizerFast(
        tokenizer_object=made, padding_side=side, model_max_length=40, **names
    )


def transformer(folder: Path, kind: str, auto: Any = AutoModel, **changes: Any) -> Path:
    """A plain transformers model, saved in ``folder``."""
    torch.manual_seed(0)
    words = tokenizer(kind)
    config = AutoConfig.for_model(
        kind,
        **{**SHAPES[kind], "vocab_size": len(words), "pad_token_id": words.pad_token_id, **changes},
    )
    model = auto.from_config(config).eval()
    with (
        torch.no_grad()
    ):  # weights of 0.02, as they are made, would leave a token's neighbours without influence
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.4, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def sentence_model(
    folder: Path,
    kind: str = "bert",
    parts: Sequence[Any] | None = None,
    *,
    pooling: Any = "mean",
    limit: int | None = None,
    **options: Any,
) -> SentenceTransformer:
    """A sentence-transformers model, saved in ``folder`` and read again; ``parts`` come after its
    pooling, one Normalize by default."""
    first = modules.Transformer(
        str(transformer(folder / "plain", kind)),
        max_seq_length=limit,
        **options.pop("transformer", {}),
    )
    pool = (
        pooling
        if isinstance(pooling, modules.Pooling)
        else modules.Pooling(first.get_embedding_dimension(), pooling)
    )
    made = SentenceTransformer(
        modules=[first, pool, *([modules.Normalize()] if parts is None else parts)],
        device="cpu",
        **options,
    )
    made.save(str(folder / "saved"), create_model_card=False)
    return read(folder / "saved")


def read(folder: Path) -> SentenceTransformer:
    """What sentence-transformers reads."""
    return SentenceTransformer(
        str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32}
    )
