"""Rows: the routes that answer with rows: one by its URL, many of a view, many of several views."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from precompute.store.answers.answer import Answer
from precompute.store.answers.lookup import WholeRow
from precompute.store.errors import OnlineStoreError, PrecomputeError, RequestError
from precompute.store.feature_view import FeatureView, status_of
from precompute.store.http.encoding.answer_bodies import (
    Measure,
    head_json,
    lookup_json,
    lookup_pieces,
    row_json,
    stream_of,
)
from precompute.store.http.encoding.caching import (
    MAX_CACHE_BYTES,
    PRIVATE,
    VARY,
    CachedRow,
    CacheKey,
    Caching,
    Headers,
    RowCache,
    cache_control,
    cached_row,
    encoded_row,
    json_form,
    matches,
    missing_headers,
    row_headers,
)
from precompute.store.http.messages import (
    ARROW_TYPE,
    JSON_TYPE,
    RETRY_SOON,
    Receive,
    Reply,
    Scope,
    Timing,
    body_kind,
    both,
    headers_of,
    log_failure,
    no_query,
    problem,
    query_options,
    read_body,
    timed,
    wants_arrow,
)
from precompute.store.http.pools import Serving
from precompute.store.keys import key_from_path
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason, Status
from precompute.store.wire import arrow, bodies
from precompute.store.wire.lookup_options import CacheControl, LookupOptions

_MISSING_STATUS = {
    Reason.DAMAGED: 500,
    Reason.DEADLINE: 504,
    Reason.SHED: 503,
    Reason.MODEL_ERROR: 502,
    Reason.BAD_KEY: 400,
}

NOT_LOADED = "since its model is not loaded yet: GET /readyz says when it is"
"""Added to messages about a model that is still loading, or cannot be loaded."""

PIECE_BYTES = 64 * 1024
"""Size of a piece of a large answer, about: half a millisecond of work, while other requests
wait."""
_PIECE_ROWS = 16

BODIES = (bodies.JSON, bodies.ARROW)
BEGUN = "precompute.begun"
"""Key of a scope: what was begun for it; of a lookup the request, the size of its answer, and the
answer."""


class _Request(NamedTuple):
    """A request for one row or, with an empty key, for many rows of a view; ``started`` is of
    :func:`time.perf_counter`."""

    started: float
    headers: dict[bytes, bytes]
    options: LookupOptions
    control: CacheControl | None
    key: CacheKey

    @classmethod
    def of(cls, scope: Scope, view: str, raw_key: bytes) -> _Request:
        """The request that a scope has.

        Raises:
            RequestError: a header or the query cannot be read.
        """
        started = time.perf_counter()
        headers, options = headers_of(scope), query_options(scope)
        features = options.features
        key = view, raw_key, None if features is None else tuple(features), options.encoding_format
        return cls(started, headers, options, cache_control(headers.get(b"cache-control")), key)


class RowRoutes:
    """The routes that answer with rows.

    Args:
        serving: what all routes share.
        cache_bytes: of the encoded cached rows.
        caching: what caches in between may do with single rows.
    """

    def __init__(
        self, serving: Serving, cache_bytes: int = MAX_CACHE_BYTES, caching: Caching = PRIVATE
    ) -> None:
        self._serving, self._caching = serving, caching
        self._lookup, self._metrics = serving.lookup, serving.metrics
        self._readers, self._waits, self._timing = serving.readers, serving.waits, serving.timing
        self._cache = RowCache(cache_bytes)
        self._serves_until: dict[str, tuple[Pointer, float]] = {}
        """View → the pointer under which its rows were cached last, and until when (s since 1970)
        the youngest of them may be served while the store fails."""

    def row_at_once(self, scope: Scope, view: str, raw_key: bytes) -> Reply | None:
        """``GET /v1/views/{view}/rows/{key}``, where the answer is a row of the store, as JSON, and
        nothing must be waited for: it is cached, and known to be live still, or lies in a mapped
        file; None otherwise.

        Raises:
            RequestError: the request is refused.
        """
        request = _Request.of(scope, view, raw_key)
        if wants_arrow(request.headers):
            return None
        try:
            row, read = self._cached(request, self._lookup.online.known(view)), None
            if row is None:
                read = self._read_at_once(request)
        except OnlineStoreError:
            return None
        if row is not None:
            judged = self._judged(row.pointer, row.computed_at_us, request)
        else:
            judged = (
                None
                if read is None
                else self._judged(read.plan.pointer, read.computed_at_us, request)
            )
        if judged is None:
            return None
        status, age_us = judged
        if row is None:
            assert read is not None
            row = encoded_row(read.plan, read.key, read.value, read.computed_at_us)
            self._cache_row(request.key, row)
        reply = self._cached_reply(row, status, age_us, request)
        seconds = time.perf_counter() - request.started
        if read is None:
            self._metrics.row_cache_read(view, status, seconds, "hit")
        else:
            self._metrics.read(view, status, seconds, read.read_s, read.verify_s)
        return timed(scope, reply, {}, seconds, self._timing)

    def _cached(self, request: _Request, live: Pointer | None) -> CachedRow | None:
        """The row that is cached, where it is what the live pointer has: it was read under it, or
        the segment that it was read in is read still, and no upper one has the key."""
        row = self._cache.get(request.key)
        if row is None or live is None or row.pointer is live:
            return row if live is not None else None
        before, view = row.pointer, live.view
        if (before.view.features, before.model) != (view.features, live.model):
            return None
        key = key_from_path(request.key[1], view.entity).encode()
        if not self._lookup.online.is_read_in(live, row.segment, key):
            return None
        row = row.under(self._lookup.plan_of(live, request.options))
        self._cache_row(request.key, row)
        return row

    def _read_at_once(self, request: _Request) -> WholeRow | None:
        if self._readers is not None or self._timing is not Timing.UNREPORTED:
            return None
        view, raw_key, _, _ = request.key
        entity: Sequence[str] = ("key",)
        if b"/" in raw_key:
            pointer = self._lookup.online.live(view)
            entity = entity if pointer is None else pointer.view.entity
        return self._lookup.whole_row(view, key_from_path(raw_key, entity), request.options)

    def _judged(
        self, pointer: Pointer, computed_at_us: int, request: _Request
    ) -> tuple[Status, int] | None:
        """Status and age (µs) of a row of the store; None where the slower way has to answer: the
        row is from the future, which is counted, or not fresh and its view has a fallback."""
        view, options, control = pointer.view, request.options, request.control
        oldest_s = options.max_age_s
        if control is not None:
            may_compute = (
                options.fallback
                and view.fallback
                and self._lookup.fallback is not None
                and not control.only_if_cached
            )
            oldest_s = control.oldest_s(view, oldest_s, may_compute)
        now_us, sighting = self._lookup.sighting(pointer)
        age_us = sighting.age_us(computed_at_us, now_us)
        status = status_of(view, age_us / 1e6, oldest_s)
        if computed_at_us > now_us or (
            status is not Status.FRESH and (status is Status.MISSING or view.fallback)
        ):
            return None
        return status, age_us

    def _cache_row(self, key: CacheKey, row: CachedRow) -> None:
        if not self._cache.most_bytes:
            return
        dropped = self._cache.put(key, row)
        self._metrics.not_cached(dropped, self._cache.size_bytes)
        if dropped is None or self._readers is None:
            # it was not cached, or the store is mapped and cannot fail to answer
            return
        view = row.pointer.view
        now_us, sighting = self._lookup.sighting(row.pointer)
        until_s = (now_us - sighting.age_us(row.computed_at_us, now_us)) / 1e6 + most_s(view)
        before, most = self._serves_until.get(view.name, (None, 0.0))
        # rows under another pointer are not served any more
        until_s = max(until_s, most) if before is row.pointer else until_s
        self._serves_until[view.name] = row.pointer, until_s
        self._metrics.serves_until(view.name, until_s)

    async def row(self, scope: Scope, receive: Receive, view: str, raw_key: bytes) -> Reply:
        """``GET /v1/views/{view}/rows/{key}``, where :meth:`row_at_once` has no answer."""
        request = _Request.of(scope, view, raw_key)
        try:
            entity = await self._entity(view) if b"/" in raw_key else ("key",)
            keys = [key_from_path(raw_key, entity)]
            answer = await self._serving.read(
                self._lookup_of(view, keys, request.options, request.control)
            )
        except (OnlineStoreError, RequestError) as exc:
            in_error = self._in_error(exc, request)
            if in_error is None:
                raise
            return in_error
        if answer.pending:
            await self._waits.landed(answer, receive)
        missing = answer.row(0).reason is not None
        reply = (
            self._missing(answer, request.options, request.control, request.headers)
            if missing
            else self._row_reply(answer, request)
        )
        return self._reported("row", scope, answer, request.started, reply)

    def _in_error(self, error: PrecomputeError, request: _Request) -> Reply | None:
        """The cached row, as stale, if the store fails (RFC 5861 §4): only of the last live
        pointer, and within the age limits of view and request."""
        if isinstance(error, RequestError) and error.status != HTTPStatus.SERVICE_UNAVAILABLE:
            # the error is the caller's
            return None
        row, control = self._cached(request, self._lookup.last(request.key[0])), request.control
        if row is None:
            return None
        pointer, view, oldest_s = row.pointer, row.pointer.view, request.options.max_age_s
        if wants_arrow(request.headers) or (control is not None and control.no_cache):
            return None
        if control is not None:
            oldest_s = control.oldest_s(view, oldest_s, False)
        now_us, sighting = self._lookup.sighting(pointer)
        age_us = sighting.age_us(row.computed_at_us, now_us)
        if age_us > (most_s(view) if oldest_s is None else min(most_s(view), oldest_s)) * 1e6:
            return None
        log_failure(f"GET /v1/views/{view.name}", str(error))
        self._metrics.row_cache_read(
            view.name, Status.STALE, time.perf_counter() - request.started, "in_error"
        )
        return self._cached_reply(row, Status.STALE, age_us, request)

    def _cached_reply(
        self, row: CachedRow, status: Status, age_us: int, request: _Request
    ) -> Reply:
        headers, etag = row.headers_now(status, age_us, self._caching)
        etags = request.headers.get(b"if-none-match")
        if etags is not None and matches(etags, etag):
            return Reply(304, headers)
        return Reply(200, [JSON_TYPE, *headers], row.body(status, age_us))

    async def _entity(self, view: str) -> Sequence[str]:
        live = self._lookup.online.live
        # the columns of the key are known from the last pointer, if the store hangs
        pointer = self._lookup.online.known(view) or self._lookup.last(view)
        if pointer is None:
            pointer = live(view) if self._readers is None else await self._readers.run(live, view)
        return ("key",) if pointer is None else pointer.view.entity

    def _row_reply(self, answer: Answer, request: _Request) -> Reply:
        as_arrow = wants_arrow(request.headers)
        row = None if as_arrow else cached_row(answer)
        if row is not None:
            if self._lookup.online.known(request.key[0]) is row.pointer:
                # not if another pointer is live by now: it would never be read
                self._cache_row(request.key, row)
            return self._cached_reply(row, answer.row(0).status, answer.age_us(0), request)
        headers = row_headers(answer, b"a" if as_arrow else json_form(answer.plan), self._caching)
        etags = request.headers.get(b"if-none-match")
        if etags is not None and matches(etags, dict(headers)[b"etag"]):
            return Reply(304, headers)
        return _one_row(answer, headers, as_arrow)

    def _missing(
        self,
        answer: Answer,
        options: LookupOptions,
        request: CacheControl | None,
        sent: dict[bytes, bytes],
    ) -> Reply:
        pointer, reason = answer.pointer, answer.row(0).reason
        assert reason is not None
        if answer.default_row(0) is not None and not (
            request is not None and request.only_if_cached
        ):
            return _one_row(answer, missing_headers(answer, reason), wants_arrow(sent))
        detail = f"no row for key {answer.keys[0][:80]!r} in view {pointer.view.name!r}: {reason}"
        if reason is Reason.BAD_KEY and (hint := answer.row(0).detail):
            detail += f", {hint}"
        elif reason is Reason.DEADLINE and not self._serving.fallback_ready(pointer):
            detail += f", {NOT_LOADED}"
        self._metrics.refused(reason)
        status = _MISSING_STATUS.get(reason, 404)
        if request is not None and request.only_if_cached:
            # RFC 9111 §5.2.1.7: 504 where nothing is stored
            status = 504
        elif reason is Reason.DEADLINE and options.deadline_ms == 0:
            # a caller who does not wait has run into no timeout
            status = 404
        headers = missing_headers(answer, reason)
        if status == 503:
            wait_s = math.ceil(answer.retry_after_s)
            headers.append((b"retry-after", b"%d" % wait_s) if wait_s else RETRY_SOON)
        return problem(
            status, str(reason), detail, headers, snapshot=pointer.snapshot, model=pointer.model
        )

    def lookup_at_once(self, scope: Scope, view: str, body: bytes) -> Reply | None:
        """``POST /v1/views/{view}/lookup``, if there is nothing to wait for; else None, and the
        lookup that was begun is in the scope for :meth:`lookup`.

        Raises:
            RequestError: the request is refused.
            OnlineStoreError: the store cannot be read.
        """
        if self._readers is not None:
            return None
        request = _Request.of(scope, view, b"")
        begin, size = self._many(request, body_kind(request.headers, BODIES), body)
        answer = begin()
        if answer.pending or size.is_large:
            scope[BEGUN] = request, size, answer
            return None
        return self._many_reply(scope, request, size, answer)

    async def lookup(self, scope: Scope, receive: Receive, view: str, _: bytes) -> Reply:
        """``POST /v1/views/{view}/lookup``, where :meth:`lookup_at_once` has no answer."""
        begun: tuple[_Request, Measure, Answer] | None = scope.get(BEGUN)
        if begun is None:
            request = _Request.of(scope, view, b"")
            begin, size = self._many(request, *await read_body(receive, request.headers, BODIES))
            begun = request, size, await self._serving.read(begin)
        if begun[2].pending:
            await self._waits.landed(begun[2], receive)
        return self._many_reply(scope, *begun)

    def _many(
        self, request: _Request, kind: str, body: bytes
    ) -> tuple[Callable[[], Answer], Measure]:
        options = request.options
        if kind == bodies.ARROW:
            keys: list[Any] = arrow.decode_arrow_keys(body)["key"]
        else:
            wanted: bodies.LookupRequest = bodies.decode(bodies.decode_lookup, body)
            keys, options = wanted.keys, both(wanted.options(), options)
        size = Measure(self._serving.answer_bytes, wants_arrow(request.headers))
        return self._lookup_of(request.key[0], keys, options, request.control, size), size

    def _many_reply(self, scope: Scope, request: _Request, size: Measure, answer: Answer) -> Reply:
        columnar = size.as_arrow
        kind_of = [ARROW_TYPE if columnar else JSON_TYPE, VARY]
        if size.is_large:
            rows = max(1, len(answer.keys) * PIECE_BYTES // size.total)
            pieces = (
                arrow.arrow_pieces(answer.table(), 8 * rows)
                if columnar
                else lookup_pieces(answer, rows)
            )
            reply = self._serving.reply(kind_of, pieces, size)
        else:
            reply = Reply(200, kind_of, _as_arrow(answer) if columnar else lookup_json(answer))
        return self._reported("lookup", scope, answer, request.started, reply)

    def _reported(
        self, route: str, scope: Scope, answer: Answer, started: float, reply: Reply
    ) -> Reply:
        """The reply, counted, with its times where these are reported."""
        seconds = time.perf_counter() - started
        stages = self._metrics.answered(route, answer, seconds)
        return timed(scope, reply, stages, seconds, self._timing)

    async def multi_lookup(self, scope: Scope, receive: Receive) -> Reply:
        """``POST /v1/lookup``: each view has its own answer or problem."""
        started = time.perf_counter()
        no_query(scope)
        headers = headers_of(scope)
        _, body = await read_body(receive, headers, (bodies.JSON,))
        wanted: bodies.MultiLookupRequest = bodies.decode(bodies.decode_multi, body)
        if not 0 < len(wanted.requests) <= bodies.MAX_REQUESTS:
            raise RequestError(
                f"1 to {bodies.MAX_REQUESTS} requests in one call, got {len(wanted.requests)}",
                status=413 if wanted.requests else 400,
            )
        request = cache_control(headers.get(b"cache-control"))
        size = Measure(self._serving.answer_bytes)
        begun: list[Answer | Reply] = []
        # all are begun before the first is waited for, so that they compute at the same time
        for one in wanted.requests:
            try:
                begin = self._lookup_of(one.view, one.keys, one.options(), request, size)
                begun.append(await self._serving.read(begin))
            except PrecomputeError as exc:
                begun.append(self._serving.refused(exc, "POST /v1/lookup"))
            await asyncio.sleep(0)
        await self._all_landed(begun, receive)
        stages: Counter[str] = Counter()
        for answer in begun:
            if isinstance(answer, Answer):
                # their reads were one after the other, so the times add up
                stages.update(
                    self._metrics.answered(
                        "multi_lookup", answer, time.perf_counter() - started, encoded=False
                    )
                )
        pieces = _several([one.view for one in wanted.requests], begun)
        reply = self._serving.reply([JSON_TYPE], pieces, size)
        return timed(scope, reply, stages, time.perf_counter() - started, self._timing)

    async def _all_landed(self, begun: list[Answer | Reply], receive: Receive) -> None:
        """Wait for all answers; one that fails becomes a reply. Then freshness is judged again for
        all, since the last may have been read long after the first."""
        if len(begun) == 1 and not (isinstance(begun[0], Answer) and begun[0].pending):
            return

        def failed(number: int, error: PrecomputeError) -> None:
            begun[number] = self._serving.refused(error, "POST /v1/lookup")

        await self._waits.all_landed(
            [one if isinstance(one, Answer) else None for one in begun], receive, failed
        )
        for answer in begun:
            if isinstance(answer, Answer):
                answer.judge_again()

    def _lookup_of(
        self,
        view: str,
        keys: Sequence[Any],
        options: LookupOptions,
        control: CacheControl | None,
        size: Measure | None = None,
    ) -> Callable[[], Answer]:
        """What begins a lookup; the rows of a lookup of many are counted in ``size``."""
        return partial(
            self._lookup.begin,
            view,
            keys,
            options,
            cache_control=control,
            columnar=True,
            admit=None if size is None else size.add,
        )


def most_s(view: FeatureView) -> float:
    """The largest age (s) of a cached row that is served while the store fails."""
    return view.ttl_s + view.stale_for_s + view.stale_if_error_s


def _one_row(answer: Answer, headers: Headers, as_arrow: bool) -> Reply:
    if as_arrow:
        return Reply(200, [ARROW_TYPE, *headers], arrow.encode_arrow(answer.table()))
    body = b"{%b%b" % (head_json(answer.plan), row_json(answer, 0))
    return Reply(200, [JSON_TYPE, *headers], body)


def _as_arrow(answer: Answer) -> list[bytes | memoryview]:
    return stream_of(answer) or [arrow.encode_arrow(answer.table())]


def _several(views: Sequence[str], answers: Sequence[Answer | Reply]) -> Iterator[bytes]:
    before = b'{"responses":['
    for view, answer in zip(views, answers, strict=True):
        yield before
        if isinstance(answer, Answer):
            yield from lookup_pieces(answer, _PIECE_ROWS)
        else:
            assert isinstance(answer.body, bytes)
            yield b'{"view":%b,"problem":%b}' % (bodies.encode(view), answer.body)
        before = b","
    yield b"]}"
