"""Route: which of the API's a request asks for, as logs and traces name it: without the key, which is a person's as often as not."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

_VIEWS = b"/v1/views/"
_OF_A_VIEW = {b"lookup": "/v1/views/{view}/lookup", b"search": "/v1/views/{view}/search"}
_FIXED = {path.encode(): path for path in ("/", "/v1/views", "/v1/lookup", "/livez", "/readyz", "/metrics", "/openapi.json")}
OTHER = "other"
"""What is no route of the API."""


def route_of(scope: dict[str, Any]) -> tuple[str, str | None]:
    """(route, view) of an ASGI scope: ``("/v1/views/{view}/rows/{key}", "numbers")``; the view as it was asked for, cut at 63 characters."""
    path: bytes = scope["raw_path"]
    if not path.startswith(_VIEWS):
        return _FIXED.get(path, OTHER), None
    name, _, rest = path[len(_VIEWS) :].partition(b"/")
    view = unquote_to_bytes(name).decode(errors="replace")[:63]
    if rest.startswith(b"rows/"):
        return "/v1/views/{view}/rows/{key}", view
    route = _OF_A_VIEW.get(rest)
    return (OTHER, None) if route is None else (route, view)
