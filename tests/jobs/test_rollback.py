"""Rollback: one pointer move to a snapshot that was good; rows and index together; the view is held
until somebody resumes it, and what was left is not published again by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.jobs.run import run_view as run_module
from precompute.jobs.run.command_process import operator
from precompute.jobs.run.loader import Loader
from precompute.store.disk import crashpoint
from precompute.store.disk.crashpoint import InjectedError
from precompute.store.disk.lease import Lease, take
from precompute.store.disk.record import replace
from precompute.store.errors import GateError, PrecomputeError, SnapshotError
from precompute.store.offline.log import PUBLISH_LEASE, Hold
from precompute.store.times import containing, parsed_time, shown_time
from tests.fixtures import MakeProject, Prepared
from tests.online import of_number
from tests.scene import UNJUDGED, Scene

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
    assert (ref.snapshot, ref.previous, ref.reason) == (1, 2, "rollback from 2")
    assert ref.held == Hold(
        ref.held.at if ref.held else "", f"rollback ({operator()})", "went back from 2"
    )
    assert (ref.run, set(project.store.log.bad())) == (report.run, {2})
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
    assert set(project.store.log.bad()) == {2, 3}


def test_what_cannot_be_gone_back_to_is_refused_and_nothing_is_marked(versions: Versions) -> None:
    project = versions(1.0, 10.0)
    with pytest.raises(SnapshotError, match=r"no snapshot 9 .*\(it has: 1, 2\)"):
        project.rollback(to=9)
    with pytest.raises(SnapshotError, match=r"snapshot 2 .* is live already.*1, 2"):
        project.rollback(to=2)
    assert project.store.log.bad() == {}
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
    project.rollback(hold=False)
    project = versions(100.0)
    assert project.cli("rollback", "numbers", "--to", "2") == 3
    assert "marked bad" in capsys.readouterr().err
    assert set(project.store.log.bad()) == {2}
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
    assert set(project.store.log.bad()) == {2}


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


def test_runs_wait_until_somebody_resumes(versions: Versions, capsys: Captured) -> None:
    project = versions(1.0, 10.0)
    assert project.cli("rollback", "numbers") == 0
    hold = f"held since {shown_time(project.live().held.at)} by rollback ({operator()}): went back from 2; "  # type: ignore[union-attr]
    nothing = f"{hold}nothing newer waits; `precompute resume numbers` lets runs publish again"
    assert capsys.readouterr().out.splitlines()[-1] == f"numbers: {nothing}"
    # the very same rows: computed once, since no run builds on what was left
    for status in ("committed", "current"):
        assert project.cli("run", "numbers") == 0
        assert project.report().status == status
        waits = (
            f"{hold}snapshot 3 waits, with the very rows of snapshot 2, which was rolled back from:"
            " `precompute resume numbers`"
        )
        assert capsys.readouterr().out.splitlines()[-1] == f"numbers: {waits}"
        assert served(project) == (1, 1.0)
    assert project.snapshot().counts.written == 3
    project = versions(100.0)
    assert (project.numbers(), served(project)) == ([1, 2, 3, 4], (1, 1.0))
    assert project.report().held == f"{hold}snapshot 4 waits: `precompute resume numbers`"
    capsys.readouterr()
    assert project.cli("status") == 1
    assert f"{hold}snapshot 4 waits: `precompute resume numbers`" in capsys.readouterr().out
    held = project.status()["held"]
    assert (held["waits"], held["repeats"], held["by"]) == (4, None, f"rollback ({operator()})")
    report = project.resume()
    assert (report.command, report.status, report.snapshot) == ("resume", "published", 4)
    assert (report.held, project.live().held, served(project)) == (None, None, (4, 100.0))
    assert project.live().run == report.run == project.report().run
    assert project.cli("status") == 0
    versions(7.0)
    assert served(project) == (5, 7.0)
    assert project.faults() == []


def test_resume_only_lets_go_where_nothing_newer_waits(
    versions: Versions, capsys: Captured
) -> None:
    project = versions(1.0, 10.0, 100.0)
    project.rollback(to=1)
    before = project.live()
    capsys.readouterr()
    assert project.cli("resume", "numbers") == 0
    assert (
        "numbers: current, snapshot 1 (nothing newer waited: snapshot 1 stays live, and runs"
        " publish again)" in capsys.readouterr().out
    )
    assert project.live() == replace(before, held=None)
    assert set(project.store.log.bad()) == {2, 3}  # both were live since
    assert project.resume().plan == "was not held: snapshot 1 stays live, and runs publish again"
    assert served(project) == (1, 1.0)
    assert project.run().status == "published"


def test_without_a_hold_the_next_good_run_publishes(versions: Versions, capsys: Captured) -> None:
    project = versions(1.0, 10.0)
    assert project.cli("rollback", "numbers", "--no-hold") == 0
    assert "held" not in capsys.readouterr().out
    assert (project.live().held, project.report().held) == (None, None)
    project = versions(100.0)
    assert served(project) == (3, 100.0)


def test_what_was_left_is_published_by_its_number_on_purpose(versions: Versions) -> None:
    """Alone, and then its mark is taken away: it was right after all."""
    project = versions(1.0, 10.0)
    project.rollback()
    assert project.publish().status == "current"
    assert (project.live().held is not None, served(project)) == (True, (1, 1.0))
    report = project.publish(snapshot=2)
    assert (report.status, report.attention) == (
        "published",
        [
            "snapshot 2 was rolled back from; now that snapshot 2 is published by its number, its"
            " mark is taken away"
        ],
    )
    assert (served(project), project.live().held) == ((2, 10.0), None)
    assert project.store.log.bad() == {}
    assert project.run().status == "current"  # built on again
    project.store.mark_bad(1, "damaged: …", rows=False)
    with pytest.raises(GateError, match=r"snapshot 1 is marked bad \(damaged: …\)"):
        project.publish(snapshot=1)
    assert set(project.store.log.bad()) == {1}


def test_what_a_person_publishes_of_earlier_is_held_too(
    versions: Versions, capsys: Captured
) -> None:
    project = versions(1.0, 10.0, 100.0)
    assert project.cli("publish", "numbers", "--snapshot", "2") == 0
    said = (
        f"by publish ({operator()}): snapshot 2 is earlier than 3, which was live; snapshot 3 waits:"
        " `precompute resume numbers`"
    )
    assert capsys.readouterr().out.splitlines()[-1].endswith(said)
    assert (served(project), project.store.log.bad()) == ((2, 10.0), {})
    held = project.live().held
    project.run()
    assert (served(project), project.live().held) == ((2, 10.0), held)
    project.publish(snapshot=2, reload=True)
    assert (served(project), project.live().held) == ((2, 10.0), held)
    assert (project.resume().snapshot, served(project)) == (3, (3, 100.0))


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
    # half of few rows become others
    make = {"view": {"gates": UNJUDGED}}
    rows = [(i, float(i)) for i in range(20)]
    make_project(rows, **make).run()
    make_project([(0, 50.0), *rows[1:]], **make).run()
    more = [(i, 60.0 + i) for i in range(1, 1 + changed)]
    project = make_project([(0, 50.0), *more, *rows[1 + changed :]], **make)
    # a delta on 2, or the copy of one: row 0 is taken over from it
    assert ("compacting" in (project.materialize().plan or "")) == (changed == 10)
    project.rollback()
    for report in (project.publish(), project.resume()):
        assert (report.status, report.snapshot) == ("current", 1)
    # on purpose the mark of 2 goes, whose row it has
    assert project.publish(snapshot=3).snapshot == 3
    assert project.store.log.bad() == {}


def test_back_from_a_partition_goes_to_the_one_before_it(make_project: MakeProject) -> None:
    sql = "SELECT id, x * $n AS x FROM read_parquet('${data}/data.parquet') WHERE $start < $end"

    def computed(day: int, factor: int, command: str = "run") -> Scene:
        view = {
            "source": {"sql": sql.replace("$n", str(factor))},
            "partition": {"by": "day", "start": "2026-01-01"},
        }
        project = make_project(
            [(key, float(key)) for key in KEYS],
            view=INDEXED | view,
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


def test_a_hold_outlasts_what_is_refused(
    versions: Versions,
) -> None:
    project = versions(1.0, 10.0, 20.0)
    project.rollback()
    held = project.live().held
    project.store.mark_bad(1, "damaged: …", rows=False)
    with pytest.raises(GateError):
        project.publish(snapshot=1)
    assert (project.live().held, served(project)) == (held, (2, 10.0))
    project.store.log.unmark([1])
    project.rollback(hold=False)
    assert (project.live().held, served(project)) == (None, (1, 1.0))
    project.publish(snapshot=2)
    project.rollback()
    project = versions(100.0)
    assert project.publish().snapshot == 4
    assert (served(project), project.live().held) == ((4, 100.0), None)
    versions(7.0)
    assert served(project)[1] == 7.0


# ---- before a time, and by the command that published


def test_back_to_what_was_live_before_a_time(versions: Versions, capsys: Captured) -> None:
    project = versions(1.0, 10.0, 100.0)
    second, third = (entry.published_at for entry in project.store.log.publishings()[1:])
    assert project.cli("rollback", "numbers", "--before", "yesterday") == 2
    assert "--before: 'yesterday': write a date or time" in capsys.readouterr().err
    assert project.cli("rollback", "numbers", "--before", "2020-01-01") == 1
    assert "no good snapshot before 3 to go back to" in capsys.readouterr().err
    assert project.cli("rollback", "numbers", "--before", third, "--to", "1") == 2
    assert project.cli("rollback", "numbers", "--before", second) == 0
    assert (served(project), set(project.store.log.bad())) == ((1, 1.0), {2, 3})
    # what was live before it is live: it stays as it is
    live = project.live()
    assert project.cli("rollback", "numbers", "--before", second) == 0
    assert (project.report().status, project.live()) == ("current", live)
    assert capsys.readouterr().out.splitlines()[-1].startswith("numbers: held since ")
    assert project.cli("rollback", "numbers") == 1  # there is nothing before


def test_what_is_damaged_is_passed_over_before_a_time_and_once(versions: Versions) -> None:
    project = versions(1.0, 10.0, 100.0)
    moment = parsed_time(project.store.log.publishings()[2].published_at)
    project.store.mark_bad(2, "damaged: …", rows=False)
    assert [project.rollback(before=moment).status for _ in range(2)] == ["published", "current"]
    assert (served(project), project.live().snapshot) == ((1, 1.0), 1)


def test_what_one_command_published_many_times_is_taken_back_as_one(versions: Versions) -> None:
    """As a backfill does."""
    project = versions(1.0)
    for factor in (10.0, 100.0, 7.0):
        project = make_factor(project, factor)
        number = project.materialize().snapshot
        project.publish(snapshot=number, backfill="night")
    assert [entry.run for entry in project.store.log.publishings()][1:] == ["night"] * 3
    project.publish(reload=True)  # what is live is still what the backfill brought
    assert project.rollback().snapshot == 1
    assert (served(project), set(project.store.log.bad())) == ((1, 1.0), {2, 3, 4})


def make_factor(project: Scene, factor: float) -> Scene:
    rows = pa.table({"id": list(KEYS), "x": [key * factor for key in KEYS]})
    pq.write_table(rows, project.home / "data.parquet")
    return project.reread()


def test_where_it_is_not_known_what_was_live_before_a_person_names_it(versions: Versions) -> None:
    """It goes no step too far."""
    project = versions(1.0, 10.0, 100.0)
    path = project.store.log.path(2)
    path.write_bytes(path.read_bytes().replace(b"run", b"rum"))
    for before in (None, parsed_time(project.live().at)):
        with pytest.raises(SnapshotError, match=r"is not known, since .*2\.json is damaged.*--to"):
            project.rollback(before=before)
    assert project.rollback(to=2).snapshot == 2


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
    before_publishing.append(project.rollback)
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
        project.rollback(hold=False)

    monkeypatch.setattr(Loader, "_verify", verified)
    with pytest.raises(PrecomputeError, match="rollback"):
        versions(100.0)
    assert served(project) == (1, 1.0)
    assert project.faults() == []
    assert project.run().status == "published"
    assert served(project) == (4, 100.0)  # and not 3, which took rows over from 2


def test_the_operators_command_is_called(versions: Versions, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    names = ("COMMAND", "STATUS", "SNAPSHOT", "HELD")
    script = f"import os; open({str(noted)!r}, 'a').write(' '.join(os.environ['NOTIFY_' + n][-32:] for n in {names}) + chr(10))"
    project = versions(1.0, 10.0, project={"notify": [sys.executable, "-c", script]})
    crashpoint.arm(
        "log.link", mode="raise"
    )  # the rows are another's by now, and the online store does not know
    with pytest.raises(InjectedError):
        project.rollback()
    crashpoint.disarm()
    project.rollback()
    project.run()
    project.run()  # nothing new: nobody hears of it again
    assert noted.read_text().splitlines() == [
        "run published 1 ",
        "run published 2 ",
        "rollback failed 1 ",
        "rollback published 1 numbers` lets runs publish again",
        "run committed 3 rom: `precompute resume numbers`",
    ]


@pytest.mark.parametrize(("to", "goes_to"), [(None, 2), (2, 2), (1, 1)])
def test_a_rollback_that_was_killed_is_finished_or_overruled(
    versions: Versions, to: int | None, goes_to: int
) -> None:
    project = versions(1.0, 10.0, 100.0)
    crashpoint.arm("log.link", mode="raise")
    with pytest.raises(InjectedError):
        project.rollback()
    crashpoint.disarm()
    assert project.cli("rollback", "numbers", *([] if to is None else ["--to", str(to)])) == 0
    assert served(project) == (goes_to, 10.0 ** (goes_to - 1))


def test_a_run_of_a_held_view_finishes_what_a_killed_rollback_began(versions: Versions) -> None:
    project = versions(1.0, 10.0)
    crashpoint.arm("log.link", mode="raise")
    with pytest.raises(InjectedError):
        project.rollback()
    crashpoint.disarm()
    held = project.live().held
    assert (project.live().snapshot, served(project)) == (1, (2, 10.0))
    assert set(project.store.log.bad()) == {2}
    assert project.run(full=True).status == "committed"
    assert (project.live().held, served(project)) == (held, (1, 1.0))
    assert project.faults() == []


def test_a_run_of_a_held_view_needs_no_online_store(
    versions: Versions, make_project: MakeProject, caplog: pytest.LogCaptureFixture, away: str
) -> None:
    versions(1.0, 10.0).rollback()
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
    project.rollback()
    project = make_project(rows[:30], project=notified)
    for _ in range(2):  # the second finds nothing changed, and the gate still refuses
        with pytest.raises(GateError, match="snapshot 3 is not published"):
            project.run()
    assert noted.read_text().split() == ["published"] * 3 + ["refused"] * 2
    assert (project.live().snapshot, project.live().held is not None) == (1, True)
