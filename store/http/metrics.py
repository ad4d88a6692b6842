"""Metrics: what the API counts, and the exposition of all that a server's processes counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from precompute.store.answers.lookup import Answer, Lookup
from precompute.store.http.live_views import LiveViews
from precompute.store.http.telemetry import instruments as counted
from precompute.store.http.telemetry.exposition import CONTENT_TYPE, exposition, totals
from precompute.store.http.telemetry.instruments import Instrument, Meter, Number, Timer
from precompute.store.online.online_store import Pointer

__all__ = ["CONTENT_TYPE", "Metrics"]


class Metrics:
    """What an application counts.

    Args:
        lookup: whose views are reported.
        meter: what is counted with; by default one of this application's own, so that two in a
            process (as in tests) count apart.
        views: what is known of the lookup's views; shared with the page, if there is one.
        fallback_ready: whether a view's model stands behind its misses now.
    """

    def __init__(
        self,
        lookup: Lookup,
        meter: Meter | None = None,
        views: LiveViews | None = None,
        fallback_ready: Callable[[Pointer], bool] = lambda _: False,
    ) -> None:
        self._fallback_ready = fallback_ready
        self.meter = Meter() if meter is None else meter
        self._lookup = lookup
        self._views = LiveViews(lookup) if views is None else views
        lookup.on_damaged = lambda view, rows: self.meter.counter(counted.DAMAGED_ROWS, view).add(
            rows
        )
        lookup.miss_reports.semantic, lookup.miss_reports.cache_read = (
            self._semantic,
            self._miss_cache_read,
        )
        lookup.miss_reports.refreshed = lambda view, outcome: self.meter.counter(
            counted.REFRESHES, view, outcome
        ).add()
        self._whole: dict[str, Number] = {}
        self._one: dict[tuple[str, str], Number] = {}
        self._row_cache: dict[tuple[str, str, str], tuple[Number, Number]] = {}
        self._missed, self._dropped = (
            self.meter.counter(counted.CACHE, "l1", outcome) for outcome in ("miss", "dropped")
        )
        self._row_cache_bytes = self.meter.gauge(counted.CACHE_BYTES, "l1")
        self._routes: dict[str, Timer] = {}
        self._stages: dict[str, Timer] = {}

    def answered(
        self, route: str | None, answer: Answer, seconds: float, *, encoded: bool = True
    ) -> dict[str, float]:
        """Count a lookup's rows by status, source and reason, its time and that of its stages,
        which are given back: one after the other, in seconds.

        Args:
            route: of the API; None where the request's time is counted apart from its answers.
            answer: what was found.
            seconds: from the request's head on.
            encoded: whether what no other stage took is its encoding.
        """
        view = answer.pointer.view.name
        counts = answer.row_counts()
        if counts is None:
            whole = self._whole.get(view)
            if whole is None:
                whole = self._whole[view] = self.meter.counter(
                    counted.ROWS, view, "fresh", "store", ""
                )
            whole.add(len(answer.keys))
        else:
            for labels, rows in counts.items():
                self.meter.counter(counted.ROWS, view, *labels).add(rows)
        future = answer.future_rows()
        if future:
            self.meter.counter(counted.FUTURE_ROWS, view).add(future)
        if route is not None:
            self.timed(route, seconds)
        stages = {"read": answer.read_s, "verify": answer.verify_s}
        if answer.wait_s:
            stages["wait"] = answer.wait_s
        if encoded:
            stages["encode"] = max(0.0, seconds - answer.read_s - answer.verify_s - answer.wait_s)
        for stage, took in stages.items():
            self.stage(stage, took)
        return stages

    def read(self, view: str, status: str, seconds: float, read_s: float, verify_s: float) -> None:
        """Count a row of the store, as :meth:`answered` does: its time, and that of reading,
        verifying and, what is left, encoding it."""
        rows = self._one.get((view, status))
        if rows is None:
            rows = self._one[view, status] = self.meter.counter(
                counted.ROWS, view, status, "store", ""
            )
        rows.add()
        self.timed("row", seconds)
        self.stage("read", read_s)
        self.stage("verify", verify_s)
        self.stage("encode", max(0.0, seconds - read_s - verify_s))

    def row_cache_read(self, view: str, status: str, seconds: float, outcome: str) -> None:
        """Count a row of the store that was answered from the encoded ones, and its time;
        ``outcome``: a hit, or ``in_error``, since the store failed."""
        series = self._row_cache.get((view, status, outcome))
        if series is None:
            rows = self.meter.counter(counted.ROWS, view, status, "store", "")
            series = self._row_cache[view, status, outcome] = (
                rows,
                self.meter.counter(counted.CACHE, "l1", outcome),
            )
        for number in series:
            number.add()
        self.timed("row", seconds)

    def _miss_cache_read(self, requested: int, found: int) -> None:
        self.meter.counter(counted.CACHE, "miss_cache", "hit").add(found)
        self.meter.counter(counted.CACHE, "miss_cache", "miss").add(requested - found)

    def _semantic(self, view: str, outcomes: Mapping[str, int], similarity: float) -> None:
        self.meter.counter(counted.SEMANTIC_SIMILARITY, view).add(similarity)
        for outcome, rows in outcomes.items():
            if rows:
                self.meter.counter(counted.SEMANTIC_CACHE, view, outcome).add(rows)

    def not_cached(self, dropped: int | None, size_bytes: int) -> None:
        """Count a row that was not among the encoded ones, and is from now on, and those it took
        the place of (None: it is too large); all take so many bytes."""
        self._missed.add()
        if dropped:
            self._dropped.add(dropped)
        self._row_cache_bytes.set(size_bytes)

    def serves_until(self, view: str, until_s: float) -> None:
        """Until when (s since 1970) a row of a view that is cached here may be served while the
        store fails."""
        self.meter.gauge(counted.CACHE_SERVES_UNTIL, view).set(until_s)

    def serves_cached(self, now_s: float) -> bool:
        """Whether any process of the server has a row that it may serve now while the store fails.

        Raises:
            OSError: what the processes counted cannot be read.
        """
        untils = totals(self.meter)[counted.CACHE_SERVES_UNTIL.name].values()
        return any(until_s >= now_s for (until_s,) in untils)

    def timed(self, route: str, seconds: float) -> None:
        """Observe a request's time."""
        timer = self._routes.get(route)
        if timer is None:
            timer = self._routes[route] = self.meter.timer(counted.REQUEST_SECONDS, route)
        timer.observe(seconds)

    def stage(self, stage: str, seconds: float) -> None:
        """Observe the time of one stage of a request: ``read``, ``verify``, ``wait``, ``search`` or
        ``encode``."""
        timer = self._stages.get(stage)
        if timer is None:
            timer = self._stages[stage] = self.meter.timer(counted.STAGE_SECONDS, stage)
        timer.observe(seconds)

    def refused(self, code: str) -> None:
        """Count a problem."""
        self.meter.counter(counted.PROBLEMS, code).add()

    def render(self) -> bytes:
        """The exposition, with the views' freshness as it is now, or as it was last known where the
        store does not answer.

        Raises:
            OSError: what the processes counted cannot be read.
        """
        seen = self._views.look()
        now: dict[Instrument, dict[tuple[str, ...], float]] = {
            counted.STORE_UP: {(): float(seen.store_answers)}
        }

        def tell(instrument: Instrument, view: str, value: float | None) -> None:
            if value is not None:
                now.setdefault(instrument, {})[(view,)] = value

        for pointer in seen.pointers:
            name = pointer.view.name
            tell(counted.VIEW_UP, name, float(name not in seen.unreadable))
            tell(counted.LIVE_SNAPSHOT, name, pointer.snapshot)
            tell(counted.EPOCH, name, pointer.epoch)
            tell(counted.OLDEST_AGE, name, self._lookup.oldest_age_s(pointer))
            tell(counted.TTL, name, pointer.view.ttl_s)
            tell(counted.STALE_FOR, name, pointer.view.stale_for_s)
            tell(counted.VIEW_ROWS, name, pointer.rows)
            tell(
                counted.COVERAGE,
                name,
                pointer.rows / pointer.source_rows if pointer.source_rows else None,
            )
            tell(counted.DEGRADED, name, float(seen.trouble(pointer) is not None))
            account = seen.accounts.get(name)
            if account is not None and account.at_us:
                tell(
                    counted.CHECKED_AGE, name, max(0.0, self._lookup.now_s() - account.at_us / 1e6)
                )
            if pointer.view.fallback and self._lookup.fallback is not None:
                tell(counted.FALLBACK_UP, name, float(self._fallback_ready(pointer)))
            for rare in (counted.DAMAGED_ROWS, counted.FUTURE_ROWS):
                # from 0 on: of a counter that is seen first when it has counted, Prometheus takes
                # that for no increase
                self.meter.counter(rare, name)
        for name in seen.unreadable:
            tell(counted.VIEW_UP, name, 0.0)
        return exposition(self.meter, now)
