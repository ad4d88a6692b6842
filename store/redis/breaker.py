"""Breaker: a server that does not answer is asked again after a pause, by one caller, and until then nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """Opens when a call spent its whole budget without an answer; lets one call through after a pause that grows from ``first_s`` to ``most_s``.

    Safe to share between threads.
    """

    def __init__(self, first_s: float = 0.1, most_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_s, self._most_s, self._clock = first_s, most_s, clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until_s = self._failed_s = 0.0
        self.words: str | None = None
        """What the server's last silence looked like; None while it answers."""

    def opened(self) -> str | None:
        """None when the call may be made; else why not, in words. Whoever got None while the breaker is open is the probe: it must tell
        :meth:`failed` or :meth:`succeeded`, and the others wait for another pause if it does neither."""
        if self.words is None:
            return None
        with self._lock:
            now_s, said = self._clock(), self.words
            if now_s < self._until_s:
                return f"{said}; asked again in {self._until_s - now_s:.1f} s"
            self._until_s = now_s + self._pause_s
            return None

    def failed(self, words: str) -> None:
        """The server did not answer."""
        with self._lock:
            now_s = self._clock()
            if self.words is None:
                self._pause_s = self._first_s
            elif now_s < self._failed_s + self._pause_s:
                # one of many that were on their way when the first one failed
                return
            else:
                self._pause_s = min(self._most_s, 2 * self._pause_s)
            self._failed_s, self._until_s, self.words = now_s, now_s + self._pause_s, words

    def succeeded(self) -> None:
        """The server answered, be it with a refusal."""
        if self.words is not None:
            with self._lock:
                self.words = None
