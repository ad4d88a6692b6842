"""Open model: a view's model, ready to compute rows of a source that may be elsewhere; the cache of
its fingerprint; and models shared by several runs in one process."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import precompute.model
from precompute.jobs.config.section import place
from precompute.model import (
    Model,
    NamingModel,
    ReadingModel,
    StagedModel,
    absolute_arguments,
    model_fingerprint,
    on_host,
    starting_from,
)
from precompute.model_code import model_code
from precompute.registry import (
    MOST_NAMED_FILES,
    LoadedModel,
    Stamp,
    is_built_in,
    load_with_fingerprint,
    named_files,
    stamp_of,
)
from precompute.store.disk.durable_file import make_folder, replace_durably
from precompute.store.disk.record import Record, read_record, sealed
from precompute.store.errors import ConfigError, ModelError, nearest_or_all
from precompute.store.feature_view import FeatureView, ModelUse
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
        # a damaged file counts as none
        with contextlib.suppress(OSError, ValueError):
            known = read_record(_Known, self._path.read_bytes(), self._path)
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


Draw = Callable[[int, bool], pa.Table]
"""Called with ``(rows, sample)``: so many rows of a source at most, drawn at random where
``sample`` is true, else the first ones."""


@dataclass(slots=True)
class OpenModel:
    """A view with its model. ``tables`` are the model's arguments that were given as SQL,
    ``variant`` is the name of its precision and back end, ``folder`` the project's, ``columns`` are
    the source's."""

    view: FeatureView
    folder: Path
    columns: pa.Schema
    draw: Draw
    """Draws rows that a conversion gets as examples."""
    fingerprint: str
    tables: Mapping[str, pa.Table]
    variant: str
    compiled: Path
    """Where its converted models are stored."""
    loaded_fingerprint: str
    """The model's own fingerprint, without the precision."""
    load: Callable[[], LoadedModel]
    """Loads the model."""
    gpu_reserved: bool = False
    """Whether the GPU is for engine workers alone, so that the model here must not use it."""
    _model: Model | None = None
    _code: dict[str, str] | None = None

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
            if loaded.fingerprint != self.loaded_fingerprint:
                raise ModelError(
                    f"view {self.view.name!r}: the model's files were replaced since the run began:"
                    " run again"
                )
            self._model = loaded.model
            self.check_columns(loaded.model)
        return self._model

    def check_columns(self, model: Model) -> None:
        """Check the model's columns and features against the source's and the view's.

        Raises:
            ConfigError: a built-in model reads a column that the source does not yield, or does
                not return a feature of the view. Of a user's model that is not known before it is
                called.
        """
        names = self.columns.names
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
        if lacks and is_built_in(use):
            raise ConfigError(
                f"{self.place('source', 'sql')}: the source yields no column {lacks[0]!r}, which"
                f" the model {use} "
                "reads: name one so with AS, or"
                f" {'correct features' if use == 'columns' else 'another in model.args'}{nearest_or_all(lacks[0], names)}"  # noqa: E501
            )
        given = model.gives if isinstance(model, NamingModel) else self.view.feature_names
        lacks = [name for name in self.view.feature_names if name not in given]
        if lacks:
            raise ConfigError(
                f"{self.place('features', lacks[0])}: the model's answers have no"
                f" {lacks[0]!r}{nearest_or_all(lacks[0], given)}: correct `features`, or model.args"
            )

    def lacks_column(self, error: str) -> str | None:
        """A message, if the model raised ``error`` because the source yields no such column; None
        if for another reason."""
        names, found = self.columns.names, _NO_COLUMN.search(error)
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

    def code(self) -> dict[str, str]:
        """The code of the model, which was loaded: see
        :func:`precompute.model_code.model_code`."""
        if self._code is None:
            model = self.view.definition.model
            self._code = model_code(model.use, model.args, self.folder)
        return self._code

    def place(self, *key: str) -> str:
        """File and line of a key of the view, for a message."""
        return place_of(self.view, self.folder, key)

    def technique_place(self) -> str:
        """:meth:`place` of what names the technique: the back end where the view has one."""
        auto = self.view.definition.model.backend == "auto"
        return self.place("model", "precision" if auto else "backend")

    def fingerprint_by(self, technique: str) -> str:
        """The fingerprint of the same model by another technique."""
        return model_fingerprint(
            self.loaded_fingerprint,
            self.view.definition.model.use,
            technique.removesuffix("-eager"),
            self.tables,
        )

    @property
    def gpu(self) -> str | None:
        """The GPU that engine workers compute on, ``cuda`` for any; None for one that computes in
        this process."""
        if not self.gpu_reserved or not isinstance(self.model, StagedModel):
            return None
        # a user's model names its device itself
        name: str = getattr(self.model.device, "wanted", self.model.device.name.partition(":")[0])
        return name if name.startswith("cuda") else None

    @property
    def known_precision(self) -> str | None:
        """:attr:`variant`, by which two computations of one row may differ; None of a user's model,
        which says nothing of its precision."""
        # only a torch model has this attribute
        by_torch = self.gpu is not None or getattr(self.model, "variant", None) == self.variant
        return self.variant if by_torch else None

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
        if self.variant == REFERENCE or self.gpu is not None:
            return
        # Torch takes a second to import; a model of pure Python needs none.
        from precompute.techniques.conversion import use_variant

        try:
            with starting_from(self.folder):
                use_variant(model, self.variant, lambda: self.examples(self.variant), self.compiled)
        except ConfigError as exc:
            raise ConfigError(
                f"{self.technique_place()}: {str(exc).removeprefix('precision ')}"
            ) from exc

    def examples(self, variant: str) -> pa.Table:
        """Rows that a conversion gets as examples: a sample, if it takes scales from them; for
        shapes the first rows, which cost no second reading of the source.

        Raises:
            SourceError: the source cannot be read.
        """
        return self.draw(EXAMPLE_ROWS, _calibrates(variant))


def open_model(
    view: FeatureView,
    folder: Path,
    columns: pa.Schema,
    draw: Draw,
    tables: Mapping[str, pa.Table],
    compiled: Path,
    *,
    load: Load | None = None,
    gpu_reserved: bool = False,
) -> OpenModel:
    """Open a view's model, in float32 (see :meth:`OpenModel.convert`). One whose fingerprint is
    cached is loaded on first use.

    Args:
        view: its ``definition`` names the model.
        folder: the project's, absolute: relative paths and the user's modules are looked up there.
        columns: the source's.
        draw: rows of it.
        tables: the model's arguments that are given as SQL.
        compiled: where its converted models are stored.
        load: makes the model; in a server it shares models between views.
        gpu_reserved: the model must not use a GPU, since engine workers do
            (:mod:`precompute.jobs.run.rows.chunks`): a GPU context that breaks ends with its
            process.

    Raises:
        ConfigError: it cannot be made as configured.
        ModelError: it failed to load, or its files are being replaced.
    """
    model = view.definition.model
    variant = variant_name(model)
    arguments = {**absolute_arguments(model.args, folder), **tables}

    def loaded() -> LoadedModel:
        with on_host() if gpu_reserved else nullcontext():
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
    opened = OpenModel(
        view,
        folder,
        columns,
        draw,
        fingerprint,
        tables,
        variant,
        compiled,
        own,
        loaded,
        gpu_reserved,
        made,
    )
    if made is not None:
        opened.check_columns(made)
    return opened


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


def variant_name(model: ModelUse) -> str:
    """The name (:mod:`precompute.techniques.table`) of what a view's definition says of
    ``precision`` and ``backend``."""
    return technique_name(model.precision, model.backend)
