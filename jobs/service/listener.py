"""Listener: the sockets that a server's workers answer on, bound before any of them runs."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from jobs.config.project import Project
from store.errors import ConfigError


class Listener:
    """A listening socket.

    Args:
        project: whose it is.
        key: the setting that says where: ``serve.bind`` or ``serve.admin``.
        address: its value.

    ``shown`` is the address for people.

    Raises:
        ConfigError: it cannot be bound.
    """

    def __init__(self, project: Project, key: str, address: str) -> None:
        serve = project.settings.serve
        self._path: Path | None = None
        try:
            if address.startswith("unix:"):
                self.socket, self._path = _unix(project.home / address.removeprefix("unix:"))
                self.shown = f"unix:{self._path}"
            else:
                host, _, port = address.rpartition(":")
                host = host.strip("[]")
                self.socket = _tcp(host, int(port))
                shown = f"[{host}]" if ":" in host else host
                self.shown = f"http{'' if serve.tls is None else 's'}://{shown}:{self.socket.getsockname()[1]}"
        except (OSError, OverflowError) as exc:
            variable = f"PRECOMPUTE_{key.replace('.', '__').upper()}"
            raise ConfigError(
                f"{key}: {address!r} cannot be bound ({exc}): is another server running there? Set {variable} to another address"
            ) from exc

    def close(self) -> None:
        """Listen no more, and leave no file."""
        self.socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


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
    bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
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
