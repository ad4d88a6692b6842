"""Serve: the HTTP API over a project's online store, by processes that a supervisor keeps."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from jobs.config.project import Project
from jobs.service.model_group import ModelLimits, machine_memory_mb
from jobs.service.supervisor import Supervisor
from store.disk.spill_folder import SpillFolder
from store.errors import ConfigError


def serve(project: Project, announce: Callable[[str], None], workers: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests at hand.

    Args:
        project: the configuration.
        announce: told the address once it is bound.
        workers: how many processes answer; as the project says by default.

    Raises:
        ConfigError: the address cannot be bound.
        PrecomputeError: no worker stays alive.
    """
    bound, address, path = _bind(project)
    with contextlib.closing(SpillFolder()) as runtime, bound:
        worker = {
            "online": project.online,
            "root": str(project.root),
            "runtime": str(runtime.path),
            "listener": bound.fileno(),
        }
        settings = project.settings.serve
        models = settings.models
        limits = ModelLimits(
            models.grace, models.memory_mb or machine_memory_mb() // 2, duckdb_mb=max(64, project.settings.memory_mb // 4)
        )
        kept = {"root": str(project.root), "folder": str(project.home)}
        supervisor = Supervisor(worker, kept, limits, workers or settings.workers)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.stop())
        announce(address)
        try:
            supervisor.run()
        finally:
            if path is not None:
                path.unlink(missing_ok=True)


def _bind(project: Project) -> tuple[socket.socket, str, Path | None]:
    """(listening socket, address for people, socket file to remove)."""
    bind = project.settings.serve.bind
    try:
        if bind.startswith("unix:"):
            path = (project.folder / bind.removeprefix("unix:")).absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_dead_socket(path)
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bound.bind(str(path))
            os.chmod(path, 0o660)
            bound.listen(2048)
            return bound, f"unix:{path}", path
        host, _, port = bind.rpartition(":")
        host = host.strip("[]")
        bound = socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bound, f"http://{'[' + host + ']' if ':' in host else host}:{bound.getsockname()[1]}", None
    except (OSError, OverflowError) as exc:
        raise ConfigError(
            f"serve.bind: {bind!r} cannot be bound ({exc}): is another server running there? Set PRECOMPUTE_SERVE__BIND to another address"
        ) from exc


def _remove_dead_socket(path: Path) -> None:
    """Remove a socket file nobody listens on; one that is in use stays, and bind() then refuses."""
    if path.is_socket():
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()
