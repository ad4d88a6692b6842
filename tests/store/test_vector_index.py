"""The index finds what comparing with every row finds, or as much of it as it promises, and a
damaged one is refused before it answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pytest

from precompute.store.errors import RequestError, SnapshotError, VectorIndexError
from precompute.store.vectors import index_files
from precompute.store.vectors.index_build import build_changed, build_index
from precompute.store.vectors.index_files import HASHES, ROWS, VECTORS, index_figures
from precompute.store.vectors.indexed_parts import IndexedList, IndexedPart
from precompute.store.vectors.vector_index import Neighbours, VectorIndex, is_there
from tests.vectors import Vectors, overlapping, rows_of, view_of

DIM = 8


def build(
    folder: Path, keys: list[str], vectors: Vectors, metric: str, batch: int = 30
) -> VectorIndex:
    def rows() -> Iterator[pa.RecordBatch]:
        whole = rows_of(keys, vectors)
        for start in range(0, len(keys), batch):
            yield whole.slice(start, batch)

    build_index(folder, rows(), view_of(vectors.shape[1], metric), model="m")
    return VectorIndex(folder)


def brute_force(
    keys: list[str], vectors: Vectors, query: Vectors, metric: str
) -> list[tuple[str, float]]:
    """(key, score) of every row, best first, in double precision."""
    rows, point = vectors.astype(np.float64), np.asarray(query, np.float64)
    scores = ((rows - point) ** 2).sum(axis=1) if metric == "l2" else rows @ point
    if metric == "cosine":
        scores = scores / np.linalg.norm(rows, axis=1) / np.linalg.norm(point)
    order = np.argsort(scores if metric == "l2" else -scores, kind="stable")
    return [(keys[i], float(scores[i])) for i in order]


def overwrite(path: Path, at: int, data: bytes) -> None:
    """In place: it is mapped."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def check(found: Neighbours, expected: list[tuple[str, float]]) -> None:
    keys, scores, _ = found
    assert keys == [key for key, _ in expected]
    np.testing.assert_allclose(scores, [score for _, score in expected], rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def data() -> tuple[list[str], Vectors]:
    keys = [f"key {i} é" for i in range(100)]
    return keys, np.random.default_rng(7).normal(size=(100, DIM)).astype(np.float32)


@pytest.mark.parametrize(
    ("metric", "dtype"), [("cosine", np.float16), ("dot", np.float32), ("l2", np.float64)]
)
def test_the_neighbours_are_those_of_comparing_with_every_row(
    tmp_path: Path, data: tuple[list[str], Vectors], metric: str, dtype: Any
) -> None:
    keys, vectors = data[0], data[1].astype(dtype)
    index = build(tmp_path / "index", keys, vectors, metric)
    assert (len(index), index.dim, index.metric) == (100, DIM, metric)
    for query in np.random.default_rng(8).normal(size=(20, DIM)):
        expected = brute_force(keys, vectors, query, metric)
        check(index.search(query, 10), expected[:10])
        check(index.search(query.tolist(), 1), expected[:1])
        check(index.search(query, 100), expected)
        check(index.search(query, 101), expected)
        check(index.search(query, 100_000), expected)
        left_out = frozenset([expected[0][0], expected[3][0], expected[99][0], "a stranger"])
        left = [pair for pair in expected if pair[0] not in left_out]
        check(index.search(query, 10, exclude=left_out), left[:10])
        check(index.search(query, 500, exclude=left_out), left)
        assert index.search(query, 5, exclude=frozenset(keys)) == ([], [], [])


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_cosine_does_not_depend_on_length_however_small_or_large(
    tmp_path: Path, data: tuple[list[str], Vectors], scale: float
) -> None:
    keys, vectors = data[0], (data[1].astype(np.float64) * scale).astype(np.float32)
    plain, scaled = (
        build(tmp_path / "plain", *data, "cosine"),
        build(tmp_path / "scaled", keys, vectors, "cosine"),
    )
    query = np.random.default_rng(9).normal(size=DIM)
    expected = brute_force(*data, query, "cosine")[:10]
    check(scaled.search(query, 10), expected)
    check(plain.search(query * scale, 10), expected)


def test_zeros_have_no_direction_for_cosine(tmp_path: Path) -> None:
    """As a row they are as far from everything; as a query they are refused, and only there."""
    vectors = np.array([[0, 0], [1, 0]], np.float32)
    index = build(tmp_path / "index", ["zero", "one"], vectors, "cosine")
    assert index.search([1, 0], 2) == (["one", "zero"], [1.0, 0.0], [1, 0])
    with pytest.raises(RequestError) as refused:
        index.search([0, 0], 2)
    assert refused.value.code == "bad_vector"
    for metric in ("dot", "l2"):
        assert build(tmp_path / metric, ["zero", "one"], vectors, metric).search([0, 0], 1)[1] == [
            0.0
        ]


def test_rows_without_a_vector_are_left_out_and_do_not_move_the_others(tmp_path: Path) -> None:
    vectors = np.arange(10, dtype=np.float32).reshape(5, 2)
    rows = [rows_of(list("abcde"), vectors, [0, 3]), rows_of(["f"], vectors[:1], [0])]
    build_index(tmp_path / "index", rows, view_of(2, "l2"), model="m")
    index = VectorIndex(tmp_path / "index")
    assert len(index) == 3
    for key, vector, at in (("b", vectors[1], 1), ("c", vectors[2], 2), ("e", vectors[4], 4)):
        assert index.search(vector, 1) == ([key], [0.0], [at])
    assert (index.find("a"), index.find("f"), index.find("x")) == (None, None, None)
    assert sorted(index.search([0, 0], 10)[0]) == ["b", "c", "e"]


@pytest.mark.parametrize(
    ("metric", "rows"),
    [("cosine", []), ("l2", [rows_of(["a"], np.ones((1, 2), np.float32), [0])])],
    ids=["no rows", "nulls"],
)
def test_an_empty_index_finds_nothing(
    tmp_path: Path, metric: str, rows: list[tuple[pa.Array, pa.Array]]
) -> None:
    build_index(tmp_path / "index", rows, view_of(2, metric), model="m")
    index = VectorIndex(tmp_path / "index")
    assert len(index) == 0
    nothing = Neighbours([], [], [])
    assert index.search([1, 2], 10) == nothing
    assert index.search([1, 2], 10, exclude=["a"]) == nothing
    assert index.search([1, 2], 10, only=["a"]) == nothing
    build_changed(
        tmp_path / "over",
        tmp_path / "index",
        [rows_of(["b"], np.ones((1, 2), np.float32))],
        np.empty(0, np.int64),
        view_of(2, metric),
        model="m",
    )
    assert VectorIndex(tmp_path / "index", tmp_path / "over").search([1, 1], 10).keys == ["b"]


def test_a_vector_of_another_length_or_not_finite_or_none_is_refused(
    tmp_path: Path, data: tuple[list[str], Vectors]
) -> None:
    index = build(tmp_path / "index", *data, "cosine")
    wrong: list[Any] = [[], [1.0] * 7, [1.0] * 9, [[1.0] * 8] * 2, 1.0, [1.0] * 7 + [np.inf]]
    wrong += [[np.nan] + [1.0] * 7, [1e300] * 8, ["a"] * 8, [[1.0], [1.0, 2.0]], "abcdefgh", {}]
    for vector in wrong:
        with pytest.raises(RequestError) as refused:
            index.search(vector, 3)
        assert refused.value.code == "bad_vector"


# ---- files


FILES = ["vectors.faiss", "rows.arrow", "hashes.arrow", "parts.arrow", "meta.json"]


def small(folder: Path, metric: str = "cosine") -> VectorIndex:
    return build(folder, ["a", "b", "c"], np.array([[1, 2], [3, 1], [-5, 9]], np.float32), metric)


def test_an_index_that_is_built_again_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "index"
    old = small(folder)
    (folder / "stray").write_text("x")
    new = build(folder, ["z"], np.ones((1, 2), np.float32), "l2")
    assert new.search([1, 1], 5) == (["z"], [0.0], [0])
    assert old.search([1, 2], 1).keys == ["a"]  # a reader that has the old one open goes on with it
    assert sorted(p.name for p in folder.iterdir()) == [
        "hashes.arrow",
        "meta.json",
        "parts.arrow",
        "rows.arrow",
        "vectors.faiss",
    ]
    assert json.loads((folder / "meta.json").read_text())["index"]["figures"]["recall_at_10"] == 1.0
    assert [p.name for p in folder.parent.iterdir()] == ["index"]


def test_an_index_that_fails_on_the_way_leaves_the_one_that_is_there(tmp_path: Path) -> None:
    small(tmp_path / "index")

    def rows() -> Iterator[pa.RecordBatch]:
        yield rows_of(["x"], np.ones((1, 2), np.float32))
        raise KeyError("source")

    with pytest.raises(KeyError):
        build_index(tmp_path / "index", rows(), view_of(2, "cosine"), model="m")
    assert [p.name for p in tmp_path.iterdir()] == ["index"]
    assert VectorIndex(tmp_path / "index").search([1, 2], 1)[0] == ["a"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_cut_file_is_refused_at_every_length(tmp_path: Path, name: str) -> None:
    small(tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    for damaged in [*(whole[:n] for n in range(len(whole))), whole + b"x"]:
        path.write_bytes(damaged)
        with pytest.raises(VectorIndexError, match="--reload"):
            VectorIndex(tmp_path)
        assert not is_there(tmp_path)
    path.unlink()
    assert not is_there(tmp_path)
    assert index_figures(tmp_path) is None
    with pytest.raises(VectorIndexError, match="--reload"):
        VectorIndex(tmp_path)


@pytest.mark.parametrize("name", [name for name in FILES if name != "parts.arrow"])
def test_a_flipped_byte_is_refused_or_changes_no_answer(tmp_path: Path, name: str) -> None:
    index = small(tmp_path)
    expected, figures = index.search([2.0, 7.0], 3), index.figures
    path = tmp_path / name
    whole = path.read_bytes()
    for at in range(len(whole)):
        for flip in (0x01, 0x20, 0x80):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            try:
                index = VectorIndex(tmp_path)
            except VectorIndexError:
                continue
            # JSON has more than one way to write the same
            assert name == "meta.json", f"byte {at} flipped and not noticed"
            assert (index.search([2.0, 7.0], 3), index.metric, index.figures) == (
                expected,
                "cosine",
                figures,
            )


@pytest.mark.parametrize("meta", ["[]", "{}", '{"xxh3": 7, "index": null}', "[" * 100_000])
def test_a_meta_file_that_vouches_for_nothing_is_refused(tmp_path: Path, meta: str) -> None:
    small(tmp_path)
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(VectorIndexError, match=r"--reload"):
        VectorIndex(tmp_path)


class _NoRoom:
    """A GPU whose memory is full from the second search on."""

    def __init__(self, index: Any, searches: int = 1) -> None:
        self.index, self.left = index, searches

    def search(self, queries: Any, k: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("CUDA error 2: out of memory")
        return self.index.search(queries, k)


def no_room(*_: Any) -> Any:
    raise RuntimeError("CUDA error 2: out of memory")


def test_a_gpu_without_room_costs_time_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vectors = overlapping(2000)
    flat = faiss.IndexFlatL2(vectors.shape[1])
    flat.add(vectors)
    nearest_rows = flat.search(vectors[:3], 4)[1].tolist()
    monkeypatch.setattr(index_files, "gpus", lambda: 1)
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", no_room, raising=False)
    assert index_files.on_gpu(flat) is flat
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", lambda _, __, index: _NoRoom(index))
    searched = index_files.on_gpu(flat)
    for _ in range(3):
        assert searched.search(vectors[:3], 4)[1].tolist() == nearest_rows
    assert [record.message.partition(" the CPU")[0] for record in caplog.records] == [
        "the vector index is searched on"
    ] * 2


def test_a_gpu_compares_while_an_index_is_built_as_long_as_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vectors = overlapping(2000)
    vectors = np.concatenate([vectors] * 70)[: 2 * 65536 + 10]
    expected = index_files.nearest_of_some(vectors, None, vectors[:3], 7, l2=True)
    calls = []

    def knn_gpu(resources: Any, queries: Any, vectors: Any, k: int, metric: int) -> Any:
        assert resources is not None
        calls.append((len(vectors), k, metric))
        if len(calls) == 5:
            no_room()
        return faiss.knn(queries, vectors, k, metric=metric)

    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "knn_gpu", knn_gpu, raising=False)

    def found(k: int = 7) -> Any:
        return index_files.nearest_of_some(vectors, None, vectors[:3], k, l2=True)

    assert (found() == expected).all()
    assert calls == []
    monkeypatch.setattr(index_files, "gpus", lambda: 1)
    assert (found() == expected).all()
    l2 = faiss.METRIC_L2
    assert calls == [(65536, 7, l2), (65536, 7, l2), (10, 7, l2)]
    # its memory is full in the middle
    assert (found() == expected).all()
    assert calls[3:] == [(65536, 7, l2)] * 2
    assert [record.message for record in caplog.records] == [
        "a vector index is built on the CPU: CUDA error 2: out of memory"
    ]
    # it finds no more at once
    found(2049)
    assert len(calls) == 5


LISTED = IndexedList("space", (), [IndexedPart("data/r/part.parquet", "ab", 3)])


def test_files_of_two_indexes_do_not_mix(tmp_path: Path) -> None:
    small(tmp_path / "one")
    rows, listed = rows_of(["x", "y", "z"], np.ones((3, 2), np.float32)), LISTED
    build_index(tmp_path / "two", [rows], view_of(2, "cosine"), model="m", listed=listed)
    for name in FILES[:-1]:
        own = (tmp_path / "one" / name).read_bytes()
        (tmp_path / "one" / name).write_bytes((tmp_path / "two" / name).read_bytes())
        with pytest.raises(
            VectorIndexError, match=f"{name} (differs from its checksum|has another size)"
        ):
            VectorIndex(tmp_path / "one")
        (tmp_path / "one" / name).write_bytes(own)
    # nor does another segment's, whole as it is, answer in its place
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    with pytest.raises(VectorIndexError, match=r"it is the index .*/two"):
        VectorIndex(tmp_path / "three")


FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np, pyarrow as pa
from precompute.store.errors import SnapshotError
from precompute.store.vectors.index_build import build_index
folder = Path(sys.argv[1])
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
view = FeatureView("v", ("id",), (Feature("vector", "float32", 2),), 1, 1, IndexSpec("vector"))
vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(6000, np.float32)), 2)
rows = [pa.record_batch({"id": ["k%d" % i for i in range(3000)], "vector": vectors, "computed_at": [0] * 3000})]
for size in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        build_index(folder, rows, view, model="m")
        print("built")
    except SnapshotError as exc:
        print(exc)
"""


def test_a_full_disk_is_an_error_and_leaves_the_index_that_is_there(tmp_path: Path) -> None:
    small(tmp_path / "index")
    sizes = ["0", "10", "20000", "26000", "40000"]
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "index"), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.splitlines()
    assert len(outcomes) == len(sizes)
    for outcome in outcomes:
        assert "index" in outcome
        assert "the live snapshot is untouched" in outcome
    assert [p.name for p in tmp_path.iterdir()] == ["index"]
    assert VectorIndex(tmp_path / "index").search([1, 2], 1)[0] == ["a"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SnapshotError, match="cannot write"):
        build_index(tmp_path / "file" / "index", [], view_of(2, "l2"), model="m")
    with pytest.raises(VectorIndexError):
        VectorIndex(tmp_path / "file" / "index")


@pytest.mark.parametrize("name", [ROWS, HASHES, VECTORS])
def test_a_bit_that_changes_under_an_open_index_gives_no_wrong_row(
    tmp_path: Path, data: tuple[list[str], Vectors], name: str
) -> None:
    """The files are mapped: a row number, an offset, a text or a vector that is another now is
    damage, and never another entity's or place's."""
    keys, vectors = data
    index = build(tmp_path / "index", keys, vectors, "l2")
    path, rng = tmp_path / "index" / name, np.random.default_rng(3)
    whole = path.read_bytes()
    refused, times = 0, dict(zip(*index.search(vectors[0], len(keys))[::2], strict=True))
    for bit in rng.integers(0, 8 * len(whole), 1_000).tolist():
        overwrite(path, bit // 8, bytes([whole[bit // 8] ^ 1 << bit % 8]))
        row = int(rng.integers(100))
        try:
            found = index.find(keys[row])
            assert found is None or (found.vector.tolist(), found.computed_at_us) == (
                vectors[row].tolist(),
                times[keys[row]],
            )
            near = index.search(vectors[row], 100)
            true = brute_force(keys, vectors, vectors[row], "l2")
            # a vector that is near nothing any more is left out: only its file's checksum tells
            there = set(near.keys) if name == VECTORS else set(keys)
            check(near, [(key, score) for key, score in true if key in there])
            assert near.computed_at_us == [times[key] for key in near.keys]
        except VectorIndexError:
            refused += 1
        overwrite(path, bit // 8, whole[bit // 8 : bit // 8 + 1])
    assert refused > 50
