"""Hosts: the names that a server may be asked for by, so that no web page reaches it by a name of its own that was made to lead here (DNS rebinding)."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import lru_cache

_REMEMBERED = 256


class Hosts:
    """Of a server that asks for no token and has no certificate: any address, ``localhost``, and the names that are given.

    An address is the page's own or nobody's: what a browser takes for one origin with a page cannot be made to lead elsewhere but by its name.

    Args:
        names: without ports, lower-case.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = frozenset(names) | {"localhost"}
        self.allow = lru_cache(_REMEMBERED)(self._allow)
        """Whether a Host header's value is one of them, whatever its port; none, which no browser sends, is."""

    def _allow(self, value: bytes) -> bool:
        text = value.decode("latin-1").lower()
        name, _, port = text[1:].partition("]") if text.startswith("[") else text.partition(":")
        if not port.removeprefix(":").isdigit() and port not in ("", ":"):
            return False
        return not text or name.removesuffix(".") in self._names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
