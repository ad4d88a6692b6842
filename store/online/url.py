"""URL: which online store a URL names, and the miss cache beside it."""

from __future__ import annotations

import re
from pathlib import Path

from precompute.store.errors import ConfigError, nearest_or_all
from precompute.store.online.miss_cache import (
    MissCache,
    MissCacheFile,
    MissCacheLimits,
    MissCacheRedis,
)
from precompute.store.online.online_store import OnlineStore

_REDIS = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")
FORMS = (
    "table:./folder, redis://host:6379/0, rediss://…, unix:///socket or"
    " redis+cluster://host:6379,host:6379"
)
"""What the configuration's ``online`` may be, for people."""


def table_folder(url: str) -> str | None:
    """The folder of table files that a URL names; None where it names a Redis.

    Raises:
        ConfigError: it names no store known here.
    """
    scheme, _, rest = url.partition(":")
    # written like a host, the folder would lie at the root of the file system
    is_host = rest.startswith("//") and not rest.startswith("///")
    if scheme == "table" and rest and not is_host:
        return rest
    if url.startswith(_REDIS):
        return None
    if scheme == "table":
        why = "no folder: write table:./folder, or table:/folder from the root"
    else:
        kinds = ("table", *(kind.removesuffix("://") for kind in _REDIS))
        near = "" if scheme in kinds else nearest_or_all(scheme, kinds)
        why = f"no online store: write table:./folder or redis://host:6379/0{near}"
    raise ConfigError(f"online: {shown_url(url)!r} names {why}")


def shown_url(url: str) -> str:
    """A URL for messages: without a password."""
    base, _, query = url.partition("?")
    if "@" in query:
        # the ? may be one of a password
        return f"{base.partition('//')[0]}//…"
    return re.sub(r"//.*@", "//…@", base)


def open_online_store(url: str, base: Path | None = None, memory_mb: int = 1024) -> OnlineStore:
    """The store a URL names; nothing is read or written yet.

    Args:
        url: as in the configuration's ``online``.
        base: folder that a relative ``table:`` path starts from; the working directory by default.
        memory_mb: what a load may hold of an index it builds.

    Raises:
        ConfigError: the URL names no store known here.
    """
    folder = table_folder(url)
    # Each store is imported only where it is used: a service on table files needs no Redis client,
    # and the other way round.
    if folder is not None:
        from precompute.store.online.table_store import TableStore

        return TableStore((base or Path()) / folder, memory_mb * 2**20)
    from precompute.store.online.redis.redis_store import RedisStore

    return RedisStore(url)


def open_miss_cache(online: str, limits: MissCacheLimits, base: Path | None = None) -> MissCache:
    """Where rows are stored beside the online store that a URL names.

    Args:
        online: as of :func:`open_online_store`.
        limits: of each view.
        base: as of :func:`open_online_store`.

    Raises:
        ConfigError: the URL names no store known here.
    """
    folder = table_folder(online)
    if folder is None:
        return MissCacheRedis(online, limits)
    return MissCacheFile((base or Path()) / folder / "misses", limits)
