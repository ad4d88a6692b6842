"""A root in an object store: the same runs, answers and guarantees as on a folder, whatever becomes
of requests and replies."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from precompute.jobs.run.rows import chunks
from precompute.plugins.object_root import storage as storage_module
from precompute.plugins.object_root.storage import ObjectStorage
from precompute.plugins.object_root.tests.roots import VIEW, project_on, storage_in
from precompute.store.disk import lease
from precompute.store.disk.lease import holder, take
from precompute.store.disk.storage import File
from precompute.store.errors import (
    ConfigError,
    ConflictError,
    RejectedError,
    SnapshotError,
    UnreadableError,
)
from precompute.store.offline.gc import collect
from precompute.store.offline.runs import NAME as JOURNAL
from tests import REPOSITORY
from tests.fixtures import MakeProject
from tests.object_store import ObjectStore, Request
from tests.scene import Scene


@pytest.fixture
def storage(bucket: ObjectStore, tmp_path: Path) -> ObjectStorage:
    return storage_in(bucket, tmp_path / "cache")


def counted(data: bytes | None) -> bytes:
    return b"%d" % (1 + int(data or b"0"))


# ---- the verbs


def test_a_lost_reply_to_a_write_that_was_done_is_no_conflict(
    bucket: ObjectStore, storage: ObjectStorage, tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / "view"
    storage.create(folder / "probe.json", b"")
    bucket.lose_first_replies()
    for number in range(5):
        storage.create(folder / f"{number}.json", b"%d" % number)
        storage.update(folder / "count.json", counted)
    assert storage.read(folder / "count.json") == b"5"
    with pytest.raises(FileExistsError):
        storage.create(folder / "4.json", b"of another")
    assert bucket.dropped >= 10


def test_a_write_that_is_done_after_its_writer_gave_up_is_done_once(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may fail for who waited, and be done; never as done by somebody else, nor twice."""
    monkeypatch.setattr(storage_module, "REQUEST_S", 1.0)
    storage = storage_in(bucket, tmp_path / "cache")
    folder = tmp_path / "cache" / "view"
    storage.create(folder / "probe.json", b"")
    bucket.at_first(1.3, lambda request: request.conditional)
    succeeded = 0
    for number in range(3):
        with contextlib.suppress(UnreadableError):
            storage.create(folder / f"{number}.json", b"%d" % number)
        with contextlib.suppress(UnreadableError):
            storage.update(folder / "count.json", counted)
            succeeded += 1
    time.sleep(0.5)
    bucket.fault = lambda _: None
    assert succeeded <= int(storage.read(folder / "count.json")) <= 3
    assert [storage.read(folder / f"{number}.json") for number in range(3)] == [b"0", b"1", b"2"]


def test_writers_at_once_create_once_and_lose_no_swap(
    bucket: ObjectStore, storage: ObjectStorage, tmp_path: Path
) -> None:
    folder, won = tmp_path / "cache" / "view", list[int]()

    def write(number: int) -> None:
        for _ in range(5):
            storage.update(folder / "count.json", counted)
        with contextlib.suppress(FileExistsError):
            storage.create(folder / "one.json", b"%d" % number)
            won.append(number)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert storage.read(folder / "count.json") == b"30"
    assert [b"%d" % number for number in won] == [storage.read(folder / "one.json")]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "unconditional",
            r"root: s3://bucket/.*: this object store creates an object that is there \(If-None-Match\); and it swaps an object that changed meanwhile",
        ),
        ("forbid", r"refuses these credentials .*AWS_ACCESS_KEY_ID"),
        ("refuse", r"gave no answer that can be used .*AWS_ENDPOINT_URL"),
    ],
)
def test_a_store_that_lies_or_refuses_is_an_error(
    bucket: ObjectStore, storage: ObjectStorage, tmp_path: Path, fault: str, message: str
) -> None:
    bucket.fault = lambda _: fault
    with pytest.raises((ConfigError, UnreadableError), match=message):
        storage.create(tmp_path / "cache" / "x.json", b"")


def test_a_damaged_file_in_cache_or_store_is_never_used(
    bucket: ObjectStore, storage: ObjectStorage, make_project: MakeProject
) -> None:
    project = project_on(bucket, make_project, [(i, i) for i in range(40)])
    project.run()
    snapshot = project.store.snapshot(1)
    path = project.store.checked_path(snapshot, snapshot.parts[0])
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + b"damaged!!")
    project.store.check_parts(snapshot)
    assert path.read_bytes() == whole, "fetched again"
    path.write_bytes(whole[:-9] + b"damaged!!")
    project.store.storage.put([path])
    path.unlink()
    with pytest.raises(SnapshotError, match="differs from its checksum in the manifest"):
        project.store.check_parts(snapshot)
    assert not path.exists()
    assert list(project.store.log.bad()) == [1]


def test_the_cache_is_bounded_and_leaves_what_was_just_used(
    bucket: ObjectStore, tmp_path: Path
) -> None:
    storage = ObjectStorage(bucket.root, tmp_path / "cache", 250)
    paths = [tmp_path / "cache" / "v" / "data" / "run" / f"{number}.parquet" for number in range(4)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
    storage.put(paths)
    for path in paths[:3]:
        os.utime(path, (1, path.stat().st_mtime))
    paths[3].unlink()
    # of processes that were killed, or are at it
    left = [paths[0].with_name(f".{number}.parquet.1.ab.tmp") for number in range(2)]
    for path in left:
        path.write_bytes(b"half")
    os.utime(left[0], (1, 1))
    storage.fetch([File(path, 100, "") for path in paths[2:]])
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert [path.exists() for path in left] == [False, True]


def test_without_its_library_it_is_said_what_to_install(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, ObjectStorage.__module__)
    told = r"^root 's3' needs obstore, .*: pip install 'precompute-store\[s3\]'$"
    with pytest.raises(ConfigError, match=told):
        make_project([(1, 1)], project={"root": "s3://bucket/prefix"})


# ---- leases


def test_a_lease_that_was_taken_meanwhile_is_no_second_ones(
    storage: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "view" / "notes"
    with (
        take(folder, "run", "first", ttl_s=60) as first,
        take(folder, "run", "second", ttl_s=60, force=True) as second,
    ):
        # who was silent does not write over the record of the next
        with pytest.raises(ConflictError, match="somebody else took it"):
            first._sign.beat()
        second.check()
    with monkeypatch.context() as patch:
        # another one is quicker between seeing that it is free and taking it
        patch.setattr(lease, "_found", lambda *_: None)
        with (
            take(folder, "run", "quicker", ttl_s=60) as quicker,
            pytest.raises(ConflictError, match=r"'run' is held \(by quicker"),
        ):
            take(folder, "run", "slower", ttl_s=60)
        quicker.release()


HOLD = """
import sys, time
from pathlib import Path
from precompute.store.disk.lease import take
from precompute.plugins.object_root.storage import ObjectStorage
from precompute.store.disk.storage import mount
from precompute.store.errors import FencedError
folder = Path(sys.argv[2])
mount(folder, ObjectStorage(sys.argv[1], folder))
lease = take(folder / "notes", "run", "child", ttl_s=2)
print("taken", flush=True)
sys.stdin.readline()
try:
    lease.check()
    print("mine", flush=True)
except FencedError as exc:
    print("fenced", flush=True)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_silent_holder_is_overtaken_and_fenced(
    bucket: ObjectStore, storage: ObjectStorage, tmp_path: Path, end: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, storage.url, str(tmp_path / "cache")],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "taken\n"
        folder = tmp_path / "cache" / "notes"
        process.send_signal(end)
        if end is signal.SIGKILL:
            process.wait()
        else:
            with pytest.raises(ConflictError):
                take(folder, "run", "test", ttl_s=2)
        with take(folder, "run", "test", ttl_s=2, wait_s=20):
            found = holder(folder, "run")
            assert found is not None
            assert (found.fence, found.holder) == (2, "test")
            if end is signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "fenced\n"
    finally:
        with process:
            process.kill()


# ---- runs


def story(
    make: Callable[[list[tuple[int, int]]], Scene],
    listed: Callable[[Scene], list[int]] = lambda project: project.numbers(),
) -> list[object]:
    """A full run, one with nothing to do, a delta, and a rollback: what each left; ``listed`` are
    the numbers of the snapshots."""
    results: list[object] = []
    for changed in (0, 0, 7):
        project = make([(i, i * 10 + changed * (i == 5)) for i in range(bool(changed), 30)])
        report = project.run()
        snapshot = project.snapshot_of(report)
        results.append((report.status, report.counts, snapshot.content, snapshot.kind))
    store = project.store
    results.append((listed(project), [entry.snapshot for entry in store.log.publishings()]))
    results.append(project.served([0, 1, 5, 29]))
    project.rollback()
    results.append((project.live().snapshot, project.served([0, 1, 5, 29]), project.rows()))
    return results


def test_runs_on_an_object_store_are_runs_on_a_folder(
    bucket: ObjectStore, make_project: MakeProject
) -> None:
    """Whose listings are late, which does every other write twice and loses the first reply to the
    others."""
    before, done, turns = bucket.dropped, set[tuple[str, str, bytes]](), itertools.cycle((0, 1))

    def fault(request: Request) -> str | None:
        key = request.method, request.path, request.body
        if request.method not in ("PUT", "POST", "DELETE"):
            return "late" if "list-type=2" in request.path else None
        if key in done:
            return None
        done.add(key)
        return "drop" if next(turns) else "twice"

    bucket.fault = fault

    def listed(project: Scene) -> list[int]:
        """Without the fault: a late listing is late by what it says, too."""
        bucket.fault, faulty = lambda _: None, bucket.fault
        # what a process listed within half a second is not listed again
        time.sleep(0.6)
        numbers = project.store.numbers()
        bucket.fault = faulty
        return numbers

    there = story(lambda rows: project_on(bucket, make_project, rows), listed)
    assert bucket.dropped - before > 25
    here = story(lambda rows: make_project(rows, view=VIEW, project={"online": "table:./here"}))
    assert [str(line) for line in there[:-1]] == [str(line) for line in here[:-1]]


@pytest.mark.parametrize("point", ["journal.append:1", "log.link:1"])
def test_a_run_that_is_killed_is_gone_on_with(
    bucket: ObjectStore, make_project: MakeProject, point: str
) -> None:
    project = project_on(bucket, make_project, [(i, i) for i in range(40)])
    killed = subprocess.run(
        [sys.executable, "-m", "precompute.jobs.cli", "-c", str(project.folder), "run", "numbers"],
        cwd=REPOSITORY,
        env=os.environ | bucket.environment | {"PRECOMPUTE_CRASH": f"{point}:kill"},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    # by a host that has nothing of it
    shutil.rmtree(project.root)
    report = project.run()
    assert (report.error, report.resumed) == (None, 40 if point == "journal.append:1" else 0)
    assert project.doubles() == {i: 2.0 * i for i in range(40)}
    assert project.served([0, 39]) == (1, [0.0, 78.0])
    assert project.store.numbers() == [1]
    assert project.store.journals.unfinished("", None) == []
    assert not project.faults()


def test_what_a_killed_run_left_in_the_bucket_goes_after_the_grace(
    bucket: ObjectStore, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that of its journal, which lies elsewhere than its files."""
    monkeypatch.setattr(storage_module, "FRESH_S", 0.05)
    monkeypatch.setattr(chunks, "WINDOW_ROWS", 1)
    monkeypatch.setattr(chunks, "PART_BYTES", 1)
    project = project_on(bucket, make_project, [(1, 1), (2, None)], max_rejected=0.0)
    with pytest.raises(RejectedError):
        project.run()
    store, items = project.store, ObjectStorage.items
    monkeypatch.setattr(
        ObjectStorage,
        "items",
        lambda storage, folder: [item._replace(modified_ns=0) for item in items(storage, folder)],
    )

    def left() -> set[str]:
        time.sleep(storage_module.FRESH_S)
        storage, data = store.storage, store.data
        files = {name for run in storage.names(data) for name in storage.names(data / run)}
        return files | {log.path.name for log in storage.logs(data, JOURNAL)}

    before = left()
    assert {JOURNAL, "part-00000.parquet"} <= before
    for after_s in (0.0, 3600.0):
        gone = collect(store, keep=1, grace_s=7200.0, now_s=time.time() + after_s)
        assert [item.path.name for item in gone if "data" in item.path.parts] == []
        assert left() == before
    collect(store, keep=1, grace_s=7200.0, now_s=time.time() + 7300)
    assert left() == set()
    project_on(bucket, make_project, [(1, 1), (2, 2)]).run()
    assert collect(store, keep=1, grace_s=7200.0, now_s=time.time() + 7300) == []


def test_a_run_takes_as_many_requests_whatever_the_rows(
    bucket: ObjectStore, make_project: MakeProject
) -> None:
    taken = []
    for rows in (100, 20_000):
        project = project_on(bucket, make_project, [(i, i) for i in range(rows)])
        before = len(bucket.requests)
        project.run()
        taken.append(Counter(request.method for request in bucket.requests[before:]))
    # the second has a live snapshot before it; leases beat besides, where the machine is slow
    assert taken[1].total() < 110, taken
    assert taken[1]["PUT"] <= taken[0]["PUT"] + 6, taken
