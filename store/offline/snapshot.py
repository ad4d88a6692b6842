"""Snapshot: an immutable, numbered result of one view. Its manifest is the commit: JSON that ends
with its own SHA-256, so that a torn or edited one is distinguished from a whole one without reading
a single part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import pyarrow as pa

from precompute.store.errors import SnapshotError
from precompute.store.feature_view import FeatureView
from precompute.store.offline.row_figures import RowFigures
from precompute.store.record import Record, field, plain, record_of

FORMAT_VERSION = 1
"""Major version of the manifest: a reader refuses another one, and ignores fields it does not
know."""


DELETES_SCHEMA = pa.schema(
    [("part", pa.dictionary(pa.int32(), pa.string())), ("row", pa.int64()), ("removed", pa.bool_())]
)
"""Of ``deletes.parquet``: path of the part as manifests name it, number of the row in it, and
whether its key left the source (a tombstone) or came again with another value. The entity key's
columns follow, with ``key_`` before their names."""


class Part(Record, frozen=True):
    """One Parquet file: path relative to the view's folder, its rows, size and SHA-256 (hex)."""

    path: str
    rows: int
    size_bytes: int
    sha256: str


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
    input_columns: Mapping[str, str] = field(default_factory=dict)
    """Source columns → Arrow type names."""
    timings_s: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    number: int = 0
    kind: str = "full"
    """``full`` or ``delta``."""
    parent: int | None = None
    """Of a delta: the snapshot whose rows it builds on."""
    bases: tuple[int, ...] = ()
    """Of a compacted one, and of a delta that took the place of others: the snapshots whose rows it
    copied."""
    base_losses: int | None = None
    """Rows that those of ``bases`` removed or rejected, so that a key may have none any more; None
    where that was not counted."""
    frame: str | None = None
    """The file, from the view's folder, of the rows that a program handed to its run; it lies there
    as long as the manifest."""
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
    """Interval of data time it covers, as :class:`precompute.store.clock.Partition` writes it."""
    members: Mapping[str, int] = field(default_factory=dict)
    """Of an **assembled** one, which covers all partitions of its view: each partition → the number
    of its snapshot that is served. A key has its row of the newest partition that has it. Most
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
    accepted: tuple[str, ...] = ()
    """Gates an operator accepted by name."""
    returned: Mapping[int, int] = field(default_factory=dict)
    """Snapshots that were rolled back from → rows of theirs that this one holds again, those that
    were live already among them."""
    excused: Mapping[int, int] = field(default_factory=dict)
    """The same of those that were live already and that an operator let pass."""
    fence: int = 0
    """Of the lease the writer held."""

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
        """Of a delta, about how many rows it has other than its parent, tombstones among them: what
        it weighs among others."""
        return max(
            sum(part.rows for part in self.parts), 0 if self.deletes is None else self.deletes.rows
        )

    @property
    def refused_by(self) -> list[str]:
        """Gates that refuse to publish it and that nobody accepted."""
        return [
            name
            for name in dict.fromkeys(verdict.gate for verdict in self.failed)
            if name not in self.accepted
        ]

    @property
    def failed(self) -> list[Verdict]:
        """Verdicts that refuse it, accepted or not."""
        return [verdict for verdict in self.gates if not verdict.passed]

    def to_bytes(self) -> bytes:
        """The manifest: canonical JSON whose last line is the SHA-256 of all before it."""
        body = plain(self)
        body["view"] = self.view.to_json()
        body["format_version"] = FORMAT_VERSION
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
            SnapshotError: torn, edited, or of a format this version does not know.
        """
        body_text, _, tail = data.rpartition(b',\n "zz_sha256": "')
        if not body_text or tail != hashlib.sha256(body_text).hexdigest().encode() + b'"\n}\n':
            raise SnapshotError(
                f"{where} is torn or was edited: its checksum does not match; run the view again or"
                " go back to an older snapshot"
            )
        body = json.loads(body_text + b"\n}")
        version = body["format_version"]
        if type(version) is not int or version != FORMAT_VERSION:
            raise SnapshotError(
                f"{where} has manifest format {version!r}, this version reads {FORMAT_VERSION}:"
                " upgrade precompute"
            )
        try:
            return record_of(cls, body)
        except ValueError as exc:
            raise SnapshotError(
                f"{where} says what this version does not understand ({exc}): upgrade precompute"
            ) from exc
