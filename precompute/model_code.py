"""Model code: the source of a user's model and of what it imports from its own project, and the
versions of the libraries that these import. A fingerprint says which values a model gives as far as
its author thought of it; the code says whether anything may have changed that it left out."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from precompute.registry import BUILT_IN, Stamp, is_own, sources_read, stamp_of
from precompute.store.errors import ModelError

MOST_NAMED = 3
"""Differences that a message names at most."""


def model_code(use: str, folder: Path | None) -> dict[str, str]:
    """The code of a user's model: each file of its project that it imports, by its path there → the
    SHA-256 of its source, comments and blank lines apart (16 hex digits); and each library that
    these import → its version. Empty for a built-in model, whose fingerprint has the version of its
    code. What is imported by a name that only running the code tells is not known.

    Args:
        use: as :func:`precompute.registry.load_model` takes it; its module was imported.
        folder: the project's, where modules are looked for first.

    Raises:
        ModelError: a file is another one by now than the one that was imported.
    """
    if use in BUILT_IN:
        return {}
    name = use.partition(":")[0]
    project = _project_of(name, folder)
    read = {} if folder is None else sources_read(folder)
    code, libraries, todo = dict[str, str](), set[str](), [name]
    seen = set[str]()
    while todo:
        module = todo.pop()
        for above in _with_packages(module):
            file = project.file_of(above)
            if above in seen or file is None:
                continue
            seen.add(above)
            source = _source_of(file, above, stamp_of(file))
            if read.get(file, source.content) != source.content:
                raise ModelError(
                    f"model {use!r}: {file} was changed while the model was loaded: run again"
                )
            code[file.relative_to(project.root).as_posix()] = source.code
            for imported in source.imports:
                if project.file_of(imported) is not None:
                    todo.append(imported)
                elif not project.is_its(imported):
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


@dataclass(frozen=True, slots=True)
class _Project:
    """The folder that a model's modules lie in. ``is_its`` says of a dotted name whether such a
    module would be one of them."""

    root: Path
    is_its: Callable[[str], bool]

    def file_of(self, name: str) -> Path | None:
        """The file of a module, by its dotted name; None for one that is not the project's, or a
        package without a file of its own."""
        if not self.is_its(name):
            return None
        stem = self.root.joinpath(*name.split("."))
        built = sorted(stem.parent.glob(f"{stem.name}.*.so")) if stem.parent.is_dir() else []
        files = (stem / "__init__.py", stem.with_name(f"{stem.name}.py"), *built)
        return next((file for file in files if file.is_file()), None)


def _project_of(name: str, folder: Path | None) -> _Project:
    if folder is not None and is_own(name, folder):
        return _Project(folder, lambda module: is_own(module, folder))
    top = name.partition(".")[0]
    spec = importlib.util.find_spec(top)
    origin = None if spec is None else spec.origin
    if origin is None and spec is not None and spec.submodule_search_locations:
        # a package without a file of its own
        origin = str(Path(next(iter(spec.submodule_search_locations))) / "__init__.py")
    if origin is None:
        return _Project(Path(), lambda module: False)
    file = Path(origin)
    root = file.parent.parent if file.stem == "__init__" else file.parent
    if root in _INSTALLED:
        return _Project(root, lambda module: module.partition(".")[0] == top)

    def lies_beside(module: str) -> bool:
        first = module.partition(".")[0]
        # ours, which may lie beside it
        return first != "precompute" and (
            (root / first).is_dir() or (root / f"{first}.py").is_file()
        )

    return _Project(root, lies_beside)


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
    """As a file is that has this stamp."""
    data = file.read_bytes()
    is_text = file.suffix == ".py"
    code = hashlib.sha256(_without_comments(data) if is_text else data).hexdigest()[:16]
    imports = tuple(dict.fromkeys(_imports(data, module, file))) if is_text else ()
    return _Source(hashlib.sha256(data).hexdigest(), code, imports)


def _without_comments(data: bytes) -> bytes:
    """A module's source without comments and blank lines; the same for every version of Python."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    lines = io.StringIO(data.decode(encoding).removeprefix("\ufeff")).read().splitlines()
    # lines that do not end inside of a text
    ended = set[int]()
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column]
        elif token.type in (tokenize.NEWLINE, tokenize.NL):
            ended.add(row - 1)
    kept = (
        line.rstrip() if number in ended else line
        for number, line in enumerate(lines)
        if number not in ended or line.strip()
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
            yield from (".".join(p for p in (base, alias.name) if p) for alias in node.names)


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
