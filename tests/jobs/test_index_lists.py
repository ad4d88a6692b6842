"""Vector indexes named by lists of segments: any list is searched through any base, as by comparing
with each of its rows; what is there is not built again; a folder that is lost or damaged is.

``RANDOM_SNAPSHOTS=5000 pytest --timeout=0 tests/jobs/test_index_lists.py`` makes 10⁴ snapshots.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.jobs.run import index_publisher
from precompute.jobs.run.index_publisher import MOST_CHANGED, IndexPublisher
from precompute.jobs.run.rows.merging import merged
from precompute.store.disk.record import replace
from precompute.store.errors import OtherFormatError, SnapshotError
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from precompute.store.offline.log import LiveRef
from precompute.store.offline.runs import Report
from precompute.store.offline.segment import Segment
from precompute.store.offline.snapshot import Counts, Snapshot
from precompute.store.vectors.indexed_parts import is_base
from precompute.store.vectors.vector_index import IndexLayer, VectorIndex
from tests.formats import make_other
from tests.jobs.test_segments import KEYS, PARTITIONS, SNAPSHOTS, Rows, World

VIEW = FeatureView(
    "made",
    ("id",),
    (Feature("x", "float64"), Feature("vector", "float32", 2)),
    ttl_s=1.0,
    stale_for_s=1.0,
    index=IndexSpec("vector", "l2"),
)


class Searched(World):
    """A world whose rows have vectors, some of them null, and the indexes of what is published of
    it."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.built: list[str] = []
        self.publisher = IndexPublisher(self.store, Report("run", "made", "run"), 64)

    @staticmethod
    def draft(
        run: str, counts: Counts, segments: tuple[Segment, ...], partition: str | None
    ) -> Snapshot:
        return Snapshot(
            VIEW, run, "model", counts, segments, None, "now", None, None, partition=partition
        )

    @staticmethod
    def table(rows: Mapping[int, tuple[int, float]]) -> pa.Table:
        table = World.table(rows)
        vectors = [vector_of(x) for _, x in rows.values()]
        column = pa.array(vectors, pa.list_(pa.float32(), 2))
        return table.add_column(2, pa.field("vector", column.type), column)

    def publish(self, snapshot: Snapshot, **options: Any) -> bool:
        """Whether something was built."""
        ref = self.store.log.live()
        before = self.folders()
        names, built = self.publisher.ready(snapshot, ref, **options)
        self.built = sorted(self.folders() - before)
        view_log, epoch = self.store.log, 0 if ref is None else ref.epoch
        ref = view_log.move_live(snapshot.number, expected_epoch=epoch, reason="run", indexes=names)
        assert not any(name.endswith(".tmp") for name in self.folders())
        self.publisher.drop_all_but({*ref.indexes, *ref.previous_indexes})
        assert {*ref.indexes} <= self.folders() <= {*ref.indexes, *ref.previous_indexes}
        return bool(built)

    def live(self) -> LiveRef:
        ref = self.store.log.live()
        assert ref is not None
        return ref

    def folders(self) -> set[str]:
        folder = self.store.indexes
        return {path.name for path in folder.iterdir()} if folder.is_dir() else set()

    def index(self) -> VectorIndex:
        return VectorIndex(*map(self.store.index_folder, self.live().indexes))

    def search(self, snapshot: Snapshot) -> None:
        """Compare a few searches, and each key, with the rows."""
        rows, index = self.rows[snapshot.number], self.index()
        vectors = {key: v for key, x in rows.items() if (v := vector_of(x)) is not None}
        assert len(index) == len(vectors)
        found = {key: index.find(str(key)) for key in range(KEYS)}
        there = {key: row.vector.tolist() for key, row in found.items() if row is not None}
        assert there == vectors
        for _ in range(2):
            query = np.array([self.random.uniform(0, self.clock * KEYS), 0.0], np.float32)
            near = sorted(vectors, key=lambda key: float(np.square(vectors[key] - query).sum()))
            assert [int(key) for key in index.search(query, 5).keys] == near[:5]


def vector_of(x: float) -> list[float] | None:
    return None if int(x) % 7 == 3 else [x, 1.0]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a view of many rows: a base may lack half of them."""
    monkeypatch.setattr(index_publisher, "MOST_CHANGED", 0.5)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("seed", range(2))
def test_any_list_is_searched_through_any_base(tmp_path: Path, seed: int) -> None:
    """Runs, removals, merges, and going back to any snapshot there ever was."""
    world, over = Searched(tmp_path, seed), 0
    for _ in range(SNAPSHOTS // 3):
        snapshot = world.run(None)
        numbers = [snapshot.number, world.random.choice(sorted(world.rows))]
        for number in numbers[: world.random.randint(1, 2)]:
            snapshot = world.store.snapshot(number)
            world.publish(snapshot)
            world.search(snapshot)
            over += len(world.live().indexes) - 1
    assert over > 5


@pytest.mark.usefixtures("few")
def test_all_partitions_are_searched_together(tmp_path: Path) -> None:
    world, over = Searched(tmp_path, 7), 0
    for _ in range(SNAPSHOTS // 6):
        world.run(world.random.choice(PARTITIONS))
        snapshot = world.assemble()
        assert snapshot is not None
        world.publish(snapshot)
        world.search(snapshot)
        over += len(world.live().indexes) - 1
    assert over > 2


@pytest.fixture
def world(tmp_path: Path) -> Searched:
    return Searched(tmp_path, 0)


def change(world: Searched, changed: Rows, stay: int | None = None) -> Snapshot:
    """A snapshot in which some rows of the last one are others, or of all rows; all segments but
    ``stay`` of them are merged."""
    last = world.last.get(None, [])
    parent = last[-1] if last else None
    world.clock += 1
    run = f"r{world.clock}"
    part = world.store.write_part(
        run, "part.parquet", world.table(dict(enumerate(changed.items())))
    )
    places = {} if parent is None else world.places(parent)
    lines = [(*places[key], False, key) for key in changed if key in places]
    kills = world.store.write_part(run, "kills.parquet", world.lines(lines)) if lines else None
    segment = Segment(0, run, "recipe", 7, (part,), kills=kills)
    rows = ({} if parent is None else world.rows[parent.number]) | changed
    counts = Counts(len(rows), len(changed), unchanged=len(rows) - len(changed))
    below = () if parent is None else parent.segments
    draft = world.draft(run, counts, (*below, segment), None)
    if stay is not None:
        draft = merged(world.store, draft, stay)
    return world.noted(world.store.commit(draft), rows, None)


MANY = {key: float(key) for key in range(KEYS)}


def test_what_changed_is_indexed_alone_until_it_is_more_than_a_tenth(world: Searched) -> None:
    first = change(world, MANY)
    world.publish(first)
    (base,) = world.built
    # of the same rows nothing is built
    assert (world.publish(first), world.built, world.live().indexes) == (False, [], (base,))
    second = change(world, {1: 100.0, 2: 200.0})
    world.publish(second)
    assert world.live().indexes == (base, *world.built)
    third = change(world, {3: 100.5, 5: 200.5})
    world.publish(third)
    assert (len(world.built), world.live().indexes[0]) == (1, base)
    world.search(third)
    assert 4 / KEYS == MOST_CHANGED
    fourth = change(world, {6: 100.25})
    world.publish(fourth)
    assert world.live().indexes == tuple(world.built) != (base,)
    world.search(fourth)
    # both bases are there: back with what lies over the one, on with the other one alone
    assert not world.publish(third)
    assert world.live().indexes[0] == base
    assert not world.publish(fourth)
    # and of what is in neither's place, the nearer one is taken
    world.publish(second)
    assert (len(world.built), world.live().indexes[0]) == (1, base)


def test_the_nearer_of_two_bases_is_taken(world: Searched) -> None:
    world.publish(change(world, MANY))
    (older,) = world.live().indexes
    second = change(world, dict.fromkeys(range(10), 0.0) | {n: n + 0.5 for n in range(10)})
    world.publish(second)
    (newer,) = world.live().indexes
    third = change(world, {11: 11.5})
    world.publish(third)
    assert world.live().indexes[0] == newer != older
    world.search(third)


def test_a_rollback_builds_no_base(world: Searched) -> None:
    first = change(world, MANY)
    world.publish(first)
    second = change(world, {1: 100.0})
    world.publish(second)
    third = change(world, {2: 100.5})
    world.publish(third)
    for snapshot, built in ((second, 0), (third, 0), (first, 0), (third, 0), (first, 0)):
        world.publish(snapshot)
        assert len(world.built) == built
        world.search(snapshot)
    world.publish(second)
    assert [is_base(name) for name in world.built] == [False]
    world.search(second)


def test_rows_that_live_again_are_found(world: Searched) -> None:
    """A base that was built after they were killed has them not."""
    first = change(world, MANY)
    second = change(world, {1: 100.0, 2: 200.0})
    world.publish(second)
    (base,) = world.live().indexes
    world.publish(first)
    assert world.live().indexes[0] == base
    world.search(first)


def test_rows_that_merging_copied_are_the_bases_own(world: Searched) -> None:
    change(world, MANY)
    second = change(world, {1: 100.0, 3: 200.0})
    world.publish(second)
    (base,) = world.live().indexes
    third = change(world, {5: 100.5}, stay=0)
    assert len(third.segments) == 1
    world.publish(third)
    # all of it lies in other files, and one row is another
    assert world.live().indexes == (base, *world.built)
    (changed,) = world.built
    assert len(IndexLayer(world.store.index_folder(changed)).rows) == 1
    world.search(third)
    # and back, from a base that has the copies
    shutil.rmtree(world.store.indexes)
    world.publish(third, again=True)
    (base,) = world.live().indexes
    world.publish(second)
    assert world.live().indexes == (base, *world.built)
    world.search(second)
    # the same rows in another file are the same
    fourth = world.noted(
        world.store.commit(
            merged(world.store, world.draft("r9", second.counts, second.segments, None), 0)
        ),
        world.rows[second.number],
        None,
    )
    world.publish(second, again=True)
    names = world.live().indexes
    assert (world.publish(fourth), world.live().indexes) == (False, names)
    world.search(fourth)


@pytest.mark.parametrize("which", [0, 1])
def test_a_lost_or_damaged_folder_is_built_again_under_its_name(
    world: Searched, which: int
) -> None:
    first = change(world, MANY)
    world.publish(first)
    snapshot = first if which == 0 else change(world, {1: 100.0})
    world.publish(snapshot)
    names = world.live().indexes
    folder = world.store.index_folder(names[which])
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert ("parts.arrow" in whole, "gone.arrow" in whole) == (which == 0, which == 1)
    for name, data in whole.items():
        middle = len(data) // 2
        path = folder / name
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 8]) + data[middle + 1 :])
        assert world.publish(snapshot, doubted=True), name
        assert (world.live().indexes, world.built) == (names, [])
        assert {path.name for path in folder.iterdir()} == whole.keys()
        world.search(snapshot)
        path.unlink()
        assert world.publish(snapshot)
    shutil.rmtree(folder)
    assert world.publish(snapshot)
    assert (world.live().indexes, world.built) == (names, [names[which]])
    world.search(snapshot)


def test_a_damaged_base_is_not_built_on(world: Searched) -> None:
    world.publish(change(world, MANY))
    (base,) = world.live().indexes
    for name in ("vectors.faiss", "parts.arrow"):
        snapshot = change(world, {1: 100.0 + world.clock})
        path = world.store.index_folder(world.live().indexes[0]) / name
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        world.publish(snapshot, doubted=True)
        assert base not in world.live().indexes
        (base,) = world.live().indexes
        world.search(snapshot)


def test_a_folder_of_another_format_stays_and_is_refused_in_words(world: Searched) -> None:
    first = change(world, MANY)
    world.publish(first)
    (base,) = world.live().indexes
    folder = world.store.index_folder(base)
    # of another version, which names it by its format
    later = folder.with_name(base[:-1] + "4")
    shutil.copytree(folder, later)
    make_other(later / "meta.json")
    second = change(world, {1: 100.0})
    names, _ = world.publisher.ready(second, world.store.log.live())
    world.publisher.drop_all_but(names)
    assert world.folders() == {*names, later.name}
    with pytest.raises(OtherFormatError, match="is of format 4"):
        VectorIndex(later)
    # and under the name of this one's it is neither believed nor replaced
    make_other(folder / "meta.json")
    whole = (folder / "meta.json").read_bytes()
    for ref in (world.store.log.live(), None):
        with pytest.raises(OtherFormatError, match="is of format 4"):
            world.publisher.ready(first, ref)
    assert (folder / "meta.json").read_bytes() == whole


def test_what_a_killed_build_left_goes(world: Searched) -> None:
    left = world.store.indexes / ".1-0123456789abcdef-base-3.17.tmp"
    left.mkdir(parents=True)
    (left / "exact.faiss").write_bytes(b"some")
    world.publish(change(world, MANY))
    assert world.folders() == {*world.live().indexes}


def test_a_damaged_part_is_found_before_it_is_read_and_marked(world: Searched) -> None:
    snapshot = change(world, MANY)
    path = world.store.part_paths(snapshot)[0]
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    with pytest.raises(SnapshotError, match="differs from its checksum"):
        world.publisher.ready(snapshot, None)
    assert list(world.store.log.bad()) == [snapshot.number]
    assert world.folders() == set()


def test_another_metric_model_or_promise_is_another_base(world: Searched) -> None:
    snapshot = change(world, MANY)
    world.publish(snapshot)
    assert VIEW.index is not None
    others = [
        replace(snapshot, model="another"),
        *(
            replace(snapshot, view=replace_index(index))
            for index in (IndexSpec("vector", "dot"), IndexSpec("vector", "l2", 0.9))
        ),
    ]
    names = {world.publisher.ready(other, None)[0] for other in others}
    assert len(names) == 3
    assert world.live().indexes not in names


def replace_index(index: IndexSpec) -> FeatureView:
    return FeatureView(VIEW.name, VIEW.entity, VIEW.features, 1.0, 1.0, index)
