"""Account: damage to whatever is live is seen at the next look, healed from the root where that has
it, and never served meanwhile."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.rollback import reconcile
from precompute.store.account import checker
from precompute.store.account.account import Act, read_account, write_account
from precompute.store.account.checker import Rounds, check_live, is_due, share_of
from precompute.store.account.rows import segments_of
from precompute.store.disk.record import replace
from precompute.store.errors import PrecomputeError
from precompute.store.online.url import open_online_store
from tests.fixtures import MakeProject, Prepared
from tests.online import of_number
from tests.online_rig import rig_of, rigs
from tests.scene import Scene

ROWS = 40
INDEXED = {"index": {"on": "vector", "metric": "l2"}}


def rows(changed: int) -> list[tuple[int, float]]:
    return [(i, i + 0.5 if i < changed else float(i)) for i in range(ROWS)]


def overlaid(make_project: MakeProject, online: str) -> Scene:
    """A view that is live as two segments, with an index of both."""
    for changed in (0, 2):
        project = make_project(rows(changed), project={"online": online}, view=INDEXED)
        project.run()
    return project


@pytest.fixture
def project(prepared: Prepared, online: str, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """:func:`overlaid`; every look compares every file."""
    monkeypatch.setattr(checker, "OFTEN_S", -1.0)
    project = prepared(overlaid, online)
    assert project.pointer().numbers == (1, 2)
    assert project.status()["attention"] == []
    return project


def flip(path: Path, at: float = 0.5) -> None:
    """Another bit there: where it is, as a share of the file."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)


def newest_event(project: Scene) -> Path:
    return max((project.folder / "var" / "numbers" / "log").glob("0*.json"))


def table(project: Scene, number: int) -> Path:
    return of_number(project.folder / "online" / "numbers", number, ".table")


def index(project: Scene, number: int, name: str) -> Path:
    return of_number(project.root / "numbers" / "index", number) / name


def part(project: Scene, number: int, name: str = "part-00000.parquet") -> Path:
    return project.store.data / project.store.snapshot(number).run / name


def record(project: Scene, number: int) -> Path:
    own = project.store.snapshot(number).own
    assert own is not None
    return project.store.folder / own.record.path


FILES: dict[str, Callable[[Scene], object]] = {
    "a bit of the index's vectors": lambda p: flip(index(p, 1, "vectors.faiss")),
    "a bit of the index's rows": lambda p: flip(index(p, 1, "rows.arrow")),
    "a bit of the index's record": lambda p: flip(index(p, 1, "meta.json")),
    "a bit of the parts of the index": lambda p: flip(index(p, 1, "parts.arrow")),
    "a bit of the changed rows' index": lambda p: flip(index(p, 2, "vectors.faiss")),
    "a bit of what is gone of the index": lambda p: flip(index(p, 2, "gone.arrow")),
    "the index": lambda p: shutil.rmtree(of_number(p.root / "numbers" / "index", 1)),
    "the log": lambda p: shutil.rmtree(newest_event(p).parent),
}
TABLES: dict[str, Callable[[Scene], object]] = {
    "a bit of a row": lambda p: flip(table(p, 1), 0.52),
    "a bit of the table's index": lambda p: flip(table(p, 1), 0.9),
    "a bit of the table's header": lambda p: flip(table(p, 1), 0.01),
    "a bit of the table's checksums": lambda p: flip(table(p, 1), 0.998),
    "a bit of the upper segment": lambda p: flip(table(p, 2), 0.99),
    "the table": lambda p: table(p, 1).unlink(),
    "the table's end": lambda p: table(p, 1).write_bytes(table(p, 1).read_bytes()[:-512]),
    "a bit of the online pointer": lambda p: flip(p.folder / "online" / "numbers" / "live.json"),
    "all that is online": lambda p: shutil.rmtree(p.folder / "online"),
}
ON = [("table", name) for name in FILES | TABLES] + [
    (rig.name, name) for rig in rigs().values() for name in {"the index"} | rig.damages.keys()
]


LOADED = dict.fromkeys(FILES, 0) | {
    "a bit of the upper segment": 2,
    "a bit of an upper row": 2,
    "a bit of the key hashes": 2,
    "the key hashes": 2,
    "a bit of the online pointer": 0,
    "a bit of the pointer": 0,
    "the pointer": 0,
    # nobody says what is live
    "the log": ROWS + 2,
    "all that is online": ROWS + 2,
    "all": ROWS + 2,
}
"""Rows that are loaded again; of other damage, those of the lowest segment."""


def tables(project: Scene) -> dict[str, bytes]:
    folder = project.folder / "online" / "numbers"
    return {path.name: path.read_bytes() for path in folder.glob("*.table")}


@pytest.mark.parametrize(("online", "damage"), sorted(ON), indirect=["online"])
def test_it_is_seen_and_healed_from_the_root(project: Scene, damage: str) -> None:
    """By the segment at fault alone, whose bytes are what they were."""
    rig, before = rig_of(project.online), tables(project)
    (FILES | (TABLES if rig is None else dict(rig.damages)))[damage](project)
    assert project.cli("status") == 1
    # none of it is served
    with project.lookup() as lookup:
        with contextlib.suppress(PrecomputeError):
            found = [
                row["features"]["double"]
                for row in (lookup.row("numbers", key) for key in range(ROWS))
                if row["features"]
            ]
            assert set(found) <= {2 * x for _, x in rows(2)}
        with contextlib.suppress(PrecomputeError):
            assert [row["key"] for row in lookup.search("numbers", key=7, k=2)["rows"]] in (
                [["8"], ["6"]],
                ["8", "6"],
                ["6", "8"],
            )
    report = reconcile(project, "numbers", Silent())
    assert report is not None
    assert (report.status, report.snapshot) == ("published", 2)
    assert report.usage.loaded_rows == LOADED.get(damage, ROWS)
    assert tables(project) == before
    assert (project.status()["attention"], project.faults()) == ([], [])
    assert project.served(range(ROWS)) == (2, [2 * x for _, x in rows(2)])


@pytest.mark.parametrize("online", ["table"], indirect=True)
def test_what_was_loaded_again_is_whole_at_once(project: Scene) -> None:
    damaged = table(project, 1)
    flip(damaged, 0.0)
    with contextlib.closing(open_online_store(project.online)) as online:
        account = check_live(project.store, online, share=1.0)
    assert {finding.segments for finding in account.findings} == {(damaged.stem,)}
    assert project.publish().status == "published"
    assert read_account(project.store.leases, "numbers").findings == ()
    assert project.publish().status == "current"


@pytest.mark.parametrize("online", ["table"], indirect=True)
def test_whose_rows_are_at_fault_is_told_by_keys_or_not_known(project: Scene) -> None:
    snapshot = project.live_snapshot()
    lowest, upper = snapshot.names
    changed = next(key for (key, now), (_, was) in zip(rows(2), rows(0), strict=True) if now != was)
    kept = next(key for (key, now), (_, was) in zip(rows(2), rows(0), strict=True) if now == was)
    for keys, names in (
        ((changed,), {upper}),
        ((kept,), {lowest}),
        ((changed, kept), {lowest, upper}),
    ):
        found = segments_of(project.store, snapshot, [str(key).encode() for key in keys])
        assert found is not None
        assert set(found) == names
    # then all of them are loaded again
    assert segments_of(project.store, snapshot, [b"-1"]) is None


@pytest.mark.parametrize("online", ["table"], indirect=True)
def test_an_event_that_is_damaged_is_told_and_what_is_live_is_said_anew(project: Scene) -> None:
    path = newest_event(project)
    flip(path)
    assert project.cli("status") == 1
    assert project.cli("rollback", "numbers") == 1
    assert project.served(range(ROWS)) == (2, [2 * x for _, x in rows(2)])
    report = reconcile(project, "numbers", Silent())
    assert report is not None
    assert (report.status, report.snapshot) == ("published", 2)
    assert any(
        f"what is live of view 'numbers' is not known, since {path} is damaged" in told
        for told in report.attention
    )
    # what it said is a gap, until somebody restores it
    (told,) = project.status()["attention"]
    assert told.startswith(f"{path} is damaged (")
    assert ": restore it from a backup" in told
    assert reconcile(project, "numbers", Silent()) is None
    assert project.rollback(to=1).snapshot == 1, "what was before it, a person names"


@pytest.mark.parametrize("online", ["table"], indirect=True)
def test_a_bit_of_any_file_of_the_log_is_told(project: Scene) -> None:
    project.rollback()
    project.cli("resume", "numbers")
    folder = newest_event(project).parent
    files = sorted(folder.glob("*.json*"))
    assert {path.name.partition("-")[0] for path in files} > {"state"}
    for path in files:
        whole = path.read_bytes()
        flip(path)
        for told in (
            project.status()["attention"],
            read_account(project.store.leases, "numbers").trouble,
        ):
            assert [str(path) in line for line in told] == [True], path
        assert project.cli("verify", "numbers") == 1
        if path.name.startswith("state-"):
            assert reconcile(project, "numbers", Silent()) is not None
            assert not path.exists()
        else:
            path.write_bytes(whole)
        assert project.status()["attention"] == []


@pytest.mark.parametrize("online", ["table"], indirect=True)
def test_what_is_live_is_looked_at_without_the_folder_of_what_was_found(
    project: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log says what is live; the folder of leases and of the account does not."""
    shutil.rmtree(project.store.leases)
    assert project.cli("verify", "numbers") == 0
    assert "nothing is live" not in capsys.readouterr().out
    shutil.rmtree(project.store.leases)
    flip(newest_event(project).with_name(f"{1:020d}.json"))
    with project.online_store() as store:
        (found,) = check_live(project.store, store, share=1.0).trouble
    assert f"{1:020d}.json is damaged" in found
    shutil.rmtree(project.store.leases)
    project.store.leases.write_bytes(b"")
    assert project.cli("verify", "numbers") == 1
    assert "cannot be read: Not a directory" in capsys.readouterr().out


RECORDS: dict[str, Callable[[Scene], Path]] = {
    "the lease of publishings": lambda p: p.store.leases / "lease-publish.json",
    "the lease of runs": lambda p: p.store.leases / "lease-run.json",
    "the project's name": lambda p: p.root / ".identity.json",
    "a run's report": lambda p: max(p.store.runs.folder.glob("*.json")),
}


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("online", ["table"], indirect=True)
def test_a_bit_of_a_small_record_is_told_as_damage_and_stops_nobody(
    project: Scene, record: str, make_project: MakeProject
) -> None:
    """Nor is it taken for somebody else's act."""
    path = RECORDS[record](project)
    flip(path, 0.4)
    (told,) = project.status()["attention"]
    assert told.startswith(f"{path} is damaged (")
    assert project.rollback(hold=False).snapshot == 1
    reconcile(project, "numbers", Silent())
    assert project.status()["attention"] == []
    # before anybody looked
    flip(path if path.exists() else project.store.leases / "lease-publish.json", 0.4)
    project = make_project(rows(5), project={"online": project.online}, view=INDEXED)
    assert project.run().status == "published"
    reconcile(project, "numbers", Silent())
    assert (project.status()["attention"], project.served(range(ROWS))[0]) == ([], 3)


@pytest.mark.parametrize("what", ["the upper rows", "the changed rows' index"])
@pytest.mark.parametrize("online", ["table"], indirect=True)
def test_another_segments_file_is_not_believed(project: Scene, what: str) -> None:
    """Whole, and of the same view and model: it says which it is."""
    if what == "the upper rows":
        shutil.copy(table(project, 1), table(project, 2))
    else:
        base, changed = map(project.store.index_folder, project.live().indexes)
        shutil.rmtree(base)
        shutil.copytree(changed, base)
    assert project.cli("status") == 1
    with (
        project.lookup() as lookup,
        pytest.raises(PrecomputeError, match=r"it is (segment|the index)"),
    ):
        lookup.search("numbers", key=7, k=2, features=["double"])
    assert reconcile(project, "numbers", Silent()) is not None
    assert (project.status()["attention"], project.served(range(ROWS))[0]) == ([], 2)


RUN: dict[str, Callable[[Scene], None]] = {
    "a bit of the base's rows": lambda p: flip(part(p, 1)),
    "the delta's rows": lambda p: part(p, 2).unlink(),
    "a bit of the kills": lambda p: flip(part(p, 2, "kills.parquet")),
    "a bit of a segment's record": lambda p: flip(record(p, 2)),
    "a lost record of a segment": lambda p: record(p, 2).unlink(),
    "lost kills": lambda p: part(p, 2, "kills.parquet").unlink(),
    "a bit of the live manifest": lambda p: flip(p.store.manifest_path(2)),
}


@pytest.mark.parametrize("damage", RUN)
@pytest.mark.parametrize("online", ["table"], indirect=True)
def test_what_the_root_lost_is_seen_and_computed_again_by_the_next_run(
    project: Scene, damage: str
) -> None:
    RUN[damage](project)
    assert project.cli("status") == 1
    assert read_account(project.store.leases, "numbers").act is Act.NOTHING
    assert reconcile(project, "numbers", Silent()) is None
    assert project.served(range(ROWS))[1] == [2 * x for _, x in rows(2)]
    assert project.run().status == "published"
    attention = project.status()["attention"]
    # what cannot be read of a manifest stays until it is given up by hand
    assert attention == [] or (
        ("manifest" in damage or "record" in damage) and all("gc" in told for told in attention)
    ), attention
    assert project.served(range(ROWS))[1] == [2 * x for _, x in rows(2)]


@pytest.mark.parametrize("command", ["run", "publish"])
def test_who_publishes_what_is_live_already_heals_it_too(project: Scene, command: str) -> None:
    flip(index(project, 1, "vectors.faiss"))
    assert (project.run(command=command).status, project.faults()) == ("published", [])


def test_a_segment_that_lost_rows_is_loaded_again_under_a_new_one(
    project: Scene, make_project: MakeProject
) -> None:
    if (rig := rig_of(project.online)) is None:
        flip(table(project, 1), 0.52)
    else:
        rig.damages["rows"](project)
    project = make_project(rows(3), project={"online": project.online}, view=INDEXED)
    report = project.run()
    assert (report.status, report.usage.loaded_rows) == ("published", ROWS + 1)
    assert project.pointer().numbers == (1, 2, 3)
    assert project.served(range(ROWS)) == (3, [2 * x for _, x in rows(3)])


@pytest.mark.parametrize("online", ["table"], indirect=True)
def test_a_log_that_lost_its_end_is_told(project: Scene) -> None:
    path = newest_event(project)
    path.unlink()
    said = f"its log in {project.store.folder} says no more than event 1"
    (told,) = [line for line in project.status()["attention"] if said in line]
    assert "are served snapshot 2 by event 2" in told
    assert project.cli("verify", "numbers") == 1
    # what readers are served is said anew by a person alone
    assert reconcile(project, "numbers", Silent()) is None
    assert project.publish(snapshot=2).status == "published"
    assert (project.status()["attention"], project.faults()) == ([], [])


@pytest.mark.parametrize("online", ["table"], indirect=True)
def test_what_the_next_run_builds_on_is_looked_at(
    project: Scene, make_project: MakeProject
) -> None:
    project = make_project(rows(4), project={"online": project.online}, view=INDEXED)
    project.materialize()
    flip(part(project, 3))
    (told,) = project.status()["attention"]
    assert str(part(project, 3)) in told
    assert project.run().status == "published"
    assert project.served(range(ROWS))[1] == [2 * x for _, x in rows(4)]


# ---- how much is read, and when


@pytest.mark.parametrize("online", ["table"], indirect=True)
def test_small_files_are_read_at_every_look_and_what_is_not_is_said(
    project: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the rows take all of its time, and others are older."""
    monkeypatch.setattr(checker, "SMALL_BYTES_S", 1e15)
    flip(index(project, 1, "vectors.faiss"))
    with project.online_store() as online:
        account = check_live(project.store, online, budget_s=1e-6)
        monkeypatch.setattr(checker, "SMALL_BYTES_S", 0.0)
        later = check_live(project.store, online, budget_s=1e-6)
    assert [finding.act for finding in account.findings] == [Act.INDEX]
    others = "; not looked at: the parts of 1 other snapshots, until they are used"
    assert account.looked_at(account.at_us).endswith(f" in the last 0 s{others}")
    # what was damaged has no time
    count, size_mb = len(account.files) + 1, account.files_bytes / 1e6
    said = f"{others}; not looked at: {count} files, {size_mb:,.1f} MB, for want of time, "
    assert f"{said}some of them never" in later.looked_at(later.at_us)
    assert later.findings == account.findings


def test_what_a_wrong_clock_noted_is_looked_at_again(
    project: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was days ahead when an account was written, and is right now."""
    monkeypatch.setattr(checker, "OFTEN_S", 45.0)
    notes, ahead = project.store.leases, 10 * 86_400_000_000
    with contextlib.closing(project.open_online()) as online:
        account = check_live(project.store, online, share=1.0)
        files = {path: at_us + ahead for path, at_us in account.files.items()}
        turn = replace(account.turn, began_us=account.turn.began_us + ahead)
        write_account(notes, replace(account, at_us=account.at_us + ahead, files=files, turn=turn))
        flip(index(project, 1, "vectors.faiss"))
        assert is_due(project.store)
        found = check_live(project.store, online, budget_s=10.0)
    assert [finding.act for finding in found.findings] == [Act.INDEX]
    assert max(found.files.values()) <= found.at_us
    assert not is_due(project.store)


def test_an_hours_share_is_read_whatever_time_it_takes() -> None:
    assert share_of(60.0) == pytest.approx(0.02)
    assert share_of(7200.0) == 0.99


def test_beside_a_server_somebody_looks_every_minute(
    project: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the readers say; and heals nothing."""
    monkeypatch.setattr(checker, "POLL_S", 0.01)
    notes = project.store.leases
    flip(index(project, 1, "vectors.faiss"))
    beside = Rounds(project.offline, project.open_online, ["numbers", "never_run"], every_s=0.0)
    try:
        # a look reads for some tenths of a second, and on a busy machine the index at a later one
        while not read_account(notes, "numbers").findings:
            time.sleep(0.01)
    finally:
        beside.stop()
    account = read_account(notes, "numbers")
    assert ([finding.act for finding in account.findings], project.live().epoch) == ([Act.INDEX], 2)
