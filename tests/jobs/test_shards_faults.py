"""Shards, attacked: what two faults together, somebody's mistake or a collection beside do to a run
whose rows workers compute."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa
import pytest

from precompute.engine.rows import Outcome
from precompute.jobs.config.project import EngineConfig
from precompute.jobs.run.rows.chunks import engine_of
from precompute.jobs.run.rows.open_model import OpenModel
from precompute.jobs.run.shards import coordinator as coordinator_module
from precompute.jobs.run.shards import worker as worker_module
from precompute.jobs.run.shards.launcher import LocalLauncher, WorkerRequest
from precompute.jobs.run.shards.shard_folder import ShardFolder, WorkerProgress
from precompute.jobs.run.shards.worker import work
from precompute.store.disk.lease import Lease
from precompute.store.doors import GROUP, LAUNCHERS
from precompute.store.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    ModelError,
    PrecomputeError,
    RejectedError,
)
from precompute.store.offline.gc import collect
from precompute.store.offline.runs import Finished, Journals
from precompute.store.offline.segment import Part
from tests.faults.harness import small_chunks
from tests.fixtures import MakeProject
from tests.jobs.test_shards import (
    ROWS,
    Workers,
    _plans,
    _until,
    sharded,
    worker_process,
    workers,
)
from tests.models import Doubler
from tests.scene import Scene

ASLEEP = WorkerRequest(["sleep", "60"])
HERE = "tests.jobs.test_shards_faults"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are sharded, too, and nobody waits."""
    monkeypatch.setattr(coordinator_module, "FEW_ROWS", 1)
    monkeypatch.setattr(coordinator_module, "RESULTS_LOOK_S", 0.01)
    monkeypatch.setattr(worker_module, "SHARD_LOOK_S", 0.02)
    monkeypatch.setattr(worker_module, "BEAT_S", 0.0)


@contextmanager
def running(scene: Scene, **options: Any) -> Iterator[list[PrecomputeError]]:
    """A run that wants workers by now, and is over at the end; the error that ended it."""
    errors: list[PrecomputeError] = []

    def run() -> None:
        try:
            scene.run(**options)
        except PrecomputeError as exc:
            errors.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    _until(lambda: bool(errors) or any(_plans(scene)))
    assert not errors
    yield errors
    thread.join(20)
    assert not thread.is_alive()


@contextmanager
def first_attempt_lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first worker with a result ends before it records it."""
    record, lost = ShardFolder.record, list[Any]()

    def recorded(folder: ShardFolder, result: Any) -> bool:
        if not lost:
            lost.append(result)
            raise FencedError("gone")
        return record(folder, result)

    with monkeypatch.context() as patch:
        patch.setattr(ShardFolder, "record", recorded)
        yield


def test_collection_beside_a_run_leaves_what_its_workers_need(make_project: MakeProject) -> None:
    scene = sharded(make_project)
    with running(scene) as errors:
        assert not collect(scene.reread().store, keep=1, grace_s=0)
        crew = Workers(scene, 1)
    crew.join()
    assert not errors
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}


def test_workers_look_as_often_as_there_are_shards(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, looks, names = sharded(make_project, shards=40), list[str](), ShardFolder._names

    def counted(folder: ShardFolder, kind: str) -> list[str]:
        looks.append(kind)
        return names(folder, kind)

    monkeypatch.setattr(coordinator_module, "RESULTS_LOOK_S", 0.2)
    monkeypatch.setattr(ShardFolder, "_names", counted)
    with workers(scene, 1):
        scene.run()
    assert looks.count("result") < 4 * 40


def test_rows_taken_over_are_as_old_as_they_are(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = sharded(make_project, shards=1)
    with first_attempt_lost(monkeypatch), workers(scene, 1):
        report = scene.run()
    assert report.engine["attempts"] == 2
    times = [row["computed_at"].timestamp() for row in scene.rows()]
    snapshot = scene.snapshot()
    assert snapshot.computed_at_min == pytest.approx(min(times) * 1e6, abs=2)
    assert snapshot.computed_at_max == pytest.approx(max(times) * 1e6, abs=2)


def test_a_chunk_noted_late_is_not_taken_twice(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker sleeps before it notes a chunk; the next attempt computes these rows, and dies."""
    scene, add, late = sharded(make_project, shards=1), Journals.add, list[tuple[str, Finished]]()

    def noted(journals: Journals, run: str, chunk: Finished) -> None:
        if run.endswith("-s00000-1"):
            late.append((run, chunk))
            raise FencedError("asleep")
        add(journals, run, chunk)
        if run.endswith("-s00000-2"):
            add(journals, *late[0])
            raise FencedError("killed")

    monkeypatch.setattr(Journals, "add", noted)
    with small_chunks(), workers(scene, 1):
        report = scene.run()
    assert report.engine["attempts"] == 3
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}


def test_a_full_run_takes_nothing_of_a_run_that_committed(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies before its workers' journals are removed, one of an attempt that did not count."""
    scene = sharded(make_project, shards=1)
    with monkeypatch.context() as patch, first_attempt_lost(patch):
        patch.setattr(ShardFolder, "attempts", lambda *_: [])
        patch.setattr(Journals, "end", lambda *_: None)
        with workers(scene, 1):
            scene.run(full=True)
    with workers(scene, 1):
        report = scene.run(full=True)
    assert (report.resumed, report.counts["written"]) == (0, 100)


def test_what_ended_a_worker_comes_first(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of shards that have such a row each, the first one's is rejected before a second worker is
    lost: else the run ends since workers end one after the other."""
    scene, tried = sharded(make_project), list[int]()

    def stopped(_: object, attempt: Any) -> None:
        tried.append(attempt.known.shard)
        attempt.drop()
        raise worker_module.WorkEnded

    with running(scene):
        with monkeypatch.context() as patch:
            patch.setattr(worker_module._Worker, "_compute", stopped)
            for _ in range(6):
                work(scene.reread(), "numbers")
        crew = Workers(scene, 1)
    crew.join()
    assert (len(tried), len(set(tried))) == (6, 1)


class Hanging(Doubler):
    """Never returns for the row 60."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        while 60.0 in batch.column("x").to_pylist():
            time.sleep(60)
        return super().compute(batch)


def test_a_row_that_hangs_is_rejected_alone(make_project: MakeProject) -> None:
    rows = [(i, 10.0 * i) for i in range(9)]
    view = {"shards": 3, "model": {"use": f"{HERE}:Hanging"}}
    scene = make_project(rows, view=view, project={"engine": {"workers": 1, "hang": "500ms"}})
    report = scene.run()
    assert (report.counts["written"], report.counts["rejected"]) == (8, 1)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards that workers take, in this order; the first one is 1, of several."""
    found, take = list[int](), ShardFolder.take
    monkeypatch.setattr(worker_module, "zlib", SimpleNamespace(crc32=lambda _: 1))

    def noted(folder: ShardFolder, shard: int, *of: Any) -> Lease:
        lease = take(folder, shard, *of)
        found.append(shard)
        return lease

    monkeypatch.setattr(ShardFolder, "take", noted)
    return found


def test_shards_of_a_worker_are_one_stream(
    make_project: MakeProject, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = list[Any]()

    def noted(*of: Any) -> Any:
        engines.append(of)
        return engine_of(*of)

    monkeypatch.setattr(worker_module, "engine_of", noted)
    scene = sharded(make_project)
    with workers(scene, 1):
        scene.run()
    assert (len(engines), taken) == (1, [1, 2, 3, 0])
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}


def test_a_lease_that_is_lost_takes_its_shard_and_not_the_next(
    make_project: MakeProject, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "FIRST_S", 0.0)
    check, lost = Lease.check, list[Lease]()

    def fenced(lease: Lease) -> None:
        if lease.name == "00001" and not lost:
            _until(lambda: taken == [1, 2])
            lost.append(lease)
            raise FencedError("lost")
        check(lease)

    monkeypatch.setattr(Lease, "check", fenced)
    scene = sharded(make_project)
    with small_chunks(), workers(scene, 1):
        report = scene.run()
    assert (sorted(taken), report.engine["attempts"]) == ([0, 1, 1, 2, 3], 5)
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}


class Unfit(Doubler):
    """Says that the row 30 does not fit it, once the next shard is taken, too."""

    taken: ClassVar[list[int]]

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        if ROWS[30][1] in batch.column("x").to_pylist():
            _until(lambda: 2 in self.taken)
            raise ModelError("it does not fit")
        return super().compute(batch)


def test_a_failure_is_of_the_shard_whose_rows_were_computed(
    make_project: MakeProject, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "FIRST_S", 0.0)
    monkeypatch.setattr(Unfit, "taken", taken, raising=False)
    failed, fail = list[int](), ShardFolder.fail

    def noted(folder: ShardFolder, result: Any) -> None:
        failed.append(result.shard)
        fail(folder, result)

    monkeypatch.setattr(ShardFolder, "fail", noted)
    scene = sharded(make_project, model={"use": f"{HERE}:Unfit"})
    with workers(scene, 1), pytest.raises(ModelError, match=r"shard 1, .*: it does not fit"):
        scene.run()
    assert set(failed) == {1}


def test_what_a_worker_writes_late_goes_with_it(make_project: MakeProject) -> None:
    folder = ShardFolder(make_project(ROWS).store, "run")
    folder.folder.mkdir(parents=True)
    plan: Any = SimpleNamespace(columns=Part("data/run-shards/columns.arrow", 0, 0, ""))
    for file, there in ((folder.folder / "columns.arrow", True), (None, False)):
        if file is not None:
            file.touch()
        folder.beat(WorkerProgress("late"))
        folder.forget(plan)
        assert folder.folder.exists() is there
        (folder.folder / "columns.arrow").unlink(missing_ok=True)


def test_a_shard_is_taken_when_the_one_before_is_soon_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now, first = [0.0], cast(Any, SimpleNamespace(end=9))
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    line, outs = worker_module._Line(first), [40, 54, 1, 5]
    line.given = 100

    def wait(_: float) -> None:
        # a row a second
        now[0] += (out := outs.pop(0))
        assert line.of(Outcome(np.arange(out), pa.record_batch({"x": []}))) is first

    monkeypatch.setattr(line._changed, "wait", wait)
    assert (line.has_room(), outs) == (True, [5])
    assert line.add(first)
    monkeypatch.setattr(line._changed, "wait", lambda _: line.close())
    # two at a time
    assert not line.has_room()
    assert not line.add(first)


class LoadsLate(Doubler):
    """Is not loaded by a worker while a file is there, which it removes."""

    def __init__(self, file: str) -> None:
        super().__init__()
        if "work" in sys.argv and os.path.exists(file):
            os.unlink(file)
            time.sleep(60)


def test_one_that_hangs_while_it_loads_ends_and_is_told(
    make_project: MakeProject, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    model = {"use": f"{HERE}:LoadsLate", "args": {"file": str(tmp_path / "file")}}
    project = {"engine": {"on": "elsewhere", "hang": "500ms"}}
    scene = sharded(make_project, project=project, model=model)
    with running(scene) as errors:
        hanging = worker_process(scene, before="worker.LOAD_S = 0.5;")
        _, said = hanging.communicate(timeout=20)
        crew = Workers(scene, 1)
    crew.join()
    assert hanging.returncode == 1
    assert "did not load its model within 0.5 s (engine.hang gives it more)" in said
    assert (errors, scene.doubles()) == ([], {i: 2 * x for i, x in ROWS})


def test_one_that_was_stopped_itself_blames_nobody(
    make_project: MakeProject, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    model = {"use": "tests.models:Counting", "args": {"path": str(log), "sleep_s": 0.1}}
    project = {"engine": {"on": "elsewhere", "hang": "2s"}}
    scene = sharded(make_project, shards=1, project=project, model=model)
    with running(scene):
        stopped = worker_process(scene)
        _until(lambda: log.exists() and len(log.read_text().splitlines()) > 3)
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(3)
        stopped.send_signal(signal.SIGCONT)
        _, said = stopped.communicate(timeout=20)
    assert (stopped.returncode, scene.report().engine["attempts"]) == (0, 1), said


def test_workers_that_hang_with_pythons_lock_end_the_run(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is there to say so, nor to end itself."""
    monkeypatch.setattr(coordinator_module, "NO_WORKER_S", 0.2)
    monkeypatch.setattr(coordinator_module, "LOAD_S", 0.2)
    monkeypatch.setattr(coordinator_module._Coordinator, "_request", lambda _: ASLEEP)
    project = {"engine": {"workers": 2, "hang": "100ms"}}
    scene = make_project(ROWS, view={"shards": 2}, project=project)
    with pytest.raises(ModelError, match=r"no worker has reported for 0 s: they hang"):
        scene.run()


def test_an_operator_is_warned_that_all_workers_are_gone(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator_module, "NO_WORKER_S", 0.3)
    scene = sharded(make_project)

    def stopped(_: object, attempt: Any) -> None:
        attempt.drop()
        raise worker_module.WorkEnded

    with running(scene):
        with monkeypatch.context() as patch:
            patch.setattr(worker_module._Worker, "_compute", stopped)
            work(scene.reread(), "numbers")
        _until(lambda: "no worker is left for" in caplog.text)
        crew = Workers(scene, 1)
    crew.join()
    assert "precompute work numbers --run" in caplog.text


class FifthsFail(Doubler):
    """Raises where a row's x is a multiple of 5."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        if any(x % 5 == 0 for x in batch.column("x").to_pylist()):
            raise ValueError("a multiple of 5")
        return super().compute(batch)


def test_too_many_rejected_in_all_shards_says_why(make_project: MakeProject) -> None:
    rows = [(i, float(i)) for i in range(100)]
    model = {"use": f"{HERE}:FifthsFail"}
    scene = sharded(make_project, rows, 5, model=model, max_rejected=0.1)
    # four in each of five shards, and ten may be
    with workers(scene), pytest.raises(RejectedError, match=r"rows rejected so far.*multiple of 5"):
        scene.run()
    assert (scene.report().status, scene.numbers()) == ("rejected", [])


def unconverted(opened: OpenModel) -> None:
    raise ConfigError("precision bf16: not on this host")


@pytest.mark.parametrize(
    ("owner", "name", "by", "said"),
    [
        (OpenModel, "convert", unconverted, "not on this host"),
        (Doubler, "fingerprint", lambda _: "another", "this host's model has the fingerprint"),
    ],
)
def test_a_host_whose_model_is_another_or_not_converted_ends_alone(
    make_project: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    by: Any,
    said: str,
) -> None:
    scene = sharded(make_project)
    with running(scene) as errors:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, by)
            with pytest.raises(ConfigError, match=said):
                work(scene.reread(), "numbers")
        crew = Workers(scene, 1)
    crew.join()
    assert not errors
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}


def test_a_worker_of_a_run_that_died_says_that_nobody_takes_its_rows(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = sharded(make_project, shards=1)
    monkeypatch.setattr(ShardFolder, "withdraw", lambda _: None)
    monkeypatch.setattr(ShardFolder, "close", lambda _: None)
    began = threading.Event()
    taken = worker_module._Worker._resumed

    def noted(worker: Any, shard: int) -> Any:
        began.set()
        _until(lambda: not scene.store.running(None))
        return taken(worker, shard)

    monkeypatch.setattr(worker_module._Worker, "_resumed", noted)
    monkeypatch.setattr(Lease, "check", _fenced_when(began))
    monkeypatch.setattr(coordinator_module, "LEASE_CHECK_S", 0.0)
    with running(scene) as errors:
        crew = Workers(scene, 1)
        assert began.wait(20)
    assert isinstance(errors[0], FencedError)
    crew.join()
    (done,) = crew.done
    assert isinstance(done, ConflictError)
    assert "nobody takes what was computed" in str(done)


def _fenced_when(began: threading.Event) -> Any:
    def check(lease: Lease) -> None:
        if lease.name.startswith("run") and began.is_set():
            raise FencedError("dead")

    return check


def test_arguments_that_change_on_their_way_are_refused(make_project: MakeProject) -> None:
    model = {"use": f"{HERE}:Mapped", "args": {"factors": {1: 2}}}
    scene = sharded(make_project, model=model)
    with pytest.raises(ConfigError, match=r"numbers\.yaml:\d+: model\.args\.factors: {1: 2} reach"):
        scene.run()


class Mapped(Doubler):
    """``double`` as ever, by numbers from a mapping that its fingerprint does not tell of."""

    def __init__(self, factors: dict[int, int]) -> None:
        super().__init__()
        self._factors = factors


class Paid(Doubler):
    """One with rates and a budget."""

    in_run_process = True


def test_a_budget_is_spent_in_one_process(make_project: MakeProject) -> None:
    scene = sharded(make_project, model={"use": f"{HERE}:Paid"})
    assert "shards" not in scene.run().engine
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}


def test_a_worker_that_is_to_end_while_it_waits(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(worker_module, "STOP_S", 0.2)
    monkeypatch.setattr(os, "_exit", ended.append)
    scene = sharded(make_project)

    def noted(_: object) -> list[str]:
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    monkeypatch.setattr(ShardFolder, "runs", noted)
    assert scene.cli("work", "numbers", "--wait", "20s") == 143
    assert "ended before a run began" in capsys.readouterr().out
    # and its process, where it goes on, is not ended later
    time.sleep(0.4)
    assert not ended


class Launched(LocalLauncher):
    """Processes that stand in for those of a cluster's hosts, as another package has it."""

    def __init__(self, engine: EngineConfig, workers: int) -> None:
        assert (engine.on, engine.workers) == ("hosts", workers) == ("hosts", 2)
        super().__init__(3)


class OfAnotherHost(Doubler):
    """Has another fingerprint in the first worker that starts."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = Path(file)

    def fingerprint(self) -> str:
        if "work" not in sys.argv:
            return super().fingerprint()
        try:
            self._file.unlink()
        except FileNotFoundError:
            return super().fingerprint()
        return "another"


def test_a_host_with_another_model_ends_alone_in_a_cluster(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    point = EntryPoint("launcher.hosts", f"{HERE}:Launched", GROUP)
    monkeypatch.setattr(LAUNCHERS, "_foreign", {"hosts": point})
    file = tmp_path / "first"
    file.touch()
    model = {"use": f"{HERE}:OfAnotherHost", "args": {"file": str(file)}}
    view = {"shards": 2, "model": model}
    folder = make_project(ROWS, view=view, project={"engine": {"workers": 2}}).folder
    # the package is not where the workers run, which need not know how they were started
    scene = Scene(folder, {"PRECOMPUTE_ENGINE__ON": "hosts"})
    assert scene.run().status == "published"
    assert not file.exists()
    assert scene.doubles() == {i: 2 * x for i, x in ROWS}
