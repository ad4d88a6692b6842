"""Remote fallback: what stands behind a lookup worker's misses: model processes, one for each model that is live, each behind a link."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from precompute.jobs.service.breaker import Breaker
from precompute.jobs.service.model_group import socket_path
from precompute.jobs.service.model_link import ModelLink
from precompute.store.fallback import CLIENT, Computed, Fallback, Miss, outcome_of, places
from precompute.store.online.online_store import Pointer
from precompute.store.status import Reason
from precompute.store.telemetry.instruments import BREAKER_OPEN, FALLBACK_QUEUE, FALLBACK_ROWS, Meter

MOST_IN_FLIGHT = 4096
"""Keys of one view that a worker waits for at once, each client for its share of them; what is asked beyond is shed."""

LEAST_IN_FLIGHT = 64
HELD_BACK_S = 1.0
"""A client of which the process of a model shed keys has twice as many in flight as were not shed, and so many at least, for this long: to hand over, read and refuse
a thousand keys takes both processes 55 ms."""

MOST_SHARES = 256
"""Clients of views that are remembered, before those with nothing in flight are forgotten."""

MOST_TOLD = 8
"""Views that a model process is known by, at most."""

CONTROL = "supervisor.sock"
"""In the runtime folder: where the supervisor is told which models are wanted, a datagram each: its fingerprint and views, with NUL between."""


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
        """Of each model with a link: those it was asked for."""
        self._in_flight: Counter[str] = Counter()
        self._shares: dict[tuple[str, str], _Share] = {}
        """By view, and by view and client."""
        self.on_lost: Callable[[], None] = lambda: None
        """Told when a model process was lost: what was open in it is open no more."""

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
            futures = self._link(pointer).ask(pointer, keys[:taken], given, deadline, query) if taken else []
            self._in_flight[view] += taken
            share.in_flight += taken
        self._meter.gauge(FALLBACK_QUEUE, view).add(taken)
        for future in futures:
            future.add_done_callback(partial(self._landed, view, share))
        if taken < len(keys):
            self._meter.counter(FALLBACK_ROWS, view, str(Reason.SHED)).add(len(keys) - taken)
        return futures + [_shed(retry_s) for _ in keys[taken:]]

    def begin_warm(self, pointer: Pointer, deadline: float) -> Future[Computed]:
        """Have what a pointer names opened; the future always ends in an error, once that was tried or the deadline is over."""
        with self._lock:
            return self._link(pointer).warm(pointer, deadline)

    def ready(self, pointer: Pointer) -> bool:
        """Whether a process has the view open for the pointer's publishing."""
        link = self._links.get(pointer.model)
        return link is not None and link.is_open(pointer)

    def want(self, models: Collection[str]) -> None:
        """Say which models are live: the others' processes may end, once the requests that saw them live are answered."""
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
        """The lock is held until it was asked: none is closed between."""
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
        told = "\0".join([model, *list(self._views.get(model, ()))[:MOST_TOLD]])
        # it is gone, and this process with it, or has enough to read
        with contextlib.suppress(OSError):
            self._control.sendto(told.encode(), str(self._runtime / CONTROL))

    def _share(self, view: str, client: str, now: float) -> _Share:
        share = self._shares.get((view, client))
        if share is None:
            if len(self._shares) >= MOST_SHARES:
                self._shares = {whose: one for whose, one in self._shares.items() if one.in_flight or now < one.until}
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
    """Whether a call shows the model to be broken; None where it was not made, or not waited for."""
    if not isinstance(error, Miss):
        return error is not None
    return None if error.reason in (Reason.DEADLINE, Reason.SHED) else error.broken


def _shed(retry_s: float) -> Future[Computed]:
    future: Future[Computed] = Future()
    future.set_exception(Miss(Reason.SHED, retry_after_s=retry_s))
    return future
