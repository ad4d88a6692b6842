"""Models people have, from their own formats: each published, its bad rows rejected alone, its
misses answered with the same values, its damaged file named."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.registry import BUILT_IN, load_model
from precompute.store.errors import ConfigError, ModelError
from precompute.techniques.row_errors import differing
from tests.fixtures import MakeProject

ROWS = 40


@dataclass(frozen=True)
class Made:
    """A model's files in a folder, and what it makes of a source.

    ``args`` of the model; the source's ``table``; ``expected`` values of all rows by feature,
    computed by the library itself; ``bad`` key → end of the reason; ``file`` is the one that is
    damaged, and ``others`` are arguments that make other values."""

    args: dict[str, Any]
    features: dict[str, Any]
    table: pa.Table
    expected: Mapping[str, Any]
    bad: Mapping[int, str]
    file: str
    others: list[dict[str, Any]] = field(default_factory=list)


def tree_table() -> pa.Table:
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


UNKNOWN = "genre is 'western', which is none of the categories that the model knows (comedy, drama, horror)"


def lightgbm(folder: Path) -> Made:
    import lightgbm as library

    frame, target = training()
    settings = {"objective": "regression", "num_leaves": 7, "verbose": -1, "min_data_in_leaf": 5}
    booster = library.train(settings, library.Dataset(frame, target), 5)
    booster.save_model(folder / "model.txt")
    table = tree_table()
    expected = {"score": booster.predict(as_trained(table))}
    args = {"path": "./model.txt"}
    return Made(
        args,
        {"score": {"dtype": "float64"}},
        table,
        expected,
        {7: UNKNOWN},
        "model.txt",
        [{"unknown": "missing"}, {"raw": True}],
    )


def xgboost(folder: Path) -> Made:
    import xgboost as library

    frame, target = training()
    classes = np.digitize(target, [2, 4])
    settings = {"objective": "multi:softprob", "num_class": 3, "max_depth": 3, "nthread": 1}
    booster = library.train(settings, library.DMatrix(frame, classes, enable_categorical=True), 4)
    booster.save_model(folder / "model.json")
    table = tree_table()
    scores = booster.predict(library.DMatrix(as_trained(table), enable_categorical=True))
    huge = table.set_column(
        2,
        "price",
        pa.array([1e300 if row == 3 else x for row, x in enumerate(table["price"].to_pylist())]),
    )
    expected = {
        "score": scores,
        "rating": np.array(["low", "middle", "high"])[scores.argmax(1)].tolist(),
    }
    args = {"path": "./model.json", "label": "rating", "classes": ["low", "middle", "high"]}
    features = {"score": {"dtype": "float32", "dim": 3}, "rating": {"dtype": "string"}}
    bad = {3: "price is 1e+300, which is not finite in float32", 7: UNKNOWN}
    others: list[dict[str, Any]] = [
        {"unknown": "missing"},
        {"raw": True},
        {"classes": ["low", "high", "middle"]},
    ]
    return Made(args, features, huge, expected, bad, "model.json", others)


def catboost(folder: Path) -> Made:
    import catboost as library

    frame, target = training()
    settings = {
        "iterations": 5,
        "depth": 3,
        "verbose": False,
        "allow_writing_files": False,
        "thread_count": 1,
        "cat_features": ["genre"],
    }
    model = library.CatBoostClassifier(**settings).fit(frame, np.where(target > 4, "high", "low"))
    model.save_model(folder / "model.json", format="json")
    table = tree_table()
    known = table.select(["age", "price", "genre"]).to_pandas().fillna({"genre": ""})
    expected = {
        "score": model.predict_proba(known)[:, 1],
        "rating": [str(one) for one in model.predict(known)],
    }
    args = {"path": "./model.json", "label": "rating"}
    features = {"score": {"dtype": "float64"}, "rating": {"dtype": "string"}}
    absent = "genre is null, and CatBoost has no missing category: COALESCE it in the source to the text it was trained with"
    nulls = [row for row, genre in enumerate(table["genre"].to_pylist()) if genre is None]
    return Made(
        args,
        features,
        table,
        expected,
        dict.fromkeys(nulls, absent),
        "model.json",
        [{"raw": True}, {"columns": {"price": "age"}}],
    )


def onnx(folder: Path) -> Made:
    """A scikit-learn pipeline of several named inputs, which raises of a category that it does not
    know."""
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    frame, target = training()
    frame = frame.astype({"age": float, "genre": object})
    encoders = [
        ("numbers", StandardScaler(), ["age", "price"]),
        ("genre", OneHotEncoder(), ["genre"]),
    ]
    model = make_pipeline(ColumnTransformer(encoders), LogisticRegression(max_iter=300)).fit(
        frame, np.where(target > 4, "high", "low")
    )
    types = [
        ("age", FloatTensorType([None, 1])),
        ("price", FloatTensorType([None, 1])),
        ("genre", StringTensorType([None, 1])),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (folder / "model.onnx").write_bytes(to_onnx(model, initial_types=types).SerializeToString())
    table = tree_table().set_column(
        3, "genre", pa.array(["drama", "comedy", None, "horror"] * (ROWS // 4))
    )
    known = table.select(["age", "price", "genre"]).to_pandas().fillna({"age": 0, "genre": "drama"})
    expected = {"rating": model.predict(known).tolist(), "score": model.predict_proba(known)[:, 1]}
    args = {
        "path": "./model.onnx",
        "outputs": {
            "rating": "output_label",
            "score": {"output": "output_probability", "column": 1},
        },
    }
    features = {"rating": {"dtype": "string"}, "score": {"dtype": "float32"}}
    bad = {
        row: f"{name} is null"
        for name in ("age", "genre")
        for row, x in enumerate(table[name].to_pylist())
        if x is None
    }
    other = {
        "outputs": {
            "rating": "output_label",
            "score": {"output": "output_probability", "column": 0},
        }
    }
    return Made(args, features, table, expected, bad, "model.onnx", [other, {"nulls": "nan"}])


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
    return Made(args, features, table, expected, bad, "reviews/model.safetensors", others)


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
    )


def image_encoder(folder: Path) -> Made:
    """Pictures in the table, one of them cut."""
    from tests.precompute.test_image_encoder import encoded, expected, picture, saved

    model, processor = saved(folder / "clip")
    images = [picture(row % 10, 40 + row, 50) for row in range(ROWS)]
    contents = [encoded(image) for image in images]
    contents[4] = contents[4][:200]
    table = pa.table({"id": range(ROWS), "image": pa.array(contents)})
    args = {"path": "./clip", "device": "cpu"}
    features = {"embedding": {"dtype": "float32", "dim": 8}}
    values = {"embedding": expected(model, processor, images)}
    bad = {4: "image is a broken picture: OSError: image file is truncated"}
    return Made(
        args, features, table, values, bad, "clip/model.safetensors", [{"normalize": False}]
    )


CASES: dict[str, Callable[[Path], Made]] = {
    "image_encoder": image_encoder,
    "static_embedding": static_embedding,
    "text_classifier": text_classifier,
    "lightgbm": lightgbm,
    "xgboost": xgboost,
    "catboost": catboost,
    "onnx": onnx,
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    """Name of a built-in."""
    return str(request.param)


def view_of(case: str, made: Made, **over: Any) -> dict[str, Any]:
    return {
        "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
        "model": {"use": case, "args": made.args},
        "features": made.features,
        "fallback": {"enabled": True, "deadline": "20s"},
        "gates": dict.fromkeys(("duplicates", "constant")),
        **over,
    }


def test_it_is_published_and_answers_misses_alike(
    make_project: MakeProject, tmp_path: Path, case: str
) -> None:
    """And a column that the source lacks is named."""
    (tmp_path / "project").mkdir()
    made = CASES[case](tmp_path / "project")
    column = made.table.column_names[-1]
    lacking = made.table.rename_columns([*made.table.column_names[:-1], column.upper() + "S"])
    with pytest.raises(
        ConfigError,
        match=rf"the source yields no column '{column}', which the model {case} reads.*; did you mean '{column.upper()}S'",
    ):
        make_project(lacking, view=view_of(case, made)).run()
    project = make_project(made.table, view=view_of(case, made))
    report = project.run()
    assert (report.status, report.counts["written"], report.counts["rejected"]) == (
        "published",
        made.table.num_rows - len(made.bad),
        len(made.bad),
    )
    # of the gates, parity computes rows again one by one, as a miss would
    assert {gate.gate: gate.message for gate in report.gates}["parity"].startswith("0 of ")
    rejected = (
        pq.read_table(
            project.root / "numbers" / "data" / report.run / "rejected.parquet"
        ).to_pylist()
        if made.bad
        else []
    )
    reasons = {int(row["key"]): (row["stage"], row["error"]) for row in rejected}
    assert {key: stage for key, (stage, _) in reasons.items()} == dict.fromkeys(made.bad, "input")
    for key, reason in made.bad.items():
        assert reasons[key][1].endswith(reason), reasons[key]
    rows = pa.Table.from_batches(project.store.batches(project.live_snapshot())).sort_by("id")
    good = [row for row in range(made.table.num_rows) if row not in made.bad]
    assert rows["id"].to_pylist() == good
    for name, values in made.expected.items():
        got = rows[name].to_pylist()
        if isinstance(got[0], str):
            assert got == [values[row] for row in good]
        else:
            np.testing.assert_allclose(
                np.array(got),
                np.asarray(values)[good],
                rtol=2e-3 if "float16" in str(made.features) else 1e-5,
                atol=1e-6,
            )

    project = make_project(view=view_of(case, made, ttl="0s", stale_for="0s"))
    project.run()
    snapshot = project.live_snapshot()
    with project.answering() as lookup:
        answers = pa.concat_tables(
            [lookup.get("numbers", keys) for keys in (good[:20], *([key] for key in good[20:24]))]
        )
        bad = lookup.get("numbers", list(made.bad)).to_pylist() if made.bad else []
    assert set(answers["status"].to_pylist()) == {"computed"}
    assert differing(rows.slice(0, 24), answers, snapshot.view, "fp32-eager") == {}
    assert [row["reason"] for row in bad] == ["model_error"] * len(bad)


def test_every_built_in_says_what_it_reads() -> None:
    # what `columns` hands on is its view's features
    for dotted in set(BUILT_IN.values()) - {BUILT_IN["columns"]}:
        module, _, name = dotted.partition(":")
        assert callable(getattr(importlib.import_module(module), name).reads), dotted


def test_its_fingerprint_is_that_of_its_values_and_damage_is_one_message(
    tmp_path: Path, case: str
) -> None:
    made = CASES[case](tmp_path)

    def load(**more: Any) -> str:
        return load_model(case, made.args | more, tmp_path).fingerprint()

    known = [load()] + [load(**more) for more in made.others]
    assert len(set(known)) == len(known)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for inside in list(tmp_path.iterdir()):
        if inside != moved:
            inside.rename(moved / inside.name)
    assert load_model(case, made.args, moved).fingerprint() == known[0], (
        "where it lies does not count"
    )
    file = moved / made.file
    content = file.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b'{"a": [1, 2]}'):
        file.write_bytes(damaged)
        with pytest.raises(
            ModelError, match=rf"^{case}: .*{re.escape(made.file.partition('/')[0])}"
        ) as raised:
            load_model(case, made.args, moved)
        assert "\n" not in str(raised.value)
