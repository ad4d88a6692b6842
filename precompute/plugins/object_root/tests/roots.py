"""Roots: storages and projects in the bucket of a test."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from precompute.plugins.object_root.storage import ObjectStorage
from precompute.store.disk.storage import mount
from tests.object_store import ObjectStore
from tests.scene import UNJUDGED, Scene

VIEW = {"gates": UNJUDGED | {"rows": None}}


def storage_in(bucket: ObjectStore, folder: Path) -> ObjectStorage:
    """A root there, with its cache in a folder, mounted."""
    storage = ObjectStorage(bucket.root, folder)
    mount(folder, storage)
    return storage


def project_on(
    bucket: ObjectStore, make_project: Callable[..., Scene], rows: Any, **view: Any
) -> Scene:
    """A project of these rows with its root in the bucket; ``view`` are more keys of its view."""
    settings = {"root": bucket.root, "online": "table:./online"}
    return make_project(rows, view=VIEW | view, project=settings)


def host(project: Scene, folder: Path) -> Scene:
    """The project as another host has it: its configuration, and nothing else."""
    folder.mkdir()
    for name in ("project.yaml", "views", "data.parquet"):
        os.symlink(project.home / name, folder / name)
    return Scene(folder, {})
