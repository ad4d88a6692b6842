"""Api: the routes of searches, views, health and metrics, and the document of the API."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from precompute.store.answers.fallback import Waiting
from precompute.store.errors import OnlineStoreError, RequestError
from precompute.store.http.encoding.answer_bodies import Measure, search_json
from precompute.store.http.messages import (
    JSON_TYPE,
    NOT_STORED,
    STRANGER,
    Receive,
    Reply,
    Scope,
    headers_of,
    json_reply,
    no_query,
    read_body,
    timed,
    while_connected,
)
from precompute.store.http.metrics import CONTENT_TYPE, Seen
from precompute.store.http.pools import Serving
from precompute.store.http.rows import NOT_LOADED
from precompute.store.times import Reason
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import BASE64, SearchOptions


class Api:
    """The routes of searches, views, health and metrics.

    Args:
        serving: what all routes share.
        warming: true while models are still being loaded: not ready yet.
        document: the OpenAPI document, as JSON.
    """

    def __init__(self, serving: Serving, warming: Callable[[], bool], document: bytes) -> None:
        self._serving, self._warming = serving, warming
        self._lookup, self._metrics = serving.lookup, serving.metrics
        self._fallback_ready, self._views = serving.fallback_ready, serving.views
        self._searching: set[Waiting] = set()
        self._document = document

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
        elif seen.other_format:
            names = ", ".join(sorted(seen.other_format))
            why = f"what is live of {names} is of a format that this version does not read"
            body |= {"status": "not ready", "why": f"{why}; the server's log says which"}
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
        if unread := seen.unreadable - seen.other_format:
            unreadable = ", ".join(sorted(unread))
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
        return Reply(200, [JSON_TYPE], self._document)
