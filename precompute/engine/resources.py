"""Resources: which CPUs this process may use, and how much of their time; lanes, threads that each
compute a batch with a share of them; how much memory it may still take, how much it took at most,
and how much freed memory the C library and OpenMP hold; and which errors mean that there was none
left, or that a GPU is lost."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import resource
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from precompute.store.errors import ModelError

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


def share_of_cpus(number: int, processes: int) -> frozenset[int]:
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


# ---- Errors: memory ran out, or a GPU is lost.

_FULL = (
    "out of memory",
    "OUT_OF_MEMORY",
    "RESOURCE_EXHAUSTED",
    "INSUFFICIENT_RESOURCES",
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "cudaErrorMemoryAllocation",
    "Failed to allocate memory",
    "is smaller than requested bytes",
    "OutOfMemory",
)
"""What says in an error of torch's or ONNX Runtime's that memory ran out: CUDA itself ("out of
memory", code 2, which the driver calls ``CUDA_ERROR_OUT_OF_MEMORY`` and XLA
``RESOURCE_EXHAUSTED``), torch's allocators on a CPU, cuBLAS, cuSPARSE (which says
``INSUFFICIENT_RESOURCES``, too) and cuSOLVER (``CUBLAS_STATUS_ALLOC_FAILED`` and the like), cuDNN
(``CUDNN_STATUS_ALLOC_FAILED``, and since 9
``CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED``), ONNX Runtime's arena (``BFCArena``) and
TensorRT."""

_CUDA_ERRORS = (
    "CUDA error",
    "CUDA failure",
    "CUBLAS failure",
    "CUDNN failure",
    "cuDNN error",
    "Triton Error [CUDA]",
    "Cuda Runtime (",
)
"""How torch, ONNX Runtime, Triton and TensorRT begin to tell that CUDA failed. What CUDA reports
asynchronously is found wherever the host waits next."""
_PASSING = (
    "invalid argument",
    "invalid configuration",
    "invalid device function",
    "invalid device ordinal",
    "invalid resource handle",
    "no kernel image is available",
    "unsupported toolchain",
    "too many resources requested",
    "out of resource",
    "operation not supported",
    "operation not permitted",
    "capture",
    "STATUS_NOT_SUPPORTED",
    "STATUS_INVALID_VALUE",
    "STATUS_BAD_PARAM",
    "STATUS_ARCH_MISMATCH",
)
"""CUDA's errors that a call gets and that leave the context as it was (CUDA Runtime API,
"Error Handling": after others "the process must be terminated and relaunched")."""

_LIBRARIES = ("onnxruntime",)
"""Their errors derive from nothing but Exception."""


class DeviceLostError(ModelError):
    """The GPU does not compute any more in this process, whatever it is given: an assertion failed
    on it, or it accessed memory that is not there. Only another process can go on."""


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's, the system's, torch's on a GPU (by name,
    so that torch need not be imported), or that of a library, which is a RuntimeError and says it
    in words."""
    if isinstance(exc, MemoryError) or (isinstance(exc, OSError) and exc.errno == errno.ENOMEM):
        return True
    if type(exc).__name__ in ("OutOfMemoryError", "ArrowMemoryError"):
        return True
    return _is_librarys(exc) and any(words in str(exc) for words in _FULL)


def is_device_lost(exc: BaseException) -> bool:
    """Whether an error says that CUDA's context in this process is gone: every later call gets the
    same error."""
    if isinstance(exc, DeviceLostError):
        return True
    if is_out_of_memory(exc) or not _is_librarys(exc):
        return False
    # the lines that follow are advice
    text = first_line(exc)
    return any(words in text for words in _CUDA_ERRORS) and not any(
        words in text for words in _PASSING
    )


def first_line(exc: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]


def _is_librarys(exc: BaseException) -> bool:
    return isinstance(exc, RuntimeError) or type(exc).__module__.partition(".")[0] in _LIBRARIES


def without_locals(exc: BaseException) -> BaseException:
    """The same error, and those it came of, without what was in the variables of the functions that
    raised it: a batch's activations, which an error that is stored would hold. Where it was raised
    can still be reported."""
    waiting, seen = [exc], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            # those that still run are left alone
            traceback.clear_frames(one.__traceback__)
            waiting += [other for other in (one.__cause__, one.__context__) if other is not None]
    return exc


# ---- Memory: what may still be taken, what was taken at most, what is given back.

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_CGROUP = Path("/sys/fs/cgroup")

_PAUSE_SOFT = 1
"""``omp_pause_soft`` of OpenMP 5.0, §3.2.44: what is given up comes back by itself when it is
needed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""``mallopt(3)``."""
_MMAP_BYTES = 32 * 2**20
"""The most that glibc takes."""
_TRIM_BYTES = 256 * 2**20


def available_bytes() -> int:
    """Memory that can be taken without swapping: the machine's, or the container's where that is
    less. Files that were read and lie in a container's memory take none: they are dropped first
    (``inactive_file`` of the kernel's "Control Group v2"; Kubernetes counts a working set so,
    too)."""
    free = _meminfo()
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        cached = _field(_CGROUP / "memory.stat", "inactive_file") or 0
        free = min(free, max(0, limit - used + cached))
    return free


def resident_bytes() -> int:
    """Memory this process holds now."""
    return _status("VmRSS")


class ResidentPeak:
    """The largest memory this process held, over all and since the last :meth:`lap`, which is the
    same for all of this class: the system counts one peak."""

    _highest = 0

    def __init__(self) -> None:
        self._can_reset = os.access(_CLEAR, os.W_OK)

    def bytes(self) -> int:
        """The highest so far."""
        ResidentPeak._highest = max(ResidentPeak._highest, _peak())
        return ResidentPeak._highest

    def lap(self) -> int:
        """Since the last lap, and begin the next; 0 where the system cannot tell."""
        if not self._can_reset:
            return 0
        peak = _peak()
        ResidentPeak._highest = max(ResidentPeak._highest, peak)
        try:
            # Linux: the peak begins again
            _CLEAR.write_text("5")
        except OSError:
            self._can_reset = False
        return peak


def _peak() -> int:
    if peak := _status("VmHWM"):
        return peak
    kib = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kib


def _status(name: str) -> int:
    return 1024 * (_field(_STATUS, f"{name}:") or 0)


def _meminfo() -> int:
    kib = _field(Path("/proc/meminfo"), "MemAvailable:")
    if kib is not None:
        return kib * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _field(path: Path, name: str) -> int | None:
    """The number behind a name at the beginning of a line of a file of the kernel's."""
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return next((int(words[1]) for words in lines if words[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        # no such control group, or "max"
        return None


def release_threads() -> None:
    """Let the calling thread's compute threads go, before another thread computes; they come back
    when this one computes again.

    GNU's OpenMP counts the threads of all such teams. Once there are more than CPUs, a thread that
    is out of work sleeps at once instead of spinning for a moment, and every parallel region waits
    for it to wake up: MiniLM on 2 CPUs took 12.4 to 13.4 s for what takes 9.5 s with one team.
    """
    # no OpenMP was loaded, or one of before 5.0
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).omp_pause_resource_all(_PAUSE_SOFT)


def give_back() -> None:
    """Have ``malloc`` and Arrow's pool give freed memory back to the system, now; what is held
    afterwards is in use."""
    # who only looks at CPUs does without
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    # another C library than GNU's
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Have ``malloc`` keep freed memory, up to 256 MiB in each of its arenas, instead of giving it
    back to the system after every layer of every batch; for the whole process, from now on. Blocks
    of more than 32 MiB are given back all the same.

    A thread other than the first gives back what a batch's activations took as soon as they are
    freed, and has every page of them zeroed again for the next batch: 1.4 M page faults over 2 M
    rows of a small MLP, 6.1 to 7.0 s for what takes 3.3 s without them.
    """
    # another C library than GNU's
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
