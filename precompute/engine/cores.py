"""Cores: which CPUs this process may use, and how much of their time.
Lanes are threads that each compute a batch with a share of them."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def places(threads: int) -> list[frozenset[int]]:
    """A place for each of ``threads`` compute threads, neighbours side by side: the CPUs of a core,
    or one CPU, whichever there are as many of as threads. Empty where threads do not take all that
    the process may use: then they are not alone, and the system had better place them.
    """
    # not there on every system
    if not hasattr(os, "sched_getaffinity"):
        return []
    cpus = os.sched_getaffinity(0)
    cores = sorted({_siblings(cpu) & cpus for cpu in cpus}, key=min)
    if threads == len(cores):
        return cores
    return [frozenset({cpu}) for cpu in sorted(cpus)] if threads == len(cpus) else []


def share(number: int, processes: int) -> frozenset[int]:
    """The CPUs of process ``number``, from 0, of several that compute side by side: whole cores,
    all dealt out, neighbours together and so of one NUMA node as far as nodes and processes divide.
    Empty where the system had better place them: there are fewer cores than processes, or the
    control group grants less time than the CPUs have, so that any of them may be the one that is
    free.
    """
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    cpus = os.sched_getaffinity(0)
    cores = sorted(
        {_siblings(cpu) & cpus for cpu in cpus}, key=lambda core: (_node(min(core)), min(core))
    )
    if len(cores) < processes or _quota() < len(cpus):
        return frozenset()
    first, end = (n * len(cores) // processes for n in (number, number + 1))
    return frozenset().union(*cores[first:end])


def allowed() -> int:
    """CPUs that this process may use, of however much of their time the control group grants."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_threads(threads: int) -> int:
    """So many of ``threads`` as there are CPUs for: those the process may use, and no more than the
    control group's quota, rounded down."""
    return max(1, min(threads, allowed(), _quota()))


def move_to(place: frozenset[int]) -> None:
    """Keep the calling thread, and the threads it starts, on these CPUs; nothing is done for none.

    Raises:
        OSError: the process may no longer use them.
    """
    if place:
        # 0 is the thread that calls
        os.sched_setaffinity(0, place)


def _siblings(cpu: int) -> frozenset[int]:
    """The CPUs of a CPU's core; itself alone where the system does not tell."""
    try:
        text = (_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        ends = [part.split("-") for part in text.strip().split(",")]
        return frozenset(n for end in ends for n in range(int(end[0]), int(end[-1]) + 1)) | {cpu}
    except (OSError, ValueError):
        return frozenset({cpu})


def _node(cpu: int) -> int:
    """The NUMA node of a CPU; 0 where the system does not tell."""
    return min(
        (int(link.name[4:]) for link in (_TOPOLOGY / f"cpu{cpu}").glob("node[0-9]*")), default=0
    )


def _quota() -> int:
    """Whole CPUs whose time the control group grants; no bound where there is none."""
    try:
        granted, period = _QUOTA.read_text().split()
        return int(granted) // int(period)
    except (OSError, ValueError, ZeroDivisionError):
        # no such control group, or "max"
        return 2**31


Made = TypeVar("Made")


class Lanes:
    """``count`` threads beside the calling one.

    Args:
        count: at least 2.
        threads: compute threads of each.
        total: compute threads of the process.
        compute_with: makes the calling thread, and no other, compute with so many.
    """

    def __init__(
        self, count: int, threads: int, total: int, compute_with: Callable[[int], None]
    ) -> None:
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
        """Wait until no lane has anything to do."""
        wait(list(self._jobs))

    def close(self) -> None:
        """Drop what no lane has begun, and wait for what they have."""
        self._pool.shutdown(wait=True, cancel_futures=True)
