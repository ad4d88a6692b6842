"""The warmer's thread outlives whatever it finds: one view's trouble is no other's, and models are
wanted while nobody can tell what is live."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.serve.lookup_worker import Warmer
from precompute.store.answers.lookup import Lookup
from precompute.store.disk.record import replace
from precompute.store.offline.view_store import OfflineStore
from precompute.store.online.online_store import Pointer
from precompute.store.online.table_store import TableStore
from tests.server import eventually
from tests.store.test_lookup import House, Row


class Models:
    """Notes what it is to open."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, int]] = []
        self.failing = ""

    def begin_warm(self, pointer: Pointer, deadline: float) -> Future[Any]:
        self.opened.append((pointer.view.name, pointer.epoch))
        if pointer.view.name == self.failing:
            raise OSError("no file can be opened any more")
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    def ready(self, pointer: Pointer) -> bool:
        return (pointer.view.name, pointer.epoch) in self.opened


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    for setting in ("WARM_EVERY_S", "AGAIN_S"):
        monkeypatch.setattr(f"precompute.jobs.serve.lookup_worker.{setting}", 0.01)
    return House(TableStore(tmp_path / "online"), tmp_path / "root", changes={"fallback": True})


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture
def wanted() -> list[set[str]]:
    return []


@pytest.fixture
def warmer(house: House, models: Models, wanted: list[set[str]]) -> Iterator[Warmer]:
    for name in ("left", "right"):
        pointer = house.publish({"a": Row(1.0)}, name=name)
        house.online.flip(replace(pointer, model=f"model of {name}", epoch=2))
    warmer = Warmer(Lookup(house.online), models, wanted.append, OfflineStore(house.root))
    yield warmer
    warmer.stop()


BOTH = {"model of left", "model of right"}


def test_an_unreadable_view_keeps_no_other_from_being_opened(
    warmer: Warmer, house: House, models: Models, wanted: list[set[str]], tmp_path: Path
) -> None:
    eventually(lambda: {("left", 2), ("right", 2)} <= set(models.opened))
    (tmp_path / "online" / "left" / "live.json").write_text("{")
    snapshots = tmp_path / "root" / "right" / "manifests"
    snapshots.mkdir(parents=True)
    (snapshots / f"{2:020d}.json").write_text("{")
    wanted.clear()
    pointer = house.online.live("right")
    assert pointer is not None
    house.online.flip(replace(pointer, epoch=3))
    eventually(lambda: ("right", 3) in models.opened)
    eventually(lambda: len(wanted) > 2)
    assert all(models == BOTH for models in wanted)


def test_indexes_are_opened_before_they_are_searched(
    house: House, models: Models, wanted: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pointer, opened = house.publish({"a": Row(1.0)}, name="left"), list[Pointer]()
    monkeypatch.setattr(Lookup, "warm", lambda _, pointer: opened.append(pointer))
    warmer = Warmer(Lookup(house.online), models, wanted.append, OfflineStore(house.root))
    try:
        eventually(lambda: pointer in opened)
    finally:
        warmer.stop()


def test_a_failure_that_nobody_foresaw_does_not_end_it(
    warmer: Warmer, house: House, models: Models
) -> None:
    eventually(lambda: {("left", 2), ("right", 2)} <= set(models.opened))
    models.failing = "left"
    pointer = house.online.live("left")
    assert pointer is not None
    house.online.flip(replace(pointer, epoch=3))
    eventually(lambda: models.opened.count(("left", 3)) > 0)
    models.failing = ""
    models.opened.clear()
    eventually(lambda: {("left", 3), ("right", 2)} <= set(models.opened))
