"""Layers: the files of a snapshot and of all it builds on, and which of their rows are dead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from store.disk.durable_file import limit_of
from store.errors import SnapshotError


@dataclass(frozen=True, slots=True)
class Layers:
    """All Parquet files of a snapshot, its ancestors' first, and the rows of them that are no rows of it.

    ``rows`` are those of each file in ``paths``, the dead ones too; ``dead`` maps a file's position there to the numbers of its dead rows,
    ascending int64.
    """

    paths: list[Path]
    rows: list[int]
    dead: Mapping[int, npt.NDArray[np.int64]]


def dead_rows(parts: Sequence[str], deletes: Sequence[Path]) -> dict[int, npt.NDArray[np.int64]]:
    """Position of a part → numbers of its dead rows, ascending int64.

    Args:
        parts: paths as manifests name them.
        deletes: ``deletes.parquet`` of the chain.

    Raises:
        SnapshotError: a file cannot be read, or names another part.
    """
    position = {path: number for number, path in enumerate(parts)}
    gathered: dict[int, list[npt.NDArray[np.int64]]] = {}
    for path in deletes:
        try:
            # not read_table, which imports pyarrow.dataset: 20 to 40 ms
            with pq.ParquetFile(path) as file:
                table = file.read(["part", "row"])
        except (pa.ArrowException, OSError) as exc:
            raise SnapshotError(f"{path} cannot be read ({exc}): {limit_of(exc) or 'publish another snapshot'}") from exc
        names = table.column("part").combine_chunks().dictionary_encode()
        codes, rows = np.asarray(names.indices), np.asarray(table.column("row"))
        for code, name in enumerate(names.dictionary.to_pylist()):
            if name not in position:
                raise SnapshotError(f"{path} names part {name}, which no manifest of its chain does; publish another snapshot")
            gathered.setdefault(position[name], []).append(rows[codes == code])
    return {number: np.unique(np.concatenate(pieces)) for number, pieces in gathered.items()}


def living(batches: Iterator[pa.RecordBatch], dead: npt.NDArray[np.int64] | None) -> Iterator[pa.RecordBatch]:
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
