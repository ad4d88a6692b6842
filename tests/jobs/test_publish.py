"""Publish: old or new and never a part; what is refused; what is dropped; how an interrupted
publish heals."""

from __future__ import annotations

import errno
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.loader import Loader
from precompute.jobs.run.publisher import Publisher
from precompute.jobs.run.report import reporting_run
from precompute.store.answers.lookup import Lookup
from precompute.store.disk.lease import take
from precompute.store.disk.record import replace
from precompute.store.errors import (
    ConflictError,
    GateError,
    OnlineStoreError,
    PrecomputeError,
    SnapshotError,
)
from precompute.store.offline.log import PUBLISH_LEASE
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.kernels import Rows
from precompute.store.online.online_store import Pointer, Segment
from precompute.store.vectors import index_build
from precompute.store.vectors.vector_index import VectorIndex
from tests.fixtures import MakeProject
from tests.jobs.test_deltas_online import ANY_NUMBERS
from tests.memory_store import MemoryStore
from tests.online import batch_of, numbers
from tests.scene import Scene

INDEXED = {"index": {"on": "vector", "metric": "l2"}}


def epochs(project: Scene) -> tuple[int, int]:
    """(of the offline pointer, of the online pointer)."""
    with project.online_store() as store:
        ref, pointer = project.store.log.live(), store.live("numbers")
        return 0 if ref is None else ref.epoch, 0 if pointer is None else pointer.epoch


def loaded(project: Scene) -> list[int]:
    """Numbers of the segments that are in the online store."""
    with project.online_store() as store:
        return numbers(store)


def committed(project: Scene) -> ViewStore:
    project.materialize()
    return project.store


def publish_to(
    online: MemoryStore, store: ViewStore, number: int | None = None
) -> tuple[Report, Pointer]:
    with (
        take(store.leases, PUBLISH_LEASE, "publish") as lease,
        reporting_run(store, "publish") as report,
    ):
        return report, Publisher(store, online, report, Silent(), lease).publish(number)


# ---- the good case


def test_rows_and_index_are_live_together(make_project: MakeProject, online: str) -> None:
    make = {"project": {"online": online}, "view": INDEXED}
    project = make_project([(1, 1.0), (2, 2.0)], **make)
    report = project.run()
    assert (report.status, report.snapshot, report.epoch) == ("published", 1, 1)
    assert project.served() == (1, [2.0, 4.0, None])
    assert project.nearest(2.2) == (1, "2")
    project = make_project([(3, 2.0), (2, 200.0)], **make)
    assert project.run().epoch == 2
    assert project.served() == (2, [None, 400.0, 4.0])
    assert project.nearest(2.2) == (2, "3")
    ref = project.live()
    assert (ref.epoch, ref.snapshot, ref.previous, ref.reason) == (2, 2, 1, "run")


def test_the_pointer_tells_what_is_live(make_project: MakeProject) -> None:
    project = make_project([(1, 1.0), (2, None)], view=INDEXED)
    report = project.run()
    pointer = project.pointer()
    snapshot = project.store.snapshot(1)
    assert pointer.view == snapshot.view == project.view("numbers").feature_view()
    assert (pointer.snapshot, pointer.epoch, pointer.rows, pointer.source_rows) == (1, 1, 1, 2)
    assert pointer.model == snapshot.model == report.model
    assert pointer.computed_at_min == snapshot.computed_at_min
    assert pointer.index == f"numbers/index/{project.live().indexes[0]}"
    assert pointer.input_columns == {"x": "double"}


class NoLoad(MemoryStore):
    """Must not be loaded into."""

    def load(self, view: str, segment: Segment, rows: Rows, rows_done: int = 0) -> int:
        raise AssertionError("nothing is to be loaded")


def test_publishing_what_is_live_reads_none_of_its_parts(make_project: MakeProject) -> None:
    store = committed(make_project([(1, 1.0)]))
    memory = MemoryStore()
    _, before = publish_to(memory, store)
    for path in store.part_paths(store.snapshot(1)):
        path.unlink()
    memory.__class__ = NoLoad
    report, pointer = publish_to(memory, store)
    assert (report.status, report.epoch, report.snapshot, pointer) == ("current", 1, 1, before)
    assert memory.live("numbers") == before


def test_a_run_that_found_nothing_changed_renews_what_is_live(
    make_project: MakeProject, online: str
) -> None:
    project = make_project([(1, 1.0), (2, 2.0)], project={"online": online})
    first = project.run()
    opened = project.open_online()
    before = opened.live("numbers")
    again = project.run()
    after, ref = opened.live("numbers"), project.store.log.live()
    opened.close()
    assert before is not None
    assert ref is not None
    assert first.status == "published"
    assert again.status == "current"
    assert again.snapshot == 1
    assert again.epoch == 1
    assert before.renewed_at_us == 0
    assert after == replace(before, renewed_at_us=again.read_at_us)
    assert ref.renewed_at == again.read_at_us > first.read_at_us
    assert (epochs(project), loaded(project)) == ((1, 1), [1])
    assert project.publish().status == "current"  # and publishing does not take the renewal back
    assert project.store.log.live() == ref


@pytest.mark.parametrize("damage", ["part", "kills"])
def test_a_delta_over_a_damaged_parent_is_never_loaded_from_it(
    make_project: MakeProject, damage: str
) -> None:
    """What the online store holds of the parent since it was whole vouches for itself, and is built
    on."""
    rows = [(i, float(i)) for i in range(30)]
    project = make_project(rows)
    project.run()
    make_project([(1, 100.0), *rows[2:]]).run()
    committed(make_project([(1, 200.0), *rows[2:]]))
    store = project.store
    last = store.snapshot(3)
    part = last.parts[0] if damage == "part" else last.segments[1].kills
    assert part is not None
    flip(project.root / "numbers" / part.path, Path())
    if damage == "part":
        assert project.publish(snapshot=last.number).status == "published"
        assert project.served([0, 1, 2]) == (3, [None, 400.0, 4.0])
    with pytest.raises(SnapshotError, match=f"{re.escape(part.path)} differs from its checksum"):
        project.publish(snapshot=last.number, reload=True)
    if damage == "kills":
        with pytest.raises(GateError, match="snapshot 2 is marked bad"):
            project.publish(snapshot=last.number)
        assert epochs(project) == (2, 2)
        assert project.served([0, 1, 2]) == (2, [None, 200.0, 4.0])


def test_going_back_to_the_snapshot_before_loads_nothing(
    make_project: MakeProject, online: str
) -> None:
    make = {"project": {"online": online}, "view": INDEXED}
    for x in (1.0, 10.0):
        project = make_project([(1, x), (2, x), (3, x)], **make)
        project.run()
    store = project.store
    for path in store.part_paths(store.snapshot(1)):
        path.unlink()  # what is not read may be missing
    report = project.publish(snapshot=1)
    assert (report.status, report.snapshot, report.epoch) == ("published", 1, 3)
    assert report.stages_s.keys() & {"check", "load", "verify", "index"} == set()
    ref = store.log.live()
    assert ref is not None
    assert ref.epoch == 3
    assert ref.previous == 2
    assert project.served() == (1, [2.0, 2.0, 2.0])
    assert project.nearest(1.0)[0] == 1
    assert (epochs(project), loaded(project)) == ((3, 3), [1, 2])
    report = project.publish(snapshot=2)  # and forth
    assert (report.epoch, "load" in report.stages_s) == (4, False)
    assert project.served() == (2, [20.0, 20.0, 20.0])
    ref = store.log.live()
    assert ref is not None
    assert ref.epoch == 4
    assert ref.previous == 1
    assert loaded(project) == [1, 2]


def test_the_snapshot_before_is_loaded_again_when_its_segment_is_gone(
    make_project: MakeProject, online: str
) -> None:
    for x in (1.0, 10.0):
        project = make_project([(1, x)], project={"online": online})
        project.run()
    with project.online_store() as opened:
        opened.drop("numbers", opened.segments("numbers")[0].name)
    report = project.publish(snapshot=1)
    assert (report.epoch, "load" in report.stages_s) == (3, True)
    assert project.served([1]) == (1, [2.0])
    assert loaded(project) == [1, 2]


def test_a_segment_is_called_as_before_however_often_it_is_tried(
    make_project: MakeProject,
) -> None:
    """Whoever slept inside its load wakes up to write the same rows."""
    store, tried = committed(make_project([(1, 1.0)])), list[str]()

    class Noted(MemoryStore):
        def load(self, view: str, segment: Segment, rows: Rows, rows_done: int = 0) -> int:
            tried.append(segment.name)
            if len(tried) in (2, 3):
                raise OnlineStoreError("gone")
            return super().load(view, segment, rows)

    memory = Noted()
    publish_to(memory, store)
    committed(make_project([(1, 2.0)]))
    for _ in range(2):
        with pytest.raises(OnlineStoreError, match="gone"):
            publish_to(memory, store)
    report, pointer = publish_to(memory, store)
    first, second = (store.snapshot(number).names[-1] for number in (1, 2))
    assert tried == [first, second, second, second]
    assert (report.epoch, pointer.segments) == (2, (second,))
    assert Lookup(memory).get("numbers", [1])["double"].to_pylist() == [4.0]


def test_old_segments_and_indexes_are_dropped_but_the_last(
    make_project: MakeProject, online: str
) -> None:
    for n in range(1, 4):
        project = make_project([(1, float(n))], project={"online": online}, view=INDEXED)
        project.run()
        left = [epoch for epoch in (n - 1, n) if epoch > 0]
        assert loaded(project) == left
        ref = project.live()
        assert {path.name for path in project.store.indexes.iterdir()} == {
            *ref.indexes,
            *ref.previous_indexes,
        }
        assert len(ref.indexes) == 1


def test_what_the_online_pointer_names_stays_without_its_manifest(
    make_project: MakeProject, online: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for x in (1.0, 10.0):
        project = make_project([(1, x)], project={"online": online})
        project.run()
    committed(make_project([(1, 100.0)]))
    path = project.store.manifest_path(2)
    path.write_bytes(path.read_bytes()[:-9])
    load, there = Loader.load, list[list[int]]()

    def watched(self: Loader, snapshot: Snapshot, at: int) -> None:
        there.append(loaded(project))
        load(self, snapshot, at)

    monkeypatch.setattr(Loader, "load", watched)
    assert project.publish(snapshot=3).status == "published"
    assert (there, project.served([1])) == ([[1, 2]], (3, [200.0]))


def test_a_list_with_rows_of_other_features_is_refused(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project([(1, 1.0)])
    project.run()
    committed(make_project([(1, 2.0)]))
    monkeypatch.setattr("precompute.jobs.run.publisher.schema_tag", lambda view: 7)
    with pytest.raises(SnapshotError, match=r"segment 2-.* has rows of other features .*--full"):
        project.publish()
    assert project.served([1]) == (1, [2.0])


def test_a_reader_sees_one_snapshot_or_the_next_and_never_both(
    make_project: MakeProject, online: str
) -> None:
    rows, make = 500, {"project": {"online": online}, "view": ANY_NUMBERS}
    project = make_project([(i, 1.0) for i in range(rows)], **make)
    project.run()
    failures: list[str] = []
    seen: set[int] = set()
    stop = threading.Event()

    def read() -> None:
        lookup = project.open_lookup()
        while not stop.is_set():
            table = lookup.get("numbers", range(rows))
            snapshots, values = set(table["snapshot"].to_pylist()), set(table["double"].to_pylist())
            seen.update(snapshots)
            if len(snapshots) != 1 or values != {2.0 * next(iter(snapshots))}:
                failures.append(f"{snapshots} {values}")
                return
        lookup.close()

    reader = threading.Thread(target=read)
    reader.start()
    for x in range(2, 7):
        make_project([(i, float(x)) for i in range(rows)], **make).run()
    stop.set()
    reader.join()
    assert failures == []
    assert len(seen) > 1


# ---- an online store that cannot be trusted


Table = dict[bytes, bytes]


class Alters(MemoryStore):
    """Takes other rows than it was given."""

    @staticmethod
    def altered(table: Table) -> Table:
        raise NotImplementedError

    def load(self, view: str, segment: Segment, rows: Rows, rows_done: int = 0) -> int:
        tables = (
            dict(zip(map(bytes, b.keys.strings()), map(bytes, b.rows.strings()), strict=True))
            for b in rows
        )
        return super().load(view, segment, (batch_of(self.altered(table)) for table in tables))


class Loses(Alters):
    """Loses the last row of every segment and says so."""

    @staticmethod
    def altered(table: Table) -> Table:
        return dict(list(table.items())[:-1])


class LosesAndLies(Loses):
    """Loses a row and counts it all the same."""

    def load(self, view: str, segment: Segment, rows: Rows, rows_done: int = 0) -> int:
        return super().load(view, segment, rows) + 1


class Flips(Alters):
    """Changes one bit of every row."""

    @staticmethod
    def altered(table: Table) -> Table:
        return {key: row[:-1] + bytes([row[-1] ^ 1]) for key, row in table.items()}


class Raises(MemoryStore):
    """Stops answering half-way through a load."""

    def load(self, view: str, segment: Segment, rows: Rows, rows_done: int = 0) -> int:
        def some() -> Rows:
            yield next(iter(rows))
            raise OnlineStoreError("gone")

        return super().load(view, segment, some())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Loses, "holds 2 of 3 rows.*evicting"),
        (LosesAndLies, "'3' of view 'numbers' is missing"),
        (Flips, "'1' of view 'numbers' has other bytes"),
        (Raises, "gone"),
    ],
)
def test_a_store_that_lost_or_altered_rows_is_not_made_live(
    make_project: MakeProject, kind: type[MemoryStore], message: str
) -> None:
    """Nor is a segment left that was not read back: a later run would take it for whole."""
    store = committed(make_project([(1, 1.0), (2, 2.0), (3, 3.0)]))
    memory = MemoryStore()
    _, before = publish_to(memory, store)
    committed(make_project([(1, 10.0), (2, 20.0), (3, 30.0)]))
    memory.__class__ = kind
    with pytest.raises(OnlineStoreError, match=message):
        publish_to(memory, store)
    report = store.runs.last()
    assert report is not None
    assert (report.status, report.snapshot) == ("failed", 2)
    ref = store.log.live()
    assert ref is not None
    assert (ref.epoch, ref.snapshot) == (1, 1)
    assert memory.live("numbers") == before
    assert Lookup(memory).get("numbers", [1, 2, 3])["double"].to_pylist() == [2.0, 4.0, 6.0]
    assert numbers(memory) == [1]
    memory.__class__ = MemoryStore
    report, pointer = publish_to(memory, store)
    assert (pointer.snapshot, "load" in report.stages_s) == (2, True)
    assert Lookup(memory).get("numbers", [1, 2, 3])["double"].to_pylist() == [20.0, 40.0, 60.0]


# ---- a snapshot that cannot be trusted


def cut(part: Path, other: Path) -> None:
    part.write_bytes(part.read_bytes()[:-1])


def flip(part: Path, other: Path) -> None:
    body = bytearray(part.read_bytes())
    body[len(body) // 2] ^= 1
    part.write_bytes(bytes(body))


@pytest.mark.parametrize("damage", [cut, flip, lambda part, other: part.unlink()])
def test_a_damaged_snapshot_is_never_published(
    make_project: MakeProject, damage: Callable[[Path, Path], None]
) -> None:
    project = make_project([(1, 1.0), (2, 2.0)])
    project.run()
    committed(make_project([(1, 9.0), (2, 8.0)]))
    store = project.store
    parts = [store.part_paths(store.snapshot(n))[0] for n in (1, 2)]
    damage(parts[1], parts[0])
    assert parts[0] != parts[1]
    with pytest.raises(SnapshotError, match=re.escape(str(parts[1]))):
        project.publish()
    assert epochs(project) == (1, 1)
    assert project.served([1, 2]) == (1, [2.0, 4.0])


@pytest.mark.parametrize("text", ["", "{}"])
def test_a_torn_manifest_is_never_published(make_project: MakeProject, text: str) -> None:
    project = make_project([(1, 1.0)])
    project.run()
    committed(make_project([(1, 9.0)]))
    (project.root / "numbers" / "manifests" / f"{2:020d}.json").write_text(text)
    with pytest.raises(SnapshotError, match="torn"):
        project.publish(snapshot=2)
    assert project.served([1]) == (1, [2.0])
    report = project.publish()  # the newest that can be published
    assert (report.status, report.snapshot) == ("current", 1)
    make_project([(1, 5.0)]).run()
    assert project.served([1]) == (3, [10.0])


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff"])
@pytest.mark.parametrize("where", ["offline", "online"])
def test_a_damaged_pointer_is_mended_by_publishing_again(
    make_project: MakeProject, where: str, text: bytes
) -> None:
    """Which is what its own message advises."""
    project = make_project([(1, 1.0)], project={"online": "table:./online"})
    project.run()
    path = (
        project.root / "numbers" / "log" / f"{1:020d}.json"
        if where == "offline"
        else project.folder / "online" / "numbers" / "live.json"
    )
    path.write_bytes(text)
    assert project.publish().status == "published"
    assert project.served([1]) == (1, [2.0])
    assert epochs(project) == (
        (2, 2) if where == "offline" else (1, 1)
    )  # what tells it all is the log


# ---- pointers that disagree


def test_a_lost_root_goes_past_the_online_epoch(make_project: MakeProject, online: str) -> None:
    make = {"project": {"online": online}, "view": INDEXED}
    for x in (1.0, 2.0, 3.0):
        project = make_project([(1, x), (2, x), (3, x)], **make)
        project.run()
    shutil.rmtree(project.root)
    project = make_project([(1, 7.0), (2, 8.0)], **make)
    assert project.served() == (3, [6.0, 6.0, 6.0])  # what is online goes on being served
    with pytest.raises(ConflictError, match=r"published by another project .*--take-over"):
        project.run()
    assert project.served() == (3, [6.0, 6.0, 6.0])
    assert project.numbers() == []  # it is refused before anything is computed
    project.materialize()
    before = loaded(project)
    with pytest.raises(ConflictError, match="published by another project"):
        project.publish()
    assert loaded(project) == before  # and before anything of the other's is dropped
    report = project.run(take_over=True)
    assert (report.snapshot, report.epoch) == (1, 4)
    assert project.served() == (1, [14.0, 16.0, None])
    assert project.nearest(8.0) == (1, "2")
    assert loaded(project) == [1, 3]
    assert project.run().status == "current"


def test_a_root_that_begins_anew_takes_no_old_segment_for_its_own(
    make_project: MakeProject,
) -> None:
    """Numbers begin at 1 again, and the digests are others'."""
    for x in (1.0, 2.0, 3.0):
        project = make_project([(1, x)])
        project.run()
    assert loaded(project) == [2, 3]
    for part in ("notes", "manifests", "data", "runs"):
        shutil.rmtree(project.root / "numbers" / part)
    (project.root / "online/numbers/live.json").unlink()
    for number, x in enumerate((7.0, 8.0, 9.0), 1):
        project = make_project([(1, x)])
        project.run()
        assert project.served([1]) == (number, [2 * x])
    assert loaded(project) == [2, 3]


@pytest.mark.parametrize("since", [[2.0], [2.0, 3.0]])  # its segment is there, or dropped
def test_a_root_restored_from_an_older_backup_goes_past_the_online_epoch(
    make_project: MakeProject, online: str, since: list[float]
) -> None:
    make = {"project": {"online": online}}
    project = make_project([(1, 1.0)], **make)
    project.run()
    shutil.copytree(project.root, project.folder / "backup")
    for x in since:
        make_project([(1, x)], **make).run()
    shutil.rmtree(project.root)
    (project.folder / "backup").rename(project.root)
    last = 1 + len(since)
    assert epochs(project) == (1, last)
    report = project.publish()
    assert (report.status, report.snapshot, report.epoch) == ("published", 1, last + 1)
    assert project.served([1]) == (1, [2.0])


def test_a_publish_that_was_overtaken_changes_nothing(make_project: MakeProject) -> None:
    store = committed(make_project([(1, 1.0)]))

    class Overtaken(MemoryStore):
        def load(self, view: str, segment: Segment, rows: Rows, rows_done: int = 0) -> int:
            count = super().load(view, segment, rows)
            store.log.move_live(1, expected_epoch=0, reason="another machine")
            return count

    memory = Overtaken()
    with pytest.raises(ConflictError, match="from epoch 0 to 1"):
        publish_to(memory, store)
    assert memory.live("numbers") is None
    ref = store.log.live()
    assert ref is not None
    assert (ref.epoch, ref.reason) == (1, "another machine")


def test_an_index_that_cannot_be_written_keeps_rows_and_index_as_they_were(
    make_project: MakeProject, online: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: dict[str, Any] = {"project": {"online": online}, "view": INDEXED}
    project = make_project([(1, 1.0)], **make)
    project.run()
    project = make_project([(2, 5.0)], **make)
    project.materialize()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(index_build, "write_index_record", full)
        with pytest.raises(PrecomputeError, match="index"):
            project.run()
    assert [path.name for path in project.store.indexes.iterdir()] == [*project.live().indexes]
    assert project.served([1, 2]) == (1, [2.0, None])
    assert project.nearest(5.0) == (1, "1")
    report = project.run()
    assert (report.status, report.snapshot, report.counts["written"]) == ("published", 2, 0)
    assert project.served([1, 2]) == (2, [None, 10.0])
    assert project.nearest(5.0) == (2, "2")


def test_what_is_loaded_again_is_read_before_and_after_under_its_name(
    make_project: MakeProject, online: str
) -> None:
    """A request that took the pointer before the flip reads it after."""
    for x in (1.0, 10.0):
        project = make_project([(1, x), (2, x)], project={"online": online}, view=INDEXED)
        project.run()
    before = project.pointer()
    index = project.root / (before.index or "")
    opened = VectorIndex(index)
    project.publish(reload=True)
    after = project.pointer()
    assert (before.numbers, after.segments, after.epoch) == ((2,), before.segments, 3)
    assert loaded(project) == [1, 2]
    assert (len(opened), len(VectorIndex(index))) == (2, 2)
    with project.online_store() as store:
        assert None not in store.read_segments("numbers", before.segments, [b"1", b"2"]).values
        assert store.unfinished("numbers") == []
    # going back is possible as it was
    assert project.publish().status == "current"
    assert "load" not in project.rollback().stages_s
    assert project.served([1, 2]) == (1, [2.0, 2.0])
