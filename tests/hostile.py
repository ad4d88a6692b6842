"""Hostile: a server of a test that answers by raw bytes, late, wrongly or not at all."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable

Behaviour = Callable[["Visit"], None]


class Visit:
    """One request that came: the ``number`` of it over all connections, from 0, its head and body,
    and the connection, by the client's ``port``."""

    def __init__(
        self, server: Hostile, number: int, request: bytes, connection: socket.socket
    ) -> None:
        self.server, self.number, self.request, self.connection = (
            server,
            number,
            request,
            connection,
        )
        self.port: int = connection.getpeername()[1] if connection.family == socket.AF_INET else 0

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def answer(self, status: int = 200, body: bytes = b'{"views": []}', *headers: bytes) -> None:
        """A whole answer."""
        lines = [b"HTTP/1.1 %d x" % status, b"Content-Length: %d" % len(body), *headers]
        self.send(b"\r\n".join(lines) + b"\r\n\r\n" + body)

    def hold(self) -> None:
        """Neither answer nor close, until the test is over."""
        self.server.over.wait(30)

    def drip(self, data: bytes, every_s: float) -> None:
        """A byte now and then."""
        for byte in data:
            self.send(bytes([byte]))
            if self.server.over.wait(every_s):
                return

    def close(self) -> None:
        """Close the connection; what waits for it on the other side sees its end."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Hostile:
    """Listens on a port of its own, or a Unix socket at ``path``, and answers each request as
    ``behaviour`` does; a context manager."""

    def __init__(
        self, behaviour: Behaviour, tls: ssl.SSLContext | None = None, path: str | None = None
    ) -> None:
        self._behaviour, self._tls = behaviour, tls
        self._listener = (
            socket.create_server(("127.0.0.1", 0))
            if path is None
            else socket.socket(socket.AF_UNIX)
        )
        if path is not None:
            self._listener.bind(path)
            self._listener.listen()
        self._lock, self._threads = threading.Lock(), list[threading.Thread]()
        self.over = threading.Event()
        where = self._listener.getsockname()
        self.url = (
            f"unix:{path}"
            if path is not None
            else f"{'http' if tls is None else 'https'}://127.0.0.1:{where[1]}"
        )
        self.requests: list[bytes] = []
        self.open, self.most_open = set[socket.socket](), 0
        self._accepting = threading.Thread(target=self._accept)

    def __enter__(self) -> Hostile:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        with socket.socket(self._listener.family) as last:
            last.connect(self._listener.getsockname())
            # wakes the one who accepts, who then sees that it is over
            self._accepting.join()
        self._listener.close()
        with self._lock:
            left = list(self.open)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self.over.is_set():
                connection.close()
                return
            with self._lock:
                self.open.add(connection)
                self.most_open = max(self.most_open, len(self.open))
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, plain: socket.socket) -> None:
        connection = plain
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(plain, server_side=True)
            while request := _read_request(connection):
                with self._lock:
                    number = len(self.requests)
                    self.requests.append(request)
                self._behaviour(Visit(self, number, request, connection))
        except OSError:
            # the client went away, or the test is over
            pass
        finally:
            connection.close()
            with self._lock:
                self.open.discard(plain)


def _read_request(connection: socket.socket) -> bytes:
    """Head and body; nothing when the client closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        ),
        0,
    )
    while len(body) < length:
        part = connection.recv(65536)
        if not part:
            return b""
        body += part
    return head + b"\r\n\r\n" + body
