"""Access: the files that say who may ask, opened by every worker alike, and tried before any of them is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precompute.store.api.openapi import Asks
from precompute.store.guard.tls import Tls
from precompute.store.guard.tokens import Tokens


def tokens_of(spec: Mapping[str, Any]) -> Tokens | None:
    """The tokens of the file that ``spec["tokens"]`` names; None where it names none.

    Raises:
        ConfigError: it cannot be used.
    """
    return None if spec["tokens"] is None else Tokens(Path(spec["tokens"]))


def tls_of(spec: Mapping[str, Any]) -> Tls | None:
    """TLS by the files that ``spec["tls"]`` names as ``cert``, ``key`` and, maybe, ``client_ca``; None where there is none.

    Raises:
        ConfigError: one cannot be used.
    """
    files: Mapping[str, str] | None = spec["tls"]
    return None if files is None else Tls(**{name: Path(path) for name, path in files.items()})


def asked_of(spec: Mapping[str, Any]) -> Asks:
    """What callers are asked for, by the same."""
    token = Asks.NOTHING if spec["tokens"] is None else Asks.TOKEN
    return token | (Asks.CERTIFICATE if (spec["tls"] or {}).get("client_ca") else Asks.NOTHING)
