"""Loader: loads one segment into the online store, in large batches, and reads some of it back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from precompute.engine.ahead import Ahead, StageTime
from precompute.jobs.run.command_process import Progress
from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.lease import Lease
from precompute.store.errors import OnlineStoreError, PrecomputeError
from precompute.store.offline.runs import Report
from precompute.store.offline.segment import Segment
from precompute.store.offline.selection import reading_file
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.online import online_store
from precompute.store.online.codec import RowCodec
from precompute.store.online.kernels import RowBatch, Rows, hash_of, hashes
from precompute.store.online.online_store import OnlineStore
from precompute.store.online.row_values import is_variable

LOAD_BATCH_ROWS = 8192
"""Rows that are read from Parquet and encoded at a time, at most: see
:data:`precompute.store.offline.view_store.BATCH_BYTES`."""
VERIFY_ROWS = 2048
"""Rows that are read back from the online store before the flip, and compared, about: their keys
and hashes are held meanwhile, a few hundred bytes of each."""
VERIFY_BYTES = 8 * 2**20
"""Bytes of those that are read back at a time, about; one row may have more."""
KEY_BYTES = 16
"""Bytes of an entity key, for the estimate of a load's size."""
AHEAD_BYTES = 64 * 2**20
"""Encoded rows that may be ready while the store takes those before them: an eighth of
``memory_mb``, where that is less."""


class _Sampled(NamedTuple):
    """A loaded row, to be read back."""

    key: bytes
    size_bytes: int
    hash: int
    """xxh3_64 of the packed row."""


class Loader:
    """Loads segments of one view.

    Args:
        store: of the view; the snapshots are there.
        online: where they go.
        report: stage times are added to it.
        progress: called with every batch.
        owner: identity of the root that the view is loaded for; empty where another one is taken
            over.
        lease: held by the publisher; checked before rows are sent.
        memory_mb: an eighth of it, at most, is kept of rows that are encoded ahead.
    """

    def __init__(
        self,
        store: ViewStore,
        online: OnlineStore,
        report: Report,
        progress: Progress,
        owner: str,
        lease: Lease,
        memory_mb: int = 1024,
    ) -> None:
        self._lease = lease
        self._store = store
        self._online = online
        self._report = report
        self._progress = progress
        self._owner = owner
        self._ahead_bytes = min(AHEAD_BYTES, memory_mb * 2**20 // 8)

    def load(self, snapshot: Snapshot, at: int) -> None:
        """Load the segment of a snapshot whose place in its list is ``at``, beside what is live;
        its files are compared with their checksums first, and some of its rows are read back.

        Raises:
            SnapshotError: a file is damaged.
            OnlineStoreError: the store refused, or returned other bytes than were loaded.
            ConflictError: as :meth:`OnlineStore.prepare`.
            FencedError: the lease was lost.
        """
        report, store, segment = self._report, self._store, snapshot.segments[at]
        into = online_segment(snapshot, at)
        with report.stage("check"):
            store.check_parts(snapshot, [segment])
        done = self._prepare(into, snapshot, segment)
        self._lease.check()
        with report.stage("load"):
            sample = self._load_rows(into, snapshot, segment, done)
            crashpoint("online.load")
        try:
            with report.stage("verify"):
                self._verify(into, sample)
                crashpoint("online.verify")
        except PrecomputeError:
            # a segment that was not verified must not be there for a later run to use
            with contextlib.suppress(PrecomputeError):
                self._online.drop(store.name, into.name)
            raise

    def _prepare(self, into: online_store.Segment, snapshot: Snapshot, segment: Segment) -> int:
        """Ask the store before anything moves; returns how many of the first rows an unfinished
        load has left there."""
        row_bytes, rows = RowCodec(snapshot.view).fixed_bytes, segment.entries
        size_bytes = int(rows * (row_bytes + KEY_BYTES + self._variable_bytes(snapshot, segment)))
        of_one_width = not any(map(is_variable, snapshot.view.features))
        return self._online.prepare(
            self._store.name,
            into,
            rows,
            size_bytes,
            self._owner,
            row_bytes if of_one_width else None,
        )

    def _variable_bytes(self, snapshot: Snapshot, segment: Segment) -> float:
        """Bytes that the strings and lists of a row take, about, from the footers of the parts."""
        names = {f.name for f in snapshot.view.features if is_variable(f)}
        size_bytes = rows = 0
        for part in segment.parts if names else ():
            with reading_file(self._store.checked_path(snapshot, part)) as opened:
                metadata = opened.metadata
                rows += metadata.num_rows
                for group in map(metadata.row_group, range(metadata.num_row_groups)):
                    columns = map(group.column, range(group.num_columns))
                    size_bytes += sum(
                        c.total_uncompressed_size
                        for c in columns
                        if c.path_in_schema.partition(".")[0] in names
                    )
        return size_bytes / max(1, rows)

    def _load_rows(
        self, into: online_store.Segment, snapshot: Snapshot, segment: Segment, rows_done: int
    ) -> list[_Sampled]:
        """Load all rows; returns some of them, to be read back."""
        name, online, total = self._store.name, self._online, segment.entries
        sample = list[_Sampled]()
        step = max(1, total // VERIFY_ROWS)

        def sampled() -> Iterator[RowBatch]:
            # rows that an interrupted load had loaded are sampled, too
            for batch in self._row_batches(snapshot, segment):
                for i in range(0, len(batch), step):
                    row = batch.rows.at(i)
                    sample.append(_Sampled(batch.keys.at(i), len(row), hash_of(row)))
                yield batch

        batches, sent_bytes = _from_row(sampled(), rows_done), 0
        ahead = Ahead(
            "publish",
            batches,
            StageTime(),
            lambda batch: batch.keys.size_bytes + batch.rows.size_bytes,
            self._ahead_bytes,
        )

        def with_progress() -> Rows:
            nonlocal sent_bytes
            for batch in ahead:
                yield batch
                sent_bytes += batch.keys.size_bytes + batch.rows.size_bytes
                self._progress.advance(len(batch))

        self._progress.begin(f"publish {name}", total)
        try:
            count = online.load(name, into, with_progress(), rows_done)
        finally:
            ahead.close()
            self._progress.end()
        if count != total:
            with contextlib.suppress(PrecomputeError):
                online.drop(name, into.name)
            raise OnlineStoreError(
                f"the online store holds {count} of {total} rows of view {name!r} after loading; is"
                " it evicting keys? Nothing was published"
            )
        usage, files = self._report.usage, online.file_checks(name, [into.name])
        usage.upper_only = into.upper and (usage.upper_only or not usage.loaded_rows)
        usage.loaded_rows += total
        usage.loaded_bytes += sum(file.size_bytes for file in files) or sent_bytes
        return sample

    def _row_batches(self, snapshot: Snapshot, segment: Segment) -> Iterator[RowBatch]:
        codec = RowCodec(snapshot.view)
        batches = self._store.segment_batches(snapshot, segment, batch_rows=LOAD_BATCH_ROWS)
        for batch in batches:
            yield codec.row_batch(batch, snapshot.view.entity, segment.number)
        removed = self._store.removed_keys(snapshot, segment)
        if len(removed):
            # of no time, so that whoever loads it sends the same bytes; and last, since a store may
            # take it from the first row what most have in common
            yield codec.tombstones(removed, 0, segment.number)

    def _verify(self, into: online_store.Segment, sample: list[_Sampled]) -> None:
        view = self._store.name
        ends = np.cumsum([row.size_bytes for row in sample])
        start = 0
        while start < len(sample):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + VERIFY_BYTES, side="right")))
            part = sample[start : min(stop, start + 1000)]
            found = self._online.read_segments(view, [into.name], [row.key for row in part])
            same = (found.packed.sizes == [row.size_bytes for row in part]) & (
                hashes(found.packed) == np.array([row.hash for row in part], np.uint64)
            )
            for i in np.flatnonzero(~same).tolist():
                what = "is missing" if found.values[i] is None else "has other bytes"
                raise OnlineStoreError(
                    f"read back from the online store, key {part[i].key.decode()!r} of view"
                    f" {view!r} {what}; nothing was published"
                )
            start += len(part)


def online_segment(snapshot: Snapshot, at: int) -> online_store.Segment:
    """The segment of a snapshot as the online store has it."""
    segment = snapshot.segments[at]
    return online_store.Segment(segment.number, segment.sha256, at > 0)


def _from_row(batches: Iterator[RowBatch], first: int) -> Iterator[RowBatch]:
    """The batches without their first ``first`` rows."""
    for batch in batches:
        if first >= len(batch):
            first -= len(batch)
        elif first:
            rest = slice(first, None)
            yield RowBatch(
                batch.keys.slice(first, len(batch)),
                batch.rows.slice(first, len(batch)),
                batch.hashes[rest],
            )
            first = 0
        else:
            yield batch
