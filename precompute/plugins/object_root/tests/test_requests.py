"""How many requests a root in an object store takes, and what is believed of their replies: many
views, a store that is busy, bits that flip on the way, clocks that differ."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from precompute.plugins.object_root import replica as replica_module
from precompute.plugins.object_root import storage as storage_module
from precompute.plugins.object_root.replica import TOLD, Follower, Replica
from precompute.plugins.object_root.tests.roots import VIEW, host, project_on, storage_in
from precompute.store.disk import lease
from precompute.store.disk.lease import is_held, take
from precompute.store.disk.record import Record, read_record, sealed
from precompute.store.disk.storage import File, unmount_all
from precompute.store.errors import ConflictError, UnreadableError
from precompute.store.offline.gc import collect
from tests.fixtures import MakeProject
from tests.object_store import ObjectStore, flipped_at


class Noted(Record, frozen=True):
    """A record."""

    number: int


def noted(number: int) -> bytes:
    return sealed(Noted(number))


@pytest.fixture
def records(bucket: ObjectStore, tmp_path: Path) -> list[Path]:
    """Ten of them, which another host wrote."""
    there, folder = storage_in(bucket, tmp_path / "there"), tmp_path / "here" / "view" / "manifests"
    for number in range(10):
        there.create(tmp_path / "there" / "view" / "manifests" / f"{number}.json", noted(number))
    unmount_all()
    return [folder / f"{number}.json" for number in range(10)]


# ---- kept records


def test_records_are_requested_once_and_believed_while_the_store_has_them(
    bucket: ObjectStore, records: list[Path], tmp_path: Path
) -> None:
    wanted = [noted(number) for number in range(10)]

    def read(*, ahead: bool = False) -> tuple[list[bytes], int]:
        """As a process that has just begun reads them; and the requests that it takes."""
        storage = storage_in(bucket, tmp_path / "here")
        before = len(bucket.requests)
        if ahead:
            storage.read_ahead(records[0].parent)
        found = [storage.read(path, immutable=True) for path in records]
        return found, len(bucket.requests) - before

    assert read(ahead=True) == (wanted, 11)
    assert read() == (wanted, 1)
    kept = tmp_path / "here" / ".records" / "view" / "manifests"
    # neither a bit that flipped here is believed, nor what the store has no more
    data = (kept / "3.json").read_bytes()
    (kept / "3.json").write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    storage_in(bucket, tmp_path / "there").write(
        tmp_path / "there" / "view" / "manifests" / "4.json", noted(44)
    )
    wanted[4] = noted(44)
    assert read() == (wanted, 3)
    assert read() == (wanted, 1)


def test_a_look_is_a_request_for_each_view_and_sees_what_it_writes(
    bucket: ObjectStore, records: list[Path], tmp_path: Path
) -> None:
    storage, root = storage_in(bucket, tmp_path / "here"), tmp_path / "here"
    storage.read_ahead(records[0].parent)
    before = len(bucket.requests)
    with storage.look(root):
        assert [storage.read(path) for path in records] == [noted(n) for n in range(10)]
        assert sorted(storage.names(root / "view")) == ["manifests"]
        assert storage.names(root / "view" / "notes") == []
        assert storage.stat(root / "view" / "notes" / "a.json") is None
        with pytest.raises(FileNotFoundError):
            storage.read(root / "view" / "notes" / "a.json")
        assert len(bucket.requests) - before == 2
        storage.write(root / "view" / "notes" / "a.json", noted(1))
        assert storage.read(root / "view" / "notes" / "a.json") == noted(1)
        assert storage.names(root / "view" / "notes") == ["a.json"]
    bucket.fault = lambda _: "forbid"
    before = len(bucket.requests)
    with storage.look(root):
        for path in records:
            with pytest.raises(UnreadableError, match="refuses these credentials"):
                storage.read(path)
    assert len(bucket.requests) - before == 1


def test_status_is_a_request_for_each_view_however_much_was_published(
    bucket: ObjectStore, make_project: MakeProject
) -> None:
    for changed in (0, 1):
        settings = {"root": bucket.root, "online": "table:./online"}
        rows = [(i, i + changed) for i in range(4)]
        scene = make_project(rows, view=VIEW, project=settings)
        scene.run()
    text = (scene.folder / "views" / "numbers.yaml").read_text()
    for name in ("second", "third"):
        path = scene.folder / "views" / f"{name}.yaml"
        path.write_text(text.replace("name: numbers", f"name: {name}"))
    unmount_all()
    before = len(bucket.requests)
    assert scene.cli("status") == 1  # two never ran
    asked = [request.method for request in bucket.requests[before:]]
    # beside those for each view: the root's folder and identity, and who runs several
    assert asked == ["GET"] * (3 + 3)


# ---- replicas


def test_a_look_of_a_replica_is_one_request_and_misses_nothing_for_good(
    bucket: ObjectStore, make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "FRESH_S", 0.0)
    monkeypatch.setattr(replica_module, "POLL_S", 0.05)
    project = project_on(bucket, make_project, [(i, i * 10) for i in range(4)])
    project.run()
    other = host(project, tmp_path / "other")
    views = ["numbers", *(f"never_{number}" for number in range(9))]
    follower = Follower(other.offline, other.open_online, views)
    try:
        with other.online_store() as online:

            def epoch() -> int:
                pointer = online.live("numbers")
                return 0 if pointer is None else pointer.epoch

            until(lambda: epoch() == 1)
            until(lambda: {request.path for request in bucket.requests[-5:]} == {told(bucket)})
            # who published is killed before others are told: they see it with a look at all views
            with monkeypatch.context() as patch:
                patch.setattr(Replica, "_tell", lambda *_: None)
                project = project_on(bucket, make_project, [(i, i * 10 + 1) for i in range(4)])
                project.run()
            with project.online_store() as published:
                replica = Replica(project.store, published)
                assert replica.is_behind(2)
                monkeypatch.setattr(replica_module, "ALL_S", 0.1)
                until(lambda: epoch() == 2)
                # and the next run tells them
                project.run()
                assert not replica.is_behind(2)
    finally:
        follower.stop()


def told(bucket: ObjectStore) -> str:
    return f"/bucket/{bucket.prefix}/{TOLD}"


def until(met: object) -> None:
    """Wait for something that takes its time, on a busy machine too."""
    assert callable(met)
    limit = time.monotonic() + 30
    while not met():
        assert time.monotonic() < limit
        time.sleep(0.02)


# ---- replies


def test_a_busy_store_is_asked_for_as_long_as_was_promised(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not so many times only."""
    monkeypatch.setattr(storage_module, "RETRY_S", 4.0)
    storage, turns = storage_in(bucket, tmp_path / "cache"), itertools.count()
    bucket.fault = lambda _: "refuse" if next(turns) < 10 else None
    storage.write(tmp_path / "cache" / "a.json", noted(1))
    assert next(turns) == 11
    monkeypatch.setattr(storage_module, "RETRY_S", 0.1)
    bucket.fault = lambda _: "refuse"
    with pytest.raises(UnreadableError, match="gave no answer that can be used"):
        storage_in(bucket, tmp_path / "again").read(tmp_path / "again" / "a.json")


def test_bits_that_flip_on_the_way_are_asked_for_again(
    bucket: ObjectStore, records: list[Path], tmp_path: Path
) -> None:
    storage = storage_in(bucket, tmp_path / "here")
    part, data = tmp_path / "here" / "view" / "data" / "run" / "part.parquet", bytes(range(256))
    part.parent.mkdir(parents=True)
    part.write_bytes(data)
    storage.put([part])
    file = File(part, 256, "40aff2e9d2d8922e47afd4648e6967497158785fbd1da870e7110266bf944880")
    turns = itertools.cycle(("flip", None))
    bucket.fault = lambda request: next(turns) if request.method == "GET" else None
    for path in records[:3]:
        part.unlink()
        assert read_record(Noted, storage.read(path), path).number == int(path.stem)
        storage.fetch([file])
        assert part.read_bytes() == data
    # it lies so in the store: that is damage, and said by who parses it
    bucket.fault = lambda _: None
    storage.write(records[4], noted(4).replace(b"4", b"5"))
    with pytest.raises(ValueError, match="not those that were written"):
        read_record(Noted, storage.read(records[4]), records[4])
    # each time others: the network is to blame, and nothing is marked damaged
    part.unlink()
    places = itertools.count()
    bucket.flipped = lambda data: flipped_at(data, next(places))
    bucket.fault = lambda request: "flip" if request.method == "GET" else None
    for read in (lambda: storage.read(records[5]), lambda: storage.fetch([file])):
        with pytest.raises(UnreadableError, match="each of 4 requests gave other bytes"):
            read()
    assert not part.exists()


# ---- clocks


@pytest.mark.parametrize("ahead_s", [-900, 900])
def test_a_clock_that_is_off_ends_no_lease_and_removes_nothing_young(
    bucket: ObjectStore,
    make_project: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    ahead_s: int,
) -> None:
    bucket.ahead_s = ahead_s
    project = project_on(bucket, make_project, [(1, 1), (2, 2)])
    project.run()
    store = project.store
    with monkeypatch.context() as patch:
        patch.setattr(lease, "_host", lambda: "another host")
        elsewhere = take(store.leases, "elsewhere", "another", ttl_s=1.5)
    try:
        assert is_held(store.leases, "elsewhere")
        with pytest.raises(ConflictError, match="by another"):
            take(store.leases, "elsewhere", "test")
    finally:
        elsewhere._stop.set()
    # by a process that was not told, nor saw it
    until(lambda: not is_held(store.leases, "elsewhere"))
    take(store.leases, "elsewhere", "test").release()
    left = store.data / "killed" / "part-00000.parquet"
    left.parent.mkdir()
    left.write_bytes(b"half")
    store.storage.put([left])
    assert collect(store, keep=1, grace_s=600) == []
    monkeypatch.setattr(storage_module, "FRESH_S", 0.0)
    assert [item.path for item in collect(store, keep=1, grace_s=-60)] == [left]
