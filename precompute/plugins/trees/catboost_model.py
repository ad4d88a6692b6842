"""CatBoost: a model that ``save_model('….json', format='json')`` wrote, checked here, since the
library does not check it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.foreign_file import KnownKeys, key_paths, parsed_json
from precompute.model import Features, Prepared
from precompute.models.tabular_model import installed
from precompute.plugins.trees.tree_model import Asked, TreeModel, Trees
from precompute.store.errors import ConfigError, ModelError

Pair = tuple[npt.NDArray[np.float32], npt.NDArray[Any]]
"""Numbers float32 [rows, features], and categories as bytes [rows, features]."""

KINDS = {"Poisson": "Exponent", "Tweedie": "Exponent", "RMSEWithUncertainty": "RMSEWithUncertainty"}
"""Losses of whose sum CatBoost's own regressor makes something: of the last, the mean and the
variance."""
SEVERAL_TARGETS = ("MultiRMSE", "MultiRMSEWithMissingValues", "MultiLogloss", "MultiCrossEntropy")
"""Losses of rows that have several targets."""
LABELS = ("MultiLogloss", "MultiCrossEntropy")
"""Losses that give each class a probability of its own, and a row any number of them."""

NAN_TREATMENTS = ("AsIs", "AsFalse", "AsTrue")
CTR_TYPES = (
    "Borders",
    "Buckets",
    "BinarizedTargetMeanValue",
    "FloatTargetMeanValue",
    "Counter",
    "FeatureFreq",
)
_NOT_IN_JSON = "a tree of it asks for what JSON does not hold: train without it, or write a model"
CATBOOST_JSON = KnownKeys(
    "CatBoost's JSON",
    used=(
        "model_info",
        "model_info.params",
        "model_info.params.loss_function",
        "model_info.params.loss_function.type",
        "model_info.params.cat_feature_params",
        "model_info.class_params",
        "model_info.class_params.class_names",
        "model_info.class_params.class_to_label",
        "model_info.binclass_probability_threshold",
        "features_info",
        "features_info.float_features",
        "features_info.float_features[].borders",
        "features_info.float_features[].feature_id",
        "features_info.float_features[].feature_index",
        "features_info.float_features[].flat_feature_index",
        "features_info.float_features[].has_nans",
        "features_info.float_features[].nan_value_treatment",
        "features_info.categorical_features",
        "features_info.categorical_features[].feature_id",
        "features_info.categorical_features[].feature_index",
        "features_info.categorical_features[].flat_feature_index",
        "features_info.categorical_features[].values",
        "features_info.ctrs",
        "features_info.ctrs[].borders",
        "features_info.ctrs[].ctr_type",
        "features_info.ctrs[].elements",
        "features_info.ctrs[].elements[].border",
        "features_info.ctrs[].elements[].cat_feature_index",
        "features_info.ctrs[].elements[].combination_element",
        "features_info.ctrs[].elements[].float_feature_index",
        "features_info.ctrs[].elements[].value",
        "features_info.ctrs[].identifier",
        "features_info.ctrs[].prior_denomerator",
        "features_info.ctrs[].prior_numerator",
        "features_info.ctrs[].scale",
        "features_info.ctrs[].shift",
        "features_info.ctrs[].target_border_idx",
        "ctr_data",
        "ctr_data{}.counter_denominator",
        "ctr_data{}.hash_map",
        "ctr_data{}.hash_stride",
        "oblivious_trees",
        "oblivious_trees[].leaf_values",
        "oblivious_trees[].splits",
        "oblivious_trees[].splits[].split_index",
        "trees",
        "trees[].left",
        "trees[].right",
        "trees[].split",
        "trees[].split.split_index",
        "trees[].value",
        "scale_and_bias",
    ),
    harmless={
        "model_info.*": "what training was set to, and notes: no tree asks for them",
        "features_info.*_features[].feature_name": "written with pool=: its name; feature_id is the"
        " model's",
        "features_info.cat_features_hash": "written with pool=: categories' names beside their"
        " hashes, for people; trees compare hashes of the rows' own texts",
        "features_info.cat_features_hash[].hash": "see cat_features_hash",
        "features_info.cat_features_hash[].value": "see cat_features_hash",
        "oblivious_trees[].leaf_weights": "the training rows of each leaf",
        "trees[].weight": "the training rows of a leaf",
        **{
            f"{tree}.{key}": "for people: split_index says which split it is"
            for tree in ("oblivious_trees[].splits[]", "trees[].split")
            for key in (
                "border",
                "cat_feature_index",
                "ctr_target_border_idx",
                "float_feature_index",
                "split_type",
                "value",
            )
        },
    },
    refused={
        "features_info.text_features": _NOT_IN_JSON,
        "features_info.embedding_features": _NOT_IN_JSON,
        "features_info.estimated_features": _NOT_IN_JSON,
    },
)


class CatBoost(TreeModel):
    """Scores rows as CatBoost's classes do: of one score for two classes the second one's
    probability, of more all. A category is a text or a whole number, of which the model takes any;
    null is none, and its row a bad one. The arguments are those of :class:`TreeModel`, but for
    ``unknown``.
    """

    name = "catboost"
    saving = "save_model('model.json', format='json')"
    saved = "CatBoost's JSON (save_model('model.json', format='json'))"

    @staticmethod
    def is_its_file(name: str, head: bytes) -> bool:
        words = (b'"features_info"', b'"ctr_data"')
        return head.lstrip().startswith(b"{") and any(word in head for word in words)

    def loaded(self, path: Path) -> Trees:
        """Raises:
        ConfigError: it has what is not known, or lacks tables that its trees ask for.
        ModelError: the file is damaged, or no JSON that CatBoost wrote.
        """
        with installed("catboost"):
            import catboost

        self._library = catboost
        try:
            content = path.read_bytes()
            # behind a number that a float has not the library reads nothing, and says nothing
            model = parsed_json(content, path, self.name, finite=True)
            features, texts = checked(model)
            check_known(model, path)
            info, width = model["model_info"], len(np.ravel(model["scale_and_bias"][1]))
            loss = str(info.get("params", {}).get("loss_function", {}).get("type"))
            threshold = np.float64(info.get("binclass_probability_threshold", 0.5))
            if loss == "RMSEWithUncertainty" and width != 2:
                raise ValueError("it has no variance")
            self._model = catboost.CatBoost()
            # The very content that was checked; from memory it reads its binary format alone. And
            # as it was written: of the same number in fewer digits it reads another last bit.
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                file.write(content)
                file.flush()
                self._model.load_model(file.name, format="json")
            classes = list(self._model.classes_)
            self._numbers = [feature for feature in features if feature not in texts]
            self._texts = [feature for feature in features if feature in texts]
            self._kind = (
                "RawFormulaVal"
                if self._raw
                else "Probability"
                if classes
                else KINDS.get(loss, "RawFormulaVal")
            )
            self._is_one = width == 1 and self._kind == "Probability"
            self._try_out(len(model.get("oblivious_trees") or model["trees"]), width)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
            RecursionError,
            catboost.CatBoostError,
        ) as exc:
            reason = (
                f"{exc!r} is missing"
                if isinstance(exc, KeyError)
                else str(exc).strip().splitlines()[0]
            )
            raise ModelError(
                f"catboost: {path} is damaged or no CatBoost model in JSON: {reason}"
            ) from exc
        with np.errstate(divide="ignore"):
            middle = float(-np.log(1 / threshold - 1) if self._raw else threshold)
        return Trees(
            features,
            {},
            width,
            loss,
            middle if classes and loss not in LABELS else None,
            classes or None,
            texts,
        )

    def _try_out(self, trees: int, width: int) -> None:
        """One row, since the library reads some damaged files in part, without a word.

        Raises:
            ValueError: it reads other trees than stand in the file.
            CatBoostError: it cannot compute.
        """
        row = np.zeros((1, len(self._numbers)), np.float32)
        scores = self.scores((row, np.full((1, len(self._texts)), b"", object)), 1)
        if self._model.tree_count_ != trees or scores.shape != ((1, width) if width > 1 else (1,)):
            raise ValueError("the library reads other trees than stand in it")

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Numbers and categories of all rows; bad are those with a null for a category."""
        prepared = super().prepare(batch)
        texts = np.empty((batch.num_rows, len(self._texts)), object)
        bad = dict(prepared.bad)
        for place, name in enumerate(self._columns.texts):
            column = batch.column(name).cast(pa.string())
            bad |= dict.fromkeys(
                pc.indices_nonzero(column.is_null()).to_pylist(),
                f"{name} is null, and CatBoost has no missing category: COALESCE it in the source"
                " to the text it was trained with",
            )
            # a category stands in many rows: as bytes once each
            coded = pc.fill_null(column, "").dictionary_encode()
            values = np.array([value.encode() for value in coded.dictionary.to_pylist()], object)
            texts[:, place] = values[coded.indices.to_numpy()] if len(values) else b""
        return Prepared(prepared.costs, (prepared.payload.astype(np.float32), texts), bad)

    def inputs(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Pair:  # type: ignore[override]
        numbers, texts = prepared.payload
        return numbers[rows], texts[rows]

    def scores(self, matrix: Pair, threads: int) -> npt.NDArray[Any]:  # type: ignore[override]
        """Float64."""
        numbers, texts = matrix
        data: Any = np.ascontiguousarray(numbers)
        if self._texts:
            names = {"num_feature_names": self._numbers, "cat_feature_names": self._texts}
            given = (
                {"num_feature_data": data, "cat_feature_data": texts}
                if self._numbers
                else {"cat_feature_data": texts}
            )
            data = self._library.Pool(
                self._library.FeaturesData(
                    **given, **(names if self._numbers else {"cat_feature_names": self._texts})
                )
            )
        scores: npt.NDArray[Any] = self._model.predict(
            data, prediction_type=self._kind, thread_count=threads
        )
        return scores[:, 1] if self._is_one else scores


def check_known(model: Mapping[str, Any], path: Path) -> None:
    """Raises:
    ConfigError: a file has what is not known, or lacks tables that its trees ask for.
    """
    known = key_paths(model, maps=("ctr_data",), recursive=("left", "right"))
    CATBOOST_JSON.check(known, path, "catboost")
    if lost := lost_tables(model):
        raise ConfigError(
            f"catboost: {path} was trained with {lost}, and CatBoost's JSON keeps one of their"
            " tables of categories: its scores are not those of the trained model. Train with"
            " simple_ctr='Counter' and combinations_ctr='Counter', or with one_hot_max_size of as"
            " many as a feature has categories"
        )


def checked(model: Any) -> tuple[list[str], list[str]]:
    """(features in their order, those of them that are categories), of a file whose trees fit them.

    Raises:
        ValueError, KeyError, TypeError, IndexError: it is no whole model.
    """
    info = model["features_info"]
    kinds = [info.get("float_features", []), info.get("categorical_features", [])]
    features: dict[int, str] = {}
    for kind in kinds:
        if [one["feature_index"] for one in kind] != list(range(len(kind))):
            raise ValueError("its features are not whole")
        features |= {
            one["flat_feature_index"]: str(one.get("feature_id") or one["flat_feature_index"])
            for one in kind
        }
    if sorted(features) != list(range(sum(map(len, kinds)))) or len(set(features.values())) != len(
        features
    ):
        raise ValueError("its features are not whole")
    for feature in kinds[0]:
        _numbers(feature.get("borders", []))
        if feature["nan_value_treatment"] not in NAN_TREATMENTS or not isinstance(
            feature["has_nans"], bool
        ):
            raise ValueError("a feature takes missing numbers in a way that is not known")
    ctrs = info.get("ctrs", [])
    for ctr in ctrs:
        table = model["ctr_data"][ctr["identifier"]]
        _numbers(ctr["borders"])
        _numbers([ctr[key] for key in ("prior_numerator", "prior_denomerator", "scale", "shift")])
        # hashes are texts of digits
        _numbers([int(one) if isinstance(one, str) else one for one in table["hash_map"]])
        if (
            ctr["ctr_type"] not in CTR_TYPES
            or type(ctr["target_border_idx"]) is not int
            or type(table["counter_denominator"]) is not int
            or len(table["hash_map"]) % int(table["hash_stride"])
            or any(
                not 0 <= element.get("cat_feature_index", 0) < len(kinds[1])
                for element in ctr["elements"]
            )
        ):
            raise ValueError("its categories are not whole")
    classes = model["model_info"].get("class_params", {"class_names": [], "class_to_label": []})
    labels, names = classes["class_to_label"], classes["class_names"]
    # CrossEntropy's have no names
    if sorted(labels) != list(range(len(labels))) or len(names) not in (0, len(labels)):
        raise ValueError("its classes are not whole")
    splits = sum(
        len(one.get(key, []))
        for kind, key in ((kinds[0], "borders"), (kinds[1], "values"), (ctrs, "borders"))
        for one in kind
    )
    scale, bias = model["scale_and_bias"]
    _numbers([scale, *(bias if isinstance(bias, list) else [bias])])
    width = len(np.ravel(bias))
    trees = model.get("oblivious_trees") or model["trees"]
    if not isinstance(trees, list) or not trees or {"oblivious_trees", "trees"} <= model.keys():
        raise ValueError("it has no trees, or two kinds of them")
    for number, tree in enumerate(trees):
        if any(
            not (type(split) is int and 0 <= split < splits)
            for split in _split_indices(tree, width)
        ):
            raise ValueError(f"tree {number} of {len(trees)} is not whole")
    return [features[place] for place in sorted(features)], [
        str(one.get("feature_id") or one["flat_feature_index"]) for one in kinds[1]
    ]


def lost_tables(model: Mapping[str, Any]) -> str | None:
    """What of a model's training made several tables of categories to which JSON gives one name, so
    that it has but one of them; None where none is lost. A table's name is its features and its
    kind; not in it is the target, and the borders of the target, that it counts by."""
    params = model["model_info"].get("params", {})
    of_target = {ctr["ctr_type"] for ctr in model["features_info"].get("ctrs", [])} - {"Counter"}
    if not of_target:
        return None
    loss = params.get("loss_function", {}).get("type")
    if loss in SEVERAL_TARGETS:
        return f"{loss}, of several targets"
    named = params.get("cat_feature_params", {})
    for ctrs in (
        named.get("simple_ctrs", []),
        named.get("combinations_ctrs", []),
        *named.get("per_feature_ctrs", {}).values(),
    ):
        borders: dict[str, Any] = {}
        for ctr in ctrs:
            kind, by = ctr["ctr_type"], ctr.get("target_binarization")
            if kind in of_target and borders.setdefault(kind, by) != by:
                return f"ctrs of the kind {kind} with several borders of the target"
    return None


def _numbers(values: Sequence[Any]) -> None:
    """Raises:
    ValueError: something is no finite number, of which the library reads any.
    """
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{str(value)[:40]!r} is no number")


def _split_indices(tree: Any, width: int) -> Iterator[Any]:
    """Split indices of one tree, symmetric or not; -1 where its leaves are not what its splits
    need."""
    if "leaf_values" in tree:
        splits = tree["splits"] or []
        leaves = 2 ** len(splits)
        if (
            len(splits) > 16
            or len(tree["leaf_values"]) != leaves * width
            or len(tree.get("leaf_weights", [0] * leaves)) != leaves
        ):
            yield -1
        _numbers(tree["leaf_values"])
        yield from (split["split_index"] for split in splits)
        return
    todo = [tree]
    while todo:
        node = todo.pop()
        if "split" in node:
            yield node["split"]["split_index"]
            todo += [node["left"], node["right"]]
            continue
        values = node["value"] if isinstance(node["value"], list) else [node["value"]]
        _numbers(values)
        if len(values) != width:
            yield -1


# ---- the same by the library itself


def by_the_library(**given: Any) -> Callable[[pa.RecordBatch], Features]:
    """Scores as CatBoost's own classes give them of a data frame: a classifier's probabilities, of
    two classes the second one's, or a regressor's prediction; and its own label. ``given`` are
    those of :class:`Asked`."""
    import catboost

    asked = Asked(**given)
    known: Any = catboost.CatBoost().load_model(asked.path, format="json")
    is_classifier = len(known.classes_) > 0
    kind = catboost.CatBoostClassifier if is_classifier else catboost.CatBoostRegressor
    model: Any = kind().load_model(asked.path, format="json")

    def predict(batch: pa.RecordBatch) -> Features:
        frame = asked.frame(batch, categories=False)
        for feature in filter(asked.is_category, asked.columns):
            # CatBoost takes texts and whole numbers for categories, and no missing ones
            frame[feature] = frame[feature].astype(str)
        sums = np.asarray(model.predict(frame, prediction_type="RawFormulaVal"))
        scores = sums
        if not asked.raw:
            scores = np.asarray((model.predict_proba if is_classifier else model.predict)(frame))
        if not asked.raw and is_classifier and sums.ndim == 1:
            scores = scores[:, 1]
        if asked.label is None:
            return {asked.output: scores}
        best = [str(one) for one in np.asarray(model.predict(frame)).reshape(-1)]
        return {asked.output: scores, asked.label: pa.array(best, pa.string())}

    return predict
