"""Options of a Redis URL: what is the store's own is taken out of the query, the rest is left to the client library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from precompute.store.errors import ConfigError
from precompute.store.feature_view import NAME

BUDGET_S = 0.1
"""Of a read of rows, unless the URL says otherwise: what a caller waits for a server that hangs, the first time."""
FORMS = "write redis://host:6379/0, rediss://…, unix:///path?db=0 or redis+cluster://host:6379,host:6379"


@dataclass(frozen=True)
class RedisOptions:
    """A Redis URL, read.

    ``url`` is without the options below; ``where`` is for messages, without user, password and query; ``nodes`` are the (host, port) that a cluster is
    asked at first, empty where there is none.
    """

    url: str
    where: str
    nodes: tuple[tuple[str, int], ...] = ()
    prefix: str = "precompute"
    max_load_mb_s: float | None = None
    allow_eviction: bool = False
    budget_s: float = BUDGET_S
    buckets: bool = True

    @classmethod
    def of(cls, url: str) -> RedisOptions:
        """Read a URL.

        Args:
            url: ``redis://host:port/db``, ``rediss://…``, ``unix:///path?db=0`` or ``redis+cluster://host:port,host:port`` (``rediss+cluster://`` for TLS).
                In its query: ``prefix`` (a name; keeps projects apart in one database; default ``precompute``), ``max_load_mb_s`` (a load sends no more
                than that), ``allow_eviction=yes`` (load though the server may drop rows by itself), ``budget_ms`` (for connecting, trying again and
                reading together, of rows, default 100), ``buckets=no`` (narrow rows under keys of their own: three to four times the memory, half the time to read many), and
                what redis-py takes, such as ``ssl_ca_certs``.

        Raises:
            ConfigError: it cannot be read; says nothing of what may be a part of a password.
        """
        base, _, query = url.partition("?")
        own: dict[str, Any] = {"budget_s": BUDGET_S}
        others: list[str] = []
        for option in query.split("&") if query else []:
            name, _, value = option.partition("=")
            if name in _READERS:
                field, read = _READERS[name]
                own[field] = read(name, unquote(value))
            else:
                others.append(option)
        scheme, separator, rest = base.partition("://")
        credentials, at, place = rest.rpartition("@")
        nodes: tuple[tuple[str, int], ...] = ()
        if scheme in ("redis+cluster", "rediss+cluster"):
            nodes = _nodes(place.partition("/")[0])
            host, port = nodes[0]
            scheme, place = scheme.removesuffix("+cluster"), f"{f'[{host}]' if ':' in host else host}:{port}/0"
        whole = f"{scheme}{separator}{credentials}{at}{place}" + (f"?{'&'.join(others)}" if others else "")
        shown = base.partition("://")
        return cls(whole, f"{shown[0]}{shown[1]}{shown[2].rpartition('@')[2]}", nodes, **own)


def _nodes(text: str) -> tuple[tuple[str, int], ...]:
    nodes = []
    for node in text.split(","):
        host, colon, port = node.rpartition(":") if not node.endswith("]") else (node, "", "")
        host, port = (host, port) if colon else (node, "6379")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"online: {node!r} is no host and port; write redis+cluster://host:6379,host:6379")
        nodes.append((host, int(port)))
    return tuple(nodes)


def _name(option: str, value: str) -> str:
    if not NAME.match(value):
        raise ConfigError(
            f"online: {option} {value!r} is not a name (lower-case letters, digits and _); write ?{option}=movielens"
        )
    return value


def _positive(option: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigError(f"online: {option} {value!r} is not a number above 0; write ?{option}=100")
    return number


def _seconds(option: str, value: str) -> float:
    return _positive(option, value) / 1000


def _yes(option: str, value: str) -> bool:
    if value not in ("yes", "no"):
        raise ConfigError(f"online: {option} is yes or no, not {value!r}")
    return value == "yes"


_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "prefix": ("prefix", _name),
    "max_load_mb_s": ("max_load_mb_s", _positive),
    "allow_eviction": ("allow_eviction", _yes),
    "budget_ms": ("budget_s", _seconds),
    "buckets": ("buckets", _yes),
}
