"""Supervised process: one of a server's, which is watched, killed when it must be, and restarted
whenever it ends."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from precompute.jobs.run.command_process import log_to_stderr
from precompute.store.answers.answer import MAX_DEADLINE_S
from precompute.store.http.telemetry.instruments import RESTARTS, Meter
from precompute.store.times import doubled_s
from precompute.workers.process import ChildProcess, die_with_parent, end_all, python_module
from precompute.workers.worker import framed, read_message

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.1
"""Before a process that ended is restarted; twice as long each time it ends again soon."""

LONGEST_WAIT_S = 30.0

STEADY_S = 60.0
"""A process that lived this long ended for a reason of its own, and is restarted at once."""

PULSE_S = 1.0
"""How often a process tells that it lives, at least."""

STILL_S = 15.0
"""A process that has reported nothing for so long, and has no leave to, would answer nobody:
something holds Python's lock, or its loop, or has stopped it."""

START_S = 600.0
"""Before it tells so for the first time: its libraries may come from a cold disk."""

HELD_UP_S = 3.0
"""Who looks so late was stopped itself, as all of a paused container is: what is looked at gets as
long to show that it lives."""

AGAIN = 75
"""Status of a process that ended to be restarted, and said why."""

MOST_HELD = 64
"""Rows that a process may have in its hands."""

_WATCH_BYTES = 8 * (5 + MOST_HELD)


class Watch:
    """By when a process should be done with what it is at (:func:`time.monotonic`; infinity while
    it is idle), in memory that both it and the supervisor have: one that keeps Python's lock for
    itself can tell nobody anything. Beside it, when the process last showed that it lives, and
    which rows it has in its hands.

    Args:
        descriptor: of a file that :func:`watch_file` made.
    """

    def __init__(self, descriptor: int) -> None:
        shared = memoryview(mmap.mmap(descriptor, _WATCH_BYTES))
        self._times, self._flags, self._rows = (
            shared[:16].cast("d"),
            shared[16:32].cast("Q"),
            shared[32:].cast("Q"),
        )

    def begin(self) -> None:
        """A process is about to be started."""
        self.set(math.inf)
        self.is_open = self.may_try = False
        self.beat(time.monotonic() + START_S)

    def set(self, done_by: float, rows: Sequence[int] = ()) -> None:
        """Say it, and which rows (by their hashes) are in hand. Who does lives."""
        self.beat(time.monotonic())
        self._rows[0] = held = min(len(rows), MOST_HELD)
        for number in range(held):
            self._rows[1 + number] = rows[number]
        self._times[0] = done_by

    def get(self) -> float:
        """What was said last."""
        return self._times[0]

    def held(self) -> list[int]:
        """The rows that are in hand, or were as the process ended."""
        return self._rows[1 : 1 + self._rows[0]].tolist()

    @property
    def is_open(self) -> bool:
        """Whether the process has said that it could answer at once."""
        return bool(self._flags[0])

    @is_open.setter
    def is_open(self, value: bool) -> None:
        self._flags[0] = value

    @property
    def may_try(self) -> bool:
        """Whether the supervisor lets it compute rows that may end it: no other is about to stand
        by, or one does."""
        return bool(self._flags[1])

    @may_try.setter
    def may_try(self, value: bool) -> None:
        self._flags[1] = value

    def beat(self, at: float) -> None:
        """Show that the process lives."""
        self._times[1] = at

    def pulse(self) -> NoReturn:
        """Show it again and again."""
        while True:
            self.beat(time.monotonic())
            time.sleep(PULSE_S)

    def has_begun(self, now: float) -> bool:
        """Whether the process has shown that it lives since it was started."""
        return self._times[1] <= now

    def silent_s(self, now: float) -> float:
        """Seconds since it has shown that it lives."""
        return now - self._times[1]

    def is_still(self, now: float) -> bool:
        """Whether it has shown nothing for too long, while it has nothing to do."""
        return self.get() == math.inf and self.silent_s(now) > STILL_S


def watch_file(path: Path) -> int:
    """A file for a :class:`Watch`, as a descriptor, which is the caller's to close.

    Raises:
        OSError: there is no room for it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.truncate(descriptor, _WATCH_BYTES)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class SupervisedProcess(ABC):
    """A process that is supervised, from the first :meth:`look` on. All of it is called in one
    thread, which must live as long as the process: on Linux that ends with it.

    Args:
        kind: what it is, ``worker`` or ``model``.
        name: which of them, for people.
        meter: counts how often it is replaced.
    """

    longest_wait_s = LONGEST_WAIT_S
    """Before it is restarted, at most."""

    def __init__(self, kind: str, name: str, meter: Meter) -> None:
        self.name = name
        self._kind, self._meter = kind, meter
        self.process: ChildProcess | None = None
        self.ends_quickly = 0
        """How often in a row it has ended soon after it was started."""
        self._started_at = self._start_at = self._judged_from = -math.inf
        self._looked_at = math.inf
        self._killed = ""
        self.status: int | None = None
        """Of the process that ended last."""

    @abstractmethod
    def start(self) -> ChildProcess:
        """A new life of it.

        Raises:
            OSError: the system has no room for one.
        """

    def judged(self, now: float) -> str | None:
        """Why it must be killed, as the end of a sentence that starts with its name; None while it
        does well."""
        return None

    def was_at_work(self) -> bool:
        """Whether a request may have ended it: it is restarted at once then, however often that
        happens."""
        return False

    def running(self) -> list[ChildProcess]:
        """What must be ended with it."""
        return [] if self.process is None else [self.process]

    def close(self) -> None:  # noqa: B027
        """It is started no more: what it needed for that is given back."""

    def look(self, now: float) -> None:
        """Start it where it is due, and kill it where it must be; ``now`` is
        :func:`time.monotonic`."""
        if now - self._looked_at > HELD_UP_S:
            self._judged_from = now + HELD_UP_S
        self._looked_at = now
        if self.process is None:
            if now >= self._start_at:
                self._start(now)
            return
        if not self._killed and now >= self._judged_from and (why := self.judged(now)) is not None:
            self._killed = why
            self.process.signal(signal.SIGKILL)
        if self.process.ended():
            self._bury(self.process, now)

    def end(self) -> None:
        """Kill it, until it is looked at once more."""
        for process in self.running():
            end_all([process], grace_s=0.0, kill_s=1.0)
            _close_input(process)
        self.process, self._start_at = None, -math.inf

    def _start(self, now: float) -> None:
        self._started_at, self._killed = now, ""
        try:
            self.process = self.start()
        except OSError as exc:
            self._start_at = now + self.longest_wait_s
            log.error("%s cannot be started: %s", self.name, exc)

    def _bury(self, process: ChildProcess, now: float) -> None:
        steady = now - self._started_at > STEADY_S or self.was_at_work()
        self.ends_quickly = 0 if steady else self.ends_quickly + 1
        wait_s = doubled_s(FIRST_WAIT_S, max(0, self.ends_quickly - 1), self.longest_wait_s)
        self._start_at, self.process = now + wait_s, None
        self._meter.counter(RESTARTS, self._kind, "killed" if self._killed else "ended").add()
        self.status = process.status
        # waits until all that it said stands above, whatever that was about
        process.last_words()
        if process.status == AGAIN and not self._killed:
            log.info("%s ended to begin again, in %g s", self.name, wait_s)
        else:
            log.error(
                "%s %s; it is restarted in %g s",
                self.name,
                self._killed or process.how_it_ended(),
                wait_s,
            )
        _close_input(process)


def _close_input(process: ChildProcess) -> None:
    # that it was sent more, which it did not hear
    with contextlib.suppress(OSError):
        process.pipes()[0].close()


DRAIN_S = MAX_DEADLINE_S + 1
"""How long the requests at hand may take once a server was ordered to end: no request's deadline is
further off."""


def started(
    module: str, spec: Mapping[str, Any], files: Collection[int], **variables: str
) -> ChildProcess:
    """A process that runs ``main()`` of a module of ours.

    Args:
        module: its dotted name.
        spec: plain JSON, what :func:`begin` returns there.
        files: descriptors that it has, too.
        variables: of its environment, beside ours.

    Raises:
        OSError: it cannot be started.
    """
    command, environment = python_module(module)
    child = ChildProcess(command, output="piped", environment=environment | variables, files=files)
    stdin, stdout = child.pipes()
    # what is printed there goes to stderr
    stdout.close()
    # into the pipe, which holds more than that: nobody waits for a process to start
    stdin.write(framed(spec))
    stdin.flush()
    return child


def tell(child: ChildProcess, message: Mapping[str, Any]) -> None:
    """Tell a process that :func:`started` returned more; one that has ended hears nothing.

    Args:
        child: the process.
        message: plain JSON, of less than a pipe holds.
    """
    with contextlib.suppress(OSError):
        stdin, _ = child.pipes()
        stdin.write(framed(message))
        stdin.flush()


def begin(on_message: Callable[[dict[str, Any]], None] = lambda message: None) -> dict[str, Any]:
    """In the child, first of all: what it is to be. It is gone as soon as who started it is.

    Args:
        on_message: called in a thread of its own with all that :func:`tell` tells it later.
    """
    die_with_parent()
    source = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    # also what a model prints below Python
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    log_to_stderr()
    message = read_message(source)
    if message is None:
        sys.exit(1)
    threading.Thread(
        target=_end_with, args=(source, on_message), name="parent", daemon=True
    ).start()
    return message[0]


def _end_with(source: IO[bytes], on_message: Callable[[dict[str, Any]], None]) -> None:
    while (message := read_message(source)) is not None:
        on_message(message[0])
    os._exit(1)
