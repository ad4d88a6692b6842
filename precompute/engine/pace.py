"""Pace: how much may be done in one go, so that it is over within seconds. Nobody knows a model's speed, so it is found on the way.

What is too slow is cut, unless cutting was seen not to help, and what is quick grows; a slow one stays as large as it is, or grows, where a
larger one is the better bargain: a model that takes as long for one row as for a hundred (one that asks another machine) is not made to take
them one by one.
"""

from __future__ import annotations

LONG_S = 10.0
"""Nothing takes longer, if it can be helped, whatever the bargain."""
GAIN = 1.3
"""A size whose rate is so many times that of a smaller one is worth its time."""
FLAT = 0.7
"""Where one of half the size or less takes more than this share of the time, cutting does not help."""
GROW_BY = 8
"""At most, from one to the next."""


class Pace:
    """The largest cost that is begun now.

    Args:
        start: where to begin; None for whatever is asked.
        goal_s: how long one should take. Up to twice that is let be.
    """

    def __init__(self, start: int | None, goal_s: float) -> None:
        self.limit = 2**62 if start is None else start
        self._goal_s = goal_s
        self._seen: dict[int, tuple[int, float]] = {}
        """Bits of a cost → the last one of that size, and its seconds."""

    def done(self, cost: int, seconds: float) -> None:
        """Something of this cost, at least 1, took so long."""
        seconds = max(seconds, 1e-9)
        size, rate = cost.bit_length(), cost / seconds
        self._seen[size] = (cost, seconds)
        smaller = max((c / s for bits, (c, s) in self._seen.items() if bits < size), default=0.0)
        larger = [(c, s) for bits, (c, s) in self._seen.items() if bits > size]
        better = max((c for c, s in larger if s <= LONG_S and c / s >= GAIN * rate), default=0)
        same = 0
        # back to a larger one that takes no longer, or on to one that is not known
        if seconds > LONG_S / 2:
            below = [s for c, s in self._seen.values() if 2 * c <= cost]
            flat = [c for c, s in larger if 2 * cost <= c and FLAT * s < seconds]
            same = max(flat, default=2 * cost if below and min(below) > FLAT * seconds else 0)
        pays = 0 < GAIN * smaller <= rate
        if same:
            self.limit = max(self.limit, same)
        elif seconds > LONG_S or (seconds > 2 * self._goal_s and not pays and not better):
            self.limit = min(self.limit, max(1, int(cost * self._goal_s / seconds)))
        elif seconds <= self._goal_s / 2:
            self.limit = max(self.limit, cost * min(GROW_BY, int(self._goal_s / seconds)))
        elif better:
            self.limit = max(self.limit, better)
        elif seconds <= LONG_S / 2 and (pays or not smaller) and not larger:
            self.limit = max(self.limit, 2 * cost)
