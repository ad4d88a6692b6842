"""Suspects: rows that a process was computing when it ended. Each is tried alone before it is
computed among others again; one that was alone when a process ended is left alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from precompute.store.online.kernels import hash_of
from precompute.store.times import doubled_s

FIRST_S, LONGEST_S = 60.0, 3600.0
"""How long a row is left alone that a process ended with alone in its hands, and twice as long each
time that it does again."""

TRIALS, TRIALS_S = 3, 60.0
"""Trials that may end a process within so long; no row is tried then until that is over."""

MOST = 1024
"""Rows that are remembered, the latest."""


def row_hash(view: str, key: str, given: str | None) -> int:
    """What a row of a view is known by: by ``given``, the inputs that came with the request, as
    JSON, under whatever key; else by its key."""
    return hash_of(f"{view}\0{key}".encode() if given is None else f"{view}\0\0{given}".encode())


class Suspects:
    """Rows by their hashes; times are :func:`time.monotonic`."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, float]] = {}
        """How often it was alone, and until when it is left alone."""
        self._trials: deque[float] = deque(maxlen=TRIALS)
        """When the latest trials ended a process."""

    def add(self, rows: Collection[int], now: float) -> None:
        """A process ended with these in its hands."""
        for row in rows:
            known = row in self._known
            times, until = self._known.pop(row, (0, now))
            if len(rows) == 1:
                times, until = times + 1, now + doubled_s(FIRST_S, times, LONGEST_S)
                if known:
                    self._trials.append(now)
            self._known[row] = times, until
        while len(self._known) > MOST:
            self._known.pop(next(iter(self._known)))

    def until(self) -> dict[int, float]:
        """Each of them, and from when on it may be tried, alone."""
        ended_enough = len(self._trials) == TRIALS and self._trials[-1] - self._trials[0] < TRIALS_S
        none_before = self._trials[0] + TRIALS_S if ended_enough else 0.0
        return {row: max(until, none_before) for row, (_, until) in self._known.items()}
