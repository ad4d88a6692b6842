"""The offline store keeps its word against races, kills, full disks and damaged files."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.progress import Silent
from jobs.run import run_view
from store.errors import ConflictError, SnapshotError
from store.feature_view import Feature, FeatureView
from store.offline_store import OfflineStore
from store.snapshot import Counts, Part, Snapshot
from tests.conftest import MakeProject

VIEW = FeatureView("numbers", ("id",), (Feature("double", "float64"),), ttl_s=1.0, stale_for_s=1.0)
TABLE = pa.table({"id": [1, 2, 3], "double": [2.0, 4.0, 6.0], "name": ["a", "é", None]})


@pytest.fixture
def store(tmp_path: Path) -> OfflineStore:
    return OfflineStore(tmp_path / "root")


def uncommitted(*parts: Part, run: str = "run", **changes: Any) -> Snapshot:
    rows = sum(part.rows for part in parts)
    return dataclasses.replace(Snapshot(VIEW, run, "model", Counts(rows, rows), parts, None, "now", None, None), **changes)


def committed(store: OfflineStore, *tables: pa.Table, run: str = "run") -> Snapshot:
    """A snapshot of one real Parquet part for each table."""
    parts = [store.write_part("numbers", run, f"part-{i:05d}.parquet", table) for i, table in enumerate(tables)]
    return store.commit(uncommitted(*parts, run=run))


def tree(root: Path) -> dict[str, bytes]:
    """Every file under the root but the locks, and what is in it."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and not p.name.endswith("lock")}


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


# ---- parts


def test_a_part_is_plain_parquet_and_is_described_as_it_is(store: OfflineStore) -> None:
    part = store.write_part("numbers", "run", "part-00000.parquet", TABLE)
    path = store.root / "numbers" / part.path
    assert part.path == "data/run/part-00000.parquet"
    assert (part.rows, part.size_bytes, part.sha256) == (3, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert pq.read_table(path).equals(TABLE)
    assert list(tree(store.root)) == ["numbers/data/run/part-00000.parquet"]


def test_a_snapshot_is_read_part_by_part_in_the_order_written(store: OfflineStore) -> None:
    snapshot = committed(store, TABLE, TABLE.slice(0, 0), TABLE.slice(1))
    both = pa.concat_tables([TABLE, TABLE.slice(1)])
    assert pa.Table.from_batches(store.batches(snapshot), TABLE.schema).equals(both)
    small = list(store.batches(snapshot, columns=["name", "id"], batch_rows=2))
    assert max(batch.num_rows for batch in small) == 2
    assert pa.Table.from_batches(small).select(["id", "name"]).equals(both.select(["id", "name"]))


def test_a_missing_or_cut_part_is_refused_by_name(store: OfflineStore) -> None:
    snapshot = committed(store, TABLE, TABLE)
    store.check_parts(snapshot)
    path = store.part_paths(snapshot)[1]
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"\0", b"", None):
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
        for use in (store.part_paths, store.check_parts, lambda s: list(store.batches(s))):
            with pytest.raises(SnapshotError, match=f"{path.name}.*(missing|bytes instead of).*publish another"):
                use(snapshot)
    path.mkdir()
    with pytest.raises(SnapshotError, match=path.name):
        store.part_paths(snapshot)


def test_a_flipped_bit_anywhere_in_a_part_is_found_by_its_checksum(store: OfflineStore) -> None:
    snapshot = committed(store, TABLE)
    (path,) = store.part_paths(snapshot)
    whole = path.read_bytes()
    for at in range(len(whole)):
        flipped(path, at)
        with pytest.raises(SnapshotError, match="differs from its checksum"):
            store.check_parts(snapshot)
        with contextlib.suppress(SnapshotError):  # without the check reading may go well, but never ends in a foreign exception
            list(store.batches(snapshot))
        path.write_bytes(whole)
    store.check_parts(snapshot)


def test_a_part_with_other_rows_than_its_manifest_says_is_refused(store: OfflineStore) -> None:
    part = dataclasses.replace(store.write_part("numbers", "run", "p.parquet", TABLE), rows=4)
    with pytest.raises(SnapshotError, match="holds 3 rows, its manifest says 4"):
        store.check_parts(store.commit(uncommitted(part)))


# ---- commit


def test_each_commit_gets_the_next_number_and_no_manifest_is_ever_changed(store: OfflineStore) -> None:
    assert (store.views(), store.numbers("numbers")) == ([], [])
    seen: dict[str, bytes] = {}
    for number in (1, 2, 3):
        snapshot = committed(store, TABLE, run=f"run{number}")
        assert snapshot == dataclasses.replace(uncommitted(*snapshot.parts, run=f"run{number}"), number=number)
        assert store.snapshot("numbers", number) == snapshot
        now = tree(store.root)
        assert seen.items() <= now.items()
        assert f"numbers/manifests/{number:020d}.json" in now.keys() - seen.keys()
        seen = now
    assert (store.views(), store.numbers("numbers")) == (["numbers"], [1, 2, 3])
    assert not [name for name in seen if "tmp" in name]


def test_a_number_is_not_given_again_while_a_later_one_stands(store: OfflineStore) -> None:
    for number in (1, 2, 3):
        committed(store, TABLE, run=f"run{number}")
    (store.root / "numbers" / "manifests" / f"{2:020d}.json").unlink()
    assert committed(store, TABLE, run="run4").number == 4
    assert store.numbers("numbers") == [1, 3, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": Counts(4, 3)},
        {"counts": Counts(2, 3)},
        {"counts": Counts(3, 3, removed=1)},
        {"counts": Counts(2, 2)},
        {"counts": Counts(4, 4)},
        {"parts": ()},
    ],
    ids=repr,
)
def test_a_snapshot_that_lost_or_doubled_a_row_is_not_committed(store: OfflineStore, changes: dict[str, Any]) -> None:
    part = store.write_part("numbers", "run", "p.parquet", TABLE)
    with pytest.raises(SnapshotError, match="nothing was committed"):
        store.commit(uncommitted(part, **({"counts": Counts(3, 3)} | changes)))
    assert store.numbers("numbers") == []
    assert list(tree(store.root)) == ["numbers/data/run/p.parquet"]


def test_a_snapshot_whose_part_is_gone_or_cut_is_not_committed(store: OfflineStore) -> None:
    part = store.write_part("numbers", "run", "p.parquet", TABLE)
    path = store.root / "numbers" / part.path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SnapshotError, match="bytes instead of"):
        store.commit(uncommitted(part))
    path.unlink()
    with pytest.raises(SnapshotError, match="is missing"):
        store.commit(uncommitted(part))
    assert store.numbers("numbers") == []


def test_a_snapshot_that_is_not_there_is_refused_with_those_that_are(store: OfflineStore) -> None:
    with pytest.raises(SnapshotError, match=r"no snapshot 1 .*it has: none"):
        store.snapshot("numbers", 1)
    committed(store, TABLE)
    committed(store, TABLE, run="run2")
    with pytest.raises(SnapshotError, match=r"no snapshot 7 .*it has: 1, 2"):
        store.snapshot("numbers", 7)


def test_a_torn_manifest_is_refused_and_leaves_the_others_alone(store: OfflineStore) -> None:
    first = committed(store, TABLE)
    committed(store, TABLE, run="run2")
    path = store.root / "numbers" / "manifests" / f"{2:020d}.json"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SnapshotError, match=f"{path.name} is torn"):
        store.snapshot("numbers", 2)
    assert store.snapshot("numbers", 1) == first


def test_strange_files_beside_the_manifests_are_no_snapshots(store: OfflineStore) -> None:
    committed(store, TABLE)
    folder = store.root / "numbers" / "manifests"
    for name in (".run9.tmp", "notes.json", "README", "00000000000000000009.json.bak"):
        (folder / name).write_text("x")
    (store.root / "lost+found").mkdir()
    assert (store.views(), store.numbers("numbers")) == (["numbers"], [1])
    assert committed(store, TABLE, run="run2").number == 2


# ---- the live pointer


def test_the_live_pointer_tells_where_it_is_and_was(store: OfflineStore) -> None:
    assert store.live("numbers") is None
    first = store.move_live("numbers", 4, expected_epoch=0, epoch=1, reason="run")
    second = store.move_live("numbers", 5, expected_epoch=1, epoch=7, reason="é")
    assert (first.epoch, first.snapshot, first.previous, first.reason) == (1, 4, None, "run")
    assert (second.epoch, second.snapshot, second.previous, second.reason) == (7, 5, 4, "é")
    assert OfflineStore(store.root).live("numbers") == second
    assert list(tree(store.root)) == ["numbers/refs/live.json"]


@pytest.mark.parametrize(("expected", "epoch"), [(0, 3), (1, 3), (3, 4), (2, 2), (2, 1), (2, 0)])
def test_a_move_from_where_the_pointer_is_not_changes_nothing(store: OfflineStore, expected: int, epoch: int) -> None:
    store.move_live("numbers", 1, expected_epoch=0, epoch=2, reason="run")
    before = tree(store.root)
    with pytest.raises(ConflictError, match="'numbers' moved"):
        store.move_live("numbers", 9, expected_epoch=expected, epoch=epoch, reason="late")
    assert tree(store.root) == before


def test_a_torn_live_pointer_is_refused_at_every_length(store: OfflineStore) -> None:
    store.move_live("numbers", 1, expected_epoch=0, epoch=1, reason="run")
    path = store.root / "numbers" / "refs" / "live.json"
    whole = path.read_bytes()
    for damaged in [*(whole[:n] for n in range(len(whole))), whole + b"}", b"null", b"[]", b"{}", b"7", b"\xff" * 9]:
        path.write_bytes(damaged)
        with pytest.raises(SnapshotError, match=r"live.json is damaged"):
            store.live("numbers")


def test_publishing_again_mends_a_damaged_live_pointer(make_project: MakeProject) -> None:
    """It is the remedy that the error names."""
    project = make_project([(1, 1.0), (2, 2.0)])
    run_view(project, "numbers", Silent())
    store = OfflineStore(project.root)
    (store.root / "numbers" / "refs" / "live.json").write_bytes(b"{")
    with pytest.raises(SnapshotError, match="publish the view again"):
        store.live("numbers")
    run_view(project, "numbers", Silent(), command="publish")
    ref = store.live("numbers")
    assert ref is not None
    assert ref.snapshot == 1


# ---- several processes

RACE = """
import sys, time
from pathlib import Path
from store.errors import ConflictError
from store.offline_store import OfflineStore
from tests.store.test_offline_store import uncommitted
root, me, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = OfflineStore(root)
print("ready", flush=True)
sys.stdin.readline()
numbers = [store.commit(uncommitted(run=f"{me}-{i}")).number for i in range(rounds)]
won = []
while True:
    ref = store.live("numbers")
    epoch = 0 if ref is None else ref.epoch
    if epoch >= rounds:
        break
    try:
        won.append(store.move_live("numbers", numbers[0], expected_epoch=epoch, epoch=epoch + 1, reason=me).epoch)
    except ConflictError:
        pass
print(numbers, won, sep="|")
"""


def test_racing_processes_commit_under_distinct_numbers_and_one_alone_moves_the_pointer(store: OfflineStore) -> None:
    rounds, names = 40, ["left", "right", "third"]
    processes = [start(RACE, store.root, name, rounds) for name in names]
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
    assert sorted(n for mine in numbers.values() for n in mine) == list(range(1, rounds * len(names) + 1))
    assert store.numbers("numbers") == list(range(1, rounds * len(names) + 1))
    for name, mine in numbers.items():
        assert [store.snapshot("numbers", n).run for n in mine] == [f"{name}-{i}" for i in range(rounds)]
    assert sorted(epoch for mine in won.values() for epoch in mine) == list(range(1, rounds + 1))
    ref = store.live("numbers")
    assert ref is not None
    assert rounds in won[ref.reason]
    assert not [name for name in tree(store.root) if "tmp" in name]


HOLD = """
import sys
from store.offline_store import OfflineStore
with OfflineStore(sys.argv[1]).run_lock("numbers"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_holds_its_view_until_it_is_killed(store: OfflineStore) -> None:
    process = start(HOLD, store.root)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ConflictError, match="another run of view 'numbers'"), store.run_lock("numbers"):
        pass
    with store.run_lock("others"):  # another view is free
        pass
    process.kill()
    process.communicate()
    with (
        store.run_lock("numbers"),
        pytest.raises(ConflictError),
        OfflineStore(store.root).run_lock("numbers"),  # nor twice in one process
    ):
        pass
    with store.run_lock("numbers"):
        pass


# ---- the file system refuses

FULL_DISK = """
import json, os, resource, signal, sys
from pathlib import Path
import numpy as np, pyarrow as pa
from store.errors import SnapshotError
from store.offline_store import OfflineStore
from tests.store.test_offline_store import VIEW, uncommitted
store, limits = OfflineStore(sys.argv[1]), json.loads(sys.argv[2])
table = pa.table({"id": np.arange(4000), "double": np.random.default_rng(0).random(4000)})
actions = {
    "part": lambda: store.write_part("numbers", "run", "part-00001.parquet", table),
    "commit": lambda: store.commit(uncommitted(run="full")),
    "live": lambda: store.move_live("numbers", 2, expected_epoch=1, epoch=2, reason="full"),
    "report": lambda: store.write_report("numbers", "run", {"status": "failed"}),
}
for name, sizes in limits.items():
    for size in sizes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            actions[name]()
            outcome = "done"
        except SnapshotError as exc:
            outcome = str(exc)
        except BaseException as exc:
            outcome = f"{type(exc).__name__}: {exc}"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        left = sorted(str(p.relative_to(store.root)) for p in store.root.rglob("*") if p.is_file() and not p.name.endswith("lock"))
        print(json.dumps([name, size, outcome, left]), flush=True)
"""


@pytest.mark.parametrize("action", ["part", "commit", "live", "report"])
def test_a_full_disk_is_told_and_leaves_everything_as_it_was(store: OfflineStore, action: str) -> None:
    committed(store, TABLE)
    store.move_live("numbers", 1, expected_epoch=0, epoch=1, reason="run")
    store.write_report("numbers", "run", {"status": "published"})
    before = tree(store.root)
    sizes = {"part": [0, 3, 4, 4096, 30_000], "commit": [0, 1, 500], "live": [0, 10], "report": [0, 5]}[action]
    out, _ = start(FULL_DISK, store.root, json.dumps({action: sizes})).communicate(timeout=60)
    outcomes = [json.loads(line) for line in out.splitlines()]
    assert [size for _, size, _, _ in outcomes] == sizes
    for _, size, outcome, left in outcomes:
        assert outcome.startswith("no space left while writing"), (size, outcome)
        assert ("only the run's report is missing" if action == "report" else "live snapshot is untouched") in outcome
        assert left == sorted(before), f"at {size} bytes"
    assert tree(store.root) == before
    assert committed(store, TABLE, run="later").number == 2


def test_a_root_that_cannot_be_a_folder_is_told_by_every_writer_and_reader(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = OfflineStore(tmp_path / "file" / "root")
    writers: list[Callable[[], Any]] = [
        lambda: store.write_part("numbers", "run", "p.parquet", TABLE),
        lambda: store.commit(uncommitted()),
        lambda: store.move_live("numbers", 1, expected_epoch=0, epoch=1, reason="run"),
        lambda: store.write_report("numbers", "run", {}),
        lambda: store.run_lock("numbers").__enter__(),
    ]
    for write in writers:
        with pytest.raises(SnapshotError, match="cannot write"):
            write()
    assert (store.views(), store.numbers("numbers"), store.last_report("numbers")) == ([], [], None)
    for read in (lambda: store.snapshot("numbers", 1), lambda: store.live("numbers")):
        with pytest.raises(SnapshotError):
            read()


# ---- reports


def test_the_last_report_is_the_newest_runs(store: OfflineStore) -> None:
    assert store.last_report("numbers") is None
    for run in ("20250102T000000", "20250101T000000"):
        store.write_report("numbers", run, {"run": run, "at": Path("x")})
    assert store.last_report("numbers") == {"run": "20250102T000000", "at": "x"}
    store.write_report("numbers", "20250102T000000", {"status": "failed"})
    assert store.last_report("numbers") == {"status": "failed"}
    assert Counter(Path(name).suffix for name in tree(store.root)) == {".json": 2}


def test_vectors_and_text_come_back_from_a_part_as_they_went_in(store: OfflineStore) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float16)), 2)
    table = pa.table({"id": ["a", "é", "a"], "vector": vectors, "top": [["x"], [], None]})
    assert pa.Table.from_batches(store.batches(committed(store, table))).equals(table)
