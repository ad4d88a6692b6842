"""HTTP API: the ASGI application: every request is checked for access, then goes to its route by
method and undecoded path; every error is a problem (RFC 9457).

JSON by default, an Arrow IPC stream by ``Accept``; a row's freshness is in its fields and, for a
single row, in the headers HTTP has for it (RFC 9111 Age and Cache-Control, RFC 5861, RFC 9211
Cache-Status).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

from precompute.store.answers.fallback import CLIENT
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import RequestError
from precompute.store.http.api import Api
from precompute.store.http.encoding.answer_bodies import MAX_ANSWER_BYTES
from precompute.store.http.encoding.caching import MAX_CACHE_BYTES, PRIVATE, Caching, Headers
from precompute.store.http.messages import (
    TRIED_AT_ONCE,
    Disconnected,
    Receive,
    Reply,
    Scope,
    Send,
    Stream,
    Timing,
    client_of,
    problem,
)
from precompute.store.http.openapi import Credentials, openapi_document
from precompute.store.http.pools import MOST_WAITING, Serving
from precompute.store.http.routes import ROWS, SERVICES, VIEWS, Handler, Parts, every_route
from precompute.store.http.rows import RowRoutes
from precompute.store.http.services import ServiceRoutes
from precompute.store.http.telemetry.instruments import Meter
from precompute.store.online.online_store import Pointer
from precompute.store.wire import bodies

Access = Callable[[Scope], Reply | None]
"""Called first for every request: returns the refusal, or None to let it pass."""

# what is answered at once is found by its own few comparisons
_VIEWS, _SERVICES, _ROWS = VIEWS.encode(), SERVICES.encode(), ROWS.encode()


class Front:
    """Routes requests without a framework, which took 35 of the 140 µs of a single row.

    Args:
        parts: what the routes' handlers are made of. Those named ``…_at_once`` answer if there is
            nothing to wait for, else return None.
        access: checks every request; by default all pass.
    """

    def __init__(self, parts: Parts, access: Access = lambda scope: None) -> None:
        self._access = access
        self._serving, self._rows, self._services, self._api = parts
        self._find = every_route().find
        self._handlers: dict[str | None, dict[str, Handler]] = {}
        """A route's path → method → what answers."""
        for route in every_route():
            self._handlers.setdefault(route.path, {})[route.method] = route.handler(parts)

    def waits_until(self) -> float:
        """When the last of the requests that wait for a model will have an answer
        (:func:`time.monotonic`); minus infinity where none does."""
        return max(self._serving.waits.until(), self._api.waits_until())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI hands it over."""
        if scope["type"] != "http":
            # WebSockets; and `lifespan`, whose protocol takes an exception for "not supported"
            raise NotImplementedError(f"no {scope['type']} here")
        reply = None if TRIED_AT_ONCE in scope else self.at_once(scope)
        if reply is None:
            CLIENT.set(client_of(scope))
            try:
                reply = await self._routed(scope, receive)
            except Disconnected:
                return
            except Exception as exc:
                reply = self._refusal(exc, scope)
        status, headers, body = reply
        if isinstance(body, Stream):
            await _stream(status, headers, body, send)
            return
        if isinstance(body, list):
            body = b"".join(body)
        if status != HTTPStatus.NOT_MODIFIED:
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def at_once(self, scope: Scope) -> Reply | None:
        """The answer, if there is nothing to wait for: the request is refused, or its row is
        in memory. Its headers have no Content-Length, its body is whole. The scope needs no
        ``path``. A server that called this and got None puts :data:`TRIED_AT_ONCE` into the scope.
        Raises nothing."""
        reply = self._access(scope)
        if reply is not None:
            return reply
        path: bytes = scope["raw_path"]
        if path.startswith(_VIEWS) and scope["method"] in _READING:
            view, _, rest = path[len(_VIEWS) :].partition(b"/")
            if rest.startswith(_ROWS):
                try:
                    return self._rows.row_at_once(scope, _name(view), rest[len(_ROWS) :])
                except Exception as exc:
                    return self._refusal(exc, scope)
        return None

    def posted_at_once(self, scope: Scope, body: bytes) -> Reply | None:
        """The same, after :meth:`at_once` had no answer, for a request with its whole body. A
        lookup that was begun but has to wait is continued by :meth:`__call__` with the same
        scope."""
        path: bytes = scope["raw_path"]
        name = b""
        at_once: Callable[[Scope, str, bytes], Reply | None] | None = None
        if path.startswith(_VIEWS):
            name, _, rest = path[len(_VIEWS) :].partition(b"/")
            at_once = self._rows.lookup_at_once if rest == b"lookup" else None
        elif path.startswith(_SERVICES) and b"/" not in path[len(_SERVICES) :]:
            name, at_once = path[len(_SERVICES) :], self._services.at_once
        if at_once is None:
            return None
        CLIENT.set(client_of(scope))
        try:
            return at_once(scope, _name(name), body)
        except Exception as exc:
            return self._refusal(exc, scope)

    def _refusal(self, exc: Exception, scope: Scope) -> Reply:
        # undecoded, for the log: a decoded name may have line breaks
        where = f"{scope['method'][:20]} {scope['raw_path'].decode('latin-1')}"
        return self._serving.refused(exc, where)

    def _routed(self, scope: Scope, receive: Receive) -> Awaitable[Reply]:
        path, name, rest = self._find(scope["raw_path"])
        method: str = scope["method"]
        methods = self._handlers.get(path)
        if methods is None:
            raise RequestError(
                "there is no such route: see /openapi.json", status=404, code="no_such_route"
            )
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            return self._not_allowed(method, tuple(methods))
        if name is None:
            return handler(scope, receive)
        return handler(scope, receive, _name(name), rest)

    async def _not_allowed(self, method: str, methods: tuple[str, ...]) -> Reply:
        self._serving.metrics.refused("method_not_allowed")
        allowed = ", ".join(methods + ("HEAD",) * ("GET" in methods))
        detail = f"{method[:20]} is not for this route, which takes {allowed}"
        return problem(405, "method_not_allowed", detail, [(b"allow", allowed.encode())])


async def _stream(status: int, headers: Headers, body: Stream, send: Send) -> None:
    """Send a body while it is made: each piece when the connection takes it, and other requests in
    between."""
    try:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for piece in body.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})
    finally:
        body.close()


_READING = frozenset({"GET", "HEAD"})


def _name(raw: bytes) -> str:
    return (unquote_to_bytes(raw) if b"%" in raw else raw).decode(errors="replace")


def create_app(
    lookup: Lookup,
    warming: Callable[[], bool] = lambda: False,
    fallback_ready: Callable[[Pointer], bool] = lambda _: False,
    access: Access = lambda scope: None,
    meter: Meter | None = None,
    answer_bytes: int = MAX_ANSWER_BYTES,
    cache_bytes: int = MAX_CACHE_BYTES,
    timing: Timing = Timing.UNREPORTED,
    credentials: Credentials = Credentials.NOTHING,
    waiting: int = MOST_WAITING,
    caching: Caching = PRIVATE,
) -> Front:
    """The ASGI application. Its arguments are those of :class:`Serving`, :class:`Api`,
    :class:`RowRoutes` (``cache_bytes``, ``caching``) and :class:`Front` (``access``), and what
    access and TLS require, for the OpenAPI document.

    Raises:
        ConfigError: a route of another package cannot be used.
    """
    serving = Serving(lookup, meter, fallback_ready, answer_bytes, timing, waiting)
    parts = Parts(
        serving,
        RowRoutes(serving, cache_bytes, caching),
        ServiceRoutes(serving),
        Api(serving, warming, bodies.encode(openapi_document(credentials))),
    )
    return Front(parts, access)
