"""What is chosen keeps its promise on rows that nothing was chosen by; where nothing does, the
index is exact and says so."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pytest

from precompute.store.feature_view import Feature
from precompute.store.vectors import index_choice, vector_index
from precompute.store.vectors.index_build import build_index
from precompute.store.vectors.index_choice import (
    EXCLUSIONS,
    KINDS,
    SHARES,
    Limits,
    Queries,
    QueryKinds,
    candidates,
    lower_bound,
)
from precompute.store.vectors.index_files import (
    METRICS,
    Codes,
    nearest_of_some,
    scan_codes,
    threads,
    trained_codes,
    widened,
)
from precompute.store.vectors.index_rows import RowFilter
from precompute.store.vectors.vector_index import Admitted, NearestRows, VectorIndex
from tests.vectors import Vectors, nearest, overlapping, rows_of, view_of

ROWS = 6000
SMALL = Limits(small_rows=1000, small_numbers=0)


def built(
    folder: Path,
    vectors: Vectors,
    metric: str = "cosine",
    recall: float = 0.95,
    limits: Limits = SMALL,
) -> VectorIndex:
    keys = [f"k{i}" for i in range(len(vectors))]
    build_index(
        folder,
        [rows_of(keys, vectors)],
        view_of(vectors.shape[1], metric, recall=recall),
        model="m",
        limits=limits,
    )
    return VectorIndex(folder)


def recall_of(index: VectorIndex, vectors: Vectors, metric: str, queries: Vectors) -> float:
    shares = []
    for query in queries:
        true = {f"k{i}" for i in nearest(vectors, query, metric)[:10]}
        shares.append(len(true & set(index.search(query, 10).keys)) / 10)
    return float(np.mean(shares))


@pytest.fixture
def take_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are taken where they keep the promise, of however few rows."""
    monkeypatch.setattr(vector_index, "STREAMED", 0.5)
    monkeypatch.setattr(index_choice, "_WORTH", 1e9)
    monkeypatch.setattr(index_choice, "_TUNING_QUERIES", 64)
    monkeypatch.setattr(index_choice, "_HELD_OUT_QUERIES", 256)
    monkeypatch.setattr(vector_index, "FEW_ROWS", 10)


@pytest.mark.usefixtures("take_codes")
@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_the_promise_holds_for_every_query_that_can_be_searched_by(
    tmp_path: Path, metric: str
) -> None:
    """Clusters whose rows no code can tell apart, of two languages: what is searched for may lie
    anywhere but where the query does."""
    rng, dim, clusters = np.random.default_rng(4), 32, 60
    of, low = rng.integers(clusters, size=ROWS), rng.integers(100, size=ROWS)
    low[3] = 1000
    centres = rng.standard_normal((clusters, dim))
    vectors = (centres[of] + 0.2 * rng.standard_normal((ROWS, dim))).astype(np.float32)
    view = view_of(
        dim, metric, recall=0.9, scalars=[Feature("number", "int32"), Feature("language", "string")]
    )
    scalars = {
        "number": pa.array(low, pa.int32()),
        "language": pa.array(np.where(of % 2, "de", "en")),
    }
    rows = rows_of([f"k{i}" for i in range(ROWS)], vectors, (), scalars)
    figures = build_index(tmp_path / "index", [rows], view, model="m", limits=SMALL)
    assert figures.kind == "codes", figures.why
    assert (
        figures.recall_bound == min(kind.recall_bound for kind in figures.by_query.values()) >= 0.9
    )
    assert tuple(sorted(figures.by_query)) == tuple(sorted(KINDS))
    assert [
        figures.by_query[name].by for name in ("filter_50", "filter_20", "filter_1", "plain")
    ] == [
        "language",
        "number",
        "number",
        None,
    ]
    index = VectorIndex(tmp_path / "index")
    queries = [int(row) for row in rng.choice(ROWS, 60, replace=False)]

    def found_of(
        admitted: Any, query_of: Any, where: Any = None, exclude: Any = lambda row: []
    ) -> float:
        shares = []
        for row in queries:
            query, left = query_of(row), admitted(row)
            true = [key for key in nearest(vectors, query, metric) if left[key]][:10]
            found = index.search(
                query,
                10,
                exclude=[f"k{i}" for i in exclude(row)],
                where=where and RowFilter(view, where(row)),
            )
            assert all(left[int(key[1:])] for key in found.keys)
            shares.append(len({f"k{key}" for key in true} & set(found.keys)) / max(1, len(true)))
        return float(np.mean(shares))

    everything, itself = np.ones(ROWS, np.bool_), lambda row: vectors[row]
    recalls = {
        "plain": found_of(lambda row: everything, itself),
        "half": found_of(lambda row: low < 50, itself, lambda row: {"number": {"lt": 50}}),
        "other language": found_of(
            lambda row: of % 2 != of[row] % 2,
            itself,
            lambda row: {"language": "en" if of[row] % 2 else "de"},
        ),
        "own cluster excluded": found_of(
            lambda row: of != of[row], itself, exclude=lambda row: np.flatnonzero(of == of[row])
        ),
        "off the data": found_of(
            lambda row: everything, lambda row: np.random.default_rng(row).standard_normal(dim)
        ),
    }
    assert min(recalls.values()) >= 0.9, recalls
    # what admits nothing, one row, all; and more neighbours than there are rows
    query = vectors[0]
    for wanted, admitted in (
        ({"number": -1}, 0),
        ({"number": 1000}, 1),
        ({"number": {"gte": 0}}, ROWS),
    ):
        assert len(index.search(query, ROWS + 1, where=RowFilter(view, wanted)).keys) == admitted
    thousand = nearest(vectors, query, metric)[:1000]
    after = index.search(query, 10, exclude=[f"k{i}" for i in thousand]).keys
    assert len(set(after) & {f"k{i}" for i in nearest(vectors, query, metric)[1000:1010]}) >= 9


@pytest.mark.usefixtures("take_codes")
def test_a_search_costs_no_more_than_twice_comparing_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far it goes: a query whose neighbours no code can tell ends with every row."""
    scanned = list[int]()

    def spied(coded: Any, query: Any, k: int, bits: Any = None) -> Any:
        scanned.append(k)
        return scan_codes(coded, query, k, bits)

    index = built(tmp_path / "index", overlapping(ROWS))
    monkeypatch.setattr("precompute.store.vectors.vector_index.scan_codes", spied)
    monkeypatch.setattr(vector_index.NearestRows, "_is_sure", lambda *_: False)
    for k in (1, 10, 100, 1000, ROWS, 10 * ROWS):
        scanned.clear()
        best = [
            f"k{i}" for i in nearest(overlapping(ROWS), overlapping(1)[0], "cosine")[: min(k, 10)]
        ]
        assert index.search(overlapping(1)[0], k).keys[:10] == best
        assert sum(scanned) <= ROWS
        assert sorted(scanned) == scanned


@pytest.mark.parametrize(
    ("vectors", "recall", "limits", "kind", "why"),
    [
        (overlapping(900), 0.95, SMALL, "exact", "900 rows: comparing with all of them costs less"),
        (
            overlapping(2000),
            0.999,
            SMALL,
            "exact",
            "a promise above 0.9895 is met by comparing with every row",
        ),
        (
            overlapping(2000) + 30_000,
            0.95,
            Limits(memory_mb=0, small_rows=1000, small_numbers=0),
            "exact",
            "float16 loses neighbours",
        ),
        (overlapping(2000) * 1e6, 0.95, SMALL, "exact", "numbers that float16 cannot"),
        (
            overlapping(2000),
            0.95,
            Limits(memory_mb=0, small_rows=1000, small_numbers=0),
            "float16",
            "float16: ",
        ),
    ],
    ids=[
        "few rows",
        "more than can be shown",
        "far from zero",
        "too large",
        "no memory",
    ],
)
def test_a_promise_that_nothing_less_keeps_has_every_row_compared(
    tmp_path: Path, vectors: Vectors, recall: float, limits: Limits, kind: str, why: str
) -> None:
    index = built(tmp_path / "index", vectors, "l2", recall, limits)
    assert index.figures.kind == kind
    assert why in index.figures.why
    assert (index.dtype == "float32") == (kind == "exact")
    queries = vectors[:20]
    assert recall_of(index, vectors, "l2", queries) >= (1.0 if kind == "exact" else 0.99)


@pytest.mark.usefixtures("take_codes")
def test_codes_that_held_out_rows_refuse_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the queries to tune by anything would do."""
    monkeypatch.setattr(index_choice, "_RESCORED", (20,))
    monkeypatch.setattr(index_choice, "_MARGINS", (-9.0,))
    monkeypatch.setattr(index_choice.Chooser, "_is_good", lambda self, recall: True)
    index = built(tmp_path / "index", overlapping(ROWS, noise=5.0), "cosine")
    assert index.figures.kind == "float16"
    first, second, third = index.figures.why.split("; ")
    assert first.startswith("codes: 0.")
    assert second.startswith("codes: 0.")
    assert third.startswith("float16: ")


def test_where_nothing_keeps_it_the_index_is_exact_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_choice.Chooser, "_holds", lambda self, measured: False)
    index = built(tmp_path / "index", overlapping(2000), "cosine")
    assert (index.figures.kind, index.dtype, index.figures.recall_bound) == (
        "exact",
        "float32",
        1.0,
    )
    assert index.figures.why.startswith("no candidate met the promise (")
    assert index.figures.exact_us is not None


@pytest.mark.usefixtures("take_codes")
def test_what_float16_loses_codes_find_over_float32(tmp_path: Path) -> None:
    vectors = overlapping(ROWS) + 30_000
    index = built(tmp_path / "index", vectors, "l2")
    assert (index.figures.kind, index.dtype) == ("codes", "float32")
    assert recall_of(index, vectors, "l2", vectors[:50]) >= 0.94


@pytest.mark.parametrize("dim", [1, 7])
@pytest.mark.usefixtures("take_codes")
def test_any_dimension_has_an_index(tmp_path: Path, dim: int) -> None:
    vectors = overlapping(1500, dim)
    index = built(tmp_path / "index", vectors, "l2", 0.9)
    assert recall_of(index, vectors, "l2", overlapping(30, dim, seed=1)) >= 0.85


@pytest.mark.usefixtures("take_codes")
def test_rows_all_alike_are_all_right_answers(tmp_path: Path) -> None:
    index = built(tmp_path / "index", np.repeat(overlapping(4), 500, axis=0))
    assert index.figures.recall_bound >= 0.95
    assert len(set(index.search(overlapping(1)[0], 50).keys)) == 50


def test_candidates_fit_in_memory() -> None:
    limits = Limits(memory_mb=60)
    assert candidates(100_000, 384, limits) == [Codes(96), Codes(192)]
    assert candidates(1_000_000, 384, limits) == [Codes(96)]
    assert candidates(10_000_000, 384, limits) == []
    assert candidates(100_000, 7, limits) == [Codes(7)]
    assert candidates(100_000, 10, limits) == [Codes(5)]


def test_the_same_rows_give_the_same_codes() -> None:
    vectors = overlapping(3000)
    codes = [trained_codes(vectors, np.arange(100), Codes(8), l2=False) for _ in range(2)]
    first, second = (faiss.serialize_index(coded).tobytes() for coded in codes)
    assert first == second


def test_nothing_is_learnt_from_rows_that_are_held_out() -> None:
    vectors, held_out = overlapping(3000), np.arange(0, 1000, 2)
    changed = vectors.copy()
    changed[held_out] *= 50
    learnt = []
    for rows in (vectors, changed):
        coded = trained_codes(rows, held_out, Codes(8), l2=True)
        learnt.append(
            (
                faiss.vector_to_array(coded.pq.centroids).tolist(),
                coded.quantizer.reconstruct_n(0, 1).tolist(),
            )
        )
    assert learnt[0] == learnt[1]


def test_a_search_widens_with_demand_and_never_without_end() -> None:
    codes = Codes(96, rescored=80)
    assert [codes.to_rescore(k) for k in (1, 10, 11, 101, 1000)] == [80, 80, 80, 800, 7992]
    assert codes._replace(rescored=2560).to_rescore(1000) == 16_384
    assert codes.to_rescore(50_000) == 50_000


def test_threads_are_as_many_as_before_whatever_happens() -> None:
    before = faiss.omp_get_max_threads()
    with contextlib.suppress(KeyError), threads(1):
        assert faiss.omp_get_max_threads() == 1
        raise KeyError
    assert faiss.omp_get_max_threads() == before


# ---- recall


@pytest.mark.parametrize(
    ("recall", "queries", "z", "bound"),
    # Wilson's interval as tables have it (95 %, two-sided), and by n / (n + z²) where all are found
    [
        (0.5, 100, 1.96, 0.40383),
        (0.9, 50, 1.96, 0.78640),
        (0.0, 10, 1.96, 0.0),
        (1.0, 1024, 2.326, 1024 / (1024 + 2.326**2)),
        (1.0, 0, 2.326, 0.0),
    ],
)
def test_the_bound_is_wilsons(recall: float, queries: int, z: float, bound: float) -> None:
    assert lower_bound(recall, queries, z) == pytest.approx(bound, abs=1e-5)


@pytest.mark.parametrize("share", [0.5, 0.97])
def test_the_bound_holds_though_neighbours_are_lost_together(share: float) -> None:
    """In 2,000 trials of 300 queries each, all ten neighbours of which are found or none, it is too
    high in 1 % and not in 10."""
    rng = np.random.default_rng(0)
    means = rng.binomial(300, share, 2000) / 300
    wrong = np.mean([lower_bound(float(mean), 300) > share for mean in means])
    assert wrong <= 0.02


@pytest.mark.parametrize("l2", [False, True])
def test_equal_rows_are_equally_right_and_what_is_excluded_is_not(l2: bool) -> None:
    vectors = np.concatenate([overlapping(100), overlapping(100)])
    query_rows = np.array([3, 103, 50])
    query_vectors = vectors[query_rows]
    order = nearest_of_some(vectors, None, query_vectors, 11, l2=l2)
    others = [found[found != row] for found, row in zip(order, query_rows, strict=True)]
    everything = [Admitted(None, 200)] * 3
    queries = Queries(vectors, query_vectors, everything, list(query_rows[:, None]), others, l2=l2)
    assert queries.recall(others).mean == 1.0
    twins = [np.where(rows < 100, rows + 100, rows - 100) for rows in others]
    assert queries.recall(twins).mean >= 0.9
    assert queries.recall([rows[:5] for rows in others]).mean == pytest.approx(0.5, abs=0.1)
    assert queries.recall([np.full(10, -1) for _ in range(3)]).mean == 0.0
    flat = faiss.IndexFlatL2(32) if l2 else faiss.IndexFlatIP(32)
    flat.add(vectors)
    rows = NearestRows(flat, vectors, l2=l2)
    assert queries.recall(queries.searched(rows)).mean == 1.0
    assert not any(
        row in found for row, found in zip(query_rows, queries.searched(rows), strict=True)
    )


@pytest.mark.parametrize("metric", METRICS)
def test_the_truth_of_every_kind_is_that_of_comparing_with_every_row(metric: str) -> None:
    """And so is what an exact search finds, of as many queries, each of which may find what its
    kind admits."""
    vectors = overlapping(3000)
    if metric == "cosine":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scalars = pa.table(
        {
            "half": np.arange(3000) % 2 == 0,
            "number": pa.array([None if i % 3 == 0 else i / 7 for i in range(3000)]),
        }
    )
    query_rows = np.arange(0, 3000, 100)
    flat = faiss.IndexFlatL2(32) if metric == "l2" else faiss.IndexFlatIP(32)
    flat.add(vectors)
    rows, kinds = (
        NearestRows(flat, vectors, l2=metric == "l2"),
        dict(QueryKinds(vectors, scalars, metric).of(query_rows)),
    )
    assert set(kinds) == set(KINDS)
    assert {name for name in kinds if kinds[name].by} >= {"filter_50", "filter_20"}
    for name, queries in kinds.items():
        assert queries.recall(queries.searched(rows)).mean == pytest.approx(1.0, abs=0.005), name
        share, left_out = queries.admitted[0].total / 3000, len(queries.excluded[0])
        assert share == pytest.approx(
            SHARES.get(name, 0.5 if name == "elsewhere" else 1.0), rel=0.5
        ), name
        assert left_out == EXCLUSIONS.get(name, 0) + (name not in ("noisy", "far")), name
    for row, admitted in zip(query_rows, kinds["elsewhere"].admitted, strict=True):
        assert admitted.bits is not None
        admits = np.unpackbits(admitted.bits, bitorder="little", count=3000).astype(np.bool_)
        assert not admits[row], "the query's own region"


def test_float16_is_widened_to_the_very_same_numbers() -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)].reshape(-1, 4)
    assert widened(finite).tobytes() == finite.astype(np.float32).tobytes()
