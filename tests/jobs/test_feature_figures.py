"""Feature figures: each one's value on rows that can be counted by hand; the same on every CPU."""

from __future__ import annotations

import ast
import inspect
import json
import math
import os
import subprocess
import sys
import tracemalloc
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.jobs.run.judge import feature_figures, judgement, nights
from precompute.jobs.run.judge.feature_figures import Figures, figures_of, moves_of
from precompute.store.feature_view import Feature, FeatureView

NUMBER, FLAG, TEXT = Feature("f", "float64"), Feature("f", "bool"), Feature("f", "string")
ITEMS, FLOATS = Feature("f", "int64", max_items=9), Feature("f", "float32", max_items=9)
VECTOR = Feature("f", "float32", dim=2)
NAN, INF = math.nan, math.inf


def rows(feature: Feature, values: list[Any]) -> pa.Table:
    """Of keys 0, 1, …"""
    return pa.table({"id": range(len(values)), "f": pa.array(values, feature.arrow_type)})


def view(feature: Feature) -> FeatureView:
    return FeatureView("view", ("id",), (feature,), 3600.0, 0.0)


def alone(feature: Feature, values: list[Any]) -> Figures:
    """Figures by their names within the feature."""
    found = figures_of(rows(feature, values), view(feature))
    assert all(name.startswith("f.") for name in found)
    return {name[2:]: value for name, value in found.items()}


def moved(
    feature: Feature, now: list[Any], then: list[Any], changed: float = 1.0, spread: float = 0.0
) -> Figures:
    """Figures of the same keys before and now, by their names within the feature."""
    before = {"f.spread": spread} if spread else {}
    found = moves_of(rows(feature, now), rows(feature, then), view(feature), changed, before)
    assert all(name.startswith("f.moved.") for name in found)
    return {name[8:]: value for name, value in found.items()}


CLIPPED = [2.25, 2.25, 2.25, 3.0, 4.0, 5.0, 6.0, 6.75, 6.75, 6.75]
"""Ten numbers, those beyond their quartiles moved there."""
ONE, FOUR = (
    float(np.mean([min(1.0, max(0.0, 4 * x / (of * np.std(CLIPPED)) - 1.5)) for x in range(10)]))
    for of in (1, 4)
)

ALONE: dict[str, tuple[Feature, list[Any], Figures]] = {
    "numbers": (
        NUMBER,
        [None, NAN, -INF, 0.0, -0.0, -1.0, 2.0, 2.0, 2.0, 1e16],
        {"null": 0.1, "not_finite": 2 / 9, "zero": 2 / 7, "negative": 1 / 7, "huge": 1 / 7}
        | {"p50": 2.0, "p25": 0.0, "p75": 2.0, "common": 3 / 9, "distinct": 7 / 9},
    ),
    "a normal spread": (
        NUMBER,
        [float(i) for i in range(10)],
        {"mean": 4.5, "spread": float(np.std(CLIPPED)), "p01": 0.09, "p05": 0.45, "p95": 8.55}
        | {
            "p99": 8.91,
            "null": 0.0,
            "not_finite": 0.0,
            "huge": 0.0,
            "common": 0.1,
            "distinct": 1.0,
        },
    ),
    "few others": (
        NUMBER,
        [1.0] * 19 + [21.0],
        {"spread": math.sqrt(19 / 20 * 1 / 20) * 20, "common": 0.95, "p95": 2.0},
    ),
    "overflows of float16": (Feature("f", "float16"), [65504.0, 1.0, -65504.0, 2.0], {"huge": 0.5}),
    "numbers of integers": (Feature("f", "int64"), [2**60, 1, 2, 2], {"common": 0.5, "p50": 2.0}),
    "no number": (NUMBER, [NAN] * 3, {"null": 0.0, "not_finite": 1.0}),
    "nothing": (NUMBER, [None] * 10, {"null": 1.0}),
    "flags": (FLAG, [True, True, False, None], {"null": 0.25, "true": 2 / 3}),
    "texts": (
        TEXT,
        ["", "N/A", "Unknown", "blue", "blue", "blue", "black", "größe", None, "x"],
        {"null": 0.1, "empty": 1 / 9, "length": 4.0, "missing": 3 / 9, "prefix": 3 / 9}
        | {"common": 3 / 9, "distinct": 7 / 9},
    ),
    "lists": (
        ITEMS,
        [[1, 2, 3], [1, 2, 3], [3, 2, 1], [], [4, 4], [1], [2], [5], [], None],
        {"null": 0.1, "empty": 2 / 9, "length": 14 / 9, "common": 2 / 9, "doubled": 1 / 9}
        | {"coverage": 5.0, "item": 4 / 14, "first": 3 / 7},
    ),
    "lists of texts": (
        Feature("f", "string", max_items=9),
        [["a", "b"], ["a", "b"], ["ab"], ["b", "b"]],
        {"common": 0.5, "doubled": 0.25, "coverage": 3.0, "item": 4 / 7, "first": 0.5},
    ),
    "empty lists": (ITEMS, [[], []], {"null": 0.0, "empty": 1.0, "length": 0.0, "common": 1.0}),
    "lists of numbers": (
        FLOATS,
        [[0.0, 1.0], [-0.0, 1.0], [2.0], [], [NAN]],
        {"null": 0.0, "empty": 0.2, "length": 6 / 5, "common": 0.4, "zero": 2 / 5, "p50": 1.0}
        | {"mean": 0.8},
    ),
    "vectors": (
        VECTOR,
        [[3, 4], [3, 4], [0, 0], [-0.0, 0], [6, 8], [NAN, 1], [1, 0], [0, 1], None, [2, 0]],
        {"null": 0.1, "not_finite": 1 / 9, "zero": 0.25, "norm.p50": 1.5, "norm.p95": 8.25}
        | {"common": 0.25, "repeated": 0.25, "dead": 0.0}
        # of 15 pairs of unit vectors: three pairs of equal (3, 4) ones, one of (1, 0), …
        | {"cosine": (3 + 1 + 0 + 0 + 3 * 2 * 0.6 + 3 * 0.8) / 15},
    ),
    "dead dimensions": (VECTOR, [[1, 5], [2, 5], [3, 5]], {"dead": 0.5, "common": 1 / 3}),
    "one vector": (VECTOR, [[1, 5]], {"common": 1.0, "repeated": 0.0, "norm.p50": math.sqrt(26)}),
}


@pytest.mark.parametrize("case", ALONE)
def test_figures_of_rows_alone(case: str) -> None:
    feature, values, expected = ALONE[case]
    found = alone(feature, values)
    assert {name: found.get(name) for name in expected} == pytest.approx(expected, rel=1e-6)


def test_no_figure_of_what_is_not_there() -> None:
    assert figures_of(rows(NUMBER, []), view(NUMBER)) == {}
    assert alone(NUMBER, [None] * 10) == {"null": 1.0}
    assert alone(VECTOR, [[NAN, 1.0]]) == {"null": 0.0, "not_finite": 1.0}
    assert "huge" not in alone(Feature("f", "int64"), [2**60])


TEN = [float(i) for i in range(10)]
MOVED: dict[str, tuple[Feature, list[Any], list[Any], dict[str, float], Figures]] = {
    # feature, now, then, changed and spread, figures
    "numbers": (
        NUMBER,
        [x + (i == 1) * 3.5 - (i == 2) * 0.8 for i, x in enumerate(TEN)],
        TEN,
        {"changed": 0.5, "spread": 2.0},
        {"quarter": 0.1, "one": 0.05, "four": 0.0, "rank": 1 - 0.5 * (6 * 12 / 990)},
    ),
    "numbers negated": (
        NUMBER,
        [-x for x in TEN],
        TEN,
        {},
        {"quarter": 0.9, "one": ONE, "four": FOUR, "rank": -1.0},
    ),
    "no number was another": (NUMBER, [1.0] * 4, [2.0] * 4, {}, {"quarter": 1.0, "four": 1.0}),
    "nor one": (NUMBER, [1.0] * 4, [1.0] * 4, {}, {"quarter": 0.0, "one": 0.0, "four": 0.0}),
    "nulls are no pairs": (
        NUMBER,
        [None, 1.0, NAN, 3.0],
        [1.0, None, 1.0, 3.0],
        {},
        {"quarter": 0.0, "one": 0.0, "four": 0.0},
    ),
    "labels": (
        TEXT,
        [*"aaaab", *"bbbbc"] * 5,
        [*"aaaaa", *"bbbbb"] * 5,
        {"changed": 0.8},
        {"changed": 0.16, "unseen": 0.08, "transition": 0.08, "kept": 1 - 0.8 * 0.2}
        | {"tokens": 1 - 0.8 * 0.2},
    ),
    "flags": (
        FLAG,
        [True, False, True, True],
        [True, True, False, True],
        {},
        {"changed": 0.5, "unseen": 0.0, "transition": 0.25},
    ),
    "texts": (
        TEXT,
        ["one two", "three", ""],
        ["one", "three", ""],
        {},
        {"changed": 1 / 3, "unseen": 1 / 3, "tokens": 2.5 / 3},
    ),
    "lists": (
        ITEMS,
        [[1, 2], [2, 1], [5, 6], [], [1, 2, 3], [3, 2, 1], [1, 1]],
        [[1, 2], [1, 2], [7, 8], [], [1, 2, 3], [1, 2, 3], [1]],
        {},
        {
            "overlap": (
                1
                + 0.9 / 1.9
                + 0
                + 1
                + 1
                + (0.9 / 2 + 0.81) / (1 + 0.9 + 0.81)
                + (1 + 0.9 / 2) / 1.9
            )
            / 7,
            "lost": 1 / 7,
            "order": 0.0,
        },
    ),
    "lists, half of them": (
        ITEMS,
        [[1, 2, 3, 4], [9]],
        [[1, 2, 4, 3], [1]],
        {"changed": 0.5},
        {"lost": 0.25, "order": 1 - 0.5 * 0.2},
    ),
    "lists of numbers": (
        FLOATS,
        [[1.0, 2.0], [3.0], [9.0, 9.0]],
        [[1.0, 2.0], [5.0], [9.0]],
        {"spread": 1.0},
        {"quarter": 1 / 3, "one": 1 / 3, "four": 0.0, "rank": 1.0},
    ),
    "vectors": (
        VECTOR,
        [[0, 1]] * 5 + [[3, 4]] * 15,
        [[1, 0]] * 5 + [[6, 8]] * 15,
        {},
        {"cosine05": 0.0, "cosine50": 1.0, "turned": 0.0},
    ),
    "vectors, few of all": (
        VECTOR,
        [[0, 1]] * 10,
        [[1, 0]] * 10,
        {"changed": 0.4},
        {"cosine05": 0.0, "cosine50": 1.0, "turned": 0.0},
    ),
    "zero vectors stay, come and go": (
        VECTOR,
        [[0, 0]] * 18 + [[0, 0], [1, 0]],
        [[0, 0]] * 18 + [[1, 0], [0, 0]],
        {},
        {"cosine05": 0.0, "cosine50": 1.0, "turned": 0.0},
    ),
    "vectors beyond squares": (
        Feature("f", "float64", dim=2),
        [[1e200, 0.0], [0.0, 1e300]],
        [[1e200, 0.0], [0.0, -1e300]],
        {},
        {"cosine05": -1.0, "cosine50": 1.0},
    ),
    "a turn by half a right angle": (
        VECTOR,
        [[1, 1]] * 3,
        [[1, 0]] * 3,
        {},
        {"cosine05": math.sqrt(0.5), "cosine50": math.sqrt(0.5), "turned": 0.5},
    ),
    "a dimension negated": (
        VECTOR,
        [[x, -x] for x in range(20)],
        [[x, x] for x in range(20)],
        {"changed": 0.5},
        {"dimension": 0.0},
    ),
    "of no rows": (NUMBER, [], [], {}, {"quarter": 0.0, "one": 0.0, "four": 0.0, "rank": 1.0}),
    "of no lists": (ITEMS, [], [], {}, {"overlap": 1.0, "lost": 0.0, "order": 1.0}),
    "of no vectors": (VECTOR, [], [], {}, {"cosine05": 1.0, "cosine50": 1.0, "turned": 0.0}),
}


@pytest.mark.parametrize("case", MOVED)
def test_figures_by_key(case: str) -> None:
    feature, now, then, more, expected = MOVED[case]
    found = moved(feature, now, then, **more)
    assert {name: found.get(name) for name in expected} == pytest.approx(expected, abs=1e-6)


def test_what_rows_before_lack_or_have_otherwise_is_not_compared() -> None:
    now = rows(NUMBER, TEN)
    for then in (now.drop_columns(["f"]), now.set_column(1, "f", now["f"].cast(pa.float32()))):
        assert moves_of(now, then, view(NUMBER), 1.0, {}) == {}


def test_lists_are_looked_at_up_to_a_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_figures, "MOST_ITEMS", 4)
    lists = [[1, 2], [3, 4], [5, 6, 7]]
    assert alone(ITEMS, lists)["coverage"] == 4
    assert alone(ITEMS, lists[::-1])["coverage"] == 3
    assert moved(ITEMS, lists, [[1, 2], [8], [9]])["overlap"] == 1


def test_a_million_labels_are_counted_in_bounded_memory() -> None:
    """One long text makes no row of the others long, nor do many different ones."""
    labels = [f"label {i}" for i in range(100_000)]
    labels[2] = "c" * 500_000
    now = rows(TEXT, labels)
    then = rows(TEXT, labels[1:] + labels[:1])
    tracemalloc.start()
    found = moves_of(now, then, view(TEXT), 1.0, {}) | figures_of(now, view(TEXT))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10**8
    assert (found["f.distinct"], found["f.moved.changed"], found["f.moved.unseen"]) == (1, 1, 0)


PRINT = """
import json, sys
import numpy as np, pyarrow as pa
from precompute.jobs.run.judge.feature_figures import figures_of, moves_of
from precompute.store.feature_view import Feature, FeatureView

random = np.random.default_rng(3)
features = (
    Feature("n", "float32"), Feature("v", "float32", dim=33), Feature("l", "int64", max_items=7)
)
view = FeatureView("view", ("id",), features, 3600.0, 0.0)
def drawn():
    flat = pa.array(random.standard_normal(500 * 33).astype(np.float32))
    return pa.table({
        "id": range(500),
        "n": pa.array(random.standard_normal(500).astype(np.float32)),
        "v": pa.FixedSizeListArray.from_arrays(flat, 33),
        "l": pa.array([random.permutation(30)[:7].tolist() for _ in range(500)]),
    })
now, then = drawn(), drawn()
print(json.dumps(figures_of(now, view) | moves_of(now, then, view, 0.7, {})))
"""


def test_figures_are_the_same_on_every_cpu() -> None:
    """With AVX2 alone, as on whatever this is."""
    older = {
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL",
        "OPENBLAS_CORETYPE": "Haswell",
        "ARROW_USER_SIMD_LEVEL": "AVX2",
    }
    found = []
    for more in ({}, older):
        done = subprocess.run(
            [sys.executable, "-c", PRINT],
            env=os.environ | more,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert len(found[0]) > 40
    assert not np.isnan(list(found[0].values())).any()


_BLAS = {"dot", "vdot", "inner", "matmul", "einsum", "tensordot"}


@pytest.mark.parametrize("module", [feature_figures, judgement, nights])
def test_nothing_is_summed_by_blas(module: ModuleType) -> None:
    """A dot product of many values has another last digit on another CPU."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    assert not [
        node.lineno
        for node in nodes
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult)
    ]
    assert _BLAS.isdisjoint(node.attr for node in nodes if isinstance(node, ast.Attribute))
