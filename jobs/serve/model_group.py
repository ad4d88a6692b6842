"""Model group: the process that serves one model fingerprint, for all of its views, and a spare:
the supervisor replaces what ends, hangs or takes too much memory, by the spare if there is one."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from precompute.engine.resources import available_bytes
from precompute.jobs.serve.remote_fallback import socket_path
from precompute.jobs.serve.supervised_process import STATUS_RESTART, STILL_S, SupervisedProcess
from precompute.store.disk.sql import sweep
from precompute.store.errors import PrecomputeError
from precompute.store.http.telemetry.instruments import Meter
from precompute.store.times import doubled_s
from precompute.workers.process import ChildProcess

log = logging.getLogger(__name__)

MEMORY_EVERY_S = 1.0
"""How often a process's memory is read."""

SPARE_AFTER_S = 10.0
"""A server that has just begun has other things to load before processes that stand by."""

SPARE_ROOM = 3
"""With ``fallback.spare: auto`` a spare is started where this many times the memory of the process
that serves is free, and ended where less than that memory is."""

BARRED_S, LONGEST_BARRED_S = 60.0, 3600.0
"""How long a row is barred after a process ended while it computed that row alone; twice as long
each time that it happens again."""

TRIALS, TRIALS_S = 3, 60.0
"""After this many trials that ended a process within so long, no suspect is tried until as long
after the first of them."""

MOST_SUSPECTS = 1024
"""Rows that are remembered, the latest."""


class Suspects:
    """Rows, by their hashes, that a process was computing when it ended. Each is tried alone before
    it is computed among others again; one that a process ended with alone is barred. Times are
    :func:`time.monotonic`."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, float]] = {}
        """Row → how often a process ended with it alone, and until when it is barred."""
        self._trials: deque[float] = deque(maxlen=TRIALS)
        """When the latest trials ended a process."""

    def add(self, rows: Collection[int], now: float) -> None:
        """A process ended with these in its hands."""
        for row in rows:
            known = row in self._known
            times, until = self._known.pop(row, (0, now))
            if len(rows) == 1:
                times, until = times + 1, now + doubled_s(BARRED_S, times, LONGEST_BARRED_S)
                if known:
                    self._trials.append(now)
            self._known[row] = times, until
        while len(self._known) > MOST_SUSPECTS:
            self._known.pop(next(iter(self._known)))

    def until(self) -> dict[int, float]:
        """Each of them, and from when on it may be tried, alone."""
        ended_enough = len(self._trials) == TRIALS and self._trials[-1] - self._trials[0] < TRIALS_S
        none_before = self._trials[0] + TRIALS_S if ended_enough else 0.0
        return {row: max(until, none_before) for row, (_, until) in self._known.items()}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """How long a model's process may take and how large it may get.

    ``grace_s``: how much longer a call may take than its batch should. ``memory_mb``: of a process.
    ``duckdb_mb``: of each view's source. ``spares``: views' ``fallback.spare``.
    """

    grace_s: float
    memory_mb: int
    duckdb_mb: int
    spares: Mapping[str, bool | Literal["auto"]] = field(default_factory=dict)


class ModelProcess(SupervisedProcess):
    """One of a model's two processes: it serves, or stands by with the same views open until the
    other one has ended."""

    def __init__(
        self, spec: Mapping[str, Any], runtime: Path, limits: ModelLimits, meter: Meter
    ) -> None:
        super().__init__("model", "", "precompute.jobs.serve.model_server", spec, runtime, meter)
        self._limits, self._memory_at = limits, time.monotonic()

    def stands_by(self, now: float) -> bool:
        """Whether it could take over at once."""
        return self.process is not None and self.watch.has_begun(now) and self.watch.is_open

    def was_at_work(self) -> bool:
        return self.watch.done_by < math.inf and bool(self.watch.held())

    def judged(self, now: float) -> str | None:
        if now > self.watch.done_by + self._limits.grace_s:
            return (
                f"was killed: a call took {self._limits.grace_s:g} s longer than a batch may; if"
                " its rows are that slow, raise its views' fallback.deadline, or"
                " serve.models.grace"
            )
        if self.watch.is_still(now):
            return f"was killed: it gave no sign of life for {STILL_S:g} s, with nothing to do"
        if self.process is not None and now - self._memory_at > MEMORY_EVERY_S:
            self._memory_at = now
            if (taken_mb := memory_mb(self.process.pid)) > self._limits.memory_mb:
                return f"was killed: it took {taken_mb} MB of memory, of {self._limits.memory_mb}"
        return None


class ModelGroup:
    """The processes of one model: one serves, and where there is room another one stands by. Its
    socket is bound here and outlives them: a request that comes while none serves waits until one
    does.

    Args:
        model: the fingerprint.
        spec: of its processes, for :mod:`precompute.jobs.serve.model_server`.
        runtime: folder for the socket.
        limits: of its processes.
        meter: counts how often they are replaced.
        number: which of the models that are live at a time; what it counts goes on under it.

    Raises:
        OSError: the system has no room for it.
    """

    def __init__(
        self,
        model: str,
        spec: dict[str, Any],
        runtime: Path,
        limits: ModelLimits,
        meter: Meter,
        number: int = 0,
    ) -> None:
        self._model, self._views = model, set[str]()
        self.number, self._runtime, self._limits = number, runtime, limits
        self._path = path = socket_path(runtime, model)
        self._suspects = Suspects()
        with contextlib.ExitStack() as unless_made:
            self._listener = unless_made.enter_context(socket.socket(socket.AF_UNIX))
            # of one that had no room
            path.unlink(missing_ok=True)
            self._listener.bind(str(path))
            self._listener.listen(128)
            spec = spec | {
                "runtime": str(runtime),
                "duckdb_mb": limits.duckdb_mb,
                "open": str(path.with_suffix(".open")),
                "listeners": [self._listener.fileno()],
            }
            self.serving, self.spare = (
                ModelProcess(spec | {"process": name}, runtime, limits, meter)
                for name in self._counted()
            )
            unless_made.pop_all()
        self._assign()
        self.wanted_at = time.monotonic()
        """When a worker last said that it has a view of this model."""
        self._spare_from, self._room_at, self._has_room = math.inf, 0.0, False

    def note_views(self, views: Iterable[str]) -> None:
        """Note names of views of this model, for messages."""
        self._views |= set(views)
        self._assign()

    @property
    def name(self) -> str:
        """The group's name for people."""
        views = f" ({', '.join(map(repr, sorted(self._views)))})" if self._views else ""
        return f"the process of model {self._model[:12]}{views}"

    def check(self, now: float) -> None:
        """As :meth:`SupervisedProcess.check`, of both; where the one that serves has ended, the
        other one does from now on."""
        was_there = self.serving.process is not None
        self.serving.check(now)
        if was_there and self.serving.process is None:
            self._replace(now)
        if self._spare_from == math.inf and self.serving.watch.is_open:
            self._spare_from = now + SPARE_AFTER_S
        is_due = now >= self._spare_from and self._wants_spare(now)
        if is_due:
            self.spare.check(now)
        elif self.spare.process is not None:
            log.info("%s is ended: there is no room for it any more", self.spare.name)
            self.spare.end()
        self.serving.watch.may_try_suspects = not is_due or self.spare.stands_by(now)

    def running(self) -> list[ChildProcess]:
        """Both processes, as far as they are there."""
        return self.serving.running() + self.spare.running()

    def close(self) -> None:
        """Close the socket: no request reaches it from now on; the processes were ended before, and
        had no time to clear up."""
        sweep()
        self._listener.close()
        for one in (self.serving, self.spare):
            one.close()
        # opened once more, their counters report nothing in hand and no memory
        for name in self._counted():
            with contextlib.suppress(PrecomputeError):
                Meter(self._runtime, name).close()
        for path in self._runtime.glob(f"{self._path.stem}.*"):
            path.unlink(missing_ok=True)

    def _counted(self) -> tuple[str, str]:
        """Under which names they count."""
        return f"model-{self.number}", f"model-{self.number}-2"

    def _replace(self, now: float) -> None:
        """Replace the process that served and has ended: the rows it had in hand are suspect, and
        the other one serves, if it has been begun."""
        held = self.serving.watch.held()
        self._suspects.add(held, now)
        if held:
            log.error(
                "%s had %d rows in its hands: each is tried alone, when another one stands by",
                self.name,
                len(held),
            )
        if self.serving.status == STATUS_RESTART:
            # the spare has loaded the same old files
            self.spare.end()
        elif self.spare.process is not None:
            self.serving, self.spare = self.spare, self.serving
            log.info("%s: the one that stood by serves", self.name)
            self.serving.tell({"suspects": self._assign()})
            return
        self._assign()

    def _assign(self) -> list[tuple[int, float]]:
        """Note what each process is from now on, and what it must know when it is started; returns
        the suspects, and from when on each may be tried."""
        suspects = list(self._suspects.until().items())
        for one in (self.serving, self.spare):
            one.spec |= {"serves": one is self.serving, "suspects": suspects}
        self.serving.name, self.spare.name = self.name, f"{self.name}, standing by,"
        return suspects

    def _wants_spare(self, now: float) -> bool:
        wishes = {self._limits.spares.get(view, "auto") for view in self._views}
        if True in wishes or "auto" not in wishes:
            return True in wishes
        if now >= self._room_at and self.serving.process is not None:
            self._room_at = now + MEMORY_EVERY_S
            taken_mb, free_mb = memory_mb(self.serving.process.pid), available_bytes() // 2**20
            room = 1 if self.spare.process is not None else SPARE_ROOM
            self._has_room = free_mb > taken_mb * room and not _has_gpu()
        return self._has_room


def memory_mb(pid: int) -> int:
    """Memory of a process that is its own or read from files, in MB; 0 where it cannot be known."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        pages = Path(f"/proc/{pid}/statm").read_text().split()
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20
    return 0


def _has_gpu() -> bool:
    """Whether there is a GPU, whose memory a process's own figure leaves out."""
    return any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd"))


def machine_memory_mb() -> int:
    """Memory that this process's control group may take, or the machine has if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # no number where there is no limit
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // 2**20
