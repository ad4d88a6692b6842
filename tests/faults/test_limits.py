"""Full disks, models that fail in every way, and inputs that change under the run."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from precompute.runner import AHEAD_WINDOWS
from precompute.source import Source
from store.errors import PrecomputeError
from tests.faults.conftest import ROWS, MakeScene
from tests.faults.harness import (
    VIEW,
    Child,
    Ended,
    Scene,
    changed,
    check_everything,
    check_readers,
    check_snapshots,
    recover,
    small_chunks,
)

# ---- no space


def limit_file_size(size_bytes: int) -> None:
    """Files of this process cannot grow beyond; Python ignores the signal, so that a write fails with EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


@pytest.mark.parametrize("size_bytes", [0, 100, 700, 1500, 2500, 4000, 6000, 10_000, 20_000, 40_000])
def test_a_run_whose_files_cannot_grow(size_bytes: int, delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    ended = Child(scene, before=partial(limit_file_size, size_bytes)).ended()
    check_out_of_space(scene, ended)
    recover(scene)
    check_everything(scene)


def check_out_of_space(scene: Scene, ended: Ended) -> None:
    """It said so, in our words, and changed nothing that is live; or it needed no more than there was."""
    old, new = scene.history[-2:]
    if ended.error is None:
        assert ended == Ended("published")
        assert check_readers(scene) == new
        return
    assert ended.error.startswith(("SnapshotError: ", "OnlineStoreError: ", "VectorIndexError: "))
    # LMDB tells a write that was cut short as an input/output error
    assert "no space left" in ended.error.lower() or "mdb_txn_commit: Input/output error" in ended.error
    assert check_readers(scene) == old
    check_snapshots(scene)
    left = [path for path in (scene.folder / "var").rglob("*.tmp") if path.is_file()]
    assert left == [], "what could not be written whole was removed"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False)
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
    scene = Scene(small_disk / "project").write(ROWS)
    recover(scene)
    statuses = []
    for left_bytes in (0, 8192, 40_000, 60_000, 90_000, 150_000, 400_000):
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


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("how", ["raise_at", "memory_at", "nan_at"])
def test_a_model_that_fails_once(how: str, at: int, delta_to_come: MakeScene) -> None:
    """A batch it raises on is halved and tried again; a row it makes NaN of is refused, and one is more than this view allows."""
    scene = delta_to_come()
    scene.write(**{how: at})
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


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_model_that_kills_its_process(at: int, delta_to_come: MakeScene) -> None:
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
    assert [report["status"] for report in scene.store.reports(VIEW)[:2]] == ["published", "killed"]
    check_everything(scene)


def test_a_deadline_that_is_kept_ends_nothing(delta_to_come: MakeScene) -> None:
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


@pytest.mark.parametrize("what", ["replaced", "deleted", "truncated"])
@pytest.mark.parametrize("point", ["part.write", "verify", "online.load"])
def test_an_input_that_changes_during_the_run(point: str, what: str, delta_to_come: MakeScene) -> None:
    """The snapshot is of the input as it was read; the next run is a delta to what it is then."""
    scene = delta_to_come()
    child = Child(scene, crash=(point, 1, "stop"))
    child.stopped()
    as_read = scene.history[-1]
    later = changed(scene.rows, change=[1, 2], new=[400], gone=[3])
    if what == "replaced":
        scene.write(later)
    elif what == "deleted":
        (scene.folder / "data.parquet").unlink()
    else:
        os.truncate(scene.folder / "data.parquet", 100)
    assert child.go_on() == Ended("published")
    assert check_readers(scene) == as_read
    if what != "replaced":
        with small_chunks(), pytest.raises(PrecomputeError, match=r"the source (cannot be read|has unreadable data)"):
            scene.run()
        assert check_readers(scene) == as_read
        scene.write(later)
    scene.computed()
    report = recover(scene)
    assert (scene.computed(), report.counts["removed"]) == (3, 1)
    check_everything(scene)


def test_an_input_swapped_between_checking_and_reading(delta_to_come: MakeScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the columns were looked at, before the rows are read: the rows are those of one file or the other."""
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
def test_a_clock_that_jumps(jump_s: float, delta_to_come: MakeScene, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_lease_whose_clock_jumps_is_lost_and_not_shared(delta_to_come: MakeScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock an hour ahead makes a living run look dead: a second one may begin, and only one of them is heard."""
    scene = delta_to_come()
    first = Child(scene, crash=("verify", 1, "stop"))
    first.stopped()
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 3600)
        recover(scene)
    ended = first.go_on()
    assert ended.error is not None
    assert check_readers(scene) == scene.history[-1]
    check_everything(scene)
