"""Engine: what computes a run's windows, in the run's own process or in workers. Both take rows and give features, and know nothing else."""

from __future__ import annotations

from jobs.config.project import EngineConfig
from jobs.rows.open_view import EXAMPLE_ROWS, OpenView
from precompute.engine.meter import Meter
from precompute.engine.runner import Runner
from precompute.model import StagedModel
from precompute.techniques.table import REFERENCE
from precompute.workers.worker import SAMPLE
from precompute.workers.worker_pool import WorkerPool
from precompute.workers.worker_process import WorkerSpec
from store.offline.view_store import ViewStore


def engine_of(opened: OpenView, config: EngineConfig, meter: Meter, store: ViewStore) -> Runner | WorkerPool:
    """The engine of a run: workers where ``workers`` asks for them, or where there are several GPUs to use.

    Args:
        opened: the view; its own model computes where there are no workers.
        config: how many, and when one is given up.
        meter: told what the stages took.
        store: where converted models are kept.
    """
    devices = _devices(opened, config)
    if not devices:
        return Runner(opened.model, opened.view, meter)
    model = opened.view.definition.model
    tables, convert = dict(opened.tables), None
    if opened.variant != REFERENCE:
        example = opened.source.sample(EXAMPLE_ROWS)
        if example.num_rows:
            convert = {"variant": opened.variant, "folder": str(store.compiled)}
            tables[SAMPLE] = example
    args = {name: value for name, value in model.args.items() if name not in opened.tables}
    precision = opened.variant.removesuffix("-eager")
    spec = WorkerSpec(model.use, args, tables, opened.view, opened.folder, convert, precision, opened.fingerprint)
    return WorkerPool(spec, meter, devices, hang_s=config.hang)


def _devices(opened: OpenView, config: EngineConfig) -> list[str | None]:
    """One for each worker; empty for none."""
    staged = opened.model if isinstance(opened.model, StagedModel) else None
    gpus = 0
    if staged is not None and staged.device.name.startswith("cuda"):
        # Imports torch, as the model did.
        from precompute.models.device import gpu_count

        gpus = gpu_count()
    if config.workers == "auto":
        return [f"cuda:{n}" for n in range(gpus)] if gpus > 1 else []
    return [f"cuda:{n % gpus}" if gpus else None for n in range(config.workers)]
