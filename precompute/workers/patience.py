"""Patience: how long a worker may be silent, or finish no batch, before it is given up; less for rows that it was lost to, of what the run has measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from precompute.workers.tasks import Task

TIMES = 4.0
"""As long as the longest wait for a batch that came to an end: with other rows, or on a busier machine, one may take longer. Given up too soon, rows are tried in smaller pieces,
at last with all patience, so this is not what decides of them."""
LEAST_BEATS = 2
"""Signs of life that are waited for beside: they tell of batches, too."""


@dataclass(slots=True)
class Patience:
    """See :class:`precompute.workers.worker_pool.WorkerPool` for those that are configured."""

    heartbeat_s: float
    stall_s: float
    hang_s: float
    attempts: int
    slowest_s: float | None = None
    """The longest that any worker was without a batch and then finished one, the first of a fresh worker among them; None before there was one."""

    def progressed(self, after_s: float) -> None:
        """A worker that had rows finished a batch so long after the one before, or after it was given them."""
        self.slowest_s = max(after_s, self.slowest_s or 0.0)

    def is_last_try(self, task: Task) -> bool:
        """Whether its row is rejected if it ends its worker now."""
        return len(task.rows) == 1 and task.deaths + 1 >= self.attempts

    def for_task(self, task: Task, fruitless: int) -> float:
        """Seconds without a batch, at most, of a worker that has these rows: infinity where only what is configured bounds it.

        Args:
            task: the rows.
            fruitless: workers that were lost in turn without any row finished in between, beyond what one bad row may cost: twice as long for each, so that a machine that
                became slower is waited for.
        """
        if not task.hung or self.slowest_s is None or self.is_last_try(task):
            return math.inf
        return (LEAST_BEATS * self.heartbeat_s + TIMES * self.slowest_s) * 2.0 ** min(max(0, fruitless), 64)
