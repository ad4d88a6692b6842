"""The catalog says what the manifests say, whatever became of its file, and reads each of them
once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precompute.store.disk.lease import take
from precompute.store.disk.record import replace
from precompute.store.offline.segment import Segment, kills_table
from precompute.store.offline.snapshot import Catalog, Counts, Entry, Snapshot
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import OfflineStore, ViewStore
from tests.store.test_offline_store import TABLE, VIEW

DAYS = ("2026-01-01T00:00Z/2026-01-02T00:00Z", "2026-01-02T00:00Z/2026-01-03T00:00Z")


@pytest.fixture
def store(tmp_path: Path) -> ViewStore:
    """Six snapshots of two partitions, the last a delta."""
    store = OfflineStore(tmp_path / "root").view("numbers")
    take(store.leases, "publish", "a test").release()  # as every writer does
    for number in range(1, 7):
        commit(store, f"run{number}", DAYS[number % 2], over=2 if number == 6 else None)
    return store


def commit(store: ViewStore, run: str, partition: str | None, over: int | None = None) -> Snapshot:
    part = store.write_part(run, "part-00000.parquet", TABLE)
    counts = Counts(6, 3, unchanged=3) if over else Counts(3, 3)
    below = () if over is None else store.snapshot(over).segments
    made = Snapshot(
        VIEW,
        run,
        "model",
        counts,
        (*below, Segment(0, run, "recipe", 7, (part,))),
        None,
        "2026-01-01T00:00:00+00:00",
        None,
        None,
        partition=partition,
    )
    return store.commit(made)


def truth(store: ViewStore) -> dict[int, Entry]:
    return {number: Entry.of(number, store.snapshot(number)) for number in store.numbers()}


def catalog_of(store: ViewStore) -> Catalog:
    """As another process reads it."""
    return OfflineStore(store.offline.root).view("numbers").catalog()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the manifests that were parsed."""
    seen: list[int] = []
    original = Snapshot.from_bytes

    def counting(data: bytes, where: str, segment_of: Any) -> Snapshot:
        seen.append(int(Path(where).stem))
        return original(data, where, segment_of)

    monkeypatch.setattr(Snapshot, "from_bytes", counting)
    return seen


def path_of(store: ViewStore) -> Path:
    return store.folder / "notes" / "catalog.jsonl"


def test_it_says_what_the_manifests_say_and_parses_none_that_it_knows(
    store: ViewStore, parsed: list[int]
) -> None:
    expected = truth(store)
    names = {number: store.snapshot(number).names for number in (1, 2, 6)}
    assert [(e.partition, e.beside, e.segments) for e in (expected[1], expected[6])] == [
        (DAYS[1], (), names[1]),
        (DAYS[0], (), names[6]),
    ]
    assert names[6][:1] == names[2]
    parsed.clear()
    catalog = catalog_of(store)
    assert catalog.entries == expected
    assert catalog.files([expected[6]]) == {
        "data/run2/part-00000.parquet",
        "data/run6/part-00000.parquet",
        *(f"segments/{name}.json" for name in names[6]),
    }
    assert parsed == []
    path_of(store).unlink()  # as of an older version, or lost
    assert catalog_of(store).entries == expected
    assert parsed == [1, 2, 3, 4, 5, 6]
    parsed.clear()
    assert (catalog_of(store).entries, parsed) == (expected, [])


def test_a_process_parses_its_lines_once_and_sees_all_that_changes(
    store: ViewStore, parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.catalog().entries == truth(store)
    parsed.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            "precompute.store.offline.snapshot._lines",
            lambda _: pytest.fail("its lines are parsed once more"),
        )
        assert list(store.catalog().entries) == [1, 2, 3, 4, 5, 6]
        (store.manifest_path(3)).unlink()
        assert list(store.catalog().entries) == [1, 2, 4, 5, 6]
    assert parsed == []
    commit(OfflineStore(store.offline.root).view("numbers"), "another", None)
    assert store.catalog().entries == truth(store)
    manifest = store.manifest_path(7)
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert list(store.catalog().damaged) == [7]


def test_of_a_partition_only_its_own_newest_manifest_is_read(
    store: ViewStore, parsed: list[int]
) -> None:
    for day, number in ((DAYS[1], 5), (DAYS[0], 6)):
        parsed.clear()
        newest = Standing(store).newest(day)
        assert newest is not None
        assert newest.number == number
        assert set(parsed) <= {number, 2}
    parsed.clear()
    assert Standing(store).newest("2030-01-01T00:00Z/2030-01-02T00:00Z") is None
    assert parsed == []


def test_whatever_bytes_its_file_has_it_is_right(store: ViewStore) -> None:
    path, expected = path_of(store), truth(store)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        for data in (bytes(damaged), whole[:at]):
            path.write_bytes(data)
            assert catalog_of(store).entries == expected
            assert catalog_of(store).entries == expected  # and with what was appended to that
    path.write_bytes(os.urandom(1000))
    assert catalog_of(store).entries == expected


def test_a_number_that_was_given_twice_is_the_later_one(store: ViewStore) -> None:
    manifest = store.manifest_path(6)
    manifest.unlink()  # by hand
    assert 6 not in catalog_of(store).entries
    line = path_of(store).read_bytes()
    assert commit(store, "again", DAYS[1]).number == 6
    path_of(store).write_bytes(line)  # the commit was killed before it wrote its own
    assert catalog_of(store).entries == truth(store)
    newest = Standing(store).newest(DAYS[1])
    assert newest is not None
    assert newest.run == "again"


def test_a_damaged_manifest_is_reported_and_known_by_what_it_was(store: ViewStore) -> None:
    manifest, expected = store.manifest_path(3), truth(store)
    stat, data = manifest.stat(), bytearray(manifest.read_bytes())
    data[40] ^= 1
    manifest.write_bytes(data)
    catalog = catalog_of(store)
    assert (list(catalog.entries), list(catalog.damaged)) == ([1, 2, 4, 5, 6], [3])
    assert "its checksum does not match" in str(catalog.damaged[3])
    os.utime(
        manifest, ns=(stat.st_atime_ns, stat.st_mtime_ns)
    )  # a bit that flips by itself changes no time
    assert catalog_of(store).entries == expected
    assert list(store.damage()) == [3]


def test_one_that_came_and_was_damaged_since_is_known_by_its_line(store: ViewStore) -> None:
    assert list(store.catalog().entries) == [1, 2, 3, 4, 5, 6]
    commit(OfflineStore(store.offline.root).view("numbers"), "another", None)
    manifest, expected = store.manifest_path(7), truth(store)
    stat, data = manifest.stat(), bytearray(manifest.read_bytes())
    data[40] ^= 1
    manifest.write_bytes(data)
    os.utime(manifest, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert store.catalog().entries == expected


def test_lines_of_removed_manifests_go_once_they_are_many(
    store: ViewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precompute.store.offline.snapshot._SPARE_LINES", 1)
    before = path_of(store).read_bytes()
    for number in (1, 3, 4, 5):
        (store.manifest_path(number)).unlink()
    assert catalog_of(store).entries == truth(store)
    assert len(path_of(store).read_bytes()) < len(before) / 2
    assert catalog_of(store).entries == truth(store)


def test_without_space_or_rights_it_is_derived_every_time(store: ViewStore) -> None:
    path_of(store).unlink()
    path_of(store).mkdir()
    assert catalog_of(store).entries == truth(store)
    assert commit(store, "more", None).number == 7
    assert catalog_of(store).entries == truth(store)
    assert OfflineStore(store.offline.root / "none").view("numbers").catalog().entries == {}


def test_files_of_a_lost_record_are_known_by_what_it_said(store: ViewStore) -> None:
    expected = catalog_of(store)
    for path in (store.folder / "segments").iterdir():
        path.unlink()
    assert catalog_of(store) == expected
    path_of(store).unlink()
    catalog = catalog_of(store)
    assert (catalog.entries, list(catalog.damaged)) == ({}, [1, 2, 3, 4, 5, 6])
    assert "is missing, which has the parts of a segment" in str(catalog.damaged[1])


def test_it_names_every_file(store: ViewStore) -> None:
    one = store.write_part("r", "part-00000.parquet", TABLE)
    table = kills_table(
        pa.array([one.path]), pa.array([1]), pa.array([False]), {"id": pa.array([2])}
    )
    two, three = (store.write_part("r", f"{name}.parquet", table) for name in ("kills", "rejected"))
    segment = Segment(0, "r", "recipe", 7, (one,), two, 1)
    made = Snapshot(VIEW, "r", "m", Counts(2, 2), (segment,), three, "now", None, None)
    made = store.commit(replace(made, frame="data/r/frame.parquet"))
    record = made.segments[0].record.path
    for catalog in (store.catalog(), catalog_of(store)):
        assert catalog.files([catalog.entries[7]]) == {
            *(one.path, two.path, three.path, record, "data/r/frame.parquet")
        }
