"""Layers: the files of a snapshot and of all it builds on, and which of their rows are dead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.disk.durable_file import limit_of
from precompute.store.errors import SnapshotError

Numbers = npt.NDArray[np.int64]

MOST_OVERLAYS = 4
"""Over a base: a reader asks each of them, and of fewer every change is copied more often. By this rule each row of 50 deltas of the same size is written 3.2 times, with 3
overlays 4.7 times, with 5 2.5 times."""


def layers_that_stay(weights: Sequence[int], new: int, most: int = MOST_OVERLAYS) -> int:
    """How many of the layers over a base stay as they are when one is added; the others are merged with it. Nothing is, until there are
    ``most``; then the highest are, and each under them that is no heavier than those together: so that a row is copied about as often as it takes
    its layer to double.

    Args:
        weights: rows of each layer, about, the lowest first.
        new: of the one that is added.
        most: layers over a base.
    """
    stay = len(weights)
    if stay >= most:
        while stay and (stay >= most or weights[stay - 1] <= new):
            stay -= 1
            new += weights[stay]
    return stay


@dataclass(frozen=True, slots=True)
class Layers:
    """All Parquet files of a snapshot, its ancestors' first, and the rows of them that are no rows of it.

    ``rows`` are those of each file in ``paths``, the dead ones too; ``dead`` maps a file's position there to the numbers of its dead rows,
    ascending int64.
    """

    paths: list[Path]
    rows: list[int]
    dead: Mapping[int, Numbers]


Deletes = Mapping[str, Numbers]
"""Path of a part, as manifests name it → numbers of its rows that a ``deletes.parquet`` names."""


def read_deletes(path: Path) -> Deletes:
    """Which rows of which parts a ``deletes.parquet`` names.

    Raises:
        SnapshotError: it cannot be read.
    """
    try:
        # not read_table, which imports pyarrow.dataset: 20 to 40 ms
        with pq.ParquetFile(path) as file:
            table = file.read(["part", "row"])
    except (pa.ArrowException, OSError) as exc:
        raise SnapshotError(f"{path} cannot be read ({exc}): {limit_of(exc) or 'publish another snapshot'}") from exc
    names = table.column("part").combine_chunks().dictionary_encode()
    codes, rows = np.asarray(names.indices), np.asarray(table.column("row"))
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(names.dictionary)))
    return dict(zip(names.dictionary.to_pylist(), np.split(rows[order], ends[:-1]), strict=True))


def dead_rows(
    parts: Sequence[str], deletes: Sequence[Path], read: Callable[[Path], Deletes] = read_deletes
) -> dict[int, Numbers]:
    """Position of a part → numbers of its dead rows, ascending int64.

    Args:
        parts: paths as manifests name them.
        deletes: ``deletes.parquet`` of the chain.
        read: as :func:`read_deletes`; one that remembers saves reading what chains share.

    Raises:
        SnapshotError: a file cannot be read, or names another part.
    """
    position = {path: number for number, path in enumerate(parts)}
    gathered: dict[int, list[Numbers]] = {}
    for path in deletes:
        for name, rows in read(path).items():
            if name not in position:
                raise SnapshotError(f"{path} names part {name}, which no manifest of its chain does; publish another snapshot")
            gathered.setdefault(position[name], []).append(rows)
    return {number: _ascending(np.concatenate(pieces)) for number, pieces in gathered.items()}


def _ascending(rows: Numbers) -> Numbers:
    """Each of ``rows`` once, in order. Those of a file are in order as a rule, so that a merge is quicker than the table that ``np.unique`` makes."""
    rows = np.sort(rows, kind="stable")
    once: Numbers = rows[np.concatenate(([True], rows[1:] != rows[:-1]))] if len(rows) else rows
    once.flags.writeable = False
    return once


def living(batches: Iterator[pa.RecordBatch], dead: Numbers | None) -> Iterator[pa.RecordBatch]:
    """``batches`` of one part without its dead rows."""
    if dead is None:
        yield from batches
        return
    first = 0
    for batch in batches:
        start, stop = np.searchsorted(dead, (first, first + batch.num_rows))
        if stop == start:
            yield batch
        elif stop - start < batch.num_rows:
            keep = np.ones(batch.num_rows, np.bool_)
            keep[dead[start:stop] - first] = False
            yield batch.filter(pa.array(keep))
        first += batch.num_rows
