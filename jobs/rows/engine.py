"""Engine: what computes a run's windows, in the run's own process or in workers. Both take rows and give features, and know nothing else."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from precompute.engine.features import in_order
from precompute.engine.meter import Meter
from precompute.engine.runner import Runner
from precompute.engine.window import Outcome
from precompute.jobs.config.project import EngineConfig
from precompute.jobs.rows.open_view import OpenView
from precompute.lanes.cores import allowed, nodes, usable_threads
from precompute.techniques.table import REFERENCE
from precompute.workers.measured_engine import MeasuredEngine
from precompute.workers.worker import SAMPLE
from precompute.workers.worker_pool import WorkerPool
from precompute.workers.worker_process import WorkerSpec
from precompute.workers.worker_trial import WorkerTrial

_OF_GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""There with a driver of NVIDIA's or AMD's. A model of one's own may compute on a GPU without saying so, and several of it may not fit there: none are started unasked."""


def engine_of(opened: OpenView, config: EngineConfig, meter: Meter, rows: int = 0) -> Runner | WorkerPool | MeasuredEngine:
    """The engine of a run: workers where ``workers`` asks for them, or where there is a GPU to use; by ``auto`` on a CPU, where they are measured to pay.

    Args:
        opened: the view; its own model computes where there are no workers.
        config: how many, and when one is given up.
        meter: told what the stages took.
        rows: to be computed; with none nothing is measured.
    """
    devices = _devices(opened, config)

    def pool(devices: list[str | None]) -> WorkerPool:
        return WorkerPool(_spec(opened, opened.variant), meter, devices, hang_s=config.hang)

    if devices:
        return pool(devices)
    runner, cpus = Runner(opened.model, opened.view, meter), usable_threads(allowed())
    if config.workers != "auto" or not rows or cpus < 2 or any(path.exists() for path in _OF_GPUS) or not opened.examples_aside:
        return runner
    return MeasuredEngine(runner, lambda count: pool([None] * count), WorkerTrial(rows, cpus, nodes()))


def computed(opened: OpenView, batch: pa.RecordBatch, variant: str) -> Outcome:
    """A window of rows, by a technique, in a worker process where a run would compute them in one: of a view that has :attr:`OpenView.wanted`.

    Raises:
        ModelError, ConfigError: as :meth:`WorkerPool.stream`.
    """
    pool = WorkerPool(_spec(opened, variant), Meter(), _gpus(opened)[:1])
    pieces = [done for _, done in pool.stream([batch])]
    rows, features = in_order(opened.view, [(done.rows, done.features) for done in pieces])
    rejections = sorted((r for done in pieces for r in done.rejections), key=lambda rejection: rejection.row)
    return Outcome(rows, features, rejections)


def _spec(opened: OpenView, variant: str) -> WorkerSpec:
    model = opened.view.definition.model
    tables, convert = dict(opened.tables), None
    if variant != REFERENCE:
        example = opened.examples(variant)
        if example.num_rows:
            convert = {"variant": variant, "folder": str(opened.compiled)}
            tables[SAMPLE] = example
    args = {name: value for name, value in model.args.items() if name not in opened.tables}
    precision = opened.variant.removesuffix("-eager")
    return WorkerSpec(model.use, args, tables, opened.view, opened.folder, convert, precision, opened.fingerprint)


def _devices(opened: OpenView, config: EngineConfig) -> list[str | None]:
    """One for each worker; empty for none."""
    gpus = _gpus(opened)
    if config.workers == "auto":
        return list(gpus)
    if not gpus:
        return [None] * config.workers
    # one at least: what breaks a GPU's context breaks it for its process
    return [gpus[n % len(gpus)] for n in range(max(1, config.workers))]


def _gpus(opened: OpenView) -> list[str]:
    """Those that workers compute on: the one that the model's ``device`` names, or all."""
    if opened.wanted is None:
        return []
    if ":" in opened.wanted:
        return [opened.wanted]
    # imports torch, as the model did
    from precompute.models.device import gpu_count

    return [f"cuda:{n}" for n in range(gpu_count())]
