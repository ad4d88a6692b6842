"""Keys: where what is fetched from a root in an object store lies on this host: ``cache`` and
``cache_gb`` of ``project.yaml``."""

from __future__ import annotations

from pydantic import Field

from precompute.jobs.config.open_section import Keys


class CacheKeys(Keys):
    """The cache of a root elsewhere."""

    cache: str = "./var/cache"
    """folder for what is fetched from a root in an object store"""
    cache_gb: float = Field(default=200.0, gt=0)
    """of parts there, at most"""
