"""A Redis without room: what is live stays, and the pointer still moves."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from precompute.store.errors import OnlineStoreError
from tests.fixtures import MakeProject
from tests.jobs.test_deltas_online import ANY_NUMBERS
from tests.jobs.test_publish import epochs
from tests.jobs.test_rollback import Versions, served, versions

__all__ = ["versions"]


def test_a_redis_that_runs_full_keeps_what_is_live(
    make_project: MakeProject, redis_url: str
) -> None:
    make: dict[str, Any] = {"project": {"online": redis_url}, "view": ANY_NUMBERS}
    project = make_project([(1, 1.0)], **make)
    project.run()
    client = redis.Redis.from_url(redis_url)
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used + 300_000)
    with pytest.raises(OnlineStoreError, match="has no room"):
        make_project([(i, 2.0) for i in range(20_000)], **make).run()
    assert project.served([1]) == (1, [2.0])
    assert epochs(project) == (1, 1)
    client.config_set("maxmemory", 0)
    make_project([(i, 2.0) for i in range(2_000)], **make).run()
    assert project.served([1]) == (3, [4.0])
    held = list(client.scan_iter("precompute:{}numbers:*", count=5000))
    # the row that was live before, and the live list: 20,000 rows under 18,000 keys that left;
    # nothing a second time of the load that failed
    assert project.live_snapshot().names[0].startswith("2-")
    assert sum(client.hlen(key) for key in held) == 1 + 20_000 + 18_000
    client.close()


def test_when_redis_is_full_the_pointer_still_moves(versions: Versions, redis_url: str) -> None:
    project = versions(1.0, 10.0, online=redis_url)
    client = redis.Redis.from_url(redis_url)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("x", "y")
        report = project.rollback()
        assert (report.status, report.snapshot) == ("published", 1)
        assert served(project) == (1, 1.0)
        assert project.faults() == []
        # a run waits, and needs no room; what waits does, and the view stays held
        project = versions(100.0, online=redis_url)
        assert project.report().status == "committed"
        with pytest.raises(OnlineStoreError, match="full"):
            project.resume()
        assert (served(project), project.live().held is not None) == ((1, 1.0), True)
    finally:
        client.config_set("maxmemory", "0")
        client.close()
    assert (project.resume().status, served(project)[1]) == ("published", 100.0)
