"""Shards on other hosts, over a root in an object store: the rows are those of one run here."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from precompute.jobs.run.shards import coordinator as coordinator_module
from precompute.jobs.run.shards import worker as worker_module
from precompute.jobs.run.shards.worker import WorkSummary, work
from tests.fixtures import MakeProject
from tests.object_store import ObjectStore
from tests.scene import Scene

ROWS = [(i, i / 7) for i in range(100)]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "FEW_ROWS", 1)
    monkeypatch.setattr(coordinator_module, "RESULTS_LOOK_REMOTE_S", 0.1)
    monkeypatch.setattr(worker_module, "SHARD_LOOK_S", 0.1)


def host(project: Scene, folder: Path) -> Scene:
    """The project as another host has it: its configuration, and neither source nor cache."""
    folder.mkdir()
    for name in ("project.yaml", "views"):
        os.symlink(project.home / name, folder / name)
    return Scene(folder, {})


def test_two_hosts_over_an_object_store_whose_replies_get_lost(
    bucket: ObjectStore, make_project: MakeProject, tmp_path: Path
) -> None:
    alone = make_project(ROWS)
    alone.run()
    wanted, content = alone.doubles(), alone.snapshot().content
    root = f"s3://bucket/{bucket.prefix}"
    settings = {"root": root, "online": "table:./online", "engine": {"on": "elsewhere"}}
    scene = make_project(ROWS, view={"shards": 4}, project=settings)
    hosts = [host(scene, tmp_path / name) for name in ("one", "two")]
    bucket.lose_first_replies()
    done: list[WorkSummary] = []
    threads = [
        threading.Thread(target=lambda one=one: done.append(work(one, "numbers", wait_s=30)))
        for one in hosts
    ]
    for thread in threads:
        thread.start()
    report = scene.run()
    for thread in threads:
        thread.join(30)
    assert scene.doubles() == wanted
    assert scene.snapshot().content == content
    assert (report.status, sum(one.rows for one in done)) == ("published", 100)
    # a host that never saw the run reads it from the root alone
    assert host(scene, tmp_path / "three").doubles() == wanted
    assert scene.run().status == "current"
