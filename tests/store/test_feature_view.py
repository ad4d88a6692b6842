"""A feature view survives its journey through JSON, and its fingerprint changes with anything in
it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pyarrow as pa
import pytest

from precompute.store.feature_view import (
    NAME,
    SCALAR_TYPES,
    Definition,
    Feature,
    FeatureView,
    IndexSpec,
    ModelUse,
)

FULL = FeatureView(
    name="items",
    entity=("shop", "item_id"),
    features=(
        Feature("vector", "float16", dim=3),
        Feature("label", "string"),
        Feature("top", "int64", max_items=5),
    ),
    ttl_s=60.5,
    stale_for_s=3600.0,
    index=IndexSpec("vector", "l2", 0.9),
    fallback=True,
    fallback_deadline_s=0.25,
    keep_s=60.0,
    keep_missing_s=5.0,
    stale_if_error_s=86400.0,
    fallback_default={"vector": [0.0, 0.5, 1.0], "label": "nobody"},
    misses_by="glossary",
    powers={"glossary": {"words": 2}},
    definition=Definition(
        "SELECT 'é\"' AS x", ModelUse("top_k", {"k": [1, 2.5, None, True], "a": 1})
    ),
)
PLAIN = FeatureView("items", ("id",), (Feature("x", "bool"),), ttl_s=1.0, stale_for_s=0.0)


@pytest.mark.parametrize("view", [FULL, PLAIN], ids=["full", "plain"])
def test_a_view_comes_back_equal_from_json(view: FeatureView) -> None:
    back = FeatureView.from_json(json.loads(json.dumps(view.to_json())))
    assert back == view
    assert back.fingerprint() == view.fingerprint()
    assert back.feature_schema() == view.feature_schema()


CHANGES: dict[str, list[Any]] = {
    "name": ["item"],
    "entity": [("item_id", "shop"), ("shop",), ("shop", "item_id", "day")],
    "features": [
        FULL.features[::-1],
        FULL.features[:2],
        (Feature("vector", "float32", dim=3), *FULL.features[1:]),
        (Feature("vector", "float16", dim=4), *FULL.features[1:]),
        (Feature("vector", "float16", max_items=3), *FULL.features[1:]),
        (*FULL.features[:2], Feature("top", "int64", max_items=6)),
        (Feature("vector", "float16", dim=3, packed="int8"), *FULL.features[1:]),
    ],
    "ttl_s": [60.6],
    "stale_for_s": [3601],
    "index": [
        None,
        IndexSpec("vector", "dot", 0.9),
        IndexSpec("vector", "l2", 0.91),
        IndexSpec("other", "l2", 0.9),
    ],
    "fallback": [False],
    "fallback_deadline_s": [0.26],
    "keep_s": [600.0],
    "keep_missing_s": [30.0, 0.0],
    "stale_if_error_s": [0.0],
    "fallback_default": [None, {}, {"label": "nobody"}],
    "misses_by": [None, "another"],
    "powers": [{}, {"glossary": {"words": 3}}],
    "definition": [
        Definition(),
        dataclasses.replace(FULL.definition, source="SELECT 2"),
        dataclasses.replace(FULL.definition, bad_rows="null"),
        dataclasses.replace(FULL.definition, empty="publish"),
        dataclasses.replace(
            FULL.definition, model=dataclasses.replace(FULL.definition.model, use="mine:Model")
        ),
        dataclasses.replace(
            FULL.definition, model=dataclasses.replace(FULL.definition.model, args={})
        ),
        dataclasses.replace(
            FULL.definition, model=dataclasses.replace(FULL.definition.model, precision="bf16")
        ),
        dataclasses.replace(
            FULL.definition, model=dataclasses.replace(FULL.definition.model, backend="onnx")
        ),
    ],
}


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, values in CHANGES.items() for value in values]
)
def test_the_fingerprint_changes_with_everything_a_view_says(field: str, value: Any) -> None:
    changed = dataclasses.replace(FULL, **{field: value})
    assert changed.fingerprint() != FULL.fingerprint()
    assert FeatureView.from_json(json.loads(json.dumps(changed.to_json()))) == changed


def test_every_field_is_in_the_fingerprint() -> None:
    assert set(CHANGES) == {f.name for f in dataclasses.fields(FeatureView)} == set(FULL.to_json())


def test_features_are_found_by_name_in_their_order() -> None:
    assert FULL.feature_names == ("vector", "label", "top")
    assert FULL.feature("label") is FULL.features[1]
    for name in ("nothing", "", "Vector"):
        with pytest.raises(KeyError):
            FULL.feature(name)


@pytest.mark.parametrize("dtype", SCALAR_TYPES)
def test_the_arrow_type_follows_dtype_and_shape(dtype: str) -> None:
    scalar = SCALAR_TYPES[dtype]
    assert Feature("x", dtype).arrow_type == scalar
    assert Feature("x", dtype, max_items=2).arrow_type == pa.list_(scalar)
    assert Feature("x", dtype, dim=2).arrow_type == pa.list_(scalar, 2)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "1a",
        "_a",
        "a-b",
        "a.b",
        "a/b",
        "../a",
        "a b",
        "a:b",
        "a{b}",
        "é",
        "a" * 64,
        "a\0",
        "a\n",
        "\na",
        "a\nb",
        "à",
    ],
)
def test_a_name_that_could_leave_its_folder_or_key_space_is_none(name: str) -> None:
    assert not NAME.match(name)
