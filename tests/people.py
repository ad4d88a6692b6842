"""People's models: files as their libraries write them and what these make of a source, of the core
and of the plug-ins that are here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.store import doors

ROWS = 40


@dataclass(frozen=True)
class Made:
    """A model's files in a folder, and what it makes of a source.

    ``args`` of the model; the source's ``table``; ``expected`` values of all rows by feature,
    computed by the library itself; ``bad`` key → end of the reason; ``file`` is the one that is
    damaged, ``others`` are arguments that make other values, and ``library`` is the distribution
    that it is compared with; without one its library is what computes."""

    args: dict[str, Any]
    features: dict[str, Any]
    table: pa.Table
    expected: Mapping[str, Any]
    bad: Mapping[int, str]
    file: str
    others: list[dict[str, Any]] = field(default_factory=list)
    library: str = ""


def table_of_books() -> pa.Table:
    """Rows with a missing number and a missing category, and one, 7, with a category that no model
    knows."""
    rng = np.random.default_rng(1)
    genres = ["drama", "comedy", None, "horror"] * (ROWS // 4)
    genres[7] = "western"
    return pa.table(
        {
            "id": np.arange(ROWS),
            "age": pa.array([None if row % 9 == 5 else row for row in range(ROWS)], pa.int64()),
            "price": rng.random(ROWS).astype(np.float32),
            "genre": genres,
        }
    )


def training() -> tuple[Any, Any]:
    """(a data frame of the same columns, a target that all of them make)."""
    import pandas as pd

    rng = np.random.default_rng(0)
    genres = rng.choice(["comedy", "drama", "horror"], 2000)
    frame = pd.DataFrame(
        {
            "age": rng.integers(0, 40, 2000),
            "price": rng.random(2000),
            "genre": pd.Categorical(genres),
        }
    )
    return frame, frame["age"] / 10 + 3 * (frame["genre"] == "drama") + frame["price"]


def as_trained(table: pa.Table) -> Any:
    """The table as a data frame of the trained columns, what is unknown as missing."""
    import pandas as pd

    frame = table.select(["age", "price", "genre"]).to_pandas()
    frame["genre"] = pd.Categorical(
        frame["genre"].replace("western", None), categories=["comedy", "drama", "horror"]
    )
    return frame


def texts() -> pa.Table:
    """Rows with one that is null, 3, and one that is blank, 5."""
    words = ["a", "heist", "in", "the", "snow", "film", "cold", "warm"]
    made = [
        " ".join(words[(row * 3 + n * n) % 8] for n in range(1 + row % 7)) for row in range(ROWS)
    ]
    return pa.table(
        {
            "id": range(ROWS),
            "text": [
                None if row == 3 else " " if row == 5 else text for row, text in enumerate(made)
            ],
        }
    )


def text_classifier(folder: Path) -> Made:
    from transformers import AutoModelForSequenceClassification

    from tests.precompute.sentence_models import transformer
    from tests.precompute.test_text_classifier import logits

    names = {0: "bad", 1: "fair", 2: "good"}
    transformer(
        folder / "reviews", "bert", AutoModelForSequenceClassification, num_labels=3, id2label=names
    )
    table = texts()
    found = logits(folder / "reviews", [text or "a" for text in table["text"].to_pylist()])
    scores = np.exp(found) / np.exp(found).sum(1, keepdims=True)
    expected = {"score": scores, "rating": [names[n] for n in scores.argmax(1)]}
    args = {"path": "./reviews", "label": "rating", "device": "cpu"}
    features = {"score": {"dtype": "float32", "dim": 3}, "rating": {"dtype": "string"}}
    bad = {3: "text is null", 5: "text is empty"}
    others: list[dict[str, Any]] = [{"activation": "none"}, {"max_tokens": 12}]
    return Made(
        args,
        features,
        table,
        expected,
        bad,
        "reviews/model.safetensors",
        others,
        library="transformers",
    )


def static_embedding(folder: Path) -> Made:
    from model2vec import StaticModel

    from tests.precompute.test_static_embedding import saved

    saved(folder / "static")
    table = texts()
    expected = StaticModel.from_pretrained(folder / "static", force_download=False).encode(
        [text or "" for text in table["text"].to_pylist()]
    )
    bad = {3: "text is null", 5: "text is empty"}
    args = {"path": "./static", "device": "cpu"}
    features = {"embedding": {"dtype": "float32", "dim": 6}}
    return Made(
        args,
        features,
        table,
        {"embedding": expected},
        bad,
        "static/model.safetensors",
        [{"normalize": False}],
        library="model2vec",
    )


@cache
def of_plugins(name: str) -> dict[str, Any]:
    """A table of this name of each plug-in's ``tests/people.py``, in one."""
    found: dict[str, Any] = {}
    for path in sorted(doors.FOLDER.glob("*/tests/people.py")):
        people = import_module(f"{doors.GROUP}.{path.parents[1].name}.tests.people")
        found |= getattr(people, name, {})
    return found


def cases() -> dict[str, Callable[[Path], Made]]:
    """Name of a built-in → what makes one of its models in a folder."""
    return {
        "static_embedding": static_embedding,
        "text_classifier": text_classifier,
        **of_plugins("CASES"),
    }


def view_of(case: str, made: Made, **over: Any) -> dict[str, Any]:
    return {
        "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
        "model": {"use": case, "args": made.args},
        "features": made.features,
        "fallback": {"enabled": True, "deadline": "20s"},
        "gates": {"constant": None},
        **over,
    }
