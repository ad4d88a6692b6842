"""Registry: loads the model that a view's ``model.use`` names, with the fingerprint of exactly what
was loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from precompute.model import Model, files_in, files_read, resolve_path
from precompute.project_module import (
    classes_of,
    described,
    import_module,
    module_exists,
    modules_beside,
    plain_name,
    starting_from,
    unfit_argument,
)
from precompute.store.errors import ConfigError, ModelError, PrecomputeError, nearest_or_all

BUILT_IN = {
    "text_encoder": "precompute.models.text_encoder:TextEncoder",
    "text_classifier": "precompute.models.text_classifier:TextClassifier",
    "static_embedding": "precompute.models.static_embedding:StaticEmbedding",
    "image_encoder": "precompute.models.image_encoder:ImageEncoder",
    "columns": "precompute.models.columns:Columns",
    "two_tower": "precompute.models.two_tower:TwoTower",
    "top_k": "precompute.models.top_k:TopK",
    "torch_module": "precompute.models.torch_module:TorchModule",
    "chat_endpoint": "precompute.models.endpoint.chat:ChatEndpoint",
    "embedding_endpoint": "precompute.models.endpoint.embedding:EmbeddingEndpoint",
    "lightgbm": "precompute.models.tabular.lightgbm_model:LightGbm",
    "xgboost": "precompute.models.tabular.xgboost_model:XgBoost",
    "catboost": "precompute.models.tabular.catboost_model:CatBoost",
    "onnx": "precompute.models.tabular.onnx_model:OnnxModel",
}
"""Name in a view's ``model.use`` → class."""

MOST_NAMED_FILES = 1000
"""Files of a folder that a model's argument names; of further ones only the times are looked at."""


def check_use(use: str, folder: Path | None = None) -> None:
    """Refuse a ``model.use`` that names nothing, without importing the model's libraries.

    Args:
        use: as :func:`load_model` takes it.
        folder: the project's, where modules are looked for first.

    Raises:
        ConfigError: no built-in of that name, or no module of that dotted path.
    """
    if use in BUILT_IN:
        return
    module, _, attribute = use.partition(":")
    if not module or not attribute:
        above, _, last = use.rpartition(".")
        near = nearest_or_all(use, [f"{above}:{last}"] if above else BUILT_IN)
        raise ConfigError(
            f"unknown model {use!r}: write the name of a built-in one, or a class of yours as"
            f" package.module:Class{near}"
        )
    try:
        exists = module_exists(module, folder)
    except ModuleNotFoundError as exc:
        if not (module + ".").startswith(f"{plain_name(str(exc.name))}."):
            raise ConfigError(f"model {use!r} cannot be imported: {plain_name(str(exc))}") from exc
        exists = False
    except (ImportError, ValueError):
        # a relative or an empty name
        exists = False
    except (Exception, SystemExit) as exc:
        # finding a module inside a package runs the package's own code
        raise ConfigError(f"model {use!r} cannot be imported: {described(exc)}") from exc
    if not exists:
        near = nearest_or_all(module, modules_beside(module, folder))
        raise ConfigError(
            f"unknown model {use!r}: there is no module {module!r} on the Python path (install its"
            f" package, or set PYTHONPATH) or in the project's folder{near}"
        )


def load_model(use: str, args: Mapping[str, Any], folder: Path | None = None) -> Model:
    """Import and construct a model.

    Args:
        use: built-in name or dotted path.
        args: keyword arguments of the class; ``{sql: …}`` arguments are Arrow tables by now, and
            relative paths absolute.
        folder: the project's, absolute: a module that lies there is this project's own, and read
            again when it has changed.

    Raises:
        ConfigError: the class is not there, is no model, or refuses the arguments.
        ModelError: it failed to load.
    """
    check_use(use, folder)
    module, _, attribute = BUILT_IN.get(use, use).partition(":")
    try:
        imported = import_module(module, None if use in BUILT_IN else folder)
    except (Exception, SystemExit) as exc:
        # a user's module may fail in any way, a syntax error included
        raise ConfigError(f"model {use!r} cannot be imported: {described(exc)}") from exc
    factory = getattr(imported, attribute, None)
    if not callable(factory):
        near = nearest_or_all(attribute, classes_of(imported, ("fingerprint", "compute")))
        raise ConfigError(
            f"unknown model {use!r}: module {module!r} has no class {attribute!r}{near}"
        )
    try:
        with starting_from(folder):
            model = factory(**args)
    except TypeError as exc:
        why = (
            unfit_argument(factory, args)
            or f"cannot be made with these args ({', '.join(args) or 'none'}): {described(exc)}"
        )
        raise ConfigError(f"model {use!r} {why}") from exc
    except PrecomputeError:
        raise
    except (Exception, SystemExit) as exc:
        # a user's class may raise anything
        raise ModelError(f"model {use!r} failed to load: {described(exc)}") from exc
    if not isinstance(model, Model):
        lacks = [
            call
            for call in ("fingerprint()", "compute(batch)")
            if not hasattr(model, call.partition("(")[0])
        ]
        raise ConfigError(
            f"model {use!r} has no method {' and no '.join(lacks)}: see 'your own model' in the"
            " README"
        )
    return model


class LoadedModel(NamedTuple):
    """A model, and its own fingerprint: that of the files it was loaded from, which may be others
    by now."""

    model: Model
    fingerprint: str


def load_with_fingerprint(
    use: str, args: Mapping[str, Any], folder: Path | None = None
) -> LoadedModel:
    """:func:`load_model`, and the fingerprint of what was loaded: a model loads its files first and
    has them hashed then, and in between another may take the place of one, so that the old values
    would have the fingerprint of the new ones.

    Where a file may have changed meanwhile (or is so new that its times do not tell), the model is
    loaded once more. What it was loaded from then lies between two readings for a fingerprint,
    which must be the same.

    Raises:
        ConfigError, ModelError: as :func:`load_model` does.
        ModelError: its files changed while it was loaded the second time.
    """
    with starting_from(folder):
        named = {path: stamp_of(path) for path in named_files(args)}
    began_ns = time.time_ns()
    with files_read() as read:
        model = load_model(use, args, folder)
        with starting_from(folder):
            fingerprint = model.fingerprint()
    if not any(_may_have_changed(path, named, began_ns) for path in read):
        return LoadedModel(model, fingerprint)
    # there may be no room for two
    del model
    model = load_model(use, args, folder)
    with starting_from(folder):
        if model.fingerprint() != fingerprint:
            raise ModelError(
                f"model {use!r}: its files were replaced while it was loaded, and again when it was"
                " loaded once more: run again once all are in their place (or its fingerprint() is"
                " another one for each object)"
            )
    return LoadedModel(model, fingerprint)


class Stamp(NamedTuple):
    """What distinguishes a file from another in its place, and from itself after it was written to;
    times in ns."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def stamp_of(path: Path) -> Stamp | None:
    """The stamp of a file; None where there is none."""
    try:
        file, link = path.stat(), path.lstat()
    except (OSError, ValueError):
        return None
    return Stamp(
        file.st_dev,
        file.st_ino,
        file.st_size,
        file.st_mtime_ns,
        max(file.st_ctime_ns, link.st_ctime_ns),
    )


def _may_have_changed(path: Path, before: Mapping[Path, Stamp | None], began_ns: int) -> bool:
    """Whether a file may have changed since ``began_ns``, when the stamps ``before`` had been
    taken; of a file that is not among them by its times alone."""
    now = stamp_of(path)
    if now is None or before.get(path, now) != now:
        return True
    # What changes within a step of the file system's clock has no other time: the kernel's tick, or
    # two seconds where times are whole seconds.
    step_ns = 50_000_000 if now.changed % 1_000_000_000 else 2_000_000_000
    return now.changed > began_ns - step_ns


def named_files(value: Any) -> Iterator[Path]:
    """The files that a model's arguments name, at any depth, and those in the folders that they
    name."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from named_files(inner)
    elif isinstance(value, (str, Path)) and value != "":
        try:
            path = resolve_path(str(value))
        except (ConfigError, OSError, ValueError):
            # a text that is no path
            return
        yield from islice(files_in(path), MOST_NAMED_FILES) if path.is_dir() else [path]
