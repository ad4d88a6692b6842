"""Garbage collection: what anything can still reach stays, whatever else goes; and nothing goes
while somebody works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.cli import main
from precompute.jobs.run.rows import chunks
from precompute.jobs.serve.fallback import ViewFallback
from precompute.store.answers.lookup import Lookup
from precompute.store.disk.lease import take
from precompute.store.errors import ConflictError, FencedError, RejectedError
from precompute.store.offline import gc as gc_module
from precompute.store.offline.gc import Garbage, collect
from precompute.store.offline.log import PUBLISH_LEASE, run_lease
from tests import REPOSITORY
from tests.fixtures import MakeProject, Prepared
from tests.jobs.test_run_all import view as doubled
from tests.scene import Scene

LATER = 10.0**6
"""Seconds: past every grace."""
Captured = pytest.CaptureFixture[str]


def make(
    make_project: MakeProject,
    rows: list[tuple[Any, Any]],
    keep: int = 1,
    grace: str = "1d",
    **view: Any,
) -> Scene:
    retention = {"retention": {"keep": keep, "grace": grace}}
    gates = {"rows": None, "first": None}  # vectors have nearly one direction
    return make_project(rows, view={"gates": gates} | view, project=retention)


def published(make_project: MakeProject, factors: list[float], **options: Any) -> Scene:
    """One snapshot for each factor; each of them full, since every row changes."""
    for factor in factors:
        project = make(make_project, [(i, i * factor) for i in (1, 2, 3)], **options)
        project.run()
    return project


def gc(
    project: Scene, view: str = "numbers", after_s: float = LATER, dry_run: bool = False
) -> list[Garbage]:
    retention = project.settings.retention
    now = time.time() + after_s
    return collect(
        project.offline.view(view),
        keep=retention.keep,
        grace_s=retention.grace,
        dry_run=dry_run,
        now_s=now,
    )


def files(project: Scene) -> set[Path]:
    return {
        path for path in project.root.rglob("*") if path.is_file() and "notes" not in path.parts
    }


def reads_well(project: Scene, view: str = "numbers") -> None:
    """Every snapshot there is can be read whole."""
    store = project.store
    for number in store.offline.view(view).numbers():
        snapshot = store.offline.view(view).snapshot(number)
        store.check_parts(snapshot)
        assert sum(batch.num_rows for batch in store.batches(snapshot)) == snapshot.rows


# ---- what stays


def test_live_previous_newest_pinned_and_young_stay(prepared: Prepared) -> None:
    project = prepared(published, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    store = project.store
    project.publish(snapshot=3)  # live 3, previous 6
    store.pin(1, "a test")
    assert gc(project, after_s=0) == []  # all are young
    gone = gc(project)
    assert project.numbers() == [1, 3, 6]
    assert [item.path.name for item in gone[:3]] == [f"{n:020d}.json" for n in (2, 4, 5)]
    reads_well(project)
    assert project.faults() == []
    store.log.unpin(1)
    gc(project)
    assert project.numbers() == [3, 6]
    assert gc(project) == []


def of_version(version: int) -> dict[str, Any]:
    return {"model": {"use": "tests.models:Doubler", "args": {"version": version}}}


def test_a_coming_model_and_the_live_one_keep_their_own(make_project: MakeProject) -> None:
    def nightly(factor: float, version: int = 1, command: str = "run") -> Scene:
        rows = [(i, i * factor) for i in (1, 2, 3)]
        project = make(make_project, rows, keep=2, **of_version(version))
        project.run(command=command)
        return project

    nightly(1.0)
    # a model of which nothing is published yet: 2, 3
    nightly(2.0, 2, "materialize")
    nightly(3.0, 2, "materialize")
    for factor in (4.0, 5.0, 6.0, 7.0):
        project = nightly(factor)
    gc(project)
    assert project.numbers() == [2, 3, 6, 7]
    # of a third one those that came before do not stay, but what is live does
    project = nightly(8.0, 3, "materialize")
    gc(project)
    assert project.numbers() == [6, 7, 8]
    # the other way round: many of a coming one
    for factor in (9.0, 10.0, 11.0):
        project = nightly(factor, 3, "materialize")
    gc(project)
    assert project.numbers() == [6, 7, 10, 11]
    assert project.live().snapshot == 7
    # and going back computes nothing
    assert nightly(7.0).report().counts["written"] == 0


def test_a_model_that_was_rolled_back_from_keeps_no_other_out(make_project: MakeProject) -> None:
    rows = [(1, 1.0), (2, 2.0)]
    make(make_project, rows, **of_version(1)).run()
    make(make_project, rows, **of_version(2)).materialize()
    make(make_project, rows, **of_version(3)).run()
    project = make(make_project, rows, **of_version(1))
    project.rollback()
    make(make_project, [(1, 5.0), (2, 2.0)], **of_version(1)).run()
    gc(project)
    assert project.numbers() == [1, 2, 3, 4]


def test_what_was_rolled_back_from_goes_as_any_other(prepared: Prepared) -> None:
    """What is live, what was live before and the newest stay; its number is not given again."""
    project = prepared(published, [1.0, 2.0, 3.0], keep=3)
    for _ in range(2):
        project.rollback(hold=False)
    project = prepared(published, [4.0, 5.0, 6.0], keep=1)
    gc(project)
    assert (project.numbers(), sorted(project.store.log.bad())) == ([5, 6], [2, 3])
    project.rollback()
    gc(project)
    assert (project.numbers(), project.live().snapshot) == ([5, 6], 5)


def test_segments_outlive_the_snapshots_they_were_made_for(
    make_project: MakeProject,
) -> None:
    rows = {i: float(i) for i in range(100)}
    for step in range(4):
        rows[step] += 1000
        project = make(make_project, list(rows.items()))
        project.run()
    assert [project.store.snapshot(n).parent for n in (1, 2, 3, 4)] == [None, 1, 2, 3]
    names = project.live_snapshot().names
    gc(project)
    assert project.numbers() == [3, 4]
    assert project.live_snapshot().names == names
    assert len(names) == 4
    reads_well(project)
    for i in rows:
        rows[i] += 1
    for _ in range(2):
        rows[0] += 1
        project = make(make_project, list(rows.items()))
        project.run()
    gc(project)
    assert project.numbers() == [5, 6]
    reads_well(project)


def test_what_others_were_computed_from_stays_and_their_fallback_works(
    make_project: MakeProject,
) -> None:
    for factor in (1.0, 2.0, 3.0, 4.0):
        project = published_again(make_project, factor)
        if factor == 1.0:
            project.run("derived")
    gc(project)
    assert project.numbers() == [1, 3, 4]
    online = project.open_online()
    lookup = Lookup(
        online,
        project.root,
        ViewFallback(project.offline, project.home),
        clock=lambda: time.time() + LATER,
    )  # expired, so computed now
    row = lookup.row("derived", 2)
    assert (row["status"], row["features"]) == ("computed", {"double": 8.0})
    assert isinstance(lookup.fallback, ViewFallback)
    lookup.fallback.close()
    lookup.close()
    project.run("derived")
    gc(project)
    assert project.numbers() == [1, 3, 4]  # 1 still stands behind derived's previous one
    published_again(make_project, 5.0).run("derived")
    gc(project)
    assert project.numbers() == [4, 5]


DERIVED = doubled("numbers") | {
    "gates": {"rows": None},
    "fallback": {"enabled": True, "deadline": "20s"},
}


def published_again(make_project: MakeProject, factor: float) -> Scene:
    project = make_project(
        [(i, i * factor) for i in (1, 2, 3)],
        views={"derived": DERIVED},
        project={"retention": {"keep": 1}},
        view={"gates": {"rows": None}},
    )
    project.run()
    return project


def test_the_newest_of_every_partition_stays(make_project: MakeProject) -> None:
    view: dict[str, Any] = {
        "source": {
            "sql": "SELECT id, x FROM read_parquet('${data}/data.parquet') WHERE $start IS NOT NULL"
        },
        "partition": {"by": "day", "start": "2026-01-01"},
    }
    days = ("2026-01-01", "2026-01-02", "2026-01-03")
    for factor in (1.0, 2.0):
        project = make(make_project, [(i, i * factor) for i in (1, 2, 3)], **view)
        for day in days:
            assert project.cli("materialize", "numbers", "--partition", day) == 0
    project.publish(snapshot=6)
    gc(project)
    assert project.numbers() == [4, 5, 6]
    reads_well(project)


def test_without_a_readable_pointer_no_snapshot_goes(prepared: Prepared) -> None:
    project = prepared(published, [1.0, 2.0, 3.0, 4.0])
    log = project.root / "numbers" / "log"
    for path in log.glob("state-*"):
        path.unlink()
    path = max(log.glob("0*.json"))
    for damage in (b"{", b""):
        path.write_bytes(damage)
        gc(project)
        assert project.numbers() == [1, 2, 3, 4]
    shutil.rmtree(log)
    gc(project)
    assert project.numbers() == [1, 2, 3, 4]
    reads_well(project)


# ---- what goes


def test_the_command_lists_removes_and_reports(
    make_project: MakeProject, prepared: Prepared, capsys: Captured
) -> None:
    project = prepared(published, [1.0, 2.0, 3.0, 4.0])
    old = time.time() - LATER
    for path in (project.root / "numbers" / "data").rglob("*"):
        os.utime(path, (old, old))
    project = make(make_project, [(1, 4.0), (2, 8.0), (3, 12.0)], grace="0s")
    before = files(project)
    capsys.readouterr()
    assert project.cli("gc", "--dry-run", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["removed"], files(project)) == (False, before)
    assert project.cli("gc", "--json") == 0
    gone = json.loads(capsys.readouterr().out)
    assert (gone["removed"], gone["files"], gone["size_bytes"]) == (
        True,
        listed["files"],
        listed["size_bytes"],
    )
    assert {str(path) for path in before - files(project)} == {
        item["path"] for item in gone["files"]
    }
    assert project.numbers() == [3, 4]
    assert project.cli("gc") == 0
    assert capsys.readouterr().out == "removed 0 files, 0.0 MB\n"


def test_pin_keeps_and_its_removal_lets_go(prepared: Prepared, capsys: Captured) -> None:
    project = prepared(published, [1.0, 2.0, 3.0, 4.0])
    command = ["-c", str(project.folder), "pin", "numbers"]
    assert main([*command, "--snapshot", "1"]) == 0
    assert main([*command, "--snapshot", "9"]) == 1
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "numbers: pinned: 1, 4"
    gc(project)
    assert project.numbers() == [1, 3, 4]
    assert main([*command, "--snapshot", "1", "--remove"]) == 0
    gc(project)
    assert project.numbers() == [3, 4]


def killed(make_project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A run that ended after some chunks, without a snapshot."""
    monkeypatch.setattr(chunks, "WINDOW_ROWS", 1)
    monkeypatch.setattr(chunks, "PART_BYTES", 1)
    project = make(make_project, [(1, 1.0), (2, 2.0), (3, None)], max_rejected=0.0)
    with pytest.raises(RejectedError):
        project.run()
    return project


def test_what_a_killed_run_left_goes_after_the_grace_and_not_before(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = killed(make_project, monkeypatch)
    (folder,) = (project.root / "numbers" / "data").iterdir()
    left = set(folder.iterdir())
    assert {"journal.jsonl", "part-00000.parquet", "part-00001.parquet"} <= {
        path.name for path in left
    }
    assert gc(project, after_s=3600) == []
    assert {item.path for item in gc(project)} == left
    assert not folder.exists()
    assert make(make_project, [(1, 1.0), (2, 2.0)]).run().resumed == 0


def test_chunks_that_were_taken_over_belong_to_the_snapshot(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(make_project, monkeypatch)
    project = make(make_project, [(1, 1.0), (2, 2.0), (3, 3.0)], max_rejected=0.0)
    assert project.run().resumed == 2
    gc(project)
    reads_well(project)
    assert project.faults() == []


def test_what_nothing_names_goes_after_the_grace(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = prepared(published, [1.0])
    monkeypatch.setattr(gc_module, "MOST_REPORTS", 1)
    notes = project.store.leases
    left = [
        project.store.data / "20000101T000000.000000Z-killed" / "part-00000.parquet",
        project.store.manifest_path(1).with_name(".20000101.tmp"),
        notes / ".lease-run.json.1.tmp",
        project.root / "numbers" / "log" / ".00000000000000000009.1-2.tmp",
        project.store.runs.folder / ".x.json.1.tmp",
        notes / "running" / "20000101T000000.000000Z-killed",
        project.store.runs.folder / "20000101T000000.000000Z-older.json",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{}")
    # a run that goes on may have begun long ago: its newest file counts
    os.utime(left[0], (1e9, 1e9))
    young = left[0].with_name("part-00001.parquet")
    young.write_bytes(b"half")
    assert gc(project, after_s=3600) == []
    assert {item.path for item in gc(project)} == {*left, young}


# ---- while others work


@pytest.fixture
def other_process(make_project: MakeProject) -> Iterator[Any]:
    """Starts a process that holds a lease of the view until the test ends."""
    processes: list[subprocess.Popen[str]] = []

    def start(project: Scene, lease: str) -> None:
        script = (
            "import sys; from pathlib import Path; from precompute.store.disk.lease import take\n"
            "with take(Path(sys.argv[1]), sys.argv[2], 'a test'):\n  print('held', flush=True); sys.stdin.read()"
        )
        folder = project.store.leases
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(folder), lease],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"

    yield start
    for process in processes:
        process.communicate()


@pytest.mark.parametrize(
    ("partition", "stays"), [(None, True), ("2026-01-01T00:00Z/2026-01-02T00:00Z", False)]
)
def test_what_a_killed_run_left_stays_while_another_may_take_it_over(
    make_project: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    other_process: Any,
    partition: str | None,
    stays: bool,
) -> None:
    project = killed(make_project, monkeypatch)
    before = files(project)
    other_process(project, run_lease(partition))
    assert (gc(project, dry_run=True) == []) == stays
    gone = gc(project)
    assert (gone == []) == stays
    assert files(project) == before - {item.path for item in gone}


@pytest.mark.usefixtures("impatient")
def test_one_at_a_time(prepared: Prepared, capsys: Captured) -> None:
    project = prepared(published, [1.0, 2.0, 3.0, 4.0], grace="0s")
    with take(project.store.leases, PUBLISH_LEASE, "somebody"):
        assert project.cli("gc") == 1
        assert "is being published" in capsys.readouterr().err
        with pytest.raises(ConflictError):
            project.publish()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lost", [PUBLISH_LEASE, "run"])
def test_who_lost_a_lease_removes_nothing_more(
    lost: str, late: bool, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took it may publish, or take over, what was garbage a moment ago; ``late``: once the
    manifests are gone, before their files."""
    project = prepared(published, [2.0, 3.0, 4.0, 5.0], grace="0s", keep=4)
    store = project.store
    folder = store.leases
    parts = [path for path in files(project) if "data" in path.parts]

    def taken(_: str = "") -> None:
        take(folder, lost, "somebody else", force=True).release()

    with take(folder, PUBLISH_LEASE, "gc") as publishing, take(folder, "run", "a run") as running:
        if late:
            monkeypatch.setattr("precompute.store.offline.gc.crashpoint", taken)
        else:
            taken()
        with pytest.raises(FencedError, match="to somebody else"):
            collect(
                store, keep=1, grace_s=0, leases=[publishing, running], now_s=time.time() + LATER
            )
    assert project.numbers() == ([3, 4] if late else [1, 2, 3, 4])
    assert [path for path in parts if not path.exists()] == []


def test_a_view_at_work_holds_up_no_other(make_project: MakeProject, capsys: Captured) -> None:
    other = doubled()
    for factor in (1.0, 2.0, 3.0, 4.0):
        rows = [(i, i * factor) for i in (1, 2, 3)]
        retention = {"retention": {"keep": 1, "grace": "1d"}}
        project = make_project(rows, project=retention, views={"other": other})
        project.run("other")
        project.run()
    project = make_project(
        project={"retention": {"keep": 1, "grace": "0s"}}, views={"other": other}
    )
    with take(project.store.leases, PUBLISH_LEASE, "somebody"):
        project.cli("gc")
    assert project.numbers("numbers") == [1, 2, 3, 4]
    assert project.numbers("other") == [3, 4]
    with take(project.offline.view("other").leases, PUBLISH_LEASE, "somebody"):
        project.cli("gc")
    assert project.numbers("numbers") == [3, 4]


def test_what_cannot_be_removed_does_not_undo_a_publishing(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "manifests" and path.suffix == ".json":
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    project = make(make_project, [(1, 1.0)], grace="0s")
    for x in (2.0, 3.0, 4.0):
        project = make(make_project, [(1, x)], grace="0s")
        report = project.run()
        assert report.status == "published"
    assert project.numbers() == [1, 2, 3]


# ---- damage


def damaged(project: Scene, number: int, *, known: bool, view: str = "numbers") -> bytes:
    """Flip a bit of a manifest; ``known``: as by itself, its time stays, so that the catalog tells
    what it said. Returns what it was."""
    path = project.root / view / "manifests" / f"{number:020d}.json"
    whole, stat = path.read_bytes(), path.stat()
    path.write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
    if known:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return whole


@pytest.mark.parametrize("known", [True, False])
def test_a_damaged_manifest_holds_up_only_what_it_may_need(prepared: Prepared, known: bool) -> None:
    project = prepared(published, [1.0, 2.0, 3.0])
    store = project.store
    before = {path for path in files(project) if "data" in path.parts}
    whole = damaged(project, 2, known=known)
    time.sleep(0.05)
    project = prepared(published, [4.0, 5.0, 6.0])
    later = {path for path in files(project) if "data" in path.parts} - before
    gone = {item.path for item in gc(project)}
    path = project.root / "numbers" / "manifests" / f"{2:020d}.json"
    if known:  # what it named is known, and that nothing needs it
        assert project.numbers() == [5, 6]
        assert before < gone
        return
    assert project.numbers() == [2, 5, 6]
    assert before.isdisjoint(gone)
    assert gone & later, "what came after it is collected as ever"
    path.write_bytes(whole)  # restored: all it needs is there
    reads_well(project)
    os.utime(path, (0, 0))
    gc(project)
    assert project.numbers() == [5, 6]
    assert before.isdisjoint(files(project))
    assert store.damage() == {}


def test_a_manifest_that_is_damaged_meanwhile_holds_up_all_files(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at what may go and the one at its files."""
    project = prepared(published, [1.0, 2.0, 3.0])
    before, torn = files(project), list[bytes]()
    monkeypatch.setattr(
        "precompute.store.offline.gc.crashpoint",
        lambda _: torn.append(damaged(project, 3, known=False)),
    )
    gone = gc(project)
    assert [item.path.name for item in gone] == [f"{1:020d}.json"]
    assert files(project) == before - {item.path for item in gone}
    project.store.manifest_path(3).write_bytes(torn[0])
    reads_well(project)


def test_damage_is_told_by_gc_and_status_and_ended_by_forgetting(
    make_project: MakeProject, prepared: Prepared, capsys: Captured
) -> None:
    project = prepared(published, [1.0, 2.0, 3.0, 4.0], grace="0s", keep=4)
    damaged(project, 2, known=True)
    project = prepared(published, [5.0], grace="0s")
    report = project.report()
    assert (report.status, report.attention) == ("published", [])  # it went, as nothing needs it
    assert project.numbers() == [4, 5]
    damaged(project, 4, known=False)
    report = make(make_project, [(1, 9.0), (2, 9.0), (3, 9.0)], grace="0s").run()
    assert report.status == "published"
    (said,) = report.attention
    remedy = "Restore the file, or give the snapshot up: precompute gc --forget numbers 4"
    assert "00004.json is torn or was edited" in said
    assert said.endswith(remedy)
    command = ["-c", str(project.folder)]
    capsys.readouterr()
    assert main([*command, "gc", "--json"]) == 1
    found = capsys.readouterr()
    assert found.err == f"precompute: {said}\n"
    assert json.loads(found.out)["attention"] == [said]
    assert main([*command, "status"]) == 1
    assert said in capsys.readouterr().out
    assert main([*command, "gc", "--forget", "numbers", "4"]) == 0
    assert project.numbers() == [5, 6]
    assert main([*command, "gc"]) == 0
    assert main([*command, "status"]) == 0
    reads_well(project)


def test_a_lost_event_is_told_by_status_until_it_is_given_up(
    prepared: Prepared, capsys: Captured
) -> None:
    project = prepared(published, [1.0, 2.0, 3.0])
    command = ["-c", str(project.folder)]
    # a first look reads the newest 16
    for _ in range(9):
        project.store.pin(2, "a test")
        project.store.log.unpin(2)
    for number in (2, 20):
        path = project.store.log.path(number)
        path.write_bytes(path.read_bytes()[:-9])
        for _ in range(2):
            assert main([*command, "status"]) == 1
            said = capsys.readouterr().out
            assert f"{path} is damaged" in said
            assert "Where there is none: precompute gc --forget numbers events" in said
        assert main([*command, "gc", "--forget", "numbers", "events"]) == 0
        assert main([*command, "status"]) == 0
        assert path.is_file()
        capsys.readouterr()
    assert main([*command, "gc", "--forget", "numbers", "events"]) == 1
    assert "there is nothing to forget" in capsys.readouterr().err
    assert main([*command, "history", "numbers", "--limit", "99"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"accept, by \S+@\S+: given up: \S+2\.json is damaged", shown)
    reads_well(project)


def test_a_snapshot_that_others_were_made_from_is_forgotten_and_they_stay(
    make_project: MakeProject, capsys: Captured
) -> None:
    """Each run changes one row in a hundred: 2 and 3 have the segments of 1."""
    rows = {i: float(i) for i in range(100)}
    for step in range(3):
        rows[step] += 1000
        project = make(make_project, list(rows.items()))
        project.run()
    damaged(project, 1, known=False)
    named = {project.store.folder / part.path for part in project.snapshot(3).files}
    assert main(["-c", str(project.folder), "gc", "--forget", "numbers", "1"]) == 0
    assert project.numbers() == [2, 3]
    gc(project)
    assert named <= files(project)
    reads_well(project)
    rows[50] = 1.0
    project = make(make_project, list(rows.items()))
    assert project.run().snapshot == 4
    assert project.snapshot(4).names[:3] == project.snapshot(3).names
    reads_well(project)


def test_a_lost_record_of_a_segment_holds_up_the_files_that_it_may_name(
    make_project: MakeProject,
) -> None:
    rows = {i: float(i) for i in range(100)}
    for step in range(2):
        rows[step] += 1000
        project = make(make_project, list(rows.items()))
        project.run()
    store, own = project.store, project.snapshot(2).own
    assert own is not None
    record = store.folder / own.record.path
    whole = record.read_bytes()
    record.unlink()
    (store.folder / "notes" / "catalog.jsonl").unlink()
    before = {path for path in files(project) if "data" in path.parts}
    time.sleep(0.05)
    for x in (1.0, 2.0):
        rows[50] += x
        project = make(make_project, list(rows.items()))
        assert project.run(full=True).status == "published"
    gc(project)
    assert before <= files(project)
    record.write_bytes(whole)
    reads_well(project)


def test_what_may_not_be_forgotten(
    make_project: MakeProject, prepared: Prepared, capsys: Captured
) -> None:
    project = prepared(published, [1.0, 2.0])
    command = ["-c", str(project.folder), "gc", "--forget"]
    for given, status, message in (
        (
            ["numbers", "1"],
            1,
            "snapshot 1 of view 'numbers' can be read: there is nothing to forget",
        ),
        (["numbers", "7"], 1, "view 'numbers' has no snapshot 7"),
        (["number", "1"], 2, "--forget number 1: name a view (numbers)"),
        (["numbers", "one"], 2, "--forget numbers one: name a view (numbers)"),
        (["numbers", "1", "--dry-run"], 2, "without --dry-run"),
    ):
        assert main([*command, *given]) == status
        assert message in capsys.readouterr().err
    damaged(project, 2, known=False)
    assert main([*command, "numbers", "2"]) == 1
    assert "snapshot 2 of view 'numbers' is live" in capsys.readouterr().err
    assert project.numbers() == [1, 2]
    project.rollback()
    assert main([*command, "numbers", "2"]) == 0
    assert project.numbers() == [1]
    assert make(make_project, [(1, 7.0)]).run().snapshot == 3  # its number is not given again
