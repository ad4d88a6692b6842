"""Serve: the HTTP API over a project's online store, by processes that a supervisor keeps."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from precompute.jobs.config.project import Project
from precompute.jobs.service.model_group import ModelLimits, check_runtime, machine_memory_mb
from precompute.jobs.service.supervisor import Supervisor
from precompute.store.account.rounds import Rounds
from precompute.store.disk.spill_folder import SpillFolder
from precompute.store.errors import ConfigError
from precompute.store.guard.access import tls_of, tokens_of
from precompute.store.guard.listener import Listener
from precompute.store.online_url import open_online_store


def serve(project: Project, announce: Callable[[str], None], workers: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests at hand.

    Args:
        project: the configuration.
        announce: told the address once it is bound.
        workers: how many processes answer; as the project says by default.

    Raises:
        ConfigError: an address cannot be bound, or is open to strangers; the files of tokens or TLS cannot be used; or ``TMPDIR`` has too long a name.
        PrecomputeError: no worker comes up.
    """
    settings = project.settings.serve
    with contextlib.ExitStack() as stack:
        access = _access(project)
        addresses = {"serve.bind": settings.bind, "serve.admin": settings.admin}
        tls = settings.tls
        guarded = settings.tokens is not None or (tls is not None and tls.client_ca is not None)
        listeners = []
        for key, address in addresses.items():
            if address is not None:
                listeners.append(Listener(key, address, project.home, guarded=guarded, tls=tls is not None))
                stack.callback(listeners[-1].close)
        runtime = stack.enter_context(contextlib.closing(SpillFolder()))
        check_runtime(runtime.path)
        shared = {"online": project.online, "root": str(project.root), "kept": settings.kept.model_dump()}
        worker = {
            **shared,
            "runtime": str(runtime.path),
            "listeners": [one.socket.fileno() for one in listeners],
            **access,
            **_watching(project),
            "hosts": settings.hosts,
            "limits": asdict(settings.limits.limits()),
            "caching": asdict(settings.caching()),
            "cache_bytes": settings.cache_mb * 2**20,
        }
        models = settings.models
        limits = ModelLimits(
            models.grace,
            models.memory_mb or machine_memory_mb() // 2,
            duckdb_mb=max(64, project.settings.memory_mb // 4),
            spares={name: view.fallback.spare for name, view in project.views.items()},
        )
        supervisor = Supervisor(
            worker, shared | {"folder": str(project.home), "tracing": worker["tracing"]}, limits, workers or settings.workers
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: supervisor.stop(number))
        rounds = Rounds(project.offline, partial(open_online_store, project.online), project.names)
        stack.callback(rounds.stop)
        announce(listeners[0].shown)
        supervisor.run()


def _access(project: Project) -> dict[str, Any]:
    """What the workers are told of tokens and TLS, tried here, where a mistake is told to who made it.

    Raises:
        ConfigError: a file cannot be used.
    """
    settings, home = project.settings.serve, project.home
    tls = settings.tls
    files = None if tls is None else {name: str(home / path) for name, path in tls.model_dump().items() if path is not None}
    tokens = settings.tokens_file(home)
    access = {"tokens": None if tokens is None else str(tokens), "tls": files}
    tokens_of(access)
    tls_of(access)
    return access


def _watching(project: Project) -> dict[str, Any]:
    """What the workers are told of logs and traces, tried here.

    Raises:
        ConfigError: the log cannot be written, or the extra is not installed.
    """
    settings = project.settings.serve
    log, tracing = settings.access_log, settings.tracing
    if log is not None and log != "-":
        log = str(project.home / log)
        try:
            Path(log).open("ab").close()
        except OSError as exc:
            raise ConfigError(f"serve.access_log: {log} cannot be written: {exc}") from exc
    if tracing is not None and find_spec("opentelemetry") is None:
        raise ConfigError("serve.tracing: OpenTelemetry is not installed: pip install 'precompute-store[otel]'")
    return {
        "access_log": log,
        "server_timing": settings.server_timing,
        "tracing": None if tracing is None else tracing.model_dump(),
    }
