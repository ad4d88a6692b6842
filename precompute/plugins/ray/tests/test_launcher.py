"""Shards by actors of a Ray cluster: the rows are those of one run here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.run.shards import coordinator as coordinator_module
from precompute.jobs.run.shards import worker as worker_module
from precompute.store.errors import ConfigError
from precompute.store.offline.runs import Report
from tests.fixtures import MakeProject
from tests.models import Doubler
from tests.object_store import ObjectStore

ROWS = [(i, i / 7) for i in range(100)]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "FEW_ROWS", 1)
    monkeypatch.setattr(coordinator_module, "RESULTS_LOOK_REMOTE_S", 0.1)
    monkeypatch.setattr(worker_module, "SHARD_LOOK_S", 0.1)


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
    commands, pids = [], [raylet.process.pid, *below(raylet.process.pid)]
    # before the first one is killed, which ends others
    for pid in pids:
        with contextlib.suppress(OSError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return commands


def test_three_ray_nodes_and_one_is_killed(
    ray_cluster: Any, make_project: MakeProject, tmp_path: Path
) -> None:
    rows = [(i, i / 7) for i in range(240)]
    view = {"model": {"use": "precompute.plugins.ray.tests.test_launcher:Slow"}}
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
