"""Known model: the fingerprint of a built-in model as it was last found, for as long as every file that goes into it has the stamp it had then. A run that has
nothing to compute loads no model: of a text encoder that is four seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import precompute.model
from precompute.project_path import starting_from
from precompute.registry import MOST_NAMED_FILES, Stamp, named_files, stamp_of
from precompute.store.disk.durable_file import make_folder, replace_durably
from precompute.store.record import Record, read_record, sealed

NAME = "fingerprint.json"
OF_FILES = frozenset({"text_encoder", "two_tower"})
"""Built-in models whose fingerprint is that of their files, arguments and code, and of nothing else."""
SETTLED_NS = 2_000_000_000
"""What changes within a step of a file system's clock, of two seconds at most, has no other time."""

_CODE = Path(precompute.model.__file__).parent


class _Known(Record, frozen=True):
    use: str
    args: dict[str, Any]
    files: dict[str, Stamp | None]
    fingerprint: str


class KnownModel:
    """What is remembered of one view's model.

    Args:
        folder: where; made by the first write.
        use: the model's name.
        args: its arguments, paths among them absolute; a model with tables among them is not remembered.
        project: the project's folder.
    """

    def __init__(self, folder: Path, use: str, args: Mapping[str, Any], project: Path) -> None:
        self._path, self._use, self._args, self._project = folder / NAME, use, dict(args), project
        self._files = self._stamps()

    def fingerprint(self) -> str | None:
        """The model's own; None where it is not known, or may be another by now."""
        if self._files is None:
            return None
        # damaged, or another version's: it is found again
        with contextlib.suppress(OSError, ValueError):
            known = read_record(_Known, self._path.read_bytes())
            if (known.use, known.args, known.files) == (self._use, self._args, self._files):
                return known.fingerprint
        return None

    def remember(self, fingerprint: str) -> None:
        """Keep the fingerprint of a model that was loaded since this was made, unless a file may have changed meanwhile; without it the next run loads the model."""
        files = self._files
        if files is None or files != self._stamps():
            return
        latest_ns = max((stamp.changed for stamp in files.values() if stamp is not None), default=0)
        if latest_ns < time.time_ns() - SETTLED_NS:
            with contextlib.suppress(OSError):
                make_folder(self._path.parent)
                replace_durably(self._path, sealed(_Known(self._use, self._args, files, fingerprint)))

    def _stamps(self) -> dict[str, Stamp | None] | None:
        """Of all files of the model and of our code for it; None of a model of which they do not tell."""
        if self._use not in OF_FILES or not all(
            isinstance(value, (str, int, float, type(None))) for value in self._args.values()
        ):
            return None
        with starting_from(self._project):
            named = list(named_files(self._args))
        code = (path for folder in ("models", "text") for path in (_CODE / folder).iterdir() if path.is_file())
        return None if len(named) >= MOST_NAMED_FILES else {str(path): stamp_of(path) for path in (*named, *code)}
