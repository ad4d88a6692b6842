"""Known models: a run that computes nothing loads no built-in model, and one whose files may be
others is loaded and looked at."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.jobs.run.rows import open_model as known_model
from precompute.models.two_tower import train_two_tower
from precompute.registry import LoadedModel, load_with_fingerprint
from precompute.store.errors import ModelError
from tests.fixtures import MakeProject
from tests.scene import Scene

TABLE = pa.table({"id": [1, 2]})


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape and size."""
    folder = tmp_path_factory.mktemp("towers")
    for seed in (1, 2):
        pairs = np.array([(0, 0), (1, 1)], np.int64)
        path = folder / f"{seed}.safetensors"
        train_two_tower(
            path, TABLE, TABLE, pairs, {"id": False}, {"id": False}, dim=2, epochs=1, seed=seed
        )
    return folder / "1.safetensors", folder / "2.safetensors"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were loaded since."""
    loaded: list[str] = []

    def noted(use: str, args: Mapping[str, Any], folder: Path | None = None) -> LoadedModel:
        loaded.append(use)
        return load_with_fingerprint(use, args, folder)

    monkeypatch.setattr("precompute.jobs.run.rows.open_model.load_with_fingerprint", noted)
    return loaded


@pytest.fixture
def project(make_project: MakeProject, towers: tuple[Path, Path]) -> Scene:
    """A view of a two-tower model that was computed; its model's file has been there for a
    while."""
    view = {
        "source": {"sql": "SELECT * FROM (VALUES (1), (2)) t(id)"},
        "model": {"use": "two_tower", "args": {"path": "./tower.safetensors", "tower": "user"}},
        "features": {"embedding": {"dtype": "float32", "dim": 2}},
        "gates": {"coverage": None},
    }
    made = make_project([(1, 1.0)], view=view)
    put(towers[0], made)
    assert made.run().status == "published"
    return made


def put(model: Path, project: Scene) -> None:
    """The file in the project's folder, as of long ago; the time of its change stays."""
    place = project.folder / "tower.safetensors"
    shutil.copy(model, place)
    long_ago = time.time() - 1000
    os.utime(place, (long_ago, long_ago))


@pytest.fixture(autouse=True)
def fine_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system's step is that of the kernel's clock here."""
    monkeypatch.setattr(known_model, "SETTLED_NS", 1_000_000_000)


def settle() -> None:
    time.sleep(1.1)


def test_a_run_that_computes_nothing_loads_no_model_that_is_known(
    project: Scene, loads: list[str]
) -> None:
    settle()
    assert [project.run().status, project.run().status] == ["current", "current"]
    assert loads == ["two_tower"], "what was as new as the model's file was not remembered"
    assert project.run(full=True).status == "published"
    assert len(loads) == 2


def test_another_file_of_the_same_size_and_time_is_another_model(
    project: Scene, loads: list[str], towers: tuple[Path, Path]
) -> None:
    settle()
    project.run()
    put(towers[1], project)
    assert project.run().status == "published"
    assert project.run().counts["unchanged"] == 2
    assert len(loads) == 3, (
        "each time while the file is so new that its time may stay when it is written to again"
    )


def test_a_damaged_note_is_as_none(project: Scene, loads: list[str]) -> None:
    settle()
    project.run()
    (note,) = project.store.compiled.iterdir()
    note.write_bytes(note.read_bytes()[:-9])
    assert [project.run().status, project.run().status] == ["current", "current"]
    assert len(loads) == 2


def test_a_model_that_turns_out_another_when_loaded_computes_nothing(
    project: Scene, towers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle()
    project.run()

    def replaced(use: str, args: Mapping[str, Any], folder: Path | None = None) -> LoadedModel:
        put(towers[1], project)
        return load_with_fingerprint(use, args, folder)

    monkeypatch.setattr("precompute.jobs.run.rows.open_model.load_with_fingerprint", replaced)
    with pytest.raises(
        ModelError,
        match="view 'numbers': the model's files were replaced since the run began: run again",
    ):
        project.run(full=True)
