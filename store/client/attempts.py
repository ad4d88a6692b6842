"""Attempts: when a call is retried, and where a server is: TCP, TLS or a Unix socket. There is no
I/O here.

A generator says what to do next, a client does it and sends back what came of it: so the blocking
and the async one decide alike.
"""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from precompute.store.client.calls import Reply, retry_after_s
from precompute.store.errors import ConfigError, PrecomputeError, RequestError
from precompute.store.times import doubled_s

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Pause before a retry, in s: at random up to the first, then up to twice as much each time ("full
jitter", M. Brooker, Exponential Backoff And Jitter, 2015)."""

MOST_TOKENS = 10.0
"""Retries that a client may save up; as in gRPC's example of retry throttling (proposal A6:
maxTokens 10, tokenRatio 0.1)."""


class Failure(NamedTuple):
    """No answer came. ``lost``: the connection ended before there was one, as an idle one does that
    the server closed meanwhile."""

    error: PrecomputeError
    lost: bool = False
    final: bool = False
    """A retry would not help: the time is over."""


Outcome = Reply | Failure


def passing(outcome: Outcome) -> bool:
    """Whether a retry may help: no answer, 429, 503, or a proxy's word that it has none from
    the server."""
    if isinstance(outcome, Failure):
        return not outcome.final
    return outcome.status in (429, 503) or (
        outcome.status in (502, 504) and b"problem" not in (outcome.header(b"content-type") or b"")
    )


class Budget:
    """How many requests may be sent beyond one for each call: every call adds ``share`` of one,
    saved up to :data:`MOST_TOKENS`.

    So a server that fails is called ``1 + share`` times as often as before, and not ``1 +
    retries``.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._tokens = MOST_TOKENS if share > 0 else 0.0
        self._lock = threading.Lock()

    def earn(self) -> None:
        """A call begins."""
        with self._lock:
            self._tokens = min(MOST_TOKENS, self._tokens + self._share)

    def take(self) -> bool:
        """Whether one more request may be sent now, which it is then."""
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


class Attempts:
    """What all calls of a client have in common: their retries.

    Args:
        retries: of one call, at most.
        retry_share: retries of all calls together, as a share of the calls.
    """

    def __init__(
        self,
        retries: int,
        retry_share: float,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._retries, self._uniform = retries, uniform
        self._retry_budget = Budget(retry_share)

    def steps(self, deadline: float) -> Generator[float, Outcome | None, Outcome]:
        """How long to wait before the request is sent, again and again until the outcome of a call
        stands; ``deadline`` by ``time.monotonic``, which no pause goes past."""
        self._retry_budget.earn()
        retries, lost_before, pause_s = 0, False, 0.0
        while True:
            outcome = yield pause_s
            assert outcome is not None
            if not passing(outcome):
                return outcome
            if isinstance(outcome, Failure) and outcome.lost and not lost_before:
                # the server closed a connection that was idle, most likely: no sign that it has too
                # much to do
                lost_before, pause_s = True, 0.0
                continue
            pause_s = self._pause_s(outcome, retries)
            retries += 1
            if (
                retries > self._retries
                or time.monotonic() + pause_s >= deadline
                or not self._retry_budget.take()
            ):
                return outcome

    def _pause_s(self, outcome: Outcome, retries: int) -> float:
        longest = doubled_s(FIRST_PAUSE_S, retries, LONGEST_PAUSE_S)
        server_s = retry_after_s(outcome) if isinstance(outcome, Reply) else None
        # Retry-After is the least; a random pause on top of it spreads clients that were refused
        # together
        return (
            self._uniform(0, longest) if server_s is None else server_s + self._uniform(0, longest)
        )


_HOW = "write http://127.0.0.1:8080, https://host or unix:./api.sock"


@dataclass(frozen=True, slots=True)
class Address:
    """A server's. ``prefix`` stands before every path, where a proxy serves the API below one."""

    text: str
    scheme: str
    host: bytes
    port: int
    prefix: str = ""
    socket_path: str | None = None

    @property
    def host_header(self) -> bytes:
        """As HTTP has it: an IPv6 address in brackets, and the port; of a Unix socket
        ``localhost``."""
        if self.socket_path is not None:
            return b"localhost"
        return b"%s:%d" % (b"[%s]" % self.host if b":" in self.host else self.host, self.port)


def address_of(url: str) -> Address:
    """What ``http://127.0.0.1:8080``, ``https://host/prefix`` or ``unix:./api.sock`` names.

    Raises:
        RequestError: another text.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError as exc:
        raise RequestError(f"{url!r} is no server's address ({exc}): {_HOW}") from exc
    if parts.scheme == "unix" and parts.path:
        return Address(url, "http", b"localhost", 80, socket_path=url.removeprefix("unix:"))
    if (
        parts.scheme not in ("http", "https")
        or not host
        or parts.query
        or parts.fragment
        or parts.username is not None
    ):
        raise RequestError(f"{url!r} is no server's address: {_HOW}")
    return Address(
        url,
        parts.scheme,
        host,
        port or (443 if parts.scheme == "https" else 80),
        parts.path.rstrip("/"),
    )


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of TLS, in PEM: ``ca`` whom to trust in place of the system's authorities;
    ``certificate`` and ``key`` are the client's own, where the server requires one."""

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def context(self) -> ssl.SSLContext:
        """As ``ssl`` wants it: the server's certificate and name are checked, always.

        Raises:
            ConfigError: a file cannot be read, is none of these, or the key is another
                certificate's.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as exc:
            named = ", ".join(
                f"{name} {path}"
                for name in ("ca", "certificate", "key")
                if (path := getattr(self, name)) is not None
            )
            raise ConfigError(f"TLS of the client ({named}): {exc}") from exc
        return context
