"""Launcher: starts the workers of a run and reports which of them ended: processes of this machine
here, actors of a Ray cluster in :mod:`precompute.jobs.run.shards.ray_launcher`.

It places and watches processes, and nothing more: what they compute goes through the view's root.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from precompute.engine.cores import share
from precompute.store.errors import PrecomputeError
from precompute.workers.process import ChildProcess, end_all, python_module

POLL_S = 0.05
"""How often a local process is looked at."""


@dataclass(frozen=True, slots=True)
class Order:
    """A worker to start.

    Args:
        argv: its command line.
        environment: variables beside those of where it is started.
        cpus: it wants.
        gpus: it wants.
        memory_mb: it wants; 0 where that is not known.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1
    gpus: float = 0
    memory_mb: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker that ended: its exit status, or None where it is not known, and the end of a
    sentence that begins with it."""

    status: int | None
    how: str


class Launcher(Protocol):
    """What starts workers."""

    def start(self, order: Order) -> None:
        """Start a worker, now or as soon as there is room for it.

        Raises:
            PrecomputeError: it cannot be started.
        """

    def wait(self, timeout_s: float) -> list[Ended]:
        """The workers that ended since the last call; waits for one at most so long."""

    def stop(self, grace_s: float) -> None:
        """End all that are left: a signal, and after the grace by force."""


class LocalLauncher:
    """Processes of this machine, each with cores and GPUs to itself as far as these go.

    Args:
        workers: at once, at most.
    """

    def __init__(self, workers: int) -> None:
        self._places = [share(number, workers) for number in range(workers)]
        self._processes: dict[int, ChildProcess] = {}
        """Place → the process that runs there."""

    def start(self, order: Order) -> None:
        place = next(n for n in range(len(self._places)) if n not in self._processes)
        # modules are found where the run finds them
        _, own = python_module("precompute")
        environment = own | dict(order.environment) | _gpus(place, int(order.gpus))
        try:
            process = ChildProcess(order.argv, output="captured", environment=environment)
            if self._places[place]:
                # before it has threads; it is gone already where that cannot be
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(process.pid, self._places[place])
        except OSError as exc:
            raise PrecomputeError(f"a worker cannot be started: {exc.strerror or exc}") from exc
        self._processes[place] = process

    def wait(self, timeout_s: float) -> list[Ended]:
        limit = time.monotonic() + timeout_s
        while True:
            places = [place for place, process in self._processes.items() if process.ended()]
            if places or time.monotonic() >= limit:
                break
            time.sleep(min(POLL_S, timeout_s))
        ended = [self._processes.pop(place) for place in places]
        return [Ended(process.status, _how(process)) for process in ended]

    def stop(self, grace_s: float) -> None:
        end_all([*self._processes.values()], grace_s)
        self._processes = {}


def _gpus(place: int, count: int) -> dict[str, str]:
    """The variable that shows a worker its GPUs alone; nothing where it wants none."""
    if not count:
        return {}
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    every = shown.split(",") if shown else [path.name.removeprefix("nvidia") for path in devices]
    own = [every[(place * count + n) % len(every)] for n in range(count)] if every else []
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _how(process: ChildProcess) -> str:
    words = process.last_words().removeprefix("precompute: ")
    return process.how_it_ended() + (f": {words}" if words else "")
