"""Full disks, models that fail in every way, and inputs that change under the run."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from precompute.engine.runner import AHEAD_WINDOWS
from precompute.jobs.cli import main
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.rollback import rollback
from precompute.sources.source import Source
from precompute.store.disk import durable_file
from precompute.store.errors import ConflictError, PrecomputeError
from tests.faults.conftest import ROWS, MakeScene
from tests.faults.harness import (
    VIEW,
    Child,
    Ended,
    FaultScene,
    changed,
    check_everything,
    check_readers,
    check_snapshots,
    recover,
    small_chunks,
)

# ---- no space


def limit_file_size(size_bytes: int) -> None:
    """Files of this process cannot grow beyond; Python ignores the signal, so that a write fails
    with EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


@pytest.mark.parametrize("size_bytes", [0, 2500, 20_000])
def test_a_run_whose_files_cannot_grow(size_bytes: int, delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    ended = Child(scene, before=partial(limit_file_size, size_bytes)).ended()
    check_out_of_space(scene, ended)
    recover(scene)
    check_everything(scene)


def check_out_of_space(scene: FaultScene, ended: Ended) -> None:
    """It said so, in our words, and changed nothing that is live; or it needed no more than there
    was."""
    old, new = scene.history[-2:]
    if ended.error is None:
        assert ended == Ended("published")
        assert check_readers(scene) == new
        return
    assert ended.error.startswith(("SnapshotError: ", "OnlineStoreError: ", "VectorIndexError: "))
    assert "no space left" in ended.error.lower()
    assert check_readers(scene) == old
    check_snapshots(scene)
    left = [path for path in (scene.folder / "var").rglob("*.tmp") if path.is_file()]
    assert left == [], "what could not be written whole was removed"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(
            f"cannot mount a small tmpfs: {mounted.stderr.decode().strip()}; the limit on file sizes is tested all the same"
        )
    try:
        yield folder
    finally:
        gc.collect()  # closes what LMDB had mapped
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_run_on_a_full_disk(small_disk: Path) -> None:
    scene = FaultScene(small_disk / "project").write(ROWS)
    recover(scene)
    statuses = []
    for left_bytes in (0, 60_000, 400_000):
        scene.write(changed(scene.rows, range(0, 200, 7)))
        filler = small_disk / "filler"
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        with filler.open("wb") as file:
            file.write(b"\0" * max(0, free - left_bytes))
        ended = Child(scene).ended()
        statuses.append(ended.status)
        check_out_of_space(scene, ended)
        filler.unlink()
        recover(scene)
        check_everything(scene)
    assert statuses[0] is None
    assert statuses[-1] == "published"


# ---- models


@pytest.mark.parametrize(("how", "at"), [("raise_at", 1), ("memory_at", 2), ("nan_at", 3)])
def test_a_model_that_fails_once(how: str, at: int, delta_to_come: MakeScene) -> None:
    """A batch it raises on is halved and tried again; a row it makes NaN of is refused, and one is
    more than this view allows."""
    scene = delta_to_come()
    fails: dict[str, Any] = {how: at}
    scene.write(**fails)
    ended = Child(scene).ended()
    if how == "nan_at":
        assert ended.error is not None
        assert ended.error.startswith("RejectedError: ")
        assert "is not finite" in ended.error
        assert check_readers(scene) == scene.history[-2]
        scene.write()
        with small_chunks():
            assert scene.run(retry_rejected=True).status == "published"
    else:
        assert ended == Ended("published")
    assert check_readers(scene) == scene.history[-1]
    check_everything(scene)


def test_a_model_that_kills_its_process(delta_to_come: MakeScene) -> None:
    at = 2
    scene = delta_to_come()
    scene.write(kill_at=at)
    assert Child(scene).ended() == Ended(signal=9)
    assert check_readers(scene) == scene.history[-2]
    assert scene.computed() == 8 * at
    scene.write()
    assert 8 * (at - 1 - AHEAD_WINDOWS) <= recover(scene).resumed <= 8 * (at - 1)
    check_everything(scene)


def test_a_model_that_hangs_is_ended_at_the_deadline(delta_to_come: MakeScene) -> None:
    """It takes no SIGTERM: the kernel ends the process all the same."""
    scene = delta_to_come()
    scene.write(hang_at=2)
    ended = Child(scene, deadline_s=1.0).ended()
    assert ended == Ended(signal=14)
    assert check_readers(scene) == scene.history[-2]
    scene.write()
    assert recover(scene).resumed <= 8
    assert [report.status for report in scene.store.runs.reports()[:2]] == ["published", "killed"]
    check_everything(scene)


def test_a_deadline_that_is_met_ends_nothing(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    assert Child(scene, deadline_s=60.0).ended() == Ended("published")
    check_everything(scene)


def limit_memory() -> None:
    """What this process may map beyond what it has: too little for a run."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 24 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def test_a_run_without_memory(delta_to_come: MakeScene) -> None:
    """However it ends, it ends, and the next one gets through."""
    scene = delta_to_come()
    with contextlib.suppress(AssertionError):  # a library may end the process in its own way
        Child(scene, before=limit_memory).ended()
    assert check_readers(scene) in scene.history[-2:]
    recover(scene)
    check_everything(scene)


# ---- the input


@pytest.mark.parametrize(("point", "what"), [("part.write", "replaced"), ("verify", "truncated")])
def test_an_input_that_changes_during_the_run(
    point: str, what: str, delta_to_come: MakeScene
) -> None:
    """The snapshot is of the input as it was read; the next run is a delta to what it is then."""
    scene = delta_to_come()
    child = Child(scene, crash=(point, 1, "stop"))
    child.stopped()
    as_read = scene.history[-1]
    later = changed(scene.rows, change=[1, 2], new=[400], gone=[3])
    if what == "replaced":
        scene.write(later)
    else:
        os.truncate(scene.folder / "data.parquet", 100)
    assert child.go_on() == Ended("published")
    assert check_readers(scene) == as_read
    if what != "replaced":
        with (
            small_chunks(),
            pytest.raises(
                PrecomputeError,
                match=r"there is no file|the source (cannot be read|has unreadable data)",
            ),
        ):
            scene.run()
        assert check_readers(scene) == as_read
        scene.write(later)
    scene.computed()
    report = recover(scene)
    assert (scene.computed(), report.counts["removed"]) == (3, 1)
    check_everything(scene)


def test_an_input_swapped_between_checking_and_reading(
    delta_to_come: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the columns were looked at, before the rows are read: the rows are those of one file or
    the other."""
    scene = delta_to_come()
    rows = changed(scene.rows, change=[1, 2])
    load = Source.load

    def swapped(self: Source, within: str | None = None) -> int:
        scene.write(rows)
        return load(self, within)

    monkeypatch.setattr(Source, "load", swapped)
    with small_chunks():
        scene.run()
    monkeypatch.undo()
    assert check_readers(scene) == scene.history[-1]
    check_everything(scene)


# ---- clocks


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps(
    jump_s: float, delta_to_come: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run under one clock, the next under another: order is by number, and no age is negative."""
    real, real_ns = time.time, time.time_ns
    scene = delta_to_come()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + jump_s)
        patch.setattr(time, "time_ns", lambda: real_ns() + int(jump_s * 1e9))
        recover(scene)
        assert check_readers(scene) == scene.history[-1]
    scene.write(changed(scene.rows, [1, 2, 3]))
    recover(scene)
    assert check_readers(scene) == scene.history[-1]
    check_everything(scene)


def test_a_lease_is_kept_whatever_the_clock_of_another_says(
    delta_to_come: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour ahead it makes no living run look dead: no second one begins beside it."""
    scene = delta_to_come()
    first = Child(scene, crash=("verify", 1, "stop"))
    first.stopped()
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 3600)
        with pytest.raises(ConflictError, match="going on"):
            scene.run()
    assert first.go_on().error is None
    assert check_readers(scene) == scene.history[-1]
    check_everything(scene)


# ---- freeing space, and going back, without space


@pytest.fixture(params=["played", "real"])
def full(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[FaultScene], contextlib.AbstractContextManager[None]]:
    """Makes the disk of a scene full, but for what its reserve takes: of a file system of 8 MB
    really; or as if, where none can be mounted: then no byte can be written while the reserve is
    there."""

    @contextlib.contextmanager
    def really(scene: FaultScene) -> Iterator[None]:
        filler = scene.folder.parent / "filler"
        with filler.open("wb", buffering=0) as file:
            for size in (65536, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"\0" * size)
        yield
        filler.unlink()

    @contextlib.contextmanager
    def played(scene: FaultScene) -> Iterator[None]:
        write, taken = durable_file._write, scene.folder / "var" / ".reserve"

        def refusing(path: Path, data: bytes) -> None:
            if taken.exists():
                path.touch()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, data)

        with monkeypatch.context() as patch:
            patch.setattr(durable_file, "_write", refusing)
            patch.setattr(
                durable_file, "keep_reserve", lambda _: None
            )  # the disk is as full as before
            yield

    return played if request.param == "played" else really


@pytest.fixture
def scene_on_disk(request: pytest.FixtureRequest, tmp_path: Path) -> FaultScene:
    """Three full snapshots, the last two published, on a disk of its own where the test asks for a
    real one."""
    real = request.node.callspec.params["full"] == "real"
    folder = request.getfixturevalue("small_disk") if real else tmp_path
    scene = FaultScene(folder / "project")
    for step in range(3):
        scene.write({key: key * 10 + step for key in range(200)})
        scene.run(full=True)
    scene.settings = {"retention": {"keep": 1, "grace": "0s"}}
    scene.write_configuration()
    return scene


def test_a_full_disk_can_be_gone_back_from(
    scene_on_disk: FaultScene, full: Callable[[FaultScene], contextlib.AbstractContextManager[None]]
) -> None:
    scene = scene_on_disk
    assert (scene.folder / "var" / ".reserve" / "noise").stat().st_size == durable_file.SIZE_BYTES
    with full(scene):
        with small_chunks(), pytest.raises(PrecomputeError, match="no space left"):
            scene.run()  # nothing else may take the reserve
        assert rollback(scene.project(), VIEW, Silent()).status == "published"
        assert check_readers(scene) == scene.history[-2]
        assert not (scene.folder / "var" / ".reserve").exists()
    scene.write(changed(scene.rows, [1, 2, 3]))
    recover(scene)
    assert (scene.folder / "var" / ".reserve" / "noise").stat().st_size == durable_file.SIZE_BYTES
    check_everything(scene)


@pytest.mark.parametrize("left", [0, 7])
@pytest.mark.parametrize("full", ["real"], indirect=True)
def test_a_disk_without_inodes_can_be_gone_back_from_and_freed(
    scene_on_disk: FaultScene,
    full: object,
    left: int,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """However few are left: room for bytes is no room for names."""
    scene = scene_on_disk
    subprocess.run(
        ["mount", "-o", f"remount,nr_inodes={inodes(small_disk) + left}", str(small_disk)],
        check=True,
    )
    if not left:
        with small_chunks(), pytest.raises(PrecomputeError, match="no space left"):
            scene.run(full=True)
    assert main(["-c", str(scene.folder), "gc"]) == 0, capsys.readouterr().err
    assert rollback(scene.project(), VIEW, Silent()).status == "published"
    assert check_readers(scene) == scene.history[-2]


def inodes(folder: Path) -> int:
    """In use on its file system."""
    stat = os.statvfs(folder)
    return stat.f_files - stat.f_ffree


@pytest.mark.parametrize("full", ["real"], indirect=True)
def test_a_full_disk_can_be_freed(
    scene_on_disk: FaultScene,
    full: Callable[[FaultScene], contextlib.AbstractContextManager[None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    scene = scene_on_disk
    old = scene.view_folder / "data" / "20000101T000000.000000Z-abcdef" / "part-00000.parquet"
    old.parent.mkdir()
    old.write_bytes(b"\0" * 100_000)
    with full(scene):
        assert main(["-c", str(scene.folder), "gc"]) == 0, capsys.readouterr().err
        assert not old.exists()
    assert check_readers(scene) == scene.history[-1]
    recover(scene)
    check_everything(scene)


@pytest.mark.parametrize("full", ["played"], indirect=True)
def test_a_view_can_be_dropped_on_a_full_disk(
    scene_on_disk: FaultScene,
    full: Callable[[FaultScene], contextlib.AbstractContextManager[None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    scene = scene_on_disk
    with full(scene):
        assert main(["-c", str(scene.folder), "drop", VIEW, "--yes"]) == 0, capsys.readouterr().err
        assert scene.store.log.live() is None
    recover(scene)
    assert check_readers(scene) == scene.history[-1]
    check_everything(scene)
