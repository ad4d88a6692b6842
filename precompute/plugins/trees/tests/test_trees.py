"""Trees: which column is which feature of the model, and what is said where they do not fit; files
of every shape, whole and damaged."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import catboost
import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xgboost

from precompute.model import Model, StagedModel
from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError, PrecomputeError

ROWS = pa.record_batch(
    {"age": [31.0, None], "genre": ["drama", "comedy"], "year": pa.array([1990, 2000], pa.int16())}
)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of a number, a category of texts and one of numbers."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": rng.integers(0, 80, 500),
            "genre": rng.choice(["comedy", "drama"], 500),
            "year": rng.choice([1990, 2000], 500),
        }
    )
    frame = frame.astype({"genre": "category", "year": "category"})
    target = frame["age"] + 9 * (frame["genre"] == "drama") + (frame["year"] == 1990) > 40
    path = str(tmp_path_factory.mktemp("books") / "model.txt")
    lightgbm.train(
        {"objective": "binary", "verbose": -1, "num_leaves": 4}, lightgbm.Dataset(frame, target), 3
    ).save_model(path)
    return path


def loaded(path: str, **args: Any) -> Any:
    model = load_model("lightgbm", {"path": path, **args})
    assert isinstance(model, StagedModel)
    return model


def test_columns_are_named_in_order_or_by_feature(books: str) -> None:
    expected = loaded(books).compute(ROWS)["score"].tolist()
    renamed = ROWS.rename_columns(["a", "b", "year"])
    for columns in (["a", "b", "year"], {"age": "a", "genre": "b"}):
        model = loaded(books, columns=columns)
        assert model.reads() == ["a", "b", "year"]
        assert model.compute(renamed)["score"].tolist() == expected
    coded = ROWS.set_column(1, "genre", ROWS.column("genre").dictionary_encode())
    assert loaded(books).compute(coded)["score"].tolist() == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"columns": ["age"]},
            "columns has 1 names, the model has 3 features ('age', 'genre', 'year')",
        ),
        (
            {"columns": {"gener": "g"}},
            "columns names 'gener'; the model has 3 features ('age', 'genre', 'year'); did you mean 'genre'?",
        ),
        (
            {"columns": 3},
            "columns is a list of columns, or a mapping of features to columns; got 3",
        ),
        ({"unknown": "null"}, "unknown is bad or missing, got 'null'"),
        ({"raw": "yes"}, "raw is true or false, got 'yes'"),
        (
            {"label": "l"},
            "label needs `classes`, the names of the model's 2 classes in its order; got None",
        ),
        (
            {"label": "score", "classes": ["a", "b"]},
            "label and output are both 'score': give them two names",
        ),
        ({"classes": ["a", "b"]}, "classes names what `label` is made of: set `label`"),
        ({"path": "."}, "path '.' is a folder: name the model's file"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(
    books: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"lightgbm: {message}")):
        loaded(**{"path": books} | args)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (
            "age",
            ["old", "young"],
            "column 'age' is string, and the model's feature 'age' is a number",
        ),
        (
            "genre",
            [1, 2],
            "column 'genre' is int64, and the model's feature 'genre' has categories that are texts (comedy, drama): CAST it AS VARCHAR",
        ),
        (
            "year",
            ["1990", "2000"],
            "column 'year' is string, and the model's feature 'year' is categories that are numbers (1990, 2000)",
        ),
    ],
)
def test_a_source_of_other_columns_ends_the_run(
    books: str, column: str, values: Any, message: str
) -> None:
    place = ROWS.schema.get_field_index(column)
    rows = ROWS.set_column(place, column, pa.array(values))
    with pytest.raises(ModelError, match=re.escape(f"lightgbm: {message}")):
        loaded(books).prepare(rows)


def test_a_category_that_is_unknown_is_a_bad_row_or_a_missing_value(books: str) -> None:
    rows = ROWS.set_column(2, "year", pa.array([1985, 2000]))
    reason = "year is 1985, which is none of the categories that the model knows (1990, 2000)"
    assert loaded(books).prepare(rows).bad == {0: reason}
    missing = rows.set_column(2, "year", pa.array([None, 2000], pa.int64()))
    as_missing = loaded(books, unknown="missing")
    assert (
        as_missing.compute(rows)["score"].tolist()
        == loaded(books).compute(missing)["score"].tolist()
    )


def trained(
    folder: Path, library: str, settings: dict[str, Any], x: Any, y: Any
) -> tuple[str, Any]:
    """(a model's file, the library's own object)."""
    path = str(folder / library)
    if library == "lightgbm":
        made: Any = lightgbm.train(
            {"num_leaves": 5, "verbose": -1, **settings}, lightgbm.Dataset(x, y), 3
        )
        made.save_model(path)
    elif library == "xgboost":
        made = xgboost.train({"max_depth": 3, "nthread": 1, **settings}, xgboost.DMatrix(x, y), 3)
        made.save_model(f"{path}.json")
        path += ".json"
    else:
        threshold, settings = (
            settings.get("threshold"),
            {key: value for key, value in settings.items() if key != "threshold"},
        )
        options = {
            "iterations": 3,
            "depth": 3,
            "verbose": False,
            "allow_writing_files": False,
            "thread_count": 1,
        }
        is_regression = settings.get("loss_function", "").startswith(("RMSE", "MultiRMSE"))
        made = (catboost.CatBoostRegressor if is_regression else catboost.CatBoostClassifier)(
            **options, **settings
        ).fit(x, y)
        if threshold is not None:
            made.set_probability_threshold(threshold)
        made.save_model(path, format="json")
        # of which it does not read each last bit as it was
        made.load_model(path, format="json")
    return path, made


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("library", "settings", "middle"),
    [
        ("lightgbm", {"objective": "binary", "sigmoid": 2}, 0.5),
        ("lightgbm", {"objective": "cross_entropy"}, 0.5),
        ("lightgbm", {"objective": "cross_entropy_lambda"}, None),
        ("lightgbm", {"objective": "poisson"}, None),
        ("lightgbm", {"objective": "regression"}, None),
        ("xgboost", {"objective": "binary:logistic"}, 0.5),
        ("xgboost", {"objective": "binary:logitraw"}, 0.0),
        ("xgboost", {"objective": "binary:hinge"}, 0.5),
        ("xgboost", {"objective": "reg:squarederror"}, None),
        ("xgboost", {"objective": "count:poisson"}, None),
        ("catboost", {}, 0.5),
        ("catboost", {"threshold": 0.3}, 0.3),
        ("catboost", {"loss_function": "CrossEntropy"}, 0.5),
        ("catboost", {"loss_function": "RMSE"}, None),
        ("catboost", {"loss_function": "MultiLogloss"}, None),
        ("catboost", {"loss_function": "RMSEWithUncertainty"}, None),
    ],
)
def test_a_label_follows_from_a_score_of_classes_alone(
    tmp_path: Path, library: str, settings: dict[str, Any], middle: float | None, raw: bool
) -> None:
    rng = np.random.default_rng(0)
    x = rng.random((400, 3)).astype(np.float32)
    y = (x[:, 0] + rng.random(400) > 1.1).astype(float)
    several = settings.get("loss_function") == "MultiLogloss"
    path, made = trained(tmp_path, library, settings, x, np.c_[y, 1 - y] if several else y)
    args = {"path": path, "columns": list("abc"), "raw": raw}
    batch = pa.record_batch({name: x[:, place] for place, name in enumerate("abc")})
    of_library: dict[str, Callable[[], Any]] = {
        "lightgbm": lambda: made.predict(x, raw_score=raw),
        "xgboost": lambda: made.predict(xgboost.DMatrix(x), output_margin=raw),
        "catboost": lambda: (
            made.predict(x, prediction_type="RawFormulaVal")
            if raw
            else made.predict_proba(x)[:, slice(0, 2) if several else 1]
            if len(made.classes_)
            else made.predict(x)
        ),
    }
    assert np.array_equal(load_model(library, args).compute(batch)["score"], of_library[library]())
    labelled = {**args, "label": "l", "classes": ["no", "yes"]}
    if middle is None:
        with pytest.raises(
            ConfigError,
            match=f"^{library}: label is a row's class, and the objective '.+' gives no score from",
        ):
            load_model(library, labelled)
        return
    plain = load_model(library, args | {"raw": False}).compute(batch)["score"]
    expected = (plain > middle).tolist()
    model: Any = load_model(library, labelled)
    found = model.compute(batch)["l"]
    assert found.to_pylist() == np.where(expected, "yes", "no").tolist()
    # of both as likely the first, as the libraries do
    assert model.land(np.array([model._middle]))["l"].to_pylist() == ["no"]
    if library == "catboost":
        assert made.predict(x).tolist() == expected


def shapes_of_lightgbm(folder: Path) -> dict[str, Callable[[Any], Any]]:
    """Files of every kind of model, and what the library makes of rows by each."""
    rng = np.random.default_rng(0)
    x, y = rng.random((600, 4)), rng.integers(0, 3, 600)
    codes = np.c_[x[:, :3], rng.integers(0, 40, 600)]
    sets: dict[str, tuple[dict[str, Any], Any]] = {
        "multi": ({"objective": "multiclass", "num_class": 3}, lightgbm.Dataset(x, y)),
        "rank": ({"objective": "lambdarank"}, lightgbm.Dataset(x, y, group=[60] * 10)),
        "linear": ({"linear_tree": True}, lightgbm.Dataset(x, x[:, 0])),
        "forest": (
            {"objective": "binary", "boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5},
            lightgbm.Dataset(x, y > 0),
        ),
        "constant": ({}, lightgbm.Dataset(x, np.ones(600))),
        "codes": (
            {},
            lightgbm.Dataset(
                codes, y, feature_name=["größe", "b", "c", "d"], categorical_feature=[3]
            ),
        ),
    }
    found = dict[str, Callable[[Any], Any]]()
    for name, (settings, data) in sets.items():
        lightgbm.train({"num_leaves": 5, "verbose": -1, **settings}, data, 3).save_model(
            folder / f"{name}.lightgbm"
        )
        found[f"{name}.lightgbm"] = lightgbm.Booster(model_file=folder / f"{name}.lightgbm").predict
    return found


def xgboost_scores(booster: xgboost.Booster, rows: Any) -> Any:
    return booster.inplace_predict(rows.astype(np.float32))


def shapes_of_xgboost(folder: Path) -> dict[str, Callable[[Any], Any]]:
    """The same of XGBoost."""
    rng = np.random.default_rng(0)
    x, y = rng.random((600, 4)), rng.integers(0, 3, 600)
    sets: dict[str, tuple[dict[str, Any], Any]] = {
        "softmax": ({"objective": "multi:softmax", "num_class": 3}, y),
        "dart": ({"booster": "dart", "rate_drop": 0.5, "objective": "binary:logistic"}, y > 0),
        "pruned": ({"tree_method": "exact", "gamma": 2, "objective": "binary:logistic"}, y > 0),
        "forest": ({"num_parallel_tree": 3, "subsample": 0.5}, y),
    }
    found = dict[str, Callable[[Any], Any]]()
    for name, (settings, target) in sets.items():
        booster = xgboost.train(
            {"max_depth": 3, "nthread": 1, **settings}, xgboost.DMatrix(x, target), 3
        )
        booster.save_model(folder / f"{name}.json")
        (folder / f"{name}.json").rename(folder / f"{name}.xgboost")
        found[f"{name}.xgboost"] = partial(xgboost_scores, booster)
    return found


@pytest.mark.parametrize("shapes", [shapes_of_lightgbm, shapes_of_xgboost])
def test_files_of_every_shape_give_the_librarys_own_scores(
    tmp_path: Path, shapes: Callable[[Path], dict[str, Callable[[Any], Any]]]
) -> None:
    rows = np.random.default_rng(1).random((50, 4))
    rows[:, 3] = np.arange(50)
    rows[3, 1] = np.nan
    for file, predict in shapes(tmp_path).items():
        model: Model = load_model(
            file.rpartition(".")[2], {"path": str(tmp_path / file), "columns": list("abcd")}
        )
        batch = pa.record_batch({name: rows[:, place] for place, name in enumerate("abcd")})
        assert np.array_equal(model.compute(batch)["score"], predict(rows)), file


@pytest.mark.parametrize("shapes", [shapes_of_lightgbm, shapes_of_xgboost])
def test_a_file_with_a_flaw_is_refused_or_computes(
    tmp_path: Path, shapes: Callable[[Path], dict[str, Callable[[Any], Any]]]
) -> None:
    """Read by the libraries themselves, most of these end the process."""
    drawn = random.Random(0)
    refused = list[str]()
    for file in shapes(tmp_path):
        content = (tmp_path / file).read_bytes()
        for _ in range(25):
            flawed = bytearray(content)
            at = drawn.randrange(len(flawed))
            numbers = list(re.finditer(rb"(?<=[,=\[ \"])-?\d+(?=[,\] \"\n])", content))
            number = drawn.choice(numbers)
            match drawn.randrange(4):
                case 0:
                    flawed[at] ^= 1 << drawn.randrange(8)
                case 1:
                    del flawed[at : at + drawn.randrange(1, 200)]
                case _:
                    flawed[number.start() : number.end()] = str(
                        drawn.choice([-1, 0, 5, 99_999, 10**12])
                    ).encode()
            (tmp_path / "flawed").write_bytes(flawed)
            try:
                model: Any = load_model(file.rpartition(".")[2], {"path": str(tmp_path / "flawed")})
                model.launch(np.full((3, len(model.reads())), 0.5))
            except PrecomputeError as exc:
                refused.append(str(exc))
    assert len(refused) > 20
    assert not [message for message in refused if "failed to load" in message], (
        "an error of the library that nobody translated"
    )


def test_children_that_make_no_tree_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = lightgbm.Dataset(rng.random((300, 2)), rng.random(300))
    text = lightgbm.train({"num_leaves": 5, "verbose": -1}, data, 1).model_to_string()
    children = re.search(r"left_child=(\S+) (\S+)", text)
    assert children is not None
    # as long as it was, since trees have their sizes in bytes
    twice = f"left_child={children[2]} {children[2]}".ljust(len(children[0]))
    path = tmp_path / "model.txt"
    path.write_text(text.replace(children[0], twice, 1))
    with pytest.raises(ModelError, match="tree 0 of 1: its children are no tree"):
        load_model("lightgbm", {"path": str(path)})


def test_the_best_round_is_the_last_that_counts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = xgboost.DMatrix(rng.random((300, 2)), rng.random(300))
    booster = xgboost.train(
        {"nthread": 1},
        data,
        30,
        evals=[(xgboost.DMatrix(rng.random((50, 2)), rng.random(50)), "v")],
        early_stopping_rounds=3,
        verbose_eval=False,
    )
    booster.save_model(tmp_path / "model.json")
    best = int(
        json.loads((tmp_path / "model.json").read_text())["learner"]["attributes"]["best_iteration"]
    )
    rows = rng.random((20, 2))
    model: Any = load_model("xgboost", {"path": str(tmp_path / "model.json")})
    expected = booster.inplace_predict(rows.astype(np.float32), iteration_range=(0, best + 1))
    assert best < booster.num_boosted_rounds() - 1
    assert np.array_equal(model.launch(rows), expected)
