"""Metrics: what the API counts, for Prometheus. Labels come from closed sets; never a key, never an unknown view's name."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from store.lookup import Answer, Lookup

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)


class Metrics:
    """One registry per application, so that two in a process (as in tests) count apart."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._registry = CollectorRegistry()
        self._rows = Counter("precompute_lookup_rows", "Rows answered", ["view", "status"], registry=self._registry)
        self._future = Counter(
            "precompute_future_rows",
            "Rows answered whose computed_at lies in the future: a clock was wrong, and their age is what is known",
            ["view"],
            registry=self._registry,
        )
        self._damaged = Counter(
            "precompute_damaged_rows",
            "Rows the online store has that fail their checksum: missing to who asked, or computed anew",
            ["view"],
            registry=self._registry,
        )
        lookup.on_damaged = lambda view, rows: self._damaged.labels(view).inc(rows)
        self._seconds = Histogram(
            "precompute_request_seconds", "Time to answer", ["route"], buckets=_BUCKETS, registry=self._registry
        )
        self._problems = Counter("precompute_problems", "Refused or failed requests", ["code"], registry=self._registry)
        self._age = Gauge(
            "precompute_view_oldest_row_age_seconds", "Age of the view's oldest row", ["view"], registry=self._registry
        )
        self._snapshot = Gauge("precompute_view_live_snapshot", "Number of the live snapshot", ["view"], registry=self._registry)
        self._coverage = Gauge("precompute_view_coverage", "Rows served / rows of the source", ["view"], registry=self._registry)
        self._row_counters: dict[tuple[str, str], Counter] = {}
        self._timers: dict[str, Histogram] = {}

    def answered(self, route: str, answer: Answer, seconds: float) -> None:
        """Count a lookup's rows by status, and its time."""
        view = answer.pointer.view.name
        statuses = answer.status_counts()
        for status, rows in statuses.items():
            counter = self._row_counters.get((view, status))
            if counter is None:
                counter = self._row_counters[view, status] = self._rows.labels(view, status)
            counter.inc(rows)
        future = answer.future_rows()
        if future:
            self._future.labels(view).inc(future)
        self.timed(route, seconds)

    def timed(self, route: str, seconds: float) -> None:
        """Observe a request's time."""
        timer = self._timers.get(route)
        if timer is None:
            timer = self._timers[route] = self._seconds.labels(route)
        timer.observe(seconds)

    def refused(self, code: str) -> None:
        """Count a problem."""
        self._problems.labels(code).inc()

    def render(self) -> bytes:
        """The exposition, with the views' freshness as it is now."""
        for view in self._lookup.views():
            self._snapshot.labels(view["view"]).set(view["snapshot"])
            if view["age_s"] is not None:
                self._age.labels(view["view"]).set(view["age_s"])
            if view["coverage"] is not None:
                self._coverage.labels(view["view"]).set(view["coverage"])
        return generate_latest(self._registry)
