"""Base and changed rows together find what an index of the whole would find, and cost what
changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from precompute.store.errors import VectorIndexError
from precompute.store.vectors import index_rows, vector_index
from precompute.store.vectors import vector_index as index_part
from precompute.store.vectors.index_build import build_changed, build_index
from precompute.store.vectors.index_choice import Limits
from precompute.store.vectors.index_files import METRICS
from precompute.store.vectors.vector_index import VectorIndex
from tests.vectors import Vectors, nearest, overlapping, rows_of, view_of

ROWS = 3000
NONE = np.empty(0, np.int64)
FILES = ["vectors.faiss", "rows.arrow", "hashes.arrow", "gone.arrow", "meta.json"]


class Story:
    """A base; then rows 0–49 changed, 50–59 lost their vectors, 60–79 left, and 40 came."""

    def __init__(self, folder: Path, metric: str, limits: Limits | None = None) -> None:
        self.folder, self.metric, self.view = folder, metric, view_of(32, metric, recall=0.9)
        first = overlapping(ROWS)
        self.changed = np.concatenate([overlapping(60, seed=5), overlapping(40, seed=6)])
        keys = [f"k{i}" for i in range(60)] + [f"new{i}" for i in range(40)]
        build_index(
            folder / "1",
            [rows_of([f"k{i}" for i in range(ROWS)], first)],
            self.view,
            model="m",
            limits=limits,
        )
        rows = rows_of(keys, self.changed, range(50, 60))
        self.figures = build_changed(
            folder / "2",
            folder / "1",
            [rows.slice(0, 30), rows.slice(30)],
            np.arange(80),
            self.view,
            model="m",
        )
        self.keys = [*keys[:50], *keys[60:], *(f"k{i}" for i in range(80, ROWS))]
        self.vectors = np.concatenate([self.changed[:50], self.changed[60:], first[80:]])

    def index(self) -> VectorIndex:
        return VectorIndex(self.folder / "1", self.folder / "2")

    def true(self, query: Vectors, k: int) -> list[str]:
        return [self.keys[row] for row in nearest(self.vectors, query, self.metric)[:k]]


@pytest.mark.parametrize("metric", METRICS)
def test_base_and_changed_rows_are_searched_as_the_index_of_the_whole(
    tmp_path: Path, metric: str
) -> None:
    story = Story(tmp_path, metric)
    index = story.index()
    assert len(index) == len(story.keys) == ROWS - 80 + 50 + 40
    for query in (*story.vectors[:20], *overlapping(20, seed=7)):
        found = index.search(query, 12)
        assert found.keys == story.true(query, 12)
        assert found.scores == sorted(found.scores, reverse=metric != "l2")
        excluded = story.true(query, 5)
        assert index.search(query, 7, exclude=excluded).keys == story.true(query, 12)[5:]
        only = story.true(query, 40)[::3]
        assert index.search(query, 100, only=[*only, "k55", "k65", "stranger"]).keys == only
    assert set(index.search(overlapping(1)[0], len(story.keys)).keys) == set(story.keys)


def test_no_mask_is_made_for_a_search_that_filters_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path, "l2")
    index, query = story.index(), overlapping(1, seed=7)[0]
    expected = story.true(query, 12)
    monkeypatch.setattr(vector_index, "FEW_ROWS", 100)
    monkeypatch.delattr(index_part.IndexLayer, "_filtered")
    for _ in range(2):
        assert index.search(query, 12).keys == expected
        assert index.search(query, 7, exclude=expected[:5]).keys == expected[5:]


def test_a_row_is_found_where_it_counts(tmp_path: Path) -> None:
    index = Story(tmp_path, "l2").index()
    changed, unchanged = index.find("k3"), index.find("k99")
    assert changed is not None
    assert unchanged is not None
    np.testing.assert_allclose(changed.vector, overlapping(60, seed=5)[3])
    np.testing.assert_allclose(unchanged.vector, overlapping(ROWS)[99])
    # of the changed rows, and of the base
    assert (changed.computed_at_us, unchanged.computed_at_us) == (3, 99)
    assert [index.find(key) for key in ("k55", "k65", "never there")] == [None, None, None]
    found = index.search(changed.vector, 2)
    assert (found.keys[0], found.computed_at_us[0]) == ("k3", 3)


def test_over_a_base_with_codes_as_much_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_index, "STREAMED", 0.5)
    monkeypatch.setattr(vector_index, "FEW_ROWS", 10)
    story = Story(tmp_path, "cosine", Limits(small_rows=1000, small_numbers=0))
    index = story.index()
    assert (index.figures.kind, story.figures.kind) == ("codes", "exact")
    shares = [
        len(set(story.true(query, 10)) & set(index.search(query, 10).keys)) / 10
        for query in overlapping(100, seed=8)
    ]
    assert np.mean(shares) >= 0.88
    gone = {f"k{i}" for i in range(50, 80)}
    for number in (*range(50), *range(60, 80)):
        found = index.search(overlapping(ROWS)[number], 20)
        assert not gone & set(found.keys)
        assert len(set(found.keys)) == 20


def test_numbers_too_large_for_the_bases_float16_are_float32(tmp_path: Path) -> None:
    view, large = view_of(4, "l2", recall=0.9), np.full((1, 4), 1e6, np.float32)
    rows = rows_of([f"k{i}" for i in range(ROWS)], overlapping(ROWS, 4))
    limits = Limits(small_rows=1000, small_numbers=0)
    build_index(tmp_path / "1", [rows], view, model="m", limits=limits)
    build_changed(tmp_path / "2", tmp_path / "1", [rows_of(["far"], large)], NONE, view, model="m")
    index = VectorIndex(tmp_path / "1", tmp_path / "2")
    assert index.dtype == "float16"
    found = index.find("far")
    assert found is not None
    assert found.vector.tolist() == [1e6] * 4
    assert index.search(large[0], 1).scores == [0.0]


def test_keys_of_one_hash_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_rows, "hash_of", lambda _: 7)
    monkeypatch.setattr(index_rows, "hashes_of", lambda keys: np.full(len(keys), 7, np.uint64))
    view, vectors = view_of(4, "l2"), overlapping(10, 4)
    build_index(tmp_path / "1", [rows_of([*"abcdefghij"], vectors)], view, model="m")
    changed = [rows_of(["c", "new"], vectors[:2] + 9)]
    build_changed(tmp_path / "2", tmp_path / "1", changed, np.array([2, 4]), view, model="m")
    index = VectorIndex(tmp_path / "1", tmp_path / "2")
    assert sorted(index.search(vectors[0], 20).keys) == [*"abcdfghij", "new"]
    for key, vector in (("b", vectors[1]), ("c", vectors[0] + 9), ("new", vectors[1] + 9)):
        found = index.find(key)
        assert found is not None
        np.testing.assert_allclose(found.vector, vector)
    assert index.find("e") is None


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    Story(tmp_path, "l2")
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).iterdir()) for name in ("1", "2")
    ]
    assert sizes[1] < sizes[0] * 0.06
    assert sorted(path.name for path in (tmp_path / "2").iterdir()) == sorted(FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_changed_rows_of_nothing_but_removals_and_of_nothing(tmp_path: Path) -> None:
    story = Story(tmp_path, "l2")
    for gone, left in ((np.array([7, 7]), ROWS - 1), (NONE, ROWS)):
        build_changed(tmp_path / "3", tmp_path / "1", [], gone, story.view, model="m")
        index = VectorIndex(tmp_path / "1", tmp_path / "3")
        assert len(index) == left
        assert len(set(index.search(overlapping(1)[0], ROWS).keys)) == left
    build_changed(tmp_path / "3", tmp_path / "1", [], np.arange(ROWS), story.view, model="m")
    nothing = VectorIndex(tmp_path / "1", tmp_path / "3")
    assert (len(nothing), nothing.search(overlapping(1)[0], 5).keys) == (0, [])


def test_changed_rows_lie_over_their_own_base_and_no_other(tmp_path: Path) -> None:
    story = Story(tmp_path, "l2")
    with pytest.raises(VectorIndexError, match="is of changed rows, and nothing by itself"):
        VectorIndex(tmp_path / "2")
    rows = [rows_of(["a"], overlapping(1))]
    build_index(tmp_path / "4", rows, story.view, model="m")
    for base, changed in (("4", "2"), ("1", "4")):
        with pytest.raises(VectorIndexError, match="another base"):
            VectorIndex(tmp_path / base, tmp_path / changed)
    # of a name that was given to less than it has
    build_index(tmp_path / "1", rows, story.view, model="m")
    with pytest.raises(VectorIndexError, match="name rows that its base has not"):
        story.index()


@pytest.mark.parametrize(
    ("model", "metric", "dim"), [("another", "l2", 32), ("m", "dot", 32), ("m", "l2", 16)]
)
def test_no_changed_rows_are_built_in_another_space(
    tmp_path: Path, model: str, metric: str, dim: int
) -> None:
    Story(tmp_path, "l2")
    rows = [rows_of(["a"], overlapping(1, dim))]
    with pytest.raises(VectorIndexError, match=r"--reload|numbers a vector"):
        build_changed(tmp_path / "3", tmp_path / "1", rows, NONE, view_of(dim, metric), model=model)
    with pytest.raises(VectorIndexError, match="--reload"):
        build_changed(tmp_path / "3", tmp_path / "2", rows, NONE, view_of(dim, metric), model=model)
    with pytest.raises(VectorIndexError, match="--reload"):
        build_changed(
            tmp_path / "3", tmp_path / "nowhere", rows, NONE, view_of(dim, metric), model=model
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("name", FILES)
def test_damaged_changed_rows_are_refused(tmp_path: Path, name: str) -> None:
    story = Story(tmp_path, "l2")
    path = tmp_path / "2" / name
    whole = path.read_bytes()
    middle = len(whole) // 2
    for damaged in (
        b"",
        whole[:-1],
        whole + b"x",
        whole[:middle] + bytes([whole[middle] ^ 0x10]) + whole[middle + 1 :],
    ):
        path.write_bytes(damaged)
        with pytest.raises(VectorIndexError, match="--reload"):
            story.index()
    path.unlink()
    with pytest.raises(VectorIndexError, match="--reload"):
        story.index()


def test_the_same_base_is_opened_once(tmp_path: Path) -> None:
    story = Story(tmp_path, "l2")
    first = VectorIndex(tmp_path / "1")
    second = VectorIndex(tmp_path / "1", tmp_path / "2", opened=first)
    assert second.base is first.base
    # what the changed rows take away is there for a reader of the base alone
    assert (len(first), len(second)) == (ROWS, len(story.keys))
    assert first.search(overlapping(ROWS)[65], 1).keys == ["k65"]
    build_index(tmp_path / "1", [rows_of(["a"], overlapping(1))], story.view, model="m")
    assert VectorIndex(tmp_path / "1", opened=second).base is not first.base
