"""Reply: what a route answers with, as ASGI sends it; and refusals as RFC 9457 problems."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, NamedTuple

from precompute.store.errors import (
    DamagedPointerError,
    OnlineStoreError,
    RequestError,
    RowsLostError,
    VectorIndexError,
)
from precompute.store.http.encoding.http_freshness import Headers
from precompute.store.http.request import Scope
from precompute.store.wire import bodies

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stream:
    """A body that is made piece by piece while it is sent; ``close`` is called in any case after
    it."""

    pieces: Iterator[bytes | memoryview]
    close: Callable[[], None]


class Reply(NamedTuple):
    """An answer; ``headers`` without Content-Length. A list holds the parts of a large body, which
    are joined once, when it is sent."""

    status: int
    headers: Headers
    body: bytes | memoryview | list[bytes | memoryview] | Stream = b""


JSON_TYPE = (b"content-type", bodies.JSON.encode())
ARROW_TYPE = (b"content-type", bodies.ARROW.encode())
RETRY_SOON = (b"retry-after", b"1")
_LOG_EVERY_S = 10.0
_LONGEST_ROUTE = 120
"""Characters of a route in the log."""
_CACHE_CONTROL = b"cache-control"
NOT_STORED = (_CACHE_CONTROL, b"no-store")
PROBLEM_TYPE = (b"content-type", bodies.PROBLEM.encode())


def json_reply(value: Any, status: int = 200) -> Reply:
    """A JSON answer that no cache may store."""
    return Reply(status, [JSON_TYPE, NOT_STORED], bodies.encode(value))


def problem(
    status: int, code: str, detail: str, headers: Headers | None = None, **more: Any
) -> Reply:
    """A refusal (RFC 9457), which no cache may store: ``code`` is a stable word for programs,
    ``detail`` is for people."""
    body = bodies.Problem(bodies.PROBLEM_URN + code, code.replace("_", " "), status, detail, **more)
    lines = [PROBLEM_TYPE, *(headers or [])]
    if all(name != _CACHE_CONTROL for name, _ in lines):
        lines.append(NOT_STORED)
    return Reply(status, lines, bodies.encode(body))


def refusal(exc: Exception, where: str) -> tuple[Reply, str]:
    """An exception as a problem, and its code; only an unexpected one is logged with a traceback.

    Args:
        exc: what a route raised.
        where: method and path, for the log.
    """
    if isinstance(exc, RequestError):
        again = [RETRY_SOON] if exc.status == 503 else None
        return problem(exc.status, str(exc.code), str(exc), again), str(exc.code)
    # no key is logged: it is often a person's
    route = where.partition("/rows/")[0][:_LONGEST_ROUTE]
    if isinstance(exc, (OnlineStoreError, VectorIndexError)):
        # its message names hosts and files, and is for operators
        log_failure(route, str(exc))
        return (
            problem(
                503,
                "store_unavailable",
                f"{_failing(exc)}; the server's log says why",
                [RETRY_SOON],
            ),
            "store_unavailable",
        )
    log.error("%s failed", route, exc_info=exc)
    return (
        problem(500, "internal_error", "an error nobody foresaw; it is in the server's log"),
        "internal_error",
    )


def _failing(exc: OnlineStoreError | VectorIndexError) -> str:
    if isinstance(exc, VectorIndexError):
        return "the vector index cannot be read"
    if isinstance(exc, (DamagedPointerError, RowsLostError)):
        return "the online store answers, and what is live in it cannot be read, or was lost"
    return "the online store does not answer"


_logged_at: dict[str, float] = {}


def log_failure(route: str, text: str) -> None:
    """Log an error that every request may have, at most every few seconds: a store that is down
    must not fill the disk."""
    now = time.monotonic()
    if now - _logged_at.get(text, -math.inf) >= _LOG_EVERY_S:
        if len(_logged_at) > 100:
            _logged_at.clear()
        _logged_at[text] = now
        log.error("%s: %s", route, text)


class Timing(Flag):
    """Where the times of a request are reported, in both if set."""

    UNREPORTED = 0
    IN_HEADER = auto()
    """``Server-Timing``, in milliseconds."""
    IN_SCOPE = auto()
    """``scope["stages"]``: name → seconds, one after the other."""


def timed(
    scope: Scope, reply: Reply, stages: Mapping[str, float], seconds: float, details: Timing
) -> Reply:
    """The reply, with the times of its stages where ``details`` says so."""
    if details is Timing.UNREPORTED:
        return reply
    if Timing.IN_SCOPE in details:
        scope["stages"] = stages
    if Timing.IN_HEADER not in details:
        return reply
    parts = [f"{name};dur={took * 1e3:.3f}" for name, took in (*stages.items(), ("total", seconds))]
    return reply._replace(headers=[*reply.headers, (b"server-timing", ", ".join(parts).encode())])
