"""``precompute serve`` as a process of its own: its life and death, and what it answers while
models and stores come and go."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from precompute.jobs.config.project import Project
from precompute.jobs.serve.server import serve
from precompute.store.errors import ConfigError
from precompute.store.http.app import create_app
from precompute.store.wire import bodies
from tests import REPOSITORY
from tests.asgi import call
from tests.online_rig import KINDS, rig_of, url_of
from tests.scene import UNJUDGED
from tests.server import OPERATORS, Server, eventually, make_folder, read_reply, slow, write_numbers

# ---- life and death


def test_sigterm_finishes_the_requests_at_hand_and_ends_with_status_0(tmp_path: Path) -> None:
    # nothing looks to the log's last lines before the end
    access = {"access_log": "./access.log", "limits": {"header_time": "1h"}}
    args = {"path": str(tmp_path / "batches"), "sleep_s": 0.5}
    counting = {"model": {"use": "tests.models:Counting", "args": args}}
    make_folder(tmp_path, {"numbers": counting}, serve=access).publish_all()
    write_numbers(tmp_path, [1, 2, 3, 9])
    with (
        Server(tmp_path, "unix:./api.sock") as server,
        server.connect() as idle,
        server.connect() as busy,
    ):
        busy.sendall(b"GET /v1/views/numbers/rows/9 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: "[9.0]" in (tmp_path / "batches").read_text())
        server.process.send_signal(signal.SIGTERM)
        reply = read_reply(busy)
        assert (reply.status, reply.json["status"], reply.json["features"]["double"]) == (
            200,
            "computed",
            18.0,
        )
        assert idle.recv(1) == b""
        assert server.end() == 0
        shown = server.log.read_text()
        assert "ordered to end: 1 requests are in hand" in shown
        assert "ended by SIGTERM, after " in shown
    last = json.loads((tmp_path / "access.log").read_text().splitlines()[-1])
    assert (last["route"], last["status"]) == ("/v1/views/{view}/rows/{key}", 200)
    assert not (tmp_path / "api.sock").exists()


def test_a_dead_servers_socket_is_replaced_and_a_living_ones_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, {"numbers": {"fallback": None}}).publish_all()
    with Server(tmp_path, "unix:./api.sock") as first:
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
    assert (tmp_path / "api.sock").is_socket()
    with (
        Server(tmp_path, "unix:./api.sock") as server,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        assert (tmp_path / "api.sock").stat().st_mode & 0o777 == 0o660
        in_use = f"127.0.0.1:{other.getsockname()[1]}"
        for taken in ("unix:./api.sock", in_use, "127.0.0.1:99999"):
            environment = os.environ | {"PRECOMPUTE_SERVE__BIND": taken}
            command = [sys.executable, "-m", "precompute.jobs.cli", "-c", str(tmp_path), "serve"]
            done = subprocess.run(
                command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60
            )
            (line,) = [one for one in done.stderr.splitlines() if one.startswith("precompute:")]
            assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False)
            assert "serve.bind: " in line
            assert taken in line
        assert server.get("/v1/views/numbers/rows/1").status == 200


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "unix:./" + "long" * 40, "unix:./views"])
def test_an_address_that_cannot_be_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bind: str
) -> None:
    make_folder(tmp_path, {"numbers": {}})
    monkeypatch.setenv("PRECOMPUTE_SERVE__BIND", bind)
    with pytest.raises(ConfigError, match=rf"^serve\.bind: .*{re.escape(bind)}"):
        serve(Project(tmp_path), print)


def test_a_temporary_folder_whose_name_is_too_long_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / ("long" * 30)
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with pytest.raises(ConfigError, match=r"too long .* TMPDIR"):
        serve(make_folder(tmp_path / "project", {"numbers": {}}), print)
    assert list(temporary.iterdir()) == []


# ---- readiness


def test_it_is_ready_once_a_view_is_published_without_a_restart(tmp_path: Path) -> None:
    project = make_folder(tmp_path, {"numbers": {}})
    with Server(tmp_path, ready=False) as server:
        for _ in range(2):
            assert server.get("/livez").status == 200
            assert (server.get("/readyz").status, server.get("/readyz").json["status"]) == (
                503,
                "not ready",
            )
            server.get("/v1/views/numbers/rows/1").check_problem(404, "unknown_view")
            assert server.get("/v1/views").json == {"views": []}
        project.publish_all()
        eventually(lambda: server.get("/readyz").status == 200, lambda: str(server.get("/readyz")))
        assert server.get("/readyz").json["views"] == {"numbers": 1}
        write_numbers(tmp_path, [1, 2, 3, 9])
        first = server.get("/v1/views/numbers/rows/9").json
        # and then by another model, which answers misses from then on
        write_numbers(tmp_path, [1, 2, 3])
        make_folder(tmp_path, {"numbers": slow(0, version=2)}).publish_all()
        write_numbers(tmp_path, [1, 2, 3, 9])
        hit, second = (server.get(f"/v1/views/numbers/rows/{key}").json for key in (1, 9))
    assert (hit["features"]["double"], hit["status"]) == (2.0, "fresh")
    assert (first["status"], first["snapshot"]) == ("computed", 1)
    assert (second["status"], second["snapshot"], second["model"]) == ("computed", 2, hit["model"])
    assert first["model"] != second["model"]


MOODY = {"use": "tests.models:Moody", "args": {"path": "${data}moody"}}


def test_a_model_that_cannot_be_opened_degrades_and_hits_are_served(tmp_path: Path) -> None:
    project = make_folder(tmp_path, {"numbers": {"model": MOODY}}, vars={"data": f"{tmp_path}/"})
    project.publish_all()
    (tmp_path / "moody").touch()
    server = Server(tmp_path, ready=False)
    try:
        eventually(
            lambda: server.get("/readyz").status == 200,
            lambda: f"{server.get('/readyz')} {server.log.read_text()}",
            8,
        )
        assert server.get("/readyz").json == {
            "status": "degraded",
            "views": {"numbers": 1},
            "fallback": {"numbers": "not ready"},
        }
        assert server.get("/v1/views/numbers/rows/1").json["status"] == "fresh"
        server.get("/v1/views/numbers/rows/9").check_problem(502, "model_error")
        (tmp_path / "moody").unlink()
        write_numbers(tmp_path, [9])
        assert server.get("/v1/views/numbers/rows/9").json["status"] == "computed"
        assert server.get("/readyz").json["status"] == "ready"
    finally:
        server.end()


def test_a_view_with_a_damaged_pointer_is_refused_alone(tmp_path: Path) -> None:
    project = make_folder(tmp_path, {"numbers": {"fallback": None}, "others": {"fallback": None}})
    project.publish_all()
    live = tmp_path / "var" / "online" / "numbers" / "live.json"
    good = live.read_bytes()
    with project.lookup() as lookup:
        get = partial(call, create_app(lookup), "GET")
        assert [get(path).status for path in ("/readyz", "/v1/views/numbers/rows/1")] == [200] * 2
        # damaged, and then lost, which is not unknown: the root has it live
        for damage in (lambda: live.write_bytes(good[:-9]), live.unlink):
            damage()
            # cached in the worker's memory
            assert get("/v1/views/numbers/rows/1").json["status"] == "stale"
            damaged = get("/v1/views/numbers/rows/2")
            damaged.check_problem(503, "store_unavailable")
            assert get("/v1/views/others/rows/1").status == 200
            ready, views = get("/readyz"), get("/v1/views").json
            assert (ready.status, ready.json["status"]) == (200, "degraded")
            assert ready.json["why"].endswith(
                "what is live of numbers cannot be read; the server's log says why"
            )
            assert ([view["view"] for view in views["views"]], views["unreadable"]) == (
                ["numbers", "others"],
                ["numbers"],
            )
            shown = get("/metrics").body.decode()
            assert 'precompute_view_up{view="numbers"} 0.0' in shown
            assert 'precompute_view_up{view="others"} 1.0' in shown
            shown_to_operators = [get(path) for path in OPERATORS]
            assert {reply.status for reply in shown_to_operators} == {200}
            for reply in (damaged, ready, *shown_to_operators):
                assert str(tmp_path) not in reply.body.decode()
        live.write_bytes(good)
        assert get("/v1/views/numbers/rows/1").status == 200


# ---- publishing meanwhile


@pytest.mark.parametrize("kind", KINDS)
def test_a_publish_is_picked_up_at_once_and_no_answer_mixes_two_snapshots(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    ids = list(range(40))
    # all rows are the same, and grow from snapshot to snapshot
    alike = {"gates": UNJUDGED}
    project = make_folder(
        tmp_path, {"numbers": alike}, online=url_of(request, kind, "table:./var/online")
    )
    rig = rig_of(project.online)
    write_numbers(tmp_path, ids, x=1)
    project.publish_all()
    done = threading.Event()

    def read(kind: str) -> int:
        answers, last = 0, 0
        while not done.is_set():
            if kind == "search":
                body = {"vector": [0, 0, 0, 0], "k": 40, "features": ["double"]}
                reply = server.post("/v1/views/numbers/search", body)
                assert reply.status == 200, reply
                outer, near = reply.json["snapshot"], reply.json["rows"]
                score = float(sum((outer + i) ** 2 for i in range(4)))
                assert [r["score"] for r in near] == [score] * 40
                rows = [(r["features"]["double"], outer, r["snapshot"]) for r in near]
            else:
                accept = bodies.ARROW if kind == "arrow" else bodies.JSON
                reply = server.post("/v1/views/numbers/lookup", {"keys": ids}, accept=accept)
                if kind == "arrow":
                    columns = ("double", "vector", "snapshot")
                    found = list(zip(*(reply.arrow[c].to_pylist() for c in columns), strict=True))
                else:
                    found = [(*r["features"].values(), r["snapshot"]) for r in reply.json["rows"]]
                rows, outer = [(double, vector[0], of) for double, vector, of in found], found[0][2]
                assert kind == "arrow" or reply.json["snapshot"] == outer
            assert rows == [(2.0 * outer, outer, outer)] * 40
            assert outer >= last
            last, answers = outer, answers + 1
        return answers

    with Server(tmp_path) as server, ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(read, kind) for kind in ("json", "arrow", "search")]
        try:
            for version in range(2, 4):
                write_numbers(tmp_path, ids, x=version)
                project.publish_all()
                # rows that a worker keeps may be of what was live so long ago
                time.sleep(0 if rig is None else rig.known_s)
                row = server.get("/v1/views/numbers/rows/7").json
                assert (row["snapshot"], row["features"]["double"]) == (version, 2.0 * version)
        finally:
            done.set()
        assert all(reader.result() > 0 for reader in readers)
