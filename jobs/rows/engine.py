"""Engine: what computes a run's windows, in the run's own process or in workers. Both take rows and
give features, and know nothing else."""

from __future__ import annotations

import pyarrow as pa

from precompute.engine.features import in_order
from precompute.engine.meter import Meter
from precompute.engine.runner import Runner
from precompute.engine.window import Outcome
from precompute.jobs.config.project import EngineConfig
from precompute.jobs.rows.open_view import OpenView
from precompute.techniques.table import REFERENCE
from precompute.workers.worker import SAMPLE
from precompute.workers.worker_pool import WorkerPool
from precompute.workers.worker_process import WorkerSpec


def engine_of(opened: OpenView, config: EngineConfig, meter: Meter) -> Runner | WorkerPool:
    """The engine of a run: as many workers as are configured, one for each GPU where there are any,
    else the run's own process.

    Args:
        opened: the view; its own model computes where there are no workers.
        config: how many, and when one is given up.
        meter: called with what the stages took.
    """
    devices = _devices(opened, config)
    if devices:
        return WorkerPool(_spec(opened, opened.variant), meter, devices, hang_s=config.hang)
    return Runner(opened.model, opened.view, meter)


def computed(opened: OpenView, batch: pa.RecordBatch, variant: str) -> Outcome:
    """A window of rows, by a technique, in a worker process where a run would compute them in one:
    of a view that has :attr:`OpenView.wanted`.

    Raises:
        ModelError, ConfigError: as :meth:`WorkerPool.stream`.
    """
    pool = WorkerPool(_spec(opened, variant), Meter(), _gpus(opened)[:1])
    pieces = [done for _, done in pool.stream([batch])]
    rows, features = in_order(opened.view, [(done.rows, done.features) for done in pieces])
    rejections = sorted(
        (r for done in pieces for r in done.rejections), key=lambda rejection: rejection.row
    )
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
    return WorkerSpec(
        model.use, args, tables, opened.view, opened.folder, convert, precision, opened.fingerprint
    )


def _devices(opened: OpenView, config: EngineConfig) -> list[str | None]:
    """One for each worker; empty for none."""
    gpus = _gpus(opened)
    if not gpus:
        # what counts rates and a budget counts them in one process
        return [] if getattr(opened.model, "in_run_process", False) else [None] * config.workers
    # never the run's own process: what breaks a GPU's context breaks it for its process
    return [gpus[n % len(gpus)] for n in range(config.workers or len(gpus))]


def _gpus(opened: OpenView) -> list[str]:
    """Those that workers compute on: the one that the model's ``device`` names, or all."""
    if opened.wanted is None:
        return []
    if ":" in opened.wanted:
        return [opened.wanted]
    # imports torch, as the model did
    from precompute.models.device import gpu_count

    return [f"cuda:{n}" for n in range(gpu_count())]
