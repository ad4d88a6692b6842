"""Files of trees of every kind that their libraries write: each gives the library's own scores, or
is refused by the name of what is not computed; and what is no such file is named."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import catboost
import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xgboost

from precompute.plugins.trees.ubjson import parsed_ubjson
from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError, PrecomputeError

ROWS = 240
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "a": RNG.random(ROWS),
        "b": RNG.random(ROWS),
        "genre": RNG.choice(["rock", "pop", "é"], ROWS),
        "size": RNG.choice([7, 1, 3, 5, 9], ROWS),
    }
)
FRAME.loc[3, "a"] = np.nan
TARGET = FRAME["b"] * 2 + (FRAME["genre"] == "rock") + 0.1
IS_HIGH = (TARGET > 1).astype(int)
CLASS = np.digitize(TARGET, [0.8, 1.4])
TWO = np.c_[TARGET, IS_HIGH]
NUMBERS = FRAME[["a", "b"]]
GROUPS = np.repeat(np.arange(ROWS // 10), 10)


def score(use: str, path: Path, frame: pd.DataFrame, **args: Any) -> Any:
    model: Any = load_model(use, {"path": str(path), **args})
    return model.compute(pa.RecordBatch.from_pandas(frame, preserve_index=False))["score"]


def outcome(use: str, path: Path, frame: pd.DataFrame) -> tuple[str, Any]:
    """(why it is refused, else an empty text; its scores)."""
    try:
        return "", score(use, path, frame)
    except (PrecomputeError, ValueError) as exc:
        # ValueError: of a row, whose category is none that the model knows
        return str(exc), None


# ---- CatBoost

REGRESSOR, CLASSIFIER, RANKER = (
    catboost.CatBoostRegressor,
    catboost.CatBoostClassifier,
    catboost.CatBoostRanker,
)
COUNTERS = {"simple_ctr": "Counter", "combinations_ctr": "Counter"}
CATBOOST: dict[str, tuple[Any, dict[str, Any], pd.DataFrame, Any]] = {
    **{
        loss: (REGRESSOR, {"loss_function": loss}, FRAME, TARGET)
        for loss in (
            "RMSE",
            "MAE",
            "Quantile:alpha=0.3",
            "MultiQuantile:alpha=0.1,0.5",
            "Poisson",
            "Tweedie:variance_power=1.5",
            "RMSEWithUncertainty",
            "LogLinQuantile",
            "Cox",
        )
    },
    **{
        loss: (CLASSIFIER, {"loss_function": loss}, FRAME, target)
        for loss, target in (
            ("Logloss", IS_HIGH),
            ("CrossEntropy", IS_HIGH * 0.8),
            ("MultiClass", CLASS),
            ("MultiClassOneVsAll", CLASS),
            ("Focal:focal_alpha=0.5;focal_gamma=1", IS_HIGH),
        )
    },
    **{
        loss: (RANKER, {"loss_function": loss}, FRAME, TARGET)
        for loss in ("YetiRank", "PairLogit", "QueryRMSE")
    },
    **{
        kind: (REGRESSOR, {"simple_ctr": kind, "combinations_ctr": kind}, FRAME, TARGET)
        for kind in ("Borders", "Buckets", "BinarizedTargetMeanValue", "Counter")
    },
    "several targets": (REGRESSOR, {"loss_function": "MultiRMSE", **COUNTERS}, FRAME, TWO),
    "several labels": (
        CLASSIFIER,
        {"loss_function": "MultiLogloss", "one_hot_max_size": 9},
        FRAME,
        np.c_[IS_HIGH, 1 - IS_HIGH],
    ),
    "one hot": (REGRESSOR, {"one_hot_max_size": 9}, FRAME, TARGET),
    "depthwise": (REGRESSOR, {"grow_policy": "Depthwise"}, FRAME, TARGET),
    "lossguide": (CLASSIFIER, {"grow_policy": "Lossguide"}, FRAME, CLASS),
    "monotone": (REGRESSOR, {"monotone_constraints": [1, 1]}, NUMBERS, TARGET),
    "named classes": (CLASSIFIER, {"class_weights": [1, 3]}, FRAME, np.where(IS_HIGH, "ü", "n")),
    "notes": (REGRESSOR, {"metadata": {"who": "me"}}, NUMBERS, TARGET),
}


def saved_by_catboost(
    path: Path, kind: Any, settings: dict[str, Any], frame: pd.DataFrame, target: Any, pool: bool
) -> Any:
    """As the library reads it again, which is not to the last bit what it trained."""
    texts = [name for name in ("genre", "size") if name in frame]
    made = kind(
        iterations=3,
        depth=3,
        verbose=False,
        allow_writing_files=False,
        thread_count=1,
        cat_features=texts,
        **({"one_hot_max_size": 1} | settings if texts else settings),
    )
    groups = {"group_id": GROUPS} if kind is RANKER else {}
    made.fit(frame, target, **groups)
    given = {"pool": catboost.Pool(frame, target, cat_features=texts, **groups)} if pool else {}
    made.save_model(str(path), format="json", **given)
    made.load_model(str(path), format="json")
    return made


@pytest.mark.parametrize("pool", [False, True])
def test_catboost_of_every_kind_gives_the_librarys_own_scores(tmp_path: Path, pool: bool) -> None:
    for name, (kind, settings, frame, target) in CATBOOST.items():
        made = saved_by_catboost(tmp_path / "m.json", kind, settings, frame, target, pool)
        found = score("catboost", tmp_path / "m.json", frame)
        expected = made.predict_proba(frame) if kind is CLASSIFIER else made.predict(frame)
        if kind is CLASSIFIER and found.ndim == 1:
            expected = expected[:, 1]
        assert np.array_equal(found, expected), name


@pytest.mark.parametrize(
    ("settings", "target", "said"),
    [
        ({"loss_function": "MultiRMSE"}, TWO, "MultiRMSE, of several targets"),
        (
            {"simple_ctr": ["Borders:TargetBorderCount=1", "Borders:TargetBorderCount=4"]},
            TARGET,
            "ctrs of the kind Borders with several borders of the target",
        ),
    ],
)
def test_a_catboost_file_that_lacks_tables_of_its_categories_is_refused(
    tmp_path: Path, settings: dict[str, Any], target: Any, said: str
) -> None:
    """What the library reads from it is not what was trained."""
    options = {"iterations": 20, "depth": 3, "verbose": False, "allow_writing_files": False}
    made = REGRESSOR(**options, cat_features=["genre", "size"], one_hot_max_size=1, **settings).fit(
        FRAME, target
    )
    trained = made.predict(FRAME)
    made.save_model(str(tmp_path / "m.json"), format="json")
    read = REGRESSOR().load_model(str(tmp_path / "m.json"), format="json").predict(FRAME)
    assert np.abs(trained - read).max() > 1e-3
    with pytest.raises(ConfigError, match=f"trained with {said}.*simple_ctr='Counter'"):
        score("catboost", tmp_path / "m.json", FRAME)


# ---- XGBoost

PLAIN = FRAME[["a", "b", "size"]].rename(columns={"a": "f0", "b": "f1", "size": "f2"})
CODES = PLAIN.assign(f2=PLAIN["f2"] // 2)
SURVIVAL = {"label_lower_bound": TARGET, "label_upper_bound": TARGET + 1}
XGBOOST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        objective: ({"objective": objective}, {"label": TARGET})
        for objective in (
            "reg:squarederror",
            "reg:pseudohubererror",
            "reg:absoluteerror",
            "reg:gamma",
            "reg:tweedie",
            "count:poisson",
            "survival:cox",
        )
    },
    **{
        objective: ({"objective": objective}, {"label": IS_HIGH})
        for objective in ("reg:logistic", "binary:logistic", "binary:logitraw", "binary:hinge")
    },
    **{
        f"rank {name}": (
            {"objective": "rank:ndcg", **more},
            {"label": IS_HIGH, "group": [10] * (ROWS // 10)},
        )
        for name, more in (("biased", {}), ("unbiased", {"lambdarank_unbiased": True}))
    },
    "quantiles": (
        {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.5, 0.9]},
        {"label": TARGET},
    ),
    "softmax": ({"objective": "multi:softmax", "num_class": 3}, {"label": CLASS}),
    "softprob": ({"objective": "multi:softprob", "num_class": 3}, {"label": CLASS}),
    "aft": ({"objective": "survival:aft"}, SURVIVAL),
    "forest": ({"num_parallel_tree": 3, "subsample": 0.5}, {"label": TARGET}),
    "dart": ({"booster": "dart", "rate_drop": 0.5}, {"label": TARGET}),
    "several targets": ({}, {"label": TWO}),
    "exact": ({"tree_method": "exact", "gamma": 1}, {"label": TARGET}),
    "base score": ({"base_score": 0.3, "objective": "binary:logistic"}, {"label": IS_HIGH}),
    "weights": ({"colsample_bytree": 0.5}, {"label": TARGET, "feature_weights": [1, 2, 3]}),
    "codes": (
        {"max_cat_to_onehot": 1},
        {"label": TARGET, "feature_types": ["float", "q", "c"], "enable_categorical": True},
    ),
    "types": ({}, {"label": TARGET, "feature_types": ["float", "float", "int"]}),
}


def trained_by_xgboost(settings: dict[str, Any], data: dict[str, Any]) -> Any:
    matrix = xgboost.DMatrix(
        CODES.to_numpy(), **{k: v for k, v in data.items() if k[:6] != "label_"}
    )
    for name, values in data.items():
        if name.startswith("label_"):
            matrix.set_float_info(name, values)
    return xgboost.train({"max_depth": 3, "nthread": 1, **settings}, matrix, 3)


def test_xgboost_of_every_kind_gives_the_librarys_own_scores(tmp_path: Path) -> None:
    for name, (settings, data) in XGBOOST.items():
        made = trained_by_xgboost(settings, data)
        expected = made.inplace_predict(CODES.to_numpy(np.float32))
        for ending in ("json", "ubj"):
            made.save_model(tmp_path / f"m.{ending}")
            found = score("xgboost", tmp_path / f"m.{ending}", CODES)
            assert np.array_equal(found, expected), (name, ending)
        # the same, whichever way it was written
        content = json.loads((tmp_path / "m.json").read_text())
        assert parsed_ubjson((tmp_path / "m.ubj").read_bytes()) == content, name


def test_a_file_of_an_older_xgboost_is_read(tmp_path: Path) -> None:
    """Each lacks what its version did not write, and the library reads it so."""
    made = trained_by_xgboost({"num_parallel_tree": 2}, {"label": TARGET})
    made.save_model(tmp_path / "m.json")
    expected = made.inplace_predict(CODES.to_numpy(np.float32))
    model = json.loads((tmp_path / "m.json").read_text())
    learner = model["learner"]
    inner = learner["gradient_booster"]["model"]
    del inner["cats"], inner["iteration_indptr"], learner["feature_types"], learner["feature_names"]
    inner["gbtree_model_param"]["size_leaf_vector"] = "0"
    param = learner["learner_model_param"]
    param["base_score"] = param["base_score"].strip("[]")
    del param["boost_from_average"], param["num_target"]
    model["version"] = [1, 7, 6]
    for tree in inner["trees"]:
        tree["default_left"] = [bool(one) for one in tree["default_left"]]
        for key in ("", "_nodes", "_segments", "_sizes"):
            del tree[f"categories{key}"]
        del tree["split_type"]
    (tmp_path / "m.json").write_text(json.dumps(model))
    assert np.array_equal(score("xgboost", tmp_path / "m.json", CODES), expected)


CATEGORIES: dict[str, tuple[list[Any], bool]] = {
    "ascii": (["pop", "rock", "a"], True),
    "empty and one letter": (["", "b", "c"], True),
    "long": (["x" * 5000, "y" * 3, "xy"], True),
    "numbers": ([3, 1, 2], True),
    "last": (["pop", "rock", "é"], False),
    "first": (["éa", "b", "c"], False),
    "cjk": (["日本", "中国", "x"], False),
    "mixed": (["ß", "a", "été"], False),
}
"""Name → (categories in the order of training, whether the file has their names)."""


def with_categories(values: list[Any]) -> tuple[Any, Any, Any]:
    """(frame of pandas, what the library made, its scores)."""
    codes = np.arange(ROWS) % len(values)
    frame = pd.DataFrame({"x": FRAME["b"], "g": pd.Categorical.from_codes(codes, values)})
    matrix = xgboost.DMatrix(frame, codes * 10 + FRAME["b"], enable_categorical=True)
    made = xgboost.train({"max_depth": 3, "nthread": 1, "eta": 1}, matrix, 3)
    return frame, made, made.predict(xgboost.DMatrix(frame, enable_categorical=True))


@pytest.mark.parametrize("ending", ["json", "ubj"])
@pytest.mark.parametrize("kind", CATEGORIES)
def test_categories_of_xgboost_are_those_of_the_library_or_asked_for(
    tmp_path: Path, kind: str, ending: str
) -> None:
    """Its writer takes letters for bytes: a name that is not in ASCII, and those behind it, are
    parts of others in the file."""
    values, named = CATEGORIES[kind]
    frame, made, expected = with_categories(values)
    path = tmp_path / f"m.{ending}"
    made.save_model(path)
    rows = frame.astype({"g": int if kind == "numbers" else str})
    if not named:
        for unknown in ("bad", "missing"):
            with pytest.raises(ConfigError, match=r"categories of 'g' are not in ASCII.*give them"):
                score("xgboost", path, rows, unknown=unknown)
        for others in (values[::-1], [*values, "more"], values[:-1]):
            with pytest.raises(ConfigError, match=r"categories.g are others than those"):
                score("xgboost", path, rows, categories={"g": others})
    args = {} if named else {"categories": {"g": values}}
    assert np.array_equal(score("xgboost", path, rows, **args), expected)


def test_categories_in_another_order_than_the_file_says_are_refused(
    tmp_path: Path,
) -> None:
    frame = FRAME[["b"]].assign(
        g=pd.Categorical(FRAME["genre"].replace("é", "e")), h=pd.Categorical(FRAME["size"])
    )
    made = xgboost.train({"nthread": 1}, xgboost.DMatrix(frame, TARGET, enable_categorical=True), 3)
    made.save_model(tmp_path / "m.json")
    rows = frame.astype({"g": str, "h": int})
    expected = made.predict(xgboost.DMatrix(frame, enable_categorical=True))
    assert np.array_equal(score("xgboost", tmp_path / "m.json", rows), expected)
    content = (tmp_path / "m.json").read_text()
    order = re.search(r'"sorted_idx":\[([\d,]+)\]', content)
    assert order is not None
    for other in (order[1][::-1], order[1] + ",0", order[1].replace("0", "9")):
        (tmp_path / "m.json").write_text(content.replace(order[1], other))
        with pytest.raises(ModelError, match=r"categories (of . )?are not whole"):
            score("xgboost", tmp_path / "m.json", rows)


def test_two_categories_that_are_one_after_the_cut_are_refused(tmp_path: Path) -> None:
    values = ["ä", "ö", "ü", "z"]
    frame, made, scores = with_categories(values)
    made.save_model(tmp_path / "m.json")
    # the library itself takes the one for the other
    assert np.abs(scores - (np.arange(ROWS) % 4 * 10 + FRAME["b"])).max() > 5
    with pytest.raises(
        ConfigError, match=r"so that two of them are one.*train with names in ASCII"
    ):
        score("xgboost", tmp_path / "m.json", frame, categories={"g": values})


def test_categories_of_arrow_are_whole_and_told_by_the_same_list(tmp_path: Path) -> None:
    values = ["ä", "ö", "z"]
    codes = np.arange(ROWS) % 3
    genre = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(values))
    table = pa.table({"x": FRAME["b"].to_numpy(), "g": genre})
    matrix = xgboost.DMatrix(table, codes * 10.0, enable_categorical=True)
    made = xgboost.train({"max_depth": 3, "nthread": 1, "eta": 1}, matrix, 3)
    made.save_model(tmp_path / "m.json")
    rows = table.to_pandas().astype({"g": str})
    with pytest.raises(ConfigError, match="not in ASCII"):
        score("xgboost", tmp_path / "m.json", rows)
    found = score("xgboost", tmp_path / "m.json", rows, categories={"g": values})
    assert np.array_equal(found, made.predict(matrix))


@pytest.mark.parametrize(
    ("categories", "said"),
    [
        (["a"], "categories maps features to lists of their different texts"),
        ({"g": [["a"]]}, "categories maps features to lists of their different texts"),
        ({"g": ["a", "a"]}, "categories maps features to lists of their different texts"),
        ({"h": ["a"]}, "categories names 'h', of which .* has none; it has those of 'g'"),
    ],
)
def test_categories_that_do_not_fit_are_named(tmp_path: Path, categories: Any, said: str) -> None:
    frame, made, _ = with_categories(["pop", "rock", "a"])
    made.save_model(tmp_path / "m.json")
    with pytest.raises(ConfigError, match=said):
        score("xgboost", tmp_path / "m.json", frame, categories=categories)


def test_the_categories_that_were_given_count_in_the_fingerprint(tmp_path: Path) -> None:
    _, made, _ = with_categories(["pop", "rock", "a"])
    made.save_model(tmp_path / "m.json")
    args = {"path": str(tmp_path / "m.json")}
    given = args | {"categories": {"g": ["pop", "rock", "a"]}}
    assert load_model("xgboost", args).fingerprint() != load_model("xgboost", given).fingerprint()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"booster": "gblinear"}, "it is linear .gblinear."),
        (
            {"multi_strategy": "multi_output_tree", "tree_method": "hist"},
            "multi_strategy='one_output_per_tree'",
        ),
    ],
)
def test_what_is_not_computed_of_xgboost_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    matrix = xgboost.DMatrix(PLAIN.fillna(0), TWO)
    # what a linear one does not use, it warns of
    quiet = {"nthread": 1, "max_depth": 2, "verbosity": 0}
    made = xgboost.train(quiet | settings, matrix, 2)
    for ending in ("json", "ubj"):
        made.save_model(tmp_path / f"m.{ending}")
        with pytest.raises(ConfigError, match=said):
            score("xgboost", tmp_path / f"m.{ending}", PLAIN)


# ---- LightGBM

ODD = PLAIN.rename(columns={"f0": "größe", "f1": "b c", "f2": "d=e"})
PANDAS = pd.DataFrame(
    {
        "b": FRAME["b"],
        "text": pd.Categorical(FRAME["genre"].map({"rock": 'r",o\n', "pop": "p'q", "é": "é f"})),
        "whole": pd.Categorical(FRAME["size"]),
        "truth": pd.Categorical(FRAME["b"] > 0.4),
        "half": pd.Categorical(FRAME["size"] / 2),
    }
)
LIGHTGBM: dict[str, tuple[dict[str, Any], pd.DataFrame, Any]] = {
    **{
        objective: ({"objective": objective}, PLAIN, target)
        for objective, target in (
            ("regression_l1", TARGET),
            ("huber", TARGET),
            ("quantile", TARGET),
            ("mape", TARGET),
            ("gamma", TARGET),
            ("tweedie", TARGET),
            ("poisson", TARGET),
            ("binary", IS_HIGH),
            ("cross_entropy", IS_HIGH),
        )
    },
    "multiclass": ({"objective": "multiclass", "num_class": 3}, PLAIN, CLASS),
    "one against all": ({"objective": "multiclassova", "num_class": 3}, PLAIN, CLASS),
    "rank": ({"objective": "lambdarank"}, PLAIN, IS_HIGH),
    "own objective": (
        {"objective": lambda made, data: (made - data.get_label(), np.ones(len(made)))},
        PLAIN,
        TARGET,
    ),
    "linear": ({"linear_tree": True}, PLAIN, TARGET),
    "forest": ({"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5}, PLAIN, TARGET),
    "dart": ({"boosting": "dart"}, PLAIN, TARGET),
    "zeros": ({"zero_as_missing": True}, PLAIN.fillna(0), TARGET),
    "no missing": ({"use_missing": False}, PLAIN, TARGET),
    "root": ({"objective": "regression", "reg_sqrt": True}, PLAIN, TARGET),
    "no average": ({"boost_from_average": False}, PLAIN, TARGET),
    "monotone": ({"monotone_constraints": [1, 0, 0]}, PLAIN, TARGET),
    "constant": ({}, PLAIN, np.ones(ROWS)),
    "names": ({}, ODD, TARGET),
    "categories": ({"max_cat_to_onehot": 1, "min_data_per_group": 1}, PANDAS, TARGET),
}


def saved_by_lightgbm(
    path: Path, settings: dict[str, Any], frame: pd.DataFrame, target: Any
) -> Any:
    groups = [10] * (ROWS // 10) if settings.get("objective") == "lambdarank" else None
    data = lightgbm.Dataset(frame, target, group=groups)
    options = {"num_leaves": 5, "verbose": -1, "num_threads": 1, "min_data_in_leaf": 5}
    lightgbm.train(options | settings, data, 3).save_model(path)
    return lightgbm.Booster(model_file=path)


def test_lightgbm_of_every_kind_gives_the_librarys_own_scores(tmp_path: Path) -> None:
    for name, (settings, frame, target) in LIGHTGBM.items():
        made = saved_by_lightgbm(tmp_path / "m.txt", settings, frame, target)
        plain = frame
        if name == "categories":
            plain = frame.astype({"text": str, "whole": int, "truth": bool, "half": float})
        found = score(
            "lightgbm", tmp_path / "m.txt", plain, columns=[str(one) for one in frame.columns]
        )
        assert np.array_equal(found, made.predict(frame)), name


def test_a_lightgbm_that_was_stopped_early_has_its_best_rounds(tmp_path: Path) -> None:
    train = lightgbm.Dataset(PLAIN, TARGET)
    noisy = np.where(np.arange(ROWS) % 3, TARGET, 0)
    valid = lightgbm.Dataset(PLAIN, noisy, reference=train)
    made = lightgbm.train(
        {"verbose": -1, "num_threads": 1},
        train,
        40,
        valid_sets=[valid],
        callbacks=[lightgbm.early_stopping(2, verbose=False)],
    )
    made.save_model(tmp_path / "m.txt")
    assert made.best_iteration < 40
    assert np.array_equal(score("lightgbm", tmp_path / "m.txt", PLAIN), made.predict(PLAIN))


def test_a_category_beyond_float64_is_named_and_a_row_of_one_is_unknown(tmp_path: Path) -> None:
    codes = np.arange(ROWS) % 2
    for values, fits in (([1, 2**53], True), ([1, 2**60 + 1], False)):
        frame = pd.DataFrame({"x": FRAME["b"], "g": pd.Categorical.from_codes(codes, values)})
        saved_by_lightgbm(tmp_path / "m.txt", {}, frame, codes)
        if fits:
            model: Any = load_model("lightgbm", {"path": str(tmp_path / "m.txt")})
            rows = pa.record_batch({"x": [0.5, 0.5], "g": pa.array([1, 2**60 + 1])})
            assert list(model.prepare(rows).bad) == [1]
        else:
            with pytest.raises(ModelError, match="categories of 'g' are neither texts nor numbers"):
                score("lightgbm", tmp_path / "m.txt", frame)


# ---- What is not known, damaged, or none


def files(folder: Path) -> dict[str, tuple[Path, Any, pd.DataFrame]]:
    """Built-in → (a file, what the library makes of a file's rows, rows)."""
    saved_by_lightgbm(folder / "m.txt", {}, PLAIN, TARGET)
    frame, made, _ = with_categories(["pop", "rock", "a"])
    made.save_model(folder / "m.json")
    saved_by_catboost(folder / "c.json", REGRESSOR, {}, FRAME, TARGET, True)

    def of_lightgbm(path: Path) -> Any:
        return lightgbm.Booster(model_file=path).predict(PLAIN)

    def of_xgboost(path: Path) -> Any:
        booster = xgboost.Booster()
        booster.load_model(bytearray(path.read_bytes()))
        return booster.predict(xgboost.DMatrix(frame, enable_categorical=True))

    def of_catboost(path: Path) -> Any:
        return REGRESSOR().load_model(str(path), format="json").predict(FRAME)

    return {
        "lightgbm": (folder / "m.txt", of_lightgbm, PLAIN),
        "xgboost": (folder / "m.json", of_xgboost, frame.astype({"g": str})),
        "catboost": (folder / "c.json", of_catboost, FRAME),
    }


def objects(of: Any) -> Iterator[dict[str, Any]]:
    """Those in JSON, outermost first."""
    if isinstance(of, dict):
        yield of
        for inner in of.values():
            yield from objects(inner)
    elif isinstance(of, list):
        for inner in of:
            yield from objects(inner)


@pytest.mark.parametrize("use", ["xgboost", "catboost"])
def test_a_key_that_is_not_known_is_refused_by_name(tmp_path: Path, use: str) -> None:
    path, predict, rows = files(tmp_path)[use]
    content = path.read_text()
    expected = score(use, path, rows)
    refused = 0
    for place in range(len(list(objects(json.loads(content))))):
        model = json.loads(content)
        chosen = list(objects(model))[place]
        chosen["surprise"] = 3
        path.write_text(json.dumps(model))
        why, found = outcome(use, path, rows)
        refused += "surprise, which is not known" in why
        if not why:
            assert np.array_equal(found, predict(path))
            assert np.allclose(found, expected)
    assert refused > 8


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "num_class=1\n",
            "num_class=1\nsurprise=1\n",
            "has surprise, which is not known of the head",
        ),
        (
            "[boosting: gbdt]\n",
            "[boosting: gbdt]\nsurprise\n",
            "has surprise, which is not known of",
        ),
        ("end of parameters\n", "end of parameters\n\nsurprise: 1\n", "has surprise, which is not"),
        ("num_class=1\n", "num_class=1\nnum_class=1\n", "a key twice"),
        ("Tree=1\n", "Tree=1\n\n", "tree 2 of 3 is not whole"),
        ("tree_sizes=", "tree_sizes=1", "tree 0 of 3: it has a key twice"),
    ],
)
def test_a_line_of_lightgbm_that_is_not_known_is_refused(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    path, _, rows = files(tmp_path)["lightgbm"]
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))
    with pytest.raises(PrecomputeError, match=said):
        score("lightgbm", path, rows)


def test_a_key_of_a_lightgbm_tree_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path, _, rows = files(tmp_path)["lightgbm"]
    content = path.read_text()
    size = re.search(r"tree_sizes=(\d+)", content)
    assert size is not None
    longer = content.replace(size[0], f"tree_sizes={int(size[1]) + len('surprise=1') + 1}", 1)
    path.write_text(longer.replace("num_cat=0\n", "num_cat=0\nsurprise=1\n", 1))
    with pytest.raises(ConfigError, match="has surprise, which is not known of a tree"):
        score("lightgbm", path, rows)


@pytest.mark.parametrize("use", ["lightgbm", "xgboost", "catboost"])
def test_a_changed_file_is_refused_or_gives_its_librarys_scores(tmp_path: Path, use: str) -> None:
    drawn = random.Random(1)
    path, predict, rows = files(tmp_path)[use]
    content = path.read_bytes()
    numbers = list(re.finditer(rb"(?<=[,=\[: ])-?\d+\.\d+(?:E-?\d+)?(?=[,\] \n])", content))
    refused, compared = 0, 0
    for number in range(30):
        changed = bytearray(content)
        at, place = drawn.randrange(len(changed)), drawn.choice(numbers)
        match number % 4:
            case 0:
                changed[at] ^= 1 << drawn.randrange(7)
            case 1:
                del changed[at:]
            case 2:
                # as long as it was, since LightGBM's trees have their sizes
                other = b"%.20f" % drawn.uniform(0.1, 2)
                changed[place.start() : place.end()] = other[: len(place[0])]
            case _:
                other = drawn.choice([b'"1.5"', b"null", b"true", b"[1.5]", b"1e999", b"{}"])
                changed[place.start() : place.end()] = other
        path.write_bytes(changed)
        why, found = outcome(use, path, rows)
        # an error of the library that nobody translated
        assert "failed to load" not in why
        if why:
            refused += 1
            continue
        # of what no row asks for, and is left out here, LightGBM makes an error or ends the process
        if use != "lightgbm" or number % 4 == 2:
            assert np.array_equal(found, predict(path), equal_nan=True), number
            compared += 1
    assert refused > 12
    assert compared > 3


NONE = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "page": (b"<!DOCTYPE html><html></html>", "a web page"),
    "gzip": (gzip.compress(b"{}"), "compressed by gzip"),
    "empty": (b"", "is empty"),
    "pickle": (pickle.dumps({"a": np.zeros(2)}), "a pickle"),
    "cbm": (b"CBM1\x00\x00", "CatBoost's binary format"),
    "bst": (b"binf\x00\x00", "XGBoost's old binary format"),
}


@pytest.mark.parametrize(
    ("use", "saving"),
    [
        ("lightgbm", r"Booster.save_model\('model.txt'\)"),
        ("xgboost", r"save_model\('model.json'\)"),
        ("catboost", r"save_model\('model.json', format='json'\)"),
    ],
)
def test_what_is_no_file_of_trees_is_named_with_the_call_that_writes_one(
    tmp_path: Path, use: str, saving: str
) -> None:
    path = tmp_path / "model"
    for content, said in NONE.values():
        path.write_bytes(content)
        with pytest.raises(ModelError, match=f"^{use}: .*{said}.*; {saving} writes one"):
            score(use, path, PLAIN)
    for content in (b"{}", b"[]", b"\x00\x01\x02", b"tree\n", b"{L\x00"):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=f"^{use}: {path} is damaged"):
            score(use, path, PLAIN)


def test_ubjson_that_is_damaged_is_refused(tmp_path: Path) -> None:
    drawn = random.Random(2)
    made = trained_by_xgboost({}, {"label": TARGET})
    made.save_model(tmp_path / "m.ubj")
    content = (tmp_path / "m.ubj").read_bytes()
    path, refused = tmp_path / "changed.ubj", 0
    for number in range(60):
        changed = bytearray(content)
        if number % 3:
            changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8)
        else:
            del changed[drawn.randrange(1, len(changed)) :]
        path.write_bytes(changed)
        why, found = outcome("xgboost", path, CODES)
        assert "failed to load" not in why
        if why:
            refused += 1
            continue
        booster = xgboost.Booster()
        booster.load_model(bytearray(changed))
        expected = booster.inplace_predict(CODES.to_numpy(np.float32))
        assert np.array_equal(found, expected, equal_nan=True)
    assert refused > 20
