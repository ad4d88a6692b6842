"""Every crash point × every way to fail, at every time it is passed: then the oracle, a run without
faults, and the oracle again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from typing import Any

import pytest

import precompute.store.online.table_file
from precompute.engine.runner import AHEAD_WINDOWS
from precompute.store.disk import crashpoint
from precompute.store.disk.crashpoint import POINTS
from precompute.store.errors import SnapshotError
from precompute.store.offline.standing import Standing
from tests.faults.conftest import ROWS, MakeScene, put_on_stage
from tests.faults.harness import (
    VIEW,
    WINDOW_ROWS,
    Child,
    Ended,
    FaultScene,
    act,
    changed,
    check_everything,
    check_readers,
    check_snapshots,
    recover,
    small_chunks,
)

WITH_FILE = (
    "part.write",
    "part.fsync",
    "part.rename",
    "dir.fsync",
    "journal.append",
    "manifest.write",
    "log.write",
)
"""Points that have a file to tear; at the others ``torn`` is ``kill``."""
PART = ("part.write", "part.fsync", "part.rename", "dir.fsync")
FLIPPED = ("online.flip", "notify", "gc")
"""Points after which readers see the new snapshot."""
COMMIT = ("verify", "manifest.write", "manifest.link", "manifest.dirsync")
STANDS = ("log.link", "log.dirsync", "log.state")
"""Points after which an event is there, whatever fails."""
TRANSLATED = (*PART, "journal.append", *COMMIT, "log.write", *STANDS)
"""Points that are operations of the file system, whose errors become ours."""
TO_COMPUTE = 24
AHEAD = AHEAD_WINDOWS * WINDOW_ROWS
"""Rows that the engine may have computed and that were not written yet."""
SYNCED = ("part.fsync", "dir.fsync")
"""Points after a sync and nothing else: a process that dies there leaves the disk as one that dies
at the point before, and a loss of power is played in test_power_loss.py."""
KINDS = ("part.write", "journal.append", "manifest.write", "log.write")
"""One point of each kind of write: there ``enospc`` is ``eio`` with another number, and an error
that nobody foresaw is tried beside those of the file system."""
TRIED: dict[str, Sequence[str]] = {
    "kill": [point for point in POINTS if point not in (*SYNCED, "log.state")],
    "torn": [point for point in WITH_FILE if point not in SYNCED],
    "raise": [point for point in POINTS if point not in TRANSLATED or point in KINDS],
    # a state is written down after some events: by a rollback, below
    "eio": [point for point in (*TRANSLATED, "gc") if point != "log.state"],
    "enospc": KINDS,
}
CASES = [(point, mode) for mode, points in TRIED.items() for point in points]


def inject(
    scene: FaultScene, point: str, nth: int, mode: str, what: str = "run", **chunks: Any
) -> Ended:
    """Do it with the point armed: in a child where that is the end of a process, here where it is
    an error."""
    if mode in ("kill", "torn"):
        ended = Child(scene, what, crash=(point, nth, mode), chunks=chunks).ended()
        assert ended == Ended(signal=9), f"{point}:{nth}:{mode} did not kill"
        return ended
    crashpoint.arm(point, nth, mode)
    try:
        with small_chunks(**chunks):
            return Ended(act(scene, what))
    except Exception as exc:  # what it must be is checked below
        return Ended(error=f"{type(exc).__name__}: {exc}")
    finally:
        assert crashpoint.disarm()[point] >= nth, f"{point} was not passed {nth} times"


def check_error(ended: Ended, point: str, mode: str) -> None:
    """An error says what it is: nothing foreign where the file system failed."""
    if mode == "eio" and point in PART:
        assert ended == Ended("published"), (
            "a part whose sync failed is written once more under another name"
        )
    elif mode == "eio" and point in STANDS:
        assert ended == Ended("published"), "it is read back, and found to be one's own"
    elif mode in ("eio", "enospc") and point == "gc":
        assert ended == Ended("published"), "what could not be removed is removed another time"
    elif mode == "raise":
        assert ended.error == f"InjectedError: injected at {point}"
    elif mode in ("eio", "enospc"):
        assert ended.error is not None
        kind = "SnapshotError" if point in TRANSLATED else "OSError"
        assert ended.error.startswith(f"{kind}: ")
        if kind == "SnapshotError":
            words = "no space left while writing " if mode == "enospc" else "Input/output error"
            assert words in ended.error


def passings(scene: FaultScene, what: str = "run", **chunks: Any) -> dict[str, int]:
    """How often an undisturbed run passes each point."""
    crashpoint.arm("")
    try:
        with small_chunks(**chunks):
            act(scene, what)
    finally:
        hits = crashpoint.disarm()
    return hits


def check_reports(scene: FaultScene, ended: Ended) -> None:
    """The failed run's report tells what became of it."""
    report = scene.store.runs.reports()[1]
    if ended.signal:
        assert (report.status, report.error) == ("killed", "killed: it died without reporting why")
    elif ended.error:
        assert report.status == "failed"
        assert (report.error or "?") in ended.error
    assert report.finished_at >= report.started_at


@pytest.fixture(scope="module")
def hits(prepared: FaultScene) -> dict[str, int]:
    """How often each point is passed by the run that is disturbed here."""
    scene = put_on_stage(prepared, "prepared")
    found = passings(scene)
    assert scene.computed() == TO_COMPUTE
    assert scene.store.numbers() == [2, 3]
    check_everything(scene)
    return found


def test_every_declared_point_is_passed(hits: dict[str, int]) -> None:
    # a state is written down by a rollback, or after several events
    assert [point for point in POINTS if not hits.get(point)] == ["log.state"]
    # three chunks, the kills, and rows by which later nights are judged
    assert hits["part.write"] == 5
    assert hits["journal.append"] == 3


def times(mode: str, passed: int) -> Sequence[int]:
    """Which passings of a point are tried: a process dies at the first, in mid-run and at the
    kills; an error is raised in mid-run, where chunks were noted and more are to come, and at the
    kills; all else in mid-run."""
    if mode == "kill":
        return [nth for nth in (1, 2, 4) if nth <= passed]
    return [nth for nth in ((2, 4) if mode == "raise" else (2,)) if nth <= passed] or [1]


@pytest.mark.parametrize(("point", "mode"), CASES)
def test_a_run_that_fails_anywhere(
    point: str, mode: str, hits: dict[str, int], delta_to_come: MakeScene
) -> None:
    for nth in times(mode, hits[point]):
        scene = delta_to_come()
        old, new = scene.history[-2], scene.history[-1]
        ended = inject(scene, point, nth, mode)
        check_error(ended, point, mode)
        assert check_readers(scene) == (new if point in FLIPPED or ended.status else old)
        check_snapshots(scene)

        recover(scene)
        check_reports(scene, ended)
        lost = (
            WINDOW_ROWS if point in PART and nth <= 3 and not ended.status else 0
        )  # the chunk in flight, never more
        computed = scene.computed()
        if (point, mode) == (
            "journal.append",
            "torn",
        ):  # half a journal takes what was noted in it long ago with it
            assert computed <= 2 * TO_COMPUTE
        else:
            assert (
                TO_COMPUTE + lost
                <= computed
                <= TO_COMPUTE
                + lost
                + (AHEAD if point in (*PART, "journal.append") and not ended.status else 0)
            )
        check_everything(scene)


@pytest.mark.parametrize(
    "point", ["part.write", "manifest.link", "online.load", "log.write", "log.link", "online.flip"]
)
def test_a_first_run_that_is_killed_anywhere(point: str, scene: FaultScene) -> None:
    scene.write(dict(list(ROWS.items())[:20]))
    assert inject(scene, point, 1, "kill").signal == 9
    recover(scene)
    assert scene.computed() <= 20 + WINDOW_ROWS + AHEAD
    check_everything(scene)


COMPACTING: dict[str, Any] = {"MOST_SHARE": 0.0}
MERGING: dict[str, Any] = {"MOST_DELTAS": 1}


@pytest.fixture(scope="module")
def compacting_hits(prepared: FaultScene) -> dict[str, int]:
    """How often each point is passed by a run that compacts; that comes last."""
    return passings(put_on_stage(prepared, "prepared"), **COMPACTING)


@pytest.fixture(scope="module")
def merging_hits(prepared_deltas: FaultScene) -> dict[str, int]:
    """How often each point is passed by a run that merges deltas; that comes last."""
    return passings(put_on_stage(prepared_deltas, "prepared-deltas"), **MERGING)


MADE_OF_PARTS = ("part.rename", "segment.link", "manifest.link")
"""Points of a snapshot that is made of others' rows: its parts and its commit."""


@pytest.mark.parametrize("point", MADE_OF_PARTS)
def test_a_compaction_that_fails(
    point: str, compacting_hits: dict[str, int], delta_to_come: MakeScene
) -> None:
    scene = delta_to_come()
    old, new = scene.history[-2], scene.history[-1]
    ended = inject(scene, point, compacting_hits[point], "kill", **COMPACTING)
    assert check_readers(scene) == (new if ended.status else old)
    with small_chunks(**COMPACTING):
        scene.run()
    assert scene.computed() == TO_COMPUTE
    assert Standing(scene.store).newest().kind == "full"  # type: ignore[union-attr]
    check_everything(scene)


@pytest.mark.parametrize("point", MADE_OF_PARTS)
def test_a_run_that_is_killed_while_it_merges_deltas(
    point: str, merging_hits: dict[str, int], second_delta_to_come: MakeScene
) -> None:
    scene = second_delta_to_come()
    old, new = scene.history[-2], scene.history[-1]
    ended = inject(scene, point, merging_hits[point], "kill", **MERGING)
    assert check_readers(scene) == (new if ended.status else old)
    with small_chunks(**MERGING):
        scene.run()
    newest = Standing(scene.store).newest()
    assert newest is not None
    *below, own = newest.segments
    assert (len(below), own, len(own.merged)) == (1, newest.own, 2)
    check_everything(scene)


# ---- rollback


@pytest.mark.parametrize(
    ("point", "mode"),
    [
        *((point, "kill") for point in ("log.write", *STANDS, "online.flip")),
        ("log.link", "raise"),
        ("log.write", "eio"),
    ],
)
def test_a_rollback_that_fails_is_done_by_doing_it_again(
    point: str, mode: str, third_is_live: MakeScene
) -> None:
    scene = third_is_live()
    second, third = scene.history[-2], scene.history[-1]
    ended = inject(scene, point, 1, mode, "rollback")
    assert ended.status is None
    assert check_readers(scene) == (second if point == "online.flip" else third)
    again(scene, point)
    check_after_rollback(scene)


def again(scene: FaultScene, point: str) -> None:
    """Roll back to 2 once more: it gets done, or was already."""
    if point == "online.flip":
        with pytest.raises(SnapshotError, match="snapshot 2 of view 'numbers' is live already"):
            act(scene, "rollback", to=2)
    else:
        assert act(scene, "rollback", to=2) in ("published", "current")


@pytest.mark.parametrize(
    ("point", "mode"),
    [
        ("online.load", "kill"),
        ("online.verify", "raise"),
        ("index.build", "kill"),
        ("log.link", "kill"),
        ("online.flip", "raise"),
    ],
)
def test_a_rollback_that_loads_and_fails_is_done_by_doing_it_again(
    point: str, mode: str, third_is_live: MakeScene
) -> None:
    scene = third_is_live()
    for path in (scene.folder / "var" / "online" / VIEW).glob("2-*.table"):
        path.unlink()
    ref = scene.store.log.live()
    assert ref is not None
    (lost,) = {*ref.previous_indexes} - {*ref.indexes}
    shutil.rmtree(scene.store.index_folder(lost))
    third = scene.history[-1]
    inject(scene, point, 1, mode, "rollback")
    if point != "online.flip":
        assert check_readers(scene) == third
    again(scene, point)
    check_after_rollback(scene)


def test_a_rollback_killed_before_the_flip_goes_no_further_when_repeated(
    third_is_live: MakeScene,
) -> None:
    scene = third_is_live()
    inject(scene, "log.link", 1, "kill", "rollback")
    with small_chunks():
        act(scene, "rollback")
    check_after_rollback(scene)


def test_a_rollback_killed_before_the_flip_is_finished_by_the_next_run(
    third_is_live: MakeScene,
) -> None:
    """The source still yields what was rolled back from, so that the run waits; readers must not be
    left with it for all that."""
    scene = third_is_live()
    inject(scene, "log.link", 1, "kill", "rollback")
    assert Child(scene, "run").ended().status == "committed"
    assert check_readers(scene) == scene.history[-2]


def check_after_rollback(scene: FaultScene) -> None:
    ref = scene.store.log.live()
    assert ref is not None
    assert ref.snapshot == 2
    assert list(scene.store.log.bad()) == [3]
    assert check_readers(scene) == scene.history[-2]
    check_everything(scene, current=False)
    scene.write(changed(scene.rows, [1, 2]))
    recover(scene)
    check_everything(scene)


def test_nothing_is_left_in_the_online_store_by_a_load_that_was_killed(
    delta_to_come: MakeScene,
) -> None:
    scene = delta_to_come()
    assert Child(scene, before=kill_in_table_load).ended().signal == 9
    recover(scene)
    check_everything(scene)


def kill_in_table_load() -> None:
    def killed(self):  # type: ignore[no-untyped-def]
        os.kill(os.getpid(), signal.SIGKILL)

    precompute.store.online.table_file.TableWriter.finish = killed  # type: ignore[method-assign]
