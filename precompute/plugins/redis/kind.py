"""Kind: what the door ``online`` leads to for the URLs of a Redis and of a Redis Cluster."""

from __future__ import annotations

from pathlib import Path

from precompute.plugins.redis.miss_cache import MissCacheRedis
from precompute.plugins.redis.store import RedisStore
from precompute.store.online.miss_cache import MissCache, MissCacheLimits
from precompute.store.online.online_store import OnlineStore
from precompute.store.online.url import OnlineKind


class RedisKind:
    """As :class:`OnlineKind`. A folder to begin from and a limit of a load's memory mean nothing to
    it."""

    def open(self, url: str, base: Path | None, memory_mb: int) -> OnlineStore:
        """The store, not yet connected.

        Raises:
            ConfigError: the URL cannot be read.
        """
        return RedisStore(url)

    def miss_cache(self, url: str, limits: MissCacheLimits, base: Path | None) -> MissCache:
        """What is cached there beside the rows.

        Raises:
            ConfigError: the URL cannot be read.
        """
        return MissCacheRedis(url, limits)


KIND: OnlineKind = RedisKind()
