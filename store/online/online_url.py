"""Which online store a URL names: ``lmdb:./folder``, ``redis://…``, ``rediss://…``, ``unix://…`` or ``memory:``."""

from __future__ import annotations

from pathlib import Path

from store.errors import ConfigError
from store.online.online_store import MemoryStore, OnlineStore


def open_online_store(url: str, base: Path | None = None) -> OnlineStore:
    """The store a URL names; nothing is read or written yet.

    Args:
        url: as in the configuration's ``online``.
        base: folder that a relative ``lmdb:`` path starts from; the working directory by default.

    Raises:
        ConfigError: the URL names no store known here.
    """
    scheme, _, rest = url.partition(":")
    # Each store is imported only where it is used: a service on LMDB needs no Redis client, and the other way round.
    if scheme == "lmdb" and rest:
        from store.online.lmdb_store import LmdbStore

        return LmdbStore((base or Path()) / rest)
    if scheme in ("redis", "rediss", "unix"):
        from store.online.redis_store import RedisStore

        return RedisStore(url)
    if url == "memory:":
        return MemoryStore()
    raise ConfigError(f"online: {url!r} names no online store; write lmdb:./folder or redis://host:6379/0")
