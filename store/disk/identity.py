"""Identity: the random name of a folder of ours, such as a root, which stays when it is moved."""

from __future__ import annotations

import contextlib
import logging
import uuid
from pathlib import Path

from precompute.store.disk.durable_file import disk_message
from precompute.store.disk.record import Record, sealed
from precompute.store.disk.storage import read_record_file, storage_of
from precompute.store.errors import SnapshotError

log = logging.getLogger(__name__)

NAME, COPY = ".identity.json", ".identity-copy.json"
"""Two, so that one bit takes no folder's name: without it, all that it publishes would be somebody
else's."""
_REMEDY = "remove it to give the store a new one, and publish each view once with --take-over"


class _Identity(Record, frozen=True):
    id: str


def known_identity(folder: Path) -> str:
    """As :func:`identity_of`; empty where none was given yet. Writes nothing.

    Raises:
        SnapshotError: it is damaged.
    """
    known = None
    for name in (NAME, COPY):
        try:
            known = known or read_record_file(_Identity, folder / name, _REMEDY)
        except SnapshotError as exc:
            if name == COPY or not isinstance(exc.__cause__, ValueError):
                raise
            log.warning("%s", exc)
    return "" if known is None else known.id


def identity_of(folder: Path) -> str:
    """The folder's name of its own, 12 hex digits; made on first use.

    Raises:
        SnapshotError: it is damaged, or the file system failed.
    """
    known, storage = known_identity(folder), storage_of(folder)
    for name in (NAME, COPY):
        if not known or storage.stat(folder / name) is None:
            try:
                with contextlib.suppress(FileExistsError):
                    storage.create(folder / name, sealed(_Identity(known or uuid.uuid4().hex[:12])))
            except OSError as exc:
                raise SnapshotError(disk_message(folder / name, exc)) from exc
            known = known_identity(folder)
    return known
