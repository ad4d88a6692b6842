"""Model code: the source of a user's model and of what it imports from its own project, and the
versions of the libraries that these import. A fingerprint says which values a model gives as far as
its author thought of it; the code says whether anything may have changed that it left out."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from precompute.registry import Stamp, is_built_in, is_own, sources_read, stamp_of
from precompute.store.errors import ModelError

MOST_FILES = 200
"""Files of an installed package of which each is looked at: to read torch's takes minutes."""
MOST_NAMED = 3
"""Differences that a message names at most."""


def model_code(use: str, args: Mapping[str, Any], folder: Path | None) -> dict[str, str]:
    """The code of a user's model: each file of its project that it imports, by its path there → the
    SHA-256 of its source, comments, docstrings and blank lines apart (16 hex digits); each file of
    what these import from other folders of the Python path, where no library is installed; and each
    library that they import → its version. Empty for a built-in model, whose fingerprint has the
    version of its code, but for ``torch_module``: its class is the user's. What is imported by a
    name that only running the code tells is not known.

    Args:
        use, args: as :func:`precompute.registry.load_model` takes them; its module was imported.
        folder: the project's, where modules are looked for first.

    Raises:
        ModelError: a file is another one by now than the one that was imported.
    """
    of_user = str(args["module"]) if use == "torch_module" else use
    if is_built_in(of_user) or of_user.endswith(".pt2"):
        return {}
    name = of_user.partition(":")[0]
    project = _project_of(name, folder)
    if project.is_large:
        return _versions({name.partition(".")[0]})
    read = {} if folder is None else sources_read(folder)
    code, libraries, todo = dict[str, str](), set[str](), [(name, project)]
    seen, elsewhere = set[str](), functools.cache(_elsewhere)
    while todo:
        module, project = todo.pop()
        for above in _with_packages(module):
            if above in seen:
                continue
            seen.add(above)
            if (file := project.file_of(above)) is None:
                continue
            source = _source_of(file, above, stamp_of(file))
            if read.get(file, source.content) != source.content:
                raise ModelError(
                    f"model {use!r}: {file} was changed while the model was loaded: run again"
                )
            code[file.relative_to(project.root).as_posix()] = source.code
            for imported in source.imports:
                if imported in seen:
                    continue
                if project.is_its(imported):
                    todo.append((imported, project))
                elif other := elsewhere(imported.partition(".")[0]):
                    todo.append((imported, other))
                else:
                    libraries.add(imported.partition(".")[0])
    return dict(sorted(code.items())) | _versions(libraries)


def code_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """How the code of a model differs from what it was, for people: ``mine.py changed, numpy 2.4.1
    → 2.5.0``; empty where it does not, or where one of the two is not known."""
    if not before or not now:
        return ""
    changes = []
    for name in sorted({*before, *now}):
        was, is_now = before.get(name), now.get(name)
        if was == is_now:
            continue
        of_file = "." in name
        if was is None:
            changes.append(f"{name} is new")
        elif is_now is None:
            changes.append(f"{name} is not imported any more")
        else:
            changes.append(f"{name} changed" if of_file else f"{name} {was} → {is_now}")
    more = [f"{len(changes) - MOST_NAMED} more"] if len(changes) > MOST_NAMED else []
    return ", ".join([*changes[:MOST_NAMED], *more])


def _elsewhere(top: str) -> _Project | None:
    """The folder of a module that lies on the Python path, by its first name, where that is no
    folder of installed packages: a version, if there is one, tells nothing of what is worked on
    there. None of a library."""
    if top in sys.stdlib_module_names or top == "precompute":
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    place = next((Path(one) for one in places if one is not None and Path(one).exists()), None)
    if place is None or any(
        folder in _INSTALLED or folder.name in ("site-packages", "dist-packages")
        for folder in place.parents
    ):
        return None
    project = _project_of(top, None)
    # pip's --target makes a folder of installed packages anywhere
    installed = next(project.root.glob("*.dist-info"), None) is not None
    return None if installed or _is_large(project.root / top) else project


def _is_large(package: Path) -> bool:
    return next(islice(package.rglob("*.py"), MOST_FILES, None), None) is not None


@dataclass(frozen=True, slots=True)
class _Project:
    """The folder that a model's modules lie in. ``is_its`` says of a dotted name whether such a
    module would be one of them; ``suffixes`` are those of a module's file, the first that is there
    being imported."""

    root: Path
    is_its: Callable[[str], bool]
    suffixes: tuple[str, ...]
    is_large: bool = False
    """Whether it is an installed package of very many files, such as torch, which its version tells
    from another."""

    def file_of(self, name: str) -> Path | None:
        """The file of a module, by its dotted name; None for one that is not the project's, or a
        package without a file of its own."""
        if not self.is_its(name):
            return None
        stem = self.root.joinpath(*name.split("."))
        for place in (stem / "__init__", stem):
            for suffix in self.suffixes:
                file = place.with_name(place.name + suffix)
                if file.is_file():
                    return file
        return None


def _project_of(name: str, folder: Path | None) -> _Project:
    if folder is not None and is_own(name, folder):
        # as the registry reads it: compiled only where there is no source
        own = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES, *BYTECODE_SUFFIXES)
        return _Project(folder, functools.cache(lambda module: is_own(module, folder)), own)
    suffixes = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)
    spec = importlib.util.find_spec(name)
    # a package without a file of its own is there by its folder
    places = () if spec is None else (spec.submodule_search_locations or ())
    origin = spec.origin if spec is not None and spec.has_location else next(iter(places), None)
    if origin is None:
        return _Project(Path(), lambda module: False, suffixes)
    file, top = Path(origin), name.partition(".")[0]
    is_package = file.name.partition(".")[0] == "__init__"
    root = Path(*file.parts[: -1 - name.count(".") - is_package])
    if root in _INSTALLED or root.name in ("site-packages", "dist-packages"):
        is_large = _is_large(root / top)
        return _Project(root, lambda module: module.partition(".")[0] == top, suffixes, is_large)

    @functools.cache
    def lies_beside(module: str) -> bool:
        first = module.partition(".")[0]
        # ours, which may lie beside it
        return first != "precompute" and (
            (root / first).is_dir()
            or any((root / f"{first}{suffix}").is_file() for suffix in suffixes)
        )

    return _Project(root, lies_beside, suffixes)


_INSTALLED = {
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
}


def _with_packages(name: str) -> Iterator[str]:
    """A module and the packages above it, which are imported with it."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


class _Source(NamedTuple):
    """Of a file: the SHA-256 of its content, that of its code, and the dotted names that it
    imports."""

    content: str
    code: str
    imports: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def _source_of(file: Path, module: str, stamp: Stamp | None) -> _Source:
    """As a file is that has this stamp. One that Python could not read or parse either counts as
    it is: what imports it never ran, or is left out where it fails."""
    try:
        data = file.read_bytes()
    except OSError:
        data = b""
    stripped, imports = data, tuple[str, ...]()
    if file.suffix == ".py":
        with contextlib.suppress(*_UNPARSED), warnings.catch_warnings():
            # said when it was imported
            warnings.simplefilter("ignore")
            imports = tuple(dict.fromkeys(_imports(data, module, file)))
            stripped = _without_comments(data, _docstrings(data))
    code = hashlib.sha256(stripped).hexdigest()[:16]
    return _Source(hashlib.sha256(data).hexdigest(), code, imports)


_UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError)
"""What parsing a module raises; a UnicodeDecodeError is a ValueError, and what is nested too deep
for the parser a MemoryError."""


def _docstrings(data: bytes) -> Collection[int]:
    """The lines of docstrings, from 0. One that the code may read counts as code: of a class that
    inherits or of what is decorated, of which a library may make a prompt; and all of a module that
    names ``__doc__`` or ``getdoc``."""
    if b"__doc__" in data or b"getdoc" in data:
        return ()
    found = set[int]()
    for node in ast.walk(ast.parse(data)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        read = getattr(node, "decorator_list", []) or getattr(node, "bases", [])
        if read or getattr(node, "keywords", []) or ast.get_docstring(node, clean=False) is None:
            continue
        text = node.body[0]
        found |= set(range(text.lineno - 1, text.end_lineno or 0))
    return found


def _without_comments(data: bytes, left_out: Collection[int]) -> bytes:
    """A module's source without comments, blank lines and the lines that are ``left_out``; the same
    for every version of Python."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    text = io.StringIO(data.decode(encoding).removeprefix("\ufeff"), newline=None).read()
    # a form feed, or another line end of Unicode's, ends no line of Python's
    lines = text.split("\n")
    # lines that do not end inside of a text
    ended, beside = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column]
        elif token.type in (tokenize.NEWLINE, tokenize.NL):
            ended.add(row - 1)
        elif token.type not in (tokenize.STRING, tokenize.INDENT, tokenize.DEDENT):
            beside.add(row - 1)
    # what stands on a line beside a docstring is left as it is
    left_out = set(left_out) - beside
    kept = (
        line.rstrip() if number in ended else line
        for number, line in enumerate(lines)
        if number not in left_out and (number not in ended or line.strip())
    )
    return "\n".join(kept).encode()


def _imports(data: bytes, module: str, file: Path) -> Iterator[str]:
    """Dotted names that a module imports anywhere, also those that may be a class in a module."""
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(data, str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ""
            if node.level:
                parts = package.split(".") if package else []
                above = ".".join(parts[: len(parts) - node.level + 1])
            base = ".".join(part for part in (above, node.module) if part)
            if base:
                yield base
            names = (alias.name for alias in node.names if alias.name != "*")
            yield from (".".join(p for p in (base, name) if p) for name in names)


def _versions(libraries: set[str]) -> dict[str, str]:
    """Import name → version, of those that are installed."""
    found = {}
    for name in sorted(libraries - sys.stdlib_module_names - {"precompute"}):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            of = _distributions().get(name, [])
            if of:
                found[name] = importlib.metadata.version(of[0])
    return found


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()
