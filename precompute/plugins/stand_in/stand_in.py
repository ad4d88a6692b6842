"""Stand-in: a lookup service inside a test, with rows of the test's own, and delays and failures
that it configures. It is the server's own application over rows in memory, and its clients are the
real ones but for their connections; so what they answer and raise is what it would be, without a
process or a port."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from precompute.plugins.stand_in.memory import (
    SNAPSHOT,
    MemoryIndex,
    Model,
    RowsOfAView,
    check_view,
    features_of,
    plain_features,
)
from precompute.store.answers.fallback import Computed, Fallback, Miss, unpacked_view
from precompute.store.answers.lookup import Lookup
from precompute.store.answers.search import Searches
from precompute.store.answers.service import Service
from precompute.store.client.attempts import Failure, Outcome, address_of
from precompute.store.client.calls import Call, Reply
from precompute.store.client.client import AsyncClient, AsyncTransport, Client
from precompute.store.client.transport import ERRORS, BlockingTransport, Exchange
from precompute.store.doors import VIEW_KEYS
from precompute.store.errors import (
    ConfigError,
    DeadlineError,
    NoAnswerError,
    OnlineStoreError,
    OtherFormatError,
    OverloadedError,
    PrecomputeError,
    RequestError,
)
from precompute.store.feature_view import FeatureView, IndexSpec
from precompute.store.http.app import Front, create_app
from precompute.store.http.messages import problem
from precompute.store.keys import key_text, parts_hint
from precompute.store.online.codec import RowCodec
from precompute.store.online.memory_store import MemoryStore
from precompute.store.online.online_store import Pointer, Segment
from precompute.store.times import Reason, as_datetime, iso
from precompute.store.vectors.vector_index import VectorIndex

DAY_S = 86400.0
IN_STEAD = "fallback.model"
"""Key of a view whose misses another model computes."""


class Request(NamedTuple):
    """A request that a client sent: ``GET`` or ``POST``, its path with the query, the views it is
    for, and its JSON body, None without one."""

    method: str
    path: str
    views: list[str]
    body: Any


@dataclass(slots=True)
class _Fault:
    """``error`` in place of the answer, or the answer so much later; the next ``times``, None for
    all; of requests of ``view``, None for all."""

    error: PrecomputeError | None
    delay_s: float
    times: int | None
    view: str | None


class StandIn(Fallback):
    """What stands in for a lookup service; close it at the end, or use it as a context manager.

    ``requests`` is what its clients have sent, the oldest first.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._views: dict[str, RowsOfAView] = {}
        self._faults: list[_Fault] = []
        self._ahead_s = 0.0
        self._store, self._lock = MemoryStore(), threading.RLock()
        self._threads = ThreadPoolExecutor(8, "stand-in")
        self._lookup = _MemoryLookup(self)
        # no encoded row is cached: rows change under the same snapshot
        self._app = create_app(self._lookup, fallback_ready=lambda _: True, cache_bytes=0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stand-in", daemon=True)
        self._thread.start()

    # ---- what it answers with

    def view(
        self,
        name: str,
        rows: Mapping[Any, Mapping[str, Any]] | None = None,
        *,
        features: Mapping[str, Mapping[str, Any]] | None = None,
        entity: Sequence[str] = ("id",),
        ttl_s: float = DAY_S,
        stale_for_s: float = 7 * DAY_S,
        age_s: float = 0.0,
        index: Mapping[str, Any] | None = None,
        model: Model | None = None,
        inputs: Mapping[str, str] | None = None,
        deadline_s: float = 0.1,
        agreement: float | None = None,
        default: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish a view, in place of one of that name.

        Args:
            name: of the view.
            rows: key → features.
            features: name → ``dtype`` and ``dim`` or ``max_items``, as in a view's file; by default
                what the first row's values look like: float64, int64, bool, string, and float32
                vectors of lists of floats.
            entity: the key's columns.
            ttl_s: how long rows are fresh.
            stale_for_s: past that, how long they are stale.
            age_s: how old the rows are now.
            index: ``on`` and ``metric``, of a view that can be searched.
            model: stands behind the misses.
            inputs: of a model that takes inputs, its columns → ``string``, ``int64``, …
            deadline_s: how long a miss waits for the model, where the request does not say.
            agreement: where ``model`` is a student, another model in the view's own stead: how well
                it agrees, which its rows say.
            default: features that stand in for a missing row.

        Raises:
            ConfigError: a name, a feature or a value that no view could have; an agreement where
                nothing here has students.
        """
        held = dict(rows or {})
        if agreement is not None and not VIEW_KEYS.is_here(IN_STEAD):
            raise ConfigError(f"view {name!r}: agreement: {VIEW_KEYS.absence(IN_STEAD)}")
        powers = {} if agreement is None else {IN_STEAD: name}
        try:
            spec = None if index is None else IndexSpec(**index)
        except TypeError as exc:
            raise ConfigError(f"view {name!r}: index: it has on and metric, got {index!r}") from exc
        view = FeatureView(
            name,
            tuple(entity),
            features_of(name, held, features),
            float(ttl_s),
            float(stale_for_s),
            index=spec,
            fallback=model is not None,
            fallback_deadline_s=deadline_s,
            fallback_default=default,
            misses_by=None if agreement is None else IN_STEAD,
            powers=powers,
        )
        check_view(view)
        with self._lock:
            self._publish(RowsOfAView(view, model, agreement), dict(inputs or {}), held, age_s)

    def service(self, service: Service) -> None:
        """A feature service over its views, as ``precompute.services("project")["ranking"]`` reads
        it; a view that is not there is missing, as in a server."""
        self._lookup.services[service.name] = service

    def put(self, view: str, key: Any, features: Mapping[str, Any], *, age_s: float = 0.0) -> None:
        """Add or replace a row; features that are not named are null; a vector is so only beside
        nothing but nulls.

        Raises:
            ConfigError: there is no such view, or a value that it cannot have.
        """
        self._change(view, {key: features}, age_s)

    def remove(self, view: str, key: Any) -> None:
        """Take a row away: it is missing, as ``unknown_entity``, or the model's.

        Raises:
            ConfigError: there is no such view.
        """
        self._change(view, {key: None})

    def damage(self, view: str, key: Any) -> None:
        """Have a row be damaged: it is missing for that reason, or the model's.

        Raises:
            ConfigError: there is no such view or row.
        """
        of, text = self._named(view), key_text(key, self._named(view).view.entity)
        if text not in of.rows:
            raise ConfigError(f"view {view!r} has no row of key {text!r}")
        of.damaged.add(text)
        self._change(view, {})

    def advance(self, seconds: float) -> None:
        """Let time pass: every row is that much older."""
        self._ahead_s += seconds

    # ---- what goes wrong

    def fail(
        self, error: PrecomputeError, *, times: int | None = None, view: str | None = None
    ) -> None:
        """Have requests fail so that the client raises this error, after trying again where it
        would.

        Args:
            error: a :class:`NoAnswerError` (no server is there), :class:`DeadlineError`,
                :class:`OverloadedError`, :class:`OnlineStoreError` (the server's store is gone),
                :class:`DeniedError` or any :class:`RequestError`.
            times: the next so many requests; each attempt of a call is one. By default all.
            view: only those for this view.

        Raises:
            ConfigError: the client never raises it, or there is no such view yet.
        """
        outcome_of(error)
        self._order(_Fault(error, 0.0, times, view))

    def delay(self, seconds: float, *, times: int | None = None, view: str | None = None) -> None:
        """Have answers come so much later, within the client's time limit or past it; arguments as
        of :meth:`fail`.

        Raises:
            ConfigError: that is no time, or there is no such view yet.
        """
        if not seconds >= 0:
            raise ConfigError(f"a delay is a number of seconds from 0, got {seconds!r}")
        self._order(_Fault(None, seconds, times, view))

    def heal(self) -> None:
        """Nothing that was on order goes wrong any more."""
        with self._lock:
            self._faults.clear()

    def _order(self, fault: _Fault) -> None:
        if fault.view is not None:
            self._named(fault.view)
        if fault.times is not None and fault.times < 1:
            raise ConfigError(f"times: {fault.times}: at least 1, or None for all requests to come")
        with self._lock:
            self._faults.append(fault)

    def _next_fault(self, views: list[str]) -> tuple[float, PrecomputeError | None]:
        """How much later the answer to a request of these views comes, all delays together, and
        the oldest error."""
        delay_s, error = 0.0, None
        with self._lock:
            for fault in list(self._faults):
                if (fault.view is not None and fault.view not in views) or (
                    fault.error is not None and error is not None
                ):
                    continue
                delay_s += fault.delay_s
                error = fault.error if error is None else error
                if fault.times is not None:
                    fault.times -= 1
                    if not fault.times:
                        self._faults.remove(fault)
        return delay_s, error

    # ---- clients

    def client(self, timeout_s: float = 10.0, **options: Any) -> Client:
        """A :class:`precompute.Client` of it; ``options`` are that one's."""
        client = Client(URL, timeout_s, **options)
        client._transport.close()
        client._transport = _Blocking(self._serve, options.get("token"))
        return client

    def async_client(self, timeout_s: float = 10.0, **options: Any) -> AsyncClient:
        """An :class:`precompute.AsyncClient` of it; ``options`` are that one's."""
        client = AsyncClient(URL, timeout_s, **options)
        client._transport = _Async(self._serve, options.get("token"))
        return client

    def close(self) -> None:
        """End it; clients of it get no answer any more."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_give_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._lookup.close()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what lies behind

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        *,
        query: bool = False,
    ) -> list[Future[Computed]]:
        """As :meth:`precompute.store.answers.fallback.Fallback.submit`."""
        return [
            self._threads.submit(self._computed, pointer.view.name, key, inputs.get(key), query)
            for key in keys
        ]

    def now_s(self) -> float:
        """What time it is here, s since 1970."""
        return time.time() + self._ahead_s

    def index(self, pointer: Pointer) -> VectorIndex:
        """The rows of a view, to be searched."""
        with self._lock:
            of = self._views[pointer.view.name]
            if of.index is not None and of.index[0] is pointer:
                return of.index[1]
            whole = {
                key: {name: features.get(name) for name in of.view.feature_names}
                for key, features in of.rows.items()
                if key not in of.damaged
            }
            index = MemoryIndex(of.view, pointer.model, whole, of.computed_at_us)
            of.index = pointer, index
            return index

    def _computed(
        self, name: str, key: str, inputs: Mapping[str, Any] | None, query: bool
    ) -> Computed:
        of = self._views[name]
        assert of.model is not None
        try:
            features = of.model(key, inputs)
            if features is None:
                raise Miss(Reason.UNKNOWN_ENTITY)
            codec = RowCodec(unpacked_view(of.view)) if query else of.codec
            at_us = int(self.now_s() * 1e6)
            return Computed(of.packed({key: plain_features(features)}, at_us, codec)[key], at_us)
        except Miss:
            raise
        except TimeoutError as exc:
            raise Miss(Reason.DEADLINE) from exc
        except Exception as exc:
            raise Miss(Reason.MODEL_ERROR, str(exc)) from exc

    def _named(self, view: str) -> RowsOfAView:
        if view not in self._views:
            raise ConfigError(
                f"the stand-in has no view {view!r} (it has:"
                f" {', '.join(sorted(self._views)) or 'none'})"
            )
        return self._views[view]

    def _change(
        self, view: str, rows: Mapping[Any, Mapping[str, Any] | None], age_s: float = 0.0
    ) -> None:
        with self._lock:
            of, pointer = self._named(view), self._store.live(view)
            assert pointer is not None
            self._publish(of, pointer.input_columns, rows, age_s)

    def _publish(
        self,
        of: RowsOfAView,
        inputs: dict[str, str],
        rows: Mapping[Any, Mapping[str, Any] | None],
        age_s: float,
    ) -> None:
        name, now_us = of.view.name, int(self.now_s() * 1e6)
        at_us = now_us - int(age_s * 1e6)
        gone = {key_text(key, of.view.entity) for key, features in rows.items() if features is None}
        come = {
            key_text(key, of.view.entity): plain_features(features)
            for key, features in rows.items()
            if features is not None
        }
        for text in (*come, *gone):
            if hint := parts_hint(text, of.view.entity):
                raise ConfigError(f"view {name!r}: {hint}")
        # refused before any is a row
        of.values |= of.packed(come, at_us)
        of.rows |= come
        of.computed_at_us |= dict.fromkeys(come, at_us)
        of.damaged -= gone | come.keys()
        for text in gone:
            of.rows.pop(text, None)
            of.values.pop(text, None)
        self._views[name] = of
        before = self._store.live(name)
        epoch = 1 if before is None else before.epoch + 1
        segment = Segment(epoch, f"{epoch:064x}")
        self._store.load(name, segment, [of.batch()])
        pointer = Pointer(
            view=of.view,
            snapshot=SNAPSHOT,
            epoch=epoch,
            model="stand-in",
            rows=len(of.rows),
            source_rows=len(of.rows),
            at=iso(as_datetime(now_us)),
            computed_at_min=min((of.computed_at_us[key] for key in of.rows), default=None),
            input_columns=inputs,
            index=None if of.view.index is None else f"{name}/index",
            segments=(segment.name,),
            substitute=of.substitute,
        )
        self._store.flip(pointer)
        if before is not None:
            self._store.drop(name, before.segments[0])

    def _serve(self, call: Call[Any], headers: list[tuple[bytes, bytes]]) -> Future[Outcome]:
        body = None if call.body is None else msgspec.json.decode(call.body)
        request = Request(call.method.decode(), call.path, self._views_of(call.path, body), body)
        self.requests.append(request)
        if self._loop.is_closed():
            over: Future[Outcome] = Future()
            over.set_result(Failure(NoAnswerError("no answer: the stand-in is closed"), final=True))
            return over
        return asyncio.run_coroutine_threadsafe(
            self._answered(call, headers, request.views), self._loop
        )

    def _views_of(self, path: str, body: Any) -> list[str]:
        parts = path.partition("?")[0].split("/")
        if len(parts) > 3 and parts[2] == "views":
            return [unquote(parts[3])]
        if len(parts) > 3 and parts[2] == "services":
            service = self._lookup.services.get(unquote(parts[3]))
            return [] if service is None else [part.view for part in service.parts]
        requests = body.get("requests") if isinstance(body, dict) else None
        return [one["view"] for one in requests or ()]

    async def _answered(
        self, call: Call[Any], headers: list[tuple[bytes, bytes]], views: list[str]
    ) -> Outcome:
        delay_s, error = self._next_fault(views)
        if delay_s:
            await asyncio.sleep(delay_s)
        return await exchanged(self._app, call, headers) if error is None else outcome_of(error)


async def _give_up() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class _MemorySearches(Searches):
    def __init__(self, stand_in: StandIn, lookup: Lookup) -> None:
        super().__init__(None, lookup._live, lookup.begin, lookup._age_of)
        self._stand_in = stand_in

    def index_of(self, pointer: Pointer) -> VectorIndex:
        return super().index_of(pointer) if pointer.index is None else self._stand_in.index(pointer)


class _MemoryLookup(Lookup):
    def __init__(self, stand_in: StandIn) -> None:
        super().__init__(stand_in._store, None, stand_in, stand_in.now_s)
        self._searches = _MemorySearches(stand_in, self)


def outcome_of(error: PrecomputeError) -> Outcome:
    """What a request came to, for the client to raise this error: the server's refusal, or no
    answer.

    Raises:
        ConfigError: the client raises no such error.
    """
    if isinstance(error, OverloadedError):
        # as RFC 9110 has it, in whole seconds
        wait = (
            []
            if error.retry_after_s is None
            else [(b"retry-after", b"%d" % max(0, round(error.retry_after_s)))]
        )
        return _refusal(503, "busy", str(error), wait)
    if isinstance(error, NoAnswerError):
        return Failure(error, final=isinstance(error, DeadlineError))
    if isinstance(error, OtherFormatError):
        return _refusal(503, "other_format", str(error))
    if type(error) is OnlineStoreError:
        return _refusal(503, "store_unavailable", str(error))
    if isinstance(error, RequestError):
        return _refusal(error.status, error.code, str(error))
    raise ConfigError(
        f"{type(error).__name__}: the client never raises it; it raises OnlineStoreError,"
        " OtherFormatError, NoAnswerError, DeadlineError, OverloadedError, RequestError,"
        " DeniedError"
    )


def _refusal(
    status: int, code: str, detail: str, headers: list[tuple[bytes, bytes]] | None = None
) -> Reply:
    said = problem(status, code, detail, headers)
    assert isinstance(said.body, bytes)
    return Reply(said.status, said.headers, said.body)


# ---- Clients: the real ones, with the stand-in's application where their connections would be.


URL = "http://stand-in.test"

Serve = Callable[[Call[Any], list[tuple[bytes, bytes]]], "Future[Outcome]"]
"""Begins to answer a request with these headers."""
_LOOK_S = 0.02
"""How often it is looked whether a request was given up."""


class _Blocking(BlockingTransport):
    def __init__(self, serve: Serve, token: Any) -> None:
        super().__init__(address_of(URL), token, 1, None)
        self._serve = serve

    def send(self, call: Call[Any], exchange: Exchange) -> Outcome:
        answer = self._serve(call, self.request(call)[2])
        try:
            while True:
                left_s = exchange.left_s()
                try:
                    return _checked(call, answer.result(min(left_s, _LOOK_S)))
                except NotYet:
                    continue
        except ERRORS as exc:
            return self.failure(exc)
        finally:
            answer.cancel()


class _Async(AsyncTransport):
    def __init__(self, serve: Serve, token: Any) -> None:
        super().__init__(address_of(URL), token, 1, None)
        self._serve = serve

    async def send(self, call: Call[Any], deadline: float) -> Outcome:
        answer = self._serve(call, self.request(call)[2])
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return _checked(call, await asyncio.wrap_future(answer))
        except TimeoutError as exc:
            return self.failure(exc)


def _checked(call: Call[Any], outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failure):
        return outcome
    reply, wrong = call.checked(outcome)
    return reply if wrong is None else Failure(wrong, lost=True)


async def exchanged(app: Front, call: Call[Any], headers: list[tuple[bytes, bytes]]) -> Reply:
    """One request of an ASGI application, as a server hands it over."""
    path, _, query = call.path.partition("?")
    scope: dict[str, Any] = {
        "type": "http",
        "method": call.method.decode(),
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.lower(), value) for name, value in headers],
    }
    unread = [{"type": "http.request", "body": call.body or b"", "more_body": False}]
    messages = list[Any]()

    async def receive() -> Any:
        if unread:
            return unread.pop()
        # it never hangs up; a task that waits for it is cancelled
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        messages.append(message)

    await app(scope, receive, send)
    start, *parts = messages
    return Reply(
        start["status"], start["headers"], b"".join(bytes(part.get("body", b"")) for part in parts)
    )
