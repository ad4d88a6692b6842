"""Suspects: rows that were in a process's hands when it ended. One of them may be what ended it, and would end the next one: they are left alone for a while."""

from __future__ import annotations

from collections.abc import Iterable

from store.clock import doubled_s
from store.online.kernels import hash_of

FIRST_S, LONGEST_S = 60.0, 3600.0
"""How long a row is left alone, and twice as long each time that it was there again; who is none will not be there often."""

MOST = 1024
"""Rows that are remembered, the latest."""


def row_hash(view: str, key: str, given: str | None) -> int:
    """What a row of a view is known by; ``given`` are the inputs that came with the request, as JSON."""
    return hash_of(f"{view}\0{key}\0{given or ''}".encode())


class Suspects:
    """Rows by their hashes; times are :func:`time.monotonic`."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, float]] = {}
        """How often it was there, and until when it is left alone."""

    def add(self, rows: Iterable[int], now: float) -> None:
        """A process ended with these in its hands."""
        for row in rows:
            times, _ = self._known.pop(row, (0, now))
            self._known[row] = times + 1, now + doubled_s(FIRST_S, times, LONGEST_S)
        while len(self._known) > MOST:
            self._known.pop(next(iter(self._known)))

    def until(self, now: float) -> dict[int, float]:
        """Those that are left alone, and until when."""
        return {row: until for row, (_, until) in self._known.items() if until > now}
