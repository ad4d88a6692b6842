"""Processes of a server: each is watched, killed when it hangs, and restarted whenever it ends; one
model fingerprint has a group of two, for all of its views: one serves, and a spare takes its place
when it ends, hangs or takes too much memory."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from precompute.engine.resources import available_bytes
from precompute.jobs.run.command_process import log_to_stderr
from precompute.jobs.serve.remote_fallback import socket_path
from precompute.store.answers.answer import MAX_DEADLINE_S
from precompute.store.disk.durable_file import allocate
from precompute.store.disk.sql import sweep
from precompute.store.errors import PrecomputeError
from precompute.store.http.telemetry.instruments import RESTARTS, Meter
from precompute.store.times import doubled_s
from precompute.workers.process import (
    KILL_S,
    ChildProcess,
    end_all,
    end_in_words,
    python_module,
    read_message,
    take_pipes,
    write_frame,
)

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.1
"""Seconds before a process that ended is restarted; twice as long each time it ends again soon."""

LONGEST_WAIT_S = 30.0

STEADY_S = 60.0
"""A process that ran for longer than this is restarted after the shortest wait."""

PULSE_S = 1.0
"""How often a process gives a sign of life, at least."""

STILL_S = 15.0
"""A process that gave no sign of life for so long, and has no task that allows it, would answer no
request: something holds Python's lock, or its loop, or has stopped it."""

START_S = 600.0
"""Seconds that a process has until its first sign of life: its libraries may come from a cold
disk."""

HELD_UP_S = 3.0
"""A supervisor whose checks are further apart than this was paused itself, as in a paused
container; for so long afterwards it kills nothing: its processes can show first that they live."""

STATUS_RESTART = 75
"""Exit status of a process that wants to be restarted, and has logged why."""

MOST_HELD = 64
"""Rows in hand that a watch has room for; further ones are not noted."""

DRAIN_S = MAX_DEADLINE_S + 1
"""How long the requests at hand may take once a server was ordered to end: no request's deadline is
further off."""


class Watch(ctypes.Structure):
    """What a process and the supervisor share, in memory that both have: one that keeps
    Python's lock for itself can send nothing. Times are :func:`time.monotonic`."""

    _fields_ = (
        ("done_by", ctypes.c_double),
        ("alive_at", ctypes.c_double),
        ("is_open", ctypes.c_bool),
        ("may_try_suspects", ctypes.c_bool),
        ("_held", ctypes.c_uint64),
        ("_rows", ctypes.c_uint64 * MOST_HELD),
    )
    done_by: float
    """When it should be done with its task; infinity while it is idle."""
    alive_at: float
    """When it last showed that it lives; before that, until when it may take to do so first."""
    is_open: bool
    """Whether it could answer at once."""
    may_try_suspects: bool
    """Whether the supervisor lets it compute suspects: a spare stands by, or none is to come."""

    @classmethod
    def of(cls, descriptor: int) -> Watch:
        """The record in a file of :data:`WATCH_BYTES`."""
        return cls.from_buffer(mmap.mmap(descriptor, WATCH_BYTES))

    def begin(self) -> None:
        """Forget the process before: another one is about to be started."""
        self.set(math.inf, ())
        self.is_open = self.may_try_suspects = False
        self.alive_at = time.monotonic() + START_S

    def set(self, done_by: float, rows: Collection[int] | None = None) -> None:
        """Note when the process should be done, and which rows (by their hashes) are in hand from
        now on; None: those that were."""
        self.beat()
        if rows is not None:
            self._held = min(len(rows), MOST_HELD)
            self._rows[: self._held] = list(rows)[:MOST_HELD]
        self.done_by = done_by

    def held(self) -> list[int]:
        """The rows that are in hand, or were as the process ended."""
        rows: list[int] = self._rows[: self._held]
        return rows

    def beat(self) -> None:
        """Show that the process lives."""
        self.alive_at = time.monotonic()

    def pulse(self) -> NoReturn:
        """Show that it lives, again and again."""
        while True:
            self.beat()
            time.sleep(PULSE_S)

    def has_begun(self, now: float) -> bool:
        """Whether the process has shown that it lives since it was started."""
        return self.alive_at <= now

    def is_still(self, now: float) -> bool:
        """Whether it has shown nothing for too long, while it has nothing to do."""
        return self.done_by == math.inf and now - self.alive_at > STILL_S


WATCH_BYTES = ctypes.sizeof(Watch)


class SupervisedProcess:
    """A process that is supervised, from the first :meth:`check` on. All of it is called in one
    thread, which must live as long as the process: on Linux that ends with it.

    Args:
        kind: what it is, ``worker`` or ``model``.
        name: which of them, for people.
        module: whose ``main()`` it runs.
        spec: plain JSON, with the descriptors ``listeners``, which :func:`read_spec` returns in the
            process; ``watch`` is added here. A process that is started later reads what it has
            then.
        runtime: folder for what it shows of itself.
        meter: counts how often it is replaced.

    Raises:
        OSError: there is no room for it.
    """

    longest_wait_s = LONGEST_WAIT_S
    """Seconds before it is restarted, at most."""

    def __init__(
        self,
        kind: str,
        name: str,
        module: str,
        spec: Mapping[str, Any],
        runtime: Path,
        meter: Meter,
    ) -> None:
        self.name, self._kind, self._module, self._meter = name, kind, module, meter
        self._file = tempfile.TemporaryFile(dir=runtime)  # noqa: SIM115
        allocate(self._file.fileno(), WATCH_BYTES)
        self.watch = Watch.of(self._file.fileno())
        self.spec = {**spec, "watch": self._file.fileno()}
        self.process: ChildProcess | None = None
        self.status: int | None = None
        """Exit status of the process that ended last."""
        self.ends_quickly = 0
        """How often in a row it has ended soon after it was started."""
        self._started_at = self._start_at = self._judged_from = -math.inf
        self._checked_at = self._killed_at = math.inf
        self._killed = ""

    def start(self) -> ChildProcess:
        """Start the process.

        Raises:
            OSError: the system has no room for one.
        """
        self.watch.begin()
        command, environment = python_module(self._module)
        files = [*self.spec["listeners"], self.spec["watch"]]
        child = ChildProcess(command, output="piped", environment=environment, files=files)
        # what is printed there goes to stderr
        child.pipes()[1].close()
        # into the pipe, which holds more than that: no wait for a process to start
        write_frame(child.pipes()[0], self.spec)
        return child

    def send(self, message: Mapping[str, Any]) -> None:
        """Send it more JSON, of less than a pipe holds; it may have ended."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                write_frame(self.process.pipes()[0], message)

    def judged(self, now: float) -> str | None:
        """Why it must be killed, as the end of a sentence that starts with its name; None while it
        does well."""
        raise NotImplementedError

    def was_at_work(self) -> bool:
        """Whether a request may have ended it: it is restarted at once then, however often that
        happens."""
        return False

    def running(self) -> list[ChildProcess]:
        """What must be ended with it."""
        return [] if self.process is None else [self.process]

    def close(self) -> None:
        """Start it no more: give back what it needed for that."""
        self._file.close()

    def check(self, now: float) -> None:
        """Start it where it is due, and kill it where it must be; ``now`` is
        :func:`time.monotonic`."""
        if now - self._checked_at > HELD_UP_S:
            self._judged_from = now + HELD_UP_S
        self._checked_at = now
        if self.process is None:
            if now >= self._start_at:
                self._started_at, self._killed = now, ""
                try:
                    self.process = self.start()
                except OSError as exc:
                    self._start_at = now + self.longest_wait_s
                    log.error("%s cannot be started: %s", self.name, exc)
            return
        if not self._killed and now >= self._judged_from and (why := self.judged(now)) is not None:
            self._killed, self._killed_at = why, now
            self.process.signal(signal.SIGKILL)
        # one that cannot be killed never runs again, and gives its place to another
        if self.process.ended() or (self._killed and now > self._killed_at + KILL_S):
            self._note_end(self.process, now)

    def end(self) -> None:
        """Kill it; :meth:`check` starts it again."""
        if self.process is not None:
            end_all([self.process], grace_s=0.0, kill_s=1.0)
            _close_input(self.process)
        self.process, self._start_at = None, -math.inf

    def _note_end(self, process: ChildProcess, now: float) -> None:
        steady = now - self._started_at > STEADY_S or self.was_at_work()
        self.ends_quickly = 0 if steady else self.ends_quickly + 1
        wait_s = doubled_s(FIRST_WAIT_S, max(0, self.ends_quickly - 1), self.longest_wait_s)
        self._start_at, self.process, self.status = now + wait_s, None, process.status
        self._meter.counter(RESTARTS, self._kind, "killed" if self._killed else "ended").add()
        # waits until all of its output is in the log above the next line
        process.last_words()
        if process.status == STATUS_RESTART and not self._killed:
            log.info("%s ended to begin again, in %g s", self.name, wait_s)
        else:
            how = self._killed or end_in_words(process.status)
            if self._killed and process.status is None:
                how += f", and {end_in_words(None)}: a driver may hold it in the kernel"
            log.error("%s %s; it is restarted in %g s", self.name, how, wait_s)
        _close_input(process)


def _close_input(process: ChildProcess) -> None:
    # what was last written there was never read
    with contextlib.suppress(OSError):
        process.pipes()[0].close()


def read_spec() -> tuple[dict[str, Any], queue.SimpleQueue[dict[str, Any]]]:
    """The spec of this process, and a queue of the messages that come later: called in the child,
    first of all. The process ends with the supervisor."""
    source, _ = take_pipes()
    log_to_stderr()
    spec = read_message(source)
    if spec is None:
        sys.exit(1)
    later: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        while (message := read_message(source)) is not None:
            later.put(message[0])
        os._exit(1)

    threading.Thread(target=read, name="parent", daemon=True).start()
    return spec[0], later


# ---- The processes of a model.

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
            self.serving.send({"suspects": self._assign()})
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
