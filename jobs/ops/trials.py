"""Trials: techniques that compute one sample of a view's rows, each compared with float32, then all of them measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from precompute.engine.memory import ResidentPeak, give_back, resident_bytes
from precompute.engine.runner import Runner
from precompute.engine.window import Outcome
from precompute.jobs.config.view import AccuracyConfig
from precompute.jobs.pipeline.accuracy import steps
from precompute.jobs.rows.comparison import Comparison, compared
from precompute.jobs.rows.open_view import EXAMPLE_ROWS, OpenView
from precompute.store.errors import ConfigError, ModelError, SourceError
from precompute.techniques.table import REFERENCE

if TYPE_CHECKING:
    from precompute.models.torch_model import TorchModel

ROUNDS = 3
"""Times that each computes the sample at most, taking turns, so that a busy moment of the machine hits all alike; once at least."""


@dataclass(slots=True)
class Rate:
    """Rows a second, the median of a few rounds, and milliseconds a batch: ``p50``, ``p95``, ``p99``."""

    rows_per_s: float
    batch_ms: dict[str, float] = field(default_factory=dict)


class Trials:
    """Techniques on trial. ``ready`` has, of each that can compute the sample, what makes the model compute by it once more.

    Args:
        opened: the view, its model in float32.
        model: its model.
        sample: the rows.
        ends: how many of them, the first, were not drawn by chance.
        budget: how near to float32 they must come.
    """

    def __init__(self, opened: OpenView, model: TorchModel, sample: pa.RecordBatch, ends: int, budget: AccuracyConfig) -> None:
        self.sample, self._opened, self._model, self._budget = sample, opened, model, budget
        self.ends = ends
        self._reference: Outcome | None = None
        self._loaded_bytes = resident_bytes()
        self.ready: dict[str, Callable[[], object]] = {}
        self.pass_s: dict[str, float] = {}
        """Of each that is ready: seconds of its first pass."""
        self.comparisons: dict[str, list[Comparison]] = {}
        """Of each that is ready: on as many of the sample's rows as a run checks, of the first and of all."""

    def tried(self, technique: str) -> dict[str, Any]:
        """``name``, ``convert_s``, ``refused`` and, where it computes, ``accuracy`` and ``memory_bytes``; float32 comes first.

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

    def rates(self, until: float, tell: Callable[[str], None]) -> dict[str, Rate]:
        """Of each that is ready, as a run computes: the stages overlap, batches are as large and, on a CPU, as many at once as that technique's first
        ones find best, which a later round goes on with.

        Args:
            until: of :func:`time.monotonic`; no further round is begun that would end later, after the first.
            tell: told what begins.
        """
        runners = {name: Runner(self._model, self._opened.view) for name in self.ready}
        seconds: dict[str, list[float]] = {name: [] for name in self.ready}
        for number in range(ROUNDS):
            began = time.monotonic()
            tell(f"measuring {len(self.ready)} candidates, round {number + 1} of {ROUNDS}")
            for name, restore in self.ready.items():
                restore()
                started = time.monotonic()
                for _ in runners[name].stream([self.sample]):
                    pass
                seconds[name].append(time.monotonic() - started)
            now = time.monotonic()
            if now + (now - began) > until:
                break
        rows = self.sample.num_rows
        return {name: Rate(rows / statistics.median(times), runners[name].meter.batch_ms()) for name, times in seconds.items()}

    def _judged(self, technique: str, outcome: Outcome) -> dict[str, Any]:
        view = self._opened.view
        if self._reference is None:
            self._reference = self._usable(outcome)

        def first(rows: int) -> Comparison:
            assert self._reference is not None
            return compared(view, self._budget, self._reference, outcome, rows, self.ends)

        whole = first(self.sample.num_rows)
        self.comparisons[technique] = [
            whole if rows == self.sample.num_rows else first(rows) for rows in steps(view, self.sample.num_rows, self.ends)
        ]
        reasons = "; ".join(figure.shortfall for figure in whole.judged(self._budget, view) if figure.room < 0)
        accuracy = {} if whole.accuracy is None else whole.accuracy.to_json()["features"]
        return {"accuracy": accuracy, "refused": reasons or None}

    def _convert(self, technique: str) -> None:
        from precompute.precision.conversion import use_variant
        from precompute.techniques.machine import check_float32

        if technique == REFERENCE:
            check_float32(self._model.device)
            self._model.use(self._model.module)
        else:
            examples = self.sample.slice(0, EXAMPLE_ROWS)
            use_variant(self._model, technique, lambda: pa.Table.from_batches([examples]), self._opened.compiled)

    def _usable(self, reference: Outcome) -> Outcome:
        if not len(reference.rows):
            error = reference.rejections[0].error
            raise SourceError(
                f"view {self._opened.view.name!r}: none of {self.sample.num_rows:,} rows could be computed in float32; the first: {error}"
            )
        return reference
