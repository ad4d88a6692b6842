"""Client: the HTTP API from Python, over TCP or a Unix socket, with connections kept open.

The answers are those of :class:`store.lookup.Lookup`: ``get`` gives the same Arrow table, ``row`` the same dict.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pyarrow as pa

from store.api import wire
from store.errors import OnlineStoreError, RequestError


class Client:
    """Talks to one server; share it between threads, close it at the end.

    Args:
        url: ``http://127.0.0.1:8080`` or ``unix:./api.sock``.
        timeout_s: for connecting and for each answer.

    Raises:
        RequestError: the URL is neither.
    """

    def __init__(self, url: str = "http://127.0.0.1:8080", timeout_s: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme == "unix" and parts.path:
            self._socket_path: str | None = url.removeprefix("unix:")
        elif parts.scheme == "http" and parts.hostname:
            self._socket_path = None
        else:
            raise RequestError(f"{url!r} is no server's address: write http://127.0.0.1:8080 or unix:./api.sock")
        self._url, self._host, self._port, self._timeout_s = url, parts.hostname or "localhost", parts.port or 80, timeout_s
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def get(
        self,
        view: str,
        keys: Sequence[Any],
        *,
        features: Sequence[str] | None = None,
        fallback: bool = True,
        deadline_ms: float | None = None,
        max_age_s: float | None = None,
        inputs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> pa.Table:
        """As :meth:`store.lookup.Lookup.get`, over HTTP and Arrow.

        Raises:
            RequestError: the server refused, with its status and code.
            OnlineStoreError: no answer, or the server's store does not answer.
        """
        body = {
            "keys": list(keys),
            "features": None if features is None else list(features),
            "fallback": fallback,
            "deadline_ms": deadline_ms,
            "max_age_s": max_age_s,
            "inputs": inputs,
        }
        return wire.decode_arrow(self._send("POST", f"/v1/views/{quote(view, safe='')}/lookup", body, accept=wire.ARROW))

    def row(self, view: str, key: Any, *, features: Sequence[str] | None = None, fallback: bool = True) -> dict[str, Any]:
        """One row as a dict, with ``features`` inside.

        Raises:
            RequestError: among others, status 404 when the row is missing.
        """
        parts = key if isinstance(key, (list, tuple)) else [key]
        query = {}
        if features is not None:
            query["features"] = ",".join(features)
        if not fallback:
            query["fallback"] = "false"
        path = f"/v1/views/{quote(view, safe='')}/rows/{'/'.join(quote(str(p), safe='') for p in parts)}"
        return json.loads(self._send("GET", path + (f"?{urlencode(query)}" if query else ""), None))  # type: ignore[no-any-return]

    def search(self, view: str, **arguments: Any) -> dict[str, Any]:
        """As :meth:`store.lookup.Lookup.search`; ``exclude=[keys]`` leaves rows out."""
        exclude = arguments.pop("exclude", None)
        body = {**arguments, "filter": {"exclude": list(exclude)}} if exclude else arguments
        return json.loads(self._send("POST", f"/v1/views/{quote(view, safe='')}/search", body))  # type: ignore[no-any-return]

    def views(self) -> list[dict[str, Any]]:
        """As :meth:`store.lookup.Lookup.views`."""
        return json.loads(self._send("GET", "/v1/views", None))["views"]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, method: str, path: str, body: Any, accept: str = wire.JSON) -> bytes:
        data = None if body is None else wire.encode(body)
        headers = {"Accept": accept} if data is None else {"Accept": accept, "Content-Type": wire.JSON}
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        fresh = connection is None
        try:
            try:
                connection = connection or self._connect()
                connection.request(method, path, data, headers)
                response = connection.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                if fresh:
                    raise
                connection = self._connect()  # the server closed an idle connection; asking again is safe, all calls only read
                connection.request(method, path, data, headers)
                response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as exc:
            if connection is not None:
                connection.close()
            raise OnlineStoreError(
                f"no answer from {self._url}: {exc or type(exc).__name__}; is `precompute serve` running?"
            ) from exc
        with self._lock:
            self._idle.append(connection)
        if response.status >= 400:
            raise _refusal(response.status, content)
        return content

    def _connect(self) -> http.client.HTTPConnection:
        if self._socket_path is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        else:
            connection = _UnixConnection(self._socket_path, self._timeout_s)
        connection.connect()
        if connection.sock.family != socket.AF_UNIX:
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _refusal(status: int, content: bytes) -> Exception:
    try:
        problem = json.loads(content)
        detail, code = problem["detail"], problem["type"].rpartition(":")[2]
    except (ValueError, KeyError, TypeError):
        detail, code = content[:200].decode(errors="replace"), "http_error"
    if code == "store_unavailable":
        return OnlineStoreError(detail)
    return RequestError(detail, status=status, code=code)
