"""Identity: the name that a folder of ours bears wherever it is moved to."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from store.disk.durable_file import create_once, disk_message, make_folder
from store.disk.record_file import read_record_file
from store.errors import SnapshotError
from store.record import Record, written

_REMEDY = "remove it to give the store a new one, and publish each view once with --take-over"


class _Identity(Record, frozen=True):
    id: str


def known_identity(folder: Path) -> str:
    """As :func:`identity_of`; empty where none was given yet. Writes nothing.

    Raises:
        SnapshotError: it is damaged.
    """
    known = read_record_file(_Identity, folder / ".identity.json", _REMEDY)
    return "" if known is None else known.id


def identity_of(folder: Path) -> str:
    """The folder's name of its own, 12 hex digits; given when it is first asked for.

    Raises:
        SnapshotError: it is damaged, or the file system failed.
    """
    path = folder / ".identity.json"
    known = known_identity(folder)
    if not known:
        try:
            make_folder(folder)
            with contextlib.suppress(FileExistsError):
                create_once(path, written(_Identity(uuid.uuid4().hex[:12])), folder / f".identity.{os.getpid()}.tmp")
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc
        known = known_identity(folder)
    return known
