"""The offline store keeps its word against races, kills, full disks and damaged files."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precompute.store.disk.crashpoint import arm, disarm
from precompute.store.disk.lease import take
from precompute.store.disk.record import replace
from precompute.store.disk.storage import IDENTITIES, LOCAL, identity_of, known_identity
from precompute.store.errors import FencedError, SnapshotError, UnreadableError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.gc import collect
from precompute.store.offline.log import run_lease
from precompute.store.offline.part_file import Layers, write_part_file
from precompute.store.offline.runs import Finished, Report
from precompute.store.offline.segment import KILLS, Part, Segment, kills_table
from precompute.store.offline.snapshot import Counts, Snapshot
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import utc_now
from tests.scene import files_of_at_most

VIEW = FeatureView("numbers", ("id",), (Feature("double", "float64"),), ttl_s=1.0, stale_for_s=1.0)
TABLE = pa.table({"id": [1, 2, 3], "double": [2.0, 4.0, 6.0], "name": ["a", "é", None]})


@pytest.fixture
def store(tmp_path: Path) -> ViewStore:
    return OfflineStore(tmp_path / "root").view("numbers")


def uncommitted(
    *parts: Part,
    run: str = "run",
    below: tuple[Segment, ...] = (),
    kills: Part | None = None,
    own_kills: int = 0,
    **changes: Any,
) -> Snapshot:
    rows = sum(part.rows for part in parts)
    segment = Segment(0, run, "recipe", 7, parts, kills, own_kills)
    segments = (*below, segment)
    return replace(
        Snapshot(VIEW, run, "model", Counts(rows, rows), segments, None, "now", None, None),
        **changes,
    )


def committed(store: ViewStore, *tables: pa.Table, run: str = "run") -> Snapshot:
    """A snapshot of one real Parquet part for each table."""
    parts = [
        store.write_part(run, f"part-{i:05d}.parquet", table) for i, table in enumerate(tables)
    ]
    return store.commit(uncommitted(*parts, run=run))


def tree(root: Path) -> dict[str, bytes]:
    """Every file under the root but the locks, and what is in it."""
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and not p.name.endswith("lock")
    }


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


# ---- parts


def test_a_part_is_plain_parquet_and_is_described_as_it_is(store: ViewStore) -> None:
    part = store.write_part("run", "part-00000.parquet", TABLE)
    path = store.folder / part.path
    assert part.path == "data/run/part-00000.parquet"
    assert (part.rows, part.size_bytes, part.sha256) == (
        3,
        path.stat().st_size,
        hashlib.sha256(path.read_bytes()).hexdigest(),
    )
    assert pq.read_table(path).equals(TABLE)
    assert list(tree(store.offline.root)) == ["numbers/data/run/part-00000.parquet"]


def test_a_part_the_disk_failed_on_twice_or_has_no_space_for_is_an_error(
    store: ViewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        with pytest.raises(
            SnapshotError, match=r"cannot write .*part-00000.parquet: Input/output error"
        ):
            store.write_part("run", "part-00000.parquet", TABLE)
    arm("part.write", 1, "enospc")
    try:
        with pytest.raises(SnapshotError, match="no space left while writing"):
            store.write_part("run", "part-00000.parquet", TABLE)
    finally:
        disarm()
    assert tree(store.offline.root) == {}


def test_a_snapshot_is_read_part_by_part_in_the_order_written(store: ViewStore) -> None:
    snapshot = committed(store, TABLE, TABLE.slice(0, 0), TABLE.slice(1))
    both = pa.concat_tables([TABLE, TABLE.slice(1)])
    assert pa.Table.from_batches(store.batches(snapshot), TABLE.schema).equals(both)
    small = list(store.batches(snapshot, columns=["name", "id"], batch_rows=2))
    assert max(batch.num_rows for batch in small) == 2
    assert pa.Table.from_batches(small).select(["id", "name"]).equals(both.select(["id", "name"]))


def test_a_flipped_bit_anywhere_in_a_part_is_found_by_its_checksum(store: ViewStore) -> None:
    snapshot = committed(store, TABLE)
    (path,) = store.part_paths(snapshot)
    whole = path.read_bytes()
    for at in range(len(whole)):
        flipped(path, at)
        with pytest.raises(SnapshotError, match="differs from its checksum"):
            store.check_parts(snapshot)
        with contextlib.suppress(
            SnapshotError
        ):  # without the check reading may go well, but never ends in a foreign exception
            list(store.batches(snapshot))
        path.write_bytes(whole)
    store.check_parts(snapshot)


def test_a_part_with_other_rows_than_its_manifest_says_is_refused(store: ViewStore) -> None:
    part = replace(store.write_part("run", "p.parquet", TABLE), rows=4)
    with pytest.raises(SnapshotError, match="holds 3 rows, its manifest says 4"):
        store.check_parts(store.commit(uncommitted(part)))


# ---- commit


def test_each_commit_gets_the_next_number_and_no_manifest_is_ever_changed(store: ViewStore) -> None:
    assert (store.offline.views(), store.numbers()) == ([], [])
    seen: dict[str, bytes] = {}
    for number in (1, 2, 3):
        snapshot = committed(store, TABLE, run=f"run{number}")
        (segment,) = snapshot.segments
        assert segment.name == f"{number}-{segment.sha256[:8]}"
        draft = replace(segment, number=0, sha256="", size_bytes=0)
        assert uncommitted(*snapshot.parts, run=f"run{number}") == replace(
            snapshot, number=0, segments=(draft,)
        )
        assert store.snapshot(number) == snapshot
        now = tree(store.offline.root)
        assert seen.items() <= now.items()
        assert f"numbers/manifests/{number:020d}.json" in now.keys() - seen.keys()
        assert f"numbers/{segment.record.path}" in now.keys() - seen.keys()
        seen = now
    assert (store.offline.views(), store.numbers()) == (["numbers"], [1, 2, 3])
    assert not [name for name in seen if "tmp" in name]


def test_a_number_is_not_given_again_while_a_later_one_stands(store: ViewStore) -> None:
    for number in (1, 2, 3):
        committed(store, TABLE, run=f"run{number}")
    (store.manifest_path(2)).unlink()
    assert committed(store, TABLE, run="run4").number == 4
    assert store.numbers() == [1, 3, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": Counts(4, 3)},
        {"counts": Counts(3, 2, removed=1)},
        {"counts": Counts(2, 2)},
    ],
    ids=repr,
)
def test_a_snapshot_that_lost_or_doubled_a_row_is_not_committed(
    store: ViewStore, changes: dict[str, Any]
) -> None:
    part = store.write_part("run", "p.parquet", TABLE)
    with pytest.raises(SnapshotError, match="nothing was committed"):
        store.commit(uncommitted(part, **({"counts": Counts(3, 3)} | changes)))
    assert store.numbers() == []
    assert list(tree(store.offline.root)) == ["numbers/data/run/p.parquet"]


def test_a_snapshot_that_is_not_there_is_refused_with_those_that_are(store: ViewStore) -> None:
    with pytest.raises(SnapshotError, match=r"no snapshot 1 .*it has: none"):
        store.snapshot(1)
    committed(store, TABLE)
    committed(store, TABLE, run="run2")
    with pytest.raises(SnapshotError, match=r"no snapshot 7 .*it has: 1, 2"):
        store.snapshot(7)


def test_strange_files_beside_the_manifests_are_no_snapshots(store: ViewStore) -> None:
    committed(store, TABLE)
    folder = store.folder / "manifests"
    for name in (".run9.tmp", "notes.json", "README", "00000000000000000009.json.bak"):
        (folder / name).write_text("x")
    (store.offline.root / "lost+found").mkdir()
    assert (store.offline.views(), store.numbers()) == (["numbers"], [1])
    assert committed(store, TABLE, run="run2").number == 2


# ---- segments


def kills(*rows: tuple[Part, int, bool, int]) -> pa.Table:
    """(part, row, whether its key has no row any more, key) of each dead row."""
    parts, numbers, removed, keys = zip(*rows, strict=True)
    return kills_table(
        pa.array([part.path for part in parts]),
        pa.array(numbers, pa.int64()),
        pa.array(removed),
        {"id": pa.array(keys, pa.int64())},
    )


def rows_table(**values: float) -> pa.Table:
    """``k3=1.5`` is a row of key 3."""
    return pa.table({"id": [int(k[1:]) for k in values], "double": list(values.values())})


@dataclasses.dataclass(frozen=True)
class Chain:
    """A snapshot of one segment, one of two, one of three; and the chunks an interrupted run left,
    which the last one adopted."""

    full: Snapshot
    delta: Snapshot
    last: Snapshot


ROWS_OF_LAST = [(1, 1.0), (4, 4.0), (6, 6.5), (2, 2.5), (7, 7.75), (3, 3.75), (9, 9.5)]


@pytest.fixture
def chain(store: ViewStore) -> Chain:
    one = store.write_part("r1", "part-00000.parquet", rows_table(k1=1.0, k2=2.0, k3=3.0))
    two = store.write_part("r1", "part-00001.parquet", rows_table(k4=4.0, k5=5.0))
    full = store.commit(uncommitted(one, two, run="r1"))
    three = store.write_part("r2", "part-00000.parquet", rows_table(k6=6.5, k2=2.5, k7=7.5))
    gone = store.write_part("r2", KILLS, kills((one, 1, False, 2), (two, 1, True, 5)))
    counts = Counts(source=6, written=3, unchanged=3, removed=1)
    delta = store.commit(
        uncommitted(three, run="r2", below=full.segments, kills=gone, counts=counts)
    )
    adopted = store.write_part("r3", "part-00000.parquet", rows_table(k7=7.75, k8=8.5, k3=3.25))
    four = store.write_part("r4", "part-00000.parquet", rows_table(k3=3.75, k9=9.5))
    found = kills(
        (one, 2, False, 3), (three, 2, False, 7), (adopted, 1, False, 8), (adopted, 2, False, 3)
    )
    gone = store.write_part("r4", KILLS, found)
    counts = Counts(source=7, written=3, unchanged=4)
    last = store.commit(
        uncommitted(
            adopted,
            four,
            run="r4",
            below=delta.segments,
            kills=gone,
            own_kills=2,
            counts=counts,
        )
    )
    return Chain(full, delta, last)


def read(store: ViewStore, snapshot: Snapshot, batch_rows: int = 8192) -> list[tuple[int, float]]:
    return [
        (row["id"], row["double"])
        for batch in store.batches(snapshot, batch_rows=batch_rows)
        for row in batch.to_pylist()
    ]


@pytest.mark.parametrize("batch_rows", [2, 8192])
def test_a_delta_over_a_delta_is_read_as_the_last_value_of_every_key(
    store: ViewStore, chain: Chain, batch_rows: int
) -> None:
    assert read(store, chain.full, batch_rows) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)]
    assert read(store, chain.delta, batch_rows) == [
        (1, 1.0),
        (3, 3.0),
        (4, 4.0),
        (6, 6.5),
        (2, 2.5),
        (7, 7.5),
    ]
    assert read(store, chain.last, batch_rows) == ROWS_OF_LAST
    assert [s.rows for s in (chain.full, chain.delta, chain.last)] == [5, 6, 7]
    for snapshot in (chain.full, chain.delta, chain.last):
        assert all(batch.num_rows for batch in store.batches(snapshot, batch_rows=batch_rows))
        store.check_parts(snapshot)
    assert {
        tuple(batch.schema.names) for batch in store.batches(chain.last, ["double"], batch_rows)
    } == {("double",)}
    assert [
        d for b in store.batches(chain.last, ["double"]) for d in b.column("double").to_pylist()
    ] == [d for _, d in ROWS_OF_LAST]


def test_the_layers_name_every_file_once_with_its_dead_rows(store: ViewStore, chain: Chain) -> None:
    assert chain.last.segments[:-1] == chain.delta.segments
    assert chain.delta.segments[:-1] == chain.full.segments
    layers = store.layers(chain.last)
    assert isinstance(layers, Layers)
    folder = store.offline.root.absolute() / "numbers" / "data"
    names = ["r1/part-00000", "r1/part-00001", "r2/part-00000", "r3/part-00000", "r4/part-00000"]
    assert (
        layers.paths
        == store.part_paths(chain.last)
        == [folder / f"{name}.parquet" for name in names]
    )
    assert {n: rows.tolist() for n, rows in layers.dead.items()} == {
        0: [1, 2],
        1: [1],
        2: [2],
        3: [1, 2],
    }
    assert {rows.dtype for rows in layers.dead.values()} == {np.dtype(np.int64)}
    assert store.layers(chain.full).dead == {}


def test_a_sample_holds_living_rows_only(store: ViewStore, chain: Chain) -> None:
    for rows in (1, 5, 100):
        sample = store.sample(chain.last, rows)
        assert set(zip(sample["id"].to_pylist(), sample["double"].to_pylist(), strict=True)) <= set(
            ROWS_OF_LAST
        )
        assert store.sample(chain.last, rows).equals(sample)
    assert len({store.sample(chain.last, 1, turn=turn)["id"][0].as_py() for turn in range(20)}) > 1
    assert store.sample(chain.last, 100)["id"].to_pylist() == [key for key, _ in ROWS_OF_LAST]
    assert store.sample(chain.last, 100, ["double"]).schema.names == ["double"]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_chain_reads_as_a_dictionary_that_was_updated(data: st.DataObject) -> None:
    """Every delta replaces, adds and removes keys at random; memory is the oracle."""
    with tempfile.TemporaryDirectory() as name:
        store = OfflineStore(name).view("numbers")
        where: dict[int, tuple[Part, int]] = {}
        now: dict[int, float] = {}
        parent: Snapshot | None = None
        for step in range(data.draw(st.integers(1, 5))):
            keys = data.draw(
                st.lists(st.integers(0, 9), unique=True, min_size=0 if step else 1, max_size=6)
            )
            removed = (
                data.draw(st.sets(st.sampled_from(sorted(now)))).difference(keys) if now else set()
            )
            parts, run = [], f"r{step}"
            dead = [(*where[key], key in removed, key) for key in (*keys, *removed) if key in where]
            before = len(now)
            for number, start in enumerate(range(0, len(keys), 3)):
                chunk = keys[start : start + 3]
                table = pa.table(
                    {
                        "id": pa.array(chunk, pa.int64()),
                        "double": [step + key / 16 for key in chunk],
                    }
                )
                parts.append(store.write_part(run, f"part-{number:05d}.parquet", table))
                for row, key in enumerate(chunk):
                    where[key], now[key] = (parts[-1], row), step + key / 16
            for key in removed:
                del where[key], now[key]
            gone = store.write_part(run, KILLS, kills(*dead)) if dead else None
            unchanged = before - len(dead)
            parent = store.commit(
                uncommitted(
                    *parts,
                    run=run,
                    below=() if parent is None else parent.segments,
                    kills=gone,
                    counts=Counts(
                        source=len(keys) + unchanged,
                        written=len(keys),
                        unchanged=unchanged,
                        removed=len(removed),
                    ),
                )
            )
            found = read(store, parent, data.draw(st.sampled_from([1, 2, 100])))
            assert dict(found) == now
            assert len(found) == parent.rows == len(now)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": Counts(source=7, written=3, unchanged=4)}, "6 living rows, and 7 were"),
        ({"counts": Counts(source=5, written=3, unchanged=2)}, "6 living rows, and 5 were"),
        ({"counts": Counts(source=7, written=3, unchanged=3)}, "7 rows came from the source"),
        ("without kills", "8 living rows, and 6 were"),
        ("without what lies below", "names part data/r1/part-00000.parquet, which no segment"),
        ("twice", "two segments of 'numbers' have one part"),
    ],
    ids=repr,
)
def test_segments_that_do_not_add_up_are_not_committed(
    store: ViewStore, chain: Chain, changes: dict[str, Any] | str, message: str
) -> None:
    before = store.numbers()
    *below, own = chain.delta.segments
    draft = replace(own, number=0, sha256="", size_bytes=0)
    good = replace(chain.delta, number=0, run="again", segments=(*below, draft))
    wrong: dict[str, dict[str, Any]] = {
        "without kills": {"segments": (*below, replace(draft, kills=None))},
        "without what lies below": {"segments": (draft,)},
        "twice": {"segments": (*below, own, draft)},
    }
    with pytest.raises(SnapshotError, match=message):
        store.commit(replace(good, **(wrong[changes] if isinstance(changes, str) else changes)))
    assert store.numbers() == before
    assert store.commit(good).number == 4


@pytest.mark.parametrize("what", ["kills", "parts"])
@pytest.mark.parametrize("of", ["full", "delta", "last"])
def test_damage_of_any_segment_is_found_by_name(
    store: ViewStore, chain: Chain, what: str, of: str
) -> None:
    layer: Snapshot = getattr(chain, of)
    assert layer.own is not None
    part = layer.own.kills if what == "kills" else layer.own.parts[-1]
    if part is None:
        return  # the lowest kills nothing
    path = store.folder / part.path
    whole = path.read_bytes()
    flipped(path, len(whole) // 2)
    with pytest.raises(SnapshotError, match=f"{re.escape(str(path))} differs from its checksum"):
        store.check_parts(chain.last)
    path.write_bytes(whole[:-1])
    for use in (store.check_parts, store.layers, lambda s: list(store.batches(s))):
        with pytest.raises(
            SnapshotError, match=f"{re.escape(str(path))} has {len(whole) - 1} bytes instead of"
        ):
            use(chain.last)
    path.unlink()
    for use in (store.check_parts, store.layers, lambda s: store.sample(s, 1)):
        with pytest.raises(SnapshotError, match=f"{re.escape(str(path))} is missing"):
            use(chain.last)
    for number, earlier in enumerate((chain.full, chain.delta), 1):
        if number < layer.number:
            store.check_parts(earlier)


@pytest.mark.parametrize("how", ["lost", "flipped", "cut", "empty"])
def test_a_damaged_record_is_an_error_of_every_snapshot_that_names_it(
    store: ViewStore, chain: Chain, how: str
) -> None:
    path = store.folder / chain.delta.segments[1].record.path
    whole = path.read_bytes()
    for at in range(0, len(whole), 7) if how == "flipped" else (0,):
        path.write_bytes(whole)
        if how == "lost":
            path.unlink()
        elif how == "flipped":
            flipped(path, at)
        else:
            path.write_bytes(whole[:-1] if how == "cut" else b"")
        said = "is missing" if how == "lost" else "differs from its checksum"
        read = OfflineStore(store.offline.root).view("numbers")
        assert read.snapshot(1) == chain.full
        for number in (2, 3):
            with pytest.raises(SnapshotError, match=f"{re.escape(str(path))} {said}"):
                read.snapshot(number)
        newest = Standing(read).newest()
        assert newest is not None
        assert newest.number == 1
        # who read it when it was whole looks again
        with pytest.raises(SnapshotError, match=f"{re.escape(str(path))} "):
            store.check_parts(chain.last)
        with pytest.raises(SnapshotError, match=said):
            read.segment(chain.delta.names[1], chain.delta.segments[1].sha256)
    assert list(store.log.bad()) == [2]
    assert store.log.bad()[2].segments == (chain.delta.names[1],)
    path.write_bytes(whole)
    found = [Standing(store).verdict(s) for s in (chain.full, chain.delta, chain.last)]
    assert [getattr(verdict, "number", None) for verdict in found] == [None, 2, 2]


def test_a_lost_race_for_a_number_leaves_a_record_that_nobody_names(
    store: ViewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = store.write_part("run", "part-00000.parquet", TABLE)
    other = store.write_part("other", "part-00000.parquet", TABLE)
    first = store.commit(uncommitted(other, run="other", created_at=utc_now()))
    create = store.storage.create

    def slower(path: Path, data: bytes, **options: Any) -> None:
        if path == store.manifest_path(2):
            monkeypatch.undo()
            store.commit(replace(first, number=0, created_at=utc_now()))
        create(path, data, **options)

    monkeypatch.setattr(store.storage, "create", slower)
    snapshot = store.commit(uncommitted(part, created_at=utc_now()))
    assert (snapshot.number, snapshot.segments[0].number) == (3, 3)
    assert store.snapshot(2).segments == first.segments
    records = {path.name for path in (store.folder / "segments").iterdir()}
    assert records > {f"{name}.json" for name in (*first.names, *snapshot.names)}
    assert len(records) == 3
    collect(store, keep=9, grace_s=-1.0)
    assert {path.name for path in (store.folder / "segments").iterdir()} == {
        f"{name}.json" for name in (*first.names, *snapshot.names)
    }


# ---- which snapshot is built on


@pytest.mark.parametrize(("damaged", "newest"), [(3, 2), (2, 3), (1, 3)])
def test_the_newest_is_none_that_cannot_be_read(
    store: ViewStore,
    chain: Chain,
    caplog: pytest.LogCaptureFixture,
    damaged: int,
    newest: int | None,
) -> None:
    path = store.manifest_path(damaged)
    path.write_bytes(path.read_bytes()[:-1])
    found = Standing(store).newest()
    assert (None if found is None else found.number) == newest
    assert [path.name in record.getMessage() for record in caplog.records] == [True] * (
        damaged == 3
    )


def test_a_snapshot_is_marked_bad_once_and_for_good(store: ViewStore) -> None:
    part = store.write_part("run", "part-00000.parquet", TABLE)
    for content in ("one", "two"):
        store.commit(uncommitted(part, content=content))
    assert store.log.bad() == {}
    for reason in ("first", "second"):
        store.mark_bad(1, reason)
    assert {number: (mark.reason, mark.content) for number, mark in store.log.bad().items()} == {
        1: ("first", "one")
    }
    store.mark_bad(2, "its files are damaged", rows=False)
    assert (store.log.bad()[2].reason, store.log.bad()[2].content) == (
        "its files are damaged",
        "",
    )
    store.mark_bad(9, "its manifest is gone")
    assert (store.log.bad()[9].reason, store.log.bad()[9].content) == ("its manifest is gone", "")
    # what is served cannot be whole again, but its rows can come again
    store.mark_bad(2, "its values are wrong")
    store.mark_bad(2, "damaged again", rows=False)
    assert store.log.bad()[2].content == "two"
    assert sorted(store.log.bad()) == [1, 2, 9]


def test_a_roots_identity_is_read_from_its_copy_and_never_replaced(tmp_path: Path) -> None:
    assert known_identity(tmp_path) == ""
    identity, (path, copy) = identity_of(tmp_path), [tmp_path / name for name in IDENTITIES]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert identity_of(tmp_path) == identity
    copy.unlink()
    for identify in (known_identity, identity_of):
        with pytest.raises(SnapshotError, match=r"identity\.json is damaged .*; remove it to"):
            identify(tmp_path)
    path.write_bytes(whole)
    assert (identity_of(tmp_path), copy.read_bytes()) == (identity, whole)


def test_the_size_of_a_folder_is_that_of_the_files_that_are_left(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"123")
    (tmp_path / "gone").symlink_to("removed meanwhile")
    assert LOCAL.size_bytes(tmp_path) == 3
    assert LOCAL.size_bytes(tmp_path / "none") == 0


def test_a_pin_holds_until_it_is_let_go(store: ViewStore) -> None:
    committed(store, TABLE)
    committed(store, TABLE, run="run2")
    assert store.log.pins() == set()
    for number in (2, 1, 2):
        store.pin(number, "why")
    assert store.log.pins() == {1, 2}
    with pytest.raises(SnapshotError, match="no snapshot 9"):
        store.pin(9, "x")
    for number in (1, 1, 9):
        store.log.unpin(number)
    assert store.log.pins() == {2}
    (store.manifest_path(2)).write_text("{")
    with pytest.raises(SnapshotError, match="torn"):
        store.pin(2, "x")


# ---- what an unfinished run leaves


def chunk(store: ViewStore, run: str, number: int, *, rejected: bool = False) -> Finished:
    """A chunk whose files are there."""
    part = store.write_part(run, f"part-{number:05d}.parquet", TABLE.slice(0, number % 3 + 1))
    other = (
        store.write_part(run, f"rejected-{number:05d}.parquet", TABLE.slice(0, 1))
        if rejected
        else None
    )
    return Finished(part, other)


def journal(
    store: ViewStore,
    run: str,
    *chunks: Finished,
    recipe: str = "recipe",
    partition: str | None = None,
    full: bool = False,
) -> None:
    store.journals.begin(run, recipe, partition, full=full)
    for one in chunks:
        store.journals.add(run, one)


def test_finished_chunks_come_back_the_oldest_run_first(store: ViewStore) -> None:
    assert store.journals.unfinished("recipe", None) == []
    newer, older = (
        [chunk(store, "r2", n, rejected=n == 1) for n in range(3)],
        [chunk(store, "r1", 0)],
    )
    rejected_only = Finished(None, newer[1].rejected)
    journal(store, "r2", *newer, rejected_only)
    journal(store, "r1", *older)
    assert store.journals.unfinished("recipe", None) == [*older, *newer, rejected_only]
    store.journals.end("r2")
    store.journals.end("r2")
    assert store.journals.unfinished("recipe", None) == older
    assert store.offline.view("others").journals.unfinished("recipe", None) == []


def test_a_journal_torn_at_any_length_gives_the_whole_lines_before(store: ViewStore) -> None:
    chunks = [chunk(store, "r1", n, rejected=n == 1) for n in range(3)]
    journal(store, "r1", *chunks)
    path = store.folder / "data" / "r1" / "journal.jsonl"
    whole = path.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 4
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        expected = chunks[: max(0, sum(length >= end for end in ends) - 1)]
        assert store.journals.unfinished("recipe", None) == expected, length


def test_a_journal_damaged_in_the_middle_gives_the_lines_before(store: ViewStore) -> None:
    chunks = [chunk(store, "r1", n) for n in range(3)]
    journal(store, "r1", *chunks)
    path = store.folder / "data" / "r1" / "journal.jsonl"
    lines = path.read_bytes().split(b"\n")
    for damaged in (
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\0" * 40,
        b'{"part": 7, "rejected": null}',
        b"\xff",
    ):
        path.write_bytes(b"\n".join([*lines[:2], damaged, *lines[3:]]))
        assert store.journals.unfinished("recipe", None) == chunks[:1]


def test_only_chunks_of_the_same_recipe_and_partition_are_taken_over(store: ViewStore) -> None:
    day = "2026-01-01T00:00Z/2026-01-02T00:00Z"
    made = {}
    for run, kind in {
        "a": ("recipe", None, False),
        "b": ("recipe", None, True),
        "c": ("recipe", day, False),
        "d": ("other", None, True),
    }.items():
        made[run] = chunk(store, run, 0)
        journal(store, run, made[run], recipe=kind[0], partition=kind[1], full=kind[2])

    def found(recipe: str, partition: str | None, full: bool) -> list[str]:
        chunks = store.journals.unfinished(recipe, partition, full=full)
        return [run for run, one in made.items() if one in chunks]

    assert found("recipe", None, False) == ["a", "b"]
    assert found("recipe", None, True) == ["b"]
    assert found("recipe", day, False) == ["c"]
    assert found("recipe", day, True) == []
    assert (found("other", None, False), found("other", day, False), found("x", None, False)) == (
        ["d"],
        [],
        [],
    )


def test_chunks_that_are_whole_have_the_checksums_noted(store: ViewStore) -> None:
    chunks = [chunk(store, "r1", n, rejected=True) for n in range(4)]
    assert store.journals.whole(chunks) == chunks
    files = [
        store.folder / part.path
        for one in chunks
        for part in (one.part, one.rejected)
        if part is not None
    ]
    for path, position in ((files[0], 5), (files[3], -1)):
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
    files[5].unlink()
    assert store.journals.whole(chunks) == chunks[3:]


def test_lost_cut_or_committed_chunks_are_not_taken_over(store: ViewStore) -> None:
    chunks = [chunk(store, "r1", n, rejected=True) for n in range(4)]
    journal(store, "r1", *chunks)
    files = [
        store.folder / part.path
        for one in chunks
        for part in (one.part, one.rejected)
        if part is not None
    ]
    files[0].unlink()
    files[3].write_bytes(files[3].read_bytes()[:-1])
    files[4].write_bytes(files[4].read_bytes() + b"x")
    assert store.journals.unfinished("recipe", None) == chunks[3:]
    assert chunks[3].part is not None
    store.commit(uncommitted(chunks[3].part, run="r2"))  # by a run that took it over
    assert store.journals.unfinished("recipe", None) == []
    journal(store, "r3", chunk(store, "r3", 0))
    assert len(store.journals.unfinished("recipe", None)) == 1
    committed(store, TABLE, run="r3")  # its journal stayed by accident
    assert store.journals.unfinished("recipe", None) == []


# ---- several processes

RACE = """
import sys, time
from pathlib import Path
from precompute.store.errors import ConflictError
from precompute.store.offline.view_store import OfflineStore, ViewStore
from tests.store.test_offline_store import uncommitted
root, me, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = OfflineStore(root).view("numbers")
print("ready", flush=True)
sys.stdin.readline()
numbers = [store.commit(uncommitted(run=f"{me}-{i}")).number for i in range(rounds)]
won = []
while True:
    ref = store.log.live()
    epoch = 0 if ref is None else ref.epoch
    if epoch >= rounds:
        break
    try:
        won.append(store.log.move_live(numbers[0], expected_epoch=epoch, reason=me).epoch)
    except ConflictError:
        pass
print(numbers, won, sep="|")
"""


def test_racing_commits_get_distinct_numbers_and_one_moves_the_pointer(store: ViewStore) -> None:
    rounds, names = 20, ["left", "right", "third"]
    processes = [start(RACE, store.offline.root, name, rounds) for name in names]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    numbers: dict[str, list[int]] = {}
    won: dict[str, list[int]] = {}
    for name, process in zip(names, processes, strict=True):
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        numbers[name], won[name] = map(json.loads, out.strip().split("|"))
    assert sorted(n for mine in numbers.values() for n in mine) == list(
        range(1, rounds * len(names) + 1)
    )
    assert store.numbers() == list(range(1, rounds * len(names) + 1))
    for name, mine in numbers.items():
        assert [store.snapshot(n).run for n in mine] == [f"{name}-{i}" for i in range(rounds)]
    assert sorted(epoch for mine in won.values() for epoch in mine) == list(range(1, rounds + 1))
    ref = store.log.live()
    assert ref is not None
    assert rounds in won[ref.reason]
    assert not [name for name in tree(store.offline.root) if "tmp" in name]


def test_who_lost_the_lease_neither_commits_nor_moves_nor_renews(store: ViewStore) -> None:
    part = store.write_part("run", "part-00000.parquet", TABLE)
    late = take(store.leases, "publish", "late")
    first = store.commit(uncommitted(part), late)
    assert first.fence == late.record.fence == 1
    ref = store.log.move_live(1, expected_epoch=0, reason="run", lease=late)
    ref = store.log.renew_live(ref, 5, late)
    with take(store.leases, "publish", "other", force=True) as lease:
        before = tree(store.offline.root)
        for write in (
            lambda: store.commit(uncommitted(part, run="late"), late),
            lambda: store.log.move_live(1, expected_epoch=1, reason="late", lease=late),
            lambda: store.log.renew_live(ref, 6, late),
        ):
            with pytest.raises(FencedError, match="lost its lease 'publish' to other"):
                write()
        assert tree(store.offline.root) == before
        assert store.commit(uncommitted(part, run="other"), lease).fence == 2
        assert store.log.move_live(2, expected_epoch=1, reason="other", lease=lease).snapshot == 2
    late.release()


def test_a_run_of_each_partition_is_known_by_its_lease(store: ViewStore) -> None:
    day, next_day = "2026-01-01T00:00Z/2026-01-02T00:00Z", "2026-01-02T00:00Z/2026-01-03T00:00Z"
    assert (run_lease(None), run_lease(day)) == ("run", "run-2026-01-01T0000Z")
    with take(store.leases, run_lease(day), "me"):
        assert [store.running(partition) for partition in (None, day, next_day)] == [
            False,
            True,
            False,
        ]
        assert not store.offline.view("others").running(day)
    assert not store.running(day)


# ---- the file system refuses


@pytest.mark.parametrize("action", ["part", "commit", "live", "report"])
def test_a_full_disk_is_an_error_and_leaves_everything_as_it_was(
    store: ViewStore, action: str
) -> None:
    committed(store, TABLE)
    store.log.move_live(1, expected_epoch=0, reason="run")
    store.runs.write(ran(1))
    before = tree(store.offline.root)
    large = pa.table({"id": np.arange(4000), "double": np.random.default_rng(0).random(4000)})
    sizes: list[int]
    write: Callable[[], object]
    sizes, write = {
        "part": (
            [0, 3, 4, 4096, 30_000],
            lambda: store.write_part("run", "part-00001.parquet", large),
        ),
        "commit": ([0, 1, 100, 500], lambda: store.commit(uncommitted(run="full"))),
        "live": (
            [0, 10],
            lambda: store.log.move_live(2, expected_epoch=1, reason="full"),
        ),
        "report": ([0, 5], lambda: store.runs.write(ran(2, "failed"))),
    }[action]
    untouched = "the run's report is missing" if action == "report" else "snapshot is untouched"
    for size in sizes:
        with (
            pytest.raises(SnapshotError, match=rf"^no space left while writing.*{untouched}"),
            files_of_at_most(size),
        ):
            write()
        # a record that no manifest names goes with what killed runs leave
        after = {n: data for n, data in tree(store.offline.root).items() if "segments/2-" not in n}
        assert after == before, f"at {size} bytes"
    assert committed(store, TABLE, run="later").number == 2


def test_a_root_that_cannot_be_a_folder_is_an_error_of_all_that_use_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = OfflineStore(tmp_path / "file" / "root").view("numbers")
    writers: list[Callable[[], Any]] = [
        lambda: store.write_part("run", "p.parquet", TABLE),
        lambda: store.commit(uncommitted()),
        lambda: store.log.move_live(1, expected_epoch=0, reason="run"),
        lambda: store.runs.write(ran(1)),
        lambda: store.journals.begin("run", "recipe", None),
        lambda: store.journals.add("run", Finished(None, None)),
        lambda: store.log.pin(1, "why"),
        lambda: take(store.leases, "run", "me"),
    ]
    for write in writers:
        with pytest.raises((SnapshotError, UnreadableError), match=r"cannot (write|be read)"):
            write()
    assert (store.offline.views(), store.numbers(), store.runs.last()) == ([], [], None)
    assert Standing(store).newest() is None
    assert store.runs.reports() == []
    assert store.journals.unfinished("recipe", None) == []
    for read in (lambda: store.snapshot(1), store.log.live, store.log.bad, store.log.pins):
        with pytest.raises(UnreadableError, match="cannot be read: Not a directory"):
            read()


# ---- reports


def ran(day: int, status: str = "published") -> Report:
    return Report(f"2025010{day}", "numbers", "run", status)


def test_reports_come_newest_first_and_as_many_as_requested(
    store: ViewStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.runs.last() is None
    for day in (2, 1, 3):
        store.runs.write(ran(day))
    assert store.runs.reports() == [ran(3), ran(2), ran(1)]
    assert store.runs.reports(2) == [ran(3), ran(2)]
    torn = store.runs.path("20250103")
    for damaged in (b"", b"{", b"7", b"\xff", b'{"run": 7}'):
        torn.write_bytes(damaged)
        caplog.clear()
        assert store.runs.reports() == [ran(2), ran(1)]
        assert [str(torn) in record.getMessage() for record in caplog.records] == [True]
        assert store.runs.reports(1) == [ran(2)]
        assert store.runs.last() == ran(2)
    # the next run's id is above that of one whose clock was ahead
    store.runs.write(Report("20990101T000000.000009Z-f00000", "numbers", "run"))
    (store.runs.folder / "x.json").write_text("no report")
    assert store.runs.stamp() == "20990101T000000.000010Z"


def test_each_column_of_a_part_is_stored_as_its_kind_is_best(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "id": pa.array([5, 6]),
        "text": ["a", "b"],
        "top": pa.array([[1, 2], []]),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array([0.5, 1, 2, 3], pa.float32()), 2),
        "computed_at": pa.array([1, 1], pa.timestamp("us", "UTC")),
        "input_hash": pa.array([-(2**63), 2**63 - 1]),
    }
    write_part_file(tmp_path / "part.parquet", pa.table(columns))
    group = pq.read_metadata(tmp_path / "part.parquet").row_group(0)
    found = {
        column.path_in_schema.partition(".")[0]: (column.compression, column.encodings)
        for column in map(group.column, range(group.num_columns))
    }
    plain, words = ("RLE", "PLAIN"), ("PLAIN", "RLE", "RLE_DICTIONARY")
    assert found == {
        "id": ("UNCOMPRESSED", ("RLE", "DELTA_BINARY_PACKED")),
        "text": ("ZSTD", words),
        "top": ("ZSTD", plain),
        "vector": ("LZ4", plain),
        "computed_at": ("ZSTD", plain),
        "input_hash": ("UNCOMPRESSED", plain),
    }
    assert pq.read_table(tmp_path / "part.parquet").equals(pa.table(columns))


def test_each_column_of_a_part_has_an_id_by_its_name_and_type(store: ViewStore) -> None:
    def ids(name: str, **columns: Any) -> dict[str, int]:
        part = store.write_part("run", f"{name}.parquet", pa.table(columns))
        found = dict[str, int]()
        for field in pq.read_schema(store.folder / part.path):
            found[field.name] = int(field.metadata[b"PARQUET:field_id"])
            if pa.types.is_nested(field.type):
                inner = field.type.value_field
                found[f"{field.name} each"] = int(inner.metadata[b"PARQUET:field_id"])
        return found

    vector = pa.array([[0.5, 1.0]], pa.list_(pa.float32(), 2))
    first = ids("first", id=[1], vector=vector, top=[["a"]])
    assert sorted(first) == ["id", "top", "top each", "vector", "vector each"]
    assert (len({*first.values()}), max(first.values()) < 2**30) == (5, True)
    # read again, without a column, in another order
    read = pq.read_table(store.folder / "data" / "run" / "first.parquet").select(["vector", "id"])
    assert ids("again", **{n: read[n] for n in read.column_names}) == {
        name: first[name] for name in ("vector", "vector each", "id")
    }
    other = ids("other", id=["1"], top=[[1]])
    assert not {*other.values()} & {*first.values()}
