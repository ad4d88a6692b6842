"""Text classifiers: the scores of sentence-transformers' cross-encoders and of transformers'
classifiers, by their folders; pairs, labels, precisions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError
from precompute.techniques.conversion import convert
from precompute.techniques.technique import technique
from tests.precompute.sentence_models import DECODERS, SHAPES, CrossEncoder, transformer

QUERIES = ["a heist in the snow", "film", "the line is cold", "read file by line " * 20]
DOCUMENTS = ["cold film over it", "passage and document is warm", "x", "warm " * 30]
PAIRS = pa.record_batch({"query": QUERIES, "document": pa.array(DOCUMENTS).cast(pa.binary())})
KINDS = [kind for kind in SHAPES if kind not in DECODERS and kind != "gemma3_text"]


def saved(folder: Path, kind: str = "bert", segments: bool = False, **config: Any) -> Path:
    """A classifier with random weights; ``segments`` has its tokenizer tell which text a token is
    of."""
    transformer(folder, kind, AutoModelForSequenceClassification, **config)
    if segments:
        file = folder / "tokenizer_config.json"
        names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
        file.write_text(json.dumps(json.loads(file.read_text()) | names))
    return folder


def loaded(folder: Path, **args: Any) -> Any:
    return load_model(
        "text_classifier",
        {"path": str(folder), "columns": ["query", "document"], "device": "cpu", **args},
    )


@torch.inference_mode()
def logits(folder: Path, *columns: list[str], longest: int = 38) -> Any:
    """As transformers has them, a row alone, so that nothing is padded."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [
        tokenizer(*row, truncation=True, max_length=longest, return_tensors="pt")
        for row in zip(*columns, strict=True)
    ]
    return np.concatenate([model(**row).logits.numpy() for row in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_have_the_scores_of_transformers(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path, kind, num_labels=3)
    model = loaded(folder, activation="none", max_tokens=38, label="best")
    made = model.compute(PAIRS)
    expected = logits(folder, QUERIES, DOCUMENTS)
    np.testing.assert_allclose(made["score"], expected, rtol=1e-4, atol=1e-5)
    assert made["best"].to_pylist() == [f"LABEL_{n}" for n in expected.argmax(1)]
    # each row is itself, in whatever batch
    prepared = model.prepare(PAIRS)
    alone = [
        model.land(model.launch(model.inputs(prepared, np.array([row]))))["score"][0]
        for row in range(4)
    ]
    np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-5)


def test_of_a_pair_the_segments_count(tmp_path: Path) -> None:
    folder = saved(tmp_path / "with", segments=True, num_labels=1)
    made = loaded(folder, activation="none", max_tokens=38).compute(PAIRS)["score"]
    np.testing.assert_allclose(made, logits(folder, QUERIES, DOCUMENTS)[:, 0], rtol=1e-4, atol=1e-5)
    other = loaded(
        saved(tmp_path / "without", num_labels=1), activation="none", max_tokens=38
    ).compute(PAIRS)["score"]
    assert not np.allclose(made, other, atol=1e-4)


SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("config", "args", "expected"),
    [
        ({"num_labels": 1}, {}, "sigmoid"),
        ({"num_labels": 3}, {}, "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, {}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, {}, "none"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": IDENTITY}}, {}, "none"),
        ({"num_labels": 3, "sbert_ce_default_activation_function": SIGMOID}, {}, "sigmoid"),
        ({"num_labels": 3}, {"activation": "none"}, "none"),
    ],
)
def test_the_folder_says_what_becomes_of_the_logits(
    tmp_path: Path, config: Any, args: Any, expected: str
) -> None:
    folder = saved(tmp_path, **config)
    raw = torch.from_numpy(logits(folder, QUERIES))
    wanted = {"none": raw, "sigmoid": raw.sigmoid(), "softmax": raw.softmax(-1)}[expected].numpy()
    made = loaded(folder, columns="query", max_tokens=38, **args).compute(PAIRS)["score"]
    np.testing.assert_allclose(
        made, wanted[:, 0] if config["num_labels"] == 1 else wanted, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("labels", "given"),
    [
        (1, {}),
        (1, {"activation_fn": torch.nn.Identity()}),
        (1, {"activation_fn": torch.nn.ELU()}),
        (3, {}),
        (3, {"activation_fn": torch.nn.Sigmoid()}),
        (3, {"prompts": {"ask": "query : "}, "default_prompt_name": "ask"}),
        (3, {"prompts": {"ask": "query : "}}),
        (1, {"max_length": 9}),
    ],
    ids=[
        "one label",
        "Identity",
        "ELU",
        "three labels",
        "Sigmoid",
        "a default prompt",
        "a prompt",
        "max_length",
    ],
)
def test_a_cross_encoder_has_the_scores_of_predict(
    tmp_path: Path, labels: int, given: dict[str, Any]
) -> None:
    """As sentence-transformers 6 saves it, with all that it says beside the model."""
    theirs = CrossEncoder(
        str(saved(tmp_path / "plain", num_labels=labels, problem_type="regression")),
        device="cpu",
        **given,
    )
    theirs.save(str(tmp_path / "saved"), create_model_card=False)
    texts = list(zip(QUERIES, DOCUMENTS, strict=True))
    made = loaded(tmp_path / "saved").compute(PAIRS)["score"]
    expected = CrossEncoder(str(tmp_path / "saved"), device="cpu").predict(texts)
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(made, theirs.predict(texts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "entry",
    [
        {"sentence_transformers": {"activation_fn": IDENTITY, "version": "5.1.0"}},
        {"sentence_transformers": {"version": "5.1.0"}},
        {"sbert_ce_default_activation_function": IDENTITY},
    ],
)
@pytest.mark.parametrize("labels", [1, 3])
def test_an_older_cross_encoder_has_the_scores_of_predict(
    tmp_path: Path, labels: int, entry: dict[str, Any]
) -> None:
    folder = saved(tmp_path, num_labels=labels, **entry)
    texts = list(zip(QUERIES, DOCUMENTS, strict=True))
    expected = CrossEncoder(str(folder), device="cpu").predict(texts)
    np.testing.assert_allclose(
        loaded(folder).compute(PAIRS)["score"], expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["fp32-onednn", "bf16-eager"])
def test_it_computes_in_other_precisions(tmp_path: Path, name: str) -> None:
    model = loaded(saved(tmp_path, segments=True, num_labels=3))
    exact = model.compute(PAIRS)["score"]
    prepared = model.prepare(PAIRS)
    convert(model, technique(name), lambda: [model.tensors(prepared, np.arange(n)) for n in (2, 4)])
    np.testing.assert_allclose(
        model.compute(PAIRS)["score"], exact, atol=1e-5 if name.startswith("fp32") else 0.05
    )


def test_bad_texts_are_bad_rows(tmp_path: Path) -> None:
    rows = pa.record_batch(
        {"query": ["a", None, " ", "b"], "document": [b"c", b"d", b"\xff", b"\xff"]}
    )
    model = loaded(saved(tmp_path))
    reason = "document is not UTF-8: invalid start byte at byte 0"
    assert model.unusable(rows) == {1: "query is null", 2: "query is empty", 3: reason}


@pytest.mark.parametrize(
    ("config", "args", "message"),
    [
        ({}, {"columns": ["a", "b", "c"]}, "columns is a text column, or a list of two"),
        ({}, {"activation": "tanh"}, "activation is none, sigmoid, softmax, got 'tanh'"),
        ({}, {"label": "score"}, "label and output are both 'score'"),
        (
            {"num_labels": 1},
            {"label": "best"},
            "has one label, which is a score: leave out `label`",
        ),
        ({}, {"max_tokens": 41}, "max_tokens is 41, this model takes 3 to 40"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.Softmax"}},
            {},
            "names the activation 'torch.nn.Softmax'",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, config: Any, args: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"text_classifier: .*{re.escape(message)}"):
        loaded(saved(tmp_path, **config), **args)


def test_an_encoder_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"text_classifier: .* has no weights for classifier"):
        loaded(transformer(tmp_path, "bert"))
    (tmp_path / "decoder").mkdir()
    with pytest.raises(ConfigError, match=r"text_classifier: .* is a decoder \(qwen2\)"):
        loaded(transformer(tmp_path / "decoder", "qwen2"))
