"""Memory: what this process may still take, what it took at most, and which errors mean that there was none left."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_CGROUP = Path("/sys/fs/cgroup")


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's, torch's on a GPU (by name, so that torch need not be imported), or torch's
    on the CPU, which is a plain RuntimeError."""
    if isinstance(exc, MemoryError) or type(exc).__name__ in ("OutOfMemoryError", "ArrowMemoryError"):
        return True
    text = str(exc)
    return isinstance(exc, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


def available_bytes() -> int:
    """Memory that can be taken without swapping: the machine's, or the container's where that is less."""
    free = _meminfo()
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def resident_bytes() -> int:
    """Memory this process holds now."""
    return _status("VmRSS")


class ResidentPeak:
    """The largest memory this process held, over all and since the last :meth:`lap`, which is the same for all of this class: the system counts
    one peak."""

    _highest = 0

    def __init__(self) -> None:
        self._can_reset = os.access(_CLEAR, os.W_OK)

    def bytes(self) -> int:
        """Over all."""
        ResidentPeak._highest = max(ResidentPeak._highest, _peak())
        return ResidentPeak._highest

    def lap(self) -> int:
        """Since the last lap, and begin the next; 0 where the system cannot tell."""
        if not self._can_reset:
            return 0
        peak = _peak()
        ResidentPeak._highest = max(ResidentPeak._highest, peak)
        try:
            _CLEAR.write_text("5")  # Linux: the peak begins anew
        except OSError:
            self._can_reset = False
        return peak


def _peak() -> int:
    found = _status("VmHWM")
    if found:
        return found
    kib = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kib


def _status(name: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _meminfo() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None
