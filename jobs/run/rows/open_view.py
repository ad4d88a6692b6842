"""Open view: a feature view's source, model and fingerprint, ready to compute. The batch job and
the fallback both open it here, so they have the same SQL, inputs and model.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import precompute.model
from precompute.jobs.config.section import place
from precompute.jobs.config.view import model_queries
from precompute.model import Model, ReadingModel, StagedModel, model_fingerprint, on_host
from precompute.project_module import absolute_arguments, starting_from
from precompute.registry import (
    BUILT_IN,
    MOST_NAMED_FILES,
    LoadedModel,
    Stamp,
    load_with_fingerprint,
    named_files,
    stamp_of,
)
from precompute.sources.database import Files, referenced_views
from precompute.sources.frame import of_file
from precompute.sources.source import Source
from precompute.store.disk.durable_file import make_folder, replace_durably
from precompute.store.disk.record import Record, read_record, sealed
from precompute.store.errors import (
    ConfigError,
    MissingFileError,
    ModelError,
    SourceError,
    nearest_or_all,
)
from precompute.store.feature_view import FeatureView, ModelUse
from precompute.store.offline.part_file import Layers
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import Partition, as_datetime, iso, microseconds
from precompute.techniques.table import REFERENCE, technique_name

NAME = "fingerprint.json"
OF_FILES = frozenset({"text_encoder", "two_tower"})
"""Built-in models whose fingerprint is that of their files, arguments and code, and of nothing
else."""
SETTLED_NS = 2_000_000_000
"""Files changed within so long do not count as known: a file system's clock has steps of up to two
seconds, so a later change may have the same time."""

_CODE = Path(precompute.model.__file__).parent


class _Known(Record, frozen=True):
    use: str
    args: dict[str, Any]
    files: dict[str, Stamp | None]
    fingerprint: str


class KnownModel:
    """The cached fingerprint of one view's model.

    Args:
        folder: where it is cached; made by the first write.
        use: the model's name.
        args: its arguments, paths among them absolute; a model with tables among them is not
            cached.
        project: the project's folder.
    """

    def __init__(self, folder: Path, use: str, args: Mapping[str, Any], project: Path) -> None:
        self._path, self._use, self._args, self._project = folder / NAME, use, dict(args), project
        self._files = self._stamps()

    def fingerprint(self) -> str | None:
        """The model's own fingerprint; None where it is not cached, or a file has changed."""
        if self._files is None:
            return None
        # a damaged file, or another version's, counts as none
        with contextlib.suppress(OSError, ValueError):
            known = read_record(_Known, self._path.read_bytes())
            if (known.use, known.args, known.files) == (self._use, self._args, self._files):
                return known.fingerprint
        return None

    def remember(self, fingerprint: str) -> None:
        """Cache the fingerprint of a model that was loaded since this object was made, unless a
        file may have changed in the meantime; else the next run loads the model."""
        files = self._files
        if files is None or files != self._stamps():
            return
        latest_ns = max((stamp.changed for stamp in files.values() if stamp is not None), default=0)
        if latest_ns < time.time_ns() - SETTLED_NS:
            with contextlib.suppress(OSError):
                make_folder(self._path.parent)
                replace_durably(
                    self._path, sealed(_Known(self._use, self._args, files, fingerprint))
                )

    def _stamps(self) -> dict[str, Stamp | None] | None:
        """The stamps of all files of the model and of our code for it; None for a model whose
        fingerprint does not depend on these alone."""
        if self._use not in OF_FILES or not all(
            isinstance(value, (str, int, float, type(None))) for value in self._args.values()
        ):
            return None
        with starting_from(self._project):
            named = list(named_files(self._args))
        code = (
            path
            for folder in ("models", "text")
            for path in (_CODE / folder).iterdir()
            if path.is_file()
        )
        return (
            None
            if len(named) >= MOST_NAMED_FILES
            else {str(path): stamp_of(path) for path in (*named, *code)}
        )


_NO_COLUMN = re.compile(
    r"""KeyError: (?:'Field "(.+?)" does not exist in schema'|'([^']+)'|"\['([^']+)'\] not in index")"""  # noqa: E501
)
"""The errors of Arrow, a dict and pandas for a column that does not exist."""

Load = Callable[[str, Mapping[str, Any], str], LoadedModel]
"""Makes a model from ``use``, args (their paths absolute) and the name of its precision."""

EXAMPLE_ROWS = 256
"""Rows of the source that a conversion gets as examples: for shapes, and for the scales of static
int8."""


@dataclass(slots=True)
class OpenView:
    """An opened view; a context manager that closes its source.

    ``inputs`` maps each view that was read to its snapshot's number; ``source`` reads exactly
    these. ``tables`` are the model's arguments that were given as SQL, ``variant`` is the name of
    its precision and back end, ``folder`` the project's.
    """

    view: FeatureView
    folder: Path
    source: Source
    fingerprint: str
    inputs: Mapping[str, int]
    tables: Mapping[str, pa.Table]
    variant: str
    compiled: Path
    """Where its converted models are stored."""
    own: str
    """The model's own fingerprint, without the precision."""
    load: Callable[[], LoadedModel]
    """Loads the model."""
    held: bool = False
    """Whether its model is not to use a GPU, since workers compute there."""
    _model: Model | None = None

    @property
    def model(self) -> Model:
        """The model, loaded on first use.

        Raises:
            ConfigError: it cannot be made as configured.
            ModelError: it failed to load, or its files changed since the view was opened.
        """
        if self._model is None:
            try:
                loaded = self.load()
            except (ConfigError, ModelError) as exc:
                raise _of_model(exc, self.view, self.folder) from exc
            if loaded.fingerprint != self.own:
                raise ModelError(
                    f"view {self.view.name!r}: the model's files were replaced since the run began:"
                    " run again"
                )
            self._model = loaded.model
            self.check_columns(loaded.model)
        return self._model

    def check_columns(self, model: Model) -> None:
        """Raises:
        ConfigError: a built-in model reads a column that the source does not yield, or does not
            return a feature of the view. Of a user's model that is not known before it is called.
        """
        names = self.source.schema.names
        use = self.view.definition.model.use
        # the model `columns` reads the columns that the features are named by
        reads = (
            self.view.feature_names
            if use == "columns"
            else model.reads()
            if isinstance(model, ReadingModel)
            else ()
        )
        lacks = [name for name in reads if name not in names]
        if lacks and use in BUILT_IN:
            raise ConfigError(
                f"{self.place('source', 'sql')}: the source yields no column {lacks[0]!r}, which"
                f" the model {use} "
                "reads: name one so with AS, or"
                f" {'correct features' if use == 'columns' else 'another in model.args'}{nearest_or_all(lacks[0], names)}"  # noqa: E501
            )
        # an endpoint's model names its features, since a call to find out is paid for
        given: tuple[str, ...] = getattr(model, "gives", self.view.feature_names)
        lacks = [name for name in self.view.feature_names if name not in given]
        if lacks:
            raise ConfigError(
                f"{self.place('features', lacks[0])}: the model's answers have no"
                f" {lacks[0]!r}{nearest_or_all(lacks[0], given)}: correct `features`, or model.args"
            )

    def lacks_column(self, error: str) -> str | None:
        """A message, if the model raised ``error`` because the source yields no such column; None
        if for another reason."""
        names, found = self.source.schema.names, _NO_COLUMN.search(error)
        name = (
            None if found is None else next(group for group in found.groups() if group is not None)
        )
        if name is None or name in names:
            return None
        return (
            f"{self.place('source', 'sql')}: the model raised"
            f" {error.partition(' raised ')[2] or error}, and the source yields no column {name!r}:"
            f" name one so with AS, or correct the model{nearest_or_all(name, names)}"
        )

    def place(self, *key: str) -> str:
        """File and line of a key of the view, for a message."""
        return place_of(self.view, self.folder, key)

    def fingerprint_by(self, technique: str) -> str:
        """The fingerprint of the same model by another technique."""
        return model_fingerprint(
            self.own, self.view.definition.model.use, technique.removesuffix("-eager"), self.tables
        )

    @property
    def wanted(self) -> str | None:
        """The GPU that workers compute on, ``cuda`` for any; None for a model that computes in this
        process."""
        if not self.held or not isinstance(self.model, StagedModel):
            return None
        # a user's model names its device itself
        name: str = getattr(self.model.device, "wanted", self.model.device.name.partition(":")[0])
        return name if name.startswith("cuda") else None

    def convert(self) -> None:
        """Convert the model from float32 to the view's precision. Called once there is a row to
        compute, since the conversion needs rows of the source as examples; a second call does
        nothing, and neither does one where workers convert it.

        Raises:
            ConfigError: the model cannot be converted on this machine, or the source has no usable
                rows.
            SourceError: the source cannot be read.
        """
        model = self.model
        if self.variant == REFERENCE or self.wanted is not None:
            return
        # Torch takes a second to import; a model of pure Python needs none.
        from precompute.techniques.conversion import use_variant

        try:
            with starting_from(self.folder):
                use_variant(model, self.variant, lambda: self.examples(self.variant), self.compiled)
        except ConfigError as exc:
            raise ConfigError(
                f"{self.place('model', 'precision')}: {str(exc).removeprefix('precision ')}"
            ) from exc

    def examples(self, variant: str) -> pa.Table:
        """Rows that a conversion gets as examples: a sample, if it takes scales from them; for
        shapes the first rows, which cost no second reading of the source.

        Raises:
            SourceError: the source cannot be read.
        """
        return (self.source.sample if _calibrates(variant) else self.source.head)(EXAMPLE_ROWS)

    def __enter__(self) -> OpenView:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()


def open_view(
    view: FeatureView,
    offline: OfflineStore,
    folder: Path,
    *,
    pinned: Mapping[str, int] | None = None,
    snapshot: int | None = None,
    partition: Partition | None = None,
    memory_mb: int = 1024,
    load: Load | None = None,
    held: bool = False,
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
        load: makes the model; in a server it shares models between views.
        held: the model must not use a GPU, since workers do
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
    )
    try:
        return _with_model(
            view, folder, source, inputs, offline.view(view.name).compiled, load, held
        )
    except BaseException:
        source.close()
        raise


def _with_model(
    view: FeatureView,
    folder: Path,
    source: Source,
    inputs: Mapping[str, int],
    compiled: Path,
    load: Load | None,
    held: bool,
) -> OpenView:
    model = view.definition.model
    queries, variant = model_queries(model.args), variant_name(model)
    tables = {name: _table(view, source, folder, name, text) for name, text in queries.items()}
    arguments = {**absolute_arguments(model.args, folder), **tables}

    def loaded() -> LoadedModel:
        with on_host() if held else nullcontext():
            if load is not None:
                return load(model.use, arguments, variant)
            return load_with_fingerprint(model.use, arguments, folder)

    try:
        known = None if load is not None else KnownModel(compiled, model.use, arguments, folder)
        own, made = None if known is None else known.fingerprint(), None
        if own is None:
            made, own = loaded()
            if known is not None:
                known.remember(own)
        fingerprint = model_fingerprint(own, model.use, variant.removesuffix("-eager"), tables)
    except (ConfigError, ModelError) as exc:
        raise _of_model(exc, view, folder) from exc
    opened = OpenView(
        view,
        folder,
        source,
        fingerprint,
        inputs,
        tables,
        variant,
        compiled,
        own,
        loaded,
        held,
        made,
    )
    if made is not None:
        opened.check_columns(made)
    return opened


def open_source(
    view: FeatureView,
    offline: OfflineStore,
    folder: Path,
    *,
    pinned: Mapping[str, int] | None = None,
    snapshot: int | None = None,
    partition: Partition | None = None,
    memory_mb: int = 1024,
) -> tuple[Source, dict[str, int]]:
    """A view's source, which the caller closes, and the numbers of the snapshots that it and the
    model's tables read. Arguments as for :func:`open_view`.

    Raises:
        ConfigError: bad SQL.
        SourceError: a file is missing, or a view it reads was never published.
    """
    sql = view.definition.source
    texts = (sql, *model_queries(view.definition.model.args).values())
    wanted = sorted({name for text in texts for name in referenced_views(text)})
    inputs = {
        name: pinned[name] if pinned is not None else _live_number(offline, name, view.name)
        for name in wanted
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
                chunk=chunk,
            ),
            inputs,
        )
    except (ConfigError, MissingFileError) as exc:
        text = str(exc).removeprefix("entity: ")
        raise type(exc)(
            f"{place_of(view, folder, ('source', 'sql') if text == str(exc) else ('entity',))}:"
            f" {text}"
        ) from exc
    except SourceError as exc:
        raise SourceError(f"view {view.name!r}: {exc}") from exc


def place_of(view: FeatureView, folder: Path, key: Sequence[str]) -> str:
    """Where a key of a view's file stands, for a message: ``books/views/scores.yaml:6:
    source.sql``; of one that has no file there, ``view 'scores': source.sql``."""
    path = folder / "views" / f"{view.name}.yaml"
    if not path.is_file():
        return f"view {view.name!r}: {'.'.join(key)}"
    # the working directory may be gone
    with contextlib.suppress(OSError, ValueError):
        path = path.relative_to(Path.cwd())
    return f"{place(path, key)}: {'.'.join(key)}"


def _of_model(
    exc: ConfigError | ModelError, view: FeatureView, folder: Path
) -> ConfigError | ModelError:
    """The error with the file and line of the argument that it names, or else of the model."""
    use, args = view.definition.model.use, view.definition.model.args
    text = str(exc).replace(f"model {use!r}", "")
    named = [
        name
        for name, value in args.items()
        if re.search(rf"\b{re.escape(name)}\b", text)
        or (isinstance(value, str) and repr(value) in text)
    ]
    key = ("args", named[0]) if named else ("use",)
    return type(exc)(f"{place_of(view, folder, ('model', *key))}: {exc}")


class SharedModels:
    """Loads models once for several runs in one process, one after the other. Only models in
    float32 without tables as arguments are shared, since a conversion changes a model.

    Args:
        folder: the project's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._loaded = folder, dict[str, LoadedModel]()

    def __call__(self, use: str, args: Mapping[str, Any], variant: str) -> LoadedModel:
        """As :func:`precompute.registry.load_with_fingerprint`.

        Raises:
            ConfigError, ModelError: as that does.
        """
        if variant != REFERENCE or any(isinstance(value, pa.Table) for value in args.values()):
            return load_with_fingerprint(use, args, self._folder)
        key = repr((use, sorted(args.items())))
        if key not in self._loaded:
            self._loaded[key] = load_with_fingerprint(use, args, self._folder)
        return self._loaded[key]


def _calibrates(variant: str) -> bool:
    if variant == REFERENCE:
        return False
    from precompute.techniques.technique import technique

    return technique(variant).calibrates


def _files(store: ViewStore, number: int) -> Files:
    return files_of(store.layers(store.snapshot(number)))


def _table(view: FeatureView, source: Source, folder: Path, name: str, sql: str) -> pa.Table:
    """One of the model's arguments that is given as SQL."""
    try:
        return source.table(sql)
    except (ConfigError, MissingFileError) as exc:
        raise type(exc)(f"{place_of(view, folder, ('model', 'args', name, 'sql'))}: {exc}") from exc


def variant_name(model: ModelUse) -> str:
    """The name (:mod:`precompute.techniques.table`) of what a view's definition says of
    ``precision`` and ``backend``."""
    return technique_name(model.precision, model.backend)


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
