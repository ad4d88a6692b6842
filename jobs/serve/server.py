"""Server: ``precompute serve``: the supervisor, which starts and replaces the processes of the HTTP
API, lookup workers and model processes."""

from __future__ import annotations

import contextlib
import json
import logging
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from precompute.jobs.config.project import Project
from precompute.jobs.serve.processes import (
    DRAIN_S,
    HELD_UP_S,
    STILL_S,
    ModelGroup,
    ModelLimits,
    SupervisedProcess,
    machine_memory_mb,
)
from precompute.jobs.serve.remote_fallback import CONTROL, check_runtime
from precompute.store.account.checker import Rounds
from precompute.store.account.followers import follow
from precompute.store.answers.service import Service
from precompute.store.disk.sql import SpillFolder
from precompute.store.disk.storage import storage_of
from precompute.store.doors import TRACES
from precompute.store.errors import ConfigError, PrecomputeError
from precompute.store.http.guard.connections import Listener, tls_of, tokens_of
from precompute.store.http.routes import every_route
from precompute.store.http.telemetry.instruments import MODEL_SPARES, RESTARTS, Meter
from precompute.store.online.url import open_online_store
from precompute.workers.process import end_all

log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often the processes are checked."""

RETIRE_S = 120.0
"""A model that no worker has named as live for so long is not, and no request waits for it: its
processes are ended."""

MOST_MODELS = 64
"""Models that have processes at a time, at most; each takes memory."""

NO_ROOM_S = 5.0
"""Seconds before a model is given a process again, after the system had no room for one: no file,
no disk."""

MOST_QUICK_ENDS = 5
"""If every worker ended this many times in a row soon after its start, and none ever came up, the
server gives up: what they were given must be wrong."""

WORKER_WAIT_S = 5.0
"""Seconds before a worker is restarted, at most: where a request ends it, all others wait for the
next."""

DRAIN_STILL_S = 5.0
"""A worker whose loop stands still for so long, once it was signalled to end, answers no
request any more."""


class LookupWorker(SupervisedProcess):
    """A lookup worker, as the supervisor sees it. Its loop shows that it lives."""

    longest_wait_s = WORKER_WAIT_S

    def __init__(self, number: int, spec: dict[str, Any], meter: Meter) -> None:
        super().__init__(
            "worker",
            f"lookup worker {number}",
            "precompute.jobs.serve.lookup_worker",
            spec | {"number": number},
            Path(spec["runtime"]),
            meter,
        )
        self.has_come_up = False
        """Whether it ever gave a sign of life."""

    def judged(self, now: float) -> str | None:
        self.has_come_up |= self.watch.has_begun(now)
        if self.watch.is_still(now):
            return f"was killed: its loop stood still for {STILL_S:g} s"
        return None


class Supervisor:
    """Starts, checks and replaces the processes of a server. It is made and runs in the main
    thread, with which the processes end.

    Args:
        worker_spec: of each lookup worker; see :mod:`precompute.jobs.serve.lookup_worker`.
        model_spec: of each model process; see :mod:`precompute.jobs.serve.model_server`.
        limits: of each model process.
        workers: how many lookup workers.
    """

    def __init__(
        self,
        worker_spec: dict[str, Any],
        model_spec: dict[str, Any],
        limits: ModelLimits,
        workers: int = 1,
    ) -> None:
        self._runtime, self._limits = Path(worker_spec["runtime"]), limits
        self._model_spec = model_spec
        self._meter, self._figures_at = Meter(self._runtime, "supervisor"), 0.0
        for process in ("worker", "model"):
            for why in ("ended", "killed"):
                # reported as 0 before the first: Prometheus sees its increase then
                self._meter.counter(RESTARTS, process, why)
        self._workers = [
            LookupWorker(number, worker_spec, self._meter) for number in range(workers)
        ]
        self._groups: dict[str, ModelGroup] = {}
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._control.setblocking(False)
        self._control.bind(str(self._runtime / CONTROL))
        self._stopping: signal.Signals | None = None
        self._room_at = 0.0

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Have :meth:`run` finish what is at hand, and end, as on a signal; safe to call in its
        handler."""
        self._stopping = signal.Signals(number)

    def run(self) -> None:
        """Keep the processes until :meth:`stop`, then have the workers finish their requests, then
        end the models.

        Raises:
            PrecomputeError: no worker came up.
        """
        checked_at = time.monotonic()
        try:
            while self._stopping is None:
                self._read_control()
                now = time.monotonic()
                if now - checked_at > HELD_UP_S:
                    # paused itself, and the workers that name models with it
                    for group in self._groups.values():
                        group.wanted_at = now
                checked_at = now
                for each in self._all():
                    each.check(now)
                self._retire(now)
                if now >= self._figures_at:
                    self._figures_at = now + 1.0
                    self._meter.process_figures()
                    self._meter.gauge(MODEL_SPARES).set(
                        sum(group.spare.stands_by(now) for group in self._groups.values())
                    )
                if all(
                    worker.ends_quickly >= MOST_QUICK_ENDS and not worker.has_come_up
                    for worker in self._workers
                ):
                    raise PrecomputeError(
                        "no lookup worker comes up: what ended them is in the log above"
                    )
                select.select([self._control], [], [], TICK_S)
            began = time.monotonic()
            self._drain()
            log.info("ended by %s, after %.1f s", self._stopping.name, time.monotonic() - began)
        finally:
            self._end(self._all())
            self._control.close()

    def _all(self) -> list[LookupWorker | ModelGroup]:
        return [*self._workers, *self._groups.values()]

    def _read_control(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                model, *views = self._control.recv(4096).decode(errors="replace").split("\0")
                if model not in self._groups and time.monotonic() >= self._room_at:
                    self._make(model)
                if model in self._groups:
                    self._groups[model].wanted_at = time.monotonic()
                    self._groups[model].note_views(views)

    def _make(self, model: str) -> None:
        free = set(range(MOST_MODELS)) - {one.number for one in self._groups.values()}
        try:
            if not free:
                raise OSError(f"{MOST_MODELS} models have one")
            self._groups[model] = ModelGroup(
                model, self._model_spec, self._runtime, self._limits, self._meter, min(free)
            )
        except OSError as exc:
            self._room_at = time.monotonic() + NO_ROOM_S
            log.error(
                "no process for model %s: %s; its rows are missing until there is room",
                model[:12],
                exc,
            )

    def _retire(self, now: float) -> None:
        for model, group in list(self._groups.items()):
            if now - group.wanted_at > RETIRE_S:
                log.info("%s is ended: its model is live no more", group.name)
                self._end([self._groups.pop(model)])

    def _drain(self) -> None:
        """Have the workers end once their requests are answered; the models go on meanwhile."""
        ending = {worker: worker.process for worker in self._workers if worker.process is not None}
        for process in ending.values():
            process.signal(signal.SIGTERM)
        since = checked_at = time.monotonic()
        limit, held_up = since + DRAIN_S + DRAIN_STILL_S, False
        while any(not process.ended() for process in ending.values()):
            now = time.monotonic()
            if now - checked_at > HELD_UP_S:
                # paused itself, and the workers with it: they can show first that they live
                since = now
                # once, or one that is held up again and again would never reach its limit
                limit = limit if held_up else now + DRAIN_S + DRAIN_STILL_S
                held_up = True
            checked_at = now
            if now > limit:
                return
            for worker, process in ending.items():
                if not process.ended() and now - max(since, worker.watch.alive_at) > DRAIN_STILL_S:
                    log.error(
                        "%s was ordered to end, and its loop stood still for %g s: it is killed",
                        worker.name,
                        DRAIN_STILL_S,
                    )
                    process.signal(signal.SIGKILL)
            self._read_control()
            for group in self._groups.values():
                group.check(now)
            select.select([self._control], [], [], TICK_S)

    def _end(self, all_of: Sequence[LookupWorker | ModelGroup]) -> None:
        """Kill what is left of these: they have nothing that must be saved."""
        end_all([process for one in all_of for process in one.running()], grace_s=0.2, kill_s=5.0)
        for one in all_of:
            one.close()


def serve(project: Project, announce: Callable[[str], None], workers: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests at hand.

    Args:
        project: the configuration.
        announce: called with the address once it is bound.
        workers: how many processes answer; as the project says by default.

    Raises:
        ConfigError: an address cannot be bound, or is open to strangers; the files of tokens or TLS
            cannot be used; a route of another package cannot; or ``TMPDIR`` has too long a name.
        PrecomputeError: no worker comes up.
    """
    settings = project.settings.serve
    with contextlib.ExitStack() as stack:
        access = _access(project)
        # of other packages, too: a mistake of one reaches the operator
        every_route()
        addresses = {"serve.bind": settings.bind, "serve.admin": settings.admin}
        tls = settings.tls
        guarded = settings.tokens is not None or (tls is not None and tls.client_ca is not None)
        listeners = []
        for key, address in addresses.items():
            if address is not None:
                listeners.append(
                    Listener(key, address, project.home, guarded=guarded, tls=tls is not None)
                )
                stack.callback(listeners[-1].close)
        runtime = stack.enter_context(contextlib.closing(SpillFolder()))
        check_runtime(runtime.path)
        shared = {
            "online": project.online,
            "root": str(project.root),
            "miss_cache": settings.miss_cache.model_dump(),
        }
        worker = {
            **shared,
            "runtime": str(runtime.path),
            "listeners": [one.socket.fileno() for one in listeners],
            **access,
            **_observing(project),
            "hosts": settings.hosts,
            "limits": asdict(settings.limits.limits()),
            "caching": asdict(settings.caching()),
            "cache_bytes": settings.cache_mb * 2**20,
            "services": str(_services_file(project, runtime.path)),
        }
        models = settings.models
        limits = ModelLimits(
            models.grace,
            models.memory_mb or machine_memory_mb() // 2,
            duckdb_mb=max(64, project.settings.memory_mb // 4),
            spares={name: view.fallback.spare for name, view in project.views.items()},
        )
        supervisor = Supervisor(
            worker,
            shared | {"folder": str(project.home), "traces": worker["traces"]},
            limits,
            workers or settings.workers,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: supervisor.stop(number))
        _look_after(project, stack)
        announce(listeners[0].shown)
        supervisor.run()


def _look_after(project: Project, stack: contextlib.ExitStack) -> None:
    """Follow the root where that is elsewhere, and compare what is served, until the stack ends."""
    online = partial(open_online_store, project.online)
    restore_files = None
    for follower in follow(project.offline, online, project.names):
        stack.callback(follower.stop)
        restore_files = restore_files or follower.restore_files
    if restore_files is not None or storage_of(project.root).local:
        # where root and store are both elsewhere, a look reads all rows: the scheduler looks
        rounds = Rounds(project.offline, online, project.names, mend=restore_files)
        stack.callback(rounds.stop)


def _services_file(project: Project, runtime: Path) -> Path:
    """What the workers serve by ``/v1/services``, in a file: a pipe may be too small. Mistakes are
    logged, and do not stop the rest from being served."""
    for line in project.service_mistakes():
        log.warning("%s", line)
    path, services = runtime / "services.json", project.services.values()
    path.write_text(json.dumps([one.to_json() for one in services if isinstance(one, Service)]))
    return path


def _access(project: Project) -> dict[str, Any]:
    """What the workers are given of tokens and TLS, tried here first, so that a mistake reaches the
    operator.

    Raises:
        ConfigError: a file cannot be used.
    """
    settings, home = project.settings.serve, project.home
    tls = settings.tls
    files = (
        None
        if tls is None
        else {name: str(home / path) for name, path in tls.model_dump().items() if path is not None}
    )
    tokens = settings.tokens_file(home)
    access = {"tokens": None if tokens is None else str(tokens), "tls": files}
    tokens_of(access)
    tls_of(access)
    return access


def _observing(project: Project) -> dict[str, Any]:
    """What the workers are given of logs and traces, tried here first.

    Raises:
        ConfigError: the log cannot be written, or the extra is not installed.
    """
    settings = project.settings.serve
    access_log = settings.access_log
    if access_log is not None and access_log != "-":
        access_log = str(project.home / access_log)
        try:
            Path(access_log).open("ab").close()
        except OSError as exc:
            raise ConfigError(f"serve.access_log: {access_log} cannot be written: {exc}") from exc
    for keys in settings.powers:
        keys.preflight(None)
    given = {name: of for keys in settings.powers for name, of in keys.spec().items()}
    return {
        "access_log": access_log,
        "server_timing": settings.server_timing,
        "traces": {name: of for name, of in given.items() if TRACES.has(name)},
    }
