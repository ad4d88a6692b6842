"""Worker: a process that computes shards of a run, each under a lease, until all have results, and
reports its progress; ``precompute work VIEW`` starts one.

All that it reads and writes is in the view's root: it may run on any host, and be started by
anything. One that is killed loses the chunk in flight; the shard's next attempt takes over the
others.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.jobs.config.project import EngineConfig, Project
from precompute.jobs.run.command_process import Progress, on_signals
from precompute.jobs.run.judge.audit import Sample
from precompute.jobs.run.rows.chunks import Chunks
from precompute.jobs.run.rows.golden_rows import GoldenRows
from precompute.jobs.run.rows.open_model import OpenModel, open_model
from precompute.jobs.run.shards.shard_folder import (
    ShardFolder,
    ShardPlan,
    ShardResult,
    WorkerProgress,
    part_of,
    read_shard_table,
    shard_batches,
    shard_file_path,
    write_shard_table,
)
from precompute.model import is_in_run_process
from precompute.model_code import code_changes
from precompute.store.disk.durable_file import disk_message
from precompute.store.disk.lease import Lease, release_leases
from precompute.store.disk.record import replace
from precompute.store.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    ModelError,
    PrecomputeError,
    RejectedError,
    SnapshotError,
)
from precompute.store.keys import key_column
from precompute.store.offline.runs import Finished, Report
from precompute.store.offline.segment import Part
from precompute.store.offline.stored_file import parsing
from precompute.store.offline.view_store import ViewStore
from precompute.techniques.table import REFERENCE
from precompute.workers.worker import LOAD_S, not_loaded

log = logging.getLogger(__name__)

MOST_ATTEMPTS = 3
"""Attempts at a shard that fail, or end without a finished chunk; then the run fails."""
BEAT_S = 2.0
"""Seconds between two beats at least."""
SHARD_LOOK_S = 1.0
"""How often a worker without a shard looks for one, or for the run's end."""
STOP_S = 20.0
"""How long a worker that a signal ends has for the batch in flight: Kubernetes gives 30 s, a spot
machine 30 or more."""

_FINAL = ("ConfigError", "RejectedError")
"""Kinds of errors that another attempt would have, too."""


_FAILURES = (PrecomputeError, OSError, MemoryError, pa.ArrowException)
"""Errors that a shard's attempt may fail with; any other is a bug here."""


class WorkEnded(Exception):
    """The worker is to end: by a signal, or since the run is over."""


@dataclass(slots=True)
class WorkSummary:
    """What a worker did."""

    run: str | None = None
    worker: str = ""
    shards: int = 0
    """Shards that it was the first to finish."""
    rows: int = 0
    """Rows of these shards."""
    signal: int = 0
    """The signal that ended it before the run was over; 0 for none."""


def work(
    project: Project,
    name: str,
    *,
    run: str | None = None,
    wait_s: float = 0.0,
    announce: Callable[[str], None] = lambda _: None,
) -> WorkSummary:
    """Compute shards of a run until each has a result, or a signal ends it: then the chunk in
    flight is finished.

    Args:
        project: as the run's; its root is the same.
        name: of the view.
        run: id of the run; by default the newest that wants workers.
        wait_s: how long to wait for it to begin.
        announce: called with how it goes, a line at a time.

    Raises:
        ConfigError: no run wants workers, or this host has another model than the run.
        ConflictError: the run died meanwhile, and another one has begun.
        PrecomputeError: the root cannot be read or written.
    """
    if name not in project.names and name not in project.offline.views():
        # says which there are: no run is to wait for one that will never start
        project.view(name)
    store = project.offline.view(name)
    with _finish_on_signal() as ending:
        found = _run_of(store, run, time.monotonic() + wait_s, ending)
        if found is None:
            return WorkSummary(run, signal=ending.signal)
        folder, plan = found
        done = WorkSummary(plan.run, f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(2)}")
        announce(f"{name}: {len(plan.shards)} shards of run {plan.run}, as {done.worker}")
        folder.beat(WorkerProgress(done.worker))
        try:
            _Worker(project, store, folder, plan, ending, done).work()
        except WorkEnded:
            pass
        except _FAILURES as exc:
            # a run that ends removes what its workers read
            if folder.is_open(plan) or isinstance(exc, ConfigError):
                raise exc if isinstance(exc, PrecomputeError) else _as_snapshot_error(exc) from exc
        done.signal = ending.signal
        if not done.signal and folder.is_superseded(plan):
            raise ConflictError(
                f"run {plan.run} died, and another one of view {name!r} has begun:"
                " start the worker again, for that one"
            )
        if not done.signal and folder.is_open(plan) and not store.running(plan.partition):
            raise ConflictError(
                f"run {plan.run} died, and nobody takes what was computed: run view"
                f" {name!r} again, which takes it over"
            )
    return done


def _run_of(
    store: ViewStore, run: str | None, limit: float, ending: _Ending
) -> tuple[ShardFolder, ShardPlan] | None:
    """The run that needs workers; None where the worker is to end before there is one."""
    while True:
        for found in ShardFolder.runs(store) if run is None else [run]:
            folder = ShardFolder(store, found)
            plan = folder.plan()
            # of a run that died the folder may still be there: a worker of it is not there for
            # the run that takes over
            if plan is not None and folder.is_open(plan) and store.running(plan.partition):
                return folder, plan
        if ending.is_set():
            return None
        if time.monotonic() >= limit:
            whose = (
                f"no run of view {store.name!r} wants workers now"
                if run is None
                else f"run {run} of view {store.name!r} wants no workers, or is over"
            )
            raise ConfigError(
                f"{whose}: one with shards does while it computes. Start `precompute run"
                f" {store.name}`, or wait for it: --wait 10m"
            )
        ending.wait(SHARD_LOOK_S)


class _Ending(threading.Event):
    """Set when the process is to end, by ``signal``."""

    signal = 0
    attempt: Callable[[], None] | None = None
    """Leaves the attempt in flight, before the process ends in the middle of a batch."""


@contextlib.contextmanager
def _finish_on_signal() -> Iterator[_Ending]:
    """Set by SIGTERM and SIGINT, so that a chunk can be finished; the process ends after
    :data:`STOP_S` all the same."""
    ending, timers = _Ending(), list[threading.Timer]()

    def give_up(number: int) -> None:
        log.warning("the batch in flight took longer than %.0f s: it is lost", STOP_S)
        if ending.attempt is not None:
            ending.attempt()
        release_leases()
        os._exit(128 + number)

    def noted(number: int, _: object) -> None:
        if not ending.is_set():
            ending.signal = number
            ending.set()
            timers.append(threading.Timer(STOP_S, give_up, [number]))
            timers[0].daemon = True
            timers[0].start()

    try:
        with on_signals(noted):
            yield ending
    finally:
        for timer in timers:
            timer.cancel()


class _Worker:
    """Takes and computes shards, one at a time."""

    def __init__(
        self,
        project: Project,
        store: ViewStore,
        folder: ShardFolder,
        plan: ShardPlan,
        ending: _Ending,
        done: WorkSummary,
    ) -> None:
        self._store, self._folder, self._plan, self._ending = store, folder, plan, ending
        self._settings = project.settings
        self._done = done
        self._failed: list[int] = []
        """Shards that this process failed at, one after the other."""
        load_s = max(LOAD_S, self._settings.engine.hang)
        with _Watch(load_s, not_loaded(load_s)):
            self._opened = _open(project, store, plan)

    def work(self) -> None:
        """Compute shards until the run is over."""
        while True:
            self._check()
            # looked for once: in an object store each look costs money
            done = self._folder.results()
            left = [n for n in range(len(self._plan.shards)) if n not in done]
            if not left:
                return
            if not any(self._try(shard) for shard in self._in_turn(left)):
                self._ending.wait(SHARD_LOOK_S)

    def _check(self) -> None:
        if self._ending.is_set() or not self._folder.is_open(self._plan):
            raise WorkEnded

    def _in_turn(self, left: Sequence[int]) -> Iterator[int]:
        """Shards to try, of those that no worker computes: each worker begins at another place,
        with those that it did not fail at. Of these, begun ones come first: where a row ended a
        worker, each new one would else meet the next such row, and the run fail for want of
        progress."""
        start = zlib.crc32(self._done.worker.encode()) % len(left)
        begun, failed = self._folder.begun(), self._failed
        turn = sorted(
            [*left[start:], *left[:start]], key=lambda one: (one in failed, one not in begun)
        )
        return (shard for shard in turn if not self._folder.is_taken(shard))

    def _try(self, shard: int) -> bool:
        """Compute a shard, unless another worker does; returns whether this one did."""
        try:
            lease = self._folder.take(shard, self._done.worker, self._settings.lease)
        except ConflictError:
            return False
        with lease:
            if shard in self._folder.results():
                return False
            attempt = lease.record.fence
            known = ShardResult(shard, attempt, self._done.worker)
            try:
                self._note(self._given_up(known) or self._compute_attempt(known, lease))
            except FencedError as exc:
                log.warning("shard %d: %s", shard, exc)
            except _FAILURES as exc:
                self._check()
                error = exc if isinstance(exc, PrecomputeError) else _as_snapshot_error(exc)
                self._note(replace(known, error=str(error), kind=type(error).__name__))
                if len(self._failed) >= MOST_ATTEMPTS:
                    raise error from exc
        return True

    def _note(self, result: ShardResult) -> None:
        """Record a result, or a failed attempt, for good where no other attempt can help."""
        folder, shard = self._folder, result.shard
        try:
            if result.error is not None:
                self._failed.append(shard)
                log.warning("shard %d: %s", shard, result.error)
                folder.fail(result)
                if result.kind not in _FINAL and len(folder.failed(shard)) < MOST_ATTEMPTS:
                    return
            if folder.record(result) and result.error is None:
                self._failed = []
                self._done.shards += 1
                self._done.rows += result.rows
        except OSError as exc:
            raise SnapshotError(disk_message(folder.folder, exc)) from exc

    def _given_up(self, known: ShardResult) -> ShardResult | None:
        """The result of a shard whose attempts keep dying without reporting why; None for any
        other."""
        folder, shard = self._folder, known.shard
        died = [
            attempt
            for attempt in self._died(shard)
            if not self._chunks(folder.attempt(shard, attempt))
        ]
        if len(died) < MOST_ATTEMPTS:
            return None
        return replace(
            known,
            kind=ModelError.__name__,
            error=f"{len(died)} workers died without reporting why while they computed it, or were"
            " stopped past their lease, and none had finished a chunk: is there too little memory,"
            " or a row that ends the process?",
        )

    def _died(self, shard: int) -> list[int]:
        """Numbers of earlier attempts that reported neither a result nor an error."""
        failed = self._folder.failed(shard)
        return [attempt for attempt in self._folder.attempts(shard) if attempt not in failed]

    # ---- one attempt

    def _compute_attempt(self, known: ShardResult, lease: Lease) -> ShardResult:
        plan, opened, shard = self._plan, self._opened, known.shard
        part, name = plan.shards[shard], self._folder.attempt(shard, known.attempt)
        # where an attempt died without reporting why, a row may have ended it: the engine's own
        # workers find it, and it is rejected alone
        engine = EngineConfig(workers=int(bool(self._died(shard))), hang=self._settings.engine.hang)
        settings = self._settings.model_copy(update={"engine": engine})
        rows, resumed = shard_file_path(self._store, part), self._resumed(shard)
        began, cpu_s = time.monotonic(), _cpu_s()
        self._store.journals.begin(name, plan.recipe, plan.partition, full=plan.full)
        self._ending.attempt = partial(self._leave, name)
        report = Report(name, self._store.name, "work")
        left = part.rows - len(resumed.keys)
        wanted = -(-plan.audited * left // max(1, sum(each.rows for each in plan.shards)))
        sample = Sample(plan.view, left, wanted, extremes=opened.variant != REFERENCE)
        chunks = Chunks(
            self._store,
            report,
            opened,
            plan.allowed,
            plan.rows,
            lease.check,
            sample.draw,
            self._golden(shard),
        )
        progress = _ShardProgress(self._folder, known, chunks, part.rows - left, self._check)
        done = resumed.keys if resumed.chunks else None
        read = partial(shard_batches, rows, plan.view.entity, done)
        try:
            with self._watched(engine) as progress.moved:
                chunks.compute(read, settings, progress)
        except WorkEnded:
            chunks.finish()
            self._leave(name)
            raise
        except RejectedError as exc:
            chunks.rejections.write()
            rejected = [Finished(None, chunks.rejections.part)]
            return replace(known, chunks=rejected, error=str(exc), kind=type(exc).__name__)
        computed_at_us = [*resumed.computed_at, *chunks.computed_at]
        return replace(
            known,
            chunks=[*resumed.chunks, *chunks.finished],
            rejected=chunks.rejections.count,
            computed_at=[min(computed_at_us), max(computed_at_us)] if computed_at_us else [],
            fits=chunks.fits or bool(resumed.chunks),
            sample=self._sample(sample, known),
            sampled=sample.rows,
            golden=self._written(chunks.golden, known),
            seconds=round(time.monotonic() - began, 3),
            cpu_s=round(_cpu_s() - cpu_s, 3),
            model_s=round(report.stages_s.get("model", 0.0), 3),
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            engine=report.engine,
        )

    @contextlib.contextmanager
    def _watched(self, engine: EngineConfig) -> Iterator[Callable[[], None]]:
        """A watch on the model where that computes here, and what is called when rows come out. The
        next attempt has a process for the model, and rejects the row that it hangs at."""
        own = not engine.workers and self._opened.gpu is None
        if not own or is_in_run_process(self._opened.model):
            yield lambda: None
            return
        with _Watch(engine.hang, f"finished no batch for {engine.hang:.3g} s") as watch:
            yield watch.moved

    def _chunks(self, attempt: str) -> list[Finished]:
        return self._store.journals.chunks(attempt, self._plan.recipe, self._plan.partition)

    def _leave(self, attempt: str) -> None:
        """Leave nothing of an attempt that has no chunk: it must not be taken for one that a row
        ended."""
        if not self._chunks(attempt):
            self._store.journals.end(attempt)

    def _resumed(self, shard: int) -> _Resumed:
        """Computed rows of earlier attempts; rejected ones are few, and computed again."""
        found = [
            Finished(chunk.part, None)
            for attempt in self._folder.attempts(shard)
            for chunk in self._chunks(self._folder.attempt(shard, attempt))
            if chunk.part is not None
        ]
        entity, resumed = list(self._plan.view.entity), _Resumed()
        for chunk in self._store.journals.whole(self._store.journals.here(found)):
            assert chunk.part is not None
            path = self._store.folder / chunk.part.path
            with parsing(path, "run the view again"):
                table = pq.read_table(path, columns=[*entity, "computed_at"])
            keys = key_column(table, entity)
            # a worker that slept past its lease may note a chunk late, whose rows the next attempt
            # has computed meanwhile
            if not pc.any(pc.is_in(keys, value_set=resumed.keys)).as_py():
                resumed.add(chunk, keys, table.column("computed_at"))
        return resumed

    def _golden(self, shard: int) -> GoldenRows:
        """Those that are computed among the rows of a shard; each attempt computes them anew."""
        part = self._plan.golden if shard == 0 else None
        inputs = None if part is None else read_shard_table(shard_file_path(self._store, part))
        return GoldenRows(self._plan.view, inputs)

    def _written(self, golden: GoldenRows, known: ShardResult) -> Part | None:
        if not golden.computed.num_rows:
            return None
        name = f"golden-{known.attempt}"
        try:
            return write_shard_table(self._store, self._folder.name, name, golden.computed)
        except OSError as exc:
            raise SnapshotError(disk_message(self._folder.folder, exc)) from exc

    def _sample(self, sample: Sample, known: ShardResult) -> Part | None:
        path = self._folder.folder / f"sample-{known.shard:05d}-{known.attempt}.arrow"
        try:
            return part_of(self._store, path, sample.rows) if sample.write(path) else None
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc


class _Watch:
    """Ends this process where nothing moves for so long, not counting how long it was stopped
    itself: its leases are renewed all the same, and all others would wait for it for ever.

    Args:
        limit_s: how long.
        why: what the log says then, as the end of a sentence.
    """

    def __init__(self, limit_s: float, why: str) -> None:
        self._limit_s, self._why = limit_s, why
        self._over, self._moved_at = threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._look, name="hang", daemon=True)

    def moved(self) -> None:
        """Something has moved."""
        self._moved_at = time.monotonic()

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        tick_s, looked_at = min(1.0, self._limit_s / 4), time.monotonic()
        while not self._over.wait(tick_s):
            now = time.monotonic()
            # this process, or the machine: the model is not to blame
            self._moved_at += max(0.0, now - looked_at - tick_s)
            looked_at = now
            if now > self._moved_at + self._limit_s:
                log.error("this worker %s, and ends itself", self._why)
                release_leases()
                os._exit(1)


@dataclass(slots=True)
class _Resumed:
    """What earlier attempts at a shard computed."""

    chunks: list[Finished] = field(default_factory=list)
    keys: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))
    """Texts of their keys, none twice."""
    computed_at: list[int] = field(default_factory=list)
    """When the first and the last row were computed, µs since 1970; empty without any."""

    def add(self, chunk: Finished, keys: pa.Array, computed_at: pa.ChunkedArray) -> None:
        """Add a chunk with the keys and the times of its rows."""
        ends = pc.min_max(computed_at.cast(pa.int64())).as_py()
        computed_at_us = [*self.computed_at, ends["min"], ends["max"]]
        self.chunks.append(chunk)
        self.keys = pa.concat_arrays([self.keys, keys])
        self.computed_at = [min(computed_at_us), max(computed_at_us)]


class _ShardProgress(Progress):
    """Beats while a shard is computed, and looks whether the worker is to end."""

    def __init__(
        self,
        folder: ShardFolder,
        known: ShardResult,
        chunks: Chunks,
        resumed: int,
        check: Callable[[], None],
    ) -> None:
        self._folder, self._chunks, self._check = folder, chunks, check
        self._beat = WorkerProgress(known.worker, known.shard, resumed, resumed)
        self._resumed, self._last = resumed, -math.inf
        self.moved: Callable[[], None] = lambda: None
        """Called when rows come out."""

    def begin(self, what: str, total: int) -> None:
        """Show nothing."""

    def advance(self, rows: int, retried: int = 0) -> None:
        self.moved()
        self._beat = replace(
            self._beat,
            computed=self._beat.computed + rows,
            recorded=self._resumed + self._chunks.recorded,
            rejected=self._chunks.rejections.count,
            reasons=self._chunks.rejections.reasons(),
            fits=self._chunks.fits,
        )
        if time.monotonic() - self._last >= BEAT_S:
            self._folder.beat(self._beat)
            self._last = time.monotonic()
            self._check()

    def end(self) -> None:
        """Show nothing: the shard's result says that it ended."""


def _open(project: Project, store: ViewStore, plan: ShardPlan) -> OpenModel:
    tables = {
        name: read_shard_table(shard_file_path(store, part)) for name, part in plan.tables.items()
    }
    columns = read_shard_table(shard_file_path(store, plan.columns)).schema
    examples = (
        columns.empty_table()
        if plan.examples is None
        else read_shard_table(shard_file_path(store, plan.examples))
    )
    opened = open_model(
        plan.view,
        project.home,
        columns,
        lambda rows, drawn: examples.slice(0, rows),
        tables,
        store.compiled,
        gpu_reserved=True,
    )
    if opened.fingerprint != plan.model:
        raise ConfigError(
            f"view {store.name!r}: this host's model has the fingerprint {opened.fingerprint[:12]},"
            f" and run {plan.run} computes with {plan.model[:12]}: all hosts need the same files of"
            " the model, the same code and the same versions of libraries"
        )
    if changes := code_changes(plan.code, opened.code()):
        raise ConfigError(
            f"view {store.name!r}: this host's code of the model differs from that of run"
            f" {plan.run} ({changes}), under the same fingerprint: all hosts need the same code and"
            " the same versions of libraries"
        )
    # before a shard is taken: the run has converted it, so what fails here is this host's own
    opened.convert()
    return opened


def _as_snapshot_error(exc: BaseException) -> SnapshotError:
    return SnapshotError(f"{type(exc).__name__}: {exc}")


def _cpu_s() -> float:
    """CPU seconds of this process and of its children that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
