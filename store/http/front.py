"""Front: the router: every request passes the gate, then goes to its route by method and undecoded
path; every error is a problem (RFC 9457)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

from precompute.store.answers.fallback import CLIENT
from precompute.store.errors import RequestError
from precompute.store.http.encoding.http_freshness import Headers
from precompute.store.http.reply import Reply, Stream, problem, refusal
from precompute.store.http.request import Disconnected, Receive, Scope, Send, client_of

Handler = Callable[[Scope, Receive], Awaitable[Reply]]
"""A route with a fixed path: ``/livez``."""
ViewHandler = Callable[[Scope, Receive, str, bytes], Awaitable[Reply]]
"""A route below a view or a service: gets its name and, for a row, the undecoded key."""
Gate = Callable[[Scope], Reply | None]
"""Called first for every request: returns the refusal, or None to let it pass."""

TRIED_AT_ONCE = "precompute.tried_at_once"
"""Key of a scope for which :meth:`Front.at_once` was called already."""

_VIEWS, _SERVICES = b"/v1/views/", b"/v1/services/"
_ROWS = b"rows/"


def open_gate(scope: Scope) -> Reply | None:
    """Lets every request pass."""
    return None


class Front:
    """Routes requests without a framework, which took 35 of the 140 µs of a single row.

    Args:
        row_at_once: answers ``GET /v1/views/{view}/rows/{key}`` if there is nothing to wait for;
            else returns None.
        lookup_at_once: the same for ``POST /v1/views/{view}/lookup``, with its whole body.
        row: as ``row_at_once``, if it has to wait.
        view_posts: routes of POST below a view, by the last word of the path: ``lookup``,
            ``search``.
        service_at_once: as ``lookup_at_once``, for ``POST /v1/services/{service}``.
        service: the same, if it has to wait.
        fixed: path → method → handler.
        refused: called with the code of each refusal.
        gate: checks every request; by default all pass.
    """

    def __init__(
        self,
        row_at_once: Callable[[Scope, str, bytes], Reply | None],
        lookup_at_once: Callable[[Scope, str, bytes], Reply | None],
        row: ViewHandler,
        view_posts: Mapping[bytes, ViewHandler],
        service_at_once: Callable[[Scope, str, bytes], Reply | None],
        service: ViewHandler,
        fixed: Mapping[bytes, Mapping[str, Handler]],
        refused: Callable[[str], None],
        gate: Gate = open_gate,
    ) -> None:
        self._row_at_once = row_at_once
        self._lookup_at_once = lookup_at_once
        self._service_at_once = service_at_once
        self._service = service
        self._row = row
        self._view_posts = view_posts
        self._fixed = fixed
        self._refused = refused
        self._gate = gate
        self.waits_until: Callable[[], float] = lambda: -math.inf
        """When the last of the requests that wait for a model will have an answer
        (:func:`time.monotonic`); minus infinity where none does."""

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
        """The answer, if there is nothing to wait for: the gate refuses the request, or its row is
        in memory. Its headers have no Content-Length, its body is whole. The scope needs no
        ``path``. A server that called this and got None puts :data:`TRIED_AT_ONCE` into the scope.
        Raises nothing."""
        reply = self._gate(scope)
        if reply is not None:
            return reply
        path: bytes = scope["raw_path"]
        if path.startswith(_VIEWS) and scope["method"] in _READING:
            view, _, rest = path[len(_VIEWS) :].partition(b"/")
            if rest.startswith(_ROWS):
                try:
                    return self._row_at_once(scope, _name(view), rest[len(_ROWS) :])
                except Exception as exc:
                    return self._refusal(exc, scope)
        return None

    def posted_at_once(self, scope: Scope, body: bytes) -> Reply | None:
        """The same, after :meth:`at_once` had no answer, for a request with its whole body. A
        lookup that was begun but has to wait is continued by :meth:`__call__` with the same
        scope."""
        path: bytes = scope["raw_path"]
        name, at_once = b"", None
        if path.startswith(_VIEWS):
            name, _, rest = path[len(_VIEWS) :].partition(b"/")
            at_once = self._lookup_at_once if rest == b"lookup" else None
        elif path.startswith(_SERVICES) and b"/" not in path[len(_SERVICES) :]:
            name, at_once = path[len(_SERVICES) :], self._service_at_once
        if at_once is None:
            return None
        CLIENT.set(client_of(scope))
        try:
            return at_once(scope, _name(name), body)
        except Exception as exc:
            return self._refusal(exc, scope)

    def _refusal(self, exc: Exception, scope: Scope) -> Reply:
        # undecoded, for the log: a decoded name may have line breaks
        reply, code = refusal(exc, f"{scope['method'][:20]} {scope['raw_path'].decode('latin-1')}")
        self._refused(code)
        return reply

    def _routed(self, scope: Scope, receive: Receive) -> Awaitable[Reply]:
        # By the undecoded path: an encoded slash in a view's name or a key is no separator.
        path: bytes = scope["raw_path"]
        method: str = scope["method"]
        if path.startswith(_VIEWS):
            view, _, rest = path[len(_VIEWS) :].partition(b"/")
            if rest.startswith(_ROWS):
                if method in _READING:
                    return self._row(scope, receive, _name(view), rest[len(_ROWS) :])
                return self._not_allowed(method, ("GET",))
            posted = self._view_posts.get(rest)
            if posted is not None:
                return (
                    posted(scope, receive, _name(view), b"")
                    if method == "POST"
                    else self._not_allowed(method, ("POST",))
                )
        if path.startswith(_SERVICES) and b"/" not in path[len(_SERVICES) :]:
            name = _name(path[len(_SERVICES) :])
            return (
                self._service(scope, receive, name, b"")
                if method == "POST"
                else self._not_allowed(method, ("POST",))
            )
        methods = self._fixed.get(path)
        if methods is None:
            raise RequestError(
                "there is no such route: see /openapi.json", status=404, code="no_such_route"
            )
        handler = methods.get("GET" if method == "HEAD" else method)
        return (
            self._not_allowed(method, tuple(methods))
            if handler is None
            else handler(scope, receive)
        )

    async def _not_allowed(self, method: str, methods: tuple[str, ...]) -> Reply:
        self._refused("method_not_allowed")
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
