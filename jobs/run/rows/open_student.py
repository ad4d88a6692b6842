"""Open student: the student behind a view's misses, checked against the view and its teacher, ready
to compute; and how well it agrees with the rows of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.engine.runner import compute
from precompute.jobs.run.rows.open_model import OpenModel, place_of, variant_name
from precompute.model import Model, model_fingerprint, on_host
from precompute.project_module import absolute_arguments, is_path, starting_from
from precompute.registry import load_with_fingerprint
from precompute.sources.source import Source
from precompute.store.errors import ConfigError, ModelError
from precompute.store.feature_view import FeatureView, ModelUse, StudentUse
from precompute.students.student import (
    COMPARED_ROWS,
    MIN_ROWS,
    Agreement,
    Student,
    agreement,
    comparable,
    is_held_out,
    read_student,
)
from precompute.techniques.table import REFERENCE, words

TRIED_ROWS = 10
"""Rows of the source that the student tries before a run computes any."""


@dataclass(frozen=True)
class Compared:
    """What came of rows of a snapshot that the student computed: how many it was given, how many of
    them it rejected and why the first of them, and how the others agree with the teacher's; None
    where they are fewer than :data:`precompute.students.student.MIN_ROWS`."""

    given: int
    rejected: int
    error: str
    agreement: Mapping[str, Agreement] | None


@dataclass(slots=True)
class OpenStudent:
    """A view's student, as its folder has it.

    Args:
        view: whose misses it computes.
        folder: of the project, absolute.
        record: of the student.
    """

    view: FeatureView
    folder: Path
    record: Student
    _model: Model | None = None

    @classmethod
    def of(cls, view: FeatureView, folder: Path) -> OpenStudent | None:
        """The student that a view's ``fallback.model`` names; None where that names none. Its model
        is loaded on first use.

        Raises:
            ConfigError: the folder has none, or a damaged record, or it is another view's.
        """
        if view.fallback_model is None:
            return None
        try:
            record = read_student(folder / view.fallback_model)
        except ConfigError as exc:
            raise _mistake(view, folder, str(exc)) from exc
        if record.view != view.name:
            raise _mistake(
                view,
                folder,
                f"it is a student of view {record.view!r}: name one of"
                f" this view, which `precompute optimize {view.name}` makes",
            )
        if unjudged := [name for name in view.feature_names if name not in record.agreement]:
            raise _mistake(
                view,
                folder,
                f"it was never judged on feature {unjudged[0]!r} (its"
                f" features: {', '.join(record.agreement)}): {_again(view)}",
            )
        return cls(view, folder, record)

    @property
    def use(self) -> StudentUse:
        """What makes it, as a manifest records it: paths start from the project's folder, wherever
        that lies; it computes by the technique that it was made for, or, where it is another one of
        the same class, by the view's own. Its agreement is that of its record, on rows that it
        never saw."""
        record, own, below = self.record, self.view.definition.model, str(self.view.fallback_model)
        if not (is_path(below) or Path(below).is_absolute()):
            below = f"./{below}"
        args = {
            name: f"{below}/{value[2:]}" if isinstance(value, str) and value[:2] == "./" else value
            for name, value in record.args.items()
        }
        model = ModelUse(record.use, args)
        if record.technique is not None:
            model = ModelUse(record.use, args, *words(record.technique))
        elif record.use == own.use:
            model = replace(own, args=args)
        technique = variant_name(model).removesuffix("-eager")
        fingerprint = model_fingerprint(record.fingerprint, record.use, technique, {})
        found = {name: record.agreement[name].value for name in self.view.feature_names}
        return StudentUse(model, fingerprint, found)

    def check_approximates(self, fingerprint: str) -> None:
        """Refuse a student of another teacher.

        Args:
            fingerprint: of the view's model now.

        Raises:
            ConfigError: its teacher is another model; names both fingerprints.
        """
        if self.record.approximates != fingerprint:
            raise _mistake(
                self.view,
                self.folder,
                f"the student approximates model {self.record.approximates[:12]}, and the view's is"
                f" {fingerprint[:12]}: take fallback.model out, run the view by its model, make"
                f" another student (`precompute optimize {self.view.name}`), and name that one",
            )

    def model(self, opened: OpenModel) -> Model:
        """Its model, on the CPU, loaded once.

        Args:
            opened: the view, whose rows a conversion gets as examples.

        Raises:
            ConfigError, ModelError: it cannot be made or converted, or its files are not those that
                the record was made for.
        """
        if self._model is not None:
            return self._model
        use = self.use.model
        variant = variant_name(use)
        try:
            with on_host():
                args = absolute_arguments(use.args, self.folder)
                model, own = load_with_fingerprint(use.use, args, self.folder)
            if variant != REFERENCE:
                # torch takes a second to import
                from precompute.techniques.conversion import use_variant

                with starting_from(self.folder):
                    use_variant(model, variant, lambda: opened.examples(variant), opened.compiled)
        except (ConfigError, ModelError) as exc:
            raise type(exc)(str(_mistake(self.view, self.folder, str(exc)))) from exc
        if own != self.record.fingerprint:
            raise _mistake(
                self.view,
                self.folder,
                f"the files of its model were changed: their fingerprint is {own[:12]}, and its"
                f" record's {self.record.fingerprint[:12]}: {_again(self.view)}",
            )
        self._model = model
        return model

    def check_fits(self, opened: OpenModel, source: Source) -> None:
        """Try it on the first rows of the source.

        Raises:
            ConfigError: it computes none of them: it reads columns that are not there, or gives
                other features.
            ModelError: as of :meth:`model`.
        """
        model, head = self.model(opened), source.head(TRIED_ROWS).combine_chunks()
        done = compute(model, self.view, head.to_batches()[0]) if head.num_rows else None
        # those that a model declares unusable say nothing of it
        errors = [one.error for one in done.rejections if one.stage != "input"] if done else []
        if done is not None and errors and not done.features.num_rows:
            raise _mistake(
                self.view,
                self.folder,
                f"the student computes none of the first {head.num_rows} rows: {errors[0]}",
            )

    def compared(self, opened: OpenModel, source: Source, sample: pa.Table) -> Compared:
        """Compute rows of a snapshot by the student.

        Its agreement is that of rows that it never learned from; as many others as its promise was
        measured among lie beside these, as neighbours. Rows whose input has changed since are left
        out, and those that the teacher gave no value.

        Args:
            opened: the view.
            source: of the view, loaded.
            sample: some rows of the snapshot, drawn by chance, with a column ``key``.

        Raises:
            SourceError, ModelError, ConfigError: something cannot be read or computed.
        """
        view, record = self.view, self.record
        inputs, stored, unseen = self._paired(source, sample)
        if not inputs.num_rows:
            return Compared(0, 0, "", None)
        among = max(MIN_ROWS, max(max(one.rows, one.among) for one in record.agreement.values()))
        # those that it never learned from are the first, each drawn from all over the snapshot, in
        # whose order the sample is
        drawn = np.random.default_rng(0).permutation(len(unseen))
        chosen = drawn[np.argsort(~unseen[drawn], kind="stable")][: min(among, COMPARED_ROWS)]
        inputs, stored = (
            table.take(pa.array(chosen)).combine_chunks() for table in (inputs, stored)
        )
        done = compute(self.model(opened), view, inputs.to_batches()[0])
        rejected, first = done.rejections, done.rejections[0].error if done.rejections else ""
        judged = done.rows < np.count_nonzero(unseen[chosen])
        found = None
        if np.count_nonzero(judged) >= MIN_ROWS:
            queries = done.rows[judged]
            others = np.setdiff1d(np.arange(len(chosen)), queries)
            taught = stored.take(pa.array(np.concatenate([queries, others]))).combine_chunks()
            own = done.features.filter(pa.array(judged))
            found = comparable(record.agreement, agreement(view, taught.to_batches()[0], own))
        return Compared(len(chosen), len(rejected), first, found)

    def _paired(
        self, source: Source, sample: pa.Table
    ) -> tuple[pa.Table, pa.Table, npt.NDArray[np.bool_]]:
        """Of the sample's rows that have a value, and still the input that it was computed from:
        the inputs, the features, and whether the student never learned from them."""
        names, by = source.schema.names, self.record.grouped_by
        there = [sample.column(name).is_valid().to_numpy() for name in self.view.feature_names]
        sample = sample.filter(pa.array(np.any(there, axis=0))).combine_chunks()
        # a source without one of these columns is another than it learned from: all may be known
        known = set(by) <= set(names)
        found = source.rows(
            sample.column("key").to_pylist(), with_hash=True, grouped_by=by if known else ()
        ).combine_chunks()
        stored = sample.take(pc.index_in(found.column("key"), value_set=sample.column("key")))
        same = pc.equal(stored.column("input_hash"), found.column("input_hash"))
        found, stored = found.filter(same), stored.filter(same).select(self.view.feature_names)
        unseen = np.zeros(found.num_rows, np.bool_)
        if known:
            unseen = is_held_out(np.asarray(found.column(2)), self.record.held_out_share)
        return (
            found.select(range(found.num_columns - len(names), found.num_columns)),
            stored,
            unseen,
        )


def _again(view: FeatureView) -> str:
    return (
        f"make the student again with `precompute optimize {view.name}`, or take fallback.model out"
    )


def _mistake(view: FeatureView, folder: Path, what: str) -> ConfigError:
    where = place_of(view, folder, ("fallback", "model"))
    return ConfigError(f"{where}: {view.fallback_model}: {what}")
