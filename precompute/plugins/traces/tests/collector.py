"""Collector: what OpenTelemetry sends spans to, for tests."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@contextlib.contextmanager
def collecting() -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """Its address, and the spans that it got."""
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            bodies.append(
                gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            )
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def spans() -> list[Any]:
            requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
            return [
                s
                for r in requests
                for resource in r.resource_spans
                for within in resource.scope_spans
                for s in within.spans
            ]

        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", spans
        finally:
            server.shutdown()
            thread.join()
