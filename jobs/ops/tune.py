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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from jobs.config.project import Project
from jobs.config.tuning_file import write_tuning
from jobs.config.view import AccuracyConfig
from jobs.pipeline.accuracy import compared, judged, sample_of
from jobs.process.report import versions
from jobs.rows.open_view import EXAMPLE_ROWS, OpenView, open_view
from precompute.engine.runner import Runner
from precompute.engine.window import Outcome
from precompute.model import Model
from precompute.techniques.table import REFERENCE
from store.errors import ConfigError, ModelError, SourceError
from store.feature_view import FeatureView
from store.freshness import iso
from store.partition import Partition

if TYPE_CHECKING:
    from precompute.models.torch_model import TorchModel

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
        only: names of the candidates; by default what :func:`precompute.precision.candidates.candidates` finds worth trying.
        write: write the tuning file; else only measure.
        tell: told what begins.

    Returns:
        ``file`` (null when none was written), ``picked`` (a candidate's name), ``precision``, ``backend``, ``rows`` and ``measured``: for each
        candidate ``name``, ``rows_per_s``, ``speed`` (times float32's), ``convert_s``, the figures of
        :meth:`precompute.precision.accuracy.Accuracy.to_json` and ``refused`` (why, or null).

    Raises:
        ConfigError: the model is none of torch, or a name in ``only`` is unknown.
        SourceError, ModelError: as a run would.
    """
    from precompute.precision.candidates import candidates
    from precompute.techniques.technique import technique

    config, store = project.view(name), project.offline.view(name)
    if config.partition is not None and partition is None:
        partition = config.partition_at(datetime.now(UTC))
    asked = [technique(text).name for text in only]
    with open_view(
        _in_float32(config.feature_view()), store.offline, project.home, partition=partition, memory_mb=project.settings.memory_mb
    ) as opened:
        model = _torch_model(opened)
        names = asked or [candidate.name for candidate in candidates(model.device, model)]
        sample = sample_of(opened, rows)
        trials = _Trials(opened.view, model, sample, config.accuracy, store.compiled)
        measured = _measured(trials, list(dict.fromkeys([REFERENCE, *names])), tell)
    picked = technique(_pick(measured))
    tuning = {
        "picked": picked.name,
        "precision": picked.precision,
        "backend": picked.backend,
        "rows": sample.num_rows,
        "budget": config.accuracy.model_dump(),
        "measured": measured,
        "at": iso(datetime.now(UTC).replace(microsecond=0)),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {model.device.name}",
        "versions": dict(versions()),
    }
    path = write_tuning(project.folder, name, project.model_as_written(name), tuning) if write else None
    return {"view": name, "file": None if path is None else str(path), **tuning}


def _torch_model(opened: OpenView) -> TorchModel:
    """Raises:
    ConfigError: the view's model is none of torch.
    """
    from precompute.models.torch_model import TorchModel
    from precompute.precision.conversion import NOT_TORCH

    if not isinstance(opened.model, TorchModel):
        raise ConfigError(f"view {opened.view.name!r}: {NOT_TORCH}")
    return opened.model


class _Trials:
    """Candidates that compute one sample of a view, each compared with float32, which is tried first.

    ``ready`` has, of each that can compute it, what makes the model compute in it once more.
    """

    def __init__(
        self, view: FeatureView, model: TorchModel, sample: pa.RecordBatch, budget: AccuracyConfig, compiled: Path
    ) -> None:
        self.view, self.model, self.sample, self._budget, self._compiled = view, model, sample, budget, compiled
        self._reference: Outcome | None = None
        self.ready: dict[str, Callable[[], object]] = {}

    def tried(self, variant: str) -> dict[str, Any]:
        """``name``, ``convert_s``, ``refused`` and, where it computes, ``accuracy``.

        Raises:
            ModelError, SourceError: float32 computes nothing.
        """
        line: dict[str, Any] = {"name": variant, "convert_s": 0.0, "refused": None}
        started = time.monotonic()
        try:
            self._convert(variant)
        except ConfigError as exc:
            return line | {"refused": str(exc)}
        line["convert_s"] = round(time.monotonic() - started, 1)
        try:
            outcome = Runner(self.model, self.view).compute(self.sample)
        except ModelError as exc:
            if variant == REFERENCE:
                raise
            return line | {"refused": str(exc)}
        self.ready[variant] = self.model.restorer()
        if self._reference is None:
            self._reference = self._usable(outcome)
        accuracy = compared(self.view, self._reference, outcome)
        line["accuracy"] = {} if accuracy is None else accuracy.to_json()["features"]
        figures = judged(self._budget, accuracy, self._reference, outcome)
        line["refused"] = "; ".join(figure.shortfall for figure in figures if figure.room < 0) or None
        return line

    def _convert(self, variant: str) -> None:
        from precompute.precision.conversion import use_variant

        if variant == REFERENCE:
            self.model.use(self.model.module)
        else:
            examples = self.sample.slice(0, EXAMPLE_ROWS)
            use_variant(self.model, variant, lambda: pa.Table.from_batches([examples]), self._compiled)

    def _usable(self, reference: Outcome) -> Outcome:
        if not len(reference.rows):
            error = reference.rejections[0].error
            raise SourceError(
                f"view {self.view.name!r}: none of {self.sample.num_rows:,} rows could be computed in float32; the first: {error}"
            )
        return reference


def _in_float32(view: FeatureView) -> FeatureView:
    model = replace(view.definition.model, precision="fp32", backend="eager")
    return replace(view, definition=replace(view.definition, model=model))


def _measured(trials: _Trials, names: Sequence[str], tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Of each candidate, what :meth:`_Trials.tried` tells, ``rows_per_s`` and ``speed``."""
    lines = []
    for name in names:
        tell(f"{name}: converting and comparing {trials.sample.num_rows:,} rows")
        lines.append(trials.tried(name))
    rates = _rates(trials.model, trials.view, trials.sample, trials.ready, tell)
    for line in lines:
        rate = rates.get(line["name"])
        line["rows_per_s"] = None if rate is None else round(rate, 1)
        line["speed"] = None if rate is None else round(rate / rates[REFERENCE], 3)
    return lines


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
