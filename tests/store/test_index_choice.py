"""What is chosen keeps its promise on rows that nothing was chosen by; where nothing does, the index is exact and says so."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from store.vectors import index_choice
from store.vectors.faiss_index import cores, nearest_of_all, on_gpu, search_codes, search_flat, threads, trained_codes
from store.vectors.index_build import build_index
from store.vectors.index_choice import Limits, candidates
from store.vectors.index_record import METRICS, Codes, IndexFigures
from store.vectors.recall import Queries, lower_bound
from store.vectors.vector_index import VectorIndex
from tests.vectors import Vectors, nearest, overlapping, rows_of, view_of

ROWS = 6000
SMALL = Limits(small_rows=1000)


def built(folder: Path, vectors: Vectors, metric: str = "cosine", recall: float = 0.95, limits: Limits = SMALL) -> VectorIndex:
    keys = [f"k{i}" for i in range(len(vectors))]
    build_index(folder, [rows_of(keys, vectors)], view_of(vectors.shape[1], metric, recall=recall), model="m", limits=limits)
    return VectorIndex(folder)


def recall_of(index: VectorIndex, vectors: Vectors, metric: str, queries: Vectors) -> float:
    shares = []
    for query in queries:
        true = {f"k{i}" for i in nearest(vectors, query, metric)[:10]}
        shares.append(len(true & set(index.search(query, 10).keys)) / 10)
    return float(np.mean(shares))


@pytest.fixture
def take_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are taken where they keep the promise, whatever a crowded machine says of their time."""
    monkeypatch.setattr(index_choice, "_WORTH", 1e9)


@pytest.mark.usefixtures("take_codes")
@pytest.mark.parametrize("metric", METRICS)
def test_codes_keep_their_promise_on_clusters_that_overlap(tmp_path: Path, metric: str) -> None:
    vectors = overlapping(ROWS)
    index = built(tmp_path / "index", vectors, metric)
    figures = index.figures
    assert figures.kind == "codes"
    assert figures.recall_at_10 >= figures.recall_bound >= figures.promised == 0.95
    assert figures.queries > 500
    # of other queries than any row
    assert recall_of(index, vectors, metric, overlapping(100, seed=1)) >= 0.93
    assert figures.size_bytes < vectors.nbytes


@pytest.mark.usefixtures("take_codes")
def test_rows_dealt_into_lists_keep_it_too_and_a_filter_reaches_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_choice, "candidates", lambda rows, dim, limits: [Codes(32, dim // 4)])
    monkeypatch.setattr("store.vectors.index_part.FEW_ROWS", 10)
    vectors = overlapping(ROWS, noise=0.5)
    index = built(tmp_path / "index", vectors, "l2")
    assert (index.figures.kind, index.figures.lists) == ("codes", 32)
    assert recall_of(index, vectors, "l2", overlapping(100, noise=0.5, seed=1)) >= 0.93
    # every row of one corner is left out: those that remain lie in other lists than the ones probed first
    order = nearest(vectors, vectors[7], "l2")
    near, rest = order[:5900], order[5900:]
    probed = []

    def spied(both: Any, codes: Codes, *wanted: Any) -> Any:
        probed.append(codes.probed)
        return search_codes(both, codes, *wanted)

    monkeypatch.setattr("store.vectors.index_part.search_codes", spied)
    found = index.search(vectors[7], 20, exclude=[f"k{i}" for i in near])
    # 1 row of 60 is admitted
    assert probed[0] == min(32, 60 * index.figures.probed)
    assert {int(key[1:]) for key in found.keys} <= set(rest)
    assert len(found.keys) == 20
    assert len(index.search(vectors[7], ROWS).keys) == ROWS


@pytest.mark.parametrize(
    ("vectors", "recall", "limits", "kind", "why"),
    [
        (overlapping(900), 0.95, SMALL, "exact", "900 rows: comparing with all of them costs less"),
        (overlapping(2000), 1.0, SMALL, "exact", "a promise above 0.9947 is kept by comparing with every row"),
        (overlapping(2000), 0.999, SMALL, "exact", "a promise above"),
        (overlapping(2000) + 30_000, 0.95, SMALL, "exact", "float16 loses neighbours"),
        (overlapping(2000) * 1e6, 0.95, SMALL, "exact", "numbers that float16 cannot"),
        (overlapping(2000), 0.95, Limits(small_rows=1000, build_s=-1.0), "float16", "float16: "),
        (overlapping(2000), 0.95, Limits(small_rows=1000, memory_mb=0), "float16", "float16: "),
    ],
    ids=["few rows", "all", "more than can be shown", "far from zero", "too large", "no time", "no memory"],
)
def test_what_cannot_be_kept_by_less_is_kept_by_comparing_with_every_row(
    tmp_path: Path, vectors: Vectors, recall: float, limits: Limits, kind: str, why: str
) -> None:
    index = built(tmp_path / "index", vectors, "l2", recall, limits)
    assert index.figures.kind == kind
    assert why in index.figures.why
    assert (index.dtype == "float32") == (kind == "exact")
    queries = vectors[:20]
    assert recall_of(index, vectors, "l2", queries) >= (1.0 if kind == "exact" else 0.99)


@pytest.mark.usefixtures("take_codes")
def test_codes_that_held_out_rows_refuse_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queries to tune by are all in one place, where anything does; those held out are not."""
    monkeypatch.setattr(index_choice, "_RESCORED", (10,))
    monkeypatch.setattr(index_choice.Chooser, "_is_good", lambda self, recall: True)
    index = built(tmp_path / "index", overlapping(ROWS, noise=5.0), "cosine")
    assert index.figures.kind == "float16"
    first, second, third = index.figures.why.split("; ")
    assert first.startswith("codes: 0.")
    assert second.startswith("codes: 0.")
    assert third.startswith("float16: ")


def test_where_nothing_keeps_it_the_index_is_exact_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_choice, "lower_bound", lambda recall, queries: 0.9 if queries < 1024 else 1.0)
    monkeypatch.setattr(index_choice.Chooser, "_is_good", lambda self, recall: True)
    index = built(tmp_path / "index", overlapping(2000), "cosine")
    assert (index.figures.kind, index.dtype, index.figures.recall_bound) == ("exact", "float32", 1.0)
    assert index.figures.why.startswith("no candidate kept the promise (")
    assert index.figures.exact_us is not None


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 12])
@pytest.mark.usefixtures("take_codes")
def test_any_dimension_has_an_index(tmp_path: Path, dim: int) -> None:
    vectors = overlapping(1500, dim)
    index = built(tmp_path / "index", vectors, "l2", 0.9)
    assert recall_of(index, vectors, "l2", overlapping(30, dim, seed=1)) >= 0.85


@pytest.mark.usefixtures("take_codes")
def test_rows_all_alike_are_all_right_answers(tmp_path: Path) -> None:
    index = built(tmp_path / "index", np.repeat(overlapping(4), 500, axis=0))
    assert index.figures.recall_at_10 == 1.0
    assert len(set(index.search(overlapping(1)[0], 50).keys)) == 50


def test_candidates_grow_with_the_rows_and_fit_in_memory() -> None:
    limits = Limits(memory_mb=60)
    assert candidates(100_000, 384, limits) == [Codes(1, 96), Codes(1, 192)]
    assert candidates(1_000_000, 384, limits) == [Codes(1, 96), Codes(2048, 96)]
    assert candidates(10_000_000, 384, limits) == []
    assert candidates(100_000, 7, limits) == [Codes(1, 7)]
    assert candidates(100_000, 10, limits) == [Codes(1, 5)]


def test_the_same_rows_give_the_same_codes() -> None:
    vectors = overlapping(3000)
    codes = [trained_codes(vectors, np.arange(100), Codes(4, 8), l2=False) for _ in range(2)]
    first, second = (faiss.serialize_index(coded).tobytes() for coded in codes)
    assert first == second


def test_nothing_is_learnt_from_rows_that_are_held_out() -> None:
    vectors, held_out = overlapping(3000), np.arange(0, 1000, 2)
    changed = vectors.copy()
    changed[held_out] *= 50
    learnt = []
    for rows in (vectors, changed):
        coded = trained_codes(rows, held_out, Codes(4, 8), l2=True)
        learnt.append((faiss.vector_to_array(coded.pq.centroids).tolist(), coded.quantizer.reconstruct_n(0, 4).tolist()))
    assert learnt[0] == learnt[1]


def test_a_search_goes_further_the_more_it_is_asked_for_and_never_without_end() -> None:
    codes = Codes(1, 96, rescored=80)
    assert [codes.to_rescore(k) for k in (1, 10, 11, 101, 1000)] == [80, 80, 80, 800, 7992]
    assert codes._replace(rescored=2560).to_rescore(1000) == 16_384
    assert codes.to_rescore(50_000) == 50_000


def test_threads_are_as_many_as_before_whatever_happens() -> None:
    before = cores()
    with contextlib.suppress(KeyError), threads(1):
        assert cores() == 1
        raise KeyError
    assert cores() == before


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


@pytest.mark.parametrize("share", [0.5, 0.9, 0.97])
def test_the_bound_holds_though_a_querys_neighbours_are_found_or_lost_together(share: float) -> None:
    """In 2,000 trials of 300 queries each, all ten neighbours of which are found or none, it is too high in 1 % and not in 10."""
    rng = np.random.default_rng(0)
    means = rng.binomial(300, share, 2000) / 300
    wrong = np.mean([lower_bound(float(mean), 300) > share for mean in means])
    assert wrong <= 0.02


@pytest.mark.parametrize("l2", [False, True])
def test_a_query_is_not_answered_by_itself_and_equal_rows_are_equally_right(l2: bool) -> None:
    vectors = np.concatenate([overlapping(100), overlapping(100)])
    flat = faiss.IndexFlatL2(32) if l2 else faiss.IndexFlatIP(32)
    flat.add(vectors)
    queries = Queries(vectors, np.array([3, 103, 50]), flat, l2=l2)
    _, found = nearest_of_all(flat, queries.asked, 11)
    assert queries.recall(list(found)).mean == 1.0
    twins = [np.where(rows < 100, rows + 100, rows - 100) for rows in found]
    twin_of_itself = queries.recall(twins).mean
    assert twin_of_itself == 1.0
    assert queries.recall([rows[:6] for rows in found]).mean == pytest.approx(0.5, abs=0.07)
    assert queries.recall([np.full(11, queries.rows[n]) for n in range(3)]).mean == 0.0
    assert queries.recall([np.full(11, -1) for _ in range(3)]).mean == 0.0


def test_without_a_gpu_an_index_stays_where_it_is() -> None:
    flat = faiss.IndexFlatIP(4)
    flat.add(np.eye(4, dtype=np.float32))
    if faiss.get_num_gpus() == 0:
        assert on_gpu(flat) is flat
    scores, rows = search_flat(on_gpu(flat), np.array([0, 0, 1, 0], np.float32), 1)
    assert (scores.tolist(), rows.tolist()) == ([1.0], [2])


def test_figures_of_an_older_record_are_read(tmp_path: Path) -> None:
    assert IndexFigures().codes is None
    figures: Any = IndexFigures(lists=1, probed=1, quantizers=8, rescored=40)
    assert figures.codes == Codes(1, 8, 1, 40)
