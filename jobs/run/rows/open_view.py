"""Open view: a feature view's source, model and fingerprint, ready to compute, the student behind
its misses, and when the source was last modified. The batch job and the
fallback both open it here, so they have the same SQL, inputs and model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.engine.runner import compute
from precompute.jobs.config.project import read_settings
from precompute.jobs.config.section import place
from precompute.jobs.config.view import model_queries
from precompute.jobs.run.rows.open_model import Load, OpenModel, open_model, place_of, variant_name
from precompute.model import (
    Model,
    absolute_arguments,
    is_path,
    model_fingerprint,
    on_host,
    starting_from,
)
from precompute.registry import load_with_fingerprint
from precompute.sources.database import NO_SETUP, Files, referenced_views
from precompute.sources.frame import of_file
from precompute.sources.session import Setup
from precompute.sources.source import Source
from precompute.store.errors import ConfigError, MissingFileError, ModelError, SourceError
from precompute.store.feature_view import FeatureView, ModelUse, StudentUse
from precompute.store.offline.part_file import Layers
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import Partition, as_datetime, iso, microseconds
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
class StudentComparison:
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

    def compare_rows(
        self, opened: OpenModel, source: Source, sample: pa.Table
    ) -> StudentComparison:
        """Compute rows of a snapshot by the student.

        Its agreement is that of held-out rows, with as many other rows as neighbours as when its
        promise was measured. Rows whose input has changed since are left
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
            return StudentComparison(0, 0, "", None)
        among = max(MIN_ROWS, max(max(one.rows, one.among) for one in record.agreement.values()))
        # held-out rows first, then others, in random order: the sample is in the snapshot's
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
        return StudentComparison(len(chosen), len(rejected), first, found)

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


@dataclass(slots=True)
class OpenView(OpenModel):
    """An opened view; a context manager that closes its source.

    ``inputs`` maps each view that was read to its snapshot's number; ``source`` reads exactly
    these.
    """

    source: Source = field(kw_only=True)
    inputs: Mapping[str, int] = field(kw_only=True)
    student: OpenStudent | None = None
    """What computes the view's misses in the model's stead; of a run, which judges it."""

    def __enter__(self) -> OpenView:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    def late_values(self, error: str, of_all: bool = False) -> str:
        """What made texts of the columns that an error names, as its message goes on: ``"; "`` and
        :meth:`Source.late_values`; empty without any.

        Args:
            error: of rows that the model could not compute, or whose values do not fit the view.
            of_all: look at all columns of texts that the model may read, where it names none.
        """
        inputs, is_columns = self.source.input_columns, self.view.definition.model.use == "columns"
        named = [name for name in inputs if f"'{name}'" in error]
        texts = [n for n in inputs if pa.types.is_string(self.source.schema.field(n).type)]
        declared = {f.name: _KINDS.get(f.dtype, "") for f in self.view.features if is_columns}
        columns = {n: declared.get(n, "") for n in named or (texts if of_all else ())}
        # it is of the error that is told
        with contextlib.suppress(SourceError):
            if why := self.source.late_values(columns):
                return f"; {why}"
        return ""


_KINDS = {"bool": "BOOLEAN", "float16": "DOUBLE", "float32": "DOUBLE", "float64": "DOUBLE"}
_KINDS |= {f"{sign}int{bits}": "BIGINT" for sign in ("", "u") for bits in (8, 16, 32, 64)}
"""A feature's type → DuckDB's of a column that it can be made of, among those of CSV and JSON."""


def open_view(
    view: FeatureView,
    offline: OfflineStore,
    folder: Path,
    *,
    pinned: Mapping[str, int] | None = None,
    snapshot: int | None = None,
    partition: Partition | None = None,
    memory_mb: int = 1024,
    load_mb: int | None = None,
    load: Load | None = None,
    gpu_reserved: bool = False,
) -> OpenView:
    """Open a view's source and its model, in float32 (see :meth:`OpenView.convert`). A model whose
    fingerprint is cached is loaded on first use.

    Args:
        view: its ``definition`` holds source SQL and model.
        offline: where other views' snapshots are.
        folder: the project's, absolute: relative paths and the user's modules are looked up there.
        pinned: snapshot numbers of the views it reads, as a manifest recorded them; the live ones
            by default.
        snapshot: for a view that takes a frame, the snapshot whose frame is read; by default the
            last frame.
        partition: of a partitioned view: what ``$start`` and ``$end`` stand for.
        memory_mb: DuckDB's memory.
        load_mb: what it may take until its rows are loaded; the same by default.
        load: makes the model; in a server it shares models between views.
        gpu_reserved: the model must not use a GPU, since engine workers do
            (:mod:`precompute.jobs.run.rows.chunks`): a GPU context that breaks ends with its
            process.

    Raises:
        ConfigError: bad SQL, or a model that cannot be made as configured.
        SourceError: a file is missing, or a view it reads was never published.
        ModelError: the model failed to load, or its files are being replaced.
    """
    source, inputs = open_source(
        view,
        offline,
        folder,
        pinned=pinned,
        snapshot=snapshot,
        partition=partition,
        memory_mb=memory_mb,
        load_mb=load_mb,
    )
    try:
        queries = model_queries(view.definition.model.args)
        tables = {name: _table(view, source, folder, name, sql) for name, sql in queries.items()}
        opened = open_model(
            view,
            folder,
            source.schema,
            lambda rows, sample: (source.sample if sample else source.head)(rows),
            tables,
            offline.view(view.name).compiled,
            load=load,
            gpu_reserved=gpu_reserved,
        )
        known = {one.name: getattr(opened, one.name) for one in fields(opened)}
        return OpenView(**known, source=source, inputs=inputs)
    except BaseException:
        source.close()
        raise


def open_source(
    view: FeatureView,
    offline: OfflineStore,
    folder: Path,
    *,
    pinned: Mapping[str, int] | None = None,
    snapshot: int | None = None,
    partition: Partition | None = None,
    memory_mb: int = 1024,
    load_mb: int | None = None,
) -> tuple[Source, dict[str, int]]:
    """A view's source, which the caller closes, and the numbers of the snapshots that it and the
    model's tables read. Arguments as for :func:`open_view`.

    Raises:
        ConfigError: bad SQL.
        SourceError: a file is missing, or a view it reads was never published.
    """
    sql = view.definition.source
    texts = (sql, *model_queries(view.definition.model.args).values())
    views_read = sorted({name for text in texts for name in referenced_views(text)})
    inputs = {
        name: pinned[name] if pinned is not None else _live_number(offline, name, view.name)
        for name in views_read
    }
    live = {name: _files(offline.view(name), number) for name, number in inputs.items()}
    bounds = None if partition is None else (partition.start, partition.end)
    try:
        text = of_file(sql, lambda: offline.view(view.name).frame(snapshot))
        chunk = view.definition.chunk
        return (
            Source(
                text,
                view.entity,
                live,
                bounds=bounds,
                folder=folder,
                memory_mb=memory_mb,
                load_mb=load_mb,
                chunk=chunk,
                setup=_setup(folder),
            ),
            inputs,
        )
    except (ConfigError, MissingFileError) as exc:
        if found := re.match(r"sources\.setup\[(\d+)\]", str(exc)):
            where = place(folder / "project.yaml", ("sources", "setup", int(found[1])))
            raise type(exc)(f"{where}: {exc}") from exc
        text = str(exc).removeprefix("entity: ")
        raise type(exc)(
            f"{place_of(view, folder, ('source', 'sql') if text == str(exc) else ('entity',))}:"
            f" {text}"
        ) from exc
    except SourceError as exc:
        raise SourceError(f"view {view.name!r}: {exc}") from exc


def _setup(folder: Path) -> Setup:
    """What the project opens for its sources, as its files and the environment are now: a server
    has another password without being published again."""
    if not (folder / "project.yaml").is_file():
        return NO_SETUP
    return Setup(read_settings(folder).sources.setup, folder)


def _files(store: ViewStore, number: int) -> Files:
    snapshot = store.snapshot(number)
    # what is computed from a damaged value would bear a checksum of its own
    store.compare_parts(snapshot)
    return files_of(store.layers(snapshot))


def _table(view: FeatureView, source: Source, folder: Path, name: str, sql: str) -> pa.Table:
    """One of the model's arguments that is given as SQL."""
    try:
        return source.table(sql)
    except (ConfigError, MissingFileError) as exc:
        raise type(exc)(f"{place_of(view, folder, ('model', 'args', name, 'sql'))}: {exc}") from exc


def files_of(layers: Layers) -> Files:
    """A snapshot's files as a source takes them."""
    return Files(layers.paths, layers.dead)


def _live_number(offline: OfflineStore, name: str, reader: str) -> int:
    ref = offline.view(name).refs.live()
    if ref is None:
        raise SourceError(
            f"view {reader!r} reads live.{name}, which was never published: run `precompute run"
            f" {name}` first"
        )
    return ref.snapshot


REPORTS = 50
"""How many of a view's newest reports are searched for the last one that finished."""


def read_source_at(opened: OpenView, offline: OfflineStore) -> str | None:
    """When what a view's source SQL reads was last modified: the newest of its local files, or the
    oldest of that and what is known of the views it reads. ISO 8601 in UTC; None where nothing is
    known.

    Raises:
        SourceError, SnapshotError: something cannot be read.
    """
    times_us = [opened.source.modified_us()]
    for name in referenced_views(opened.view.definition.source):
        store = offline.view(name)
        times_us.append(
            microseconds(
                known_source_at(store.snapshot(opened.inputs[name]), store.runs.reports(REPORTS))
                or ""
            )
        )
    return iso_us(min((us for us in times_us if us is not None), default=None))


def known_source_at(snapshot: Snapshot, reports: Iterable[Report]) -> str | None:
    """When the source of a snapshot was last modified, by the newest of ``reports`` of a run that
    made it or found it unchanged, else by its manifest."""
    did = (report for report in reports if report.finished and report.snapshot == snapshot.number)
    return next((report.source_at for report in did if report.source_at), snapshot.source_at)


def iso_us(us: int | None) -> str | None:
    """µs since 1970 as an ISO 8601 time in UTC."""
    return None if us is None else iso(as_datetime(us))
