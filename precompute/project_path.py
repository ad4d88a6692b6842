"""Project path: a relative path starts from the project's folder, whatever the working directory.

What is kept (definitions, recipes, fingerprints, tunings) holds paths as they were written; they become absolute here, when a view is opened.
So a project that is moved or copied is the same project, and never looks at its old place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_FOLDER: ContextVar[Path | None] = ContextVar("project_folder", default=None)


class ProjectPath(str):
    """A path of a model's argument, absolute. A text for whoever takes it; :func:`precompute.model.digest` knows it for a path."""

    __slots__ = ()


def project_folder() -> Path | None:
    """The folder of the project whose model is being made; None outside, where paths start from the working directory."""
    return _FOLDER.get()


@contextlib.contextmanager
def starting_from(folder: Path | None) -> Iterator[None]:
    """Within, in this thread, relative paths and modules of one's own are those of a project's folder."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


def absolute_path(path: str | Path) -> Path:
    """A path that is relative starts from the project's folder, where a model of one is being made."""
    return (_FOLDER.get() or Path()) / path


def is_path(text: str) -> bool:
    """Whether a model's argument is a path relative to the project's folder: it starts with ``./`` or ``../``."""
    return text.startswith(("./", "../"))


def absolute_arguments(value: Any, folder: Path) -> Any:
    """A model's arguments, at any depth, with each text that :func:`is_path` made a :class:`ProjectPath`. Queries (``{sql: …}``) stay."""
    if isinstance(value, Mapping):
        return value if set(value) == {"sql"} else {k: absolute_arguments(v, folder) for k, v in value.items()}
    if isinstance(value, list):
        return [absolute_arguments(v, folder) for v in value]
    return ProjectPath(folder / value) if isinstance(value, str) and is_path(value) else value
