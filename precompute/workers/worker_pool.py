"""Worker pool: the model in processes of its own, one per GPU or several on a CPU, each pulling windows (see :mod:`precompute.workers.worker`).

A worker that is killed, goes silent or hangs is replaced. The windows it had are computed again, now alone in a worker so that blame is certain:
first all of what is left of them, for most often another process's hunger for memory was at fault, then in halves, until the row that ends its
worker stands alone. That row is tried a few times more and then rejected, and all others have their features. What was finished is not computed
again.

Seen from outside it is :meth:`precompute.engine.runner.Runner.stream`, which each worker runs.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.features import in_order
from precompute.engine.memory import ResidentPeak
from precompute.engine.meter import Meter
from precompute.engine.runner import HAND_ON_S
from precompute.engine.window import Outcome, RejectedRow, taken
from precompute.workers.process import ChildProcess, end_all
from precompute.workers.worker import FIGURES, read_frame, write_frame
from store.errors import ConfigError, ModelError
from store.feature_view import FeatureView

IN_FLIGHT = 2
"""Windows a worker has: one that the model is at, one that is being prepared."""

HELD = 4
"""Windows for each worker that may be read and not yet taken, finished or not: the others go on this long while one is slow."""

LOAD_TRIES = 3
"""Of a worker that ends while it loads a model which another one has loaded: it may have been killed from outside, and its device may be broken."""
MAX_FRUITLESS = 16
"""Workers that may die one after the other without any window or part of one finished in between; 4 for each worker, if that is more."""

LOAD_S = 600.0
"""How long a worker may be silent before its model is loaded: Python's lock is held while gigabytes of libraries come from a cold disk."""

END_S = 1.0
"""Between asking a worker to end and killing it."""

REAP_S = 5.0
"""How long a killed process is waited for; one that a driver holds in the kernel is left behind."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a worker needs to make the model: see :func:`precompute.registry.load_model`. ``args`` and ``convert`` are plain JSON, ``tables``
    further arguments.

    ``folder`` is the project's, where its own modules lie and the relative paths in ``args`` start from; ``convert`` is handed to
    :func:`precompute.workers.worker.prepare_model`. ``fingerprint`` is what :func:`precompute.model.model_fingerprint` must say of the model that a worker
    loaded, in ``precision``; None asks for nothing.
    """

    use: str
    args: Mapping[str, Any]
    tables: Mapping[str, pa.Table]
    view: FeatureView
    folder: Path | None = None
    convert: Mapping[str, Any] | None = None
    precision: str = "fp32"
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class _Patience:
    heartbeat_s: float
    stall_s: float
    hang_s: float
    attempts: int


class WorkerPool:
    """Runs one model for one view in worker processes.

    Args:
        spec: the model and the view.
        meter: what the workers did is added to it; the stages ``prepare``, ``model`` and ``check`` are sums over all of them.
        devices: one worker each, at least one. ``cuda:1`` is that GPU, which the worker sees as its only one; ``cpu`` shows it none; None changes
            nothing. An argument ``device`` of the model's gives way.
        heartbeat_s: every worker sends a sign of life this often.
        stall_s: without one for so long it is given up: a stopped process, or native code that never lets go of Python's lock.
        hang_s: with signs of life, but no batch finished for so long, too. Loading the model does not count.
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
        self._spec, self._meter, self._devices = spec, meter, list(devices)
        self._patience = _Patience(heartbeat_s, stall_s, hang_s, attempts)
        self._states: dict[int, dict[str, Any]] = {}
        """Of each worker, by its number: what it said last of its device, budget and memory."""

    def figures(self, seconds: float) -> dict[str, Any]:
        """What the run's report says of the engine, as :meth:`precompute.engine.runner.Runner.figures`: memory is this process's and all workers', the
        budget and a device's memory the largest of any, ``peak_flops`` a worker's, measured when its model was loaded and the others were
        busy with theirs."""
        count, known = len(self._devices), list(self._states.values())
        devices = ", ".join(sorted({device or "as they are" for device in self._devices}))
        found = self._meter.to_json(seconds) | {"device": f"{count} workers: {devices}", "workers": count}
        found["cost_unit"] = known[0]["cost_unit"] if known else "rows"
        found["peak_memory_bytes"] = ResidentPeak().bytes() + sum(state.get("peak_memory_bytes", 0) for state in known)
        for name in ("budget", "device_peak_memory_bytes"):
            if values := [state[name] for state in known if name in state]:
                found[name] = max(values)
        peaks = [state["peak_flops"] for state in known if "peak_flops" in state]
        if peaks and self._meter.flops:
            found["peak_flops"] = round(sum(peaks) / len(peaks))
            found["mfu"] = self._meter.mfu(found["peak_flops"])
        return found

    def stream(
        self, windows: Iterable[pa.RecordBatch], *, hidden: Iterable[str] = (), memory_mb: int = 512
    ) -> Generator[tuple[pa.RecordBatch, Outcome]]:
        """Run the model over many windows; windows and rows come out in the order they went in, but pieces of those that take longer than
        :data:`precompute.engine.runner.HAND_ON_S` as they are made, as in :meth:`precompute.engine.runner.Runner.stream`. Closing the generator ends the workers.

        Args:
            windows: rows, at most a few thousand at a time; advanced in a thread.
            hidden: columns of them that the workers do not get.
            memory_mb: bound of the windows and features held, half here and half in the workers, their current windows apart.

        Yields:
            each window as it came, and its features, or those of some of its rows; rows that end their worker are rejected with the stage ``worker``.

        Raises:
            ModelError: see :class:`precompute.engine.runner.Runner`; workers die before the model is loaded, or one after the other.
            ConfigError: the model does not load, as in :func:`precompute.registry.load_model`, or is not the spec's; and whatever ``windows`` raises.
        """
        run = _Stream(self._spec, self._meter, self._states, self._devices, self._patience, windows, hidden, memory_mb)
        times = self._meter.stage("write")
        try:
            while True:
                asked = time.monotonic()
                item = run.next()
                if item is None:
                    return
                given = time.monotonic()
                times.starved_s += given - asked
                self._meter.rows += item[1].done
                yield item
                times.busy_s += time.monotonic() - given
        finally:
            run.close()


@dataclass(slots=True)
class _Window:
    number: int
    batch: pa.RecordBatch
    given: pa.RecordBatch
    """What the workers see of it."""
    open_rows: int
    """Without features or a rejection so far."""
    size_bytes: int
    pieces: list[tuple[npt.NDArray[np.int64], pa.RecordBatch]] = field(default_factory=list)
    """Row numbers and features of each part that was computed, and not handed on."""
    rejections: list[RejectedRow] = field(default_factory=list)
    waits_since: float | None = None
    """When the first of them came."""
    pieces_bytes: int = 0

    def add(self, done: int, rejections: list[RejectedRow], rows: npt.NDArray[np.int64], features: pa.RecordBatch | None) -> None:
        if features is not None and len(rows):
            self.pieces.append((rows, features))
            self.pieces_bytes += int(features.nbytes)
        self.rejections += rejections
        self.open_rows -= done
        if done and self.waits_since is None:
            self.waits_since = time.monotonic()

    def computed(self, view: FeatureView) -> Outcome:
        """What was not handed on, which is from now on."""
        self.rejections.sort(key=lambda rejection: rejection.row)
        rows, features = in_order(view, self.pieces)
        made = Outcome(rows, features, self.rejections, self.number, not self.open_rows)
        self.pieces, self.rejections, self.waits_since, self.pieces_bytes = [], [], None, 0
        return made


@dataclass(slots=True)
class _Task:
    """Rows of one window that one worker is given."""

    window: _Window
    rows: npt.NDArray[np.int64]
    """Row numbers of the window, ascending."""
    left: npt.NDArray[np.bool_]
    """Which of them have neither features nor a rejection."""
    suspect: bool = False
    """It was with a worker that died: it is tried alone."""
    deaths: int = 0
    """Of workers that had nothing else."""

    @classmethod
    def of(cls, window: _Window, rows: npt.NDArray[np.int64], *, suspect: bool = False, deaths: int = 0) -> _Task:
        return cls(window, rows, np.ones(len(rows), np.bool_), suspect, deaths)


class _WorkerProcess(ChildProcess):
    """One life of a worker, and the threads that write to it and read from it."""

    def __init__(self, number: int, command: Sequence[str], environment: Mapping[str, str], stream: _Stream) -> None:
        super().__init__(command, output="piped", environment=environment)
        self.number = number
        self.in_flight: deque[_Task] = deque()
        self.outbox: queue.SimpleQueue[tuple[Mapping[str, Any], pa.RecordBatch | pa.Table | None] | None] = queue.SimpleQueue()
        self.ready = self.hung_up = self.buried = False
        self.steps = 0
        self.heard = self.progress = time.monotonic()
        self.figures: dict[str, float] = {}
        self.stages: dict[str, list[float]] = {}
        stdin, stdout = self.pipes()
        targets = {"write": lambda: self._write(stdin), "listen": lambda: stream.listen(self, stdout)}
        self._threads = [threading.Thread(target=t, name=f"worker-{number}-{n}", daemon=True) for n, t in targets.items()]
        for thread in self._threads:
            thread.start()

    def reap(self) -> str:
        """Kill what is left, and tell how the process ended."""
        self.signal(signal.SIGKILL)
        self.wait(REAP_S)
        self.outbox.put(None)
        for thread in self._threads:
            thread.join(END_S)
        return self.how_it_ended() + (", as by a system that is out of memory" if self.status == -signal.SIGKILL else "")

    def _write(self, file: IO[bytes]) -> None:
        # it died, which is noticed by whoever listens to it
        with contextlib.suppress(OSError), file:
            while (message := self.outbox.get()) is not None:
                write_frame(file, *message)


class _Stream:
    """One call of :meth:`WorkerPool.stream`. All state is under ``_changed``; the supervisor's thread starts, feeds, judges and ends the processes, which end with that
    thread (Linux), so it lives as long as they do."""

    def __init__(
        self,
        spec: WorkerSpec,
        meter: Meter,
        states: dict[int, dict[str, Any]],
        devices: Sequence[str | None],
        patience: _Patience,
        windows: Iterable[pa.RecordBatch],
        hidden: Iterable[str],
        memory_mb: int,
    ) -> None:
        self._spec, self._meter, self._states, self._devices, self._patience = spec, meter, states, devices, patience
        self._changed = threading.Condition()
        self._max_windows = HELD * len(devices)
        self._max_bytes = memory_mb * 2**20 // 2
        self._worker_memory_mb = max(1, memory_mb // 2 // len(devices))
        self._processes: list[_WorkerProcess] = []
        self._unloaded = [0] * len(devices)
        self._loaded_once = False
        self._fruitless = 0
        self._order: deque[_Window] = deque()
        self._held_bytes = 0
        self._fresh: deque[_Task] = deque()
        self._suspects: deque[_Task] = deque()
        self._windows = 0
        self._all_read = self._closed = False
        self._source_error: BaseException | None = None
        self._error: BaseException | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="workers", daemon=True)
        self._reader = threading.Thread(target=self._read, args=(windows, set(hidden)), name="read", daemon=True)
        self._supervisor.start()
        self._reader.start()

    # ---- the consumer's side

    def next(self) -> tuple[pa.RecordBatch, Outcome] | None:
        """The next window in order, complete; or what has waited long for the rest of its window, or for those before it; None after the last."""
        with self._changed:
            while True:
                now = time.monotonic()
                due = [
                    window for window in self._order if window.waits_since is not None and now - window.waits_since >= HAND_ON_S
                ]
                if self._order and not self._order[0].open_rows:
                    due.insert(0, self._order[0])
                if due:
                    window = due[0]
                    self._held_bytes -= window.pieces_bytes
                    if not window.open_rows:
                        self._order.remove(window)
                        self._held_bytes -= window.size_bytes
                    self._changed.notify_all()
                    return window.batch, window.computed(self._spec.view)
                if self._error is not None:
                    raise self._error
                if self._all_read and not self._order:
                    if self._source_error is not None:
                        raise self._source_error
                    return None
                waiting = [window.waits_since for window in self._order if window.waits_since is not None]
                self._changed.wait(min(waiting) + HAND_ON_S - now if waiting else None)

    def close(self) -> None:
        """End the workers, whatever they are at."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._supervisor.join()
        self._reader.join(END_S)  # it may be in the middle of reading

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
        except BaseException as exc:  # it belongs to whoever takes the windows, after those that were read before
            error = exc
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                try:
                    close()
                except BaseException as exc:
                    error = error or exc
            with self._changed:
                self._all_read, self._source_error = True, error
                self._changed.notify_all()

    def _put(self, batch: pa.RecordBatch, hidden: set[str]) -> bool:
        given = batch.select([n for n in batch.schema.names if n not in hidden]) if hidden else batch
        window = _Window(self._windows, batch, given, batch.num_rows, int(batch.nbytes))
        self._windows += 1
        started = time.monotonic()
        with self._changed:
            while (
                self._order
                and (self._held_bytes + window.size_bytes > self._max_bytes or len(self._order) >= self._max_windows)
                and not self._closed
            ):
                self._changed.wait()
            self._meter.stage("read").blocked_s += time.monotonic() - started
            self._order.append(window)
            self._held_bytes += window.size_bytes
            if batch.num_rows:
                self._fresh.append(_Task.of(window, np.arange(batch.num_rows)))
            self._changed.notify_all()
            return not self._closed

    # ---- what workers say

    def listen(self, process: _WorkerProcess, file: IO[bytes]) -> None:
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

    def _heard(self, process: _WorkerProcess, header: dict[str, Any], batch: pa.RecordBatch | None) -> None:
        process.heard = time.monotonic()
        match header["kind"]:
            case "ready":
                process.ready = self._loaded_once = True
                self._unloaded[process.number] = 0
                process.progress = process.heard
                self._states[process.number] = dict(header["device"])
            case "beat":
                if header["steps"] != process.steps:
                    process.steps, process.progress = header["steps"], process.heard
            case "done":
                assert batch is not None
                process.progress = process.heard
                self._fruitless = 0
                self._count(process, header)
                self._finished(process.in_flight[0], header["rejections"], batch)
                if header["last"]:
                    process.in_flight.popleft()
            case "error":
                kind = ConfigError if header["error"] == ConfigError.__name__ else ModelError
                self._error = self._error or kind(header["text"])

    def _finished(self, task: _Task, rejections: Sequence[tuple[int, str, str]], batch: pa.RecordBatch) -> None:
        features = pa.RecordBatch.from_arrays(batch.columns[1:], schema=self._spec.view.feature_schema())
        rows, bad = np.asarray(batch.column(0)), np.array([row for row, _, _ in rejections], np.int64)
        task.left[rows] = task.left[bad] = False
        told = [RejectedRow(int(task.rows[row]), stage, error) for row, stage, error in rejections]
        task.window.add(len(rows) + len(told), told, task.rows[rows], features)
        self._held_bytes += int(features.nbytes) if len(rows) else 0

    def _count(self, process: _WorkerProcess, header: Mapping[str, Any]) -> None:
        """Add what the worker's meter says beyond what it said before."""
        for name in FIGURES:
            more = header["figures"][name] - process.figures.get(name, 0)
            setattr(self._meter, name, getattr(self._meter, name) + more)
        for name, seconds in header["stages"].items():
            times, before = self._meter.stage(name), process.stages.get(name, [0.0] * 3)
            times.busy_s += seconds[0] - before[0]
            times.starved_s += seconds[1] - before[1]
            times.blocked_s += seconds[2] - before[2]
        process.figures, process.stages = header["figures"], header["stages"]
        self._states[process.number] |= header["state"]

    # ---- the supervisor

    def _supervise(self) -> None:
        patience = self._patience
        tick = min(1.0, patience.heartbeat_s, patience.stall_s / 4, patience.hang_s / 4)
        try:
            for number in range(len(self._devices)):
                self._processes.append(self._started(number))
            looked = time.monotonic()
            while True:
                with self._changed:
                    self._deal()
                    self._changed.wait(tick)
                    if self._closed or self._error is not None:
                        return
                    now = time.monotonic()
                    paused = max(0.0, now - looked - tick)  # this process, or the machine: no worker is to blame
                    looked = now
                    for process in self._processes:
                        process.heard += paused
                        process.progress += paused
                    given_up = {process: how for process in self._processes if (how := self._judged(process, now)) is not None}
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

    def _started(self, number: int) -> _WorkerProcess:
        device, spec = self._devices[number], self._spec
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        if len(self._devices) > 1:  # or every one of them would take all cores
            for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
                environment.setdefault(name, str(max(1, _cores() // len(self._devices))))
        args = dict(spec.args)
        if device is not None:
            kind, _, index = device.partition(":")
            if kind == "cpu" or index:
                environment["CUDA_VISIBLE_DEVICES"] = _visible(index)
            if "device" in args:
                args["device"] = kind
        # -P and the path: modules are found where this process finds them, and nowhere else
        process = _WorkerProcess(number, [sys.executable, "-P", "-m", "precompute.workers.worker"], environment, self)
        header = {
            "use": spec.use,
            "args": args,
            "tables": list(spec.tables),
            "view": spec.view.to_json(),
            "folder": None if spec.folder is None else str(spec.folder),
            "convert": spec.convert,
            "precision": spec.precision,
            "fingerprint": spec.fingerprint,
            "heartbeat_s": self._patience.heartbeat_s,
            "memory_mb": self._worker_memory_mb,
        }
        process.outbox.put((header, None))
        for table in spec.tables.values():
            process.outbox.put(({}, table))
        return process

    def _deal(self) -> None:
        """Give every worker work: each its first window before any gets its second, and a suspect one to a worker that has nothing else."""
        for wanted in range(1, IN_FLIGHT + 1):
            for process in self._processes:
                if not process.ready or process.hung_up or len(process.in_flight) >= wanted:
                    continue
                if process.in_flight:
                    if process.in_flight[0].suspect or self._suspects or not self._fresh:
                        continue
                    task = self._fresh.popleft()
                elif self._suspects or self._fresh:
                    task = (self._suspects or self._fresh).popleft()
                    process.progress = time.monotonic()
                else:
                    continue
                process.in_flight.append(task)
                process.outbox.put(({}, taken(task.window.given, task.rows)))

    def _judged(self, process: _WorkerProcess, now: float) -> str | None:
        """None for a worker that does well, else why it is given up; an empty text where it ended by itself."""
        if process.hung_up:
            return ""
        silent_s = self._patience.stall_s if process.ready else max(LOAD_S, self._patience.stall_s)
        if now - process.heard > silent_s:
            return f"gave no sign of life for {silent_s:g} s"
        if process.ready and process.in_flight and now - process.progress > self._patience.hang_s:
            return f"finished no batch for {self._patience.hang_s:g} s"
        return None

    def _replace(self, process: _WorkerProcess, how: str) -> None:
        ended = process.reap()
        words = process.last_words()
        told = (how or ended) + (f"; the last line of its stderr: {words[:300]}" if words else "")
        self._unloaded[process.number] += not process.ready
        if not process.ready and (not self._loaded_once or self._unloaded[process.number] >= LOAD_TRIES):
            raise ModelError(f"the model {self._spec.use!r} could not be loaded: its worker process {told}")
        self._fruitless += 1
        if self._fruitless > max(MAX_FRUITLESS, 4 * len(self._devices)):
            raise ModelError(
                f"{self._fruitless} worker processes died one after the other and none finished any rows in between; the last one {told}; "
                "try the model on a few rows, or with fewer workers where memory is short"
            )
        with self._changed:
            alone = len(process.in_flight) == 1
            for task in process.in_flight:
                self._lost(task, alone, told)
            self._changed.notify_all()
        self._processes[process.number] = self._started(process.number)

    def _lost(self, task: _Task, alone: bool, told: str) -> None:
        """Its worker died: once more, or in halves, or, of a single row, a rejection."""
        rows = task.rows[task.left]
        deaths = task.deaths + alone if len(rows) == len(task.rows) else int(alone)
        if not len(rows):
            return  # it died between the last row and saying so
        if len(rows) == 1 and deaths >= self._patience.attempts:
            error = f"its worker process {told} ({deaths} of {self._patience.attempts} tries)"
            task.window.add(1, [RejectedRow(int(rows[0]), "worker", error)], np.empty(0, np.int64), None)
        elif len(rows) == 1 or not task.suspect:
            self._suspects.append(_Task.of(task.window, rows, suspect=True, deaths=deaths))
        else:
            half = len(rows) // 2
            self._suspects.append(_Task.of(task.window, rows[:half], suspect=True))
            self._suspects.append(_Task.of(task.window, rows[half:], suspect=True))

    def _end(self) -> None:
        """Ask all to end, then kill."""
        end_all(self._processes, END_S, REAP_S)
        for process in self._processes:
            process.reap()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible(index: str) -> str:
    """What ``CUDA_VISIBLE_DEVICES`` must say so that only the GPU of that index here is seen; none for an empty index."""
    if not index:
        return ""
    known = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return known[int(index)].strip() if int(index) < len(known) else index
