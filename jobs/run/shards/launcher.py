"""Launcher: starts a run's shard workers, as processes of this machine or as actors of a Ray
cluster, and reports which of them ended.

Ray places an actor where there is room, and adds machines where its autoscaler may. A launcher
watches processes, and nothing more: what they compute goes through the view's root.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from precompute.engine.resources import share_of_cpus
from precompute.jobs.config.project import EngineConfig
from precompute.store.errors import ConfigError, PrecomputeError
from precompute.workers.process import ChildProcess, end_all, python_module

REACHED_S = 5.0
"""How long the cluster's address is tried."""
LAST_WORDS_BYTES = 2000
"""Bytes of a worker's stderr that are kept for its last line."""
POLL_S = 0.05
"""How often a local process is looked at."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A worker to start.

    Args:
        argv: its command line.
        environment: variables beside those of where it is started.
        cpus: CPUs it needs.
        gpus: GPUs it needs.
        memory_mb: memory it needs; 0 where that is not known.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1
    gpus: float = 0
    memory_mb: int = 0


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended."""

    status: int | None
    """Its exit status; None where that is not known."""
    how: str
    """Predicate for a message, as "exited with status 1"."""


class Launcher(Protocol):
    """What starts workers."""

    def start(self, request: WorkerRequest) -> None:
        """Start a worker, now or as soon as there is room for it.

        Raises:
            PrecomputeError: it cannot be started.
        """

    def wait(self, timeout_s: float) -> list[WorkerExit]:
        """The workers that ended since the last call; waits for one at most so long."""

    def stop(self, grace_s: float) -> None:
        """End all that are left: a signal, and after the grace by force."""


class LocalLauncher:
    """Processes of this machine, each with cores and GPUs to itself as far as these go.

    Args:
        workers: at once, at most.
    """

    def __init__(self, workers: int) -> None:
        self._slots = [share_of_cpus(number, workers) for number in range(workers)]
        self._processes: dict[int, ChildProcess] = {}
        """Slot → the process that runs in it."""

    def start(self, request: WorkerRequest) -> None:
        slot = next(n for n in range(len(self._slots)) if n not in self._processes)
        # modules are found where the run finds them
        _, own = python_module("precompute")
        environment = own | dict(request.environment) | _gpus(slot, int(request.gpus))
        try:
            process = ChildProcess(request.argv, output="captured", environment=environment)
            if self._slots[slot]:
                # before it has threads; it is gone already where that cannot be
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(process.pid, self._slots[slot])
        except OSError as exc:
            raise PrecomputeError(f"a worker cannot be started: {exc.strerror or exc}") from exc
        self._processes[slot] = process

    def wait(self, timeout_s: float) -> list[WorkerExit]:
        limit = time.monotonic() + timeout_s
        while True:
            slots = [slot for slot, process in self._processes.items() if process.ended()]
            if slots or time.monotonic() >= limit:
                break
            time.sleep(min(POLL_S, timeout_s))
        ended = [self._processes.pop(slot) for slot in slots]
        return [WorkerExit(process.status, _exit_text(process)) for process in ended]

    def stop(self, grace_s: float) -> None:
        end_all([*self._processes.values()], grace_s)
        self._processes = {}


def _gpus(slot: int, count: int) -> dict[str, str]:
    """The variable that shows a worker its GPUs alone; nothing where it needs none."""
    if not count:
        return {}
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    every = shown.split(",") if shown else [path.name.removeprefix("nvidia") for path in devices]
    own = [every[(slot * count + n) % len(every)] for n in range(count)] if every else []
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _exit_text(process: ChildProcess) -> str:
    words = process.last_words().removeprefix("precompute: ")
    return process.how_it_ended() + (f": {words}" if words else "")


class RayLauncher:
    """Actors of the cluster that ``RAY_ADDRESS`` names, or else of the one that this machine is a
    node of. Who may connect is the cluster's to say (``RAY_AUTH_MODE=token``).

    An actor starts the command that anyone can start by hand, and dies with it; Ray restarts none
    (``max_restarts`` is 0: while one restarts, each call of it fails at once), since the run starts
    another one.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """

    def __init__(self) -> None:
        # read when Ray is imported
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        try:
            import ray
        except ImportError as exc:
            raise ConfigError(
                "engine.on is ray, and Ray is not installed: pip install 'precompute-store[ray]'"
            ) from exc
        self._ray: Any = ray
        self._errors: Any = ray.exceptions
        self._own = not ray.is_initialized()
        if self._own:
            address = os.environ.get("RAY_ADDRESS", "auto")
            try:
                _check_reachable(address)
                ray.init(address=address, log_to_driver=False)
            except (OSError, ValueError, RuntimeError, self._errors.RayError) as exc:
                raise ConfigError(
                    f"engine.on is ray, and no cluster can be reached ({_line(exc)}): start one,"
                    " `ray start --head`, or name it in RAY_ADDRESS; its token is RAY_AUTH_TOKEN"
                ) from exc
        self._actors: dict[Any, tuple[Any, Any]] = {}
        """What a worker's end is known by → its actor, and what is known of its having begun."""

    def start(self, request: WorkerRequest) -> None:
        options: dict[str, Any] = {"num_cpus": request.cpus, "num_gpus": request.gpus}
        if request.memory_mb:
            options["memory"] = request.memory_mb * 2**20
        try:
            actor: Any = self._ray.remote(_RayActor).options(max_restarts=0, **options).remote()
            begun = actor.ping.remote()
            done = actor.run.remote([*request.argv], dict(request.environment), os.getcwd())
        except self._errors.RayError as exc:
            raise PrecomputeError(f"Ray starts no worker: {_line(exc)}") from exc
        self._actors[done] = actor, begun

    def wait(self, timeout_s: float) -> list[WorkerExit]:
        if not self._actors:
            time.sleep(timeout_s)
            return []
        done, _ = self._ray.wait([*self._actors], num_returns=1, timeout=timeout_s)
        return [self._ended(one) for one in done]

    def stop(self, grace_s: float) -> None:
        # one that the cluster has no room for has nothing to end
        begun = [begun for _, begun in self._actors.values()]
        there = set(self._ray.wait(begun, num_returns=len(begun), timeout=0)[0]) if begun else set()
        ending = [done for done, (_, begun) in self._actors.items() if begun in there]
        for done in ending:
            self._actors[done][0].end.remote()
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=grace_s)
        for actor, _ in self._actors.values():
            with contextlib.suppress(self._errors.RayError):
                self._ray.kill(actor)
        self._actors = {}
        if self._own:
            self._ray.shutdown()

    def _ended(self, done: Any) -> WorkerExit:
        actor, _ = self._actors.pop(done)
        try:
            status, words = self._ray.get(done)
            ended = WorkerExit(
                status, f"exited with status {status}" + (f": {words}" if words else "")
            )
        except self._errors.RayActorError as exc:
            ended = WorkerExit(None, f"is gone, with its actor or its node ({_line(exc)})")
        except self._errors.RayError as exc:
            ended = WorkerExit(None, f"was not started: {_line(exc)}")
        with contextlib.suppress(self._errors.RayError):
            self._ray.kill(actor)
        return ended


class _RayActor:
    """Runs a worker's command on a node of the cluster."""

    def __init__(self) -> None:
        self._process: Any = None

    async def run(self, argv: list[str], environment: dict[str, str], folder: str) -> Any:
        """Start the command, and wait for its end: its status, and the last line of its stderr."""
        import asyncio

        process = await asyncio.create_subprocess_exec(
            *argv,
            env=os.environ | environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._process = process
        tail = b""
        assert process.stderr is not None
        while data := await process.stderr.read(65536):
            tail = (tail + data)[-LAST_WORDS_BYTES:]
        lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
        words = lines[-1].strip().removeprefix("precompute: ") if lines else ""
        return await process.wait(), words

    async def ping(self) -> None:
        """It was placed, and answers."""

    async def end(self) -> None:
        """Have the process end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), REACHED_S).close()


def _line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(exc).__name__


def launcher_of(engine: EngineConfig, workers: int) -> Launcher:
    """The launcher of a run's workers.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    return RayLauncher() if engine.on == "ray" else LocalLauncher(workers)
