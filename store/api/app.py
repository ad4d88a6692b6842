"""HTTP API: the lookup's verbs as routes: one row by URL, many by POST, searches, health, metrics, a page for people.

JSON by default, an Arrow IPC stream by ``Accept``; refusals are RFC 9457 problem+json; a row's freshness is in its fields and, for a
single row, in the headers HTTP has for it (RFC 9111 Age and Cache-Control, RFC 5861, RFC 9211 Cache-Status).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from email.utils import formatdate
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from store.api import arrow, wire
from store.api.metrics import CONTENT_TYPE, Metrics
from store.api.openapi import openapi_document
from store.api.page import status_page
from store.errors import OnlineStoreError, PrecomputeError, RequestError, VectorIndexError
from store.key_text import key_from_path
from store.lookup import Answer, Lookup
from store.lookup_options import LookupOptions
from store.online.codec import CHECKSUM_BYTES
from store.online.online_store import Pointer
from store.status import Reason, Status

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

_MISSING_STATUS = {Reason.DAMAGED: 500, Reason.DEADLINE: 504, Reason.SHED: 503, Reason.MODEL_ERROR: 502}


class Api:
    """The routes over one lookup.

    Args:
        lookup: answers everything.
        warming: true while models are still being loaded: not ready yet.
        fallback_ready: whether a view's model stands behind its misses now.
    """

    def __init__(
        self,
        lookup: Lookup,
        warming: Callable[[], bool] = lambda: False,
        fallback_ready: Callable[[Pointer], bool] = lambda _: False,
    ) -> None:
        self._lookup, self._warming, self._fallback_ready = lookup, warming, fallback_ready
        self._metrics = Metrics(lookup)
        self._threaded = lookup.online.blocking
        self._openapi = wire.encode(openapi_document())

    def routes(self) -> list[Route]:
        """All routes, the hottest first."""
        get, post = ["GET"], ["POST"]
        return [
            Route("/v1/views/{view}/rows/{key:path}", self.row, methods=get),
            Route("/v1/views/{view}/lookup", self.lookup, methods=post),
            Route("/v1/lookup", self._multi_lookup, methods=post),
            Route("/v1/views/{view}/search", self._search, methods=post),
            Route("/v1/views", self._views, methods=get),
            Route("/livez", self._livez, methods=get),
            Route("/readyz", self._readyz, methods=get),
            Route("/metrics", self._render_metrics, methods=get),
            Route("/openapi.json", self._openapi_json, methods=get),
            Route("/", self._page, methods=get),
        ]

    # ---- rows

    async def row(self, request: Request) -> Response:
        """``GET /v1/views/{view}/rows/{key}``."""
        started = time.perf_counter()
        view, raw = _row_path(request.scope)
        entity = await self._entity(view) if b"/" in raw else ("key",)
        answer = await self._answer(view, [key_from_path(raw, entity)], _options(request))
        response = self._row_response(request, answer)
        self._metrics.answered("row", answer, time.perf_counter() - started)
        return response

    async def _entity(self, view: str) -> Sequence[str]:
        pointer = await self._call(self._lookup.online.live, view)
        return ("key",) if pointer is None else pointer.view.entity

    def _row_response(self, request: Request, answer: Answer) -> Response:
        headers = _freshness_headers(answer)
        reason = answer.reason(0)
        if reason is not None:
            status = _MISSING_STATUS.get(reason, 404)
            detail = f"no row for key {answer.keys[0][:80]!r} in view {answer.pointer.view.name!r}: {reason}"
            self._metrics.refused(reason)
            return _problem(status, str(reason), detail, headers, snapshot=answer.pointer.snapshot, model=answer.pointer.model)
        etags = request.headers.get("if-none-match")
        if etags is not None and _matches(etags, headers["ETag"]):
            return Response(status_code=304, headers=headers)
        if _wants_arrow(request):
            return Response(arrow.encode_arrow(answer.table()), headers=headers, media_type=wire.ARROW)
        row = answer.rows()[0]
        return Response(wire.encode({"view": answer.pointer.view.name, **row}), headers=headers, media_type=wire.JSON)

    async def lookup(self, request: Request) -> Response:
        """``POST /v1/views/{view}/lookup``."""
        started = time.perf_counter()
        view = request.path_params["view"]
        kind, body = await _read_body(request, (wire.JSON, wire.ARROW))
        if kind == wire.ARROW:
            keys: list[Any] = arrow.decode_arrow_keys(body)
            options = _options(request)
        else:
            wanted: wire.LookupRequest = wire.decode(wire.decode_lookup, body)
            keys, options = wanted.keys, wanted.options()
        answer = await self._answer(view, keys, options)
        if _wants_arrow(request):
            response = Response(arrow.encode_arrow(answer.table()), headers=_VARY, media_type=wire.ARROW)
        else:
            response = Response(wire.encode(_lookup_body(answer)), headers=_VARY, media_type=wire.JSON)
        self._metrics.answered("lookup", answer, time.perf_counter() - started)
        return response

    async def _multi_lookup(self, request: Request) -> Response:
        started = time.perf_counter()
        _, body = await _read_body(request, (wire.JSON,))
        wanted: wire.MultiLookupRequest = wire.decode(wire.decode_multi, body)
        if not 0 < len(wanted.requests) <= wire.MAX_REQUESTS:
            raise RequestError(
                f"1 to {wire.MAX_REQUESTS} requests in one call, got {len(wanted.requests)}",
                status=413 if wanted.requests else 400,
            )
        # All are begun before any is waited for, so that the deadlines run side by side.
        answers = [await self._begin(one.view, one.keys, one.options()) for one in wanted.requests]
        for answer in answers:
            await _landed(answer)
        response = Response(wire.encode({"responses": [_lookup_body(answer) for answer in answers]}), media_type=wire.JSON)
        for answer in answers:
            self._metrics.answered("multi_lookup", answer, time.perf_counter() - started)
        return response

    async def _answer(self, view: str, keys: Sequence[Any], options: LookupOptions) -> Answer:
        answer = await self._begin(view, keys, options)
        await _landed(answer)
        return answer

    async def _begin(self, view: str, keys: Sequence[Any], options: LookupOptions) -> Answer:
        if self._threaded:
            return await run_in_threadpool(self._lookup.begin, view, keys, options)
        return self._lookup.begin(view, keys, options)

    # ---- search, views

    async def _search(self, request: Request) -> Response:
        started = time.perf_counter()
        _, body = await _read_body(request, (wire.JSON,))
        wanted: wire.SearchRequest = wire.decode(wire.decode_search, body)
        neighbours = await run_in_threadpool(self._lookup.search, request.path_params["view"], **wanted.options()._asdict())
        self._metrics.timed("search", time.perf_counter() - started)
        return Response(wire.encode(neighbours), media_type=wire.JSON)

    async def _views(self, request: Request) -> Response:
        return Response(wire.encode({"views": await self._call(self._lookup.views)}), media_type=wire.JSON)

    # ---- for operators

    async def _livez(self, request: Request) -> Response:
        return Response(b'{"status":"alive"}', media_type=wire.JSON)

    async def _readyz(self, request: Request) -> Response:
        try:
            pointers = [
                p
                for name in await self._call(self._lookup.online.views)
                if (p := await self._call(self._lookup.online.live, name))
            ]
        except PrecomputeError as exc:
            return Response(wire.encode({"status": "not ready", "why": str(exc)}), 503, media_type=wire.JSON)
        fallbacks = {
            p.view.name: "ready" if self._fallback_ready(p) else "not ready"
            for p in pointers
            if p.view.fallback and self._lookup.fallback
        }
        body: dict[str, Any] = {"status": "ready", "views": {p.view.name: p.snapshot for p in pointers}, "fallback": fallbacks}
        if not pointers:
            body |= {"status": "not ready", "why": "no view is published"}
        elif self._warming():
            body |= {"status": "not ready", "why": "models are being loaded"}
        elif "not ready" in fallbacks.values() or any(p.degraded for p in pointers):
            # hits are served all the same, so this is no reason to take the server out
            body["status"] = "degraded"
        if lost := [p.view.name for p in pointers if p.degraded]:
            body["why"] = f"the online store lost rows of {', '.join(lost)}; they are being loaded again"
        return Response(wire.encode(body), 503 if body["status"] == "not ready" else 200, media_type=wire.JSON)

    async def _render_metrics(self, request: Request) -> Response:
        return Response(await self._call(self._metrics.render), media_type=CONTENT_TYPE)

    async def _openapi_json(self, request: Request) -> Response:
        return Response(self._openapi, media_type=wire.JSON)

    async def _page(self, request: Request) -> Response:
        return Response(status_page(await self._call(self._lookup.views)), media_type="text/html; charset=utf-8")

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await run_in_threadpool(function, *args) if self._threaded else function(*args)

    # ---- refusals

    async def refuse(self, request: Request, exc: Exception) -> Response:
        """Any exception → problem+json; only what nobody foresaw is logged with a traceback."""
        headers = {}
        if isinstance(exc, RequestError):
            status, code, detail = exc.status, str(exc.code), str(exc)
        elif isinstance(exc, HTTPException):
            status, code, detail = (
                exc.status_code,
                {404: "no_such_route", 405: "method_not_allowed"}.get(exc.status_code, "http_error"),
                str(exc.detail),
            )
            headers = dict(exc.headers or {})
        elif isinstance(exc, (OnlineStoreError, VectorIndexError)):
            log.error("%s %s: %s", request.method, request.url.path, exc)
            status, code, detail, headers = 503, "store_unavailable", str(exc), {"Retry-After": "1"}
        elif isinstance(exc, ClientDisconnect):
            return Response(status_code=400)
        else:
            log.error("%s %s failed", request.method, request.url.path, exc_info=exc)
            status, code, detail = 500, "internal_error", "an error nobody foresaw; it is in the server's log"
        self._metrics.refused(code)
        return _problem(status, code, detail, headers)


_VIEWS = b"/v1/views/"
_VARY = {"Vary": "Accept"}


class _Front:
    """The two hot routes without Starlette's middleware and router: 35 of 140 µs of a single-row request. Everything else, their other
    methods included, goes through Starlette, where the same handlers are routed."""

    def __init__(self, api: Api) -> None:
        self._api = api
        refuse: Any = api.refuse
        kinds = (RequestError, OnlineStoreError, VectorIndexError, HTTPException, ClientDisconnect, Exception)
        self.starlette = Starlette(routes=api.routes(), exception_handlers=dict.fromkeys(kinds, refuse))
        # a missing key is a 404, not a hint to ask for the empty one
        self.starlette.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # By the undecoded path: an encoded slash in a view's name or a key is no separator.
        if scope["type"] == "http" and scope["raw_path"].startswith(_VIEWS):
            view, _, rest = scope["raw_path"][len(_VIEWS) :].partition(b"/")
            handler = None
            if scope["method"] == "GET" and rest.startswith(b"rows/"):
                handler = self._api.row
            elif scope["method"] == "POST" and rest == b"lookup":
                handler = self._api.lookup
            if handler is not None:
                scope["path_params"] = {"view": unquote_to_bytes(view).decode(errors="replace")}
                request = Request(scope, receive)
                try:
                    response = await handler(request)
                except Exception as exc:
                    response = await self._api.refuse(request, exc)
                await response(scope, receive, send)
                return
        await self.starlette(scope, receive, send)


def create_app(
    lookup: Lookup,
    warming: Callable[[], bool] = lambda: False,
    fallback_ready: Callable[[Pointer], bool] = lambda _: False,
) -> ASGIApp:
    """The ASGI application; see :class:`Api` for the arguments."""
    return _Front(Api(lookup, warming, fallback_ready))


# ---- helpers


async def _landed(answer: Answer) -> None:
    """Wait for an answer's rows in flight, at most until its deadline, without blocking the loop or cancelling a shared flight."""
    if not answer.pending:
        return
    loop = asyncio.get_running_loop()
    all_done = asyncio.Event()
    left = len(answer.pending)

    def one_done() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            all_done.set()

    def landed(_: Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(one_done)

    for future in answer.pending.values():
        future.add_done_callback(landed)
    # settle() marks what has not landed with the reason `deadline`
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(all_done.wait(), max(0.0, answer.deadline - time.monotonic()))
    answer.settle()


def _lookup_body(answer: Answer) -> dict[str, Any]:
    pointer = answer.pointer
    return {"view": pointer.view.name, "snapshot": pointer.snapshot, "model": pointer.model, "rows": answer.rows()}


def _freshness_headers(answer: Answer) -> dict[str, str]:
    view, pointer, value = answer.pointer.view, answer.pointer, answer.packed_row(0)
    version = f'detail="v{pointer.snapshot}"'
    if value is None:
        return {"Cache-Control": "no-store", "Cache-Status": f"precompute; fwd=uri-miss; {version}", **_VARY}
    age = answer.age_s(0)
    status = answer.status(0)
    how = "fwd=uri-miss; fwd-status=200" if status is Status.COMPUTED else f"hit; ttl={view.ttl_s - age:.0f}"
    return {
        "Age": f"{age:.0f}",
        "Cache-Control": f"max-age={view.ttl_s:.0f}, stale-while-revalidate={view.stale_for_s:.0f}",
        "Cache-Status": f"precompute; {how}; {version}",
        "ETag": f'"{pointer.snapshot}-{bytes(value[:CHECKSUM_BYTES]).hex()}"',
        **_VARY,
        "Last-Modified": _http_date(min(answer.computed_at_us(0), answer.now_us) // 1_000_000),
    }


@lru_cache(4096)
def _http_date(seconds: int) -> str:
    """RFC 9110 date; a snapshot's rows share few seconds, so this is computed once for many."""
    return formatdate(seconds, usegmt=True)


def _problem(status: int, code: str, detail: str, headers: dict[str, str] | None = None, **more: Any) -> Response:
    problem = wire.Problem(f"urn:precompute:problem:{code}", code.replace("_", " "), status, detail, **more)
    return Response(wire.encode(problem), status, headers=headers, media_type=wire.PROBLEM)


def _wants_arrow(request: Request) -> bool:
    return wire.ARROW in request.headers.get("accept", "")


def _matches(etags: str, etag: str) -> bool:
    """Whether an If-None-Match header names the ETag, by weak comparison (RFC 9110 §13.1.2)."""
    return etags.strip() == "*" or etag in [tag.strip().removeprefix("W/") for tag in etags.split(",")]


def _row_path(scope: Scope) -> tuple[str, bytes]:
    """(view, undecoded key) of a row's URL.

    Raises:
        HTTPException: 404, when an encoded slash made it look like one.
    """
    view, _, rest = scope["raw_path"].removeprefix(_VIEWS).partition(b"/")
    if not rest.startswith(b"rows/"):
        raise HTTPException(404)
    return unquote_to_bytes(view).decode(errors="replace"), rest.removeprefix(b"rows/")


def _options(request: Request) -> LookupOptions:
    """Lookup options from the query string.

    Raises:
        RequestError: a value of the wrong kind.
    """
    if not request.scope["query_string"]:
        return LookupOptions()
    query = request.query_params
    fallback = query.get("fallback", "true")
    if fallback not in ("true", "false"):
        raise RequestError(f"fallback is true or false, got {fallback[:80]!r}")
    features = query.get("features")
    return LookupOptions(
        features=None if features is None else [name for name in features.split(",") if name],
        fallback=fallback == "true",
        deadline_ms=_number(query, "deadline_ms"),
        max_age_s=_number(query, "max_age_s"),
    )


def _number(query: QueryParams, name: str) -> float | None:
    if name not in query:
        return None
    try:
        return float(query[name])
    except ValueError as exc:
        raise RequestError(f"{name} is a number, got {query[name][:80]!r}") from exc


async def _read_body(request: Request, kinds: tuple[str, ...]) -> tuple[str, bytes]:
    """(media type, body), refused before it is buffered when it is of another type or too large."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        raise RequestError(
            f"send Content-Type {' or '.join(kinds)}, got {kind[:80] or 'none'!r}", status=415, code="unsupported_media_type"
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise RequestError(
            f"compressed bodies are refused (Content-Encoding: {encoding[:40]})", status=415, code="unsupported_encoding"
        )
    length = request.headers.get("content-length", "0")
    too_large = RequestError(f"a body has at most {wire.MAX_BODY_BYTES} bytes", status=413, code="body_too_large")
    if length.isdigit() and int(length) > wire.MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > wire.MAX_BODY_BYTES:
            raise too_large
    return kind, bytes(body)
