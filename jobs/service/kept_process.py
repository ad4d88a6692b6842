"""Kept process: one of a server's, which is watched, killed when it must be, and started anew whenever it ends."""

from __future__ import annotations

import logging
import math
import signal
from abc import ABC, abstractmethod

from precompute.workers.process import ChildProcess
from store.clock import doubled_s
from store.telemetry.instruments import RESTARTS, Meter

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.1
"""Before a process that ended is started anew; twice as long each time it ends again soon."""

LONGEST_WAIT_S = 30.0

STEADY_S = 60.0
"""A process that lived this long ended for a reason of its own, and is started anew at once."""


class KeptProcess(ABC):
    """A process that is kept alive, from the first :meth:`look` on. All of it is called in one thread, which must live as long as the process: on Linux
    that ends with it.

    Args:
        kind: what it is, ``worker`` or ``model``.
        name: which of them, for people.
        meter: counts how often it is replaced.
    """

    def __init__(self, kind: str, name: str, meter: Meter) -> None:
        self.name = name
        self._kind, self._meter = kind, meter
        self.process: ChildProcess | None = None
        self.ends_quickly = 0
        """How often in a row it has ended soon after it was started."""
        self._started_at = self._start_at = -math.inf
        self._killed = ""

    @abstractmethod
    def start(self) -> ChildProcess:
        """A new life of it.

        Raises:
            OSError: the system has no room for one.
        """

    def judged(self, now: float) -> str | None:
        """Why it must be killed, as the end of a sentence that starts with its name; None while it does well."""
        return None

    def look(self, now: float) -> None:
        """Start it where it is due, and kill it where it must be; ``now`` is :func:`time.monotonic`."""
        if self.process is None:
            if now >= self._start_at:
                self._start(now)
            return
        if not self._killed and (why := self.judged(now)) is not None:
            self._killed = why
            self.process.signal(signal.SIGKILL)
        if self.process.ended():
            self._bury(self.process, now)

    def _start(self, now: float) -> None:
        self._started_at, self._killed = now, ""
        try:
            self.process = self.start()
        except OSError as exc:
            self._start_at = now + LONGEST_WAIT_S
            log.error("%s cannot be started: %s", self.name, exc)

    def _bury(self, process: ChildProcess, now: float) -> None:
        self.ends_quickly = 0 if now - self._started_at > STEADY_S else self.ends_quickly + 1
        wait_s = doubled_s(FIRST_WAIT_S, max(0, self.ends_quickly - 1), LONGEST_WAIT_S)
        self._start_at, self.process = now + wait_s, None
        self._meter.counter(RESTARTS, self._kind, "killed" if self._killed else "ended").add()
        words = process.last_words()
        told = self._killed or process.how_it_ended() + (f"; the last line of its stderr: {words[:300]}" if words else "")
        log.error("%s %s; it is started anew in %g s", self.name, told, wait_s)
        _close_input(process)


def _close_input(process: ChildProcess) -> None:
    process.pipes()[0].close()
