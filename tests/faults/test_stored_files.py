"""What is stored is believed once its checksum was compared: bits of files beside the parts, what
cannot be read now, and a rollback that fails half-way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

from precompute.jobs.ops.retention import gc
from precompute.jobs.ops.status import project_status
from precompute.jobs.ops.verify import verify
from precompute.store.disk import crashpoint
from precompute.store.errors import PrecomputeError, SnapshotError, UnreadableError
from precompute.store.offline.segment import Part, dead_rows
from precompute.store.offline.stored_file import check_file
from precompute.store.offline.view_store import OfflineStore
from tests.faults import nth_reads, stored_bits
from tests.faults.conftest import MakeScene
from tests.faults.harness import VIEW, FaultScene, act, check_readers, recover
from tests.faults.stored_bits import Stored


@pytest.fixture(scope="module")
def stored(memory_folder: Path) -> Iterator[tuple[Stored, Path]]:
    """The prepared views, and where their copies lie."""
    folder = memory_folder / "stored"
    folder.mkdir()
    with stored_bits.every_look_reads_all():
        yield stored_bits.prepare(folder)


def flip(path: Path) -> None:
    """One bit in its middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


# ---- a bit


@pytest.mark.parametrize("number", range(6))
def test_a_flipped_bit_beside_the_parts_is_told_and_believed_by_nobody(
    number: int, stored: tuple[Stored, Path]
) -> None:
    """``python -m tests.faults.stored_bits`` tries hundreds."""
    prepared, stage = stored
    files = prepared.beside()
    kinds = {"all-kills.parquet", "kills.parquet", "rejected.parquet"}
    assert kinds == {path.name for path in files if path.suffix != ".json"}
    bits = list(stored_bits.drawn(files, 6, seed=20))
    path, at, bit, way = bits[number]
    assert stored_bits.try_bit(prepared, stage, path, at, bit, way).wrong == []


def damaged(stored: tuple[Stored, Path], view: str, name: str, which: int = -1) -> Stored:
    """A copy whose file of that name is damaged."""
    prepared, stage = stored
    files = [
        path.relative_to(prepared.folder)
        for path in prepared.beside()
        if path.name == name and path.relative_to(prepared.folder).parts[1] == view
    ]
    scene = prepared.copied(stage)
    flip(stage / files[which])
    return scene


def ways_out(scene: Stored, view: str) -> tuple[list[dict[int, float]], dict[int, float]]:
    return scene.wanted(view), scene.served(view)


@pytest.mark.parametrize(
    ("view", "name"), [("deltas", "kills.parquet"), ("days", "all-kills.parquet")]
)
def test_the_messages_name_ways_out_that_lead_out(
    view: str, name: str, stored: tuple[Stored, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["run", view], ["run", view, "--full"], ["rollback", view]):
        scene = damaged(stored, view, name)
        assert scene.project is not None
        assert scene.project.cli("verify", view) == 1
        said = capsys.readouterr().out
        assert name in said
        assert f"precompute run {view}" in said
        assert f"precompute rollback {view}" in said
        before = scene.served(view)
        assert scene.project.cli(*command) == 0
        states = scene.wanted(view)
        wanted = states if command[0] == "rollback" else states[-1:]
        assert scene.served(view) in wanted
        assert scene.served(view) != before
        assert not scene.project.faults(view)


def test_a_partition_whose_kills_are_damaged_brings_no_replaced_row_back(
    stored: tuple[Stored, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows stay as they are served, until it is computed again."""
    scene = damaged(stored, "days", "kills.parquet", 0)
    project, before = scene.project, scene.served("days")
    assert project is not None
    (line,) = (line for line in project_status(project) if line["view"] == "days")
    assert "kills.parquet differs from its checksum" in line["attention"][0]
    assert [check.check for check in verify(project, "days") if not check.ok] == ["account"]
    assert project.cli("reconcile", "days") == 1
    day = stored_bits.DAYS[0].date().isoformat()
    assert f"precompute run days --partition {day}T00:00Z" in capsys.readouterr().err
    assert project.cli("run", "days") == 1
    assert f"precompute run days --partition {day}T00:00Z" in capsys.readouterr().err
    assert scene.served("days") == before
    assert project.cli("run", "days", "--partition", day) == 0
    assert scene.served("days") in scene.wanted("days")
    assert project.cli("run", "days") == 0
    assert scene.served("days") == scene.wanted("days")[-1]
    assert not project.faults("days")


def test_damaged_rejected_rows_are_tried_again(stored: tuple[Stored, Path]) -> None:
    scene = damaged(stored, "spoilt", "rejected.parquet")
    project = scene.project
    assert project is not None
    # nothing changed since
    rows = scene.states["spoilt"][-2]
    spoilt = dict.fromkeys(range(0, 40, 4), -1.0) | {2: -2.0}
    keys = sorted({*rows, *spoilt})
    scene._write("spoilt", keys, [(rows | spoilt)[key] for key in keys])
    report = project.run("spoilt")
    assert (report.status, report.counts["rejected"], report.counts["written"]) == (
        "published",
        11,
        0,
    )
    assert not project.faults("spoilt")
    assert project.run("spoilt").status == "current"


def test_a_file_is_compared_once_and_again_when_it_changes(tmp_path: Path) -> None:
    from precompute.store.disk import durable_file
    from precompute.store.offline import stored_file

    path = tmp_path / "kills.parquet"
    path.write_bytes(b"whole")
    part = Part("kills.parquet", 1, 5, durable_file.sha256_of(path))
    file = part.in_folder(tmp_path)
    with mock.patch.object(stored_file, "sha256_of", wraps=durable_file.sha256_of) as hashed:
        check_file(file)
        check_file(file)
        assert hashed.call_count == 1
        check_file(file, again=True)
        assert hashed.call_count == 2
        path.write_bytes(b"whol!")
        os.utime(path, ns=(1, 1))
        with pytest.raises(SnapshotError, match="differs from its checksum"):
            check_file(file)
        path.write_bytes(b"short")
        path.write_bytes(b"")
        with pytest.raises(SnapshotError, match="has 0 bytes instead of 5"):
            check_file(file)
        path.unlink()
        with pytest.raises(SnapshotError, match="is missing"):
            check_file(file)


@pytest.mark.parametrize("row", [-1, 3, 2**40])
def test_a_row_that_no_part_has_names_the_file(row: int, tmp_path: Path) -> None:
    import numpy as np

    parts = [Part("data/a/part.parquet", 3, 1, "")]
    path = tmp_path / "kills.parquet"
    named = {"data/a/part.parquet": np.array([0, row])}
    with pytest.raises(SnapshotError, match=r"kills\.parquet names a row of part data/a/part"):
        dead_rows(parts, [path], lambda _: named)


RAISED = [
    OSError("Corrupt snappy compressed data"),
    KeyError("part"),
    IndexError("list index out of range"),
    ValueError("negative dimensions"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    OverflowError("too large"),
    TypeError("no type"),
]


@pytest.mark.parametrize("raised", RAISED, ids=lambda exc: type(exc).__name__)
def test_whatever_a_parser_raises_names_the_file(
    raised: Exception, delta_to_come: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = delta_to_come()
    recover(scene)
    store = scene.store
    snapshot = store.snapshot(3)

    def refused(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(pq, "ParquetFile", refused)
    readers: list[Callable[[], Any]] = [
        lambda: store.layers(snapshot),
        lambda: list(store.batches(store.snapshot(2))),
        lambda: store.sample(store.snapshot(2), 3),
    ]
    for read in readers:
        with pytest.raises(SnapshotError, match=r"\.parquet .*cannot be read"):
            read()


def test_a_damaged_part_whose_length_wants_all_memory_is_damaged(
    delta_to_come: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = delta_to_come()
    snapshot = scene.store.snapshot(2)
    flip(scene.view_folder / snapshot.parts[0].path)
    for exc, error in (
        (MemoryError(), SnapshotError),
        (OSError(errno.EMFILE, "x"), UnreadableError),
    ):

        def refused(*_: Any, exc: Exception = exc, **__: Any) -> None:
            raise exc

        with monkeypatch.context() as patch:
            patch.setattr(pq, "ParquetFile", refused)
            with pytest.raises(error):
                list(scene.store.batches(snapshot))


def test_no_damaged_value_is_copied_into_a_snapshot_or_handed_out(
    second_delta_to_come: MakeScene,
) -> None:
    """A part's bit that parses: its rows are compared before they are compacted, exported, read as
    of a time, or computed from by another view."""
    from precompute.jobs.ops.history import export
    from precompute.store.history import read
    from tests.faults.harness import small_chunks

    scene = second_delta_to_come()
    number = scene.store.numbers()[-1]
    snapshot = scene.store.snapshot(number)
    path = scene.view_folder / snapshot.parts[0].path
    # the last byte of a page of values: parsed as another number
    flip_a_value(path)
    with pytest.raises(SnapshotError, match="differs from its checksum"):
        export(scene.project(), VIEW, scene.folder / "out.parquet")
    with pytest.raises(SnapshotError, match="differs from its checksum"):
        read(scene.store)
    with small_chunks(MOST_SHARE=0.0):
        with pytest.raises(PrecomputeError, match="damaged"):
            scene.run()
        assert scene.run().status == "published"
    check_readers(scene)


def flip_a_value(path: Path) -> None:
    """A bit of a part such that it parses, with other rows."""
    whole = path.read_bytes()
    rows = pq.read_table(path)
    for at in range(4, len(whole) - 400, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with contextlib.suppress(Exception):
            if pq.read_table(path) != rows:
                return
    raise AssertionError("no such bit")


# ---- what cannot be read now


@pytest.fixture(scope="module")
def unread(memory_folder: Path) -> Path:
    """The folder of the prepared scene of :mod:`tests.faults.nth_reads`."""
    folder = memory_folder / "unread"
    nth_reads.made(folder / "stage")
    (folder / "stage").rename(folder / "prepared")
    return folder


@pytest.mark.parametrize("command", nth_reads.COMMANDS)
def test_a_read_that_fails_decides_nothing(command: str, unread: Path) -> None:
    """``python -m tests.faults.nth_reads`` fails each of them."""
    reads = nth_reads.tried(nth_reads.copied(unread), command, 0, errno.EIO).reads
    assert reads > 20
    for step, number in enumerate([errno.EIO, errno.EMFILE, errno.EACCES, errno.EIO], start=1):
        nth = reads * step // 5
        assert nth_reads.tried(nth_reads.copied(unread), command, nth, number).wrong == []


@contextlib.contextmanager
def unreadable(path: Path, number: int = errno.EIO) -> Iterator[None]:
    """Within, that file is there, and cannot be read."""
    opened = io.open

    def refusing(file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
        if str(file) == str(path) and "r" in mode:
            raise OSError(number, os.strerror(number), str(file))
        return opened(file, mode, *more, **named)

    with mock.patch.object(io, "open", refusing):
        yield


def manifest(scene: FaultScene, number: int) -> Path:
    return scene.store.manifest_path(number)


RECORDS: dict[str, Callable[[FaultScene], Path]] = {
    "manifest": lambda scene: manifest(scene, 2),
    "newest manifest": lambda scene: manifest(scene, 4),
    "newest event": lambda scene: max((scene.view_folder / "log").glob("0*.json")),
    "state": lambda scene: max((scene.view_folder / "log").glob("state-*.json")),
    "report": lambda scene: scene.store.runs.path(scene.store.runs.ids()[0]),
}


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOMEM])
@pytest.mark.parametrize("record", RECORDS)
def test_a_record_unreadable_for_now_is_not_damaged(record: str, number: int, unread: Path) -> None:
    """Each of its readers says so, and no other view's status is stopped."""
    scene = nth_reads.copied(unread)
    store = scene.store
    store.mark_bad(1, "a test")
    # what was noted of the manifests would do without them
    (scene.view_folder / "notes" / "catalog.jsonl").unlink()
    path, log = RECORDS[record](scene), OfflineStore(store.offline.root).view(VIEW).log
    readers: dict[str, list[Callable[[], Any]]] = {
        "manifest": [lambda: store.snapshot(2), store.catalog, store.damage],
        "newest manifest": [lambda: store.snapshot(4), store.catalog],
        "newest event": [log.publishings, log.damage],
        "state": [log.live, log.readable_live, log.bad, log.held],
        "report": [store.runs.reports, store.runs.last, lambda: store.runs.read(path.stem)],
    }
    with unreadable(path, number):
        for read in readers[record]:
            with pytest.raises(UnreadableError, match=f"{path.name} cannot be read: "):
                read()
    for read in readers[record]:
        read()


def test_a_journal_unreadable_for_now_is_no_torn_one(unread: Path) -> None:
    """Else its chunks would be computed, and paid, once more, or collected as another partition's
    are."""
    scene = nth_reads.copied(unread)
    journals = scene.store.journals
    journals.begin("20260101T000000.000000Z-aaaaaa", "recipe", "a partition")
    path = scene.view_folder / "data" / "20260101T000000.000000Z-aaaaaa" / "journal.jsonl"
    with unreadable(path):
        for read in (journals.partitions, lambda: journals.unfinished("recipe", "a partition")):
            with pytest.raises(UnreadableError, match=r"journal\.jsonl cannot be read"):
                read()
    assert list(journals.partitions().values()) == ["a partition"]


def test_a_rollback_goes_no_step_too_far_and_a_publishing_is_not_current(unread: Path) -> None:
    scene = nth_reads.copied(unread)
    with unreadable(manifest(scene, 2)):
        assert scene.project().cli("rollback", VIEW) == 1
    ref = scene.store.log.live()
    assert (ref and ref.snapshot, scene.store.log.bad()) == (3, {})
    with unreadable(manifest(scene, 4)):
        assert scene.project().cli("publish", VIEW) == 1
    assert scene.project().cli("publish", VIEW) == 0
    ref = scene.store.log.live()
    assert ref is not None
    assert ref.snapshot == 4


def test_nothing_is_collected_while_a_manifest_cannot_be_read(unread: Path) -> None:
    scene = nth_reads.copied(unread)
    (scene.view_folder / "notes" / "catalog.jsonl").unlink()
    orphan = scene.view_folder / "data" / "20260101T000000.000000Z-aaaaaa" / "part-00001.parquet"
    orphan.parent.mkdir()
    orphan.write_bytes(b"of a run that was killed")
    os.utime(orphan, (1, 1))
    with unreadable(manifest(scene, 2)):
        garbage, failures = gc(scene.project(), forgotten=None, dry_run=False)
    assert garbage == []
    (failure,) = failures
    assert "cannot be read: Input/output error" in failure
    assert orphan.exists()
    garbage, failures = gc(scene.project(), forgotten=None, dry_run=False)
    assert (failures, [one.path for one in garbage]) == ([], [orphan])


def test_a_lock_that_fails_is_no_traceback(
    unread: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The account's: each looks for itself then."""
    scene, locked = nth_reads.copied(unread), fcntl.flock

    def failing(file: Any, how: int) -> None:
        if getattr(file, "name", "").endswith(".account.lock"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        locked(file, how)

    monkeypatch.setattr(fcntl, "flock", failing)
    assert scene.project().cli("verify", VIEW) == 0
    assert "account" in capsys.readouterr().out


# ---- a rollback that fails


@pytest.mark.parametrize("point", ["log.write"])
def test_a_rollback_that_fails_half_way_marks_nothing(point: str, unread: Path) -> None:
    scene = nth_reads.copied(unread)
    crashpoint.arm(point, 1, "eio")
    try:
        assert scene.project().cli("rollback", VIEW) == 1
    finally:
        crashpoint.disarm()
    ref = scene.store.log.live()
    assert (ref and ref.snapshot, scene.store.log.bad()) == (3, {})
    assert act(scene, "rollback") == "published"
    ref = scene.store.log.live()
    assert (ref and ref.snapshot, [*scene.store.log.bad()]) == (2, [3])


def test_a_rollback_whose_online_store_refuses_marks_nothing(
    unread: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precompute.store.errors import OnlineStoreError
    from precompute.store.online.table_store import TableStore

    scene = nth_reads.copied(unread)

    def refused(*_: Any) -> None:
        raise OnlineStoreError("full")

    with monkeypatch.context() as patch:
        patch.setattr(TableStore, "segments", refused)
        with pytest.raises(OnlineStoreError, match="full"):
            act(scene, "rollback")
    assert scene.store.log.bad() == {}


def test_a_rollback_to_what_builds_on_what_is_left_marks_nothing(
    unread: Path,
) -> None:
    scene = nth_reads.copied(unread)
    with pytest.raises(PrecomputeError, match="snapshot 3 is marked bad"):
        act(scene, "rollback", to=4)
    ref = scene.store.log.live()
    assert (ref and ref.snapshot, scene.store.log.bad()) == (3, {})
