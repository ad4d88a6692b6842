"""Listener: the sockets that a server's workers accept on, bound before they run; and TLS."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precompute.store.errors import ConfigError
from precompute.store.http.guard.access import Tokens, version_of
from precompute.store.http.openapi import Asks


class Listener:
    """A listening socket.

    Args:
        key: the setting that says where, for messages: ``serve.bind``.
        address: its value: host:port, or unix:path.
        folder: what a relative path starts from.
        guarded: whether the caller must show a token or a certificate; else only this machine may
            reach it.
        tls: whether it is served over TLS.

    ``shown`` is the address for people.

    Raises:
        ConfigError: it cannot be bound; or strangers could reach it, and nothing keeps them out.
    """

    def __init__(self, key: str, address: str, folder: Path, *, guarded: bool, tls: bool) -> None:
        if not guarded and not _is_local(address):
            raise ConfigError(
                f"{key}: {address!r} is reached from other machines, and nothing keeps strangers"
                " out: write under `serve` either `tokens: ./tokens`, with a token made by"
                " `precompute token NAME`, or `tls: {cert: …, key: …, client_ca: …}`; or bind"
                " 127.0.0.1 or unix:./api.sock"
            )
        self._path: Path | None = None
        try:
            if address.startswith("unix:"):
                self.socket, self._path = _unix(folder / address.removeprefix("unix:"))
                self.shown = f"unix:{self._path}"
            else:
                host, _, port = address.rpartition(":")
                host = host.strip("[]")
                self.socket = _tcp(host, int(port))
                shown = f"[{host}]" if ":" in host else host
                self.shown = f"http{'s' if tls else ''}://{shown}:{self.socket.getsockname()[1]}"
        except (OSError, OverflowError) as exc:
            variable = f"PRECOMPUTE_{key.replace('.', '__').upper()}"
            raise ConfigError(
                f"{key}: {address!r} cannot be bound ({exc}): is another server running there? Set"
                f" {variable} to another address"
            ) from exc

    def close(self) -> None:
        """Listen no more, and leave no file."""
        self.socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _is_local(address: str) -> bool:
    """Whether only this machine reaches an address: a Unix socket, or loopback."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unix(path: Path) -> tuple[socket.socket, Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_dead_socket(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        os.chmod(path, 0o660)
        bound.listen(2048)
    except OSError:
        bound.close()
        raise
    return bound, path


def _tcp(host: str, port: int) -> socket.socket:
    bound = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
    )
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _remove_dead_socket(path: Path) -> None:
    """Remove a socket file that no process listens on; one that is in use stays, and bind() then
    refuses."""
    if path.is_socket():
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()


# ---- TLS: from files in PEM; a new certificate is taken up without a restart, for the
# connections that come after it.


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
        self._seen = version_of(cert), version_of(key)
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

    def refresh(self) -> None:
        """Take up the files if they changed; those that cannot be used are reported in the log,
        once, and the ones before stay."""
        seen = version_of(self._cert), version_of(self._key)
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
