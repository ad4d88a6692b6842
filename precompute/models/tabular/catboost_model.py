"""CatBoost: a model that ``save_model('….json', format='json')`` wrote, checked here, since the
library does not check it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.model import Features, Prepared
from precompute.models.tabular.tabular_model import (
    TreeModel,
    Trees,
    as_a_user_has_it,
    installed,
)
from precompute.store.errors import ModelError

Pair = tuple[npt.NDArray[np.float32], npt.NDArray[Any]]
"""Numbers float32 [rows, features], and categories as bytes [rows, features]."""

KINDS = {"Poisson": "Exponent", "Tweedie": "Exponent", "RMSEWithUncertainty": "RMSEWithUncertainty"}
"""Losses of whose sum CatBoost's own regressor makes something: of the last, the mean and the
variance."""
LABELS = ("MultiLogloss", "MultiCrossEntropy")
"""Losses that give each class a probability of its own, and a row any number of them."""


class CatBoost(TreeModel):
    """Scores rows as CatBoost's classes do: of one score for two classes the second one's
    probability, of more all. A category is a text or a whole number, of which the model takes any;
    null is none, and its row a bad one. The arguments are those of :class:`TreeModel`, but for
    ``unknown``.
    """

    name = "catboost"

    def loaded(self, path: Path) -> Trees:
        """Raises:
        ModelError: the file is damaged, no JSON that CatBoost wrote, or has features of a kind that
            is not computed.
        """
        with installed("catboost"):
            import catboost

        self._library = catboost
        try:
            content = path.read_bytes()
            model = json.loads(content, object_pairs_hook=_once)
            features, texts = checked(model)
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


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, of whose keys another parser takes no others."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("it has a key twice")
    return made


def checked(model: Any) -> tuple[list[str], list[str]]:
    """(features in their order, those of them that are categories), of a file whose trees fit them.

    Raises:
        ValueError, KeyError, TypeError, IndexError: it is no whole model.
    """
    info = model["features_info"]
    if strange := sorted(set(info) - {"float_features", "categorical_features", "ctrs"}):
        raise ValueError(f"it has {strange[0]}, which are not computed")
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
    ctrs = info.get("ctrs", [])
    for ctr in ctrs:
        table = model["ctr_data"][ctr["identifier"]]
        if len(table["hash_map"]) % int(table["hash_stride"]) or any(
            not 0 <= element.get("cat_feature_index", 0) < len(kinds[1])
            for element in ctr["elements"]
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
    width = len(np.ravel(model["scale_and_bias"][1]))
    trees = model.get("oblivious_trees") or model["trees"]
    if not isinstance(trees, list) or not trees:
        raise ValueError("it has no trees")
    for number, tree in enumerate(trees):
        if any(
            not (type(split) is int and 0 <= split < splits)
            for split in _split_indices(tree, width)
        ):
            raise ValueError(f"tree {number} of {len(trees)} is not whole")
    return [features[place] for place in sorted(features)], [
        str(one.get("feature_id") or one["flat_feature_index"]) for one in kinds[1]
    ]


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
        yield from (split["split_index"] for split in splits)
        return
    todo = [tree]
    while todo:
        node = todo.pop()
        if "split" in node:
            yield node["split"]["split_index"]
            todo += [node["left"], node["right"]]
        elif len(np.ravel(node["value"])) != width:
            yield -1


# ---- the same by the library itself


def by_the_library(
    path: str,
    columns: Mapping[str, str],
    categorical: Sequence[str],
    output: str,
    raw: bool,
    label: str | None,
    classes: Sequence[str],
    middle: float | None,
) -> Callable[[pa.RecordBatch], Features]:
    """Scores as CatBoost's own classes give them of a data frame: a classifier's probabilities, of
    two classes the second one's, or a regressor's prediction."""
    import catboost

    known: Any = catboost.CatBoost().load_model(path, format="json")
    is_classifier = len(known.classes_) > 0
    kind = catboost.CatBoostClassifier if is_classifier else catboost.CatBoostRegressor
    model: Any = kind().load_model(path, format="json")

    def predict(batch: pa.RecordBatch) -> Features:
        frame = as_a_user_has_it(batch, columns, ())
        for feature, name in columns.items():
            if feature in categorical or name in categorical:
                # CatBoost takes texts and whole numbers for categories, and no missing ones
                frame[feature] = frame[feature].astype(str)
        sums = np.asarray(model.predict(frame, prediction_type="RawFormulaVal"))
        scores = sums
        if not raw:
            scores = np.asarray((model.predict_proba if is_classifier else model.predict)(frame))
        if not raw and is_classifier and sums.ndim == 1:
            scores = scores[:, 1]
        if label is None:
            return {output: scores}
        best = [str(one) for one in np.asarray(model.predict(frame)).reshape(-1)]
        return {output: scores, label: pa.array(best, pa.string())}

    return predict
