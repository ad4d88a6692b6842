"""Which online store a URL names: ``table:./folder``, ``redis://…``, ``rediss://…``, ``unix://…``,
``redis+cluster://…`` or ``memory:``."""

from __future__ import annotations

import re
from pathlib import Path

from precompute.store.errors import ConfigError
from precompute.store.kept.kept_rows import KeptLimits, KeptRows
from precompute.store.online.online_store import MemoryStore, OnlineStore


def open_online_store(url: str, base: Path | None = None, memory_mb: int = 1024) -> OnlineStore:
    """The store a URL names; nothing is read or written yet.

    Args:
        url: as in the configuration's ``online``.
        base: folder that a relative ``table:`` path starts from; the working directory by default.
        memory_mb: what a load may hold of an index it builds.

    Raises:
        ConfigError: the URL names no store known here.
    """
    scheme, _, rest = url.partition(":")
    # Each store is imported only where it is used: a service on table files needs no Redis client, and the other way round.
    if scheme == "table" and rest:
        from precompute.store.online.table_store import TableStore

        return TableStore((base or Path()) / rest, memory_mb * 2**20)
    if scheme == "lmdb":
        raise ConfigError(
            f"online: {url!r} is the embedded store of older versions: write table:{rest or './folder'}, and publish each view"
        )
    if scheme in ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster"):
        from precompute.store.redis.redis_store import RedisStore

        return RedisStore(url)
    if url == "memory:":
        return MemoryStore()
    shown = re.sub(r"//.*@", "//…@", url)
    raise ConfigError(f"online: {shown!r} names no online store; write table:./folder or redis://host:6379/0")


def open_kept_rows(online: str, limits: KeptLimits, base: Path | None = None) -> KeptRows | None:
    """Where rows are kept beside the online store that a URL names; None beside one that lives in its process.

    Args:
        online: as of :func:`open_online_store`.
        limits: of each view.
        base: likewise.

    Raises:
        ConfigError: the URL cannot be read.
    """
    # each is imported only where it is used
    scheme, _, rest = online.partition(":")
    if scheme == "table":
        from precompute.store.kept.kept_file import KeptFile

        return KeptFile((base or Path()) / rest / "kept-misses", limits)
    if scheme == "memory":
        return None
    from precompute.store.kept.kept_redis import KeptRedis

    return KeptRedis(online, limits)
