"""Late rows: partitions whose source yields other rows now than they were computed from. A run looks at some of them, the newest first; `backfill
--check-inputs` at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing

from precompute.jobs.process.job import Job
from precompute.jobs.rows.open_view import open_source
from precompute.store.errors import PrecomputeError, SnapshotError
from precompute.store.offline.snapshot import Snapshot
from precompute.store.partition import Partition

log = logging.getLogger(__name__)

SHARE = 0.05
"""Of the run's time, that looking may take."""
LEAST_S = 0.1
"""What looking may take at least: some five small partitions."""


def look_for_late_rows(job: Job) -> None:
    """Read sources of a view's other partitions again, the newest first, while there is time, and note in the report which were looked at, and which of them
    are late. Those of another model or source are left out: they are to be computed whatever their rows are. So are those whose source cannot be read any more, or
    yields nothing, unless that is to be published: data that were let go of are not late."""
    report, started = job.report, time.monotonic()
    budget_s = max(LEAST_S, SHARE * sum(report.stages_s.values()))
    # the first takes about as long as the run's own
    slowest_s = report.stages_s.get("source", 0.0)
    try:
        for partition, snapshot in _others(job):
            begun = time.monotonic()
            if begun - started + slowest_s > budget_s:
                break
            late = _is_late(job, Partition.parse(partition), snapshot)
            if late is not None:
                report.looked_at.append(partition)
                report.late += [partition] if late else []
            slowest_s = max(slowest_s, time.monotonic() - begun)
    except SnapshotError as exc:
        log.info("view %r: whether its other partitions have late rows is not known: %s", job.config.name, exc)


def _others(job: Job) -> Iterator[tuple[str, Snapshot]]:
    """The newest snapshot of each other partition that was computed as the view is configured now; the newest partition first."""
    view, newest = job.config.feature_view(), dict[str, int]()
    for entry in job.store.catalog().entries.values():
        if entry.partition is not None and entry.partition != job.options.partition_text:
            newest[entry.partition] = entry.number
    made_by = job.report.model, view.definition.source, view.entity
    for partition, number in sorted(newest.items(), reverse=True):
        snapshot = job.store.snapshot(number)
        if (snapshot.model, snapshot.view.definition.source, snapshot.view.entity) == made_by:
            yield partition, snapshot


def _is_late(job: Job, partition: Partition, snapshot: Snapshot) -> bool | None:
    """Whether the partition's source yields other rows than the snapshot was computed from; None where that is not known."""
    assert job.config.partition is not None
    try:
        source, _ = open_source(
            snapshot.view,
            job.store.offline,
            job.project.home,
            pinned=snapshot.inputs,
            partition=partition,
            memory_mb=job.project.settings.source_mb,
        )
        with closing(source):
            if not source.load(job.config.partition.column) and job.config.partition.empty != "publish":
                return None
            return source.content() != snapshot.content.partition(":")[2]
    except PrecomputeError as exc:
        log.info("view %r: whether partition %s has late rows is not known: %s", job.config.name, partition, exc)
        return None
