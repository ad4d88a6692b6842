"""Miss cache: what models computed for misses, beside the rows of a Redis online store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from precompute.plugins.redis.cluster import open_servers
from precompute.plugins.redis.connection import RedisOptions
from precompute.store.errors import OnlineStoreError
from precompute.store.online.miss_cache import MissCache, MissCacheLimits, Space
from precompute.store.times import clock_us

log = logging.getLogger(__name__)


class MissCacheRedis(MissCache):
    """A miss cache beside the rows of a Redis online store: a hash for each view and model, its
    fields the slots. It expires once nothing was written for as long as a row is cached.

    Args:
        url: of that store.
        limits: of each view.
        clock: as of :class:`MissCache`.

    Raises:
        ConfigError: the URL cannot be read.
    """

    def __init__(
        self, url: str, limits: MissCacheLimits, clock: Callable[[], int] = clock_us
    ) -> None:
        super().__init__(limits, clock)
        options = RedisOptions.of(url)
        self._prefix, self._servers = options.prefix, open_servers(options)

    def _get(self, space: Space, slots: Sequence[int]) -> dict[int, bytes]:
        name = self._name(space)
        try:
            (records,) = self._servers.call(
                name, [("HMGET", name, *map(str, slots))], f"read cached rows of {space.view!r}"
            )
        except OnlineStoreError as exc:
            log.debug("%s", exc)
            return {}
        return {
            slot: record for slot, record in zip(slots, records, strict=True) if record is not None
        }

    def _put(self, space: Space, records: dict[int, tuple[bytes, int]]) -> bool:
        name = self._name(space)
        fields = [part for slot, (record, _) in records.items() for part in (str(slot), record)]
        # in one go: a writer that ends leaves none behind that stays for ever
        commands = [
            ("HSET", name, *fields),
            ("PEXPIRE", name, str(max(1, space.longest_us // 1000))),
        ]
        try:
            self._servers.call(name, commands, f"cache rows of {space.view!r}")
        except OnlineStoreError as exc:
            # it is full, gone, or gives no right to: nothing is cached
            log.debug("%s", exc)
            return False
        return True

    def _name(self, space: Space) -> str:
        return f"{self._prefix}:{{{space.view}}}:misses:{space.model[:16]}"

    def close(self) -> None:
        self._servers.close()
