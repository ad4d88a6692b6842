"""Worker pool: the model in processes of its own, one per GPU or several on a CPU, each pulling windows. Seen from outside it is a
:class:`precompute.engine.runner.Runner`, which each worker runs."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import pyarrow as pa

from precompute.engine.batching import DEVICE_WINDOW_ROWS
from precompute.engine.memory import ResidentPeak
from precompute.engine.meter import Meter
from precompute.engine.window import Outcome
from precompute.workers.patience import Patience
from precompute.workers.pool_stream import PoolStream
from precompute.workers.worker_process import WorkerSpec


class WorkerPool:
    """Runs one model for one view in worker processes.

    Args:
        spec: the model and the view.
        meter: what the workers did is added to it; the stages ``prepare``, ``model`` and ``check`` are sums over all of them.
        devices: one worker each, at least one. ``cuda:1`` is that GPU, which the worker sees as its only one; ``cpu`` shows it none; None changes
            nothing. An argument ``device`` of the model's gives way.
        heartbeat_s: every worker sends a sign of life this often.
        stall_s: without one for so long it is given up: a stopped process, or native code that never lets go of Python's lock.
        hang_s: with signs of life, but no batch finished for so long, too. Loading the model does not count. Of rows that a worker was given up with, both are less
            (:meth:`precompute.workers.patience.Patience.for_task`) until one of them is tried for the last time.
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
        self._patience = Patience(heartbeat_s, stall_s, hang_s, attempts)
        self._states: dict[int, dict[str, Any]] = {}
        """Of each worker, by its number: what it said last of its device, budget and memory."""

    @property
    def window_rows(self) -> int:
        """As :attr:`precompute.engine.runner.Runner.window_rows`."""
        return DEVICE_WINDOW_ROWS if any((device or "").startswith("cuda") for device in self._devices) else 1

    def figures(self, seconds: float) -> dict[str, Any]:
        """What the run's report says of the engine, as :meth:`precompute.engine.runner.Runner.figures`: memory is this process's and all workers', the
        budget and a device's memory the largest of any, lanes one's, ``peak_flops`` a worker's, measured when its model was loaded and the others were
        busy with theirs; ``workers_replaced`` where any was."""
        count, states = len(self._devices), list(self._states.values())
        devices = ", ".join(sorted({device or "as they are" for device in self._devices}))
        figures = self._meter.to_json(seconds) | {"device": f"{count} workers: {devices}", "workers": count}
        if self._meter.workers_replaced:
            figures["workers_replaced"] = self._meter.workers_replaced
        figures["cost_unit"] = states[0]["cost_unit"] if states else "rows"
        figures["peak_memory_bytes"] = ResidentPeak().bytes() + sum(state.get("peak_memory_bytes", 0) for state in states)
        for name in ("budget", "device_peak_memory_bytes"):
            if values := [state[name] for state in states if name in state]:
                figures[name] = max(values)
        if lanes := [state["lanes"] for state in states if "lanes" in state]:
            figures["lanes"] = lanes[0]
        if graphs := [state["graphs"] for state in states if "graphs" in state]:
            figures["graphs"] = {name: sum(counts[name] for counts in graphs) for name in graphs[0]}
        peaks = [state["peak_flops"] for state in states if "peak_flops" in state]
        if peaks and self._meter.flops:
            figures |= self._meter.peak_figures(sum(peaks) / len(peaks))
        return figures

    def stream(
        self,
        windows: Iterable[pa.RecordBatch],
        *,
        hidden: Iterable[str] = (),
        memory_mb: int = 512,
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
            ModelError: as of a :class:`precompute.engine.runner.Runner`; or workers die before the model is loaded, or one after the other.
            ConfigError: the model does not load, as in :func:`precompute.registry.load_model`, or is not the spec's; and whatever ``windows`` raises.
        """
        stream = PoolStream(self._spec, self._meter, self._states, self._devices, self._patience, memory_mb, windows, set(hidden))
        times = self._meter.stage("write")
        try:
            while True:
                asked = time.monotonic()
                item = stream.next()
                if item is None:
                    return
                came = time.monotonic()
                times.starved_s += came - asked
                self._meter.rows += item[1].done
                yield item
                times.busy_s += time.monotonic() - came
        finally:
            stream.close()
