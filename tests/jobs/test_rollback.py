"""Rollback: one pointer move to a snapshot that was good; rows and index together; and what was
left is never published again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.run import run_view as run_module
from precompute.jobs.run.loader import Loader
from precompute.store.disk import crashpoint
from precompute.store.disk.crashpoint import InjectedError
from precompute.store.disk.lease import Lease, take
from precompute.store.errors import GateError, PrecomputeError, SnapshotError
from precompute.store.offline.refs import PUBLISH_LEASE
from precompute.store.times import containing
from tests.fixtures import MakeProject, Prepared
from tests.online import of_number
from tests.scene import Scene

INDEXED = {"index": {"on": "vector", "metric": "l2"}, "gates": {"rows": None}}
KEYS = (1, 2, 3)
Versions = Callable[..., Scene]
Captured = pytest.CaptureFixture[str]


def publish(
    make_project: MakeProject,
    *factors: float,
    online: str = "table:./online",
    project: dict[str, Any] | None = None,
    **view: Any,
) -> Scene:
    """One snapshot after the other; in the one of factor f, every x is f times its key."""
    for factor in factors:
        made = make_project(
            [(key, key * factor) for key in KEYS],
            project={"online": online} | (project or {}),
            view=INDEXED | view,
        )
        made.run()
    return made


@pytest.fixture
def versions(prepared: Prepared) -> Versions:
    """:func:`publish` of a project that was never run."""
    return partial(prepared, publish)


def served(project: Scene) -> tuple[int, float]:
    """(snapshot, factor) that rows and index serve alike."""
    with project.lookup() as lookup:
        table = lookup.get("numbers", KEYS)
        (snapshot,) = set(table["snapshot"].to_pylist())
        factors = {
            double / 2 / key for double, key in zip(table["double"].to_pylist(), KEYS, strict=True)
        }
        assert len(factors) == 1
        factor = factors.pop()
        found = lookup.search("numbers", vector=[2 * factor + n for n in range(4)], k=1)
        assert found["snapshot"] == snapshot
        assert found["rows"][0]["key"] == "2"
        assert found["rows"][0]["score"] == 0.0
        return snapshot, factor


# ---- where it goes


def test_back_to_what_was_live_before_by_one_pointer_move(versions: Versions, online: str) -> None:
    project = versions(1.0, 10.0, online=online)
    report = project.rollback()
    assert report.status == "published"
    assert report.command == "rollback"
    assert report.snapshot == 1
    assert report.epoch == 3
    assert {"load", "index", "check"}.isdisjoint(report.stages_s)  # nothing was loaded
    assert served(project) == (1, 1.0)
    ref = project.live()
    assert (ref.snapshot, ref.previous, ref.reason, ref.held) == (1, 2, "rollback from 2", None)
    assert set(project.store.refs.bad()) == {2}
    assert project.store.runs.last() == report
    assert project.faults() == []


def test_twice_in_a_row_goes_back_further(versions: Versions, online: str) -> None:
    project = versions(1.0, 10.0, 100.0, online=online)
    assert project.rollback().snapshot == 2
    assert project.rollback().snapshot == 1
    assert served(project) == (1, 1.0)
    assert project.faults() == []
    with pytest.raises(SnapshotError, match=r"no good snapshot before 1 .*2 \(bad\), 3 \(bad\)"):
        project.rollback()
    assert served(project) == (1, 1.0)
    assert set(project.store.refs.bad()) == {2, 3}


def test_what_cannot_be_gone_back_to_is_refused_and_nothing_is_marked(versions: Versions) -> None:
    project = versions(1.0, 10.0)
    with pytest.raises(SnapshotError, match=r"no snapshot 9 .*\(it has: 1, 2\)"):
        project.rollback(to=9)
    with pytest.raises(SnapshotError, match=r"snapshot 2 .* is live already.*1, 2"):
        project.rollback(to=2)
    assert project.store.refs.bad() == {}
    with pytest.raises(SnapshotError, match="no snapshot 9"):
        project.publish(snapshot=9)
    assert served(project) == (2, 10.0)
    # what was refused before it changed anything is no run that failed
    assert project.report().command == "run"
    assert project.store.runs.unended() == []
    assert project.cli("status") == 0


def test_a_view_that_was_never_published_is_refused(
    make_project: MakeProject, capsys: Captured
) -> None:
    project = make_project([(1, 1.0)])
    assert project.cli("rollback", "numbers") == 1
    assert "never published" in capsys.readouterr().err
    project.materialize()
    with pytest.raises(SnapshotError, match="never published"):
        project.rollback()


def test_a_bad_target_is_refused_and_what_is_live_stays_good(
    versions: Versions, capsys: Captured
) -> None:
    project = versions(1.0, 10.0)
    project.rollback()
    project = versions(100.0)
    assert project.cli("rollback", "numbers", "--to", "2") == 3
    assert "marked bad" in capsys.readouterr().err
    assert set(project.store.refs.bad()) == {2}
    assert served(project) == (3, 100.0)
    assert project.run().status == "current"


def test_back_from_a_snapshot_of_the_very_same_rows(versions: Versions) -> None:
    """As after ``run --full``: what was computed again is wrong, what was there before was right,
    and the source is the same."""
    project = versions(1.0)
    project.run(full=True)
    assert project.rollback().snapshot == 1
    assert served(project)[0] == 1
    assert project.run().status == "current"


def test_back_when_the_live_manifest_is_torn(versions: Versions) -> None:
    project = versions(1.0, 10.0)
    path = project.root / "numbers" / "manifests" / f"{2:020d}.json"
    path.write_bytes(path.read_bytes()[:100])
    assert project.rollback().snapshot == 1
    assert served(project) == (1, 1.0)
    assert set(project.store.refs.bad()) == {2}


def test_a_snapshot_that_a_gate_refused_is_no_default_target(make_project: MakeProject) -> None:
    rows = [(key, float(key)) for key in KEYS]
    gates = {"view": {"gates": {"rows": None, "rejected": 0.0}}}
    make_project(rows, **gates).run()
    with pytest.raises(GateError):
        make_project([*rows[:2], (3, None)], **gates).run()
    for factor in (10, 100):
        project = make_project([(key, x * factor) for key, x in rows], **gates)
        project.run()
    assert [project.rollback().snapshot, project.rollback().snapshot] == [3, 1]


# ---- what comes after


def test_the_same_rows_are_never_published_again_and_others_are(
    versions: Versions, capsys: Captured
) -> None:
    project = versions(1.0, 10.0)
    project.rollback()
    for _ in range(2):
        assert project.cli("run", "numbers") == 3
        assert "snapshot 2 is marked bad (rolled back from)" in capsys.readouterr().err
        assert served(project) == (1, 1.0)
    numbers = project.numbers()
    assert len(numbers) == 3  # one try is stored, not one for each
    assert project.publish().status == "current"  # the newest that may be published is live
    assert served(project) == (1, 1.0)
    project = versions(100.0)
    assert served(project)[1] == 100.0
    assert project.faults() == []


def test_when_the_source_goes_back_too_there_is_nothing_to_do(versions: Versions) -> None:
    project = versions(1.0, 10.0)
    project.rollback()
    project = versions(1.0)
    assert served(project) == (1, 1.0)
    assert project.numbers() == [1, 2]


@pytest.mark.parametrize("changed", [1, 10])
def test_publish_never_picks_one_that_has_rows_of_a_bad_one(
    make_project: MakeProject, changed: int
) -> None:
    make = {"view": {"gates": {"rows": None, "norm": None, "drift": None, "moved": None}}}
    rows = [(i, float(i)) for i in range(20)]
    make_project(rows, **make).run()
    make_project([(0, 50.0), *rows[1:]], **make).run()
    more = [(i, 60.0 + i) for i in range(1, 1 + changed)]
    project = make_project([(0, 50.0), *more, *rows[1 + changed :]], **make)
    # a delta on 2, or the copy of one: row 0 is taken over from it
    assert ("compacting" in (project.materialize().plan or "")) == (changed == 10)
    assert project.store.snapshot(3).refused_by == []
    project.rollback()
    report = project.publish()
    assert (report.status, report.snapshot) == ("current", 1)
    with pytest.raises(GateError):
        project.publish(snapshot=3)


def test_back_from_a_partition_goes_to_the_one_before_it(make_project: MakeProject) -> None:
    sql = "SELECT id, x * $n AS x FROM read_parquet('${data}/data.parquet') WHERE $start < $end"

    def computed(day: int, factor: int, command: str = "run") -> Scene:
        view = {
            "source": {"sql": sql.replace("$n", str(factor))},
            "partition": {"by": "day", "start": "2026-01-01"},
        }
        project = make_project(
            [(key, float(key)) for key in KEYS],
            view=INDEXED | {"gates": {"rows": None, "norm": None}} | view,
        )
        partition = containing("day", datetime(2026, 1, day, tzinfo=UTC))
        project.run(command=command, partition=partition)
        return project

    computed(8, 1)
    computed(2, 1, "materialize")  # filled in later, never live
    computed(9, 1)
    project = computed(9, 2)
    assert served(project) == (4, 2.0)
    assert project.rollback().snapshot == 3
    assert project.rollback().snapshot == 1


def test_hold_stops_runs_until_resume(versions: Versions, capsys: Captured) -> None:
    project = versions(1.0, 10.0)
    assert project.cli("rollback", "numbers", "--hold") == 0
    project = versions(100.0)
    assert served(project) == (1, 1.0)
    report = project.report()
    assert (report.status, report.snapshot) == ("committed", 3)
    assert project.cli("status") == 1
    assert "held: rollback from 2, with --hold" in capsys.readouterr().out
    assert project.cli("resume", "numbers") == 0
    assert project.run().status == "published"
    assert served(project) == (3, 100.0)
    assert project.cli("status") == 0


def test_publish_by_hand_ends_the_hold_unless_it_is_refused(versions: Versions) -> None:
    project = versions(1.0, 10.0, 20.0)
    project.rollback(hold=True)
    # nor does another rollback
    project.rollback(to=1)
    with pytest.raises(GateError):
        project.publish(snapshot=2)
    assert project.live().held is not None
    project = versions(100.0)
    assert project.publish().snapshot == 4
    assert served(project) == (4, 100.0)
    versions(7.0)
    assert served(project)[1] == 7.0


# ---- stores that are damaged, or gone


@pytest.mark.parametrize("damaged", ["segment", "index"])
def test_a_damaged_segment_or_index_is_made_again(versions: Versions, damaged: str) -> None:
    project = versions(1.0, 10.0)
    if damaged == "segment":
        path = of_number(project.folder / "online" / "numbers", 1, ".table")
        path.write_bytes(path.read_bytes()[:5000])
    else:
        (of_number(project.root / "numbers" / "index", 1) / "vectors.faiss").write_bytes(b"nothing")
    project.rollback()
    assert served(project) == (1, 1.0)
    assert project.faults() == []


# ---- others at work


@pytest.fixture
def before_publishing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """What is to happen just before a run takes the publishing lease."""
    waiting: list[Callable[[], object]] = []

    def taking(folder: Path, name: str, by: str, **options: Any) -> Lease:
        if name == PUBLISH_LEASE and waiting:
            waiting.pop()()
        return take(folder, name, by, **options)

    monkeypatch.setattr(run_module, "take", taking)
    yield waiting
    assert waiting == []


def test_a_hold_counts_though_the_run_had_looked_before(
    versions: Versions, before_publishing: list[Callable[[], object]]
) -> None:
    project = versions(1.0, 10.0)
    before_publishing.append(lambda: project.rollback(hold=True))
    versions(100.0)
    assert served(project) == (1, 1.0)


def test_a_publishing_that_goes_on_is_fenced(
    versions: Versions, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = versions(1.0, 10.0)
    loaded = Loader._verify

    def verified(*arguments: Any) -> None:
        loaded(*arguments)
        monkeypatch.setattr(Loader, "_verify", loaded)
        project.rollback()

    monkeypatch.setattr(Loader, "_verify", verified)
    with pytest.raises(PrecomputeError, match="rollback"):
        versions(100.0)
    assert served(project) == (1, 1.0)
    assert project.faults() == []
    assert project.run().status == "published"
    assert served(project) == (4, 100.0)  # and not 3, which took rows over from 2


def test_the_operators_command_is_called(versions: Versions, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    script = f"import os; open({str(noted)!r}, 'a').write(' '.join(os.environ['NOTIFY_' + n] for n in ('COMMAND', 'STATUS', 'SNAPSHOT')) + chr(10))"
    project = versions(1.0, 10.0, project={"notify": [sys.executable, "-c", script]})
    crashpoint.arm(
        "live.cas", mode="raise"
    )  # the rows are another's by now, and the online store does not know
    with pytest.raises(InjectedError):
        project.rollback()
    crashpoint.disarm()
    project.rollback()
    expected = ["run published 1", "run published 2", "rollback failed 1", "rollback published 1"]
    assert noted.read_text().splitlines() == expected


@pytest.mark.parametrize(("to", "goes_to"), [(None, 2), (2, 2), (1, 1)])
def test_a_rollback_that_was_killed_is_finished_or_overruled(
    versions: Versions, to: int | None, goes_to: int
) -> None:
    project = versions(1.0, 10.0, 100.0)
    crashpoint.arm("live.cas", mode="raise")
    with pytest.raises(InjectedError):
        project.rollback()
    crashpoint.disarm()
    assert project.cli("rollback", "numbers", *([] if to is None else ["--to", str(to)])) == 0
    assert served(project) == (goes_to, 10.0 ** (goes_to - 1))


def test_a_run_of_a_held_view_finishes_what_a_killed_rollback_began(versions: Versions) -> None:
    project = versions(1.0, 10.0)
    crashpoint.arm("live.cas", mode="raise")
    with pytest.raises(InjectedError):
        project.rollback(hold=True)
    crashpoint.disarm()
    assert (project.live().snapshot, served(project)) == (1, (2, 10.0))
    with pytest.raises(GateError, match="snapshot 2 is marked bad"):
        project.run(full=True)
    assert (project.live().held, served(project)) == ("rollback from 2, with --hold", (1, 1.0))
    assert project.faults() == []


def test_a_run_of_a_held_view_needs_no_online_store(
    versions: Versions, make_project: MakeProject, caplog: pytest.LogCaptureFixture, away: str
) -> None:
    versions(1.0, 10.0).rollback(hold=True)
    without = make_project([(1, 50.0)], project={"online": away})
    assert without.run(accept=["contract"]).status == "committed"
    assert "whether readers see what is live is not known" in caplog.text


def test_a_run_refused_by_a_gate_fails_though_it_would_not_go_live(
    make_project: MakeProject, tmp_path: Path
) -> None:
    noted = tmp_path / "noted"
    script = f"import os; open({str(noted)!r}, 'a').write(os.environ['NOTIFY_STATUS'] + chr(10))"
    notified = {"notify": [sys.executable, "-c", script]}
    rows = [(i, i + 1.0) for i in range(100)]
    for factor in (1.0, 1.1):
        project = make_project([(i, x * factor) for i, x in rows], project=notified)
        project.run()
    project.rollback(hold=True)
    project = make_project(rows[:30], project=notified)
    for _ in range(2):  # the second finds nothing changed, and the gate still refuses
        with pytest.raises(GateError, match="snapshot 3 is not published"):
            project.run()
    assert noted.read_text().split() == ["published"] * 3 + ["refused"] * 2
    ref = project.store.refs.live()
    assert (ref and ref.snapshot, ref and ref.held) == (1, "rollback from 2, with --hold")
