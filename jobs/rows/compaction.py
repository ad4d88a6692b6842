"""Compaction: the rows of a chain copied into parts of their own, so that the result stands alone; nothing is computed."""

from __future__ import annotations

import pyarrow as pa

from jobs.process.job import Job
from jobs.rows import chunks
from jobs.rows.open_view import OpenView
from store.offline.row_figures import RowCounter, RowFigures
from store.offline.snapshot import Part, Snapshot
from store.record import replace


def compacted(job: Job, opened: OpenView, delta: Snapshot) -> Snapshot:
    """The same rows as a delta that is not committed yet, as a full snapshot.

    Raises:
        SnapshotError: a file of the chain is missing or damaged, or the file system failed.
    """
    copies = _Copies(job, delta)
    for batch in job.store.batches(delta):
        copies.add(batch)
    copies.write()
    if not copies.parts:
        copies.parts.append(job.store.write_part(job.report.run, "compact-00000.parquet", chunks.no_rows(opened)))
    chain = job.store.chain(delta)[:-1]
    bases = tuple(sorted({layer.number for layer in chain} | {number for layer in chain for number in layer.bases}))
    alone = replace(delta, kind="full", parent=None, bases=bases, parts=tuple(copies.parts), deletes=None, own_deletes=0)
    return replace(alone, figures=copies.figures)


class _Copies:
    """Rows gathered to parts of about :data:`jobs.rows.chunks.PART_BYTES`."""

    def __init__(self, job: Job, snapshot: Snapshot) -> None:
        self._job, self._snapshot = job, snapshot
        self.parts: list[Part] = []
        self.figures = RowFigures()
        self._gathered: list[pa.RecordBatch] = []
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self._gathered.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= chunks.PART_BYTES:
            self.write()

    def write(self) -> None:
        if not self._gathered:
            return
        counter, name = RowCounter(self._snapshot.view), f"compact-{len(self.parts):05d}.parquet"
        for batch in self._gathered:
            counter.add(batch)
        self.figures = self.figures.plus(counter.figures())
        table = pa.Table.from_batches(self._gathered)
        self.parts.append(self._job.store.write_part(self._job.report.run, name, table, counter.rare()))
        self._gathered, self._bytes = [], 0
