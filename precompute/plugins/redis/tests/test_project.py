"""A whole project by one changed line: on a cluster; one Redis is in the tests of each step."""

from __future__ import annotations

from typing import Any

import redis

from tests.fixtures import MakeProject
from tests.scene import UNJUDGED, Scene

CHANGING: dict[str, Any] = {
    "gates": UNJUDGED,
    "index": {"on": "vector"},
}


def emptied(online: str) -> None:
    """As an operator's FLUSHALL."""
    host, _, port = online.rpartition("/")[2].partition(",")[0].partition(":")
    with redis.RedisCluster(host, int(port)) as client:
        client.flushall(target_nodes=redis.RedisCluster.PRIMARIES)


def served(project: Scene, keys: list[int]) -> list[float | None]:
    with project.lookup() as lookup:
        return list(lookup.get("numbers", keys)["double"].to_pylist())


def test_runs_deltas_rollback_loss_and_end(make_project: MakeProject, cluster_url: str) -> None:
    table = {key: float(key) for key in range(300)}

    def published() -> Scene:
        project = make_project(
            sorted(table.items()), project={"online": cluster_url}, view=CHANGING
        )
        assert project.run().status == "published"
        return project

    project = published()
    assert served(project, [0, 7, 299, 300]) == [0.0, 14.0, 598.0, None]
    table[7] = 70.0
    del table[299]
    project = published()
    assert project.pointer().numbers == (1, 2)
    assert served(project, [0, 7, 299]) == [0.0, 140.0, None]
    with project.lookup() as lookup:
        assert len(lookup.search("numbers", key=7, k=2)["rows"]) == 2
    project.rollback()
    assert served(project, [0, 7, 299]) == [0.0, 14.0, 598.0]
    emptied(cluster_url)
    with project.online_store() as store:
        assert store.views() == []
    assert project.cli("reconcile", "numbers") == 0
    assert served(project, [0, 7, 299]) == [0.0, 14.0, 598.0]
    assert project.faults() == []
    assert project.cli("drop", "numbers", "--yes") == 0
    with project.online_store() as store:
        assert (store.views(), store.segments("numbers")) == ([], [])
