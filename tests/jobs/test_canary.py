"""A canary in every process of a server: whatever is requested over HTTP, nothing is unpickled,
compiled, executed or started, and no file is opened but its own."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest

from precompute.store.wire import bodies
from tests.server import Server, eventually, make_folder, write_numbers

CANARY = """
import os, sys, threading, time

root, singing = os.environ["CANARY_ROOT"], os.environ["CANARY_ROOT"] + "/songs"
armed = False
here = sys.orig_argv[-1] if "-m" not in sys.orig_argv else sys.orig_argv[sys.orig_argv.index("-m") + 1]
NEVER = {
    "exec", "compile", "import", "pickle.find_class", "marshal.loads", "marshal.load", "code.__new__", "function.__new__",
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile",
    "ctypes.dlopen", "os.remove", "os.rename", "os.rmdir", "os.chmod", "os.chown", "os.symlink", "os.link", "os.truncate", "os.putenv",
    "shutil.rmtree", "shutil.copyfile", "shutil.move", "urllib.Request", "socket.bind", "socket.getaddrinfo", "sqlite3.connect",
}
FILES = {"open", "os.listdir", "os.scandir", "os.mkdir", "glob.glob"}

def hook(event, arguments):
    if not armed or (event not in NEVER and event not in FILES) or getattr(seen, "busy", False):
        return
    if event in FILES:
        path = arguments[0]
        if isinstance(path, int):
            return
        path = os.path.realpath(os.fsdecode(path) if path is not None else ".")
        # /proc: how much memory it has, or a process that it keeps
        if path.startswith((root + "/", "/proc/")) or "/precompute-" in path:
            return
    # a model's process writes down each second what it has open, in the server's own folder
    if event == "os.rename" and all("/precompute-" in os.fsdecode(path) for path in arguments[:2]):
        return
    seen.busy = True
    try:
        with open(singing, "a") as file:
            file.write(f"{here}: {event} {arguments!r:.200}" + chr(10))
    finally:
        seen.busy = False

def watch():
    global armed
    own = threading.get_ident()
    while True:
        time.sleep(0.02)
        armed = os.path.exists(root + "/armed")
        if os.path.exists(root + "/fire"):
            eval("1")
            open("/etc/hostname").close()
            return

seen = threading.local()
sys.addaudithook(hook)
threading.Thread(target=watch, daemon=True).start()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("canary").resolve()
    project = make_folder(folder, {"numbers": {}, "alone": {"fallback": None, "index": None}})
    project.publish_all()
    write_numbers(folder, [1, 2, 3, 9])
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(CANARY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY_ROOT", str(folder))
        patch.setenv("PYTHONPATH", f"{folder / 'site'}")
        one = Server(folder)
    with one:
        yield one


PICKLE = b"cos\nsystem\n(S'touch /tmp/canary'\ntR."
NASTY = [
    "__import__('os').system('true')",
    "{{7*7}}${7*7}#{7*7}<%= 7*7 %>",
    "'; DROP TABLE x; --",
    "' UNION SELECT * FROM read_text('/etc/passwd') --",
    "../../../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "/etc/passwd",
    "file:///etc/passwd",
    "\\\\host\\share",
    "%00",
    "%s%s%n{0.__class__}",
    "<script>alert(1)</script>",
    "CON",
    "live.json",
    "$(touch /tmp/canary)",
    "`id`",
    "!!python/object/apply:os.system [true]",
    "\u202e\ufeff",
    "x" * 4000,
]


def requested(server: Server) -> int:
    """Every route, with what it is for, and with what means it harm; returns how many requests."""
    number = 0

    def get(path: str, **headers: str) -> None:
        nonlocal number
        number += 1
        server.get(path, **headers)

    def post(path: str, body: Any, **headers: str) -> None:
        nonlocal number
        number += 1
        server.post(path, body, **headers)

    for path in (
        "/",
        "/?view=numbers&key=1",
        "/metrics",
        "/readyz",
        "/livez",
        "/openapi.json",
        "/v1/views",
        "/nothing",
        "/%2e%2e/etc/passwd",
    ):
        get(path)
    for accept in (bodies.JSON, bodies.ARROW):
        for key in (1, 9, 77):
            get(f"/v1/views/numbers/rows/{key}", accept=accept)
        post("/v1/views/numbers/lookup", {"keys": [1, 9, 77]}, accept=accept)
    post(
        "/v1/lookup",
        {"requests": [{"view": "numbers", "keys": [1]}, {"view": "none", "keys": [1]}]},
    )
    for search in ({"key": 1}, {"vector": [1, 2, 3, 4]}, {"inputs": {"x": 2.0}}):
        post("/v1/views/numbers/search", search | {"k": 2, "features": ["double"]})
    for text in NASTY:
        for path in (
            f"/v1/views/{quote(text, safe='')}/rows/1",
            f"/v1/views/numbers/rows/{quote(text, safe='')}",
        ):
            get(path)
        get(f"/v1/views/numbers/rows/1?features={quote(text)}")
        get(f"/?view={quote(text)}&key={quote(text)}&text={quote(text)}")
        get(
            "/v1/views/numbers/rows/1",
            accept=quote(text),
            cache_control=quote(text),
            if_none_match=quote(text),
            traceparent=quote(text),
        )
        for body in (
            {"keys": [text], "inputs": {text: {"x": text}}},
            {"keys": [text], "features": [text]},
            {text: text},
        ):
            post("/v1/views/numbers/lookup", body)
        hostile: list[Any] = [
            {"key": text},
            {"inputs": {"x": text}},
            {"vector": [0, 0, 0, 0], "filter": {text: text}, "model": text},
        ]
        for search in hostile:
            post("/v1/views/numbers/search", search)
    for kind in (bodies.JSON, bodies.ARROW, "application/x-pickle", "application/yaml"):
        for raw in (
            PICKLE,
            b"\x80\x05" + PICKLE,
            b"",
            b"\x00" * 100,
            b"[" * 20_000,
            b'{"keys":' + b"[" * 5000,
        ):
            post("/v1/views/numbers/lookup", raw, content_type=kind)
    sink = pa.BufferOutputStream()
    table = pa.table({"key": ["1", "2"]}).replace_schema_metadata(
        {"ARROW:extension:name": "arrow.py_extension_type", "pandas": "x"}
    )
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    whole, chance = bytes(sink.getvalue()), random.Random(7)
    for _ in range(150):
        changed = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        post(
            "/v1/views/numbers/lookup",
            bytes(changed[: chance.randint(1, len(changed))]),
            content_type=bodies.ARROW,
        )
    return number


def test_no_request_reaches_what_runs_what_it_reads(server: Server) -> None:
    folder = Path(server.log).parent
    songs = folder / "songs"
    # what is imported late is imported now
    requested(server)
    (folder / "armed").touch()
    eventually(lambda: (folder / "armed").exists())
    with contextlib.suppress(FileNotFoundError):
        songs.unlink()
    assert requested(server) > 300
    assert not songs.exists(), songs.read_text()
    assert json.loads(server.get("/readyz").body)["status"] == "ready"
    # and the canary sings when it must, in every process that a request can reach
    (folder / "fire").touch()

    def heard(process: str) -> bool:
        lines = songs.read_text().splitlines() if songs.exists() else []
        events = {
            line.partition(": ")[2].partition(" ")[0] for line in lines if line.startswith(process)
        }
        return {"compile", "exec", "open"} <= events

    for process in (
        "precompute.jobs.serve.lookup_worker",
        "precompute.jobs.serve.model_server",
        "precompute.jobs.cli",
    ):
        eventually(lambda process=process: heard(process), lambda: songs.read_text())  # type: ignore[misc]
