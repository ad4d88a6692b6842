"""URL: which online store a URL names, and the miss cache beside it: table files, or what a door
has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from precompute.store.doors import ONLINE
from precompute.store.errors import ConfigError, nearest_or_all
from precompute.store.online.miss_cache import MissCache, MissCacheFile, MissCacheLimits
from precompute.store.online.online_store import OnlineStore


class OnlineKind(Protocol):
    """What a scheme of the door ``online`` leads to: an object with these two, or a module.

    It is given the URL as it was written, which messages show without what stands before an ``@``
    behind ``//`` and without what stands behind a ``?``: no password may stand elsewhere. One whose
    URLs have paths has ``absolute(url, base)``, too (:func:`absolute_url`)."""

    def open(self, url: str, base: Path | None, memory_mb: int) -> OnlineStore:
        """See :func:`open_online_store`."""

    def miss_cache(self, url: str, limits: MissCacheLimits, base: Path | None) -> MissCache:
        """See :func:`open_miss_cache`."""


_OURS = {scheme: ONLINE.what(scheme) for scheme in ONLINE.known()}
_HERE = ["table:./folder", *(_OURS[scheme] for scheme in _OURS if ONLINE.is_here(scheme))]
FORMS = " or ".join(", ".join(_HERE).rsplit(", ", 1))
"""What the configuration's ``online`` may be, for people."""


def table_folder(url: str) -> str | None:
    """The folder of table files that a URL names; None where it names another store.

    Raises:
        ConfigError: it names no store known here, or one that is not installed.
    """
    scheme, _, rest = url.partition(":")
    # written like a host, the folder would lie at the root of the file system
    is_host = rest.startswith("//") and not rest.startswith("///")
    if scheme == "table":
        if rest and not is_host:
            return rest
        why = "names no folder: write table:./folder, or table:/folder from the root"
    elif not ONLINE.has(scheme) or (scheme in _OURS and not rest.startswith("//")):
        kinds = ("table", *_OURS, *ONLINE.foreign())
        near = "" if scheme in kinds else nearest_or_all(scheme, kinds)
        why = f"names no online store: write {' or '.join(_HERE[:2])}{near}"
    elif ONLINE.is_here(scheme):
        return None
    else:
        raise ConfigError(f"online: {shown_url(url)!r}: {ONLINE.absence(scheme)}")
    raise ConfigError(f"online: {shown_url(url)!r} {why}")


def absolute_url(url: str, base: Path) -> str:
    """What a URL of ``project.yaml`` means, whatever the working directory is: its path starts from
    ``base``, the project's folder, where it names a file.

    Raises:
        ConfigError: as of :func:`table_folder`.
    """
    folder, scheme = table_folder(url), url.partition(":")[0]
    if folder is not None:
        return f"table:{(base / folder).absolute()}"
    absolute = None if scheme in _OURS else getattr(_kind(url), "absolute", None)
    return url if absolute is None else str(absolute(url, base))


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
        ConfigError: the URL names no store known here, or one that is not installed.
    """
    folder = table_folder(url)
    # Each store is imported only where it is used: a service on table files needs no client of
    # another, and the other way round.
    if folder is not None:
        from precompute.store.online.table_store import TableStore

        return TableStore((base or Path()) / folder, memory_mb * 2**20)
    return _kind(url).open(url, base, memory_mb)


def open_miss_cache(online: str, limits: MissCacheLimits, base: Path | None = None) -> MissCache:
    """Where rows are stored beside the online store that a URL names.

    Args:
        online: as of :func:`open_online_store`.
        limits: of each view.
        base: as of :func:`open_online_store`.

    Raises:
        ConfigError: the URL names no store known here, or one that is not installed.
    """
    folder = table_folder(online)
    if folder is None:
        return _kind(online).miss_cache(online, limits, base)
    return MissCacheFile((base or Path()) / folder / "misses", limits)


def _kind(url: str) -> OnlineKind:
    kind: OnlineKind = ONLINE.open(url.partition(":")[0])
    return kind
