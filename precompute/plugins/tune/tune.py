"""Tune: which precision and back end computes a view's model fastest on this machine, and stays
within the view's accuracy budget. Every candidate computes the same sample of the view's own rows
and is compared with float32: the fastest whose figures pass is written to the tuning file that
``precision: auto`` reads."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from precompute.engine.resources import ResidentPeak, give_back, resident_bytes
from precompute.engine.rows import Outcome
from precompute.engine.runner import Runner
from precompute.jobs.config.gates import AccuracyConfig
from precompute.jobs.config.project import Project, read_tuning, write_tuning
from precompute.jobs.run.judge.accuracy import (
    TechniqueComparison,
    cache_comparisons,
    compare_outcomes,
    sample_of,
    steps,
)
from precompute.jobs.run.report import versions
from precompute.jobs.run.rows.open_model import EXAMPLE_ROWS
from precompute.jobs.run.rows.open_view import OpenView, open_view
from precompute.store.errors import ConfigError, ModelError, SourceError
from precompute.store.feature_view import FeatureView
from precompute.store.times import Partition, iso
from precompute.techniques.table import REFERENCE, words

if TYPE_CHECKING:
    from precompute.models.torch_model import TorchModel

ROUNDS = 3
"""Times that each computes the sample at most, taking turns, so that a busy moment of the machine
hits all alike; once at least."""


@dataclass(slots=True)
class Rate:
    """Rows a second, the median of a few rounds, and milliseconds a batch: ``p50``, ``p95``,
    ``p99``."""

    rows_per_s: float
    batch_ms: dict[str, float] = field(default_factory=dict)


class Trials:
    """Techniques on trial. ``ready`` has, of each that can compute the sample, what makes the model
    compute by it once more.

    Args:
        opened: the view, its model in float32.
        model: its model.
        sample: the rows.
        extremes: how many of them, the first, were not drawn by chance.
        budget: how near to float32 they must come.
    """

    def __init__(
        self,
        opened: OpenView,
        model: TorchModel,
        sample: pa.RecordBatch,
        extremes: int,
        budget: AccuracyConfig,
    ) -> None:
        self.sample, self._opened, self._model, self._budget = sample, opened, model, budget
        self.extremes = extremes
        self._reference: Outcome | None = None
        self._loaded_bytes = resident_bytes()
        self.ready: dict[str, Callable[[], object]] = {}
        self.refused: dict[str, str] = {}
        """Candidate that computed the sample once, and not in batches as a run has them → why."""
        self.pass_s: dict[str, float] = {}
        """Candidate that is ready → seconds of its first pass."""
        self.comparisons: dict[str, list[TechniqueComparison]] = {}
        """Candidate that is ready → its comparisons with float32: on as many of the sample's rows
        as a run checks, and on all."""

    def tried(self, technique: str) -> dict[str, Any]:
        """``name``, ``convert_s``, ``refused`` and, where it computes, ``accuracy`` and
        ``memory_bytes``; float32 comes first.

        Raises:
            ModelError, SourceError: float32 computes nothing.
            ConfigError: what torch computes as float32 is none.
        """
        line: dict[str, Any] = {"name": technique, "convert_s": 0.0, "refused": None}
        # what the one before held is not this one's
        give_back()
        before, peak = resident_bytes(), ResidentPeak()
        peak.lap()
        started = time.monotonic()
        try:
            self._convert(technique)
        except ConfigError as exc:
            if technique == REFERENCE:
                raise
            return line | {"refused": str(exc)}
        converted = time.monotonic()
        line["convert_s"] = round(converted - started, 1)
        try:
            # no search for a budget, which measures memory too
            outcome = Runner(self._model, self._opened.view, search=False).compute(self.sample)
        except ModelError as exc:
            if technique == REFERENCE:
                raise
            return line | {"refused": str(exc)}
        self.pass_s[technique] = time.monotonic() - converted
        self.ready[technique] = self._model.restorer()
        highest = peak.lap()
        # as if it stood alone: beside what the process held when the model was loaded
        line["memory_bytes"] = self._loaded_bytes + max(0, highest - before) if highest else None
        return line | self._judged(technique, outcome)

    def rates(self, until: float, announce: Callable[[str], None]) -> dict[str, Rate]:
        """The rate of each candidate that is ready, as a run computes: the stages overlap, batches
        are as large and, on a CPU, as many at once as that technique's first ones find best, which
        a later round goes on with.

        Args:
            until: of :func:`time.monotonic`; no further round is begun that would end later, after
                the first.
            announce: called with what begins.

        Raises:
            ModelError: float32 computes nothing.
        """
        runners = {name: Runner(self._model, self._opened.view) for name in self.ready}
        seconds: dict[str, list[float]] = {name: [] for name in self.ready}
        for number in range(ROUNDS):
            began = time.monotonic()
            announce(f"measuring {len(self.ready)} candidates, round {number + 1} of {ROUNDS}")
            for name in seconds:
                started = time.monotonic()
                try:
                    self.ready[name]()
                    started = time.monotonic()
                    for _ in runners[name].stream([self.sample]):
                        pass
                except ModelError as exc:
                    if name == REFERENCE:
                        raise
                    self.refused[name] = str(exc)
                seconds[name].append(time.monotonic() - started)
            seconds = {name: s for name, s in seconds.items() if name not in self.refused}
            now = time.monotonic()
            if now + (now - began) > until:
                break
        rows = self.sample.num_rows
        return {
            name: Rate(rows / statistics.median(times), runners[name].meter.batch_ms())
            for name, times in seconds.items()
        }

    def _judged(self, technique: str, outcome: Outcome) -> dict[str, Any]:
        view = self._opened.view
        if self._reference is None:
            self._reference = self._usable(outcome)

        def first(rows: int) -> TechniqueComparison:
            assert self._reference is not None
            return compare_outcomes(
                view, self._budget, self._reference, outcome, rows, self.extremes
            )

        whole = first(self.sample.num_rows)
        self.comparisons[technique] = [
            whole if rows == self.sample.num_rows else first(rows)
            for rows in steps(view, self.sample.num_rows, self.extremes)
        ]
        reasons = "; ".join(
            figure.shortfall for figure in whole.judged(self._budget, view) if figure.room < 0
        )
        accuracy = {} if whole.accuracy is None else whole.accuracy.to_json()["features"]
        return {"accuracy": accuracy, "refused": reasons or None}

    def _convert(self, technique: str) -> None:
        from precompute.techniques.conversion import use_variant
        from precompute.techniques.machine import check_float32

        if technique == REFERENCE:
            check_float32(self._model.device)
            self._model.use(self._model.module)
        else:
            examples = self.sample.slice(0, EXAMPLE_ROWS)
            use_variant(
                self._model,
                technique,
                lambda: pa.Table.from_batches([examples]),
                self._opened.compiled,
            )

    def _usable(self, reference: Outcome) -> Outcome:
        if not len(reference.rows):
            error = reference.rejections[0].error
            raise SourceError(
                f"view {self._opened.view.name!r}: none of {self.sample.num_rows:,} rows could be"
                f" computed in float32; the first: {error}"
            )
        return reference


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
    announce: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all candidates of a view's model, and write the tuning file.

    Args:
        partition: of a partitioned view; by default the latest that is over.
        only: names of the candidates; by default what
            :func:`precompute.techniques.conversion.candidates` finds worth trying.
        within_s: how long candidates may take that were not named; the most promising come first,
            and what there is no time for is left out.
        write: write the tuning file; else only measure.
        announce: called with what begins.

    Returns:
        ``file`` (null when none was written), ``picked`` (a candidate's name), ``precision``,
        ``backend``, ``rows`` and ``measured``: for each candidate ``name``, ``rows_per_s``,
        ``speed`` (times float32's), ``batch_ms`` (``p50``, ``p95``, ``p99``), ``memory_bytes`` (the
        process's at its peak, as if this candidate were alone in it; null where the system does not
        say), ``convert_s``, the figures of :meth:`precompute.techniques.accuracy.Accuracy.to_json`
        and ``refused`` (why, or null); ``left_out``: names.

    Raises:
        ConfigError: the model is none of torch, or a name in ``only`` is unknown.
        SourceError, ModelError: as a run would.
    """
    config, store, only_named = project.view(name), project.offline.view(name), _named(only)
    if config.partition is not None and partition is None:
        partition = config.partition_at(datetime.now(UTC))
    with open_view(
        _in_float32(config.feature_view()),
        store.offline,
        project.home,
        partition=partition,
        memory_mb=project.settings.memory_mb,
    ) as opened:
        model = _torch_model(opened)
        plan = _planned(model, only_named)
        sample, extremes = sample_of(opened, rows)
        trials = Trials(opened, model, sample, extremes, config.accuracy)
        measured, left_out = _measured(trials, plan, within_s, announce)
        # the run that follows is spared its check
        cache_comparisons(
            opened, sample, extremes, config.accuracy, trials.comparisons if write else {}
        )
    tuning = {
        **_picked(measured),
        "rows": sample.num_rows - extremes,
        "budget": config.accuracy.model_dump(),
        "measured": measured,
        "left_out": left_out,
        "within_s": within_s,
        "at": iso(datetime.now(UTC).replace(microsecond=0)),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {model.device.name}",
        "versions": dict(versions()),
    }
    return {"view": name, "file": _written(project, name, tuning) if write else None, **tuning}


def _written(project: Project, name: str, tuning: dict[str, Any]) -> str:
    """The tuning file, with what others put into the one before."""
    model = project.model_as_written(name)
    before = read_tuning(project.folder, name, model) or {}
    others = {
        key: part for key, part in before.items() if isinstance(part, dict) and "models" in part
    }
    return str(write_tuning(project.folder, name, model, tuning | others))


def _named(only: Sequence[str]) -> list[str]:
    from precompute.techniques.technique import technique

    return [technique(name).name for name in only]


def _torch_model(opened: OpenView) -> TorchModel:
    """Raises:
    ConfigError: the view's model is none of torch.
    """
    from precompute.models.torch_model import TorchModel
    from precompute.techniques.conversion import not_torch

    if not isinstance(opened.model, TorchModel):
        raise ConfigError(f"view {opened.view.name!r}: {not_torch()}")
    return opened.model


def _in_float32(view: FeatureView) -> FeatureView:
    model = replace(view.definition.model, precision="fp32", backend="eager")
    return replace(view, definition=replace(view.definition, model=model))


@dataclass(slots=True)
class _Plan:
    """Techniques to try, in their order; ``costs`` are those that time may be short for: about how
    long each takes to convert, and how many times float32's rate it is expected to compute at."""

    names: list[str]
    costs: dict[str, tuple[float, float]]

    def pays(self, name: str, trials: Trials, left_s: float) -> bool:
        """Whether there is time to convert and compare it, and for one round of all."""
        if name not in self.costs:
            return True
        convert_s, gain = self.costs[name]
        needed_s = convert_s + 2 * trials.pass_s[REFERENCE] / gain + sum(trials.pass_s.values())
        return needed_s <= left_s


def _planned(model: TorchModel, only_named: Sequence[str]) -> _Plan:
    """What was requested, whatever it takes, or else what is worth trying here."""
    from precompute.techniques.conversion import candidates

    if only_named:
        return _Plan(list(dict.fromkeys([REFERENCE, *only_named])), {})
    found = candidates(model.device, model)
    costs = {
        one.name: (one.convert_s, one.gain(model.device, model))
        for one in found
        if one.name != REFERENCE
    }
    return _Plan(
        [one.name for one in found], {name: (s, gain or 1.0) for name, (s, gain) in costs.items()}
    )


def _measured(
    trials: Trials, plan: _Plan, within_s: float, announce: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """A line for each candidate, with what :meth:`Trials.tried` returns, ``rows_per_s``, ``speed``
    and ``batch_ms``; and the names of those that time was short for."""
    lines, left_out, until = [], [], time.monotonic() + within_s
    for name in plan.names:
        if not plan.pays(name, trials, until - time.monotonic()):
            announce(f"{name}: left out, since it would take longer than there is time")
            left_out.append(name)
            continue
        announce(
            f"{name}: converting and comparing {trials.sample.num_rows - trials.extremes:,} rows"
        )
        lines.append(trials.tried(name))
    rates = trials.rates(until, announce)
    for line in lines:
        rate = rates.get(line["name"])
        line["refused"] = trials.refused.get(line["name"], line["refused"])
        line["rows_per_s"] = None if rate is None else round(rate.rows_per_s, 1)
        line["speed"] = (
            None if rate is None else round(rate.rows_per_s / rates[REFERENCE].rows_per_s, 3)
        )
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
