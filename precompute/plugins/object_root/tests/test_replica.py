"""Replicas: any host serves what is published, says when it is cut off, and restores from the root
what was damaged on its own disk."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from precompute.jobs.ops.retention import drop
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.rollback import reconcile
from precompute.plugins.object_root import replica as replica_module
from precompute.plugins.object_root import storage as storage_module
from precompute.plugins.object_root.replica import LIVE_FILES, Follower, Replica
from precompute.plugins.object_root.tests.roots import host, project_on
from precompute.store.account import checker
from precompute.store.account.account import (
    note_sighting,
    read_account,
    read_followed,
    write_followed,
)
from precompute.store.account.checker import Rounds, check_live
from precompute.store.account.followers import Followers
from precompute.store.answers.lookup import Lookup
from precompute.store.disk import lease
from precompute.store.disk.record import replace
from precompute.store.disk.storage import unmount_all
from precompute.store.doors import ROUTES
from precompute.store.errors import (
    ConflictError,
    PrecomputeError,
    SnapshotError,
    UnreadableError,
    VectorIndexError,
)
from precompute.store.http.app import create_app
from precompute.store.offline.log import DROP_LEASE, PUBLISH_LEASE
from precompute.store.online.online_store import OnlineStore, number_of
from tests.asgi import call
from tests.fixtures import MakeProject, write_project
from tests.memory_store import MemoryStore
from tests.object_store import ObjectStore
from tests.online import of_number
from tests.scene import Scene
from tests.server import Server

KIND: type[Followers] = Replica
"""It is what the door asks for."""


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
        # status fetches no Parquet here
        before = len(bucket.requests)
        line = other.status()
        assert (line["attention"], line["online"]) == ([], True)
        assert [r.path for r in bucket.requests[before:] if "/data/" in r.path] == []
        # what was compared is not compared with each flip
        assert (other.store.leases / LIVE_FILES).exists()
        assert other.served([1, 39]) == project.served([1, 39]) == (1, [20.0, 780.0])
        project = project_on(bucket, make_project, [(i, i * 10 + 1) for i in range(40)])
        project.run()
        bucket.fault = lambda _: "refuse"
        with pytest.raises(UnreadableError, match="gave no answer"):
            replica.follow()
        assert other.served([1, 39]) == (1, [20.0, 780.0])
        bucket.fault = lambda _: None
        assert replica.follow()
        assert other.served([1, 39]) == (2, [22.0, 782.0])
        project.rollback(hold=False)
        assert replica.follow()
        assert other.served([1, 39]) == (1, [20.0, 780.0])
    assert project.cli("resume", "numbers") == 0
    # and the other host goes on from there
    project_on(bucket, make_project, [(i, i * 10 + 2) for i in range(40)])
    assert other.run().status == "published"
    assert other.served([1, 39]) == (3, [24.0, 784.0])


def test_a_server_follows_the_root(
    bucket: ObjectStore, make_project: MakeProject, tmp_path: Path
) -> None:
    project = project_on(bucket, make_project, [(i, i * 10) for i in range(40)])
    project.run()
    with Server(host(project, tmp_path / "other").folder) as server:

        def answer() -> tuple[str, int, float]:
            (row,) = server.lookup("numbers", [39])
            return row["status"], row["snapshot"], row["features"]["double"]

        until(lambda: answer() == ("fresh", 1, 780.0))
        project_on(bucket, make_project, [(i, i * 10 + 1) for i in range(40)]).run()
        until(lambda: answer() == ("fresh", 2, 782.0))


def test_a_server_follows_says_that_it_is_cut_off_and_catches_up(
    bucket: ObjectStore,
    make_project: MakeProject,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    project = project_on(bucket, make_project, [(i, i * 10) for i in range(40)])
    other = host(project, tmp_path / "other")
    # one view that cannot be followed leaves no other behind
    broken = project.offline.view("broken").leases / LIVE_FILES
    project.store.storage.write(broken, b"{")
    follower = Follower(other.offline, other.open_online, ["broken", "numbers", "never_run"])
    try:
        with other.online_store() as online, caplog.at_level("INFO"):
            project.run()
            until(lambda: online.live("numbers") is not None)
            assert other.served([1]) == (1, [20.0])
            bucket.fault = lambda _: "forbid"
            until(lambda: "view 'numbers': behind the root for" in caplog.text)
            assert "view 'broken': behind the root for" in caplog.text
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
        project = project_on(bucket, make_project, [(i, i * 10 + 1) for i in range(40)])
        project.run()
        table = next(
            name
            for name in sorted(project.store.storage.names(project.store.folder / "online"))[::-1]
        )
        path = project.store.folder / "online" / table
        whole = path.read_bytes()
        project.store.storage.delete(path)
        with pytest.raises(SnapshotError, match=r"\.table, which served\.json names, is not there"):
            replica.follow()
        assert other.served([1]) == (1, [20.0])
        path.write_bytes(whole)
        project.store.storage.put([path])
        assert replica.follow()
        assert other.served([1]) == (2, [22.0])


# ---- damage on a replica's own disk


class Host(NamedTuple):
    """A host that follows, what is served there, and readers that opened it while it was whole."""

    scene: Scene
    replica: Replica
    online: OnlineStore
    lookup: Lookup
    bucket: ObjectStore


ROWS = 40


@pytest.fixture(scope="module")
def following(
    object_server: ObjectStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    """Of a view that is live as two segments, with an index of both."""
    folder = tmp_path_factory.mktemp("following")
    object_server.prefix = folder.name
    for changed in (0, 2):
        rows = [(i, i + 0.5 if i < changed else float(i)) for i in range(ROWS)]
        project = project_on(
            object_server,
            partial(write_project, folder / "project"),
            rows,
            index={"on": "vector", "metric": "l2"},
        )
        project.run()
    scene = host(project, folder / "host")
    with scene.online_store() as online, scene.lookup() as lookup:
        replica = Replica(scene.store, online)
        replica.follow()
        assert scene.pointer().numbers == (1, 2)
        yield Host(scene, replica, online, lookup, object_server)
    unmount_all()


@pytest.fixture
def damaged_host(following: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """:func:`following`; every look compares every file."""
    monkeypatch.setattr(checker, "OFTEN_S", -1.0)
    before = check_whole(following)
    yield following
    following.bucket.fault = lambda _: None
    following.replica.follow(again=True)
    assert check_whole(following) == before


ROW = 4096 + 600
"""Of a table: within a row that no upper segment replaces."""


def flip(path: Path, at: float) -> None:
    """Another bit there: at a byte, or a share of the file; in place, as a disk does it."""
    with path.open("rb+") as file:
        file.seek(int(at if at > 1 else at * (path.stat().st_size - 1)))
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(512))


def copied(path: Path) -> None:
    """A copy takes the place of the same file under another name, and has another bit."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    flip(path, ROW)


def table(scene: Scene, number: int) -> Path:
    return of_number(scene.folder / "online" / "numbers", number, ".table")


def index(scene: Scene, number: int, name: str) -> Path:
    return of_number(scene.root / "numbers" / "index", number) / name


def answers(lookup: Lookup) -> tuple[list[Any], list[Any]]:
    """Each row's value, or why it is missing; and the keys nearest to one."""
    rows = lookup.get("numbers", range(ROWS))
    found = lookup.search("numbers", key=7, k=2)["rows"]
    return rows["double"].to_pylist(), [row["key"] for row in found]


def check_whole(following: Host) -> tuple[list[Any], list[Any]]:
    """What is answered by readers that have it open, and by new ones."""
    assert check_live(following.scene.store, following.online, here=True).trouble == []
    with following.scene.lookup() as new:
        assert answers(new) == answers(following.lookup)
    return answers(following.lookup)


DAMAGE: dict[str, tuple[Callable[[Scene], object], int]] = {
    "a bit of a row": (lambda s: flip(table(s, 1), ROW), 1),
    "a bit of the upper segment": (lambda s: flip(table(s, 2), 0.99), 1),
    "the table": (lambda s: table(s, 1).unlink(), 0),
    "more at the table's end": (lambda s: append(table(s, 1)), 1),
    "a bit of a copy on another disk": (lambda s: copied(table(s, 1)), 0),
    "all that is online": (lambda s: shutil.rmtree(s.folder / "online"), 0),
    "all that was fetched": (lambda s: shutil.rmtree(s.store.folder), 12),
    "a bit of the online pointer": (lambda s: flip(table(s, 1).with_name("live.json"), 0.5), 0),
    "a bit of the index's vectors": (lambda s: flip(index(s, 1, "vectors.faiss"), 0.5), 1),
    "a bit of the changed rows' index": (lambda s: flip(index(s, 2, "rows.arrow"), 0.5), 1),
    "the index": (lambda s: shutil.rmtree(index(s, 1, ".")), 5),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_seen_reported_and_restored_from_the_root(damaged_host: Host, what: str) -> None:
    scene, replica, online, lookup, bucket = damaged_host
    whole, _ = answers(lookup)
    damage, files = DAMAGE[what]
    damage(scene)
    scene.store.leases.mkdir(parents=True, exist_ok=True)
    account = check_live(scene.store, online, here=True)
    gone = what == "all that is online"
    assert (account.trouble == []) is gone
    # none of it is served meanwhile, to whom opened it before or after
    for reader in (scene.open_lookup(), lookup):
        with contextlib.suppress(PrecomputeError):
            found = reader.get("numbers", range(ROWS))["double"].to_pylist()
            assert set(found) <= {None, *whole}
    ready = call(create_app(lookup), "GET", "/readyz")
    assert ready.json["status"] == ("not ready" if gone else "degraded")
    before = len(bucket.requests)
    replica.follow(again=True)
    # what is whole is not fetched
    fetched = [r for r in bucket.requests[before:] if "/index/" in r.path or "/online/" in r.path]
    assert len(fetched) == files
    check_whole(damaged_host)
    assert call(create_app(lookup), "GET", "/readyz").json["status"] == "ready"


def test_what_a_reader_meets_is_compared_at_once(
    damaged_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "OFTEN_S", 1e9)
    monkeypatch.setattr("precompute.store.account.account._last", {})
    scene, _, online, lookup, _ = damaged_host
    flip(table(scene, 1), ROW)
    assert check_live(scene.store, online, here=True, budget_s=-1.0).trouble == []
    reasons = lookup.get("numbers", range(ROWS))["reason"].to_pylist()
    assert reasons.count("damaged") == 1
    key = str(reasons.index("damaged"))
    rows, file = check_live(scene.store, online, here=True, budget_s=-1.0).findings
    assert (rows.keys, rows.what, file.what) == ((key,), "rows", str(table(scene, 1)))


def test_while_the_root_cannot_be_reached_damage_stays_reported(
    damaged_host: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is looked for all the same; restored as soon as the root answers."""
    monkeypatch.setattr(checker, "POLL_S", 0.01)
    scene, bucket = damaged_host.scene, damaged_host.bucket
    bucket.fault = lambda _: "forbid"
    follower = Follower(scene.offline, scene.open_online, ["numbers"])
    beside = Rounds(scene.offline, scene.open_online, ["numbers"], 0.0, follower.restore_files)
    try:
        flip(index(scene, 1, "vectors.faiss"), 0.5)
        until(lambda: "view 'numbers': nothing is mended" in caplog.text)
        assert "the object store refuses these credentials" in caplog.text
        account = read_account(scene.store.leases, "numbers")
        assert [finding.what for finding in account.findings] == [
            str(index(scene, 1, "vectors.faiss"))
        ]
        with scene.lookup() as new, pytest.raises(VectorIndexError):
            new.search("numbers", key=7, k=2)
        beside.stop()
        bucket.fault = lambda _: None
        # one look, for what a reader met: what is restored is looked at again
        monkeypatch.setattr(checker, "SOON_S", 0.0)
        monkeypatch.setattr("precompute.store.account.account._last", {})
        note_sighting(scene.store.leases)
        beside = Rounds(scene.offline, scene.open_online, ["numbers"], 1e6, follower.restore_files)
        until(lambda: not read_account(scene.store.leases, "numbers").findings)
    finally:
        beside.stop()
        follower.stop()


def test_damage_in_the_root_too_is_not_served_and_reported(damaged_host: Host) -> None:
    scene, replica, online, _, _ = damaged_host
    path = index(scene, 1, "vectors.faiss")
    whole = path.read_bytes()
    flip(path, 0.5)
    scene.store.storage.put([path])
    try:
        with pytest.raises(
            SnapshotError,
            match=r"index/1-[0-9a-f]+-base-3/vectors\.faiss differs from its checksum .* --reload sends it again",
        ):
            replica.follow(again=True)
        assert check_live(scene.store, online, here=True).trouble != []
    finally:
        path.write_bytes(whole)
        scene.store.storage.put([path])


def test_a_damaged_record_for_followers_gives_way_to_a_publishing(
    bucket: ObjectStore, make_project: MakeProject, tmp_path: Path
) -> None:
    project = project_on(bucket, make_project, [(1, 1.0)])
    project.run()
    path = project.store.leases / LIVE_FILES
    path.write_bytes(project.store.storage.read(path)[:-9])
    project.store.storage.put([path])
    follower = host(project, tmp_path / "host")
    with follower.online_store() as online:
        replica = Replica(follower.store, online)
        with pytest.raises(
            SnapshotError, match=r"cannot be followed: .*precompute publish numbers"
        ):
            replica.follow()
        assert project.cli("publish", "numbers") == 0
        replica.follow()
    assert follower.pointer() == project.pointer()


def test_a_host_that_publishes_restores_from_the_root_too(
    bucket: ObjectStore, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And loads nothing again, where the root is whole."""
    monkeypatch.setattr(checker, "OFTEN_S", -1.0)
    project = project_on(bucket, make_project, [(i, i) for i in range(ROWS)])
    project.run()
    flip(table(project, 1), ROW)
    (found,) = project.status()["attention"]
    assert "are damaged" in found
    report = reconcile(project, "numbers", Silent())
    assert report is not None
    assert (report.status, project.live().epoch) == ("current", 1)
    assert (project.status()["attention"], project.faults()) == ([], [])
    # what the root lost, too, is loaded again, and sent
    flip(table(project, 1), ROW)
    project.store.storage.put([project.store.folder / "online" / table(project, 1).name])
    report = reconcile(project, "numbers", Silent())
    assert report is not None
    assert (report.status, project.live().epoch) == ("published", 2)
    assert (project.status()["attention"], project.faults()) == ([], [])


# ---- how far behind


def test_since_when_a_host_is_cut_off_is_reported_everywhere(
    bucket: ObjectStore,
    make_project: MakeProject,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(replica_module, "NOTED_S", 0.0)
    project = project_on(bucket, make_project, [(i, i) for i in range(4)])
    project.run()
    other = host(project, tmp_path / "other")
    notes = other.store.leases
    follower = Follower(other.offline, other.open_online, ["numbers"])
    with other.lookup() as lookup:
        app = create_app(lookup)
        try:
            until(lambda: read_followed(notes) is not None)
            assert call(app, "GET", "/readyz").json["status"] == "ready"
            assert behind(app) < 15
            bucket.fault = lambda _: "forbid"
            until(lambda: cut_off_us(notes) > 1_000_000)
        finally:
            follower.stop()
        noted = read_followed(notes)
        assert noted is not None
        write_followed(notes, replace(noted, at_us=noted.at_us - 3_600_000_000))
        ready = call(app, "GET", "/readyz").json
        said = "numbers is behind the root for 60 min; the server's log says why"
        assert (ready["status"], ready["why"]) == ("degraded", said)
        # who renders it is a process of its own, which reads what lies here
        unmount_all()
        if ROUTES.is_here("/"):
            assert said.partition(";")[0] in call(app, "GET", "/").body.decode()
        assert 3600 < behind(app) < 3700
        assert other.served([3]) == (1, [6.0])
    assert other.cli("status", "--json") == 1
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["status"], line["snapshot"], line["rows"]) == ("unreadable", 1, 4)
    refused, cut_off = line["attention"]
    assert "the object store refuses these credentials" in refused
    assert cut_off == "the server here is behind the root for 60 min, and serves what was live"


def cut_off_us(notes: Path) -> int:
    """For how long it was when that was noted last."""
    noted = read_followed(notes)
    return noted.noted_at_us - noted.at_us if noted is not None and noted.why else 0


def behind(app: Any) -> float:
    """As Prometheus reads it."""
    text = call(app, "GET", "/metrics").body.decode()
    return float(text.partition('precompute_view_behind_seconds{view="numbers"} ')[2].split()[0])


def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.02)


# ---- what may go, and what may not


def test_who_drops_a_view_takes_its_leases_whatever_is_listed(
    bucket: ObjectStore, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may be late, and a run begin at the same time."""
    project, taken = project_on(bucket, make_project, [(1, 1.0)]), list[str]()
    project.run()
    project.store.storage.delete_all(project.store.leases)
    own = lease.take

    def take(folder: Path, name: str, *given: Any, **more: Any) -> Any:
        taken.append(name)
        return own(folder, name, *given, **more)

    monkeypatch.setattr("precompute.jobs.ops.retention.take", take)
    drop(project, "numbers")
    assert taken == [PUBLISH_LEASE, DROP_LEASE]


def test_a_view_that_was_dropped_meanwhile_is_served_no_more(
    bucket: ObjectStore, make_project: MakeProject, tmp_path: Path
) -> None:
    """By a server that was started since, too; one that readers never knew of is another
    thing."""
    project = project_on(bucket, make_project, [(i, i) for i in range(4)])
    project.run()
    other = host(project, tmp_path / "other")
    with other.online_store() as online:
        Replica(other.store, online).follow()
        project.store.storage.delete(project.store.leases / LIVE_FILES)
        time.sleep(storage_module.FRESH_S)
        Replica(other.store, online).follow()
        assert other.served([3]) == (1, [6.0])
        project.publish()
        size_bytes = sum(
            len(request.body)
            for request in bucket.requests
            if request.method == "PUT" and f"/{bucket.prefix}/numbers/" in request.path
        )
        dropped = drop(other, "numbers")
        assert 0.5 * size_bytes < dropped.size_bytes < size_bytes, "in the root, not in the cache"
        project.cli("drop", "numbers", "--yes")
        Replica(other.store, online).follow()
        assert online.live("numbers") is None


def test_rows_of_another_project_are_left_alone(
    bucket: ObjectStore, make_project: MakeProject, tmp_path: Path
) -> None:
    theirs = make_project([(i, i + 1) for i in range(4)], project={"online": "table:./online"})
    theirs.run()
    before = table(theirs, 1).read_bytes()
    ours = project_on(bucket, partial(write_project, tmp_path / "ours"), [(3, 3)])
    with theirs.online_store() as online:
        replica = Replica(ours.store, online)
        assert not replica.follow()
        ours.run()
        with pytest.raises(ConflictError, match="is published by another project"):
            replica.follow()
        assert Follower(ours.offline, MemoryStore, ["numbers"]).restore_files is None
    assert table(theirs, 1).read_bytes() == before
    assert theirs.served([3]) == (1, [8.0])


def test_a_late_publisher_removes_nothing_of_a_newer_publishing(
    bucket: ObjectStore, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "FRESH_S", 0.05)
    for changed in (0, 1):
        project = project_on(bucket, make_project, [(i, i + changed) for i in range(9)])
        project.run()
    folder, storage = project.store.folder / "online", project.store.storage

    def numbers() -> list[int]:
        time.sleep(storage_module.FRESH_S)
        return sorted(number_of(name.removesuffix(".table")) for name in storage.names(folder))

    with project.online_store() as online:
        replica = Replica(project.store, online)
        assert numbers() == [1, 2]
        first, second = (segment.name for segment in online.segments("numbers"))
        # the publisher of 1 goes on only now
        replica.drop_all_but({first})
        assert numbers() == [1, 2]
        replica.drop_all_but({second})
        assert numbers() == [2]


def test_a_file_of_equal_size_that_lay_there_before_is_not_believed(
    bucket: ObjectStore, make_project: MakeProject, tmp_path: Path
) -> None:
    project = project_on(bucket, make_project, [(i, i) for i in range(4)])
    project.run()
    other = host(project, tmp_path / "other")
    cached = other.store.folder / "online" / table(project, 1).name
    own = other.folder / "online" / "numbers" / cached.name
    # and one of a later number, which somebody who publishes here is loading
    later = own.with_name("9-00000000.table")
    for path in (cached, own, later):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(table(project, 1).stat().st_size))
    with other.online_store() as online:
        assert Replica(other.store, online).follow()
    assert later.exists()
    assert other.served([3]) == (1, [6.0])
    assert cached.read_bytes() == own.read_bytes() == table(project, 1).read_bytes()
