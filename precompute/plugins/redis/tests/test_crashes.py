"""Every way to fail over Redis, as over table files: crash points, processes that others overtook,
a server that lost everything."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from precompute.plugins.redis.servers import Pipe
from precompute.plugins.redis.tests.rig import RIG
from tests.faults.conftest import MakeScene, memory_folder, put_on_stage, two_published
from tests.faults.harness import (
    Child,
    FaultScene,
    changed,
    check_everything,
    check_readers,
    recover,
)
from tests.faults.test_crash_points import (
    AHEAD,
    FLIPPED,
    TO_COMPUTE,
    check_error,
    check_reports,
    inject,
)
from tests.faults.test_writers import overtaken

__all__ = ["memory_folder"]


@pytest.fixture(scope="session")
def prepared_redis(memory_folder: Path, redis_server: str) -> tuple[FaultScene, dict[bytes, bytes]]:
    """As :func:`prepared` on Redis, and what Redis held then."""
    RIG.restore(redis_server, None)
    scene = two_published(FaultScene(memory_folder / "stage-redis", online=redis_server))
    scene.folder.rename(memory_folder / "prepared-redis")
    return scene, RIG.contents(redis_server)


@pytest.fixture
def delta_to_come_redis(
    prepared_redis: tuple[FaultScene, dict[bytes, bytes]], redis_url: str
) -> MakeScene:
    """Makes a copy of :func:`prepared_redis` in place of the one before, the server's content with
    it."""

    def make() -> FaultScene:
        scene, keys = prepared_redis
        RIG.restore(redis_url, keys)
        return put_on_stage(scene, "prepared-redis")

    return make


REDIS_POINTS = ("online.load", "online.verify", "log.link", "online.flip", "gc")


@pytest.mark.parametrize(
    ("point", "mode"),
    [
        *((point, "kill") for point in REDIS_POINTS),
        # what a process undoes in Redis that lives on
        *((point, "raise") for point in ("online.load", "online.flip")),
    ],
)
def test_a_run_that_fails_anywhere_with_redis(
    point: str, mode: str, delta_to_come_redis: MakeScene
) -> None:
    scene = delta_to_come_redis()
    old, new = scene.history[-2], scene.history[-1]
    ended = inject(scene, point, 1, mode)
    check_error(ended, point, mode)
    assert check_readers(scene) == (new if point in FLIPPED else old)
    recover(scene)
    check_reports(scene, ended)
    assert TO_COMPUTE <= scene.computed() <= TO_COMPUTE + AHEAD
    check_everything(scene)


def test_nothing_is_left_in_redis_by_a_load_that_was_killed(delta_to_come_redis: MakeScene) -> None:
    scene = delta_to_come_redis()
    assert Child(scene, before=kill_in_redis_load).ended().signal == 9
    assert check_readers(scene) == scene.history[-2]
    recover(scene)
    check_everything(scene)


def kill_in_redis_load() -> None:
    send = Pipe.send

    def killed(self, block, number):  # type: ignore[no-untyped-def]
        send(self, block, number)
        self.settle()
        os.kill(os.getpid(), signal.SIGKILL)

    Pipe.send = killed  # type: ignore[method-assign]


@pytest.mark.parametrize("point", ["online.load", "online.flip"])
def test_a_zombie_changes_nothing_that_is_live_in_redis(
    point: str, delta_to_come_redis: MakeScene
) -> None:
    zombie, scene = overtaken(delta_to_come_redis(), point)
    newest = scene.history[-1]
    zombie.go_on()
    assert check_readers(scene) == newest
    recover(scene)
    check_everything(scene)


def stop_in_redis_load() -> None:
    send = Pipe.send

    def stopped(self, block, number):  # type: ignore[no-untyped-def]
        Pipe.send = send  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGSTOP)
        return send(self, block, number)

    Pipe.send = stopped  # type: ignore[method-assign]


def test_late_writes_of_a_zombie_go_into_a_generation_of_its_own(
    delta_to_come_redis: MakeScene,
) -> None:
    scene = delta_to_come_redis()
    zombie = Child(scene, before=stop_in_redis_load)
    zombie.stopped()
    scene.forget_lease()
    scene.write(changed(scene.rows, [1, 2, 3]))
    recover(scene)
    ended = zombie.go_on()
    assert ended.error is not None
    # it may have joined the load of the same segment, which is whole then
    assert ended.error.startswith(("ConflictError: ", "FencedError: "))
    assert check_readers(scene) == scene.history[-1]
    scene.write(changed(scene.rows, [4]))
    recover(scene)
    check_everything(scene)


def test_a_redis_that_lost_everything_is_loaded_again(delta_to_come_redis: MakeScene) -> None:
    scene = delta_to_come_redis()
    scene.write(scene.history[-2][0])
    scene.history.pop()
    RIG.restore(scene.online, None)
    assert recover(scene).status == "published"
    assert check_readers(scene) == scene.history[-1]
    check_everything(scene)
