"""What only table files have to stand, beside the contract."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precompute.store.disk.durable_file import replace_durably
from precompute.store.errors import (
    ConflictError,
    DamagedPointerError,
    OnlineStoreError,
    PrecomputeError,
)
from precompute.store.online.table_file import TableFile
from precompute.store.online.table_store import TableStore
from tests.online import (
    DAMAGED_POINTERS,
    TABLE,
    Stopped,
    load,
    named,
    numbers,
    pointer,
    publish,
    segment,
    torn,
    values,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "online"


def segment_file(folder: Path, number: int, view: str = "numbers") -> Path:
    return folder / view / f"{named(number)}.table"


def test_the_inode_of_the_pointer_that_is_known_is_given_to_no_other(folder: Path) -> None:
    """It is what a flip is seen by, beside a clock that ticks every 4 ms."""
    reader, store = TableStore(folder), TableStore(folder)
    publish(store, 1, TABLE)
    assert reader.known("numbers") is None
    assert values(reader.read("numbers", [b"a"])) == [b"1"]
    inode = (folder / "numbers" / "live.json").stat().st_ino
    publish(store, 2, {b"a": b"2"})
    held = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "numbers/live.json (deleted)" in line
    ]
    assert str(inode) in [line[4] for line in held]
    assert values(reader.read("numbers", [b"a"])) == [b"2"]


def test_a_table_folder_holds_segments_pointer_and_lock_alone(folder: Path) -> None:
    store = TableStore(folder)
    assert (store.views(), numbers(store), folder.exists()) == ([], [], False)
    publish(store, 1, TABLE)
    with pytest.raises(Stopped):
        store.load("numbers", segment(2), torn(TABLE, Stopped()))
    expected = {"numbers", "numbers/.lock", "numbers/live.json", f"numbers/{named(1)}.table"}
    assert {str(p.relative_to(folder)) for p in folder.rglob("*")} == expected
    assert json.loads((folder / "numbers" / "live.json").read_bytes())["epoch"] == 1


def test_another_views_pointer_in_its_place_is_damage(folder: Path) -> None:
    store = TableStore(folder)
    publish(store, 1, TABLE)
    shutil.copytree(folder / "numbers", folder / "others")
    with pytest.raises(DamagedPointerError, match="it is another view's"):
        TableStore(folder).live("others")


def test_a_reader_that_two_publishings_overtake_reads_the_second(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader, slept = TableStore(folder), TableStore(folder), iter([True])
    publish(writer, 1, TABLE)
    found = TableStore._pointer

    def pointer_of(store: TableStore, view: str) -> Any:
        opened = found(store, view)
        if store is reader and next(slept, False):
            publish(writer, 2, {b"a": b"2"})
            writer.drop(view, named(1))
        return opened

    monkeypatch.setattr(TableStore, "_pointer", pointer_of)
    assert values(reader.read("numbers", [b"a"])) == [b"2"]


def test_a_flip_that_is_overtaken_while_it_reads_ahead_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other, slept = TableStore(folder), TableStore(folder), iter([True])
    for number in (1, 2):
        load(store, number, TABLE)
    warm = TableFile.warm

    def slow(file: TableFile, limit_bytes: int) -> int:
        if next(slept, False):
            other.flip(pointer(2))
        return warm(file, limit_bytes)

    monkeypatch.setattr(TableFile, "warm", slow)
    with pytest.raises(ConflictError, match="a later publish won"):
        store.flip(pointer(1))
    assert store.live("numbers") == pointer(2)


@pytest.mark.parametrize("damage", ["removed", "emptied", "garbage", "another's", "a folder"])
def test_a_live_segment_that_is_gone_or_damaged_is_an_error(folder: Path, damage: str) -> None:
    publish(TableStore(folder), 1, TABLE)
    path = segment_file(folder, 1)
    size = path.stat().st_size
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage == "another's":
        load(TableStore(folder), 2, TABLE)
        segment_file(folder, 2).rename(path)
    elif damage != "removed":
        path.write_bytes({"emptied": b"", "garbage": b"garbage!" * (size // 8)}[damage])
    with pytest.raises(OnlineStoreError, match="publish the view again"):
        TableStore(folder).read("numbers", [b"a"])


def test_publishing_again_mends_a_segment_that_is_gone(folder: Path) -> None:
    """It is the remedy that the error names; a publish looks first at what is live."""
    publish(TableStore(folder), 1, TABLE)
    segment_file(folder, 1).unlink()
    store = TableStore(folder)
    assert store.live("numbers") == pointer(1)
    publish(store, 2, {b"a": b"again"})
    assert values(TableStore(folder).read("numbers", [b"a"])) == [b"again"]


CUT = """
import os, sys
from precompute.store.errors import OnlineStoreError
from pathlib import Path
from precompute.store.online.table_store import TableStore
folder, path, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
os.truncate(path, size)
keys = [b"%05d" % i for i in range(3000)]
for read in (lambda s: s.read("numbers", keys), lambda s: s.read_segments("numbers", [path.stem], keys)):
    try:
        read(TableStore(folder))
        print("read")
    except OnlineStoreError:
        print("refused")
"""


@pytest.mark.parametrize("part", [0.02, 0.99], ids=["the first pages", "all but the last page"])
def test_a_segment_cut_short_is_an_error_and_no_end_of_the_process(
    folder: Path, part: float
) -> None:
    """In a process of its own: reading a map past the end of its file is a bus error."""
    publish(TableStore(folder), 1, {b"%05d" % i: b"x" * 200 for i in range(3000)})
    path = segment_file(folder, 1)
    size = int(path.stat().st_size * part) // 4096 * 4096
    command = [sys.executable, "-c", CUT, str(folder), str(path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["refused", "refused"]), done.stderr


@pytest.mark.parametrize("damaged", DAMAGED_POINTERS, ids=lambda d: repr(d[:9]))
def test_a_damaged_pointer_file_is_refused(folder: Path, damaged: bytes) -> None:
    store = TableStore(folder)
    publish(store, 1, TABLE)
    (folder / "numbers" / "live.json").write_bytes(damaged)
    for reader in (store, TableStore(folder)):
        for use in (reader.live, lambda view, s=reader: s.read(view, [b"a"])):
            with pytest.raises(OnlineStoreError, match=r"damaged.*publish the view again"):
                use("numbers")


def test_a_flipped_bit_in_a_pointer_file_is_an_error_and_no_fresh_row(folder: Path) -> None:
    store = TableStore(folder)
    publish(store, 1, TABLE)
    path = folder / "numbers" / "live.json"
    whole = path.read_bytes()
    for digit, other in (
        (b'"ttl_s": 1', b'"ttl_s": 9'),
        (b'"renewed_at_us": 0', b'"renewed_at_us": 4'),
    ):
        assert whole.count(digit) == 1
        replace_durably(path, whole.replace(digit, other))
        for use in (store.live, lambda view: store.read(view, [b"a"])):
            with pytest.raises(
                DamagedPointerError, match="its bytes are not those that were written"
            ):
                use("numbers")
    replace_durably(path, whole)
    assert values(store.read("numbers", [b"a"])) == [TABLE[b"a"]]


FULL_DISK = """
import resource, sys
from precompute.store.errors import PrecomputeError
from precompute.store.online.table_store import TableStore
from tests.online import batch_of, pointer, segment
store = TableStore(sys.argv[1])
rows = [batch_of({b"%05d" % i: b"x" * 200 for i in range(3000)})]
for size in (0, 10, 4096, 100_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    for action in [lambda: store.load("numbers", segment(2), rows)] + ([lambda: store.flip(pointer(1))] if size < 100 else []):
        try:
            action()
            print("done")
        except PrecomputeError as exc:
            print(f"{type(exc).__name__}: {exc}")
"""


def test_a_full_disk_leaves_what_is_live_and_no_files(folder: Path) -> None:
    store = TableStore(folder)
    publish(store, 1, TABLE)
    before = sorted(folder.rglob("*"))
    command = [sys.executable, "-c", FULL_DISK, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.splitlines()
    assert len(outcomes) == 6
    for outcome in outcomes:
        assert outcome.startswith("OnlineStoreError: ")
        assert "live" in outcome
        assert "untouched" in outcome
    assert sorted(folder.rglob("*")) == before
    for reader in (store, TableStore(folder)):
        assert (reader.live("numbers"), values(reader.read("numbers", list(TABLE)))) == (
            pointer(1),
            list(TABLE.values()),
        )


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = TableStore(tmp_path / "file" / "online")
    uses: list[Callable[[], Any]] = [lambda: load(store, 1, TABLE), lambda: store.flip(pointer(1))]
    for use in uses:
        with pytest.raises(PrecomputeError):
            use()
    for read in (store.live, lambda view: store.read(view, [b"a"])):
        with pytest.raises(OnlineStoreError):
            read("numbers")


def test_a_load_leaves_alone_what_another_process_is_writing(folder: Path) -> None:
    """A publishing that a rollback has fenced begins its own load, and finds the rollback's."""
    store = TableStore(folder)
    publish(store, 1, TABLE)
    dead = subprocess.Popen(["true"])
    dead.wait()
    theirs = folder / "numbers" / f".{named(8)}.table.{os.getppid()}.tmp"
    left = folder / "numbers" / f".{named(6)}.table.{dead.pid}.tmp"
    for path in (theirs, left):
        path.write_bytes(b"half")
    load(store, 7, TABLE)
    assert (theirs.exists(), left.exists(), numbers(store)) == (True, False, [1, 7])
