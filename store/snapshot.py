"""Snapshot: an immutable, numbered result of one view. Its manifest is the commit.

A manifest is JSON that ends with its own SHA-256, so that a torn or edited one is told from a whole one without reading a
single part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from store.errors import SnapshotError
from store.feature_view import FeatureView, known_fields

FORMAT_VERSION = 1
"""Major version of the manifest: a reader refuses one it does not know and ignores fields it does not know."""


@dataclass(frozen=True, slots=True)
class Part:
    """One Parquet file: path relative to the view's folder, its rows, size and SHA-256 (hex)."""

    path: str
    rows: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of every source row. ``source = written + unchanged + rejected + removed``, or the run fails.

    ``duplicates`` are exact repetitions of a row, folded into one before the count. ``unchanged`` and ``removed`` are zero in a
    full snapshot.
    """

    source: int
    written: int
    rejected: int = 0
    unchanged: int = 0
    removed: int = 0
    duplicates: int = 0

    def check(self) -> None:
        """Raises:
        SnapshotError: a row was lost or doubled.
        """
        total = self.written + self.unchanged + self.rejected + self.removed
        if total != self.source:
            raise SnapshotError(
                f"{self.source} rows came from the source but {total} are accounted for (written {self.written}, unchanged "
                f"{self.unchanged}, rejected {self.rejected}, removed {self.removed}); nothing was committed: this is a bug, keep the "
                "run's report"
            )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a reader needs to know of one result: the manifest, parsed.

    ``number`` is 0 until the commit gives it one. ``created_at`` is the commit's time, ISO 8601 in UTC; ``computed_at_min`` and
    ``computed_at_max`` the rows' own, in µs since 1970.
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
    parent: int | None = None

    def to_bytes(self) -> bytes:
        """The manifest: canonical JSON whose last line is the SHA-256 of all before it."""
        body = asdict(self)
        body["view"] = self.view.to_json()
        body["format_version"] = FORMAT_VERSION
        body["view_fingerprint"] = self.view.fingerprint()
        text = json.dumps(body, indent=1, sort_keys=True, default=dict)[: -len("\n}")]
        return f'{text},\n "zz_sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'.encode()

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
                f"{where} is torn or was edited: its checksum does not match; run the view again or go back to an older snapshot"
            )
        body = json.loads(body_text + b"\n}")
        if body["format_version"] != FORMAT_VERSION:
            raise SnapshotError(
                f"{where} has manifest format {body['format_version']}, this version reads {FORMAT_VERSION}: upgrade precompute"
            )
        return cls(
            view=FeatureView.from_json(body["view"]),
            run=body["run"],
            model=body["model"],
            counts=known_fields(Counts, body["counts"]),
            parts=tuple(known_fields(Part, p) for p in body["parts"]),
            rejected=None if body["rejected"] is None else known_fields(Part, body["rejected"]),
            created_at=body["created_at"],
            computed_at_min=body["computed_at_min"],
            computed_at_max=body["computed_at_max"],
            inputs=body["inputs"],
            input_columns=body["input_columns"],
            timings_s=body["timings_s"],
            versions=body["versions"],
            number=body["number"],
            kind=body["kind"],
            parent=body["parent"],
        )
