"""Memory: how a process that answers many small requests keeps and looks for it."""

from __future__ import annotations

import ctypes
import gc

_THRESHOLDS = 50_000, 50, 100
"""New objects before the young are looked through, and how often before the older are."""
_KEPT_BYTES, _MAPPED_BYTES = 128 * 2**20, 32 * 2**20
"""Free memory that is kept for the next request, and the size from which a piece is mapped for itself."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's ``mallopt`` (man 3 mallopt)."""


def settle() -> None:
    """Call once, when all that stays is loaded and before the first request.

    What is there by now is never looked through again by the garbage collector, and the rest seldom: few requests leave cycles, and a look through all takes
    tens of milliseconds. Freed memory is kept: else an answer of a megabyte is 200 pages that the system clears and maps each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # no harm where it is another libc's, which knows other numbers and says so
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
