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
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.engine.ahead import Meter
from precompute.engine.resources import give_back
from precompute.engine.rows import Outcome
from precompute.engine.runner import Runner
from precompute.jobs.config.project import EngineConfig, Project
from precompute.jobs.run.command_process import on_signals
from precompute.jobs.run.judge.audit import Sample
from precompute.jobs.run.rows.chunks import HIDDEN, Chunks, engine_of
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
from precompute.workers.worker_pool import WorkerPool

log = logging.getLogger(__name__)

MOST_ATTEMPTS = 3
"""Attempts at a shard that fail, or end without a finished chunk; then the run fails."""
AT_ONCE = 2
"""Shards that a worker has at once: one that is computed, one whose first rows are read."""
AHEAD_S = 5.0
"""A worker takes a shard when the rows of the one before are computed within so long, by the rate
so far."""
FIRST_S = 1.0
"""How long the first rows are waited for, which say how fast it goes."""
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
        finally:
            folder.forget(plan)
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
    attempts: Sequence[_Attempt] = ()
    """Those in flight."""


@contextlib.contextmanager
def _finish_on_signal() -> Iterator[_Ending]:
    """Set by SIGTERM and SIGINT, so that a chunk can be finished; the process ends after
    :data:`STOP_S` all the same."""
    ending, timers = _Ending(), list[threading.Timer]()

    def give_up(number: int) -> None:
        log.warning("the batch in flight took longer than %.0f s: it is lost", STOP_S)
        for attempt in ending.attempts:
            attempt.leave_nothing()
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


class _Attempt:
    """An attempt at a shard, from its lease to its result: takes what comes of the shard's rows."""

    def __init__(
        self, worker: _Worker, known: ShardResult, lease: Lease, died: bool, resumed: _Resumed
    ) -> None:
        plan, opened, store = worker.plan, worker.opened, worker.store
        part = plan.shards[known.shard]
        self.known, self.lease, self.died, self.resumed = known, lease, died, resumed
        self.began = time.monotonic()
        self.name = worker.folder.attempt(known.shard, known.attempt)
        """Of its journal, and of the folder of its parts."""
        left = part.rows - len(resumed.keys)
        wanted = -(-plan.audited * left // max(1, sum(each.rows for each in plan.shards)))
        self.sample = Sample(plan.view, left, wanted, extremes=opened.variant != REFERENCE)
        self.chunks = Chunks(
            store,
            Report(self.name, store.name, "work"),
            opened,
            plan.allowed,
            plan.rows,
            lease.check,
            self.sample.draw,
            worker.golden(known.shard),
        )
        done = resumed.keys if resumed.chunks else None
        path = shard_file_path(store, part)
        self.read = partial(shard_batches, path, plan.view.entity, done)
        """Reads the rows that are left, so many at a time at most."""
        self.end = math.inf
        """Number of the window that ends its rows, once all were read."""
        self.is_over = False
        """Whether nothing is to be made of its rows any more: it has a result, or has failed."""
        self._store, self.computed = store, len(resumed.keys)

    def progress(self) -> WorkerProgress:
        """How far it is."""
        chunks, known = self.chunks, self.known
        return WorkerProgress(
            known.worker,
            known.shard,
            self.computed,
            len(self.resumed.keys) + chunks.recorded,
            chunks.rejections.count,
            chunks.rejections.reasons(),
            chunks.fits,
        )

    def drop(self) -> None:
        """Let go of the shard; what was computed and is not over is finished, for the next
        attempt."""
        if not self.is_over:
            try:
                self.chunks.finish()
            except _FAILURES as exc:
                log.warning("shard %d: the chunk in flight is lost: %s", self.known.shard, exc)
        self.leave_nothing()
        self.lease.release()

    def leave_nothing(self) -> None:
        """Without a chunk, leave nothing of it: it must not be taken for one that a row ended."""
        if not self.chunks.finished:
            self._store.journals.end(self.name)


class _Line:
    """Shards whose rows go through an engine one after the other, in one stream."""

    def __init__(self, first: _Attempt) -> None:
        self.open = [first]
        """Those whose rows are not all out."""
        self.given = 0
        """Rows that the engine was given."""
        self._out, self._began = 0, time.monotonic()
        self._changed, self._closed = threading.Condition(), False

    def has_room(self) -> bool:
        """Wait until another shard is to be taken, for what one worker has, no other one can take
        at the run's end; False where none is."""
        with self._changed:
            while not self._closed:
                seconds, left = time.monotonic() - self._began, self.given - self._out
                soon = left * seconds <= AHEAD_S * self._out if self._out else seconds > FIRST_S
                if not self.open or (soon and len(self.open) < AT_ONCE):
                    return True
                self._changed.wait(FIRST_S)
            return False

    def add(self, attempt: _Attempt) -> bool:
        """Let its rows follow, unless none are to."""
        with self._changed:
            if not self._closed:
                self.open.append(attempt)
            return not self._closed

    def of(self, done: Outcome) -> _Attempt:
        """The shard that rows are of which have come out."""
        with self._changed:
            self._out += done.done
            self._changed.notify_all()
            return next(attempt for attempt in self.open if done.window <= attempt.end)

    def remove(self, attempt: _Attempt) -> None:
        """Its rows are all out."""
        with self._changed:
            self.open.remove(attempt)
            self._changed.notify_all()
        attempt.drop()

    def close(self) -> list[_Attempt]:
        """Let none follow any more; returns those that are open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return [*self.open]


class _Worker:
    """Takes and computes shards."""

    def __init__(
        self,
        project: Project,
        store: ViewStore,
        folder: ShardFolder,
        plan: ShardPlan,
        ending: _Ending,
        done: WorkSummary,
    ) -> None:
        self.store, self.folder, self.plan, self._ending = store, folder, plan, ending
        self._settings = project.settings
        self._done = done
        self._failed: list[int] = []
        """Shards that this process failed at, one after the other."""
        self._next: _Attempt | None = None
        """One that was begun and needs another engine."""
        self._spent: dict[str, float] = {}
        self._beaten_at = -math.inf
        load_s = max(LOAD_S, self._settings.engine.hang)
        with _Watch(load_s, not_loaded(load_s)):
            self.opened = _open(project, store, plan)

    def work(self) -> None:
        """Compute shards until the run is over."""
        try:
            while True:
                self._check()
                attempt = self._next
                # not both at once: a thread that still reads ahead may put one there meanwhile
                if attempt is None:
                    attempt = self._claim()
                else:
                    self._next = None
                if attempt is not None:
                    self._compute(attempt)
                elif len(self.folder.results()) == len(self.plan.shards):
                    return
                else:
                    self._ending.wait(SHARD_LOOK_S)
        finally:
            if self._next is not None:
                self._next.drop()

    def _check(self) -> None:
        if self._ending.is_set() or not self.folder.is_open(self.plan):
            raise WorkEnded

    def _in_turn(self, left: Sequence[int]) -> Iterator[int]:
        """Shards to try, of those that no worker computes: each worker begins at another place,
        with those that it did not fail at. Of these, begun ones come first: where a row ended a
        worker, each new one would else meet the next such row, and the run fail for want of
        progress."""
        start = zlib.crc32(self._done.worker.encode()) % max(1, len(left))
        begun, failed = self.folder.begun(), self._failed
        turn = sorted(
            [*left[start:], *left[:start]], key=lambda one: (one in failed, one not in begun)
        )
        return (shard for shard in turn if not self.folder.is_taken(shard))

    def _claim(self) -> _Attempt | None:
        """Take a shard that is left; None where others have them all."""
        # looked for once: in an object store each look costs money
        done = self.folder.results()
        left = [n for n in range(len(self.plan.shards)) if n not in done]
        for shard in self._in_turn(left):
            with contextlib.ExitStack() as unless_begun:
                try:
                    lease = self.folder.take(shard, self._done.worker, self._settings.lease)
                except ConflictError:
                    continue
                unless_begun.enter_context(lease)
                known = ShardResult(shard, lease.record.fence, self._done.worker)
                if shard not in self.folder.results():
                    with self._failing(known):
                        died = self._died(shard)
                        if (result := self._given_up(known, died)) is not None:
                            self._note(result)
                            continue
                        attempt = _Attempt(self, known, lease, bool(died), self._resumed(shard))
                        plan = self.plan
                        self.store.journals.begin(
                            attempt.name, plan.recipe, plan.partition, full=plan.full
                        )
                        unless_begun.pop_all()
                        return attempt
        return None

    @contextlib.contextmanager
    def _failing(self, known: ShardResult, attempt: _Attempt | None = None) -> Iterator[None]:
        """An attempt that fails within is over, and recorded as failed, with the rows that it
        rejected; not one that lost its lease, whose shard another worker has."""
        try:
            yield
        except _FAILURES as exc:
            if attempt is not None:
                attempt.is_over = True
            if isinstance(exc, FencedError):
                log.warning("shard %d: %s", known.shard, exc)
                return
            self._check()
            error = exc if isinstance(exc, PrecomputeError) else _as_snapshot_error(exc)
            known = replace(known, error=str(error), kind=type(error).__name__)
            if isinstance(exc, RejectedError) and attempt is not None:
                attempt.chunks.rejections.write()
                known = replace(known, chunks=[Finished(None, attempt.chunks.rejections.part)])
            self._note(known)
            if len(self._failed) >= MOST_ATTEMPTS:
                raise error from exc

    def _note(self, result: ShardResult) -> None:
        """Record a result, or a failed attempt, for good where no other attempt can help."""
        folder, shard = self.folder, result.shard
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

    def _given_up(self, known: ShardResult, died: Sequence[int]) -> ShardResult | None:
        """The result of a shard whose attempts keep dying without reporting why; None for any
        other."""
        folder, shard = self.folder, known.shard
        idle = [attempt for attempt in died if not self._chunks(folder.attempt(shard, attempt))]
        if len(idle) < MOST_ATTEMPTS:
            return None
        return replace(
            known,
            kind=ModelError.__name__,
            error=f"{len(idle)} workers died without reporting why while they computed it, or were"
            " stopped past their lease, and none had finished a chunk: is there too little memory,"
            " or a row that ends the process?",
        )

    def _died(self, shard: int) -> list[int]:
        """Numbers of earlier attempts that reported neither a result nor an error."""
        failed = self.folder.failed(shard)
        return [attempt for attempt in self.folder.attempts(shard) if attempt not in failed]

    # ---- one stream

    def _compute(self, first: _Attempt) -> None:
        """Compute a shard, and others after it as long as there are any for the same engine."""
        # where an attempt died without reporting why, a row may have ended it: the engine's own
        # workers find it, and it is rejected alone
        engine = EngineConfig(workers=int(first.died), hang=self._settings.engine.hang)
        meter, line = Meter(), _Line(first)
        self._spent = _spent(meter)
        runner = engine_of(self.opened, engine, meter)
        stream = runner.stream(
            self._windows(line, runner), hidden=HIDDEN, memory_mb=self._settings.stream_mb
        )
        self._ending.attempts = line.open
        try:
            with self._watched(engine) as moved:
                for batch, done in self._out_of(stream, line):
                    moved()
                    self._take(line, batch, done, meter)
        finally:
            left = line.close()
            stream.close()
            for attempt in left:
                attempt.drop()
            # the stages' threads leave what they freed in arenas of their own
            give_back()

    def _windows(self, line: _Line, runner: Runner | WorkerPool) -> Iterator[pa.RecordBatch]:
        """The rows of shard after shard, each taken when those of the one before are soon out, and
        each with a window without rows at its end, which comes out after all of them."""
        attempt, number = line.open[0], 0
        end = pa.RecordBatch.from_pylist([], schema=self.opened.columns)
        while True:
            with self._failing(attempt.known, attempt):
                for window in attempt.chunks.windows(attempt.read, runner, self._settings):
                    if attempt.is_over:
                        break
                    number, line.given = number + 1, line.given + window.num_rows
                    yield window
            attempt.end, number = number, number + 1
            yield end
            if attempt.died or not line.has_room():
                return
            try:
                following = self._claim()
            except _FAILURES as exc:
                log.warning("no shard is taken ahead: %s", exc)
                return
            if following is None or following.died:
                self._next = following
                return
            if not line.add(following):
                following.drop()
                return
            attempt = following

    def _out_of(
        self, stream: Iterator[tuple[pa.RecordBatch, Outcome]], line: _Line
    ) -> Iterator[tuple[pa.RecordBatch, Outcome]]:
        """What comes out of a stream. Where that fails, so has the first shard that is not over:
        all that was before comes out first."""
        try:
            yield from stream
        except _FAILURES:
            for attempt in [attempt for attempt in line.close() if not attempt.is_over][:1]:
                with self._failing(attempt.known, attempt):
                    raise

    def _take(self, line: _Line, batch: pa.RecordBatch, done: Outcome, meter: Meter) -> None:
        attempt = line.of(done)
        if not attempt.is_over:
            with self._failing(attempt.known, attempt):
                if done.window == attempt.end:
                    self._note(self._result(attempt, meter))
                    attempt.is_over = True
                else:
                    attempt.computed += attempt.chunks.take(batch, done)
        if done.window == attempt.end:
            line.remove(attempt)
        if time.monotonic() - self._beaten_at >= BEAT_S:
            self.folder.beat(attempt.progress())
            self._beaten_at = time.monotonic()
            self._check()

    def _result(self, attempt: _Attempt, meter: Meter) -> ShardResult:
        chunks, sample, resumed = attempt.chunks, attempt.sample, attempt.resumed
        chunks.finish()
        computed_at_us = [*resumed.computed_at, *chunks.computed_at]
        # of the stream, since the shard before
        before, self._spent = self._spent, _spent(meter)
        spent = {name: round(much - before[name], 3) for name, much in self._spent.items()}
        return replace(
            attempt.known,
            chunks=[*resumed.chunks, *chunks.finished],
            rejected=chunks.rejections.count,
            computed_at=[min(computed_at_us), max(computed_at_us)] if computed_at_us else [],
            fits=chunks.fits or bool(resumed.chunks),
            sample=self._sample(sample, attempt.known),
            sampled=sample.rows,
            golden=self._written(chunks.golden, attempt.known),
            seconds=round(time.monotonic() - attempt.began, 3),
            cpu_s=spent["cpu"],
            model_s=spent["model"],
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            engine={"batches": spent["batches"], "retries": spent["retries"]},
        )

    @contextlib.contextmanager
    def _watched(self, engine: EngineConfig) -> Iterator[Callable[[], None]]:
        """A watch on the model where that computes here, and what is called when rows come out. The
        next attempt has a process for the model, and rejects the row that it hangs at."""
        own = not engine.workers and self.opened.gpu is None
        if not own or is_in_run_process(self.opened.model):
            yield lambda: None
            return
        with _Watch(engine.hang, f"finished no batch for {engine.hang:.3g} s") as watch:
            yield watch.moved

    def _chunks(self, attempt: str) -> list[Finished]:
        return self.store.journals.chunks(attempt, self.plan.recipe, self.plan.partition)

    def _resumed(self, shard: int) -> _Resumed:
        """Computed rows of earlier attempts; rejected ones are few, and computed again."""
        found = [
            Finished(chunk.part, None)
            for attempt in self.folder.attempts(shard)
            for chunk in self._chunks(self.folder.attempt(shard, attempt))
            if chunk.part is not None
        ]
        entity, resumed = list(self.plan.view.entity), _Resumed()
        for chunk in self.store.journals.whole(self.store.journals.here(found)):
            assert chunk.part is not None
            path = self.store.folder / chunk.part.path
            with parsing(path, "run the view again"):
                table = pq.read_table(path, columns=[*entity, "computed_at"])
            keys = key_column(table, entity)
            # a worker that slept past its lease may note a chunk late, whose rows the next attempt
            # has computed meanwhile
            if not pc.any(pc.is_in(keys, value_set=resumed.keys)).as_py():
                resumed.add(chunk, keys, table.column("computed_at"))
        return resumed

    def golden(self, shard: int) -> GoldenRows:
        """Those that are computed among the rows of a shard; each attempt computes them anew."""
        part = self.plan.golden if shard == 0 else None
        inputs = None if part is None else read_shard_table(shard_file_path(self.store, part))
        return GoldenRows(self.plan.view, inputs)

    def _written(self, golden: GoldenRows, known: ShardResult) -> Part | None:
        if not golden.computed.num_rows:
            return None
        name = f"golden-{known.attempt}"
        try:
            return write_shard_table(self.store, self.folder.name, name, golden.computed)
        except OSError as exc:
            raise SnapshotError(disk_message(self.folder.folder, exc)) from exc

    def _sample(self, sample: Sample, known: ShardResult) -> Part | None:
        path = self.folder.folder / f"sample-{known.shard:05d}-{known.attempt}.arrow"
        try:
            return part_of(self.store, path, sample.rows) if sample.write(path) else None
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
    """CPU seconds of this process and of its children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = 0
    # those that go on, too (Linux)
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                stat = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += int(stat[11]) + int(stat[12])
    return sum(one.ru_utime + one.ru_stime for one in used) + ticks / os.sysconf("SC_CLK_TCK")


def _spent(meter: Meter) -> dict[str, float]:
    """CPU seconds of this process and of its children, and what a stream took by now."""
    return {
        "cpu": _cpu_s(),
        "model": meter.stage("model").busy_s,
        "batches": meter.batches,
        "retries": meter.retries,
    }
