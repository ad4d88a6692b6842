"""Shards on other hosts, over a root in an object store: the rows are those of one run here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from precompute.jobs.run.shards import coordinator as coordinator_module
from precompute.jobs.run.shards import worker as worker_module
from precompute.jobs.run.shards.worker import WorkSummary, work
from tests.fixtures import MakeProject
from tests.jobs.test_golden import VIEW as TIMES
from tests.jobs.test_golden import write as write_model
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
    root = bucket.root
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


def test_a_host_with_other_code_is_refused_by_name_and_the_run_goes_on(
    bucket: ObjectStore, make_project: MakeProject, tmp_path: Path
) -> None:
    """Of one fingerprint; in processes as people start them, first the one that must not work."""
    rows, settings = (
        [(i, float(i)) for i in range(200)],
        {"root": bucket.root, "online": "table:./online"},
    )
    view = TIMES | {"shards": 4}
    write_model(make_project(rows, view=view).folder)
    scene = make_project(rows, view=view, project=settings | {"engine": {"on": "elsewhere"}})
    hosts = {name: host(scene, tmp_path / name) for name in ("older", "same")}
    write_model(hosts["older"].folder, "3")
    write_model(hosts["same"].folder)
    ended: dict[str, tuple[int, str]] = {}

    def workers() -> None:
        for name, one in hosts.items():
            command = [sys.executable, "-m", "precompute.jobs.cli", "-c", str(one.folder)]
            done = subprocess.run(
                [*command, "work", "numbers", "--wait", "30s"],
                capture_output=True,
                text=True,
                check=False,
            )
            ended[name] = done.returncode, done.stderr

    thread = threading.Thread(target=workers)
    thread.start()
    report = scene.run()
    thread.join(60)
    assert ended["older"][0] == 2
    assert re.search(
        r"this host's code of the model differs from that of run \S+ \(factors\.py changed\), under"
        r" the same fingerprint",
        ended["older"][1],
    )
    assert "Traceback" not in ended["older"][1] + ended["same"][1]
    assert ended["same"][0] == 0
    assert (report.status, report.counts["written"]) == ("published", 200)
    assert scene.doubles() == {key: x * 2 for key, x in rows}
