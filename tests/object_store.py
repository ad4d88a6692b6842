"""An object store for tests: moto behind a proxy that lets one request through at a time, and
loses, doubles or delays what a test says."""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from precompute.store.disk.object_storage import ObjectStorage
from precompute.store.disk.storage import mount

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}


@dataclass
class Request:
    """What came through the proxy."""

    method: str
    path: str
    conditional: bool
    body: bytes


@dataclass
class ObjectStore:
    """A bucket ``bucket``, and what its proxy does.

    ``fault`` says of each request: None, ``drop`` (it is done, and the reply lost), ``refuse``
    (503, not done), ``twice`` (done twice, the second reply given), ``unconditional`` (done without
    its condition), ``forbid`` (403), or seconds to wait first.
    """

    url: str
    environment: dict[str, str]
    fault: Callable[[Request], str | float | None] = field(default=lambda _: None)
    requests: list[Request] = field(default_factory=list)
    dropped: int = 0
    prefix: str = "root"

    def storage(self, folder: Path) -> ObjectStorage:
        """A root there, with its cache in a folder, mounted."""
        storage = ObjectStorage(f"s3://bucket/{self.prefix}", folder)
        mount(folder, storage)
        return storage

    def lose_first_replies(self) -> None:
        """Lose the first reply to each conditional write."""
        lost = set[tuple[str, bytes]]()

        def fault(request: Request) -> str | None:
            key = request.path, request.body
            if not request.conditional or key in lost:
                return None
            lost.add(key)
            return "drop"

        self.fault = fault


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """One that runs while this lasts; the environment names it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    _, port = moto.get_host_and_port()
    store = ObjectStore("", {})
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = dict(self.headers)
            conditions = [h for h in headers if h.lower() in ("if-match", "if-none-match")]
            request = Request(self.command, self.path, bool(conditions), body)
            store.requests.append(request)
            fault = store.fault(request)
            if isinstance(fault, float):
                time.sleep(fault)
            if fault in ("refuse", "forbid"):
                status = 503 if fault == "refuse" else 403
                self._reply(status, {}, b"<Error><Code>AccessDenied</Code></Error>")
                return
            for header in conditions if fault == "unconditional" else ():
                del headers[header]
            for _ in range(2 if fault == "twice" else 1):
                with one_at_a_time:
                    upstream = http.client.HTTPConnection("127.0.0.1", port)
                    upstream.request(self.command, self.path, body, headers)
                    answer = upstream.getresponse()
                    data = answer.read()
                    upstream.close()
            if fault == "drop":
                store.dropped += 1
                self.close_connection = True
                self.connection.close()
                return
            self._reply(answer.status, dict(answer.getheaders()), data)

        def _reply(self, status: int, headers: dict[str, str], data: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = headers.get("Content-Length") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

        def log_message(self, *_: object) -> None:
            """Nothing."""

    class Proxy(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that was killed, or given no reply, has hung up."""

    proxy = Proxy(("127.0.0.1", 0), Handler)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    store.url = f"http://127.0.0.1:{proxy.server_address[1]}"
    store.environment = KEYS | {"AWS_ENDPOINT_URL": store.url}
    before = {name: os.environ.get(name) for name in store.environment}
    os.environ.update(store.environment)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("PUT", "/bucket", b"", {"Content-Length": "0"})
    connection.getresponse().read()
    try:
        yield store
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
        proxy.shutdown()
        proxy.server_close()
        moto.stop()
