"""Student judge: compares students with their teacher, and measures both, on rows that no student
learned from; each has a line of the table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.engine.memory import ResidentPeak, give_back
from precompute.engine.window import Outcome
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.ops.published_rows import PublishedRows
from precompute.jobs.run.judge.accuracy import compared
from precompute.jobs.run.report import versions
from precompute.jobs.run.rows.open_model import EXAMPLE_ROWS
from precompute.jobs.run.rows.open_view import OpenView
from precompute.model import Model
from precompute.project_module import starting_from
from precompute.registry import load_model
from precompute.store.disk.record import replace
from precompute.store.errors import ConfigError, ModelError
from precompute.store.feature_view import FeatureView
from precompute.store.times import iso
from precompute.students.judging import cascade_recalls, computed, index_recalls, miss_ms, rates
from precompute.students.lesson import Made, Recipe
from precompute.students.student import FOLDER, MODEL, Student, agreement
from precompute.techniques.table import REFERENCE

SEED = 0
JUDGED_ROWS = 2048
"""Held-out rows that students compute, at most."""
INDEX_ROWS = 8192
"""Rows of the index that neighbours are looked for in, at most."""
ROUNDS = 3
"""Rounds of measuring, in which the models take turns."""


@dataclass(slots=True)
class Trial:
    """A model on trial: the teacher or a student, ready to compute; and its line of the table."""

    line: dict[str, Any]
    model: Model
    restore: Callable[[], object] = lambda: None


class Judge:
    """Compares students with their teacher on held-out rows.

    Args:
        opened: the view, as its live snapshot was computed.
        rows: the held-out ones are drawn from them.
        config: of the view: its ``accuracy``, and how many rows may be rejected.
    """

    def __init__(self, opened: OpenView, rows: PublishedRows, config: ViewConfig) -> None:
        self._opened, self._rows, self._config = opened, rows, config
        view, chance = opened.view, np.random.default_rng(SEED)
        drawn = chance.permutation(rows.held_out.num_rows)[:JUDGED_ROWS]
        others = np.sort(chance.permutation(rows.learned.num_rows)[: INDEX_ROWS - len(drawn)])
        self.judged = rows.held_out.take(pa.array(drawn))
        index = pa.concat_tables([self.judged, rows.learned.take(pa.array(others))])
        self._index_inputs = index.drop_columns(list(view.feature_names))
        self._index = _batch(index.select(view.feature_names))
        self._taught = self._index.slice(0, len(drawn))
        self._inputs = self._index_inputs.slice(0, len(drawn))
        self._peak = ResidentPeak()

    @property
    def view(self) -> FeatureView:
        """Whose model has students."""
        return self._opened.view

    def teacher(self) -> Trial:
        """The view's own model, as it computes."""
        self._opened.convert()
        model = self._opened.model
        line: dict[str, Any] = {
            "name": f"teacher, {self._opened.variant}",
            "by": None,
            "folder": None,
            "path": None,
            "make_s": None,
            "beyond": None,
            "accuracy": {},
            "agreement": {},
            "promised": {},
            "rejected_rows": 0,
            "refused": None,
        }
        line["memory_bytes"] = self._memory(lambda: self._computed(model, self._inputs))
        restore = model.restorer() if hasattr(model, "restorer") else lambda: None
        return Trial(line, model, restore)

    def student(self, recipe: Recipe, made: Made, place: Path, made_s: float) -> Student:
        """The record of a student that was made in a folder.

        Raises:
            ConfigError, ModelError: its model does not load, or rejects too many rows.
        """
        whole = Student(
            view=self.view.name,
            name=recipe.name,
            by=recipe.by,
            use=made.use,
            args=dict(made.args),
            technique=made.technique,
            fingerprint="",
            approximates=self._rows.snapshot.model,
            snapshot=self._rows.snapshot.number,
            data=self._rows.data,
            seed=SEED,
            learned_rows=self._rows.learned.num_rows,
            held_out_rows=self._rows.held_out.num_rows,
            grouped_by=self._rows.grouped_by,
            held_out_share=self._rows.share,
            agreement={},
            figures={},
            made_s=round(made_s, 1),
            made_at=iso(datetime.now(UTC).replace(microsecond=0)),
            versions=dict(versions()),
        )
        model, _ = self._loaded(whole, place)
        done = self._computed(model, self._index_inputs)
        # rows that it rejects are left out of both
        index, found = self._index.take(pa.array(done.rows)), done.features
        judged = int(np.count_nonzero(done.rows < len(self._taught)))
        cascade = cascade_recalls(self.view, index, found, judged)
        return replace(
            whole,
            fingerprint=model.fingerprint(),
            rejected_rows=len(self._taught) - judged,
            agreement=agreement(self.view, index, found.slice(0, judged)),
            figures=index_recalls(self.view, index, found, judged),
            cascade=[one._asdict() for one in cascade],
        )

    def tried(self, line: dict[str, Any], folder: Path, student: Student) -> Trial:
        """A student on trial, its line without its rate.

        Raises:
            ModelError: its files are not those that the record was written for.
        """
        give_back()
        model, restore = self._loaded(student, folder)
        if model.fingerprint() != student.fingerprint:
            raise ModelError(f"{folder / MODEL} was changed since it was made: remove {folder}")
        done: list[Outcome] = []
        memory = self._memory(lambda: done.append(self._computed(model, self._inputs)))
        taught = Outcome(np.arange(len(self._taught)), self._taught)
        budget = self._config.accuracy
        comparison = compared(self.view, budget, taught, done[0], len(self._taught))
        accuracy = {} if comparison.accuracy is None else comparison.accuracy.to_json()["features"]
        for name, figures in student.figures.items():
            accuracy[name] = accuracy.get(name, {}) | figures
        beyond = [f.shortfall for f in comparison.judged(budget, self.view) if f.room < 0]
        more = f", and {len(beyond) - 1} figures more" if len(beyond) > 1 else ""
        return Trial(
            line
            | {
                "folder": str(folder),
                "path": f"{FOLDER}/{folder.name}",
                "make_s": student.made_s,
                "accuracy": accuracy,
                "agreement": {name: one.value for name, one in student.agreement.items()},
                "promised": {name: one.promised for name, one in student.agreement.items()},
                "rejected_rows": student.rejected_rows,
                "memory_bytes": memory,
                "cascade": student.cascade,
                "beyond": beyond[0] + more if beyond else None,
                "refused": None,
            },
            model,
            restore,
        )

    def measure(self, trials: list[Trial], announce: Callable[[str], None]) -> None:
        """Put the rates of all into their lines."""
        announce(f"measuring {len(trials)} models on {self._inputs.num_rows:,} rows")
        models = {trial.line["name"]: (trial.model, trial.restore) for trial in trials}
        found = rates(models, self.view, self._inputs, ROUNDS, time.monotonic() + 60)
        teacher_rate = found[trials[0].line["name"]][0]
        for trial in trials:
            rate, batch_ms = found[trial.line["name"]]
            trial.restore()
            trial.line |= {
                "rows_per_s": round(rate, 1),
                "speed": round(rate / teacher_rate, 3),
                "batch_ms": batch_ms,
                "miss_ms": miss_ms(trial.model, self.view, self._inputs),
            }

    def _loaded(self, student: Student, folder: Path) -> tuple[Model, Callable[[], object]]:
        """A student's model, by the technique that it was made for, or else by the teacher's."""
        with starting_from(self._opened.folder):
            model = load_model(student.use, student.arguments(folder), self._opened.folder)
        definition = self.view.definition.model
        technique = self._opened.variant if student.use == definition.use else REFERENCE
        technique = student.technique or technique
        if technique == REFERENCE or not hasattr(model, "restorer"):
            return model, lambda: None
        from precompute.techniques.conversion import use_variant

        try:
            examples = self._rows.learned.slice(0, EXAMPLE_ROWS)
            use_variant(model, technique, lambda: examples, self._opened.compiled)
        except ConfigError as exc:
            raise ModelError(str(exc)) from exc
        return model, model.restorer()

    def _computed(self, model: Model, rows: pa.Table) -> Outcome:
        """Of rows that begin with those that are judged.

        Raises:
            ModelError: as of :func:`precompute.students.judging.computed`.
        """
        return computed(model, self.view, rows, len(self._taught), self._config.max_rejected)

    def _memory(self, compute: Callable[[], object]) -> int | None:
        """Bytes that the process takes at most meanwhile."""
        self._peak.lap()
        compute()
        return self._peak.lap()


def _batch(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches(max(1, table.num_rows))
    return batch
