"""Remote fallback: what stands behind a lookup worker's misses: model processes, one for each model
that is live, each behind a link."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from precompute.jobs.serve.model_group import socket_path
from precompute.store.answers.fallback import CLIENT, Computed, Fallback, Miss, outcome_of, places
from precompute.store.http.telemetry.caller import TRACE
from precompute.store.http.telemetry.instruments import (
    BREAKER_OPEN,
    FALLBACK_QUEUE,
    FALLBACK_ROWS,
    Meter,
)
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason
from precompute.workers.worker import framed, read_message

LEAST_CALLS = 10
FAILING = 0.5
"""Opens when of the latest calls, this many at least, this share was broken: the defaults of
Flink's client for Triton, as are the next two."""
OPEN_S = 60.0
PROBES = 3
"""Calls that are let through then, and must all be good."""

LATEST, LATEST_S = 50, 30.0
"""Calls that are remembered, and how long."""


class Breaker:
    """Of one view; ``now`` is :func:`time.monotonic`, and none of it is safe to share between
    threads."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, bool]] = deque(maxlen=LATEST)
        self._opened_at: float | None = None
        self._probing = 0
        self._good = 0

    @property
    def is_open(self) -> bool:
        """Whether calls are refused."""
        return self._opened_at is not None

    def admit(self, calls: int, now: float) -> tuple[int, float]:
        """How many of these calls may be made, and in how many seconds the others may be tried
        again, at least."""
        if self._opened_at is None:
            return calls, 0.0
        left_s = self._opened_at + OPEN_S - now
        if left_s > 0:
            return 0, left_s
        admitted = min(calls, PROBES - self._probing)
        self._probing += admitted
        return admitted, 1.0

    def count(self, broken: bool | None, now: float) -> None:
        """What became of a call: whether the model itself failed; None: nobody knows."""
        if broken is None:
            # was it a probe, another one is sent
            self._probing = max(0, self._probing - 1)
        elif self._opened_at is None:
            self._latest.append((now, broken))
            calls = [failed for at, failed in self._latest if now - at < LATEST_S]
            if broken and len(calls) >= LEAST_CALLS and sum(calls) >= FAILING * len(calls):
                self._open(now)
        elif now >= self._opened_at + OPEN_S:
            if broken:
                self._open(now)
            else:
                self._good += 1
                if self._good >= PROBES:
                    self._opened_at = None
                    self._latest.clear()

    def _open(self, now: float) -> None:
        self._opened_at, self._probing, self._good = now, 0, 0


log = logging.getLogger(__name__)

TRY_EVERY_S = 0.05
"""How often a process that is not there yet is looked for."""


MOST_SENT = 3
"""Times that a key is requested, of one process after the other: among others, alone, and once more
to be sent the note that it is left alone."""


@dataclass(slots=True, eq=False)
class _Request:
    """Keys under a pointer, the first of them called ``number``, or, without keys, that it is to be
    opened; ``left`` of them were given up, and processes ended with it ``lost`` times."""

    pointer: Pointer
    keys: Sequence[str]
    inputs: Mapping[str, Mapping[str, Any]]
    deadline: float
    query: bool
    number: int
    futures: list[Future[Computed]]
    client: str
    trace: str | None = None
    left: int = 0
    lost: int = 0

    def alone(self, number: int) -> _Request:
        """One of the keys, requested once more."""
        at = number - self.number
        key = self.keys[at]
        given = {key: self.inputs[key]} if key in self.inputs else {}
        return replace(
            self,
            keys=[key],
            inputs=given,
            number=number,
            futures=[self.futures[at]],
            left=0,
            lost=self.lost + 1,
        )

    def header(self, pointer: int) -> dict[str, Any]:
        if not self.keys:
            return {"warm": self.number, "pointer": pointer, "deadline": self.deadline}
        request = {"ask": self.number, "pointer": pointer, "keys": self.keys, "inputs": self.inputs}
        traced = {} if self.trace is None else {"trace": self.trace}
        return (
            request
            | {"deadline": self.deadline, "query": self.query, "client": self.client}
            | traced
        )


@dataclass(slots=True)
class _Connection:
    """``waiting`` is what was sent over it, by number, ``pointers`` of each view the publishing
    that the process knows it by, and its number."""

    socket: socket.socket
    waiting: dict[int, _Request] = field(default_factory=dict)
    pointers: dict[str, tuple[tuple[int, str], int]] = field(default_factory=dict)
    lost: bool = False


class ModelLink:
    """To the process of one model.

    Args:
        path: its socket.
        want: informed that the process is wanted, where it is not there.
        on_lost: called when a connection was lost, with the views of the rows that were waited for.
    """

    def __init__(
        self, path: Path, want: Callable[[], None], on_lost: Callable[[set[str]], None]
    ) -> None:
        self._path, self._want, self._on_lost = path, want, on_lost
        self._numbers = itertools.count()
        self._lock = threading.Condition(threading.Lock())
        """Reported of what is to be written."""
        self._connection: _Connection | None = None
        self._open: frozenset[tuple[str, tuple[int, str]]] = frozenset()
        self._outbox: dict[int, _Request] = {}
        self._left: list[int] = []
        """Numbers of what nobody waits for any more, of that which was sent."""
        self._in_hand = 0
        self._closed = threading.Event()
        threading.Thread(target=self._write, name="model link", daemon=True).start()

    def ask(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        query: bool = False,
    ) -> list[Future[Computed]]:
        """As :meth:`precompute.store.answers.fallback.Fallback.submit`."""
        request = self._begin(pointer, keys, inputs, deadline, query, len(keys))
        with self._lock:
            self._in_hand += len(keys)
        for number, future in enumerate(request.futures, request.number):
            future.add_done_callback(partial(self._landed, request, number))
        return request.futures

    def warm(self, pointer: Pointer, deadline: float) -> Future[Computed]:
        """Have the process open what a pointer names; the future always ends in an error, once that
        was tried."""
        return self._begin(pointer, (), {}, deadline, False, 1).futures[0]

    def is_open(self, pointer: Pointer) -> bool:
        """Whether the process has said that it has this publishing open."""
        return (pointer.view.name, pointer.publishing) in self._open

    @property
    def idle(self) -> bool:
        """Whether no row that was requested is waited for."""
        return self._in_hand == 0

    def close(self) -> None:
        """Ask for nothing more; what was requested ends as if the process had ended, and so does
        what is requested from now on."""
        with self._lock:
            self._closed.set()
            connection = self._connection
            self._lock.notify()
        if connection is not None:
            self._lose(connection)

    def _begin(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        query: bool,
        futures: int,
    ) -> _Request:
        with self._lock:
            number = next(self._numbers)
            for _ in range(futures - 1):
                next(self._numbers)
            made: list[Future[Computed]] = [Future() for _ in range(futures)]
            request = _Request(
                pointer, keys, inputs, deadline, query, number, made, CLIENT.get(), TRACE.get()
            )
            closed = self._closed.is_set()
            if not closed:
                self._outbox[number] = request
                self._lock.notify()
        if closed:
            _fail(request.futures, _ended())
        return request

    def _landed(self, request: _Request, number: int, future: Future[Computed]) -> None:
        with self._lock:
            self._in_hand -= 1
            if not future.cancelled():
                return
            request.left += 1
            connection = self._connection
            if self._outbox.get(request.number) is request:
                if request.left == len(request.futures):
                    del self._outbox[request.number]
            elif number in self._outbox:
                # requested once more
                del self._outbox[number]
            elif connection is not None and connection.waiting.pop(number, None) is not None:
                self._left.append(number)
                self._lock.notify()

    # ---- what is requested

    def _write(self) -> None:
        while True:
            with self._lock:
                while not (self._outbox or self._left or self._closed.is_set()):
                    self._lock.wait()
                left, self._left = self._left, []
                request = self._outbox.pop(next(iter(self._outbox))) if self._outbox else None
                connection = self._connection
            if left and connection is not None:
                # of another connection, it knows none of them; and one that is lost is seen by who
                # reads
                with contextlib.suppress(OSError):
                    connection.socket.sendall(framed({"left": left}))
            if request is not None:
                self._ask(request)
            elif self._closed.is_set():
                return

    def _ask(self, request: _Request) -> None:
        try:
            self._send(request)
        except (OSError, RuntimeError, TypeError, ValueError) as exc:
            # also that there is no room for a thread, or inputs that are no JSON, which come from
            # no request over HTTP
            _fail(
                request.futures,
                Miss(Reason.MODEL_ERROR, f"the model process cannot be queried: {exc}"),
            )

    def _send(self, request: _Request) -> None:
        connection = self._connected(request.deadline)
        if connection is None:
            _fail(request.futures, Miss(Reason.DEADLINE))
            return
        view, publishing = request.pointer.view.name, request.pointer.publishing
        known, number = connection.pointers.get(view, (None, len(connection.pointers)))
        data = b""
        if known != publishing:
            body = request.pointer.to_bytes()
            data = framed({"pointer": number}, len(body)) + body
        data += framed(request.header(number))
        with self._lock:
            if request.left == len(request.futures):
                return
            lost = connection.lost
            if not lost:
                connection.waiting |= dict.fromkeys(
                    range(request.number, request.number + len(request.futures)), request
                )
        if lost:
            # between two lines
            self._send(request)
            return
        connection.pointers[view] = publishing, number
        try:
            connection.socket.sendall(data)
        except OSError:
            # its process ended before it had all of this, and so began nothing of it
            with self._lock:
                # who reads may have seen the end first, and have ended what was requested
                lost = connection.lost
                for one in range(request.number, request.number + len(request.futures)):
                    connection.waiting.pop(one, None)
            self._lose(connection)
            if not lost:
                self._send(request)

    def _connected(self, deadline: float) -> _Connection | None:
        """The connection; None where there is none by the deadline."""
        while not self._closed.is_set():
            with self._lock:
                if self._connection is not None:
                    return self._connection
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                opened.connect(str(self._path))
            except OSError:
                opened.close()
                self._want()
                if time.monotonic() + TRY_EVERY_S > deadline:
                    return None
                time.sleep(TRY_EVERY_S)
                continue
            with self._lock:
                if self._closed.is_set():
                    opened.close()
                    return None
                connection = self._connection = _Connection(opened)
            try:
                threading.Thread(
                    target=self._read, args=(connection,), name="model answers", daemon=True
                ).start()
            except RuntimeError:
                self._lose(connection)
                raise
        return None

    # ---- what is answered

    def _read(self, connection: _Connection) -> None:
        try:
            with contextlib.suppress(OSError), connection.socket.makefile("rb") as file:
                while (message := read_message(file)) is not None:
                    header, body = message
                    if "open" in header:
                        self._open = frozenset(
                            (view, (epoch, at)) for view, (epoch, at) in header["open"]
                        )
                    self._land(connection, header, body.to_pybytes())
        finally:
            self._lose(connection)

    def _land(self, connection: _Connection, header: Mapping[str, Any], body: bytes) -> None:
        at = 0
        for number, computed_at_us, size in header["rows"]:
            with self._lock:
                request = connection.waiting.pop(number, None)
            if request is not None:
                # given up just now
                with contextlib.suppress(InvalidStateError):
                    request.futures[number - request.number].set_result(
                        Computed(body[at : at + size], computed_at_us)
                    )
            at += size
        for number, reason, detail, broken in header["missed"]:
            with self._lock:
                request = connection.waiting.pop(number, None)
            if request is not None:
                _fail(
                    [request.futures[number - request.number]],
                    Miss(Reason(reason), detail, broken=broken),
                )

    def _lose(self, connection: _Connection) -> None:
        """Ask once more for what was sent over a connection that is no more."""
        with self._lock:
            if connection.lost:
                return
            connection.lost = True
            if self._connection is connection:
                self._connection, self._open = None, frozenset()
            waiting, connection.waiting = connection.waiting, {}
            over, now = [], time.monotonic()
            for number, request in waiting.items():
                future = request.futures[number - request.number]
                if (
                    self._closed.is_set()
                    or not request.keys
                    or request.lost + 1 >= MOST_SENT
                    or request.deadline <= now
                ):
                    over.append(future)
                elif not future.done():
                    self._outbox[number] = request.alone(number)
            self._lock.notify()
        # wakes who reads it
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        connection.socket.close()
        _fail(over, _ended())
        if not self._closed.is_set():
            self._on_lost(
                {request.pointer.view.name for request in waiting.values() if request.keys}
            )


def _ended() -> Miss:
    return Miss(Reason.MODEL_ERROR, "the model process ended", broken=None)


def _fail(futures: Iterable[Future[Computed]], miss: Miss) -> None:
    for future in futures:
        # given up, or reported already
        with contextlib.suppress(InvalidStateError):
            future.set_exception(miss)


MOST_IN_FLIGHT = 4096
"""Keys of one view that a worker waits for at once, each client for its share of them; what is
requested beyond is shed."""

LEAST_IN_FLIGHT = 64
HELD_BACK_S = 1.0
"""A client of which the process of a model shed keys has twice as many in flight as were not shed,
and so many at least, for this long: to hand over, read and refuse a thousand keys takes both
processes 55 ms."""

MOST_SHARES = 256
"""Clients of views that are remembered, before those with nothing in flight are forgotten."""

MOST_NAMED = 8
"""Views that a model process is known by, at most."""

CONTROL = "supervisor.sock"
"""In the runtime folder: where the supervisor learns which models are wanted, a datagram each: its
fingerprint and views, with NUL between."""


@dataclass(slots=True)
class _Share:
    """A client's keys of a view: how many are in flight, and may be until when (monotonic)."""

    in_flight: int = 0
    most: int = MOST_IN_FLIGHT
    until: float = 0.0

    def room(self, free: int, now: float) -> int:
        """How many more it may have, where ``free`` are left."""
        room = places(free, self.in_flight)
        return room if now >= self.until else max(0, min(room, self.most - self.in_flight))

    def landed(self, future: Future[Computed], now: float) -> None:
        self.in_flight -= 1
        error = None if future.cancelled() else future.exception()
        if isinstance(error, Miss) and error.reason is Reason.SHED:
            self.most, self.until = max(LEAST_IN_FLIGHT, 2 * self.in_flight), now + HELD_BACK_S
        elif error is None:
            self.most += 2


class RemoteFallback(Fallback):
    """The model processes that a supervisor keeps.

    Args:
        runtime: the folder with their sockets, and the supervisor's.
        meter: counts what becomes of the misses.
    """

    def __init__(self, runtime: Path, meter: Meter) -> None:
        self._runtime, self._meter = runtime, meter
        self._breakers: dict[str, Breaker] = {}
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._control.setblocking(False)
        self._lock = threading.Lock()
        self._links: dict[str, ModelLink] = {}
        self._views: dict[str, set[str]] = {}
        """Of each model with a link: those it is needed for."""
        self._in_flight: Counter[str] = Counter()
        self._shares: dict[tuple[str, str], _Share] = {}
        """By view, and by view and client."""
        self.on_lost: Callable[[], None] = lambda: None
        """Reported when a model process was lost: what was open in it is open no more."""

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        *,
        query: bool = False,
    ) -> list[Future[Computed]]:
        view, client = pointer.view.name, CLIENT.get()
        with self._lock:
            now = time.monotonic()
            admitted, retry_s = self._breaker(view).admit(len(keys), now)
            share = self._share(view, client, now)
            taken = min(admitted, share.room(MOST_IN_FLIGHT - self._in_flight[view], now))
            given = {key: inputs[key] for key in keys[:taken] if key in inputs}
            futures = (
                self._link(pointer).ask(pointer, keys[:taken], given, deadline, query)
                if taken
                else []
            )
            self._in_flight[view] += taken
            share.in_flight += taken
        self._meter.gauge(FALLBACK_QUEUE, view).add(taken)
        for future in futures:
            future.add_done_callback(partial(self._landed, view, share))
        if taken < len(keys):
            self._meter.counter(FALLBACK_ROWS, view, str(Reason.SHED)).add(len(keys) - taken)
        return futures + [_shed(retry_s) for _ in keys[taken:]]

    def begin_warm(self, pointer: Pointer, deadline: float) -> Future[Computed]:
        """Have what a pointer names opened; the future always ends in an error, once that was tried
        or the deadline is over."""
        with self._lock:
            return self._link(pointer).warm(pointer, deadline)

    def ready(self, pointer: Pointer) -> bool:
        """Whether a process has the view open for the pointer's publishing."""
        link = self._links.get(pointer.model)
        return link is not None and link.is_open(pointer)

    def want(self, models: Collection[str]) -> None:
        """Say which models are live: the others' processes may end, once the requests that saw them
        live are answered."""
        for model in models:
            self._want(model)
        with self._lock:
            for model, link in list(self._links.items()):
                if model not in models and link.idle:
                    del self._links[model], self._views[model]
                    link.close()

    def close(self) -> None:
        """Ask for nothing more."""
        for link in list(self._links.values()):
            link.close()
        self._control.close()

    def _link(self, pointer: Pointer) -> ModelLink:
        """The lock is held until the request is sent: none is closed between."""
        model = pointer.model
        self._views.setdefault(model, set()).add(pointer.view.name)
        link = self._links.get(model)
        if link is None:
            path, want = socket_path(self._runtime, model), partial(self._want, model)
            link = self._links[model] = ModelLink(path, want, self._lost)
        return link

    def _lost(self, views: set[str]) -> None:
        """That a process ended is one failure of the model, however many waited."""
        with self._lock:
            for view in views:
                self._breaker(view).count(True, time.monotonic())
        self.on_lost()

    def _want(self, model: str) -> None:
        message = "\0".join([model, *list(self._views.get(model, ()))[:MOST_NAMED]])
        # it is gone, and this process with it, or has enough to read
        with contextlib.suppress(OSError):
            self._control.sendto(message.encode(), str(self._runtime / CONTROL))

    def _share(self, view: str, client: str, now: float) -> _Share:
        share = self._shares.get((view, client))
        if share is None:
            if len(self._shares) >= MOST_SHARES:
                self._shares = {
                    whose: one
                    for whose, one in self._shares.items()
                    if one.in_flight or now < one.until
                }
            share = self._shares[view, client] = _Share()
        return share

    def _breaker(self, view: str) -> Breaker:
        breaker = self._breakers.get(view)
        if breaker is None:
            breaker = self._breakers[view] = Breaker()
        return breaker

    def _landed(self, view: str, share: _Share, future: Future[Computed]) -> None:
        broken = None if future.cancelled() else _broken(future.exception())
        with self._lock:
            self._in_flight[view] -= 1
            now = time.monotonic()
            share.landed(future, now)
            breaker = self._breaker(view)
            breaker.count(broken, now)
        self._meter.gauge(FALLBACK_QUEUE, view).add(-1)
        self._meter.counter(FALLBACK_ROWS, view, outcome_of(future)).add()
        self._meter.gauge(BREAKER_OPEN, view).set(breaker.is_open)


def _broken(error: BaseException | None) -> bool | None:
    """Whether a call shows the model to be broken; None where it was not made, or not waited
    for."""
    if not isinstance(error, Miss):
        return error is not None
    return None if error.reason in (Reason.DEADLINE, Reason.SHED) else error.broken


def _shed(retry_s: float) -> Future[Computed]:
    future: Future[Computed] = Future()
    future.set_exception(Miss(Reason.SHED, retry_after_s=retry_s))
    return future
