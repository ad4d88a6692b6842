"""Folders of text models that were changed: each is refused by name, or has the values of
its own library. Nothing is passed over."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from model2vec import StaticModel
from safetensors.torch import load_file, save_file

from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError
from tests.precompute import test_static_embedding, test_text_classifier
from tests.precompute.sentence_models import (
    CrossEncoder,
    SentenceTransformer,
    modules,
    read,
    sentence_model,
)

TEXTS = ["a heist in the snow", "cold film over it", "the line is warm and cold"]
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Kind:
    """A format: how a folder of it is made, what its own library computes, and where its keys and
    tensors stand."""

    use: str
    make: Callable[[Path], object]
    theirs: Callable[[Path], Any]
    weights: str
    tensor: str
    files: tuple[str, ...]
    rows: Mapping[str, Any] = field(default_factory=lambda: {"text": TEXTS})
    args: Mapping[str, Any] = field(default_factory=dict)
    output: str = "embedding"


def _encoder(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        dense = modules.Dense(16, 8, activation_function=torch.nn.Tanh())
        more = [dense, modules.Normalize(), modules.Dropout(0.1)]
        prompts = {"query": "query : ", "document": "passage : "}
        sentence_model(folder / "made", kind, more, prompts=prompts, limit=32)
        shutil.copytree(folder / "made" / "saved", folder, dirs_exist_ok=True)
        shutil.rmtree(folder / "made")

    return make


def _cross_encoder(folder: Path) -> None:
    plain = test_text_classifier.saved(folder / "plain", num_labels=1)
    made = CrossEncoder(
        str(plain), device="cpu", prompts={"ask": "query : "}, default_prompt_name="ask"
    )
    made.save(str(folder), create_model_card=False)
    shutil.rmtree(plain)


def _static(folder: Path) -> None:
    words = test_static_embedding.vocabulary("words")
    words.enable_truncation(4)
    table = np.random.default_rng(0).normal(size=(words.get_vocab_size(), 6)).astype(np.float32)
    parts: list[Any] = [
        modules.StaticEmbedding(words, embedding_weights=table),
        modules.Normalize(),
    ]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder), create_model_card=False)


ENCODER_FILES = (
    "config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
KINDS = {
    **{
        kind: Kind(
            "text_encoder",
            _encoder(kind),
            # a text alone: of a BERT padded at its beginning positions depend on the others
            lambda folder: read(folder).encode_document(TEXTS, batch_size=1),
            WEIGHTS,
            tensor,
            ENCODER_FILES,
        )
        for kind, tensor in (
            ("bert", "encoder.layer.1.output.dense.weight"),
            ("distilbert", "transformer.layer.1.ffn.lin1.weight"),
            ("qwen3", "layers.1.mlp.up_proj.weight"),
        )
    },
    "cross-encoder": Kind(
        "text_classifier",
        _cross_encoder,
        lambda folder: CrossEncoder(str(folder), device="cpu").predict(
            list(zip(TEXTS, TEXTS[::-1], strict=True))
        ),
        WEIGHTS,
        "bert.encoder.layer.1.output.dense.weight",
        (
            "config.json",
            "modules.json",
            "sentence_bert_config.json",
            "config_sentence_transformers.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
        {"query": TEXTS, "document": TEXTS[::-1]},
        {"columns": ["query", "document"]},
        "score",
    ),
    "model2vec": Kind(
        "static_embedding",
        lambda folder: test_static_embedding.saved(folder) and None,
        lambda folder: StaticModel.from_pretrained(folder, force_download=False).encode(TEXTS),
        WEIGHTS,
        "embeddings",
        ("config.json", "tokenizer.json"),
    ),
    "StaticEmbedding": Kind(
        "static_embedding",
        _static,
        lambda folder: read(folder).encode(TEXTS),
        WEIGHTS,
        "embedding.weight",
        ("modules.json", "config_sentence_transformers.json", "tokenizer.json"),
    ),
}


def ours(kind: Kind, folder: Path) -> Any:
    model: Any = load_model(kind.use, {"path": str(folder), "device": "cpu", **kind.args})
    return model.compute(pa.record_batch(dict(kind.rows)))[kind.output]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, kind in KINDS.items():
        made[name] = tmp_path_factory.mktemp(name)
        kind.make(made[name])
    return made


@pytest.fixture
def copied(folders: dict[str, Path], tmp_path: Path) -> Callable[[str, str], Path]:
    def copy(name: str, to: str) -> Path:
        return Path(shutil.copytree(folders[name], tmp_path / to))

    return copy


# ---- changes


Change = Callable[[Path], Any]


def keys(name: str, **changes: Any) -> Change:
    """Set keys of a JSON file, of its first module where it is a list; ``a__b`` is b of a."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for path, value in changes.items():
            *inner, last = path.split("__")
            at = content[0] if isinstance(content, list) else content
            for key in inner:
                at = at[key]
            at[last] = value
        (folder / name).write_text(json.dumps(content))

    return change


def tensors(made: Callable[[dict[str, torch.Tensor]], Any], file: str = WEIGHTS) -> Change:
    def change(folder: Path) -> None:
        found = load_file(folder / file)
        made(found)
        save_file(found, folder / file, {"format": "pt"})

    return change


def added(name: str, tensor: torch.Tensor, file: str = WEIGHTS) -> Change:
    return tensors(lambda found: found.update({name: tensor}), file)


def cast(name: str, dtype: torch.dtype, file: str = WEIGHTS) -> Change:
    def to(found: dict[str, torch.Tensor]) -> None:
        scale = 1 if dtype.is_floating_point and dtype.itemsize > 1 else 40
        found[name] = (found[name] * scale).to(dtype)

    return tensors(to, file)


def content(name: str, made: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / name).write_bytes(made((folder / name).read_bytes()))


def flipped(name: str, seed: int) -> Change:
    """One bit of a file is another."""

    def change(whole: bytes) -> bytes:
        at = random.Random(seed).randrange(len(whole))
        bit = 1 << random.Random(seed + 1).randrange(8)
        return whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]

    return content(name, change)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"


def changes(kind: Kind) -> dict[str, tuple[Change, str]]:
    """Name → (change, what its refusal says)."""
    one, odd = torch.ones(3), "which is not known|has no place for"
    made: dict[str, tuple[Change, str]] = {
        "an unknown tensor": (added("surprise.weight", one), odd),
        "a scale": (added(f"{kind.tensor}_scale", one), "quantized|which is not known"),
        "SCB": (added(kind.tensor.replace("weight", "SCB") + ".SCB", one), "quantized"),
        "a zero point": (added(f"{kind.tensor}.zero_point", one), "quantized"),
        "float8": (cast(kind.tensor, torch.float8_e4m3fn), "not a float: load the model"),
        "int32": (cast(kind.tensor, torch.int32), "not a float: load the model|no list of"),
        "half a file": (content(kind.weights, lambda b: b[: len(b) // 2]), "Fetch it again"),
        "a pointer": (content(kind.weights, lambda _: POINTER), "git lfs pull"),
        "a page": (content(kind.weights, lambda _: b"<!DOCTYPE html>"), "a web page"),
        "gzip": (content(kind.weights, gzip.compress), "gzip"),
        "empty": (content(kind.weights, lambda _: b""), "empty"),
        "another shape": (
            tensors(lambda f: f.update({kind.tensor: f[kind.tensor][:-1].clone()})),
            r"shape|size mismatch|does not load|rows, its tokenizer|weights for",
        ),
    }
    for file in kind.files:
        made[f"a key of {file}"] = keys(file, surprise=1), "surprise, which is not known|damaged"
        made[f"half of {file}"] = content(file, lambda b: b[: len(b) // 2]), "damaged"
        made[f"{file} is a pointer"] = content(file, lambda _: POINTER), "git lfs pull"
    if kind.tensor == "embeddings":
        # whole numbers are what model2vec computes with
        del made["int32"]
    return made


CASES = [(name, change) for name, kind in KINDS.items() for change in changes(kind)]


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_as_it_was_saved_has_its_librarys_values(
    name: str, folders: dict[str, Path]
) -> None:
    check_equal(KINDS[name], folders[name])


def check_equal(kind: Kind, folder: Path) -> None:
    np.testing.assert_allclose(ours(kind, folder), kind.theirs(folder), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_not_understood_is_refused(
    name: str, copied: Callable[[str, str], Path], subtests: Any
) -> None:
    check_refused(KINDS[name], lambda to: copied(name, to), subtests)


def check_refused(kind: Kind, copied: Callable[[str], Path], subtests: Any) -> None:
    for number, (what, (change, said)) in enumerate(changes(kind).items()):
        folder = copied(str(number))
        change(folder)
        with subtests.test(what), pytest.raises((ConfigError, ModelError)) as refused:
            ours(kind, folder)
        message = str(refused.value)
        assert message.startswith(f"{kind.use}: "), (what, message)
        assert str(folder) in message, (what, message)
        assert re.search(said, message), (what, message)


def alone(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def without(name: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def both(*each: Change) -> Change:
    return lambda folder: [change(folder) for change in each]


def renamed(module: int, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / "modules.json").read_text())
        content[module] |= changes
        (folder / "modules.json").write_text(json.dumps(content))

    return change


SETTINGS, OWN = "config_sentence_transformers.json", "sentence_bert_config.json"
DENSE, DENSE_TENSORS = "2_Dense/config.json", "2_Dense/model.safetensors"
INDEX = "model.safetensors.index.json"
LEFT = {"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
EMBEDDINGS, WORD = "embeddings.word_embeddings.weight", "bert.embeddings.word_embeddings.weight"
TWICE = tensors(lambda found: found.update({WORD: found[EMBEDDINGS].clone()}))

REFUSED: list[tuple[str, str, Change, str]] = [
    ("bert", "quantized", keys("config.json", quantization_config={"a": 1}), "are quantized: load"),
    ("qwen3", "quantized", keys("config.json", quantization_config={"a": 1}), "are quantized"),
    ("bert", "positions", keys("config.json", position_embedding_type="relative_key"), "absolute"),
    ("mpnet", "positions", keys("config.json", position_embedding_type="relative_key"), "absolute"),
    ("distilbert", "a tuple", keys("config.json", return_dict=False), "only True is computed"),
    ("bert", "own code", keys("tokenizer_config.json", auto_map={"A": "b"}), "never run"),
    ("bert", "two lists", alone(INDEX, '{"weight_map": {"a": "b.safetensors"}}'), "two models"),
    (
        "bert",
        "a foreign list",
        alone(INDEX, f'{{"weight_map": {{"a": "{WEIGHTS}"}}}}'),
        "one model",
    ),
    ("bert", "a list elsewhere", alone(INDEX, '{"weight_map": {"a": "../b"}}'), "weight_map names"),
    ("bert", "an adapter", alone("adapter_config.json", "{}"), "an adapter, or has one"),
    ("bert", "no modules", without("modules.json"), "and no modules.json, without which"),
    (
        "bert",
        "a layer more",
        added("encoder.layer.7.output.dense.bias", torch.ones(16)),
        "no place",
    ),
    ("bert", "a table twice", TWICE, "the weights have embeddings.word_embeddings.weight twice"),
    (
        "bert",
        "a dense scale",
        added("linear.weight_scale", torch.ones(1), DENSE_TENSORS),
        "quantized",
    ),
    (
        "bert",
        "a dense tensor",
        added("gate", torch.ones(1), DENSE_TENSORS),
        "has gate, which is not",
    ),
    ("bert", "int8 dense", cast("linear.weight", torch.int8, DENSE_TENSORS), "is I8, not a float"),
    ("bert", "a flag", keys("1_Pooling/config.json", pooling_mode_cls_token="no"), "damaged"),
    ("bert", "a name twice", renamed(1, name="0"), "two modules have the name '0'"),
    ("bert", "an argument", renamed(1, kwargs=["task"]), "kwargs is"),
    ("bert", "a normalizer", keys("tokenizer.json", normalizer__odd=1), "normalizer.odd, which is"),
    ("bert", "a token's key", keys("tokenizer.json", model__odd=1), "has model.odd, which is not"),
    (
        "qwen3",
        "dropped merges",
        keys("tokenizer.json", model__dropout=0.5),
        "model.dropout is '0.5'",
    ),
    ("bert", "a panic", keys("tokenizer.json", normalizer={"type": "Precompiled"}), "is damaged"),
    (
        "bert",
        "left",
        keys("tokenizer_config.json", truncation_side="left"),
        "only right is underst",
    ),
    (
        "bert",
        "left by tokenizer.json",
        keys("tokenizer.json", truncation=LEFT),
        r"tokenizer.json: truncation.direction is left; only right",
    ),
    (
        "cross-encoder",
        "left by tokenizer.json",
        keys("tokenizer.json", truncation=LEFT),
        r"tokenizer.json: truncation.direction is left; only right",
    ),
    ("bert", "requirements", keys(SETTINGS, surprise={"a": 1}), "has surprise, which is not known"),
    (
        "cross-encoder",
        "own code",
        keys(SETTINGS, activation_fn="mine.Swish"),
        "names the activation",
    ),
    (
        "cross-encoder",
        "a prompt",
        keys(SETTINGS, default_prompt_name="x"),
        "there is no such prompt",
    ),
    ("cross-encoder", "no modules", without("modules.json"), "and no modules.json, without which"),
    (
        "cross-encoder",
        "another task",
        keys(OWN, transformer_task="fill-mask"),
        "sequence-classific",
    ),
    ("cross-encoder", "an entry", keys("config.json", sentence_transformers={"odd": 1}), "has odd"),
    (
        "StaticEmbedding",
        "a prompt",
        keys(SETTINGS, prompts={"query": "q"}),
        r"prompts\.query is 'q'",
    ),
    (
        "StaticEmbedding",
        "shorter",
        keys(SETTINGS, truncate_dim=3),
        "truncate_dim is 3, which is not",
    ),
    ("StaticEmbedding", "no modules", without("modules.json"), "and no modules.json, without"),
    ("StaticEmbedding", "two tables", added("embeddings", torch.ones(3, 3)), "it has two tables"),
    (
        "model2vec",
        "a word",
        keys("config.json", normalize="yes"),
        "normalize in its config.json is",
    ),
    ("model2vec", "two tables", added("embedding.weight", torch.ones(3, 3)), "which is not known"),
]


@pytest.mark.parametrize(
    ("name", "what", "change", "said"),
    REFUSED,
    ids=[f"{name}, {what}" for name, what, *_ in REFUSED],
)
def test_what_would_be_another_value_is_refused_by_name(
    name: str, what: str, change: Change, said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    if name in KINDS:
        shutil.copytree(folders[name], folder)
    else:
        _encoder(name)(folder)
    change(folder)
    check_named(KINDS.get(name, KINDS["bert"]), folder, said)


def check_named(kind: Kind, folder: Path, said: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=said) as refused:
        ours(kind, folder)
    assert str(folder) in str(refused.value)


EQUAL: list[tuple[str, Change]] = [
    *(
        (name, cast(kind.tensor, dtype))
        for name, kind in KINDS.items()
        for dtype in (torch.float64, torch.float16, torch.bfloat16)
        # numpy has no bfloat16
        if (name, dtype) != ("model2vec", torch.bfloat16)
    ),
    ("bert", added("pooler.dense.odd", torch.ones(3))),
    ("bert", added("cls.predictions.bias", torch.ones(3))),
    ("bert", added("embeddings.position_ids", torch.arange(40)[None])),
    ("distilbert", added("vocab_projector.bias", torch.ones(3))),
    ("qwen3", added("lm_head.weight", torch.ones(3, 16))),
    ("bert", keys("config.json", hidden_act="relu")),
    ("bert", keys("config.json", hidden_act="gelu_new", layer_norm_eps=1e-3)),
    ("bert", keys("config.json", num_attention_heads=4)),
    ("bert", keys("config.json", is_decoder=True)),
    ("bert", keys("config.json", pad_token_id=3, torch_dtype="float16", _name_or_path="a/b")),
    ("bert", keys("config.json", model_type="electra", embedding_size=16)),
    ("qwen3", keys("config.json", rope_theta=5000.0, rope_parameters=None)),
    ("qwen3", keys("config.json", is_causal=False)),
    ("qwen3", keys("config.json", use_sliding_window=True, sliding_window=2, layer_types=None)),
    ("bert", keys("tokenizer_config.json", padding_side="left", split_special_tokens=True)),
    ("bert", keys("tokenizer_config.json", do_lower_case=False, tokenizer_class="BertTokenizer")),
    ("bert", keys("tokenizer_config.json", model_max_length=5)),
    ("bert", alone("added_tokens.json", '{"snow": 12, "heist film": 97}')),
    ("bert", alone("special_tokens_map.json", '{"unk_token": "[MASK]", "sep_token": "film"}')),
    (
        "bert",
        keys(
            "tokenizer.json",
            truncation={
                "max_length": 4,
                "strategy": "LongestFirst",
                "stride": 0,
                "direction": "Right",
            },
        ),
    ),
    ("bert", keys("tokenizer.json", normalizer=None)),
    ("bert", keys(OWN, max_seq_length=5)),
    ("bert", keys(OWN, do_lower_case=True)),
    ("bert", keys(SETTINGS, truncate_dim=3)),
    ("bert", keys(SETTINGS, prompts={}, default_prompt_name=None)),
    ("bert", keys(SETTINGS, similarity_fn_name="dot", requirements={})),
    ("bert", keys("1_Pooling/config.json", pooling_mode=["cls", "max"])),
    ("bert", keys("1_Pooling/config.json", include_prompt=False)),
    ("bert", keys(DENSE, activation_function="torch.nn.modules.activation.GELU")),
    ("bert", keys(DENSE, bias=False)),
    ("bert", renamed(3, path="")),
    ("bert", alone("pytorch_model.bin", "never read")),
    ("cross-encoder", keys(SETTINGS, activation_fn="torch.nn.modules.activation.ELU")),
    ("cross-encoder", keys(SETTINGS, activation_fn=None)),
    ("cross-encoder", keys(SETTINGS, default_prompt_name=None)),
    ("cross-encoder", keys("config.json", architectures=["BertModel"])),
    ("cross-encoder", keys("config.json", problem_type="regression")),
    ("cross-encoder", keys("config.json", id2label={"0": "a", "1": "b", "2": "c"})),
    ("cross-encoder", keys(OWN, max_seq_length=6)),
    ("cross-encoder", keys(OWN, do_lower_case=True)),
    ("StaticEmbedding", keys("tokenizer.json", truncation=None)),
    ("StaticEmbedding", keys("tokenizer.json", truncation__direction="Left")),
    ("StaticEmbedding", keys("tokenizer.json", normalizer={"type": "Lowercase"})),
    ("model2vec", keys("config.json", normalize=False)),
    ("model2vec", keys("config.json", max_length=2)),
    ("model2vec", keys("config.json", max_length=None)),
    ("model2vec", keys("tokenizer.json", model__unk_token="the")),
    (
        "model2vec",
        keys(
            "tokenizer.json",
            truncation={
                "max_length": 2,
                "strategy": "LongestFirst",
                "stride": 0,
                "direction": "Left",
            },
        ),
    ),
    *(
        (name, flipped(file, seed))
        for name, kind in KINDS.items()
        for file in (kind.weights, *kind.files)
        for seed in range(2)
    ),
]


def test_what_is_taken_has_its_librarys_values(
    copied: Callable[[str, str], Path], subtests: Any
) -> None:
    """A changed setting, and a bit that is another: refused, or the same value."""
    cases = [(name, KINDS[name], change) for name, change in EQUAL]
    assert check_taken(cases, copied, subtests) > 55


def check_taken(
    cases: Sequence[tuple[str, Kind, Change]], copied: Callable[[str, str], Path], subtests: Any
) -> int:
    """How many are taken, all with the library's values."""
    taken = 0
    for number, (name, kind, change) in enumerate(cases):
        folder = copied(name, str(number))
        change(folder)
        # a row that cannot be computed is a bad one, by a ValueError
        with contextlib.suppress(ConfigError, ModelError, ValueError):
            found = ours(kind, folder)
            taken += 1
            with subtests.test(f"{number}: {name}"):
                # a type in fewer bits is computed in float32 here, and in itself by some libraries
                expected = kind.theirs(folder)
                np.testing.assert_allclose(
                    found, expected, rtol=2e-2, atol=5e-3, err_msg=f"{number}: {name}"
                )
        shutil.rmtree(folder)
    return taken


@pytest.mark.parametrize(
    ("name", "use", "said"),
    [
        (
            "StaticEmbedding",
            "text_encoder",
            "static embedding, a table of vectors: set model.use to",
        ),
        ("model2vec", "text_encoder", "set model.use to static_embedding"),
        ("cross-encoder", "text_encoder", "is a cross-encoder: set model.use to text_classifier"),
        (
            "bert",
            "text_classifier",
            "is a sentence-transformers model, .* set model.use to text_enc",
        ),
        ("bert", "static_embedding", "set model.use to text_encoder"),
    ],
)
def test_a_folder_of_another_kind_says_what_reads_it(
    name: str, use: str, said: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_model(use, {"path": str(folders[name]), "device": "cpu"})


@pytest.mark.parametrize("settings", [True, False])
def test_of_a_vocabulary_alone_the_command_makes_what_is_missing(
    settings: bool, copied: Callable[[str, str], Path]
) -> None:
    folder = copied("bert", "folder")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)))
    (folder / "tokenizer.json").unlink()
    if settings:
        keys("tokenizer_config.json", tokenizer_class="BertTokenizer")(folder)
    else:
        (folder / "tokenizer_config.json").unlink()
    kind = KINDS["bert"]
    with pytest.raises(
        ConfigError, match=r"has no tokenizer\.json; write it once by: python -c"
    ) as no:
        ours(kind, folder)
    command = str(no.value).partition("write it once by: python ")[2]
    done = subprocess.run([sys.executable, *shlex.split(command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(ours(kind, folder), kind.theirs(folder), atol=1e-5)


def test_files_of_two_models_are_not_one(copied: Callable[[str, str], Path]) -> None:
    """A large model's list, and files of which one is another's."""
    folder = copied("bert", "folder")
    found = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(found)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, half in halves.items():
        save_file({name: found[name] for name in half}, folder / file, {"format": "pt"})
    listed = {name: file for file, half in halves.items() for name in half}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))
    kind = KINDS["bert"]
    np.testing.assert_allclose(ours(kind, folder), kind.theirs(folder), atol=1e-5)
    moved = added(names[1], found[names[1]], "a.safetensors")
    moved(folder)
    with pytest.raises(
        ModelError, match=r"are not of one model: .* is in a\.safetensors: fetch all"
    ):
        ours(kind, folder)


def test_there_are_enough_of_them() -> None:
    assert len(CASES) + len(REFUSED) + len(EQUAL) > 250
