"""Power lost at any moment: what was promised is on the disk, and what is on the disk is whole. And
no sync is there without a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from precompute.store.errors import PrecomputeError
from precompute.store.offline import log
from precompute.store.offline.standing import Standing
from precompute.store.online.url import open_online_store
from tests.faults.conftest import MakeScene
from tests.faults.harness import (
    VIEW,
    WINDOW_ROWS,
    FaultScene,
    State,
    act,
    check_everything,
    check_readers,
    check_snapshots,
    read_snapshot,
    recover,
    small_chunks,
    state_of,
)
from tests.faults.power_loss import DISKS, Image, recorded, sites

ROWS = {key: key * 10 for key in range(20)}


@pytest.fixture
def first(folder: Path) -> FaultScene:
    """A small project that was never run: its root is not there."""
    return FaultScene(folder / "project").write(ROWS)


def images_of(
    scene: FaultScene, what: str = "run", forgets: Callable[[], bool] = lambda: False
) -> list[Image]:
    """What the disks may hold at the moments of doing it once, which succeeds."""
    with small_chunks(), recorded(scene.folder / "var", forgets) as images:
        assert act(scene, what) in ("published", "dropped")
    return images


def check(scene: FaultScene, image: Image, what: str = "run") -> FaultScene:
    """Put the image in place and look at it as a reader does, before anything recovers it."""
    image.restore(scene.folder / "var")
    scene = scene.copied(scene.folder)
    check_snapshots(scene)
    if what in ("drop", "remove"):
        check_dropped(scene, image, what)
        return scene
    running = [report for report in scene.store.runs.reports() if report.status == "running"]
    assert scene.store.runs.unended() == running, "whoever closes dead runs' reports finds them"
    check_live(scene, image, what)
    if what == "run":
        check_committed(scene, image)
    else:
        # marked with the very move, and not before
        ref = scene.store.log.live()
        assert ref is not None
        assert list(scene.store.log.bad()) == ([] if ref.snapshot == 3 else [3])
    return scene


def check_live(scene: FaultScene, image: Image, what: str) -> None:
    """The old or the new is served, whole; the new one once its pointer was reported as moved."""
    old, new = ([None, *scene.history] if len(scene.history) == 1 else scene.history)[-2:]
    if what == "rollback":
        old, new = new, old
    ref, entries = scene.store.log.live(), scene.store.log.publishings()
    assert entries == sorted(entries, key=lambda entry: entry.epoch)
    assert entries[-1:] == ([] if ref is None else [ref.publishing()])
    assert not any(entry.unknown for entry in entries), "no event is lost"
    if "online.flip" in image.passed:
        assert served(scene) == new
    elif "log.link" in image.passed:
        assert served(scene) in (old, new)
    else:
        assert served(scene) == old


def served(scene: FaultScene) -> State | None:
    online = open_online_store(scene.project().online)
    try:
        return None if online.live(VIEW) is None else check_readers(scene)
    finally:
        online.close()


def check_dropped(scene: FaultScene, image: Image, what: str) -> None:
    """Served whole, or not any more; gone at the end, with its snapshots if they were to be
    removed."""
    if image.done:
        assert (served(scene), scene.store.log.live()) == (None, None)
        assert [entry.snapshot for entry in scene.store.log.publishings()] == (
            [] if what == "remove" else [1, None]
        )
        assert scene.store.offline.views() == ([] if what == "remove" else [VIEW])
    else:
        assert served(scene) in (scene.history[-1], None)


def check_committed(scene: FaultScene, image: Image) -> None:
    """What was committed stays; until then, every chunk that was noted is there to be taken
    over."""
    if "manifest.dirsync" in image.passed:
        newest = Standing(scene.store).newest()
        assert newest is not None
        assert state_of(scene, read_snapshot(scene, newest.number), "newest") == scene.history[-1]
    elif "manifest.link" not in image.passed:
        noted = [
            scene.view_folder / json.loads(line)["part"]["path"]
            for path in (scene.view_folder / "data").glob("*/journal.jsonl")
            for line in path.read_bytes().splitlines()[1:]
            if line.startswith(b"{")
        ]
        found = sum(path.is_file() and path.read_bytes().startswith(b"PAR1") for path in noted)
        assert found >= image.chunks, f"{image.chunks} chunks were noted, {found} are there"


def test_what_is_live_and_what_was_committed_outlasts_a_loss_of_power(
    delta_to_come: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state that is written down beside the log, too: with each event there is another."""
    monkeypatch.setattr(log, "STATE_EVERY", 1)
    scene = delta_to_come()
    images = images_of(scene)
    assert {image.disk for image in images} == set(DISKS)
    assert len(images) > 60
    for image in images:
        check(scene, image)


def test_a_first_run_outlasts_a_loss_of_power_with_every_folder_it_made(first: FaultScene) -> None:
    images = images_of(first)
    assert images[0].tree == {}
    for image in images:
        check(first, image)


def test_a_rollback_outlasts_a_loss_of_power(third_is_live: MakeScene) -> None:
    scene = third_is_live()
    for image in images_of(scene, "rollback"):
        check(scene, image, "rollback")


@pytest.mark.parametrize("what", ["drop", "remove"])
def test_a_drop_outlasts_a_loss_of_power(what: str, first: FaultScene) -> None:
    first.run()
    for image in images_of(first, what):
        check(first, image, what)


def test_a_run_after_a_loss_of_power_mends_everything(delta_to_come: MakeScene) -> None:
    """And computes no row again whose chunk was noted."""
    scene = delta_to_come()
    to_compute = 24
    images = images_of(scene)
    assert max(image.chunks for image in images) == to_compute // WINDOW_ROWS
    for image in (
        image for disk in DISKS for image in [image for image in images if image.disk == disk][::18]
    ):
        after = check(scene, image)
        after.computed()
        recover(after)
        assert after.computed() <= to_compute - WINDOW_ROWS * image.chunks
        check_everything(after)


def test_a_disk_that_syncs_nothing_is_found_out(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    assert fails(scene, images_of(scene, forgets=lambda: True))


@pytest.mark.parametrize("name", sites())
def test_every_sync_is_needed(name: str, delta_to_come: MakeScene, first: FaultScene) -> None:
    """A disk that does nothing at this one call loses something that was promised."""
    forgotten = sites()[name].is_on_the_stack
    if not loses(first, forgotten):
        assert loses(delta_to_come(), forgotten) or any(
            loses_when_dropped(first, what, forgotten) for what in ("drop", "remove")
        )


def loses_when_dropped(scene: FaultScene, what: str, forgets: Callable[[], bool]) -> bool:
    recover(scene)
    return loses(scene, forgets, what)


def loses(scene: FaultScene, forgets: Callable[[], bool], what: str = "run") -> bool:
    """Whether a disk that forgets these syncs breaks a promise; none that was never asked to forget
    one: it is the disk of the tests above."""
    forgotten = set[bool]()

    def forgetting() -> bool:
        forgotten.add(now := forgets())
        return now

    images = images_of(scene, what, forgetting)
    return True in forgotten and fails(scene, images, what)


def fails(scene: FaultScene, images: list[Image], what: str = "run") -> bool:
    """Whether an image does not hold what was promised; the latest are looked at first, since most
    is promised then."""
    for image in reversed(images):
        try:
            check(scene, image, what)
        except (AssertionError, PrecomputeError, OSError, ValueError):
            return True
    return False
