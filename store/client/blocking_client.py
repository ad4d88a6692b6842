"""Blocking client: for threads and scripts."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from precompute.store.api import wire
from precompute.store.client import calls
from precompute.store.client.attempts import (
    Attempts,
    Failure,
    Outcome,
    Pause,
    Tls,
    address_of,
    passing,
)
from precompute.store.client.calls import (
    Call,
    FreshnessWords,
    LookupWords,
    RowWords,
    SearchWords,
    ServiceWords,
    check_timeout,
)
from precompute.store.client.transport import BlockingTransport, Exchange

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class Client:
    """Talks to one server; share it between threads, close it at the end. A process that is forked
    opens connections of its own.

    Every call has one time limit for all of it: finding the host, waiting for a connection,
    sending, the answer's last byte, and asking again. All calls only read, so asking again is safe:
    at once where a connection was lost, after a pause, at random, where the server refuses for now
    or cannot be reached, never before ``Retry-After``, never past the limit, and all calls together
    no more often than ``retry_share`` allows.

    Args:
        url: ``http://127.0.0.1:8080``, ``https://host`` or ``unix:./api.sock``.
        timeout_s: of a call that names none.
        token: shown to the server, without the white space around it (a file's last newline); a
            function is called before each request, for a token that changes.
        tls: whom to trust with ``https``, and who one is; the system's authorities by default.
        connections: open at once, at most; further calls wait their turn, within their time.
        retries: times that one call asks again, at most.
        retry_share: how much asking again may add to all requests, as a share of the calls.
        hedge_share: the same of asking a second time beside a request that takes longer than 19 of
            20 like it, to take the answer that comes first: less waiting for the slowest, for so
            much more work of the server. 0.05 is a good value; 0 (the default) never does.

    Raises:
        RequestError: the URL is none of these, ``timeout_s`` no time limit, or the token none that
            a header can carry.
        ConfigError: a file of ``tls``.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        timeout_s: float = 10.0,
        *,
        token: str | Callable[[], str] | None = None,
        tls: Tls | None = None,
        connections: int = 64,
        retries: int = 2,
        retry_share: float = 0.1,
        hedge_share: float = 0.0,
    ) -> None:
        address = address_of(url)
        self._url, self._timeout_s = url, check_timeout(timeout_s)
        self._transport = BlockingTransport(
            address,
            token,
            connections,
            (tls or Tls()).context() if address.scheme == "https" else None,
        )
        self._attempts = Attempts(retries, retry_share, hedge_share)
        self._connections = connections
        self._threads: ThreadPoolExecutor | None = None
        self._lock, self._pid = threading.Lock(), os.getpid()

    def get(self, view: str, keys: Iterable[Any], **words: Unpack[LookupWords]) -> pa.Table:
        """As :meth:`precompute.store.lookup.Lookup.get`, over HTTP and Arrow; ``keys`` may be of
        numpy, pandas or pyarrow.

        ``.to_pandas()`` makes a DataFrame of it, and :func:`precompute.store.client.tables.arrays`
        numpy arrays.

        Raises:
            RequestError: the server refused, with its status and code.
            NoAnswerError: no answer, or none that can be read; of it DeadlineError: none in time,
                and OverloadedError: not now.
            OnlineStoreError: the server's store does not answer.
        """
        return self._ask(calls.table(view, keys, words))

    def rows(
        self, view: str, keys: Iterable[Any], **words: Unpack[LookupWords]
    ) -> wire.LookupAnswer:
        """As :meth:`get`, as typed rows in the order of the keys, without Arrow."""
        return self._ask(calls.rows(view, keys, words))

    def row(self, view: str, key: Any, **words: Unpack[RowWords]) -> wire.ViewRow:
        """One row.

        Raises:
            MissingRowError: there is none; ``code`` is the reason.
            PrecomputeError: as :meth:`get`.
        """
        return self._ask(calls.row(view, key, words))

    def several(
        self,
        requests: Sequence[wire.ViewLookupRequest],
        timeout_s: float | None = None,
        **words: Unpack[FreshnessWords],
    ) -> list[wire.ViewAnswer]:
        """Lookups of several views in one call, answered in their order: each has its ``rows``, or
        the ``problem`` that this view has; ``words`` hold for all of them."""
        return self._ask(calls.several(requests, timeout_s, words))

    def service(self, service: str, entities: Any, **words: Unpack[ServiceWords]) -> pa.Table:
        """As :meth:`precompute.store.lookup.Lookup.service`, over HTTP and Arrow; ``entities`` are
        columns, as a mapping or a table has them, all of which are sent.

        Raises:
            PrecomputeError: as :meth:`get`.
        """
        return self._ask(calls.service_table(service, entities, words))

    def service_rows(
        self, service: str, entities: Any, **words: Unpack[ServiceWords]
    ) -> wire.ServiceAnswer:
        """As :meth:`service`, as typed rows in the order of the entities, without Arrow."""
        return self._ask(calls.service_rows(service, entities, words))

    def search(self, view: str, **words: Unpack[SearchWords]) -> wire.SearchAnswer:
        """As :meth:`precompute.store.lookup.Lookup.search`."""
        return self._ask(calls.search(view, words))

    def views(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """As :meth:`precompute.store.lookup.Lookup.views`."""
        return self._ask(calls.views(timeout_s))

    def close(self) -> None:
        """Close the connections."""
        if self._threads is not None:
            self._threads.shutdown()
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, call: Call[T]) -> T:
        deadline = call.deadline(self._timeout_s)
        with contextlib.closing(self._attempts.ask(call.kind, deadline)) as steps:
            outcome: Outcome | None = None
            while True:
                try:
                    step = steps.send(outcome)
                except StopIteration as done:
                    outcome = done.value
                    break
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                    outcome = None
                elif step.hedge_after_s is None:
                    outcome = self._transport.send(call, Exchange(deadline))
                else:
                    outcome = self._hedged(call, deadline, step.hedge_after_s)
        if isinstance(outcome, Failure):
            raise outcome.error
        assert outcome is not None
        return call.answer(outcome, self._url)

    def _hedged(self, call: Call[T], deadline: float, after_s: float) -> Outcome:
        """The first good outcome of a request and, where that takes long, of a second one; the
        other is ended."""
        exchanges: dict[Future[Outcome], Exchange] = {}

        def send() -> None:
            exchange = Exchange(deadline)
            exchanges[self._executor().submit(self._transport.send, call, exchange)] = exchange

        send()
        try:
            _, waiting = wait(exchanges, after_s)
            if waiting and self._attempts.may_hedge():
                send()
            outcomes = list[Outcome]()
            waiting = set(exchanges)
            while waiting and all(map(passing, outcomes)):
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                outcomes += [one.result() for one in done]
        finally:
            for one, exchange in exchanges.items():
                if not one.done():
                    exchange.cancel()
        return next((outcome for outcome in outcomes if not passing(outcome)), outcomes[0])

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None or self._pid != os.getpid():
                # the threads of a process are not in those that are forked of it
                self._pid, self._threads = (
                    os.getpid(),
                    ThreadPoolExecutor(2 * self._connections, "precompute-client"),
                )
            return self._threads
