"""Spans: spans of OpenTelemetry, one for each request, under its caller's ``traceparent``, and
one for each piece of work below it; imported only where it is configured.

Spans go to the collector in a thread of the SDK's own, in batches; one that does not answer costs
spans, and no request waits.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from precompute.store.http.telemetry.access_log import route_of
from precompute.store.http.telemetry.instruments import TRACE

_Scope = dict[str, Any]
_App = Callable[[_Scope, Any, Any], Awaitable[None]]

_CARRIED = (b"traceparent", b"tracestate")
_PROPAGATOR = TraceContextTextMapPropagator()

MOST_BY_CALLERS_S = 100.0
"""Requests a second that are traced because their callers say so, in a process: a span costs as
much as a row, and who may ask for rows must not say what all of them cost."""


class Spans:
    """What a process makes spans with.

    Args:
        endpoint: of a collector, OTLP over HTTP: ``http://127.0.0.1:4318``.
        sample: share of the requests that are traced, of those whose caller did not decide.
        process: the name of this process.
    """

    def __init__(self, endpoint: str, sample: float, process: str) -> None:
        resource = Resource.create({"service.name": "precompute", "service.instance.id": process})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)),
            resource=resource,
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self.tracer = self._provider.get_tracer("precompute")

    def tell(self, trace: str, name: str, began_ns: int, ended_ns: int, rows: int) -> None:
        """A span that is over, under the one that ``trace`` (a ``traceparent``) names; times in ns
        since 1970."""
        within, attributes = _PROPAGATOR.extract({"traceparent": trace}), {"precompute.rows": rows}
        self.tracer.start_span(name, within, start_time=began_ns, attributes=attributes).end(
            ended_ns
        )

    def traced(self, app: _App) -> Tracing:
        """An ASGI application that traces what ``app`` answers."""
        return Tracing(app, self)

    def close(self) -> None:
        """Send what was not sent, for at most a few seconds."""
        self._provider.shutdown()


def spans_of(spec: Mapping[str, Any], process: str) -> Spans:
    """What a process makes spans with, as :class:`precompute.plugins.traces.keys.TracesKeys` has
    it."""
    return Spans(spec["endpoint"], spec["sample"], process)


class Tracing:
    """An ASGI application that traces what another one answers.

    Args:
        app: answers. What it puts into ``scope["stages"]`` (name → seconds, one after the other)
            become spans of their own; whatever it has other threads and processes do comes under a
            span named by :data:`precompute.store.http.telemetry.instruments.TRACE` .
        spans: of this process.
    """

    def __init__(self, app: _App, spans: Spans) -> None:
        self._app, self._tracer = app, spans.tracer
        self._room, self._room_at = MOST_BY_CALLERS_S, time.monotonic()

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        """One request."""
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _CARRIED
        }
        under = _PROPAGATOR.extract(carrier) if carrier else None
        if (
            under is not None
            and get_current_span(under).get_span_context().trace_flags.sampled
            and not self._has_room()
        ):
            await self._app(scope, receive, send)
            return
        route, view = route_of(scope)
        span = self._tracer.start_span(f"{scope['method']} {route}", under, SpanKind.SERVER)
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        started_ns, status = time.time_ns(), 0

        async def seen(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        within, carried = set_span_in_context(span), dict[str, str]()
        _PROPAGATOR.inject(carried, within)
        before = TRACE.set(carried["traceparent"])
        try:
            await self._app(scope, receive, seen)
        finally:
            TRACE.reset(before)
            attributes = {
                "http.request.method": scope["method"],
                "http.route": route,
                "http.response.status_code": status,
            }
            span.set_attributes(attributes | ({} if view is None else {"precompute.view": view}))
            if status >= 500 or not status:
                span.set_status(Status(StatusCode.ERROR))
            for stage, seconds in scope.get("stages", {}).items():
                ended_ns = started_ns + int(seconds * 1e9)
                self._tracer.start_span(stage, within, start_time=started_ns).end(ended_ns)
                started_ns = ended_ns
            span.end()

    def _has_room(self) -> bool:
        """Whether one more may be traced because its caller says so."""
        now = time.monotonic()
        self._room = min(MOST_BY_CALLERS_S, self._room + (now - self._room_at) * MOST_BY_CALLERS_S)
        self._room_at = now
        if self._room < 1:
            return False
        self._room -= 1
        return True
