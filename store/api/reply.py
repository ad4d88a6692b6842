"""Reply: what a route answers with, as ASGI sends it; and refusals as RFC 9457 problems."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from store.api import wire
from store.encoding.http_freshness import Headers
from store.errors import OnlineStoreError, RequestError, VectorIndexError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stream:
    """A body that is made piece by piece while it is sent; ``close`` is called after, however that ends."""

    pieces: Iterator[bytes | memoryview]
    close: Callable[[], None]


class Reply(NamedTuple):
    """An answer; ``headers`` without Content-Length."""

    status: int
    headers: Headers
    body: bytes | memoryview | Stream = b""


JSON_TYPE = (b"content-type", wire.JSON.encode())
ARROW_TYPE = (b"content-type", wire.ARROW.encode())
RETRY_SOON = (b"retry-after", b"1")
PROBLEM_TYPE = (b"content-type", wire.PROBLEM.encode())


def json_reply(value: Any, status: int = 200) -> Reply:
    """Anything that JSON can carry."""
    return Reply(status, [JSON_TYPE], wire.encode(value))


def problem(status: int, code: str, detail: str, headers: Headers | None = None, **more: Any) -> Reply:
    """A refusal: ``code`` is a stable word for programs, ``detail`` tells a person."""
    body = wire.Problem(f"urn:precompute:problem:{code}", code.replace("_", " "), status, detail, **more)
    return Reply(status, [PROBLEM_TYPE, *(headers or [])], wire.encode(body))


def refusal(exc: Exception, where: str) -> tuple[Reply, str]:
    """Any exception as a problem, and its code; only what nobody foresaw is logged with a traceback.

    Args:
        exc: what a route raised.
        where: method and path, for the log.
    """
    if isinstance(exc, RequestError):
        again = [RETRY_SOON] if exc.status == 503 else None
        return problem(exc.status, str(exc.code), str(exc), again), str(exc.code)
    if isinstance(exc, (OnlineStoreError, VectorIndexError)):
        log.error("%s: %s", where, exc)
        return problem(503, "store_unavailable", str(exc), [RETRY_SOON]), "store_unavailable"
    log.error("%s failed", where, exc_info=exc)
    return problem(500, "internal_error", "an error nobody foresaw; it is in the server's log"), "internal_error"
