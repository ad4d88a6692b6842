"""Materialize: compute a feature view into a snapshot.

source ─ rows ─► windows ─► model ─► Parquet parts ─► manifest. Nothing is visible before the manifest; a run that dies leaves the old
snapshot as it was.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs.config import ViewConfig
from jobs.open_view import OpenView, open_view
from jobs.progress import Progress
from jobs.report import Report
from precompute.batching import WINDOW_ROWS
from precompute.runner import compute
from store.entity_key import bad_keys, key_column
from store.errors import RejectedError, SourceError
from store.offline_store import OfflineStore, utc_now
from store.snapshot import Counts, Part, Snapshot

PART_BYTES = 64 * 2**20
"""Rows are gathered to about this size before a Parquet file is written."""

_REJECTED = pa.schema(
    [
        ("key", pa.string()),
        ("stage", pa.string()),
        ("error", pa.string()),
        ("input_hash", pa.int64()),
        ("attempts", pa.int32()),
    ]
)


def materialize(
    config: ViewConfig, store: OfflineStore, report: Report, progress: Progress, *, memory_mb: int = 1024
) -> Snapshot:
    """Compute every row of a view and commit the result; the caller holds the view's run lock.

    Args:
        config: the view.
        store: where the snapshot goes.
        report: counts and stage times are added to it.
        progress: told of every window.
        memory_mb: DuckDB's share of the memory.

    Returns:
        the committed snapshot, not yet published.

    Raises:
        SourceError: the source failed, is empty, or has a key with two values.
        RejectedError: more rows were rejected than the view allows; ``rejected.parquet`` of the run has them.
        ModelError, ConfigError, SnapshotError: as their names say.
    """
    view = config.feature_view()
    with report.stage("open"):
        opened = open_view(view, store, memory_mb=memory_mb)
    with opened.source as source:
        report.model, report.inputs = opened.fingerprint, dict(opened.inputs)
        with report.stage("source"):
            total = source.load()
        if total == 0:
            raise SourceError(
                f"view {view.name!r}: the source yielded no rows; nothing was published and the live snapshot stays"
            )
        run = _Run(opened, store, report, math.floor(total * config.max_rejected + 1e-9))
        progress.begin(f"materialize {view.name}", total)
        batches = source.batches(WINDOW_ROWS)
        while (batch := _next(batches, report)) is not None:
            run.add(batch)
            progress.advance(batch.num_rows)
        run.finish()
        progress.end()
        counts = Counts(total, run.written, rejected=run.rejected_rows, duplicates=source.rows_read - total)
        report.counts = {name: getattr(counts, name) for name in Counts.__slots__}
        if run.written == 0:
            raise RejectedError(f"view {view.name!r}: all {total} rows were rejected ({run.reasons()}); see {run.rejected_path}")
        snapshot = Snapshot(
            view=view,
            run=report.run,
            model=opened.fingerprint,
            counts=counts,
            parts=tuple(run.parts),
            rejected=run.rejected_part,
            created_at=utc_now(),
            computed_at_min=run.computed_at_min,
            computed_at_max=run.computed_at_max,
            inputs=dict(opened.inputs),
            input_columns={name: str(source.schema.field(name).type) for name in source.input_columns},
            timings_s={name: round(s, 3) for name, s in report.stages_s.items()},
            versions=report.versions,
        )
        with report.stage("commit"):
            snapshot = store.commit(snapshot)
    report.snapshot, report.status = snapshot.number, "committed"
    return snapshot


def _next(batches: Iterator[pa.RecordBatch], report: Report) -> pa.RecordBatch | None:
    with report.stage("source"):
        return next(batches, None)


@dataclass(slots=True)
class _Run:
    """The rows of one run on their way to Parquet: never more than one window and one part in memory."""

    opened: OpenView
    store: OfflineStore
    report: Report
    max_rejected: int
    written: int = 0
    rejected_rows: int = 0
    computed_at_min: int | None = None
    computed_at_max: int | None = None
    parts: list[Part] = field(default_factory=list)
    rejected_part: Part | None = None
    _pending: list[pa.Table] = field(default_factory=list)
    _pending_bytes: int = 0
    _rejected: list[pa.RecordBatch] = field(default_factory=list)
    _reasons: Counter[str] = field(default_factory=Counter)

    def add(self, batch: pa.RecordBatch) -> None:
        """Compute a window and keep its rows."""
        view = self.opened.view
        keys = key_column(batch, view.entity)
        bad = bad_keys(keys)
        if bad:
            rows = list(bad)
            self._reject(
                keys.take(pa.array(rows)),
                ["key"] * len(rows),
                list(bad.values()),
                batch.column("input_hash").take(pa.array(rows)),
            )
            good = np.setdiff1d(np.arange(batch.num_rows), rows)
            batch, keys = batch.take(pa.array(good)), keys.take(pa.array(good))
        if batch.num_rows == 0:
            return
        done = compute(self.opened.model, view, batch.drop_columns(["input_hash"]))
        self.report.add("model", done.model_s)
        if done.rejections:
            rows = [r.row for r in done.rejections]
            self._reject(
                keys.take(pa.array(rows)),
                [r.stage for r in done.rejections],
                [r.error for r in done.rejections],
                batch.column("input_hash").take(pa.array(rows)),
            )
        if not len(done.rows):
            return
        now_us = time.time_ns() // 1000
        self.computed_at_min = now_us if self.computed_at_min is None else min(self.computed_at_min, now_us)
        self.computed_at_max = now_us if self.computed_at_max is None else max(self.computed_at_max, now_us)
        kept = batch if len(done.rows) == batch.num_rows else batch.take(pa.array(done.rows))
        columns = [_key_values(kept.column(name)) for name in view.entity]
        columns += done.features.columns
        columns += [pa.repeat(pa.scalar(now_us, pa.timestamp("us", "UTC")), kept.num_rows), kept.column("input_hash")]
        table = pa.Table.from_arrays(columns, names=[*view.entity, *view.feature_names, "computed_at", "input_hash"])
        self._pending.append(table)
        self._pending_bytes += table.nbytes
        self.written += table.num_rows
        if self._pending_bytes >= PART_BYTES:
            self._write_part()

    def finish(self) -> None:
        """Write what is pending."""
        if self._pending:
            self._write_part()
        self._write_rejected()

    def _write_part(self) -> None:
        with self.report.stage("write"):
            table = pa.concat_tables(self._pending)
            name = f"part-{len(self.parts):05d}.parquet"
            self.parts.append(self.store.write_part(self.opened.view.name, self.report.run, name, table))
        self._pending, self._pending_bytes = [], 0

    def _reject(self, keys: pa.Array, stages: list[str], errors: list[str], hashes: pa.Array) -> None:
        self._rejected.append(
            pa.RecordBatch.from_arrays(
                [
                    keys,
                    pa.array(stages, pa.string()),
                    pa.array(errors, pa.string()),
                    hashes,
                    pa.repeat(pa.scalar(1, pa.int32()), len(keys)),
                ],
                schema=_REJECTED,
            )
        )
        self._reasons.update(errors)
        self.rejected_rows += len(keys)
        if self.rejected_rows > self.max_rejected:
            self._write_rejected()
            raise RejectedError(
                f"view {self.opened.view.name!r}: {self.rejected_rows} rows rejected so far, {self.max_rejected} allowed ({self.reasons()}); nothing was "
                f"published and the live snapshot stays. See {self.rejected_path}; mend the source, or raise max_rejected"
            )

    def _write_rejected(self) -> None:
        if self._rejected:
            table = pa.Table.from_batches(self._rejected, _REJECTED)
            self.rejected_part = self.store.write_part(self.opened.view.name, self.report.run, "rejected.parquet", table)

    @property
    def rejected_path(self) -> str:
        """Where the rejected rows were written."""
        return str(self.store.root / self.opened.view.name / "data" / self.report.run / "rejected.parquet")

    def reasons(self) -> str:
        """The commonest reasons, with counts."""
        return "; ".join(f"{n}× {reason}" for reason, n in self._reasons.most_common(3))


def _key_values(column: pa.Array) -> pa.Array:
    """Key columns are int64 or string in every snapshot."""
    return pc.cast(column, pa.int64() if pa.types.is_integer(column.type) else pa.string())
