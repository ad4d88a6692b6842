"""Server: ``precompute serve`` over a small project in a process of its own, and what it
answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from precompute.store.http.openapi import openapi_document
from precompute.store.http.routes import Who, every_route
from precompute.store.wire import arrow, bodies
from tests import REPOSITORY
from tests.scene import Scene

View = dict[str, Any]

NUMBERS: View = {
    "entity": ["id"],
    "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
    "model": {"use": "tests.models:Doubler"},
    "features": {"double": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": 4}},
    "ttl": "1h",
    "stale_for": "1d",
    "index": {"on": "vector", "metric": "l2"},
    # nothing is kept: a miss is one each time it is asked for; and no process stands by, which
    # begins in the midst of what a test looks at
    "fallback": {"enabled": True, "deadline": "20s", "keep": 0, "keep_missing": 0, "spare": False},
}


def make_folder(folder: Path, views: dict[str, View], **settings: Any) -> Scene:
    """A project's files, its data (id = x = 1, 2, 3) and, per view, what differs from
    :data:`NUMBERS` (None leaves a key out)."""
    (folder / "views").mkdir(parents=True, exist_ok=True)
    project = {
        "root": "./var",
        "online": "table:./var/online",
        "vars": {"data": "./"},
        "serve": {"bind": "127.0.0.1:0"},
    }
    replace_text(folder / "project.yaml", yaml.safe_dump(project | settings))
    for name, over in views.items():
        view = {k: v for k, v in ({"name": name} | NUMBERS | over).items() if v is not None}
        replace_text(folder / "views" / f"{name}.yaml", yaml.safe_dump(view))
    if not (folder / "data.parquet").exists():
        write_numbers(folder, [1, 2, 3])
    return Scene(folder, {})


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole: processes may be reading it."""
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").replace(path)


def write_numbers(folder: Path, ids: Sequence[int], x: float | None = None) -> None:
    """The source's file, replaced as a whole: x = id, unless one is given for all rows."""
    table = pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "x": pa.array([float(i if x is None else x) for i in ids]),
        }
    )
    pq.write_table(table, folder / ".data.tmp")
    os.replace(folder / ".data.tmp", folder / "data.parquet")


def damage_row(project: Scene, view: str, x: float) -> None:
    """Flip a bit of the row computed from ``x`` where it is served from."""
    (path,) = (project.folder / "var" / "online" / view).glob("*.table")
    data, values = path.read_bytes(), struct.pack("<d4f", 2 * x, *(x + i for i in range(4)))
    assert data.count(values) == 1
    at = data.index(values) + 6
    # in place: it may be mapped
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def arrow(self) -> pa.Table:
        return arrow.decode_arrow(self.body)

    def check_problem(self, status: int, code: str | None = None) -> None:
        """RFC 9457: the content type, and the fields with the status inside."""
        assert (self.status, self.headers["content-type"]) == (
            status,
            "application/problem+json",
        ), self
        problem = self.json
        assert all(
            isinstance(problem[field], str) and problem[field]
            for field in ("type", "title", "detail")
        )
        assert problem["status"] == status
        if code is not None:
            assert problem["type"] == f"urn:precompute:problem:{code}"


class Server:
    """``precompute serve`` over a project's folder; a context manager that ends it, and asserts
    that nothing went wrong inside. ``first``: Python that its supervisor runs before all else."""

    def __init__(
        self, folder: Path, bind: str = "127.0.0.1:0", *, ready: bool = True, first: str = ""
    ) -> None:
        self.log = folder / f"serve-{time.monotonic_ns()}.log"
        start = (
            [
                "-c",
                f"{first}\nimport sys; from precompute.jobs.cli import main; sys.exit(main())",
            ]
            if first
            else ["-m", "precompute.jobs.cli"]
        )
        command = [sys.executable, *start, "-c", str(folder), "serve"]
        environment = os.environ | {"PRECOMPUTE_SERVE__BIND": bind}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving on "), self.log.read_text()
        self.url = line.removeprefix("serving on ").strip()
        self._local = threading.local()
        if ready:
            eventually(
                lambda: self.get("/readyz").status == 200,
                lambda: f"{self.get('/readyz')}\n{self.log.read_text()}",
                seconds=60.0,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end()
        if kind is None:
            text = self.log.read_text()
            assert "Traceback" not in text, text

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def connect(self) -> socket.socket:
        """A raw connection."""
        if self.url.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(self.url.removeprefix("unix:"))
        else:
            host, _, port = self.url.removeprefix("http://").rpartition(":")
            connection = socket.create_connection((host, int(port)))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(20)
        return connection

    def raw(self, data: bytes) -> Reply:
        """What comes back for these very bytes, on a connection of their own."""
        with self.connect() as connection:
            connection.sendall(data)
            return read_reply(connection)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """One request; a body that is not bytes is sent as JSON. ``content_type="…"`` becomes
        ``content-type``."""
        lines = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            lines.setdefault("content-type", bodies.JSON)
        connection = http.client.HTTPConnection("localhost")
        connection.sock = self.connect()
        with contextlib.closing(connection):
            connection.request(
                method,
                path,
                body if body is None or isinstance(body, bytes) else json.dumps(body),
                lines,
            )
            reply = _reply(connection.getresponse())
        check_documented(method, path, reply.status)
        return reply

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.request("POST", path, body, **headers)

    def lookup(self, view: str, keys: Sequence[Any], **options: Any) -> list[dict[str, Any]]:
        """Rows of a JSON lookup."""
        reply = self.post(f"/v1/views/{view}/lookup", {"keys": keys, **options})
        assert reply.status == 200, reply
        rows: list[dict[str, Any]] = reply.json["rows"]
        return rows


def read_reply(connection: socket.socket) -> Reply:
    """The next answer on a raw connection."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return _reply(response)


def _reply(response: http.client.HTTPResponse) -> Reply:
    with response:
        return Reply(
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )


def state(pid: int) -> str:
    """A process's, as ``ps`` has it; empty of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def free_port() -> int:
    """A port of this machine that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(
    holds: Callable[[], bool], why: Callable[[], str] = lambda: "", seconds: float = 20.0
) -> None:
    """Poll until something holds."""
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, why()
        time.sleep(0.02)


def slow(seconds: float, **args: Any) -> View:
    return {"model": {"use": "tests.models:Doubler", "args": {"sleep_s": seconds, **args}}}


OPERATORS = sorted(path.decode() for path in every_route().paths(Who.OPERATORS))
"""Paths of what operators look at, of the core and of the plug-ins that are here."""


# ---- whether the OpenAPI document says so; held for each answer that any test gets of the API


@cache
def _operations() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    paths = openapi_document()["paths"]
    # a key of several columns is several segments
    return [
        (re.compile(re.sub(r"\{key\}", ".+", re.sub(r"\{view\}", "[^/]*", path))), paths[path])
        for path in paths
    ]


def check_documented(method: str, path: str, status: int) -> None:
    """A status that an operation of the document may answer with; of what is no operation (a path
    that is none, another method) nothing is checked."""
    bare = path.partition("?")[0]
    for pattern, methods in _operations():
        if pattern.fullmatch(bare) and method.lower() in methods:
            assert str(status) in methods[method.lower()]["responses"], (
                f"{method} {bare} answered {status}, which the document does not say"
            )
