"""Usage: what a run takes of its machine: CPU seconds of its stages, memory, bytes, and how idle
the machine was meanwhile."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from precompute.engine.cores import allowed, usable_threads
from precompute.engine.memory import ResidentPeak
from precompute.store.offline.runs import Report
from precompute.store.times import duration

_STAT, _IO = Path("/proc/stat"), Path("/proc/self/io")


class UsageMeter:
    """Reads the process's and the machine's own counters: 0.1 ms when a run begins, and when it
    ends."""

    def __init__(self) -> None:
        self._began_s, self._machine, self._read = time.process_time(), _ticks(), _read_bytes()

    def fill(self, report: Report) -> None:
        """Complete the usage of a report, of the run that began with this meter; calling it again
        is no error."""
        usage = report.usage
        usage.cores = usable_threads(allowed())
        own_s = time.process_time() - self._began_s
        of_stages_s = sum(s for name, s in usage.cpu_s.items() if name != "other")
        usage.cpu_s["other"] = max(0.0, own_s - of_stages_s)
        for seconds in (usage.cpu_s, usage.workers_cpu_s):
            seconds.update({name: round(s, 3) for name, s in seconds.items()})
        usage.peak_bytes = ResidentPeak().bytes()
        usage.read_bytes = max(0, _read_bytes() - self._read)
        ticks = [now - then for now, then in zip(_ticks(), self._machine, strict=False)]
        # a run of an instant, or a system that does not tell
        if sum(ticks) > 0:
            usage.idle, usage.steal = (
                round(part / sum(ticks), 3) for part in (ticks[3] + ticks[4], ticks[7])
            )


class Overlapping:
    """CPU seconds of the stages that compute rows, which overlap: the reader's thread is ``read``,
    what :meth:`Report.stage` counts by ``time.thread_time`` is that stage's, and all else that the
    process computes meanwhile is ``model``, threads that libraries start included. Child processes
    that end in between are workers."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._before_s, self._children_s = self._uncounted_s(), _children_s()

    def end(self, read_s: float) -> None:
        """Count them; ``read_s`` is what the reader's thread computed."""
        model_s = self._uncounted_s() - self._before_s - read_s
        self._report.add_cpu("read", read_s)
        self._report.add_cpu("model", max(0.0, model_s))
        if (workers_s := _children_s() - self._children_s) > 0:
            self._report.add_cpu("model", workers_s, workers=True)

    def _uncounted_s(self) -> float:
        return time.process_time() - sum(self._report.usage.cpu_s.values())


def usage_line(report: Report) -> str:
    """What a run took, in one line; empty where that was not recorded."""
    usage = report.usage
    if not usage.cores:
        return ""
    own_s, workers_s = sum(usage.cpu_s.values()), sum(usage.workers_cpu_s.values())
    said = [f"{own_s:,.1f} CPU s of {usage.cores} core{'s' * (usage.cores > 1)}"]
    said += [f"{workers_s:,.1f} of workers"] if workers_s else []
    said += [f"{duration(usage.gpu_s)} of GPUs"] if usage.gpu_s else []
    said += [f"the machine {usage.idle:.0%} idle"] if usage.idle is not None else []
    said += [f"peak {usage.peak_bytes / 2**20:,.0f} MiB"]
    for size_bytes, what in (
        (usage.read_bytes, "read"),
        (usage.written_bytes, "written"),
        (usage.loaded_bytes, "loaded"),
        (usage.spilled_bytes, "spilled"),
    ):
        said += [f"{size_bytes / 1e6:,.1f} MB {what}"] if size_bytes else []
    return " · ".join(said)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ticks() -> list[int]:
    """The machine's CPU time since it was started, in ticks: user, nice, system, idle, waiting for
    disks, interrupts (2), steal; empty where the system does not tell."""
    try:
        with _STAT.open() as file:
            return [int(number) for number in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return []


def _read_bytes() -> int:
    try:
        return int(_IO.read_text().partition("rchar:")[2].split(maxsplit=1)[0])
    except (OSError, ValueError, IndexError):
        return 0
