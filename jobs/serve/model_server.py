"""Model server: a process that answers lookup workers' misses by a model, over a Unix socket.
Started by :mod:`precompute.jobs.serve.processes` alone.

A conversation is a connection of one worker: pointers come once each, then the rows to compute
under them; these go back packed, as they are done.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from precompute.engine.resources import keep_freed_memory
from precompute.jobs.serve.fallback import LOAD_S, ViewFallback
from precompute.jobs.serve.live_view import REFUSED_S
from precompute.jobs.serve.processes import STATUS_RESTART, Watch, read_spec
from precompute.store.answers.fallback import CLIENT, Computed, Miss
from precompute.store.doors import TRACES
from precompute.store.errors import PrecomputeError
from precompute.store.http.telemetry.instruments import TRACE, Meter, Tell
from precompute.store.offline.view_store import OfflineStore
from precompute.store.online.miss_cache import MissCacheLimits
from precompute.store.online.online_store import Pointer
from precompute.store.online.url import open_miss_cache
from precompute.store.times import Reason
from precompute.workers.process import be_nicer, framed, read_message

# From a worker:
#   {"compute": [i, …], "view": …, "keys": […], "inputs": {key: …}, "deadline": t, "query": …,
#    "client": whom the request is from, "trace": the traceparent of a request that is traced}
#       body: the view's pointer, where it is another than before on this connection;
#       the key null: open the view; the answer is an error, once that was tried
#   {"cancel": [i, …]}      no request waits for these any more; they are not answered
# To a worker:
#   {"rows": [[i, computed at, bytes], …], "failed": [[i, reason, detail, broken], …],
#    "open": all publishings that are open, where that changed}
#       body: the rows, one after the other

log = logging.getLogger(__name__)

NICER = 3
"""Nice value of this process beside a lookup worker's, also of its scheduling group (session): a
hit is answered before a model goes on, and beside a busy group it has a third of a core, not a
half. With 2 a hit's p99 beside misses was 5 times as long as alone, with 3 and 5 it was 1.4 and 1.0
times; with 5 a lone miss took 2 times as long beside a busy group."""

SPINS = "10000"
"""Times that a compute thread looks for work before it sleeps, about 0.1 ms: longer than from one
layer to the next. GNU's OpenMP has it look 300,000 times, for milliseconds in which those that it
waits for may have no core: beside busy processes on two cores one text took MiniLM 140 to 1,100 ms
(92 to 281 ms of CPU) by that, and 60 to 300 ms (53 to 73 ms of CPU) by this."""

STAND_BY_S = 0.5
"""How often a process that stands by reads what the other one has open."""

MOST_AT_ONCE = 256
"""Rows in one message."""


class Conversation:
    """One worker's connection.

    Args:
        connection: the socket, ours to close.
        fallback: answers.
    """

    def __init__(self, connection: socket.socket, fallback: ViewFallback) -> None:
        self._connection, self._fallback = connection, fallback
        self._pointers: dict[str, Pointer] = {}
        self._outbox: queue.SimpleQueue[tuple[int, Future[Computed]] | None] = queue.SimpleQueue()
        self._reported: list[Any] = []
        self._pending: dict[int, Future[Computed]] = {}
        try:
            for work in (self._read, self._write):
                threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True).start()
        except RuntimeError:
            self._hang_up()
            raise

    def _read(self) -> None:
        try:
            # the worker is gone
            with contextlib.suppress(OSError), self._connection.makefile("rb") as file:
                while (message := read_message(file)) is not None:
                    self._take(*message)
        finally:
            self._cancel(list(self._pending))
            self._outbox.put(None)

    def _take(self, header: Mapping[str, Any], body: pa.Buffer) -> None:
        if "cancel" in header:
            self._cancel(header["cancel"])
            return
        if body.size:
            self._pointers[header["view"]] = Pointer.from_bytes(body.to_pybytes())
        pointer, keys, deadline = self._pointers[header["view"]], header["keys"], header["deadline"]
        TRACE.set(header["trace"])
        CLIENT.set(header["client"])
        if keys == [None]:
            futures = [self._fallback.begin_warm(pointer, deadline)]
        else:
            futures = self._fallback.submit(
                pointer, keys, header["inputs"], deadline, query=header["query"]
            )
        for number, future in zip(header["compute"], futures, strict=True):
            self._pending[number] = future
            future.add_done_callback(partial(self._done, number))

    def _cancel(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            future = self._pending.get(number)
            if future is not None:
                future.cancel()

    def _done(self, number: int, future: Future[Computed]) -> None:
        self._pending.pop(number, None)
        if not future.cancelled():
            self._outbox.put((number, future))

    def _hang_up(self) -> None:
        """End the connection for both threads, and for the worker: half a conversation would leave
        it waiting for every answer."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _write(self) -> None:
        with contextlib.ExitStack() as at_end, contextlib.suppress(OSError):
            at_end.callback(self._hang_up)
            while (answer := self._outbox.get()) is not None:
                answers = [answer]
                while not self._outbox.empty() and len(answers) < MOST_AT_ONCE:
                    if (answer := self._outbox.get()) is None:
                        return
                    answers.append(answer)
                self._send(answers)

    def _send(self, answers: list[tuple[int, Future[Computed]]]) -> None:
        rows, failed, data = [], [], []
        for number, future in answers:
            if (error := future.exception()) is None:
                computed = future.result()
                rows.append((number, computed.computed_at_us, len(computed.row)))
                data.append(computed.row)
            else:
                if not isinstance(error, Miss):
                    error = Miss(Reason.MODEL_ERROR, str(error), broken=True)
                failed.append((number, str(error.reason), str(error), error.broken))
        header: dict[str, Any] = {"rows": rows, "failed": failed}
        if (opened := self._fallback.open_publishings()) != self._reported:
            header["open"] = self._reported = opened
        body = b"".join(data)
        self._connection.sendall(framed(header, len(body)) + body)


def _write_open(path: Path, fallback: ViewFallback) -> None:
    """Write what is open, for the process that stands by: pointers, a line each."""
    temporary = path.with_suffix(".coming")
    temporary.write_bytes(b"\n".join(pointer.to_bytes() for pointer in fallback.open_pointers()))
    temporary.replace(path)


def _stand_by(
    fallback: ViewFallback,
    open_list: Path,
    orders: queue.SimpleQueue[dict[str, Any]],
    watch: Watch,
) -> dict[str, Any]:
    """Open what the process that serves has open, until this one is to serve; returns what it is
    sent then."""
    opening: dict[tuple[str, tuple[int, str]], Future[Computed]] = {}
    while True:
        pointers = {}
        # nothing is open yet, or the disk was full
        with contextlib.suppress(OSError):
            lines = open_list.read_bytes().splitlines()
            pointers = {(p.view.name, p.publishing): p for p in map(Pointer.from_bytes, lines)}
        # what could not be opened is tried again when it is requested
        opening = {which: future for which, future in opening.items() if which in pointers}
        for which in pointers.keys() - opening.keys():
            opening[which] = fallback.begin_warm(pointers[which], time.monotonic() + LOAD_S)
        watch.is_open = watch.is_open or any(
            future.done() and fallback.ready(pointers[which]) for which, future in opening.items()
        )
        with contextlib.suppress(queue.Empty):
            return orders.get(timeout=STAND_BY_S)


def _report_until_useless(
    fallback: ViewFallback, meter: Meter, open_list: Path, watch: Watch
) -> None:
    """Report every second what the process uses. End it, to be restarted, when its GPU is lost, or
    when the models that it loaded were refused for :data:`REFUSED_S`: the files on disk may be the
    live ones by now, and only a new process imports modules again."""
    since, written = math.inf, list[Any]()
    while time.monotonic() - since < REFUSED_S and not fallback.gpu_is_lost():
        time.sleep(1.0)
        publishings = fallback.open_publishings()
        watch.is_open = bool(publishings)
        try:
            meter.process_figures()
            fallback.try_postponed()
            if publishings != written:
                # a full disk is reported elsewhere
                with contextlib.suppress(OSError):
                    _write_open(open_list, fallback)
                    written = publishings
        except Exception:
            # what ends the process, where it must, does not depend on this
            log.exception("what is done every second failed")
        since = min(since, time.monotonic()) if fallback.refused() else math.inf
    why = (
        "its GPU computes nothing more in this one"
        if fallback.gpu_is_lost()
        else "the files on disk may be the live snapshot's by now"
    )
    log.warning("the model is loaded once more, in a new process: %s", why)
    os._exit(STATUS_RESTART)


def _meter(spec: Mapping[str, Any]) -> Meter:
    try:
        return Meter(Path(spec["runtime"]), spec["process"])
    except PrecomputeError as exc:
        # a disk that is full is no reason to compute nothing
        log.error("nobody reports what this process counts: %s", exc)
        return Meter()


def _tells(spec: Mapping[str, Any]) -> list[Tell]:
    return [TRACES.open(name)(of, spec["process"]).tell for name, of in spec["traces"].items()]


def main() -> None:
    """Serve until the supervisor ends it."""
    spec, orders = read_spec()
    # before any library starts its threads
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    be_nicer(NICER)
    # without this 32 texts cost a MiniLM thread 4,000 page faults and 7 % of its time
    keep_freed_memory()
    watch = Watch.of(spec["watch"])
    threading.Thread(target=watch.pulse, name="pulse", daemon=True).start()
    meter, open_list = _meter(spec), Path(spec["open"])
    fallback = ViewFallback(
        OfflineStore(Path(spec["root"])),
        Path(spec["folder"]),
        spec["duckdb_mb"],
        open_miss_cache(spec["online"], MissCacheLimits(**spec["miss_cache"])),
        watch,
        meter,
        _tells(spec),
    )
    order = spec if spec["serves"] else _stand_by(fallback, open_list, orders, watch)
    fallback.suspects = dict(order["suspects"])
    threading.Thread(
        target=_report_until_useless,
        args=(fallback, meter, open_list, watch),
        name="report",
        daemon=True,
    ).start()
    listener = socket.socket(fileno=spec["listeners"][0])
    while True:
        try:
            Conversation(listener.accept()[0], fallback)
        except (OSError, RuntimeError) as exc:
            # no descriptors, or no threads: what is being computed is worth more than this one
            log.error("a worker's connection cannot be taken now: %s", exc)
            time.sleep(1.0)


if __name__ == "__main__":
    main()
