"""HTTP API: the ASGI application: routes for searches, views, health, metrics and the page, and the
tables of all routes.

JSON by default, an Arrow IPC stream by ``Accept``; refusals are RFC 9457 problem+json; a row's
freshness is in its fields and, for a single row, in the headers HTTP has for it (RFC 9111 Age and
Cache-Control, RFC 5861, RFC 9211 Cache-Status).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from precompute.store.answers.fallback import Waiting
from precompute.store.answers.lookup import Lookup
from precompute.store.answers.search import takes_text
from precompute.store.errors import OnlineStoreError, RequestError
from precompute.store.http.encoding.answer_bodies import search_json
from precompute.store.http.encoding.answer_size import MAX_ANSWER_BYTES, Measure
from precompute.store.http.encoding.http_freshness import PRIVATE, Caching
from precompute.store.http.encoding.row_cache import MAX_CACHE_BYTES
from precompute.store.http.front import Front, Gate, open_gate
from precompute.store.http.live_views import LiveViews, Seen
from precompute.store.http.metrics import CONTENT_TYPE, Metrics
from precompute.store.http.openapi import Asks, openapi_document
from precompute.store.http.page.figures import ViewFigures
from precompute.store.http.page.page import POLICY, Page
from precompute.store.http.pools import Pool
from precompute.store.http.reply import JSON_TYPE, NOT_STORED, Reply, Timing, json_reply, timed
from precompute.store.http.request import (
    STRANGER,
    Receive,
    Scope,
    headers_of,
    no_query,
    read_body,
    while_connected,
)
from precompute.store.http.rows import MOST_WAITING, NOT_LOADED, RowRoutes
from precompute.store.http.services import ServiceRoutes
from precompute.store.http.telemetry.instruments import Meter
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import BASE64, SearchOptions

_READERS, _SEARCHERS = 40, 8
"""Threads that wait for a store over a network; and threads for searches and the model behind them.
Neither waits for the other."""
_WAITING = 256
"""Calls of each kind that wait for a thread; more would not be answered in time."""


_PAGE_HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", POLICY.encode()),
    NOT_STORED,
]


class Api:
    """The routes of searches, views, health, metrics and the page, over one lookup.

    Args:
        lookup: answers everything.
        metrics: counts requests.
        warming: true while models are still being loaded: not ready yet.
        fallback_ready: whether a view's model answers its misses now.
        readers: threads for a store over a network; None for one in this process.
        views: what is live of the lookup's views, as last seen.
        answer_bytes: of one answer at most.
        asks: what the gate and TLS require, for the OpenAPI document.
        timing: where the times of searches are reported.
    """

    def __init__(
        self,
        lookup: Lookup,
        metrics: Metrics,
        warming: Callable[[], bool],
        fallback_ready: Callable[[Pointer], bool],
        readers: Pool | None,
        views: LiveViews,
        answer_bytes: int = MAX_ANSWER_BYTES,
        asks: Asks = Asks.NOTHING,
        timing: Timing = Timing.UNREPORTED,
    ) -> None:
        self._timing = timing
        self._answer_bytes = answer_bytes
        self._lookup, self._metrics, self._readers = lookup, metrics, readers
        self._warming, self._fallback_ready = warming, fallback_ready
        self._searchers = Pool("search", _SEARCHERS, _WAITING)
        self._searching: set[Waiting] = set()
        self._renderers = Pool("page", 1, 4)
        self._views = views
        self._page = Page(lookup, metrics.meter, self._known_views)
        self._openapi = bodies.encode(openapi_document(asks))

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
                self._searchers.run(self._search, view, wanted.options(), waiting),
                receive,
                waiting.give_up,
            )
        finally:
            self._searching.discard(waiting)
        seconds = time.perf_counter() - started
        self._metrics.timed("search", seconds)
        self._metrics.stage("search", seconds)
        reply = Reply(200, [JSON_TYPE], body)
        return timed(scope, reply, {"search": seconds}, seconds, self._timing)

    def _search(self, view: str, options: SearchOptions, waiting: Waiting) -> bytes:
        try:
            searched, found = self._lookup.find(
                view, options, Measure(self._answer_bytes).add, waiting
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
        seen: Seen = await self._call(self._views.look)
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
        seen, serves_cached = await self._call(self._seen)
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
        if trouble := list(filter(None, words)):
            body["why"] = "; ".join(trouble)
        if seen.unreadable:
            body["why"] = (
                f"what is live of {', '.join(sorted(seen.unreadable))} cannot be read; the server's"
                " log says why"
            )
        return json_reply(body, 503 if body["status"] == "not ready" else 200)

    def _seen(self) -> tuple[Seen, bool]:
        """What is live, and whether there are cached rows to serve if the store does not answer."""
        seen = self._views.look()
        return seen, not seen.store_answers and self._metrics.serves_cached(self._lookup.now_s())

    async def render_metrics(self, scope: Scope, receive: Receive) -> Reply:
        """``GET /metrics``."""
        return Reply(
            200,
            [(b"content-type", CONTENT_TYPE.encode()), NOT_STORED],
            await self._call(self._metrics.render),
        )

    async def openapi_json(self, scope: Scope, receive: Receive) -> Reply:
        """``GET /openapi.json``."""
        return Reply(200, [JSON_TYPE], self._openapi)

    async def page(self, scope: Scope, receive: Receive) -> Reply:
        """``GET /``."""
        status, page = await self._renderers.run(self._page.render, scope["query_string"])
        return Reply(status, _PAGE_HEADERS, page.encode())

    def _known_views(self) -> tuple[list[ViewFigures], bool]:
        seen = self._views.look()
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

    async def _call(self, function: Callable[[], Any]) -> Any:
        return function() if self._readers is None else await self._readers.run(function)


def create_app(
    lookup: Lookup,
    warming: Callable[[], bool] = lambda: False,
    fallback_ready: Callable[[Pointer], bool] = lambda _: False,
    gate: Gate = open_gate,
    meter: Meter | None = None,
    answer_bytes: int = MAX_ANSWER_BYTES,
    cache_bytes: int = MAX_CACHE_BYTES,
    timing: Timing = Timing.UNREPORTED,
    asks: Asks = Asks.NOTHING,
    waiting: int = MOST_WAITING,
    caching: Caching = PRIVATE,
) -> Front:
    """The ASGI application. Its arguments are those of :class:`Api`, :class:`Front` (``gate``),
    :class:`Metrics` (``meter``) and :class:`RowRoutes` (the others)."""
    views = LiveViews(lookup)
    metrics = Metrics(lookup, meter, views, fallback_ready)
    readers = Pool("read", _READERS, _WAITING) if lookup.online.blocking else None
    rows = RowRoutes(
        lookup,
        metrics,
        readers,
        answer_bytes,
        cache_bytes,
        timing,
        waiting,
        caching,
        fallback_ready,
    )
    services = ServiceRoutes(lookup, metrics, readers, rows.waits, rows.room, answer_bytes, timing)
    api = Api(lookup, metrics, warming, fallback_ready, readers, views, answer_bytes, asks, timing)
    fixed = {
        b"/v1/lookup": {"POST": rows.multi_lookup},
        b"/v1/services": {"GET": services.services},
        b"/v1/views": {"GET": api.views},
        b"/livez": {"GET": api.livez},
        b"/readyz": {"GET": api.ready},
        b"/metrics": {"GET": api.render_metrics},
        b"/openapi.json": {"GET": api.openapi_json},
        b"/": {"GET": api.page},
    }
    front = Front(
        rows.row_at_once,
        rows.lookup_at_once,
        rows.row,
        {b"lookup": rows.lookup, b"search": api.search},
        services.at_once,
        services.service,
        fixed,
        metrics.refused,
        gate,
    )
    front.waits_until = lambda: max(rows.waits.until(), api.waits_until())
    return front
