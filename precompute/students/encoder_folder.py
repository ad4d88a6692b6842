"""Encoder folder: the folder of a text encoder whose transformer is another than its teacher's; the
tokenizer, the pooling and what comes after it are the teacher's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from precompute.models.text_encoder import TextEncoder
from precompute.store.disk.durable_file import disk_message, make_folder, replace_durably
from precompute.store.errors import ModelError
from precompute.students.lesson import Lesson, Made
from precompute.text.bert import Bert, BertConfig
from precompute.text.sentence_folder import TRANSFORMER_CONFIGS, read_sentence_folder
from precompute.text.transformer import TOKENIZER_FILES

MODEL = "model"
"""Of a student's folder."""

_OF_ITS_TEACHER = ("path", "token_cache", "max_cost")
"""Arguments that a student does not take over."""

DENSE = "sentence_transformers.models.Dense"
"""As every version of sentence-transformers finds it."""

POOLED_SIZES = ("word_embedding_dimension", "embedding_dimension")
"""What a Pooling module's config has called the numbers of a token."""


def write_encoder(
    lesson: Lesson, bert: Bert, folder: Path, lift: torch.nn.Linear | None = None
) -> Made:
    """Write a student's model, and return what makes it.

    Args:
        lesson: its teacher's.
        bert: its transformer.
        folder: of the student; the model comes into :data:`MODEL` below it.
        lift: what makes pooled vectors of the transformer's as long as the teacher's; None where
            they are.

    Raises:
        ModelError: it cannot be written.
    """
    assert isinstance(lesson.model, TextEncoder)
    source, target = lesson.model.folder, folder / MODEL
    parts = read_sentence_folder(source)
    transformer = (source if parts is None else parts.transformer).relative_to(source)
    config = json.loads((source / transformer / "config.json").read_text(encoding="utf-8"))
    weights = {name: value.contiguous() for name, value in bert.state_dict().items()}
    files = {path: (source / path).read_bytes() for path in _taken_over(source, transformer)}
    if lift is not None:
        files |= _with_lift(source, lift)
    config |= bert.config._asdict()
    files[transformer / "config.json"] = json.dumps(config, indent=2).encode()
    files[transformer / "model.safetensors"] = save(weights, {"format": "pt"})
    try:
        _write(target, files)
    except OSError as exc:
        raise ModelError(disk_message(target, exc, "the student was not made")) from exc
    args = {name: value for name, value in lesson.args.items() if name not in _OF_ITS_TEACHER}
    return Made("text_encoder", {**args, "path": f"./{MODEL}"})


def _with_lift(source: Path, lift: torch.nn.Linear) -> dict[Path, bytes]:
    """The files by which a sentence-transformers folder has a linear layer behind its pooling."""
    modules = json.loads((source / "modules.json").read_text(encoding="utf-8"))
    pooling = Path(modules[1]["path"], "config.json")
    place = Path(f"lift-{len(modules)}")
    modules.insert(2, {"name": str(place), "path": str(place), "type": DENSE})
    pooled = json.loads((source / pooling).read_text(encoding="utf-8"))
    about = {
        "in_features": lift.in_features,
        "out_features": lift.out_features,
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    weights = {f"linear.{name}": value.contiguous() for name, value in lift.state_dict().items()}
    contents = {
        Path("modules.json"): [{**module, "idx": at} for at, module in enumerate(modules)],
        pooling: pooled | {name: lift.in_features for name in POOLED_SIZES if name in pooled},
        place / "config.json": about,
    }
    files = {path: json.dumps(content, indent=2).encode() for path, content in contents.items()}
    return {**files, place / "model.safetensors": save(weights, {"format": "pt"})}


def _write(target: Path, files: Mapping[Path, bytes]) -> None:
    for path, data in files.items():
        make_folder((target / path).parent)
        replace_durably(target / path, data)


def _taken_over(source: Path, transformer: Path) -> Iterator[Path]:
    """The teacher's files that are the student's, too, relative to its folder."""
    names = [transformer / name for name in (*TOKENIZER_FILES, *TRANSFORMER_CONFIGS)]
    if (source / "modules.json").is_file():
        names += [Path("modules.json"), Path("config_sentence_transformers.json")]
        for module in json.loads((source / "modules.json").read_text(encoding="utf-8"))[1:]:
            names += [Path(module["path"], name) for name in ("config.json", "model.safetensors")]
    yield from (name for name in dict.fromkeys(names) if (source / name).is_file())


def transformer_of(lesson: Lesson) -> Bert:
    """The teacher's transformer."""
    model: Any = lesson.model
    bert: Bert = model.module.transformer
    return bert


def trainable(config: BertConfig, weights: Mapping[str, torch.Tensor]) -> Bert:
    """A transformer with copies of these weights, ready to be trained: all but the embeddings,
    which are most of a small model's numbers, and hold words that no row of the lesson has."""
    bert = Bert(config)
    bert.load_state_dict(weights)
    bert.to(next(iter(weights.values())).device)
    bert.embeddings.requires_grad_(False)
    return bert
