"""Access log: a line of JSON for each request, written in batches. It has no key, no query and no
token: keys are people's as often as not, and a hash of one is found by trying them all."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from precompute.store.http.routes import every_route

log = logging.getLogger(__name__)

_FLUSH_LINES = 500
_Scope = dict[str, Any]
_App = Callable[[_Scope, Any, Any], Awaitable[None]]


class AccessLog:
    """An ASGI application that writes down what another one answers: ``at`` (when it was sent, ISO
    8601 in UTC), ``method``, ``route`` (as it is documented, not as it was requested) and ``view``,
    ``status`` (0 where the client went before there was one), ``bytes`` of the body, ``seconds``
    from the request's head to the last of the answer, ``client`` (its address), ``token`` (the name
    of the one it came with), ``worker``.

    Args:
        app: answers.
        path: the file, appended to and, when it was renamed or removed, begun again; None: the
            standard error.
        worker: the name of this process.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, app: _App, path: Path | None, worker: str) -> None:
        self._app, self._path, self._worker = app, path, worker
        self._lines: list[bytes] = []
        self._failing = False
        self._torn = False
        """Whether the last write ended within a line."""
        self._file = 2 if path is None else self._opened(path)

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        """One request."""
        started = time.perf_counter()
        status = size = 0

        async def counted(message: dict[str, Any]) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            route, view = route_of(scope)
            client, at = scope.get("client"), datetime.now(UTC).isoformat(timespec="milliseconds")
            line = {
                "at": at.replace("+00:00", "Z"),
                "method": scope["method"],
                "route": route,
                "view": view,
                "status": status,
                "bytes": size,
                "seconds": round(time.perf_counter() - started, 6),
                "client": None if client is None else client[0],
                "token": scope.get("token"),
                "worker": self._worker,
            }
            self._lines.append(json.dumps(line).encode())
            if len(self._lines) >= _FLUSH_LINES:
                self.flush()

    def flush(self) -> None:
        """Write the lines in memory; those that cannot be written are lost, which is logged
        once."""
        lines, self._lines = self._lines, []
        try:
            if self._path is not None and not _same(self._path, self._file):
                moved, self._file, self._torn = self._file, self._opened(self._path), False
                os.close(moved)
            if lines:
                # one write, appended: workers share the file
                text = b"\n" * self._torn + b"\n".join(lines) + b"\n"
                written = os.write(self._file, text)
                self._torn = written < len(text)
                if self._torn:
                    # as a disk does that is full
                    raise OSError(errno.ENOSPC, f"{written} of {len(text)} bytes were written")
            self._failing = False
        except OSError as exc:
            if not self._failing:
                self._failing = True
                log.error("the access log cannot be written: %s", exc)

    def _opened(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)


def _same(path: Path, file: int) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(file)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


OTHER = "other"
"""What is no route of the API."""


def route_of(scope: dict[str, Any]) -> tuple[str, str | None]:
    """(route, view) of an ASGI scope: ``("/v1/views/{view}/rows/{key}", "numbers")``; the view, or
    the service, as it was requested, cut at 63 characters."""
    route, name, _ = every_route().find(scope["raw_path"])
    view = None if name is None else unquote_to_bytes(name).decode(errors="replace")[:63]
    return route or OTHER, view
