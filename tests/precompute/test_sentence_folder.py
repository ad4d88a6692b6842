"""A sentence-transformers folder: the values of sentence-transformers itself, and what is refused
by name."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from precompute.jobs.cli import main
from precompute.models.text_encoder import TextEncoder
from precompute.store.errors import ConfigError, ModelError
from precompute.store.wire.lookup_options import LookupOptions
from precompute.techniques.conversion import convert
from precompute.techniques.machine import has_bf16
from precompute.techniques.technique import technique
from precompute.text.sentence_folder import DOCUMENTS
from precompute.text.transformer import DECODERS, ENCODERS
from tests.fixtures import MakeProject
from tests.precompute.sentence_models import (
    SHAPES,
    SentenceTransformer,
    modules,
    read,
    sentence_model,
    transformer,
)

TEXTS = [
    "a heist in the snow",
    "x",
    "Read a FILE line by line, and over it",
    "snow " * 60,
    "  the cold\n\nsnow  ",
    "[CLS] <s> the <pad> film [SEP] </s>",
    "日本語 é the",
]
PROMPTS = {"query": "query : ", "document": "the passage document : "}


def encode(encoder: TextEncoder, texts: Sequence[str] = TEXTS) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = encoder.compute(
        pa.record_batch({"text": pa.array(texts, pa.string())})
    )["embedding"]
    return values


def same(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    assert np.abs(expected[0] - expected[1:]).max(1).min() > 0.01  # the texts differ by far more


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SentenceTransformer]:
    """A BERT with prompts, mean pooling, a Dense layer and normalising."""
    folder = tmp_path_factory.mktemp("made")
    dense = modules.Dense(16, 8, activation_function=torch.nn.Tanh())
    return folder / "saved", sentence_model(
        folder, parts=[dense, modules.Normalize()], prompts=PROMPTS, limit=32
    )


@pytest.fixture
def copied(made: tuple[Path, SentenceTransformer], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "copied"))


def change(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    config = {**(json.loads(file.read_text()) if file.exists() else {}), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


# ---- values


@pytest.mark.parametrize("kind", SHAPES)
def test_every_transformer_that_is_taken_has_its_values(kind: str, tmp_path: Path) -> None:
    theirs = sentence_model(
        tmp_path, kind, pooling="lasttoken" if kind in DECODERS else "mean", limit=24
    )
    ours = TextEncoder(str(tmp_path / "saved"))
    same(encode(ours), theirs.encode(TEXTS))
    same(encode(ours, TEXTS[::-1]), np.stack([theirs.encode(text) for text in TEXTS[::-1]]))
    assert ours.max_tokens == 24


def test_every_transformer_that_is_taken_is_in_the_table() -> None:
    assert sorted(SHAPES) == sorted((*ENCODERS, *DECODERS))


@pytest.mark.parametrize(
    ("mode", "include_prompt"),
    [
        *(
            (mode, False)
            for mode in ("mean", "cls", "lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens")
        ),
        ("mean", True),
        (("lasttoken", "cls", "weightedmean"), True),
    ],
)
def test_every_pooling_has_its_values_for_documents_and_queries(
    mode: Any, include_prompt: bool, tmp_path: Path
) -> None:
    kind = "qwen3" if mode == "lasttoken" else "bert"
    pooling = modules.Pooling(16, mode, include_prompt=include_prompt)
    theirs = sentence_model(tmp_path, kind, [], pooling=pooling, prompts=PROMPTS, limit=38)
    ours = TextEncoder(str(tmp_path / "saved"))
    same(encode(ours), theirs.encode_document(TEXTS))
    same(encode(ours.for_queries()), theirs.encode_query(TEXTS))
    same(
        encode(TextEncoder(str(tmp_path / "saved"), prompt="", query_prompt="film ")),
        theirs.encode(TEXTS, prompt=""),
    )
    assert np.abs(encode(ours) - encode(ours.for_queries())).max() > 0.01


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [modules.Dense(16, 8), modules.Normalize()],
        [
            modules.Normalize(),
            modules.Dropout(0.5),
            modules.Dense(16, 24, bias=False, activation_function=torch.nn.GELU()),
        ],
        [
            modules.Dense(16, 16, use_residual=True, activation_function=None),
            modules.Dense(16, 4, use_residual=True),
        ],
    ],
    ids=["nothing", "dense, normalize", "normalize, dense", "residual"],
)
def test_what_follows_the_pooling_has_its_values(parts: list[Any], tmp_path: Path) -> None:
    theirs = sentence_model(tmp_path, parts=parts, limit=32)
    ours = TextEncoder(str(tmp_path / "saved"))
    same(encode(ours), theirs.encode(TEXTS))
    assert ours.dim == theirs.get_embedding_dimension()


def test_truncate_dim_cuts_and_does_not_normalise_again(
    made: tuple[Path, SentenceTransformer], copied: Path
) -> None:
    change(copied / "config_sentence_transformers.json", truncate_dim=5)
    theirs = read(copied)
    assert theirs.encode_document(TEXTS).shape == (7, 5)
    same(encode(TextEncoder(str(copied))), theirs.encode_document(TEXTS))
    same(
        encode(TextEncoder(str(copied), truncate_dim=3)),
        theirs.encode_document(TEXTS, truncate_dim=3),
    )
    change(copied / "config_sentence_transformers.json", truncate_dim=99)
    same(encode(TextEncoder(str(copied))), made[1].encode_document(TEXTS))


def test_the_layout_of_older_versions_has_its_values(tmp_path: Path) -> None:
    """Written as version 2 did: other class names, flags for the pooling, length and lowercasing
    beside the transformer."""
    sentence_model(tmp_path, "distilbert", pooling=("cls", "max"))
    saved = tmp_path / "saved"
    (saved / "0_DistilBERT").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.move(saved / name, saved / "0_DistilBERT" / name)
    (saved / "sentence_bert_config.json").unlink()
    (saved / "0_DistilBERT" / "sentence_distilbert_config.json").write_text(
        '{"max_seq_length": 12, "do_lower_case": true}'
    )
    names = [
        ("Transformer", "0_DistilBERT"),
        ("Pooling", "1_Pooling"),
        ("Normalize", "2_Normalize"),
    ]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(names)
    ]
    (saved / "modules.json").write_text(json.dumps(entries))
    flags = dict.fromkeys(("pooling_mode_mean_tokens", "pooling_mode_mean_sqrt_len_tokens"), False)
    flags |= {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}
    (saved / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 16, **flags})
    )
    shutil.rmtree(saved / "2_Normalize")  # an empty folder, which git does not keep
    theirs, ours = read(saved), TextEncoder(str(saved))
    same(encode(ours), theirs.encode(TEXTS))
    np.testing.assert_array_equal(encode(ours, ["THE SNOW"]), encode(ours, ["the snow"]))
    assert (ours.max_tokens, ours.dim) == (12, 32)
    assert TextEncoder(str(saved), max_tokens=9).max_tokens == 9


@pytest.mark.parametrize("kind", ["bert", "qwen3", "xlm-roberta"])
def test_only_what_fills_the_longest_input_decides_and_all_of_it(kind: str, tmp_path: Path) -> None:
    theirs = sentence_model(tmp_path, kind, limit=8)
    ours = TextEncoder(str(tmp_path / "saved"))
    texts = [" " * 500 + "the snow", ("y" * 120 + " ") * 3 + "film the", "the snow " * 500, "snow"]
    same(encode(ours, texts), theirs.encode(texts))
    bad = (
        TextEncoder(str(tmp_path / "saved"), too_long="bad")
        .prepare(pa.record_batch({"text": texts}))
        .bad
    )
    counts = [len(theirs.tokenizer(text)["input_ids"]) for text in texts]
    assert sorted(bad) == [row for row, count in enumerate(counts) if count > 8]


def test_without_a_limit_of_its_own_it_is_what_the_positions_have_room_for(tmp_path: Path) -> None:
    sentence_model(
        tmp_path, "xlm-roberta"
    )  # whose first position stands behind that of the padding
    saved = tmp_path / "saved"
    change(saved / "tokenizer_config.json", model_max_length=512)
    assert TextEncoder(str(saved)).max_tokens == 38
    assert encode(TextEncoder(str(saved)), ["snow " * 90]).shape == (1, 16)
    with pytest.raises(ConfigError, match="max_tokens is 39, this model takes 3 to 38"):
        TextEncoder(str(saved), max_tokens=39)


def test_special_tokens_are_words_where_the_folder_says_so(tmp_path: Path) -> None:
    sentence_model(tmp_path)
    change(tmp_path / "saved" / "tokenizer_config.json", split_special_tokens=True)
    same(encode(TextEncoder(str(tmp_path / "saved"))), read(tmp_path / "saved").encode(TEXTS))


def test_weights_in_several_files_are_one_model(tmp_path: Path) -> None:
    theirs: Any = sentence_model(tmp_path, limit=24)
    saved, whole = tmp_path / "saved", TextEncoder(str(tmp_path / "saved"))
    theirs[0].auto_model.save_pretrained(saved, max_shard_size="4KB")
    (saved / "model.safetensors").unlink()
    parts = sorted(saved.glob("model-*.safetensors"))
    assert len(parts) > 1
    ours = TextEncoder(str(saved))
    np.testing.assert_array_equal(encode(ours), encode(whole))
    before = ours.fingerprint()
    tensors = load_file(parts[0])
    save_file(
        {name: tensor + 1 for name, tensor in tensors.items()}, parts[0], metadata={"format": "pt"}
    )
    assert TextEncoder(str(saved)).fingerprint() != before
    parts[0].unlink()
    with pytest.raises(ConfigError, match=f"has no {parts[0].name}"):
        TextEncoder(str(saved))


PACKED = pytest.param(
    "bf16-onednn",
    marks=pytest.mark.skipif(
        not has_bf16(), reason="oneDNN packs bfloat16 where the CPU multiplies it"
    ),
)


@pytest.mark.parametrize("name", ["bf16-eager", "fp32-onednn", PACKED])
def test_other_precisions_compute_the_dense_layer_and_the_queries_too(
    name: str, made: tuple[Path, SentenceTransformer]
) -> None:
    ours = TextEncoder(str(made[0]))
    prepared = ours.prepare(pa.record_batch({"text": TEXTS}))
    convert(
        ours,
        technique(name),
        lambda: [ours.tensors(prepared, np.arange(3)), ours.tensors(prepared, np.arange(7))],
    )
    for found, expected in (
        (encode(ours), made[1].encode_document(TEXTS)),
        (encode(ours.for_queries()), made[1].encode_query(TEXTS)),
    ):
        assert found.dtype == np.float32
        assert (found * expected).sum(1).min() > (0.999999 if name.startswith("fp32") else 0.995)


def test_a_decoders_operations_count_its_shared_keys_and_its_gate(tmp_path: Path) -> None:
    sentence_model(tmp_path, "qwen3", pooling="lasttoken")
    ours = TextEncoder(str(tmp_path / "saved"))
    prepared = ours.prepare(pa.record_batch({"text": ["x", "xx"]}))
    assert prepared.costs.tolist() == [2, 3]
    per_token = (
        2 * 2 * (16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 24)
    )  # layers, (query, key and value, output, gated MLP)
    assert ours.flops(prepared, np.arange(2)) == 5 * per_token + 4 * 2 * 32 * (2**2 + 3**2)


# ---- prompts


def sided_prompts() -> list[dict[str, str | None]]:
    """A query's and a document's, each with a text, empty, null and not there; beside them a
    passage's and a corpus'."""
    sides: dict[str, list[str | None]] = {
        name: [f"{name} : ", "", None, "-"] for name in ("query", "document")
    }
    both = [dict(zip(sides, texts, strict=True)) for texts in itertools.product(*sides.values())]
    others: dict[str, str | None] = {"passage": "passage : ", "corpus": "corpus : "}
    return [{name: text for name, text in named.items() if text != "-"} | others for named in both]


def test_prompts_are_those_of_encode_document_and_encode_query(copied: Path) -> None:
    """Named for either side, empty, null and not there; a passage's and a corpus' are nobody's."""
    for prompts in sided_prompts():
        change(copied / SETTINGS, prompts=prompts, default_prompt_name=None)
        ours, theirs = TextEncoder(str(copied)), read(copied)
        same(encode(ours), theirs.encode_document(TEXTS))
        same(encode(ours.for_queries()), theirs.encode_query(TEXTS))


def test_a_default_prompt_is_that_of_a_side_that_has_none(
    made: tuple[Path, SentenceTransformer], copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of every combination of prompts and default: a side with a text of its own is that of
    encode_document() or encode_query(), one without is that of encode(), unless the default is the
    other side's; and where encode() and encode_document() differ, a line says so."""
    count = 0
    some = [named for named in sided_prompts() if {"", None}.isdisjoint(named.values())]
    some += [{"sts": "sts : "}, {"passage": "passage : ", "query": "q : "}]
    for named in some:
        for default in sorted({*named, "query", "document"}):
            change(copied / SETTINGS, prompts=named, default_prompt_name=default)
            caplog.clear()
            ours, theirs = TextEncoder(str(copied)), copy.copy(made[1])
            # as the library reads it, which the test above compares
            theirs.prompts = {"query": "", "document": "", **named}
            theirs.default_prompt_name = default
            plain = theirs.encode(TEXTS[:2])
            documents = theirs.encode_document(TEXTS[:2])
            queries = theirs.encode_query(TEXTS[:2])
            rows = documents if named.get("document") or default == "query" else plain
            asked = queries if named.get("query") or default in DOCUMENTS else plain
            same(encode(ours, TEXTS[:2]), rows)
            same(encode(ours.for_queries(), TEXTS[:2]), asked)
            said = "sentence-transformers' encode() puts" in caplog.text
            assert said == bool(np.abs(plain - documents).max() > 1e-5), (named, default)
            count += 1
    assert count == 22


def test_rows_are_documents_and_what_is_searched_by_is_a_query(
    made: tuple[Path, SentenceTransformer],
    make_project: MakeProject,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the first run to ``search --text``, by command; and a miss with its own inputs is a row,
    not a query."""
    view = {
        "model": {"use": "text_encoder", "args": {"path": str(made[0]), "output": "v"}},
        "features": {"v": {"dtype": "float32", "dim": 8}},
        "index": {"on": "v", "metric": "dot"},
        "fallback": {"enabled": True, "deadline": "60s"},
    }
    project = make_project(pa.table({"id": list(range(7)), "text": TEXTS}), view=view)
    command = ["-c", str(project.folder)]
    assert main([*command, "run", "numbers", "--json"]) == 0
    capsys.readouterr()
    assert main([*command, "search", "numbers", "--text", "film of the snow", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    scores = made[1].encode_document(TEXTS) @ made[1].encode_query("film of the snow")
    np.testing.assert_allclose([row["score"] for row in rows], np.sort(scores)[::-1], atol=1e-5)
    with project.answering() as lookup:
        answer = lookup.begin(
            "numbers", [99], LookupOptions(inputs={99: {"text": "cold film"}}, deadline_ms=60_000)
        )
        answer.wait()
        row = answer.rows()[0]
    assert row["status"] == "computed"
    np.testing.assert_allclose(
        row["features"]["v"], made[1].encode_document("cold film"), atol=1e-5
    )


def test_cached_tokens_are_a_documents(
    made: tuple[Path, SentenceTransformer], tmp_path: Path
) -> None:
    ours = TextEncoder(str(made[0]), token_cache=str(tmp_path))
    for _ in range(2):
        same(encode(ours), made[1].encode_document(TEXTS))
        same(encode(ours.for_queries()), made[1].encode_query(TEXTS))
    same(
        encode(TextEncoder(str(made[0]), prompt="film ", token_cache=str(tmp_path))),
        made[1].encode(TEXTS, prompt="film "),
    )
    assert len(list(tmp_path.iterdir())) == 2  # a prompt's each, and none for what is searched by


# ---- what is refused

DENSE, POOLING = "2_Dense/config.json", "1_Pooling/config.json"
OWN, SETTINGS = "sentence_bert_config.json", "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            POOLING,
            {"pooling_mode": "median"},
            r"1_Pooling/config\.json: pooling mode 'median' is not known; cls, max, mean",
        ),
        (
            POOLING,
            {"pooling_mode_mean_last_2_tokens": True},
            "has pooling_mode_mean_last_2_tokens, which is not known of",
        ),
        (
            DENSE,
            {"activation_function": "os.system"},
            r"2_Dense/config\.json: activation_function 'os\.system' is not known; Identity",
        ),
        (DENSE, {"activation_function": "torch.hub.Tanh"}, r"torch\.hub\.Tanh' is not known"),
        (DENSE, {"in_features": 12}, "2_Dense takes 12 numbers, and what comes before it gives 16"),
        (
            DENSE,
            {"module_input_name": "token_embeddings"},
            "module_input_name is 'token_embeddings'; only 'sentence_embedding' is computed",
        ),
        (DENSE, {"scale": 2}, "has scale, which is not known of"),
        (
            "3_Normalize/config.json",
            {"module_output_name": "other"},
            "module_output_name is 'other'",
        ),
        (
            OWN,
            {"transformer_task": "fill-mask"},
            "transformer_task is 'fill-mask'; only feature-extraction",
        ),
        (
            OWN,
            {"modality_config": {"message": {"method": "forward"}}},
            "modality_config renders texts by a chat template",
        ),
        (
            OWN,
            {"modality_config": {"text": {"method": "get_text_features"}}},
            "more than the last hidden state",
        ),
        (
            OWN,
            {"query_expansion": {"strategy": "min", "length": 8}},
            "has query_expansion, which is not known of",
        ),
        (
            OWN,
            {"config_args": {"num_hidden_layers": 1}},
            r"has config_args\.num_hidden_layers, which is not known",
        ),
        (
            OWN,
            {"tokenizer_args": {"do_lower_case": False}},
            r"has tokenizer_args\.do_lower_case, which is not known",
        ),
        (
            SETTINGS,
            {"model_type": "SparseEncoder"},
            "model_type is SparseEncoder; only SentenceTransformer",
        ),
        (
            SETTINGS,
            {"default_prompt_name": "sts"},
            "default_prompt_name is 'sts', and there is no such prompt",
        ),
        (SETTINGS, {"truncate_dim": 0}, "truncate_dim is 0"),
        (
            "config.json",
            {"model_type": "t5"},
            "model_type 't5' is not known to come out right in batches; albert, bert",
        ),
        (
            "config.json",
            {"auto_map": {"AutoModel": "modeling.New"}},
            r"own code \(auto_map: .*modeling\.New.*\) is never run: .* own 'bert' is meant",
        ),
        (
            "adapter_config.json",
            {"peft_type": "LORA"},
            r"is an adapter, or has one \(adapter_config\.json\), on another model: merge",
        ),
        (
            "tokenizer_config.json",
            {"truncation_side": "left"},
            "truncation_side is left; only right",
        ),
        (
            "tokenizer_config.json",
            {"model_max_length": 2},
            r"names no longest input that can be used \(2\): set max_tokens",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    file: str, changes: dict[str, Any], message: str, copied: Path
) -> None:
    change(copied / file, **changes)
    with pytest.raises(ConfigError, match=message):
        TextEncoder(str(copied))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "sentence_transformers.models.WordEmbeddings",
            "names the module WordEmbeddings; Transformer, Pooling, Dense",
        ),
        ("sentence_transformers.base.modules.router.Router", "the module Router"),
        ("custom_st.Transformer", r"names custom_st\.Transformer, code that comes with the model"),
        (
            "sentence_transformers.models.Normalize",
            "lists Normalize, Pooling, Dense, Normalize; a Transformer, then one Pooling",
        ),
    ],
)
def test_modules_that_are_not_understood_are_refused_by_name(
    kind: str, message: str, copied: Path
) -> None:
    entries = json.loads((copied / "modules.json").read_text())
    entries[0]["type"] = kind
    (copied / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=message):
        TextEncoder(str(copied))


def test_a_module_outside_the_folder_is_refused(copied: Path) -> None:
    entries = json.loads((copied / "modules.json").read_text())
    (copied / "modules.json").write_text(
        json.dumps([*entries[:2], {**entries[2], "path": "../2_Dense"}])
    )
    with pytest.raises(
        ConfigError, match=r"module Dense lies at '\.\./2_Dense', outside the folder"
    ):
        TextEncoder(str(copied))


def test_a_dense_layer_without_or_with_damaged_weights_is_refused(copied: Path) -> None:
    weights = copied / "2_Dense" / "model.safetensors"
    for content in (b"{}", weights.read_bytes()[:-8]):
        weights.write_bytes(content)
        with pytest.raises(ModelError, match=r"2_Dense/model\.safetensors does not load"):
            TextEncoder(str(copied))
    weights.unlink()
    (copied / "2_Dense" / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ConfigError, match=r"2_Dense has no model\.safetensors"):
        TextEncoder(str(copied))


OTHER_TYPES = b'{"prompts": [7], "pooling_mode": 7, "in_features": "x", "do_lower_case": 1}'


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("modules.json", b""),
        (SETTINGS, b"7"),
        (DENSE, b"\xff"),
        *((file, OTHER_TYPES) for file in ("modules.json", POOLING, DENSE, OWN, SETTINGS)),
    ],
)
def test_a_damaged_file_is_named(file: str, content: bytes, copied: Path) -> None:
    (copied / file).write_bytes(content)
    with pytest.raises((ConfigError, ModelError), match=str(copied / file)):
        TextEncoder(str(copied))


def test_a_plain_decoder_does_not_say_how_it_is_pooled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a decoder \(qwen3\) without modules\.json"):
        TextEncoder(str(transformer(tmp_path, "qwen3")))


@pytest.mark.parametrize("arguments", [{"truncate_dim": 0}, {"truncate_dim": 9}])
def test_more_or_fewer_numbers_than_a_vector_has_are_refused(
    arguments: dict[str, Any], made: tuple[Path, SentenceTransformer]
) -> None:
    with pytest.raises(ConfigError, match="this model's vectors have 1 to 8 numbers"):
        TextEncoder(str(made[0]), **arguments)


# ---- fingerprint


def _weights(copied: Path) -> None:
    tensors = load_file(copied / "2_Dense" / "model.safetensors")
    tensors["linear.bias"][0] += 1e-3
    save_file(tensors, copied / "2_Dense" / "model.safetensors")


@pytest.mark.parametrize(
    "edit",
    [
        lambda f: change(f / POOLING, pooling_mode="cls"),
        lambda f: change(f / POOLING, include_prompt=False),
        lambda f: change(f / DENSE, activation_function="torch.nn.modules.activation.ReLU"),
        _weights,
        lambda f: (f / "modules.json").write_text(
            json.dumps(json.loads((f / "modules.json").read_text())[:3])
        ),
        lambda f: change(f / SETTINGS, prompts=PROMPTS | {"document": "d: "}),
        lambda f: change(f / SETTINGS, prompts=PROMPTS | {"query": "q: "}),
        lambda f: change(f / SETTINGS, truncate_dim=4),
        lambda f: change(f / OWN, max_seq_length=16),
        lambda f: change(f / OWN, do_lower_case=True),
        lambda f: change(f / "tokenizer_config.json", model_max_length=16),
    ],
)
def test_the_fingerprint_changes_with_whatever_decides_a_value(
    edit: Callable[[Path], Any], made: tuple[Path, SentenceTransformer], copied: Path
) -> None:
    before = TextEncoder(str(made[0])).fingerprint()
    assert TextEncoder(str(copied)).fingerprint() == before  # wherever it lies
    edit(copied)
    assert TextEncoder(str(copied)).fingerprint() != before


def test_the_fingerprint_changes_with_the_arguments_that_decide_a_value(
    made: tuple[Path, SentenceTransformer],
) -> None:
    given: list[dict[str, Any]] = [
        {},
        {"prompt": ""},
        {"query_prompt": ""},
        {"truncate_dim": 4},
        {"max_tokens": 9},
    ]
    given.append({"prompt": str(made[0])})  # a text, even where it looks like a path
    assert len(
        {TextEncoder(str(made[0]), **arguments).fingerprint() for arguments in given}
    ) == len(given)
    as_it_is = TextEncoder(str(made[0]), prompt=PROMPTS["document"], truncate_dim=8)
    assert as_it_is.fingerprint() == TextEncoder(str(made[0])).fingerprint()
