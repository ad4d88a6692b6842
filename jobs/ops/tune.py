"""Tune: which precision and back end computes a view's model fastest on this machine, and stays within the view's accuracy budget.

Every candidate computes the same sample of the view's own rows and is compared with float32: the fastest whose figures pass is written to the
tuning file that ``precision: auto`` reads. A run with another precision than the tuned one is checked in the same way before it computes.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from precompute.jobs.config.project import Project
from precompute.jobs.config.tuning_file import write_tuning
from precompute.jobs.ops.trials import Trials
from precompute.jobs.pipeline.accuracy import keep_comparisons, sample_of
from precompute.jobs.process.report import versions
from precompute.jobs.rows.open_view import OpenView, open_view
from precompute.store.errors import ConfigError
from precompute.store.feature_view import FeatureView
from precompute.store.freshness import iso
from precompute.store.partition import Partition
from precompute.techniques.table import REFERENCE, words

if TYPE_CHECKING:
    from precompute.models.torch_model import TorchModel

WORTHWHILE = 1.05
"""Times float32's rate: less is noise, and float32 stays."""


def tune(
    project: Project,
    name: str,
    *,
    rows: int = 1024,
    partition: Partition | None = None,
    only: Sequence[str] = (),
    within_s: float = 300.0,
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
        within_s: how long candidates may take that nobody named; the most promising come first, and what there is no time for is left out.
        write: write the tuning file; else only measure.
        tell: told what begins.

    Returns:
        ``file`` (null when none was written), ``picked`` (a candidate's name), ``precision``, ``backend``, ``rows`` and ``measured``: for each
        candidate ``name``, ``rows_per_s``, ``speed`` (times float32's), ``batch_ms`` (``p50``, ``p95``, ``p99``), ``memory_bytes`` (the process's at its peak,
        as if this candidate were alone in it; null where the system does not tell), ``convert_s``, the figures of
        :meth:`precompute.precision.accuracy.Accuracy.to_json` and ``refused`` (why, or null); ``left_out``: names.

    Raises:
        ConfigError: the model is none of torch, or a name in ``only`` is unknown.
        SourceError, ModelError: as a run would.
    """
    config, store, asked = project.view(name), project.offline.view(name), _named(only)
    if config.partition is not None and partition is None:
        partition = config.partition_at(datetime.now(UTC))
    with open_view(
        _in_float32(config.feature_view()), store.offline, project.home, partition=partition, memory_mb=project.settings.memory_mb
    ) as opened:
        model = _torch_model(opened)
        plan = _planned(model, asked)
        sample, ends = sample_of(opened, rows)
        trials = Trials(opened, model, sample, ends, config.accuracy)
        measured, left_out = _measured(trials, plan, within_s, tell)
        # the run that follows is spared its check
        keep_comparisons(opened, sample, ends, config.accuracy, trials.comparisons if write else {})
    tuning = {
        **_picked(measured),
        "rows": sample.num_rows - ends,
        "budget": config.accuracy.model_dump(),
        "measured": measured,
        "left_out": left_out,
        "within_s": within_s,
        "at": iso(datetime.now(UTC).replace(microsecond=0)),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {model.device.name}",
        "versions": dict(versions()),
    }
    path = str(write_tuning(project.folder, name, project.model_as_written(name), tuning)) if write else None
    return {"view": name, "file": path, **tuning}


def _named(only: Sequence[str]) -> list[str]:
    from precompute.techniques.technique import technique

    return [technique(name).name for name in only]


def _torch_model(opened: OpenView) -> TorchModel:
    """Raises:
    ConfigError: the view's model is none of torch.
    """
    from precompute.models.torch_model import TorchModel
    from precompute.precision.conversion import NOT_TORCH

    if not isinstance(opened.model, TorchModel):
        raise ConfigError(f"view {opened.view.name!r}: {NOT_TORCH}")
    return opened.model


def _in_float32(view: FeatureView) -> FeatureView:
    model = replace(view.definition.model, precision="fp32", backend="eager")
    return replace(view, definition=replace(view.definition, model=model))


@dataclass(slots=True)
class _Plan:
    """Techniques to try, in their order; ``costs`` are those that time may be short for: about how long each takes to convert, and how many times
    float32's rate it is expected to compute at."""

    names: list[str]
    costs: dict[str, tuple[float, float]]

    def pays(self, name: str, trials: Trials, left_s: float) -> bool:
        """Whether there is time to convert and compare it, and for one round of all."""
        if name not in self.costs:
            return True
        convert_s, gain = self.costs[name]
        needed_s = convert_s + 2 * trials.pass_s[REFERENCE] / gain + sum(trials.pass_s.values())
        return needed_s <= left_s


def _planned(model: TorchModel, asked: Sequence[str]) -> _Plan:
    """What was asked for, whatever it takes, or else what is worth trying here."""
    from precompute.precision.candidates import candidates

    if asked:
        return _Plan(list(dict.fromkeys([REFERENCE, *asked])), {})
    found = candidates(model.device, model)
    costs = {one.name: (one.convert_s, one.gain(model.device, model)) for one in found if one.name != REFERENCE}
    return _Plan([one.name for one in found], {name: (s, gain or 1.0) for name, (s, gain) in costs.items()})


def _measured(
    trials: Trials, plan: _Plan, within_s: float, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Of each candidate, what :meth:`Trials.tried` tells, ``rows_per_s``, ``speed`` and ``batch_ms``; and the names of those that time was short for."""
    lines, left_out, until = [], [], time.monotonic() + within_s
    for name in plan.names:
        if not plan.pays(name, trials, until - time.monotonic()):
            tell(f"{name}: left out, since it would take longer than there is time")
            left_out.append(name)
            continue
        tell(f"{name}: converting and comparing {trials.sample.num_rows - trials.ends:,} rows")
        lines.append(trials.tried(name))
    rates = trials.rates(until, tell)
    for line in lines:
        rate = rates.get(line["name"])
        line["rows_per_s"] = None if rate is None else round(rate.rows_per_s, 1)
        line["speed"] = None if rate is None else round(rate.rows_per_s / rates[REFERENCE].rows_per_s, 3)
        line["batch_ms"] = {} if rate is None else rate.batch_ms
    return lines, left_out


def _picked(measured: Sequence[dict[str, Any]]) -> dict[str, str]:
    name = _pick(measured)
    precision, backend = words(name)
    return {"picked": name, "precision": precision, "backend": backend}


def _pick(measured: Sequence[dict[str, Any]]) -> str:
    passing = [row for row in measured if row["refused"] is None and row["speed"] is not None]
    best = max(passing, key=lambda row: float(row["speed"]), default=None)
    return REFERENCE if best is None or best["speed"] < WORTHWHILE else str(best["name"])
