"""Worker pool: what comes out is what the runner makes in one process, however workers die; and no
worker outlives its stream."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precompute.engine.ahead import Meter
from precompute.engine.resources import allowed, share_of_cpus, usable_threads
from precompute.engine.rows import Outcome
from precompute.engine.runner import START_ROWS, Runner
from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError
from precompute.store.feature_view import Feature, FeatureView
from precompute.workers import worker
from precompute.workers import worker_pool as pool_stream
from precompute.workers.process import (
    ChildProcess,
    framed,
    python_module,
    read_frame,
    write_frame,
)
from precompute.workers.worker import Share, WorkerSpec
from precompute.workers.worker_pool import HELD, WorkerPool
from tests.precompute.dying_models import Poisoned
from tests.server import eventually

ROOT = str(Path(__file__).parents[2])
VIEW = FeatureView(
    "numbers",
    ("id",),
    (Feature("double", "float64"), Feature("vector", "float32", dim=4)),
    60.0,
    60.0,
)
DOUBLER, DYING, LAUNCHING, TOLD, SLOW_TO_LOAD, POISONED, WAITING = (
    "tests.models:Doubler",
    *(
        f"tests.precompute.dying_models:{name}"
        for name in ("Dying", "Launching", "Told", "SlowToLoad", "Poisoned", "Waiting")
    ),
)
IN_TIME: dict[str, Any] = {"heartbeat_s": 0.1, "stall_s": 1.5, "hang_s": 1.5}
Stream = Iterable[tuple[pa.RecordBatch, Outcome]]


def pool(
    use: str,
    args: Mapping[str, Any] | None = None,
    workers: int = 1,
    meter: Meter | None = None,
    **given: Any,
) -> WorkerPool:
    return WorkerPool(
        WorkerSpec(use, args or {}, {}, VIEW), meter or Meter(), [None] * workers, **given
    )


def windows(count: int, rows: int, first: int = 0) -> Iterator[pa.RecordBatch]:
    """x counts from ``first`` through all windows."""
    for number in range(count):
        xs = [float(first + number * rows + row) for row in range(rows)]
        yield pa.record_batch(
            {
                "id": [f"row {x}" for x in xs],
                "x": pa.array(xs, pa.float64()),
                "input_hash": pa.array(range(rows)),
            }
        )


def everything(stream: Stream) -> list[Any]:
    """All that a stream says, window for window and row for row, in however many pieces it says
    it."""
    windows: dict[int, list[tuple[pa.RecordBatch, Outcome]]] = {}
    for batch, done in stream:
        pieces = windows.setdefault(done.window, [])
        assert not (pieces and pieces[-1][1].last)
        pieces.append((batch, done))
    found = []
    for _, pieces in sorted(windows.items()):
        assert pieces[-1][1].last
        rows = sorted(
            (r, f)
            for _, done in pieces
            for r, f in zip(done.rows.tolist(), done.features.to_pylist(), strict=True)
        )
        rejections = sorted(
            (r for _, done in pieces for r in done.rejections), key=lambda rejection: rejection.row
        )
        batch, first = pieces[0]
        found.append(
            (
                batch.to_pylist(),
                [r for r, _ in rows],
                first.features.schema,
                [f for _, f in rows],
                rejections,
            )
        )
    return found


def as_one_process(
    use: str, args: Mapping[str, Any], given: Iterable[pa.RecordBatch], meter: Meter | None = None
) -> list[Any]:
    return everything(
        Runner(load_model(use, args), VIEW, meter).stream(given, hidden=["input_hash"])
    )


def without(everything: Sequence[Any], window: int, row: int) -> tuple[list[Any], str]:
    """All but one row, which must be rejected by the pool; and why it was."""
    left, error = [], ""
    for number, (batch, rows, schema, features, rejections) in enumerate(everything):
        if number == window:
            (rejection,) = rejections
            assert (rejection.row, rejection.stage) == (row, "worker")
            error, rejections = rejection.error, []
            assert row not in rows
        left.append((batch, rows, schema, features, rejections))
    return left, error


def less(everything: Sequence[Any], window: int, row: int) -> list[Any]:
    """All but one row, which was computed."""
    left = list(everything)
    batch, rows, schema, features, rejections = left[window]
    at = rows.index(row)
    left[window] = (
        batch,
        rows[:at] + rows[at + 1 :],
        schema,
        features[:at] + features[at + 1 :],
        rejections,
    )
    return left


def processes() -> dict[int, tuple[int, str]]:
    """Living processes: pid → (group, command line); zombies are dead."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if state not in "ZX":
                found[int(folder.name)] = (int(group), command)
    return found


def workers_of(parent: int) -> list[int]:
    """Pids of the worker processes of a process."""
    found = []
    for pid, (_, command) in processes().items():
        if "-m precompute.workers.worker" in command:
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found += [pid] if int(stat[1]) == parent else []
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert workers_of(os.getpid()) == []


# ---- the same as in one process


@pytest.mark.parametrize("workers", [1, 2])
def test_what_comes_out_is_what_the_runner_makes(workers: int) -> None:
    args = {"fail_on": 13.0, "nan_on": 40.0}
    given = [*windows(6, START_ROWS), *windows(1, 0), *windows(3, 1, first=100)]
    ours, theirs = Meter(), Meter()
    stream = pool(DOUBLER, args, workers, ours).stream(iter(given), hidden=["input_hash"])
    assert everything(stream) == as_one_process(DOUBLER, args, given, theirs)
    assert ours.rows == theirs.rows == 6 * START_ROWS + 3
    assert (ours.batches, ours.retries) == (theirs.batches, theirs.retries)
    assert ours.batch_steps.total() == theirs.batch_steps.total() > 0
    assert ours.stage("model").busy_s > 0


@pytest.mark.parametrize("count", [1, 7])
def test_a_device_that_is_batches_ahead_keeps_nobody_waiting(count: int) -> None:
    """Also where a window has no batch at all, and where nothing follows."""
    given = [
        w for i in range(count) for w in [*windows(1, 9, first=9 * i), *windows(1, 3, first=-3)]
    ]
    ours, theirs = Meter(), Meter()
    workers = pool(LAUNCHING, meter=ours)
    stream = workers.stream(given, hidden=["input_hash"])
    assert everything(stream) == as_one_process(LAUNCHING, {}, given, theirs)
    assert (ours.batches, ours.cost, ours.padded_cost) == (theirs.batches, 9 * count, 9 * count)
    figures = workers.figures(1.0)
    expected = {
        "budget": 4,
        "cost_unit": "rows",
        "device_peak_memory_bytes": 0,
        "peak_flops": 10**8,
    }
    assert figures | expected == figures
    assert figures["mfu"] == round(90.0 * count / (ours.forward_s + ours.landing_s) / 1e8, 4) > 0


def test_what_is_computed_is_handed_on_during_the_window(tmp_path: Path) -> None:
    """Its worker dies at the last row, when other rows are out already, or rejected; none is so
    twice."""
    given = list(windows(1, 30))
    args = {"fail_on": 1.0}
    dying = {"how": "leave", "on": 29.0, "sleep_s": 0.4, "once": str(tmp_path / "once")}
    stream = pool(DYING, dying | args).stream(given, hidden=["input_hash"])
    pieces = list(stream)
    assert [done.last for _, done in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(done.done for _, done in pieces) == 30
    assert everything(pieces) == as_one_process(DOUBLER, args, given)
    assert len(pieces) > 1


def test_what_a_model_prints_is_not_taken_for_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    given = list(windows(3, 4))
    assert everything(
        pool(DYING, {"how": "speak"}).stream(given, hidden=["input_hash"])
    ) == as_one_process(DOUBLER, {}, given)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("printed by Python\nprinted below it\n") == 3


def test_workers_share_cores_and_memory_and_each_sees_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header, memory_mb = WorkerSpec.header, list[int]()

    def noted(spec: WorkerSpec, args: Any, cpus: Any, share: Share) -> dict[str, Any]:
        memory_mb.append(share.memory_mb)
        return header(spec, args, cpus, share)

    monkeypatch.setattr(WorkerSpec, "header", noted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,GPU-a")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RAYON_NUM_THREADS", "5")
    cores = usable_threads(allowed())
    view = FeatureView("seen", ("id",), (Feature("said", "string"),), 60.0, 60.0)

    def said(args: Mapping[str, Any], *devices: str | None) -> set[str]:
        spec = WorkerSpec(TOLD, args, {"table": pa.table({"n": [40, 2]})}, view)
        stream = WorkerPool(spec, Meter(), devices).stream(windows(10_000, 1))
        found: set[str] = set()
        for _, done in stream:
            found.add(done.features.column("said")[0].as_py())
            if len(found) == len(devices):
                break
        stream.close()
        return found

    every = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    mine = ",".join(map(str, sorted(share_of_cpus(1, 2)))) or every
    assert said({"device": "cuda:0"}, "cuda:1", "cpu") == {
        f"cuda 42 7 {cores // 2} 5 on {every}",
        f"cpu 42  {cores // 2} 5 on {mine}",
    }
    assert said({}, "cuda:2") == {f"None 42 GPU-a - 5 on {every}"}
    assert memory_mb == [128, 128, 256], "half of 512 lies here"


def test_of_two_gpus_the_faster_one_computes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    view = FeatureView("seen", ("id",), (Feature("said", "string"),), 60.0, 60.0)
    spec = WorkerSpec(TOLD, {}, {"table": pa.table({"n": [1]})}, view)
    rows = Counter[str]()
    for _, done in WorkerPool(spec, Meter(), ["cuda:0", "cuda:1"]).stream(windows(60, 4)):
        rows.update(done.features.column("said").to_pylist())
    slow, fast = (rows[said] for said in sorted(rows))
    assert slow + fast == 240
    assert fast > 2 * slow


def test_a_model_of_ones_own_is_found_in_the_projects_folder(tmp_path: Path) -> None:
    (tmp_path / "of_ones_own.py").write_text("from tests.models import Doubler as Mine\n")
    spec = WorkerSpec("of_ones_own:Mine", {}, {}, VIEW, tmp_path)
    given = list(windows(1, 3))
    stream = WorkerPool(spec, Meter(), [None]).stream(given, hidden=["input_hash"])
    assert everything(stream) == as_one_process(DOUBLER, {}, given)


def test_a_worker_without_a_torch_model_does_not_load_torch() -> None:
    code = "import sys, precompute.workers.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_worker_whose_input_cannot_be_read_ends() -> None:
    """Another one then has its rows, instead of waiting for as long as a batch may take."""
    spec = WorkerSpec(DOUBLER, {}, {}, VIEW).header({}, frozenset(), Share(1, 64, 60.0))
    command, environment = python_module("precompute.workers.worker")
    child = ChildProcess(command, output="piped", environment=environment)
    stdin, stdout = child.pipes()
    with stdin, stdout:
        write_frame(stdin, spec)
        while (frame := read_frame(stdout)) is not None and frame[0]["kind"] != "ready":
            pass
        assert frame is not None
        stdin.write(framed({}, 8) + b"no Arrow")
        stdin.flush()
        assert child.wait(30)
    assert child.status == 1
    assert child.last_words() != ""


def test_no_more_is_read_than_may_be_held() -> None:
    read = itertools.count()
    last = 0

    def counted(rows: int) -> Iterator[pa.RecordBatch]:
        nonlocal last
        for window in windows(100, rows):
            last = next(read)
            yield window

    for rows, memory_mb, most in (
        (1, 512, HELD + 2),
        (10_000, 1, 2),
    ):  # half of the memory holds one window and its features
        read, stream = itertools.count(), pool(DOUBLER).stream(counted(rows), memory_mb=memory_mb)
        next(stream)
        time.sleep(0.7)
        assert last <= most
        stream.close()


# ---- deaths


@pytest.mark.parametrize(
    ("how", "at", "options", "reason"),
    [
        (
            "kill",
            10,
            {},
            "was ended by signal 9 (SIGKILL), as by a system that is out of memory (2 of 2 tries)",
        ),
        (
            "leave",
            8,
            {},
            "exited with status 3; the last line of its stderr: last words (2 of 2 tries)",
        ),
        ("stop", 9, {"attempts": 1, **IN_TIME}, "gave no sign of life for 1.5 s (1 of 1 tries)"),
    ],
)
def test_a_row_that_ends_or_silences_its_worker_is_rejected_alone(
    how: str, at: int, options: dict[str, Any], reason: str
) -> None:
    given = list(windows(3, 8))
    stream = pool(DYING, {"how": how, "on": at}, 2, **options).stream(given, hidden=["input_hash"])
    left, error = without(everything(stream), 1, at - 8)
    assert left == less(as_one_process(DOUBLER, {}, given), 1, at - 8)
    assert error == f"its worker process {reason}"


def test_where_there_is_no_thread_to_read_no_worker_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "read":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    given = (window for window in windows(1, 1))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        next(pool(DOUBLER).stream(given))
    assert workers_of(os.getpid()) == []
    # closed
    assert next(given, None) is None


def test_a_row_that_breaks_a_gpus_context_is_rejected_alone() -> None:
    """The rows beside it are computed by others: in its process nothing computes any more."""
    given = list(windows(3, 8))
    stream = pool(POISONED, {"on": 10.0}).stream(given, hidden=["input_hash"])
    left, error = without(everything(stream), 1, 2)
    assert left == less(as_one_process(DOUBLER, {}, given), 1, 2)
    why = f"the GPU is lost to this process: {Poisoned.ASSERTED.splitlines()[0]}"
    assert (
        error
        == f"its worker process exited with status 70; the last line of its stderr: {why} (2 of 2 tries)"
    )


def test_two_such_rows_in_one_window_are_both_found() -> None:
    given = [pa.record_batch({"x": [3.0, 1.0, 2.0, 3.0]})]
    ((_, rows, _, features, rejections),) = everything(
        pool(DOUBLER, {"kill_on": 3.0}, 2, attempts=1).stream(given)
    )
    assert (rows, [value["double"] for value in features]) == ([1, 2], [2.0, 4.0])
    assert [(r.row, r.stage) for r in rejections] == [(0, "worker"), (3, "worker")]


def test_a_suspect_is_tried_alone_and_as_often_as_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Once with a neighbour, most often, and then twice without."""
    given = list(windows(12, 1))
    left, _ = without(
        everything(pool(DYING, {"how": "leave", "on": 5.0}).stream(given, hidden=["input_hash"])),
        5,
        0,
    )
    assert left == less(as_one_process(DOUBLER, {}, given), 5, 0)
    assert capfd.readouterr().err.count("last words") in (2, 3)


def test_a_row_that_hangs_its_worker_is_rejected_and_a_slow_one_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that hung are tried with less patience, each with all of it before it is rejected, and
    that when all others are done."""
    # so little that it does not do for the slow one, however slow the machine is
    monkeypatch.setattr(worker, "TIMES", 0.0)
    given, meter = list(windows(3, 2)), Meter()
    workers = pool(
        WAITING,
        {"waits": {"2.0": 0.5, "3.0": 600.0}},
        meter=meter,
        **IN_TIME | {"heartbeat_s": 0.05},
    )
    pieces = []
    for piece in workers.stream(given, hidden=["input_hash"]):
        pieces.append((*piece, meter.rows_retried))
    left, error = without(everything((batch, done) for batch, done, _ in pieces), 1, 1)
    assert left == less(as_one_process(DOUBLER, {}, given), 1, 1)
    assert error == "its worker process finished no batch for 1.5 s (2 of 2 tries)"
    assert (pieces[-1][1].window, pieces[-1][2]) == (1, 0)
    assert max(retried for _, _, retried in pieces) > 0
    lines = [record.message for record in caplog.records]
    assert lines[0].startswith("numbers: worker 0 finished no batch for 1.5 s; it is replaced, ")
    assert [line for line in lines if "rejected" in line] == [
        "numbers: worker 0 finished no batch for 1.5 s; it is replaced, and the row it had is rejected"
    ]
    assert len(lines) == workers.figures(1.0)["workers_replaced"] > 2


def test_a_window_whose_worker_died_once_is_computed_whole(tmp_path: Path) -> None:
    given = list(windows(4, 8))
    meter = Meter()
    args = {"how": "kill", "on": 9.0, "once": str(tmp_path / "once")}
    assert everything(
        pool(DYING, args, meter=meter).stream(given, hidden=["input_hash"])
    ) == as_one_process(DOUBLER, {}, given)
    assert meter.batches == 4


@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGKILL), (2, signal.SIGSTOP)])
def test_workers_ended_from_outside_cost_no_row(workers: int, number: int) -> None:
    given = list(windows(20, 3))
    stream = pool(DOUBLER, {"sleep_s": 0.03}, workers, **IN_TIME).stream(
        given, hidden=["input_hash"]
    )
    chosen = random.Random(number)
    seen = []
    for item in stream:
        seen.append(item)
        if len(seen) in (2, 12):
            os.kill(chosen.choice(workers_of(os.getpid())), number)
    assert everything(seen) == as_one_process(DOUBLER, {}, given)


def test_a_worker_ended_while_loading_costs_no_row(tmp_path: Path) -> None:
    given = list(windows(20, 3))
    stream = pool(SLOW_TO_LOAD, {"folder": str(tmp_path / "loaded")}, 2, **IN_TIME).stream(
        given, hidden=["input_hash"]
    )
    seen = [next(stream)]
    for process in workers_of(os.getpid()):
        os.kill(process, signal.SIGKILL)  # one computes, the other still loads
    assert everything([*seen, *stream]) == as_one_process(DOUBLER, {}, given)


def test_a_worker_that_never_loads_fails_the_run_though_another_one_does(tmp_path: Path) -> None:
    args = {"folder": str(tmp_path / "loaded"), "fail": True}
    with pytest.raises(
        ModelError, match="could not be loaded: its worker process exited with status 7"
    ):
        everything(pool(SLOW_TO_LOAD, args, 2).stream(windows(400, 3), hidden=["input_hash"]))


def test_a_model_that_always_dies_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_stream, "MAX_FRUITLESS", 4)
    with pytest.raises(
        ModelError,
        match=r"^5 worker processes died one after the other .* the last one exited with status 3; .*last words",
    ):
        everything(pool(DYING, {"how": "leave"}).stream(windows(1, 1000)))


# ---- errors


@pytest.mark.parametrize(
    ("args", "kind"), [({"how": "raise"}, ModelError), ({"when": 1}, ConfigError)]
)
def test_a_model_that_does_not_load_fails_the_run_in_its_own_words(
    args: dict[str, Any], kind: type[Exception]
) -> None:
    use = "tests.precompute.dying_models:Unloadable"
    with pytest.raises(kind) as theirs:
        load_model(use, args)
    with pytest.raises(kind) as ours:
        everything(pool(use, args, 2).stream(windows(3, 1)))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (
            "leave",
            "could not be loaded: its worker process exited with status 7; the last line of its stderr: no memory",
        ),
        ("exit", "failed to load: SystemExit: no licence"),
    ],
)
def test_a_model_that_ends_its_process_while_it_loads_fails_the_run(how: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        everything(
            pool("tests.precompute.dying_models:Unloadable", {"how": how}, 2).stream(windows(3, 1))
        )


def test_a_model_whose_files_changed_since_the_run_began_fails_it() -> None:
    spec = WorkerSpec(DOUBLER, {}, {}, VIEW, fingerprint="f" * 64)
    with pytest.raises(ConfigError, match="in a worker, and had ffffffffffff when the run began"):
        everything(WorkerPool(spec, Meter(), [None]).stream(windows(1, 2)))


def test_a_model_that_refuses_the_source_fails_the_run() -> None:
    given = list(windows(5, 4))
    stream = pool(DYING, {"how": "refuse", "on": 8.0}).stream(given, hidden=["input_hash"])
    assert everything([next(stream), next(stream)]) == as_one_process(DOUBLER, {}, given[:2])
    with pytest.raises(ModelError, match=r"^this source is not for me$"):
        next(stream)


def test_what_the_windows_raise_is_passed_on_after_what_they_gave() -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from windows(3, 4)
        raise OSError("the disk is gone")

    stream = pool(DOUBLER, workers=2).stream(failing(), hidden=["input_hash"])
    assert everything([next(stream) for _ in range(3)]) == as_one_process(
        DOUBLER, {}, windows(3, 4)
    )
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)


# ---- the end


@pytest.mark.parametrize("how", ["start_another", "stop"])
def test_a_closed_stream_leaves_no_process(how: str) -> None:
    closed = []

    def endless() -> Iterator[pa.RecordBatch]:
        try:
            for number in itertools.count():
                yield from windows(1, 2, 2 * number)
        finally:
            closed.append(True)

    stream = pool(DYING, {"how": how, "on": 6.0}, 2).stream(endless())
    next(stream)
    groups = set(workers_of(os.getpid()))
    assert len(groups) == 2
    if how == "start_another":
        eventually(
            lambda: any(
                group in groups and "sleep" in command for group, command in processes().values()
            )
        )
    stream.close()
    assert closed == [True]
    assert [command for group, command in processes().values() if group in groups] == []


SCRIPT = """
import os, sys
from tests.precompute.test_worker_pool import DOUBLER, pool, windows, workers_of
for _ in pool(DOUBLER, {"sleep_s": 0.1}, 2, heartbeat_s=0.1, stall_s=1.0, hang_s=1.0).stream(windows(int(sys.argv[1]), 1)):
    print(*sorted(workers_of(os.getpid())), flush=True)
"""


@pytest.fixture
def parent() -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Starts a process that streams so many windows and prints its workers' pids with each."""
    started: list[subprocess.Popen[str]] = []

    def start(count: int) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(count)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_workers_end_when_their_parent_is_killed(
    parent: Callable[[int], subprocess.Popen[str]],
) -> None:
    process = parent(1000)
    assert process.stdout is not None
    pids = {int(pid) for pid in process.stdout.readline().split()}
    assert len(pids) == 2
    process.kill()
    eventually(lambda: not pids & set(processes()))


def test_a_parent_that_was_paused_blames_no_worker(
    parent: Callable[[int], subprocess.Popen[str]],
) -> None:
    process = parent(40)
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    lines += process.stdout.readlines()
    assert len(lines) == 40
    assert set(lines[:30]) == {lines[0]}
    assert process.wait() == 0
