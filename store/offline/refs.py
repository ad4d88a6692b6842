"""Refs: what points at a view's snapshots – the live pointer, the log of what was live, the epochs,
the marks of bad ones and of pinned ones.

<root>/<view>/refs/live.json    {epoch, snapshot, segments, …}: moved by compare-and-swap only
<root>/<view>/refs/epoch.json   the last epoch that was claimed
<root>/<view>/refs/{bad,pins}/<number>.json
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import disk_message
from precompute.store.disk.lease import Lease
from precompute.store.disk.record import Record, read_record, replace, sealed, whole_record
from precompute.store.disk.storage import read_record_file, storage_of
from precompute.store.errors import ConflictError, SnapshotError
from precompute.store.times import utc_now

LOG_NAME = "publishings.jsonl"
_OLDER_NAME = re.compile(r"publishings-(\d{6,})\.jsonl")

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
    """The log of one view. A writer holds the lock of its refs.

        <folder>/publishings.jsonl            the newest lines, and which files are older
        <folder>/publishings-<number>.jsonl   older ones, a few hundred each, never changed

    Args:
        folder: of the view's refs.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._storage = folder / LOG_NAME, storage_of(folder)

    def entries(self) -> list[Publishing]:
        """All that was written, the oldest first.

        Raises:
            SnapshotError: a file of the log is gone, or a line is damaged.
            UnreadableError: the log cannot be read now.
        """
        lines = _lines(self._read(self._path))
        older = _older(lines, self._path)
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

    def _parsed(self, number: int, lines: list[bytes]) -> Iterator[Publishing]:
        """The entries of a file's lines; ``number`` 0 is the newest file."""
        first = 1 if _older(lines, self._file(number)).last else 0
        for at, line in enumerate(lines[first:], start=1 + first):
            try:
                yield read_record(Publishing, line, self._file(number))
            except ValueError as exc:
                path = self._file(number)
                remedy = "remove the line, and what was live before counts until the next one"
                names = self._storage.names(self._path.parent)
                older = sorted(int(name[1]) for name in map(_OLDER_NAME.fullmatch, names) if name)
                if older and (number, at) == (0, 1):
                    # without such a line they would be forgotten
                    head = sealed(_Older(older[0], older[-1])).decode()
                    remedy = f"put this line in its place: {head}"
                raise SnapshotError(
                    f"{path}: line {at} is damaged ({exc}), so nobody knows what was live then:"
                    f" restore the file, or {remedy}"
                ) from exc

    def _file(self, number: int) -> Path:
        """An older file by its number; 0: the newest one."""
        return self._older_path(number) if number else self._path

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
            # what is damaged among them says nothing: what is live is written once more
            last = (whole_record(Publishing, line, self._path) for line in lines[-MOST_AGAIN:])
            known = [publishing for publishing in last if publishing is not None]
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
        older = _older(lines, self._path)
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
        before = _older(_lines(newest), self._path)
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


def _older(lines: list[bytes], path: Path) -> _Older:
    """Which files are older than one of these lines; none where it does not say."""
    return whole_record(_Older, lines[0] if lines else None, path) or _Older(1, 0)


log = logging.getLogger(__name__)

PUBLISH_LEASE = "publish"
"""Name of the lease that publishing, rolling back and removing snapshots hold."""
DROP_LEASE = "drop"
"""Name of the lease that the end of a view holds, besides: no run begins meanwhile."""


def run_lease(partition: str | None) -> str:
    """Name of the lease that a run of the partition (None: of a view that has none) holds."""
    return "run" if partition is None else "run-" + partition.partition("/")[0].replace(":", "")


class _Claimed(Record, frozen=True):
    last: int


class LiveRef(Record, frozen=True):
    """Which snapshot is live. ``epoch`` counts every move and fences late writers; 0 means never
    published.

    ``segments`` are the names of the online store's segments that it is, the lowest first;
    ``previous`` and ``previous_segments`` what was live before.
    """

    epoch: int
    snapshot: int
    previous: int | None
    reason: str
    at: str
    segments: tuple[str, ...]
    previous_segments: tuple[str, ...] = ()
    renewed_at: int | None = None
    """When a later run found nothing changed, µs since 1970."""
    renewal_noted_at: str | None = None
    """When that was written here for readers, ISO 8601 in UTC."""
    held: str | None = None
    """Why scheduled runs publish nothing for now; None when they do."""

    def publishing(self) -> Publishing:
        """What it says of what readers are served."""
        return Publishing(
            self.epoch,
            self.snapshot,
            self.renewal_noted_at or self.at,
            self.at,
            self.renewed_at,
            self.reason,
        )


class BadMark(Record, frozen=True):
    """Why a snapshot is never to be published: it was rolled back from, or its files are damaged.
    ``rows`` says whether its rows are at fault, and then ``content`` is their digest and
    ``back_to`` the snapshot that was gone back to, if it is known.
    """

    reason: str
    at: str = ""
    content: str = ""
    rows: bool = True
    back_to: int | None = None


class Refs:
    """What points at the snapshots of one view.

    Args:
        folder: where the files are; made by the first write.
        view: the view's name, for messages.
    """

    def __init__(self, folder: Path, view: str) -> None:
        self.folder, self._view, self._storage = folder, view, storage_of(folder)
        self.log = PublishingLog(folder)

    # ---- the live pointer

    def live(self) -> LiveRef | None:
        """The live pointer, or None when the view was never published.

        Raises:
            SnapshotError: the pointer file is damaged.
            UnreadableError: it cannot be read now.
        """
        return read_record_file(
            LiveRef, self.folder / "live.json", "publish the view again to rewrite it"
        )

    def readable_live(self) -> LiveRef | None:
        """As :meth:`live`, and None for a damaged pointer too: what a writer needs, who will
        replace it.

        Raises:
            UnreadableError: it cannot be read now.
        """
        try:
            return self.live()
        except SnapshotError:
            return None

    def publishings(self) -> list[Publishing]:
        """What readers were served: each publishing, renewal and drop in the order of its epoch,
        the last one counting until now.

        Raises:
            SnapshotError: a line of the log is damaged.
        """
        # The pointer first: what replaces it meanwhile finds it in the log, or puts it there. One
        # that is damaged was put there when it was moved.
        ref = self.readable_live()
        entries = self.log.entries()
        if ref is not None and ref.publishing() not in entries[-100:]:
            entries.append(ref.publishing())
        return entries

    def claim_epoch(self, above: int) -> int:
        """An epoch that was never given and never will be again, larger than ``above``: the number
        of a publishing.

        Raises:
            SnapshotError: the file system failed.
        """
        path, epoch = self.folder / "epoch.json", 0

        def claimed(data: bytes | None) -> bytes:
            nonlocal epoch
            # where it is damaged, the pointers, and what lies online, are numbered as well
            last, ref = whole_record(_Claimed, data, path) or _Claimed(0), self.readable_live()
            epoch = max(last.last, above, 0 if ref is None else ref.epoch) + 1
            return sealed(_Claimed(epoch))

        try:
            self._storage.update(path, claimed)
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc
        return epoch

    def move_live(
        self,
        snapshot: int,
        *,
        expected_epoch: int,
        epoch: int,
        reason: str,
        segments: Sequence[str] = (),
        held: str | None = None,
        lease: Lease | None = None,
    ) -> LiveRef:
        """Move the live pointer by compare-and-swap.

        Args:
            snapshot: number of a committed snapshot.
            expected_epoch: the epoch the caller saw, 0 for none.
            epoch: the new one, larger.
            reason: one phrase for the operator, stored in the pointer.
            segments: names of those of the online store that it is, the lowest first; none where it
                is in no online store.
            held: why scheduled runs are to publish nothing after this.
            lease: held by the writer.

        Raises:
            ConflictError: another process moved the pointer since.
            FencedError: the lease was lost.
        """

        def moved(current: LiveRef | None) -> LiveRef:
            last = 0 if current is None else current.epoch
            if last != expected_epoch or epoch <= last:
                raise ConflictError(
                    f"the live pointer of {self._view!r} moved from epoch {expected_epoch} to"
                    f" {last} meanwhile; look at `status` and publish again if still wanted"
                )
            new = LiveRef(epoch, snapshot, None, reason, utc_now(), tuple(segments), held=held)
            if current is None:
                return new
            if current.snapshot != snapshot:
                return replace(new, previous=current.snapshot, previous_segments=current.segments)
            # Loaded again: what was before it is still what to go back to, and its rows are as they
            # were found to be.
            return replace(
                new,
                previous=current.previous,
                previous_segments=current.previous_segments,
                renewed_at=current.renewed_at,
            )

        return self._swap_live(moved, lease)

    def renew_live(self, expected: LiveRef, renewed_at: int, lease: Lease | None = None) -> LiveRef:
        """Note in the live pointer that a run found nothing changed, at ``renewed_at`` (µs since
        1970).

        Raises:
            ConflictError: the pointer is not ``expected`` any more.
            FencedError: the lease was lost.
        """

        def renewed(current: LiveRef | None) -> LiveRef:
            if current != expected:
                raise ConflictError(
                    f"the live pointer of {self._view!r} moved meanwhile; nothing was renewed"
                )
            return replace(expected, renewed_at=renewed_at, renewal_noted_at=utc_now())

        return self._swap_live(renewed, lease)

    def resume_live(self) -> LiveRef:
        """Let scheduled runs publish again.

        Raises:
            SnapshotError: the view was never published.
        """

        def resumed(current: LiveRef | None) -> LiveRef:
            if current is None:
                # says so where it is damaged
                self.live()
                raise SnapshotError(
                    f"view {self._view!r} was never published: there is nothing to resume"
                )
            return replace(current, held=None)

        return self._swap_live(resumed, None)

    def _swap_live(
        self, change: Callable[[LiveRef | None], LiveRef], lease: Lease | None
    ) -> LiveRef:
        path, new = self.folder / "live.json", None

        def swapped(data: bytes | None) -> bytes:
            nonlocal new
            if lease is not None:
                lease.check()
            # one that is damaged is replaced
            old = whole_record(LiveRef, data, path)
            new = change(old)
            self.log.add(*(() if old is None else (old.publishing(),)))
            return sealed(new)

        try:
            self._storage.update(path, swapped, point="live")
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc
        assert new is not None
        self._note_live(new)
        return new

    def _note_live(self, ref: LiveRef) -> None:
        """Write what is live now into the log, by which a pointer that is damaged later is no gap
        in it."""
        try:
            self.log.add(ref.publishing(), durably=False)
        except OSError as exc:
            # The pointer has moved; the next one that moves it writes what this could not.
            log.warning("%s", disk_message(self.folder / LOG_NAME, exc, "the pointer moved"))

    def end_live(self) -> None:
        """Remove the live pointer: the view is published no more, its snapshots stay. One that is
        not there is no error.

        Raises:
            SnapshotError: the file system failed.
        """
        path = self.folder / "live.json"

        def ended(data: bytes | None) -> None:
            ref = whole_record(LiveRef, data, path)
            if ref is not None:
                now = utc_now()
                self.log.add(ref.publishing(), Publishing(ref.epoch, None, now, now, reason="drop"))

        try:
            if self._storage.stat(path) is not None:
                self._storage.update(path, ended)
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc, "it was to be removed")) from exc

    def thin_log(self, snapshots: Collection[int]) -> None:
        """As :meth:`PublishingLog.thin`.

        Raises:
            SnapshotError: the file system failed, or the log is damaged.
        """
        try:
            self.log.thin(snapshots)
        except OSError as exc:
            raise SnapshotError(disk_message(self.folder / LOG_NAME, exc)) from exc

    # ---- marks

    def bad(self) -> dict[int, BadMark]:
        """Numbers of the snapshots that are never to be published → why. A mark that is damaged
        counts, for rows at fault.

        Raises:
            UnreadableError: a mark cannot be read now.
        """
        marks = {}
        for number in self.marked("bad"):
            # else removed meanwhile
            with contextlib.suppress(FileNotFoundError):
                path = self.bad_path(number)
                mark = whole_record(BadMark, self._storage.read(path), path)
                marks[number] = mark or BadMark("its mark is damaged")
        return marks

    def bad_path(self, number: int) -> Path:
        """The file that marks a snapshot bad, if it is."""
        return self.folder / "bad" / f"{number}.json"

    def pin_path(self, number: int) -> Path:
        """The file that pins a snapshot, if it is."""
        return self.folder / "pins" / f"{number}.json"

    def mark_bad(self, number: int, mark: BadMark) -> None:
        """Mark a snapshot bad, for good. Of two marks the first stays, unless only the second says
        that the rows are at fault; one that cannot be read counts as if it said so.

        Raises:
            SnapshotError: the file system failed.
        """
        path = self.bad_path(number)
        self._mark(path, mark)
        try:
            first = whole_record(BadMark, self._storage.read(path), path)
            if mark.rows and (first is None or not first.rows):
                self._storage.write(path, sealed(mark))
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    def read_mark(self, number: int) -> bytes | None:
        """The bytes of a snapshot's mark, for :meth:`restore_mark`; None without one.

        Raises:
            UnreadableError: it cannot be read now.
        """
        try:
            return self._storage.read(self.bad_path(number))
        except FileNotFoundError:
            return None

    def restore_mark(self, number: int, mark: bytes | None) -> None:
        """Have a mark be what :meth:`read_mark` found.

        Raises:
            SnapshotError: the file system failed.
        """
        path = self.bad_path(number)
        try:
            if mark is None:
                self._storage.delete(path)
            else:
                self._storage.write(path, mark)
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    def pins(self) -> set[int]:
        """Numbers of the pinned snapshots."""
        return set(self.marked("pins"))

    def pin(self, number: int, reason: str) -> None:
        """Keep a snapshot whatever its age; pinning it twice is no error.

        Raises:
            SnapshotError: the file system failed.
        """
        self._mark(self.pin_path(number), {"reason": reason, "at": utc_now()})

    def unpin(self, number: int) -> None:
        """Let go of a pin; one that is not there is no error.

        Raises:
            SnapshotError: the file system failed.
        """
        path = self.pin_path(number)
        try:
            self._storage.delete(path)
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    def marked(self, kind: str) -> list[int]:
        """Numbers of the snapshots that bear a mark: ``bad`` or ``pins``."""
        names = self._storage.names(self.folder / kind)
        return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()]

    def _mark(self, path: Path, note: Any) -> None:
        try:
            with contextlib.suppress(FileExistsError):
                self._storage.create(path, sealed(note))
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc
