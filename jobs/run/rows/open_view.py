"""Open view: a feature view's source, model and fingerprint, ready to compute, and when the source
was last modified. The batch job and the fallback both open it here, so they have the same SQL,
inputs and model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import pyarrow as pa

from precompute.jobs.config.project import read_settings
from precompute.jobs.config.section import place
from precompute.jobs.config.view import model_queries
from precompute.jobs.run.rows.open_model import Load, OpenModel, open_model, place_of
from precompute.jobs.run.rows.substitute import OpenSubstitute
from precompute.sources.database import NO_SETUP, Files, referenced_views
from precompute.sources.frame import of_file
from precompute.sources.session import Setup
from precompute.sources.source import Source
from precompute.store.errors import ConfigError, MissingFileError, SourceError
from precompute.store.feature_view import FeatureView
from precompute.store.offline.part_file import Layers
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import Partition, as_datetime, iso, microseconds


@dataclass(slots=True)
class OpenView(OpenModel):
    """An opened view; a context manager that closes its source.

    ``inputs`` maps each view that was read to its snapshot's number, and ``input_models`` to
    :attr:`precompute.store.offline.snapshot.Snapshot.made_by` of it; ``source`` reads exactly
    these.
    """

    source: Source = field(kw_only=True)
    inputs: Mapping[str, int] = field(kw_only=True)
    input_models: Mapping[str, str] = field(kw_only=True)
    substitute: OpenSubstitute | None = None
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
        made_by = {name: offline.view(name).snapshot(n).made_by for name, n in inputs.items()}
        return OpenView(**known, source=source, inputs=inputs, input_models=made_by)
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
    ref = offline.view(name).log.live()
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
