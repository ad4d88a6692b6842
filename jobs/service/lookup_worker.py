"""Lookup worker: a process that answers the HTTP API from the online store and the indexes; misses go to model processes. No model is ever loaded here.

Started by :mod:`jobs.service.supervisor`, and by nobody else. It shares the listening sockets with the other workers.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from jobs.process.memory import settle
from jobs.service.child import DRAIN_S, begin
from jobs.service.remote_fallback import RemoteFallback
from jobs.service.warmer import Warmer
from store.api.app import create_app
from store.guard.access import tls_of, tokens_of
from store.guard.gate import Gate
from store.guard.limits import Limits
from store.guard.server import GuardedServer
from store.kept.kept_rows import KeptLimits
from store.lookup import Lookup
from store.offline.view_store import OfflineStore
from store.online_url import open_kept_rows, open_online_store
from store.telemetry.instruments import Meter


def main() -> None:
    """Serve until SIGTERM, then finish the requests at hand."""
    spec = begin()
    meter = Meter(Path(spec["runtime"]), f"worker-{spec['number']}")
    fallback = RemoteFallback(Path(spec["runtime"]), meter)
    with contextlib.closing(fallback), contextlib.closing(open_online_store(spec["online"])) as online:
        kept = open_kept_rows(spec["online"], KeptLimits(**spec["kept"]))
        lookup = Lookup(online, Path(spec["root"]), fallback, kept=kept)
        warmer = Warmer(lookup, fallback, fallback.want, OfflineStore(Path(spec["root"])))
        fallback.on_lost = warmer.look
        try:
            listening = [socket.socket(fileno=number) for number in spec["listeners"]]
            tokens = tokens_of(spec)
            gate = Gate(meter, tokens, listening[1].getsockname() if len(listening) > 1 else None)
            limits = Limits(**spec["limits"])
            app = create_app(lookup, lambda: warmer.warming, fallback.ready, gate, meter, limits.answer_bytes)
            server = GuardedServer(app, limits, meter, tls_of(spec), int(DRAIN_S))
            if tokens is not None:
                server.connections.on_tick.append(tokens.look)
            settle()
            server.run(sockets=listening)
        finally:
            warmer.stop()


if __name__ == "__main__":
    main()
