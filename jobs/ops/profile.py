"""Profile: where the time of a sample of a view goes. The stages overlap, so their times do not add
up to the whole: the one that is busy nearly all the time sets the pace."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from precompute.engine.batches import WIDE_ROWS
from precompute.engine.rows import MISFIT, Outcome
from precompute.engine.runner import Runner
from precompute.jobs.config.project import Project
from precompute.jobs.run.rows.open_view import OpenView, open_view
from precompute.sources.sized_batches import joined
from precompute.store.disk.durable_file import disk_message, replacing
from precompute.store.errors import ModelError, SnapshotError, SourceError
from precompute.store.offline.view_store import OfflineStore
from precompute.store.times import Partition

WARM_UP_ROWS = 32
"""Computed before the clock starts: a model's first call takes several times as long as the
next."""


def profile(
    project: Project,
    name: str,
    *,
    rows: int,
    partition: Partition | None = None,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Compute any ``rows`` rows of a view's source.

    Args:
        rows: size of the sample, at least 1.
        partition: of a partitioned view; by default the latest that is over.
        trace: where to write a trace of one window's computing, as Chrome and Perfetto read it.

    Returns:
        ``view``, ``rows``, ``rejected``, ``load_s`` (opening the view and loading its model) and
        the engine's figures (:meth:`precompute.engine.runner.Runner.figures`).

    Raises:
        ConfigError, SourceError, ModelError: as a run would.
        SnapshotError: the trace cannot be written.
    """
    config = project.view(name)
    offline = project.offline
    if config.partition is not None and partition is None:
        partition = config.partition_at(datetime.now(UTC))
    memory_mb = project.settings.memory_mb
    started = time.monotonic()
    rejected = 0
    with open_view(
        config.feature_view(), offline, project.home, partition=partition, memory_mb=memory_mb
    ) as opened:
        opened.convert()
        load_s = time.monotonic() - started
        runner = Runner(opened.model, opened.view)
        windows = _sampled(opened, rows, runner)
        first = next(windows)
        # before the clock starts, but a part of the time
        read_s = runner.meter.stage("read").busy_s
        _check_fit(opened, Runner(opened.model, opened.view).compute(first.slice(0, WARM_UP_ROWS)))
        if trace is not None:
            _write_trace(opened, first, trace)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="precompute-profile-") as folder:
            scratch = OfflineStore(Path(folder))
            for number, (_, done) in enumerate(
                runner.stream(_chained(first, windows), memory_mb=memory_mb)
            ):
                rejected += len(done.rejections)
                scratch.view(name).write_part(
                    "profile", f"part-{number:05d}.parquet", pa.Table.from_batches([done.features])
                )
            seconds = time.monotonic() - began + read_s
        return {
            "view": name,
            "rejected": rejected,
            "load_s": round(load_s, 3),
            **runner.figures(seconds),
        }


def _check_fit(opened: OpenView, done: Outcome) -> None:
    """Raises:
    ModelError: the model's answer fits the view for no row.
    """
    if (
        done.rejections
        and not len(done.rows)
        and all(rejected.stage == MISFIT for rejected in done.rejections)
    ):
        error = done.rejections[0].error
        raise ModelError(
            f"view {opened.view.name!r}: no row of the model's answer fits the view"
            f" ({error}){opened.late_values(error)}"
        )


def _sampled(opened: OpenView, rows: int, runner: Runner) -> Iterator[pa.RecordBatch]:
    """Windows of the sample; reading it is the read stage's time."""
    started = time.monotonic()
    table = opened.source.sample(rows)
    runner.meter.stage("read").busy_s += time.monotonic() - started
    if table.num_rows == 0:
        raise SourceError(
            f"view {opened.view.name!r}: the source yielded no rows: nothing to profile"
        )
    yield from joined(iter(table.combine_chunks().to_batches(WIDE_ROWS)), runner.window_rows)


def _chained(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _write_trace(opened: OpenView, window: pa.RecordBatch, path: Path) -> None:
    from precompute.models.device import traced

    # in this thread, where the profiler sees it: the stages one after the other
    try:
        with replacing(path) as temporary, traced(temporary):
            Runner(opened.model, opened.view).compute(window)
    except OSError as exc:
        # of what torch could not write it says nothing: its file is not there
        raise SnapshotError(disk_message(path, exc, "no trace was written")) from exc
