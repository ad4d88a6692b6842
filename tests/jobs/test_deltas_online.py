"""Deltas online: publishing costs what changed, and what is served is the snapshot, whole,
whichever way it got there."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.run.loader import online_segment
from precompute.jobs.run.publisher import BASE_ROWS
from precompute.jobs.run.rows import chunks
from precompute.jobs.run.rows.plan import MOST_DELTAS
from precompute.store.disk.record import replace
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.online_store import Segment, number_of
from precompute.store.online.table_store import TableStore
from precompute.store.vectors.vector_index import VectorIndex
from tests.fixtures import MakeProject
from tests.jobs.test_materialize import interrupted
from tests.scene import UNJUDGED, Scene

ROWS = 40
OPEN: dict[str, Any] = {"gates": {"rows": None, "first": None, "contract": None}}
ANY_NUMBERS: dict[str, Any] = {"gates": OPEN["gates"] | UNJUDGED}
"""Of what becomes of values at random, or of all in the same way."""


ON_TABLES = pytest.mark.parametrize("online", ["table"], indirect=True)
"""What a publish decides, whatever the store: that each store's segments are as the others', its
contract holds (tests/store/test_online_stores.py), and here the random walk over either."""


@pytest.fixture
def published(make_project: MakeProject, online: str) -> Any:
    """Publishes a table of key → x, as a delta of what was before."""

    def publish(table: dict[int, float], **view: Any) -> Scene:
        project = make_project(sorted(table.items()), project={"online": online}, view=OPEN | view)
        project.run()
        check(project, table)
        return project

    return publish


def check(project: Scene, table: dict[int, float]) -> None:
    """Every row that is served is that of the table, and nothing else is."""
    keys = list(range(-1, 2 * ROWS))
    snapshot, doubles = project.served(keys)
    assert snapshot == project.live().snapshot
    assert dict(zip(keys, doubles, strict=True)) == {
        key: 2 * table[key] if key in table else None for key in keys
    }
    with project.lookup() as lookup:
        assert [lookup.row("numbers", key)["status"] for key in keys] == [
            "fresh" if key in table else "missing" for key in keys
        ]
    assert project.faults() == []


def segments(project: Scene) -> tuple[int, ...]:
    """Numbers of the segments that are live, the lowest first."""
    return tuple(map(number_of, project.live_snapshot().names))


def loaded(project: Scene) -> list[Segment]:
    with project.online_store() as store:
        return store.segments("numbers")


BASE = {i: float(i) for i in range(ROWS)}


@ON_TABLES
def test_a_delta_loads_what_changed_alone(published: Any) -> None:
    project = published(BASE)
    assert segments(project) == (1,)
    table = BASE | {3: 33.0, 77: 1.0}
    del table[5]
    project = published(table)
    assert segments(project) == (1, 2)
    snapshot = project.snapshot(2)
    lowest, over = (online_segment(snapshot, at) for at in range(2))
    assert project.pointer().segments == snapshot.names == (lowest.name, over.name)
    assert loaded(project) == [lowest, over]
    assert (lowest.upper, over.upper) == (False, True)
    with project.online_store() as store:
        found = store.read_segments("numbers", [over.name], [b"3", b"77", b"5", b"4"]).values
    # two rows, a tombstone, and nothing of what stayed
    assert [None if row is None else len(row) for row in found][2:] == [24, None]


@ON_TABLES
def test_a_row_that_is_rejected_now_is_not_served_from_the_base(
    make_project: MakeProject, online: str
) -> None:
    """It is in the source still, so it did not leave; but what it was is not what it is."""
    view = OPEN | {"model": {"use": "tests.models:Doubler", "args": {"nan_on": -1.0}}}
    tables = (BASE, BASE | {3: -1.0}, BASE | {3: -1.0, 4: -1.0, 5: 50.0}, BASE | {4: -1.0})
    for number, table in enumerate(tables, 1):
        project = make_project(sorted(table.items()), project={"online": online}, view=view)
        project.run()
        check(project, {key: x for key, x in table.items() if x != -1.0})
        assert segments(project) == (1, *range(2, number + 1))


@ON_TABLES
def test_a_row_that_is_again_as_before_an_interruption_is_of_the_base(
    published: Any, make_project: MakeProject, online: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the interrupted run made of it is dead, but it is not: it had a tombstone over it, and
    was unknown."""
    published(BASE)
    monkeypatch.setattr(chunks, "WINDOW_ROWS", 2)
    monkeypatch.setattr(chunks, "PART_BYTES", 1)
    table = BASE | {0: 100.0, 1: 101.0, 2: 102.0, 3: 103.0}
    interrupted(
        make_project(sorted(table.items()), project={"online": online}, view=OPEN),
        monkeypatch,
        1,
    )
    del table[30]
    project = published(table | {0: BASE[0], 3: BASE[3]})
    snapshot = project.snapshot(2)
    assert snapshot.segments[1].own_kills == 1
    assert snapshot.counts.removed == 1
    assert segments(project) == (1, 2)


@ON_TABLES
def test_each_publish_loads_what_changed_and_small_segments_are_merged(published: Any) -> None:
    table = dict(BASE)
    published(table, **ANY_NUMBERS)
    for step in range(2, 6):
        table |= (
            {2: 102.0} | dict.fromkeys(range(20, 28), -1.0) if step == 2 else {step: 100.0 + step}
        )
        project = published(table, **ANY_NUMBERS)
    assert segments(project) == (1, 2, 3, 4, 5)
    table[6] = 106.0
    project = published(table, **ANY_NUMBERS)
    # the fifth takes the place of the highest, and of those under it that are no heavier than both
    # together; as its snapshot does of theirs
    assert segments(project) == (1, 2, 6)
    assert [segment.number for segment in project.snapshot(6).segments] == [1, 2, 6]
    assert [g.number for g in loaded(project)] == [1, 2, 3, 4, 5, 6]
    with project.online_store() as store:
        keys = [b"2", b"3", b"4", b"5", b"6", b"7"]
        assert [
            row is not None
            for row in store.read_segments(
                "numbers", project.live_snapshot().names[-1:], keys
            ).values
        ] == [
            False,
            True,
            True,
            True,
            True,
            False,
        ]
    # a key that left, came back, and left again
    for gone in (True, False, True):
        if gone:
            del table[9]
        else:
            table[9] = 9.5
        project = published(table)
        assert segments(project)[0] == 1


@ON_TABLES
def test_a_snapshot_without_another_row_loads_nothing(published: Any) -> None:
    published(BASE)
    table = BASE | {3: 33.0}
    project = published(table)
    before = project.live_snapshot().names
    project = published(table, ttl="2h")
    assert project.live().snapshot == 3
    assert project.live_snapshot().names == before
    assert [g.number for g in loaded(project)] == [1, 2]
    # and what comes next lies over that
    project = published(table | {4: 44.0}, ttl="2h")
    assert segments(project) == (1, 2, 4)


@ON_TABLES
def test_past_half_of_it_a_new_base_is_loaded(
    published: Any,
) -> None:
    project = published(BASE)
    table = BASE | {i: i + 0.5 for i in range(0, ROWS, 2)}
    project = published(table)
    assert segments(project) == (1, 2)
    table[21] = -1.0
    project = published(table)
    assert segments(project) == (3,)
    # and the next segment lies over that
    table[5] = -2.0
    project = published(table)
    assert segments(project) == (3, 4)
    with project.online_store() as online:
        online.flip(replace(project.pointer(), degraded=True))
    table[5] = -3.0
    project = published(table)
    # what was said to be lost was looked for, and is there
    assert (segments(project), project.pointer().degraded) == ((3, 4, 5), False)


@ON_TABLES
def test_going_back_and_forth_between_lists_loads_nothing(published: Any) -> None:
    published(BASE)
    second, third = BASE | {1: -1.0}, BASE | {1: -2.0, 2: -3.0}
    del third[30]
    published(second)
    project = published(third)
    all_of_them = project.live_snapshot().names
    assert segments(project) == (1, 2, 3)
    for number, table, place in (
        (2, second, all_of_them[:2]),
        (3, third, all_of_them),
        (1, BASE, all_of_them[:1]),
    ):
        report = project.publish(snapshot=number)
        assert "load" not in report.stages_s
        assert project.live_snapshot().names == place
        check(project, table)
    # under the segment that was live before lies the other one
    report = project.publish(snapshot=2)
    assert ("load" in report.stages_s, project.live_snapshot().names) == (False, all_of_them[:2])
    check(project, second)


def test_many_deltas_end_where_one_full_run_does(published: Any) -> None:
    """Every kind of change, in any order, over bases that come and go, with an index beside."""
    random_number = random.Random(7)
    table, indexed = dict(BASE), {"index": {"on": "vector"}}
    bases, most = set(), 0
    for step in range(12):
        for _ in range(random_number.choice((1, 2, 5, 9)) if step else 0):
            key = random_number.randrange(ROWS + 10)
            if key in table and random_number.random() < 0.4:
                del table[key]
            else:
                table[key] = random_number.random()
        project = published(table, **ANY_NUMBERS, **(indexed if step > 6 else {}))
        most = max(most, len(project.live_snapshot().names) - 1)
        if step > 6:
            bases.add(project.live().indexes[0])
            index = VectorIndex(*map(project.store.index_folder, project.live().indexes))
            assert {key for key in range(-1, 2 * ROWS) if index.find(str(key)) is not None} == set(
                table
            )
    assert (len(bases) > 1, most) == (True, MOST_DELTAS)
    before = segments(project)
    report = project.publish(reload=True)
    every = sum(segment.entries for segment in project.live_snapshot().segments)
    assert (report.status, report.usage.loaded_rows) == ("published", every)
    assert segments(project) == before
    check(project, table)


def test_a_reader_meets_one_version_while_deltas_are_published(
    make_project: MakeProject, online: str
) -> None:
    """Each delta changes the rows 0 to 3 together, as one."""

    def make(x: float) -> Scene:
        rows = [(i, x if i < 4 else 0.0) for i in range(ROWS)]
        return make_project(rows, project={"online": online}, view=ANY_NUMBERS)

    project = make(1.0)
    project.run()
    failures: list[Any] = []
    seen: set[int] = set()
    stop = threading.Event()

    def read() -> None:
        with project.lookup() as lookup:
            while not stop.is_set():
                table = lookup.get("numbers", [*range(8), *range(8)])
                (snapshot,) = set(table["snapshot"].to_pylist())
                seen.add(snapshot)
                if table["double"].to_pylist() != ([2.0 * snapshot] * 4 + [0.0] * 4) * 2:
                    failures.append((snapshot, table["double"].to_pylist()))
                    return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for x in range(2, 9):
            make(float(x)).run()
    finally:
        stop.set()
        reader.join()
    assert failures == []
    assert len(seen) > 1
    assert len(segments(project)) > 1


def test_a_store_that_may_drop_rows_takes_deltas_and_says_what_it_is(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableStore, "is_lossy", lambda _: True)
    for x in (1.0, -1.0):
        project = make_project([(i, x if i == 1 else float(i)) for i in range(ROWS)], view=OPEN)
        project.run()
    assert (segments(project), project.pointer().lossy) == ((1, 2), True)
    assert "load" not in project.publish(snapshot=1).stages_s
    assert (segments(project), project.pointer().lossy) == ((1,), True)
    with project.lookup() as lookup:
        assert lookup.row("numbers", 999)["reason"] == "not_in_store"


@ON_TABLES
def test_a_segment_of_another_digest_is_not_taken_for_the_snapshots(
    published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same name, as one of 2³² is where the root was restored from an older copy."""
    with published(BASE).online_store() as online:
        store = type(online)
    there = store.segments

    def of_another(self: Any, view: str) -> list[Segment]:
        return [
            replace(segment, digest=segment.digest[:8] + "0" * 56)
            if segment.number == 1
            else segment
            for segment in there(self, view)
        ]

    monkeypatch.setattr(store, "segments", of_another)
    project = published(BASE | {1: -1.0})
    report = project.store.runs.last()
    assert report is not None
    assert (segments(project), report.usage.loaded_rows) == ((1, 2), ROWS + 1)


@ON_TABLES
def test_what_is_live_is_loaded_again_under_its_name(published: Any) -> None:
    project = published(BASE)
    before, epoch = project.live_snapshot().names, project.live().epoch
    with project.lookup() as lookup:
        assert lookup.row("numbers", 3)["features"]["double"] == 6.0
        with project.online_store() as store:
            (check_of,) = store.file_checks("numbers", before)
        path = Path(check_of.path)
        data = path.read_bytes()
        path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
        project.publish(reload=True)
        assert (project.live_snapshot().names, project.live().epoch) == (before, epoch + 1)
        assert path.read_bytes() == data
        assert lookup.row("numbers", 3)["features"]["double"] == 6.0
    check(project, BASE)


@ON_TABLES
def test_what_a_segment_lies_over_is_looked_at_by_its_keys_alone(
    make_project: MakeProject, online: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows vouch for themselves; of vectors, Parquet costs ten times what it does of keys."""
    make_project(sorted(BASE.items()), project={"online": online}, view=OPEN).run()
    project = make_project(
        sorted((BASE | {3: 33.0}).items()), project={"online": online}, view=OPEN
    )
    project.materialize()
    checked: list[tuple[int, int, Any]] = []
    sample = ViewStore.sample

    def watched(
        self: ViewStore, snapshot: Snapshot, rows: int, columns: Any = None, *places: int
    ) -> Any:
        checked.append((snapshot.number, rows, columns))
        return sample(self, snapshot, rows, columns, *places)

    monkeypatch.setattr(ViewStore, "sample", watched)
    project.publish()
    assert segments(project) == (1, 2)
    assert checked == [(2, BASE_ROWS, ("id",))]
    check(project, BASE | {3: 33.0})
