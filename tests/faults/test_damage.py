"""Damaged and missing files: refused by name, never a traceback and never wrong rows; and the next
run gets out of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.ops.verify import verify
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.rollback import rollback
from precompute.store.disk.record import content_of, sealed
from precompute.store.errors import PrecomputeError, SnapshotError
from precompute.store.offline.standing import Standing
from precompute.store.online.url import open_online_store
from tests.faults.conftest import MakeScene
from tests.faults.harness import (
    VIEW,
    FaultScene,
    act,
    changed,
    check_everything,
    check_readers,
    read_online,
    read_snapshot,
    recover,
    small_chunks,
    state_of,
)
from tests.online import of_number


@pytest.fixture
def committed(delta_to_come: MakeScene) -> FaultScene:
    """Snapshot 3 is committed, 2 is live."""
    scene = delta_to_come()
    with small_chunks():
        assert scene.run(command="materialize").snapshot == 3
    return scene


def manifest(scene: FaultScene, number: int) -> Path:
    return scene.view_folder / "manifests" / f"{number:020d}.json"


# ---- manifests


@pytest.mark.parametrize("length", [0, 100])
def test_a_torn_newest_manifest_is_passed_over(length: int, committed: FaultScene) -> None:
    path = manifest(committed, 3)
    path.write_bytes(path.read_bytes()[:length])
    before = committed.history[-2]
    newest = Standing(committed.store).newest()
    assert newest is not None
    assert newest.number == 2
    assert check_readers(committed) == before
    assert recover(committed).snapshot == 4
    assert check_readers(committed) == committed.history[-1]
    # until it is given up
    (wrong,) = [check for check in verify(committed.project(), VIEW) if not check.ok]
    assert (wrong.check, str(path) in wrong.found) == ("account", True)
    path.unlink()
    check_everything(committed)


def test_a_torn_old_manifest_does_not_keep_others_from_being_published(
    committed: FaultScene,
) -> None:
    manifest(committed, 1).write_bytes(b"torn")
    assert committed.run(command="publish").snapshot == 3
    assert check_readers(committed) == committed.history[-1]


def test_a_torn_live_manifest_can_be_rolled_back_from(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    manifest(scene, 2).write_bytes(b"torn")
    assert act(scene, "rollback") == "published"
    assert check_readers(scene) == scene.history[0]


def test_a_run_over_a_torn_live_manifest_recovers(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    manifest(scene, 2).write_bytes(b"torn")
    assert recover(scene).status == "published"
    assert check_readers(scene) == scene.history[-1]


def test_unknown_fields_of_pointers_and_leases_are_ignored(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    newest = max((scene.view_folder / "log").glob("0*.json"))
    for path in (newest, scene.view_folder / "notes" / "lease-run.json"):
        path.write_bytes(sealed(content_of(path.read_bytes(), path) | {"colour": "green"}))
    recover(scene)
    check_everything(scene)


# ---- parts


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 0xFF
    path.write_bytes(data)


FILES: list[tuple[str, Callable[[Path], None]]] = [
    ("part-00001.parquet", Path.unlink),
    ("part-00001.parquet", flipped),
    ("kills.parquet", cut),
    ("kills.parquet", emptied),
]


@pytest.mark.parametrize(("which", "harm"), FILES)
def test_a_snapshot_with_a_damaged_file_is_never_published(
    which: str, harm: Callable[[Path], None], committed: FaultScene
) -> None:
    run = committed.store.snapshot(3).run
    path = committed.view_folder / "data" / run / which
    harm(path)
    ref, old = committed.store.log.live(), committed.history[-2]
    with pytest.raises(SnapshotError, match=which):
        committed.run(command="publish", snapshot=3)
    assert committed.store.log.live() == ref
    assert check_readers(committed) == old


@pytest.mark.parametrize(("which", "harm"), FILES)
def test_runs_get_out_of_a_damaged_newest_snapshot(
    which: str, harm: Callable[[Path], None], committed: FaultScene
) -> None:
    run = committed.store.snapshot(3).run
    harm(committed.view_folder / "data" / run / which)
    for _ in range(2):  # the first may find out
        with small_chunks():
            try:
                status = committed.run().status
            except PrecomputeError:
                status = "failed"
        assert check_readers(committed) in committed.history[-2:]
    assert status in ("published", "current")
    assert check_readers(committed) == committed.history[-1]


@pytest.mark.parametrize("harm", [Path.unlink, flipped])
def test_runs_get_out_of_a_damaged_live_snapshot(
    harm: Callable[[Path], None], delta_to_come: MakeScene
) -> None:
    scene = delta_to_come()
    harm(scene.view_folder / scene.store.snapshot(2).parts[0].path)
    old = scene.history[-2]
    assert state_of(scene, online_rows(scene), "live") == old
    assert "checksums" in [check.check for check in verify(scene.project(), VIEW) if not check.ok]
    for _ in range(2):
        with small_chunks():
            try:
                status = scene.run().status
            except PrecomputeError:
                status = "failed"
                assert state_of(scene, online_rows(scene), "live") == old
    assert status in ("published", "current")
    assert check_readers(scene) == scene.history[-1]


def online_rows(scene: FaultScene) -> dict[int, Any]:
    online = open_online_store(scene.project().online)
    try:
        return read_online(scene, online)[1]
    finally:
        online.close()


# ---- the online store and the index


@pytest.mark.parametrize("harm", [Path.unlink, cut])
def test_a_damaged_live_segment_is_loaded_again(
    harm: Callable[[Path], None], delta_to_come: MakeScene
) -> None:
    scene = delta_to_come()
    scene.write(scene.history[-2][0])  # nothing changed since
    scene.history.pop(-1)
    harm(max((scene.folder / "var" / "online" / VIEW).glob("*.table")))
    recover(scene)
    check_everything(scene)
    with small_chunks():
        assert act(scene, "rollback") == "published"  # to 1, and not to what is live already
    assert check_readers(scene) == scene.history[0]


def test_a_rollback_to_a_damaged_segment_loads_it_again(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    emptied(min((scene.folder / "var" / "online" / VIEW).glob("*.table")))
    assert act(scene, "rollback") == "published"
    assert check_readers(scene) == scene.history[0]


@pytest.mark.parametrize("command", ["run", "publish"])
def test_a_missing_index_is_built_again(command: str, delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    scene.write(scene.history[-2][0])
    scene.history.pop(-1)
    shutil.rmtree(of_number(scene.view_folder / "index", 2))
    assert [check.check for check in verify(scene.project(), VIEW) if not check.ok] == ["index"]
    scene.run(command=command)
    assert [check for check in verify(scene.project(), VIEW) if not check.ok] == []
    check_everything(scene)


def test_an_event_that_was_cut_is_published_over(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    path = max((scene.view_folder / "log").glob("0*.json"))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(SnapshotError, match=r"what is live .* is not known"):
        scene.store.log.live()
    assert check_readers(scene) == scene.history[-2]
    recover(scene)
    assert check_readers(scene) == scene.history[-1]
    # it is a gap in the history, which is told
    (fault,) = scene.project().faults()
    assert str(path) in fault.found


@pytest.mark.parametrize("name", ["lease-run.json", "lease-publish.json"])
def test_a_damaged_small_file_is_named_or_mended(name: str, delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    path = scene.view_folder / "notes" / name
    for content in (b"{", b'{"fence": "x"}'):
        path.write_bytes(content)
        with small_chunks():
            try:
                scene.run()
            except PrecomputeError as exc:
                assert str(path) in str(exc)  # noqa: PT017 - either it says which file, or it got over it
                path.unlink()
        assert check_readers(scene) in scene.history[-2:]
    path.unlink(missing_ok=True)  # as reconcile does with one that nobody has written since
    recover(scene)
    check_everything(scene)


def test_reports_that_cannot_be_read_stop_nothing(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    for path in (scene.view_folder / "runs").glob("*.json"):
        path.write_bytes(b"{")
    recover(scene)
    assert check_readers(scene) == scene.history[-1]


# ---- rollback


def test_what_is_refused_changes_neither_pointer_nor_marks_nor_hold(
    delta_to_come: MakeScene,
) -> None:
    scene = delta_to_come()
    recover(scene)  # gc removes 1
    view_log = scene.store.log
    ref = view_log.live()
    with pytest.raises(SnapshotError, match=r"no snapshot 1 .*it has: 2, 3"):
        rollback(scene.project(), VIEW, Silent(), to=1)
    assert (view_log.live(), view_log.bad()) == (ref, {})
    assert read_snapshot(scene, 3)
    assert act(scene, "rollback") == "published"
    ref = view_log.live()
    assert ref is not None
    with pytest.raises(PrecomputeError, match="snapshot 3 is marked bad"):
        act(scene, "rollback", to=3)
    assert (view_log.live(), list(view_log.bad()), ref.held is not None) == (ref, [3], True)


def test_a_rollback_from_a_full_recomputation_of_the_same_rows(scene: FaultScene) -> None:
    recover(scene)
    recover(scene, full=True)
    assert act(scene, "rollback", to=1) == "published"
    ref = scene.store.log.live()
    assert ref is not None
    assert ref.snapshot == 1


def test_a_number_is_never_given_twice(scene: FaultScene) -> None:
    """Not even after the newest snapshots were rolled back from and collected."""
    scene.settings = {"retention": {"keep": 3, "grace": "1h"}}
    scene.write()
    recover(scene)
    for change in ([1], [2]):
        scene.write(changed(scene.rows, change))
        recover(scene, full=True)
    act(scene, "rollback")
    act(scene, "rollback")
    act(scene, "gc")
    scene.write(changed(scene.rows, [3]))
    assert recover(scene).snapshot == 4
    check_everything(scene)
