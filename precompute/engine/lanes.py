"""Lanes: threads that each compute a batch of their own with a share of the CPU's threads. On a CPU, two batches in one thread each need not wait
for one another at every layer, as two threads in one batch do.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from precompute.engine.cores import move_to, places

Made = TypeVar("Made")


class Lanes:
    """``count`` threads beside the one that asks.

    Args:
        count: at least 2.
        threads: compute threads of each.
        total: compute threads of the process.
        compute_with: makes the calling thread, and no other, compute with so many.
    """

    def __init__(self, count: int, threads: int, total: int, compute_with: Callable[[int], None]) -> None:
        self.count = count
        self._jobs: set[Future[Any]] = set()
        where = places(total) or [frozenset()] * total
        shares: queue.SimpleQueue[frozenset[int]] = queue.SimpleQueue()
        for first in range(0, count * threads, threads):
            shares.put(frozenset().union(*where[first : first + threads]))

        def begin() -> None:
            # others may have taken CPUs away since they were counted
            with contextlib.suppress(OSError):
                move_to(shares.get())
            compute_with(threads)

        self._pool = ThreadPoolExecutor(count, "lane", begin)

    def put(self, job: Callable[[], Made]) -> Future[Made]:
        """Have the next lane that is free do it."""
        future = self._pool.submit(job)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        return future

    def wait(self) -> None:
        """Until no lane has anything to do."""
        wait(list(self._jobs))

    def close(self) -> None:
        """Drop what no lane has begun, and wait for what they have."""
        self._pool.shutdown(wait=True, cancel_futures=True)
