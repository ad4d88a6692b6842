"""Launcher: starts a run's shard workers, as processes of this machine or as a power does it that
``engine.on`` names, and reports which of them ended.

A launcher watches processes, and nothing more: what they compute goes through the view's root.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from precompute.engine.resources import share_of_cpus
from precompute.jobs.config.project import PLACES, EngineConfig
from precompute.store.doors import LAUNCHERS
from precompute.store.errors import PrecomputeError
from precompute.workers.process import ChildProcess, end_all, python_module

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
        return [WorkerExit(process.status, process.how_it_ended()) for process in ended]

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


def launcher_of(engine: EngineConfig, workers: int) -> Launcher:
    """The launcher of a run's workers.

    Raises:
        ConfigError: what it needs is not installed, or does not answer.
    """
    if engine.on in PLACES:
        return LocalLauncher(workers)
    launcher: Launcher = LAUNCHERS.open(engine.on)(engine, workers)
    return launcher
