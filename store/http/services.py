"""Services: the routes that answer with the features of a service, several views joined to one row
for each entity."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from precompute.store.answers.answer import Answer
from precompute.store.answers.plan import AnswerPlan
from precompute.store.answers.service import EntityRows, Refused, ServiceAnswer, ServicePart
from precompute.store.errors import PrecomputeError, RequestError
from precompute.store.http.encoding.answer_bodies import Measure, service_pieces
from precompute.store.http.encoding.caching import VARY, cache_control
from precompute.store.http.messages import (
    ARROW_TYPE,
    JSON_TYPE,
    Receive,
    Reply,
    Scope,
    body_kind,
    both,
    headers_of,
    json_reply,
    no_query,
    query_options,
    read_body,
    timed,
    wants_arrow,
)
from precompute.store.http.pools import Serving, give_up
from precompute.store.http.rows import BEGUN, BODIES, PIECE_BYTES
from precompute.store.online.found_rows import FoundRows
from precompute.store.wire import arrow, bodies
from precompute.store.wire.lookup_options import CacheControl

_KEYS_AT_ONCE = 2000
"""Rows of all views that are read in one piece; others have their turn between the views of
more."""
_READ_TOGETHER = 4
"""Views of one request that are waited for at once, where the store lies behind a network: one
request has a tenth of the threads at most."""


@dataclass(slots=True)
class _Begun:
    """A request on its way: when it came (:func:`time.perf_counter`), what it demands of stored
    rows, how large its answer will be, and what is there of that."""

    started: float
    control: CacheControl | None
    size: Measure
    answer: ServiceAnswer
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def admit(self, plan: AnswerPlan, found: FoundRows) -> None:
        """Raises :class:`RequestError` where the answer would be too large; called by several
        threads."""
        with self._lock:
            self.size.add(plan, found)

    @property
    def answers(self) -> list[Answer | None]:
        return [part if isinstance(part, Answer) else None for part in self.answer.parts]


@contextlib.contextmanager
def _given_up_if_refused(begun: _Begun) -> Iterator[None]:
    """Give up what is in flight for a request where one of its views makes the answer too large."""
    try:
        yield
    except BaseException:
        for one in begun.answers:
            if one is not None:
                give_up(one)
        raise


class ServiceRoutes:
    """The routes that answer with services; ``serving`` is what all routes share."""

    def __init__(self, serving: Serving) -> None:
        self._serving, self._lookup, self._readers = serving, serving.lookup, serving.readers

    async def services(self, scope: Scope, receive: Receive) -> Reply:
        """``GET /v1/services``."""
        no_query(scope)
        return json_reply(
            {"services": [service.describe() for service in self._lookup.services.values()]}
        )

    def at_once(self, scope: Scope, name: str, body: bytes) -> Reply | None:
        """``POST /v1/services/{service}``, where nothing must be waited for; else None, and what
        was begun is in the scope for :meth:`service`.

        Raises:
            RequestError: the request is refused.
            OnlineStoreError: the store cannot be read for any view.
        """
        if self._readers is not None:
            return None
        begun = self._begun(scope, name, body_kind(headers_of(scope), BODIES), body)
        answer = begun.answer
        if answer.entities.count * len(answer.service.parts) <= _KEYS_AT_ONCE:
            with _given_up_if_refused(begun):
                for part in answer.service.parts:
                    answer.parts.append(self._part(begun, part))
            if not begun.size.is_large and not any(
                one is not None and one.pending for one in begun.answers
            ):
                return self._reply(scope, begun)
        scope[BEGUN] = begun
        return None

    async def service(self, scope: Scope, receive: Receive, name: str, _: bytes) -> Reply:
        """``POST /v1/services/{service}``, where :meth:`at_once` has no answer: each view answers
        for itself, or its rows say why it does not."""
        begun: _Begun | None = scope.get(BEGUN)
        if begun is None:
            begun = self._begun(scope, name, *await read_body(receive, headers_of(scope), BODIES))
        await self._read(begun)

        def failed(number: int, error: PrecomputeError) -> None:
            begun.answer.parts[number] = self._refused(error)

        await self._serving.waits.all_landed(begun.answers, receive, failed)
        begun.answer.judge_again()
        return self._reply(scope, begun)

    def _begun(self, scope: Scope, name: str, kind: str, body: bytes) -> _Begun:
        started, headers, options = time.perf_counter(), headers_of(scope), query_options(scope)
        service = self._lookup.service_of(name)
        if options.features is not None:
            raise RequestError(
                f"the features of service {service.name!r} are those of its definition: leave"
                " `features` out"
            )
        if kind == bodies.ARROW:
            entities: dict[str, Any] = dict(arrow.decode_arrow_keys(body, service.entity))
        else:
            wanted: bodies.ServiceRequest = bodies.decode(bodies.decode_service, body)
            # before the URL's take its place: of both the strictest holds
            wanted.options().check()
            entities, options = wanted.entities, both(wanted.options(), options)
        answer = ServiceAnswer(service, EntityRows(service, entities), options)
        size = Measure(self._serving.answer_bytes, wants_arrow(headers))
        return _Begun(started, cache_control(headers.get(b"cache-control")), size, answer)

    async def _read(self, begun: _Begun) -> None:
        """Begin the views that were not begun yet: all before any is waited for, so that they have
        the one deadline side by side."""
        answer, readers = begun.answer, self._readers
        left = answer.service.parts[len(answer.parts) :]
        with _given_up_if_refused(begun):
            for at in range(0, len(left), 1 if readers is None else _READ_TOGETHER):
                if readers is None:
                    answer.parts.append(self._part(begun, left[at]))
                    await asyncio.sleep(0)
                else:
                    together = [
                        readers.run(self._part, begun, part)
                        for part in left[at : at + _READ_TOGETHER]
                    ]
                    done = await asyncio.gather(*together, return_exceptions=True)
                    # all of them first, so that those that were begun are given up with the one
                    # that raised
                    answer.parts += [one for one in done if isinstance(one, (Answer, Refused))]
                    for one in done:
                        if isinstance(one, BaseException):
                            raise one

    def _part(self, begun: _Begun, part: ServicePart) -> Answer | Refused:
        try:
            return begun.answer.begin(self._lookup, part, begun.control, begun.admit)
        except PrecomputeError as exc:
            return self._refused(exc)

    def _refused(self, exc: PrecomputeError) -> Refused:
        """The part of a view that cannot be answered; its message names no host and no file."""
        refused = Refused.by(exc)
        reply = self._serving.refused(exc, "POST /v1/services")
        assert isinstance(reply.body, bytes)
        return replace(refused, problem=json.loads(reply.body))

    def _reply(self, scope: Scope, begun: _Begun) -> Reply:
        answer, size, started = begun.answer, begun.size, begun.started
        answer.check()
        kind_of, rows = [ARROW_TYPE if size.as_arrow else JSON_TYPE, VARY], answer.entities.count
        if size.is_large:
            rows = max(1, rows * PIECE_BYTES // size.total)
        pieces = (
            arrow.arrow_pieces(answer.table(), 8 * rows)
            if size.as_arrow
            else service_pieces(answer, rows)
        )
        reply = self._serving.reply(kind_of, pieces, size)
        seconds, stages = time.perf_counter() - started, Counter[str]()
        for one in begun.answers:
            if one is not None:
                # one after the other, so that what they took adds up
                stages.update(self._serving.metrics.answered(None, one, seconds, encoded=False))
        self._serving.metrics.timed("service", seconds)
        return timed(scope, reply, stages, seconds, self._serving.timing)
