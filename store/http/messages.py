"""Messages: what a caller sent, read from ASGI's own messages (headers, query, body); what a route
answers with, as ASGI sends it; and refusals as RFC 9457 problems."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Flag, auto
from functools import lru_cache
from ipaddress import IPv6Address
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from precompute.store.errors import (
    DamagedPointerError,
    OnlineStoreError,
    OtherFormatError,
    RequestError,
    RowsLostError,
    VectorIndexError,
)
from precompute.store.http.encoding.caching import MOST_PARTS, Headers, cached_if_short
from precompute.store.times import Reason
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import BASE64, FLOAT, LookupOptions

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_T = TypeVar("_T")

STRANGER = "precompute.stranger"
"""Key of a scope: whether the caller has no valid token, on a route that needs none; the answer has
no names then."""
TRIED_AT_ONCE = "precompute.tried_at_once"
"""Key of a scope for which what needs not wait was tried already."""


class Disconnected(Exception):
    """The caller closed the connection before the request was complete or answered."""


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """A request's headers by name; a field of several lines is one list (RFC 9110 §5.3)."""
    lines = scope["headers"]
    headers: dict[bytes, bytes] = dict(lines)
    if len(headers) != len(lines):
        headers = {}
        for name, value in lines:
            headers[name] = headers[name] + b", " + value if name in headers else value
    return headers


def client_of(scope: Scope) -> str:
    """The client that a request counts for: the name of its token, else its address; for IPv6 the
    /64 network, which one host may have for itself; empty on a Unix socket."""
    token: str | None = scope.get("token")
    if token is not None:
        return token
    client = scope.get("client")
    if not client:
        return ""
    address: str = client[0]
    return _network(address) if ":" in address else address


@lru_cache(1024)
def _network(address: str) -> str:
    try:
        parsed = IPv6Address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped
    return str(IPv6Address(int(parsed) >> 64 << 64) if mapped is None else mapped)


def query_options(scope: Scope) -> LookupOptions:
    """Lookup options from the query string.

    Raises:
        RequestError: an unknown name, one that is there twice, a value of the wrong type, or out of
            range.
    """
    query: bytes = scope["query_string"]
    return _options(query) if query else _DEFAULT


_DEFAULT = LookupOptions()
_OPTIONS = ("features", "fallback", "deadline_ms", "max_age_s", "encoding_format")


@cached_if_short
def _options(query: bytes) -> LookupOptions:
    try:
        pairs = parse_qsl(
            query.decode("latin-1"), keep_blank_values=True, max_num_fields=len(_OPTIONS)
        )
    except ValueError as exc:
        raise RequestError(
            f"a query has at most {len(_OPTIONS)} parameters: {', '.join(_OPTIONS)}"
        ) from exc
    given = dict(pairs)
    for name in given:
        if name not in _OPTIONS:
            raise RequestError(
                f"there is no query parameter {name[:80]!r} (there are: {', '.join(_OPTIONS)})"
            )
    if len(given) != len(pairs):
        raise RequestError("a query parameter is named twice")
    fallback = given.get("fallback", "true")
    if fallback not in ("true", "false"):
        raise RequestError(f"fallback is true or false, got {fallback[:80]!r}")
    features, encoding = given.get("features"), given.get("encoding_format", FLOAT)
    if encoding not in (FLOAT, BASE64):
        raise RequestError(f"encoding_format is {FLOAT} or {BASE64}, got {encoding[:80]!r}")
    options = LookupOptions(
        features=None if features is None else tuple(name for name in features.split(",") if name),
        fallback=fallback == "true",
        deadline_ms=_number(given, "deadline_ms"),
        max_age_s=_number(given, "max_age_s"),
        encoding_format=encoding,
    )
    # checked here, since a stored row is answered without a lookup
    options.check()
    return options


def _number(given: dict[str, str], name: str) -> float | None:
    if name not in given:
        return None
    try:
        return float(given[name])
    except ValueError as exc:
        raise RequestError(f"{name} is a number, got {given[name][:80]!r}") from exc


def both(body: LookupOptions, query: LookupOptions) -> LookupOptions:
    """The options of body and query together: the stricter limit of both, and the features of the
    query if it names some."""
    if query is _DEFAULT:
        return body
    deadlines = [ms for ms in (body.deadline_ms, query.deadline_ms) if ms is not None]
    ages = [age_s for age_s in (body.max_age_s, query.max_age_s) if age_s is not None]
    return LookupOptions(
        body.features if query.features is None else query.features,
        body.fallback and query.fallback,
        min(deadlines, default=None),
        min(ages, default=None),
        body.inputs,
        BASE64 if BASE64 in (body.encoding_format, query.encoding_format) else FLOAT,
    )


def no_query(scope: Scope) -> None:
    """Raises:
    RequestError: there is a query, and the route takes none.
    """
    if scope["query_string"]:
        raise RequestError("this route has no query parameters")


def wants_arrow(headers: dict[bytes, bytes]) -> bool:
    """Whether ``Accept`` prefers an Arrow stream to JSON, or both alike (RFC 9110 §12.5.1); False
    for a list that is too long."""
    accept = headers.get(b"accept")
    if (
        accept is None
        or _ARROW not in accept
        or accept.count(b",") + accept.count(b";") >= MOST_PARTS
    ):
        return False
    return _prefers_arrow(accept)


@cached_if_short
def _prefers_arrow(accept: bytes) -> bool:
    qualities: dict[bytes, float] = {}
    for part in accept.split(b","):
        kind, *parameters = (piece.strip() for piece in part.split(b";"))
        quality = 1.0
        for parameter in parameters:
            if parameter[:2].lower() == b"q=":
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        qualities[kind.lower()] = quality
    arrow = qualities.get(_ARROW, 0.0)
    json = next((qualities[kind] for kind in _AS_JSON if kind in qualities), 0.0)
    return arrow > 0 and arrow >= json


_ARROW = bodies.ARROW.encode()
_AS_JSON = (bodies.JSON.encode(), b"application/*", b"*/*")


async def hung_up(receive: Receive) -> None:
    """Wait until the caller closes the connection; the body must have been read, or is
    discarded."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(
    call: Coroutine[Any, Any, _T], receive: Receive, give_up: Callable[[], None]
) -> _T:
    """The result of a call, unless the caller closes the connection before.

    Args:
        call: is cancelled then.
        receive: of the request.
        give_up: called then.

    Raises:
        Disconnected: the caller closed the connection.
    """
    answer, watch = asyncio.ensure_future(call), asyncio.ensure_future(hung_up(receive))
    try:
        await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        give_up()
        raise Disconnected
    finally:
        watch.cancel()
        answer.cancel()


async def read_body(
    receive: Receive, headers: dict[bytes, bytes], kinds: tuple[str, ...]
) -> tuple[str, bytes]:
    """(media type, body); one of another type or too large is refused before it is read.

    Raises:
        RequestError: 415 or 413.
        Disconnected: the caller closed the connection.
    """
    kind = body_kind(headers, kinds)
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > bodies.MAX_BODY_BYTES:
        raise _too_large()
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        if not more and not body and len(part) <= bodies.MAX_BODY_BYTES:
            # most come in one piece
            return kind, part
        body += part
        if len(body) > bodies.MAX_BODY_BYTES:
            raise _too_large()
    return kind, bytes(body)


def body_kind(headers: dict[bytes, bytes], kinds: tuple[str, ...]) -> str:
    """The media type of a request's body.

    Raises:
        RequestError: 415, it is none of these, or compressed.
    """
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if kind not in kinds:
        raise RequestError(
            f"send Content-Type {' or '.join(kinds)}, got {kind[:80] or 'none'!r}",
            status=415,
            code="unsupported_media_type",
        )
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if encoding != "identity":
        raise RequestError(
            f"compressed bodies are refused (Content-Encoding: {encoding[:40]})",
            status=415,
            code="unsupported_encoding",
        )
    return kind


def _too_large() -> RequestError:
    return RequestError(
        f"a body has at most {bodies.MAX_BODY_BYTES} bytes", status=413, code="body_too_large"
    )


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
    if isinstance(exc, OtherFormatError):
        log_failure(route, str(exc))
        said = "what is live is of a format that this version of the server does not read"
        code = str(Reason.OTHER_FORMAT)
        return problem(503, code, f"{said}; the server's log says which", [RETRY_SOON]), code
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
