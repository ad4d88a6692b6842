"""Serve: the HTTP API over a project's online store, by processes that a supervisor keeps."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import asdict

from jobs.config.project import Project
from jobs.service.listener import Listener
from jobs.service.model_group import ModelLimits, machine_memory_mb
from jobs.service.supervisor import Supervisor
from store.disk.spill_folder import SpillFolder


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
    settings = project.settings.serve
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(Listener(project, "serve.bind", settings.bind)))
        runtime = stack.enter_context(contextlib.closing(SpillFolder()))
        worker = {
            "online": project.online,
            "root": str(project.root),
            "runtime": str(runtime.path),
            "listeners": [listener.socket.fileno()],
            "limits": asdict(settings.limits.limits()),
        }
        models = settings.models
        limits = ModelLimits(
            models.grace, models.memory_mb or machine_memory_mb() // 2, duckdb_mb=max(64, project.settings.memory_mb // 4)
        )
        kept = {"root": str(project.root), "folder": str(project.home)}
        supervisor = Supervisor(worker, kept, limits, workers or settings.workers)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.stop())
        announce(listener.shown)
        supervisor.run()
