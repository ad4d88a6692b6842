"""A worker's link to a model process: what was requested ends, whatever becomes of the process, of
the link, or of what is live."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.serve import processes
from precompute.jobs.serve.fallback import row_hash
from precompute.jobs.serve.model_server import Conversation
from precompute.jobs.serve.processes import (
    BARRED_S,
    HELD_UP_S,
    LONGEST_BARRED_S,
    MOST_HELD,
    MOST_SUSPECTS,
    START_S,
    STATUS_RESTART,
    STILL_S,
    TRIALS,
    TRIALS_S,
    ModelGroup,
    ModelLimits,
    ModelProcess,
    SupervisedProcess,
    Suspects,
    Watch,
)
from precompute.jobs.serve.remote_fallback import (
    MOST_IN_FLIGHT,
    MOST_SENT,
    ModelLink,
    RemoteFallback,
    socket_path,
)
from precompute.jobs.serve.server import LookupWorker
from precompute.store.answers.fallback import CLIENT, Computed, Miss, places
from precompute.store.http.telemetry.instruments import Meter
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason
from precompute.workers.process import KILL_S, ChildProcess, end_all
from tests import REPOSITORY
from tests.memory_store import MemoryStore
from tests.server import eventually
from tests.store.test_lookup import House, Row, computed_row


class Slow:
    """Stands behind the conversations of a model process: answers when the test says so."""

    def __init__(self) -> None:
        self.requested: dict[str, Future[Computed]] = {}
        self.clients: dict[str, str] = {}

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Any],
        deadline: float,
        *,
        query: bool = False,
    ) -> list[Future[Computed]]:
        futures: list[Future[Computed]] = [Future() for _ in keys]
        self.requested |= dict(zip(keys, futures, strict=True))
        self.clients |= dict.fromkeys(keys, CLIENT.get())
        return futures

    def open_publishings(self) -> list[Any]:
        return []


class Process:
    """What a model process is to a worker: who listens on its model's socket."""

    def __init__(self, runtime: Path, model: str) -> None:
        self.model = Slow()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(socket_path(runtime, model)))
        self.listener.listen(8)
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections.append(connection)
                Conversation(connection, self.model)  # type: ignore[arg-type]

    def close(self) -> None:
        """Listen no more."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def pointer(tmp_path: Path) -> Pointer:
    house = House(MemoryStore(), tmp_path, changes={"fallback": True})
    return house.publish({"a": Row(1.0)})


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A socket's path is short, and a test's folder may not be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def process(runtime: Path, pointer: Pointer) -> Iterator[Process]:
    with contextlib.closing(Process(runtime, pointer.model)) as process:
        yield process


@pytest.fixture
def group(runtime: Path) -> Iterator[ModelGroup]:
    limits = ModelLimits(1.0, 10_000, 64, {"always": True})
    with contextlib.closing(ModelGroup("d94e358d6ad1ff", {}, runtime, limits, Meter())) as group:
        yield group


@pytest.fixture
def fallback(runtime: Path) -> Iterator[RemoteFallback]:
    with contextlib.closing(RemoteFallback(runtime, Meter())) as fallback:
        yield fallback


def test_a_process_is_sent_what_nobody_waits_for_any_more(
    process: Process, fallback: RemoteFallback, pointer: Pointer
) -> None:
    given_up, stays = fallback.submit(pointer, ["a", "b"], {}, soon())
    eventually(lambda: {"a", "b"} <= process.model.requested.keys())
    assert given_up.cancel()
    eventually(process.model.requested["a"].cancelled)
    # that it was computed all the same, just now, harms nobody
    assert not process.model.requested["b"].cancelled()
    row = computed_row(pointer, "b", Row(2.0))
    process.model.requested["b"].set_result(row)
    assert stays.result(5) == row
    (again,) = fallback.submit(pointer, ["a"], {}, soon())
    eventually(lambda: not process.model.requested["a"].cancelled())
    # and nor does a worker that is no more
    fallback.close()
    eventually(process.model.requested["a"].cancelled)
    assert isinstance(again.exception(5), Miss)


def test_what_was_given_up_before_there_is_a_process_is_never_requested(
    runtime: Path, fallback: RemoteFallback, pointer: Pointer
) -> None:
    (first,) = fallback.submit(pointer, ["first"], {}, soon())
    for number in range(3):
        futures = fallback.submit(
            pointer, [f"{number}-{key}" for key in range(MOST_IN_FLIGHT)], {}, soon()
        )
        # one client's share had room
        assert sum(future.cancel() for future in futures) == places(MOST_IN_FLIGHT - 1, 1)
    link = fallback._links[pointer.model]
    assert len(link._outbox) <= 1
    with contextlib.closing(Process(runtime, pointer.model)) as process:
        eventually(lambda: "first" in process.model.requested)
        row = computed_row(pointer, "first", Row(2.0))
        process.model.requested["first"].set_result(row)
        assert first.result(5) == row
        (last,) = fallback.submit(pointer, ["last"], {}, soon())
        eventually(lambda: process.model.requested.keys() == {"first", "last"})
        last.cancel()


def test_a_greedy_client_leaves_room_for_others(
    process: Process, fallback: RemoteFallback, pointer: Pointer
) -> None:
    for client, keys in (("greedy", MOST_IN_FLIGHT), ("other", MOST_IN_FLIGHT), ("polite", 1)):
        account = CLIENT.set(client)
        futures = fallback.submit(pointer, [f"{client} {key}" for key in range(keys)], {}, soon())
        CLIENT.reset(account)
        assert not futures[0].done()
        assert futures[-1].done() == (client != "polite")
    eventually(lambda: "polite 0" in process.model.clients)
    assert {key: key.split()[0] for key in process.model.clients} == process.model.clients


def test_a_client_whose_keys_the_process_sheds_is_shed_by_the_worker(
    process: Process, fallback: RemoteFallback, pointer: Pointer
) -> None:
    def submit(client: str, name: str) -> list[Future[Computed]]:
        account = CLIENT.set(client)
        futures = fallback.submit(pointer, [f"{name} {key}" for key in range(200)], {}, soon())
        CLIENT.reset(account)
        return futures

    first = submit("greedy", "first")
    eventually(lambda: "first 199" in process.model.requested)
    for key in range(100, 200):
        process.model.requested[f"first {key}"].set_exception(Miss(Reason.SHED))
    assert isinstance(first[199].exception(5), Miss)
    eventually(lambda: sum(future.done() for future in first) == 100)
    # of twice as many as were not shed, 100 are in flight
    assert [future.done() for future in submit("greedy", "second")] == [False] * 100 + [True] * 100
    assert not any(future.done() for future in submit("other", "third"))


def soon() -> float:
    return time.monotonic() + 30


TWO_READERS = """
import threading
from precompute.store.disk.record import Record, record_of
begun, read = threading.Event(), threading.Event()
def slowly():
    begun.set()
    read.wait(0.3)
    return int
class Inner(Record):
    x: "slowly()"
class Outer(Record):
    first: int
    inner: Inner
data = {"first": 1, "inner": {"x": 2}}
other = threading.Thread(target=record_of, args=(Outer, data))
other.start()
begun.wait(20)
assert record_of(Outer, data).inner.x == 2
read.set()
other.join()
"""


def test_two_workers_first_pointers_at_once_do_not_end_a_process() -> None:
    """A record's type is resolved as it is first read: by one thread."""
    subprocess.run([sys.executable, "-c", TWO_READERS], cwd=REPOSITORY, timeout=60, check=True)


def test_a_request_is_answered_by_the_model_it_saw(
    process: Process, fallback: RemoteFallback, pointer: Pointer
) -> None:
    (future,) = fallback.submit(pointer, ["a"], {}, soon())
    eventually(lambda: "a" in process.model.requested)
    fallback.announce_live({"the next"})
    row = computed_row(pointer, "a", Row(2.0))
    process.model.requested["a"].set_result(row)
    assert future.result(5) == row
    # and its connection goes once nobody waits
    fallback.announce_live({"the next"})
    eventually(lambda: process.connections[0].fileno() == -1)


def test_misses_end_where_a_link_has_no_thread_or_cannot_send_them(
    process: Process, fallback: RemoteFallback, pointer: Pointer
) -> None:
    usual = threading.stack_size(2**46)
    try:
        (future,) = fallback.submit(pointer, ["a"], {}, soon())
    finally:
        threading.stack_size(usual)
    error = future.exception(5)
    assert str(error) == "the model process cannot be queried: can't start new thread"
    # which is no good call of the model, and no bad one
    assert isinstance(error, Miss)
    assert error.broken is None
    # nor does what is no JSON end the thread
    (odd,) = fallback.submit(pointer, ["odd"], {"odd": {"x": object()}}, soon())
    assert str(odd.exception(5)).startswith("the model process cannot be queried: ")
    fallback.submit(pointer, ["b"], {}, soon())
    eventually(lambda: "b" in process.model.requested)


def test_a_link_goes_on_after_an_answer_that_it_could_not_take(
    process: Process,
    fallback: RemoteFallback,
    pointer: Pointer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    receive, failing = ModelLink._receive, [MemoryError("no room for an answer")]

    def received(*arguments: Any) -> None:
        if failing:
            raise failing.pop()
        receive(*arguments)

    monkeypatch.setattr(ModelLink, "_receive", received)
    (future,) = fallback.submit(pointer, ["a"], {}, soon())
    for _ in range(2):
        eventually(lambda: "a" in process.model.requested)
        process.model.requested.pop("a").set_result(computed_row(pointer, "a", Row(2.0)))
    assert future.result(5) == computed_row(pointer, "a", Row(2.0))
    assert "MemoryError: no room for an answer" in caplog.text


def test_a_lost_process_has_its_requests_sent_to_the_next_one(
    process: Process, runtime: Path, pointer: Pointer
) -> None:
    lost: list[set[str]] = []
    link = ModelLink(socket_path(runtime, pointer.model), lambda: None, lost.append)
    for key in ("a", "b"):
        (future,) = link.submit(pointer, [key], {}, soon())
        eventually(lambda: key in process.model.requested)  # noqa: B023
        if not lost:
            del process.model.requested[key]
            process.connections[0].shutdown(socket.SHUT_RDWR)
            eventually(lambda: key in process.model.requested)  # noqa: B023
        process.model.requested[key].set_result(computed_row(pointer, key, Row(2.0)))
        assert future.result(5) == computed_row(pointer, key, Row(2.0))
    assert lost == [{pointer.view.name}]
    # and no oftener than it takes to find what ended it
    (often,) = link.submit(pointer, ["often"], {"often": {"x": 1}}, soon())
    for times in range(1, MOST_SENT + 1):
        eventually(lambda: len(lost) == times and "often" in process.model.requested)  # noqa: B023
        del process.model.requested["often"]
        process.connections[-1].shutdown(socket.SHUT_RDWR)
    assert str(often.exception(5)) == "the model process ended"
    link.close()


def test_what_no_process_accepts_ends_at_its_deadline(runtime: Path, pointer: Pointer) -> None:
    """The socket outlives the processes: one that ends as it begins leaves what it was sent."""
    path = socket_path(runtime, pointer.model)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen()
        link = ModelLink(path, lambda: None, lambda _: None)
        (opening,) = link.submit(pointer, [None], {}, time.monotonic() + 0.2)
        error = opening.exception(20)
        assert isinstance(error, Miss)
        assert error.reason is Reason.DEADLINE
        link.close()


@pytest.mark.parametrize("requests", [1, 2])
def test_a_request_that_was_never_sent_whole_has_ended_no_process(
    runtime: Path, pointer: Pointer, requests: int
) -> None:
    """Of several the first may have been whole, and begun: these are not sent for ever."""
    path, lost = socket_path(runtime, pointer.model), list[set[str]]()
    link = ModelLink(path, lambda: None, lost.append)
    large = {key: {"text": "x" * 2**21} for key in "ab"}
    # sent together: no process listens yet
    futures = [link.submit(pointer, [key], large, soon())[0] for key in "ab"[:requests]]
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.settimeout(20)
        listener.bind(str(path))
        listener.listen()
        for _ in range(MOST_SENT + (requests == 1)):
            connection, _ = listener.accept()
            connection.recv(1)
            connection.close()
        if requests > 1:
            errors = [str(future.exception(5)) for future in futures]
            assert errors == ["the model process ended"] * requests
            assert lost == [{pointer.view.name}] * MOST_SENT
    path.unlink()
    if requests == 1:
        with contextlib.closing(Process(runtime, pointer.model)) as process:
            eventually(lambda: "a" in process.model.requested)
            row = computed_row(pointer, "a", Row(2.0))
            process.model.requested["a"].set_result(row)
            assert futures[0].result(5) == row
        assert lost[: MOST_SENT + 1] == [set()] * (MOST_SENT + 1)
    link.close()


def test_a_process_that_should_be_idle_and_shows_no_life_is_killed(group: ModelGroup) -> None:
    serving, watch = group.serving, group.serving.watch
    # so that nobody's memory is looked at
    serving._memory_at = math.inf
    watch.set(math.inf)
    now = time.monotonic()
    assert serving.judged(now + STILL_S - 1) is None
    assert "no sign of life" in str(serving.judged(now + STILL_S + 1))
    watch.alive_at = now + 5
    assert serving.judged(now + STILL_S + 1) is None
    # at work it may keep Python's lock as long as its requests wait
    watch.set(now + 100)
    assert serving.judged(now + 100) is None
    assert "a call took 1 s longer" in str(serving.judged(now + 102))


def test_a_process_that_cannot_be_killed_is_told_and_replaced(
    group: ModelGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killpg, serving, now = os.killpg, group.serving, time.monotonic()
    monkeypatch.setattr(ModelProcess, "start", lambda _: shell("exec sleep 60"))
    monkeypatch.setattr(ModelProcess, "judged", lambda *_: "was killed: it is still")
    monkeypatch.setattr("precompute.workers.process.os.killpg", lambda *_: None)
    serving.check(now)
    held = serving.process
    assert held is not None
    there = []
    for later_s in (1.0, 1.1 + KILL_S):
        serving.check(now + later_s)
        there.append(serving.process is held)
    killpg(held.pid, signal.SIGKILL)
    assert there == [True, False]
    assert "was killed: it is still, and cannot be killed: a driver may hold it" in caplog.text
    assert held.wait(10)


def test_what_a_model_process_had_on_disk_goes_with_it(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = ModelGroup("model", {}, runtime, ModelLimits(1.0, 10_000, 64), Meter())
    script = "import os, signal; from precompute.store.disk.sql import SpillFolder; folder = SpillFolder(); os.kill(os.getpid(), signal.SIGTERM)"
    subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=REPOSITORY,
        timeout=60,
    )
    assert len(list(tmp_path.glob("precompute-duckdb-*"))) == 1
    group.close()
    assert not list(tmp_path.glob("precompute-duckdb-*"))


def test_what_a_process_had_in_its_hands_is_known_to_the_next_one(
    group: ModelGroup,
) -> None:
    ours, watch = group.serving.watch, Watch.of(group.serving.spec["watch"])
    assert ours.held() == []
    for done_by, rows in ((5.0, [2**64 - 1, 7]), (6.0, list(range(MOST_HELD))), (math.inf, [])):
        watch.set(done_by, rows + [1] * (len(rows) // MOST_HELD))
        assert (ours.done_by, ours.held()) == (done_by, rows)


def test_a_watch_has_its_space_before_it_is_written(group: ModelGroup) -> None:
    """A hole of a mapped file that is written on a full disk ends the supervisor."""
    assert os.fstat(group.serving.spec["watch"]).st_blocks > 0


def test_half_a_conversation_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    start, started = threading.Thread.start, list[threading.Thread]()

    def first_alone(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", first_alone)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Conversation(theirs, Slow())  # type: ignore[arg-type]
    ours.settimeout(20)
    assert ours.recv(1) == b""
    started[0].join(20)
    ours.close()


def test_a_child_without_a_thread_for_its_words_is_not_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    popen, made = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def noted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        made.append(popen(*arguments, **options))
        return made[0]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", noted)
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="can't start new thread"):
            ChildProcess([sys.executable, "-c", "input()"], output="piped")
    assert made[0].returncode == -signal.SIGKILL


def test_suspects_are_tried_alone_and_killers_left_alone() -> None:
    suspects = Suspects()
    suspects.add([1, 2], 0.0)
    suspects.add([2, 3], 0.0)
    assert suspects.until() == {1: 0.0, 2: 0.0, 3: 0.0}
    suspects.add([2], 1.0)
    assert suspects.until() == {1: 0.0, 2: 1 + BARRED_S, 3: 0.0}
    suspects.add([2], 100.0)
    assert suspects.until() == {1: 0.0, 2: 100 + 2 * BARRED_S, 3: 0.0}
    for _ in range(100):
        suspects.add([4], 1000.0)
    assert suspects.until()[4] == 1000 + LONGEST_BARRED_S
    suspects.add(range(10, 10 + MOST_SUSPECTS), 2000.0)
    assert len(suspects.until()) == MOST_SUSPECTS
    assert 1 not in suspects.until()
    # trials that end process after process are suspended; alone from the first, it was no trial
    suspects = Suspects()
    suspects.add([9], 0.0)
    suspects.add(range(1, 9), 0.0)
    for row in range(1, TRIALS):
        suspects.add([row], 10.0 * row)
    assert suspects.until()[8] == 0.0
    suspects.add([TRIALS], 10.0 * TRIALS)
    assert suspects.until()[8] == 10 + TRIALS_S
    suspects.add([8], 20.0 + TRIALS_S)
    assert suspects.until()[7] == 0.0
    # inputs are known under whatever key they come
    given = '{"text": "poison"}'
    others = [row_hash("tags", "1", given), *(row_hash("films", key, None) for key in "12")]
    assert row_hash("films", "1", given) == row_hash("films", "2", given) not in others
    assert len(set(others)) == 3


def test_a_worker_whose_loop_stands_still_is_killed(runtime: Path) -> None:
    spec = {"runtime": str(runtime), "listeners": []}
    with contextlib.closing(LookupWorker(3, spec, Meter())) as worker:
        worker.watch.begin()
        now = time.monotonic()
        # it has not come up yet
        assert (worker.judged(now + STILL_S + 1), worker.watch.has_begun(now)) == (None, False)
        assert worker.judged(now + START_S + STILL_S + 1) is not None
        worker.watch.alive_at = now
        assert (worker.judged(now + STILL_S - 1), worker.watch.has_begun(now)) == (None, True)
        assert "its loop stood still" in str(worker.judged(now + STILL_S + 1))


class Still(SupervisedProcess):
    """A process that showed that it lives once, as it began."""

    def start(self) -> ChildProcess:
        self.began = time.monotonic()
        return ChildProcess([sys.executable, "-c", "import time; time.sleep(100)"], output="piped")

    def judged(self, now: float) -> str | None:
        return "was killed: it is still" if now - self.began > STILL_S else None


def test_who_was_stopped_itself_lets_a_process_show_first_that_it_lives(runtime: Path) -> None:
    """As in a container that was paused: nothing in it could show anything."""
    still = Still("model", "it", "", {}, runtime, Meter())
    now = time.monotonic()
    still.check(now)
    process = still.process
    assert process is not None
    with contextlib.closing(still), contextlib.closing(process.pipes()[1]):
        still.check(now + 0.1)
        for late_s in (0.0, 0.1, HELD_UP_S - 0.1):
            still.check(now + STILL_S + 20 + late_s)
        assert not process.wait(0.2)
        still.check(now + STILL_S + 20 + HELD_UP_S)
        assert process.wait(10)
        # which buries it, where the last look did not see its end yet; a later one would start the
        # next
        still.check(now + STILL_S + 20 + HELD_UP_S)
        assert still.process is None


def shell(line: str) -> ChildProcess:
    child = ChildProcess(["sh", "-c", line], output="piped")
    child.pipes()[1].close()
    return child


def test_a_spare_stands_by_while_memory_allows(
    group: ModelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_mb = 299
    monkeypatch.setattr(processes, "SPARE_AFTER_S", 0.0)
    monkeypatch.setattr(processes, "MEMORY_EVERY_S", 0.0)
    monkeypatch.setattr(processes, "memory_mb", lambda pid: 100)
    monkeypatch.setattr(processes, "available_bytes", lambda: free_mb * 2**20)
    monkeypatch.setattr(processes, "_has_gpu", lambda: False)

    def start(process: ModelProcess) -> ChildProcess:
        process.watch.begin()
        return shell("exec sleep 60")

    monkeypatch.setattr(ModelProcess, "start", start)
    group.note_views(["films"])
    group.check(time.monotonic())
    # what serves has nothing open yet
    assert len(group.running()) == 1
    group.serving.watch.is_open = True
    seen = []
    for free_mb in (299, 301, 101, 99, 301):  # noqa: B007
        group.check(time.monotonic())
        seen.append((len(group.running()), group.serving.watch.may_try_suspects))
    # while one is on its way, no row is tried that may end the one that serves
    assert seen == [(1, True), (2, False), (2, False), (1, True), (2, False)]
    end_all(group.running(), grace_s=5)
    for process in group.running():
        process.pipes()[0].close()


@pytest.mark.parametrize("status", [3, STATUS_RESTART])
def test_a_spare_takes_over_unless_what_it_has_loaded_is_as_old(
    group: ModelGroup, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    def start(process: ModelProcess) -> ChildProcess:
        process.watch.begin()
        return shell(f"read line; exit {status}")

    monkeypatch.setattr(processes, "SPARE_AFTER_S", 2.0)
    monkeypatch.setattr(ModelProcess, "start", start)
    group.note_views(["always"])
    now = time.monotonic()
    group.check(now)
    group.serving.watch.is_open = True
    group.serving.watch.set(math.inf)
    for later_s, there in ((0.0, 1), (1.9, 1), (2.1, 2)):
        group.check(now + later_s)
        assert len(group.running()) == there
    serving, spare = group.serving, group.spare
    process = serving.process
    assert process is not None
    assert spare.process is not None
    process.pipes()[0].close()
    eventually(process.ended)
    group.check(time.monotonic())
    assert (group.serving is spare, spare.spec["serves"]) == (status != STATUS_RESTART,) * 2
    for one in group.running():
        one.pipes()[0].close()
        assert one.wait(10)


def test_a_lost_process_is_reported_by_its_views_and_a_planned_end_is_not(
    group: ModelGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    statuses = iter((7, STATUS_RESTART, 7))
    monkeypatch.setattr(
        ModelProcess, "start", lambda self: shell(f"echo unrelated >&2; exit {next(statuses)}")
    )
    monkeypatch.setattr(ModelProcess, "judged", lambda self, now: None)
    monkeypatch.setattr(ModelProcess, "longest_wait_s", 0.3)
    group.note_views(["tags", "films"])
    group.note_views(["films"])
    for ends in (1, 2, 3):
        while group.serving.ends_quickly < ends:
            group.check(time.monotonic())
    name = "the process of model d94e358d6ad1 ('films', 'tags')"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", f"{name} exited with status 7; it is restarted in 0.1 s"),
        ("INFO", f"{name} ended to begin again, in 0.2 s"),
        ("ERROR", f"{name} exited with status 7; it is restarted in 0.3 s"),
    ]
