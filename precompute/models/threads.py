"""Threads: how many of them torch computes with on a CPU, which one thread may have otherwise than the rest of the process."""

from __future__ import annotations

import threading

import torch

_changing = threading.Lock()


def compute_threads() -> int:
    """Threads that torch computes with: what ``torch.set_num_threads`` or ``OMP_NUM_THREADS`` say, or one for each core."""
    return torch.get_num_threads()


def compute_with(count: int) -> None:
    """Let torch compute with so many threads in the calling thread, which must be one that has computed nothing yet, and in no other.

    ``torch.set_num_threads`` is of the thread that calls it, and of threads that begin later: those get back what they had, by a thread that does
    nothing else.
    """
    with _changing:
        # the first call in a thread sets what the process has, so it must come before
        process = torch.get_num_threads()
        torch.set_num_threads(count)
        restoring = threading.Thread(target=torch.set_num_threads, args=(process,), name="restore threads")
        restoring.start()
        restoring.join()
