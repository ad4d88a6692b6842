"""Selection: some rows of a snapshot's Parquet files, by position; drawn at random from all over
them, looked for by key, read by row group.

What two snapshots share they share by position too: the rows of one that are no rows of the other
follow from the files' names and the rows that are dead in either, without reading one. Reading
costs what the row groups cost that hold a selected row, and no more than :data:`CLUSTERS` of these
for a draw.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.store.errors import PrecomputeError
from precompute.store.keys import key_column
from precompute.store.offline.part_file import ROW_GROUP_BYTES, Layers, row_bytes
from precompute.store.offline.stored_file import BROKEN, broken

CLUSTERS = 64
"""Row groups that a draw of many rows reads: 64 places spread over all rows give a share of a third
to ± 6 % when whole row groups are alike, and to ± 1 % of what begins or ends at one place."""

MOST_DRAWN_BYTES = 32 * 2**20
"""Bytes in memory of the rows that are drawn, at most, about: 8,192 of 4 kB."""

LOOKED_AT = 8
"""Files whose footers tell how large a row is, about."""

MOST_READ_BYTES = CLUSTERS * ROW_GROUP_BYTES
"""Bytes of the files that a draw reads at most, unless so many row groups have more. The 3,000 rows
that a delta of 0.1 % replaced lie in every row group of 3 M × 64 floats, which took a run's gates
0.8 s."""

Numbers = npt.NDArray[np.int64]
_NONE: Numbers = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of one file of ``rows`` rows: those whose numbers (ascending) are ``listed``, or with
    ``others`` all that are not listed."""

    path: Path
    rows: int
    listed: Numbers
    others: bool

    @property
    def count(self) -> int:
        """How many rows they are."""
        return self.rows - len(self.listed) if self.others else len(self.listed)

    def within(self, start: int, stop: int) -> Numbers:
        """Their numbers from ``start`` up to but not with ``stop``, ascending."""
        low, high = np.searchsorted(self.listed, (start, stop))
        listed = self.listed[low:high]
        if not self.others:
            return listed
        keep = np.ones(stop - start, np.bool_)
        keep[listed - start] = False
        return np.flatnonzero(keep) + start

    def nth(self, places: Numbers) -> Numbers:
        """Numbers of the rows at some places among them, from 0."""
        if not self.others:
            return self.listed[places]
        before = np.searchsorted(self.listed - np.arange(len(self.listed)), places, side="right")
        return places + before


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of several files, in the files' order and in that of their numbers."""

    files: Sequence[FileRows]

    @property
    def count(self) -> int:
        """How many rows."""
        return sum(file.count for file in self.files)

    def draw(self, rows: int, seed: int, places: int = CLUSTERS) -> Selection:
        """Rows drawn at random: all when there are no more than ``rows`` and they lie together;
        else some from each of many places that are spread evenly over all of them, each row with
        the same chance. The same seed draws the same rows.

        Args:
            rows: how many at most; fewer come where many row groups are of a few rows, or where
                they would have more than :data:`MOST_DRAWN_BYTES`.
            seed: not negative.
            places: how many they are drawn from, at least; each costs a row group that is read.

        Raises:
            SnapshotError: a file cannot be read.
        """
        rows = min(rows, max(1, MOST_DRAWN_BYTES // self.row_bytes()))
        total, clusters = self.count, min(places, rows)
        if total <= rows and self._bytes_to_read() <= MOST_READ_BYTES:
            return self
        while True:
            drawn = self._drawn(total, clusters, rows // clusters, np.random.default_rng(seed))
            if (
                2 * drawn.count >= min(rows, total)
                or 4 * clusters > rows
                or 4 * drawn._bytes_to_read() > MOST_READ_BYTES
            ):
                return drawn
            clusters *= 4

    def at(self, places: Numbers) -> Selection:
        """The rows at some places among them: int64, from 0 and ascending."""
        ends = np.cumsum([file.count for file in self.files])
        of_file = np.searchsorted(ends, places, side="right")
        files = []
        for number in np.unique(of_file).tolist():
            file = self.files[number]
            here = places[of_file == number] - (int(ends[number]) - file.count)
            files.append(FileRows(file.path, file.rows, file.nth(here), others=False))
        return Selection(files)

    def row_bytes(self) -> int:
        """Bytes of a row in memory, about, by the footers of some files."""
        files = [file for file in self.files if file.count]
        sizes = [file_row_bytes(file.path) for file in files[:: max(1, len(files) // LOOKED_AT)]]
        return max(1, sum(sizes) // max(1, len(sizes)))

    def _bytes_to_read(self) -> float:
        """Bytes of all row groups that hold one of these rows, about."""
        read = 0.0
        for file in self.files:
            if file.count:
                rows = file.rows
                if not file.others:
                    bounds = _bounds(file.path)
                    rows = int(
                        np.diff(bounds)[
                            np.unique(np.searchsorted(bounds, file.listed, side="right") - 1)
                        ].sum()
                    )
                read += file.path.stat().st_size * rows / file.rows
        return read

    def _drawn(
        self, total: int, clusters: int, each: int, random: np.random.Generator
    ) -> Selection:
        places = ((np.arange(clusters) + random.random(clusters)) * total / clusters).astype(
            np.int64
        )
        ends = np.cumsum([file.count for file in self.files])
        chosen: list[FileRows] = []
        of_file = np.searchsorted(ends, places, side="right")
        for number in np.unique(of_file).tolist():
            file, first = self.files[number], int(ends[number]) - self.files[number].count
            bounds = _bounds(file.path)
            hit = file.nth(places[of_file == number] - first)
            groups, times = np.unique(
                np.searchsorted(bounds, hit, side="right") - 1, return_counts=True
            )
            taken = []
            for group, n in zip(groups.tolist(), times.tolist(), strict=True):
                there = file.within(int(bounds[group]), int(bounds[group + 1]))
                taken.append(
                    np.sort(random.choice(there, min(len(there), each * n), replace=False))
                )
            chosen.append(FileRows(file.path, file.rows, np.concatenate(taken), others=False))
        return Selection(chosen)

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows, a batch or more for each row group that holds any; none of no rows.

        Args:
            columns: names; all by default.

        Raises:
            SnapshotError: a file cannot be read.
        """
        for file in self.files:
            if not file.count:
                continue
            with reading_file(file.path, columns or ()) as opened:
                groups = list(_groups(file, opened))
                tables = _tables(file.path, opened, [group for group, _ in groups], columns)
                for (_, numbers), table in zip(groups, tables, strict=True):
                    chosen = (
                        table if len(numbers) == table.num_rows else table.take(pa.array(numbers))
                    )
                    yield from chosen.to_batches()

    def groups(
        self, file: int, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, int, pa.Table]]:
        """The rows row group by row group, from number ``group`` of file number ``file`` on: each
        with file and group to go on from after it.

        Raises:
            SnapshotError: a file cannot be read.
        """
        for number in range(file, len(self.files)):
            chosen = self.files[number]
            if not chosen.count:
                continue
            with reading_file(chosen.path, columns) as opened:
                for at, numbers in _groups(chosen, opened):
                    if number > file or at >= group:
                        table = opened.read_row_group(at, list(columns))
                        yield (
                            number,
                            at + 1,
                            (
                                table
                                if len(numbers) == table.num_rows
                                else table.take(pa.array(numbers))
                            ),
                        )

    def find(self, keys: pa.Array, entity: Sequence[str]) -> pa.Array:
        """Which of certain keys the rows have, as texts. Reads the key columns of all, or, where
        the key is one integer, of the row groups that may hold any by their least and greatest key.

        Args:
            keys: key texts.
            entity: names of the key columns.

        Raises:
            SnapshotError: a file cannot be read.
        """
        hits = [keys.slice(0, 0)]
        wanted = _in_order(keys) if len(entity) == 1 else None
        for file in self.files:
            if not file.count:
                continue
            with reading_file(file.path, entity) as opened:
                for group, numbers in _groups(file, opened):
                    if wanted is not None and not _may_hold(opened, group, entity[0], wanted):
                        continue
                    table = opened.read_row_group(group, list(entity))
                    if len(numbers) < table.num_rows:
                        table = table.take(pa.array(numbers))
                    hit = table.filter(_are_among(table, keys, entity))
                    if hit.num_rows:
                        hits.append(key_column(hit, entity).cast(keys.type))
        return pa.concat_arrays(hits)


def all_rows(layers: Layers) -> Selection:
    """All rows of a snapshot."""
    dead = (layers.dead.get(number, _NONE) for number in range(len(layers.paths)))
    return Selection(
        [
            FileRows(p, n, d, others=True)
            for p, n, d in zip(layers.paths, layers.rows, dead, strict=True)
        ]
    )


def rows_beside(layers: Layers, other: Layers) -> Selection:
    """The rows of one snapshot that are no rows of another: in a file the other has not, or dead
    there. The rest are the very same rows."""
    position = {path: number for number, path in enumerate(other.paths)}
    files = []
    for file in all_rows(layers).files:
        number = position.get(file.path)
        if number is None:
            files.append(file)
        else:
            gone = np.setdiff1d(other.dead.get(number, _NONE), file.listed, assume_unique=True)
            files.append(FileRows(file.path, file.rows, gone, others=False))
    return Selection(files)


def seed_of(layers: Layers) -> int:
    """A seed of a snapshot's own: the same wherever its files lie, at every call."""
    return zlib.crc32("\n".join("/".join(path.parts[-2:]) for path in layers.paths).encode())


class reading_file:
    """One Parquet file, open; what cannot be read is named.

    Args:
        path: of the file.
        columns: that are to be read of it.

    Raises:
        SnapshotError: it cannot be parsed, or lacks a column: a bit of its footer is enough for
            another name, and Parquet's readers leave out what is not there without a word.
        UnreadableError: it cannot be read now.
    """

    def __init__(self, path: Path, columns: Sequence[str] = ()) -> None:
        self._path, self._columns = path, columns

    def __enter__(self) -> pq.ParquetFile:
        try:
            self._file = pq.ParquetFile(self._path)
            lacks = set(self._columns).difference(self._file.schema_arrow.names)
        except BROKEN as exc:
            raise self._damaged(exc) from exc
        if lacks:
            self._file.close()
            raise self._damaged(pa.ArrowKeyError(f"no column {min(lacks)!r}"))
        return self._file

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        self._file.close()
        if isinstance(exc, BROKEN) and not isinstance(exc, PrecomputeError):
            raise self._damaged(exc) from exc

    def _damaged(self, exc: BaseException) -> PrecomputeError:
        return broken(self._path, exc, "its snapshot is damaged; publish another one")


def file_row_bytes(path: Path) -> int:
    """Bytes of a row of a file in memory, about: see
    :func:`precompute.store.offline.part_file.row_bytes`.

    Raises:
        SnapshotError: it cannot be read.
    """
    return row_bytes(_metadata(path))


def _metadata(path: Path) -> pq.FileMetaData:
    with reading_file(path) as opened:
        return opened.metadata


def _bounds(path: Path) -> Numbers:
    """Number of the first row of each row group, and of all rows."""
    metadata = _metadata(path)
    rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
    return np.concatenate([[0], np.cumsum(rows)])


def _tables(
    path: Path, opened: pq.ParquetFile, groups: list[int], columns: Sequence[str] | None
) -> Iterator[pa.Table]:
    """These row groups, every other one read in a thread beside: with it the gates of a 1 % delta
    of 3 M × 64 floats took 0.38 s, and 0.50 s without (two cores of an AMD Zen 5)."""
    names = None if columns is None else list(columns)
    if len(groups) < 2:
        yield from (opened.read_row_group(group, names) for group in groups)
        return
    with pq.ParquetFile(path, metadata=opened.metadata) as other, ThreadPoolExecutor(1) as beside:
        for first, *second in (groups[at : at + 2] for at in range(0, len(groups), 2)):
            ahead = [beside.submit(other.read_row_group, group, names) for group in second]
            yield opened.read_row_group(first, names)
            yield from (future.result() for future in ahead)


def _groups(file: FileRows, opened: pq.ParquetFile) -> Iterator[tuple[int, Numbers]]:
    """Row groups that hold a selected row, and which of their rows are selected, from 0."""
    first = 0
    for group in range(opened.metadata.num_row_groups):
        rows = opened.metadata.row_group(group).num_rows
        numbers = file.within(first, first + rows)
        if len(numbers):
            yield group, numbers - first
        first += rows


def _in_order(keys: pa.Array) -> Numbers | None:
    """The keys as integers, ascending; None where one is none."""
    try:
        return np.sort(np.asarray(keys.cast(pa.int64())))
    except pa.ArrowInvalid:
        return None


def _may_hold(opened: pq.ParquetFile, group: int, column: str, wanted: Numbers) -> bool:
    """Whether any of some integers lies between the least and the greatest of a row group's key;
    also where that is not known."""
    metadata = opened.metadata.row_group(group)
    chunks = (metadata.column(number) for number in range(metadata.num_columns))
    statistics = next(
        (chunk.statistics for chunk in chunks if chunk.path_in_schema == column), None
    )
    if statistics is None or not statistics.has_min_max or not isinstance(statistics.min, int):
        return True
    return bool(
        np.searchsorted(wanted, statistics.min)
        < np.searchsorted(wanted, statistics.max, side="right")
    )


def _are_among(
    table: pa.Table, keys: pa.Array, entity: Sequence[str]
) -> pa.ChunkedArray | pa.Array:
    column = table.column(entity[0])
    if len(entity) > 1:
        return pc.is_in(key_column(table, entity), keys)
    if pa.types.is_integer(column.type):
        # Keys of a time when they were text.
        with contextlib.suppress(pa.ArrowInvalid):
            # A third of the time of comparing texts.
            return pc.is_in(column, keys.cast(column.type))
    return pc.is_in(key_column(table, entity), keys)
