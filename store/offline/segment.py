"""Segment: what one run wrote of a view, which never changes: parts, a file of kills, and a record
that names them. A snapshot is a list of them, the lowest first.

The **kills** of a segment are the rows of the segments below it, and of its own parts, that are no
rows of any snapshot that names it; with the keys of those entities that have no row any more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.store.disk.record import (
    FORMAT,
    Record,
    check_format,
    field,
    plain,
    record_of,
    replace,
    with_format,
)
from precompute.store.disk.storage import File
from precompute.store.errors import SnapshotError
from precompute.store.keys import key_column
from precompute.store.offline.stored_file import parsing

Numbers = npt.NDArray[np.int64]

KILLS = "kills.parquet"
"""Name of a file of kills, in the folder of the run that wrote it."""
COPIED = "copied-"
"""What the names of parts begin with whose rows a run copied from others' parts."""
ALL_HASHES = 2**64
"""More than any hash of a key."""
MOST_MERGED = 64
"""How many of the segments that were merged into it a segment names: what is rolled back from may
have been copied into what a run computed meanwhile, and was then not long before."""
KILLS_SCHEMA = pa.schema(
    [("part", pa.dictionary(pa.int32(), pa.string())), ("row", pa.int64()), ("removed", pa.bool_())]
)
"""Columns of a file of kills: path of the part as records name it, number of the row in it (both
null where the part was merged away), and whether its entity has no row any more. The entity key's
columns follow, with ``key_`` before their names, null where it has one. Sorted by part and row."""


class Part(Record, frozen=True, omit_defaults=True):
    """One Parquet file: path relative to the view's folder, its rows, size and SHA-256 (hex)."""

    path: str
    rows: int
    size_bytes: int
    sha256: str
    sample: Part | None = None
    """Of a part of rows the file beside it that has its sample, from which no row follows; None
    where it is small and read itself."""
    below: int = ALL_HASHES
    """Its sample are the rows whose key hash is less."""

    def in_folder(self, folder: Path) -> File:
        """The file itself, in its view's folder, by its absolute path."""
        return File((folder / self.path).absolute(), self.size_bytes, self.sha256)


class Segment(Record, frozen=True):
    """What one run wrote: the record, parsed.

    Its content is fixed when it is made: the rows of its parts but for its own kills, and the keys
    that it removes. It leaves the list of a snapshot only by being merged with those above it.
    """

    number: int
    """Of the snapshot that it was made for; 0 until that is committed."""
    run: str
    recipe: str
    """Digest of all that makes a row besides its input."""
    schema_tag: int
    """Distinguishes rows of its features from others' in the online store."""
    parts: tuple[Part, ...]
    kills: Part | None = None
    """See :data:`KILLS_SCHEMA`; None where it kills no row."""
    own_kills: int = 0
    """How many of the kills are rows of its own parts."""
    removed: int = 0
    """How many keys it removes: those that have a row below, perhaps, and none in it."""
    members: Mapping[str, int] = field(default_factory=dict)
    """Partition → the number of its snapshot, of a segment of **all** partitions: most parts are
    theirs, by reference."""
    merged: tuple[str, ...] = ()
    """Names of the segments whose rows were copied into it, and of those that were copied into
    them; the newest :data:`MOST_MERGED`."""
    sha256: str = ""
    """Of the bytes of its record; empty until it is written. Not in the record."""
    size_bytes: int = 0
    """Of its record, likewise."""

    @property
    def name(self) -> str:
        """Number and digest: no two contents have one name, whatever became of the root between."""
        return f"{self.number}-{self.sha256[:8]}"

    @property
    def record(self) -> Part:
        """The file of its record."""
        return Part(record_path(self.name), 0, self.size_bytes, self.sha256)

    @property
    def needed(self) -> tuple[Part, ...]:
        """What its rows follow from: its parts, and its kills."""
        return self.parts if self.kills is None else (*self.parts, self.kills)

    @property
    def files(self) -> tuple[Part, ...]:
        """All its files: those that its rows follow from, and the samples of its parts."""
        return (*self.needed, *(one.sample for one in self.parts if one.sample is not None))

    @property
    def rows(self) -> int:
        """Rows of its parts, the dead ones too."""
        return sum(part.rows for part in self.parts)

    @property
    def entries(self) -> int:
        """How many keys it has: of the rows that were its own when it was made, and those that it
        removes."""
        return self.rows - self.own_kills + self.removed

    @property
    def weight(self) -> int:
        """What it weighs among others when they are merged: rows and kills."""
        return self.rows + (0 if self.kills is None else self.kills.rows)

    def to_bytes(self) -> bytes:
        """The record: JSON in one order of keys."""
        body = plain(self)
        del body["sha256"], body["size_bytes"]
        body = with_format(body | {"weight": self.weight})
        return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()

    def numbered(self, number: int) -> tuple[Segment, bytes]:
        """It as the segment of a snapshot's number, with the bytes of its record."""
        data = replace(self, number=number).to_bytes()
        digest = hashlib.sha256(data).hexdigest()
        return replace(self, number=number, sha256=digest, size_bytes=len(data)), data

    @classmethod
    def from_bytes(cls, data: bytes, where: str, sha256: str) -> Segment:
        """The segment that :meth:`to_bytes` wrote.

        Args:
            data: the record's bytes.
            where: the file's name, for the message.
            sha256: as a manifest has it.

        Raises:
            SnapshotError: it is torn, or was edited.
            OtherFormatError: it is of another format.
        """
        if hashlib.sha256(data).hexdigest() != sha256:
            raise SnapshotError(
                f"{where} differs from its checksum in the manifest: the file was damaged or"
                " changed; run the view again or go back to an older snapshot"
            )
        body = json.loads(data)
        check_format(body, where)
        try:
            known = record_of(cls, body)
        except ValueError as exc:
            raise SnapshotError(
                f"{where} is of format {FORMAT}, and not as that has it ({exc}): run the view again"
                " or go back to an older snapshot"
            ) from exc
        return replace(known, sha256=sha256, size_bytes=len(data))


def record_path(name: str) -> str:
    """Path of the record of the segment of a name, from its view's folder."""
    return f"segments/{name}.json"


# ---- kills


Kills = Mapping[str, Numbers]
"""Path of a part, as records name it → numbers of its rows that a file of kills names."""


def kills_table(
    part: pa.Array, row: pa.Array, removed: pa.Array, keys: Mapping[str, pa.Array]
) -> pa.Table:
    """A table as a file of kills has it, of lines in any order.

    Args:
        part: string or dictionary of such, with nulls.
        row: int64, with nulls.
        removed: bool.
        keys: name of an entity's column → its values; those of rows that are not removed do not
            matter.
    """
    part = part.cast(pa.string()).dictionary_encode()
    names = np.array([*part.dictionary.to_pylist(), ""])
    rank = np.argsort(np.argsort(names))
    code = rank[np.asarray(part.indices.fill_null(len(names) - 1))]
    order = pa.array(np.lexsort((np.asarray(row.fill_null(-1)), code)))
    nothing = {name: pa.nulls(len(column), column.type) for name, column in keys.items()}
    columns = [
        part.cast(KILLS_SCHEMA.field("part").type),
        row,
        removed,
        *(pc.if_else(removed, column, nothing[name]) for name, column in keys.items()),
    ]
    names_of = [*KILLS_SCHEMA.names, *(f"key_{name}" for name in keys)]
    return pa.Table.from_arrays(columns, names=names_of).take(order)


def read_kills(path: Path) -> Kills:
    """Which rows of which parts a file of kills names, which was compared with its checksum.

    Raises:
        SnapshotError: it cannot be parsed.
        UnreadableError: it cannot be read now.
    """
    # not read_table, which imports pyarrow.dataset: 20 to 40 ms
    with parsing(path):
        with pq.ParquetFile(path) as file:
            table = file.read(["part", "row"])
        names = table.column("part").combine_chunks().dictionary_encode()
        codes = np.asarray(names.indices.fill_null(-1))
        rows = np.asarray(table.column("row").fill_null(-1))
        order = np.argsort(codes, kind="stable")
        order = order[np.searchsorted(codes[order], 0) :]
        ends = np.cumsum(np.bincount(codes[order], minlength=len(names.dictionary)))
        pieces = np.split(rows[order], ends[:-1]) if len(ends) else []
        return dict(zip(names.dictionary.to_pylist(), pieces, strict=True))


def removed_keys(path: Path, entity: Sequence[str]) -> pa.Array:
    """Key texts of the entities that a file of kills removes, string [n]; it was compared with its
    checksum.

    Raises:
        SnapshotError: it cannot be parsed.
        UnreadableError: it cannot be read now.
    """
    with parsing(path):
        with pq.ParquetFile(path) as file:
            table = file.read(["removed", *(f"key_{name}" for name in entity)])
        return _key_texts(table.filter(table.column("removed")), entity)


def _key_texts(lines: pa.Table, entity: Sequence[str]) -> pa.Array:
    keys = lines.select([f"key_{name}" for name in entity]).rename_columns(list(entity))
    return key_column(keys, entity)


def dead_rows(
    parts: Sequence[Part], kills: Sequence[Path], read: Callable[[Path], Kills] = read_kills
) -> dict[int, Numbers]:
    """Position of a part → numbers of its dead rows, ascending int64.

    Args:
        parts: of a list of segments.
        kills: their files of kills.
        read: as :func:`read_kills`; one that remembers saves reading what lists share.

    Raises:
        SnapshotError: a file cannot be parsed, or names another part, or a row that a part has not.
        UnreadableError: a file cannot be read now.
    """
    position = {part.path: number for number, part in enumerate(parts)}
    gathered: dict[int, list[Numbers]] = {}
    for path in kills:
        for name, rows in read(path).items():
            if name not in position:
                raise SnapshotError(
                    f"{path} names part {name}, which no segment of its snapshot has; publish"
                    " another snapshot"
                )
            most = parts[position[name]].rows
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < most:
                raise SnapshotError(
                    f"{path} names a row of part {name}, which has {most}, that is none of them;"
                    " publish another snapshot"
                )
            gathered.setdefault(position[name], []).append(rows)
    return {number: _ascending(np.concatenate(pieces)) for number, pieces in gathered.items()}


def _ascending(rows: Numbers) -> Numbers:
    """Each of ``rows`` once, in order. Those of a file are in order as a rule, so that a merge is
    quicker than the table that ``np.unique`` makes."""
    rows = np.sort(rows, kind="stable")
    once: Numbers = rows[np.concatenate(([True], rows[1:] != rows[:-1]))] if len(rows) else rows
    once.flags.writeable = False
    return once


def merged_kills(
    files: Sequence[Path], below: Collection[str], living: pa.Array, entity: Sequence[str]
) -> pa.Table:
    """The kills of the segment that takes the place of several: rows of parts below them as before,
    and each key that one of them removed and that has no row in it.

    Args:
        files: of their kills, each compared with its checksum.
        below: paths of the parts of the segments that stay.
        living: key texts that have a row in it, string [n]; may be empty where none of ``files``
            removes a key.
        entity: the key's columns.

    Raises:
        SnapshotError: a file cannot be parsed.
        UnreadableError: one cannot be read now.
    """
    names = [f"key_{name}" for name in entity]
    tables = []
    for path in files:
        with parsing(path), pq.ParquetFile(path) as file:
            tables.append(file.read([*KILLS_SCHEMA.names, *names]))
    for name in names:
        if len({table.schema.field(name).type for table in tables}) > 1:
            # of a time when keys were numbers, and of one when they were text
            tables = [_cast(table, name, pa.string()) for table in tables]
    lines = pa.concat_tables([_cast(table, "part", pa.string()) for table in tables])
    stays = pc.is_in(lines.column("part"), pa.array(sorted(below), pa.string()))
    gone = lines.column("removed").combine_chunks()
    texts = _key_texts(lines.filter(gone), entity)
    at, stay = np.flatnonzero(np.asarray(gone)), np.asarray(stays)
    # one line of each key: of a part below where there is one
    order = np.argsort(~stay[at], kind="stable")
    listed = texts.take(pa.array(order)).dictionary_encode()
    _, first = np.unique(np.asarray(listed.indices), return_index=True)
    alive = np.asarray(pc.is_in(texts, living))
    chosen = order[first]
    chosen = at[chosen[~alive[chosen]]]
    removed = np.zeros(len(lines), np.bool_)
    removed[chosen] = True
    kept = np.flatnonzero(stay | removed)
    part = pc.if_else(stays, lines.column("part"), pa.scalar(None, pa.string()))
    row = pc.if_else(stays, lines.column("row"), pa.scalar(None, pa.int64()))
    taken = pa.table(
        [part, row, pa.array(removed), *(lines.column(name) for name in names)],
        names=[*KILLS_SCHEMA.names, *names],
    ).take(pa.array(kept))
    columns = {name: taken.column(name).combine_chunks() for name in taken.column_names}
    keys = {name: columns[f"key_{name}"] for name in entity}
    return kills_table(columns["part"], columns["row"], columns["removed"], keys)


def _cast(table: pa.Table, name: str, kind: pa.DataType) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, name, table.column(name).cast(kind))
