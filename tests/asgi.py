"""An ASGI application called without a server: what a request gets, with no socket and no clock of
its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from precompute.store.wire import bodies
from tests.server import Reply, check_documented


def call(app: Any, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    """One request; a body that is not bytes is sent as JSON. ``content_type="…"`` becomes
    ``content-type``."""
    return asyncio.run(exchange(app, *scope_of(method, path, body, **headers)))


def scope_of(
    method: str, path: str, body: Any = None, **headers: str
) -> tuple[dict[str, Any], bytes]:
    """What a server hands an application for a request: the scope, and the body."""
    lines = [
        (name.replace("_", "-").encode(), value.encode("latin-1"))
        for name, value in headers.items()
    ]
    if body is not None and "content_type" not in headers:
        lines.append((b"content-type", bodies.JSON.encode()))
    sent = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    raw, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": raw,
        "raw_path": raw.encode(),
        "query_string": query.encode(),
        "headers": lines,
    }
    return scope, sent


async def exchange(
    app: Any, scope: Mapping[str, Any], body: bytes, hangs_up: asyncio.Event | None = None
) -> Reply:
    """One request; ``pieces`` among the reply's headers is how many messages the body came in. Its
    status is 0 where nothing was answered to a caller who hung up."""
    messages: list[Mapping[str, Any]] = []
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Mapping[str, Any]:
        if unread:
            return unread.pop()
        await (hangs_up or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Mapping[str, Any]) -> None:
        messages.append(message)

    await app(scope, receive, send)
    if not messages:
        return Reply(0, {}, b"")
    start, *parts = messages
    check_documented(scope["method"], scope["raw_path"].decode("latin-1"), start["status"])
    headers = {name.decode(): value.decode("latin-1") for name, value in start["headers"]} | {
        "pieces": str(len(parts))
    }
    return Reply(start["status"], headers, b"".join(bytes(part["body"]) for part in parts))


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(exposition: bytes) -> Samples:
    """Name and labels → value, of what ``/metrics`` answers."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
    }
