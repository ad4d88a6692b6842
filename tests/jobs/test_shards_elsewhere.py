"""Shards on other hosts: over a root in an object store, and by actors of a Ray cluster, the rows
are those of one run here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.run.shards import coordinator as coordinator_module
from precompute.jobs.run.shards import worker as worker_module
from precompute.jobs.run.shards.worker import WorkSummary, work
from precompute.store.errors import ConfigError
from precompute.store.offline.runs import Report
from tests.fixtures import MakeProject
from tests.jobs.test_code_check import VIEW as TIMES
from tests.jobs.test_code_check import write as write_model
from tests.models import Doubler
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


def test_a_host_with_other_code_is_refused_by_name_and_the_run_goes_on(
    bucket: ObjectStore, make_project: MakeProject, tmp_path: Path
) -> None:
    """Of one fingerprint; in processes as people start them, first the one that must not work."""
    rows, settings = (
        [(i, float(i)) for i in range(200)],
        {"root": f"s3://bucket/{bucket.prefix}", "online": "table:./online"},
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


# ---- Ray


class Slow(Doubler):
    """A tenth of a second for each batch, so that there is time to kill somebody."""

    def __init__(self) -> None:
        super().__init__(sleep_s=0.1)


@pytest.fixture(scope="module")
def ray_cluster(object_server: ObjectStore) -> Iterator[Any]:
    """Three nodes of one CPU, with tokens; they have the object store's credentials."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    from ray.cluster_utils import Cluster

    quiet = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=quiet)
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    os.environ["RAY_ADDRESS"] = cluster.address
    yield cluster
    cluster.shutdown()
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        os.environ.pop(name, None)


def below(pid: int) -> list[int]:
    """All processes that a process started, and those that they did."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        # it may end in between
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def kill_node(node: Any) -> list[list[str]]:
    """Kill a node with all that runs on it, as a machine that is gone; the command lines of what
    ran."""
    from ray._private.ray_constants import PROCESS_TYPE_RAYLET

    (raylet,) = node.all_processes[PROCESS_TYPE_RAYLET]
    commands = []
    for pid in [raylet.process.pid, *below(raylet.process.pid)]:
        with contextlib.suppress(OSError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
            os.kill(pid, signal.SIGKILL)
    return commands


def test_three_ray_nodes_and_one_is_killed(
    ray_cluster: Any, make_project: MakeProject, tmp_path: Path
) -> None:
    rows = [(i, i / 7) for i in range(240)]
    view = {"model": {"use": "tests.jobs.test_shards_elsewhere:Slow"}}
    alone = make_project(rows, view=view)
    alone.run()
    wanted, content = alone.doubles(), alone.snapshot().content
    shards = {"shards": 24}
    on_ray = {"engine": {"on": "ray", "workers": 3}}
    scene = make_project(rows, view=view | shards, project=on_ray)
    node = next(iter(ray_cluster.worker_nodes))
    reports: list[Report] = []
    run = threading.Thread(target=lambda: reports.append(scene.run(full=True)))
    run.start()
    folder = scene.store.data
    limit = time.monotonic() + 60
    while len({json.loads(p.read_bytes())["worker"] for p in folder.glob("*-shards/beat-*")}) < 3:
        assert time.monotonic() < limit
        time.sleep(0.05)
    killed = kill_node(node)
    assert any("work" in command for command in killed)
    run.join(90)
    assert reports[0].status == "published"
    assert (scene.doubles(), scene.snapshot().content) == (wanted, content)
    assert scene.run().status == "current"


def test_without_a_cluster_ray_is_refused(make_project: MakeProject, tmp_path: Path) -> None:
    scene = make_project(ROWS, project={"engine": {"on": "ray", "workers": 2}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        with pytest.raises(ConfigError, match=r"no cluster can be reached .*RAY_ADDRESS"):
            scene.run()
    assert scene.report().status == "failed"
