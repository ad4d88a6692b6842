"""Lookup worker: a process that answers the HTTP API from the online store and the indexes; misses
go to model processes. No model is ever loaded here. What is live is opened before it is requested.

Started by :mod:`precompute.jobs.serve.server` alone. It shares the listening sockets
with the other workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from precompute.jobs.serve.processes import DRAIN_S, Watch, read_spec
from precompute.jobs.serve.remote_fallback import RemoteFallback
from precompute.store.answers.lookup import Lookup
from precompute.store.answers.service import Service
from precompute.store.disk.record import replace
from precompute.store.doors import TRACES
from precompute.store.errors import PrecomputeError
from precompute.store.http.app import create_app
from precompute.store.http.encoding.caching import Caching
from precompute.store.http.guard.access import AccessControl, Hosts
from precompute.store.http.guard.connections import credentials_of, tls_of, tokens_of
from precompute.store.http.guard.limits import Limits
from precompute.store.http.guard.server import GuardedServer
from precompute.store.http.messages import Timing
from precompute.store.http.metrics import LiveViews
from precompute.store.http.telemetry.access_log import AccessLog
from precompute.store.http.telemetry.instruments import Meter, Tracer
from precompute.store.offline.view_store import OfflineStore
from precompute.store.online.miss_cache import MissCacheLimits
from precompute.store.online.online_store import Pointer
from precompute.store.online.url import open_miss_cache, open_online_store
from precompute.store.times import parsed_time

log = logging.getLogger(__name__)

_THRESHOLDS = 50_000, 50, 100
"""New objects before the garbage collector goes through the young, and how often before the
older."""
_KEPT_BYTES, _MAPPED_BYTES = 128 * 2**20, 32 * 2**20
"""Free memory that is kept for the next request, and the size from which a piece is mapped for
itself."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt`` (man 3 mallopt)."""


def settle() -> None:
    """Set the garbage collector and the allocator for a process that only answers from now on.

    Call it once, when all that stays is loaded and before the first request.

    The garbage collector never goes through what is there by now again, and seldom through the
    rest: few requests leave cycles, and going through all takes tens of milliseconds. Freed
    memory stays with the process: else an answer of a megabyte is 200 pages that the system clears
    and maps each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # no harm where it is another libc's, which knows other numbers and says so
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


WARM_EVERY_S = 5.0
"""How often new publishings are looked for."""

AGAIN_S = 30.0
"""Seconds before what could not be opened is tried once more: loading takes seconds, and weights
that are not there yet may come."""

OPEN_S = 600.0
"""How long opening may take: see :data:`precompute.jobs.serve.fallback.LOAD_S`."""

COMING_S = 1800.0
"""How old a snapshot may be and still be expected to be published; an older one was refused by a
gate."""


class Models(Protocol):
    """The models behind the misses, as
    :class:`precompute.jobs.serve.remote_fallback.RemoteFallback` has them."""

    def begin_warm(self, pointer: Pointer, deadline: float) -> Future[Any]:
        """Have what a pointer names opened."""

    def ready(self, pointer: Pointer) -> bool:
        """Whether the pointer's view is open."""


@dataclass(slots=True)
class _Opening:
    """How far a view's publishing is opened; the times are when to try again, monotonic, infinity
    once it need not be."""

    publishing: tuple[int, str]
    index_at: float = 0.0
    model_at: float = 0.0
    future: Future[Any] | None = None


class Warmer:
    """Opens what is live, in a thread of its own. ``warming`` is true until all that was live at
    first is open, or could not be opened.

    Args:
        lookup: whose indexes are opened.
        models: behind its misses.
        announce: called again and again with which models are live, or about to be.
        offline: where what is computed is seen before it is live: another model is loaded by then.
    """

    def __init__(
        self,
        lookup: Lookup,
        models: Models,
        announce: Callable[[set[str]], None] = lambda models: None,
        offline: OfflineStore | None = None,
    ) -> None:
        self._lookup, self._models, self._offline = lookup, models, offline
        self._announce = announce
        self._views = LiveViews(lookup)
        self._live: dict[str, _Opening] = {}
        self._coming_views: dict[str, _Opening] = {}
        self._stop, self._woken = False, threading.Event()
        self.warming = True
        self._thread = threading.Thread(target=self._loop, name="warmer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Begin a round now: what was open may be closed."""
        self._woken.set()

    def stop(self) -> None:
        """End after the round in progress."""
        self._stop = True
        self._woken.set()
        self._thread.join(timeout=30)

    def _loop(self) -> None:
        with contextlib.suppress(PrecomputeError):
            # a store that does not answer is reported by what reads it
            self._lookup.online.warm()
        while not self._stop:
            self._woken.clear()
            try:
                self._round()
            except Exception:
                # an index that is there no more, no file left to be opened: it is tried again, for
                # all views depend on this thread
                log.exception("looking for new snapshots failed")
            self.warming = self.warming and any(
                s.future is not None and not s.future.done() for s in self._live.values()
            )
            self._woken.wait(WARM_EVERY_S)

    def _round(self) -> None:
        seen = self._views.read()
        if seen.unreadable or not seen.store_answers:
            log.warning(
                "what is live of %s cannot be read: it is taken to be what it was",
                ", ".join(sorted(seen.unreadable)) or "any view",
            )
        # the last known ones of views that cannot be read, too: their models must not be ended
        # meanwhile
        pointers = seen.pointers
        with_fallback = [pointer for pointer in pointers if pointer.view.fallback]
        coming = [new for pointer in with_fallback if (new := self._coming(pointer)) is not None]
        self._announce({pointer.miss_model for pointer in (*with_fallback, *coming)})
        # all models first: each is loaded by a process of its own, while the indexes are opened
        # here
        for pointer in pointers:
            known = self._noted(self._live, pointer, f" is live, {pointer.rows} rows")
            if pointer.view.fallback:
                self._open_model(pointer, known)
        for pointer in coming:
            known = self._noted(
                self._coming_views, pointer, ", by another model, is about to be live"
            )
            self._open_model(pointer, known)
        for pointer in pointers:
            if not self._stop:
                self._open_index(pointer, self._live[pointer.view.name])

    def _noted(self, known: dict[str, _Opening], pointer: Pointer, what: str) -> _Opening:
        """What is known of the pointer's publishing; of one that is new it is logged what it is."""
        name = pointer.view.name
        if name not in known or known[name].publishing != pointer.publishing:
            known[name] = _Opening(pointer.publishing)
            log.info("view %r: snapshot %d%s", name, pointer.snapshot, what)
        return known[name]

    def _coming(self, live: Pointer) -> Pointer | None:
        """What was computed since by another model and may be published soon, as its pointer might
        be; None where nothing was."""
        if self._offline is None:
            return None
        store = self._offline.view(live.view.name)
        try:
            newest = max(store.numbers(), default=0)
            if newest <= live.snapshot:
                return None
            snapshot = store.snapshot(newest)
        except (OSError, PrecomputeError) as exc:
            log.warning("cannot look for new snapshots: %s", exc)
            return None
        created = parsed_time(snapshot.created_at)
        over = created is None or (datetime.now(UTC) - created).total_seconds() > COMING_S
        if over or not snapshot.view.fallback:
            return None
        coming = replace(
            live,
            view=snapshot.view,
            snapshot=newest,
            epoch=live.epoch + 1,
            model=snapshot.model,
            at=snapshot.created_at,
            input_columns=dict(snapshot.input_columns),
            inputs=dict(snapshot.inputs),
            partition=snapshot.partition,
            substitute=snapshot.substitute,
        )
        return None if coming.miss_model == live.miss_model else coming

    def _open_model(self, pointer: Pointer, opening: _Opening) -> None:
        now = time.monotonic()
        if self._models.ready(pointer):
            # once it is lost it is opened again at once
            opening.model_at = 0.0
        elif now >= opening.model_at and (opening.future is None or opening.future.done()):
            opening.model_at = now + AGAIN_S
            try:
                opening.future = self._models.begin_warm(pointer, now + OPEN_S)
            except (OSError, RuntimeError) as exc:
                # no descriptors, or no threads
                log.error("the model of view %r cannot be warmed up: %s", pointer.view.name, exc)
                return
            opening.future.add_done_callback(lambda _: self._woken.set())

    def _open_index(self, pointer: Pointer, opening: _Opening) -> None:
        if time.monotonic() < opening.index_at:
            return
        try:
            self._lookup.warm(pointer)
            opening.index_at = math.inf
        except (OSError, PrecomputeError) as exc:
            log.error("view %r is not searchable: %s", pointer.view.name, exc)
            opening.index_at = time.monotonic() + AGAIN_S


END_S = 2.0
"""How long a worker may take to end, once all is answered."""


def main() -> None:
    """Serve until SIGTERM, then finish the requests at hand."""
    spec, _ = read_spec()
    # the least that Python allows: to read a number of 4,000 digits takes 80 µs, and a body holds a
    # thousand
    sys.set_int_max_str_digits(640)
    meter, watch = Meter(Path(spec["runtime"]), f"worker-{spec['number']}"), Watch.of(spec["watch"])
    fallback = RemoteFallback(Path(spec["runtime"]), meter)
    with (
        contextlib.closing(fallback),
        contextlib.closing(open_online_store(spec["online"])) as online,
    ):
        miss_cache = open_miss_cache(spec["online"], MissCacheLimits(**spec["miss_cache"]))
        services = map(Service.from_json, json.loads(Path(spec["services"]).read_text()))
        lookup = Lookup(
            online, Path(spec["root"]), fallback, miss_cache=miss_cache, services=services
        )
        warmer = Warmer(lookup, fallback, fallback.announce_live, OfflineStore(Path(spec["root"])))
        fallback.on_lost = warmer.wake
        try:
            listening = [socket.socket(fileno=number) for number in spec["listeners"]]
            tokens = tokens_of(spec)
            # with tokens or TLS no check of host names: a foreign page has neither a token nor our
            # certificate
            hosts = Hosts(spec["hosts"]) if tokens is None and spec["tls"] is None else None
            access = AccessControl(
                meter, tokens, listening[1].getsockname() if len(listening) > 1 else None, hosts
            )
            limits = Limits(**spec["limits"])
            timing = (Timing.IN_HEADER if spec["server_timing"] else Timing.UNREPORTED) | (
                Timing.IN_SCOPE if spec["traces"] else Timing.UNREPORTED
            )
            app = create_app(
                lookup,
                lambda: warmer.warming,
                fallback.ready,
                access,
                meter,
                answer_bytes=limits.answer_bytes,
                cache_bytes=spec["cache_bytes"],
                timing=timing,
                credentials=credentials_of(spec),
                caching=Caching(**spec["caching"]),
                waiting=max(1, limits.connections * 2 // 3),
            )
            with contextlib.ExitStack() as stack:
                on_tick = [] if tokens is None else [tokens.refresh]
                application = _with_telemetry(app, spec, on_tick, stack)
                server = GuardedServer(
                    application,
                    limits,
                    meter,
                    tls_of(spec),
                    DRAIN_S,
                    app.waits_until,
                    partial(_end_now, stack),
                )
                # from the loop that answers: one that stands still shows no life
                server.connections.on_tick += [watch.beat, *on_tick]
                # pyarrow imports pandas, where there is one, with the first array that it makes:
                # 0.27 s of CPU, for which a first request, and all beside it, would wait
                pa.array([0])
                settle()
                server.run(sockets=listening)
                _end_soon()
        finally:
            warmer.stop()


def _end_soon() -> None:
    """All is answered: end soon, whatever still hangs in a store or while it is closed."""
    end = threading.Timer(END_S, os._exit, (0,))
    end.daemon = True
    end.start()


def _end_now(stack: contextlib.ExitStack) -> None:
    """End at once, since some requests cannot be answered: the threads that they wait for hang."""
    _end_soon()
    stack.close()
    os._exit(0)


def _with_telemetry(
    app: Any, spec: dict[str, Any], on_tick: list[Callable[[], None]], stack: contextlib.ExitStack
) -> Any:
    """The application with tracing and access log, where they are configured; ``on_tick`` gets what
    must be called regularly, ``stack`` what must be called at the end."""
    name = f"worker-{spec['number']}"
    for key, of in spec["traces"].items():
        tracer: Tracer = TRACES.open(key)(of, name)
        stack.callback(tracer.close)
        app = tracer.traced(app)
    if spec["access_log"] is not None:
        lines = AccessLog(
            app, None if spec["access_log"] == "-" else Path(spec["access_log"]), name
        )
        on_tick.append(lines.flush)
        stack.callback(lines.flush)
        app = lines
    return app


if __name__ == "__main__":
    main()
