"""A root in an object store: the same runs, answers and guarantees as on a folder, whatever becomes
of requests and replies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from precompute.jobs.ops.retention import drop
from precompute.jobs.run.replica import SERVED, Follower, Replica
from precompute.store.disk.lease import holder, is_held, take
from precompute.store.disk.object_storage import ObjectStorage
from precompute.store.disk.storage import File, unmount_all
from precompute.store.errors import ConfigError, ConflictError, FencedError, SnapshotError
from tests import REPOSITORY
from tests.conftest import MakeProject
from tests.object_store import ObjectStore, object_store
from tests.scene import Scene


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def bucket(running: ObjectStore, tmp_path: Path) -> Iterator[ObjectStore]:
    """The store, with a root of the test's own."""
    running.prefix = tmp_path.name
    yield running
    running.fault = lambda _: None
    unmount_all()


@pytest.fixture
def storage(bucket: ObjectStore, tmp_path: Path) -> ObjectStorage:
    return bucket.storage(tmp_path / "cache")


VIEW = {"gates": {"rows": None, "shift": None, "norm": None}}


def project_on(
    bucket: ObjectStore, make_project: MakeProject, rows: list[tuple[int, int]]
) -> Scene:
    root = f"s3://bucket/{bucket.prefix}"
    return make_project(rows, view=dict(VIEW), project={"root": root, "online": "table:./online"})


def host(project: Scene, folder: Path) -> Scene:
    """The project as another host has it: its configuration, and nothing else."""
    folder.mkdir()
    for name in ("project.yaml", "views", "data.parquet"):
        os.symlink(project.home / name, folder / name)
    return Scene(folder, {})


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
def test_a_store_that_lies_or_refuses_is_told(
    bucket: ObjectStore, storage: ObjectStorage, tmp_path: Path, fault: str, message: str
) -> None:
    bucket.fault = lambda _: fault
    with pytest.raises((ConfigError, SnapshotError), match=message):
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
    assert list(project.store.refs.bad()) == [1]


def test_the_cache_is_bounded_and_leaves_what_was_just_used(
    bucket: ObjectStore, tmp_path: Path
) -> None:
    storage = ObjectStorage(f"s3://bucket/{bucket.prefix}", tmp_path / "cache", 250)
    paths = [tmp_path / "cache" / "v" / "data" / "run" / f"{number}.parquet" for number in range(4)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
    storage.put(paths)
    for path in paths[:3]:
        os.utime(path, (1, path.stat().st_mtime))
    paths[3].unlink()
    storage.fetch([File(path, 100, "") for path in paths[2:]])
    assert [path.exists() for path in paths] == [False, False, True, True]


# ---- leases


def test_one_holds_a_lease_and_a_second_is_refused_at_once(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / "view" / "refs"
    with take(folder, "run", "first", ttl_s=6) as first:
        began = time.monotonic()
        with pytest.raises(ConflictError, match=r"'run' is held \(by first, process \d+\)"):
            take(folder, "run", "second", ttl_s=6)
        assert time.monotonic() - began < 2
        first.check()
        assert is_held(folder, "run")
    assert not is_held(folder, "run")
    with take(folder, "run", "second", ttl_s=6) as second:
        assert second.record.fence == first.record.fence + 1
        with pytest.raises(FencedError, match="lost its lease 'run' to second"):
            first.check()


HOLD = """
import sys, time
from pathlib import Path
from precompute.store.disk.lease import take
from precompute.store.disk.object_storage import ObjectStorage
from precompute.store.disk.storage import mount
from precompute.store.errors import FencedError
folder = Path(sys.argv[2])
mount(folder, ObjectStorage(sys.argv[1], folder))
lease = take(folder / "refs", "run", "child", ttl_s=2)
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
        folder = tmp_path / "cache" / "refs"
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


def story(make: Callable[[list[tuple[int, int]]], Scene]) -> list[object]:
    """A full run, one with nothing to do, a delta, and a rollback: what each left."""
    told: list[object] = []
    for changed in (0, 0, 7):
        project = make([(i, i * 10 + changed * (i == 5)) for i in range(bool(changed), 30)])
        report = project.run()
        snapshot = project.snapshot_of(report)
        told.append((report.status, report.counts, snapshot.content, snapshot.kind))
    store = project.store
    told.append((store.numbers(), [entry.snapshot for entry in store.refs.publishings()]))
    told.append(project.served([0, 1, 5, 29]))
    project.rollback()
    told.append((project.live().snapshot, project.served([0, 1, 5, 29]), project.rows()))
    return told


def test_runs_on_an_object_store_are_runs_on_a_folder(
    bucket: ObjectStore, make_project: MakeProject
) -> None:
    bucket.lose_first_replies()
    there = story(lambda rows: project_on(bucket, make_project, rows))
    assert bucket.dropped > 20
    here = story(lambda rows: make_project(rows, view=VIEW, project={"online": "table:./here"}))
    assert [str(line) for line in there[:-1]] == [str(line) for line in here[:-1]]


@pytest.mark.parametrize("point", ["journal.append", "manifest.link", "live.cas", "online.flip"])
def test_a_run_that_is_killed_is_gone_on_with(
    bucket: ObjectStore, make_project: MakeProject, point: str
) -> None:
    project = project_on(bucket, make_project, [(i, i) for i in range(40)])
    killed = subprocess.run(
        [sys.executable, "-m", "precompute.jobs.cli", "-c", str(project.folder), "run", "numbers"],
        cwd=REPOSITORY,
        env=os.environ | bucket.environment | {"PRECOMPUTE_CRASH": f"{point}:1:kill"},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    # by a host that has nothing of it
    shutil.rmtree(project.root)
    report = project.run()
    assert (report.error, report.resumed) == (None, 40 if point == "journal.append" else 0)
    assert project.doubles() == {i: 2.0 * i for i in range(40)}
    assert project.served([0, 39]) == (1, [0.0, 78.0])
    assert project.store.numbers() == [1]
    assert project.store.journals.unfinished("", None) == []
    assert not project.faults()


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


# ---- replicas


def test_a_replica_serves_what_is_published_and_what_it_has_when_cut_off(
    bucket: ObjectStore, make_project: MakeProject, tmp_path: Path
) -> None:
    project = project_on(bucket, make_project, [(i, i * 10) for i in range(40)])
    project.run()
    other = host(project, tmp_path / "other")
    with other.online_store() as online:
        replica = Replica(other.store, online)
        assert replica.follow()
        assert not replica.follow()
        assert other.served([1, 39]) == project.served([1, 39]) == (1, [20.0, 780.0])
        project = project_on(bucket, make_project, [(i, i * 10 + 1) for i in range(40)])
        project.run()
        bucket.fault = lambda _: "refuse"
        with pytest.raises(SnapshotError, match="gave no answer"):
            replica.follow()
        assert other.served([1, 39]) == (1, [20.0, 780.0])
        bucket.fault = lambda _: None
        assert replica.follow()
        assert other.served([1, 39]) == (2, [22.0, 782.0])
        project.rollback()
        assert replica.follow()
        assert other.served([1, 39]) == (1, [20.0, 780.0])
    # and the other host goes on from there
    project_on(bucket, make_project, [(i, i * 10 + 2) for i in range(40)])
    assert other.run().status == "published"
    assert other.served([1, 39]) == (3, [24.0, 784.0])


def test_a_server_follows_says_that_it_is_cut_off_and_catches_up(
    bucket: ObjectStore,
    make_project: MakeProject,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def until(done: Callable[[], bool]) -> None:
        limit = time.monotonic() + 60
        while not done():
            assert time.monotonic() < limit
            time.sleep(0.02)

    project = project_on(bucket, make_project, [(i, i * 10) for i in range(40)])
    other = host(project, tmp_path / "other")
    # one view that cannot be followed leaves no other behind
    broken = project.offline.view("broken").refs.folder / SERVED
    project.store.storage.write(broken, b"{")
    follower = Follower(other.offline, other.open_online, ["broken", "numbers", "never_run"])
    try:
        with other.online_store() as online, caplog.at_level("INFO"):
            project.run()
            until(lambda: online.live("numbers") is not None)
            assert other.served([1]) == (1, [20.0])
            bucket.fault = lambda _: "forbid"
            until(lambda: "view 'numbers': cut off from the root for" in caplog.text)
            assert "view 'broken': cut off from the root for" in caplog.text
            assert other.served([1]) == (1, [20.0])
            bucket.fault = lambda _: None
            until(lambda: "view 'numbers': the root answers again" in caplog.text)
            drop(project, "numbers")
            until(lambda: online.live("numbers") is None)
    finally:
        follower.stop()


def test_a_file_collected_while_it_is_fetched_leaves_what_is_served(
    bucket: ObjectStore, make_project: MakeProject, tmp_path: Path
) -> None:
    project = project_on(bucket, make_project, [(i, i * 10) for i in range(40)])
    project.run()
    other = host(project, tmp_path / "other")
    with other.online_store() as online:
        replica = Replica(other.store, online)
        replica.follow()
        for changed in (1, 2):
            project = project_on(bucket, make_project, [(i, i * 10 + changed) for i in range(40)])
            project.run()
        table = next(
            name
            for name in sorted(project.store.storage.names(project.store.folder / "online"))[::-1]
        )
        path = project.store.folder / "online" / table
        kept = path.read_bytes()
        project.store.storage.delete(path)
        with pytest.raises(SnapshotError, match=r"served\.json cannot be followed"):
            replica.follow()
        assert other.served([1]) == (1, [20.0])
        path.write_bytes(kept)
        project.store.storage.put([path])
        assert replica.follow()
        assert other.served([1]) == (3, [24.0])
