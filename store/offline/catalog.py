"""Catalog: one line for each manifest of a view, so that a run need not parse them all. Derived
from them, and never believed without them.

<root>/<view>/refs/catalog.jsonl      <crc32 of the rest> [number, size, mtime_ns, run, partition,
parent, created_at, refused_by, files, members, rows, computation]
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from precompute.store.disk.durable_file import replace_undurably
from precompute.store.errors import SnapshotError
from precompute.store.offline.snapshot import Snapshot

log = logging.getLogger(__name__)

_SPARE_LINES = 256
"""Lines of removed manifests, beyond as many as there are manifests, before the file is rewritten
without them."""


Stamp = tuple[int, int]
"""Size in bytes and time of the last change (ns since 1970) of a manifest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What choosing and removing snapshots takes of a manifest. ``files`` are the paths of parts,
    deletes, rejected rows and a given frame, from the view's folder."""

    number: int
    run: str
    partition: str | None
    parent: int | None
    created_at: str
    refused_by: tuple[str, ...]
    files: tuple[str, ...]
    members: tuple[int, ...] = ()
    """Of an assembled snapshot: the partitions' snapshots it serves."""
    rows: int = 0
    computation: str = ""
    """Digest of model, source and features, whatever the rows are hashed by."""

    @classmethod
    def of(cls, number: int, snapshot: Snapshot) -> Entry:
        """What the manifest of this number says."""
        files = tuple(
            part.path
            for part in (*snapshot.parts, snapshot.deletes, snapshot.rejected)
            if part is not None
        )
        files += () if snapshot.frame is None else (snapshot.frame,)
        refused = tuple(snapshot.refused_by)
        members = tuple(sorted(snapshot.members.values()))
        of = (
            snapshot.run,
            snapshot.partition,
            snapshot.parent,
            snapshot.created_at,
            refused,
            files,
            members,
            snapshot.rows,
            snapshot.computation,
        )
        return cls(number, *of)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All manifests of a view, ascending by number: what is known of them, and which cannot be
    read, with the reason. A damaged one that was whole when its line was written and has the same
    size and time is among the entries."""

    entries: dict[int, Entry]
    damaged: dict[int, SnapshotError]
    stamps: dict[int, Stamp]
    """Of the manifests, when it was read."""


def read_catalog(manifests: Path, path: Path, before: Catalog | None = None) -> Catalog:
    """The catalog of a view, completed on disk where it lacks lines; that it cannot be written is
    no error.

    A line counts while the manifest it tells of is there with the size and time noted, and while
    its own checksum holds; a manifest without such a line is parsed, and its line appended. So the
    file may be lost, torn, behind, or of another machine: then more is parsed, and nothing else
    changes. A damaged manifest has no line of its own unless it was whole once; what it named is
    known then, and it can be removed like any other.

    Args:
        manifests: the view's folder of manifests.
        path: of the catalog.
        before: what was read of it earlier: its lines are parsed again only when a manifest came or
            changed.
    """
    stamps = dict(sorted(_stamps(manifests)))
    entries: dict[int, Entry] = {}
    if before is not None:
        entries = {
            n: before.entries[n]
            for n, stamp in stamps.items()
            if n in before.entries and before.stamps[n] == stamp
        }
        if len(entries) == len(stamps):
            return Catalog(entries, {}, stamps)
    lines = _lines(path)
    damaged: dict[int, SnapshotError] = {}
    new: list[bytes] = []
    for number, stamp in stamps.items():
        if number in entries:
            continue
        line = lines.get(number)
        if line is not None and line[0] == stamp:
            entries[number] = line[1]
            continue
        file = manifests / f"{number:020d}.json"
        try:
            entries[number] = Entry.of(number, Snapshot.from_bytes(file.read_bytes(), str(file)))
        except FileNotFoundError:
            # Removed meanwhile.
            continue
        except OSError as exc:
            damaged[number] = SnapshotError(f"{file} cannot be read: {exc.strerror or exc}")
            continue
        except SnapshotError as exc:
            damaged[number] = exc
            continue
        new.append(_line(stamp, entries[number]))
    # No space, or not ours to write: it is derived again the next time.
    with contextlib.suppress(OSError):
        if len(lines) > 2 * len(stamps) + _SPARE_LINES:
            replace_undurably(
                path,
                b"\n".join(
                    [b"", *(_line(stamps[number], entry) for number, entry in entries.items()), b""]
                ),
            )
        elif new and path.parent.is_dir():
            _append(path, new)
    return Catalog(dict(sorted(entries.items())), damaged, stamps)


def add_to_catalog(manifests: Path, path: Path, snapshot: Snapshot) -> None:
    """Note a manifest that was just created; that it cannot be is no error."""
    with contextlib.suppress(OSError):
        stat = (manifests / f"{snapshot.number:020d}.json").stat()
        _append(
            path, [_line((stat.st_size, stat.st_mtime_ns), Entry.of(snapshot.number, snapshot))]
        )


def _stamps(manifests: Path) -> Iterator[tuple[int, Stamp]]:
    try:
        with os.scandir(manifests) as files:
            for file in files:
                if file.name.endswith(".json") and file.name[:-5].isdigit():
                    try:
                        stat = file.stat()
                    except FileNotFoundError:
                        # Removed meanwhile.
                        continue
                    yield int(file.name[:-5]), (stat.st_size, stat.st_mtime_ns)
    except FileNotFoundError:
        return


def _lines(path: Path) -> dict[int, tuple[Stamp, Entry]]:
    """Number → its newest line; torn and damaged lines are left out."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    lines: dict[int, tuple[Stamp, Entry]] = {}
    for line in data.split(b"\n"):
        if not line:
            continue
        try:
            if int(line[:8], 16) == zlib.crc32(line[9:]):
                number, size, mtime_ns, run, partition, parent, created_at, *of = json.loads(
                    line[9:]
                )
                refused, files, members, rows, computation = of
                named = tuple(refused), tuple(files), tuple(members)
                entry = Entry(
                    number,
                    run,
                    partition,
                    parent,
                    created_at,
                    *named,
                    rows=rows,
                    computation=computation,
                )
                lines[number] = (size, mtime_ns), entry
        except (ValueError, TypeError):
            continue
    return lines


def _line(stamp: Stamp, entry: Entry) -> bytes:
    named = (entry.files, entry.members, entry.rows, entry.computation)
    values = [
        entry.number,
        *stamp,
        entry.run,
        entry.partition,
        entry.parent,
        entry.created_at,
        entry.refused_by,
        *named,
    ]
    body = json.dumps(values).encode()
    return b"%08x %s" % (zlib.crc32(body), body)


def _append(path: Path, lines: list[bytes]) -> None:
    """One write to the file's end: a line that another one tore before it stays apart by the
    newline it begins with."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, b"\n" + b"\n".join(lines) + b"\n")
    finally:
        os.close(descriptor)
