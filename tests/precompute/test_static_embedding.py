"""Static embeddings: the vectors of model2vec and of sentence-transformers, from folders of every
layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from model2vec import StaticModel
from model2vec.persistence.persistence import save_pretrained
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError
from tests.precompute.sentence_models import WORDS, SentenceTransformer, modules, tokenizer

TEXTS = ["a heist in the snow", "film", "€ cold", "read file " * 40, "warm"]
ROWS = pa.record_batch({"text": TEXTS})


def vocabulary(kind: str) -> Tokenizer:
    """A tokenizer without a hole among its ids: of words, or as a kind of transformer has it."""
    if kind != "words":
        return tokenizer(kind).backend_tokenizer
    tokens = dict.fromkeys(
        [
            "[PAD]",
            "[UNK]",
            *WORDS,
            *(p + c for c in "abcdefghijklmnopqrstuvwxyz" for p in ("", "##")),
        ]
    )
    made = Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def saved(folder: Path, kind: str = "words", **changes: Any) -> Path:
    """A model2vec folder with a table of random numbers."""
    words = vocabulary(kind)
    rng = np.random.default_rng(0)
    size = words.get_vocab_size()
    given: dict[str, Any] = {"embeddings": rng.normal(size=(size, 6)).astype(np.float32)} | changes
    config = {"normalize": True, "max_length": 12} | given.pop("config", {})
    save_pretrained(folder, tokenizer=words, config=config, create_model_card=False, **given)
    return folder


def loaded(folder: Path, **args: Any) -> Any:
    return load_model("static_embedding", {"path": str(folder), "device": "cpu", **args})


SHARED: dict[str, Any] = {
    "embeddings": np.random.default_rng(1).normal(size=(9, 6)).astype(np.float32),
    "mapping": np.arange(200) % 9,
    "weights": np.linspace(0.1, 2, 200),
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("words", {}),
        ("words", {"config": {"normalize": False, "max_length": None}}),
        ("words", {"config": {"normalize": False, "max_length": 3}}),
        ("xlm-roberta", {}),
        ("roberta", {}),
        ("words", "shared"),
    ],
)
def test_vectors_are_those_of_model2vec(tmp_path: Path, kind: str, changes: Any) -> None:
    if changes == "shared":
        size = vocabulary(kind).get_vocab_size()
        changes = {
            name: values if name == "embeddings" else values[:size]
            for name, values in SHARED.items()
        }
    saved(tmp_path, kind, **changes)
    model = loaded(tmp_path)
    prepared = model.prepare(ROWS)
    expected = StaticModel.from_pretrained(tmp_path, force_download=False).encode(TEXTS)
    good = np.setdiff1d(np.arange(len(TEXTS)), list(prepared.bad))
    made = model.land(model.launch(model.inputs(prepared, good[::-1])))["embedding"]
    np.testing.assert_allclose(made[::-1], expected[good], rtol=1e-5, atol=1e-6)
    assert not expected[list(prepared.bad)].any()


@pytest.mark.parametrize("cut", [None, "right", "left"])
@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_are_those_of_sentence_transformers(
    tmp_path: Path, normalize: bool, cut: str | None
) -> None:
    """Cut as tokenizer.json says, and not at all where it does not."""
    words = vocabulary("words")
    if cut is not None:
        words.enable_truncation(3, direction=cut)
    table = np.random.default_rng(0).normal(size=(words.get_vocab_size(), 6)).astype(np.float32)
    made: list[Any] = [
        modules.StaticEmbedding(words, embedding_weights=table),
        *([modules.Normalize()] if normalize else []),
    ]
    peer = SentenceTransformer(modules=made, device="cpu")
    peer.save(str(tmp_path), create_model_card=False)
    np.testing.assert_allclose(
        loaded(tmp_path).compute(ROWS)["embedding"], peer.encode(TEXTS), rtol=1e-5, atol=1e-6
    )


def test_a_table_in_8_bits_is_what_model2vec_computes_with(tmp_path: Path) -> None:
    size = vocabulary("words").get_vocab_size()
    table = np.random.default_rng(0).integers(-127, 127, (size, 6)).astype(np.int8)
    saved(tmp_path, embeddings=table, config={"normalize": False})
    theirs = StaticModel.from_pretrained(tmp_path, force_download=False)
    rows = pa.record_batch({"text": ["a heist in the snow", "film"]})
    np.testing.assert_allclose(
        loaded(tmp_path).compute(rows)["embedding"],
        theirs.encode(rows["text"].to_pylist()),
        rtol=1e-5,
    )


@pytest.mark.parametrize("kind", ["int16", "int32", "int64", "uint8", "bool"])
def test_a_table_in_other_whole_numbers_is_refused(tmp_path: Path, kind: str) -> None:
    """Of which model2vec makes something else."""
    size = vocabulary("words").get_vocab_size()
    saved(tmp_path)
    save_file({"embeddings": np.ones((size, 6), kind)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"embeddings is [IUB]\w+, not a float"):
        loaded(tmp_path)


def test_a_text_without_a_known_token_is_a_bad_row(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path), output="vector")
    rows = pa.record_batch({"text": ["€", "film", None]})
    assert model.unusable(rows) == {2: "text is null"}
    prepared = model.prepare(rows.slice(0, 2))
    assert prepared.bad == {0: "text has no token that the model knows"}
    made = model.land(model.launch(model.inputs(prepared, np.array([1]))))
    assert np.linalg.norm(made["vector"]) == pytest.approx(1)
    assert (
        loaded(tmp_path, normalize=False).fingerprint()
        != loaded(tmp_path).fingerprint()
        == model.fingerprint()
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"embeddings": np.ones((5, 6), np.float32)}, "its table has 5 rows, its tokenizer"),
        ({"embeddings": np.ones(500, np.float32)}, "its table has the shape [500]"),
        (
            {"embeddings": np.full((500, 6), np.inf, np.float32)},
            "its table has a number that is not finite",
        ),
        ({"mapping": np.full(500, 999)}, "its mapping names rows that are not there"),
        ({"weights": np.ones(3)}, "its weights have the shape [3]"),
        ({"mapping": np.ones(500)}, "its mapping is no list of whole numbers"),
    ],
)
def test_a_damaged_table_is_named(tmp_path: Path, damage: dict[str, Any], message: str) -> None:
    file = saved(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {name: np.ascontiguousarray(values) for name, values in (tensors | damage).items()}, file
    )
    with pytest.raises(
        ModelError, match=f"static_embedding: .* is damaged: .*{re.escape(message)}"
    ):
        loaded(tmp_path)


@pytest.mark.parametrize("length", [0, -1, 2**64, "12", 1.5])
def test_a_length_that_cuts_everything_is_named(tmp_path: Path, length: Any) -> None:
    saved(tmp_path, config={"max_length": length})
    with pytest.raises(ModelError, match=f"is damaged: .*its max_length is {length!r}"):
        loaded(tmp_path)


def test_what_is_no_such_folder_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text("{}")
    types = [
        {"type": f"sentence_transformers.models.{name}", "path": ""}
        for name in ("StaticEmbedding", "Dense")
    ]
    (tmp_path / "modules.json").write_text(json.dumps(types))
    with pytest.raises(
        ConfigError, match=r"has StaticEmbedding, Dense: StaticEmbedding, and Normalize after it"
    ):
        loaded(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(types[:1]))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer.json; give a folder that model2vec"):
        loaded(tmp_path)
