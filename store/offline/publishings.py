"""Publishings: the log of what was live of a view, and from when on.

<root>/<view>/refs/publishings.jsonl            the newest, and which files are older
<root>/<view>/refs/publishings-<number>.jsonl   older ones, a few hundred each, never changed
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.record import Record, read_record, sealed
from precompute.store.disk.storage import storage_of
from precompute.store.errors import SnapshotError

NAME = "publishings.jsonl"

NEWEST_BYTES = 1 << 16
"""Size of the file that is rewritten with every publishing, about: 250 lines."""
MOST_AGAIN = 12
"""Lines at its end that are compared: what one of them says is not written again."""
THINNED_BYTES = 1 << 20
"""A log below that is not worth thinning: 4,000 publishings."""


class Publishing(Record, frozen=True):
    """What readers are served from ``since`` (ISO 8601 in UTC) until the next one.

    ``snapshot`` is None where the view was dropped. ``published_at`` is when the pointer of this
    ``epoch`` moved, which is ``since`` unless a later run found nothing changed: then
    ``renewed_at`` says when (µs since 1970), and ``since`` when readers were given.
    """

    epoch: int
    snapshot: int | None
    since: str
    published_at: str
    renewed_at: int | None = None
    reason: str = ""


class _Older(Record, frozen=True):
    """The first line of a log whose older lines lie in files of their own, numbered from ``first``
    to ``last``."""

    first: int
    last: int


class PublishingLog:
    """The log of one view: the newest lines in one file, which is rewritten, older ones in files
    that are not. A writer holds the lock of its refs.

    Args:
        folder: of the view's refs.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._storage = folder / NAME, storage_of(folder)

    def entries(self) -> list[Publishing]:
        """All that was written, the oldest first.

        Raises:
            SnapshotError: the log cannot be read, or a line is damaged.
        """
        lines = _lines(self._read(self._path))
        older = _older(lines)
        found = [
            entry
            for number in range(older.first, older.last + 1)
            for entry in self._parsed(number, _lines(self._read(self._older_path(number))))
        ]
        # a crash may have left some of them in two files
        return list(dict.fromkeys([*found, *self._parsed(0, lines)]))

    def _read(self, path: Path) -> bytes:
        try:
            return self._storage.read(path, immutable=path != self._path)
        except FileNotFoundError as exc:
            if path == self._path:
                return b""
            raise SnapshotError(f"{path} is not there: restore it; it has what was live") from exc
        except SnapshotError:
            # of an object store, which says where
            raise
        except OSError as exc:
            raise SnapshotError(f"{path} cannot be read: {exc.strerror or exc}") from exc

    def _parsed(self, number: int, lines: list[bytes]) -> Iterator[Publishing]:
        """The entries of a file's lines; ``number`` 0 is the newest file."""
        first = 1 if _older(lines).last else 0
        for at, line in enumerate(lines[first:], start=1 + first):
            try:
                yield read_record(Publishing, line)
            except ValueError as exc:
                path = self._older_path(number) if number else self._path
                raise SnapshotError(
                    f"{path}: line {at} is damaged ({exc}), so nobody knows what was live then:"
                    " restore the file, or remove the line, and what was live before counts until"
                    " the next one"
                ) from exc

    def _older_path(self, number: int) -> Path:
        return self._path.with_name(f"publishings-{number:06d}.jsonl")

    def add(self, *publishings: Publishing, durably: bool = True) -> None:
        """Append publishings, but those that stand at the end already.

        Args:
            publishings: what is live, or the end of it; none makes sure that there is a file.
            durably: False leaves it to the next call that is: what is live now stands in
                ``live.json``, too.

        Raises:
            OSError: the file system failed.
        """

        def added(data: bytes | None) -> bytes:
            lines = _lines(data or b"")
            known = list(_readable(lines[-MOST_AGAIN:]))
            for publishing in publishings:
                # a drop that is done again ends nothing more
                ended = publishing.snapshot is None and bool(known) and known[-1].snapshot is None
                if publishing not in known and not ended:
                    lines.append(sealed(publishing))
                    known.append(publishing)
            return self._written(lines, cut=durably)

        self._storage.update(self._path, added, durably=durably)
        if durably:
            crashpoint("live.log", self._path)

    def _written(self, lines: list[bytes], *, cut: bool) -> bytes:
        """The newest file, of all lines of it; where these are many, all but the last go into a
        file of their own first."""
        older = _older(lines)
        body = lines[1:] if older.last else lines
        if cut and sum(map(len, body)) > NEWEST_BYTES:
            number, data = older.last, b"".join(line + b"\n" for line in body[:-MOST_AGAIN])
            created = False
            while not created:
                number += 1
                # one that is there was left by a crash
                with contextlib.suppress(FileExistsError):
                    self._storage.create(self._older_path(number), data)
                    created = True
            older, body = _Older(older.first, number), body[-MOST_AGAIN:]
        head = [sealed(older)] if older.last else []
        return b"".join(line + b"\n" for line in (*head, *body))

    def thin(self, snapshots: Collection[int]) -> None:
        """Forget what cannot be read any more: of publishings in a row whose snapshots are gone,
        the first one stays, so that its time does not count for the publishing before it.

        Args:
            snapshots: numbers of those that are there.

        Raises:
            OSError: the file system failed.
            SnapshotError: as :meth:`entries`.
        """
        newest = self._read(self._path)
        before = _older(_lines(newest))
        files = range(before.first, before.last + 1)
        if len(newest) + NEWEST_BYTES * len(files) < THINNED_BYTES:
            return

        def thinned(_: bytes | None) -> bytes:
            stay: list[Publishing] = []
            for entry in self.entries():
                if not (stay and is_gone(entry) and is_gone(stay[-1])):
                    stay.append(entry)
            head = [sealed(_Older(before.last + 1, before.last))] if before.last else []
            return self._written([*head, *map(sealed, stay)], cut=True)

        def is_gone(entry: Publishing) -> bool:
            return entry.snapshot is not None and entry.snapshot not in snapshots

        self._storage.update(self._path, thinned)
        for number in files:
            self._storage.delete(self._older_path(number))


def _lines(data: bytes) -> list[bytes]:
    """The whole lines of a file: what follows the last newline was torn."""
    return data.split(b"\n")[:-1]


def _older(lines: list[bytes]) -> _Older:
    """Which files are older than one of these lines; none where it does not say."""
    try:
        return read_record(_Older, lines[0])
    except (IndexError, ValueError):
        return _Older(1, 0)


def _readable(lines: list[bytes]) -> Iterator[Publishing]:
    for line in lines:
        try:
            yield read_record(Publishing, line)
        except ValueError:
            # empty, or damaged: then what is live is written once more
            continue
