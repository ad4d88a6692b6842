"""Rows: the routes that answer with rows: one by its URL, many of a view, many of several views."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from store.answer import Answer
from store.api import arrow, wire
from store.api.metrics import Metrics
from store.api.pools import Pool
from store.api.reply import ARROW_TYPE, JSON_TYPE, Reply, problem
from store.api.request import Receive, Scope, headers_of, query_options, read_body, wants_arrow
from store.encoding.http_freshness import VARY, Headers, freshness_headers, matches
from store.encoding.json_rows import lookup_json, row_json
from store.errors import RequestError
from store.key_text import key_from_path
from store.lookup import Lookup
from store.lookup_options import LookupOptions
from store.status import Reason

_MISSING_STATUS = {Reason.DAMAGED: 500, Reason.DEADLINE: 504, Reason.SHED: 503, Reason.MODEL_ERROR: 502}


class RowRoutes:
    """Routes over one lookup.

    Args:
        lookup: answers.
        metrics: counts.
        readers: threads for a store that is waited for; None where reading takes no longer than to hand it over.
    """

    def __init__(self, lookup: Lookup, metrics: Metrics, readers: Pool | None) -> None:
        self._lookup, self._metrics, self._readers = lookup, metrics, readers

    async def row(self, scope: Scope, receive: Receive, view: str, raw_key: bytes) -> Reply:
        """``GET /v1/views/{view}/rows/{key}``."""
        started = time.perf_counter()
        headers, options = headers_of(scope), query_options(scope)
        entity = await self._entity(view) if b"/" in raw_key else ("key",)
        answer = await self._begin(view, [key_from_path(raw_key, entity)], options)
        if answer.pending:
            await _landed(answer)
        reply = self._row_reply(answer, headers)
        self._metrics.answered("row", answer, time.perf_counter() - started)
        return reply

    async def _entity(self, view: str) -> Sequence[str]:
        live = self._lookup.online.live
        pointer = live(view) if self._readers is None else await self._readers.run(live, view)
        return ("key",) if pointer is None else pointer.view.entity

    def _row_reply(self, answer: Answer, asked: dict[bytes, bytes]) -> Reply:
        headers = freshness_headers(answer)
        reason = answer.reason(0)
        if reason is not None:
            return self._missing(answer, reason, headers)
        etags = asked.get(b"if-none-match")
        if etags is not None and matches(etags, dict(headers)[b"etag"]):
            return Reply(304, headers)
        if wants_arrow(asked):
            return Reply(200, [ARROW_TYPE, *headers], arrow.encode_arrow(answer.table()))
        body = b'{"view":"%b",%b' % (answer.pointer.view.name.encode(), row_json(answer, 0))
        return Reply(200, [JSON_TYPE, *headers], body)

    def _missing(self, answer: Answer, reason: Reason, headers: Headers) -> Reply:
        pointer = answer.pointer
        detail = f"no row for key {answer.keys[0][:80]!r} in view {pointer.view.name!r}: {reason}"
        self._metrics.refused(reason)
        status = _MISSING_STATUS.get(reason, 404)
        return problem(status, str(reason), detail, headers, snapshot=pointer.snapshot, model=pointer.model)

    async def lookup(self, scope: Scope, receive: Receive, view: str, _: bytes) -> Reply:
        """``POST /v1/views/{view}/lookup``."""
        started = time.perf_counter()
        headers = headers_of(scope)
        kind, body = await read_body(receive, headers, (wire.JSON, wire.ARROW))
        if kind == wire.ARROW:
            keys: list[Any] = arrow.decode_arrow_keys(body)
            options = query_options(scope)
        else:
            wanted: wire.LookupRequest = wire.decode(wire.decode_lookup, body)
            keys, options = wanted.keys, wanted.options()
        columnar = wants_arrow(headers)
        answer = await self._begin(view, keys, options, columnar=columnar)
        if answer.pending:
            await _landed(answer)
        if columnar:
            reply = Reply(200, [ARROW_TYPE, VARY], arrow.encode_arrow(answer.table()))
        else:
            reply = Reply(200, [JSON_TYPE, VARY], lookup_json(answer))
        self._metrics.answered("lookup", answer, time.perf_counter() - started)
        return reply

    async def multi_lookup(self, scope: Scope, receive: Receive) -> Reply:
        """``POST /v1/lookup``."""
        started = time.perf_counter()
        _, body = await read_body(receive, headers_of(scope), (wire.JSON,))
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
        parts = b",".join([lookup_json(answer) for answer in answers])
        for answer in answers:
            self._metrics.answered("multi_lookup", answer, time.perf_counter() - started)
        return Reply(200, [JSON_TYPE], b'{"responses":[%b]}' % parts)

    async def _begin(self, view: str, keys: Sequence[Any], options: LookupOptions, *, columnar: bool = False) -> Answer:
        if self._readers is not None:
            return await self._readers.run(partial(self._lookup.begin, view, keys, options, columnar=columnar))
        return self._lookup.begin(view, keys, options, columnar=columnar)


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
