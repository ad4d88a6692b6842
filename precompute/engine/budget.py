"""Budget: how much one batch may cost, and for how long it may compute.

On a GPU it is searched: the first batches take turns with several budgets, and the smallest of the
best wins; where that is the largest, larger ones take turns with it. What a batch took, measured,
bounds every larger one before it is tried. A batch that ran out of memory halves the budget, which
grows back in small steps towards what did not fit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

ROUNDS = 3
"""Batches of each candidate before one is chosen."""
TIE = 0.97
"""A budget this close to the best rate is as good, and the smaller one takes less memory."""
FILLED = 0.5
"""Share of its budget, padding counted, that a batch fills to count: one that costs less says
nothing of it, as a window's last one may."""
PADDED = 0.1
"""Share of a batch that is padding, beyond which it says nothing either: its window was small, as
the first ones are."""
TRIES = 16
"""Batches made under a candidate, after which it is given up unless enough of them were filled:
those on their way, some 11, among them."""
SHORT_S = 0.02
"""A batch that takes no longer is not made smaller near the end of its window: of a small model
another window follows at once, and each batch costs the other stages a third of a millisecond."""
MEMORY_SHARE = 0.8
"""Share of the free memory that one batch may take."""
GROW_AFTER = 32
"""Batches in a row that went well before a budget that was cut grows again."""
GROW_BY = 1.25
BELOW_CEILING = 0.9
"""Share of a cost that ran out of memory up to which the budget grows again."""


class Budget:
    """The cost that the next batch may have; one thread may read it while another reports batches.

    Args:
        start: the first budget, at least 1.
        fixed: whether it was configured: no search, and no smaller batches near the end, but the
            ladder all the same.
        search: whether the best budget is searched; without, it stays what it begins with.
        reach: largest candidate of the search, in multiples of ``start``.
        free_bytes: returns the memory that can still be taken.
    """

    def __init__(
        self,
        start: int,
        *,
        fixed: bool = False,
        search: bool = True,
        reach: int = 2,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._free_bytes = free_bytes
        self.cost = max(1, start)
        self.ceiling: int | None = None
        self.failures = 0
        self._wanted = self.cost
        self._good = 0
        self._short = False
        self._bytes_per_cost = 0.0
        self._most = self.cost * reach
        # what was configured is not made smaller
        self._least = self.cost if fixed else max(1, self.cost // 2)
        self._candidates: list[int] = []
        self._measured: dict[int, list[tuple[int, float]]] = {}
        self._given: dict[int, int] = {}
        self._turn = 0
        if search and not fixed:
            self._try([self.cost // 2, self.cost, self.cost * 2])
        self._before: tuple[int, int | None, list[int]] = (self.cost, None, self._candidates)

    @property
    def settled(self) -> bool:
        """Whether the search is over."""
        return not self._candidates

    def next(self, share: int = 2**62) -> int:
        """The budget of the batch made now.

        Args:
            share: of what is left to compute, a part that is small enough for several who compute
                at once to end together: near the end, batches become smaller, down to half of the
                first budget; not where one is over in :data:`SHORT_S`.
        """
        if self._short:
            share = 2**62
        if not self._candidates and share >= self.cost:
            return self.cost
        with self._lock:
            if share < self.cost:
                return min(self.cost, max(share, self._least))
            if not self._candidates:
                return self.cost
            self._turn += 1
            candidate = self._candidates[self._turn % len(self._candidates)]
            if share < candidate:
                return share
            self._given[candidate] += 1
            return candidate

    def done(
        self, budget: int, cost: int, seconds: float, size_bytes: int = 0, padded_cost: int = 0
    ) -> None:
        """A batch made under ``budget`` went well.

        Args:
            budget: what :meth:`next` said.
            cost: what its rows cost, padding not counted.
            seconds: how long it took.
            size_bytes: memory it took beyond what was taken before it; 0 when not measured.
            padded_cost: what its rows cost, padding counted; by default there is none.
        """
        padded_cost = max(cost, padded_cost)
        self._short = seconds * self.cost < SHORT_S * padded_cost
        if not size_bytes and not self._candidates and self.cost >= self._wanted:
            return
        filled = padded_cost >= FILLED * budget
        with self._lock:
            # a small batch takes more for each unit of cost: the libraries' own memory
            if size_bytes > 0 and filled:
                self._bytes_per_cost = max(self._bytes_per_cost, size_bytes / padded_cost)
            if self._candidates:
                if filled and budget in self._measured and cost >= (1 - PADDED) * padded_cost:
                    self._measured[budget].append((cost, seconds))
                self._search()
            elif self.cost < self._wanted:
                self._good += 1
                if self._good >= GROW_AFTER:
                    self._good = 0
                    if self.ceiling is not None and self.cost >= self._limit():
                        # it may have been another process that took the memory
                        self.ceiling = int(self.ceiling * GROW_BY) + 1
                    self.cost = max(
                        self.cost, min(int(self.cost * GROW_BY) + 1, self._wanted, self._limit())
                    )

    def out_of_memory(self, cost: int) -> None:
        """A batch of this cost did not fit: halve."""
        with self._lock:
            self._before = (self.cost, self.ceiling, self._candidates)
            self.failures += 1
            self._good = 0
            self.ceiling = cost if self.ceiling is None else min(self.ceiling, cost)
            self._candidates = [c for c in self._candidates if c < cost]
            self.cost = max(1, min(self.cost, cost) // 2)

    def was_one_row(self) -> None:
        """What did not fit was a single row, that does not fit alone either: take the last halving
        back."""
        with self._lock:
            self.cost, self.ceiling, self._candidates = self._before

    def _limit(self) -> int:
        """The largest budget that memory allows, as far as is known."""
        limit = 2**62 if self.ceiling is None else max(1, int(self.ceiling * BELOW_CEILING))
        if self._bytes_per_cost and self._free_bytes is not None:
            limit = min(
                limit, max(1, int(MEMORY_SHARE * self._free_bytes() / self._bytes_per_cost))
            )
        return limit

    def _try(self, candidates: list[int]) -> None:
        """Have these take turns, as far as they are allowed; what was measured of one before was
        beside others."""
        self._candidates = sorted(
            {max(1, c) for c in candidates if c <= max(self._most, self.cost)}
        )
        self._measured = {c: [] for c in self._candidates}
        self._given = dict.fromkeys(self._candidates, 0)

    def _search(self) -> None:
        limit = self._limit()
        unfilled = [
            c
            for c in self._candidates
            if self._given[c] >= TRIES and len(self._measured[c]) <= ROUNDS
        ]
        if unfilled:
            self._most = min(self._most, max(1, min(unfilled) - 1))
        self._candidates = [c for c in self._candidates if c <= limit and c not in unfilled]
        measured = {c: self._measured[c] for c in self._candidates}
        if not measured:
            self.cost = self._wanted = min(self.cost, limit)
            return
        if all(len(batches) > ROUNDS for batches in measured.values()):
            # the first of each is left out: it pays for memory that the later ones find at hand
            rates = {
                c: sum(n for n, _ in m[1:]) / max(sum(s for _, s in m[1:]), 1e-9)
                for c, m in measured.items()
            }
            best = max(rates.values())
            self.cost = self._wanted = min(c for c, rate in rates.items() if rate >= TIE * best)
            largest = self.cost == max(rates)
            self._candidates = []
            if largest and 2 * self.cost <= min(self._most, limit):
                self._try([c for c in (self.cost, 2 * self.cost, 4 * self.cost) if c <= limit])


LONG_S = 10.0
"""Nothing takes longer, if it can be helped, whatever the bargain."""
GAIN = 1.3
"""A size whose rate is so many times that of a smaller one is worth its time."""
FLAT = 0.7
"""Where one of half the size or less takes more than this share of the time, cutting does not
help."""
PACE_GROW_BY = 8
"""Factor by which a batch may be larger than the one before, at most."""


class Pace:
    """The largest cost that is begun now.

    Args:
        start: where to begin; None for any.
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
            self.limit = max(self.limit, cost * min(PACE_GROW_BY, int(self._goal_s / seconds)))
        elif better:
            self.limit = max(self.limit, better)
        elif seconds <= LONG_S / 2 and (pays or not smaller) and not larger:
            self.limit = max(self.limit, 2 * cost)
