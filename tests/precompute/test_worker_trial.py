"""Worker trial: who computes a run's rows on a CPU is found by what they take, in simulated time; and a run that changes hands is as one that does not."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.engine.meter import Meter
from precompute.engine.runner import Runner
from precompute.lanes import cores
from precompute.registry import load_model
from precompute.store.errors import PrecomputeError, SourceError
from precompute.workers.handover import Handover
from precompute.workers.measured_engine import MeasuredEngine
from precompute.workers.worker_pool import WorkerPool
from precompute.workers.worker_process import WorkerSpec
from precompute.workers.worker_trial import MOST_PROCESSES, Moment, Phase, WorkerTrial
from tests.precompute.test_worker_pool import DOUBLER, VIEW, as_one_process, everything, windows, workers_of


class Machine:
    """A run on a machine, of which each second is as ``alone`` or ``workers`` say: work, CPUs used by the run's own process and idle ones."""

    def __init__(self, trial: WorkerTrial, start_s: float = 5.0, model_s: float = 1.0, most: int = MOST_PROCESSES) -> None:
        self.trial, self.start_s, self.model_s, self.most = trial, start_s, model_s, most
        self.now = Moment(1000.0, 0, 0)
        self.phases = [trial.phase]

    def run(self, seconds: int, alone: tuple[int, float, float], workers: int = 0) -> WorkerTrial:
        started_at = float("inf")
        for _ in range(seconds):
            in_workers = self.trial.in_phase(Phase.WORKERS, Phase.KEPT)
            done = workers if in_workers else alone[0]
            now = self.now
            model_s = now.model_s + self.model_s
            self.now = Moment(
                now.at_s + 1, now.rows + done, now.work + done, now.cpu_s + alone[1], now.idle_s + alone[2], model_s
            )
            self.trial.told(self.now, self.most)
            if self.trial.in_phase(Phase.STARTING):
                started_at = min(started_at, self.now.at_s)
                if self.now.at_s - started_at >= self.start_s:
                    self.trial.ready()
            if self.trial.phase is not self.phases[-1]:
                self.phases.append(self.trial.phase)
        return self.trial


def test_a_model_that_pythons_lock_keeps_on_one_cpu_is_given_processes_and_they_are_kept() -> None:
    """100 rows a second by 1 of 2 CPUs, and 190 by two processes."""
    machine = Machine(WorkerTrial(100_000, 2))
    trial = machine.run(120, (100, 1.05, 0.9), 190)
    assert machine.phases == [Phase.ALONE, Phase.STARTING, Phase.WORKERS, Phase.KEPT]
    assert trial.slice_rows == 1000
    assert trial.figures() == {
        "cpus": 2,
        "cpus_used": 1.05,
        "rates": {"alone": 100.0, "workers": 190.0},
        "processes": 2,
        "kept": True,
    }


def test_processes_that_are_no_quicker_are_given_up() -> None:
    """As of a model whose memory is the limit: it gains 5 %, and takes twice the memory."""
    machine = Machine(WorkerTrial(100_000, 8))
    trial = machine.run(120, (100, 1.0, 6.8), 105)
    assert machine.phases == [Phase.ALONE, Phase.STARTING, Phase.WORKERS, Phase.NONE]
    assert trial.figures()["rates"] == {"alone": 100.0, "workers": 105.0}
    assert (trial.figures()["processes"], trial.figures()["kept"]) == (8, False)


@pytest.mark.parametrize(
    ("rows", "cpus", "alone", "given"),
    [
        (100_000, 2, (100, 1.95, 0.0), {}),  # torch in lanes
        (100_000, 2, (100, 1.95, 60.0), {}),  # a quota of 2 CPUs on a machine of 64
        (100_000, 8, (100, 1.0, 0.5), {}),  # others compute on the rest
        (100_000, 2, (100, 0.3, 1.6), {}),  # it waits for another machine
        (8_000, 2, (100, 1.0, 1.0), {}),  # half a minute is left of it
        (100_000, 2, (100, 1.0, 1.0), {"model_s": 0.5}),  # it waits for rows
        (100_000, 2, (100, 1.0, 1.0), {"most": 1}),  # memory is for one
        (100_000, 2, (0, 1.0, 1.0), {}),
    ],
)
def test_none_are_started_where_they_would_not_pay(
    rows: int, cpus: int, alone: tuple[int, float, float], given: dict[str, Any]
) -> None:
    machine = Machine(WorkerTrial(rows, cpus), **given)
    assert machine.run(50, alone).processes == 0
    assert machine.phases == [Phase.ALONE, Phase.NONE]


@pytest.mark.parametrize(
    ("cpus", "nodes", "alone", "processes"),
    [
        (8, 1, (100, 1.0, 4.2), 5),  # others have the rest
        (64, 2, (100, 1.0, 62.0), MOST_PROCESSES),
        (64, 2, (100, 60.0, 2.0), 2),  # lanes on all CPUs of two NUMA nodes
        (64, 1, (100, 60.0, 2.0), 0),
    ],
)
def test_there_are_as_many_as_idle_cpus_or_else_as_numa_nodes(
    cpus: int, nodes: int, alone: tuple[int, float, float], processes: int
) -> None:
    assert Machine(WorkerTrial(100_000, cpus, nodes)).run(40, alone).processes == processes


def test_workers_that_take_long_to_load_are_not_waited_for() -> None:
    """970 s are left: 97 for that."""
    machine = Machine(WorkerTrial(100_000, 2), start_s=98.0)
    trial = machine.run(200, (100, 1.0, 1.0), 190)
    assert machine.phases == [Phase.ALONE, Phase.STARTING, Phase.NONE]
    assert trial.figures()["kept"] is False
    assert "a tenth of the time" in trial.figures()["why"]


# ---- from hand to hand


class Scripted(WorkerTrial):
    """Starts two processes at the first piece, and gives them up after so many of theirs."""

    def __init__(self, theirs: int) -> None:
        super().__init__(1000, 2)
        self.theirs, self.slice_rows = theirs, 7
        self.workers: Callable[[], Any] | None = None

    def told(self, now: Moment, most: int = MOST_PROCESSES) -> None:
        if self.in_phase(Phase.ALONE):
            self.phase, self.processes = Phase.STARTING, 2
        elif self.in_phase(Phase.STARTING):
            # meanwhile the run's own process has as good as nothing to do, since nobody takes what it computed
            with contextlib.suppress(PrecomputeError):
                while self.workers is not None and not self.workers().ready():
                    time.sleep(0.05)
        elif self.in_phase(Phase.WORKERS):
            self.theirs -= 1
            self.phase = Phase.WORKERS if self.theirs else Phase.NONE


def engine(trial: Scripted, args: dict[str, Any], theirs: WorkerSpec | None = None) -> tuple[MeasuredEngine, Meter]:
    meter = Meter()
    spec = theirs or WorkerSpec(DOUBLER, args, {}, VIEW)
    runner = Runner(load_model(DOUBLER, args), VIEW, meter)
    measured = MeasuredEngine(runner, lambda count: WorkerPool(spec, meter, [None] * count), trial)
    trial.workers = lambda: measured._workers
    return measured, meter


@pytest.mark.parametrize(("theirs", "by_workers"), [(3, False), (10**6, True)])
def test_what_comes_out_is_as_of_one_process_whoever_computes(theirs: int, by_workers: bool) -> None:
    args = {"fail_on": 133.0, "nan_on": 1100.0}
    given = [*windows(3, 80), *windows(1, 0), *windows(40, 9, first=1000)]
    measured, meter = engine(Scripted(theirs), args)
    stream = measured.stream(iter(given), hidden=["input_hash"])
    assert everything(stream) == as_one_process(DOUBLER, args, given)
    assert meter.rows == 3 * 80 + 40 * 9
    assert ("workers" in measured.figures(1.0)) == by_workers
    assert workers_of(os.getpid()) == []


@pytest.mark.parametrize("args", [{}, {"how": "refuse"}], ids=["do not load", "fail at once"])
def test_workers_that_cannot_compute_leave_the_run_to_its_own_process(args: dict[str, Any]) -> None:
    given = list(windows(40, 9))
    spec = WorkerSpec("tests.precompute.dying_models:Dying", args, {}, VIEW)
    measured, meter = engine(Scripted(10**6), {}, spec)
    assert everything(measured.stream(iter(given), hidden=["input_hash"])) == as_one_process(DOUBLER, {}, given)
    assert "workers" not in measured.figures(1.0)
    assert meter.rows == 360


def test_where_there_are_no_threads_for_workers_the_runs_own_process_goes_on() -> None:
    def no_threads(_: int) -> WorkerPool:
        raise RuntimeError("can't start new thread")

    given, trial = list(windows(40, 9)), Scripted(10**6)
    measured = MeasuredEngine(Runner(load_model(DOUBLER, {}), VIEW), no_threads, trial)
    assert everything(measured.stream(iter(given), hidden=["input_hash"])) == as_one_process(DOUBLER, {}, given)
    assert trial.in_phase(Phase.NONE)


def test_a_stream_that_is_closed_leaves_no_process_and_closes_its_source() -> None:
    ended = []

    def source() -> Iterator[pa.RecordBatch]:
        try:
            yield from windows(1000, 9)
        finally:
            ended.append(True)

    measured, _ = engine(Scripted(10**6), {})
    stream = measured.stream(source(), hidden=["input_hash"])
    for number, _ in enumerate(stream):
        if number == 2:
            stream.close()
    assert ended == [True]
    assert workers_of(os.getpid()) == []


def test_what_the_source_raised_is_told_by_whoever_comes_next() -> None:
    """It was read ahead by the engine before, and its stream was closed."""

    def source() -> Iterator[pa.RecordBatch]:
        yield from windows(3, 80)
        raise SourceError("the disk is gone")

    handover = Handover(source())
    for _ in range(2):
        turn = handover.turn()
        assert [batch.num_rows for batch in itertools.islice(turn, 3)] == [80] * 3
        with pytest.raises(SourceError, match="the disk is gone"):
            next(turn)


def test_the_next_engine_goes_on_where_the_one_before_stopped() -> None:
    runner = Runner(load_model(DOUBLER, {}), VIEW)

    def made(rows: Callable[[int], list[int]]) -> Any:
        """The first window is computed, of the second the rows that are asked for."""
        handover = Handover(windows(3, 10))
        first = handover.turn()
        batches = [next(first), next(first)]
        told = [handover.told(runner.compute(batches[0]))]
        done = runner.compute(batches[1])
        kept = rows(10)
        some = type(done)(done.rows[np.array(kept, np.int64)], done.features.take(pa.array(kept, pa.int64())), [], 1, last=False)
        told.append(handover.told(some))
        second = handover.turn(4)
        with pytest.raises(StopIteration):
            next(first)
        for number, batch in enumerate(second):
            done = runner.compute(batch)
            told.append(handover.told(type(done)(done.rows, done.features, done.rejections, number)))
        return everything(iter(told))

    expected = as_one_process(DOUBLER, {}, windows(3, 10))
    assert [batch for batch, *_ in made(lambda n: [1, 2, 7])] == [batch for batch, *_ in made(lambda n: list(range(n)))]
    for found in (made(lambda n: [1, 2, 7]), made(lambda n: list(range(n))), made(lambda n: [])):
        assert [rows for _, rows, *_ in found] == [list(range(10))] * 3
        assert [features for *_, features, _ in found] == [features for *_, features, _ in expected]


def test_the_machines_idle_seconds_are_those_of_the_cpus_that_may_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 2 3 99999 5 6\ncpu0 1 2 3 400 50 6\ncpu1 1 2 3 9000 0 6\ncpu2 1 2 3 100 0 6\nintr 5\n")
    monkeypatch.setattr(cores, "_STAT", stat)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2})
    assert cores.idle_s() == 550 / os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(cores, "_STAT", tmp_path / "none")
    assert cores.idle_s() == 0.0
