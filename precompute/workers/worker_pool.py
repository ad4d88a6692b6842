"""Worker pool: computes windows in several worker processes, one per GPU or as many as are
configured. Seen from outside it is a :class:`precompute.engine.runner.Runner`, which each worker
runs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa

from precompute.engine.ahead import Meter, closed
from precompute.engine.batches import DEVICE_WINDOW_ROWS
from precompute.engine.resources import ResidentPeak
from precompute.engine.rows import Outcome, RejectedRow
from precompute.engine.runner import HAND_ON_S
from precompute.store.errors import ConfigError, ModelError
from precompute.workers.process import end_all, end_in_words, read_frame
from precompute.workers.worker import (
    END_S,
    HeldWindow,
    Patience,
    Share,
    Task,
    WorkerProcess,
    WorkerSpec,
)

log = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Windows that a worker has: one that the model computes, one that is being prepared."""

HELD = 4
"""Windows for each worker that may be read and not yet taken, finished or not: the others go on
this long while one is slow."""

LOAD_TRIES = 3
"""Tries of a worker that ends while it loads a model which another one has loaded: it may have been
killed from outside, and its device may be broken."""

PARTS = 16
"""Parts that rows are cut into when they are tried again: those without the row to blame cost what
they take to compute, and the one with it a worker's start and the wait for it. So four steps find
one of 65,536, where halves take sixteen."""

MAX_FRUITLESS = 24
"""Workers that may die one after the other without any window or part of one finished in between; 4
for each worker, if that is more. To find one row among 131,072 takes 8, if it is always in the
first part and nothing is finished meanwhile."""


def _start(thread: threading.Thread, windows: Iterable[pa.RecordBatch]) -> None:
    try:
        thread.start()
    except RuntimeError as exc:
        # nobody else would close them
        closed(windows, exc)
        raise


class PoolStream:
    """One call of :meth:`WorkerPool.stream`. All state is under ``_changed``; the supervisor's
    thread starts, feeds, judges and ends the processes, which end with that thread (Linux), so it
    lives as long as they do."""

    def __init__(
        self,
        pool: WorkerPool,
        memory_mb: int,
        windows: Iterable[pa.RecordBatch],
        hidden: set[str],
    ) -> None:
        self._pool, self._meter, self._patience = pool, pool.meter, pool.patience
        workers = len(pool.devices)
        self._changed = threading.Condition()
        self._max_windows = HELD * workers
        self._max_bytes = memory_mb * 2**20 // 2
        self._share = Share(workers, max(1, memory_mb // 2 // workers), self._patience.heartbeat_s)
        self._processes: list[WorkerProcess] = []
        self._unloaded = [0] * workers
        self._loaded_once = False
        self._fruitless = 0
        self._order: deque[HeldWindow] = deque()
        self._held_bytes = 0
        self._fresh: deque[Task] = deque()
        self._suspects: deque[Task] = deque()
        self._last_tries: deque[Task] = deque()
        """Tasks of rows that hung: each may take all patience, so whatever else there is goes
        first."""
        self._windows = 0
        self._all_read = self._closed = False
        self._source_error: BaseException | None = None
        self._error: BaseException | None = None
        self._supervisor = threading.Thread(
            target=self._supervise, args=(windows,), name="workers", daemon=True
        )
        self._reader = threading.Thread(
            target=self._read, args=(windows, hidden), name="read", daemon=True
        )
        _start(self._supervisor, windows)

    # ---- the consumer's side

    def next(self) -> tuple[pa.RecordBatch, Outcome] | None:
        """The next window in order, complete; or what has waited long for the rest of its window,
        or for those before it; None after the last."""
        with self._changed:
            while True:
                now = time.monotonic()
                due = [one for one in self._order if now - one.waits_since >= HAND_ON_S]
                if self._order and not self._order[0].open_rows:
                    due.insert(0, self._order[0])
                if due:
                    window = due[0]
                    self._held_bytes -= window.pieces_bytes
                    if not window.open_rows:
                        self._order.remove(window)
                        self._held_bytes -= window.size_bytes
                    self._changed.notify_all()
                    return window.batch, window.outcome(self._pool.spec.view)
                if self._error is not None:
                    raise self._error
                if self._all_read and not self._order:
                    if self._source_error is not None:
                        raise self._source_error
                    return None
                first = min((one.waits_since for one in self._order), default=math.inf)
                self._changed.wait(first + HAND_ON_S - now if first < math.inf else None)

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._supervisor.join()
        self._meter.rows_retried = 0
        if self._reader.is_alive():
            # it may be in the middle of reading
            self._reader.join(END_S)

    # ---- the source

    def _read(self, windows: Iterable[pa.RecordBatch], hidden: set[str]) -> None:
        times, error = self._meter.stage("read"), None
        source = iter(windows)
        try:
            while True:
                started = time.monotonic()
                batch = next(source, None)
                times.busy_s += time.monotonic() - started
                if batch is None or not self._put(batch, hidden):
                    break
        except BaseException as exc:
            # it belongs to the one who takes the windows, after those that were read before
            error = exc
        finally:
            error = closed(source, error)
            times.cpu_s += time.thread_time()
            with self._changed:
                self._all_read, self._source_error = True, error
                self._changed.notify_all()

    def _put(self, batch: pa.RecordBatch, hidden: set[str]) -> bool:
        shown = (
            batch.select([n for n in batch.schema.names if n not in hidden]) if hidden else batch
        )
        window = HeldWindow(self._windows, batch, shown, batch.num_rows, int(batch.nbytes))
        self._windows += 1
        started = time.monotonic()
        with self._changed:
            while (
                self._order
                and (
                    self._held_bytes + window.size_bytes > self._max_bytes
                    or len(self._order) >= self._max_windows
                )
                and not self._closed
            ):
                self._changed.wait()
            self._meter.stage("read").blocked_s += time.monotonic() - started
            self._order.append(window)
            self._held_bytes += window.size_bytes
            if batch.num_rows:
                self._fresh.append(Task(window, np.arange(batch.num_rows)))
            self._changed.notify_all()
            return not self._closed

    # ---- what workers say

    def _listen(self, process: WorkerProcess, file: IO[bytes]) -> None:
        """Take a process's messages until it ends; in a thread of its own."""
        with file:
            try:
                while (frame := read_frame(file)) is not None:
                    header, body = frame
                    batch = None if body is None else body.read_next_batch()
                    with self._changed:
                        if process.buried:
                            break
                        self._heard(process, header, batch)
                        self._changed.notify_all()
            except BaseException as exc:
                with self._changed:
                    self._error = self._error or exc
        with self._changed:
            process.hung_up = True
            self._changed.notify_all()

    def _heard(
        self, process: WorkerProcess, header: dict[str, Any], batch: pa.RecordBatch | None
    ) -> None:
        process.heard = time.monotonic()
        match header["kind"]:
            case "ready":
                process.ready = self._loaded_once = True
                self._unloaded[process.number] = 0
                process.progress = process.heard
                self._pool.states[process.number] = dict(header["device"])
            case "beat":
                process.beat(header["steps"], self._patience)
            case "done":
                assert batch is not None
                process.progressed(self._patience)
                self._fruitless = 0
                process.count(
                    self._meter, header["figures"], header["stages"], header["batch_steps"]
                )
                self._pool.states[process.number] |= header["state"]
                self._finished(process.in_flight[0], header["rejections"], batch)
                if header["last"]:
                    process.in_flight.popleft()
            case "error":
                kind = ConfigError if header["error"] == ConfigError.__name__ else ModelError
                self._error = self._error or kind(header["text"])

    def _finished(
        self, task: Task, rejections: Sequence[tuple[int, str, str]], batch: pa.RecordBatch
    ) -> None:
        features = pa.RecordBatch.from_arrays(
            batch.columns[1:], schema=self._pool.spec.view.feature_schema()
        )
        rows, bad = (
            np.asarray(batch.column(0)),
            np.array([row for row, _, _ in rejections], np.int64),
        )
        task.left[rows] = task.left[bad] = False
        reason = [
            RejectedRow(int(task.rows[row]), stage, error) for row, stage, error in rejections
        ]
        task.window.add(len(rows) + len(reason), reason, task.rows[rows], features)
        if task.suspect:
            self._meter.rows_retried -= len(rows) + len(reason)
        self._held_bytes += int(features.nbytes) if len(rows) else 0

    # ---- the supervisor

    def _supervise(self, windows: Iterable[pa.RecordBatch]) -> None:
        patience = self._patience
        tick = min(1.0, patience.heartbeat_s, patience.stall_s / 4, patience.hang_s / 4)
        try:
            # here, so that no worker is left where there is no thread more
            _start(self._reader, windows)
            for number in range(len(self._unloaded)):
                self._processes.append(self._started(number))
            looked = time.monotonic()
            while True:
                with self._changed:
                    self._deal()
                    self._changed.wait(tick)
                    if self._closed or self._error is not None:
                        return
                    now = time.monotonic()
                    # this process, or the machine: no worker is to blame
                    paused = max(0.0, now - looked - tick)
                    looked = now
                    for process in self._processes:
                        process.heard += paused
                        process.progress += paused
                    # one bad row may cost as many in turn: its window's worker, and then one with
                    # it alone
                    fruitless = self._fruitless - len(self._unloaded) - 1
                    given_up = {
                        process: how
                        for process in self._processes
                        if (how := process.judged(now, patience, fruitless)) is not None
                    }
                    for process in given_up:
                        process.buried = True
                for process, how in given_up.items():
                    self._replace(process, how)
        except BaseException as exc:
            with self._changed:
                self._error = self._error or exc
        finally:
            self._end()
            with self._changed:
                self._changed.notify_all()

    def _started(self, number: int) -> WorkerProcess:
        pool = self._pool
        return WorkerProcess(number, pool.spec, pool.devices[number], self._share, self._listen)

    def _deal(self) -> None:
        """Give every worker work: each its first window before any gets its second, and a suspect
        one to a worker that has nothing else."""
        for wanted in range(1, IN_FLIGHT + 1):
            for process in self._processes:
                if not process.ready or process.hung_up or len(process.in_flight) >= wanted:
                    continue
                if process.in_flight:
                    if process.in_flight[0].suspect or self._suspects or not self._fresh:
                        continue
                    task = self._fresh.popleft()
                elif self._suspects or self._fresh or self._last_tries:
                    task = (self._suspects or self._fresh or self._last_tries).popleft()
                else:
                    continue
                process.give(task)

    def _replace(self, process: WorkerProcess, how: str) -> None:
        end_all([process], 0.0)
        process.close()
        words, ended = process.last_words(), end_in_words(process.status)
        reason = (how or ended) + (f"; the last line of its stderr: {words[:300]}" if words else "")
        self._unloaded[process.number] += not process.ready
        if not process.ready and (
            not self._loaded_once or self._unloaded[process.number] >= LOAD_TRIES
        ):
            raise ModelError(
                f"the model {self._pool.spec.use!r} could not be loaded: its worker process"
                f" {reason}"
            )
        self._fruitless += 1
        if self._fruitless > max(MAX_FRUITLESS, 4 * len(self._unloaded)):
            raise ModelError(
                f"{self._fruitless} worker processes died one after the other and none finished any"
                f" rows in between; the last one {reason}; try the model on a few rows, or with"
                " fewer workers where memory is short"
            )
        self._meter.workers_replaced += 1
        with self._changed:
            alone = len(process.in_flight) == 1
            rows = sum(int(task.left.sum()) for task in process.in_flight)
            rejected = sum(
                [
                    self._lost(task, alone, reason, at == 0, hung=bool(how))
                    for at, task in enumerate(process.in_flight)
                ]
            )
            self._changed.notify_all()
        log.warning(
            "%s: worker %d %s; it is replaced, %s",
            self._pool.spec.view.name,
            process.number,
            reason,
            (
                "and the row it had is rejected"
                if rejected
                else f"{rows:,} row{'s are' if rows != 1 else ' is'} tried again"
            ),
        )
        self._processes[process.number] = self._started(process.number)

    def _lost(self, task: Task, alone: bool, reason: str, first: bool, *, hung: bool) -> bool:
        """Handle the rows of a worker that died: tried once more, or in parts, or, of a single row,
        rejected; returns whether it is that."""
        rows = task.rows[task.left]
        deaths = task.deaths + alone if len(rows) == len(task.rows) else int(alone)
        if not len(rows):
            # it died between the last row and saying so
            return False
        # whole, they would hang it once more
        parts = min(PARTS, len(rows)) if task.suspect or (hung and first) else 1
        hung |= task.hung
        if len(rows) == 1 and deaths >= self._patience.attempts:
            error = f"its worker process {reason} ({deaths} of {self._patience.attempts} tries)"
            task.window.add(
                1, [RejectedRow(int(rows[0]), "worker", error)], np.empty(0, np.int64), None
            )
            self._meter.rows_retried -= task.suspect
            return True
        self._meter.rows_retried += 0 if task.suspect else len(rows)
        # models that name no costs take rows in order: the first of those left are the likeliest,
        # and by the others is measured how long to wait for them
        for part in reversed(np.array_split(rows, parts)):
            again = Task(
                task.window, part, suspect=True, hung=hung, deaths=deaths if parts == 1 else 0
            )
            (
                self._last_tries if hung and self._patience.is_last_try(again) else self._suspects
            ).append(again)
        return False

    def _end(self) -> None:
        end_all(self._processes, END_S)
        for process in self._processes:
            process.close()


class WorkerPool:
    """Runs one model for one view in worker processes.

    Args:
        spec: the model and the view.
        meter: what the workers did is added to it; the stages ``prepare``, ``model`` and ``check``
            are sums over all of them.
        devices: one worker each, at least one. ``cuda:1`` is that GPU, which the worker sees as its
            only one; ``cpu`` shows it none; None changes nothing. An argument ``device`` of the
            model's gives way.
        heartbeat_s: every worker sends a sign of life this often.
        stall_s: without one for so long it is given up: a stopped process, or native code that
            never lets go of Python's lock.
        hang_s: with signs of life, but no batch finished for so long, too. Loading the model may
            take this long, and :data:`precompute.workers.worker.LOAD_S` at least. Of rows that a
            worker was given up with, both are less
            (:meth:`precompute.workers.worker.Patience.for_task`) until one of them is tried for
            the last time.
        attempts: how often a row may end a worker that had nothing else, before it is rejected.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        meter: Meter,
        devices: Sequence[str | None],
        *,
        heartbeat_s: float = 1.0,
        stall_s: float = 60.0,
        hang_s: float = 600.0,
        attempts: int = 2,
    ) -> None:
        self.spec, self.meter, self.devices = spec, meter, list(devices)
        self.patience = Patience(heartbeat_s, stall_s, hang_s, attempts)
        self.states: dict[int, dict[str, Any]] = {}
        """Number of a worker → what it reported last of its device, budget and memory."""

    @property
    def window_rows(self) -> int:
        """As :attr:`precompute.engine.runner.Runner.window_rows`."""
        return (
            DEVICE_WINDOW_ROWS
            if any((device or "").startswith("cuda") for device in self.devices)
            else 1
        )

    def figures(self, seconds: float) -> dict[str, Any]:
        """What the run's report says of the engine, as
        :meth:`precompute.engine.runner.Runner.figures`: memory is this process's and all workers',
        the budget, a device's memory and
        ``worker_peak_memory_bytes`` the largest of any, lanes one's, ``peak_flops`` a worker's,
        measured when its model was loaded and the others were busy with theirs;
        ``workers_replaced`` where any was."""
        count, states = len(self.devices), list(self.states.values())
        devices = ", ".join(sorted({device or "as they are" for device in self.devices}))
        figures = self.meter.to_json(seconds) | {
            "device": f"{count} workers: {devices}",
            "workers": count,
        }
        if self.meter.workers_replaced:
            figures["workers_replaced"] = self.meter.workers_replaced
        figures["cost_unit"] = states[0]["cost_unit"] if states else "rows"

        def reported(name: str) -> list[Any]:
            return [state[name] for state in states if name in state]

        peaks_bytes = reported("peak_memory_bytes")
        figures["peak_memory_bytes"] = ResidentPeak().bytes() + sum(peaks_bytes)
        figures["worker_peak_memory_bytes"] = max(peaks_bytes, default=0)
        for name in ("budget", "device_peak_memory_bytes"):
            if values := reported(name):
                figures[name] = max(values)
        if lanes := reported("lanes"):
            figures["lanes"] = lanes[0]
        if graphs := reported("graphs"):
            figures["graphs"] = {name: sum(counts[name] for counts in graphs) for name in graphs[0]}
        if (peaks := reported("peak_flops")) and self.meter.flops:
            figures |= self.meter.peak_figures(sum(peaks) / len(peaks))
        return figures

    def stream(
        self,
        windows: Iterable[pa.RecordBatch],
        *,
        hidden: Iterable[str] = (),
        memory_mb: int = 512,
    ) -> Generator[tuple[pa.RecordBatch, Outcome]]:
        """Run the model over many windows; windows and rows come out in the order they went in, but
        pieces of those that take longer than :data:`precompute.engine.runner.HAND_ON_S` as they are
        made, as in :meth:`precompute.engine.runner.Runner.stream`. Closing the generator ends the
        workers.

        Args:
            windows: rows, at most a few thousand at a time; advanced in a thread.
            hidden: columns of them that the workers do not get.
            memory_mb: bound of the windows and features held, half here and half in the workers,
                their current windows apart.

        Yields:
            each window as it came, and its features, or those of some of its rows; rows that end
                their worker are rejected with the stage ``worker``.

        Raises:
            ModelError: as of a :class:`precompute.engine.runner.Runner`; or workers die before the
                model is loaded, or one after the other.
            ConfigError: the model does not load, as in :func:`precompute.registry.load_model`, or
                is not the spec's; and whatever ``windows`` raises.
        """
        stream = PoolStream(self, memory_mb, windows, set(hidden))
        times = self.meter.stage("write")
        try:
            while True:
                requested = time.monotonic()
                item = stream.next()
                if item is None:
                    return
                came = time.monotonic()
                times.starved_s += came - requested
                self.meter.rows += item[1].done
                yield item
                times.busy_s += time.monotonic() - came
        finally:
            stream.close()
