"""A filter admits the rows it says and no other, whatever the index; and few of them are all
found."""

from __future__ import annotations

import operator
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.store.errors import RequestError, VectorIndexError
from precompute.store.feature_view import SCALAR_TYPES, Feature
from precompute.store.vectors import vector_index
from precompute.store.vectors.index_build import build_changed, build_index
from precompute.store.vectors.index_choice import Limits
from precompute.store.vectors.index_rows import RowFilter
from precompute.store.vectors.vector_index import VectorIndex
from tests.vectors import nearest, overlapping, rows_of, view_of

ROWS = 2000
FEATURES = (
    Feature("price", "float64"),
    Feature("stock", "int8"),
    Feature("lang", "string"),
    Feature("new", "bool"),
    Feature("weight", "float16"),
)
VIEW = view_of(32, "l2", recall=0.9, scalars=(*FEATURES, Feature("tags", "string", max_items=3)))


def scalars_of(start: int, stop: int) -> dict[str, Any]:
    rows = range(start, stop)
    return {
        "price": pa.array([None if i % 10 == 0 else i / 4 for i in rows], pa.float64()),
        "stock": pa.array([i % 100 - 50 for i in rows], pa.int8()),
        "lang": pa.array([["de", "en", None, "é"][i % 4] for i in rows], pa.string()),
        "new": pa.array([i % 2 == 0 for i in rows], pa.bool_()),
        "weight": pa.array(np.array([i % 7 / 10 for i in rows], np.float16)),
    }


def truth(row: int) -> dict[str, Any]:
    return {name: column[0].as_py() for name, column in scalars_of(row, row + 1).items()}


CASES: list[tuple[dict[str, Any], Any]] = [
    ({}, lambda r: True),
    ({"lang": "de"}, lambda r: r["lang"] == "de"),
    ({"lang": "é"}, lambda r: r["lang"] == "é"),
    ({"lang": ["en", "é", "xx"]}, lambda r: r["lang"] in ("en", "é")),
    ({"lang": {"gte": "e"}}, lambda r: r["lang"] in ("en", "é")),
    ({"new": True}, lambda r: r["new"]),
    ({"new": [False]}, lambda r: not r["new"]),
    ({"stock": 7}, lambda r: r["stock"] == 7),
    ({"stock": 7.0}, lambda r: r["stock"] == 7),
    ({"stock": 7.5}, lambda r: False),
    ({"stock": 300}, lambda r: False),
    ({"stock": [7, 7.5, 300, -50]}, lambda r: r["stock"] in (7, -50)),
    ({"stock": {"gt": -1000, "lt": -48}}, lambda r: r["stock"] < -48),
    ({"stock": {"gte": 48.5}}, lambda r: r["stock"] >= 49),
    (
        {"price": {"gte": 10, "lt": 12.5}},
        lambda r: r["price"] is not None and 10 <= r["price"] < 12.5,
    ),
    ({"price": {"lte": 1e300}}, lambda r: r["price"] is not None),
    ({"price": 2.75}, lambda r: r["price"] == 2.75),
    ({"weight": 0.3}, lambda r: r["weight"] == np.float16(0.3)),
    ({"weight": {"lt": 1e300}}, lambda r: True),
    ({"weight": {"lte": 0.1}}, lambda r: r["weight"] <= np.float16(0.1)),
    ({"lang": "de", "new": False}, lambda r: False),
    (
        {"lang": "en", "stock": {"gt": 0}, "price": {"lt": 400}},
        lambda r: (
            r["lang"] == "en" and r["stock"] > 0 and r["price"] is not None and r["price"] < 400
        ),
    ),
]


def test_bounds_of_integers_are_exact_however_large_they_are() -> None:
    numbers = [-(2**63), -(2**53) - 1, -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 1]
    table, view = pa.table({"n": numbers}), view_of(32, "l2", scalars=(Feature("n", "int64"),))
    compared = {"gte": operator.ge, "gt": operator.gt, "lte": operator.le, "lt": operator.lt}
    for limit in [*numbers, 0.5, -0.5, -0.0, 2.0**53, 2.0**63, -(2.0**63), 1e300, -1e300]:
        for name, compare in compared.items():
            admitted = RowFilter(view, {"n": {name: limit}}).admits(table).tolist()
            assert admitted == [compare(number, limit) for number in numbers], (name, limit)


@pytest.fixture(scope="module", params=["exact", "codes"])
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VectorIndex:
    """1,800 rows; then the last hundred of these changed, and 200 came."""
    folder = tmp_path_factory.mktemp("filtered")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vector_index, "STREAMED", 0.5)
        small = 1000 if request.param == "codes" else ROWS
        build_index(
            folder / "1",
            rows(0, 1800, seed=0),
            VIEW,
            model="m",
            limits=Limits(small_rows=small, small_numbers=0),
        )
    gone = np.arange(1700, 1800)
    build_changed(folder / "2", folder / "1", rows(1700, ROWS, seed=1), gone, VIEW, model="m")
    found = VectorIndex(folder / "1", folder / "2")
    assert found.figures.kind == request.param
    return found


def rows(start: int, stop: int, seed: int) -> list[pa.RecordBatch]:
    return [
        rows_of(
            [f"k{i}" for i in range(start, stop)],
            overlapping(ROWS, seed=seed)[start:stop],
            (),
            scalars_of(start, stop),
        )
    ]


VECTORS = np.concatenate([overlapping(ROWS, seed=0)[:1700], overlapping(ROWS, seed=1)[1700:]])


@pytest.mark.parametrize(
    ("few_rows", "wanted", "admits"),
    # one by one, and by bitmap
    [((4096, 10)[number % 2], *case) for number, case in enumerate(CASES)],
    ids=[str(wanted) for wanted, _ in CASES],
)
def test_a_search_answers_with_what_the_filter_admits(
    index: VectorIndex,
    monkeypatch: pytest.MonkeyPatch,
    few_rows: int,
    wanted: dict[str, Any],
    admits: Any,
) -> None:
    monkeypatch.setattr("precompute.store.vectors.vector_index.FEW_ROWS", few_rows)
    admitted = [f"k{row}" for row in range(ROWS) if admits(truth(row))]
    where, shares, right = RowFilter(VIEW, wanted), [], set(admitted)
    for query in overlapping(10, seed=3):
        true = [key for key in (f"k{row}" for row in nearest(VECTORS, query, "l2")) if key in right]
        found = index.search(query, 10, where=where, exclude=true[:1]).keys
        assert set(found) <= right - set(true[:1])
        assert len(set(found)) == min(10, max(0, len(admitted) - 1))
        shares.append(len(set(found) & set(true[1:11])) / max(1, len(found)) if found else 1.0)
        only = [*admitted[:30], "k0", "k1", "k2", "k3", "stranger"]
        assert set(index.search(query, 100, where=where, only=only).keys) == set(only) & right
    assert len(index.search(VECTORS[0], ROWS, where=where).keys) == len(admitted)
    if admitted:
        assert (
            np.mean(shares) == 1.0
            if few_rows == 4096 or index.figures.kind == "exact"
            else np.mean(shares) >= 0.85
        )


@pytest.mark.parametrize(
    "wanted",
    [
        {"nope": 1},
        {"vector": 1},
        {"tags": "a"},
        {"id": "k1"},
        {"price": "1"},
        {"price": True},
        {"price": None},
        {"price": float("nan")},
        {"price": {"gt": float("inf")}},
        {"price": 10**400},
        {"stock": 2**70},
        {"stock": {"lt": 2**70}},
        {"stock": {}},
        {"stock": {"above": 1}},
        {"stock": {"gt": [1]}},
        {"stock": {"gt": None}},
        {"stock": []},
        {"stock": [1, "2"]},
        {"stock": [[1]]},
        {"stock": list(range(1001))},
        {"lang": 1},
        {"lang": {"gt": 1}},
        {"lang": "\ud800"},
        {"new": 1},
        {"new": "true"},
        {"new": {"gt": False}},
        {f"f{n}": 1 for n in range(17)},
        [],
        "lang",
    ],
    ids=lambda wanted: str(wanted)[:40],
)
def test_what_is_no_filter_of_the_view_is_refused(wanted: Any) -> None:
    with pytest.raises(RequestError) as refused:
        RowFilter(VIEW, wanted)
    assert (refused.value.status, refused.value.code) == (400, "bad_filter")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("layer", ["1", "2"])
def test_a_bit_that_changes_under_an_open_index_admits_no_other_row(
    tmp_path: Path, layer: str
) -> None:
    """A scalar, or an offset of a text, that is another now leaves its row out or is damage."""
    build_index(tmp_path / "1", rows(0, 100, seed=0), VIEW, model="m")
    gone = np.empty(0, np.int64)
    build_changed(tmp_path / "2", tmp_path / "1", rows(100, 200, seed=0), gone, VIEW, model="m")
    index, rng = VectorIndex(tmp_path / "1", tmp_path / "2"), random.Random(4)
    path = tmp_path / layer / "rows.arrow"
    cases = [
        (RowFilter(VIEW, wanted), {f"k{i}" for i in range(200) if admits(truth(i))})
        for wanted, admits in CASES
    ]
    with pa.memory_map(str(path)) as mapped:
        whole = mapped.read_buffer()
        columns = pa.ipc.open_file(whole).read_all().columns[2:]
        buffers = [b for column in columns for b in column.chunk(0).buffers() if b is not None]
        places = [b.address - whole.address + at for b in buffers for at in range(b.size)]
        whole = whole.to_pybytes()
    refused = 0
    with path.open("r+b", buffering=0) as file:
        for bit in (8 * place + rng.randrange(8) for place in rng.sample(places, 100)):
            os.pwrite(file.fileno(), bytes([whole[bit // 8] ^ 1 << bit % 8]), bit // 8)
            for where, true in cases:
                try:
                    assert set(index.search(VECTORS[0], 200, where=where).keys) <= true, bit
                except VectorIndexError:
                    refused += 1
            os.pwrite(file.fileno(), whole[bit // 8 : bit // 8 + 1], bit // 8)
    assert refused > 10


def test_every_scalar_type_can_be_filtered_by(tmp_path: Path) -> None:
    features = [Feature(name, name) for name in SCALAR_TYPES]
    view = view_of(2, "l2", scalars=features)
    values: dict[str, Any] = {
        name: ["b", "a"] if name == "string" else [True, False] if name == "bool" else [1, 0]
        for name in SCALAR_TYPES
    }
    columns = {
        name: pa.array(
            np.array(value, np.float16) if name == "float16" else value, SCALAR_TYPES[name]
        )
        for name, value in values.items()
    }
    build_index(
        tmp_path / "index",
        [rows_of(["one", "zero"], np.ones((2, 2), np.float32), (), columns)],
        view,
        model="m",
    )
    index = VectorIndex(tmp_path / "index")
    for name, (wanted, _) in values.items():
        assert index.search([1, 1], 2, where=RowFilter(view, {name: wanted})).keys == ["one"], name
        assert index.search([1, 1], 2, where=RowFilter(view, {name: [wanted]})).keys == ["one"], (
            name
        )
        if name != "bool":
            assert index.search([1, 1], 2, where=RowFilter(view, {name: {"lt": wanted}})).keys == [
                "zero"
            ], name
