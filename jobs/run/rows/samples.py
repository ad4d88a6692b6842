"""Samples: beside each part of rows that is not small a file with those of its rows whose key hash
is below a threshold, from which all figures of a snapshot are made but those that are counted one
by one.

Which rows a snapshot's sample has follows from their keys alone, so that a run in one go and one of
deltas have the same, and two snapshots' have their keys in common. Nothing but a sample is read,
however many rows a run replaced.
"""

from __future__ import annotations

import base64
import logging
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.disk.record import replace
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import SCALAR_TYPES, FeatureView
from precompute.store.keys import key_column
from precompute.store.offline.odd_rows import Numbers, odd_rows
from precompute.store.offline.part_file import ROW_GROUP_BYTES, Layers, row_bytes
from precompute.store.offline.segment import ALL_HASHES, Part
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.stored_file import parsing
from precompute.store.offline.view_store import BATCH_BYTES, ViewStore
from precompute.store.online.kernels import Packed, hashes
from precompute.store.online.row_values import packed_strings

log = logging.getLogger(__name__)

SAMPLE_ROWS = 65_536
"""Rows of a sample that are to be living, of narrow rows: a share of them is within 0.2 % of that
of all, as a standard deviation."""
WIDE_ROWS = 8_192
"""As many of wide rows, of which :data:`SAMPLE_ROWS` would have more than :data:`SAMPLE_BYTES`:
within 0.55 %."""
SAMPLE_BYTES = 2 * 2**20
"""Bytes of more rows than :data:`WIDE_ROWS`."""
MOST_SAMPLE_BYTES = 32 * 2**20
"""Bytes of any sample: 8,192 rows of 4 kB, and fewer of longer ones."""
MOST_TEXT_BYTES = 8 * 2**20
"""Bytes of its texts and lists, whose lengths nobody declares: they are held several times while
they are counted."""
TEXT_BYTES, OTHER_BYTES = 32, 24
"""What a text counts for in a row, and key, time and hash. That the rows of a sample follow from
what the view declares, and not from what is measured of parts, is why they are the same on every
machine, however fast it fills a part."""

_FILE = 2**40
_ROW = "_row"
"""Column of a sample: the number of the row in its part. No feature's name begins so."""
_ODD = "precompute.odd_rows."
"""What the names of a sample's notes begin with: see :func:`_noted`."""

Hashes = npt.NDArray[np.uint64]


def threshold(view: FeatureView, rows: int) -> int:
    """Below which hash the sampled keys of a snapshot lie whose source has so many rows."""
    width = OTHER_BYTES
    for f in view.features:
        each = TEXT_BYTES if f.dtype == "string" else SCALAR_TYPES[f.dtype].bit_width / 8
        width += math.ceil(each * (f.dim or f.max_items or 1))
    wide = min(WIDE_ROWS, MOST_SAMPLE_BYTES // width)
    wanted = min(SAMPLE_ROWS, max(SAMPLE_BYTES // width, wide, 1))
    return min(ALL_HASHES, wanted * ALL_HASHES // max(1, rows))


def key_hashes(rows: pa.Table, entity: Sequence[str]) -> Hashes:
    """The hash of each row's key, uint64 [rows]: xxh3_64 of an integer's eight bytes, which takes a
    tenth of what its text does, else of the key's text."""
    pieces = [np.empty(0, np.uint64)]
    for batch in rows.select(list(entity)).to_batches(65_536):
        column = batch.column(0)
        if len(entity) == 1 and pa.types.is_integer(column.type) and not column.null_count:
            numbers = np.ascontiguousarray(column, "<i8").view(np.uint8)
            packed = Packed(numbers, np.arange(0, 8 * len(column) + 8, 8))
        else:
            packed = packed_strings(key_column(batch, entity).cast(pa.string()))
        pieces.append(hashes(packed))
    return np.concatenate(pieces)


def write_rows(
    store: ViewStore, run: str, name: str, table: pa.Table, view: FeatureView, rows: int
) -> Part:
    """Write a part of rows, and its sample beside it. A part of no more bytes than one row group
    has none, nor has one half of whose bytes would be in it: these are read themselves, which costs
    about as much and no second file.

    Args:
        store: of the view.
        run: id of the run.
        name: of the part's file.
        table: the rows.
        view: declares key and features.
        rows: how many rows the source has: by it the threshold is that of all parts of a run, and
            all samples together have as many rows as they are to have.

    Raises:
        SnapshotError: the file system failed.
    """
    below = threshold(view, rows)
    part = replace(store.write_part(run, name, table), below=below)
    if table.nbytes <= ROW_GROUP_BYTES:
        return part
    hashed = key_hashes(table, view.entity)
    numbers = np.flatnonzero(hashed < below)
    pieces, first = [], 0
    for batch in table.to_batches():
        # not of the table, whose vectors it would first put together
        low, high = np.searchsorted(numbers, (first, first + batch.num_rows))
        pieces.append(batch.take(pa.array(numbers[low:high] - first)))
        first += batch.num_rows
    rows_of = pa.Table.from_batches(pieces)
    # fewer where texts are long
    drawn = _Drawn.together([_Drawn(rows_of, hashed[numbers], numbers, below)])
    if 2 * drawn.rows.nbytes > table.nbytes:
        return part
    taken = drawn.rows.append_column(_ROW, pa.array(drawn.places))
    odd = odd_rows(table, view)
    notes = {_ODD + kind: _noted(of_kind, table.num_rows) for kind, of_kind in odd.items()}
    sample = store.write_part(run, f"sample-{name}", taken, notes)
    return replace(part, sample=sample, below=drawn.below)


def _noted(numbers: Numbers, rows: int) -> str:
    """Numbers of rows as text: a bit for each row of the part, deflated."""
    bits = np.zeros(rows, np.bool_)
    bits[numbers] = True
    return base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 1)).decode()


def _read_notes(notes: Mapping[bytes, bytes]) -> dict[str, Numbers]:
    """Kind → numbers of the odd rows that a sample's footer notes."""
    return {
        name.decode().removeprefix(_ODD): np.flatnonzero(
            np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8))
        )
        for name, text in notes.items()
        if name.startswith(_ODD.encode())
    }


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Rows whose key hash is less than ``below``, with their ``hashes`` and ``places``, int64
    [rows]: number of the file × :data:`_FILE` + number of the row there."""

    rows: pa.Table
    hashes: Hashes
    places: Numbers
    below: int

    def take(self, positions: Numbers) -> _Drawn:
        """Some of them."""
        rows = self.rows.take(pa.array(positions))
        return _Drawn(rows, self.hashes[positions], self.places[positions], self.below)

    def within(self, below: int) -> _Drawn:
        """Those whose hash is less."""
        if below >= self.below:
            return self
        kept = self.take(np.flatnonzero(self.hashes < below))
        return _Drawn(kept.rows, kept.hashes, kept.places, below)

    @classmethod
    def together(cls, pieces: Sequence[_Drawn]) -> _Drawn:
        """All of several that the least threshold leaves, or fewer: no more rows than twice what a
        sample is to have, and no more bytes of texts."""
        below = min(one.below for one in pieces)
        while True:
            pieces = [one.within(below) for one in pieces]
            rows = pa.concat_tables([one.rows for one in pieces])
            texts = sum(c.nbytes for c in rows.columns if not _is_of_one_width(c.type))
            if rows.num_rows <= 2 * SAMPLE_ROWS and texts <= MOST_TEXT_BYTES:
                break
            below //= 2
        keys, places = ([getattr(one, name) for one in pieces] for name in ("hashes", "places"))
        return cls(rows, np.concatenate(keys), np.concatenate(places), below)


_PartSample = tuple[_Drawn, Mapping[str, Numbers]]


@dataclass(frozen=True, slots=True)
class SnapshotSample:
    """The living rows of a snapshot whose key hash is less than ``below``, all columns, in the
    order of their ``hashes``.

    Two samples of one :class:`Samples` have the very same row where ``places`` are equal, int64
    [rows]. ``living`` counts all living rows, ``odd`` those of each kind of
    :mod:`precompute.store.offline.odd_rows`.
    """

    rows: pa.Table
    hashes: Hashes
    places: Numbers
    below: int
    living: int
    odd: Mapping[str, int]

    def comparable(self, other: SnapshotSample, entity: Sequence[str]) -> Numbers | None:
        """Positions of its rows whose keys the other has, if its snapshot does; None where that
        cannot be told, keys being integers in one and texts in the other, which have other hashes.
        """
        if self.below == other.below == ALL_HASHES:
            return np.arange(self.rows.num_rows)
        kinds = (one.rows.select(list(entity)).schema.types for one in (self, other))
        return np.flatnonzero(self.hashes < other.below) if len({*map(tuple, kinds)}) == 1 else None


class Samples:
    """Reads the samples of a view's snapshots, each file once.

    Args:
        store: of the view.

    Raises:
        SnapshotError: from every method: a part, or a file of kills, is missing or damaged.
    """

    def __init__(self, store: ViewStore) -> None:
        self._store = store
        self._read: dict[str, _PartSample] = {}
        """Path of a part → its sample, and kind → numbers of all its odd rows; dead ones too."""
        self._places: dict[str, int] = {}

    def of(self, snapshot: Snapshot, most: int = ALL_HASHES) -> SnapshotSample:
        """The sample of a snapshot, committed or not: of the least threshold of its parts', and of
        ``most`` where that is less."""
        try:
            return self._of(snapshot, most)
        except (pa.ArrowException, KeyError) as exc:
            # a bit of a file's footer is enough for another name
            raise SnapshotError(
                f"the files of snapshot {snapshot.number} of {self._store.name!r} have not the same"
                f" columns ({exc}): it is damaged; publish another one"
            ) from exc

    def _of(self, snapshot: Snapshot, most: int) -> SnapshotSample:
        layers, entity = self._store.layers(snapshot), snapshot.view.entity
        nothing = self._store.schema(snapshot).empty_table()
        dead_of = [layers.dead.get(n, np.empty(0, np.int64)) for n in range(len(layers.paths))]
        living = [n for n, part in enumerate(snapshot.parts) if len(dead_of[n]) < part.rows]
        # parts that were written otherwise have no threshold
        below = threshold(snapshot.view, snapshot.counts.source)
        below = min([below, most, *(snapshot.parts[n].below for n in living)])
        pieces = [_Drawn(nothing, key_hashes(nothing, entity), np.empty(0, np.int64), below)]
        total, odd, size_bytes = 0, dict[str, int](), 0
        for number in living:
            part, dead = snapshot.parts[number], dead_of[number]
            drawn, odd_there = self._part(snapshot, part, layers.paths[number], pieces[0].below)
            pieces.append(drawn.take(_living(drawn.places % _FILE, dead)))
            size_bytes += pieces[-1].rows.nbytes
            if size_bytes > MOST_SAMPLE_BYTES:
                pieces = [_Drawn.together(pieces)]
                size_bytes = pieces[0].rows.nbytes
                self._keep_less(pieces[0].below)
            total += part.rows - len(dead)
            for kind, numbers in odd_there.items():
                odd[kind] = odd.get(kind, 0) + len(_living(numbers, dead))
        drawn = _Drawn.together(pieces)
        drawn = drawn.take(np.argsort(drawn.hashes, kind="stable"))
        return SnapshotSample(drawn.rows, drawn.hashes, drawn.places, drawn.below, total, odd)

    def _keep_less(self, below: int) -> None:
        """Keep no more of the parts that were read than another snapshot may want, whose threshold
        is about the same."""
        for path, (drawn, odd) in self._read.items():
            self._read[path] = drawn.within(min(2 * below, drawn.below)), odd

    def are_of(self, sample: SnapshotSample, paths: Collection[str]) -> npt.NDArray[np.bool_]:
        """Which rows of a sample lie in parts of these paths, bool [rows]."""
        places = [place // _FILE for path, place in self._places.items() if path in paths]
        return np.isin(sample.places // _FILE, places)

    def layers(self, snapshot: Snapshot) -> Layers:
        """As :meth:`ViewStore.layers`."""
        return self._store.layers(snapshot)

    def _part(self, snapshot: Snapshot, part: Part, path: Path, below: int) -> _PartSample:
        """Of a part's sample what lies below a threshold, or a little more; it is read of the part
        itself where there is no sample, or it is lost."""
        known = self._read.get(part.path)
        if known is None or known[0].below < min(below, part.below):
            # the other snapshot's threshold is about the same, as a rule
            most = min(2 * below, part.below)
            place = self._places.setdefault(part.path, _FILE * len(self._places))
            try:
                sample = None if part.sample is None else self._store.file(part.sample)
            except SnapshotError as exc:
                log.warning("%s; its part is read in its stead", exc)
                sample = None
            if sample is not None:
                drawn, odd = self._of_file(snapshot, sample, place, part.below)
                found = drawn.within(most), odd
            else:
                self._store.whole_path(snapshot, part)
                found = self._of_part(snapshot, path, place, most)
            self._read[part.path] = found
        return self._read[part.path]

    def _of_file(self, snapshot: Snapshot, path: Path, place: int, below: int) -> _PartSample:
        with parsing(path), pq.ParquetFile(path) as file:
            rows, odd = file.read(), _read_notes(file.metadata.metadata or {})
        numbers, rows = np.asarray(rows.column(_ROW)), rows.drop_columns([_ROW])
        return _Drawn(rows, key_hashes(rows, snapshot.view.entity), place + numbers, below), odd

    def _of_part(self, snapshot: Snapshot, path: Path, place: int, below: int) -> _PartSample:
        view, first = snapshot.view, 0
        drawn: _Drawn | None = None
        odd: dict[str, list[Numbers]] = {}
        with parsing(path), pq.ParquetFile(path) as file:
            most = max(1, min(8192, BATCH_BYTES // row_bytes(file.metadata)))
            for batch in file.iter_batches(most):
                rows = pa.Table.from_batches([batch])
                places = place + np.arange(first, first + batch.num_rows)
                here = _Drawn(rows, key_hashes(rows, view.entity), places, ALL_HASHES).within(below)
                drawn = here if drawn is None else _Drawn.together([drawn, here])
                for kind, found in odd_rows(batch, view).items():
                    odd.setdefault(kind, []).append(found + first)
                first += batch.num_rows
        assert drawn is not None
        return drawn, {kind: np.concatenate(found) for kind, found in odd.items()}


def _is_of_one_width(kind: pa.DataType) -> bool:
    return bool(pa.types.is_primitive(kind) or pa.types.is_fixed_size_list(kind))


def _living(numbers: Numbers, dead: Numbers) -> Numbers:
    """Positions of the numbers that are none of ``dead``, which are ascending."""
    if not len(dead):
        return np.arange(len(numbers))
    at = np.searchsorted(dead, numbers).clip(max=len(dead) - 1)
    return np.flatnonzero(dead[at] != numbers)
