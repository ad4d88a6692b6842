"""What is cached of misses beside the rows in Redis."""

from __future__ import annotations

import redis

from precompute.plugins.redis.miss_cache import MissCacheRedis
from precompute.store.online.miss_cache import CachedMiss, MissCacheLimits
from precompute.store.online.online_store import Pointer
from tests.store.test_miss_cache import Clock, house, pointer

__all__ = ["house", "pointer"]


def test_what_redis_caches_is_gone_once_nothing_of_it_counts(
    redis_url: str, pointer: Pointer
) -> None:
    MissCacheRedis(redis_url, MissCacheLimits(), Clock()).write(pointer, [CachedMiss("a", None)])
    with redis.Redis.from_url(redis_url) as client:
        (name,) = client.keys("*:misses:*")
        assert 90_000 < client.pttl(name) <= 100_000


def test_without_its_server_nothing_is_cached_and_nothing_raised(pointer: Pointer) -> None:
    miss_cache = MissCacheRedis("redis://127.0.0.1:1/0?budget_ms=50", MissCacheLimits())
    miss_cache.write(pointer, [CachedMiss("a", None)])
    assert miss_cache.read(pointer, ["a"]) == {}
    miss_cache.close()
