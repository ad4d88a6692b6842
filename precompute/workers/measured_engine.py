"""Measured engine: the model in the run's own process, and in worker processes from when they were measured to be quicker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import pyarrow as pa

from precompute.engine.memory import ResidentPeak, available_bytes
from precompute.engine.runner import Runner
from precompute.engine.window import Outcome
from precompute.lanes.cores import idle_s
from precompute.store.errors import ModelError, PrecomputeError
from precompute.workers.handover import Handover
from precompute.workers.pool_stream import PoolStream
from precompute.workers.worker_pool import WorkerPool
from precompute.workers.worker_trial import Moment, Phase, WorkerTrial

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.5
"""Of the free memory, at most, for all workers, if each takes what the run's own process took at most."""

Rows = Generator[tuple[pa.RecordBatch, Outcome]]


class MeasuredEngine:
    """Runs one model for one view; seen from outside it is its :class:`precompute.engine.runner.Runner`.

    Args:
        runner: computes in this process.
        pool: makes so many workers of the same model, with the runner's meter; asked once at most, in the thread that takes the rows.
        trial: says which of them computes.
    """

    def __init__(self, runner: Runner, pool: Callable[[int], WorkerPool], trial: WorkerTrial) -> None:
        self._runner, self._made, self._trial = runner, pool, trial
        self._pool: WorkerPool | None = None
        self._workers: PoolStream | None = None

    @property
    def window_rows(self) -> int:
        """As :attr:`precompute.engine.runner.Runner.window_rows`."""
        return self._runner.window_rows

    def figures(self, seconds: float) -> dict[str, Any]:
        """As of whoever computed last, and ``worker_trial`` (:meth:`WorkerTrial.figures`) where something was measured for it."""
        by_workers = self._trial.in_phase(Phase.WORKERS, Phase.KEPT)
        figures = (self._pool if by_workers and self._pool is not None else self._runner).figures(seconds)
        trial = self._trial.figures()
        return figures | ({"worker_trial": trial} if trial else {})

    def stream(self, windows: Iterable[pa.RecordBatch], *, hidden: Iterable[str] = (), memory_mb: int = 512) -> Rows:
        """As :meth:`precompute.engine.runner.Runner.stream`. What either had begun and not handed on when the other takes over, some seconds' worth, is computed
        once more.

        Raises:
            ModelError, ConfigError: as there; and, once workers were found to be quicker, as :meth:`WorkerPool.stream`. That they fail before is no error.
        """
        handover, names = Handover(windows), list(hidden)
        try:
            yield from self._in_process(handover, names, memory_mb)
            if self._trial.in_phase(Phase.WORKERS):
                yield from self._in_workers(handover, names, memory_mb)
                if self._trial.in_phase(Phase.NONE):
                    yield from self._in_process(handover, names, memory_mb)
        finally:
            self._close_workers()
            handover.close()

    def _in_process(self, handover: Handover, hidden: Sequence[str], memory_mb: int) -> Rows:
        """Until workers are ready, or to the end."""
        stream = self._runner.stream(handover.turn(), hidden=hidden, memory_mb=memory_mb)
        try:
            for _, done in stream:
                yield handover.told(done)
                if self._trial.in_phase(Phase.ALONE, Phase.STARTING):
                    self._trial.told(self._now(), int(MEMORY_SHARE * available_bytes() // ResidentPeak().bytes()))
                    self._look_after_workers(memory_mb)
                    if self._trial.in_phase(Phase.WORKERS):
                        return
        finally:
            stream.close()

    def _in_workers(self, handover: Handover, hidden: Sequence[str], memory_mb: int) -> Rows:
        """Until they were found to be no quicker, or to the end."""
        assert self._pool is not None
        stream = self._pool.stream(
            handover.turn(self._trial.slice_rows), hidden=hidden, memory_mb=memory_mb, started=self._workers
        )
        try:
            for _, done in stream:
                yield handover.told(done)
                self._trial.told(self._now())
                if self._trial.in_phase(Phase.NONE):
                    return
        except ModelError as exc:
            if not self._trial.in_phase(Phase.WORKERS):
                raise
            # nobody asked for them, and this process computed: what is the model's fault, it comes to as well
            self._trial.failed(str(exc))
            log.warning("the workers that were tried are given up, and the run's own process goes on: %s", exc)
        finally:
            stream.close()

    def _look_after_workers(self, memory_mb: int) -> None:
        if self._trial.in_phase(Phase.STARTING):
            try:
                if self._workers is None:
                    self._pool = self._made(self._trial.processes)
                    self._workers = self._pool.started(memory_mb)
                elif self._workers.ready():
                    self._trial.ready()
            except (PrecomputeError, OSError, RuntimeError) as exc:
                # or there are no more processes to be had, or threads: this one goes on
                self._trial.failed(str(exc))
        if self._trial.in_phase(Phase.NONE):
            self._close_workers()

    def _close_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _now(self) -> Moment:
        meter = self._runner.meter
        model_s = meter.stage("model").busy_s
        return Moment(time.monotonic(), meter.rows, meter.cost or meter.rows, time.process_time(), idle_s(), model_s)
