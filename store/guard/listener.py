"""Listener: the sockets that a server's workers answer on, bound before any of them runs."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

from precompute.store.errors import ConfigError


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
    """Remove a socket file nobody listens on; one that is in use stays, and bind() then refuses."""
    if path.is_socket():
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()
