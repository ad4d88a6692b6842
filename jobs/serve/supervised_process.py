"""Supervised process: a process of a server: watched, killed when it hangs, and restarted whenever
it ends."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from precompute.jobs.run.command_process import log_to_stderr
from precompute.store.answers.answer import MAX_DEADLINE_S
from precompute.store.disk.durable_file import allocate
from precompute.store.http.telemetry.instruments import RESTARTS, Meter
from precompute.store.times import doubled_s
from precompute.workers.process import (
    ChildProcess,
    end_all,
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
        self._checked_at = math.inf
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

    def tell(self, message: Mapping[str, Any]) -> None:
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
            self._killed = why
            self.process.signal(signal.SIGKILL)
        if self.process.ended():
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
            how = self._killed or process.how_it_ended()
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
