"""Client: the HTTP API from Python, over TCP or a Unix socket, with connections kept open.

The answers are those of :class:`store.lookup.Lookup`: ``get`` gives the same Arrow table, ``row`` the same dict.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pyarrow as pa

from store.answer import check_limits
from store.api import wire
from store.entity_key import join_key
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
        try:
            parts = urlsplit(url)
            port = parts.port or 80
        except ValueError as exc:
            raise RequestError(f"{url!r} is no server's address ({exc}): write http://127.0.0.1:8080 or unix:./api.sock") from exc
        if parts.scheme == "unix" and parts.path:
            self._socket_path: str | None = url.removeprefix("unix:")
        elif parts.scheme == "http" and parts.hostname:
            self._socket_path = None
        else:
            raise RequestError(f"{url!r} is no server's address: write http://127.0.0.1:8080 or unix:./api.sock")
        self._url, self._host, self._port, self._timeout_s = url, parts.hostname or "localhost", port, timeout_s
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
        check_limits(deadline_ms=deadline_ms, max_age_s=max_age_s)  # JSON has no NaN or infinity: they would arrive as null
        body = {
            "keys": list(keys),
            "features": None if features is None else list(features),
            "fallback": fallback,
            "deadline_ms": deadline_ms,
            "max_age_s": max_age_s,
            "inputs": inputs,
        }
        content = self._send("POST", f"/v1/views/{quote(view, safe='')}/lookup", body, accept=wire.ARROW)
        with self._understood():
            return wire.decode_arrow(content)

    def row(self, view: str, key: Any, *, features: Sequence[str] | None = None, fallback: bool = True) -> dict[str, Any]:
        """One row as a dict, with ``features`` inside.

        Raises:
            RequestError: among others, status 404 when the row is missing.
        """
        parts = [join_key(part, ("key",)) for part in (key if isinstance(key, (list, tuple)) else [key])]
        query = {}
        if features is not None:
            query["features"] = ",".join(features)
        if not fallback:
            query["fallback"] = "false"
        path = f"/v1/views/{quote(view, safe='')}/rows/{'/'.join(quote(p, safe='') for p in parts)}"
        row = self._json("GET", path + (f"?{urlencode(query)}" if query else ""))
        with self._understood():
            row.pop("view")
            return _with_datetime(row)

    def search(self, view: str, **arguments: Any) -> dict[str, Any]:
        """As :meth:`store.lookup.Lookup.search`; ``exclude=[keys]`` leaves rows out."""
        exclude = arguments.pop("exclude", None)
        body = {**arguments, "filter": {"exclude": list(exclude)}} if exclude else arguments
        found = self._json("POST", f"/v1/views/{quote(view, safe='')}/search", body)
        with self._understood():
            return found | {"rows": [_with_datetime(row) for row in found["rows"]]}

    def views(self) -> list[dict[str, Any]]:
        """As :meth:`store.lookup.Lookup.views`."""
        answer = self._json("GET", "/v1/views")
        with self._understood():
            return list(answer["views"])

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

    def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        content = self._send(method, path, body)
        with self._understood():
            return dict(json.loads(content))

    def _send(self, method: str, path: str, body: Any, accept: str = wire.JSON) -> bytes:
        try:
            data = None if body is None else wire.encode(body)
        except UnicodeEncodeError as exc:
            raise RequestError("a key is not valid UTF-8", code="bad_key") from exc
        except TypeError as exc:
            raise RequestError(f"not something JSON can carry: {exc}") from exc
        headers = {"Accept": accept} if data is None else {"Accept": accept, "Content-Type": wire.JSON}
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is not None:
                try:
                    return self._exchange(connection, method, path, data, headers)
                except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                    pass  # the server closed the idle connection; asking again is safe, since every call only reads
            return self._exchange(self._connect(), method, path, data, headers)
        except (OSError, http.client.HTTPException) as exc:
            raise OnlineStoreError(
                f"no answer from {self._url}: {exc or type(exc).__name__}; is `precompute serve` running?"
            ) from exc

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> bytes:
        """One request and its answer; the connection is kept when it can be used again, and closed whatever else happens."""
        keep = False
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            content = response.read()
            keep = not response.will_close
        finally:
            if keep:
                with self._lock:
                    self._idle.append(connection)
            else:
                connection.close()
        if response.status >= 400:
            raise _refusal(response.status, content)
        return content

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise OnlineStoreError(f"{self._url} answered something else than this API: {exc}; is that address right?") from exc

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
        try:
            self.sock.connect(self._path)
        except OSError:
            self.close()
            raise


def _refusal(status: int, content: bytes) -> Exception:
    try:
        problem = json.loads(content)
        detail, code = problem["detail"], problem["type"].rpartition(":")[2]
    except (ValueError, KeyError, TypeError):
        detail, code = content[:200].decode(errors="replace"), "http_error"
    if code == "store_unavailable":
        return OnlineStoreError(detail)
    return RequestError(detail, status=status, code=code)


def _with_datetime(row: dict[str, Any]) -> dict[str, Any]:
    """The row with ``computed_at`` as an aware datetime, as :class:`store.lookup.Lookup` gives it."""
    at = row["computed_at"]
    return row | {"computed_at": None if at is None else datetime.fromisoformat(at)}
