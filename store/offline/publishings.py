"""Publishings: the log of what was live of a view, and from when on, which is what readers were served.

``refs/publishings.jsonl`` has a sealed line for each publishing, renewal and drop; what follows the last newline was torn by a crash. ``live.json`` alone moves
readers. Its line is durable before it is replaced, so log and pointer together are the whole account.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import replace_durably
from precompute.store.errors import SnapshotError
from precompute.store.record import Record, read_record, sealed

NAME = "publishings.jsonl"

TAIL_BYTES = 16384
"""More than two lines take: the last publishing, and the drop that ended it."""

THINNED_BYTES = 1 << 20
"""A log below that is not worth writing anew: 4,000 publishings."""


class Publishing(Record, frozen=True):
    """What readers are served from ``since`` (ISO 8601 in UTC) until the next one.

    ``snapshot`` is None where the view was dropped. ``published_at`` is when the pointer of this ``epoch`` moved, which is ``since`` unless a later run found nothing
    changed: then ``renewed_at`` says when (µs since 1970), and ``since`` when readers were told.
    """

    epoch: int
    snapshot: int | None
    since: str
    published_at: str
    renewed_at: int | None = None
    reason: str = ""


class PublishingLog:
    """The log of one view. Who writes holds the lock of its refs.

    Args:
        folder: of the view's refs.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def entries(self) -> list[Publishing]:
        """All that was written, the oldest first.

        Raises:
            SnapshotError: the log cannot be read, or a line is damaged.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise SnapshotError(f"{self._path} cannot be read: {exc.strerror or exc}") from exc
        entries = []
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            try:
                entries.append(read_record(Publishing, line))
            except ValueError as exc:
                raise SnapshotError(
                    f"{self._path}: line {number} is damaged ({exc}), so nobody knows what was live then: restore the file, or remove the line, and what was "
                    "live before counts until the next one"
                ) from exc
        return entries

    def add(self, *publishings: Publishing, durably: bool = True) -> None:
        """Append those that do not stand at the end already.

        Args:
            publishings: what is live, or the end of it; none makes sure that there is a file.
            durably: False leaves it to the next call that is: what is live now stands in ``live.json``, too.

        Raises:
            OSError: the file system failed.
        """
        with self._path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
            torn = len(tail) - (tail.rfind(b"\n") + 1)
            if torn:
                file.truncate(size - torn)
            known = list(_readable(tail[: len(tail) - torn].split(b"\n")[-3:]))
            for publishing in publishings:
                # a drop that is done again ends nothing more
                ended = publishing.snapshot is None and bool(known) and known[-1].snapshot is None
                if publishing not in known and not ended:
                    file.write(sealed(publishing) + b"\n")
                    known.append(publishing)
            file.flush()
            if durably:
                crashpoint("live.log", self._path)
                os.fsync(file.fileno())

    def thin(self, snapshots: Collection[int]) -> None:
        """Forget what nobody can read any more: of publishings in a row whose snapshots are gone, the first one stays, so that its time is nobody else's.

        Args:
            snapshots: numbers of those that are there.

        Raises:
            OSError: the file system failed.
            SnapshotError: as :meth:`entries`.
        """
        if not self._path.exists() or self._path.stat().st_size < THINNED_BYTES:
            return
        stay: list[Publishing] = []
        for entry in self.entries():
            gone = entry.snapshot is not None and entry.snapshot not in snapshots
            if not (gone and stay and stay[-1].snapshot is not None and stay[-1].snapshot not in snapshots):
                stay.append(entry)
        replace_durably(self._path, b"".join(sealed(entry) + b"\n" for entry in stay))


def _readable(lines: list[bytes]) -> Iterator[Publishing]:
    for line in lines:
        try:
            yield read_record(Publishing, line)
        except ValueError:
            # empty, or damaged: then what is live is written once more
            continue
