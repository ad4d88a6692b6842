"""Storages: what a root promises wherever it lies; one suite for all that are here."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from precompute.jobs.ops.retention import drop
from precompute.store.disk.lease import holder, is_held, take
from precompute.store.disk.storage import File, Storage, identity_of, known_identity, storage_of
from precompute.store.errors import ConflictError, FencedError, SnapshotError
from tests.fixtures import MakeProject
from tests.root_rig import KINDS, opened, root_of


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest) -> str:
    return root_of(request, request.param)


@pytest.fixture
def folder(root: str, tmp_path: Path) -> Path:
    """Of a root with nothing in it."""
    return opened(root, tmp_path)


@pytest.fixture
def storage(folder: Path) -> Storage:
    return storage_of(folder)


def counted(data: bytes | None) -> bytes:
    return b"%d" % (1 + int(data or b"0"))


def test_a_record_is_created_once_swapped_replaced_and_removed(
    storage: Storage, folder: Path
) -> None:
    path = folder / "view" / "notes" / "a.json"
    with pytest.raises(FileNotFoundError):
        storage.read(path)
    storage.create(path, b"1")
    with pytest.raises(FileExistsError):
        storage.create(path, b"2")
    for durably in (True, False):
        storage.update(path, counted, durably=durably)

    def refuses(_: bytes | None) -> bytes:
        raise SnapshotError("no")

    with pytest.raises(SnapshotError, match=r"^no$"):
        storage.update(path, refuses)
    assert storage.read(path) == b"3"
    storage.delete(path)
    with pytest.raises(FileNotFoundError):
        storage.read(path, immutable=True)
    storage.update(path, counted)
    storage.write(path, b"whole")
    assert storage.read(path) == b"whole"
    for _ in range(2):
        storage.delete(path)
    assert storage.names(path.parent) in ([], [".lock"])


def test_a_folder_is_listed_measured_and_removed(storage: Storage, folder: Path) -> None:
    view = folder / "view"
    assert (storage.names(view), storage.items(view), storage.logs(view, "log")) == ([], [], [])
    assert (storage.stat(view / "a"), storage.changed_ns(view), storage.size_bytes(view)) == (
        *(None, None, 0),
    )
    before_ns = time.time_ns()
    storage.create(view / "a", b"123")
    storage.write(view / "below" / "b", b"45")
    (item,) = storage.items(view)
    assert (item.path, item.size_bytes) == (view / "a", 3)
    # an object store's clock has whole seconds
    assert abs(item.modified_ns - before_ns) < 60e9
    stat = storage.stat(view / "a")
    assert stat is not None
    assert stat[:3] == item[:3]
    assert (sorted(storage.names(view)), storage.size_bytes(view)) == (["a", "below"], 5)
    changed = storage.changed_ns(view)
    storage.create(view / "c", b"")
    assert changed is not None
    assert storage.changed_ns(view) != changed
    storage.delete_all(view / "below")
    assert sorted(storage.names(view)) == ["a", "c"]
    for _ in range(2):
        storage.delete_all(view)
    assert (storage.names(view), storage.size_bytes(view)) == ([], 0)


def test_files_are_had_where_they_are_read(storage: Storage, folder: Path) -> None:
    path = folder / "view" / "data" / "run" / "part.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"rows")
    storage.put([path])
    digest = "0ab29fa15e9c1d0e8d2d6b7d1bc27e8b1d7a2ab1d5fbcd7a1df1b0a3c5b5e9e5"
    assert storage.stat(path) is not None
    if storage.local:
        # what is here is all there is
        assert not storage.fetch([File(path, 4, digest)], again=True)
        assert path.read_bytes() == b"rows"
        return
    for change in (lambda: path.unlink(), lambda: path.write_bytes(b"row")):
        change()
        assert storage.fetch([File(path, 4, "")])
        assert path.read_bytes() == b"rows"
    path.write_bytes(b"wors")
    assert storage.fetch([File(path, 4, "")], again=True)
    assert path.read_bytes() == b"rows"
    path.unlink()
    with pytest.raises(SnapshotError, match="differs from its checksum"):
        storage.fetch([File(path, 4, digest)])
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        storage.fetch([File(path.with_name("none"), 4, "")])


def test_a_log_is_added_to_listed_and_ended(storage: Storage, folder: Path) -> None:
    data = folder / "view" / "data"
    log, other = data / "run1" / "log", data / "run2" / "log"
    with pytest.raises(FileNotFoundError):
        storage.appended(log)
    for path in (log, other):
        storage.append(path, b"head\n", first=True)
    for line in (b"one\n", b"two\n"):
        storage.append(log, line)
    assert storage.appended(log) == b"head\none\ntwo\n"
    assert storage.appended(log, first=True).startswith(b"head\n")
    assert [(item.path, item.size_bytes) for item in storage.logs(data, "log")] == [
        *((log, 13), (other, 5)),
    ]
    storage.end_log(log)
    assert [item.path for item in storage.logs(data, "log")] == [other]
    with pytest.raises(FileNotFoundError):
        storage.appended(log)


def test_to_look_whether_it_can_be_written_leaves_nothing(storage: Storage, folder: Path) -> None:
    storage.create(folder / "view" / "a", b"")
    storage.check_writable(folder)
    assert (storage.names(folder), storage.names(folder / "view")) == (["view"], ["a"])
    assert storage.shown(folder / "view" / "a").endswith("/view/a")


def test_a_root_is_known_by_its_identity(folder: Path) -> None:
    assert known_identity(folder) == ""
    identity = identity_of(folder)
    assert identity_of(folder) == known_identity(folder) == identity


def test_one_holds_a_lease_and_a_second_is_refused_at_once(folder: Path) -> None:
    notes = folder / "view" / "notes"
    with take(notes, "run", "first", ttl_s=6) as first:
        began = time.monotonic()
        with pytest.raises(ConflictError, match=r"'run' is held \(by first, process \d+\)"):
            take(notes, "run", "second", ttl_s=6)
        assert time.monotonic() - began < 2
        first.check()
        assert is_held(notes, "run")
    assert not is_held(notes, "run")
    with take(notes, "run", "second", ttl_s=6) as second:
        found = holder(notes, "run")
        assert found is not None
        assert (found.holder, found.fence) == ("second", second.record.fence)
        assert second.record.fence == first.record.fence + 1
        with pytest.raises(FencedError, match="lost its lease 'run' to second"):
            first.check()


def test_a_project_lives_there(root: str, make_project: MakeProject) -> None:
    """From its first run to its removal."""

    def project(rows: list[tuple[int, float]]) -> None:
        make_project(rows, project={"root": root, "online": "table:./online"}).run()

    project([(1, 1.0), (2, 2.0)])
    project([(1, 1.0), (3, 3.5)])
    scene = make_project(project={"root": root, "online": "table:./online"})
    assert scene.served([1, 2, 3]) == (2, [2.0, None, 7.0])
    scene.rollback()
    assert scene.served([1, 2, 3]) == (1, [2.0, 4.0, None])
    assert scene.cli("resume", "numbers") == 0
    line = scene.status()
    assert (line["attention"], line["online"]) == ([], True)
    assert scene.numbers() == [1, 2]
    drop(scene, "numbers", data=True)
    assert "numbers" not in scene.offline.views()
