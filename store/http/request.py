"""Request: what a caller sent, read from ASGI's own messages: headers, query, body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from functools import lru_cache
from ipaddress import IPv6Address
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from precompute.store.errors import RequestError
from precompute.store.http.encoding.http_freshness import MOST_PARTS
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import BASE64, FLOAT, LookupOptions

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_T = TypeVar("_T")

_LONGEST_CACHED = 256
"""Bytes of the longest query string or header that is parsed once and cached: a service sends few
different ones, and short ones."""


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
    if not query:
        return _DEFAULT
    return _remembered_options(query) if len(query) <= _LONGEST_CACHED else _options(query)


_DEFAULT = LookupOptions()
_OPTIONS = ("features", "fallback", "deadline_ms", "max_age_s", "encoding_format")


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


_remembered_options = lru_cache(256)(_options)


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
    return (
        _remembered_preference(accept) if len(accept) <= _LONGEST_CACHED else _prefers_arrow(accept)
    )


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


_remembered_preference = lru_cache(256)(_prefers_arrow)
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
