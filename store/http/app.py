"""HTTP API: the ASGI application: every request is checked for access, then goes to its route by
method and undecoded path; every error is a problem (RFC 9457). The routes of searches, views,
health, metrics and the page are here.

JSON by default, an Arrow IPC stream by ``Accept``; a row's freshness is in its fields and, for a
single row, in the headers HTTP has for it (RFC 9111 Age and Cache-Control, RFC 5861, RFC 9211
Cache-Status).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes

from precompute.store.answers.fallback import CLIENT, Waiting
from precompute.store.answers.lookup import Lookup
from precompute.store.answers.search import takes_text
from precompute.store.errors import OnlineStoreError, RequestError
from precompute.store.http.encoding.answer_bodies import MAX_ANSWER_BYTES, Measure, search_json
from precompute.store.http.encoding.caching import MAX_CACHE_BYTES, PRIVATE, Caching, Headers
from precompute.store.http.messages import (
    JSON_TYPE,
    NOT_STORED,
    STRANGER,
    TRIED_AT_ONCE,
    Disconnected,
    Receive,
    Reply,
    Scope,
    Send,
    Stream,
    Timing,
    client_of,
    headers_of,
    json_reply,
    no_query,
    problem,
    read_body,
    timed,
    while_connected,
)
from precompute.store.http.metrics import CONTENT_TYPE, Seen
from precompute.store.http.openapi import Credentials, openapi_document
from precompute.store.http.page.figures import ViewFigures
from precompute.store.http.page.page import POLICY, Page
from precompute.store.http.pools import MOST_WAITING, Pool, Serving
from precompute.store.http.rows import NOT_LOADED, RowRoutes
from precompute.store.http.services import ServiceRoutes
from precompute.store.http.telemetry.instruments import Meter
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import BASE64, SearchOptions

_PAGE_HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", POLICY.encode()),
    NOT_STORED,
]


class Api:
    """The routes of searches, views, health, metrics and the page.

    Args:
        serving: what all routes share.
        warming: true while models are still being loaded: not ready yet.
        credentials: what access and TLS require, for the OpenAPI document.
    """

    def __init__(
        self,
        serving: Serving,
        warming: Callable[[], bool],
        credentials: Credentials = Credentials.NOTHING,
    ) -> None:
        self._serving, self._warming = serving, warming
        self._lookup, self._metrics = serving.lookup, serving.metrics
        self._fallback_ready, self._views = serving.fallback_ready, serving.views
        self._searching: set[Waiting] = set()
        self._renderers = Pool("page", 1, 4)
        self._page = Page(serving.lookup, serving.metrics.meter, self._known_views)
        self._openapi = bodies.encode(openapi_document(credentials))

    # ---- search, views

    async def search(self, scope: Scope, receive: Receive, view: str, _: bytes) -> Reply:
        """``POST /v1/views/{view}/search``."""
        started = time.perf_counter()
        no_query(scope)
        _kind, body = await read_body(receive, headers_of(scope), (bodies.JSON,))
        wanted: bodies.SearchRequest = bodies.decode(bodies.decode_search, body)
        waiting = Waiting()
        self._searching.add(waiting)
        try:
            body = await while_connected(
                self._serving.searchers.run(self._search, view, wanted.options(), waiting),
                receive,
                waiting.give_up,
            )
        finally:
            self._searching.discard(waiting)
        seconds = time.perf_counter() - started
        self._metrics.timed("search", seconds)
        self._metrics.stage("search", seconds)
        reply = Reply(200, [JSON_TYPE], body)
        return timed(scope, reply, {"search": seconds}, seconds, self._serving.timing)

    def _search(self, view: str, options: SearchOptions, waiting: Waiting) -> bytes:
        try:
            searched, found = self._lookup.find(
                view, options, Measure(self._serving.answer_bytes).add, waiting
            )
        except RequestError as exc:
            pointer = self._lookup.online.live(view) if exc.code == Reason.DEADLINE else None
            if pointer is None or self._fallback_ready(pointer):
                raise
            raise RequestError(f"{exc}, {NOT_LOADED}", status=exc.status, code=exc.code) from exc
        return search_json(
            found, searched, options.features if options.encoding_format == BASE64 else None
        )

    def waits_until(self) -> float:
        """When the last of the searches that wait for a model will have an answer
        (:func:`time.monotonic`); minus infinity where none does."""
        return max((waiting.until for waiting in self._searching), default=-math.inf)

    async def views(self, scope: Scope, receive: Receive) -> Reply:
        """``GET /v1/views``."""
        no_query(scope)
        seen: Seen = await self._serving.read(self._views.read)
        if not seen.store_answers and not seen.pointers:
            raise OnlineStoreError(
                "the online store did not say what is live since this process was started"
            )
        body: dict[str, Any] = {
            "views": [self._lookup.describe(pointer) for pointer in seen.pointers]
        }
        # these are as last seen, or not among the views
        return json_reply(
            body | ({"unreadable": sorted(seen.unreadable)} if seen.unreadable else {})
        )

    # ---- for operators

    async def livez(self, scope: Scope, receive: Receive) -> Reply:
        """``GET /livez``."""
        return Reply(200, [JSON_TYPE, NOT_STORED], b'{"status":"alive"}')

    async def ready(self, scope: Scope, receive: Receive) -> Reply:
        """``GET /readyz``; a caller without a token learns only whether the server is ready."""
        reply = await self.readyz(scope, receive)
        if not scope.get(STRANGER):
            return reply
        return json_reply({"status": "ready" if reply.status == 200 else "not ready"}, reply.status)

    async def readyz(self, scope: Scope, receive: Receive) -> Reply:
        """``GET /readyz`` with all details, for operators."""
        seen, serves_cached = await self._serving.read(self._seen)
        pointers = seen.pointers
        if not seen.store_answers and not serves_cached:
            return json_reply(
                {"status": "not ready", "why": "the online store does not answer"}, 503
            )
        fallbacks = {
            p.view.name: "ready" if self._fallback_ready(p) else "not ready"
            for p in pointers
            if p.view.fallback and self._lookup.fallback
        }
        body: dict[str, Any] = {
            "status": "ready",
            "views": {p.view.name: p.snapshot for p in pointers},
            "fallback": fallbacks,
        }
        if not seen.store_answers:
            # if a load balancer took all servers out, users would not get the cached rows
            why = "the online store does not answer; single cached rows are served, as stale"
            return json_reply(body | {"status": "degraded", "why": why})
        if not pointers and not seen.unreadable:
            body |= {"status": "not ready", "why": "no view is published"}
        elif self._warming():
            body |= {"status": "not ready", "why": "models are being loaded"}
        elif (
            seen.unreadable
            or "not ready" in fallbacks.values()
            or any(map(seen.trouble, pointers))
            or any(map(seen.behind, pointers))
        ):
            # hits are served, so there is no reason to take the server out
            body["status"] = "degraded"
        words = (said(pointer) for pointer in pointers for said in (seen.trouble, seen.behind))
        reasons = [body["why"]] if "why" in body else []
        reasons += filter(None, words)
        if seen.unreadable:
            unreadable = ", ".join(sorted(seen.unreadable))
            reasons.append(
                f"what is live of {unreadable} cannot be read; the server's log says why"
            )
        if reasons:
            body["why"] = "; ".join(reasons)
        return json_reply(body, 503 if body["status"] == "not ready" else 200)

    def _seen(self) -> tuple[Seen, bool]:
        """What is live, and whether there are cached rows to serve if the store does not answer."""
        seen = self._views.read()
        return seen, not seen.store_answers and self._metrics.serves_cached(self._lookup.now_s())

    async def render_metrics(self, scope: Scope, receive: Receive) -> Reply:
        """``GET /metrics``."""
        return Reply(
            200,
            [(b"content-type", CONTENT_TYPE.encode()), NOT_STORED],
            await self._serving.read(self._metrics.render),
        )

    async def openapi_json(self, scope: Scope, receive: Receive) -> Reply:
        """``GET /openapi.json``."""
        return Reply(200, [JSON_TYPE], self._openapi)

    async def page(self, scope: Scope, receive: Receive) -> Reply:
        """``GET /``."""
        status, page = await self._renderers.run(self._page.render, scope["query_string"])
        return Reply(status, _PAGE_HEADERS, page.encode())

    def _known_views(self) -> tuple[list[ViewFigures], bool]:
        seen = self._views.read()
        details = [
            ViewFigures(
                self._lookup.describe(pointer)
                | {"model_ready": self._fallback_ready(pointer), "takes_text": takes_text(pointer)},
                readable=pointer.view.name not in seen.unreadable,
                trouble="; ".join(filter(None, (seen.trouble(pointer), seen.behind(pointer))))
                or None,
            )
            for pointer in seen.pointers
        ]
        return details, seen.store_answers


Handler = Callable[[Scope, Receive], Awaitable[Reply]]
"""A route with a fixed path: ``/livez``."""
ViewHandler = Callable[[Scope, Receive, str, bytes], Awaitable[Reply]]
"""A route below a view or a service: gets its name and, for a row, the undecoded key."""
Access = Callable[[Scope], Reply | None]
"""Called first for every request: returns the refusal, or None to let it pass."""

_VIEWS, _SERVICES = b"/v1/views/", b"/v1/services/"
_ROWS = b"rows/"


class Front:
    """Routes requests without a framework, which took 35 of the 140 µs of a single row.

    Args:
        serving: what all routes share.
        rows, services, api: the routes. Those named ``…_at_once`` answer if there is nothing to
            wait for, else return None.
        access: checks every request; by default all pass.
    """

    def __init__(
        self,
        serving: Serving,
        rows: RowRoutes,
        services: ServiceRoutes,
        api: Api,
        access: Access = lambda scope: None,
    ) -> None:
        self._serving, self._access = serving, access
        self._rows, self._services, self._api = rows, services, api
        self._view_posts: dict[bytes, ViewHandler] = {b"lookup": rows.lookup, b"search": api.search}
        self._fixed: dict[bytes, Mapping[str, Handler]] = {
            b"/v1/lookup": {"POST": rows.multi_lookup},
            b"/v1/services": {"GET": services.services},
            b"/v1/views": {"GET": api.views},
            b"/livez": {"GET": api.livez},
            b"/readyz": {"GET": api.ready},
            b"/metrics": {"GET": api.render_metrics},
            b"/openapi.json": {"GET": api.openapi_json},
            b"/": {"GET": api.page},
        }

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
        # By the undecoded path: an encoded slash in a view's name or a key is no separator.
        path: bytes = scope["raw_path"]
        method: str = scope["method"]
        if path.startswith(_VIEWS):
            view, _, rest = path[len(_VIEWS) :].partition(b"/")
            if rest.startswith(_ROWS):
                if method in _READING:
                    return self._rows.row(scope, receive, _name(view), rest[len(_ROWS) :])
                return self._not_allowed(method, ("GET",))
            if rest in self._view_posts:
                return self._posted(scope, receive, self._view_posts[rest], view)
        name = path[len(_SERVICES) :]
        if path.startswith(_SERVICES) and b"/" not in name:
            return self._posted(scope, receive, self._services.service, name)
        methods = self._fixed.get(path)
        if methods is None:
            raise RequestError(
                "there is no such route: see /openapi.json", status=404, code="no_such_route"
            )
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            return self._not_allowed(method, tuple(methods))
        return handler(scope, receive)

    def _posted(
        self, scope: Scope, receive: Receive, handler: ViewHandler, name: bytes
    ) -> Awaitable[Reply]:
        if scope["method"] != "POST":
            return self._not_allowed(scope["method"], ("POST",))
        return handler(scope, receive, _name(name), b"")

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
    :class:`RowRoutes` (``cache_bytes``, ``caching``) and :class:`Front` (``access``)."""
    serving = Serving(lookup, meter, fallback_ready, answer_bytes, timing, waiting)
    return Front(
        serving,
        RowRoutes(serving, cache_bytes, caching),
        ServiceRoutes(serving),
        Api(serving, warming, credentials),
        access,
    )
