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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from precompute.store.disk.durable_file import replace_undurably
from precompute.store.disk.record import (
    FORMAT,
    Record,
    check_format,
    digest_of,
    field,
    plain,
    record_of,
    replace,
    with_format,
)
from precompute.store.disk.storage import storage_of
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import FeatureView, LibraryCheck, Substitute
from precompute.store.offline.segment import Part, Segment, record_path

NEIGHBOURS = "neighbours"
"""What refuses a partition that a backfill computed until it is compared with the days before it,
which may be computed later: no gate that anybody sets or accepts."""

ANNOUNCED = ("shape", "computed", "moved", "anchor", "never", "rows")
"""Gates that a change can be announced for: they compare rows with what was. What judges rows by
themselves stays on any day."""


class Verdict(Record, frozen=True):
    """What one gate measured and what it allows; ``message`` says it in words."""

    gate: str
    passed: bool
    measured: float = 0.0
    limit: float = 0.0
    message: str = ""
    warned: bool = False
    """It was announced, or compares with another recipe's rows: it is told, and refuses nothing."""
    figures: tuple[str, ...] = ()
    """Those that are beyond their limits, of a gate that judges several."""


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

    It is a list of **segments**. Its rows are those of their parts, but for the union of their
    kills: so a reader drops rows by position, hashes no key, and looks at no other snapshot. The
    manifest names each segment, whose record is a file of its own, read with it.

    ``number`` is 0 until the commit gives it one. ``created_at`` is the commit's time, ISO 8601 in
    UTC; ``computed_at_min`` and ``computed_at_max`` the rows' own, in µs since 1970.
    """

    view: FeatureView
    run: str
    model: str
    """Model fingerprint (hex)."""
    counts: Counts
    segments: tuple[Segment, ...]
    """The lowest first; of a **draft**, which is not committed yet, the last may have no record
    yet."""
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
    parent: int | None = None
    """The snapshot that its run compared the source with: where it comes from, and nothing that a
    reader needs."""
    frame: str | None = None
    """The file, from the view's folder, of the rows that a program handed to its run; it lies there
    as long as the manifest."""
    frame_file: Part | None = None
    """That file's rows, size and checksum; None in manifests of earlier versions."""
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
    """Figures the gates judged by: ``<feature>.<figure>``."""
    limits: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """Of a partition, figure → the least and the largest value that its gates let pass, None to a
    side where it may be anything. Of any other they lie with its nights."""
    nights: Part | None = None
    """File of the figures of the nights before it, by which its gates know what is usual, and of
    the limits that follow from them; None where it has neither, and of a partition."""
    anchors: tuple[Part, ...] = ()
    """Files of some rows of the nights before, and of its own: a little each night is much in a
    week."""
    announced: str = ""
    """Why its figures tell nothing of what is usual, and who announced it; empty of an ordinary
    one."""
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
    def names(self) -> tuple[str, ...]:
        """Names of its segments, the lowest first."""
        return tuple(segment.name for segment in self.segments)

    @property
    def own(self) -> Segment | None:
        """The segment that its run made; None where that changed no row."""
        last = self.segments[-1] if self.segments else None
        return last if last is not None and last.number == self.number else None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Those of all its segments."""
        return tuple(part for segment in self.segments for part in segment.parts)

    @property
    def kills(self) -> tuple[Part, ...]:
        """Those of all its segments."""
        return tuple(one.kills for one in self.segments if one.kills is not None)

    @property
    def files(self) -> tuple[Part, ...]:
        """What its rows follow from: parts and kills of all its segments."""
        return tuple(file for segment in self.segments for file in segment.needed)

    @property
    def kind(self) -> str:
        """``full`` where one segment has all its rows, else ``delta``."""
        return "delta" if len(self.segments) > 1 else "full"

    @property
    def made_by(self) -> str:
        """Its model's fingerprint; of a view that reads others, a digest of that and of what made
        these, and those that they read. Values of two snapshots are comparable where it is the
        same."""
        if not self.input_models:
            return self.model
        return digest_of(json.dumps([self.model, sorted(self.input_models.items())]).encode())

    @property
    def rows(self) -> int:
        """Rows a reader sees."""
        return self.counts.rows

    @property
    def failed_gates(self) -> tuple[str, ...]:
        """Gates that refuse to publish it, whether somebody accepted that or not: see
        :class:`precompute.store.offline.standing.Standing`."""
        return tuple(dict.fromkeys(verdict.gate for verdict in self.failed))

    @property
    def failed(self) -> list[Verdict]:
        """Verdicts that refuse it."""
        return [verdict for verdict in self.gates if not verdict.passed]

    def check_counts(self, dead: int) -> None:
        """Compare counts and segments with each other.

        Args:
            dead: how many rows of its parts its segments kill, each counted once.

        Raises:
            SnapshotError: they do not add up.
        """
        self.counts.check()
        name, paths = self.view.name, [part.path for part in self.parts]
        if len(set(paths)) < len(paths):
            raise SnapshotError(
                f"two segments of {name!r} have one part; nothing was committed: this is a bug"
            )
        living = sum(part.rows for part in self.parts) - dead
        if living != self.rows:
            raise SnapshotError(
                f"the parts of {name!r} hold {living} living rows, and {self.rows} were counted;"
                " nothing was committed: this is a bug"
            )

    def to_bytes(self) -> bytes:
        """The manifest: canonical JSON whose last line is the SHA-256 of all before it."""
        body = with_format(plain(replace(self, segments=())))
        body["segments"] = [{"name": one.name, "sha256": one.sha256} for one in self.segments]
        body["view"] = self.view.to_json()
        body["view_fingerprint"] = self.view.fingerprint()
        text = json.dumps(body, indent=1, sort_keys=True)[: -len("\n}")]
        return (
            f'{text},\n "zz_sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'.encode()
        )

    @classmethod
    def from_bytes(
        cls, data: bytes, where: str, segment_of: Callable[[str, str], Segment]
    ) -> Snapshot:
        """The snapshot that :meth:`to_bytes` wrote.

        Args:
            data: the manifest file's bytes.
            where: the file's name, for the message.
            segment_of: reads the segment of a name whose record has a SHA-256; raises a
                SnapshotError where it cannot.

        Raises:
            SnapshotError: torn, or edited; or a segment cannot be read.
            OtherFormatError: it, or a segment, is of another format.
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
            named = record_of(_List, body).segments
            known = record_of(cls, body | {"segments": []})
        except ValueError as exc:
            raise SnapshotError(
                f"{where} is of format {FORMAT}, and not as that has it ({exc}): run the view again"
                " or go back to an older snapshot"
            ) from exc
        return replace(known, segments=tuple(segment_of(one.name, one.sha256) for one in named))


class _Named(Record, frozen=True):
    name: str
    sha256: str


class _List(Record, frozen=True):
    """The segments, as a manifest has them."""

    segments: tuple[_Named, ...]


# ---- Catalog: one line for each manifest of a view, so that a run need not parse them all.
# Derived from them, and never believed without them.


log = logging.getLogger(__name__)

_SPARE_LINES = 256
"""Lines of removed manifests, beyond as many as there are manifests, before the file is rewritten
without them."""
_FEW_MANIFESTS = 8
"""New manifests that are read themselves, in place of the catalog's lines of them."""


Stamp = tuple[int, int]
"""Size in bytes and time of the last change (ns since 1970) of a manifest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The part of a manifest that choosing and removing snapshots needs. ``beside`` are the paths
    of rejected rows and a given frame, from the view's folder."""

    number: int
    run: str
    partition: str | None
    created_at: str
    failed_gates: tuple[str, ...]
    beside: tuple[str, ...]
    segments: tuple[str, ...] = ()
    """Their names."""
    members: tuple[int, ...] = ()
    """The partitions' snapshots that an assembled snapshot serves."""
    rows: int = 0
    computation: str = ""
    """Digest of model, source and features, whatever the rows are hashed by."""

    @classmethod
    def of(cls, number: int, snapshot: Snapshot) -> Entry:
        """What the manifest of this number says."""
        rejected = None if snapshot.rejected is None else snapshot.rejected.path
        nights = None if snapshot.nights is None else snapshot.nights.path
        others = (rejected, snapshot.frame, nights, *(part.path for part in snapshot.anchors))
        beside = tuple(path for path in others if path is not None)
        return cls(
            number,
            snapshot.run,
            snapshot.partition,
            snapshot.created_at,
            snapshot.failed_gates,
            beside,
            snapshot.names,
            tuple(sorted(snapshot.members.values())),
            snapshot.rows,
            snapshot.computation,
        )


@dataclass(frozen=True, slots=True)
class Catalog:
    """All manifests of a view, ascending by number: what is known of them, and which cannot be
    read, with the reason. A damaged one that was whole when its line was written and has the same
    size and time is among the entries."""

    entries: dict[int, Entry]
    damaged: dict[int, SnapshotError]
    stamps: dict[int, Stamp]
    """Stamps of the manifests when the catalog was read."""
    segments: dict[str, tuple[str, ...]]
    """Name of a segment → the paths of its record, parts and kills, from the view's folder; of all
    that the entries name."""

    def files(self, entries: Iterable[Entry]) -> set[str]:
        """Paths of all files that some of the entries name."""
        entries = list(entries)
        names = {name for entry in entries for name in entry.segments}
        return {path for name in names for path in self.segments[name]} | {
            path for entry in entries for path in entry.beside
        }


def read_catalog(
    manifests: Path,
    path: Path,
    segment_of: Callable[[str, str], Segment],
    before: Catalog | None = None,
) -> Catalog:
    """The catalog of a view, completed on disk where it lacks lines; that it cannot be written is
    no error.

    A line counts while the manifest that it describes is there with the size and time noted, while
    its own checksum holds, and while each segment that it names has a line; a manifest without such
    a line is parsed, and the lines are appended. So the file may be lost, torn, behind, or of
    another machine: then more is parsed, and nothing else changes. A damaged manifest has no line
    of its own unless it was whole once; what it named is known then, and it can be removed like any
    other.

    Args:
        manifests: the view's folder of manifests.
        path: of the catalog.
        segment_of: as of :meth:`Snapshot.from_bytes`.
        before: what was read of it earlier: its lines are parsed again only when a manifest came or
            changed.

    Raises:
        UnreadableError: a manifest cannot be read now, so that it is not known what it says.
    """
    storage, stamps = storage_of(manifests), dict(sorted(_stamps(manifests)))
    entries: dict[int, Entry] = {}
    segments: dict[str, tuple[str, ...]] = {}
    if before is not None:
        entries = {
            n: before.entries[n]
            for n, stamp in stamps.items()
            if n in before.entries and before.stamps[n] == stamp
        }
        segments = before.segments
        if len(entries) == len(stamps):
            return _catalog(entries, {}, stamps, segments)
    # of few, their manifests are read sooner than all lines
    is_read = before is None or len(stamps) - len(entries) > _FEW_MANIFESTS
    lines, listed = _lines(path) if is_read else ({}, {})
    segments = segments | listed
    _read_ahead(manifests, stamps.keys() - lines.keys() - entries.keys())
    damaged: dict[int, SnapshotError] = {}
    new: list[bytes] = []
    for number, stamp in stamps.items():
        if number in entries:
            continue
        line = lines.get(number)
        if line is not None and line[0] == stamp and segments.keys() >= set(line[1].segments):
            entries[number] = line[1]
            continue
        file = manifests / f"{number:020d}.json"
        try:
            data = storage.read(file, immutable=True)
            snapshot = Snapshot.from_bytes(data, str(file), segment_of)
        except FileNotFoundError:
            # Removed meanwhile.
            continue
        except SnapshotError as exc:
            damaged[number] = exc
            continue
        entries[number] = Entry.of(number, snapshot)
        new += _lines_of(snapshot, entries[number], stamp, segments)
        segments |= {one.name: _paths_of(one) for one in snapshot.segments}
    if damaged and not is_read:
        # a line may know what it said when it was whole
        return read_catalog(manifests, path, segment_of)
    found = _catalog(entries, damaged, stamps, segments)
    if is_read:
        _complete(path, found, len(lines) + len(listed), new)
    return found


def _read_ahead(manifests: Path, numbers: Collection[int]) -> None:
    """Have many manifests, and the records that they name, at hand."""
    if len(numbers) > _FEW_MANIFESTS:
        for folder in (manifests, manifests.with_name("segments")):
            storage_of(folder).read_ahead(folder)


def _complete(path: Path, found: Catalog, lines: int, new: list[bytes]) -> None:
    """Append new lines to a catalog's file, or write it anew where many of its lines are of what is
    gone."""
    # No space, or not ours to write: it is derived again the next time.
    with contextlib.suppress(OSError):
        if lines > 2 * (len(found.stamps) + len(found.segments)) + _SPARE_LINES:
            every = [_segment_line(*one) for one in found.segments.items()]
            every += [_line(found.stamps[n], entry) for n, entry in found.entries.items()]
            replace_undurably(path, b"\n".join([b"", *every, b""]))
        elif new and path.parent.is_dir():
            _append(path, new)


def _catalog(
    entries: Mapping[int, Entry],
    damaged: dict[int, SnapshotError],
    stamps: dict[int, Stamp],
    segments: Mapping[str, tuple[str, ...]],
) -> Catalog:
    named = {name: segments[name] for entry in entries.values() for name in entry.segments}
    return Catalog(dict(sorted(entries.items())), damaged, stamps, named)


def add_to_catalog(manifests: Path, path: Path, snapshot: Snapshot) -> None:
    """Note a manifest that was just created; that it cannot be is no error."""
    with contextlib.suppress(OSError):
        storage = storage_of(manifests)
        # elsewhere that takes a request; the next reader derives it
        item = storage.stat(manifests / f"{snapshot.number:020d}.json") if storage.local else None
        if item is not None:
            stamp = (item.size_bytes, item.modified_ns)
            # the others have a line, as a rule
            known = {one.name for one in snapshot.segments if one.number != snapshot.number}
            _append(path, _lines_of(snapshot, Entry.of(snapshot.number, snapshot), stamp, known))


def _stamps(manifests: Path) -> Iterator[tuple[int, Stamp]]:
    for item in storage_of(manifests).items(manifests):
        name = item.name
        if name.endswith(".json") and name[:-5].isdigit():
            yield int(name[:-5]), (item.size_bytes, item.modified_ns)


def _lines(path: Path) -> tuple[dict[int, tuple[Stamp, Entry]], dict[str, tuple[str, ...]]]:
    """Number → its newest line; and name of a segment → the paths of its files. Torn and damaged
    lines are left out."""
    lines: dict[int, tuple[Stamp, Entry]] = {}
    segments: dict[str, tuple[str, ...]] = {}
    try:
        data = path.read_bytes()
    except OSError:
        return lines, segments
    for line in data.split(b"\n"):
        if not line:
            continue
        try:
            if int(line[:8], 16) == zlib.crc32(line[9:]):
                stored_format, first, *rest = json.loads(line[9:])
                if stored_format != FORMAT:
                    continue
                if isinstance(first, str):
                    segments[first] = tuple(rest[0])
                    continue
                size, mtime_ns, run, partition, created_at, *of = rest
                refused, beside, names, members, rows, computation = of
                lists = tuple(refused), tuple(beside), tuple(names), tuple(members)
                entry = Entry(first, run, partition, created_at, *lists, rows, computation)
                lines[first] = (size, mtime_ns), entry
        except (ValueError, TypeError):
            continue
    return lines, segments


def _lines_of(
    snapshot: Snapshot, entry: Entry, stamp: Stamp, known: Collection[str]
) -> list[bytes]:
    """Lines of a snapshot, and of those of its segments that have none."""
    new = [one for one in snapshot.segments if one.name not in known]
    return [*(_segment_line(one.name, _paths_of(one)) for one in new), _line(stamp, entry)]


def _paths_of(segment: Segment) -> tuple[str, ...]:
    return (record_path(segment.name), *(file.path for file in segment.files))


def _segment_line(name: str, paths: tuple[str, ...]) -> bytes:
    return _checked_line([name, paths])


def _line(stamp: Stamp, entry: Entry) -> bytes:
    return _checked_line(
        [
            entry.number,
            *stamp,
            *(entry.run, entry.partition, entry.created_at, entry.failed_gates, entry.beside),
            *(entry.segments, entry.members, entry.rows, entry.computation),
        ]
    )


def _checked_line(values: list[object]) -> bytes:
    body = json.dumps([FORMAT, *values]).encode()
    return b"%08x %s" % (zlib.crc32(body), body)


def _append(path: Path, lines: list[bytes]) -> None:
    """One write to the file's end: a line that another one tore before it stays apart by the
    newline it begins with."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, b"\n" + b"\n".join(lines) + b"\n")
    finally:
        os.close(descriptor)
