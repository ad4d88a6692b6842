"""Model group: the views of one model fingerprint share a process, which the supervisor keeps: it is replaced when it ends, hangs or takes too much memory."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.process.suspects import Suspects
from jobs.service.child import started
from jobs.service.kept_process import STILL_S, KeptProcess, Watch, watch_file
from precompute.workers.process import ChildProcess
from store.disk.spill_folder import sweep
from store.errors import ConfigError, PrecomputeError
from store.record import digest_of
from store.telemetry.instruments import Meter

SPINS = "10000"
"""Times that a compute thread looks for work before it sleeps, about 0.1 ms: longer than from one layer to the next. GNU's OpenMP has it look 300,000 times, for milliseconds in
which those that it waits for may have no core: beside busy processes on two cores one text took MiniLM 140 to 1,100 ms so, and 60 to 300 with this; of CPU 92 to 281 and 53 to 73."""

MEMORY_EVERY_S = 1.0
"""How often a process's memory is looked at."""

SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""Of a Unix socket's path, at most: ``sun_path`` without its last byte."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """``grace_s``: how much longer a call may take than its batch should. ``memory_mb``: of a process. ``duckdb_mb``: of each view's source."""

    grace_s: float
    memory_mb: int
    duckdb_mb: int


def socket_path(runtime: Path, model: str) -> Path:
    """Where the process of a model's fingerprint is reached: by a digest of it, since it is the online store that says what it is."""
    return runtime / f"{digest_of(model.encode())}.sock"


def check_runtime(runtime: Path) -> None:
    """Refuse a folder whose sockets could not be bound.

    Raises:
        ConfigError: its name is too long.
    """
    longest = len(os.fsencode(socket_path(runtime, "")))
    if longest > SOCKET_PATH_BYTES:
        raise ConfigError(
            f"a server's sockets lie in a folder of their own under {runtime.parent}, whose name is {longest - SOCKET_PATH_BYTES} bytes too long for "
            "that: point TMPDIR at a folder with a shorter one"
        )


class ModelGroup(KeptProcess):
    """The process of one model. Its socket is bound here and outlives it: who asks while it is started anew waits, and is answered when it is there.

    Args:
        model: the fingerprint.
        project: where it is and what it keeps, for :mod:`jobs.service.model_server`.
        runtime: folder for the socket.
        limits: beyond which it is killed.
        meter: counts how often it is replaced.
        number: which of the models that are live at a time; what it counts goes on under it.

    Raises:
        OSError: the system has no room for it.
    """

    def __init__(
        self, model: str, project: dict[str, Any], runtime: Path, limits: ModelLimits, meter: Meter, number: int = 0
    ) -> None:
        super().__init__("model", f"the process of model {model[:12]}", meter)
        self._model, self._views = model, set[str]()
        self.number, self._runtime = number, runtime
        self._project, self._limits = project | {"runtime": str(runtime), "process": f"model-{number}"}, limits
        self._path = socket_path(runtime, model)
        with contextlib.ExitStack() as unless_made:
            self._listener = unless_made.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            # of a life that had no room
            self._path.unlink(missing_ok=True)
            self._listener.bind(str(self._path))
            self._listener.listen(128)
            self._file = watch_file(self._path.with_suffix(".watch"))
            unless_made.callback(os.close, self._file)
            self._watch = Watch(self._file)
            unless_made.pop_all()
        self._suspects = Suspects()
        self.wanted_at = self._memory_at = time.monotonic()
        """When a worker last said that it has a view of this model."""

    def start(self) -> ChildProcess:
        self._suspects.add(self._watch.held(), time.monotonic())
        suspects = list(self._suspects.until().items())
        self._watch.begin()
        files = {"listener": self._listener.fileno(), "watch": self._file}
        spec = self._project | {"duckdb_mb": self._limits.duckdb_mb, "suspects": suspects} | files
        spins = os.environ.get("GOMP_SPINCOUNT", SPINS)
        return started("jobs.service.model_server", spec, files.values(), GOMP_SPINCOUNT=spins)

    def serves(self, views: Iterable[str]) -> None:
        """Some views of this model, by which people know it."""
        if not self._views.issuperset(views):
            self._views |= set(views)
            self.name = f"the process of model {self._model[:12]} ({', '.join(map(repr, sorted(self._views)))})"

    def judged(self, now: float) -> str | None:
        if now > self._watch.get() + self._limits.grace_s:
            return (
                f"was killed: a call took {self._limits.grace_s:g} s longer than a batch may; if its rows are that slow, "
                "raise its views' fallback.deadline, or serve.models.grace"
            )
        if self._watch.is_still(now):
            return f"was killed: it gave no sign of life for {STILL_S:g} s, with nothing to do"
        if now - self._memory_at > MEMORY_EVERY_S:
            self._memory_at = now
            assert self.process is not None
            if (taken_mb := memory_mb(self.process.pid)) > self._limits.memory_mb:
                return f"was killed: it took {taken_mb} MB of memory, of {self._limits.memory_mb}"
        return None

    def close(self) -> None:
        """Nobody reaches it from now on; the process was ended by its keeper, and had no time to clear up."""
        sweep()
        self._listener.close()
        os.close(self._file)
        # begun anew, it has nothing in hand, and takes nothing
        with contextlib.suppress(PrecomputeError):
            Meter(self._runtime, self._project["process"]).close()
        for path in (self._path, self._path.with_suffix(".watch")):
            path.unlink(missing_ok=True)


def memory_mb(pid: int) -> int:
    """Memory of a process that is its own or read from files, in MB; 0 where it cannot be told."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        pages = Path(f"/proc/{pid}/statm").read_text().split()
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20
    return 0


def machine_memory_mb() -> int:
    """Memory that this process's group may take, or the machine has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # no number where there is no limit
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // 2**20
