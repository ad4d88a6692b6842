"""Address: where a server is, from the text that names it, and whom TLS trusts there."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from precompute.store.errors import ConfigError, RequestError

_HOW = "write http://127.0.0.1:8080, https://host or unix:./api.sock"


@dataclass(frozen=True, slots=True)
class Address:
    """A server's. ``prefix`` stands before every path, where a proxy serves the API below one."""

    text: str
    scheme: str
    host: bytes
    port: int
    prefix: str = ""
    socket_path: str | None = None

    @property
    def host_header(self) -> bytes:
        """As HTTP has it: an IPv6 address in brackets, and the port; of a Unix socket ``localhost``."""
        if self.socket_path is not None:
            return b"localhost"
        return b"%s:%d" % (b"[%s]" % self.host if b":" in self.host else self.host, self.port)


def address_of(url: str) -> Address:
    """What ``http://127.0.0.1:8080``, ``https://host/prefix`` or ``unix:./api.sock`` names.

    Raises:
        RequestError: another text.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError as exc:
        raise RequestError(f"{url!r} is no server's address ({exc}): {_HOW}") from exc
    if parts.scheme == "unix" and parts.path:
        return Address(url, "http", b"localhost", 80, socket_path=url.removeprefix("unix:"))
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username is not None:
        raise RequestError(f"{url!r} is no server's address: {_HOW}")
    return Address(url, parts.scheme, host, port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/"))


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of TLS, in PEM: ``ca`` whom to trust in place of the system's authorities; ``certificate`` and ``key`` who one is, where the server asks."""

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def context(self) -> ssl.SSLContext:
        """As ``ssl`` wants it: the server's certificate and name are checked, always.

        Raises:
            ConfigError: a file cannot be read, is none of these, or the key is another certificate's.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as exc:
            named = ", ".join(
                f"{name} {path}" for name in ("ca", "certificate", "key") if (path := getattr(self, name)) is not None
            )
            raise ConfigError(f"TLS of the client ({named}): {exc}") from exc
        return context
