"""Caller: the request that work of other threads and processes is done for: its trace, route and
view. Nothing of OpenTelemetry is here, which is installed only where traces are wanted."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

TRACE: ContextVar[str | None] = ContextVar("trace", default=None)
"""``traceparent`` (W3C Trace Context) of the request that is worked on."""


class Caller(NamedTuple):
    """The request that work is done for, and when that work was handed on (ns since 1970)."""

    trace: str
    at_ns: int

    @classmethod
    def now(cls) -> Caller | None:
        """The caller of work for the current request; None where that is not traced."""
        trace = TRACE.get()
        return None if trace is None else cls(trace, time.time_ns())


_VIEWS = b"/v1/views/"
_OF_A_VIEW = {b"lookup": "/v1/views/{view}/lookup", b"search": "/v1/views/{view}/search"}
_SERVICES = b"/v1/services/"
_FIXED = {
    path.encode(): path
    for path in (
        "/",
        "/v1/views",
        "/v1/services",
        "/v1/lookup",
        "/livez",
        "/readyz",
        "/metrics",
        "/openapi.json",
    )
}
OTHER = "other"
"""What is no route of the API."""


def route_of(scope: dict[str, Any]) -> tuple[str, str | None]:
    """(route, view) of an ASGI scope: ``("/v1/views/{view}/rows/{key}", "numbers")``; the view, or
    the service, as it was requested, cut at 63 characters."""
    path: bytes = scope["raw_path"]
    if path.startswith(_SERVICES) and b"/" not in (name := path[len(_SERVICES) :]):
        return "/v1/services/{service}", unquote_to_bytes(name).decode(errors="replace")[:63]
    if not path.startswith(_VIEWS):
        return _FIXED.get(path, OTHER), None
    name, _, rest = path[len(_VIEWS) :].partition(b"/")
    view = unquote_to_bytes(name).decode(errors="replace")[:63]
    if rest.startswith(b"rows/"):
        return "/v1/views/{view}/rows/{key}", view
    route = _OF_A_VIEW.get(rest)
    return (OTHER, None) if route is None else (route, view)
