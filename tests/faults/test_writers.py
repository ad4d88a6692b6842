"""Several writers: races, processes stopped past their lease and continued, rollbacks during a
publishing."""

from __future__ import annotations

import pytest

from precompute.store.errors import ConflictError
from tests.faults.conftest import MakeScene
from tests.faults.harness import (
    Child,
    FaultScene,
    act,
    changed,
    check_everything,
    check_readers,
    check_snapshots,
    recover,
    small_chunks,
)


def overtaken(scene: FaultScene, point: str) -> tuple[Child, FaultScene]:
    """A run stopped at ``point`` until its leases ran out, and another run, over a source that has
    changed meanwhile, published."""
    zombie = Child(scene, crash=(point, 1, "stop"))
    try:
        zombie.stopped()
        scene.forget_lease()
        scene.write(changed(scene.rows, [1, 2, 3]))
        recover(scene)
        check_readers(scene)
    except BaseException:
        zombie.kill()
        raise
    return zombie, scene


BEFORE_COMMIT = ("part.write", "manifest.write")
COMMITTED = ("manifest.link", "online.load", "index.build")
DONE = ("online.flip", "gc")
REFUSED = ("FencedError: ", "ConflictError: ", "SnapshotError: ", "OnlineStoreError: ")
"""A zombie learns that it lost its lease, or finds first that what it was working on was
removed."""


@pytest.mark.parametrize("point", [*BEFORE_COMMIT, *COMMITTED, *DONE])
def test_a_zombie_changes_nothing_that_is_live(point: str, delta_to_come: MakeScene) -> None:
    zombie, scene = overtaken(delta_to_come(), point)
    newest = scene.history[-1]
    assert check_readers(scene) == newest
    ref = scene.store.log.live()
    ended = zombie.go_on()
    assert scene.store.log.live() == ref
    assert check_readers(scene) == newest
    check_snapshots(scene)
    if point not in DONE:
        assert ended.error is not None
        assert ended.error.startswith(REFUSED)
    recover(scene)
    check_everything(scene)


def test_a_zombie_drops_nothing_that_another_one_is_loading(delta_to_come: MakeScene) -> None:
    """It was stopped after its own flip, before it dropped old segments; the other one's is
    loaded and not live yet."""
    zombie, scene = overtaken(delta_to_come(), "online.flip")
    scene.write(changed(scene.rows, [4, 5]))
    other = Child(scene, crash=("index.build", 1, "stop"))
    other.stopped()
    zombie.go_on()
    assert check_readers(scene) == scene.history[-2]
    ended = other.go_on()
    assert ended.error is None
    assert check_readers(scene) == scene.history[-1]
    check_everything(scene)


def test_a_zombie_drops_nothing_that_is_loading_after_a_rollback(delta_to_come: MakeScene) -> None:
    """What is live then is the segment before the zombie's own, which it keeps: nothing stops it
    but its lease."""
    scene = delta_to_come()
    zombie = Child(scene, crash=("online.flip", 1, "stop"))
    zombie.stopped()
    scene.forget_lease()
    assert act(scene, "rollback", hold=False) == "published"
    scene.write(changed(scene.rows, [4, 5]))
    other = Child(scene, crash=("index.build", 1, "stop"), before=scene.forget_lease)
    other.stopped()
    zombie.go_on()
    assert other.go_on().error is None
    assert check_readers(scene) == scene.history[-1]
    check_everything(scene)


def test_a_zombie_collects_nothing_that_was_taken_over_meanwhile(delta_to_come: MakeScene) -> None:
    """Chunks of a killed run, garbage when the collection began and part of what is live when it
    goes on."""
    scene = delta_to_come()
    assert Child(scene, crash=("journal.append", 2, "kill")).ended().signal == 9
    zombie = Child(scene, "publish", crash=("gc", 1, "stop"))
    zombie.stopped()
    scene.forget_lease()
    recover(scene)
    assert scene.store.runs.reports()[0].resumed == 16
    zombie.go_on()
    assert check_readers(scene) == scene.history[-1]
    check_everything(scene)


# ---- races


def test_a_second_run_is_refused_while_the_first_goes_on(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    first = Child(scene, crash=("part.write", 2, "stop"))
    first.stopped()
    with pytest.raises(
        ConflictError, match=rf"another run of view 'numbers' is going on.*process {first.pid}\)"
    ):
        scene.run()
    assert first.go_on().status == "published"
    check_everything(scene)


def test_runs_that_start_at_once_do_the_work_once(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    children = [Child(scene) for _ in range(4)]
    ended = [child.ended() for child in children]
    done = [end.status for end in ended if end.status]
    assert done.count("published") == 1
    assert set(done) <= {"published", "current"}
    assert all(end.error.startswith("ConflictError: ") for end in ended if end.error)
    assert all(end.status or end.error for end in ended)
    assert scene.computed() == 24
    check_everything(scene)


# ---- rollback during a publishing


@pytest.mark.parametrize(
    ("point", "nth"), [("online.load", 1), ("index.build", 1), ("log.write", 1)]
)
def test_a_rollback_wins_over_a_publishing(point: str, nth: int, delta_to_come: MakeScene) -> None:
    """One that is stopped while it writes its event, too: it holds no lock."""
    scene = delta_to_come()
    publisher = Child(scene, crash=(point, nth, "stop"))
    publisher.stopped()
    assert act(scene, "rollback") == "published"
    first = scene.history[0]
    assert check_readers(scene) == first
    ended = publisher.go_on()
    assert ended.error is not None
    assert ended.error.startswith(REFUSED)
    assert check_readers(scene) == first
    ref = scene.store.log.live()
    assert ref is not None
    assert (ref.snapshot, list(scene.store.log.bad())) == (1, [2])
    recover(scene)
    check_everything(scene)


def test_a_run_that_computes_while_somebody_rolls_back_waits(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    computing = Child(scene, crash=("journal.append", 1, "stop"))
    computing.stopped()
    assert act(scene, "rollback") == "published"
    assert computing.go_on().status == "committed"
    assert check_readers(scene) == scene.history[0]
    report = next(one for one in scene.store.runs.reports() if one.command == "run")
    # it had begun on what was left
    assert report.attention == [
        "snapshot 3 builds on snapshot 2, which was marked bad meanwhile (rolled back from): the"
        " next run builds on another one"
    ]
    assert "; nothing newer waits; " in str(report.held)
    assert (recover(scene).snapshot, [*scene.store.log.bad()]) == (4, [2])
    check_everything(scene)


def test_a_held_view_is_published_by_no_run(delta_to_come: MakeScene) -> None:
    scene = delta_to_come()
    assert act(scene, "rollback") == "published"
    with small_chunks():
        assert scene.run().status == "committed"
    assert check_readers(scene) == scene.history[0]
    recover(scene)
    check_everything(scene)
