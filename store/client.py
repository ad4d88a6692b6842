"""Client: the HTTP API from Python, over TCP or a Unix socket, with connections kept open.

The answers are those of :class:`store.lookup.Lookup`: ``get`` gives the same Arrow table, ``row`` the same dict.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpcore2
import pyarrow as pa

from store.api import arrow, wire
from store.errors import OnlineStoreError, RequestError
from store.key_text import join_key
from store.lookup_options import LookupOptions


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
            host, port = (parts.hostname or "").encode("idna"), parts.port or 80
        except ValueError as exc:
            raise RequestError(f"{url!r} is no server's address ({exc}): write http://127.0.0.1:8080 or unix:./api.sock") from exc
        if parts.scheme == "unix" and parts.path:
            socket_path, self._address, self._host = url.removeprefix("unix:"), (b"localhost", port), "localhost"
        elif parts.scheme == "http" and host:
            # httpcore2 would leave out the brackets of an IPv6 address
            named = b"[%s]" % host if b":" in host else host
            socket_path, self._address, self._host = None, (host, port), f"{named.decode()}:{port}"
        else:
            raise RequestError(f"{url!r} is no server's address: write http://127.0.0.1:8080 or unix:./api.sock")
        self._url = url
        self._timeouts = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
        self._pool = httpcore2.ConnectionPool(max_connections=None, uds=socket_path)

    def get(
        self,
        view: str,
        keys: Sequence[Any],
        *,
        features: Sequence[str] | None = None,
        fallback: bool = True,
        deadline_ms: float | None = None,
        max_age_s: float | None = None,
        inputs: Mapping[Any, Mapping[str, Any]] | None = None,
    ) -> pa.Table:
        """As :meth:`store.lookup.Lookup.get`, over HTTP and Arrow.

        Raises:
            RequestError: the server refused, with its status and code.
            OnlineStoreError: no answer, or the server's store does not answer.
        """
        options = LookupOptions(None if features is None else list(features), fallback, deadline_ms, max_age_s, inputs)
        # JSON has no NaN or infinity: they would arrive as null
        options.check()
        body = {"keys": list(keys), **options._asdict()}
        content = self._send("POST", f"/v1/views/{quote(view, safe='')}/lookup", body, accept=wire.ARROW)
        with self._understood():
            return arrow.decode_arrow(content)

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
        """As :meth:`store.lookup.Lookup.search`."""
        answer = self._json("POST", f"/v1/views/{quote(view, safe='')}/search", arguments)
        with self._understood():
            return answer | {"rows": [_with_datetime(row) for row in answer["rows"]]}

    def views(self) -> list[dict[str, Any]]:
        """As :meth:`store.lookup.Lookup.views`."""
        answer = self._json("GET", "/v1/views")
        with self._understood():
            return list(answer["views"])

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

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
        headers = [("Host", self._host), ("Accept", accept)]
        headers += [] if data is None else [("Content-Type", wire.JSON)]
        try:
            try:
                response = self._exchange(method, path, data, headers)
            except (httpcore2.RemoteProtocolError, httpcore2.ReadError, httpcore2.WriteError):
                # the server closed the idle connection; asking again is safe, since every call only reads
                response = self._exchange(method, path, data, headers)
        except (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError) as exc:
            reason = str(exc) or type(exc).__name__
            raise OnlineStoreError(f"no answer from {self._url}: {reason}; is `precompute serve` running?") from exc
        if response.status >= 400:
            raise _refusal(response.status, response.content)
        return response.content

    def _exchange(self, method: str, path: str, data: bytes | None, headers: list[tuple[str, str]]) -> httpcore2.Response:
        host, port = self._address
        url = httpcore2.URL(scheme="http", host=host, port=port, target=path)
        return self._pool.request(method, url, headers=headers, content=data, extensions={"timeout": self._timeouts})

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise OnlineStoreError(f"{self._url} answered something else than this API: {exc}; is that address right?") from exc


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
