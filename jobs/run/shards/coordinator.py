"""Coordinator: has shard workers compute a run's rows: writes a file of rows for each shard, starts
workers, or waits for those that others start, and collects their results.

The run has compared the source with what was computed before, as any run; what its workers get are
the rows to compute, in the source's order. So their results, one shard after the other, are the
parts that the run would have written itself, and everything after that is as ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.engine.batches import WIDE_ROWS
from precompute.jobs.config.project import EngineConfig, Project
from precompute.jobs.run.command_process import Progress, end_signal
from precompute.jobs.run.judge.audit import Audit, Sample
from precompute.jobs.run.rows.chunks import Chunks, rows_in_words
from precompute.jobs.run.rows.open_view import OpenView
from precompute.jobs.run.rows.plan import Plan
from precompute.jobs.run.shards.launcher import Launcher, WorkerExit, WorkerRequest, launcher_of
from precompute.jobs.run.shards.shard_folder import (
    ShardFolder,
    ShardPlan,
    ShardResult,
    WorkerProgress,
    error_of,
    read_shard_table,
    shard_file_path,
    write_shard_table,
    write_shards,
)
from precompute.model import is_in_run_process
from precompute.store.disk.durable_file import disk_message
from precompute.store.disk.lease import Lease
from precompute.store.disk.record import read_record, sealed
from precompute.store.errors import (
    ConfigError,
    ModelError,
    PrecomputeError,
    RejectedError,
    SnapshotError,
)
from precompute.store.offline.runs import Finished, Report, run_of_folder
from precompute.store.offline.stored_file import parsing
from precompute.store.offline.view_store import ViewStore
from precompute.techniques.table import REFERENCE
from precompute.workers.process import installed_module
from precompute.workers.worker import LOAD_S

log = logging.getLogger(__name__)

FEW_ROWS = 500
"""Rows below which a run computes them itself: a worker takes a second or two to start."""
SHARDS_A_WORKER = 4
"""Shards for each worker by default, so that a slow one does not hold up the end."""
MOST_DEATHS = 3
"""Workers that may die one after the other while no row is computed; then the run fails."""
RESULTS_LOOK_S, RESULTS_LOOK_REMOTE_S = 0.1, 1.0
"""How often the coordinator looks for results in a folder, and elsewhere, where each look is a
request."""
LEASE_CHECK_S = 5.0
"""How often the run's own lease is checked."""
NO_WORKER_S = 60.0
"""Seconds without a worker after which the log says how to start one."""
STOP_GRACE_S, SIGNAL_GRACE_S = 25.0, 2.0
"""How long workers have for the chunk in flight when the run fails, and when a signal ends it."""
WORKER_BAD_USAGE = 2
"""Exit status of a worker that cannot work as configured."""


def shards_of(shards: int | None, engine: EngineConfig, opened: OpenView, rows: int) -> int:
    """How many shards a run of so many rows has, of a view that wants ``shards``; 0 where it
    computes them itself: few, or those of a model that counts rates and a budget in one process."""
    if shards is None and engine.on != "local":
        shards = SHARDS_A_WORKER * max(1, engine.workers)
    if shards is None or rows < FEW_ROWS:
        return 0
    if is_in_run_process(opened.model):
        # each worker would spend the whole budget, and each attempt once more
        name = opened.view.name
        log.info("view %r: its model's rates and budget are counted here: no shards", name)
        return 0
    return min(shards, rows)


def compute_in_shards(
    project: Project,
    opened: OpenView,
    plan: Plan,
    shards: int,
    chunks: Chunks,
    audit: Audit,
    progress: Progress,
    lease: Lease | None,
    *,
    full: bool,
) -> None:
    """Have workers compute the rows of a plan.

    Args:
        project: whose engine starts the workers, which read its folder.
        opened: the view; the source is loaded, and reduced to the rows to compute.
        plan: which rows.
        shards: how many.
        chunks: of the run; gets what was computed.
        audit: gets rows of it.
        progress: called with how far it is.
        lease: of the run.
        full: whether every row was requested.

    Raises:
        PrecomputeError: a shard failed, for the reason that its worker gives; workers end before
            they compute anything; or too many rows are rejected.
        FencedError: another run took over.
    """
    report, fence = chunks.report, 0 if lease is None else lease.record.fence
    folder = ShardFolder(chunks.store, report.run)
    with closing(folder):
        with report.stage("pin"):
            try:
                shard_plan = ShardPlan(
                    run=report.run,
                    view=opened.view,
                    model=opened.fingerprint,
                    code=opened.code(),
                    recipe=plan.recipe,
                    partition=report.partition,
                    full=full,
                    fence=fence,
                    allowed=chunks.rejections.allowed,
                    rows=plan.source_rows,
                    audited=audit.sample_rows,
                    **_written(folder, opened, plan.diff.compute, shards, chunks.golden.inputs),
                )
                _check_arguments(opened, shard_plan)
                folder.open(shard_plan)
            except OSError as exc:
                raise SnapshotError(disk_message(folder.folder, exc)) from exc
        _Coordinator(project, folder, shard_plan, chunks, audit.sample, progress, lease).run()
    if opened.gpu is not None:
        report.usage.device, report.usage.gpu_s = opened.gpu, report.stages_s["model"]


def attempts_of(store: ViewStore, report: Report) -> list[str]:
    """Ids of the journals of a run's workers, also of those whose results did not count."""
    return [run for run in store.journals.runs() if run_of_folder(run) == report.run]


def _written(
    folder: ShardFolder, opened: OpenView, rows: int, shards: int, golden: pa.Table | None
) -> dict[str, Any]:
    """The files of a plan: the rows of each shard, golden rows, and what a worker needs to open the
    model.

    Raises:
        OSError: the file system failed.
    """
    write = partial(write_shard_table, folder.store, folder.name)
    tables = enumerate(opened.tables.items())
    return {
        "shards": write_shards(
            folder.store, folder.name, opened.source.batches(WIDE_ROWS), rows, shards
        ),
        "golden": None if golden is None else write("golden", golden),
        "columns": write("columns", opened.columns.empty_table()),
        "examples": None
        if opened.variant == REFERENCE
        else write("examples", opened.examples(opened.variant)),
        "tables": {name: write(f"table-{number}", table) for number, (name, table) in tables},
    }


def _check_arguments(opened: OpenView, plan: ShardPlan) -> None:
    """Check that the model's arguments survive their way to workers as JSON.

    Raises:
        ConfigError: workers would get other arguments of the model than this run has, which its
            fingerprint need not show.
    """
    there = read_record(
        ShardPlan, sealed(plan), "the plan of the shards"
    ).view.definition.model.args
    for name, value in opened.view.definition.model.args.items():
        if repr(there[name]) != repr(value):
            raise ConfigError(
                f"{opened.place('model', 'args', name)}: {value!r} reaches workers as"
                f" {there[name]!r}, since it goes through JSON: write it so (keys of mappings are"
                " texts), or leave out `shards`"
            )


class _Coordinator:
    """Waits for the shards' results, and keeps as many workers running as are to run."""

    def __init__(
        self,
        project: Project,
        folder: ShardFolder,
        plan: ShardPlan,
        chunks: Chunks,
        sample: Sample,
        progress: Progress,
        lease: Lease | None,
    ) -> None:
        self._project, self._folder, self._plan, self._chunks = project, folder, plan, chunks
        self._sample, self._progress, self._report = sample, progress, chunks.report
        self._lease, self._engine = lease, project.settings.engine
        self._look_s = RESULTS_LOOK_S if folder.store.storage.local else RESULTS_LOOK_REMOTE_S
        self._deaths: list[str] = []
        self._shown = 0
        self._started_at = self._lease_checked_at = self._looked_at = time.monotonic()
        self._idle_warned = False
        self._last_reported: object = None
        """Results and progress as workers reported them last."""
        self._last_reported_at = self._started_at
        """When that changed last."""

    def run(self) -> None:
        """Have workers compute until each shard has a result."""
        launcher = launcher_of(self._engine, self._workers)
        results: dict[int, ShardResult] = {}
        try:
            for _ in range(self._workers):
                launcher.start(self._request())
            while len(results) < len(self._plan.shards):
                ended = launcher.wait(self._look_s)
                results = self._folder.results()
                for result in results.values():
                    if result.error is not None:
                        raise self._failed(result)
                self._show_progress(results)
                self._replace_ended(launcher, ended)
                self._check_lease()
        finally:
            self._end_workers(launcher)
        with self._report.stage("collect"):
            for number in sorted(results):
                self._collect(results[number])
        self._report_figures(results)

    @property
    def _workers(self) -> int:
        if self._engine.on == "elsewhere":
            return 0
        return min(max(1, self._engine.workers), len(self._plan.shards))

    def _request(self) -> WorkerRequest:
        engine, memory_mb = self._engine, self._project.settings.memory_mb
        argv = [*installed_module("precompute.jobs.cli"), "-c", str(self._project.folder), "work"]
        # none outlives this run
        argv += [self._plan.view.name, "--run", self._plan.run, "--with-parent"]
        environment = {}
        if engine.on == "local":
            # of one machine's memory each has a share, and so has the run itself
            share_mb = max(256, memory_mb // (self._workers + 1))
            environment = {"PRECOMPUTE_MEMORY_MB": str(share_mb)}
        return WorkerRequest(argv, environment, engine.cpus, engine.gpus, memory_mb)

    def _replace_ended(self, launcher: Launcher, ended: list[WorkerExit]) -> None:
        """Start a worker for each that ended, unless they die repeatedly with no progress."""
        for worker in ended:
            log.warning("a worker %s", worker.how)
            # another host may have the model that this one lacks
            if worker.status == WORKER_BAD_USAGE and self._engine.on == "local":
                raise ConfigError(f"a worker {worker.how}")
            self._deaths += [worker.how] if worker.status != 0 else []
            # each may have come upon a row that ends it: the next worker rejects that alone
            if len(self._deaths) >= max(MOST_DEATHS, self._workers + 1):
                kind = ConfigError if worker.status == WORKER_BAD_USAGE else ModelError
                raise kind(
                    f"{len(self._deaths)} workers ended one after the other, while no row was"
                    f" computed; the last {self._deaths[-1]}"
                )
            launcher.start(self._request())
            # it may take as long to load as the one before
            self._last_reported_at = time.monotonic()

    def _check_lease(self) -> None:
        due = self._lease_checked_at + LEASE_CHECK_S
        if self._lease is not None and time.monotonic() > due:
            self._lease.check()
            self._lease_checked_at = time.monotonic()

    def _show_progress(self, results: Mapping[int, ShardResult]) -> None:
        """Report progress: what is done, and what workers report of shards that are not."""
        beats: dict[int, WorkerProgress] = {}
        workers = self._folder.beats()
        for beat in workers:
            if beat.shard is not None and beat.shard not in results:
                # of a shard that a second worker computes, the one that is farther
                beats[beat.shard] = max(
                    beat, beats.get(beat.shard, beat), key=lambda beat: beat.computed
                )
        computed = sum(result.rows + result.rejected for result in results.values())
        recorded = computed + sum(beat.recorded for beat in beats.values())
        computed += sum(beat.computed for beat in beats.values())
        if computed > self._shown:
            self._progress.advance(computed - self._shown)
            self._shown, self._deaths = computed, []
        self._progress.note(
            f"{recorded:,} recorded, {len(results)} of {len(self._plan.shards)} shards done,"
            f" {len(workers)} worker{'s' * (len(workers) != 1)} seen"
        )
        self._warn_if_idle(results, workers)
        rejected = self._chunks.rejections.count + sum(
            result.rejected for result in results.values()
        )
        rejected += sum(beat.rejected for beat in beats.values())
        if rejected > self._plan.allowed:
            # as soon as these are too many, that is raised, with the file of all and the reasons
            self._chunks.fits |= any(beat.fits for beat in beats.values())
            for result in results.values():
                self._chunks.fits |= result.fits
                self._add_rejected(result.chunks)
            self._chunks.rejections.write()
            known = [self._chunks.rejections.reasons(), *(beat.reasons for beat in beats.values())]
            reasons = "; ".join(list(dict.fromkeys(filter(None, known)))[:3])
            raise RejectedError(
                f"view {self._plan.view.name!r}: {rows_in_words(rejected)} rejected so far in all"
                f" shards, {self._plan.allowed} allowed ({reasons}); nothing was published and the"
                " live snapshot stays. Mend the source or the model, or raise max_rejected"
            )

    def _warn_if_idle(
        self, results: Mapping[int, ShardResult], workers: list[WorkerProgress]
    ) -> None:
        """Warn the operator, once each time, when no worker computes: none has reported, or all
        that did are gone. Of this machine's the run waits no longer than one may take to load."""
        now, seen = time.monotonic(), (len(results), workers)
        # this process was stopped, or the machine: no worker is to blame
        self._last_reported_at += max(0.0, now - self._looked_at - NO_WORKER_S)
        self._looked_at = now
        if seen != self._last_reported:
            self._last_reported, self._last_reported_at, self._idle_warned = seen, now, False
        silent_s = now - self._last_reported_at
        # each that lets others run ends itself before
        most_s = NO_WORKER_S + max(LOAD_S, self._engine.hang)
        hangs = self._engine.on == "local" and silent_s >= most_s
        if silent_s < NO_WORKER_S or (self._idle_warned and not hangs):
            return
        left = (n for n in range(len(self._plan.shards)) if n not in results)
        # one that is at a long batch says nothing, and has its shard
        if workers and any(self._folder.is_taken(shard) for shard in left):
            self._last_reported_at, self._idle_warned = now, False
            return
        what = "is left" if workers else "has reported"
        if hangs:
            raise ModelError(f"no worker {what} for {most_s:.0f} s: they hang, with Python's lock")
        self._idle_warned = True
        start = f"start some, `precompute work {self._plan.view.name} --run {self._plan.run}`"
        ways = {"elsewhere": start, "local": "they load their model, or hang"}
        room = "the cluster has no room for them, or they cannot reach the root"
        log.warning(
            "no worker %s for %.0f s: %s", what, NO_WORKER_S, ways.get(self._engine.on, room)
        )

    def _end_workers(self, launcher: Launcher) -> None:
        """End the workers: those of a run that failed finish the chunk in flight, for the next run
        to take over."""
        self._folder.withdraw()
        launcher.stop(STOP_GRACE_S if end_signal() is None else SIGNAL_GRACE_S)

    def _failed(self, result: ShardResult) -> PrecomputeError:
        """The error of a shard, after the rows that it rejected were added to the run's."""
        self._add_rejected(result.chunks)
        return error_of(result)

    def _collect(self, result: ShardResult) -> None:
        shard = self._plan.shards[result.shard]
        if result.rows + result.rejected != shard.rows:
            raise SnapshotError(
                f"shard {result.shard} has {shard.rows:,} rows, and {result.worker} computed"
                f" {result.rows:,} and rejected {result.rejected:,}: nothing was committed"
            )
        for chunk in result.chunks:
            self._chunks.add_chunk(chunk)
        self._add_rejected(result.chunks)
        self._chunks.fits |= result.fits
        computed_at_us = [*self._chunks.computed_at, *result.computed_at]
        self._chunks.computed_at = (
            [min(computed_at_us), max(computed_at_us)] if computed_at_us else []
        )
        if result.sample is not None:
            self._sample.add(shard_file_path(self._folder.store, result.sample), result.sampled)
        if result.golden is not None:
            computed = read_shard_table(shard_file_path(self._folder.store, result.golden))
            self._chunks.golden.add(computed)

    def _add_rejected(self, chunks: Sequence[Finished]) -> None:
        for chunk in chunks:
            if chunk.rejected is not None:
                path = shard_file_path(self._folder.store, chunk.rejected)
                with parsing(path, "run the view again"):
                    rows = pq.read_table(path)
                self._chunks.rejections.add_table(rows)

    def _report_figures(self, results: Mapping[int, ShardResult]) -> None:
        report, done = self._report, results.values()
        report.add("model", sum(result.model_s for result in done))
        report.add_cpu("model", sum(result.cpu_s for result in done), workers=True)
        report.usage.workers = len({result.worker for result in done})
        report.usage.worker_peak_bytes = max(result.peak_bytes for result in done)
        report.engine = {
            "shards": len(done),
            "workers": len({result.worker for result in done}),
            "cpu_s": round(sum(result.cpu_s for result in done), 3),
            "seconds": round(time.monotonic() - self._started_at, 3),
            "peak_memory_bytes": max(result.peak_bytes for result in done),
            "batches": sum(int(result.engine.get("batches", 0)) for result in done),
            "retries": sum(int(result.engine.get("retries", 0)) for result in done),
            "attempts": sum(result.attempt for result in done),
        }
