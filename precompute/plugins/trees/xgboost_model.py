"""XGBoost: a model that ``save_model`` wrote, as JSON or UBJSON, checked before the library reads
it.

It is checked, and written again with nothing but what predicting needs, before the library reads
it: there a damaged one ends the process, or is read past its end. Every tree's arrays have their
sizes, every child is there and has one parent, every feature is one of the model's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.foreign_file import KnownKeys, key_paths, parsed_json
from precompute.model import Features, Verbatim
from precompute.models.tabular_model import Matrix, installed, listed, unfit
from precompute.plugins.trees.tree_model import Asked, TreeModel, Trees
from precompute.plugins.trees.ubjson import is_ubjson, parsed_ubjson
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
CHOSEN = ("categories", "categories_nodes", "categories_segments", "categories_sizes")
PARAM = ("base_score", "boost_from_average", "num_class", "num_feature", "num_target")
OBJECTIVE = (
    "aft_loss_param.aft_loss_distribution",
    "aft_loss_param.aft_loss_distribution_scale",
    "expectile_loss_param.expectile_alpha",
    "lambda_rank_param.fix_list_weight",
    "lambda_rank_param.num_pairsample",
    "lambdarank_param.lambdarank_bias_norm",
    "lambdarank_param.lambdarank_normalization",
    "lambdarank_param.lambdarank_num_pair_per_sample",
    "lambdarank_param.lambdarank_pair_method",
    "lambdarank_param.lambdarank_score_normalization",
    "lambdarank_param.lambdarank_unbiased",
    "lambdarank_param.ndcg_exp_gain",
    "poisson_regression_param.max_delta_step",
    "pseudo_huber_param.huber_slope",
    "quantile_loss_param.quantile_alpha",
    "reg_loss_param.scale_pos_weight",
    "softmax_multiclass_param.num_class",
    "tweedie_regression_param.tweedie_variance_power",
)
"""What is set of an objective: given to the library, of which some make a score of the trees'
sum."""
BIASES = ("ti+", "tj-")
"""Numbers of the positions of a ranking that was trained with ``lambdarank_unbiased``."""
XGBOOST_JSON = KnownKeys(
    "XGBoost's JSON",
    used=(
        "version",
        "learner",
        "learner.attributes",
        "learner.attributes.best_iteration",
        "learner.feature_names",
        "learner.feature_types",
        "learner.gradient_booster",
        "learner.gradient_booster.gbtree",
        "learner.gradient_booster.name",
        "learner.gradient_booster.weight_drop",
        "learner.gradient_booster.model",
        "learner.gradient_booster.model.cats",
        "learner.gradient_booster.model.cats.enc",
        "learner.gradient_booster.model.cats.enc[].offsets",
        "learner.gradient_booster.model.cats.enc[].values",
        "learner.gradient_booster.model.cats.sorted_idx",
        "learner.gradient_booster.model.gbtree_model_param",
        "learner.gradient_booster.model.gbtree_model_param.num_parallel_tree",
        "learner.gradient_booster.model.gbtree_model_param.num_trees",
        "learner.gradient_booster.model.iteration_indptr",
        "learner.gradient_booster.model.tree_info",
        "learner.gradient_booster.model.trees",
        "learner.gradient_booster.model.trees[].tree_param",
        *(
            f"learner.gradient_booster.model.trees[].tree_param.{key}"
            for key in ("num_deleted", "num_feature", "num_nodes", "size_leaf_vector")
        ),
        *(
            f"learner.gradient_booster.model.trees[].{key}"
            for key in (*NODES, *CHOSEN, "split_conditions")
        ),
        "learner.learner_model_param",
        *(f"learner.learner_model_param.{key}" for key in PARAM),
        "learner.objective",
        "learner.objective.name",
        *(f"learner.objective.{group}" for group in sorted({o.split(".")[0] for o in OBJECTIVE})),
        *(f"learner.objective.{key}" for key in (*OBJECTIVE, *BIASES)),
    ),
    harmless={
        "learner.attributes.*": "notes, such as scikit-learn's class and the best score: of a"
        " booster's predict none is asked for",
        "learner.gradient_booster.model.cats.enc[].type": "how wide whole numbers were in memory",
        "learner.gradient_booster.model.cats.feature_segments": "sums of the numbers of categories",
        "learner.gradient_booster.model.boosted_rounds": "of a linear one, which is refused",
        "learner.gradient_booster.model.trees[].base_weights": "what a node would be as a leaf",
        "learner.gradient_booster.model.trees[].id": "the tree's place, which it stands at",
        "learner.gradient_booster.model.trees[].loss_changes": "what a split gained in training",
        "learner.gradient_booster.model.trees[].sum_hessian": "the training rows of a node",
    },
    fixed={
        # of one score a leaf
        "learner.gradient_booster.model.gbtree_model_param.size_leaf_vector": ("0", "1"),
    },
    refused={
        "learner.gradient_booster.model.weights": "it is linear (gblinear), and trees are"
        " computed: train with gbtree or dart, or write its sum in the source's SQL",
        "learner.gradient_booster.model.trees[].leaf_weights": "its leaves are vectors, which are"
        " not computed: train with multi_strategy='one_output_per_tree'",
    },
)


@dataclass(frozen=True, slots=True)
class Categories:
    """Of a feature: the whole numbers, or the texts' bytes, one behind the other, and ``at`` which
    places each begins and the last ends. XGBoost takes a pandas column's letters for bytes: where
    some are not in ASCII, the places are other texts' and the last bytes are lacking."""

    numbers: list[Any] | None
    buffer: bytes
    at: list[int]

    def parts(self) -> list[bytes]:
        """As they are compared by the library."""
        return [self.buffer[start:end] for start, end in pairwise(self.at)]

    def texts(self) -> list[str] | None:
        """As they were, where they are in ASCII: each letter is a byte."""
        return [part.decode() for part in self.parts()] if self.buffer.isascii() else None

    def fits(self, texts: Sequence[str]) -> bool:
        """Whether a file with these texts has these bytes: cut by letters, as of pandas, or by
        bytes, as of Arrow."""
        whole = "".join(texts).encode()
        for sizes in (map(len, texts), (len(text.encode()) for text in texts)):
            at = [0, *accumulate(sizes)]
            if (self.at, self.buffer) == (at, whole[: at[-1]]):
                return True
        return False


@dataclass(frozen=True, slots=True)
class XgBoostJson:
    """What a file says of its model: names of its features (f0, f1, … where it was trained
    without), which of them are categorical with what values, the objective, how many scores a row
    has before that, how many rounds were the best (None: all), and the model ``written`` again.
    """

    features: tuple[str, ...]
    categories: Mapping[str, Categories]
    objective: str
    groups: int
    rounds: int | None
    written: bytes


def checked(model: Any) -> XgBoostJson:
    """Raises:
    ValueError: it is no whole model; the message says where.
    """
    learner = _dict(model, "learner")
    param = _dict(learner, "learner_model_param")
    count, classes, targets = (
        _number(param, key, least, MOST_FEATURES)
        for key, least in (("num_feature", 1), ("num_class", 0), ("num_target", 1))
    )
    groups = max(classes, targets)
    objective = _dict(learner, "objective")
    biases = {key: _floats(objective, key, None).tolist() for key in BIASES if key in objective}
    objective = _texts({key: of for key, of in objective.items() if key not in BIASES}) | biases
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
        raise ValueError(f"its booster is {str(name)!r}: gbtree and dart are computed")
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
    parallel = _number(param, "num_parallel_tree", 1, 10**6)
    if "iteration_indptr" not in model:
        # of a version before 2.0, of which each round has as many
        model = {**model, "iteration_indptr": list(range(0, len(trees) + 1, parallel * groups))}
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
            "num_parallel_tree": str(parallel),
            "num_trees": str(len(trees)),
        },
        "iteration_indptr": rounds.tolist(),
        "tree_info": _integers(model, "tree_info", len(trees), 0, groups).tolist(),
        "trees": made,
    }


WITHOUT_CATEGORIES: dict[str, list[int]] = {key: [] for key in CHOSEN}
"""What a tree lacks of a version before 1.3."""


def _tree(tree: Any, number: int, features: int) -> dict[str, Any]:
    param = _dict(tree, "tree_param")
    nodes = _number(param, "num_nodes", 1, 2**31)
    if _number(param, "size_leaf_vector", 0, 2**31) > 1:
        raise ValueError(
            "its leaves are vectors, which are not computed: train with"
            " multi_strategy='one_output_per_tree'"
        )
    tree = {**WITHOUT_CATEGORIES, "split_type": [0] * nodes, **tree}
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


def _categories(model: Mapping[str, Any], names: Sequence[str]) -> dict[str, Categories]:
    """Those of features that have some; a model that was trained before they were stored, or of
    codes, has none."""
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
        if "offsets" in of and (of["offsets"] or values):
            at = _integers(of, "offsets", None, 0, len(values) + 1).tolist()
            raw = _integers(of, "values", None, -128, 256).astype(np.uint8).tobytes()
            if not at or at[0] or at[-1] != len(raw) or sorted(at) != at:
                raise ValueError(f"the categories of {name} are not whole")
            found[name] = Categories(None, raw, at)
        elif values:
            numbers = _integers(of, "values", None, -(2**63), 2**64)
            found[name] = Categories(numbers.tolist(), b"", [])
    if found and "sorted_idx" in model["cats"]:
        _check_order(_integers(model["cats"], "sorted_idx", None, 0, MOST_CATEGORIES), found)
    return found


def _check_order(order: npt.NDArray[Any], found: Mapping[str, Categories]) -> None:
    """Raises:
    ValueError: the library would search the categories in another order than theirs.
    """
    start = 0
    for name, of in found.items():
        keys: list[Any] = of.parts() if of.numbers is None else of.numbers
        here = order[start : start + len(keys)].tolist()
        start += len(keys)
        # bytes are compared as numbers with a sign
        wanted = sorted(
            keys, key=lambda key: key if isinstance(key, int) else [*memoryview(key).cast("b")]
        )
        if max(here, default=0) >= len(keys) or [keys[place] for place in here] != wanted:
            raise ValueError(f"the categories of {name} are not whole")
    if start != len(order):
        raise ValueError("its categories are not whole")


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
    # truth values are how versions before 2.0 write it
    kinds = "iub" if key == "default_left" else "iu"
    if len(numbers) and (
        numbers.dtype.kind not in kinds or numbers.min() < least or numbers.max() >= below
    ):
        raise ValueError(f"{key} has a number that cannot be")
    return numbers.astype(np.int64)


def _floats(of: Mapping[str, Any], key: str, size: int | None) -> npt.NDArray[Any]:
    numbers = _array(of, key, size)
    if len(numbers) and (numbers.dtype.kind not in "iuf" or not np.isfinite(numbers).all()):
        raise ValueError(f"{key} has what is no number")
    return numbers


def _array(of: Mapping[str, Any], key: str, size: int | None) -> npt.NDArray[Any]:
    values = of.get(key)
    if not isinstance(values, list):
        raise ValueError(f"{key} is missing, or no list of numbers")
    kinds = set(map(type, values))
    # truth values would be numbers among numbers
    if not kinds <= {int, float} and kinds != {bool}:
        raise ValueError(f"{key} has what is no number")
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
    without those a categorical feature takes its codes as they are.

    Args:
        categories: feature → its texts in the order of training, where they are not in ASCII:
            XGBoost writes parts of such texts, from which none can be told. They are compared with
            those parts.

    The other arguments are those of :class:`TreeModel`.
    """

    name = "xgboost"
    saving = "save_model('model.json')"
    saved = "XGBoost's JSON or UBJSON (save_model('model.json'))"

    def __init__(
        self,
        path: str,
        output: str = "score",
        columns: Sequence[str] | Mapping[str, str] | None = None,
        raw: bool = False,
        unknown: str = "bad",
        label: str | None = None,
        classes: Sequence[str] | None = None,
        categories: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        named = {} if categories is None else categories
        if not isinstance(named, Mapping) or not all(
            isinstance(texts, (list, tuple))
            and all(isinstance(text, str) for text in texts)
            and len(set(texts)) == len(texts)
            for texts in named.values()
        ):
            raise ConfigError(
                "xgboost: categories maps features to lists of their different texts, got"
                f" {str(categories)[:80]}"
            )
        self._named = named
        super().__init__(path, output, columns, raw, unknown, label, classes)
        if named:
            self._facts |= {"categories": Verbatim({key: list(of) for key, of in named.items()})}

    @staticmethod
    def is_its_file(name: str, head: bytes) -> bool:
        if is_ubjson(head):
            return b"learner" in head
        return head.lstrip().startswith(b"{") and b'"learner"' in head

    def loaded(self, path: Path) -> Trees:
        """Raises:
        ConfigError: it has what is not known, or texts whose names are cut; ``label`` of an
            objective that gives no score for each class.
        ModelError: the file is damaged, or none that XGBoost wrote.
        """
        with installed("xgboost"):
            import xgboost

        try:
            content = path.read_bytes()
            if not content.lstrip().startswith(b"{"):
                raise ValueError(f"it is no JSON: {self.saving} writes it")
            model = (
                parsed_ubjson(content)
                if is_ubjson(content)
                else parsed_json(content, path, self.name)
            )
            _dict(model, "learner")
            XGBOOST_JSON.check(key_paths(model, recursive=("gbtree",)), path, self.name)
            known = checked(model)
            # a lane each computes, and one thread in each; it has no other way to say with how many
            self._booster = xgboost.Booster(params={"nthread": 1, "verbosity": 0})
            self._booster.load_model(bytearray(known.written))
        except (OSError, ValueError, xgboost.core.XGBoostError) as exc:
            reason = str(exc).strip().splitlines()[0]
            raise ModelError(f"xgboost: {path} is damaged or no XGBoost model: {reason}") from exc
        found = {name: self._values(path, name, of) for name, of in known.categories.items()}
        if strange := [name for name in self._named if name not in found]:
            raise ConfigError(
                f"xgboost: categories names {strange[0]!r}, of which {path} has none; it has"
                f" those of {listed(list(found)) or 'no feature'}"
            )
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
            found,
            width,
            known.objective,
            0.0 if middle and self._raw else middle,
        )

    def _values(self, path: Path, feature: str, of: Categories) -> Sequence[Any]:
        """A feature's categories, the first of which has the code 0."""
        if of.numbers is not None:
            values: Sequence[Any] | None = of.numbers
        else:
            values = self._named.get(feature, of.texts())
        if values is None:
            raise ConfigError(
                f"xgboost: {path}: the categories of {feature!r} are not in ASCII, and XGBoost's"
                " writer cuts such names: give them in args, in the order of training, as in"
                f" categories: {{{feature}: [first, second, …]}} (of pandas:"
                f" frame[{feature!r}].cat.categories)"
            )
        if feature in self._named and not of.fits(values):
            raise ConfigError(
                f"xgboost: categories.{feature} are others than those that {path} was trained with,"
                f" or in another order: it has {len(of.at) - 1}, of"
                f" {of.buffer.decode(errors='replace')[:80]!r}"
            )
        if of.numbers is None and len(set(of.parts())) < len(values):
            raise ConfigError(
                f"xgboost: {path}: XGBoost's writer cut the categories of {feature!r} so that two"
                " of them are one, and the library takes the one for the other: train with names in"
                " ASCII, or with codes"
            )
        return values

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


# ---- the same by the library itself


def by_the_library(**given: Any) -> Callable[[pa.RecordBatch], Features]:
    """Scores as ``Booster.predict`` gives them of a data frame, by the file as it is: its own
    reader, and its own lists of categories. A feature whose categories are codes is of them.
    ``given`` are those of :class:`Asked`."""
    import xgboost

    asked = Asked(**given)
    booster = xgboost.Booster(params={"verbosity": 0}, model_file=asked.path)
    best = booster.attr("best_iteration")
    rounds = (0, 0 if best is None else int(best) + 1)
    names, types = booster.feature_names, booster.feature_types
    named_categories = len(asked.categorical) > 0 and names is not None

    def predict(batch: pa.RecordBatch) -> Features:
        frame = asked.frame(batch)
        if named_categories:
            matrix = xgboost.DMatrix(frame, enable_categorical=True)
        else:
            numbers = frame.to_numpy(np.float32)
            matrix = xgboost.DMatrix(
                numbers, feature_names=names, feature_types=types, enable_categorical=True
            )
        scores = booster.predict(matrix, output_margin=asked.raw, iteration_range=rounds)
        return asked.features(scores)

    return predict
