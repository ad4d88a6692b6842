"""Top-k: what brute force gives, whatever the tiles, with the seen items left out."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precompute.engine.runner import Runner, compute
from precompute.model import model_fingerprint
from precompute.models import top_k
from precompute.models.top_k import TopK
from precompute.store.errors import ConfigError, ModelError
from precompute.store.feature_view import Feature, FeatureView

DIM = 4
Lists = list[list[tuple[Any, float]]]


def table(ids: Any, vectors: Any, kind: pa.DataType | None = None) -> pa.Table:
    rows = np.asarray(vectors, np.float32).tolist()
    return pa.table({"id": ids, "vector": pa.array(rows, kind or pa.list_(pa.float32()))})


def users(
    vectors: npt.ArrayLike, seen: Any = None, kind: pa.DataType | None = None
) -> pa.RecordBatch:
    columns: dict[str, Any] = {
        "vector": pa.array(np.asarray(vectors, np.float32).tolist(), pa.list_(pa.float32()))
    }
    if seen is not None:
        columns["seen"] = pa.array(seen, kind or pa.list_(pa.int64()))
    return pa.record_batch(columns)


def ranked(model: TopK, batch: pa.RecordBatch) -> Lists:
    made: Any = model.compute(batch)
    assert list(made) == ["items", "scores"]
    pairs = zip(made["items"].to_pylist(), made["scores"].to_pylist(), strict=True)
    return [list(zip(ids, scores, strict=True)) for ids, scores in pairs]


# ---- exactly one order, ties included


def in_order(ids: list[Any], items: Any, vectors: Any, seen: list[Any], k: int) -> Lists:
    """In float64; of items that score the same, the first in the table comes first."""
    rows = []
    for row, excluded in zip(
        np.asarray(vectors, np.float64) @ np.asarray(items, np.float64).T, seen, strict=True
    ):
        order = np.lexsort((np.arange(len(ids)), -row)).tolist()
        rows.append([(ids[i], float(row[i])) for i in order if ids[i] not in (excluded or [])][:k])
    return rows


def everything(draw: st.DataObject) -> tuple[list[int], Any, Any, list[Any], int]:
    """(ids, items, vectors, seen, k) of few different numbers, so that many items score the
    same."""
    n_items, n_users = draw.draw(st.integers(1, 150)), draw.draw(st.integers(1, 40))
    ids = draw.draw(st.permutations(range(n_items)))
    rng = np.random.default_rng(draw.draw(st.integers(0, 2**32)))
    items, vectors = rng.integers(-2, 3, (n_items, DIM)), rng.integers(-2, 3, (n_users, DIM))
    if draw.draw(st.booleans()):  # every tile better than those before
        items = items[np.argsort(items[:, 0], kind="stable")]
        vectors[:, 1:] = 0
    share = draw.draw(st.sampled_from([0.0, 0.2, 0.9, 1.0]))
    seen = [
        None if rng.random() < 0.1 else np.flatnonzero(rng.random(n_items) < share).tolist()
        for _ in range(n_users)
    ]
    return list(ids), items, vectors, seen, draw.draw(st.sampled_from([1, 2, 5, 30, 200]))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_ties_go_to_the_first_item_whatever_the_tiles(data: st.DataObject) -> None:
    ids, items, vectors, seen, k = everything(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k, "ITEM_TILE", data.draw(st.sampled_from([16, 32, 48, 4096])))
        patch.setattr(top_k, "USER_TILE", data.draw(st.integers(1, 41)))
        found = ranked(TopK(table(ids, items), k, exclude="seen"), users(vectors, seen))
    assert found == in_order(ids, items, vectors, seen, k)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_a_gpu_computes_is_the_same(data: st.DataObject) -> None:
    ids, items, vectors, seen, k = everything(data)
    model, batch = TopK(table(ids, items), k, exclude="seen", device="cpu"), users(vectors, seen)
    inputs = model.inputs(model.prepare(batch), np.arange(batch.num_rows))
    module = cast(Any, model.module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k, "GPU_SCORES", data.draw(st.sampled_from([1, 500, 2000, 2**26])))
        made = model.features([module.by_topk(*inputs).numpy()])
    assert made == model.compute(batch)


def test_zeros_of_either_sign_score_the_same() -> None:
    items = table([1, 2, 3], [[-0.0, 0.0], [0.0, 0.0], [0.0, -0.0]])
    assert ranked(TopK(items, 2), users([[1.0, 0.0], [-1.0, -0.0]])) == [[(1, 0.0), (2, 0.0)]] * 2


@pytest.mark.parametrize("dim", [3, 16, 33, 64, 130])
def test_scores_of_real_numbers_are_exact_in_any_company(dim: int) -> None:
    rng = np.random.default_rng(dim)
    items = rng.standard_normal((5000, dim), np.float32)
    vectors = rng.standard_normal((300, dim), np.float32)
    model, batch = TopK(table(list(range(5000)), items), 20), users(vectors)
    together = ranked(model, batch)
    places = np.array([[item for item, _ in row] for row in together])
    scores = np.array([[score for _, score in row] for row in together])
    exact = vectors.astype(np.float64) @ items.T.astype(np.float64)
    np.testing.assert_allclose(scores, np.take_along_axis(exact, places, 1), rtol=0, atol=1e-4)
    np.testing.assert_allclose(scores, -np.sort(-exact, 1)[:, :20], rtol=0, atol=1e-4)
    for start, rows in ((0, 1), (7, 15), (40, 33), (299, 1)):
        assert ranked(model, batch.slice(start, rows)) == together[start : start + rows]


def test_lists_are_the_same_where_torch_has_no_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    items, vectors = rng.integers(-9, 10, (700, DIM)), rng.integers(-9, 10, (60, DIM))
    model, batch = TopK(table(list(range(700)), items), 20), users(vectors)
    by_onednn = ranked(model, batch)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None)
    assert ranked(model, batch) == by_onednn


def test_the_stages_of_a_run_give_what_compute_gives() -> None:
    rng = np.random.default_rng(0)
    items, vectors = rng.integers(-9, 10, (700, DIM)), rng.integers(-9, 10, (3000, DIM))
    seen = [rng.integers(0, 800, rng.integers(0, 30)).tolist() for _ in vectors]
    model = TopK(table(list(range(700)), items), 20, exclude="seen", device="cpu")
    batch = users(vectors, seen)
    model.start_cost = 100  # batches of 50 to 400 users
    features = (Feature("items", "int64", max_items=20), Feature("scores", "float32", max_items=20))
    runner = Runner(model, FeatureView("v", ("id",), features, 1.0, 1.0))
    done = [
        computed.features
        for _, computed in runner.stream(batch.slice(start, 1000) for start in (0, 1000, 2000))
    ]
    streamed = pa.Table.from_batches(done)
    assert [column.to_pylist() for column in streamed.columns] == [
        pa.array(model.compute(batch)[n]).to_pylist() for n in ("items", "scores")
    ]
    assert list(zip(*(c.to_pylist() for c in streamed.columns), strict=True)) == [
        tuple(map(list, zip(*row, strict=True)))
        for row in in_order(list(range(700)), items, vectors, seen, 20)
    ]
    assert runner.meter.batches > 8
    assert runner.meter.flops == 2 * 3000 * 700 * DIM


def test_fewer_items_than_k_and_fewer_left_than_k() -> None:
    model = TopK(table([1, 2, 3], [[1.0], [3.0], [2.0]]), k=5, exclude="seen")
    assert (model.reads(), TopK(table([1], [[1.0]])).reads()) == (["vector", "seen"], ["vector"])
    found = ranked(model, users([[1.0], [1.0], [-1.0], [1.0]], [[], [2, 9], None, [1, 2, 3]]))
    assert found == [
        [(2, 3.0), (3, 2.0), (1, 1.0)],
        [(3, 2.0), (1, 1.0)],
        [(1, -1.0), (3, -2.0), (2, -3.0)],
        [],
    ]


def test_string_ids_unknown_seen_ids_nulls_and_repetitions() -> None:
    model = TopK(table(["a", "é", "c"], [[1.0], [3.0], [2.0]]), k=2, exclude="seen")
    seen = [["é", "é", None, "unknown"], None, []]
    found = ranked(model, users([[1.0]] * 3, seen, pa.list_(pa.string())))
    assert found == [[("c", 2.0), ("a", 1.0)], [("é", 3.0), ("c", 2.0)], [("é", 3.0), ("c", 2.0)]]


@pytest.mark.parametrize(
    ("ids", "seen", "kind"),
    [
        (pa.array([1, 2], pa.int32()), [[2**40, 2]], pa.list_(pa.int64())),
        (pa.array([1, 2], pa.int64()), [["x", "2"]], pa.list_(pa.string())),
        (pa.array([1, 2], pa.int64()), [[2]], pa.large_list(pa.int64())),
        (pa.array([1, 2], pa.int64()), [[2]], pa.list_(pa.int64(), 1)),
        (pa.array(["1", "2"]), [[2]], pa.list_(pa.int64())),
        (pa.array([1, 2], pa.int64()), [[2, 3]], pa.list_(pa.float64())),
    ],
)
def test_seen_ids_of_another_type_that_are_no_items_are_ignored(
    ids: pa.Array, seen: Any, kind: pa.DataType
) -> None:
    found = ranked(
        TopK(table(ids, [[1.0], [3.0]]), k=2, exclude="seen"), users([[1.0]], seen, kind)
    )
    assert found == [[(ids[0].as_py(), 1.0)]]


def test_no_one_has_seen_anything() -> None:
    """``NULL AS seen`` in SQL: a column of nulls, whose type says nothing."""
    batch = users([[1.0]]).append_column("seen", pa.nulls(1))
    assert ranked(TopK(table([1], [[2.0]]), exclude="seen"), batch) == [[(1, 2.0)]]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float32()),
        pa.list_(pa.float64()),
        pa.list_(pa.float32(), 2),
        pa.list_(pa.float16(), 2),
    ],
)
def test_vectors_come_as_lists_of_any_float(kind: pa.DataType) -> None:
    items = table([1, 2], [[1, 0], [0, 1]], kind)
    batch = pa.record_batch({"vector": pa.array([[1.0, 0.5], [0.25, 2.0]], kind)})
    assert ranked(TopK(items, 2), batch) == [[(1, 1.0), (2, 0.5)], [(2, 2.0), (1, 0.25)]]
    assert ranked(TopK(items.slice(1), 2), batch.slice(1)) == [[(2, 2.0)]]


# ---- rows and items that cannot be ranked


def test_a_vector_whose_scores_overflow_is_a_bad_row() -> None:
    batch = pa.record_batch({"vector": [[1e30, 0.0], [1.0, 0.0], [1e300, 0.0]]})
    model = TopK(table([7, 8], [[1e9, 0], [0, 1]]), 1)
    assert model.unusable(batch) == {
        0: "vector is so long that scores are not finite in float32",
        2: "vector has a null or a number that is not finite",
    }
    with pytest.raises(ConfigError, match="not finite"):
        TopK(pa.table({"id": [7], "vector": [[1e39]]}))


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.list_(pa.float32())])
def test_a_vector_of_another_length_is_one_bad_row(kind: pa.DataType) -> None:
    vectors = pa.array(
        [[9.0, 9.0], [1.0, 0.0], [1.0], [], None, [1.0, None], [0.0, 1.0], [1.0, 2.0, 3.0]], kind
    )
    items, best = Feature("items", "int64", max_items=1), TopK(table([7, 8], [[1, 0], [0, 1]]), 1)
    view = FeatureView(
        "best", ("vector",), (items, Feature("scores", "float32", max_items=1)), 60.0, 60.0
    )
    # a slice of a batch, as windows are
    done = compute(best, view, pa.record_batch({"vector": vectors}).slice(1))
    assert done.features.column("items").to_pylist() == [[7], [8]]
    assert {rejected.row: rejected.error for rejected in done.rejections} == {
        1: "vector has 1 numbers, the items' vectors 2",
        2: "vector has 0 numbers, the items' vectors 2",
        3: "vector is null",
        4: "vector has a null or a number that is not finite",
        6: "vector has 3 numbers, the items' vectors 2",
    }


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"sql": "SELECT 1"}, "two columns"),
        (None, "two columns"),
        (pa.table({"id": [1]}), "two columns"),
        (pa.table({"id": [1], "v": [[1.0]], "w": [1]}), "two columns"),
        (table([], np.empty((0, 2))), "no rows"),
        (pa.table({"id": [1], "v": [1.0]}), "not a vector"),
        (pa.table({"id": [1], "v": ["a"]}), "not a vector"),
        (pa.table({"id": [1, 2], "v": [[1.0], None]}), "null"),
        (table([1, 1], [[1], [2]]), "twice"),
        (pa.table({"id": [1, None], "v": [[1.0], [2.0]]}), "null"),
        (pa.table({"id": [1, 2], "v": [[1.0], [None]]}), "null|finite"),
        (pa.table({"id": [1, 2], "v": [[1.0], [float("nan")]]}), "finite"),
        (pa.table({"id": [1, 2], "v": [[1.0, 2.0], [1.0]]}), "2 numbers"),
    ],
)
def test_items_of_another_shape_are_refused(items: Any, message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=f"top_k.*{message}"):
        TopK(items)


@pytest.mark.parametrize(
    "arguments", [{"k": 0}, {"k": -1}, {"k": "10"}, {"outputs": ["items"]}, {"outputs": ["a", "a"]}]
)
def test_arguments_that_make_no_sense_are_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        TopK(table([1], [[1.0]]), **arguments)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (users([[1.0, 2.0]], [[1]]), "1 numbers"),
        (
            pa.record_batch(
                {"vector": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)), "seen": [[1]]}
            ),
            "vectors of 1",
        ),
        (pa.record_batch({"vector": [1.0], "seen": [[1]]}), "'vector' is double"),
    ],
)
def test_a_source_that_does_not_fit_the_items_is_a_model_error(
    batch: pa.RecordBatch, message: str
) -> None:
    with pytest.raises(ModelError, match=f"top_k.*{message}"):
        TopK(table([1], [[1.0]]), exclude="seen").compute(batch)


def test_the_fingerprint_changes_with_arguments_and_items() -> None:
    items = table([1, 2], [[1.0], [2.0]])
    changed: list[tuple[pa.Table, dict[str, Any]]] = [
        (items, {}),
        (items, {"k": 99}),
        (items, {"exclude": "seen"}),
        (items, {"vector": "other"}),
        (table([1, 2], [[1.0], [2.5]]), {}),
        (table([1, 3], [[1.0], [2.0]]), {}),
    ]
    prints = {
        model_fingerprint(TopK(t, **arguments).fingerprint(), "top_k", "fp32", {"items": t})
        for t, arguments in changed
    }
    assert len(prints) == len(changed)
    assert (
        model_fingerprint(
            TopK(items).fingerprint(), "top_k", "fp32", {"items": table([1, 2], [[1.0], [2.0]])}
        )
        in prints
    )
