"""Worker trial: whether worker processes on a CPU compute a run's rows quicker than its own process does, found by what the run's rows take anyway.

Lanes share one copy of the weights and one process. What they cannot do: models bound by Python's lock, which compute on one CPU however many there
are, and several NUMA nodes, whose CPUs all read the weights from one. Memory for copies and seconds for starting are only spent where the rest of the run is long.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

SETTLE_S = 20.0
"""Before anything is measured, of either: batches find their size, the source's reading and the accuracy check beside the run are over with the first chunk (15 s)."""
MEASURE_S = 10.0
"""How long each is measured at least; pieces come about once a second."""
REST_S = 60.0
"""Of a run, or it is over before processes pay."""
START_SHARE = 0.1
"""Of the rest, at most, until the last worker has loaded the model."""
GAIN = 1.1
"""Processes are kept that are so many times as fast: each has a copy of the model."""
MODEL_SHARE = 0.8
"""Of the time the model must be busy, or it is not what the run waits for."""
LEAST_USED = 0.7
"""CPUs' time used in a second, or the model waits for something: another machine perhaps, which is not to be asked by many at once because nobody said so."""
LEAST_IDLE = 0.4
"""Share of the CPUs that nobody uses, other processes among them."""
MOST_PROCESSES = 16
"""That are started unasked: so many are fed by one; more were not measured."""
SLICE_S = 10.0
"""Of work for one process, about: windows are cut to it, so that all end about together."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known of a run at a time: seconds of a clock, of the process's CPUs, of the idle CPUs, and of the model's stage; rows that are done and the work they were, in the model's unit."""

    at_s: float
    rows: int
    work: int
    cpu_s: float = 0.0
    idle_s: float = 0.0
    model_s: float = 0.0


class Phase(Enum):
    """Who computes, and what comes next."""

    ALONE = "alone"
    STARTING = "starting"
    """The run's own process, while workers load."""
    WORKERS = "workers"
    KEPT = "kept"
    """Workers, to the end."""
    NONE = "none"
    """The run's own process, to the end."""


class WorkerTrial:
    """Told how far a run is, it says who should compute.

    Args:
        rows: of the run.
        cpus: that it may use.
        nodes: NUMA nodes that they are of.
    """

    def __init__(self, rows: int, cpus: int, nodes: int = 1) -> None:
        self.phase = Phase.ALONE
        self.processes = 0
        """To start, once it is the phase for it."""
        self.slice_rows = 1
        """Of a window for one of them."""
        self._total, self._cpus, self._nodes = rows, cpus, nodes
        self._settle_from: float | None = None
        self._first: Moment | None = None
        self._until_s = 0.0
        self._rates: dict[str, float] = {}
        self._used = 0.0
        self._why = ""

    def in_phase(self, *phases: Phase) -> bool:
        """Whether it is one of these now."""
        return self.phase in phases

    def told(self, now: Moment, most: int = MOST_PROCESSES) -> None:
        """The run has come so far.

        Args:
            now: the moment.
            most: processes that memory allows.
        """
        if self.phase is Phase.STARTING and now.at_s > self._until_s:
            self.failed("not all had loaded the model in a tenth of the time that was left")
        if self.phase not in (Phase.ALONE, Phase.WORKERS):
            return
        if self._settle_from is None:
            self._settle_from = now.at_s
        if self._first is None:
            if now.at_s - self._settle_from >= SETTLE_S:
                self._first = now
            return
        seconds = now.at_s - self._first.at_s
        if seconds < MEASURE_S:
            return
        rate = (now.work - self._first.work) / seconds
        if self.phase is Phase.ALONE:
            self._rates["alone"] = rate
            self._judge_alone(self._first, now, seconds, most)
        else:
            self._rates["workers"] = rate
            self.phase = Phase.KEPT if rate >= GAIN * self._rates["alone"] else Phase.NONE

    def ready(self) -> None:
        """All workers have loaded the model, and compute from now on."""
        self.phase, self._first, self._settle_from = Phase.WORKERS, None, None

    def failed(self, why: str) -> None:
        """They cannot be had."""
        self.phase, self._why = Phase.NONE, why

    def figures(self) -> dict[str, Any]:
        """``cpus_used`` by the run's own process, of ``cpus``; where processes were tried how many, and whether they were ``kept`` or ``why`` they were given up;
        ``rates`` of both, in the model's unit a second. Empty before anything is known."""
        if not self._rates:
            return {}
        figures: dict[str, Any] = {"cpus": self._cpus, "cpus_used": round(self._used, 2)}
        figures["rates"] = {name: round(rate, 1) for name, rate in self._rates.items()}
        if self.processes:
            figures |= {"processes": self.processes, "kept": self.phase in (Phase.WORKERS, Phase.KEPT)}
        return figures | ({"why": self._why} if self._why else {})

    def _judge_alone(self, first: Moment, now: Moment, seconds: float, most: int) -> None:
        self._used = (now.cpu_s - first.cpu_s) / seconds
        rows_per_s = (now.rows - first.rows) / seconds
        # the machine's CPUs may be more than the process is granted the time of
        idle = min((now.idle_s - first.idle_s) / seconds, self._cpus - self._used)
        wanted = min(self._wanted(idle), most, MOST_PROCESSES)
        rest_s = (self._total - now.rows) / rows_per_s if rows_per_s else 0.0
        self.phase = Phase.NONE
        if wanted > 1 and rest_s >= REST_S and now.model_s - first.model_s >= MODEL_SHARE * seconds:
            self.phase, self.processes = Phase.STARTING, wanted
            self.slice_rows = max(1, round(SLICE_S * rows_per_s))
            self._until_s = now.at_s + START_SHARE * rest_s

    def _wanted(self, idle: float) -> int:
        if self._used >= LEAST_USED and idle >= LEAST_IDLE * self._cpus:
            return min(self._cpus, 1 + round(idle))
        # it uses them all, from one node's memory
        return self._nodes if self._used > (1 - LEAST_IDLE) * self._cpus else 1
