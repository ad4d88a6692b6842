"""Record file: a small file that holds one record, read whole."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from precompute.store.errors import SnapshotError
from precompute.store.record import read_record

_R = TypeVar("_R")


def read_record_file(kind: type[_R], path: Path, remedy: str) -> _R | None:
    """The record in a file; None when there is no file.

    Args:
        kind: of the record.
        path: of the file.
        remedy: what to do where it is damaged, as the end of a sentence.

    Raises:
        SnapshotError: it cannot be read, or is damaged: then the cause is a ValueError.
    """
    try:
        return read_record(kind, path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise SnapshotError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise SnapshotError(f"{path} is damaged ({exc}); {remedy}") from exc
