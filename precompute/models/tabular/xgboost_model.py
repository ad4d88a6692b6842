"""XGBoost: a model that ``save_model('….json')`` wrote, checked before the library reads it.

It is checked, and written again with nothing but what predicting needs, before the library reads
it: there a damaged one ends the process, or is read past its end. Every tree's arrays have their
sizes, every child is there and has one parent, every feature is one of the model's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from precompute.models.tabular.tabular_model import Matrix, TreeModel, Trees, installed, unfit
from precompute.store.errors import ConfigError, ModelError

MOST_CATEGORIES = 2**24
"""XGBoost's own bound."""
MOST_FEATURES = 10**7

BY_NODE = ("base_weights", "loss_changes", "sum_hessian", "split_conditions")
NODES = (
    "left_children",
    "right_children",
    "parents",
    "split_indices",
    "default_left",
    "split_type",
)


@dataclass(frozen=True, slots=True)
class XgBoostJson:
    """What a file says of its model: names of its features (f0, f1, … where it was trained
    without), which of them are categorical with what values, the objective, how many scores a row
    has before that, how many rounds were the best (None: all), and the model ``written`` again.
    """

    features: tuple[str, ...]
    categories: Mapping[str, Sequence[Any]]
    objective: str
    groups: int
    rounds: int | None
    written: bytes


def read_json(content: bytes) -> XgBoostJson:
    """Raises:
    ValueError: it is no whole model; the message says where.
    """
    try:
        model = json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise ValueError(
            f"it is no JSON ({exc}): save the model with save_model('model.json')"
        ) from exc
    learner = _dict(model, "learner")
    param = _dict(learner, "learner_model_param")
    count, classes, targets = (
        _number(param, key, least, MOST_FEATURES)
        for key, least in (("num_feature", 1), ("num_class", 0), ("num_target", 1))
    )
    groups = max(classes, targets)
    objective = _texts(_dict(learner, "objective"))
    for inner in objective.values():
        if (
            isinstance(inner, dict)
            and "num_class" in inner
            and _number(inner, "num_class", 0, MOST_FEATURES) != classes
        ):
            raise ValueError(f"it has {classes} classes, and its objective {inner['num_class']}")
    if not re.fullmatch(r"\[?[-\d.eE+, ]{1,100000}\]?", str(param.get("base_score"))):
        raise ValueError("base_score has what is no number")
    booster = _dict(learner, "gradient_booster")
    name = booster.get("name")
    if name not in ("gbtree", "dart"):
        raise ValueError(f"its booster is {name!r}: gbtree and dart are computed")
    inner = _dict(_dict(booster, "gbtree"), "model") if name == "dart" else _dict(booster, "model")
    trees = _trees(inner, count, groups)
    made: dict[str, Any] = {"model": trees, "name": "gbtree"}
    if name == "dart":
        dropped = _floats(booster, "weight_drop", len(trees["trees"])).tolist()
        made = {"gbtree": made, "name": "dart", "weight_drop": dropped}
    names = _names(learner, count)
    types = learner.get("feature_types") or []
    if (
        not isinstance(types, list)
        or len(types) not in (0, count)
        or not set(types) <= {"int", "i", "float", "q", "c"}
    ):
        raise ValueError("feature_types has what is no type, or not one for each feature")
    attributes = _texts(_dict(learner, "attributes"))
    best = attributes.get("best_iteration")
    written = {
        "learner": {
            "attributes": {},
            "feature_names": [],
            "feature_types": types,
            "gradient_booster": made,
            "learner_model_param": {
                key: str(value) for key, value in param.items() if key in PARAM
            },
            "objective": objective,
        },
        "version": _integers(model, "version", 3, 0, 1000).tolist(),
    }
    rounds = int(best) + 1 if isinstance(best, str) and re.fullmatch(r"\d{1,9}", best) else None
    return XgBoostJson(
        names,
        _categories(inner, names),
        str(objective.get("name")),
        groups,
        rounds,
        json.dumps(written).encode(),
    )


PARAM = ("base_score", "boost_from_average", "num_class", "num_feature", "num_target")


def _names(learner: Mapping[str, Any], count: int) -> tuple[str, ...]:
    names = learner.get("feature_names") or [f"f{number}" for number in range(count)]
    if (
        not isinstance(names, list)
        or len(names) != count
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) < count
    ):
        raise ValueError(f"it has {count} features, and does not name so many")
    return tuple(names)


def _trees(model: Mapping[str, Any], features: int, groups: int) -> dict[str, Any]:
    trees = model.get("trees")
    if not isinstance(trees, list) or not trees:
        raise ValueError("it has no trees")
    param = _dict(model, "gbtree_model_param")
    if _number(param, "num_trees", 1, 10**9) != len(trees):
        raise ValueError(f"it has {len(trees)} of {param.get('num_trees')} trees")
    rounds = _integers(model, "iteration_indptr", None, 0, len(trees) + 1)
    if len(rounds) < 2 or rounds[0] or rounds[-1] != len(trees) or (np.diff(rounds) < 1).any():
        raise ValueError("its rounds are not whole")
    made = []
    for number, tree in enumerate(trees):
        try:
            made.append(_tree(tree, number, features))
        except ValueError as exc:
            raise ValueError(f"tree {number} of {len(trees)}: {exc}") from exc
    return {
        "gbtree_model_param": {
            "num_parallel_tree": str(_number(param, "num_parallel_tree", 1, 10**6)),
            "num_trees": str(len(trees)),
        },
        "iteration_indptr": rounds.tolist(),
        "tree_info": _integers(model, "tree_info", len(trees), 0, groups).tolist(),
        "trees": made,
    }


def _tree(tree: Any, number: int, features: int) -> dict[str, Any]:
    param = _dict(tree, "tree_param")
    nodes = _number(param, "num_nodes", 1, 2**31)
    if _number(param, "size_leaf_vector", 0, 2**31) > 1:
        raise ValueError(
            "its leaves are vectors, which are not computed: train with"
            " multi_strategy='one_output_per_tree'"
        )
    of = {name: _integers(tree, name, nodes, -(2**31), 2**32) for name in NODES}
    left, right = of["left_children"], of["right_children"]
    inner = np.flatnonzero(left != -1)
    children = np.concatenate([left[inner], right[inner]])
    # each is one node's child, and none is the first's parent: what is reached from there is a tree
    if (right[left == -1] != -1).any() or (
        len(children) and (children.min() < 1 or children.max() >= nodes)
    ):
        raise ValueError("it has a child that is not there")
    if (
        len(np.unique(children)) != len(children)
        or (of["parents"][children] != np.concatenate([inner, inner])).any()
    ):
        raise ValueError("its children are no tree")
    split = of["split_indices"][inner]
    if len(split) and (split.min() < 0 or split.max() >= features):
        raise ValueError(f"it splits by feature {split.max()}, of {features}")
    if not np.isin(of["default_left"], (0, 1)).all() or not np.isin(of["split_type"], (0, 1)).all():
        raise ValueError("default_left or split_type has a number that cannot be")
    floats = {name: _floats(tree, name, nodes).tolist() for name in BY_NODE}
    texts = {
        key: str(_number(param, key, 0, 2**31))
        for key in ("num_deleted", "num_feature", "num_nodes", "size_leaf_vector")
        if key in param
    }
    return {
        **{name: values.tolist() for name, values in of.items()},
        **floats,
        **_splits(tree, of["split_type"], inner),
        "tree_param": texts,
        "id": number,
    }


def _splits(
    tree: Mapping[str, Any], split_type: npt.NDArray[Any], inner: npt.NDArray[Any]
) -> dict[str, Any]:
    chosen = _integers(tree, "categories", None, 0, MOST_CATEGORIES)
    nodes = _integers(tree, "categories_nodes", None, 0, len(split_type))
    first, sizes = (
        _integers(tree, f"categories_{name}", len(nodes), 0, len(chosen) + 1)
        for name in ("segments", "sizes")
    )
    by_category = inner[split_type[inner] == 1]
    if (
        not np.isin(by_category, nodes).all()
        or (np.diff(nodes) < 1).any()
        or ((first + sizes > len(chosen)) | (sizes < 1)).any()
    ):
        raise ValueError("its categories are not whole")
    named = {
        "categories": chosen,
        "categories_nodes": nodes,
        "categories_segments": first,
        "categories_sizes": sizes,
    }
    return {name: values.tolist() for name, values in named.items()}


def _categories(model: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[Any]]:
    """Values of those features that have some; a model that was trained before they were stored, or
    of codes, has none."""
    stored = (
        model.get("cats", {}).get("enc", []) if isinstance(model.get("cats", {}), dict) else None
    )
    if not isinstance(stored, list) or len(stored) not in (0, len(names)):
        raise ValueError("its categories are not of all its features")
    found = {}
    for name, of in zip(names, stored, strict=False):
        values = of.get("values") if isinstance(of, dict) else None
        if not isinstance(values, list):
            raise ValueError(f"the categories of {name} are no list")
        if "offsets" in of and values:
            at = _integers(of, "offsets", None, 0, len(values) + 1).tolist()
            raw = _integers(of, "values", None, -128, 256).astype(np.uint8).tobytes()
            found[name] = [raw[start:end].decode() for start, end in pairwise(at)]
        elif values:
            found[name] = values
    return found


def _dict(of: Any, key: str) -> dict[str, Any]:
    found = of.get(key) if isinstance(of, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"{key} is missing, or no object")
    return found


def _texts(of: Mapping[str, Any]) -> dict[str, Any]:
    for value in of.values():
        if isinstance(value, dict):
            _texts(value)
        elif not isinstance(value, str):
            raise ValueError(f"{value!r:.40} is no text")
    return dict(of)


def _number(of: Mapping[str, Any], key: str, least: int, below: int) -> int:
    text = of.get(key, str(least))
    if (
        not isinstance(text, str)
        or not re.fullmatch(r"\d{1,10}", text)
        or not least <= int(text) < below
    ):
        raise ValueError(f"{key} is {text!r:.40}, which cannot be")
    return int(text)


def _integers(
    of: Mapping[str, Any], key: str, size: int | None, least: int, below: int
) -> npt.NDArray[Any]:
    numbers = _array(of, key, size)
    if len(numbers) and (
        numbers.dtype.kind not in "iu" or numbers.min() < least or numbers.max() >= below
    ):
        raise ValueError(f"{key} has a number that cannot be")
    return numbers.astype(np.int64)


def _floats(of: Mapping[str, Any], key: str, size: int) -> npt.NDArray[Any]:
    numbers = _array(of, key, size)
    if len(numbers) and (numbers.dtype.kind not in "iuf" or not np.isfinite(numbers).all()):
        raise ValueError(f"{key} has what is no number")
    return numbers


def _array(of: Mapping[str, Any], key: str, size: int | None) -> npt.NDArray[Any]:
    values = of.get(key)
    if not isinstance(values, list) or any(isinstance(value, (list, dict)) for value in values):
        raise ValueError(f"{key} is missing, or no list of numbers")
    if size is not None and len(values) != size:
        raise ValueError(f"{key} has {len(values)} numbers, not {size}")
    return np.array(values)


# ---- the model


MIDDLES = {"binary:logistic": 0.5, "reg:logistic": 0.5, "binary:hinge": 0.5, "binary:logitraw": 0.0}
"""Objective of two classes → above which number a score is the second's; the trees' sum is that
above 0."""


class XgBoost(TreeModel):
    """Scores rows as ``Booster.predict`` does, to the bit; of a model that was stopped early, by
    the rounds up to the best, as scikit-learn's classes do. Categories are the values in the file;
    without those a categorical feature takes its codes as they are. The arguments are those of
    :class:`TreeModel`.
    """

    name = "xgboost"
    saving = "save_model('model.json')"

    def loaded(self, path: Path) -> Trees:
        """Raises:
        ConfigError: ``label`` of an objective that gives no score for each class.
        ModelError: the file is damaged, or no JSON that XGBoost wrote.
        """
        with installed("xgboost"):
            import xgboost

        try:
            known = read_json(path.read_bytes())
            # a lane each computes, and one thread in each; it has no other way to say with how many
            self._booster = xgboost.Booster(params={"nthread": 1, "verbosity": 0})
            self._booster.load_model(bytearray(known.written))
        except (OSError, ValueError, xgboost.core.XGBoostError) as exc:
            reason = str(exc).strip().splitlines()[0]
            raise ModelError(f"xgboost: {path} is damaged or no XGBoost model: {reason}") from exc
        if self._label is not None and known.objective == "multi:softmax" and not self._raw:
            raise ConfigError(
                "xgboost: the objective multi:softmax gives a class's number and no score for each:"
                " train with multi:softprob, or set raw"
            )
        self._rounds = (0, known.rounds or 0)
        width = known.groups if self._raw or known.objective != "multi:softmax" else 1
        several = known.objective.startswith("multi:")
        middle = MIDDLES.get(known.objective) if known.groups == 1 else 0.5 if several else None
        return Trees(
            known.features,
            known.categories,
            width,
            known.objective,
            0.0 if middle and self._raw else middle,
        )

    def unfit(self, matrix: Matrix) -> dict[int, str]:
        """Rows with a number that float32 has none for, which is what XGBoost computes in."""
        return unfit(self._columns.names, matrix, np.float32)

    def scores(self, matrix: Matrix, threads: int) -> npt.NDArray[Any]:
        """What the objective makes of the trees' sum: float32."""
        kind = "margin" if self._raw else "value"
        scores: npt.NDArray[Any] = self._booster.inplace_predict(
            matrix.astype(np.float32),
            iteration_range=self._rounds,
            predict_type=kind,
            validate_features=False,
        )
        return scores
