"""Open student: a student behind a view's misses, ready to compute, and compared with the rows of
each run."""

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
from precompute.jobs.run.rows.substitute import Agreed, Comparison
from precompute.model import (
    Model,
    absolute_arguments,
    is_path,
    model_fingerprint,
    on_host,
    starting_from,
)
from precompute.plugins.students.misses import KEY
from precompute.plugins.students.student import (
    COMPARED_ROWS,
    MIN_ROWS,
    Agreement,
    Student,
    agreement,
    comparable,
    is_held_out,
    read_student,
    shortfalls,
)
from precompute.registry import load_with_fingerprint
from precompute.sources.source import Source
from precompute.store.errors import ConfigError, ModelError
from precompute.store.feature_view import FeatureView, ModelUse, Substitute
from precompute.techniques.table import REFERENCE, words

TRIED_ROWS = 10
"""Rows of the source that the student tries before a run computes any."""


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
    def of(cls, view: FeatureView, folder: Path) -> OpenStudent:
        """The student that a view's ``fallback.model`` names. Its model is loaded on first use.

        Raises:
            ConfigError: the folder has none, or a damaged record, or it is another view's.
        """
        try:
            record = read_student(folder / view.powers[KEY])
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
    def use(self) -> Substitute:
        """What makes it, as a manifest records it: paths start from the project's folder, wherever
        that lies; it computes by the technique that it was made for, or, where it is another one of
        the same class, by the view's own. Its agreement is that of its record, on rows that it
        never saw."""
        record, own, below = self.record, self.view.definition.model, str(self.view.powers[KEY])
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
        return Substitute(model, fingerprint, found)

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

    def compare_rows(self, opened: OpenModel, source: Source, sample: pa.Table) -> Comparison:
        """As :meth:`precompute.jobs.run.rows.substitute.OpenSubstitute.compare_rows`.

        Its agreement is that of held-out rows, with as many other rows as neighbours as when its
        promise was measured. Rows whose input has changed since are left
        out, and those that the teacher gave no value.
        """
        view, record = self.view, self.record
        inputs, stored, unseen = self._paired(source, sample)
        if not inputs.num_rows:
            return Comparison(0)
        among = max(MIN_ROWS, max(max(one.rows, one.among) for one in record.agreement.values()))
        # held-out rows first, then others, in random order: the sample is in the snapshot's
        drawn = np.random.default_rng(0).permutation(len(unseen))
        chosen = drawn[np.argsort(~unseen[drawn], kind="stable")][: min(among, COMPARED_ROWS)]
        inputs, stored = (
            table.take(pa.array(chosen)).combine_chunks() for table in (inputs, stored)
        )
        done = compute(self.model(opened), view, inputs.to_batches()[0])
        rejects = ""
        if done.rejections:
            rejects = (
                f"the student rejects {len(done.rejections)} of {len(chosen)} sampled rows, the"
                f" first: {done.rejections[0].error}; {_remedy(view)}"
            )
        judged = done.rows < np.count_nonzero(unseen[chosen])
        found: Mapping[str, Agreement] = {}
        if np.count_nonzero(judged) >= MIN_ROWS:
            queries = done.rows[judged]
            others = np.setdiff1d(np.arange(len(chosen)), queries)
            taught = stored.take(pa.array(np.concatenate([queries, others]))).combine_chunks()
            own = done.features.filter(pa.array(judged))
            found = comparable(record.agreement, agreement(view, taught.to_batches()[0], own))
        agreed = [self._agreed(name, one) for name, one in found.items()]
        return Comparison(len(chosen), len(done.rejections), rejects, agreed)

    def _agreed(self, name: str, found: Agreement) -> Agreed:
        promised = self.record.agreement[name]
        short = shortfalls({name: promised}, {name: found})
        message = f"{name}: {found.figure} of the student {found.value:.3f}, on {found.rows} rows"
        message = f"{short[0]}; {_remedy(self.view)}" if short else message
        return Agreed(name, found.value, promised.least_of(found.rows), not short, message)

    def words(self) -> str:
        """Its name, how it was made, and what it promises."""
        promised = [
            f"{name}: {one.figure} {one.promised:.3f}"
            for name, one in self.record.agreement.items()
        ]
        return f"{self.record.name}, by {self.record.by}; it promises {', '.join(promised)}"

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


def _remedy(view: FeatureView) -> str:
    return (
        f"make it again with `precompute optimize {view.name}`, or take fallback.model out of the"
        " view"
    )


def _again(view: FeatureView) -> str:
    return (
        f"make the student again with `precompute optimize {view.name}`, or take fallback.model out"
    )


def _mistake(view: FeatureView, folder: Path, what: str) -> ConfigError:
    where = place_of(view, folder, ("fallback", "model"))
    return ConfigError(f"{where}: {view.powers[KEY]}: {what}")
