"""Judge: draws published rows beside the inputs that they were computed from, and compares
students with their teacher, and measures both, on those that no student learned from; each has a
line of the table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.engine.resources import ResidentPeak, give_back
from precompute.engine.rows import Outcome
from precompute.jobs.config.project import Project
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.judge.accuracy import compare_outcomes
from precompute.jobs.run.report import versions
from precompute.jobs.run.rows.open_model import EXAMPLE_ROWS
from precompute.jobs.run.rows.open_view import OpenView, open_view
from precompute.model import Model, digest, starting_from
from precompute.plugins.students.student import (
    FOLDER,
    MODEL,
    Student,
    agreement,
    computed,
    grouped_by,
    index_recalls,
    is_held_out,
    miss_ms,
    rates,
)
from precompute.plugins.students.training import Made, Recipe
from precompute.registry import fingerprint_of, load_model
from precompute.store.disk.record import replace
from precompute.store.errors import ConfigError, ModelError, SnapshotError
from precompute.store.feature_view import FeatureView
from precompute.store.keys import key_column
from precompute.store.offline.snapshot import Snapshot
from precompute.store.times import Partition, iso
from precompute.techniques.table import REFERENCE

HASH, TIME = "input_hash", "computed_at"
"""Columns of a snapshot beside its key and features."""
ADDED = 3
"""Columns that come before the source's: of the key, the inputs' hash, and their group."""

HELD_OUT = 0.1
"""Share of the rows that are held out at random, by their inputs."""
NEWEST = 0.05
"""Share of the rows that are held out because they were computed last, unless one run computed all:
what comes next is more like them."""
ONE_RUN_US = 3_600_000_000
"""Rows that were computed within so long count as computed at once."""
LEAST_HELD_OUT = 200
LEAST_EITHER = 50
"""Different inputs to learn from and to judge by, at least."""


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """Rows that both the live snapshot and its source have, with equal inputs: ``learned`` and
    ``held_out`` ones, of which none has the inputs of a learned one. Columns are the source's, and
    the view's features. ``share`` of the rows is held out at random, those that are equal in the
    columns ``grouped_by`` together (:mod:`precompute.plugins.students.student`); ``data`` is a
    digest of what is learned from."""

    snapshot: Snapshot
    learned: pa.Table
    held_out: pa.Table
    grouped_by: list[str]
    share: float
    data: str


@contextlib.contextmanager
def as_published(project: Project, name: str) -> Iterator[tuple[OpenView, Snapshot]]:
    """A view opened as its live snapshot was computed, in float32; of a view that serves all of its
    partitions, as the newest of these was.

    Raises:
        SnapshotError: nothing is live.
        ConfigError: the model on disk is another one than the snapshot's.
        SourceError, ModelError: as a run would.
    """
    project.view(name)
    store = project.offline.view(name)
    live = store.log.live()
    if live is None:
        raise SnapshotError(
            f"view {name!r} was never published: there is nothing to learn from; `precompute run"
            f" {name}` first"
        )
    snapshot = store.snapshot(live.snapshot)
    if snapshot.members:
        snapshot = store.snapshot(snapshot.members[max(snapshot.members)])
    with open_view(
        snapshot.view,
        project.offline,
        project.home,
        pinned=snapshot.inputs,
        snapshot=snapshot.number,
        partition=None if snapshot.partition is None else Partition.parse(snapshot.partition),
        memory_mb=project.settings.memory_mb,
    ) as opened:
        if opened.fingerprint != snapshot.model:
            raise ConfigError(
                f"view {name!r}: the model on disk has fingerprint {opened.fingerprint[:12]}, live"
                f" snapshot {snapshot.number} {snapshot.model[:12]}: run `precompute run {name}`,"
                " and learn from what it publishes"
            )
        yield opened, snapshot


def published_rows(
    project: Project, opened: OpenView, snapshot: Snapshot, most: int, least: int
) -> PublishedRows:
    """Rows drawn at random from all over a snapshot.

    Args:
        opened: as :func:`as_published` opens it.
        snapshot: of the view.
        most: rows at most; they lie in memory.
        least: rows that a student needs.

    Raises:
        ConfigError: fewer rows than ``least`` have a value and the inputs that it was computed
            from; they have few different inputs; or a column of the source is named as a feature.
        SourceError, SnapshotError: something cannot be read.
    """
    view = opened.view
    drawn = project.offline.view(view.name).sample(snapshot, most)
    names = list(opened.source.schema.names)
    both = set(view.feature_names) & set(names)
    if both:
        raise ConfigError(
            f"{opened.place('features', min(both))}: the source has a column of that name, too, and"
            " a student learns one from the other: rename the column with AS"
        )
    keys = key_column(drawn, view.entity)
    by = grouped_by(opened.model, view, names)
    found = opened.source.rows(keys.to_pylist(), with_hash=True, grouped_by=by).combine_chunks()
    # of a key that the source has twice, the hash tells which row was computed
    taken = drawn.take(pc.index_in(found["key"], value_set=keys)).combine_chunks()
    same = pc.equal(taken[HASH], found[HASH])
    for feature in view.feature_names:
        same = pc.and_(same, pc.is_valid(taken[feature]))
    found, taken = found.filter(same), taken.filter(same)
    rows = found.select(range(ADDED, found.num_columns))
    for feature in view.feature_names:
        rows = rows.append_column(feature, taken[feature])
    if rows.num_rows < least:
        raise ConfigError(
            f"view {view.name!r}: {rows.num_rows:,} rows of snapshot {snapshot.number} have a value"
            f" and still the inputs it was computed from; a student needs {least:,}: publish more"
            " rows, or run the view where its source has changed since"
        )
    groups = np.asarray(found.column(ADDED - 1))
    share = max(HELD_OUT, LEAST_HELD_OUT / rows.num_rows)
    times = np.asarray(taken[TIME].cast(pa.int64()))
    held_out = np.isin(groups, groups[is_held_out(groups, share) | _newest(groups, times)])
    different = [len(np.unique(groups[part])) for part in (~held_out, held_out)]
    if min(different) < LEAST_EITHER:
        raise ConfigError(
            f"view {view.name!r}: its {rows.num_rows:,} rows have so few different inputs that"
            f" {different[0]:,} are left to learn from and {different[1]:,} to judge by; each"
            f" needs {LEAST_EITHER}: publish rows of more inputs"
        )
    learned, judged = (rows.filter(pa.array(part)) for part in (~held_out, held_out))
    hashes = np.sort(np.asarray(found[HASH])[~held_out])
    data = digest(rows=hashes, snapshot=snapshot.number)
    return PublishedRows(snapshot, learned, judged, by, share, data)


def _newest(groups: npt.NDArray[np.uint64], times: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """The newest :data:`NEWEST` of the rows; of those computed at the same time, whichever."""
    chosen = np.zeros(len(groups), np.bool_)
    if len(times) and times.max() - times.min() > ONE_RUN_US:
        chosen[np.lexsort((groups, times))[-max(1, int(NEWEST * len(times))) :]] = True
    return chosen


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
        return replace(
            whole,
            fingerprint=fingerprint_of(model, made.use),
            rejected_rows=len(self._taught) - judged,
            agreement=agreement(self.view, index, found.slice(0, judged)),
            figures=index_recalls(self.view, index, found, judged),
        )

    def tried(self, line: dict[str, Any], folder: Path, student: Student) -> Trial:
        """A student on trial, its line without its rate.

        Raises:
            ModelError: its files are not those that the record was written for.
        """
        give_back()
        model, restore = self._loaded(student, folder)
        if fingerprint_of(model, student.use) != student.fingerprint:
            raise ModelError(f"{folder / MODEL} was changed since it was made: remove {folder}")
        done: list[Outcome] = []
        memory = self._memory(lambda: done.append(self._computed(model, self._inputs)))
        taught = Outcome(np.arange(len(self._taught)), self._taught)
        budget = self._config.accuracy
        comparison = compare_outcomes(self.view, budget, taught, done[0], len(self._taught))
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
        """Of rows that begin with those that are judged."""
        return computed(model, self.view, rows, len(self._taught), self._config.max_rejected)

    def _memory(self, compute: Callable[[], object]) -> int | None:
        """Bytes that the process takes at most meanwhile."""
        self._peak.lap()
        compute()
        return self._peak.lap()


def _batch(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches(max(1, table.num_rows))
    return batch
