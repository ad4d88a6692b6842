"""Native: what the C library and OpenMP do for torch's CPU kernels, set for the way the engine computes."""

from __future__ import annotations

import contextlib
import ctypes

_PAUSE_SOFT = 1
"""``omp_pause_soft`` of OpenMP 5.0, §3.2.44: what is given up comes back by itself when it is needed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""``mallopt(3)``."""
_MMAP_BYTES = 32 * 2**20
"""The most that glibc takes."""
_TRIM_BYTES = 256 * 2**20


def release_threads() -> None:
    """Let the calling thread's compute threads go, before another thread computes; they come back when this one computes again.

    GNU's OpenMP counts the threads of all such teams. Once there are more than CPUs, a thread that is out of work sleeps at once instead
    of spinning for a moment, and every parallel region waits for it to wake up: MiniLM on 2 CPUs took 12.4 to 13.4 s for what takes 9.5 s with one team.
    """
    with contextlib.suppress(OSError, AttributeError):  # no OpenMP was loaded, or one of before 5.0
        ctypes.CDLL(None).omp_pause_resource_all(_PAUSE_SOFT)


def keep_freed_memory() -> None:
    """Have ``malloc`` keep freed memory, up to 256 MiB in each of its arenas, instead of giving it back to the system after every layer of every batch;
    for the whole process, from now on. Blocks of more than 32 MiB are given back all the same.

    A thread other than the first gives back what a batch's activations took as soon as they are freed, and has every page of them zeroed again for the
    next batch: 1.4 M page faults over 2 M rows of a small MLP, 6.1 to 7.0 s for what takes 3.3 s without them.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
