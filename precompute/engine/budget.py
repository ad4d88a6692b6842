"""Budget: how much one batch may cost. It finds itself, so that nobody sets a batch size.

The first batches take turns with several budgets, and the smallest of the best wins. What a batch took, measured, bounds every larger one before it is
tried; one that ran out of memory halves the budget, which grows back in small steps towards what did not fit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

ROUNDS = 3
"""Batches of each candidate before one is chosen."""
TIE = 0.97
"""A budget this close to the best rate is as good, and the smaller one takes less memory."""
MEMORY_SHARE = 0.8
"""Of the free memory, at most, for one batch."""
GROW_AFTER = 32
"""Batches in a row that went well before a budget that was cut grows again."""
GROW_BY = 1.25
BELOW_CEILING = 0.9
"""Of the cost that ran out of memory: the budget grows no further."""


class Budget:
    """The cost that the next batch may have; safe to ask from one thread and to tell from another.

    Args:
        start: the first budget, at least 1.
        fixed: whether it is what somebody chose: no search, but the ladder all the same.
        reach: largest candidate of the search, in multiples of ``start``.
        free_bytes: tells the memory that can still be taken.
    """

    def __init__(self, start: int, *, fixed: bool = False, reach: int = 2, free_bytes: Callable[[], int] | None = None) -> None:
        self._lock = threading.Lock()
        self._free_bytes = free_bytes
        self.cost = max(1, start)
        self.ceiling: int | None = None
        self.failures = 0
        self._wanted = self.cost
        self._good = 0
        self._bytes_per_cost = 0.0
        factors = [0.5]
        while factors[-1] * 2 <= reach:
            factors.append(factors[-1] * 2)
        self._candidates = [] if fixed else sorted({max(1, int(self.cost * f)) for f in factors})
        self._measured: dict[int, list[tuple[int, float]]] = {c: [] for c in self._candidates}
        self._turn = 0
        self._before: tuple[int, int | None, list[int]] = (self.cost, None, self._candidates)

    @property
    def settled(self) -> bool:
        """Whether the search is over."""
        return not self._candidates

    def next(self) -> int:
        """The budget of the batch made now."""
        with self._lock:
            if not self._candidates:
                return self.cost
            self._turn += 1
            return self._candidates[self._turn % len(self._candidates)]

    def done(self, budget: int, cost: int, seconds: float, size_bytes: int = 0) -> None:
        """A batch made under ``budget`` went well.

        Args:
            budget: what :meth:`next` said.
            cost: what its rows cost, padding not counted.
            seconds: how long it took.
            size_bytes: memory it took beyond what was taken before it; 0 when not measured.
        """
        with self._lock:
            if size_bytes > 0 and cost > 0:
                self._bytes_per_cost = max(self._bytes_per_cost, size_bytes / cost)
            if self._candidates:
                self._searched(budget, cost, seconds)
            elif self.cost < self._wanted:
                self._good += 1
                if self._good >= GROW_AFTER:
                    self._good = 0
                    if self.ceiling is not None and self.cost >= self._limit():
                        # it may have been another process that took the memory
                        self.ceiling = int(self.ceiling * GROW_BY) + 1
                    self.cost = max(self.cost, min(int(self.cost * GROW_BY) + 1, self._wanted, self._limit()))

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
        """What did not fit was a single row, that does not fit alone either: take the last halving back."""
        with self._lock:
            self.cost, self.ceiling, self._candidates = self._before

    def _limit(self) -> int:
        """The largest budget that memory allows, as far as is known."""
        limit = 2**62 if self.ceiling is None else max(1, int(self.ceiling * BELOW_CEILING))
        if self._bytes_per_cost and self._free_bytes is not None:
            limit = min(limit, max(1, int(MEMORY_SHARE * self._free_bytes() / self._bytes_per_cost)))
        return limit

    def _searched(self, budget: int, cost: int, seconds: float) -> None:
        # a window's last batch may be nearly empty
        if budget in self._measured and cost >= budget // 2:
            self._measured[budget].append((cost, seconds))
        limit = self._limit()
        self._candidates = [c for c in self._candidates if c <= limit]
        measured = {c: self._measured[c] for c in self._candidates}
        if not measured:
            self.cost = min(self.cost, limit)
            return
        if all(len(batches) > ROUNDS for batches in measured.values()):
            # the first of each is left out: it pays for memory that the later ones find at hand
            rates = {c: sum(n for n, _ in m[1:]) / max(sum(s for _, s in m[1:]), 1e-9) for c, m in measured.items()}
            best = max(rates.values())
            self.cost = self._wanted = min(c for c, rate in rates.items() if rate >= TIE * best)
            self._candidates = []
