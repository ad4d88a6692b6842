"""An object store for tests: moto behind a proxy that lets one request through at a time, and
loses, doubles or delays what a test says."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
    reply_bytes: int = 0


@dataclass
class ObjectStore:
    """A bucket ``bucket``, and what its proxy does.

    ``fault`` says of each request: None, ``drop`` (it is done, and the reply lost), ``refuse``
    (503, not done), ``twice`` (done twice, the second reply given), ``unconditional`` (done without
    its condition), ``forbid`` (403), ``late`` (the reply that the same request had before, where
    there was one), or seconds to wait first; ``flip``: one bit of the reply's body
    is another. Its clock is ``ahead_s`` of this host's.
    """

    url: str
    environment: dict[str, str]
    fault: Callable[[Request], str | float | None] = field(default=lambda _: None)
    requests: list[Request] = field(default_factory=list)
    dropped: int = 0
    replies: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    """The last to each request that is to be answered late, by its path."""
    flipped: Callable[[bytes], bytes] = field(default=lambda data: flipped_at(data, len(data) // 2))
    prefix: str = "root"
    ahead_s: int = 0

    @property
    def root(self) -> str:
        """The URL of a place there that nothing else is at."""
        return f"s3://bucket/{self.prefix}"

    def at_first(self, what: str | float, of: Callable[[Request], bool]) -> None:
        """Do that at the first of equal requests, of those that are meant."""
        done = set[tuple[str, str, bytes]]()

        def fault(request: Request) -> str | float | None:
            key = request.method, request.path, request.body
            if key in done or not of(request):
                return None
            done.add(key)
            return what

        self.fault = fault

    def in_its_time(self, data: bytes) -> bytes:
        """A listing, each time in it by the store's clock."""

        def later(found: re.Match[bytes]) -> bytes:
            at = datetime.fromisoformat(found[1].decode()) + timedelta(seconds=self.ahead_s)
            return f"<LastModified>{at:%Y-%m-%dT%H:%M:%S.000Z}<".encode()

        return re.sub(rb"<LastModified>([^<]+)<", later, data) if self.ahead_s else data

    def lose_first_replies(self) -> None:
        """Lose the first reply to each conditional write."""
        self.at_first("drop", lambda request: request.conditional)


def flipped_at(data: bytes, at: int) -> bytes:
    """Some bytes, with a bit of that at a place, counted around, another one."""
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """One that runs while this lasts; the environment names it."""
    from moto.moto_server.werkzeug_app import create_backend_app

    # called in this process: 1.7 ms of CPU a request, client included; over HTTP it took 4.3
    moto = create_backend_app("s3").test_client()
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
                busy = fault == "refuse"
                code = b"ServiceUnavailable" if busy else b"AccessDenied"
                body = b"<Error><Code>%s</Code></Error>" % code
                self._reply(503 if busy else 403, {}, body)
                return
            for header in conditions if fault == "unconditional" else ():
                del headers[header]
            for _ in range(2 if fault == "twice" else 1):
                with one_at_a_time:
                    answer = moto.open(self.path, method=self.command, data=body, headers=headers)
                    data = answer.get_data()
            head = dict(answer.headers)
            if store.ahead_s and "last-modified" in answer.headers:
                at = parsedate_to_datetime(answer.headers["last-modified"])
                at += timedelta(seconds=store.ahead_s)
                head |= {"last-modified": format_datetime(at, usegmt=True)}
            data = store.in_its_time(data)
            if fault == "flip" and data:
                data = store.flipped(data)
            if fault == "drop":
                store.dropped += 1
                self.close_connection = True
                self.connection.close()
                return
            request.reply_bytes = len(data)
            reply = answer.status_code, head, data
            if fault == "late":
                reply, store.replies[self.path] = store.replies.get(self.path, reply), reply
            self._reply(*reply)

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
    moto.put("/bucket")
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
