"""LightGBM: a model that ``Booster.save_model`` wrote as text, checked before the library reads it.

It is checked, and written again with nothing but what predicting needs, before the library reads
it: there a damaged one ends the process, or is read past its end. Every tree's arrays have their
sizes, every child is there and has one parent, every feature is one of the model's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.foreign_file import KnownKeys
from precompute.model import Features
from precompute.models.tabular_model import Matrix, installed
from precompute.plugins.trees.tree_model import Asked, TreeModel, Trees
from precompute.store.errors import ModelError

Numbers = npt.NDArray[Any]

INTEGER = r"-?\d{1,10}"
FLOAT = r"-?\d{1,400}(?:\.\d{1,400})?(?:e[-+]?\d{1,4})?"
INTEGERS, FLOATS = (re.compile(f"(?:{one}(?: +{one})*)?") for one in (INTEGER, FLOAT))

_FOR_PEOPLE = "what training counted and gained: no row asks for it"
LIGHTGBM_HEAD = KnownKeys(
    "the head of LightGBM's text",
    used=(
        "tree",
        "version",
        "num_class",
        "num_tree_per_iteration",
        "label_index",
        "max_feature_idx",
        "objective",
        "average_output",
        "feature_names",
        "feature_infos",
        "tree_sizes",
    ),
    harmless={"monotone_constraints": "what training held to: the trees are made so"},
)
LIGHTGBM_TREE = KnownKeys(
    "a tree of LightGBM's text",
    used=(
        "Tree",
        "num_leaves",
        "num_cat",
        "split_feature",
        "threshold",
        "decision_type",
        "left_child",
        "right_child",
        "leaf_value",
        "cat_boundaries",
        "cat_threshold",
        "is_linear",
        "leaf_const",
        "num_features",
        "leaf_features",
        "leaf_coeff",
        "shrinkage",
    ),
    harmless={
        "split_gain": _FOR_PEOPLE,
        "leaf_weight": _FOR_PEOPLE,
        "leaf_count": _FOR_PEOPLE,
        "internal_value": _FOR_PEOPLE,
        "internal_weight": _FOR_PEOPLE,
        "internal_count": _FOR_PEOPLE,
    },
)
LIGHTGBM_TAIL = KnownKeys(
    "the end of LightGBM's text",
    used=("end of trees", "parameters.categorical_feature", "pandas_categorical"),
    harmless={
        "feature_importances": _FOR_PEOPLE,
        "feature_importances.*": _FOR_PEOPLE,
        "parameters": "what training was set to",
        "parameters.*": "what training was set to; the objective stands in the head",
        "end of parameters": "their end",
    },
)


@dataclass(frozen=True, slots=True)
class LightGbmText:
    """What a file says of its model: features in their order, those of them that are categorical,
    pandas' lists of their values (None where it was trained without), how many numbers a row's
    score has, the objective, and the ``text`` of what predicting needs.
    """

    features: tuple[str, ...]
    categorical: tuple[int, ...]
    pandas: list[list[Any]] | None
    width: int
    objective: str
    text: str


class Block:
    """Lines of ``key=value``: a model's head, or a tree. Every number that is read is checked, and
    stands in :meth:`text` as it was."""

    def __init__(self, text: str) -> None:
        lines = [line.rstrip(" ") for line in text.split("\n")]
        pairs = [line.split("=", 1) for line in lines if "=" in line]
        self._facts = dict(pairs)
        if len(self._facts) < len(pairs):
            raise ValueError("it has a key twice")
        self._words = frozenset(line for line in lines if "=" not in line)
        self._taken: list[str] = []

    def keys(self) -> list[str]:
        """All that it has."""
        return [*self._facts, *sorted(self._words - {""})]

    def has(self, key: str) -> bool:
        return key in self._facts

    def taken(self, key: str, of: re.Pattern[str], what: str) -> str:
        """Raises:
        ValueError: it is missing, or has other letters.
        """
        if key not in self._facts:
            raise ValueError(f"{key} is missing")
        value = self._facts[key]
        if not of.fullmatch(value):
            raise ValueError(f"{key} has what is no {what}")
        self._taken.append(f"{key}={value}\n")
        return value

    def word(self, word: str) -> None:
        """A line of its own."""
        if word in self._words:
            self._taken.append(f"{word}\n")

    def integer(self, key: str, least: int) -> int:
        """One number of up to nine digits."""
        number = int(self.taken(key, re.compile(r"-?\d{1,9}"), "whole number"))
        if number < least:
            raise ValueError(f"{key} is {number}, which is less than {least}")
        return number

    def integers(
        self, key: str, size: int | None, least: int = -(2**31), below: int = 2**32
    ) -> Numbers:
        """So many, within these bounds."""
        return self._sized(
            key,
            np.array(self.taken(key, INTEGERS, "whole number").split(), np.int64),
            size,
            least,
            below,
        )

    def floats(self, key: str, size: int) -> Numbers:
        """So many, of any size that is finite."""
        return self._sized(
            key,
            np.array(self.taken(key, FLOATS, "number").split(), np.float64),
            size,
            -np.inf,
            np.inf,
        )

    @staticmethod
    def _sized(key: str, numbers: Numbers, size: int | None, least: float, below: float) -> Numbers:
        if size is not None and len(numbers) != size:
            raise ValueError(f"{key} has {len(numbers)} numbers, not {size}")
        if not ((numbers >= least) & (numbers < below)).all():
            raise ValueError(f"{key} has a number that cannot be")
        return numbers

    def text(self) -> str:
        """What was taken of it."""
        return "".join(self._taken)


def read_text(text: str, path: Path) -> LightGbmText:
    """Raises:
    ConfigError: it has what is not known.
    ValueError: it is no whole model; the message says where.
    """
    if not text.startswith("tree\n"):
        raise ValueError(
            "it does not begin with the word tree: save the model with Booster.save_model()"
        )
    first = text.find("\nTree=") + 1
    if not first:
        raise ValueError("it has no trees")
    head = Block(text[:first])
    LIGHTGBM_HEAD.check(head.keys(), path, "lightgbm")
    head.taken("version", re.compile(r"v[34]"), "version that is known: v3 or v4")
    width, per_round = head.integer("num_class", 1), head.integer("num_tree_per_iteration", 1)
    head.integer("label_index", 0)
    count = head.integer("max_feature_idx", 0) + 1
    head.word("average_output")
    objective = (
        head.taken("objective", re.compile(r"[\w.:+ -]*"), "objective")
        if head.has("objective")
        else ""
    )
    features = tuple(
        head.taken("feature_names", re.compile(r"[^\udc80-\udcff]+"), "text in UTF-8").split(" ")
    )
    infos = head.taken("feature_infos", re.compile(r"[\w.:+\[\] -]+"), "range of numbers").split(
        " "
    )
    if (
        per_round not in (1, width)
        or [f"num_class:{width}"]
        != re.findall(r"num_class:\S*", f"{objective} num_class:{width}")[:1]
    ):
        raise ValueError(
            f"it has {width} classes, {per_round} trees in each round, and the objective"
            f" {objective!r}"
        )
    if not len(features) == len(infos) == count:
        raise ValueError(f"it names {len(features)} features, and has {count}")
    sizes = Block(text[:first]).integers("tree_sizes", None, 1)
    if not len(sizes) or len(sizes) % per_round:
        raise ValueError(f"it has {len(sizes)} trees, {per_round} in each round")
    end = first + int(sizes.sum())
    trees = list(_trees(text[first:end], sizes, count, path))
    if not text[end:].lstrip("\n").startswith("end of trees"):
        raise ValueError("it ends before the line 'end of trees'")
    LIGHTGBM_TAIL.check(_tail_keys(text[end:]), path, "lightgbm")
    written = (
        f"tree\n{head.text()}tree_sizes={' '.join(str(len(tree)) for tree in trees)}\n\n{''.join(trees)}end"  # noqa: E501
        " of trees\n\npandas_categorical:null\n"
    )
    return LightGbmText(
        features,
        _categorical(text[end:], count),
        _pandas(text[end:]),
        width,
        objective.partition(" ")[0],
        written,
    )


def _trees(text: str, sizes: Numbers, features: int, path: Path) -> Iterator[str]:
    """Each as it is needed. Sizes are in bytes, and so the trees' text is in ASCII, or they do not
    fit."""
    at = 0
    for number, size in enumerate(sizes.tolist()):
        block = text[at : at + size]
        at += size
        if not block.startswith(f"Tree={number}\n") or len(block) < size:
            raise ValueError(f"tree {number} of {len(sizes)} is not whole")
        try:
            tree = Block(block)
            LIGHTGBM_TREE.check(tree.keys(), path, "lightgbm")
            tree.integer("Tree", 0)
            _check_tree(tree, features)
        except ValueError as exc:
            raise ValueError(f"tree {number} of {len(sizes)}: {exc}") from exc
        yield f"{tree.text()}\n\n"


def _check_tree(tree: Block, features: int) -> None:
    leaves, num_cat = tree.integer("num_leaves", 1), tree.integer("num_cat", 0)
    nodes = leaves - 1
    if nodes:
        tree.integers("split_feature", nodes, 0, features)
        thresholds = tree.floats("threshold", nodes)
        by_category = (tree.integers("decision_type", nodes, 0, 16) & 1).astype(bool)
        children = np.concatenate(
            [tree.integers("left_child", nodes), tree.integers("right_child", nodes)]
        )
        # a leaf is written as the complement of its number; each is one node's child, and so is
        # each node but the first
        if not np.array_equal(
            np.sort(children), np.concatenate([np.arange(-leaves, 0), np.arange(1, nodes)])
        ):
            raise ValueError("its children are no tree")
        chosen = thresholds[by_category]
        if not np.isin(chosen, np.arange(num_cat)).all():
            raise ValueError("it splits by categories that it has not")
    tree.floats("leaf_value", leaves)
    if num_cat:
        bounds = tree.integers("cat_boundaries", num_cat + 1, 0)
        words = tree.integers("cat_threshold", None, 0)
        if bounds[0] or (np.diff(bounds) < 1).any() or bounds[-1] != len(words):
            raise ValueError("its categories are not whole")
    if tree.integer("is_linear", 0) if tree.has("is_linear") else 0:
        tree.floats("leaf_const", leaves)
        counts = tree.integers("num_features", leaves, 0)
        used = tree.integers("leaf_features", None, 0, features)
        tree.floats("leaf_coeff", len(used))
        if counts.sum() != len(used):
            raise ValueError("its linear leaves are not whole")
    tree.floats("shrinkage", 1)


def _tail_keys(tail: str) -> list[str]:
    """Its lines' keys, those of a section with its name before them."""
    found, section = [], ""
    for line in filter(None, tail.split("\n")):
        if re.fullmatch(r"(feature_importances|parameters):", line):
            section = f"{line[:-1]}."
            found.append(line[:-1])
        elif section == "parameters." and (parameter := re.fullmatch(r"\[(\w+): ?.*\]", line)):
            found.append(section + parameter[1])
        elif section == "feature_importances." and re.fullmatch(r".+=\d+", line):
            found.append(section + line.rpartition("=")[0])
        else:
            section = ""
            found.append(line.partition(":")[0])
    return found


def _categorical(tail: str, features: int) -> tuple[int, ...]:
    found = re.search(r"^\[categorical_feature: ([\d,]*)\]$", tail, re.MULTILINE)
    if found is None:
        raise ValueError("its parameter categorical_feature is missing, or none")
    numbers = sorted({int(text) for text in found[1].split(",") if text})
    if numbers and numbers[-1] >= features:
        raise ValueError(
            f"it has {features} features, and number {numbers[-1]} among the categorical ones"
        )
    return tuple(numbers)


def _pandas(tail: str) -> list[list[Any]] | None:
    line = re.search(r"^pandas_categorical:(.*)$", tail, re.MULTILINE)
    if line is None:
        raise ValueError("it ends before the line 'pandas_categorical'")
    try:
        found = json.loads(line[1])
    except ValueError as exc:
        raise ValueError(f"its line 'pandas_categorical' is no JSON: {exc}") from exc
    if found is not None and not (
        isinstance(found, list) and all(isinstance(values, list) for values in found)
    ):
        raise ValueError("its line 'pandas_categorical' is no list of lists")
    return found or None


# ---- the model


PROBABILITIES = ("binary", "cross_entropy")
"""What objectives of one score give one; it is 0.5 where the trees' sum is 0."""
FITTED_ROUNDS = 400
"""Trees of a model that is fitted here."""


class LightGbm(TreeModel):
    """Scores rows as ``Booster.predict`` does, to the bit. Categories are pandas' values, as the
    file has them; without those a categorical feature takes its codes as they are. The arguments
    are those of :class:`TreeModel`."""

    name = "lightgbm"
    saving = "Booster.save_model('model.txt')"
    saved = "LightGBM's text (save_model('model.txt'))"

    @staticmethod
    def is_its_file(name: str, head: bytes) -> bool:
        return head.startswith(b"tree")

    def loaded(self, path: Path) -> Trees:
        """Raises:
        ConfigError: it has what is not known.
        ModelError: the file is damaged, or no text that LightGBM wrote.
        """
        with installed("lightgbm"):
            import lightgbm

        try:
            # what is no UTF-8 is damage, and stands for itself until it is found
            text = path.read_bytes().decode("utf-8", "surrogateescape")
            known = read_text(text, path)
            self._booster = lightgbm.Booster(model_str=known.text)
        except (OSError, ValueError, lightgbm.basic.LightGBMError) as exc:
            raise ModelError(f"lightgbm: {path} is damaged or no LightGBM model: {exc}") from exc
        middle = (
            (0.0 if self._raw else 0.5)
            if known.width > 1 or known.objective in PROBABILITIES
            else None
        )
        return Trees(known.features, _categories(path, known), known.width, known.objective, middle)

    def scores(self, matrix: Matrix, threads: int) -> npt.NDArray[Any]:
        """Probabilities, or what else the objective makes of the trees' sum: float64."""
        # for a miss or two, waking the others takes longer than the trees
        threads = min(threads, 1 + len(matrix) // 64)
        return np.asarray(self._booster.predict(matrix, raw_score=self._raw, num_threads=threads))

    @staticmethod
    def fitted(
        matrix: npt.NDArray[np.float64],
        scores: npt.NDArray[np.float32],
        names: Sequence[str],
        seed: int,
    ) -> bytes:
        """As of :class:`precompute.model.FittedKind`."""
        with installed("lightgbm"):
            import lightgbm

        settings = {
            "objective": "regression",
            "num_leaves": 63,
            "learning_rate": 0.1,
            "verbosity": -1,
            "seed": seed,
            "deterministic": True,
            "force_row_wise": True,
        }
        data = lightgbm.Dataset(matrix, scores, feature_name=list(names))
        return lightgbm.train(settings, data, FITTED_ROUNDS).model_to_string().encode()


def _categories(path: Path, known: LightGbmText) -> dict[str, list[Any]]:
    if known.pandas is None:
        return {}
    if len(known.pandas) != len(known.categorical):
        raise ModelError(
            f"lightgbm: {path} has the values of {len(known.pandas)} categorical features, and"
            f" {len(known.categorical)} of them: train it with all of them as pandas' category, or"
            " all as numbers"
        )
    return {
        known.features[place]: values
        for place, values in zip(known.categorical, known.pandas, strict=True)
    }


# ---- the same by the library itself


def by_the_library(**given: Any) -> Callable[[pa.RecordBatch], Features]:
    """Scores as ``Booster.predict`` gives them of a data frame, by the file as it is: its own
    reader, and its own lists of categories; ``given`` are those of :class:`Asked`."""
    import lightgbm

    asked = Asked(**given)
    booster = lightgbm.Booster(model_file=asked.path)

    def predict(batch: pa.RecordBatch) -> Features:
        frame = asked.frame(batch)
        return asked.features(np.asarray(booster.predict(frame, raw_score=asked.raw)))

    return predict
