"""TLS: from files in PEM; a new certificate is taken up without a restart, for the connections that
come after it."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precompute.store.api.openapi import Asks
from precompute.store.errors import ConfigError
from precompute.store.guard.tokens import Tokens

log = logging.getLogger(__name__)


class Tls:
    """What connections are wrapped in.

    Args:
        cert: the server's certificate and those between it and its root.
        key: its private key.
        client_ca: certificates that sign clients'; None: clients need none. Read once.

    Raises:
        ConfigError: a file cannot be read, or they do not belong together.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert, self._key = cert, key
        self._seen = self._stat()
        self.context = self._loaded()
        self.context.set_alpn_protocols(["http/1.1"])
        if client_ca is not None:
            try:
                self.context.load_verify_locations(client_ca)
            except (OSError, ssl.SSLError) as exc:
                raise ConfigError(
                    f"serve.tls.client_ca: {client_ca} cannot be read: {exc}"
                ) from exc
            self.context.verify_mode = ssl.CERT_REQUIRED

    def look(self) -> None:
        """Take up the files if they changed; those that cannot be used are reported in the log,
        once, and the ones before stay."""
        seen = self._stat()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            # in a context of its own first: half of a pair must not come into use
            self._loaded()
            self.context.load_cert_chain(self._cert, self._key, password=_no_password)
            log.info("%s: a new certificate", self._cert)
        except ConfigError as exc:
            log.error("%s; the certificate of before stays", exc)

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(
                f"serve.tls: {self._cert} and {self._key} cannot be used: {exc}"
            ) from exc
        return context

    def _stat(self) -> list[tuple[int, int] | None]:
        return [_changed(self._cert), _changed(self._key)]


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino


def _no_password() -> str:
    """Where it is not given, OpenSSL would ask a person."""
    return ""


def tokens_of(spec: Mapping[str, Any]) -> Tokens | None:
    """The tokens of the file that ``spec["tokens"]`` names; None where it names none.

    Raises:
        ConfigError: it cannot be used.
    """
    return None if spec["tokens"] is None else Tokens(Path(spec["tokens"]))


def tls_of(spec: Mapping[str, Any]) -> Tls | None:
    """TLS by the files that ``spec["tls"]`` names as ``cert``, ``key`` and, maybe, ``client_ca``;
    None where there is none.

    Raises:
        ConfigError: one cannot be used.
    """
    files: Mapping[str, str] | None = spec["tls"]
    return None if files is None else Tls(**{name: Path(path) for name, path in files.items()})


def client_certificates_of(spec: Mapping[str, Any]) -> Asks:
    """What callers are to do, by the same."""
    token = Asks.NOTHING if spec["tokens"] is None else Asks.TOKEN
    return token | (Asks.CERTIFICATE if (spec["tls"] or {}).get("client_ca") else Asks.NOTHING)
