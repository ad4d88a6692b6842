"""Project module: a module in a project's folder, such as ``mine.py`` beside the views, imported
under a private name; and what a relative path means, in SQL and in arguments.

It is read again when a file of it has changed; it imports its neighbours by their plain names or
relatively. Each reading is another package, so that a model that was made of the code before never
sees the new one.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from precompute.store.errors import nearest_or_all

_PREFIX = "_project_"
_PRIVATE = re.compile(rf"\b{_PREFIX}[0-9a-f]{{12}}_\d+\.")

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


def plain_name(name: str) -> str:
    """A module's name as its project knows it: the same wherever the project lies."""
    return _PRIVATE.sub("", name)


def described(exc: BaseException, longest: int = 500) -> str:
    """What a user's code raised, and where: ``ValueError: no such word (mine_models.py:17)``, by
    the innermost line that is neither ours nor a library's; without one, the exception alone.
    Modules of the project's folder have the names that it knows them by. At most ``longest``
    characters."""
    text = plain_name(f"{type(exc).__name__}: {exc}").removesuffix(": ")
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
    project = _PREFIX + hashlib.sha256(str(folder).encode()).hexdigest()[:12]
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
        if not fullname.startswith(_PREFIX) or path is None:
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


_FOLDER: ContextVar[Path | None] = ContextVar("project_folder", default=None)


class ProjectPath(str):
    """A path of a model's argument, absolute. It is a text; :func:`precompute.model.digest` takes
    it for a path."""

    __slots__ = ()


def project_folder() -> Path | None:
    """The folder of the project whose model is being made; None outside, where paths start from the
    working directory."""
    return _FOLDER.get()


@contextlib.contextmanager
def starting_from(folder: Path | None) -> Iterator[None]:
    """Within, in this thread, relative paths and users' modules are those of a project's folder."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


def absolute_path(path: str | Path) -> Path:
    """A path that is relative starts from the project's folder, where a model of one is being
    made."""
    return (_FOLDER.get() or Path()) / path


def is_path(text: str) -> bool:
    """Whether a model's argument is a path relative to the project's folder: it starts with ``./``
    or ``../``."""
    return text.startswith(("./", "../"))


def absolute_arguments(value: Any, folder: Path) -> Any:
    """A model's arguments, at any depth, with each text that :func:`is_path` made a
    :class:`ProjectPath`. Queries (``{sql: …}``) stay."""
    if isinstance(value, Mapping):
        return (
            value
            if set(value) == {"sql"}
            else {k: absolute_arguments(v, folder) for k, v in value.items()}
        )
    if isinstance(value, list):
        return [absolute_arguments(v, folder) for v in value]
    return ProjectPath(folder / value) if isinstance(value, str) and is_path(value) else value
