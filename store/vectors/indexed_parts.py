"""Indexed parts: which rows of which files a base was built of, so that the number of each in the
index follows from its file and its number there; and what a base, and an index of changed rows, are
called."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from precompute.store.disk.record import FORMAT, digest_of
from precompute.store.feature_view import FeatureView
from precompute.store.vectors.index_files import ListedSegment, RowNumbers
from precompute.store.vectors.index_rows import filterable, read_table, write_table

_NAME = re.compile(r"\d+-[0-9a-f]{16}-(base|changed)-(\d+)")
_NONE: RowNumbers = np.empty(0, np.int64)


class IndexedPart(NamedTuple):
    """A file of a list of segments: its path as records name it, its SHA-256 (hex), how many rows
    it has, and the numbers of those that are no rows of the list, ascending. ``null`` are places
    among the rest, from 0 and ascending, of the rows without a vector: known once a base is
    built."""

    path: str
    sha256: str
    rows: int
    dead: RowNumbers = _NONE
    null: RowNumbers = _NONE

    @property
    def living(self) -> int:
        """How many of its rows are rows of the list."""
        return self.rows - len(self.dead)

    def indexed(self, rows: RowNumbers) -> RowNumbers:
        """Places of some of its living rows among those that the index has of it.

        Args:
            rows: numbers in the file, ascending; those without a vector are left out.
        """
        places = rows - np.searchsorted(self.dead, rows)
        before = np.searchsorted(self.null, places)
        here = np.append(self.null, -1)[before] != places
        found: RowNumbers = (places - before)[here]
        return found


class IndexedList(NamedTuple):
    """The list of segments that an index is of; ``parts`` in the order in which its rows come.
    ``space`` is the digest of what else its content follows from: see :func:`space_of`."""

    space: str = ""
    segments: tuple[ListedSegment, ...] = ()
    parts: Sequence[IndexedPart] = ()


def space_of(view: FeatureView, model: str) -> str:
    """Digest of what an index follows from besides the rows: an index of one list of segments in
    one space is as good as another."""
    spec = view.index
    assert spec is not None
    scalars = {name: str(kind) for name, kind in filterable(view).items()}
    vector = str(view.feature(spec.on).arrow_type)
    of = [model, list(view.entity), spec.on, vector, spec.metric, spec.recall_at_10, scalars]
    return digest_of(json.dumps(of).encode())


def base_name(listed: IndexedList) -> str:
    """Name of the folder of the base of a list: the number of its newest segment, a digest, and the
    format."""
    return _named(listed, "base", "")


def changed_name(listed: IndexedList, base: str) -> str:
    """Name of the folder of the rows of a list that a base has not."""
    return _named(listed, "changed", base)


def _named(listed: IndexedList, kind: str, base: str) -> str:
    number = max((int(one.name.partition("-")[0]) for one in listed.segments), default=0)
    of = [base, listed.space, [[one.name, one.sha256] for one in listed.segments]]
    return f"{number}-{digest_of(json.dumps(of).encode())[:16]}-{kind}-{FORMAT}"


def is_index(name: str, *, other: bool = False) -> bool:
    """Whether a folder's name is that of an index of this format, or of an ``other`` one."""
    named = _NAME.fullmatch(name)
    return named is not None and (int(named[2]) != FORMAT) == other


def is_base(name: str) -> bool:
    """Whether a folder's name is that of a base of this format."""
    return is_index(name) and "-base-" in name


def write_parts(path: Path, parts: Sequence[IndexedPart], null: RowNumbers) -> None:
    """Write the parts of a base.

    Args:
        path: of the file.
        parts: in the order in which their rows came.
        null: which of the rows that came had no vector, from 0 and ascending.
    """
    first = np.cumsum([0, *(part.living for part in parts)])
    ends = np.searchsorted(null, first)
    nulls = [null[ends[n] : ends[n + 1]] - first[n] for n in range(len(parts))]
    columns = {
        "path": pa.array([part.path for part in parts], pa.string()),
        "sha256": pa.array([part.sha256 for part in parts], pa.string()),
        "rows": pa.array([part.rows for part in parts], pa.int64()),
        "dead": _lists([part.dead for part in parts]),
        "null": _lists(nulls),
    }
    write_table(path, pa.table(columns))


def read_parts(path: Path) -> list[IndexedPart]:
    """What :func:`write_parts` wrote; it was compared with its checksum.

    Raises:
        OSError, ValueError, KeyError: it cannot be read as such.
    """
    table = read_table(path).combine_chunks()
    lists = [_arrays(table.column(name)) for name in ("dead", "null")]
    texts = [table.column(name).to_pylist() for name in ("path", "sha256", "rows")]
    return [IndexedPart(*values) for values in zip(*texts, *lists, strict=True)]


def index_rows(parts: Sequence[IndexedPart], wanted: Mapping[int, RowNumbers]) -> RowNumbers:
    """Numbers in the index, ascending, of rows of its parts.

    Args:
        parts: of the base.
        wanted: position of a part → numbers of living rows in the file, ascending; those without a
            vector are left out.
    """
    first = np.cumsum([0, *(part.living - len(part.null) for part in parts)])
    found = [parts[n].indexed(rows) + first[n] for n, rows in sorted(wanted.items())]
    return np.concatenate([_NONE, *found])


def _lists(rows: Iterable[RowNumbers]) -> pa.Array:
    each = list(rows)
    offsets = np.cumsum([0, *map(len, each)])
    values = np.concatenate([_NONE, *each])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))


def _arrays(column: pa.ChunkedArray) -> list[RowNumbers]:
    return [np.asarray(value.values) for chunk in column.chunks for value in chunk]
