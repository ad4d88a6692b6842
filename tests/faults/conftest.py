"""Fixtures of the fault suite: a folder where fsync costs nothing, and scenes that many cases start
from."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.harness import FaultScene, changed, recover
from tests.fixtures import MEMORY

ROWS = {key: key * 10 for key in range(200)}

MakeScene = Callable[[], FaultScene]


@pytest.fixture(scope="session")
def memory_folder() -> Iterator[Path]:
    base = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2**30 else None
    with tempfile.TemporaryDirectory(prefix="precompute-faults-", dir=base) as folder:
        yield Path(folder)


@pytest.fixture
def folder(memory_folder: Path) -> Iterator[Path]:
    """As pytest's tmp_path, in memory, and gone after the test."""
    with tempfile.TemporaryDirectory(dir=memory_folder) as name:
        yield Path(name)


@pytest.fixture
def scene(folder: Path) -> FaultScene:
    """A project that was never run."""
    return FaultScene(folder / "project").write(ROWS)


def two_published(scene: FaultScene) -> FaultScene:
    """Two full snapshots of different rows published, and the source changed once more: 24 rows to
    compute, in three chunks; 5 removed. The run to come makes a delta on snapshot 2, and gc then
    removes snapshot 1."""
    scene.write(ROWS)
    scene.run()
    scene.write(changed(scene.rows, range(0, 200, 3)))
    scene.run(full=True)
    scene.write(changed(scene.rows, range(20, 32), range(300, 312), range(50, 55)))
    scene.computed()
    return scene


@pytest.fixture(scope="session")
def prepared(memory_folder: Path) -> FaultScene:
    """Never to be run itself: see :func:`two_published`. It was made where its copies are, since
    the path is part of the source's SQL."""
    scene = two_published(FaultScene(memory_folder / "stage"))
    scene.folder.rename(memory_folder / "prepared")
    return scene


@pytest.fixture
def delta_to_come(prepared: FaultScene) -> MakeScene:
    """Makes a copy of :func:`prepared`, in place of the one before."""
    return lambda: put_on_stage(prepared, "prepared")


@pytest.fixture(scope="session")
def prepared_third(prepared: FaultScene) -> FaultScene:
    """Never to be run itself: snapshots 1 to 3 published, none collected yet; the third is live."""
    scene = put_on_stage(prepared, "prepared")
    scene.settings = {"retention": {"keep": 3, "grace": "1h"}}
    scene.write()
    recover(scene)
    scene.folder.rename(scene.folder.with_name("prepared-third"))
    return scene


@pytest.fixture
def third_is_live(prepared_third: FaultScene) -> MakeScene:
    """Makes a copy of :func:`prepared_third`, whose third snapshot nobody will like."""
    return lambda: put_on_stage(prepared_third, "prepared-third")


@pytest.fixture(scope="session")
def prepared_deltas(prepared: FaultScene) -> FaultScene:
    """Never to be run itself: a base that is live, a delta over it, and one to come."""
    scene = put_on_stage(prepared, "prepared")
    recover(scene)
    scene.write(changed(scene.rows, [3]))
    recover(scene)
    scene.write(changed(scene.rows, [5], gone=[7]))
    scene.folder.rename(scene.folder.with_name("prepared-deltas"))
    return scene


@pytest.fixture
def second_delta_to_come(prepared_deltas: FaultScene) -> MakeScene:
    """Makes a copy of :func:`prepared_deltas`."""
    return lambda: put_on_stage(prepared_deltas, "prepared-deltas")


def put_on_stage(scene: FaultScene, original: str) -> FaultScene:
    """A fresh copy of a prepared scene."""
    shutil.rmtree(scene.folder, ignore_errors=True)
    shutil.copytree(scene.folder.with_name(original), scene.folder)
    return scene.copied(scene.folder)
