"""Reconcile: what the online store lost of what is live is seen, reported, and brought back, by
hand and by the scheduler."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.publisher import Publisher
from precompute.jobs.run.rollback import reconcile
from precompute.jobs.schedule.reconciler import Reconciler
from precompute.jobs.schedule.scheduler import Scheduler
from precompute.store.account.account import read_account, write_account
from precompute.store.account.checker import DEGRADED as HEALED
from precompute.store.account.checker import check_live
from precompute.store.disk.lease import take
from precompute.store.disk.record import replace
from precompute.store.errors import ConflictError, OnlineStoreError
from precompute.store.offline.log import PUBLISH_LEASE
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.online_store import OnlineStore
from tests.fixtures import MakeProject, Prepared
from tests.online import TABLE, Stopped, named, of_number, segment, torn
from tests.online_rig import rigged
from tests.scene import Scene

ROWS = [(i, float(i)) for i in range(40)]
DOUBLES = [2.0 * i for i in range(40)]


def overlaid(make_project: MakeProject, online: str) -> Scene:
    """A view that is live as two segments."""
    for rows in (ROWS[1:], ROWS):
        project = make_project(rows, project={"online": online})
        project.run()
    return project


@pytest.fixture
def project(prepared: Prepared, online: str) -> Scene:
    project = prepared(overlaid, online)
    assert project.pointer().numbers == (1, 2)
    return project


def said(project: Scene) -> str | None:
    with project.online_store() as online:
        return "; ".join(check_live(project.store, online).trouble) or None


def lose(project: Scene, number: int) -> None:
    """A segment's rows are gone, and its pointer is not."""
    if project.online.startswith("table"):
        folder = Path(project.online.removeprefix("table:")) / "numbers"
        path = of_number(folder, number, ".table")
        data = bytearray(path.read_bytes())
        # rows and index: not the header, which would not open
        data[4096:-16] = bytes(len(data) - 4112)
        path.write_bytes(data)
    else:
        rigged(project.online).lose(project.online, "numbers", number)


def lose_all(project: Scene) -> None:
    if project.online.startswith("table"):
        shutil.rmtree(project.online.removeprefix("table:"))
    else:
        rigged(project.online).restore(project.online, None)


def lose_features(project: Scene) -> None:
    """The pointer tells of other rows than its segments have."""
    view = project.pointer().view
    with project.online_store() as online:
        online.flip(
            replace(project.pointer(), view=dataclasses.replace(view, features=view.features[::-1]))
        )


LOSSES: dict[str, Callable[[Scene], None]] = {
    "the lowest": lambda project: lose(project, 1),
    "the upper": lambda project: lose(project, 2),
    "everything": lose_all,
    "what rows are like": lose_features,
}


NEXT: dict[str, Callable[[Scene], object]] = {
    "reconcile": lambda project: reconcile(project, "numbers", Silent()),
    "run": lambda project: project.run(),
    "publish": lambda project: project.publish(),
    "rollback": lambda project: project.rollback(),
}


@pytest.mark.parametrize("act", NEXT)
def test_what_a_killed_load_left_is_swept_by_whoever_comes_next(project: Scene, act: str) -> None:
    with project.online_store() as online:
        if project.online.startswith("table"):
            dead = subprocess.Popen(["true"])
            dead.wait()
            folder = Path(project.online.removeprefix("table:")) / "numbers"
            (folder / f".{named(9)}.table.{dead.pid}.tmp").write_bytes(b"half")
        else:
            with pytest.raises(Stopped):
                online.load("numbers", segment(9), torn(TABLE, Stopped()))
        assert len(online.unfinished("numbers")) == 1
        NEXT[act](project)
        assert online.unfinished("numbers") == []
        if not project.online.startswith("table"):
            numbers = [segment.number for segment in online.segments("numbers")]
            rigged(project.online).check_tidy(project.online, "numbers", numbers)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_was_lost_is_reported_and_brought_back(project: Scene, loss: str) -> None:
    assert (said(project), reconcile(project, "numbers", Silent())) == (None, None)
    reports = len(project.store.runs.reports())
    LOSSES[loss](project)
    wrong = said(project)
    assert wrong is not None
    assert "numbers" in wrong
    line = project.status()
    assert "; ".join(line["attention"]) == (
        wrong
        if line["online"]
        else "the online store does not serve what is live: precompute reconcile numbers"
    )
    report = reconcile(project, "numbers", Silent())
    assert report is not None
    assert report.command == "reconcile"
    assert report.status == "published"
    assert report.snapshot == 2
    assert "; ".join(report.attention) == wrong
    assert project.served(range(40)) == (2, DOUBLES)
    assert (said(project), project.status()["attention"]) == (None, [])
    assert len(project.store.runs.reports()) == reports + 1
    # going back is still possible, and nobody's hold was lifted
    assert project.rollback().snapshot == 1


def test_doubts_are_looked_into_once_and_values_are_compared_every_hour(
    project: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubts = [[], ["restarted"], ["restarted"], ["restarted", "3 keys were evicted"], []]
    looks, sample = list[int](), ViewStore.sample

    def watched(self: ViewStore, snapshot: Snapshot, rows: int, *how: Any) -> Any:
        looks.append(rows)
        return sample(self, snapshot, rows, *how)

    monkeypatch.setattr(ViewStore, "sample", watched)
    with project.online_store() as online:
        for found in doubts:
            monkeypatch.setattr(online, "doubts", lambda _, found=found: found)
            assert check_live(project.store, online).trouble == []
        notes = project.store.leases
        known = read_account(notes, "numbers")
        write_account(notes, replace(known, at_us=known.at_us - 3_600_000_000))
        assert check_live(project.store, online).trouble == []
    assert looks == [256, 20_000, 20_000, 256]


def test_a_pointer_left_behind_is_moved_and_nothing_loaded(project: Scene) -> None:
    with project.online_store() as online:
        behind = online.live("numbers")
        assert behind is not None
    store = project.store
    store.log.move_live(
        2,
        expected_epoch=project.live().epoch,
        reason="a crash between the two pointers",
    )
    assert said(project) == "the online store serves snapshot 2 of view 'numbers', and 2 is live"
    report = reconcile(project, "numbers", Silent())
    assert report is not None
    assert (report.status, report.epoch, "load" in report.stages_s) == ("published", 3, False)
    assert project.pointer() == replace(behind, epoch=3, at=project.live().at)
    assert said(project) is None


def test_a_hold_outlives_what_was_lost(project: Scene) -> None:
    project.rollback(hold=True)
    held = project.live().held
    assert held is not None
    lose_all(project)
    assert reconcile(project, "numbers", Silent()) is not None
    assert (project.live().held, project.live().snapshot) == (held, 1)


def test_until_it_is_back_a_row_that_is_not_there_is_no_unknown_entity(
    project: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(project, 1)
    seen: list[str] = []
    with project.online_store() as online:
        kind = type(online)
    load = kind.load

    def watched(self: OnlineStore, *args: object) -> int:
        with project.lookup() as lookup:
            seen.extend(lookup.row("numbers", key)["reason"] for key in (17, 999))
        return load(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "load", watched)
    assert reconcile(project, "numbers", Silent()) is not None
    # of a table file, the index is gone too
    assert seen == (["damaged"] if project.online.startswith("table") else ["not_in_store"]) * 2
    with project.lookup() as lookup:
        assert lookup.row("numbers", 999)["reason"] == "unknown_entity"


def test_rows_known_to_be_lost_stay_so_until_loaded_again(
    project: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(project, 1)
    with monkeypatch.context() as refusing:
        refusing.setattr(Publisher, "_load", refuse)
        with pytest.raises(OnlineStoreError, match="no room"):
            reconcile(project, "numbers", Silent())
        assert project.pointer().degraded
        # a run that finds nothing new must not say that all is well
        with pytest.raises(OnlineStoreError, match="no room"):
            project.run()
    assert project.pointer().degraded
    assert project.run().status == "published"
    assert not project.pointer().degraded
    assert (said(project), project.served(range(40))) == (None, (2, DOUBLES))


def refuse(*_: object) -> None:
    raise OnlineStoreError("no room")


def test_what_is_marked_degraded_and_is_whole_is_cleared_without_a_load(project: Scene) -> None:
    with project.online_store() as online:
        online.flip(replace(project.pointer(), degraded=True))
    assert said(project) == HEALED
    report = reconcile(project, "numbers", Silent())
    assert report is not None
    assert "load" not in report.stages_s
    assert (project.pointer().degraded, said(project)) == (False, None)


def test_another_projects_view_is_left_alone(project: Scene) -> None:
    foreign = replace(project.pointer(), owner="somebody", took_over=project.pointer().owner)
    with project.online_store() as online:
        online.flip(foreign)
    with pytest.raises(ConflictError, match="published by another project"):
        reconcile(project, "numbers", Silent())
    assert project.pointer() == foreign


def test_a_store_that_does_not_answer_has_lost_nothing(
    project: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with project.online_store() as online:
        kind = type(online)
    monkeypatch.setattr(kind, "blocking", True)
    monkeypatch.setattr(kind, "read_segments", refuse)
    with pytest.raises(OnlineStoreError, match="no room"):
        reconcile(project, "numbers", Silent())
    monkeypatch.undo()
    assert (project.pointer().degraded, project.live().epoch) == (False, 2)


def test_while_somebody_publishes_nothing_is_lost(project: Scene) -> None:
    lose_all(project)
    with take(project.store.leases, PUBLISH_LEASE, "a publishing", ttl_s=60):
        assert said(project) is None
        assert reconcile(project, "numbers", Silent()) is None


def test_all_views_are_reconciled_though_one_cannot_be(
    make_project: MakeProject, online: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a loss there is one command, and one document."""
    project = make_project(ROWS, project={"online": online})
    others = yaml.safe_load((project.folder / "views" / "numbers.yaml").read_text())
    project = make_project(
        ROWS, project={"online": online}, views={"others": others | {"name": "others"}}
    )
    project.publish_all()
    lose_all(project)
    capsys.readouterr()
    shutil.rmtree(project.store.data)
    assert project.cli("reconcile", "--json") == 3
    done = {
        one["view"]: (one["status"], one.get("error"))
        for one in json.loads(capsys.readouterr().out)
    }
    assert done["others"] == ("published", None)
    assert done["numbers"][0] == "refused"
    assert done["numbers"][1]
    assert project.pointer("others").snapshot == 1
    assert project.cli("reconcile", "others") == 0
    nothing = "others: nothing that is live is missing from the online store\n"
    assert capsys.readouterr().out == nothing


def test_the_scheduler_brings_back_what_was_lost(make_project: MakeProject) -> None:
    make_project(ROWS).run()
    project = make_project(ROWS, project={"reconcile": "1s"})
    said: list[str] = []
    scheduler = Scheduler(project, announce=said.append)
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    try:
        lose_all(project)
        ends = time.monotonic() + 60
        while (
            not (said and said[-1] == "numbers: the online store serves what is live")
            and time.monotonic() < ends
        ):
            time.sleep(0.05)
    finally:
        scheduler.stop()
        thread.join()
    assert said[-1] == "numbers: the online store serves what is live"
    assert project.served(range(40)) == (1, DOUBLES)


def test_what_cannot_be_brought_back_is_tried_again_later_and_later(
    make_project: MakeProject,
) -> None:
    project = make_project(ROWS)
    project.run()
    lose_all(project)
    announced: list[str] = []
    reconciler = Reconciler(project, announced.append, lambda *_: ["false"])
    for _ in range(2):
        reconciler.check()
        reconciler.wait()
    assert len(announced) == 2
    assert (
        announced[1]
        == "numbers: it could not be brought back (exited with status 1); its output shows more; once more in 2 min"
    )
    reconciler._attempts["numbers"], reconciler._not_before["numbers"] = 5000, 0.0
    reconciler.check()
    reconciler.wait()
    assert announced[-1].endswith("; once more in 60 min")


def test_what_no_thread_was_left_for_is_no_attempt(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(ROWS)
    project.run()
    lose_all(project)
    announced: list[str] = []
    reconciler = Reconciler(project, announced.append, lambda *_: ["false"])

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none_left)
        for _ in range(3):
            reconciler.check()
    assert announced[-1] == "numbers: cannot be brought back now: can't start new thread"
    reconciler.check()
    reconciler.wait()
    assert announced[-1].endswith("; once more in 2 min")


def test_other_damage_waits_for_no_attempt_at_what_was_lost_before(
    make_project: MakeProject,
) -> None:
    project = make_project(ROWS)
    project.run()
    lose_all(project)
    announced: list[str] = []
    reconciler = Reconciler(project, announced.append, lambda *_: ["false"])

    def attempts() -> int:
        reconciler.check()
        reconciler.wait()
        return sum("once more in" in line for line in announced)

    assert [attempts(), attempts()] == [1, 1]
    copy = project.root / ".identity-copy.json"
    copy.write_bytes(copy.read_bytes()[:-1])
    assert [attempts(), attempts()] == [2, 2]
    assert {line.rpartition("; ")[2] for line in announced if "once more in" in line} == {
        "once more in 2 min"
    }
    # what comes and goes is no other thing
    copy.unlink()
    assert attempts() == 2
    copy.write_bytes(b"{}")
    assert attempts() == 2


def test_a_load_that_takes_hours_keeps_no_other_view_waiting(make_project: MakeProject) -> None:
    project = make_project(ROWS, project={"reconcile": "1h"})
    others = yaml.safe_load((project.folder / "views" / "numbers.yaml").read_text())
    project = make_project(
        ROWS, project={"reconcile": "1h"}, views={"others": others | {"name": "others"}}
    )
    project.publish_all()
    announced: list[str] = []
    reconciler = Reconciler(
        project,
        announced.append,
        lambda _, view: ["sleep", "600"] if view == "numbers" else ["false"],
    )
    lose_all(project)
    reconciler.check()
    ends = time.monotonic() + 60
    while len(announced) < 3 and time.monotonic() < ends:
        time.sleep(0.01)
    assert [line.partition(":")[0] for line in announced] == ["numbers", "others", "others"]
    assert "could not be brought back" in announced[2]
    reconciler.check()
    assert len(announced) == 3
    # and is ended by the signal that ends the scheduler
    scheduler = Scheduler(project)
    scheduler._reconciler = reconciler
    scheduler._on_signal(signal.SIGTERM, None)
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert [line.partition(":")[0] for line in announced[3:]] == ["numbers"]


def test_what_is_lost_again_and_again_is_healed_ever_later(make_project: MakeProject) -> None:
    """A store that drops rows would be loaded every minute, and be fuller each time."""
    project = make_project(ROWS, project={"reconcile": "1h"})
    project.run()
    lose_all(project)
    announced: list[str] = []
    reconciler = Reconciler(project, announced.append, lambda *_: ["true"])
    for _ in range(5):
        reconciler.check()
        reconciler.wait()
    assert len(announced) == 1
