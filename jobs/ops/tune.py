"""Tune: which precision and back end computes a view's model fastest on this machine, and stays within the view's accuracy budget.

Every candidate computes the same sample of the view's own rows and is compared with float32: the fastest whose figures pass is written to the
tuning file that ``precision: auto`` reads. A run with another precision than the tuned one is checked in the same way before it computes.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from jobs.config.project import Project
from jobs.config.tuning_file import write_tuning
from jobs.pipeline.accuracy import compared, judged, sample_of
from jobs.process.report import versions
from jobs.rows.open_view import EXAMPLE_ROWS, REFERENCE, open_view
from precompute.engine.runner import Runner
from precompute.engine.window import Outcome
from precompute.model import Model
from store.errors import ConfigError, ModelError, SourceError
from store.feature_view import FeatureView
from store.freshness import iso
from store.partition import Partition

ROUNDS = 3
"""Times that each candidate computes the sample, taking turns, so that a busy moment of the machine hits all alike."""
WORTHWHILE = 1.05
"""Times float32's rate: less is noise, and float32 stays."""


def tune(
    project: Project,
    name: str,
    *,
    rows: int = 1024,
    partition: Partition | None = None,
    only: Sequence[str] = (),
    write: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all candidates of a view's model, and write the tuning file.

    Args:
        project: the configuration.
        name: of the view.
        rows: size of the sample.
        partition: of a partitioned view; by default the latest that is over.
        only: names of the candidates; by default what :func:`precompute.precision.variants.candidates` finds worth trying.
        write: write the tuning file; else only measure.
        tell: told what begins.

    Returns:
        ``file`` (null when none was written), ``picked`` (a candidate's name), ``precision``, ``backend``, ``rows`` and ``measured``: for each candidate ``name``, ``rows_per_s``, ``speed``
        (times float32's), ``convert_s``, the figures of :meth:`precompute.precision.accuracy.Accuracy.to_json` and ``refused`` (why, or null).

    Raises:
        ConfigError: the model is none of torch, or a name in ``only`` is unknown.
        SourceError, ModelError: as a run would.
    """
    from precompute.models.torch_model import TorchModel
    from precompute.precision.conversion import NOT_TORCH, use_variant
    from precompute.precision.variants import candidates, parse

    config, store = project.view(name), project.offline.view(name)
    if config.partition is not None and partition is None:
        partition = config.partition_at(datetime.now(UTC))
    names = [REFERENCE, *(parse(text).name for text in only)]
    with open_view(
        _in_float32(config.feature_view()), store.offline, project.home, partition=partition, memory_mb=project.settings.memory_mb
    ) as opened:
        model = opened.model
        if not isinstance(model, TorchModel):
            raise ConfigError(f"view {name!r}: {NOT_TORCH}")
        if not only:
            names = [REFERENCE, *(c.name for c in candidates(model.device, model))]
        names = list(dict.fromkeys(names))
        sample = sample_of(opened, rows)
        reference: Outcome | None = None
        measured: list[dict[str, Any]] = []
        ready: dict[str, Callable[[], object]] = {}
        for variant in names:
            tell(f"{variant}: converting and comparing {sample.num_rows:,} rows")
            found: dict[str, Any] = {"name": variant, "convert_s": 0.0, "refused": None}
            measured.append(found)
            started = time.monotonic()
            try:
                if variant == REFERENCE:
                    model.use(model.module)
                else:
                    use_variant(
                        model,
                        variant,
                        lambda: pa.Table.from_batches([sample.slice(0, EXAMPLE_ROWS)]),
                        store.compiled,
                    )
            except ConfigError as exc:
                found["refused"] = str(exc)
                continue
            found["convert_s"] = round(time.monotonic() - started, 1)
            try:
                done = Runner(model, opened.view).compute(sample)
            except ModelError as exc:
                if variant == REFERENCE:
                    raise
                found["refused"] = str(exc)
                continue
            ready[variant] = model.restorer()
            if reference is None:
                reference = done
                if not len(done.rows):
                    error = done.rejections[0].error
                    raise SourceError(
                        f"view {name!r}: none of {sample.num_rows:,} rows could be computed in float32; the first: {error}"
                    )
            accuracy = compared(opened.view, reference, done)
            found["accuracy"] = {} if accuracy is None else accuracy.to_json()["features"]
            figures = judged(config.accuracy, accuracy, reference, done)
            found["refused"] = "; ".join(figure.shortfall for figure in figures if figure.room < 0) or None
        rates = _rates(model, opened.view, sample, ready, tell)
    for found in measured:
        rate = rates.get(found["name"])
        found["rows_per_s"] = None if rate is None else round(rate, 1)
        found["speed"] = None if rate is None else round(rate / rates[REFERENCE], 3)
    picked = _pick(measured)
    parsed = parse(picked)
    result = {
        "picked": picked,
        "precision": parsed.precision,
        "backend": parsed.backend,
        "rows": sample.num_rows,
        "budget": config.accuracy.model_dump(),
        "measured": measured,
        "at": iso(datetime.now(UTC).replace(microsecond=0)),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {model.device.name}",
        "versions": versions(),
    }
    path = write_tuning(project.folder, name, project.model_as_written(name), result) if write else None
    return {"view": name, "file": None if path is None else str(path), **result}


def _in_float32(view: FeatureView) -> FeatureView:
    model = replace(view.definition.model, precision="fp32", backend="eager")
    return replace(view, definition=replace(view.definition, model=model))


def _rates(
    model: Model, view: FeatureView, sample: pa.RecordBatch, ready: dict[str, Callable[[], object]], tell: Callable[[str], None]
) -> dict[str, float]:
    """Rows a second of each candidate: the median of a few rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(ROUNDS):
        tell(f"measuring {len(ready)} candidates, round {number + 1} of {ROUNDS}")
        for name, restore in ready.items():
            restore()
            started = time.monotonic()
            Runner(model, view).compute(sample)
            seconds[name].append(time.monotonic() - started)
    return {name: sample.num_rows / statistics.median(times) for name, times in seconds.items()}


def _pick(measured: Sequence[dict[str, Any]]) -> str:
    passing = [row for row in measured if row["refused"] is None and row["speed"] is not None]
    best = max(passing, key=lambda row: float(row["speed"]), default=None)
    return REFERENCE if best is None or best["speed"] < WORTHWHILE else str(best["name"])
