"""Worker: a process that takes windows from a pipe, computes them by a
:class:`precompute.engine.runner.Runner` and sends the features back, in frames of JSON and Arrow;
and one life of it as the pool sees it: which rows it was given, and how long it may be silent.
:mod:`precompute.workers.worker_pool` alone starts ``python -m precompute.workers.worker``."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.ahead import Meter
from precompute.engine.resources import (
    allowed,
    first_line,
    is_device_lost,
    move_to,
    share_of_cpus,
    usable_threads,
)
from precompute.engine.rows import Outcome, RejectedRow, Rows, in_order, taken
from precompute.engine.runner import Runner
from precompute.model import Model, absolute_arguments, model_fingerprint, starting_from
from precompute.model_code import code_changes, model_code
from precompute.registry import described, load_model
from precompute.store.errors import ConfigError, ModelError, PrecomputeError
from precompute.store.feature_view import FeatureView
from precompute.workers.process import (
    ChildProcess,
    python_module,
    read_frame,
    take_pipes,
    write_frame,
)


@dataclass(slots=True)
class HeldWindow:
    """Rows that were read and are not yet handed on, all of them."""

    number: int
    batch: pa.RecordBatch
    shown: pa.RecordBatch
    """What the workers see of it."""
    open_rows: int
    """Number of rows without features or a rejection so far."""
    size_bytes: int
    pieces: list[tuple[Rows, pa.RecordBatch]] = field(default_factory=list)
    """Row numbers and features of each part that was computed, and not handed on."""
    rejections: list[RejectedRow] = field(default_factory=list)
    waits_since: float = math.inf
    """When the first of these pieces came; infinity without any."""
    pieces_bytes: int = 0

    def add(
        self, done: int, rejections: list[RejectedRow], rows: Rows, features: pa.RecordBatch | None
    ) -> None:
        """Note rows that are done: those rejected, and ``rows`` with their features."""
        if features is not None and len(rows):
            self.pieces.append((rows, features))
            self.pieces_bytes += int(features.nbytes)
        self.rejections += rejections
        self.open_rows -= done
        if done:
            self.waits_since = min(self.waits_since, time.monotonic())

    def outcome(self, view: FeatureView) -> Outcome:
        """The outcome of the rows that were not handed on before; they are from now on."""
        self.rejections.sort(key=lambda rejection: rejection.row)
        rows, features = in_order(view, self.pieces)
        made = Outcome(rows, features, self.rejections, self.number, not self.open_rows)
        self.pieces, self.rejections, self.waits_since, self.pieces_bytes = [], [], math.inf, 0
        return made


@dataclass(slots=True)
class Task:
    """Rows of one window that one worker is given."""

    window: HeldWindow
    rows: Rows
    """Row numbers of the window, ascending."""
    suspect: bool = False
    """Whether it was with a worker that died, and so is tried alone."""
    hung: bool = False
    """Whether it was with one that was given up, too, for being silent or finishing no batch."""
    deaths: int = 0
    """Deaths of workers that had no other rows."""
    left: npt.NDArray[np.bool_] = field(init=False)
    """Which of the rows have neither features nor a rejection: all, at first."""

    def __post_init__(self) -> None:
        self.left = np.ones(len(self.rows), np.bool_)


TIMES = 4.0
"""Times the longest wait for a batch that came to an end: with other rows, or on a busier
machine, one may take longer. Given up too soon, rows are tried in smaller pieces, at last with all
patience, so this does not decide on them."""
LEAST_BEATS = 2
"""Signs of life that are waited for as well: they report batches, too."""


@dataclass(slots=True)
class Patience:
    """How long workers are waited for; see :class:`precompute.workers.worker_pool.WorkerPool` for
    the times that are configured."""

    heartbeat_s: float
    stall_s: float
    hang_s: float
    attempts: int
    slowest_s: float | None = None
    """The longest that any worker was without a batch and then finished one, the first of a fresh
    worker among them; None before there was one."""

    def progressed(self, after_s: float) -> None:
        """Note that a worker finished a batch so long after the one before, or after it was given
        rows."""
        self.slowest_s = max(after_s, self.slowest_s or 0.0)

    def is_last_try(self, task: Task) -> bool:
        """Whether its row is rejected if it ends its worker now."""
        return len(task.rows) == 1 and task.deaths + 1 >= self.attempts

    def for_task(self, task: Task, fruitless: int) -> float:
        """Seconds without a batch, at most, of a worker that has these rows: infinity where only
        what is configured bounds it.

        Args:
            task: the rows.
            fruitless: workers that were lost in turn without any row finished in between, beyond
                what one bad row may cost: twice as long for each, so that a machine that became
                slower is waited for.
        """
        if not task.hung or self.slowest_s is None or self.is_last_try(task):
            return math.inf
        return (LEAST_BEATS * self.heartbeat_s + TIMES * self.slowest_s) * 2.0 ** min(
            max(0, fruitless), 64
        )


LOAD_S = 600.0
"""How long loading a model may take at least, silent or not: gigabytes come from a cold disk, and
Python's lock may be held meanwhile. Where a worker is waited for longer, so is this."""


def not_loaded(limit_s: float) -> str:
    """Why a worker is ended that loads its model for longer, as the end of a sentence."""
    return f"did not load its model within {limit_s:.3g} s (engine.hang gives it more)"


END_S = 1.0
"""Seconds between signalling a worker to end and killing it."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a worker needs to make the model: see :func:`precompute.registry.load_model`.
    ``args`` and ``convert`` are plain JSON, ``tables`` further arguments.

    ``folder`` is the project's, where its own modules lie and the relative paths in ``args`` start
    from; ``convert`` has the ``variant`` and ``folder`` of
    :func:`precompute.techniques.conversion.use_variant`, or is None. ``fingerprint``
    is what :func:`precompute.model.model_fingerprint` must say of the model that a worker loaded,
    in ``precision``; None: any. ``code`` is its code, as :func:`precompute.model_code.model_code`
    has it; empty: any.
    """

    use: str
    args: Mapping[str, Any]
    tables: Mapping[str, pa.Table]
    view: FeatureView
    folder: Path | None = None
    convert: Mapping[str, Any] | None = None
    precision: str = "fp32"
    fingerprint: str | None = None
    code: Mapping[str, str] = field(default_factory=dict)

    def header(self, args: Mapping[str, Any], cpus: frozenset[int], share: Share) -> dict[str, Any]:
        """The first message to a worker, with the model's arguments and the CPUs for it."""
        return {
            "use": self.use,
            "args": args,
            "cpus": sorted(cpus),
            "tables": list(self.tables),
            "view": self.view.to_json(),
            "folder": None if self.folder is None else str(self.folder),
            "convert": self.convert,
            "precision": self.precision,
            "fingerprint": self.fingerprint,
            "code": dict(self.code),
            "heartbeat_s": share.heartbeat_s,
            "memory_mb": share.memory_mb,
        }


@dataclass(frozen=True, slots=True)
class Share:
    """The share of each of the ``workers``: memory for windows and features, and how often it must
    give a sign of life."""

    workers: int
    memory_mb: int
    heartbeat_s: float


class WorkerProcess(ChildProcess):
    """One life of a worker, and the threads that write to it and read from it.

    Args:
        number: of the worker, from 0.
        spec: the model and the view.
        device: as :class:`precompute.workers.worker_pool.WorkerPool` takes it.
        share: of the machine.
        listen: reads its messages until they end; in a thread of its own.
    """

    def __init__(
        self, number: int, spec: WorkerSpec, device: str | None, share: Share, listen: Listener
    ) -> None:
        command, environment = python_module("precompute.workers.worker")
        args = _surroundings(spec, device, share.workers, environment)
        super().__init__(command, output="piped", environment=environment)
        self.number = number
        self.in_flight: deque[Task] = deque()
        self.ready = self.hung_up = self.buried = False
        self.heard = self.progress = time.monotonic()
        self._steps = 0
        self._figures: dict[str, float] = {}
        self._stages: dict[str, list[float]] = {}
        self._batch_steps = Counter[int]()
        self._outbox: queue.SimpleQueue[
            tuple[Mapping[str, Any], pa.RecordBatch | pa.Table | None] | None
        ] = queue.SimpleQueue()
        on_cpu = device is None or device == "cpu"
        cpus = (
            share_of_cpus(number, share.workers)
            if on_cpu and share.workers > 1
            else frozenset[int]()
        )
        self._outbox.put((spec.header(args, cpus, share), None))
        for table in spec.tables.values():
            self._outbox.put(({}, table))
        stdin, stdout = self.pipes()
        targets = {"write": lambda: self._write(stdin), "listen": lambda: listen(self, stdout)}
        self._threads = [
            threading.Thread(target=t, name=f"worker-{number}-{n}", daemon=True)
            for n, t in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def give(self, task: Task) -> None:
        """Have it compute these rows, after those it has."""
        if not self.in_flight:
            self.progress = time.monotonic()
        self.in_flight.append(task)
        self._outbox.put(({}, taken(task.window.shown, task.rows)))

    def beat(self, steps: int, patience: Patience) -> None:
        """Take up a sign of life, which says how many batches it has finished."""
        if steps != self._steps:
            self._steps = steps
            # it may have been finished right after the sign of life before
            self.progressed(patience, patience.heartbeat_s)

    def progressed(self, patience: Patience, late_s: float = 0.0) -> None:
        """It has just reported a batch, or more, that it may have finished so long before."""
        if self.in_flight:
            patience.progressed(max(0.0, self.heard - self.progress - late_s))
        self.progress = self.heard

    def count(
        self,
        meter: Meter,
        figures: dict[str, float],
        stages: dict[str, list[float]],
        batch_steps: dict[str, int],
    ) -> None:
        """Add what the worker's meter says beyond what it said before."""
        for name in FIGURES:
            more = figures[name] - self._figures.get(name, 0)
            setattr(meter, name, getattr(meter, name) + more)
        for name, seconds in stages.items():
            times, before = meter.stage(name), self._stages.get(name, [0.0] * 3)
            times.busy_s += seconds[0] - before[0]
            times.starved_s += seconds[1] - before[1]
            times.blocked_s += seconds[2] - before[2]
        # JSON has texts for keys
        steps = Counter({int(step): count for step, count in batch_steps.items()})
        meter.batch_steps.update(steps - self._batch_steps)
        self._figures, self._stages, self._batch_steps = figures, stages, steps

    def judged(self, now: float, patience: Patience, fruitless: int) -> str | None:
        """None for a worker that does well, else why it is given up; an empty text where it ended
        by itself. ``fruitless`` is as in :meth:`Patience.for_task`."""
        if self.hung_up:
            return ""
        if not self.ready:
            load_s = max(LOAD_S, patience.stall_s, patience.hang_s)
            return None if now - self.progress <= load_s else not_loaded(load_s)
        most_s = patience.for_task(self.in_flight[0], fruitless) if self.in_flight else math.inf
        silent_s = min(patience.stall_s, most_s)
        if now - self.heard > silent_s:
            return f"gave no sign of life for {silent_s:.3g} s"
        hang_s = min(patience.hang_s, most_s)
        if self.in_flight and now - self.progress > hang_s:
            return f"finished no batch for {hang_s:.3g} s"
        return None

    def close(self) -> None:
        """Let go of what it needed, once it has ended."""
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(END_S)

    def _write(self, file: IO[bytes]) -> None:
        # it died, which the one who listens to it notices
        with contextlib.suppress(OSError), file:
            while (message := self._outbox.get()) is not None:
                write_frame(file, *message)


Listener = Callable[[WorkerProcess, IO[bytes]], None]


def _surroundings(
    spec: WorkerSpec, device: str | None, workers: int, environment: dict[str, str]
) -> dict[str, Any]:
    """The arguments of a worker's model; its share of the machine goes into ``environment``."""
    # or every one of them would take all cores
    if workers > 1:
        for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
            environment.setdefault(name, str(max(1, usable_threads(allowed()) // workers)))
    args = dict(spec.args)
    if device is not None:
        kind, _, index = device.partition(":")
        if kind == "cpu" or index:
            environment["CUDA_VISIBLE_DEVICES"] = _visible(index)
        if "device" in args:
            args["device"] = kind
    return args


def _visible(index: str) -> str:
    """What ``CUDA_VISIBLE_DEVICES`` must say so that only the GPU of that index here is seen; none
    for an empty index."""
    if not index:
        return ""
    visible = [
        name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()
    ]
    return visible[int(index)].strip() if int(index) < len(visible) else index


# ---- The process itself.

# To the worker: the model to load, its tables, then windows, {} with the rows; it ends at once with
# the file. From it:
#   {"kind": "ready", "device": …}        the model is loaded
#   {"kind": "beat", "steps": n}          the process lives, and has finished so many batches
#   {"kind": "done", "last": …, …}        body: row numbers, then the features, of the first window
#                                         that is not done; ``last``: all that was left of it
#   {"kind": "error", "error": "ModelError", "text": …}        nothing follows

FIGURES = (
    "batches",
    "cost",
    "padded_cost",
    "flops",
    "retries",
    "out_of_memory",
    "forward_s",
    "landing_s",
)
"""Counts of a worker's meter, sent with every result, from its start."""

STAGES = ("prepare", "model", "check")
"""Stages of a worker's meter, too; the pool reports the waits of the other two."""

LOST_STATUS = 70
"""The exit status of a worker whose GPU is lost to it: another one goes on with its rows."""

SAMPLE = "__sample__"
"""Name of the table that is no argument of the model, but rows to show a conversion."""


def _check_fingerprint(
    model: Model, spec: Mapping[str, Any], tables: Mapping[str, pa.Table], folder: Path | None
) -> None:
    """Refuse a model, as loaded, before any conversion, that is not the one the run began with: its
    rows would stand beside those of the other in one snapshot."""
    if spec["fingerprint"] is None:
        return
    with starting_from(folder):
        own = model_fingerprint(model.fingerprint(), spec["use"], spec["precision"], tables)
    if own != spec["fingerprint"]:
        raise ConfigError(
            f"the model {spec['use']!r} has fingerprint {own[:12]} in a worker, and had"
            f" {spec['fingerprint'][:12]} when the run began: its files changed during the run, so"
            " run again (or its fingerprint() is another one in each process)"
        )
    if changes := code_changes(spec["code"], model_code(spec["use"], spec["args"], folder)):
        raise ConfigError(
            f"the code of the model {spec['use']!r} was changed during the run ({changes}): run"
            " again"
        )


def main() -> None:
    """Serve until the input ends."""
    _Worker(*take_pipes()).run()
    # without waiting for threads of the model's
    os._exit(0)


class _Worker:
    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink
        self._writing = threading.Lock()
        self._meter = Meter()
        self._runner: Runner
        self._waiting: queue.SimpleQueue[pa.RecordBatch] = queue.SimpleQueue()

    def run(self) -> None:
        first = read_frame(self._source)
        if first is None:
            return
        spec = first[0]
        # of this thread, and so of all that it starts; others may have taken CPUs away meanwhile
        with contextlib.suppress(OSError):
            move_to(frozenset(spec["cpus"]))
        threading.Thread(
            target=self._beat, args=(spec["heartbeat_s"],), name="beat", daemon=True
        ).start()
        tables = {}
        for name in spec["tables"]:
            frame = read_frame(self._source)
            if frame is None:
                return
            tables[name] = frame[1].read_all()
        threading.Thread(target=self._take, name="take", daemon=True).start()
        view = FeatureView.from_json(spec["view"])
        try:
            sample = tables.pop(SAMPLE, None)
            folder, args = None if spec["folder"] is None else Path(spec["folder"]), spec["args"]
            if folder is not None:
                args = absolute_arguments(args, folder)
            model = load_model(spec["use"], {**args, **tables}, folder)
            _check_fingerprint(model, spec, tables, folder)
            if (convert := spec["convert"]) is not None:
                # imports torch
                from precompute.techniques.conversion import use_variant

                use_variant(model, convert["variant"], lambda: sample, Path(convert["folder"]))
            self._runner = runner = Runner(model, view, self._meter)
            self._send({"kind": "ready", "device": runner.device_figures()})
            for _, done in runner.stream(
                iter(self._waiting.get, None), memory_mb=spec["memory_mb"]
            ):
                self._send_done(done)
        except PrecomputeError as exc:
            _end_if_lost(exc)
            self._send({"kind": "error", "error": type(exc).__name__, "text": str(exc)})
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            # raised by a module that is imported, or by a method that no row can be blamed for
            _end_if_lost(exc)
            text = f"the model of view {view.name!r} failed in its worker: {described(exc)}"
            self._send({"kind": "error", "error": ModelError.__name__, "text": text})

    def _take(self) -> None:
        """Read windows as they come, so that the end of the input is noticed whatever the model
        does. One that cannot be read, for want of memory, ends the process: the pool has its rows
        computed by another."""
        try:
            while (frame := read_frame(self._source)) is not None:
                self._waiting.put(frame[1].read_next_batch())
        except Exception as exc:
            try:
                print(f"\n{first_line(exc)}", file=sys.stderr, flush=True)
            finally:
                # nobody may be left to read what it says
                os._exit(1)
        os._exit(0)

    def _send_done(self, done: Outcome) -> None:
        header = {
            "kind": "done",
            "last": done.last,
            "rejections": [(r.row, r.stage, r.error) for r in done.rejections],
            "figures": {name: getattr(self._meter, name) for name in FIGURES},
            "state": self._runner.state_figures(),
            "batch_steps": dict(self._meter.batch_steps),
            "stages": {
                name: [t.busy_s, t.starved_s, t.blocked_s]
                for name in STAGES
                for t in [self._meter.stage(name)]
            },
        }
        names = ["row", *done.features.schema.names]
        self._send(
            header,
            pa.RecordBatch.from_arrays([pa.array(done.rows), *done.features.columns], names=names),
        )

    def _beat(self, every_s: float) -> None:
        while True:
            self._send({"kind": "beat", "steps": self._meter.batches + self._meter.retries})
            time.sleep(every_s)

    def _send(self, header: Mapping[str, Any], body: pa.RecordBatch | None = None) -> None:
        try:
            with self._writing:
                write_frame(self._sink, header, body)
        except OSError:
            # the parent is gone
            os._exit(1)


def _end_if_lost(exc: BaseException) -> None:
    if is_device_lost(exc):
        # the pool shows the last line
        print(f"\n{first_line(exc)}", file=sys.stderr, flush=True)
        os._exit(LOST_STATUS)


if __name__ == "__main__":
    main()
