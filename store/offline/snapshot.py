"""Snapshot: an immutable, numbered result of one view. Its manifest is the commit: JSON that ends
with its own SHA-256, so that a torn or edited one is distinguished from a whole one without reading
a single part.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from precompute.store.disk.durable_file import replace_undurably
from precompute.store.disk.record import (
    FORMAT,
    Record,
    check_format,
    digest_of,
    field,
    plain,
    record_of,
    with_format,
)
from precompute.store.disk.storage import File, storage_of
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import FeatureView, LibraryCheck, Substitute
from precompute.store.offline.row_figures import RowFigures

DELETES_SCHEMA = pa.schema(
    [("part", pa.dictionary(pa.int32(), pa.string())), ("row", pa.int64()), ("removed", pa.bool_())]
)
"""Columns of ``deletes.parquet``: path of the part as manifests name it, number of the row in it,
and whether its key left the source (a tombstone) or came again with another value. The entity key's
columns follow, with ``key_`` before their names."""


class Part(Record, frozen=True):
    """One Parquet file: path relative to the view's folder, its rows, size and SHA-256 (hex)."""

    path: str
    rows: int
    size_bytes: int
    sha256: str

    def in_folder(self, folder: Path) -> File:
        """The file itself, in its view's folder, by its absolute path."""
        return File((folder / self.path).absolute(), self.size_bytes, self.sha256)


class Verdict(Record, frozen=True):
    """What one gate measured and what it allows; ``message`` says it in words."""

    gate: str
    passed: bool
    measured: float = 0.0
    limit: float = 0.0
    message: str = ""


class Counts(Record, frozen=True):
    """What became of every row that came in: ``source + removed = written + unchanged + rejected +
    removed``, or the run fails.

    ``source`` rows came from the source, exact repetitions (``duplicates``) folded into one before
    the count. ``removed`` rows were in the parent and left the source; ``unchanged`` ones were
    taken over without inference. Both are zero where nothing came before.
    """

    source: int
    written: int
    rejected: int = 0
    unchanged: int = 0
    removed: int = 0
    duplicates: int = 0

    @property
    def rows(self) -> int:
        """Rows a reader of the snapshot sees."""
        return self.written + self.unchanged

    def check(self) -> None:
        """Raises:
        SnapshotError: a row was lost or doubled.
        """
        total = self.written + self.unchanged + self.rejected
        if total != self.source:
            raise SnapshotError(
                f"{self.source} rows came from the source but {total} are accounted for (written"
                f" {self.written}, unchanged {self.unchanged}, rejected {self.rejected}); nothing"
                " was committed: this is a bug, keep the run's report"
            )


class Snapshot(Record, frozen=True):
    """Everything a reader needs to know of one result: the manifest, parsed.

    A **full** snapshot holds all its rows in its own parts. A **delta** holds the rows that were
    computed again, and copies of those of the deltas that it takes the place of; the rest are its
    parent's, but for those its **deletes** name: a Parquet file with the part and row number of
    every row that was replaced or left the source. So a reader of a chain drops rows by position,
    and hashes no key.

    ``number`` is 0 until the commit gives it one. ``created_at`` is the commit's time, ISO 8601 in
    UTC; ``computed_at_min`` and ``computed_at_max`` the rows' own, in µs since 1970.
    """

    view: FeatureView
    run: str
    model: str
    """Model fingerprint (hex)."""
    counts: Counts
    parts: tuple[Part, ...]
    rejected: Part | None
    created_at: str
    computed_at_min: int | None
    computed_at_max: int | None
    inputs: Mapping[str, int] = field(default_factory=dict)
    """Views this one read → the snapshot number it read."""
    input_models: Mapping[str, str] = field(default_factory=dict)
    """Views this one read → the :attr:`made_by` of the snapshot it read."""
    input_columns: Mapping[str, str] = field(default_factory=dict)
    """Source columns → Arrow type names."""
    timings_s: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    number: int = 0
    kind: str = "full"
    """``full`` or ``delta``."""
    parent: int | None = None
    """The snapshot whose rows a delta builds on."""
    bases: tuple[int, ...] = ()
    """The snapshots whose rows a compacted one copied, or a delta that took the place of others."""
    base_losses: int | None = None
    """Rows that those of ``bases`` removed or rejected, so that a key may have none any more; None
    where that was not counted."""
    frame: str | None = None
    """The file, from the view's folder, of the rows that a program handed to its run; it lies there
    as long as the manifest."""
    frame_file: Part | None = None
    """That file's rows, size and checksum; None in manifests of earlier versions."""
    deletes: Part | None = None
    """Which rows of this and earlier parts are no rows of this snapshot: see
    :data:`DELETES_SCHEMA`."""
    own_deletes: int = 0
    """How many of these are in its own parts: rows an interrupted run had computed that this one
    had no use for."""
    recipe: str = ""
    """Digest of all that makes a row besides its input: model fingerprint, SQL, columns, features.
    Rows of one recipe and one input hash are interchangeable."""
    computation: str = ""
    """Digest of the recipe but for the way inputs are hashed, by which rows of two recipes count as
    made alike."""
    content: str = ""
    """Digest of the recipe and of all keys and input hashes: two snapshots of one content hold the
    same values."""
    partition: str | None = None
    """Interval of data time it covers, as :class:`precompute.store.times.Partition` writes it."""
    members: Mapping[str, int] = field(default_factory=dict)
    """Partition → the number of its snapshot that is served, of an **assembled** snapshot, which
    covers all partitions of its view. A key has its row of the newest partition that has it. Most
    parts are the members' own, by reference; ``partition`` is None."""
    renewed_at: int | None = None
    """When its unchanged rows were found to be what the model would answer, µs since 1970: their
    age counts from there."""
    source_at: str | None = None
    """When the source it was computed from was last modified, ISO 8601 in UTC; None where that is
    not known."""
    quality: Mapping[str, float] = field(default_factory=dict)
    """Figures the gates judged by."""
    figures: RowFigures | None = None
    """Counted of every row a reader sees, while it was written; of the rows a delta replaced, a
    sample was taken off where there are very many."""
    gates: tuple[Verdict, ...] = ()
    substitute: Substitute | None = None
    """What computes the view's misses in the model's stead, and how well it agrees with the rows of
    this snapshot."""
    fence: int = 0
    """The fence of the lease that its writer held."""
    code: Mapping[str, str] = field(default_factory=dict)
    """The code of a user's model that computed its rows, or gives the same values as that did: see
    :func:`precompute.model_code.model_code`; empty of a built-in one."""
    library: LibraryCheck | None = None
    """How the model compares with its own library; None of one that has none, and of a manifest
    that was written before that was asked."""

    @property
    def files(self) -> tuple[Part, ...]:
        """Its parts, and the file of its deletes."""
        return self.parts if self.deletes is None else (*self.parts, self.deletes)

    @property
    def made_by(self) -> str:
        """Its model's fingerprint; of a view that reads others, a digest of that and of what made
        these, and those that they read. Values of two snapshots are comparable where it is the
        same."""
        if not self.input_models:
            return self.model
        return digest_of(json.dumps([self.model, sorted(self.input_models.items())]).encode())

    @property
    def losses(self) -> int | None:
        """Keys of its parent, at most, that have no row in it; None where that is not known."""
        of_bases = self.base_losses if self.bases else 0
        return None if of_bases is None else self.counts.removed + self.counts.rejected + of_bases

    @property
    def rows(self) -> int:
        """Rows a reader sees."""
        return self.counts.rows

    @property
    def changed_rows(self) -> int:
        """About how many rows a delta has other than its parent, tombstones among them: what it
        weighs among others."""
        return max(
            sum(part.rows for part in self.parts), 0 if self.deletes is None else self.deletes.rows
        )

    @property
    def failed_gates(self) -> tuple[str, ...]:
        """Gates that refuse to publish it, whether somebody accepted that or not: see
        :class:`precompute.store.offline.standing.Standing`."""
        return tuple(dict.fromkeys(verdict.gate for verdict in self.failed))

    @property
    def failed(self) -> list[Verdict]:
        """Verdicts that refuse it."""
        return [verdict for verdict in self.gates if not verdict.passed]

    def check_counts(self, ancestors: Sequence[Snapshot]) -> None:
        """Compare counts, parts and deletes with each other, and with what it builds on, the full
        one first.

        Raises:
            SnapshotError: they do not add up.
        """
        counts, name = self.counts, self.view.name
        counts.check()
        own, left = sum(part.rows for part in self.parts) - self.own_deletes, 0
        if ancestors:
            deleted = 0 if self.deletes is None else self.deletes.rows
            left = ancestors[-1].rows - (deleted - self.own_deletes)
        # rows of the deltas that it takes the place of
        copied = counts.unchanged - left if self.kind == "delta" and self.bases else 0
        expected = counts.rows if self.kind == "full" else counts.written + copied
        if own != expected:
            raise SnapshotError(
                f"the parts of {name!r} hold {own} rows other than the {expected} there should be;"
                " nothing was committed: this is a bug"
            )
        if ancestors:
            inherited = {part.path for layer in ancestors for part in layer.parts}
            if inherited.intersection(part.path for part in self.parts):
                raise SnapshotError(
                    f"a part of {name!r} is its parent's too; nothing was committed: this is a bug"
                )
            if left + copied != counts.unchanged:
                raise SnapshotError(
                    f"of {name!r}'s parent, snapshot {self.parent}, {left} rows stay but"
                    f" {counts.unchanged} were counted as unchanged; nothing was committed: this is"
                    " a bug"
                )

    def to_bytes(self) -> bytes:
        """The manifest: canonical JSON whose last line is the SHA-256 of all before it."""
        body = with_format(plain(self))
        body["view"] = self.view.to_json()
        body["view_fingerprint"] = self.view.fingerprint()
        text = json.dumps(body, indent=1, sort_keys=True)[: -len("\n}")]
        return (
            f'{text},\n "zz_sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'.encode()
        )

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Snapshot:
        """The snapshot that :meth:`to_bytes` wrote.

        Args:
            data: the manifest file's bytes.
            where: the file's name, for the message.

        Raises:
            SnapshotError: torn, or edited.
            OtherFormatError: it is of another format.
        """
        body_text, _, tail = data.rpartition(b',\n "zz_sha256": "')
        if not body_text or tail != hashlib.sha256(body_text).hexdigest().encode() + b'"\n}\n':
            raise SnapshotError(
                f"{where} is torn or was edited: its checksum does not match; run the view again or"
                " go back to an older snapshot"
            )
        body = json.loads(body_text + b"\n}")
        check_format(body, where)
        try:
            return record_of(cls, body)
        except ValueError as exc:
            raise SnapshotError(
                f"{where} is of format {FORMAT}, and not as that has it ({exc}): run the view again"
                " or go back to an older snapshot"
            ) from exc


# ---- Catalog: one line for each manifest of a view, so that a run need not parse them all.
# Derived from them, and never believed without them.


log = logging.getLogger(__name__)

_SPARE_LINES = 256
"""Lines of removed manifests, beyond as many as there are manifests, before the file is rewritten
without them."""


Stamp = tuple[int, int]
"""Size in bytes and time of the last change (ns since 1970) of a manifest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The part of a manifest that choosing and removing snapshots needs. ``files`` are the paths of
    parts, deletes, rejected rows and a given frame, from the view's folder."""

    number: int
    run: str
    partition: str | None
    parent: int | None
    created_at: str
    failed_gates: tuple[str, ...]
    files: tuple[str, ...]
    members: tuple[int, ...] = ()
    """The partitions' snapshots that an assembled snapshot serves."""
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
        members = tuple(sorted(snapshot.members.values()))
        of = (
            snapshot.run,
            snapshot.partition,
            snapshot.parent,
            snapshot.created_at,
            snapshot.failed_gates,
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
    """Stamps of the manifests when the catalog was read."""


def read_catalog(manifests: Path, path: Path, before: Catalog | None = None) -> Catalog:
    """The catalog of a view, completed on disk where it lacks lines; that it cannot be written is
    no error.

    A line counts while the manifest that it describes is there with the size and time noted, and
    while its own checksum holds; a manifest without such a line is parsed, and its line appended.
    So the file may be lost, torn, behind, or of another machine: then more is parsed, and nothing
    else changes. A damaged manifest has no line of its own unless it was whole once; what it named
    is known then, and it can be removed like any other.

    Args:
        manifests: the view's folder of manifests.
        path: of the catalog.
        before: what was read of it earlier: its lines are parsed again only when a manifest came or
            changed.

    Raises:
        UnreadableError: a manifest cannot be read now, so that it is not known what it says.
    """
    storage, stamps = storage_of(manifests), dict(sorted(_stamps(manifests)))
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
            entries[number] = Entry.of(
                number, Snapshot.from_bytes(storage.read(file, immutable=True), str(file))
            )
        except FileNotFoundError:
            # Removed meanwhile.
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
        storage = storage_of(manifests)
        # elsewhere that takes a request; the next reader derives it
        item = storage.stat(manifests / f"{snapshot.number:020d}.json") if storage.local else None
        if item is not None:
            stamp = (item.size_bytes, item.modified_ns)
            _append(path, [_line(stamp, Entry.of(snapshot.number, snapshot))])


def _stamps(manifests: Path) -> Iterator[tuple[int, Stamp]]:
    for item in storage_of(manifests).items(manifests):
        if item.path.suffix == ".json" and item.path.stem.isdigit():
            yield int(item.path.stem), (item.size_bytes, item.modified_ns)


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
                stored_format, number, size, *of = json.loads(line[9:])
                if stored_format != FORMAT:
                    continue
                mtime_ns, run, partition, parent, created_at, *of = of
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
        FORMAT,
        entry.number,
        *stamp,
        entry.run,
        entry.partition,
        entry.parent,
        entry.created_at,
        entry.failed_gates,
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
