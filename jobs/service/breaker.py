"""Breaker: leaves a model alone that keeps failing, so that who asks is told at once, and when to ask again, in place of waiting for one more failure."""

from __future__ import annotations

from collections import deque

LEAST_CALLS = 10
FAILING = 0.5
"""Opens when of the latest calls, this many at least, this share was broken: the defaults of Flink's client for Triton, as are the next two."""
OPEN_S = 60.0
PROBES = 3
"""Calls that are let through then, and must all be good."""

LATEST, LATEST_S = 50, 30.0
"""Calls that are remembered, and how long."""


class Breaker:
    """Of one view; ``now`` is :func:`time.monotonic`, and none of it is safe to share between threads."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, bool]] = deque(maxlen=LATEST)
        self._opened_at: float | None = None
        self._probing = 0
        self._good = 0

    @property
    def is_open(self) -> bool:
        """Whether calls are refused."""
        return self._opened_at is not None

    def admit(self, calls: int, now: float) -> tuple[int, float]:
        """How many of these calls may be made, and in how many seconds the others may be tried again, at least."""
        if self._opened_at is None:
            return calls, 0.0
        left_s = self._opened_at + OPEN_S - now
        if left_s > 0:
            return 0, left_s
        admitted = min(calls, PROBES - self._probing)
        self._probing += admitted
        return admitted, 1.0

    def count(self, broken: bool | None, now: float) -> None:
        """What became of a call: whether the model itself failed; None: nobody knows."""
        if broken is None:
            # was it a probe, another one is sent
            self._probing = max(0, self._probing - 1)
        elif self._opened_at is None:
            self._latest.append((now, broken))
            calls = [failed for at, failed in self._latest if now - at < LATEST_S]
            if broken and len(calls) >= LEAST_CALLS and sum(calls) >= FAILING * len(calls):
                self._open(now)
        elif now >= self._opened_at + OPEN_S:
            if broken:
                self._open(now)
            else:
                self._good += 1
                if self._good >= PROBES:
                    self._opened_at = None
                    self._latest.clear()

    def _open(self, now: float) -> None:
        self._opened_at, self._probing, self._good = now, 0, 0
