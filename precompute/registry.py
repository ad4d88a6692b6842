"""Registry: loads the model that a view's ``model.use`` names, with the fingerprint of exactly what
was loaded; a module in a project's folder, such as ``mine.py`` beside the views, is imported under
a private name.

Such a module is read again when a file of it has changed; it imports its neighbours by their plain
names or relatively. Each reading is another package, so that a model that was made of the code
before never sees the new one.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from precompute.model import (
    PROJECT_PACKAGE,
    Model,
    files_in,
    files_read,
    plain_name,
    resolve_path,
    starting_from,
)
from precompute.store.doors import MODELS
from precompute.store.errors import ConfigError, ModelError, PrecomputeError, nearest_or_all

BUILT_IN = {
    "text_encoder": "precompute.models.text_encoder:TextEncoder",
    "text_classifier": "precompute.models.text_classifier:TextClassifier",
    "static_embedding": "precompute.models.static_embedding:StaticEmbedding",
    "columns": "precompute.models.columns:Columns",
    "two_tower": "precompute.models.two_tower:TwoTower",
    "top_k": "precompute.models.top_k:TopK",
    "torch_module": "precompute.models.torch_module:TorchModule",
}
"""Name in a view's ``model.use`` → class, of this room; others come in by the door."""

MOST_NAMED_FILES = 1000
"""Files of a folder that a model's argument names; of further ones only the times are looked at."""


def is_built_in(use: str) -> bool:
    """Whether a view's ``model.use`` is the name of a model of ours, or of another package's that
    comes in by the door, whether it is here or not; and no class of the user's."""
    return use in BUILT_IN or (":" not in use and MODELS.has(use))


def built_in() -> Iterator[str]:
    """The names of all that are here."""
    yield from BUILT_IN
    names = (*MODELS.known(), *MODELS.foreign())
    yield from (name for name in names if name not in BUILT_IN and MODELS.is_here(name))


def check_use(use: str, folder: Path | None = None) -> None:
    """Refuse a ``model.use`` that names nothing, without importing the model's libraries.

    Args:
        use: as :func:`load_model` takes it.
        folder: the project's, where modules are looked for first.

    Raises:
        ConfigError: no built-in of that name, or it is not installed here; or no module of that
            dotted path.
    """
    if is_built_in(use):
        if use not in BUILT_IN and not MODELS.is_here(use):
            raise ConfigError(MODELS.absence(use))
        return
    module, _, attribute = use.partition(":")
    if not module or not attribute:
        above, _, last = use.rpartition(".")
        near = nearest_or_all(use, [f"{above}:{last}"] if above else [*built_in()])
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
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
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
    factory = class_of(use, folder)
    try:
        with starting_from(folder):
            model = factory(**args)
    except TypeError as exc:
        why = (
            unfit_argument(factory, args)
            or f"cannot be made with these args ({', '.join(args) or 'none'}): {described(exc)}"
        )
        raise ConfigError(f"model {use!r} {why}") from exc
    except (PrecomputeError, KeyboardInterrupt):
        raise
    except BaseException as exc:
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


def class_of(use: str, folder: Path | None = None) -> Callable[..., Any]:
    """The class that a ``model.use`` names, imported.

    Args:
        use, folder: as :func:`load_model` takes them.

    Raises:
        ConfigError: it is not there, or cannot be imported.
    """
    check_use(use, folder)
    if use not in BUILT_IN and is_built_in(use):
        return MODELS.open(use)
    module, _, attribute = BUILT_IN.get(use, use).partition(":")
    try:
        imported = import_module(module, None if use in BUILT_IN else folder)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        # a user's module may fail in any way, a syntax error included
        raise ConfigError(f"model {use!r} cannot be imported: {described(exc)}") from exc
    found: Any = getattr(imported, attribute, None)
    if not callable(found):
        near = nearest_or_all(attribute, classes_of(imported, ("fingerprint", "compute")))
        raise ConfigError(
            f"unknown model {use!r}: module {module!r} has no class {attribute!r}{near}"
        )
    named: Callable[..., Any] = found
    return named


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
            fingerprint = fingerprint_of(model, use)
    if not any(_may_have_changed(path, named, began_ns) for path in read):
        return LoadedModel(model, fingerprint)
    # there may be no room for two
    del model
    model = load_model(use, args, folder)
    with starting_from(folder):
        if fingerprint_of(model, use) != fingerprint:
            raise ModelError(
                f"model {use!r}: its files were replaced while it was loaded, and again when it was"
                " loaded once more: run again once all are in their place (or its fingerprint() is"
                " another one for each object)"
            )
    return LoadedModel(model, fingerprint)


def fingerprint_of(model: Model, use: str) -> str:
    """What the model says of itself.

    Raises:
        ModelError: that is no text, so that all such models would count as one; or it raised.
    """
    try:
        fingerprint = model.fingerprint()
    except (PrecomputeError, KeyboardInterrupt):
        raise
    except BaseException as exc:
        raise ModelError(f"model {use!r}: fingerprint() raised {described(exc)}") from exc
    if not isinstance(fingerprint, str) or not fingerprint:
        raise ModelError(
            f"model {use!r}: fingerprint() returned {fingerprint!r:.80}, not a text that changes"
            " whenever a value may: return precompute.digest(…) of its files and settings"
        )
    return fingerprint


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


# ---- Project modules: Python in a project's folder, under a private name.

_lock = threading.RLock()
_readings: dict[str, int] = {}
"""Project, by the beginning of its packages' names → how often it was read; the last is what the
newest package's name ends with."""
_sources: dict[str, dict[Path, str]] = {}
"""Package of a project → the files its modules were read from, with the SHA-256 of what was in
them."""
_sources_lock = threading.Lock()
"""Guards :data:`_sources`, to which any thread that computes adds by an import inside a function.
No other lock is taken under it: such a thread holds Python's lock of a module, for which an import
under :data:`_lock` may be waiting."""

_OURS = (f"{Path(__file__).parent}{os.sep}",)
_OTHERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def is_own(name: str, folder: Path | None) -> bool:
    """Whether a module, by its dotted name, lies in a project's folder: ``mine.py``, or a package
    ``mine/``."""
    top = name.partition(".")[0]
    if folder is None or not top.isidentifier():
        return False
    if (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file():
        return True
    # a folder of data is no package, and a folder without __init__.py is one only where nothing
    # else is called so
    return next((folder / top).glob("*.py"), None) is not None and not _is_installed(top)


def sources_read(folder: Path) -> dict[Path, str]:
    """The files that modules of a project's folder were read from last, with the SHA-256 (hex) of
    what was in them."""
    project = PROJECT_PACKAGE + hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    with _sources_lock:
        return dict(_sources.get(f"{project}_{_readings.get(project, 0)}", {}))


def module_exists(name: str, folder: Path | None) -> bool:
    """Whether there is a module of that dotted name, in the folder or installed; packages above it
    are imported.

    Raises:
        Exception: whatever such a package raises.
    """
    if folder is None or not is_own(name, folder):
        return importlib.util.find_spec(name) is not None
    with _lock:
        return importlib.util.find_spec(f"{_package(folder)}.{name}") is not None


def modules_beside(name: str, folder: Path | None) -> list[str]:
    """Dotted names of the modules where one of a dotted name would lie in a project's folder: what
    may be meant where there is none."""
    if folder is None:
        return []
    *above, _ = name.split(".")
    beside = folder.joinpath(*above)
    files = {path.stem for path in beside.glob("*.py") if path.stem != "__init__"}
    packages = {path.parent.name for path in beside.glob("*/*.py")}
    return [".".join((*above, found)) for found in sorted(files | packages)]


def classes_of(module: ModuleType, methods: Collection[str]) -> list[str]:
    """Names of a module's classes that have these methods; of all its classes where none has."""
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and not name.startswith("_")
    }
    able = [
        name
        for name, value in classes.items()
        if all(callable(getattr(value, method, None)) for method in methods)
    ]
    return able or list(classes)


def unfit_argument(factory: Any, args: Mapping[str, Any]) -> str | None:
    """Which argument a class does not take, or lacks; None where its signature does not show it, or
    all are right."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return None
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in args if name not in takes]
    if unknown and all(p.kind is not p.VAR_KEYWORD for p in parameters):
        return (
            "takes no argument"
            f" {unknown[0]!r}{nearest_or_all(unknown[0], takes) or ', nor any other'}"
        )
    lacks = [
        p.name
        for p in parameters
        if p.name in takes and p.default is p.empty and p.name not in args
    ]
    return f"needs the argument {lacks[0]!r}: add it to args" if lacks else None


def import_module(name: str, folder: Path | None) -> ModuleType:
    """The module of a dotted name: of the folder, as its files are now, or else an installed one.

    Raises:
        ImportError: there is none.
        Exception: whatever the module raises.
    """
    if folder is None or not is_own(name, folder):
        return importlib.import_module(name)
    with _lock:
        return importlib.import_module(f"{_package(folder)}.{name}")


def described(exc: BaseException, longest: int = 500) -> str:
    """What a user's code raised, and where: ``ValueError: no such word (mine_models.py:17)``, by
    the innermost line that is neither ours nor a library's; without one, the exception alone.
    Modules of the project's folder have the names that it knows them by. At most ``longest``
    characters."""
    said = ""
    # a class of the user's may fail at this, too
    with contextlib.suppress(Exception):
        said = str(exc)
    text = plain_name(f"{type(exc).__name__}: {said}").removesuffix(": ")
    # half a surrogate pair would keep it out of a run's report
    text = text.encode(errors="backslashreplace").decode()
    lines = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(exc.__traceback__)
    ]
    # a library's compiled Cython names its files relatively
    theirs = [
        (file, line)
        for file, line in lines
        if os.path.isabs(file) and not file.startswith((*_OURS, *_OTHERS))
    ]
    theirs = [
        (file, line)
        for file, line in theirs
        if not {"site-packages", "dist-packages"} & set(Path(file).parts)
    ]
    where = f" ({Path(theirs[-1][0]).name}:{theirs[-1][1]})" if theirs else ""
    return text[: longest - len(where)] + where


def _is_installed(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def _package(folder: Path) -> str:
    """The package that stands for a folder as its files are now: another one once a file that was
    read has changed. Those before stay, for the models made of them."""
    project = PROJECT_PACKAGE + hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    package = f"{project}_{_readings.get(project, 0)}"
    with _sources_lock:
        read = dict(_sources.get(package, {}))
    if package not in sys.modules or any(_digest(path) != before for path, before in read.items()):
        _readings[project] = _readings.get(project, 0) + 1
        package = f"{project}_{_readings[project]}"
        root = ModuleType(package, f"Python in {folder}")
        root.__path__ = [str(folder)]
        sys.modules[package] = root
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return package


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


class _Finder(MetaPathFinder):
    """Finds the modules of projects' packages, by the file system as it is now: the ordinary finder
    remembers what was there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PROJECT_PACKAGE) or path is None:
            return None
        for entry in path:
            stem = Path(entry) / fullname.rpartition(".")[2]
            for file, inside in (
                (stem / "__init__.py", [str(stem)]),
                (stem.with_suffix(".py"), None),
            ):
                if file.is_file():
                    loader = _Loader(fullname, str(file))
                    return importlib.util.spec_from_file_location(
                        fullname, file, loader=loader, submodule_search_locations=inside
                    )
            if stem.is_dir():
                spec = ModuleSpec(fullname, None, is_package=True)
                spec.submodule_search_locations = [str(stem)]
                return spec
        # an extension module is found as any other
        return None


class _Loader(SourceFileLoader):
    """Reads a module from its source, never from bytecode, which is distinguished from an older one
    by whole seconds and the size alone; imports of neighbours get the package's name."""

    def get_code(self, fullname: str) -> Any:
        data, package = self.get_data(self.path), self.name.partition(".")[0]
        with _sources_lock:
            _sources.setdefault(package, {})[Path(self.path)] = hashlib.sha256(data).hexdigest()
        (folder,) = sys.modules[package].__path__
        tree = _Neighbours(package, Path(folder)).visit(ast.parse(data, self.path))
        return self.source_to_code(ast.fix_missing_locations(tree), self.path)


class _Neighbours(ast.NodeTransformer):
    """``import mine`` → ``import <package>.mine as mine``, ``from mine import x`` → ``from
    <package>.mine import x``, for what lies in the folder."""

    def __init__(self, package: str, folder: Path) -> None:
        self._package, self._folder = package, folder

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for alias in node.names:
            if not is_own(alias.name, self._folder):
                made.append(ast.copy_location(ast.Import([alias]), node))
                continue
            top = alias.name.partition(".")[0]
            # `import a.b` loads a.b, and gives the name a
            if alias.asname is None and top != alias.name:
                made.append(
                    ast.copy_location(
                        ast.Import([ast.alias(f"{self._package}.{alias.name}")]), node
                    )
                )
            name = alias.name if alias.asname else top
            made.append(
                ast.copy_location(
                    ast.Import([ast.alias(f"{self._package}.{name}", alias.asname or top)]), node
                )
            )
        return made

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.level == 0 and node.module is not None and is_own(node.module, self._folder):
            node.module = f"{self._package}.{node.module}"
        return node
