"""Lookup worker: a process that answers the HTTP API from the online store and the indexes; misses go to model processes. No model is ever loaded here.

Started by :mod:`precompute.jobs.service.supervisor`, and by nobody else. It shares the listening sockets with the other workers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from precompute.jobs.process.memory import settle
from precompute.jobs.service.child import DRAIN_S, begin
from precompute.jobs.service.kept_process import Watch
from precompute.jobs.service.remote_fallback import RemoteFallback
from precompute.jobs.service.warmer import Warmer
from precompute.store.api.app import create_app
from precompute.store.api.timing import Timing
from precompute.store.encoding.http_freshness import Caching
from precompute.store.guard.access import asked_of, tls_of, tokens_of
from precompute.store.guard.gate import Gate
from precompute.store.guard.hosts import Hosts
from precompute.store.guard.limits import Limits
from precompute.store.guard.server import GuardedServer
from precompute.store.kept.kept_rows import KeptLimits
from precompute.store.lookup import Lookup
from precompute.store.offline.view_store import OfflineStore
from precompute.store.online_url import open_kept_rows, open_online_store
from precompute.store.telemetry.access_log import AccessLog
from precompute.store.telemetry.instruments import Meter

END_S = 2.0
"""How long a worker may take to end, once all is answered."""


def main() -> None:
    """Serve until SIGTERM, then finish the requests at hand."""
    spec = begin()
    # the least there may be: a number of 4,000 takes 80 µs to read, and a body holds a thousand
    sys.set_int_max_str_digits(640)
    meter, watch = Meter(Path(spec["runtime"]), f"worker-{spec['number']}"), Watch(spec["watch"])
    fallback = RemoteFallback(Path(spec["runtime"]), meter)
    with contextlib.closing(fallback), contextlib.closing(open_online_store(spec["online"])) as online:
        kept = open_kept_rows(spec["online"], KeptLimits(**spec["kept"]))
        lookup = Lookup(online, Path(spec["root"]), fallback, kept=kept)
        warmer = Warmer(lookup, fallback, fallback.want, OfflineStore(Path(spec["root"])))
        fallback.on_lost = warmer.look
        try:
            listening = [socket.socket(fileno=number) for number in spec["listeners"]]
            tokens = tokens_of(spec)
            # a page has no token of another name's, and no certificate for its own
            hosts = Hosts(spec["hosts"]) if tokens is None and spec["tls"] is None else None
            gate = Gate(meter, tokens, listening[1].getsockname() if len(listening) > 1 else None, hosts)
            limits = Limits(**spec["limits"])
            timing = (Timing.IN_HEADER if spec["server_timing"] else Timing.NOT_TOLD) | (
                Timing.IN_SCOPE if spec["tracing"] else Timing.NOT_TOLD
            )
            app = create_app(
                lookup,
                lambda: warmer.warming,
                fallback.ready,
                gate,
                meter,
                answer_bytes=limits.answer_bytes,
                cache_bytes=spec["cache_bytes"],
                timing=timing,
                asks=asked_of(spec),
                caching=Caching(**spec["caching"]),
                waiting=max(1, limits.connections * 2 // 3),
            )
            with contextlib.ExitStack() as stack:
                looks = [] if tokens is None else [tokens.look]
                watched = _watched(app, spec, looks, stack)
                server = GuardedServer(watched, limits, meter, tls_of(spec), DRAIN_S, app.waits_until, partial(_end_now, stack))
                # from the loop that answers: one that stands still shows no life
                server.connections.on_tick += [lambda: watch.beat(time.monotonic()), *looks]
                # pyarrow imports pandas, where there is one, with the first array that it makes: 0.27 s of CPU, for which a first request, and all beside it, would wait
                pa.array([0])
                settle()
                server.run(sockets=listening)
                _end_soon()
        finally:
            warmer.stop()


def _end_soon() -> None:
    """All is answered: whatever hangs in a store by now, or while it is closed, is waited for by nobody."""
    end = threading.Timer(END_S, os._exit, (0,))
    end.daemon = True
    end.start()


def _end_now(stack: contextlib.ExitStack) -> None:
    """Some cannot be answered: the threads that they wait for are never through."""
    _end_soon()
    stack.close()
    os._exit(0)


def _watched(app: Any, spec: dict[str, Any], looks: list[Callable[[], None]], stack: contextlib.ExitStack) -> Any:
    """The application, its requests traced and written down where that is configured; ``looks`` gets what is to be done now and then, the stack what ends it."""
    name = f"worker-{spec['number']}"
    if spec["tracing"] is not None:
        # the extra [otel]
        from precompute.store.telemetry.tracing import Spans, Tracing

        spans = Spans(spec["tracing"]["endpoint"], spec["tracing"]["sample"], name)
        stack.callback(spans.close)
        app = Tracing(app, spans)
    if spec["access_log"] is not None:
        lines = AccessLog(app, None if spec["access_log"] == "-" else Path(spec["access_log"]), name)
        looks.append(lines.flush)
        stack.callback(lines.flush)
        app = lines
    return app


if __name__ == "__main__":
    main()
