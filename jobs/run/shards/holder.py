"""Holder: a run that has workers compute its rows: it writes the rows of each shard, starts workers
or waits for those that others start, and takes what they finished.

The run has compared the source with what was computed before, as any run; what its workers get are
the rows to compute, in the source's order. So their results, one shard after the other, are the
parts that the run would have written itself, and everything after that is as ever.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.engine.batches import WIDE_ROWS
from precompute.jobs.config.project import EngineConfig, ProjectConfig
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.command_process import Progress, end_signal
from precompute.jobs.run.judge.audit import Audit
from precompute.jobs.run.rows.chunks import Chunks
from precompute.jobs.run.rows.open_view import OpenView
from precompute.jobs.run.rows.plan import Job, Plan
from precompute.jobs.run.shards.launcher import Ended, Launcher, Order, launcher_of
from precompute.jobs.run.shards.shard_folder import (
    Beat,
    ShardFolder,
    ShardPlan,
    ShardResult,
    error_of,
    pin,
    pin_table,
    pinned_path,
)
from precompute.store.disk.durable_file import disk_message
from precompute.store.disk.record import read_record, sealed
from precompute.store.disk.storage import LOCAL
from precompute.store.errors import (
    ConfigError,
    ModelError,
    PrecomputeError,
    RejectedError,
    SnapshotError,
)
from precompute.store.offline.runs import Finished, Report, run_of_folder
from precompute.store.offline.view_store import ViewStore
from precompute.techniques.table import REFERENCE
from precompute.workers.process import installed_module

log = logging.getLogger(__name__)

FEW_ROWS = 500
"""Rows below which a run computes them itself: a worker takes a second or two to start."""
SHARDS_A_WORKER = 4
"""Shards for each worker by default, so that a slow one does not hold up the end."""
MOST_DEATHS = 3
"""Workers that end one after the other, while no row is computed; then the run fails."""
LOOK_S, LOOK_REMOTE_S = 0.1, 1.0
"""How often results are looked for in a folder, and in an object store, where that costs money."""
CHECK_S = 5.0
"""How often the run's own lease is looked at."""
LONELY_S = 60.0
"""Seconds without a worker after which the log says how to start one."""
STOP_GRACE_S, HASTE_S = 25.0, 2.0
"""How long workers have for the chunk in flight when the run fails, and when a signal ends it."""
BAD_USAGE = 2
"""Exit status of a command that cannot work as configured."""


def shards_of(config: ViewConfig, engine: EngineConfig, opened: OpenView, rows: int) -> int:
    """How many shards a run of so many rows has; 0 where it computes them itself: few, or those of
    a model that counts rates and a budget in one process."""
    wanted = config.shards
    if wanted is None and engine.on != "local":
        wanted = SHARDS_A_WORKER * max(1, engine.workers)
    if wanted is None or rows < FEW_ROWS:
        return 0
    if getattr(opened.model, "in_run_process", False):
        # each worker would spend the whole budget, and each attempt once more
        log.info("view %r: its model's rates and budget are counted here: no shards", config.name)
        return 0
    return min(wanted, rows)


def compute_in_shards(
    job: Job,
    opened: OpenView,
    plan: Plan,
    shards: int,
    chunks: Chunks,
    audit: Audit,
    progress: Progress,
    report: Report,
) -> None:
    """Have workers compute the rows of a plan.

    Args:
        job: the run, whose lease is held.
        opened: its view; the source is loaded and narrowed.
        plan: which rows.
        shards: how many.
        chunks: gets what was computed.
        audit: gets rows of it.
        progress: called with how far it is.
        report: of the run.

    Raises:
        PrecomputeError: a shard failed, for the reason that its worker gives; workers end before
            they compute anything; or too many rows are rejected.
        FencedError: another run took over.
    """
    folder = ShardFolder(job.store, report.run)
    with closing(folder):
        with report.stage("pin"):
            shard_plan = _planned(job, opened, plan, shards, audit, report)
            _check_arguments(opened, shard_plan)
            try:
                folder.open(shard_plan)
            except OSError as exc:
                raise SnapshotError(disk_message(folder.folder, exc)) from exc
        _Holder(job, folder, shard_plan, chunks, audit, progress, report).hold()
    if opened.gpu is not None:
        report.usage.device, report.usage.gpu_s = opened.gpu, report.stages_s["model"]


def attempts_of(store: ViewStore, report: Report) -> list[str]:
    """Ids of the journals of a run's workers, also of those whose results did not count."""
    return [run for run in store.journals.runs() if run_of_folder(run) == report.run]


def _planned(
    job: Job, opened: OpenView, plan: Plan, shards: int, audit: Audit, report: Report
) -> ShardPlan:
    store, run, source = job.store, f"{report.run}-shards", opened.source
    batches, schema = source.batches(WIDE_ROWS), opened.columns
    examples = opened.examples(opened.variant) if opened.variant != REFERENCE else None
    try:
        pinned = pin(store, run, batches, plan.diff.compute, shards)
        return ShardPlan(
            run=report.run,
            view=opened.view,
            model=opened.fingerprint,
            recipe=plan.recipe,
            partition=report.partition,
            full=job.options.full,
            fence=0 if job.lease is None else job.lease.record.fence,
            shards=pinned,
            columns=pin_table(store, run, "columns", schema.empty_table()),
            examples=None if examples is None else pin_table(store, run, "examples", examples),
            tables={
                name: pin_table(store, run, f"table-{number}", table)
                for number, (name, table) in enumerate(opened.tables.items())
            },
            allowed=math.floor(plan.source_rows * job.config.max_rejected + 1e-9),
            audited=audit.sample_rows,
        )
    except OSError as exc:
        raise SnapshotError(disk_message(store.data / run, exc)) from exc


def _check_arguments(opened: OpenView, plan: ShardPlan) -> None:
    """Raises:
    ConfigError: workers would get other arguments of the model than this run has, which its
        fingerprint need not show.
    """
    there = read_record(ShardPlan, sealed(plan)).view.definition.model.args
    for name, value in opened.view.definition.model.args.items():
        if repr(there[name]) != repr(value):
            raise ConfigError(
                f"{opened.place('model', 'args', name)}: {value!r} reaches workers as"
                f" {there[name]!r}, since it goes through JSON: write it so (keys of mappings are"
                " texts), or leave out `shards`"
            )


class _Holder:
    """Waits for results, and sees to it that there are workers."""

    def __init__(
        self,
        job: Job,
        folder: ShardFolder,
        plan: ShardPlan,
        chunks: Chunks,
        audit: Audit,
        progress: Progress,
        report: Report,
    ) -> None:
        self._job, self._folder, self._plan, self._chunks = job, folder, plan, chunks
        self._audit, self._progress, self._report = audit, progress, report
        self._settings: ProjectConfig = job.project.settings
        self._engine = self._settings.engine
        self._look_s = LOOK_S if job.store.storage is LOCAL else LOOK_REMOTE_S
        self._deaths: list[str] = []
        self._shown = 0
        self._began = self._checked = time.monotonic()
        self._lonely = False
        self._seen: object = None
        """What workers reported last, and when."""
        self._heard = self._began

    def hold(self) -> None:
        """Have workers compute until each shard has a result."""
        launcher = launcher_of(self._engine, self._workers)
        results: dict[int, ShardResult] = {}
        try:
            for _ in range(self._workers):
                launcher.start(self._order())
            while len(results) < len(self._plan.shards):
                ended = launcher.wait(self._look_s)
                results = self._folder.results()
                for result in results.values():
                    if result.error is not None:
                        raise self._failed(result)
                self._show(results)
                self._see_to(launcher, ended)
        finally:
            self._end(launcher)
        with self._report.stage("collect"):
            for number in sorted(results):
                self._take(results[number])
        self._figures(results)

    @property
    def _workers(self) -> int:
        if self._engine.on == "elsewhere":
            return 0
        return min(max(1, self._engine.workers), len(self._plan.shards))

    def _order(self) -> Order:
        project, engine = self._job.project, self._engine
        argv = [*installed_module("precompute.jobs.cli"), "-c", str(project.folder), "work"]
        argv += [self._job.config.name, "--run", self._report.run, "--with-parent"]
        environment = {}
        if engine.on == "local":
            # of one machine's memory each has a share, and so has the run itself
            memory_mb = max(256, self._settings.memory_mb // (self._workers + 1))
            environment = {"PRECOMPUTE_MEMORY_MB": str(memory_mb)}
        return Order(argv, environment, engine.cpus, engine.gpus, self._settings.memory_mb)

    def _see_to(self, launcher: Launcher, ended: list[Ended]) -> None:
        """Start a worker for each that ended, unless they end for nothing."""
        for worker in ended:
            log.warning("a worker %s", worker.how)
            # another host may have the model that this one lacks
            if worker.status == BAD_USAGE and self._engine.on == "local":
                raise ConfigError(f"a worker {worker.how}")
            self._deaths += [worker.how] if worker.status != 0 else []
            # each may have come upon a row that ends it: the next worker rejects that alone
            if len(self._deaths) >= max(MOST_DEATHS, self._workers + 1):
                kind = ConfigError if worker.status == BAD_USAGE else ModelError
                raise kind(
                    f"{len(self._deaths)} workers ended one after the other, while no row was"
                    f" computed; the last {self._deaths[-1]}"
                )
            launcher.start(self._order())
        if self._job.lease is not None and time.monotonic() > self._checked + CHECK_S:
            self._job.lease.check()
            self._checked = time.monotonic()

    def _show(self, results: Mapping[int, ShardResult]) -> None:
        """Report progress: what is done, and what workers report of shards that are not."""
        beats: dict[int, Beat] = {}
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
            f" {len(workers)} worker{'s' * (len(workers) != 1)} came"
        )
        self._listen(results, workers)
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
                f"view {self._job.config.name!r}: {rejected} rows rejected so far in all shards,"
                f" {self._plan.allowed} allowed ({reasons}); nothing was published and the live"
                " snapshot stays. Mend the source, or raise max_rejected"
            )

    def _listen(self, results: Mapping[int, ShardResult], workers: list[Beat]) -> None:
        """Warn the operator, once each time, when no worker computes: none came, or all that came
        are gone."""
        now, seen = time.monotonic(), (len(results), workers)
        if seen != self._seen:
            self._seen, self._heard, self._lonely = seen, now, False
        if self._lonely or now < self._heard + LONELY_S:
            return
        self._lonely = True
        left = (n for n in range(len(self._plan.shards)) if n not in results)
        # one that is at a long batch says nothing, and has its shard
        if workers and any(self._folder.is_taken(shard) for shard in left):
            self._heard, self._lonely = now, False
            return
        log.warning(
            "no worker %s for %.0f s: %s",
            "is left" if workers else "came",
            LONELY_S,
            f"start some, `precompute work {self._job.config.name} --run {self._report.run}`"
            if self._engine.on == "elsewhere"
            else "the cluster has no room for them, or they cannot reach the root",
        )

    def _end(self, launcher: Launcher) -> None:
        """End the workers: those of a run that failed finish the chunk in flight, for the next run
        to take over."""
        self._folder.withdraw()
        launcher.stop(STOP_GRACE_S if end_signal() is None else HASTE_S)

    def _failed(self, result: ShardResult) -> PrecomputeError:
        """The error of a shard, after the rows that it rejected were added to the run's."""
        self._add_rejected(result.chunks)
        return error_of(result)

    def _take(self, result: ShardResult) -> None:
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
        ages = [*self._chunks.computed_at, *result.computed_at]
        self._chunks.computed_at = [min(ages), max(ages)] if ages else []
        if result.sample is not None:
            self._audit.sample.add(pinned_path(self._job.store, result.sample), result.sampled)

    def _add_rejected(self, chunks: Sequence[Finished]) -> None:
        for chunk in chunks:
            if chunk.rejected is not None:
                try:
                    rows = pq.read_table(self._job.store.file(chunk.rejected))
                except (OSError, pa.ArrowException) as exc:
                    raise SnapshotError(f"{chunk.rejected.path} cannot be read: {exc}") from exc
                self._chunks.rejections.add_table(rows)

    def _figures(self, results: Mapping[int, ShardResult]) -> None:
        report, done = self._report, results.values()
        report.add("model", sum(result.model_s for result in done))
        report.add_cpu("model", sum(result.cpu_s for result in done), workers=True)
        report.usage.workers = len({result.worker for result in done})
        report.usage.worker_peak_bytes = max(result.peak_bytes for result in done)
        report.engine = {
            "shards": len(done),
            "workers": len({result.worker for result in done}),
            "cpu_s": round(sum(result.cpu_s for result in done), 3),
            "seconds": round(time.monotonic() - self._began, 3),
            "peak_memory_bytes": max(result.peak_bytes for result in done),
            "batches": sum(int(result.engine.get("batches", 0)) for result in done),
            "retries": sum(int(result.engine.get("retries", 0)) for result in done),
            "attempts": sum(result.attempt for result in done),
        }
