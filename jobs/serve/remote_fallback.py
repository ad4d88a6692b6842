"""Remote fallback: a lookup worker's side of its misses: a link to the model process of each
fingerprint that is live, and a circuit breaker for each view."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from precompute.store.answers.fallback import CLIENT, Computed, Fallback, Miss, outcome_of, places
from precompute.store.disk.record import digest_of
from precompute.store.errors import ConfigError
from precompute.store.http.telemetry.instruments import (
    BREAKER_OPEN,
    FALLBACK_QUEUE,
    FALLBACK_ROWS,
    TRACE,
    Meter,
)
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason
from precompute.workers.process import framed, read_message

log = logging.getLogger(__name__)

LEAST_CALLS = 10
FAILING = 0.5
"""Share of broken calls, of at least ``LEAST_CALLS`` of the latest, at which a breaker opens: the
defaults of Flink's client for Triton, as are the next two."""
OPEN_S = 60.0
PROBES = 3
"""Calls that are let through after ``OPEN_S``, and must all be good."""

LATEST, LATEST_S = 50, 30.0
"""Calls that are remembered, and how long."""


class Breaker:
    """The circuit breaker of one view; ``now`` is :func:`time.monotonic`, and none of it is safe to
    share between threads."""

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
        """Note what became of a call: whether the model itself failed; None: not known."""
        if broken is None:
            # if it was a probe, another one is sent
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


CONTROL = "supervisor.sock"
"""Name of the supervisor's socket in the runtime folder. A datagram says that a model is needed:
its fingerprint and views, with NUL between."""

SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""Length of a Unix socket's path at most: ``sun_path`` without its last byte."""


def socket_path(runtime: Path, model: str) -> Path:
    """Where the process of a model's fingerprint is reached: by a digest of it, since it is the
    online store that says what it is."""
    return runtime / f"{digest_of(model.encode())}.sock"


def check_runtime(runtime: Path) -> None:
    """Refuse a folder whose sockets could not be bound.

    Raises:
        ConfigError: its name is too long.
    """
    longest = len(os.fsencode(socket_path(runtime, "")))
    if longest > SOCKET_PATH_BYTES:
        raise ConfigError(
            f"a server's sockets lie in a folder of their own under {runtime.parent}, whose name is"
            f" {longest - SOCKET_PATH_BYTES} bytes too long for that: point TMPDIR at a folder with"
            " a shorter one"
        )


TRY_EVERY_S = 0.05
"""How often a process that is not there yet is looked for."""

LATE_S = 1.0
"""How often rows that were sent are compared with their deadlines."""

MOST_SENT = 3
"""Times that a key is sent, to one process after the other: among others, alone, and once more for
the reply that it is barred."""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """What the rows of one request have in common; ``header``: what is sent of all of them."""

    pointer: Pointer
    inputs: Mapping[str, Mapping[str, Any]]
    deadline: float
    header: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Row:
    """A row that is waited for; without a key, the opening of its view. ``sent``: how often."""

    request: _Request
    key: str | None
    future: Future[Computed] = field(default_factory=Future)
    sent: int = 0


class ModelLink:
    """A link to the process of one model. One thread connects, sends and reads; rows of a
    connection that is lost are sent again over the next one.

    Args:
        path: its socket.
        ask: called where the process is needed and not there.
        on_lost: called when a connection was lost, with the views of the rows that were waited for.

    Raises:
        OSError: the system has no room for it.
        RuntimeError: nor for its thread.
    """

    def __init__(
        self, path: Path, ask: Callable[[], None], on_lost: Callable[[set[str]], None]
    ) -> None:
        self._path, self._ask, self._on_lost = path, ask, on_lost
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._outbox: dict[int, _Row] = {}
        self._sent: dict[int, _Row] = {}
        self._cancelled: list[int] = []
        """Numbers of rows that were sent and that no request waits for any more."""
        self._open: frozenset[tuple[str, tuple[int, str]]] = frozenset()
        self._closed, self._late_at = False, 0.0
        with contextlib.ExitStack() as unless_made:
            self._waker, self._woken = socket.socketpair()
            unless_made.callback(self._woken.close)
            unless_made.callback(self._waker.close)
            self._waker.setblocking(False)
            threading.Thread(target=self._run, name="model link", daemon=True).start()
            unless_made.pop_all()

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str | None],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        query: bool = False,
    ) -> list[Future[Computed]]:
        """As :meth:`precompute.store.answers.fallback.Fallback.submit`; for the key None the
        process opens what the pointer names: that future always ends in an error, once it was
        tried."""
        header = {"view": pointer.view.name, "deadline": deadline, "query": query}
        header |= {"client": CLIENT.get(), "trace": TRACE.get()}
        request = _Request(pointer, inputs, deadline, header)
        rows = {next(self._numbers): _Row(request, key) for key in keys}
        with self._lock:
            self._outbox |= rows
        self._wake()
        for number, row in rows.items():
            row.future.add_done_callback(partial(self._drop, number))
        return [row.future for row in rows.values()]

    def has_open(self, pointer: Pointer) -> bool:
        """Whether the process has said that it has this publishing open."""
        return (pointer.view.name, pointer.publishing) in self._open

    @property
    def idle(self) -> bool:
        """Whether no row is waited for."""
        with self._lock:
            rows = (*self._outbox.values(), *self._sent.values())
        return all(row.key is None for row in rows)

    def close(self) -> None:
        """Send nothing more, and take no rows from now on; those that are waited for end as if the
        process had ended."""
        self._closed = True
        self._wake()

    def _drop(self, number: int, future: Future[Computed]) -> None:
        if not future.cancelled():
            return
        with self._lock:
            if self._outbox.pop(number, None) is None and self._sent.pop(number, None) is not None:
                self._cancelled.append(number)
        self._wake()

    def _wake(self) -> None:
        # it will be woken, or the link is closed
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # ---- in its thread

    def _run(self) -> None:
        while not self._closed:
            if not self._outbox:
                self._woken.recv(4096)
            elif (connection := self._connected()) is not None:
                try:
                    with connection:
                        self._converse(connection)
                except OSError as exc:
                    log.debug("a model's process is gone: %s", exc)
                except Exception:
                    # such as no memory for an answer: without its thread the link would be silent
                    log.exception("a conversation with a model's process is begun again")
                if not self._closed:
                    self._resend()
        with self._lock:
            rows = [*self._outbox.values(), *self._sent.values()]
        _fail(rows, _ended())
        self._waker.close()
        self._woken.close()

    def _connected(self) -> socket.socket | None:
        """A connection; None, after a pause, where no process listens yet."""
        with contextlib.suppress(OSError):
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._path))
                return connection
            except OSError:
                connection.close()
        self._ask()
        with self._lock:
            soon = time.monotonic() + TRY_EVERY_S
            late = {n: row for n, row in self._outbox.items() if row.request.deadline < soon}
            self._outbox = {n: row for n, row in self._outbox.items() if n not in late}
        _fail(late.values(), Miss(Reason.DEADLINE))
        time.sleep(TRY_EVERY_S)
        return None

    def _converse(self, connection: socket.socket) -> None:
        """Send what comes and take the answers, until the connection or the link is closed."""
        publishings = dict[str, tuple[int, str]]()
        # reads no further than the message, so that the selector knows of the next one
        file = connection.makefile("rb", buffering=1)
        with selectors.PollSelector() as selector, file:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closed:
                self._send(connection, publishings)
                self._end_late()
                for ready, _ in selector.select(LATE_S if self._sent else None):
                    if ready.fileobj is self._woken:
                        self._woken.recv(4096)
                    elif (message := read_message(file)) is not None:
                        self._receive(*message)
                    else:
                        return

    def _send(self, connection: socket.socket, publishings: dict[str, tuple[int, str]]) -> None:
        """Send all there is to send; ``publishings``: of each view, which one the process knows."""
        with self._lock:
            rows, self._outbox = self._outbox, {}
            cancelled, self._cancelled = self._cancelled, []
            self._sent |= rows
        messages, requests = [framed({"cancel": cancelled})] if cancelled else [], 0
        for request, some in itertools.groupby(rows.items(), lambda item: item[1].request):
            numbers, sent = zip(*some, strict=True)
            keys = [row.key for row in sent]
            inputs = {key: request.inputs[key] for key in keys if key in request.inputs}
            view, publishing = request.pointer.view.name, request.pointer.publishing
            pointer = b"" if publishings.get(view) == publishing else request.pointer.to_bytes()
            try:
                rows_of = {"compute": numbers, "keys": keys, "inputs": inputs}
                messages += framed(request.header | rows_of, len(pointer)), pointer
            except (RuntimeError, TypeError, ValueError) as exc:
                # inputs that are no JSON, which come from no request over HTTP
                unsent = [row for number in numbers for row in self._pop_sent(number)]
                _fail(unsent, _not_sent(exc))
                continue
            publishings[view] = publishing
            requests += 1
        whole = False
        try:
            connection.sendall(b"".join(messages))
            whole = True
        finally:
            # of a single request that was not sent whole, the process began nothing; of several,
            # the first may have been whole
            if whole or requests > 1:
                for row in rows.values():
                    row.sent += 1

    def _receive(self, header: Mapping[str, Any], body: pa.Buffer) -> None:
        if "open" in header:
            self._open = frozenset((view, (epoch, at)) for view, (epoch, at) in header["open"])
        rows, offset = body.to_pybytes(), 0
        for number, computed_at_us, size in header["rows"]:
            for row in self._pop_sent(number):
                # given up just now
                with contextlib.suppress(InvalidStateError):
                    row.future.set_result(Computed(rows[offset : offset + size], computed_at_us))
            offset += size
        for number, reason, detail, broken in header["failed"]:
            _fail(self._pop_sent(number), Miss(Reason(reason), detail, broken=broken))

    def _end_late(self) -> None:
        """End, about every second, what was sent and is not answered in time: a process that ends
        before it accepts the connection leaves it open, and nobody else ends what opens a view."""
        now = time.monotonic()
        if now < self._late_at:
            return
        self._late_at = now + LATE_S
        with self._lock:
            late = {n: row for n, row in self._sent.items() if row.request.deadline < now}
            for number in late:
                del self._sent[number]
            self._cancelled += late
        _fail(late.values(), Miss(Reason.DEADLINE))

    def _pop_sent(self, number: int) -> list[_Row]:
        with self._lock:
            return [self._sent.pop(number)] if number in self._sent else []

    def _resend(self) -> None:
        """Send again what was sent over a connection that is gone."""
        with self._lock:
            self._open, now = frozenset(), time.monotonic()
            sent, self._sent, self._cancelled = self._sent, {}, []
            again = {
                number: row
                for number, row in sent.items()
                if row.key is not None and row.sent < MOST_SENT and row.request.deadline > now
            }
            self._outbox = again | self._outbox
        _fail([row for number, row in sent.items() if number not in again], _ended())
        begun = [row for row in sent.values() if row.key is not None and row.sent]
        self._on_lost({row.request.pointer.view.name for row in begun})


def _ended() -> Miss:
    return Miss(Reason.MODEL_ERROR, "the model process ended", broken=None)


def _not_sent(why: Exception) -> Miss:
    return Miss(Reason.MODEL_ERROR, f"the model process cannot be queried: {why}", broken=None)


def _fail(rows: Iterable[_Row], miss: Miss) -> None:
    for row in rows:
        # given up, or resolved already
        with contextlib.suppress(InvalidStateError):
            row.future.set_exception(miss)


MOST_IN_FLIGHT = 4096
"""Keys of one view that a worker waits for at once, each client for its share of them; further ones
are shed."""

LEAST_IN_FLIGHT = 64
HELD_BACK_S = 1.0
"""For ``HELD_BACK_S`` after the process of a model shed a key of a client, that one may have twice
as many keys in flight as it still has, and ``LEAST_IN_FLIGHT`` at least: to hand over, read and
refuse a thousand keys takes both processes 55 ms."""

MOST_SHARES = 256
"""Clients of views that are remembered, before those with nothing in flight are forgotten."""

MOST_NAMED = 8
"""Views that a model process is known by, at most."""


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

    def count(self, future: Future[Computed], now: float) -> None:
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
        self._breakers: defaultdict[str, Breaker] = defaultdict(Breaker)
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._control.setblocking(False)
        self._lock = threading.Lock()
        self._links: dict[str, ModelLink] = {}
        self._views: defaultdict[str, set[str]] = defaultdict(set)
        """Model with a link → the views that it is needed for."""
        self._in_flight: Counter[str] = Counter()
        self._shares: defaultdict[tuple[str, str], _Share] = defaultdict(_Share)
        """(View, client) → its share of the keys in flight; ``_in_flight`` counts those of a
        view."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when a model process was lost: what was open in it is open no more."""

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
            admitted, retry_s = self._breakers[view].admit(len(keys), now)
            share = self._share(view, client, now)
            taken = min(admitted, share.room(MOST_IN_FLIGHT - self._in_flight[view], now))
            try:
                link = self._link(pointer) if taken else None
            except (OSError, RuntimeError) as exc:
                futures = [_failed(_not_sent(exc)) for _ in keys[:taken]]
            else:
                futures = (
                    link.submit(pointer, keys[:taken], inputs, deadline, query) if link else []
                )
            self._in_flight[view] += taken
            share.in_flight += taken
        self._meter.gauge(FALLBACK_QUEUE, view).add(taken)
        for future in futures:
            future.add_done_callback(partial(self._count, view, share))
        if taken < len(keys):
            self._meter.counter(FALLBACK_ROWS, view, str(Reason.SHED)).add(len(keys) - taken)
        return futures + [_failed(Miss(Reason.SHED, retry_after_s=retry_s)) for _ in keys[taken:]]

    def begin_warm(self, pointer: Pointer, deadline: float) -> Future[Computed]:
        """Begin to open what a pointer names. The future has no result: it always ends in an error,
        once that was tried or at the deadline; :meth:`ready` says which."""
        with self._lock:
            return self._link(pointer).submit(pointer, [None], {}, deadline)[0]

    def ready(self, pointer: Pointer) -> bool:
        """Whether a process has the view open for the pointer's publishing."""
        link = self._links.get(pointer.miss_model)
        return link is not None and link.has_open(pointer)

    def announce_live(self, models: Collection[str]) -> None:
        """Say which models are live: the others' processes may end, once the requests that saw them
        live are answered."""
        for model in models:
            self._ask_for(model)
        with self._lock:
            for model, link in list(self._links.items()):
                if model not in models and link.idle:
                    del self._links[model], self._views[model]
                    link.close()

    def close(self) -> None:
        """Send no more requests."""
        for link in list(self._links.values()):
            link.close()
        self._control.close()

    def _link(self, pointer: Pointer) -> ModelLink:
        """The link to the process of the pointer's model, made if there is none. The caller holds
        the lock until its request is sent: no link is closed between."""
        model = pointer.miss_model
        self._views[model].add(pointer.view.name)
        if model not in self._links:
            path, ask = socket_path(self._runtime, model), partial(self._ask_for, model)
            self._links[model] = ModelLink(path, ask, self._lost)
        return self._links[model]

    def _lost(self, views: set[str]) -> None:
        """Count the end of a process as one failure of the model, however many waited."""
        with self._lock:
            for view in views:
                self._breakers[view].count(True, time.monotonic())
                self._meter.gauge(BREAKER_OPEN, view).set(self._breakers[view].is_open)
        self.on_lost()

    def _ask_for(self, model: str) -> None:
        message = "\0".join([model, *list(self._views.get(model, ()))[:MOST_NAMED]])
        # it is gone, and this process with it, or has enough to read
        with contextlib.suppress(OSError):
            self._control.sendto(message.encode(), str(self._runtime / CONTROL))

    def _share(self, view: str, client: str, now: float) -> _Share:
        key = view, client
        if key not in self._shares and len(self._shares) >= MOST_SHARES:
            left = {
                who: one for who, one in self._shares.items() if one.in_flight or now < one.until
            }
            self._shares = defaultdict(_Share, left)
        return self._shares[key]

    def _count(self, view: str, share: _Share, future: Future[Computed]) -> None:
        broken = None if future.cancelled() else _broken(future.exception())
        with self._lock:
            self._in_flight[view] -= 1
            now = time.monotonic()
            share.count(future, now)
            self._breakers[view].count(broken, now)
            is_open = self._breakers[view].is_open
        self._meter.gauge(FALLBACK_QUEUE, view).add(-1)
        self._meter.counter(FALLBACK_ROWS, view, outcome_of(future)).add()
        self._meter.gauge(BREAKER_OPEN, view).set(is_open)


def _broken(error: BaseException | None) -> bool | None:
    """Whether a call shows the model to be broken; None where it was not made, or not waited
    for."""
    if not isinstance(error, Miss):
        return error is not None
    return None if error.reason in (Reason.DEADLINE, Reason.SHED) else error.broken


def _failed(miss: Miss) -> Future[Computed]:
    future: Future[Computed] = Future()
    future.set_exception(miss)
    return future
