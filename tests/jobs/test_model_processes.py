"""The processes behind a server's misses: a model that hangs, ends, grows or spins is replaced, and
hits never notice."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precompute.jobs.serve.processes import ModelGroup, ModelLimits
from precompute.jobs.serve.remote_fallback import CONTROL
from precompute.jobs.serve.server import RETIRE_S, LookupWorker, Supervisor
from precompute.store.errors import PrecomputeError
from precompute.workers.process import ChildProcess
from tests.models import Doubler
from tests.server import Server, View, eventually, make_folder, read_reply, state, write_numbers

HERE = "tests.jobs.test_model_processes"
HANG, EXIT, GROW, LOSE, AMONG, *SPIN = BAD = range(100, 107)
"""Inputs that a :class:`Faulty` model cannot take."""

DEADLINE_S, GRACE_S = 2, 0.3
SERVE = {"workers": 2, "models": {"grace": "300ms", "memory_mb": 600}}


class Faulty(Doubler):
    """Tells its process's number in ``double`` of every x but the bad ones, which it never gets
    over."""

    def fingerprint(self) -> str:
        return "faulty"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        x = batch.column("x").to_pylist()
        if HANG in x:
            # Python's lock is held all the while: no other thread of the process gets to do
            # anything
            ctypes.PyDLL(None).sleep(3600)
        if not {EXIT, AMONG}.isdisjoint(x):
            os._exit(3)
        if GROW in x:
            self.kept = bytearray(os.urandom(2**20)) * 700
        if LOSE in x:
            raise RuntimeError("CUDA error: device-side assert triggered")
        while not {GROW, *SPIN}.isdisjoint(x):
            pass
        return super().compute(batch) | {"double": [float(os.getpid())] * len(x)}


FAULTY: View = {
    "model": {"use": f"{HERE}:Faulty"},
    "fallback": {"enabled": True, "deadline": DEADLINE_S, "keep": 0, "keep_missing": 0},
    "index": None,
}


AT_ONCE = """
from precompute.jobs.serve.processes import SupervisedProcess
from precompute.jobs.serve import server
from precompute.jobs.serve.server import LookupWorker
SupervisedProcess.longest_wait_s = LookupWorker.longest_wait_s = 0.1
server.MOST_QUICK_ENDS = 2
"""
"""What ended is restarted at once, however often it does: it ends some twenty times here, which
were 40 s of waiting."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers, over a healthy view, a faulty one, and one whose model writes down what it
    computes."""
    folder = tmp_path_factory.mktemp("models")
    args = {"path": str(folder / "batches"), "sleep_s": 0.5}
    counting: View = {
        "model": {"use": "tests.models:Counting", "args": args},
        "fallback": {"enabled": True, "deadline": "10s"},
    }
    views = {"numbers": {}, "faulty": FAULTY, "counted": counting}
    make_folder(folder, views, serve=SERVE).publish_all()
    write_numbers(folder, [1, 2, 3, *range(9, 60), *BAD])
    with Server(folder, first=AT_ONCE) as server:
        yield server


def workers_of(server: Server) -> list[int]:
    """Numbers of its lookup workers."""
    return processes_of(server, b"lookup_worker")


def processes_of(server: Server, module: bytes) -> list[int]:
    """Numbers of those that run it."""
    pids = []
    for pid in (
        Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    ):
        # it has just ended
        with contextlib.suppress(OSError):
            if module in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(int(pid))
    return pids


def process_of(server: Server, key: int) -> int:
    """The process that computed a row of the faulty view."""
    reply = server.get(f"/v1/views/faulty/rows/{key}")
    assert (reply.status, reply.json["status"]) == (200, "computed"), reply
    return int(reply.json["features"]["double"])


def ask(server: Server, path: str) -> Any:
    """A connection on which something was requested."""
    connection = server.connect()
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return connection


@pytest.mark.parametrize(
    ("bad", "deadline_ms", "code"),
    [
        (HANG, 100, "deadline"),
        (GROW, 9000, "model_error"),
        (EXIT, 9000, "model_error"),
        (LOSE, 9000, "model_error"),
    ],
    ids=["hangs", "grows", "ends", "loses its GPU"],
)
def test_a_model_that_is_lost_is_replaced_and_nobody_else_notices(
    server: Server, bad: int, deadline_ms: int, code: str
) -> None:
    before, other = process_of(server, 10), server.get("/v1/views/numbers/rows/10").json
    with ask(server, f"/v1/views/faulty/rows/{bad}?deadline_ms={deadline_ms}") as waiting:
        while True:
            # hits of the same view, hits and misses of another one
            assert server.get("/v1/views/faulty/rows/1").json["status"] == "fresh"
            assert server.get("/v1/views/numbers/rows/1").json["status"] == "fresh"
            assert server.get("/v1/views/numbers/rows/10").json["status"] == "computed"
            if not alive(before):
                break
            time.sleep(0.02)
        read_reply(waiting).check_problem(504 if code == "deadline" else 502, code)
    # its last threads may still be ending, and have taken what comes first
    eventually(lambda: server.get("/v1/views/faulty/rows/11").status == 200)
    after = process_of(server, 11)
    assert after != before
    # what ended it is not sent to the next one
    for query in ("", "?deadline_ms=100"):
        server.get(f"/v1/views/faulty/rows/{bad}{query}").check_problem(502, "model_error")
    assert process_of(server, 11) == after
    # so that a few failures are no reason to leave it alone
    assert {row["status"] for row in server.lookup("faulty", list(range(20, 60)))} == {"computed"}
    assert server.get("/v1/views/numbers/rows/10").json["features"] == other["features"]
    eventually(lambda: server.get("/readyz").json["fallback"]["faulty"] == "ready")


STANDING_BY = (
    AT_ONCE
    + """
from precompute.jobs.serve import processes
processes.SPARE_AFTER_S = 0.0
"""
)


def test_a_spare_takes_over_and_what_ended_the_first_ends_no_other(tmp_path: Path) -> None:
    faulty = FAULTY | {"fallback": FAULTY["fallback"] | {"spare": True}}
    make_folder(tmp_path, {"faulty": faulty}, serve=SERVE).publish_all()
    write_numbers(tmp_path, [1, 2, 3, *range(9, 60), *BAD])
    with Server(tmp_path, first=STANDING_BY) as server:
        eventually(lambda: spares(server) == 1, seconds=60.0)
        there = set(processes_of(server, b"model_server"))
        first = process_of(server, 10)
        # it has what the first one had open, and learns at once which row ended that
        server.get(f"/v1/views/faulty/rows/{EXIT}").check_problem(502, "model_error")
        second = process_of(server, 10)
        assert {first, second} == there
        # another one is begun; meanwhile and then the row is refused, under whatever key it comes
        eventually(lambda: spares(server) == 1)
        server.get(f"/v1/views/faulty/rows/{EXIT}").check_problem(502, "model_error")
        # of those in hand together each is tried alone, once a third one stands by, and one row is
        # to blame
        *innocents, guilty = server.lookup("faulty", [20, 21, AMONG], deadline_ms=30_000)
        assert ({row["status"] for row in innocents}, guilty["reason"]) == (
            {"computed"},
            "model_error",
        )
        third = process_of(server, 10)
        assert third not in (first, second)
        rows = server.lookup("faulty", [20, 21, AMONG, 22], deadline_ms=9000)
        assert [row["features"] and int(row["features"]["double"]) for row in rows] == [
            third,
            third,
            None,
            third,
        ]


def spares(server: Server) -> int:
    """How many processes of models stand by."""
    text = server.get("/metrics").body.decode()
    return int(float(re.findall(r"^precompute_model_spares (\S+)", text, re.MULTILINE)[0]))


def alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def test_a_call_is_abandoned_by_its_views_limit_not_a_clients_patience(server: Server) -> None:
    # the last one may still be ending
    eventually(lambda: server.get("/v1/views/faulty/rows/12").status == 200)
    before = process_of(server, 12)
    started = time.monotonic()
    with (
        ask(server, f"/v1/views/faulty/rows/{SPIN[0]}?deadline_ms=1000") as hasty,
        ask(server, f"/v1/views/faulty/rows/{SPIN[1]}?deadline_ms=60000"),
    ):
        read_reply(hasty).check_problem(504, "deadline")
        assert time.monotonic() - started >= 1.0
        assert alive(before)
        eventually(lambda: not alive(before))
        assert DEADLINE_S + GRACE_S <= time.monotonic() - started < 20


def test_no_model_is_loaded_where_hits_are_answered(server: Server) -> None:
    """Nor is what models are made of: a worker that is restarted answers soon."""
    for pid, unwanted in (
        (workers_of(server)[0], ("libtorch", "_duckdb")),
        (server.process.pid, ("libtorch", "faiss")),
    ):
        libraries = Path(f"/proc/{pid}/maps").read_text()
        assert not [name for name in unwanted if name in libraries]


def test_many_requests_for_one_missing_key_over_all_workers_are_one_call(server: Server) -> None:
    """While it is computed, and then from the miss cache, whichever worker answers."""
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(ask(server, "/v1/views/counted/rows/50")) for _ in range(60)
        ]
        replies = [read_reply(connection) for connection in connections]
    assert {(reply.status, reply.json["features"]["double"]) for reply in replies} == {(200, 100.0)}
    again = lambda: [server.get("/v1/views/counted/rows/50").json for _ in range(8)]  # noqa: E731
    eventually(lambda: {row["source"] for row in again()} == {"cache"})
    assert {row["features"]["double"] for row in again()} == {100.0}
    batches = Path(str(server.log.parent / "batches")).read_text().splitlines()
    assert batches.count("[50.0]") == 1


def test_a_worker_killed_under_load_loses_only_what_it_had_in_hand(server: Server) -> None:
    eventually(lambda: len(workers_of(server)) == 2)
    stop, before = threading.Event(), workers_of(server)

    def load(_: int) -> tuple[int, int]:
        """Requests that were answered, and connections that were cut off, one request on each at a
        time."""
        answered = cut = 0
        while not stop.is_set():
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                server.connect() as connection,
            ):
                cut += 1
                while not stop.is_set():
                    connection.sendall(
                        b"GET /v1/views/numbers/rows/1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
                    )
                    assert read_reply(connection).json["status"] == "fresh"
                    answered += 1
                cut -= 1
        return answered, cut

    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(load, number) for number in range(4)]
        for killed in before:
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: len(set(workers_of(server)) - set(before)) > before.index(killed))  # noqa: B023
        stop.set()
        answered, cut = (
            sum(counts) for counts in zip(*(one.result() for one in loads), strict=True)
        )
    assert answered > 100
    assert cut <= 2 * 4
    assert not set(workers_of(server)) & set(before)


def test_workers_that_end_are_replaced_as_often_as_it_takes(server: Server) -> None:
    """More often than a server whose workers never came up goes on."""
    seen: set[int] = set()
    for _ in range(2):
        eventually(lambda: len(set(workers_of(server)) - seen) == 2)  # noqa: B023
        # once it listens, as one does that a request ends
        assert server.get("/v1/views/numbers/rows/1").status == 200
        for worker in (new := set(workers_of(server)) - seen):
            os.kill(worker, signal.SIGKILL)
        seen |= new
    eventually(lambda: len(set(workers_of(server)) - seen) == 2)
    assert server.get("/v1/views/numbers/rows/1").json["status"] == "fresh"


def test_where_no_worker_comes_up_the_server_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LookupWorker, "longest_wait_s", 0.1)
    monkeypatch.setattr("precompute.jobs.serve.server.MOST_QUICK_ENDS", 2)
    supervisor = Supervisor(
        {"runtime": str(tmp_path), "listeners": []}, {}, ModelLimits(1.0, 1000, 64)
    )
    with pytest.raises(PrecomputeError, match="no lookup worker comes up"):
        supervisor.run()


def test_a_model_without_room_for_its_process_is_named_and_gets_one_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("precompute.jobs.serve.server.MOST_MODELS", 2)
    supervisor = Supervisor(
        {"runtime": str(tmp_path), "listeners": []}, {}, ModelLimits(1.0, 1000, 64), workers=0
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
        control.connect(str(tmp_path / CONTROL))
        for model in ("one", "two", "three"):
            control.send(f"{model}\0numbers".encode())
        supervisor._read_control()
        assert (
            "no process for model three: 2 models have one; its rows are missing until there is"
            " room" in caplog.text
        )
        assert list(supervisor._groups) == ["one", "two"]
        supervisor._retire(supervisor._groups["one"].wanted_at + RETIRE_S + 1)
        supervisor._room_at = 0.0
        control.send(b"three\0numbers")
        supervisor._read_control()
        assert list(supervisor._groups) == ["three"]
    supervisor._end(supervisor._all())
    supervisor._control.close()


def test_after_a_pause_the_models_that_were_live_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole container: the workers had no time to name them either."""
    supervisor = Supervisor(
        {"runtime": str(tmp_path), "listeners": []}, {}, ModelLimits(1.0, 1000, 64)
    )
    for checked in (ModelGroup, LookupWorker):
        monkeypatch.setattr(checked, "check", lambda *_: None)
    monkeypatch.setattr(Supervisor, "_drain", lambda _: None)
    clock, seen = [time.monotonic()], list[list[str]]()

    def tick(*_: object) -> None:
        seen.append(list(supervisor._groups))
        clock[0] += RETIRE_S + 1 if len(seen) == 2 else 0.1
        if len(seen) == 4:
            supervisor.stop()

    supervisor._make("model")
    monkeypatch.setattr("precompute.jobs.serve.server.select.select", tick)
    monkeypatch.setattr("precompute.jobs.serve.server.time.monotonic", lambda: clock[0])
    supervisor.run()
    assert seen == [["model"]] * 4


def test_a_stalled_worker_that_should_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(worker: LookupWorker) -> ChildProcess:
        worker.watch.beat()
        (tmp_path / "deaf").touch()
        return ChildProcess(["sh", "-c", "trap '' TERM; exec sleep 600"])

    monkeypatch.setattr(LookupWorker, "start", deaf)
    monkeypatch.setattr("precompute.jobs.serve.server.DRAIN_STILL_S", 0.5)
    supervisor = Supervisor(
        {"runtime": str(tmp_path), "listeners": []}, {}, ModelLimits(1.0, 1000, 64)
    )

    def stop() -> None:
        eventually((tmp_path / "deaf").exists)
        supervisor.stop()

    threading.Thread(target=stop).start()
    # or it ends after a minute
    began = time.monotonic()
    supervisor.run()
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("paused", ["before", "meanwhile"])
def test_a_worker_paused_with_its_server_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: str
) -> None:
    line = f"trap 'sleep 0.2; touch {tmp_path}/ended; exit' TERM; touch {tmp_path}/ready"

    def start(worker: LookupWorker) -> ChildProcess:
        return ChildProcess(["sh", "-c", f"{line}; while :; do sleep 0.05; done"])

    monkeypatch.setattr(LookupWorker, "start", start)
    supervisor = Supervisor(
        {"runtime": str(tmp_path), "listeners": []}, {}, ModelLimits(1.0, 1000, 64)
    )
    (worker,) = supervisor._workers
    worker.check(time.monotonic())
    eventually((tmp_path / "ready").exists)
    worker.watch.beat()
    skipped_s, real, wait = 0.0, time.monotonic, select.select

    def pause(*arguments: Any) -> object:
        nonlocal skipped_s
        skipped_s = 600.0
        return wait(*arguments)

    if paused == "before":
        worker.watch.alive_at -= 600.0
    else:
        monkeypatch.setattr("precompute.jobs.serve.server.select.select", pause)
    monkeypatch.setattr(time, "monotonic", lambda: real() + skipped_s)
    supervisor._drain()
    assert (tmp_path / "ended").exists()
    supervisor._end(supervisor._all())
    supervisor._control.close()


def test_a_server_that_is_paused_again_and_again_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(worker: LookupWorker) -> ChildProcess:
        return ChildProcess(["sh", "-c", "trap '' TERM; exec sleep 600"])

    monkeypatch.setattr(LookupWorker, "start", start)
    supervisor = Supervisor(
        {"runtime": str(tmp_path), "listeners": []}, {}, ModelLimits(1.0, 1000, 64)
    )
    supervisor._workers[0].check(time.monotonic())
    pauses, real = list[int](), time.monotonic

    def pause(*_: Any) -> None:
        pauses.append(1)
        assert len(pauses) < 100

    monkeypatch.setattr("precompute.jobs.serve.server.select.select", pause)
    monkeypatch.setattr(time, "monotonic", lambda: real() + 20.0 * len(pauses))
    supervisor._drain()
    monkeypatch.undo()
    supervisor._end(supervisor._all())
    supervisor._control.close()


def test_sigterm_ends_a_server_whose_model_hangs_once_it_has_answered(tmp_path: Path) -> None:
    make_folder(tmp_path, {"faulty": FAULTY}, serve={"models": {"grace": "30s"}}).publish_all()
    write_numbers(tmp_path, [1, 2, 3, HANG])
    with (
        Server(tmp_path) as server,
        ask(server, f"/v1/views/faulty/rows/{HANG}?deadline_ms=1500") as waiting,
    ):
        children = (
            Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
            .read_text()
            .split()
        )
        eventually(
            lambda: (
                b'precompute_fallback_queue_rows{view="faulty"} 1.0' in server.get("/metrics").body
            )
        )
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        read_reply(waiting).check_problem(504, "deadline")
        assert server.end() == 0
        assert time.monotonic() - started < 10
        assert not any(alive(int(pid)) for pid in children)
