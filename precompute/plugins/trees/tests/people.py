"""Trees as people have them: a model of each library, with categories and what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.people import Made, as_trained, table_of_books, training

UNKNOWN = "genre is 'western', which is none of the categories that the model knows (comedy, drama, horror)"


def lightgbm(folder: Path) -> Made:
    import lightgbm as library

    frame, target = training()
    settings = {"objective": "regression", "num_leaves": 7, "verbose": -1, "min_data_in_leaf": 5}
    booster = library.train(settings, library.Dataset(frame, target), 5)
    booster.save_model(folder / "model.txt")
    table = table_of_books()
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
        library="lightgbm",
    )


def xgboost(folder: Path) -> Made:
    import xgboost as library

    frame, target = training()
    classes = np.digitize(target, [2, 4])
    settings = {"objective": "multi:softprob", "num_class": 3, "max_depth": 3, "nthread": 1}
    booster = library.train(settings, library.DMatrix(frame, classes, enable_categorical=True), 4)
    booster.save_model(folder / "model.json")
    table = table_of_books()
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
    return Made(args, features, huge, expected, bad, "model.json", others, library="xgboost")


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
    table = table_of_books()
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
        library="catboost",
    )


CASES: dict[str, Callable[[Path], Made]] = {
    "lightgbm": lightgbm,
    "xgboost": xgboost,
    "catboost": catboost,
}


def pair_score(folder: Path) -> str:
    import lightgbm
    import pandas as pd

    rng = np.random.default_rng(0)
    users = pd.DataFrame(
        {"user_id": range(6), "age": rng.integers(18, 80, 6), "country": ["fr", "de", "it"] * 2}
    )
    items = pd.DataFrame(
        {
            "item_id": range(5),
            "price": rng.random(5),
            "genre": ["drama", "comedy", "drama", "horror", "comedy"],
        }
    )
    pairs = users[["user_id"]].merge(items[["item_id"]], how="cross")
    for name, frame in (("users", users), ("items", items), ("pairs", pairs)):
        pq.write_table(
            pa.Table.from_pandas(frame, preserve_index=False), folder / f"{name}.parquet"
        )
    frame = (
        pairs.merge(users)
        .merge(items)[["age", "country", "price", "genre"]]
        .astype({"country": "category", "genre": "category"})
    )
    data = lightgbm.Dataset(
        frame, frame["age"] > 40, params={"min_data_in_leaf": 1, "min_data_in_bin": 1}
    )
    lightgbm.train(
        {"objective": "binary", "verbose": -1, "min_data_in_leaf": 1}, data, 3
    ).save_model(folder / "model.txt")
    return "3/2"


DOCUMENTED = {"pair_score": pair_score}
"""View of docs/models.md → what makes its model and its source, and returns a key."""


def other_categories(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones, in another order."""
    from precompute.plugins.trees import lightgbm_model as module

    read = module._categories

    def turned(*given: Any) -> dict[str, list[Any]]:
        return {name: [*values[1:], values[0]] for name, values in read(*given).items()}

    monkeypatch.setattr(module, "_categories", turned)


def cut_categories(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are unknown, and taken for missing."""
    from precompute.plugins.trees import xgboost_model as module

    texts = module.Categories.texts

    def cut(self: Any) -> list[str] | None:
        known = texts(self)
        return None if known is None else [value[:-1] for value in known]

    monkeypatch.setattr(module.Categories, "texts", cut)


def other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from precompute.plugins.trees.catboost_model import CatBoost

    scores = CatBoost.scores
    monkeypatch.setattr(
        CatBoost, "scores", lambda self, pair, n: scores(self, (pair[0][:, ::-1], pair[1]), n)
    )


WRONG: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "order of categories": ("lightgbm", other_categories, {}),
    "cut categories": ("xgboost", cut_categories, {"unknown": "missing"}),
    "columns": ("catboost", other_columns, {}),
}
"""What is wrong → the model that is made so, and its other arguments: its own library tells."""
